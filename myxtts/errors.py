"""Errors written for users, text that is safe to print, and the interface for progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

_UNSAFE = dict.fromkeys(
    {*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {ord("\n"), ord("\t")}
)
"""Control characters, which a terminal obeys, and characters that override the direction of what follows."""


def printable(text: str) -> str:
    """Return text from files without what could change or mislead a terminal; `?` for what is not Unicode."""
    return text.translate(_UNSAFE).encode("utf-8", "replace").decode("utf-8")


class MyXTTSError(Exception):
    """Base class of expected failures; the command line prints the message without a traceback."""


class ConfigError(MyXTTSError):
    """Unusable settings or flags; the message lists every problem."""


class DatasetError(MyXTTSError):
    """An unusable corpus, vocabulary, cache or file."""


class PipelineError(MyXTTSError):
    """A failure of the running pipeline or training loop."""


class Progress(Protocol):
    """Shows the progress of a long task."""

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
