"""Two processes that train together: the same as one process with the whole batch, one voice to the outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_fixtures import write_hifigan
from safetensors.torch import load_file
from torch import Tensor
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


def test_a_run_of_one_process_goes_on_with_two_that_share_its_batch(
    start: Start, clips: Clips, server: Server
) -> None:
    run = start("--stages gpt --max-steps 1 --batch-size 2", corpus=5)
    flags = "--stages gpt --dropout 0.2 --max-steps 3 --batch-size 1"
    both = server.start_ranks(arguments(run, clips(5), flags))
    ended(both)
    assert "epoch 0 starts over" in both[0].output
    assert newest(run).step == 3


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
    assert f"Rank {1 - victim} lost the other processes of the run" in other.output
    assert "the same command continues from the last checkpoint" in other.output


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
