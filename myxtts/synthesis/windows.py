"""HiFi-GAN's waves of many sentences at once, in windows of a few lengths: the usual way on a GPU.

    codes, latents ─ [DVAE] ─ time / speed ─ ×4 ─ ×160/147 ─ [flow] ─► window of frames ─ generator ×256 ─► wave

A piece of a sentence is computed from its own codes and those around it that it depends on, without any state of
the piece before. A batch of windows is therefore one computation with fixed shapes, captured as a CUDA graph for
each of a few batch sizes; the host sends it numbers and latents, and fetches waves, once per batch. Where a window
exceeds its sentence the DVAE and the flow see zeros, as they do without windows. The generator has no such mask:
its windows begin or end where the sentence does, or have context there. So every wave equals the reference, on a
GPU up to rounding.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from myxtts.audio import Wave
from myxtts.config import HOP_SAMPLES, SAMPLE_RATE, SAMPLES_PER_CODE
from myxtts.devices import CAPTURING, CudaGraph, Event, Stream, send
from myxtts.model.dvae import FRAMES_PER_CODE
from myxtts.model.flow import (
    NOISE_FRAMES,
    NUM_OFFSETS,
    REACH,
    STEPS,
    TARGET_MEAN,
    TARGET_SCALE,
    noise_of,
    normalised,
)
from myxtts.model.vocoder import (
    LAST_SLOPE,
    OUTPUT_SAMPLE_RATE,
    RESBLOCK_KERNELS,
    SAMPLES_PER_FRAME,
    SLOPE,
    Generator,
    unfolded,
)
from myxtts.synthesis.generation import Generated

if TYPE_CHECKING:
    from myxtts.synthesis.vocoding import Codec

MAX_SPEED = 2.0
REACH_FRAMES = 16
"""Receptive field of the generator to either side: 13.3 frames by the widths of its convolutions."""
FADE_FRAMES = 1
GPU_WINDOWS: dict[int, tuple[int, ...]] = dict.fromkeys((208, 128, 64), (1, 2, 4, 8))
"""Windows by their frames, and how many of them are computed together. A piece of 40 codes with its context takes
one of 208 frames, a piece of 20 one of 128, a first piece of 10 one of 64. With other lengths a GPU would have to
plan the convolutions again."""
SPARE_FRAMES = 300  # computed in vain: they take less time than one more run
PLANS_TRIED = 4  # of a convolution when it is captured
TO_FRAMES, TO_OUTPUT = Fraction(SAMPLES_PER_CODE, HOP_SAMPLES), Fraction(OUTPUT_SAMPLE_RATE, SAMPLE_RATE)
TOLERANCE = 0.05  # of fused kernels, of the loudest sample: they round less often
_log = logging.getLogger(__name__)
_ENDLESS = 1 << 40  # the length of a sentence that goes on
_SLACK = 4  # rows that an interpolation may need beyond the quotient of the rates


class Push(NamedTuple):
    """More of a sentence for the stream of its wave."""

    stream: Any  # of the vocoder that it is given to
    generated: Generated
    last: bool


class Excerpt(NamedTuple):
    """A window of the frames that the generator sees; it exceeds a sentence that is shorter."""

    start: int
    begin: int  # the first frame whose samples are taken from this window
    end: int


def excerpts(length: int, first: int, last: int, size: int) -> Iterator[Excerpt]:
    """Windows that together give the samples of the frames `first` to `last` of a sentence.

    If that is all of a sentence, it has at least 32. Frames at an edge of a window are taken only where it is an
    edge of the sentence too.
    """
    begin = first
    while begin < last:
        start = max(begin - REACH_FRAMES, 0)
        end = min(start + size, length) - REACH_FRAMES
        if end >= last:
            end = last
        elif start + size >= length and (begin >= REACH_FRAMES or length == size):
            start, end = length - size, last
        yield Excerpt(start, begin, end)
        begin = end


def stretched_length(received: int, factor: Fraction, last: bool) -> int:
    """Rows of an interpolated sequence that more input cannot change; with `last`, all of it."""
    if factor == 1:
        return received
    if last:
        return max(math.floor(received * factor), min(received, 1))
    return max(0, math.ceil((received - Fraction(1, 2)) * factor - Fraction(1, 2)))


class _Plan(NamedTuple):
    """What a stream would be after a push, and what to compute for it."""

    parts: list[tuple[int, Generated]]  # with the number of the first code
    num_codes: int
    lengths: list[int]  # of the sentence before each interpolation, and in frames; only known at its end
    ready: int  # frames that later ones cannot change
    is_last: bool
    size: int  # of the windows
    excerpts: list[Excerpt]


class WindowStream:
    """The wave of one sentence, piece by piece, as `HifiGanStream`."""

    def __init__(self, windows: Windows, speaker: Tensor, speed: float) -> None:
        self._windows, self.speaker = windows, np.zeros(windows.speaker_width, np.float32)
        self.speaker[: len(speaker)] = speaker.float().cpu()
        self.factors = windows.factors(speed)
        self.num_done = 0  # frames
        self._parts: list[tuple[int, Generated]] = []
        self._num_codes = 0
        self._overlap: Wave | None = None

    def push(self, generated: Generated, last: bool) -> Tensor:
        """The next samples, on the host; none while the next frame lacks context. A failed call has no effect."""
        return self._windows.push_many([Push(self, generated, last)])[0]

    def plan(self, generated: Generated, last: bool) -> _Plan:
        """What to compute after a push; `advance` then moves the stream on."""
        parts = [*self._parts, (self._num_codes, generated)] if len(generated.codes) else self._parts
        num_codes = self._num_codes + len(generated.codes)
        lengths = self._windows.lengths(num_codes, self.factors, last)
        known = lengths[-1]
        ready = known if last else known - REACH_FRAMES
        if ready <= self.num_done + (0 if last else FADE_FRAMES):
            return _Plan(parts, num_codes, lengths, ready, last, 0, [])
        is_short = self.num_done < REACH_FRAMES and last and known < 2 * REACH_FRAMES
        if is_short:
            return _Plan(parts, num_codes, lengths, ready, last, known, [Excerpt(0, self.num_done, ready)])
        found = {size: list(excerpts(known, self.num_done, ready, size)) for size in self._windows.sizes}
        size = min(found, key=lambda size: (size * len(found[size]), size))
        return _Plan(parts, num_codes, lengths, ready, last, size, found[size])

    def advance(self, plan: _Plan, wave: Wave) -> Wave:
        """Move on, and return the wave of a plan, cross-faded with the one before; keeps the end for the next."""
        self._parts, self._num_codes = plan.parts, plan.num_codes
        if not plan.excerpts:
            return wave
        if self._overlap is not None:
            rise = np.linspace(0, 1, len(self._overlap), dtype=np.float32)
            wave[: len(rise)] = self._overlap + rise * (wave[: len(rise)] - self._overlap)
        self.num_done = plan.ready
        if not plan.is_last:
            self.num_done -= FADE_FRAMES
            end = len(wave) - FADE_FRAMES * SAMPLES_PER_FRAME
            wave, self._overlap = wave[:end], wave[end:]
        least = self._windows.first_code(max(self.num_done - REACH_FRAMES, 0), self.factors)
        self._parts = [part for part in self._parts if part[0] + len(part[1].codes) > least]
        return wave


class _Launched(NamedTuple):
    """Waves on their way to the host."""

    waves: Tensor  # [windows, samples]
    of: list[tuple[int, Excerpt]]  # the plan that each belongs to


class Windows:
    """Makes the pieces of many sentences at once."""

    def __init__(self, generator: Generator, codec: Codec | None, sizes: dict[int, tuple[int, ...]]) -> None:
        self.generator, self.codec, self._counts = generator, codec, sizes
        self.sizes = sorted(sizes)
        self.device = generator.conv_pre.weight.device
        self.reach = REACH if codec is not None else 0  # frames that the flow sees to either side
        self.speaker_width = generator.cond_layer.in_channels + (NUM_OFFSETS if codec is not None else 0)
        self.stream = Stream(self.device)  # of captures: graphs share memory only if they were captured on one
        self.noise = noise_of(NOISE_FRAMES).t().contiguous().to(self.device)
        self._programs: dict[tuple[int, int], _Program] = {}
        self.fused: FusedGenerator | None = None

    def factors(self, speed: float) -> list[Fraction]:
        """Of the interpolations, in order."""
        steps = [1 / Fraction(speed).limit_denominator(1000), TO_OUTPUT]
        return steps if self.codec is not None else [steps[0], TO_FRAMES, TO_OUTPUT]

    def lengths(self, num_codes: int, factors: Sequence[Fraction], last: bool) -> list[int]:
        """Rows before each interpolation, then frames, that more codes cannot change."""
        known = num_codes
        if self.codec is not None:
            known = FRAMES_PER_CODE * max(0, num_codes - (0 if last else self.codec.dvae.reach_codes))
        lengths = [known]
        for factor in factors:
            lengths.append(stretched_length(lengths[-1], factor, last))
        lengths[-1] -= 0 if last else self.reach
        return lengths

    def starts(self, first_frame: int, factors: Sequence[Fraction]) -> list[int]:
        """The first row that each interpolation needs for frames from `first_frame` on, from its input on."""
        rows = [max(first_frame - self.reach, 0)]
        for factor in reversed(factors):
            rows.insert(0, max(0, math.floor((rows[0] + 0.5) / factor - 0.5) - 1))
        return rows

    def first_code(self, first_frame: int, factors: Sequence[Fraction]) -> int:
        """The first code that frames from `first_frame` on depend on."""
        row = self.starts(first_frame, factors)[0]
        if self.codec is None:
            return row
        return max(0, row // FRAMES_PER_CODE - self.codec.dvae.reach_codes)

    @torch.no_grad()
    def capture(self) -> None:
        """Capture batches of windows on a GPU, the largest first: others fit into its memory."""
        if self.device.type != "cuda":
            return
        Stream.current(self.device).finish()
        with self.stream.use(), _tf32_products():
            self.fused = FusedGenerator.compiled(self.generator)
        for size, counts in sorted(self._counts.items(), reverse=True):
            for count in sorted(counts, reverse=True):
                program = _Program(self, size, count)
                program.capture(next((each.graph.pool for each in self._programs.values() if each.graph), None))
                self._programs[size, count] = program

    def push_many(self, pushes: Sequence[Push]) -> list[Tensor]:
        """The next samples of several streams, on the host, as `WindowStream.push`.

        Several threads may call this for different streams: one launches while another waits for its waves.
        """
        with CAPTURING, torch.no_grad():
            plans = [push.stream.plan(push.generated, push.last) for push in pushes]
            launched = [*self._launched(pushes, plans)]
            passed = Event(self.device)
            Stream.current(self.device).record(passed)
        passed.wait_on_host()
        lengths = [
            plan.ready - push.stream.num_done if plan.excerpts else 0
            for push, plan in zip(pushes, plans, strict=True)
        ]
        waves = [np.empty(length * SAMPLES_PER_FRAME, np.float32) for length in lengths]
        for made, of in launched:
            for row, (index, (start, begin, end)) in zip(made.numpy(), of, strict=True):
                first = pushes[index].stream.num_done
                there = slice((begin - first) * SAMPLES_PER_FRAME, (end - first) * SAMPLES_PER_FRAME)
                here = slice((begin - start) * SAMPLES_PER_FRAME, (end - start) * SAMPLES_PER_FRAME)
                waves[index][there] = row[here]
        done = zip(pushes, plans, waves, strict=True)
        return [torch.from_numpy(push.stream.advance(plan, wave)) for push, plan, wave in done]

    def _launched(self, pushes: Sequence[Push], plans: Sequence[_Plan]) -> Iterator[_Launched]:
        by_size: defaultdict[int, list[tuple[int, Excerpt]]] = defaultdict(list)
        for index, plan in enumerate(plans):
            by_size[plan.size] += [(index, excerpt) for excerpt in plan.excerpts]
        for size, work in sorted(by_size.items()):
            counts = self._counts.get(size, (1,))
            while work:
                count = min((each for each in counts if each >= len(work)), default=max(counts))
                if (count - len(work)) * size > SPARE_FRAMES:
                    count = max(each for each in counts if each <= len(work))
                some, work = work[:count], work[count:]
                program = self._programs.get((size, count)) or _Program(self, size, count)
                given = [(pushes[index].stream, plans[index], excerpt) for index, excerpt in some]
                made = program.run(given)
                if self.device.type == "cuda":
                    made = torch.empty(made.shape, pin_memory=True).copy_(made, non_blocking=True)
                yield _Launched(made, some)


class _Program:
    """A computation of some windows of one length, captured or not, with the memory that it reads."""

    def __init__(self, windows: Windows, size: int, count: int) -> None:
        self._windows, self._size, self._count = windows, size, count
        codec, like = windows.codec, windows.generator.conv_pre.weight
        self._num_stages = len(windows.factors(1.0))
        self._rows = [size + 2 * windows.reach]  # of each interpolation's input, then frames
        for factor in reversed(windows.factors(MAX_SPEED)):
            self._rows.insert(0, math.ceil(self._rows[0] / factor) + _SLACK)
        self._num_codes = self._rows[0]
        if codec is not None:
            self._num_codes = -(-self._rows[0] // FRAMES_PER_CODE) + 1 + 2 * codec.dvae.reach_codes
            self._rows[0] = FRAMES_PER_CODE * self._num_codes
        # A row per window: codes, their places among the latents that were sent, and numbers.
        self._numbers = torch.zeros(
            count, 2 * self._num_codes + self._num_fixed, dtype=torch.long, device=like.device
        )
        channels = windows.generator.flow.latents.in_features if windows.generator.flow else like.shape[1]
        self._latents = torch.zeros(count * self._num_codes, channels, device=like.device)
        self._speaker = torch.zeros(count, windows.speaker_width, device=like.device)
        self._arange = torch.arange(max(self._rows), device=like.device)
        self._numbers[:, 2 * self._num_codes :] = 1
        self.graph: CudaGraph[Tensor] | None = None

    @property
    def _num_fixed(self) -> int:
        """Numbers after codes and places: the known codes, a speed, an offset, starts and lengths of all rows."""
        return 4 + 2 * (self._num_stages + 1)

    def capture(self, pool: Any) -> None:
        flags = torch.backends.cudnn.flags(enabled=True, benchmark=True, benchmark_limit=PLANS_TRIED)
        with flags, _tf32_products():
            self.graph = CudaGraph(self._compute, self._windows.stream, pool)

    def run(self, given: Sequence[tuple[WindowStream, _Plan, Excerpt]]) -> Tensor:
        """Waves [windows, samples], which the next run overwrites."""
        numbers = np.zeros((len(given), self._numbers.shape[1]), np.int64)
        speakers = np.stack([stream.speaker for stream, _, _ in given])
        latents, num_latents = list[Tensor](), 0
        for row, (stream, plan, excerpt) in zip(numbers, given, strict=True):
            first = self._windows.first_code(excerpt.start, stream.factors)
            row[2 * self._num_codes :] = self._fixed(stream, plan, excerpt, first)
            for at, part in plan.parts:
                start, end = max(at, first), min(at + len(part.codes), first + self._num_codes)
                if start >= end:
                    continue
                row[start - first : end - first] = part.codes[start - at : end - at].numpy()
                there = slice(self._num_codes + start - first, self._num_codes + end - first)
                row[there] = np.arange(num_latents, num_latents + end - start)
                latents.append(part.latents[start - at : end - at])
                num_latents += end - start
        send(self._numbers[: len(given)], torch.from_numpy(numbers))
        send(self._speaker[: len(given)], torch.from_numpy(speakers))
        places = self._numbers[: len(given), self._num_codes : 2 * self._num_codes].flatten()
        torch.index_select(torch.cat(latents).float(), 0, places, out=self._latents[: len(places)])
        return (self.graph.replay() if self.graph else self._compute())[: len(given)]

    def _fixed(self, stream: WindowStream, plan: _Plan, excerpt: Excerpt, first: int) -> list[int]:
        starts = self._windows.starts(excerpt.start, stream.factors)
        lengths = plan.lengths if plan.is_last else [_ENDLESS] * len(plan.lengths)
        speed, offset = stream.factors[0], excerpt.start - starts[-1]
        starts[0] = first * (FRAMES_PER_CODE if self._windows.codec is not None else 1)
        return [plan.num_codes - first, *speed.as_integer_ratio(), offset, *starts, *lengths]

    def _compute(self) -> Tensor:
        """Waves of what is in the memory. Needs nothing from the host, so it can be captured."""
        codes, _, fixed = self._numbers.tensor_split([self._num_codes, 2 * self._num_codes], 1)
        num_codes, numerator, denominator, offset, *places = fixed.tensor_split(self._num_fixed, 1)
        starts, lengths = places[: self._num_stages + 1], places[self._num_stages + 1 :]
        rows, generator = self._latents.view(self._count, self._num_codes, -1), self._windows.generator
        if (codec := self._windows.codec) is not None:
            mels = codec.dvae.mel_rows(codes, codec.mel_stats, num_codes.squeeze(1))
            rows = unfolded(torch.cat([mels, rows], 2))
        factors: list[Tensor | float] = [numerator.double() / denominator]
        factors += map(float, self._windows.factors(1.0)[1:])
        for stage, factor in enumerate(factors):
            numbers = starts[stage + 1] + self._arange[: self._rows[stage + 1]]
            rows = _interpolated(rows, starts[stage], numbers, factor, lengths[stage])
        if codec is not None:
            rows = self._drawn(rows, starts[-1], lengths[-1])
        index = offset + self._arange[: self._size]
        there = (index >= 0)[:, :, None]
        frames = rows.gather(1, index.clamp(0, rows.shape[1] - 1)[:, :, None].expand(-1, -1, rows.shape[2]))
        make = self._windows.fused or partial(run_generator, generator)
        return make(torch.where(there, frames, 0), self._speaker)

    def _drawn(self, rows: Tensor, start: Tensor, length: Tensor) -> Tensor:
        """HiFi-GAN's mels of frames, drawn by the flow."""
        codec, numbers = self._windows.codec, start + self._arange[: rows.shape[1]]
        assert codec is not None
        inside, g = (numbers < length)[:, :, None], self._speaker[:, :, None]
        mel, given = self._windows.noise[numbers % NOISE_FRAMES].mT, normalised(rows.mT)
        for step in range(STEPS):
            mel = codec.flow.follow(mel, step, given, g, inside)
        return mel.mT * TARGET_SCALE + TARGET_MEAN


def _interpolated(rows: Tensor, first: Tensor, numbers: Tensor, factor: Tensor | float, length: Tensor) -> Tensor:
    """Rows `numbers` [B, n] of sequences that were interpolated by `factor`, as `Stretch` gives them.

    `rows` [B, m, channels] begin at row `first` [B, 1] of sequences of `length` [B, 1].
    """
    places = torch.minimum(((numbers.double() + 0.5) / factor - 0.5).clamp(min=0), (length - 1).double())
    before = places.long()
    share = (places - before).to(rows.dtype)[:, :, None]

    def taken(index: Tensor) -> Tensor:
        index = (index - first).clamp(0, rows.shape[1] - 1)
        return rows.gather(1, index[:, :, None].expand(-1, -1, rows.shape[2]))

    return taken(before).lerp(taken(torch.minimum(before + 1, length - 1)), share)


def run_generator(generator: Generator, frames: Tensor, speaker: Tensor) -> Tensor:
    """Waves [n, samples] of frames [n, frames, channels]."""
    dtype = generator.conv_pre.weight.dtype
    wave: Tensor = generator(frames.transpose(1, 2).to(dtype), speaker[:, :, None].to(dtype))
    return wave.squeeze(1).float()


@contextlib.contextmanager
def _tf32_products() -> Iterator[None]:
    """Let products of float32 matrices round their inputs to TF32, as convolutions do."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    try:
        yield
    finally:
        matmul.allow_tf32 = before


tl: Any = None  # triton.language, once `_add_kernel` is compiled
_BLOCK = 2048  # elements of a program of the kernel


def _add_kernel(  # type: ignore[no-untyped-def]
    y, bias, one, other, total, active, count, per_sample, last_channel, scale, slope,
    IS_OF_SAMPLE: tl.constexpr, NUM_ADDED: tl.constexpr, HAS_TOTAL: tl.constexpr, HAS_ACTIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`FusedGenerator._sum`, for Triton: it knows no names but `tl` and those of its arguments."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    column = at & last_channel
    if IS_OF_SAMPLE:
        column += at // per_sample * (last_channel + 1)
    value = tl.load(y + at, inside).to(tl.float32) + tl.load(bias + column, inside).to(tl.float32)
    if NUM_ADDED > 0:
        value += tl.load(one + at, inside).to(tl.float32)
    if NUM_ADDED > 1:
        value += tl.load(other + at, inside).to(tl.float32)
    if HAS_TOTAL:
        tl.store(total + at, value, inside)
    if HAS_ACTIVE:
        value *= scale
        tl.store(active + at, tl.where(value > 0, value, value * slope), inside)


class FusedGenerator:
    """`Generator` on a GPU, equal up to rounding: what follows a convolution is one kernel, made by Triton.

    PyTorch adds a bias in a kernel of its own that takes longer than most of these convolutions.
    """

    def __init__(self, generator: Generator, kernel: Any = None) -> None:
        """Without a kernel PyTorch computes the same."""
        self._generator, self._kernel = generator, kernel
        self._weights: dict[nn.Module, Tensor] = {}

    @classmethod
    def compiled(cls, generator: Generator) -> FusedGenerator | None:
        """None where Triton or a C compiler is missing, or computes something else."""
        global tl
        weight, draw = generator.conv_pre.weight, torch.Generator().manual_seed(0)
        sizes = (2, 32, weight.shape[1]), (2, generator.cond_layer.in_channels)
        given = [torch.randn(size, generator=draw).to(weight.device) for size in sizes]
        try:
            import triton
            import triton.language

            tl, made = triton.language, cls(generator, triton.jit(_add_kernel))
            found, expected = made(*given), run_generator(generator, *given)
            error = float((found - expected).abs().max() / expected.abs().max())
            if not error < TOLERANCE:
                raise ValueError(f"an error of {error}")
        except Exception as error:
            _log.info("The vocoder runs without fused kernels, which is slower: %s", error)
            _log.debug("The reason in full", exc_info=True)
            return None
        return made

    def __call__(self, frames: Tensor, speaker: Tensor) -> Tensor:
        """Waves [n, samples] of frames [n, frames, channels]."""
        generator, dtype = self._generator, self._generator.conv_pre.weight.dtype
        g = speaker[:, : generator.cond_layer.in_channels, None].to(dtype)
        kernels = len(RESBLOCK_KERNELS)
        x = generator.conv_pre(frames.transpose(1, 2).to(dtype)) + generator.cond_layer(g)
        active = F.leaky_relu(x.unsqueeze(2), SLOPE).contiguous(memory_format=torch.channels_last)
        for level, (up, cond) in enumerate(zip(generator.ups, generator.conds, strict=True)):
            bias = (up.bias + cond(g).squeeze(2)).contiguous()
            x, active = self._sum(self._convolved(up, active), bias)
            slope = LAST_SLOPE if level == len(generator.ups) - 1 else SLOPE
            active = self._mean(generator.resblocks[kernels * level : kernels * (level + 1)], x, active, slope)
        return generator.samples(active.float()).squeeze(1)

    def _mean(self, blocks: Any, x: Tensor, active: Tensor, slope: float) -> Tensor:
        """The activated mean of what blocks return for x, which is also given activated."""
        totals: list[Tensor] = []
        for block in blocks:
            total, hidden = x, active
            for dilated, plain in zip(block.convs1, block.convs2, strict=True):
                is_end = plain is block.convs2[-1]
                _, hidden = self._sum(self._convolved(dilated, hidden), dilated.bias, has_total=False)
                y, more = self._convolved(plain, hidden), [total, *(totals if is_end else [])]
                if is_end and block is blocks[-1]:
                    return self._sum(y, plain.bias, *more, has_total=False, scale=1 / len(blocks), slope=slope)[1]
                total, hidden = self._sum(y, plain.bias, *more, has_active=not is_end)
            totals = [total]
        return active

    def _convolved(self, conv: Any, x: Tensor) -> Tensor:
        """An image [B, C, 1, T] without the bias."""
        if conv not in self._weights:
            self._weights[conv] = conv.weight.unsqueeze(2).contiguous(memory_format=torch.channels_last)
        weight, stride, padding = self._weights[conv], (1, conv.stride[0]), (0, int(conv.padding[0]))
        if isinstance(conv, nn.ConvTranspose1d):
            y = F.conv_transpose2d(x, weight, None, stride, padding)
        else:
            y = F.conv2d(x, weight, None, stride, padding, (1, conv.dilation[0]))
        return y.contiguous(memory_format=torch.channels_last)

    def _sum(
        self,
        y: Tensor,
        bias: Tensor,
        *more: Tensor,
        has_total: bool = True,
        has_active: bool = True,
        scale: float = 1.0,
        slope: float = SLOPE,
    ) -> tuple[Tensor, Tensor]:
        """The sum of images and a bias [C] or [B, C], in the memory of the first; and scaled and activated."""
        channels, per_sample = y.shape[1], y.numel() // len(y)
        if self._kernel is None:
            total = sum(more, y.float() + bias.float().view(-1, channels, 1, 1))
            return total.to(y.dtype), F.leaky_relu(total * scale, slope).to(y.dtype)
        active = torch.empty_like(y) if has_total and has_active else y
        others = (*more, y, y)[:2]
        numbers = (y.numel(), per_sample, channels - 1, scale, slope)
        flags = (bias.dim() == 2, len(more), has_total, has_active, _BLOCK)
        self._kernel[-(-y.numel() // _BLOCK),](y, bias, *others, y, active, *numbers, *flags, num_warps=8)
        return y, active
