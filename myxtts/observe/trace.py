"""Spans: what host threads and GPU streams did and when, on one clock, written as JSONL or as a Chrome trace.

Device spans are pairs of CUDA events that are resolved when the device has passed them; nothing waits for a device
while a trace runs. Knows neither what the stages mean nor who reads the trace. PyTorch is imported only when a
device span is opened, because preparing a corpus needs neither it nor the second it takes to load.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

MOST_PENDING = 1024
"""Device spans of one device that may be open or unresolved; what is opened beyond is dropped."""
ANCHOR_REACH_MS = 4_000
"""CUDA tells the time between two events in float32: finer than a microsecond up to here, coarser beyond."""
ANCHOR_TRIES = 8
CROSSING_US = 5
"""Spans of one track that cross by less are drawn one behind the other: it is the rounding of device times."""


class Span(NamedTuple):
    """One piece of work; start and end are whole microseconds of the host clock, so neighbours never cross."""

    name: str
    """The stage: gather, upload, encode, handoff, train, wait, ..."""
    track: str
    """Who did it: a thread or a stream."""
    start_us: int
    duration_us: int
    batch: int = -1
    """Number of the batch; -1 for none."""
    device: bool = False
    """Measured on a device."""


class Counter(NamedTuple):
    """A sample of a number that changes."""

    name: str
    at_us: int
    value: float


class Trace:
    """Records spans and counters from any number of threads; keeps the latest `limit` of each."""

    def __init__(self, limit: int = 200_000, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.num_dropped = 0
        """Spans and samples that are no longer kept, or were never taken."""
        self._spans: deque[Span] = deque(maxlen=limit)
        self._counters: deque[Counter] = deque(maxlen=limit)
        self._clocks: dict[torch.device, _DeviceClock] = {}
        self._pending: defaultdict[torch.cuda.Stream, deque[tuple[Span, _Pair]]] = defaultdict(deque)
        """Device spans in the order in which their streams pass them, `start_us` being the time of launch."""
        self._lock = threading.Lock()
        """Guards everything above; held while waiting only once per device, for its anchor."""

    def span(self, name: str, track: str = "", batch: int = -1) -> AbstractContextManager[None]:
        """What happens inside, on the host clock; the track is this thread unless named."""
        if not self.enabled:
            return _NOTHING
        return self._host_span(name, track or threading.current_thread().name, batch)

    def device_span(
        self, name: str, track: str, stream: torch.cuda.Stream | None, batch: int = -1
    ) -> AbstractContextManager[None]:
        """What is put on `stream` inside, from start to end on the device; without a stream a host span.

        Does not make the stream current, and must not stand inside the capture of a CUDA graph.
        """
        if not self.enabled:
            return _NOTHING
        if stream is None:
            return self._host_span(name, track, batch)
        return self._stream_span(name, track, stream, batch)

    def count(self, name: str, value: float) -> None:
        """Take a sample of a number, now."""
        if self.enabled:
            with self._lock:
                self._keep(self._counters, Counter(name, now_us(), value))

    def anchor(self, device: torch.device) -> None:
        """Tie the clock of a CUDA device to the host's; waits once for the device, later calls do nothing."""
        if not self.enabled or device.type != "cuda":
            return
        import torch

        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        with self._lock:
            if device not in self._clocks:
                self._clocks[device] = _DeviceClock(device)

    def collect(self) -> None:
        """Resolve the device spans that are finished; never waits."""
        with self._lock:
            for stream, queue in self._pending.items():
                while queue and queue[0][1].end.query():  # type: ignore[no-untyped-call]
                    span, pair = queue.popleft()
                    start_us, end_us = self._clocks[stream.device].read(pair, span.start_us)
                    self._keep(self._spans, span._replace(start_us=start_us, duration_us=end_us - start_us))

    def finish(self) -> None:
        """Wait for every device span that was closed before, and resolve it."""
        with self._lock:
            last = [queue[-1][1].end for queue in self._pending.values() if queue]
        for event in last:
            event.synchronize()
        self.collect()

    def spans(self) -> list[Span]:
        """The spans resolved so far, in that order."""
        with self._lock:
            return list(self._spans)

    def counters(self) -> list[Counter]:
        """The samples taken so far."""
        with self._lock:
            return list(self._counters)

    def write_jsonl(self, path: Path) -> None:
        """Write what is resolved so far, one JSON object per line; `read_jsonl` gives it back."""
        if self.enabled:
            lines = [json.dumps({"kind": "span"} | span._asdict()) for span in self.spans()]
            lines += [json.dumps({"kind": "counter"} | sample._asdict()) for sample in self.counters()]
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def write_chrome(self, path: Path) -> None:
        """Write what is resolved so far as a trace that Perfetto and chrome://tracing open."""
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
                self._keep(self._spans, span)

    @contextmanager
    def _stream_span(self, name: str, track: str, stream: torch.cuda.Stream, batch: int) -> Iterator[None]:
        pair = self._take_pair(stream.device)
        if pair is None:
            yield
            return
        launched = Span(name, track, now_us(), 0, batch, device=True)
        pair.start.record(stream)
        try:
            yield
        except BaseException:  # the device may be what failed: touching it again would hide the error
            with self._lock:
                self._clocks[stream.device].free.append(pair)
            raise
        pair.end.record(stream)
        with self._lock:
            self._pending[stream].append((launched, pair))

    def _take_pair(self, device: torch.device) -> _Pair | None:
        self.anchor(device)
        clock = self._clocks[device]
        if not clock.free:
            self.collect()
        with self._lock:
            pair = clock.take()
            self.num_dropped += pair is None
        return pair

    def _keep(self, records: deque[Any], record: Span | Counter) -> None:
        self.num_dropped += len(records) == records.maxlen
        records.append(record)


_NOTHING = nullcontext()
OFF = Trace(limit=0, enabled=False)
"""The trace of those who want none: pass it instead of asking whether there is one."""


class _Pair(NamedTuple):
    start: torch.cuda.Event
    end: torch.cuda.Event


class _DeviceClock:
    """The timing events of one device, and where they lie on the host clock."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.free: list[_Pair] = []
        self._num_pairs = 0
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        tries = []
        for _ in range(ANCHOR_TRIES):
            event, before_us = _timing_event(), now_us()
            event.record(stream)
            event.synchronize()
            after_us = now_us()
            tries.append((after_us - before_us, (before_us + after_us) / 2, event))
        _, self._anchor_us, self._anchor = min(tries, key=lambda found: found[0])

    def take(self) -> _Pair | None:
        """Two events to record, or None when too many are under way."""
        if self.free:
            return self.free.pop()
        if self._num_pairs == MOST_PENDING:
            return None
        self._num_pairs += 1
        return _Pair(_timing_event(), _timing_event())

    def read(self, pair: _Pair, launched_us: int) -> tuple[int, int]:
        """Start and end of a pair that the device has passed; its events become free.

        The clocks drift apart: a start before its launch or an end in the future says by how much at least.
        """
        seen_us, reach_ms = now_us(), self._anchor.elapsed_time(pair.start)
        start_us = self._anchor_us + 1000 * reach_ms
        end_us = self._anchor_us + 1000 * self._anchor.elapsed_time(pair.end)
        drift_us = max(launched_us - start_us, 0) or min(seen_us - end_us, 0)
        self._anchor_us += drift_us
        if reach_ms > ANCHOR_REACH_MS:
            self._anchor_us, self._anchor, pair = start_us + drift_us, pair.start, _Pair(self._anchor, pair.end)
        self.free.append(pair)
        return math.floor(start_us + drift_us), math.floor(end_us + drift_us)


def now_us() -> int:
    """The host clock of all spans."""
    return time.perf_counter_ns() // 1000


def read_jsonl(path: Path) -> tuple[list[Span], list[Counter]]:
    """Return what `write_jsonl` wrote; damaged lines are skipped."""
    spans: list[Span] = []
    counters: list[Counter] = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in text.splitlines():
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            record = json.loads(line)
            kind = record.pop("kind")
            if kind == "span":
                spans.append(Span(**record))
            elif kind == "counter":
                counters.append(Counter(**record))
    return spans, counters


def _timing_event() -> torch.cuda.Event:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


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
    """Spans of one track, sorted by start, in rows where they nest or follow: Perfetto drops those that cross."""
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


MOST_PENDING_STEPS = 256
"""Steps that may be launched and not yet passed by the device; what is launched beyond is not measured."""
WARMUP_STEPS = 5
"""Steps of a clock that are left out of its summary: they compile kernels and fill caches."""
OUTLIER_FACTOR = 2.0
"""A step that takes this many times the median is an outlier."""


class StepTime(NamedTuple):
    """One step: `step_ms` is its work and the gap before it."""

    step: int
    step_ms: float
    gap_ms: float
    """How long the stream was idle before it; 0 for the first step and behind a pause."""


@dataclass(frozen=True)
class Summary:
    """What many step times have in common; all zero when there are none."""

    count: int
    median_ms: float
    mean_ms: float
    cv: float
    """Coefficient of variation: the standard deviation as a share of the mean."""
    idle_share: float
    outliers: list[StepTime]

    @classmethod
    def of(cls, times: Iterable[StepTime]) -> Summary:
        """The summary of these steps."""
        steps = list(times)
        lengths_ms = np.array([step.step_ms for step in steps])
        total_ms = float(lengths_ms.sum())
        if total_ms == 0:
            return cls(len(steps), 0.0, 0.0, 0.0, 0.0, [])
        median_ms, mean_ms = float(np.median(lengths_ms)), total_ms / len(steps)
        cv = float(lengths_ms.std()) / mean_ms
        idle_share = sum(step.gap_ms for step in steps) / total_ms
        outliers = [step for step in steps if step.step_ms > OUTLIER_FACTOR * median_ms]
        return cls(len(steps), median_ms, mean_ms, cv, idle_share, outliers)


class StepClock:
    """Measures the steps of one stream, or of the host when there is none. For one thread.

    Call `begin` when the stream has been told to wait for the batch and the first kernels are about to follow, and
    `end` behind the last ones; both outside of anything captured. Only the latest `limit` times are kept.
    """

    def __init__(self, stream: torch.cuda.Stream | None, limit: int = 1000, first_step: int = 0) -> None:
        self.step = first_step
        """The step that is under way, or the next one."""
        self.num_dropped = 0
        """Steps that were not measured because the device was too far behind."""
        self._stream = stream
        self._make_event: Callable[[], _Event] = _HostEvent if stream is None else _step_event
        self._free: list[_StepPair] = []
        self._open: _StepPair | None = None
        self._follows = False
        """Whether the step before the open one was measured and nothing else was done in between."""
        self._pending: deque[tuple[int, _StepPair, bool]] = deque()
        self._last: _StepPair | None = None
        """The latest step that was read: the next gap begins at its end."""
        self._uncollected: deque[StepTime] = deque(maxlen=limit)
        self._recent: deque[StepTime] = deque(maxlen=limit)
        self._warm_at = first_step + WARMUP_STEPS

    def begin(self) -> None:
        """Mark where the work of a step starts."""
        self._read_passed()
        self._open = self._open or self._take()
        if self._open is not None:
            self._open.begin.record(self._stream)

    def end(self) -> None:
        """Mark where the work of the step ends."""
        if self._open is not None:
            self._open.end.record(self._stream)
            self._pending.append((self.step, self._open, self._follows))
        else:
            self.num_dropped += 1
        self._follows = self._open is not None
        self._open = None
        self.step += 1

    def pause(self) -> None:
        """Say that something else follows on purpose, such as a validation: that is no idle time."""
        self._follows = False

    def collect(self) -> list[StepTime]:
        """The steps that the device has passed since the last call, at most the latest `limit`."""
        self._read_passed()
        times = list(self._uncollected)
        self._uncollected.clear()
        return times

    def summary(self) -> Summary:
        """Of the latest `limit` steps that the device has passed, without the first `WARMUP_STEPS` of all."""
        self._read_passed()
        return Summary.of(self._recent)

    def _read_passed(self) -> None:
        while self._pending and self._pending[0][1].end.query():
            step, pair, follows = self._pending.popleft()
            gap_ms = self._last.end.elapsed_time(pair.begin) if follows and self._last is not None else 0.0
            measured = StepTime(step, gap_ms + pair.begin.elapsed_time(pair.end), gap_ms)
            self._uncollected.append(measured)
            if step >= self._warm_at:
                self._recent.append(measured)
            if self._last is not None:
                self._free.append(self._last)
            self._last = pair

    def _take(self) -> _StepPair | None:
        """Two events to record, or None when too many are under way."""
        if self._free:
            return self._free.pop()
        if len(self._pending) >= MOST_PENDING_STEPS:
            return None
        return _StepPair(self._make_event(), self._make_event())


class _Event(Protocol):
    """What of a CUDA event is used here."""

    def record(self, stream: torch.cuda.Stream | None) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class _StepPair(NamedTuple):
    begin: _Event
    end: _Event


class _HostEvent:
    """The host clock in the form of an event that is passed at once."""

    at_s = 0.0

    def record(self, _: object) -> None:
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: _HostEvent) -> float:
        return 1000 * (end_event.at_s - self.at_s)


def _step_event() -> _Event:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
