"""The discrete VAE: mel spectrogram to one code for every four frames, and back.

    mel [B, 80, T] ─ encoder ─► latents [B, T', 512] ─ nearest of 1024 vectors ─► codes [B, T'] ─ decoder ─► mel

with T' = ceil(ceil(T / 2) / 2). The codes are what the GPT reads and predicts. The encoder and the decoder are
trained by gradients, the codebook by running means of the latents that chose each vector (van den Oord et al.,
"Neural Discrete Representation Learning", appendix A.1): `update_codebook`, which the training recipe calls.

Here are the network, its quantiser and the arithmetic of the codebook. How a mel is made, which loss weights
training uses, when dead codes are looked for and how many processes take part is decided elsewhere. Nothing here
waits for the device, and all shapes depend on the shape of the input alone. Attribute names are those of
XTTS-v2's `dvae.pth`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from myxtts.config import HOP_SAMPLES, SAMPLES_PER_CODE

FRAMES_PER_CODE = SAMPLES_PER_CODE // HOP_SAMPLES
"""Mel frames that one code stands for: two layers of stride 2."""

DEAD_SHARE, FRESH_SHARE = 0.01, 0.1
"""Of the mean code's use: below the one a code is dead, with the other it starts again. Between them lie about
230 updates, in which a fresh code must be chosen; started as a mean code it would be missed for twice as long."""

InPlace = Callable[[Tensor], object]
"""Changes a tensor in place on every process alike: a sum over all (`all_reduce`) or one's value for all."""


class Reconstruction(NamedTuple):
    """What `DVAE.forward` returns; T is cut to whole codes, T' = T / 4."""

    reconstruction: Tensor
    """[B, channels, T]"""
    mse: Tensor
    """Squared error of every element, [B, channels, T] in float32; the mean of it is the loss."""
    commitment: Tensor
    """Mean squared distance of the latents from their codes' vectors; pulls the encoder towards the codebook."""
    latents: Tensor
    """What was quantised, detached, [B, T', codebook_dim] in float32: for `update_codebook` and `revive`."""
    codes: Tensor
    """[B, T'] int64"""


class Usage(NamedTuple):
    """How evenly the codebook is used, over about the last hundred updates; tensors on the codebook's device."""

    counts: Tensor
    """Mean number of latents per update that chose each code, [num_tokens]."""
    used: Tensor
    """Number of codes that are not dead."""
    perplexity: Tensor
    """exp(entropy) of the choice: `num_tokens` when all codes are used alike, 1 when only one is."""


class DVAE(nn.Module):
    """Discrete VAE over mel frames; the defaults are XTTS-v2's."""

    def __init__(
        self,
        *,
        channels: int = 80,
        num_tokens: int = 1024,
        codebook_dim: int = 512,
        hidden_dim: int = 512,
        num_resnet_blocks: int = 3,
    ) -> None:
        super().__init__()
        outer, inner = hidden_dim, 2 * hidden_dim
        self.discrete_loss = UnusedAccumulator(num_tokens)
        self.encoder = nn.Sequential(
            nn.Sequential(nn.Conv1d(channels, outer, 3, stride=2, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv1d(outer, inner, 3, stride=2, padding=1), nn.ReLU()),
            *(ResidualBlock(inner) for _ in range(num_resnet_blocks)),
            nn.Conv1d(inner, codebook_dim, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv1d(codebook_dim, inner, 1),
            *(ResidualBlock(inner) for _ in range(num_resnet_blocks)),
            nn.Sequential(RepeatedConv(inner, inner), nn.ReLU()),
            nn.Sequential(RepeatedConv(inner, outer), nn.ReLU()),
            nn.Conv1d(outer, channels, 1),
        )
        self.codebook = Codebook(codebook_dim, num_tokens)

    def encode(self, mel: Tensor) -> Tensor:
        """Codes [B, ceil(ceil(T / 2) / 2)] of a mel [B, channels, T]; no gradient passes through them."""
        with torch.no_grad():
            return self.codebook.nearest(self._latents(mel))

    def decode(self, codes: Tensor) -> Tensor:
        """Mel [B, channels, 4 T'] that the codes [B, T'] stand for."""
        return self._mel(self.codebook.vectors(codes))

    def forward(self, mel: Tensor, mask: Tensor | None = None) -> Reconstruction:
        """A mel [B, channels, T] through the codes and back.

        The frames after the last whole code are cut off. `mask` [B, T // 4] is 1 where a code stands for real
        frames and 0 where it stands for padding, which then does not count in the commitment.
        """
        mel = mel[..., : mel.shape[-1] // FRAMES_PER_CODE * FRAMES_PER_CODE]
        latents = self._latents(mel)
        codes = self.codebook.nearest(latents.detach())
        vectors = self.codebook.vectors(codes)
        # Straight through: forwards the vectors, backwards as if the latents had gone to the decoder.
        quantised = latents + (vectors - latents).detach() if self.training else vectors
        reconstruction = self._mel(quantised)
        distances = (vectors - latents).square().mean(dim=-1)
        commitment = distances.mean() if mask is None else (distances * mask).sum() / mask.sum().clamp_min(1)
        mse = (reconstruction.float() - mel.float()).square()
        return Reconstruction(reconstruction, mse, commitment, latents.detach(), codes)

    def update_codebook(
        self, latents: Tensor, codes: Tensor, mask: Tensor | None = None, all_reduce: InPlace | None = None
    ) -> None:
        """One step of the codebook's running means with what a forward pass returned; see `Codebook.update`."""
        self.codebook.update(latents, codes, mask, all_reduce)

    def revive(
        self,
        latents: Tensor,
        generator: torch.Generator,
        mask: Tensor | None = None,
        dead_share: float = DEAD_SHARE,
        share: InPlace | None = None,
    ) -> Tensor:
        """Moves codes that are hardly chosen onto latents; returns how many there were. See `Codebook.revive`."""
        return self.codebook.revive(latents, generator, mask, dead_share, share)

    def usage(self, dead_share: float = DEAD_SHARE) -> Usage:
        """How evenly the codes have been chosen lately."""
        return self.codebook.usage(dead_share)

    def _latents(self, mel: Tensor) -> Tensor:
        # float32 also under autocast: what is compared with the codebook and averaged into it.
        latents: Tensor = self.encoder(mel)
        return latents.transpose(1, 2).float()

    def _mel(self, vectors: Tensor) -> Tensor:
        mel: Tensor = self.decoder(vectors.transpose(1, 2))
        return mel


class Codebook(nn.Module):
    """The vectors that codes stand for, and the running means they are made of. Never sees a gradient."""

    embed: Tensor
    """The vectors as columns, [dim, num_tokens]: `embed_avg` divided by the smoothed `cluster_size`."""
    cluster_size: Tensor
    """Running mean of the number of latents per update that chose each code, [num_tokens]."""
    embed_avg: Tensor
    """Running mean of the sum of these latents, [dim, num_tokens]."""

    def __init__(self, dim: int, num_tokens: int, decay: float = 0.99, eps: float = 1e-5) -> None:
        super().__init__()
        self.decay, self.eps = decay, eps
        vectors = torch.randn(dim, num_tokens)
        self.register_buffer("embed", vectors)
        self.register_buffer("cluster_size", torch.zeros(num_tokens))
        self.register_buffer("embed_avg", vectors.clone())

    def nearest(self, latents: Tensor) -> Tensor:
        """Codes [...] of the vectors nearest to latents [..., dim]; of equally near ones the lowest code."""
        with torch.autocast(latents.device.type, enabled=False):
            points, vectors = latents.flatten(0, -2).float(), self.embed.float()
            # |x - v|² multiplied out needs one matrix product instead of a [points, dim, codes] difference.
            # |x|² is the same for all codes, but rounds near ties to ties as the reference does.
            distances = points.square().sum(1, keepdim=True) - 2 * (points @ vectors)
            distances = distances + vectors.square().sum(0, keepdim=True)
            return distances.argmin(dim=1).view(latents.shape[:-1])

    def vectors(self, codes: Tensor) -> Tensor:
        """The vectors [..., dim] of codes [...]."""
        return F.embedding(codes, self.embed.t())

    @torch.no_grad()
    def update(
        self, latents: Tensor, codes: Tensor, mask: Tensor | None = None, all_reduce: InPlace | None = None
    ) -> None:
        """Moves every vector towards the mean of the latents that chose it.

        latents [..., dim], codes [...], mask [...] with 0 for what does not count. `all_reduce` adds its argument
        up over the processes; it is called once, so that all of them make the same step.
        """
        with torch.autocast(latents.device.type, enabled=False):
            points, one_hot = latents.flatten(0, -2).float(), self._one_hot(codes, mask)
            # A matrix product, not index_add_: its order of summation is fixed, so a resumed run is identical.
            counts_and_sums = torch.cat([one_hot.sum(0, keepdim=True), points.t() @ one_hot])
        if all_reduce is not None:
            all_reduce(counts_and_sums)
        self.cluster_size.lerp_(counts_and_sums[0], 1 - self.decay)
        self.embed_avg.lerp_(counts_and_sums[1:], 1 - self.decay)
        # Laplace smoothing: as if each code had been chosen `eps` times more, with the total unchanged.
        total = self.cluster_size.sum()
        smoothed = (self.cluster_size + self.eps) / (total + self.eps * len(self.cluster_size)) * total
        self.embed.copy_(self.embed_avg / smoothed)

    @torch.no_grad()
    def revive(
        self,
        latents: Tensor,
        generator: torch.Generator,
        mask: Tensor | None = None,
        dead_share: float = DEAD_SHARE,
        share: InPlace | None = None,
    ) -> Tensor:
        """Moves dead codes onto latents drawn at random; returns how many, as a tensor on the device.

        Dead is a code chosen less than `dead_share` times as often as the mean code. In a codebook that was never
        updated all codes are: call this before the first step, or hardly a code will ever be near the latents.
        `share` gives all processes the draw of one.
        """
        points, num_codes = latents.flatten(0, -2).to(self.embed.dtype), len(self.cluster_size)
        lots = torch.rand(len(points), generator=generator, device=points.device)
        counts = torch.ones_like(lots, dtype=torch.bool) if mask is None else mask.flatten() > 0
        order = torch.where(counts, lots, -1.0).argsort(descending=True)
        # Each latent once while they last: of two equal vectors one would never be chosen.
        turns = torch.arange(num_codes, device=points.device) % counts.sum().clamp_min(1)
        fresh = points[order[turns]].t().contiguous()
        if share is not None:
            share(fresh)
        dead, mean = self._dead(dead_share), self.cluster_size.mean()
        start = FRESH_SHARE * torch.where(mean > 0, mean, len(points) / num_codes)
        self.embed.copy_(torch.where(dead, fresh, self.embed))
        self.embed_avg.copy_(torch.where(dead, fresh * start, self.embed_avg))
        self.cluster_size.copy_(torch.where(dead, start, self.cluster_size))
        return dead.sum()

    @torch.no_grad()
    def usage(self, dead_share: float = DEAD_SHARE) -> Usage:
        """How evenly the codes have been chosen lately; dead as in `revive`."""
        shares = self.cluster_size / self.cluster_size.sum().clamp_min(self.eps)
        entropy = torch.special.entr(shares).sum()
        return Usage(self.cluster_size.clone(), (~self._dead(dead_share)).sum(), entropy.exp())

    def _dead(self, dead_share: float) -> Tensor:
        return self.cluster_size <= dead_share * self.cluster_size.mean()

    def _one_hot(self, codes: Tensor, mask: Tensor | None) -> Tensor:
        # Compared rather than F.one_hot, which reads the largest code on the host.
        tokens = torch.arange(len(self.cluster_size), device=codes.device)
        one_hot = (codes.flatten()[:, None] == tokens).float()
        return one_hot if mask is None else one_hot * mask.flatten()[:, None]


class ResidualBlock(nn.Module):
    """Two convolutions of width 3 and one of width 1, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.net(x)
        return x + changed


class RepeatedConv(nn.Module):
    """Every frame twice, then a convolution of width 3: upsampling without a transposed convolution's grid."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        repeated: Tensor = self.conv(x.repeat_interleave(2, dim=-1))
        return repeated


class UnusedAccumulator(nn.Module):
    """Three buffers that XTTS-v2's file holds and no computation reads: kept so that files load both ways."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.register_buffer("accumulator_index", torch.zeros(1, dtype=torch.long))
        self.register_buffer("accumulator_filled", torch.zeros(1, dtype=torch.long))
        self.register_buffer("accumulator", torch.zeros(100, num_tokens))
