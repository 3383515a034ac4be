"""The life of a feed: it warms up, says what it does, raises the error of a failed worker, and leaves nothing."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pipeline_fixtures import (
    PLANS,
    SHORT,
    Corpus,
    Stamps,
    nothing_left_behind,
    num_open_files,
    read,
    short,
    wait_for,
)

from myxtts.data.batches import Gatherer, Layout
from myxtts.data.codes import CodesCache
from myxtts.data.order import Batches, Cursor
from myxtts.errors import DatasetError, PipelineError
from myxtts.pipeline.feed import Depths, Feed
from myxtts.pipeline.frontend import GptFrontend
from myxtts.pipeline.ring import RingClosed
from myxtts.pipeline.workers import Block, Handoff, Upload, Worker

__all__ = ["short"]

pytestmark = pytest.mark.usefixtures("one_thread")


class Broken(Exception):
    """An error that no worker handles."""


class Fuse:
    """Fails when it is called for the fourth time."""

    blown_at, _left = 0.0, 3

    def burn(self) -> None:
        self._left -= 1
        if self._left < 0:
            self.blown_at = time.perf_counter()
            raise Broken("the fuse has blown")


BREAKABLE = {
    "gather": (Gatherer, "fill"),
    "upload": (Upload, "__call__"),
    "encode": (GptFrontend, "encode"),
    "handoff": (Handoff, "__call__"),
    "keep": (CodesCache, "write"),
}


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("name", BREAKABLE)
def test_what_fails_in_a_worker_is_raised_to_the_reader(
    short: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ahead: bool
) -> None:
    fuse, cache = Fuse(), short.cache(tmp_path)
    owner, method = BREAKABLE[name]
    work = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda *given, **named: (fuse.burn(), work(*given, **named))[1])
    with nothing_left_behind():
        feed = short.feed(PLANS["dual"], codes=cache, data=replace(SHORT, prefetch_to_gpu=ahead))
        with pytest.raises(Broken) as caught, feed:
            read(feed, 500)
        assert time.perf_counter() - fuse.blown_at < 1
    assert str(caught.value) == "the fuse has blown"
    assert "burn" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    threads = {"upload", "encode", "handoff"} if ahead else set()
    if name in threads | {"keep"}:
        assert caught.value.__notes__ == [f"(in the {name} worker of the pipeline)"]
    cache.close()


def test_an_error_wakes_a_reader_that_is_waiting_for_a_batch_or_for_the_warm_up(
    short: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_slowly(*_: object) -> None:
        time.sleep(0.2)
        raise Broken("at last")

    monkeypatch.setattr(Gatherer, "fill", fail_slowly)
    for wait in (lambda feed: read(feed, 1), lambda feed: feed.wait_until_warm(60)):
        with pytest.raises(Broken, match="at last"), short.feed() as feed:
            wait(feed)


def test_epochs_that_cannot_be_arranged_are_no_silent_end(short: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    arrange = Batches._window

    def only_once(self: Batches, epoch: int, window: int) -> object:
        if epoch > 0:
            raise DatasetError("could not be arranged")
        return arrange(self, epoch, window)

    feed = short.feed(make_frontend=Stamps, depths=Depths(3, 3, 4))
    monkeypatch.setattr(Batches, "_window", only_once)
    with pytest.raises(DatasetError, match="could not be arranged"), feed:
        read(feed, 100)


class Starved(Stamps):
    def encode(self, *_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")


@pytest.mark.parametrize("ahead", [True, False])
def test_running_out_of_memory_while_encoding_names_the_data_role(short: Corpus, ahead: bool) -> None:
    data = replace(SHORT, prefetch_to_gpu=ahead)
    feed = short.feed(make_frontend=Starved, data=data)
    said = r"The data role ran out of memory.*while (running|encoding).*2\.00 GiB more"
    with pytest.raises(PipelineError, match=said), feed:
        read(feed, 1)


@pytest.mark.parametrize(("ring", "role"), [("device", "data"), ("model", "model"), ("handoff", "data")])
def test_buffers_that_do_not_fit_name_their_role(
    short: Corpus, monkeypatch: pytest.MonkeyPatch, ring: str, role: str
) -> None:
    most = {"device": 1, "model": 2 + 1, "handoff": 2 + 3 + 1}[ring]
    made: list[Block] = []

    def make(layout: Layout, device: torch.device) -> Block:
        if len(made) == most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.00 MiB.")
        made.append(Block(layout, device))
        return made[-1]

    monkeypatch.setattr("myxtts.pipeline.feed.Block", make)
    message = f"The {role} role ran out of memory.*allocating its buffers.*6.00 MiB"
    with pytest.raises(PipelineError, match=message):
        short.feed(PLANS["dual"], Stamps)


def test_three_batches_wait_for_the_handoff(short: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """One being filled, one ready, one in use: neither side waits for the other."""
    copy, is_open = Handoff.__call__, threading.Event()
    monkeypatch.setattr(Handoff, "__call__", lambda worker: is_open.wait(20) and copy(worker))
    with short.feed(PLANS["dual"], Stamps) as feed:
        try:
            wait_for(lambda: feed.readiness()["handoff"] == (3, 3))
        finally:
            is_open.set()
        assert len(read(feed, 7)) == 7


def fail(feed: Feed) -> None:
    feed.device_ring.slots[1].content.memory = None
    with pytest.raises(AttributeError):
        read(feed, 100)


@pytest.mark.parametrize(
    "use",
    [
        None,
        lambda feed: None,  # noqa: ARG005
        lambda feed: read(feed, 7),
        lambda feed: feed.next().__enter__(),
        fail,
        lambda feed: feed.wait_until_warm(60),
        read,
    ],
    ids=["before start", "right after start", "mid-stream", "with a lease", "failed", "full", "at the end"],
)
@pytest.mark.parametrize("ahead", [True, False])
def test_close_returns_at_any_time_and_leaves_nothing(
    short: Corpus, tmp_path: Path, use: Callable[[Feed], object] | None, ahead: bool
) -> None:
    data = replace(SHORT, prefetch_to_gpu=ahead)
    cache = short.cache(tmp_path)
    for mode in PLANS:
        with nothing_left_behind():
            feed = short.feed(PLANS[mode], codes=cache, data=data, num_batches=40)
            if use is not None:
                feed.start()
                use(feed)
            for _ in range(2):
                started_at = time.perf_counter()
                feed.close()
                assert time.perf_counter() - started_at < 2
    cache.close()


def test_a_closed_feed_says_so(short: Corpus) -> None:
    with short.feed(make_frontend=Stamps) as feed:
        read(feed, 1)
    with pytest.raises(RingClosed, match="is closed"):
        read(feed, 1)


def test_a_start_that_fails_halfway_leaves_nothing(short: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    fuse, start = Fuse(), Worker.start
    monkeypatch.setattr(Worker, "start", lambda worker: (fuse.burn(), start(worker)))  # three of five come to life
    with nothing_left_behind(), pytest.raises(Broken), short.feed(make_frontend=Stamps):
        pytest.fail("it has started")


# Warm-up.


def test_warm_up_returns_when_the_buffers_are_full(short: Corpus) -> None:
    with short.feed(PLANS["dual"], Stamps, depths=Depths(4, 3, 2)) as feed:
        assert feed.wait_until_warm(60) < 30
        ready = feed.readiness()
        assert ready["model"] == (3, 3)
        assert ready["host"][0] >= 3  # one may be in the hands of the upload worker
        wait_for(lambda: feed.num_ahead >= 3 + 3 + 1 + 2)  # with those between the two
    with short.feed(make_frontend=Stamps, num_batches=1) as feed:
        assert feed.wait_until_warm(60) < 30  # there is nothing more to wait for


def test_warm_up_ends_after_the_delay_when_a_worker_is_slow(short: Corpus) -> None:
    class Slow(Stamps):
        def encode(self, *arguments: object) -> None:
            time.sleep(0.4)
            super().encode(*arguments)

    with short.feed(make_frontend=Slow) as feed:
        started_at = time.perf_counter()
        waited_s = feed.wait_until_warm(0.1)
        assert 0.1 <= waited_s < 0.4
        assert time.perf_counter() - started_at >= 0.5  # the delay counts from the first batch
        assert feed.readiness()["model"][0] == 1


# Long runs.


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.soak)])
def test_a_long_run_leaves_no_trace(short: Corpus, count: int) -> None:
    """A step that does next to nothing; neither memory, threads nor files grow after a tenth of the run."""
    with nothing_left_behind(), short.feed(PLANS["dual"], Stamps, depths=Depths(4, 3, 3)) as feed:
        total, start = torch.zeros((), dtype=torch.int64), None
        for number in range(count):
            with feed.next() as batch:
                total += batch.tensors["clips"].sum()
            if number == count // 10:
                start = resident_mb(), threading.active_count(), num_open_files()
        end = resident_mb(), threading.active_count(), num_open_files()
        assert start
        assert end[1:] == start[1:]
        assert end[0] - start[0] < 16
        assert feed.cursor() == Cursor(*divmod(count, 5))
    assert total > 0
