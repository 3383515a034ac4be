"""Thousands of mixed requests to one server: nothing leaks, no slot stays taken, every error is a clear one."""

from __future__ import annotations

import gc
import json
import os
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_fixtures import Running, hosted, new_synthesizer, running, wait_until
from synthesis_fixtures import TEXTS
from test_serve import recording
from websockets.sync.client import connect

from myxtts.synthesis.voices import Voice

pytest_plugins = ["synthesis_fixtures"]
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")  # its plans would grow with every new length
CLIENTS = 8
JSON = {"content-type": "application/json"}
MALFORMED: list[bytes] = [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"input": 5}', b'{"input": "a", "speed": 1e999}', b"[" * 5000,
    b'{"input": "a", "voice": "../../x"}', b'{"input": "a", "model": "\\u0000"}', b'{"input": "' + b"a" * 400_000,
]  # fmt: skip


def memory_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


class Client:
    """One of several that send requests of every kind; counts the answers."""

    def __init__(self, server: Running, seed: int, sample: bytes, counts: Counter[str]) -> None:
        self._server, self._random, self._sample, self._counts = server, random.Random(seed), sample, counts
        self._name = f"voice {seed}"
        self._http = httpx.Client(base_url=server.url, timeout=60)

    def run(self, count: int) -> None:
        kinds: dict[Callable[[], str], int] = {
            self.speak: 8, self.leave: 4, self.malformed: 4, self.voice: 1, self.break_off: 2, self.talk: 1,
        }  # fmt: skip
        for kind in self._random.choices([*kinds], [*kinds.values()], k=count):
            self._counts[kind()] += 1
        self._http.close()

    def _asked(self) -> dict[str, Any]:
        choose = self._random.choice
        return {
            "input": choose(TEXTS), "voice": choose(["anna", "ben", "alloy", "zoe"]), "language": "en",
            "response_format": choose(["mp3", "opus", "flac", "wav", "pcm"]),
            "stream_format": choose(["audio", "audio", "sse"]), "stream": choose([True, False]),
        }  # fmt: skip

    def _clear(self, answer: httpx.Response) -> str:
        if answer.status_code != 200:
            assert answer.json()["error"]["message"], answer.text
            assert answer.status_code in (400, 404, 409, 413, 429), answer.text
        return str(answer.status_code)

    def speak(self) -> str:
        asked = self._asked()
        answer = self._http.post("/v1/audio/speech", json=asked)
        assert answer.status_code == (404 if asked["voice"] == "zoe" else 200) or answer.status_code == 429
        return self._clear(answer)

    def leave(self) -> str:
        """Go away before, or during, the answer."""
        with self._http.stream("POST", "/v1/audio/speech", json=self._asked()) as answer:
            if self._random.random() < 0.5:
                next(answer.iter_raw(), b"")
        return "left"

    def malformed(self) -> str:
        return self._clear(self._http.post("/v1/audio/speech", content=self._random.choice(MALFORMED)))

    def voice(self) -> str:
        """Upload a voice, and delete it while it speaks."""
        sample = self._random.choice([self._sample, self._sample[:2000], b"noise"])
        made = self._http.post("/v1/audio/voices", data={"name": self._name}, files={"audio_sample": sample})
        if made.status_code != 200:
            return self._clear(made)
        asked = {"input": " ".join(TEXTS), "voice": self._name, "language": "en", "response_format": "pcm"}
        with self._http.stream("POST", "/v1/audio/speech", json=asked) as answer:
            deleted = httpx.delete(f"{self._server.url}/v1/audio/voices/{self._name}", timeout=60)
            assert deleted.status_code == 200 and answer.status_code in (200, 429)
            assert answer.read()
        return "deleted while it spoke"

    def break_off(self) -> str:
        """Send something that is not a whole request, and close."""
        half = b"POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n{"
        content = self._random.choice([b"", b"\0" * 50, b"GET / HTTP/9\r\n\r\n", half[:60], half])
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=10) as raw:
            raw.sendall(content)
        return "broken off"

    def talk(self) -> str:
        with connect(f"ws://127.0.0.1:{self._server.port}/v1/audio/stream") as talk:
            for text in TEXTS:
                talk.send(json.dumps({"type": "text", "text": text + " "}))
            if self._random.random() < 0.5:
                return "left"
            talk.send(json.dumps({"type": "end"}))
            messages = list(talk)
        assert json.loads(messages[-1]) == {"type": "done"}, messages[-1]
        return "talked"


def storm(server: Running, count: int, seed: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    sample = recording(2.0)
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [Client(server, seed + number, sample, counts) for number in range(CLIENTS)]
        for done in [pool.submit(client.run, count // CLIENTS) for client in clients]:
            done.result()
    return counts


def attack(count: int, folder: Path, anna: Voice) -> tuple[Counter[str], list[float]]:
    """All answers, and the memory after each of five parts."""
    synthesizer = new_synthesizer()
    model = hosted(folder, synthesizer, anna)
    counts: Counter[str] = Counter()
    memory = []
    with running(model, per_minute=10**6, most_at_once=64, read_s=5.0) as server:
        for part in range(5):
            counts += storm(server, count // 5, 100 * part)
            wait_until(lambda: not (found := model.engine.stats()).slots_used + found.active + found.queued, 60)
            wait_until(lambda: not server.server._gate.num_active, 30)
            gc.collect()
            memory.append(memory_mb())
        assert server.get("/health").json()["status"] == "ready"
        stats = model.engine.stats()
        assert stats.failed == 0, stats
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]
    return counts, memory


def test_mixed_requests_leave_nothing_behind(tmp_path: Path, anna: Voice) -> None:
    counts, _ = attack(120, tmp_path, anna)
    assert counts["200"] > 20 and counts["400"] > 5 and counts["left"] > 5


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_thousands_of_mixed_requests_leave_nothing_behind(tmp_path: Path, anna: Voice) -> None:
    counts, memory = attack(10_000, tmp_path, anna)
    print(dict(counts), [round(each) for each in memory])
    assert counts["deleted while it spoke"] > 50
    assert memory[-1] - memory[1] < 60, memory
