"""What evidence amounts to, before anybody judges it: all measures of a verdict, computed once."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from myxtts.observe.division import PAUSES, UNKNOWN_STAGE, Division, divide
from myxtts.observe.evidence import (
    ALLOCATED_COUNTER,
    DATA_STAGES,
    GPU_STAGES,
    MODEL_STAGES,
    RECOMPILED_COUNTER,
    Evidence,
    RingState,
    StageTime,
    busy_share,
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
FEWEST_STEPS = 10
"""Steps on either side that tell whether training is slower beside the pipeline than alone."""
MOST_TAKEN = 2.0
"""A stage can hold up training while it works, and a little longer: caches, clocks. What is lost beyond this
multiple of that time was taken by something else."""


class Competition(NamedTuple):
    """What the pipeline takes from the training step on a device that they share."""

    longer: float
    """By how much a step beside it exceeds one alone, as a share of the latter."""
    cost: float
    """Share of the time."""


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
    competition: Competition | None
    """None when there is none, or when it cannot be told from the noise of the machine."""
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

    def gain_without(self, stage: str, period_ms: float = 0.0) -> float:
        """Speed if the model never waited for a stage, or one with such a period, as far as the others let it."""
        others = [time.period_ms for name, time in self.stages.items() if name not in (stage, *MODEL_STAGES)]
        slowest_ms = max([*others, self.train_ms, period_ms])
        gain = 1 / max(1 - self.division.waits.get(stage, 0.0), 0.01)
        gain = min(gain, self.batch_ms / slowest_ms) if slowest_ms else gain
        if self.evidence.replayed and self.headspace is not None:
            gain = min(gain, self.headspace)
        return max(gain, 1.0)


def establish(evidence: Evidence) -> Facts:
    """All measures of this evidence."""
    division, steps = divide(evidence), step_times(evidence)
    recompilations, compiled_at = _recompiled(evidence, division)
    recompilations = recompilations if evidence.recompilations is None else evidence.recompilations
    varied = variation(steps, _reasons(evidence, division, compiled_at, recompilations))
    competition = _competition(evidence, division, steps)
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
        competition=competition,
        headspace=_headspace(evidence, division, steps, varied, competition),
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


def _competition(evidence: Evidence, division: Division, steps: list[StepTime]) -> Competition | None:
    """What the medians lose, gaps left out, if chance and the noise of the machine do not explain it.

    All but the fastest quarter of the steps beside the pipeline must take longer than all but the slowest quarter
    of those alone, and the loss must not exceed what the stages on their device can have taken.
    """
    beside = _work_ms(evidence, division, steps)
    alone = _without_gaps_ms(warm(evidence.replayed, evidence.warmup_steps))
    if evidence.is_dual or min(len(beside), len(alone)) < FEWEST_STEPS:
        return None
    if np.quantile(beside, 0.25) <= np.quantile(alone, 0.75):
        return None
    found = Competition(
        longer=median(beside) / max(median(alone), 1e-9) - 1,
        cost=division.busy * (1 - median(alone) / median(beside)),
    )
    names = GPU_STAGES if evidence.model_gpu is not None else DATA_STAGES
    most = MOST_TAKEN * busy_share(evidence.spans, names, division.window)
    return found if LEAST_LOSS <= found.cost <= most else None


def _work_ms(evidence: Evidence, division: Division, steps: list[StepTime]) -> list[float]:
    """What the model lane does for each step, without the gaps."""
    work_us: defaultdict[int, int] = defaultdict(int)
    for span in evidence.spans:
        if span.name in MODEL_STAGES and span.start_us >= division.window[0]:
            work_us[span.batch] += span.duration_us
    return [length_us / 1000 for length_us in work_us.values()] or _without_gaps_ms(steps)


def _without_gaps_ms(steps: Sequence[StepTime]) -> list[float]:
    return [step.step_ms - step.gap_ms for step in steps]


def _headspace(
    evidence: Evidence,
    division: Division,
    steps: list[StepTime],
    varied: Variation,
    competition: Competition | None,
) -> float | None:
    """Measured by replaying, or else what the waits amount to; steps late for another reason are left out.

    On a CPU, which other programs use too, steps that were faster alone for no reason that shows are noise.
    """
    others = {found.step for found in varied.outliers if not found.reason.startswith(WAITED)}
    real = Summary.of(step for step in steps if step.step not in others)
    replayed = Summary.of(warm(evidence.replayed, evidence.warmup_steps))
    unusual = set(replayed.outliers)
    replayed = Summary.of(step for step in warm(evidence.replayed, evidence.warmup_steps) if step not in unusual)
    if replayed.mean_ms and evidence.model_gpu is not None:
        return max(real.mean_ms / replayed.mean_ms, 1.0)
    if replayed.mean_ms:
        lost = division.fed + division.shares.get("host", 0.0) + (competition.cost if competition else 0.0)
        worked = 1 - division.shares.get("other", 0.0)
        most = 1 / max(1 - lost / max(worked, 0.01), 0.01)
        return max(min(real.mean_ms / replayed.mean_ms, most), 1.0)
    return 1 / max(1 - division.fed, 0.01) if division.shares else None
