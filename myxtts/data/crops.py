"""Which part of which clip is the reference voice, and which part the decoder trains on, by (seed, epoch, batch).

No state and no order: a resumed run or another number of workers cuts the same batch the same way.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from myxtts.config import HOP_SAMPLES, SAMPLE_RATE
from myxtts.data.batches import Batches, Weights
from myxtts.data.store import Rows

MIN_CROP_SAMPLES, MAX_CROP_SAMPLES = 3 * SAMPLE_RATE, 6 * SAMPLE_RATE
"""Reference voices are this long, as in XTTS-v2's training. Of a shorter clip it is the whole, or half of it where
the clip is its own reference: the rest must be spoken without having been heard."""
MAX_CROP_FRAMES = MAX_CROP_SAMPLES // HOP_SAMPLES + 1
FRAME_MULTIPLE = 64
"""Frames of a batch come in multiples of this: the conditioning encoder works in as many parts."""
_LENGTH, _START, _SEGMENT = range(3)

Draws = npt.NDArray[np.float64]


class Crops(NamedTuple):
    """Reference voices of the clips of a batch, in samples."""

    slots: Rows
    """Which clip of the batch each is cut from."""
    starts: Rows
    samples: Rows

    @property
    def frames(self) -> Rows:
        return self.samples // HOP_SAMPLES + 1


def crops(seed: int, epoch: int, clips: Rows, num_samples: Rows, voices: Rows | None = None) -> Crops:
    """A reference for each clip of a batch, or of each row of several batches, 3 to 6 seconds long.

    Cut from the next clip of the batch with the same number in `voices`; from the clip itself if there is none,
    or no `voices`.
    """
    slots = np.broadcast_to(np.arange(clips.shape[-1]), clips.shape) if voices is None else _next_alike(voices)
    is_own = slots == np.arange(clips.shape[-1])
    heard = np.take_along_axis(num_samples, slots, -1)
    span = MAX_CROP_SAMPLES - MIN_CROP_SAMPLES + 1
    samples = MIN_CROP_SAMPLES + (_uniform(seed, epoch, clips, _LENGTH) * span).astype(np.int64)
    all_there_is = np.where(is_own, np.maximum(heard // 2, 1), heard)
    samples = np.where(samples > heard, all_there_is, samples)
    room = heard - samples + 1
    return Crops(slots, (_uniform(seed, epoch, clips, _START) * room).astype(np.int64), samples)


def voices_of(clips: Rows, weights: Weights, voices: Rows | None) -> Rows | None:
    """The numbers in `voices` of the clips of one batch or several, for `crops`.

    A clip that only fills a batch up gets a number of its own: it is the shortest of all, many times over, and in
    a batch that is far from full most others would hear it.
    """
    if voices is None:
        return None
    return np.where(weights > 0, voices[clips], voices.min() - 1 - np.arange(clips.shape[-1]))


def _next_alike(values: Rows) -> Rows:
    """Of each place of a row the next place with the same value, going round; itself where it is the only one."""
    order = np.argsort(values, axis=-1, kind="stable")
    ordered = np.take_along_axis(values, order, -1)
    places = np.broadcast_to(np.arange(values.shape[-1]), values.shape)
    begins = np.ones(values.shape, bool)
    begins[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    first = np.maximum.accumulate(np.where(begins, places, 0), axis=-1)
    is_last = np.roll(begins, -1, axis=-1)
    follower = np.where(is_last, first, np.minimum(places + 1, values.shape[-1] - 1))
    found = np.empty_like(order)
    np.put_along_axis(found, order, np.take_along_axis(order, follower, -1), -1)
    return found


def fit(chosen: Crops, budget: int) -> Crops:
    """The crops of one batch within `budget` frames; if they have more, all are shortened alike at their ends."""
    samples = chosen.samples
    while (excess := int((samples // HOP_SAMPLES + 1).sum()) - budget) > 0:
        shorter = samples - HOP_SAMPLES * math.ceil(excess / len(samples))
        samples = np.maximum(shorter, np.minimum(samples, HOP_SAMPLES))
    return Crops(chosen.slots, chosen.starts, samples)


def frame_budget(batches: Batches, num_samples: Rows, seed: int, voices: Rows | None = None) -> int:
    """Frames that (nearly) every batch fits: the most that batches of two epochs need."""
    most = 0
    for epoch in range(2):
        clips, weights = batches.epoch(epoch)
        chosen = crops(seed, epoch, clips, num_samples[clips], voices_of(clips, weights, voices))
        most = max(most, int(chosen.frames.sum(axis=1).max()))
    return math.ceil(most / FRAME_MULTIPLE) * FRAME_MULTIPLE


def segments(seed: int, epoch: int, clips: Rows, num_codes: Rows, length: int) -> Rows:
    """First code of a piece of `length` codes of each clip; 0 where the clip is no longer than that."""
    room = np.maximum(num_codes - length, 0) + 1
    starts: Rows = (_uniform(seed, epoch, clips, _SEGMENT) * room).astype(np.int64)
    return starts


def _uniform(seed: int, epoch: int, clips: Rows, purpose: int) -> Draws:
    """Numbers in [0, 1), each from its own counter through the mixing function of SplitMix64."""
    with np.errstate(over="ignore"):
        state = np.array(seed, np.uint64)
        for part in (np.uint64(epoch), np.uint64(purpose), clips.astype(np.uint64)):
            state = _mixed(state + np.uint64(0x9E3779B97F4A7C15) * (part + np.uint64(1)))
    draws: Draws = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return draws


def _mixed(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed
