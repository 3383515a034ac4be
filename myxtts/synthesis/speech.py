"""What a synthesis hands back: the wave, and a report of how it came about. Also the settings of one, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from myxtts.audio import Wave, write
from myxtts.errors import ConfigError, PipelineError
from myxtts.model.generation import Sampling
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.synthesis.takes import Take

PUBLISHED_SAMPLING = Sampling(temperature=0.75, top_k=50, top_p=0.85, repetition_penalty=5.0)
"""As XTTS-v2's `config.json` has it; its length penalty of 1 counts only for a beam search, and there is none."""
OWN_SAMPLING = replace(PUBLISHED_SAMPLING, repetition_penalty=1.0, penalise_prompt=False)
"""For a model trained from scratch: speech repeats codes, and a model of a small corpus knows well which. With the
published penalty one that had learnt eight sentences by heart said none of them."""
ASKED = ("temperature", "repetition_penalty", "guidance", "central")
"""What a command line may ask for."""
SLOWEST_SPEED, FASTEST_SPEED = 0.5, 2.0
MOST_GUIDANCE = 10.0
PAUSE_SECONDS = 0.1
"""Silence between two sentences, beside what the model puts at their ends."""
SILENT = 1e-3
"""A wave that nowhere reaches this is no speech."""
_FADE_SAMPLES = OUTPUT_SAMPLE_RATE // 250
_FORMATS = (".wav", ".flac")


@dataclass(frozen=True)
class SentenceReport:
    """One sentence as it was spoken."""

    text: str
    num_codes: int
    seconds: float
    num_attempts: int
    trouble: str | None
    """`empty`, `run-away`, `repetition` or `too short` if the best attempt still was; `silent` if its wave is."""


@dataclass(frozen=True)
class Report:
    """How a speech came about; with the same seed, weights and texts it comes about again."""

    language: str
    voice: str
    vocoder: str
    seed: int
    speed: float
    sentences: tuple[SentenceReport, ...]
    unknown_characters: dict[str, str]
    """Characters that the vocabulary lacks, and what was said for them."""
    spent_seconds: float
    """From the text to the last sample; of the whole batch where texts were spoken together."""
    voice_notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Of speech, without the pauses between sentences."""
        return sum(sentence.seconds for sentence in self.sentences)

    @property
    def is_flawless(self) -> bool:
        return not self.notes()

    def notes(self) -> list[str]:
        """What the user should know, in sentences."""
        notes = list(self.voice_notes)
        if self.vocoder != "hifigan":
            notes.append("no decoder is trained: the wave is Griffin and Lim's guess from the DVAE's mel")
        if self.unknown_characters:
            pairs = (f"{a!r} as {b!r}" if b else f"{a!r} left out" for a, b in self.unknown_characters.items())
            notes.append(f"the vocabulary lacks characters of the text: {', '.join(pairs)}")
        for number, sentence in enumerate(self.sentences, 1):
            if sentence.trouble:
                notes.append(
                    f"sentence {number} came out badly ({sentence.trouble}, {sentence.num_attempts} attempts): "
                    f"{sentence.text[:60]!r}"
                )
            elif sentence.num_attempts > 1:
                notes.append(f"sentence {number} needed {sentence.num_attempts} attempts: {sentence.text[:60]!r}")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"seconds": self.seconds, "notes": self.notes()}


@dataclass(frozen=True)
class Speech:
    """A wave of 24 kHz and its report."""

    wave: Wave
    report: Report

    def save(self, path: Path) -> None:
        """Write the wave as 16-bit WAV or FLAC, by the extension."""
        check_output(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, self.wave, OUTPUT_SAMPLE_RATE)
        except (OSError, RuntimeError) as error:  # libsndfile's own errors are RuntimeErrors
            raise ConfigError(f"{path} cannot be written: {error}") from error


def check_output(path: Path) -> None:
    """Raise an error, before anything is computed, if speech cannot be written under that name."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"{path}: speech is written as WAV or FLAC; name a file that ends in .wav or .flac")


def as_asked(usual: Sampling, asked: object) -> Sampling:
    """The sampling with what somebody asked for by these names, and the usual where that is None or absent."""
    values = {name: getattr(asked, name, None) for name in ASKED}
    return replace(usual, **{name: value for name, value in values.items() if value is not None})


def check_manner(sampling: Sampling, speed: float, num_attempts: int, seed: int | None, knows_codes: bool) -> None:
    """One error with every value that cannot be used; `knows_codes` says whether the model has a trained DVAE."""
    penalty, guidance = sampling.repetition_penalty, sampling.guidance
    demands = {
        f"speed is {speed}, expected {SLOWEST_SPEED} to {FASTEST_SPEED}": SLOWEST_SPEED <= speed <= FASTEST_SPEED,
        f"temperature is {sampling.temperature}, expected above 0": sampling.temperature > 0,
        f"top_k is {sampling.top_k}, expected 0 (all) or more": sampling.top_k >= 0,
        f"top_p is {sampling.top_p}, expected above 0 and up to 1": 0 < sampling.top_p <= 1,
        f"repetition penalty is {penalty}, expected 1 or more": penalty >= 1,
        f"guidance is {guidance}, expected 1 to {MOST_GUIDANCE:g}": 1 <= guidance <= MOST_GUIDANCE,
        "central codes are found by the DVAE, which is missing or was never trained (--stages dvae, or dvae.pth "
        "beside XTTS-v2's weights); speak without --central": knows_codes or not sampling.central,
        f"attempts are {num_attempts}, expected 1 or more": num_attempts >= 1,
        f"seed is {seed}, expected 0 or more": seed is None or seed >= 0,
    }
    if problems := [problem for problem, holds in demands.items() if not holds]:
        raise ConfigError("This cannot be spoken with:\n  " + "\n  ".join(problems))


def sentence_report(text: str, take: Take, num_samples: int, loudest: float) -> SentenceReport:
    """The report of one sentence; silence counts only where there should be sound."""
    silent = "silent" if take.trouble is None and loudest < SILENT else take.trouble
    seconds = num_samples / OUTPUT_SAMPLE_RATE
    return SentenceReport(text, len(take.written.codes), seconds, take.num_attempts, silent)


def require_sound(report: Report) -> None:
    """Raise an error when no sentence of a speech says anything."""
    if not any(sentence.num_codes for sentence in report.sentences):
        first = report.sentences[0]
        raise PipelineError(
            f"The model said nothing in {first.num_attempts} attempts at {first.text[:60]!r}: it ends every "
            "sentence at once. Is it trained enough, and on this language?"
        )


def softened(wave: Wave, *, starts: bool, ends: bool) -> Wave:
    """A copy that starts from silence and ends in it, so that no edge of a sentence clicks."""
    wave = wave.copy()
    length = min(_FADE_SAMPLES, len(wave))
    rise = np.linspace(0, 1, length, dtype=np.float32)
    if starts:
        wave[:length] *= rise
    if ends:
        wave[len(wave) - length :] *= rise[::-1]
    return wave


def pause() -> Wave:
    return np.zeros(round(PAUSE_SECONDS * OUTPUT_SAMPLE_RATE), np.float32)


def joined(waves: Sequence[Wave]) -> Wave:
    """Sentences one after the other with pauses between them; those that say nothing leave none."""
    parts: list[Wave] = []
    for wave in waves:
        if len(wave):
            parts += [pause()] * bool(parts) + [softened(wave, starts=True, ends=True)]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
