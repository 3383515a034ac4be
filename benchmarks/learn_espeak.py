"""espeak-ng says sentences in many voices, always as they are written, and tells when it begins a word.

Called through its C library (`text.phonemes`), once in every process. Does not know what is trained or judged.
"""

from __future__ import annotations

import ctypes
import random
import re
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import accumulate, count, takewhile
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import soundfile
from learn_corpus import Spoken

from myxtts.text.phonemes import open_library

VARIANTS = ("", *(f"+f{n}" for n in range(1, 6)), *(f"+m{n}" for n in range(1, 9)), "+klatt", "+klatt2", "+klatt3")
"""Of espeak-ng's American voice."""
VOICES_PER_VARIANT = 2
FEWEST_WORDS, MOST_WORDS = 3, 11
PITCHES, PLAIN_PITCH, PACES = (30, 70), 50, (140, 200)
"""Of espeak-ng's hundred; words per minute."""
ROUND = 256
"""Sentences that are said before their length is looked at."""
ESPEAK_SAMPLE_RATE = 22050
_RATE, _PITCH, _UTF8 = 1, 3, 1
"""From espeak-ng's `speak_lib.h`."""
_END_OF_EVENTS, _WORD = 0, 1


class _Event(ctypes.Structure):
    """`espeak_EVENT` of that file."""

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


class _Sentence(NamedTuple):
    """What espeak-ng shall say."""

    file: Path
    text: str
    speaker: str
    variant: str
    pitch: int
    words_per_minute: int


def synthetic(clips: Sequence[Spoken], folder: Path, hours: float) -> list[Spoken]:
    """So much speech of espeak-ng: words of the clips in any order."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [word for clip in clips for word in re.findall(r"[a-z']+", clip.text.lower())]
    said: list[Spoken] = []
    seconds, draw, numbers = 0.0, random.Random(0), count()
    voices = [(variant, draw.randint(*PITCHES)) for variant in VARIANTS for _ in range(VOICES_PER_VARIANT)]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        while seconds < 3600 * hours:
            jobs = [_sentence(folder / f"{next(numbers)}.wav", words, voices, draw) for _ in range(ROUND)]
            said += pool.map(_say, jobs, chunksize=32)
            seconds = sum(clip.seconds for clip in said)
    return said


def _sentence(
    file: Path, words: Sequence[str], voices: Sequence[tuple[str, int]], draw: random.Random
) -> _Sentence:
    number = draw.randrange(len(voices))
    text = " ".join(draw.choice(words) for _ in range(draw.randint(FEWEST_WORDS, MOST_WORDS)))
    variant, pitch = voices[number]
    return _Sentence(
        file.resolve(),
        f"{text.capitalize()}.",
        f"espeak {number}",
        variant,
        pitch,
        draw.randint(*PACES),
    )


def _say(sentence: _Sentence) -> Spoken:
    wave = _espeak().say(sentence.text, sentence.words_per_minute, sentence.variant, sentence.pitch)
    soundfile.write(sentence.file, wave, ESPEAK_SAMPLE_RATE)
    return Spoken(str(sentence.file), sentence.speaker, "en", sentence.text, len(wave) / ESPEAK_SAMPLE_RATE)


def said_words(text: str, words_per_minute: int) -> tuple[npt.NDArray[np.float32], dict[int, int]]:
    """A text without punctuation in the plain voice, and at which sample its words begin, by their number.

    A word that is run into the one before has no beginning of its own.
    """
    espeak = _espeak()
    wave = espeak.say(text, words_per_minute)
    first_letters = list(accumulate((len(word) + 1 for word in text.split(" ")), initial=0))
    begins: dict[int, int] = {}
    for letter, sample in espeak.words:
        begins.setdefault(bisect_right(first_letters, letter) - 1, sample)
    return (wave / 32768).astype(np.float32), begins


class _Espeak:
    """The library of this process."""

    def __init__(self) -> None:
        self._library = open_library()
        self._taking = _Callback(self._take)  # kept, for the library calls it later
        self._library.espeak_SetSynthCallback(self._taking)
        self._pieces: list[npt.NDArray[np.int16]] = []
        self.words: list[tuple[int, int]] = []
        """Of what was said last: the number of a word's first letter in the text, and the sample."""

    def say(
        self, text: str, words_per_minute: int, variant: str = "", pitch: int = PLAIN_PITCH
    ) -> npt.NDArray[np.int16]:
        self._pieces.clear()
        self.words.clear()
        self._library.voice_in_use = None  # type: ignore[attr-defined] # `phonemize` shall choose its own again
        if self._library.espeak_SetVoiceByName(f"en-us{variant}".encode()) != 0:
            raise RuntimeError(f"espeak-ng has no voice en-us{variant}")
        self._library.espeak_SetParameter(_RATE, words_per_minute, 0)
        self._library.espeak_SetParameter(_PITCH, pitch, 0)
        content = text.encode() + b"\0"
        self._library.espeak_Synth(content, len(content), 0, 0, 0, _UTF8, None, None)
        return np.concatenate(self._pieces)

    def _take(self, samples: object, number: int, events: Any) -> int:
        if number > 0:
            self._pieces.append(np.ctypeslib.as_array(samples, (number,)).copy())  # type: ignore[arg-type]
        for event in takewhile(lambda event: event.type != _END_OF_EVENTS, (events[i] for i in count())):
            if event.type == _WORD:
                self.words.append((event.text_position - 1, event.audio_position * ESPEAK_SAMPLE_RATE // 1000))
        return 0


@cache
def _espeak() -> _Espeak:
    return _Espeak()
