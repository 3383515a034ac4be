"""The cache of a corpus: never stale; only what changed is redone; an unchanged corpus opens at once."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from conftest import SENTENCES, contents, prepare_and_count_reads, write_corpus

from myxtts.config import DataSettings
from myxtts.data.clips import PreparedCorpus
from myxtts.data.corpus import Corpus, read_corpus
from myxtts.data.prepare import prepare, prepared_before
from myxtts.errors import DatasetError
from myxtts.text import tokenizer

Prepare = Callable[..., PreparedCorpus]


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the content of a file but not its size and modification time."""
    before = path.stat()
    path.write_bytes(change(path.read_bytes()))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def flip(at: int) -> Callable[[bytes], bytes]:
    """Flips bit 6 of one byte."""
    return lambda content: content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :]


def test_only_what_changed_is_redone(make_corpus, run_prepare: Prepare, messages) -> None:
    folder = make_corpus()
    first = contents(run_prepare(folder))
    assert messages.work() == {"TEXT": 6, "AUDIO": 6}
    rewrite(folder / "wavs" / "clip002.wav", flip(2000))  # its size and time stay the same
    second = contents(run_prepare(folder))
    assert messages.work() == {"AUDIO": 1}
    assert [name for name in first if first[name] != second[name]] == ["clip002"]
    make_corpus(["One more sentence for the corpus."], first=20)  # a clip is added
    assert len(contents(run_prepare(folder))) == 7
    assert messages.work() == {"TEXT": 1, "AUDIO": 1}
    metadata = folder / "metadata.csv"
    lines = metadata.read_text().splitlines()
    metadata.write_text("\n".join(lines[1:]))  # one is removed
    assert "clip000" not in contents(run_prepare(folder))
    assert messages.work() == {}
    metadata.write_text("\n".join(["clip001|Quite another sentence.", *lines[2:]]))  # a text is changed
    run_prepare(folder)
    assert messages.work() == {"TEXT": 1}
    metadata.write_text("\n".join(reversed(lines)))  # the order is changed, and a clip comes back
    by_order = contents(run_prepare(folder))
    assert messages.work() == {}
    shutil.rmtree(folder / ".myxtts")
    assert contents(run_prepare(folder)) == by_order


def test_settings_redo_only_what_they_decide(corpus: Path, run_prepare: Prepare, messages, monkeypatch) -> None:
    english = contents(run_prepare(corpus))
    messages.take()
    german = contents(run_prepare(corpus, language="de"))
    assert messages.work() == {"TEXT": 6}
    assert all(english[name][1] != german[name][1] for name in english)
    run_prepare(corpus, vocab_size=300)
    trained = [text for text in messages.take() if "BUILDING" in text or "vocabulary" in text]
    assert trained == ["Training a vocabulary of up to 300 tokens on 6 sentences"]
    run_prepare(corpus, trim_silence_db=40.0)
    assert messages.work() == {"AUDIO": 6}
    run_prepare(corpus, max_mel_frames=700, max_text_length=100, min_clip_seconds=0.7)
    assert messages.work() == {}  # rows are the same, only which of them are used differs
    monkeypatch.setattr("myxtts.data.prepare.normalize_fingerprint", lambda: "changed tables")
    run_prepare(corpus)
    assert messages.work() == {"TEXT": 6}
    monkeypatch.setattr("myxtts.data.prepare.DECODE_VERSION", 999)
    run_prepare(corpus)
    assert messages.work() == {"AUDIO": 6}


def test_limits_apply_to_rows_kept_from_looser_ones(make_corpus, run_prepare: Prepare) -> None:
    """Whatever was prepared before, the same settings give the same clips."""
    folder = make_corpus(seconds=3.0)
    run_prepare(folder, max_mel_frames=800)
    with pytest.raises(DatasetError, match="too long"):
        run_prepare(folder, max_mel_frames=100)
    quiet = folder / "wavs" / "clip000.wav"
    pcm = np.concatenate([np.zeros(60_000, np.int16), np.full(20_000, 9000, np.int16)])
    sf.write(quiet, pcm, 22050)
    run_prepare(folder, max_mel_frames=800, trim_silence_db=40.0)
    kept = run_prepare(folder, max_mel_frames=270, trim_silence_db=40.0)  # 3.13 s; the file has 3.6 s
    shutil.rmtree(folder / ".myxtts")
    fresh = run_prepare(folder, max_mel_frames=270, trim_silence_db=40.0)
    assert contents(kept) == contents(fresh)
    assert kept.set_aside == fresh.set_aside


def damage(folder: Path, name: str) -> None:
    path = folder / name
    rewrite(path, flip(3 if name == "meta.json" else path.stat().st_size // 2))


def test_a_prepared_corpus_needs_its_recordings_no_more(corpus: Path, run_prepare: Prepare) -> None:
    prepared = run_prepare(corpus)
    good = contents(prepared)
    shutil.rmtree(corpus)
    assert contents(prepared) == good


@pytest.mark.parametrize("found_by", ["verifying", "reading"])
def test_damage_is_repaired(corpus: Path, run_prepare: Prepare, messages, found_by: str) -> None:
    good = contents(run_prepare(corpus))
    (audio,) = (corpus / ".myxtts").glob("audio-*")
    damage(audio, "data.bin")
    if found_by == "reading":
        prepared = run_prepare(corpus)
        with pytest.raises(DatasetError, match="run the command again"):
            contents(prepared)
    messages.take()
    assert contents(run_prepare(corpus, verify=found_by == "verifying")) == good
    assert messages.work() == {"AUDIO": 1}


def test_a_named_vocabulary_decides_the_ids(corpus: Path, run_prepare: Prepare, tmp_path: Path, messages) -> None:
    own, file = run_prepare(corpus), tmp_path / "vocab.json"
    tokenizer.train(["the boat came in the first window"] * 9, ["en"] * 9, 256).save(file)
    messages.take()
    before = contents(run_prepare(corpus, tokenizer=file))
    assert messages.work() == {}
    own.tokenizer.save(file)  # the same name, other content
    assert contents(run_prepare(corpus, tokenizer=file)) == contents(own) != before


def test_cache_dir(corpus: Path, run_prepare: Prepare, tmp_path: Path, messages) -> None:
    for work in ({"TEXT": 6, "AUDIO": 6}, {}):
        prepared = run_prepare(corpus, cache_dir=tmp_path / "deep" / "caches")
        assert prepared.root.is_relative_to(tmp_path / "deep" / "caches")
        assert messages.work() == work
    assert not (corpus / ".myxtts").exists()
    (tmp_path / "file").touch()
    with pytest.raises(DatasetError, match=r"(?s)Cannot write the cache at .*file.*--cache-dir"):
        run_prepare(corpus, cache_dir=tmp_path / "file")


def test_two_processes_at_once_decode_each_clip_once(make_corpus) -> None:
    folder = make_corpus([f"Sentence number {number} of a longer corpus." for number in range(40)], seconds=0.6)
    command = [sys.executable, "-m", "myxtts.cli", "prepare", "--train-data", str(folder), "--language", "en"]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in "ab"]
    logs = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    counts = [int(line.split()[1]) for log in logs for line in log.splitlines() if line.startswith("Processing")]
    assert counts == [40, 40]  # text and audio, once each in total
    names = {path.name.split("-")[0] for path in (folder / ".myxtts").iterdir()} - {"snapshot"}
    assert names == {"audio", "ids", "lock", "set_aside.csv", "text", "vocabulary"}


# The snapshot of an unchanged corpus.

SETTLED_S = 0.05
"""After this long a snapshot trusts the times of a folder."""


@pytest.fixture
def settled(tmp_path: Path) -> DataSettings:
    """Six clips, prepared, old enough for the times of their folders to be trusted."""
    folder = write_corpus(tmp_path / "corpus")
    time.sleep(SETTLED_S)
    data = DataSettings(train_data=folder, language="en", vocab_size=256)
    prepare(data)
    return data


def opened_from_snapshot(data: DataSettings, monkeypatch: pytest.MonkeyPatch) -> bool:
    return prepare_and_count_reads(data, monkeypatch)[1] == 0


def test_a_snapshot_holds_everything(settled: DataSettings, messages) -> None:
    read = prepare(settled, verify=True)  # verifying reads the corpus itself
    messages.take()
    known = prepare(settled)
    assert messages.take() == ["LOADING CACHE FROM DISK"]
    assert contents(known) == contents(read)
    for field in ("speaker_names", "set_aside", "vocabulary"):
        assert getattr(known, field) == getattr(read, field)
    assert (known.train.names, known.val.names) == (read.train.names, read.val.names)


CHANGES = {
    "text": lambda folder: rewrite(folder / "metadata.csv", lambda text: text.replace(b"quiet", b"noisy", 1)),
    "audio": lambda folder: rewrite(folder / "wavs" / "clip001.wav", flip(1000)),
    "audio removed": lambda folder: (folder / "wavs" / "clip002.wav").unlink(),
    # A file named exactly like the id is preferred to the id with an extension.
    "better candidate": lambda folder: shutil.copy(folder / "wavs" / "clip001.wav", folder / "wavs" / "clip003"),
    "speakers": lambda folder: (folder / "speakers.csv").write_text("id|speaker\nclip000|ann\n"),
    "held out": lambda folder: (folder / "metadata_eval.csv").write_text(f"clip000|{SENTENCES[0]}\n"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_any_change_of_the_corpus_is_seen(
    settled: DataSettings, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    assert settled.train_data
    assert opened_from_snapshot(settled, monkeypatch)
    change(settled.train_data)
    assert not opened_from_snapshot(settled, monkeypatch)
    time.sleep(SETTLED_S)
    prepare(settled)  # by now the folders have come to rest, and a new snapshot replaces the old one
    assert opened_from_snapshot(settled, monkeypatch)


@pytest.mark.parametrize(
    "changed", [{"max_mel_frames": 300}, {"language": "de"}, {"vocab_size": 300}, {"val_fraction": 0.4}]
)
def test_any_change_of_the_settings_is_seen(settled: DataSettings, changed: dict[str, object]) -> None:
    assert prepared_before(settled) is not None
    assert prepared_before(replace(settled, **changed)) is None


def test_a_damaged_snapshot_or_store_only_costs_time(
    settled: DataSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(settled)
    good = contents(prepared)
    (snapshot,) = prepared.root.glob("snapshot-*")
    for at in range(0, (snapshot / "data.bin").stat().st_size, 997):
        rewrite(snapshot / "data.bin", flip(at))
        assert contents(prepare(settled)) == good
    assert opened_from_snapshot(settled, monkeypatch)
    for name in ("meta.json", "index.npy", "data.bin"):
        damage(snapshot, name)
        assert not opened_from_snapshot(settled, monkeypatch)
        assert opened_from_snapshot(settled, monkeypatch)
    (ids,) = prepared.root.glob("ids-*")
    (ids / "index.npy").unlink()
    assert not opened_from_snapshot(settled, monkeypatch)
    assert contents(prepare(settled)) == good


def test_texts_next_to_recordings_are_watched(settled: DataSettings) -> None:
    assert settled.train_data
    for line in (settled.train_data / "metadata.csv").read_text().splitlines():
        name, text = line.split("|")
        (settled.train_data / "wavs" / f"{name}.txt").write_text(text)
    (settled.train_data / "metadata.csv").unlink()
    time.sleep(SETTLED_S)
    before = contents(prepare(settled))
    assert len(before) == 6 and prepared_before(settled)
    rewrite(settled.train_data / "wavs" / "clip000.txt", lambda text: text.replace(b"quiet", b"noisy"))
    assert prepared_before(settled) is None
    assert contents(prepare(settled))["wavs/clip000.wav"] != before["wavs/clip000.wav"]


def test_a_missing_file_that_appears_is_seen(settled: DataSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the time of its folder is set back, as `cp -a` and `rsync -a` do after copying the files."""
    assert settled.train_data
    wavs = settled.train_data / "wavs"
    content = (wavs / "clip002.wav").read_bytes()
    (wavs / "clip002.wav").unlink()
    time.sleep(SETTLED_S)
    before = wavs.stat()
    assert [item.reason for item in prepare(settled).set_aside] == ["missing file"]
    assert opened_from_snapshot(settled, monkeypatch)
    (wavs / "clip002.wav").write_bytes(content)
    os.utime(wavs, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not prepare(settled).set_aside


def test_a_link_whose_target_appears_is_seen(
    settled: DataSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is mounted later: nothing changes in the corpus itself."""
    assert settled.train_data
    link, away = settled.train_data / "wavs" / "clip002.wav", tmp_path / "elsewhere.wav"
    link.rename(tmp_path / "unmounted.wav")
    link.symlink_to(away)
    time.sleep(SETTLED_S)
    assert [item.id for item in prepare(settled).set_aside] == ["clip002"]
    assert opened_from_snapshot(settled, monkeypatch)
    (tmp_path / "unmounted.wav").rename(away)
    assert prepare(settled).set_aside == []


def test_metadata_changed_while_a_corpus_is_read(corpus: Path, run_prepare: Prepare, monkeypatch) -> None:
    metadata = corpus / "metadata.csv"
    first, second = metadata.read_text(), metadata.read_text().replace("quiet", "silent")
    time.sleep(SETTLED_S)

    def change_and_read(folder: Path) -> Corpus:
        metadata.write_text(second)
        return read_corpus(folder)

    with monkeypatch.context() as patched:
        patched.setattr("myxtts.data.prepare.read_corpus", change_and_read)
        changed = run_prepare(corpus)
    metadata.write_text(first)
    assert contents(run_prepare(corpus)) != contents(changed)


def test_the_list_of_clips_set_aside_belongs_to_the_settings(
    settled: DataSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict, loose = replace(settled, min_clip_seconds=1.5), settled
    counts = []
    for data in (strict, loose, strict, loose):
        prepared = prepare(data)
        counts.append(len(prepared.set_aside))
        assert len((prepared.root / "set_aside.csv").read_text().splitlines()) == 1 + counts[-1]
    assert opened_from_snapshot(strict, monkeypatch)
    assert counts[0] == counts[2] > counts[1] == counts[3] == 0
