"""Settings of the pipeline at work: which thread uses which stream, spans, and how many batches wait where."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from pipeline_fixtures import (
    CPU,
    DEPTHS,
    PLANS,
    SHORT,
    Corpus,
    Stamps,
    assert_same,
    read,
    short,
    worker_threads,
)

from myxtts.config import DataSettings
from myxtts.data.batches import Block, Field, Layout, host_layout
from myxtts.devices import Event, Plan, Stream
from myxtts.errors import ConfigError
from myxtts.host import HostMemory
from myxtts.observe.trace import Trace, now_us
from myxtts.pipeline import feed as feed_module
from myxtts.pipeline import workers
from myxtts.pipeline.feed import Depths, choose_depths
from myxtts.pipeline.ring import Ring

__all__ = ["short"]

pytestmark = pytest.mark.usefixtures("one_thread")

MB = 2**20
GPU = torch.device("cuda", 0)
"""Only its name is used: how much memory it has is given as its cap."""


def test_without_prefetch_batches_are_uploaded_when_they_are_asked_for(short: Corpus, tmp_path: Path) -> None:
    plain, cache = replace(SHORT, prefetch_to_gpu=False), short.cache(tmp_path)
    with short.feed(PLANS["dual"], codes=cache, num_batches=8) as feed:
        assert worker_threads() == {"gather-0", "gather-1", "upload", "encode", "handoff", "keep"}
        expected = read(feed)
    trace, asked = Trace(), []
    with short.feed(PLANS["dual"], codes=cache, data=plain, trace=trace, num_batches=8) as feed:
        assert worker_threads() == {"gather-0", "gather-1", "keep"}
        feed.wait_until_warm(60)
        assert feed.readiness()["model"] == (0, 3)
        found = []
        for _ in range(8):
            from_us = now_us()
            found += read(feed, 1)
            asked.append((from_us, now_us()))
    assert_same(found, expected)
    for span in trace.spans():
        if span.name in ("upload", "encode", "handoff"):
            from_us, to_us = asked[span.batch]
            assert from_us <= span.start_us <= span.start_us + span.duration_us <= to_us
    cache.close()


class SeenStream(Stream):
    """Knows which threads have worked in it."""

    def __init__(self, device: torch.device, *, high_priority: bool = False) -> None:
        super().__init__(device, high_priority=high_priority)
        self.users: set[str] = set()
        STREAMS.append(self)

    def use(self) -> AbstractContextManager[object]:
        self.users.add(threading.current_thread().name)
        return super().use()


STREAMS: list[SeenStream] = []


@pytest.mark.parametrize(
    ("overlap", "copy_stream", "mode", "expected"),
    [
        (True, True, "buffered", [{"reader"}, {"encode"}, {"upload"}]),
        (False, True, "buffered", [{"reader", "encode"}, {"upload"}]),
        (True, False, "buffered", [{"reader"}, {"encode", "upload"}]),
        (False, False, "buffered", [{"reader", "encode", "upload"}]),
        (True, True, "dual", [{"reader"}, {"encode"}, {"upload"}, {"handoff"}]),
    ],
)
def test_which_thread_works_in_which_stream(
    short: Corpus,
    monkeypatch: pytest.MonkeyPatch,
    overlap: bool,
    copy_stream: bool,
    mode: str,
    expected: list[set[str]],
) -> None:
    STREAMS.clear()
    monkeypatch.setattr("myxtts.pipeline.feed.Stream", SeenStream)
    monkeypatch.setattr(threading.current_thread(), "name", "reader")
    data = replace(SHORT, optimize_cpu_gpu_overlap=overlap, enhanced_gpu_prefetch=copy_stream)
    with short.feed(PLANS[mode], Stamps, data=data) as feed:
        read(feed, 4)
        assert feed.model_stream is STREAMS[0]
    assert [stream.users for stream in STREAMS if stream.users] == expected


def test_every_thread_of_the_pipeline_works_on_the_device_of_the_data_role(
    short: Corpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A thread without a current device would open a context on the first GPU, whatever the roles are."""
    current: dict[str, torch.device] = {}
    see = lambda device: current.update({threading.current_thread().name: device})  # noqa: E731
    monkeypatch.setattr("myxtts.pipeline.workers.work_on", see)
    data, model, cache = torch.device("cpu", 0), torch.device("cpu"), short.cache(tmp_path)
    with short.feed(Plan(data, model, "dual"), codes=cache, depths=Depths(2, 3, 2)) as feed:
        read(feed, 2)
    assert current == dict.fromkeys(("gather-0", "gather-1", "upload", "encode", "handoff", "keep"), data)
    cache.close()


def test_a_handoff_is_measured_from_the_moment_its_batch_is_encoded() -> None:
    """Between two GPUs the copy is in the stream of the second, which must wait too before the span begins."""
    done: list[str] = []

    class Order(Stream):
        def __init__(self, name: str) -> None:
            super().__init__(torch.device("cpu"))
            self.name = name

        def wait(self, event: Event) -> None:
            done.append(f"{self.name} waits for {events[id(event)]}")

    class Spans(Trace):
        @contextlib.contextmanager
        def device_span(self, name: str, *_: object) -> Iterator[None]:
            done.append(f"{name} begins")
            yield

    block = Block(Layout({"pcm": Field((1,), "int16")}), torch.device("cpu"))
    source, target = (Ring(name, [block], torch.device("cpu")) for name in ("source", "target"))
    events = {id(source.slots[0].filled): "encode", id(target.slots[0].emptied): "training"}
    source.commit(source.acquire(), Mock())
    workers.Handoff(source, target, Order("first"), Order("second"), Spans())()
    assert done == [
        "first waits for encode", "second waits for encode", "second waits for training", "handoff begins",
    ]  # fmt: skip


def test_a_pipeline_on_the_cpu_asks_for_no_pinned_memory(short: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def plain(num_bytes: int, pinned: bool) -> HostMemory:
        asked.append(pinned)
        return np.zeros(num_bytes, np.uint8)

    monkeypatch.setattr("myxtts.data.batches.host_memory", plain)
    short.feed(make_frontend=Stamps).close()
    assert asked == [False] * DEPTHS.host


def test_spans_of_every_phase_carry_their_batches_and_rings_are_counted(short: Corpus, tmp_path: Path) -> None:
    trace, cache = Trace(), short.cache(tmp_path)
    with short.feed(PLANS["dual"], codes=cache, num_batches=6, trace=trace) as feed:
        read(feed)
    batches: dict[str, list[int]] = defaultdict(list)
    for span in trace.spans():
        batches[span.name].append(span.batch)
    for phase in ("gather", "upload", "encode", "handoff"):
        assert sorted(batches[phase]) == list(range(6)), phase
    assert batches["wait"] == list(range(7))  # the last one found the end
    by_batch = {(span.name, span.batch): span for span in trace.spans()}
    for number in range(6):
        order = [by_batch[phase, number].start_us for phase in ("gather", "upload", "encode", "handoff")]
        assert order == sorted(order)
    assert {span.track for span in trace.spans() if span.name == "gather"} <= {"gather-0", "gather-1"}
    rings = {"host ring", "device ring", "model ring", "handoff ring", "keep ring"}
    assert {counter.name for counter in trace.counters()} == rings
    assert all(0 <= counter.value <= 4 for counter in trace.counters())
    cache.close()


# How many batches wait where


def depths_for(
    monkeypatch: pytest.MonkeyPatch,
    *,
    cores: int = 8,
    host_mb: int = 64_000,
    gpu_mb: int | None = 24_000,
    **settings: object,
) -> Depths:
    monkeypatch.setattr(feed_module, "usable_cores", lambda: cores)
    monkeypatch.setattr(feed_module, "available_bytes", lambda: host_mb * MB)
    data = DataSettings(batch_size=16, max_mel_frames=800, **settings)
    plan = Plan(CPU, CPU) if gpu_mb is None else Plan(GPU, GPU, "buffered", gpu_mb, gpu_mb)
    return choose_depths(data, plan, host_layout(data))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # Given by the user
        ({"prefetch_buffer_size": 7, "pipeline_buffer_size": 30, "cores": 1}, Depths(7, 23, 1)),
        ({"prefetch_buffer_size": 7, "pipeline_buffer_size": 30, "gpu_mb": None}, Depths(7, 23, 4)),
        ({"prefetch_buffer_size": 40, "pipeline_buffer_size": 30}, Depths(40, 3, 4)),
        ({"prefetch_buffer_size": 11}, Depths(11, 39, 4)),
        ({"pipeline_buffer_size": 100}, Depths(8, 92, 4)),
        ({"pipeline_buffer_size": 1}, Depths(1, 3, 4)),
        # Following the workers and the memory
        ({}, Depths(8, 42, 4)),
        ({"num_workers": 1}, Depths(4, 46, 1)),
        ({"cores": 2}, Depths(4, 46, 2)),
        ({"native_loading": False, "cores": 12}, Depths(16, 34, 12)),
        ({"native_loading": False, "num_workers": 6, "cores": 12}, Depths(12, 38, 6)),
        ({"gpu_mb": 256}, Depths(8, 3, 4)),  # one being filled, one ready, one in use
        ({"gpu_mb": None}, Depths(3, 3, 4)),  # on the CPU, few are made ahead
    ],
)
def test_how_many_batches_wait(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], expected: Depths) -> None:
    assert depths_for(monkeypatch, **given) == expected


def test_what_does_not_fit_one_memory_waits_in_the_other_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    depths = depths_for(monkeypatch, pipeline_buffer_size=100, gpu_mb=2000)
    assert depths.host + depths.model == 100
    layout = host_layout(DataSettings(batch_size=16, max_mel_frames=800))
    assert depths.model == int(0.05 * 2000 * MB // layout.num_bytes)
    assert depths_for(monkeypatch, gpu_mb=1000).model < 42
    assert depths_for(monkeypatch, host_mb=300).host < 8


def test_buffers_larger_than_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"(?s)2000 MB are available.*at most \d+ are possible.*--buffer-size"):
        depths_for(monkeypatch, prefetch_buffer_size=500, host_mb=2000)
    with pytest.raises(ConfigError, match="--prefetch-buffer-size"):
        depths_for(monkeypatch, pipeline_buffer_size=5000, host_mb=2000)
