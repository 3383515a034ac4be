"""Which stores exist, which is the right one, and how a missing one is built once and safely.

Stores live side by side under one root as `KIND-KEY`. The key covers the sources of the rows, every setting that
shapes them and the format, so a store is right or absent, never stale. A store is built in a temporary folder
under a lock, synced, and renamed into place. Rows that an older store of the same recipe holds are copied, so
changing a few clips redoes only those. This module does not know what the rows mean.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy.typing as npt
import xxhash

from myxtts.data.store import (
    FORMAT_VERSION,
    CacheDamaged,
    Sources,
    Store,
    StoreWriter,
    mark_damaged,
    sync_path,
)
from myxtts.errors import DatasetError

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
