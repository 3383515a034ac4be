"""Dry runs: some steps of a stage with the real settings, data and devices. Nothing of them is saved.

    DryRun              a stage set up once, measured as often as needed: step times, spans, memory
    try_out             one number for `tune`: how fast a configuration trains, or why it cannot
    kernel_view         which kernels take the time of a step, and how often the host waits for them
    observe_pipeline    for `check`: where everything is, and whether it is pinned, compiled and unchanged

Reports facts and leaves judging them to its callers. Codes go to a temporary folder.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

from myxtts.config import Settings, num_codes_of
from myxtts.data.batches import Batch, HostBatch, Sizes, host_layout
from myxtts.data.clips import PreparedCorpus
from myxtts.data.order import Cursor
from myxtts.devices import (
    Plan,
    apply_caps,
    deterministic,
    explained_out_of_memory,
    make_plan,
    peak_memory_mb,
    work_on,
)
from myxtts.distributed import process_group
from myxtts.errors import ConfigError, DatasetError, PipelineError
from myxtts.host import hidden_working_folder
from myxtts.observe.breakdown import (
    ALLOCATED_COUNTER,
    DATA_PHASES,
    PhaseTime,
    ProfileData,
    end_us,
    length_us,
    merged,
    phase_times,
)
from myxtts.observe.nvml import allocated_mb
from myxtts.observe.trace import OFF, Counter, Span, StepClock, StepTime, Timing, Trace, idle_share, now_us
from myxtts.pipeline.feed import Feed, build_feed, build_gatherer, open_codes
from myxtts.run import StageContext, auto_values, prepare_corpus, set_up, with_auto
from myxtts.run_dir import RunDir, initial_model
from myxtts.settings import with_settings
from myxtts.training.trainer import StepMode, clips_per_step

WARM_UP_STEPS = 3  # steps before the measured ones: compiling, capturing, filling the buffers
STEADY_SHARE = 0.03
"""Share of the batches that may come from buffers filled beforehand without hiding a slow feed."""
MAX_STEADY_STEPS = 2000
ROWS_PER_WRITE, CODES_FOLDER = 1024, "myxtts-dry-run-"
STEP_RANGE = "myxtts step"  # the name of a step in PyTorch's profiler


@contextlib.contextmanager
def temporary_codes(prepared: PreparedCorpus, inside: str | None = None) -> Iterator[PreparedCorpus]:
    """The corpus with a temporary folder for codes: the user's cache is not for those of untrained weights."""
    with tempfile.TemporaryDirectory(prefix=CODES_FOLDER, dir=inside) as folder:
        yield replace(prepared, root=Path(folder), other_roots=[])


@dataclass(frozen=True)
class Measurement:
    """Some steps after the warm-up."""

    times: list[StepTime]  # numbered as in the spans: the first measured step is number WARM_UP_STEPS
    seconds: float
    clips_per_step: float
    batches_per_step: int
    memory_mb: dict[str, float]  # peak of each role; empty on the CPU
    depths: dict[str, int]  # batches that each ring holds
    recompilations: int
    spans: list[Span]
    counters: list[Counter]
    trace: Trace  # everything recorded, with the warm-up

    @property
    def clips_per_s(self) -> float:
        return len(self.times) * self.clips_per_step / self.seconds

    @property
    def sustained_clips_per_s(self) -> float:
        """Speed without the help of full buffers: batches that were produced, not batches that were taken."""
        num_batches = len(self.times) * self.batches_per_step
        return self.clips_per_s * (num_batches - num_drained(self.spans)) / num_batches

    def last(self, num_steps: int) -> Measurement:
        times = self.times[-num_steps:]
        before = [end_us(span) for span in self.spans if (span.name, span.batch) == ("update", times[0].step - 1)]
        start_us = max(before, default=0)
        return replace(
            self,
            times=times,
            seconds=sum(step.step_ms for step in times) / 1000,
            spans=_spans_from(self.spans, start_us),
            counters=[sample for sample in self.counters if sample.at_us >= start_us],
        )


class DryRun:
    """A stage set up as for training, measured as often as needed."""

    def __init__(
        self, settings: Settings, prepared: PreparedCorpus, stage: str = "gpt", plan: Plan | None = None
    ) -> None:
        settings = replace(settings, data=prepared.fitted(settings.data))
        settings = with_auto(settings, auto_values(settings, prepared), stage)
        settings = with_settings(settings, {"data.cache_latents": False})  # as in the first epoch of the decoder
        self.settings, self.stage = settings, stage
        self.plan = plan or make_plan(settings.data)
        work_on(self.plan.model)
        apply_caps(self.plan)
        torch._dynamo.reset()  # another dry run may have compiled the same code for other shapes
        model = initial_model(settings, prepared.tokenizer)
        self.ctx = StageContext(stage, settings, prepared, self.plan, model, run_dir=RunDir(Path("dry-run")))
        self.step = set_up(self.ctx, total=1)  # all phases of the stage are over but the last, the costliest
        self.stream = self.step.stream

    @contextlib.contextmanager
    def feed(self, *, replay: bool = False, trace: Trace = OFF) -> Iterator[Feed]:
        """A feed from the first batch on, with the stream of the step in use; lack of memory is explained."""
        doing = f"rehearsing with batches of {self.settings.data.batch_size} clips"
        feed = build_feed(self.ctx, replay=replay, trace=trace)
        same_bits = deterministic(self.plan, self.settings.training.deterministic)
        with same_bits, explained_out_of_memory(self.plan, "model", doing), feed, self.stream.use():
            yield feed

    def fill_codes(self) -> None:
        """Give every clip codes of zeros, as after the first epoch: step times do not depend on their values."""
        if self.stage == "dvae":
            return
        clips = self.ctx.prepared.train
        cache = open_codes(self.ctx, clips)
        zeros = np.zeros((ROWS_PER_WRITE, int(num_codes_of(clips.num_samples).max())), np.uint16)
        for start in range(0, len(clips), ROWS_PER_WRITE):
            rows = np.arange(start, min(start + ROWS_PER_WRITE, len(clips)))
            cache.write(rows, zeros[: len(rows)])
        cache.close()

    def drain(self, num_batches: int) -> tuple[Timing, dict[str, PhaseTime]]:
        """Take batches as fast as they come; return the times between them, and those of each phase."""
        trace, taken_at, start_us = Trace(), [], now_us()
        with self.feed(trace=trace) as feed:
            for _ in range(num_batches + 1):
                with feed.next():
                    self.stream.finish()
                taken_at.append(time.perf_counter())
        trace.finish()
        return Timing.of(1000 * np.diff(taken_at)), phase_times(trace.spans(), (start_us, now_us()))

    def measure(self, num_steps: int, *, replay: bool = False, traced: bool = False) -> Measurement:
        """Train `num_steps` steps after the warm-up, or as often on one and the same batch."""
        trace, stream = Trace() if traced else OFF, self.stream
        with self.feed(replay=replay, trace=trace) as feed:
            feed.wait_until_warm(self.settings.data.model_start_delay)
            depths = {name: depth for name, (_, depth) in feed.readiness().items()}
            self._train(feed, range(WARM_UP_STEPS), StepClock(stream.handle), trace)
            clock = StepClock(stream.handle, limit=num_steps, first_step=WARM_UP_STEPS)
            graphs, started_at, start_us = _num_graphs(self.step.mode), time.perf_counter(), now_us()
            self._train(feed, range(WARM_UP_STEPS, WARM_UP_STEPS + num_steps), clock, trace)
            seconds = time.perf_counter() - started_at
        trace.finish()
        return Measurement(
            times=clock.collect(),
            seconds=seconds,
            clips_per_step=clips_per_step(self.ctx),
            batches_per_step=self.step.accumulate,
            memory_mb=peak_memory_mb(self.plan),
            depths=depths,
            recompilations=_num_graphs(self.step.mode) - graphs,
            spans=_spans_from(trace.spans(), start_us),
            counters=trace.counters(),
            trace=trace,
        )

    def steady(self, num_steps: int, max_steps: int = MAX_STEADY_STEPS) -> Measurement:
        """The last of as many traced steps, up to `max_steps`, as a slow feed takes to empty its buffers."""
        measured = self.measure(num_steps, traced=True)
        drained = num_drained(measured.spans)
        if drained <= STEADY_SHARE * num_steps * self.step.accumulate:
            return measured
        held = sum(depth for name, depth in measured.depths.items() if name != "keep")
        total = min(num_steps + math.ceil(held * num_steps / drained), max(max_steps, num_steps))
        return self.measure(total, traced=True).last(num_steps)

    def forward_share(self) -> float | None:
        """Share of the forward pass in both passes, launched kernel by kernel; None if it cannot be measured."""
        step, stream = self.step, self.stream

        def seconds(work: Callable[[Mapping[str, Tensor], Sizes], object], batch: Batch) -> float:
            for count in (1, SPLIT_PASSES):
                stream.finish()
                started_at = time.perf_counter()
                for _ in range(count):
                    work(batch.tensors, batch.sizes)
                stream.finish()
            return time.perf_counter() - started_at

        with contextlib.suppress(PipelineError):
            with self.feed(replay=True) as feed, feed.next() as batch:
                assert batch is not None  # training feeds do not end
                forward, both = seconds(step.forward, batch), seconds(step.add_gradients, batch)
                step.optimizer.zero_grad()
            return forward / both if forward < MAX_FORWARD_SHARE * both else None
        return None

    def _train(self, feed: Feed, numbers: range, clock: StepClock, trace: Trace) -> None:
        gpus = self._gpus() if trace.enabled else {}
        for number in numbers:
            with torch.profiler.record_function(STEP_RANGE):
                self.step(feed.next, number, clock, trace)
            for role, gpu in gpus.items():
                trace.count(f"{role}{ALLOCATED_COUNTER}", allocated_mb(gpu))
        self.stream.finish()

    def _gpus(self) -> dict[str, int]:
        data, model = self.plan.data.index, self.plan.model.index
        if data is None or model is None:
            return {}
        return {"gpu": model} if data == model else {"data": data, "model": model}


def _spans_from(spans: Sequence[Span], start_us: int) -> list[Span]:
    """The spans from an instant on, and those of batches in work at that time: the longest waits are for these."""
    return [s for s in spans if s.start_us >= start_us or (s.name in DATA_PHASES and end_us(s) > start_us)]


def num_drained(spans: Sequence[Span]) -> int:
    """How many more batches were trained on than the slowest phase of the feed produced; 0 if it kept up."""
    # Rings do not show this: on a GPU a batch is ready there as soon as its work is launched, long before its end.
    begun_us = sorted(span.start_us for span in spans if span.name == "train")
    if len(begun_us) < 2:
        return 0
    produced = {"gather": 0, "upload": 0, "encode": 0}  # the phases that every batch passes
    for span in spans:
        if span.name in produced and begun_us[0] < end_us(span) <= begun_us[-1]:
            produced[span.name] += 1
    return max(len(begun_us) - 1 - min(produced.values()), 0)


def _num_graphs(mode: StepMode) -> int:
    """Graphs that this process has compiled so far."""
    if not mode.compiled:
        return 0
    from torch._dynamo.utils import counters  # takes seconds to import, which only compiling is worth

    return int(counters["stats"]["unique_graphs"])


# The speed of a configuration


PROBE_STEPS = 8  # steps that show how long one takes, and the fewest that count then
TRIAL_S = 8.0  # seconds of training that are enough to measure a speed


class Refused(PipelineError):
    """A configuration that this machine cannot train."""

    def __init__(self, reason: str, out_of_memory: bool = False) -> None:
        super().__init__(reason)
        self.out_of_memory = out_of_memory


@dataclass(frozen=True)
class Trial:
    """How fast a configuration trains."""

    clips_per_s: float  # sustained: batches that buffers held at the start and not at the end are not counted
    fed_clips_per_s: float  # if every batch had been ready in time
    memory_mb: dict[str, float]  # peak of each role; empty on the CPU
    phase_ms: dict[str, float]  # mean time of each phase for a batch

    @property
    def headroom(self) -> float:
        """How many times faster a perfect feed would be."""
        return max(self.fed_clips_per_s / max(self.clips_per_s, 1e-9), 1.0)


def try_out(
    settings: Settings, prepared: PreparedCorpus, stage: str, num_steps: int, inside: str | None = None
) -> Trial:
    """Measure at most so many steps in this process, fewer if they are slow; Refused if they cannot be trained."""
    try:
        with temporary_codes(prepared, inside) as apart:
            dry_run = DryRun(settings, apart, stage)
            dry_run.fill_codes()
            max_steps = num_steps
            if dry_run.plan.world_size > 1:  # all processes take the same number of steps
                measured = dry_run.measure(num_steps, traced=True)
            else:
                if num_steps > PROBE_STEPS:
                    probe = dry_run.measure(PROBE_STEPS)
                    max_steps = max(int(TRIAL_S * PROBE_STEPS / probe.seconds), PROBE_STEPS)
                measured = dry_run.steady(min(num_steps, max_steps), max_steps)
    except torch.OutOfMemoryError as error:
        raise Refused(str(error).splitlines()[0], out_of_memory=True) from error
    except (PipelineError, ConfigError) as error:
        raise Refused(str(error), isinstance(error.__cause__, torch.OutOfMemoryError)) from error
    lengths_us: defaultdict[str, list[int]] = defaultdict(list)
    for span in measured.spans:
        lengths_us[span.name].append(span.duration_us)
    return Trial(
        clips_per_s=measured.sustained_clips_per_s,
        fed_clips_per_s=measured.clips_per_s / max(1 - idle_share(measured.times), 1e-3),
        memory_mb=measured.memory_mb,
        phase_ms={name: float(np.mean(values)) / 1000 for name, values in lengths_us.items()},
    )


def try_out_apart(
    settings: Settings, stage: str, num_steps: int, limit_s: float = math.inf, num_processes: int = 1
) -> Trial:
    """The same in a process of its own, or in several as torchrun starts them, which are ended after `limit_s`."""
    context, answer = multiprocessing.get_context("spawn"), None
    folder = tempfile.TemporaryDirectory(prefix=CODES_FOLDER)  # here: processes that are ended leave theirs
    pipes = [context.Pipe(duplex=False) for _ in range(num_processes)]
    places = _places(num_processes) if num_processes > 1 else [{}]
    common = (folder.name, settings, stage, num_steps)
    work = [(sender, place, *common) for (_, sender), place in zip(pipes, places, strict=True)]
    processes = [context.Process(target=_send_trial, args=given, name="trial") for given in work]
    with hidden_working_folder():
        for process in processes:
            process.start()
    for _, sender in pipes:
        sender.close()
    try:
        receivers = [receiver for receiver, _ in pipes]
        answered = wait(receivers, None if math.isinf(limit_s) else limit_s)
        if not answered:
            raise Refused(f"no answer within {limit_s:.0f} s")
        first = receivers.index(next(receiver for receiver in receivers if receiver in answered))
        answer = receivers[first].recv()
    except EOFError:
        processes[first].join()
        killed = processes[first].exitcode == -9
        died = "it was killed, which is what the system does when host memory runs out" if killed else "it crashed"
        raise Refused(f"the process that tried it ended: {died}", out_of_memory=killed) from None
    finally:
        for process, (receiver, _) in zip(processes, pipes, strict=True):
            process.terminate()
            process.join()
            receiver.close()
        folder.cleanup()
    if isinstance(answer, Exception):
        raise answer
    assert isinstance(answer, Trial)
    return answer


def _places(num_processes: int) -> list[dict[str, str]]:
    """The variables that torchrun gives to each process on one machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:  # a port that is free
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_processes))
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]


def _send_trial(
    connection: Connection, place: Mapping[str, str], folder: str, settings: Settings, stage: str, num_steps: int
) -> None:
    """In the process of a trial: send what was measured, or the error."""
    answer: Trial | Refused | DatasetError
    try:
        os.environ.update(place)
        prepared = prepare_corpus(settings)
        with process_group(make_plan(settings.data)):
            answer = try_out(settings, prepared, stage, num_steps, folder)
    except (Refused, DatasetError) as error:
        answer = error
    except Exception as error:  # errors of compilers and drivers are answers too
        first = (str(error).splitlines() or [""])[0]
        answer = Refused(f"{type(error).__name__}: {first}", "out of memory" in str(error))
    connection.send(answer)


# The kernels of a step


SPLIT_PASSES, KERNEL_STEPS = 3, 3
MAX_FORWARD_SHARE = 0.9  # a larger share of the forward pass was measured while the machine did something else
KERNELS_LISTED = 25
_SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")
_OWN_SYNCS = 2  # waits that measuring itself causes: before the first measured step, and after the last


@dataclass(frozen=True)
class Kernel:
    """A kernel, or on the CPU an operation, and its part of the step."""

    name: str
    calls_per_step: float
    ms_per_step: float
    share: float  # share of the time of all kernels


@dataclass(frozen=True)
class KernelView:
    """The kernels that take longest, and how closely they follow each other."""

    kernels: list[Kernel]
    kernel_share: float | None = None
    """Share of the time, from the first kernel to the last, in which one ran; None on the CPU."""
    syncs_per_step: float | None = None  # how often the host waits for the device; None on the CPU


def kernel_view(dry_run: DryRun) -> KernelView:
    """The kernels of some steps; measure the dry run before, so that nothing is compiled meanwhile."""
    on_gpu = dry_run.plan.model.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        dry_run.measure(KERNEL_STEPS, replay=True)
    num_steps, place = WARM_UP_STEPS + KERNEL_STEPS, "CUDA" if on_gpu else "CPU"
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
    return KernelView(kernels, *kernel_occupancy(list(profiler.events() or ()), num_steps) if on_gpu else ())


def kernel_occupancy(events: Sequence[Any], num_steps: int) -> tuple[float | None, float | None]:
    """The share of the training stream's time in which a kernel ran, and how often per step the host waited.

    The training stream is the one with the most work: others stood still once the feed was warm. Its work before
    the first step, such as filling the buffers where the front end shares it, does not count.
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


# The pipeline at work


GRADED_STEPS = 20
OBSERVED_STEPS = 6  # steps in all; after the warm-up nothing may be allocated or compiled
MAX_WARM_UP_S = 10.0  # an observation need not see all buffers full
MAX_WATCHED = 2**18
"""Size of the largest weights that are compared: copies of larger ones would take memory that training needs."""
_PASSED_ON = ("ids", "num_ids", "weights")  # tensors that a front end passes on as they were gathered


@dataclass
class Observation:
    """A few steps of a stage as they were seen."""

    stage: str
    plan: Plan
    mode: StepMode
    losses: list[float] = field(default_factory=list)
    """Mean total loss up to the end of the warm-up, and from then on."""
    spans: set[str] = field(default_factory=set)  # phases that took place
    sizes: set[Sizes] = field(default_factory=set)
    changed_tensors: set[str] = field(default_factory=set)
    """Tensors of the first batch that did not arrive as they were gathered."""
    model_devices: set[torch.device] = field(default_factory=set)
    batch_devices: set[torch.device] = field(default_factory=set)
    frozen_devices: set[torch.device] = field(default_factory=set)
    is_pinned: bool = False
    is_ahead: bool = False  # batches were ready on the model's device before they were asked for
    has_learnt: bool = False
    grew_mb: float = 0.0  # rise of the peak of device memory after the warm-up
    num_recompiled: int = 0
    profile: ProfileData | None = None  # some steps as in a later epoch; None on the CPU


def observe_pipeline(settings: Settings, prepared: PreparedCorpus, stage: str, plan: Plan) -> Observation:
    """Train a stage for a few steps and record what happens; raises what training would raise."""
    plan, trace = replace(plan, rank=0, world_size=1), Trace()
    training = replace(settings.training, warmup_steps=0)  # so that few steps change the weights
    settings = replace(settings, training=training)
    with temporary_codes(prepared) as apart:
        dry_run = DryRun(settings, apart, stage, plan)
        seen = Observation(stage, plan, dry_run.step.mode)
        with dry_run.feed(trace=trace) as feed:
            feed.wait_until_warm(min(settings.data.model_start_delay, MAX_WARM_UP_S))
            seen.is_ahead = feed.readiness()["model"][0] > 0
            seen.is_pinned = torch.from_numpy(feed.host_ring.slots[0].content.memory).is_pinned()
            _observe_steps(dry_run, feed, seen)
        trace.finish()
        if plan.model.type == "cuda":
            dry_run.fill_codes()
            measured = dry_run.measure(GRADED_STEPS, traced=True)
            seen.profile = ProfileData(spans=measured.spans, data_gpu=plan.data.index, model_gpu=plan.model.index)
    seen.spans = {span.name for span in trace.spans()}
    return seen


def _observe_steps(dry_run: DryRun, feed: Feed, seen: Observation) -> None:
    step, clock = dry_run.step, StepClock(dry_run.stream.handle)

    @contextlib.contextmanager
    def next_observed() -> Iterator[Batch | None]:
        with feed.next() as batch:
            assert batch is not None  # training feeds do not end
            if not seen.sizes:
                seen.changed_tensors = _changed_tensors(dry_run.ctx, batch)
            seen.sizes.add(batch.sizes)
            seen.batch_devices |= {tensor.device for tensor in batch.tensors.values()}
            yield batch

    watched = [p for p in step.recipe.parameters() if p.requires_grad and p.numel() < MAX_WATCHED]
    before = [parameter.detach().clone() for parameter in watched]
    peak_mb, num_compiled = 0.0, 0
    for number in range(OBSERVED_STEPS):
        step(next_observed, number, clock)
        if number + 1 in (WARM_UP_STEPS, OBSERVED_STEPS):
            seen.losses.append(float(step.scalars()["loss.total"]))
            peak, compiled = sum(peak_memory_mb(seen.plan).values()), _num_graphs(seen.mode)
            seen.grew_mb, seen.num_recompiled = peak - peak_mb, compiled - num_compiled
            peak_mb, num_compiled = peak, compiled
    seen.model_devices = {parameter.device for parameter in step.recipe.parameters()}
    seen.has_learnt = any(not torch.equal(old, now) for old, now in zip(before, watched, strict=True))
    model = dry_run.ctx.model
    frozen: dict[str, list[nn.Module]] = {"gpt": [model.dvae], "decoder": [model.dvae, model.gpt]}
    seen.frozen_devices = {p.device for module in frozen.get(seen.stage, []) for p in module.parameters()}


def _changed_tensors(ctx: StageContext, batch: Batch) -> set[str]:
    """Names of the tensors that differ from the same clips gathered once more, on the host."""
    gatherer = build_gatherer(ctx, ctx.prepared.train)
    gathered = HostBatch(host_layout(ctx.settings.data), pinned=False)
    gatherer.fill(gathered, next(gatherer.jobs(Cursor())))

    def is_changed(name: str) -> bool:
        arrived = batch.tensors[name].cpu()
        sent = torch.from_numpy(gathered[name])[tuple(slice(length) for length in arrived.shape)]
        return not torch.equal(arrived, sent)

    return {name for name in _PASSED_ON if name in batch.tensors and is_changed(name)}
