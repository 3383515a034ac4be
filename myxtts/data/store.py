"""The file format of the cache: ragged rows packed in one memory-mapped file, each with a checksum.

A store is a folder, written once and never changed:

    data.bin    the rows one after another, each starting on a 64-byte boundary
    index.npy   per row: where it starts, how long it is, a label, its checksum, the identity of its source
    meta.json   checksum of the index, size of the data, rows set aside with the reason, checksum of itself

Rows are PCM, spoken text, token ids or codes; this module does not know which, nor where stores live (`cache`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from myxtts.errors import DatasetError
from myxtts.files import sync_path

FORMAT_VERSION = 2
"""Raise it whenever a file of a store changes its form: stores of another version are not read."""
ROW_ALIGNMENT_BYTES = 64

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]
Sources = npt.NDArray[np.uint64]

_INDEX = np.dtype([("offset", "<u8"), ("length", "<u4"), ("label", "<u4"), ("hash", "<u8"), ("source", "<u8")])


class CacheDamaged(DatasetError):
    """A store whose bytes are not those that were written."""


class Store:
    """An open store. Rows are read-only views of the mapped file."""

    def __init__(self, folder: Path, dtype: npt.DTypeLike) -> None:
        self.folder = folder
        self.dtype = np.dtype(dtype)
        try:
            meta = _read_meta(folder / "meta.json")
            index_hash = xxhash.xxh3_128_hexdigest((folder / "index.npy").read_bytes())
            data_bytes = (folder / "data.bin").stat().st_size
            if (meta["index_hash"], meta["data_bytes"]) != (index_hash, data_bytes):
                raise CacheDamaged(f"{folder}: the files are not those that were written")
            index: Array = np.load(folder / "index.npy", allow_pickle=False)
            self._data: Array = (
                np.memmap(folder / "data.bin", self.dtype, mode="r") if data_bytes else np.empty(0, dtype)
            )
        except OSError as error:
            raise CacheDamaged(f"{folder}: {error.strerror or error}") from None
        self.recipe: dict[str, Any] = meta["recipe"]
        self.limits: dict[str, Any] = meta["limits"]
        self.set_aside = {int(row): (str(reason), str(detail)) for row, reason, detail in meta["set_aside"]}
        self.lengths = index["length"].astype(np.int64)
        self.labels = index["label"].astype(np.int64)
        self.sources = index["source"].astype(np.uint64)
        self._starts = (index["offset"] // self.dtype.itemsize).astype(np.int64)
        self.hashes = index["hash"].astype(np.uint64)
        self._verified = self.lengths == 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Array:
        self.verify(np.array([row]))
        return self._row(row)

    def bytes_of(self, rows: Rows) -> list[bytes]:
        """The content of many short rows at once."""
        self.verify(rows)
        data = self._data.view(np.uint8).data
        starts = self._starts[rows] * self.dtype.itemsize
        ends = starts + self.lengths[rows] * self.dtype.itemsize
        return [bytes(data[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]

    def gather(self, rows: Rows, out: Array) -> None:
        """Copy row `rows[i]` to the front of `out[i]`; the rest of `out[i]` keeps whatever it held."""
        if not self._verified[rows].all():
            self.verify(rows)
        starts = self._starts[rows]
        ends = starts + self.lengths[rows]
        data = self._data
        for slot, start, end in zip(out, starts.tolist(), ends.tolist(), strict=True):
            slot[: end - start] = data[start:end]

    def gather_padded(self, rows: Rows, out: Array) -> None:
        """The same for short rows, in one indexing call, with zeros behind each row."""
        if not self._verified[rows].all():
            self.verify(rows)
        columns = np.arange(out.shape[1])
        places = np.minimum(self._starts[rows, None] + columns, len(self._data) - 1)
        np.multiply(self._data[places], columns < self.lengths[rows, None], out=out)

    def verify(self, rows: Rows) -> None:
        """Compare rows with their checksums, each once per process; a mismatch marks the store for rebuilding."""
        for row in rows[~self._verified[rows]].tolist():
            if not self.is_intact(row):
                mark_damaged(self.folder)
                raise CacheDamaged(
                    f"{self.folder}: row {row} is not what was written (a failing disk or memory?).\n"
                    "It has been marked: run the command again, and only what is damaged is prepared anew."
                )

    def all_intact(self) -> bool:
        """Whether every row matches its checksum; if not, the store is marked for rebuilding."""
        if all(self.is_intact(row) for row in range(len(self))):
            return True
        mark_damaged(self.folder)
        return False

    def is_intact(self, row: int) -> bool:
        """Whether one row matches its checksum."""
        if not self._verified[row]:
            self._verified[row] = _hash(self._row(row)) == int(self.hashes[row])
        return bool(self._verified[row])

    def _row(self, row: int) -> Array:
        start = self._starts[row]
        return self._data[start : start + self.lengths[row]]


class StoreWriter:
    """A store being built in a folder of its own."""

    def __init__(self, folder: Path, sources: Sources) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.data_path = folder / "data.bin"
        self.data_path.touch()
        self.end = 0
        """Bytes taken in data.bin; other processes may write behind it as long as it is moved along."""
        self._index: Array = np.zeros(len(sources), _INDEX)
        self._index["source"] = sources
        self._set_aside: list[tuple[int, str, str]] = []

    def append(self, rows: Sequence[int], arrays: Sequence[Array], labels: Sequence[int] | int = 0) -> None:
        """Write rows and enter them in the index."""
        self.append_packed(rows, *pack(arrays), labels)

    def append_packed(
        self, rows: Sequence[int], packed: bytearray, records: Array, labels: Sequence[int] | int = 0
    ) -> None:
        """The same for rows that `pack` has made, perhaps in another process."""
        with open(self.data_path, "r+b") as file:
            write_at(file.fileno(), packed, self.end)
        self.enter(rows, records, self.end, labels)
        self.end += len(packed)

    def enter(self, rows: Sequence[int], records: Array, offset: int, labels: Sequence[int] | int = 0) -> None:
        """Enter rows that `pack` made and that already stand at `offset`."""
        at = np.asarray(rows, np.int64)
        records = records.copy()
        records["offset"] += np.uint64(offset)
        records["label"] = labels
        records["source"] = self._index["source"][at]
        self._index[at] = records

    def set_aside(self, row: int, reason: str, detail: str) -> None:
        """Leave a row empty and say why."""
        self._set_aside.append((row, reason, detail))

    def finish(self, recipe: Mapping[str, object], limits: Mapping[str, object] | None = None) -> None:
        """Write index and meta, and bring everything to the disk."""
        np.save(self.folder / "index.npy", self._index, allow_pickle=False)
        body = {
            "format": FORMAT_VERSION,
            "index_hash": xxhash.xxh3_128_hexdigest((self.folder / "index.npy").read_bytes()),
            "data_bytes": self.data_path.stat().st_size,
            "set_aside": sorted(self._set_aside),
            "recipe": dict(recipe),
            "limits": dict(limits or {}),
        }
        text = json.dumps({"hash": _meta_hash(body), "body": body})
        (self.folder / "meta.json").write_text(text, encoding="utf-8")
        for path in (self.data_path, self.folder / "index.npy", self.folder / "meta.json", self.folder):
            sync_path(path)


def pack(arrays: Sequence[Array]) -> tuple[bytearray, Array]:
    """Rows as one aligned block, and their index entries with offsets from the block's start."""
    records = np.zeros(len(arrays), _INDEX)
    sizes = [-(-array.nbytes // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES for array in arrays]
    packed = bytearray(sum(sizes))
    offset = 0
    for number, (array, size) in enumerate(zip(arrays, sizes, strict=True)):
        packed[offset : offset + array.nbytes] = _bytes(array)
        records[number] = (offset, len(array), 0, _hash(array), 0)
        offset += size
    return packed, records


def row_hash(array: Array) -> int:
    """The checksum that a row of this content has in every store."""
    return _hash(array)


def write_at(descriptor: int, packed: bytearray, offset: int) -> None:
    """Write a whole block with plain writes: a mapped write to a full disk would kill the process."""
    remaining = memoryview(packed)
    while remaining:
        written = os.pwrite(descriptor, remaining, offset)
        remaining, offset = remaining[written:], offset + written


def mark_damaged(folder: Path) -> None:
    """Make the next start build this store again; a folder that is gone or read-only stays as it is."""
    with contextlib.suppress(OSError):
        (folder / "damaged").touch()


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_bytes())
        body = meta["body"]
        if meta["hash"] == _meta_hash(body) and body["format"] == FORMAT_VERSION:
            return dict(body)
    except (ValueError, KeyError, TypeError):
        pass
    raise CacheDamaged(f"{path} is not what was written")


def _meta_hash(body: Mapping[str, object]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def _hash(array: Array) -> int:
    return xxhash.xxh3_64_intdigest(_bytes(array))


def _bytes(array: Array) -> memoryview:
    contiguous: Any = np.ascontiguousarray(array)  # typed as no buffer by numpy
    return memoryview(contiguous).cast("B") if array.size else memoryview(b"")


STORES_KEPT = 3
"""Stores of one kind that stay beside each other, the most recently used first; older ones are removed."""

PASSING_REASONS = ("crashed", "unreadable", "changed")
"""How reasons begin that may not hold the next time: such rows are tried again whenever a store is rebuilt."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreSpec:
    """What a store must hold: one row per source, in this order, made by this recipe."""

    kind: str
    dtype: npt.DTypeLike
    sources: Sources
    recipe: Mapping[str, object]
    """Everything that decides the content of a row besides its source; rows are shared between equal recipes."""
    limits: Mapping[str, object]
    """What decides whether a source becomes a row at all."""

    @property
    def key(self) -> str:
        settings = json.dumps([FORMAT_VERSION, dict(self.recipe), dict(self.limits)], sort_keys=True)
        hasher = xxhash.xxh3_128(settings.encode())
        hasher.update(self.sources.astype("<u8").tobytes())
        return hasher.hexdigest()[:20]

    @property
    def folder_name(self) -> str:
        return f"{self.kind}-{self.key}"


def identity(*parts: object) -> int:
    """A 64-bit name for what a row is made from."""
    return xxhash.xxh3_64_intdigest("\0".join(map(str, parts)).encode("utf-8", "surrogatepass"))


def open_store(root: Path, spec: StoreSpec) -> Store | None:
    """The store if it is there and whole; a damaged one counts as absent."""
    folder = root / spec.folder_name
    if not folder.is_dir() or (folder / "damaged").exists():
        return None
    try:
        store = Store(folder, spec.dtype)
    except CacheDamaged as error:
        _log.warning("%s; it will be built again", error)
        mark_damaged(folder)
        return None
    with contextlib.suppress(OSError):  # a read-only cache cannot note when it was last used
        os.utime(folder)
    return store


def build_store(root: Path, spec: StoreSpec, fill: Callable[[StoreWriter, list[int]], None]) -> Store:
    """Build the store: known rows are copied, `fill` makes the rows it is given and may set some aside."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _sole_builder(root):
            store = open_store(root, spec)
            if store is not None:  # another process built it while this one waited
                return store
            temporary = root / f"tmp-{os.getpid()}"
            try:
                writer = StoreWriter(temporary, spec.sources)
                missing = _copy_known_rows(writer, _donors(root, spec), spec)
                if missing:
                    fill(writer, missing)
                writer.finish(spec.recipe, spec.limits)
                _move_into_place(temporary, root / spec.folder_name)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            _remove_old_stores(root, spec.kind)
    except OSError as error:
        raise cannot_write(root, error) from error
    return Store(root / spec.folder_name, spec.dtype)


def _donors(root: Path, spec: StoreSpec) -> list[Store]:
    """Older stores of the same recipe, newest first; damaged ones too, for every copied row is checked."""
    donors = []
    for folder in _by_last_use(root, spec.kind):
        with contextlib.suppress(CacheDamaged):
            donor = Store(folder, spec.dtype)
            if donor.recipe == spec.recipe:
                donors.append(donor)
    return donors


def _copy_known_rows(writer: StoreWriter, donors: list[Store], spec: StoreSpec) -> list[int]:
    """Copy what older stores hold, and what they set aside under the same limits; returns the rows nobody has."""
    known = {
        source: (donor, row)
        for donor in reversed(donors)
        for row, source in enumerate(donor.sources.tolist())
        if row not in donor.set_aside or donor.limits == spec.limits
    }
    missing: list[int] = []
    found: list[tuple[int, Store, int]] = []
    for row, source in enumerate(spec.sources.tolist()):
        donor, donor_row = known.get(source, (None, 0))
        if donor is None or not donor.is_intact(donor_row):
            missing.append(row)
        elif donor_row not in donor.set_aside:
            found.append((row, donor, donor_row))
        elif donor.set_aside[donor_row][0].startswith(PASSING_REASONS):
            missing.append(row)
        else:
            found.append((row, donor, donor_row))
            writer.set_aside(row, *donor.set_aside[donor_row])
    for start in range(0, len(found), 256):
        rows, owners, owner_rows = zip(*found[start : start + 256], strict=True)
        writer.append(
            rows,
            [owner[row] for owner, row in zip(owners, owner_rows, strict=True)],
            [int(owner.labels[row]) for owner, row in zip(owners, owner_rows, strict=True)],
        )
    return missing


def _move_into_place(temporary: Path, final: Path) -> None:
    if final.exists():  # a damaged store; whoever has it mapped goes on reading the old files
        aside = temporary.with_name(f"{temporary.name}-damaged")
        final.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    temporary.rename(final)
    sync_path(final.parent)


def _by_last_use(root: Path, kind: str) -> list[Path]:
    return sorted(root.glob(f"{kind}-*"), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _remove_old_stores(root: Path, kind: str) -> None:
    for folder in _by_last_use(root, kind)[STORES_KEPT:]:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _sole_builder(root: Path) -> Iterator[None]:
    """Let one process at a time build under `root`, and remove what a killed one left behind."""
    with open(root / "lock", "a+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("Another process is preparing this corpus in %s: waiting for it", root)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left_behind in root.glob("tmp-*"):
            if left_behind.is_dir():
                shutil.rmtree(left_behind, ignore_errors=True)
            else:
                left_behind.unlink(missing_ok=True)
        yield


def cannot_write(root: Path, error: OSError) -> DatasetError:
    """What a user is told when the cache below `root` could not be written."""
    if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        place = error.filename or root
        return DatasetError(
            f"Cannot write the cache at {place}: {error.strerror or error}.\n"
            "Choose a folder you can write to with --cache-dir DIR."
        )
    free_mb = shutil.disk_usage(root).free / 1e6
    return DatasetError(
        f"No room for the cache in {root}: {error.strerror} "
        f"({free_mb:.0f} MB are free; an hour of audio takes 159 MB).\n"
        "Nothing half-made was left behind. Free some space or choose another disk with --cache-dir DIR."
    )


def cache_root(corpus_folder: Path, cache_dir: Path | None) -> Path:
    """Where the stores of a corpus live: below `cache_dir` if given, else in the corpus, else in the user's cache.

    Below a shared folder every corpus has a folder of its own, so that one can be removed without the others.
    """
    inside = corpus_folder / ".myxtts"
    if cache_dir is None and os.access(inside if inside.is_dir() else corpus_folder, os.W_OK):
        return inside
    resolved = corpus_folder.resolve()
    return (cache_dir or user_cache()) / f"{resolved.name}-{identity(resolved):016x}"


def user_cache() -> Path:
    """The folder for what programs may recompute, by the convention of the desktop."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "myxtts"
