"""Recipes: the networks that a training stage trains, and the losses of one micro-step.

A recipe does not know devices, corpora, optimisers or checkpoints. To add a stage, write a recipe, add it to
`RECIPES`, its trained parts to `config.STAGE_PARTS` and its front end to `pipeline.frontend.FRONTENDS`.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from myxtts.config import HOP_SAMPLES, SAMPLE_RATE, SAMPLES_PER_CODE, Settings
from myxtts.data.batches import MARGIN_CODES, MAX_CROP_FRAMES, SEGMENT_CODES, Sizes, segment_codes
from myxtts.data.clips import ClipSet
from myxtts.data.order import packed_tokens
from myxtts.errors import ConfigError
from myxtts.model.conditioning import PackedFrames, pack_frames
from myxtts.model.dvae import DVAE, FRAMES_PER_CODE, InPlace, Reconstruction, Usage
from myxtts.model.flow import noise_of
from myxtts.model.gpt import AUDIO, GPT, Losses, Said, add_adapters, pack, sharpest, text_attention
from myxtts.model.mel import CONDITIONING_MEL, DVAE_MEL, LogMel, MelSpec
from myxtts.model.vocoder import (
    CROP_SAMPLES,
    OUTPUT_SAMPLE_RATE,
    PERIOD_WIDTHS,
    RESOLUTION_WIDTH,
    SAMPLES_PER_FRAME,
    DiscriminatorOutput,
    Discriminators,
    HifiGanDecoder,
    HifiGanInput,
    HifiGanMel,
    SpeakerEncoder,
    frames_of,
    num_frames,
)
from myxtts.model.vocoder import num_samples as num_samples_of
from myxtts.model.xtts import XTTS, XTTSDims

Tensors = Mapping[str, Tensor]

LEAST = 1e-6  # smallest divisor: if nothing is counted, the sum is 0 and so is the mean


class Totals(NamedTuple):
    """Counts of one optimiser step over all its micro-batches and processes, with clips weighted."""

    text_targets: Tensor  # text tokens and their STOP
    audio_targets: Tensor  # codes and their STOPs
    codes: Tensor
    frames: Tensor
    clips: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Totals:
        """The totals of a batch, float32 [5], safe to divide by."""
        return cls(*tensors["totals"].clamp_min(LEAST).unbind())


def mean_of(total: Tensor, count: Tensor) -> Tensor:
    """A mean for the log: without gradient, 0 if nothing was counted."""
    return total.detach() / count.clamp_min(LEAST)


def by_clip(values: Tensor) -> Tensor:
    """Mean over all dimensions but the first: [B, ...] to float32 [B]."""
    return values.float().flatten(1).mean(1)


def discriminator_loss(real: Sequence[DiscriminatorOutput], fake: Sequence[DiscriminatorOutput]) -> Tensor:
    """Least-squares loss of the discriminators, [B]: 1 for real waveforms, 0 for generated ones."""
    distances = [
        by_clip((one.logits.float() - 1).square()) + by_clip(other.logits.float().square())
        for one, other in zip(real, fake, strict=True)
    ]
    return sum(distances[1:], distances[0])


def generator_loss(fake: Sequence[DiscriminatorOutput]) -> Tensor:
    """Least-squares loss of the generator, [B]: its waveforms should get 1."""
    distances = [by_clip((output.logits.float() - 1).square()) for output in fake]
    return sum(distances[1:], distances[0])


def feature_matching(real: Sequence[DiscriminatorOutput], fake: Sequence[DiscriminatorOutput]) -> Tensor:
    """L1 distance of the discriminators' features, [B], without gradient for the real waveforms."""
    distances = [
        by_clip((target.detach().float() - feature.float()).abs())
        for one, other in zip(real, fake, strict=True)
        for target, feature in zip(one.features, other.features, strict=True)
    ]
    return sum(distances[1:], distances[0])


class StageFacts(NamedTuple):
    """Facts about a run that a recipe depends on, besides the settings."""

    world_size: int = 1
    fine_tuning: bool = False
    total_steps: int = 1
    warm_start: bool = False  # the decoder began with the weights of a HiFi-GAN
    has_new_tokens: bool = False  # the text vocabulary grew after the weights to start from were trained


class Recipe(nn.Module, ABC):
    """The trained networks of a stage and their losses. Several processes sum their gradients."""

    betas: tuple[float, float]  # betas of AdamW
    from_scratch_lr: float
    fine_tuning_lr: float
    is_averaged = True  # False if `ema_decay` is ignored
    phase = ""
    """The computation that `forward` does; only `begin_step` changes it. Each is compiled and captured alone."""
    lead_steps = 0
    """Steps before the warm-up of the learning rate; see `Schedule`."""
    clips_at_once: int | None = None
    """Clips that a CPU trains on at once, if a whole batch would need too much memory; None for all of them."""

    @classmethod
    @abstractmethod
    def build(cls, model: XTTS, settings: Settings, facts: StageFacts) -> Recipe:
        """The recipe for a frozen model; unfreezes the parts that the stage trains."""

    @abstractmethod
    def forward(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        """Losses of a micro-batch: "total" for `backward`, and means for the log, without gradient.

        The total is the share of this micro-batch in that of the step, over all processes.
        """

    @abstractmethod
    def sums(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        """The sums and counts that `evaluate` returns."""

    def learning_rate(self, fine_tuning: bool) -> float:
        return self.fine_tuning_lr if fine_tuning else self.from_scratch_lr

    def evaluate(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        """The validation loss as "sum" and "count", other losses as "NAME_sum" and "NAME_count".

        Summed over batches and divided, they are means over the whole set. Changes nothing and needs no `totals`.
        """
        with self.evaluating():
            return self.sums(tensors, sizes)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode, without gradients and compilation.

        Compiled modules are compiled for training shapes; validation is too rare to compile for others. A copy
        that is always in this mode is not compiled, and other threads may be compiling.
        """
        if not self.training:
            with torch.no_grad():
                yield
            return
        self.eval()
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self.train()

    @torch.no_grad()
    def pictures(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:  # noqa: ARG002 - not every recipe has any
        """Pictures of a validation batch: images [height, width], low frequencies first, or histograms [codes]."""
        return {}

    def regions(self) -> list[nn.Module]:
        """Modules to compile separately; identical ones share one compilation."""
        return [self]

    def parts(self) -> dict[str, nn.Module]:
        """Modules whose gradients are clipped separately, by name."""
        return {"model": self}

    def extra_modules(self) -> dict[str, nn.Module]:
        """Trained modules that are not part of the model, by their prefix in a checkpoint."""
        return {}

    def clip_shapes(self, num_samples: int) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        """Shapes of the tensors of a batch of one clip, to count arithmetic; none if it is not to be counted."""
        return {}

    def before_first_step(self, tensors: Tensors) -> None:
        """Prepare a new network with a first batch; not called when a run is resumed."""

    def begin_step(self, step: int) -> None:
        """Called before every optimiser step."""

    def after_step(self, step: int) -> None:
        """Called after every optimiser step."""


COMMITMENT_WEIGHT = 0.25
REVIVE_STEPS = 10  # optimiser steps between two revivals of dead codes


class DvaeRecipe(Recipe):
    """The DVAE: mel to codes and back.

    Reads mel float32 [B, 80, T], T a multiple of 4, and num_frames [B]. Validation loss: squared error per frame
    and mel band. Gradients train the encoder and the decoder. The codebook changes once per step, in `after_step`,
    so that all micro-steps use the same one; `all_reduce` (a sum) and `broadcast` keep it equal on all processes.
    """

    betas = (0.9, 0.99)
    from_scratch_lr, fine_tuning_lr = 3e-4, 3e-5
    counts_and_sums: Tensor
    """[1 + dim, codes]: since the last step, the number and the sum of the latents assigned to each code."""
    candidates: Tensor  # [codes, dim]: latents of the last micro-batch that dead codes can be moved to
    candidate_weights: Tensor  # [codes]: 0 where there is no candidate
    mel_stats: Tensor

    @classmethod
    def build(cls, model: XTTS, settings: Settings, facts: StageFacts) -> DvaeRecipe:
        """With `facts.fine_tuning`, the codebook is frozen unless the settings ask for another."""
        model.dvae.requires_grad_(True)
        wanted = settings.training.codebook
        frozen = facts.fine_tuning if wanted == "auto" else wanted == "frozen"
        if frozen and not facts.fine_tuning:
            raise ConfigError("--codebook frozen needs a trained codebook: give --init-from, or leave it out")
        recipe = cls(model.dvae, settings.training.seed, facts.fine_tuning, frozen)
        recipe.noise = settings.training.dvae_noise
        recipe.mel_stats.copy_(model.mel_stats)
        if facts.world_size > 1:
            recipe.all_reduce, recipe.broadcast = dist.all_reduce, partial(dist.broadcast, src=0)
        return recipe

    def __init__(self, dvae: DVAE, seed: int = 0, fine_tuning: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.dvae, self.seed, self.fine_tuning, self.frozen = dvae, seed, fine_tuning, frozen
        self.noise = 0.0  # the share of clips that are disturbed
        self.all_reduce: InPlace | None = None
        self.broadcast: InPlace | None = None
        vectors = dvae.codebook.embed
        self.register_buffer("counts_and_sums", F.pad(torch.zeros_like(vectors), (0, 0, 1, 0)), persistent=False)
        self.register_buffer("candidates", torch.zeros_like(vectors.t()), persistent=False)
        self.register_buffer("candidate_weights", torch.zeros_like(vectors[0]), persistent=False)
        self.register_buffer("mel_stats", torch.ones(dvae.channels, device=vectors.device), persistent=False)

    def forward(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        out, sums = self._reconstruct(tensors, sizes)
        if not self.frozen:
            self._accumulate(out, tensors["weights"])
        totals, usage = Totals.of(tensors), self._usage(out, tensors["weights"])
        mel, commitment = sums["sum"] / totals.frames, sums["commitment_sum"] / totals.codes
        return {
            "total": mel + COMMITMENT_WEIGHT * commitment,
            "mel_loss": mean_of(sums["sum"], sums["count"]),
            "commitment": mean_of(sums["commitment_sum"], sums["commitment_count"]),
            "codes_used": usage.used.float(),
            "perplexity": usage.perplexity,
        }

    def sums(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        return self._reconstruct(tensors, sizes)[1]

    @torch.no_grad()
    def pictures(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        out, _ = self._reconstruct(tensors, sizes)
        num_frames = int(tensors["num_frames"][0])  # the rest is padding
        mel, decoded = tensors["mel"][0, :, :num_frames], out.reconstruction[0, :, :num_frames].float()
        return {"mel": mel, "reconstruction": decoded, "code_usage": self._usage(out, tensors["weights"]).counts}

    def clip_shapes(self, num_samples: int) -> dict[str, tuple[int, ...]]:
        frames = FRAMES_PER_CODE * math.ceil(num_samples / SAMPLES_PER_CODE)
        return {"mel": (1, self.dvae.channels, frames), "num_frames": (1,)}

    @torch.no_grad()
    def before_first_step(self, tensors: Tensors) -> None:
        """Move all codes of a new codebook to latents of a first batch: random ones would never be near any."""
        if self.fine_tuning or self.frozen:
            if not self.frozen:
                self.dvae.codebook.start_means()
            return
        out, _ = self._reconstruct(tensors, None)
        self._revive(out.latents, out.mask * tensors["weights"][:, None], step=0)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Update the codebook from the micro-batches of this step, and every few steps revive dead codes."""
        if self.frozen:
            return
        counts, sums = self.counts_and_sums[0], self.counts_and_sums[1:]
        codes = torch.arange(len(counts), device=counts.device)
        # The mean latent of each code, weighted by its count, gives the same update as the latents themselves.
        means = (sums / counts.clamp_min(LEAST)).t()
        # Shorter running means at first: slow codes lose the latents of a new encoder and die.
        own = self.dvae.codebook.decay
        decay = own if self.fine_tuning else min(own, (1 + step) / (10 + step))
        self.dvae.codebook.update(means, codes, counts, self.all_reduce, decay)
        self.counts_and_sums.zero_()
        if step % REVIVE_STEPS == 0:
            self._revive(self.candidates, self.candidate_weights, step)

    def _reconstruct(self, tensors: Tensors, sizes: Sizes | None) -> tuple[Reconstruction, dict[str, Tensor]]:
        mel, weights = tensors["mel"], tensors["weights"]
        if sizes is not None:
            mel = mel[..., : FRAMES_PER_CODE * math.ceil(sizes.samples / SAMPLES_PER_CODE)]
        num_frames = torch.where(weights > 0, tensors["num_frames"], 0)
        inside = torch.arange(mel.shape[-1], device=mel.device) < num_frames[:, None]
        # Padding must be zeroed: a NaN there would reach the weights through the error, even times 0.
        mel = torch.where(inside[:, None], mel, 0)
        heard = self._disturbed(mel, num_frames, inside) if self.training and self.noise else mel
        out: Reconstruction = self.dvae(heard, num_frames, mel)
        frame_weights, code_weights = inside * weights[:, None], out.mask * weights[:, None]
        return out, {
            "sum": (out.mse.mean(1) * frame_weights).sum(),
            "count": frame_weights.sum(),
            "commitment_sum": (out.commitment * code_weights).sum(),
            "commitment_count": code_weights.sum(),
        }

    def _disturbed(self, mel: Tensor, num_frames: Tensor, inside: Tensor) -> Tensor:
        """Padded mels [B, 80, T] with some of the clips `disturbed`."""
        floor = math.log(DVAE_MEL.log_floor) / self.mel_stats[:, None]
        rows = torch.where(inside[:, None], mel, floor).mT
        frames = pack_frames(rows.flatten(0, 1), torch.full_like(num_frames, mel.shape[2]), mel.shape[2])
        frames = frames._replace(num_frames=num_frames.clamp(min=1).float()[:, None])
        heard = disturbed(frames, self.mel_stats, self.noise).mel.view(rows.shape).mT
        return torch.where(inside[:, None], heard, 0)

    def _usage(self, out: Reconstruction, weights: Tensor) -> Usage:
        """The use of a trained codebook in the last updates, and of a frozen one in this batch."""
        if not self.frozen:
            return self.dvae.codebook.usage()
        book, mask = self.dvae.codebook, out.mask * weights[:, None]
        return book.usage(book.counts_and_sums(out.latents[..., :1], out.codes, mask)[0])

    @torch.no_grad()
    def _accumulate(self, out: Reconstruction, weights: Tensor) -> None:
        latents, weights = out.latents.flatten(0, 1), (out.mask * weights[:, None]).flatten()
        finite = latents.isfinite().all(1)  # a NaN would stay in the running means forever
        latents, weights = torch.where(finite[:, None], latents, 0), torch.where(finite, weights, 0)
        self.counts_and_sums += self.dvae.codebook.counts_and_sums(latents, out.codes, weights)
        num_codes, num_latents = len(self.candidates), len(latents)
        num_drawn = min(num_codes, num_latents)
        drawn = torch.arange(num_drawn, device=latents.device) * num_latents // num_drawn  # evenly over the batch
        drawn_weights = F.pad(weights[drawn], (0, num_codes - num_drawn))
        drawn_latents = F.pad(latents[drawn], (0, 0, 0, num_codes - num_drawn))
        some = drawn_weights.any()  # a batch may consist of filler clips only
        self.candidates.copy_(torch.where(some, drawn_latents, self.candidates))
        self.candidate_weights.copy_(torch.where(some, drawn_weights, self.candidate_weights))

    def _revive(self, latents: Tensor, weights: Tensor, step: int) -> None:
        # Seeded by the step: a resumed run draws the same as an uninterrupted one.
        generator = torch.Generator(latents.device).manual_seed(self.seed + step)
        self.dvae.codebook.revive(latents, generator, weights)
        if self.broadcast is not None:
            for values in self.dvae.codebook.buffers():
                self.broadcast(values)


COSINE_SCALE, COSINE_MARGIN = 10.0, 0.1
"""Factor of the cosines that are compared, and how much closer than others the right crop must be in training."""
VARIED_SAMPLES = 32000  # of a crop that is varied: 2 seconds, so that one played 1.2 times as fast is long enough
SPEEDS = (0.85, 1.2)
CENTRE_RATE = 0.1  # share of the mean embedding that is subtracted in every step
NOISE_DB = (10.0, 40.0)  # level of the speech above the noise
NOISE_TILT = 1.0  # noise falls with the frequency to the power of up to this


class SpeakerRecipe(Recipe):
    """The speaker encoder: a recording to an embedding of its voice, by verification.

    Reads crops float32 [B, 2, samples] at 16 kHz, two recordings of one voice per row, and voices int32 [B], -1
    if both are of one clip. Each crop has to find the other one of its row among those of all other voices.
    Validation loss: cross-entropy per row. "error" is the share of rows that find another voice.

    In training the embeddings of a batch are centred: otherwise the easiest way to compare no voice as wrong is to
    make all of them equal. The bias of the last layer follows, so that the encoder's own are centred too.
    """

    betas = (0.9, 0.99)
    from_scratch_lr, fine_tuning_lr = 1e-3, 1e-4
    is_averaged = False  # the statistics of its batch norms are those of the last weights
    mean: Tensor  # [dim]: of the embeddings of the last micro-batch

    @classmethod
    def build(cls, model: XTTS, settings: Settings, facts: StageFacts) -> SpeakerRecipe:
        if settings.data.batch_size == 1:
            raise ConfigError("Stage speaker compares the clips of a batch: give --batch-size 2 or more")
        encoder = cast(SpeakerEncoder, model.hifigan_decoder.speaker_encoder).requires_grad_(True)
        return cls(encoder, facts.world_size)

    def __init__(self, encoder: SpeakerEncoder, world_size: int = 1) -> None:
        super().__init__()
        self.encoder, self.world_size = encoder, world_size
        encoder.fc.bias.requires_grad_(False)
        self.register_buffer("mean", torch.zeros_like(encoder.fc.bias), persistent=False)

    def forward(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:  # noqa: ARG002 - one signature for all
        clean = self.vary(tensors["crops"])
        return self.losses(self.embed(add_noise(clean)), clean, tensors)

    def losses(self, embeddings: Tensor, clean: Tensor, tensors: Tensors) -> dict[str, Tensor]:  # noqa: ARG002
        """Losses of the embeddings [B, 2, dim] of crops, of which `clean` are those without noise."""
        sums = self._compare(embeddings, tensors)
        loss, count = sums["sum"] / Totals.of(tensors).clips, sums["count"]
        return {"total": loss, "error": mean_of(sums["error_sum"], count)}

    def sums(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:  # noqa: ARG002
        return self._compare(self.embed(tensors["crops"]), tensors)

    def regions(self) -> list[nn.Module]:
        """The residual layers, nearly all the arithmetic."""
        return [self.encoder.get_submodule(f"layer{number}") for number in range(1, 5)]

    def clip_shapes(self, num_samples: int) -> dict[str, tuple[int, ...]]:  # noqa: ARG002 - a crop of the clip
        return {"crops": (1, 2, CROP_SAMPLES), "voices": (1,)}

    @torch.no_grad()
    def after_step(self, step: int) -> None:  # noqa: ARG002
        if self.world_size > 1:
            dist.all_reduce(self.mean)
            # Those of batch norms: evaluation depends on them, training does not.
            statistics = [buffer for name, buffer in self.encoder.named_buffers() if "running_" in name]
            together = torch.cat([buffer.flatten() for buffer in statistics])
            dist.broadcast(together, src=0)
            parts = torch.split(together, [buffer.numel() for buffer in statistics])
            for buffer, values in zip(statistics, parts, strict=True):
                buffer.copy_(values.view_as(buffer))
        self.encoder.fc.bias.sub_(self.mean, alpha=CENTRE_RATE / self.world_size)
        self.mean.zero_()

    def embed(self, crops: Tensor) -> Tensor:
        """Embeddings of length 1, float32 [B, 2, dim]."""
        embeddings: Tensor = self.encoder(crops.flatten(0, 1)).float()
        if self.training:
            mean = embeddings.mean(0)
            self.mean.copy_(mean.detach())
            embeddings = embeddings - mean
        return F.normalize(embeddings, dim=1).view(len(crops), 2, -1)

    def vary(self, crops: Tensor) -> Tensor:
        """A part of each crop [B, 2, VARIED_SAMPLES]; at another speed, half of the rows are other voices."""
        rows, device = len(crops), crops.device
        slowest, fastest = SPEEDS
        speed = slowest + (fastest - slowest) * torch.rand(rows, 1, 1, device=device)
        speed = torch.where(torch.rand(rows, 1, 1, device=device) < 0.5, speed, 1.0)
        room = crops.shape[2] - 1 - speed * VARIED_SAMPLES
        starts = (torch.rand(rows, 2, 1, device=device) * room).floor()
        places = starts + speed * torch.arange(VARIED_SAMPLES, device=device)
        before = places.long()
        return torch.lerp(crops.gather(2, before), crops.gather(2, before + 1), places - before)

    def _compare(self, embeddings: Tensor, tensors: Tensors) -> dict[str, Tensor]:
        voices, weights = tensors["voices"], tensors["weights"]
        with torch.autocast(embeddings.device.type, enabled=False):
            cosines = embeddings[:, 0] @ embeddings[:, 1].t()
        known = (voices >= 0) & (weights > 0)
        right = torch.eye(len(voices), dtype=torch.bool, device=voices.device)
        is_other = known[:, None] & known & (voices[:, None] != voices)
        margin = COSINE_MARGIN if self.training else 0.0
        compared = is_other | right
        logits = (COSINE_SCALE * (cosines - margin * right)).masked_fill(~compared, -math.inf)
        numbers = torch.arange(len(voices), device=voices.device)
        losses = [F.cross_entropy(each, numbers, reduction="none") for each in (logits, logits.t())]
        wrong = cosines.masked_fill(~compared, -math.inf).argmax(1) != numbers
        counted = known * weights
        sums = {"sum": (torch.stack(losses).mean(0) * counted).sum(), "count": counted.sum()}
        return {**sums, "error_sum": (wrong * counted).sum(), "error_count": counted.sum()}


def add_noise(crops: Tensor) -> Tensor:
    """Crops [..., samples] with noise of random level and colour in half of them."""
    shape, device = (*crops.shape[:-1], 1), crops.device
    spectrum = torch.fft.rfft(torch.randn_like(crops))
    tilt = NOISE_TILT * torch.rand(shape, device=device)
    frequency = torch.arange(1, spectrum.shape[-1] + 1, device=device)
    noise: Tensor = torch.fft.irfft(spectrum * frequency**-tilt, n=crops.shape[-1])
    level_db = NOISE_DB[0] + (NOISE_DB[1] - NOISE_DB[0]) * torch.rand(shape, device=device)
    wanted = crops.square().mean(-1, keepdim=True).sqrt() * 10 ** (-level_db / 20)
    scale = wanted / noise.square().mean(-1, keepdim=True).sqrt()
    return crops + torch.where(torch.rand(shape, device=device) < 0.5, scale, 0.0) * noise


TEXT_WEIGHT = 0.01  # weight of the text loss; that of the audio loss is 1
MANY_LAYERS = 8  # from this many layers on, the GPT is compiled layer by layer
LEVEL_DB = 6.0  # a disturbed clip is up to so much louder or softer
WIDE_DIM = 1024  # XTTS-v2's width; a GPT at least this wide gets half the learning rate


@torch.no_grad()
def disturbed(frames: PackedFrames, mel_stats: Tensor, share: float) -> PackedFrames:
    """A `share` of the clips as another room, microphone, level and noise would make them.

    Everything happens to the energies of mel bands: reverberation adds a decaying tail to each band, a microphone
    multiplies bands by a smooth curve and a level, and noise adds energy with another smooth curve.
    """
    num_clips, device = len(frames.num_frames), frames.mel.device
    bands = torch.arange(frames.mel.shape[1], device=device) / frames.mel.shape[1]
    waves = torch.cos(math.pi * bands * torch.arange(1, 4, device=device)[:, None])

    def drawn(low: float, high: float, columns: int = 1) -> Tensor:
        return low + (high - low) * torch.rand(num_clips, columns, device=device)

    def curve(decibels: float) -> Tensor:
        """A random smooth curve over the bands for each clip, as factors."""
        return 10 ** ((drawn(-decibels, decibels, 3) @ waves) / 10)

    with torch.autocast(device.type, enabled=False):
        clip = frames.spread(torch.arange(1.0, num_clips + 1, device=device)[:, None])  # 0 for padding
        dry = (frames.mel.float() * mel_stats).exp()
        tail, decay = dry, frames.spread(10 ** (-6 * HOP_SAMPLES / SAMPLE_RATE / drawn(0.1, 0.6)))
        for shift in (1, 2, 4, 8, 16):  # sums the tails of 32 frames
            is_same = F.pad(clip, (0, 0, shift, 0))[:-shift] == clip
            tail = tail + torch.where(is_same, decay**shift * F.pad(tail, (0, 0, shift, 0))[:-shift], 0)
        energy = dry + frames.spread(drawn(0.0, 0.3)) * (tail - dry)
        energy = energy * frames.spread(curve(4.0) * 10 ** (drawn(-LEVEL_DB, LEVEL_DB) / 10))
        loudness = frames.sum_by_clip(energy.mean(1, keepdim=True)) / frames.num_frames
        noise = frames.spread(loudness * 10 ** (-drawn(1.0, 4.0)) * curve(6.0))  # 10 to 40 decibels below
        energy = energy + noise * (0.5 + torch.rand_like(noise))
        mel = energy.clamp_min(CONDITIONING_MEL.log_floor).log() / mel_stats
        chosen = (frames.spread((drawn(0.0, 1.0) < share).float()) > 0) & (clip > 0)
        return frames._replace(mel=torch.where(chosen, mel, frames.mel))


class GptRecipe(Recipe):
    """The GPT: text and voice to codes.

    Reads ids int32 [B, T] and num_ids [B], codes int32 [B, N] and num_codes [B], mel float32 [frames, 80], packed,
    and num_frames [B]; `sizes` bounds each. Validation loss: cross-entropy per code or STOP.
    """

    mel_stats: Tensor
    betas = (0.9, 0.96)
    from_scratch_lr, fine_tuning_lr, adapter_lr = 2e-4, 5e-6, 1e-4

    @classmethod
    def build(cls, model: XTTS, settings: Settings, facts: StageFacts) -> GptRecipe:
        """With `lora_rank`, only adapters are trained, and the embeddings and logits of new tokens."""
        gpt, training = model.gpt, settings.training
        gpt.requires_grad_(True)
        gpt.checkpointing = settings.model.gradient_checkpointing
        gpt.set_dropout(settings.model.dropout or 0.0)
        if settings.model.lora_rank:
            new_tokens = ("text_embedding", "text_head") if facts.has_new_tokens else ()
            add_adapters(gpt, settings.model.lora_rank, train_also=new_tokens)
        recipe = cls(gpt, training.label_smoothing)
        recipe.code_noise, recipe.text_dropout = training.code_noise or 0.0, training.text_dropout or 0.0
        recipe.reference_noise, recipe.mel_stats = training.reference_noise, model.mel_stats
        return recipe

    def __init__(self, gpt: GPT, label_smoothing: float = 0.0, max_frames: int = MAX_CROP_FRAMES) -> None:
        super().__init__()
        self.gpt, self.label_smoothing, self.max_frames = gpt, label_smoothing, max_frames
        self.code_noise, self.text_dropout, self.reference_noise = 0.0, 0.0, 0.0  # shares of codes, texts, clips
        self.register_buffer("mel_stats", torch.ones(gpt.dims.mel_channels), persistent=False)

    def forward(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        losses, totals = self._losses(tensors, sizes, self.label_smoothing), Totals.of(tensors)
        text = TEXT_WEIGHT * losses.text_sum / totals.text_targets
        return {
            "total": text + losses.audio_sum / totals.audio_targets,
            "text_loss": mean_of(losses.text_sum, losses.text_count),
            "audio_loss": mean_of(losses.audio_sum, losses.audio_count),
        }

    def sums(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        """Never with label smoothing, so that runs with and without it can be compared."""
        losses = self._losses(tensors, sizes, label_smoothing=0.0)
        text = {"text_sum": losses.text_sum, "text_count": losses.text_count}
        return {"sum": losses.audio_sum, "count": losses.audio_count, **text}

    @torch.no_grad()
    def pictures(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        """Reference mel and alignment of text and codes of the first clip, and how often each code is a target."""
        codes = tensors["codes"][:, : math.ceil(sizes.samples / SAMPLES_PER_CODE)]
        inside = torch.arange(codes.shape[1], device=codes.device) < tensors["num_codes"][:, None]
        counts = torch.bincount(codes[inside].long(), minlength=self.gpt.dims.num_codes)
        lengths = {name: tensors[name][:1] for name in ("num_frames", "num_ids", "num_codes")}
        num_frames, num_ids, num_codes = (int(length) for length in lengths.values())
        mel = tensors["mel"][:num_frames]
        voice = self.gpt.condition(pack_frames(mel, lengths["num_frames"], self.max_frames))
        said = Said(voice, tensors["ids"][0, :num_ids].tolist(), codes[0, :num_codes].tolist())
        (attention,) = text_attention(self.gpt, said)
        return {"reference_voice": mel.t(), "alignment": sharpest(attention).t(), "code_usage": counts}

    def regions(self) -> list[nn.Module]:
        """The blocks and the perceiver, nearly all the arithmetic: as one graph, 30 layers compile a minute."""
        if self.gpt.dims.layers < MANY_LAYERS:  # it compiles quickly, and the rest matters more
            return [self]
        return [*self.gpt.gpt.h, *self.gpt.conditioning_encoder.attn, self.gpt.conditioning_perceiver]

    def learning_rate(self, fine_tuning: bool) -> float:
        if not all(parameter.requires_grad for parameter in self.gpt.parameters()):
            return self.adapter_lr
        is_wide = self.gpt.dims.dim >= WIDE_DIM and not fine_tuning
        return super().learning_rate(fine_tuning) / (2 if is_wide else 1)

    def _losses(self, tensors: Tensors, sizes: Sizes, label_smoothing: float) -> Losses:
        frames = pack_frames(tensors["mel"][: sizes.frames], tensors["num_frames"], self.max_frames)
        if self.training and self.reference_noise:
            frames = disturbed(frames, self.mel_stats, self.reference_noise)
        ids, num_ids = tensors["ids"][:, : sizes.ids], tensors["num_ids"]
        if self.training and self.text_dropout:  # as an empty text, with START and STOP
            num_ids = torch.where(torch.rand(num_ids.shape, device=num_ids.device) < self.text_dropout, 0, num_ids)
        codes = tensors["codes"][:, : math.ceil(sizes.samples / SAMPLES_PER_CODE)]
        tokens = (ids, num_ids, codes, tensors["num_codes"])
        packed = pack(self.gpt.dims, frames, *tokens, budget=sizes.tokens, weights=tensors["weights"])
        if self.training and self.code_noise:  # replaces some input codes at random; targets are unchanged
            token, num_codes = packed.token, self.gpt.dims.num_codes
            is_code = (packed.kind == AUDIO) & (token < num_codes)
            is_other = is_code & (torch.rand(token.shape, device=token.device) < self.code_noise)
            packed = packed._replace(token=torch.where(is_other, torch.randint_like(token, num_codes), token))
        losses: Losses = self.gpt(packed, label_smoothing)
        return losses


FEATURE_WEIGHT, MEL_WEIGHT = 2.0, 45.0  # HiFi-GAN's loss weights; that of the adversarial loss is 1
STFT_WEIGHT = 10.0  # of the spectrograms, before there are discriminators
LOSS_MEL = MelSpec(
    sample_rate=OUTPUT_SAMPLE_RATE, fft_samples=1024, window_samples=1024, hop_samples=256, window="hann",
    num_mels=80, max_hz=OUTPUT_SAMPLE_RATE / 2, equal_area=True, log_floor=1e-8, floor_is_added=False,
)  # fmt: skip
"""The mel that waveforms are compared in: up to the Nyquist frequency, down to about 16-bit noise."""
LOSS_MELS = tuple(
    replace(LOSS_MEL, fft_samples=size, window_samples=size, hop_samples=size // 4, num_mels=mels)
    for size, mels in ((1024, 80), (2048, 160), (512, 40), (256, 20))
)
"""The mels of the training loss, from long windows, which resolve pitch, to short ones, which resolve onsets."""
FLOW, FIRST_LAYER, GENERATOR, ADVERSARIAL = "flow", "first layer", "generator", "adversarial"


class Phases(NamedTuple):
    """The steps at which the phases of the decoder stage begin; the first layer alone begins at 0, if at all."""

    generator: int  # the whole generator, without discriminators
    adversarial: int
    full: int  # the adversarial losses have their full weights, after a linear ramp

    @classmethod
    def of(cls, facts: StageFacts) -> Phases:
        """Shares of the steps of the stage, with upper bounds, so that a prolonged run hardly goes back."""
        tenth = facts.total_steps // 10
        generator = min(tenth // 2, 500) if facts.warm_start else 0
        alone = min(tenth, 2000) if facts.warm_start else 0 if facts.fine_tuning else min(3 * tenth, 20_000)
        return cls(generator, generator + alone, generator + alone + min(tenth, 2000))

    def at(self, step: int) -> tuple[str, float]:
        """The phase of a step, and the share of the adversarial losses in it."""
        if step < self.generator:
            return FIRST_LAYER, 0.0
        if step < self.adversarial:
            return GENERATOR, 0.0
        return ADVERSARIAL, min((step + 1 - self.adversarial) / max(self.full - self.adversarial, 1), 1.0)


class DecoderRecipe(Recipe):
    """The vocoder: the GPT's latents, or mels, and a speaker embedding to a waveform, trained as a GAN.

    Reads latents float32 [B, L + 2 * MARGIN_CODES, dim], wave float32 [B, num_samples(L)] at 24 kHz, and speaker
    float32 [B, speaker_dim]. Validation loss: distance of log-mels per clip. The speaker encoder is frozen.
    The phases:

        first layer   with the weights of a HiFi-GAN: the first layer learns to return what HiFi-GAN's own returns
        generator     the whole generator, compared in mels and spectrograms
        adversarial   with discriminators

    A decoder that reads mels too has a flow, and a generator for HiFi-GAN's mels. If the generator is already
    trained, the flow is trained alone, in a single phase. Otherwise the generator has the last two phases, with
    mels of the recordings, and the flow is trained in both. The validation loss is that of the flow.
    """

    betas = (0.8, 0.99)
    # Not far apart: the discriminators are new in both cases.
    from_scratch_lr, fine_tuning_lr = 2e-4, 1e-4
    flow_lr = 5e-4
    clips_at_once = 1  # 0.7 GB of activations each in `tiny`
    ramp: Tensor  # share of the adversarial losses, a tensor because a captured step reads it

    @classmethod
    def build(cls, model: XTTS, settings: Settings, facts: StageFacts) -> DecoderRecipe:  # noqa: ARG003
        generator = model.hifigan_decoder.waveform_decoder
        if generator.flow is not None and (facts.warm_start or facts.fine_tuning):
            generator.flow.requires_grad_(True)
            return cls(model.hifigan_decoder, None, facts)
        generator.requires_grad_(True)
        # Discriminators far stronger than the generator teach it nothing, and take most of the time.
        scale = min(model.dims.vocoder_channels / XTTSDims().vocoder_channels, 1.0)
        discriminators = Discriminators(
            period_widths=[max(int(scale * width), 4) for width in PERIOD_WIDTHS],
            resolution_width=max(int(scale * RESOLUTION_WIDTH), 4),
        )
        return cls(model.hifigan_decoder, discriminators, facts)

    def __init__(
        self,
        vocoder: HifiGanDecoder,
        discriminators: Discriminators | None,
        facts: StageFacts = StageFacts(),  # noqa: B008 - immutable
    ) -> None:
        """Without discriminators only the flow is trained."""
        super().__init__()
        self.generator, self.discriminators = vocoder.waveform_decoder, discriminators
        self.log_mels = nn.ModuleList(LogMel(spec) for spec in LOSS_MELS)
        self.phases, self.phase = Phases.of(facts), ADVERSARIAL if discriminators else FLOW
        self.lead_steps = self.phases.generator if discriminators else 0
        channels = self.generator.conv_pre.out_channels
        self.teacher = HifiGanInput(channels) if facts.warm_start else None
        self.hifigan_mel = HifiGanMel() if self.generator.reads_mels else None
        self.register_buffer("ramp", torch.ones(()), persistent=False)

    def begin_step(self, step: int) -> None:
        """Set the phase of the step: parts that it does not train have no gradients."""
        if self.discriminators is None:
            return
        phase, ramp = self.phases.at(step)
        self.ramp.fill_(ramp)
        if phase != self.phase:
            self.phase = phase
            self.generator.requires_grad_(phase != FIRST_LAYER)
            self.generator.conv_pre.requires_grad_(True)
            self.discriminators.requires_grad_(phase == ADVERSARIAL)

    def forward(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:  # noqa: ARG002 - one signature for all
        """The loss "disc" has gradients for the discriminators only, the other losses for the generator only."""
        found = {}
        if self.generator.flow is not None:
            times = torch.rand(len(tensors["wave"]), device=tensors["wave"].device)
            found["flow"] = self._flow_loss(tensors, times, torch.randn_like)
        if self.phase == FIRST_LAYER:
            found["first_layer"] = self._teaching(*self._first_layer(tensors))
        elif self.phase != FLOW:
            real, first = self._first_layer(tensors)
            fake = self.generator.body(first, self._speaker(tensors))
            mels = [_distance(log_mel, real, fake) for log_mel in self.log_mels]
            found["mel_loss"] = sum(mels[1:], mels[0]) / len(mels)
            is_last = self.phase == ADVERSARIAL
            found |= self._adversarial(real, fake) if is_last else {"stft": self._stft_distance(real, fake)}
        factors = {"flow": 1.0, "mel_loss": MEL_WEIGHT, "stft": STFT_WEIGHT, "disc": 1.0, "first_layer": 1.0}
        ramps = {"gen_adv": self.ramp, "feature_matching": FEATURE_WEIGHT * self.ramp}
        weights, totals = tensors["weights"], Totals.of(tensors)
        absent = torch.zeros_like(weights)  # every phase logs the same names
        by_name = {name: (found.get(name, absent) * weights).sum() for name in self._loss_names(factors, ramps)}
        total = torch.stack([ramps.get(n, factors.get(n, 1.0)) * loss for n, loss in by_name.items()]).sum()
        means = {name: mean_of(loss, weights.sum()) for name, loss in by_name.items()}
        return {"total": total / totals.clips, **means}

    def _loss_names(self, *tables: Mapping[str, object]) -> list[str]:
        if self.discriminators is None:
            return ["flow"]
        unused = {"first_layer"} if self.teacher is None else set()
        unused |= {"flow"} if self.generator.flow is None else set()
        return [name for table in tables for name in table if name not in unused]

    def sums(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:  # noqa: ARG002
        weights = tensors["weights"]
        if self.generator.flow is None:
            losses = _distance(self.log_mels[0], *self.waves(tensors))
        else:  # always the same times and noise
            every = [torch.full_like(weights, time) for time in (0.125, 0.375, 0.625, 0.875)]
            found = [
                self._flow_loss(tensors, times, lambda mel: noise_of(mel.shape[2]).to(mel).expand_as(mel))
                for times in every
            ]
            losses = torch.stack(found).mean(0)
        return {"sum": (losses * weights).sum(), "count": weights.sum()}

    @torch.no_grad()
    def pictures(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:  # noqa: ARG002
        first = {name: tensors[name][:1] for name in ("latents", "wave", "speaker", "weights")}
        real, fake = (self.log_mels[0](wave.float())[0, 0] for wave in self.waves(first))
        return {"mel": real, "generated": fake}

    def parts(self) -> dict[str, nn.Module]:
        if self.discriminators is None:
            return {"flow": self.generator}
        return {"generator": self.generator, "discriminators": self.discriminators}

    def extra_modules(self) -> dict[str, nn.Module]:
        extra = {"discriminators": self.discriminators, "teacher": self.teacher}
        return {name: module for name, module in extra.items() if module is not None}

    def learning_rate(self, fine_tuning: bool) -> float:
        own = super().learning_rate(fine_tuning)
        return self.flow_lr if self.discriminators is None and not fine_tuning else own

    def clip_shapes(self, num_samples: int) -> dict[str, tuple[int, ...]]:  # noqa: ARG002 - a segment of the clip
        latents, speaker = self.generator.row_channels, self.generator.cond_layer.in_channels
        codes = segment_codes(self.generator.reads_mels)
        shapes: dict[str, tuple[int, ...]] = {"latents": (1, codes + 2 * MARGIN_CODES, latents)}
        return shapes | {"wave": (1, num_samples_of(codes)), "speaker": (1, speaker), "segment_codes": (1, codes)}

    def waves(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Real and generated waveforms, [B, 1, N] each; filler clips are silent."""
        speaker = self._speaker(tensors)
        if self.generator.flow is None:
            real, first = self._first_layer(tensors)
            return real, self.generator.body(first, speaker)
        real, frames = self._real_and_frames(tensors)
        return real, self.generator(self.generator.flow.draw(frames, speaker), speaker)

    def _real_and_frames(self, tensors: Tensors, reach: int = 0) -> tuple[Tensor, Tensor]:
        """Real waveforms [B, 1, N], and the frames of their latents and mels with `reach` more on either side."""
        present = (tensors["weights"] > 0)[:, None, None]
        latents = torch.where(present, tensors["latents"], 0)
        real = torch.where(present, tensors["wave"].unsqueeze(1), 0)
        start = frames_of(MARGIN_CODES)
        end = start + real.shape[-1] // SAMPLES_PER_FRAME
        return real, HifiGanDecoder.frames(latents, self.generator.reads_mels)[..., start - reach : end + reach]

    def _first_layer(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Real waveforms [B, 1, N], and the output of the generator's first layer, [B, channels, N // 256]."""
        if self.hifigan_mel is not None:
            return self._short_segment(self._real_and_frames(tensors)[0])
        # The first layer sees real neighbours at both ends of the segment; its own padding is cut off.
        reach = self.generator.conv_pre.kernel_size[0] // 2
        real, frames = self._real_and_frames(tensors, reach)
        return real, self.generator.conv_pre(frames)[..., reach:-reach]

    def _short_segment(self, real: Tensor) -> tuple[Tensor, Tensor]:
        """A random stretch of SEGMENT_CODES of each waveform, and the output of the first layer for its mel."""
        assert self.hifigan_mel is not None
        mel = self.hifigan_mel(real)
        length = min(num_frames(SEGMENT_CODES), mel.shape[2])
        first = torch.rand(len(real), 1, 1, device=real.device) * (mel.shape[2] - length + 1)
        places = first.long() + torch.arange(length, device=real.device)
        waves = real.view(len(real), -1, SAMPLES_PER_FRAME).gather(1, places.mT.expand(-1, -1, SAMPLES_PER_FRAME))
        return waves.view(len(real), 1, -1), self.generator.conv_pre(
            mel.gather(2, places.expand(-1, mel.shape[1], -1))
        )

    def _flow_loss(self, tensors: Tensors, times: Tensor, noise_like: Callable[[Tensor], Tensor]) -> Tensor:
        """Loss of the flow, [B], up to the end of the clip, without ends whose mels lack their neighbours."""
        assert self.hifigan_mel is not None and self.generator.flow is not None
        real, frames = self._real_and_frames(tensors)
        target = self.hifigan_mel(real)
        errors = self.generator.flow.loss(target, frames, self._speaker(tensors), noise_like(target), times)
        codes = tensors["segment_codes"]
        code = torch.arange(errors.shape[2], device=codes.device) * codes.shape[1] // errors.shape[2]
        inside = (codes[:, code] >= 0)[:, None, _END_FRAMES:-_END_FRAMES].float()
        errors = errors.mean(1, keepdim=True)[..., _END_FRAMES:-_END_FRAMES]
        return (errors * inside).sum((1, 2)) / inside.sum((1, 2)).clamp_min(LEAST)

    def _speaker(self, tensors: Tensors) -> Tensor:
        """Speaker embeddings [B, speaker_dim, 1], zeros for filler clips."""
        return torch.where((tensors["weights"] > 0)[:, None, None], tensors["speaker"].unsqueeze(-1), 0)

    def _adversarial(self, real: Tensor, fake: Tensor) -> dict[str, Tensor]:
        assert self.discriminators is not None
        real_outputs, fake_outputs = self.discriminators(real, fake.detach())
        # The weights are passed as constants: switching `requires_grad` off and on cannot be compiled.
        generated = [
            functional_call(network, {name: weight.detach() for name, weight in network.named_parameters()}, fake)
            for network in self.discriminators.networks
        ]
        return {
            "gen_adv": generator_loss(generated),
            "feature_matching": feature_matching(real_outputs, generated),
            "disc": discriminator_loss(real_outputs, fake_outputs),
        }

    def _stft_distance(self, real: Tensor, fake: Tensor) -> Tensor:
        """Distance of magnitudes relative to their norm, and of their logarithms, over the resolutions, [B]."""
        assert self.discriminators is not None
        distances: list[Tensor] = []
        for network in self.discriminators.resolutions:
            target, found = (network.magnitudes(wave) for wave in (real, fake))  # type: ignore[operator]
            error, norm = (part.flatten(1).norm(dim=1) for part in (found - target, target))
            relative = error / norm.clamp_min(1.0)  # silence has no norm
            distances.append(relative + by_clip((found / target).log().abs()))
        return sum(distances[1:], distances[0]) / len(distances)

    def _teaching(self, real: Tensor, first: Tensor) -> Tensor:
        """Distance from HiFi-GAN's first layer, [B], without the ends, whose mels do not see their neighbours."""
        assert self.teacher is not None
        target: Tensor = self.teacher(real)
        return by_clip((first.float() - target.float())[..., _END_FRAMES:-_END_FRAMES].abs())


_END_FRAMES = 5


def _distance(log_mel: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """L1 distance of the log-mels, [B]; halved, because HiFi-GAN compares magnitudes, and these are powers."""
    target: Tensor = log_mel(real)
    return by_clip((log_mel(fake) - target).abs()) / 2


RECIPES: dict[str, type[Recipe]] = {
    "dvae": DvaeRecipe,
    "speaker": SpeakerRecipe,
    "gpt": GptRecipe,
    "decoder": DecoderRecipe,
}


def useful_flops(recipe: Recipe, clips: ClipSet) -> float | None:
    """Approximate operations of training on one clip of mean length, without padding and recomputation.

    In the GPT each weight takes two per token in the forward pass, two for the gradients of activations, and two
    for its own gradient if it is trained; attention is not counted. In the other recipes all matrix products and
    convolutions of a step on one clip are counted, without computing them.
    """
    if not isinstance(recipe, GptRecipe):
        num_samples, device = (
            max(int(clips.num_samples.mean()), SAMPLES_PER_CODE),
            next(recipe.parameters()).device,
        )
        if not (shapes := recipe.clip_shapes(num_samples)):
            return None
        shapes |= {"weights": (1,), "totals": (len(Totals._fields),)}
        counter, shapes_only = FlopCounterMode(display=False), FakeTensorMode(allow_non_fake_inputs=True)
        state: dict[str, Tensor] = {**dict(recipe.named_parameters()), **dict(recipe.named_buffers())}
        state = {name: shapes_only.from_tensor(tensor) for name, tensor in state.items()}
        with torch.compiler.set_stance("force_eager"), shapes_only, counter:
            batch = {name: torch.ones(shape, device=device) for name, shape in shapes.items()}
            functional_call(recipe, state, (batch, Sizes(0, 0, num_samples, 0)))["total"].backward()
        return float(counter.get_total_flops())
    tables = [module for module in recipe.modules() if isinstance(module, nn.Embedding)]
    embeddings = {id(parameter) for table in tables for parameter in table.parameters()}
    matrices = [p for p in recipe.parameters() if p.ndim > 1 and id(p) not in embeddings]
    weights, trained = sum(p.numel() for p in matrices), sum(p.numel() for p in matrices if p.requires_grad)
    tokens = float(packed_tokens(clips.num_ids, clips.num_samples).mean())
    return (4 * weights + 2 * trained) * tokens
