"""How far a speech is, for whoever is to show it: every bar counts sentences, done of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from myxtts.data.fill import NoProgress, Progress

Advance = Callable[[int], None]
NO_PROGRESS: Progress = NoProgress()


@dataclass(frozen=True)
class Bars:
    """The bars of some of the sentences of a speech, one after the other."""

    progress: Progress
    total: int
    """Sentences of the whole speech."""
    num_before: int = 0
    """Sentences that are done and not among these."""

    @contextmanager
    def bar(self, title: str, num_done: int = 0) -> Iterator[Advance]:
        """A bar at `num_done` of these sentences, and what moves it."""
        self.progress.begin(title, self.total)
        try:
            self.progress.advance(self.num_before + num_done)
            yield self.progress.advance
        finally:
            self.progress.end()
