"""A snapshot opens an unchanged corpus at once and is never believed when anything has changed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import SENTENCES, make_voice, write_corpus

from myxtts import audio
from myxtts.config import DataSettings
from myxtts.data import corpus as corpus_module
from myxtts.data.prepare import prepare


@pytest.fixture
def settled(tmp_path: Path) -> DataSettings:
    """A corpus of six clips, prepared, old enough for its folders' times to be trusted."""
    folder = write_corpus(tmp_path / "corpus")
    time.sleep(0.03)
    data = DataSettings(train_data=folder, language="en")
    prepare(data)
    return data


def opened_from_snapshot(data: DataSettings, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether `prepare` got by without reading the metadata."""
    reads = []
    original = corpus_module.read_rows
    with monkeypatch.context() as patched:
        patched.setattr(corpus_module, "read_rows", lambda path: reads.append(path) or original(path))
        prepare(data)
    return not reads


def test_an_unchanged_corpus_is_not_read_again(settled: DataSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened_from_snapshot(settled, monkeypatch)


def test_it_holds_everything(settled: DataSettings, caplog: pytest.LogCaptureFixture) -> None:
    read = prepare(settled, verify=True)  # verifying reads the corpus itself
    with caplog.at_level(logging.INFO):
        known = prepare(settled)
    assert "LOADING CACHE FROM DISK" in caplog.text
    assert (known.speaker_names, known.set_aside, known.vocabulary) == (
        read.speaker_names,
        read.set_aside,
        read.vocabulary,
    )
    for ours, theirs in ((known.train, read.train), (known.val, read.val)):
        assert ours.names == theirs.names
        for field in ("audio_rows", "ids_rows", "speakers", "languages", "num_samples", "num_ids"):
            np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field))
        for row in range(len(ours)):
            np.testing.assert_array_equal(ours.audio[ours.audio_rows[row]], theirs.audio[theirs.audio_rows[row]])


def change_text(folder: Path) -> None:
    path = folder / "metadata.csv"
    stat = path.stat()
    path.write_text(path.read_text(encoding="utf-8").replace("quiet", "silent", 1), encoding="utf-8")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def change_audio_keeping_size_and_time(folder: Path) -> None:
    path = folder / "wavs" / "clip001.wav"
    stat = path.stat()
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def remove_audio(folder: Path) -> None:
    (folder / "wavs" / "clip002.wav").unlink()


def add_better_candidate(folder: Path) -> None:
    """A file named exactly like the id is preferred to the id with an extension."""
    audio.write(folder / "wavs" / "other.wav", make_voice(1.0), 22050)
    (folder / "wavs" / "other.wav").rename(folder / "wavs" / "clip003")


def add_speakers(folder: Path) -> None:
    (folder / "speakers.csv").write_text("id|speaker\nclip000|ann\n", encoding="utf-8")


def add_held_out(folder: Path) -> None:
    (folder / "metadata_eval.csv").write_text(f"clip000|{SENTENCES[0]}\n", encoding="utf-8")


@pytest.mark.parametrize(
    "change",
    [
        change_text,
        change_audio_keeping_size_and_time,
        remove_audio,
        add_better_candidate,
        add_speakers,
        add_held_out,
    ],
)
def test_any_change_of_the_corpus_is_seen(
    settled: DataSettings, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    assert settled.train_data
    change(settled.train_data)
    assert not opened_from_snapshot(settled, monkeypatch)


@pytest.mark.parametrize(
    "changed", [{"max_mel_frames": 300}, {"language": "de"}, {"vocab_size": 300}, {"val_fraction": 0.4}]
)
def test_any_change_of_the_settings_is_seen(
    settled: DataSettings, monkeypatch: pytest.MonkeyPatch, changed: dict[str, object]
) -> None:
    assert not opened_from_snapshot(replace(settled, **changed), monkeypatch)


def test_a_missing_file_that_appears_is_seen(settled: DataSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled.train_data
    path = settled.train_data / "wavs" / "clip002.wav"
    content = path.read_bytes()
    path.unlink()
    time.sleep(0.03)
    assert any(item.reason == "missing file" for item in prepare(settled).set_aside)
    path.write_bytes(content)
    assert not opened_from_snapshot(settled, monkeypatch)
    assert not prepare(settled).set_aside


def test_a_damaged_snapshot_or_store_only_costs_time(
    settled: DataSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settled.train_data
    root = settled.train_data / ".myxtts"
    names = prepare(settled).train.names
    (path,) = root.glob("snapshot-*")
    for position in range(0, path.stat().st_size, 997):
        content = bytearray(path.read_bytes())
        content[position] ^= 0xFF
        path.write_bytes(content)
        assert prepare(settled).train.names == names
    (store,) = root.glob("ids-*")
    (store / "index.npy").unlink()
    assert not opened_from_snapshot(settled, monkeypatch)
    assert prepare(settled).train.names == names
