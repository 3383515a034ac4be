"""Whether the gain that `myxtts tune` measures in its trials comes in a training of its own afterwards.

Deliberately bad settings are tuned, then trained with before and after, as `myxtts train` trains. Searches nothing
itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from tools_planted import CPU_DIMS, Field

from myxtts.config import MAX_AUTO_BUFFER
from myxtts.devices import Machine
from myxtts.model.xtts import SIZES
from myxtts.observe.metrics import StepReport
from myxtts.run import prepare_corpus, train
from myxtts.settings import LoadedSettings, with_values
from myxtts.tools import tune as tune_module
from myxtts.tools.dry_run import Trial, try_out
from myxtts.tools.tune import Tuning, tune
from myxtts.training.trainer import Reporter

WITHIN, OF_THE_BEST = 0.15, 0.95
RUN_S, NORMAL_RUN_S = 3.0, 7.0
"""Seconds of a training that are measured; the epoch before them computes codes and is left out."""
TUNE_MINUTES = 0.6
COMPILATION = "training.enable_xla_compilation"
EAGER = {"training.enable_graph_mode": "false", "data.mixed_precision": "false", "data.batch_size": "16"}


@dataclass(frozen=True)
class Bad:
    """Settings that nobody should keep."""

    flags: Mapping[str, str]
    corpus: str
    max_batch: int


BAD: Mapping[str, Bad] = {
    "decoding": Bad(
        {"data.batch_size": "4", "data.num_workers": "1", "data.native_loading": "false"}, "flac", max_batch=16
    ),
    "eager-fp32": Bad(EAGER, "clips", max_batch=16),
    "few-clips": Bad({"data.batch_size": "2"}, "clips", max_batch=32),
}
"""By name. `max_batch` ends the search for a batch where the others begin, so that three fit into some minutes."""
console = Console(width=150, highlight=False)


class _Collected(Reporter):
    """Keeps the reports of the steps."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def step(self, report: StepReport) -> None:
        self.reports.append(report)


def tuned(folder: Path, names: list[str], size: str, on_gpu: bool) -> bool:
    """Tune each of these settings, and train with what was and what was found; whether all gains came."""
    os.chdir(folder)
    table = Table(title="Gain predicted by `myxtts tune` and measured in trainings", title_justify="left")
    for column in (
        "settings",
        "changes",
        "predicted",
        "measured",
        "ratio",
        "",
        "clips/s before, after",
        "seconds",
    ):
        table.add_column(column)
    all_right = True
    with _small_on_cpu(on_gpu), _without_compiling():
        field = Field(folder, size, on_gpu, compiled=False)
        for name in names:
            cells, right = _row(field, name, folder, on_gpu)
            all_right &= right
            table.add_row(name, *cells)
            console.print(name, *cells, sep=" | ")
    console.print(table)
    return all_right


def _row(field: Field, name: str, folder: Path, on_gpu: bool) -> tuple[list[str], bool]:
    started_at, bad = time.perf_counter(), BAD[name]
    loaded = field.settings(bad.flags, bad.corpus)
    found = _tune(loaded, TUNE_MINUTES if on_gpu else 5.0, bad.max_batch, on_gpu)
    after = with_values(loaded, found.values)
    assert found.before is not None and found.after is not None and found.gain is not None
    speeds = [
        clips_per_s(settings, folder / f"{name}-{when}", RUN_S, trial.clips_per_s, on_gpu)
        for when, settings, trial in (("before", loaded, found.before), ("after", after, found.after))
    ]
    measured = speeds[1] / speeds[0]
    ratio = measured / found.gain
    right = abs(ratio - 1) <= WITHIN
    told = f"{found.before.clips_per_s:,.0f}, {found.after.clips_per_s:,.0f}"
    return [
        _listed(found),
        f"{found.gain:.2f}",
        f"{measured:.2f}",
        f"{ratio:.3f}",
        "right" if right else "WRONG",
        f"{speeds[0]:,.0f}, {speeds[1]:,.0f} (tune: {told})",
        f"{time.perf_counter() - started_at:.0f}",
    ], right


def _tune(loaded: LoadedSettings, minutes: float, max_batch: int, on_gpu: bool) -> Tuning:
    """All trials in this process: starting another one for each would take most of the time."""
    num_steps = tune_module.GPU_STEPS if on_gpu else tune_module.CPU_STEPS

    def measure(candidate: LoadedSettings) -> Trial:
        _forget(on_gpu)
        return try_out(candidate.settings, prepare_corpus(candidate.settings), "gpt", num_steps)

    prepared = prepare_corpus(loaded.settings)
    return tune(loaded, prepared, minutes=minutes, max_batch=max_batch, measure=measure, say=_say)


def clips_per_s(loaded: LoadedSettings, folder: Path, seconds: float, expected: float, on_gpu: bool) -> float:
    """Speed of a training, from the second half of an epoch and so many seconds."""
    _forget(on_gpu)
    data, num_clips = loaded.settings.data, len(prepare_corpus(loaded.settings).train)
    per_step = data.batch_size * loaded.settings.training.gradient_accumulation_steps
    made = data.pipeline_buffer_size or MAX_AUTO_BUFFER  # while the last codes were computed
    first = num_clips // per_step + made
    counted = max(int(seconds * expected / per_step), 12)
    flags = {
        "training.checkpoint_dir": folder,
        "training.max_steps": first + counted,
        "training.stages": ("gpt",),
        "training.log_step": max(counted // 8, 2),
        "training.save_step": 10**6,
        "training.val_step": 10**6,
    }
    collected = _Collected()
    train(with_values(loaded, flags), reporter=collected, say=lambda _: None)
    return statistics.median(report.clips_per_s for report in collected.reports if report.step > first)


def tuned_normal(folder: Path, minutes: float) -> bool:
    """The tuned `normal` against the best of batches chosen by hand; on a GPU, compiled."""
    os.chdir(folder)
    field = Field(folder, "normal", on_gpu=True, compiled=True)
    start = field.settings({"data.batch_size": "32", "data.pipeline_buffer_size": "12"}, "clips")
    found = _tune(start, minutes, max_batch=256, on_gpu=True)
    table = Table(title="`normal`: tuned against chosen by hand", title_justify="left")
    for column in ("settings", "clips/s in a training"):
        table.add_column(column)
    assert found.after is not None
    speeds: dict[str, float] = {}
    by_hand = [{"data.batch_size": size} for size in (64, 128, 256) if found.values != {"data.batch_size": size}]
    for values in (found.values, *by_hand):
        name = f"{'by hand' if speeds else 'tuned'}: {values or 'as they were'}"
        run = folder / f"run-{len(speeds)}"
        speeds[name] = clips_per_s(with_values(start, values), run, NORMAL_RUN_S, found.after.clips_per_s, True)
        table.add_row(name, f"{speeds[name]:,.0f}")
        console.print(name, f"{speeds[name]:,.0f} clips/s")
    own, *others = speeds.values()
    share = own / max(others)
    console.print(table)
    console.print(f"Tuned reaches {share:.1%} of the best by hand, {'right' if share >= OF_THE_BEST else 'WRONG'}")
    return share >= OF_THE_BEST


@contextlib.contextmanager
def _without_compiling() -> Iterator[None]:
    """Leave out the one switch whose every trial takes a minute."""
    switches = {key: value for key, value in tune_module.SWITCHES.items() if key != COMPILATION}
    with mock.patch.object(tune_module, "SWITCHES", switches):
        yield


@contextlib.contextmanager
def _small_on_cpu(on_gpu: bool) -> Iterator[None]:
    if on_gpu:
        yield
        return
    nothing: Any = classmethod(lambda cls: cls())
    with mock.patch.dict(SIZES, {"tiny": CPU_DIMS}), mock.patch.object(Machine, "look", nothing):
        yield


def _forget(on_gpu: bool) -> None:
    """What a configuration before has left on the device."""
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _listed(found: Tuning) -> str:
    return ", ".join(f"{change.setting.split('.')[1]} {change.new}" for change in found.changes) or "none"


def _say(line: str) -> None:
    console.print("  ", line)
