"""What evidence amounts to, before anybody judges it: all measures of a verdict, computed once."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from myxtts.config import Settings
from myxtts.observe.nvml import Reading
from myxtts.observe.trace import WARMUP_STEPS, Counter, Span, StepTime, idle_share, outliers, step_timing

DATA_STAGES = ("gather", "upload", "encode", "handoff")
"""In the order in which a batch passes them."""
GPU_STAGES = DATA_STAGES[1:]
"""Those that work on the data GPU, where there is one; on the CPU all of them use the processor."""
MODEL_STAGES = ("train", "update")
"""What the model stream does; the number of such a span is that of its step, not of its batch."""
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
    """Of the spans of the model stream, the share in which a kernel ran and none had yet to be launched."""
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
    """The steps that count, numbered as in the spans: as measured, or else from the spans of the model stream."""
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


SHARES = ("compute", "wait", "copy", "host", "other")
COPIES = ("upload", "handoff")
UNKNOWN_STAGE = "feed"
"""What a batch waited for of which no stage left a span."""
PAUSES = {"save": "save_step", "validate": "val_step"}
"""What a trainer does between steps on purpose, as spans call it, and the setting that says how often."""


@dataclass
class Division:
    """The time of the steps that count; the shares add to 1."""

    window: Interval = (0, 0)
    num_batches: int = 0
    busy: float = 0.0
    """Share of the time in which the model stream had work, whether or not a kernel ran."""
    shares: dict[str, float] = field(default_factory=dict)
    """compute; wait: for a batch; copy: for its way between memories; host: for the program; other: pauses."""
    waits: dict[str, float] = field(default_factory=dict)
    """Share of the time in which the model waited for each stage; they add to `wait` and `copy`."""
    at_work: dict[str, float] = field(default_factory=dict)
    """While the model waited for a stage: the share in which that stage was at work at all, on any batch."""
    pauses_ms: dict[str, float] = field(default_factory=dict)
    """Mean length of a pause, by what it was for."""
    waited_for: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Of the steps that waited: the stage that they waited for longest, and how many ms."""

    @property
    def fed(self) -> float:
        """Share of the time that a perfect feed would save."""
        return self.shares.get("wait", 0.0) + self.shares.get("copy", 0.0)


def divide(evidence: Evidence) -> Division:
    """The division of the steps that count; from step times alone when there are no spans of the model stream."""
    stream = _ModelLane(evidence)
    if len(stream.work) < 2:
        steps = step_times(evidence)
        if not steps:
            return Division()
        idle = idle_share(steps)
        shares = dict.fromkeys(SHARES, 0.0) | {"compute": 1 - idle, "wait": idle}
        return Division(busy=1 - idle, shares=shares, waits={UNKNOWN_STAGE: idle})
    stream.follow()
    return stream.division()


class _ModelLane:
    """The spans of the model stream, and what is found in the gaps between them."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        work = sorted(
            (span for span in evidence.spans if span.name in MODEL_STAGES), key=lambda span: span.start_us
        )
        numbers = list(dict.fromkeys(span.batch for span in work))
        first = numbers[evidence.warmup_steps] if len(numbers) >= evidence.warmup_steps + 2 else None
        skipped = next((place for place, span in enumerate(work) if span.batch == first), 0)
        self.work = work[skipped:]
        if not self.work:
            return
        self._start_us = max(map(end_us, work[:skipped]), default=self.work[0].start_us)
        self._busy_us = 0
        self._blamed: defaultdict[str, list[Interval]] = defaultdict(list)
        self._idle: defaultdict[str, list[Interval]] = defaultdict(list)
        """Gaps that no batch explains: `host`, or a pause."""
        self._waited: dict[int, dict[str, int]] = {}
        self._waits = _waits_of(work, [span for span in evidence.spans if span.name == "wait"])
        self._stages: defaultdict[int, dict[str, Span]] = defaultdict(dict)
        for span in evidence.spans:
            if span.name in DATA_STAGES:
                self._stages[span.batch][span.name] = span
        self._at_work = {name: self._union(name) for name in DATA_STAGES}
        self._pauses = {name: self._union(name) for name in PAUSES}
        self._num_batches = sum(span.name == "train" for span in self.work)
        self._in_the_way = self._spans_in_the_way()
        self._copies_hold_up_encoding = self._has_slow_copies()

    def follow(self) -> None:
        """Walk along the stream."""
        at_us = self._start_us
        for span in self.work:
            if span.start_us > at_us:
                self._look_into((at_us, span.start_us), span)
            start, end = max(span.start_us, at_us), max(end_us(span), at_us)
            self._busy_us += end - start
            at_us = end
        self._end_us = at_us

    def division(self) -> Division:
        """What was found, as shares."""
        total_us = max(self._end_us - self._start_us, 1)
        told = self._evidence.kernel_share
        kernel_share = 1.0 if told is None else min(told, 1.0)
        self._settle_unknown()
        waits = {stage: length_us(found) / total_us for stage, found in self._blamed.items()}
        busy = self._busy_us / total_us
        compute = kernel_share * busy
        copy = sum(share for stage, share in waits.items() if stage in COPIES)
        host = length_us(self._idle["host"]) / total_us + (1 - kernel_share) * busy
        shares = {"compute": compute, "wait": sum(waits.values()) - copy, "copy": copy, "host": host}
        shares["other"] = max(1 - sum(shares.values()), 0.0)
        pauses = {name: merged(self._idle[name]) for name in PAUSES if self._idle[name]}
        return Division(
            window=(self._start_us, self._end_us),
            num_batches=self._num_batches,
            busy=busy,
            shares=shares,
            waits=waits,
            at_work={stage: self._share_at_work(stage, found) for stage, found in self._blamed.items()},
            pauses_ms={name: length_us(found) / 1000 / len(found) for name, found in pauses.items()},
            waited_for={step: _longest_ms(found) for step, found in self._waited.items()},
        )

    def _look_into(self, gap: Interval, span: Span) -> None:
        """Say what a gap before a span of the stream was for."""
        wait = self._waits.get(span)
        stages = self._stages.get(wait.batch, {}) if wait is not None else {}
        late = [(wait.start_us, end_us(wait))] if wait is not None else []
        late += [(gap[0], max(map(end_us, stages.values())))] if stages else []
        late = _inside(merged(late), gap)
        if wait is not None and late:
            culprit = self._culprit(wait.batch)
            self._blamed[culprit] += late
            waited = self._waited.setdefault(span.batch, {})
            waited[culprit] = waited.get(culprit, 0) + length_us(late)
        rest = _without(gap, late)
        for name, pauses in self._pauses.items():
            self._idle[name] += [part for free in rest for part in _inside(pauses, free)]
            rest = [part for free in rest for part in _without(free, _inside(pauses, free))]
        for stage, blocking in self._in_the_way.items():
            if held_up := [part for free in rest for part in _inside(blocking, free)]:
                self._blamed[stage] += held_up
                waited = self._waited.setdefault(span.batch, {})
                waited[stage] = waited.get(stage, 0) + length_us(held_up)
            rest = [part for free in rest for part in _without(free, _inside(blocking, free))]
        self._idle[self._reason(span)] += rest

    def _culprit(self, batch: int) -> str:
        """The stage that made a batch late: the last one that still had the batch before when this one arrived."""
        stages, before = self._stages.get(batch, {}), self._stages.get(batch - 1, {})
        present = [name for name in DATA_STAGES if name in stages]
        for previous, name in reversed(list(pairwise(present))):
            held_up = name == "encode" and self._copies_hold_up_encoding
            if name in before and end_us(stages[previous]) < end_us(before[name]) and not held_up:
                return name
        recorded = [name for name in DATA_STAGES if self._at_work[name]]
        return present[0] if present and present[0] == recorded[0] else UNKNOWN_STAGE

    def _settle_unknown(self) -> None:
        """Batches whose first spans are older than the trace waited for what the others waited for."""
        known = {stage: length_us(found) for stage, found in self._blamed.items() if stage != UNKNOWN_STAGE}
        if known and UNKNOWN_STAGE in self._blamed:
            most = max(known, key=lambda stage: known[stage])
            self._blamed[most] += self._blamed.pop(UNKNOWN_STAGE)
            for waited in self._waited.values():
                if UNKNOWN_STAGE in waited:
                    waited[most] = waited.pop(UNKNOWN_STAGE)

    def _reason(self, span: Span) -> str:
        """What is likely to have filled a gap in which the batch was ready."""
        if span.name != "train" or span.batch <= 0 or any(self._pauses.values()):
            return "host"
        training = self._evidence.settings.training
        due = [name for name, setting in PAUSES.items() if span.batch % getattr(training, setting) == 0]
        return due[0] if due else "host"

    def _spans_in_the_way(self) -> dict[str, list[Interval]]:
        """Work of the data role that holds up the model stream, because it was told not to overlap.

        The driver stages a copy from pageable memory in pieces, and no other thread launches kernels meanwhile.
        """
        data = self._evidence.settings.data
        if self._evidence.model_gpu is None or self._evidence.is_dual:
            return {}
        names = [] if data.optimize_cpu_gpu_overlap else ["encode"]
        names += [] if data.enhanced_gpu_prefetch else ["upload"]
        return {name: self._at_work[name] for name in names}

    def _has_slow_copies(self) -> bool:
        """True if uploads share the front end's stream and take more of its time than encoding."""
        if self._evidence.model_gpu is None or self._evidence.settings.data.enhanced_gpu_prefetch:
            return False
        uploads = self._at_work["upload"]
        encoding_us = sum(length_us(_without(span, _inside(uploads, span))) for span in self._at_work["encode"])
        return length_us(uploads) > encoding_us

    def _union(self, name: str) -> list[Interval]:
        """When anything of this name was done."""
        return merged((span.start_us, end_us(span)) for span in self._evidence.spans if span.name == name)

    def _share_at_work(self, stage: str, blamed: Sequence[Interval]) -> float:
        at_work_us = sum(length_us(_inside(self._at_work.get(stage, []), interval)) for interval in blamed)
        return at_work_us / max(length_us(blamed), 1)


def _longest_ms(waited_us: dict[str, int]) -> tuple[str, float]:
    stage = max(waited_us, key=lambda name: waited_us[name])
    return stage, waited_us[stage] / 1000


def _waits_of(work: Sequence[Span], waits: Sequence[Span]) -> dict[Span, Span]:
    """The host's wait for the batch of each training span: both follow in the same order.

    A trace still being written ends in waits ahead of the device; one that overflowed lost its first waits.
    """
    trained = [span for span in work if span.name == "train"]
    waits = sorted(waits, key=lambda wait: wait.start_us)
    if len(waits) > len(trained):
        return dict(zip(trained, waits, strict=False))
    return dict(zip(reversed(trained), reversed(waits), strict=False))


def _inside(intervals: Sequence[Interval], bounds: Interval) -> list[Interval]:
    """The parts of sorted, separate intervals that lie inside of bounds."""
    return list(_clipped(intervals, bounds))


def _clipped(intervals: Sequence[Interval], bounds: Interval) -> Iterator[Interval]:
    for place in range(max(bisect_right(intervals, bounds) - 1, 0), len(intervals)):
        start, end = intervals[place]
        if start >= bounds[1]:
            return
        if end > bounds[0]:
            yield max(start, bounds[0]), min(end, bounds[1])


def _without(bounds: Interval, taken: Sequence[Interval]) -> list[Interval]:
    """What is left of bounds outside of sorted intervals that lie inside of them."""
    edges = [bounds[0], *(edge for interval in taken for edge in interval), bounds[1]]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]


LEAST_DEPTH, LEAST_CORRELATION = 0.3, 0.4
"""Of a cycle that is worth a word: between busy and idle, and of the series with itself one period later."""
FEWEST_SAMPLES, FEWEST_CYCLES = 16, 3
GROWTH_SHARE, GROWTH_MB = 0.02, 16.0
"""Memory that grew by less, in either measure, did not grow."""

Series = npt.NDArray[np.float64]


class Oscillation(NamedTuple):
    """A cycle of busy and idle."""

    period_s: float
    depth: float
    """Between its busy and its idle parts; 1 is from fully busy to fully idle."""
    source: str
    """`spans`, which are exact, or `nvml`, which sees only cycles slower than a second or so."""


class Outlier(NamedTuple):
    """A step that took more than twice the median, and why."""

    step: int
    step_ms: float
    reason: str


@dataclass(frozen=True)
class Variation:
    """How step times vary."""

    cv: float
    steady_cv: float
    """Without the outliers."""
    outliers: list[Outlier]

    def excess(self, reasons: Sequence[str], steps: Sequence[StepTime]) -> float:
        """Share of the time of these steps by which outliers with such reasons exceeded the median."""
        timing = step_timing(steps)
        excess_ms = sum(found.step_ms - timing.median_ms for found in self.outliers if found.reason in reasons)
        return excess_ms / (timing.mean_ms * timing.count) if timing.mean_ms else 0.0


def busy_cycle(busy: Sequence[Interval], window: Interval, step_ms: float) -> Oscillation | None:
    """The cycle in the work of a stream, if it has one that is longer than some steps."""
    bin_us = max(2000 * step_ms, 1.0)  # two steps: what repeats within a step is no cycle of the pipeline
    num_bins = int((window[1] - window[0]) / bin_us)
    union = merged(busy)
    if num_bins < FEWEST_SAMPLES or not union:
        return None
    edges = window[0] + bin_us * np.arange(num_bins + 1)
    times = np.array(union, dtype=np.float64).ravel()
    lengths = np.diff(np.array(union, dtype=np.float64), axis=1).ravel()
    done = np.repeat(np.concatenate([[0.0], np.cumsum(lengths)]), 2)[1:-1]
    shares = np.diff(np.interp(edges, times, done)) / bin_us
    return _cycle(shares, bin_us / 1e6, "spans")


def utilisation_cycle(readings: Sequence[Reading]) -> Oscillation | None:
    """The cycle in what the driver calls the utilisation of one GPU."""
    told = [(reading.at_us, reading.utilisation) for reading in readings if reading.utilisation is not None]
    if len(told) < FEWEST_SAMPLES:
        return None
    period_us = (told[-1][0] - told[0][0]) / (len(told) - 1)
    return _cycle(np.array([share for _, share in told], dtype=np.float64), period_us / 1e6, "nvml")


def variation(steps: Sequence[StepTime], reason_of: Callable[[StepTime, float], str]) -> Variation:
    """How these steps vary; `reason_of` explains an outlier, given the median in ms."""
    timing, unusual = step_timing(steps), outliers(steps)
    steady = step_timing(step for step in steps if step not in unusual)
    found = [Outlier(step.step, step.step_ms, reason_of(step, timing.median_ms)) for step in unusual]
    return Variation(timing.cv, steady.cv, found)


def growth_mb(used_mb: Sequence[float]) -> float:
    """How much memory grew over these samples; 0 unless it did so steadily, for one jump is no leak."""
    if len(used_mb) < FEWEST_SAMPLES:
        return 0.0
    quarter = len(used_mb) // 4
    quarters = [float(np.median(used_mb[part * quarter : (part + 1) * quarter])) for part in range(4)]
    risen = quarters[-1] - quarters[0]
    steadily = all(later > earlier for earlier, later in pairwise(quarters))
    return risen * 4 / 3 if steadily and risen > max(GROWTH_MB, GROWTH_SHARE * quarters[0]) else 0.0


def _cycle(shares: Series, sample_s: float, source: str) -> Oscillation | None:
    """The period after which a series resembles itself most; autocorrelation by FFT."""
    count = len(shares)
    low, high = np.quantile(shares, [0.1, 0.9])
    if high - low < LEAST_DEPTH:
        return None
    centred = shares - shares.mean()
    power = np.abs(np.fft.rfft(centred, 2 * count)) ** 2
    likeness = np.fft.irfft(power)[:count] * count / (count - np.arange(count))
    likeness /= likeness[0]
    below = np.flatnonzero(likeness < 0)
    longest = count // FEWEST_CYCLES
    if not len(below) or below[0] >= longest:
        return None
    lags = np.arange(below[0], longest + 1)
    best = float(likeness[lags].max())
    if best < LEAST_CORRELATION:
        return None
    peaks = (lag for lag in lags if likeness[lag] >= 0.8 * best and likeness[lag] >= likeness[lag + 1])
    return Oscillation(float(next(peaks, lags[-1])) * sample_s, float(high - low), source)


WAITED = "waited for "
LEAST_LOSS = 0.05
"""Share of the time that must be lost to something before it, and not the training itself, is the limit."""
FEWEST_STEPS = 10
"""Steps on either side that tell whether training is slower beside the pipeline than alone."""
MOST_TAKEN = 2.0
"""A stage can hold up training while it works, and a little longer: caches, clocks. What is lost beyond this
multiple of that time was taken by something else."""


class Competition(NamedTuple):
    """What the pipeline takes from the training step on a device that they share."""

    longer: float
    """By how much a step beside it exceeds one alone, as a share of the latter."""
    cost: float
    """Share of the time."""


@dataclass(frozen=True)
class Facts:
    """The measures of one verdict."""

    evidence: Evidence
    division: Division
    stages: dict[str, StageTime]
    rings: dict[str, RingState]
    steps: list[StepTime]
    variation: Variation
    oscillation: Oscillation | None
    recompilations: int
    growth_mb: dict[str, float]
    """By role, over the steps that count; empty when nothing grew."""
    utilisation: dict[int, float]
    """By GPU, as the driver tells it."""
    flops_share: float | None
    """Of what a large matrix product reaches on this GPU."""
    competition: Competition | None
    """None when there is none, or when it cannot be told from the noise of the machine."""
    headspace: float | None
    """Speed with a perfect feed as a multiple of the present one."""
    bound: str
    """What decides the speed: a data stage, `host`, a pause, or `train`; empty when nothing was measured."""

    @property
    def is_measured(self) -> bool:
        """Whether there was anything to look at."""
        return bool(self.division.shares)

    @property
    def batch_ms(self) -> float:
        """Mean time between two batches, pauses left out."""
        (start, end), count = self.division.window, self.division.num_batches
        return (end - start) / 1000 * (1 - self.division.shares["other"]) / count if count else 0.0

    @property
    def train_ms(self) -> float:
        """What training on a batch takes without any wait for it."""
        (start, end), count = self.division.window, self.division.num_batches
        busy = self.division.shares["compute"] + self.division.shares["host"]
        return (end - start) / 1000 * busy / count if count else 0.0

    def gain_without(self, stage: str, period_ms: float = 0.0) -> float:
        """Speed if the model never waited for a stage, or one with such a period, as far as the others let it."""
        others = [time.period_ms for name, time in self.stages.items() if name not in (stage, *MODEL_STAGES)]
        slowest_ms = max([*others, self.train_ms, period_ms])
        gain = 1 / max(1 - self.division.waits.get(stage, 0.0), 0.01)
        gain = min(gain, self.batch_ms / slowest_ms) if slowest_ms else gain
        if self.evidence.replayed and self.headspace is not None:
            gain = min(gain, self.headspace)
        return max(gain, 1.0)


def establish(evidence: Evidence) -> Facts:
    """All measures of this evidence."""
    division, steps = divide(evidence), step_times(evidence)
    recompilations, compiled_at = _recompiled(evidence, division)
    recompilations = recompilations if evidence.recompilations is None else evidence.recompilations
    varied = variation(steps, _reasons(evidence, division, compiled_at, recompilations))
    competition = _competition(evidence, division, steps)
    return Facts(
        evidence=evidence,
        division=division,
        stages=stage_times(evidence.spans, division.window),
        rings=ring_states(evidence, division.window),
        steps=steps,
        variation=varied,
        oscillation=_oscillation(evidence, division, steps),
        recompilations=recompilations,
        growth_mb=_growth(evidence, division),
        utilisation=utilisations(_readings_inside(evidence, division)),
        flops_share=_flops_share(evidence, steps),
        competition=competition,
        headspace=_headspace(evidence, division, steps, varied, competition),
        bound=_bound(division),
    )


def _bound(division: Division) -> str:
    if not division.shares:
        return ""
    slowest = max(division.waits, key=lambda stage: division.waits[stage], default=UNKNOWN_STAGE)
    lost = {slowest: division.fed, "host": division.shares["host"]}
    lost |= dict.fromkeys(list(division.pauses_ms)[:1], division.shares["other"])
    worst = max(lost, key=lambda name: lost[name])
    return worst if lost[worst] >= LEAST_LOSS else "train"


def _recompiled(evidence: Evidence, division: Division) -> tuple[int, set[int]]:
    """How many graphs were compiled inside the window, and the steps around those moments."""
    ends = sorted((end_us(span), span.batch) for span in evidence.spans if span.name == "update")
    samples = [sample for sample in evidence.counters if sample.name == RECOMPILED_COUNTER]
    count, around = 0, set[int]()
    for before, after in pairwise(samples):
        if after.value > before.value and division.window[0] < after.at_us <= division.window[1]:
            count += int(after.value - before.value)
            place = bisect_right(ends, (after.at_us, -1))  # on the CPU the step has ended, on a GPU it has not
            around |= {step for _, step in ends[max(place - 1, 0) : place + 1]}
    return count, around


def _reasons(
    evidence: Evidence, division: Division, compiled_at: set[int], recompilations: int
) -> Callable[[StepTime, float], str]:
    """Explains why a step took long."""
    training = evidence.settings.training

    def reason_of(step: StepTime, median_ms: float) -> str:
        most_ms = (step.step_ms - median_ms) / 2
        stage, waited_ms = division.waited_for.get(step.step, ("", 0.0))
        if step.step in compiled_at:
            return "recompilation"
        if waited_ms > most_ms:
            return f"{WAITED}{stage}"
        if step.step > 0 and any(step.step % getattr(training, setting) == 0 for setting in PAUSES.values()):
            return "saving or validation"
        if recompilations and not compiled_at:
            return "recompilation"
        return "the host was late" if step.gap_ms > most_ms else "unexplained"

    return reason_of


def _oscillation(evidence: Evidence, division: Division, steps: list[StepTime]) -> Oscillation | None:
    busy = [
        (span.start_us, end_us(span))
        for span in evidence.spans
        if span.name in MODEL_STAGES or span.name in PAUSES
    ]
    found = busy_cycle(busy, division.window, step_timing(steps).median_ms)
    return found or utilisation_cycle(
        [r for r in _readings_inside(evidence, division) if r.gpu == evidence.model_gpu]
    )


def _growth(evidence: Evidence, division: Division) -> dict[str, float]:
    """From the samples of the allocator or, without any, from what the driver says is used."""
    used: defaultdict[str, list[float]] = defaultdict(list)
    for name, at_us, value in evidence.counters:
        if name.endswith(ALLOCATED_COUNTER) and division.window[0] <= at_us <= division.window[1]:
            used[name.removesuffix(ALLOCATED_COUNTER)].append(value)
    if not used:
        roles = {evidence.data_gpu: "data", evidence.model_gpu: "model" if evidence.is_dual else "gpu"}
        for reading in _readings_inside(evidence, division):
            if reading.memory_used_mb is not None and reading.gpu in roles:
                used[roles[reading.gpu]].append(reading.memory_used_mb)
    return {role: grown for role, values in used.items() if (grown := growth_mb(values))}


def _readings_inside(evidence: Evidence, division: Division) -> list[Reading]:
    start, end = division.window
    return [reading for reading in evidence.readings if start == end or start <= reading.at_us <= end]


def _flops_share(evidence: Evidence, steps: list[StepTime]) -> float | None:
    step_ms = step_timing(steps).mean_ms
    if evidence.flops_per_step is None or not evidence.peak_flops or not step_ms:
        return None
    return evidence.flops_per_step / (step_ms / 1000) / evidence.peak_flops


def _competition(evidence: Evidence, division: Division, steps: list[StepTime]) -> Competition | None:
    """What the medians lose, gaps left out, if chance and the noise of the machine do not explain it.

    All but the fastest quarter of the steps beside the pipeline must take longer than all but the slowest quarter
    of those alone, and the loss must not exceed what the stages on their device can have taken.
    """
    beside = _work_ms(evidence, division, steps)
    alone = _without_gaps_ms(warm(evidence.replayed, evidence.warmup_steps))
    if evidence.is_dual or min(len(beside), len(alone)) < FEWEST_STEPS:
        return None
    if np.quantile(beside, 0.25) <= np.quantile(alone, 0.75):
        return None
    found = Competition(
        longer=median(beside) / max(median(alone), 1e-9) - 1,
        cost=division.busy * (1 - median(alone) / median(beside)),
    )
    names = GPU_STAGES if evidence.model_gpu is not None else DATA_STAGES
    most = MOST_TAKEN * busy_share(evidence.spans, names, division.window)
    return found if LEAST_LOSS <= found.cost <= most else None


def _work_ms(evidence: Evidence, division: Division, steps: list[StepTime]) -> list[float]:
    """What the model stream does for each step, without the gaps."""
    work_us: defaultdict[int, int] = defaultdict(int)
    for span in evidence.spans:
        if span.name in MODEL_STAGES and span.start_us >= division.window[0]:
            work_us[span.batch] += span.duration_us
    return [length_us / 1000 for length_us in work_us.values()] or _without_gaps_ms(steps)


def _without_gaps_ms(steps: Sequence[StepTime]) -> list[float]:
    return [step.step_ms - step.gap_ms for step in steps]


def _headspace(
    evidence: Evidence,
    division: Division,
    steps: list[StepTime],
    varied: Variation,
    competition: Competition | None,
) -> float | None:
    """Measured by replaying, or else what the waits amount to; steps late for another reason are left out.

    On a CPU, which other programs use too, steps that were faster alone for no reason that shows are noise.
    """
    others = {found.step for found in varied.outliers if not found.reason.startswith(WAITED)}
    real = step_timing(step for step in steps if step.step not in others)
    alone = warm(evidence.replayed, evidence.warmup_steps)
    unusual = set(outliers(alone))
    replayed = step_timing(step for step in alone if step not in unusual)
    if replayed.mean_ms and evidence.model_gpu is not None:
        return max(real.mean_ms / replayed.mean_ms, 1.0)
    if replayed.mean_ms:
        lost = division.fed + division.shares.get("host", 0.0) + (competition.cost if competition else 0.0)
        worked = 1 - division.shares.get("other", 0.0)
        most = 1 / max(1 - lost / max(worked, 0.01), 0.01)
        return max(min(real.mean_ms / replayed.mean_ms, most), 1.0)
    return 1 / max(1 - division.fed, 0.01) if division.shares else None
