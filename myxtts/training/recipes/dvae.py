"""The DVAE's recipe: reconstruction, commitment, and when the codebook moves. Knows no audio, only mels."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from myxtts.config import SAMPLES_PER_CODE
from myxtts.data.layout import Sizes
from myxtts.model.codebook import InPlace
from myxtts.model.dvae import DVAE, FRAMES_PER_CODE, Reconstruction
from myxtts.training.losses import LEAST, Totals, mean_of
from myxtts.training.recipes.recipe import Recipe, Tensors

FROM_SCRATCH_LR, FINE_TUNING_LR = 3e-4, 3e-5
COMMITMENT_WEIGHT = 0.25
REVIVE_STEPS = 10
"""Optimiser steps between two looks for dead codes."""


class DvaeRecipe(Recipe):
    """Mel to codes and back.

    Reads mel float32 [B, 80, T], T a multiple of 4, and num_frames [B]. Validation loss: squared error per frame
    and mel. Gradients train the encoder and the decoder. The codebook moves once a step, in `after_step`, so that
    all micro-steps see the same; `all_reduce` (a sum) and `broadcast` keep it the same on all processes.
    """

    betas = (0.9, 0.99)
    counts_and_sums: Tensor
    """[1 + dim, codes]: how often a code was chosen since the last step, and the sum of the latents that did."""
    candidates: Tensor
    """[codes, dim]: latents of the last micro-batch, for dead codes to be moved to."""
    candidate_weights: Tensor
    """[codes]: 0 where there is none."""

    def __init__(
        self,
        dvae: DVAE,
        world_size: int = 1,
        commitment_weight: float = COMMITMENT_WEIGHT,
        seed: int = 0,
        all_reduce: InPlace | None = None,
        broadcast: InPlace | None = None,
        fine_tuning: bool = False,
    ) -> None:
        super().__init__(world_size)
        self.dvae, self.fine_tuning = dvae, fine_tuning
        self.commitment_weight, self.seed = commitment_weight, seed
        self.all_reduce, self.broadcast = all_reduce, broadcast
        vectors = dvae.codebook.embed
        self.register_buffer("counts_and_sums", F.pad(torch.zeros_like(vectors), (0, 0, 1, 0)), persistent=False)
        self.register_buffer("candidates", torch.zeros_like(vectors.t()), persistent=False)
        self.register_buffer("candidate_weights", torch.zeros_like(vectors[0]), persistent=False)
        # What each process has seen is its own; DDP would share that of the first.
        self._ddp_params_and_buffers_to_ignore = ["counts_and_sums", "candidates", "candidate_weights"]

    def forward(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        out, sums = self._reconstruct(tensors, sizes.samples)
        self._remember(out, tensors["weights"])
        totals, usage = Totals.of(tensors), self.dvae.usage()
        mel, commitment = sums["sum"] / totals.frames, sums["commitment_sum"] / totals.codes
        return {
            "total": self.world_size * (mel + self.commitment_weight * commitment),
            "mel_loss": mean_of(sums["sum"], sums["count"]),
            "commitment": mean_of(sums["commitment_sum"], sums["commitment_count"]),
            "codes_used": usage.used.float(),
            "perplexity": usage.perplexity,
        }

    def sums(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        return self._reconstruct(tensors, sizes.samples)[1]

    @torch.no_grad()
    def pictures(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        out, _ = self._reconstruct(tensors, sizes.samples)
        mel, heard = tensors["mel"][0], out.reconstruction[0].float()
        return {"mel": mel[:, : heard.shape[1]], "reconstruction": heard, "code_usage": self.dvae.usage().counts}

    def learning_rate(self, fine_tuning: bool) -> float:
        return FINE_TUNING_LR if fine_tuning else FROM_SCRATCH_LR

    @torch.no_grad()
    def before_first_step(self, tensors: Tensors) -> None:
        """Puts the codes among the latents of a first batch: random ones would stay beside them."""
        out, _ = self._reconstruct(tensors)
        self._revive(out.latents, out.mask * tensors["weights"][:, None], step=0)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Moves the codebook by what the micro-batches of this step chose, and now and then revives dead codes."""
        counts, sums = self.counts_and_sums[0], self.counts_and_sums[1:]
        codes = torch.arange(len(counts), device=counts.device)
        # Each code's mean latent, counted as often as it was chosen, is as good as the latents themselves.
        means = (sums / counts.clamp_min(LEAST)).t()
        self.dvae.update_codebook(means, codes, counts, self.all_reduce, self._decay(step))
        self.counts_and_sums.zero_()
        if step % REVIVE_STEPS == 0:
            self._revive(self.candidates, self.candidate_weights, step)

    def _decay(self, step: int) -> float:
        """Short means at first: codes that follow slowly lose the latents of a fresh encoder, and die."""
        own = self.dvae.codebook.decay
        return own if self.fine_tuning else min(own, (1 + step) / (10 + step))

    def _reconstruct(
        self, tensors: Tensors, max_samples: int | None = None
    ) -> tuple[Reconstruction, dict[str, Tensor]]:
        mel, weights = tensors["mel"], tensors["weights"]
        if max_samples is not None:
            mel = mel[..., : FRAMES_PER_CODE * math.ceil(max_samples / SAMPLES_PER_CODE)]
        num_frames = torch.where(weights > 0, tensors["num_frames"], 0)
        inside = torch.arange(mel.shape[-1], device=mel.device) < num_frames[:, None]
        # Whatever stands behind a clip, a NaN too, would reach weights through the error, even times 0.
        out: Reconstruction = self.dvae(torch.where(inside[:, None], mel, 0), num_frames)
        frame_weights, code_weights = inside * weights[:, None], out.mask * weights[:, None]
        return out, {
            "sum": (out.mse.mean(1) * frame_weights).sum(),
            "count": frame_weights.sum(),
            "commitment_sum": (out.commitment * code_weights).sum(),
            "commitment_count": code_weights.sum(),
        }

    @torch.no_grad()
    def _remember(self, out: Reconstruction, weights: Tensor) -> None:
        latents, weights = out.latents.flatten(0, 1), (out.mask * weights[:, None]).flatten()
        finite = latents.isfinite().all(1)  # one NaN would stay in the running means for ever
        latents, weights = torch.where(finite[:, None], latents, 0), torch.where(finite, weights, 0)
        num_codes, num_latents = len(self.candidates), len(latents)
        numbers = torch.arange(num_codes, device=latents.device)
        with torch.autocast(latents.device.type, enabled=False):
            chosen = (out.codes.flatten()[:, None] == numbers) * weights[:, None]
            self.counts_and_sums += torch.cat([chosen.sum(0, keepdim=True), latents.t() @ chosen])
        num_drawn = min(num_codes, num_latents)
        drawn = numbers[:num_drawn] * num_latents // num_drawn  # evenly over the batch
        drawn_weights = F.pad(weights[drawn], (0, num_codes - num_drawn))
        drawn_latents = F.pad(latents[drawn], (0, 0, 0, num_codes - num_drawn))
        some = drawn_weights.any()  # a batch may consist of filling clips
        self.candidates.copy_(torch.where(some, drawn_latents, self.candidates))
        self.candidate_weights.copy_(torch.where(some, drawn_weights, self.candidate_weights))

    def _revive(self, latents: Tensor, weights: Tensor, step: int) -> None:
        # Seeded by the step: a continued run draws what the uninterrupted one would have drawn.
        generator = torch.Generator(latents.device).manual_seed(self.seed + step)
        self.dvae.revive(latents, generator, weights)
        if self.broadcast is not None:
            for values in self.dvae.codebook.buffers():
                self.broadcast(values)
