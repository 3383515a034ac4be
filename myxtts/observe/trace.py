"""Timing of host threads and GPU streams: spans on one clock (`Trace`) and step times of one stream (`StepClock`).

Device times come from pairs of CUDA events that are read once the device has passed them, so measuring never makes
the host wait. The module does not know what the spans mean or who reads them. It imports PyTorch only when a
device is measured: preparing a corpus is traced too, and does without the second that the import takes.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

MOST_PENDING = 1024
"""Event pairs of one device, or of one step clock, that may be in use; work beyond that is not measured."""
ANCHOR_REACH_MS = 4_000
"""CUDA returns elapsed times as float32: finer than a microsecond up to here, coarser beyond."""
ANCHOR_TRIES = 8
CROSSING_US = 5
"""Spans of one track that overlap by less are drawn one after the other: device times are rounded."""
WARMUP_STEPS = 5
"""First steps of a clock that `StepClock.timing` leaves out: they compile kernels and fill caches."""
OUTLIER_FACTOR = 2.0  # a step that takes more than this many times the median is an outlier


def now_us() -> int:
    """The host clock of all spans."""
    return time.perf_counter_ns() // 1000


@dataclass(frozen=True)
class Timing:
    """Statistics of a series of durations; all zero if it is empty."""

    count: int = 0
    mean_ms: float = 0.0
    std_ms: float = 0.0
    median_ms: float = 0.0
    p95_ms: float = 0.0
    longest_ms: float = 0.0

    @classmethod
    def of(cls, durations_ms: Iterable[float]) -> Timing:
        values = np.fromiter(durations_ms, np.float64)
        if not len(values):
            return cls()
        median_ms, p95_ms = np.quantile(values, [0.5, 0.95]).tolist()
        mean_ms = float(values.sum()) / len(values)
        return cls(len(values), mean_ms, float(values.std()), median_ms, p95_ms, float(values.max()))

    @property
    def cv(self) -> float:
        """Coefficient of variation: the standard deviation as a share of the mean."""
        return self.std_ms / self.mean_ms if self.mean_ms else 0.0


class Span(NamedTuple):
    """One piece of work, in whole microseconds of the host clock, so that neighbours never overlap."""

    name: str  # the kind of work: gather, fetch, upload, encode, handoff, train, wait,
    track: str  # the thread or stream that did it
    start_us: int
    duration_us: int
    batch: int = -1  # number of the batch; -1 for none
    device: bool = False  # True if measured on a device


class Counter(NamedTuple):
    name: str
    at_us: int
    value: float


class _Event(Protocol):
    """The part of `torch.cuda.Event` that is used here."""

    def record(self, stream: torch.cuda.Stream | None) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class _HostEvent:
    """The host clock as an event; work on the host is done when the event is recorded."""

    at_us = 0

    def record(self, _: object) -> None:
        self.at_us = now_us()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: _HostEvent) -> float:
        return (end_event.at_us - self.at_us) / 1000


def _device_event() -> _Event:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _EventPair(NamedTuple):
    start: _Event
    end: _Event


class _EventPairs:
    """Reusable event pairs; no more than `MOST_PENDING` exist, so a stalled device cannot exhaust memory."""

    def __init__(self, make_event: Callable[[], _Event]) -> None:
        self.free: list[_EventPair] = []
        self._make_event = make_event
        self._num_made = 0

    def take(self) -> _EventPair | None:
        """Return a pair to record, or None if all are in use."""
        if not self.free and self._num_made < MOST_PENDING:
            self._num_made += 1
            return _EventPair(self._make_event(), self._make_event())
        return self.free.pop() if self.free else None


class Trace:
    """Records spans and counters from any number of threads; keeps the latest `limit` of each."""

    def __init__(self, limit: int = 200_000, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._spans: deque[Span] = deque(maxlen=limit)
        self._counters: deque[Counter] = deque(maxlen=limit)
        self._clocks: dict[torch.device, _DeviceClock] = {}
        self._pending: defaultdict[torch.cuda.Stream, deque[tuple[Span, _EventPair]]] = defaultdict(deque)
        """Unread device spans of each stream in launch order; their `start_us` is the time of the launch."""
        self._lock = threading.Lock()
        """Guards everything above. Held during a wait only once per device, in `anchor`."""

    def span(self, name: str, track: str = "", batch: int = -1) -> AbstractContextManager[None]:
        """Measure the body on the host clock; the track defaults to the name of this thread."""
        if not self.enabled:
            return _NOTHING
        return self._host_span(name, track or threading.current_thread().name, batch)

    def device_span(
        self, name: str, track: str, stream: torch.cuda.Stream | None, batch: int = -1
    ) -> AbstractContextManager[None]:
        """Measure on the device the work that the body puts on `stream`; without a stream, a host span.

        Does not make the stream current. Must not be used while a CUDA graph is captured.
        """
        if not self.enabled:
            return _NOTHING
        if stream is None:
            return self._host_span(name, track, batch)
        return self._stream_span(name, track, stream, batch)

    def count(self, name: str, value: float) -> None:
        if self.enabled:
            with self._lock:
                self._counters.append(Counter(name, now_us(), value))

    def anchor(self, device: torch.device) -> None:
        """Tie the clock of a CUDA device to the host's. Waits for the device once; later calls do nothing."""
        if not self.enabled or device.type != "cuda":
            return
        import torch

        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        with self._lock:
            if device not in self._clocks:
                self._clocks[device] = _DeviceClock(device)

    def collect(self) -> None:
        """Read the device spans that are finished; never waits."""
        with self._lock:
            for stream, queue in self._pending.items():
                while queue and queue[0][1].end.query():
                    span, pair = queue.popleft()
                    start_us, end_us = self._clocks[stream.device].read(pair, span.start_us)
                    self._spans.append(span._replace(start_us=start_us, duration_us=end_us - start_us))

    def finish(self) -> None:
        """Wait for every device span that has been closed, and read it."""
        with self._lock:
            last = [queue[-1][1].end for queue in self._pending.values() if queue]
        for event in last:
            event.synchronize()
        self.collect()

    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    def counters(self) -> list[Counter]:
        with self._lock:
            return list(self._counters)

    def write_jsonl(self, path: Path) -> None:
        """Write the spans and samples so far, one JSON object per line."""
        if self.enabled:
            lines = [json.dumps({"kind": "span"} | span._asdict()) for span in self.spans()]
            lines += [json.dumps({"kind": "counter"} | sample._asdict()) for sample in self.counters()]
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def write_chrome(self, path: Path) -> None:
        """Write the spans and samples so far as a trace for Perfetto or chrome://tracing."""
        if self.enabled:
            events = list(_chrome_events(self.spans(), self.counters()))
            path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")

    @contextmanager
    def _host_span(self, name: str, track: str, batch: int) -> Iterator[None]:
        start_us = now_us()
        try:
            yield
        finally:
            span = Span(name, track, start_us, now_us() - start_us, batch)
            with self._lock:
                self._spans.append(span)

    @contextmanager
    def _stream_span(self, name: str, track: str, stream: torch.cuda.Stream, batch: int) -> Iterator[None]:
        self.anchor(stream.device)
        pairs = self._clocks[stream.device].pairs
        with self._lock:
            pair = pairs.take()
        if pair is None:
            self.collect()
            with self._lock:
                pair = pairs.take()
        if pair is None:  # the device is too far behind: this work is not measured
            yield
            return
        launched = Span(name, track, now_us(), 0, batch, device=True)
        pair.start.record(stream)
        try:
            yield
        except BaseException:  # the device may have failed: touching it again would hide the error
            with self._lock:
                pairs.free.append(pair)
            raise
        pair.end.record(stream)
        with self._lock:
            self._pending[stream].append((launched, pair))


_NOTHING = nullcontext()
OFF = Trace(limit=0, enabled=False)  # a trace that records nothing, for callers that want none


class _DeviceClock:
    """The event pairs of one device, and their position on the host clock."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.pairs = _EventPairs(_device_event)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        tries = []
        for _ in range(ANCHOR_TRIES):
            event, before_us = _device_event(), now_us()
            event.record(stream)
            event.synchronize()
            after_us = now_us()
            tries.append((after_us - before_us, (before_us + after_us) / 2, event))
        _, self._anchor_us, self._anchor = min(tries, key=lambda found: found[0])

    def read(self, pair: _EventPair, launched_us: int) -> tuple[int, int]:
        """Return start and end in microseconds of a pair that the device has passed; the pair becomes free.

        The two clocks drift apart. A start before its launch or an end in the future shows the least drift there
        must be, and the anchor moves by that much.
        """
        seen_us, reach_ms = now_us(), self._anchor.elapsed_time(pair.start)
        start_us = self._anchor_us + 1000 * reach_ms
        end_us = self._anchor_us + 1000 * self._anchor.elapsed_time(pair.end)
        drift_us = max(launched_us - start_us, 0) or min(seen_us - end_us, 0)
        self._anchor_us += drift_us
        if reach_ms > ANCHOR_REACH_MS:
            freed = _EventPair(self._anchor, pair.end)
            self._anchor_us, self._anchor, pair = start_us + drift_us, pair.start, freed
        self.pairs.free.append(pair)
        return math.floor(start_us + drift_us), math.floor(end_us + drift_us)


def read_jsonl(path: Path) -> tuple[list[Span], list[Counter]]:
    """Return what `write_jsonl` wrote; damaged lines are skipped."""
    spans: list[Span] = []
    counters: list[Counter] = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in text.splitlines():
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            record = json.loads(line)
            if record.pop("kind") == "span":
                spans.append(Span(**record))
            else:
                counters.append(Counter(**record))
    return spans, counters


def _chrome_events(spans: Iterable[Span], counters: Iterable[Counter]) -> Iterator[dict[str, object]]:
    for pid, process in ((1, "host"), (2, "devices")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
    tracks: defaultdict[tuple[bool, str], list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start_us, -span.duration_us)):
        tracks[span.device, span.track].append(span)
    rows = [(key, row) for key, members in tracks.items() for row in _nested_rows(members)]
    for tid, ((device, track), row) in enumerate(rows, 1):
        place: dict[str, object] = {"pid": 2 if device else 1, "tid": tid}
        yield place | {"ph": "M", "name": "thread_name", "args": {"name": track}}
        for name, _, start_us, duration_us, batch, _ in row:
            args = {"batch": batch} if batch >= 0 else {}
            yield place | {"ph": "X", "name": name, "ts": start_us, "dur": duration_us, "args": args}
    for name, at_us, value in counters:
        yield {"ph": "C", "name": name, "ts": at_us, "pid": 1, "args": {"value": value}}


def _nested_rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Split the spans of one track, sorted by start, into rows without partial overlaps: Perfetto drops those."""
    rows: list[tuple[list[Span], list[int]]] = []  # with the ends of the spans that are still open
    for span in spans:
        end_us = span.start_us + span.duration_us
        for row, open_ends in rows:
            start_us, depth = max(span.start_us, row[-1].start_us), len(open_ends)
            while depth and (end_us > open_ends[depth - 1] or start_us >= open_ends[depth - 1]):
                if open_ends[depth - 1] - start_us >= CROSSING_US:
                    break
                depth -= 1
                start_us = max(start_us, open_ends[depth])
            if not depth or end_us <= open_ends[depth - 1]:
                open_ends[depth:] = [max(start_us, end_us)]
                row.append(span._replace(start_us=start_us, duration_us=max(end_us - start_us, 0)))
                break
        else:
            rows.append(([span], [end_us]))
    return [row for row, _ in rows]


class StepTime(NamedTuple):
    """One step: `step_ms` is its work plus the gap before it."""

    step: int
    step_ms: float
    gap_ms: float  # idle time of the stream before the step; 0 for the first step and after a pause


def step_timing(steps: Iterable[StepTime]) -> Timing:
    return Timing.of(step.step_ms for step in steps)


def idle_share(steps: Sequence[StepTime]) -> float:
    """Return the share of the time of these steps in which the stream was idle."""
    total_ms = sum(step.step_ms for step in steps)
    return sum(step.gap_ms for step in steps) / total_ms if total_ms else 0.0


def outliers(steps: Sequence[StepTime]) -> list[StepTime]:
    """Return the steps that take more than `OUTLIER_FACTOR` times the median."""
    limit_ms = OUTLIER_FACTOR * step_timing(steps).median_ms
    return [step for step in steps if step.step_ms > limit_ms]


class StepClock:
    """Measures the steps of one stream, or of the host if there is none. For one thread.

    Call `begin` after the stream has been made to wait for the batch and before the step's first kernel, and `end`
    after its last; neither during a graph capture. Only the latest `limit` times are kept.
    """

    def __init__(self, stream: torch.cuda.Stream | None, limit: int = 1000, first_step: int = 0) -> None:
        self.step = first_step
        """The current step, or the next one."""
        self._stream = stream
        self._pairs = _EventPairs(_HostEvent if stream is None else _device_event)
        self._open: _EventPair | None = None
        self._follows = False
        """True if the step before the open one was measured and nothing else was done in between."""
        self._pending: deque[tuple[int, _EventPair, bool]] = deque()
        self._last: _EventPair | None = None
        """The latest step that was read: the next gap starts at its end."""
        self._uncollected: deque[StepTime] = deque(maxlen=limit)
        self._recent: deque[StepTime] = deque(maxlen=limit)
        self._warm_at = first_step + WARMUP_STEPS

    def begin(self) -> None:
        self._read_passed()
        self._open = self._open or self._pairs.take()
        if self._open is not None:
            self._open.start.record(self._stream)

    def end(self) -> None:
        if self._open is not None:  # else the device is too far behind, and the step is not measured
            self._open.end.record(self._stream)
            self._pending.append((self.step, self._open, self._follows))
        self._follows = self._open is not None
        self._open = None
        self.step += 1

    def pause(self) -> None:
        """Do not count the time until the next step as idle, for example during a validation."""
        self._follows = False

    def collect(self) -> list[StepTime]:
        """Return the steps that the device has passed since the last call, at most the latest `limit`."""
        self._read_passed()
        times = list(self._uncollected)
        self._uncollected.clear()
        return times

    def timing(self) -> Timing:
        """Return the timing of the latest `limit` steps that the device has passed, without the warm-up."""
        self._read_passed()
        return step_timing(self._recent)

    def _read_passed(self) -> None:
        while self._pending and self._pending[0][1].end.query():
            step, pair, follows = self._pending.popleft()
            gap_ms = self._last.end.elapsed_time(pair.start) if follows and self._last is not None else 0.0
            measured = StepTime(step, gap_ms + pair.start.elapsed_time(pair.end), gap_ms)
            self._uncollected.append(measured)
            if step >= self._warm_at:
                self._recent.append(measured)
            if self._last is not None:
                self._pairs.free.append(self._last)
            self._last = pair
