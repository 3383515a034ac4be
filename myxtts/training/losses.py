"""What the recipes measure: sums that add up over micro-steps and processes, and the vocoder's adversarial losses.

A micro-batch divides its sums by the totals of the whole optimiser step, which the data role counts beforehand;
gradients then only need to be added. Pure functions of tensors: no network's weights, no optimiser, no device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from myxtts.model.discriminators import Judgement

LEAST = 1e-6
"""Smallest divisor: where nothing counts, sums are 0 and so is their mean."""


class Totals(NamedTuple):
    """What counts in one optimiser step, all micro-batches and processes together, each clip by its weight."""

    text_targets: Tensor
    """Text tokens and their STOP."""
    audio_targets: Tensor
    """Codes and their STOPs."""
    codes: Tensor
    frames: Tensor
    clips: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Totals:
        """The totals that came with a batch, float32 [5], safe to divide by."""
        return cls(*tensors["totals"].clamp_min(LEAST).unbind())


def mean_of(total: Tensor, count: Tensor) -> Tensor:
    """A mean to look at: without gradient, 0 where nothing was counted."""
    return total.detach() / count.clamp_min(LEAST)


def by_clip(values: Tensor) -> Tensor:
    """Mean over everything but the clips: [B, ...] to float32 [B]."""
    return values.float().flatten(1).mean(1)


def discrimination(real: Sequence[Judgement], fake: Sequence[Judgement]) -> Tensor:
    """Least squares of discriminators that should say 1 to real waves and 0 to generated ones, [B]."""
    distances = [
        by_clip((one.logits.float() - 1).square()) + by_clip(other.logits.float().square())
        for one, other in zip(real, fake, strict=True)
    ]
    return sum(distances[1:], distances[0])


def deception(fake: Sequence[Judgement]) -> Tensor:
    """Least squares of a generator whose waves should be taken for real, [B]."""
    distances = [by_clip((judged.logits.float() - 1).square()) for judged in fake]
    return sum(distances[1:], distances[0])


def feature_matching(real: Sequence[Judgement], fake: Sequence[Judgement]) -> Tensor:
    """How differently the hidden layers of the discriminators see both, [B]; real waves give no gradient."""
    distances = [
        by_clip((target.detach().float() - feature.float()).abs())
        for one, other in zip(real, fake, strict=True)
        for target, feature in zip(one.features, other.features, strict=True)
    ]
    return sum(distances[1:], distances[0])
