"""The file format: what is written comes back, and no altered byte of a row is ever read."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxtts.data.store import ROW_ALIGNMENT_BYTES, Array, CacheDamaged, Store, StoreWriter, pack
from myxtts.errors import DatasetError

LENGTHS = (5, 0, 100, 33, 1)


def rows_of(dtype: str = "int16", lengths: tuple[int, ...] = LENGTHS) -> list[Array]:
    random = np.random.default_rng(0)
    return [random.integers(0, 120, length).astype(dtype) for length in lengths]


def write_store(folder: Path, rows: list[Array], labels: list[int] | int = 0) -> Path:
    writer = StoreWriter(folder, np.arange(len(rows), dtype=np.uint64) + 7)
    writer.append(range(len(rows)), rows, labels)
    writer.finish({"made": "for a test"})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_store(tmp_path / "store", rows_of())


@pytest.mark.parametrize("dtype", ["int16", "int32", "uint8"])
def test_round_trip(tmp_path: Path, dtype: str) -> None:
    rows = rows_of(dtype)
    store = Store(write_store(tmp_path / "store", rows, [3, 1, 4, 1, 5]), dtype)
    assert len(store) == len(rows)
    assert store.lengths.tolist() == list(LENGTHS)
    assert store.labels.tolist() == [3, 1, 4, 1, 5]
    assert store.sources.tolist() == [7, 8, 9, 10, 11]
    assert store.recipe == {"made": "for a test"}
    assert store.set_aside == {}
    for row, expected in enumerate(rows):
        assert store[row].dtype == np.dtype(dtype)
        assert np.array_equal(store[row], expected)
    assert store.all_intact()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_rows_written_in_any_order_and_grouping(tmp_path_factory, lengths, random) -> None:
    rows = rows_of("int32", tuple(lengths))
    folder = tmp_path_factory.mktemp("store") / "store"
    writer = StoreWriter(folder, np.arange(len(rows), dtype=np.uint64))
    order = list(range(len(rows)))
    random.shuffle(order)
    while order:
        size = random.randint(1, 4)
        group, order = order[:size], order[size:]
        writer.append(group, [rows[row] for row in group], group)
    writer.finish({})
    store = Store(folder, np.int32)
    assert all(np.array_equal(store[row], rows[row]) for row in range(len(rows)))
    assert store.labels.tolist() == list(range(len(rows)))


def test_rows_start_on_aligned_places(folder: Path) -> None:
    index = np.load(folder / "index.npy")
    assert (index["offset"] % ROW_ALIGNMENT_BYTES == 0).all()
    assert (folder / "data.bin").stat().st_size % ROW_ALIGNMENT_BYTES == 0


def test_rows_from_other_processes_are_entered_where_they_stand(tmp_path: Path) -> None:
    """What `fill_audio` does: a block is written behind `end`, then entered."""
    rows = rows_of()
    writer = StoreWriter(tmp_path / "store", np.arange(5, dtype=np.uint64))
    writer.append([0], rows[:1])
    packed, records = pack(rows[1:])
    offset = writer.end + 640
    with open(writer.data_path, "r+b") as file:
        file.seek(offset)
        file.write(packed)
    writer.enter([4, 3, 2, 1], records, offset, 2)
    writer.finish({})
    store = Store(tmp_path / "store", np.int16)
    assert [store[row].tolist() for row in (0, 4, 3, 2, 1)] == [row.tolist() for row in rows]
    assert store.all_intact()


def test_rows_set_aside_are_empty_and_say_why(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "store", np.arange(3, dtype=np.uint64))
    writer.append([1], [np.arange(4, dtype=np.int16)])
    writer.set_aside(2, "too long", "12 s")
    writer.set_aside(0, "not audio", 'quotes " and سلام')
    writer.finish({})
    store = Store(tmp_path / "store", np.int16)
    assert store.set_aside == {0: ("not audio", 'quotes " and سلام'), 2: ("too long", "12 s")}
    assert len(store[0]) == len(store[2]) == 0


def test_a_store_without_any_row(tmp_path: Path) -> None:
    store = Store(write_store(tmp_path / "store", []), np.int16)
    assert len(store) == 0
    assert store.all_intact()


def test_rows_cannot_be_written_to(folder: Path) -> None:
    with pytest.raises(ValueError, match="read-only"):
        Store(folder, np.int16)[0][0] = 1


@pytest.mark.parametrize("name", ["meta.json", "index.npy"])
def test_every_byte_of_index_and_meta_is_protected(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    for at in range(0, len(whole), 7):
        (folder / name).write_bytes(whole[:at] + bytes([whole[at] ^ 0x04]) + whole[at + 1 :])
        with pytest.raises(CacheDamaged):
            Store(folder, np.int16)
    (folder / name).write_bytes(whole)
    assert Store(folder, np.int16).all_intact()


@pytest.mark.parametrize("name", ["meta.json", "index.npy", "data.bin"])
def test_cut_grown_or_missing_files_are_noticed_on_opening(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole[:-1], whole + b"\0", whole * 2):
        (folder / name).write_bytes(content)
        with pytest.raises(CacheDamaged):
            Store(folder, np.int16)
    (folder / name).unlink()
    with pytest.raises(CacheDamaged):
        Store(folder, np.int16)


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"hash": 1, "body": {}}', b"null", b"\xff\xfe", b'"text"'])
def test_meta_that_is_something_else(folder: Path, content: bytes) -> None:
    (folder / "meta.json").write_bytes(content)
    with pytest.raises(CacheDamaged):
        Store(folder, np.int16)


def test_another_format_version_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("myxtts.data.store.FORMAT_VERSION", 999)
    with pytest.raises(CacheDamaged):
        Store(folder, np.int16)


def flip_a_bit(folder: Path, row: int) -> None:
    at = int(np.load(folder / "index.npy")["offset"][row])
    data = bytearray((folder / "data.bin").read_bytes())
    data[at] ^= 1
    (folder / "data.bin").write_bytes(data)


def test_a_flipped_bit_costs_one_row_and_marks_the_store(folder: Path) -> None:
    flip_a_bit(folder, 2)
    store = Store(folder, np.int16)
    assert [store.is_intact(row) for row in range(5)] == [True, True, False, True, True]
    assert np.array_equal(store[3], rows_of()[3])
    assert not (folder / "damaged").exists()
    with pytest.raises(CacheDamaged, match=r"row 2.*\n.*run the command again"):
        store[2]
    assert (folder / "damaged").exists()
    assert issubclass(CacheDamaged, DatasetError)  # the command line shows its text


@pytest.mark.parametrize("method", ["gather", "gather_padded"])
def test_no_way_of_reading_returns_an_altered_row(folder: Path, method: str) -> None:
    flip_a_bit(folder, 2)
    store = Store(folder, np.int16)
    out = np.zeros((2, 128), np.int16)
    getattr(store, method)(np.array([0, 3]), out)
    with pytest.raises(CacheDamaged):
        getattr(store, method)(np.array([0, 2]), out)
    assert not Store(folder, np.int16).all_intact()


def test_gather_copies_to_the_front_and_leaves_the_rest(folder: Path) -> None:
    rows, chosen = rows_of(), np.array([3, 0, 3, 1])
    out = np.full((4, 120), -1, np.int16)
    Store(folder, np.int16).gather(chosen, out)
    for slot, row in zip(out, chosen, strict=True):
        assert np.array_equal(slot[: len(rows[row])], rows[row])
        assert (slot[len(rows[row]) :] == -1).all()


def test_gather_padded_fills_up_with_zeros(folder: Path) -> None:
    rows, chosen = rows_of(), np.array([4, 0, 4, 1, 3])
    out = np.full((5, 40), -1, np.int16)
    Store(folder, np.int16).gather_padded(chosen, out)
    for slot, row in zip(out, chosen, strict=True):
        assert slot.tolist() == rows[row].tolist() + [0] * (40 - len(rows[row]))


def test_an_open_store_outlives_its_folder(folder: Path) -> None:
    store = Store(folder, np.int16)
    shutil.rmtree(folder)
    for row, expected in enumerate(rows_of()):
        assert np.array_equal(store[row], expected)


def test_verifying_happens_once_per_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(folder, np.int16)
    store.gather(np.arange(5), np.zeros((5, 128), np.int16))
    monkeypatch.setattr("myxtts.data.store._hash", lambda _: pytest.fail("hashed again"))
    store.gather(np.arange(5), np.zeros((5, 128), np.int16))
    assert store.all_intact()
