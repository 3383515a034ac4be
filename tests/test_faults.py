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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from conftest import contents

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


def exit_on_thirteen(chunk: Sequence[int]) -> list[int]:
    if 13 in chunk:
        os._exit(1)
    return double(chunk)


def meet(barrier: str, _: Sequence[int]) -> int:
    """Return only once two processes are at work at the same time."""
    (Path(barrier) / str(os.getpid())).touch()
    deadline = time.monotonic() + 30
    while len(list(Path(barrier).iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(list(Path(barrier).iterdir()))


def kill_on_multiples_of_thirteen(chunk: Sequence[int]) -> list[int]:
    if any(item % 13 == 0 for item in chunk):
        os.kill(os.getpid(), signal.SIGKILL)
    return double(chunk)


def raise_on_thirteen(chunk: Sequence[int]) -> list[int]:
    if 13 in chunk:
        raise OSError(28, "No space left on device")
    return double(chunk)


def chunks_of(count: int, size: int) -> list[list[int]]:
    return [list(range(count))[start : start + size] for start in range(0, count, size)]


@pytest.mark.parametrize(
    ("work", "deadly"),
    [(double, []), (exit_on_thirteen, [13]), (kill_on_multiples_of_thirteen, [0, 13, 26])],
)
def test_only_the_item_that_ends_its_process_is_lost(
    work: Callable[[Sequence[int]], list[int]], deadly: list[int]
) -> None:
    done: Counter[int] = Counter()
    lost: list[int] = []
    with ProcessPool(2) as pool:
        for chunk, result in pool.run(work, chunks_of(28, 7)):
            if result is None:
                lost += chunk
            else:
                assert result == double(chunk)
                done.update(chunk)
    assert sorted(lost) == deadly
    assert done == Counter(item for item in range(28) if item not in deadly)


def test_two_chunks_are_worked_on_at_once(tmp_path: Path) -> None:
    with ProcessPool(2) as pool:
        counts = [result for _, result in pool.run(partial(meet, str(tmp_path)), [[1], [2]])]
    assert counts == [2, 2]


@pytest.mark.parametrize("through", ["file", "stdin"])
def test_the_example_of_batches_runs_as_a_script_without_a_guard(tmp_path: Path, through: str) -> None:
    """Workers must not import the script that started them: it would prepare the corpus once more."""
    page = (Path(__file__).parent.parent / "docs" / "recordings.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "__main__" not in code
    (tmp_path / "example.py").write_text(code + "\nprint(batch['num_samples'].min() > 0)\n", encoding="utf-8")
    script = ["example.py"] if through == "file" else ["-"]
    with open(tmp_path / "example.py", "rb") as source:
        result = subprocess.run(
            [sys.executable, *script],
            stdin=source,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert result.stdout == "True\n", result.stderr
    assert "Traceback" not in result.stderr


def test_workers_serve_again_after_a_crash() -> None:
    with ProcessPool(2) as pool:
        assert len(list(pool.run(exit_on_thirteen, chunks_of(20, 5)))) > 4
        assert sorted(chunk[0] for chunk, _ in pool.run(double, chunks_of(20, 5))) == [0, 5, 10, 15]
        assert list(pool.run(double, [])) == []


def test_chunks_in_flight_during_a_crash_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash ends every chunk in flight, but the waiting may see only the first of them end."""

    def wait_for_one(futures: object, **options: object) -> tuple[set[object], None]:
        return set(list(wait(futures, **options)[0])[:1]), None

    monkeypatch.setattr("myxtts.data.pool.wait", wait_for_one)
    with ProcessPool(2) as pool:
        results = list(pool.run(exit_on_thirteen, chunks_of(24, 3)))
    assert Counter(item for chunk, _ in results for item in chunk) == Counter(range(24))
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


@pytest.fixture
def long_corpus(make_corpus: Callable[..., Path]) -> Path:
    """Three chunks of clips."""
    return make_corpus([f"Sentence {number} of a corpus to be killed." for number in range(80)], seconds=0.6)


class Command:
    """`myxtts prepare` with a mark in the environment by which all of its processes are found again."""

    def __init__(self, folder: Path, tmp_path: Path, slow_s: float = 0.0) -> None:
        self.mark = uuid.uuid4().hex
        patches = tmp_path / "patches"
        patches.mkdir(exist_ok=True)
        (patches / "sitecustomize.py").write_text(SLOW_OR_DEADLY_DECODER)
        python_path = os.pathsep.join(filter(None, [str(patches), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"MARK": self.mark, "PYTHONPATH": python_path, "SLOW_S": str(slow_s)}
        arguments = ["prepare", "--train-data", str(folder), "--language", "en", "--num-workers", "2"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "myxtts.cli", *arguments],
            env=environment,
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
        while self.processes():
            assert time.monotonic() < deadline, f"still running: {self.processes()}"
            time.sleep(0.02)
        return self.process.returncode, log

    def processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"MARK={self.mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # gone meanwhile
                continue
        return found


def prepare_here(folder: Path, **settings: object) -> dict[str, object]:
    return contents(prepare(DataSettings(train_data=folder, language="en", **settings), verify=True))


def names_in(root: Path) -> list[str]:
    """Kinds of entries; whether there is a snapshot depends on how lately the corpus was written."""
    return sorted(path.name.split("-")[0] for path in root.iterdir() if not path.name.startswith("snapshot-"))


WHOLE = ["audio", "ids", "lock", "set_aside.csv", "text", "vocabulary"]


def kill_at_random_moments(folder: Path, tmp_path: Path, times: int, chance: random.Random) -> None:
    root = folder / ".myxtts"
    expected = prepare_here(folder)
    assert len(expected) == 80
    shutil.rmtree(root)
    started = time.monotonic()
    assert Command(folder, tmp_path, slow_s=0.003).end()[0] == 0
    duration = time.monotonic() - started
    half_made = 0
    for _ in range(times):
        if chance.random() < 0.7:  # else go on from what the last one left
            shutil.rmtree(root, ignore_errors=True)
        command = Command(folder, tmp_path, slow_s=0.003)
        time.sleep(chance.uniform(0.2, 1.0) * duration)
        command.process.kill()
        command.end()
        half_made += root.is_dir() and any(root.glob("tmp-*"))
        assert prepare_here(folder) == expected
        assert names_in(root) == WHOLE
    assert half_made or times < 20  # the kills did hit the building


def test_kill_dash_nine_then_a_good_cache(long_corpus: Path, tmp_path: Path) -> None:
    kill_at_random_moments(long_corpus, tmp_path, 4, random.Random(1))


@pytest.mark.soak
def test_fifty_kills_then_a_good_cache(long_corpus: Path, tmp_path: Path) -> None:
    kill_at_random_moments(long_corpus, tmp_path, 50, random.Random())


def test_killed_while_decoding(long_corpus: Path, tmp_path: Path) -> None:
    """The moment that matters most, hit for certain: half-made files are there, and workers at work."""
    command = Command(long_corpus, tmp_path, slow_s=0.05)
    command.wait_for_line("BUILDING AUDIO")
    time.sleep(0.2)
    command.process.kill()
    command.end()
    assert list((long_corpus / ".myxtts").glob("tmp-*"))
    assert len(prepare_here(long_corpus)) == 80
    assert names_in(long_corpus / ".myxtts") == WHOLE


def test_a_file_that_crashes_the_decoder_is_set_aside(long_corpus: Path, tmp_path: Path) -> None:
    for name in ("deadly1", "deadly2"):
        shutil.copy(long_corpus / "wavs" / "clip001.wav", long_corpus / "wavs" / f"{name}.wav")
        with open(long_corpus / "metadata.csv", "a") as metadata:
            metadata.write(f"{name}|This one ends the process.\n")
    assert Command(long_corpus, tmp_path).end()[0] == 0
    listed = (long_corpus / ".myxtts" / "set_aside.csv").read_text().splitlines()[1:]
    assert [line.split("|")[:2] for line in listed] == [[f"deadly{n}", "crashed the decoder"] for n in (1, 2)]
    prepared = prepare(DataSettings(train_data=long_corpus, language="en"))
    assert len(contents(prepared)) == 80


@pytest.mark.parametrize("to_group", [False, True], ids=["kill -INT", "Ctrl-C"])
def test_an_interrupt_leaves_nothing(make_corpus: Callable[..., Path], tmp_path: Path, to_group: bool) -> None:
    """One chunk: a worker is busy with it and another has nothing to do; neither says anything."""
    folder = make_corpus([f"Sentence {number}." for number in range(20)], seconds=0.6)
    command = Command(folder, tmp_path, slow_s=0.08)
    command.wait_for_line("BUILDING AUDIO")
    time.sleep(0.3)
    if to_group:
        os.killpg(command.process.pid, signal.SIGINT)
    else:
        command.process.send_signal(signal.SIGINT)
    code, log = command.end()
    assert code == 130
    assert "interrupted; nothing half-made was left behind" in log
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
    command = [sys.executable, "-c", code, "prepare", "--train-data", str(folder), "--language", "en"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def check_full_disk(result: subprocess.CompletedProcess[str], root: Path, place: str = "") -> None:
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert f"No room for {place or f'the cache in {root}'}" in result.stderr
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


def test_no_room_for_the_list_alone(corpus: Path) -> None:
    with open(corpus / "metadata.csv", "a") as metadata:
        metadata.writelines(f"absent{number}|Nothing there.\n" for number in range(12_000))
    root = corpus / ".myxtts"
    check_full_disk(prepare_with_limit(corpus, 700_000), root, str(root / "set_aside.csv"))
    assert not (root / "set_aside.csv").exists()
    assert prepare_with_limit(corpus, 10**9).returncode == 0
    assert len((root / "set_aside.csv").read_text().splitlines()) == 12_001


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"may not mount: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_small_filesystem(small_disk: Path, make_corpus: Callable[..., Path]) -> None:
    folder = make_corpus([f"Sentence {number}." for number in range(40)], seconds=1.5)
    command = [sys.executable, "-m", "myxtts.cli", "prepare", "--train-data", str(folder), "--language", "en"]
    result = subprocess.run(
        [*command, "--cache-dir", str(small_disk)], capture_output=True, text=True, check=False
    )
    (root,) = small_disk.iterdir()
    check_full_disk(result, root)
    assert "MB are free" in result.stderr
    for number in range(15, 40):
        (folder / "wavs" / f"clip{number:03d}.wav").unlink()
    assert len(prepare_here(folder, cache_dir=small_disk)) == 15


def test_a_huge_corpus_needs_little_memory(tmp_path: Path, voice: Callable[..., np.ndarray]) -> None:
    """400 clips of 9 s are 160 MB of samples: neither the command nor a worker ever holds them all."""
    folder = tmp_path / "corpus"
    (folder / "wavs").mkdir(parents=True)
    sf.write(folder / "wavs" / "all.flac", voice(9.0), 22050)
    for number in range(400):
        os.link(folder / "wavs" / "all.flac", folder / "wavs" / f"{number}.flac")
    (folder / "metadata.csv").write_text("".join(f"{n}|Sentence number {n} of many.\n" for n in range(400)))
    code = (
        "import re, resource, sys; from myxtts.cli import main\n"
        "main(sys.argv[1:])\n"
        # Not ru_maxrss: it starts at what the process that called exec held.
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)"
    )
    command = [sys.executable, "-c", code, "prepare", "--train-data", str(folder), "--language", "en"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    own_mb, worker_mb = map(int, result.stdout.split()[-2:])
    assert own_mb < 400  # the mapped cache of 160 MB, which the kernel may drop, counts here
    assert worker_mb < 300
