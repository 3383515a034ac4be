"""Sentences to codes, tried again with other random numbers while the guards object. Knows no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from myxtts.errors import PipelineError
from myxtts.model.generation import Sampling
from myxtts.synthesis.guards import Bounds, severity, trouble
from myxtts.synthesis.progress import Bars
from myxtts.synthesis.writer import Draft, Writers, Written, draws


class Part(NamedTuple):
    """One sentence of a text, in the voice that says it."""

    number: int
    """Its place in the text, which decides its random numbers."""
    ids: Sequence[int]
    voice: Tensor
    """[1, 32, dim]"""
    bounds: Bounds


class Take(NamedTuple):
    """The best attempt at a sentence."""

    written: Written
    trouble: str | None
    """What the guards still object to after the last attempt."""
    num_attempts: int


@dataclass(frozen=True)
class Manner:
    """How sentences are written."""

    sampling: Sampling
    seed: int
    num_attempts: int
    batch_size: int
    """Sentences at a time, at most."""

    def draft(self, part: Part, attempt: int) -> Draft:
        drawn = draws(self.seed, part.number, attempt, part.bounds.most)
        return Draft(part.ids, part.voice, part.bounds.most, drawn)

    def sampling_of(self, attempt: int) -> Sampling:
        """A central code would be the same again: later attempts draw one."""
        return replace(self.sampling, central=False) if attempt else self.sampling

    @property
    def attempts(self) -> range:
        """Trying again helps only where chance decides."""
        return range(1 if self.sampling.greedy else self.num_attempts)


def take_all(writers: Writers, parts: Sequence[Part], manner: Manner, bars: Bars) -> list[Take]:
    """A take of every part, in order; sentences of similar length are written together."""
    best: dict[int, Take] = {}
    waiting = sorted(range(len(parts)), key=lambda index: parts[index].bounds.most)
    for attempt in manner.attempts:
        title = f"Speaking again (attempt {attempt + 1})" if attempt else "Speaking"
        with bars.bar(title, len(parts) - len(waiting)) as advance:
            for first in range(0, len(waiting), manner.batch_size):
                batch = waiting[first : first + manner.batch_size]
                drafts = [manner.draft(parts[index], attempt) for index in batch]
                writer = writers.begin(drafts, manner.sampling_of(attempt))
                writer.finish(advance)
                for row, index in enumerate(batch):
                    found = judge(writer.written(row), parts[index].bounds, attempt)
                    best[index] = min(best.get(index, found), found, key=lambda take: severity(take.trouble))
        waiting = [index for index in waiting if best[index].trouble]
        for index in waiting:
            best[index] = best[index]._replace(num_attempts=attempt + 1)
        if not waiting:
            break
    return [best[index] for index in range(len(parts))]


def judge(written: Written, limits: Bounds, attempt: int) -> Take:
    """A whole sentence and what the guards say."""
    require_finite(written)
    return Take(written, trouble(written.codes.tolist(), limits), attempt + 1)


def require_finite(written: Written) -> None:
    """Raise an error when the network computes no numbers."""
    if not bool(written.latents.isfinite().all()):
        raise PipelineError(
            "The GPT computes NaN or infinity: its weights are damaged, or its training diverged. "
            "Use an earlier checkpoint."
        )
