"""Files on this machine, in object stores and on web servers under one name, and a cache of remote files.

A URL's secrets are never part of its printed name, and credentials come from the environment only. obstore is
imported when the first remote location is used: it belongs to the extra `cloud`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import multiprocessing
import os
import re
import shutil
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

import xxhash

from myxtts.config import DataSettings
from myxtts.data.store import cannot_write, only_process, refuse_folder, user_cache
from myxtts.errors import INSTALL_EXTRA, ConfigError, DatasetError
from myxtts.files import write_atomically
from myxtts.observe.trace import Trace

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CHUNK_BYTES, IN_FLIGHT = 8 << 20, 4  # ranges of one object, and how many of them are fetched at once
ATTEMPTS, FIRST_WAIT_S, LONGEST_WAIT_S = 8, 0.25, 16.0  # of a request; waits double, to half a minute in all
STALLED_S = 20.0  # after so long without a byte a request has failed
PATIENCE_S = 10.0  # after which a failed attempt is worth a warning: a store may be silent for minutes in all
FIRST_CONTACT_S = 10.0  # to reach a store that has never answered: its name or the network may be wrong
FETCHERS = 2  # objects that are fetched ahead at once
ABANDONED_S = 3600.0  # a part of a file that was not written to for so long is left from a killed process
_HTTP = ("http", "https")
_CREDENTIALS = {
    "s3": "Set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION (temporary keys: AWS_SESSION_TOKEN too); "
    "AWS_ENDPOINT_URL for a store that is not Amazon's; AWS_SKIP_SIGNATURE=true for a public bucket.",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account; GOOGLE_SKIP_SIGNATURE=true for a "
    "public bucket.",
    "https": "Set MYXTTS_HTTP_AUTHORIZATION to the header it asks for, such as 'Bearer TOKEN'.",
}
_UNREACHED = "error sending request"  # as obstore says it
_METADATA_SERVER = "169.254.169.254"  # of a cloud machine; asked for credentials where the environment has none

answered: set[str] = set()  # stores that have answered this process, or the one that sent it here

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class MissingObject(DatasetError):
    """There is nothing at a location."""


class Entry(NamedTuple):
    location: Location
    size: int
    version: str  # changes with the content: ETag, or the time of the last change


@dataclass(frozen=True)
class Location:
    """A file or folder. Its `str` is safe to print."""

    path: str  # in the file system, or the key of an object
    store: str = ""  # such as s3://bucket; empty for this machine
    query: str = field(default="", repr=False)  # the signature of a URL
    is_trusted: bool = True  # the user has named its web server, and MYXTTS_HTTP_AUTHORIZATION is sent to it

    @classmethod
    def parse(cls, text: str | Path) -> Location:
        """Return the location that a path or an s3://, gs:// or https:// URL names."""
        text = str(text)
        if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
            return cls(text)
        try:
            url = urllib.parse.urlsplit(text)
        except ValueError as error:
            raise ConfigError(f"A URL cannot be read: {error}.") from None
        if "@" in url.netloc:
            shown = f"{url.scheme}://…@{url.netloc.rpartition('@')[2]}"
            fix = _CREDENTIALS.get(url.scheme, _CREDENTIALS["https"])
            raise ConfigError(f"{shown}: credentials are read from the environment, not from the URL.\n{fix}")
        if url.scheme not in ("s3", "gs", *_HTTP) or not url.netloc:
            expected = "Expected a path, s3://BUCKET/KEY, gs://BUCKET/KEY or https://…"
            raise ConfigError(f"{url.scheme}://{url.netloc}{url.path} is no location. {expected}")
        if url.scheme in _HTTP:
            return cls(urllib.parse.unquote(url.path).strip("/"), f"{url.scheme}://{url.netloc}", url.query)
        key = text.partition("://")[2].partition("/")[2]  # a key may hold ? and #
        return cls(key.strip("/"), f"{url.scheme}://{url.netloc}")

    def __str__(self) -> str:
        return (f"{self.store}/{self.path}" if self.store else self.path) + ("?…" if self.query else "")

    def __truediv__(self, name: str) -> Location:
        return replace(self, path=f"{self.path.rstrip('/')}/{name}" if self.path else name)

    @property
    def is_local(self) -> bool:
        return not self.store

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Location:
        return replace(self, path=str(Path(self.path).parent) if self.is_local else self.path.rpartition("/")[0])

    def entry(self) -> Entry:
        """Return size and version."""
        if self.is_local:
            stat = self._local(lambda path: path.stat())
            return Entry(self, stat.st_size, str(stat.st_mtime_ns))
        found = self._request(lambda api, client: api.head(client, self.path))
        return Entry(self, found["size"], found["e_tag"] or str(found["last_modified"]))

    def list(self) -> list[Entry]:
        """Return every file below a folder, sorted by path."""
        if self.is_local:
            walked = os.walk(self.path, onerror=refuse_folder)
            paths = [os.path.join(at, name) for at, _, names in walked for name in names]  # noqa: PTH118
            entries = list[Entry]()
            for path in paths:
                with contextlib.suppress(MissingObject):  # gone meanwhile
                    entries += [Location(path).entry()] if os.path.isfile(path) else []  # noqa: PTH113
            return sorted(entries, key=lambda entry: entry.location.path)
        if self.store.startswith(_HTTP):
            raise DatasetError(f"{self}: a web server lists no files. Name one, or several as in {{000..123}}.")

        def listed(api: Any, client: Any) -> list[Any]:
            return [item for batch in api.list(client, prefix=self.path or None) for item in batch]

        items = sorted(self._request(listed), key=lambda item: str(item["path"]))
        return [
            Entry(replace(self, path=item["path"]), item["size"], item["e_tag"] or str(item["last_modified"]))
            for item in items
        ]

    def read(
        self, start: int = 0, length: int | None = None, version: str = "", stop: threading.Event | None = None
    ) -> bytes:
        """Return the file, or `length` bytes of it from `start`; of this ETag, if it is given."""
        if self.is_local:
            return self._local(lambda path: _read_local(path, start, length))
        options: dict[str, Any] = {"if_match": version} if version.startswith('"') else {}
        if length == 0:
            return b""
        if start or length is not None:
            options["range"] = {"offset": start} if length is None else (start, start + length)

        def fetched(api: Any, client: Any) -> bytes:
            found = api.get(client, self.path, options=options).bytes().to_bytes()
            if length is not None and len(found) != length:
                raise OSError(f"{len(found)} bytes arrived in place of {length}")
            return bytes(found)

        return self._request(fetched, stop)

    def open(self) -> BinaryIO:
        """Return the file for reading from start to end; a remote one is fetched a little ahead."""
        if self.is_local:
            return self._local(lambda path: open(path, "rb"))
        return io.BufferedReader(_Sequential(self.chunks(self.entry())))

    def open_random(self) -> BinaryIO:
        """Return the file for reading anywhere."""
        if self.is_local:
            return self._local(lambda path: open(path, "rb"))
        return io.BufferedReader(_RandomAccess(self.entry()), 1 << 20)

    def chunks(self, entry: Entry) -> Generator[bytes, None, None]:
        """Yield the content in order; a few ranges are fetched at once, all of one version."""
        pool, stop = ThreadPoolExecutor(IN_FLIGHT, "fetch range"), threading.Event()
        pending: deque[Future[bytes]] = deque()
        try:
            for start in range(0, entry.size, CHUNK_BYTES):
                length = min(CHUNK_BYTES, entry.size - start)
                pending.append(pool.submit(self.read, start, length, entry.version, stop))
                if len(pending) == IN_FLIGHT:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def write(self, content: bytes) -> None:
        """Replace the file at once, so that a reader finds the old content or the new."""
        self._put(content, lambda temporary: temporary.write_bytes(content))

    def upload(self, path: Path) -> None:
        """Replace the file by a copy of a local one."""
        self._put(path, lambda temporary: shutil.copyfile(path, temporary))

    def delete(self, names: Sequence[str]) -> None:
        """Delete files of this folder, if they are there, and the folders that they leave empty."""
        for path in [Path(self.path, name) for name in names] if self.is_local else ():
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.parent.rmdir()
        paths = [(self / name).path for name in names]
        if paths and not self.is_local:
            try:
                self._request(lambda api, client: api.delete(client, paths))
            except MissingObject:  # Google's store refuses what an attempt before has deleted, and leaves the rest
                there = {entry.location.path for entry in self.list()}
                if len(left := [name for name in names if (self / name).path in there]) == len(names):
                    raise
                self.delete(left)

    def _put(self, content: bytes | Path, write: Callable[[Path], object]) -> None:
        if self.is_local:
            self._local(lambda path: path.parent.mkdir(parents=True, exist_ok=True))
            write_atomically(Path(self.path), write)
            return
        if self.store.startswith(_HTTP):
            raise DatasetError(f"{self}: web servers are only read. Write to a folder, s3:// or gs://.")
        self._request(lambda api, client: api.put(client, self.path, content, chunk_size=2 * CHUNK_BYTES))

    def _local(self, action: Callable[[Path], Result]) -> Result:
        try:
            return action(Path(self.path))
        except FileNotFoundError:
            raise MissingObject(f"There is no {Path(self.path).absolute()}.") from None
        except OSError as error:
            raise DatasetError(f"{self.path}: {error.strerror or error}") from error

    def _request(self, action: Callable[[Any, Any], Result], stop: threading.Event | None = None) -> Result:
        """Return the result of a request, which is repeated while the store fails, until `stop`."""
        api, client = _client(self.store, self.query, os.getpid(), self.is_trusted)
        refusals = (api.exceptions.PermissionDeniedError, api.exceptions.UnauthenticatedError)
        lasting = (api.exceptions.NotSupportedError, api.exceptions.InvalidPathError)
        scheme, started = self.store.partition("://")[0], time.monotonic()
        for attempt in range(ATTEMPTS):
            wait_s = min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S)
            try:
                found = action(api, client)
                answered.add(self.store)
                return found
            except FileNotFoundError:
                answered.add(self.store)
                raise MissingObject(f"There is no {self}. Check the name, and the region of a bucket.") from None
            except api.exceptions.PreconditionError:
                raise DatasetError(f"{self} has changed while it was read. Start again.") from None
            except (*refusals, *lasting, api.exceptions.BaseError, OSError) as error:
                why = _reason(error)
                answered.update(() if _UNREACHED in why else (self.store,))
                if isinstance(error, refusals) or _METADATA_SERVER in why:
                    fix = _CREDENTIALS.get(scheme, _CREDENTIALS["https"])
                    raise DatasetError(f"The store refuses access to {self}.\n{fix}") from None
                if isinstance(error, lasting) or attempt == ATTEMPTS - 1 or (stop and stop.is_set()):
                    tried = "" if isinstance(error, lasting) else f" after {attempt + 1} attempts"
                    raise DatasetError(f"The store does not deliver {self}{tried}: {why}") from None
                is_known = self.store in answered or multiprocessing.parent_process() is not None
                is_late = time.monotonic() - started + wait_s > FIRST_CONTACT_S
                if _UNREACHED in why and is_late and not is_known:
                    fix = "Check its name and the network" + (", and AWS_ENDPOINT_URL" if scheme == "s3" else "")
                    raise DatasetError(f"The store of {self} cannot be reached: {why}.\n{fix}.") from None
                level = logging.WARNING if time.monotonic() - started > PATIENCE_S else logging.DEBUG
                _log.log(level, "%s: %s; attempt %d of %d failed", self, why, attempt + 1, ATTEMPTS)
            time.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")


@lru_cache(maxsize=32)
def _client(store: str, query: str, process: int, is_trusted: bool) -> tuple[Any, Any]:
    """Return obstore and its client of one store; a forked process needs its own."""
    del process
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise DatasetError(f"{store} is remote: run {INSTALL_EXTRA.format('cloud')} first.") from None
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or "https:"
    if store.startswith("s3:") and not endpoint.startswith(_HTTP):  # obstore would end the process
        raise ConfigError("AWS_ENDPOINT_URL is no URL: it must start with https:// or http://.")
    options: dict[str, Any] = {
        "allow_http": store.startswith("http:") or (store.startswith("s3:") and endpoint.startswith("http:")),
        "connect_timeout": "10s", "read_timeout": f"{1000 * STALLED_S:.0f}ms", "timeout": "600s",
    }  # fmt: skip
    if is_trusted and store.startswith(_HTTP) and (header := os.environ.get("MYXTTS_HTTP_AUTHORIZATION")):
        options["default_headers"] = {"authorization": header}
    retries: Any = {"max_retries": 1, "retry_timeout": timedelta(seconds=10)}
    kinds: dict[str, Any] = {"s3": obstore.store.S3Store, "gs": obstore.store.GCSStore}
    kind = kinds.get(store.partition("://")[0], obstore.store.HTTPStore)
    url = store + (f"/?{query}" if query else "")
    try:
        return obstore, kind.from_url(url, client_options=options, retry_config=retries)
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise ConfigError(f"{store}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return the first line of an error, without what a URL may hide."""
    line = (str(error).splitlines() or [""])[0]
    return re.sub(r"\?[^\s,;)]+", "?…", re.sub(r"://[^/\s@]*@", "://…@", line))


def _read_local(path: Path, start: int, length: int | None) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(-1 if length is None else length)


class _Sequential(io.RawIOBase):
    """Chunks as a file that is read from start to end."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        out = memoryview(buffer).cast("B")
        count = min(len(out), len(self._rest))
        out[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


class _RandomAccess(io.RawIOBase):
    """An object as a file in which any place can be read."""

    def __init__(self, entry: Entry) -> None:
        self._entry, self._at = entry, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._entry.size}[whence]
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        out = memoryview(buffer).cast("B")
        count = max(min(len(out), self._entry.size - self._at), 0)
        out[:count] = self._entry.location.read(self._at, count, self._entry.version)
        self._at += count
        return count


Wanted = tuple[Location, int, str]
"""A remote file with its size and checksum (XXH3, 128 bits, in hexadecimal)."""


class FileCache:
    """Copies of remote files on a local disk, named by their checksum, at most `max_bytes` of them.

    The processes of a host share one folder: each file is fetched once. The files used longest ago are removed
    first. A process that has one open goes on reading it.
    """

    def __init__(self, folder: Path, max_bytes: int, trace: Trace | None = None) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.trace = trace or Trace(enabled=False)
        self.hits = self.misses = self.bytes_fetched = 0
        self.wait_s = 0.0
        """How often a file was there or not, what was fetched, and how long readers waited for it."""
        self._ahead: deque[Wanted] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads: list[threading.Thread] = []

    def get(self, location: Location, size: int, checksum: str) -> Path:
        """Return the path of a remote file, fetched if it is not here. Open it soon: it may be removed."""
        if found := self._find(size, checksum):
            self.hits += 1
            return found
        self.misses += 1
        started = time.perf_counter()
        try:
            with self.trace.span("fetch"):
                return self._fetch(location, size, checksum)
        finally:
            self.wait_s += time.perf_counter() - started

    def open(self, location: Location, size: int, checksum: str) -> int:
        """Return a descriptor of the file, which stays readable when the file is removed."""
        while not location.is_local:
            with contextlib.suppress(FileNotFoundError):  # removed by another process before it was opened
                return os.open(self.get(location, size, checksum), os.O_RDONLY)
        return os.open(location.path, os.O_RDONLY)

    def drop(self, checksum: str) -> None:
        """Remove a file that turned out to be damaged on the disk, so that it is fetched again."""
        self._path(checksum).unlink(missing_ok=True)

    def fetch_ahead(self, wanted: Sequence[Wanted]) -> None:
        """Fetch these in the background, in this order, in place of what was wanted before."""
        with self._changed:
            self._ahead = deque(item for item in wanted if not item[0].is_local)
            self._changed.notify_all()
            while self._ahead and len(self._threads) < FETCHERS:
                thread = threading.Thread(target=self._work, name=f"fetch-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        """Stop fetching; the files stay."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=5)  # it may wait for another process that fetches the same file

    def __enter__(self) -> FileCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ahead or self._is_closed)
                if self._is_closed:
                    return
                location, size, checksum = self._ahead.popleft()
            try:
                if self._find(size, checksum) is None:
                    self._fetch(location, size, checksum)
            except _Closed:
                return
            except DatasetError as error:  # raised to the reader if it is the same when the file is needed
                _log.warning("%s was not fetched ahead: %s", location, error)

    def _path(self, checksum: str) -> Path:
        if not re.fullmatch("[0-9a-f]{32}", checksum):
            raise DatasetError(f"{checksum!r} is no checksum: 32 hexadecimal digits were expected.")
        return self.folder / checksum

    def _find(self, size: int, checksum: str) -> Path | None:
        path = self._path(checksum)
        with contextlib.suppress(OSError):
            if path.stat().st_size == size:
                os.utime(path)  # used last
                return path
        return None

    def _fetch(self, location: Location, size: int, checksum: str) -> Path:
        """Return the path of the file after this process, or another one that was faster, has fetched it."""
        path = self._path(checksum)
        part = path.with_suffix(".part")
        try:
            with only_process(self.folder, f"lock-{checksum[:2]}"):
                for is_last in (False, True):
                    if found := self._find(size, checksum):
                        return found
                    fetched = self._download(location, size, part)
                    if fetched == checksum:
                        with only_process(self.folder, "lock"):
                            self._make_room(0)  # others may have fetched meanwhile too
                            return part.replace(path)
                    part.unlink(missing_ok=True)
                    what = f"{location} is damaged: found {fetched}, expected {checksum} ({size} bytes)"
                    if is_last:
                        raise DatasetError(f"{what}, twice.\nWrite it again (myxtts prepare), or restore it.")
                    _log.warning("%s; it is fetched again", what)
            raise AssertionError("the last attempt returns or raises")
        except OSError as error:
            raise self._no_room(location, size, error) from error

    def _download(self, location: Location, size: int, part: Path) -> str:
        """Write the content to `part` and return its checksum, or its size if that is wrong already."""
        entry = location.entry()
        if entry.size != size:
            return f"{entry.size} bytes"
        digest = xxhash.xxh3_128()
        try:
            with self._reserve(location, size, part) as file, contextlib.closing(location.chunks(entry)) as chunks:
                for chunk in chunks:
                    if self._is_closed:
                        raise _Closed
                    file.write(chunk)
                    digest.update(chunk)
                    self.bytes_fetched += len(chunk)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return digest.hexdigest()

    def _reserve(self, location: Location, size: int, part: Path) -> BinaryIO:
        """Return `part`, empty and with its room on the disk."""
        if size > self.max_bytes:
            found = f"{location} ({size / 1e9:.1f} GB) does not fit the cache ({self.max_bytes / 1e9:.1f} GB)"
            raise DatasetError(f"{found}: raise --shard-cache-gb.")
        with only_process(self.folder, "lock"):
            self._make_room(size)
            file = open(part, "wb")  # noqa: SIM115
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
            return file

    def _make_room(self, size: int) -> None:
        """Remove the files used longest ago until `size` bytes fit beside the others and those being fetched."""
        stats = list[tuple[Path, os.stat_result]]()
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # dropped, or a part that failed
                stats += [(path, path.stat())] if not path.name.startswith("lock") else []
        stats.sort(key=lambda item: item[1].st_mtime_ns)
        excess = sum(stat.st_size for _, stat in stats) + size - self.max_bytes
        for path, stat in stats:
            is_left_over = path.suffix == ".part" and time.time() - stat.st_mtime > ABANDONED_S
            if is_left_over or (excess > 0 and path.suffix != ".part"):
                path.unlink(missing_ok=True)
                excess -= stat.st_size

    def _no_room(self, location: Location, size: int, error: OSError) -> DatasetError:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            return cannot_write(self.folder, error)
        free = f"{shutil.disk_usage(self.folder).free / 1e9:.1f} GB are free, {size / 1e9:.1f} GB are needed"
        what = f"No room for a copy of {location} in {self.folder}: {error.strerror} ({free})."
        return DatasetError(f"{what}\nLower --shard-cache-gb, or choose another disk with --cache-dir DIR.")


def shard_cache(data: DataSettings, trace: Trace | None = None) -> FileCache:
    """Return the cache of shards that the settings ask for."""
    return FileCache((data.cache_dir or user_cache()) / "shards", int(data.shard_cache_gb * 1e9), trace)


class _Closed(Exception):
    """The cache was closed while a file was fetched."""
