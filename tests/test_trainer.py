"""The loop, through the whole pipeline: it learns, adds up, skips what is not finite, validates and keeps."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_fixtures import SEED, Corpus, codes_alone, crop_mels_alone, num_open_files
from torch import Tensor
from training_fixtures import Start, arguments, assert_equal_tensors, losses, measured, newest, steps

from myxtts.config import DataSettings
from myxtts.data.prepare import prepare
from myxtts.model.conditioning import pack_frames
from myxtts.model.gpt import pack, packed_length
from myxtts.model.xtts import XTTS
from myxtts.observe.trace import StepClock
from myxtts.run_dir import RunDir
from myxtts.training.recipes import DecoderRecipe, GptRecipe
from myxtts.training.trainer import MAX_SKIPPED

pytest_plugins = ["training_fixtures"]
pytestmark = pytest.mark.usefixtures("small")


def saved_steps(folder: Path, stage: str = "gpt") -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / stage).glob("step-*"))


def test_every_stage_learns_its_clips(start: Start) -> None:
    run = start("--batch-size 3 --dvae-steps 20 --max-steps 8 --decoder-steps 10 --lr 3e-3", corpus=3)
    for stage, name in (("dvae", "mel_loss"), ("gpt", "audio_loss"), ("decoder", "mel_loss")):
        history = losses(run, stage, name)
        assert history[-1] < 0.7 * history[0], (stage, history)


@pytest.mark.parametrize("count", [4, 3], ids=["full batches", "with a filling clip"])
def test_micro_steps_give_the_weights_of_one_large_batch(count: int, start: Start) -> None:
    """All clips are in every step, so that both runs see the same: 2 + 2 of them, or all at once."""
    one = start("--stages gpt --batch-size 4 --max-steps 2", "large", count)
    two = start("--stages gpt --grad-accum 2 --max-steps 2", "small", count)
    large, added = newest(one), newest(two)
    for name, weight in large.weights.items():
        torch.testing.assert_close(added.weights[name], weight, rtol=0, atol=1e-5, msg=name)
    for name, value in large.optimizer.items():
        if name.startswith("exp_avg."):
            torch.testing.assert_close(added.optimizer[name], value, rtol=0, atol=1e-6, msg=name)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)


def test_a_cpu_takes_the_clips_of_the_decoder_one_by_one(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clip that only fills up the batch, and the same losses and weights as all at once."""
    runs = []
    for name, at_once in (("pieces", 1), ("whole", None)):
        monkeypatch.setattr(DecoderRecipe, "clips_at_once", at_once)
        runs.append(start("--stages decoder --batch-size 4 --max-steps 2", name, corpus=3))
    for found, expected in zip(*map(steps, runs), strict=True):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)
    pieces, whole = (newest(run, "decoder").weights for run in runs)
    for name, weight in whole.items():
        torch.testing.assert_close(pieces[name], weight, rtol=0, atol=1e-3)


def test_the_decoder_stage_of_tiny_needs_less_than_two_gigabytes_on_a_cpu(start: Start, tmp_path: Path) -> None:
    code = (
        "import re, sys; from myxtts.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        # Not ru_maxrss: it starts at what the process that called exec held.
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024)"
    )
    flags = "--stages decoder --batch-size 4 --max-steps 1 --num-workers 1"
    command = [sys.executable, "-c", code, *arguments(tmp_path / "run", start.clips(4), flags)]
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert int(result.stdout.split()[-1]) < 2000, "MB"


# What is not finite


def spoil(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[int], bool]) -> None:
    """Make the loss of some micro-steps NaN; they count from 0."""
    forward, num_calls = GptRecipe.forward, 0

    def spoilt(self: GptRecipe, *arguments: Any) -> dict[str, Tensor]:
        nonlocal num_calls
        found = forward(self, *arguments)
        if is_bad(num_calls):
            found["total"] = found["total"] * math.nan
        num_calls += 1
        return found

    monkeypatch.setattr(GptRecipe, "forward", spoilt)


def test_a_step_with_a_loss_that_is_not_finite_is_skipped_and_counted(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, lambda call: call == 4)  # the first of the two micro-steps of step 3
    run = start("--stages gpt --grad-accum 2 --save-step 1 --keep 9 --max-steps 4", corpus=5)
    before, skipped, after = (RunDir(run).checkpoints("gpt").load(step) for step in (2, 3, 4))
    assert_equal_tensors(skipped.weights, before.weights)
    assert any(not torch.equal(after.weights[name], value) for name, value in skipped.weights.items())
    assert all(value.isfinite().all() for value in after.weights.values())
    assert [report["skipped"] for report in steps(run)] == [0, 0, 1, 1]
    assert [report["losses"]["total"] is None for report in steps(run)] == [False, False, True, False]
    assert "skipped 1" in start.out


def test_many_skipped_steps_in_a_row_end_the_run_and_leave_its_checkpoints(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, lambda call: call >= 2)
    run = start("--stages gpt --batch-size 1 --save-step 2 --max-steps 50 --keep 30", corpus=3, code=1)
    assert f"the gradients of the last {MAX_SKIPPED} steps were not finite" in start.err
    assert "training.enable_eager_debug" in start.err
    assert "Traceback" not in start.err
    assert saved_steps(run) == list(range(2, 2 + MAX_SKIPPED, 2))
    assert_equal_tensors(newest(run).weights, RunDir(run).checkpoints("gpt").load(2).weights)


# Schedules and what is kept


def test_the_learning_rate_rises_and_falls_along_a_cosine(start: Start) -> None:
    run = start("--stages dvae --warmup-steps 3 --max-steps 8 --lr 0.01")
    found = [report["lr"] for report in steps(run)]
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 5)) for step in range(5)]
    assert found == pytest.approx([0.01 * factor for factor in [0.25, 0.5, 0.75, *cosine]])
    assert newest(run, "dvae").optimizer["step.dvae.encoder.0.0.weight"] == 8


def test_reports_validations_and_checkpoints_come_when_they_are_due(start: Start) -> None:
    flags = f"--stages dvae --max-steps 11 --log-step 4 --val-step 3 --save-step 5 --val-data {start.clips(3)}"
    run = start(f"{flags} --keep 9 --lr 1e-9")
    assert [report["step"] for report in steps(run)] == [4, 8, 11]
    validations = steps(run, "validation")
    assert [report["step"] for report in validations] == [3, 6, 9, 11]
    best = {report["step"] for report in validations if report["is_best"]}
    assert set(saved_steps(run, "dvae")) == {5, 10, 11} | best


def test_clips_that_only_fill_up_a_batch_are_not_counted(start: Start) -> None:
    (report,) = steps(start("--stages dvae --val-fraction 0 --max-steps 12 --log-step 12 --batch-size 3"))
    clips_per_step = report["clips_per_s"] * report["step_ms"] / 1000
    assert clips_per_step < 2.5, "four clips in two batches of three, where two only fill up"


def test_what_the_first_step_takes_to_compile_is_not_expected_of_the_others(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, end = iter([1.0]), StepClock.end

    def slowly(clock: StepClock) -> None:
        time.sleep(next(compiling, 0.0))
        end(clock)

    monkeypatch.setattr(StepClock, "end", slowly)
    first = steps(start("--stages dvae --max-steps 108 --log-step 8"))[0]
    assert first["elapsed_s"] > 1
    assert 0 < first["eta_s"] < 10
    brief = start("--stages dvae --max-steps 4 --log-step 2", "brief")
    assert [report["eta_s"] for report in steps(brief)] == [None, 0], "unknown while steps compile"


def test_useful_arithmetic_is_reported_as_a_share_of_the_measured_peak(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only on a GPU, where the peak can be measured; frozen weights take less arithmetic."""
    assert steps(start("--stages gpt --max-steps 1", "cpu"))[0]["mfu"] is None
    monkeypatch.setattr("myxtts.run.peak_flops", lambda *_: 1e12)
    run = start("--max-steps 2")
    dvae, _, *gpt, decoder, _ = steps(run)
    (lora,) = steps(start("--stages gpt --lora-rank 2 --max-steps 1", "lora"))
    whole, again, adapted = (report["mfu"] / report["clips_per_s"] for report in (*gpt, lora))
    assert whole == pytest.approx(again)
    assert 0.6 * whole < adapted < 0.9 * whole
    model = RunDir(run).load_model()
    kernels = {
        part: sum(p.numel() for name, p in network.named_parameters() if p.dim() > 1 and "embedding" not in name)
        for part, network in (("gpt", model.gpt), ("dvae", model.dvae), ("decoder", model.hifigan_decoder))
    }
    assert 6 * kernels["gpt"] * 10 < 1e12 * whole < 6 * kernels["gpt"] * 100, "each clip has some tens of tokens"
    per_clip = [1e12 * report["mfu"] / report["clips_per_s"] for report in (dvae, decoder)]
    assert 6 * kernels["dvae"] * 10 < per_clip[0] < 6 * kernels["dvae"] * 160, "one to four frames of each code"
    assert 6 * kernels["decoder"] < per_clip[1]


def test_the_newest_and_the_best_checkpoints_are_kept(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([3.0, 1.0, 2.0, 2.5, 1.5, 4.0])
    monkeypatch.setattr("myxtts.run.validate", lambda *_: ({"total": next(found)}, {}))
    flags = f"--stages dvae --max-steps 6 --val-step 1 --save-step 1 --keep 2 --val-data {start.clips(3)}"
    copy = start.folder / "run" / "dvae" / "step-00000001-my-copy"
    copy.mkdir(parents=True)
    run = start(flags)
    assert copy.exists()
    copy.rmdir()
    assert saved_steps(run, "dvae") == [2, 5, 6]
    best = RunDir(run).checkpoints("dvae").best()
    assert best is not None
    assert (best.step, best.state["best_loss"]) == (2, 1.0)


def test_training_ends_early_when_validations_no_longer_improve(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([3.0, 1.0, 2.0, 2.5, 0.5])
    monkeypatch.setattr("myxtts.run.validate", lambda *_: ({"total": next(found)}, {}))
    flags = f"--stages dvae --max-steps 50 --val-step 2 --early-stop 2 --val-data {start.clips(3)}"
    run = start(flags)
    last = newest(run, "dvae")
    assert (last.step, last.state["done"]) == (8, True)
    assert "Done" in start.out
    start(flags)
    assert newest(run, "dvae").step == 8


# Validation


def loss_heard_alone(model: XTTS, corpora: tuple[Path, Path]) -> float:
    """Cross-entropy per code or STOP of the validation clips, one by one and without any pipeline."""
    data = DataSettings(
        train_data=corpora[0], val_data=corpora[1], val_fraction=0, language="en", vocab_size=256,
        max_mel_frames=128, max_text_length=40, num_workers=1,
    )  # fmt: skip
    heard = Corpus(data, prepare(data).val, model.eval())
    total = count = 0.0
    for clip in range(len(heard.clips)):
        (mel,) = crop_mels_alone(heard, torch.tensor([clip]).numpy(), epoch=0)
        codes = codes_alone(heard, clip)
        ids = torch.from_numpy(heard.clips.ids[heard.clips.ids_rows[clip]].copy())
        lengths = (torch.tensor([len(ids)]), torch.tensor([len(codes)]))
        frames = pack_frames(mel, torch.tensor([len(mel)]), len(mel))
        tokens = (ids[None], lengths[0], codes[None], lengths[1])
        with torch.no_grad():
            found = model.gpt(pack(model.dims.gpt, frames, *tokens, budget=int(packed_length(*lengths))))
        total, count = total + float(found.audio_sum), count + float(found.audio_count)
    return total / count


def test_the_validation_loss_is_that_of_the_averaged_weights_per_token(start: Start) -> None:
    flags = f"--stages gpt --seed {SEED} --ema-decay 0.5 --max-steps 3 --val-data {start.clips(3)}"
    run = start(flags)
    (report,) = steps(run, "validation")
    corpora = (start.clips(4), start.clips(3))
    averaged = RunDir(run).load_model()
    assert report["losses"]["total"] == pytest.approx(loss_heard_alone(averaged, corpora), rel=1e-5)
    assert 3 < report["losses"]["text"] < 5

    last, plain = newest(run), RunDir(run).load_model()
    plain.load_state_dict(last.weights, strict=False)
    assert abs(loss_heard_alone(plain, corpora) - report["losses"]["total"]) > 1e-3
    kept = {name.removeprefix("ema."): value for name, value in last.optimizer.items() if name.startswith("ema.")}
    assert_equal_tensors({name: averaged.state_dict()[name] for name in kept}, kept)


@pytest.mark.parametrize("stage", ["dvae", "gpt"])
def test_validation_does_not_disturb_the_training(stage: str, start: Start) -> None:
    flags = f"--stages {stage} --dropout 0.2 --ema-decay 0.9 --max-steps 6 --val-data {start.clips(3)}"
    runs = [start(f"{flags} --val-step 1", "often")]
    files = num_open_files()
    runs.append(start(flags, "once"))
    assert num_open_files() <= files + 2, "feeds of validations leave no file open"
    often, once = (newest(run, stage) for run in runs)
    assert_equal_tensors(often.weights, once.weights)
    assert_equal_tensors(often.optimizer, once.optimizer)
    ours, theirs = ([report for report in measured(run) if report["kind"] == "step"] for run in runs)
    assert ours == theirs
    assert [len(steps(run, "validation")) for run in runs] == [6, 1]


# Looking for an error


def test_eager_debugging_names_the_operation_and_says_that_it_is_slow(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, lambda call: call == 1)
    with (
        pytest.raises(RuntimeError, match=r"MulBackward0.* returned nan"),
        pytest.warns(match="Error detected in"),
    ):
        start("--stages gpt --max-steps 3 --enable-eager-debug")
    assert "Training step: eager, with anomaly checks: slow on purpose" in start.screen.readouterr().out
    assert not torch.is_anomaly_enabled()
