"""What a training run leaves for its user: lines on the terminal, metrics and pictures in the run's folder."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from myxtts.observe.metrics import MetricsLog, StepReport, ValidationReport
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

    def begin(self, stage: str, step: int, total_steps: int) -> None:
        self._log.begin(stage, step)
        self._printer.begin(stage, step, total_steps)
        self._watch = Watch()

    def tick(self, step: int) -> None:
        self._printer.tick(step)

    def step(self, report: StepReport) -> None:
        self._log.step(report)
        self._printer.report(report)
        self._printer.warn(self._watch.add(report))

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
        try:
            write_report(self._folder)
        except OSError as error:
            _log.warning("No report.html was written: %s", error)
