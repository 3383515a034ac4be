"""Where recordings come from: folders, tar archives, Parquet, lhotse and manifests, on this machine or remote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from myxtts.data.corpus import SetAside


class Recording(NamedTuple):
    """A clip as its source describes it."""

    id: str  # unique within its unit
    text: str
    audio: bytes | Path
    speaker: str = ""
    language: str = ""
    start: float = 0.0  # seconds, for a piece of a longer file
    duration: float | None = None
    where: str = ""  # for messages and set_aside.csv: line of a manifest, member of a tar
    held_out: bool = False


class Unit(Protocol):
    """A picklable part of a source that one job reads: a tar, a Parquet row group, a slice of a manifest."""

    @property
    def name(self) -> str:
        """Stable and relative to the source; units sort by it."""

    @property
    def key(self) -> str:
        """A hash of everything that decides the content: path relative to the source, size, mtime or ETag."""

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of audio, for cutting shards."""

    def recordings(self) -> Iterator[Recording | SetAside]:
        """Yield every recording; what cannot be read is yielded as `SetAside`, never dropped."""
