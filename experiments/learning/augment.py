"""Augmentation: the same clips at other speeds, and new sentences spliced from pieces of several clips.

A GPT overfits a few hours of speech before it learns to read. A clip at another speed is another voice with other
codes; pieces of a few words, cut at quiet places (`align`), make any number of new sentences in a real voice.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import soundfile
import torch
from align import RATE, Cut, cut, cut_again
from corpus import Spoken

SPEEDS, MORE_SPEEDS = (0.94, 1.06), (0.88, 0.94, 1.06, 1.12)
"""In addition to 1: for the target voice, which should stay recognisable, and for other speakers."""
WORDS = (2, 4)
"""Words wanted from one clip in a row; more where it cannot be cut between them."""
ROUND = 256
"""Sentences made between two checks of the total length."""
SECONDS = (1.5, 6.0)
FADE = 110
"""Samples over which two pieces are cross-faded: 5 ms."""


def at_other_speeds(clips: Sequence[Spoken], folder: Path, speeds: Sequence[float]) -> list[Spoken]:
    """Write the clips with scaled sample rates; every speed counts as a speaker of its own."""
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


def cut_all(clips: Sequence[Spoken], known: Path | None = None) -> list[Cut | None]:
    """Cut every clip; with `known`, a file of `write_cuts`, as was done then."""
    if known is not None and known.is_file():
        found: dict[str, Any] = json.loads(known.read_text(encoding="utf-8"))
        given = [found[_key(known.parent, clip)] for clip in clips]
        with ThreadPoolExecutor() as threads:
            return list(threads.map(lambda clip, one: one and cut_again(clip, *one), clips, given))
    with ProcessPoolExecutor(
        mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as processes:
        return list(processes.map(cut, clips, chunksize=16))


def write_cuts(clips: Sequence[Spoken], file: Path) -> None:
    """Write where the clips of a folder can be cut: aligning them takes minutes where there are few cores."""
    cuts = {
        _key(file.parent, clip): one and (one.words, one.places)
        for clip, one in zip(clips, cut_all(clips), strict=True)
    }
    file.write_text(json.dumps(cuts, ensure_ascii=False), encoding="utf-8")


def _key(folder: Path, clip: Spoken) -> str:
    return str(Path(clip.path).relative_to(folder.resolve()))


def spliced(
    clips: Sequence[Spoken], folder: Path, hours: float, speeds: Sequence[float], known: Path | None = None
) -> list[Spoken]:
    """Write so many hours of sentences, each spliced from several clips of one speaker, at any of the speeds."""
    folder.mkdir(parents=True, exist_ok=True)
    cuts = cut_all(clips, known)
    by_speaker: dict[str, list[Cut]] = {}
    for clip, one in zip(clips, cuts, strict=True):
        if one is not None:
            by_speaker.setdefault(clip.speaker, []).append(one)
    made: list[Spoken] = []
    rng, all_speeds = random.Random(0), (1.0, *speeds)
    with ThreadPoolExecutor() as threads:
        while sum(clip.seconds for clip in made) < 3600 * hours:
            jobs = [_sentence(folder / f"{len(made) + n}.wav", by_speaker, all_speeds, rng) for n in range(ROUND)]
            made += threads.map(_write, jobs)
    return made


class _Sentence(NamedTuple):
    clip: Spoken
    wave: npt.NDArray[np.int16]
    sample_rate: int


def _sentence(
    file: Path, by_speaker: Mapping[str, Sequence[Cut]], speeds: Sequence[float], rng: random.Random
) -> _Sentence:
    speakers = list(by_speaker)
    (speaker,) = rng.choices(speakers, [len(by_speaker[name]) for name in speakers])
    text, wave = _joined(by_speaker[speaker], rng)
    speed = rng.choice(speeds)
    name, rate = speaker if speed == 1 else f"{speaker} at {speed}", round(speed * RATE)
    return _Sentence(Spoken(str(file.resolve()), name, "en", text, len(wave) / rate), wave, rate)


def _write(sentence: _Sentence) -> Spoken:
    soundfile.write(sentence.clip.path, sentence.wave, sentence.sample_rate)
    return sentence.clip


def _joined(cuts: Sequence[Cut], rng: random.Random) -> tuple[str, npt.NDArray[np.int16]]:
    """Return the text and the samples of pieces from several clips."""
    wanted, text, wave = rng.uniform(*SECONDS) * RATE, list[str](), np.zeros(FADE, np.float32)
    rise = np.linspace(0, 1, FADE, dtype=np.float32)
    while len(wave) < wanted:
        words, piece = some_words(rng.choice(cuts), rng)
        text += words
        overlap = wave[-FADE:] * (1 - rise) + piece[:FADE] * rise
        wave = np.concatenate([wave[:-FADE], overlap, piece[FADE:]])
    return f"{' '.join(text).capitalize()}.", wave.astype(np.int16)


def some_words(clip: Cut, rng: random.Random) -> tuple[list[str], npt.NDArray[np.int16]]:
    """Return a random piece of the clip, of as many words as wanted or up to the clip's end."""
    begin = rng.randrange(len(clip.places) - 1)
    end = begin + 1
    wanted = rng.randint(*WORDS)
    while end < len(clip.places) - 1 and clip.places[end][0] - clip.places[begin][0] < wanted:
        end += 1
    (first, start), (last, stop) = clip.places[begin], clip.places[end]
    return clip.words[first:last], clip.wave[start:stop]
