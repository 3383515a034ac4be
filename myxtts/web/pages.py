"""What every local page shares: who may open it, how its files and errors are sent, and how its server runs.

A page is bound to this machine. Its address holds a token, which the first request turns into a cookie. The Host
header is checked, so that no other site's name can lead here, and changes must come from the page itself. This
module does not know what a page shows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import webbrowser
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlencode

from myxtts.errors import INSTALL_EXTRA, ConfigError, MyXTTSError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute, Route
    from starlette.types import Lifespan

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
"""An ASGI application."""

LOOPBACK = "127.0.0.1"
MAX_JSON_BYTES = 65_536
DRAIN_S = 5  # for requests that are still running when the server stops
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".json": "application/json"}
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "media-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
"""Sent with every response: a page loads nothing from elsewhere and runs no script but its own files."""

_log = logging.getLogger(__name__)


def require_packages() -> None:
    """Raise with the one command that installs what a page needs, unless it is there."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"This page needs {' and '.join(missing)}. Run: {INSTALL_EXTRA.format('serve')}")


class Guard:
    """Lets only the owner's browser through to an application, and adds the security headers."""

    def __init__(self, app: App, token: str, port: int, host: str = LOOPBACK) -> None:
        """With another host than loopback, any name may lead here, and a proxy may add TLS."""
        self._app, self._token, self._is_local = app, token, host == LOOPBACK
        self._hosts = {f"{name}:{port}" for name in (LOOPBACK, "localhost")}
        self._cookie = f"myxtts-{port}"  # cookies do not tell ports apart
        self.address = f"http://{host}:{port}/?token={token}"

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        answer = self._refusal(scope)
        if answer is None:
            return await self._app(scope, receive, with_headers(send))
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        status, text, extra = answer
        named = {"content-type": "text/plain; charset=utf-8", "cache-control": "no-store", **extra}
        raw = [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
        guarded = with_headers(send)
        await guarded({"type": "http.response.start", "status": status, "headers": raw})
        return await guarded({"type": "http.response.body", "body": text.encode()})

    def admits(self, scope: Message) -> bool:
        """True if a request comes from the owner's browser."""
        return self._refusal(scope) is None

    def _refusal(self, scope: Message) -> tuple[int, str, dict[str, str]] | None:
        """Return status, text and headers of the answer to a request that must not pass, or None."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "").lower()
        if self._is_local and host not in self._hosts:
            return 421, f"This server answers to {' and '.join(sorted(self._hosts))} only.", {}
        given = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if scope["type"] == "http" and scope["method"] == "GET" and "token" in given:
            if not _same(given.pop("token"), self._token):
                return self._closed()
            rest = f"?{urlencode(given)}" if given else ""
            cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Lax"
            return 303, "", {"location": f"/{quote(scope['path'].lstrip('/'))}{rest}", "set-cookie": cookie}
        if not _same(_cookies(headers.get("cookie", "")).get(self._cookie, ""), self._token):
            return self._closed()
        changes = scope["type"] == "websocket" or scope["method"] not in _SAFE_METHODS
        own = {f"http://{host}"} if self._is_local else {f"http://{host}", f"https://{host}"}
        if changes and headers.get("origin", f"http://{host}") not in own:
            return 403, "Changes are accepted from this page only.", {}
        return None

    def _closed(self) -> tuple[int, str, dict[str, str]]:
        return 403, "Open the address that myxtts printed: it holds the key of this page.", {}


def with_headers(send: Send) -> Send:
    """Return a `send` that adds the security headers to a response."""

    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            held = {name.lower() for name, _ in message.get("headers", ())}
            added = [(key.encode(), value.encode()) for key, value in SECURITY_HEADERS.items()]
            message["headers"] = [*message.get("headers", ()), *(pair for pair in added if pair[0] not in held)]
        await send(message)

    return guarded


def page_app(
    routes: Sequence[BaseRoute],
    *,
    lifespan: Lifespan[Starlette] | None = None,
    statuses: Mapping[type[MyXTTSError], int] | None = None,
) -> Starlette:
    """Return an application that answers errors with JSON: 400, or the status of the error's class."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse

    known: dict[type, int] = {MyXTTSError: 400, **(statuses or {})}

    async def expected(_: Request, error: Exception) -> Response:
        status = next(known[kind] for kind in type(error).__mro__ if kind in known)
        return JSONResponse({"error": str(error)}, status)

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    async def unexpected(_: Request, error: Exception) -> Response:
        _log.error("A request failed", exc_info=error)
        return JSONResponse({"error": f"Internal error: {type(error).__name__}. The terminal has details."}, 500)

    handlers: dict[Any, Any] = {HTTPException: refused, Exception: unexpected, **dict.fromkeys(known, expected)}
    return Starlette(routes=list(routes), lifespan=lifespan, exception_handlers=handlers)


def file_routes(folder: Path, names: Mapping[str, str]) -> list[Route]:
    """Return routes for files by address; what a browser asks for never becomes a path."""
    from starlette.responses import Response
    from starlette.routing import Route

    def route(address: str, path: Path) -> Route:
        async def send_file(_: Request) -> Response:
            media, headers = _TYPES[path.suffix], {"cache-control": "no-cache"}
            return Response(path.read_bytes(), media_type=media, headers=headers)

        return Route(address, send_file)

    return [route(address, folder / name) for address, name in names.items()]


def json_get(work: Callable[[Request], Any]) -> Callable[[Request], Response]:
    """Return an endpoint that answers with what `work` returns, which runs in a thread."""
    from starlette.responses import JSONResponse

    return lambda request: JSONResponse(work(request), headers={"cache-control": "no-store"})


def json_post(work: Callable[[dict[str, Any]], Any]) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that gives `work` the JSON object of a request, in a thread, and sends the result."""
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse

    async def answer(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(work, await read_json(request)))

    return answer


async def read_json(request: Request, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object of a request; raise if it is something else or too large."""
    from starlette.exceptions import HTTPException

    if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
        raise HTTPException(415, "Expected a body of type application/json")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise HTTPException(413, f"The body has more than {max_bytes} bytes")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "The body is not valid JSON") from None
    if not isinstance(found, dict):
        raise HTTPException(400, "Expected a JSON object")
    return found


def serve_page(app: App, *, port: int = 0, open_browser: bool = True, say: Callable[[str], object]) -> None:
    """Serve a page on this machine until Ctrl-C or SIGTERM; port 0 takes a free one. Says the address."""
    with listen(LOOPBACK, port) as listener:
        guard = Guard(app, secrets.token_urlsafe(24), listener.getsockname()[1])
        say(guard.address)
        if open_browser:
            show_page(guard.address)
        run_server(guard, listener)


def show_page(address: str) -> None:
    """Open a browser, if it would not open in the terminal."""
    if sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY", "WSL_DISTRO_NAME"} & os.environ.keys():
        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except (OSError, OverflowError) as error:
        raise ConfigError(_cannot_listen(host, port, error)) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(_cannot_listen(host, port, error)) from error
    return listener


def _cannot_listen(host: str, port: int, error: Exception) -> str:
    why = getattr(error, "strerror", None) or str(error)
    return f"Cannot listen on {host}, port {port}: {why}. Choose another address (--host, --port)."


def run_server(app: App, listener: socket.socket, **options: Any) -> None:
    """Run uvicorn until Ctrl-C or SIGTERM; running requests finish and the application shuts down first."""
    import uvicorn

    usual: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False, "lifespan": "on"}
    config = uvicorn.Config(app, timeout_graceful_shutdown=DRAIN_S, **{**usual, **options})
    server = uvicorn.Server(config)
    with _ending_quietly():
        server.run(sockets=[listener])
    if not server.started:
        raise MyXTTSError("The server could not start; the lines above say why.")


@contextlib.contextmanager
def _ending_quietly() -> Iterator[None]:
    """uvicorn sends the signal that stopped it once more when it has stopped: by then there is nothing to do."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cookies(header: str) -> dict[str, str]:
    pairs = (part.strip().partition("=") for part in header.split(";"))
    return {name: value for name, _, value in pairs}


def _same(given: str, expected: str) -> bool:
    return secrets.compare_digest(given.encode(), expected.encode())
