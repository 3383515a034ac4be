"""A rehearsal for the tools: notes what a verdict needs, and can do the data side alone.

Makes sure that a slow feed shows: what buffers held before the first step must not carry the measured ones. Knows
how the rehearsal is put together inside, so that no other tool has to.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from myxtts.assembly.rehearsal import WARM_UP_STEPS, Measured, Rehearsal
from myxtts.data.batches import Cursor
from myxtts.data.clips import Prepared
from myxtts.data.codes import CodesCache
from myxtts.data.gather import num_codes_of
from myxtts.observe.evidence import (
    ALLOCATED_COUNTER,
    DATA_STAGES,
    StageTime,
    end_us,
    stage_times,
)
from myxtts.observe.memory import allocated_mb
from myxtts.observe.steps import StepClock
from myxtts.observe.trace import OFF, Span, Trace, now_us
from myxtts.pipeline.feed import Feed
from myxtts.settings import Loaded

DRAINING = 0.03
"""Share of the batches that may come out of buffers filled beforehand without hiding a slow feed."""
MOST_STEPS = 2000
ROWS_PER_WRITE = 1024
ALWAYS_THERE = ("gather", "upload", "encode")
"""Stages that every batch passes."""
STEP_RANGE = "myxtts step"
"""How PyTorch's profiler calls a step, warm-up or not."""


class Drained(NamedTuple):
    """A feed from which batches were taken as fast as they came."""

    seconds: list[float]
    """Between two batches."""
    stages: dict[str, StageTime]


class NotedRehearsal(Rehearsal):
    """A stage set up once and measured as often as needed."""

    def __init__(self, loaded: Loaded, prepared: Prepared, stage: str) -> None:
        super().__init__(loaded, prepared, stage)
        self._prepared = prepared
        self.depths: dict[str, int] = {}
        """Of the rings, by name."""
        self.trace: Trace = OFF
        """Of the last traced measurement."""

    @property
    def accumulate(self) -> int:
        """Batches of a step."""
        return self.settings.training.gradient_accumulation_steps

    def fill_codes(self) -> None:
        """Give every clip codes, of no meaning, as if an epoch had passed: the time of a step does not change."""
        if self.stage == "dvae":
            return
        clips, root = self._prepared.train, self._prepared.root
        num_codes = num_codes_of(clips.num_samples)
        hashes = clips.audio.hashes[clips.audio_rows]
        cache = CodesCache.open(root, hashes, num_codes, self.maker.dvae_key)
        nothing = np.zeros((ROWS_PER_WRITE, int(num_codes.max())), np.uint16)
        for start in range(0, len(clips), ROWS_PER_WRITE):
            rows = np.arange(start, min(start + ROWS_PER_WRITE, len(clips)))
            cache.write(rows, nothing[: len(rows)])
        cache.close()

    def drain(self, num_batches: int) -> Drained:
        """Take batches and do nothing with them."""
        trace, taken_at, start_us = Trace(), [], now_us()
        with self.maker.training(Cursor(), 1, trace) as feed, feed.model_lane.use():
            for _ in range(num_batches + 1):
                with feed.next():
                    feed.model_lane.finish()
                taken_at.append(time.perf_counter())
        trace.finish()
        return Drained(np.diff(taken_at).tolist(), stage_times(trace.spans(), (start_us, now_us())))

    def measure(self, num_steps: int, *, replay: bool = False, traced: bool = False) -> Measured:
        """As in any rehearsal; what the data side had begun before the first measured step belongs to it."""
        measured = super().measure(num_steps, replay=replay, traced=traced)
        if not measured.spans:
            return measured
        start_us = min(span.start_us for span in measured.spans)
        earlier = [span for span in self.trace.spans() if span.start_us < start_us]
        under_way = [span for span in earlier if _lasts_into(span, start_us)]
        return replace(measured, spans=[*under_way, *measured.spans])

    def steady(self, num_steps: int, most_steps: int = MOST_STEPS) -> Measured:
        """The last steps of as many as it takes until buffers no longer hide how fast batches are made; traced.

        If that would be more than `most_steps`, buffers still help a little.
        """
        measured = self.measure(num_steps, traced=True)
        num_batches = num_steps * self.accumulate
        drained = drained_batches(measured.spans)
        if drained <= DRAINING * num_batches:
            return measured
        held = sum(depth for name, depth in self.depths.items() if name != "keep")
        total = min(num_steps + math.ceil(held * num_steps / drained), max(most_steps, num_steps))
        return self._last(self.measure(total, traced=True), num_steps)

    def long_run_clips_per_s(self, measured: Measured) -> float:
        """Speed without the help of buffers: batches that were made in the time, not batches that were taken."""
        num_batches = len(measured.times) * self.accumulate
        made = num_batches - drained_batches(measured.spans)
        return measured.clips_per_s * made / num_batches

    def _last(self, measured: Measured, num_steps: int) -> Measured:
        """The last so many steps of a measurement."""
        first = WARM_UP_STEPS + len(measured.times) - num_steps
        before = [end_us(span) for span in measured.spans if span.name == "update" and span.batch == first - 1]
        start_us, times = max(before, default=0), measured.times[-num_steps:]
        seconds = sum(step.step_ms for step in times) / 1000
        return replace(
            measured,
            times=times,
            seconds=seconds,
            clips_per_s=num_steps * self.clips_per_step / seconds,
            spans=[span for span in measured.spans if span.start_us >= start_us or _lasts_into(span, start_us)],
            counters=[sample for sample in measured.counters if sample.at_us >= start_us],
        )

    def _one_step(self, feed: Feed, clock: StepClock, trace: Trace, number: int, accumulate: int) -> None:
        if number == 0:
            self.depths = {name: depth for name, (_, depth) in feed.readiness().items()}
            self.trace = trace if trace.enabled else self.trace
        with torch.profiler.record_function(STEP_RANGE):
            super()._one_step(feed, clock, trace, number, accumulate)
        for role, gpu in self._gpus().items() if trace.enabled else ():
            trace.count(f"{role}{ALLOCATED_COUNTER}", allocated_mb(gpu))

    def _gpus(self) -> dict[str, int]:
        """The GPUs by what they do."""
        data, model = self.plan.data.index, self.plan.model.index
        if data is None or model is None:
            return {}
        return {"gpu": model} if data == model else {"data": data, "model": model}


def _lasts_into(span: Span, start_us: int) -> bool:
    """Whether a batch was being made at that time; the longest waits are for such batches."""
    return span.name in DATA_STAGES and end_us(span) > start_us


def drained_batches(spans: Sequence[Span]) -> int:
    """How many batches more were trained on than the slowest stage has made meanwhile; 0 if it kept up.

    Not what the rings say: on a GPU a batch is ready there as soon as its work is ordered, long before it is done.
    """
    begun_us = sorted(span.start_us for span in spans if span.name == "train")
    if len(begun_us) < 2:
        return 0
    made = dict.fromkeys(ALWAYS_THERE, 0)
    for span in spans:
        if span.name in made and begun_us[0] < end_us(span) <= begun_us[-1]:
            made[span.name] += 1
    return max(len(begun_us) - 1 - min(made.values()), 0)


def mean_stage_ms(measured: Measured) -> dict[str, float]:
    """Mean length of the spans by name."""
    lengths: defaultdict[str, list[int]] = defaultdict(list)
    for span in measured.spans:
        lengths[span.name].append(span.duration_us)
    return {name: float(np.mean(values)) / 1000 for name, values in lengths.items()}
