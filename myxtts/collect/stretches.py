"""Audio in stretches of about a minute: decoded, searched for speech, and cut.

Memory holds one stretch and one block, whatever the length of the recording. After a stop the reader continues
where the catalog ends; since blocks and frames begin at the same times again, so do the cuts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import soxr

from myxtts.audio import UnusableAudio, Wave
from myxtts.collect import quality
from myxtts.collect.catalog import Source
from myxtts.collect.cutting import FRAME_S, FRAME_SAMPLES, LEVELS_PER_FRAME, PIECE, RATE, Numbers, Span, plan
from myxtts.collect.recordings import BLOCK_S, Recording, mono

if TYPE_CHECKING:
    from myxtts.collect.listeners import Listening

_CONTEXT_S = 3.2  # heard by the VAD before a block, to be in the state it would have reached
_OTHER_CHANNEL_DB = 12.0

Item = TypeVar("Item")


class Stretch(NamedTuple):
    """About a minute of one channel, and how it is cut. Spans are relative to its start."""

    source: Source
    channel: int
    start: float
    spans: list[Span]
    rate: int
    wave: Wave
    probabilities: Numbers
    is_end: bool = False
    damage: str = ""

    def part(self, start: float, end: float) -> Wave:
        """The samples between two times at the recording's rate."""
        first, *ends = (round((self.start + at) * self.rate) for at in (0.0, start, end))
        return self.wave[max(0, ends[0] - first) : max(0, ends[1] - first)]

    def heard(self, start: float, end: float) -> Wave:
        """The same at the rate of the models."""
        return at_rate(self.part(start, end), self.rate)

    @property
    def end(self) -> float:
        return self.start + (self.spans[-1].end if self.spans else 0.0)

    @property
    def pieces(self) -> list[Span]:
        return [span for span in self.spans if span.kind == PIECE]


def stretches(source: Source, listening: Listening) -> Iterator[Stretch]:
    """Cut what is left of a recording; its last stretch says that it ends, and what is wrong with it."""
    for channel, position in enumerate(source.done_until):
        is_last = channel == source.channels - 1
        nothing = np.zeros(0, np.float32)
        end, damage = position, ""
        try:
            with Recording(Path(source.path)) as recording:
                for stretch in _cut(recording, source, channel, position, listening):
                    end = stretch.end
                    yield stretch
                damage = recording.damage
        except (UnusableAudio, OSError, RuntimeError, ValueError) as error:
            damage = error.detail if isinstance(error, UnusableAudio) else str(error)
            is_last = True
        if is_last or damage:
            yield Stretch(source, channel, end, [], RATE, nothing, nothing, is_last, damage)


def _cut(
    recording: Recording, source: Source, channel: int, position: float, listening: Listening
) -> Iterator[Stretch]:
    """Cut one channel from a position on. Blocks begin at the same times in every call, and so do the cuts."""
    side = channel if source.channels > 1 else None
    rate, begin = recording.facts.sample_rate, position // BLOCK_S * BLOCK_S
    before = recording.part(max(0.0, begin - _CONTEXT_S), begin)
    held = _Held(begin, rate)
    for block, is_end in _with_last(recording.blocks(begin)):
        held.add(mono(block.samples, side), *_analyse(before, block.samples, rate, side, listening))
        before = block.samples[-round(_CONTEXT_S * rate) :]
        held.drop(max(position, held.start))
        spans = plan(held.probabilities, held.levels, is_start=held.start == 0, is_end=is_end)
        if is_end and spans:  # the last frame may reach beyond the end
            spans[-1] = spans[-1]._replace(end=max(spans[-1].start, len(held.wave) / rate))
        if spans:
            yield Stretch(source, channel, held.start, spans, rate, held.wave, held.probabilities)
            held.drop(held.start + spans[-1].end)


class _Held:
    """Audio that is not cut yet, with its analysis; it begins at a frame of the VAD."""

    def __init__(self, start: float, rate: int) -> None:
        self.start, self._rate = start, rate
        self.wave = self.probabilities = self.levels = np.zeros(0, np.float32)

    def add(self, wave: Wave, probabilities: Numbers, levels: Numbers) -> None:
        self.wave = np.concatenate([self.wave, wave])
        self.probabilities = np.concatenate([self.probabilities, probabilities])
        self.levels = np.concatenate([self.levels, levels])

    def drop(self, until: float) -> None:
        frames = round((until - self.start) / FRAME_S)
        after = self.start + frames * FRAME_S
        self.wave = self.wave[round(after * self._rate) - round(self.start * self._rate) :]
        self.probabilities = self.probabilities[frames:]
        self.levels = self.levels[frames * LEVELS_PER_FRAME :]
        self.start = after


def _with_last(blocks: Iterator[Item]) -> Iterator[tuple[Item, bool]]:
    """Yield items, and whether each is the last."""
    current = next(blocks, None)
    while current is not None:
        following = next(blocks, None)
        yield current, following is None
        current = following


def _analyse(
    before: Wave, samples: Wave, rate: int, side: int | None, listening: Listening
) -> tuple[Numbers, Numbers]:
    """The probabilities of speech and the levels of a block; `before` is what the VAD hears first."""
    wave = at_rate(mono(samples, side), rate)
    wave = np.pad(wave, (0, -len(wave) % FRAME_SAMPLES))
    context = at_rate(mono(before, side), rate)
    context = context[len(context) % FRAME_SAMPLES :]
    speech = listening.speech(np.concatenate([context, wave]))[len(context) // FRAME_SAMPLES :]
    levels = quality.contrast_of(wave)
    if side is not None:  # a voice that is louder in the other channel belongs there
        other = at_rate(mono(samples, 1 - side), rate)
        theirs = quality.levels_of(np.pad(other, (0, len(wave) - len(other))))
        louder = (theirs - quality.levels_of(wave)).reshape(-1, LEVELS_PER_FRAME).mean(1) > _OTHER_CHANNEL_DB
        speech = np.where(louder, np.float32(0), speech)
    return speech, levels


def at_rate(wave: Wave, rate: int) -> Wave:
    """Samples at the rate of the models."""
    resampled: Wave = soxr.resample(wave, rate, RATE) if rate != RATE and len(wave) else wave
    return resampled
