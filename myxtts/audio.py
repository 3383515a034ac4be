"""Reads and writes audio files: decode, mix to mono, resample, trim. CPU and numpy only.

Every unusable file raises `UnusableAudio` with a `reason` (a fixed phrase, for counting) and a `detail` (what was
found). Knows nothing of corpora, caches or models.
"""

from __future__ import annotations

import io
import math
import mmap
import stat
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import soundfile as sf
import soxr

from myxtts.files import write_atomically

Pcm = npt.NDArray[np.int16]
Wave = npt.NDArray[np.float32]

EXTENSIONS = (".wav", ".flac", ".mp3", ".ogg", ".opus")
DECODE_VERSION = 2
"""Part of every audio cache key: raise it if a file would decode to other samples, be rejected, or be accepted."""
ROUNDED_S = 0.05  # a manifest may name so much more than a file has: durations are rounded there
OPUS_RATE = 24_000  # Opus knows few rates
SILENCE = 100  # loudest sample of a silent recording, of 32768

LIBRARIES = f"libsndfile {sf.__libsndfile_version__}, soxr {soxr.__version__}"
"""The decoder and resampler, also part of every audio cache key."""
DAMAGED = "truncated or damaged"

_OGG_PAGE_MAX = 65_307
_BITRATES = (
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0),
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0),
)
"""kbit/s of layer III by the index in a frame header, for MPEG 2 and 2.5 and for MPEG 1."""
_LOUDEST = 16.0  # the most that a recording in floats plausibly reaches; values above 1 are clipped


class UnusableAudio(Exception):
    """A file that cannot become a clip: `reason` for counting, `detail` for the list."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def decode(
    source: Path | bytes,
    sample_rate: int,
    max_seconds: float,
    trim_silence_db: float = 0.0,
    start: float = 0.0,
    duration: float | None = None,
) -> Pcm:
    """Return a whole file, or a piece in seconds, as mono int16 at `sample_rate`.

    `source` is a path or the content of a file. At most `max_seconds` are read into memory.
    """
    is_piece = start > 0 or duration is not None
    if not is_piece:  # for a piece it is enough that its own samples are there
        check_complete(source)
    elif isinstance(source, Path):
        _require_regular(source)
    problem = "not audio"
    try:
        with sf.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else source) as file:
            problem = DAMAGED
            rate, frames, limit = file.samplerate, file.frames, math.floor(max_seconds * file.samplerate)
            first = min(round(start * rate), frames)
            left = frames - first
            expected = left if duration is None else round(duration * rate)
            if 0 < left < expected <= left + ROUNDED_S * rate:
                expected = left
            if first:
                file.seek(first)
            already_right = rate == sample_rate and file.channels == 1 and file.subtype == "PCM_16"
            wanted = limit + 1 if duration is None else min(expected, limit + 1)
            samples = file.read(frames=wanted, dtype="int16" if already_right else "float32", always_2d=True)
    except (sf.LibsndfileError, RuntimeError, ValueError) as error:
        # str() of a LibsndfileError can itself raise.
        raise UnusableAudio(problem, str(getattr(error, "error_string", "") or type(error).__name__)) from None
    if len(samples) > limit:
        seconds = max(expected, len(samples)) / rate
        raise UnusableAudio("too long", f"{seconds:.2f} s, the limit is {max_seconds:.2f} s")
    if len(samples) < expected and duration is not None and (end := first + len(samples)) >= frames:
        named = f"the manifest names {start:g} to {start + duration:g} s"
        raise UnusableAudio("shorter than named", f"{named}, the audio ends at {end / rate:g} s")
    if len(samples) < expected:
        raise UnusableAudio(DAMAGED, f"{len(samples)} of {expected} samples could be decoded")
    if len(samples) == 0:
        raise UnusableAudio("no samples", "the file is valid but holds no audio")
    pcm = samples[:, 0] if already_right else _to_pcm(samples, rate, sample_rate)
    return trim_silence(pcm, sample_rate, trim_silence_db) if trim_silence_db > 0 else pcm


def is_silent(pcm: Pcm) -> bool:
    """True if nothing is audible, whatever the DC offset."""
    return len(pcm) == 0 or int(pcm.max()) - int(pcm.min()) < 2 * SILENCE


def refuse_silence(pcm: Pcm) -> None:
    if is_silent(pcm):
        raise UnusableAudio("silent", f"its samples stay within {SILENCE} of 32768")


def trim_silence(pcm: Pcm, sample_rate: int, below_db: float) -> Pcm:
    """Cut ends that are more than `below_db` below the loudest 20 ms, with a margin of 50 ms."""
    window = max(1, sample_rate // 50)
    whole = pcm[: len(pcm) // window * window].astype(np.float32)
    power = np.square(whole).reshape(-1, window).mean(axis=1)
    loud = np.flatnonzero(power > power.max(initial=0) * 10 ** (-below_db / 10))
    if len(loud) == 0:
        return pcm
    margin = sample_rate // 20
    return pcm[max(0, loud[0] * window - margin) : (loud[-1] + 1) * window + margin]


def write(path: Path, wave: Wave, sample_rate: int) -> None:
    """Write a mono float wave in the format of the file's extension, completely or not at all.

    It is 16-bit PCM, or Opus at 24 kHz.
    """
    form, subtype = path.suffix[1:], "PCM_16"
    if form == "opus":
        wave, sample_rate = soxr.resample(wave, sample_rate, OPUS_RATE), OPUS_RATE
        form, subtype = "ogg", "OPUS"
    content = io.BytesIO()  # libsndfile would hide why a file cannot be written
    sf.write(content, np.clip(wave, -1.0, 1.0), sample_rate, subtype=subtype, format=form)
    write_atomically(path, lambda file: file.write_bytes(content.getbuffer()))


def as_pcm(wave: Wave) -> bytes:
    """Samples as signed 16-bit integers, little-endian."""
    return bytes(np.rint(np.clip(wave, -1.0, 1.0) * 32767.0).astype("<i2").tobytes())


def _to_pcm(samples: Wave, rate: int, sample_rate: int) -> Pcm:
    if not np.isfinite(samples).all():
        raise UnusableAudio("not audio", "the samples contain NaN or infinity")
    loudest = float(np.abs(samples).max())
    if loudest > _LOUDEST:  # integers stored as floats: clipping would turn them into noise
        raise UnusableAudio("not audio", f"the samples reach {loudest:.6g}, where full scale is 1")
    wave = samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1, dtype=np.float32)
    if rate != sample_rate:
        wave = soxr.resample(wave, rate, sample_rate, quality="HQ")
    pcm: Pcm = np.clip(np.rint(wave * 32768.0), -32768, 32767).astype(np.int16)
    return pcm


def check_complete(source: Path | bytes) -> None:
    """Raise if the file is not all there: libsndfile silently accepts a truncated WAV or Ogg."""
    if isinstance(source, Path):
        _require_regular(source)
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
            head = file.read(26)
            size = file.seek(0, 2)
            if size == 0:
                raise UnusableAudio("empty file", "0 bytes")
            if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
                _check_riff(file, size)
            elif head[:4] == b"OggS":
                _check_ogg(file, size)
            elif head[:4] == b"fLaC":
                # Encoders that write to a pipe leave the length at 0; libsndfile cannot read that.
                if len(head) == 26 and int.from_bytes(head[21:], "big") & 0xF_FFFF_FFFF == 0:
                    raise UnusableAudio("unknown length", "the FLAC header names no length; encode it again")
            elif isinstance(source, bytes):
                if head[:3] == b"ID3" or (head[0] == 0xFF and head[1:2] >= b"\xe0"):
                    _check_mpeg(file, size)
            elif source.suffix.lower() == ".mp3":
                _check_mpeg(file, size)
    except OSError as error:
        raise UnusableAudio("unreadable file", error.strerror or str(error)) from None


def _require_regular(path: Path) -> None:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe or a device could wait forever
            raise UnusableAudio("unreadable file", "not a regular file")
    except FileNotFoundError:
        raise UnusableAudio("missing file", str(path)) from None
    except OSError as error:
        raise UnusableAudio("unreadable file", error.strerror or str(error)) from None


def _check_riff(file: BinaryIO, size: int) -> None:
    position = 12
    while position + 8 <= size:
        file.seek(position)
        header = file.read(8)
        position += 8
        length = int.from_bytes(header[4:], "little")
        if header[:4] == b"data":
            # Programs that write to a pipe leave a huge value here: the length is unknown.
            if length < 0x7FFF_0000 and position + length > size:
                raise UnusableAudio(DAMAGED, f"{size - position} of {length} bytes of samples are there")
            return
        position += length + length % 2
    raise UnusableAudio(DAMAGED, "the file ends before its samples begin")


def _check_ogg(file: BinaryIO, size: int) -> None:
    file.seek(max(0, size - _OGG_PAGE_MAX))
    tail = file.read()
    page = tail[tail.rfind(b"OggS") :] if b"OggS" in tail else b""
    num_segments = page[26] if len(page) > 26 else 256
    segments = page[27 : 27 + num_segments]
    if len(segments) < num_segments or 27 + num_segments + sum(segments) > len(page):
        raise UnusableAudio(DAMAGED, "the last Ogg page is cut")
    if not page[5] & 4:  # the flag of the last page
        raise UnusableAudio(DAMAGED, "the Ogg stream has no last page")


def _check_mpeg(file: BinaryIO, size: int) -> None:
    """Compare the length in the first frame, which common encoders write, with the file."""
    file.seek(0)
    head = file.read(10)
    tag_bytes = 0
    if head[:3] == b"ID3" and len(head) == 10:
        tag_bytes = 10 + sum(byte << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
    file.seek(tag_bytes)
    start = file.read(4096).lstrip(b"\0")
    if len(start) < 2 or start[0] != 0xFF or start[1] & 0xE0 != 0xE0:
        # libmpg123 would search the whole file for a frame and print errors to stderr.
        raise UnusableAudio("not audio", "no MPEG audio at the start of the file")
    places = [at for tag in (b"Xing", b"Info") if 0 <= (at := start.find(tag)) <= len(start) - 16]
    if places:
        flags, promised = (int.from_bytes(start[places[0] + at : places[0] + at + 4], "big") for at in (4, 12))
        if flags & 3 == 3 and promised > size - tag_bytes:
            raise UnusableAudio(DAMAGED, f"{size - tag_bytes} of {promised} bytes are there")
    elif b"VBRI" not in start:
        if isinstance(file, io.BytesIO):
            _check_constant_bitrate(file.getvalue(), tag_bytes)
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:  # it may be hours long
            _check_constant_bitrate(content, tag_bytes)


def _check_constant_bitrate(content: mmap.mmap | bytes, position: int) -> None:
    """Raise if the bitrate varies: libsndfile computes the length from the bitrate of the first frame."""
    bitrates = set()
    while position + 4 <= len(content) and content[position] == 0xFF:
        frame_bytes, bitrate = _mpeg_frame(content[position : position + 4])
        if not frame_bytes:
            break
        bitrates.add(bitrate)
        position += frame_bytes
    if len(bitrates) > 1:
        raise UnusableAudio("unknown length", "the bitrate varies and the MP3 header has no length; re-encode it")


def _mpeg_frame(header: bytes) -> tuple[int, int]:
    """Return size in bytes and bitrate in kbit/s of a layer III frame; zeros if it is not one."""
    version, layer = header[1] >> 3 & 3, header[1] >> 1 & 3
    if version == 1 or layer != 1 or header[1] & 0xE0 != 0xE0:
        return 0, 0
    bitrate = _BITRATES[version == 3][header[2] >> 4]
    rate = (44100, 48000, 32000, 0)[header[2] >> 2 & 3] >> {3: 0, 2: 1, 0: 2}[version]
    if not rate or not bitrate:
        return 0, 0
    padding = header[2] >> 1 & 1
    return (144 if version == 3 else 72) * bitrate * 1000 // rate + padding, bitrate
