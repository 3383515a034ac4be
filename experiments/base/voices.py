"""The voices of the synthetic speech, and everyone who is held out of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

HELD_OUT_VOICES = ("af_kore", "am_puck", "bf_isabella", "bm_fable")
"""Voices of the teacher that no training clip uses, not even as part of a mix: two women, two men."""
HELD_OUT_PEOPLE = ("lj", "cmu_bdl", "libri_26", "flemishguy", "virgool")
"""Real speakers of whom no training clip is taken."""
FRENCH = "ff_siwis"
"""The one voice that speaks French without an accent: French clips have at least half of it."""
SHIFTS = ((1, 1), (22, 25), (9, 10), (47, 50), (53, 50), (11, 10), (28, 25))
"""Playing speeds as fractions: pitch and timbre move together by 6 to 12 %."""
CONCENTRATION, SHARPENED = 1.5, 1.3


class Voices(NamedTuple):
    """Voices as mixes of the teacher's: `weights` (voices, teacher's voices), index into `SHIFTS`, and tempo."""

    names: list[str]
    weights: npt.NDArray[np.float32]
    shifts: npt.NDArray[np.uint8]
    tempos: npt.NDArray[np.float32]


def make_voices(known: list[str], count: int, french: int, rng: np.random.Generator) -> Voices:
    """Return `count` voices: the teacher's own without those held out, then mixes, a third of all shifted.

    `french` of the mixes consist of `FRENCH` to at least half. Half of the others are moved away from the mean.
    """
    allowed = np.array([at for at, name in enumerate(known) if name not in HELD_OUT_VOICES])
    weights = np.zeros((count, len(known)), np.float32)
    weights[np.arange(len(allowed)), allowed] = 1
    mean = np.zeros(len(known), np.float32)
    mean[allowed] = 1 / len(allowed)
    for at in range(len(allowed), count):
        chosen = rng.choice(allowed, rng.integers(2, 4), replace=False)
        if at < len(allowed) + french:
            share = rng.uniform(0.2, 0.5)
            weights[at, chosen] = share * rng.dirichlet([CONCENTRATION] * len(chosen))
            weights[at, known.index(FRENCH)] += 1 - share
        else:
            weights[at, chosen] = rng.dirichlet([CONCENTRATION] * len(chosen))
            if at % 2:
                weights[at] = mean + SHARPENED * (weights[at] - mean)
    shifts = np.zeros(count, np.uint8)
    mixes = np.arange(len(allowed), count)
    shifted = rng.choice(mixes, min(count // 3, len(mixes)), replace=False)
    shifts[shifted] = rng.integers(1, len(SHIFTS), len(shifted))
    names = [known[at] for at in allowed] + [f"mix{at:04d}" for at in mixes]
    return Voices(names[:count], weights, shifts, rng.uniform(0.88, 1.12, count).astype(np.float32))


def french_voices(voices: Voices, known: list[str]) -> npt.NDArray[np.intp]:
    """Return the voices that may speak French."""
    return np.flatnonzero(voices.weights[:, known.index(FRENCH)] >= 0.5)
