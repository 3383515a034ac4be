"""What binds the parts of a run to each other, and where a run starts from: refused before anything is computed.

Compares settings and corpus with what the run in a folder was made with; trains, prepares and writes nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from myxtts.assembly.folder import VOCABULARY_FILE, RunFolder
from myxtts.config import SAMPLE_RATE, STAGES, Settings
from myxtts.data.clips import Prepared
from myxtts.devices import Plan
from myxtts.errors import ConfigError
from myxtts.run import require_same
from myxtts.text.tokenizer import Tokenizer
from myxtts.weights import MODEL_FILES

PORTIONS = ("data.batch_size", "training.gradient_accumulation_steps", "processes")
CLIPS_OF_A_STEP = "clips of a step (--batch-size × --grad-accum × processes)"


def identity(settings: Settings, prepared: Prepared, plan: Plan) -> dict[str, Any]:
    """What a run cannot change on its way: the network, and the order in which it sees the clips."""
    return {**_identity_of_settings(settings), **_identity_of_corpus(prepared), "processes": plan.world_size}


def require_same_run(settings: Settings, folder: RunFolder, prepared: Prepared | None) -> None:
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


def _identity_of_corpus(prepared: Prepared) -> dict[str, Any]:
    return {
        "training clips": len(prepared.train),
        "seconds of training clips": round(float(prepared.train.num_samples.sum()) / SAMPLE_RATE, 1),
        "vocabulary": prepared.tokenizer.fingerprint,
    }


def as_started(settings: Settings, folder: RunFolder) -> Settings:
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


def require_source(settings: Settings, begun: RunFolder | None) -> None:
    """Raise an error unless there are weights where `init_from` points; those of a run that has begun it has."""
    source = settings.training.init_from
    known = begun.started_with().get("training.init_from") if begun is not None else None
    if source is None or str(source) == known or RunFolder(source).exists:
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
