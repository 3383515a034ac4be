"""The discrete VAE: mel spectrogram to one code for every four frames, and back.

    mel [B, 80, T] ─ encoder ─► latents [B, T', 512] ─ nearest of 1024 vectors ─► codes [B, T'] ─ decoder ─► mel

with T' = ceil(ceil(T / 2) / 2). The codes are what the GPT reads and predicts. The encoder and the decoder are
trained by gradients, the codebook (`codebook`) by running means: `update_codebook`, which the recipe calls.

Clips of a batch are as long as the longest; with `num_frames` each is treated as if it were alone: what stands
behind it is silenced before every convolution that could look there, so its codes do not depend on its company.
How a mel is made, which loss weights training uses and when dead codes are looked for is decided elsewhere.
Nothing here waits for the device, and all shapes depend on the shape of the input alone. Attribute names are
those of XTTS-v2's `dvae.pth`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from myxtts.config import HOP_SAMPLES, SAMPLES_PER_CODE

DEAD_SHARE, FRESH_SHARE = 0.01, 0.1
"""Of the mean code's use: below the one a code is dead, with the other it starts again. Between them lie about
230 updates, in which a fresh code must be chosen; started as a mean code it would be missed for twice as long."""

InPlace = Callable[[Tensor], object]
"""Changes a tensor in place on every process alike: a sum over all (`all_reduce`) or one's value for all."""


class Usage(NamedTuple):
    """How evenly the codebook is used, over about the last hundred updates; tensors on the codebook's device."""

    counts: Tensor
    """Mean number of latents per update that chose each code, [num_tokens]."""
    used: Tensor
    """Number of codes that are not dead."""
    perplexity: Tensor
    """exp(entropy) of the choice: `num_tokens` when all codes are used alike, 1 when only one is."""


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

    @property
    def is_trained(self) -> bool:
        """Whether a latent ever chose a code: until then the vectors are chance."""
        return bool(self.cluster_size.any())

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
        self,
        latents: Tensor,
        codes: Tensor,
        mask: Tensor | None = None,
        all_reduce: InPlace | None = None,
        decay: float | None = None,
    ) -> None:
        """Moves every vector towards the mean of the latents that chose it.

        latents [..., dim], codes [...], mask [...] with 0 for what does not count. `all_reduce` adds its argument
        up over the processes; it is called once, so that all of them make the same step. A `decay` lower than the
        codebook's own follows latents that still move fast.
        """
        decay = self.decay if decay is None else decay
        with torch.autocast(latents.device.type, enabled=False):
            points, one_hot = latents.flatten(0, -2).float(), self._one_hot(codes, mask)
            # A matrix product, not index_add_: its order of summation is fixed, so a resumed run is identical.
            counts_and_sums = torch.cat([one_hot.sum(0, keepdim=True), points.t() @ one_hot])
        if all_reduce is not None:
            all_reduce(counts_and_sums)
        self.cluster_size.lerp_(counts_and_sums[0], 1 - decay)
        self.embed_avg.lerp_(counts_and_sums[1:], 1 - decay)
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


FRAMES_PER_CODE = SAMPLES_PER_CODE // HOP_SAMPLES
"""Mel frames that one code stands for: two layers of stride 2."""


class Reconstruction(NamedTuple):
    """What `DVAE.forward` returns; T is cut to whole codes, T' = T / 4."""

    reconstruction: Tensor
    """[B, channels, T]"""
    mse: Tensor
    """Squared error of every element, [B, channels, T] in float32; the mean of it is the loss."""
    commitment: Tensor
    """Mean squared distance of each latent from its code's vector, [B, T'], 0 behind a clip: it pulls the encoder
    towards the codebook."""
    latents: Tensor
    """What was quantised, detached, [B, T', codebook_dim] in float32: for `update_codebook` and `revive`."""
    codes: Tensor
    """[B, T'] int64"""
    mask: Tensor
    """[B, T'] in float32: 1 where a code stands for frames of its clip, 0 behind it."""


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

    def encode(self, mel: Tensor, num_frames: Tensor | None = None) -> Tensor:
        """Codes [B, ceil(T / 4)] of a mel [B, channels, T]; no gradient passes through them.

        Clips shorter than T need `num_frames` [B]; codes behind ceil(num_frames / 4) are meaningless.
        """
        with torch.no_grad():
            return self.codebook.nearest(self._latents(mel, num_frames))

    def decode(self, codes: Tensor) -> Tensor:
        """Mel [B, channels, 4 T'] that the codes [B, T'] stand for."""
        return self._mel(self.codebook.vectors(codes))

    def forward(self, mel: Tensor, num_frames: Tensor | None = None) -> Reconstruction:
        """A mel [B, channels, T] through the codes and back; the frames after the last whole code are cut off.

        With `num_frames` [B] what stands behind a clip takes no part.
        """
        mel = mel[..., : mel.shape[-1] // FRAMES_PER_CODE * FRAMES_PER_CODE]
        latents = self._latents(mel, num_frames)
        codes = self.codebook.nearest(latents.detach())
        vectors = self.codebook.vectors(codes)
        # Straight through: forwards the vectors, backwards as if the latents had gone to the decoder.
        quantised = latents + (vectors - latents).detach() if self.training else vectors
        mask = latents.new_ones(codes.shape)
        if num_frames is not None:
            mask = _inside(codes.shape[1], _num_codes(num_frames)).squeeze(2).float()
        reconstruction = self._mel(quantised, num_frames)
        commitment = (vectors - latents).square().mean(dim=-1) * mask
        mse = (reconstruction.float() - mel.float()).square()
        return Reconstruction(reconstruction, mse, commitment, latents.detach(), codes, mask)

    def update_codebook(
        self,
        latents: Tensor,
        codes: Tensor,
        mask: Tensor | None = None,
        all_reduce: InPlace | None = None,
        decay: float | None = None,
    ) -> None:
        """One step of the codebook's running means with what a forward pass returned; see `Codebook.update`."""
        self.codebook.update(latents, codes, mask, all_reduce, decay)

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

    def encode_packed(self, mel: Tensor, inside: Sequence[Tensor]) -> Tensor:
        """Codes [T / 4] of clips behind each other, mel [T, channels]: the same as of each alone, without padding.

        Clips begin at multiples of four frames and have at least one code of silence between them. `inside` says
        what belongs to a clip: of the frames [T], of pairs of frames [T / 2] and of codes [T / 4].
        """
        with torch.no_grad():
            return self.codebook.nearest(self._encode(mel[None], [mask[None, :, None] for mask in inside])[0])

    def _latents(self, mel: Tensor, num_frames: Tensor | None) -> Tensor:
        masks: list[Tensor | None] = [None, None, None]
        if num_frames is not None:
            width, lengths = mel.shape[-1], num_frames
            for level in range(3):
                masks[level] = _inside(width, lengths)
                width, lengths = (width + 1) // 2, (lengths + 1) // 2
        return self._encode(mel.transpose(1, 2), masks)

    def _encode(self, x: Tensor, masks: Sequence[Tensor | None]) -> Tensor:
        """Frames [B, T, channels] to latents; the masks are of all frames, of every second and of every fourth."""
        level = 0
        for layer in self.encoder:
            x = _run(layer, x, masks[level])
            level += isinstance(layer, nn.Sequential)  # stride 2
        # float32 also under autocast: what is compared with the codebook and averaged into it.
        return x.float()

    def _mel(self, vectors: Tensor, num_frames: Tensor | None = None) -> Tensor:
        x, length = vectors, None if num_frames is None else _num_codes(num_frames)
        for layer in self.decoder:
            x = _run(layer, x, None if length is None else _inside(x.shape[1], length))
            if length is not None and isinstance(layer, nn.Sequential):  # every frame twice
                length = length * 2
        return x.transpose(1, 2)


def _run(layer: nn.Module, x: Tensor, inside: Tensor | None) -> Tensor:
    """One layer over frames [B, T, channels], silent outside of `inside`."""
    if isinstance(layer, ResidualBlock):
        out: Tensor = layer(x, inside)
        return out
    x = _silenced(x, inside)
    if not isinstance(layer, nn.Sequential):
        return _convolve(_conv(layer), x)
    first = layer[0]
    hidden: Tensor = first(x) if isinstance(first, RepeatedConv) else _convolve(_conv(first), x)
    return hidden.relu()


def _convolve(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """A convolution of width 1 or 3 over frames [B, T, channels]: one matrix product, neighbours side by side.

    With bf16 beside it this took the codes of 64 clips from 4.8 to 3.6 ms of a training step on an H200.
    """
    if conv.kernel_size[0] == 3:
        num_outputs = (x.shape[1] - 1) // conv.stride[0] + 1
        padded = F.pad(x, (0, 0, 1, 1))
        reach = (num_outputs - 1) * conv.stride[0] + 1
        x = torch.cat([padded[:, first : first + reach : conv.stride[0]] for first in range(3)], dim=-1)
    return F.linear(x, conv.weight.transpose(1, 2).flatten(1), conv.bias)


def _num_codes(num_frames: Tensor) -> Tensor:
    return (num_frames + FRAMES_PER_CODE - 1) // FRAMES_PER_CODE


def _inside(width: int, lengths: Tensor) -> Tensor:
    """[B, width, 1]: where a place belongs to its clip."""
    return (torch.arange(width, device=lengths.device) < lengths[:, None]).unsqueeze(2)


def _silenced(x: Tensor, inside: Tensor | None) -> Tensor:
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
        x = _silenced(x, inside)
        first, _, second, _, third = self.net
        between = _silenced(_convolve(_conv(first), x).relu(), inside)
        return x + _convolve(_conv(third), _convolve(_conv(second), between).relu())


class RepeatedConv(nn.Module):
    """Every frame twice, then a convolution of width 3: upsampling without a transposed convolution's grid."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return _convolve(self.conv, x.repeat_interleave(2, dim=1))


def _conv(module: nn.Module) -> nn.Conv1d:
    assert isinstance(module, nn.Conv1d)
    return module


class UnusedAccumulator(nn.Module):
    """Three buffers that XTTS-v2's file holds and no computation reads: kept so that files load both ways."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.register_buffer("accumulator_index", torch.zeros(1, dtype=torch.long))
        self.register_buffer("accumulator_filled", torch.zeros(1, dtype=torch.long))
        self.register_buffer("accumulator", torch.zeros(100, num_tokens))
