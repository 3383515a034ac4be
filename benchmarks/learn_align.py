"""Where the words of an English recording begin, and where it can be cut between them.

The recording is laid over the same text said by espeak-ng, of which the beginnings are known: dynamic time warping
over cepstra.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import soundfile
import torch
from learn_corpus import Spoken, plain
from learn_espeak import ESPEAK_SAMPLE_RATE, said_words
from soxr import resample

from myxtts.model.mel import DVAE_MEL, LogMel
from myxtts.text.normalize import normalize

RATE, HOP = ESPEAK_SAMPLE_RATE, DVAE_MEL.hop_samples
CEPSTRA = 14
WORDS_PER_MINUTE = 160
LOOK_AROUND = 2
"""Frames of 11.6 ms around a word's beginning in which a quieter place is looked for."""
QUIET_DB = 16
"""So much under the loud parts of a clip a place must be to be cut at."""
SHORTEST = 8
"""Frames between two cuts."""
MOST_UNLIKE = 2.0
"""How much faster or slower than its clip a piece may be."""
SILENCE_DB, MARGIN = 35, 440
"""What is so much under the loudest sample at either end goes, but for so many samples."""

_Wave = npt.NDArray[np.float32]


class Cut(NamedTuple):
    """A clip, and where it can be cut."""

    words: list[str]
    wave: npt.NDArray[np.int16]
    places: list[tuple[int, int]]
    """The number of a word, and the sample where it begins; last the ends of both."""


def cut(clip: Spoken) -> Cut | None:
    """Find where words begin and the recording is quiet; None if there are no words, or there is no sound."""
    wave = _read(clip.path)
    words = plain(normalize(clip.text, "en")).split()
    if not words or len(wave) < 2 * SHORTEST * HOP:
        return None
    said, begins = said_words(" ".join(words), WORDS_PER_MINUTE)
    mine, mel = _cepstra(wave)
    meant = _warped(mine, _cepstra(said[_loud(said)])[0])
    loudness = 10 * np.log10(np.exp(mel).mean(0) + 1e-9)
    quiet = np.quantile(loudness, 0.9) - QUIET_DB
    places = [(0, 0)]
    for word, sample in sorted(begins.items()):
        frame = int(meant[min(max(sample - _loud(said).start, 0) // HOP, len(meant) - 1)])
        low = max(frame - LOOK_AROUND, places[-1][1] // HOP + SHORTEST)
        around = loudness[low : frame + LOOK_AROUND + 1]
        if word and len(around) and around.min() < quiet:
            places.append((word, HOP * (low + int(around.argmin()))))
    places.append((len(words), len(wave)))
    return Cut(words, (wave.clip(-1, 1) * 32767).astype(np.int16), _likely(words, places))


def _likely(words: Sequence[str], places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The places between which the speaker is about as fast as in the whole clip; others were aligned badly."""

    def samples_per_letter(begin: tuple[int, int], end: tuple[int, int]) -> float:
        return (end[1] - begin[1]) / sum(len(word) + 1 for word in words[begin[0] : end[0]])

    usual, end = samples_per_letter(places[0], places[-1]), places[-1]
    kept = [places[0]]
    for place in places[1:-1]:
        paces = (samples_per_letter(kept[-1], place) / usual, samples_per_letter(place, end) / usual)
        if all(1 / MOST_UNLIKE < pace < MOST_UNLIKE for pace in paces):
            kept.append(place)
    return [*kept, end]


def _read(path: str) -> _Wave:
    wave, rate = soundfile.read(path, dtype="float32", always_2d=True)
    wave = wave.mean(axis=1)
    wave = resample(wave, rate, RATE) if rate != RATE else wave
    return np.asarray(wave[_loud(wave)], np.float32)


def _loud(wave: _Wave) -> slice:
    """From the first to the last sample that is no silence."""
    loud = np.flatnonzero(np.abs(wave) > 10 ** (-SILENCE_DB / 20) * np.abs(wave).max(initial=0))
    return slice(max(int(loud[0]) - MARGIN, 0), int(loud[-1]) + MARGIN) if len(loud) else slice(0)


@cache
def _mel() -> LogMel:
    return LogMel(DVAE_MEL)


def _cepstra(wave: _Wave) -> tuple[_Wave, _Wave]:
    """[frames, values] to compare, and the logarithmic mels [bands, frames] they come from."""
    with torch.no_grad():
        mel: _Wave = _mel()(torch.from_numpy(wave)[None], torch.ones(DVAE_MEL.num_mels))[0].numpy()
    bands = (np.arange(len(mel)) + 0.5) / len(mel)
    values = _standard((np.cos(np.pi * np.outer(np.arange(CEPSTRA), bands)) @ mel).T)
    slopes = _standard(np.gradient(values, axis=0))
    return np.concatenate([values, slopes / 2], axis=1, dtype=np.float32), mel


def _standard(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray((values - values.mean(0)) / (values.std(0) + 1e-6))


def _warped(mine: _Wave, other: _Wave) -> npt.NDArray[np.int64]:
    """For every frame of the other which of mine is meant, by the cheapest way through both."""
    n, m = len(other), len(mine)
    cost = np.sqrt(np.maximum((other**2).sum(1)[:, None] + (mine**2).sum(1)[None] - 2 * other @ mine.T, 0))
    total = np.full((n + 1, m + 1), np.inf)
    total[0, 0] = 0

    def ways(i: npt.NDArray[np.int64], j: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """What it costs to come here: from both before, from the other's, from mine."""
        here = cost[i - 1, j - 1]
        return np.stack([total[i - 1, j - 1] + 2 * here, total[i - 1, j] + here, total[i, j - 1] + here])

    for diagonal in range(2, n + m + 1):
        i = np.arange(max(1, diagonal - m), min(n, diagonal - 1) + 1)
        total[i, diagonal - i] = ways(i, diagonal - i).min(0)
    meant = np.zeros(n, np.int64)
    here, there = np.array(n), np.array(m)
    while here > 0 and there > 0:
        meant[here - 1] = there - 1
        way = ways(here, there).argmin()
        here, there = here - (way != 2), there - (way != 1)
    return meant
