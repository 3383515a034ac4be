"""Batches: every clip once, never over budget, the same order wherever and whenever it is asked for."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from myxtts.config import CONDITIONING_TOKENS, HOP_SAMPLES, NUM_STOPS, SAMPLE_RATE, DataSettings
from myxtts.data.batches import Batches, BatchPlan, Cursor, HostBatch, packed_tokens
from myxtts.data.clips import ClipSet
from myxtts.data.store import Rows, Store, StoreWriter
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
    num_epochs = 50 if num_clips < 5000 else 3
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


def test_padding_of_many_small_corpora() -> None:
    worst = max(Batches(speech_like_tokens(200, seed), 4, seed).padding(0) for seed in range(8))
    assert worst <= 0.02


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


SETTINGS = DataSettings(batch_size=5, max_mel_frames=64, max_text_length=40)


@pytest.fixture
def clips(tmp_path: Path) -> ClipSet:
    """Forty clips over thirty sentences, as `prepare` would hand them over."""
    random = np.random.default_rng(3)

    def store(name: str, dtype: type, count: int, longest: int) -> Store:
        writer = StoreWriter(tmp_path / name, np.arange(count, dtype=np.uint64))
        rows = [random.integers(1, 30000, random.integers(1, longest + 1)).astype(dtype) for _ in range(count)]
        rows[0] = random.integers(1, 30000, longest).astype(dtype)
        writer.append(range(count), rows)
        writer.finish({})
        return Store(tmp_path / name, dtype)

    return ClipSet(
        audio=store("audio", np.int16, 50, 64 * HOP_SAMPLES - 1),
        ids=store("ids", np.int32, 30, 40),
        audio_rows=random.permutation(50)[:40],
        ids_rows=random.integers(0, 30, 40),
        speakers=random.integers(0, 4, 40),
        languages=random.integers(0, 18, 40),
        names=[f"clip{number}" for number in range(40)],
    )


def check_gathered(batch: HostBatch, clips: ClipSet, plan: BatchPlan) -> None:
    for slot, clip in enumerate(plan.clips.tolist()):
        pcm, ids = clips.audio[clips.audio_rows[clip]], clips.ids[clips.ids_rows[clip]]
        assert batch.num_samples[slot] == len(pcm)
        assert np.array_equal(batch.pcm[slot, : len(pcm)], pcm)
        assert batch.num_ids[slot] == len(ids)
        assert batch.ids[slot].tolist() == ids.tolist() + [0] * (40 - len(ids))
        assert (batch.speakers[slot], batch.languages[slot]) == (clips.speakers[clip], clips.languages[clip])
    assert batch.clips.tolist() == plan.clips.tolist()
    assert batch.weights.tolist() == plan.weights.tolist()


def test_one_host_batch_used_again_never_mixes_clips(clips: ClipSet) -> None:
    batch = HostBatch(SETTINGS)
    batches = Batches(packed_tokens(clips.num_ids, clips.num_samples), 5, 1)
    for plan in itertools.islice(batches.plans(Cursor()), 40):
        batch.gather(clips, plan)
        check_gathered(batch, clips, plan)


def test_the_longest_clip_fills_its_slot(clips: ClipSet) -> None:
    longest = int(clips.num_samples.argmax())
    plan = BatchPlan(np.array([longest] * 5), np.ones(5, np.float32), Cursor())
    batch = HostBatch(SETTINGS)
    batch.gather(clips, plan)
    check_gathered(batch, clips, plan)


def test_a_selection_gathers_its_own_clips(clips: ClipSet) -> None:
    chosen = np.array([30, 2, 11, 5, 39])
    plan = BatchPlan(np.arange(5), np.ones(5, np.float32), Cursor())
    batch = HostBatch(SETTINGS)
    batch.gather(clips.select(chosen), plan)
    check_gathered(batch, clips.select(chosen), plan)
    assert clips.select(chosen).names == [clips.names[at] for at in chosen]
    assert np.array_equal(batch.num_samples, clips.num_samples[chosen])


def test_a_host_batch_is_one_block_of_aligned_arrays() -> None:
    batch = HostBatch(SETTINGS)
    start = batch.memory.__array_interface__["data"][0]
    for name in ("pcm", "ids", "num_samples", "num_ids", "speakers", "languages", "clips", "weights"):
        array = getattr(batch, name)
        offset = array.__array_interface__["data"][0] - start
        assert offset % 64 == 0
        assert offset >= 0
        assert offset + array.nbytes <= batch.memory.nbytes
        assert np.shares_memory(array, batch.memory)
        array[:] = len(name)
    assert (batch.ids == 3).all()  # nothing overlaps
    assert (batch.pcm == 3).all()


def test_without_a_driver_memory_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("myxtts.devices._has_nvidia_driver", lambda: False)
    assert not HostBatch(SETTINGS).memory.any()


@pytest.mark.gpu
def test_memory_is_pinned() -> None:
    import torch

    batch = HostBatch(SETTINGS)
    assert torch.from_numpy(batch.memory).is_pinned()
    assert torch.from_numpy(batch.pcm).is_pinned()
    on_device = torch.from_numpy(batch.memory).to("cuda", non_blocking=True)
    assert on_device.numel() == batch.memory.nbytes


def test_a_prepared_corpus_becomes_batches(make_corpus: Callable[..., Path], run_prepare) -> None:
    train = run_prepare(make_corpus(), val_fraction=0.0).train
    data = DataSettings(batch_size=4)
    batches = Batches(packed_tokens(train.num_ids, train.num_samples), data.batch_size, 1)
    batch = HostBatch(data)
    for plan in itertools.islice(batches.plans(Cursor()), batches.num_batches):
        batch.gather(train, plan)
        for slot, clip in enumerate(plan.clips.tolist()):
            assert np.array_equal(batch.pcm[slot, : batch.num_samples[slot]], train.audio[train.audio_rows[clip]])
