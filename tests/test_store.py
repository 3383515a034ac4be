"""Stores and the codes cache: what is written comes back, damage costs only what it hits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxtts.data import store
from myxtts.data.codes import FOLDERS_KEPT, CodesCache
from myxtts.data.store import (
    ROW_ALIGNMENT_BYTES,
    STORES_KEPT,
    Array,
    CacheDamaged,
    Store,
    StoreSpec,
    StoreWriter,
    build_store,
    cache_root,
    hash64,
    open_store,
)
from myxtts.errors import DatasetError

Made = list[int]
Values = list[list[int]]


def content_of(key: int) -> Array:
    """The row that belongs to a key: two to six numbers."""
    return np.arange(key, key + 2 + key % 5, dtype=np.int16)


class StoreFormat:
    """A store that is written once, as a whole."""

    files = ("data.bin", "index.npy", "meta.json")
    kept = STORES_KEPT
    version = "myxtts.data.store.FORMAT_VERSION"

    def complete(self, root: Path, *keys: int, params: int = 1) -> tuple[Made, Values]:
        """Make the rows that are missing; return the keys of these, and all rows."""
        wanted, made = spec(*keys, params=params), []
        opened = open_store(wanted.folder(root), np.int16)
        if opened is None or not opened.all_intact():
            opened, made = build(root, wanted)
        return made, [opened[row].tolist() for row in range(len(keys))]


class CodesFormat:
    """The codes cache, which grows row by row."""

    files = ("data.bin", "index.bin", "checksums.bin")
    kept = FOLDERS_KEPT["codes"]
    version = "myxtts.data.codes.CODES_VERSION"

    def complete(self, root: Path, *keys: int, params: int = 1) -> tuple[Made, Values]:
        hashes = np.array(keys, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        rows, clips = [content_of(key) for key in keys], np.arange(len(keys))
        cache = CodesCache.open(root, hashes, np.array([len(row) for row in rows], np.int64), f"dvae {params}")
        missing = np.flatnonzero(~cache.known(clips))
        padded = np.array([np.resize(row, 6) for row in rows], np.int64).reshape(-1, 6)
        cache.write(missing, padded[missing])
        out = np.zeros((len(keys), 6), np.int32)
        assert cache.read(clips, out)
        cache.close()
        found = [slot[: len(row)].tolist() for slot, row in zip(out, rows, strict=True)]
        return [keys[at] for at in missing], found


Format = StoreFormat | CodesFormat


@pytest.fixture(params=[StoreFormat(), CodesFormat()], ids=["store", "codes"])
def form(request: pytest.FixtureRequest) -> Format:
    made: Format = request.param
    return made


def spec(*sources: int, params: int = 1, limit: int = 1, kind: str = "audio") -> StoreSpec:
    return StoreSpec(kind, np.int16, np.array(sources, np.uint64), {"params": params}, {"limit": limit})


def build(root: Path, wanted: StoreSpec, refused: dict[int, str] | None = None) -> tuple[Store, Made]:
    """Make the rows that are missing, except those refused; return the store and the sources made."""
    made: Made = []

    def make(writer: StoreWriter, rows: list[int]) -> None:
        for row in rows:
            source = int(wanted.sources[row])
            made.append(source)
            if refused and source in refused:
                writer.set_aside.append((row, refused[source], "by the test"))
            else:
                writer.append([row], [content_of(source)], source % 5)

    return build_store(root, wanted, make), made


def values(*keys: int) -> Values:
    return [content_of(key).tolist() for key in keys]


def folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir())


def flip_bit(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_rows_are_made_once(tmp_path: Path, form: Format) -> None:
    root = tmp_path / "not" / "there"
    assert form.complete(root, 4, 9, 7) == ([4, 9, 7], values(4, 9, 7))
    assert form.complete(root, 4, 9, 7) == ([], values(4, 9, 7))
    assert len(folders(root)) == 1


def test_known_rows_are_copied_from_older_ones(tmp_path: Path, form: Format) -> None:
    form.complete(tmp_path, 1, 2, 3)
    assert form.complete(tmp_path, 3, 4, 1, 1) == ([4], values(3, 4, 1, 1))
    assert form.complete(tmp_path, 3, 2, 4) == ([], values(3, 2, 4))  # from two of them


def test_other_params_and_other_versions_share_nothing(
    tmp_path: Path, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    form.complete(tmp_path, 1, 2)
    assert form.complete(tmp_path, 1, 2, params=2)[0] == [1, 2]
    monkeypatch.setattr(form.version, 999)
    assert form.complete(tmp_path, 1, 2) == ([1, 2], values(1, 2))


@pytest.mark.parametrize("keys", [(1, 2, 3), (1, 2, 3, 4)], ids=["same rows", "more rows"])
def test_a_flipped_bit_costs_its_row(tmp_path: Path, form: Format, keys: tuple[int, ...]) -> None:
    form.complete(tmp_path, 1, 2, 3)
    flip_bit(folders(tmp_path)[0] / "data.bin", 0)
    assert form.complete(tmp_path, *keys) == ([1, *keys[3:]], values(*keys))
    assert form.complete(tmp_path, *keys) == ([], values(*keys))


@pytest.mark.parametrize("keys", [(1, 2, 3), (1, 2, 3, 4)], ids=["same rows", "more rows"])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "altered"])
def test_no_damage_is_read_and_every_damage_is_repaired(
    tmp_path: Path, form: Format, number: int, damage: str, keys: tuple[int, ...]
) -> None:
    form.complete(tmp_path, 1, 2, 3)
    path = folders(tmp_path)[0] / form.files[number]
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        altered = bytes(value ^ 255 for value in content)
        path.write_bytes({"empty": b"", "half": content[: len(content) // 2], "altered": altered}[damage])
    assert form.complete(tmp_path, *keys)[1] == values(*keys)
    assert form.complete(tmp_path, *keys) == ([], values(*keys))


def test_the_most_recently_used_are_kept(tmp_path: Path, form: Format) -> None:
    def folder_of(number: int) -> Path:
        before = set(folders(tmp_path))
        form.complete(tmp_path, number, params=number)
        (made,) = set(folders(tmp_path)) - before
        os.utime(made, (number, number))
        return made

    first, second, *others = [folder_of(number) for number in range(form.kept)]
    form.complete(tmp_path, 0, params=0)  # used now, so the second is the oldest
    form.complete(tmp_path, 99)
    assert second not in folders(tmp_path)
    assert {first, *others} <= set(folders(tmp_path))


def test_a_set_without_rows(tmp_path: Path, form: Format) -> None:
    for _ in range(2):
        assert form.complete(tmp_path) == ([], [])


# The files of a store.

LENGTHS = (5, 0, 100, 33, 1)


def rows_of(dtype: str = "int16", lengths: tuple[int, ...] = LENGTHS) -> list[Array]:
    random = np.random.default_rng(0)
    return [random.integers(0, 120, length).astype(dtype) for length in lengths]


def write_store(folder: Path, rows: list[Array]) -> Path:
    writer = StoreWriter(folder, np.arange(len(rows), dtype=np.uint64))
    writer.append(range(len(rows)), rows)
    writer.finish({})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_store(tmp_path / "store", rows_of())


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=12),
    st.sampled_from(["int16", "int32", "uint8"]),
    st.randoms(use_true_random=False),
)
def test_rows_written_in_any_order_and_grouping(tmp_path_factory, lengths, dtype, random) -> None:
    rows = rows_of(dtype, tuple(lengths))
    folder = tmp_path_factory.mktemp("store") / "store"
    writer = StoreWriter(folder, np.arange(len(rows), dtype=np.uint64) + 7)
    order = list(range(len(rows)))
    random.shuffle(order)
    while order:
        size = random.randint(1, 4)
        group, order = order[:size], order[size:]
        writer.append(group, [rows[row] for row in group], group)
    writer.finish({"made": "for a test"})
    opened = Store(folder, dtype)
    assert (len(opened), opened.lengths.tolist()) == (len(rows), lengths)
    assert opened.labels.tolist() == (opened.sources - 7).tolist() == list(range(len(rows)))
    assert (opened.params, opened.filters, opened.set_aside) == ({"made": "for a test"}, {}, {})
    for row, expected in enumerate(rows):
        assert opened[row].dtype == np.dtype(dtype) and np.array_equal(opened[row], expected)
    assert opened.all_intact()
    assert (np.load(folder / "index.npy")["offset"] % ROW_ALIGNMENT_BYTES == 0).all()
    assert not any(opened[row].flags.writeable for row in range(len(rows)) if lengths[row])


def test_rows_set_aside_are_empty_and_say_why(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "store", np.arange(3, dtype=np.uint64))
    writer.append([1], [np.arange(4, dtype=np.int16)])
    writer.set_aside.append((2, "too long", "12 s"))
    writer.set_aside.append((0, "not audio", 'quotes " and سلام'))
    writer.finish({})
    opened = Store(tmp_path / "store", np.int16)
    assert opened.set_aside == {0: ("not audio", 'quotes " and سلام'), 2: ("too long", "12 s")}
    assert len(opened[0]) == len(opened[2]) == 0


def damaged(name: str, whole: bytes) -> Iterator[bytes]:
    yield from (whole[:-1], whole + b"\0", whole * 2)
    if name != "data.bin":
        yield from (whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(0, len(whole), 7))
    if name == "meta.json":
        yield from (b"[]", b"{}", b'{"hash": 1, "body": {}}', b"null", b"\xff\xfe", b'"text"')


@pytest.mark.parametrize("name", ["meta.json", "index.npy", "data.bin"])
def test_damage_is_noticed_on_opening(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    for content in damaged(name, whole):
        (folder / name).write_bytes(content)
        with pytest.raises(CacheDamaged):
            Store(folder, np.int16)
    (folder / name).write_bytes(whole)
    assert Store(folder, np.int16).all_intact()


def flip_row(folder: Path, row: int) -> None:
    flip_bit(folder / "data.bin", int(np.load(folder / "index.npy")["offset"][row]))


@pytest.mark.parametrize("method", ["__getitem__", "gather", "gather_padded"])
def test_no_way_of_reading_returns_an_altered_row(folder: Path, method: str) -> None:
    flip_row(folder, 2)
    opened = Store(folder, np.int16)

    def read(row: int) -> None:
        arguments = (row,) if method == "__getitem__" else (np.array([0, row]), np.zeros((2, 128), np.int16))
        getattr(opened, method)(*arguments)

    assert [opened.is_intact(row) for row in range(5)] == [True, True, False, True, True]
    read(3)
    assert not (folder / "damaged").exists()
    with pytest.raises(CacheDamaged, match=r"row 2.*\n.*run the command again"):
        read(2)
    assert (folder / "damaged").exists()
    assert issubclass(CacheDamaged, DatasetError)  # the command line shows its text


@pytest.mark.parametrize(("method", "rest"), [("gather", -1), ("gather_padded", 0)])
def test_gathering_copies_to_the_start(folder: Path, method: str, rest: int) -> None:
    rows, chosen = rows_of(), np.array([4, 0, 3, 1, 3])
    out = np.full((5, 40), -1, np.int16)
    getattr(Store(folder, np.int16), method)(chosen, out)
    for slot, row in zip(out, chosen, strict=True):
        assert slot.tolist() == rows[row].tolist() + [rest] * (40 - len(rows[row]))


def test_an_open_store_outlives_its_folder(folder: Path) -> None:
    opened = Store(folder, np.int16)
    shutil.rmtree(folder)
    write_store(folder, rows_of(lengths=(1, 1, 1, 1, 1)))
    for row, expected in enumerate(rows_of()):
        assert np.array_equal(opened[row], expected)


def test_a_store_truncated_while_it_is_open_is_an_error_and_not_the_end_of_the_process(folder: Path) -> None:
    opened = Store(folder, np.int16)
    assert opened.all_intact()
    os.truncate(folder / "data.bin", 64)
    assert opened[0].tolist() == rows_of()[0].tolist()
    for read in (lambda: opened[2], lambda: opened.gather(np.array([0, 2]), np.zeros((2, 128), np.int16))):
        with pytest.raises(CacheDamaged, match=r"row 2.*truncated.*\n.*run the command again"):
            read()
    assert open_store(folder, np.int16) is None


def test_verifying_happens_once_per_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Store(folder, np.int16)
    opened.gather(np.arange(5), np.zeros((5, 128), np.int16))
    monkeypatch.setattr(store.xxhash, "xxh3_64_intdigest", lambda _: pytest.fail("hashed again"))
    opened.gather(np.arange(5), np.zeros((5, 128), np.int16))
    assert opened.all_intact()


# Building a store.


@pytest.mark.parametrize(
    "other",
    [spec(9, 4), spec(4), spec(4, 9, 1), spec(4, 9, params=2), spec(4, 9, limit=2), spec(4, 9, kind="ids")],
)
def test_anything_else_is_another_store(tmp_path: Path, other: StoreSpec) -> None:
    built, _ = build(tmp_path, spec(4, 9))
    assert sorted(path.name for path in tmp_path.iterdir()) == [built.folder.name, "lock"]
    again, made = build(tmp_path, spec(4, 9))  # as after waiting for another process that built it
    assert (made, again.folder.stat().st_ino) == ([], built.folder.stat().st_ino)
    assert open_store(other.folder(tmp_path), np.int16) is None


def test_hashes_of_parts_do_not_run_together() -> None:
    assert hash64("ab", "c") != hash64("a", "bc")
    assert hash64("é\udcff") != hash64("é")
    assert 0 <= hash64() < 2**64


def test_labels_and_reasons_are_copied_with_their_rows(tmp_path: Path) -> None:
    build(tmp_path, spec(1, 2, 3), {2: "refused", 3: "crashed the decoder"})
    copied, made = build(tmp_path, spec(3, 2, 1, 8))
    assert made == [3, 8]  # what crashed is tried again
    assert copied.set_aside == {1: ("refused", "by the test")}
    assert copied.labels.tolist() == [3, 0, 1, 3]


def test_another_filter_copies_rows_but_asks_again_for_those_set_aside(tmp_path: Path) -> None:
    build(tmp_path, spec(1, 2), {2: "refused"})
    loose, made = build(tmp_path, spec(1, 2, limit=9))
    assert (made, loose.set_aside, loose[1].tolist()) == ([2], {}, *values(2))


def test_a_replaced_store_reuses_nothing(tmp_path: Path) -> None:
    wanted, row = spec(1), np.array([77], np.int16)
    build(tmp_path, wanted)
    build_store(tmp_path, wanted, lambda writer, rows: writer.append(rows, [row]), replace=True)
    opened = open_store(wanted.folder(tmp_path), np.int16)
    assert opened is not None and opened[0].tolist() == [77]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    for name in ("tmp-1", "tmp-2-old"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "data.bin").write_bytes(b"half")
    build(tmp_path, spec(1))
    assert not list(tmp_path.glob("tmp-*"))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_build_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def fail(writer: StoreWriter, rows: list[int]) -> None:
        writer.append(rows, [np.zeros(9, np.int16)])
        raise error

    with pytest.raises(error):
        build_store(tmp_path, spec(1), fail)
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


def test_where_caches_live(tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "one" / "corpus", tmp_path / "two" / "corpus"
    first.mkdir(parents=True)
    assert cache_root(first, None) == first / ".myxtts"
    roots = {cache_root(folder, tmp_path / "caches") for folder in (first, second)}
    assert len(roots) == 2  # corpora of one name do not share a cache
    assert all(root.parent == tmp_path / "caches" for root in roots)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cache_root(first, None).parent == user_cache / "myxtts"
