"""The flow that turns the DVAE's mels into HiFi-GAN's: what the codes leave open is drawn, not averaged.

    mels of the DVAE and latents of the GPT, interpolated to 24 kHz [B, 80 + dim, F] ─┐
    noise [B, 80, F] ─ velocity network, STEPS times ─────────────────────────────────┴─► mels of HiFi-GAN

A code stands for 46 ms of speech in 12 bits, which is not enough for every consonant. The GPT's latents know the
text and the reference voice, so they say which one it is.

A network that is trained to return the mel itself returns the mean of all mels that the codes allow, which sounds
muffled. This one is trained by conditional flow matching (Lipman et al. 2023): it returns the direction of the
straight line from noise to a mel. To draw a mel, that direction is followed in a few Euler steps.

Every convolution is a matrix product over a frame and two neighbours. A mel frame therefore depends on `REACH`
frames to either side, and a sentence can be computed in pieces that equal the whole.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from myxtts.model.mel import DVAE_MEL

CHANNELS, INNER_CHANNELS = 320, 768
DILATIONS = (1, 2, 4, 1, 2, 4, 1, 2)  # distances of the two neighbours, by block
TIME_CHANNELS = 64
STEPS = 3  # with 2, the MOS of held-out real voices falls by 0.1; 4 are no better
REACH = STEPS * sum(DILATIONS)
"""Frames to either side that a drawn frame depends on."""
TARGET_MEAN, TARGET_SCALE = -5.5, 2.5  # of HiFi-GAN's log-mels of speech
GIVEN_MEAN, GIVEN_SCALE = -6.0, 4.0  # of the DVAE's, which are of powers
NOISE_FRAMES = 8192  # after which the noise repeats
NUM_OFFSETS = len(DILATIONS) * 2 * CHANNELS
"""Offsets to the scales and shifts of all blocks, which can be learnt for a voice (`synthesis.adaptation`)."""


class MelFlow(nn.Module):
    """The velocity network, and draws from it.

    `given` are the DVAE's mels and the GPT's latents, [B, 80 + latent_dim, F]; HiFi-GAN's mels are [B, 80, F],
    speaker embeddings [B, speaker_dim, 1], or [B, speaker_dim + NUM_OFFSETS, 1] with the offsets of the voices.
    """

    def __init__(self, latent_dim: int, speaker_dim: int) -> None:
        super().__init__()
        mels = DVAE_MEL.num_mels
        self.first, self.latents = nn.Linear(2 * mels, CHANNELS), nn.Linear(latent_dim, CHANNELS, bias=False)
        self.time, self.speaker = nn.Linear(TIME_CHANNELS, CHANNELS), nn.Linear(speaker_dim, CHANNELS)
        self.blocks = nn.ModuleList(_Block(dilation) for dilation in DILATIONS)
        self.norm = nn.LayerNorm(CHANNELS)
        self.last = nn.Linear(CHANNELS, mels)
        for parameter in (*self.last.parameters(), self.latents.weight):
            nn.init.zeros_(parameter)

    def forward(self, mel: Tensor, time: Tensor, given: Tensor, g: Tensor, inside: Tensor | None = None) -> Tensor:
        """The velocity at `time` [B], 0 for noise and 1 for mels; `given` is normalised.

        Frames that are not `inside` [B, F, 1] their sentence are seen as zeros, as those beyond the edges are.
        """
        angles = time[:, None] * torch.exp(torch.arange(TIME_CHANNELS // 2, device=mel.device) * 0.25)
        times = torch.cat([angles.sin(), angles.cos()], 1)
        # An embedding has length 1; its channels should be about as large as those of the time.
        embedding, offsets = g.squeeze(2).tensor_split([self.speaker.in_features], 1)
        condition = F.silu(self.time(times) + self.speaker(embedding * math.sqrt(embedding.shape[1])))
        x = self.first(torch.cat([mel, given[:, : mel.shape[1]]], 1).mT) + self.latents(
            given[:, mel.shape[1] :].mT
        )
        for index, block in enumerate(self.blocks):
            x = block(x, condition, offsets[:, 2 * CHANNELS * index :][:, : 2 * CHANNELS], inside)
        velocity: Tensor = self.last(self.norm(x)).mT
        return velocity

    def loss(self, target: Tensor, given: Tensor, g: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Squared error of the velocity, [B, 80, F]; `target` are mels of HiFi-GAN."""
        mel, place = (target.float() - TARGET_MEAN) / TARGET_SCALE, time[:, None, None]
        between = torch.lerp(noise, mel, place)
        velocity: Tensor = self(between, time, normalised(given), g)
        return (velocity.float() - (mel - noise)).square()

    def draw(self, given: Tensor, g: Tensor, first_frame: int = 0) -> Tensor:
        """Mels of HiFi-GAN; frame i has the noise of frame `first_frame` + i."""
        noise = noise_of(given.shape[2], first_frame).to(given.device)
        mel, given = noise.expand(len(given), -1, -1), normalised(given)
        for step in range(STEPS):
            mel = self.follow(mel, step, given, g)
        return mel * TARGET_SCALE + TARGET_MEAN

    def follow(self, mel: Tensor, step: int, given: Tensor, g: Tensor, inside: Tensor | None = None) -> Tensor:
        """The mel after an Euler step; a frame depends on `REACH` / `STEPS` frames to either side."""
        time = torch.full((len(given),), step / STEPS, device=given.device)
        velocity: Tensor = self(mel, time, given, g, inside)
        return mel + velocity.float() / STEPS


class _Block(nn.Module):
    """A residual block: a frame and its two neighbours at a distance, scaled and shifted by the condition."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.norm = nn.LayerNorm(CHANNELS, elementwise_affine=False)
        self.condition = nn.Linear(CHANNELS, 2 * CHANNELS)
        self.inner, self.outer = nn.Linear(3 * CHANNELS, INNER_CHANNELS), nn.Linear(INNER_CHANNELS, CHANNELS)

    def forward(self, x: Tensor, condition: Tensor, offsets: Tensor, inside: Tensor | None = None) -> Tensor:
        modulation = self.condition(condition)
        if offsets.shape[1]:
            modulation = modulation + offsets
        scale, shift = modulation[:, None].chunk(2, 2)
        hidden = self.norm(x) * (1 + scale) + shift
        if inside is not None:
            hidden = torch.where(inside, hidden, 0)
        padded = F.pad(hidden, (0, 0, self.dilation, self.dilation))
        frames = x.shape[1]
        around = [padded[:, step * self.dilation :][:, :frames] for step in range(3)]
        update: Tensor = self.outer(F.gelu(self.inner(torch.cat(around, 2))))
        return x + update


def normalised(given: Tensor) -> Tensor:
    """The DVAE's log-mels with a mean of about 0 and a deviation of about 1, as the GPT's latents have them."""
    mels, latents = given.float().tensor_split([DVAE_MEL.num_mels], 1)
    return torch.cat([(mels - GIVEN_MEAN) / GIVEN_SCALE, latents], 1)


@cache
def _noise() -> Tensor:
    return torch.randn(DVAE_MEL.num_mels, NOISE_FRAMES, generator=torch.Generator().manual_seed(0))


def noise_of(num_frames: int, first_frame: int = 0) -> Tensor:
    """The noise [80, F] of some frames of a sentence: always the same, so that the same codes sound the same."""
    return _noise()[:, torch.arange(first_frame, first_frame + num_frames) % NOISE_FRAMES]
