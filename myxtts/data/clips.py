"""Clips that can be batched, the prepared corpus they belong to, and the list of those that were set aside."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from myxtts.data.cache import cannot_write
from myxtts.data.metadata import SetAside
from myxtts.data.store import Array, Rows, Sources, Store
from myxtts.text.tokenizer import Tokenizer


class AudioRows(Protocol):
    """The samples of clips, a row each: packed on disk (`Store`) or decoded when asked for (`DecodedAudio`)."""

    folder: Path
    """The store behind them."""
    lengths: Rows
    """Samples of each row."""
    hashes: Sources
    """Checksum of the samples of each row, the same whichever way they are kept."""

    def __getitem__(self, row: int) -> Array: ...

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy row `rows[i]` to the front of `out[i]` and leave the rest of it; any thread may call this."""


@dataclass(frozen=True)
class ClipSet:
    """Clips that can be batched: where their rows are, and what they are."""

    audio: AudioRows
    ids: Store
    audio_rows: Rows
    ids_rows: Rows
    speakers: Rows
    languages: Rows
    names: list[str]

    def __len__(self) -> int:
        return len(self.audio_rows)

    @property
    def num_samples(self) -> Rows:
        return self.audio.lengths[self.audio_rows]

    @property
    def num_ids(self) -> Rows:
        return self.ids.lengths[self.ids_rows]

    def select(self, chosen: Rows) -> ClipSet:
        """The clips at these positions."""
        return replace(
            self,
            audio_rows=self.audio_rows[chosen],
            ids_rows=self.ids_rows[chosen],
            speakers=self.speakers[chosen],
            languages=self.languages[chosen],
            names=[self.names[at] for at in chosen.tolist()],
        )


@dataclass(frozen=True)
class Prepared:
    """A corpus ready for training."""

    train: ClipSet
    val: ClipSet
    speaker_names: list[str]
    set_aside: list[SetAside]
    vocabulary: str
    """The tokenizer as the text of its file; few who open a corpus need it as an object."""
    root: Path

    def voices(self, clips: ClipSet) -> Rows:
        """A number for the voice of each clip: that of its speaker, or one of its own where nobody names him."""
        is_named = np.array([bool(name) for name in self.speaker_names])[clips.speakers]
        return np.where(is_named, clips.speakers, -1 - np.arange(len(clips)))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.vocabulary)


def set_aside_list(root: Path) -> Path:
    """The file that lists every clip not used."""
    return root / "set_aside.csv"


def write_set_aside_list(root: Path, set_aside: Sequence[SetAside]) -> None:
    """List every clip that is not used, one by one, beside the stores."""
    content = io.StringIO()
    table = csv.writer(content, delimiter="|", lineterminator="\n")
    table.writerow(["id", "reason", "detail", "where"])
    table.writerows([item.id, item.reason, item.detail, item.where] for item in set_aside)
    path = set_aside_list(root)
    encoded = content.getvalue().encode("utf-8", "replace")
    if path.is_file() and path.read_bytes() == encoded:
        return
    if os.access(root, os.W_OK):
        try:
            path.write_bytes(encoded)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise cannot_write(root, error) from error
