"""espeak-ng says a sentence, always as it is written, and tells when it begins a word.

Called through its C library (`text.normalize`), once in every process. Does not know what is trained or judged.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from functools import cache
from itertools import accumulate, count, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from myxtts.text.normalize import open_library

VOICE = b"en-us"
ESPEAK_SAMPLE_RATE = 22050
_RATE, _UTF8 = 1, 1
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


def said_words(text: str, words_per_minute: int) -> tuple[npt.NDArray[np.float32], dict[int, int]]:
    """How a text without punctuation sounds, and at which sample its words begin, by their number.

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

    def say(self, text: str, words_per_minute: int) -> npt.NDArray[np.int16]:
        self._pieces.clear()
        self.words.clear()
        self._library.voice_in_use = None  # type: ignore[attr-defined] # `phonemize` shall choose its own again
        if self._library.espeak_SetVoiceByName(VOICE) != 0:
            raise RuntimeError(f"espeak-ng has no voice {VOICE.decode()}")
        self._library.espeak_SetParameter(_RATE, words_per_minute, 0)
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
