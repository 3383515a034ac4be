"""The live view: what it draws from reports and readings, how it follows a file, and what it does unwatched."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import EMPTY_RINGS, REPORT, step_record, validation_record
from rich.console import Console

from myxtts import terminal
from myxtts.observe import metrics
from myxtts.observe.metrics import MetricsLog, MetricsTail, ValidationReport, read_metrics
from myxtts.terminal import Screen, View, dashboard, render, sparkline, watch

READING = {
    "gpu": 0, "utilisation": 0.5, "memory_used_mb": 10240.0, "memory_total_mb": 81920.0, "power_w": 412.0,
    "temperature_c": 61, "throttled_by": [],
}  # fmt: skip


def drawn(*reports: dict[str, Any], readings: Any = (), now: float | None = None, **frame: Any) -> str:
    file, view = io.StringIO(), View(**frame)
    Screen(file=file, width=view.width).print(render(reports, readings, view, now=now))
    return file.getvalue()


def watched(folder: Path, width: int = 100) -> str:
    """What is printed where there is no terminal."""
    file = io.StringIO()
    watch(folder, threading.Event(), console=Console(file=file, width=width))
    return file.getvalue()


def line_of(text: str, label: str) -> str:
    return next(line for line in text.splitlines() if line.lstrip("│ ").startswith(label))


def test_the_state_of_a_training_is_seen_at_a_glance() -> None:
    before = [step_record(300, stage="dvae", total_steps=300), step_record(240, losses={"total": 5.0})]
    validations = [validation_record(200, 3.3), validation_record(240, 3.6)]
    now = step_record(memory_mb={"data": 2048.0, "model": 12288.0})
    text = drawn(*before, *validations, now, title="my-voice")
    assert "my-voice" in text
    for label, parts in {
        "stages": ["dvae 300/300  gpt 250/1,000"],
        "progress": ["██████░░░", "25 %", "epoch 3", "ETA 12 min"],
        "loss": ["█▁", "3.41  text_loss 4.1  audio_loss 3.37"],
        "validation": ["3.6 at step 240, best 3.3 at step 200"],
        "clips/s": ["512"],
        "step time": ["107 ms  varies 2.0 %  model waits 0.3 %  MFU 47.0 %"],
        "memory": ["data 2 GB  model 12 GB"],
    }.items():
        assert all(part in line_of(text, label) for part in parts), label


def test_rings_are_bars_as_full_as_they_are_and_names_from_files_are_no_markup() -> None:
    rings = {"[red]x[/red]": (1, 2)}
    text = drawn(step_record(stage="[b]gpt", rings=rings, memory_mb={"[i]": 1.0}), title="[/b]run")
    assert all(part in text for part in ("[b]gpt", "ring [red]x[/red]", "[i] ", "[/b]run"))
    text = drawn(step_record(rings={"host": (8, 16), "device": (0, 2), "model": (3, 3), "keep": (1, 4)}))
    fills = [line_of(text, f"ring {name}").count("█") for name in ("host", "device", "model")]
    assert fills[0] * 2 == pytest.approx(fills[2], abs=1) and fills[1] == 0 and fills[2] > 8
    assert "8/16 ready" in text and "1/4 to be kept" in text


def test_each_gpu_has_a_line_and_what_is_unknown_is_not_shown() -> None:
    other = {"gpu": 1, "utilisation": None, "memory_used_mb": None, "throttled_by": ["power cap"]}
    text = drawn(step_record(), readings=[{**READING, "pcie_rx_mb_s": 900.0}, other], width=140)
    for part in ("50.0 %", "10/80 GB", "412 W", "61 °C", "PCIe in 900 MB/s"):
        assert part in line_of(text, "GPU 0")
    second = line_of(text, "GPU 1")
    assert "throttled: power cap" in second and "– " in second
    assert not any(part in second for part in ("GB", " W", "°C", "PCIe", "0.0 %"))
    assert "GPU" not in drawn(step_record())
    early = drawn(readings=[READING])
    assert "Waiting for the first report." in early and "412 W" in early


def test_warnings_stand_below_with_what_to_do() -> None:
    starved = drawn(*(step_record(step, rings=EMPTY_RINGS, idle_share=0.3) for step in range(20)))
    assert "WARNING" in starved and "--num-workers" in starved
    assert "WARNING" not in drawn(*(step_record(step) for step in range(20)))
    for step, now, is_silent in ((250, 1300.0, True), (250, 1030.0, False), (1000, 1300.0, False)):
        assert ("Nothing was reported for 5 min" in drawn(step_record(step), now=now)) == is_silent


@pytest.mark.parametrize("width", [40, 72, 160])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    text = drawn(step_record(), validation_record(200, 3.3), readings=[READING], width=width)
    assert {len(line) for line in text.splitlines()} == {width}


@pytest.mark.parametrize(("width", "height"), [(100, 30), (200, 60), (80, 12)])
def test_the_view_fills_the_screen_with_its_curves_and_never_exceeds_it(width: int, height: int) -> None:
    reports = [step_record(step, losses={"total": 5 - step / 100}) for step in range(400)]
    text = drawn(*reports, width=width, height=height, said="one\ntwo\n", hint="Ctrl-C")
    lines = text.splitlines()
    assert len(lines) == height and {len(line) for line in lines} == {width} and "Ctrl-C" in lines[-1]
    if height > 20:
        assert "two" in text and sum("█" in line for line in lines) > height // 3
        assert line_of(text, "loss").count("█") < width // 3, "the curve falls"


def test_numbers_that_are_missing_are_dashes() -> None:
    unknown = {"losses": {"total": math.nan}, "clips_per_s": math.nan}
    text = drawn(step_record(**unknown, step_ms=None, eta_s=None, total_steps=None))
    assert "–" in line_of(text, "loss") and "–" in line_of(text, "clips/s") and "ETA" not in text
    assert "step 250" in line_of(text, "progress") and "nan" not in text


def test_a_run_whose_process_is_gone_has_ended_at_its_last_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(step_record())}\n")
    gone = subprocess.Popen(["true"])
    gone.wait()

    def shown(holder: str) -> str:
        (tmp_path / "lock").write_text(holder)
        return watched(tmp_path, width=120)

    text = shown(f"process {gone.pid} on {socket.gethostname()}")
    assert "has ended. Its last report is of step 250 of 1,000" in text
    assert "running" not in text and "ETA" not in text and "paused" not in text
    for holder in (f"process {os.getpid()} on {socket.gethostname()}", f"process {gone.pid} on elsewhere", "?"):
        assert "has ended. Its" not in shown(holder) and "running" in shown(holder)


def test_a_sparkline_shows_the_course_and_leaves_out_what_is_unknown() -> None:
    assert sparkline(np.array([1.0, 2.0, math.nan, 8.0]), 10) == ["▁▂ █"]
    assert sparkline(np.arange(800.0), 8) == ["▁▂▃▄▅▆▇█"]
    assert sparkline(np.arange(800.0), 8, 2) == ["    ▂▄▆█", "▁▃▅▇████"]
    assert sparkline(np.array([1.0, 2.0]), 6, 2) == ["   ███", "▁▁▁███"], "a short curve is as wide as a long one"
    assert sparkline(np.array([math.nan]), 10) == [""] == sparkline(np.array([]), 10)
    assert sparkline(np.array([3.0, 3.0]), 10) == ["▁▁"]


def test_the_tail_of_a_file_says_what_reading_all_of_it_says(tmp_path: Path) -> None:
    log, tail = MetricsLog(tmp_path), MetricsTail(tmp_path / "metrics.jsonl")
    assert tail.read() == []
    for step in (100, 200, 300):
        log.step(replace(REPORT, step=step))
        assert tail.read() == read_metrics(log.path)
    log.validation(ValidationReport("gpt", 300, {"total": 3.0}, is_best=True))
    log.begin("gpt", 150)  # continued from an older checkpoint: what came later holds no longer
    log.step(replace(REPORT, step=200, losses={"total": 1.0}))
    log.close()
    assert [kept["step"] for kept in tail.read()] == [100, 200]
    assert tail.read() == read_metrics(log.path)


def test_a_line_counts_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = json.dumps(step_record(7)).encode()
    tail = MetricsTail(path)
    for end, found in ((20, 0), (len(line), 0), (len(line) + 1, 1)):
        path.write_bytes((line + b"\n")[:end])
        assert len(tail.read()) == found
    path.write_bytes(b"garbage\n" + line + b"\n" + line.replace(b"7", b"8") + b"\n")
    assert len(MetricsTail(path).read()) == 2
    path.write_bytes(line[:9])
    assert tail.read() == [], "another run began in the same place"


def test_a_long_run_is_followed_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_KEPT", 10)
    lines = [validation_record(1, 2.0), *({"kind": "step", "stage": "gpt", "step": step} for step in range(50))]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    kept = MetricsTail(tmp_path / "metrics.jsonl").read()
    assert kept[0]["kind"] == "validation" and [line["step"] for line in kept[1:]] == list(range(40, 50))


def test_without_a_terminal_the_state_is_shown_once(tmp_path: Path) -> None:
    shown = watched(tmp_path)
    assert "Nothing is training here yet." in shown and "Waiting" not in shown
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(step_record())}\n")
    shown = watched(tmp_path)
    assert shown.count("512") == 1 and tmp_path.name in shown


def test_on_a_terminal_the_view_follows_the_run_until_it_is_told_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "PERIOD_S", 0.01)
    path, stop, file = tmp_path / "metrics.jsonl", threading.Event(), io.StringIO()
    (tmp_path / "settings.yaml").touch()
    calls = []

    def readings() -> list[dict[str, Any]]:
        calls.append(1)
        if len(calls) == 3:
            path.write_text(f"{json.dumps(step_record(clips_per_s=777.0))}\n")
        if len(calls) == 6:
            stop.set()
        return [READING]

    watch(tmp_path, stop, readings, Console(file=file, width=100, force_terminal=True))
    shown = file.getvalue()
    assert shown.index("Waiting for the first report.") < shown.index("777")
    assert "412 W" in shown and len(calls) >= 6
    assert "Ctrl-C ends this view, not the run" in shown


def test_an_interrupt_ends_the_view_quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: float) -> bool:
        raise KeyboardInterrupt

    stop = threading.Event()
    monkeypatch.setattr(stop, "wait", interrupted)
    watch(tmp_path, stop, console=Console(file=io.StringIO(), width=100, force_terminal=True))


def test_the_view_of_a_training_command_is_drawn_once_and_keeps_what_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "PERIOD_S", 0.01)
    file, begun = io.StringIO(), threading.Event()
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        with dashboard(tmp_path, lambda: begun.set() or [], Screen(file=file, force_terminal=True, height=30)):
            for number in range(3):
                begun.clear()
                assert begun.wait(10)
                print(f"line {number}")
                logging.getLogger().warning("a checkpoint was damaged")
        assert handler.stream is sys.stderr
    finally:
        logging.getLogger().removeHandler(handler)
    frames = re.split(
        r"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K){28}", file.getvalue()
    )  # 29 lines are erased, then drawn again
    frames = [re.sub(r"\x1b\[[?\d;]*[a-z]", "", frame).strip() for frame in frames]
    assert all(frame.startswith("╭") and frame.count("╭") == frame.count("╰") == 1 for frame in frames)
    _, view, below = frames[-1].rpartition("╰")
    assert "Ctrl-C finishes the step, saves and stops the run" in view + below
    said = "line 0 a checkpoint was damaged line 1 a checkpoint was damaged line 2 a checkpoint was damaged"
    assert " ".join(below.partition("╯")[2].split()).startswith(said)
