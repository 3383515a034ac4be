"""Trainings in processes of their own, which may be signalled and killed.

Run as a script, this file is the server they are forked from: it has imported everything, so that each starts at
once. What should be different in such a process is done by a hook.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from training_fixtures import shrink

import myxtts.checkpoints
import myxtts.observe.metrics
import myxtts.run
import myxtts.run_dir
from myxtts.checkpoints import Checkpoints
from myxtts.cli import main
from myxtts.evaluation import Evaluator
from myxtts.reports import TrainingReports
from myxtts.run import StageContext
from myxtts.training.trainer import Evaluation, Reporter, State, Step, Trainer

LONGEST_S = 60
"""No run here takes so long, unless it says so."""


class Run:
    """A training in a process of its own; what it shows is in `output`."""

    def __init__(self, server: Server, pid: int, output: Path) -> None:
        self._server, self.pid, self._path = server, pid, output

    @property
    def output(self) -> str:
        return self._path.read_text(encoding="utf-8")

    def signal(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait_for(self, text: str) -> None:
        """Return when the process has shown this."""
        deadline = time.monotonic() + 30
        while text not in self.output:
            assert time.monotonic() < deadline, self.output
            time.sleep(0.01)

    def wait(self, limit_s: float = LONGEST_S) -> int:
        """The exit code, or the negative number of the signal that ended it."""
        return self._server.ask({"wait": self.pid, "limit_s": limit_s})


class Server:
    """Starts trainings as forks of a process that has everything imported and no thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_runs = 0
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def start(self, command: list[str], hook: str = "", **environment: str) -> Run:
        """Run the command line; `hook` names a function of this file that is called before."""
        self._num_runs += 1
        output = self._folder / f"output-{self._num_runs}.txt"
        output.touch()
        request = {"command": command, "hook": hook, "environment": environment, "output": str(output)}
        return Run(self, self.ask(request), output)

    def start_ranks(self, command: list[str], count: int = 2, hook: str = "", **environment: str) -> list[Run]:
        """The same command as torchrun starts it."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), **environment}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        return [self.start(command, hook, **shared, **place) for place in places]

    def ask(self, request: Mapping[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@cache
def _only_server(folder: Path) -> Server:
    running = Server(folder)
    atexit.register(running.close)
    return running


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    """One for all files: its imports take seconds."""
    folder = tmp_path_factory.getbasetemp() / "server"
    folder.mkdir(exist_ok=True)
    return _only_server(folder)


def serve() -> None:
    """Fork a process for every line of the input, and answer with its number or with how it ended."""
    import torch.utils.tensorboard

    torch.set_num_threads(1)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and a run respects that
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = _ended(request["wait"], request["limit_s"])
        else:
            answer = os.fork()
            if answer == 0:
                with open(request["output"], "w", encoding="utf-8") as output:
                    for number in (1, 2):
                        os.dup2(output.fileno(), number)
                os._exit(_run(request))
        os.write(1, f"{answer}\n".encode())
    os._exit(0)  # nothing to clean up, and taking down the interpreter takes its time


def _ended(pid: int, limit_s: float) -> int:
    """How a process ended; one that does not, such as a rank whose partner has failed, is killed."""
    deadline = time.monotonic() + limit_s
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
        time.sleep(0.005)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(found[1])


def _run(request: Mapping[str, Any]) -> int:
    os.environ.update(request["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir("/")
    monkeypatch = pytest.MonkeyPatch()
    shrink(monkeypatch)
    code = 1
    with contextlib.suppress(SystemExit):
        if request["hook"]:
            globals()[request["hook"]](monkeypatch)
        code = main(request["command"])
    sys.stdout.flush()
    sys.stderr.flush()
    return code


# Hooks: what is different in a process of the server


def second_step_hangs(monkeypatch: pytest.MonkeyPatch, seconds: float = 60) -> None:
    update = Step.update

    def update_slowly(self: Step, step: int) -> None:
        update(self, step)
        time.sleep(seconds if step == 1 else 0)

    monkeypatch.setattr(Step, "update", update_slowly)


def second_step_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    second_step_hangs(monkeypatch, seconds=1)


def second_rank_fails_at_its_third_step(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Step.update

    def update_or_fail(self: Step, step: int) -> None:
        if step == 2 and os.environ["RANK"] == "1":
            raise RuntimeError("the card fell off the bus")
        update(self, step)

    monkeypatch.setattr(Step, "update", update_or_fail)


def stopped_after_a_validation_that_is_no_better(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {2: 1.0, 4: 2.0}
    monkeypatch.setattr(Evaluator, "_work", lambda _, step, __: Evaluation(step, {"total": losses[step]}))
    monkeypatch.setattr(StageContext, "stop_requested", lambda _, step: step == 4)


def no_reader(_: pytest.MonkeyPatch) -> None:
    """Connect standard output to a pipe that nobody reads, as `| head -1` leaves it."""
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)


def die_at_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the process when it is about to change a file for the nth time; DIE_AT says n."""
    left = int(os.environ["DIE_AT"])

    def deadly(change: Callable[..., Any]) -> Callable[..., Any]:
        def change_or_die(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*arguments, **options)

        return change_or_die

    places = [(Path, "rename"), (Path, "replace"), (myxtts.checkpoints, "save_file"), (shutil, "rmtree")]
    for owner, name in [*places, (myxtts.observe.metrics.MetricsLog, "_append")]:
        monkeypatch.setattr(owner, name, deadly(getattr(owner, name)))


def record_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the resident memory of the process, in MB, after every tenth step."""
    tick = TrainingReports.tick

    def tick_and_record(self: TrainingReports, step: int) -> None:
        tick(self, step)
        if step % 10 == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            with open(os.environ["KEPT"], "a") as file:
                file.write(f"{pages * os.sysconf('SC_PAGE_SIZE') / 1e6}\n")

    monkeypatch.setattr(TrainingReports, "tick", tick_and_record)


def watch_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what every rank has in the end; only the first may write, and takes its time for it."""
    rank, kept = int(os.environ["RANK"]), Path(os.environ["KEPT"])
    run, save, key = Trainer.run, Checkpoints._save, myxtts.run.dvae_key
    reported: list[float] = []

    def run_and_keep(self: Trainer) -> State:
        state = run(self)
        tensors = {name: tensor.clone() for name, tensor in self.ctx.weights(self.step.recipe).items()}
        save_file(tensors, kept / f"{self.ctx.stage}-{rank}.safetensors")
        (kept / f"{self.ctx.stage}-{rank}.json").write_text(json.dumps(reported))
        return state

    def save_slowly(self: Checkpoints, *arguments: Any) -> Exception | None:
        assert rank == 0, "only the first rank writes"
        time.sleep(0.3)
        return save(self, *arguments)

    def named_key(*arguments: Any) -> str:
        (kept / f"key-{rank}").write_text(key(*arguments))
        return key(*arguments)

    monkeypatch.setattr(Trainer, "run", run_and_keep)
    monkeypatch.setattr(Checkpoints, "_save", save_slowly)
    monkeypatch.setattr(myxtts.run, "dvae_key", named_key)
    reports = TrainingReports if rank == 0 else Reporter
    monkeypatch.setattr(reports, "step", lambda _, report: reported.append(report.losses["total"]))
    if rank > 0:
        for name in ("write_tensors", "write_text_atomically"):
            monkeypatch.setattr(myxtts.run_dir, name, None)
        monkeypatch.setattr(myxtts.observe.metrics.MetricsLog, "__init__", None)


if __name__ == "__main__":
    serve()
