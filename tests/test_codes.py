"""The codes cache: rows appear one by one, whole or not at all, whoever writes, dies, or runs out of disk.

What it shares with stores (reuse, damage, versions, pruning) is in `test_store`.
"""

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from myxtts.data import codes as codes_module
from myxtts.data import store as store_module
from myxtts.data.codes import FOLDERS_KEPT, CodesCache

LENGTHS = (5, 140, 0, 33, 1)
WIDTH = 150


def hashes(num_clips: int, first: int = 0) -> np.ndarray:
    """Audio hashes that look like hashes: in no order, some beyond the largest int64."""
    return (np.arange(first, first + num_clips, dtype=np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)


def open_codes(
    root: Path, lengths: tuple[int, ...] = LENGTHS, audio: np.ndarray | None = None, dvae: str = "weights"
) -> CodesCache:
    audio = hashes(len(lengths)) if audio is None else audio
    return CodesCache.open(root, audio, np.array(lengths, np.int64), dvae)


def codes_of(lengths: tuple[int, ...] = LENGTHS, seed: int = 0, padding: int = 0) -> np.ndarray:
    codes = np.random.default_rng(seed).integers(1, 1024, (len(lengths), WIDTH))
    return np.where(np.arange(WIDTH) < np.array(lengths)[:, None], codes, padding)


def every(cache: CodesCache) -> np.ndarray:
    return np.arange(len(cache))


def read(cache: CodesCache, dtype: str = "int32") -> tuple[bool, np.ndarray]:
    out = np.full((len(cache), WIDTH), 77, dtype)
    return cache.read(every(cache), out), out


def folders(root: Path) -> list[Path]:
    return sorted(root.glob("codes-*"))


def flip_byte(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    with open(path, "r+b") as file:
        file.write(content)


@pytest.mark.parametrize("dtype", ["int16", "int32", "uint16", "int64"])
def test_what_is_written_is_read_with_zeros_behind_it(tmp_path: Path, dtype: str) -> None:
    cache = open_codes(tmp_path / "not" / "there")
    cache.write(every(cache), codes_of(padding=-1).astype("int32"))
    whole, out = read(cache, dtype)
    assert whole
    assert out.dtype == dtype
    assert np.array_equal(out, codes_of())


def test_only_rows_that_were_written_are_known(tmp_path: Path) -> None:
    cache = open_codes(tmp_path)
    assert cache.known(every(cache)).tolist() == [False, False, True, False, False]  # one clip has no codes
    assert (cache.num_known, cache.complete, len(cache)) == (1, False, 5)
    chosen = np.array([3, 0])
    cache.write(chosen, codes_of()[chosen])
    assert cache.known(np.array([4, 3, 2, 0])).tolist() == [False, True, True, True]
    whole, out = read(cache)
    assert not whole
    assert not out[[1, 4]].any()
    assert np.array_equal(out[chosen], codes_of()[chosen])
    cache.write(every(cache), codes_of())
    assert (cache.num_known, cache.complete) == (5, True)


def test_a_known_row_is_seen_by_all_and_never_written_again(tmp_path: Path) -> None:
    """A GPU may round otherwise in another batch: a row that others may be reading stays as it is."""
    cache, other = open_codes(tmp_path), open_codes(tmp_path)
    cache.write(every(cache), codes_of())
    assert other.complete
    other.write(every(other), codes_of(seed=1))
    assert np.array_equal(read(cache)[1], codes_of())


@pytest.mark.parametrize(
    "other", [{"dvae": "others"}, {"audio": hashes(5, first=9)}, {"lengths": (6, 139, 2, 34, 3)}]
)
def test_codes_belong_to_a_dvae_and_to_their_audio(tmp_path: Path, other: dict) -> None:
    cache = open_codes(tmp_path)
    cache.write(every(cache), codes_of())
    assert open_codes(tmp_path, **other).known(np.array([0, 1, 3, 4])).tolist() == [False] * 4


@pytest.mark.parametrize("torn", ["checksum", "swapped"])
def test_a_checksum_of_something_else_makes_a_row_absent(tmp_path: Path, torn: str) -> None:
    cache = open_codes(tmp_path, (4, 4))
    codes = np.full((2, 4), 9)  # equal codes of different audio
    cache.write(every(cache), codes)
    path = folders(tmp_path)[0] / "checksums.bin"
    if torn == "checksum":
        flip_byte(path, 0)
    else:
        content = path.read_bytes()
        path.write_bytes(content[8:16] + content[:8] + content[16:])
    assert open_codes(tmp_path, (4, 4)).known(np.array([0])).tolist() == [False]


def test_data_takes_no_room_before_it_is_written(tmp_path: Path) -> None:
    open_codes(tmp_path, (1000,) * 5000)
    data = folders(tmp_path)[0] / "data.bin"
    assert data.stat().st_size > 9e6
    assert data.stat().st_blocks * 512 < 1e6


def test_values_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    cache = open_codes(tmp_path, (3,))
    for bad in ([1, 2, -1], [1, 2, 0x10000], [1.0, 2.0, 3.0], [1, 2]):
        with pytest.raises(ValueError, match=r"whole numbers|more than"):
            cache.write(np.array([0]), np.array([bad]))
    assert not cache.known(np.array([0])).any()
    cache.write(np.array([0]), np.array([[0, 1, 0xFFFF]]))
    with pytest.raises(ValueError, match="more than"):
        cache.read(np.array([0]), np.zeros((1, 2), np.int32))


@pytest.mark.parametrize("reopened", [True, False])
def test_a_torn_row_is_absent_until_it_is_written_again(tmp_path: Path, reopened: bool) -> None:
    cache = open_codes(tmp_path)
    cache.write(every(cache), codes_of())
    flip_byte(folders(tmp_path)[0] / "data.bin", (5 + 139) * 2)  # the last code of clip 1
    if reopened:
        cache.close()
        cache = open_codes(tmp_path)
    assert cache.num_known == 5  # nothing has been compared yet
    assert not cache.complete
    assert cache.known(every(cache)).tolist() == [True, False, True, True, True]
    whole, out = read(cache)
    assert not whole
    assert not out[1].any()
    assert cache.num_known == 4
    cache.write(every(cache), codes_of())
    assert read(cache)[0]
    assert np.array_equal(read(cache)[1], codes_of())
    assert open_codes(tmp_path).complete


# Rows of other sets of clips.


def test_rows_are_copied_into_a_folder_that_exists_and_for_equal_audio(tmp_path: Path) -> None:
    audio = hashes(3)
    whole = open_codes(tmp_path, (4, 4, 4, 4), audio[[0, 1, 2, 2]])
    whole.write(np.array([0]), np.full((1, 4), 10))
    for clip in (1, 2):
        part = open_codes(tmp_path, (4,), audio[[clip]])
        part.write(np.array([0]), np.full((1, 4), 10 + clip))
    again = open_codes(tmp_path, (4, 4, 4, 4), audio[[0, 1, 2, 2]])
    assert again.complete
    assert read(again)[1][:, 0].tolist() == [10, 11, 12, 12]


def test_folders_in_use_are_not_removed(tmp_path: Path) -> None:
    in_use = open_codes(tmp_path, (4,), dvae="in use")
    (folder,) = folders(tmp_path)
    os.utime(folder, (1, 1))
    for number in range(FOLDERS_KEPT + 1):
        open_codes(tmp_path, (4,), dvae=f"dvae {number}").close()
    assert folder.exists()
    in_use.write(np.array([0]), np.full((1, 4), 8))
    in_use.close()
    assert open_codes(tmp_path, (4,), dvae="in use").complete


# Several processes, threads.

WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from myxtts.data.codes import CodesCache

root, rank, clips = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
lengths = np.arange(clips) % 90 + 1
cache = CodesCache.open(root, np.arange(clips, dtype=np.uint64) + 1, lengths, "weights")
rng = np.random.default_rng(rank)
for batch in np.array_split(rng.permutation(clips)[: clips * 3 // 4], 40):
    codes = (batch[:, None] * 7 + np.arange(90)) % 1024
    cache.write(batch, codes)
    out = np.empty((len(batch), 90), np.int32)
    assert cache.read(batch, out)
    assert (out == np.where(np.arange(90) < lengths[batch, None], codes, 0)).all()
    if len(sys.argv) > 4:
        print("going", flush=True)
        time.sleep(0.01)
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each writes three quarters of the clips, so that half of them are written by both."""
    clips = 2000
    command = [sys.executable, "-c", WRITER, str(tmp_path / "root")]
    both = [
        subprocess.Popen([*command, str(rank), str(clips)], stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert len(folders(tmp_path / "root")) == 1
    written = np.union1d(*(np.random.default_rng(rank).permutation(clips)[: clips * 3 // 4] for rank in range(2)))
    lengths = np.arange(clips) % 90 + 1
    cache = CodesCache.open(tmp_path / "root", np.arange(clips, dtype=np.uint64) + 1, lengths, "weights")
    assert np.array_equal(np.flatnonzero(cache.known(np.arange(clips))), written)


def test_a_process_that_is_killed_leaves_only_whole_rows(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), "5", "2000", "slowly"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"
    process.kill()
    process.communicate()
    lengths = np.arange(2000) % 90 + 1
    cache = CodesCache.open(tmp_path, np.arange(2000, dtype=np.uint64) + 1, lengths, "weights")
    known = np.flatnonzero(cache.known(np.arange(2000)))
    assert 37 <= len(known) < 1500  # the first batch at least
    out = np.empty((len(known), 90), np.int32)
    assert cache.read(known, out)
    codes = (known[:, None] * 7 + np.arange(90)) % 1024
    assert (out == np.where(np.arange(90) < lengths[known, None], codes, 0)).all()


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_threads_read_only_whole_rows_while_others_write(tmp_path: Path, place: str) -> None:
    lengths = tuple(range(1, 101))
    if place == "memory":
        (tmp_path / "file").touch()
    cache = open_codes(tmp_path / "file" if place == "memory" else tmp_path, lengths)
    codes = codes_of(lengths)
    failures: list[BaseException] = []

    def reader() -> None:
        try:
            while not (known := cache.known(every(cache))).all():
                out = np.empty((100, WIDTH), np.int32)
                cache.read(every(cache), out)
                assert np.array_equal(out[known], codes[known])
        except BaseException as error:
            failures.append(error)
            raise

    def writer(seed: int) -> None:
        for clip in np.random.default_rng(seed).permutation(100):
            cache.write(np.array([clip]), codes[[clip]])

    threads = [threading.Thread(target=reader) for _ in range(2)]
    threads += [threading.Thread(target=writer, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not failures
    assert cache.complete


# Disks that do not take it.


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, logger=codes_module.__name__):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == codes_module.__name__]


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], None]]:
    """Makes a folder read-only; for root, who may write anywhere, opening its files for writing fails instead."""
    patches = []
    changed: list[Path] = []

    def make(root: Path) -> None:
        for path in (root, *root.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
            changed.append(path)
        if os.access(root, os.W_OK):
            really_open = open

            def refuse(path: Path, mode: str = "r", **others: object) -> object:
                if mode != "rb":
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
                return really_open(path, mode, **others)

            patches.append(mock.patch.object(store_module, "open", refuse, create=True))
            patches[-1].start()

    yield make
    for patch in patches:
        patch.stop()
    for path in changed:
        path.chmod(0o755)


def test_a_read_only_folder_keeps_new_codes_in_memory(tmp_path: Path, read_only, warnings) -> None:
    cache = open_codes(tmp_path)
    first = np.array([0, 1])
    cache.write(first, codes_of()[first])
    cache.close()
    before = (folders(tmp_path)[0] / "data.bin").read_bytes()
    read_only(tmp_path)
    cache = open_codes(tmp_path)
    assert cache.known(every(cache)).tolist() == [True, True, True, False, False]  # what is there is used
    cache.write(every(cache), codes_of())
    assert cache.complete
    assert np.array_equal(read(cache)[1], codes_of())
    assert (folders(tmp_path)[0] / "data.bin").read_bytes() == before
    (warning,) = warnings()
    assert "memory" in warning
    assert str(tmp_path) in warning
    cache.close()


def test_a_full_disk_stops_the_writing_but_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings
) -> None:
    cache = open_codes(tmp_path)
    cache.write(np.array([0]), codes_of()[[0]])
    pwrite, calls = os.pwrite, []

    def full(descriptor: int, content: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, content[:100], offset)  # part of the row still finds room

    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(3):
        cache.write(every(cache), codes_of())
    assert len(calls) == 2
    (warning,) = warnings()
    assert "No space left on device" in warning
    assert "computed again" in warning
    assert cache.known(every(cache)).tolist() == [True, False, True, False, False]
    assert np.array_equal(read(cache)[1][0], codes_of()[0])
    monkeypatch.undo()
    cache.close()
    again = open_codes(tmp_path)
    assert again.num_known == 2
    again.write(every(again), codes_of())
    assert again.complete


FILL_DISK = """
import sys
from pathlib import Path
import numpy as np
from myxtts.data.codes import CodesCache

lengths = np.full(64, 20_000)
cache = CodesCache.open(Path(sys.argv[1]), np.arange(64, dtype=np.uint64) + 1, lengths, "weights")
codes = (np.arange(20_000) % 1024)[None]
for clip in range(64):
    cache.write(np.array([clip]), codes)
clips, out = np.arange(64), np.empty((64, 20_000), np.int32)
known = cache.known(clips)
assert not cache.read(clips, out)
assert (out[known] == codes).all() and not out[~known].any()
print(known.sum(), cache.num_known)
"""


def test_a_disk_that_is_really_full_does_not_kill_the_process(tmp_path: Path) -> None:
    """Reading a hole of a mapped file on a full tmpfs would."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"may not mount: {mounted.stderr.decode().strip()}")
    try:
        command = [sys.executable, "-c", FILL_DISK, str(tmp_path)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert result.returncode == 0, result
    assert result.stderr.count("No space left on device") == 1
    known, counted = map(int, result.stdout.split())
    assert 20 <= known == counted < 27  # of 40 kB each


def test_a_closed_cache_writes_into_no_file(tmp_path: Path) -> None:
    """Its descriptors may belong to another file by then."""
    cache = open_codes(tmp_path)
    cache.write(np.array([0]), codes_of()[[0]])
    cache.close()
    cache.close()
    with open(tmp_path / "another", "w+b") as first, open(tmp_path / "third", "w+b") as second:
        cache.write(every(cache), codes_of())
        assert os.fstat(first.fileno()).st_size == os.fstat(second.fileno()).st_size == 0
    assert cache.known(np.array([0, 1])).tolist() == [True, False]
    assert np.array_equal(read(cache)[1][0], codes_of()[0])


def test_a_batch_is_read_in_far_less_than_a_millisecond(tmp_path: Path) -> None:
    lengths = tuple([140] * 2000)
    cache = open_codes(tmp_path, lengths)
    cache.write(every(cache), codes_of(lengths))
    out = np.zeros((64, 200), np.int32)
    times = []
    for seed in range(50):
        clips = np.random.default_rng(seed).permutation(2000)[:64]
        started = time.perf_counter()
        assert cache.read(clips, out)
        times.append(time.perf_counter() - started)
    assert np.median(times) < 0.7e-3
