"""Clips that can be batched, the prepared corpus they belong to, and the list of those that were set aside."""

from __future__ import annotations

import csv
import io
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from myxtts import audio
from myxtts.config import HOP_SAMPLES, SAMPLE_RATE, DataSettings
from myxtts.data.corpus import SetAside
from myxtts.data.store import Array, Rows, Sources, Store, cannot_write, row_hash
from myxtts.errors import DatasetError
from myxtts.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodeOptions:
    """What decides the samples of a clip besides its file."""

    max_samples: int
    trim_silence_db: float

    @classmethod
    def of(cls, data: DataSettings) -> DecodeOptions:
        """The longest clip is the one whose mel, with its frame at sample 0, has `max_mel_frames` frames."""
        return cls(data.max_mel_frames * HOP_SAMPLES - 1, data.trim_silence_db)

    @property
    def max_seconds(self) -> float:
        return self.max_samples / SAMPLE_RATE

    def decode(self, path: Path) -> audio.Pcm:
        """The samples of one file."""
        return audio.decode(path, SAMPLE_RATE, self.max_seconds, self.trim_silence_db)


def measured(records: Array) -> list[Array]:
    """What is kept of packed rows whose samples are not: for each its length and its checksum."""
    return list(np.stack([records["length"].astype(np.uint64), records["hash"]], axis=1))


class DecodedAudio:
    """The rows a packed store would have, each decoded when it is asked for. Any number of threads may ask."""

    def __init__(self, kept: Store, paths: Sequence[str], stats: Array, options: DecodeOptions) -> None:
        """`kept` holds what `measured` says of each file; `stats` [files, 3]: its size and times back then."""
        self.folder = kept.folder
        self.set_aside = kept.set_aside
        self.options = options
        rows = np.flatnonzero(kept.lengths)
        numbers = np.zeros((len(rows), 2), np.uint64)
        kept.gather_padded(rows, numbers)
        self.lengths = np.zeros(len(kept), np.int64)
        self.lengths[rows] = numbers[:, 0]
        self.hashes = np.zeros(len(kept), np.uint64)
        self.hashes[rows] = numbers[:, 1]
        self._paths = paths
        self._stats = stats
        self._warned = False

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> audio.Pcm:
        path = Path(self._paths[row])
        try:
            pcm = self.options.decode(path)
        except audio.UnusableAudio as error:
            raise _not_as_prepared(path, f"{error.reason} ({error.detail})") from None
        if len(pcm) != self.lengths[row]:
            raise _not_as_prepared(path, f"{self.lengths[row]} samples were expected, {len(pcm)} are there")
        if row_hash(pcm) != self.hashes[row]:
            self._explain_other_samples(row, path)
        return pcm

    def gather(self, rows: Rows, out: Array) -> None:
        """Decode row `rows[i]` to the front of `out[i]`; the rest of `out[i]` keeps whatever it held."""
        for slot, row in zip(out, rows.tolist(), strict=True):
            pcm = self[row]
            slot[: len(pcm)] = pcm

    def _explain_other_samples(self, row: int, path: Path) -> None:
        """A file that was written to is an error; an untouched one may decode a little differently elsewhere.

        Decoders differ in the last bit between processors, and preparing again would not change that.
        """
        try:
            now = path.stat()
        except OSError as error:
            raise _not_as_prepared(path, error.strerror or str(error)) from None
        if [now.st_size, now.st_mtime_ns, now.st_ctime_ns] != self._stats[row].tolist():
            raise _not_as_prepared(path, "the file was written to")
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s decodes to other samples than when it was prepared, though nobody wrote to it: "
                "was that on another machine, or is the disk failing?",
                path,
            )


def _not_as_prepared(path: Path, found: str) -> DatasetError:
    return DatasetError(
        f"{path} is not what it was when the corpus was prepared: {found}.\n"
        "With native_loading off the files themselves are read for every batch. Restore the file or take it out "
        "of the metadata, then prepare again: only what has changed is decoded anew."
    )


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
class PreparedCorpus:
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
