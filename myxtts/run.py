"""A whole training run: corpus, plan, model, its stages one after the other; signals and other processes."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from myxtts.checkpoints import LoadedCheckpoint, UnreadableWeights, require_same
from myxtts.config import SAMPLE_RATE, STAGES, Settings, num_frames_of
from myxtts.data.batches import Cursor, mean_clips
from myxtts.data.clips import ClipSet, PreparedCorpus
from myxtts.data.prepare import prepare, with_tokenizer_of_run
from myxtts.devices import (
    Machine,
    Plan,
    announcements,
    apply_caps,
    explain_out_of_memory,
    make_plan,
    peak_memory_mb,
    random_state,
    set_random_state,
)
from myxtts.errors import ConfigError, DatasetError, MyXTTSError, Progress
from myxtts.files import lock, write_text_atomically
from myxtts.hints import training_hints
from myxtts.host import usable_cores
from myxtts.model.gpt import adapter_state, store_frozen_in_bf16
from myxtts.model.mel import DVAE_MEL, LogMel
from myxtts.model.xtts import XTTS
from myxtts.observe.trace import OFF, Trace
from myxtts.pipeline.feed import FeedMaker, Streams, dvae_key
from myxtts.run_dir import VOCABULARY_FILE, RunDir, inherited, initial_model
from myxtts.settings import LoadedSettings, to_yaml
from myxtts.text.tokenizer import Tokenizer
from myxtts.training.optim import Optimizer, Schedule
from myxtts.training.recipes import RECIPES, Recipe, StageFacts
from myxtts.training.trainer import Reporter, State, Step, StepMode, Trainer, TrainerContext, choose_mode
from myxtts.weights import MODEL_FILES, is_trained_in

PORTIONS = ("data.batch_size", "training.gradient_accumulation_steps", "processes")
CLIPS_OF_A_STEP = "clips of a step (--batch-size × --grad-accum × processes)"


def identity(settings: Settings, prepared: PreparedCorpus, plan: Plan) -> dict[str, Any]:
    """What a run cannot change on its way: the network, and the order in which it sees the clips."""
    return {**_identity_of_settings(settings), **_identity_of_corpus(prepared), "processes": plan.world_size}


def check_resumable(settings: Settings, folder: RunDir, prepared: PreparedCorpus | None) -> None:
    """Raise the error with which `train` would refuse to continue a run, as far as it can be known before."""
    settings = as_started(settings, folder)
    now = {**_identity_of_settings(settings), **(_identity_of_corpus(prepared) if prepared else {})}
    processes = os.environ.get("WORLD_SIZE", "")  # as `train` would be started from here
    now["processes"] = int(processes) if processes.isdigit() else 1
    for stage in stages_of(settings):
        loaded = folder.checkpoints(stage).newest(optimizer=False)
        if loaded is not None:
            saved = loaded.state["notes"]["identity"]
            require_continuable(folder.folder, {name: saved[name] for name in now if name in saved}, now)


def require_continuable(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Refuse to continue a run under settings that cannot change; whether its batches are still the same.

    The clips of a step may come in other portions or from other processes, as long as they are as many.
    """
    before, after = (
        {**parts, CLIPS_OF_A_STEP: math.prod(parts.get(name, 1) for name in PORTIONS)} for parts in (saved, now)
    )
    require_same(folder, before, after, ignore=PORTIONS)
    return all(saved.get(name) == now.get(name) for name in PORTIONS)


def stages_of(settings: Settings) -> tuple[str, ...]:
    """What would be trained."""
    return settings.training.stages or (STAGES if settings.training.init_from is None else ("gpt",))


def _identity_of_settings(settings: Settings) -> dict[str, Any]:
    data, model, training = settings.data, settings.model, settings.training
    return {
        "model.size": model.size,
        "model.lora_rank": model.lora_rank,
        "data.batch_size": data.batch_size,
        "data.max_text_length": data.max_text_length,
        "data.max_mel_frames": data.max_mel_frames,
        "data.use_phonemes": data.use_phonemes,
        "training.gradient_accumulation_steps": training.gradient_accumulation_steps,
        "training.seed": training.seed,
        "training.ema_decay": training.ema_decay,
    }


def _identity_of_corpus(prepared: PreparedCorpus) -> dict[str, Any]:
    return {
        "training clips": len(prepared.train),
        "seconds of training clips": round(float(prepared.train.num_samples.sum()) / SAMPLE_RATE, 1),
        "vocabulary": prepared.tokenizer.fingerprint,
    }


def as_started(settings: Settings, folder: RunDir) -> Settings:
    """Settings of a run that is continued: where it came from is not asked again, and may not be changed."""
    facts, training = folder.started_with(), settings.training
    source = facts.get("training.init_from")
    given = source if training.init_from is None else str(training.init_from)
    now = {"training.init_from": given, "model.size": settings.model.size}
    require_same(folder.folder, {name: facts.get(name) for name in now}, now)
    if settings.data.tokenizer is not None:
        named, pinned = Tokenizer.load(settings.data.tokenizer), folder.vocabulary()
        require_same(folder.folder, {"vocabulary": pinned.fingerprint}, {"vocabulary": named.fingerprint})
    return replace(settings, training=replace(training, init_from=Path(source) if source else None))


def require_source(settings: Settings, begun: RunDir | None) -> None:
    """Raise an error unless there are weights where `init_from` points; those of a run that has begun it has."""
    source = settings.training.init_from
    known = begun.started_with().get("training.init_from") if begun is not None else None
    if source is None or str(source) == known or RunDir(source).exists:
        return
    has_weights = any((source / name).is_file() for name in MODEL_FILES)
    if has_weights and (settings.data.tokenizer is not None or (source / VOCABULARY_FILE).is_file()):
        return
    if has_weights:
        why = f"the folder has weights, but no {VOCABULARY_FILE}; copy it there, or name one with --tokenizer"
    elif source.is_dir():
        why = f"the folder holds neither XTTS weights ({' or '.join(MODEL_FILES)}) nor a run"
    else:
        why = "that is a file, not a folder" if source.exists() else "there is no such folder"
    raise ConfigError(
        f"--init-from {source}: {why}.\n"
        "Name a folder with the files of XTTS-v2 (model.pth, dvae.pth, mel_stats.pth, vocab.json), or a run's."
    )


MEL_STATISTICS_CLIPS = 256


def validate(maker: FeedMaker, recipe: Recipe, settings: Settings) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Mean losses over all validation clips and ranks, "total" the one that decides; pictures of one batch."""
    sums: dict[str, Tensor] = {}
    pictures: dict[str, Tensor] = {}
    with maker.validation() as feed, feed.model_stream.use():
        autocast = settings.data.mixed_precision and maker.plan.model.type == "cuda"
        while True:
            with feed.next() as batch:
                if batch is None:
                    break
                with torch.autocast(maker.plan.model.type, torch.bfloat16, enabled=autocast):
                    found = recipe.evaluate(batch.tensors, batch.sizes)
                    if not pictures:  # copied while the batch is held
                        found_pictures = recipe.pictures(batch.tensors, batch.sizes)
                        pictures = {name: picture.float().cpu() for name, picture in found_pictures.items()}
                for name, value in found.items():
                    sums[name] = sums.get(name, torch.zeros_like(value)) + value.float()
        values = torch.stack(list(sums.values()))
        if maker.plan.world_size > 1:
            dist.all_reduce(values)
        means = dict(zip(sums, values.tolist(), strict=True))
    losses = {"total": means["sum"] / max(means["count"], 1e-6)}
    for name in means:
        if name.endswith("_sum"):
            part = name.removesuffix("_sum")
            losses[part] = means[name] / max(means[f"{part}_count"], 1e-6)
    return losses, pictures


@torch.no_grad()
def mel_statistics(clips: ClipSet, device: torch.device) -> Tensor:
    """What mels are divided by, [80]: the root mean square of each band over some training clips."""
    log_mel = LogMel(DVAE_MEL).to(device)
    chosen = range(0, len(clips), max(len(clips) // MEL_STATISTICS_CLIPS, 1))
    total = torch.zeros(DVAE_MEL.num_mels, dtype=torch.float64, device=device)
    num_frames = 0
    for clip in chosen:
        pcm = torch.from_numpy(clips.audio[int(clips.audio_rows[clip])].copy()).to(device)
        mel = log_mel(pcm.float() / 32768)[:, : num_frames_of(len(pcm))]
        total += mel.double().square().sum(1)
        num_frames += mel.shape[1]
    return (total / max(num_frames, 1)).sqrt().float().cpu()


@dataclass(frozen=True)
class StageTask:
    """What training a stage takes."""

    stage: str
    settings: Settings
    prepared: PreparedCorpus
    plan: Plan
    folder: RunDir
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
    training = task.settings.training
    is_named = training.stages is not None or getattr(training, f"{task.stage}_steps", None) is not None
    return not is_named and any(task.folder.has_checkpoint(stage) for stage in later)


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


def set_up(task: StageTask, model: XTTS, loaded: LoadedCheckpoint | None, total: int) -> Trained:
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


def _train(task: StageTask, model: XTTS, loaded: LoadedCheckpoint | None, state: State, total: int) -> State:
    settings, plan = task.settings, task.plan
    training = settings.training
    if task.stage == "dvae" and loaded is None and not task.fine_tuning:
        model.mel_stats.copy_(mel_statistics(task.prepared.train, plan.data))
    # Not for LoRA: what its adapters are added to is what the run wrote down when it started.
    if task.stage == "gpt" and "gpt" in task.folder.untrained() and not settings.model.lora_rank:
        torch.manual_seed(training.seed)
        model.gpt.init_from_codebook(model.dvae.codebook.embed.t())
    recipe, optimizer, mode = set_up(task, model, loaded, total)
    maker = feed_maker(task, model)
    checkpoints = task.folder.checkpoints(task.stage)
    around = TrainerContext(
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
            on_host, on_device = feed.host_ring.depth, feed.model_ring.depth
            where = f"{on_host} on the host, {on_device} on {plan.model}"
            task.say(f"Buffer size: {on_host + on_device} batches ({where})")
            task.say(f"Training step: {mode}")
            task.say(f"Waiting up to {settings.data.model_start_delay:g}s for data pipeline to warm up")
            waited = feed.wait_until_warm(settings.data.model_start_delay)
            task.say(f"Model training starting now ({feed.num_ahead} batches ready after {waited:.1f} s)")
            step = Step(recipe, optimizer, mode, feed.model_stream, plan.world_size)
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
    facts = StageFacts(task.plan.world_size, task.fine_tuning, task.has_grown_vocabulary)
    return RECIPES[task.stage].build(model, task.settings, facts)


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
    state = {name: value for name, value in model.state_dict().items() if is_trained_in(task.stage, name)}
    for prefix, module in recipe.extra_modules().items():
        state |= {f"{prefix}.{name}": value for name, value in module.state_dict().items()}
    return state


def _load_weights(stage: str, model: XTTS, recipe: Recipe, weights: Mapping[str, Tensor]) -> None:
    own = dict(weights)
    for prefix, module in recipe.extra_modules().items():
        names = [name for name in weights if name.startswith(f"{prefix}.")]
        module.load_state_dict({name.removeprefix(f"{prefix}."): own.pop(name) for name in names})
    unknown = model.load_state_dict(own, strict=False).unexpected_keys
    if unknown:
        raise UnreadableWeights(f"The checkpoint of stage {stage} does not fit this model: it holds {unknown[:3]}")


def feed_maker(task: StageTask, model: XTTS) -> FeedMaker:
    """Feeds for the stage."""
    settings = task.settings
    autocast = settings.data.mixed_precision and task.plan.data.type == "cuda"
    key = dvae_key(model, autocast) if task.stage != "dvae" else ""
    streams = Streams.of(task.plan, settings.data)
    return FeedMaker(
        task.stage,
        model,
        task.prepared,
        settings.data,
        task.plan,
        settings.training.seed,
        key,
        streams,
    )


def _continue_random(task: StageTask, loaded: LoadedCheckpoint) -> None:
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


_log = logging.getLogger(__name__)


def train(
    loaded: LoadedSettings,
    reporter: Reporter | None,
    progress: Progress,
    say: Callable[[str], None],
    show_corpus: Callable[[PreparedCorpus], None] = lambda _: None,
    trace: Trace = OFF,
) -> dict[str, State]:
    """Train every stage the settings ask for; returns where each stands. Only rank 0 has a reporter."""
    settings = loaded.settings
    plan = make_plan(settings.data)
    speak = say if plan.rank == 0 else _silent
    folder = RunDir(settings.training.checkpoint_dir, settings.training.keep_checkpoints)
    has_begun = folder.has_begun and not settings.training.reset_training
    require_source(settings, folder if has_begun else None)
    with contextlib.ExitStack() as held:
        if plan.rank == 0:
            held.enter_context(lock(folder.folder))
        held.enter_context(_process_group(plan))
        apply_caps(plan)
        has_begun = folder.has_begun and not settings.training.reset_training
        if has_begun:
            settings = as_started(settings, folder)
        prepared = _prepare(settings, folder if has_begun else None, plan, progress)
        if plan.rank == 0:
            show_corpus(prepared)
        for line in [*announcements(plan, settings.data.pipeline_buffer_size), *_hints(settings, prepared, plan)]:
            speak(line)
        stages = stages_of(settings)
        fresh = _start(settings, folder, prepared, plan, stages, has_begun, speak)
        stop = held.enter_context(_StopRequest(plan))  # before, there is no step to finish and nothing to save
        states: dict[str, State] = {}
        for stage in stages:
            task = StageTask(
                stage=stage,
                settings=settings,
                prepared=prepared,
                plan=plan,
                folder=folder,
                reporter=reporter or NoReports(),
                stop_requested=stop.requested,
                say=speak,
                identity=identity(settings, prepared, plan),
                fine_tuning=settings.training.init_from is not None,
                has_grown_vocabulary=bool(folder.started_with().get("has_grown_vocabulary")),
                trace=trace,
            )
            speak(f"Stage {stage}")
            states[stage] = train_stage(task, folder.load_model(fresh, without=(stage,)))
            _barrier(plan)  # the next stage reads what rank 0 has saved of this one
            if not states[stage].done:
                break
        return states


def _prepare(settings: Settings, begun: RunDir | None, plan: Plan, progress: Progress) -> PreparedCorpus:
    """The corpus with the vocabulary of the run, once it has one; rank 0 goes first and leaves a cache behind."""
    own = begun.vocabulary_file if begun is not None else None
    data = with_tokenizer_of_run(settings.data, own, settings.training.init_from)
    try:
        prepared = prepare(data, progress) if plan.rank == 0 else None
    except DatasetError as error:
        if begun is None:
            raise
        raise DatasetError(
            f"{error}\nTexts were read with the vocabulary of the run in {begun.folder}, which this would "
            "continue. For another corpus give another --checkpoint-dir, or --reset-training."
        ) from error
    _barrier(plan)
    return prepared or prepare(data)


def _start(
    settings: Settings,
    folder: RunDir,
    prepared: PreparedCorpus,
    plan: Plan,
    stages: tuple[str, ...],
    has_begun: bool,
    speak: Callable[[str], None],
) -> XTTS | None:
    """The initial model; a new run's folder is made from it, and only then an old one put aside.

    None once everything is on the disk.
    """
    training = settings.training
    in_full = [stage for stage in stages if stage != "gpt" or not settings.model.lora_rank]
    saved = has_begun and folder.is_whole()
    _barrier(plan)
    model = None if saved else initial_model(settings, prepared.tokenizer)
    if plan.rank == 0:
        if training.reset_training and (aside := folder.reset()) is not None:
            speak(f"Starting over; what the folder held is now in {aside}")
        if model is not None and not has_begun:
            source = training.init_from
            facts = {
                "training.init_from": None if source is None else str(source),
                "model.size": settings.model.size,
                **inherited(source),
                "has_grown_vocabulary": source is not None and _num_tokens(source) < prepared.tokenizer.num_tokens,
            }
            folder.start(model, prepared.tokenizer, in_full, facts)
        if "gpt" in stages and "dvae" not in stages and training.init_from is None and not has_begun:
            speak("Hint: stage gpt without a trained DVAE learns the codes of a random one; train dvae before it")
        again = replace(settings, training=replace(training, reset_training=False))
        text = to_yaml(again)
        write_text_atomically(folder.folder / "settings.yaml", text)
    _barrier(plan)
    return model


def _num_tokens(source: Path) -> int:
    try:
        return int(Tokenizer.load(source).num_tokens)
    except MyXTTSError:  # weights without a vocabulary of their own: the one named is theirs
        return sys.maxsize


def _hints(settings: Settings, prepared: PreparedCorpus, plan: Plan) -> Iterator[str]:
    gpus = Machine.look().gpus
    memory = next((gpu.memory_mb for gpu in gpus if gpu.index == plan.model.index), 0)
    hours = float(prepared.train.num_samples.sum()) / SAMPLE_RATE / 3600
    found = training_hints(
        settings,
        len(gpus) if plan.world_size == 1 else 1,
        memory,
        len(prepared.train) // plan.world_size,
        usable_cores(),
        num_val_clips=len(prepared.val),
        speech_hours=hours,
    )
    return (f"Hint: {hint}" for hint in found)


class NoReports:
    """What ranks other than 0 report to."""

    def begin(self, stage: str, step: int, total_steps: int) -> None: ...
    def tick(self, step: int) -> None: ...
    def step(self, report: object) -> None: ...
    def validation(self, report: object) -> None: ...
    def picture(self, name: str, picture: Tensor, step: int) -> None: ...


def _silent(_: str) -> None: ...


class _StopRequest:
    """SIGINT and SIGTERM let the step under way finish; the second one ends the process at once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._asked = False
        self._before: dict[signal.Signals, Any] = {}

    def requested(self) -> bool:
        """Whether to stop now; all ranks get the same answer, and all must ask."""
        if self._plan.world_size == 1:
            return self._asked
        flag = torch.tensor([float(self._asked)], device=_communication_device(self._plan))
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def __enter__(self) -> _StopRequest:
        with contextlib.suppress(ValueError):  # not the main thread: nobody signals a thread
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: object) -> None:
        if self._asked:
            os._exit(128 + number)
        self._asked = True
        _log.info("Finishing this step and saving; the same signal again ends at once")


@contextlib.contextmanager
def _process_group(plan: Plan) -> Iterator[None]:
    if plan.world_size == 1:
        yield
        return
    on_gpu = plan.model.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        timeout=timedelta(hours=2),  # rank 0 may decode a large corpus meanwhile
        device_id=plan.model if on_gpu else None,
    )
    yield
    dist.destroy_process_group()  # not after an error: other processes may wait in a collective, and so would this


def _communication_device(plan: Plan) -> torch.device:
    return plan.model if plan.model.type == "cuda" else torch.device("cpu")


def _barrier(plan: Plan) -> None:
    if plan.world_size > 1:
        flag: Tensor = torch.zeros(1, device=_communication_device(plan))
        dist.all_reduce(flag)
        flag.item()
