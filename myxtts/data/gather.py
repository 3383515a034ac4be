"""Batches in host memory: what a batch holds, and how the rows of its clips get there.

Everything that can be known about a batch without touching a GPU is decided here: clips and weights (`batches`),
which part of each clip is its reference voice (`crops`), codes that an earlier epoch or run computed (`codes`),
the totals by which an optimiser step is normalised. Filling a batch starts no thread and may happen in any.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from myxtts.config import HOP_SAMPLES, NUM_STOPS, SAMPLES_PER_CODE, DataSettings
from myxtts.data import crops
from myxtts.data.batches import TOKEN_MULTIPLE, Batches, BatchPlan, Cursor, Weights, packed_tokens
from myxtts.data.clips import ClipSet
from myxtts.data.codes import CodesCache
from myxtts.data.layout import Field, Layout, Sizes
from myxtts.data.store import Rows
from myxtts.host import HostMemory, host_memory

SEGMENT_CODES = 32
"""Codes of the pieces that the decoder is trained on: one and a half seconds."""
TOTALS = ("ids", "targets", "codes", "frames", "clips")
"""What is counted over all clips of an optimiser step, with their weights: text targets, audio targets (codes and
stops), codes, mel frames, clips."""


def num_codes_of(num_samples: Rows) -> Rows:
    """Codes that the DVAE makes of clips: one for every four mel frames, the last perhaps for fewer."""
    return -(-num_frames_of(num_samples) // (SAMPLES_PER_CODE // HOP_SAMPLES))


def num_frames_of(num_samples: Rows) -> Rows:
    """Mel frames of clips."""
    return num_samples // HOP_SAMPLES + 1


def host_layout(data: DataSettings) -> Layout:
    """What leaves the host for every batch."""
    size, numbers = data.batch_size, Field((data.batch_size,), "int32")
    return Layout(
        {
            "pcm": Field((size, data.max_mel_frames * HOP_SAMPLES), "int16"),
            "ids": Field((size, data.max_text_length), "int32"),
            "codes": Field((size, max_codes(data)), "int32"),
            "num_samples": numbers,
            "num_ids": numbers,
            "num_codes": numbers,
            "crop_slots": numbers,
            "crop_starts": numbers,
            "crop_samples": numbers,
            "segments": numbers,
            "clips": numbers,
            "weights": Field((size,), "float32"),
            "totals": Field((len(TOTALS),), "float32"),
        }
    )


def max_codes(data: DataSettings) -> int:
    """Codes of the longest clip."""
    return math.ceil(data.max_mel_frames * HOP_SAMPLES / SAMPLES_PER_CODE)


@dataclass(frozen=True)
class Job:
    """One batch to be gathered."""

    plan: BatchPlan
    totals: npt.NDArray[np.float32]
    """Sums of TOTALS over all batches, on all ranks, of the optimiser step this batch belongs to."""


class HostBatch:
    """Host memory of one batch, allocated once and filled again and again; pinned where CUDA exists.

    All arrays are views of one block, so that a batch reaches a GPU in one copy. Samples behind `num_samples` are
    whatever the memory held before: the front end masks them on the device, where it costs nothing.
    """

    def __init__(self, layout: Layout, pinned: bool = True) -> None:
        self.memory: HostMemory = host_memory(layout.num_bytes, pinned)
        self._arrays = layout.arrays(self.memory)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._arrays[name]


@dataclass(frozen=True)
class Gathered:
    """What is known of a gathered batch without looking at its memory."""

    sizes: Sizes
    after: Cursor
    clips: Rows
    codes_known: bool
    """The codes came from the cache; otherwise they are still to be computed."""


class Gatherer:
    """Fills host batches with clips of one set, in the order of `Batches`."""

    def __init__(
        self,
        source: ClipSet,
        batches: Batches,
        data: DataSettings,
        seed: int,
        codes: CodesCache | None = None,
        voices: Rows | None = None,
    ) -> None:
        """Clips with the same number in `voices` are references for each other; without it each is its own."""
        self._source, self._batches, self._data, self._seed = source, batches, data, seed
        self.codes, self._voices = codes, voices
        self._num_samples, self._num_ids = source.num_samples, source.num_ids
        self._num_codes = num_codes_of(self._num_samples)
        self.frame_budget = crops.frame_budget(batches, self._num_samples, seed, voices)
        """Conditioning frames that every batch fits."""
        self.code_budget = self._find_code_budget()
        """Codes, with a gap behind each clip, that nearly every batch fits."""

    def jobs(self, cursor: Cursor, accumulate: int = 1, num_batches: int | None = None) -> Iterator[Job]:
        """Batches from the cursor on, which must stand between two optimiser steps of `accumulate` batches."""
        plans = itertools.islice(self._batches.plans(cursor), num_batches)
        while group := list(itertools.islice(plans, accumulate)):
            totals = sum((self._totals(plan) for plan in group), np.zeros(len(TOTALS), np.float32))
            yield from (Job(plan, totals) for plan in group)

    def fill(self, batch: HostBatch, job: Job) -> Gathered:
        """Copy the clips of a job into the memory of a batch: one copy per clip, few calls for the rest."""
        plan, source = job.plan, self._source
        clips, num_samples = plan.clips, self._num_samples[plan.clips]
        known = self.codes is not None and bool(self.codes.known(clips).all())
        if self.codes is not None and known:
            known = self.codes.read(clips, batch["codes"])
        source.audio.gather(source.audio_rows[clips], batch["pcm"])
        source.ids.gather_padded(source.ids_rows[clips], batch["ids"])
        voices = crops.voices_of(clips, plan.weights, self._voices)
        chosen = crops.crops(self._seed, plan.epoch, clips, num_samples, voices)
        chosen = crops.fit(chosen, self.frame_budget)
        num_codes = self._num_codes[clips]
        for name, values in (
            ("num_samples", num_samples),
            ("num_ids", self._num_ids[clips]),
            ("num_codes", num_codes),
            ("crop_slots", chosen.slots),
            ("crop_starts", chosen.starts),
            ("crop_samples", chosen.samples),
            ("segments", crops.segments(self._seed, plan.epoch, clips, num_codes, SEGMENT_CODES)),
            ("clips", clips),
            ("weights", plan.weights),
            ("totals", job.totals),
        ):
            batch[name][:] = values
        return Gathered(self._sizes(clips, chosen), plan.after, clips, known)

    @property
    def static_sizes(self) -> Sizes:
        """Sizes that every batch fits, and that all have under static shapes."""
        samples = self._data.max_mel_frames * HOP_SAMPLES
        return Sizes(
            self._batches.budget, self._data.max_text_length, samples, self.frame_budget, self.code_budget
        )

    def _sizes(self, clips: Rows, chosen: crops.Crops) -> Sizes:
        num_codes = int((self._num_codes[clips] + 1).sum())
        if self._data.pad_to_fixed_length:
            sizes = self.static_sizes
            return sizes if num_codes <= self.code_budget else replace(sizes, codes=0)
        num_ids, num_samples = self._num_ids[clips], self._num_samples[clips]
        tokens = int(packed_tokens(num_ids, num_samples).sum())
        return Sizes(
            tokens=_rounded(tokens, TOKEN_MULTIPLE),
            ids=int(num_ids.max()),
            samples=_rounded(int(num_samples.max()) + 1, SAMPLES_PER_CODE),
            frames=_rounded(int(chosen.frames.sum()), crops.FRAME_MULTIPLE),
            codes=_rounded(num_codes, TOKEN_MULTIPLE),
        )

    def _find_code_budget(self) -> int:
        """The most that the batches of two epochs need: batches are alike, so later ones seldom need more."""
        totals = [(self._num_codes[self._batches.epoch(epoch)[0]] + 1).sum(axis=1).max() for epoch in range(2)]
        return _rounded(int(max(totals)), crops.FRAME_MULTIPLE)

    def _totals(self, plan: BatchPlan) -> npt.NDArray[np.float32]:
        clips = plan.clips if plan.peers is None else plan.peers.ravel()
        weights: Weights = plan.weights if plan.peer_weights is None else plan.peer_weights.ravel()
        codes = self._num_codes[clips]
        counts = (self._num_ids[clips] + 1, codes + NUM_STOPS, codes, num_frames_of(self._num_samples[clips]), 1)
        return np.array([(weights * count).sum() for count in counts], np.float32)


def _rounded(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
