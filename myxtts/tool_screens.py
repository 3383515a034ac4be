"""What the terminal shows of a profile, of the data side and of a tuning. Draws what it is given."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from myxtts.observe.findings import Finding
from myxtts.settings.values import shown
from myxtts.tools.anatomy import KernelView
from myxtts.tools.config_patch import yaml_value
from myxtts.tools.data_analysis import DataAnalysis
from myxtts.tools.data_timing import Timing
from myxtts.tools.experiment import Tuning
from myxtts.tools.profile import Profile

_STYLES = {"pass": "green", "info": "cyan", "warn": "yellow", "fail": "bold red"}
_UNLIMITED = 200
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
            table.add_row(change.setting, shown(change.old), shown(change.new), gain, Text(change.why))
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
        sections.setdefault(section, []).append(f"  {name}: {yaml_value(value)}")
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
        table.add_row(row.stage, row.where, *times, Text(row.note, style="dim"))
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
            fix += f" ({finding.setting}: {yaml_value(finding.value)})" if finding.value is not None else ""
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
    return Console(highlight=False, width=None if sys.stdout.isatty() else _UNLIMITED)
