"""The cache: right or absent, never stale; built once by whoever comes first; only what changed is redone."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf

from myxtts.data import store
from myxtts.data.clips import PreparedCorpus
from myxtts.data.corpus import Corpus, read_corpus
from myxtts.data.prepare import load_snapshot
from myxtts.data.store import (
    STORES_KEPT,
    Store,
    StoreSpec,
    StoreWriter,
    build_store,
    cache_root,
    identity,
    open_store,
)
from myxtts.errors import DatasetError
from myxtts.text import tokenizer

Prepare = Callable[..., PreparedCorpus]


def spec(*sources: int, recipe: int = 1, limit: int = 1, kind: str = "audio") -> StoreSpec:
    return StoreSpec(kind, np.int16, np.array(sources, np.uint64), {"recipe": recipe}, {"limit": limit})


class Filler:
    """Makes row = [source] and remembers which rows it was asked for."""

    def __init__(self, wanted: StoreSpec, refuse: int | None = None) -> None:
        self.wanted, self.refuse = wanted, refuse
        self.made: list[int] = []

    def __call__(self, writer: StoreWriter, rows: list[int]) -> None:
        for row in rows:
            source = int(self.wanted.sources[row])
            self.made.append(source)
            if source == self.refuse:
                writer.set_aside(row, "refused", "by the test")
            else:
                writer.append([row], [np.array([source], np.int16)], source % 5)


def build(root: Path, wanted: StoreSpec, **options: int) -> tuple[Store, list[int]]:
    fill = Filler(wanted, **options)
    return build_store(root, wanted, fill), fill.made


def values(store: Store) -> list[list[int]]:
    return [store[row].tolist() for row in range(len(store))]


def test_build_then_open(tmp_path: Path) -> None:
    assert open_store(tmp_path / "root", spec(4, 9)) is None
    store, made = build(tmp_path / "root", spec(4, 9))
    assert made == [4, 9]
    opened = open_store(tmp_path / "root", spec(4, 9))
    assert opened is not None
    assert values(store) == values(opened) == [[4], [9]]
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == [spec(4, 9).folder_name, "lock"]
    built_at = store.folder.stat().st_ino
    again, made = build(tmp_path / "root", spec(4, 9))  # as after waiting for another process that built it
    assert (made, again.folder.stat().st_ino) == ([], built_at)


@pytest.mark.parametrize(
    "other",
    [spec(9, 4), spec(4), spec(4, 9, 1), spec(4, 9, recipe=2), spec(4, 9, limit=2), spec(4, 9, kind="ids")],
)
def test_anything_else_is_another_store(tmp_path: Path, other: StoreSpec) -> None:
    build(tmp_path, spec(4, 9))
    assert open_store(tmp_path, other) is None


def test_another_format_is_another_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, spec(4, 9))
    monkeypatch.setattr(store, "FORMAT_VERSION", 999)
    assert open_store(tmp_path, spec(4, 9)) is None


def test_identities_do_not_run_together() -> None:
    assert identity("ab", "c") != identity("a", "bc")
    assert identity("é\udcff") != identity("é")
    assert 0 <= identity() < 2**64


def test_known_rows_are_copied(tmp_path: Path) -> None:
    build(tmp_path, spec(1, 2, 3))
    store, made = build(tmp_path, spec(3, 4, 1, 1))
    assert made == [4]
    assert values(store) == [[3], [4], [1], [1]]
    assert store.labels.tolist() == [3, 4, 1, 1]
    assert store.all_intact()
    store, made = build(tmp_path, spec(3, 2, 4))  # from two older stores
    assert (made, values(store)) == ([], [[3], [2], [4]])
    assert build(tmp_path, spec(1, 2, 3, recipe=2))[1] == [1, 2, 3]


def test_another_limit_copies_rows_but_asks_again_for_those_set_aside(tmp_path: Path) -> None:
    store, _ = build(tmp_path, spec(1, 2), refuse=2)
    assert store.set_aside == {1: ("refused", "by the test")}
    store, made = build(tmp_path, spec(1, 2, limit=9))
    assert (made, values(store)) == ([2], [[1], [2]])


def test_no_row_is_copied_from_a_damaged_one(tmp_path: Path) -> None:
    store, _ = build(tmp_path, spec(1, 2, 3))
    data = bytearray((store.folder / "data.bin").read_bytes())
    data[64] ^= 1
    (store.folder / "data.bin").write_bytes(data)
    store, made = build(tmp_path, spec(1, 2, 3, 4))
    assert (made, values(store)) == ([2, 4], [[1], [2], [3], [4]])


@pytest.mark.parametrize("name", ["meta.json", "index.npy", "data.bin"])
def test_a_store_that_cannot_be_opened_is_built_again(tmp_path: Path, name: str) -> None:
    store, _ = build(tmp_path, spec(1, 2))
    (store.folder / name).write_bytes((store.folder / name).read_bytes()[:-1])
    assert open_store(tmp_path, spec(1, 2)) is None
    store, made = build(tmp_path, spec(1, 2))
    assert (made, values(store)) == ([1, 2], [[1], [2]])
    assert open_store(tmp_path, spec(1, 2)) is not None
    assert not list(tmp_path.glob("tmp-*"))


def test_pruning_keeps_the_most_recently_used(tmp_path: Path) -> None:
    for number in range(STORES_KEPT):
        build(tmp_path, spec(number))
        os.utime(tmp_path / spec(number).folder_name, (number, number))
    build(tmp_path, spec(7, kind="ids"))
    assert open_store(tmp_path, spec(0)) is not None  # used now: 1 is the oldest
    build(tmp_path, spec(99))
    kept = {number for number in (*range(STORES_KEPT), 99) if (tmp_path / spec(number).folder_name).exists()}
    assert kept == {0, 99, *range(2, STORES_KEPT)}
    assert len(list(tmp_path.glob("audio-*"))) == STORES_KEPT
    assert (tmp_path / spec(7, kind="ids").folder_name).exists()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    for name in ("tmp-1", "tmp-2-damaged"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "data.bin").write_bytes(b"half")
    build(tmp_path, spec(1))
    assert not list(tmp_path.glob("tmp-*"))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_build_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def fill(writer: StoreWriter, rows: list[int]) -> None:
        writer.append(rows, [np.zeros(9, np.int16)])
        raise error

    with pytest.raises(error):
        build_store(tmp_path, spec(1), fill)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    assert build(tmp_path, spec(1))[1] == [1]  # and the lock is free


def test_everything_is_on_the_disk_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        events.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    build(tmp_path / "root", spec(1))
    before, after = events[: events.index("renamed")], events[events.index("renamed") + 1 :]
    assert {"data.bin", "index.npy", "meta.json", f"tmp-{os.getpid()}"} <= set(before)
    assert after == ["root"]


def test_an_open_store_survives_pruning_and_replacement(tmp_path: Path) -> None:
    store, _ = build(tmp_path, spec(1, 2))
    shutil.rmtree(store.folder)
    assert values(store) == [[1], [2]]
    (store.folder).mkdir()
    store.verify(np.array([0]))
    build(tmp_path, spec(1, 2))
    assert values(store) == [[1], [2]]


def test_where_caches_live(tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "one" / "corpus", tmp_path / "two" / "corpus"
    first.mkdir(parents=True)
    second.mkdir(parents=True)
    assert cache_root(first, None) == first / ".myxtts"
    roots = {cache_root(folder, tmp_path / "caches") for folder in (first, second)}
    assert len(roots) == 2  # corpora of one name do not meet
    assert all(root.parent == tmp_path / "caches" for root in roots)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cache_root(first, None).parent == user_cache / "myxtts"


# From here on: whole corpora.


def arrays(prepared: PreparedCorpus) -> dict[str, tuple[list[int], bytes, int, int]]:
    return {
        name: (part.ids[ids_row].tolist(), part.audio[audio_row].tobytes(), int(speaker), int(language))
        for part in (prepared.train, prepared.val)
        for name, audio_row, ids_row, speaker, language in zip(
            part.names, part.audio_rows, part.ids_rows, part.speakers, part.languages, strict=True
        )
    }


def test_second_start_builds_nothing_and_gives_the_same(corpus: Path, run_prepare: Prepare, messages) -> None:
    first = arrays(run_prepare(corpus))
    assert messages.work() == {"TEXT": 6, "AUDIO": 6}
    second = arrays(run_prepare(corpus))
    assert not any("BUILDING" in text for text in messages.take())
    assert first == second
    assert len(first) == 6


def rewrite(path: Path, change: Callable[[bytearray], None]) -> None:
    """Change a file's content behind the back of its size and modification time."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_a_change_that_keeps_size_and_time_is_noticed(corpus: Path, run_prepare: Prepare, messages) -> None:
    before = arrays(run_prepare(corpus))
    messages.take()
    rewrite(corpus / "wavs" / "clip002.wav", lambda content: content.__setitem__(-2, content[-2] ^ 0x40))
    after = arrays(run_prepare(corpus))
    assert messages.work() == {"AUDIO": 1}
    assert [name for name in before if before[name] != after[name]] == ["clip002"]


def test_only_what_changed_is_redone(make_corpus, run_prepare: Prepare, messages) -> None:
    folder = make_corpus()
    run_prepare(folder)
    messages.take()
    make_corpus(["One more sentence for the corpus."], first=20)  # a clip is added
    assert len(arrays(run_prepare(folder))) == 7
    assert messages.work() == {"TEXT": 1, "AUDIO": 1}
    metadata = folder / "metadata.csv"
    lines = metadata.read_text().splitlines()
    metadata.write_text("\n".join(lines[1:]))  # one is removed
    assert "clip000" not in arrays(run_prepare(folder))
    assert messages.work() == {}
    metadata.write_text("\n".join(["clip001|Quite another sentence.", *lines[2:]]))  # a text is changed
    run_prepare(folder)
    assert messages.work() == {"TEXT": 1}
    metadata.write_text("\n".join(reversed(lines)))  # the order is changed, and a clip comes back
    by_order = arrays(run_prepare(folder))
    assert messages.work() == {}
    shutil.rmtree(folder / ".myxtts")
    assert arrays(run_prepare(folder)) == by_order


def test_settings_redo_only_what_they_decide(corpus: Path, run_prepare: Prepare, messages, monkeypatch) -> None:
    english = arrays(run_prepare(corpus))
    messages.take()
    german = arrays(run_prepare(corpus, language="de"))
    assert messages.work() == {"TEXT": 6}
    assert all(english[name][0] != german[name][0] for name in english)
    run_prepare(corpus, vocab_size=300)
    trained = [text for text in messages.take() if "BUILDING" in text or "vocabulary" in text]
    assert trained == ["Training a vocabulary of up to 300 tokens on 6 sentences"]
    run_prepare(corpus, trim_silence_db=40.0)
    assert messages.work() == {"AUDIO": 6}
    run_prepare(corpus, max_mel_frames=700, max_text_length=100, min_clip_seconds=0.7)
    assert messages.work() == {}  # rows are the same, only which of them are used differs
    monkeypatch.setattr("myxtts.data.prepare.normalize.fingerprint", lambda: "changed tables")
    run_prepare(corpus)
    assert messages.work() == {"TEXT": 6}
    for module in ("prepare", "snapshot"):
        monkeypatch.setattr(f"myxtts.data.{module}.DECODE_VERSION", 999)
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
    assert arrays(kept) == arrays(fresh)
    assert kept.set_aside == fresh.set_aside


def damage(folder: Path, name: str) -> None:
    path = folder / name
    content = bytearray(path.read_bytes())
    content[3 if name == "meta.json" else len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["data.bin", "index.npy", "meta.json", "cut data.bin", "no index.npy"])
def test_damage_to_any_file_is_repaired(corpus: Path, run_prepare: Prepare, messages, name: str) -> None:
    good = arrays(run_prepare(corpus))
    messages.take()
    for folder in sorted(path for path in (corpus / ".myxtts").glob("*-*") if path.is_dir()):
        file = folder / name.split()[-1]
        if name.startswith("cut"):
            file.write_bytes(file.read_bytes()[:-64])
        elif name.startswith("no"):
            file.unlink()
        else:
            damage(folder, name)
    assert arrays(run_prepare(corpus, verify=True)) == good
    work = messages.work()
    assert work == ({"TEXT": 1, "AUDIO": 1} if name == "data.bin" else {"TEXT": 6, "AUDIO": 6})
    assert arrays(run_prepare(corpus, verify=True)) == good
    assert messages.work() == {}


def test_damage_met_while_reading_is_repaired_by_the_next_start(
    corpus: Path, run_prepare: Prepare, messages
) -> None:
    good = arrays(run_prepare(corpus))
    (audio,) = (corpus / ".myxtts").glob("audio-*")
    damage(audio, "data.bin")
    prepared = run_prepare(corpus)
    messages.take()
    with pytest.raises(DatasetError, match="run the command again"):
        arrays(prepared)
    assert arrays(run_prepare(corpus)) == good
    assert messages.work() == {"AUDIO": 1}


def test_an_altered_vocabulary_is_trained_again(corpus: Path, run_prepare: Prepare) -> None:
    good = arrays(run_prepare(corpus))
    (vocabulary,) = (corpus / ".myxtts").glob("vocabulary-*")
    (vocabulary / "data.bin").write_bytes((vocabulary / "data.bin").read_bytes().replace(b"[en]", b"[xx]"))
    assert arrays(run_prepare(corpus, verify=True)) == good


def test_a_named_vocabulary_decides_the_ids(corpus: Path, run_prepare: Prepare, tmp_path: Path, messages) -> None:
    own = run_prepare(corpus)
    file = tmp_path / "vocab.json"
    tokenizer.train(["the boat came in the first window"] * 9, ["en"] * 9, 256).save(file)
    messages.take()
    before = arrays(run_prepare(corpus, tokenizer=file))
    assert messages.work() == {}
    own.tokenizer.save(file)  # the same name, other content
    assert arrays(run_prepare(corpus, tokenizer=file)) == arrays(own)
    assert arrays(own) != before


def test_a_corpus_that_cannot_be_written_to(
    corpus: Path, run_prepare: Prepare, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(corpus) and may(path, mode))
    prepared = run_prepare(corpus)
    assert prepared.root.is_relative_to(user_cache)
    assert not (corpus / ".myxtts").exists()
    assert len(arrays(prepared)) == 6


def test_cache_dir(corpus: Path, run_prepare: Prepare, tmp_path: Path, messages) -> None:
    prepared = run_prepare(corpus, cache_dir=tmp_path / "deep" / "caches")
    assert prepared.root.is_relative_to(tmp_path / "deep" / "caches")
    assert not (corpus / ".myxtts").exists()
    messages.take()
    run_prepare(corpus, cache_dir=tmp_path / "deep" / "caches")
    assert messages.work() == {}


def test_a_cache_folder_that_cannot_be_made(corpus: Path, run_prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DatasetError, match=r"(?s)Cannot write the cache at .*file.*--cache-dir"):
        run_prepare(corpus, cache_dir=tmp_path / "file")


def test_two_processes_at_once_decode_each_clip_once(make_corpus) -> None:
    folder = make_corpus([f"Sentence number {number} of a longer corpus." for number in range(40)], seconds=1.5)
    command = [sys.executable, "-m", "myxtts.cli", "prepare", "--train-data", str(folder), "--language", "en"]
    both = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    logs = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    counts = [int(line.split()[1]) for log in logs for line in log.splitlines() if line.startswith("Processing")]
    assert counts == [40, 40]  # text and audio, once each in total
    names = {path.name.split("-")[0] for path in (folder / ".myxtts").iterdir()} - {"snapshot"}
    assert sorted(names) == ["audio", "ids", "lock", "set_aside.csv", "text", "vocabulary"]


# The shortcut: a snapshot of an unchanged corpus.

SETTLED_S = 0.05
"""After this long a snapshot trusts the times of a folder."""


def is_from_snapshot(messages) -> bool:
    return "LOADING CACHE FROM DISK" in messages.take()


def test_a_link_whose_target_appears_is_noticed(
    corpus: Path, run_prepare: Prepare, tmp_path: Path, messages
) -> None:
    """A disk that is mounted later: nothing changes in the corpus itself."""
    away = tmp_path / "elsewhere.wav"
    link = corpus / "wavs" / "clip002.wav"
    link.rename(away)
    link.symlink_to(away)
    away.rename(tmp_path / "unmounted.wav")
    time.sleep(SETTLED_S)
    for _ in range(2):
        assert [item.id for item in run_prepare(corpus).set_aside] == ["clip002"]
    time.sleep(SETTLED_S)
    run_prepare(corpus)
    assert is_from_snapshot(messages)
    (tmp_path / "unmounted.wav").rename(away)
    assert run_prepare(corpus).set_aside == []


def test_a_folder_whose_time_is_set_back_is_noticed(corpus: Path, run_prepare: Prepare) -> None:
    """What `cp -a` and `rsync -a` do once they have copied the files of a folder."""
    wavs = corpus / "wavs"
    content = (wavs / "clip002.wav").read_bytes()
    (wavs / "clip002.wav").unlink()
    time.sleep(SETTLED_S)
    before = wavs.stat()
    for _ in range(2):
        assert len(run_prepare(corpus).set_aside) == 1
        time.sleep(SETTLED_S)
    (wavs / "clip002.wav").write_bytes(content)
    os.utime(wavs, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert run_prepare(corpus).set_aside == []


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
    assert arrays(run_prepare(corpus)) != arrays(changed)


def test_the_list_of_clips_set_aside_belongs_to_the_settings(make_corpus, run_prepare: Prepare, messages) -> None:
    folder = make_corpus()
    time.sleep(SETTLED_S)
    listed = folder / ".myxtts" / "set_aside.csv"
    strict, loose = {"min_clip_seconds": 1.5}, {"min_clip_seconds": 0.5}
    counts = []
    for settings in (strict, loose, strict, loose):
        counts.append(len(run_prepare(folder, **settings).set_aside))
        assert len(listed.read_text().splitlines()) == 1 + counts[-1]
    assert is_from_snapshot(messages)
    assert counts[0] == counts[2] > counts[1] == counts[3] == 0


def test_no_altered_byte_of_a_snapshot_is_believed(corpus: Path, run_prepare: Prepare) -> None:
    time.sleep(SETTLED_S)
    run_prepare(corpus)
    (path,) = (corpus / ".myxtts").glob("snapshot-*")
    state, whole = path.stem.removeprefix("snapshot-"), path.read_bytes()
    assert load_snapshot(path.parent, state) is not None
    for at in range(0, len(whole), 13):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :])
        assert load_snapshot(path.parent, state) is None
        path.write_bytes(whole[:at])
        assert load_snapshot(path.parent, state) is None


def test_what_a_killed_snapshot_left_is_removed(corpus: Path, run_prepare: Prepare) -> None:
    time.sleep(SETTLED_S)
    run_prepare(corpus)
    (corpus / ".myxtts" / "tmp-snapshot-1").write_bytes(b"half")
    run_prepare(corpus, verify=True)
    assert not list((corpus / ".myxtts").glob("tmp-*"))


def test_a_store_of_another_format_is_passed_over(
    corpus: Path, run_prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr("myxtts.data.store.FORMAT_VERSION", 1)
        earlier.setattr("myxtts.data.store.FORMAT_VERSION", 1)
        good = arrays(run_prepare(corpus))
    for meta in (corpus / ".myxtts").glob("*/meta.json"):
        body = json.loads(meta.read_text())["body"]
        del body["limits"]  # what an earlier form did not have
        meta.write_text(json.dumps({"hash": store._meta_hash(body), "body": body}))
    assert arrays(run_prepare(corpus)) == good
