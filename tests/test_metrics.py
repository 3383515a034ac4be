"""What a training reports: the files that keep it, the warnings it gives, and the lines that show it."""

from __future__ import annotations

import errno
import io
import logging
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import EMPTY_RINGS, REPORT
from rich.console import Console

from myxtts.observe.diagnosis import (
    CLEAR_REPORTS,
    CPU_CLEAR_REPORTS,
    WARMUP_REPORTS,
    WINDOW_REPORTS,
    LiveWarnings,
    Warning,
    warnings_of,
)
from myxtts.observe.metrics import MetricsLog, StepReport, ValidationReport, colours, read_metrics
from myxtts.terminal import ProgressPrinter, progress_line, validation_line

FULL = {"host": (16, 16), "device": (1, 2), "model": (3, 3)}


def on_step(step: int, **values: Any) -> StepReport:
    return replace(REPORT, step=step, **values)


def warned(caplog: pytest.LogCaptureFixture) -> str:
    """The one warning that was logged."""
    (text,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    return text


def steps_in(path: Path) -> list[tuple[str, int, float]]:
    return [(line["stage"], line["step"], line["losses"]["total"]) for line in read_metrics(path)]


def log_steps(folder: Path, *steps: int, begin_at: int = 0, stage: str = "gpt", **values: Any) -> Path:
    """Writes reports of some steps as a training that begins does; returns the file."""
    log = MetricsLog(folder)
    log.begin(stage, begin_at)
    for step in steps:
        log.step(on_step(step, stage=stage, **values))
    log.close()
    return log.path


@pytest.fixture
def curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What TensorBoard reads of a stage. It sorts files of one second by name, where 10 comes before 9."""
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(100))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(stage: str = "gpt") -> Any:
        events = EventAccumulator(str(tmp_path / "tensorboard" / stage))
        events.Reload()
        return events

    return read


def test_reports_come_back_as_they_were_written(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    log = MetricsLog(tmp_path)
    log.begin("gpt", 0)
    log.step(REPORT)
    log.validation(ValidationReport("gpt", 120, {"total": 3.5}, is_best=True))
    first, second = read_metrics(log.path)
    log.close()
    assert first.pop("written_at") <= second.pop("written_at")
    lists = {name: list(counts) for name, counts in REPORT.rings.items()}
    assert first == {"kind": "step", **vars(REPORT), "rings": lists, "times_ms": list(REPORT.times_ms)}
    assert second == {"kind": "validation", "stage": "gpt", "step": 120, "losses": {"total": 3.5}, "is_best": True}


def test_numbers_that_are_not_finite_leave_the_json_strict(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.step(replace(REPORT, losses={"total": float("nan")}, grad_norm={"model": float("inf")}))
    log.close()
    (report,) = read_metrics(log.path)
    assert (report["losses"], report["grad_norm"]) == ({"total": None}, {"model": None})


def test_a_line_cut_off_by_a_kill_costs_only_itself(tmp_path: Path) -> None:
    path = log_steps(tmp_path, 10, 20, 30)
    path.write_bytes(path.read_bytes()[:-40])
    assert [step for _, step, _ in steps_in(path)] == [10, 20]
    log_steps(tmp_path, 30, begin_at=25)
    assert [step for _, step, _ in steps_in(path)] == [10, 20, 30]


def test_continuing_a_stage_outdates_its_later_steps_and_no_others(
    tmp_path: Path, curves: Callable[..., Any]
) -> None:
    for stage in ("dvae", "gpt"):
        path = log_steps(tmp_path, 10, 20, 30, stage=stage, losses={"total": 1.0})
    log_steps(tmp_path, 25, begin_at=15, losses={"total": 2.0})
    log_steps(tmp_path, 25, begin_at=25, losses={"total": 3.0})  # of a step reported twice the last report holds
    kept = [*(("dvae", step, 1.0) for step in (10, 20, 30)), ("gpt", 10, 1.0), ("gpt", 25, 3.0)]
    assert steps_in(path) == kept
    assert {event.step: event.value for event in curves().Scalars("loss/total")} == {10: 1.0, 25: 3.0}


def test_tensorboard_has_the_curves_of_a_report(tmp_path: Path, curves: Callable[..., Any]) -> None:
    log = MetricsLog(tmp_path)
    log.step(REPORT)
    log.step(on_step(260, mfu=None))
    log.validation(ValidationReport("gpt", 260, {"total": 3.5}, is_best=False))
    log.close()
    events = curves()
    assert [event.step for event in events.Scalars("loss/total")] == [250, 260]
    expected = {
        "validation/total": 3.5, "grad_norm/model": 0.8, "train/lr": 1.2e-4, "speed/clips_per_s": 512.3,
        "speed/step_cv": 0.02, "speed/idle_share": 0.003, "ring/model": 3, "memory_mb/model": 12288,
        "speed/mfu": 0.47,
    }  # fmt: skip
    assert {tag: events.Scalars(tag)[-1].value for tag in expected} == pytest.approx(expected)
    assert [event.step for event in events.Scalars("speed/mfu")] == [250], "unknown is not a number"


def test_tensorboard_has_pictures_of_mels_and_code_usage(tmp_path: Path, curves: Callable[..., Any]) -> None:
    from PIL import Image

    log = MetricsLog(tmp_path)
    log.begin("dvae", 0)
    log.image("mel", np.outer(np.arange(20.0), np.ones(30)), 10)
    log.code_usage(np.array([5, 0, 100, 3]), 10)
    log.close()
    events = curves("dvae")
    mel = np.asarray(Image.open(io.BytesIO(events.Images("mel")[0].encoded_image_string))).astype(int)
    assert mel.shape == (20, 30, 3)
    assert mel[0].sum() > mel[-1].sum(), "the lowest frequencies are drawn below"
    assert "codes/uses" in events.Tags()["histograms"]


def test_colours_span_the_finite_values() -> None:
    pixels = colours(np.array([[1.0, 2.0, 3.0], [np.nan, np.inf, -np.inf]])).astype(int)
    brightness = pixels.sum(-1)
    assert brightness[0, 0] < brightness[0, 1] < brightness[0, 2]
    assert brightness[1].tolist() == [brightness[0, 0], brightness[0, 2], brightness[0, 0]]


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = MetricsLog(tmp_path)
    log.begin("gpt", 0)
    for step in (10, 20, 30):
        log.step(on_step(step))
    (tmp_path / "metrics.jsonl").unlink()
    log.step(on_step(40))
    log.close()
    assert "No space left on device" in warned(caplog) and "Training continues" in warned(caplog)
    assert [step for _, step, _ in steps_in(tmp_path / "metrics.jsonl")] == [40], "writing goes on by itself"


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_installed", [True, False])
def test_tensorboard_may_fail_alone(
    is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if is_installed:
        monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", no_space)
    else:
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert len(steps_in(log_steps(tmp_path, *range(10, 60)))) == 50
    assert "tensorboard" in warned(caplog)


def history(count: int = WARMUP_REPORTS + WINDOW_REPORTS, **values: Any) -> list[StepReport]:
    values = {"rings": FULL, "memory_mb": {"model": 1000.0}} | values
    return [on_step(10 * number, **values) for number in range(count)]


@pytest.mark.parametrize(
    ("rings", "cause"),
    [
        (EMPTY_RINGS, "--num-workers"),
        ({"host": (16, 16), "device": (0, 2), "model": (0, 3)}, "data.prefetch_to_gpu"),
        ({"host": (16, 16), "device": (2, 2), "model": (0, 3)}, "--data-gpu"),
        ({"host": (16, 16), "device": (2, 2), "handoff": (0, 3), "model": (0, 3)}, "takes longer than training"),
        ({"host": (16, 16), "device": (2, 2), "handoff": (3, 3), "model": (0, 3)}, "peer access"),
        ({"host": (16, 16), "device": (0, 2), "model": (3, 3)}, "--enable-static-shapes"),
        (FULL, "nvidia-smi"),
    ],
)
def test_varying_steps_are_explained_by_the_first_empty_ring(
    rings: dict[str, tuple[int, int]], cause: str
) -> None:
    (warning,) = warnings_of(history(step_cv=0.42, rings=rings))
    assert warning.code == "variation"
    assert "42 %" in warning.text and cause in warning.text


def test_a_model_that_waits_for_batches_most_of_the_time_is_starving() -> None:
    reports = history(step_cv=0.42)
    sometimes = [replace(report, rings=EMPTY_RINGS) if report.step % 30 == 0 else report for report in reports]
    mostly = [report if report.step % 30 == 0 else replace(report, rings=EMPTY_RINGS) for report in reports]
    assert "nvidia-smi" in warnings_of(sometimes)[0].text
    assert "--num-workers" in warnings_of(mostly)[0].text
    (warning,) = warnings_of(history(idle_share=0.2, rings=EMPTY_RINGS))
    assert warning.code == "starving"
    assert "20 %" in warning.text and "--num-workers" in warning.text
    assert warnings_of(history(idle_share=0.04, rings=EMPTY_RINGS)) == [], "an empty ring alone costs nothing"
    assert warnings_of(history(idle_share=0.2)) == [], "idle with batches ready is not for want of batches"
    assert warnings_of(history(WARMUP_REPORTS + 1, step_cv=0.9)) == [], "the warm-up"


def validated(
    *losses: float, training: Callable[[int], float] = lambda step: 5 - step / 1000
) -> list[list[Warning]]:
    """The warnings of validations every 100 steps."""
    watch, found = LiveWarnings(), []
    for number, loss in enumerate(losses, 1):
        for step in range(100 * number - 90, 100 * number + 10, 10):
            watch.add(on_step(step, losses={"total": training(step)}, rings=FULL))
        found.append(watch.validated(ValidationReport("gpt", 100 * number, {"total": loss}, is_best=False)))
    return found


def test_a_validation_loss_that_rises_while_the_training_loss_falls_is_overfitting() -> None:
    *before, (warning,), after = validated(4.0, 3.0, 3.1, 3.15, 3.2, 3.3)
    assert not any(before) and not after, "once, when it is no longer chance"
    assert warning.code == "overfitting"
    assert "overfits: its validation loss was 3 at step 200 and is 3.2 now" in warning.text
    assert "speak --best" in warning.text and "--early-stop" in warning.text
    assert not any(validated(4.0, 3.0, 3.01, 3.02, 3.01)), "about the same"
    assert not any(validated(4.0, 3.0, 3.2, 3.4, 3.6, training=lambda step: 5 + step / 1000)), "it diverges"
    assert not any(validated(4.0, math.nan, 3.0, 3.1, 2.9))


def leak_found(
    used_mb: Callable[[int], float], log_step: int = 10, role: str = "gpu", total: int = 100_000
) -> tuple[int, str]:
    """The step at which a leak is first warned of on a card of 16 GB, and the text; (0, "") if there is none."""
    watch = LiveWarnings()
    for step in range(log_step, 3000, log_step):
        report = on_step(step, rings=FULL, total_steps=total, in_use_mb={role: (used_mb(step), 15_000.0)})
        for warning in watch.add(report):
            assert warning.code == f"memory-{role}"
            return step, warning.text
    return 0, ""


NOISE = np.random.default_rng(1).normal(0, 100, 10_000)


@pytest.mark.parametrize(
    ("used_mb", "log_step", "role", "latest"),
    [
        (lambda step: 2000 + 5 * step, 10, "gpu", 200),
        (lambda step: 2000 + 5 * step, 1, "model", 50),
        (lambda step: 2000 + 5 * step, 100, "data", 1600),
        (lambda step: 2000 + 5 * step, 10, "host", 200),
        (lambda step: 2000 + 5 * step + NOISE[step], 10, "gpu", 500),
        (lambda step: 2000 + 5 * step + 4000 * (step % 500 == 0), 10, "gpu", 200),
        (lambda step: 2000 + 5 * max(step - 1500, 0), 10, "gpu", 1800),
        (lambda step: 2000 + 0.2 * step, 10, "gpu", 1000),
    ],
    ids=["5 MB a step", "every step", "seldom", "host", "noise", "peaks of validation", "late", "slow"],
)
def test_memory_that_grows_until_it_ends_the_run_is_warned_of_long_before(
    used_mb: Callable[[int], float], log_step: int, role: str, latest: int
) -> None:
    found, text = leak_found(used_mb, log_step, role)
    assert 0 < found <= latest
    slope, end = (
        float(re.search(pattern, text)[1]) for pattern in (r"by ([\d.]+) MB", r"about step (\d+) of 100000")
    )
    real_slope = (used_mb(4990) - used_mb(3990)) / 1000
    assert slope == pytest.approx(real_slope, rel=0.3)
    assert end == pytest.approx(found + (15_000 - used_mb(found)) / real_slope, rel=0.3)
    assert "--save-step" in text


@pytest.mark.parametrize(
    "used_mb",
    [
        lambda _: 9000.0,
        lambda step: 9000 + NOISE[step],
        lambda step: 9000 + 3000 * (step > 700),
        lambda step: 9000 - 3000 * math.exp(-step / 50),
        lambda step: 9000 + 2000 * (step % 1000 == 0),
        lambda step: 9000 + 3000 * (step // 10 % 2),
        lambda step: 9000 + 0.05 * step,
    ],
    ids=["steady", "noise", "a jump", "warm-up", "peaks of validation", "up and down", "outlasts the run"],
)
def test_memory_that_does_not_end_the_run_is_no_alarm(used_mb: Callable[[int], float]) -> None:
    assert leak_found(used_mb) == (0, "")
    assert leak_found(used_mb, role="host") == (0, "")


def num_warnings(watch: LiveWarnings, step_cv: float, count: int, **values: Any) -> int:
    given = [warning.code for report in history(count, step_cv=step_cv, **values) for warning in watch.add(report)]
    assert set(given) <= {"variation"}
    return len(given)


def test_a_warning_is_given_once_until_it_clears() -> None:
    watch = LiveWarnings()
    assert num_warnings(watch, 0.5, 20) == 1
    assert num_warnings(watch, 0.1, CLEAR_REPORTS - 1) == 0
    assert num_warnings(watch, 0.5, 20) == 0, "it came back before it was really gone"
    assert num_warnings(watch, 0.1, CLEAR_REPORTS) == 0
    assert num_warnings(watch, 0.5, 20) == 1
    assert num_warnings(watch, 0.5, 20, stage="decoder") == 1, "another stage is another matter"


def test_on_a_cpu_varying_steps_are_put_down_to_what_uses_its_cores_and_seldom_said() -> None:
    (warning,) = warnings_of(history(step_cv=0.42, memory_mb={}))
    assert "42 %" in warning.text and "cores" in warning.text
    empty = {"host": (16, 16), "device": (0, 2), "model": (0, 3)}
    (slow,) = warnings_of(history(step_cv=0.42, memory_mb={}, rings=empty))
    for text in (warning.text, slow.text):
        assert not any(word in text for word in ("GPU", "gpu", "nvidia", "compiled"))
    watch = LiveWarnings()
    assert num_warnings(watch, 0.5, 20, memory_mb={}) == 1
    for stage in ("gpt", "decoder"):
        assert sum(num_warnings(watch, cv, 10, stage=stage, memory_mb={}) for cv in (0.1, 0.5) * 4) == 0
    assert num_warnings(watch, 0.1, CPU_CLEAR_REPORTS, memory_mb={}) == 0
    assert num_warnings(watch, 0.5, 20, memory_mb={}) == 1, "long after the last time it is news again"


def test_the_progress_line_says_what_matters_most_in_one_line_of_the_screen() -> None:
    assert progress_line(REPORT) == (
        "step 250/1000  loss 3.412 (text 4.1 audio 3.37)  512 clips/s  idle 0.3 %  ahead 12/21  ETA 12:34"
    )
    assert progress_line(REPORT, 150) == (
        "step 250/1000  loss 3.412 (text 4.1 audio 3.37)  512 clips/s  107.2 ms  idle 0.3 %  mfu 47 %  "
        "ahead 12/21  12.0 GB  lr 1.2e-04  ETA 12:34"
    )
    assert progress_line(REPORT, 61) == "step 250/1000  loss 3.412  512 clips/s  idle 0.3 %  ETA 12:34"
    many = {"total": 1.0} | {f"part_{number}": 1.234 for number in range(20)}
    huge = replace(REPORT, losses=many, step=10**9, total_steps=10**9, clips_per_s=1e6, eta_s=1e9, skipped=10**6)
    assert all(len(progress_line(huge, width)) <= width for width in range(30, 130))
    assert len(validation_line(ValidationReport("gpt", 10**9, many, is_best=True))) <= 100
    unknown = replace(
        REPORT, total_steps=None, losses={"total": float("nan"), "codes_used": 1024.0}, clips_per_s=3.26, rings={},
        memory_mb={"data": 2048, "model": 12595}, skipped=2, eta_s=None, mfu=None,
    )  # fmt: skip
    assert progress_line(unknown, 150) == (
        "step 250  loss nan (codes_used 1,024)  3.3 clips/s  107.2 ms  idle 0.3 %  ahead 12  "
        "data 2.0 GB  model 12.3 GB  lr 1.2e-04  skipped 2"
    )
    for seconds, shown in ((-3, "0:00"), (59.6, "1:00"), (3600, "1:00:00"), (93784, "1 d 2:03:04")):
        assert progress_line(replace(REPORT, eta_s=seconds)).endswith(f"ETA {shown}")


def test_plain_lines_when_not_on_a_terminal_and_none_when_silent(capsys: pytest.CaptureFixture[str]) -> None:
    best = ValidationReport("gpt", 120, {"total": 3.2, "text_loss": 4.0}, is_best=True)
    for is_silent in (False, True):
        with ProgressPrinter(is_silent=is_silent) as progress:
            progress.begin("gpt", 0, 1000)
            progress.tick(3)
            progress.report(REPORT)
            progress.validation(best)
            progress.validation(replace(best, is_best=False))
            progress.warn([Warning("variation", "The time of a step varies [a lot]: do this.")])
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        progress_line(REPORT),
        "validation at step 120  loss 3.200 (text 4)  the best so far",
        validation_line(replace(best, is_best=False)),
        "WARNING: The time of a step varies [a lot]: do this.",
    ]
    assert "best" not in shown[2]


def test_a_terminal_has_a_moving_line_below_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("myxtts.terminal.time", SimpleNamespace(monotonic=lambda: now))
    screen = io.StringIO()
    with ProgressPrinter(
        console=Console(file=screen, force_terminal=True, width=200, color_system=None)
    ) as progress:
        progress.begin("gpt", 7, 1000)
        assert "gpt: step 7/1000" in screen.getvalue()
        progress.report(REPORT)
        assert f"{progress_line(REPORT)}\n" in screen.getvalue()
        now += 54
        progress.tick(125)
        gives_up_at = time.monotonic() + 10
        while "step 125/1000" not in screen.getvalue() and time.monotonic() < gives_up_at:
            time.sleep(0.01)
        assert "step 125/1000" in screen.getvalue() and "ETA 11:40" in screen.getvalue()


def test_log_messages_stand_above_the_moving_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, screen = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(terminal)
    logging.getLogger().addHandler(handler)
    try:
        with ProgressPrinter(console=Console(file=screen, force_terminal=True, width=200)) as progress:
            progress.begin("gpt", 0, 1000)
            logging.getLogger("myxtts").warning("a checkpoint was damaged")
            assert "a checkpoint was damaged\n" in screen.getvalue()
        assert handler.stream is terminal
        assert terminal.getvalue() == ""
    finally:
        logging.getLogger().removeHandler(handler)


def test_output_to_a_full_disk_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "write", no_space)
    with ProgressPrinter(console=Console(file=screen)) as progress:
        progress.begin("gpt", 0, 1000)
        progress.report(REPORT)
        progress.report(REPORT)
    assert caplog.text.count("No more progress is shown") == 1
