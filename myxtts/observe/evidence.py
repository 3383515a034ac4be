"""What was measured of some training steps, in one object, and what can be read off it directly.

Only spans or step times are needed; what else is missing makes a verdict shorter, not wrong. Concludes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from myxtts.config import Settings
from myxtts.observe.nvml import Reading
from myxtts.observe.steps import WARMUP_STEPS, StepTime
from myxtts.observe.trace import Counter, Span

DATA_STAGES = ("gather", "upload", "encode", "handoff")
"""In the order in which a batch passes them."""
GPU_STAGES = DATA_STAGES[1:]
"""Those that work on the data GPU, where there is one; on the CPU all of them use the processor."""
MODEL_STAGES = ("train", "update")
"""What the model lane does; the number of such a span is that of its step, not of its batch."""
RING_COUNTER = " ring"
"""Samples called `host ring` say how many batches of that ring are ready."""
ALLOCATED_COUNTER = " allocated MB"
"""Samples called `model allocated MB` say how much memory that role has, once per step."""
RECOMPILED_COUNTER = "recompilations"
"""Samples of how many graphs were compiled so far, once per step."""

Interval = tuple[int, int]
"""Start and end in microseconds of the host clock."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Some steps of one stage under these settings."""

    spans: Sequence[Span] = ()
    counters: Sequence[Counter] = ()
    steps: Sequence[StepTime] = ()
    """With the real feed; without them their times are taken from the spans."""
    replayed: Sequence[StepTime] = ()
    """With one batch over and over: what a perfect feed would give."""
    warmup_steps: int = WARMUP_STEPS
    """First steps that do not count; 0 when whoever measured has left them out."""
    settings: Settings = field(default_factory=Settings)
    depths: Mapping[str, int] = field(default_factory=dict)
    """Of the rings, by name."""
    readings: Sequence[Reading] = ()
    no_readings: str = ""
    """Why there are none."""
    data_gpu: int | None = None
    model_gpu: int | None = None
    """PyTorch's numbers, equal when the roles share a GPU; None on the CPU."""
    num_gpus: int = 0
    """Of the machine."""
    cores: int = 0
    """That this process may use; 0 when nobody looked."""
    recompilations: int | None = None
    """Behind the warm-up; None leaves it to the samples."""
    kernel_share: float | None = None
    """Of the spans of the model lane, the share in which a kernel ran and none had yet to be launched."""
    syncs_per_step: float | None = None
    """How often the host waits for the device inside a step."""
    flops_per_step: float | None = None
    """Of useful work."""
    peak_flops: float | None = None
    """Per second, that a large matrix product reaches on this GPU."""
    baseline: float | None = None
    """Speed as a multiple of the run on one GPU without any of this, if that was measured."""
    ran_out_of_memory: bool = False

    @property
    def is_dual(self) -> bool:
        """Whether each role has a GPU of its own."""
        return self.model_gpu is not None and self.data_gpu != self.model_gpu


class StageTime(NamedTuple):
    """How long a stage takes for a batch."""

    num_batches: int
    mean_ms: float
    median_ms: float
    longest_ms: float
    cv: float
    workers: int
    """Threads or streams that did it side by side."""
    busy_share: float
    """Of the whole time, in which at least one of them was at work."""
    long_share: float
    """Of the batches that took more than `LONG` times the median."""
    long_time_share: float
    """Of the stage's work that went into those."""

    @property
    def period_ms(self) -> float:
        """Time between two batches when the stage alone decides."""
        return self.mean_ms / max(self.workers, 1)


LONG = 4.0


class RingState(NamedTuple):
    """How full a ring was when the trainer took a batch."""

    depth: int | None
    mean_ready: float
    empty_share: float
    """Of the samples in which nothing was ready."""


def end_us(span: Span) -> int:
    """Where a span ends."""
    return span.start_us + span.duration_us


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that are sorted and do not touch."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        elif end > start:
            union.append((start, end))
    return union


def length_us(intervals: Iterable[Interval]) -> int:
    """The sum of lengths."""
    return sum(end - start for start, end in intervals)


def busy_share(spans: Iterable[Span], names: Collection[str], window: Interval) -> float:
    """Share of the window in which anything of these names was at work."""
    at_work = [
        (max(span.start_us, window[0]), min(end_us(span), window[1]))
        for span in spans
        if span.name in names and span.start_us < window[1] and end_us(span) > window[0]
    ]
    return length_us(merged(at_work)) / max(window[1] - window[0], 1)


def stage_times(spans: Iterable[Span], window: Interval) -> dict[str, StageTime]:
    """Of every stage, from the spans that end inside the window."""
    by_name: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.name in (*DATA_STAGES, *MODEL_STAGES) and window[0] < end_us(span) <= window[1]:
            by_name[span.name].append(span)
    return {name: _stage_time(by_name[name], window) for name in (*DATA_STAGES, *MODEL_STAGES) if name in by_name}


def ring_states(evidence: Evidence, window: Interval) -> dict[str, RingState]:
    """Of every ring that was sampled inside the window."""
    ready: defaultdict[str, list[float]] = defaultdict(list)
    for name, at_us, value in evidence.counters:
        if name.endswith(RING_COUNTER) and window[0] <= at_us <= window[1]:
            ready[name.removesuffix(RING_COUNTER)].append(value)
    return {
        name: RingState(
            evidence.depths.get(name), float(np.mean(values)), sum(value == 0 for value in values) / len(values)
        )
        for name, values in ready.items()
    }


def step_times(evidence: Evidence) -> list[StepTime]:
    """The steps that count, numbered as in the spans: as measured, or else from the spans of the model lane."""
    spanned = _spanned_steps(evidence.spans)
    steps = list(evidence.steps)
    if steps and len(steps) == len(spanned):  # a clock may have counted from another step
        shift = spanned[-1].step - steps[-1].step
        steps = [step._replace(step=step.step + shift) for step in steps]
    return warm(steps or spanned, evidence.warmup_steps)


def _spanned_steps(spans: Iterable[Span]) -> list[StepTime]:
    work: defaultdict[int, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_us):
        if span.name in MODEL_STAGES:
            work[span.batch].append(span)
    steps: list[StepTime] = []
    before_us: int | None = None
    for number, parts in work.items():
        start, last = parts[0].start_us, max(map(end_us, parts))
        gap_us = 0 if before_us is None else max(start - before_us, 0)
        steps.append(StepTime(number, (last - start + gap_us) / 1000, gap_us / 1000))
        before_us = last
    return steps


def warm(steps: Sequence[StepTime], warmup_steps: int) -> list[StepTime]:
    """Without the first ones, unless hardly any would be left."""
    return list(steps[warmup_steps:] if len(steps) >= warmup_steps + 2 else steps)


def utilisations(readings: Iterable[Reading]) -> dict[int, float]:
    """The mean of what the driver calls utilisation, by GPU; those that tell none are absent."""
    told: defaultdict[int, list[float]] = defaultdict(list)
    for reading in readings:
        if reading.utilisation is not None:
            told[reading.gpu].append(reading.utilisation)
    return {gpu: float(np.mean(values)) for gpu, values in told.items()}


def _stage_time(spans: Sequence[Span], window: Interval) -> StageTime:
    lengths_ms = np.array([span.duration_us for span in spans]) / 1000
    mean_ms, median_ms = float(lengths_ms.mean()), float(np.median(lengths_ms))
    is_long = lengths_ms > LONG * median_ms
    busy_us = length_us(merged((max(span.start_us, window[0]), end_us(span)) for span in spans))
    total_ms = float(lengths_ms.sum()) or 1.0
    return StageTime(
        num_batches=len(spans),
        mean_ms=mean_ms,
        median_ms=median_ms,
        longest_ms=float(lengths_ms.max()),
        cv=float(lengths_ms.std()) / mean_ms if mean_ms else 0.0,
        workers=len({span.track for span in spans}),
        busy_share=busy_us / max(window[1] - window[0], 1),
        long_share=float(is_long.mean()),
        long_time_share=float(lengths_ms[is_long].sum()) / total_ms,
    )
