"""A training in the terminal while it runs: stages, loss, speed, rings, memory, GPUs and warnings, in one place.

`render` draws what it is given. `watch` follows the metrics of a run, from the process that trains or from another
one; without a terminal it shows the state once. Reads only files, and GPUs through whom it is given.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from myxtts.observe.history import Numbers, StageHistory, duration, number, numbers, percent, short, stages_of
from myxtts.observe.metrics import StepReport
from myxtts.observe.recorded import has_ended, is_run
from myxtts.observe.watch import WARMUP_REPORTS, warnings_of

PERIOD_S = 1.0
SILENCE_S = 60.0
"""After this long, and several times as long as reports usually take, a missing report is mentioned."""
MOST_KEPT = 4000
"""Step reports that are remembered; the drawing needs no more."""
_NO_REPORT = "Waiting for the first report."
_NO_RUN = "Nothing is training here yet."
_WAITS = " Waiting for it; Ctrl-C ends the view."
_LEVELS = "▁▂▃▄▅▆▇█"

Record = Mapping[str, Any]


def render(
    reports: Sequence[Record],
    readings: Sequence[Record] = (),
    width: int = 100,
    *,
    title: str = "",
    now: float = 0.0,
    nothing: str = _NO_REPORT,
    ended: bool = False,
) -> RenderableType:
    """The state of a run from the records of its metrics and readings of its GPUs, oldest first.

    `now` is the time of day, to tell how long nothing was reported; 0 leaves that out. `nothing` is shown while
    there is no report; `ended` is whether none can come any more.
    """
    stages = stages_of(reports)
    bar_width = min(max(width // 4, 8), 32)
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column()
    running = next((stage for stage in reversed(stages) if stage.steps), None)
    notes: list[Text] = []
    if running is None:
        rows.add_row(nothing)
    else:
        _add_training(rows, stages, running, bar_width, ended)
        notes = [Text(f"WARNING: {warning.text}", style="yellow") for warning in warnings_of(running.steps)]
        if ended:
            notes.append(Text(_end(running.steps[-1]), style="bold"))
        elif silence := _silence(reports, now):
            notes.append(Text(silence, style="red"))
    for gpu, line in _gpu_lines(readings, bar_width):
        rows.add_row(Text(gpu), line)
    return Panel(Group(rows, *notes), title=Text(title) if title else None, title_align="left", width=width)


def watch(
    folder: Path,
    stop: threading.Event,
    readings: Callable[[], Sequence[Record]] = tuple,
    console: Console | None = None,
) -> None:
    """Show a run until told to stop, or interrupted; where there is no terminal, once.

    `readings` gives those of the GPUs at the time of the call, as `nvml` gives them to JSON.
    """
    console = console or Console(highlight=False)
    tail = MetricsTail(folder / "metrics.jsonl")

    def drawn() -> RenderableType:
        ended = has_ended(folder)  # before the reports are read: the last one may come in between
        no_run = _NO_RUN + (_WAITS if console.is_terminal else "")
        return render(
            tail.read(),
            readings(),
            console.width,
            title=folder.resolve().name,
            now=time.time(),
            nothing=_NO_REPORT if is_run(folder) else no_run,
            ended=ended,
        )

    if not console.is_terminal:
        console.print(drawn())
        return
    with contextlib.suppress(KeyboardInterrupt), Live(drawn(), console=console, auto_refresh=False) as live:
        while not stop.wait(PERIOD_S):
            live.update(drawn(), refresh=True)
        live.update(drawn(), refresh=True)


class MetricsTail:
    """The reports of a run that hold, as `read_metrics` says; reads only what was added since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._records: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """The records so far: all validations, and the latest step reports."""
        try:
            with open(self._path, "rb") as file:
                if file.seek(0, 2) < self._offset:  # another run has begun in the same place
                    self._offset, self._records = 0, []
                file.seek(self._offset)
                added = file.read()
        except OSError:  # not there yet, or just being moved away
            return self._records
        whole = added[: added.rfind(b"\n") + 1]  # the rest is still being written
        self._offset += len(whole)
        for line in whole.splitlines():
            self._add(line)
        if len(self._records) > 2 * MOST_KEPT:
            old, recent = self._records[:-MOST_KEPT], self._records[-MOST_KEPT:]
            self._records = [record for record in old if record["kind"] == "validation"] + recent
        return self._records

    def _add(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            kind, stage, step = record["kind"], record["stage"], record["step"]
        except (ValueError, KeyError, TypeError):
            return
        if kind == "begin":
            self._records = [kept for kept in self._records if kept["stage"] != stage or kept["step"] <= step]
        else:
            self._records.append(record)


def _add_training(
    rows: Table, stages: Sequence[StageHistory], running: StageHistory, bar_width: int, ended: bool
) -> None:
    last = running.steps[-1]
    progress = _progress(last, ended)
    rows.add_row("stages", _stages(stages, running))
    if last.total_steps:
        done = last.step / last.total_steps
        rows.add_row("progress", Text.assemble(_bar(done, bar_width), f" {100 * done:.0f} %  {progress}"))
    else:
        rows.add_row("progress", Text(f"step {last.step:,}  {progress}"))
    rows.add_row("loss", _curve(running.column("losses.total"), bar_width, _losses(last), "cyan"))
    if running.validations:
        (at, loss), best = running.validations[-1], running.best_validation
        best_text = f", best {short(best[1])} at step {best[0]:,}" if best else ""
        rows.add_row("validation", f"{short(loss)} at step {at:,}{best_text}")
    rows.add_row("clips/s", _curve(_warm(running, "clips_per_s"), bar_width, short(last.clips_per_s), "green"))
    varies = f"{short(last.step_ms)} ms  varies {percent(last.step_cv)}  model waits {percent(last.idle_share)}"
    rows.add_row("step time", _curve(_warm(running, "step_ms"), bar_width, varies, "green"))
    for name, (ready, depth) in last.rings.items():
        bar, style = _bar(ready / depth if depth else math.nan, bar_width)
        about = ("ready", style) if name != "keep" else ("to be kept", "blue")  # empty is good there
        rows.add_row(Text(f"ring {name}"), Text.assemble((bar, about[1]), f" {ready}/{depth} {about[0]}"))
    if last.memory_mb:
        used = "  ".join(f"{role} {short(mb / 1024)} GB" for role, mb in last.memory_mb.items())
        rows.add_row("memory", Text(used))
    if last.skipped:
        rows.add_row("skipped", Text(f"{last.skipped:,} steps whose gradients were not finite", style="yellow"))


def _stages(stages: Sequence[StageHistory], running: StageHistory) -> Text:
    parts = []
    for stage in stages:
        step = stage.steps[-1] if stage.steps else None
        count = f"{step.step:,}" + (f"/{step.total_steps:,}" if step.total_steps else "") if step else ""
        parts.append((f"{stage.name} {count}", "bold" if stage is running else "dim"))
    return Text("  ").join(Text(text, style=style) for text, style in parts)


def _progress(report: StepReport, ended: bool) -> str:
    if ended:
        return f"epoch {report.epoch}  ended after {duration(report.elapsed_s)}"
    left = f"  ETA {duration(report.eta_s)}" if report.eta_s is not None else ""
    return f"epoch {report.epoch}  running {duration(report.elapsed_s)}{left}"


def _losses(report: StepReport) -> str:
    others = "  ".join(f"{name} {short(loss)}" for name, loss in report.losses.items() if name != "total")
    return f"{short(report.losses.get('total'))}  {others}".rstrip()


def _gpu_lines(readings: Sequence[Record], bar_width: int) -> list[tuple[str, Text]]:
    gpus = sorted({str(reading.get("gpu", "?")) for reading in readings})
    lines = []
    for gpu in gpus:
        history = [reading for reading in readings if str(reading.get("gpu", "?")) == gpu]
        last = history[-1]
        use = number(last.get("utilisation"))
        used_gb, total_gb = (number(last.get(f"memory_{part}_mb")) / 1024 for part in ("used", "total"))
        facts = [f"{percent(use)}", f"{short(used_gb)}/{short(total_gb)} GB" if math.isfinite(used_gb) else ""]
        for name, unit in (("power_w", " W"), ("temperature_c", " °C"), ("sm_clock_mhz", " MHz")):
            facts.append(short(number(last.get(name)), unit) if math.isfinite(number(last.get(name))) else "")
        for name, way in (("pcie_rx_mb_s", "PCIe in"), ("pcie_tx_mb_s", "out")):
            rates = numbers(reading.get(name) for reading in history)  # they are read more seldom than the rest
            if np.isfinite(rates).any():
                facts.append(f"{way} {short(float(rates[np.isfinite(rates)][-1]))} MB/s")
        line = Text.assemble(_bar(use, bar_width), " " + "  ".join(fact for fact in facts if fact))
        if reasons := last.get("throttled_by"):
            line.append(f"  throttled: {', '.join(map(str, reasons))}", style="yellow")
        lines.append((f"GPU {gpu}", line))
    return lines


def _end(last: StepReport) -> str:
    of_total = f" of {last.total_steps:,}" if last.total_steps else ""
    return f"The training has ended: its last report is of step {last.step:,}{of_total} of the stage {last.stage}."


def _silence(reports: Sequence[Record], now: float) -> str:
    """What to say when nothing was reported for much longer than usual; "" otherwise, or when all is done."""
    times = numbers(record.get("written_at") for record in reports)
    times = times[np.isfinite(times)]
    last_step = next(record for record in reversed(reports) if record.get("kind") == "step")
    if not now or not len(times) or last_step.get("step") == last_step.get("total_steps"):
        return ""
    usual_s = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    silent_s = now - float(times[-1])
    if silent_s < max(SILENCE_S, 5 * usual_s):
        return ""
    return f"Nothing was reported for {duration(silent_s)}: the training is paused, busy saving, or has ended."


def _warm(stage: StageHistory, name: str) -> Numbers:
    """One number of the reports behind the first ones, whose compiling would press all others flat."""
    values = stage.column(name)
    return values[WARMUP_REPORTS:] if len(values) > 2 * WARMUP_REPORTS else values


def _curve(values: Numbers, width: int, text: str, style: str) -> Text:
    return Text.assemble((sparkline(values, width).ljust(width), style), f" {text}")


def sparkline(values: Numbers, width: int) -> str:
    """A curve in one line of text, from its lowest to its highest; a blank where nothing is known."""
    groups = np.array_split(values, min(width, len(values))) if len(values) else []
    means = numbers(float(np.nanmean(group)) if np.isfinite(group).any() else math.nan for group in groups)
    if not np.isfinite(means).any():
        return ""
    low, high = float(np.nanmin(means)), float(np.nanmax(means))
    scaled = (means - low) / ((high - low) or 1.0) * (len(_LEVELS) - 1)
    return "".join(_LEVELS[round(level)] if math.isfinite(level) else " " for level in scaled.tolist())


def _bar(share: float, width: int) -> tuple[str, str]:
    """A bar filled to a share, and its style."""
    if not math.isfinite(share):
        return " " * width, ""
    filled = round(width * min(max(share, 0.0), 1.0))
    return "█" * filled + "░" * (width - filled), "green" if share > 0 else "red"
