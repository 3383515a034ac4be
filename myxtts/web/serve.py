"""The server: OpenAI's speech API, voices, and a WebSocket for text that is still being written.

`serve` runs it until SIGTERM or Ctrl-C, then lets running requests finish. See docs/serving.md.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import uvicorn
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from myxtts.audio import as_pcm
from myxtts.config import LANGUAGES
from myxtts.errors import ConfigError, MyXTTSError, PipelineError
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.synthesis.engine import EngineClosed, QueueFull
from myxtts.synthesis.markup import is_markup
from myxtts.synthesis.scheduler import Cancelled
from myxtts.synthesis.text import split_complete
from myxtts.synthesis.vocoding import pause
from myxtts.web.limits import (
    MOST_JSON_BYTES,
    MOST_UPLOAD_BYTES,
    ApiError,
    ClientGone,
    Counts,
    Gate,
    Limits,
    TimedProtocol,
    abort,
    body_of,
    is_loopback,
    while_connected,
)
from myxtts.web.speech import (
    FORMATS,
    SAMPLING_FIELDS,
    HostedModel,
    Models,
    NameTaken,
    Speaking,
    Spoken,
    StreamEncoder,
    UnknownName,
    encode,
)

KEY_VARIABLE = "MYXTTS_API_KEY"
_FIELDS: dict[str, tuple[type, ...]] = {
    "model": (str,), "input": (str,), "voice": (str, dict), "instructions": (str,), "response_format": (str,),
    "speed": (int, float), "stream_format": (str,), "stream": (bool,), "language": (str,), "seed": (int,),
    "temperature": (int, float), "top_k": (int,), "top_p": (int, float), "repetition_penalty": (int, float),
    "guidance": (int, float), "central": (bool,),
}  # fmt: skip
_TYPES = {str: "a string", dict: "an object", int: "a number", float: "a number", bool: "true or false"}
_SPEEDS = (0.25, 4.0)  # of OpenAI's API; the model says what it can do of it
_LONGEST_REST = 400  # characters of a sentence on the WebSocket before it is cut
_SENTENCES_AHEAD = 2  # of a WebSocket: one is heard while the next one is spoken
_MOST_CONNECTIONS, _LONGEST_WARNING = 2048, 1000
_MOST_SEED, _MOST_NUMBER = 2**31 - 1, 1e6
_STATUS = {QueueFull: 429, EngineClosed: 503, Cancelled: 503, NameTaken: 409, UnknownName: 404, ConfigError: 400}
_log = logging.getLogger(__name__)


def error_of(error: Exception) -> ApiError:
    """The answer to an error: its own text if it was written for users."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        known = {404: "There is no such address.", 405: "This address does not take that method."}
        return ApiError(error.status_code, known.get(error.status_code, str(error.detail)))
    if not isinstance(error, (*_STATUS, PipelineError)):  # the text of others may show paths
        _log.error("A request failed", exc_info=error)
        return ApiError(500, "The server failed; its log says why.")
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
    wait_s = error.retry_after_s if isinstance(error, QueueFull) else 5.0 if status == 503 else None
    code = {429: "queue_full", 409: "name_taken"}.get(status, getattr(error, "code", None))
    return ApiError(status, str(error), code, wait_s)


@dataclass(frozen=True)
class Asked:
    """A request to speak: what to say, and how to send it."""

    spoken: Spoken
    form: str
    is_sse: bool
    warnings: tuple[str, ...]

    @classmethod
    def read(cls, received: Mapping[str, Any], limits: Limits) -> Asked:
        """Check the fields of a request; one error lists every problem."""
        given = {name: value for name, value in received.items() if value is not None}
        _require(dict.fromkeys(_wrong_types(given), False))
        text, form, voice = given.get("input", ""), given.get("response_format", "mp3"), given.get("voice", "")
        voice = voice.get("id") if isinstance(voice, dict) else voice
        stream_format, speed = given.get("stream_format", "audio"), given.get("speed", 1.0)
        language, seed = given.get("language", ""), given.get("seed")
        numbers = [value for name, value in given.items() if name != "seed" and type(value) in (int, float)]
        too_long = f"has {len(text):,} characters, the limit is {limits.most_characters:,}; send it in parts"
        _require({
            '"input" is missing: the text to speak': bool(text.strip()),
            f'"input" {too_long}': len(text) <= limits.most_characters,
            f'"response_format" must be one of {", ".join(FORMATS)}': form in FORMATS,
            '"stream_format" must be audio or sse': stream_format in ("audio", "sse"),
            f'"speed" must be {_SPEEDS[0]} to {_SPEEDS[1]}': _SPEEDS[0] <= speed <= _SPEEDS[1],
            f'"language" must be one of {", ".join(LANGUAGES)}': language in ("", *LANGUAGES),
            f'"seed" must be 0 to {_MOST_SEED}': 0 <= (seed or 0) <= _MOST_SEED,
            "a number is too large": all(abs(number) <= _MOST_NUMBER for number in numbers),
            '"voice" must be a name, or an object with the name as "id"': isinstance(voice, str),
        })  # fmt: skip
        warnings = ["instructions are ignored: this model cannot follow any"] * bool(given.get("instructions"))
        if unknown := sorted(given.keys() - _FIELDS.keys()):
            warnings.append(f"unknown fields are ignored: {', '.join(unknown)[:200]}")
        sampling = {name: given[name] for name in SAMPLING_FIELDS if name in given}
        streams = stream_format == "sse" or given.get("stream", form != "flac")
        how = (language, float(speed), seed, sampling, streams, is_markup(text))
        return cls(
            Spoken(text, given.get("model", ""), str(voice), *how), form, stream_format == "sse", tuple(warnings)
        )


def _wrong_types(given: Mapping[str, Any]) -> Iterator[str]:
    for name, kinds in _FIELDS.items():
        if name in given and type(given[name]) not in kinds:
            yield f'"{name}" must be {" or ".join(dict.fromkeys(_TYPES[kind] for kind in kinds))}'


def _require(demands: Mapping[str, bool]) -> None:
    if problems := [problem for problem, holds in demands.items() if not holds]:
        raise ApiError(400, "; ".join(problems) + ".")


class SpeechApi:
    """The endpoints."""

    def __init__(self, models: Models, limits: Limits, counts: Counts) -> None:
        self._models, self._limits, self._counts = models, limits, counts
        self._text_threads = CapacityLimiter(4)
        self._sound_threads = CapacityLimiter(max(2, os.cpu_count() or 2))
        self._voice_threads = CapacityLimiter(1)  # a recording takes much memory
        self.is_draining: Callable[[], bool] = lambda: False

    async def speech(self, request: Request) -> Response:
        """Answer POST /v1/audio/speech."""
        began_at = time.monotonic()
        given = _object(await body_of(request, MOST_JSON_BYTES, self._limits.read_s))
        asked = Asked.read(given, self._limits)
        return _SpeechResponse(self, asked, request.client.host if request.client else "", began_at)

    async def begin(self, spoken: Spoken, client: str, speaking: Speaking) -> None:
        """Submit a text to its model."""
        model, warning = self._models.named(spoken.model)
        speaking.warnings += [warning] * bool(warning)
        await to_thread.run_sync(model.submit, spoken, client, speaking, limiter=self._text_threads)

    async def encoded(self, work: Callable[..., bytes], *arguments: Any) -> bytes:
        """The result of an encoder, in a thread."""
        return await to_thread.run_sync(work, *arguments, limiter=self._sound_threads)

    def heard(self, began_at: float) -> None:
        self._counts.heard(time.monotonic() - began_at)

    async def models(self, _: Request) -> Response:
        """Answer GET /v1/models."""
        return JSONResponse({"object": "list", "data": [_about_model(model) for model in self._models]})

    async def model(self, request: Request) -> Response:
        """Answer GET /v1/models/NAME."""
        return JSONResponse(_about_model(self._models.named(request.path_params["name"])[0]))

    async def voices(self, request: Request) -> Response:
        """Answer GET /v1/audio/voices."""
        model, _ = self._models.named(request.query_params.get("model", ""))
        found = await to_thread.run_sync(model.voices, limiter=self._text_threads)
        return JSONResponse({"object": "list", "data": [_about_voice(model, voice) for voice in found]})

    async def add_voice(self, request: Request) -> Response:
        """Answer POST /v1/audio/voices: a recording, or JSON with a mix."""
        is_json = request.headers.get("content-type", "").startswith("application/json")
        limit = MOST_JSON_BYTES if is_json else MOST_UPLOAD_BYTES + MOST_JSON_BYTES
        body = await body_of(request, limit, 3 * self._limits.read_s)
        given = _object(body) if is_json else await _form(request, body)
        name, mix, recording = (given.get(field) for field in ("name", "mix", "audio_sample"))
        if not isinstance(name, str) or not name:
            raise ApiError(400, '"name" is missing: the name of the new voice.')
        model, _ = self._models.named(str(given.get("model") or ""))
        if isinstance(mix, dict) and all(type(each) in (int, float) for each in mix.values()):
            add: Callable[..., Any] = lambda: model.mix_voices(name, mix)  # noqa: E731
        elif isinstance(recording, bytes):
            language = str(given.get("language") or "")
            if language not in ("", *LANGUAGES):
                raise ApiError(400, f'"language" must be one of {", ".join(LANGUAGES)}.')
            about = ([language] if language else [], str(given.get("description") or "")[:200])
            add = lambda: model.add_voice(name, recording, *about)  # noqa: E731
        else:
            example = 'or JSON {"name": "new", "mix": {"a": 0.5, "b": 0.5}}'
            raise ApiError(400, f"Send a form with the fields name and audio_sample, a recording, {example}.")
        voice = await to_thread.run_sync(add, limiter=self._voice_threads)
        return JSONResponse(_about_voice(model, voice) | {"notes": list(voice.notes)})

    async def delete_voice(self, request: Request) -> Response:
        """Answer DELETE /v1/audio/voices/NAME."""
        name = request.path_params["name"]
        model, _ = self._models.named(request.query_params.get("model", ""))
        await to_thread.run_sync(model.delete_voice, name, limiter=self._text_threads)
        return JSONResponse({"id": name, "object": "audio.voice.deleted", "deleted": True})

    async def health(self, _: Request) -> Response:
        """Answer GET /health."""
        draining = self.is_draining()
        body = {"status": "draining" if draining else "ready", "models": [model.name for model in self._models]}
        return JSONResponse(body, 503 if draining else 200)

    async def metrics(self, _: Request) -> Response:
        """Answer GET /metrics."""
        lines = [*self._counts.lines()]
        stats = {model.name: model.engine.stats() for model in self._models}
        kinds = {"done": "counter", "failed": "counter", "cancelled": "counter", "audio_seconds": "counter",
                 "steps": "counter", "slots": "gauge", "slots_used": "gauge", "queued": "gauge", "active": "gauge",
                 "step_ms": "gauge", "memory_bytes": "gauge"}  # fmt: skip
        for name, kind in kinds.items():
            full = f"myxtts_engine_{name}" + "_total" * (kind == "counter")
            lines.append(f"# TYPE {full} {kind}")
            lines += [f'{full}{{model="{model}"}} {getattr(each, name)}' for model, each in stats.items()]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def stream(self, websocket: WebSocket) -> None:
        """Serve the WebSocket /v1/audio/stream."""
        await websocket.accept()
        await _Conversation(self, websocket, self._limits).run()


class _SpeechResponse(Response):
    """Speaks, and sends the sound as it is made. An error before the first sound becomes the answer."""

    def __init__(self, api: SpeechApi, asked: Asked, client: str, began_at: float) -> None:
        super().__init__()
        self._api, self._asked, self._client, self._began_at = api, asked, client, began_at
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        speaking = Speaking()
        speaking.warnings += self._asked.warnings
        try:
            await while_connected(receive, self._answer(speaking, send))
        except (ClientGone, asyncio.CancelledError):
            raise
        except Exception as error:
            if not self._has_begun:
                raise error_of(error) from error
            _log.warning("A speech broke off: %s", error_of(error).message)
            if self._asked.is_sse:
                await self._send_body(send, _event({"type": "error", **error_of(error).body()}), more=False)
            else:
                abort(scope)
        finally:
            speaking.cancel()

    async def _answer(self, speaking: Speaking, send: Send) -> None:
        await self._api.begin(self._asked.spoken, self._client, speaking)
        if self._asked.spoken.streams:
            await self._stream(speaking, send)
            return
        waves = [piece.wave async for piece in speaking.pieces()]
        body = await self._api.encoded(encode, np.concatenate(waves), self._asked.form)
        speaking.warnings += speaking.report.notes() if speaking.report else []
        await self._send_head(speaking, send, [(b"content-length", b"%d" % len(body))])
        await self._send_body(send, body, more=False)

    async def _stream(self, speaking: Speaking, send: Send) -> None:
        encoder = StreamEncoder(self._asked.form)
        async with aclosing(speaking.pieces()) as pieces:
            async for piece in pieces:
                if encoder.is_plain:  # sooner done than handed to a thread
                    part = encoder.push(piece.wave)
                else:
                    part = await self._api.encoded(encoder.push, piece.wave)
                if not self._has_begun:
                    self._api.heard(self._began_at)
                    await self._send_head(speaking, send)
                if part:
                    await self._send_body(send, self._framed(part))
        if not self._has_begun:
            await self._send_head(speaking, send)
        last = self._framed(await self._api.encoded(encoder.finish))
        await self._send_body(send, last + self._ending(speaking), more=False)

    def _framed(self, part: bytes) -> bytes:
        if not self._asked.is_sse or not part:
            return part
        return _event({"type": "speech.audio.delta", "audio": base64.b64encode(part).decode()})

    def _ending(self, speaking: Speaking) -> bytes:
        if not self._asked.is_sse or speaking.report is None:
            return b""
        num_in, num_out = len(self._asked.spoken.text), sum(each.num_codes for each in speaking.report.sentences)
        usage = {"input_tokens": num_in, "output_tokens": num_out, "total_tokens": num_in + num_out}
        return _event({"type": "speech.audio.done", "usage": usage, "notes": speaking.report.notes()})

    async def _send_head(
        self, speaking: Speaking, send: Send, more: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        self._has_begun = True
        media = "text/event-stream" if self._asked.is_sse else FORMATS[self._asked.form]
        facts = {"model": speaking.model, "voice": speaking.voice, "language": speaking.language}
        facts |= {"seed": str(speaking.seed), "warning": "; ".join(speaking.warnings)[:_LONGEST_WARNING]}
        headers = [(b"content-type", media.encode()), (b"cache-control", b"no-store"), *(more or [])]
        headers += [(f"x-myxtts-{name}".encode(), _header(value)) for name, value in facts.items() if value]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_body(self, send: Send, body: bytes, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})


class _Conversation:
    """One WebSocket: sentences are spoken in order, each as soon as it is complete."""

    def __init__(self, api: SpeechApi, websocket: WebSocket, limits: Limits) -> None:
        self._api, self._socket, self._limits = api, websocket, limits
        self._client = websocket.client.host if websocket.client else ""
        self._asked, self._text, self._number = Spoken("", seed=secrets.randbits(30)), "", 0
        self._begun: asyncio.Queue[tuple[str, Speaking] | None] = asyncio.Queue(_SENTENCES_AHEAD)
        self._all: set[Speaking] = set()

    async def run(self) -> None:
        """Speak until the client has said its last word or has gone."""
        work = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._send())]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_EXCEPTION)
            for task in work:
                if task.done() and task.exception() is not None:
                    raise task.exception() or ClientGone
            await self._socket.send_json({"type": "done"})
            await self._socket.close()
        except (WebSocketDisconnect, ClientGone):
            raise ClientGone from None
        except Exception as error:
            answer = error_of(error)
            await self._socket.send_json({"type": "error", **answer.body()})
            await self._socket.close(1011 if answer.status >= 500 else 1008)
        finally:
            for task in work:
                task.cancel()
            for speaking in self._all:
                speaking.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _read(self) -> None:
        while (message := await self._message()) is not None:
            match message.get("type"):
                case "start":
                    await self._start(message)
                case "text":
                    await self._add(message.get("text"))
                case "flush":
                    await self._speak_rest()
                case kind:
                    raise ApiError(400, f'"type" is {str(kind)[:40]!r}, expected start, text, flush or end.')
        await self._speak_rest()
        await self._begun.put(None)

    async def _message(self) -> dict[str, Any] | None:
        """The next message; None at the end, or when the server is shutting down."""
        ends_at = time.monotonic() + self._limits.idle_s
        while not self._api.is_draining():
            try:
                async with asyncio.timeout(1.0):
                    message = _object((await self._socket.receive_text()).encode())
                return None if message.get("type") == "end" else message
            except TimeoutError:
                if time.monotonic() > ends_at:
                    raise ApiError(408, f"No message within {self._limits.idle_s:g} s.") from None
            except KeyError:
                raise ApiError(400, "Send text messages with JSON objects.") from None
        return None

    async def _start(self, message: dict[str, Any]) -> None:
        if self._number or self._text:
            raise ApiError(400, '"start" comes before the first text.')
        fields = {name: value for name, value in message.items() if name != "type"}
        asked = Asked.read(fields | {"input": ".", "response_format": "pcm"}, self._limits)
        seed = self._asked.seed if asked.spoken.seed is None else asked.spoken.seed
        self._asked = replace(asked.spoken, text="", seed=seed)
        about = {"sample_rate": OUTPUT_SAMPLE_RATE, "seed": seed, "warnings": list(asked.warnings)}
        await self._socket.send_json({"type": "ready", **about})

    async def _add(self, text: object) -> None:
        if not isinstance(text, str) or len(text) > self._limits.most_characters:
            raise ApiError(400, f'"text" must be a string of up to {self._limits.most_characters:,} characters.')
        self._text += text
        language = self._asked.language or "en"
        complete, self._text = split_complete(self._text, language, _LONGEST_REST)
        for sentence in complete:
            await self._speak(sentence)

    async def _speak_rest(self) -> None:
        rest, self._text = self._text.strip(), ""
        if rest:
            await self._speak(rest)

    async def _speak(self, sentence: str) -> None:
        if not any(map(str.isalnum, sentence)):
            return
        seed = (self._asked.seed or 0) + self._number
        self._number += 1
        speaking = Speaking()
        self._all.add(speaking)
        await self._api.begin(replace(self._asked, text=sentence, seed=seed), self._client, speaking)
        await self._begun.put((sentence, speaking))

    async def _send(self) -> None:
        number = 0
        while (begun := await self._begun.get()) is not None:
            sentence, speaking = begun
            about = {"type": "sentence", "number": number, "text": sentence, "language": speaking.language}
            await self._socket.send_json(about | {"voice": speaking.voice, "model": speaking.model})
            if number:
                await self._socket.send_bytes(as_pcm(pause()))
            num_samples = 0
            async with aclosing(speaking.pieces()) as pieces:
                async for piece in pieces:
                    num_samples += len(piece.wave)
                    await self._socket.send_bytes(as_pcm(piece.wave))
            self._all.discard(speaking)
            notes = speaking.report.notes() if speaking.report else []
            ended = {"type": "sentence_end", "number": number, "seconds": num_samples / OUTPUT_SAMPLE_RATE}
            await self._socket.send_json(ended | {"notes": notes})
            number += 1


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
        json.dumps(found, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except (ValueError, RecursionError):
        raise ApiError(400, "The body is not JSON.", "invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, "The body must be a JSON object.", "invalid_json")
    return found


async def _form(request: Request, body: bytes) -> dict[str, Any]:
    """The fields of a form; the recording as bytes."""

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(request.headers, stream(), max_files=1, max_fields=16)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise ApiError(
            400, f"The body is not a form with a recording ({getattr(error, 'message', error)})."
        ) from None
    try:
        found = {name: value if isinstance(value, str) else await value.read() for name, value in form.items()}
    finally:
        await form.close()
    if "file" in found and "audio_sample" not in found:
        found["audio_sample"] = found["file"]
    return found


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def _header(value: str) -> bytes:
    return quote(value, safe=" !\"#$&'()*+,-./:;<=>?@[]^_`{|}~").encode()


def _about_model(model: HostedModel) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": model.created_at, "owned_by": "myxtts"}


def _about_voice(model: HostedModel, voice: Any) -> dict[str, Any]:
    about = {"id": voice.name, "object": "audio.voice", "name": voice.name, "type": "audio_sample"}
    about |= {"created_at": model.created_at, "model": model.name, "built_in": model.is_built_in(voice.name)}
    return about | {"languages": list(voice.languages), "description": voice.description}


def make_app(models: Models, limits: Limits) -> Gate:
    """The application, for `serve` and for tests."""
    counts = Counts()
    api = SpeechApi(models, limits, counts)
    routes = [
        Route("/v1/audio/speech", api.speech, methods=["POST"]),
        Route("/v1/audio/voices", api.voices, methods=["GET"]),
        Route("/v1/audio/voices", api.add_voice, methods=["POST"]),
        Route("/v1/audio/voices/{name}", api.delete_voice, methods=["DELETE"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name}", api.model),
        Route("/health", api.health),
        Route("/metrics", api.metrics),
        WebSocketRoute("/v1/audio/stream", api.stream),
    ]

    async def answer(_: Request, error: Exception) -> Response:
        return error_of(error).response()

    handlers: dict[Any, Any] = dict.fromkeys((ApiError, HTTPException, MyXTTSError, Exception), answer)
    app = Starlette(routes=routes, exception_handlers=handlers)
    paths = frozenset(route.path for route in routes if isinstance(route, Route | WebSocketRoute))
    gate = Gate(app, limits, counts, paths)
    api.is_draining = lambda: gate.is_draining
    return gate


class Page(Protocol):
    """A page on the same address as the API."""

    address: str  # with the token that opens it

    def with_api(self, gate: Gate, api_key: str) -> ASGIApp:
        """Return the application of both; requests of the page's owner need no key."""


class DrainingServer(uvicorn.Server):
    """On the first signal, running requests finish; the process then ends with code 0. The second ends it."""

    def __init__(self, gate: Gate, limits: Limits, drain_s: float, page: Page | None = None) -> None:
        protocol = type("Protocol", (TimedProtocol,), {"read_s": limits.read_s})
        app: ASGIApp = gate if page is None else page.with_api(gate, limits.api_key)
        if limits.cors:
            every = ("*",)
            app = CORSMiddleware(app, limits.cors, allow_methods=every, allow_headers=every, expose_headers=every)
        config = uvicorn.Config(
            app, log_config=None, log_level="error", access_log=False, proxy_headers=False, server_header=False,
            http=protocol, ws="websockets-sansio", ws_max_size=MOST_JSON_BYTES, ws_per_message_deflate=False,
            limit_concurrency=_MOST_CONNECTIONS, timeout_keep_alive=15, timeout_graceful_shutdown=2,
            lifespan="off",
        )  # fmt: skip
        super().__init__(config)
        self._gate, self._drain_s, self._ends_at = gate, drain_s, math.inf

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Drain, or end at once if it drains already."""
        if self._gate.is_draining:
            self.should_exit = self.force_exit = True
        else:
            self._gate.is_draining, self._ends_at = True, time.monotonic() + self._drain_s

    async def on_tick(self, counter: int) -> bool:
        """True if it is time to end; called ten times a second."""
        if self._gate.is_draining and (not self._gate.num_active or time.monotonic() > self._ends_at):
            self.should_exit = True
        return await super().on_tick(counter)


def serve(
    models: Models,
    limits: Limits,
    listener: socket.socket,
    drain_s: float,
    say: Callable[[str], None],
    page: Page | None = None,
) -> None:
    """Serve models until a signal. Outside loopback a key is required, and made if there is none."""
    host, port = listener.getsockname()[:2]
    key = limits.api_key
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{KEY_VARIABLE} must be ASCII letters, digits and signs, without spaces")
    if not key and not is_loopback(host):
        limits = replace(limits, api_key=secrets.token_urlsafe(24))
        say(f"API key (made for this start; set {KEY_VARIABLE} for one of your own): {limits.api_key}")
    names = ", ".join(model.name for model in models)
    place = f"[{host}]" if ":" in host else host
    say(f"Serving {names} on http://{place}:{port}/v1 (Ctrl-C or SIGTERM ends it)")
    if page is not None:
        say(f"The studio is open at\n  {page.address}")
    try:
        DrainingServer(make_app(models, limits), limits, drain_s, page).run(sockets=[listener])
    finally:
        models.close()
