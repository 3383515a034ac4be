"""Batches: every clip once, never over budget, the same order wherever and whenever it is asked for."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from myxtts.config import CONDITIONING_TOKENS, NUM_STOPS, SAMPLE_RATE
from myxtts.data.batches import Batches, Cursor, mean_clips, packed_tokens
from myxtts.data.store import Rows
from myxtts.errors import DatasetError


def speech_like_tokens(num_clips: int, seed: int = 0) -> Rows:
    """Packed tokens of clips as LJSpeech has them: 1.1 to 10.1 s, mean 6.6, text in proportion."""
    random = np.random.default_rng(seed)
    seconds = np.clip(random.normal(6.8, 2.2, num_clips), 1.1, 10.1)
    num_ids = (seconds * random.normal(8.5, 1.0, num_clips)).astype(np.int64)
    return packed_tokens(num_ids, (seconds * SAMPLE_RATE).astype(np.int64))


def test_packed_tokens_by_hand() -> None:
    # 1024 samples: frames at 0, 256, …, 1024 are five, which are two codes.
    assert packed_tokens(np.array([10, 10, 10]), np.array([1023, 1024, 0])).tolist() == [
        CONDITIONING_TOKENS + 12 + 1 + NUM_STOPS,
        CONDITIONING_TOKENS + 12 + 2 + NUM_STOPS,
        CONDITIONING_TOKENS + 12 + 1 + NUM_STOPS,
    ]


@settings(deadline=None, max_examples=60)
@given(
    num_clips=st.integers(1, 120),
    batch_size=st.integers(1, 33),
    world_size=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 1000),
)
@example(num_clips=1, batch_size=16, world_size=4, seed=0, epoch=0)
@example(num_clips=64, batch_size=16, world_size=4, seed=0, epoch=0)
def test_every_clip_once_per_epoch_over_all_ranks(num_clips, batch_size, world_size, seed, epoch) -> None:
    tokens = speech_like_tokens(num_clips, seed % 97)
    seen: list[int] = []
    for rank in range(world_size):
        batches = Batches(tokens, batch_size, seed, rank, world_size)
        clips, weights = batches.epoch(epoch)
        assert clips.shape == weights.shape == (batches.num_batches, batch_size)
        assert set(weights.ravel().tolist()) <= {0.0, 1.0}
        assert tokens[clips].sum(axis=1).max() <= batches.budget
        seen += clips[weights == 1].tolist()
    assert sorted(seen) == list(range(num_clips))
    assert batches.num_batches * batch_size * world_size - num_clips < batch_size * world_size


@settings(deadline=None, max_examples=25)
@given(
    tokens=st.lists(st.integers(37, 900), min_size=1, max_size=60),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 3),
)
@example(tokens=[40] * 20 + [900], batch_size=4, world_size=1)
@example(tokens=[900] + [37] * 3, batch_size=2, world_size=1)
def test_any_lengths_never_exceed_the_budget_in_fifty_epochs(tokens, batch_size, world_size) -> None:
    num_tokens = np.array(tokens, np.int64)
    batches = Batches(num_tokens, batch_size, 1234, 0, world_size)
    for epoch in range(50):
        clips, _ = batches.epoch(epoch)
        assert num_tokens[clips].sum(axis=1).max() <= batches.budget


@pytest.mark.parametrize(
    ("num_clips", "batch_size", "world_size"),
    [(200, 4, 1), (200, 16, 1), (500, 8, 2), (1000, 32, 1), (1024, 16, 4), (3000, 4, 1), (13100, 16, 1)],
)
def test_padding_is_at_most_two_per_cent(num_clips: int, batch_size: int, world_size: int) -> None:
    tokens = speech_like_tokens(num_clips)
    batches = Batches(tokens, batch_size, 1234, world_size - 1, world_size)
    num_epochs = 50 if num_clips <= 500 else 10 if num_clips < 5000 else 3
    full = num_clips % (batch_size * world_size) == 0
    for epoch in range(num_epochs):
        clips, weights = batches.epoch(epoch)
        totals = tokens[clips].sum(axis=1)
        assert totals.max() <= batches.budget
        useful = (tokens[clips] * weights).sum(axis=1)  # clips that only fill up a batch train nothing
        assert batches.padding(epoch) == pytest.approx(1 - useful.mean() / batches.budget)
        assert batches.padding(epoch) <= 0.02
        if full:
            assert weights.all()


def test_the_order_is_a_pure_function() -> None:
    tokens = speech_like_tokens(300)
    first = Batches(tokens, 8, 5, 1, 2)
    for epoch in (3, 0, 7):  # asked in another order, by another object
        again = Batches(tokens.copy(), 8, 5, 1, 2).epoch(epoch)
        assert all(np.array_equal(one, two) for one, two in zip(first.epoch(epoch), again, strict=True))


def test_seed_epoch_and_rank_change_the_order() -> None:
    tokens = speech_like_tokens(300)
    orders = [
        Batches(tokens, 8, seed, rank, 2).epoch(epoch)[0].tobytes()
        for seed, epoch, rank in itertools.product((1, 2), (0, 1), (0, 1))
    ]
    assert len(set(orders)) == len(orders)


def test_clips_meet_other_clips_in_the_next_epoch() -> None:
    batches = Batches(speech_like_tokens(400), 8, 1)

    def pairs(epoch: int) -> set[tuple[int, int]]:
        clips, weights = batches.epoch(epoch)
        groups = [sorted(row[weight == 1].tolist()) for row, weight in zip(clips, weights, strict=True)]
        return {pair for group in groups for pair in itertools.combinations(group, 2)}

    assert len(pairs(0) & pairs(1)) < 0.1 * len(pairs(0))


def test_long_and_short_clips_come_at_any_time() -> None:
    """Batches balanced by length must not also be sorted by it: early and late batches are alike."""
    tokens = speech_like_tokens(2000)
    clips, _ = Batches(tokens, 8, 1).epoch(0)
    halves = tokens[clips].std(axis=1)
    assert abs(halves[:125].mean() / halves[125:].mean() - 1) < 0.1
    assert abs(tokens[clips[:, 0]].mean() / tokens.mean() - 1) < 0.1  # nor are clips within a batch


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 3), st.integers(0, 30))
def test_a_cursor_continues_exactly(num_clips: int, batch_size: int, world_size: int, taken: int) -> None:
    batches = Batches(speech_like_tokens(num_clips), batch_size, 7, 0, world_size)
    whole = list(itertools.islice(batches.plans(Cursor()), taken + 12))
    cursor = whole[taken - 1].after if taken else Cursor()
    fresh = Batches(speech_like_tokens(num_clips), batch_size, 7, 0, world_size)
    for old, new in zip(whole[taken:], fresh.plans(cursor), strict=False):
        assert np.array_equal(old.clips, new.clips)
        assert np.array_equal(old.weights, new.weights)
        assert old.after == new.after


def test_clips_of_a_batch_on_average_are_those_that_count() -> None:
    assert [mean_clips(number, 4) for number in (4, 8, 5, 3)] == [4, 4, 2.5, 3]


def test_cursors_count_batches_and_epochs() -> None:
    batches = Batches(speech_like_tokens(20), 8, 7)
    after = [plan.after for plan in itertools.islice(batches.plans(Cursor()), 4)]
    assert after == [Cursor(0, 1), Cursor(0, 2), Cursor(1, 0), Cursor(1, 1)]
    beyond = next(batches.plans(Cursor(0, 99)))  # the batch size was raised since: the epoch counts as done
    assert beyond.after == Cursor(1, 1)


def test_nothing_to_batch_and_bad_ranks() -> None:
    with pytest.raises(DatasetError):
        Batches(np.zeros(0, np.int64), 4, 0)
    for rank, world_size in ((1, 1), (-1, 2), (2, 2)):
        with pytest.raises(ValueError, match="rank"):
            Batches(speech_like_tokens(10), 4, 0, rank, world_size)


def test_every_rank_knows_what_all_of_them_train_on_at_the_same_time() -> None:
    tokens = speech_like_tokens(50)
    ranks = [Batches(tokens, 4, 3, rank, 3) for rank in range(3)]
    plans = [list(itertools.islice(batches.plans(Cursor()), batches.num_batches + 2)) for batches in ranks]
    for together in zip(*plans, strict=True):
        for plan in together:
            assert np.array_equal(plan.peers, [other.clips for other in together])
            assert np.array_equal(plan.peer_weights, [other.weights for other in together])
    assert [plan.epoch for plan in plans[0]] == [0] * ranks[0].num_batches + [1, 1]
