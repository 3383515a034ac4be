"""A server on a free port of loopback, with a small random network or with an engine that does as it is told."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
from synthesis_fixtures import make_model, speaking

from myxtts.synthesis.engine import Deliver, End, Engine, Piece, QueueFull, Request, Stats
from myxtts.synthesis.synthesizer import Report, SentenceReport, Synthesizer
from myxtts.synthesis.voices import Voice, VoiceLibrary
from myxtts.web.limits import Limits
from myxtts.web.pages import listen
from myxtts.web.serve import DrainingServer, make_app
from myxtts.web.speech import HostedModel, Models

TEXT = "The harbour was quiet today."
SECOND = np.full(24000, 0.25, np.float32)
REPORT = Report("en", "anna", "hifigan", 0, 1.0, (SentenceReport(TEXT, 25, 1.0, 1, None, False),), {})


class Told:
    """A request of `EngineOnOrders`: the test decides what it delivers."""

    def __init__(self, request: Request, deliver: Deliver) -> None:
        self.request, self.deliver, self.seed = request, deliver, request.seed or 0
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()

    def sound(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.deliver(Piece(SECOND, 0, False))

    def end(self, error: Exception | None = None) -> None:
        self.deliver(End(None if error else REPORT, error))


class EngineOnOrders:
    """Accepts requests and leaves it to the test to speak them, or calls `speak`."""

    def __init__(self, speak: Callable[[Told], None] | None = None) -> None:
        self._speak, self.is_full = speak, False
        self.told: list[Told] = []
        self._arrived = threading.Condition()

    def submit(self, request: Request, deliver: Deliver) -> Told:
        if self.is_full:
            raise QueueFull(256, 7.0)
        told = Told(request, deliver)
        with self._arrived:
            self.told.append(told)
            self._arrived.notify_all()
        if self._speak is not None:
            self._speak(told)
        return told

    def request(self, number: int = 0) -> Told:
        """The request of that number, when it has arrived."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.told) > number, 10), "no request arrived"
            return self.told[number]

    def stats(self) -> Stats:
        return Stats(1, 0, 0, 0, len(self.told), 0, 0, 1.0, 0, 0.0, 0)

    def close(self, drain: bool = True, timeout_s: float | None = None) -> None: ...


def hosted(folder: Path, synthesizer: Synthesizer, anna: Voice, name: str = "tiny", **options: Any) -> HostedModel:
    """A model with the built-in voices anna and ben."""
    library = VoiceLibrary(folder / name)
    ben = replace(anna, name="ben", latents=anna.latents.flip(1), languages=("fa",))
    voices = {"anna": replace(anna, name="anna", languages=("en",)), "ben": ben}
    library.built_in = lambda: voices  # type: ignore[method-assign]
    return HostedModel(name, synthesizer, library, **options)


def on_orders(folder: Path, synthesizer: Synthesizer, anna: Voice, engine: EngineOnOrders) -> HostedModel:
    """The same with an engine that does as it is told."""
    model = hosted(folder, synthesizer, anna)
    model.engine.close(drain=False)
    model.engine = engine  # type: ignore[assignment]
    return model


class Running:
    """A server that answers."""

    def __init__(self, server: DrainingServer, port: int, thread: threading.Thread, key: str) -> None:
        self.server, self.port, self.thread, self._key = server, port, thread, key
        self.url = f"http://127.0.0.1:{port}"

    def client(self, **options: Any) -> openai.OpenAI:
        key = self._key or "none"
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30, **options)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    def post(self, content: Any = None, path: str = "/v1/audio/speech", **options: Any) -> httpx.Response:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return httpx.post(self.url + path, content=body, timeout=30, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **options)

    def connect(self, content: Any = None, head: str = "", receive_bytes: int | None = None) -> socket.socket:
        """A raw connection on which a request to speak was sent."""
        raw = socket.socket()
        if receive_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        raw.settimeout(20)
        raw.connect(("127.0.0.1", self.port))
        body = json.dumps(content).encode() if content is not None else b""
        usual = f"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall((head or usual).encode() + body)
        return raw

    def stop(self) -> None:
        """As SIGTERM."""
        self.server.handle_exit(signal.SIGTERM, None)


@contextmanager
def running(*models: HostedModel, drain_s: float = 10.0, **limits: Any) -> Iterator[Running]:
    known = Limits(**limits)
    listener = listen("127.0.0.1", 0)
    server = DrainingServer(make_app(Models(models), known), known, drain_s)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield Running(server, listener.getsockname()[1], thread, known.api_key)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)
        for model in models:
            if isinstance(model.engine, Engine):
                model.engine.close(drain=False)
        assert not thread.is_alive()


def wait_until(holds: Callable[[], Any], seconds: float = 10.0) -> None:
    ends_at = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends_at, "waited in vain"
        time.sleep(0.01)


def new_synthesizer() -> Synthesizer:
    return speaking(make_model())
