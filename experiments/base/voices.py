"""The voices of the synthetic speech, and everyone who is held out of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

HELD_OUT_VOICES = ("af_kore", "am_puck", "bf_isabella", "bm_fable")
"""Voices of the teacher that no training clip uses, not even as part of a mix: two women, two men."""
TEST_OTHER = (533, 367, 3331, 3080, 3005, 2609, 2414, 2033, 1998, 1688)
HELD_OUT_PEOPLE = (
    *("lj", "cmu_bdl", "libri_26", "flemishguy", "virgool"),
    *(f"libri_{reader}" for reader in TEST_OTHER),
)
"""Real speakers of whom no training clip is taken; the last ten are readers of LibriSpeech's test-other."""
NATIVES = {
    "es": ("ef_dora", "em_alex", "em_santa"),
    "fr": ("ff_siwis",),
    "hi": ("hf_alpha", "hf_beta", "hm_omega", "hm_psi"),
    "it": ("if_sara", "im_nicola"),
    "pt": ("pf_dora", "pm_alex", "pm_santa"),
}
"""Voices of the teacher that speak a language without an accent: at least half of each of its native mixes."""
ONLY_NATIVES = ("fr", "hi")
"""Languages that other voices speak badly. For the rest, half of the clips are in any voice."""
SHIFTS = ((1, 1), (22, 25), (9, 10), (47, 50), (53, 50), (11, 10), (28, 25))
"""Playing speeds as fractions: pitch and timbre move together by 6 to 12 %."""
CONCENTRATION, SHARPENED = 1.5, 1.3


class Voices(NamedTuple):
    """Voices as mixes of the teacher's: `weights` (voices, teacher's voices), index into `SHIFTS`, and tempo."""

    names: list[str]
    weights: npt.NDArray[np.float32]
    shifts: npt.NDArray[np.uint8]
    tempos: npt.NDArray[np.float32]


def make_voices(known: list[str], count: int, natives: int, rng: np.random.Generator) -> Voices:
    """Return `count` voices: the teacher's own without those held out, then mixes, a third of all shifted.

    The first `natives` mixes for each language consist of its `NATIVES` to at least half. Half of the others are
    moved away from the mean.
    """
    groups = [[known.index(name) for name in names if name in known] for names in NATIVES.values()]
    owners = [group for group in groups if group for _ in range(natives)]
    allowed = np.array([at for at, name in enumerate(known) if name not in HELD_OUT_VOICES])
    weights = np.zeros((count, len(known)), np.float32)
    weights[np.arange(len(allowed)), allowed] = 1
    mean = np.zeros(len(known), np.float32)
    mean[allowed] = 1 / len(allowed)
    for at in range(len(allowed), count):
        chosen = rng.choice(allowed, rng.integers(2, 4), replace=False)
        if at < len(allowed) + len(owners):
            group = owners[at - len(allowed)]
            own = rng.choice(group, min(len(group), int(rng.integers(1, 3))), replace=False)
            share = rng.uniform(0.2, 0.5)
            weights[at, chosen] = share * rng.dirichlet([CONCENTRATION] * len(chosen))
            weights[at, own] += (1 - share) * rng.dirichlet([CONCENTRATION] * len(own))
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


def native_voices(voices: Voices, known: list[str], language: str) -> npt.NDArray[np.intp]:
    """Return the voices that speak a language without an accent, as far as the teacher has some."""
    group = [known.index(name) for name in NATIVES.get(language, ()) if name in known]
    return np.flatnonzero(voices.weights[:, group].sum(1) >= 0.5)


def cast(
    voices: Voices, known: list[str], language: str, clips: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Return a voice for each clip of a language."""
    able, native = np.arange(len(voices.names)), native_voices(voices, known, language)
    share = 0.0 if not len(native) else 1.0 if language in ONLY_NATIVES else 0.5
    chosen = rng.choice(able, clips)
    of_natives = rng.random(clips) < share
    if share:
        chosen[of_natives] = rng.choice(native, int(of_natives.sum()))
    return chosen
