"""Recordings from every kind of source, local and remote, whole and damaged."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from s3_fixtures import LoopbackStore, s3

from myxtts.data import sources
from myxtts.data.clips import set_aside_csv
from myxtts.data.corpus import SetAside
from myxtts.data.sources import Recording, open_source
from myxtts.errors import DatasetError

__all__ = ["s3"]
WAVE = b"RIFF....WAVE" * 100


def read(source: Path | str) -> tuple[list[Recording], list[SetAside]]:
    units = pickle.loads(pickle.dumps(open_source(str(source))))
    assert len({unit.name for unit in units}) == len(units) and units == sorted(units, key=lambda unit: unit.name)
    found = [item for unit in units for item in unit.recordings()]
    recordings = [item for item in found if isinstance(item, Recording)]
    return recordings, [item for item in found if isinstance(item, SetAside)]


def tar_of(members: Iterable[tuple[str, bytes]], mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def pair(key: str, **fields: Any) -> list[tuple[str, bytes]]:
    return [(f"{key}.flac", WAVE + key.encode()), (f"{key}.json", json.dumps(fields).encode())]


def json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def reasons(set_aside: list[SetAside]) -> list[str]:
    return [item.reason for item in set_aside]


def test_folders_of_recordings_are_read_as_always(tmp_path: Path) -> None:
    rows = [
        "audio_file|text|speaker_name",
        *(f"{number:03d}|Text {number}|{'ab'[number % 2]}" for number in range(40)),
    ]
    (tmp_path / "metadata.csv").write_text("\n".join([*rows, "gone|Text|a"]))
    (tmp_path / "wavs").mkdir()
    for number in range(40):
        (tmp_path / f"wavs/{number:03d}.wav").write_bytes(WAVE)
    found, aside = read(tmp_path)
    assert [item.speaker for item in found] == ["a"] * 20 + ["b"] * 20
    assert found[1].id == "002" and found[1].audio == tmp_path / "wavs/002.wav" and found[1].text == "Text 2"
    assert reasons(aside) == ["missing file"]
    before = {unit.key for unit in open_source(str(tmp_path))}
    (tmp_path / "metadata.csv").write_text("\n".join([rows[0], "", *rows[1:]]))
    assert len({unit.key for unit in open_source(str(tmp_path))} & before) == len(before) - 1, "lines do not count"


def test_a_new_clip_changes_few_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SLICE_CLIPS", 16)
    rows = [{"audio_filepath": f"{number}.wav", "text": "a", "speaker": "s"} for number in range(500)]
    before = {unit.key for unit in open_source(str(json_lines(tmp_path / "a.jsonl", rows)))}
    rows.insert(250, {"audio_filepath": "new.wav", "text": "a", "speaker": "s"})
    after = {unit.key for unit in open_source(str(json_lines(tmp_path / "a.jsonl", rows)))}
    assert len(before) > 10 and len(after - before) <= 2


@pytest.mark.parametrize(("known", "each"), [("duration", 32_000), ("size", len(WAVE)), ("", 211_200)])
def test_what_counts_for_the_size_of_a_shard(known: str, each: int, tmp_path: Path) -> None:
    rows = [{"audio_filepath": f"{number}.wav", "text": "a"} for number in range(2)]
    for number in range(2):
        (tmp_path / f"{number}.wav").write_bytes(WAVE if known else b"")
    given = [row | {"duration": 1.0} if known == "duration" else row for row in rows]
    assert sum(unit.num_bytes for unit in open_source(str(json_lines(tmp_path / "a.jsonl", given)))) == 2 * each


@pytest.mark.parametrize("remote", [False, True])
def test_webdataset(remote: bool, tmp_path: Path, s3: LoopbackStore) -> None:
    first = [*pair("x/84_121.0", text="One", speaker="s1", language="en"), ("x/84_121.0.cls", b"3")]
    second = [("b.wav", WAVE), ("b.txt", b"Zwei\n"), ("c.mp3", WAVE), ("d.txt", b"text alone")]
    files = {
        "train-00.tar": tar_of(first),
        "train-01.tar.gz": tar_of(second, "w:gz"),
        "dev-0.tar": tar_of(pair("e", text="E")),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        s3.objects[f"bucket/data/{name}"] = content
    root = "s3://bucket/data" if remote else str(tmp_path)
    found, aside = read(root)
    assert [(item.id, item.text, item.speaker, item.held_out) for item in found] == [
        ("e", "E", "", True), ("x/84_121.0", "One", "s1", False), ("b", "Zwei", "", False),
    ]  # fmt: skip
    assert found[1].audio == WAVE + b"x/84_121.0" and found[1].where == "train-00.tar:x/84_121.0.flac"
    assert [(item.id, item.reason) for item in aside] == [("c", "no text"), ("d", "missing file")]
    assert read(f"{root}/train-{{00..00}}.tar")[0] == found[1:2] == read(f"{root}/train-00.tar")[0]
    assert len(read(f"{root}/{{train-00,dev-0}}.tar")[0]) == 2
    with pytest.raises(DatasetError, match=r"There is no .*train-01.tar"):
        open_source(f"{root}/train-{{00..02}}.tar")


def test_hostile_members_are_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_AUDIO_BYTES", 5000)
    members = [
        *pair("../../up", text="a"), *pair("/abs", text="a"), ("large.wav", bytes(5001)), *pair("fine", text="ok"),
        *pair("fine", text="again"), *pair("list", text="x")[:1], ("list.json", b"[1]"),
        *pair("klingon", text="x", lang="tlh"), *pair("new\nline", text="a"),
    ]  # fmt: skip
    (tmp_path / "a.tar").write_bytes(tar_of(members))
    with tarfile.open(tmp_path / "a.tar", "a") as tar:
        link = tarfile.TarInfo("link.wav")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    found, aside = read(tmp_path)
    assert [(item.id, item.text) for item in found] == [("fine", "ok")]
    assert reasons(aside) == [
        *["unsafe name"] * 4, "too large", "duplicate id", "wrong encoding", "unknown language", "unsafe member",
        "unsafe name",
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar"]


def test_damaged_archives_keep_what_comes_before(tmp_path: Path) -> None:
    whole = tar_of([item for key in "abc" for item in pair(key, text=key)])
    start = whole.index(b"c.flac")
    damaged = {
        "cut-member": (whole[: start + 700], "ab"),
        "cut-header": (whole[: start + 100], "ab"),
        "no-end": (whole[:start], "ab"),
        "header": (whole[:start] + b"\xff" * 512 + whole[start + 512 :], "ab"),
        "zip": (gzip.compress(whole)[:-20], "abc"),
        "noise": (b"noise" * 1000, ""),
        "empty": (b"", ""),
        "nothing": (tar_of([]), ""),
    }
    for name, (content, kept) in damaged.items():
        (tmp_path / f"{name}.tar").write_bytes(content)
        found, aside = read(tmp_path / f"{name}.tar")
        assert "".join(item.id for item in found) in (kept, kept[:2]), name
        assert aside[-1].reason == ("empty archive" if name == "nothing" else "damaged archive"), name
        assert aside[-1].where.endswith(f"{name}.tar")


def test_parquet_of_hugging_face(tmp_path: Path, s3: LoopbackStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {
            "audio": {"bytes": WAVE, "path": f"a{number}.wav"},
            "sentence": f"Text {number}",
            "client_id": 7,
            "locale": "de",
        }
        for number in range(10)
    ]
    rows[3]["audio"] = {"bytes": None, "path": "beside.wav"}
    rows[4]["audio"] = {"bytes": None, "path": "../outside.wav"}
    rows[5]["audio"], rows[6]["sentence"] = None, None
    (tmp_path / "data").mkdir()
    (tmp_path / "data/beside.wav").write_bytes(WAVE)
    (tmp_path / "README.md").write_text("A dataset")
    for split in ("train", "test"):
        parquet.write_table(
            pyarrow.Table.from_pylist(rows), tmp_path / f"data/{split}-0.parquet", row_group_size=4
        )
    monkeypatch.setattr(sources, "SLICE_BYTES", 1)
    assert [unit.name for unit in open_source(str(tmp_path))][2:4] == [
        "data/test-0.parquet#00002",
        "data/train-0.parquet#00000",
    ]
    found, aside = read(tmp_path)
    assert len(found) == 14 and [item.held_out for item in found] == [True] * 7 + [False] * 7
    assert found[7] == Recording("000000-a0", "Text 0", WAVE, "7", "de", where="train-0.parquet:0")
    assert found[10].audio == tmp_path / "data/beside.wav"
    assert reasons(aside) == ["unsafe name", "missing file", "empty text"] * 2
    for path in (tmp_path / "data").iterdir():
        s3.objects[f"bucket/data/{path.name}"] = path.read_bytes()
    assert read("s3://bucket/data/train-0.parquet")[0][3].audio == WAVE

    table = pyarrow.table({"audio": [b"x"], "label": [1]})
    parquet.write_table(table, tmp_path / "no-text.parquet")
    with pytest.raises(
        DatasetError, match="no column for the text, only audio, label; expected one of normalized_text"
    ):
        open_source(str(tmp_path / "no-text.parquet"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DatasetError, match=r"bad.parquet is no Parquet file, or damaged"):
        open_source(str(tmp_path / "bad.parquet"))


def test_manifests_of_nemo_and_emilia(tmp_path: Path) -> None:
    (tmp_path / "wavs").mkdir()
    (tmp_path / "wavs/long.wav").write_bytes(WAVE)
    rows: list[dict[str, Any]] = [
        {
            "audio_filepath": "wavs/long.wav",
            "text": "One",
            "offset": 1.5,
            "duration": 2.0,
            "speaker": "b",
            "lang": "en",
        },
        {"audio_filepath": str(tmp_path / "wavs/long.wav"), "text": "Two", "duration": 3, "speaker": 4},
        {"id": "W0", "wav": "wavs/long.wav", "text": "Drei", "speaker": "a", "language": "de", "dnsmos": 3.2},
        {"audio_filepath": "wavs/none.wav", "text": "x"},
        {"audio_filepath": "wavs/long.wav", "text": "x", "duration": "long"},
        {"audio_filepath": "wavs/long.wav", "text": "x", "offset": -1},
        {"text": "x"},
    ]
    path = json_lines(tmp_path / "manifest.jsonl.gz", rows)
    found, aside = read(path)
    assert [(item.text, item.speaker, item.language, item.start, item.duration) for item in found] == [
        ("Two", "4", "", 0.0, 3.0), ("Drei", "a", "de", 0.0, None), ("One", "b", "en", 1.5, 2.0),
    ]  # fmt: skip
    assert {item.audio for item in found} == {tmp_path / "wavs/long.wav"}
    assert found[2].id == "wavs/long@1.5" and found[2].where == "manifest.jsonl.gz:1" and found[1].id == "W0"
    assert sorted(reasons(aside)) == ["malformed line"] * 3 + ["missing file"]
    assert read(tmp_path)[0] == found
    (tmp_path / "manifest.jsonl.gz").rename(tmp_path / "x.json.gz")
    json_lines(tmp_path / "y.json", rows[:1])
    assert len(read(f"{tmp_path}/{{x.json.gz,y.json}}")[0]) == 4


def test_a_manifest_next_to_its_tar(tmp_path: Path) -> None:
    json_lines(
        tmp_path / "EN_1.jsonl",
        [{"id": key, "wav": f"EN/mp3/{key}.mp3", "text": key, "speaker": "s"} for key in "abz"],
    )
    (tmp_path / "EN_1.tar").write_bytes(tar_of((f"mp3/{key}.mp3", key.encode()) for key in "bac"))
    json_lines(tmp_path / "manifest_2.json", [{"audio_filepath": "d.wav", "text": "d"}])
    (tmp_path / "audio_2.tar").write_bytes(tar_of([("d.wav", b"d")]))
    found, aside = read(tmp_path)
    assert [(item.id, item.audio, item.speaker) for item in found] == [
        ("b", b"b", "s"),
        ("a", b"a", "s"),
        ("d", b"d", ""),
    ]
    assert [(item.id, item.reason) for item in aside] == [("mp3/c", "no text"), ("z", "missing file")]


def cut(name: str, source: dict[str, Any], *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    recording = {"id": "r", "sources": [{"channels": [0], **source}], "sampling_rate": 16000, "duration": 9.0}
    said = [{"id": name, "recording_id": "r", "start": 0.0, "duration": 2.0, **part} for part in parts]
    described = {"id": name, "start": 4.0, "duration": 2.0, "supervisions": said, "recording": recording}
    return {**described, "type": "MonoCut", **fields}


def test_cuts_and_shar_of_lhotse(tmp_path: Path) -> None:
    (tmp_path / "r.wav").write_bytes(WAVE)
    file = {"type": "file", "source": str(tmp_path / "r.wav")}
    cuts = [
        cut("one", file, {"text": "One", "speaker": "s", "language": "English"}),
        cut("two", file, {"text": "A"}, {"text": "B", "start": 1.0, "duration": 0.5}),
        cut("silent", file),
        cut("command", {"type": "command", "source": "rm -rf /"}, {"text": "x"}),
        cut("mixed", file, {"text": "x"}, type="MixedCut"),
    ]
    found, aside = read(json_lines(tmp_path / "cuts.jsonl.gz", cuts))
    assert sorted((item.id, item.text, item.start, item.duration, item.language) for item in found) == [
        ("one", "One", 4.0, 2.0, "en"), ("two-0", "A", 4.0, 2.0, ""), ("two-1", "B", 5.0, 0.5, ""),
    ]  # fmt: skip
    assert sorted(reasons(aside)) == ["no text", "unsupported cut", "unsupported cut"]

    shar = tmp_path / "shar"
    shar.mkdir()
    placed = [cut(name, {"type": "shar", "source": ""}, {"text": name}, start=0.0) for name in ("a.0-1", "b")]
    json_lines(shar / "cuts.000000.jsonl.gz", placed)
    (shar / "recording.000000.tar").write_bytes(
        tar_of([("a.0-1.flac", b"A"), ("a.0-1.json", b"{}"), ("b.flac", b"B"), ("b.json", b"{}")])
    )
    found, aside = read(shar)
    assert [(item.id, item.audio, item.start) for item in found] == [
        ("a.0-1", b"A", 0.0),
        ("b", b"B", 0.0),
    ] and not aside


def test_urls_of_a_manifest_show_no_secret_and_get_none(
    s3: LoopbackStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MYXTTS_HTTP_AUTHORIZATION", "Bearer of the manifest's store")
    s3.objects["a.wav"] = WAVE
    urls = [f"{s3.url}/a.wav?key={number}-SECRET" for number in range(2)]
    urls += [f"{s3.url}/none.wav?key=SECRET", "https://me:SECRET@host/a.wav"]
    json_lines(tmp_path / "m.jsonl", [{"audio_filepath": url, "text": "A text."} for url in urls])
    found, aside = read(tmp_path / "m.jsonl")
    assert [one.audio for one in found] == [WAVE] * 2 and len({one.id for one in found}) == 2
    assert reasons(aside) == ["missing file", "unsafe name"]
    shown = [str(item) for unit in open_source(str(tmp_path / "m.jsonl")) for item in (unit.name, unit.key)]
    assert not [text for text in [*shown, *map(str, found), set_aside_csv(aside).decode()] if "SECRET" in text]
    assert not [sent for sent in s3.headers if "authorization" in sent]


def test_a_remote_manifest_names_only_its_own_files(s3: LoopbackStore, tmp_path: Path) -> None:
    (tmp_path / "secret.wav").write_bytes(WAVE)
    names = [
        "a.wav",
        "s3://bucket/data/a.wav",
        str(tmp_path / "secret.wav"),
        "../b.wav",
        "s3://other/a.wav",
        "http://169.254.169.254/",
        "none.wav",
    ]
    rows = [{"id": str(number), "audio_filepath": name, "text": "t"} for number, name in enumerate(names)]
    s3.objects["bucket/data/m.jsonl"] = json_lines(tmp_path / "m.jsonl", rows).read_bytes()
    s3.objects["bucket/data/a.wav"] = s3.objects["bucket/b.wav"] = WAVE
    found, aside = read("s3://bucket/data/m.jsonl")
    assert [(item.id, item.audio) for item in found] == [("0", WAVE), ("1", WAVE)]
    assert reasons(aside) == ["unsafe name"] * 4 + ["missing file"]
    s3.objects["bucket/more/m.jsonl"] = s3.objects["bucket/data/m.jsonl"]
    keys = [{unit.key for unit in open_source(f"s3://bucket/{folder}/m.jsonl")} for folder in ("data", "more")]
    assert not keys[0] & keys[1], "other audio under the same names"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"notes.md": b"x", "sub/a.csv": b"y"}, r"(?s)No metadata in .*notes.md"),
        ({"a.tar": tar_of([]), "b.parquet": b"x"}, r"holds 1 tar archives and 1 Parquet files: name one kind"),
        ({"a.jsonl": b""}, r"a.jsonl is empty. Expected one JSON object a line"),
        ({"a.jsonl": b'{"path": "a.wav", "label": 3}'}, r"only the fields path, label.\nExpected .*lhotse"),
        ({"a.jsonl": b"[1, 2"}, r"the first holds no JSON: b'\[1, 2'"),
        ({"a.jsonl.gz": b"\x1f\x8bnonsense"}, r"a.jsonl.gz is damaged"),
    ],
)  # fmt: skip
def test_unusable_sources_are_named(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        read(tmp_path)


def test_what_is_not_there_or_unknown(s3: LoopbackStore) -> None:
    with pytest.raises(DatasetError, match=r"No such file or folder: /none"):
        open_source("/none")
    with pytest.raises(DatasetError, match=r"s3://bucket/none is empty or does not exist.\nUnderstood are"):
        open_source("s3://bucket/none")
    s3.objects |= {"bucket/a/metadata.csv": b"x", "bucket/a/wavs/1.wav": WAVE}
    with pytest.raises(
        DatasetError, match=r"s3://bucket/a holds 1 files with .csv, 1 files with .wav.\nUnderstood are"
    ):
        open_source("s3://bucket/a")
