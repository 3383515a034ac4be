"""With native loading off no samples are stored: batches hold the same, decoded from the files each time."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from conftest import SENTENCES, make_voice, prepare_and_count_reads, write_corpus

from myxtts import audio
from myxtts.config import HOP_SAMPLES, DataSettings
from myxtts.data.clips import ClipSet, LazyAudio, PreparedCorpus
from myxtts.data.prepare import prepare
from myxtts.data.store import Store
from myxtts.errors import DatasetError

UNTOUCHED = -12345


@pytest.fixture
def settings(tmp_path: Path) -> DataSettings:
    """WAV and FLAC, at our rate and others, mono and stereo; one too long, one too short, one cut, one missing."""
    folder = write_corpus(tmp_path / "corpus", SENTENCES[:4])
    for name, rate, channels in (("high.wav", 44100, 1), ("low.flac", 16000, 1), ("wide.flac", 48000, 2)):
        wave = np.stack([make_voice(0.9, rate, seed) for seed in range(channels)], axis=1)
        sf.write(folder / "wavs" / name, wave, rate)
    sf.write(folder / "wavs" / "long.wav", make_voice(29.0, 8000), 8000)
    sf.write(folder / "wavs" / "short.wav", make_voice(0.2), 22050)
    (folder / "wavs" / "cut.wav").write_bytes((folder / "wavs" / "high.wav").read_bytes()[:4000])
    with open(folder / "metadata.csv", "a", encoding="utf-8") as metadata:
        for number, name in enumerate(("high", "low", "wide", "long", "short", "cut", "absent")):
            metadata.write(f"{name}|{SENTENCES[4 + number]}\n")
    time.sleep(0.03)  # until the times of the folders are trusted
    options = {"train_data": folder, "cache_dir": tmp_path / "cache", "language": "en", "vocab_size": 256}
    return DataSettings(**options, num_workers=2, native_loading=False)


def packed(settings: DataSettings) -> DataSettings:
    return replace(settings, native_loading=True)


def gathered(clips: ClipSet) -> np.ndarray:
    out = np.full((len(clips), 800 * HOP_SAMPLES), UNTOUCHED, np.int16)
    clips.audio.gather(clips.audio_rows, out)
    return out


@pytest.fixture
def wavs(settings: DataSettings) -> Path:
    assert settings.train_data
    return settings.train_data / "wavs"


def row_of(prepared: PreparedCorpus, name: str) -> tuple[LazyAudio, np.ndarray]:
    """A clip's audio and its row in an array, as `gather` takes it."""
    for part in (prepared.train, prepared.val):
        if name in part.names:
            assert isinstance(part.audio, LazyAudio)
            return part.audio, part.audio_rows[[part.names.index(name)]]
    raise AssertionError(f"{name} is not used")


def assert_same(ours: PreparedCorpus, theirs: PreparedCorpus) -> None:
    assert ours.set_aside == theirs.set_aside
    assert (ours.vocabulary, ours.speaker_names) == (theirs.vocabulary, theirs.speaker_names)
    for one, other in ((ours.train, theirs.train), (ours.val, theirs.val)):
        assert one.names == other.names
        assert len(one) > 0
        for field in ("audio_rows", "ids_rows", "speakers", "languages", "num_samples", "num_ids"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
        np.testing.assert_array_equal(one.audio.hashes[one.audio_rows], other.audio.hashes[other.audio_rows])
        np.testing.assert_array_equal(gathered(one), gathered(other))


def prepare_again(settings: DataSettings, monkeypatch: pytest.MonkeyPatch) -> tuple[PreparedCorpus, int]:
    """`prepare_and_count_reads`, which may decode nothing in this process."""
    with monkeypatch.context() as patched:
        patched.setattr(audio, "decode", lambda *_: pytest.fail("decoded in this process"))
        return prepare_and_count_reads(settings, monkeypatch)


def test_both_ways_give_the_same_clips_and_samples(settings: DataSettings) -> None:
    samples = []
    for trim in (0.0, 12.0):  # in one cache: what was decoded is kept per setting
        settings = replace(settings, trim_silence_db=trim)
        ours, theirs = prepare(settings), prepare(packed(settings))
        assert isinstance(ours.train.audio, LazyAudio)
        assert isinstance(theirs.train.audio, Store)
        assert_same(ours, theirs)
        samples.append(ours.train.num_samples.sum())
    assert samples[0] > samples[1]
    assert {item.id: item.reason for item in ours.set_aside} == {
        "long": "too long",
        "short": "too short",
        "cut": "truncated or damaged",
        "absent": "missing file",
    }
    assert len(ours.train) + len(ours.val) == 7
    assert (gathered(ours.train)[0, ours.train.num_samples[0] :] == UNTOUCHED).all()


def test_no_samples_reach_the_disk(settings: DataSettings) -> None:
    prepared = prepare(settings)
    assert min(2 * prepared.train.num_samples) > 20_000
    assert not list(prepared.root.glob("audio-*"))
    assert max(path.stat().st_size for path in prepared.root.rglob("*") if path.is_file()) < 20_000


def test_only_changed_files_are_decoded_again(settings: DataSettings, wavs: Path, messages) -> None:
    prepare(settings)
    assert messages.work()["LENGTHS"] == 10
    sf.write(wavs / "clip001.wav", make_voice(0.8, seed=5), 22050)
    prepared = prepare(settings)
    assert messages.work() == {"LENGTHS": 1}
    assert_same(prepared, prepare(packed(settings)))


def test_switching_back_and_forth_is_right_each_time(
    settings: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(settings, val_data=write_corpus(tmp_path / "val", SENTENCES[12:15], first=12))
    time.sleep(0.03)
    first = prepare(settings)
    for choice in (packed(settings), settings, packed(settings)):
        assert_same(prepare(choice), first)
    for choice, kind in ((settings, LazyAudio), (packed(settings), Store)):  # now each has a snapshot
        found, reads = prepare_again(choice, monkeypatch)
        assert (type(found.train.audio), type(found.val.audio), reads) == (kind, kind, 0)
        assert_same(found, first)


def test_a_relative_folder_is_found_from_elsewhere(
    settings: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gathered(prepare(packed(settings)).train)
    monkeypatch.chdir(tmp_path)
    prepared = prepare(replace(settings, train_data=Path("corpus")))
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(gathered(prepared.train), expected)


def alter_keeping_size_and_time(path: Path) -> None:
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda path: path.unlink(), "missing file"),
        (lambda path: sf.write(path, make_voice(3.0), 22050), "samples, found 66150"),
        (lambda path: sf.write(path, make_voice(29.0), 22050), "too long"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "truncated or damaged"),
        (alter_keeping_size_and_time, "written to"),
    ],
)
def test_a_file_changed_after_preparation_is_named(
    settings: DataSettings, wavs: Path, change: Callable[[Path], object], found: str
) -> None:
    prepared, path = prepare(settings), wavs / "clip002.wav"
    change(path)
    decoded, row = row_of(prepared, "clip002")
    with pytest.raises(DatasetError, match=f"(?s){path} has changed .*{found}.*prepare again"):
        decoded.gather(row, np.empty((1, 800 * HOP_SAMPLES), np.int16))
    again = prepare(settings)  # which is what the message asks for
    assert len(gathered(again.train)) == len(again.train)


def test_a_decoder_that_differs_in_the_last_bit_is_only_warned_of(
    settings: DataSettings, wavs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decoded, row = row_of(prepare(settings), "high")
    original, out = audio.decode, np.empty((1, 800 * HOP_SAMPLES), np.int16)
    expected = decoded[int(row[0])]
    monkeypatch.setattr(audio, "decode", lambda *options: original(*options) ^ 1)
    decoded.gather(row, out)
    decoded.gather(row, out)
    np.testing.assert_array_equal(out[0, : len(expected)], expected ^ 1)
    assert [str(wavs / "high.wav") in text for text in caplog.messages] == [True]


def test_threads_gather_at_the_same_time(settings: DataSettings) -> None:
    expected = gathered(prepare(packed(settings)).train)
    clips = prepare(settings).train
    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(lambda _: gathered(clips), range(16)):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_a_damaged_store_of_lengths_only_costs_time(settings: DataSettings, messages, has_snapshot: bool) -> None:
    first = prepare(settings)
    (data,) = first.root.glob("lengths-*/data.bin")
    content = data.read_bytes()
    data.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    if not has_snapshot:
        for path in first.root.glob("snapshot-*"):
            shutil.rmtree(path)
    messages.take()
    assert_same(prepare(settings), first)
    assert messages.work() == {"LENGTHS": 1}
