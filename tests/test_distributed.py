"""Two processes that train together: the same as one process with the whole batch, one voice to the outside."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_fixtures import write_hifigan
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_fixtures import (
    Clips,
    Start,
    arguments,
    assert_equal_tensors,
    assert_same_run,
    losses,
    newest,
    steps,
    stop_at,
)
from training_processes import Run, Server

from myxtts import distributed
from myxtts.data.batches import Sizes
from myxtts.devices import Plan, Stream
from myxtts.errors import PipelineError
from myxtts.training.optim import Optimizer, Schedule
from myxtts.training.recipes import Recipe
from myxtts.training.trainer import Step, StepMode

pytest_plugins = ["training_fixtures", "training_processes"]
pytestmark = pytest.mark.usefixtures("small")

ROOT = Path(__file__).resolve().parents[1]


def ended(runs: list[Run]) -> None:
    for run in runs:
        assert run.wait() == 0, run.output


def kept(folder: Path, stage: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights that each of two ranks had in the end."""
    return tuple(load_file(folder / f"{stage}-{rank}.safetensors") for rank in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("flags", ["--batch-size 2", "--batch-size 1 --grad-accum 2"])
def test_two_ranks_with_half_the_batch_each_equal_one_process(
    flags: str, start: Start, clips: Clips, tmp_path: Path, server: Server
) -> None:
    """All four clips are in every step, so that all runs see the same."""
    shared = f"--stages gpt --max-steps 3 --val-data {clips(3)}"
    command = arguments(tmp_path / "two", clips(4), f"{shared} {flags}")
    runs = server.start_ranks(command, hook="watch_ranks", KEPT=str(tmp_path))
    one = start(f"{shared} --batch-size 4", "one")
    ended(runs)
    ours, others = kept(tmp_path, "gpt")
    assert_equal_tensors(others, ours)
    for name, weight in newest(one).weights.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-5, msg=name)
    shares = [json.loads((tmp_path / f"gpt-{rank}.json").read_text()) for rank in range(2)]
    assert [sum(pair) / 2 for pair in zip(*shares, strict=True)] == pytest.approx(losses(one), rel=1e-5)
    (alone,), (together,) = (steps(tmp_path / name, "validation") for name in ("one", "two"))
    assert together["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def test_gradients_may_be_exchanged_in_half_the_bytes(clips: Clips, tmp_path: Path, server: Server) -> None:
    weights = {}
    for kind in ("float32", "bfloat16"):
        (tmp_path / kind).mkdir()
        flags = f"--stages gpt --max-steps 3 --batch-size 2 --gradient-reduction {kind}"
        command = arguments(tmp_path / kind / "run", clips(4), flags)
        ended(server.start_ranks(command, hook="watch_ranks", KEPT=str(tmp_path / kind)))
        ours, others = kept(tmp_path / kind, "gpt")
        assert_equal_tensors(others, ours)
        weights[kind] = ours
    differences = [float((weights["float32"][name] - value).abs().max()) for name, value in ours.items()]
    assert 0 < max(differences) < 5e-3


def test_two_ranks_go_through_the_phases_of_the_decoder_as_one_process_does(
    start: Start, clips: Clips, tmp_path: Path, server: Server
) -> None:
    """A step of the first layer, two of the generator, the others with discriminators."""
    shared = f"--stages decoder --max-steps 20 --init-decoder {tmp_path / 'hifigan.pth'}"
    write_hifigan(tmp_path / "hifigan.pth", 64)
    command = arguments(tmp_path / "two", clips(4), f"{shared} --batch-size 2")
    runs = server.start_ranks(command, hook="watch_ranks", KEPT=str(tmp_path))
    one = start(f"{shared} --batch-size 4", "one")
    ended(runs)
    ours, others = kept(tmp_path, "decoder")
    assert_equal_tensors(others, ours)
    shares = [json.loads((tmp_path / f"decoder-{rank}.json").read_text()) for rank in range(2)]
    together = [sum(pair) / 2 for pair in zip(*shares, strict=True)]
    assert together == pytest.approx(losses(one, "decoder"), rel=1e-2)


def test_ranks_hold_the_same_model_and_only_the_first_writes_and_speaks(
    clips: Clips, tmp_path: Path, server: Server
) -> None:
    """A rank must not read a stage's checkpoint before it is written, nor miss a signal that another one got."""
    flags = f"--stages dvae,gpt --dropout 0.2 --max-steps 4 --val-data {clips(3)} --val-step 2"
    command = arguments(tmp_path / "run", clips(5), flags)
    first, second = server.start_ranks(command, hook="watch_ranks", KEPT=str(tmp_path))
    ended([first, second])
    for stage in ("dvae", "gpt"):
        ours, others = kept(tmp_path, stage)
        assert_equal_tensors(others, ours)
        assert_equal_tensors(newest(tmp_path / "run", stage).weights, ours)
    assert "dvae.codebook.embed" in kept(tmp_path, "dvae")[0]
    assert (tmp_path / "key-0").read_text() == (tmp_path / "key-1").read_text(), "another DVAE makes other codes"
    assert "Rank 0 of 2" in first.output
    assert second.output == ""
    states = newest(tmp_path / "run").optimizer
    assert not torch.equal(states["random.0"], states["random.1"]), "ranks drop out different activations"


def test_a_signal_to_one_rank_stops_both_and_they_go_on_as_if_nothing_had_been(
    clips: Clips, tmp_path: Path, server: Server
) -> None:
    flags = "--stages gpt --dropout 0.2 --max-steps 6 --batch-size 1"
    whole, parts = (arguments(tmp_path / name, clips(3), flags) for name in ("whole", "parts"))
    stopped = server.start_ranks(parts, hook="second_step_is_slow")
    stopped[0].wait_for("step 1/")
    stopped[1].signal(signal.SIGTERM)
    ended(stopped)
    assert re.search(r"Stopped at step [12] of stage gpt", stopped[0].output)
    ended(server.start_ranks(parts))
    ended(server.start_ranks(whole))
    assert_same_run(tmp_path / "parts", tmp_path / "whole", "gpt")


def test_a_run_of_one_process_goes_on_with_two_as_if_it_had_been_alone(
    start: Start, clips: Clips, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five clips, two in a step: it stops in the middle of an epoch, and the third step reaches into the next."""
    flags, whole = "--stages gpt --max-steps 4 --batch-size 1", start.folder / "whole"
    start(f"{flags} --grad-accum 2", "whole", 5)
    stop_at(monkeypatch, 1)
    parts = start(f"{flags} --grad-accum 2", "parts", 5)
    assert newest(parts).state["cursor"] == [0, 2]
    both = server.start_ranks(arguments(parts, clips(5), flags))
    ended(both)
    assert "epoch 0 starts over" not in both[0].output
    after, alone = newest(parts), newest(whole)
    assert after.state["cursor"] == alone.state["cursor"] == [1, 3]
    for name, weight in alone.weights.items():
        torch.testing.assert_close(after.weights[name], weight, rtol=0, atol=1e-5, msg=name)
    assert {"random.0", "random.1"} <= after.optimizer.keys()


def test_ranks_agree_whether_a_stage_has_ended_early(clips: Clips, tmp_path: Path, server: Server) -> None:
    """A rank for which it has would begin the next one, in which the first rank takes no part."""
    flags = f"--stages dvae,gpt --max-steps 9 --val-data {clips(3)} --val-step 2 --early-stop 1 --evaluate-on cpu"
    command = arguments(tmp_path / "run", clips(4), flags)
    ended(server.start_ranks(command, hook="stopped_after_a_validation_that_is_no_better"))
    last = newest(tmp_path / "run", "dvae")
    assert (last.step, last.state["stale_validations"], last.state["done"]) == (4, 1, False)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_other_with_an_explanation(
    victim: int, clips: Clips, tmp_path: Path, server: Server
) -> None:
    flags = "--stages dvae --max-steps 5000 --epochs 5000 --batch-size 1"
    runs = server.start_ranks(arguments(tmp_path / "run", clips(4), flags))
    runs[0].wait_for("step 3/")
    runs[victim].signal(signal.SIGKILL)
    other = runs[1 - victim]
    assert other.wait() == 1 and "Traceback" not in other.output
    assert f"Rank {victim} of 2 has ended: it was killed or has crashed" in other.output
    assert "the same command continues from the last checkpoint" in other.output


def test_a_rank_that_fails_ends_the_others_with_its_error(clips: Clips, tmp_path: Path, server: Server) -> None:
    command = arguments(tmp_path / "run", clips(4), "--stages dvae --max-steps 5000 --epochs 5000 --batch-size 1")
    first, second = server.start_ranks(command, hook="second_rank_fails_at_its_third_step")
    assert (first.wait(), second.wait()) == (1, 1)
    for run in (first, second):
        assert "Rank 1 of 2 has ended: the card fell off the bus" in run.output or run is second
    assert "the card fell off the bus" in second.output


def test_torchrun_restarts_all_ranks_from_the_last_checkpoint(clips: Clips, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = arguments(run, clips(4), "--stages dvae --max-steps 40 --epochs 5000 --save-step 2 --batch-size 1")[1:]
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [*starter, "--max-restarts", "1", "--monitor-interval", "0.1", str(ROOT / "train_main.py"), *flags],
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        killed, shown, deadline = 0, "", time.monotonic() + 60
        assert process.stdout is not None
        for line in process.stdout:
            shown += line
            if not killed and (run / "dvae").is_dir() and (saved := re.search(r"^step (\d+)/40", line)):
                killed = int(saved[1])
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                os.kill(int(children[-1]), signal.SIGKILL)
            if time.monotonic() > deadline:
                process.kill()
    assert process.returncode == 0, shown
    steps_shown = [int(step) for step in re.findall(r"^step (\d+)/40", shown, re.MULTILINE)]
    assert killed >= 2 and steps_shown.count(1) == 1 and steps_shown[-1] == 40, shown
    assert newest(run, "dvae").step == 40


def test_the_monitor_of_ranks_ignores_strangers_and_names_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scanner of ports must not end a run; a rank that never connects ends it with an explanation."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(distributed, "GREETING_S", 0.2)
    monkeypatch.setattr(distributed, "JOIN_S", 1.0)
    plan = Plan(torch.device("cpu"), torch.device("cpu"), rank=0, world_size=2)
    callers: list[socket.socket] = []

    def call(_: Plan, port: int, token: int) -> tuple[int, int]:
        callers[:] = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        callers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        callers[1].close()
        callers[2].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        callers[2].close()  # as a scanner: with a reset
        if token_is_known:  # the fourth says nothing
            callers[4].sendall(struct.pack(">qq", token, 1))
        return port, token

    monkeypatch.setattr(distributed, "of_first_rank", call)
    token_is_known = True
    distributed.RankMonitor(plan).close(distributed.DONE)
    assert callers[4].recv(100) == b"done\n"
    token_is_known = False
    with pytest.raises(PipelineError, match="Rank 0 could not connect to the others: timed out"):
        distributed.RankMonitor(plan)
    for caller in callers:
        caller.close()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.usefixtures("group")
def test_gradients_are_exchanged_in_buckets_while_others_are_computed(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "BUCKET_BYTES", 2000)
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(4)]
    network, unused = nn.Sequential(*layers), nn.Linear(4, 4)
    both, x = nn.ModuleList([network, unused]), torch.randn(3, 16)
    sums = distributed.GradientSums(both, dtype)
    expected = torch.autograd.grad(network(x).square().sum(), list(network.parameters()))
    begun: list[int] = []
    all_reduce = torch.distributed.all_reduce
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda *a, **k: (begun.append(len(computed)), all_reduce(*a, **k))[1]
    )
    computed: list[int] = []
    for number, parameter in enumerate(network.parameters()):
        parameter.register_hook(lambda _, number=number: computed.append(number))
    for _ in range(2):
        computed.clear()
        begun.clear()
        with sums.exchanged():
            network(x).square().sum().backward()
        for parameter, gradient in zip(network.parameters(), expected, strict=True):
            wanted = gradient if dtype is None else gradient.to(dtype).float()
            torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=0 if dtype else 1e-6)
        for parameter in both.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
    assert len(begun) == len(sums.buckets) >= 4
    assert begun[0] < 4 and begun[-1] == 8, "the first while six gradients are still to come, unused ones last"
    sums.close()


@pytest.mark.usefixtures("group")
def test_recomputed_and_repeated_layers_are_exchanged_once_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bucket is a copy here: one that was exchanged too early would lack a part of its gradient."""
    monkeypatch.setattr(distributed, "BUCKET_BYTES", 2000)
    torch.manual_seed(0)
    layers, x = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), torch.randn(5, 16)
    sums = distributed.GradientSums(layers, torch.float64)

    def loss() -> Tensor:
        y = x
        for layer in (*layers, layers[0]):
            y = checkpoint(layer, y, use_reentrant=False).tanh()
        return y.square().sum()

    expected = torch.autograd.grad(loss(), list(layers.parameters()))
    for _ in range(3):
        loss().backward()  # a micro-step before the last one
        with sums.exchanged():
            loss().backward()
        for parameter, gradient in zip(layers.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, 2 * gradient)
            assert parameter.grad is not None
            parameter.grad.zero_()


class _Line(Recipe):
    """The smallest recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, tensors: Any, _: Any) -> dict[str, Tensor]:
        return {"total": self.layer(tensors["x"]).square().sum()}

    build = sums = None  # type: ignore[assignment]


@pytest.mark.usefixtures("group")
def test_a_step_that_is_closed_holds_no_gradients() -> None:
    """They would take memory beside those of the next phase."""
    recipe = _Line()
    step = Step(recipe, Optimizer(recipe, 1e-3, Schedule(0, None)), StepMode(), Stream(torch.device("cpu")))
    step.add_gradients({"x": torch.ones(2, 4)}, Sizes(0, 0, 0, 0), last=True)
    assert step._sums_of_ranks is not None
    gradients = weakref.ref(step._sums_of_ranks.buckets[0].gradients)
    assert gradients() is not None
    step.close()
    assert gradients() is None


def test_torchrun_starts_the_script_of_the_old_door_plate(clips: Clips, tmp_path: Path) -> None:
    """With the real `tiny`, as a user would start it."""
    flags = arguments(tmp_path / "run", clips(4), "--stages dvae --max-steps 2")[1:]
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*starter, str(ROOT / "train_main.py"), *flags],
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Model training starting now") == 1
    assert result.stdout.count("Done. Everything is in") == 1
    assert len(re.findall(r"^step \d/2", result.stdout, re.MULTILINE)) == 2
    last = newest(tmp_path / "run", "dvae")
    assert last.step == 2
    assert {"random.0", "random.1"} <= last.optimizer.keys()
