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

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from myxtts.config import HOP_SAMPLES, SAMPLES_PER_CODE
from myxtts.model.codebook import DEAD_SHARE, Codebook, InPlace, Usage

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
