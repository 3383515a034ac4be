"""Step times: gaps, variation and idle share, on the host clock and on a GPU that is never waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from myxtts.observe import trace
from myxtts.observe.trace import (
    MOST_PENDING_STEPS,
    WARMUP_STEPS,
    StepClock,
    StepTime,
    Timing,
    idle_share,
    outliers,
    step_timing,
)


class HostClock:
    """The host clock of the module, moved by the test."""

    def __init__(self) -> None:
        self.at_s = 1000.0

    def pass_ms(self, milliseconds: float) -> None:
        self.at_s += milliseconds / 1000


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> HostClock:
    clock = HostClock()
    monkeypatch.setattr(trace.time, "perf_counter", lambda: clock.at_s)
    return clock


class FakeStream:
    """A stream whose events pass when the test lets it go on; the time of each is when it was recorded."""

    def __init__(self) -> None:
        self.at_ms = 0.0
        self.is_held = False
        self.num_events = 0

    def event(self) -> FakeEvent:
        self.num_events += 1
        return FakeEvent()


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.stream, self.at_ms, self.was_held = stream, stream.at_ms, stream.is_held

    def query(self) -> bool:
        return not (self.was_held and self.stream.is_held)

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.query() and later.query(), "the time of an event was read before the device passed it"
        return later.at_ms - self.at_ms


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStream]:
    fake = FakeStream()
    monkeypatch.setattr(trace, "_timing_event", fake.event)
    return fake


def take_step(clock: StepClock, stream: FakeStream, gap_ms: float, work_ms: float) -> None:
    stream.at_ms += gap_ms
    clock.begin()
    stream.at_ms += work_ms
    clock.end()


def test_a_step_is_its_work_and_the_gap_before_it(host: HostClock) -> None:
    clock = StepClock(None, first_step=7)
    for gap_ms, work_ms in ((3, 10), (2, 20), (0, 30)):
        host.pass_ms(gap_ms)
        clock.begin()
        host.pass_ms(work_ms)
        clock.end()
    times = clock.collect()
    assert [time.step for time in times] == [7, 8, 9]
    assert [time.step_ms for time in times] == pytest.approx([10, 22, 30])
    assert [time.gap_ms for time in times] == pytest.approx([0, 2, 0])
    assert clock.collect() == []
    assert clock.step == 10


def test_a_pause_is_not_idle_time(host: HostClock) -> None:
    clock = StepClock(None)
    for pause_ms in (0, 5000, 4):
        if pause_ms == 5000:
            clock.pause()
        host.pass_ms(pause_ms)
        clock.begin()
        host.pass_ms(10)
        clock.end()
    assert [time.gap_ms for time in clock.collect()] == pytest.approx([0, 0, 4])


def test_statistics_of_steps() -> None:
    times = [StepTime(0, 8, 0), StepTime(1, 12, 1), StepTime(2, 10, 2), StepTime(3, 30, 12)]
    timing = step_timing(times)
    assert (timing.count, timing.median_ms, timing.mean_ms, timing.max_ms) == (4, 11, 15, 30)
    assert timing.p95_ms == pytest.approx(27.3)
    assert timing.cv == pytest.approx(((49 + 9 + 25 + 225) / 4) ** 0.5 / 15)
    assert timing.std_ms == pytest.approx(15 * timing.cv)
    assert idle_share(times) == pytest.approx(15 / 60)
    assert outliers(times) == [times[3]]


def test_statistics_of_nothing_are_zero() -> None:
    assert Timing.of([]) == Timing(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert Timing.of([0.0]).cv == idle_share([]) == 0
    assert outliers([StepTime(0, 0.0, 0.0)]) == []


def test_the_statistics_of_a_clock_leave_the_warmup_out(stream: FakeStream) -> None:
    clock = StepClock(stream, first_step=100)
    for number in range(20):
        take_step(clock, stream, 1, 9_999 if number < WARMUP_STEPS else 9)
    timing = clock.timing()
    assert (timing.count, timing.mean_ms) == (20 - WARMUP_STEPS, pytest.approx(10))
    assert timing.cv == pytest.approx(0, abs=1e-9)
    assert len(clock.collect()) == 20, "collected times are all of them"


def test_events_are_read_only_when_the_device_has_passed_them(stream: FakeStream) -> None:
    clock = StepClock(stream)
    take_step(clock, stream, 0, 10)
    stream.is_held = True
    take_step(clock, stream, 5, 20)
    take_step(clock, stream, 6, 30)
    assert clock.collect() == [StepTime(0, 10, 0)]
    stream.is_held = False
    assert clock.collect() == [StepTime(1, 25, 5), StepTime(2, 36, 6)]


def test_a_long_run_needs_few_events_and_bounded_memory(stream: FakeStream) -> None:
    clock = StepClock(stream, limit=50)
    for _ in range(5000):
        take_step(clock, stream, 1, 2)
    assert stream.num_events <= 6
    assert [time.step for time in clock.collect()] == list(range(4950, 5000))
    assert clock.timing().count == 50


def test_a_device_far_behind_drops_steps_and_invents_no_gaps(stream: FakeStream) -> None:
    clock = StepClock(stream)
    stream.is_held = True
    for _ in range(MOST_PENDING_STEPS + 40):
        take_step(clock, stream, 1, 2)
    stream.is_held = False
    take_step(clock, stream, 1, 2)
    take_step(clock, stream, 1, 2)
    times = clock.collect()
    assert clock.num_dropped == 40
    assert [time.step for time in times[-2:]] == [MOST_PENDING_STEPS + 40, MOST_PENDING_STEPS + 41]
    assert [time.gap_ms for time in times[-2:]] == [0, 1]
    assert max(time.gap_ms for time in times) == 1


def test_a_step_that_was_given_up_is_begun_again(stream: FakeStream) -> None:
    clock = StepClock(stream)
    clock.begin()
    stream.at_ms += 500
    take_step(clock, stream, 0, 10)
    assert clock.collect() == [StepTime(0, 10, 0)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gaps_on_a_gpu_are_measured_without_waiting() -> None:
    stream = torch.cuda.Stream()
    clock = StepClock(stream)

    def work() -> None:
        clock.begin()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
        clock.end()

    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        started_at = time.perf_counter()
        work()
        assert clock.collect() == [], "the clock waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    worked_s = time.perf_counter() - started_at
    time.sleep(0.1)
    work()
    work()
    stream.synchronize()
    first, after_gap, back_to_back = clock.collect()
    assert first.gap_ms == 0
    assert 0 < first.step_ms <= 1000 * worked_s
    assert 95 < after_gap.gap_ms < 300
    assert after_gap.step_ms - after_gap.gap_ms == pytest.approx(first.step_ms, rel=0.5)
    assert back_to_back.gap_ms < 1
