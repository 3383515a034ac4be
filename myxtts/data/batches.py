"""Batches: how their memory is laid out, and how it is filled with clips and their reference voices.

Everything drawn is a pure function of (seed, epoch, clip): neither the batch nor the number of workers that gather
matters. This module starts no threads and touches no GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from myxtts.config import (
    HOP_SAMPLES,
    NUM_STOPS,
    SAMPLE_RATE,
    SAMPLES_PER_CODE,
    DataSettings,
    mel_frames,
    num_codes_of,
    num_frames_of,
)
from myxtts.data.clips import ClipSet
from myxtts.data.codes import CodesCache
from myxtts.data.order import TOKEN_MULTIPLE, Batches, BatchPlan, Cursor, packed_tokens, round_up
from myxtts.data.store import Array, Pieces, Rows, Sources
from myxtts.host import HostMemory, host_memory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALIGNMENT_BYTES = 256  # arrays of a block start at multiples of this, the alignment of GPU allocations


@dataclass(frozen=True)
class Field:
    """One array of a block; `dtype` is a name that numpy and PyTorch share."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Layout(dict[str, Field]):
    """Named fields of a block of `num_bytes`, one after another."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        super().__init__(fields)
        self._places: list[tuple[str, slice, Field]] = []
        self.num_bytes = 0
        for name, field in fields.items():
            self._places.append((name, slice(self.num_bytes, self.num_bytes + field.num_bytes), field))
            self.num_bytes += round_up(field.num_bytes, ALIGNMENT_BYTES)

    def arrays(self, block: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        """Return views of a block of host memory."""
        return {name: block[at].view(field.dtype).reshape(field.shape) for name, at, field in self._places}

    def tensors(self, block: Tensor) -> dict[str, Tensor]:
        """Return views of a uint8 tensor on any device."""
        import torch

        views = ((name, block[at].view(getattr(torch, field.dtype)), field) for name, at, field in self._places)
        return {name: view.view(field.shape) for name, view, field in views}


class Block:
    """The memory of one batch on a device, zeroed, and named views of it."""

    def __init__(self, layout: Layout, device: torch.device, pinned: bool = False) -> None:
        import torch

        self.memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.tensors = layout.tensors(self.memory)


@dataclass(frozen=True)
class Sizes:
    """How much of each array a batch uses, known on the host; under static shapes the same for all batches."""

    tokens: int  # positions of the GPT's packed row
    ids: int  # longest text of a clip
    samples: int  # longest clip
    frames: int  # conditioning frames of all clips together
    codes: int = 0
    """Codes of all clips together with a gap of one after each; 0 if they must be computed clip by clip."""


@dataclass(frozen=True)
class Batch:
    """The input of a recipe: tensors on the model role's device, valid while the lease lasts."""

    tensors: Mapping[str, Tensor]
    sizes: Sizes
    after: Cursor  # where to continue once this batch has been trained on


MIN_CROP_SAMPLES, MAX_CROP_SAMPLES = 3 * SAMPLE_RATE, 6 * SAMPLE_RATE
"""Length of a reference voice, as in XTTS-v2's training. A shorter clip is used whole, or half of it if it is its
own reference, so that the model cannot copy the rest from it."""
MAX_CROP_FRAMES = num_frames_of(MAX_CROP_SAMPLES)
FRAME_MULTIPLE = 64
"""Frames of a batch are rounded up to this: the conditioning encoder splits them into as many parts."""
_LENGTH, _START, _SEGMENT, _SOURCE = range(4)


class Crops(NamedTuple):
    """The reference voices of a batch, in samples."""

    sources: Rows  # the clip that each is cut from, in the numbering of `References`
    starts: Rows
    samples: Rows

    @property
    def frames(self) -> Rows:
        return num_frames_of(self.samples)


def crops(seed: int, epoch: int, clips: Rows, available: Rows, sources: Rows | None = None) -> Crops:
    """Draw a reference of 3 to 6 seconds for each clip from its source, by default the clip itself.

    The sources have `available` samples.
    """
    sources = clips if sources is None else sources
    span = MAX_CROP_SAMPLES - MIN_CROP_SAMPLES + 1
    samples = MIN_CROP_SAMPLES + (_uniform(seed, epoch, clips, _LENGTH) * span).astype(np.int64)
    longest = np.where(sources == clips, np.maximum(available // 2, 1), available)
    samples = np.where(samples > available, longest, samples)
    room = available - samples + 1
    return Crops(sources, (_uniform(seed, epoch, clips, _START) * room).astype(np.int64), samples)


class References:
    """The reference voice of every clip: a crop of another clip of the same voice, or of the clip itself.

    The draw is a pure function of (seed, epoch, clip): neither the batch size nor the number of ranks matters.
    """

    def __init__(
        self,
        clips: ClipSet,
        voices: Rows | None = None,
        lenders: ClipSet | None = None,
        times: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """`voices` has a number for each clip, then for each of `lenders`, which are only references for others.

        Clips with equal numbers are references for each other, those in shards only if they are in the same one;
        without `voices` each clip is its own. `times` is how often an epoch holds each clip.
        """
        self._sets = [clips] if lenders is None else [clips, lenders]
        samples = np.concatenate([each.num_samples for each in self._sets])
        self._num_samples: Array = samples.astype(np.int32)
        voices = np.arange(len(self._num_samples)) if voices is None else voices
        by_voice, first, count = _groups(voices)
        voice = _spread(by_voice, np.arange(len(count)), count)
        if any(each.shards is not None for each in self._sets):
            by_voice, first, count = _groups(_by_shard(voice, self._sets))
        self._by_voice, self._first = by_voice, _spread(by_voice, first, count)
        self._others = _spread(by_voice, count - 1, count)
        self._rank = np.empty_like(by_voice)
        self._rank[by_voice] = np.arange(len(by_voice), dtype=np.int32) - np.repeat(first, count)
        self.voices = np.where(self._others > 0, voice, np.int32(-1))
        """A number for the voice of each clip; -1 if there is no other clip of it."""
        self.own_share = float(np.average(self._others[: len(clips)] == 0, weights=times))
        """Share of the clips of an epoch that are their own reference."""

    def crops(self, seed: int, epoch: int, clips: Rows) -> Crops:
        """Draw a reference for each clip of an array of any shape: every other clip of its voice is as likely."""
        others = self._others[clips]
        drawn = (_uniform(seed, epoch, clips, _SOURCE) * np.maximum(others, 1)).astype(np.int64)
        drawn += (drawn >= self._rank[clips]) & (others > 0)  # skips the clip itself
        sources = self._by_voice[self._first[clips] + drawn]
        return crops(seed, epoch, clips, self._num_samples[sources], sources)

    def made_from(self, seed: int, clips: ClipSet) -> Sources:
        """A hash of what the latents of each clip are made from: audio, text, and reference in the first epoch."""
        audio = np.concatenate([each.audio.hashes[each.audio_rows] for each in self._sets])
        chosen = self.crops(seed, 0, np.arange(len(clips)))
        parts = (audio[: len(clips)], clips.ids.hashes[clips.ids_rows], audio[chosen.sources], *chosen[1:])
        table = np.stack([part.astype(np.uint64) for part in parts], axis=1)
        return np.array([xxhash.xxh3_64_intdigest(row.tobytes()) for row in table], np.uint64)

    def gather(self, chosen: Crops, out: npt.NDArray[np.int16]) -> None:
        """Copy the crops of one batch to the starts of the rows of `out`."""
        first = 0
        for lender in self._sets:
            slots = np.flatnonzero((first <= chosen.sources) & (chosen.sources < first + len(lender)))
            rows = lender.audio_rows[chosen.sources[slots] - first]
            lender.audio.gather(rows, out, Pieces(slots, chosen.starts[slots], chosen.samples[slots]))
            first += len(lender)


def _groups(values: Rows) -> tuple[Array, Array, Array]:
    """Return the places of equal values one after another, and where each group of them begins and its size."""
    order = np.argsort(values, kind="stable").astype(np.int32)
    first = np.append(0, np.flatnonzero(np.diff(values[order])) + 1).astype(np.int32)
    return order, first, np.diff(first, append=np.int32(len(values)))


def _spread(order: Array, values: Array, count: Array) -> Array:
    """Return for each place the value of its group."""
    spread = np.empty_like(order)
    spread[order] = np.repeat(values, count)
    return spread


def _by_shard(voices: Rows, sets: Sequence[ClipSet]) -> Rows:
    """Return a number for the voice and the shard of each clip; those without a shard count as one shard more."""
    shards = [np.zeros(len(each), np.int64) if each.shards is None else each.shards + 1 for each in sets]
    corpora, shard = np.concatenate([each.corpora for each in sets]), np.concatenate(shards)
    numbers: Rows = (voices.astype(np.int64) * (corpora.max() + 1) + corpora) * (shard.max() + 1) + shard
    return numbers


def fit(chosen: Crops, budget: int) -> Crops:
    """Return the crops of one batch within `budget` frames; if they exceed it, all are shortened equally."""
    samples = chosen.samples
    while (excess := int(num_frames_of(samples).sum()) - budget) > 0:
        shorter = samples - HOP_SAMPLES * math.ceil(excess / len(samples))
        samples = np.maximum(shorter, np.minimum(samples, HOP_SAMPLES))
    return chosen._replace(samples=samples)


def frame_budget(samples: Iterable[tuple[int, Rows]], references: References, seed: int) -> int:
    """Return the most frames that these epochs and batches need; others rarely need more."""
    drawn = (references.crops(seed, epoch, clips) for epoch, clips in samples)
    return round_up(max(int(crops.frames.sum(axis=1).max()) for crops in drawn), FRAME_MULTIPLE)


def segments(seed: int, epoch: int, clips: Rows, num_codes: Rows, length: int) -> Rows:
    """Draw the first code of a segment of `length` codes in each clip; 0 if the clip is not longer than that."""
    room = np.maximum(num_codes - length, 0) + 1
    starts: Rows = (_uniform(seed, epoch, clips, _SEGMENT) * room).astype(np.int64)
    return starts


def _uniform(seed: int, epoch: int, clips: Rows, purpose: int) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1), each a SplitMix64 hash of its own counter, so the order of draws is irrelevant."""
    with np.errstate(over="ignore"):
        state = np.array(seed, np.uint64)
        for part in (np.uint64(epoch), np.uint64(purpose), clips.astype(np.uint64)):
            state = state + np.uint64(0x9E3779B97F4A7C15) * (part + np.uint64(1))
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    draws: npt.NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return draws


SEGMENT_CODES = 13
"""Codes of the segments that the decoder is trained on: 0.6 s. Many short ones teach more than few long ones, and
13 are 56 of its frames: multiples of 8 suit GPUs."""
FLOW_CODES = 59
"""Codes of the segments that a flow is trained on: 2.7 s, 256 frames. It sees further than the decoder."""


def segment_codes(has_flow: bool) -> int:
    """Codes of the segments of the `decoder` stage."""
    return FLOW_CODES if has_flow else SEGMENT_CODES


MARGIN_CODES = 3
"""Codes on either side of a segment whose latents the decoder's first layer sees: nearly 13 of its frames."""
TOTALS = ("ids", "targets", "codes", "frames", "clips")
"""Weighted counts over all clips of an optimiser step: text targets, audio targets (codes and STOPs), codes, mel
frames, clips."""


class LatentDims(NamedTuple):
    """Sizes of what the cache of latents keeps of a clip besides its codes."""

    latent: int  # of the latent of each code, in bf16
    speaker: int  # of the speaker embedding, in float32
    segment: int  # codes of the part of a clip that is read

    def row_lengths(self, num_codes: Rows) -> Rows:
        """The length of each clip's row, in units of two bytes."""
        return num_codes * (1 + self.latent) + 2 * self.speaker

    def row(self, codes: Array, latents: Array, speaker: Array) -> Array:
        """The row of a clip: codes, bits of the latents [codes, latent], bits of the embedding."""
        return np.concatenate([codes.astype(np.uint16), latents.view(np.uint16).ravel(), speaker.view(np.uint16)])

    def read(self, row: Array, num_codes: int) -> tuple[Array, Array, Array]:
        """What `row` was given."""
        codes, latents, speaker = np.split(row, [num_codes, num_codes * (1 + self.latent)])
        return codes, latents.view(np.int16).reshape(num_codes, self.latent), speaker.copy().view(np.float32)


def host_layout(data: DataSettings, reference: bool = True, latents: LatentDims | None = None) -> Layout:
    """Return the layout of what leaves the host for every batch, with or without reference voices and latents."""
    size, longest = data.batch_size, mel_frames(data) * HOP_SAMPLES
    fields = {
        "pcm": Field((size, longest), "int16"),
        "ids": Field((size, data.max_text_length), "int32"),
        "codes": Field((size, max_codes(data)), "int32"),
    }
    lengths = ("num_samples", "num_ids", "num_codes")
    fields |= dict.fromkeys((*lengths, "crop_samples", "segments", "clips", "voices"), Field((size,), "int32"))
    if reference:
        fields["reference"] = Field((size, min(MAX_CROP_SAMPLES, longest)), "int16")
    if latents is not None:
        fields["latents"] = Field((size, latents.segment + 2 * MARGIN_CODES, latents.latent), "int16")
        fields["speaker"] = Field((size, latents.speaker), "float32")
    fields |= {"weights": Field((size,), "float32"), "totals": Field((len(TOTALS),), "float32")}
    return Layout(fields)


def max_codes(data: DataSettings) -> int:
    """Return the codes of the longest clip."""
    return num_codes_of(mel_frames(data) * HOP_SAMPLES - 1)


@dataclass(frozen=True)
class GatherJob:
    plan: BatchPlan
    totals: npt.NDArray[np.float32]
    """Sums of TOTALS over all batches, on all ranks, of this batch's optimiser step."""


class HostBatch:
    """Host memory of one batch, reused; pinned if CUDA exists. One block, so that one copy brings it to a GPU.

    Samples after `num_samples` are left over from earlier batches: the front end masks them on the device.
    """

    def __init__(self, layout: Layout, pinned: bool = True) -> None:
        self.memory: HostMemory = host_memory(layout.num_bytes, pinned)
        self._arrays = layout.arrays(self.memory)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays


@dataclass(frozen=True)
class Gathered:
    sizes: Sizes
    after: Cursor
    clips: Rows
    codes_known: bool  # True if the batch holds what the cache keeps, False if it is still to be computed


class Gatherer:
    """Fills host batches with the clips of one set, in the order of `Batches`. Any thread may fill."""

    def __init__(
        self,
        source: ClipSet,
        batches: Batches,
        data: DataSettings,
        seed: int,
        codes: CodesCache | None = None,
        references: References | None = None,
        latents: LatentDims | None = None,
        segment: int | None = None,
    ) -> None:
        """Without `references` every clip is its own. With `latents`, `codes` is a cache of these."""
        self._source, self.batches, self._data, self._seed = source, batches, data, seed
        self.codes, self.references, self.latents = codes, references or References(source), latents
        self._segment = SEGMENT_CODES if segment is None else segment
        self._num_samples: Array = source.num_samples.astype(np.int32)
        self._num_ids: Array = source.num_ids.astype(np.int32)
        self._num_codes: Array = num_codes_of(self._num_samples)
        samples = list(batches.samples())
        self.frame_budget = frame_budget(samples, self.references, seed)
        """The most conditioning frames of a batch."""
        num_codes = max(int((self._num_codes[clips] + 1).sum(axis=1).max()) for _, clips in samples)
        self.code_budget = round_up(num_codes, FRAME_MULTIPLE)
        """The most codes, with a gap after each clip, of nearly every batch."""

    def jobs(self, cursor: Cursor, accumulate: int = 1, num_batches: int | None = None) -> Iterator[GatherJob]:
        """Yield batches from the cursor on, which must be at the start of a step of `accumulate` batches."""
        plans, window = itertools.islice(self.batches.plans(cursor), num_batches), (-1, -1)
        fetch_ahead = getattr(self._source.audio, "fetch_ahead", None)
        while group := list(itertools.islice(plans, accumulate)):
            totals = sum((self._totals(plan) for plan in group), np.zeros(len(TOTALS), np.float32))
            for plan in group:
                if fetch_ahead is not None and (plan.epoch, plan.window) != window:
                    window = plan.epoch, plan.window
                    fetch_ahead(self.batches.shards_from(*window))
                yield GatherJob(plan, totals)

    def fill(self, batch: HostBatch, job: GatherJob) -> Gathered:
        """Copy the clips of a job into the memory of a batch."""
        plan, source, cache = job.plan, self._source, self.codes
        clips, num_samples = plan.clips, self._num_samples[plan.clips]
        known = cache is not None and bool(cache.known(clips).all())
        if known and cache is not None and self.latents is None:
            known = cache.read(clips, batch["codes"])
        source.audio.gather(source.audio_rows[clips], batch["pcm"])
        source.ids.gather_padded(source.ids_rows[clips], batch["ids"])
        # Latents depend on the reference: those that are kept have the one of the first epoch.
        chosen = self.references.crops(self._seed, 0 if self.latents else plan.epoch, clips)
        chosen = fit(chosen, self.frame_budget)
        if "reference" in batch:
            self.references.gather(chosen, batch["reference"])
        num_codes = self._num_codes[clips]
        batch["num_samples"][:] = num_samples
        batch["num_ids"][:] = self._num_ids[clips]
        batch["num_codes"][:] = num_codes
        batch["crop_samples"][:] = chosen.samples
        batch["voices"][:] = self.references.voices[clips]
        batch["segments"][:] = segments(self._seed, plan.epoch, clips, num_codes, self._segment)
        if known and cache is not None and self.latents is not None:
            self._read_latents(batch, cache, self.latents, clips)
        batch["clips"][:], batch["weights"][:], batch["totals"][:] = clips, plan.weights, job.totals
        return Gathered(self._sizes(clips, chosen), plan.after, clips, known)

    def _read_latents(self, batch: HostBatch, cache: CodesCache, dims: LatentDims, clips: Rows) -> None:
        """Copy codes, speaker embeddings and the latents of the segments, as the front end chooses them."""
        batch["codes"][:] = 0
        for slot, clip in enumerate(clips.tolist()):
            count = int(self._num_codes[clip])
            codes, latents, batch["speaker"][slot] = dims.read(cache.row(clip), count)
            batch["codes"][slot, :count] = codes
            places = int(batch["segments"][slot]) - MARGIN_CODES + np.arange(batch["latents"].shape[1])
            chosen = latents[places.clip(0, count - 1)]
            batch["latents"][slot] = np.where((places < count + MARGIN_CODES)[:, None], chosen, 0)

    def keep(self, clips: Rows, made: Mapping[str, Array]) -> None:
        """Write to the cache what the front end made for a batch."""
        assert self.codes is not None
        rows: Sequence[Array] | Array = made["codes"]
        if self.latents is not None:
            codes, latents, speaker = (made[name] for name in ("codes", "all_latents", "speaker"))
            rows = [
                self.latents.row(codes[slot, :count], latents[slot, :count], speaker[slot])
                for slot, count in enumerate(self._num_codes[clips].tolist())
            ]
        self.codes.write(clips, rows)

    @property
    def static_sizes(self) -> Sizes:
        """The sizes of every batch under static shapes."""
        samples = mel_frames(self._data) * HOP_SAMPLES
        return Sizes(self.batches.budget, self._data.max_text_length, samples, self.frame_budget, self.code_budget)

    def _sizes(self, clips: Rows, chosen: Crops) -> Sizes:
        num_codes = int((self._num_codes[clips] + 1).sum())
        if self._data.pad_to_fixed_length:
            sizes = self.static_sizes
            return sizes if num_codes <= self.code_budget else replace(sizes, codes=0)
        num_ids, num_samples = self._num_ids[clips], self._num_samples[clips]
        tokens = int(packed_tokens(num_ids, num_samples).sum())
        return Sizes(
            tokens=round_up(tokens, TOKEN_MULTIPLE),
            ids=int(num_ids.max()),
            samples=round_up(int(num_samples.max()) + 1, SAMPLES_PER_CODE),
            frames=round_up(int(chosen.frames.sum()), FRAME_MULTIPLE),
            codes=round_up(num_codes, TOKEN_MULTIPLE),
        )

    def _totals(self, plan: BatchPlan) -> npt.NDArray[np.float32]:
        clips, weights = plan.peers.ravel(), plan.peer_weights.ravel()
        codes = self._num_codes[clips]
        counts = (self._num_ids[clips] + 1, codes + NUM_STOPS, codes, num_frames_of(self._num_samples[clips]), 1)
        return np.array([(weights * count).sum() for count in counts], np.float32)
