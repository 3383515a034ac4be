"""The speaker encoder: who is speaking in a 16 kHz wave, as one vector that the vocoder is conditioned on.

A residual network with squeeze-and-excitation over the log-mel as a picture, and attentive statistics pooling over
time ("H/ASP"). XTTS never trains it: it comes with the published weights and stays frozen. Attribute names are the
published state dict's. It does not know the vocoder, nor where its audio comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from myxtts.model.mel import SPEAKER_MEL, LogMel

BLOCKS_PER_STAGE = (3, 4, 6, 3)
STAGE_STRIDES = (1, 2, 2, 2)
"""Of both mels and time."""
SQUEEZE = 8
ATTENTION_CHANNELS = 128
LEAST_VARIANCE = 1e-5


class SpeakerEncoder(nn.Module):
    """Waves [batch, samples] at 16 kHz to speaker embeddings [batch, proj_dim]."""

    def __init__(
        self, input_dim: int = 64, proj_dim: int = 512, num_filters: Sequence[int] = (32, 64, 128, 256)
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, num_filters[0], kernel_size=3, padding=1)
        self.bn1 = nn.BatchNorm2d(num_filters[0])
        inputs = (num_filters[0], *num_filters[:-1])
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            _stage(num_inputs, num_outputs, num_blocks, stride)
            for num_inputs, num_outputs, num_blocks, stride in zip(
                inputs, num_filters, BLOCKS_PER_STAGE, STAGE_STRIDES, strict=True
            )
        )
        self.torch_spec = LogMel(replace(SPEAKER_MEL, num_mels=input_dim), persistent=True)
        channels = num_filters[-1] * (input_dim // 8)  # the strides divide the mels by eight
        self.attention = nn.Sequential(
            nn.Conv1d(channels, ATTENTION_CHANNELS, kernel_size=1),
            nn.ReLU(),
            nn.BatchNorm1d(ATTENTION_CHANNELS),
            nn.Conv1d(ATTENTION_CHANNELS, channels, kernel_size=1),
            nn.Softmax(dim=2),
        )
        self.fc = nn.Linear(2 * channels, proj_dim)

    def forward(self, wave: Tensor, l2_norm: bool = False) -> Tensor:
        """Embeddings of the waves; the vocoder takes those of length 1 (`l2_norm`)."""
        # Every mel band to mean 0 and variance 1 over the clip: loudness and microphone are not the speaker.
        mel = F.instance_norm(self.torch_spec(wave))
        picture = mel.to(self.conv1.weight.dtype).unsqueeze(1)  # [batch, 1, mels, frames]
        hidden = self.bn1(self.conv1(picture).relu())  # [Q] the ReLU stands before the norm
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        hidden = hidden.flatten(1, 2)  # [batch, channels * mels / 8, frames / 8], a channel's mels together
        pooled = attentive_statistics(hidden, self.attention(hidden))
        embedding: Tensor = self.fc(pooled.to(self.fc.weight.dtype))
        return F.normalize(embedding, dim=1) if l2_norm else embedding


def attentive_statistics(hidden: Tensor, weights: Tensor) -> Tensor:
    """Each channel's mean and deviation over time under its own weights, both [batch, channels, time].

    All means come first, then all deviations. In float32, because a variance is a difference of two sums.
    """
    hidden, weights = hidden.float(), weights.float()
    mean = (hidden * weights).sum(dim=2)
    variance = (hidden.square() * weights).sum(dim=2) - mean.square()
    return torch.cat([mean, variance.clamp(min=LEAST_VARIANCE).sqrt()], dim=1)


def _stage(num_inputs: int, num_outputs: int, num_blocks: int, stride: int) -> nn.Sequential:
    first = _Block(num_inputs, num_outputs, stride)
    return nn.Sequential(first, *(_Block(num_outputs, num_outputs, stride=1) for _ in range(num_blocks - 1)))


class _Block(nn.Module):
    """Two 3x3 convolutions, their channels weighed by squeeze-and-excitation, beside a shortcut."""

    def __init__(self, num_inputs: int, num_outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_inputs, num_outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_outputs)
        self.conv2 = nn.Conv2d(num_outputs, num_outputs, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_outputs)
        self.se = _SqueezeExcitation(num_outputs)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or num_inputs != num_outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(num_inputs, num_outputs, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(num_outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        # [Q] the first ReLU stands before its norm; the second only after the sum.
        hidden = self.bn1(self.conv1(x).relu())
        hidden = self.se(self.bn2(self.conv2(hidden)))
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(hidden + shortcut)


class _SqueezeExcitation(nn.Module):
    """Scales each channel by a number in (0, 1) that is read from the means of all channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(channels, channels // SQUEEZE),
            nn.ReLU(),
            nn.Linear(channels // SQUEEZE, channels),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = self.fc(x.mean(dim=(2, 3)))
        return x * scale[:, :, None, None]
