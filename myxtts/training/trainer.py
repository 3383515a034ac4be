"""One optimiser step, and the loop that makes a training stage of it.

`Step` is the only place where gradients are accumulated and applied: training and every dry run use it. `Trainer`
repeats it, evaluates, reports and saves. Neither can tell one GPU from two, nor knows where batches come from.
Between validations and saves the loop waits for the device only to stay `STEPS_AHEAD` steps ahead of it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from myxtts.checkpoints import Checkpoints, Snapshot, to_host
from myxtts.config import Settings
from myxtts.data.batches import Batch, Sizes
from myxtts.data.clips import PreparedCorpus
from myxtts.data.order import Cursor, mean_clips
from myxtts.devices import (
    CudaGraph,
    Event,
    Plan,
    Stream,
    all_random_states,
    memory_in_use_mb,
    peak_memory_mb,
    release_memory,
)
from myxtts.distributed import REDUCTIONS, GradientSums
from myxtts.errors import PipelineError
from myxtts.host import may_pin
from myxtts.observe.metrics import JudgeReport, Spoken, StepReport, ValidationReport
from myxtts.observe.trace import OFF, StepClock, Trace, idle_share, step_timing
from myxtts.training.optim import Optimizer
from myxtts.training.recipes import Recipe

STEPS_AHEAD = 2  # steps that the host may launch before the device has finished them
MAX_SKIPPED = 20  # consecutive steps with non-finite gradients after which training ends


@dataclass(frozen=True)
class StepMode:
    """How a step is executed."""

    autocast: bool = False  # computes in bf16 where that is safe
    compiled: bool = False
    captured: bool = False  # replays a CUDA graph; needs a GPU and static shapes
    tuned: bool = False  # compiles everything as one graph and tries many kernels, which takes minutes
    deterministic: bool = False  # only kernels that give the same bits each time; never compiled
    debug: bool = False
    """Names the operation that produced a NaN, and waits for the device after every micro-step."""

    def __str__(self) -> str:
        compiled = "compiled with many kernels tried" if self.tuned else "compiled"
        parts = [
            "eager, with anomaly checks: slow on purpose" if self.debug else "",
            compiled if self.compiled else "",
            "captured as a CUDA graph" if self.captured else "",
            "" if self.debug or self.compiled or self.captured else "eager",
            "bf16" if self.autocast else "fp32",
            "deterministic" if self.deterministic else "",
        ]
        return ", ".join(part for part in parts if part)


def choose_mode(settings: Settings, stage: str, plan: Plan) -> StepMode:
    """The mode that the settings ask for, as far as the devices support it."""
    training, on_gpu = settings.training, plan.model.type == "cuda"
    autocast = settings.data.mixed_precision and on_gpu
    deterministic = training.deterministic and on_gpu
    if training.enable_eager_debug:
        return StepMode(autocast=autocast, deterministic=deterministic, debug=True)
    # Without static shapes every new shape would be compiled and captured again.
    graph = training.enable_graph_mode and on_gpu and settings.data.pad_to_fixed_length
    # The compiler may choose other kernels next time.
    compiled = graph and training.enable_xla_compilation and not deterministic
    # gloo exchanges gradients on the host, which a graph cannot do.
    exchanges_on_host = dist.is_initialized() and dist.get_backend() != "nccl"
    # Checkpointing draws the dropout of the forward pass again, which a CUDA graph cannot replay.
    redraws = stage == "gpt" and settings.model.gradient_checkpointing and bool(settings.model.dropout)
    return StepMode(
        autocast=autocast,
        compiled=compiled,
        captured=graph and not redraws and not exchanges_on_host,
        tuned=compiled and training.optimization_level == "experimental",
        deterministic=deterministic,
    )


NextBatch = Callable[[], contextlib.AbstractContextManager[Batch | None]]
"""Leases the next batch for the length of a `with` block: `Feed.next`."""


class Step:
    """One optimiser step: micro-steps that accumulate gradients, and the update that applies them."""

    def __init__(
        self,
        recipe: Recipe,
        optimizer: Optimizer,
        mode: StepMode,
        stream: Stream,
        *,
        accumulate: int = 1,
        reduction: str = "float32",
    ) -> None:
        """`reduction` names the type in which the processes of a group exchange gradients."""
        self.recipe, self.optimizer, self.mode, self.stream = recipe, optimizer, mode, stream
        self.accumulate = accumulate
        if mode.compiled:
            options = "max-autotune-no-cudagraphs" if mode.tuned else None
            for region in [recipe] if mode.tuned else recipe.regions():
                region.compile(fullgraph=True, dynamic=False, mode=options)
        self._reduction = REDUCTIONS[reduction]
        self._sums_of_ranks: GradientSums | None
        if dist.is_initialized():
            with stream.use(), torch.no_grad():
                for parameter in recipe.parameters():
                    dist.broadcast(parameter, src=0)
        self._connect()
        self._names: list[str] = []
        self._sums: Tensor | None = None
        self._static: dict[str, Tensor] = {}
        self._micro_graphs: dict[bool, CudaGraph[None]] = {}  # by whether the micro-step is the last of its step
        self._update_graph: CudaGraph[None] | None = None
        self._events = [Event(stream.device) for _ in range(STEPS_AHEAD)]
        self._num_updates = 0

    def __call__(self, next_batch: NextBatch, number: int, clock: StepClock, trace: Trace = OFF) -> None:
        """Train on the next batches, as optimiser step `number`; steps count from 0."""
        self.recipe.begin_step(number)
        if self.recipe.phase != self._phase:
            self.close()  # nothing of one phase fits another
            self._connect()
        for micro in range(self.accumulate):
            with next_batch() as batch:
                if batch is None:
                    raise PipelineError("The feed ended before the run did.")
                if number == 0 and micro == 0:
                    self.recipe.before_first_step(batch.tensors)
                if micro == 0:
                    clock.begin()
                with trace.device_span("train", "model stream", self.stream.handle, number):
                    self.micro(batch, last=micro == self.accumulate - 1)
        with trace.device_span("update", "model stream", self.stream.handle, number):
            self.update(number)
        clock.end()
        if trace.enabled:
            trace.collect()

    def close(self) -> None:
        """Drop what was captured, which NCCL would wait for in the end, and the gradients."""
        self.stream.finish()
        self._micro_graphs, self._update_graph = {}, None
        if self._sums_of_ranks is not None:
            self._sums_of_ranks.close()
            self._sums_of_ranks = None
        for parameter in self.recipe.parameters():
            parameter.grad = None
        release_memory()

    def _connect(self) -> None:
        """Let processes exchange the gradients of what the recipe trains in this phase."""
        self._phase = self.recipe.phase
        self._sums_of_ranks = GradientSums(self.recipe, self._reduction) if dist.is_initialized() else None

    def micro(self, batch: Batch, last: bool = True) -> None:
        """Add the gradients of one batch; several processes exchange them in the last micro-step."""
        if self.mode.captured:
            if not self._micro_graphs:
                self._capture(batch)
            for name, tensor in self._static.items():
                tensor.copy_(batch.tensors[name])
            self._micro_graphs[last].replay()
            return
        pieces = self._pieces(batch.tensors)
        for number, (share, piece) in enumerate(pieces, 1):
            is_last = last and number == len(pieces)
            self.add_gradients(piece, batch.sizes, share, 1 / len(pieces), last=is_last)

    def _pieces(self, tensors: Mapping[str, Tensor]) -> list[tuple[float, Mapping[str, Tensor]]]:
        """A batch in as many pieces as a CPU's memory needs, each with its share of the clips."""
        at_once, weights = self.recipe.clips_at_once, tensors["weights"]
        if at_once is None or self.stream.device.type != "cpu":
            return [(1.0, tensors)]
        pieces: list[tuple[float, Mapping[str, Tensor]]] = []
        for clips in (slice(first, first + at_once) for first in range(0, len(weights), at_once)):
            piece = {name: value if name == "totals" else value[clips] for name, value in tensors.items()}
            pieces.append((float(weights[clips].sum() / weights.sum().clamp_min(1)), piece))
        return pieces

    def update(self, number: int) -> None:
        """Clip, update the weights with the learning rate of this step, and zero the gradients."""
        self.optimizer.set_lr(number)
        if self._update_graph is not None:
            self._update_graph.replay()
        else:
            self.optimizer.update()
        self.optimizer.zero_grad()
        self.recipe.after_step(number)
        event = self._events[self._num_updates % STEPS_AHEAD]
        event.wait_on_host()
        self.stream.record(event)
        self._num_updates += 1

    def scalars(self) -> dict[str, Tensor]:
        """Mean losses since the last call, gradient norms and counts of skipped steps, all on the device."""
        assert self._sums is not None
        means = self._sums[:-1] / self._sums[-1]
        self._sums.zero_()
        optimizer = self.optimizer
        return {
            **{f"loss.{name}": mean for name, mean in zip(self._names, means, strict=True)},
            **{f"norm.{name}": norm for name, norm in optimizer.last_norm.items()},
            "skipped": optimizer.skipped.float(),
            "skipped_in_a_row": optimizer.skipped_in_a_row.float(),
        }

    def forward(self, tensors: Mapping[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
        """The losses of a batch, launched kernel by kernel."""
        with torch.autocast(self.stream.device.type, torch.bfloat16, enabled=self.mode.autocast):
            losses: dict[str, Tensor] = self.recipe(tensors, sizes)
        return losses

    def add_gradients(
        self,
        tensors: Mapping[str, Tensor],
        sizes: Sizes,
        share: float = 1.0,
        part: float = 1.0,
        *,
        last: bool = False,
    ) -> None:
        """The forward and backward pass of a batch, or a `part` of one with this `share` of its clips.

        In the `last` one of a step, processes exchange what they have added up.
        """
        with contextlib.ExitStack() as held:
            if self.mode.debug:
                held.enter_context(torch.autograd.set_detect_anomaly(True))
            if last and self._sums_of_ranks is not None:
                held.enter_context(self._sums_of_ranks.exchanged())
            losses = self.forward(tensors, sizes)
            losses["total"].backward()  # type: ignore[no-untyped-call]
        if self.mode.debug:
            self.stream.finish()  # an error of the device then names its own step
        if self._sums is None:
            self._names = list(losses)
            self._sums = torch.zeros(len(losses) + 1, device=self.stream.device)
        values = [value.detach().float() for value in losses.values()]
        row = torch.stack([*values, torch.ones_like(values[0])])
        if part < 1:  # means count by their clips; the total is the sum of its parts
            row *= torch.tensor([*(1.0 if name == "total" else share for name in self._names), part])
        self._sums += row

    def _capture(self, batch: Batch) -> None:
        """Record all graphs. The warm-up must change nothing: neither weights, buffers nor sums."""
        self._static = {name: tensor.clone() for name, tensor in batch.tensors.items()}
        kept = {name: buffer.clone() for name, buffer in self.recipe.named_buffers()}
        sums = None if self._sums is None else self._sums.clone()
        work = partial(self.add_gradients, self._static, batch.sizes)
        # The first one arranges gradients as they are exchanged; only then may others add to them.
        graph = CudaGraph(partial(work, last=True), self.stream)
        self._micro_graphs = {True: graph, False: graph}
        if self.accumulate > 1 and self._sums_of_ranks is not None:
            self._micro_graphs[False] = CudaGraph(work, self.stream, graph.pool)
        self.optimizer.zero_grad()
        counters = [counter.clone() for counter in self.optimizer.counters()]
        self.optimizer.poison_gradients()  # an update with non-finite gradients leaves everything as it was
        self._update_graph = CudaGraph(self.optimizer.update, self.stream, graph.pool)
        self.optimizer.zero_grad()
        with torch.no_grad():
            for counter, value in zip(self.optimizer.counters(), counters, strict=True):
                counter.copy_(value)
            for name, buffer in self.recipe.named_buffers():
                buffer.copy_(kept[name])
        assert self._sums is not None
        self._sums.copy_(torch.zeros_like(self._sums) if sums is None else sums)


class StagePlan(NamedTuple):
    """What a run does with one stage."""

    stage: str
    num_steps: int  # to train
    does: str
    why: str = ""

    def __str__(self) -> str:
        return f"  {self.stage:<8} {self.does}{': ' if self.why else ''}{self.why}"


@dataclass(frozen=True)
class Evaluation:
    """What was found about the weights of a step: by the evaluator, later by the judges, or why nothing was."""

    step: int
    losses: Mapping[str, float] = field(default_factory=dict)
    pictures: Mapping[str, Tensor] = field(default_factory=dict)
    spoken: Sequence[Spoken] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""  # why nothing was found
    unspoken: str = ""  # why no sentences were spoken, though they should be
    lacks_memory: bool = False  # that is a lack of memory


class Evaluator(Protocol):
    """Evaluates published weights while training goes on."""

    def publish(self, step: int, state: dict[str, Any], is_saved: bool) -> int | None: ...
    def results(self, wait: bool = False) -> list[Evaluation]: ...


class Reporter:
    """Receives how a run goes: override what is of interest, by default nothing happens.

    corpus      the corpus is prepared; once, before the first stage
    plan        what will be done with every stage; once, after that
    begin       a stage begins, or continues after `step`
    tick        a step was launched
    step        the measurements of a step have arrived; every `log_step` steps
    validation  the validation clips were evaluated
    picture     an image [height, width] or a histogram [codes] of a validation batch
    spoken      sentences that the weights of a step speak
    judged      the judges have scored them
    """

    def corpus(self, prepared: PreparedCorpus) -> None: ...
    def plan(self, stages: Sequence[StagePlan]) -> None: ...
    def begin(self, stage: str, step: int, total_steps: int, own_references: float | None) -> None: ...
    def tick(self, step: int) -> None: ...
    def step(self, report: StepReport) -> None: ...
    def validation(self, report: ValidationReport) -> None: ...
    def picture(self, name: str, picture: Tensor, step: int) -> None: ...
    def spoken(self, stage: str, step: int, sentences: Sequence[Spoken]) -> None: ...
    def judged(self, report: JudgeReport) -> None: ...


class Feed(Protocol):
    """Where batches come from."""

    model_stream: Stream

    def next(self) -> contextlib.AbstractContextManager[Batch | None]: ...
    def cursor(self) -> Cursor: ...
    def readiness(self) -> dict[str, tuple[int, int]]: ...
    @property
    def num_ahead(self) -> int: ...
    @property
    def own_references(self) -> float | None: ...


class TrainerContext(Protocol):
    """The stage that is trained, as far as the loop needs to know it."""

    stage: str
    settings: Settings
    prepared: PreparedCorpus
    plan: Plan
    reporter: Reporter

    @property
    def checkpoints(self) -> Checkpoints: ...
    def weights(self, recipe: Recipe) -> Mapping[str, Tensor]: ...
    def notes(self) -> Mapping[str, Any]: ...
    @property
    def trained_on(self) -> Mapping[str, str]: ...
    @property
    def evaluates_on(self) -> str: ...
    def evaluate(self, recipe: Recipe, step: int, speaks: bool) -> Evaluation: ...
    def evaluator(self, step: Step) -> Evaluator | None: ...
    def evaluated(self, found: Evaluation) -> None: ...
    def drop_evaluator(self) -> None: ...
    def judged(self, wait: bool = False) -> list[Evaluation]: ...
    def say(self, line: str) -> None: ...
    def stop_requested(self, step: int) -> bool: ...
    def of_first_rank(self, *values: int) -> tuple[int, ...]: ...


def clips_per_step(ctx: TrainerContext) -> float:
    """Mean clips of an optimiser step in all processes; clips that only fill up a batch do not count."""
    clips_per_batch = mean_clips(ctx.prepared.mixture.num_clips, ctx.settings.data.batch_size)
    return ctx.settings.training.gradient_accumulation_steps * ctx.plan.world_size * clips_per_batch


@dataclass
class State:
    """How far a stage has come: what a checkpoint holds besides tensors."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    best_loss: float = math.inf
    stale_validations: int = 0
    done: bool = False
    val_loss: float | None = None  # of this very step
    pending: int | None = None  # the last step whose weights are being evaluated
    validated: int | None = None  # the last step whose loss is counted

    def add_loss(self, step: int, loss: float) -> bool:
        """Count the validation loss of a step; True if it is the best so far."""
        is_best = loss < self.best_loss
        self.best_loss = loss if is_best else self.best_loss
        self.stale_validations = 0 if is_best else self.stale_validations + 1
        self.validated = step
        if step == self.step:
            self.val_loss = loss if math.isfinite(loss) else None
        return is_best

    def to_json(self) -> dict[str, Any]:
        return {
            "cursor": [self.cursor.epoch, self.cursor.batch],
            "cursor_counts": "all ranks",
            "best_loss": None if math.isinf(self.best_loss) else self.best_loss,
            "val_loss": self.val_loss,
            "stale_validations": self.stale_validations,
            "done": self.done,
            "pending": self.pending,
            "validated": self.validated,
        }

    @classmethod
    def from_json(cls, step: int, values: Mapping[str, Any]) -> State:
        best = math.inf if values["best_loss"] is None else float(values["best_loss"])
        known = (values["stale_validations"], values["done"])
        later = [values.get(name) for name in ("val_loss", "pending", "validated")]
        return cls(step, Cursor(*values["cursor"]), best, *known, *later)


@dataclass
class Trainer:
    """Trains one stage from where `state` stands to `total_steps`."""

    ctx: TrainerContext
    step: Step
    feed: Feed
    state: State
    total_steps: int
    peak_clips_per_s: float | None = None
    """Speed at which the GPUs would compute nothing but useful matrix products; None if unknown."""

    def __post_init__(self) -> None:
        self._stream, self._training = self.feed.model_stream, self.ctx.settings.training
        limit = max(1000, 2 * self._training.log_step)  # keeps every step between two reports
        self._clock = StepClock(self._stream.handle, limit, first_step=self.state.step)
        self._scalars, self._logged = AsyncScalars(self._stream), self.state.step
        self._host_copies: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        self._pins: bool | None = None if self._stream.device.type == "cuda" else False
        """True if the host copies are pinned; None before the first."""
        self._started_at, self._first_step = time.perf_counter(), self.state.step
        self._evaluator: Evaluator | None = None
        self._has_evaluator = False

    def run(self) -> State:
        """Train to the last step, or until a stop is requested; everything is saved on return."""
        training, state, is_stopped = self._training, self.state, False
        self.ctx.reporter.begin(self.ctx.stage, state.step, self.total_steps, self.feed.own_references)
        with self._stream.use():
            self._continue_evaluation()
            while state.step < self.total_steps and not self._stops_early() and not is_stopped:
                self.step(self.feed.next, state.step, self._clock)
                state.step += 1
                state.done, state.val_loss = False, None  # a finished stage may be prolonged
                state.cursor = self.feed.cursor()
                self.ctx.reporter.tick(state.step)
                is_last = state.step == self.total_steps
                if state.step % training.log_step == 0 or is_last:
                    self._log()
                self._report_arrived()
                # On a GPU also after the first step: lack of memory should show before hours of work.
                is_first = state.step == 1 and self._stream.handle is not None
                validates = state.step % training.val_step == 0 or is_last or is_first
                is_best = validates and self._evaluate(here=is_first, speaks=not is_first)
                if self._saves() or is_best:
                    self._save(done=is_last)
                is_stopped = self.ctx.stop_requested(state.step)
            if state.step > self._logged:
                self._log()
            self._stream.finish()
            self._report_arrived()
            if state.pending is not None:
                self.ctx.say(f"Waiting for the evaluation of step {state.pending}")
            has_news = self._as_first_rank(self._add_evaluations(wait=True))
            if not state.done or has_news:
                self._save(done=state.step >= self.total_steps or self._stops_early())
            if not is_stopped:
                self._add_judgements(wait=True)
        failure = self.ctx.checkpoints.wait()
        if failure is not None:
            raise PipelineError(
                f"Step {state.step} of stage {self.ctx.stage} could not be saved: {failure}.\nMake room or choose "
                "another --checkpoint-dir; the same command continues from the last good checkpoint."
            )
        return state

    def _saves(self) -> bool:
        return self.state.step % self._training.save_step == 0 or self.state.step == self.total_steps

    def _log(self) -> None:
        self._scalars.enqueue(self.state.step, self.state.cursor.epoch, self.step.scalars())
        self._logged = self.state.step

    def _save(self, done: bool) -> None:
        """Copy everything to the host and let it be written in the background."""
        self.state.done = done
        if self._depends and self.state.pending not in (None, self.state.step):
            self._add_evaluations(wait=True)  # a run killed from here on would not have it
        random_states = all_random_states(self.ctx.plan)  # every rank must take part
        if self.ctx.plan.rank > 0:
            return
        self.ctx.checkpoints.wait()  # the writer reads the copies that are overwritten here
        live = (self.ctx.weights(self.step.recipe), self.step.optimizer.state_dict())
        if self._pins is None:
            num_bytes = sum(tensor.nbytes for tensors in live for tensor in tensors.values())
            self._pins = may_pin(num_bytes, "Copies for checkpoints")
        weights, optimizer = (
            to_host(tensors, copies, pin=self._pins)
            for tensors, copies in zip(live, self._host_copies, strict=True)
        )
        self._host_copies = (weights, optimizer)
        snapshot = Snapshot(weights, {**optimizer, **random_states}, self._saved_state())
        self.ctx.checkpoints.save(self.state.step, snapshot)
        self._clock.pause()

    def _saved_state(self) -> dict[str, Any]:
        """The state of a checkpoint."""
        about = {"stage": self.ctx.stage, "total_steps": self.total_steps, "trained_on": dict(self.ctx.trained_on)}
        return {**self.state.to_json(), **about, "notes": dict(self.ctx.notes())}

    def _evaluate(self, here: bool = False, speaks: bool = True) -> bool:
        """Evaluate the averaged weights `here`, or publish them to be evaluated; True if they are to be kept.

        A result counts for the step that it was found for. If the run depends on results, that of one evaluation
        is waited for at the next; otherwise they are taken when they come.
        """
        ctx, state, training = self.ctx, self.state, self._training
        if not len(ctx.prepared.val) or training.evaluate_on == "off":
            return False
        if not here and not self._has_evaluator:
            self._evaluator, self._has_evaluator = ctx.evaluator(self.step), True
        self._add_evaluations(wait=self._depends)
        waits = self._as_first_rank(here or self._evaluator is None)
        if self._stops_early():
            return False
        if waits:
            with self.step.optimizer.swap_ema():
                found = ctx.evaluate(self.step.recipe, state.step, speaks)
            self._clock.pause()
            is_best = self._add(found)
            return self._as_first_rank(is_best or (training.best_by not in (None, "loss") and bool(found.spoken)))
        if self._evaluator is None:  # another rank evaluates
            return False
        if (replaced := self._evaluator.publish(state.step, self._saved_state(), self._saves())) is not None:
            slow = f"evaluations take longer than the {training.val_step} steps between two of them"
            ctx.say(f"Step {replaced} is not evaluated, step {state.step} is: {slow}; a larger --val-step helps")
        state.pending = state.step
        return False

    def _as_first_rank(self, answer: bool) -> bool:
        """The answer of rank 0, which alone has all results; others take over what decides on an early end."""
        state = self.state
        decisive = (answer, state.stale_validations, -1 if state.validated is None else state.validated)
        chosen, state.stale_validations, validated = self.ctx.of_first_rank(*decisive)
        state.validated = None if validated < 0 else validated
        return bool(chosen)

    @property
    def _depends(self) -> bool:
        """True if the run depends on the results of evaluations, or is to be the same each time."""
        return self._training.early_stop > 0 or self._training.deterministic

    def _continue_evaluation(self) -> None:
        """Evaluate again what the run was evaluating when it was killed; weights of earlier steps are gone."""
        step, self.state.pending = self.state.pending, None
        self.state.done &= step is None  # or the result would not be saved
        if step is not None and step == self.state.step:
            self._evaluate(here=True)
            if self.state.val_loss is not None and self.ctx.plan.rank == 0:
                self.ctx.checkpoints.rate(step, {"loss": self.state.val_loss})
        elif step is not None:
            self.ctx.say(f"The evaluation of step {step} was lost when the run was killed")

    def _add_evaluations(self, wait: bool = False) -> bool:
        """Count the results that have come; True if there are any."""
        found = self._evaluator.results(wait) if self._evaluator is not None else []
        for each in found:
            if self.state.pending == each.step:
                self.state.pending = None
            self._add(each)
            if math.isfinite(loss := each.losses.get("total", math.nan)):
                self.ctx.checkpoints.rate(each.step, {"loss": loss})
        self._add_judgements()
        return bool(found)

    def _add_judgements(self, wait: bool = False) -> None:
        for found in self.ctx.judged(wait):
            if found.failure:
                self.ctx.say(f"The sentences of step {found.step} were not judged: {found.failure}")
                continue
            self.ctx.checkpoints.rate(found.step, found.scores)
            self.ctx.reporter.judged(JudgeReport(self.ctx.stage, found.step, found.scores))

    def _add(self, found: Evaluation) -> bool:
        """Report an evaluation and count its loss; True if it is the best so far."""
        ctx = self.ctx
        if found.unspoken:
            ctx.say(f"The sentences of step {found.step} were not spoken: {found.unspoken}; training goes on")
        if found.lacks_memory:
            ctx.say("Too little memory: from here on training waits for evaluations, which speak no sentences")
            self._evaluator, self.state.pending = None, None
            ctx.drop_evaluator()
        if found.failure:
            cure = "training goes on; --evaluate-on model, cpu or off avoids this"
            ctx.say(f"The evaluation of step {found.step} failed: {found.failure}; {cure}")
            return False
        for name, picture in found.pictures.items():
            ctx.reporter.picture(f"{ctx.stage}/{name}", picture, found.step)
        if not math.isfinite(found.losses["total"]):
            ctx.say(f"The validation loss of step {found.step} is not finite")
        is_best = self.state.add_loss(found.step, found.losses["total"])
        ctx.reporter.validation(ValidationReport(ctx.stage, found.step, found.losses, is_best))
        if found.spoken:
            ctx.reporter.spoken(ctx.stage, found.step, found.spoken)
        ctx.evaluated(found)
        return is_best

    def _stops_early(self) -> bool:
        """True if validations no longer improve.

        That is decided at validations. Where training goes on during one, its own result does not count yet: a run
        ends at the same step, whether it was stopped in between or not.
        """
        state, training = self.state, self._training
        num_stale = state.stale_validations - (self.ctx.evaluates_on != "model" and state.validated == state.step)
        return state.step % training.val_step == 0 and 0 < training.early_stop <= num_stale

    def _report_arrived(self) -> None:
        if not self._depends:
            self._add_evaluations()
        for step, epoch, values in self._scalars.poll():
            if values["skipped_in_a_row"] >= MAX_SKIPPED:
                raise PipelineError(
                    f"Training stopped at step {step}: the gradients of the last {values['skipped_in_a_row']:.0f} "
                    "steps were not finite, so nothing was learnt from them.\nLower --lr, raise warmup_steps, or "
                    "look for the operation with training.enable_eager_debug. Earlier checkpoints are kept."
                )
            self.ctx.reporter.step(self._report(step, epoch, values))

    def _report(self, step: int, epoch: int, values: Mapping[str, float]) -> StepReport:
        steps = self._clock.collect()
        times = step_timing(steps)
        elapsed_s = time.perf_counter() - self._started_at
        seconds_per_step = times.mean_ms / 1000 or elapsed_s / max(step - self._first_step, 1)
        clips_per_s = clips_per_step(self.ctx) / seconds_per_step if seconds_per_step else 0.0
        # The first steps compile: their times do not predict those to come.
        is_warm = step > self._first_step + self._training.log_step
        expected_s = seconds_per_step if is_warm else self._clock.timing().median_ms / 1000
        losses = {name.removeprefix("loss."): value for name, value in values.items() if name.startswith("loss.")}
        # That of a micro-step in one process is its share of the step.
        losses["total"] *= self.step.accumulate * self.ctx.plan.world_size
        norms = {name.removeprefix("norm."): value for name, value in values.items() if name.startswith("norm.")}
        return StepReport(
            stage=self.ctx.stage,
            step=step,
            total_steps=self.total_steps,
            epoch=epoch,
            losses=losses,
            lr=self.step.optimizer.lr_at(step - 1),
            grad_norm=norms,
            clips_per_s=clips_per_s,
            step_ms=times.median_ms,
            step_cv=times.cv,
            idle_share=idle_share(steps),
            ahead=self.feed.num_ahead,
            rings=self.feed.readiness(),
            memory_mb=peak_memory_mb(self.ctx.plan),
            in_use_mb=memory_in_use_mb(self.ctx.plan),
            skipped=int(values["skipped"]),
            eta_s=(self.total_steps - step) * expected_s if expected_s else None,
            elapsed_s=elapsed_s,
            mfu=clips_per_s / self.peak_clips_per_s if self.peak_clips_per_s else None,
            times_ms=[round(step.step_ms, 2) for step in steps],
        )


class AsyncScalars:
    """Numbers copied from the device without waiting for it: enqueued at a step, available some steps later."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._pending: list[tuple[int, int, list[str], Tensor, Event]] = []

    def enqueue(self, step: int, epoch: int, scalars: Mapping[str, Tensor]) -> None:
        """Start the copy, after everything that is already in the stream."""
        values = torch.stack(list(scalars.values()))
        on_host = torch.empty(len(values), pin_memory=self._stream.handle is not None)
        on_host.copy_(values, non_blocking=True)
        event = Event(self._stream.device)
        self._stream.record(event)
        self._pending.append((step, epoch, list(scalars), on_host, event))

    def poll(self) -> Iterator[tuple[int, int, dict[str, float]]]:
        """The scalars that have arrived since the last call, with their steps and epochs."""
        while self._pending and self._pending[0][-1].is_passed:
            step, epoch, names, values, _ = self._pending.pop(0)
            yield step, epoch, dict(zip(names, values.tolist(), strict=True))
