"""Training stages of the learning experiment: settings for a few hours of speech, a time limit, resuming.

A stage is one call of `myxtts.run.train`, which `myxtts train` calls too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from corpus import character_vocabulary
from rich.console import Console

from myxtts.observe.metrics import MetricsLog, StepReport, ValidationReport
from myxtts.run import train
from myxtts.settings import load
from myxtts.training.trainer import Reporter

NUM_CHECKPOINTS = 8
"""Checkpoints and validations of a stage, evenly spaced."""
MAX_MEL_FRAMES, MAX_IDS = 1680, 320
"""The longest clip has 16.9 seconds (19.3 at the slowest speed) and 259 letters, so none is set aside."""
DVAE_MEL_FRAMES = 640
"""Seven seconds, because the DVAE trains on padded clips. Longer are only most of the LibriVox reader's clips."""
TRIM_DB = 35
"""Makes all speakers' clips begin and end alike: removes 8 % of cmu_slt's audio, 1 to 2 % of the others'."""
WARM_UP_STEPS = 400
EMA_WINDOWS = 40
"""The GPT's moving average spans a fortieth of its steps, so that the first checkpoint has forgotten the random
initial weights."""
STAGE_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "dvae": {"training.learning_rate": 5e-4},
    # Every text is seen many times: noise, dropout and weight decay reduce overfitting.
    "gpt": {
        "training.learning_rate": 2.5e-4,
        "training.weight_decay": 0.05,
        "training.code_noise": 0.3,
        "training.text_dropout": 0.1,
        "model.dropout": 0.1,
    },
    "decoder": {"training.learning_rate": 2e-4},
}
console = Console(width=140, highlight=False)


class PrintedReports(Reporter):
    """Prints every report and writes it to the run's metrics."""

    def __init__(self, folder: Path) -> None:
        self._log = MetricsLog(folder)

    def begin(self, stage: str, step: int, total_steps: int, own_references: float | None) -> None:
        console.print(f"{stage}: from step {step} to {total_steps}")
        self._log.begin(stage, step, own_references)

    def step(self, report: StepReport) -> None:
        self._log.step(report)
        losses = "  ".join(f"{name} {value:.3f}" for name, value in report.losses.items() if name != "total")
        memory = max(report.memory_mb.values(), default=0) / 1024
        speed = f"{report.clips_per_s:,.0f} clips/s  {report.step_ms:.1f} ms  idle {report.idle_share:.1%}"
        console.print(f"{report.stage} {report.step:6d}  {losses}  {speed}  {memory:.1f} GiB")

    def validation(self, report: ValidationReport) -> None:
        self._log.validation(report)
        losses = "  ".join(f"{name} {value:.3f}" for name, value in report.losses.items())
        console.print(f"{report.stage} {report.step:6d}  held out: {losses}{'  best' * report.is_best}")


class Deadline:
    """The time limit of this process; None for no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._at = None if seconds is None else time.monotonic() + seconds

    @property
    def left_s(self) -> float | None:
        return None if self._at is None else max(self._at - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        return self.left_s == 0

    @contextlib.contextmanager
    def stops_training(self) -> Iterator[None]:
        """Send a training inside this block SIGTERM at the deadline: it saves and ends."""
        over = threading.Event()

        def stop() -> None:
            if over.wait(self.left_s):
                return
            while not over.wait(0.2):  # without the training's handler the signal would end the process
                if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

        thread = threading.Thread(target=stop, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def train_stage(
    options: argparse.Namespace, stage: str, deadline: Deadline, ours: Mapping[str, object] | None = None
) -> bool:
    """Train a stage, resuming an earlier call; True if it reached its last step. `ours` are settings that win."""
    steps = {"dvae": options.dvae_steps, "gpt": options.gpt_steps, "decoder": options.decoder_steps}[stage]
    every = max(steps // NUM_CHECKPOINTS, 1)
    flags: dict[str, object] = {
        "data.train_data": str(options.corpus / stage),
        "data.language": "en",
        "data.tokenizer": str(character_vocabulary(options.corpus / "gpt", options.phonemes)),
        "data.use_phonemes": options.phonemes,
        "data.max_mel_frames": DVAE_MEL_FRAMES if stage == "dvae" else MAX_MEL_FRAMES,
        "data.max_text_length": MAX_IDS,
        "data.trim_silence_db": TRIM_DB,
        "data.batch_size": options.decoder_batch if stage == "decoder" else options.batch,
        "model.size": options.size,
        "training.checkpoint_dir": str(options.run),
        "training.stages": stage,
        "training.epochs": 10**6,
        "training.warmup_steps": min(WARM_UP_STEPS, steps // 10),
        "training.max_steps": steps,
        "training.ema_decay": max(1 - EMA_WINDOWS / steps, 0) if stage == "gpt" else 0,
        "training.log_step": max(steps // 40, 1),
        "training.val_step": every,
        "training.evaluate_on": "model",  # so that every checkpoint has its validation loss
        "training.save_step": every,
        "training.keep_checkpoints": NUM_CHECKPOINTS + 2 if stage == "gpt" else 1,
        "training.enable_xla_compilation": stage == "gpt",  # the others have few identical layers
        **STAGE_SETTINGS[stage],
        **(ours or {}),
    }
    done = False
    if not deadline.is_over:
        with deadline.stops_training():
            result = train(load(None, flags), reporter=PrintedReports(options.run), say=console.print)
        done = result.states[stage].done
    if not done:
        console.print(f"time is up in stage {stage}; the same command continues")
    return done
