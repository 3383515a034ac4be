"""The codes cache: rows appear one by one, whole or not at all, whoever writes, dies, or runs out of disk.

What it shares with stores (reuse, damage, versions, pruning) is in `test_store`.
"""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from myxtts.data import store
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


def complete(cache: CodesCache) -> bool:
    return bool(cache.known(every(cache)).all())


def read(cache: CodesCache, dtype: str = "int32") -> tuple[bool, np.ndarray]:
    out = np.full((len(cache), WIDTH), 77, dtype)
    return cache.read(every(cache), out), out


def folders(root: Path) -> list[Path]:
    return sorted(root.glob("codes-*"))


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
    assert (complete(cache), len(cache)) == (False, 5)
    chosen = np.array([3, 0])
    cache.write(chosen, codes_of()[chosen])
    assert cache.known(np.array([4, 3, 2, 0])).tolist() == [False, True, True, True]
    whole, out = read(cache)
    assert not whole
    assert not out[[1, 4]].any()
    assert np.array_equal(out[chosen], codes_of()[chosen])
    cache.write(every(cache), codes_of())
    assert complete(cache)


def test_a_known_row_is_seen_by_all_and_never_written_again(tmp_path: Path) -> None:
    """A GPU may round otherwise in another batch: a row that others may be reading stays as it is."""
    cache, other = open_codes(tmp_path), open_codes(tmp_path)
    cache.write(every(cache), codes_of())
    assert complete(other)
    other.write(every(other), codes_of(seed=1))
    assert np.array_equal(read(cache)[1], codes_of())


def test_codes_of_other_lengths_are_not_reused(tmp_path: Path) -> None:
    cache = open_codes(tmp_path)
    cache.write(every(cache), codes_of())
    other = open_codes(tmp_path, lengths=(6, 139, 2, 34, 3))
    assert not other.known(every(other)).any()


def test_a_checksum_of_another_row_makes_a_row_absent(tmp_path: Path) -> None:
    cache = open_codes(tmp_path, (4, 4))
    cache.write(every(cache), np.full((2, 4), 9))  # equal codes of different audio
    path = folders(tmp_path)[0] / "checksums.bin"
    content = path.read_bytes()
    path.write_bytes(content[8:16] + content[:8] + content[16:])
    assert open_codes(tmp_path, (4, 4)).known(np.array([0])).tolist() == [False]


def test_values_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    cache, first = open_codes(tmp_path, (3,)), np.array([0])
    for bad in ([1, 2, -1], [1, 2, 0x10000], [1.0, 2.0, 3.0], [1, 2]):
        with pytest.raises(ValueError, match=r"whole numbers|more than"):
            cache.write(first, np.array([bad]))
    assert not cache.known(first).any()
    cache.write(first, np.array([[0, 1, 0xFFFF]]))
    with pytest.raises(ValueError, match="more than"):
        cache.read(first, np.zeros((1, 2), np.int32))


# Rows of other sets of clips.


def test_folders_in_use_are_not_removed(tmp_path: Path) -> None:
    in_use = open_codes(tmp_path, (4,), dvae="in use")
    (folder,) = folders(tmp_path)
    os.utime(folder, (1, 1))
    for number in range(FOLDERS_KEPT["codes"] + 1):
        open_codes(tmp_path, (4,), dvae=f"dvae {number}").close()
    assert folder.exists()
    in_use.write(np.array([0]), np.full((1, 4), 8))
    in_use.close()
    assert complete(open_codes(tmp_path, (4,), dvae="in use"))


# Several processes, threads.

WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from tests.test_codes import numbered_codes, open_numbered

cache, rng = open_numbered(Path(sys.argv[1])), np.random.default_rng(int(sys.argv[2]))
for batch in np.array_split(rng.permutation(2000)[:1500], 40):
    cache.write(batch, numbered_codes(batch))
    out = np.empty((len(batch), 90), np.int32)
    assert cache.read(batch, out)
    assert (out == numbered_codes(batch)).all()
    if len(sys.argv) > 3:
        print("going", flush=True)
        time.sleep(0.01)
"""


def open_numbered(root: Path) -> CodesCache:
    """2000 clips of 1 to 90 codes."""
    return CodesCache.open(root, np.arange(2000, dtype=np.uint64) + 1, np.arange(2000) % 90 + 1, "weights")


def numbered_codes(clips: np.ndarray) -> np.ndarray:
    codes = (clips[:, None] * 7 + np.arange(90)) % 1024
    return np.where(np.arange(90) <= clips[:, None] % 90, codes, 0)


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each writes three quarters of the clips, so that half of them are written by both."""
    root = tmp_path / "root"
    both = [subprocess.Popen([sys.executable, "-c", WRITER, root, rank]) for rank in "01"]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert len(folders(root)) == 1
    written = np.union1d(*(np.random.default_rng(rank).permutation(2000)[:1500] for rank in range(2)))
    assert np.array_equal(np.flatnonzero(open_numbered(root).known(np.arange(2000))), written)


def test_a_process_that_is_killed_leaves_only_whole_rows(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, tmp_path, "5", "slowly"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n"
        process.kill()
    cache = open_numbered(tmp_path)
    known = np.flatnonzero(cache.known(np.arange(2000)))
    assert 37 <= len(known) < 1500  # the first batch at least
    out = np.empty((len(known), 90), np.int32)
    assert cache.read(known, out)
    assert np.array_equal(out, numbered_codes(known))


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_threads_read_only_whole_rows_while_others_write(tmp_path: Path, place: str) -> None:
    lengths = tuple(range(1, 101))
    if place == "memory":
        (tmp_path / "file").touch()
    cache = open_codes(tmp_path / "file" if place == "memory" else tmp_path, lengths)
    codes = codes_of(lengths)

    def check() -> None:
        while not (known := cache.known(every(cache))).all():
            assert np.array_equal(read(cache)[1][known], codes[known])

    def write(seed: int) -> None:
        for clip in np.random.default_rng(seed).permutation(100):
            cache.write(np.array([clip]), codes[[clip]])

    with ThreadPoolExecutor(4) as threads:
        running = [
            threads.submit(check),
            threads.submit(check),
            threads.submit(write, 0),
            threads.submit(write, 1),
        ]
        for future in running:
            future.result(timeout=30)
    assert complete(cache)


# Disks that do not take it.


def test_a_read_only_folder_keeps_new_codes_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, mode: str = "r", **others: object) -> object:
        if mode != "rb":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return open(path, mode, **others)

    cache = open_codes(tmp_path)
    first = np.array([0, 1])
    cache.write(first, codes_of()[first])
    cache.close()
    before = (folders(tmp_path)[0] / "data.bin").read_bytes()
    monkeypatch.setattr(store, "open", refuse, raising=False)  # root may write into a read-only folder
    cache = open_codes(tmp_path)
    assert cache.known(every(cache)).tolist() == [True, True, True, False, False]  # what is there is used
    cache.write(every(cache), codes_of())
    assert complete(cache)
    assert np.array_equal(read(cache)[1], codes_of())
    assert (folders(tmp_path)[0] / "data.bin").read_bytes() == before
    (warning,) = caplog.messages
    assert "memory" in warning and str(tmp_path) in warning
    cache.close()


def test_a_full_disk_stops_the_writing_but_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    (warning,) = caplog.messages
    assert "No space left on device" in warning and "computed again" in warning
    assert cache.known(every(cache)).tolist() == [True, False, True, False, False]
    assert np.array_equal(read(cache)[1][0], codes_of()[0])
    monkeypatch.undo()
    cache.close()
    again = open_codes(tmp_path)
    assert again.known(every(again)).sum() == 2
    again.write(every(again), codes_of())
    assert complete(again)


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
print(known.sum())
"""


def test_a_disk_that_is_really_full_does_not_kill_the_process(small_disk: Path) -> None:
    """Reading a hole of a mapped file on a full tmpfs would."""
    command = [sys.executable, "-c", FILL_DISK, small_disk]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr.count("No space left on device") == 1
    assert 40 <= int(result.stdout) < 54  # of 40 kB each


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
