"""The reports of a training run, and the files that keep them.

    metrics.jsonl         every report of every stage, one JSON object per line
    tensorboard/STAGE/    the same numbers as curves, and pictures

A file that cannot be written never ends a run; it is reported once. TensorBoard and PyTorch are imported when
the first stage begins.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

BOARD = {"max_queue": 1000, "flush_secs": 30}
"""Options of TensorBoard's writer: so many events may wait for the disk before the run does."""
SAMPLES_FOLDER = "samples"
"""Folder of a run for what its evaluations spoke, and for their newest pictures."""
MOST_KEPT = 4000  # step reports that `MetricsTail` keeps; the live view needs no more
RUN_FILES = (
    "metrics.jsonl", "settings.yaml", "machine.json", "trace.jsonl", "readings.jsonl", "verdict.json",
    "evaluation/scores.json",
)  # fmt: skip
"""Files that a run, a profile or an evaluation leaves; a folder without any of them is not a run."""

Numbers = npt.NDArray[np.float64]
Record = Mapping[str, Any]  # one object read from JSON

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepReport:
    """The state of a run at one of its log points."""

    stage: str
    step: int
    total_steps: int | None  # None if unknown
    epoch: int
    losses: Mapping[str, float]  # "total" and its parts
    lr: float
    grad_norm: Mapping[str, float]  # by clipping group
    clips_per_s: float
    step_ms: float
    step_cv: float  # coefficient of variation of the step time
    idle_share: float
    ahead: int  # batches ready for the trainer, in all rings
    rings: Mapping[str, tuple[int, int]]  # ready batches and slots of each ring
    memory_mb: Mapping[str, float]  # peak allocated memory of each role
    skipped: int  # steps skipped because their gradients were not finite
    eta_s: float | None
    elapsed_s: float
    in_use_mb: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Memory held now, and the most there can be, on the device of each role and by the process on the "host"."""
    mfu: float | None = None  # model FLOP/s as a share of this GPU's measured matmul rate; None if not measured
    times_ms: Sequence[float] = ()  # of every step that ended since the last report, in order

    def scalars(self) -> dict[str, float]:
        """Return the numbers of the curves, by their names in TensorBoard."""
        groups = {"loss": self.losses, "grad_norm": self.grad_norm, "memory_mb": self.memory_mb}
        named = {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}
        named |= {f"ring/{name}": ready for name, (ready, _) in self.rings.items()}
        named |= {f"in_use_mb/{name}": used for name, (used, _) in self.in_use_mb.items()}
        named |= {f"train/{name}": getattr(self, name) for name in ("lr", "epoch", "skipped")}
        speed = ("clips_per_s", "step_ms", "step_cv", "idle_share", "ahead", "mfu")
        named |= {f"speed/{name}": getattr(self, name) for name in speed}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class ValidationReport:
    stage: str
    step: int
    losses: Mapping[str, float]  # the best checkpoint has the lowest "total"
    is_best: bool

    def scalars(self) -> dict[str, float]:
        return {f"validation/{name}": value for name, value in self.losses.items()}


class Spoken(NamedTuple):
    """A held-out sentence that an evaluation spoke; files are relative to the folder `samples` of the run."""

    text: str
    language: str
    file: str
    recording: str  # the same sentence, recorded
    reference: str  # another recording of the speaker, which gave the voice
    problem: str  # what the quality check says; "" if nothing
    wave: npt.NDArray[np.float32]  # of 24 kHz


@dataclass(frozen=True)
class JudgeReport:
    """Mean scores of the sentences that the weights of a step spoke: wer, cer, similarity, mos."""

    stage: str
    step: int
    scores: Mapping[str, float]

    def scalars(self) -> dict[str, float]:
        return {f"judges/{name}": value for name, value in self.scores.items()}


class MetricsLog:
    """Writes the reports of one run. Used by one thread, in the first process of a process group."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self._board_folder = folder / "tensorboard"
        self._board: SummaryWriter | None = None
        self._stage = ""
        self._warned = False

    def begin(self, stage: str, step: int, own_references: float | None = None) -> None:
        """Start a stage, or continue it after `step`: earlier reports of later steps become void."""
        self.close()
        self._stage = stage
        self._append({"kind": "begin", "stage": stage, "step": step, "own_references": own_references})
        if not isinstance(threading.excepthook, partial):
            threading.excepthook = partial(_on_thread_error, threading.excepthook)
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._board_folder / stage), purge_step=step + 1, **BOARD)
        except (OSError, ImportError) as error:
            self._give_up_board(error)

    def step(self, report: StepReport) -> None:
        self._write("step", report)

    def validation(self, report: ValidationReport) -> None:
        self._write("validation", report)

    def judged(self, report: JudgeReport) -> None:
        self._write("judged", report)

    def spoken(self, stage: str, step: int, sentences: Sequence[Spoken], rate: int) -> None:
        """Note the spoken sentences of an evaluation, and add their sound to TensorBoard."""
        rows = [{name: value for name, value in each._asdict().items() if name != "wave"} for each in sentences]
        self._append({"kind": "spoken", "stage": stage, "step": step, "sentences": rows})
        for number, each in enumerate(sentences):
            wave = np.clip(each.wave, -1, 1)[None]
            tag = f"spoken/{number}"
            self._draw(lambda board, tag=tag, wave=wave: board.add_audio(tag, wave, step, rate))  # type: ignore[misc]

    def image(self, tag: str, array: npt.NDArray[Any], step: int) -> None:
        """Show numbers [H, W] as a picture in TensorBoard, row 0 lowest; the page shows the newest of each tag."""
        pixels = colours(array)[::-1]
        self._draw(lambda board: board.add_image(tag, pixels, step, dataformats="HWC"))
        with contextlib.suppress(OSError):  # the page can do without
            folder = self.path.parent / SAMPLES_FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{tag.replace('/', '-')}.png").write_bytes(png(pixels))

    def code_usage(self, counts: npt.NDArray[Any], step: int) -> None:
        """Show a histogram of how often each code was used."""
        self._draw(lambda board: board.add_histogram("codes/uses", counts, step))

    def close(self) -> None:
        board, self._board = self._board, None
        if board is not None:
            with contextlib.suppress(OSError):  # the failed write has been reported
                board.close()

    def _write(self, kind: str, report: StepReport | ValidationReport | JudgeReport) -> None:
        if report.stage != self._stage:
            self.begin(report.stage, report.step - 1)
        if self._append({"kind": kind, **vars(report)}):  # if not, the disk is full for TensorBoard too
            self._draw(lambda board: _add_scalars(board, report.scalars(), report.step))

    def _append(self, record: Record) -> bool:
        line = json.dumps(without_nan({**record, "written_at": round(time.time(), 3)}), allow_nan=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab+") as file:
                if file.tell() > 0:
                    file.seek(-1, 2)
                    if file.read(1) != b"\n":  # a kill or a full disk cut the last line short
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
        self.close()

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s. Training continues; metrics and curves may be incomplete from here on.", what)


def _on_thread_error(before: Callable[[Any], object], error: threading.ExceptHookArgs) -> None:
    """Print the traceback of a thread, unless TensorBoard's writer failed: that is reported by the next write."""
    if not (type(error.thread).__module__.startswith("tensorboard") and issubclass(error.exc_type, OSError)):
        before(error)


def log_sound(folder: Path, stage: str, wave: npt.NDArray[Any], rate: int, step: int) -> None:
    """Add a spoken sample to the curves of a stage, if TensorBoard can be written."""
    with contextlib.suppress(OSError, ImportError):
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(folder / "tensorboard" / stage)) as board:
            board.add_audio("sample", np.clip(wave, -1, 1)[None], step, rate)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the valid reports, each with its "kind" (step, validation); numbers that were not finite are None.

    Reports that a continued or restarted stage made void are left out, and damaged lines too.
    """
    kept: _Kept = {}
    _add_lines(kept, path.read_bytes() if path.exists() else b"")
    return list(kept.values())


class MetricsTail:
    """Follows the metrics of a run: reads only the lines added since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._kept: _Kept = {}

    def read(self) -> list[dict[str, Any]]:
        """Return what `read_metrics` would, but of a long run only the validations and the latest steps."""
        try:
            with open(self._path, "rb") as file:
                if file.seek(0, 2) < self._offset:  # a new run has replaced the file
                    self._offset, self._kept = 0, {}
                file.seek(self._offset)
                added = file.read()
        except OSError:  # not written yet, or just being moved away
            return list(self._kept.values())
        complete = added[: added.rfind(b"\n") + 1]  # the rest is still being written
        self._offset += len(complete)
        _add_lines(self._kept, complete)
        if len(self._kept) > 2 * MOST_KEPT:
            recent = list(self._kept)[-MOST_KEPT:]
            old = [key for key in list(self._kept)[:-MOST_KEPT] if key[0] != "step"]
            self._kept = {key: self._kept[key] for key in [*old, *recent]}
        return list(self._kept.values())


_Kept = dict[tuple[str, str, int], dict[str, Any]]  # reports by kind, stage and step, in the order of writing


def _add_lines(kept: _Kept, text: bytes) -> None:
    for line in text.splitlines():
        try:
            record = json.loads(line)
            kind, stage, step = record["kind"], record["stage"], record["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if kind == "begin":
            for key in [key for key in kept if key[1] == stage and key[2] > step]:
                del kept[key]
        else:
            kept.pop((kind, stage, step), None)
            kept[kind, stage, step] = record


def colours(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return numbers [H, W] as colours [H, W, 3], from black (lowest) over violet and orange to pale yellow."""
    finite = array[np.isfinite(array)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    level = np.nan_to_num((array - low) / ((high - low) or 1.0), nan=0.0, posinf=1.0, neginf=0.0)
    stops = np.array([[0, 0, 4], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]])
    places = np.linspace(0, 1, len(stops))
    return np.stack([np.interp(level, places, stops[:, channel]) for channel in range(3)], -1).astype(np.uint8)


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return colours [H, W, 3] as a PNG file."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _add_scalars(board: SummaryWriter, scalars: Mapping[str, float], step: int) -> None:
    """Write all numbers of a report as one event, because `add_scalar` reopens its file for each."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
    board._get_file_writer().add_summary(Summary(value=values), step)  # type: ignore[no-untyped-call]


def without_nan(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(value, Mapping):
        return {name: without_nan(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class StageHistory:
    """The reports of one stage of a run, in the order of its steps."""

    name: str
    steps: list[StepReport] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Training time of the whole run up to each step report, without pauses."""
    validations: list[tuple[int, float]] = field(default_factory=list)  # step and total loss
    judged: list[tuple[int, Record]] = field(default_factory=list)  # step and scores
    spoken: list[tuple[int, Sequence[Any]]] = field(default_factory=list)  # step and sentences

    def column(self, name: str) -> Numbers:
        """Return one number of all step reports; `losses.total` for one inside a mapping."""
        name, _, inner = name.partition(".")
        values = [getattr(step, name) for step in self.steps]
        return numbers(value.get(inner) for value in values) if inner else numbers(values)

    def step_times(self) -> tuple[Numbers, Numbers]:
        """Return the time of every step in ms, and when it ended in seconds of the run (see `seconds`)."""
        ends, times = [np.zeros(0)], [np.zeros(0)]
        for step, at_s in zip(self.steps, self.seconds, strict=True):
            own = numbers(step.times_ms)
            ends.append(at_s - np.nansum(own) / 1000 + np.nancumsum(own) / 1000)
            times.append(own)
        return np.concatenate(ends), np.concatenate(times)

    @property
    def ring_names(self) -> list[str]:
        """The rings between the corpus and the trainer; codes to be cached leave through "keep"."""
        return list({name: None for step in self.steps for name in step.rings if name != "keep"})

    def readiness(self, ring: str) -> Numbers:
        """Return the share of a ring's slots that were ready, for each step report."""
        counts = [step.rings.get(ring, (math.nan, 0)) for step in self.steps]
        return numbers(ready / depth if depth else math.nan for ready, depth in counts)

    @property
    def best_validation(self) -> tuple[int, float] | None:
        known = [found for found in self.validations if math.isfinite(found[1])]
        return min(known, key=lambda found: found[1], default=None)


def stages_of(records: Iterable[Record]) -> list[StageHistory]:
    """Return the stages of a run in the order in which they began, from the records of its metrics."""
    stages: dict[str, StageHistory] = {}
    total_s = last_s = 0.0
    for record in records:
        stage = StageHistory(str(record.get("stage", "")))
        if record.get("kind") == "validation":
            stage = stages.setdefault(stage.name, stage)
            losses = record.get("losses")
            loss = losses.get("total") if isinstance(losses, Mapping) else None
            stage.validations.append((record["step"], number(loss)))
        elif record.get("kind") in ("judged", "spoken"):
            stage = stages.setdefault(stage.name, stage)
            scores, sentences = record.get("scores"), record.get("sentences")
            if isinstance(scores, Mapping):
                stage.judged.append((record["step"], scores))
            if isinstance(sentences, list):
                stage.spoken.append((record["step"], sentences))
        elif record.get("kind") == "step" and (report := step_report(record)) is not None:
            stage = stages.setdefault(stage.name, stage)
            if math.isfinite(report.elapsed_s):  # counts from the start of the stage, or from where it resumed
                begins = not stage.steps or report.elapsed_s < last_s
                total_s += report.elapsed_s - (0.0 if begins else last_s)
                last_s = report.elapsed_s
            stage.steps.append(report)
            stage.seconds.append(total_s)
    return list(stages.values())


_FROM_JSON: Mapping[str, Callable[[Any], Any]] = {
    "str": str,
    "int": lambda value: int(value or 0),
    "int | None": lambda value: None if value is None else int(value),
    "float": lambda value: number(value),
    "float | None": lambda value: None if value is None else float(value),
    "Sequence[float]": lambda value: [number(one) for one in value or ()],
    "Mapping[str, float]": lambda value: {name: number(one) for name, one in (value or {}).items()},
    "Mapping[str, tuple[int, int]]": lambda value: {
        name: (int(ready), int(depth)) for name, (ready, depth) in (value or {}).items()
    },
    "Mapping[str, tuple[float, float]]": lambda value: {
        name: (number(used), number(limit)) for name, (used, limit) in (value or {}).items()
    },
}
_FIELDS = {item.name: _FROM_JSON[str(item.type)] for item in fields(StepReport)}
"""How each field of a `StepReport` is read back, by its type; NaN for a number that was not finite."""


def step_report(record: Record) -> StepReport | None:
    """Return the report that was written as this record; None if it is damaged."""
    try:
        return StepReport(**{name: convert(record.get(name)) for name, convert in _FIELDS.items()})
    except (TypeError, ValueError, AttributeError):
        return None


def number(value: object) -> float:
    """Return a number read from JSON; NaN for anything else, and for numbers that are not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return math.nan
    return float(value) if math.isfinite(value) else math.nan


def numbers(values: Iterable[object]) -> Numbers:
    return np.array([number(value) for value in values], np.float64)


def settled(values: Sequence[float] | Numbers) -> float:
    """Return the median of the later half, after the warm-up; NaN if nothing is known."""
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    return float(np.median(finite[len(finite) // 2 :])) if len(finite) else math.nan


def short(value: float | None, unit: str = "") -> str:
    """Return a number with about three digits, and its unit; a dash if unknown."""
    if value is None or not math.isfinite(value):
        return "–"
    if value and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.1e}{unit}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    text = f"{value:,.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) + unit


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share as a percentage; a dash if unknown."""
    return "–" if share is None or not math.isfinite(share) else f"{100 * share:.{digits}f} %"


def duration(seconds: float | None) -> str:
    """Return 42 s, 12 min, 5 h 12 min or 2 d 5 h; a dash if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    seconds = max(seconds, 0.0)
    for unit_s, unit, smaller_s, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if seconds >= unit_s:
            return f"{seconds // unit_s:.0f} {unit} {seconds % unit_s // smaller_s:.0f} {smaller}"
    return f"{seconds // 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RUN_FILES)


def text_of(path: Path) -> str:
    """Return the text of a file; "" if there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one if it is missing or damaged."""
    try:
        found = json.loads(text_of(path) or "{}")
    except ValueError as error:
        _log.warning("Ignoring %s, which is damaged: %s", path, error)
        return {}
    return found if isinstance(found, dict) else {}


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one per line; damaged lines are skipped."""
    found = []
    for line in text_of(path).splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict)]
