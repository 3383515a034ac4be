"""Spans, counters, step times: on the host clock and on a GPU that is never waited for, and the files written."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from myxtts.observe import trace as trace_module
from myxtts.observe.trace import (
    MOST_PENDING,
    OFF,
    WARMUP_STEPS,
    Span,
    StepClock,
    StepTime,
    Timing,
    Trace,
    idle_share,
    now_us,
    outliers,
    read_jsonl,
)

GPU_0 = torch.device("cuda", 0)


class FakeGpu:
    """A device whose clock runs on its own; events pass at once, or when a held stream is let go."""

    def __init__(self, clock_us: Callable[[], float], drift: float = 0.0) -> None:
        self.clock_ms = lambda: clock_us() * (1 + drift) / 1000 - 77_000.0
        self.num_events = 0
        self.num_waits = 0

    def stream(self, device: torch.device = GPU_0) -> FakeStream:
        return FakeStream(device)

    def event(self, enable_timing: bool = False) -> FakeEvent:
        assert enable_timing
        self.num_events += 1
        return FakeEvent(self)


class FakeStream:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held = False
        self.queue: list[FakeEvent] = []

    def let_go(self, as_recorded: bool = False) -> None:
        for event in self.queue:
            event.at_ms = event.recorded_ms if as_recorded else event.gpu.clock_ms()
        self.queue.clear()


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu

    def record(self, stream: FakeStream) -> None:
        self.stream, self.at_ms, self.recorded_ms = stream, None, self.gpu.clock_ms()
        stream.queue.append(self)
        if not stream.held:
            stream.let_go()

    def query(self) -> bool:
        return self.at_ms is not None

    def synchronize(self) -> None:
        self.gpu.num_waits += 1
        self.stream.let_go()

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.query() and later.query()
        return float(np.float32(later.at_ms - self.at_ms))


Steps = Callable[[StepClock, float, float], None]


@pytest.fixture
def host_clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The host clock of the trace, in microseconds, moved by the test."""
    clock = [5_000_000_000]
    monkeypatch.setattr(trace_module, "now_us", lambda: clock[0])
    return clock


@pytest.fixture
def use_gpu(monkeypatch: pytest.MonkeyPatch, host_clock: list[int]) -> Callable[..., FakeGpu]:
    def use(drift: float = 0.0) -> FakeGpu:
        device = FakeGpu(lambda: host_clock[0], drift)
        monkeypatch.setattr(torch.cuda, "Stream", device.stream)
        monkeypatch.setattr(torch.cuda, "Event", device.event)
        return device

    return use


@pytest.fixture
def take_step(host_clock: list[int]) -> Steps:
    """Takes a step after a gap, both in milliseconds."""

    def take(clock: StepClock, gap_ms: float, work_ms: float) -> None:
        host_clock[0] += int(1000 * gap_ms)
        clock.begin()
        host_clock[0] += int(1000 * work_ms)
        clock.end()

    return take


def chrome_events(trace: Trace, folder: Path) -> list[dict[str, Any]]:
    trace.write_chrome(folder / "trace.json")
    content = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


class Recorded(Trace):
    """A trace with these spans."""

    def __init__(self, *spans: Span) -> None:
        super().__init__()
        self.recorded = list(spans)

    def spans(self) -> list[Span]:
        return self.recorded


def test_spans_nest_and_carry_the_time_the_track_and_the_batch(host_clock: list[int]) -> None:
    trace, start = Trace(), host_clock[0]
    with trace.span("train", batch=7):
        host_clock[0] += 2_000
        with trace.device_span("wait", "ring", None):  # without a stream a host span
            host_clock[0] += 5_000
    assert trace.spans() == [
        Span("wait", "ring", start + 2_000, 5_000),
        Span("train", threading.current_thread().name, start, 7_000, 7),
    ]


def test_threads_that_record_at_once_lose_only_the_oldest_spans() -> None:
    trace = Trace(limit=1790)

    def record() -> None:
        for batch in range(300):
            with trace.span("gather", batch=batch):
                trace.count("ready", batch)

    threads = [threading.Thread(target=record, name=f"gather-{number}") for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
        batches = [span.batch for span in trace.spans() if span.track == thread.name]
        assert len(batches) >= 290 and batches == list(range(300 - len(batches), 300))
    assert len(trace.spans()) == len(trace.counters()) == 1790


def test_jsonl_gives_back_what_was_written(tmp_path: Path) -> None:
    trace = Recorded(Span("train", "model stream", 5, 9, 1, device=True), Span("encode", "رشته \n2", 7, 1, 4))
    trace.count("ring", 2)
    trace.write_jsonl(tmp_path / "trace.jsonl")
    assert read_jsonl(tmp_path / "trace.jsonl") == (trace.recorded, trace.counters())


def test_chrome_trace_has_named_tracks_on_host_and_device_processes(tmp_path: Path) -> None:
    trace = Recorded(Span("gather", "gather-0", 10, 5, 3), Span("encode", "encode stream", 20, 8, 3, device=True))
    trace.count("ring", 2)
    events = chrome_events(trace, tmp_path)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    work = [
        (e["name"], e["ts"], e["dur"], e["args"], processes[e["pid"]], tracks[e["pid"], e["tid"]])
        for e in events
        if e["ph"] == "X"
    ]
    assert work == [
        ("gather", 10, 5, {"batch": 3}, "host", "gather-0"),
        ("encode", 20, 8, {"batch": 3}, "devices", "encode stream"),
    ]
    assert [(e["name"], e["args"]) for e in events if e["ph"] == "C"] == [("ring", {"value": 2})]


def test_chrome_trace_keeps_nested_spans_in_a_row_and_never_lets_spans_cross(tmp_path: Path) -> None:
    starts, lengths = np.random.default_rng(0).integers(0, [[3000], [60]], (2, 400)).tolist()
    crossing = [Span("x", "shared", start, length) for start, length in zip(starts, lengths, strict=True)]
    nested = [Span("outer", "stream", 0, 100), Span("inner", "stream", 95, 5), Span("next", "stream", 99, 50)]
    work = [e for e in chrome_events(Recorded(*crossing, *nested), tmp_path) if e["ph"] == "X"]
    assert len(work) == 403
    last_start, open_ends = dict[int, int](), dict[int, list[int]]()
    for event in work:
        row, start, end = event["tid"], event["ts"], event["ts"] + event["dur"]
        assert start >= last_start.get(row, 0), "a row is in the order of time"
        last_start[row] = start
        open_ends[row] = [other for other in open_ends.get(row, []) if other > start]
        assert all(end <= other for other in open_ends[row]), "spans of a row lie in each other or apart"
        open_ends[row].append(end)
    stream = [(e["name"], e["ts"], e["dur"]) for e in work if e["name"] != "x"]
    assert stream == [("outer", 0, 100), ("inner", 95, 5), ("next", 100, 49)]
    assert len({e["tid"] for e in work if e["name"] != "x"}) == 1


def test_off_records_nothing_writes_nothing_and_allocates_nothing(tmp_path: Path) -> None:
    assert OFF.span("a") is OFF.span("b", "track", 3) is OFF.device_span("c", "track", None)
    with OFF.span("gather", batch=1), OFF.device_span("encode", "stream", None, 1):
        OFF.count("ring", 2)
    OFF.anchor(GPU_0)
    OFF.finish()
    OFF.write_jsonl(tmp_path / "trace.jsonl")
    OFF.write_chrome(tmp_path / "trace.json")
    assert not OFF.enabled and Trace().enabled
    assert (OFF.spans(), OFF.counters(), list(tmp_path.iterdir())) == ([], [], [])


def test_a_device_span_is_resolved_when_the_device_has_passed_it(
    use_gpu: Callable[..., FakeGpu], host_clock: list[int]
) -> None:
    device, trace = use_gpu(), Trace()
    trace.anchor(GPU_0)
    stream, other, num_waits = device.stream(), device.stream(), device.num_waits
    stream.held = True
    host_clock[0] += 1_000_000
    with trace.device_span("encode", "encode stream", stream, 2):
        host_clock[0] += 100
    with trace.device_span("train", "model stream", other, 1):
        host_clock[0] += 250
    trace.collect()
    assert [(span.name, span.duration_us, span.device) for span in trace.spans()] == [("train", 250, True)]
    host_clock[0] += 5_000
    stream.let_go()
    trace.collect()
    assert trace.spans()[1] == Span("encode", "encode stream", 5_001_005_350, 0, 2, device=True)
    assert device.num_waits == num_waits
    with trace.device_span("encode", "encode stream", stream, 3):
        pass
    trace.finish()
    assert [span.batch for span in trace.spans()] == [1, 2, 3] and device.num_waits == num_waits + 1


def test_device_times_stay_on_the_host_clock_for_hours(
    use_gpu: Callable[..., FakeGpu], host_clock: list[int]
) -> None:
    for drift in (2e-5, -2e-5):
        device, trace = use_gpu(drift), Trace()
        stream = device.stream()
        launched = []
        for _ in range(4000):
            host_clock[0] += 1_000_000
            launched.append(host_clock[0])
            with trace.device_span("train", "model stream", stream):
                host_clock[0] += 300
            host_clock[0] += 20
            trace.collect()
        errors = [span.start_us - start for span, start in zip(trace.spans(), launched, strict=True)]
        assert min(errors) >= 0 and max(errors) <= 20
        assert {span.duration_us for span in trace.spans()} <= {299, 300, 301}
        assert device.num_events < 30


def test_events_are_used_again_and_a_stalled_device_holds_only_so_many(use_gpu: Callable[..., FakeGpu]) -> None:
    device, trace = use_gpu(), Trace()
    stream = device.stream()
    stream.held = True
    for batch in range(MOST_PENDING + 50):
        with trace.device_span("encode", "encode stream", stream, batch):
            pass
    assert not trace.spans()
    num_events = device.num_events
    stream.let_go()
    stream.held = False
    with pytest.raises(KeyError), trace.span("gather"):
        raise KeyError
    for _ in range(3 * MOST_PENDING):
        with trace.device_span("encode", "encode stream", stream):
            pass
        with pytest.raises(KeyError), trace.device_span("failed", "encode stream", stream):
            raise KeyError
    trace.finish()
    assert device.num_events == num_events
    names = [span.name for span in trace.spans()]
    assert (names.count("encode"), names.count("gather"), names.count("failed")) == (4 * MOST_PENDING, 1, 0)


def test_timing_idle_share_and_outliers() -> None:
    timing = Timing.of([8, 12, 10, 30])
    assert (timing.count, timing.mean_ms, timing.median_ms, timing.longest_ms) == (4, 15, 11, 30)
    assert timing.p95_ms == pytest.approx(27.3)
    assert timing.cv == pytest.approx(((49 + 9 + 25 + 225) / 4) ** 0.5 / 15)
    assert Timing.of(iter([])) == Timing() and Timing().cv == Timing.of([0.0]).cv == 0
    steps = [StepTime(0, 8, 0), StepTime(1, 12, 1), StepTime(2, 10, 2), StepTime(3, 30, 12)]
    assert idle_share(steps) == pytest.approx(15 / 60) and outliers(steps) == [steps[3]]
    assert (idle_share([]), outliers([])) == (0, [])


def test_a_step_is_its_work_and_the_gap_before_it(host_clock: list[int], take_step: Steps) -> None:
    clock = StepClock(None, first_step=7)
    clock.begin()  # this step is given up, and begun again
    host_clock[0] += 500_000
    for gap_ms, work_ms in ((0, 10), (2, 20), (0, 30)):
        take_step(clock, gap_ms, work_ms)
    clock.pause()
    take_step(clock, 5000, 10)  # a pause is not idle time
    steps = [StepTime(7, 10, 0), StepTime(8, 22, 2), StepTime(9, 30, 0), StepTime(10, 10, 0)]
    assert clock.collect() == steps
    assert clock.collect() == [] and clock.step == 11


def test_a_long_run_needs_few_events_and_bounded_memory_and_its_timing_no_warmup(
    use_gpu: Callable[..., FakeGpu], take_step: Steps
) -> None:
    device, clock = use_gpu(), StepClock(None, first_step=100)
    for number in range(20):
        take_step(clock, 1, 9_999 if number < WARMUP_STEPS else 9)
    timing = clock.timing()
    assert (timing.count, timing.mean_ms, timing.cv) == (20 - WARMUP_STEPS, 10, 0)
    assert len(clock.collect()) == 20, "collected times include the warm-up"
    clock = StepClock(device.stream(), limit=50)
    for _ in range(5000):
        take_step(clock, 1, 2)
    assert device.num_events <= 6 and clock.timing().count == 50
    assert [step.step for step in clock.collect()] == list(range(4950, 5000))


def test_steps_are_read_only_when_the_device_has_passed_them(
    use_gpu: Callable[..., FakeGpu], take_step: Steps
) -> None:
    stream = use_gpu().stream()
    clock = StepClock(stream)
    take_step(clock, 0, 10)
    stream.held = True
    take_step(clock, 5, 20)
    take_step(clock, 6, 30)
    assert clock.collect() == [StepTime(0, 10, 0)]
    stream.let_go(as_recorded=True)
    assert clock.collect() == [StepTime(1, 25, 5), StepTime(2, 36, 6)]


def test_a_device_far_behind_drops_steps_and_invents_no_gaps(
    use_gpu: Callable[..., FakeGpu], take_step: Steps
) -> None:
    stream = use_gpu().stream()
    clock = StepClock(stream)
    stream.held = True
    for _ in range(MOST_PENDING + 40):
        take_step(clock, 1, 2)
    stream.let_go(as_recorded=True)
    stream.held = False
    take_step(clock, 1, 2)
    take_step(clock, 1, 2)
    times = clock.collect()
    assert [(step.step, step.gap_ms) for step in times[-2:]] == [(MOST_PENDING + 40, 0), (MOST_PENDING + 41, 1)]
    assert max(step.gap_ms for step in times) == pytest.approx(1)


SLEEP_CYCLES = 50_000_000


@pytest.fixture
def sleeping_gpu() -> Iterator[tuple[torch.cuda.Stream, int]]:
    """A stream, and how long `torch.cuda._sleep` takes on it; waiting for the device is an error."""
    stream = torch.cuda.Stream()
    for _ in range(2):
        start_us = now_us()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
        stream.synchronize()
    slept_us = now_us() - start_us
    yield stream, slept_us
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_device_spans_are_measured_on_the_gpu_without_waiting_for_it(
    sleeping_gpu: tuple[torch.cuda.Stream, int],
) -> None:
    trace, (stream, known_us) = Trace(), sleeping_gpu
    trace.anchor(stream.device)
    torch.cuda.set_sync_debug_mode("error")
    before = now_us()
    for batch in range(5):
        with (
            trace.device_span("step", "encode stream", stream, batch),
            trace.device_span("encode", "encode stream", stream, batch),
            torch.cuda.stream(stream),
        ):
            torch.cuda._sleep(SLEEP_CYCLES)
        trace.collect()
    assert now_us() - before < known_us, "recording waited for the device"
    torch.cuda.set_sync_debug_mode("default")
    trace.finish()
    inner, outer = ([span for span in trace.spans() if span.name == name] for name in ("encode", "step"))
    assert [span.batch for span in inner] == [span.batch for span in outer] == list(range(5))
    last_us = before
    for span, around in zip(inner, outer, strict=True):
        assert span.device and 0.7 * known_us < span.duration_us < 1.5 * known_us
        assert last_us <= around.start_us <= span.start_us
        last_us = around.start_us + around.duration_us
        assert span.start_us + span.duration_us <= last_us
    assert 0 <= now_us() - last_us < known_us / 2


@pytest.mark.gpu
def test_gaps_on_a_gpu_are_measured_without_waiting(sleeping_gpu: tuple[torch.cuda.Stream, int]) -> None:
    stream, known_us = sleeping_gpu
    clock = StepClock(stream)

    def work() -> None:
        clock.begin()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
        clock.end()

    torch.cuda.set_sync_debug_mode("error")
    work()
    assert clock.collect() == [], "the clock waited for the device"
    time.sleep(0.1 + known_us / 1e6)
    work()
    work()
    torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    first, after_gap, back_to_back = clock.collect()
    assert first.gap_ms == 0 and 95 < after_gap.gap_ms < 300 and back_to_back.gap_ms < 1
    for step in (first, after_gap, back_to_back):
        assert step.step_ms - step.gap_ms == pytest.approx(known_us / 1000, rel=0.5)
