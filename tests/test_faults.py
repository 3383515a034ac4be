"""Crashes, kills, interrupts, full disks: a cache is there whole or not at all, and no process lingers."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import soundfile as sf
from conftest import contents, make_voice

from myxtts.config import DataSettings
from myxtts.data.pool import ProcessPool
from myxtts.data.prepare import prepare

EXIT_LIMIT_S = 5.0
"""How long a worker may outlive its parent on a busy machine."""

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


def raise_on_thirteen(chunk: Sequence[int]) -> list[int]:
    if 13 in chunk:
        raise OSError(28, "No space left on device")
    return double(chunk)


def meet(barrier: str, _: Sequence[int]) -> int:
    """Return only once two processes are at work at the same time."""
    (Path(barrier) / str(os.getpid())).touch()
    deadline = time.monotonic() + 30
    while len(list(Path(barrier).iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(list(Path(barrier).iterdir()))


def chunks_of(count: int, size: int) -> list[list[int]]:
    return [list(range(count))[start : start + size] for start in range(0, count, size)]


def test_only_items_that_end_their_process_are_lost() -> None:
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
        counts = [result for _, result in pool.run(partial(meet, str(tmp_path)), [[1], [2]])]
    assert counts == [2, 2]


@pytest.mark.parametrize("script", ["example.py", "-"], ids=["file", "stdin"])
def test_the_example_of_batches_runs_as_a_script_without_a_guard(tmp_path: Path, script: str) -> None:
    """Workers must not import the script that started them: it would prepare the corpus once more."""
    page = (Path(__file__).parent.parent / "docs" / "recordings.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "__main__" not in code
    code += "\nprint(batch['num_samples'].min() > 0)\n"
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    result = run(sys.executable, script, input=code, cwd=tmp_path)
    assert result.stdout == "True\n", result.stderr
    assert "Traceback" not in result.stderr


def test_chunks_in_flight_during_a_crash_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash ends every chunk in flight, but the waiting may see only the first of them end."""

    def wait_for_one(futures: object, **options: object) -> tuple[set[object], None]:
        return set(list(wait(futures, **options)[0])[:1]), None

    monkeypatch.setattr("myxtts.data.pool.wait", wait_for_one)
    with ProcessPool(2) as pool:
        results = list(pool.run(end_on_thirteen, chunks_of(18, 3)[1:]))
    assert sorted(item for chunk, _ in results for item in chunk) == list(range(3, 18))
    assert [chunk for chunk, result in results if result is None] == [[13]]


def test_an_error_in_the_work_reaches_the_caller() -> None:
    with ProcessPool(2) as pool, pytest.raises(OSError, match="No space"):
        list(pool.run(raise_on_thirteen, chunks_of(40, 5)))


def test_few_chunks_are_in_flight_however_many_there_are() -> None:
    taken = 0

    def endless() -> Iterator[list[int]]:
        nonlocal taken
        while True:
            taken += 1
            yield [taken]

    with ProcessPool(2) as pool:
        for number, _ in enumerate(pool.run(double, endless()), 1):
            assert taken - number <= 2 * 2
            if number == 50:
                break


# The command, in a process of its own.


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


def prepare_command(folder: Path, *more: str | Path, code: str = "") -> list[str | Path]:
    """`myxtts prepare` on a folder, or this code with its arguments."""
    start = ["-c", code] if code else ["-m", "myxtts.cli"]
    return [sys.executable, *start, "prepare", "--train-data", folder, "--language", "en", *more]


@pytest.fixture
def long_corpus(make_corpus: Callable[..., Path]) -> Path:
    """Three chunks of clips."""
    return make_corpus([f"Sentence {number} of a corpus to be killed." for number in range(80)], seconds=0.6)


class Command:
    """`myxtts prepare` with a mark in the environment by which all of its processes are found again."""

    def __init__(self, folder: Path, tmp_path: Path, slow_s: float = 0.0) -> None:
        self.mark = f"MARK={uuid.uuid4().hex}"
        patches = tmp_path / "patches"
        patches.mkdir(exist_ok=True)
        (patches / "sitecustomize.py").write_text(SLOW_OR_DEADLY_DECODER)
        python_path = os.pathsep.join(filter(None, [str(patches), os.environ.get("PYTHONPATH")]))
        environment = {"MARK": self.mark[5:], "PYTHONPATH": python_path, "SLOW_S": str(slow_s)}
        self.process = subprocess.Popen(
            prepare_command(folder, "--num-workers", "2"),
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # nohup ignores it
        )

    def wait_for_line(self, start: str) -> None:
        assert self.process.stderr is not None
        assert any(line.startswith(start) for line in self.process.stderr)

    def end(self) -> tuple[int, str]:
        """Exit code and what was written to standard error, once no process of the command is left."""
        _, log = self.process.communicate(timeout=60)
        deadline = time.monotonic() + EXIT_LIMIT_S
        while running := [path for path in Path("/proc").glob("[0-9]*") if self.owns(path)]:
            assert time.monotonic() < deadline, f"still running: {running}"
            time.sleep(0.02)
        return self.process.returncode, log

    def owns(self, process: Path) -> bool:
        try:
            return self.mark.encode() in (process / "environ").read_bytes()
        except OSError:  # it has ended meanwhile
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
    command.wait_for_line("BUILDING AUDIO")
    time.sleep(0.2)
    command.process.kill()
    command.end()
    assert list((long_corpus / ".myxtts").glob("tmp-*"))
    assert prepare_here(long_corpus) == expected
    assert len(expected) == 80 and names_in(long_corpus / ".myxtts") == WHOLE


def test_a_file_that_crashes_the_decoder_is_set_aside(corpus: Path, tmp_path: Path) -> None:
    for name in ("deadly1", "deadly2"):
        shutil.copy(corpus / "wavs" / "clip001.wav", corpus / "wavs" / f"{name}.wav")
        with open(corpus / "metadata.csv", "a") as metadata:
            metadata.write(f"{name}|This one ends the process.\n")
    assert Command(corpus, tmp_path).end()[0] == 0
    listed = (corpus / ".myxtts" / "set_aside.csv").read_text().splitlines()[1:]
    assert [line.split("|")[:2] for line in listed] == [[f"deadly{n}", "crashed the decoder"] for n in (1, 2)]
    assert len(contents(prepare(DataSettings(train_data=corpus, language="en")))) == 6


@pytest.mark.parametrize("to_group", [False, True], ids=["kill -INT", "Ctrl-C"])
def test_an_interrupt_leaves_nothing(make_corpus: Callable[..., Path], tmp_path: Path, to_group: bool) -> None:
    """One chunk: one worker is busy with it and the other has nothing to do; neither writes anything."""
    folder = make_corpus([f"Sentence {number}." for number in range(20)], seconds=0.6)
    command = Command(folder, tmp_path, slow_s=0.08)
    command.wait_for_line("BUILDING AUDIO")
    time.sleep(0.3)
    (os.killpg if to_group else os.kill)(command.process.pid, signal.SIGINT)
    code, log = command.end()
    assert code == 130
    assert "interrupted; no incomplete file was left" in log
    assert "Traceback" not in log
    assert "audio" not in names_in(folder / ".myxtts")
    assert not list((folder / ".myxtts").glob("tmp-*"))


# A full disk.


def prepare_with_limit(folder: Path, limit_bytes: int) -> subprocess.CompletedProcess[str]:
    code = (
        "import resource, sys; from myxtts.cli import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes}, {limit_bytes}))\n"
        "if __name__ == '__main__': sys.exit(main(sys.argv[1:]))"
    )
    return run(*prepare_command(folder, code=code))


def check_full_disk(result: subprocess.CompletedProcess[str], root: Path, place: str = "the cache in ") -> None:
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert f"No room for {place}{root}" in result.stderr
    assert "--cache-dir" in result.stderr
    assert not list(root.glob("tmp-*"))
    assert not list(root.glob(".*"))


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
    with open(folder / "metadata.csv", "a") as metadata:
        metadata.writelines(f"{'absent' * 20}{number}|Nothing there.\n" for number in range(1000))
    root = folder / ".myxtts"
    check_full_disk(prepare_with_limit(folder, 200_000), root, place="")
    assert not (root / "set_aside.csv").exists()
    assert prepare_with_limit(folder, 10**9).returncode == 0
    assert len((root / "set_aside.csv").read_text().splitlines()) == 1001


def test_a_small_filesystem(small_disk: Path, make_corpus: Callable[..., Path]) -> None:
    folder = make_corpus([f"Sentence {number}." for number in range(40)], seconds=1.5)
    result = run(*prepare_command(folder, "--cache-dir", small_disk))
    (root,) = small_disk.iterdir()
    check_full_disk(result, root)
    assert "MB are free" in result.stderr
    for number in range(15, 40):
        (folder / "wavs" / f"clip{number:03d}.wav").unlink()
    assert len(prepare_here(folder, cache_dir=small_disk)) == 15


def test_a_huge_corpus_needs_little_memory(tmp_path: Path) -> None:
    """400 clips of 9 s are 160 MB of samples: neither the command nor a worker ever holds them all."""
    folder = tmp_path / "corpus"
    (folder / "wavs").mkdir(parents=True)
    sf.write(folder / "wavs" / "all.wav", make_voice(9.0), 22050, subtype="PCM_16")
    for number in range(400):
        os.link(folder / "wavs" / "all.wav", folder / "wavs" / f"{number}.wav")
    (folder / "metadata.csv").write_text("".join(f"{n}|Sentence number {n} of many.\n" for n in range(400)))
    code = (
        "import re, resource, sys; from myxtts.cli import main\n"
        "main(sys.argv[1:])\n"
        # Not ru_maxrss: it starts at what the process that called exec held.
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)"
    )
    own_mb, worker_mb = map(int, run(*prepare_command(folder, code=code)).stdout.split()[-2:])
    assert own_mb < 400  # the mapped cache of 160 MB, which the kernel may drop, counts here
    assert worker_mb < 300
