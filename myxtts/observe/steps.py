"""How long optimiser steps take and how long their stream is idle in between, measured where the work happens.

On a GPU a step is a pair of events that are read when the device has passed them: nothing here ever waits for a
device. Knows neither what a step does nor who looks at its time. PyTorch is imported only to make events.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

MOST_PENDING = 256
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
        self._make_event: Callable[[], _Event] = _HostEvent if stream is None else _timing_event
        self._free: list[_Pair] = []
        self._open: _Pair | None = None
        self._follows = False
        """Whether the step before the open one was measured and nothing else was done in between."""
        self._pending: deque[tuple[int, _Pair, bool]] = deque()
        self._last: _Pair | None = None
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

    def _take(self) -> _Pair | None:
        """Two events to record, or None when too many are under way."""
        if self._free:
            return self._free.pop()
        if len(self._pending) >= MOST_PENDING:
            return None
        return _Pair(self._make_event(), self._make_event())


class _Event(Protocol):
    """What of a CUDA event is used here."""

    def record(self, stream: torch.cuda.Stream | None) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class _Pair(NamedTuple):
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


def _timing_event() -> _Event:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
