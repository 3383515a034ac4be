"""Waves without a trained decoder: codes through the DVAE to a mel, phases guessed by Griffin and Lim's method.

It sounds metallic and knows no speaker but what is in the codes, yet words can be understood long before a decoder
is trained. Nothing here depends on chance: the phases start from the same random numbers every time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from myxtts.config import HOP_SAMPLES
from myxtts.model.dvae import DVAE
from myxtts.model.mel import DVAE_MEL, LogMel, resample
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.synthesis.progress import NO_PROGRESS, Advance
from myxtts.synthesis.writer import Written

SPECTRUM_ROUNDS, PHASE_ROUNDS = 30, 40
MOMENTUM = 0.99
"""Of the fast variant of the method (Perraudin, Balazs and Søndergaard 2013)."""
LOUDEST_LOG = 12.0
"""Logarithm of the power above which a mel is no speech but an untrained network."""


class GriffinLim:
    """Waves from the DVAE's mel."""

    name = "griffin-lim"

    def __init__(self, dvae: DVAE, mel_stats: Tensor) -> None:
        self._dvae, self._mel_stats = dvae, mel_stats
        front_end = LogMel(DVAE_MEL)[1].to(mel_stats.device)
        self._filters: Tensor = front_end.mel_scale.fb  # type: ignore[union-attr, assignment]
        self._window: Tensor = front_end.spectrogram.window  # type: ignore[union-attr, assignment]

    @torch.no_grad()
    def waves(
        self,
        sentences: Sequence[Written],
        speakers: Sequence[Tensor],
        speed: float,
        advance: Advance = NO_PROGRESS.advance,
    ) -> list[Tensor]:
        """Waves [samples] of 24 kHz on the host, one sentence after the other; the speakers cannot be heeded."""
        assert len(speakers) == len(sentences)
        waves = []
        for sentence in sentences:
            waves.append(self._wave(sentence.codes, speed))
            advance(1)
        return waves

    def begin(self, speaker: Tensor, speed: float) -> GriffinLimStream:  # noqa: ARG002 - as every vocoder
        """A sentence whose wave is wanted while it is being written."""
        return GriffinLimStream(self, speed)

    def _wave(self, codes: Tensor, speed: float) -> Tensor:
        if not len(codes):
            return torch.zeros(0)
        mel = self._dvae.decode(codes.to(self._mel_stats.device)[None]).float()
        if speed != 1:
            mel = F.interpolate(mel, scale_factor=1 / speed, mode="linear")
        power = (mel[0].t() * self._mel_stats.float()).clamp(max=LOUDEST_LOG).exp()
        wave = self._phased(self._spectrum(power).sqrt().t())
        return resample(wave[None], OUTPUT_SAMPLE_RATE)[0].cpu()

    def _spectrum(self, mel: Tensor) -> Tensor:
        """Power of bins [frames, bins] that gives the power of mels [frames, mels]: none is negative.

        Each round multiplies by the ratio of wanted and found, which brings the divergence of the two down.
        """
        weight = self._filters.sum(1)
        spectrum = (weight > 0) * mel.mean(1, keepdim=True)
        for _ in range(SPECTRUM_ROUNDS):
            ratio = mel / (spectrum @ self._filters).clamp(min=1e-10)
            spectrum = spectrum * (ratio @ self._filters.t()) / weight.clamp(min=1e-10)
        return spectrum

    def _phased(self, magnitude: Tensor) -> Tensor:
        """A wave [frames * 256] whose spectrum has about the magnitude [bins, frames]."""
        num_samples = magnitude.shape[1] * HOP_SAMPLES
        size, window = DVAE_MEL.fft_samples, self._window
        draw = torch.rand(magnitude.shape, generator=torch.Generator().manual_seed(0))
        phase = torch.polar(torch.ones_like(draw), 2 * torch.pi * draw).to(magnitude.device)
        before = torch.zeros_like(phase)
        for _ in range(PHASE_ROUNDS):
            wave = torch.istft(magnitude * phase, size, HOP_SAMPLES, window=window, length=num_samples)
            found = torch.stft(wave, size, HOP_SAMPLES, window=window, pad_mode="constant", return_complex=True)[
                :, : magnitude.shape[1]
            ]
            phase = found - MOMENTUM / (1 + MOMENTUM) * before
            phase = phase / phase.abs().clamp(min=1e-16)
            before = found
        return torch.istft(magnitude * phase, size, HOP_SAMPLES, window=window, length=num_samples)


class GriffinLimStream:
    """One sentence: its phases depend on all of it, so the wave comes as one piece at its end."""

    def __init__(self, vocoder: GriffinLim, speed: float) -> None:
        self._vocoder, self._speed = vocoder, speed
        self._codes: list[Tensor] = []

    def push(self, written: Written, last: bool) -> Tensor:
        self._codes.append(written.codes)
        return self._vocoder._wave(torch.cat(self._codes), self._speed) if last else torch.zeros(0)
