"""The codes cache: what frozen networks computed for clips, kept from the moment it is first computed.

There are two kinds of rows: a clip's `codes`, or its codes, latents and speaker embedding (`latents`). Each set of
frozen networks and of clips has one folder among the stores, `KIND-NETWORKS-CLIPS`:

    index.bin       per clip: the hash of what its row is made from, the length of the row
    data.bin        uint16, the rows one after another; their lengths are known, so each row has its place
    checksums.bin   per clip: the checksum of its row, 0 while it is absent

Unlike a store, this cache grows while it is used. Rows are written one by one, data before checksum, by any number
of processes at once, and never synced: a row that a crash or a full disk left half-written does not match its
checksum and counts as absent. Every file can be created or repaired in place. This module does not know what a
row means or how it is computed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from myxtts.data.store import (
    ROWS_PER_COPY,
    Array,
    Rows,
    Sources,
    by_last_use,
    equal_sources,
    hash64,
    only_process,
    write_at,
)

CODES_VERSION = 1
"""Raise it when a file of the folder changes its format: folders of another version are not read."""
FOLDERS_KEPT = {"codes": 8, "latents": 2}
"""Folders of each kind that are kept, the most recently used. A run has two: training and validation clips."""

Flags = npt.NDArray[np.bool_]

_INDEX = np.dtype([("audio", "<u8"), ("length", "<u4")])
_log = logging.getLogger(__name__)


class _Files(NamedTuple):
    data: FileIO
    checksums: FileIO


class CodesCache:
    """The rows of one set of clips, by position in the set. Any thread may call any method at any time."""

    def __init__(self, files: _Files, index: Array, place: Path | str, kind: str = "codes") -> None:
        self._files, self.kind = files, kind
        self._place = place
        self._accepts_rows = True
        self._write_lock = threading.Lock()
        self._audio: Sources = index["audio"].astype(np.uint64)
        self._lengths: Rows = index["length"].astype(np.int64)
        self._starts: Rows = np.cumsum(self._lengths) - self._lengths
        self._maps = [mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) for file in files]
        self._data: Array = np.frombuffer(self._maps[0], "<u2", _num_elements(index))
        self._checksums: Array = np.frombuffer(self._maps[1], "<u8", len(index) + 1)[:-1]
        self._is_lost = False
        self._verified = np.zeros(len(index), np.uint64)
        """The checksum each row was seen to match in this process."""
        self._rejected = np.zeros(len(index), np.uint64)
        """The checksum each row was seen not to match."""

    @classmethod
    def open(
        cls,
        root: Path,
        audio_hashes: Sources,
        num_codes: Rows,
        dvae_key: str,
        kind: str = "codes",
        others: Sequence[Path] = (),
    ) -> CodesCache:
        """Open the rows of these clips below `root`, with those that other sets of clips hold for the same audio.

        These are looked for below `root` and `others`. If nothing can be written below `root`, readable rows are
        copied to memory, and new ones stay in memory.
        """
        index = np.zeros(len(audio_hashes), _INDEX)
        index["audio"], index["length"] = audio_hashes, num_codes
        family = f"{kind}-{hash64(CODES_VERSION, dvae_key):016x}"
        folder = root / f"{family}-{xxhash.xxh3_64_hexdigest(index.tobytes())}"
        try:
            with only_process(root, "codes.lock"):  # the next process finds the rows already copied
                cache = cls(_files_on_disk(folder, index), index, folder, kind)
                cache._copy_known_rows(other for other in _folders([root, *others], family) if other != folder)
                for old in by_last_use(root, kind)[FOLDERS_KEPT[kind] :]:
                    with contextlib.suppress(OSError), open(old / "checksums.bin", "ab") as checksums:
                        fcntl.flock(checksums, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if a process has it open
                        shutil.rmtree(old)
        except OSError as error:
            message = "%s cannot be kept in %s (%s): they stay in memory, and the next run computes them again"
            _log.warning(message, kind.capitalize(), root, error.strerror or error)
            files = (os.fdopen(os.memfd_create(name), "r+b", buffering=0) for name in _Files._fields)
            cache = cls(_sized(_Files(*files), index), index, "memory", kind)
            with contextlib.suppress(OSError):
                cache._copy_known_rows(_folders([root, *others], family))
        return cache

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def is_on_disk(self) -> bool:
        return isinstance(self._place, Path)

    @property
    def absent_bytes(self) -> int:
        """Size of the rows that are not there."""
        return int(2 * self._lengths[~self._held()].sum())

    def known(self, clips: Rows) -> Flags:
        """Return which clips have codes; each row is compared with its checksum once per process."""
        is_empty: Flags = self._lengths[clips] == 0
        if self._was_cut_off():
            return is_empty
        checksums = self._checksums[clips]
        unseen = (checksums != self._verified[clips]) & (checksums != self._rejected[clips]) & (checksums != 0)
        for clip, checksum in zip(clips[unseen].tolist(), checksums[unseen].tolist(), strict=True):
            start = self._starts[clip]
            row = self._data[start : start + self._lengths[clip]].tobytes()
            matches = _checksum(row, int(self._audio[clip])) == checksum
            (self._verified if matches else self._rejected)[clip] = checksum
        known: Flags = ((checksums == self._verified[clips]) & (checksums != 0)) | is_empty
        return known

    def read(self, clips: Rows, out: Array) -> bool:
        """Copy codes of `clips[i]` to `out[i]` [clips, width], zero-padded; return False if some are absent."""
        lengths = np.where(self.known(clips), self._lengths[clips], 0)
        if lengths.size and lengths.max() > out.shape[1]:
            raise ValueError(f"A clip has {lengths.max()} codes, more than the {out.shape[1]} of a row")
        if self._is_lost:
            out[:] = 0
            return not self._lengths[clips].any()
        columns = np.arange(out.shape[1])
        # Only what was written is touched: reading a hole of a file on a full tmpfs kills the process.
        starts = np.where(lengths > 0, self._starts[clips], len(self._data) - 1)
        inside = np.minimum(columns, np.maximum(lengths - 1, 0)[:, None])
        np.multiply(self._data[starts[:, None] + inside], columns < lengths[:, None], out=out)
        return bool((lengths == self._lengths[clips]).all())

    def row(self, clip: int) -> Array:
        """The row of a known clip, as long as it is; not a copy."""
        start = self._starts[clip]
        return self._data[start : start + self._lengths[clip]]

    def write(self, clips: Rows, rows: Sequence[Array] | Array) -> None:
        """Store the start of `rows[i]` of absent `clips[i]`; a failed write is logged and ends all writing."""
        cut = []
        for row, length in zip(rows, self._lengths[clips].tolist(), strict=True):
            if length > len(row):
                raise ValueError(f"A clip has {length} codes, more than the {len(row)} of a row")
            used = row[:length]
            if used.dtype != np.uint16:
                if used.dtype.kind not in "iu" or (used.size and (used.min() < 0 or used.max() > 0xFFFF)):
                    raise ValueError(f"Codes must be whole numbers from 0 to {0xFFFF}")
                used = used.astype("<u2")
            cut.append(used)
        with self._write_lock:
            absent = np.flatnonzero(~self.known(clips))
            if self._accepts_rows and len(absent):
                try:
                    self._write_rows(clips[absent], [cut[place] for place in absent])
                except OSError as error:
                    self._accepts_rows = False
                    message = "No more %s can be kept in %s (%s): those of other clips will be computed again"
                    _log.warning(message, self.kind, self._place, error.strerror or error)

    def close(self) -> None:
        """Release the folder. Rows can still be read; writes are ignored."""
        with self._write_lock:
            self._accepts_rows = False
            if not self._files.checksums.closed:
                # The mapping holds a duplicate of the descriptor, and with it the lock.
                with contextlib.suppress(OSError):
                    fcntl.flock(self._files.checksums, fcntl.LOCK_UN)
            for file in self._files:
                with contextlib.suppress(OSError):
                    file.close()

    def _write_rows(self, clips: Rows, rows: Sequence[Array]) -> None:
        data, checksums = (file.fileno() for file in self._files)
        made: list[int] = []
        places = (values[clips].tolist() for values in (self._starts, self._audio))
        for row, start, audio_hash in zip(rows, *places, strict=True):
            content = row.tobytes()
            write_at(data, bytearray(content), start * row.itemsize)
            made.append(_checksum(content, audio_hash))
        self._rejected[clips] = 0
        for clip, checksum in zip(clips.tolist(), made, strict=True):
            write_at(checksums, bytearray(checksum.to_bytes(8, "little")), clip * 8)

    def _was_cut_off(self) -> bool:
        """True, for good, if a mapped file has shrunk: the kernel kills a process that reads beyond its end."""
        if not self._is_lost and any(mapped.size() < len(mapped) for mapped in self._maps):
            self._is_lost, self._accepts_rows = True, False
            _log.warning("The rows in %s were cut off; they are computed again until the next start", self._place)
        return self._is_lost

    def _held(self) -> Flags:
        held: Flags = ((self._checksums != 0) & (self._checksums != self._rejected)) | (self._lengths == 0)
        return held

    def _copy_known_rows(self, folders: Iterable[Path]) -> None:
        """Copy absent rows from the first of `folders` that has them; every copied row is checked."""
        for folder in folders:
            absent = np.flatnonzero(~self._held())
            if not len(absent):
                return
            try:
                donor = _open_donor(folder)
            except (OSError, ValueError):  # gone, not readable, or damaged
                continue
            held = np.flatnonzero(donor._held())
            found, places = equal_sources(self._audio[absent], donor._audio[held])
            wanted, rows = absent[found], held[places]
            same_length = self._lengths[wanted] == donor._lengths[rows]
            wanted, rows = wanted[same_length], rows[same_length]
            for start in range(0, len(wanted), ROWS_PER_COPY):
                chunk = rows[start : start + ROWS_PER_COPY]
                intact = donor.known(chunk)
                copied = [donor.row(clip) for clip in chunk[intact].tolist()]
                self.write(wanted[start : start + ROWS_PER_COPY][intact], copied)
            donor.close()


def _folders(roots: Sequence[Path], family: str) -> Iterator[Path]:
    return (folder for root in roots for folder in by_last_use(root, family))


def _files_on_disk(folder: Path, index: Array) -> _Files:
    """Open the files of a folder, creating or extending them where needed, and mark the folder as in use."""
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    content, index_path = index.tobytes(), folder / "index.bin"
    if not index_path.exists() or index_path.read_bytes() != content:
        index_path.write_bytes(content)
    for name in _Files._fields:
        (folder / f"{name}.bin").touch()
    files = _open_files(folder, "r+b")
    fcntl.flock(files.checksums, fcntl.LOCK_SH)
    return _sized(files, index)


def _open_donor(folder: Path) -> CodesCache:
    """Open the codes of another set of clips for reading. The folder's name holds the checksum of its index."""
    content = (folder / "index.bin").read_bytes()
    if not folder.name.endswith(xxhash.xxh3_64_hexdigest(content)):
        raise ValueError(f"{folder}: the index does not match its checksum")
    return CodesCache(_open_files(folder, "rb"), np.frombuffer(content, _INDEX), folder)


def _open_files(folder: Path, mode: str) -> _Files:
    return _Files(*(FileIO(folder / f"{name}.bin", mode) for name in _Files._fields))


def _sized(files: _Files, index: Array) -> _Files:
    """Extend files to their full size and leave their content; only data.bin may have holes."""
    end = 2 * _num_elements(index)
    if os.fstat(files.data.fileno()).st_size < end:
        write_at(files.data.fileno(), bytearray(2), end - 2)
    present = os.fstat(files.checksums.fileno()).st_size
    write_at(files.checksums.fileno(), bytearray(max(8 * (len(index) + 1) - present, 0)), present)
    return files


def _num_elements(index: Array) -> int:
    """Codes of all clips, and a final 0 that is read for clips without codes."""
    return int(index["length"].sum(dtype=np.int64)) + 1


def _checksum(row: bytes, audio_hash: int) -> int:
    """Never 0, which means absent. The seed gives equal codes of different audio different checksums."""
    return xxhash.xxh3_64_intdigest(row, seed=audio_hash) or 1
