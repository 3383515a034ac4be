"""Kokoro-82M in plain PyTorch: phoneme ids and style vectors in, samples out, in batches.

A batch gives what one clip at a time gives: norms count real frames only, and convolutions see zeros past the end.
Tensors are (batch, time, channels), the layout in which tensor cores read convolutions without copies. The stream
between blocks is float32; `convert` moves the convolutions of the decoder to bfloat16, which loses no quality.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLE_RATE = 24_000
FRAME = 600  # samples
STYLE = 128  # numbers that describe the timbre, and as many for the prosody
HARMONICS = 9
WINDOW, HOP = 20, 5  # of the short Fourier transform at both ends of the generator
BINS = WINDOW // 2 + 1


class Span(NamedTuple):
    """The real part of padded rows: a mask (B, T, 1) of ones and zeros, and its sums (B, 1, 1)."""

    mask: Tensor
    count: Tensor


def span(counts: Tensor, longest: int) -> Span:
    """Return the span of rows of `counts` frames, padded to `longest`."""
    mask = torch.arange(longest, device=counts.device)[None] < counts[:, None]
    return Span(mask[..., None].float(), counts[:, None, None].float())


# --- Blocks of the decoder: nearly all time is spent here --------------------------------------------------------


def _normed(x: Tensor, mask: Tensor, count: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return `x` with every channel of every row normed over its real frames, then scaled and shifted."""
    mean = (x * mask).sum(1, keepdim=True) / count
    variance = ((x * x * mask).sum(1, keepdim=True) / count - mean * mean).clamp(min=0)
    gain = torch.rsqrt(variance + 1e-5) * (1 + scale)
    return x * gain + (shift - mean * gain)


def add(x: Tensor, change: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Return the stream after a residual change."""
    return (x + change.float() + bias.float()) * mask


def snake(
    x: Tensor, mask: Tensor, count: Tensor, scale: Tensor, shift: Tensor, alpha: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the norm of `x` plus its squared sine, which keeps harmonics alive."""
    y = _normed(x.float(), mask, count, scale, shift)
    return ((y + torch.sin(alpha * y).square() / alpha) * mask).to(dtype)


def add_and_snake(
    x: Tensor,
    change: Tensor,
    bias: Tensor,
    mask: Tensor,
    count: Tensor,
    scale: Tensor,
    shift: Tensor,
    alpha: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the stream after a residual change, and `snake` of it."""
    x = add(x, change, bias, mask)
    return x, snake(x, mask, count, scale, shift, alpha, dtype)


def leaky(x: Tensor, mask: Tensor, count: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the leaky ReLU of the norm of `x`."""
    return (F.leaky_relu(_normed(x.float(), mask, count, scale, shift), 0.2) * mask).to(dtype)


class Kernels:
    """The functions that `compile` replaces by fused ones."""

    def __init__(self) -> None:
        self.compiled = False
        self.add: Callable[..., Tensor] = add
        self.snake: Callable[..., Tensor] = snake
        self.add_and_snake: Callable[..., tuple[Tensor, Tensor]] = add_and_snake
        self.leaky: Callable[..., Tensor] = leaky

    def compile(self) -> None:
        self.compiled = True
        self.add, self.snake, self.add_and_snake = map(torch.compile, (add, snake, add_and_snake))
        self.leaky = torch.compile(leaky, dynamic=True)


KERNELS = Kernels()


def _any_length(*tensors: Tensor) -> None:
    """Let compiled code accept any number of rows and frames; channels stay fixed."""
    for tensor in tensors if KERNELS.compiled else ():
        for axis in (0, 1):
            if tensor.shape[axis] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, axis)


def conv(x: Tensor, layer: nn.Conv1d, bias: Tensor | None = None) -> Tensor:
    """Return the convolution of (B, T, C) in the layer's type; two-dimensional, because that has a fast layout."""
    weight = layer.weight[:, :, None].contiguous(memory_format=torch.channels_last)
    padding, dilation = (0, int(layer.padding[0])), (1, layer.dilation[0])
    y = F.conv2d(x.transpose(1, 2).unsqueeze(2), weight, bias, padding=padding, dilation=dilation)
    return y.squeeze(2).transpose(1, 2).contiguous()


class AdaptiveNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(STYLE, 2 * channels)

    def forward(self, style: Tensor) -> list[Tensor]:
        """Return scale and shift (B, 1, C) of a style."""
        return [part.contiguous() for part in self.fc(style)[:, None].chunk(2, -1)]


class SnakeBlock(nn.Module):
    """Norm, snake and dilated convolution, six times, with a residual path around each pair."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        pad = (kernel - 1) // 2
        self.convs1 = nn.ModuleList(nn.Conv1d(channels, channels, kernel, 1, d * pad, d) for d in (1, 3, 5))
        self.convs2 = nn.ModuleList(nn.Conv1d(channels, channels, kernel, 1, pad) for _ in range(3))
        self.adain1 = nn.ModuleList(AdaptiveNorm(channels) for _ in range(3))
        self.adain2 = nn.ModuleList(AdaptiveNorm(channels) for _ in range(3))
        self.alpha1 = nn.ParameterList(torch.ones(1, channels, 1) for _ in range(3))
        self.alpha2 = nn.ParameterList(torch.ones(1, channels, 1) for _ in range(3))

    def forward(self, x: Tensor, style: Tensor, real: Span) -> Tensor:
        change = None
        for at in range(3):
            # The first convolution needs no bias: the norm after it removes any constant.
            dtype = self.convs1[at].weight.dtype
            norm, alpha = self.adain1[at](style), self.alpha1[at].view(1, 1, -1)
            _any_length(x, *real, *norm)
            if change is None:
                y = KERNELS.snake(x, *real, *norm, alpha, dtype)
            else:
                _any_length(change)
                bias = self.convs2[at - 1].bias
                x, y = KERNELS.add_and_snake(x, change, bias, *real, *norm, alpha, dtype)
            y = conv(y, self.convs1[at])
            norm, alpha = self.adain2[at](style), self.alpha2[at].view(1, 1, -1)
            _any_length(y, *norm)
            y = KERNELS.snake(y, *real, *norm, alpha, dtype)
            change = conv(y, self.convs2[at])
        _any_length(x, change, real.mask)
        return KERNELS.add(x, change, self.convs2[2].bias, real.mask)


class LeakyBlock(nn.Module):
    """Norm, leaky ReLU and convolution, twice; `up` doubles the number of frames."""

    def __init__(self, inputs: int, outputs: int, up: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = AdaptiveNorm(inputs), AdaptiveNorm(outputs)
        self.conv1, self.conv2 = (nn.Conv1d(n, outputs, 3, 1, 1) for n in (inputs, outputs))
        self.conv1x1 = nn.Conv1d(inputs, outputs, 1, bias=False) if inputs != outputs else None
        self.pool = nn.ConvTranspose1d(inputs, inputs, 3, 2, 1, 1, groups=inputs) if up else None

    def forward(self, x: Tensor, style: Tensor, real: Span, doubled: Span | None = None) -> Tensor:
        dtype = self.conv1.weight.dtype
        y = KERNELS.leaky(x, *real, *self.norm1(style), torch.float32 if self.pool else dtype)
        if self.pool is not None and doubled is not None:
            left, middle, right = self.pool.weight[:, 0].float().unbind(1)
            following = F.pad(y[:, 1:], (0, 0, 0, 1))
            y = torch.stack([middle * y, right * y + left * following], 2).flatten(1, 2) + self.pool.bias
            real = doubled
            y, x = (y * real.mask).to(dtype), x.repeat_interleave(2, 1)
        y = KERNELS.leaky(conv(y, self.conv1), *real, *self.norm2(style), dtype)
        y = conv(y, self.conv2) + self.conv2.bias
        if self.conv1x1 is not None:
            x = F.linear(x.to(dtype), self.conv1x1.weight[..., 0])
        return (x.float() + y) * (math.sqrt(0.5) * real.mask)


# --- Text --------------------------------------------------------------------------------------------------------


class Albert(nn.Module):
    """One transformer layer, used twelve times."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(vocabulary, 128),
                "position_embeddings": nn.Embedding(512, 128),
                "token_type_embeddings": nn.Embedding(2, 128),
                "LayerNorm": nn.LayerNorm(128, eps=1e-12),
            }
        )
        attention = nn.ModuleDict({name: nn.Linear(768, 768) for name in ("query", "key", "value", "dense")})
        attention["LayerNorm"] = nn.LayerNorm(768, eps=1e-12)
        layer = nn.ModuleDict({"attention": attention})
        layer["ffn"], layer["ffn_output"] = nn.Linear(768, 2048), nn.Linear(2048, 768)
        layer["full_layer_layer_norm"] = nn.LayerNorm(768, eps=1e-12)
        groups = nn.ModuleList([nn.ModuleDict({"albert_layers": nn.ModuleList([layer])})])
        self.encoder = nn.ModuleDict(
            {"embedding_hidden_mapping_in": nn.Linear(128, 768), "albert_layer_groups": groups}
        )

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        known = self.embeddings
        x = known["word_embeddings"](ids) + known["token_type_embeddings"].weight[0]
        x = known["LayerNorm"](x + known["position_embeddings"].weight[: ids.shape[1]])
        x = self.encoder["embedding_hidden_mapping_in"](x)
        layer = self.encoder["albert_layer_groups"][0]["albert_layers"][0]
        attention = layer["attention"]
        for _ in range(12):
            q, k, v = (attention[n](x).unflatten(2, (12, 64)).transpose(1, 2) for n in ("query", "key", "value"))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None])
            x = attention["LayerNorm"](x + attention["dense"](y.transpose(1, 2).flatten(2)))
            y = layer["ffn_output"](F.gelu(layer["ffn"](x), approximate="tanh"))
            x = layer["full_layer_layer_norm"](x + y)
        return x


class StyledLayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(STYLE, 1024)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        scale, shift = self.fc(style)[:, None].chunk(2, -1)
        return (1 + scale) * F.layer_norm(x, (512,)) + shift


class ChannelNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(512)), nn.Parameter(torch.zeros(512))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (512,), self.gamma, self.beta)


def _lstm(inputs: int) -> nn.LSTM:
    return nn.LSTM(inputs, 256, batch_first=True, bidirectional=True)


def _unroll(lstm: nn.LSTM, x: Tensor, lengths: Tensor) -> Tensor:
    """Return the outputs of an LSTM; `lengths` are on the CPU and descend, so that nothing waits for the GPU."""
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class TextEncoder(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 512)
        convs = (nn.Conv1d(512, 512, 5, padding=2) for _ in range(3))
        self.cnn = nn.ModuleList(nn.ModuleList([layer, ChannelNorm()]) for layer in convs)
        self.lstm = _lstm(512)

    def forward(self, ids: Tensor, lengths: Tensor, keep: Tensor) -> Tensor:
        x = self.embedding(ids) * keep
        for layer, norm in self.cnn:
            x = F.leaky_relu(norm(conv(x, layer, layer.bias)), 0.2) * keep
        return _unroll(self.lstm, x, lengths) * keep


class Predictor(nn.Module):
    """Durations, pitch and energy."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(3) for layer in (_lstm(640), StyledLayerNorm())]
        self.text_encoder = nn.ModuleDict({"lstms": nn.ModuleList(layers)})
        self.lstm, self.shared = _lstm(640), _lstm(640)
        self.duration_proj = nn.ModuleDict({"linear_layer": nn.Linear(512, 50)})
        self.F0, self.N = (
            nn.ModuleList([LeakyBlock(512, 512), LeakyBlock(512, 256, up=True), LeakyBlock(256, 256)])
            for _ in range(2)
        )
        self.F0_proj, self.N_proj = nn.Conv1d(256, 1, 1), nn.Conv1d(256, 1, 1)

    def durations(self, x: Tensor, style: Tensor, lengths: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Return frames per id at the speed 1 (B, T), and the features (B, T, 640) that pitch is read from."""
        wide = style[:, None].expand(-1, x.shape[1], -1)
        x = torch.cat([x, wide], -1) * keep
        layers = self.text_encoder["lstms"]
        for lstm, norm in zip(layers[::2], layers[1::2], strict=True):
            x = torch.cat([norm(_unroll(lstm, x, lengths), style), wide], -1) * keep
        logits = self.duration_proj["linear_layer"](_unroll(self.lstm, x, lengths))
        return torch.sigmoid(logits).sum(-1), x

    def curves(self, x: Tensor, style: Tensor, counts: Tensor, real: Span, doubled: Span) -> list[Tensor]:
        """Return pitch in Hz and energy (B, 2F)."""
        x = _unroll(self.shared, x, counts)
        found = []
        for (first, up, last), out in ((self.F0, self.F0_proj), (self.N, self.N_proj)):
            y = last(up(first(x, style, real), style, real, doubled), style, doubled)
            found.append((F.linear(y, out.weight[..., 0], out.bias) * doubled.mask).squeeze(-1))
        return found


# --- Sound -------------------------------------------------------------------------------------------------------


def _bases() -> tuple[Tensor, Tensor]:
    """Return the matrices of the windowed short Fourier transform and of its inverse: (20, 22) and (22, 20)."""
    angle = 2 * math.pi / WINDOW * torch.outer(torch.arange(WINDOW), torch.arange(BINS)).double()
    window = torch.hann_window(WINDOW, dtype=torch.float64)
    cosines, sines = angle.cos(), angle.sin()
    sines[:, [0, -1]] = 0
    twice = torch.full((BINS,), 2.0, dtype=torch.float64)
    twice[[0, -1]] = 1
    forward = torch.cat([cosines, -sines], 1) * window[:, None]
    inverse = torch.cat([cosines * twice, -sines * twice], 1).T / WINDOW * window
    return forward.float(), inverse.float()


def _overlap(frames: Tensor) -> Tensor:
    """Return the sum of (B, T, 20) frames at steps of 5, without the half window at both ends: (B, 5 (T - 1))."""
    steps = WINDOW // HOP
    parts = frames.unflatten(2, (steps, HOP)).unbind(2)
    total = sum(F.pad(part, (0, 0, at, steps - 1 - at)) for at, part in enumerate(parts))
    return total.flatten(1)[:, WINDOW // 2 : -WINDOW // 2]


def _upsample(x: Tensor, layer: nn.ConvTranspose1d) -> Tensor:
    """Return a transposed convolution whose kernel is two strides long, without its bias: one matrix product."""
    stride, pad = layer.stride[0], int(layer.padding[0])
    weight = layer.weight.unflatten(2, (2, stride)).permute(2, 0, 3, 1).flatten(0, 1).flatten(1)
    x = torch.cat([F.pad(x, (0, 0, 0, 1)), F.pad(x, (0, 0, 1, 0))], -1).to(weight.dtype)
    return (x @ weight).unflatten(2, (stride, -1)).flatten(1, 2)[:, pad:-pad]


class Source(nn.Module):
    """The excitation: nine harmonics of the pitch, and noise where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.l_linear = nn.Linear(HARMONICS, 1)

    def forward(self, pitch: Tensor, noise: float = 1.0) -> Tensor:
        """Return (B, 300 T) samples of a pitch (B, T) in Hz."""
        step = FRAME // 2
        cycles = pitch.double().cumsum(1) * (step / SAMPLE_RATE)
        cycles = F.interpolate(cycles[:, None], scale_factor=step, mode="linear").squeeze(1)
        turn = ((cycles - cycles.floor()) * (2 * math.pi)).float()
        weight = self.l_linear.weight[0]
        sound = sum(weight[n] * torch.sin((n + 1) * turn) for n in range(HARMONICS)) * 0.1
        voiced = (pitch > 10).float().repeat_interleave(step, 1)
        # One draw with the length of the weights as its scale equals nine weighted draws.
        hiss = torch.randn_like(turn) * (weight.norm() * noise) * (voiced * 0.003 + (1 - voiced) * (0.1 / 3))
        return torch.tanh(sound * voiced + hiss + self.l_linear.bias)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m_source = Source()
        self.noise_convs = nn.ModuleList([nn.Conv1d(2 * BINS, 256, 12, 6, 3), nn.Conv1d(2 * BINS, 128, 1)])
        self.noise_res = nn.ModuleList([SnakeBlock(256, 7), SnakeBlock(128, 11)])
        self.ups = nn.ModuleList([nn.ConvTranspose1d(512, 256, 20, 10, 5), nn.ConvTranspose1d(256, 128, 12, 6, 3)])
        self.resblocks = nn.ModuleList(SnakeBlock(c, k) for c in (256, 128) for k in (3, 7, 11))
        self.conv_post = nn.Conv1d(128, 2 * BINS, 7, 1, 3)
        forward, inverse = _bases()
        self.register_buffer("forward_basis", forward, persistent=False)
        self.register_buffer("inverse_basis", inverse, persistent=False)

    def excitation(self, pitch: Tensor, noise: float) -> list[Tensor]:
        """Return the source as the inputs of both noise blocks."""
        wave = F.pad(self.m_source(pitch, noise)[:, None], (WINDOW // 2, WINDOW // 2), mode="reflect").squeeze(1)
        with exact():
            real, imaginary = (wave.unfold(1, WINDOW, HOP) @ self.forward_basis).chunk(2, -1)
        spectrum = torch.cat([torch.hypot(real, imaginary), torch.atan2(imaginary + 0.0, real)], -1)
        coarse, fine = self.noise_convs
        patches = F.pad(spectrum, (0, 0, 3, 3)).unfold(1, 12, 6).flatten(2)
        return [
            F.linear(patches, coarse.weight.flatten(1), coarse.bias),
            F.linear(spectrum, fine.weight[..., 0], fine.bias),
        ]

    def forward(self, x: Tensor, style: Tensor, pitch: Tensor, spans: list[Span], noise: float) -> Tensor:
        for at, (source, real) in enumerate(zip(self.excitation(pitch, noise), spans, strict=True)):
            source = self.noise_res[at](source * real.mask, style, real)
            x = _upsample(F.leaky_relu(x, 0.1), self.ups[at])
            if at == 1:
                x = torch.cat([x[:, 1:2], x], 1)
            x = x.contiguous()
            _any_length(source, x, real.mask)
            x = KERNELS.add(source, x, self.ups[at].bias, real.mask)
            x = sum(block(x, style, real) for block in self.resblocks[3 * at : 3 * at + 3]) / 3
        x = conv(F.leaky_relu(x), self.conv_post, self.conv_post.bias)  # float32: exp magnifies rounding
        size, phase = x[..., :BINS].exp() * spans[1].mask, torch.sin(x[..., BINS:])
        with exact():
            frames = torch.cat([size * phase.cos(), size * phase.sin()], -1) @ self.inverse_basis
        squares = torch.hann_window(WINDOW, device=x.device).square()
        return _overlap(frames) / _overlap(spans[1].mask * squares).clamp(min=1e-3)


class exact:
    """Turns TF32 off: for the few products whose rounding would be audible as noise."""

    def __enter__(self) -> None:
        self.before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = self.before


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = LeakyBlock(514, 1024)
        self.decode = nn.ModuleList([*(LeakyBlock(1090, 1024) for _ in range(3)), LeakyBlock(1090, 512, up=True)])
        self.F0_conv, self.N_conv = nn.Conv1d(1, 1, 3, 2, 1), nn.Conv1d(1, 1, 3, 2, 1)
        self.asr_res = nn.ModuleList([nn.Conv1d(512, 64, 1)])
        self.generator = Generator()

    def forward(
        self, text: Tensor, curves: list[Tensor], style: Tensor, spans: list[Span], noise: float
    ) -> Tensor:
        real, doubled, *rest = spans
        pitch, energy = (
            layer(curve[:, None]).transpose(1, 2) * real.mask
            for layer, curve in zip((self.F0_conv, self.N_conv), curves, strict=True)
        )
        side = F.linear(text, self.asr_res[0].weight[..., 0], self.asr_res[0].bias) * real.mask
        x = self.encode(torch.cat([text, pitch, energy], -1), style, real)
        for block in self.decode:
            x = block(torch.cat([x, side, pitch, energy], -1), style, real, doubled)
        return self.generator(x, style, curves[0], rest, noise)


class Spoken(NamedTuple):
    """A text that was read: frames per id (B, T), features for pitch (B, T, 640) and for sound (B, T, 512)."""

    durations: Tensor
    prosody: Tensor
    sound: Tensor


class Teacher(nn.Module):
    def __init__(self, vocabulary: int = 178) -> None:
        super().__init__()
        self.bert, self.bert_encoder = Albert(vocabulary), nn.Linear(768, 512)
        self.predictor, self.text_encoder, self.decoder = Predictor(), TextEncoder(vocabulary), Decoder()

    def convert(self, dtype: torch.dtype) -> Teacher:
        """Move the convolutions of the decoder to `dtype`; norms, pitch, source and output stay float32."""
        blocks: Iterable[nn.Module] = self.decoder.modules()
        for block in blocks:
            if isinstance(block, LeakyBlock):
                for layer in (block.conv1, block.conv2, block.conv1x1):
                    if layer is not None:
                        layer.to(dtype)
            elif isinstance(block, SnakeBlock):
                block.convs1.to(dtype)
                block.convs2.to(dtype)
        self.decoder.generator.ups.to(dtype)
        return self

    def read(self, ids: Tensor, lengths: Tensor, style: Tensor, speed: Tensor) -> Spoken:
        """Return how long each id (B, T) is spoken and how; `lengths` are on the CPU and descend."""
        keep = torch.arange(ids.shape[1])[None] < lengths[:, None]
        if ids.is_cuda:
            keep = keep.pin_memory().to(ids.device, non_blocking=True)
        x = self.bert_encoder(self.bert(ids, keep))
        length, prosody = self.predictor.durations(x, style[:, STYLE:], lengths, keep[..., None])
        durations = (length / speed[:, None]).round().clamp(min=1).long() * keep
        return Spoken(durations, prosody, self.text_encoder(ids, lengths, keep[..., None]))

    def speak(self, text: Spoken, counts: Tensor, style: Tensor, frames: int, noise: float = 1.0) -> Tensor:
        """Return samples (B, 600 frames); `counts`, the frames of the rows, are on the CPU and descend."""
        device = style.device
        on_device = counts.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else counts
        steps = torch.arange(frames, device=device).expand(len(counts), -1).contiguous()
        index = torch.searchsorted(text.durations.cumsum(1), steps, right=True)
        index = index.clamp(max=text.durations.shape[1] - 1)[..., None]
        real, doubled = span(on_device, frames), span(2 * on_device, 2 * frames)
        spans = [real, doubled, span(20 * on_device, 20 * frames), span(120 * on_device + 1, 120 * frames + 1)]
        prosody, sound = (
            features.gather(1, index.expand(-1, -1, features.shape[2])) * real.mask
            for features in (text.prosody, text.sound)
        )
        curves = self.predictor.curves(prosody, style[:, STYLE:], counts, real, doubled)
        return self.decoder(sound, curves, style[:, :STYLE], spans, noise)
