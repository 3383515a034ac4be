"""What each stage trains, and the loss of one micro-step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from myxtts.config import SAMPLES_PER_CODE, Settings
from myxtts.data.batches import MAX_CROP_FRAMES, Sizes, packed_tokens
from myxtts.data.clips import ClipSet
from myxtts.model.conditioning import pack_frames
from myxtts.model.dvae import DVAE, FRAMES_PER_CODE, InPlace, Reconstruction
from myxtts.model.gpt import AUDIO, GPT, Losses, PackedBatch, add_adapters, pack
from myxtts.model.mel import FrontEnd, LogMel
from myxtts.model.vocoder import (
    OUTPUT_SAMPLE_RATE,
    PERIOD_WIDTHS,
    RESOLUTION_WIDTH,
    DiscriminatorOutput,
    Discriminators,
    HifiGanDecoder,
)
from myxtts.model.xtts import SIZES, XTTS

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


def discriminator_loss(real: Sequence[DiscriminatorOutput], fake: Sequence[DiscriminatorOutput]) -> Tensor:
    """Least squares of discriminators that should say 1 to real waves and 0 to generated ones, [B]."""
    distances = [
        by_clip((one.logits.float() - 1).square()) + by_clip(other.logits.float().square())
        for one, other in zip(real, fake, strict=True)
    ]
    return sum(distances[1:], distances[0])


def generator_loss(fake: Sequence[DiscriminatorOutput]) -> Tensor:
    """Least squares of a generator whose waves should be taken for real, [B]."""
    distances = [by_clip((judged.logits.float() - 1).square()) for judged in fake]
    return sum(distances[1:], distances[0])


def feature_matching(real: Sequence[DiscriminatorOutput], fake: Sequence[DiscriminatorOutput]) -> Tensor:
    """How differently the hidden layers of the discriminators see both, [B]; real waves give no gradient."""
    distances = [
        by_clip((target.detach().float() - feature.float()).abs())
        for one, other in zip(real, fake, strict=True)
        for target, feature in zip(one.features, other.features, strict=True)
    ]
    return sum(distances[1:], distances[0])


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


DVAE_FROM_SCRATCH_LR, DVAE_FINE_TUNING_LR = 3e-4, 3e-5
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
        return DVAE_FINE_TUNING_LR if fine_tuning else DVAE_FROM_SCRATCH_LR

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


GPT_FROM_SCRATCH_LR, WIDE_FROM_SCRATCH_LR, GPT_FINE_TUNING_LR, ADAPTER_LR = 2e-4, 1e-4, 5e-6, 1e-4
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
            return GPT_FINE_TUNING_LR
        return GPT_FROM_SCRATCH_LR if self.gpt.dims.dim < WIDE_DIM else WIDE_FROM_SCRATCH_LR

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


DECODER_FROM_SCRATCH_LR, DECODER_FINE_TUNING_LR = 2e-4, 1e-4
"""Not far apart: the discriminators are fresh in both cases."""
FEATURE_WEIGHT, MEL_WEIGHT = 2.0, 45.0
"""HiFi-GAN's, beside 1 for the adversarial loss."""
LISTENING_MEL = FrontEnd(
    sample_rate=OUTPUT_SAMPLE_RATE, fft_samples=1024, window_samples=1024, hop_samples=256, window="hann",
    num_mels=80, max_hz=OUTPUT_SAMPLE_RATE / 2, equal_area=True, log_floor=1e-8, floor_is_added=False,
)  # fmt: skip
"""How waves are compared: up to the highest frequency, down to about the noise of 16 bits."""


class DecoderRecipe(Recipe):
    """The GPT's latents and a speaker to sound, against discriminators that learn beside it.

    Reads latents float32 [B, L, dim], wave float32 [B, num_samples(L)] at 24 kHz, and speaker float32
    [B, speaker_dim]. Validation loss: distance of log-mels per clip. Of the vocoder only the waveform decoder is
    trained, never the speaker encoder beside it.
    """

    betas = (0.8, 0.99)

    def __init__(
        self,
        vocoder: HifiGanDecoder,
        discriminators: Discriminators,
        world_size: int = 1,
        feature_weight: float = FEATURE_WEIGHT,
        mel_weight: float = MEL_WEIGHT,
    ) -> None:
        super().__init__(world_size)
        self.generator = vocoder.waveform_decoder
        self.discriminators = discriminators
        self.log_mel = LogMel(LISTENING_MEL)
        self.feature_weight, self.mel_weight = feature_weight, mel_weight

    def forward(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:  # noqa: ARG002 - one signature for all
        """ "disc" gives gradients to the discriminators alone, the other losses to the generator alone."""
        real, fake = self._waves(tensors)
        judged_real, judged_fake = self.discriminators(real, fake.detach())
        heard = self._judge_frozen(fake)
        losses = {
            "gen_adv": generator_loss(heard),
            "feature_matching": feature_matching(judged_real, heard),
            "mel_loss": self._mel_distance(real, fake),
            "disc": discriminator_loss(judged_real, judged_fake),
        }
        factors = {"feature_matching": self.feature_weight, "mel_loss": self.mel_weight}
        weights, totals = tensors["weights"], Totals.of(tensors)
        by_name = {name: (loss * weights).sum() for name, loss in losses.items()}
        total = torch.stack([factors.get(name, 1.0) * loss for name, loss in by_name.items()]).sum()
        means = {name: mean_of(loss, weights.sum()) for name, loss in by_name.items()}
        return {"total": self.world_size * total / totals.clips, **means}

    def sums(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:  # noqa: ARG002
        weights = tensors["weights"]
        return {"sum": (self._mel_distance(*self._waves(tensors)) * weights).sum(), "count": weights.sum()}

    @torch.no_grad()
    def pictures(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:  # noqa: ARG002
        real, fake = (self.log_mel(wave[:1].float())[0, 0] for wave in self._waves(tensors))
        return {"mel": real, "generated": fake}

    def parts(self) -> dict[str, nn.Module]:
        return {"generator": self.generator, "discriminators": self.discriminators}

    def learning_rate(self, fine_tuning: bool) -> float:
        return DECODER_FINE_TUNING_LR if fine_tuning else DECODER_FROM_SCRATCH_LR

    def _waves(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Real and generated waves, [B, 1, N] each; filling clips are silent."""
        present = (tensors["weights"] > 0)[:, None, None]
        latents = torch.where(present, tensors["latents"], 0)
        speaker = torch.where(present, tensors["speaker"].unsqueeze(-1), 0)
        fake: Tensor = self.generator(HifiGanDecoder.frames(latents), speaker)
        return torch.where(present, tensors["wave"].unsqueeze(1), 0), fake

    def _judge_frozen(self, fake: Tensor) -> list[DiscriminatorOutput]:
        """What the discriminators make of generated waves, with gradients for these but not for their weights.

        Their weights are handed in as constants: switching `requires_grad` off and on cannot be compiled.
        """
        return [
            functional_call(network, {name: weight.detach() for name, weight in network.named_parameters()}, fake)
            for network in (*self.discriminators.periods, *self.discriminators.resolutions)
        ]

    def _mel_distance(self, real: Tensor, fake: Tensor) -> Tensor:
        """Mean distance of the log-mels, [B]; halved, that of powers is that of magnitudes, HiFi-GAN's measure."""
        target: Tensor = self.log_mel(real)
        return by_clip((self.log_mel(fake) - target).abs()) / 2


def make_recipe(stage: str, model: XTTS, settings: Settings, world_size: int, new_tokens: bool = False) -> Recipe:
    """What a stage trains of the model, unfrozen; for LoRA with adapters, and `new_tokens` trained in full."""
    training = settings.training
    if stage == "dvae":
        model.dvae.requires_grad_(True)
        is_shared = world_size > 1
        return DvaeRecipe(
            model.dvae,
            world_size,
            seed=training.seed,
            all_reduce=dist.all_reduce if is_shared else None,
            broadcast=(lambda tensor: dist.broadcast(tensor, 0)) if is_shared else None,
            fine_tuning=training.init_from is not None,
        )
    if stage == "gpt":
        model.gpt.requires_grad_(True)
        model.gpt.checkpointing = settings.model.gradient_checkpointing
        model.gpt.set_dropout(settings.model.dropout)
        if settings.model.lora_rank:  # adapters cannot teach the model a new token
            in_full = ("text_embedding", "text_head") if new_tokens else ()
            add_adapters(model.gpt, settings.model.lora_rank, train_also=in_full)
        noise, dropout = training.code_noise, training.text_dropout
        return GptRecipe(model.gpt, world_size, training.label_smoothing, code_noise=noise, text_dropout=dropout)
    model.hifigan_decoder.waveform_decoder.requires_grad_(True)
    # Discriminators far stronger than the generator teach it nothing, and take all the time.
    scale = min(model.dims.vocoder_channels / SIZES["normal"].vocoder_channels, 1.0)
    discriminators = Discriminators(
        period_widths=[max(int(scale * width), 4) for width in PERIOD_WIDTHS],
        resolution_width=max(int(scale * RESOLUTION_WIDTH), 4),
    )
    return DecoderRecipe(model.hifigan_decoder, discriminators, world_size)


def useful_flops(recipe: Recipe, clips: ClipSet) -> float | None:
    """Approximate operations of training on one clip, without padding and recomputation; None except for the GPT.

    Each weight takes two per token in the forward pass, two for the gradients of activations, and two for its own
    gradient if it is trained. Attention is not counted.
    """
    if not isinstance(recipe, GptRecipe):
        return None
    embeddings = {
        id(parameter)
        for module in recipe.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    matrices = [p for p in recipe.parameters() if p.ndim > 1 and id(p) not in embeddings]
    weights, trained = sum(p.numel() for p in matrices), sum(p.numel() for p in matrices if p.requires_grad)
    tokens = float(packed_tokens(clips.num_ids, clips.num_samples).mean())
    return (4 * weights + 2 * trained) * tokens
