"""Sharded corpora: the same clips as one folder, added to without rewriting, killed, divided, damaged, remote."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf
from conftest import SENTENCES, contents, make_voice, write_corpus
from s3_fixtures import LoopbackStore, s3
from shard_fixtures import SMALL_SHARDS, DeadlyUnit, settings, shard, tree
from training_fixtures import Clips, arguments, losses

from myxtts import evaluation
from myxtts.cli import main
from myxtts.config import CorpusSource
from myxtts.data import jobs, shards, sources
from myxtts.data.clips import PreparedCorpus
from myxtts.data.corpus import choose_held_out, choose_in_shards
from myxtts.data.jobs import Job, JobOptions, ShardJob, Supervisor, share_of
from myxtts.data.locations import Entry, Location
from myxtts.data.prepare import prepare, prepared_before
from myxtts.data.shards import CLIP_COLUMNS, IDS_COLUMNS, Package, ShardSpec, columns_bytes
from myxtts.data.store import CacheDamaged
from myxtts.errors import ConfigError, DatasetError

__all__ = ["s3"]
pytest_plugins = ["training_fixtures"]


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SLICE_CLIPS", 2)


def opened(out: Path | str, **values: object) -> PreparedCorpus:
    return prepare(settings(Path(out), **values))


@pytest.fixture
def spoken(tmp_path: Path) -> Path:
    """Fifteen clips of three speakers in two languages; three more cannot be used."""
    folder = write_corpus(tmp_path / "spoken", [])
    lines = ["audio_file|text|speaker_name|language"]
    for number, text in enumerate((*SENTENCES, "Too short.", "Absent.", "   ")):
        lines.append(f"c{number}|{text}|speaker {number % 3}|{'de' if number % 4 == 0 else 'en'}")
        if number != len(SENTENCES) + 1:
            seconds = 0.2 if number == len(SENTENCES) else 0.6 + number / 20
            sf.write(folder / "wavs" / f"c{number}.wav", make_voice(seconds, seed=number), 22050, subtype="PCM_16")
    (folder / "metadata.csv").write_text("\n".join(lines))
    return folder


def test_a_sharded_corpus_holds_what_its_folder_holds(spoken: Path, tmp_path: Path) -> None:
    whole = opened(spoken)
    made = shard(spoken, tmp_path / "out")
    assert made.made >= 3 and made.waiting == 0
    parts = opened(tmp_path / "out")
    assert contents(parts) == contents(whole)
    for field in ("speaker_names", "vocabulary", "max_mel_frames"):
        assert getattr(parts, field) == getattr(whole, field)
    assert sorted(parts.val.names) == sorted(whole.val.names)
    assert {item[:2] for item in parts.set_aside if "clip " not in item.id} | {("c15", "too short")} == {
        item[:2] for item in whole.set_aside
    }
    assert [item.reason for item in parts.set_aside if "clip " in item.id] == ["too short"]
    assert parts.train.shards is not None and len(set(parts.train.shards.tolist())) == made.made
    batch = np.zeros((4, 40_000), np.int16)
    rows = parts.train.audio_rows[[5, 0, 3, 5]]
    parts.train.audio.gather(rows, batch)
    assert [batch[at, :1000].tobytes() for at in range(4)] == [
        parts.train.audio[row][:1000].tobytes() for row in rows.tolist()
    ]
    assert prepared_before(settings(tmp_path / "out")) is not None
    assert columns_bytes(CLIP_COLUMNS) + columns_bytes(IDS_COLUMNS) <= 64


@pytest.mark.parametrize("most", [100, 4])
def test_held_out_sentences_of_a_sharded_corpus(
    most: int, spoken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "MOST_CLIPS", most)
    shard(spoken, tmp_path / "out")
    whole, parts = (
        evaluation.held_out_sentences(opened(folder, val_fraction=0.4), settings(folder), 4)
        for folder in (spoken, tmp_path / "out")
    )
    assert {(one.text, one.speaker, one.clip.name) for one in parts} <= {
        (one.text, one.speaker, one.clip.name) for one in whole
    }
    assert len(parts) == (len(whole) if most == 100 else 4)


def index_of(num_shards: int, each: int = 200) -> dict[str, np.ndarray[Any, Any]]:
    """Columns of a corpus in which each shard has two speakers of its own, and the last one a language too."""
    random, number = np.random.default_rng(7), num_shards * each
    shards = np.repeat(np.arange(num_shards, dtype=np.int32), each)
    speakers = 2 * shards + (np.arange(number) % 2).astype(np.int32)
    languages = np.where(shards == num_shards - 1, 3, shards % 2).astype(np.int8)
    draws = random.integers(0, 2**64, number, dtype=np.uint64)
    none = np.zeros(number, np.int8)
    return {"draw": draws, "shard": shards, "speaker": speakers, "language": languages, "held_out": none}


def test_of_many_shards_a_few_hold_clips_out() -> None:
    index, data = index_of(100), settings(Path())
    chosen = choose_in_shards(index, data)
    taken = np.bincount(index["shard"][chosen], minlength=100)
    assert (taken > 0).sum() == 16 and 20 < taken.max() < 80, "about an eighth of the clips of each"
    assert len(np.unique(index["language"][chosen])) == 3 and len(np.unique(index["speaker"][chosen])) == 32
    assert chosen.sum() == pytest.approx(0.02 * 100 * 200, rel=0.2)
    most = choose_in_shards(index, replace(data, val_fraction=0.5))
    assert (most >= chosen).all() and np.bincount(index["shard"][most]).max() < 0.35 * 200
    index["draw"][index["shard"] == 99] >>= np.uint64(4)  # every clip of this shard would be held out
    assert choose_in_shards(index, data).any()
    assert not choose_in_shards(index, data)[index["shard"] == 99].any()


def test_a_sentence_is_on_one_side_of_a_corpus_of_many_shards() -> None:
    index, data = index_of(40), settings(Path(), val_fraction=0.1)
    index["draw"][::3] = np.resize(index["draw"][:2000:3], len(index["draw"][::3]))  # said in several shards
    chosen = choose_in_shards(index, data)
    assert chosen.any() and len(np.unique(index["shard"][chosen])) <= 16
    assert not np.isin(index["draw"][chosen], index["draw"][~chosen]).any()
    index["draw"][:] = np.resize(index["draw"][:150], 8000)  # in every shard
    chosen = choose_in_shards(index, data)
    assert len(np.unique(index["shard"][chosen])) == 40
    assert not np.isin(index["draw"][chosen], index["draw"][~chosen]).any()


def test_a_shard_more_leaves_nearly_all_clips_on_their_side() -> None:
    """A model that goes on from one of the smaller corpus has trained on what was not held out there."""
    index, data = index_of(101), settings(Path())
    before = choose_in_shards({name: column[:-200] for name, column in index.items()}, data)
    after = choose_in_shards(index, data)[:-200]
    assert (after & ~before).sum() < 0.15 * after.sum()


def test_few_shards_hold_out_what_they_did() -> None:
    index, data = index_of(16), settings(Path())
    before = choose_held_out(index["held_out"] != 0, lambda: index["draw"], data)
    assert (choose_in_shards(index, data) == before).all() and before.any()
    index = index_of(40)
    assert not choose_in_shards(index, replace(data, val_fraction=0)).any()
    assert not choose_in_shards(index, replace(data, val_data=Path("other"))).any()
    index["held_out"][::50] = 1
    assert (np.flatnonzero(choose_in_shards(index, data)) == np.arange(0, 8000, 50)).all()


@pytest.mark.usefixtures("small")
def test_validating_reads_few_shards_and_a_run_that_read_all_is_not_continued(
    clips: Clips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, flags = tmp_path / "out", "--stages gpt --val-fraction 0.4 --max-steps"
    made = shard(clips(14), out, JobOptions(shard_mb=0.2)).made
    whole = opened(out, val_fraction=0.4).val
    assert main(arguments(tmp_path / "run", out, f"{flags} 1")) == 0
    monkeypatch.setattr("myxtts.data.corpus.HELD_OUT_SHARDS", 1)
    monkeypatch.setattr("myxtts.data.corpus.MOST_OF_A_SHARD", 0.6)  # they have few clips
    few = opened(out, val_fraction=0.4).val
    assert whole.shards is not None and few.shards is not None and made == 4
    assert 1 == len(set(few.shards.tolist())) < len(set(whole.shards.tolist()))
    assert main(arguments(tmp_path / "run", out, f"{flags} 2")) == 2
    assert "If none were, other clips are held out now" in capsys.readouterr().err


def test_a_second_run_does_nothing_and_new_recordings_add_shards(tmp_path: Path) -> None:
    corpus, out = write_corpus(tmp_path / "a", SENTENCES[:8]), tmp_path / "out"
    shard(corpus, out)
    before = tree(out)
    assert shard(corpus, out).made == 0 and tree(out) == before
    times = {path: path.stat().st_mtime_ns for path in out.glob("shards/*/*")}
    kept = opened(out)
    made = shard(write_corpus(tmp_path / "b", SENTENCES[8:]), out)
    after = tree(out)
    assert made.made >= 2 and {path: path.stat().st_mtime_ns for path in times} == times
    rewritten = {name for name in before if after.get(name) != before[name]}
    assert {name.partition("-")[0].partition("/")[0] for name in rewritten} <= {"corpus.json", "index", "ids"}
    assert not [name for name in rewritten if "/index-" not in name and name.startswith("ids")]
    now = opened(out)
    assert now.vocabulary == kept.vocabulary and len(now.train) + len(now.val) == len(SENTENCES)
    assert {name for name in now.train.names if name.startswith("b/")}


def test_parts_that_another_source_has_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus, out = write_corpus(tmp_path / "a", SENTENCES[:4]), tmp_path / "out"
    shard(corpus, out)
    corpus.rename(tmp_path / "moved")
    assert shard(tmp_path / "moved", out).made == 0
    assert re.search(r"(\d) of \1 parts of .*moved, such as #/clip000, are in the corpus", caplog.text)


def test_recordings_that_two_sources_have_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "out"
    shard(write_corpus(tmp_path / "a", SENTENCES[:8], seconds=0.9), out)
    assert "two sources" not in caplog.text
    again = write_corpus(tmp_path / "b", SENTENCES[10:13], seconds=0.9)
    write_corpus(again, SENTENCES[13:], first=20, seconds=1.0)
    shard(again, out)
    told = rf"3 clips \(0.00 h\) are in two sources, such as b/clip00\d, most of {tmp_path}/a and {again}: each"
    assert re.search(told, caplog.text)
    assert len(opened(out, val_fraction=0).train) == 13


def test_only_the_shard_of_a_changed_recording_is_replaced(tmp_path: Path) -> None:
    corpus, out = write_corpus(tmp_path / "a", SENTENCES), tmp_path / "out"
    made = shard(corpus, out)
    before = {path.name for path in out.glob("shards/*") if path.is_dir()}
    sf.write(corpus / "wavs" / "clip003.wav", make_voice(1.7, seed=99), 22050, subtype="PCM_16")
    again = shard(corpus, out)
    assert again.made == 1 and again.unnamed > 1.0 * 22050 * 2 and made.unnamed == 0
    after = {path.name for path in out.glob("shards/*") if path.is_dir()}
    assert before < after and len(after) == made.made + 1
    assert contents(opened(out)) == contents(opened(corpus))
    assert shard(corpus, out, replace(SMALL_SHARDS, prune=True)).unnamed == 0
    after = {path.name for path in out.glob("shards/*") if path.is_dir()}
    assert len(before & after) == len(after) - 1 == made.made - 1
    assert contents(opened(out)) == contents(opened(corpus))
    shard(corpus, tmp_path / "new")
    assert len(list(out.glob("index-*"))) == 1 and len(tree(out)) == len(tree(tmp_path / "new"))


def run_inline(_: int, todo: Sequence[Job]) -> Iterator[None]:
    """Run jobs in this process, which knows the address of the loopback store."""
    for job in todo:
        job.run(lambda _: None, set())
        yield None


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("remote", [False, True])
def test_what_a_corpus_no_longer_names_is_pruned_when_nobody_else_adds(
    remote: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jobs, "run_here", run_inline)
    folder = write_corpus(tmp_path / "a", SENTENCES[:4])
    out = Path("s3://bucket/corpus" if remote else tmp_path / "out")
    place = Location.parse("s3://bucket/corpus" if remote else out)

    def files() -> dict[str, int]:
        found = {entry.location.path.removeprefix(f"{place.path}/"): entry.size for entry in place.list()}
        return {name: size for name, size in found.items() if "/" in name}

    def refuse(_: Location) -> list[Entry]:
        raise DatasetError("The store refuses access")

    def unnamed(prune: bool = False) -> int:
        return shard(folder, out, replace(SMALL_SHARDS, prune=prune)).unnamed

    assert unnamed() == 0
    before = files()
    sf.write(folder / "wavs" / "clip003.wav", make_voice(1.7, seed=99), 22050, subtype="PCM_16")
    assert (kept := unnamed()) > 0.6 * 22050 * 2 and before.items() <= files().items()
    with jobs._held(place):
        assert unnamed(prune=True) == kept and before.items() <= files().items()
        assert "Nothing is deleted: another prepare adds to the corpus" in caplog.text
    with monkeypatch.context() as refusing:
        refusing.setattr(Location, "list", refuse)
        assert unnamed() == 0, "who adds to a store may not be allowed to list it"
        with pytest.raises(DatasetError, match="refuses"):
            unnamed(prune=True)
    reader = opened(str(out), val_fraction=0, cache_dir=tmp_path / "cache").train
    assert unnamed(prune=True) == 0
    left = files()
    assert sum(before[name] for name in before.keys() - left.keys()) == kept
    assert not [name for name in left if name.startswith("preparing")]
    assert len([reader.audio[row] for row in reader.audio_rows.tolist()]) == 4
    assert unnamed(prune=True) == 0 and files() == left


def test_prepare_says_what_it_could_delete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder, out = write_corpus(tmp_path / "a", SENTENCES[:3]), tmp_path / "out"

    def said(*flags: str) -> str:
        assert main(["prepare", "--train-data", str(folder), "--out", str(out), *flags]) == 0
        return "".join(capsys.readouterr())

    first = said()
    assert "--prune" not in first and first.endswith(f"Ready: corpus in {out}\n")
    sf.write(folder / "wavs" / "clip001.wav", make_voice(1.7, seed=99), 22050, subtype="PCM_16")
    assert re.search(
        r"does not name [\d.]+ MB: --prune deletes them\nRuns that began earlier may read them", said()
    )
    with jobs._held(Location(str(out))):
        assert "--prune" not in said("--prune") and "Nothing is deleted" in caplog.text
    assert "--prune" not in said("--prune")


def test_a_corpus_is_not_made_among_other_files(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "a", SENTENCES[:3])
    for name in ("run/settings.yaml", "many/1", "many/2", "many/3", "many/4", "many/5"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    before = sorted(tmp_path.rglob("*"))
    for name, held in (("run", "settings.yaml"), ("many", "1, 2, 3, 4, …")):
        with pytest.raises(ConfigError) as refused:
            shard(folder, tmp_path / name)
        expected = f"holds no corpus but {held}. Name an empty folder: --out {tmp_path / name}/corpus"
        assert expected in str(refused.value)
    assert sorted(tmp_path.rglob("*")) == before
    assert shard(folder, tmp_path / "run" / "corpus").made
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".hidden").touch()
    assert shard(folder, tmp_path / "mine").made
    (tmp_path / "mine" / "README").touch()
    assert shard(folder, tmp_path / "mine").made == 0
    (tmp_path / "mine" / "corpus.json").unlink()
    assert shard(folder, tmp_path / "mine").waiting == 0, "it was begun"
    (tmp_path / "mine" / "README").unlink()
    for name in ("corpus.json", ".held"):
        (tmp_path / "mine" / name).unlink()
    assert shard(folder, tmp_path / "mine").made == 0, "of an older version"


def test_options_of_a_source_name_its_speakers(
    spoken: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nobody, (one, other) = write_corpus(tmp_path / "a", SENTENCES[:4]), (tmp_path / "one", tmp_path / "other")

    def speakers(out: Path, *sources: CorpusSource) -> set[str]:
        shard(nobody, out, train_data=sources)
        prepared = opened(out, val_fraction=0)
        return {prepared.speaker_names[number] for number in prepared.train.speakers}

    named = CorpusSource(spoken, speakers="x", single_speaker=True)
    assert speakers(one, CorpusSource(nobody, single_speaker=True)) == {"a"}
    both = speakers(one, CorpusSource(nobody, speakers="lj", single_speaker=True), named)
    assert both == {"a", "x/speaker 0", "x/speaker 1", "x/speaker 2"} and "no speaker" not in caplog.text
    single = CorpusSource(nobody, speakers="lj", single_speaker=True)
    assert speakers(tmp_path / "lj", single) == {"lj"} and "no speaker" not in caplog.text
    assert speakers(other, CorpusSource(nobody)) == {""} and "no speaker" not in caplog.text
    for source in (single, CorpusSource(nobody, speakers="lj")):
        caplog.clear()
        assert speakers(other, source) == {""}
        assert "4 clips of" in caplog.text and f"corpus of {nobody}:single-speaker,speakers=lj" in caplog.text


def test_prune_needs_no_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = write_corpus(tmp_path / "a", SENTENCES[:3]), tmp_path / "out"
    shard(folder, out)
    sf.write(folder / "wavs" / "clip001.wav", make_voice(1.7, seed=99), 22050, subtype="PCM_16")
    assert shard(folder, out).unnamed
    shutil.rmtree(folder)
    prune = ["prepare", "--prune", "--out"]
    with jobs._held(Location(str(out))):
        before = tree(out)
        assert main([*prune, str(out)]) == 0 and tree(out) == before
    assert main([*prune, str(out)]) == 0 and len(tree(out)) < len(before)
    before = tree(out)
    assert main([*prune, str(out)]) == 0 and tree(out) == before
    assert len(opened(out, val_fraction=0).train) == 3
    capsys.readouterr()
    (tmp_path / "other").mkdir()
    assert main([*prune, str(tmp_path / "other")]) == 2 and "is no finished corpus" in capsys.readouterr().err
    assert not list((tmp_path / "other").iterdir())


def test_a_corpus_on_nfs_is_locked(clips: Clips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There `flock` needs a file that may be read to share it, and one that may be written to have it alone."""
    lock = jobs.fcntl.flock

    def lock_on_nfs(file: Any, how: int) -> None:
        if isinstance(file, int) or how & jobs.fcntl.LOCK_UN:
            lock(file, how)
        elif not (file.readable() if how & jobs.fcntl.LOCK_SH else file.writable()):
            raise OSError(errno.EBADF, "Bad file descriptor")
        else:
            lock(file, how)

    monkeypatch.setattr(jobs.fcntl, "flock", lock_on_nfs)
    assert shard(clips(4), tmp_path / "out", replace(SMALL_SHARDS, prune=True)).made


def test_only_packages_are_pruned(clips: Clips, tmp_path: Path) -> None:
    out, names = tmp_path / "out", [f"{kind}{'0' * 20}" for kind in ("shards/", "index-", "")]
    shard(clips(4), out)
    for name in names:
        (out / name).mkdir()
        (out / name / "notes.txt").write_text("mine")
    assert shard(clips(4), out, replace(SMALL_SHARDS, prune=True)).unnamed == 0
    assert [(out / name).exists() for name in names] == [False, False, True]


def test_what_a_folder_is_decides_what_can_be_done_with_it(tmp_path: Path) -> None:
    corpus, out = write_corpus(tmp_path / "a", SENTENCES[:4]), tmp_path / "out"
    with pytest.raises(ConfigError, match="holds recordings, and later starts would no longer see them"):
        shard(corpus, corpus)
    with pytest.raises(ConfigError, match="web servers are only read"):
        shard(corpus, Path("https://example.invalid/corpus"))
    with pytest.raises(ConfigError, match="ftp://a/b is no location"):
        shard(corpus, Path("ftp://a/b"))
    shard(corpus, out)
    set_aside = opened(out).root / "set_aside.csv"
    assert set_aside.is_file(), "messages name it"
    with pytest.raises(DatasetError, match="is a sharded corpus: train on it"):
        shard(out, tmp_path / "other")
    (out / "corpus.json").write_text("{}")
    with pytest.raises(DatasetError, match=rf"Remove {out}/corpus.json and run"):
        opened(out)
    (out / "corpus.json").unlink()
    with pytest.raises(DatasetError, match=r"not finished: it has no corpus\.json"):
        opened(out)


PREPARE = """
import sys
from pathlib import Path
from myxtts.data import sources
sources.SLICE_CLIPS = 2
from shard_fixtures import shard, JobOptions
if __name__ == "__main__":
    share = (int(sys.argv[3]), int(sys.argv[4]))
    shard(Path(sys.argv[1]), Path(sys.argv[2]), JobOptions(share=share, shard_mb=0.2))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts to prepare a corpus in a process of its own."""
    script, here = tmp_path / "prepare_it.py", Path(__file__).parent
    script.write_text(PREPARE)
    paths = os.pathsep.join([str(here), str(here.parent)])
    running: list[subprocess.Popen[bytes]] = []

    def begin(corpus: Path, out: Path, first: int = 0, step: int = 1) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(script), str(corpus), str(out), str(first), str(step)]
        running.append(subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_a_killed_preparation_continues_to_the_same_bytes(
    kills: int, tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    corpus, choice = write_corpus(tmp_path / "a", SENTENCES), random.Random(5)
    shard(corpus, tmp_path / "whole")
    for attempt in range(kills):
        out = tmp_path / f"killed{attempt}"
        process, most = start(corpus, out), choice.random() * 5
        while not list(out.glob("shards/making-*")) and process.poll() is None:
            time.sleep(0.002)
        time.sleep(most / 20)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.05)  # its workers end with it
        (out / ".vocab.json.1").write_text("cut off")  # as a kill leaves it that comes at this moment
        shard(corpus, out)
        assert tree(out) == tree(tmp_path / "whole")


def test_processes_that_divide_the_work_make_the_same_corpus(
    tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    corpus = write_corpus(tmp_path / "a", SENTENCES)
    shard(corpus, tmp_path / "whole")
    processes = [start(corpus, tmp_path / "out", number, 2) for number in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_share_waits_for_the_others_and_comes_from_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, out = write_corpus(tmp_path / "a", SENTENCES[:8]), tmp_path / "out"
    first = shard(corpus, out, JobOptions(share=(0, 2), shard_mb=0.1))
    assert first.waiting and not (out / "corpus.json").exists()
    assert shard(corpus, out, JobOptions(share=(1, 2), shard_mb=0.1)).waiting == 0
    assert share_of(None) == (0, 1) and share_of("3/8") == (3, 8)
    monkeypatch.setenv("SLURM_PROCID", "2")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert share_of(None) == (2, 4)
    for wrong in ("4/4", "1", "a/b"):
        with pytest.raises(ConfigError, match="expected K/N"):
            share_of(wrong)


def test_a_damaged_shard_is_named_and_made_anew(tmp_path: Path) -> None:
    corpus, out = write_corpus(tmp_path / "a", SENTENCES), tmp_path / "out"
    shard(corpus, out)
    before = tree(out)
    damaged = max(out.glob("shards/*/audio.bin"), key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[5] ^= 1
    damaged.write_bytes(content)
    clips = opened(out, val_fraction=0).train
    with pytest.raises(CacheDamaged, match=rf"{damaged.parent.name}.*\n.*myxtts prepare --out {out}"):
        [clips.audio[row] for row in clips.audio_rows.tolist()]
    assert shard(corpus, out).made == 1 and tree(out) == before
    clips = opened(out, val_fraction=0).train
    damaged.unlink()
    with pytest.raises(CacheDamaged, match=rf"{damaged.parent.name}.*No such file.*was pruned"):
        [clips.audio[row] for row in clips.audio_rows.tolist()]
    assert shard(corpus, out).made == 1 and tree(out) == before
    for spoil in (damaged.unlink, lambda: damaged.write_bytes(content)):
        spoil()
        with pytest.raises(CacheDamaged, match="1 shards do not match"):
            prepare(settings(out), verify=True)
        (damaged.parent / "damaged").unlink()
    index = next(out.glob("index-*/clips.npy"))
    index.unlink()
    with pytest.raises(CacheDamaged, match=rf"Remove {index.parent}"):
        opened(out)
    shutil.rmtree(index.parent)
    assert shard(corpus, out).made == 0 and tree(out).keys() == before.keys()
    shutil.rmtree(damaged.parent)
    with pytest.raises(DatasetError, match="the sources given lack its recordings"):
        shard(write_corpus(tmp_path / "b", SENTENCES[:2]), out)
    assert shard(corpus, out).made == 1 and tree(out) == before


def test_another_vocabulary_is_made_in_the_cache(tmp_path: Path) -> None:
    corpus, out = write_corpus(tmp_path / "a", SENTENCES[:6]), tmp_path / "out"
    shard(corpus, out)
    before, other = tree(out), tmp_path / "vocab.json"
    other.write_text(opened(write_corpus(tmp_path / "b", SENTENCES[6:])).vocabulary)
    given = {"tokenizer": other, "cache_dir": tmp_path / "cache"}
    assert prepared_before(settings(out, **given)) is None
    assert contents(opened(out, **given)) == contents(opened(corpus, **given))
    assert tree(out) == before and prepared_before(settings(out, **given)) is not None
    with pytest.raises(ConfigError, match="has a vocabulary, which stays"):
        shard(write_corpus(tmp_path / "c", SENTENCES[:1]), out, tokenizer=other)
    with pytest.raises(DatasetError, match="prepared with trim_silence_db 0"):
        opened(out, trim_silence_db=40.0)


def test_a_sharded_corpus_is_mixed_with_a_folder(tmp_path: Path) -> None:
    one, two = write_corpus(tmp_path / "one", SENTENCES[:6]), write_corpus(tmp_path / "two", SENTENCES[6:10])
    shard(one, tmp_path / "out")
    both = (CorpusSource(tmp_path / "out"), CorpusSource(two, weight=2.0))
    mixed = prepare(settings(Path(), train_data=both, val_fraction=0, tokenizer=tmp_path / "out"))
    assert set(mixed.train.names) >= {"out/clip000", "two/clip003"} and len(mixed.train) == 10
    shards_of = mixed.train.shards
    assert shards_of is not None and len(set(shards_of[mixed.train.corpora == 1].tolist())) == 1
    assert not set(shards_of[mixed.train.corpora == 0].tolist()) & set(
        shards_of[mixed.train.corpora == 1].tolist()
    )
    batch = np.zeros((10, 60_000), np.int16)
    mixed.train.audio.gather(mixed.train.audio_rows, batch)
    assert (batch.any(axis=1)).all()


def test_a_recording_that_kills_its_process_is_set_aside(tmp_path: Path) -> None:
    sf.write(tmp_path / "a.wav", make_voice(1.0), 22050)
    options = shards.DecodeOptions(100_000, 0)
    spec = ShardSpec((DeadlyUnit(tmp_path / "a.wav"),), 0, "", "", None, options, False)
    (tmp_path / "out").mkdir()
    job = ShardJob(spec, Location(str(tmp_path / "out" / spec.name)))
    Supervisor().run(job)
    made = Package.find(job.target)
    assert made is not None and made.facts["clips"] == 3
    assert [(item.id, item.reason) for item in made.set_aside()] == [("r2", "crashed the decoder")]


def test_a_remote_corpus_is_written_and_read(
    s3: LoopbackStore, tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    corpus = write_corpus(tmp_path / "a", SENTENCES[:8])
    assert start(corpus, Path("s3://bucket/corpus")).wait() == 0
    last_of = {key.rpartition("/")[0]: key for key in s3.objects}
    assert all(key.endswith("meta.json") for folder, key in last_of.items() if "/shards/" in folder)
    shard(corpus, tmp_path / "out")
    assert {f"bucket/corpus/{name}": content for name, content in tree(tmp_path / "out").items()} == s3.objects
    cache = tmp_path / "cache"
    remote = opened("s3:/bucket/corpus", cache_dir=cache)  # as a path of the settings spells it
    assert contents(remote) == contents(opened(corpus))
    for cached in cache.glob("shards/*"):
        cached.write_bytes(bytes(cached.stat().st_size))
    assert contents(opened("s3://bucket/corpus", cache_dir=cache)) == contents(opened(corpus)), "fetched again"
    with pytest.raises(DatasetError, match="is no sharded corpus"):
        opened("s3://bucket/nothing")


@pytest.mark.parametrize("name", ["index", "shards"])
def test_a_corpus_that_names_other_folders_is_refused(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shard(write_corpus(tmp_path / "a", SENTENCES[:4]), out)
    body = json.loads((out / "corpus.json").read_bytes())["body"]
    if name == "index":
        body["index"] = "../a"
    else:
        body["shards"][0]["name"] = "../../a"
    (out / "corpus.json").write_bytes(shards.checked_json(body))
    with pytest.raises(DatasetError, match="hexadecimal digits"):
        opened(out)


def test_what_another_process_makes_in_the_same_corpus_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with shards.package_under_way(Location(str(out / "shards" / "x"))) as folder:
        shard(write_corpus(tmp_path / "a", SENTENCES[:4]), out)
        assert folder.exists()


def test_what_cannot_be_made_is_refused_and_leaves_nothing(tmp_path: Path, small_disk: Path) -> None:
    corpus = write_corpus(tmp_path / "a", SENTENCES, seconds=5.0)
    with pytest.raises(DatasetError, match=r"No room(.|\n)*with --out CORPUS"):
        shard(corpus, small_disk / "out")
    assert not list((small_disk / "out").rglob("making-*")) and not (small_disk / "out" / "corpus.json").exists()
    with pytest.raises(ConfigError, match="weights are for training: --train-data CORPUS:2"):
        shard(corpus, tmp_path / "out", train_data=(CorpusSource(corpus, weight=2.0),))
    with pytest.raises(ConfigError, match="a signed URL opens one file") as refused:
        opened("https://store/corpus?X-Amz-Signature=secret")
    assert "secret" not in str(refused.value)


@pytest.mark.usefixtures("small")
def test_training_from_a_sharded_corpus(
    clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--language", "en", "--vocab-size", "256", "--num-workers", "1"]
    out = tmp_path / "out"
    assert main(["prepare", "--train-data", str(clips(4)), "--out", str(out), "--shard-mb", "0.01", *flags]) == 0
    shown = capsys.readouterr().out
    assert "shards made" in shown and "training clips" in shown
    assert main(["check", "--train-data", str(out), *flags]) in (0, 1)
    assert "The corpus cannot be read" not in capsys.readouterr().out
    assert main(arguments(tmp_path / "run", out, "--stages gpt --max-steps 2")) == 0
    with monkeypatch.context() as without_texts:
        without_texts.delattr(shards, "read_lines")
        assert main(["profile", "--data-only", "--num-batches", "2", *arguments(tmp_path / "p", out)[1:]]) == 0
    next(out.glob("index-*/clips.npy")).unlink()
    assert main(["check", "--train-data", str(out), *flags]) == 1
    assert "The corpus cannot be read" in capsys.readouterr().out
    assert main(["prepare", "--train-data", str(clips(4)), "--shard", "0/2"]) == 2
    assert main(["prepare", "--train-data", str(clips(4)), "--out", str(out), "--val-data", str(clips(3))]) == 2


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.usefixtures("small")
def test_a_run_speaks_in_the_voice_of_a_clip_of_a_shard(
    is_mixed: bool, clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard(clips(4), tmp_path / "out")
    more = f"--train-data {clips(3)}" if is_mixed else ""
    assert main(arguments(tmp_path / "run", tmp_path / "out", f"--stages dvae,gpt --max-steps 1 {more}")) == 0
    shown, _ = capsys.readouterr()
    assert "No sample was spoken" not in shown
    assert f"in the voice of {Path('run/reference.wav')}" in shown and f"{SENTENCES[1][:20]}'" in shown
    spoken, rate = sf.read(tmp_path / "run" / "sample.wav")
    assert rate == 24000 and abs(spoken).max() > 0
    used, own = (sf.read(path)[0] for path in (tmp_path / "run/reference.wav", clips(4) / "wavs/clip001.wav"))
    assert abs(used - own).max() < 1e-4


@pytest.mark.usefixtures("small", "s3")
def test_training_from_a_remote_corpus(
    clips: Clips, tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    assert start(clips(4), Path("s3://bucket/corpus")).wait() == 0
    given = f"--stages gpt --max-steps 2 --cache-dir {tmp_path / 'cache'}"
    assert main(arguments(tmp_path / "remote", Path("s3://bucket/corpus"), given)) == 0
    shard(clips(4), tmp_path / "out")
    assert main(arguments(tmp_path / "local", tmp_path / "out", "--stages gpt --max-steps 2")) == 0
    assert losses(tmp_path / "remote") == losses(tmp_path / "local")
