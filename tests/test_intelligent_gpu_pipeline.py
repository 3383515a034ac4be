"""The two modes of the pipeline in brief: `python -m unittest tests.test_intelligent_gpu_pipeline -v`; no GPU."""

from __future__ import annotations

import sys
import tempfile
import threading
import unittest
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # unittest does not look here for the fixtures

from pipeline_fixtures import CPU, PLANS, SHORT, Corpus, assert_same, only_stamps, read

from myxtts.config import DataSettings
from myxtts.data.batches import Cursor
from myxtts.devices import Gpu, Machine, announcements, make_plan
from myxtts.pipeline.feed import Depths
from myxtts.pipeline.frontend import GptFrontend

CARDS = Machine([Gpu(0, "Card 0", 24000), Gpu(1, "Card 1", 48000)], frozenset({(0, 1), (1, 0)}))


class ModesAreAnnounced(unittest.TestCase):
    def announced(self, machine: Machine, **settings: object) -> list[str]:
        data = DataSettings(**settings)
        return announcements(make_plan(data, machine, {}), data.pipeline_buffer_size, machine)

    def test_one_gpu_does_everything_unless_two_are_named(self) -> None:
        lines = self.announced(CARDS)
        self.assertEqual(lines[0], "Intelligent GPU Pipeline: Single-GPU Buffered Mode")
        self.assertIn("Data GPU: cuda:0 (Card 0, 24000 MB)", lines)
        self.assertIn("Model GPU: cuda:0 (Card 0, 24000 MB)", lines)
        self.assertIn("Buffer size: auto, up to 50 batches", lines)

    def test_two_named_gpus_share_the_work(self) -> None:
        lines = self.announced(CARDS, data_gpu=0, model_gpu=1, pipeline_buffer_size=100)
        self.assertEqual(lines[0], "Intelligent GPU Pipeline: Multi-GPU Mode")
        self.assertIn("Data GPU: cuda:0 (Card 0, 24000 MB)", lines)
        self.assertIn("Model GPU: cuda:1 (Card 1, 48000 MB)", lines)
        self.assertIn("Model placed on cuda:1 (Card 1, 48000 MB)", lines)
        self.assertIn("Buffer size: 100 batches", lines)

    def test_without_a_gpu_the_cpu_is_named(self) -> None:
        self.assertIn("(on the CPU: no GPU was found)", self.announced(Machine())[0])


class BatchesReachTheModel(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        cls.addClassCleanup(torch.set_num_threads, num_threads)
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.corpus = Corpus.make(Path(folder.name), SHORT)

    def test_training_starts_when_the_buffers_are_full(self) -> None:
        for mode, plan in PLANS.items():
            with self.subTest(mode=mode), self.corpus.feed(plan, GptFrontend, depths=Depths(3, 3, 1)) as feed:
                self.assertLess(feed.wait_until_warm(60), 60)
                self.assertEqual(feed.readiness()["model"], (3, 3))

    def test_training_starts_at_the_latest_after_the_delay(self) -> None:
        with self.corpus.feed(depths=Depths(500, 3, 1)) as feed:
            self.assertLess(feed.wait_until_warm(0.0), 1)
            self.assertLess(feed.readiness()["host"][0], 500)

    def test_both_modes_deliver_the_same_batches(self) -> None:
        found = []
        for plan in PLANS.values():
            with self.corpus.feed(plan, num_batches=6) as feed:
                found.append(read(feed))
                self.assertEqual(feed.cursor(), Cursor(1, 1))
        self.assertEqual(len(found[0]), 6)
        self.assertEqual(found[0][0].tensors["mel"].device, CPU)
        assert_same(*found)

    def test_a_closed_pipeline_leaves_no_thread(self) -> None:
        before = set(threading.enumerate())
        for plan in PLANS.values():
            with self.corpus.feed(plan, only_stamps) as feed:
                read(feed, 3)
                self.assertGreater(len(threading.enumerate()), len(before))
        self.assertLessEqual(set(threading.enumerate()), before)


if __name__ == "__main__":
    unittest.main()
