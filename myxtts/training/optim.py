"""AdamW as the training loop needs it: schedule, clipping, a guard against non-finite gradients, averaged weights.

Whatever depends on the value of a tensor happens on its device: the host never waits, and `update` can be captured
in a CUDA graph. This module knows neither losses nor files; its state is a flat mapping of named tensors.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from myxtts.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """Rises linearly over the warm-up, then falls along a cosine; without an end it stays at its height."""

    warmup_steps: int
    total_steps: int | None
    floor: float = 0.1
    """The part of the highest learning rate that is left at `total_steps` and beyond."""

    def factor(self, step: int) -> float:
        """What the highest learning rate is multiplied by in a step; steps count from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.total_steps is None:
            return 1.0
        done = (step - self.warmup_steps) / max(self.total_steps - self.warmup_steps, 1)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


class ParameterGroup(NamedTuple):
    weight_decay: float
    parameters: dict[str, nn.Parameter]


def parameter_groups(module: nn.Module, weight_decay: float) -> list[ParameterGroup]:
    """What is trained, by name: matrices with decay; norms, biases and embeddings without."""
    spared_ids = {
        id(parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if _is_spared(owner, name, parameter)
    }
    decayed, spared = ParameterGroup(weight_decay, {}), ParameterGroup(0.0, {})
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            (spared if id(parameter) in spared_ids else decayed).parameters[name] = parameter
    return [decayed, spared]


def _is_spared(owner: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    # One number a channel: biases, the scales of norms, the magnitudes of weight-normed convolutions.
    is_per_channel = parameter.dim() < 2 or parameter.numel() == len(parameter)
    is_embedding = isinstance(owner, nn.Embedding) or name == "latents"
    return is_per_channel or is_embedding or isinstance(owner, nn.LayerNorm)


class _Trained(NamedTuple):
    """A parameter and what AdamW remembers of it."""

    weight: nn.Parameter
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor

    @classmethod
    def from_start(cls, weight: nn.Parameter) -> _Trained:
        step = torch.zeros((), device=weight.device)  # fp32: the fused kernel's type for it
        return cls(weight, torch.zeros_like(weight), torch.zeros_like(weight), step)


class _ClippedSet:
    """Parameters whose gradients share a norm."""

    def __init__(self, module: nn.Module, weight_decay: float) -> None:
        self.groups = [
            (group.weight_decay, {name: _Trained.from_start(weight) for name, weight in group.parameters.items()})
            for group in parameter_groups(module, weight_decay)
        ]
        self.norm = torch.zeros((), device=next(module.parameters()).device)
        self.grad_scale = torch.ones_like(self.norm)

    def measure(self, grad_clip: float) -> None:
        """Norm of the gradients, and what they are divided by so that it is `grad_clip` at most (0: no limit)."""
        everything = [trained for _, group in self.groups for trained in group.values()]
        gradients = [trained.weight.grad for trained in everything if trained.weight.grad is not None]
        if gradients:
            self.norm.copy_(get_total_norm(gradients))
        else:
            self.norm.zero_()
        if grad_clip > 0:  # with the margin of torch.nn.utils.clip_grad_norm_
            self.grad_scale.copy_(((self.norm + 1e-6) / grad_clip).clamp(min=1.0))


class Optimizer:
    """AdamW over one module, or over several named ones whose gradients are clipped separately.

    Make it when the modules are on their device and hold the weights to start from. A step in which any gradient
    is not finite changes nothing but `skipped` and `skipped_in_a_row`. No tensor is ever replaced, neither by a
    step nor by loading a state, so a captured graph stays valid. A parameter without a gradient is left alone.
    """

    def __init__(
        self,
        modules: nn.Module | Mapping[str, nn.Module],
        lr: float,
        schedule: Schedule,
        *,
        weight_decay: float = 0.01,
        grad_clip: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.96),
        eps: float = 1e-8,
        ema_decay: float = 0.0,
    ) -> None:
        """`lr` is the schedule's highest. A `grad_clip` or `ema_decay` of 0 turns that off."""
        self._highest_lr, self._schedule = lr, schedule
        self._grad_clip, self._betas, self._eps, self._ema_decay = grad_clip, betas, eps, ema_decay
        named = {"model": modules} if isinstance(modules, nn.Module) else modules
        self._sets = {name: _ClippedSet(module, weight_decay) for name, module in named.items()}
        self._trained = {
            name if isinstance(modules, nn.Module) else f"{set_name}.{name}": trained
            for set_name, clipped in self._sets.items()
            for _, group in clipped.groups
            for name, trained in group.items()
        }
        if not self._trained:
            raise ValueError("Nothing to optimise: every parameter is frozen.")
        self._ema = {name: trained.weight.detach().clone() for name, trained in self._trained.items() if ema_decay}
        device = next(iter(self._trained.values())).weight.device
        self.lr, self._ema_rate = torch.zeros((), device=device), torch.zeros((), device=device)
        self._found_inf = torch.zeros((), device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped_in_a_row = torch.zeros_like(self.skipped)
        self.set_lr(0)

    @property
    def last_norm(self) -> dict[str, Tensor]:
        """Norm of each set's gradients before clipping, on the device; the set of a single module is "model"."""
        return {name: clipped.norm for name, clipped in self._sets.items()}

    def step(self, step: int) -> None:
        """One step with the gradients at hand; steps count from 0 and only choose the learning rate."""
        self.set_lr(step)
        self.update()

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, for the log: reading `lr` would make the host wait."""
        return self._highest_lr * self._schedule.factor(step)

    def set_lr(self, step: int) -> None:
        """Choose the rates of the next `update`; the host's part of a step, never captured in a graph.

        The average is short at first: otherwise random weights would be in it for thousands of steps.
        """
        self.lr.fill_(self.lr_at(step))
        self._ema_rate.fill_(1 - min(self._ema_decay, (1 + step) / (10 + step)))

    @torch.no_grad()
    def update(self) -> None:
        """Clip, update and average, on the device alone. Gradients stay, clipped, until `zero_grad`."""
        for clipped in self._sets.values():
            clipped.measure(self._grad_clip)
        is_skipped = ~torch.stack([clipped.norm for clipped in self._sets.values()]).isfinite().all()
        self._found_inf.copy_(is_skipped)
        for clipped in self._sets.values():
            for weight_decay, group in clipped.groups:
                self._update_group(weight_decay, list(group.values()), clipped.grad_scale)
        self.skipped.add_(is_skipped)
        self.skipped_in_a_row.add_(1).mul_(is_skipped)
        if self._ema:
            self._update_ema()

    def _update_group(self, weight_decay: float, group: list[_Trained], grad_scale: Tensor) -> None:
        # Not the class AdamW: it makes its state in the first step, which every replay of a graph would clear.
        present = [(trained, gradient) for trained in group if (gradient := trained.weight.grad) is not None]
        adamw(
            [trained.weight for trained, _ in present],
            [gradient for _, gradient in present],
            [trained.exp_avg for trained, _ in present],
            [trained.exp_avg_sq for trained, _ in present],
            [],
            [trained.step for trained, _ in present],
            fused=True,
            grad_scale=grad_scale if self._grad_clip > 0 else None,
            found_inf=self._found_inf,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=self.lr,
            weight_decay=weight_decay,
            eps=self._eps,
            maximize=False,
        )

    def _update_ema(self) -> None:
        # average -= rate * (average - weight), as the fused kernel of SGD: like AdamW's it heeds found_inf.
        weights: list[Tensor] = [trained.weight for trained in self._trained.values()]
        sgd(
            list(self._ema.values()),
            weights,
            [None] * len(weights),
            fused=True,
            found_inf=self._found_inf,
            weight_decay=1.0,
            momentum=0.0,
            lr=self._ema_rate,  # type: ignore[arg-type] # the kernel reads it from the device
            dampening=0.0,
            nesterov=False,
            maximize=True,
        )

    def zero_grad(self) -> None:
        """Zero the gradients where they are: a captured graph goes on adding to the same memory."""
        gradients = [trained.weight.grad for trained in self._trained.values() if trained.weight.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)

    def counters(self) -> list[Tensor]:
        """What counts skipped updates, on the device."""
        return [self.skipped, self.skipped_in_a_row]

    @torch.no_grad()
    def poison_gradients(self) -> None:
        """Make the next update one that is skipped: to run it without consequences."""
        for trained in self._trained.values():
            if trained.weight.grad is not None:
                trained.weight.grad.fill_(math.nan)
                return

    def ema_weights(self) -> dict[str, Tensor]:
        """The averaged weights by parameter name; empty when there is no average."""
        return dict(self._ema)

    @contextlib.contextmanager
    def swap_ema(self) -> Iterator[None]:
        """Have the averaged weights in the modules for a while, to validate or export; no update or save inside.

        Without an average the weights stay as they are.
        """
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, average in self._ema.items():
            weight = self._trained[name].weight
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything but the weights, by name: the live tensors, to be copied before the next step."""
        state = {"skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}
        for name, trained in self._trained.items():
            state[f"exp_avg.{name}"] = trained.exp_avg
            state[f"exp_avg_sq.{name}"] = trained.exp_avg_sq
            state[f"step.{name}"] = trained.step
        return state | {f"ema.{name}": average for name, average in self._ema.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly where `state` was taken; it must be of the same parameters and settings."""
        own = self.state_dict()
        wrong = sorted(
            name
            for name in own.keys() | state.keys()
            if name not in own or name not in state or own[name].shape != state[name].shape
        )
        if wrong:
            raise ConfigError(
                f"The saved optimiser state does not fit what is trained now: {len(wrong)} entries are missing, "
                f"unknown or of another shape, among them {', '.join(wrong[:3])}.\n"
                "Continue with the settings the run was started with (what is trained, its size, ema_decay), "
                "or start over with --reset-training."
            )
        for name, tensor in own.items():
            tensor.copy_(state[name])
