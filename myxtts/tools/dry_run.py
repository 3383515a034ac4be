"""What a few steps of a rehearsal show: where everything is, what arrives, what is pinned, compiled, allocated.

Says what it saw, not what that means. Leaves nothing behind: codes go to a temporary folder, and nothing is saved.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

from myxtts.config import Settings, num_codes_of
from myxtts.data.batches import (
    Batch,
    Cursor,
    Gatherer,
    HostBatch,
    Sizes,
    host_layout,
    mean_clips,
    packed_tokens,
)
from myxtts.data.clips import ClipSet, PreparedCorpus
from myxtts.data.codes import CodesCache
from myxtts.data.prepare import prepare, with_tokenizer_of_run
from myxtts.devices import Plan, Stream, apply_caps, explain_out_of_memory, make_plan, peak_memory_mb
from myxtts.errors import ConfigError, DatasetError, PipelineError, Progress
from myxtts.observe.breakdown import (
    ALLOCATED_COUNTER,
    DATA_STAGES,
    StageTime,
    end_us,
    length_us,
    merged,
    stage_times,
)
from myxtts.observe.nvml import allocated_mb
from myxtts.observe.trace import OFF, Counter, Span, StepClock, StepTime, Trace, now_us
from myxtts.pipeline.feed import Feed, FeedMaker
from myxtts.run import NoReports, StageTask, feed_maker, require_source, set_up
from myxtts.run_dir import RunDir, initial_model
from myxtts.settings import LoadedSettings
from myxtts.training.trainer import Step, StepMode

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

    def __init__(
        self, loaded: LoadedSettings, prepared: PreparedCorpus, stage: str = "gpt", plan: Plan | None = None
    ) -> None:
        settings = loaded.settings
        self.settings, self.stage = settings, stage
        self.plan = plan or make_plan(settings.data)
        apply_caps(self.plan)
        self._task = StageTask(
            stage=stage,
            settings=settings,
            prepared=prepared,
            plan=self.plan,
            folder=RunDir(Path("rehearsal")),
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
        assert self.maker.streams is not None
        self.stream = self.maker.streams.model
        self.step = Step(recipe, optimizer, mode, self.stream)

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
            with self.maker.training(Cursor(), accumulate, trace, replay) as feed, self.stream.use():
                feed.wait_until_warm(settings.data.model_start_delay)
                clock = StepClock(self.stream.handle)
                ready: dict[str, list[float]] = {}
                for number in range(WARM_UP_STEPS + num_steps):
                    if number == WARM_UP_STEPS:
                        self.stream.finish()
                        clock, measured_at = StepClock(self.stream.handle, limit=num_steps), time.perf_counter()
                        graphs, ready = _num_graphs(), {}
                    for name, (count, depth) in feed.readiness().items():
                        ready.setdefault(name, []).append(count / depth)
                    self._one_step(feed, clock, trace, number, accumulate)
                self.stream.finish()
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
                with trace.device_span("train", "model stream", self.stream.handle, number):
                    self.step.micro(batch, last=micro == accumulate - 1)
        with trace.device_span("update", "model stream", self.stream.handle, number):
            self.step.update(number)
        clock.end()
        trace.collect()


def _num_graphs() -> int:
    """Graphs that the compiler has made in this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


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

    def __init__(self, loaded: LoadedSettings, prepared: PreparedCorpus, stage: str) -> None:
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
        with self.maker.training(Cursor(), 1, trace) as feed, feed.model_stream.use():
            for _ in range(num_batches + 1):
                with feed.next():
                    feed.model_stream.finish()
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


PROBE_STEPS = 8
"""Steps that tell how long one takes, and the fewest that count then."""
MOST_S = 8.0
"""Seconds of training that are enough to tell a speed."""


class Refused(PipelineError):
    """A configuration that this machine cannot train."""

    def __init__(self, reason: str, out_of_memory: bool = False) -> None:
        super().__init__(reason)
        self.out_of_memory = out_of_memory


@dataclass(frozen=True)
class Trial:
    """What a configuration does."""

    clips_per_s: float
    """In the long run: what buffers held at the start and no longer at the end is not counted."""
    fed_clips_per_s: float
    """If every batch had been there at once."""
    memory_mb: dict[str, float]
    """The most that each role took; empty on the CPU."""
    stage_ms: dict[str, float]
    """Mean time of each stage for a batch."""

    @property
    def headspace(self) -> float:
        """How many times faster a perfect feed would be."""
        return max(self.fed_clips_per_s / max(self.clips_per_s, 1e-9), 1.0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Measure = Callable[[LoadedSettings], Trial]


def prepare_corpus(settings: Settings, progress: Progress | None = None) -> PreparedCorpus:
    """The corpus as a new run would train on it."""
    require_source(settings, None)
    return prepare(with_tokenizer_of_run(settings.data, None, settings.training.init_from), progress)


@contextlib.contextmanager
def set_apart(prepared: PreparedCorpus) -> Iterator[PreparedCorpus]:
    """The same corpus with a temporary place for codes, so that fresh weights leave none in the user's cache."""
    with tempfile.TemporaryDirectory(prefix="myxtts-trial-") as folder:
        yield replace(prepared, root=Path(folder))


def try_out(loaded: LoadedSettings, prepared: PreparedCorpus, stage: str, num_steps: int) -> Trial:
    """Time at most so many steps in this process, fewer if they are slow; Refused if that is not possible."""
    try:
        with set_apart(prepared) as apart:
            rehearsal = NotedRehearsal(loaded, apart, stage)
            rehearsal.fill_codes()
            most_steps = num_steps
            if num_steps > PROBE_STEPS:
                step_s = (probe := rehearsal.measure(PROBE_STEPS)).seconds / len(probe.times)
                most_steps = max(int(MOST_S / step_s), PROBE_STEPS)
            num_steps = min(num_steps, most_steps)
            measured = rehearsal.steady(num_steps, most_steps)
    except torch.OutOfMemoryError as error:
        raise Refused(str(error).splitlines()[0], out_of_memory=True) from error
    except (PipelineError, ConfigError) as error:
        raise Refused(str(error), isinstance(error.__cause__, torch.OutOfMemoryError)) from error
    idle_share = sum(step.gap_ms for step in measured.times) / max(sum(s.step_ms for s in measured.times), 1e-9)
    return Trial(
        clips_per_s=rehearsal.long_run_clips_per_s(measured),
        fed_clips_per_s=measured.clips_per_s / max(1 - idle_share, 1e-3),
        memory_mb=measured.memory_mb,
        stage_ms=mean_stage_ms(measured),
    )


def try_out_apart(loaded: LoadedSettings, stage: str, num_steps: int, limit_s: float = math.inf) -> Trial:
    """The same in a process of its own, which is ended after `limit_s`."""
    context = multiprocessing.get_context("spawn")
    answers, questions = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(questions, loaded, stage, num_steps), name="trial")
    process.start()
    questions.close()
    try:
        if not answers.poll(None if math.isinf(limit_s) else limit_s):
            raise Refused(f"no answer within {limit_s:.0f} s")
        answer = answers.recv()
    except EOFError:
        process.join()
        killed = process.exitcode == -9
        died = "it was killed, which is what the system does when host memory runs out" if killed else "it crashed"
        raise Refused(f"the process that tried it ended: {died}", out_of_memory=killed) from None
    finally:
        process.terminate()
        process.join()
        answers.close()
    if isinstance(answer, Trial):
        return answer
    reason, out_of_memory, about_data = answer
    raise DatasetError(reason) if about_data else Refused(reason, out_of_memory)


def _answer(connection: Connection, loaded: LoadedSettings, stage: str, num_steps: int) -> None:
    """In the process of a trial: send what was measured, or why nothing was."""
    try:
        connection.send(try_out(loaded, prepare_corpus(loaded.settings), stage, num_steps))
    except Refused as error:
        connection.send((str(error), error.out_of_memory, False))
    except DatasetError as error:
        connection.send((str(error), False, True))
    except Exception as error:  # whatever a compiler or driver raises is the answer, not a traceback in the way
        first = (str(error).splitlines() or [""])[0]
        connection.send((f"{type(error).__name__}: {first}", "out of memory" in str(error), False))


SPLIT_STEPS, KERNEL_STEPS = 3, 3
MOST_FORWARD = 0.9
"""Of both passes: what seems to be more was measured while the machine did something else."""
KERNELS_LISTED = 25
MATRIX_SIZE, MATRIX_PRODUCTS = 8192, 10
_SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")
_OWN_SYNCS = 2
"""That measuring itself makes: before the first step that counts, and behind the last."""


@dataclass(frozen=True)
class Kernel:
    """A kernel, or on the CPU an operation, and what of the step it takes."""

    name: str
    calls_per_step: float
    ms_per_step: float
    share: float
    """Of the time of all kernels."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class KernelView:
    """The kernels that take longest, and how closely they follow each other."""

    kernels: list[Kernel]
    kernel_share: float | None = None
    """Of the time between the first and the last kernel in which one ran; None on the CPU."""
    syncs_per_step: float | None = None
    """How often the host waits for the device; None on the CPU."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _ForwardStep(Step):
    """A step that does not learn: only the forward pass, as it is before backward."""

    def micro(self, batch: Batch, last: bool = True) -> None:  # noqa: ARG002 - adds no gradients
        with torch.autocast(self._stream.device.type, torch.bfloat16, enabled=self.mode.autocast):
            self._forward(batch.tensors, batch.sizes)

    def update(self, step: int) -> None:
        """Do nothing: no gradients were added."""


def forward_share(rehearsal: Rehearsal, train_ms: float) -> float | None:
    """Share of the forward pass in both passes, which take `train_ms` replayed; None where it cannot be told.

    A captured step is one graph: the share is that of the same step launched kernel by kernel.
    """
    step, whole = rehearsal.step, train_ms
    plain = replace(step.mode, captured=False)
    try:
        if step.mode.captured:
            rehearsal.step = Step(step.recipe, step.optimizer, plain, rehearsal.stream)
            whole = mean_stage_ms(rehearsal.measure(SPLIT_STEPS, replay=True, traced=True))["train"]
        rehearsal.step = _ForwardStep(step.recipe, step.optimizer, plain, rehearsal.stream)
        forward = mean_stage_ms(rehearsal.measure(SPLIT_STEPS, replay=True, traced=True))["train"]
    except PipelineError:
        return None
    finally:
        rehearsal.step = step
    return forward / whole if forward < MOST_FORWARD * whole else None


def kernel_view(rehearsal: Rehearsal) -> KernelView:
    """The kernels of some steps; the rehearsal must have been measured before, so that nothing is compiled."""
    on_gpu = rehearsal.plan.model.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        rehearsal.measure(KERNEL_STEPS, replay=True)
    num_steps = WARM_UP_STEPS + KERNEL_STEPS
    place = "CUDA" if on_gpu else "CPU"
    taken_us = {
        average.key: (average.self_device_time_total if on_gpu else average.self_cpu_time_total, average.count)
        for average in profiler.key_averages()
        if average.device_type.name == place and not getattr(average, "is_user_annotation", False)
    }
    total_us = sum(taken for taken, _ in taken_us.values()) or 1.0
    longest = sorted(taken_us.items(), key=lambda item: -item[1][0])[:KERNELS_LISTED]
    kernels = [
        Kernel(name, count / num_steps, taken / 1000 / num_steps, taken / total_us)
        for name, (taken, count) in longest
    ]
    return KernelView(kernels, *_rhythm(list(profiler.events() or ()), num_steps) if on_gpu else ())


def _rhythm(events: Sequence[Any], num_steps: int) -> tuple[float | None, float | None]:
    """How closely the kernels of the training stream follow each other, and how often the host waits meanwhile.

    The training stream is the one with the most work; others have stood still when the feed was warm. What it did
    before the first step, such as filling the buffers where the front end shares it, does not count.
    """
    begins_us = min((event.time_range.start for event in events if event.name == STEP_RANGE), default=0)
    streams: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        is_kernel = event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
        if is_kernel and event.time_range.start >= begins_us:
            ns = (int(1000 * event.time_range.start), int(1000 * event.time_range.end))
            streams[getattr(event, "device_resource_id", 0)].append(ns)
    if not streams:
        return None, None
    work = merged(max(streams.values(), key=lambda found: length_us(merged(found))))
    start, end = work[0][0], work[-1][1]
    waits = [event for event in events if event.name in _SYNCS and start <= 1000 * event.time_range.start <= end]
    return length_us(work) / max(end - start, 1), max(len(waits) - _OWN_SYNCS, 0) / num_steps


def useful_flops(recipe: nn.Module, clips: ClipSet, num_clips: int) -> float:
    """About the operations that training the GPT on so many clips takes; padding and recomputing do not count.

    Two for each weight and token forward, two for the gradients of activations, two for those of trained weights.
    """
    embeddings = {
        id(parameter)
        for module in recipe.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    products = [p for p in recipe.parameters() if p.ndim > 1 and id(p) not in embeddings]
    weights, trained = sum(p.numel() for p in products), sum(p.numel() for p in products if p.requires_grad)
    tokens = float(packed_tokens(clips.num_ids, clips.num_samples).mean()) * num_clips
    return (4 * weights + 2 * trained) * tokens


def matrix_flops(plan: Plan, stream: Stream) -> float | None:
    """Operations per second of large bf16 products on the model's GPU; None without one, or without room on it."""
    if plan.model.type != "cuda":
        return None
    try:
        with stream.use():
            factor = torch.randn(MATRIX_SIZE, MATRIX_SIZE, dtype=torch.bfloat16, device=plan.model)
            product = factor @ factor
            stream.finish()
            started_at = time.perf_counter()
            for _ in range(MATRIX_PRODUCTS):
                torch.mm(factor, factor, out=product)
            stream.finish()
    except torch.OutOfMemoryError:
        return None
    return MATRIX_PRODUCTS * 2 * MATRIX_SIZE**3 / (time.perf_counter() - started_at)


NUM_STEPS, WITNESS_WARM_UP_STEPS = 6, 3
"""Optimiser steps in all, and those after which nothing may be allocated or compiled any more."""
MOST_WAIT_S = 10.0
"""For the buffers to fill; a rehearsal need not see all of them full."""
MOST_WATCHED = 2**18
"""Numbers of a weight whose change is watched: copies of the large ones would take memory that training needs."""
_PASSED_ON = ("ids", "num_ids", "weights")
"""What a front end passes on as it was gathered."""


@dataclass
class Seen:
    """What was seen."""

    stage: str
    plan: Plan
    mode: StepMode
    losses: list[float] = field(default_factory=list)
    """Mean total loss up to the end of the warm-up, and from then on."""
    spans: set[str] = field(default_factory=set)
    """Names of the pipeline stages that worked."""
    sizes: set[Sizes] = field(default_factory=set)
    changed_tensors: set[str] = field(default_factory=set)
    """Tensors of the first batch that did not arrive as they were gathered."""
    model_devices: set[torch.device] = field(default_factory=set)
    batch_devices: set[torch.device] = field(default_factory=set)
    frozen_devices: set[torch.device] = field(default_factory=set)
    is_pinned: bool = False
    is_ahead: bool = False
    """Batches were ready on the model's device before they were asked for."""
    has_learnt: bool = False
    """The weights changed."""
    grew_mb: float = 0.0
    """How much the peak of device memory rose after the warm-up."""
    num_recompiled: int = 0


def witness(loaded: LoadedSettings, prepared: PreparedCorpus, stage: str, plan: Plan) -> Seen:
    """Train a stage for a few steps and look on; raises what a training would raise."""
    plan = replace(plan, rank=0, world_size=1)
    training = replace(loaded.settings.training, warmup_steps=0)  # so that few steps change the weights
    loaded = replace(loaded, settings=replace(loaded.settings, training=training))
    data, trace = loaded.settings.data, Trace()
    try:
        with set_apart(prepared) as apart:
            rehearsal = Rehearsal(loaded, apart, stage, plan)
            maker, step = rehearsal.maker, rehearsal.step
            seen = Seen(stage, plan, step.mode)
            with maker.training(Cursor(), training.gradient_accumulation_steps, trace) as feed:
                feed.wait_until_warm(min(data.model_start_delay, MOST_WAIT_S))
                seen.is_ahead = feed.readiness()["model"][0] > 0
                seen.is_pinned = torch.from_numpy(feed.host_ring.slots[0].content.memory).is_pinned()
                with feed.model_stream.use():
                    _steps(maker, feed, step, training.gradient_accumulation_steps, seen)
            trace.finish()
    except torch.OutOfMemoryError as error:
        doing = f"rehearsing with batches of {data.batch_size} clips"
        raise explain_out_of_memory(plan, error, "model", doing) from error
    seen.spans = {span.name for span in trace.spans()}
    return seen


def _steps(maker: FeedMaker, feed: Feed, step: Step, accumulate: int, seen: Seen) -> None:
    recipe = step.recipe
    watched = [p for p in recipe.parameters() if p.requires_grad and p.numel() < MOST_WATCHED]
    before = [parameter.detach().clone() for parameter in watched]
    peak_mb, num_compiled = 0.0, 0
    for number in range(NUM_STEPS):
        for micro in range(accumulate):
            with feed.next() as batch:
                assert batch is not None  # training feeds do not end
                if number == micro == 0:
                    seen.changed_tensors = _changed_tensors(maker, batch)
                    recipe.before_first_step(batch.tensors)
                seen.sizes.add(batch.sizes)
                seen.batch_devices |= {tensor.device for tensor in batch.tensors.values()}
                step.micro(batch, last=micro == accumulate - 1)
        step.update(number)
        if number + 1 in (WITNESS_WARM_UP_STEPS, NUM_STEPS):
            seen.losses.append(_mean_loss(step))
            peak, compiled = sum(peak_memory_mb(seen.plan).values()), _num_compiled(seen.mode)
            seen.grew_mb, seen.num_recompiled = peak - peak_mb, compiled - num_compiled
            peak_mb, num_compiled = peak, compiled
    seen.model_devices = {parameter.device for parameter in recipe.parameters()}
    seen.has_learnt = any(not torch.equal(old, now) for old, now in zip(before, watched, strict=True))
    frozen: dict[str, list[nn.Module]] = {
        "gpt": [maker.model.dvae],
        "decoder": [maker.model.dvae, maker.model.gpt],
    }
    seen.frozen_devices = {p.device for module in frozen.get(seen.stage, []) for p in module.parameters()}


def _changed_tensors(maker: FeedMaker, batch: Batch) -> set[str]:
    """Compares the first batch with the same clips gathered once more, on the host."""
    clips = maker.prepared.train
    gatherer = Gatherer(clips, maker.batches(clips), maker.data, maker.seed)
    gathered = HostBatch(host_layout(maker.data), pinned=False)
    gatherer.fill(gathered, next(gatherer.jobs(Cursor())))
    changed = set()
    for name in set(_PASSED_ON) & batch.tensors.keys():
        arrived: Tensor = batch.tensors[name].cpu()
        sent = torch.from_numpy(gathered[name])[tuple(slice(length) for length in arrived.shape)]
        if not torch.equal(arrived, sent):
            changed.add(name)
    return changed


def _mean_loss(step: Step) -> float:
    names, sums = step.take_losses()
    return float((sums[names.index("total")] / sums[-1]).item())


def _num_compiled(mode: StepMode) -> int:
    if not mode.compiled:
        return 0
    from torch._dynamo.utils import counters  # takes seconds to import, which only compiling is worth

    return int(counters["stats"]["unique_graphs"])
