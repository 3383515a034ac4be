"""Recordings on disk: finds files, decodes them in blocks, and writes clips. Never changes a recording.

libsndfile decodes audio; PyAV, if it is installed, decodes video and everything else. A recording may be of any
length: at most one block is in memory. Knows nothing of models, catalogs or speech.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import soundfile as sf
import soxr

from myxtts.audio import DAMAGED, EXTENSIONS, UnusableAudio, Wave, check_complete, write
from myxtts.errors import INSTALL_EXTRA, ConfigError

BLOCK_S = 60.0
SCRIPTS = (".txt", ".srt", ".vtt")
HIGHEST_RATE = 48_000  # of a clip; more is inaudible
DEMO_RATE = 24_000
LEFT, RIGHT = 0, 1
_AUDIO = (*EXTENSIONS, ".aif", ".aiff", ".au", ".caf", ".w64", ".oga", ".rf64")
_NEED_AV = (
    ".mp4", ".m4a", ".m4b", ".aac", ".mkv", ".webm", ".mov", ".avi", ".wma", ".wmv", ".amr", ".3gp", ".ac3",
    ".mpg", ".mpeg", ".ts", ".flv",
)  # fmt: skip
_LOUDEST = 16.0  # floats beyond this are not audio
_PROBES, _PROBE_S, _PROBE_FRAME_S = 12, 10.0, 0.05
_APART_DB, _LEAST_APART = 12.0, 0.1
_READ_FRAMES = 1 << 16


class Facts(NamedTuple):
    """What is known of a recording before it is decoded; seconds may be an estimate."""

    seconds: float
    sample_rate: int
    channels: int


class Block(NamedTuple):
    """Samples (frames, channels) that begin at `start` seconds."""

    start: float
    samples: Wave


class _Decoder(Protocol):
    facts: Facts

    def seek(self, frame: int) -> None: ...
    def read(self, frames: int) -> Wave: ...


def find_recordings(named: Iterable[Path], out: Path) -> list[Path]:
    """Return the files that are named, and the recordings in folders that are named, without a corpus at `out`."""
    found: dict[Path, None] = {}
    for path in named:
        if path.is_dir():
            found |= dict.fromkeys(sorted(_in_folder(path.resolve(), out.resolve())))
        elif path.exists():
            found[path.resolve()] = None
        else:
            raise ConfigError(f"{path}: no such file or folder; give recordings, or folders with recordings")
    return list(found)


def _in_folder(folder: Path, out: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        here = Path(parent)
        is_corpus = (here / "collect.db").is_file()
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and here / name != out and not (is_corpus and name == "wavs")
        ]
        for name in files:
            if Path(name).suffix.lower() in (*_AUDIO, *_NEED_AV) and not name.startswith("."):
                yield here / name


def demo_recording(folder: Path, corpus: Path) -> Path:
    """Join the clips of a corpus to one long recording in a folder, with pauses of 0.5 to 1.5 s."""
    path, random = folder / "recordings" / "demo.flac", np.random.default_rng(1)
    if not path.is_file():
        parts: list[Wave] = []
        for clip in sorted((corpus / "wavs").iterdir()):
            wave, rate = sf.read(clip, dtype="float32")
            pause = random.uniform(0.5, 1.5)
            room = 3e-4 * random.standard_normal(round(pause * DEMO_RATE))
            parts += [room.astype(np.float32), soxr.resample(wave, rate, DEMO_RATE)]
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, np.concatenate(parts), DEMO_RATE)
    return path


def script_of(recording: Path) -> Path | None:
    """Return the text of the same name next to a recording."""
    beside = (recording.with_suffix(suffix) for suffix in SCRIPTS)
    return next((path for path in beside if path.is_file() and path != recording), None)


class Recording:
    """An open recording, to be used in a `with` statement. Raises `UnusableAudio` if it is not audio."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = contextlib.ExitStack()
        self.damage, self._at = "", 0
        try:
            self._decoder = self._open()
        except BaseException:
            self._held.close()
            raise

    def _open(self) -> _Decoder:
        use_av = self.path.suffix.lower() in _NEED_AV
        try:
            check_complete(self.path)
        except UnusableAudio as error:
            if error.reason == "unknown length":
                use_av = True
            elif error.reason == DAMAGED:
                self.damage = error.detail
            else:
                raise
        if not use_av:
            try:
                return self._held.enter_context(_SoundFile(self.path))
            except (sf.LibsndfileError, RuntimeError, ValueError) as error:
                why = _why(error)
                if not find_spec("av"):
                    raise UnusableAudio(DAMAGED if self.damage else "not audio", self.damage or why) from None
        if not find_spec("av"):
            raise UnusableAudio("needs PyAV", f"{INSTALL_EXTRA.format('collect')}, then call collect again")
        return self._held.enter_context(_AvFile(self.path))

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @property
    def facts(self) -> Facts:
        """What the file promises, which may be more than is there."""
        facts, missing = self._decoder.facts, re.match(r"(\d+) of (\d+) bytes of samples", self.damage)
        promised = int(missing[2]) / max(1, int(missing[1])) if missing else 1.0
        return facts._replace(seconds=facts.seconds * promised)

    def blocks(self, start: float, seconds: float = BLOCK_S) -> Iterator[Block]:
        """Yield everything from `start` on in blocks; what cannot be decoded ends them and is said in `damage`."""
        rate = self.facts.sample_rate
        frame, size = round(start * rate), round(seconds * rate)
        while len(samples := self._samples(frame, frame + size)):
            yield Block(frame / rate, samples)
            frame += len(samples)

    def part(self, start: float, end: float) -> Wave:
        """Return the samples (frames, channels) between two times."""
        rate = self.facts.sample_rate
        return self._samples(max(0, round(start * rate)), round(end * rate))

    def _samples(self, first: int, last: int) -> Wave:
        """Return samples up to the first that cannot be decoded; `damage` says why."""
        parts = [np.zeros((0, self.facts.channels), np.float32)]
        try:
            if first != self._at:
                self._decoder.seek(first)
            self._at = first
            while self._at < last and len(part := self._decoder.read(min(_READ_FRAMES, last - self._at))):
                _check_values(part)
                parts.append(part)
                self._at += len(part)
        except (sf.LibsndfileError, RuntimeError, ValueError, OSError) as error:
            self.damage = self.damage or _why(error)
        return np.concatenate(parts)


def _why(error: Exception) -> str:
    """What an error says; str() of a LibsndfileError can itself raise."""
    said = getattr(error, "error_string", "") or getattr(error, "strerror", "")
    return str(said or (error.args[0] if error.args else type(error).__name__))


class _SoundFile:
    def __init__(self, path: Path) -> None:
        self._file = sf.SoundFile(path)
        rate = self._file.samplerate
        self.facts = Facts(self._file.frames / rate, rate, self._file.channels)

    def __enter__(self) -> _SoundFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def seek(self, frame: int) -> None:
        self._file.seek(min(frame, self._file.frames))

    def read(self, frames: int) -> Wave:
        samples: Wave = self._file.read(frames, dtype="float32", always_2d=True)
        return samples


class _AvFile:
    def __init__(self, path: Path) -> None:
        import av

        self._path = path
        self._av: Any = av
        try:
            self._container: Any = av.open(str(path))
        except (av.FFmpegError, OSError) as error:
            raise UnusableAudio("not audio", getattr(error, "strerror", "") or str(error)) from None
        if not self._container.streams.audio:
            self._container.close()
            raise UnusableAudio("not audio", "the file has no audio track")
        context = self._container.streams.audio[0].codec_context
        if not context.sample_rate:  # text that is named like audio
            self._container.close()
            raise UnusableAudio("not audio", "the audio track has no sample rate")
        seconds = (self._container.duration or 0) / av.time_base
        self.facts = Facts(seconds, context.sample_rate, context.channels or 1)
        self._frames = self._decoded()
        self._rest: list[Wave] = []
        self._at = 0

    def __enter__(self) -> _AvFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._container.close()

    def _decoded(self) -> Iterator[Wave]:
        layout = "mono" if self.facts.channels == 1 else "stereo"
        resampler = self._av.AudioResampler(format="fltp", layout=layout, rate=self.facts.sample_rate)
        try:
            for frame in self._container.decode(audio=0):
                yield from (part.to_ndarray().T for part in resampler.resample(frame))
            yield from (part.to_ndarray().T for part in resampler.resample(None))
        except self._av.FFmpegError as error:
            raise OSError(0, error.strerror or str(error)) from None

    def seek(self, frame: int) -> None:
        """Decode up to a frame: containers find only the nearest packet."""
        if frame < self._at:
            self._container.close()
            self._container = self._av.open(str(self._path))
            self._frames, self._rest, self._at = self._decoded(), [], 0
        while frame > self._at and len(self.read(min(frame - self._at, _READ_FRAMES))):
            pass

    def read(self, frames: int) -> Wave:
        parts, missing = self._rest, frames - sum(map(len, self._rest))
        while missing > 0 and (part := next(self._frames, None)) is not None:
            parts.append(part)
            missing -= len(part)
        samples = np.concatenate(parts) if parts else np.zeros((0, self.facts.channels), np.float32)
        self._rest = [samples[frames:]] if len(samples) > frames else []
        self._at += min(frames, len(samples))
        return samples[:frames]


def _check_values(samples: Wave) -> None:
    if not np.isfinite(samples).all():
        raise ValueError("the samples contain NaN or infinity")
    if float(np.abs(samples).max(initial=0.0)) > _LOUDEST:
        raise ValueError("the samples are far beyond full scale")


def has_speaker_per_channel(path: Path) -> bool:
    """True if the two channels of a recording take turns, as in a recorded phone call; looks at a dozen places."""
    with Recording(path) as recording:
        facts = recording.facts
        if facts.channels != 2:
            return False
        starts = np.linspace(0, max(0.0, facts.seconds - _PROBE_S), _PROBES)
        parts = [recording.part(start, start + _PROBE_S) for start in np.unique(starts)]
    size = max(1, round(_PROBE_FRAME_S * facts.sample_rate))
    power = np.concatenate(
        [np.square(part[: len(part) // size * size]).reshape(-1, size, 2).mean(1) for part in parts]
    )
    levels = 10 * np.log10(power + 1e-10)
    active = levels[levels.max(1) > levels.max(initial=-100.0) - 35]
    difference = active[:, LEFT] - active[:, RIGHT]
    shares = [(difference > _APART_DB).mean(), (difference < -_APART_DB).mean()] if len(active) else [0.0]
    return bool(min(shares) >= _LEAST_APART)


def mono(samples: Wave, channel: int | None) -> Wave:
    """Return one channel, or the mean of all."""
    wave: Wave = samples[:, channel] if channel is not None else samples.mean(1, dtype=np.float32)
    return wave


def clip_name(path: str, source: int, channel: int, start: float, end: float) -> str:
    """The file name of a clip: the same for the same part of the same recording."""
    stem = re.sub(r"[^\w-]+", "_", Path(path).stem)[:40].strip("_") or "clip"
    side = f"c{channel}-" if channel else ""
    return f"{stem}-{source:04d}-{side}{round(start * 1000):08d}-{round(end * 1000):08d}.flac"


def save_clip(path: Path, wave: Wave, rate: int, gain_db: float) -> None:
    """Write a clip as mono FLAC of 16 bits."""
    if rate > HIGHEST_RATE:
        wave, rate = soxr.resample(wave, rate, HIGHEST_RATE), HIGHEST_RATE
    write(path, wave * np.float32(10 ** (gain_db / 20)), rate)


def cut_clip(folder: Path, source: Any, channel: int, start: float, end: float, gain_db: float) -> str:
    """Cut a part of a recording into wavs/ of a corpus folder; returns the file name."""
    path, name = Path(source.path), clip_name(source.path, source.id, channel, start, end)
    if (about := path.stat()) and (about.st_size, about.st_mtime_ns) != (source.size, source.mtime_ns):
        raise UnusableAudio("another file", "the recording has changed since it was collected")
    with Recording(path) as recording:
        wave = mono(recording.part(start, end), channel if source.channels > 1 else None)
        if len(wave) < int((end - start) * recording.facts.sample_rate) - 1:
            raise UnusableAudio(DAMAGED, f"{len(wave)} samples could be read for {end - start:.3f} s")
        save_clip(folder / "wavs" / name, wave, recording.facts.sample_rate, gain_db)
    return name
