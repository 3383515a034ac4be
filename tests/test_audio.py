"""Audio files: every format and rate arrives intact, every broken file says what is wrong with it."""

import contextlib
import io
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import soundfile as sf
import soxr
import xxhash
from conftest import make_voice

from myxtts import audio
from myxtts.audio import DECODE_VERSION, UnusableAudio, decode, trim_silence
from myxtts.config import SAMPLE_RATE
from myxtts.data.prepare import EMBEDDED_CORPUS

FORMATS = [
    *(("WAV", subtype, ".wav") for subtype in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT")),
    *(("FLAC", subtype, ".flac") for subtype in ("PCM_16", "PCM_24")),
    *(("MP3", "MPEG_LAYER_III", ".mp3"), ("OGG", "VORBIS", ".ogg"), ("OGG", "OPUS", ".opus")),
]
COMPRESSED = [kind for kind in FORMATS if kind[1] in ("PCM_16", "MPEG_LAYER_III", "VORBIS", "OPUS")]
Kind = tuple[str, str, str]


def encoded(wave: npt.NDArray[np.float32], rate: int, kind: Kind) -> bytes:
    file = io.BytesIO()
    sf.write(file, wave, rate, format=kind[0], subtype=kind[1])
    return file.getvalue()


def reason_of(path: Path, max_seconds: float = 9.3) -> str:
    with pytest.raises(UnusableAudio) as caught:
        decode(path, SAMPLE_RATE, max_seconds)
    assert caught.value.detail
    return caught.value.reason


def correlation(first: npt.NDArray[np.int16], second: npt.NDArray[np.float32]) -> float:
    """Highest correlation within the few milliseconds that a codec may shift a signal by."""
    size = min(len(first), len(second)) - 1024
    middle = second[512 : 512 + size].astype(np.float64)
    spectrum = np.fft.rfft(first.astype(np.float64), 2 * len(first) + size)
    lags = np.fft.irfft(spectrum * np.conj(np.fft.rfft(middle, 2 * len(first) + size)))[:1024]
    squares = np.concatenate([[0.0], np.cumsum(first.astype(np.float64) ** 2)])
    energy = squares[size : size + 1024] - squares[:1024][: len(squares) - size]
    return float((lags[: len(energy)] / np.sqrt(energy * (middle**2).sum())).max())


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind[1] + kind[2])
def test_every_format_and_rate_keeps_length_and_content(
    tmp_path: Path, kind: Kind, rate: int, channels: int
) -> None:
    if kind[1] == "OPUS":
        rate = {22050: 24000, 44100: 12000}.get(rate, rate)  # the rates that Opus has
    left = make_voice(1.0, rate)
    wave = left if channels == 1 else np.stack([left, 0.5 * left], axis=1)
    path = tmp_path / f"clip{kind[2]}"
    path.write_bytes(encoded(wave, rate, kind))
    pcm = decode(path, SAMPLE_RATE, 9.3)
    reference = soxr.resample(left * (1.0 if channels == 1 else 0.75), rate, SAMPLE_RATE)
    lossless = kind[0] in ("WAV", "FLAC")
    assert pcm.dtype == np.int16
    assert pcm.ndim == 1
    assert abs(len(pcm) - SAMPLE_RATE) <= (1 if lossless else 0.08 * SAMPLE_RATE)
    assert correlation(pcm, reference) > (0.998 if lossless else 0.95)
    if lossless:
        assert np.abs(pcm / 32768 - reference).max() < (0.02 if kind[1] == "PCM_U8" else 0.001)
    else:
        assert 0.8 < pcm.std() / (reference.std() * 32768) < 1.2


@pytest.mark.parametrize(("suffix", "channels"), [(".wav", 1), (".flac", 1), (".wav", 2)])
def test_sixteen_bits_pass_exactly(tmp_path: Path, suffix: str, channels: int) -> None:
    """Stereo passes as floats."""
    pcm = np.arange(-32768, 32768, dtype=np.int16)
    sf.write(tmp_path / f"clip{suffix}", np.stack([pcm] * channels, axis=1), SAMPLE_RATE, subtype="PCM_16")
    assert np.array_equal(decode(tmp_path / f"clip{suffix}", SAMPLE_RATE, 9.3), pcm)
    sf.write(tmp_path / "loud.wav", np.array([1.5, -1.5] * 9000, np.float32), SAMPLE_RATE, subtype="FLOAT")
    assert set(decode(tmp_path / "loud.wav", SAMPLE_RATE, 9.3).tolist()) == {32767, -32768}  # not wrapped


@pytest.mark.parametrize("cut", [0.02, 0.3, 0.7, 0.97])
@pytest.mark.parametrize("kind", COMPRESSED, ids=lambda kind: kind[1] + kind[2])
def test_a_truncated_file_is_never_taken_for_a_clip(tmp_path: Path, kind: Kind, cut: float) -> None:
    whole = encoded(make_voice(2.0), 24000 if kind[1] == "OPUS" else 22050, kind)
    path = tmp_path / f"clip{kind[2]}"
    path.write_bytes(whole)
    decode(path, SAMPLE_RATE, 9.3)
    path.write_bytes(whole[: round(cut * len(whole))])
    assert reason_of(path) in (audio.DAMAGED, "not audio")


@pytest.mark.parametrize("kind", COMPRESSED, ids=lambda kind: kind[1] + kind[2])
def test_a_piece_that_ends_after_its_file_names_both_lengths(tmp_path: Path, kind: Kind) -> None:
    path = tmp_path / f"clip{kind[2]}"
    path.write_bytes(encoded(soxr.resample(make_voice(1.25), 22050, 24000), 24000, kind))
    assert len(decode(path, SAMPLE_RATE, 9.3, start=0.5, duration=0.5)) == SAMPLE_RATE // 2
    for start in (0.5, 2.0):
        with pytest.raises(audio.UnusableAudio) as caught:
            decode(path, SAMPLE_RATE, 9.3, start=start, duration=1.5)
        assert caught.value.reason == "shorter than named"
        named, _, end = caught.value.detail.partition(", the audio ends at ")
        assert named == f"the manifest names {start:g} to {start + 1.5:g} s"
        assert float(end.removesuffix(" s")) == pytest.approx(1.25, abs=0.08)


def test_a_rounded_duration_may_be_longer_than_its_file(tmp_path: Path) -> None:
    path = tmp_path / "clip.wav"
    sf.write(path, make_voice(1.2549), SAMPLE_RATE, subtype="PCM_16")
    whole = decode(path, SAMPLE_RATE, 9.3)
    for start, duration in ((0.0, 1.26), (0.0, 1.3), (0.5, 0.8)):
        piece = decode(path, SAMPLE_RATE, 9.3, start=start, duration=duration)
        assert np.array_equal(piece, whole[round(start * SAMPLE_RATE) :])
    content = path.read_bytes()
    path.write_bytes(content[: -len(content) // 20])  # the header still names what is missing
    with pytest.raises(audio.UnusableAudio):
        decode(path, SAMPLE_RATE, 9.3, duration=1.26)


@pytest.mark.parametrize("suffix", audio.EXTENSIONS)
def test_what_is_no_audio_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"clip{suffix}"
    path.write_bytes(b"")
    assert reason_of(path) == "empty file"
    path.write_text("This is a shopping list, whatever its name says.\n" * 40)
    assert reason_of(path) == "not audio"
    for seed in range(5):
        path.write_bytes(random.Random(seed).randbytes(5000))
        assert reason_of(path) in ("not audio", audio.DAMAGED)
    path.unlink()
    assert reason_of(path) == "missing file"
    os.mkfifo(path)
    path.with_name("folder").mkdir()
    for special in (path, path.with_name("folder"), Path("/dev/zero")):  # must not wait, nor read forever
        assert reason_of(special) == "unreadable file"
    for kind in (FORMATS[1], FORMATS[4]):
        (tmp_path / "none.wav").write_bytes(encoded(np.zeros(0, np.float32), 22050, kind))
        assert reason_of(tmp_path / "none.wav") == "no samples"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1000.0], ids=["nan", "inf", "-inf", "an integer"])
@pytest.mark.parametrize("channels", [1, 2])
def test_samples_that_are_no_amplitudes(tmp_path: Path, bad: float, channels: int) -> None:
    wave = np.stack([make_voice(1.0)] * channels, axis=1)
    wave[1000, channels - 1] = bad
    sf.write(tmp_path / "clip.wav", wave, SAMPLE_RATE, subtype="FLOAT")
    assert reason_of(tmp_path / "clip.wav") == "not audio"


def test_a_header_that_claims_more_than_there_is(tmp_path: Path) -> None:
    wav = bytearray(encoded(make_voice(1.0), SAMPLE_RATE, FORMATS[1]))
    size_at = wav.index(b"data") + 4
    length = int.from_bytes(wav[size_at : size_at + 4], "little")
    wav[size_at : size_at + 4] = (length + 4000).to_bytes(4, "little")
    (tmp_path / "clip.wav").write_bytes(wav)
    assert reason_of(tmp_path / "clip.wav") == audio.DAMAGED
    flac = bytearray(encoded(make_voice(1.0), SAMPLE_RATE, FORMATS[5]))
    for claimed in (30_000, 2**36 - 1):
        flac[21:26] = (flac[21] >> 4 << 36 | claimed).to_bytes(5, "big")  # STREAMINFO's number of samples
        (tmp_path / "clip.flac").write_bytes(flac)
        assert reason_of(tmp_path / "clip.flac") == audio.DAMAGED


@pytest.mark.parametrize(
    "field", [(22, 2), (24, 4), (32, 2), (34, 2), (40, 4)], ids=lambda field: f"at {field[0]}"
)
def test_no_claim_of_a_header_takes_time_or_memory(tmp_path: Path, field: tuple[int, int]) -> None:
    """Channels, rate, bytes of a frame, bits, bytes of samples."""
    at, size = field
    for value in (0, 1, 7, 255, 1024, 2 ** (8 * size - 1) - 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 1):
        wav = bytearray(encoded(make_voice(1.0), SAMPLE_RATE, FORMATS[1]))
        wav[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
        (tmp_path / "clip.wav").write_bytes(wav)
        with contextlib.suppress(UnusableAudio):
            assert len(decode(tmp_path / "clip.wav", SAMPLE_RATE, 20.0)) <= 20 * SAMPLE_RATE


@pytest.mark.parametrize("claimed", [0xFFFF_FFFF, 0xFFFF_FFFF - 36, 0x7FFF_F000])
def test_a_streamed_wav_without_a_length_is_accepted(tmp_path: Path, claimed: int) -> None:
    wav = bytearray(encoded(make_voice(1.0), SAMPLE_RATE, FORMATS[1]))
    size_at = wav.index(b"data") + 4
    wav[4:8] = wav[size_at : size_at + 4] = claimed.to_bytes(4, "little")
    (tmp_path / "clip.wav").write_bytes(wav)
    assert len(decode(tmp_path / "clip.wav", SAMPLE_RATE, 9.3)) == SAMPLE_RATE


def test_an_mp3_behind_a_large_picture(tmp_path: Path) -> None:
    mp3 = encoded(make_voice(2.0), SAMPLE_RATE, FORMATS[7])
    picture = b"APIC" + (300_000).to_bytes(4, "big") + b"\0\0" + b"\xff\xd8" + bytes(299_998)
    size = bytes((len(picture) >> shift) & 0x7F for shift in (21, 14, 7, 0))
    tagged = b"ID3\x03\0\0" + size + picture + mp3
    (tmp_path / "plain.mp3").write_bytes(mp3)
    (tmp_path / "tagged.mp3").write_bytes(tagged)
    plain = decode(tmp_path / "plain.mp3", SAMPLE_RATE, 9.3)
    assert np.array_equal(decode(tmp_path / "tagged.mp3", SAMPLE_RATE, 9.3), plain)
    (tmp_path / "tagged.mp3").write_bytes(tagged[: -len(mp3) // 2])
    assert reason_of(tmp_path / "tagged.mp3") == audio.DAMAGED
    (tmp_path / "tagged.mp3").write_bytes(tagged[:200_000])
    assert reason_of(tmp_path / "tagged.mp3") in ("not audio", audio.DAMAGED)


def test_the_limit_is_exact(tmp_path: Path) -> None:
    sf.write(tmp_path / "clip.wav", np.zeros(22050, np.int16), SAMPLE_RATE)
    assert len(decode(tmp_path / "clip.wav", SAMPLE_RATE, 1.0)) == 22050
    sf.write(tmp_path / "clip.wav", np.zeros(22051, np.int16), SAMPLE_RATE)
    assert reason_of(tmp_path / "clip.wav", 1.0) == "too long"


@pytest.mark.parametrize("suffix", [".wav", ".flac"])
def test_an_hour_is_refused_without_loading_it(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"hour{suffix}"
    with sf.SoundFile(path, "w", 8000, 1, "PCM_24") as file:
        for _ in range(60):
            file.write(np.zeros(8000 * 60, np.int16))
    code = (
        "import resource, sys; from pathlib import Path; from myxtts.audio import decode, UnusableAudio\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "try: decode(Path(sys.argv[1]), 22050, 9.3)\n"
        "except UnusableAudio as error: print(peak() - before, error.reason, error.detail, sep='|')"
    )
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    grown_kb, reason, detail = result.stdout.strip().split("|")
    assert reason == "too long"
    assert "3600.00 s" in detail
    assert int(grown_kb) < 20_000  # all of it would be 115 MB


def test_bytes_of_a_good_file_changed_at_random_raise_nothing_else(tmp_path: Path) -> None:
    """A few hundred of the many thousand that were tried: whatever is in a file, it decodes or is set aside."""
    chance = random.Random(0)
    wholes = {kind: encoded(make_voice(0.3, 24000), 24000, kind) for kind in FORMATS if kind[0] != "MP3"}
    for _ in range(300):
        kind = chance.choice(list(wholes))
        content = bytearray(wholes[kind])
        for _ in range(chance.choice([1, 2, 30])):
            content[chance.randrange(min(len(content), chance.choice([60, 10**6])))] = chance.randrange(256)
        path = tmp_path / f"clip{kind[2]}"
        path.write_bytes(content)
        try:
            pcm = decode(path, SAMPLE_RATE, 9.3, trim_silence_db=40)
        except UnusableAudio:
            continue
        assert pcm.dtype == np.int16
        assert len(pcm) <= 9.4 * SAMPLE_RATE


def test_silence_is_trimmed_at_both_ends_only(tmp_path: Path) -> None:
    speech = (make_voice(1.0) * 30000).astype(np.int16)
    pause = np.random.default_rng(0).integers(-10, 10, SAMPLE_RATE).astype(np.int16)
    whole = np.concatenate([pause, speech, pause, speech, pause])
    trimmed = trim_silence(whole, SAMPLE_RATE, 40)
    margin = SAMPLE_RATE // 20
    assert 3 * SAMPLE_RATE <= len(trimmed) <= 3 * SAMPLE_RATE + 2 * (margin + SAMPLE_RATE // 50)
    start = len(pause) - (np.flatnonzero(np.abs(trimmed) > 500)[0] - np.flatnonzero(np.abs(speech) > 500)[0])
    assert np.array_equal(trimmed, whole[start:][: len(trimmed)])
    assert np.array_equal(trim_silence(speech, SAMPLE_RATE, 40), speech)
    for num_samples in (0, 1, 100, 22050):
        assert len(trim_silence(np.zeros(num_samples, np.int16), SAMPLE_RATE, 40)) == num_samples
    sf.write(tmp_path / "clip.wav", whole, SAMPLE_RATE)
    assert len(decode(tmp_path / "clip.wav", SAMPLE_RATE, 9.3)) == len(whole)
    assert np.array_equal(decode(tmp_path / "clip.wav", SAMPLE_RATE, 9.3, trim_silence_db=40), trimmed)


def test_write_and_read_back(tmp_path: Path) -> None:
    wave = make_voice(0.5)
    for suffix in (".wav", ".flac"):
        audio.write(tmp_path / f"clip{suffix}", wave, SAMPLE_RATE)
        assert np.abs(decode(tmp_path / f"clip{suffix}", SAMPLE_RATE, 9.3) / 32768 - wave).max() < 1e-4


def test_decode_version_is_raised_when_samples_change(tmp_path: Path) -> None:
    """Raise DECODE_VERSION when this changes: caches of the old samples would be loaded otherwise."""
    hasher = xxhash.xxh3_128()
    for path in sorted((EMBEDDED_CORPUS / "wavs").glob("*.flac")):
        hasher.update(decode(path, SAMPLE_RATE, 20.0).tobytes())
        hasher.update(decode(path, SAMPLE_RATE, 20.0, trim_silence_db=40).tobytes())
    assert (DECODE_VERSION, hasher.hexdigest()) == (2, "b475024efdb8db3a3ec7642d3db18265")
    # The resampler's last bit depends on the processor: a sweep up to the edge of its band is compared loosely.
    time = np.arange(48000) / 48000
    sweep = 0.5 * np.sin(2 * np.pi * (2000 * time + 4600 * time**2))
    sf.write(tmp_path / "sweep.wav", np.stack([sweep, sweep / 2], axis=1), 48000, subtype="PCM_24")
    pcm = decode(tmp_path / "sweep.wav", SAMPLE_RATE, 9.3)
    expected = [10298, 11398, 11693, -10909, 11381, 11951, 8563, -11543, 2]
    assert np.abs(pcm[1500::2500].astype(int) - expected).max() <= 2


def test_a_file_that_names_no_length_is_not_cut_silently(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 0.3, 4 * 22050)
    mp3 = encoded(np.concatenate([np.zeros(22050), noise, np.zeros(4 * 22050)]).clip(-1, 1), 22050, FORMATS[7])
    frame_bytes, _ = audio._mpeg_frame(mp3[:4])
    (tmp_path / "a.mp3").write_bytes(mp3[frame_bytes:])  # without the frame that holds the length
    flac = bytearray(encoded(np.zeros(22050, np.float32), 22050, FORMATS[5]))
    flac[21] &= 0xF0
    flac[22:26] = bytes(4)
    (tmp_path / "a.flac").write_bytes(flac)  # as written to a pipe
    for name in ("a.mp3", "a.flac"):
        assert reason_of(tmp_path / name, 20) == "unknown length"
