"""Low-rank adapters on the GPT's stack: fine-tuning with a hundredth of the optimiser's memory.

Written out instead of taken from `peft`: its layers replace `nn.Linear` and transformers' own Conv1D, neither of
which stores weights [in, out] as this stack does without transformers; it renames every parameter it touches; and
it brings transformers and accelerate with it. An adapter here is a layer with two more parameters, so that base
weights keep their names and any checkpoint of the plain GPT loads before or after (`strict=False`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from myxtts.model.blocks import InOutLinear
from myxtts.model.gpt import GPT


class AdaptedLinear(InOutLinear):
    """x·W + b + scale·x·A·B with W and b frozen; B starts at zero, so nothing changes before training."""

    def __init__(self, base: InOutLinear, rank: int, alpha: float) -> None:
        nn.Module.__init__(self)
        num_inputs, num_outputs = base.weight.shape
        self.weight, self.bias = base.weight, base.bias
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(base.weight.new_empty(num_inputs, rank, dtype=torch.float32))
        self.lora_b = nn.Parameter(base.weight.new_zeros(rank, num_outputs, dtype=torch.float32))
        nn.init.normal_(self.lora_a, std=num_inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x @ self.lora_a) @ (self.lora_b * self.scale)

    @torch.no_grad()
    def merged(self) -> InOutLinear:
        """A plain layer that computes the same."""
        plain = InOutLinear.__new__(InOutLinear)
        nn.Module.__init__(plain)
        weight = self.weight.float() + self.scale * (self.lora_a @ self.lora_b)
        plain.weight, plain.bias = nn.Parameter(weight.to(self.weight.dtype)), self.bias
        return plain


def add_adapters(model: GPT, rank: int, alpha: float | None = None, train_also: Sequence[str] = ()) -> None:
    """Freeze the model and put adapters on all four matrices of every block; `alpha` is the rank by default.

    `train_also` names parameters by prefix that are trained in full, such as "text_embedding" and "text_head"
    after the vocabulary has grown: adapters cannot teach the model what a new token is.
    """
    if rank < 1:
        raise ValueError(f"rank {rank}: an adapter needs at least 1")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(name.startswith(prefix) for prefix in train_also))
    for parent, name, layer in list(_layers(model)):
        if isinstance(layer, AdaptedLinear):
            raise ValueError("the model has adapters already")
        setattr(parent, name, AdaptedLinear(layer, rank, rank if alpha is None else alpha))


def store_frozen_in_bf16(model: GPT) -> None:
    """Keep the frozen matrices in half the memory; they are cast to it for every product anyway under autocast.

    What is trained stays in fp32, which is the master copy the optimiser changes; norms and biases are small and
    added to, so they stay too.
    """
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.dim() > 1:
            parameter.data = parameter.data.bfloat16()


def merge_adapters(model: GPT) -> None:
    """Fold the adapters into the weights: the plain GPT again, frozen no more, with a plain state dict."""
    for parent, name, layer in list(_layers(model)):
        if isinstance(layer, AdaptedLinear):
            setattr(parent, name, layer.merged())
    model.requires_grad_(True)


def adapter_state(model: GPT) -> dict[str, Tensor]:
    """Only what was trained, to keep or to share: `model.load_state_dict(state, strict=False)` brings it back."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in model.state_dict().items() if name in trained}


def _layers(model: GPT) -> Iterator[tuple[nn.Module, str, InOutLinear]]:
    for parent in model.gpt.h.modules():
        for name, child in parent.named_children():
            if isinstance(child, InOutLinear):
                yield parent, name, child
