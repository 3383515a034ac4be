"""What a training step consists of: its forward and backward passes, its kernels, its useful work.

Everything is found with one batch that is trained on over and over, so that no feed is in the way. Knows neither
what a good share is nor how a table is drawn.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity

from myxtts.assembly.rehearsal import WARM_UP_STEPS, Rehearsal
from myxtts.data.batches import packed_tokens
from myxtts.data.clips import ClipSet
from myxtts.data.layout import Batch
from myxtts.devices import Plan
from myxtts.errors import PipelineError
from myxtts.lanes import Lane
from myxtts.observe.evidence import length_us, merged
from myxtts.tools.noted import STEP_RANGE, mean_stage_ms
from myxtts.training.step import Step

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
        with torch.autocast(self._lane.device.type, torch.bfloat16, enabled=self.mode.autocast):
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
            rehearsal.step = Step(step.recipe, step.optimizer, plain, rehearsal.lane)
            whole = mean_stage_ms(rehearsal.measure(SPLIT_STEPS, replay=True, traced=True))["train"]
        rehearsal.step = _ForwardStep(step.recipe, step.optimizer, plain, rehearsal.lane)
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


def matrix_flops(plan: Plan, lane: Lane) -> float | None:
    """Operations per second of large bf16 products on the model's GPU; None without one, or without room on it."""
    if plan.model.type != "cuda":
        return None
    try:
        with lane.use():
            factor = torch.randn(MATRIX_SIZE, MATRIX_SIZE, dtype=torch.bfloat16, device=plan.model)
            product = factor @ factor
            lane.finish()
            started_at = time.perf_counter()
            for _ in range(MATRIX_PRODUCTS):
                torch.mm(factor, factor, out=product)
            lane.finish()
    except torch.OutOfMemoryError:
        return None
    return MATRIX_PRODUCTS * 2 * MATRIX_SIZE**3 / (time.perf_counter() - started_at)
