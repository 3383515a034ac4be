"""Clips decoded from their files whenever a batch needs them, and what decides the samples of a clip.

For comparison and for corpora too large to pack. Of each clip a store of kind `lengths` keeps two numbers: how
many samples it has, and the checksum a packed row of them would have. This module does not build that store
(`fill`) and knows neither metadata nor batches.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from myxtts import audio
from myxtts.config import HOP_SAMPLES, SAMPLE_RATE, DataSettings
from myxtts.data.store import Array, Rows, Store, row_hash
from myxtts.errors import DatasetError

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
