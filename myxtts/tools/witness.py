"""What a few steps of a rehearsal show: where everything is, what arrives, what is pinned, compiled, allocated.

Says what it saw, not what that means. Leaves nothing behind: codes go to a temporary folder, and nothing is saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from myxtts.assembly.feeds import FeedMaker
from myxtts.assembly.rehearsal import Rehearsal
from myxtts.data.batches import Cursor
from myxtts.data.clips import Prepared
from myxtts.data.gather import Gatherer, HostBatch, host_layout
from myxtts.data.layout import Batch, Sizes
from myxtts.devices import Plan, explain_out_of_memory, peak_memory_mb
from myxtts.observe.trace import Trace
from myxtts.pipeline.feed import Feed
from myxtts.settings import Loaded
from myxtts.tools.trial import set_apart
from myxtts.training.step import Step, StepMode

NUM_STEPS, WARM_UP_STEPS = 6, 3
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


def witness(loaded: Loaded, prepared: Prepared, stage: str, plan: Plan) -> Seen:
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
                with feed.model_lane.use():
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
        if number + 1 in (WARM_UP_STEPS, NUM_STEPS):
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
