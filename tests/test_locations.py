"""Reading and writing files wherever they are, and keeping remote ones on a local disk."""

from __future__ import annotations

import logging
import os
import pickle
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash
from s3_fixtures import LoopbackStore, s3

from myxtts.config import DataSettings
from myxtts.data import locations
from myxtts.data.locations import FileCache, Location, MissingObject, shard_cache
from myxtts.errors import ConfigError, DatasetError
from myxtts.observe.trace import Trace

__all__ = ["s3"]
CONTENT = bytes(range(256)) * 1000


def checksum(content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(content)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("some/folder", "some/folder"),
        ("/a:b/c", "/a:b/c"),
        ("s3://bucket/a/b?c#d.tar", "s3://bucket/a/b?c#d.tar"),
        ("gs://bucket", "gs://bucket/"),
        ("https://host/a%20b.tar?X-Amz-Signature=SECRET", "https://host/a b.tar?…"),
    ],
)
def test_a_location_shows_no_secret(text: str, shown: str) -> None:
    location = Location.parse(text)
    assert str(location) == shown
    assert "SECRET" not in repr(location)
    assert str(location / "x") == shown.removesuffix("?…").rstrip("/") + "/x" + "?…" * shown.endswith("?…")
    assert pickle.loads(pickle.dumps(location)) == location


@pytest.mark.parametrize(
    "text", ["https://me:hunter2@host/a", "s3://KEY:hunter2@bucket/a", "ftp://host/a", "s3:///a"]
)
def test_an_unusable_url_is_refused_without_its_secret(text: str) -> None:
    with pytest.raises(ConfigError, match=r"environment|Expected") as caught:
        Location.parse(text)
    assert "hunter2" not in str(caught.value)


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("remote", [False, True])
def test_files_are_written_listed_and_read(remote: bool, tmp_path: Path) -> None:
    root = Location.parse("s3://bucket/corpus" if remote else tmp_path / "corpus")
    (root / "b é#%25?.bin").write(CONTENT)
    (tmp_path / "large").write_bytes(CONTENT * 100)
    (root / "sub/large").upload(tmp_path / "large")
    found = root.list()
    assert [(entry.location.name, entry.size) for entry in found] == [
        ("b é#%25?.bin", 256000),
        ("large", 25600000),
    ]
    first, large = (entry.location for entry in found)
    assert first.read() == CONTENT and first.read(5, 10) == CONTENT[5:15] and first.read(255990) == CONTENT[-10:]
    assert large.parent.name == "sub" and large.entry().size == 25600000
    with large.open() as file:
        assert file.read() == CONTENT * 100
    with large.open_random() as file:
        assert file.seek(-5, os.SEEK_END) == 25599995 and file.read(9) == CONTENT[-5:]
        assert file.seek(1) == 1 and file.read(2) == CONTENT[1:3]
    with pytest.raises(MissingObject, match=r"There is no .*none"):
        (root / "none").read()


def test_files_of_a_web_server(s3: LoopbackStore, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.objects["folder/a b.tar"] = CONTENT
    monkeypatch.setenv("MYXTTS_HTTP_AUTHORIZATION", "Bearer SECRET")
    location = Location.parse(f"{s3.url}/folder/a%20b.tar?signature=SECRET")
    assert location.read(3, 4) == CONTENT[3:7]
    assert s3.requests[-1][1].endswith("/folder/a%20b.tar?signature=SECRET")
    assert s3.headers[-1]["authorization"] == "Bearer SECRET"
    for action in (location.list, lambda: location.write(b"")):
        with pytest.raises(DatasetError, match="web server"):
            action()
    s3.faults.extend(["503"] * 100)
    with pytest.raises(DatasetError, match=r"a b.tar\?… after 8 attempts: .*503") as caught:
        location.read()
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("fault", ["503", "reset", "truncate"])
def test_requests_are_repeated(fault: str, s3: LoopbackStore) -> None:
    s3.objects["bucket/a"] = CONTENT * 100
    s3.faults.extend([fault, "", fault, fault])
    with Location.parse("s3://bucket/a").open() as file:
        assert file.read() == CONTENT * 100


def test_a_stalled_answer_is_asked_for_again(
    s3: LoopbackStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(locations, "STALLED_S", 0.2)
    monkeypatch.setattr(locations, "PATIENCE_S", 0.1)
    s3.objects["bucket/a"] = CONTENT
    s3.faults.extend(["stall"] * 3)
    started = time.monotonic()
    assert Location.parse("s3://bucket/a").read() == CONTENT
    assert 0.2 < time.monotonic() - started < 2
    assert "attempt 1 of 8 failed" in caplog.text


def test_refused_access_names_the_variables(s3: LoopbackStore, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.fault_of = lambda _: "403"
    with pytest.raises(DatasetError, match=r"refuses access to s3://bucket/a.\nSet AWS_ACCESS_KEY_ID") as caught:
        Location.parse("s3://bucket/a").read()
    assert "the-secret" not in str(caught.value) and len(s3.requests) == 1
    monkeypatch.setenv("AWS_ENDPOINT_URL", "store.example")
    with pytest.raises(ConfigError, match="must start with https"):
        Location.parse("s3://third/a").read()
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(DatasetError, match=r"pip install -e '\.\[cloud\]' in the folder of MyXTTS"):
        Location.parse("s3://other/a").read()


def test_a_store_that_never_answered_is_given_up_sooner(
    s3: LoopbackStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locations, "answered", set())
    monkeypatch.setattr(locations, "FIRST_CONTACT_S", 0.5)
    monkeypatch.setattr(locations, "FIRST_WAIT_S", 0.25)
    monkeypatch.setattr(locations, "LONGEST_WAIT_S", 1.0)
    s3.objects["bucket/a"] = CONTENT
    s3.fault_of = lambda _: "reset"
    place, started = Location.parse("s3://bucket/a"), time.monotonic()
    with pytest.raises(DatasetError, match=r"s3://bucket/a cannot be reached: (.|\n)*and AWS_ENDPOINT_URL"):
        place.read()
    assert time.monotonic() - started < 3, "all attempts take six seconds"
    monkeypatch.setattr(locations, "LONGEST_WAIT_S", 0.1)
    s3.fault_of = lambda _: "503"
    with pytest.raises(DatasetError, match="after 8 attempts"):
        place.read()
    s3.fault_of = lambda _: ""
    assert place.read() == CONTENT
    s3.fault_of = lambda _: "reset"
    with pytest.raises(DatasetError, match="after 8 attempts"):
        place.read()


def test_files_are_deleted_where_a_store_refuses_those_that_are_gone(
    s3: LoopbackStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Google's: after an attempt whose answer was lost, the next one finds less."""
    obstore = pytest.importorskip("obstore")
    real, folder = obstore.delete, Location.parse("s3://bucket/a")

    def delete(client: object, paths: list[str]) -> None:
        for path in paths:
            if f"bucket/{path}" not in s3.objects:
                raise FileNotFoundError(path)
            real(client, [path])

    monkeypatch.setattr(obstore, "delete", delete)
    s3.objects.update({f"bucket/a/{name}": CONTENT for name in ("two", "three", "kept")})
    folder.delete(["one", "two", "none", "three"])
    assert set(s3.objects) == {"bucket/a/kept"}
    folder.delete(["one"])


def test_an_object_that_changes_while_it_is_read(s3: LoopbackStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "CHUNK_BYTES", 1000)
    s3.objects["bucket/a"] = CONTENT
    with Location.parse("s3://bucket/a").open() as file:
        file.read(10)
        s3.objects["bucket/a"] = CONTENT[::-1]
        with pytest.raises(DatasetError, match="changed while it was read"):
            file.read()


def put(s3: LoopbackStore, name: str, content: bytes) -> tuple[Location, int, str]:
    s3.objects[f"bucket/{name}"] = content
    return Location.parse(f"s3://bucket/{name}"), len(content), checksum(content)


def kept(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith("lock")}


def test_a_cache_keeps_the_files_used_last(s3: LoopbackStore, tmp_path: Path) -> None:
    trace = Trace()
    first, second, third = (put(s3, name, name.encode() * 1000) for name in "abc")
    with FileCache(tmp_path / "cache", 2500, trace) as cache:
        held = cache.open(*first)
        assert cache.get(*second).read_bytes() == b"b" * 1000
        assert cache.get(*first).read_bytes() == b"a" * 1000
        cache.get(*third)
        assert kept(cache.folder) == {first[2], third[2]}
        assert (cache.hits, cache.misses, cache.bytes_fetched) == (1, 3, 3000) and cache.wait_s > 0
        assert [span.name for span in trace.spans()] == ["fetch"] * 3
        cache.get(*second)
        assert kept(cache.folder) == {second[2], third[2]}
        assert os.pread(held, 9, 0) == b"a" * 9, "an open file is read on after its removal"
        os.close(held)
        cache.drop(second[2])
        assert kept(cache.folder) == {third[2]}
        with pytest.raises(DatasetError, match=r"does not fit the cache .*--shard-cache-gb"):
            cache.get(*put(s3, "large", b"x" * 2501))
        with pytest.raises(DatasetError, match="no checksum"):
            cache.get(first[0], 1000, "../../a")


def test_files_that_arrive_together_do_not_exceed_a_cache(s3: LoopbackStore, tmp_path: Path) -> None:
    first, second = (put(s3, name, name.encode() * 1000) for name in "ab")

    class Overtaken(FileCache):
        def _download(self, *given: Any) -> str:
            fetched = super()._download(*given)
            FileCache(tmp_path, 1500).get(*second)
            return fetched

    Overtaken(tmp_path, 1500).get(*first)
    assert kept(tmp_path) == {first[2]}


def test_a_corrupt_file_is_named_and_fetched_again(
    s3: LoopbackStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = put(s3, "a", CONTENT)
    cache = FileCache(tmp_path, 10**9)
    s3.faults.append("corrupt")
    with caplog.at_level(logging.WARNING):
        assert cache.get(*wanted).read_bytes() == CONTENT
    assert re.search(r"s3://bucket/a is damaged: found \w{32}, expected .*; it is fetched again", caplog.text)
    cache.drop(wanted[2])
    s3.objects["bucket/a"] = CONTENT[:-1]
    with pytest.raises(
        DatasetError, match=r"s3://bucket/a is damaged: found 255999 bytes, expected .*256000 bytes.*, twice"
    ):
        cache.get(*wanted)
    assert kept(tmp_path) == set()


@pytest.mark.parametrize("fault", ["503", "reset", "truncate"])
def test_a_cache_outlives_faults(fault: str, s3: LoopbackStore, tmp_path: Path) -> None:
    s3.faults.extend([fault] * 4)
    assert FileCache(tmp_path, 10**9).get(*put(s3, "a", CONTENT)).read_bytes() == CONTENT
    s3.fault_of = lambda _: fault
    with pytest.raises(DatasetError, match=r"s3://bucket/b after 8 attempts"):
        FileCache(tmp_path, 10**9).get(*put(s3, "b", CONTENT[1:]))
    assert kept(tmp_path) == {checksum(CONTENT)}


def test_files_are_fetched_ahead(s3: LoopbackStore, tmp_path: Path) -> None:
    wanted = [put(s3, str(number), bytes([number]) * 1000) for number in range(6)]
    with FileCache(tmp_path, 10**9) as cache:
        cache.fetch_ahead([(Location.parse("s3://bucket/none"), 9, checksum(b"")), *wanted])
        until = time.monotonic() + 10
        while kept(tmp_path) != {item[2] for item in wanted} and time.monotonic() < until:
            time.sleep(0.01)
        for item in wanted:
            cache.get(*item)
        assert (cache.hits, cache.misses) == (6, 0)


def test_closing_a_cache_ends_its_downloads(
    s3: LoopbackStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from s3_fixtures import Throttle

    monkeypatch.setattr(locations, "CHUNK_BYTES", 10_000)
    s3.throttle = Throttle(100_000)
    cache = FileCache(tmp_path, 10**9)
    cache.fetch_ahead([put(s3, "slow", CONTENT * 10)])
    time.sleep(0.2)
    started = time.monotonic()
    cache.close()
    assert time.monotonic() - started < 2
    assert kept(tmp_path) == set()


FETCHER = """
import sys, time
from pathlib import Path
from myxtts.data.locations import FileCache, Location
path, size, checksum = sys.argv[2:]
while time.time() < float(sys.argv[1]): pass
cache = FileCache(Path(path), 10**9)
cache.get(Location.parse("s3://bucket/a"), int(size), checksum)
print(cache.bytes_fetched)
"""


def test_processes_share_a_cache(s3: LoopbackStore, tmp_path: Path) -> None:
    _, size, key = put(s3, "a", CONTENT)
    command = [sys.executable, "-c", FETCHER, str(time.time() + 1), str(tmp_path), str(size), key]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    fetched = sorted(int(process.communicate(timeout=60)[0]) for process in started)
    assert fetched == [0, 0, size]


def test_a_full_disk_is_named(s3: LoopbackStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(DatasetError, match=r"No room for a copy of s3://bucket/a in (.|\n)*--shard-cache-gb"):
        FileCache(tmp_path, 10**9).get(*put(s3, "a", CONTENT))
    assert kept(tmp_path) == set()


def test_what_a_killed_process_left_goes(s3: LoopbackStore, tmp_path: Path) -> None:
    for name, age_s in (("0" * 32, 7200), ("1" * 32, 0)):
        (tmp_path / f"{name}.part").write_bytes(b"x")
        os.utime(tmp_path / f"{name}.part", (time.time() - age_s,) * 2)
    wanted = put(s3, "a", CONTENT)
    FileCache(tmp_path, 10**9).get(*wanted)
    assert kept(tmp_path) == {wanted[2], "1" * 32 + ".part"}


def test_where_and_how_large_the_cache_of_shards_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = shard_cache(DataSettings(cache_dir=tmp_path, shard_cache_gb=1.5))
    assert (cache.folder, cache.max_bytes) == (tmp_path / "shards", 1_500_000_000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert shard_cache(DataSettings()).folder == tmp_path / "myxtts/shards"


READER = """
import os, random, sys
from pathlib import Path
import xxhash
from myxtts.data import locations
locations.FIRST_WAIT_S = locations.LONGEST_WAIT_S = 0.001
wanted = [(locations.Location.parse(f"s3://bucket/{i}"), 5000, line) for i, line in enumerate(sys.argv[4:])]
draw = random.Random(sys.argv[2])
with locations.FileCache(Path(sys.argv[1]), 20_000) as cache:
    for _ in range(int(sys.argv[3])):
        cache.fetch_ahead(draw.sample(wanted, 2))
        item = draw.choice(wanted)
        descriptor = cache.open(*item)
        assert xxhash.xxh3_128_hexdigest(os.read(descriptor, 5001)) == item[2]
        os.close(descriptor)
"""


@pytest.mark.parametrize("reads", [50, pytest.param(3000, marks=pytest.mark.soak)])
def test_processes_that_share_a_small_cache_read_the_right_files(
    reads: int, s3: LoopbackStore, tmp_path: Path
) -> None:
    names = [put(s3, str(number), os.urandom(5000))[2] for number in range(12)]
    draw = random.Random(0)

    def fault_of(_: str) -> str:
        return draw.choice(["503", "reset", "truncate"]) if draw.random() < 0.04 else ""

    s3.fault_of = fault_of
    processes = [
        subprocess.Popen([sys.executable, "-c", READER, str(tmp_path), str(seed), str(reads), *names])
        for seed in range(3)
    ]
    time.sleep(1.5)
    processes[0].kill()
    assert [process.wait(timeout=280) for process in processes[1:]] == [0, 0]
    whole = {path for path in tmp_path.iterdir() if path.name in names}
    assert sum(path.stat().st_size for path in whole) <= 20_000
