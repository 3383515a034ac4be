"""Batches: every clip once within the budget, crops inside their clips, and memory that never mixes clips."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_fixtures import SEED, SHORT, Corpus

from myxtts.config import HOP_SAMPLES, NUM_STOPS, SAMPLE_RATE, num_codes_of
from myxtts.data import order
from myxtts.data.batches import (
    ALIGNMENT_BYTES,
    FRAME_MULTIPLE,
    MAX_CROP_FRAMES,
    SEGMENT_CODES,
    Gatherer,
    GatherJob,
    HostBatch,
    References,
    crops,
    fit,
    frame_budget,
    host_layout,
    segments,
)
from myxtts.data.clips import ClipSet
from myxtts.data.order import Batches, BatchPlan, Cursor, packed_tokens
from myxtts.data.store import Joined, Rows, Store

DATA = replace(SHORT, batch_size=5)


# Reference voices and pieces for the decoder.


def lengths(num_clips: int, seed: int = 0, least_s: float = 0.5, most_s: float = 12.0) -> Rows:
    seconds = np.random.default_rng(seed).uniform(least_s, most_s, num_clips)
    return (seconds * SAMPLE_RATE).astype(np.int64)


@dataclass
class Lengths:
    """The part of a ClipSet that decides which references are drawn."""

    num_samples: Rows
    shards: Rows | None = None
    corpora: Rows | None = None

    def __len__(self) -> int:
        return len(self.num_samples)


def own_references(num_samples: Rows) -> References:
    return References(cast("ClipSet", Lengths(num_samples)))


@pytest.mark.parametrize("num_lenders", [0, 300])
def test_the_reference_is_any_other_clip_of_the_same_voice(num_lenders: int) -> None:
    clips, lenders = (cast("ClipSet", Lengths(lengths(count))) for count in (400, num_lenders))
    voices = np.random.default_rng(1).integers(0, 40, 400 + num_lenders)
    voices[:4] = [-1, -2, -3, -4]  # no other clip has these
    references = References(clips, voices, lenders if num_lenders else None)
    batches = np.arange(400).reshape(50, 8)
    assert references.own_share == 0.01
    num_samples = np.concatenate([clips.num_samples, lenders.num_samples])
    drawn: set[tuple[int, int]] = set()
    for epoch in range(150):
        found = references.crops(1, epoch, batches)
        assert np.array_equal(voices[found.sources], voices[batches])
        assert np.array_equal(np.flatnonzero(found.sources == batches), np.arange(4)), "only those are their own"
        assert (found.starts + found.samples <= num_samples[found.sources]).all()
        drawn |= set(zip(batches.ravel().tolist(), found.sources.ravel().tolist(), strict=True))
    assert len(drawn) > 0.99 * ((voices[:400, None] == voices).sum() - 396), "in time every other clip"


def test_the_reference_is_of_the_same_shard() -> None:
    """Validation clips are in the shards of the training clips; those of another corpus share none."""
    random = np.random.default_rng(2)
    sets = [
        Lengths(lengths(count), random.integers(0, 5, count), np.full(count, corpus))
        for count, corpus in ((200, 0), (300, 0), (300, 1))
    ]
    clips, *lenders = (cast("ClipSet", each) for each in sets)
    for lender, is_same in zip(lenders, (True, False), strict=True):
        voices = random.integers(0, 4, 500)
        references = References(clips, voices, lender)
        shards, corpora = np.concatenate([clips.shards, lender.shards]), np.repeat([0, not is_same], [200, 300])
        sources = np.stack([references.crops(1, epoch, np.arange(200)).sources for epoch in range(100)])
        for values in (voices, shards, corpora):
            assert (values[sources] == values[:200]).all()
        assert (sources >= 200).any() == is_same
        assert np.array_equal(references.voices[:200], voices[:200]), "a voice is the same in all shards"
    whole = replace(sets[0], shards=np.zeros(200, np.int64))
    found, plain = (
        References(cast("ClipSet", each), voices[:200]) for each in (whole, replace(whole, shards=None))
    )
    for one, other in zip(found.crops(1, 3, np.arange(200)), plain.crops(1, 3, np.arange(200)), strict=True):
        assert np.array_equal(one, other), "one shard changes nothing"


def test_the_reference_does_not_depend_on_the_batch() -> None:
    references = References(cast("ClipSet", Lengths(lengths(200))), np.arange(200) % 7)
    order = np.random.default_rng(4).permutation(200)[:50]
    whole, part = references.crops(1, 7, np.arange(200)), references.crops(1, 7, order)
    for each, other in zip(whole, part, strict=True):
        assert np.array_equal(each[order], other)


def test_the_cut_of_a_clip_depends_on_nothing_but_seed_epoch_and_clip() -> None:
    num_samples, clips = lengths(200), np.arange(200)
    whole = crops(1, 7, clips, num_samples)
    order = np.random.default_rng(4).permutation(200)[:50]  # fewer, in another order, in another company
    part = crops(1, 7, order, num_samples[order])
    assert np.array_equal(whole.starts[order], part.starts)
    assert np.array_equal(whole.samples[order], part.samples)
    pieces = segments(1, 7, clips, num_samples // 1024, 32)
    assert np.array_equal(pieces[order], segments(1, 7, order, num_samples[order] // 1024, 32))
    for other in ((2, 7), (1, 8), (2**32 - 1, 7), (1, 100_000)):
        assert (crops(*other, clips, num_samples).starts != whole.starts).mean() > 0.9
        assert (segments(*other, clips, num_samples // 1024, 32) != pieces).mean() > 0.8


def test_these_cuts_never_change() -> None:
    """A run that is resumed with another version must use the same reference voices."""
    found = crops(1234, 3, np.array([0, 1, 99_999]), np.array([200_000, 90_000, 30_000]))
    assert found.starts.tolist() == [45451, 1555, 7119]
    assert found.samples.tolist() == [80074, 85138, 15000]
    assert segments(1234, 3, np.array([0, 1, 99_999]), np.array([200, 90, 30]), 32).tolist() == [77, 9, 0]


def test_length_start_and_piece_are_independent_and_use_their_whole_range() -> None:
    num_samples, clips = np.full(20_000, 10 * SAMPLE_RATE), np.arange(20_000)
    chosen = crops(3, 0, clips, num_samples)
    pieces = segments(3, 0, clips, np.full(20_000, 215), 32)
    length = (chosen.samples - 3 * SAMPLE_RATE) / (3 * SAMPLE_RATE)
    start = chosen.starts / (num_samples - chosen.samples)
    for values in (length, start, pieces / 183):
        assert (values.min(), values.max()) == pytest.approx((0, 1), abs=0.002)
        assert np.histogram(values, 10)[0] / 2000 == pytest.approx(np.ones(10), abs=0.15)
    assert np.abs(np.corrcoef([length, start, pieces]) - np.eye(3)).max() < 0.03
    assert abs(np.corrcoef(length[1:], length[:-1])[0, 1]) < 0.03  # neighbours neither


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 2**32 - 1), st.integers(0, 10**6), st.lists(st.integers(1, 700_000), min_size=1, max_size=40)
)
def test_crops_and_pieces_lie_inside_their_clips(seed: int, epoch: int, samples: list[int]) -> None:
    num_samples, clips = np.array(samples), np.arange(len(samples))
    chosen = crops(seed, epoch, clips, num_samples)
    assert chosen.starts.min() >= 0 and chosen.samples.min() >= 1
    assert (chosen.starts + chosen.samples <= num_samples).all()
    full = (chosen.samples >= 3 * SAMPLE_RATE) & (chosen.samples <= 6 * SAMPLE_RATE)
    assert (full | (chosen.samples == np.maximum(num_samples // 2, 1))).all()
    assert full[num_samples >= 6 * SAMPLE_RATE].all()
    assert not full[num_samples < 3 * SAMPLE_RATE].any()
    assert (chosen.frames == chosen.samples // HOP_SAMPLES + 1).all()
    assert chosen.frames.max() <= MAX_CROP_FRAMES
    num_codes = num_codes_of(num_samples)
    starts = segments(seed, epoch, clips, num_codes, 32)
    assert starts.min() >= 0
    assert (starts + 32 <= np.maximum(num_codes, 32)).all()


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 20), st.integers(0, 1000), st.floats(0, 1))
def test_fitted_crops_keep_to_the_budget_and_their_starts(num_clips: int, seed: int, share: float) -> None:
    num_samples = lengths(num_clips, seed)
    chosen = crops(1, 0, np.arange(num_clips), num_samples)
    budget = int(2 * num_clips + share * (chosen.frames.sum() + 10 - 2 * num_clips))
    fitted = fit(chosen, budget)
    assert fitted.frames.sum() <= budget
    assert np.array_equal(fitted.starts, chosen.starts)
    assert (fitted.samples <= chosen.samples).all()
    assert (fitted.samples >= np.minimum(chosen.samples, HOP_SAMPLES)).all()
    if chosen.frames.sum() <= budget:
        assert np.array_equal(fitted.samples, chosen.samples)


def test_a_small_excess_is_shared_by_all() -> None:
    num_samples = lengths(10, least_s=8.0)
    chosen = crops(1, 0, np.arange(10), num_samples)
    fitted = fit(chosen, int(chosen.frames.sum()) - 15)
    assert set((chosen.samples - fitted.samples).tolist()) == {2 * HOP_SAMPLES}


@pytest.mark.parametrize(("num_clips", "batch_size"), [(40, 4), (500, 16), (2000, 8)])
@pytest.mark.parametrize("seed", range(4))
def test_the_frame_budget_is_enough_for_nearly_every_batch(num_clips: int, batch_size: int, seed: int) -> None:
    num_samples = lengths(num_clips, seed)
    batches = Batches(packed_tokens(num_samples // 2000, num_samples), batch_size, seed)
    budget = frame_budget(batches.samples(), own_references(num_samples), seed)
    assert budget % FRAME_MULTIPLE == 0
    needed = []
    for epoch in range(12):
        clips, _ = batches.epoch(epoch)
        needed.append(crops(seed, epoch, clips, num_samples[clips]).frames.sum(axis=1))
    largest = max(needed[0].max(), needed[1].max())
    assert largest <= budget < largest + FRAME_MULTIPLE
    excess = np.maximum(np.concatenate(needed) - budget, 0)
    assert (excess == 0).mean() > 0.9
    assert excess.sum() < 0.002 * np.concatenate(needed).sum()  # what the others lose is not worth a longer row


# Gathered batches.


class Remote:
    """A reader that is told which shards are read soon."""

    def __init__(self, store: Store, num_shards: int) -> None:
        self._store, self.num_shards, self.asked = store, num_shards, list[list[int]]()

    def fetch_ahead(self, shards: list[int]) -> None:
        self.asked.append(shards)

    def __len__(self) -> int:
        return len(self._store)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_shards_are_fetched_ahead_when_a_window_begins(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "SHARDS_PER_WINDOW", 1)
    monkeypatch.setattr(order, "BATCHES_PER_WINDOW", 0)
    remote = Remote(cast(Store, corpus.clips.audio), 2)
    sharded = replace(corpus.clips, audio=remote, shards=np.repeat([0, 1], [13, 10]))
    plain = corpus.clips.select(np.arange(10))
    both = ClipSet.joined([plain, sharded, plain])
    assert both.shards is not None and isinstance(both.audio, Joined)
    assert both.shards.tolist() == [0] * 10 + [1] * 13 + [2] * 10 + [3] * 10
    assert both.select(np.array([0, 30, 42])).shards.tolist() == [0, 2, 3]
    assert both.audio.num_shards == 4
    batches = Batches(packed_tokens(both.num_ids, both.num_samples), 1, SEED, shards=both.shards)
    jobs = list(Gatherer(both, batches, DATA, SEED).jobs(Cursor(), num_batches=43))
    read = [int(both.shards[job.plan.clips[0]]) for job in jobs]
    windows = [shard for shard, _ in itertools.groupby(read)]
    assert sorted(windows) == [0, 1, 2, 3]
    pairs = list(itertools.pairwise(windows))
    assert remote.asked[:3] == [[shard - 1 for shard in pair if shard in (1, 2)] for pair in pairs]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus.make(tmp_path / "clips", DATA, 23)


def whole(clips: np.ndarray, epoch: int = 0) -> GatherJob:
    """A job of these clips and no others."""
    weights = np.ones(len(clips), np.float32)
    plan = BatchPlan(clips, weights, Cursor(), epoch, 0, clips[None], weights[None])
    return GatherJob(plan, np.arange(5, dtype=np.float32))


def check_gathered(batch: HostBatch, clips: ClipSet, job: GatherJob, frame_budget: int) -> None:
    plan, num_samples = job.plan, clips.num_samples[job.plan.clips]
    for slot, clip in enumerate(plan.clips.tolist()):
        pcm, ids = clips.audio[clips.audio_rows[clip]], clips.ids[clips.ids_rows[clip]]
        assert np.array_equal(batch["pcm"][slot, : len(pcm)], pcm)
        assert batch["ids"][slot].tolist() == ids.tolist() + [0] * (DATA.max_text_length - len(ids))
        assert (batch["num_samples"][slot], batch["num_ids"][slot]) == (len(pcm), len(ids))
    chosen = fit(crops(SEED, plan.epoch, plan.clips, num_samples), frame_budget)
    expected = {
        "num_codes": -(-(num_samples // HOP_SAMPLES + 1) // 4),
        "clips": plan.clips,
        "weights": plan.weights,
        "crop_samples": chosen.samples,
        "segments": segments(SEED, plan.epoch, plan.clips, num_codes_of(num_samples), SEGMENT_CODES),
        "totals": job.totals,
    }
    for name, values in expected.items():
        assert np.array_equal(batch[name], values), name
    for slot, (clip, start, count) in enumerate(zip(*chosen, strict=True)):
        pcm = clips.audio[clips.audio_rows[clip]]
        assert np.array_equal(batch["reference"][slot, :count], pcm[start : start + count])


def test_one_host_batch_used_again_never_mixes_clips(corpus: Corpus) -> None:
    gatherer, batch = corpus.gatherer(), HostBatch(host_layout(DATA))
    for job in gatherer.jobs(Cursor(), 1, 40):
        gathered = gatherer.fill(batch, job)
        check_gathered(batch, corpus.clips, job, gatherer.frame_budget)
        assert (gathered.after, gathered.codes_known) == (job.plan.after, False)
        assert np.array_equal(gathered.clips, job.plan.clips)


def test_a_selection_gathers_its_own_clips(corpus: Corpus) -> None:
    chosen = np.array([20, 2, 11, 5, 22])
    selected = corpus.clips.select(chosen)
    gatherer = replace(corpus, clips=selected).gatherer()
    batch, job = HostBatch(host_layout(DATA)), whole(np.arange(5))
    gatherer.fill(batch, job)
    check_gathered(batch, selected, job, gatherer.frame_budget)
    assert selected.names == [corpus.clips.names[at] for at in chosen]
    assert np.array_equal(batch["num_samples"], corpus.clips.num_samples[chosen])


def test_codes_come_from_the_cache_only_if_all_are_there(corpus: Corpus, tmp_path: Path) -> None:
    cache = corpus.cache(tmp_path / "codes")
    gatherer, batch = corpus.gatherer(cache), HostBatch(host_layout(DATA))
    clips, width = np.array([4, 9, 1, 17, 6]), batch["codes"].shape[1]
    codes = np.random.default_rng(1).integers(1, 1024, (5, width))
    cache.write(clips[:4], codes[:4])
    assert not gatherer.fill(batch, whole(clips)).codes_known
    cache.write(clips[4:], codes[4:])
    batch["codes"][:] = -7
    assert gatherer.fill(batch, whole(clips)).codes_known
    inside = np.arange(width) < batch["num_codes"][:, None]
    assert np.array_equal(batch["codes"], np.where(inside, codes, 0))
    cache.close()


def test_totals_count_every_batch_and_rank_of_an_optimiser_step_once(corpus: Corpus) -> None:
    clips = corpus.clips
    tokens = packed_tokens(clips.num_ids, clips.num_samples)
    ranks = [Gatherer(clips, Batches(tokens, 5, SEED, rank, 2), DATA, SEED) for rank in range(2)]
    steps = [list(itertools.islice(gatherer.jobs(Cursor(), accumulate=2), 8)) for gatherer in ranks]
    num_codes, num_frames = num_codes_of(clips.num_samples), clips.num_samples // HOP_SAMPLES + 1
    for step in range(4):
        together = [job for jobs in steps for job in jobs[2 * step : 2 * step + 2]]
        counted = np.concatenate([job.plan.clips[job.plan.weights == 1] for job in together])
        expected = [
            (clips.num_ids[counted] + 1).sum(),
            (num_codes[counted] + NUM_STOPS).sum(),
            num_codes[counted].sum(),
            num_frames[counted].sum(),
            len(counted),
        ]
        assert [job.totals.tolist() for job in together] == [expected] * 4
    assert min(job.plan.weights.min() for jobs in steps for job in jobs) == 0  # some only fill up


def test_sizes_are_the_same_for_all_batches_or_follow_each(corpus: Corpus) -> None:
    static, loose = corpus.gatherer(), corpus.gatherer(data=replace(DATA, pad_to_fixed_length=False))
    batch = HostBatch(host_layout(DATA))
    seen = set()
    for job in static.jobs(Cursor(), 1, 10):
        assert static.fill(batch, job).sizes == static.static_sizes
        sizes = loose.fill(batch, job).sizes
        seen.add(sizes)
        clips = corpus.clips.select(job.plan.clips)
        assert sizes.ids == clips.num_ids.max()
        assert sizes.tokens - packed_tokens(clips.num_ids, clips.num_samples).sum() in range(8)
        assert sizes.samples - clips.num_samples.max() in range(1, 1025)
        frames = (batch["crop_samples"] // HOP_SAMPLES + 1).sum()
        assert sizes.frames - frames in range(64)
    assert len(seen) > 3


def test_a_host_batch_is_one_block_of_aligned_arrays() -> None:
    layout = host_layout(DATA)
    batch = HostBatch(layout)
    start = batch.memory.__array_interface__["data"][0]
    for number, name in enumerate(layout):
        array = batch[name]
        offset = array.__array_interface__["data"][0] - start
        assert offset % ALIGNMENT_BYTES == 0
        assert 0 <= offset <= batch.memory.nbytes - array.nbytes
        assert (array.shape, array.dtype.name) == (layout[name].shape, layout[name].dtype)
        array[:] = number
    for number, name in enumerate(layout):  # nothing overlaps
        assert (batch[name] == number).all()


def test_without_a_driver_memory_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("myxtts.host.nvidia_driver", lambda: "")
    assert not HostBatch(host_layout(DATA)).memory.any()
