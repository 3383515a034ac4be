"""A small S3 server on this machine that fails, truncates and throttles on request; a web server of files too."""

from __future__ import annotations

import hashlib
import re
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

import pytest

Fault = str
"""503, 403, reset, truncate, corrupt or stall; empty for none."""


class Throttle:
    """A link of so many bytes a second, which all connections share."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self._free_at, self._lock = bytes_per_s, 0.0, threading.Lock()

    def send(self, count: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self.bytes_per_s
            wait_s = self._free_at - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)


class LoopbackStore:
    """Objects by `bucket/key`, and what goes wrong with the next requests that read."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.faults: deque[Fault] = deque()
        self.fault_of: Callable[[str], Fault] = lambda _: ""
        self.throttle: Throttle | None = None
        self.requests: list[tuple[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.parts: dict[str, dict[int, bytes]] = {}
        self.lock = threading.Lock()
        store = self
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": store}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def next_fault(self, key: str) -> Fault:
        with self.lock:
            return self.faults.popleft() if self.faults else self.fault_of(key)


class _Handler(BaseHTTPRequestHandler):
    store: LoopbackStore
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        key, query = self._target()
        if "list-type" in query:
            return self._list(key.strip("/"), query.get("prefix", [""])[0])
        fault = self.store.next_fault(key) if self.command == "GET" else ""
        if fault.isdigit():
            return self._answer(int(fault), f"<Error><Code>{fault}</Code></Error>".encode())
        if fault == "reset":
            self.close_connection = True
            self.connection.shutdown(2)
            return None
        content = self.store.objects.get(key)
        if content is None:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        tag = f'"{hashlib.md5(content[:4096] + str(len(content)).encode()).hexdigest()}"'
        if self.headers.get("If-Match", tag) != tag:
            return self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, end = (int(span[1]), int(span[2] or len(content) - 1) + 1) if span else (0, len(content))
        body = memoryview(content)[start:end]
        self.send_response(206 if span else 200)
        if span:
            self.send_header("Content-Range", f"bytes {start}-{min(end, len(content)) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", tag)
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.end_headers()
        if self.command == "GET":
            self._send(body, fault)
        return None

    def _send(self, body: memoryview, fault: Fault) -> None:
        if fault == "truncate":
            body, self.close_connection = body[: len(body) // 2], True
        if fault == "stall":
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            time.sleep(3)
            self.close_connection = True
            return
        if fault == "corrupt":
            body = memoryview(bytes(body[:-1]) + bytes([body[-1] ^ 1]))
        for start in range(0, len(body), 1 << 18):
            piece = body[start : start + (1 << 18)]
            if self.store.throttle:
                self.store.throttle.send(len(piece))
            try:
                self.wfile.write(piece)
            except OSError:  # the reader has gone
                self.close_connection = True
                return

    def do_PUT(self) -> None:
        key, query = self._target()
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if "partNumber" in query:
            self.store.parts[query["uploadId"][0]][int(query["partNumber"][0])] = content
        else:
            self.store.objects[key] = content
        self._answer(200, b"", ETag='"part"')

    def do_POST(self) -> None:
        key, query = self._target()
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "delete" in query:
            names = re.findall("<Key>.*?</Key>", content.decode())
            for name in names:
                self.store.objects.pop(f"{key.strip('/')}/{name[5:-6]}", None)
            deleted = "".join(f"<Deleted>{name}</Deleted>" for name in names)
            return self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())
        if "uploads" in query:
            upload = f"upload{len(self.store.parts)}"
            self.store.parts[upload] = {}
            xml = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return self._answer(200, xml.encode())
        parts = self.store.parts.pop(query["uploadId"][0])
        self.store.objects[key] = b"".join(parts[number] for number in sorted(parts))
        done = '<CompleteMultipartUploadResult><ETag>"all"</ETag></CompleteMultipartUploadResult>'
        return self._answer(200, done.encode())

    def _target(self) -> tuple[str, dict[str, list[str]]]:
        url = urllib.parse.urlsplit(self.path)
        with self.store.lock:
            self.store.requests.append((self.command, self.path))
            self.store.headers.append({name.lower(): value for name, value in self.headers.items()})
        return urllib.parse.unquote(url.path).lstrip("/"), urllib.parse.parse_qs(url.query, keep_blank_values=True)

    def _list(self, bucket: str, prefix: str) -> None:
        found = [key for key in sorted(self.store.objects) if key.startswith(f"{bucket}/{prefix}")]
        items = "".join(
            f"<Contents><Key>{escape(key.partition('/')[2])}</Key><Size>{len(self.store.objects[key])}</Size>"
            f"<LastModified>2015-10-21T07:28:00.000Z</LastModified><ETag>&quot;x&quot;</ETag></Contents>"
            for key in found
        )
        self._answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode())

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serving() -> Iterator[LoopbackStore]:
    store = LoopbackStore()
    try:
        yield store
    finally:
        store.close()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackStore]:
    """An empty store that s3:// means; retries wait a thousandth of the usual time."""
    pytest.importorskip("obstore")
    with serving() as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setattr("myxtts.data.locations.FIRST_WAIT_S", 0.001)
        monkeypatch.setattr("myxtts.data.locations.LONGEST_WAIT_S", 0.001)
        from myxtts.data.locations import _client

        _client.cache_clear()
        yield store
        _client.cache_clear()
