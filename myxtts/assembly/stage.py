"""The training of one stage: which modules go where, what is saved, how it is validated and continued."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from myxtts.assembly.feeds import FeedMaker, dvae_key
from myxtts.assembly.folder import DISCRIMINATORS, PREFIXES, RunFolder
from myxtts.assembly.identity import PORTIONS, require_continuable
from myxtts.assembly.validation import mel_statistics, validate
from myxtts.checkpoint import UnreadableWeights
from myxtts.config import STAGES, Settings
from myxtts.data.batches import Cursor, mean_clips
from myxtts.data.clips import Prepared
from myxtts.devices import Plan, explain_out_of_memory, peak_memory_mb, random_state, set_random_state
from myxtts.model.discriminators import PERIOD_WIDTHS, RESOLUTION_WIDTH, Discriminators
from myxtts.model.lora import adapter_state, add_adapters, store_frozen_in_bf16
from myxtts.model.xtts import SIZES, XTTS
from myxtts.observe.trace import OFF, Trace
from myxtts.pipeline.feed import Lanes
from myxtts.run import Loaded
from myxtts.training.optim import Optimizer, Schedule
from myxtts.training.recipes import DecoderRecipe, DvaeRecipe, GptRecipe, Recipe
from myxtts.training.step import Step, StepMode, choose_mode
from myxtts.training.trainer import Reporter, State, Surroundings, Trainer


@dataclass(frozen=True)
class StageTask:
    """What training a stage takes."""

    stage: str
    settings: Settings
    asked: frozenset[str]
    prepared: Prepared
    plan: Plan
    folder: RunFolder
    reporter: Reporter
    stop_requested: Callable[[], bool]
    say: Callable[[str], None]
    identity: Mapping[str, Any]
    """What must not change between the parts of a run."""
    fine_tuning: bool = False
    has_grown_vocabulary: bool = False
    trace: Trace = OFF


def train_stage(task: StageTask, model: XTTS) -> State:
    """Train one stage of a model to its end, or until a stop is requested."""
    checkpoints = task.folder.checkpoints(task.stage)
    try:
        loaded = checkpoints.newest()
        if loaded is None:
            return _train(task, model, None, State(), total_steps(task, task.identity))
        began_with = loaded.state["notes"]["identity"]
        same_batches = require_continuable(task.folder.folder, began_with, task.identity)
        state = State.from_json(loaded.step, loaded.state)
        if state.done and (state.step >= total_steps(task, began_with) or _is_enough(task, state)):
            task.say(f"Stage {task.stage}: finished at step {state.step}")
            return state
        total = total_steps(task, task.identity)
        task.say(f"Stage {task.stage}: continuing at step {state.step} of {total}")
        if not same_batches and state.cursor.batch:
            task.say(f"The clips of a step come in other portions now: epoch {state.cursor.epoch} starts over")
            state.cursor = Cursor(state.cursor.epoch)
        return _train(task, model, loaded, state, total)
    finally:
        checkpoints.close()


def _is_enough(task: StageTask, state: State) -> bool:
    """Whether a stage stopped early, or a later one has learnt from it and nobody asked for more of it by name."""
    if 0 < task.settings.training.early_stop <= state.stale_validations:
        return True
    later = STAGES[STAGES.index(task.stage) + 1 :]
    named = {"training.stages", f"training.{task.stage}_steps"} & task.asked
    return not named and any(task.folder.has_checkpoint(stage) for stage in later)


def total_steps(task: StageTask, portions: Mapping[str, Any]) -> int:
    """Optimiser steps of the stage: the epochs asked for, unless a number of steps ends it before."""
    training = task.settings.training
    batch_size, accumulate, processes = (int(portions[name]) for name in PORTIONS)
    batches = math.ceil(len(task.prepared.train) / (batch_size * processes)) * training.epochs
    steps = math.ceil(batches / accumulate)
    own = {"dvae": training.dvae_steps, "decoder": training.decoder_steps}.get(task.stage)
    limit = own if own is not None else training.max_steps
    return steps if limit is None else min(steps, limit)


class Trained(NamedTuple):
    """What a stage trains, on the model role's device, and how its step is run."""

    recipe: Recipe
    optimizer: Optimizer
    mode: StepMode


def set_up(task: StageTask, model: XTTS, loaded: Loaded | None, total: int) -> Trained:
    """Freeze the model but for what the stage trains, and bring that to where a checkpoint left it."""
    settings, plan = task.settings, task.plan
    mode = choose_mode(
        settings.training,
        mixed_precision=settings.data.mixed_precision,
        static_shapes=settings.data.pad_to_fixed_length,
        on_gpu=plan.model.type == "cuda",
        world_size=plan.world_size,
        redraws=task.stage == "gpt" and settings.model.gradient_checkpointing and settings.model.dropout > 0,
    )
    model.eval().requires_grad_(False)
    torch.manual_seed(settings.training.seed)  # the stage starts alike, whatever this process did before
    try:
        recipe = make_recipe(task, model)
        if loaded is not None:
            _load_weights(task.stage, model, recipe, loaded.weights)
        if task.stage == "gpt" and settings.model.lora_rank and mode.autocast:
            store_frozen_in_bf16(model.gpt)
        recipe.to(plan.model).train()
        optimizer = make_optimizer(task, recipe, total)
    except torch.OutOfMemoryError as error:
        raise explain_out_of_memory(plan, error, "model", "loading weights and optimiser") from error
    if loaded is None:
        torch.manual_seed(settings.training.seed + plan.rank)  # each rank drops out other activations
    else:
        own = optimizer.state_dict()
        optimizer.load_state_dict({name: loaded.optimizer[name] for name in loaded.optimizer if name in own})
        _continue_random(task, loaded)
    return Trained(recipe, optimizer, mode)


def _train(task: StageTask, model: XTTS, loaded: Loaded | None, state: State, total: int) -> State:
    settings, plan = task.settings, task.plan
    training = settings.training
    if task.stage == "dvae" and loaded is None and not task.fine_tuning:
        model.mel_stats.copy_(mel_statistics(task.prepared.train, plan.data))
    # Not for LoRA: what its adapters are added to is what the run wrote down when it started.
    if task.stage == "gpt" and "gpt" in task.folder.untrained() and not settings.model.lora_rank:
        torch.manual_seed(training.seed)
        model.gpt.begin_with_codebook(model.dvae.codebook.embed.t())
    recipe, optimizer, mode = set_up(task, model, loaded, total)
    maker = feed_maker(task, model)
    checkpoints = task.folder.checkpoints(task.stage)
    around = Surroundings(
        reporter=task.reporter,
        checkpoints=checkpoints,
        weights=lambda: kept_weights(task, model, recipe),
        random_states=lambda: _random_states(plan),
        validate=(lambda: validate(maker, recipe, settings)) if len(task.prepared.val) else None,
        notes={"identity": dict(task.identity), "lora_rank": settings.model.lora_rank},
        stop_requested=task.stop_requested,
        stop_every=min(training.log_step, 10) if plan.world_size > 1 else 1,
        peak_memory_mb=lambda: peak_memory_mb(plan),
        is_writer=plan.rank == 0,
        trace=task.trace,
    )
    accumulate = training.gradient_accumulation_steps
    try:
        with maker.training(state.cursor, accumulate, task.trace) as feed:
            task.say(
                f"Buffers: {feed.host_ring.depth} batches on the host, {feed.model_ring.depth} on {plan.model}"
            )
            task.say(f"Training step: {mode}")
            task.say(f"Waiting up to {settings.data.model_start_delay:g}s for data pipeline to warm up")
            waited = feed.wait_until_warm(settings.data.model_start_delay)
            task.say(f"Model training starting now ({feed.num_ahead} batches ready after {waited:.1f} s)")
            step = Step(recipe, optimizer, mode, feed.model_lane, plan.world_size)
            clips = accumulate * mean_clips(len(task.prepared.train), settings.data.batch_size * plan.world_size)
            trainer = Trainer(
                task.stage, step, feed, training, around, state=state, total_steps=total, clips_per_step=clips
            )
            return trainer.run()
    except torch.OutOfMemoryError as error:
        doing = f"training on batches of {settings.data.batch_size} clips"
        raise explain_out_of_memory(plan, error, "model", doing) from error
    finally:
        checkpoints.close()


def make_recipe(task: StageTask, model: XTTS) -> Recipe:
    """What the stage trains, unfrozen; for LoRA with its adapters."""
    settings, world_size = task.settings, task.plan.world_size
    if task.stage == "dvae":
        model.dvae.requires_grad_(True)
        reduce, share = (
            (dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0)) if world_size > 1 else (None, None)
        )
        return DvaeRecipe(
            model.dvae,
            world_size,
            seed=settings.training.seed,
            all_reduce=reduce,
            broadcast=share,
            fine_tuning=task.fine_tuning,
        )
    if task.stage == "gpt":
        model.gpt.requires_grad_(True)
        model.gpt.checkpointing = settings.model.gradient_checkpointing
        model.gpt.set_dropout(settings.model.dropout)
        if settings.model.lora_rank:
            # Adapters cannot teach the model what a new token is.
            new_tokens = ("text_embedding", "text_head") if task.has_grown_vocabulary else ()
            add_adapters(model.gpt, settings.model.lora_rank, train_also=new_tokens)
        training = settings.training
        return GptRecipe(
            model.gpt,
            world_size,
            training.label_smoothing,
            code_noise=training.code_noise,
            text_dropout=training.text_dropout,
        )
    model.hifigan_decoder.waveform_decoder.requires_grad_(True)
    scale = min(model.dims.vocoder_channels / SIZES["normal"].vocoder_channels, 1.0)
    judges = Discriminators(  # judges far stronger than the generator teach it nothing, and take all the time
        period_widths=[max(int(scale * width), 4) for width in PERIOD_WIDTHS],
        resolution_width=max(int(scale * RESOLUTION_WIDTH), 4),
    )
    return DecoderRecipe(model.hifigan_decoder, judges, world_size)


def make_optimizer(task: StageTask, recipe: Recipe, total: int) -> Optimizer:
    """AdamW for what the recipe trains, with a schedule that ends at the last step."""
    training = task.settings.training
    return Optimizer(
        recipe.parts() if len(recipe.parts()) > 1 else recipe,
        training.learning_rate or recipe.learning_rate(task.fine_tuning),
        Schedule(training.warmup_steps, total),
        weight_decay=training.weight_decay,
        grad_clip=training.grad_clip,
        betas=recipe.betas,
        ema_decay=training.ema_decay,
    )


def kept_weights(task: StageTask, model: XTTS, recipe: Recipe) -> dict[str, Tensor]:
    """What a checkpoint of the stage holds: its part of the model, or only the adapters; live tensors."""
    if task.stage == "gpt" and task.settings.model.lora_rank:
        return {f"gpt.{name}": value for name, value in adapter_state(model.gpt).items()}
    state = {name: value for name, value in model.state_dict().items() if name.startswith(PREFIXES[task.stage])}
    if isinstance(recipe, DecoderRecipe):
        judges = recipe.discriminators.state_dict()
        state |= {f"{DISCRIMINATORS}{name}": value for name, value in judges.items()}
    return state


def _load_weights(stage: str, model: XTTS, recipe: Recipe, weights: Mapping[str, Tensor]) -> None:
    own = {name: value for name, value in weights.items() if not name.startswith(DISCRIMINATORS)}
    unknown = model.load_state_dict(own, strict=False).unexpected_keys
    if unknown:
        raise UnreadableWeights(f"The checkpoint of stage {stage} does not fit this model: it holds {unknown[:3]}")
    if isinstance(recipe, DecoderRecipe):
        judges = {
            name.removeprefix(DISCRIMINATORS): value
            for name, value in weights.items()
            if name.startswith(DISCRIMINATORS)
        }
        recipe.discriminators.load_state_dict(judges)


def feed_maker(task: StageTask, model: XTTS) -> FeedMaker:
    """Feeds for the stage."""
    settings = task.settings
    autocast = settings.data.mixed_precision and task.plan.data.type == "cuda"
    key = dvae_key(model, autocast) if task.stage != "dvae" else ""
    lanes = Lanes.of(task.plan, settings.data)
    return FeedMaker(
        task.stage, model, task.prepared, settings.data, task.asked, task.plan, settings.training.seed, key, lanes
    )


def _continue_random(task: StageTask, loaded: Loaded) -> None:
    plan, saved = task.plan, loaded.optimizer.get(f"random.{task.plan.rank}")
    if saved is not None and saved.shape == random_state(plan.model).shape:
        set_random_state(plan.model, saved)
    else:
        torch.manual_seed(task.settings.training.seed + plan.rank + loaded.step)
        task.say("The run was saved on other devices: it continues with other random numbers")


def _random_states(plan: Plan) -> dict[str, Tensor]:
    """Where the random numbers of every rank stand."""
    own = random_state(plan.model)
    if plan.world_size == 1:
        return {"random.0": own}
    device = plan.model if dist.get_backend() == "nccl" else torch.device("cpu")
    states = [torch.empty_like(own, device=device) for _ in range(plan.world_size)]
    dist.all_gather(states, own.to(device))
    return {f"random.{rank}": state.cpu() for rank, state in enumerate(states)}
