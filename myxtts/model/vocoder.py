"""The vocoder (GPT latents and a speaker embedding to a waveform), its discriminators, and the speaker encoder.

    latents [B, T, 1024] ─ ×4 ─► mel-frame rate ─ ×24000/22050 ─► 24 kHz frames ─ generator ×256 ─► [B, 1, N]
    mels and latents [B, T, 4 × 80 + 512] ─► mel-frame rate ─ the same, with a flow (`model.flow`) in between

The generator is HiFi-GAN's (Kong et al. 2020, V1 widths, residual blocks of type 1) with the speaker embedding
added to its input and after every upsampling. Because of the two interpolations an input frame stands for 256
samples at 24 kHz, although a latent stands for 1024 samples at 22.05 kHz. The discriminators are HiFi-GAN's on
periods and UnivNet's on spectrograms (Jang et al. 2021); only training uses them. The speaker encoder is a
ResNet-34 with squeeze-and-excitation and attentive pooling (Heo et al. 2020).

Attribute names are those of XTTS-v2's `model.pth` below `hifigan_decoder.`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import is_parametrized

from myxtts.config import HOP_SAMPLES, SAMPLE_RATE, SAMPLES_PER_CODE
from myxtts.model.flow import MelFlow
from myxtts.model.mel import DVAE_MEL, SPEAKER_MEL, LogMel, filterbank, reflect

OUTPUT_SAMPLE_RATE = 24000  # sample rate of the vocoder's output, in Hz
UPSAMPLE_RATES, UPSAMPLE_KERNELS = (8, 8, 2, 2), (16, 16, 4, 4)
SAMPLES_PER_FRAME = math.prod(UPSAMPLE_RATES)  # output samples per input frame of the generator
RESBLOCK_KERNELS, RESBLOCK_DILATIONS = (3, 7, 11), (1, 3, 5)
SLOPE, LAST_SLOPE = 0.1, 0.01
"""Slopes of the leaky ReLUs; before the last convolution XTTS-v2 has PyTorch's default, not HiFi-GAN's."""
HIFIGAN_MEL = replace(DVAE_MEL, slaney_scale=True)
_FRAMES_PER_LATENT = SAMPLES_PER_CODE / HOP_SAMPLES
_FRAME_RATE_RATIO = OUTPUT_SAMPLE_RATE / SAMPLE_RATE


class HifiGanDecoder(nn.Module):
    """Latents and speaker embedding to waveform; the defaults are XTTS-v2's."""

    def __init__(
        self,
        *,
        decoder_input_dim: int = 1024,
        upsample_initial_channel: int = 512,
        d_vector_dim: int = 512,
        reads_mels: bool = False,
    ) -> None:
        """With `reads_mels` each latent follows the mels of its code (`DVAE.mel_rows`)."""
        super().__init__()
        sizes = (upsample_initial_channel, d_vector_dim)
        self.waveform_decoder = Generator(decoder_input_dim, *sizes, reads_mels=reads_mels)

    def forward(self, latents: Tensor, g: Tensor) -> Tensor:
        """Waveform [B, 1, num_samples(T)] of latents [B, T, C] and speaker embeddings g [B, d_vector_dim, 1]."""
        generator = self.waveform_decoder
        frames = self.frames(latents, generator.reads_mels)
        wave: Tensor = generator(frames if generator.flow is None else generator.flow.draw(frames, g), g)
        return wave

    @staticmethod
    def frames(latents: Tensor, are_mels: bool = False) -> Tensor:
        """Latents [B, T, C] to the generator's input [B, C, num_frames(T)].

        With `are_mels`: mels and latents [B, T, 4 M + C] to the flow's, [B, M + C, num_frames(T)].

        Frame i belongs to samples 256 i to 256 i + 255 of the output, so both can be cropped at the same place.
        """
        if are_mels:
            frames = unfolded(latents).transpose(1, 2)
        else:
            frames = F.interpolate(latents.transpose(1, 2), scale_factor=_FRAMES_PER_LATENT, mode="linear")
        # By a factor, not to a size: the factor is exact, the number of frames is rounded down.
        return F.interpolate(frames, scale_factor=_FRAME_RATE_RATIO, mode="linear")

    def remove_weight_norm(self) -> None:
        """Replace weight norm by plain weights, for inference; their names in the state dict then end in `weight`.

        PyTorch's `remove_parametrizations` deletes `weight` from the module's class, which a deep copy of the
        module shares: the copy would have no weight any more. So the class is only left, not changed.
        """
        for module in [*self.waveform_decoder.modules()]:
            if is_parametrized(module, "weight"):
                weight: Tensor = module.weight  # type: ignore[assignment]
                del module.parametrizations
                module.__class__ = module.__class__.__bases__[0]
                module.weight = nn.Parameter(weight.detach(), weight.requires_grad)


def unfolded(rows: Tensor) -> Tensor:
    """Mels and latents of codes [..., T, 4 M + C] as frames [..., 4 T, M + C], where a latent is repeated."""
    channels, per_code = DVAE_MEL.num_mels, SAMPLES_PER_CODE // HOP_SAMPLES
    mels, latents = rows.tensor_split([per_code * channels], -1)
    return torch.cat([mels.reshape(*rows.shape[:-2], -1, channels), latents.repeat_interleave(per_code, -2)], -1)


def num_frames(num_latents: int) -> int:
    """Input frames of the generator for a number of latents."""
    return math.floor(math.floor(num_latents * _FRAMES_PER_LATENT) * _FRAME_RATE_RATIO)


def num_samples(num_latents: int) -> int:
    """Output samples at 24 kHz for a number of latents."""
    return num_frames(num_latents) * SAMPLES_PER_FRAME


def frames_of(num_latents: int) -> int:
    """Input frames of the generator that stand for the time of so many latents, rounded."""
    return round(num_latents * _FRAMES_PER_LATENT * _FRAME_RATE_RATIO)


def spectral_distance(real: Tensor, fake: Tensor) -> Tensor:
    """Distance of waves [B, N] at 24 kHz, [B]: 0 if their spectra are equal up to loudness, 1 if unrelated.

    The sine of the angle between the magnitudes up to 8 kHz, with a window that resolves harmonics. A distance of
    log-mels would not rank a young decoder and Griffin-Lim as listeners do: the decoder is trained on it, a mel
    smears a wrong pitch, and faint bands, such as those above 8 kHz that Griffin-Lim leaves empty, count as much
    as vowels. Four samples with a MOS of 2.9 by Griffin-Lim and 1.5 by the decoder have log-mel distances of about
    0.5 in both cases; their relative errors of magnitudes, a related measure, are about 0.35 and 0.6.
    """
    size, bins = 2048, 2048 * 8000 // OUTPUT_SAMPLE_RATE
    window = torch.hann_window(size, device=real.device)
    one, other = (
        torch.stft(wave.float(), size, size // 4, window=window, return_complex=True)[:, :bins].abs().flatten(1)
        for wave in (real, fake)
    )
    return (1 - F.cosine_similarity(one, other).square()).clamp(min=0).sqrt()


class Generator(nn.Module):
    """HiFi-GAN's generator with a speaker embedding: frames [B, C, F] to samples [B, 1, 256 F].

    With `reads_mels` the frames are HiFi-GAN's own mels, and `flow` draws these from the DVAE's mels and latents
    of `in_channels`.
    """

    def __init__(
        self, in_channels: int, initial_channels: int, speaker_dim: int, *, reads_mels: bool = False
    ) -> None:
        super().__init__()
        widths = [initial_channels >> (level + 1) for level in range(len(UPSAMPLE_RATES))]
        self.flow = MelFlow(in_channels, speaker_dim) if reads_mels else None
        self.conv_pre = nn.Conv1d(
            HIFIGAN_MEL.num_mels if reads_mels else in_channels, initial_channels, 7, padding=3
        )
        self.ups = nn.ModuleList(
            _normed(nn.ConvTranspose1d(2 * width, width, kernel, stride=rate, padding=(kernel - rate) // 2))
            for width, kernel, rate in zip(widths, UPSAMPLE_KERNELS, UPSAMPLE_RATES, strict=True)
        )
        # One flat list, as in the state dict: block `3 * level + i` has kernel i.
        self.resblocks = nn.ModuleList(
            DilatedBlock(width, kernel) for width in widths for kernel in RESBLOCK_KERNELS
        )
        self.conv_post = nn.Conv1d(widths[-1], 1, 7, padding=3, bias=False)
        self.cond_layer = nn.Conv1d(speaker_dim, initial_channels, 1)
        self.conds = nn.ModuleList(nn.Conv1d(speaker_dim, width, 1) for width in widths)

    @property
    def reads_mels(self) -> bool:
        return self.flow is not None

    @property
    def row_channels(self) -> int:
        """Channels of what is read for each code."""
        if self.flow is None:
            return self.conv_pre.in_channels
        return DVAE_MEL.num_mels * SAMPLES_PER_CODE // HOP_SAMPLES + self.flow.latents.in_features

    def forward(self, frames: Tensor, g: Tensor) -> Tensor:
        return self.body(self.conv_pre(frames), g)

    def body(self, x: Tensor, g: Tensor) -> Tensor:
        """Samples of what `conv_pre` returned, [B, initial_channels, F], and speaker embeddings.

        Offsets for the flow behind an embedding are left out.
        """
        g = g[:, : self.cond_layer.in_channels]
        x = _image(x + self.cond_layer(g))
        kernels = len(RESBLOCK_KERNELS)
        for level, (up, cond) in enumerate(zip(self.ups, self.conds, strict=True)):
            x = _convolve(up, F.leaky_relu(x, SLOPE))
            x = x + cond(g).view(*x.shape[:2], *[1] * (x.dim() - 2))
            blocks = self.resblocks[kernels * level : kernels * (level + 1)]
            x = sum(block(x) for block in blocks) / kernels
        # The samples in float32 even under autocast: rounded to bf16 they hiss at -55 dB.
        with torch.autocast(x.device.type, enabled=False):
            return self.samples(F.leaky_relu(x.float(), LAST_SLOPE))

    def samples(self, x: Tensor) -> Tensor:
        """Samples [B, 1, N] of what the last level returned, activated."""
        weight, padding = self.conv_post.weight.float(), int(self.conv_post.padding[0])
        if x.dim() == 3:
            return torch.tanh(F.conv1d(x, weight, padding=padding))
        return torch.tanh(_to_one_channel(x, weight.unsqueeze(2), (0, padding)).squeeze(2))


class DilatedBlock(nn.Module):
    """Three residual pairs of a dilated and a plain convolution."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(_conv(channels, kernel, dilation) for dilation in RESBLOCK_DILATIONS)
        self.convs2 = nn.ModuleList(_conv(channels, kernel, dilation=1) for _ in RESBLOCK_DILATIONS)

    def forward(self, x: Tensor) -> Tensor:
        for dilated, plain in zip(self.convs1, self.convs2, strict=True):
            hidden = _convolve(dilated, F.leaky_relu(x, SLOPE))
            x = x + _convolve(plain, F.leaky_relu(hidden, SLOPE))
        return x


def _is_adjacent(x: Tensor) -> bool:
    """True where convolutions of images with adjacent channels are faster: on a GPU."""
    return x.is_cuda


def _image(x: Tensor) -> Tensor:
    """On a GPU, [B, C, T] as [B, C, 1, T] with adjacent channels."""
    return x.unsqueeze(2).contiguous(memory_format=torch.channels_last) if _is_adjacent(x) else x


def _convolve(conv: nn.Module, x: Tensor) -> Tensor:
    """A one-dimensional convolution of [B, C, T], or of an image [B, C, 1, T]."""
    if x.dim() == 3:
        output: Tensor = conv(x)
        return output
    assert isinstance(conv, nn.Conv1d | nn.ConvTranspose1d)
    weight, stride, padding = conv.weight.unsqueeze(2), (1, conv.stride[0]), (0, int(conv.padding[0]))
    if isinstance(conv, nn.ConvTranspose1d):
        return F.conv_transpose2d(x, weight, conv.bias, stride, padding)
    return F.conv2d(x, weight, conv.bias, stride, padding, (1, conv.dilation[0]))


def _from_one_channel(image: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """A convolution of [B, 1, H, W] as a product with its patches: cuDNN is slow with a single channel."""
    (height, width), (rows, columns) = weight.shape[2:], padding
    padded = F.pad(image[:, 0], (columns, columns, rows, rows))
    size = [(padded.shape[1] - height) // stride[0] + 1, (padded.shape[2] - width) // stride[1] + 1]
    ends = [(count - 1) * step + 1 for count, step in zip(size, stride, strict=True)]
    patches = [
        padded[:, row : row + ends[0] : stride[0], column : column + ends[1] : stride[1]].flatten(1)
        for row in range(height)
        for column in range(width)
    ]
    # As a batch of products: the gradient of the weights is then a sum of many short ones.
    products = torch.bmm(torch.stack(patches, 1).mT, weight.flatten(1).t().expand(len(image), -1, -1))
    return products.view(len(image), *size, -1).permute(0, 3, 1, 2)


def _to_one_channel(image: Tensor, weight: Tensor, padding: Sequence[int]) -> Tensor:
    """A convolution to [B, 1, H, W] as a product and shifted sums, for the same reason; its kernel moves by 1."""
    (height, width), (rows, columns) = weight.shape[2:], padding
    matrix = F.pad(weight[0].flatten(1), (0, -height * width % 8))
    products = torch.bmm(image.permute(0, 2, 3, 1).flatten(1, 2), matrix.expand(len(image), -1, -1))
    products = products.view(len(image), *image.shape[2:], -1)
    padded = F.pad(products, (0, 0, columns, columns, rows, rows))
    high, wide = image.shape[2] + 2 * rows - height + 1, image.shape[3] + 2 * columns - width + 1
    shifted = [
        padded[:, row : row + high, column : column + wide, row * width + column].float()
        for row in range(height)
        for column in range(width)
    ]
    return torch.stack(shifted).sum(0).unsqueeze(1)


def _conv(channels: int, kernel: int, dilation: int) -> nn.Module:
    padding = dilation * (kernel - 1) // 2
    return _normed(nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=padding))


def _normed(conv: nn.Conv1d | nn.ConvTranspose1d) -> nn.Module:
    """Add weight norm, with a small initial weight: like HiFi-GAN's, a new generator starts near silence."""
    nn.init.normal_(conv.weight, std=0.01)
    weight_norm(conv)
    return conv


class HifiGanMel(nn.Module):
    """HiFi-GAN's own mel: waveforms [B, 1, N] at 24 kHz, taken for 22.05 kHz, to log-mels [B, 80, N // 256]."""

    window: Tensor
    filters: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(HIFIGAN_MEL.window_samples), persistent=False)
        self.register_buffer("filters", filterbank(HIFIGAN_MEL).float(), persistent=False)

    def forward(self, wave: Tensor) -> Tensor:
        """Log-mels of magnitudes, each frame around the middle of its 256 samples."""
        with torch.autocast(wave.device.type, enabled=False):
            size, hop = len(self.window), HIFIGAN_MEL.hop_samples
            frames = reflect(wave.float(), (size - hop) // 2, (size - hop) // 2).squeeze(1).unfold(-1, size, hop)
            spectrum = torch.fft.rfft(frames * self.window)
            magnitudes = (spectrum.real.square() + spectrum.imag.square() + _LEAST_POWER).sqrt()
            mel: Tensor = (magnitudes @ self.filters).clamp(min=HIFIGAN_MEL.log_floor).log().mT
            return mel


class HifiGanInput(nn.Module):
    """HiFi-GAN's own mel and first layer: what the first layer of a generator with its weights should return."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_pre = nn.Conv1d(HIFIGAN_MEL.num_mels, channels, 7, padding=3).requires_grad_(False)
        self.mel = HifiGanMel()

    def forward(self, wave: Tensor) -> Tensor:
        output: Tensor = self.conv_pre(self.mel(wave))
        return output


def modern_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename `weight_g` and `weight_v` of older files to the names of PyTorch's parametrisations."""
    endings = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}
    renamed = {}
    for name, tensor in state.items():
        owner, dot, last = name.rpartition(".")
        renamed[owner + dot + endings.get(last, last)] = tensor
    return renamed


PERIODS = (2, 3, 5, 7, 11)
PERIOD_WIDTHS = (32, 128, 512, 1024, 1024)


class Resolution(NamedTuple):
    """Parameters of a spectrogram with a Hann window."""

    fft_samples: int
    hop_samples: int
    window_samples: int


RESOLUTIONS = (Resolution(1024, 256, 1024), Resolution(2048, 512, 2048), Resolution(512, 128, 512))
"""Windows of 43, 85 and 21 ms at 24 kHz, with hops of a quarter of the window."""
RESOLUTION_WIDTH = 32
_LEAST_POWER = 1e-9  # added under the square root of a magnitude, whose gradient is infinite at silence


class DiscriminatorOutput(NamedTuple):
    """Output of one discriminator for a batch of waveforms."""

    logits: Tensor  # [B, positions]; high for real
    features: list[Tensor]
    """Activations of the hidden layers for feature matching, each [B, channels, height, width]."""


class Discriminators(nn.Module):
    """All discriminators: one for each period and each resolution."""

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

    @property
    def networks(self) -> list[nn.Module]:
        return [*self.periods, *self.resolutions]

    def forward(self, real: Tensor, fake: Tensor) -> tuple[list[DiscriminatorOutput], list[DiscriminatorOutput]]:
        """Outputs of each network for real and generated waveforms [B, 1, N], in one pass over both."""
        outputs: tuple[list[DiscriminatorOutput], list[DiscriminatorOutput]] = ([], [])
        both = torch.cat([real, fake])
        for network in self.networks:
            logits, features = network(both)
            pairs = [feature.chunk(2) for feature in features]
            for half, half_logits in enumerate(logits.chunk(2)):
                outputs[half].append(DiscriminatorOutput(half_logits, [pair[half] for pair in pairs]))
        return outputs


class PeriodDiscriminator(nn.Module):
    """Discriminates the waveform in rows of `period` samples; kernels see one column, every p-th sample."""

    def __init__(self, period: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.period = period
        strides = [3] * (len(widths) - 1) + [1]
        self.layers = nn.ModuleList(
            weight_norm(nn.Conv2d(before, width, (5, 1), (stride, 1), padding=(2, 0)))
            for before, width, stride in zip((1, *widths[:-1]), widths, strides, strict=True)
        )
        self.last = weight_norm(nn.Conv2d(widths[-1], 1, (3, 1), padding=(1, 0)))

    def forward(self, wave: Tensor) -> DiscriminatorOutput:
        wave = reflect(wave, 0, -wave.shape[-1] % self.period)
        return _discriminate(wave.view(len(wave), 1, -1, self.period), self.layers, self.last)


class ResolutionDiscriminator(nn.Module):
    """Discriminates the magnitude spectrogram of one resolution; three layers halve the time axis."""

    window: Tensor

    def __init__(self, resolution: Resolution, width: int) -> None:
        super().__init__()
        self.resolution = resolution
        self.register_buffer("window", torch.hann_window(resolution.window_samples), persistent=False)
        # Kernels and strides are (frequency, time).
        shapes = [((3, 9), (1, 1)), *[((3, 9), (1, 2))] * 3, ((3, 3), (1, 1))]
        self.layers = nn.ModuleList(
            weight_norm(nn.Conv2d(before, width, kernel, stride, padding=(kernel[0] // 2, kernel[1] // 2)))
            for before, (kernel, stride) in zip((1, *[width] * 4), shapes, strict=True)
        )
        self.last = weight_norm(nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, wave: Tensor) -> DiscriminatorOutput:
        return _discriminate(self.magnitudes(wave).unsqueeze(1), self.layers, self.last)

    def magnitudes(self, wave: Tensor) -> Tensor:
        """Spectrogram [B, fft / 2 + 1, N // hop] of waveforms [B, 1, N], in float32 even under autocast."""
        fft, hop, window_samples = self.resolution
        with torch.autocast(wave.device.type, enabled=False):
            # Frame i is centred on hop i, so N samples give N // hop frames.
            padded = reflect(wave.float(), (fft - hop) // 2, (fft - hop) // 2).squeeze(1)
            window = self.window.float()
            spectrum = torch.stft(padded, fft, hop, window_samples, window, center=False, return_complex=True)
            return (torch.view_as_real(spectrum).square().sum(-1) + _LEAST_POWER).sqrt()


def _discriminate(image: Tensor, layers: nn.ModuleList, last: nn.Conv2d) -> DiscriminatorOutput:
    features: list[Tensor] = []
    for layer in layers:
        assert isinstance(layer, nn.Conv2d)
        if not features and _is_adjacent(image):
            output = _from_one_channel(image, layer.weight, layer.stride, [*map(int, layer.padding)])
            assert layer.bias is not None
            image = output + layer.bias[:, None, None].to(output.dtype)
        else:
            image = layer(image)
        image = F.leaky_relu(image, SLOPE)
        features.append(image)
    if not _is_adjacent(image):
        return DiscriminatorOutput(last(image).flatten(1), features)
    assert last.bias is not None
    logits = _to_one_channel(image, last.weight, [*map(int, last.padding)]) + last.bias
    return DiscriminatorOutput(logits.flatten(1), features)


BLOCKS_PER_LAYER = (3, 4, 6, 3)
LAYER_STRIDES = (1, 2, 2, 2)  # strides of both mels and time
SQUEEZE = 8
ATTENTION_CHANNELS = 128
LEAST_VARIANCE = 1e-5
CROP_SAMPLES = 40000  # length of the clips that the speaker encoder is trained on: 2.5 seconds at 16 kHz


class SpeakerEncoder(nn.Module):
    """Waveforms [batch, samples] at 16 kHz to speaker embeddings [batch, proj_dim]."""

    def __init__(
        self, input_dim: int = 64, proj_dim: int = 512, num_filters: Sequence[int] = (32, 64, 128, 256)
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, num_filters[0], kernel_size=3, padding=1)
        self.bn1 = nn.BatchNorm2d(num_filters[0])
        inputs = (num_filters[0], *num_filters[:-1])
        shapes = zip(inputs, num_filters, BLOCKS_PER_LAYER, LAYER_STRIDES, strict=True)
        self.layer1, self.layer2, self.layer3, self.layer4 = (_layer(*shape) for shape in shapes)
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
        """Speaker embeddings; the vocoder expects unit length (`l2_norm`)."""
        # Normalise every mel band over the clip: removes loudness and microphone.
        mel = F.instance_norm(self.torch_spec(wave))
        image = mel.to(self.conv1.weight.dtype).unsqueeze(1)  # [batch, 1, mels, frames]
        hidden = self.bn1(self.conv1(image).relu())  # the published weights have the ReLU before the norm
        if hidden.is_cuda:  # the layout that tensor cores need; the layers keep it
            hidden = hidden.contiguous(memory_format=torch.channels_last)
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        hidden = hidden.flatten(1, 2)  # [batch, channels * mels / 8, frames / 8], grouped by channel
        pooled = attentive_statistics(hidden, self.attention(hidden))
        embedding: Tensor = self.fc(pooled.to(self.fc.weight.dtype))
        return F.normalize(embedding, dim=1) if l2_norm else embedding


def attentive_statistics(hidden: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean and standard deviation of each channel over time; both arguments are [batch, channels, time].

    All means come first, then all deviations. In float32, because the variance is a difference of two sums.
    """
    hidden, weights = hidden.float(), weights.float()
    mean = (hidden * weights).sum(dim=2)
    variance = (hidden.square() * weights).sum(dim=2) - mean.square()
    return torch.cat([mean, variance.clamp(min=LEAST_VARIANCE).sqrt()], dim=1)


def _layer(num_inputs: int, num_outputs: int, num_blocks: int, stride: int) -> nn.Sequential:
    first = _Block(num_inputs, num_outputs, stride)
    return nn.Sequential(first, *(_Block(num_outputs, num_outputs, stride=1) for _ in range(num_blocks - 1)))


class _Block(nn.Module):
    """Residual block: two 3x3 convolutions with squeeze-and-excitation."""

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
        # The published weights have the first ReLU before its norm, the second after the sum.
        hidden = self.bn1(self.conv1(x).relu())
        hidden = self.se(self.bn2(self.conv2(hidden)))
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(hidden + shortcut)


class _SqueezeExcitation(nn.Module):
    """Scale each channel by a gate in (0, 1) computed from the means of all channels."""

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
