"""The order: every clip once per epoch within the budget, whatever ranks, windows and resumed runs there are."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, cast

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from myxtts.config import CONDITIONING_TOKENS, NUM_STOPS, SAMPLE_RATE
from myxtts.data import order
from myxtts.data.clips import ClipSet, Mixture
from myxtts.data.order import Batches, BatchPlan, Cursor, mean_clips, packed_tokens
from myxtts.data.store import Rows
from myxtts.errors import DatasetError


def speech_like_tokens(num_clips: int, seed: int = 0) -> Rows:
    """Packed tokens of clips as LJSpeech has them: 1.1 to 10.1 s, mean 6.6, text in proportion."""
    random = np.random.default_rng(seed)
    seconds = np.clip(random.normal(6.8, 2.2, num_clips), 1.1, 10.1)
    num_ids = (seconds * random.normal(8.5, 1.0, num_clips)).astype(np.int64)
    return packed_tokens(num_ids, (seconds * SAMPLE_RATE).astype(np.int64))


def trained(plans: list[BatchPlan]) -> list[int]:
    """The clips with weight of these batches, in their order."""
    return [clip for plan in plans for clip in plan.clips[plan.weights == 1].tolist()]


def test_packed_tokens_by_hand() -> None:
    # 1024 samples: frames at 0, 256, …, 1024 are five, which are two codes.
    assert packed_tokens(np.array([10, 10, 10]), np.array([1023, 1024, 0])).tolist() == [
        CONDITIONING_TOKENS + 12 + 1 + NUM_STOPS,
        CONDITIONING_TOKENS + 12 + 2 + NUM_STOPS,
        CONDITIONING_TOKENS + 12 + 1 + NUM_STOPS,
    ]


# One window


@settings(deadline=None, max_examples=20)
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
        batches = Batches(tokens, batch_size, seed, rank, world_size, num_epochs=epoch + 1)
        plans = list(batches.plans(Cursor(epoch)))
        assert len(plans) == -(-batches.num_batches // world_size)
        assert {len(plan.clips) for plan in plans} == {batch_size}
        assert {weight for plan in plans for weight in plan.weights.tolist()} <= {0.0, 1.0}
        seen += trained(plans)
    assert sorted(seen) == list(range(num_clips))
    assert batches.num_batches == -(-num_clips // batch_size)


def test_this_order_never_changes() -> None:
    """A run that is resumed with another version must go on with the same batches."""
    known = [
        (300, 8, 1, 0, 1896, "eabf7ca6ec469ac1"),
        (13100, 32, 7, 1, 7728, "250c2732ca7d691b"),
        (7000, 4, 2, 5, 976, "9f3d225227b718a2"),
    ]
    for num_clips, batch_size, seed, epoch, budget, digest in known:
        batches = Batches(speech_like_tokens(num_clips), batch_size, seed)
        clips, weights = batches.epoch(epoch)
        assert (batches.budget, xxhash.xxh64_hexdigest(clips.tobytes() + weights.tobytes())) == (budget, digest)


@settings(deadline=None, max_examples=25)
@given(
    tokens=st.lists(st.integers(37, 900), min_size=1, max_size=60),
    batch_size=st.integers(1, 9),
)
@example(tokens=[40] * 20 + [900], batch_size=4)
@example(tokens=[900] + [37] * 3, batch_size=2)
def test_any_lengths_never_exceed_the_budget(tokens, batch_size) -> None:
    num_tokens = np.array(tokens, np.int64)
    batches = Batches(num_tokens, batch_size, 1234)
    for epoch in range(20):
        clips, _ = batches.epoch(epoch)
        assert num_tokens[clips].sum(axis=1).max() <= batches.budget


@pytest.mark.parametrize(
    ("num_clips", "batch_size", "num_epochs"),
    [(200, 4, 30), (500, 8, 30), (1024, 16, 10), (3000, 4, 5), (13100, 16, 3)],
)
def test_padding_is_at_most_two_per_cent(num_clips: int, batch_size: int, num_epochs: int) -> None:
    tokens = speech_like_tokens(num_clips)
    batches = Batches(tokens, batch_size, 1234)
    for epoch in range(num_epochs):
        clips, weights = batches.epoch(epoch)
        assert tokens[clips].sum(axis=1).max() <= batches.budget
        useful = (tokens[clips] * weights).sum(axis=1)  # clips that only fill up a batch train nothing
        assert batches.padding(epoch) == pytest.approx(1 - useful.mean() / batches.budget)
        assert batches.padding(epoch) <= 0.02
        assert weights.all() or num_clips % batch_size


def test_seed_and_epoch_alone_change_the_order() -> None:
    tokens = speech_like_tokens(300)

    def order(seed: int, epoch: int) -> bytes:
        return b"".join(array.tobytes() for array in Batches(tokens.copy(), 8, seed).epoch(epoch))

    choices = list(itertools.product((1, 2), (0, 1)))
    orders = [order(*choice) for choice in choices]
    assert len(set(orders)) == len(orders)
    assert [order(*choice) for choice in reversed(choices)] == orders[::-1]


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


def test_mean_clips_of_a_batch_counts_only_those_that_train() -> None:
    assert [mean_clips(number, 4) for number in (4, 8, 5, 3)] == [4, 4, 2.5, 3]


def test_cursors_count_batches_and_epochs() -> None:
    batches = Batches(speech_like_tokens(20), 8, 7)
    after = [plan.after for plan in itertools.islice(batches.plans(Cursor()), 4)]
    assert after == [Cursor(0, 1), Cursor(0, 2), Cursor(1, 0), Cursor(1, 1)]
    beyond = next(batches.plans(Cursor(0, 99)))  # the batch size was raised since: the epoch counts as done
    assert beyond.after == Cursor(1, 1)


def test_ranks_take_turns_and_a_step_may_go_on_with_the_next_epoch() -> None:
    tokens = speech_like_tokens(50)
    alone = list(itertools.islice(Batches(tokens, 8, 7).plans(Cursor()), 3 * 7))
    for rank in range(3):
        plans = list(itertools.islice(Batches(tokens, 8, 7, rank, 3).plans(Cursor()), 7))
        assert [plan.after for plan in plans] == [plan.after for plan in alone[2::3]]
        for plan, one in zip(plans, alone[rank::3], strict=True):
            assert np.array_equal(plan.clips, one.clips) and plan.epoch == one.epoch
            assert np.array_equal(plan.peers[rank], plan.clips)
    assert plans[2].after == Cursor(1, 2) and plans[2].epoch == 1


def test_nothing_to_batch_and_bad_ranks() -> None:
    with pytest.raises(DatasetError):
        Batches(np.zeros(0, np.int64), 4, 0)
    for rank, world_size in ((1, 1), (-1, 2), (2, 2)):
        with pytest.raises(ValueError, match="rank"):
            Batches(speech_like_tokens(10), 4, 0, rank, world_size)


# Windows


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too small for batches of equal length, so that these have any."""
    monkeypatch.setattr(order, "SHARDS_PER_WINDOW", 2)
    monkeypatch.setattr(order, "BATCHES_PER_WINDOW", 0)
    monkeypatch.setattr(Batches, "_find_budget", lambda _: 10**6)


def in_shards(num_clips: int, num_shards: int, seed: int) -> Rows:
    """Shards of different sizes, not in order, and with gaps between their numbers."""
    random = np.random.default_rng(seed)
    return 3 * random.choice(num_shards, num_clips, p=random.dirichlet(np.full(num_shards, 4.0)))


@pytest.mark.usefixtures("small_windows")
@settings(deadline=None, max_examples=30)
@given(data=st.data(), num_clips=st.integers(1, 400), num_shards=st.integers(1, 12), batch_size=st.integers(1, 17))
def test_every_clip_once_however_often_a_run_is_resumed_on_other_ranks(
    data: st.DataObject, num_clips: int, num_shards: int, batch_size: int
) -> None:
    """The whole of two epochs, by one process, against parts by any number of ranks on any hosts."""
    seed, first = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(0, 1000))
    tokens, shards = speech_like_tokens(num_clips, seed % 97), in_shards(num_clips, num_shards, seed % 89)
    whole = list(Batches(tokens, batch_size, seed, shards=shards, num_epochs=first + 2).plans(Cursor(first)))
    for epoch in (first, first + 1):
        of_epoch = [plan for plan in whole if plan.epoch == epoch]
        assert sorted(trained(of_epoch)) == list(range(num_clips))
        assert [plan.window for plan in of_epoch] == sorted(plan.window for plan in of_epoch)
        padded = {plan.window for plan in of_epoch if not plan.weights.all()}
        assert padded <= {of_epoch[-1].window}, "only the end of an epoch is padded"
    cursor, taken = Cursor(first), 0
    while taken < len(whole):
        world_size, steps = data.draw(st.integers(1, 5)), data.draw(st.integers(1, len(whole)))
        ranks = [
            list(itertools.islice(batches.plans(cursor), steps))
            for rank in range(world_size)
            for batches in [Batches(tokens, batch_size, seed, rank, world_size, None, shards, first + 2)]
        ]
        for step in zip(*ranks, strict=True):
            for plan in step:
                if taken < len(whole):
                    assert np.array_equal(plan.clips, whole[taken].clips)
                    assert np.array_equal(plan.weights, whole[taken].weights)
                    assert (plan.epoch, plan.window) == (whole[taken].epoch, whole[taken].window)
                    taken += 1
                else:
                    assert not plan.weights.any()
            assert {plan.after for plan in step} == {whole[taken - 1].after}
        cursor = whole[taken - 1].after


@pytest.mark.parametrize("batch_size", [1, 2, 5, 16])
def test_windows_stay_within_the_budget_and_their_padding_is_small(batch_size: int) -> None:
    tokens, shards = speech_like_tokens(1500 * batch_size), in_shards(1500 * batch_size, 100, 1)
    batches = Batches(tokens, batch_size, 1, shards=shards)
    for epoch in range(5):
        clips, _ = batches.epoch(epoch)
        assert tokens[clips].sum(axis=1).max() <= batches.budget
        assert batches.padding(epoch) <= 0.02 or batch_size < 5
    assert next(batches.plans(Cursor(1, 1499))).window > 3, "there are windows"


def test_shards_with_longer_clips_than_others_are_spread_over_the_windows() -> None:
    shards = np.arange(16000) // 200
    tokens = speech_like_tokens(16000) + 6 * shards  # from 250 to 720 in the mean
    batches = Batches(tokens, 8, 1, shards=shards)
    assert max(batches.padding(epoch) for epoch in range(5)) <= 0.02


@pytest.mark.usefixtures("small_windows")
def test_a_window_reads_few_shards_and_they_are_known_ahead() -> None:
    shards = np.arange(2000) // 100
    batches = Batches(speech_like_tokens(2000), 16, 5, shards=shards)
    read = dict[tuple[int, int], set[int]]()
    for plan in itertools.islice(batches.plans(Cursor()), 2 * batches.num_batches):
        read.setdefault((plan.epoch, plan.window), set()).update(shards[plan.clips[plan.weights > 0]].tolist())
    assert len(read) == 20 and max(map(len, read.values())) == 4, "two, and what two others left over"
    for place, following in itertools.pairwise(read):
        assert set(batches.shards_from(*place)) == read[place] | read[following]
        assert set(batches.shards_from(*place)[: len(read[place])]) == read[place], "first what is read first"
    last = Batches(speech_like_tokens(2000), 16, 5, shards=shards, num_epochs=2)
    assert set(last.shards_from(*following)) == read[following], "nothing follows"
    assert len(set(map(frozenset, read.values()))) > 15, "other shards meet in the next epoch"


@pytest.mark.usefixtures("small_windows")
def test_only_the_windows_that_are_read_are_arranged(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(speech_like_tokens(20_000), 16, 5, shards=np.arange(20_000) // 100)
    arranged, arrange = [], Batches._arrange

    def count(self: Batches, drawn: Rows, *place: int) -> Any:
        arranged.append(len(drawn))
        return arrange(self, drawn, *place)

    monkeypatch.setattr(Batches, "_arrange", count)
    middle = batches.num_batches // 2
    assert next(batches.plans(Cursor(3, middle))).after == Cursor(3, middle + 1)
    assert sum(arranged) < 1000


@pytest.mark.usefixtures("small_windows")
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 999), weight=st.sampled_from([0.3, 1.0, 2.5]), temperature=st.sampled_from([1.0, 2.0]))
def test_a_mixture_in_windows_has_the_clips_of_the_mixture(seed: int, weight: float, temperature: float) -> None:
    random = np.random.default_rng(seed)
    corpora, languages = np.repeat([0, 1], [600, 40]), np.sort(random.choice(3, 640, p=[0.8, 0.15, 0.05]))
    every = {field: np.arange(640) for field in ("audio_rows", "ids_rows", "speakers")}
    clips = ClipSet(
        cast(Any, None), cast(Any, None), **every, languages=languages, corpora=corpora, names=[""] * 640
    )
    mixture = Mixture(clips, [1.0, 4 * weight], temperature)
    shards = np.where(corpora == 0, np.arange(640) // 60, 10)
    tokens = speech_like_tokens(640, seed)
    batches = Batches(tokens, 8, seed, mixture=mixture, shards=shards)
    for epoch in range(4):
        plans = list(itertools.islice(batches.plans(Cursor(epoch)), batches.num_batches))
        assert Counter(trained(plans)) == Counter(mixture.clips(seed, epoch).tolist())
        windows = {plan.window for plan in plans if (shards[plan.clips] == 10).any()}
        assert len(windows) > 1 or weight < 1, "turns of the same clip come in different windows"
