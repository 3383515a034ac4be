"""Word alignment of an English recording: where words begin, and where the recording can be cut between them.

espeak-ng speaks the same text and reports when each word begins; dynamic time warping over cepstra maps those
times to the recording.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, count, takewhile
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import soundfile
import torch
from corpus import Spoken, plain
from soxr import resample

from myxtts.model.mel import DVAE_MEL, LogMel
from myxtts.text.normalize import normalize, open_library

RATE, HOP = 22050, DVAE_MEL.hop_samples
"""espeak-ng synthesises at this sample rate; recordings are resampled to it."""
CEPSTRA = 14
WORDS_PER_MINUTE = 160
SEARCH_FRAMES = 2
"""Frames of 11.6 ms searched for a quieter place on either side of a word boundary."""
QUIET_DB = 16
"""A cut must be this far below the loud parts of the clip."""
MIN_FRAMES = 8
"""Least distance between two cuts."""
MAX_PACE = 2.0
"""Largest ratio between the speaking rates of a piece and of its clip; beyond it the alignment is wrong."""
SILENCE_DB, MARGIN = 35, 440
"""Audio below the loudest sample by so much is trimmed from both ends, except for so many samples."""
VOICE = b"en-us"
_RATE_PARAMETER, _UTF8 = 1, 1  # constants of espeak-ng's speak_lib.h
_END_OF_EVENTS, _WORD = 0, 1

_Wave = npt.NDArray[np.float32]


class Cut(NamedTuple):
    """A clip and the places where it can be cut."""

    words: list[str]
    wave: npt.NDArray[np.int16]
    places: list[tuple[int, int]]
    """(word index, sample where that word begins); the last entry is the end of both."""


def cut(clip: Spoken) -> Cut | None:
    """Find the word boundaries at which the recording is quiet; None for a clip without words or without sound."""
    wave = _read(clip.path)
    words = plain(normalize(clip.text, "en")).split()
    if not words or len(wave) < 2 * MIN_FRAMES * HOP:
        return None
    spoken, begins = speak_words(" ".join(words), WORDS_PER_MINUTE)
    cepstra, mel = _cepstra(wave)
    loud = _loud(spoken)
    frames = _warp(cepstra, _cepstra(spoken[loud])[0])
    loudness = 10 * np.log10(np.exp(mel).mean(0) + 1e-9)
    quiet = np.quantile(loudness, 0.9) - QUIET_DB
    places = [(0, 0)]
    for word, sample in sorted(begins.items()):
        frame = int(frames[min(max(sample - loud.start, 0) // HOP, len(frames) - 1)])
        low = max(frame - SEARCH_FRAMES, places[-1][1] // HOP + MIN_FRAMES)
        around = loudness[low : frame + SEARCH_FRAMES + 1]
        if word and len(around) and around.min() < quiet:
            places.append((word, HOP * (low + int(around.argmin()))))
    places.append((len(words), len(wave)))
    return Cut(words, _whole_numbers(wave), _plausible(words, places))


def cut_again(clip: Spoken, words: list[str], places: list[tuple[int, int]]) -> Cut:
    """The result of an earlier `cut` of the same recording, without aligning it again."""
    return Cut(words, _whole_numbers(_read(clip.path)), places)


def _whole_numbers(wave: _Wave) -> npt.NDArray[np.int16]:
    return (wave.clip(-1, 1) * 32767).astype(np.int16)


def _plausible(words: Sequence[str], places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Keep the places between which the speaking rate is close to that of the whole clip."""

    def samples_per_letter(begin: tuple[int, int], end: tuple[int, int]) -> float:
        return (end[1] - begin[1]) / sum(len(word) + 1 for word in words[begin[0] : end[0]])

    usual, end = samples_per_letter(places[0], places[-1]), places[-1]
    kept = [places[0]]
    for place in places[1:-1]:
        paces = (samples_per_letter(kept[-1], place) / usual, samples_per_letter(place, end) / usual)
        if all(1 / MAX_PACE < pace < MAX_PACE for pace in paces):
            kept.append(place)
    return [*kept, end]


def _read(path: str) -> _Wave:
    wave, rate = soundfile.read(path, dtype="float32", always_2d=True)
    wave = wave.mean(axis=1)
    wave = resample(wave, rate, RATE) if rate != RATE else wave
    return np.asarray(wave[_loud(wave)], np.float32)


def _loud(wave: _Wave) -> slice:
    """The range from the first to the last sample that is not silence."""
    loud = np.flatnonzero(np.abs(wave) > 10 ** (-SILENCE_DB / 20) * np.abs(wave).max(initial=0))
    return slice(max(int(loud[0]) - MARGIN, 0), int(loud[-1]) + MARGIN) if len(loud) else slice(0)


@cache
def _log_mel() -> LogMel:
    return LogMel(DVAE_MEL)


def _cepstra(wave: _Wave) -> tuple[_Wave, _Wave]:
    """Return cepstra with their slopes [frames, values] and the log mel [bands, frames] they come from."""
    with torch.no_grad():
        mel: _Wave = _log_mel()(torch.from_numpy(wave)[None], torch.ones(DVAE_MEL.num_mels))[0].numpy()
    bands = (np.arange(len(mel)) + 0.5) / len(mel)
    values = _standardised((np.cos(np.pi * np.outer(np.arange(CEPSTRA), bands)) @ mel).T)
    slopes = _standardised(np.gradient(values, axis=0))
    return np.concatenate([values, slopes / 2], axis=1, dtype=np.float32), mel


def _standardised(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.asarray((values - values.mean(0)) / (values.std(0) + 1e-6))


def _warp(recording: _Wave, spoken: _Wave) -> npt.NDArray[np.int64]:
    """Return for every frame of `spoken` the matching frame of `recording`, by dynamic time warping."""
    n, m = len(spoken), len(recording)
    squares = (spoken**2).sum(1)[:, None] + (recording**2).sum(1)[None] - 2 * spoken @ recording.T
    cost = np.sqrt(np.maximum(squares, 0))
    total = np.full((n + 1, m + 1), np.inf)
    total[0, 0] = 0

    def moves(i: npt.NDArray[np.int64], j: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Cost of reaching (i, j) by advancing both, only `spoken`, or only `recording`."""
        here = cost[i - 1, j - 1]
        return np.stack([total[i - 1, j - 1] + 2 * here, total[i - 1, j] + here, total[i, j - 1] + here])

    for diagonal in range(2, n + m + 1):
        i = np.arange(max(1, diagonal - m), min(n, diagonal - 1) + 1)
        total[i, diagonal - i] = moves(i, diagonal - i).min(0)
    frames = np.zeros(n, np.int64)
    i, j = np.array(n), np.array(m)
    while i > 0 and j > 0:
        frames[i - 1] = j - 1
        move = moves(i, j).argmin()
        i, j = i - (move != 2), j - (move != 1)
    return frames


def speak_words(text: str, words_per_minute: int) -> tuple[_Wave, dict[int, int]]:
    """Return espeak-ng's audio of a text without punctuation, and the first sample of each word by word index.

    Words that espeak-ng joins to the one before are missing from the dictionary.
    """
    wave, events = _espeak().speak(text, words_per_minute)
    first_letters = list(accumulate((len(word) + 1 for word in text.split(" ")), initial=0))
    begins: dict[int, int] = {}
    for letter, sample in events:
        begins.setdefault(bisect_right(first_letters, letter) - 1, sample)
    return (wave / 32768).astype(np.float32), begins


class _Event(ctypes.Structure):
    """`espeak_EVENT` of speak_lib.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    )


_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))


class _Espeak:
    """espeak-ng's C library, opened once per process (`myxtts.text.normalize` uses the same one)."""

    def __init__(self) -> None:
        self._library = open_library()
        self._callback = _Callback(self._receive)  # ctypes does not keep it alive
        self._library.espeak_SetSynthCallback(self._callback)
        self._pieces: list[npt.NDArray[np.int16]] = []
        self._words: list[tuple[int, int]] = []

    def speak(self, text: str, words_per_minute: int) -> tuple[npt.NDArray[np.int16], list[tuple[int, int]]]:
        """Return samples, and (index of a word's first letter, sample) for every word event."""
        self._pieces, self._words = [], []
        self._library.voice_in_use = None  # type: ignore[attr-defined] # makes `phonemize` set its own voice again
        if self._library.espeak_SetVoiceByName(VOICE) != 0:
            raise RuntimeError(f"espeak-ng has no voice {VOICE.decode()}")
        self._library.espeak_SetParameter(_RATE_PARAMETER, words_per_minute, 0)
        content = text.encode() + b"\0"
        self._library.espeak_Synth(content, len(content), 0, 0, 0, _UTF8, None, None)
        return np.concatenate(self._pieces), self._words

    def _receive(self, samples: object, number: int, events: Any) -> int:
        if number > 0:
            self._pieces.append(np.ctypeslib.as_array(samples, (number,)).copy())
        for event in takewhile(lambda event: event.type != _END_OF_EVENTS, (events[i] for i in count())):
            if event.type == _WORD:
                self._words.append((event.text_position - 1, event.audio_position * RATE // 1000))
        return 0


@cache
def _espeak() -> _Espeak:
    return _Espeak()
