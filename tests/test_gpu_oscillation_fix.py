"""Oscillating and steady GPUs are distinguished: `python tests/test_gpu_oscillation_fix.py`; needs no GPU."""

from __future__ import annotations

import math
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the package lies here if it is not installed

from myxtts.observe.breakdown import ProfileData
from myxtts.observe.diagnosis import Diagnosis
from myxtts.observe.nvml import Reading
from myxtts.observe.trace import Span

STEP_US = 50_000
PERIOD_S = 4.0


def steps(gap_every: int = 0, gap_us: int = 0) -> list[Span]:
    """Four hundred steps; before each `gap_every`-th the model waits for a batch that is still gathered."""
    spans, at_us = [], 0
    for number in range(400):
        waits_us = gap_us if gap_every and number % gap_every == 0 else 0
        spans.append(Span("gather", "gather-0", at_us, max(waits_us, 1000), number))
        spans.append(Span("wait", "main", at_us, waits_us, number))
        at_us += waits_us
        spans.append(Span("train", "model stream", at_us, STEP_US - 5000, number, device=True))
        spans.append(Span("update", "model stream", at_us + STEP_US - 5000, 5000, number, device=True))
        at_us += STEP_US
    return spans


def readings(low: float) -> list[Reading]:
    """A minute of utilisation that goes from 95 % down to `low` and back."""
    half = (0.95 - low) / 2
    waves = (math.cos(2 * math.pi * number / 10 / PERIOD_S) for number in range(600))
    return [
        Reading(100_000 * number, 0, utilisation=0.95 - half + half * wave) for number, wave in enumerate(waves)
    ]


def codes(verdict: Diagnosis) -> set[str]:
    return {finding.code for finding in verdict.findings}


class OscillationIsDiagnosed(unittest.TestCase):
    def test_a_gpu_that_is_busy_and_idle_in_turns(self) -> None:
        spans = steps(gap_every=40, gap_us=int(PERIOD_S * 1e6) - 40 * STEP_US)
        verdict = Diagnosis(ProfileData(spans=spans, data_gpu=0, model_gpu=0))
        assert verdict.oscillation is not None
        self.assertAlmostEqual(verdict.oscillation.period_s, PERIOD_S, delta=0.5)
        self.assertGreater(verdict.oscillation.depth, 0.5)
        self.assertIn("oscillating", codes(verdict))
        self.assertEqual(verdict.bound, "gather")
        self.assertTrue(verdict.findings[0].fix)

    def test_the_drivers_readings_alone_show_it(self) -> None:
        verdict = Diagnosis(ProfileData(spans=steps(), readings=readings(0.1), data_gpu=0, model_gpu=0))
        assert verdict.oscillation is not None
        self.assertEqual(verdict.oscillation.source, "nvml")
        self.assertAlmostEqual(verdict.oscillation.period_s, PERIOD_S, delta=0.5)
        self.assertIn("oscillating", codes(verdict))

    def test_steady_work_is_no_oscillation(self) -> None:
        verdict = Diagnosis(ProfileData(spans=steps(), readings=readings(0.9), data_gpu=0, model_gpu=0))
        self.assertIsNone(verdict.oscillation)
        self.assertNotIn("oscillating", codes(verdict))


if __name__ == "__main__":
    unittest.main()
