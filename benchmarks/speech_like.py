"""Clips as long as LJSpeech's, of noise and random text: what a benchmark feeds where no corpus is at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from myxtts.config import SAMPLE_RATE
from myxtts.data.clips import ClipSet
from myxtts.data.store import Store, StoreWriter

MAX_SECONDS = 10.1
MAX_MEL_FRAMES = 880


def make_clips(folder: Path, num_clips: int, seed: int = 0, text_tokens: int = 255) -> ClipSet:
    """Clips of 1.2 to 10.1 s, 6.6 on average, in the stores that preparing a corpus makes."""
    random = np.random.default_rng(seed)
    seconds = random.normal(6.57, 2.18, num_clips).clip(1.2, MAX_SECONDS)
    noise = random.integers(-3000, 3000, int(MAX_SECONDS * SAMPLE_RATE) + num_clips, np.int16)
    audio = StoreWriter(folder / "audio", np.arange(num_clips, dtype=np.uint64))
    for start in range(0, num_clips, 64):
        rows = range(start, min(start + 64, num_clips))
        audio.append(rows, [noise[row : row + int(seconds[row] * SAMPLE_RATE)] for row in rows])
    audio.finish({})
    num_ids = (seconds * 7.5 * random.uniform(0.8, 1.2, num_clips)).astype(np.int64).clip(4, 200)
    ids = StoreWriter(folder / "ids", np.arange(num_clips, dtype=np.uint64))
    ids.append(range(num_clips), [random.integers(3, text_tokens, count, np.int32) for count in num_ids])
    ids.finish({})
    every = np.arange(num_clips)
    none = np.zeros(num_clips, np.int64)
    names = [f"clip-{number}" for number in range(num_clips)]
    return ClipSet(
        Store(folder / "audio", np.int16), Store(folder / "ids", np.int32), every, every, none, none, names
    )
