"""More speech than was recorded: the same clips at other speeds, and sentences said by espeak-ng in many voices.

From some hours of speech a GPT learns the recordings by heart before it learns to read. A clip that is faster or
slower is another voice with other codes; espeak-ng says any sentence, always as it is written. Does not know what
is judged.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import random
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import soundfile
from learn_corpus import Spoken

from myxtts.text.phonemes import open_library

SPEEDS = (0.88, 0.94, 1.06, 1.12)
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
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


def at_other_speeds(clips: Sequence[Spoken], folder: Path) -> list[Spoken]:
    """The clips faster and slower, each speed as a speaker of its own: samples at another rate."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(number, clip, speed) for speed in SPEEDS for number, clip in enumerate(clips)]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(partial(_at_speed, folder), jobs))


def _at_speed(folder: Path, job: tuple[int, Spoken, float]) -> Spoken:
    number, clip, speed = job
    wave, rate = soundfile.read(clip.path, dtype="int16")
    file = folder / f"{number}-{speed}.wav"
    soundfile.write(file, wave, round(speed * rate))
    return clip._replace(
        path=str(file.resolve()), speaker=f"{clip.speaker} at {speed}", seconds=clip.seconds / speed
    )


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
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
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
    library, pieces = _speaker()
    pieces.clear()
    if library.espeak_SetVoiceByName(f"en-us{sentence.variant}".encode()) != 0:
        raise RuntimeError(f"espeak-ng has no voice en-us{sentence.variant}")
    library.espeak_SetParameter(_RATE, sentence.words_per_minute, 0)
    library.espeak_SetParameter(_PITCH, sentence.pitch, 0)
    text = sentence.text.encode() + b"\0"
    library.espeak_Synth(text, len(text), 0, 0, 0, _UTF8, None, None)
    wave = np.concatenate(pieces)
    soundfile.write(sentence.file, wave, ESPEAK_SAMPLE_RATE)
    return Spoken(str(sentence.file), sentence.speaker, "en", sentence.text, len(wave) / ESPEAK_SAMPLE_RATE)


@cache
def _speaker() -> tuple[ctypes.CDLL, list[npt.NDArray[np.int16]]]:
    """The library of this process, and where it puts what it says."""
    library, pieces = open_library(), list[npt.NDArray[np.int16]]()

    def take(samples: object, number: int, _: object) -> int:
        if number > 0:
            pieces.append(np.ctypeslib.as_array(samples, (number,)).copy())  # type: ignore[arg-type]
        return 0

    library.taking = _Callback(take)  # type: ignore[attr-defined] # kept, for the library calls it later
    library.espeak_SetSynthCallback(library.taking)
    return library, pieces
