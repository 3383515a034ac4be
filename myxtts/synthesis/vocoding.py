"""Generated sentences to waves, whole or piece by piece: by the trained decoder (HiFi-GAN), or by Griffin-Lim.

    latents ─ time / speed ─► ─ ×4 ─► ─ ×160/147 ─► frames ─ generator ×256 ─► wave of 24 kHz

All three interpolations accept their input in parts, and the generator sees only a few frames to either side. A
piece of a stream is therefore computed once, from its own frames and that context, and equals the same stretch of
the whole sentence: the cost of a stream is linear in its length. Pieces overlap by a frame and are cross-faded,
which hides rounding differences between kernels. The generator would see the padding of a batch in the last frames
of a sentence. These are computed a second time without it, so that every wave equals the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from myxtts.audio import Wave
from myxtts.config import HOP_SAMPLES, SAMPLE_RATE, SAMPLES_PER_CODE
from myxtts.model.dvae import DVAE
from myxtts.model.mel import DVAE_MEL, LogMel, resample
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE, SAMPLES_PER_FRAME, HifiGanDecoder
from myxtts.synthesis.generation import Advance, Generated

SPECTRUM_ROUNDS, PHASE_ROUNDS = 30, 40
MOMENTUM = 0.99  # the momentum of fast Griffin-Lim (Perraudin, Balazs and Søndergaard 2013)
LOUDEST_LOG = 12.0  # largest log power of a mel; only untrained networks exceed it


class GriffinLim:
    """Waves from the mels that the DVAE decodes."""

    name = "griffin-lim"

    def __init__(self, dvae: DVAE, mel_stats: Tensor) -> None:
        self._dvae, self._mel_stats = dvae, mel_stats
        front_end = LogMel(DVAE_MEL)[1].to(mel_stats.device)
        self._filters: Tensor = front_end.mel_scale.fb  # type: ignore[union-attr, assignment]
        self._window: Tensor = front_end.spectrogram.window  # type: ignore[union-attr, assignment]

    @torch.no_grad()
    def waves(
        self, sentences: Sequence[Generated], speakers: Sequence[Tensor], speed: float, advance: Advance
    ) -> list[Tensor]:
        """Waves [samples] of 24 kHz on the host. `speakers` are ignored."""
        assert len(speakers) == len(sentences)
        waves = []
        for sentence in sentences:
            waves.append(self.wave(sentence.codes, speed))
            advance(1)
        return waves

    def begin(self, speaker: Tensor, speed: float) -> GriffinLimStream:  # noqa: ARG002 (as `HifiGan`)
        return GriffinLimStream(self, speed)

    @torch.no_grad()
    def wave(self, codes: Tensor, speed: float) -> Tensor:
        """The wave [samples] of a sentence, on the host."""
        if not len(codes):
            return torch.zeros(0)
        mel = self._dvae.decode(codes.to(self._mel_stats.device)[None]).float()
        if speed != 1:
            mel = F.interpolate(mel, scale_factor=1 / speed, mode="linear")
        power = (mel[0].t() * self._mel_stats.float()).clamp(max=LOUDEST_LOG).exp()
        wave = self._with_phases(self._spectrum(power).sqrt().t())
        return resample(wave[None], OUTPUT_SAMPLE_RATE)[0].cpu()

    def _spectrum(self, mel: Tensor) -> Tensor:
        """Non-negative power [frames, bins] whose mel power is `mel` [frames, mels], by multiplicative updates."""
        weight = self._filters.sum(1)
        spectrum = (weight > 0) * mel.mean(1, keepdim=True)
        for _ in range(SPECTRUM_ROUNDS):
            ratio = mel / (spectrum @ self._filters).clamp(min=1e-10)
            spectrum = spectrum * (ratio @ self._filters.t()) / weight.clamp(min=1e-10)
        return spectrum

    def _with_phases(self, magnitude: Tensor) -> Tensor:
        """A wave [frames * 256] whose spectrogram approximates `magnitude` [bins, frames]."""
        num_samples = magnitude.shape[1] * HOP_SAMPLES
        size, window = DVAE_MEL.fft_samples, self._window
        draw = torch.rand(magnitude.shape, generator=torch.Generator().manual_seed(0))
        phase = torch.polar(torch.ones_like(draw), 2 * torch.pi * draw).to(magnitude.device)
        before = torch.zeros_like(phase)
        for _ in range(PHASE_ROUNDS):
            wave = torch.istft(magnitude * phase, size, HOP_SAMPLES, window=window, length=num_samples)
            found = torch.stft(wave, size, HOP_SAMPLES, window=window, pad_mode="constant", return_complex=True)
            found = found[:, : magnitude.shape[1]]
            phase = found - MOMENTUM / (1 + MOMENTUM) * before
            phase = phase / phase.abs().clamp(min=1e-16)
            before = found
        return torch.istft(magnitude * phase, size, HOP_SAMPLES, window=window, length=num_samples)


class GriffinLimStream:
    """One sentence. Its phases depend on all of it, so the wave comes in one piece at the end."""

    def __init__(self, vocoder: GriffinLim, speed: float) -> None:
        self._vocoder, self._speed = vocoder, speed
        self._codes: list[Tensor] = []

    def push(self, generated: Generated, last: bool) -> Tensor:
        codes = [*self._codes, generated.codes]
        wave = self._vocoder.wave(torch.cat(codes), self._speed) if last else torch.zeros(0)
        self._codes = codes
        return wave


REACH_FRAMES = 16
"""Receptive field of the generator to either side: 13.3 frames by the widths of its convolutions."""
FADE_FRAMES = 1
GPU_FRAMES_STEP = 128
"""Frames are padded to multiples of this on a GPU, where every new length costs time to plan the convolutions. One
piece of a stream with its context fits in."""


class Stretch:
    """Linear interpolation in time of a sequence that arrives in parts; equals `F.interpolate` of the whole."""

    def __init__(self, factor: Fraction) -> None:
        self._factor = factor
        self._kept: Tensor | None = None
        self._num_dropped = 0
        self._num_made = 0

    def push(self, rows: Tensor, last: bool) -> Tensor:
        """Add rows [n, channels]; return those that later rows cannot change, possibly none."""
        if self._factor == 1:
            return rows
        kept = rows if self._kept is None else torch.cat([self._kept, rows])
        received = self._num_dropped + len(kept)
        # Output row i lies at (i + 1/2) / factor - 1/2 of the input and needs the two rows around it.
        if last:
            end = max(math.floor(received * self._factor), min(received, 1))
        else:
            end = max(self._num_made, math.ceil((received - Fraction(1, 2)) * self._factor - Fraction(1, 2)))
        numbers = torch.arange(self._num_made, end, device=rows.device, dtype=torch.float64)
        places = ((numbers + 0.5) / float(self._factor) - 0.5).clamp(0, max(received - 1, 0))
        before = places.long()
        after = (before + 1).clamp(max=max(received - 1, 0))
        share = (places - before).to(rows.dtype)[:, None]
        made = kept[before - self._num_dropped].lerp(kept[after - self._num_dropped], share)
        next_place = max(0, math.floor((end + Fraction(1, 2)) / self._factor - Fraction(1, 2)))
        num_done = min(max(0, next_place - self._num_dropped), len(kept))
        self._kept, self._num_dropped, self._num_made = kept[num_done:], self._num_dropped + num_done, end
        return made


class Frames:
    """Latents of a sentence, arriving in parts, to frames for the generator."""

    def __init__(self, speed: float) -> None:
        self._speed = Stretch(1 / Fraction(speed).limit_denominator(1000))
        self._to_mel = Stretch(Fraction(SAMPLES_PER_CODE, HOP_SAMPLES))
        self._to_output = Stretch(Fraction(OUTPUT_SAMPLE_RATE, SAMPLE_RATE))

    def push(self, latents: Tensor, last: bool) -> Tensor:
        """Frames [m, channels] for latents [n, channels]."""
        return self._to_output.push(self._to_mel.push(self._speed.push(latents, last), last), last)


class HifiGan:
    """Waves from the trained decoder."""

    name = "hifigan"

    def __init__(self, decoder: HifiGanDecoder, batch_size: int, frames_step: int = 1) -> None:
        """Frames are padded to multiples of `frames_step`."""
        self._generator, self._batch_size, self._frames_step = decoder.waveform_decoder, batch_size, frames_step

    @torch.no_grad()
    def waves(
        self, sentences: Sequence[Generated], speakers: Sequence[Tensor], speed: float, advance: Advance
    ) -> list[Tensor]:
        """Waves [samples] of 24 kHz on the host; `speakers` [speaker_dim] each."""
        waves: dict[int, Tensor] = {}
        by_length = sorted(range(len(sentences)), key=lambda index: len(sentences[index].codes))
        for first in range(0, len(by_length), self._batch_size):
            batch = by_length[first : first + self._batch_size]
            rows = [Frames(speed).push(sentences[index].latents, last=True) for index in batch]
            speaker = torch.stack([speakers[index] for index in batch]).to(rows[0])
            for index, wave in zip(batch, self.generate(rows, speaker), strict=True):
                waves[index] = wave.cpu()
            advance(len(batch))
        return [waves[index] for index in range(len(sentences))]

    def begin(self, speaker: Tensor, speed: float) -> HifiGanStream:
        """Start the wave of a sentence that is still being generated."""
        return HifiGanStream(self, speaker, speed)

    def generate(self, rows: Sequence[Tensor], speaker: Tensor, *, ends: bool = True) -> list[Tensor]:
        """Waves [samples] of sentences [frames, channels], each as if made alone; `ends` if their ends count."""
        longest = max(map(len, rows))
        if not longest:
            return [row.new_zeros(0) for row in rows]
        length = longest + -longest % self._frames_step
        made = self._run(torch.stack([F.pad(row, (0, 0, 0, length - len(row))) for row in rows]), speaker)
        waves = [wave[: len(row) * SAMPLES_PER_FRAME] for row, wave in zip(rows, made, strict=True)]
        again: dict[int, list[int]] = {}  # padded sentences by the frames to compute again, nearly always as many
        for index, row in enumerate(rows):
            if ends and 0 < len(row) < length:
                again.setdefault(min(len(row), 2 * REACH_FRAMES), []).append(index)
        for num_frames, some in again.items():
            num_samples = SAMPLES_PER_FRAME * (num_frames if num_frames < 2 * REACH_FRAMES else REACH_FRAMES)
            exact = self._run(torch.stack([rows[index][-num_frames:] for index in some]), speaker[some])
            for index, wave in zip(some, exact, strict=True):
                waves[index][-num_samples:] = wave[-num_samples:]
        return waves

    def _run(self, frames: Tensor, speaker: Tensor) -> Tensor:
        wave: Tensor = self._generator(frames.transpose(1, 2), speaker[:, :, None])
        return wave.squeeze(1).float()


class HifiGanStream:
    """The wave of one sentence, piece by piece."""

    def __init__(self, vocoder: HifiGan, speaker: Tensor, speed: float) -> None:
        self._vocoder, self._speaker = vocoder, speaker
        self._frames = Frames(speed)
        self._kept: Tensor | None = None
        self._num_dropped = 0
        self._num_done = 0
        self._overlap: Tensor | None = None

    @torch.no_grad()
    def push(self, generated: Generated, last: bool) -> Tensor:
        """The next samples, on the host; none while the next frame lacks context. A failed call has no effect."""
        frames = deepcopy(self._frames)
        more = frames.push(generated.latents, last)
        kept = more if self._kept is None else torch.cat([self._kept, more])
        received = self._num_dropped + len(kept)
        ready = received if last else received - REACH_FRAMES
        if ready <= self._num_done + FADE_FRAMES and not (last and ready > self._num_done):
            self._frames, self._kept = frames, kept
            return torch.zeros(0)
        (whole,) = self._vocoder.generate([kept], self._speaker.to(kept)[None], ends=last)
        first = self._num_done - self._num_dropped
        wave = whole[first * SAMPLES_PER_FRAME : (ready - self._num_dropped) * SAMPLES_PER_FRAME]
        if self._overlap is not None:
            rise = torch.linspace(0, 1, len(self._overlap), device=wave.device)
            wave[: len(rise)] = self._overlap.lerp(wave[: len(rise)], rise)
        if not last:
            wave, self._overlap = wave.tensor_split([-FADE_FRAMES * SAMPLES_PER_FRAME])
            self._num_done = ready - FADE_FRAMES
        num_passed = max(0, self._num_done - REACH_FRAMES - self._num_dropped)
        self._frames, self._kept, self._num_dropped = frames, kept[num_passed:], self._num_dropped + num_passed
        return wave.cpu()


FAINT = 3e-3  # a block of a wave below this level is as good as silent: -50 dB, where speech has -20
_BLOCK_SAMPLES = 480
_FADE_SAMPLES = OUTPUT_SAMPLE_RATE // 250


def is_faint(wave: Wave) -> bool:
    """True if a wave is silent except for a constant and some clicks."""
    blocks = wave[: len(wave) // _BLOCK_SAMPLES * _BLOCK_SAMPLES].reshape(-1, _BLOCK_SAMPLES)
    return not len(blocks) or bool(np.percentile(blocks.std(axis=1), 90) < FAINT)


def faded(wave: Wave, *, starts: bool, ends: bool) -> Wave:
    """A copy that is faded in where a sentence starts and out where it ends, so that its edges do not click."""
    wave = wave.copy()
    length = min(_FADE_SAMPLES, len(wave))
    rise = np.linspace(0, 1, length, dtype=np.float32)
    if starts:
        wave[:length] *= rise
    if ends:
        wave[len(wave) - length :] *= rise[::-1]
    return wave


def joined(waves: Sequence[Wave]) -> Wave:
    """The sentences with pauses between them; empty ones are skipped."""
    parts: list[Wave] = []
    for wave in waves:
        if len(wave):
            parts += [pause()] * bool(parts) + [faded(wave, starts=True, ends=True)]
    return np.concatenate(parts or [np.zeros(0, np.float32)])


def pause() -> Wave:
    """The silence between two sentences, in addition to what the model generates."""
    return np.zeros(OUTPUT_SAMPLE_RATE // 10, np.float32)
