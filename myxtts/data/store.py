"""Stores: rows of different lengths packed into one file, each with a checksum.

A store is a folder `KIND-KEY`, written once and never changed. Its key covers everything that decides its
content, so a store is either right or absent, never stale:

    data.bin    the rows one after another, each on a 64-byte boundary
    index.npy   per row: offset, length, label, checksum, hash of its source
    meta.json   checksum of the index, size of the data, rejected rows with the reason, checksum of itself

A store is built in a temporary folder under a lock and then renamed, so every other process sees the whole store
or none. Rows that an older store already holds are copied. This module does not know what the rows mean.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from myxtts.errors import DatasetError
from myxtts.files import sync_path

FORMAT_VERSION = 3
"""Part of every key. Raise it when a file of a store changes its format."""
ROW_ALIGNMENT_BYTES = 64
STORES_KEPT = 3  # stores of one kind that are kept; building another removes the least recently used
ROWS_PER_COPY = 64  # rows copied from an older store at a time, which bounds the memory this takes
TRANSIENT_REASONS = ("crashed", "unreadable", "changed")
"""Prefixes of reasons that may not hold the next time: these rows are tried again whenever a store is rebuilt."""

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]
Sources = npt.NDArray[np.uint64]
Labels = Sequence[int] | int

_INDEX = np.dtype([("offset", "<u8"), ("length", "<u4"), ("label", "<u4"), ("hash", "<u8"), ("source", "<u8")])
_log = logging.getLogger(__name__)


class CacheDamaged(DatasetError):
    """The contents of a store do not match its checksums."""


class Pieces(NamedTuple):
    """Parts of rows that are gathered, and the slots that they go to."""

    slots: Rows
    starts: Rows
    lengths: Rows

    @classmethod
    def whole(cls, lengths: Rows) -> Pieces:
        return cls(np.arange(len(lengths)), np.zeros_like(lengths), lengths)


class RowReader(ABC):
    """Rows of different lengths, each with a checksum: those of a store, or of what stands for one."""

    lengths: Rows
    hashes: Sources

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def __getitem__(self, row: int) -> Array: ...
    @abstractmethod
    def gather(self, rows: Rows, out: Array, pieces: Pieces | None = None) -> None:
        """Copy row `rows[i]` to the start of `out[i]`, or a piece of it; the rest of `out[i]` is left as it is."""

    def gather_padded(self, rows: Rows, out: Array) -> None:
        """Copy row `rows[i]` to the start of `out[i]`, with zeros after it."""
        self.gather(rows, out)
        np.copyto(out, 0, where=np.arange(out.shape[1]) >= self.lengths[rows, None])


class PackedRows(RowReader):
    """Rows in one or several open files, with their places; any thread may read.

    Rows are copied with plain reads: if a mapped file were truncated, touching it would kill the process.
    """

    dtype: np.dtype[Any]
    _offsets: Rows
    _verified: npt.NDArray[np.bool_]

    def __getitem__(self, row: int) -> Array:
        found: Array = np.empty(self.lengths[row], self.dtype)
        self.gather(np.array([row]), found[None])
        found.flags.writeable = False
        return found

    def gather(self, rows: Rows, out: Array, pieces: Pieces | None = None) -> None:
        if out.dtype != self.dtype or not out.flags.c_contiguous:
            raise ValueError(f"rows of {self.dtype} cannot be read into {out.dtype}, or not in one piece")
        slots, starts, lengths = pieces or Pieces.whole(self.lengths[rows])
        is_whole = lengths == self.lengths[rows]
        if lengths.max(initial=0) > out.shape[1]:
            raise ValueError(f"a row of {lengths.max()} values does not fit {out.shape[1]}")
        view, size = _bytes(out), self.dtype.itemsize
        begins, offsets = out.strides[0] * slots, self._offsets[rows] + size * starts
        numbers = (rows, begins, begins + size * lengths, offsets, is_whole, self._verified[rows])
        for row, begin, end, offset, whole, is_known in zip(*(values.tolist() for values in numbers), strict=True):
            if not is_known and not whole:
                is_known = self.is_intact(row)
            if not self._is_read(row, offset, view[begin:end], is_known):
                self._recover(row, offset, view[begin:end])

    def is_intact(self, row: int) -> bool:
        out = bytearray(int(self.lengths[row]) * self.dtype.itemsize)
        return bool(self._verified[row]) or self._is_read(row, int(self._offsets[row]), memoryview(out), False)

    @abstractmethod
    def _file_of(self, row: int) -> OpenFile:
        """The open file that holds a row."""

    @abstractmethod
    def _recover(self, row: int, offset: int, out: memoryview) -> None:
        """Read a damaged row in another way, or raise `CacheDamaged`."""

    def _is_read(self, row: int, offset: int, out: memoryview, is_known: bool) -> bool:
        """Fill `out` with a row and, unless it is known, compare it with its checksum; True if it is intact."""
        file, remaining = self._file_of(row), out
        while remaining:
            try:
                num_bytes = os.preadv(file.descriptor, [remaining], offset)
            except OSError:  # a failing disk
                return False
            if num_bytes == 0:  # the file was truncated
                return False
            remaining, offset = remaining[num_bytes:], offset + num_bytes
        if not is_known:
            self._verified[row] = is_known = xxhash.xxh3_64_intdigest(out) == int(self.hashes[row])
        return is_known


class OpenFile:
    """A file that is read; closed when nothing holds it any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, self.descriptor)


class Store(PackedRows):
    """An open store. It outlives its folder."""

    def __init__(self, folder: Path, dtype: npt.DTypeLike) -> None:
        self.folder = folder
        self.dtype = np.dtype(dtype)
        try:
            content = json.loads((folder / "meta.json").read_bytes())
            meta = content["body"]
            index_hash = xxhash.xxh3_128_hexdigest((folder / "index.npy").read_bytes())
            self._file = OpenFile(os.open(folder / "data.bin", os.O_RDONLY))
            data_bytes = os.fstat(self._file.descriptor).st_size
            found = (content["hash"], FORMAT_VERSION, index_hash, data_bytes)
            if found != (meta_hash(meta), meta["format"], meta["index_hash"], meta["data_bytes"]):
                raise ValueError
            index: Array = np.load(folder / "index.npy", allow_pickle=False)
        except OSError as error:
            raise CacheDamaged(f"{folder}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError):
            raise CacheDamaged(f"{folder}: the files do not match their checksums") from None
        self.params: dict[str, Any] = meta["params"]
        self.filters: dict[str, Any] = meta["filters"]
        self.set_aside = {int(row): (str(reason), str(detail)) for row, reason, detail in meta["set_aside"]}
        self.lengths = index["length"].astype(np.int64)
        self.labels = index["label"].astype(np.int64)
        self.sources = index["source"].astype(np.uint64)
        self.hashes = index["hash"].astype(np.uint64)
        self._offsets = index["offset"].astype(np.int64)
        self._verified = self.lengths == 0

    def all_intact(self) -> bool:
        """True if every row matches its checksum; otherwise the store is marked for rebuilding."""
        if all(self.is_intact(row) for row in range(len(self))):
            return True
        mark_damaged(self.folder)
        return False

    def _file_of(self, row: int) -> OpenFile:
        del row
        return self._file

    def _recover(self, row: int, offset: int, out: memoryview) -> None:
        del offset, out
        mark_damaged(self.folder)
        found = f"{self.folder}: row {row} does not match its checksum (truncated, or a failing disk?)."
        advice = "The store is marked: run the command again, and only the damaged rows are rebuilt."
        raise CacheDamaged(f"{found}\n{advice}")


Reader = TypeVar("Reader", bound=RowReader)


class Joined(RowReader, Generic[Reader]):
    """The rows of several stores, one store after another."""

    def __init__(self, parts: Sequence[Reader]) -> None:
        self.parts = parts
        self.lengths: Rows = np.concatenate([part.lengths for part in parts])
        self.hashes: Sources = np.concatenate([part.hashes for part in parts])
        self.starts: Rows = np.cumsum([0, *map(len, parts)])[:-1]
        """The first row of each store."""

    def __getitem__(self, row: int) -> Array:
        part = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.parts[part][row - int(self.starts[part])]

    def gather(self, rows: Rows, out: Array, pieces: Pieces | None = None) -> None:
        pieces = pieces or Pieces.whole(self.lengths[rows])
        of_part = np.searchsorted(self.starts, rows, side="right") - 1
        for number in np.unique(of_part).tolist():
            own = of_part == number
            chosen = Pieces(*(values[own] for values in pieces))
            self.parts[number].gather(rows[own] - self.starts[number], out, chosen)

    @property
    def num_shards(self) -> int:
        return sum(map(num_shards, self.parts))

    def fetch_ahead(self, shards: Sequence[int]) -> None:
        """Tell each store which of its shards are read soon; shards are numbered through all stores."""
        first = 0
        for part in self.parts:
            end = first + num_shards(part)
            if (fetch_ahead := getattr(part, "fetch_ahead", None)) is not None:
                fetch_ahead([shard - first for shard in shards if first <= shard < end])
            first = end


def num_shards(reader: object) -> int:
    """Return the shards of a reader; what does not name their number is one."""
    return int(getattr(reader, "num_shards", 1))


class StoreWriter:
    """A store under construction, in a new folder."""

    def __init__(self, folder: Path, sources: Sources) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.data_path = folder / "data.bin"
        self.data_path.touch()
        self.end = 0
        """Bytes of data.bin in use. Other processes may write beyond it; whoever lets them must advance it."""
        self._index: Array = np.zeros(len(sources), _INDEX)
        self._index["source"] = sources
        self.set_aside: list[tuple[int, str, str]] = []
        """Rows that are left empty, each with the reason and what was found."""

    @property
    def labels(self) -> Rows:
        """The label of every row so far; 0 for rows that are not written yet."""
        return self._index["label"].astype(np.int64)

    def append(self, rows: Sequence[int], arrays: Sequence[Array], labels: Labels = 0) -> None:
        """Write rows and add them to the index."""
        block, records = pack(arrays, labels)
        with open(self.data_path, "r+b") as file:
            write_at(file.fileno(), block, self.end)
        self.add_to_index(rows, records, self.end)
        self.end += len(block)

    def add_to_index(self, rows: Sequence[int], records: Array, offset: int) -> None:
        """Add rows that `pack` made and that are already written at `offset`."""
        at = np.asarray(rows, np.int64)
        records = records.copy()
        records["offset"] += np.uint64(offset)
        records["source"] = self._index["source"][at]
        self._index[at] = records

    def finish(self, params: Mapping[str, object], filters: Mapping[str, object] | None = None) -> None:
        """Write index and meta, and flush everything to the disk."""
        np.save(self.folder / "index.npy", self._index, allow_pickle=False)
        body = {
            "format": FORMAT_VERSION,
            "index_hash": xxhash.xxh3_128_hexdigest((self.folder / "index.npy").read_bytes()),
            "data_bytes": self.data_path.stat().st_size,
            "set_aside": sorted(self.set_aside),
            "params": dict(params),
            "filters": dict(filters or {}),
        }
        (self.folder / "meta.json").write_bytes(checked_json(body))
        for path in (self.data_path, self.folder / "index.npy", self.folder / "meta.json", self.folder):
            sync_path(path)


def pack(arrays: Sequence[Array], labels: Labels = 0) -> tuple[bytearray, Array]:
    """Return rows as one aligned block, and their index records with offsets from its start."""
    records = np.zeros(len(arrays), _INDEX)
    sizes = [-(-array.nbytes // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES for array in arrays]
    block = bytearray(sum(sizes))
    offset = 0
    for number, (array, size) in enumerate(zip(arrays, sizes, strict=True)):
        block[offset : offset + array.nbytes] = _bytes(array)
        records[number] = (offset, len(array), 0, checksum(array), 0)
        offset += size
    records["label"] = labels
    return block, records


def checksum(array: Array) -> int:
    """Return the checksum that a row with this content has in every store."""
    return xxhash.xxh3_64_intdigest(_bytes(array))


def hash64(*parts: object) -> int:
    """Return a 64-bit hash of what a row is made from."""
    return xxhash.xxh3_64_intdigest("\0".join(map(str, parts)).encode("utf-8", "surrogatepass"))


def write_at(descriptor: int, block: bytearray, offset: int) -> None:
    """Write a whole block with plain writes: a mapped write to a full disk would kill the process."""
    remaining = memoryview(block)
    while remaining:
        written = os.pwrite(descriptor, remaining, offset)
        remaining, offset = remaining[written:], offset + written


def _bytes(array: Array) -> memoryview:
    contiguous: Any = np.ascontiguousarray(array)  # numpy's types do not call it a buffer
    return memoryview(contiguous).cast("B") if array.size else memoryview(b"")


def meta_hash(body: Mapping[str, object]) -> str:
    """Return the checksum of the body of a JSON file, which stands next to it."""
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def checked_json(body: Mapping[str, object]) -> bytes:
    return json.dumps({"hash": meta_hash(body), "body": body}).encode()


def refuse_folder(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # it is gone meanwhile
        raise DatasetError(f"{error.filename} cannot be read: {error.strerror}")


def mark_damaged(folder: Path) -> None:
    with contextlib.suppress(OSError):  # the folder is gone or read-only
        (folder / "damaged").touch()


@dataclass(frozen=True)
class StoreSpec:
    """The content of a store: one row per source, in this order."""

    kind: str
    dtype: npt.DTypeLike
    sources: Sources  # a hash of what each row is made from
    params: Mapping[str, object]
    """Everything else that decides the content of a row. Stores with equal params share rows."""
    filters: Mapping[str, object] = field(default_factory=dict)
    """Everything that decides if a source becomes a row at all."""

    def folder(self, root: Path) -> Path:
        settings = json.dumps([FORMAT_VERSION, dict(self.params), dict(self.filters)], sort_keys=True)
        hasher = xxhash.xxh3_128(settings.encode())
        hasher.update(self.sources.astype("<u8").tobytes())
        return root / f"{self.kind}-{hasher.hexdigest()[:20]}"


def open_store(folder: Path, dtype: npt.DTypeLike) -> Store | None:
    """Return the store if it is there and whole; a damaged one counts as absent."""
    if not folder.is_dir() or (folder / "damaged").exists():
        return None
    try:
        store = Store(folder, dtype)
    except CacheDamaged as error:
        _log.warning("%s; it will be built again", error)
        mark_damaged(folder)
        return None
    with contextlib.suppress(OSError):  # a read-only cache cannot record when it was last used
        os.utime(folder)
    return store


def build_store(
    root: Path, spec: StoreSpec, build: Callable[[StoreWriter, list[int]], None], replace: bool = False
) -> Store:
    """Build the store: known rows are copied, `build` makes the rows it is given and may set some aside.

    With `replace` nothing is reused: `build` makes every row, and an existing store is replaced.
    """
    folder = spec.folder(root)
    try:
        with only_process(root, "lock", "Another process is preparing this corpus in %s: waiting for it"):
            for leftover in root.glob("tmp-*"):  # of a killed process
                shutil.rmtree(leftover, ignore_errors=True)
            store = None if replace else open_store(folder, spec.dtype)
            if store is not None:  # another process built it while this one waited
                return store
            temporary = root / f"tmp-{os.getpid()}"
            try:
                writer = StoreWriter(temporary, spec.sources)
                missing = _copy_known_rows(writer, spec, [] if replace else by_last_use(root, spec.kind))
                if missing:
                    build(writer, missing)
                writer.finish(spec.params, spec.filters)
                if folder.exists():  # damaged or out of date; who has it open goes on reading the old files
                    aside = root / f"{temporary.name}-old"
                    folder.rename(aside)
                    shutil.rmtree(aside, ignore_errors=True)
                temporary.rename(folder)
                sync_path(root)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            # The new store stays even if a clock that was set back makes the others look newer.
            others = [other for other in by_last_use(root, spec.kind) if other != folder]
            for old in others[STORES_KEPT - 1 :]:
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise cannot_write(root, error) from error
    return Store(folder, spec.dtype)


def _copy_known_rows(writer: StoreWriter, spec: StoreSpec, folders: Sequence[Path]) -> list[int]:
    """Copy rows from older stores with equal params, newest first; return the rows none of them has.

    Damaged stores serve too, because every copied row is verified. A rejected row is copied as such only if it was
    rejected under the same filters, and for a reason that lasts.
    """
    missing = np.arange(len(spec.sources))
    for folder in folders:
        try:
            donor = Store(folder, spec.dtype)
        except CacheDamaged:
            continue
        if donor.params != spec.params:
            continue
        lasting = donor.filters == spec.filters
        rejected = donor.set_aside.items()
        unfit = [row for row, (reason, _) in rejected if not lasting or reason.startswith(TRANSIENT_REASONS)]
        offered = np.setdiff1d(np.arange(len(donor)), unfit)
        found, places = equal_sources(spec.sources[missing], donor.sources[offered])
        rows, donor_rows = missing[found], offered[places]
        intact = np.array([donor.is_intact(row) for row in donor_rows.tolist()], bool)
        rows, donor_rows = rows[intact], donor_rows[intact]
        for start in range(0, len(rows), ROWS_PER_COPY):
            chunk = donor_rows[start : start + ROWS_PER_COPY]
            arrays = [donor[row] for row in chunk.tolist()]
            writer.append(rows[start : start + ROWS_PER_COPY].tolist(), arrays, donor.labels[chunk].tolist())
        copied = zip(rows.tolist(), donor_rows.tolist(), strict=True)
        writer.set_aside += [(row, *donor.set_aside[old]) for row, old in copied if old in donor.set_aside]
        missing = np.setdiff1d(missing, rows)
    return missing.tolist()


def equal_sources(wanted: Sources, held: Sources) -> tuple[Rows, Rows]:
    """Return the positions in `wanted` that occur in `held`, and for each its first position there."""
    distinct, first = np.unique(held, return_index=True)
    if not distinct.size:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    places = np.minimum(np.searchsorted(distinct, wanted), len(distinct) - 1)
    found = np.flatnonzero(distinct[places] == wanted)
    return found, first[places[found]]


def by_last_use(root: Path, kind: str) -> list[Path]:
    """Return the folders `KIND-*` below `root`, the most recently used first."""
    return sorted(root.glob(f"{kind}-*"), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def is_locked_alone(file: IO[bytes]) -> bool:
    """Lock a file, unless another process holds a lock of it; True if this process alone now does."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


@contextlib.contextmanager
def only_process(root: Path, name: str, waiting: str = "") -> Iterator[None]:
    """Hold the lock file `name` below `root`, after logging `waiting` with `root` if another process holds it."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / name, "ab") as lock:  # the kernel releases the lock if the process dies
        if not is_locked_alone(lock):
            if waiting:
                _log.info(waiting, root)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cannot_write(root: Path, error: OSError, where: str = "--cache-dir DIR") -> DatasetError:
    if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        what = f"Cannot write the cache at {error.filename or root}: {error.strerror or error}."
        return DatasetError(f"{what}\nChoose a folder you can write to with {where}.")
    room = f"{shutil.disk_usage(root).free / 1e6:.0f} MB are free; an hour of audio takes 159 MB"
    advice = f"No partial files were left. Free some space or choose another disk with {where}."
    return DatasetError(f"No room for the cache in {root}: {error.strerror} ({room}).\n{advice}")


def cache_root(corpus_folder: Path, cache_dir: Path | None) -> Path:
    """Return where the stores of a corpus are: below `cache_dir` if given, in the corpus, or in the user's cache.

    Below a shared folder every corpus has its own subfolder, so that one can be removed without the others.
    """
    inside = corpus_folder / ".myxtts"
    if cache_dir is None and os.access(inside if inside.is_dir() else corpus_folder, os.W_OK):
        return inside
    resolved = corpus_folder.resolve()
    return (cache_dir or user_cache()) / f"{resolved.name}-{hash64(resolved):016x}"


def user_cache() -> Path:
    """Return the user's folder for files that can be recomputed (XDG)."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "myxtts"
    except RuntimeError:  # as in a container that runs under a number
        found = f"There is no place for the cache: user {os.getuid()} has no home folder"
        raise DatasetError(f"{found}. Give --cache-dir DIR, or set HOME or XDG_CACHE_HOME.") from None
