"""The two discriminators that train the vocoder: one hears periods, one sees spectrograms.

* Multi-period (Kong et al. 2020, "HiFi-GAN", section 2.3): one small network for each of the prime periods 2, 3,
  5, 7 and 11. Each takes every p-th sample, in all p phases, through convolutions of width 5 and stride 3.
* Multi-resolution (Jang et al. 2021, "UnivNet", section 3.3; kept by Lee et al. 2023, "BigVGAN", in place of
  HiFi-GAN's multi-scale discriminator): one small network for each of three magnitude spectrograms. Both papers
  train at 24 kHz, the vocoder's rate, so their FFT sizes, hops and windows are used as they are.

All convolutions but the last of each network are followed by a leaky ReLU; all are weight-normalised. A network
returns its logits and what each hidden layer saw. Which losses are made of them (least squares and feature
matching, say) is the training recipe's business. Only training needs this file: no name here is XTTS-v2's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

PERIODS = (2, 3, 5, 7, 11)
PERIOD_WIDTHS = (32, 128, 512, 1024, 1024)


class Resolution(NamedTuple):
    """How a spectrogram is taken: samples of the FFT, between two frames, and of the Hann window."""

    fft_samples: int
    hop_samples: int
    window_samples: int


RESOLUTIONS = (Resolution(1024, 120, 600), Resolution(2048, 240, 1200), Resolution(512, 50, 240))
"""At 24 kHz windows of 25, 50 and 10 ms, each hopping by about a fifth of itself."""
RESOLUTION_WIDTH = 32
SLOPE = 0.1
_LEAST_POWER = 1e-9
"""Added below the root of a magnitude, whose gradient is infinite at silence."""


class Judgement(NamedTuple):
    """What one network makes of a batch of waveforms."""

    logits: Tensor
    """High for real: [B, judged places]."""
    features: list[Tensor]
    """Activations of the hidden layers, for feature matching: each [B, channels, height, width]."""


class Discriminators(nn.Module):
    """Both discriminators, on real and generated waveforms at once."""

    def __init__(
        self,
        *,
        periods: Sequence[int] = PERIODS,
        period_widths: Sequence[int] = PERIOD_WIDTHS,
        resolutions: Sequence[Resolution] = RESOLUTIONS,
        resolution_width: int = RESOLUTION_WIDTH,
    ) -> None:
        super().__init__()
        self.periods = nn.ModuleList(PeriodDiscriminator(period, period_widths) for period in periods)
        self.resolutions = nn.ModuleList(
            ResolutionDiscriminator(resolution, resolution_width) for resolution in resolutions
        )

    def forward(self, real: Tensor, fake: Tensor) -> tuple[list[Judgement], list[Judgement]]:
        """What each network makes of real and of generated waveforms [B, 1, N], in one pass over both.

        Detach `fake` to train the discriminators. To train the generator, switch off the gradients of these
        parameters: they then cost nothing while those of `fake` pass through.
        """
        return split(self.judge(torch.cat([real, fake])))

    def judge(self, wave: Tensor) -> list[Judgement]:
        """What each network makes of waveforms [B, 1, N]."""
        return [network(wave) for network in (*self.periods, *self.resolutions)]


def split(judgements: Sequence[Judgement]) -> tuple[list[Judgement], list[Judgement]]:
    """Judgements of a batch of two halves as those of its first and those of its second half."""
    halves: tuple[list[Judgement], list[Judgement]] = ([], [])
    for logits, features in judgements:
        pairs = [feature.chunk(2) for feature in features]
        for half, judged in enumerate(logits.chunk(2)):
            halves[half].append(Judgement(judged, [pair[half] for pair in pairs]))
    return halves


class PeriodDiscriminator(nn.Module):
    """Judges the waveform written in rows of `period` samples: what repeats with that period fills columns.

    Kernels are one column wide, so each column is a signal of every p-th sample that never meets the others.
    """

    def __init__(self, period: int, widths: Sequence[int] = PERIOD_WIDTHS) -> None:
        super().__init__()
        self.period = period
        strides = [3] * (len(widths) - 1) + [1]
        self.layers = nn.ModuleList(
            weight_norm(nn.Conv2d(before, width, (5, 1), (stride, 1), padding=(2, 0)))
            for before, width, stride in zip((1, *widths[:-1]), widths, strides, strict=True)
        )
        self.last = weight_norm(nn.Conv2d(widths[-1], 1, (3, 1), padding=(1, 0)))

    def forward(self, wave: Tensor) -> Judgement:
        wave = F.pad(wave, (0, -wave.shape[-1] % self.period), mode="reflect")
        return _judge(wave.view(len(wave), 1, -1, self.period), self.layers, self.last)


class ResolutionDiscriminator(nn.Module):
    """Judges the magnitude spectrogram of one resolution, narrowing time by 2 in three of its layers."""

    window: Tensor

    def __init__(self, resolution: Resolution, width: int = RESOLUTION_WIDTH) -> None:
        super().__init__()
        self.resolution = resolution
        self.register_buffer("window", torch.hann_window(resolution.window_samples), persistent=False)
        # Kernels are (frequency, time); four see nine frames, the last hidden one a square.
        shapes = [((3, 9), (1, 1)), *[((3, 9), (1, 2))] * 3, ((3, 3), (1, 1))]
        self.layers = nn.ModuleList(
            weight_norm(nn.Conv2d(before, width, kernel, stride, padding=(kernel[0] // 2, kernel[1] // 2)))
            for before, (kernel, stride) in zip((1, *[width] * 4), shapes, strict=True)
        )
        self.last = weight_norm(nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, wave: Tensor) -> Judgement:
        return _judge(self.magnitudes(wave).unsqueeze(1), self.layers, self.last)

    def magnitudes(self, wave: Tensor) -> Tensor:
        """Spectrogram [B, fft / 2 + 1, N // hop] of waveforms [B, 1, N], in float32 also under autocast."""
        fft, hop, window_samples = self.resolution
        with torch.autocast(wave.device.type, enabled=False):
            # Frame i is centred on the i-th hop, so that N samples give N // hop frames.
            padded = F.pad(wave.float(), ((fft - hop) // 2, (fft - hop) // 2), mode="reflect").squeeze(1)
            spectrum = torch.stft(
                padded, fft, hop, window_samples, self.window.float(), center=False, return_complex=True
            )
            return (torch.view_as_real(spectrum).square().sum(-1) + _LEAST_POWER).sqrt()


def _judge(image: Tensor, layers: nn.ModuleList, last: nn.Module) -> Judgement:
    features = []
    for layer in layers:
        image = F.leaky_relu(layer(image), SLOPE)
        features.append(image)
    return Judgement(last(image).flatten(1), features)
