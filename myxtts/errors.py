"""What every layer may raise or report: errors written for users, and the progress of long work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class MyXTTSError(Exception):
    """Base of every expected failure; the command line prints its text without a traceback."""


class ConfigError(MyXTTSError):
    """Settings or flags that cannot be used; lists every problem found, not only the first."""


class DatasetError(MyXTTSError):
    """A corpus, vocabulary or cache that cannot be used."""


class PipelineError(MyXTTSError):
    """A worker of the running pipeline failed."""


class Progress(Protocol):
    """Shows how far a long piece of work has come."""

    def begin(self, title: str, total: int) -> None: ...
    def advance(self, count: int) -> None: ...
    def end(self) -> None: ...


class NoProgress:
    """Shows nothing."""

    def begin(self, title: str, total: int) -> None: ...
    def advance(self, count: int) -> None: ...
    def end(self) -> None: ...


NO_PROGRESS: Progress = NoProgress()


@contextmanager
def progress_bar(progress: Progress, title: str, total: int, num_done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show a bar that starts at `num_done`; yields the function that advances it."""
    progress.begin(title, total)
    try:
        progress.advance(num_done)
        yield progress.advance
    finally:
        progress.end()
