"""What a run reports of itself, and the files that keep it: one JSON line per report, and TensorBoard's events.

    metrics.jsonl         every report of every stage, in the order of writing; `read_metrics` says which hold
    tensorboard/STAGE/    the same numbers as curves, and pictures

Nothing here ends a training: what cannot be written is missing, and said once. Knows neither what is trained nor
how a report is shown. TensorBoard and PyTorch are imported when the first stage begins.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

BOARD_FLUSH_S = 30
BOARD_QUEUE = 1000
"""Events that may wait for the disk before the training does."""
USAGE_PICTURE = (64, 256)
"""Rows and columns of the picture of code usage."""

Pixels = npt.NDArray[np.uint8]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepReport:
    """The state of a training at one of its log points."""

    stage: str
    step: int
    total_steps: int | None
    """None where nobody knows."""
    epoch: int
    losses: Mapping[str, float]
    """ "total" and what it consists of."""
    lr: float
    grad_norm: Mapping[str, float]
    """By the part of the model that is clipped on its own."""
    clips_per_s: float
    step_ms: float
    step_cv: float
    idle_share: float
    ahead: int
    """Batches that are ready for the trainer, wherever they are."""
    rings: Mapping[str, tuple[int, int]]
    """Of every ring how many batches are ready, and how many it holds."""
    memory_mb: Mapping[str, float]
    """The most that each role had allocated."""
    skipped: int
    """Steps left out because their gradients were not finite."""
    eta_s: float | None
    elapsed_s: float

    def scalars(self) -> dict[str, float]:
        """Every number that makes a curve, by its name in TensorBoard."""
        groups = {"loss": self.losses, "grad_norm": self.grad_norm, "memory_mb": self.memory_mb}
        named = {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}
        named |= {f"ring/{name}": ready for name, (ready, _) in self.rings.items()}
        named |= {f"train/{name}": getattr(self, name) for name in ("lr", "epoch", "skipped")}
        speed = ("clips_per_s", "step_ms", "step_cv", "idle_share", "ahead")
        return named | {f"speed/{name}": getattr(self, name) for name in speed}


@dataclass(frozen=True)
class ValidationReport:
    """What a validation found."""

    stage: str
    step: int
    losses: Mapping[str, float]
    """ "total" is what decides which checkpoint is best."""
    is_best: bool

    def scalars(self) -> dict[str, float]:
        """The losses, by their names in TensorBoard."""
        return {f"validation/{name}": value for name, value in self.losses.items()}


class MetricsLog:
    """Writes the reports of one run. For one thread, in the first process of a process group."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self._board_folder = folder / "tensorboard"
        self._board: SummaryWriter | None = None
        self._stage = ""
        self._warned = False

    def begin(self, stage: str, step: int) -> None:
        """Start a stage, or continue it behind `step`: what was written of later steps holds no longer."""
        self._close_board()
        self._stage = stage
        self._append({"kind": "begin", "stage": stage, "step": step})
        try:
            self._board = _open_board(self._board_folder / stage, step + 1)
        except (OSError, ImportError) as error:
            self._give_up_board(error)

    def step(self, report: StepReport) -> None:
        """Keep a report of the training."""
        self._keep("step", report)

    def validation(self, report: ValidationReport) -> None:
        """Keep a report of a validation."""
        self._keep("validation", report)

    def image(self, tag: str, array: npt.NDArray[Any], step: int) -> None:
        """Show a picture in TensorBoard: uint8 [H, W, 3] as it is, or numbers [H, W] in colours, row 0 below."""
        pixels = array if array.ndim == 3 else colours(array)[::-1]
        self._draw(lambda board: board.add_image(tag, pixels, step, dataformats="HWC"))

    def code_usage(self, counts: npt.NDArray[Any], step: int) -> None:
        """Show how often each code was used: how the counts are distributed, and as bars, the most used first."""
        self._draw(lambda board: board.add_histogram("codes/uses", counts, step))
        self.image("codes/most_used_first", usage_bars(counts), step)

    def close(self) -> None:
        """Bring everything to the files."""
        self._close_board()

    def _keep(self, kind: str, report: StepReport | ValidationReport) -> None:
        if report.stage != self._stage:
            self.begin(report.stage, report.step - 1)
        if self._append({"kind": kind, **vars(report)}):  # else the disk is full for the other writer as well
            self._draw(lambda board: _add_scalars(board, report.scalars(), report.step))

    def _append(self, record: Mapping[str, object]) -> bool:
        line = json.dumps(_strict({**record, "written_at": round(time.time(), 3)}), allow_nan=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab+") as file:
                if file.tell() > 0:
                    file.seek(-1, 2)
                    if file.read(1) != b"\n":  # a kill or a full disk cut the last line off
                        line = f"\n{line}"
                file.write(f"{line}\n".encode())
        except OSError as error:
            self._warn(f"Cannot write {self.path}: {error.strerror or error}")
            return False
        return True

    def _draw(self, action: Callable[[SummaryWriter], None]) -> None:
        if self._board is not None:
            try:
                action(self._board)
            except (OSError, ImportError) as error:
                self._give_up_board(error)

    def _give_up_board(self, error: Exception) -> None:
        """Do without TensorBoard until the next stage: a writer that failed once does not recover."""
        self._warn(f"Cannot write {self._board_folder}: {error}")
        self._close_board()

    def _close_board(self) -> None:
        board, self._board = self._board, None
        if board is not None:
            with contextlib.suppress(OSError):  # what it could not write has been said
                board.close()

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s. Training goes on; metrics and curves may be incomplete from here on.", what)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The reports that hold, each with its "kind" (step, validation); numbers that were not finite are None.

    A stage that was continued behind a step, or begun again, has outdated what it wrote before of later steps.
    Lines that were cut off are passed over.
    """
    kept: dict[tuple[str, str, int], dict[str, Any]] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
            kind, stage, step = record["kind"], record["stage"], record["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if kind == "begin":
            kept = {key: report for key, report in kept.items() if key[1] != stage or key[2] <= step}
        else:
            kept.pop((kind, stage, step), None)
            kept[kind, stage, step] = record
    return list(kept.values())


def colours(array: npt.NDArray[Any]) -> Pixels:
    """Numbers [H, W] as colours [H, W, 3] from black, the lowest, over violet and orange to pale yellow."""
    finite = array[np.isfinite(array)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    level = np.nan_to_num((array - low) / ((high - low) or 1.0), nan=0.0, posinf=1.0, neginf=0.0)
    stops = np.array([[0, 0, 4], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]])
    places = np.linspace(0, 1, len(stops))
    return np.stack([np.interp(level, places, stops[:, channel]) for channel in range(3)], -1).astype(np.uint8)


def usage_bars(counts: npt.NDArray[Any]) -> Pixels:
    """How often each code was used as bars, the most used first; the highest fills the picture."""
    rows, columns = USAGE_PICTURE
    most_first = np.sort(counts.astype(np.float64))[::-1]
    groups = np.array([group.mean() for group in np.array_split(most_first, min(columns, len(most_first)))])
    heights = np.ceil(rows * groups / max(groups[0], 1e-12))  # a code that is used at all gets a pixel
    heights = np.repeat(heights, columns // len(heights))
    filled = np.arange(rows, 0, -1)[:, None] <= heights[None, :]
    return np.where(filled[..., None], np.array([188, 55, 84]), 255).astype(np.uint8)


def _open_board(folder: Path, first_step: int) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=first_step, max_queue=BOARD_QUEUE, flush_secs=BOARD_FLUSH_S)


def _add_scalars(board: SummaryWriter, scalars: Mapping[str, float], step: int) -> None:
    """Write all numbers of a report as one event: the writer opens its file anew for each."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
    board._get_file_writer().add_summary(Summary(value=values), step)  # type: ignore[no-untyped-call]


def _strict(value: Any) -> Any:
    """The same for JSON, which has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {name: _strict(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
