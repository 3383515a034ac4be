"""The GPT's recipe: cross-entropy of text and codes on one packed row. Knows no tokenizer and no DVAE."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from myxtts.config import SAMPLES_PER_CODE
from myxtts.data.crops import MAX_CROP_FRAMES
from myxtts.data.layout import Sizes
from myxtts.model.conditioning import pack_frames
from myxtts.model.gpt import GPT, Losses
from myxtts.model.packing import AUDIO, PackedBatch, pack
from myxtts.training.losses import Totals, mean_of
from myxtts.training.recipes.recipe import Recipe, Tensors

FROM_SCRATCH_LR, WIDE_FROM_SCRATCH_LR, FINE_TUNING_LR, ADAPTER_LR = 2e-4, 1e-4, 5e-6, 1e-4
MANY_LAYERS = 8
WIDE_DIM = 1024
"""XTTS-v2's width, from which on a GPT starts more gently."""


class GptRecipe(Recipe):
    """Text and voice to codes.

    Reads ids int32 [B, T] and num_ids [B], codes int32 [B, N] and num_codes [B], mel float32 [frames, 80] with the
    conditioning mels clip behind clip, and num_frames [B]; of each as much as `sizes` says. Validation loss:
    cross-entropy per code or STOP.
    """

    betas = (0.9, 0.96)

    def __init__(
        self,
        gpt: GPT,
        world_size: int = 1,
        label_smoothing: float = 0.0,
        text_weight: float = 0.01,
        audio_weight: float = 1.0,
        max_frames: int = MAX_CROP_FRAMES,
        code_noise: float = 0.0,
        text_dropout: float = 0.0,
    ) -> None:
        super().__init__(world_size)
        self.gpt = gpt
        self.label_smoothing = label_smoothing
        self.text_weight, self.audio_weight = text_weight, audio_weight
        self.max_frames, self.code_noise, self.text_dropout = max_frames, code_noise, text_dropout

    def forward(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        losses, totals = self._losses(tensors, sizes, self.label_smoothing), Totals.of(tensors)
        text = self.text_weight * losses.text_sum / totals.text_targets
        audio = self.audio_weight * losses.audio_sum / totals.audio_targets
        return {
            "total": self.world_size * (text + audio),
            "text_loss": mean_of(losses.text_sum, losses.text_count),
            "audio_loss": mean_of(losses.audio_sum, losses.audio_count),
        }

    def sums(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        """Validation is never smoothed: runs with and without label smoothing can be compared."""
        losses = self._losses(tensors, sizes, label_smoothing=0.0)
        return {
            "sum": losses.audio_sum,
            "count": losses.audio_count,
            "text_sum": losses.text_sum,
            "text_count": losses.text_count,
        }

    @torch.no_grad()
    def pictures(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        """The reference voice of the first clip, and how often each code is a target."""
        codes = tensors["codes"][:, : math.ceil(sizes.samples / SAMPLES_PER_CODE)]
        inside = torch.arange(codes.shape[1], device=codes.device) < tensors["num_codes"][:, None]
        counts = torch.bincount(codes[inside].long(), minlength=self.gpt.dims.num_codes)
        return {"reference_voice": tensors["mel"][: int(tensors["num_frames"][0])].t(), "code_usage": counts}

    def regions(self) -> list[nn.Module]:
        """Nearly all the arithmetic, in three kinds of modules: a graph of 30 layers compiles for over a minute.

        With few layers that is no matter, but what lies between them then is.
        """
        if self.gpt.dims.layers < MANY_LAYERS:
            return [self]
        return [*self.gpt.gpt.h, *self.gpt.conditioning_encoder.attn, self.gpt.conditioning_perceiver]

    def learning_rate(self, fine_tuning: bool) -> float:
        if not all(parameter.requires_grad for parameter in self.gpt.parameters()):
            return ADAPTER_LR
        if fine_tuning:
            return FINE_TUNING_LR
        return FROM_SCRATCH_LR if self.gpt.dims.dim < WIDE_DIM else WIDE_FROM_SCRATCH_LR

    def _losses(self, tensors: Tensors, sizes: Sizes, label_smoothing: float) -> Losses:
        frames = pack_frames(tensors["mel"][: sizes.frames], tensors["num_frames"], self.max_frames)
        ids, num_ids = tensors["ids"][:, : sizes.ids], tensors["num_ids"]
        if self.training and self.text_dropout:  # START and STOP of the text stay, as of an empty one
            num_ids = torch.where(torch.rand(num_ids.shape, device=num_ids.device) < self.text_dropout, 0, num_ids)
        codes = tensors["codes"][:, : math.ceil(sizes.samples / SAMPLES_PER_CODE)]
        tokens = (ids, num_ids, codes, tensors["num_codes"])
        packed = pack(self.gpt.dims, frames, *tokens, budget=sizes.tokens, weights=tensors["weights"])
        if self.training and self.code_noise:
            packed = packed._replace(token=self._noisy(packed))
        losses: Losses = self.gpt(packed, label_smoothing)
        return losses

    def _noisy(self, packed: PackedBatch) -> Tensor:
        """What the GPT hears, with other codes in some places; what it shall say stays."""
        is_code = (packed.kind == AUDIO) & (packed.token < self.gpt.dims.num_codes)
        is_other = is_code & (torch.rand(packed.token.shape, device=packed.token.device) < self.code_noise)
        return torch.where(is_other, torch.randint_like(packed.token, self.gpt.dims.num_codes), packed.token)
