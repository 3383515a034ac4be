"""Everything drawn on a terminal: progress, corpora, findings, profiles, tunings, scores and the live view."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from myxtts.config import LANGUAGE_NAMES, LANGUAGES, SAMPLE_RATE
from myxtts.data.clips import LIMITS, NO_SPEAKERS, ClipSet, PreparedCorpus, Share, set_aside_list
from myxtts.data.store import Rows
from myxtts.errors import printable
from myxtts.files import has_ended
from myxtts.observe.diagnosis import WARMUP_REPORTS, Warning, warnings_of
from myxtts.observe.findings import Finding
from myxtts.observe.metrics import (
    MetricsTail,
    Numbers,
    Record,
    StageHistory,
    StepReport,
    ValidationReport,
    duration,
    is_run,
    number,
    numbers,
    percent,
    short,
    stages_of,
)
from myxtts.settings import format_setting, patched

if TYPE_CHECKING:  # these import PyTorch, which `myxtts prepare` does without
    from myxtts.collect.catalog import Taken
    from myxtts.collect.collect import Outcome
    from myxtts.observe.trace import Timing
    from myxtts.run_dir import RunSummary
    from myxtts.tools.profile import DataAnalysis, GpuUse, Profile
    from myxtts.tools.tune import Tuning

PERIOD_S = 1.0  # time between two pictures of the live view
SILENCE_S = 60.0  # missing reports are mentioned after this long, and five times as long as they usually take
LINE_WIDTH = 100  # most columns of a progress line
_FILE_WIDTH = 100_000  # columns of a file or pipe: a sentence on one line can be searched for
_NAME_WIDTH = 60
_LENGTH_STEP_S, _BAR_WIDTH, _MOST_SHARES = 2, 30, 5
_STYLES = {"fail": "bold red", "warn": "yellow", "skip": "magenta", "info": "cyan", "pass": "green"}
_LEVELS = " ▁▂▃▄▅▆▇█"
_MOST_SAID = 6  # lines of the output that the live view repeats
_GPU_FACTS = (
    ("power_w", "", " W"), ("temperature_c", "", " °C"), ("sm_clock_mhz", "", " MHz"),
    ("pcie_rx_mb_s", "PCIe in ", " MB/s"), ("pcie_tx_mb_s", "out ", " MB/s"),
)  # fmt: skip
_NO_REPORT = "Waiting for the first report."
_NO_RUN = "Nothing is training here yet."
_ENDS_VIEW = "Ctrl-C ends this view, not the run"
_ENDS_RUN = "Ctrl-C finishes the step, saves and stops the run"

_log = logging.getLogger(__name__)


class Screen(Console):
    """A console that keeps text from files from changing the terminal (`printable`); styles are its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def show_lines(lines: Iterable[object], columns: int | None = None) -> None:
    """Print lines, wrapped by a terminal, elsewhere at `columns`; never those that begin with a space."""
    for line in map(str, lines):
        screen, is_to_be_copied = Screen(), line.startswith(" ")
        if screen.is_terminal and not is_to_be_copied:
            screen.print(Text(line))
            continue
        for part in [line] if is_to_be_copied or columns is None else textwrap.wrap(line, columns):
            print(printable(part), flush=True)


class ProgressLines:
    """A progress bar on a terminal; elsewhere a plain line now and then, so that logs stay readable."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._title = ""
        self._total = self._done = 0
        self._line_due_at = self._began_at = 0.0
        self._done_before = 0

    def begin(self, title: str, total: int) -> None:
        self._title, self._total, self._done, self._done_before = title, total, 0, 0
        self._began_at = time.monotonic()
        self._line_due_at = self._began_at + 2.0
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Screen(stderr=True), transient=True)
            self._bar.start()
            self._bar.add_task(title, total=total)

    def advance(self, count: int) -> None:
        if self._done == 0 and time.monotonic() < self._began_at + 0.1:  # the work of an earlier call
            self._done_before = count
        self._done += count
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], count)
        elif time.monotonic() >= self._line_due_at:
            self._line_due_at = time.monotonic() + 10.0
            line = f"{printable(self._title)}: {self._done} of {self._total}{self._left()}"
            print(line, file=sys.stderr, flush=True)

    def _left(self) -> str:
        """The time left at the speed so far, not counting what was done before."""
        new, seconds = self._done - self._done_before, time.monotonic() - self._began_at
        return f", {_clock(seconds / new * (self._total - self._done))} left" if new > 0 else ""

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class ProgressPrinter:
    """A context manager that prints a line per report, and on a terminal a live line of steps; for one thread."""

    def __init__(self, *, is_silent: bool = False, console: Console | None = None) -> None:
        self._console = console or Screen()
        self._is_silent = is_silent
        self._live: Live | None = None
        self._stderr = sys.stderr
        self._moved_handlers: list[logging.StreamHandler[TextIO]] = []
        self._title = ""
        self._step = 0
        self._total_steps: int | None = None
        self._report: StepReport | None = None
        self._reported_at = 0.0

    def begin(self, stage: str, step: int, total_steps: int | None) -> None:
        self.end()
        self._title, self._step, self._total_steps, self._report = stage, step, total_steps, None
        if not self._console.is_terminal or self._is_silent:
            return
        tty = self._stderr.isatty()
        self._live = Live(
            console=self._console, get_renderable=self._live_line, transient=True, redirect_stderr=tty
        )
        self._live.start(refresh=True)
        for handler in logging.getLogger().handlers:  # so that messages appear above the live line, not in it
            if isinstance(handler, logging.StreamHandler) and handler.stream is self._stderr:
                handler.setStream(sys.stderr)
                self._moved_handlers.append(handler)

    def tick(self, step: int) -> None:
        self._step = step

    def report(self, report: StepReport) -> None:
        self._report, self._step, self._reported_at = report, report.step, time.monotonic()
        self._print(progress_line(report, self._width))

    def validation(self, report: ValidationReport) -> None:
        self._print(validation_line(report, self._width))

    def say(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._print(line)

    def warn(self, warnings: Iterable[Warning]) -> None:
        for warning in warnings:
            self._print(f"WARNING: {warning.text}", style="yellow")

    def end(self) -> None:
        """Remove the live line; the reports stay."""
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
        in_one_piece = not self._console.is_terminal  # a terminal wraps between words instead
        try:
            self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=in_one_piece)
        except OSError as error:  # the output goes to a file: a full disk must not end a run
            self._is_silent = True
            with contextlib.suppress(OSError):
                self.end()
            _log.warning("No more progress is shown: %s", error)

    @property
    def _width(self) -> int:
        return min(self._console.width, LINE_WIDTH) if self._console.is_terminal else LINE_WIDTH

    def _live_line(self) -> Text:
        """Return the last report with the current step and time left; called on rich's own thread."""
        line = f"{self._title}: step {_of(self._step, self._total_steps)}"
        if (last := self._report) is not None:
            left_s = None if last.eta_s is None else last.eta_s - (time.monotonic() - self._reported_at)
            line = progress_line(replace(last, step=self._step, eta_s=left_s), self._width)
        return Text(line, no_wrap=True, overflow="ellipsis", style="bold")


def progress_line(report: StepReport, width: int = LINE_WIDTH) -> str:
    """Return a line of at most this many columns: what matters most of a report, as far as it fits."""
    num_slots = sum(depth for name, (_, depth) in report.rings.items() if name != "keep")
    memory = [(role, used / 1024) for role, used in report.memory_mb.items()]
    total, others = _losses(report.losses)
    parts = [
        (0, f"step {_of(report.step, report.total_steps)}"),
        (1, total),
        (7, others),
        (3, f"{report.clips_per_s:.{0 if report.clips_per_s >= 10 else 1}f} clips/s"),
        (8, f"{report.step_ms:.1f} ms"),
        (4, f"idle {percent(report.idle_share)}"),
        (9, f"mfu {percent(report.mfu, 0)}" if report.mfu is not None else ""),
        (6, f"ahead {_of(report.ahead, num_slots or None)}"),
        *((8, f"{role} {gb:.1f} GB" if len(memory) > 1 else f"{gb:.1f} GB") for role, gb in memory),
        (10, f"lr {report.lr:.1e}"),
        (2, f"skipped {report.skipped}" if report.skipped else ""),
        (5, f"ETA {_clock(report.eta_s)}" if report.eta_s is not None else ""),
    ]
    return _fitted(parts, width)


def _fitted(parts: Sequence[tuple[int, str]], width: int) -> str:
    """Return the parts, each with its rank, in this order; those of high rank are left out if they do not fit."""
    left, kept = width + 2, set()
    for place, (_, text) in sorted(enumerate(parts), key=lambda part: part[1][0]):
        if text and len(text) + 2 <= left:
            left -= len(text) + 2
            kept.add(place)
    return "  ".join(text for place, (_, text) in enumerate(parts) if place in kept).replace("  (", " (")


def validation_line(report: ValidationReport, width: int = LINE_WIDTH) -> str:
    total, others = _losses(report.losses)
    best = "the best so far" if report.is_best else ""
    return _fitted([(0, f"validation at step {report.step}"), (1, total), (3, others), (2, best)], width)


def _losses(losses: Mapping[str, float]) -> tuple[str, str]:
    """Return the total loss and its parts, as a line shows them; "" for what there is not."""
    others = [f"{name.removesuffix('_loss')} {short(loss)}" for name, loss in losses.items() if name != "total"]
    total = f"loss {losses['total']:.3f}" if "total" in losses else ""
    return total, f"({' '.join(others)})" if others else ""


def _of(count: int, total: int | None) -> str:
    return f"{count}" if total is None else f"{count}/{total}"


def _clock(seconds: float) -> str:
    """Return 12:34, 5:12:34 or 2 d 5:12:34."""
    whole = timedelta(seconds=max(round(seconds), 0))
    hours, minutes = divmod(whole.seconds // 60, 60)
    clock = f"{hours}:{minutes:02d}:" if whole.days or hours else f"{minutes}:"
    return (f"{whole.days} d " if whole.days else "") + f"{clock}{whole.seconds % 60:02d}"


def show_corpus(prepared: PreparedCorpus, *, brief: bool = False, made: str | None = None) -> None:
    """Print what a corpus holds, what was set aside, and where it was `made`; `brief` is a line of each."""
    both = (prepared.train, prepared.val)
    speakers = _counted(prepared.speaker_names, np.concatenate([clips.speakers for clips in both]))
    languages = _counted(LANGUAGES, np.concatenate([clips.languages for clips in both]))
    spoken = ", ".join(f"{LANGUAGE_NAMES[code]} {count}" for code, count in languages.most_common())
    see = {reason: f"{reason} (see {flag})" for reason, flag in LIMITS.items()}
    counted = Counter(item.reason for item in prepared.set_aside).most_common()
    reasons = [(count, see.get(reason, reason)) for reason, count in counted]
    if brief:
        clips = f"{len(prepared.train)} training clips ({_duration(prepared.train)})"
        people = "1 speaker" if len(speakers) == 1 else f"{len(speakers)} speakers"
        people = people if any(speakers) else "speakers not named"
        facts = [clips, f"{len(prepared.val)} for validation", people, spoken]
        lines = [f"Corpus: {'; '.join(facts)}; {prepared.tokenizer.num_tokens} tokens"]
        lines += [f"Set aside: {', '.join(f'{count} {reason}' for count, reason in reasons)}"] if reasons else []
        show_lines(lines)
    else:
        table = _table()
        for split, part in (("training", prepared.train), ("validation", prepared.val)):
            table.add_row(f"{split} clips", f"{len(part)}", _duration(part))
        named = [f"{escape(printable(name) or 'unnamed')} {count}" for name, count in speakers.most_common(8)]
        table.add_row("speakers", str(len(speakers)), ", ".join(named + ["…"] * (len(speakers) > 8)))
        table.add_row("languages", str(len(languages)), spoken)
        table.add_row("vocabulary", str(prepared.tokenizer.num_tokens), "tokens")
        table.add_row("set aside", str(len(prepared.set_aside)), "clips")
        for count, reason in reasons:
            table.add_row("", str(count), reason)
        Screen().print(table)
        _show_lengths(np.concatenate([part.num_samples for part in both]) / SAMPLE_RATE)
    _show_shares(list(prepared.shares()), prepared)
    if prepared.set_aside:
        show_lines([f"Each clip set aside is listed in {set_aside_list(prepared.root)}"])
    if not brief and (unnamed := prepared.unnamed_corpora):
        has_several = len(prepared.corpora) > 1
        where = f"In {', '.join(unnamed)}: " if has_several else ""
        give = "give the folder as DIR:single-speaker" if has_several else "train with --single-speaker"
        show_lines([f"Hint: {where}{NO_SPEAKERS.format(give=give)}"])
    show_lines([f"Ready: {f'corpus in {made}' if made else f'cache in {prepared.root}'}"])


def _counted(names: Sequence[str], numbers: Rows) -> Counter[str]:
    counts = np.bincount(numbers, minlength=len(names)).tolist()
    return Counter({name: count for name, count in zip(names, counts, strict=True) if count})


def _show_shares(shares: Sequence[Share], prepared: PreparedCorpus) -> None:
    """Print hours and shares of corpora, languages and speakers, where there are several."""
    weights = dict(zip(prepared.corpora, prepared.weights, strict=True))
    table = _table("", "", "clips>", "hours>", "")
    for kind in dict.fromkeys(share.kind for share in shares):
        parts = [share for share in shares if share.kind == kind]
        rest = parts[_MOST_SHARES:] if len(parts) > _MOST_SHARES + 1 else []
        for part in parts[: len(parts) - len(rest)] if len(parts) > 1 else []:
            weight = weights.get(part.name, 1) if kind == "corpus" else 1
            about = f"{100 * part.share:.1f} % of an epoch" + (f", weight {weight:g}" if weight != 1 else "")
            name = LANGUAGE_NAMES.get(part.name, part.name) if kind == "language" else escape(part.name)
            table.add_row(kind, name, str(part.num_clips), f"{part.hours:.2f}", about)
        if rest:
            clips, hours, share = (sum(values) for values in list(zip(*rest, strict=True))[2:])
            about = f"{100 * share:.1f} % of an epoch"
            table.add_row(kind, f"{len(rest)} others", str(clips), f"{hours:.2f}", about)
    if table.row_count:
        _console().print(table)
    if not prepared.mixture.is_plain:
        show_lines([f"An epoch has {prepared.mixture.num_clips} clips of {len(prepared.train)}"])


def _show_lengths(seconds: Numbers) -> None:
    counts = np.bincount((seconds // _LENGTH_STEP_S).astype(int))
    lengths = _table()
    for index, count in enumerate(counts.tolist()):
        start = index * _LENGTH_STEP_S
        bar = "█" * round(_BAR_WIDTH * count / counts.max())
        lengths.add_row(f"{start}–{start + _LENGTH_STEP_S} s", str(count), bar)
    Screen().print(lengths)


def _duration(clips: ClipSet) -> str:
    minutes = float(clips.num_samples.sum()) / SAMPLE_RATE / 60
    return f"{minutes:.1f} minutes" if minutes < 60 else f"{minutes / 60:.2f} hours"


def show_runs(folder: Path, runs: Sequence[RunSummary]) -> None:
    """Print every run with its stages, and what its command would do if it were given again."""
    console = _console()
    if not runs:
        console.print(f"No run in {folder}, nor in the folders below it; myxtts train starts one.", markup=False)
    for run in runs:
        languages = ", ".join(LANGUAGE_NAMES[code] for code in run.languages)
        about = [run.size, languages, run.corpus or "embedded corpus", f"{run.num_bytes / 1e6:.0f} MB"]
        saved = f"saved {datetime.fromtimestamp(run.saved_at):%Y-%m-%d %H:%M}"
        console.print(Text(str(run.folder), style="bold"), Text("  ".join(filter(None, [*about, saved]))))
        table = _table("  stage", "step>", "state", "best loss>", "the same command")
        for stage in run.stages:
            step = f"{stage.step}/{stage.target}" if stage.state != "missing" else "–"
            state = f"{stage.state}: {stage.why}" if stage.why else stage.state
            again = run.again.get(stage.stage, "leaves it")
            table.add_row(f"  {stage.stage}", step, escape(state), _score(stage.best_loss, 3), again)
        console.print(table)


def show_findings(
    findings: Sequence[Finding], console: Console | None = None, *, with_passed: bool = False
) -> None:
    """Print the findings of a check, failures first; the last line says whether any of them fails."""
    console, levels = console or _console(), list(_STYLES)
    by_level = {level: [found.code for found in findings if found.level == level] for level in levels}
    shown = [found for found in findings if with_passed or found.level not in ("pass", "skip")]
    _print_findings(sorted(shown, key=lambda found: levels.index(found.level)), console)
    if by_level["pass"] and not with_passed:
        console.print(Text(f"Passed: {', '.join(by_level['pass'])} (--all shows them)", style="dim"))
    warnings = "1 warning" if len(by_level["warn"]) == 1 else f"{len(by_level['warn'])} warnings"
    passed = f"{len(by_level['pass'])} passed, {warnings}"
    if failed := by_level["fail"]:
        console.print(Text(f"{len(failed)} failed, {passed}"))
        console.print(Text(f"CHECKS FAILED: {', '.join(failed)}", style=_STYLES["fail"]))
    elif skipped := by_level["skip"]:
        console.print(Text(f"Nothing failed: {passed}, {len(skipped)} not checked on this machine"))
        console.print(Text(f"NOT CHECKED: {', '.join(skipped)}", style=_STYLES["warn"]))
    else:
        console.print(Text(f"All validation checks passed: {passed}"))
        console.print(Text("ALL CHECKS PASSED", style="bold green"))


def _print_findings(findings: Sequence[Finding], console: Console) -> None:
    table = _table()
    for finding in findings:
        level = Text(finding.level.upper(), style=_STYLES[finding.level])
        text, fix = Text(finding.what), finding.fix
        if finding.why:
            text.append(f"\n{finding.why}", style="dim")
        if finding.setting and finding.value is not None and finding.setting not in fix:
            fix += f" ({finding.setting}: {format_setting(finding.setting, finding.value)})"
        if finding.gain is not None and finding.level != "pass":
            fix += f" (about {finding.gain:.2g} times as fast)"
        if fix:
            text.append(f"\n→ {fix.strip()}")
        table.add_row(level, Text(finding.code, no_wrap=True), text)
    if findings:
        console.print(table)


def show_profile(profile: Profile, console: Console | None = None) -> None:
    """Print the verdict, then what it rests on, then what to change."""
    console = console or _console()
    verdict = profile.verdict
    if verdict is not None:
        console.print(Text(verdict.sentence, style="bold"))
        grade = f"Grade: {verdict.grade}" if verdict.grade else ""
        console.print(Text("  ".join(filter(None, [_speed(profile), grade]))))
        for note in [*profile.notes, *verdict.grade_notes]:
            console.print(Text(f"({note})", style="dim"))
        phases = _table("phase", "where", "mean ms>", "p95 ms>", "busy>", "")
        for row in profile.rows:
            times = (f"{row.mean_ms:.2f}", f"{row.p95_ms:.2f}", percent(row.share, 0))
            phases.add_row(row.phase, row.where, *times, Text(row.note, style="dim"))
        console.print(phases)
        shares = "  ".join(f"{name} {percent(share, 0)}" for name, share in verdict.shares.items())
        console.print(Text(f"Of the step: {shares}"))
        for name, ring in verdict.rings.items():
            if name != "keep":  # it leaves the model, and should be empty
                depth = f" of {ring.depth}" if ring.depth else ""
                empty = f", empty {percent(ring.empty_share, 0)} of the time" if ring.empty_share else ""
                console.print(Text(f"Ring {name}: {ring.mean_ready:.1f}{depth} ready{empty}"))
        for gpu in profile.gpus:
            console.print(Text(_gpu_use(gpu)))
    if profile.kernels is not None:
        kernels = _table("kernel", "calls/step>", "ms/step>", "share>")
        for kernel in profile.kernels.kernels:
            called = Text(kernel.name)
            called.truncate(_NAME_WIDTH, overflow="ellipsis")
            times = (f"{kernel.calls_per_step:.1f}", f"{kernel.ms_per_step:.3f}", percent(kernel.share))
            kernels.add_row(called, *times)
        console.print(kernels)
    if profile.data is not None:
        _show_data(profile.data, console)
    _print_findings(profile.findings, console)


def show_tuning(tuning: Tuning, console: Console | None = None) -> None:
    """Print the settings to change with the measured gain of each, and the patch of the YAML file."""
    console = console or _console()
    if not tuning.changes:
        console.print(Text(f"Nothing to change: {_outcome(tuning)}.", style="bold"))
    else:
        table = _table("setting", "now", "better", "gain>", "why")
        for change in tuning.changes:
            gain = f"{change.gain_measured:.2f}×" if change.gain_measured is not None else ""
            old, new = (format_setting(change.setting, value) for value in (change.old, change.new))
            table.add_row(change.setting, old, new, gain, Text(change.why))
        console.print(table)
    if tuning.after is not None:
        before = f"{tuning.before.clips_per_s:.1f}" if tuning.before else "none (training failed)"
        gain = f", {tuning.gain:.2f}×" if tuning.gain is not None else ""
        trials = "1 trial" if tuning.num_trials == 1 else f"{tuning.num_trials} trials"
        spent = f"{trials}, {tuning.minutes:.1f} minutes"
        console.print(Text(f"Clips per second: {before} → {tuning.after.clips_per_s:.1f}{gain} ({spent})"))
    if tuning.largest_batch is not None:
        console.print(Text(f"The largest batch that fits: {tuning.largest_batch} clips"))
    for note in tuning.notes:
        console.print(Text(f"({note})", style="dim"))
    _print_findings(tuning.advice, console)
    if tuning.changes:
        console.print(Text("\nThe patch for the YAML file (--apply writes it and keeps a backup):", style="bold"))
        console.print(Text(patched("", tuning.values).rstrip()))


def _outcome(tuning: Tuning) -> str:
    """Return why no setting is changed."""
    if tuning.num_trials > 1:
        return "none of the other settings tried is faster"
    if tuning.ran_out_of_time:
        return "check finds no fault, and the time was enough only for the present settings"
    return "check finds no fault, batches come in time, and there is no other batch or device to try"


def _speed(profile: Profile) -> str:
    parts = [f"Stage {profile.stage} on {profile.device}: {profile.clips_per_s or 0:.1f} clips/s"]
    if profile.first_epoch_clips_per_s is not None:
        parts.append(f"{profile.first_epoch_clips_per_s:.1f} in the first epoch")
    parts.append(f"batches of {profile.batch_size}, {profile.num_steps} steps")
    parts += [f"{used / 1024:.1f} GB ({role})" for role, used in profile.memory_mb.items()]
    return ", ".join(parts)


def _gpu_use(use: GpuUse) -> str:
    parts = [f"GPU {use.gpu} ({use.role})"]
    parts += [f"{percent(use.utilisation, 0)} utilised"] if use.utilisation is not None else []
    if use.memory_used_mb is not None and use.memory_total_mb is not None:
        parts.append(f"{use.memory_used_mb / 1024:.1f} of {use.memory_total_mb / 1024:.0f} GB")
    parts += [f"{use.power_w:.0f} W"] if use.power_w is not None else []
    parts += [f"{use.temperature_c:.0f} °C"] if use.temperature_c is not None else []
    return "  ".join(parts)


def _show_data(data: DataAnalysis, console: Console) -> None:
    text, audio, feed = data.text, data.audio, data.feed
    table = _table("", "mean ms>", "std ms>", "CV>", "max ms>")
    table.add_row(Text("1 Text preprocessing, per sentence", style="bold"))
    table.add_row("  normalise", *_timing_cells(text.normalize))
    table.add_row("  tokenise", *_timing_cells(text.tokenize))
    if text.detect_ms is not None:
        table.add_row("  detect the language", f"{text.detect_ms:.3f}")
    table.add_row("  total", f"{text.sample_ms:.3f}")
    table.add_row(Text("2 Audio loading", style="bold"))
    table.add_row("  decode a file", *_timing_cells(audio.decode))
    table.add_row(f"  gather a batch of {audio.batch_size}", *_timing_cells(audio.gather))
    table.add_row(Text("3 Pipeline efficiency, per batch", style="bold"))
    table.add_row("  host, all threads", *_timing_cells(feed.host))
    table.add_row("  feed, first epoch", *_timing_cells(feed.first_epoch))
    table.add_row("  feed, later epochs", *_timing_cells(feed.feed))
    table.add_row(f"  step ({'given' if feed.step_is_given else 'measured'})", f"{feed.step_ms:.3f}")
    table.add_row("  wait", f"{feed.wait_ms:.3f}")
    console.print(table)
    console.print(Text(f"Estimated GPU idle: {percent(feed.idle_share, 0)}"))
    if not feed.on_gpu and not feed.step_is_given:
        console.print(Text("(measured on this CPU; give the time of a step on your GPU: --step-ms)", style="dim"))


def _timing_cells(timing: Timing) -> list[str]:
    return [f"{timing.mean_ms:.3f}", f"{timing.std_ms:.3f}", percent(timing.cv, 0), f"{timing.longest_ms:.3f}"]


def show_scores(scores: Mapping[str, Any]) -> None:
    """Print the mean scores of every set of an evaluation; a dash where no judge gave any."""
    table = _table("set", "clips>", "WER>", "CER>", "similarity>", f"above {scores['same_speaker_from']}>", "MOS>")
    for name, row in scores["summary"].items():
        cells = [_score(row["wer"], 3), _score(row["cer"], 3), _score(row["similarity"], 2)]
        cells += [percent(row["same_speaker_share"], 0), _score(row["mos"], 2)]
        table.add_row(name, str(row["clips"]), *cells)
    Screen().print(table)


def show_collected(outcome: Outcome) -> None:
    """Print what a collected corpus holds, what each filter took, and the next commands."""
    found, sources = outcome.table, outcome.sources
    rows = _table("", "clips>", "time>", "share>")
    total = max(found.seconds, 1e-9)
    for name, taken in [("in use", found.used), *((_taken_by(row), row) for row in found.set_aside)]:
        rows.add_row(name, str(taken.segments), _clock(taken.seconds), percent(taken.seconds / total, 1))
    for taken in found.unused:
        rows.add_row(f"no clip: {taken.reason}", "", _clock(taken.seconds), percent(taken.seconds / total, 1))
    failed = [source for source in sources if source.state == "failed"]
    broken = f", {len(failed)} unusable" if failed else ""
    hours = sum(source.seconds for source in sources) / 3600
    show_lines([f"{outcome.folder}: {len(sources)} recordings, {hours:.2f} hours{broken}"])
    Screen().print(rows)
    for title, held in (("speakers", outcome.speakers), ("languages", outcome.languages)):
        shown = [f"{name} {_clock(seconds)}" for name, seconds in list(held.items())[:_MOST_SHARES]]
        more = [f"{len(held) - _MOST_SHARES} more"] if len(held) > _MOST_SHARES else []
        show_lines([f"{title}: {', '.join(shown + more) or 'none'}"])
    worked = max(sum(outcome.times.values()), 1e-9)
    shares = sorted(outcome.times.items(), key=lambda share: -share[1])
    parts = [f"{name} {percent(seconds / worked, 0)}" for name, seconds in shares]
    show_lines([f"time went into {', '.join(parts)}"] * bool(parts))
    show_lines(f"{Path(source.path).name}: {source.reason} ({source.detail})" for source in failed[:_MOST_SAID])
    show_lines([*outcome.notes, f"Why each second is not used: {outcome.folder / 'rejected.csv'}"])
    train = [f"  make train DATA={outcome.folder}"] if found.used.segments else []
    show_lines(
        ["Next:" if train else "No clip is in use. To hear why:", f"  myxtts collect --review {outcome.folder}"]
    )
    show_lines(train)


def _taken_by(taken: Taken) -> str:
    return taken.reason if taken.threshold is None else f"{taken.reason} ({taken.threshold:g})"


def _score(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _table(*headings: str) -> Table:
    """Return a table without lines; a heading that ends in > is of a column of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_header=bool(headings))
    for heading in headings:
        table.add_column(heading.removesuffix(">"), justify="right" if heading.endswith(">") else "left")
    return table


def _console() -> Console:
    return Screen(width=None if sys.stdout.isatty() else _FILE_WIDTH)


@contextlib.contextmanager
def dashboard(
    folder: Path, readings: Callable[[], Sequence[Record]] = tuple, screen: Console | None = None
) -> Iterator[None]:
    """Show the live view of a run on a thread. What is printed meanwhile is shown in it, and again at the end."""
    screen, said, stop, errors = screen or Screen(file=sys.stdout), io.StringIO(), threading.Event(), sys.stderr
    handlers = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.StreamHandler)]
    moved = [handler for handler in handlers if handler.stream is errors]
    options = {"hint": _ENDS_RUN, "said": said.getvalue}
    thread = threading.Thread(target=watch, args=(folder, stop, readings, screen), kwargs=options, daemon=True)
    for handler in moved:
        handler.setStream(said)
    thread.start()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield
    finally:
        stop.set()
        thread.join()
        for handler in moved:
            handler.setStream(errors)
        screen.print(Text(said.getvalue()), end="", soft_wrap=True)


def watch(
    folder: Path,
    stop: threading.Event,
    readings: Callable[[], Sequence[Record]] = tuple,
    console: Console | None = None,
    *,
    hint: str = _ENDS_VIEW,
    said: Callable[[], str] = str,
) -> None:
    """Show a run and the readings of its GPUs until `stop` is set or Ctrl-C; once if there is no terminal."""
    console = console or Screen()
    tail, is_live = MetricsTail(folder / "metrics.jsonl"), console.is_terminal
    title, hint = folder.resolve().name, hint if is_live else ""

    def drawn() -> RenderableType:
        ended = has_ended(folder)  # looked at first, because the last report may come in between
        now, nothing = time.time(), _NO_REPORT if is_run(folder) else _NO_RUN
        view = View(console.width, console.height - 1 if is_live else None, title, hint, nothing, said())
        return render(tail.read(), readings(), view, now=now, ended=ended)

    if not is_live:
        console.print(drawn())
        return
    live = Live(drawn(), console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with contextlib.suppress(KeyboardInterrupt), live:
        while not stop.wait(PERIOD_S):
            live.update(drawn(), refresh=True)
        live.update(drawn(), refresh=True)


class View(NamedTuple):
    """The frame of the live view; without a height it is as high as its rows."""

    width: int = 100
    height: int | None = None
    title: str = ""
    hint: str = ""
    nothing: str = _NO_REPORT  # shown until the first report
    said: str = ""  # lines of a running `train`, of which the last ones are shown


def render(
    reports: Sequence[Record],
    readings: Sequence[Record] = (),
    view: View | None = None,
    *,
    now: float | None = None,
    ended: bool = False,
) -> RenderableType:
    """Return the state of a run as a panel, from the records of its metrics and one reading of each GPU.

    With `now`, a time of day, a long silence is mentioned.
    """
    stages, view = stages_of(reports), view or View()
    running = next((stage for stage in reversed(stages) if stage.steps), None)
    notes = _notes(running, reports, now, ended)
    notes += [Text(line, style="dim", no_wrap=True) for line in view.said.splitlines()[-_MOST_SAID:]]
    rows = _rows(stages, running, readings, view, ended, spare=0)
    if view.height is not None and running is not None:
        used = rows.row_count + 2 + sum(1 + note.cell_len // (view.width - 4) for note in notes)
        rows = _rows(stages, running, readings, view, ended, spare=max(view.height - used, 0))
    title, hint = (Text(text) if text else None for text in (view.title, view.hint))
    frame = {"title": title, "subtitle": hint, "title_align": "left", "subtitle_align": "right"}
    return Panel(Group(rows, *notes), width=view.width, height=view.height, **frame)  # type: ignore[arg-type]


def _notes(running: StageHistory | None, reports: Sequence[Record], now: float | None, ended: bool) -> list[Text]:
    if running is None:
        return []
    notes = [Text(f"WARNING: {warning.text}", style="yellow") for warning in warnings_of(running.steps)]
    if ended:
        final = running.steps[-1]
        step = f"step {final.step:,}" + (f" of {final.total_steps:,}" if final.total_steps else "")
        end = f"The run has ended. Its last report is of {step} of stage {final.stage}."
        notes.append(Text(end, style="bold"))
    elif now is not None and (silence := _silence(reports, now)):
        notes.append(Text(silence, style="red"))
    return notes


def _rows(
    stages: Sequence[StageHistory], running: StageHistory | None, readings: Sequence[Record], view: View,
    ended: bool, spare: int,
) -> Table:  # fmt: skip
    """Return the rows of the view; its two curves take the lines to spare."""
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column()
    bar_width = min(max(view.width // 4, 8), 32)
    if running is None:
        rows.add_row(view.nothing)
    else:
        counts = []
        for stage in stages:
            last = stage.steps[-1] if stage.steps else None
            count = f"{last.step:,}" + (f"/{last.total_steps:,}" if last.total_steps else "") if last else ""
            counts.append(Text(f"{stage.name} {count}", style="bold" if stage is running else "dim"))
        rows.add_row("stages", Text("  ").join(counts))
        _add_training(rows, running, view.width, bar_width, ended, spare)
    for reading in readings:
        rows.add_row(Text(f"GPU {reading.get('gpu', '?')}"), _gpu_line(reading, bar_width))
    return rows


def _add_training(rows: Table, stage: StageHistory, width: int, bar_width: int, ended: bool, spare: int) -> None:
    last, curve_width = stage.steps[-1], max(width - 70, 8)
    eta = f"  ETA {duration(last.eta_s)}" if last.eta_s is not None else ""
    state = f"{'ended after' if ended else 'running'} {duration(last.elapsed_s)}{'' if ended else eta}"
    if last.total_steps:
        done = last.step / last.total_steps
        state = f" {percent(done, 0)}  epoch {last.epoch}  {state}"
        rows.add_row("progress", Text.assemble(_bar(done, bar_width), state))
    else:
        rows.add_row("progress", Text(f"step {last.step:,}  epoch {last.epoch}  {state}"))
    losses = [short(last.losses.get("total"))]
    losses += [f"{name} {short(loss)}" for name, loss in last.losses.items() if name != "total"]
    curve = stage.column("losses.total")
    rows.add_row("loss", _curve(curve, curve_width, "  ".join(losses), "cyan", 1 + spare - spare // 2))
    if stage.validations:
        (at, loss), best = stage.validations[-1], stage.best_validation
        best_text = f", best {short(best[1])} at step {best[0]:,}" if best else ""
        rows.add_row("validation", f"{short(loss)} at step {at:,}{best_text}")
    rows.add_row("clips/s", _curve(_warm(stage, "clips_per_s"), curve_width, short(last.clips_per_s), "green"))
    mfu = f"  MFU {percent(last.mfu)}" if last.mfu is not None else ""
    idle = f"model waits {percent(last.idle_share)}{mfu}"
    times = f"{short(last.step_ms)} ms  varies {percent(last.step_cv)}  {idle}"
    rows.add_row("step time", _curve(_warm(stage, "step_ms"), curve_width, times, "green", 1 + spare // 2))
    for name, (ready, depth) in last.rings.items():
        bar, style = _bar(ready / depth if depth else math.nan, bar_width)
        about, style = ("ready", style) if name != "keep" else ("to be kept", "blue")  # this one should be empty
        rows.add_row(Text(f"ring {name}"), Text.assemble((bar, style), f" {ready}/{depth} {about}"))
    if last.memory_mb:
        used = "  ".join(f"{role} {short(mb / 1024)} GB" for role, mb in last.memory_mb.items())
        rows.add_row("memory", Text(used))
    if last.skipped:
        rows.add_row("skipped", Text(f"{last.skipped:,} steps whose gradients were not finite", style="yellow"))


def _gpu_line(reading: Record, bar_width: int) -> Text:
    use = number(reading.get("utilisation"))
    used_gb, total_gb = (number(reading.get(f"memory_{part}_mb")) / 1024 for part in ("used", "total"))
    facts = [percent(use)]
    if math.isfinite(used_gb):
        facts.append(f"{short(used_gb)}/{short(total_gb)} GB")
    for name, way, unit in _GPU_FACTS:
        if math.isfinite(value := number(reading.get(name))):
            facts.append(way + short(value, unit))
    line = Text.assemble(_bar(use, bar_width), " " + "  ".join(facts))
    if reasons := reading.get("throttled_by"):
        line.append(f"  throttled: {', '.join(map(str, reasons))}", style="yellow")
    return line


def _silence(reports: Sequence[Record], now: float) -> str:
    """Return a remark if reports are overdue; "" otherwise, or when all steps are done."""
    times = numbers(record.get("written_at") for record in reports)
    times = times[np.isfinite(times)]
    last_step = next(record for record in reversed(reports) if record.get("kind") == "step")
    if not len(times) or last_step.get("step") == last_step.get("total_steps"):
        return ""
    usual_s = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    silent_s = now - float(times[-1])
    if silent_s < max(SILENCE_S, 5 * usual_s):
        return ""
    return f"Nothing was reported for {duration(silent_s)}: the run is paused, busy saving, or has ended."


def _warm(stage: StageHistory, name: str) -> Numbers:
    """Return a column without the first reports, whose compilation would flatten the rest."""
    values = stage.column(name)
    return values[WARMUP_REPORTS:] if len(values) > 2 * WARMUP_REPORTS else values


def _curve(values: Numbers, width: int, text: str, style: str, height: int = 1) -> Text:
    first, *others = sparkline(values, width, height)
    return Text.assemble((first.ljust(width), style), f" {text}", *((f"\n{line}", style) for line in others))


def sparkline(values: Numbers, width: int, height: int = 1) -> list[str]:
    """Return a curve as lines of text, scaled from its lowest to its highest value; blank where unknown."""
    if height > 1 and 0 < len(values) < width:
        values = values[np.arange(width) * len(values) // width]
    groups = np.array_split(values, min(width, len(values))) if len(values) else []
    means = numbers(float(np.nanmean(group)) if np.isfinite(group).any() else math.nan for group in groups)
    if not np.isfinite(means).any():
        return [""] * height
    low, high = float(np.nanmin(means)), float(np.nanmax(means))
    levels = np.nan_to_num(np.round(1 + (means - low) / ((high - low) or 1.0) * (8 * height - 1)), nan=0.0)
    lines = [np.clip(levels - 8 * line, 0, 8).astype(int).tolist() for line in reversed(range(height))]
    return ["".join(_LEVELS[level] for level in line) for line in lines]


def _bar(share: float, width: int) -> tuple[str, str]:
    """Return a bar filled to a share, and its style."""
    if not math.isfinite(share):
        return " " * width, ""
    filled = round(width * min(max(share, 0.0), 1.0))
    return "█" * filled + "░" * (width - filled), "green" if share > 0 else "red"
