"""Recordings in which tones stand for words, and stand-in models that recognise them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile as sf

from myxtts.audio import Wave
from myxtts.collect.collect import CollectOptions, Outcome, collect
from myxtts.collect.cutting import FRAME_SAMPLES
from myxtts.collect.cutting import RATE as HEARD_RATE
from myxtts.collect.listen import WINDOW_SAMPLES
from myxtts.errors import NO_PROGRESS

RATE = 22050
WORDS = (
    "the", "rain", "stopped", "in", "evening", "and", "a", "cold", "wind", "came", "over", "hills", "to", "our",
    "small", "white", "house",
)  # fmt: skip
WORD_S, GAP_S = 0.4, 0.08
LOWEST_HZ, STEP_HZ = 400, 120


def spoken(words: Sequence[str], speaker: int = 0, rate: int = RATE) -> Wave:
    """A tone for each word; the second speaker has overtones."""
    time = np.arange(round(WORD_S * rate)) / rate
    parts = []
    for word in words:
        pitch = LOWEST_HZ + STEP_HZ * WORDS.index(word)
        tone = np.sin(2 * np.pi * pitch * time) + 0.5 * speaker * np.sin(4 * np.pi * pitch * time)
        parts += [0.2 * tone * np.hanning(len(time)) ** 0.1, np.zeros(round(GAP_S * rate))]
    return np.concatenate(parts[:-1]).astype(np.float32)


def silence(seconds: float, rate: int = RATE, level: float = 1e-4, seed: int = 0) -> Wave:
    return (level * np.random.default_rng(seed).standard_normal(round(seconds * rate))).astype(np.float32)


def sentences(count: int, seed: int = 0) -> list[list[str]]:
    random = np.random.default_rng(seed)
    return [[WORDS[at] for at in random.choice(len(WORDS), random.integers(5, 10))] for _ in range(count)]


def recording(path: Path, said: Sequence[Sequence[str]], seed: int = 0, speaker: int = 0) -> Path:
    """Write sentences with pauses of 0.4 to 2 s."""
    random = np.random.default_rng(seed)
    parts = [silence(0.5)]
    for words in said:
        parts += [spoken(words, speaker), silence(random.uniform(0.4, 2.0), seed=seed)]
    sf.write(path, np.concatenate(parts), RATE)
    return path


class StandIn:
    """A stand-in for all models that recognises `spoken`; it can kill its process at a chosen question."""

    def __init__(self, kill_at: int = 0, without: Sequence[str] = ()) -> None:
        names = {"speech": "S", "hear": "H", "voice": "V", "mos": "M"}
        self.models = {what: name for what, name in names.items() if what not in without}
        self.questions, self._kill_at, self.mistakes = 0, kill_at, {}

    def _count(self) -> None:
        self.questions += 1
        if self.questions == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def speech(self, wave: Wave) -> Wave:
        self._count()
        power = np.square(wave.reshape(-1, FRAME_SAMPLES)).mean(1)
        return np.where(np.convolve(power, np.ones(5) / 5, "same") > 1e-4, 0.98, 0.02).astype(np.float32)

    def hear(self, waves: Sequence[Wave], languages: Sequence[str], quick: bool = False) -> list[dict[str, Any]]:
        self._count()
        assert len(languages) == len(waves)
        texts = [" ".join(self._words(wave)) for wave in waves]
        texts = [self.mistakes.get((text, quick), text) for text in texts]
        english = {"language": "en", "languages": {"en": 0.97, "de": 0.01}, "log_probability": -0.3}
        return [{"text": text, **english} for text in texts]

    def _words(self, wave: Wave) -> Iterator[str]:
        loud = np.convolve(np.square(wave), np.ones(160) / 160, "same") > 1e-3
        edges = np.flatnonzero(np.diff(np.concatenate([[0], loud.astype(np.int8), [0]])))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            if end - start < 0.9 * WORD_S * HEARD_RATE:
                yield "CUT"
                continue
            spectrum = np.abs(np.fft.rfft(wave[start:end]))
            pitch = spectrum.argmax() * HEARD_RATE / (end - start)
            yield WORDS[min(len(WORDS) - 1, max(0, round((pitch - LOWEST_HZ) / STEP_HZ)))]

    def voices(self, waves: Sequence[Wave]) -> list[dict[str, Any]]:
        self._count()
        voices = [voice(1.0, 0.1) if _has_overtones(wave) else voice(0.1, 1.0) for wave in waves]
        counts = [1 + len(wave) // WINDOW_SAMPLES for wave in waves]
        return [{"voice": each, "windows": [each] * count} for each, count in zip(voices, counts, strict=True)]

    def mos(self, waves: Sequence[Wave]) -> list[float]:
        self._count()
        return [4.0] * len(waves)

    def times(self) -> dict[str, float]:
        return {"hear": 3.0, "speech": 1.0}

    def close(self) -> None:
        """Nothing is open."""


def voice(*numbers: float) -> list[float]:
    """An embedding as long as ECAPA's that begins with these numbers."""
    return [*numbers, *[0.0] * (192 - len(numbers))]


def _has_overtones(wave: Wave) -> bool:
    start = int(np.flatnonzero(np.abs(wave) > 0.1)[0]) + 800
    spectrum = np.abs(np.fft.rfft(wave[start : start + 4000]))
    peak = int(spectrum.argmax())
    return bool(spectrum[2 * peak - 3 : 2 * peak + 4].max(initial=0.0) > 0.2 * spectrum[peak])


def run(out: Path, *recordings: Path, models: StandIn | None = None, **options: Any) -> Outcome:
    """Collect with stand-in models."""

    @contextlib.contextmanager
    def start(*_: object) -> Iterator[StandIn]:
        yield models or StandIn()

    tones = {"min_bandwidth_hz": None, "max_music": None}  # tones are narrow, and as steady as music
    filters = tones | options.pop("filters", {}) if recordings else options.pop("filters", {})
    return collect(CollectOptions(out=out, recordings=recordings, filters=filters, **options), NO_PROGRESS, start)


if __name__ == "__main__":  # a process that is killed, at a question or a time: OUT NUMBER|SECONDS RECORDING…
    is_time = "." in sys.argv[2]
    if is_time:
        timer = threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    models = StandIn(kill_at=0 if is_time else int(sys.argv[2]))
    run(Path(sys.argv[1]), *map(Path, sys.argv[3:]), models=models)
