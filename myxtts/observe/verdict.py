"""The verdict on some training steps: one sentence, where the time went, what bounds, a grade, and what to change.

`judge` is pure: spans, counters, step times, readings and replayed steps in, a `Verdict` out, which others show.
docs/profiling.md says how to read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from myxtts.observe.advice import CODES as CODES
from myxtts.observe.advice import advise
from myxtts.observe.evidence import DATA_STAGES, GPU_STAGES, Evidence, RingState, StageTime, busy_share
from myxtts.observe.facts import LEAST_LOSS, Facts, establish
from myxtts.observe.findings import Finding
from myxtts.observe.regularity import Oscillation, Outlier
from myxtts.observe.remedies import percent

NO_HEADSPACE = 1.02
"""A perfect feed that gains less is no news."""


class _Bar(NamedTuple):
    """What a grade asks for."""

    grade: str
    data_busy: float
    model_busy: float
    cv: float
    speed: float = 0.0
    """Of two GPUs, as a multiple of one."""


_BARS = (
    _Bar("excellent", 0.6, 0.9, 0.2, speed=2.0),
    _Bar("good", 0.5, 0.8, 0.3),
    _Bar("minimum", 0.4, 0.7, 0.4),
)
_BELOW = "below minimum"


@dataclass(frozen=True)
class Verdict:
    """What was concluded. All shares are of the time of the steps that count, and between 0 and 1."""

    sentence: str
    grade: str
    """excellent, good, minimum or below minimum; empty on the CPU and where nothing was measured."""
    grade_notes: list[str]
    """What kept it from the next grade, and what did not count."""
    bound: str
    """What decides the speed: a data stage, `train`, `host`, or a pause (`save`, `validate`)."""
    shares: Mapping[str, float]
    """compute, wait, copy, host, other: they add to 1."""
    waits: Mapping[str, float]
    """`wait` and `copy` by the stage that the model waited for."""
    headspace: float | None
    """Speed with a perfect feed, as a multiple of the present one."""
    headspace_measured: bool
    """By replaying a batch, on a CPU as far as it can be explained; else it is reckoned from the waits."""
    stages: Mapping[str, StageTime]
    rings: Mapping[str, RingState]
    step_cv: float
    steady_cv: float
    """Without the outliers."""
    outliers: list[Outlier]
    oscillation: Oscillation | None
    recompilations: int
    growth_mb: Mapping[str, float]
    """By role; empty when nothing grew."""
    utilisation: Mapping[int, float]
    """By GPU, as the driver tells it."""
    flops_share: float | None
    findings: list[Finding]
    """The dearest cause first, then symptoms, then information."""

    def to_json(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        record = dict(vars(self))
        for name in ("stages", "rings"):
            record[name] = {key: value._asdict() for key, value in record[name].items()}
        record["outliers"] = [outlier._asdict() for outlier in self.outliers]
        record["oscillation"] = self.oscillation._asdict() if self.oscillation else None
        record["utilisation"] = {str(gpu): share for gpu, share in self.utilisation.items()}
        record["findings"] = [found.to_json() for found in self.findings]
        return record


def judge(evidence: Evidence) -> Verdict:
    """The verdict on this evidence."""
    facts = establish(evidence)
    findings = advise(facts)
    grade, notes = _grade(facts)
    return Verdict(
        sentence=_sentence(facts, findings),
        grade=grade,
        grade_notes=notes,
        bound=facts.bound,
        shares=facts.division.shares,
        waits=facts.division.waits,
        headspace=facts.headspace,
        headspace_measured=bool(evidence.replayed),
        stages=facts.stages,
        rings=facts.rings,
        step_cv=facts.variation.cv,
        steady_cv=facts.variation.steady_cv,
        outliers=facts.variation.outliers,
        oscillation=facts.oscillation,
        recompilations=facts.recompilations,
        growth_mb=facts.growth_mb,
        utilisation=facts.utilisation,
        flops_share=facts.flops_share,
        findings=findings,
    )


def _sentence(facts: Facts, findings: list[Finding]) -> str:
    if not facts.is_measured:
        return "Nothing was measured: no step was trained."
    shares, bound = facts.division.shares, facts.bound
    headspace = facts.headspace if facts.headspace is not None else 1.0
    if bound == "train" and facts.competition is not None and headspace >= 1 + LEAST_LOSS:
        return f"{_competing(facts, headspace)}{_first_change(findings)}."
    if bound == "train":
        text = f"Training itself is the limit: the model computes {percent(shares['compute'])} of the time"
    elif bound == "host":
        text = f"The program is the limit: the model is idle {percent(shares['host'])} of the time, though fed"
    elif bound in ("save", "validate"):
        text = f"Training stands still {percent(shares['other'])} of the time to {bound}"
    else:
        whom = bound if bound in DATA_STAGES else "the feed"
        text = (
            f"Training is bound by {whom}: the model waits for batches {percent(facts.division.fed)} of the time"
        )
    if headspace >= NO_HEADSPACE:
        text += f", and a perfect feed would be {headspace:.{1 if headspace >= 1.1 else 2}f}× faster"
    elif bound == "train":
        text += ", and a perfect feed would gain nothing"
    return f"{text}{_first_change(findings)}."


def _competing(facts: Facts, headspace: float) -> str:
    """What to say of a model that does not wait, and is faster with nothing beside it."""
    shared = "use the same GPU" if facts.evidence.model_gpu is not None else "use the same processor"
    busy = percent(facts.division.shares["compute"])
    return (
        f"Training is slower beside the pipeline than alone: the model computes {busy} of the time and does not "
        f"wait for batches, but both {shared}, and alone it would be {headspace:.1f}× as fast"
    )


def _first_change(findings: list[Finding]) -> str:
    first = next((found for found in findings if found.level == "warn"), None)
    if first is None or not first.setting or first.value is None:
        return ""
    return f"; set {first.setting} to {json.dumps(first.value)}"


def _grade(facts: Facts) -> tuple[str, list[str]]:
    """The order's grades; where the recipe gives the data GPU little to do, that counts against nobody."""
    evidence = facts.evidence
    if evidence.model_gpu is None or not facts.is_measured:
        return "", ["grades are for GPUs"] if facts.is_measured else []
    if evidence.ran_out_of_memory:
        return _BELOW, ["the GPU ran out of memory"]
    notes: list[str] = []
    data_busy: float | None = None
    if evidence.is_dual:
        data_busy = busy_share(evidence.spans, GPU_STAGES, facts.division.window)
        if data_busy <= _BARS[0].data_busy and facts.division.fed < LEAST_LOSS:
            busy = f"the recipe gives the data GPU little to do ({percent(data_busy)} busy)"
            notes.append(f"{busy}, and the model does not wait for it: this does not count")
            data_busy = None
        if evidence.baseline is None:
            notes.append("the speed on one GPU was not measured and does not count")
    grade = _BELOW
    for bar in reversed(_BARS):
        lacks = _lacks(facts, bar, data_busy)
        if lacks:
            notes += [f"not {bar.grade}: {lack}" for lack in lacks]
            break
        grade = bar.grade
    return grade, notes


def _lacks(facts: Facts, bar: _Bar, data_busy: float | None) -> list[str]:
    """What a grade asks for and the run does not reach; a `data_busy` of None does not count."""
    shares, speed = facts.division.shares, facts.evidence.baseline
    model_busy = shares["compute"] / max(1 - shares["other"], 0.01)
    lacks = []
    if model_busy <= bar.model_busy:
        lacks.append(
            f"the model GPU is busy {percent(model_busy)} of the time, not over {percent(bar.model_busy)}"
        )
    if data_busy is not None and data_busy <= bar.data_busy:
        lacks.append(f"the data GPU is busy {percent(data_busy)} of the time, not over {percent(bar.data_busy)}")
    if facts.variation.cv >= bar.cv:
        lacks.append(f"step times vary by {percent(facts.variation.cv)}, not under {percent(bar.cv)}")
    if facts.evidence.is_dual and speed is not None and speed < bar.speed:
        lacks.append(f"the run is {speed:.1f}× as fast as on one GPU, not {bar.speed:.0f}×")
    return lacks
