"""Runs that end early, by a signal, a kill, a damaged file or a full disk; what another start makes of them."""

from __future__ import annotations

import errno
import random
import re
import signal
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError
from training_fixtures import (
    Clips,
    arguments,
    assert_equal_tensors,
    assert_same_run,
    clips,
    newest,
    small,
    steps,
    stop_at,
    train,
)
from training_processes import Server, server

import myxtts.checkpoints

__all__ = ["clips", "server", "small"]

pytestmark = pytest.mark.usefixtures("small")


# Stopped and continued


@pytest.mark.parametrize("stage", ["gpt", "dvae", "decoder"])
def test_a_run_stopped_twice_equals_one_that_never_was(
    stage: str, clips: Clips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three batches an epoch, one of them with a filling clip: the first stop is at an epoch's end."""
    # Codes that would be moved, if a continued run took its first batch for the first of all.
    monkeypatch.setattr("myxtts.model.dvae.DEAD_SHARE", 0.9)
    flags = f"--stages {stage} --dropout 0.2 --max-steps 5 --val-data {clips(3)} --val-step 2 --ema-decay 0.5"
    assert train(tmp_path / "whole", clips(5), flags) == 0
    stop_at(monkeypatch, 3, 4)
    for expected in (3, 4, 5):
        assert train(tmp_path / "parts", clips(5), flags) == 0
        assert newest(tmp_path / "parts", stage).step == expected
    assert newest(tmp_path / "parts", stage).state["cursor"] == [1, 2]
    assert_same_run(tmp_path / "parts", tmp_path / "whole", stage)


@pytest.mark.parametrize("flag", ["", "--dashboard", "--reset-training"])
def test_a_stop_ends_the_run_and_says_how_to_go_on(
    flag: str, clips: Clips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_at(monkeypatch, 2)
    assert train(tmp_path / "run", clips(4), f"--stages dvae,gpt {flag}") == 0
    shown = capsys.readouterr().out
    again = "the same command without --reset-training" if "reset" in flag else "the same command"
    stopped = f"Stopped at step 2 of stage dvae: everything is saved in {tmp_path / 'run'}"
    assert shown.splitlines()[-1] == f"{stopped}; {again} continues from here"
    assert "Stage gpt" not in shown
    assert "Done" not in shown
    assert "continuing" not in shown
    assert train(tmp_path / "run", clips(4), "--stages dvae,gpt") == 0
    assert "Stage dvae: continuing at step 2 of 4" in capsys.readouterr().out


def test_a_finished_run_is_left_alone(clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", clips(4), "--stages gpt") == 0
    before = newest(tmp_path / "run")
    assert train(tmp_path / "run", clips(4), "--stages gpt") == 0
    assert "Stage gpt: finished at step 4" in capsys.readouterr().out
    assert_equal_tensors(newest(tmp_path / "run").weights, before.weights)


def test_a_finished_run_may_be_prolonged_and_stopped_again(
    clips: Clips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", clips(4), "--stages dvae,gpt --max-steps 2") == 0
    capsys.readouterr()
    stop_at(monkeypatch, 3)
    assert train(tmp_path / "run", clips(4), "--stages dvae,gpt --max-steps 6") == 0
    assert "Stopped at step 3 of stage dvae" in capsys.readouterr().out
    assert (newest(tmp_path / "run", "dvae").step, newest(tmp_path / "run", "gpt").step) == (3, 2)


# Signals, from outside


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_step_finish_and_saves(
    number: signal.Signals, clips: Clips, tmp_path: Path, server: Server
) -> None:
    run = server.start(arguments(tmp_path / "run", clips(4), "--stages dvae --max-steps 5000 --epochs 5000"))
    run.wait_for("step 3/")
    run.signal(number)
    assert run.wait() == 0
    assert "Finishing this step and saving; the same signal again ends at once" in run.output
    stopped = re.search(r"Stopped at step (\d+) of stage dvae", run.output)
    assert stopped
    assert newest(tmp_path / "run", "dvae").step == int(stopped[1]) == steps(tmp_path / "run")[-1]["step"]


def test_a_second_signal_ends_at_once(clips: Clips, tmp_path: Path, server: Server) -> None:
    run = server.start(arguments(tmp_path / "run", clips(4), "--stages dvae"), "second_step_hangs")
    run.wait_for("step 1/")
    run.signal(signal.SIGTERM)
    run.wait_for("Finishing this step")
    asked_at = time.monotonic()
    run.signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - asked_at < 5


# Killed


KILLED = "--stages dvae,gpt,decoder --dvae-steps 9 --max-steps 6 --decoder-steps 3 --dropout 0.2 --val-step 3"


def killed_again_and_again(server: Server, corpus: Path, tmp_path: Path, flags: str, times: int) -> None:
    """Kill runs at random moments, start each again until it ends, and compare them with one left in peace."""
    started_at = time.monotonic()
    assert server.start(arguments(tmp_path / "whole", corpus, flags)).wait() == 0
    duration_s = time.monotonic() - started_at
    chance = random.Random(times)
    num_kills = num_ended = 0
    while num_kills < times or num_ended == 0:
        folder = tmp_path / f"parts-{num_ended}"
        run = server.start(arguments(folder, corpus, flags))
        if num_kills < times:
            time.sleep(chance.uniform(0.1, 0.6) * duration_s)
            run.signal()
        ended_by = run.wait()
        assert ended_by in (0, -signal.SIGKILL), run.output
        assert "damaged" not in run.output
        if ended_by == 0:
            num_ended += 1
            assert_same_run(folder, tmp_path / "whole", "dvae", "gpt", "decoder")
        else:
            num_kills += 1


def test_kills_at_random_moments_change_nothing(clips: Clips, tmp_path: Path, server: Server) -> None:
    flags = f"{KILLED} --save-step 2 --val-data {clips(3)}"
    killed_again_and_again(server, clips(5), tmp_path, flags, times=3)


@pytest.mark.soak
def test_twenty_kills_change_nothing(clips: Clips, tmp_path: Path, server: Server) -> None:
    flags = f"{KILLED} --save-step 1 --val-data {clips(3)}"
    killed_again_and_again(server, clips(5), tmp_path, flags, times=20)


# Damage


@pytest.mark.parametrize("damage", ["cut off", "changed"])
def test_a_damaged_checkpoint_costs_only_the_steps_behind_the_one_before(
    damage: str, clips: Clips, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = "--stages dvae --save-step 2 --max-steps 6"
    for name in ("whole", "harmed"):
        assert train(tmp_path / name, clips(5), flags) == 0
    path = newest(tmp_path / "harmed", "dvae").folder / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content[:-50] if damage == "cut off" else content)
    assert train(tmp_path / "harmed", clips(5), flags) == 0
    assert "A damaged checkpoint is passed over" in caplog.text
    assert "step-00000006" in caplog.text
    assert_same_run(tmp_path / "harmed", tmp_path / "whole", "dvae")


def full_disk(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Refuse the checkpoints of some steps."""
    write = myxtts.checkpoints.save_file

    def refuse(content: object, path: Path, *rest: object) -> None:
        if any(f"step-{number:08d}" in str(path) for number in numbers):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(content, path, *rest)

    monkeypatch.setattr(myxtts.checkpoints, "save_file", refuse)


def test_a_full_disk_costs_a_checkpoint_and_the_training_goes_on(
    clips: Clips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full_disk(monkeypatch, 4)
    assert train(tmp_path / "run", clips(4), "--stages dvae --save-step 2 --max-steps 6") == 0
    assert re.search(r"Saving .*step-00000004 failed: .*No space left .*Older checkpoints are kept", caplog.text)
    names = sorted(path.name for path in (tmp_path / "run" / "dvae").iterdir())
    assert names == ["step-00000002", "step-00000006"]


def test_a_full_disk_at_the_start_is_told_in_words(
    clips: Clips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(myxtts.checkpoints, "save_file", refuse)
    assert train(tmp_path / "run", clips(4), "--stages dvae") == 1
    shown = capsys.readouterr().err
    assert f"error: No room for {tmp_path / 'run' / 'base.safetensors'}: No space left on device (" in shown
    assert "Free some space" in shown and "serializing" not in shown


def test_a_run_whose_end_could_not_be_saved_does_not_call_itself_done(
    clips: Clips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full_disk(monkeypatch, 6)
    flags = "--stages dvae,gpt --save-step 2 --max-steps 6"
    assert train(tmp_path / "run", clips(4), flags) == 1
    shown = capsys.readouterr()
    assert "No space left on device" in shown.err
    assert "continues from the last good checkpoint" in shown.err
    assert "Stage gpt" not in shown.out
    assert newest(tmp_path / "run", "dvae").step == 4


# Another configuration


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        ("--batch-size 3", "processes): the run has 2, now 3"),
        ("--seed 7", "training.seed: the run has 1234, now 7"),
        ("--model-size small", "model.size: the run has tiny, now small"),
        ("--grad-accum 2 --ema-decay 0.9", "training.ema_decay: the run has 0.0, now 0.9"),
        ("", "training clips: the run has 4, now 5"),
    ],
)
def test_another_configuration_is_refused_with_its_differences(
    flags: str, difference: str, clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", clips(4), "--stages dvae --max-steps 1") == 0
    before = newest(tmp_path / "run", "dvae").weights
    assert train(tmp_path / "run", clips(4 if flags else 5), f"--stages dvae {flags}") == 2
    shown = capsys.readouterr().err
    assert difference in shown
    assert "--checkpoint-dir DIR" in shown
    assert "--reset-training" in shown
    if "--grad-accum" in flags:
        assert "processes): the run has 2, now 4" in shown
    assert_equal_tensors(newest(tmp_path / "run", "dvae").weights, before)


def test_the_clips_of_a_step_may_come_in_smaller_portions(
    clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after an error for want of memory; the epoch that was under way is seen whole again."""
    corpus = clips(7)
    assert train(tmp_path / "run", corpus, "--stages gpt --max-steps 2 --batch-size 2") == 0
    assert newest(tmp_path / "run", "gpt").state["cursor"] == [0, 2]
    capsys.readouterr()
    flags = "--stages gpt --max-steps 4 --batch-size 1 --grad-accum 2"
    assert train(tmp_path / "run", corpus, flags) == 0
    assert "epoch 0 starts over" in capsys.readouterr().out
    after = newest(tmp_path / "run", "gpt")
    assert after.step == 4 and after.state["cursor"] == [0, 4]
    assert after.state["notes"]["identity"]["data.batch_size"] == 1
    assert train(tmp_path / "run", corpus, flags.replace("4", "5")) == 0
    assert "starts over" not in capsys.readouterr().out


def test_a_finished_stage_stays_finished_in_other_portions(
    clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two epochs of seven clips are seven steps of two halves, but eight of whole batches."""
    corpus, run = clips(7), tmp_path / "run"
    assert train(run, corpus, "--stages dvae --epochs 2 --max-steps 99 --batch-size 1 --grad-accum 2") == 0
    assert newest(run, "dvae").step == 7
    capsys.readouterr()
    assert train(run, corpus, "--stages dvae --epochs 2 --max-steps 99 --batch-size 2") == 0
    shown = capsys.readouterr().out
    assert "Stage dvae: finished at step 7" in shown and "starts over" not in shown


def test_a_reset_puts_the_old_run_aside_and_starts_over(
    clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", clips(4), "--stages dvae --max-steps 2") == 0
    old = newest(tmp_path / "run", "dvae")
    capsys.readouterr()
    assert train(tmp_path / "run", clips(4), "--stages dvae --seed 7 --max-steps 3 --reset-training") == 0
    aside = tmp_path / "run" / "before-reset-1"
    assert f"Starting over; what the folder held is now in {aside}" in capsys.readouterr().out
    assert_equal_tensors(newest(aside, "dvae").weights, old.weights)
    assert [report["step"] for report in steps(aside)] == [1, 2]
    assert (aside / "tensorboard").is_dir()
    assert [report["step"] for report in steps(tmp_path / "run")] == [1, 2, 3]
    assert newest(tmp_path / "run", "dvae").step == 3
    assert train(tmp_path / "run", clips(4), "--stages dvae --max-steps 1 --reset-training") == 0
    assert newest(tmp_path / "run" / "before-reset-2", "dvae").step == 3


def test_what_a_run_began_with_is_forgotten_until_something_is_saved(
    clips: Clips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise weights, sizes and the vocabulary of a start that came to nothing would stay in the next one."""
    with monkeypatch.context() as patched:
        full_disk(patched, 4)
        assert train(tmp_path / "run", clips(4), "--stages dvae --seed 7") == 1
    assert train(tmp_path / "run", clips(4), "--stages dvae") == 0
    assert train(tmp_path / "other", clips(4), "--stages dvae") == 0
    assert_same_run(tmp_path / "run", tmp_path / "other", "dvae")
    bases = [(tmp_path / name / "base.safetensors").read_bytes() for name in ("run", "other")]
    assert bases[0] == bases[1]
