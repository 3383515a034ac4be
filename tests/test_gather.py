"""Gathered batches: what a batch holds in host memory, and that memory used again never mixes clips."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pipeline_fixtures import SEED, SHORT, Corpus

from myxtts.config import HOP_SAMPLES, NUM_STOPS, DataSettings, num_codes_of
from myxtts.data.batches import (
    ALIGNMENT_BYTES,
    SEGMENT_CODES,
    Batches,
    BatchPlan,
    Cursor,
    Gatherer,
    HostBatch,
    Job,
    crops,
    fit,
    host_layout,
    packed_tokens,
    segments,
)
from myxtts.data.clips import ClipSet

DATA = replace(SHORT, batch_size=5)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus.make(tmp_path / "clips", DATA, 23)


def whole(clips: np.ndarray, epoch: int = 0) -> Job:
    """A job of these clips and no others."""
    weights = np.ones(len(clips), np.float32)
    plan = BatchPlan(clips, weights, Cursor(), epoch, clips[None], weights[None])
    return Job(plan, np.arange(5, dtype=np.float32))


def check_gathered(batch: HostBatch, clips: ClipSet, job: Job, frame_budget: int) -> None:
    plan = job.plan
    for slot, clip in enumerate(plan.clips.tolist()):
        pcm, ids = clips.audio[clips.audio_rows[clip]], clips.ids[clips.ids_rows[clip]]
        assert batch["num_samples"][slot] == len(pcm)
        assert np.array_equal(batch["pcm"][slot, : len(pcm)], pcm)
        assert batch["num_ids"][slot] == len(ids)
        assert batch["ids"][slot].tolist() == ids.tolist() + [0] * (DATA.max_text_length - len(ids))
        assert batch["num_codes"][slot] == -(-(len(pcm) // HOP_SAMPLES + 1) // 4)
        assert (batch["clips"][slot], batch["weights"][slot]) == (clip, plan.weights[slot])
    num_samples = clips.num_samples[plan.clips]
    chosen = fit(crops(SEED, plan.epoch, plan.clips, num_samples), frame_budget)
    assert np.array_equal(batch["crop_slots"], np.arange(len(plan.clips)))
    assert np.array_equal(batch["crop_starts"], chosen.starts)
    assert np.array_equal(batch["crop_samples"], chosen.samples)
    starts = segments(SEED, plan.epoch, plan.clips, num_codes_of(num_samples), SEGMENT_CODES)
    assert np.array_equal(batch["segments"], starts)
    assert np.array_equal(batch["totals"], job.totals)


def test_one_host_batch_used_again_never_mixes_clips(corpus: Corpus) -> None:
    gatherer, batch = corpus.gatherer(), HostBatch(host_layout(DATA))
    for job in gatherer.jobs(Cursor(), 1, 40):
        gathered = gatherer.fill(batch, job)
        check_gathered(batch, corpus.clips, job, gatherer.frame_budget)
        assert (gathered.after, gathered.codes_known) == (job.plan.after, False)
        assert np.array_equal(gathered.clips, job.plan.clips)


def test_the_longest_clip_fills_its_slot(corpus: Corpus) -> None:
    longest = int(corpus.clips.num_samples.argmax())
    assert corpus.clips.num_samples[longest] == DATA.max_mel_frames * HOP_SAMPLES - 1
    gatherer, batch, job = corpus.gatherer(), HostBatch(host_layout(DATA)), whole(np.array([longest] * 5))
    gatherer.fill(batch, job)
    check_gathered(batch, corpus.clips, job, gatherer.frame_budget)
    assert batch["num_codes"].tolist() == [batch["codes"].shape[1]] * 5


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


@pytest.mark.gpu
def test_memory_is_pinned() -> None:
    import torch

    batch = HostBatch(host_layout(DATA))
    assert torch.from_numpy(batch.memory).is_pinned()
    assert torch.from_numpy(batch["pcm"]).is_pinned()
    on_device = torch.from_numpy(batch.memory).to("cuda", non_blocking=True)
    assert on_device.numel() == batch.memory.nbytes
    assert not torch.from_numpy(HostBatch(host_layout(DATA), pinned=False).memory).is_pinned()


def test_a_prepared_corpus_becomes_batches(make_corpus: Callable[..., Path], run_prepare) -> None:
    train = run_prepare(make_corpus(), val_fraction=0.0).train
    data = DataSettings(batch_size=4)
    batches = Batches(packed_tokens(train.num_ids, train.num_samples), data.batch_size, 1)
    gatherer, batch = Gatherer(train, batches, data, 1), HostBatch(host_layout(data))
    for job in gatherer.jobs(Cursor(), 1, batches.num_batches):
        gatherer.fill(batch, job)
        for slot, clip in enumerate(job.plan.clips.tolist()):
            pcm = train.audio[train.audio_rows[clip]]
            assert np.array_equal(batch["pcm"][slot, : batch["num_samples"][slot]], pcm)
