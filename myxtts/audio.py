"""Audio files in and out: decode, mix to mono, resample, trim, write. CPU and numpy only.

Knows nothing of corpora, caches or models. Every way a file can be unusable becomes an `UnusableAudio` whose
`reason` is a fixed phrase (it is counted in tables) and whose `detail` names what was found.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile as sf
import soxr

Pcm = npt.NDArray[np.int16]
Wave = npt.NDArray[np.float32]

EXTENSIONS = (".wav", ".flac", ".mp3", ".ogg", ".opus")
DECODE_VERSION = 2
"""Part of every audio cache key: raise it when the same file would decode to other samples, or become a clip
where it was none or the other way round."""
SILENCE = 100
"""Loudest sample of a silent recording, of 32768."""

LIBRARIES = f"libsndfile {sf.__libsndfile_version__}, soxr {soxr.__version__}"
"""What decodes and resamples: also part of every audio cache key."""
DAMAGED = "truncated or damaged"

_OGG_PAGE_MAX = 65_307
_BITRATES = (
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0),
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0),
)
"""kbit/s by the number in a frame of MPEG 2 and 2.5, and of MPEG 1, layer III."""
_LOUDEST = 16.0
"""Samples that a recording in floats can plausibly reach; above 1 they are clipped."""


class UnusableAudio(Exception):
    """A file that cannot become a clip: `reason` for the table, `detail` for the list."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def decode(path: Path, sample_rate: int, max_seconds: float, trim_silence_db: float = 0.0) -> Pcm:
    """The whole file as mono int16 at `sample_rate`; reads no more than `max_seconds` of it into memory."""
    _check_complete(path)
    try:
        file = sf.SoundFile(path)
    except (sf.LibsndfileError, RuntimeError, ValueError) as error:
        raise UnusableAudio("not audio", _library_message(error)) from None
    try:
        with file:
            limit = math.floor(max_seconds * file.samplerate)
            header_frames = file.frames
            already_right = file.samplerate == sample_rate and file.channels == 1 and file.subtype == "PCM_16"
            samples = file.read(frames=limit + 1, dtype="int16" if already_right else "float32", always_2d=True)
            rate = file.samplerate
    except (sf.LibsndfileError, RuntimeError, ValueError) as error:
        raise UnusableAudio(DAMAGED, _library_message(error)) from None
    if len(samples) > limit:
        seconds = max(header_frames, len(samples)) / rate
        raise UnusableAudio("too long", f"{seconds:.2f} s, the limit is {max_seconds:.2f} s")
    if len(samples) < header_frames:
        raise UnusableAudio(DAMAGED, f"{len(samples)} of {header_frames} samples could be decoded")
    if len(samples) == 0:
        raise UnusableAudio("no samples", "the file is valid but holds no audio")
    pcm = samples[:, 0] if already_right else _to_pcm(samples, rate, sample_rate)
    return trim_silence(pcm, sample_rate, trim_silence_db) if trim_silence_db > 0 else pcm


def is_silent(pcm: Pcm) -> bool:
    """Whether nobody would hear anything, wherever the middle of the samples lies."""
    return len(pcm) == 0 or int(pcm.max()) - int(pcm.min()) < 2 * SILENCE


def trim_silence(pcm: Pcm, sample_rate: int, below_db: float) -> Pcm:
    """Without the ends that are more than `below_db` under the loudest 20 ms; keeps 50 ms margins."""
    window = max(1, sample_rate // 50)
    num_windows = len(pcm) // window
    if num_windows == 0:
        return pcm
    power = np.square(pcm[: num_windows * window].astype(np.float32)).reshape(num_windows, window).mean(axis=1)
    loud = np.flatnonzero(power > power.max() * 10 ** (-below_db / 10))
    if len(loud) == 0:
        return pcm
    margin = sample_rate // 20
    return pcm[max(0, loud[0] * window - margin) : (loud[-1] + 1) * window + margin]


def write(path: Path, wave: Wave, sample_rate: int) -> None:
    """Write a mono float wave as 16-bit PCM in the format of the file's extension."""
    sf.write(path, np.clip(wave, -1.0, 1.0), sample_rate, subtype="PCM_16")


def _to_pcm(samples: Wave, rate: int, sample_rate: int) -> Pcm:
    if not np.isfinite(samples).all():
        raise UnusableAudio("not audio", "the samples contain NaN or infinity")
    loudest = float(np.abs(samples).max())
    if loudest > _LOUDEST:  # integers written as floats, which clipping would turn into noise
        raise UnusableAudio("not audio", f"the samples reach {loudest:.6g}, where full scale is 1")
    wave = samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1, dtype=np.float32)
    if rate != sample_rate:
        wave = soxr.resample(wave, rate, sample_rate, quality="HQ")
    pcm: Pcm = np.clip(np.rint(wave * 32768.0), -32768, 32767).astype(np.int16)
    return pcm


def _library_message(error: Exception) -> str:
    # str() of a LibsndfileError can itself raise, so the fields are read instead.
    message = getattr(error, "error_string", None)
    return str(message) if message else type(error).__name__


def _check_complete(path: Path) -> None:
    """Compare what the container promises with the bytes there are: libsndfile reads a cut WAV or Ogg silently."""
    try:
        with open(path, "rb") as file:
            head = file.read(26)
            size = file.seek(0, 2)
            if size == 0:
                raise UnusableAudio("empty file", "0 bytes")
            file.seek(max(0, size - _OGG_PAGE_MAX))
            tail = file.read() if head[:4] == b"OggS" else b""
        if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
            _check_riff(path, size)
        elif head[:4] == b"OggS":
            _check_ogg(tail)
        elif head[:4] == b"fLaC":
            _check_flac(head)
        elif path.suffix.lower() == ".mp3":
            _check_mpeg(path, size)
    except FileNotFoundError:
        raise UnusableAudio("missing file", str(path)) from None
    except OSError as error:
        raise UnusableAudio("unreadable file", error.strerror or str(error)) from None


def _check_riff(path: Path, size: int) -> None:
    with open(path, "rb") as file:
        position = 12
        while position + 8 <= size:
            file.seek(position)
            header = file.read(8)
            length = int.from_bytes(header[4:], "little")
            if header[:4] == b"data":
                # Programs that write to a pipe leave one of the largest values here: the length is then unknown.
                if length < 0x7FFF_0000 and position + 8 + length > size:
                    there = size - position - 8
                    raise UnusableAudio(DAMAGED, f"{there} of {length} bytes of samples are there")
                return
            position += 8 + length + length % 2
    raise UnusableAudio(DAMAGED, "the file ends before its samples begin")


def _check_ogg(tail: bytes) -> None:
    page = tail.rfind(b"OggS")
    header_end = page + 27
    if page < 0 or len(tail) < header_end:
        raise UnusableAudio(DAMAGED, "the last Ogg page is cut")
    num_segments = tail[page + 26]
    segments = tail[header_end : header_end + num_segments]
    if len(segments) < num_segments or header_end + num_segments + sum(segments) > len(tail):
        raise UnusableAudio(DAMAGED, "the last Ogg page is cut")
    end_of_stream = tail[page + 5] & 4
    if not end_of_stream:
        raise UnusableAudio(DAMAGED, "the Ogg stream has no last page")


def _check_flac(head: bytes) -> None:
    """Encoders that write to a pipe leave the length at 0, which libsndfile cannot read."""
    if len(head) >= 26 and int.from_bytes(head[21:26], "big") & 0xF_FFFF_FFFF == 0:
        raise UnusableAudio("unknown length", "the FLAC header names no length; encode the file again to a file")


def _check_mpeg(path: Path, size: int) -> None:
    """An MP3 made by any common encoder says in its first frame how many bytes follow."""
    with open(path, "rb") as file:
        head = file.read(10)
        tag_bytes = 0
        if head[:3] == b"ID3" and len(head) == 10:
            tag_bytes = 10 + sum(byte << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
        file.seek(tag_bytes)
        start = file.read(4096).lstrip(b"\0")
    if len(start) < 2 or start[0] != 0xFF or start[1] & 0xE0 != 0xE0:
        # libmpg123 would search the whole file for a frame and complain on standard error.
        raise UnusableAudio("not audio", "no MPEG audio at the start of the file")
    places = [at for tag in (b"Xing", b"Info") if 0 <= (at := start.find(tag)) <= len(start) - 16]
    if not places:
        if b"VBRI" not in start:
            _check_constant_bitrate(path, tag_bytes)
        return
    flags = int.from_bytes(start[places[0] + 4 : places[0] + 8], "big")
    promised = int.from_bytes(start[places[0] + 12 : places[0] + 16], "big")
    if flags & 3 == 3 and promised > size - tag_bytes:
        raise UnusableAudio(DAMAGED, f"{size - tag_bytes} of {promised} bytes are there")


def _check_constant_bitrate(path: Path, tag_bytes: int) -> None:
    """Without a length in its header, libsndfile takes an MP3's length from the bitrate of its first frame."""
    content = path.read_bytes()
    position, bitrates = tag_bytes, set()
    while position + 4 <= len(content) and content[position] == 0xFF:
        frame_bytes, bitrate = _mpeg_frame(content[position : position + 4])
        if not frame_bytes:
            break
        bitrates.add(bitrate)
        position += frame_bytes
    if len(bitrates) > 1:
        detail = "an MP3 of varying bitrate whose header names no length; encode it again"
        raise UnusableAudio("unknown length", detail)


def _mpeg_frame(header: bytes) -> tuple[int, int]:
    """Size in bytes and bitrate in kbit/s of a layer III frame; zeros when this is none."""
    version, layer = header[1] >> 3 & 3, header[1] >> 1 & 3
    if version == 1 or layer != 1 or header[1] & 0xE0 != 0xE0:
        return 0, 0
    bitrate = _BITRATES[version == 3][header[2] >> 4]
    rate = (44100, 48000, 32000, 0)[header[2] >> 2 & 3] >> {3: 0, 2: 1, 0: 2}[version]
    padding = header[2] >> 1 & 1
    return (
        ((144 if version == 3 else 72) * bitrate * 1000 // rate + padding, bitrate) if rate and bitrate else (0, 0)
    )
