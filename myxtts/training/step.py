"""One optimiser step of a recipe: eager, compiled, or captured as a CUDA graph; alone or with other processes.

Everything here is put into the model lane and not waited for. The host stays at most `STEPS_AHEAD` steps ahead of
the device, so that buffers show what they hold and a signal is answered soon. Knows no feed, log or checkpoint.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from myxtts.config import TrainingSettings
from myxtts.data.layout import Batch, Sizes
from myxtts.lanes import Captured, Lane, Mark
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
        self, recipe: Recipe, optimizer: Optimizer, mode: StepMode, lane: Lane, world_size: int = 1
    ) -> None:
        self.recipe, self.optimizer, self.mode, self._lane = recipe, optimizer, mode, lane
        forward: nn.Module = recipe
        if mode.compiled:
            options = "max-autotune-no-cudagraphs" if mode.tuned else None
            for region in [recipe] if mode.tuned else recipe.regions():
                region.compile(fullgraph=True, dynamic=False, mode=options)
        self._distributed: DistributedDataParallel | None = None
        if world_size > 1:
            # Weights of width 1 have several layouts that are one and the same.
            warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
            ids = [lane.device.index] if lane.device.type == "cuda" else None
            forward = self._distributed = DistributedDataParallel(
                forward, device_ids=ids, gradient_as_bucket_view=True
            )
        self._forward = forward
        self._names: list[str] = []
        self._sums: Tensor | None = None
        self._static: dict[str, Tensor] = {}
        self._micro_graph: Captured[None] | None = None
        self._update_graph: Captured[None] | None = None
        self._marks = [Mark(lane.device) for _ in range(STEPS_AHEAD)]
        self._num_updates = 0

    def micro(self, batch: Batch, last: bool = True) -> None:
        """Add the gradients of one batch; its tensors are free again when the lane has passed this point."""
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
        mark = self._marks[self._num_updates % STEPS_AHEAD]
        mark.wait_on_host()
        self._lane.record(mark)
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
            with torch.autocast(self._lane.device.type, torch.bfloat16, enabled=self.mode.autocast):
                losses = self._forward(tensors, sizes)
            losses["total"].backward()
        if self.mode.debug:
            self._lane.finish()  # an error of the device then names its own step
        if self._sums is None:
            self._names = list(losses)
            self._sums = torch.zeros(len(losses) + 1, device=self._lane.device)
        values = [value.detach().float() for value in losses.values()]
        self._sums += torch.stack([*values, torch.ones_like(values[0])])

    def _capture(self, batch: Batch) -> None:
        """Record both graphs. Warming up must change nothing: neither weights, buffers nor sums."""
        self._static = {name: tensor.clone() for name, tensor in batch.tensors.items()}
        kept = {name: buffer.clone() for name, buffer in self.recipe.named_buffers()}
        self._micro_graph = Captured(lambda: self._add_gradients(self._static, batch.sizes), self._lane)
        self.optimizer.zero_grad()
        counters = [counter.clone() for counter in self.optimizer.counters()]
        self.optimizer.spoil_gradients()  # an update with non-finite gradients leaves everything as it was
        self._update_graph = Captured(self.optimizer.update, self._lane, self._micro_graph.pool)
        self.optimizer.zero_grad()
        with torch.no_grad():
            for counter, value in zip(self.optimizer.counters(), counters, strict=True):
                counter.copy_(value)
            for name, buffer in self.recipe.named_buffers():
                buffer.copy_(kept[name])
        assert self._sums is not None
        self._sums.zero_()
