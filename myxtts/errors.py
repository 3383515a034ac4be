"""The errors a user is meant to read: what was found, what was expected, what to do."""

from __future__ import annotations


class MyXTTSError(Exception):
    """Base of every expected failure; the command line prints its text without a traceback."""


class ConfigError(MyXTTSError):
    """Settings or flags that cannot be used; lists every problem found, not only the first."""


class DatasetError(MyXTTSError):
    """A corpus, vocabulary or cache that cannot be used."""


class PipelineError(MyXTTSError):
    """A stage of the running pipeline failed."""
