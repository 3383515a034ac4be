"""Runs that end early, by a signal, a kill, a damaged file or a full disk; what another start makes of them."""

from __future__ import annotations

import errno
import random
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from model_fixtures import write_hifigan
from safetensors import SafetensorError
from training_fixtures import (
    STAGES,
    Clips,
    Start,
    arguments,
    assert_equal_tensors,
    assert_same_checkpoints,
    assert_same_run,
    losses,
    measured,
    newest,
    steps,
    stop_at,
)
from training_processes import Server

import myxtts.checkpoints
import myxtts.run
from myxtts.model.xtts import SIZES
from myxtts.run_dir import RunDir
from myxtts.training.trainer import State

pytest_plugins = ["training_fixtures", "training_processes"]
pytestmark = pytest.mark.usefixtures("small")


# Stopped and continued


@pytest.mark.parametrize("stage", ["gpt", "dvae", "decoder"])
def test_a_run_stopped_twice_equals_one_that_never_was(
    stage: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three batches an epoch, one of them with a filling clip: the first stop is at an epoch's end."""
    # Codes that would be moved, if a continued run took its first batch for the first of all.
    monkeypatch.setattr("myxtts.model.dvae.DEAD_SHARE", 0.9)
    val = f"--val-data {start.clips(3)} --val-step 2"
    flags = f"--stages {stage} --dropout 0.2 --max-steps 5 --ema-decay 0.5 {val}"
    whole = start(flags, "whole", 5)
    stop_at(monkeypatch, 3, 4)
    for expected in (3, 4, 5):
        parts = start(flags, "parts", 5)
        assert newest(parts, stage).step == expected
    assert newest(parts, stage).state["cursor"] == [1, 2]
    assert_same_run(parts, whole, stage)


@pytest.mark.parametrize(
    ("warm", "reads"),
    [(False, "latents"), (True, "latents"), (True, "mel"), (False, "mel")],
    ids=["from scratch", "from a HiFi-GAN", "a flow", "a flow from scratch"],
)
def test_a_decoder_stopped_in_any_phase_equals_one_that_never_was(
    warm: bool, reads: str, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Phases begin with steps 1 and 3 from a HiFi-GAN, or with step 6; the file is needed only at the start."""
    monkeypatch.setitem(SIZES, "tiny", replace(SIZES["tiny"], decoder_input=reads))
    flags, hifigan = "--stages decoder --max-steps 20 --ema-decay 0.5", tmp_path / "hifigan.pth"
    write_hifigan(hifigan, 64)
    first = f"--init-decoder {hifigan}" if warm else ""
    whole = start(f"{flags} {first}", "whole", 5)
    assert ("million weights from" in start.out) == warm
    stop_at(monkeypatch, 1, 2, 4)
    for number, expected in enumerate((1, 2, 4, 20)):
        parts = start(f"{flags} {first if number == 0 else ''}", "parts", 5)
        assert newest(parts, "decoder").step == expected
    assert_same_run(parts, whole, "decoder")
    phases = [{name for name, value in report["losses"].items() if value} for report in steps(whole)]
    counts = [sum(name in found for found in phases) for name in ("first_layer", "stft", "disc", "flow")]
    expected = [1, 2, 17, 0] if warm else [0, 6, 14, 0]
    if reads == "mel":
        expected = [0, 0, 0, 20] if warm else [0, 6, 14, 20]
    assert counts == expected


def test_a_hifigan_that_does_not_fit_is_refused_before_anything_is_done(start: Start, tmp_path: Path) -> None:
    write_hifigan(tmp_path / "hifigan.pth", 32)
    run = start(f"--stages dvae,decoder --init-decoder {tmp_path / 'hifigan.pth'}", code=1)
    assert "a generator of 32 channels, and the decoder of this model has 64" in start.err
    assert not run.exists()


@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["gpt", "dvae", "decoder"])
def test_deterministic_runs_on_a_gpu_are_equal_whether_resumed_or_not(
    stage: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (
        f"--stages {stage} --deterministic --dropout 0.2 --max-steps 12 --val-step 5 --val-data {start.clips(3)}"
    )
    one, two = (start(flags, name, 5) for name in ("one", "two"))
    assert "captured as a CUDA graph, bf16, deterministic" in start.out
    assert_same_checkpoints(two, one, stage)
    assert losses(two) == losses(one)
    stop_at(monkeypatch, 7)
    for _ in range(2):
        parts = start(flags, "parts", 5)
    assert_same_checkpoints(parts, one, stage)


@pytest.mark.parametrize("flag", ["", "--dashboard", "--reset-training"])
def test_a_stop_ends_the_run_and_says_how_to_go_on(
    flag: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, 2)
    run = start(f"--stages dvae,gpt {flag}")
    again = "the same command without --reset-training" if "reset" in flag else "the same command"
    stopped = f"Stopped at step 2 of stage dvae: everything is saved in {run}"
    assert start.out.splitlines()[-1] == f"{stopped}; {again} continues from here"
    assert not re.search("Stage gpt|Done|continuing", start.out)
    start("--stages dvae,gpt")
    assert "Stage dvae: continuing at step 2 of 4" in start.out


def test_a_damaged_checkpoint_costs_its_steps_and_never_a_later_stage(start: Start) -> None:
    run = start("--stages dvae,gpt --max-steps 4 --save-step 2")
    path = newest(run, "dvae").folder / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    start("--stages gpt --max-steps 5", code=1)
    assert "newest checkpoint of dvae" in start.err and newest(run, "gpt").step == 4
    shutil.rmtree(run / "gpt")
    start("--stages dvae --max-steps 4 --save-step 2")  # announced as complete, continued at step 2
    assert newest(run, "dvae").step == 4


def test_a_stage_that_starts_over_keeps_its_last_checkpoint_until_it_has_ended(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("--stages dvae,gpt --max-steps 2")
    with monkeypatch.context() as patch:
        stop_at(patch, 1)  # of the gpt stage: dvae continues at step 2
        start("--stages dvae,gpt --max-steps 4")
    assert [notes.step for notes in RunDir(run).checkpoints("gpt").all_notes()] == [1, 2]
    start("--stages dvae,gpt --max-steps 4")
    assert [notes.step for notes in RunDir(run).checkpoints("gpt").all_notes()] == [4, 1]


def test_stages_with_other_settings_are_left_out_of_the_advice(start: Start) -> None:
    start("--stages dvae --max-steps 1")
    start("--stages gpt --max-steps 1 --batch-size 1")
    assert "without --stages" not in start.out and "Next:" in start.out


# Tried, then prolonged


def test_a_run_that_was_tried_becomes_the_real_one(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of the first step is the same in both, so nothing differs; a stop on the way changes nothing."""
    short, long = (f"--dropout 0.2 --batch-size 4 --max-steps 99 --epochs {number}" for number in (1, 3))
    whole = start(long, "whole")
    start(short)
    stop_at(monkeypatch, 2)
    run = start(long)
    plan = start.out.partition("Plan of the run")[2].splitlines()
    assert plan[1] == "  dvae     continues at step 1 of 3"
    assert plan[2] == "  gpt      starts over, 3 steps: it builds on dvae, which changes"
    assert plan[3] == "  decoder  starts over, 3 steps: it builds on dvae, which changes"
    assert "Stopped at step 2 of stage dvae" in start.out
    assert [newest(run, stage).step for stage in STAGES] == [2, 1, 1], "nothing is removed before it is replaced"
    start(long)
    assert "gpt was trained on the dvae of step 1, and this is the dvae of step 2" in start.out
    assert_same_checkpoints(run, whole, *STAGES)
    start(long)
    assert re.search(r"dvae     complete at step 3\n  gpt      complete at step 3\n  decoder  complete", start.out)


def test_a_stage_prolonged_alone_leaves_the_later_ones_stale(start: Start) -> None:
    run = start("--max-steps 1")
    start("--max-steps 2 --stages gpt")
    assert "decoder  stale, and left as it is: it builds on gpt, which changes" in start.out
    assert [newest(run, stage).step for stage in STAGES] == [1, 2, 1]
    assert RunDir(run).status("decoder").state == "stale"
    start("--max-steps 2 --dvae-steps 1")
    assert "gpt      complete at step 2\n" in start.out
    assert "decoder  starts over, 2 steps: decoder was trained on the gpt of step 1" in start.out
    assert [RunDir(run).status(stage).state for stage in STAGES] == ["complete"] * 3
    assert not (run / "decoder" / "step-00000001").exists()
    start("--max-steps 2 --dvae-steps 1 --decoder-steps 3")
    assert "its first 2 steps used the learning rates of a shorter run" in start.out


# Signals, from outside


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
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
ONE_STEP = "--dvae-steps 1 --max-steps 1 --decoder-steps 1"


@pytest.mark.parametrize(
    ("times", "save_step", "is_tried", "where"),
    [
        (4, 2, False, "model"),
        *(pytest.param(60 - 40 * tried, 1, tried, "model", marks=pytest.mark.soak) for tried in (False, True)),
        pytest.param(40, 2, False, "data --deterministic", marks=pytest.mark.soak),
    ],
)
def test_kills_at_random_moments_and_at_writes_change_nothing(
    times: int, save_step: int, is_tried: bool, where: str, clips: Clips, tmp_path: Path, server: Server
) -> None:
    """Killed runs, new or tried before, are started again until they end, and compared with one left in peace."""
    corpus, flags = clips(5), f"{KILLED} --save-step {save_step} --evaluate-on {where}"
    flags += "" if is_tried else f" --val-data {clips(3)}"
    started_at = time.monotonic()
    assert server.start(arguments(tmp_path / "whole", corpus, flags)).wait() == 0
    duration_s = time.monotonic() - started_at
    chance = random.Random(times)
    num_kills = num_ended = 0
    while num_kills < times or num_ended == 0:
        folder = tmp_path / f"parts-{num_ended}"
        if is_tried and not folder.exists():
            assert server.start(arguments(folder, corpus, f"{KILLED} {ONE_STEP}")).wait() == 0
        at_a_write = {"hook": "die_at_a_write", "DIE_AT": str(chance.randrange(1, 30))}
        is_at_a_write = num_kills < times and num_kills % 2 == 1
        started_at = time.monotonic()
        run = server.start(arguments(folder, corpus, flags), **(at_a_write if is_at_a_write else {}))
        if num_kills < times and not is_at_a_write:
            time.sleep(chance.uniform(0.1, 0.6) * duration_s)
            run.signal()
        ended_by = run.wait()
        assert ended_by in (0, -signal.SIGKILL), run.output
        assert "damaged" not in run.output
        if ended_by == 0:
            num_ended += 1
            duration_s = max(min(duration_s, time.monotonic() - started_at), 2.0)  # a continued run is short
            assert_same_checkpoints(folder, tmp_path / "whole", *STAGES)
            ours, theirs = (sorted(measured(run), key=str) for run in (folder, tmp_path / "whole"))
            assert is_tried or ours == theirs
        else:
            num_kills += 1


# Damage


def test_a_damaged_checkpoint_costs_only_the_steps_since_the_one_before(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    flags = "--stages dvae --save-step 2 --max-steps 6"
    whole, harmed = (start(flags, name, 5) for name in ("whole", "harmed"))
    path = newest(harmed, "dvae").folder / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    start(flags, harmed, 5)
    assert re.search("A damaged checkpoint is passed over.*step-00000006", caplog.text)
    assert_same_run(harmed, whole, "dvae")


def full_disk(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Refuse the checkpoints of some steps."""
    write = myxtts.checkpoints.save_file

    def refuse(content: object, path: Path, *rest: object) -> None:
        if any(f"step-{number:08d}" in str(path) for number in numbers):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(content, path, *rest)

    monkeypatch.setattr(myxtts.checkpoints, "save_file", refuse)


def test_a_full_disk_costs_a_checkpoint_and_at_the_end_of_a_stage_it_is_an_error(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full_disk(monkeypatch, 2, 6)
    run = start("--stages dvae,gpt --save-step 2 --max-steps 6", code=1)
    assert re.search(r"Saving .*step-00000002 failed: .*No space left .*Older checkpoints are kept", caplog.text)
    assert re.search(r"No space left on device[\s\S]*continues from the last good checkpoint", start.err)
    assert "Stage gpt" not in start.out
    assert [path.name for path in (run / "dvae").iterdir()] == ["step-00000004"]


def test_a_full_disk_at_the_start_is_explained(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(myxtts.checkpoints, "save_file", refuse)
    run = start("--stages dvae", code=1)
    assert f"error: No room for {run / 'base.safetensors'}: No space left on device (" in start.err
    assert "Free some space" in start.err and "serializing" not in start.err


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
def test_another_configuration_is_refused_with_its_differences(flags: str, difference: str, start: Start) -> None:
    run = start("--stages dvae --max-steps 1")
    before = newest(run, "dvae").weights
    start(f"--stages dvae {flags}", corpus=4 if flags else 5, code=2)
    assert difference in start.err
    assert "--checkpoint-dir DIR" in start.err and "--reset-training" in start.err
    assert ("processes): the run has 2, now 4" in start.err) is ("--grad-accum" in flags)
    assert_equal_tensors(newest(run, "dvae").weights, before)


def test_a_refused_batch_size_or_corpus_names_what_works(start: Start) -> None:
    start("--stages dvae --max-steps 1 --batch-size 4")
    start("--stages dvae --max-steps 2 --batch-size 3", code=2)
    assert "A step of the run has 4 clips: --batch-size 2 --grad-accum 2 keeps them" in start.err
    start("--stages dvae --max-steps 2 --batch-size 2 --grad-accum 2")
    start("--max-steps 2 --batch-size 4", corpus=5, code=2)
    advice = re.search(r"(--init-from \S+) --checkpoint-dir (\S+)", start.err)
    assert advice
    assert not Path(advice[2]).exists()
    start(f"--max-steps 1 {advice[1]}", Path(advice[2]), 5)
    assert newest(Path(advice[2])).step == 1


def test_the_clips_of_a_step_may_come_in_smaller_portions(start: Start) -> None:
    """As after an error for want of memory; the epoch that was under way is seen whole again."""
    run = start("--stages gpt --max-steps 2 --batch-size 2", corpus=7)
    assert newest(run).state["cursor"] == [0, 2]
    flags = "--stages gpt --max-steps 4 --batch-size 1 --grad-accum 2"
    start(flags, corpus=7)
    assert "epoch 0 starts over" in start.out
    after = newest(run)
    assert after.step == 4 and after.state["cursor"] == [0, 4]
    assert after.state["notes"]["identity"]["data.batch_size"] == 1
    start(flags.replace("4", "5"), corpus=7)
    assert "epoch 0 starts over" not in start.out


def test_a_run_of_several_processes_of_an_earlier_version_goes_on_at_the_same_place(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted the batches of one process."""
    flags, to_json, identity = "--stages gpt --batch-size 1 --grad-accum 2", State.to_json, myxtts.run.identity

    def earlier(state: State) -> dict[str, object]:
        values = to_json(state)
        del values["cursor_counts"]
        return values | {"cursor": [state.cursor.epoch, state.cursor.batch // 2]}

    with monkeypatch.context() as patched:
        patched.setattr(State, "to_json", earlier)
        two = {"processes": 2, "training.gradient_accumulation_steps": 1}
        patched.setattr(myxtts.run, "identity", lambda *given: identity(*given) | two)
        run = start(f"{flags} --max-steps 1", corpus=7)
        assert newest(run).state["cursor"] == [0, 1]
    start(f"{flags} --max-steps 2", corpus=7)
    assert "the rest of epoch 0 repeats some clips and leaves out others" in start.out
    assert newest(run).state["cursor"] == [0, 4]


def test_a_finished_stage_stays_finished_in_other_portions(start: Start) -> None:
    """Two epochs of seven clips are seven steps of two halves, but eight of whole batches."""
    run = start("--stages dvae --epochs 2 --max-steps 99 --batch-size 1 --grad-accum 2", corpus=7)
    before = newest(run, "dvae")
    assert before.step == 7
    start("--stages dvae --epochs 2 --max-steps 99 --batch-size 2", corpus=7)
    assert "Stage dvae: finished at step 7" in start.out and "split differently" not in start.out
    assert_equal_tensors(newest(run, "dvae").weights, before.weights)


def test_a_reset_puts_the_old_run_aside_and_starts_over(start: Start, tmp_path: Path) -> None:
    run = start("--stages dvae --max-steps 2")
    old = newest(run, "dvae")
    start(f"--stages dvae --max-steps 1 --reset-training --init-from {tmp_path / 'none'}", code=2)
    assert newest(run, "dvae").step == 2, "a reset that cannot start changes nothing"
    (run / "evaluation").mkdir()
    for name in ("verdict.json", "trace.jsonl"):
        (run / name).write_text("of a profile")
    start("--stages dvae --seed 7 --max-steps 3 --reset-training")
    aside = run / "before-reset-1"
    assert f"Starting over; what the folder held is now in {aside}" in start.out
    assert_equal_tensors(newest(aside, "dvae").weights, old.weights)
    assert [report["step"] for report in steps(aside)] == [1, 2]
    assert (aside / "tensorboard").is_dir()
    assert newest(run, "dvae").step == 3 == len(steps(run))
    gone = ("evaluation", "verdict.json", "trace.jsonl")
    assert not any((run / name).exists() for name in gone), "they are of another run"
    assert (aside / "machine.json").is_file()
    for number, step in ((2, 3), (3, 1)):
        start("--stages dvae --max-steps 1 --reset-training")
        assert newest(run / f"before-reset-{number}", "dvae").step == step
        (run / f"before-reset-{number - 1}").rename(tmp_path / f"elsewhere-{number}")
    assert "reset_training: false" in (run / "settings.yaml").read_text()


def test_what_a_run_began_with_is_forgotten_until_something_is_saved(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise weights, sizes and the vocabulary of a start that came to nothing would stay in the next one."""
    with monkeypatch.context() as patched:
        full_disk(patched, 4)
        start("--stages dvae --seed 7", code=1)
    run, other = start("--stages dvae"), start("--stages dvae", "other")
    assert_same_run(run, other, "dvae")
    assert (run / "base.safetensors").read_bytes() == (other / "base.safetensors").read_bytes()
