"""A whole training run: corpus, plan, model, its stages one after the other; signals and other processes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from myxtts.assembly.folder import RunFolder, inherited, initial_model
from myxtts.assembly.identity import as_started, identity, require_source, stages_of
from myxtts.assembly.stage import StageTask, train_stage
from myxtts.checkpoint import write_atomically
from myxtts.config import SAMPLE_RATE, Settings
from myxtts.data.clips import Prepared
from myxtts.data.fill import Progress
from myxtts.data.prepare import prepare
from myxtts.devices import Machine, Plan, announcements, apply_caps, make_plan
from myxtts.errors import DatasetError, MyXTTSError
from myxtts.host import usable_cores
from myxtts.model.xtts import XTTS
from myxtts.observe.trace import OFF, Trace
from myxtts.run import lock
from myxtts.settings import Loaded, presets, to_yaml
from myxtts.text.tokenizer import Tokenizer
from myxtts.training.trainer import Reporter, State

_log = logging.getLogger(__name__)


def train(
    loaded: Loaded,
    reporter: Reporter | None,
    progress: Progress,
    say: Callable[[str], None],
    show_corpus: Callable[[Prepared], None] = lambda _: None,
    trace: Trace = OFF,
) -> dict[str, State]:
    """Train every stage the settings ask for; returns where each stands. Only rank 0 has a reporter."""
    settings = loaded.settings
    plan = make_plan(settings.data)
    speak = say if plan.rank == 0 else _silent
    folder = RunFolder(settings.training.checkpoint_dir, settings.training.keep_checkpoints)
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
        asked = frozenset(key for key in loaded.origin if loaded.is_set(key))
        states: dict[str, State] = {}
        for stage in stages:
            task = StageTask(
                stage=stage,
                settings=settings,
                asked=asked,
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


def _prepare(settings: Settings, begun: RunFolder | None, plan: Plan, progress: Progress) -> Prepared:
    """The corpus with the vocabulary of the run, once it has one; rank 0 goes first and leaves a cache behind."""
    data = settings.data
    if begun is not None:
        data = replace(data, tokenizer=begun.vocabulary_file)
    elif data.tokenizer is None and settings.training.init_from is not None:
        data = replace(data, tokenizer=settings.training.init_from)
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
    folder: RunFolder,
    prepared: Prepared,
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
        write_atomically(folder.folder / "settings.yaml", lambda path: _write(path, text))
    _barrier(plan)
    return model


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _num_tokens(source: Path) -> int:
    try:
        return int(Tokenizer.load(source).num_tokens)
    except MyXTTSError:  # weights without a vocabulary of their own: the one named is theirs
        return sys.maxsize


def _hints(settings: Settings, prepared: Prepared, plan: Plan) -> Iterator[str]:
    gpus = Machine.look().gpus
    memory = next((gpu.memory_mb for gpu in gpus if gpu.index == plan.model.index), 0)
    hours = float(prepared.train.num_samples.sum()) / SAMPLE_RATE / 3600
    found = presets.hints(
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
