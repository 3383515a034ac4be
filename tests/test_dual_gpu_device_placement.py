"""Placement of dual-GPU runs: `python -m unittest tests.test_dual_gpu_device_placement -v`; needs no GPU."""

from __future__ import annotations

import unittest

import torch

from myxtts.config import DataSettings
from myxtts.devices import Gpu, Machine, Plan, make_plan
from myxtts.errors import ConfigError


def plan_for(data_gpu: int | None, model_gpu: int | None, num_gpus: int) -> Plan:
    machine = Machine([Gpu(index, f"Card {index}", 24000) for index in range(num_gpus)])
    return make_plan(DataSettings(data_gpu=data_gpu, model_gpu=model_gpu), machine, {})


class Placement(unittest.TestCase):
    def test_every_pair_of_gpus_can_be_used_in_either_order(self) -> None:
        for data_gpu, model_gpu in ((0, 1), (1, 0), (2, 3), (3, 0)):
            with self.subTest(data_gpu=data_gpu, model_gpu=model_gpu):
                expected = Plan(torch.device("cuda", data_gpu), torch.device("cuda", model_gpu), "dual")
                self.assertEqual(plan_for(data_gpu, model_gpu, num_gpus=4), expected)

    def test_wrong_indices_stop_the_run(self) -> None:
        for data_gpu, model_gpu, num_gpus, message in (
            (1, 1, 2, "both 1. .*0: Card 0.*1: Card 1.*drop"),
            (0, 2, 2, "no GPU 2.*0: Card 0.*1: Card 1.*drop --data-gpu and --model-gpu"),
            (0, None, 2, "--data-gpu is given without --model-gpu.*0: Card 0.*drop --data-gpu"),
            (0, 1, 1, "Multi-GPU requires at least 2 GPUs.*0: Card 0"),
        ):
            with self.subTest(message), self.assertRaisesRegex(ConfigError, message):
                plan_for(data_gpu, model_gpu, num_gpus)


if __name__ == "__main__":
    unittest.main()
