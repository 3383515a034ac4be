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
from itertools import accumulate, count
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
PITCHES, WORDS_PER_MINUTE = (30, 70), (140, 200)
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
        draw.randint(*WORDS_PER_MINUTE),
    )


def _say(sentence: _Sentence) -> Spoken:
    library, heard = _speaker()
    if library.espeak_SetVoiceByName(f"en-us{sentence.variant}".encode()) != 0:
        raise RuntimeError(f"espeak-ng has no voice en-us{sentence.variant}")
    library.espeak_SetParameter(_PITCH, sentence.pitch, 0)
    wave = heard.say(library, sentence.text, sentence.words_per_minute)
    soundfile.write(sentence.file, wave, ESPEAK_SAMPLE_RATE)
    return Spoken(str(sentence.file), sentence.speaker, "en", sentence.text, len(wave) / ESPEAK_SAMPLE_RATE)


def said_words(text: str, words_per_minute: int) -> tuple[npt.NDArray[np.float32], dict[int, int]]:
    """A text in the plain voice, and at which sample its words begin, by their number.

    A word that is run into the one before has no beginning of its own.
    """
    library, heard = _speaker()
    library.espeak_SetVoiceByName(b"en-us")
    wave = heard.say(library, text, words_per_minute)
    first_letters = list(accumulate((len(word) + 1 for word in text.split(" ")), initial=0))
    begins: dict[int, int] = {}
    for letter, sample in heard.words:
        begins.setdefault(bisect_right(first_letters, letter) - 1, sample)
    return (wave / 32768).astype(np.float32), begins


class _Heard:
    """What the library says, in pieces, and where its words begin."""

    def __init__(self) -> None:
        self.pieces: list[npt.NDArray[np.int16]] = []
        self.words: list[tuple[int, int]] = []
        """The number of its first letter in the text, and the sample."""

    def say(self, library: ctypes.CDLL, text: str, words_per_minute: int) -> npt.NDArray[np.int16]:
        self.pieces.clear()
        self.words.clear()
        library.espeak_SetParameter(_RATE, words_per_minute, 0)
        content = text.encode() + b"\0"
        library.espeak_Synth(content, len(content), 0, 0, 0, _UTF8, None, None)
        return np.concatenate(self.pieces)

    def take(self, samples: object, number: int, events: Any) -> int:
        if number > 0:
            self.pieces.append(np.ctypeslib.as_array(samples, (number,)).copy())  # type: ignore[arg-type]
        while events and events.contents.type != _END_OF_EVENTS:
            event = events.contents
            if event.type == _WORD:
                self.words.append((event.text_position - 1, event.audio_position * ESPEAK_SAMPLE_RATE // 1000))
            events = ctypes.pointer(_Event.from_address(ctypes.addressof(event) + ctypes.sizeof(_Event)))
        return 0


@cache
def _speaker() -> tuple[ctypes.CDLL, _Heard]:
    """The library of this process, and who hears it."""
    library, heard = open_library(), _Heard()
    library.taking = _Callback(heard.take)  # type: ignore[attr-defined] # kept, for the library calls it later
    library.espeak_SetSynthCallback(library.taking)
    return library, heard
