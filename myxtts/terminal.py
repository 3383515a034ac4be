"""What the terminal shows of a profile, of the data side and of a tuning. Draws what it is given."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from myxtts.config import LANGUAGE_NAMES, LANGUAGES, SAMPLE_RATE
from myxtts.data.clips import ClipSet, PreparedCorpus, set_aside_list
from myxtts.observe.findings import WARMUP_REPORTS, Finding, Warning, warnings_of
from myxtts.observe.metrics import (
    Numbers,
    StageHistory,
    StepReport,
    ValidationReport,
    duration,
    has_ended,
    is_run,
    number,
    numbers,
    percent,
    short,
    stages_of,
)
from myxtts.settings import format_setting

if TYPE_CHECKING:  # these import PyTorch, which `myxtts prepare` does without
    from myxtts.tools.dry_run import KernelView
    from myxtts.tools.profile import DataAnalysis, Profile, Timing
    from myxtts.tools.tune import Tuning

_STYLES = {"pass": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}
_UNLIMITED = 100_000
"""Columns of a file or a pipe: whoever searches the output must find sentences in one piece."""


def show_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Print findings with their reasons and fixes; the last line says whether nothing fails."""
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else _UNLIMITED)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        level = Text(finding.level.upper(), style=_STYLES[finding.level])
        table.add_row(level, Text(finding.code, no_wrap=True), _told(finding))
    console.print(table)
    counts = Counter(finding.level for finding in findings)
    warnings = "1 warning" if counts["warn"] == 1 else f"{counts['warn']} warnings"
    if counts["fail"]:
        failed = ", ".join(finding.code for finding in findings if finding.level == "fail")
        console.print(Text(f"{counts['fail']} failed, {warnings}, {counts['pass']} passed"))
        console.print(Text(f"CHECKS FAILED: {failed}", style=_STYLES["fail"]))
    else:
        console.print(Text(f"All validation checks passed: {counts['pass']} passed, {warnings}"))
        console.print(Text("ALL CHECKS PASSED", style="bold green"))


def _told(finding: Finding) -> Text:
    """What was found, why that is so, and what to do, in lines below each other."""
    told = Text(finding.what)
    if finding.why:
        told.append(f"\n{finding.why}", style="dim")
    if finding.fix:
        gain = f" (about {finding.gain:.2g} times as fast)" if finding.gain else ""
        told.append(f"\n→ {finding.fix}{gain}")
    return told


_LENGTH_STEP_SECONDS = 2
_BAR_WIDTH = 30

_log = logging.getLogger(__name__)


class ProgressLines:
    """A bar on a terminal; elsewhere a plain line now and then, so that logs stay readable."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._title = ""
        self._total = self._done = 0
        self._line_due_at = 0.0

    def begin(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._line_due_at = time.monotonic() + 2.0
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._bar.add_task(title, total=total)

    def advance(self, count: int) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], count)
        elif time.monotonic() >= self._line_due_at:
            self._line_due_at = time.monotonic() + 10.0
            print(f"{self._title}: {self._done} of {self._total}", file=sys.stderr)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class ProgressPrinter:
    """A line for every report of a training, and on a terminal one more below them that keeps moving.

    A context manager, for one thread. Only the first process of a group (`rank` 0) shows anything.
    """

    def __init__(self, rank: int = 0, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._is_silent = rank != 0
        self._live: Live | None = None
        self._stderr = sys.stderr
        self._moved_handlers: list[logging.StreamHandler[TextIO]] = []
        self._title = ""
        self._step = 0
        self._total_steps: int | None = None
        self._report: StepReport | None = None
        self._reported_at = 0.0

    def begin(self, stage: str, step: int, total_steps: int | None) -> None:
        """Show that a stage goes on behind `step`."""
        self.end()
        self._title, self._step, self._total_steps, self._report = stage, step, total_steps, None
        if self._console.is_terminal and not self._is_silent:
            self._live = Live(
                console=self._console,
                get_renderable=self._moving_line,
                transient=True,
                redirect_stderr=self._stderr.isatty(),
            )
            self._live.start(refresh=True)
            self._move_handlers()

    def tick(self, step: int) -> None:
        """Count a step on the moving line; costs nothing else."""
        self._step = step

    def report(self, report: StepReport) -> None:
        """Show the state of the training."""
        self._report, self._step, self._reported_at = report, report.step, time.monotonic()
        self._print(progress_line(report))

    def validation(self, report: ValidationReport) -> None:
        """Show what a validation found."""
        self._print(validation_line(report))

    def warn(self, warnings: Iterable[Warning]) -> None:
        """Show warnings, each with its cause and what to do."""
        for warning in warnings:
            self._print(f"WARNING: {warning.text}", style="yellow")

    def end(self) -> None:
        """Remove the moving line; what has been reported stays."""
        for handler in self._moved_handlers:
            handler.setStream(self._stderr)
        self._moved_handlers.clear()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> ProgressPrinter:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _print(self, line: str, style: str | None = None) -> None:
        if self._is_silent:
            return
        try:
            self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
        except OSError as error:  # the file that the output goes to: a full disk must not end a training
            self._is_silent = True
            with contextlib.suppress(OSError):
                self.end()
            _log.warning("No more progress is shown: %s", error)

    def _moving_line(self) -> Text:
        """The last report with the steps and the time since; drawn by rich's own thread."""
        line = f"{self._title}: step {_of(self._step, self._total_steps)}"
        if (last := self._report) is not None:
            left_s = None if last.eta_s is None else last.eta_s - (time.monotonic() - self._reported_at)
            line = progress_line(replace(last, step=self._step, eta_s=left_s))
        return Text(line, no_wrap=True, overflow="ellipsis", style="bold")

    def _move_handlers(self) -> None:
        """Let log messages appear above the moving line instead of in it."""
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is self._stderr:
                handler.setStream(sys.stderr)
                self._moved_handlers.append(handler)


def progress_line(report: StepReport) -> str:
    """A report in one line."""
    num_slots = sum(depth for name, (_, depth) in report.rings.items() if name != "keep")
    memory = [(role, used / 1024) for role, used in report.memory_mb.items()]
    parts = [
        f"step {_of(report.step, report.total_steps)}",
        _losses(report.losses),
        f"{report.clips_per_s:.{0 if report.clips_per_s >= 10 else 1}f} clips/s",
        f"{report.step_ms:.1f} ms",
        f"idle {100 * report.idle_share:.1f} %",
        f"ahead {_of(report.ahead, num_slots or None)}",
        *(f"{role} {used_gb:.1f} GB" if len(memory) > 1 else f"{used_gb:.1f} GB" for role, used_gb in memory),
        f"lr {report.lr:.1e}",
        *([f"skipped {report.skipped}"] if report.skipped else []),
        *([f"ETA {_clock(report.eta_s)}"] if report.eta_s is not None else []),
    ]
    return "  ".join(parts)


def validation_line(report: ValidationReport) -> str:
    """A validation in one line."""
    best = "  the best so far" if report.is_best else ""
    return f"validation at step {report.step}  {_losses(report.losses)}{best}"


def show_lines(lines: Iterable[str]) -> None:
    """Print lines as they are, at once."""
    for line in lines:
        print(line, flush=True)


def show_corpus(prepared: PreparedCorpus) -> None:
    """Print what a corpus holds, and what was set aside by reason."""
    console = Console(highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for split, clips in (("training", prepared.train), ("validation", prepared.val)):
        table.add_row(f"{split} clips", f"{len(clips)}", _duration(clips))
    both = (prepared.train, prepared.val)
    speakers = Counter(number for clips in both for number in clips.speakers.tolist())
    languages = Counter(number for clips in both for number in clips.languages.tolist())
    named = ", ".join(
        f"{escape(prepared.speaker_names[number] or 'unnamed')} {count}"
        for number, count in speakers.most_common(8)
    )
    table.add_row("speakers", str(len(speakers)), named + (", …" if len(speakers) > 8 else ""))
    spoken = (f"{LANGUAGE_NAMES[LANGUAGES[number]]} {count}" for number, count in languages.most_common())
    table.add_row("languages", str(len(languages)), ", ".join(spoken))
    table.add_row("vocabulary", str(prepared.tokenizer.num_tokens), "tokens")
    table.add_row("set aside", str(len(prepared.set_aside)), "clips")
    for reason, count in Counter(item.reason for item in prepared.set_aside).most_common():
        table.add_row("", str(count), f"{reason}")
    console.print(table)
    console.print(_length_table(np.concatenate([clips.num_samples for clips in both]) / SAMPLE_RATE))
    if prepared.set_aside:
        console.print(
            f"Each clip set aside is listed in {escape(str(set_aside_list(prepared.root)))}", soft_wrap=True
        )
    console.print(f"Ready: cache in {escape(str(prepared.root))}", soft_wrap=True)


def _duration(clips: ClipSet) -> str:
    minutes = float(clips.num_samples.sum()) / SAMPLE_RATE / 60
    return f"{minutes:.1f} minutes" if minutes < 60 else f"{minutes / 60:.2f} hours"


def _length_table(seconds: np.typing.NDArray[np.float64]) -> Table:
    edges = np.arange(0, seconds.max() + _LENGTH_STEP_SECONDS, _LENGTH_STEP_SECONDS)
    counts, _ = np.histogram(seconds, bins=edges)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for start, count in zip(edges, counts, strict=False):
        bar = "█" * round(_BAR_WIDTH * count / counts.max())
        table.add_row(f"{start:.0f}–{start + _LENGTH_STEP_SECONDS:.0f} s", str(count), bar)
    return table


def _losses(losses: Mapping[str, float]) -> str:
    """The one that counts, and in brackets what else there is."""
    others = [f"{name.removesuffix('_loss')} {_short(loss)}" for name, loss in losses.items() if name != "total"]
    total = [f"loss {losses['total']:.3f}"] if "total" in losses else []
    return " ".join(total + ([f"({' '.join(others)})"] if others else []))


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _of(count: int, total: int | None) -> str:
    return f"{count}" if total is None else f"{count}/{total}"


def _clock(seconds: float) -> str:
    """12:34, 5:12:34 or 2 d 5:12:34."""
    minutes, whole_seconds = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if not days and not hours:
        return f"{minutes}:{whole_seconds:02d}"
    return (f"{days} d " if days else "") + f"{hours}:{minutes:02d}:{whole_seconds:02d}"


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
    rows.add_row("loss", _curve(running.column("losses.total"), bar_width, _loss_row(last), "cyan"))
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


def _loss_row(report: StepReport) -> str:
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


_WIDE = 200
"""Columns of a file or a pipe."""
_NAME_WIDTH = 60
_NUMBERS = {"mean", "p95", "busy", "calls", "ms", "share", "std", "CV", "longest", "gain"}
"""First words of the headings of columns of numbers."""


def show_profile(profile: Profile, console: Console | None = None) -> None:
    """The verdict first, then what it rests on, then what to change."""
    console = console or _console()
    verdict = profile.verdict
    if verdict is not None:
        console.print(Text(verdict.sentence, style="bold"))
        grade = f"Grade: {verdict.grade}" if verdict.grade else ""
        console.print(Text("  ".join(filter(None, [_speed(profile), grade]))))
        for note in [*profile.notes, *verdict.grade_notes]:
            console.print(Text(f"({note})", style="dim"))
        console.print(_stage_table(profile))
        shares = "  ".join(f"{name} {100 * share:.0f} %" for name, share in verdict.shares.items())
        console.print(Text(f"Of the step: {shares}"))
        for name, ring in verdict.rings.items():
            if name == "keep":  # behind the model: empty is what it should be
                continue
            depth = f" of {ring.depth}" if ring.depth else ""
            empty = f", empty {100 * ring.empty_share:.0f} % of the time" if ring.empty_share else ""
            console.print(Text(f"Ring {name}: {ring.mean_ready:.1f}{depth} ready{empty}"))
        _show_gpus(profile, console)
    if profile.kernels is not None:
        console.print(_kernel_table(profile.kernels))
    if profile.data is not None:
        _show_data(profile.data, console)
    _show_findings(profile.findings, console)


def show_tuning(tuning: Tuning, console: Console | None = None) -> None:
    """The settings to change with what each was measured to bring, as a patch of the YAML file."""
    console = console or _console()
    if not tuning.changes:
        tried = "no setting that was tried is faster" if tuning.num_trials > 1 else "nothing else was tried"
        console.print(Text(f"Nothing to change: {tried}.", style="bold"))
    else:
        table = _table("setting", "now", "better", "gain", "why")
        for change in tuning.changes:
            gain = f"{change.gain_measured:.2f}×" if change.gain_measured is not None else ""
            old, new = (format_setting(change.setting, value) for value in (change.old, change.new))
            table.add_row(change.setting, old, new, gain, Text(change.why))
        console.print(table)
    if tuning.after is not None:
        before = f"{tuning.before.clips_per_s:.1f}" if tuning.before else "none (it could not be trained)"
        gain = f", {tuning.gain:.2f}×" if tuning.gain is not None else ""
        trials = f"{tuning.num_trials} trial{'' if tuning.num_trials == 1 else 's'}"
        spent = f"{trials}, {tuning.minutes:.1f} minutes"
        console.print(Text(f"Clips per second: {before} → {tuning.after.clips_per_s:.1f}{gain} ({spent})"))
    if tuning.largest_batch is not None:
        console.print(Text(f"The largest batch that fits: {tuning.largest_batch} clips"))
    for note in tuning.notes:
        console.print(Text(f"({note})", style="dim"))
    _show_findings(tuning.advice, console)
    if tuning.changes:
        console.print(Text("\nThe patch for the YAML file (--apply writes it and keeps a backup):", style="bold"))
        for line in patch_lines(tuning):
            console.print(Text(line))


def patch_lines(tuning: Tuning) -> list[str]:
    """The changed settings as they stand in the YAML file."""
    sections: dict[str, list[str]] = {}
    for key, value in tuning.values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"  {name}: {format_setting(key, value)}")
    return [line for section, lines in sections.items() for line in (f"{section}:", *lines)]


def _speed(profile: Profile) -> str:
    parts = [f"Stage {profile.stage} on {profile.device}: {profile.clips_per_s or 0:.1f} clips/s"]
    if profile.first_epoch_clips_per_s is not None:
        parts.append(f"{profile.first_epoch_clips_per_s:.1f} in the first epoch")
    parts.append(f"batches of {profile.batch_size}, {profile.num_steps} steps")
    parts += [f"{used / 1024:.1f} GB ({role})" for role, used in profile.memory_mb.items()]
    return ", ".join(parts)


def _stage_table(profile: Profile) -> Table:
    table = _table("stage", "where", "mean ms", "p95 ms", "busy", "")
    for row in profile.rows:
        times = (f"{row.mean_ms:.2f}", f"{row.p95_ms:.2f}", f"{100 * row.share:.0f} %")
        table.add_row(row.phase, row.where, *times, Text(row.note, style="dim"))
    return table


def _show_gpus(profile: Profile, console: Console) -> None:
    for use in profile.gpus:
        parts = [f"GPU {use.gpu} ({use.role})"]
        parts += [f"{100 * use.utilisation:.0f} % utilised"] if use.utilisation is not None else []
        if use.memory_used_mb is not None and use.memory_total_mb is not None:
            parts.append(f"{use.memory_used_mb / 1024:.1f} of {use.memory_total_mb / 1024:.0f} GB")
        parts += [f"{use.power_w:.0f} W"] if use.power_w is not None else []
        parts += [f"{use.temperature_c:.0f} °C"] if use.temperature_c is not None else []
        console.print(Text("  ".join(parts)))


def _kernel_table(view: KernelView) -> Table:
    table = _table("kernel", "calls a step", "ms a step", "share")
    for kernel in view.kernels:
        name = kernel.name if len(kernel.name) <= _NAME_WIDTH else f"{kernel.name[: _NAME_WIDTH - 1]}…"
        calls, taken = f"{kernel.calls_per_step:.1f}", f"{kernel.ms_per_step:.3f}"
        table.add_row(Text(name), calls, taken, f"{100 * kernel.share:.1f} %")
    return table


def _show_data(data: DataAnalysis, console: Console) -> None:
    text, audio, feed = data.text, data.audio, data.feed
    table = _table("", "mean ms", "std ms", "CV", "longest ms")
    table.add_row(Text("1 Text preprocessing, per sentence", style="bold"))
    table.add_row("  normalise", *_cells(text.normalize))
    table.add_row("  tokenise", *_cells(text.tokenize))
    if text.detect_ms is not None:
        table.add_row("  detect the language", f"{text.detect_ms:.3f}")
    table.add_row("  in all", f"{text.sample_ms:.3f}")
    table.add_row(Text("2 Audio loading", style="bold"))
    table.add_row("  decode a file", *_cells(audio.decode))
    table.add_row(f"  gather a batch of {audio.batch_size}", *_cells(audio.gather))
    table.add_row(Text("3 Pipeline efficiency, per batch", style="bold"))
    table.add_row("  host, all threads", *_cells(feed.host))
    table.add_row("  feed, first epoch", *_cells(feed.first_epoch))
    table.add_row("  feed, later epochs", *_cells(feed.feed))
    table.add_row(f"  step ({'given' if feed.step_is_given else 'measured'})", f"{feed.step_ms:.3f}")
    table.add_row("  wait", f"{feed.wait_ms:.3f}")
    console.print(table)
    console.print(Text(f"Estimated GPU idle: {100 * feed.idle_share:.0f} %"))
    if not feed.on_gpu and not feed.step_is_given:
        hint = "the step was measured on this CPU; --step-ms says how long one takes on your GPU"
        console.print(Text(f"({hint})", style="dim"))


def _cells(timing: Timing) -> tuple[str, str, str, str]:
    longest = f"{timing.longest_ms:.3f}"
    return f"{timing.mean_ms:.3f}", f"{timing.std_ms:.3f}", f"{100 * timing.cv:.0f} %", longest


def _show_findings(findings: Sequence[Finding], console: Console) -> None:
    for finding in findings:
        line = Text(f"{finding.level.upper():5}", style=_STYLES[finding.level])
        line.append(f" {finding.what}", style="default")
        line.append(f" {finding.why}" if finding.why else "", style="dim")
        console.print(line)
        fix = finding.fix
        if finding.setting:
            fix += (
                f" ({finding.setting}: {format_setting(finding.setting, finding.value)})"
                if finding.value is not None
                else ""
            )
        gain = f" Expected: {finding.gain:.2f}×." if finding.gain is not None and finding.level != "pass" else ""
        if fix or gain:
            console.print(Text(f"      → {fix}{gain}"))


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        is_number = heading.split(" ")[0] in _NUMBERS
        table.add_column(heading, justify="right" if is_number else "left")
    return table


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
