"""Poor surroundings: output that fails, no letters but ASCII, few open files, no home, a clock set back, leaks."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import contents
from training_fixtures import Clips, arguments, newest
from training_processes import Server

from myxtts.config import DataSettings
from myxtts.data.prepare import prepare
from myxtts.data.store import user_cache
from myxtts.errors import DatasetError

pytest_plugins = ["training_fixtures", "training_processes"]

PERSIAN = ("سلام دنیا", "این یک جمله است", "کتاب روی میز است")
C_LOCALE = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.mark.parametrize(
    ("environment", "options", "code"),
    [
        ({"PYTHONIOENCODING": "ascii"}, {}, 0),
        (C_LOCALE, {}, 0),
        ({"TERM": "dumb", "NO_COLOR": "1"}, {}, 0),
        ({"HOME": "/dev/null", "XDG_CACHE_HOME": ""}, {}, 0),
        ({}, {"preexec_fn": partial(resource.setrlimit, resource.RLIMIT_NOFILE, (64, 64))}, 0),
        ({}, {"preexec_fn": partial(os.closerange, 0, 3), "stdout": None, "stderr": None}, 0),
        ({}, {"stdout": Path("/dev/full")}, 1),  # the result is lost, and the command says so
    ],
    ids=["ASCII", "locale C", "dumb terminal", "no home", "64 files", "no streams", "full output"],
)
def test_a_corpus_is_prepared_in_poor_surroundings(
    environment: dict[str, str], options: dict[str, Any], code: int, make_corpus: Callable[..., Path]
) -> None:
    folder = make_corpus(PERSIAN, seconds=0.6)
    command = [sys.executable, "-m", "myxtts.cli", "prepare", "--train-data", folder, "--language", "fa"]
    if isinstance(options.get("stdout"), Path):
        options = options | {"stdout": os.open(options["stdout"], os.O_WRONLY)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": os.environ | environment} | options
    result = subprocess.run([*command, "--num-workers", "16"], check=False, timeout=120, **options)
    shown = (result.stdout or b"") + (result.stderr or b"")
    assert result.returncode == code, shown.decode()
    assert b"Traceback" not in shown and b"\x1b" not in shown
    assert ("cannot be written: No space left on device" in shown.decode()) == bool(code)
    assert len(contents(prepare(DataSettings(train_data=folder, language="fa")))) == 3


def test_a_user_without_a_home_folder_is_told_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(DatasetError, match=r"user 54321 has no home folder. Give --cache-dir DIR, or set HOME"):
        user_cache()


def test_a_clock_set_back_costs_no_new_store(make_corpus: Callable[..., Path]) -> None:
    """The least recently used stores are removed; those from the future are not newer than the one just built."""
    folder = make_corpus(seconds=0.6)
    for vocab_size in range(260, 320, 10):
        data = DataSettings(train_data=folder, language="en", num_workers=1, vocab_size=vocab_size)
        assert len(contents(prepare(data))) == 6
        for path in (folder / ".myxtts").iterdir():
            os.utime(path, (time.time() + 10**6,) * 2)


@pytest.mark.usefixtures("small")
def test_a_run_goes_on_when_its_output_has_no_reader(clips: Clips, tmp_path: Path, server: Server) -> None:
    run = server.start(arguments(tmp_path / "run", clips(4), "--stages dvae"), "no_reader")
    assert run.wait() == 0
    assert "Standard output cannot be written: Broken pipe. The command continues." in run.output
    assert newest(tmp_path / "run", "dvae").step == 4


@pytest.mark.usefixtures("small")
def test_a_crash_is_not_silent(clips: Clips, tmp_path: Path, server: Server) -> None:
    run = server.start(arguments(tmp_path / "run", clips(4), "--stages dvae"), "second_step_hangs")
    run.wait_for("step 1/")
    run.signal(signal.SIGBUS)
    assert run.wait() == -signal.SIGBUS and "Fatal Python error: Bus error" in run.output


@pytest.mark.usefixtures("small")
def test_a_run_on_a_full_disk_ends_in_words_and_goes_on_once_there_is_room(
    clips: Clips, small_disk: Path, server: Server
) -> None:
    """There is room for the first step, but not for checkpoints and the page."""
    run_folder, filler = small_disk / "run", small_disk / "filler"
    command = arguments(run_folder, clips(4), "--stages dvae,gpt,decoder --save-step 2")
    run = server.start(command, "second_step_is_slow")
    run.wait_for("step 1/")
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert run.wait() == 1 and "Traceback" not in run.output, run.output
    assert "Step 4 of stage dvae could not be saved: No space left on device" in run.output
    assert "Older checkpoints are kept" in run.output
    filler.unlink()
    server.start(command).wait()  # the next stage is too large for this disk
    assert newest(run_folder, "dvae").step == 4


@pytest.mark.soak
@pytest.mark.usefixtures("small")
def test_memory_stays_level_over_300_steps_of_every_stage(clips: Clips, tmp_path: Path, server: Server) -> None:
    kept = tmp_path / "memory.txt"
    flags = "--max-steps 300 --dvae-steps 300 --decoder-steps 300 --epochs 1000 --save-step 50"
    run = server.start(arguments(tmp_path / "run", clips(5), flags), "record_memory", KEPT=str(kept))
    assert run.wait(limit_s=600) == 0, run.output
    used_mb = [float(line) for line in kept.read_text().split()]
    for start in (0, 30, 60):
        warm, late = used_mb[start + 9 : start + 15], used_mb[start + 24 : start + 30]
        assert max(late) < max(warm) + 8, used_mb[start : start + 30]
