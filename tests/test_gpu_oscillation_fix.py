"""Oscillation is told from steady work: `python tests/test_gpu_oscillation_fix.py`; needs no GPU.

Synthetic readings and spans of a GPU that is busy and idle in turns, then a short profile of the real pipeline.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # the package lies here if it is not installed
sys.path.insert(0, str(Path(__file__).parent))  # and the fixtures here

from conftest import SENTENCES, write_corpus
from training_fixtures import SMALL

from myxtts.data.batches import Gathered, Gatherer, HostBatch, Job
from myxtts.model.xtts import SIZES
from myxtts.observe.breakdown import ProfileData
from myxtts.observe.diagnosis import Diagnosis
from myxtts.observe.nvml import Reading
from myxtts.observe.trace import Span
from myxtts.run import prepare_corpus
from myxtts.settings import load
from myxtts.tools import dry_run
from myxtts.tools.profile import profile

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


class TheRealPipelineIsProfiled(unittest.TestCase):
    """A small network on the CPU."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.addCleanup(os.chdir, Path.cwd())
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        os.chdir(folder.name)
        torch.set_num_threads(1)
        self.enterContext(mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder.name}))
        self.enterContext(mock.patch.dict(SIZES, {"tiny": SMALL}))
        self.enterContext(mock.patch.object(dry_run, "WARM_UP_STEPS", 1))  # there is nothing to compile
        corpus = write_corpus(Path(folder.name) / "corpus", [text[:20] for text in SENTENCES[:4]], seconds=1.0)
        flags = {
            "data.train_data": str(corpus), "data.language": "en", "data.vocab_size": "256",
            "data.batch_size": "2", "data.max_mel_frames": "128", "data.max_text_length": "40",
            "data.num_workers": "1", "data.model_start_delay": "0", "data.val_fraction": "0",
        }  # fmt: skip
        self.loaded = load(None, flags)
        self.prepared = prepare_corpus(self.loaded.settings)

    def test_bursts_of_slow_batches_are_seen_as_uneven_steps(self) -> None:
        fill, count = Gatherer.fill, 0

        def bursts(gatherer: Gatherer, batch: HostBatch, job: Job) -> Gathered:
            nonlocal count
            count += 1
            if count % 6 == 0:
                time.sleep(0.4)
            return fill(gatherer, batch, job)

        with mock.patch.object(Gatherer, "fill", bursts):
            found = profile(self.loaded.settings, self.prepared, num_steps=12, stage="dvae")
        assert found.verdict is not None
        self.assertEqual(found.verdict.bound, "gather")
        self.assertGreater(found.verdict.step_cv, 0.3)
        self.assertIn("uneven-steps", codes(found.verdict))


if __name__ == "__main__":
    unittest.main()
