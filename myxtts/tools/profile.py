"""Where the time of a training goes, measured on the user's real configuration: `myxtts profile`.

The stage is rehearsed three times: as in the first epoch, as in every later one, traced, and with one batch over
and over, which is what a perfect feed would give. Judges nothing (`observe.verdict` does) and draws nothing.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from myxtts.assembly.rehearsal import WARM_UP_STEPS, Measured
from myxtts.checkpoint import write_atomically
from myxtts.config import DataSettings
from myxtts.data.clips import Prepared
from myxtts.data.corpus import read_corpus
from myxtts.data.prepare import EMBEDDED_CORPUS
from myxtts.devices import Machine, Plan
from myxtts.host import usable_cores
from myxtts.observe.evidence import Evidence
from myxtts.observe.findings import Finding
from myxtts.observe.nvml import Reading, Sampler
from myxtts.observe.trace import Span, Trace
from myxtts.observe.verdict import Verdict, judge
from myxtts.settings import Loaded
from myxtts.tools.anatomy import KernelView, forward_share, kernel_view, matrix_flops, useful_flops
from myxtts.tools.data_analysis import DataAnalysis, analyse
from myxtts.tools.data_timing import time_decoding
from myxtts.tools.noted import NotedRehearsal, mean_stage_ms
from myxtts.tools.trial import set_apart

PLACES = {
    "gather": "host",
    "upload": "data",
    "encode": "data",
    "handoff": "data",
    "wait": "host",
    "train": "model",
    "update": "model",
}
"""The stages in the order in which a batch passes them, and whose time they take."""
NOTES = {"wait": "the program waits for a batch", "train": "forward and backward", "update": "clipping and AdamW"}
FIRST_STEPS_GPU, FIRST_STEPS_CPU = 20, 2
"""Steps of the first pass, which also tells how long a step takes."""
CPU_BATCHES = 8
"""Batches that are taken from a feed on a CPU."""
MOST_CPU_S = 30.0
"""Seconds that a pass may take on a CPU, where a step can take many."""
SLOW_STEP_S = 2.0
"""A step beyond which its forward and backward passes are not told apart: that takes some steps more."""
DECODED_FILES = 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageRow:
    """A stage of the pipeline or of the step."""

    stage: str
    where: str
    """host, data or model: whose time it takes."""
    mean_ms: float
    """For a batch."""
    p95_ms: float
    share: float
    """Of the whole time, in which a worker of this stage was busy with it."""
    note: str = ""


@dataclass(frozen=True)
class GpuUse:
    """Readings of a GPU, as means; None is what the driver does not tell."""

    gpu: int
    role: str
    utilisation: float | None
    memory_used_mb: float | None
    memory_total_mb: float | None
    power_w: float | None
    temperature_c: float | None


@dataclass(frozen=True)
class Profile:
    """What was measured, and what it means; only `data` when nothing was trained."""

    stage: str
    device: str
    num_steps: int
    batch_size: int
    notes: list[str] = field(default_factory=list)
    clips_per_s: float | None = None
    """In the long run."""
    first_epoch_clips_per_s: float | None = None
    """While codes are computed; None where the stage needs none."""
    rows: list[StageRow] = field(default_factory=list)
    verdict: Verdict | None = None
    gpus: list[GpuUse] = field(default_factory=list)
    memory_mb: dict[str, float] = field(default_factory=dict)
    kernels: KernelView | None = None
    data: DataAnalysis | None = None
    trace: Trace | None = None
    """Of the pass that the verdict is about."""

    @property
    def findings(self) -> list[Finding]:
        """What to change, the dearest first."""
        return [*(self.verdict.findings if self.verdict else []), *(self.data.findings if self.data else [])]

    def to_json(self) -> dict[str, Any]:
        """Everything but the trace."""
        parts = {name: part for name, part in vars(self).items() if name not in ("trace", "rows", "gpus")}
        for name in ("verdict", "kernels", "data"):
            parts[name] = parts[name].to_json() if parts[name] is not None else None
        parts |= {"rows": [asdict(row) for row in self.rows], "gpus": [asdict(gpu) for gpu in self.gpus]}
        return parts | {"findings": [found.to_json() for found in self.findings]}


def keep(found: Profile, run_folder: Path) -> None:
    """Leave the verdict and its spans in a run, for its page."""
    if found.verdict is not None and found.trace is not None:
        verdict = json.dumps(found.verdict.to_json(), indent=1)
        write_atomically(run_folder / "verdict.json", lambda path: _write(path, verdict))
        write_atomically(run_folder / "trace.jsonl", found.trace.write_jsonl)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def profile(
    loaded: Loaded,
    prepared: Prepared,
    *,
    num_steps: int = 50,
    stage: str = "gpt",
    data_only: bool = False,
    kernels: bool = False,
    step_ms: float | None = None,
) -> Profile:
    """Measure a stage; `data_only` only its data side, against a step of `step_ms` if that is given."""
    machine = Machine.look()
    on_gpu = bool(machine.gpus)
    if data_only:
        num_batches = num_steps if on_gpu else min(num_steps, CPU_BATCHES)
        _log.info("Looking at texts and recordings, then taking %d batches", num_batches)
        analysis = analyse(loaded, prepared, stage=stage, num_batches=num_batches, step_ms=step_ms)
        device = "GPU" if on_gpu else "CPU"
        return Profile(stage, device, num_batches, loaded.settings.data.batch_size, data=analysis)
    with set_apart(prepared) as apart:
        _log.info("Setting up the stage %s as a training would", stage)
        rehearsal = NotedRehearsal(loaded, apart, stage)
        return _profile(rehearsal, loaded, apart, machine, num_steps, kernels)


def _profile(
    rehearsal: NotedRehearsal, loaded: Loaded, prepared: Prepared, machine: Machine, num_steps: int, kernels: bool
) -> Profile:
    plan = rehearsal.plan
    on_gpu = plan.model.type == "cuda"
    first_steps = min(num_steps, FIRST_STEPS_GPU if on_gpu else FIRST_STEPS_CPU)
    _log.info("Training %d steps as in the first epoch", first_steps)
    first = rehearsal.measure(first_steps, traced=True)
    step_s, notes = first.seconds / len(first.times), []
    affordable = max(int(MOST_CPU_S / step_s), FIRST_STEPS_CPU)
    if not on_gpu and affordable < num_steps:
        notes.append(f"{affordable} of {num_steps} steps were measured, for one takes {step_s:.1f} s on this CPU")
        num_steps = affordable
    _log.info("Training at least %d steps as in every later epoch, about %.0f s", num_steps, num_steps * step_s)
    rehearsal.fill_codes()  # the first pass computed those of a few batches only
    indices = sorted({device.index for device in (plan.data, plan.model) if device.index is not None})
    with Sampler(indices) as sampler:
        measured = rehearsal.steady(num_steps)
        readings, no_readings = sampler.samples(), sampler.reason if on_gpu else "This machine has no GPU"
    trace = rehearsal.trace
    _log.info("Training %d steps on one batch, as if the feed were perfect", num_steps)
    replayed = rehearsal.measure(num_steps, replay=True, traced=True)
    view = kernel_view(rehearsal) if kernels or on_gpu else None  # only kernels show that the host waits
    _log.info("Drawing conclusions")
    evidence = _evidence(rehearsal, loaded, prepared, measured, replayed)
    evidence = replace(evidence, readings=readings, no_readings=no_readings, num_gpus=len(machine.gpus))
    if view is not None:
        evidence = replace(evidence, kernel_share=view.kernel_share, syncs_per_step=view.syncs_per_step)
    rows = [*_rows(measured, first, rehearsal.stage)]
    if on_gpu or step_s < SLOW_STEP_S:
        rows = [*_with_passes(rows, rehearsal, mean_stage_ms(replayed)["train"])]
    return Profile(
        stage=rehearsal.stage,
        device=machine.label(plan.model),
        num_steps=len(measured.times),
        batch_size=loaded.settings.data.batch_size,
        notes=notes,
        clips_per_s=rehearsal.long_run_clips_per_s(measured),
        first_epoch_clips_per_s=None if rehearsal.stage == "dvae" else rehearsal.long_run_clips_per_s(first),
        rows=[_decode_row(loaded.settings.data), *rows],
        verdict=judge(evidence),
        gpus=_uses(readings, plan),
        memory_mb=measured.memory_mb,
        kernels=view if kernels else None,
        trace=trace,
    )


def _evidence(
    rehearsal: NotedRehearsal, loaded: Loaded, prepared: Prepared, measured: Measured, replayed: Measured
) -> Evidence:
    """What the rehearsal says of itself and of its device."""
    num_clips = loaded.settings.data.batch_size * rehearsal.accumulate
    peak_flops = matrix_flops(rehearsal.plan, rehearsal.lane) if rehearsal.stage == "gpt" else None
    flops = useful_flops(rehearsal.step.recipe, prepared.train, num_clips) if peak_flops else None
    return Evidence(
        spans=measured.spans,
        counters=measured.counters,
        # Spans count steps from the first one on, the clock from the first measured one on.
        steps=[step._replace(step=step.step + WARM_UP_STEPS) for step in measured.times],
        replayed=replayed.times,
        warmup_steps=0,
        settings=loaded.settings,
        depths=rehearsal.depths,
        data_gpu=rehearsal.plan.data.index,
        model_gpu=rehearsal.plan.model.index,
        cores=usable_cores(),
        recompilations=measured.recompilations,
        flops_per_step=flops,
        peak_flops=peak_flops,
    )


def _rows(measured: Measured, first: Measured, stage: str) -> Iterator[StageRow]:
    """The stages in order; beside `encode` the same in the first epoch."""
    spans, earlier = _by_name(measured.spans), _by_name(first.spans)
    for name, where in PLACES.items():
        if name == "encode" and stage != "dvae" and earlier[name]:
            note = "first epoch: codes are computed, later they are found"
            yield _row("encode (first)", where, earlier[name], first.seconds, note)
        if spans[name]:
            yield _row(name, where, spans[name], measured.seconds, NOTES.get(name, ""))


def _row(name: str, where: str, spans: Sequence[Span], seconds: float, note: str) -> StageRow:
    lengths_ms = np.array([span.duration_us for span in spans]) / 1000
    workers = len({span.track for span in spans})
    share = float(lengths_ms.sum()) / 1000 / seconds / workers
    note = ", ".join(filter(None, [note, f"{workers} threads" if workers > 1 else ""]))
    return StageRow(name, where, float(lengths_ms.mean()), float(np.quantile(lengths_ms, 0.95)), share, note)


def _by_name(spans: Sequence[Span]) -> defaultdict[str, list[Span]]:
    named: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        named[span.name].append(span)
    return named


def _with_passes(rows: Sequence[StageRow], rehearsal: NotedRehearsal, train_ms: float) -> Iterator[StageRow]:
    """The same with the two passes of training below it, where they can be told apart."""
    for row in rows:
        yield row
        share = forward_share(rehearsal, train_ms) if row.stage == "train" else None
        if share is not None:
            for name, part in (("forward", share), ("backward", 1 - share)):
                yield StageRow(f"  {name}", row.where, part * row.mean_ms, part * row.p95_ms, part * row.share)


def _decode_row(data: DataSettings) -> StageRow:
    """What reading a batch from its files takes, or would take."""
    corpus = read_corpus(data.train_data or EMBEDDED_CORPUS)
    seconds = [*time_decoding(corpus, data, DECODED_FILES).values()] or [0.0]
    note = "once, when the corpus is prepared" if data.native_loading else "for every batch, part of gather"
    batch_ms = 1000 * data.batch_size * np.array([np.mean(seconds), np.quantile(seconds, 0.95)])
    return StageRow("load and decode", "host", float(batch_ms[0]), float(batch_ms[1]), 0.0, note)


def _uses(readings: Sequence[Reading], plan: Plan) -> list[GpuUse]:
    roles = {plan.data.index: "data", plan.model.index: "model" if plan.mode == "dual" else "data and model"}
    return [
        GpuUse(
            gpu=gpu,
            role=roles.get(gpu, ""),
            **{name: _mean(readings, gpu, name) for name in ("utilisation", "power_w", "temperature_c")},
            **{name: _mean(readings, gpu, name) for name in ("memory_used_mb", "memory_total_mb")},
        )
        for gpu in sorted({reading.gpu for reading in readings})
    ]


def _mean(readings: Sequence[Reading], gpu: int, name: str) -> float | None:
    told = [value for r in readings if r.gpu == gpu and (value := getattr(r, name)) is not None]
    return float(np.mean(told)) if told else None
