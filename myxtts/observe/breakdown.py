"""Where the time of measured training steps goes: shares, waits, variation, oscillation, headroom.

`Breakdown` turns what was recorded into numbers; `diagnosis` says what they mean.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from statistics import median
from typing import NamedTuple

import numpy as np

from myxtts.config import Settings
from myxtts.observe.nvml import Reading
from myxtts.observe.trace import Counter, Span, StepTime, Timing, outliers, step_timing

DATA_PHASES, UNKNOWN_PHASE = ("gather", "upload", "encode", "handoff"), "feed"
"""In the order in which a batch passes them, and a name for a phase without spans."""
GPU_PHASES = DATA_PHASES[1:]
"""The phases that run on the data GPU, if there is one; without a GPU all of them use the processor."""
MODEL_PHASES = ("train", "update")
"""The work of the model stream; `batch` of such a span is the number of its step."""
COPIES = ("upload", "handoff")
RING_COUNTER = " ring"  # `host ring` counts the batches that are ready in that ring
ALLOCATED_COUNTER = " allocated MB"  # `model allocated MB` is the memory of that role, once per step

LONG_FACTOR = 4.0  # a batch that takes this many times the median is long
MIN_LOSS = 0.05
"""Share of the time that must be lost to something before it, and not training itself, is the bottleneck."""
MIN_STEPS = 10  # steps with and without the feed that are needed to compare them
MAX_CONTENTION = 2.0
"""A phase slows training while it runs, and a little longer because of caches and clocks. A loss above this
multiple of its running time has another cause."""
MIN_DEPTH, MIN_CORRELATION = 0.3, 0.4
"""Limits of an oscillation: its depth, and the correlation of the series with itself one period later."""
MIN_SAMPLES, MIN_CYCLES = 16, 3
MIN_GROWTH_SHARE, MIN_GROWTH_MB = 0.02, 16.0  # memory that grew by less, in either measure, did not grow
WAITED = "waited for "

Interval = tuple[int, int]  # start and end in microseconds of the host clock


@dataclass(frozen=True, kw_only=True)
class ProfileData:
    """The record of some steps of one stage after the warm-up, with their settings and machine."""

    spans: Sequence[Span] = ()
    counters: Sequence[Counter] = ()
    replayed: Sequence[StepTime] = ()  # steps that repeat one batch: the speed of a perfect feed
    settings: Settings = field(default_factory=Settings)
    depths: Mapping[str, int] = field(default_factory=dict)  # depth of each ring, by name
    readings: Sequence[Reading] = ()
    no_readings: str = ""  # the reason why there are no readings
    data_gpu: int | None = None
    model_gpu: int | None = None  # PyTorch's indices, equal if the roles share a GPU; None on the CPU
    num_gpus: int = 0
    cores: int = 0  # usable cores; 0 if unknown
    recompilations: int = 0  # graphs compiled during these steps
    kernel_share: float | None = None  # share of the model stream's spans in which a kernel runs
    syncs_per_step: float | None = None  # how often the host waits for the device inside a step
    flops_per_step: float | None = None  # useful floating-point operations
    peak_flops: float | None = None  # operations per second of a large matrix product on this GPU
    ran_out_of_memory: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.model_gpu is not None

    @property
    def is_dual(self) -> bool:
        return self.on_gpu and self.data_gpu != self.model_gpu


@dataclass(frozen=True)
class PhaseTime(Timing):
    """How long a phase takes for a batch."""

    workers: int = 1  # threads or streams that work in parallel
    busy_share: float = 0.0  # share of the time in which at least one of them works
    long_share: float = 0.0  # share of the batches that take more than `LONG_FACTOR` times the median
    long_time_share: float = 0.0  # share of the phase's working time that these batches take

    @property
    def period_ms(self) -> float:
        """Time between two batches if this phase is the bottleneck."""
        return self.mean_ms / max(self.workers, 1)


@dataclass(frozen=True)
class RingState:
    """How full a ring was when the trainer took a batch."""

    depth: int | None
    mean_ready: float
    empty_share: float

    @property
    def is_full(self) -> bool:
        return self.depth is not None and self.mean_ready > 0.9 * self.depth


@dataclass(frozen=True)
class Oscillation:
    """A cycle of busy and idle."""

    period_s: float
    depth: float  # 1 is from fully busy to fully idle
    source: str  # `spans`, which are exact, or `nvml`, which sees only cycles slower than a second or so


@dataclass(frozen=True)
class Outlier:
    """A step that took more than twice the median, and why."""

    step: int
    step_ms: float
    reason: str


class Contention(NamedTuple):
    """The relative slowdown of steps by a feed on the same device, and its cost as a share of the time."""

    slowdown: float
    cost: float


@dataclass(frozen=True)
class Breakdown:
    """The numbers of one profile, each computed when it is first read. Shares are of the time of its steps."""

    data: ProfileData

    @cached_property
    def window(self) -> Interval:
        """From the first to the last work of the model stream; empty if fewer than two spans were recorded."""
        return (self._work[0].start_us, max(map(end_us, self._work))) if self._work else (0, 0)

    @cached_property
    def shares(self) -> dict[str, float]:
        """compute; wait for a batch; copy between memories; host: late launches. They add to 1."""
        if not self._work:
            return {}
        copy = sum(share for phase, share in self.waits.items() if phase in COPIES)
        kernel_share = 1.0 if self.data.kernel_share is None else min(self.data.kernel_share, 1.0)
        late = length_us(self._lost.get("host", ())) / self._total_us
        shares = {"compute": kernel_share * self._busy, "wait": sum(self.waits.values()) - copy, "copy": copy}
        shares["host"] = late + (1 - kernel_share) * self._busy
        return shares

    @cached_property
    def waits(self) -> dict[str, float]:
        """Share of the time in which the model waited for each phase."""
        feed = (*DATA_PHASES, UNKNOWN_PHASE)
        return {name: length_us(gaps) / self._total_us for name, gaps in self._lost.items() if name in feed}

    @property
    def starved(self) -> float:
        """Share of the time that a perfect feed would save."""
        return self.shares.get("wait", 0.0) + self.shares.get("copy", 0.0)

    @cached_property
    def bound(self) -> str:
        """The bottleneck: a data phase, `host` or `train`; empty if nothing was measured."""
        if not self.shares:
            return ""
        slowest = max(self.waits, key=lambda phase: self.waits[phase], default=UNKNOWN_PHASE)
        lost = {slowest: self.starved, "host": self.shares["host"]}
        worst = max(lost, key=lambda name: lost[name])
        return worst if lost[worst] >= MIN_LOSS else "train"

    @cached_property
    def phases(self) -> dict[str, PhaseTime]:
        return phase_times(self.data.spans, self.window)

    def active_share(self, phase: str) -> float:
        """Return the share of the wait for a phase in which that phase worked on any batch; 1 without a wait."""
        waited = self._lost.get(phase, [])
        worked = _split(waited, _union(self.data.spans, (phase,)))[0]
        return length_us(worked) / length_us(waited) if waited else 1.0

    @cached_property
    def rings(self) -> dict[str, RingState]:
        return {
            name: RingState(self.data.depths.get(name), float(np.mean(ready)), ready.count(0) / len(ready))
            for name, ready in self._samples(RING_COUNTER).items()
        }

    @property
    def batch_ms(self) -> float:
        """Mean time between two batches."""
        return self._per_batch_ms(1.0)

    @property
    def train_ms(self) -> float:
        """Time that training on a batch takes, without any wait."""
        return self._per_batch_ms(self.shares.get("compute", 0.0) + self.shares.get("host", 0.0))

    def _per_batch_ms(self, share: float) -> float:
        num_batches = sum(span.name == "train" for span in self._work)
        return self._total_us / 1000 * share / num_batches if num_batches else 0.0

    def gain_without(self, phase: str, period_ms: float = 0.0) -> float:
        """Return the speedup without waits for a phase, or with this period, as far as other limits allow."""
        others = [time.period_ms for name, time in self.phases.items() if name not in (phase, *MODEL_PHASES)]
        slowest_ms = max([*others, self.train_ms, period_ms])
        gain = 1 / max(1 - self.waits.get(phase, 0.0), 0.01)
        gain = min(gain, self.batch_ms / slowest_ms) if slowest_ms else gain
        if self.headroom_measured and self.headroom is not None:
            gain = min(gain, self.headroom)
        return max(gain, 1.0)

    @cached_property
    def steps(self) -> list[StepTime]:
        """The steps, from the spans of the model stream."""
        work: defaultdict[int, list[Span]] = defaultdict(list)
        for span in self._work:
            work[span.batch].append(span)
        steps, before_us = list[StepTime](), self.window[0]
        for number, parts in work.items():
            start, last = parts[0].start_us, max(map(end_us, parts))
            gap_ms = max(start - before_us, 0) / 1000
            steps.append(StepTime(number, (last - start) / 1000 + gap_ms, gap_ms))
            before_us = last
        return steps

    @cached_property
    def step_cv(self) -> float:
        return step_timing(self.steps).cv

    @cached_property
    def steady_cv(self) -> float:
        """Coefficient of variation without the outliers."""
        unusual = {outlier.step for outlier in self.outliers}
        return step_timing(step for step in self.steps if step.step not in unusual).cv

    @cached_property
    def outliers(self) -> list[Outlier]:
        median_ms = step_timing(self.steps).median_ms
        return [
            Outlier(step.step, step.step_ms, self._reason(step, (step.step_ms - median_ms) / 2))
            for step in outliers(self.steps)
        ]

    def _reason(self, step: StepTime, half_excess_ms: float) -> str:
        waited_us: defaultdict[str, int] = defaultdict(int)
        for number, cause, interval in self._gaps:
            if number == step.step and cause in self.waits:
                waited_us[cause] += length_us([interval])
        phase = max(waited_us, key=lambda name: waited_us[name], default="")
        if waited_us[phase] / 1000 > half_excess_ms:
            return f"{WAITED}{phase}"
        if self.data.recompilations:
            return "recompilation"
        return "the host was late" if step.gap_ms > half_excess_ms else "unexplained"

    def excess_share(self, reason: str) -> float:
        """Return the share of the time by which outliers with this reason exceed the median step."""
        timing = step_timing(self.steps)
        excess_ms = sum(found.step_ms - timing.median_ms for found in self.outliers if found.reason == reason)
        return excess_ms / (timing.mean_ms * timing.count) if timing.mean_ms else 0.0

    @cached_property
    def oscillation(self) -> Oscillation | None:
        """The cycle in the work of the model stream or else in the driver's utilisation, if there is one."""
        bin_us = max(round(2000 * step_timing(self.steps).median_ms), 1)  # two steps: the feed cycles no faster
        bins = pairwise(range(self.window[0], self.window[1] + 1, bin_us))
        busy = _union(self.data.spans, MODEL_PHASES)
        if found := _cycle([length_us(_inside(busy, part)) / bin_us for part in bins], bin_us / 1e6, "spans"):
            return found
        known = [(r.at_us, r.utilisation) for r in self._readings if r.gpu == self.data.model_gpu]
        used = [(at_us, share) for at_us, share in known if share is not None]
        period_s = (used[-1][0] - used[0][0]) / 1e6 / max(len(used) - 1, 1) if used else 0.0
        return _cycle([share for _, share in used], period_s, "nvml")

    @cached_property
    def growth_mb(self) -> dict[str, float]:
        used_mb = self._samples(ALLOCATED_COUNTER)
        return {role: grown for role, values in used_mb.items() if (grown := _steady_growth(values))}

    @cached_property
    def utilisation(self) -> dict[int, float]:
        """Mean utilisation by GPU, as the driver reports it."""
        known: defaultdict[int, list[float]] = defaultdict(list)
        for reading in self._readings:
            if reading.utilisation is not None:
                known[reading.gpu].append(reading.utilisation)
        return {gpu: float(np.mean(values)) for gpu, values in known.items()}

    @cached_property
    def mfu(self) -> float | None:
        """Useful FLOP/s as a share of those of a large matrix product on this GPU."""
        step_ms = step_timing(self.steps).mean_ms
        if self.data.flops_per_step is None or not self.data.peak_flops or not step_ms:
            return None
        return self.data.flops_per_step / (step_ms / 1000) / self.data.peak_flops

    @cached_property
    def contention(self) -> Contention | None:
        """The cost of the feed to the median step on a shared device; None if noise may explain it.

        All but the fastest quarter of the steps with the feed must take longer than all but the slowest quarter
        of those without, and the loss must not exceed what the phases on the device can have taken.
        """
        work_us: defaultdict[int, int] = defaultdict(int)
        for span in self._work:
            work_us[span.batch] += span.duration_us
        fed = [work_us[step.step] / 1000 for step in self.steps]
        alone = [step.step_ms - step.gap_ms for step in self.data.replayed]
        if self.data.is_dual or min(len(fed), len(alone)) < MIN_STEPS:
            return None
        if np.quantile(fed, 0.25) <= np.quantile(alone, 0.75):
            return None
        slowdown = median(fed) / max(median(alone), 1e-9) - 1
        cost = self._busy * (1 - median(alone) / median(fed))
        phases = GPU_PHASES if self.data.on_gpu else DATA_PHASES
        most = MAX_CONTENTION * busy_share(self.data.spans, phases, self.window)
        return Contention(slowdown, cost) if MIN_LOSS <= cost <= most else None

    @property
    def headroom_measured(self) -> bool:
        """True if a batch was replayed; else headroom is estimated from the waits."""
        return bool(self.data.replayed)

    @cached_property
    def headroom(self) -> float | None:
        """Speed with a perfect feed as a multiple of the present one.

        Steps that are late for another reason do not count. On a CPU, which other programs use too, replayed
        steps that are faster for no visible reason are noise.
        """
        starved, odd = self.starved, set(outliers(self.data.replayed))
        replayed_ms = step_timing(step for step in self.data.replayed if step not in odd).mean_ms
        if not replayed_ms:
            return 1 / max(1 - starved, 0.01) if self.shares else None
        late_otherwise = {found.step for found in self.outliers if not found.reason.startswith(WAITED)}
        real_ms = step_timing(step for step in self.steps if step.step not in late_otherwise).mean_ms
        measured = real_ms / replayed_ms
        if not self.data.on_gpu:
            lost = starved + self.shares.get("host", 0.0) + (self.contention.cost if self.contention else 0.0)
            measured = min(measured, 1 / max(1 - lost, 0.01))
        return max(measured, 1.0)

    @cached_property
    def _work(self) -> list[Span]:
        """The spans of the model stream in order; one alone shows nothing."""
        work = [span for span in self.data.spans if span.name in MODEL_PHASES]
        return sorted(work, key=attrgetter("start_us")) if len(work) >= 2 else []

    @property
    def _total_us(self) -> int:
        return max(self.window[1] - self.window[0], 1)

    @cached_property
    def _busy(self) -> float:
        """Share of the time in which the model stream has work, whether or not a kernel runs."""
        idle_us = length_us(gap.interval for gap in self._gaps)
        return (self._total_us - idle_us) / self._total_us

    @cached_property
    def _gaps(self) -> list[_Gap]:
        causes, gaps, at_us = _Causes(self.data, self._work), list[_Gap](), self.window[0]
        for span in self._work:
            if span.start_us > at_us:
                gaps += causes.split((at_us, span.start_us), span)
            at_us = max(at_us, end_us(span))
        waited_us = {name: length_us(gap.interval for gap in gaps if gap.cause == name) for name in DATA_PHASES}
        most = max(waited_us, key=lambda name: waited_us[name])
        if not waited_us[most]:
            return gaps
        # The first spans of some batches are older than the trace: charge them to the phase waited for most.
        return [gap._replace(cause=most) if gap.cause == UNKNOWN_PHASE else gap for gap in gaps]

    @cached_property
    def _lost(self) -> dict[str, list[Interval]]:
        lost: defaultdict[str, list[Interval]] = defaultdict(list)
        for gap in self._gaps:
            lost[gap.cause].append(gap.interval)
        return dict(lost)

    @cached_property
    def _readings(self) -> list[Reading]:
        start, end = self.window
        return [reading for reading in self.data.readings if start <= reading.at_us <= end]

    def _samples(self, suffix: str) -> dict[str, list[float]]:
        """Return the counters whose names end so, by the rest of their names."""
        start, end = self.window
        found: defaultdict[str, list[float]] = defaultdict(list)
        for name, at_us, value in self.data.counters:
            if name.endswith(suffix) and start <= at_us <= end:
                found[name.removesuffix(suffix)].append(value)
        return found


def end_us(span: Span) -> int:
    return span.start_us + span.duration_us


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as sorted intervals that do not touch."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        elif end > start:
            union.append((start, end))
    return union


def length_us(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def _inside(intervals: Sequence[Interval], bounds: Interval) -> Iterator[Interval]:
    """Yield the parts of sorted, separate intervals that lie within bounds."""
    for place in range(max(bisect_right(intervals, bounds) - 1, 0), len(intervals)):
        start, end = intervals[place]
        if start >= bounds[1]:
            return
        if end > bounds[0]:
            yield max(start, bounds[0]), min(end, bounds[1])


def _split(gaps: Sequence[Interval], taken: Sequence[Interval]) -> tuple[list[Interval], list[Interval]]:
    """Return the parts of some gaps that sorted, separate intervals cover, and the parts that they do not."""
    covered: list[Interval] = []
    free: list[Interval] = []
    for gap in gaps:
        parts = list(_inside(taken, gap))
        edges = [gap[0], *(edge for part in parts for edge in part), gap[1]]
        covered += parts
        free += [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]
    return covered, free


def _union(spans: Iterable[Span], names: Collection[str]) -> list[Interval]:
    return merged((span.start_us, end_us(span)) for span in spans if span.name in names)


def busy_share(spans: Iterable[Span], names: Collection[str], window: Interval) -> float:
    """Return the share of the window in which any span of these names runs."""
    return length_us(_inside(_union(spans, names), window)) / max(window[1] - window[0], 1)


def phase_times(spans: Iterable[Span], window: Interval) -> dict[str, PhaseTime]:
    """Return the time of every phase, from the spans that end inside the window."""
    by_name: dict[str, list[Span]] = {name: [] for name in (*DATA_PHASES, *MODEL_PHASES)}
    for span in spans:
        if span.name in by_name and window[0] < end_us(span) <= window[1]:
            by_name[span.name].append(span)
    return {name: _phase_time(found, window) for name, found in by_name.items() if found}


def _phase_time(spans: Sequence[Span], window: Interval) -> PhaseTime:
    lengths_ms = np.array([span.duration_us for span in spans]) / 1000
    timing = Timing.of(lengths_ms)
    is_long = lengths_ms > LONG_FACTOR * timing.median_ms
    busy_us = length_us(merged((max(span.start_us, window[0]), end_us(span)) for span in spans))
    return PhaseTime(
        **vars(timing),
        workers=len({span.track for span in spans}),
        busy_share=busy_us / max(window[1] - window[0], 1),
        long_share=float(is_long.mean()),
        long_time_share=float(lengths_ms[is_long].sum()) / (float(lengths_ms.sum()) or 1.0),
    )


class _Gap(NamedTuple):
    """A part of the time in which the model stream has no work, and why: a phase or `host`."""

    step: int
    cause: str
    interval: Interval


class _Causes:
    def __init__(self, data: ProfileData, work: Sequence[Span]) -> None:
        self._data = data
        trained = [span for span in work if span.name == "train"]
        waits = sorted((span for span in data.spans if span.name == "wait"), key=attrgetter("start_us"))
        # A trace still being written ends with waits ahead of the device; one that overflowed lost its first.
        if len(waits) <= len(trained):
            trained, waits = trained[::-1], waits[::-1]
        self._waits = dict(zip(trained, waits, strict=False))  # the host's wait for the batch of each span
        self._batches: defaultdict[int, dict[str, Span]] = defaultdict(dict)
        for span in data.spans:
            if span.name in DATA_PHASES:
                self._batches[span.batch][span.name] = span
        self._active = {name: _union(data.spans, (name,)) for name in DATA_PHASES}

    def split(self, gap: Interval, span: Span) -> Iterator[_Gap]:
        """Yield the gap before a span in parts: for a late batch, blocking work, and for the host."""
        rest, explanations = [gap], list(self._blocking.items())
        if (wait := self._waits.get(span)) is not None:
            phases = self._batches.get(wait.batch, {})
            late = [(wait.start_us, end_us(wait))]
            late += [(gap[0], max(map(end_us, phases.values())))] if phases else []
            explanations.insert(0, (self._late_phase(wait.batch), merged(late)))
        for cause, intervals in explanations:
            explained, rest = _split(rest, intervals)
            yield from (_Gap(span.batch, cause, part) for part in explained)
        yield from (_Gap(span.batch, "host", part) for part in rest)

    def _late_phase(self, batch: int) -> str:
        """Return the last phase that the batch queued for; later phases only added their normal latency."""
        phases, before = self._batches.get(batch, {}), self._batches.get(batch - 1, {})
        present = [name for name in DATA_PHASES if name in phases]
        for previous, name in reversed(list(pairwise(present))):
            queued = name in before and end_us(phases[previous]) < end_us(before[name])
            if queued and not (name == "encode" and self._copies_delay_encoding):
                return name
        recorded = [name for name in DATA_PHASES if self._active[name]]
        return present[0] if present and present[0] == recorded[0] else UNKNOWN_PHASE

    @cached_property
    def _blocking(self) -> dict[str, list[Interval]]:
        """The work of the data role that blocks the model stream of the same GPU because it does not overlap.

        The driver copies from pageable memory in pieces, and meanwhile no other thread launches kernels.
        """
        settings, shares_gpu = self._data.settings.data, self._data.on_gpu and not self._data.is_dual
        overlaps = {"encode": settings.optimize_cpu_gpu_overlap, "upload": settings.enhanced_gpu_prefetch}
        return {name: self._active[name] for name, free in overlaps.items() if shares_gpu and not free}

    @cached_property
    def _copies_delay_encoding(self) -> bool:
        """True if uploads share the front end's stream and take more of its time than encoding."""
        if not self._data.on_gpu or self._data.settings.data.enhanced_gpu_prefetch:
            return False
        uploads = self._active["upload"]
        return length_us(uploads) > length_us(_split(self._active["encode"], uploads)[1])


def _cycle(series: Sequence[float], sample_s: float, source: str) -> Oscillation | None:
    """Return the period after which a series resembles itself most, by FFT autocorrelation."""
    shares, count = np.array(series), len(series)
    if count < MIN_SAMPLES:
        return None
    low, high = np.quantile(shares, [0.1, 0.9])
    if high - low < MIN_DEPTH:
        return None
    power = np.abs(np.fft.rfft(shares - shares.mean(), 2 * count)) ** 2
    likeness = np.fft.irfft(power)[:count] * count / (count - np.arange(count))
    likeness /= likeness[0]
    below, longest = np.flatnonzero(likeness < 0), count // MIN_CYCLES
    if not len(below) or below[0] >= longest:
        return None
    lags = np.arange(below[0], longest + 1)
    best = float(likeness[lags].max())
    if best < MIN_CORRELATION:
        return None
    peaks = (lag for lag in lags if likeness[lag] >= 0.8 * best and likeness[lag] >= likeness[lag + 1])
    return Oscillation(float(next(peaks, lags[-1])) * sample_s, float(high - low), source)


def _steady_growth(values: Sequence[float]) -> float:
    """Return how much a number grew; 0 unless it did so steadily, because one jump is no leak."""
    if len(values) < MIN_SAMPLES:
        return 0.0
    quarter = len(values) // 4
    quarters = [float(np.median(values[part * quarter : (part + 1) * quarter])) for part in range(4)]
    risen = quarters[-1] - quarters[0]
    steadily = all(later > earlier for earlier, later in pairwise(quarters))
    is_growth = steadily and risen > max(MIN_GROWTH_MB, MIN_GROWTH_SHARE * quarters[0])
    return risen * 4 / 3 if is_growth else 0.0
