"""Audio features: PCM to waveforms, log-mel spectrograms, and resampling.

The DVAE, the GPT's conditioning encoder and the speaker encoder use one module, `LogMel`, with different
parameters, a `MelSpec`. Everything is computed in float32, regardless of autocast or `module.bfloat16()`: a mel
in half precision changes codes. `mel_norms`, the one statistic that belongs to a checkpoint, is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from myxtts.config import HOP_SAMPLES, SAMPLE_RATE

SPEAKER_SAMPLE_RATE = 16000  # sample rate of the speaker encoder's input, in Hz


@dataclass(frozen=True)
class MelSpec:
    """Parameters of a log-mel: power spectrum, triangular filters, natural logarithm."""

    sample_rate: int
    fft_samples: int
    window_samples: int
    hop_samples: int
    window: Literal["hann", "hamming"]
    num_mels: int
    max_hz: float  # upper edge of the highest filter; the lowest starts at 0 Hz
    equal_area: bool  # filters of area 1 Hz ("slaney" normalisation) instead of height 1
    log_floor: float
    floor_is_added: bool  # ln(x + floor) instead of ln(max(x, floor))
    pre_emphasis: float = 0.0  # y[t] = x[t] - pre_emphasis * x[t-1], applied first; 0 for none
    slaney_scale: bool = False  # Slaney's mel scale, linear up to 1 kHz, instead of HTK's


DVAE_MEL = MelSpec(
    sample_rate=SAMPLE_RATE, fft_samples=1024, window_samples=1024, hop_samples=HOP_SAMPLES, window="hann",
    num_mels=80, max_hz=8000.0, equal_area=True, log_floor=1e-5, floor_is_added=False,
)  # fmt: skip
"""Input of the DVAE; divided by `mel_norms`."""
CONDITIONING_MEL = MelSpec(
    sample_rate=SAMPLE_RATE, fft_samples=2048, window_samples=1024, hop_samples=HOP_SAMPLES, window="hann",
    num_mels=80, max_hz=8000.0, equal_area=True, log_floor=1e-5, floor_is_added=False,
)  # fmt: skip
"""Reference audio for the GPT, with frequency bins half as wide as the DVAE's; divided by `mel_norms`."""
SPEAKER_MEL = MelSpec(
    sample_rate=SPEAKER_SAMPLE_RATE, fft_samples=512, window_samples=400, hop_samples=160, window="hamming",
    num_mels=64, max_hz=8000.0, equal_area=False, log_floor=1e-6, floor_is_added=True, pre_emphasis=0.97,
)  # fmt: skip
"""Reference audio for the speaker encoder; not divided by `mel_norms`."""


def reflect(wave: Tensor, left: int, right: int) -> Tensor:
    """Waveforms [batch, channels, samples], continued by their reflection at both ends."""
    if not torch.are_deterministic_algorithms_enabled():
        return F.pad(wave, (left, right), mode="reflect")
    # The backward pass of F.pad adds in any order on a GPU.
    before, after = wave[..., 1 : left + 1].flip(-1), wave[..., -right - 1 : -1].flip(-1)
    return torch.cat([before, wave, after], -1)


class LogMel(nn.ModuleList):
    """Waveforms [.., samples] to log-mels [.., mels, frames], differentiable, in float32.

    A list of two modules, pre-emphasis and mel power, because the speaker encoder's checkpoints number them
    (`torch_spec.0.filter`, `torch_spec.1.mel_scale.fb`). Only there are the tables part of the state dict
    (`persistent=True`); elsewhere they follow from the spec.
    """

    def __init__(self, spec: MelSpec, *, persistent: bool = False) -> None:
        emphasis = _PreEmphasis(spec.pre_emphasis, persistent) if spec.pre_emphasis else nn.Identity()
        super().__init__([emphasis, _MelPower(spec, persistent)])
        self.spec = spec

    def forward(
        self,
        wave: Tensor,
        mel_norms: Tensor | None = None,
        num_samples: Tensor | None = None,
        rows: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Log-mels, divided per mel band by `mel_norms` [mels] if given.

        Clips shorter than the batch need `num_samples` [..]. Without it their last frames see the padding instead
        of the clip's own reflection and depend on the other clips. A clip has num_samples // hop + 1 frames,
        centred at samples 0, hop, 2 hop, …; later frames are meaningless. The mels of a frame are adjacent in
        memory, so `.transpose(-1, -2)` is contiguous. With `rows`, clips [R] and frames [R], only these frames are
        computed and the result is [R, mels].
        """
        floor = self.spec.log_floor
        with torch.autocast(wave.device.type, enabled=False):
            waves = wave.float().reshape(-1, wave.shape[-1])
            lengths = None if num_samples is None else num_samples.reshape(-1)
            power: Tensor = self[1](self[0](waves), lengths, rows)
            mel = (power + floor if self.spec.floor_is_added else power.clamp(min=floor)).log()
            if mel_norms is not None:
                mel = mel / mel_norms.float()
            if rows is not None:
                return mel
            return mel.reshape(*wave.shape[:-1], *mel.shape[1:]).transpose(-1, -2)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the model to another device but not to another dtype: a window in bf16 is inexact."""
        super()._apply(lambda table: fn(table) if table.is_meta else table.to(fn(table).device), recurse)  # type: ignore[no-untyped-call]
        return self


class _PreEmphasis(nn.Module):
    """y[t] = x[t] - amount * x[t-1] with x[-1] = x[1]: the waveform is reflected at its start, not zero-padded."""

    filter: Tensor

    def __init__(self, amount: float, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("filter", torch.tensor([[[-amount, 1.0]]]), persistent=persistent)

    def forward(self, wave: Tensor) -> Tensor:
        previous = torch.cat([wave[:, 1:2], wave[:, :-1]], dim=1)
        return previous * self.filter[0, 0, 0] + wave * self.filter[0, 0, 1]


class _MelPower(nn.Module):
    """Waveforms [clips, samples] to mel power [clips, frames, mels] around every `hop`-th sample, or [rows, mels].

    The submodules hold one table each, under its name in checkpoints.
    """

    def __init__(self, spec: MelSpec, persistent: bool) -> None:
        super().__init__()
        make = torch.hann_window if spec.window == "hann" else torch.hamming_window
        window = make(spec.window_samples, periodic=True, dtype=torch.float64).float()
        self.spectrogram, self.mel_scale = nn.Module(), nn.Module()
        self.spectrogram.register_buffer("window", window, persistent=persistent)
        self.mel_scale.register_buffer("fb", filterbank(spec).float(), persistent=persistent)
        self.fft_samples, self.hop_samples = spec.fft_samples, spec.hop_samples

    def forward(self, wave: Tensor, num_samples: Tensor | None, rows: tuple[Tensor, Tensor] | None) -> Tensor:
        window: Tensor = self.spectrogram.window  # type: ignore[assignment]
        filters: Tensor = self.mel_scale.fb  # type: ignore[assignment]
        # An STFT centres the window in `fft_samples`. The position of the zeros around it changes only the phase,
        # which the power does not depend on: so frames are as long as the window and the FFT pads at their end.
        reach = len(window) // 2
        wave = reflect(wave.unsqueeze(1), reach, reach).squeeze(1)
        if num_samples is not None:  # each clip continues with its own reflection
            steps = torch.arange(reach, device=wave.device)
            ends = (reach + num_samples.long())[:, None]
            mirrored = wave.gather(1, (ends - 2 - steps).clamp(min=0))  # an empty clip has nothing to reflect
            wave = wave.scatter(1, ends + steps, mirrored)
        frames = wave.unfold(-1, len(window), self.hop_samples)
        if rows is not None:
            frames = frames[rows]
        spectrum = torch.fft.rfft(frames * window, n=self.fft_samples)
        power: Tensor = (spectrum.real.square() + spectrum.imag.square()) @ filters
        return power


def filterbank(spec: MelSpec) -> Tensor:
    """Triangular filters [bins, mels] in float64; corners evenly spaced in mel."""
    bins = torch.linspace(0, spec.sample_rate / 2, spec.fft_samples // 2 + 1, dtype=torch.float64)
    linear, ratio = 15, 6.4  # Slaney's: 15 mels up to 1 kHz, then 27 for every factor of 6.4
    highest = 2595 * math.log10(1 + spec.max_hz / 700)
    if spec.slaney_scale:
        highest = linear + 27 * math.log(spec.max_hz / 1000, ratio)
    mels = torch.linspace(0, highest, spec.num_mels + 2, dtype=torch.float64)
    corners = 700 * (10 ** (mels / 2595) - 1)
    if spec.slaney_scale:
        corners = torch.where(mels < linear, mels * 1000 / linear, 1000 * ratio ** ((mels - linear) / 27))
    left, peak, right = corners[:-2], corners[1:-1], corners[2:]
    rising = (bins[:, None] - left) / (peak - left)
    falling = (right - bins[:, None]) / (right - peak)
    triangles = torch.minimum(rising, falling).clamp(min=0)
    return triangles * 2 / (right - left) if spec.equal_area else triangles


def pcm_to_wave(pcm: Tensor, num_samples: Tensor) -> Tensor:
    """int16 [batch, samples] to float32 in [-1, 1), zero from `num_samples` [batch] on.

    Batch memory is reused, so the end of each row holds samples of an earlier clip.
    """
    inside = torch.arange(pcm.shape[-1], device=pcm.device) < num_samples[:, None]
    return torch.where(inside, pcm, 0).float() / 32768


def resample(wave: Tensor, rate: int) -> Tensor:
    """Resample waveforms [.., samples] from 22,050 Hz to [.., ceil(samples * rate / 22050)], in float32.

    For 16 kHz every 441 input samples make 320 output samples, each with its own taps: one product over blocks.
    """
    divisor = math.gcd(SAMPLE_RATE, rate)
    block_in, block_out = SAMPLE_RATE // divisor, rate // divisor
    taps, reach = _resampling_taps(block_in, block_out, wave.device, *_FILTERS.get(rate, _SHARP_FILTER))
    with torch.autocast(wave.device.type, enabled=False):
        padded = F.pad(wave.float(), (reach, reach + block_in))
        blocks = padded.unfold(-1, len(taps), block_in) @ taps.float()
    return blocks.flatten(-2)[..., : -(-wave.shape[-1] * block_out // block_in)]


_FILTERS = {SPEAKER_SAMPLE_RATE: (6, 0.99)}
"""Zero crossings on either side and the cutoff as a share of the lower Nyquist frequency, by rate: the published
speaker encoder was trained with these."""
_SHARP_FILTER = (64, 0.97)
"""For speech to learn from: what the speaker encoder's filter leaves above 11 kHz is only 7 dB below the band it
mirrors; this one leaves 68 dB, and dampens 10 kHz by 0 dB instead of 3."""


def _resampling_taps(
    block_in: int, block_out: int, device: torch.device, num_crossings: int, share: float
) -> tuple[Tensor, int]:
    """Taps [reach + block_in + reach, block_out] of a low-pass filter: a Hann-windowed sinc, in float64."""
    cutoff = share * min(block_in, block_out)
    reach = math.ceil(num_crossings * block_in / cutoff)
    taken_at = torch.arange(-reach, block_in + reach, device=device, dtype=torch.float64) / block_in
    wanted_at = torch.arange(block_out, device=device, dtype=torch.float64) / block_out
    crossings = (taken_at[:, None] - wanted_at) * cutoff
    window = torch.cos(crossings.clamp(-num_crossings, num_crossings) * math.pi / (2 * num_crossings)).square()
    return torch.sinc(crossings) * window * (cutoff / block_in), reach
