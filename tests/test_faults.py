"""Crashes, kills, interrupts, full disks: a cache is there whole or not at all, and no process lingers."""

import contextlib
import operator
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import soundfile as sf
from conftest import contents, make_voice

from myxtts.config import DataSettings
from myxtts.data.pool import ProcessPool
from myxtts.data.prepare import prepare

# A sitecustomize.py: it reaches the command, its fork server and every worker.
SLOW_OR_DEADLY_DECODER = """
import os, signal, time
from myxtts import audio
decode = audio.decode
def slow_or_deadly(path, *arguments):
    if "deadly" in path.name:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(float(os.environ.get("SLOW_S", "0")))
    return decode(path, *arguments)
audio.decode = slow_or_deadly
"""


# Work that a worker process imports from here.


def double(chunk: Sequence[int]) -> list[int]:
    return [2 * item for item in chunk]


def end_on_thirteen(chunk: Sequence[int]) -> list[int]:
    if 0 in chunk:
        os.kill(os.getpid(), signal.SIGKILL)
    if 13 in chunk:
        os._exit(1)
    return double(chunk)


def meet(barrier: str, _: Sequence[int]) -> int:
    """Return once two processes are at work at the same time, at the latest after 30 seconds."""
    (Path(barrier) / str(os.getpid())).touch()
    deadline = time.monotonic() + 30
    while (met := len(list(Path(barrier).iterdir()))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return met


def chunks_of(count: int, size: int) -> list[list[int]]:
    return [list(range(count))[start : start + size] for start in range(0, count, size)]


def wait_for_one(futures: object, **options: object) -> tuple[set[object], None]:
    """A crash ends every chunk in flight, but the waiting may see only the first of them end."""
    return set(list(wait(futures, **options)[0])[:1]), None


@pytest.mark.parametrize("waiting", [wait, wait_for_one])
def test_only_items_that_end_their_process_are_lost(monkeypatch: pytest.MonkeyPatch, waiting: object) -> None:
    monkeypatch.setattr("myxtts.data.pool.wait", waiting)
    with ProcessPool(2) as pool:
        results = list(pool.run(end_on_thirteen, chunks_of(16, 4)))
        again = list(pool.run(double, chunks_of(16, 4)))  # the workers go on after a crash
        assert list(pool.run(double, [])) == []
    assert sorted(item for chunk, _ in results for item in chunk) == list(range(16))
    assert sorted(chunk for chunk, result in results if result is None) == [[0], [13]]
    assert all(result in (None, double(chunk)) for chunk, result in results)
    assert sorted(again) == [(chunk, double(chunk)) for chunk in chunks_of(16, 4)]


def test_two_chunks_are_worked_on_at_once(tmp_path: Path) -> None:
    with ProcessPool(2) as pool:
        assert [met for _, met in pool.run(partial(meet, str(tmp_path)), [[1], [2]])] == [2, 2]


@pytest.mark.parametrize("script", ["example.py", "-"], ids=["file", "stdin"])
def test_the_example_of_batches_runs_as_a_script_without_a_guard(tmp_path: Path, script: str) -> None:
    """Workers must not import the script that started them: it would prepare the corpus once more."""
    page = (Path(__file__).parent.parent / "docs" / "recordings.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "__main__" not in code
    code += "\nprint(batch['num_samples'].min() > 0)\n"
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    result = run(sys.executable, script, input=code, cwd=tmp_path)
    assert result.stdout == "True\n" and "Traceback" not in result.stderr, result.stderr


def test_an_error_in_the_work_reaches_the_caller() -> None:
    with ProcessPool(2) as pool, pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        list(pool.run(operator.index, chunks_of(40, 5)))


def test_few_chunks_are_in_flight_however_many_there_are() -> None:
    taken: list[int] = []
    endless = (taken.append(number) or [number] for number in count())
    with ProcessPool(2) as pool:
        for number, _ in zip(range(50), pool.run(double, endless), strict=False):
            assert len(taken) - number <= 1 + 2 * 2


# The command, in a process of its own.


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


def prepare_command(folder: Path, *more: str | Path, start: Sequence[str] = ("-m", "myxtts.cli")) -> list[Any]:
    return [sys.executable, *start, "prepare", "--train-data", folder, "--language", "en", *more]


@pytest.fixture
def long_corpus(make_corpus: Callable[..., Path]) -> Path:
    """Three chunks of clips."""
    return make_corpus([f"Sentence {number} of a corpus to be killed." for number in range(80)], seconds=0.6)


class Command:
    """`myxtts prepare`, and all of its processes: their environment names the folder of patches."""

    def __init__(self, folder: Path, tmp_path: Path, slow_s: float = 0.0) -> None:
        self.patches = tmp_path / "patches"
        self.patches.mkdir(exist_ok=True)
        (self.patches / "sitecustomize.py").write_text(SLOW_OR_DEADLY_DECODER)
        python_path = os.pathsep.join(filter(None, [str(self.patches), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            prepare_command(folder, "--num-workers", "2"),
            env=os.environ | {"PYTHONPATH": python_path, "SLOW_S": str(slow_s)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # nohup ignores it
        )

    def wait_for_building(self) -> None:
        assert self.process.stderr is not None
        assert any(line.startswith("BUILDING AUDIO") for line in self.process.stderr)
        time.sleep(0.2)

    def end(self) -> tuple[int, str]:
        """Exit code and what was written to standard error, once no process of the command is left."""
        _, log = self.process.communicate(timeout=60)
        deadline = time.monotonic() + 5  # seconds that a worker may outlive its parent on a busy machine
        while any(map(self.owns, Path("/proc").glob("[0-9]*/environ"))):
            assert time.monotonic() < deadline, "processes are still running"
            time.sleep(0.02)
        return self.process.returncode, log

    def owns(self, environment: Path) -> bool:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            return bytes(self.patches) in environment.read_bytes()
        return False


def prepare_here(folder: Path, **settings: object) -> dict[str, object]:
    return contents(prepare(DataSettings(train_data=folder, language="en", **settings), verify=True))


def names_in(root: Path) -> list[str]:
    """Kinds of entries; whether there is a snapshot depends on how lately the corpus was written."""
    return sorted(path.name.split("-")[0] for path in root.iterdir() if not path.name.startswith("snapshot-"))


WHOLE = ["audio", "ids", "lock", "set_aside.csv", "text", "vocabulary"]


@pytest.mark.soak
def test_fifty_kills_at_random_moments_then_a_good_cache(long_corpus: Path, tmp_path: Path) -> None:
    root, expected = long_corpus / ".myxtts", prepare_here(long_corpus)
    shutil.rmtree(root)
    started = time.monotonic()
    assert Command(long_corpus, tmp_path, slow_s=0.003).end()[0] == 0
    duration = time.monotonic() - started
    half_made = 0
    for _ in range(50):
        if random.random() < 0.7:  # else go on from what the last one left
            shutil.rmtree(root, ignore_errors=True)
        command = Command(long_corpus, tmp_path, slow_s=0.003)
        time.sleep(random.uniform(0.2, 1.0) * duration)
        command.process.kill()
        command.end()
        half_made += root.is_dir() and any(root.glob("tmp-*"))
        assert prepare_here(long_corpus) == expected
        assert names_in(root) == WHOLE
    assert half_made  # the kills did hit the building


def test_a_kill_while_decoding_then_a_good_cache(long_corpus: Path, tmp_path: Path) -> None:
    """The moment that matters most, hit for certain: half-made files are there, and workers at work."""
    expected = prepare_here(long_corpus, cache_dir=tmp_path / "undisturbed")
    command = Command(long_corpus, tmp_path, slow_s=0.05)
    command.wait_for_building()
    command.process.kill()
    command.end()
    assert list((long_corpus / ".myxtts").glob("tmp-*"))
    assert prepare_here(long_corpus) == expected
    assert len(expected) == 80 and names_in(long_corpus / ".myxtts") == WHOLE


def test_a_file_that_crashes_the_decoder_is_set_aside(corpus: Path, tmp_path: Path) -> None:
    metadata = corpus / "metadata.csv"
    for number in (1, 2):
        (corpus / "wavs" / f"clip00{number}.wav").rename(corpus / "wavs" / f"deadly{number}.wav")
        metadata.write_text(metadata.read_text().replace(f"clip00{number}", f"deadly{number}"))
    assert Command(corpus, tmp_path).end()[0] == 0
    listed = (corpus / ".myxtts" / "set_aside.csv").read_text().splitlines()[1:]
    assert [line.split("|")[:2] for line in listed] == [[f"deadly{n}", "crashed the decoder"] for n in (1, 2)]
    assert len(prepare_here(corpus)) == 4


@pytest.mark.parametrize("to_group", [False, True], ids=["kill -INT", "Ctrl-C"])
def test_an_interrupt_leaves_nothing(make_corpus: Callable[..., Path], tmp_path: Path, to_group: bool) -> None:
    """One chunk: one worker is busy with it and the other has nothing to do; neither writes anything."""
    folder = make_corpus([f"Sentence {number}." for number in range(20)], seconds=0.6)
    command = Command(folder, tmp_path, slow_s=0.08)
    command.wait_for_building()
    (os.killpg if to_group else os.kill)(command.process.pid, signal.SIGINT)
    code, log = command.end()
    assert code == 130 and "interrupted; no incomplete file was left" in log and "Traceback" not in log
    assert {"audio", "tmp"}.isdisjoint(names_in(folder / ".myxtts"))


# A full disk.


def prepare_with_limit(folder: Path, limit_bytes: int) -> subprocess.CompletedProcess[str]:
    """`myxtts prepare` where no file can grow beyond a size; Python would write truncated bytecode there."""
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    return run(*prepare_command(folder, start=["-Bm", "myxtts.cli"]), preexec_fn=limit)


def check_full_disk(result: subprocess.CompletedProcess[str], root: Path, place: str = "the cache in ") -> None:
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    assert f"No room for {place}{root}" in result.stderr and "MB are free" in result.stderr
    assert "--cache-dir" in result.stderr
    assert not [*root.glob("tmp-*"), *root.glob(".*")]


@pytest.mark.parametrize(
    ("num_clips", "limit_bytes", "made"),
    [(80, 4200, []), (6, 4200, ["text"]), (6, 100_000, ["text", "vocabulary"])],
    ids=["text", "vocabulary", "audio"],
)
def test_a_full_disk_ends_with_advice(
    make_corpus: Callable[..., Path], num_clips: int, limit_bytes: int, made: list[str]
) -> None:
    folder = make_corpus([f"Sentence number {number}." for number in range(num_clips)], seconds=0.6)
    root = folder / ".myxtts"
    check_full_disk(prepare_with_limit(folder, limit_bytes), root)
    assert names_in(root) == sorted(["lock", *made])
    assert len(prepare_here(folder)) == num_clips
    assert names_in(root) == WHOLE


def test_no_room_for_the_list_alone(make_corpus: Callable[..., Path]) -> None:
    folder = make_corpus(seconds=0.6)  # 160 kB of samples
    root, metadata = folder / ".myxtts", folder / "metadata.csv"
    absent = "".join(f"{'absent' * 20}{number}|Nothing there.\n" for number in range(1000))
    metadata.write_text(metadata.read_text() + absent)
    check_full_disk(prepare_with_limit(folder, 200_000), root, place="")
    assert not (root / "set_aside.csv").exists()
    assert prepare_with_limit(folder, 10**9).returncode == 0
    assert len((root / "set_aside.csv").read_text().splitlines()) == 1001


def test_a_small_filesystem(small_disk: Path, make_corpus: Callable[..., Path]) -> None:
    folder = make_corpus([f"Sentence {number}." for number in range(40)], seconds=1.5)
    result = run(*prepare_command(folder, "--cache-dir", small_disk))
    check_full_disk(result, *small_disk.iterdir())
    for number in range(15, 40):
        (folder / "wavs" / f"clip{number:03d}.wav").unlink()
    assert len(prepare_here(folder, cache_dir=small_disk)) == 15


def test_a_huge_corpus_needs_little_memory(tmp_path: Path) -> None:
    """400 clips of 9 s are 160 MB of samples: neither the command nor a worker ever holds them all."""
    folder = tmp_path / "corpus"
    (folder / "wavs").mkdir(parents=True)
    sf.write(folder / "wavs" / "all.wav", make_voice(9.0), 22050, subtype="PCM_16")
    for number in range(400):
        (folder / "wavs" / f"{number}.wav").hardlink_to(folder / "wavs" / "all.wav")
    (folder / "metadata.csv").write_text("".join(f"{n}|Sentence number {n} of many.\n" for n in range(400)))
    # Of its own process not ru_maxrss: it starts at what the process that called exec held.
    code = """import re, resource, sys; from myxtts.cli import main; main(sys.argv[1:])
print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"""
    own_kb, worker_kb = map(int, run(*prepare_command(folder, start=["-c", code])).stdout.split()[-2:])
    assert own_kb < 400 * 1024  # the mapped cache of 160 MB, which the kernel may drop, counts here
    assert worker_kb < 300 * 1024
