"""The training loop of one stage, and nothing else.

It is handed a feed, a step, checkpoints and someone to report to, and cannot tell one GPU from two. Values of the
device come to the host only through `_Readings`: copied in the stream, looked at when they have arrived.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from myxtts.checkpoints import Checkpoints, Snapshot, to_host
from myxtts.config import TrainingSettings
from myxtts.data.batches import Batch, Cursor, Sizes
from myxtts.devices import CudaGraph, Event, Stream
from myxtts.errors import PipelineError
from myxtts.observe.metrics import StepReport, ValidationReport
from myxtts.observe.trace import OFF, StepClock, Trace, idle_share, step_timing
from myxtts.training.optim import Optimizer
from myxtts.training.recipes import Recipe

STEPS_AHEAD = 2


@dataclass(frozen=True)
class StepMode:
    """How a step is run."""

    autocast: bool = False
    """bf16 where that is safe."""
    compiled: bool = False
    captured: bool = False
    """Started with a few launches; needs a GPU, static shapes and a process of its own."""
    tuned: bool = False
    """Compiles everything as one graph and tries many kernels, which takes minutes."""
    debug: bool = False
    """Names the operation that made a NaN, and waits for the device after every micro-step."""

    def __str__(self) -> str:
        compiled = "compiled with many kernels tried" if self.tuned else "compiled"
        parts = [
            "eager, with anomaly checks: slow on purpose" if self.debug else "",
            compiled if self.compiled else "",
            "captured as a CUDA graph" if self.captured else "",
            "" if self.debug or self.compiled or self.captured else "eager",
            "bf16" if self.autocast else "fp32",
        ]
        return ", ".join(part for part in parts if part)


def choose_mode(
    training: TrainingSettings,
    *,
    mixed_precision: bool,
    static_shapes: bool,
    on_gpu: bool,
    world_size: int,
    redraws: bool = False,
) -> StepMode:
    """What the settings ask for, as far as the machine can do it.

    `redraws` says that the backward pass draws the random numbers of the forward pass again, which a CUDA graph
    cannot do.
    """
    if training.enable_eager_debug:
        return StepMode(autocast=mixed_precision and on_gpu, debug=True)
    graph = training.enable_graph_mode and on_gpu and static_shapes  # every other shape would be compiled anew
    compiled = graph and training.enable_xla_compilation
    return StepMode(
        autocast=mixed_precision and on_gpu,
        compiled=compiled,
        captured=graph and world_size == 1 and not redraws,
        tuned=compiled and training.optimization_level == "experimental",
    )


class Step:
    """Micro-steps that add gradients, and the update that uses them.

    `micro` may be called any number of times before `update`; under DDP the last one must say so.
    """

    def __init__(
        self, recipe: Recipe, optimizer: Optimizer, mode: StepMode, stream: Stream, world_size: int = 1
    ) -> None:
        self.recipe, self.optimizer, self.mode, self._stream = recipe, optimizer, mode, stream
        forward: nn.Module = recipe
        if mode.compiled:
            options = "max-autotune-no-cudagraphs" if mode.tuned else None
            for region in [recipe] if mode.tuned else recipe.regions():
                region.compile(fullgraph=True, dynamic=False, mode=options)
        self._distributed: DistributedDataParallel | None = None
        if world_size > 1:
            # Weights of width 1 have several layouts that are one and the same.
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
            ids = [stream.device.index] if stream.device.type == "cuda" else None
            forward = self._distributed = DistributedDataParallel(
                forward, device_ids=ids, gradient_as_bucket_view=True
            )
        self._forward = forward
        self._names: list[str] = []
        self._sums: Tensor | None = None
        self._static: dict[str, Tensor] = {}
        self._micro_graph: CudaGraph[None] | None = None
        self._update_graph: CudaGraph[None] | None = None
        self._events = [Event(stream.device) for _ in range(STEPS_AHEAD)]
        self._num_updates = 0

    def micro(self, batch: Batch, last: bool = True) -> None:
        """Add the gradients of one batch; its tensors are free again when the stream has passed this point."""
        if self.mode.captured:
            if self._micro_graph is None:
                self._capture(batch)
            for name, tensor in self._static.items():
                tensor.copy_(batch.tensors[name])
            assert self._micro_graph is not None
            self._micro_graph.replay()
            return
        alone = contextlib.nullcontext()
        with alone if last or self._distributed is None else self._distributed.no_sync():
            self._add_gradients(batch.tensors, batch.sizes)

    def update(self, step: int) -> None:
        """Clip, update the weights with the learning rate of this step, and start over with no gradients."""
        self.optimizer.set_lr(step)
        if self._update_graph is not None:
            self._update_graph.replay()
        else:
            self.optimizer.update()
        self.optimizer.zero_grad()
        self.recipe.after_step(step)
        event = self._events[self._num_updates % STEPS_AHEAD]
        event.wait_on_host()
        self._stream.record(event)
        self._num_updates += 1

    def take_losses(self) -> tuple[list[str], Tensor]:
        """Names and, still on the device, sums of the losses since the last call, with their number in the end."""
        assert self._sums is not None
        taken = self._sums.clone()
        self._sums.zero_()
        return self._names, taken

    def _add_gradients(self, tensors: Mapping[str, Tensor], sizes: Sizes) -> None:
        checked = torch.autograd.set_detect_anomaly(True) if self.mode.debug else contextlib.nullcontext()
        with checked:
            with torch.autocast(self._stream.device.type, torch.bfloat16, enabled=self.mode.autocast):
                losses = self._forward(tensors, sizes)
            losses["total"].backward()
        if self.mode.debug:
            self._stream.finish()  # an error of the device then names its own step
        if self._sums is None:
            self._names = list(losses)
            self._sums = torch.zeros(len(losses) + 1, device=self._stream.device)
        values = [value.detach().float() for value in losses.values()]
        self._sums += torch.stack([*values, torch.ones_like(values[0])])

    def _capture(self, batch: Batch) -> None:
        """Record both graphs. Warming up must change nothing: neither weights, buffers nor sums."""
        self._static = {name: tensor.clone() for name, tensor in batch.tensors.items()}
        kept = {name: buffer.clone() for name, buffer in self.recipe.named_buffers()}
        self._micro_graph = CudaGraph(lambda: self._add_gradients(self._static, batch.sizes), self._stream)
        self.optimizer.zero_grad()
        counters = [counter.clone() for counter in self.optimizer.counters()]
        self.optimizer.poison_gradients()  # an update with non-finite gradients leaves everything as it was
        self._update_graph = CudaGraph(self.optimizer.update, self._stream, self._micro_graph.pool)
        self.optimizer.zero_grad()
        with torch.no_grad():
            for counter, value in zip(self.optimizer.counters(), counters, strict=True):
                counter.copy_(value)
            for name, buffer in self.recipe.named_buffers():
                buffer.copy_(kept[name])
        assert self._sums is not None
        self._sums.zero_()


MOST_SKIPPED = 20
"""Steps in a row with non-finite gradients after which training ends: waiting longer has never helped anybody."""

_log = logging.getLogger(__name__)


class Feed(Protocol):
    """Where batches come from."""

    model_stream: Stream

    def next(self) -> contextlib.AbstractContextManager[Batch | None]: ...
    def cursor(self) -> Cursor: ...
    def readiness(self) -> dict[str, tuple[int, int]]: ...
    @property
    def num_ahead(self) -> int: ...


class Reporter(Protocol):
    """Who is told how training goes; may show and keep it as it likes."""

    def begin(self, stage: str, step: int, total_steps: int) -> None: ...
    def tick(self, step: int) -> None: ...
    def step(self, report: StepReport) -> None: ...
    def validation(self, report: ValidationReport) -> None: ...
    def picture(self, name: str, picture: Tensor, step: int) -> None: ...


@dataclass
class State:
    """How far a stage has come: what a checkpoint holds besides tensors."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    best_loss: float = math.inf
    stale_validations: int = 0
    done: bool = False

    def to_json(self) -> dict[str, Any]:
        best = None if math.isinf(self.best_loss) else self.best_loss
        cursor = [self.cursor.epoch, self.cursor.batch]
        return {
            "cursor": cursor,
            "best_loss": best,
            "stale_validations": self.stale_validations,
            "done": self.done,
        }

    @classmethod
    def from_json(cls, step: int, values: Mapping[str, Any]) -> State:
        best = math.inf if values["best_loss"] is None else float(values["best_loss"])
        return cls(step, Cursor(*values["cursor"]), best, values["stale_validations"], values["done"])


@dataclass(frozen=True)
class TrainerContext:
    """What the loop uses but does not own."""

    reporter: Reporter
    checkpoints: Checkpoints
    weights: Callable[[], Mapping[str, Tensor]]
    """What a checkpoint keeps of the model, by the names of the XTTS-v2 ecosystem; live tensors."""
    random_states: Callable[[], Mapping[str, Tensor]]
    """Of all processes; called by all of them."""
    validate: Callable[[], tuple[Mapping[str, float], Mapping[str, Tensor]]] | None = None
    """Mean losses over the validation clips, the deciding one called "total", and pictures of one batch."""
    notes: Mapping[str, Any] | None = None
    """Kept with every checkpoint: the configuration it belongs to."""
    stop_requested: Callable[[], bool] = lambda: False
    stop_every: int = 1
    """Steps between two questions whether to stop: among several processes each costs a round of messages."""
    peak_memory_mb: Callable[[], Mapping[str, float]] = dict
    is_writer: bool = True
    trace: Trace = OFF


class Trainer:
    """Trains one stage from where `state` stands to `total_steps`."""

    def __init__(
        self,
        stage: str,
        step: Step,
        feed: Feed,
        training: TrainingSettings,
        around: TrainerContext,
        *,
        state: State,
        total_steps: int,
        clips_per_step: float,
    ) -> None:
        self.stage, self.state, self.total_steps = stage, state, total_steps
        self._step, self._feed, self._training, self._around = step, feed, training, around
        self._stream = feed.model_stream
        self._clips_per_step = clips_per_step
        self._clock = StepClock(self._stream.handle)
        self._readings = _Readings(self._stream)
        self._host_copies: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        self._started_at, self._started_step = time.perf_counter(), state.step

    def run(self) -> State:
        """Train; returns early, with everything saved, when a stop was requested."""
        self._around.reporter.begin(self.stage, self.state.step, self.total_steps)
        with self._stream.use():
            while self.state.step < self.total_steps and not self._stops_early():
                self._one_step()
                step = self.state.step
                if step % self._training.log_step == 0 or step == self.total_steps:
                    self._readings.ask(self._step, step)
                self._report_arrived()
                last = step == self.total_steps
                # On a GPU once at the start: if there is no memory for it, better to know before hours of work.
                first = step == 1 and self._stream.handle is not None
                is_best = self._validate() if step % self._training.val_step == 0 or last or first else False
                if step % self._training.save_step == 0 or last or is_best:
                    self.save(is_best, done=last)
                if step % self._around.stop_every == 0 and self._around.stop_requested():
                    break
            self._stream.finish()
            self._report_arrived()
            if not self.state.done:
                self.save(done=self.state.step >= self.total_steps or self._stops_early())
        failure = self._around.checkpoints.wait()
        if failure is not None:
            raise PipelineError(
                f"Step {self.state.step} of stage {self.stage} could not be saved: {failure}.\n"
                "Make room or choose another --checkpoint-dir; the same command continues from the last good "
                "checkpoint."
            )
        return self.state

    def _one_step(self) -> None:
        accumulate = self._training.gradient_accumulation_steps
        trace, number = self._around.trace, self.state.step
        for micro in range(accumulate):
            with self._feed.next() as batch:
                if batch is None:
                    raise PipelineError("the feed ended before the training did")
                if number == 0 and micro == 0:
                    self._step.recipe.before_first_step(batch.tensors)
                if micro == 0:
                    self._clock.begin()
                with trace.device_span("train", "model stream", self._stream.handle, number):
                    self._step.micro(batch, last=micro == accumulate - 1)
        with trace.device_span("update", "model stream", self._stream.handle, number):
            self._step.update(number)
        self._clock.end()
        if trace.enabled:
            trace.collect()
        self.state.step += 1
        self.state.done = False  # a finished stage may be prolonged
        self._around.reporter.tick(self.state.step)
        self.state.cursor = self._feed.cursor()

    def save(self, is_best: bool = False, done: bool = False) -> None:
        """Snapshot to the host, written in the background; training goes on when the copy is made."""
        self.state.done = done
        random_states = self._around.random_states()
        if not self._around.is_writer:
            return
        self._around.checkpoints.wait()  # it reads the copies that are overwritten now
        pin = self._stream.device.type == "cuda"
        weights, optimizer = self._host_copies or ({}, {})
        weights = to_host(self._around.weights(), weights or None, pin=pin)
        optimizer = to_host(self._step.optimizer.state_dict(), optimizer or None, pin=pin)
        self._host_copies = (weights, optimizer)
        state = {**self.state.to_json(), "stage": self.stage, "notes": dict(self._around.notes or {})}
        snapshot = Snapshot(weights, {**optimizer, **random_states}, state)
        self._around.checkpoints.save(self.state.step, snapshot, best=is_best)
        self._clock.pause()

    def _validate(self) -> bool:
        """Whether the validation was the best so far."""
        if self._around.validate is None:
            return False
        with self._step.optimizer.swap_ema(), self._around.trace.span("validate"):
            losses, pictures = self._around.validate()
        for name, picture in pictures.items():
            self._around.reporter.picture(f"{self.stage}/{name}", picture, self.state.step)
        self._clock.pause()
        is_best = losses["total"] < self.state.best_loss
        self.state.best_loss = losses["total"] if is_best else self.state.best_loss
        self.state.stale_validations = 0 if is_best else self.state.stale_validations + 1
        self._around.reporter.validation(ValidationReport(self.stage, self.state.step, losses, is_best))
        return is_best

    def _stops_early(self) -> bool:
        patience = self._training.early_stop
        return 0 < patience <= self.state.stale_validations

    def _report_arrived(self) -> None:
        for step, values in self._readings.arrived():
            if values["skipped_in_a_row"] >= MOST_SKIPPED:
                raise PipelineError(
                    f"Training stopped at step {step}: the gradients of the last {values['skipped_in_a_row']:.0f} "
                    "steps were not finite, so nothing was learnt from them.\nLower --lr, raise warmup_steps, or "
                    "look for the operation with training.enable_eager_debug. Earlier checkpoints are kept."
                )
            self._around.reporter.step(self._report(step, values))

    def _report(self, step: int, values: Mapping[str, float]) -> StepReport:
        steps = self._clock.collect()
        times = step_timing(steps)
        elapsed_s = time.perf_counter() - self._started_at
        seconds_per_step = times.mean_ms / 1000 or elapsed_s / max(step - self._started_step, 1)
        if step > self._started_step + self._training.log_step:
            expected_s = seconds_per_step
        else:  # the first steps compile: what they took says nothing of those to come
            expected_s = self._clock.timing().median_ms / 1000
        losses = {name.removeprefix("loss."): value for name, value in values.items() if name.startswith("loss.")}
        losses["total"] *= self._training.gradient_accumulation_steps  # a micro-step's is its share of the step
        norms = {name.removeprefix("norm."): value for name, value in values.items() if name.startswith("norm.")}
        return StepReport(
            stage=self.stage,
            step=step,
            total_steps=self.total_steps,
            epoch=self.state.cursor.epoch,
            losses=losses,
            lr=self._step.optimizer.lr_at(step - 1),
            grad_norm=norms,
            clips_per_s=self._clips_per_step / seconds_per_step if seconds_per_step else 0.0,
            step_ms=times.median_ms,
            step_cv=times.cv,
            idle_share=idle_share(steps),
            ahead=self._feed.num_ahead,
            rings=self._feed.readiness(),
            memory_mb=self._around.peak_memory_mb(),
            skipped=int(values["skipped"]),
            eta_s=(self.total_steps - step) * expected_s if expected_s else None,
            elapsed_s=elapsed_s,
        )


class _Readings:
    """Numbers on their way from the device: asked for at a step, there some steps later."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._pending: list[tuple[int, list[str], Tensor, Event]] = []

    def ask(self, step: Step, number: int) -> None:
        """Copy losses, gradient norms and the count of skipped steps, behind the work of this step."""
        names, sums = step.take_losses()
        optimizer = step.optimizer
        norms = optimizer.last_norm
        counters = [optimizer.skipped.float(), optimizer.skipped_in_a_row.float()]
        values = torch.cat([sums[:-1] / sums[-1], torch.stack([*norms.values(), *counters])])
        labels = [f"loss.{name}" for name in names] + [f"norm.{name}" for name in norms]
        on_host = torch.empty(len(values), pin_memory=self._stream.handle is not None)
        on_host.copy_(values, non_blocking=True)
        event = Event(self._stream.device)
        self._stream.record(event)
        self._pending.append((number, [*labels, "skipped", "skipped_in_a_row"], on_host, event))

    def arrived(self) -> Iterator[tuple[int, dict[str, float]]]:
        """What has come since the last call, by name."""
        while self._pending and self._pending[0][3].is_passed:
            number, names, values, _ = self._pending.pop(0)
            yield number, dict(zip(names, values.tolist(), strict=True))
