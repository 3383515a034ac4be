"""Where the time of the model lane goes: computing, waiting for which stage, copying, the host, anything else.

A gap before a step is followed back to the batch of that step. While it was not ready, the model waited for the
last stage before which the batch had queued: what came behind only took its time. Pure arithmetic over spans.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from myxtts.observe.evidence import (
    DATA_STAGES,
    MODEL_STAGES,
    Evidence,
    Interval,
    end_us,
    length_us,
    merged,
    step_times,
)
from myxtts.observe.steps import Summary
from myxtts.observe.trace import Span

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
    """Share of the time in which the model lane had work, whether or not a kernel ran."""
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
    """The division of the steps that count; from step times alone when there are no spans of the model lane."""
    lane = _ModelLane(evidence)
    if len(lane.work) < 2:
        summary = Summary.of(step_times(evidence))
        if not summary.count:
            return Division()
        idle = summary.idle_share
        shares = dict.fromkeys(SHARES, 0.0) | {"compute": 1 - idle, "wait": idle}
        return Division(busy=1 - idle, shares=shares, waits={UNKNOWN_STAGE: idle})
    lane.follow()
    return lane.division()


class _ModelLane:
    """The spans of the model lane, and what is found in the gaps between them."""

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
        self._copies_hold_up_encoding = self._has_slow_copies_in_the_lane()

    def follow(self) -> None:
        """Walk along the lane."""
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
        """Say what a gap before a span of the lane was for."""
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
        """Work of the data role that holds up the model lane, because it was told not to overlap.

        The driver stages a copy from pageable memory in pieces, and no other thread launches kernels meanwhile.
        """
        data = self._evidence.settings.data
        if self._evidence.model_gpu is None or self._evidence.is_dual:
            return {}
        names = [] if data.optimize_cpu_gpu_overlap else ["encode"]
        names += [] if data.enhanced_gpu_prefetch else ["upload"]
        return {name: self._at_work[name] for name in names}

    def _has_slow_copies_in_the_lane(self) -> bool:
        """Whether uploads share the front end's lane and take more of it: then batches queue there for a copy."""
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
