"""What the server speaks with: models by name with their voices, the pieces of a speech, and audio formats.

Names of models and voices come from the network, paths never do. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import secrets
import struct
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
import torch

from myxtts import config
from myxtts.audio import Wave, as_pcm
from myxtts.errors import ConfigError, DatasetError, PipelineError
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.synthesis.engine import QUEUE_LIMIT, Deliver, End, Engine, QueueFull, Request, Ticket
from myxtts.synthesis.markup import Markup, Segment
from myxtts.synthesis.narration import merged, silence_after
from myxtts.synthesis.scheduler import CHUNK_CODES, Piece
from myxtts.synthesis.synthesizer import Report, Synthesizer, load_synthesizer
from myxtts.synthesis.text import UnspeakableText
from myxtts.synthesis.voices import Voice, VoiceLibrary, mixed
from myxtts.text.language import language_of

FORMATS = {
    "mp3": "audio/mpeg", "opus": "audio/ogg", "flac": "audio/flac", "wav": "audio/wav", "pcm": "audio/pcm"
}  # fmt: skip
"""Names of OpenAI's API and media types. Its `aac` is missing: libsndfile does not write it."""
OPENAI_MODELS = {"tts-1", "tts-1-hd", "gpt-4o-mini-tts"}
OPENAI_VOICES = (
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer",
    "verse",
)  # fmt: skip
"""Clients send these unless told otherwise, so each is spoken by one of ours, with a warning."""
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "repetition_penalty", "guidance", "central")
_SOUNDFILE: dict[str, dict[str, Any]] = {
    "mp3": {"format": "MP3", "bitrate_mode": "CONSTANT", "compression_level": 0.4},  # 96 kbit/s
    "opus": {"format": "OGG", "subtype": "OPUS"},
    "flac": {"format": "FLAC", "subtype": "PCM_16"},
    "wav": {"format": "WAV", "subtype": "PCM_16"},
}
"""A streamed MP3 has no length in its header. Players compute it from the bitrate, which must be constant."""
_OGG_PAGE_LATENCY, _OGG_PAGE_MS = 0x1302, 100.0  # a command of libsndfile; its usual pages hold a second
_UNKNOWN_LENGTH = 0xFFFF_FFFF  # in a WAV header: until the data ends
_MODEL_NAME = re.compile(r"[\w][\w .-]{0,99}")
_FEW_NAMES = 8
MOST_MIXED = 16


class UnknownName(ConfigError):
    """A model or a voice that there is not; `code` is what OpenAI's clients call it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NameTaken(ConfigError):
    """A voice of that name exists."""


@dataclass(frozen=True)
class Spoken:
    """What a client asks for, checked in form."""

    text: str
    model: str = ""
    voice: str = ""
    language: str = ""
    speed: float = 1.0
    seed: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)  # values of `SAMPLING_FIELDS`
    streams: bool = True
    is_markup: bool = False  # the text is SSML


class Part(NamedTuple):
    """A part of what is said: how it is submitted, None for a part without words, and the silence after it."""

    submit: Callable[[Deliver], Ticket] | None
    pause_s: float


class Speaking:
    """The pieces of one request, which arrive from the engine's thread, for a task of the event loop.

    SSML has several parts, each a request to the engine, submitted when the part before it has been spoken.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Piece | End] = asyncio.Queue()
        self._ticket: Ticket | None = None
        self._is_cancelled = False
        self._parts: Sequence[Part] = ()
        self.report: Report | None = None
        self.model = self.voice = self.language = ""
        self.seed = 0
        self.warnings: list[str] = []

    def begin(self, parts: Sequence[Part]) -> None:
        """Submit the first part, in a worker thread; it is cancelled at once if its client has already gone."""
        self._parts = parts
        self._submit(parts[0])

    def _submit(self, part: Part) -> None:
        if part.submit is None:
            self._deliver(End())
            return
        self._ticket = part.submit(self._deliver)
        if self._is_cancelled:
            self._ticket.cancel()

    async def _submit_next(self, part: Part) -> None:
        """Submit a later part; the request was accepted, so it waits if the queue is full now."""
        while not self._is_cancelled:
            try:
                await asyncio.to_thread(self._submit, part)
            except QueueFull as error:
                await asyncio.sleep(min(error.retry_after_s, 1.0))
            else:
                return
        self._deliver(End())

    def cancel(self) -> None:
        """Free what the request holds; harmless after its end."""
        self._is_cancelled = True
        if self._ticket is not None:
            self._ticket.cancel()

    def _deliver(self, arrived: Piece | End) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody listens
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, arrived)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Every piece as it arrives; raises the error that ended the request."""
        reports: list[Report] = []
        for number, part in enumerate(self._parts):
            if number:
                await self._submit_next(part)
            while isinstance(arrived := await self._arrived.get(), Piece):
                yield arrived
            if arrived.error is not None:
                raise arrived.error
            reports += [arrived.report] if arrived.report else []
            if silence := round(part.pause_s * OUTPUT_SAMPLE_RATE):
                yield Piece(np.zeros(silence, np.float32), 0, True)
        self.report = merged(reports) if reports else None


class HostedModel:
    """A model that is served, with its engine and its voices. Every method may be called by any thread."""

    def __init__(
        self,
        name: str,
        synthesizer: Synthesizer,
        library: VoiceLibrary,
        slots: int | None = None,
        queue_limit: int = QUEUE_LIMIT,
    ) -> None:
        self.name, self.created_at = name, int(time.time())
        self._synthesizer, self._library = synthesizer, library
        self._built_in = library.built_in()
        self._read: dict[str, tuple[int, Voice]] = {}
        self.engine = Engine(synthesizer, slots=slots, queue_limit=queue_limit)

    def submit(self, asked: Spoken, client: str, speaking: Speaking) -> None:
        """Begin to speak; raises an error if the text, the voice or a value cannot be used."""
        synthesizer = self._synthesizer
        markup = Markup(asked.text) if asked.is_markup else None
        text = markup.text if markup else asked.text
        language = asked.language or (markup.language if markup else "")
        try:
            language = language or language_of(text, synthesizer.languages)
        except DatasetError:
            problem = f"The language of {text.strip()[:40]!r} cannot be recognised"
            raise ConfigError(f'{problem}. Is there anything to say? If so, name it with "language".') from None
        voice, warning = self._voice(asked.voice, language)
        sampling = replace(synthesizer.sampling, **asked.sampling)
        seed = secrets.randbits(31) if asked.seed is None else asked.seed
        usual = Request(text, voice, language, asked.speed, seed, sampling, client)
        usual = replace(usual, chunk_codes=CHUNK_CODES if asked.streams else None)
        speaking.seed = seed
        speaking.model, speaking.voice, speaking.language = self.name, voice.name, language
        speaking.warnings += [warning] * bool(warning)
        segments = markup.segments(language) if markup else [Segment(text, language, 1.0, 0.0)]
        speaking.begin(self._parts(segments, usual, is_checked=markup is not None))

    def _parts(self, segments: Sequence[Segment], usual: Request, is_checked: bool) -> list[Part]:
        """Parts to submit; with `is_checked`, an error in any of them is raised before the first is spoken."""
        parts: list[Part] = []
        for segment in segments:
            speed = usual.speed * segment.rate
            request = replace(usual, text=segment.text, language=segment.language, speed=speed)
            if is_checked and segment.text:
                self.engine.check(request)
            submit = partial(self.engine.submit, request) if segment.text else None
            parts.append(Part(submit, silence_after(segment)))
        if not any(part.submit for part in parts):
            raise UnspeakableText("There is nothing to say: the text has only silence.")
        return parts

    def voices(self) -> list[Voice]:
        """All voices that this model can speak with, the built-in ones first."""
        found = []
        for name in self._names():
            with contextlib.suppress(ConfigError):  # of other weights, damaged, or deleted meanwhile
                found.append(self._named(name))
        return found

    def is_built_in(self, name: str) -> bool:
        return name in self._built_in and not self._library.path(name).is_file()

    def add_voice(
        self, name: str, recording: bytes, languages: Sequence[str] = (), description: str = ""
    ) -> Voice:
        """Save the voice of a recording under a new name."""
        self._require_new(name)
        suffix = ".mp3" if recording[:3] == b"ID3" or recording[:1] == b"\xff" else ".audio"
        with tempfile.TemporaryDirectory(prefix="myxtts-") as folder:
            path = Path(folder) / f"recording{suffix}"
            path.write_bytes(recording)
            try:
                voice = self.engine.voice([path], name)
            except DatasetError as error:
                raise ConfigError(str(error).replace(f"{path}: ", "")) from None
        return self._saved(replace(voice, languages=tuple(languages), description=description))

    def mix_voices(self, name: str, weights: Mapping[str, float]) -> Voice:
        """Save the weighted mean of voices under a new name."""
        self._require_new(name)
        if not 0 < len(weights) <= MOST_MIXED or not all(0 < weight <= 1e6 for weight in weights.values()):
            example = 'with weights above 0, such as {"anna": 0.7, "ben": 0.3}'
            raise ConfigError(f'"mix" must name up to {MOST_MIXED} voices {example}.')
        parts = [(self._named(each), weight) for each, weight in weights.items()]
        return self._saved(mixed(name, parts, self._synthesizer.fingerprint))

    def delete_voice(self, name: str) -> None:
        """Delete a saved voice; what is being spoken with it goes on."""
        if self.is_built_in(name):
            raise ConfigError(f"The voice {name!r} is built into the model and cannot be deleted.")
        if not self._library.delete(name):
            raise self._unknown(name)
        self._read.pop(name, None)

    def _require_new(self, name: str) -> None:
        if self._library.path(name).is_file() or name in self._built_in:
            raise NameTaken(f"There is a voice {name!r} already; choose another name, or delete that one first.")

    def _saved(self, voice: Voice) -> Voice:
        try:
            self._library.save(voice)
        except OSError as error:
            raise PipelineError(f"The voice cannot be saved: {error.strerror}.") from error
        return voice

    def _voice(self, name: str, language: str) -> tuple[Voice, str]:
        """The voice of that name, and a warning if another one speaks for it."""
        built_in = list(self._built_in.values())
        if not name and not built_in:
            raise ConfigError('This model has no built-in voice; name one with "voice" (GET /v1/audio/voices).')
        candidates = [voice for voice in built_in if language in voice.languages] or built_in
        if not name:
            return candidates[0], ""
        with contextlib.suppress(UnknownName):
            return self._named(name), ""
        if name not in OPENAI_VOICES or not candidates:
            raise self._unknown(name)
        voice = candidates[OPENAI_VOICES.index(name) % len(candidates)]
        return voice, f"the voice {name} is OpenAI's; {voice.name} speaks"

    def _named(self, name: str) -> Voice:
        """A voice by its name; a saved one is read again only if its file has changed."""
        path = self._library.path(name)
        try:
            written_at = path.stat().st_mtime_ns
        except FileNotFoundError:
            if name in self._built_in:
                return self._built_in[name]
            raise self._unknown(name) from None
        known = self._read.get(name)
        if known is None or known[0] != written_at:
            try:
                known = written_at, self._library.load(name, self._synthesizer.fingerprint)
            except (DatasetError, ConfigError, OSError):
                if not path.is_file():
                    raise self._unknown(name) from None
                raise ConfigError(f"The voice {name!r} is damaged or of other weights; make it again.") from None
            self._read[name] = known
        return known[1]

    def _names(self) -> list[str]:
        saved = sorted(path.stem for path in self._library.folder.glob("*.safetensors"))
        return [*dict.fromkeys([*self._built_in, *saved])]

    def _unknown(self, name: str) -> UnknownName:
        names = self._names()
        some = ", ".join(names[:_FEW_NAMES]) + (", …" if len(names) > _FEW_NAMES else "")
        return UnknownName("voice_not_found", f"There is no voice {name[:60]!r}. There are: {some or 'none yet'}.")


class Models:
    """The models of a server; the first one is the default."""

    def __init__(self, models: Sequence[HostedModel]) -> None:
        self._models = {model.name: model for model in models}
        self.default = models[0]

    def __iter__(self) -> Any:
        return iter(self._models.values())

    def named(self, name: str) -> tuple[HostedModel, str]:
        """The model of that name, or the default one with a warning if the name is OpenAI's."""
        if name in self._models or not name:
            return self._models.get(name, self.default), ""
        if name in OPENAI_MODELS or name.startswith("gpt-4o-mini-tts-"):
            return self.default, f"the model {name} is OpenAI's; {self.default.name} speaks"
        names = ", ".join(self._models)
        raise UnknownName("model_not_found", f"There is no model {name[:60]!r}. There are: {names}.")

    def add(self, model: HostedModel) -> None:
        """Serve one more model; one that had its name ends when it has spoken what it was asked for."""
        before, self._models = self._models.get(model.name), {**self._models, model.name: model}
        if before is not None:
            self.default = model if before is self.default else self.default
            before.engine.close()

    def close(self) -> None:
        """End all engines; what is still being spoken is cancelled."""
        for model in self:
            model.engine.close(drain=False)


def load_models(
    folders: Mapping[str, Path],
    device: torch.device | str | None = None,
    slots: int | None = None,
    queue_limit: int = QUEUE_LIMIT,
) -> Models:
    """Load models to be served under these names."""
    return Models([load_model(name, folder, device, slots, queue_limit) for name, folder in folders.items()])


def load_model(
    name: str,
    folder: Path,
    device: torch.device | str | None = None,
    slots: int | None = None,
    queue_limit: int = QUEUE_LIMIT,
) -> HostedModel:
    """Load a model to be served under this name."""
    synthesizer = load_synthesizer(folder, device=device)
    language_of("The first text would otherwise wait for the tables.", synthesizer.languages)
    return HostedModel(name, synthesizer, VoiceLibrary(folder), slots, queue_limit)


def names_of(folders: Sequence[Path]) -> dict[str, Path]:
    """Each model folder by the last part of its path, under which clients know it."""
    named: dict[str, Path] = {}
    for folder in folders:
        name = "base" if folder == config.BASE_FOLDER else folder.resolve().name
        if not _MODEL_NAME.fullmatch(name):
            raise ConfigError(
                f"--model {folder}: the folder's name is the model's for clients; use letters, digits, .-_"
            )
        if name in named:
            raise ConfigError(f"--model {folder}: {named[name]} has the same name; rename one of the two folders")
        named[name] = folder
    return named


def encode(wave: Wave, form: str) -> bytes:
    """A whole file in one of `FORMATS`."""
    if form == "pcm":
        return as_pcm(wave)
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", OUTPUT_SAMPLE_RATE, 1, **_SOUNDFILE[form]) as sound:
        sound.write(np.clip(wave, -1.0, 1.0))
    return file.getvalue()


class StreamEncoder:
    """A file in one of `FORMATS`, written while its sound arrives; so its header does not know the length."""

    def __init__(self, form: str) -> None:
        self._sink = _Sink()
        self._sound: soundfile.SoundFile | None = None
        if form == "wav":
            riff = (b"RIFF", _UNKNOWN_LENGTH, b"WAVE", b"fmt ", 16, 1, 1)
            sound = (OUTPUT_SAMPLE_RATE, 2 * OUTPUT_SAMPLE_RATE, 2, 16, b"data", _UNKNOWN_LENGTH)
            self._sink.write(struct.pack("<4sI4s4sIHHIIHH4sI", *riff, *sound))
        elif form != "pcm":
            self._sound = soundfile.SoundFile(self._sink, "w", OUTPUT_SAMPLE_RATE, 1, **_SOUNDFILE[form])
        if form == "opus":
            _set_page_latency(self._sound)

    @property
    def is_plain(self) -> bool:
        """True if the samples are only copied."""
        return self._sound is None

    def push(self, wave: Wave) -> bytes:
        """The next bytes, which may be none."""
        if self._sound is None:
            self._sink.write(as_pcm(wave))
        else:
            self._sound.write(np.clip(wave, -1.0, 1.0))
        return self._sink.take()

    def finish(self) -> bytes:
        """The last bytes."""
        if self._sound is not None:
            self._sound.close()
        return self._sink.take()


class _Sink(io.RawIOBase):
    """A file whose bytes are taken as they are written; writes to an earlier place are dropped."""

    def __init__(self) -> None:
        self._fresh, self._size, self._at = bytearray(), 0, 0

    def write(self, data: Any) -> int:
        if self._at == self._size:
            self._fresh += data
            self._size += len(data)
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def take(self) -> bytes:
        fresh, self._fresh = bytes(self._fresh), bytearray()
        return fresh


def _set_page_latency(sound: Any) -> None:
    """Ask for short Ogg pages: sound is heard earlier. The binding has no public name for it."""
    with contextlib.suppress(AttributeError):
        value = soundfile._ffi.new("double*", _OGG_PAGE_MS)
        soundfile._snd.sf_command(sound._file, _OGG_PAGE_LATENCY, value, 8)
