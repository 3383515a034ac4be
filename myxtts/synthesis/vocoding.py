"""Generated sentences to waves, whole or piece by piece: by the trained decoder (HiFi-GAN), or by Griffin-Lim.

    latents ─ time / speed ─► ─ ×4 ─► ─ ×160/147 ─► frames ─ generator ×256 ─► wave of 24 kHz
    codes ─ DVAE ─► mel ─ time / speed ─► ─ ×160/147 ─► flow ─► the same, for a decoder that reads mels

All three interpolations accept their input in parts, and the generator sees only a few frames to either side. A
piece of a stream is therefore computed once, from its own frames and that context, and equals the same stretch of
the whole sentence: the cost of a stream is linear in its length. Pieces overlap by a frame and are cross-faded,
which hides rounding differences between kernels. On a GPU `windows` computes pieces of many sentences at once. On
a CPU `CpuGenerator` computes pieces one by one, with a third of the arithmetic.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from fractions import Fraction
from functools import cache, partial
from threading import Barrier
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from myxtts.audio import Wave
from myxtts.config import HOP_SAMPLES
from myxtts.devices import CAPTURING
from myxtts.model.dvae import DVAE, FRAMES_PER_CODE
from myxtts.model.flow import REACH, STEPS, TARGET_MEAN, TARGET_SCALE, MelFlow, noise_of, normalised
from myxtts.model.mel import DVAE_MEL, LogMel, resample
from myxtts.model.vocoder import (
    LAST_SLOPE,
    OUTPUT_SAMPLE_RATE,
    RESBLOCK_DILATIONS,
    RESBLOCK_KERNELS,
    SAMPLES_PER_FRAME,
    SLOPE,
    UPSAMPLE_RATES,
    Generator,
    HifiGanDecoder,
    unfolded,
)
from myxtts.synthesis.generation import Generated
from myxtts.synthesis.windows import (
    FADE_FRAMES,
    GPU_WINDOWS,
    REACH_FRAMES,
    TO_FRAMES,
    TO_OUTPUT,
    Push,
    Windows,
    WindowStream,
    run_generator,
    stretched_length,
)

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

    def begin(self, speaker: Tensor, speed: float) -> GriffinLimStream:  # noqa: ARG002 (as `HifiGan`)
        return GriffinLimStream(self, speed)

    delay_codes = 0  # the wave of a sentence comes as a whole

    def capture(self) -> None:
        """Nothing can be captured."""

    def push_many(self, pushes: Sequence[Push]) -> list[Tensor]:
        with CAPTURING if self._mel_stats.is_cuda else contextlib.nullcontext():
            return [push.stream.push(push.generated, push.last) for push in pushes]

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
        end = max(self._num_made, stretched_length(received, self._factor, last))
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


class Window:
    """A computation on a sequence that arrives in parts, if a row depends on a few rows to either side."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None
        self._num_dropped = 0
        self._num_made = 0

    def push(self, more: Tensor, last: bool, reach: int, compute: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Add rows [n, ...]; return the outputs, a row for each, that later rows cannot change.

        `compute` is given rows and the number of the first; none if nothing can be returned yet.
        """
        kept = more if self._kept is None else torch.cat([self._kept, more])
        received = self._num_dropped + len(kept)
        ready = received if last else max(received - reach, self._num_made)
        first, end = self._num_made - self._num_dropped, ready - self._num_dropped
        made = compute(kept if end > first else kept[:0], self._num_dropped)[first:end]
        num_passed = max(0, ready - reach - self._num_dropped)
        self._kept, self._num_dropped, self._num_made = kept[num_passed:], self._num_dropped + num_passed, ready
        return made


class Codec(NamedTuple):
    """What makes HiFi-GAN's mels of codes."""

    dvae: DVAE
    mel_stats: Tensor
    flow: MelFlow

    def decode(self, rows: Tensor, first: int) -> Tensor:  # noqa: ARG002 - any codes are decoded the same way
        """Mels of the DVAE and latents, [n, 4 * channels + dim], of codes with latents [n, 1 + dim]."""
        codes, latents = rows.tensor_split([1], 1)
        if len(rows):
            mels = self.dvae.mel_rows(codes.t().long(), self.mel_stats)[0]
        else:
            mels = rows.new_zeros(0, FRAMES_PER_CODE * len(self.mel_stats))
        return torch.cat([mels, latents], 1)

    def begin(self, given: Tensor, first: int) -> Tensor:
        """Rows for `follow`, of what the flow is given [n, …]; `first` is the number of the first."""
        return torch.cat([noise_of(len(given), first).to(given).t(), normalised(given.t()[None])[0].t()], 1)

    def follow(self, rows: Tensor, first: int, step: int, speaker: Tensor) -> Tensor:  # noqa: ARG002 - as `decode`
        """The rows after a step of the flow: its mels, and what it is given."""
        if not len(rows):
            return rows
        mel, given = rows.t()[None].tensor_split([DVAE_MEL.num_mels], 1)
        return torch.cat([self.flow.follow(mel, step, given, speaker.to(mel)[None, :, None]), given], 1)[0].t()


class Frames:
    """A sentence, arriving in parts, to frames for the generator; to mels if there is a codec."""

    def __init__(self, speed: float) -> None:
        self._speed = Stretch(1 / Fraction(speed).limit_denominator(1000))
        self._to_mel = Stretch(TO_FRAMES)
        self._to_output = Stretch(TO_OUTPUT)
        self._codes, self._steps, self._num_begun = Window(), [Window() for _ in range(STEPS)], 0

    def copied(self) -> Frames:
        """The same state; what is pushed to one does not change the other."""
        other = copy(self)
        other._speed, other._to_mel, other._to_output = (
            copy(self._speed),
            copy(self._to_mel),
            copy(self._to_output),
        )
        other._codes, other._steps = copy(self._codes), [copy(window) for window in self._steps]
        return other

    def push(self, generated: Generated, last: bool, speaker: Tensor, codec: Codec | None) -> Tensor:
        """Frames [m, channels] for more of the sentence."""
        if codec is None:
            rows = self._to_mel.push(self._speed.push(generated.latents, last), last)
            return self._to_output.push(rows, last)
        rows = torch.cat([generated.codes[:, None].to(generated.latents), generated.latents], 1)
        rows = self._codes.push(rows, last, codec.dvae.reach_codes, codec.decode)
        mels = self._speed.push(unfolded(rows), last)
        rows = codec.begin(self._to_output.push(mels, last), self._num_begun)
        self._num_begun += len(rows)
        for step, window in enumerate(self._steps):  # a window for each: all steps in one would see farther
            rows = window.push(rows, last, REACH // STEPS, partial(codec.follow, step=step, speaker=speaker))
        return rows[:, : DVAE_MEL.num_mels] * TARGET_SCALE + TARGET_MEAN


_POINTS = {3: (10, 0), 7: (12, 1), 11: (12, 4)}
"""By kernel, the points at which a tile is evaluated: real ones, and pairs of conjugate ones on the unit circle.
With more points a tile is longer: fewer products, larger transforms. Real points take one product instead of three
for two, but more of them round worse."""
_CHUNK_ELEMENTS = 1 << 18  # rows times channels computed together: all intermediate results fit in the L3 cache
_ROOM = 128  # rows of zeros around a chunk: at least what a tile may cover beyond it
LEAST_CHANNELS = 128  # of a generator: in a narrower one the transforms cost more than they save
_LEAST_ROWS = 256  # of a chunk: shorter ones would mostly compute what others compute too
_LEVEL_REACH = (max(RESBLOCK_KERNELS) - 1) // 2 * sum(dilation + 1 for dilation in RESBLOCK_DILATIONS)
"""Rows that the residual blocks of a level see to either side."""


@cache
def _filtering(kernel: int) -> list[Tensor]:
    """Matrices O, T and I with which O @ (T @ taps * I @ inputs) are the outputs of a filter for a tile of inputs.

    Polynomials are multiplied by their values at points (Toom 1963, Cook 1966); the transpose of that is a filter
    (Winograd 1980). A pair of complex values takes three products. Tangents of equal steps are real points that
    round well.
    """
    num_real, num_pairs = _POINTS[kernel]
    span = num_real + 2 * num_pairs
    angles = torch.arange(num_real, dtype=torch.float64) * (torch.pi / num_real)
    circle = torch.arange(1, num_pairs + 1, dtype=torch.float64) * (torch.pi / (num_pairs + 1))

    def values(count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Values at the points of the powers of x up to `count` - 1: at the real ones, and parts at the others."""
        powers = torch.arange(count)
        real = angles[:, None].sin() ** powers * angles[:, None].cos() ** (count - 1 - powers)
        return real, (circle[:, None] * powers).cos(), (circle[:, None] * powers).sin()

    (real, a, b), (other_real, c, d) = values(span - kernel + 1), values(kernel)
    solved = torch.cat(values(span)).inverse().t().tensor_split([num_real, num_real + num_pairs])
    # (a + ib)(c + id) has the parts c(a + b) - b(c + d) and c(a + b) + a(d - c).
    inputs = torch.cat([solved[0], solved[1] + solved[2], solved[2], -solved[1]])
    scale = inputs.abs().amax(1, keepdim=True)
    taps = torch.cat([other_real, c, d - c, c + d]) * scale
    return [torch.cat([real, a + b, a, b]).t().float().contiguous(), taps, (inputs / scale).float()]


class TiledConv:
    """A leaky ReLU and a convolution of rows [rows, channels], as matrix products of transformed tiles.

    A tile is a few rows, `dilation` apart. Each row of its transform is multiplied with a matrix of its own.
    """

    def __init__(self, conv: nn.Conv1d) -> None:
        (kernel,), (self._dilation,) = conv.kernel_size, conv.dilation
        self._outputs, taps, self._inputs = _filtering(kernel)
        self.reach = self._dilation * (kernel - 1) // 2  # rows that an output depends on to either side
        self._weights = torch.einsum("pt,oit->pio", taps, conv.weight.detach().double()).float().contiguous()
        assert conv.bias is not None
        self.bias = conv.bias.detach()

    def __call__(self, rows: Tensor, first: int, num_rows: int) -> Tensor:
        """Outputs without bias [tiles, rows of a tile, dilation, channels]: at least `num_rows`."""
        dilation, size, (points, span) = self._dilation, len(self._outputs), self._inputs.shape
        _, channels, width = self._weights.shape
        num_tiles = -(-num_rows // (size * dilation))
        shape, step = (span, num_tiles, dilation * channels), dilation * channels
        tiles = rows[first - self.reach :].as_strided(shape, (step, size * step, 1))
        planes = torch.ops.aten.leaky_relu.out(tiles, SLOPE, out=rows.new_empty(shape))
        inputs = torch.mm(self._inputs, planes.view(span, -1))
        products = torch.bmm(inputs.view(points, -1, channels), self._weights)
        made = torch.mm(self._outputs, products.view(points, -1))
        return made.view(size, num_tiles, dilation, width).transpose(0, 1)


class CpuGenerator:
    """`Generator` for one sentence on a CPU, equal up to rounding, with a third of the arithmetic.

    Each thread computes chunks of a level that fit the cache. No operation waits for several threads.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._num_threads = torch.get_num_threads()
        self._pool, all_begun = ThreadPoolExecutor(self._num_threads), Barrier(self._num_threads)

        def begin(_: int) -> None:
            torch.get_num_threads()  # the first call in a thread undoes what was set before
            torch.set_num_threads(1)
            all_begun.wait()

        list(self._pool.map(begin, range(self._num_threads)))
        torch.set_num_threads(self._num_threads)  # a thread's call also sets it for threads that begin later
        blocks, ups = list[Any](generator.resblocks), list[Any](generator.ups)
        self._blocks = list(self._pool.map(_tiled, blocks))
        # Levels end in the sum of their blocks instead of the mean: the weights after them are divided.
        self._ups = []
        for level, up in enumerate(ups):
            weight = up.weight.detach().permute(2, 0, 1) / (len(RESBLOCK_KERNELS) if level else 1)
            halves = weight.unflatten(0, (2, UPSAMPLE_RATES[level])).transpose(1, 2).flatten(2)
            self._ups.append((*halves.contiguous(), up.bias.detach()))
        self._last = (generator.conv_post.weight.detach()[0] / len(RESBLOCK_KERNELS)).contiguous()

    @torch.no_grad()
    def wave(self, frames: Tensor, speaker: Tensor, first: int, last: int) -> Tensor:
        """Samples of the frames `first` to `last` of a sentence [frames, channels]; `speaker` is [speaker_dim]."""
        generator = self._generator
        g = speaker[None, : generator.cond_layer.in_channels, None]
        spans = self._spans(len(frames), first, last)
        x = (generator.conv_pre(frames.t()[None]) + generator.cond_layer(g))[0].t()[slice(*spans[0])]
        num_rows = len(frames)
        for level, rate in enumerate(UPSAMPLE_RATES):
            num_rows *= rate
            (given, _), wanted = spans[level], spans[level + 1]
            start, end = max(wanted[0] - _LEVEL_REACH, 0), min(wanted[1] + _LEVEL_REACH, num_rows)
            before, after, bias = self._ups[level]
            added = (bias + generator.conds[level](g)[0, :, 0]).repeat(rate)
            x = F.leaky_relu(x, SLOPE)
            x = torch.addmm(added, F.pad(x, (0, 0, 0, 1)), before).addmm_(F.pad(x, (0, 0, 1, 0)), after)
            skipped = given * rate - rate // 2
            x = x.view(-1, len(bias))[start - skipped : end - skipped]
            x = self._level(level, x, wanted[0] - start, wanted[1] - start)
        taps, (start, end) = self._last.shape[1], spans[-1]
        first, last = first * SAMPLES_PER_FRAME - taps // 2, last * SAMPLES_PER_FRAME + taps // 2
        products = F.pad(F.leaky_relu(x, LAST_SLOPE) @ self._last, (0, 0, start - first, last - end))
        return products.as_strided((last - first - taps + 1, taps), (taps, taps + 1)).sum(1).tanh()

    def _spans(self, num_frames: int, first: int, last: int) -> list[tuple[int, int]]:
        """First and last row of the input and of each level's output that samples of the frames depend on."""
        num_rows, reach = num_frames * SAMPLES_PER_FRAME, self._last.shape[1] // 2
        first, last = first * SAMPLES_PER_FRAME - reach, last * SAMPLES_PER_FRAME + reach
        spans = [(max(first, 0), min(last, num_rows))]
        for rate in reversed(UPSAMPLE_RATES):
            num_rows //= rate
            first, last = spans[0][0] - _LEVEL_REACH + rate // 2, spans[0][1] + _LEVEL_REACH + rate // 2
            spans.insert(0, (max(first // rate - 1, 0), min(-(-last // rate), num_rows)))
        return spans

    def _level(self, level: int, x: Tensor, first: int, last: int) -> Tensor:
        """The sum of the level's blocks at the rows `first` to `last` of x."""
        made = x.new_empty(last - first, x.shape[1])
        num_chunks = max(self._num_threads, -(-made.numel() // _CHUNK_ELEMENTS))
        size = max(-(-len(made) // (num_chunks + -num_chunks % self._num_threads)), _LEAST_ROWS)

        def compute(start: int) -> None:
            self._chunk(level, x, first + start, made[start : start + size])

        list(self._pool.map(compute, range(0, len(made), size)))
        return made

    def _chunk(self, level: int, x: Tensor, first: int, made: Tensor) -> None:
        """Write the sum of the level's blocks at x[first:] to `made`.

        Each convolution computes only the rows that those after it need.
        """
        last, num_rows, kernels = first + len(made), len(x), len(RESBLOCK_KERNELS)
        origin = max(first - _LEVEL_REACH, 0) - _ROOM
        rows, hidden = x.new_zeros(2, min(last + _LEVEL_REACH, num_rows) + _ROOM - origin, x.shape[1])
        for index, block in enumerate(self._blocks[kernels * level : kernels * (level + 1)]):
            reach = sum(conv.reach for conv in block)
            start, end = max(first - reach, 0), min(last + reach, num_rows)
            rows[start - origin : end - origin] = x[start:end]
            for number, conv in enumerate(block):
                source, target = (hidden, rows) if number % 2 else (rows, hidden)
                reach -= conv.reach
                start, end = max(first - reach, 0), min(last + reach, num_rows)
                more = conv(source, start - origin, end - start)
                place = target[start - origin :][: math.prod(more.shape[:3])].view(more.shape)
                place.add_(more).add_(conv.bias) if number % 2 else torch.add(more, conv.bias, out=place)
                if end == num_rows:  # the last tile may be longer than the rows
                    target[end - origin :].zero_()
            part = rows[first - origin :][: len(made)]
            made.copy_(part) if index == 0 else made.add_(part)


def _tiled(block: Any) -> list[TiledConv]:
    """The convolutions of a block in order, dilated and plain ones in turns."""
    return [TiledConv(conv) for pair in zip(block.convs1, block.convs2, strict=True) for conv in pair]


class HifiGan:
    """Waves from the trained decoder."""

    name = "hifigan"

    def __init__(
        self,
        decoder: HifiGanDecoder,
        dvae: tuple[DVAE, Tensor] | None = None,
        *,
        window_frames: int | None = None,
    ) -> None:
        """On a GPU, and with `window_frames`, the generator only sees windows of a few lengths, or of that one.

        A decoder that reads mels needs the DVAE and its mel statistics. On a GPU convolutions are converted to
        float16, which rounds their inputs as TF32 does.
        """
        self._generator = decoder.waveform_decoder
        flow, weight = self._generator.flow, self._generator.conv_pre.weight
        if flow is not None and dvae is None:
            raise ValueError("a decoder that reads mels needs the DVAE and its mel statistics")
        self.codec = Codec(*dvae, flow) if flow is not None and dvae is not None else None
        on_gpu = weight.device.type == "cuda"
        is_fast = not on_gpu and len(weight) >= LEAST_CHANNELS and window_frames is None
        self._alone = CpuGenerator(self._generator) if is_fast else None
        if on_gpu:
            for name, layers in self._generator.named_children():
                if name not in ("flow", "conv_post"):
                    layers.half()
        sizes: dict[int, tuple[int, ...]] = {window_frames: (1, 2, 4)} if window_frames else GPU_WINDOWS
        self._windows = Windows(self._generator, self.codec, sizes) if window_frames or on_gpu else None

    @property
    def delay_codes(self) -> int:
        """Codes of which nothing can be heard yet, at the usual speed: those after them are missing."""
        frames = REACH_FRAMES + FADE_FRAMES + (0 if self.codec is None else REACH)
        around = 0 if self.codec is None else self.codec.dvae.reach_codes
        return around + math.ceil(frames / (TO_FRAMES * TO_OUTPUT))

    def begin(self, speaker: Tensor, speed: float) -> HifiGanStream | WindowStream:
        """Start the wave of a sentence that is still being generated."""
        if self._windows is not None:
            return WindowStream(self._windows, speaker, speed)
        return HifiGanStream(self, speaker, speed)

    def capture(self) -> None:
        """Capture on a GPU what computes batches."""
        if self._windows is not None:
            self._windows.capture()

    def push_many(self, pushes: Sequence[Push]) -> list[Tensor]:
        """The next samples of several streams, on the host, as `HifiGanStream.push`."""
        if self._windows is not None:
            return self._windows.push_many(pushes)
        return [push.stream.push(push.generated, push.last) for push in pushes]

    def generate(self, frames: Tensor, speaker: Tensor, first: int, last: int) -> Tensor:
        """The wave [samples], on the host, of the frames `first` to `last` of some [frames, channels]."""
        make = self._alone.wave if self._alone is not None else self._exact
        return make(frames, speaker, first, last)

    def _exact(self, frames: Tensor, speaker: Tensor, first: int, last: int) -> Tensor:
        wave = run_generator(self._generator, frames[None], speaker[None].to(frames))
        return wave[0, first * SAMPLES_PER_FRAME : last * SAMPLES_PER_FRAME].cpu()


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
        frames = self._frames.copied()
        more = frames.push(generated, last, self._speaker, self._vocoder.codec)
        kept = more if self._kept is None else torch.cat([self._kept, more])
        received = self._num_dropped + len(kept)
        ready = received if last else received - REACH_FRAMES  # frames that later ones cannot change
        wave, num_passed = torch.zeros(0), 0
        if ready > self._num_done + (0 if last else FADE_FRAMES):
            first = self._num_done - self._num_dropped
            wave = self._vocoder.generate(kept, self._speaker, first, ready - self._num_dropped)
            if self._overlap is not None:
                rise = torch.linspace(0, 1, len(self._overlap))
                wave[: len(rise)] = self._overlap.lerp(wave[: len(rise)], rise)
            if not last:
                wave, self._overlap = wave.tensor_split([-FADE_FRAMES * SAMPLES_PER_FRAME])
                self._num_done = ready - FADE_FRAMES
            num_passed = max(0, self._num_done - REACH_FRAMES - self._num_dropped)
        self._frames, self._kept = frames, kept[num_passed:]
        self._num_dropped += num_passed
        return wave


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


def pause() -> Wave:
    """The silence between two sentences, in addition to what the model generates."""
    return np.zeros(OUTPUT_SAMPLE_RATE // 10, np.float32)
