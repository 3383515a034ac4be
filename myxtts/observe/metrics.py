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
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from myxtts.observe.trace import Counter, Span

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
    mfu: float | None = None
    """Useful arithmetic as a share of this GPU's measured matmul rate; None if not measured."""

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


Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StageHistory:
    """What one stage of a run reported, in the order of its steps."""

    name: str
    steps: list[StepReport] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of every step report, how long the run had trained by then, over all stages and without pauses."""
    validations: list[tuple[int, float]] = field(default_factory=list)
    """Step and total loss."""

    def column(self, name: str) -> Numbers:
        """One number of all step reports; `loss.total` for one inside a mapping."""
        name, _, inner = name.partition(".")
        values = [getattr(step, name) for step in self.steps]
        return numbers(value.get(inner) for value in values) if inner else numbers(values)

    @property
    def ring_names(self) -> list[str]:
        """The rings that batches pass on their way to the trainer; codes to be kept go the other way."""
        return list({name: None for step in self.steps for name in step.rings if name != "keep"})

    def readiness(self, ring: str) -> Numbers:
        """Of all step reports, the share of a ring's slots that were ready."""
        counts = [step.rings.get(ring, (math.nan, 0)) for step in self.steps]
        return numbers(ready / depth if depth else math.nan for ready, depth in counts)

    @property
    def best_validation(self) -> tuple[int, float] | None:
        return min(
            (found for found in self.validations if math.isfinite(found[1])),
            key=lambda found: found[1],
            default=None,
        )


def stages_of(records: Iterable[Mapping[str, Any]]) -> list[StageHistory]:
    """The stages of a run from the records of its metrics, in the order of their beginning."""
    stages: dict[str, StageHistory] = {}
    total_s = last_s = 0.0
    for record in records:
        name = str(record.get("stage", ""))
        if record.get("kind") == "validation":
            stage = stages.setdefault(name, StageHistory(name))
            losses = record.get("losses")
            loss = losses.get("total") if isinstance(losses, Mapping) else None
            stage.validations.append((record["step"], number(loss)))
        elif record.get("kind") == "step" and (report := step_report(record)) is not None:
            stage = stages.setdefault(name, StageHistory(name))
            if math.isfinite(report.elapsed_s):  # counted from the start of the stage, or from where it goes on
                begins = not stage.steps or report.elapsed_s < last_s
                total_s += report.elapsed_s - (0.0 if begins else last_s)
                last_s = report.elapsed_s
            stage.steps.append(report)
            stage.seconds.append(total_s)
    return list(stages.values())


def step_report(record: Mapping[str, Any]) -> StepReport | None:
    """A record of the metrics as the report it was, NaN where a number was not finite; None if it is damaged."""
    try:
        total_steps, eta_s = record.get("total_steps"), record.get("eta_s")
        return StepReport(
            stage=str(record["stage"]),
            step=int(record["step"]),
            total_steps=None if total_steps is None else int(total_steps),
            epoch=int(record.get("epoch") or 0),
            losses=_named(record, "losses"),
            lr=number(record.get("lr")),
            grad_norm=_named(record, "grad_norm"),
            clips_per_s=number(record.get("clips_per_s")),
            step_ms=number(record.get("step_ms")),
            step_cv=number(record.get("step_cv")),
            idle_share=number(record.get("idle_share")),
            ahead=int(record.get("ahead") or 0),
            rings={str(name): (int(ready), int(depth)) for name, (ready, depth) in _pairs(record, "rings")},
            memory_mb=_named(record, "memory_mb"),
            skipped=int(record.get("skipped") or 0),
            eta_s=None if eta_s is None else float(eta_s),
            elapsed_s=number(record.get("elapsed_s")),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def number(value: object) -> float:
    """A number as it was read from JSON; NaN for everything else, and for what is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return math.nan
    return float(value) if math.isfinite(value) else math.nan


def numbers(values: Iterable[object]) -> Numbers:
    """The same for many."""
    return np.array([number(value) for value in values], np.float64)


def thinned(x: Numbers, y: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """At most `most` points of a curve: of every stretch its lowest and its highest, so that outliers stay."""
    if len(x) <= most:
        return x, y
    kept: list[int] = []
    for stretch in np.array_split(np.arange(len(x)), most // 2):
        finite = stretch[np.isfinite(y[stretch])]
        ends = {finite[np.argmin(y[finite])], finite[np.argmax(y[finite])]} if len(finite) else {stretch[0]}
        kept += sorted(int(index) for index in ends)
    return x[kept], y[kept]


def smoothed(y: Numbers, window: int) -> Numbers:
    """The mean of the values around each one, NaN where there are none."""
    finite = np.isfinite(y)
    sums, counts = (np.concatenate([[0.0], np.cumsum(part)]) for part in (np.where(finite, y, 0.0), finite))
    first = np.maximum(np.arange(len(y)) - window // 2, 0)
    end = np.minimum(np.arange(len(y)) + window // 2 + 1, len(y))
    among = counts[end] - counts[first]
    return np.where(among > 0, (sums[end] - sums[first]) / np.maximum(among, 1), math.nan)


def settled(values: Sequence[float] | Numbers) -> float:
    """The median of the later half: what a training does once it is warm; NaN if nothing is known."""
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    return float(np.median(finite[len(finite) // 2 :])) if len(finite) else math.nan


def short(value: float | None, unit: str = "") -> str:
    """A number in about three digits, and its unit; a dash if there is none."""
    if value is None or not math.isfinite(value):
        return "–"
    if value and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.1e}{unit}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    text = f"{value:,.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + unit


def percent(share: float) -> str:
    """A share to a tenth of a per cent; a dash if there is none."""
    return f"{100 * share:.1f} %" if math.isfinite(share) else "–"


def duration(seconds: float | None) -> str:
    """42 s, 12 min, 5 h 12 min or 2 d 5 h; a dash if nobody knows."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    seconds = max(seconds, 0.0)
    for unit_s, unit, smaller_s, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if seconds >= unit_s:
            return f"{seconds // unit_s:.0f} {unit} {seconds % unit_s // smaller_s:.0f} {smaller}"
    return f"{seconds // 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def _named(record: Mapping[str, Any], name: str) -> dict[str, float]:
    return {str(key): number(value) for key, value in _pairs(record, name)}


def _pairs(record: Mapping[str, Any], name: str) -> Iterable[tuple[Any, Any]]:
    return (record.get(name) or {}).items()


PARTS = (
    "metrics.jsonl",
    "settings.yaml",
    "machine.json",
    "trace.jsonl",
    "readings.jsonl",
    "verdict.json",
    "evaluation/scores.json",
)
"""Files of a run that say something about it: a folder without any of them is no run."""

_HOLDER = re.compile(r"process (\d+) on (.+)")


def is_run(folder: Path) -> bool:
    """Whether a training or a profile left anything in a folder."""
    return any((folder / part).is_file() for part in PARTS)


def has_ended(folder: Path) -> bool:
    """Whether the process that trained here last is gone; False where nobody can tell, as on another machine."""
    try:
        holder = _HOLDER.fullmatch((folder / "lock").read_text(encoding="utf-8").strip())
        if holder is None or holder[2] != socket.gethostname():
            return False
        os.kill(int(holder[1]), 0)  # sends nothing, and fails if there is no such process
    except (ProcessLookupError, OverflowError):
        return True
    except (OSError, UnicodeDecodeError):  # no lock, or somebody else's process
        return False
    return False


def text_of(path: Path) -> str:
    """The text of a file; "" if there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def json_object(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is none, or if it is damaged."""
    try:
        found = json.loads(text_of(path) or "{}")
    except ValueError as error:
        _log.warning("%s is damaged and left out: %s", path, error)
        return {}
    return found if isinstance(found, dict) else {}


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, one a line; lines that were cut off are passed over."""
    found = []
    for line in text_of(path).splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict)]


def trace_of(path: Path) -> tuple[list[Span], list[Counter]]:
    """What `Trace.write_jsonl` wrote; records of another form are passed over."""
    spans: list[Span] = []
    counters: list[Counter] = []
    for record in json_lines(path):
        kind = record.pop("kind", "")
        with contextlib.suppress(TypeError):
            if kind == "span":
                spans.append(Span(**record))
            elif kind == "counter":
                counters.append(Counter(**record))
    return spans, counters
