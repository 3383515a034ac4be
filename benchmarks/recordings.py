"""Recordings whose truth is known, made of the clips of corpora, for benchmarks/collect.py.

Clips of a speaker are joined with pauses, room noise, music and other speakers. Some carry a planted flaw, some
recordings have a script beside them. truth.json has the times, text, speaker, language and flaw of every clip.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from harness import console

Wave = Any
Span = tuple[float, float]
RATE, SPEECH_RMS = 24_000, 0.07
HOP_S, WINDOW_S = 0.005, 0.02
CLEAR_DB, FAINT_DB = 24, 30  # below the loud parts of a clip
GAP_S = 0.15  # a shorter silence may be the closure of a stop inside a word
REASONS = {
    "noise": "noise|quality|heard",
    "hum": "noise|hum|quality",
    "music": "music",
    "clipping": "clipping",
    "telephone": "bandwidth",
    "overlap": "speaker|overlap|heard",
    "two speakers": "speaker|separated",
    "repeated take": "repeated",
}
"""Planted flaws, and what their reasons may be called."""


@dataclass(frozen=True)
class Said:
    """A clip in a recording, and its stretches of sound with pauses of at least GAP_S between.

    `words` are clearly audible; `sounds` also have what is faint, such as breaths and weak consonants.
    """

    text: str
    speaker: str
    language: str
    flaw: str
    channel: int
    words: list[Span]
    sounds: list[Span]

    @property
    def seconds(self) -> float:
        return sum(end - start for start, end in self.words)


@dataclass(frozen=True)
class Recording:
    """A file; `music` is where it has music and no speech."""

    file: str
    kind: str
    seconds: float
    said: list[Said]
    music: list[Span]


def read_truth(folder: Path) -> list[Recording]:
    found = json.loads((folder / "truth.json").read_text(encoding="utf-8"))
    return [Recording(**{**each, "said": [Said(**said) for said in each["said"]]}) for each in found]


def read_table(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="|", quoting=csv.QUOTE_NONE))


def read_wave(path: Path, rate: int = RATE, span: Span | None = None) -> Wave:
    """Samples of shape (samples, channels) at another rate; all of them, or those of a span in seconds."""
    own_rate = soundfile.info(path).samplerate
    first, last = (round(at * own_rate) for at in span) if span else (0, None)
    wave, _ = soundfile.read(path, start=first, stop=last, dtype="float32", always_2d=True)
    return soxr.resample(wave, own_rate, rate)


def leveled(wave: Wave) -> Wave:
    """A wave whose louder half has the RMS of speech."""
    power = np.sort(np.square(wave[: len(wave) // 240 * 240].reshape(-1, 240)).mean(1))
    return (wave * (SPEECH_RMS / (np.sqrt(power[len(power) // 2 :].mean()) + 1e-9))).astype(np.float32)


def sounding(wave: Wave, depth_db: float, at: float) -> list[Span]:
    """The stretches of a clean clip that are at most so much below its loud parts; the clip begins at `at`."""
    hop, window = int(HOP_S * RATE), int(WINDOW_S * RATE)
    sums = np.append(0, np.cumsum(np.append(0, wave[1:] - 0.9 * wave[:-1]).astype(float) ** 2))
    starts = np.arange(0, len(wave) - window + 1, hop)
    level = 10 * np.log10((sums[starts + window] - sums[starts]) / window + 1e-12)
    floor, loud = np.percentile(level, [5, 95])
    is_sound = level > max(loud - depth_db, min(floor + 6, loud - 20))
    merged: list[Span] = []
    for first, last in np.flatnonzero(np.diff(np.concatenate(([0], is_sound, [0])))).reshape(-1, 2):
        start, end = (at + float(frame * HOP_S + WINDOW_S / 2) for frame in (first, last - 1))
        joined = merged and start - merged[-1][1] < GAP_S
        merged[-1:] = [(merged[-1][0], end)] if joined else [*merged[-1:], (start, end)]
    return [span for span in merged if span[1] - span[0] > 0.05]


def make_music(seconds: float, chance: random.Random) -> Wave:
    """Chords and a rhythm, as loud as speech."""
    beat, length, hiss = int(0.45 * RATE), int(seconds * RATE), np.random.default_rng(chance.randrange(2**31))
    wave, clock = np.zeros(length + 2 * beat), np.arange(2 * beat) / RATE
    for number, start in enumerate(range(0, length, beat)):
        root = 110 * 2 ** (chance.choice((0, 3, 5, 7)) / 12)
        for step in (0, chance.choice((3, 4)), 7, 12):
            phase = 2 * np.pi * root * 2 ** (step / 12) * clock
            chord = sum(np.sin(phase * harmonic) / harmonic for harmonic in range(1, 7))
            wave[start : start + 2 * beat] += chord * np.exp(-3 * clock) / 4
        drum = hiss.normal(size=len(clock)) if number % 2 else np.sin(377 * clock) * 3
        wave[start : start + 2 * beat] += drum * np.exp(-60 * clock)
    return leveled(wave[:length])


def make_noise(length: int, chance: random.Random) -> Wave:
    """The noise of a room, which falls by 3 dB an octave; a minute, repeated."""
    size = min(length, 60 * RATE)
    spectrum = np.fft.rfft(np.random.default_rng(chance.randrange(2**31)).normal(size=size))
    noise = np.fft.irfft(spectrum / np.sqrt(np.maximum(np.arange(len(spectrum)), 20 * size / RATE)), size)
    return np.resize(noise * (SPEECH_RMS / np.sqrt((noise**2).mean())), length).astype(np.float32)


def make_hum(length: int) -> Wave:
    clock = 2 * np.pi * 50 * np.arange(length) / RATE
    return SPEECH_RMS * sum(np.sin(number * clock) / number**0.5 for number in range(1, 9))


def telephone(wave: Wave) -> Wave:
    hertz = np.fft.rfftfreq(len(wave), 1 / RATE)
    return np.fft.irfft(np.fft.rfft(wave) * ((hertz > 300) & (hertz < 3400)), len(wave))


UNDER_SPEECH: dict[str, Callable[[int, random.Random], Wave]] = {
    "noise": lambda length, chance: make_noise(length, chance) * 0.7,
    "music": lambda length, chance: make_music(length / RATE, chance) * 0.5,
    "hum": lambda length, _: make_hum(length),
}


class Tape:
    """A recording while it is put together: what is placed on it adds up."""

    def __init__(self, chance: random.Random, channels: int = 1) -> None:
        self.chance, self.channels, self.at = chance, channels, 0.0
        self.placed: list[tuple[float, int, Wave]] = []
        self.said: list[Said] = []
        self.music: list[Span] = []

    def pause(self, least: float = 0.2, most: float = 2.0) -> None:
        self.at += self.chance.uniform(least, most)

    def say(self, row: dict[str, str], flaw: str = "", change: Callable[[Wave], Wave] = np.asarray) -> None:
        """Place a clip, on a channel of its speaker; `change` may alter its sound, not its times."""
        wave = leveled(read_wave(Path(row["path"]))[:, 0])
        fade = np.minimum(1, np.arange(len(wave)) / (0.003 * RATE))
        heard = telephone(wave) if change is telephone else wave
        words, sounds = (sounding(heard, depth_db, self.at) for depth_db in (CLEAR_DB, FAINT_DB))
        speakers = list(dict.fromkeys([*(said.speaker for said in self.said), row["speaker"]]))
        channel = speakers.index(row["speaker"]) % self.channels
        self.said.append(Said(row["text"], row["speaker"], row["language"], flaw, channel, words, sounds))
        self.placed.append((self.at, channel, change(wave * fade * fade[::-1])))
        self.at += len(wave) / RATE

    def play(self, seconds: float) -> None:
        self.placed.append((self.at, 0, make_music(seconds, self.chance)))
        self.music.append((self.at, self.at + seconds))
        self.at += seconds

    def render(self, snr_db: float) -> Wave:
        length = int((self.at + 1) * RATE)
        wave = np.stack([make_noise(length, self.chance) for _ in range(self.channels)], 1) * 10 ** (-snr_db / 20)
        for at, channel, part in self.placed:
            start = int(at * RATE)
            wave[start : start + len(part), channel] += part[: length - start]
        for said in self.said:
            if said.flaw == "clipping":  # of the whole sound, and then made softer
                part = wave[int(said.sounds[0][0] * RATE) - 5000 : int(said.sounds[-1][1] * RATE) + 5000]
                part[:] = np.clip(part * 8, -0.9, 0.9) * 0.7
        return wave / max(1.0, float(np.abs(wave).max()) * 1.01)


class Studio:
    """Makes recordings of clips, each of which is used once."""

    def __init__(self, speech: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.clips: dict[str, list[dict[str, str]]] = defaultdict(list)
        for table in sorted(speech.rglob("metadata.csv")):
            for row in read_table(table):
                if 1.2 <= float(row["seconds"]) <= 14:
                    self.clips[row["speaker"]].append({**row, "path": str(table.parent / row["path"])})
        for clips in self.clips.values():
            self.chance.shuffle(clips)

    def book(self, speaker: str, count: int) -> Tape:
        """One reader, with music between chapters."""
        tape = Tape(self.chance)
        for number in range(count):
            tape.pause()
            tape.say(self.clips[speaker].pop())
            if number % 12 == 2:
                tape.pause()
                tape.play(self.chance.uniform(4, 9))
        return tape

    def talk(self, speakers: list[str], count: int, channels: int = 1) -> Tape:
        """Speakers who take turns of one to three clips."""
        tape, turn = Tape(self.chance, channels), 0
        while len(tape.said) < count:
            turn += 1
            for _ in range(self.chance.randint(1, 3)):
                tape.say(self.clips[speakers[turn % len(speakers)]].pop())
                tape.pause(0.2, 1.0)
        return tape

    def flawed(self, speaker: str, other: str, count: int) -> Tape:
        """Every flaw `count` times, with a clean clip before each."""
        tape, own, others = Tape(self.chance), self.clips[speaker], self.clips[other]
        for flaw in [flaw for flaw in REASONS for _ in range(count)]:
            tape.pause(0.8, 2)
            tape.say(own.pop())
            tape.pause(1.5, 2)
            began, clip = tape.at, own.pop()
            tape.say(clip, flaw, telephone if flaw == "telephone" else np.asarray)
            if flaw == "overlap":
                ended, tape.at = tape.at, began + 0.3 * (tape.at - began)
                tape.say(others.pop(), flaw)
                tape.at = max(tape.at, ended)
            elif flaw == "two speakers":
                tape.at = tape.said[-1].words[-1][1] + 0.06
                tape.say(others.pop(), flaw)
            elif flaw == "repeated take":
                tape.pause(0.5, 1.5)
                tape.say(clip, change=lambda wave: 0.8 * wave)
            length = int((tape.at - began + 0.6) * RATE)
            if sound := UNDER_SPEECH.get(flaw):
                tape.placed.append((began - 0.3, 0, sound(length, self.chance)))
        return tape


def wrong_words(text: str, chance: random.Random) -> str:
    """A script that is not quite what was said: one word in twelve is another, one in thirty is missing."""
    words = text.split()
    changed = [chance.choice(words) if chance.random() < 1 / 12 else word for word in words]
    return " ".join(word for word in changed if chance.random() > 1 / 30)


def make(options: argparse.Namespace) -> None:
    """Write recordings, scripts and truth.json; without the usual ten speakers, only books and a talk."""
    studio, size, made = Studio(options.speech, options.seed), options.size, list[Recording]()
    options.out.mkdir(parents=True, exist_ok=True)

    def write(name: str, tape: Tape, snr_db: float = 40) -> None:
        wave = tape.render(snr_db)
        soundfile.write(options.out / name, wave, RATE)
        kind = re.split(r"[-.]", name)[0]
        made.append(Recording(name, kind, len(wave) / RATE, tape.said, tape.music))

    for number, speaker in enumerate(sorted(studio.clips)):
        snr_db, suffix = ((45, "flac"), (30, "wav"), (20, "flac"))[number % 3]
        write(f"book-{speaker}-{snr_db}dB.{suffix}", studio.book(speaker, size), snr_db)
    if "lj" in studio.clips:
        _make_usual(studio, size, options.out, write)
    else:
        write("podcast.flac", studio.talk(sorted(studio.clips), size), 30)
    truth = json.dumps([asdict(each) for each in made], ensure_ascii=False)
    (options.out / "truth.json").write_text(truth, encoding="utf-8")
    clips, seconds = sum(len(each.said) for each in made), sum(each.seconds for each in made)
    console.print(f"{len(made)} recordings, {clips} clips, {seconds / 60:.1f} minutes in {options.out}")


def _make_usual(studio: Studio, size: int, out: Path, write: Callable[..., None]) -> None:
    """Write talks of the usual speakers, their planted flaws, and scripts."""
    write("podcast-1.flac", studio.talk(["lj", "libri_27"], size))
    write("podcast-2.flac", studio.talk(["cmu_slt", "cmu_bdl", "kathleen"], size), 30)
    write("languages.flac", studio.talk(["kerstin", "nathalie", "lj"], size))
    write("stereo.flac", studio.talk(["cmu_bdl", "kathleen"], size, 2))
    for number, (speaker, other) in enumerate(
        (("lj", "cmu_bdl"), ("kathleen", "cmu_bdl"), ("kerstin", "nathalie"))
    ):
        if number == 0 or size > 8:
            write(f"flaws-{number}.flac", studio.flawed(speaker, other, max(size // 6, 2)))
    foreign = "\n".join(row["text"] for row in studio.clips["kerstin"][:size])
    for kind, change in (
        ("right", str),
        ("different", partial(wrong_words, chance=studio.chance)),
        ("foreign", lambda _: foreign),
    ):
        tape = studio.book("cmu_slt", size)
        write(f"script {kind}.wav", tape, 35)
        text = change("\n".join(said.text for said in tape.said))
        (out / f"script {kind}.txt").write_text(text, encoding="utf-8")
