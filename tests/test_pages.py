"""What local pages share: only the owner's browser gets in, and the server ends cleanly."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from myxtts.errors import ConfigError, DatasetError
from myxtts.web import pages

PORT = 4321


async def echo(request: Request) -> Response:
    return JSONResponse(await pages.read_json(request, 1000))


async def fail(request: Request) -> Response:
    raise {"known": ConfigError("wrong"), "other": DatasetError("gone")}.get(
        request.path_params["how"], RuntimeError("a secret path")
    )


async def talk(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("hello")
    await socket.close()


def guarded(tmp_path: Path) -> pages.Guard:
    (tmp_path / "page.html").write_text("<p>page</p>")
    routes = [
        *pages.file_routes(tmp_path, {"/": "page.html"}),
        Route("/echo", echo, methods=["POST"]),
        Route("/fail/{how}", fail),
        WebSocketRoute("/talk", talk),
    ]
    return pages.Guard(pages.page_app(routes, statuses={DatasetError: 409}), "the-token", PORT)


@pytest.fixture
def stranger(tmp_path: Path) -> TestClient:
    return TestClient(guarded(tmp_path), f"http://127.0.0.1:{PORT}", raise_server_exceptions=False)


@pytest.fixture
def owner(stranger: TestClient) -> TestClient:
    assert stranger.get("/?token=the-token&row=3").url.query == b"row=3"
    return stranger


def test_the_token_becomes_a_cookie_and_leaves_the_address(stranger: TestClient) -> None:
    answer = stranger.get("/?token=the-token", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert "HttpOnly" in answer.headers["set-cookie"] and "SameSite" in answer.headers["set-cookie"]
    assert stranger.get("/").text == "<p>page</p>"


def test_strangers_and_other_sites_are_refused(stranger: TestClient) -> None:
    for address in ("/", "/?token=", "/?token=wrong", "/fail/known"):
        assert stranger.get(address).status_code == 403
    assert stranger.post("/echo?token=the-token", json={}).status_code == 403, "a token opens pages only"
    evil = stranger.get(f"http://127.0.0.1:{PORT}//evil.example/%0d%0aa?token=the-token", follow_redirects=False)
    assert evil.headers["location"] == "/evil.example/%0D%0Aa", "never to another site"
    for host in ("evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", ""):
        assert stranger.get("/", headers={"host": host}).status_code == 421, "DNS rebinding"


def test_changes_come_from_the_page_itself(owner: TestClient) -> None:
    own = {"origin": f"http://127.0.0.1:{PORT}"}
    assert owner.post("/echo", json={"a": 1}, headers=own).json() == {"a": 1}
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{PORT}", "http://127.0.0.1:1"):
        assert owner.post("/echo", json={}, headers={"origin": origin}).status_code == 403
        with pytest.raises(WebSocketDisconnect), owner.websocket_connect("/talk", headers={"origin": origin}):
            pass


def test_bodies_are_small_json_objects(owner: TestClient) -> None:
    assert owner.post("/echo", content="{}", headers={"content-type": "text/plain"}).status_code == 415
    for body, status in (("{", 400), ("[]", 400), ("[" * 900, 400), ('{"a": "' + "x" * 2000 + '"}', 413)):
        answer = owner.post("/echo", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status and answer.json()["error"]


def test_errors_are_clear_and_tell_no_secrets(owner: TestClient) -> None:
    assert (owner.get("/fail/known").status_code, owner.get("/fail/known").json()) == (400, {"error": "wrong"})
    assert owner.get("/fail/other").status_code == 409
    unexpected = owner.get("/fail/unknown")
    assert unexpected.status_code == 500 and "secret" not in unexpected.text
    assert owner.get("/nothing").status_code == 404 and owner.get("/../pages.py").status_code == 404


def test_every_answer_forbids_foreign_scripts(owner: TestClient) -> None:
    for answer in (owner.get("/"), owner.get("/nothing"), owner.get("/fail/unknown"), owner.get("/?token=wrong")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


SERVER = """
import sys
sys.path[:0] = sys.argv[1:]
from contextlib import asynccontextmanager
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from myxtts.web import pages
@asynccontextmanager
async def life(app):
    yield
    print("saved", flush=True)
async def page(request):
    return PlainTextResponse("here")
app = pages.page_app([Route("/", page)], lifespan=life)
pages.serve_page(app, open_browser=False, say=lambda line: print(line, flush=True))
print("ended", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_cleanly(number: int) -> None:
    command = [sys.executable, "-c", SERVER, str(Path(__file__).parent.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        address = process.stdout.readline().strip()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor())
        assert opener.open(address, timeout=20).read() == b"here"
        process.send_signal(number)
        assert process.communicate(timeout=20)[0].split() == ["saved", "ended"]
    assert process.returncode == 0


def test_a_taken_port_and_missing_packages_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pages.listen(pages.LOOPBACK, 0) as taken, pytest.raises(ConfigError, match="Choose another address"):
        pages.listen(pages.LOOPBACK, taken.getsockname()[1])
    monkeypatch.setattr(pages, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[serve\]'"):
        pages.require_packages()
