"""Whether anything can be heard in a wave, whole or in pieces, and how that is told."""

from __future__ import annotations

import numpy as np

from myxtts.audio import Wave

FAINT = 3e-3
"""Loudness below which a block of a wave is as good as silent: -50 dB, where speech has -20."""
FAINT_NOTE = "hardly anything can be heard in it: the model has not learnt to make sound yet"
_BLOCK_SAMPLES = 480


class Loudness:
    """Of a wave that arrives in pieces; keeps one number for each block."""

    def __init__(self) -> None:
        self._blocks: list[Wave] = []
        self._rest: Wave = np.zeros(0, np.float32)

    def add(self, piece: Wave) -> None:
        wave = np.concatenate([self._rest, piece])
        end = len(wave) // _BLOCK_SAMPLES * _BLOCK_SAMPLES
        self._blocks.append(wave[:end].reshape(-1, _BLOCK_SAMPLES).std(axis=1))
        self._rest = wave[end:]

    @property
    def is_faint(self) -> bool:
        """Whether the wave so far is silent but for a constant and some clicks."""
        blocks = np.concatenate([np.zeros(0, np.float32), *self._blocks])
        return not len(blocks) or bool(np.percentile(blocks, 90) < FAINT)


def is_faint(wave: Wave) -> bool:
    """Whether a wave is silent but for a constant and some clicks."""
    loudness = Loudness()
    loudness.add(wave)
    return loudness.is_faint
