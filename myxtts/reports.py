"""What a training run leaves for its user: lines on the terminal; metrics, pictures and a page in its folder."""

from __future__ import annotations

import contextlib
import json
import logging
import platform
from pathlib import Path

import torch
from torch import Tensor

from myxtts import __version__
from myxtts.devices import Machine
from myxtts.host import usable_cores
from myxtts.observe.metrics import MetricsLog, StepReport, ValidationReport
from myxtts.observe.nvml import Sampler
from myxtts.observe.report import write_report
from myxtts.observe.watch import Watch
from myxtts.screens import ProgressPrinter

_log = logging.getLogger(__name__)


class TrainingReports:
    """Shows and keeps what the training loop reports; warns when the pipeline is not what it should be."""

    def __init__(self, folder: Path, printer: ProgressPrinter) -> None:
        self._folder = folder
        self._log = MetricsLog(folder)
        self._printer = printer
        self._watch = Watch()
        self._has_begun = False
        self._gpus = Sampler([gpu.index for gpu in Machine.look().gpus])

    def begin(self, stage: str, step: int, total_steps: int) -> None:
        self._has_begun = True
        self._log.begin(stage, step)
        self._printer.begin(stage, step, total_steps)
        self._watch = Watch()
        with contextlib.suppress(OSError):  # a page without the machine is better than no training
            (self._folder / "machine.json").write_text(json.dumps(machine(), indent=2), encoding="utf-8")

    def tick(self, step: int) -> None:
        self._printer.tick(step)

    def step(self, report: StepReport) -> None:
        self._log.step(report)
        self._printer.report(report)
        self._printer.warn(self._watch.add(report))
        lines = [json.dumps(reading.to_json()) + "\n" for reading in self._gpus.read()]
        with contextlib.suppress(OSError), open(self._folder / "readings.jsonl", "a", encoding="utf-8") as file:
            file.writelines(lines)

    def validation(self, report: ValidationReport) -> None:
        self._log.validation(report)
        self._printer.validation(report)

    def picture(self, name: str, picture: Tensor, step: int) -> None:
        if picture.dim() == 1:
            self._log.code_usage(picture.numpy(), step)
        else:
            self._log.image(name, picture.numpy(), step)

    def close(self) -> None:
        """Leave a page about the run behind."""
        self._printer.end()
        self._log.close()
        self._gpus.close()
        if not self._has_begun:
            return
        try:
            write_report(self._folder)
        except OSError as error:
            _log.warning("No report.html was written: %s", error)


def machine() -> dict[str, str]:
    """Where a run was made, in words."""
    gpus = ", ".join(str(gpu) for gpu in Machine.look().gpus)
    return {
        "GPUs": gpus or "none",
        "CPU": f"{platform.processor() or platform.machine()}, {usable_cores()} usable cores",
        "system": platform.platform(),
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        "MyXTTS": __version__,
    }
