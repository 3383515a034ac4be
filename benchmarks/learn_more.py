"""More speech than was recorded: the same clips at other speeds, and sentences put together from pieces of them.

From some hours of speech a GPT learns the recordings by heart before it learns to read. A clip that is faster or
slower is another voice with other codes; pieces of some words, cut where a clip is quiet (`learn_align`), make any
number of sentences that nobody has said, in voices of people. Does not know what is judged.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import soundfile
import torch
from learn_align import RATE, Cut, cut
from learn_corpus import Spoken

SPEEDS, MORE_SPEEDS = (0.94, 1.06), (0.88, 0.94, 1.06, 1.12)
"""Besides 1: of one voice, which should stay one, and of many."""
WORDS = (2, 4)
"""Wanted of one clip in a row; more where it cannot be cut between them."""
ROUND = 256
"""Sentences that are made before their length is looked at."""
SECONDS = (1.5, 6.0)
FADE = 110
"""Samples over which two pieces overlap: 5 ms."""


def at_other_speeds(clips: Sequence[Spoken], folder: Path, speeds: Sequence[float]) -> list[Spoken]:
    """The clips faster and slower, each speed as a speaker of its own: samples at another rate."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(number, clip, speed) for speed in speeds for number, clip in enumerate(clips)]
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


def spliced(clips: Sequence[Spoken], folder: Path, hours: float, speeds: Sequence[float]) -> list[Spoken]:
    """So much speech of the clips' speakers, made from some words of several clips each, at any of the speeds."""
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=_use_one_core) as processes:
        cuts = list(processes.map(cut, clips, chunksize=16))
    by_speaker: dict[str, list[Cut]] = {}
    for clip, one in zip(clips, cuts, strict=True):
        if one is not None:
            by_speaker.setdefault(clip.speaker, []).append(one)
    made: list[Spoken] = []
    seconds, draw, any_speed = 0.0, random.Random(0), (1.0, *speeds)
    with ThreadPoolExecutor() as threads:
        while seconds < 3600 * hours:
            jobs = [_sentence(folder / f"{len(made) + n}.wav", by_speaker, any_speed, draw) for n in range(ROUND)]
            made += threads.map(_write, jobs)
            seconds = sum(clip.seconds for clip in made)
    return made


def _use_one_core() -> None:
    torch.set_num_threads(1)


class _Sentence(NamedTuple):
    """A sentence put together."""

    clip: Spoken
    wave: npt.NDArray[np.int16]
    sample_rate: int


def _sentence(
    file: Path, by_speaker: Mapping[str, Sequence[Cut]], speeds: Sequence[float], draw: random.Random
) -> _Sentence:
    speakers = list(by_speaker)
    (speaker,) = draw.choices(speakers, [len(by_speaker[name]) for name in speakers])
    text, wave = _joined(by_speaker[speaker], draw)
    speed = draw.choice(speeds)
    name, rate = speaker if speed == 1 else f"{speaker} at {speed}", round(speed * RATE)
    return _Sentence(Spoken(str(file.resolve()), name, "en", text, len(wave) / rate), wave, rate)


def _write(sentence: _Sentence) -> Spoken:
    soundfile.write(sentence.clip.path, sentence.wave, sentence.sample_rate)
    return sentence.clip


def _joined(cuts: Sequence[Cut], draw: random.Random) -> tuple[str, npt.NDArray[np.int16]]:
    """Words of several clips, and how they sound."""
    wanted, text, wave = draw.uniform(*SECONDS) * RATE, list[str](), np.zeros(FADE, np.float32)
    rise = np.linspace(0, 1, FADE, dtype=np.float32)
    while len(wave) < wanted:
        words, piece = some_words(draw.choice(cuts), draw)
        text += words
        over = wave[-FADE:] * (1 - rise) + piece[:FADE] * rise
        wave = np.concatenate([wave[:-FADE], over, piece[FADE:]])
    return f"{' '.join(text).capitalize()}.", wave.astype(np.int16)


def some_words(clip: Cut, draw: random.Random) -> tuple[list[str], npt.NDArray[np.int16]]:
    """From one place to another, with so many words between them as wanted, or to the end of the clip."""
    begin = draw.randrange(len(clip.places) - 1)
    end = begin + 1
    wanted = draw.randint(*WORDS)
    while end < len(clip.places) - 1 and clip.places[end][0] - clip.places[begin][0] < wanted:
        end += 1
    (first, at), (last, until) = clip.places[begin], clip.places[end]
    return clip.words[first:last], clip.wave[at:until]
