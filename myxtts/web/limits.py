"""What every request passes before it is answered: key, origin, rate, concurrency, sizes, time-outs, draining.

Errors leave in the JSON form of OpenAI's API. Counts what `/metrics` shows. Knows nothing of speech.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import h11
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_JSON_BYTES, MOST_UPLOAD_BYTES = 256 * 1024, 10 * 1024 * 1024  # the upload's limit is OpenAI's
_DISCARDED_BYTES = 64 * 1024 * 1024  # read after a limit, so that the client gets to see the answer
_MOST_CLIENTS = 10_000  # whose rate is remembered
_OPEN = {"/health"}  # answered without a key and at any rate
_WATCHED = {"/health", "/metrics"}  # answered while draining too
_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds to the first sound
_PORT = re.compile(r":\d*$")
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    api_key: str = ""  # empty: none is asked for, which is for loopback only
    cors: tuple[str, ...] = ()  # origins of pages that may use the server
    most_characters: int = 4096  # of one text, as in OpenAI's API
    most_at_once: int = 16  # requests of one client
    per_minute: int = 600  # requests of one client
    read_s: float = 20.0  # for headers, and again for a body
    write_s: float = 30.0  # for a client to take what is sent
    idle_s: float = 300.0  # for the next message on a WebSocket


class ApiError(Exception):
    """An answer with an error status."""

    def __init__(
        self, status: int, message: str, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry_after_s = status, message, code, retry_after_s

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after_s is None else {"Retry-After": f"{max(1, round(self.retry_after_s))}"}
        headers |= {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return JSONResponse(self.body(), self.status, headers)


class ClientGone(BaseException):
    """The client has closed the connection, or takes nothing: there is nobody to answer.

    Not an `Exception`, for which Starlette would write an answer.
    """


@dataclass
class Counts:
    """What `/metrics` shows of requests; the engines count for themselves."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # by path and status
    gone: int = 0  # clients that left before their end
    first_sound: Counter[float] = field(default_factory=Counter)
    first_sound_s: float = 0.0

    def heard(self, seconds: float) -> None:
        """Count the time from a request to its first sound."""
        self.first_sound_s += seconds
        self.first_sound[next((bound for bound in _BUCKETS if seconds <= bound), float("inf"))] += 1

    def lines(self) -> Iterator[str]:
        """In the text format of Prometheus."""
        yield "# TYPE myxtts_requests_total counter"
        for (path, status), count in sorted(self.requests.items()):
            yield f'myxtts_requests_total{{path="{path}",status="{status}"}} {count}'
        yield from ("# TYPE myxtts_clients_gone_total counter", f"myxtts_clients_gone_total {self.gone}")
        yield "# TYPE myxtts_first_sound_seconds histogram"
        total = 0
        for bound in (*_BUCKETS, float("inf")):
            total += self.first_sound[bound]
            name = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'myxtts_first_sound_seconds_bucket{{le="{name}"}} {total}'
        yield f"myxtts_first_sound_seconds_sum {self.first_sound_s:.6f}"
        yield f"myxtts_first_sound_seconds_count {total}"


class Gate:
    """The outermost layer of the application: lets a request in or answers why not."""

    def __init__(self, app: ASGIApp, limits: Limits, counts: Counts, paths: frozenset[str]) -> None:
        self._app, self._limits, self._counts, self._paths = app, limits, counts, paths
        self._tokens: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by client: how many, and when
        self._active: Counter[str] = Counter()
        self.is_draining = False

    @property
    def num_active(self) -> int:
        """Requests being answered, WebSockets included."""
        return self._active.total()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        client, status = (scope.get("client") or ("local",))[0], 0

        async def timed_send(message: Message) -> None:
            nonlocal status
            status = message.get("status", 101 if message["type"] == "websocket.accept" else status)
            try:
                async with asyncio.timeout(self._limits.write_s):
                    await send(message)
            except TimeoutError:
                abort(scope)
                raise ClientGone from None

        try:
            with self._admitted(scope, client):
                await self._app(scope, receive, timed_send)
        except ApiError as error:
            await error.response()(scope, receive, timed_send)
        except ClientGone:
            self._counts.gone += 1
        except Exception:
            if not status:  # else the answer has been given, and the log says why
                raise
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._counts.requests[path, status] += 1

    @contextmanager
    def _admitted(self, scope: Scope, client: str) -> Iterator[None]:
        headers, path = Headers(scope=scope), scope["path"]
        self._check_origin(headers)
        if path not in _OPEN:
            self._check_rate(client)  # first, because it also slows down those who guess keys
            self._check_key(headers)
        if path in _WATCHED:
            yield
            return
        if self.is_draining:
            raise ApiError(503, "The server is shutting down; send the request elsewhere.", "draining", 5)
        if self._active[client] >= self._limits.most_at_once:
            most = f"{self._limits.most_at_once} requests of this client are running, the most there may be"
            raise ApiError(429, f"{most}; wait for one to end.", "too_many_at_once", 1)
        self._active[client] += 1
        try:
            yield
        finally:
            self._active[client] -= 1
            if not self._active[client]:
                del self._active[client]

    def _check_origin(self, headers: Headers) -> None:
        """Refuse pages of other sites. Without a key also names other than those of this machine, which a page
        could use to reach a server on loopback."""
        host, origin = headers.get("host", ""), headers.get("origin")
        allowed = self._limits.cors
        if origin and not {"*", origin} & {*allowed} and origin.partition("://")[2] != host:
            raise ApiError(403, f"Pages of {origin[:100]} may not use this server (serve --cors ORIGIN).")
        if not self._limits.api_key and not is_loopback(_PORT.sub("", host)):
            raise ApiError(403, f"This server is for this machine only, not for the host name {host[:100]!r}.")

    def _check_key(self, headers: Headers) -> None:
        expected = self._limits.api_key
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_right = scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), expected.encode())
        if expected and not is_right:
            found = "The API key is wrong" if given else "An API key is required"
            raise ApiError(401, f"{found}; send the header Authorization: Bearer KEY.", "invalid_api_key")

    def _check_rate(self, client: str) -> None:
        """Take one of the client's tokens, which are refilled evenly."""
        now, most = time.monotonic(), float(self._limits.per_minute)
        tokens, since = self._tokens.pop(client, (most, now))
        tokens = min(most, tokens + (now - since) * most / 60)
        self._tokens[client] = (max(0.0, tokens - 1), now) if tokens >= 1 else (tokens, now)
        if len(self._tokens) > _MOST_CLIENTS:
            self._tokens.popitem(last=False)
        if tokens < 1:
            wait_s = (1 - tokens) * 60 / most
            message = (
                f"More than {self._limits.per_minute} requests a minute; try again in {max(1, round(wait_s))} s."
            )
            raise ApiError(429, message, "rate_limit_exceeded", wait_s)


def is_loopback(host: str) -> bool:
    """True if a host name or address can only be this machine."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def abort(scope: Scope) -> None:
    """Close the connection at once, whatever is left to send, so that the client sees an incomplete answer."""
    if (close := scope.get("state", {}).get("abort")) is not None:
        close()


async def body_of(request: Request, limit: int, seconds: float) -> bytes:
    """The body of a request, of at most `limit` bytes and sent within `seconds`."""
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size <= limit:
                    body += part
                elif size > limit + _DISCARDED_BYTES:
                    break
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {seconds:g} s.") from None
    if size > limit:
        raise ApiError(413, f"The body has more than {limit:,} bytes, the most there may be.", "body_too_large")
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of work that is cancelled when the client goes away. The body must have been read."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    tasks = [working, asyncio.ensure_future(disconnected())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class TimedProtocol(H11Protocol):
    """HTTP that lets the application abort a connection, and closes those that do not send a whole request."""

    read_s = Limits.read_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state: MutableMapping[str, Any] = {**self.app_state, "abort": transport.abort}  # type: ignore[assignment]
        self._deadline: asyncio.TimerHandle | None = None
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def _watch(self) -> None:
        """Set a deadline while headers are awaited, or the rest of a body that was answered before its end."""
        is_answered = self.cycle is None or self.cycle.response_complete
        is_http = self.transport.get_protocol() is self  # and has not become a WebSocket
        is_waiting = is_http and is_answered and self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if not is_waiting and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif is_waiting and self._deadline is None:
            self._deadline = self.loop.call_later(self.read_s, self.transport.abort)
