"""What evidence amounts to, before anybody judges it: all measures of a verdict, computed once."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from myxtts.observe.division import PAUSES, UNKNOWN_STAGE, Division, divide
from myxtts.observe.evidence import (
    ALLOCATED_COUNTER,
    MODEL_STAGES,
    RECOMPILED_COUNTER,
    Evidence,
    RingState,
    StageTime,
    end_us,
    ring_states,
    stage_times,
    step_times,
    utilisations,
    warm,
)
from myxtts.observe.nvml import Reading
from myxtts.observe.regularity import (
    Oscillation,
    Variation,
    busy_cycle,
    growth_mb,
    utilisation_cycle,
    variation,
)
from myxtts.observe.steps import StepTime, Summary

WAITED = "waited for "
LEAST_LOSS = 0.05
"""Share of the time that must be lost to something before it, and not the training itself, is the limit."""


@dataclass(frozen=True)
class Facts:
    """The measures of one verdict."""

    evidence: Evidence
    division: Division
    stages: dict[str, StageTime]
    rings: dict[str, RingState]
    steps: list[StepTime]
    variation: Variation
    oscillation: Oscillation | None
    recompilations: int
    growth_mb: dict[str, float]
    """By role, over the steps that count; empty when nothing grew."""
    utilisation: dict[int, float]
    """By GPU, as the driver tells it."""
    flops_share: float | None
    """Of what a large matrix product reaches on this GPU."""
    headspace: float | None
    """Speed with a perfect feed as a multiple of the present one."""
    bound: str
    """What decides the speed: a data stage, `host`, a pause, or `train`; empty when nothing was measured."""

    @property
    def is_measured(self) -> bool:
        """Whether there was anything to look at."""
        return bool(self.division.shares)

    @property
    def batch_ms(self) -> float:
        """Mean time between two batches, pauses left out."""
        (start, end), count = self.division.window, self.division.num_batches
        return (end - start) / 1000 * (1 - self.division.shares["other"]) / count if count else 0.0

    @property
    def train_ms(self) -> float:
        """What training on a batch takes without any wait for it."""
        (start, end), count = self.division.window, self.division.num_batches
        busy = self.division.shares["compute"] + self.division.shares["host"]
        return (end - start) / 1000 * busy / count if count else 0.0

    @property
    def work_ms(self) -> float:
        """What the model lane does for a step as a rule: without the gaps, and unmoved by single long steps."""
        start, work_us = self.division.window[0], defaultdict[int, int](int)
        for span in self.evidence.spans:
            if span.name in MODEL_STAGES and span.start_us >= start:
                work_us[span.batch] += span.duration_us
        return _without_gaps_ms(self.steps) if not work_us else median(work_us.values()) / 1000

    @property
    def work_alone_ms(self) -> float:
        """The same with one batch replayed; 0 when that was not measured."""
        return _without_gaps_ms(self.evidence.replayed)

    def gain_without(self, stage: str, period_ms: float = 0.0) -> float:
        """Speed if the model never waited for a stage, or one with such a period, as far as the others let it."""
        others = [time.period_ms for name, time in self.stages.items() if name not in (stage, *MODEL_STAGES)]
        slowest_ms = max([*others, self.train_ms, period_ms])
        gain = 1 / max(1 - self.division.waits.get(stage, 0.0), 0.01)
        gain = min(gain, self.batch_ms / slowest_ms) if slowest_ms else gain
        if self.evidence.replayed and self.headspace is not None:
            gain = min(gain, self.headspace)
        return max(gain, 1.0)


def _without_gaps_ms(steps: Sequence[StepTime]) -> float:
    return median([step.step_ms - step.gap_ms for step in steps] or [0.0])


def establish(evidence: Evidence) -> Facts:
    """All measures of this evidence."""
    division, steps = divide(evidence), step_times(evidence)
    recompilations, compiled_at = _recompiled(evidence, division)
    recompilations = recompilations if evidence.recompilations is None else evidence.recompilations
    varied = variation(steps, _reasons(evidence, division, compiled_at, recompilations))
    return Facts(
        evidence=evidence,
        division=division,
        stages=stage_times(evidence.spans, division.window),
        rings=ring_states(evidence, division.window),
        steps=steps,
        variation=varied,
        oscillation=_oscillation(evidence, division, steps),
        recompilations=recompilations,
        growth_mb=_growth(evidence, division),
        utilisation=utilisations(_inside(evidence, division)),
        flops_share=_flops_share(evidence, steps),
        headspace=_headspace(evidence, division, steps, varied),
        bound=_bound(division),
    )


def _bound(division: Division) -> str:
    if not division.shares:
        return ""
    slowest = max(division.waits, key=lambda stage: division.waits[stage], default=UNKNOWN_STAGE)
    lost = {slowest: division.fed, "host": division.shares["host"]}
    lost |= dict.fromkeys(list(division.pauses_ms)[:1], division.shares["other"])
    worst = max(lost, key=lambda name: lost[name])
    return worst if lost[worst] >= LEAST_LOSS else "train"


def _recompiled(evidence: Evidence, division: Division) -> tuple[int, set[int]]:
    """How many graphs were compiled inside the window, and the steps around those moments."""
    ends = sorted((end_us(span), span.batch) for span in evidence.spans if span.name == "update")
    samples = [sample for sample in evidence.counters if sample.name == RECOMPILED_COUNTER]
    count, around = 0, set[int]()
    for before, after in pairwise(samples):
        if after.value > before.value and division.window[0] < after.at_us <= division.window[1]:
            count += int(after.value - before.value)
            place = bisect_right(ends, (after.at_us, -1))  # on the CPU the step has ended, on a GPU it has not
            around |= {step for _, step in ends[max(place - 1, 0) : place + 1]}
    return count, around


def _reasons(
    evidence: Evidence, division: Division, compiled_at: set[int], recompilations: int
) -> Callable[[StepTime, float], str]:
    """Explains why a step took long."""
    training = evidence.settings.training

    def reason_of(step: StepTime, median_ms: float) -> str:
        most_ms = (step.step_ms - median_ms) / 2
        stage, waited_ms = division.waited_for.get(step.step, ("", 0.0))
        if step.step in compiled_at:
            return "recompilation"
        if waited_ms > most_ms:
            return f"{WAITED}{stage}"
        if step.step > 0 and any(step.step % getattr(training, setting) == 0 for setting in PAUSES.values()):
            return "saving or validation"
        if recompilations and not compiled_at:
            return "recompilation"
        return "the host was late" if step.gap_ms > most_ms else "unexplained"

    return reason_of


def _oscillation(evidence: Evidence, division: Division, steps: list[StepTime]) -> Oscillation | None:
    busy = [
        (span.start_us, end_us(span))
        for span in evidence.spans
        if span.name in MODEL_STAGES or span.name in PAUSES
    ]
    found = busy_cycle(busy, division.window, Summary.of(steps).median_ms)
    return found or utilisation_cycle([r for r in _inside(evidence, division) if r.gpu == evidence.model_gpu])


def _growth(evidence: Evidence, division: Division) -> dict[str, float]:
    """From the samples of the allocator or, without any, from what the driver says is used."""
    used: defaultdict[str, list[float]] = defaultdict(list)
    for name, at_us, value in evidence.counters:
        if name.endswith(ALLOCATED_COUNTER) and division.window[0] <= at_us <= division.window[1]:
            used[name.removesuffix(ALLOCATED_COUNTER)].append(value)
    if not used:
        roles = {evidence.data_gpu: "data", evidence.model_gpu: "model" if evidence.is_dual else "gpu"}
        for reading in _inside(evidence, division):
            if reading.memory_used_mb is not None and reading.gpu in roles:
                used[roles[reading.gpu]].append(reading.memory_used_mb)
    return {role: grown for role, values in used.items() if (grown := growth_mb(values))}


def _inside(evidence: Evidence, division: Division) -> list[Reading]:
    start, end = division.window
    return [reading for reading in evidence.readings if start == end or start <= reading.at_us <= end]


def _flops_share(evidence: Evidence, steps: list[StepTime]) -> float | None:
    step_ms = Summary.of(steps).mean_ms
    if evidence.flops_per_step is None or not evidence.peak_flops or not step_ms:
        return None
    return evidence.flops_per_step / (step_ms / 1000) / evidence.peak_flops


def _headspace(evidence: Evidence, division: Division, steps: list[StepTime], varied: Variation) -> float | None:
    """Measured by replaying, or else what the waits amount to; steps late for another reason are left out."""
    others = {found.step for found in varied.outliers if not found.reason.startswith(WAITED)}
    real = Summary.of(step for step in steps if step.step not in others)
    replayed = Summary.of(warm(evidence.replayed, evidence.warmup_steps))
    unusual = set(replayed.outliers)
    replayed = Summary.of(step for step in warm(evidence.replayed, evidence.warmup_steps) if step not in unusual)
    if replayed.mean_ms:
        return max(real.mean_ms / replayed.mean_ms, 1.0)
    return 1 / max(1 - division.fed, 0.01) if division.shares else None
