"""`myxtts serve`: OpenAI's client against a real server on loopback, and clients that misbehave."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from conftest import make_voice
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_fixtures import (
    TEXT,
    EngineOnOrders,
    Running,
    Told,
    hosted,
    new_synthesizer,
    on_orders,
    running,
    wait_until,
)  # fmt: skip
from synthesis_fixtures import LONG_TEXT, TEXTS, make_model, vocabulary
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from myxtts.audio import as_pcm
from myxtts.cli import main
from myxtts.errors import PipelineError
from myxtts.synthesis.synthesizer import Synthesizer
from myxtts.synthesis.voices import Voice
from myxtts.web.limits import ApiError, Limits
from myxtts.web.serve import Asked
from myxtts.web.speech import FORMATS, StreamEncoder, encode
from myxtts.weights import save_folder

pytest_plugins = ["synthesis_fixtures"]
LAST_CHUNK = b"0\r\n\r\n"
ASKED: dict[str, Any] = {"model": "tiny", "voice": "anna", "input": TEXT}


@pytest.fixture(scope="module")
def spoken() -> Synthesizer:
    """The synthesizer of the server's engine: used by the engine only while a request runs."""
    return new_synthesizer()


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(models_folder: Path, spoken: Synthesizer, anna: Voice) -> Iterator[Running]:
    with running(hosted(models_folder, spoken, anna), per_minute=100_000) as it:
        yield it


@pytest.fixture
def orders() -> EngineOnOrders:
    return EngineOnOrders()


@pytest.fixture
def model(tmp_path: Path, synthesizer: Synthesizer, anna: Voice, orders: EngineOnOrders) -> Any:
    return on_orders(tmp_path, synthesizer, anna, orders)


def sound_of(form: str, content: bytes) -> Any:
    if form == "pcm":
        return np.frombuffer(content, "<i2") / 32768
    return soundfile.read(io.BytesIO(content))[0]


def recording(seconds: float = 3.0, form: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, make_voice(seconds), 22050, format=form)
    return file.getvalue()


def everything(raw: socket.socket, until: bytes = b"") -> bytes:
    """What arrives on a connection until its end, or until these bytes."""
    content = b""
    with contextlib.suppress(ConnectionResetError):
        while not (until and content.endswith(until)) and (part := raw.recv(1 << 20)):
            content += part
    return content


def error_of(response: httpx.Response) -> str:
    """The message of an error in OpenAI's form."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return str(error["message"])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("stream", [True, False])
def test_openai_client_gets_the_same_sound_in_every_format(server: Running, form: Any, stream: bool) -> None:
    create = server.client().audio.speech.with_raw_response.create
    answer = create(**ASKED, response_format=form, extra_body={"seed": 7, "stream": stream})
    assert answer.headers["content-type"] == FORMATS[form]
    assert ("content-length" in answer.headers) is not stream
    if form == "flac" and stream:  # libsndfile needs a length
        assert answer.content[:4] == b"fLaC"
        return
    expected = create(**ASKED, response_format="pcm", extra_body={"seed": 7, "stream": stream}).content
    num_samples = len(expected) // 2
    assert num_samples <= len(sound_of(form, answer.content)) < num_samples + 4000
    assert np.abs(sound_of(form, answer.content)).max() > 1e-3


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_streamed_files_can_be_decoded_and_start_early(form: str) -> None:
    wave = (0.5 * np.sin(np.arange(5 * 24000) / 20)).astype(np.float32)
    encoder = StreamEncoder(form)
    parts = [encoder.push(piece) for piece in np.split(wave, 10)]
    content = b"".join(parts) + encoder.finish()
    assert len(parts[0]) > 500 and all(parts)
    if form == "flac":
        av = pytest.importorskip("av")
        decoded = np.concatenate([frame.to_ndarray()[0] for frame in av.open(io.BytesIO(content)).decode(audio=0)])
        assert np.abs(decoded - sound_of("pcm", as_pcm(wave)) * 32768).max() <= 1
    else:
        assert 0 <= len(sound_of(form, content)) - len(wave) < 4000
    assert 0 <= len(sound_of(form, encode(wave, form))) - len(wave) < 4000


def test_the_server_says_what_the_synthesizer_says(server: Running, spoken: Synthesizer, anna: Voice) -> None:
    asked = {**ASKED, "input": LONG_TEXT, "response_format": "pcm"}
    heard = server.client().audio.speech.create(**asked, extra_body={"seed": 11, "language": "en"}).content
    expected = np.concatenate([*spoken.stream(LONG_TEXT, anna, "en", seed=11)])
    given, wanted = np.frombuffer(heard, "<i2"), np.frombuffer(as_pcm(expected), "<i2")
    assert len(given) == len(wanted) and np.abs(given.astype(int) - wanted).max() <= 3


def test_openai_client_streams(model: Any, orders: EngineOnOrders) -> None:
    with running(model) as it:
        create = it.client().audio.speech.with_streaming_response.create
        threading.Thread(target=lambda: orders.request().sound()).start()
        with create(**ASKED, response_format="pcm") as answer:
            chunks = answer.iter_bytes()
            first = next(chunks)  # while the engine has not spoken the rest
            orders.request().sound(2)
            orders.request().end()
            assert len(first) + sum(map(len, chunks)) == 3 * 48000


def test_async_openai_clients_speak_at_once(server: Running) -> None:
    async def ask() -> list[bytes]:
        async with server.async_client() as client:
            asked = [client.audio.speech.create(**ASKED, response_format="wav") for _ in range(4)]
            return [answer.content for answer in await asyncio.gather(*asked)]

    with ThreadPoolExecutor(1) as apart:  # the browser of other tests keeps an event loop in this thread
        contents = apart.submit(asyncio.run, ask()).result()
    assert all(len(sound_of("wav", content)) for content in contents)


def test_server_sent_events(server: Running) -> None:
    create = server.client().audio.speech.with_streaming_response.create
    with create(**ASKED, response_format="pcm", stream_format="sse", extra_body={"seed": 7}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line]
    *deltas, done = events
    assert {event["type"] for event in deltas} == {"speech.audio.delta"} and done["type"] == "speech.audio.done"
    assert done["usage"]["input_tokens"] == len(TEXT) and done["usage"]["output_tokens"] > 0
    sound = b"".join(base64.b64decode(event["audio"]) for event in deltas)
    plain = server.client().audio.speech.create(**ASKED, response_format="pcm", extra_body={"seed": 7})
    assert sound == plain.content


def test_ssml_is_spoken_with_its_pauses_languages_and_rates(
    server: Running, spoken: Synthesizer, anna: Voice
) -> None:
    ssml = (
        f'<speak xml:lang="en"><break time="200ms"/>{TEXTS[0]}<break time="1s"/>'
        f'<prosody rate="80%">{TEXTS[1]}</prosody></speak>'
    )
    answer = server.post({"input": ssml, "voice": "anna", "response_format": "pcm", "seed": 7})
    assert (answer.status_code, answer.headers["x-myxtts-seed"]) == (200, "7")
    first = np.concatenate([*spoken.stream(TEXTS[0], anna, "en", seed=7)])
    second = np.concatenate([*spoken.stream(TEXTS[1], anna, "en", seed=7, speed=0.8)])
    expected = np.concatenate([np.zeros(4800), first, np.zeros(24000), second, np.zeros(2400)])
    found = sound_of("pcm", answer.content)
    assert len(found) == len(expected) and np.abs(found - expected).max() < 1e-3


@pytest.mark.parametrize(
    ("ssml", "says"),
    [
        ('<speak xml:lang="en"><brake/>a</speak>', "break?"),
        ("<speak>a & b</speak>", "well-formed"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><speak>&b;</speak>', "DOCTYPE"),
        ('<speak xml:lang="en"><break/></speak>', "nothing to say"),
        (
            '<speak xml:lang="en">Hello. <lang xml:lang="fa">سلام</lang></speak>',
            "letters of the text in language 'fa'",
        ),
        ('<speak xml:lang="en"><prosody rate="200%">Hello.</prosody></speak>', "speed"),
    ],
)
def test_mistakes_in_ssml_are_explained_before_anything_is_spoken(server: Running, ssml: str, says: str) -> None:
    answer = server.post({"input": ssml, "voice": "anna", "speed": 1.5})
    assert answer.status_code == 400 and says in error_of(answer)


def test_headers_name_seed_and_warnings(server: Running) -> None:
    create = server.client().audio.speech.with_raw_response.create
    first = create(model="tts-1", voice="alloy", input=TEXT, instructions="Cheerful.", extra_body={"pitch": 3})
    warning = first.headers["x-myxtts-warning"]
    assert all(word in warning for word in ("instructions", "tts-1", "alloy", "pitch"))
    facts = {name: first.headers[f"x-myxtts-{name}"] for name in ("model", "voice", "seed")}
    assert facts["model"] == "tiny" and facts["voice"] == "anna"
    again = create(**ASKED, extra_body={"seed": int(facts["seed"])})
    assert again.content == first.content and "x-myxtts-warning" not in again.headers


def test_models_are_listed_and_named(server: Running) -> None:
    models = server.client().models
    assert [model.id for model in models.list()] == ["tiny"] and models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match=r"no model 'huge'.*tiny"):
        server.client().audio.speech.create(**ASKED | {"model": "huge"})


def test_several_models(tmp_path: Path, synthesizer: Synthesizer, anna: Voice) -> None:
    def model(name: str) -> Any:
        def speak(told: Told) -> None:
            told.sound(len(name))
            told.end()

        one = on_orders(tmp_path / name, synthesizer, anna, EngineOnOrders(speak))
        one.name = name
        return one

    with running(model("a"), model("bb")) as it:
        sizes = {
            name: len(it.post(ASKED | {"model": name, "response_format": "pcm"}).content)
            for name in ("a", "bb", "")
        }
    assert sizes == {"a": 48000, "bb": 96000, "": 48000}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (b"{", "not JSON"),
        (b"[1]", "JSON object"),
        (b'{"input": "\\ud800"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ({"input": ""}, '"input" is missing'),
        ({"input": None}, '"input" is missing'),
        ({"input": 3}, '"input" must be a string'),
        ({"input": "…"}, "Is there anything to say?"),
        ({"input": "…", "language": "en"}, "There is nothing to say"),
        ({"input": "a" * 5000}, "5,000 characters, the limit is 4,096"),
        ({"response_format": "aac"}, "mp3, opus, flac, wav, pcm"),
        ({"stream_format": "mp3"}, "audio or sse"),
        ({"speed": 5}, "0.25 to 4.0"),
        ({"speed": 0.3}, "speed is 0.3, expected 0.5 to 2"),
        ({"speed": float("nan")}, '"speed" must be'),
        ({"speed": True}, '"speed" must be a number'),
        ({"temperature": 0}, "temperature is 0, expected above 0"),
        ({"temperature": 10**400}, "too large"),
        ({"top_p": 2.0}, "top_p is 2.0"),
        ({"seed": -1}, '"seed" must be'),
        ({"seed": 1.5}, '"seed" must be a number'),
        ({"language": "xx"}, '"language" must be one of'),
        ({"voice": {"name": "anna"}}, '"voice" must be a name'),
        ({"voice": "../../etc/passwd"}, "cannot name a voice"),
        ({"voice": 5, "model": 5}, '"model" must be a string; "voice" must be'),
    ],
)
def test_mistakes_are_explained(server: Running, change: Any, says: str) -> None:
    answer = server.post(change if isinstance(change, bytes) else {**ASKED, **change})
    assert answer.status_code == 400, answer.text
    assert says in error_of(answer)
    assert "/tmp" not in answer.text


WORDS = st.text() | st.sampled_from(["sse", "pcm", "en", TEXT])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["id", "x"]), inner),
    max_leaves=3,
)
NAMES = ["model", "input", "voice", "response_format", "speed", "stream_format", "stream", "language", "seed"]


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), VALUES))
@settings(deadline=None)
def test_any_object_is_understood_or_refused(content: dict[str, Any]) -> None:
    try:
        asked = Asked.read(content, Limits())
    except ApiError as error:
        assert error.status == 400 and error.message
    else:
        assert asked.spoken.text == content["input"] and asked.form in FORMATS


def test_addresses_and_methods_that_do_not_exist(server: Running) -> None:
    assert "no such address" in error_of(server.get("/v1/audio/nothing"))
    answer = server.get("/v1/audio/speech")
    assert answer.status_code == 405 and "method" in error_of(answer)
    with pytest.raises(openai.NotFoundError, match=r"no voice 'zoe'.*anna, ben"):
        server.client().audio.speech.create(**ASKED | {"voice": "zoe"})


def test_a_voice_is_uploaded_used_mixed_and_deleted(server: Running) -> None:
    voices, speech = server.client().audio.voices, server.client().audio.speech
    made = voices.create(name="carla", consent="none", audio_sample=("../c.wav", recording(), "audio/wav"))
    assert made.id == "carla" and made.object == "audio.voice"
    assert speech.create(**ASKED | {"voice": "carla"}).content
    assert speech.create(**ASKED | {"voice": {"id": "carla"}}).content
    mix = {"name": "duo", "mix": {"carla": 1, "anna": 3}}
    mixed = server.post(mix, "/v1/audio/voices", headers={"content-type": "application/json"})
    assert mixed.status_code == 200 and "25% carla + 75% anna" in mixed.json()["description"]
    assert speech.create(**ASKED | {"voice": "duo"}).content
    listed = {voice["name"]: voice["built_in"] for voice in server.get("/v1/audio/voices").json()["data"]}
    assert listed == {"anna": True, "ben": True, "carla": False, "duo": False}
    for name in ("carla", "duo"):
        assert httpx.delete(f"{server.url}/v1/audio/voices/{name}").json()["deleted"] is True
        assert httpx.delete(f"{server.url}/v1/audio/voices/{name}").status_code == 404
    with pytest.raises(openai.NotFoundError):
        speech.create(**ASKED | {"voice": "carla"})


@pytest.mark.parametrize(
    ("name", "content", "status", "says"),
    [
        ("anna", recording(), 409, "There is a voice 'anna' already"),
        ("../x", recording(), 400, "cannot name a voice"),
        ("", recording(), 400, '"name" is missing'),
        ("noise", b"not a recording", 400, "not audio"),
        ("noise", b"\xff\xfb" + b"\0" * 500, 400, "cannot be a reference"),
        ("brief", recording(0.4), 400, "too short"),
        ("large", b"x" * 11_000_000, 413, "10,747,904 bytes"),
    ],
)
def test_recordings_that_make_no_voice(server: Running, name: str, content: bytes, status: int, says: str) -> None:
    answer = httpx.post(f"{server.url}/v1/audio/voices", data={"name": name}, files={"audio_sample": content})
    assert answer.status_code == status and says in error_of(answer)
    assert "/tmp" not in answer.text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"--x\r\n",
        {"name": "x", "mix": {"zoe": 1}},
        {"name": "x", "mix": {"anna": -1}},
        {"name": "x"},
        {"name": "x", "mix": {"anna": 10**400}},
        {"name": "x", "mix": {"anna": float("nan")}},
        {"name": "x", "mix": {}},
    ],
)
def test_forms_and_mixes_that_make_no_voice(server: Running, content: Any) -> None:
    kind = "application/json" if isinstance(content, dict) else "multipart/form-data; boundary=x"
    answer = server.post(content, "/v1/audio/voices", headers={"content-type": kind})
    assert answer.status_code in (400, 404) and error_of(answer)


def test_a_damaged_voice_is_left_out_and_shows_no_path(server: Running, models_folder: Path) -> None:
    path = models_folder / "tiny" / "voices" / "worn.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"damaged")
    assert "worn" not in server.get("/v1/audio/voices").text
    answer = server.post(ASKED | {"voice": "worn"})
    path.unlink()
    assert answer.status_code == 400 and "damaged" in error_of(answer) and "/tmp" not in answer.text


def test_built_in_voices_stay(server: Running) -> None:
    answer = httpx.delete(f"{server.url}/v1/audio/voices/anna")
    assert answer.status_code == 400 and "built into the model" in error_of(answer)


def test_a_large_body_is_refused(server: Running) -> None:
    answer = server.post(b'{"input": "' + b"a" * 3_000_000 + b'"}')
    assert answer.status_code == 413 and "262,144 bytes" in error_of(answer)


def test_key_origin_and_host(model: Any) -> None:
    with running(model, api_key="secret", cors=("https://ours.example",)) as it:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            answer = it.get("/v1/models", headers=headers)
            assert answer.status_code == 401 and "Bearer" in error_of(answer)
        key = {"authorization": "Bearer secret"}
        assert it.get("/v1/models", headers=key).status_code == 200
        assert it.get("/metrics").status_code == 401 and it.get("/health").status_code == 200
        assert it.client().models.list().data
        ours = it.get("/v1/models", headers=key | {"origin": "https://ours.example"})
        assert ours.headers["access-control-allow-origin"] == "https://ours.example"
        preflight = {"origin": "https://ours.example", "access-control-request-method": "POST"}
        assert httpx.options(f"{it.url}/v1/audio/speech", headers=preflight).status_code == 200
        assert it.get("/v1/models", headers=key | {"origin": "https://other.example"}).status_code == 403
        refused = it.get("/v1/models", headers={"origin": "https://ours.example"})  # the page can read why
        assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers
        with pytest.raises(InvalidStatus, match="401"):
            connect(f"ws://127.0.0.1:{it.port}/v1/audio/stream")
    with running(model) as it:
        answer = it.get("/v1/models", headers={"host": "rebound.example"})
        assert answer.status_code == 403 and "this machine only" in error_of(answer)
        for host in ("localhost", "[::1]", "[::1]:80", f"127.0.0.1:{it.port}"):
            assert it.get("/v1/models", headers={"host": host}).status_code == 200
        answer = it.post(ASKED, headers={"origin": "https://other.example", "content-type": "text/plain"})
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers


def test_rate_concurrency_and_queue_are_limited(model: Any, orders: EngineOnOrders) -> None:
    with running(model, most_at_once=2, per_minute=6) as it:
        with it.connect(ASKED), it.connect(ASKED):
            orders.request(1)
            answer = it.post(ASKED)
            assert answer.status_code == 429 and "2 requests of this client" in error_of(answer)
        wait_until(lambda: all(told.cancelled.is_set() for told in orders.told))
        orders.is_full = True
        answer = it.post(ASKED)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "7"
        assert "256 requests are waiting" in error_of(answer)
        answers = [it.post(ASKED) for _ in range(5)]
        assert "6 requests a minute" in error_of(answers[-1]) and int(answers[-1].headers["retry-after"]) > 1
        assert it.get("/health").status_code == 200


@pytest.mark.parametrize("heard", [False, True])
def test_a_request_is_cancelled_when_its_client_goes_away(model: Any, orders: EngineOnOrders, heard: bool) -> None:
    with running(model) as it:
        with it.connect(ASKED | {"response_format": "pcm"}) as raw:
            told = orders.request()
            if heard:
                told.sound()
                assert raw.recv(100).startswith(b"HTTP/1.1 200")
            assert not told.cancelled.is_set()
        assert told.cancelled.wait(5)
        wait_until(lambda: "myxtts_clients_gone_total 1" in it.get("/metrics").text)


def test_a_client_that_takes_nothing_is_dropped(model: Any, orders: EngineOnOrders) -> None:
    with (
        running(model, write_s=0.5) as it,
        it.connect(ASKED | {"response_format": "pcm"}, receive_bytes=4096) as raw,
    ):
        told = orders.request()
        told.sound(300)
        assert told.cancelled.wait(10)
        assert not everything(raw).endswith(LAST_CHUNK)


def test_clients_that_send_slowly_are_dropped(model: Any) -> None:
    head = "POST /v1/audio/speech HTTP/1.1\r\nHost: localhost\r\n"
    with running(model, read_s=0.5) as it:
        for sent in ("GET /health HT", head):
            with it.connect(head=sent) as raw:
                assert everything(raw) == b""
        with it.connect(head=f"{head}Content-Length: 50\r\n\r\n{{") as raw:
            assert raw.recv(1000).startswith(b"HTTP/1.1 408")
        with it.connect(head=f"{head.replace('speech', 'none')}Content-Length: 50\r\n\r\n") as raw:
            began_at = time.monotonic()
            with pytest.raises(OSError, match=r"(?i)reset|pipe"):  # it was answered, and the rest drips in
                while time.monotonic() - began_at < 5:
                    raw.sendall(b" ")
                    time.sleep(0.1)
        with httpx.Client() as client:  # a connection that is used again is not dropped
            for _ in range(4):
                assert client.get(f"{it.url}/health").status_code == 200
                time.sleep(0.2)


def test_a_speech_that_fails_says_so(model: Any, orders: EngineOnOrders) -> None:
    error = PipelineError("Out of memory.")
    with running(model) as it:
        with it.connect(ASKED) as raw:
            orders.request(0).end(error)
            answer = everything(raw, b"}}")
            assert answer.startswith(b"HTTP/1.1 500") and b"Out of memory." in answer
        with it.connect(ASKED | {"response_format": "pcm"}) as raw:
            orders.request(1).sound()
            assert raw.recv(100).startswith(b"HTTP/1.1 200")
            orders.request(1).end(error)
            assert not everything(raw).endswith(LAST_CHUNK)  # a client sees that it is incomplete
        with it.connect(ASKED | {"response_format": "pcm", "stream_format": "sse"}) as raw:
            orders.request(2).sound()
            orders.request(2).end(error)
            answer = everything(raw, LAST_CHUNK)
            assert b'"type": "error"' in answer and b"Out of memory." in answer


def test_unexpected_errors_are_answered_without_their_text(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Told) -> None:
        raise ZeroDivisionError("internal detail")

    model.engine = EngineOnOrders(fail)
    with running(model) as it:
        answer = it.post(ASKED)
    assert answer.status_code == 500 and error_of(answer) == "The server failed; its log says why."
    assert "internal detail" in caplog.text


def received(web_socket: ClientConnection, until: tuple[str, int] | None = None) -> list[str | bytes]:
    """All messages up to the event of that type and number, or up to the end."""
    messages: list[str | bytes] = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            messages.append(last := web_socket.recv(timeout=20))
            event = json.loads(last) if isinstance(last, str) else {}
            if (event.get("type"), event.get("number")) == until:
                break
    return messages


def test_text_is_spoken_while_it_is_being_written(server: Running) -> None:
    with connect(f"ws://127.0.0.1:{server.port}/v1/audio/stream") as web_socket:
        web_socket.send(json.dumps({"type": "start", "voice": "anna", "language": "en", "seed": 3}))
        assert json.loads(web_socket.recv()) == {"type": "ready", "sample_rate": 24000, "seed": 3, "warnings": []}
        for part in ("The harbour was", " quiet today. She ope", "ned the old window. Nobody"):
            web_socket.send(json.dumps({"type": "text", "text": part}))
        messages = received(web_socket, until=("sentence_end", 1))  # while the third is not complete
        web_socket.send(json.dumps({"type": "text", "text": " planted"}))
        web_socket.send(json.dumps({"type": "end"}))
        messages += received(web_socket)
    events = [json.loads(message) for message in messages if isinstance(message, str)]
    spoken = [event["text"] for event in events if event["type"] == "sentence"]
    assert spoken == ["The harbour was quiet today.", "She opened the old window.", "Nobody planted"]
    assert events[-1] == {"type": "done"} and events[0]["voice"] == "anna"
    num_bytes = sum(len(message) for message in messages if isinstance(message, bytes))
    assert num_bytes > 2 * 24000 * sum(event.get("seconds", 0) for event in events) - 10


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("{", "not JSON"),
        ('{"type": "sing"}', "expected start, text, flush or end"),
        ('{"type": "text", "text": 5}', "must be a string"),
        ('{"type": "start", "speed": 9}', '"speed" must be'),
        (b"\0", "text messages"),
        ('{"type": "text", "text": "12 دقیقه دیگر می‌آیم. خوب است. بله"}', "vocabulary lacks"),
    ],
)
def test_mistakes_on_the_websocket_are_explained(server: Running, message: Any, says: str) -> None:
    with connect(f"ws://127.0.0.1:{server.port}/v1/audio/stream") as web_socket:
        web_socket.send(message)
        last = json.loads(received(web_socket)[-1])
    assert last["type"] == "error" and says in last["error"]["message"]


def test_a_websocket_outlives_the_deadline_of_its_headers(model: Any, orders: EngineOnOrders) -> None:
    with running(model, read_s=0.3) as it, connect(f"ws://127.0.0.1:{it.port}/v1/audio/stream") as web_socket:
        time.sleep(1)
        web_socket.send(json.dumps({"type": "text", "text": TEXT}))
        web_socket.send(json.dumps({"type": "end"}))
        orders.request().end()
        assert json.loads(received(web_socket)[-1]) == {"type": "done"}


def test_sentences_are_cancelled_when_the_websocket_closes(model: Any, orders: EngineOnOrders) -> None:
    with running(model) as it:
        with connect(f"ws://127.0.0.1:{it.port}/v1/audio/stream") as web_socket:
            web_socket.send(json.dumps({"type": "text", "text": TEXT}))
            web_socket.send(json.dumps({"type": "flush"}))
            told = orders.request()
            told.sound()
            assert json.loads(web_socket.recv())["text"] == TEXT
        assert told.cancelled.wait(5)


def test_a_websocket_says_what_it_has_received_when_the_server_drains(model: Any, orders: EngineOnOrders) -> None:
    with running(model) as it, connect(f"ws://127.0.0.1:{it.port}/v1/audio/stream") as web_socket:
        web_socket.send(json.dumps({"type": "text", "text": TEXT}))
        web_socket.send(
            json.dumps({"type": "start"})
        )  # too late, and so an answer shows that the text has arrived
        assert json.loads(received(web_socket)[-1])["type"] == "error"
    with running(model) as it, connect(f"ws://127.0.0.1:{it.port}/v1/audio/stream") as web_socket:
        web_socket.send(json.dumps({"type": "text", "text": f"{TEXT} She"}))
        orders.request().sound()
        it.stop()
        orders.request(1).sound()  # the rest of the text
        for told in orders.told:
            told.end()
        messages = received(web_socket)
        assert json.loads(messages[-1]) == {"type": "done"}
        it.thread.join(10)
        assert not it.thread.is_alive()


def test_running_requests_finish_after_the_signal(model: Any, orders: EngineOnOrders) -> None:
    with running(model) as it, it.connect(ASKED | {"response_format": "pcm"}) as raw:
        told = orders.request()
        it.stop()
        health = it.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "draining"
        answer = it.post(ASKED)
        assert answer.status_code == 503 and "shutting down" in error_of(answer)
        told.sound(2)
        told.end()
        content = everything(raw)
        assert content.endswith(LAST_CHUNK) and len(content) > 2 * 48000
        it.thread.join(10)
        assert not it.thread.is_alive()


def test_draining_has_a_time_limit(model: Any, orders: EngineOnOrders) -> None:
    with running(model, drain_s=0.3) as it, it.connect(ASKED):
        told = orders.request()
        it.stop()
        it.thread.join(10)
        assert not it.thread.is_alive() and told.cancelled.is_set()


def test_metrics_are_in_the_format_of_prometheus(server: Running) -> None:
    server.client().audio.speech.create(**ASKED)
    text = server.get("/metrics").text
    assert re.search(r'myxtts_requests_total\{path="/v1/audio/speech",status="200"\} [1-9]', text)
    assert re.search(r'myxtts_engine_audio_seconds_total\{model="tiny"\} [\d.]+', text)
    assert re.search(r'myxtts_first_sound_seconds_bucket\{le="\+Inf"\} [1-9]', text)
    assert all(re.fullmatch(r"# TYPE \w+ \w+|\w+(\{[^}]*\})? [\d.e+-]+", line) for line in text.splitlines())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of weights with a saved voice, as a user has one."""
    made = tmp_path_factory.mktemp("weights") / "mine"
    save_folder(made, make_model(), vocabulary())
    return made


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "myxtts", "serve", *arguments]


def test_the_command_serves_and_ends_with_code_0_on_sigterm(folder: Path) -> None:
    process = subprocess.Popen(
        command("--model", str(folder), "--host", "0.0.0.0", "--port", "0", "--device", "cpu"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"MYXTTS_API_KEY": ""},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        key_line, line = process.stdout.readline(), process.stdout.readline()
        port, key = re.search(r":(\d+)/v1", line), key_line.rsplit(" ", 1)[-1].strip()
        assert port and "Serving mine" in line and len(key) >= 32
        base = f"http://127.0.0.1:{port[1]}"
        assert httpx.get(f"{base}/v1/models", timeout=60).status_code == 401
        found = httpx.get(f"{base}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=60).json()
        assert [model["id"] for model in found["data"]] == ["mine"]
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and "Traceback" not in err + out


def test_mistakes_of_the_command(
    folder: Path, server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", str(folder), "--model", str(folder)]) == 2
    assert "the same name" in capsys.readouterr().err
    assert main(["serve", "--model", str(folder), "--port", str(server.port)]) == 2
    assert "Cannot listen" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "websockets", None)
    assert main(["serve", "--model", str(folder)]) == 2
    assert "pip install -e '.[serve]'" in capsys.readouterr().err
