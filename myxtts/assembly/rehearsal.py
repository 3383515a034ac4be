"""The user's own configuration trained for a few steps in memory: what profiling and tuning measure.

The same corpus, feed, recipe and step that training uses, with fresh weights (or those of `init_from`); nothing is
saved but codes. One rehearsal may be measured several times: with the real feed, and with one batch replayed: what
a perfect feed would give.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from myxtts.assembly.folder import RunFolder, initial_model
from myxtts.assembly.session import NoReports
from myxtts.assembly.stage import StageTask, feed_maker, set_up
from myxtts.data.batches import Cursor, mean_clips
from myxtts.data.clips import Prepared
from myxtts.devices import Plan, apply_caps, explain_out_of_memory, make_plan, peak_memory_mb
from myxtts.observe.steps import StepClock, StepTime
from myxtts.observe.trace import OFF, Counter, Span, Trace
from myxtts.pipeline.feed import Feed
from myxtts.settings import Loaded
from myxtts.training.step import Step

WARM_UP_STEPS = 5
"""Steps before the measured ones: compiling, capturing, filling the buffers."""


@dataclass(frozen=True)
class Measured:
    """Some steps of the real configuration."""

    times: list[StepTime]
    seconds: float
    clips_per_s: float
    warm_up_s: float
    """Until the first measured step: buffers, compilation, capture."""
    memory_mb: dict[str, float]
    ready: dict[str, float]
    """Of every ring the mean share that was ready when a batch was taken."""
    recompilations: int
    spans: list[Span] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)


class Rehearsal:
    """A stage set up once and measured as often as needed."""

    def __init__(self, loaded: Loaded, prepared: Prepared, stage: str = "gpt", plan: Plan | None = None) -> None:
        settings = loaded.settings
        self.settings, self.stage = settings, stage
        self.plan = plan or make_plan(settings.data)
        apply_caps(self.plan)
        self._task = StageTask(
            stage=stage,
            settings=settings,
            asked=frozenset(key for key in loaded.origin if loaded.is_set(key)),
            prepared=prepared,
            plan=self.plan,
            folder=RunFolder(Path("rehearsal")),
            reporter=NoReports(),
            stop_requested=lambda: False,
            say=lambda _: None,
            identity={},
            fine_tuning=settings.training.init_from is not None,
        )
        torch._dynamo.reset()  # another rehearsal may have compiled the same code for other shapes
        model = initial_model(settings, prepared.tokenizer)
        recipe, optimizer, mode = set_up(self._task, model, None, total=10**6)
        self.maker = feed_maker(self._task, model)
        assert self.maker.lanes is not None
        self.lane = self.maker.lanes.model
        self.step = Step(recipe, optimizer, mode, self.lane)

    @property
    def clips_per_step(self) -> float:
        """Those that count, on average."""
        batch = mean_clips(len(self._task.prepared.train), self.settings.data.batch_size)
        return self.settings.training.gradient_accumulation_steps * batch

    def measure(self, num_steps: int, *, replay: bool = False, traced: bool = False) -> Measured:
        """Train `num_steps` steps, or the same batch so many times."""
        settings, accumulate = self.settings, self.settings.training.gradient_accumulation_steps
        trace = Trace() if traced else OFF
        try:
            started_at = time.perf_counter()
            with self.maker.training(Cursor(), accumulate, trace, replay) as feed, self.lane.use():
                feed.wait_until_warm(settings.data.model_start_delay)
                clock = StepClock(self.lane.stream)
                ready: dict[str, list[float]] = {}
                for number in range(WARM_UP_STEPS + num_steps):
                    if number == WARM_UP_STEPS:
                        self.lane.finish()
                        clock, measured_at = StepClock(self.lane.stream, limit=num_steps), time.perf_counter()
                        graphs, ready = _num_graphs(), {}
                    for name, (count, depth) in feed.readiness().items():
                        ready.setdefault(name, []).append(count / depth)
                    self._one_step(feed, clock, trace, number, accumulate)
                self.lane.finish()
                seconds = time.perf_counter() - measured_at
                times = clock.collect()
            trace.finish()
        except torch.OutOfMemoryError as error:
            doing = f"rehearsing with batches of {settings.data.batch_size} clips"
            raise explain_out_of_memory(self.plan, error, "model", doing) from error
        return Measured(
            times=times,
            seconds=seconds,
            clips_per_s=num_steps * self.clips_per_step / seconds,
            warm_up_s=measured_at - started_at,
            memory_mb=peak_memory_mb(self.plan),
            ready={name: sum(shares) / len(shares) for name, shares in ready.items()},
            recompilations=_num_graphs() - graphs,
            spans=[span for span in trace.spans() if span.start_us >= int(1e6 * measured_at)],
            counters=trace.counters(),
        )

    def _one_step(self, feed: Feed, clock: StepClock, trace: Trace, number: int, accumulate: int) -> None:
        for micro in range(accumulate):
            with feed.next() as batch:
                assert batch is not None  # training feeds do not end
                if number == 0 and micro == 0:
                    self.step.recipe.before_first_step(batch.tensors)
                if micro == 0:
                    clock.begin()
                with trace.device_span("train", "model lane", self.lane.stream, number):
                    self.step.micro(batch, last=micro == accumulate - 1)
        with trace.device_span("update", "model lane", self.lane.stream, number):
            self.step.update(number)
        clock.end()
        trace.collect()


def _num_graphs() -> int:
    """Graphs that the compiler has made in this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
