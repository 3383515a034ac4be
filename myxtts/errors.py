"""Errors written for users, text that is safe to print, and the interface for progress bars."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

INSTALL_EXTRA = "pip install -e '.[{}]' in the folder of MyXTTS"  # it is not on PyPI


def printable(text: str) -> str:
    """Return text with control characters and changes of direction escaped, which could disguise a message.

    Passwords and signatures of URLs are left out.
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), without_secrets(text))


def without_secrets(text: str) -> str:
    """Return text without what the URLs in it may hide; as a path, a URL has only one slash."""
    if ":/" not in text:
        return text
    return re.sub(r"\b(https?:/+[^\s?]*)\?[^\s,;)]+", r"\1?…", re.sub(r"\b(\w+:/+)[^/\s@]*@", r"\1…@", text))


class MyXTTSError(Exception):
    """Base class of expected failures; the command line prints the message without a traceback."""

    def __str__(self) -> str:
        return printable(super().__str__())


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
