"""The two modes of the pipeline in brief: `python -m unittest tests.test_intelligent_gpu_pipeline -v`; no GPU."""

from __future__ import annotations

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # unittest does not look here for the fixtures

from pipeline_fixtures import PLANS, SHORT, Corpus, assert_same, nothing_left_behind, read

from myxtts.config import DataSettings
from myxtts.devices import Gpu, Machine, announcements, make_plan


class Pipeline(unittest.TestCase):
    def test_the_mode_and_the_gpus_are_announced(self) -> None:
        machine = Machine([Gpu(0, "Card 0", 24000), Gpu(1, "Card 1", 48000)])
        two = DataSettings(data_gpu=0, model_gpu=1)
        for data, mode, model_gpu in (
            (DataSettings(), "Single-GPU Buffered", "cuda:0 (Card 0, 24000 MB)"),
            (two, "Multi-GPU", "cuda:1 (Card 1, 48000 MB)"),
        ):
            with self.subTest(mode):
                lines = announcements(make_plan(data, machine, {}), data, machine)
                self.assertEqual(lines[0], f"Intelligent GPU Pipeline: {mode} Mode")
                self.assertEqual(lines[1:3], ["Data GPU: cuda:0 (Card 0, 24000 MB)", f"Model GPU: {model_gpu}"])
                done = "Multi-GPU configuration completed successfully"
                self.assertEqual(done in lines, mode == "Multi-GPU")

    def test_both_modes_warm_up_deliver_the_same_batches_and_leave_nothing(self) -> None:
        found = []
        with tempfile.TemporaryDirectory() as folder:
            corpus = Corpus.make(Path(folder), SHORT)
            for plan in PLANS.values():
                with nothing_left_behind(), corpus.feed(plan, num_batches=6) as feed:
                    self.assertLess(feed.wait_until_warm(60), 60)
                    self.assertEqual(feed.readiness()["model"], (3, 3))
                    more = 5 if plan.mode == "dual" else 2
                    split = f"6 batches (3 on the host, 3 on cpu), and {more} being prepared"
                    self.assertTrue(feed.buffers().startswith(split), feed.buffers())
                    found.append(read(feed))
        self.assertEqual(len(found[0]), 6)
        assert_same(*found)


if __name__ == "__main__":
    unittest.main()
