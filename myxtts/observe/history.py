"""The reports of a run read back for those who draw them: by stage, on one axis of time, thinned to what is seen.

Knows neither how anything is drawn nor what the numbers mean for the training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from myxtts.observe.metrics import StepReport

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
