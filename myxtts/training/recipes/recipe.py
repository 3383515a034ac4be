"""What the training loop knows of a stage.

A recipe's trainable parameters are what the optimiser gets; frozen networks have done their work in the data role.
`forward` reads tensors on its own device and never waits for it: it can be wrapped in DDP, compiled to one graph
and captured. A recipe does not know where batches come from, when a step is taken or what is kept of a run.

Every recipe reads, besides its own tensors: `weights` float32 [B], 0 for clips that only fill a batch up and
change nothing, and `totals` float32 [5], see `losses.Totals`. "total" is divided by these totals, so that the
gradients of all micro-steps of a step, added, are those of one large batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from myxtts.data.layout import Sizes

Tensors = Mapping[str, Tensor]


class Recipe(nn.Module, ABC):
    """What is trained and how its loss is measured. Under DDP only `forward` is called through the wrapper."""

    betas: tuple[float, float]
    """Of AdamW."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        # DDP takes the mean over processes where the totals, which count all of them, ask for the sum.
        self.world_size = world_size

    @abstractmethod
    def forward(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        """Losses of a micro-batch: "total" for `backward`, and means to look at, without gradient."""

    @abstractmethod
    def sums(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        """What `evaluate` returns."""

    @abstractmethod
    def learning_rate(self, fine_tuning: bool) -> float:
        """Peak of the schedule when the user names none."""

    def evaluate(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        """The validation loss as "sum" and "count", other losses as "NAME_sum" and "NAME_count".

        Added up over batches and divided they are means over the whole set. Changes nothing; needs no `totals`.
        """
        was_training = self.training
        self.eval()
        try:
            # What is compiled is compiled for training; other shapes now and then are not worth the waiting.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                return self.sums(tensors, sizes)
        finally:
            self.train(was_training)

    @torch.no_grad()
    def pictures(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:  # noqa: ARG002 - not every recipe has any
        """What a validation shows of a batch: images [height, width], low frequencies first, or counts [codes]."""
        return {}

    def regions(self) -> list[nn.Module]:
        """Modules to compile one by one: equal ones are compiled once, however many there are."""
        return [self]

    def parts(self) -> dict[str, nn.Module]:
        """Modules whose gradients are clipped separately, by name."""
        return {"model": self}

    def before_first_step(self, tensors: Tensors) -> None:
        """Prepares the network with a first batch; not for a run that is continued."""

    def after_step(self, step: int) -> None:
        """To be called after every optimiser step, with its number."""
