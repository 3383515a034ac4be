"""The discrete VAE: mel spectrogram to one code for every four frames, and back.

    mel [B, 80, T] ─ encoder ─► latents [B, T', 512] ─ nearest of 1024 vectors ─► codes [B, T'] ─ decoder ─► mel

with T' = ceil(ceil(T / 2) / 2). The GPT reads and predicts these codes. Encoder and decoder are trained by
gradients, the `Codebook` by running means, which the recipe updates.

With `num_frames` [B] each clip of a padded batch is encoded as if it were alone: padding is zeroed before every
convolution that could see it. Nothing waits for the device, and all shapes depend only on the input's shape.
Attribute names are those of XTTS-v2's `dvae.pth`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from myxtts.config import HOP_SAMPLES, SAMPLES_PER_CODE

FRAMES_PER_CODE = SAMPLES_PER_CODE // HOP_SAMPLES  # mel frames per code: two layers of stride 2
DEAD_SHARE, FRESH_SHARE = 0.01, 0.1
"""Relative to the mean use of a code: a code used less than the first is dead, a revived code starts with the
second. A revived code that is never chosen is dead again after about 230 updates; starting at the mean, after
twice as many."""

InPlace = Callable[[Tensor], object]
"""A collective that changes a tensor in place: a sum over the processes, or a broadcast from one."""


class Usage(NamedTuple):
    """Use of the codebook over about the last hundred updates, or in a batch; tensors on its device."""

    counts: Tensor  # number of latents assigned to each code, or its mean per update, [num_tokens]
    used: Tensor  # number of codes that are not dead
    perplexity: Tensor  # exp(entropy) of the use: `num_tokens` if all codes are used equally, 1 if only one is


class Codebook(nn.Module):
    """The vectors of the codes and the running means they are computed from. Has no gradients."""

    embed: Tensor
    """The vectors as columns, [dim, num_tokens]: `embed_avg` divided by the smoothed `cluster_size`."""
    cluster_size: Tensor  # running mean of the number of latents per update assigned to each code, [num_tokens]
    embed_avg: Tensor  # running mean of the sum of those latents, [dim, num_tokens]

    def __init__(self, dim: int, num_tokens: int, decay: float = 0.99, eps: float = 1e-5) -> None:
        super().__init__()
        self.decay, self.eps = decay, eps
        vectors = torch.randn(dim, num_tokens)
        self.register_buffer("embed", vectors)
        self.register_buffer("cluster_size", torch.zeros(num_tokens))
        self.register_buffer("embed_avg", vectors.clone())

    @property
    def is_trained(self) -> bool:
        """False for random vectors: no latent was assigned to a code. Some published files lack the counts."""
        return bool(self.cluster_size.any()) or not torch.equal(self.embed, self.embed_avg)

    def nearest(self, latents: Tensor) -> Tensor:
        """Codes [...] of the vectors nearest to latents [..., dim]; ties go to the lowest code."""
        with torch.autocast(latents.device.type, enabled=False):
            points, vectors = latents.flatten(0, -2).float(), self.embed.float()
            # |x - v|² expanded needs one matrix product instead of a [points, dim, codes] difference. |x|² does
            # not depend on the code, but including it rounds near ties as the reference does.
            distances = points.square().sum(1, keepdim=True) - 2 * (points @ vectors)
            distances = distances + vectors.square().sum(0, keepdim=True)
            return distances.argmin(dim=1).view(latents.shape[:-1])

    def vectors(self, codes: Tensor) -> Tensor:
        """The vectors [..., dim] of codes [...]."""
        return F.embedding(codes, self.embed.t())

    def counts_and_sums(self, latents: Tensor, codes: Tensor, mask: Tensor | None = None) -> Tensor:
        """[1 + dim, num_tokens]: the number and the sum of the latents [..., dim] assigned to each code."""
        with torch.autocast(latents.device.type, enabled=False):
            # a comparison rather than F.one_hot, which reads the largest code on the host.
            tokens = torch.arange(len(self.cluster_size), device=codes.device)
            one_hot = (codes.flatten()[:, None] == tokens).float()
            if mask is not None:
                one_hot = one_hot * mask.flatten()[:, None]
            # a matrix product, not index_add_: its order of summation is fixed, so a resumed run is bit-identical.
            return torch.cat([one_hot.sum(0, keepdim=True), latents.flatten(0, -2).float().t() @ one_hot])

    @torch.no_grad()
    def update(
        self,
        latents: Tensor,
        codes: Tensor,
        mask: Tensor | None = None,
        all_reduce: InPlace | None = None,
        decay: float | None = None,
    ) -> None:
        """Move every vector towards the mean of the latents assigned to it.

        latents [..., dim], codes [...], mask [...] with 0 for padding. `all_reduce`, a sum over the processes, is
        called once, so all of them make the same update. A `decay` lower than the codebook's own follows latents
        that still change quickly.
        """
        decay = self.decay if decay is None else decay
        counts_and_sums = self.counts_and_sums(latents, codes, mask)
        if all_reduce is not None:
            all_reduce(counts_and_sums)
        self.cluster_size.lerp_(counts_and_sums[0], 1 - decay)
        self.embed_avg.lerp_(counts_and_sums[1:], 1 - decay)
        # Laplace smoothing: as if each code had been used `eps` times more, with the total unchanged.
        total = self.cluster_size.sum()
        smoothed = (self.cluster_size + self.eps) / (total + self.eps * len(self.cluster_size)) * total
        self.embed.copy_(self.embed_avg / smoothed)

    @torch.no_grad()
    def start_means(self) -> None:
        """Start the running means of a trained codebook that lacks them, as if all its codes were used equally."""
        if not self.cluster_size.any():
            self.cluster_size.fill_(1.0)
            self.embed_avg.copy_(self.embed)

    @torch.no_grad()
    def revive(self, latents: Tensor, generator: torch.Generator, mask: Tensor | None = None) -> Tensor:
        """Move dead codes to randomly drawn latents; returns their number, as a tensor on the device.

        In a new codebook all codes are dead: call this before the first step, or hardly any code will ever be near
        the latents.
        """
        points, num_codes = latents.flatten(0, -2).to(self.embed.dtype), len(self.cluster_size)
        draws = torch.rand(len(points), generator=generator, device=points.device)
        counts = torch.ones_like(draws, dtype=torch.bool) if mask is None else mask.flatten() > 0
        order = torch.where(counts, draws, -1.0).argsort(descending=True)
        # Draw each latent once if there are enough: of two equal vectors, one would never be nearest.
        turns = torch.arange(num_codes, device=points.device) % counts.sum().clamp_min(1)
        fresh = points[order[turns]].t().contiguous()
        mean = self.cluster_size.mean()
        dead = self.cluster_size <= DEAD_SHARE * mean
        start = FRESH_SHARE * torch.where(mean > 0, mean, len(points) / num_codes)
        self.embed.copy_(torch.where(dead, fresh, self.embed))
        self.embed_avg.copy_(torch.where(dead, fresh * start, self.embed_avg))
        self.cluster_size.copy_(torch.where(dead, start, self.cluster_size))
        return dead.sum()

    @torch.no_grad()
    def usage(self, counts: Tensor | None = None) -> Usage:
        """The use of the codes by these counts, or by the running means, which only updates change."""
        counts = self.cluster_size.clone() if counts is None else counts
        entropy = torch.special.entr(counts / counts.sum().clamp_min(self.eps)).sum()
        return Usage(counts, (counts > DEAD_SHARE * counts.mean()).sum(), entropy.exp())


class Reconstruction(NamedTuple):
    """Output of `DVAE.forward`; T is cut to whole codes, T' = T / 4."""

    reconstruction: Tensor  # [B, channels, T]
    mse: Tensor  # squared error of every element, [B, channels, T] in float32; its mean is the loss
    commitment: Tensor
    """Mean squared distance of each latent from its code's vector, [B, T'], 0 for padding. Its gradient pulls the
    encoder towards the codebook."""
    latents: Tensor
    """Latents before quantisation, detached, [B, T', codebook_dim] in float32; input of `Codebook.update`."""
    codes: Tensor  # [B, T'] int64
    mask: Tensor  # [B, T'] in float32: 1 for codes of the clip, 0 for padding


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
        self.channels = channels
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

    def encode(self, mel: Tensor, num_frames: Tensor | None = None) -> Tensor:
        """Codes [B, ceil(T / 4)] of a mel [B, channels, T], meaningless after ceil(num_frames / 4)."""
        with torch.no_grad():
            return self.codebook.nearest(self._latents(mel, num_frames))

    def encode_packed(self, mel: Tensor, inside: Sequence[Tensor]) -> Tensor:
        """Codes [T / 4] of packed clips, mel [T, channels]: the same as for each clip alone, without padding.

        Clips start at multiples of four frames, with at least one code of silence between them. `inside` are masks
        of the frames [T], pairs of frames [T / 2] and codes [T / 4] that belong to a clip.
        """
        with torch.no_grad():
            return self.codebook.nearest(self._encode(mel[None], [mask[None, :, None] for mask in inside])[0])

    def decode(self, codes: Tensor, num_codes: Tensor | None = None) -> Tensor:
        """Mel [B, channels, 4 T'] of codes [B, T'], meaningless after `num_codes` [B]."""
        num_frames = None if num_codes is None else FRAMES_PER_CODE * num_codes
        return self._mel(self.codebook.vectors(codes), num_frames)

    def mel_rows(self, codes: Tensor, mel_norms: Tensor, num_codes: Tensor | None = None) -> Tensor:
        """The log-mels of codes as a row per code, [B, T', 4 channels] in float32: a decoder's input."""
        mel = self.decode(codes, num_codes).float().transpose(1, 2) * mel_norms
        return mel.reshape(len(codes), -1, FRAMES_PER_CODE * self.channels)

    @property
    def reach_codes(self) -> int:
        """Codes to either side that the mel of a code depends on: two by each residual block, 3/4 by the rest."""
        return 2 * sum(isinstance(layer, ResidualBlock) for layer in self.decoder) + 1

    def forward(
        self, mel: Tensor, num_frames: Tensor | None = None, target: Tensor | None = None
    ) -> Reconstruction:
        """Encode and reconstruct a mel [B, channels, T]; frames after the last whole code are cut off.

        The error is that from `target`, without one from the mel itself.
        """
        whole = mel.shape[-1] // FRAMES_PER_CODE * FRAMES_PER_CODE
        mel, target = mel[..., :whole], (mel if target is None else target)[..., :whole]
        latents = self._latents(mel, num_frames)
        codes = self.codebook.nearest(latents.detach())
        vectors = self.codebook.vectors(codes)
        # Straight-through estimator: the vectors forwards, the gradient of the latents backwards.
        quantised = latents + (vectors - latents).detach() if self.training else vectors
        mask = latents.new_ones(codes.shape)
        if num_frames is not None:
            mask = _inside(codes.shape[1], _num_codes(num_frames)).squeeze(2).float()
        reconstruction = self._mel(quantised, num_frames)
        commitment = (vectors - latents).square().mean(dim=-1) * mask
        mse = (reconstruction.float() - target.float()).square()
        return Reconstruction(reconstruction, mse, commitment, latents.detach(), codes, mask)

    def _latents(self, mel: Tensor, num_frames: Tensor | None) -> Tensor:
        masks: list[Tensor | None] = [None, None, None]
        if num_frames is not None:
            width, lengths = mel.shape[-1], num_frames
            for level in range(3):
                masks[level] = _inside(width, lengths)
                width, lengths = (width + 1) // 2, (lengths + 1) // 2
        return self._encode(mel.transpose(1, 2), masks)

    def _encode(self, x: Tensor, masks: Sequence[Tensor | None]) -> Tensor:
        """Frames [B, T, channels] to latents; the masks are for all frames, every second and every fourth."""
        level = 0
        for layer in self.encoder:
            x = _run(layer, x, masks[level])
            level += isinstance(layer, nn.Sequential)  # stride 2
        # float32 even under autocast: latents are compared with the codebook and averaged into it.
        return x.float()

    def _mel(self, vectors: Tensor, num_frames: Tensor | None = None) -> Tensor:
        x, length = vectors, None if num_frames is None else _num_codes(num_frames)
        for layer in self.decoder:
            x = _run(layer, x, None if length is None else _inside(x.shape[1], length))
            if length is not None and isinstance(layer, nn.Sequential):  # doubles the frames
                length = length * 2
        return x.transpose(1, 2)


def _run(layer: nn.Module, x: Tensor, inside: Tensor | None) -> Tensor:
    """Apply one layer to frames [B, T, channels], zeroed outside of `inside`."""
    if isinstance(layer, ResidualBlock):
        out: Tensor = layer(x, inside)
        return out
    x = _zero_outside(x, inside)
    return _convolve(layer[0], x).relu() if isinstance(layer, nn.Sequential) else _convolve(layer, x)


def _convolve(conv: nn.Module, x: Tensor) -> Tensor:
    """A convolution of width 1 or 3 over frames [B, T, channels], as a product with concatenated neighbours.

    Together with bf16 this reduced encoding 64 clips from 4.8 to 3.6 ms of a training step on an H200.
    """
    if isinstance(conv, RepeatedConv):
        conv, x = conv.conv, x.repeat_interleave(2, dim=1)
    assert isinstance(conv, nn.Conv1d)
    if conv.kernel_size[0] == 3:
        num_outputs = (x.shape[1] - 1) // conv.stride[0] + 1
        padded = F.pad(x, (0, 0, 1, 1))
        reach = (num_outputs - 1) * conv.stride[0] + 1
        x = torch.cat([padded[:, first : first + reach : conv.stride[0]] for first in range(3)], dim=-1)
    return F.linear(x, conv.weight.transpose(1, 2).flatten(1), conv.bias)


def _num_codes(num_frames: Tensor) -> Tensor:
    return (num_frames + FRAMES_PER_CODE - 1) // FRAMES_PER_CODE


def _inside(width: int, lengths: Tensor) -> Tensor:
    """[B, width, 1]: True for positions inside the clip."""
    return (torch.arange(width, device=lengths.device) < lengths[:, None]).unsqueeze(2)


def _zero_outside(x: Tensor, inside: Tensor | None) -> Tensor:
    return x if inside is None else torch.where(inside, x, 0)


class ResidualBlock(nn.Module):
    """Two convolutions of width 3 and one of width 1 over frames [B, T, channels], added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 1),
        )

    def forward(self, x: Tensor, inside: Tensor | None = None) -> Tensor:
        x = _zero_outside(x, inside)
        first, _, second, _, third = self.net
        between = _zero_outside(_convolve(first, x).relu(), inside)
        return x + _convolve(third, _convolve(second, between).relu())


class RepeatedConv(nn.Module):
    """Repeats every frame before a convolution of width 3 (in `_convolve`): no checkerboard artefacts."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, 3, padding=1)


class UnusedAccumulator(nn.Module):
    """Three buffers of XTTS-v2's file that no computation reads; kept so that files load in both directions."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.register_buffer("accumulator_index", torch.zeros(1, dtype=torch.long))
        self.register_buffer("accumulator_filled", torch.zeros(1, dtype=torch.long))
        self.register_buffer("accumulator", torch.zeros(100, num_tokens))
