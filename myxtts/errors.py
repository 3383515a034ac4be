"""Errors written for users, and the interface for progress bars. Every layer may use both."""

from __future__ import annotations

from typing import Protocol


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
