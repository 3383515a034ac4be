"""AdamW with a schedule, gradient clipping, a guard against non-finite gradients, and averaged weights (EMA).

Every decision that depends on tensor values is made on the device: the host never waits, and `update` can be
captured in a CUDA graph. The module does not know losses or files; its state is a flat mapping of named tensors.
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
    """Linear warm-up, then cosine decay to `floor`; constant after the warm-up if there is no last step.

    Before the warm-up there may be `lead_steps` with the peak rate: a single layer needs no warm-up.
    """

    warmup_steps: int
    total_steps: int | None
    floor: float = 0.1  # share of the peak learning rate that is left from `total_steps` on
    lead_steps: int = 0

    def factor(self, step: int) -> float:
        """Factor of the peak learning rate in a step; steps count from 0."""
        if step < self.lead_steps:
            return 1.0
        step, last = step - self.lead_steps, self.total_steps
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if last is None:
            return 1.0
        done = (step - self.warmup_steps) / max(last - self.lead_steps - self.warmup_steps, 1)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


class ParameterGroup(NamedTuple):
    weight_decay: float
    parameters: dict[str, nn.Parameter]


def parameter_groups(module: nn.Module, weight_decay: float) -> list[ParameterGroup]:
    """The trained parameters by name: matrices with weight decay; norms, biases and embeddings without."""
    spared_ids = set()
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            # One number per channel: biases, scales of norms, magnitudes of weight-normalised convolutions.
            is_per_channel = parameter.dim() < 2 or parameter.numel() == len(parameter)
            if is_per_channel or name == "latents" or isinstance(owner, nn.Embedding | nn.LayerNorm):
                spared_ids.add(id(parameter))
    decayed, spared = ParameterGroup(weight_decay, {}), ParameterGroup(0.0, {})
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            (spared if id(parameter) in spared_ids else decayed).parameters[name] = parameter
    return [decayed, spared]


class ParamState(NamedTuple):
    """A parameter and its AdamW state."""

    weight: nn.Parameter
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor

    @classmethod
    def initial(cls, weight: nn.Parameter) -> ParamState:
        step = torch.zeros((), device=weight.device)  # fp32, as the fused kernel expects
        return cls(weight, torch.zeros_like(weight), torch.zeros_like(weight), step)


class ClipGroup:
    """Parameters whose gradients are clipped by their common norm."""

    def __init__(self, module: nn.Module, weight_decay: float) -> None:
        self.groups = [
            (group.weight_decay, {name: ParamState.initial(weight) for name, weight in group.parameters.items()})
            for group in parameter_groups(module, weight_decay)
        ]
        self.norm = torch.zeros((), device=next(module.parameters()).device)
        self.grad_scale = torch.ones_like(self.norm)

    def measure(self, grad_clip: float) -> None:
        """Compute the norm of the gradients, and the divisor that limits it to `grad_clip` (0: no limit)."""
        states = [state for _, group in self.groups for state in group.values()]
        gradients = [state.weight.grad for state in states if state.weight.grad is not None]
        if gradients:
            self.norm.copy_(get_total_norm(gradients))
        else:
            self.norm.zero_()
        if grad_clip > 0:  # with the epsilon of torch.nn.utils.clip_grad_norm_
            self.grad_scale.copy_(((self.norm + 1e-6) / grad_clip).clamp(min=1.0))


class Optimizer:
    """AdamW over one module, or over several named ones whose gradients are clipped separately.

    Create it when the modules are on their device and hold their initial weights. A step with any non-finite
    gradient changes only `skipped` and `skipped_in_a_row`. Tensors are never replaced, neither by a step nor by
    loading a state, so captured graphs stay valid. Parameters without a gradient are not changed.
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
        """`lr` is the peak of the schedule. A `grad_clip` or `ema_decay` of 0 switches it off."""
        self._peak_lr, self._schedule = lr, schedule
        self._grad_clip, self._betas, self._eps, self._ema_decay = grad_clip, betas, eps, ema_decay
        named = {"model": modules} if isinstance(modules, nn.Module) else modules
        self._clip_groups = {name: ClipGroup(module, weight_decay) for name, module in named.items()}
        self._states = {
            name if isinstance(modules, nn.Module) else f"{group_name}.{name}": state
            for group_name, clip_group in self._clip_groups.items()
            for _, group in clip_group.groups
            for name, state in group.items()
        }
        if not self._states:
            raise ValueError("Nothing to optimise: every parameter is frozen.")
        self._ema = {name: state.weight.detach().clone() for name, state in self._states.items() if ema_decay}
        device = next(iter(self._states.values())).weight.device
        self.lr, self._ema_rate = torch.zeros((), device=device), torch.zeros((), device=device)
        self._found_inf = torch.zeros((), device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped_in_a_row = torch.zeros_like(self.skipped)
        self.set_lr(0)

    @property
    def last_norm(self) -> dict[str, Tensor]:
        """Norm of each module's gradients before clipping, on the device; a single module is called "model"."""
        return {name: clip_group.norm for name, clip_group in self._clip_groups.items()}

    def lr_at(self, step: int) -> float:
        """The learning rate of a step; reading `lr` would make the host wait."""
        return self._peak_lr * self._schedule.factor(step)

    def set_lr(self, step: int) -> None:
        """Set the rates of the next `update`. This is the host's part of a step and is never captured in a graph.

        The EMA is short at first: otherwise it would contain the initial weights for thousands of steps.
        """
        self.lr.fill_(self.lr_at(step))
        self._ema_rate.fill_(1 - min(self._ema_decay, (1 + step) / (10 + step)))

    @torch.no_grad()
    def update(self) -> None:
        """Clip, update and average, entirely on the device. Gradients stay, clipped, until `zero_grad`."""
        for clip_group in self._clip_groups.values():
            clip_group.measure(self._grad_clip)
        is_skipped = ~torch.stack([clip_group.norm for clip_group in self._clip_groups.values()]).isfinite().all()
        self._found_inf.copy_(is_skipped)
        for clip_group in self._clip_groups.values():
            for weight_decay, group in clip_group.groups:
                self._update_group(weight_decay, list(group.values()), clip_group.grad_scale)
        self.skipped.add_(is_skipped)
        self.skipped_in_a_row.add_(1).mul_(is_skipped)
        if self._ema:
            self._update_ema()

    def _update_group(self, weight_decay: float, group: list[ParamState], grad_scale: Tensor) -> None:
        # Not the AdamW class: it creates its state in the first step, which every replay of a graph would clear.
        present = [(state, gradient) for state in group if (gradient := state.weight.grad) is not None]
        adamw(
            [state.weight for state, _ in present],
            [gradient for _, gradient in present],
            [state.exp_avg for state, _ in present],
            [state.exp_avg_sq for state, _ in present],
            [],
            [state.step for state, _ in present],
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
        # average -= rate * (average - weight), as a fused SGD kernel: like AdamW's, it skips if found_inf is set.
        weights: list[Tensor] = [state.weight for state in self._states.values()]
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
        """Zero the gradients in place: captured graphs keep adding to the same memory."""
        gradients = [state.weight.grad for state in self._states.values() if state.weight.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)

    def counters(self) -> list[Tensor]:
        """The counters of skipped updates, on the device."""
        return [self.skipped, self.skipped_in_a_row]

    @torch.no_grad()
    def poison_gradients(self) -> None:
        """Make the next update a skipped one, so that it can run without effect."""
        for state in self._states.values():
            if state.weight.grad is not None:
                state.weight.grad.fill_(math.nan)
                return

    def validated(self) -> list[tuple[Tensor, Tensor]]:
        """Every trained weight with what is validated and exported in its place: its average, or itself."""
        return [(state.weight, self._ema.get(name, state.weight)) for name, state in self._states.items()]

    @contextlib.contextmanager
    def swap_ema(self) -> Iterator[None]:
        """Put the averaged weights, if any, into the modules; no update or save may happen in the context."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, average in self._ema.items():
            weight = self._states[name].weight
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """The state without the weights, by name; live tensors, to be copied before the next step."""
        state = {"skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}
        for name, param in self._states.items():
            state[f"exp_avg.{name}"] = param.exp_avg
            state[f"exp_avg_sq.{name}"] = param.exp_avg_sq
            state[f"step.{name}"] = param.step
        return state | {f"ema.{name}": average for name, average in self._ema.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state of the same parameters and settings."""
        own = self.state_dict()
        wrong = sorted(
            name
            for name in own.keys() | state.keys()
            if name not in own or name not in state or own[name].shape != state[name].shape
        )
        if wrong:
            raise ConfigError(
                f"The saved optimiser state does not fit what is trained now: {len(wrong)} entries are missing, "
                f"unknown or of another shape, among them {', '.join(wrong[:3])}.\nContinue with the settings of "
                "the run (what is trained, its size, ema_decay), or start over with --reset-training."
            )
        for name, tensor in own.items():
            tensor.copy_(state[name])
