"""How evenly training goes: cycles of busy and idle, steps that take longer than others, memory that grows.

Pure arithmetic over series; knows neither where they come from nor what to do about what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from myxtts.observe.evidence import Interval, merged
from myxtts.observe.nvml import Reading
from myxtts.observe.steps import StepTime, Summary

LEAST_DEPTH, LEAST_CORRELATION = 0.3, 0.4
"""Of a cycle that is worth a word: between busy and idle, and of the series with itself one period later."""
FEWEST_SAMPLES, FEWEST_CYCLES = 16, 3
GROWTH_SHARE, GROWTH_MB = 0.02, 16.0
"""Memory that grew by less, in either measure, did not grow."""

Series = npt.NDArray[np.float64]


class Oscillation(NamedTuple):
    """A cycle of busy and idle."""

    period_s: float
    depth: float
    """Between its busy and its idle parts; 1 is from fully busy to fully idle."""
    source: str
    """`spans`, which are exact, or `nvml`, which sees only cycles slower than a second or so."""


class Outlier(NamedTuple):
    """A step that took more than twice the median, and why."""

    step: int
    step_ms: float
    reason: str


@dataclass(frozen=True)
class Variation:
    """How step times vary."""

    cv: float
    steady_cv: float
    """Without the outliers."""
    outliers: list[Outlier]

    def excess(self, reasons: Sequence[str], steps: Sequence[StepTime]) -> float:
        """Share of the time of these steps by which outliers with such reasons exceeded the median."""
        summary = Summary.of(steps)
        excess_ms = sum(found.step_ms - summary.median_ms for found in self.outliers if found.reason in reasons)
        return excess_ms / (summary.mean_ms * summary.count) if summary.count and summary.mean_ms else 0.0


def busy_cycle(busy: Sequence[Interval], window: Interval, step_ms: float) -> Oscillation | None:
    """The cycle in the work of a lane, if it has one that is longer than some steps."""
    bin_us = max(2000 * step_ms, 1.0)  # two steps: what repeats within a step is no cycle of the pipeline
    num_bins = int((window[1] - window[0]) / bin_us)
    union = merged(busy)
    if num_bins < FEWEST_SAMPLES or not union:
        return None
    edges = window[0] + bin_us * np.arange(num_bins + 1)
    times = np.array(union, dtype=np.float64).ravel()
    lengths = np.diff(np.array(union, dtype=np.float64), axis=1).ravel()
    done = np.repeat(np.concatenate([[0.0], np.cumsum(lengths)]), 2)[1:-1]
    shares = np.diff(np.interp(edges, times, done)) / bin_us
    return _cycle(shares, bin_us / 1e6, "spans")


def utilisation_cycle(readings: Sequence[Reading]) -> Oscillation | None:
    """The cycle in what the driver calls the utilisation of one GPU."""
    told = [(reading.at_us, reading.utilisation) for reading in readings if reading.utilisation is not None]
    if len(told) < FEWEST_SAMPLES:
        return None
    period_us = (told[-1][0] - told[0][0]) / (len(told) - 1)
    return _cycle(np.array([share for _, share in told], dtype=np.float64), period_us / 1e6, "nvml")


def variation(steps: Sequence[StepTime], reason_of: Callable[[StepTime, float], str]) -> Variation:
    """How these steps vary; `reason_of` explains an outlier, given the median in ms."""
    summary = Summary.of(steps)
    outliers = [Outlier(step.step, step.step_ms, reason_of(step, summary.median_ms)) for step in summary.outliers]
    unusual = {step.step for step in summary.outliers}
    steady = Summary.of(step for step in steps if step.step not in unusual)
    return Variation(summary.cv, steady.cv, outliers)


def growth_mb(used_mb: Sequence[float]) -> float:
    """How much memory grew over these samples; 0 unless it did so steadily, for one jump is no leak."""
    if len(used_mb) < FEWEST_SAMPLES:
        return 0.0
    quarter = len(used_mb) // 4
    quarters = [float(np.median(used_mb[part * quarter : (part + 1) * quarter])) for part in range(4)]
    risen = quarters[-1] - quarters[0]
    steadily = all(later > earlier for earlier, later in pairwise(quarters))
    return risen * 4 / 3 if steadily and risen > max(GROWTH_MB, GROWTH_SHARE * quarters[0]) else 0.0


def _cycle(shares: Series, sample_s: float, source: str) -> Oscillation | None:
    """The period after which a series resembles itself most; autocorrelation by FFT."""
    count = len(shares)
    low, high = np.quantile(shares, [0.1, 0.9])
    if high - low < LEAST_DEPTH:
        return None
    centred = shares - shares.mean()
    power = np.abs(np.fft.rfft(centred, 2 * count)) ** 2
    likeness = np.fft.irfft(power)[:count] * count / (count - np.arange(count))
    likeness /= likeness[0]
    below = np.flatnonzero(likeness < 0)
    longest = count // FEWEST_CYCLES
    if not len(below) or below[0] >= longest:
        return None
    lags = np.arange(below[0], longest + 1)
    best = float(likeness[lags].max())
    if best < LEAST_CORRELATION:
        return None
    peaks = (lag for lag in lags if likeness[lag] >= 0.8 * best and likeness[lag] >= likeness[lag + 1])
    return Oscillation(float(next(peaks, lags[-1])) * sample_s, float(high - low), source)
