"""What the terminal shows: a corpus while it is prepared and when it is ready, and a training while it runs.

Draws what it is given; knows neither how a corpus is made nor how a number was measured.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TextIO

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from myxtts.config import LANGUAGE_NAMES, LANGUAGES, SAMPLE_RATE
from myxtts.data.clips import ClipSet, Prepared, set_aside_list
from myxtts.observe.metrics import StepReport, ValidationReport
from myxtts.observe.watch import Warning

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


def show_corpus(prepared: Prepared) -> None:
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
