"""The vocoder: the GPT's latents and a speaker embedding to a waveform of 24 kHz.

    latents [B, T, 1024] ─ ×4 ─► mel-frame rate ─ ×24000/22050 ─► 24 kHz frames ─ generator ×256 ─► [B, 1, N]

The generator is HiFi-GAN's (Kong et al. 2020, V1 widths, residual blocks of type 1) with the speaker embedding
added at its entrance and after every upsampling. The two interpolations make its input frames stand for 256
samples at 24 kHz although one latent stands for 1024 samples at 22.05 kHz.

Here are the network and the names of its weights. Where latents and embeddings come from and how it is trained
is decided elsewhere; the discriminators are in `discriminators`. Attribute names are those of XTTS-v2's
`model.pth` below `hifigan_decoder.`, where the speaker encoder is a sibling of `waveform_decoder`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from myxtts.config import HOP_SAMPLES, SAMPLE_RATE, SAMPLES_PER_CODE

OUTPUT_SAMPLE_RATE = 24000
"""Samples per second of what the vocoder speaks."""
UPSAMPLE_RATES, UPSAMPLE_KERNELS = (8, 8, 2, 2), (16, 16, 4, 4)
SAMPLES_PER_FRAME = math.prod(UPSAMPLE_RATES)
"""Samples of output for one frame of the generator's input."""
RESBLOCK_KERNELS, RESBLOCK_DILATIONS = (3, 7, 11), (1, 3, 5)
SLOPE, LAST_SLOPE = 0.1, 0.01
"""Of the leaky ReLUs; before the last convolution XTTS-v2 has PyTorch's default slope, not HiFi-GAN's."""


class HifiGanDecoder(nn.Module):
    """Latents and speaker to waveform; the defaults are XTTS-v2's."""

    def __init__(
        self, *, decoder_input_dim: int = 1024, upsample_initial_channel: int = 512, d_vector_dim: int = 512
    ) -> None:
        super().__init__()
        self.waveform_decoder = Generator(decoder_input_dim, upsample_initial_channel, d_vector_dim)

    def forward(self, latents: Tensor, g: Tensor) -> Tensor:
        """Waveform [B, 1, num_samples(T)] in (-1, 1) of latents [B, T, C] in the voice g [B, d_vector_dim, 1]."""
        wave: Tensor = self.waveform_decoder(self.frames(latents), g)
        return wave

    @staticmethod
    def frames(latents: Tensor) -> Tensor:
        """Latents [B, T, C] as the generator's input [B, C, num_frames(T)].

        Frame i belongs to samples 256 i to 256 i + 255 of the output, so training may cut both alike.
        """
        frames = F.interpolate(latents.transpose(1, 2), scale_factor=_FRAMES_PER_LATENT, mode="linear")
        # By the factor, not to a size: the factor is exact while the number of frames is rounded down.
        return F.interpolate(frames, scale_factor=_FRAME_RATE_RATIO, mode="linear")

    def remove_weight_norm(self) -> None:
        """Puts the normalised weights in place, for inference; the state dict's names then end in `weight`."""
        for module in self.waveform_decoder.modules():
            if is_parametrized(module, "weight"):
                remove_parametrizations(module, "weight", leave_parametrized=True)


_FRAMES_PER_LATENT = SAMPLES_PER_CODE / HOP_SAMPLES
_FRAME_RATE_RATIO = OUTPUT_SAMPLE_RATE / SAMPLE_RATE


def num_frames(num_latents: int) -> int:
    """Frames that the generator gets for so many latents."""
    return math.floor(math.floor(num_latents * _FRAMES_PER_LATENT) * _FRAME_RATE_RATIO)


def num_samples(num_latents: int) -> int:
    """Samples at 24 kHz that so many latents become."""
    return num_frames(num_latents) * SAMPLES_PER_FRAME


class Generator(nn.Module):
    """HiFi-GAN's generator with a speaker: frames [B, C, F] to samples [B, 1, 256 F]."""

    def __init__(self, in_channels: int, initial_channels: int, speaker_dim: int) -> None:
        super().__init__()
        widths = [initial_channels >> (stage + 1) for stage in range(len(UPSAMPLE_RATES))]
        self.conv_pre = nn.Conv1d(in_channels, initial_channels, 7, padding=3)
        self.ups = nn.ModuleList(
            _normed(nn.ConvTranspose1d(2 * width, width, kernel, stride=rate, padding=(kernel - rate) // 2))
            for width, kernel, rate in zip(widths, UPSAMPLE_KERNELS, UPSAMPLE_RATES, strict=True)
        )
        # One flat list, as the names are: block `3 * stage + i` has kernel i.
        self.resblocks = nn.ModuleList(
            DilatedBlock(width, kernel) for width in widths for kernel in RESBLOCK_KERNELS
        )
        self.conv_post = nn.Conv1d(widths[-1], 1, 7, padding=3, bias=False)
        self.cond_layer = nn.Conv1d(speaker_dim, initial_channels, 1)
        self.conds = nn.ModuleList(nn.Conv1d(speaker_dim, width, 1) for width in widths)

    def forward(self, frames: Tensor, g: Tensor) -> Tensor:
        x = self.conv_pre(frames) + self.cond_layer(g)
        kernels = len(RESBLOCK_KERNELS)
        for stage, (up, cond) in enumerate(zip(self.ups, self.conds, strict=True)):
            x = up(F.leaky_relu(x, SLOPE)) + cond(g)
            blocks = self.resblocks[kernels * stage : kernels * (stage + 1)]
            x = sum(block(x) for block in blocks) / kernels
        return torch.tanh(self.conv_post(F.leaky_relu(x, LAST_SLOPE)))


class DilatedBlock(nn.Module):
    """Three times a dilated and a plain convolution, each pair added to its input: one view of the context."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(_conv(channels, kernel, dilation) for dilation in RESBLOCK_DILATIONS)
        self.convs2 = nn.ModuleList(_conv(channels, kernel, dilation=1) for _ in RESBLOCK_DILATIONS)

    def forward(self, x: Tensor) -> Tensor:
        for dilated, plain in zip(self.convs1, self.convs2, strict=True):
            x = x + plain(F.leaky_relu(dilated(F.leaky_relu(x, SLOPE)), SLOPE))
        return x


def _conv(channels: int, kernel: int, dilation: int) -> nn.Module:
    padding = dilation * (kernel - 1) // 2
    return _normed(nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=padding))


def _normed(conv: nn.Conv1d | nn.ConvTranspose1d) -> nn.Module:
    """Weight-normalised, and begun small so that a fresh generator starts near silence, as HiFi-GAN's does."""
    nn.init.normal_(conv.weight, std=0.01)
    weight_norm(conv)
    return conv


def modern_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with `weight_g` and `weight_v`, as older files have them, under today's names."""
    endings = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}
    renamed = {}
    for name, tensor in state.items():
        owner, dot, last = name.rpartition(".")
        renamed[owner + dot + endings.get(last, last)] = tensor
    return renamed
