"""Settings that do not suit the machine or the corpus, each with what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator

from myxtts.config import HOP_SAMPLES, SAMPLE_RATE, STAGES, Settings, preset_for
from myxtts.config import least_memory_mb as _least_memory_mb
from myxtts.settings import specs
from myxtts.settings import value_of as _value

_LEAST_HOURS = 5.0
"""Of speech, below which `normal` and `big` learn a corpus by heart instead of how to speak."""


_HIGHEST_FINE_TUNING_RATE = 1e-3


def training_hints(
    settings: Settings,
    num_gpus: int,
    gpu_memory_mb: int,
    num_clips: int,
    cores: int,
    *,
    num_val_clips: int | None = None,
    speech_hours: float | None = None,
) -> list[str]:
    """Settings that do not suit the machine or the corpus, each with what to do; all of them would run.

    `num_gpus` and `num_clips` (of training) are this process's share; without a GPU its memory is 0. Where the
    number of validation clips or the hours are None, only what the settings themselves imply is said.
    """
    if speech_hours is None:
        speech_hours = num_clips * settings.data.max_mel_frames * HOP_SAMPLES / SAMPLE_RATE / 3600  # at most
    if num_val_clips is None:
        num_val_clips = 0 if settings.data.val_data is None and settings.data.val_fraction == 0 else 1
    return [
        *_machine_hints(settings, num_gpus, gpu_memory_mb, cores),
        *_corpus_hints(settings, num_clips, num_val_clips, speech_hours),
        *_length_hints(settings, num_clips),
        *_mode_hints(settings, on_gpu=num_gpus > 0),
    ]


def _machine_hints(settings: Settings, num_gpus: int, gpu_memory_mb: int, cores: int) -> Iterator[str]:
    model, data, name = settings.model, settings.data, settings.training.preset
    if data.num_workers > cores and data.num_workers != specs()["data.num_workers"].default:
        yield (
            f"data.num_workers = {data.num_workers}: this machine has {cores} usable cores, and no more workers "
            f"are started than that; give --num-workers {cores}"
        )
    if num_gpus > 1 and data.data_gpu is None:
        yield (
            f"{num_gpus} GPUs were found and one is used; train on all with torchrun --nproc-per-node {num_gpus}, "
            "or let a second one prepare the batches with --data-gpu 0 --model-gpu 1"
        )
    if num_gpus == 0:
        return
    if name is not None and gpu_memory_mb < _least_memory_mb(name):
        yield (
            f"training.preset = {name}: the GPU has {gpu_memory_mb} MB, the preset is for more; "
            f"give --preset {preset_for(gpu_memory_mb)}"
        )
    is_whole = model.lora_rank == 0 and not model.gradient_checkpointing
    is_large = model.size in ("normal", "big")
    if name is None and is_large and is_whole and gpu_memory_mb < _least_memory_mb("16gb"):
        yield (
            f"model.size = {model.size}: training it whole may not fit the {gpu_memory_mb} MB of the GPU; "
            f"start with --preset {preset_for(gpu_memory_mb)}"
        )


def _corpus_hints(settings: Settings, num_clips: int, num_val_clips: int, speech_hours: float) -> Iterator[str]:
    model, data, training = settings.model, settings.data, settings.training
    if data.batch_size > num_clips:
        yield (
            f"data.batch_size = {data.batch_size}: there are only {num_clips} training clips, and the rest of the "
            f"batch is filled up with clips that count nothing; give --batch-size {num_clips}"
        )
    num_batches = math.ceil(num_clips / data.batch_size)
    for key in ("data.pipeline_buffer_size", "data.prefetch_buffer_size"):
        size = _value(settings, key)
        if size is not None and size > num_batches:
            yield (
                f"{key} = {size}: an epoch has only {num_batches} batches, more of them ready take memory and "
                f"gain nothing; give {specs()[key].flags[0]} {num_batches}"
            )
    if num_val_clips == 0:
        stop = f", and training.early_stop = {training.early_stop} never acts" if training.early_stop else ""
        yield (
            f"no clip is left for validation: there is no best checkpoint{stop}; give --val-data, or a "
            "--val-fraction such as 0.02"
        )
    is_from_scratch = training.init_from is None and "gpt" in (training.stages or STAGES)
    if is_from_scratch and model.size in ("normal", "big") and speech_hours < _LEAST_HOURS:
        yield (
            f"model.size = {model.size}: {speech_hours:.1f} hours of speech are too few to train it from scratch; "
            "start from XTTS-v2 with --init-from, or use --model-size small"
        )


def _length_hints(settings: Settings, num_clips: int) -> Iterator[str]:
    training = settings.training
    for flag, total in _step_limits(settings, num_clips).items():
        if 0 < training.warmup_steps >= total:
            yield (
                f"training.warmup_steps = {training.warmup_steps}: {flag} ends the stage at step {total}, before "
                f"the learning rate has risen; give --warmup-steps {total // 10} or train longer"
            )
        if training.save_step > total:
            yield (
                f"training.save_step = {training.save_step}: {flag} ends the stage at step {total}, with no "
                "checkpoint before the last; lower --save-step if a crash should cost less than everything"
            )
        needed = (training.early_stop + 1) * training.val_step
        if training.early_stop and needed > total:
            yield (
                f"training.early_stop = {training.early_stop}: it can act at step {needed} at the earliest, and "
                f"{flag} ends the stage at step {total}; lower --val-step or leave out --early-stop"
            )


def _step_limits(settings: Settings, num_clips: int) -> dict[str, int]:
    """The flags that end the stages of this training, and at which optimiser step of a stage they do."""
    training = settings.training
    num_batches = training.epochs * math.ceil(num_clips / settings.data.batch_size)
    of_epochs = max(num_batches // training.gradient_accumulation_steps, 1)
    is_step_bound = training.max_steps is not None and training.max_steps <= of_epochs
    shared = ("--max-steps", training.max_steps) if is_step_bound else ("--epochs", of_epochs)
    own = {"dvae": ("--dvae-steps", training.dvae_steps), "decoder": ("--decoder-steps", training.decoder_steps)}
    stages = training.stages or (STAGES if training.init_from is None else ("gpt",))
    ends = [own[stage] if stage in own and own[stage][1] is not None else shared for stage in stages]
    return {flag: total for flag, total in ends if total is not None}


def _mode_hints(settings: Settings, *, on_gpu: bool) -> Iterator[str]:
    model, data, training = settings.model, settings.data, settings.training
    is_eager = training.enable_eager_debug or not training.enable_graph_mode
    is_compiled = on_gpu and training.enable_xla_compilation and not is_eager
    if is_compiled and not data.pad_to_fixed_length:
        yield (
            "data.pad_to_fixed_length = false: every batch has other shapes, so the step is neither compiled nor "
            "captured; give --enable-static-shapes for speed"
        )
    if training.enable_eager_debug:
        yield (
            "training.enable_eager_debug = true: slow on purpose; leave out --enable-eager-debug once the "
            "operation is found"
        )
    rate = training.learning_rate
    if training.init_from is not None and rate is not None and rate > _HIGHEST_FINE_TUNING_RATE:
        yield (
            f"training.learning_rate = {rate:g}: so high a rate undoes what the weights of --init-from know; "
            "leave out --lr for the default of fine-tuning"
        )
    if training.init_from is None and model.lora_rank > 0:
        yield (
            f"model.lora_rank = {model.lora_rank}: without --init-from the adapters stand beside untrained "
            "weights and learn little; name weights to start from, or give --lora-rank 0"
        )
