"""Placement of dual-GPU runs: `python -m unittest tests.test_dual_gpu_device_placement -v`; needs no GPU."""

from __future__ import annotations

import unittest

import torch

from myxtts.config import DataSettings
from myxtts.devices import Gpu, Machine, Plan, announcements, make_plan
from myxtts.errors import ConfigError


def plan_for(data_gpu: int | None, model_gpu: int | None, *, num_gpus: int) -> Plan:
    machine = Machine([Gpu(index, f"Card {index}", 24000) for index in range(num_gpus)])
    return make_plan(DataSettings(data_gpu=data_gpu, model_gpu=model_gpu), machine, {})


class RolesHaveTheirDevices(unittest.TestCase):
    def test_every_pair_of_gpus_can_be_used_in_either_order(self) -> None:
        for data_gpu, model_gpu in ((0, 1), (1, 0), (2, 3), (3, 0)):
            with self.subTest(data_gpu=data_gpu, model_gpu=model_gpu):
                plan = plan_for(data_gpu, model_gpu, num_gpus=4)
                self.assertEqual(plan.mode, "dual")
                self.assertEqual(plan.data, torch.device("cuda", data_gpu))
                self.assertEqual(plan.model, torch.device("cuda", model_gpu))

    def test_without_indices_both_roles_share_one_gpu_even_if_there_are_two(self) -> None:
        plan = plan_for(None, None, num_gpus=2)
        self.assertEqual((plan.mode, plan.data, plan.model), ("buffered", plan.model, torch.device("cuda", 0)))

    def test_the_placement_of_the_model_is_announced(self) -> None:
        lines = announcements(plan_for(0, 1, num_gpus=2), 50, Machine([Gpu(1, "Card 1", 24000)]))
        self.assertEqual(lines[0], "Intelligent GPU Pipeline: Multi-GPU Mode")
        self.assertIn("Model placed on cuda:1 (Card 1, 24000 MB)", lines)


class WrongIndicesStopTheRun(unittest.TestCase):
    def assert_stops(self, data_gpu: int | None, model_gpu: int | None, *, num_gpus: int, saying: str) -> None:
        with self.assertRaisesRegex(ConfigError, saying):
            plan_for(data_gpu, model_gpu, num_gpus=num_gpus)

    def test_the_same_index_twice(self) -> None:
        self.assert_stops(1, 1, num_gpus=2, saying="both 1; .*0: Card 0.*1: Card 1")

    def test_an_index_that_is_not_on_the_machine(self) -> None:
        self.assert_stops(
            0, 2, num_gpus=2, saying="no GPU 2.*0: Card 0.*1: Card 1.*drop --data-gpu and --model-gpu"
        )

    def test_only_one_of_the_two_indices(self) -> None:
        self.assert_stops(0, None, num_gpus=2, saying="--data-gpu is given without --model-gpu")
        self.assert_stops(None, 1, num_gpus=2, saying="--model-gpu is given without --data-gpu")

    def test_fewer_than_two_gpus(self) -> None:
        self.assert_stops(0, 1, num_gpus=1, saying="Multi-GPU requires at least 2 GPUs.*0: Card 0")
        self.assert_stops(0, 1, num_gpus=0, saying="Multi-GPU requires at least 2 GPUs.*none")


if __name__ == "__main__":
    unittest.main()
