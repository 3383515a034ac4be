"""Plants: what makes a training slow in one known way, from outside, around the pipeline's own functions.

Lengths follow the time of a step, so that a plant shows on any machine. Does not know what is said of it.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from myxtts.data.batches import Gathered, Gatherer, HostBatch, Job
from myxtts.devices import Stream
from myxtts.model.gpt import Block
from myxtts.pipeline.frontend import GptFrontend
from myxtts.pipeline.workers import Upload
from myxtts.training.trainer import Step

CLEARLY = 2.5
"""Times a step that a planted stage takes for a batch."""
SAVE_STEP, RECOMPILE_STEP, SLOW_CLIP = 20, 15, 50
LEAK_BYTES, SCRATCH_BYTES = 8 * 2**20, 16 * 2**20


@dataclass(frozen=True)
class Ground:
    """Where a bottleneck is planted."""

    step_s: float
    """A step on a replayed batch, without the plant."""
    batch_size: int
    on_gpu: bool


def slow_gathering(ground: Ground, workers: int = 4) -> AbstractContextManager[object]:
    """Every batch as from a slow disk: longer than all workers together can hide, and over 1 ms a clip."""
    seconds = max(CLEARLY * workers * ground.step_s, 0.0015 * ground.batch_size)
    return _before_filling(lambda _: seconds)


def slow_clip(ground: Ground) -> AbstractContextManager[object]:
    """Batches that hold one of every fifty clips take so long that the mean is more than a step."""
    share = 1 - (1 - 1 / SLOW_CLIP) ** ground.batch_size
    seconds = (CLEARLY if ground.on_gpu else 1.2) * ground.step_s / share  # few steps fit into the time of a CPU
    return _before_filling(lambda job: seconds if (job.plan.clips % SLOW_CLIP == 0).any() else 0.0)


def gathering_for_many(ground: Ground) -> AbstractContextManager[object]:
    """Two steps long for a batch: nothing for four threads, unless the ring lets only one of them work."""
    return _before_filling(lambda _: 2 * ground.step_s)


def _before_filling(seconds_of: Callable[[Job], float]) -> AbstractContextManager[object]:
    fill = Gatherer.fill

    def slow_fill(self: Gatherer, batch: HostBatch, job: Job) -> Gathered:
        time.sleep(seconds_of(job))
        return fill(self, batch, job)

    return mock.patch.object(Gatherer, "fill", slow_fill)


def slow_encoding(ground: Ground) -> AbstractContextManager[object]:
    """A long kernel of one block in the front end: it takes time, and hardly any of the GPU from the model."""
    encode, seconds = GptFrontend.encode, CLEARLY * ground.step_s
    cycles = int(seconds * _cycles_per_s()) if ground.on_gpu else 0

    def slow_encode(self: GptFrontend, *arguments: Any) -> None:
        torch.cuda._sleep(cycles) if cycles else time.sleep(seconds)  # type: ignore[no-untyped-call]
        encode(self, *arguments)

    return mock.patch.object(GptFrontend, "encode", slow_encode)


def _cycles_per_s() -> float:
    """What `_sleep` counts, measured: a clock that follows the load cannot be asked for."""
    for cycles in (10**7, 10**8):
        torch.cuda.synchronize()
        started_at = time.perf_counter()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return 10**8 / (time.perf_counter() - started_at)


def slow_transfer(ground: Ground) -> AbstractContextManager[object]:
    """Other copies from the host in the way of every batch, as on a slot of few streams."""
    begin, seconds = Upload.__init__, CLEARLY * ground.step_s

    def throttled_init(self: Upload, source: Any, target: Any, stream: Stream, *rest: Any) -> None:
        host = torch.zeros(SCRATCH_BYTES, dtype=torch.uint8, pin_memory=ground.on_gpu)
        device = torch.zeros_like(host, device=stream.device)
        started_at, count = time.perf_counter(), 20
        for _ in range(count):
            device.copy_(host)
        copies = max(round(seconds / ((time.perf_counter() - started_at) / count)), 1)

        @contextlib.contextmanager
        def use() -> Iterator[None]:
            with Stream.use(stream):
                for _ in range(copies):
                    device.copy_(host, non_blocking=True)
                yield

        stream.use = use  # type: ignore[method-assign]
        begin(self, source, target, stream, *rest)

    return mock.patch.object(Upload, "__init__", throttled_init)


def host_syncs(_: Ground) -> AbstractContextManager[object]:
    """A look at a value of the device in every layer of the network."""
    forward = Block.forward

    def looking_forward(self: Block, *arguments: Any, **named: Any) -> Any:
        out = forward(self, *arguments, **named)
        out.sum().item()
        return out

    return mock.patch.object(Block, "forward", looking_forward)


def recompilations(_: Ground) -> AbstractContextManager[object]:
    """Something in the step is compiled again, for another shape, every few steps."""
    compiled = torch.compile(lambda x: (x.sin() * 2 + x.cos()).sum(), dynamic=False)
    micro, calls = Step.micro, itertools.count()

    def compiling_micro(self: Step, *arguments: Any, **named: Any) -> None:
        if (number := next(calls)) % RECOMPILE_STEP == 0:
            compiled(torch.ones(8 + number, device=self.stream.device))
        micro(self, *arguments, **named)

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(Step, "micro", compiling_micro))
    stack.enter_context(torch._dynamo.config.patch(recompile_limit=1000))
    return stack


def leak(_: Ground) -> AbstractContextManager[object]:
    """Some memory more in every step, never given back."""
    kept: list[Any] = []
    return _before_each_step(
        lambda step, _: kept.append(torch.empty(LEAK_BYTES, dtype=torch.uint8, device=step.stream.device))
    )


def saving(ground: Ground) -> AbstractContextManager[object]:
    """Every so many steps the trainer does something else for half as long."""
    seconds = 0.5 * SAVE_STEP * ground.step_s
    return _before_each_step(lambda _, number: time.sleep(seconds if number and number % SAVE_STEP == 0 else 0))


def _before_each_step(work: Callable[[Step, int], object]) -> AbstractContextManager[object]:
    train = Step.__call__

    def step(self: Step, next_batch: Any, number: int, *rest: Any) -> None:
        work(self, number)
        train(self, next_batch, number, *rest)

    return mock.patch.object(Step, "__call__", step)
