"""From the mel of a reference recording to the 32 vectors that tell the GPT whose voice to speak with.

The encoder is a bidirectional transformer without positions or feed-forward layers; the perceiver resampler lets
32 learned queries read its output. Clips arrive packed, [frames, 80] with offsets, and no frame of padding is ever
attended to. Neither module knows where the mel came from or what the GPT does with the result.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from myxtts.config import CONDITIONING_TOKENS
from myxtts.model.blocks import PointwiseLinear, cover, offsets_of, packed_attention, segment_of, take_rows

_PARTS = 64


class PackedFrames(NamedTuple):
    """Conditioning mels of a batch, one clip behind the other."""

    mel: Tensor
    """[frames, channels]; zeros behind the last clip."""
    offsets: Tensor
    """int32: every clip, then the padding (see `blocks.cover`)."""
    members: Tensor
    """fp32 [parts, clips, frames / parts]: 1 where a frame belongs to a clip. In parts, because a product that
    sums over all frames at once keeps one corner of a GPU busy."""
    num_frames: Tensor
    """fp32 [clips, 1], at least 1: what to divide sums over a clip by."""
    max_frames: int
    """No clip is longer."""

    def sum_by_clip(self, x: Tensor) -> Tensor:
        """[frames, columns] → [clips, columns]: products, so no atomic additions in either direction."""
        return torch.bmm(self.members, x.view(len(self.members), -1, x.shape[1])).sum(0)

    def spread(self, x: Tensor) -> Tensor:
        """[clips, columns] → [frames, columns]: each frame gets its clip's row, padding gets zeros."""
        return torch.bmm(self.members.transpose(1, 2), x.expand(len(self.members), -1, -1)).flatten(0, 1)


def pack_frames(mel: Tensor, num_frames: Tensor, max_frames: int) -> PackedFrames:
    """Describe packed mels [frames, channels] with `num_frames` [clips]; frames behind their sum are padding.

    Fastest when the length of `mel` is a multiple of 64.
    """
    frames = torch.arange(len(mel), device=mel.device)
    offsets = offsets_of(num_frames)
    fits = (offsets[-1] <= len(mel)) & (num_frames.max() <= max_frames)
    torch._assert_async(fits, "conditioning mels have more frames than there is room for")
    clips = torch.arange(len(num_frames), device=mel.device)
    parts = math.gcd(len(mel), _PARTS)
    members = (clips[:, None] == segment_of(frames, offsets).view(parts, 1, -1)).float()
    # Whatever the memory behind the clips held, NaN included, must not reach a matrix product.
    mel = torch.where((frames < offsets[-1])[:, None], mel, 0)
    divisor = num_frames.clamp(min=1).float()[:, None]
    return PackedFrames(mel, cover(offsets, len(mel), max_frames), members, divisor, max_frames)


class ClipGroupNorm(nn.Module):
    """GroupNorm over packed frames: statistics of each clip and group of channels, in fp32.

    Frames are first reduced to their groups, so that what is summed over clips has 32 columns and costs nothing.
    Frames of no clip come out as the bias.
    """

    def __init__(self, channels: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        # 32 in XTTS-v2; the reference has fewer for narrow networks.
        self.num_groups = 8 if channels <= 16 else 16 if channels <= 64 else 32
        while channels % self.num_groups:
            self.num_groups //= 2
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, frames: PackedFrames) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            grouped = x.float().view(len(x), self.num_groups, -1)
            frame_mean = grouped.mean(-1)
            frame_variance = grouped.var(-1, correction=0)
            # The variance of a clip from that of its frames, about the mean: no difference of large squares.
            mean = frames.spread(frames.sum_by_clip(frame_mean) / frames.num_frames)
            deviation = frame_variance + (frame_mean - mean).square()
            variance = frames.sum_by_clip(deviation) / frames.num_frames
            scale = frames.spread((variance + self.epsilon).rsqrt())
            normed = ((grouped - mean[..., None]) * scale[..., None]).flatten(-2)
            out: Tensor = (normed * self.weight + self.bias).to(x.dtype)
            return out


class EncoderBlock(nn.Module):
    """Bidirectional attention over the frames of a clip."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = ClipGroupNorm(dim)
        self.qkv = PointwiseLinear(dim, 3 * dim)
        self.proj_out = PointwiseLinear(dim, dim)
        nn.init.zeros_(self.proj_out.weight)
        nn.init.zeros_(self.proj_out.bias)

    def forward(self, x: Tensor, frames: PackedFrames) -> Tensor:
        h: Tensor = self.norm(x, frames)
        # Each head owns consecutive channels, its q, k and v in turn; GPT-2 has all q first.
        q, k, v = self.qkv(h).unflatten(-1, (self.heads, 3, -1)).unbind(-2)
        longest = frames.max_frames
        attended = packed_attention(q, k, v, frames.offsets, frames.offsets, longest, longest, causal=False)
        # The residual is the normalised tensor, not x: unusual, and the published weights depend on it.
        out: Tensor = h + self.proj_out(attended.flatten(-2))
        return out


class ConditioningEncoder(nn.Module):
    """Packed mel frames → packed features, one per frame."""

    def __init__(self, channels: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.init = PointwiseLinear(channels, dim)
        self.attn = nn.ModuleList(EncoderBlock(dim, heads) for _ in range(layers))

    def forward(self, frames: PackedFrames) -> Tensor:
        x: Tensor = self.init(frames.mel)
        for block in self.attn:
            x = block(x, frames)
        return x


class LatentKeys(NamedTuple):
    """Where the keys of the perceiver lie: each clip's 32 latents, then its frames."""

    rows: Tensor
    """Row of [all latents, then all frames] that each row of keys is; -1 behind the last clip."""
    inverse: Tensor
    offsets_q: Tensor
    offsets_k: Tensor
    max_k: int


def latent_keys(frames: PackedFrames) -> LatentKeys:
    num_clips, num_frames = len(frames.num_frames), len(frames.mel)
    num_latents = num_clips * CONDITIONING_TOKENS
    device = frames.mel.device
    clips = torch.arange(num_clips + 1, device=device)
    frame_offsets = frames.offsets[: num_clips + 1].long()
    offsets_k = frame_offsets + clips * CONDITIONING_TOKENS
    rows = torch.arange(num_latents + num_frames, device=device)
    clip = segment_of(rows, offsets_k).clamp(max=num_clips - 1)
    place = rows - offsets_k[clip]
    frame = num_latents + frame_offsets[clip] + place - CONDITIONING_TOKENS
    index = torch.where(place < CONDITIONING_TOKENS, clip * CONDITIONING_TOKENS + place, frame)
    index = torch.where(rows < offsets_k[-1], index, -1)
    latent, frame = rows[:num_latents], rows[:num_frames]
    owner = segment_of(frame, frame_offsets)
    of_latents = latent + frame_offsets[latent // CONDITIONING_TOKENS]
    of_frames = torch.where(owner < num_clips, frame + (owner + 1) * CONDITIONING_TOKENS, -1)
    return LatentKeys(
        index,
        torch.cat([of_latents, of_frames]),
        (clips * CONDITIONING_TOKENS).int(),
        offsets_k.int(),
        frames.max_frames + CONDITIONING_TOKENS,
    )


class CrossAttention(nn.Module):
    """Latents of a clip look at themselves and at the clip's frames; nothing is normalised before."""

    def __init__(self, dim: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, heads * head_dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * heads * head_dim, bias=False)
        self.to_out = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, latents: Tensor, features: Tensor, keys: LatentKeys) -> Tensor:
        q = self.to_q(latents).unflatten(-1, (self.heads, -1))
        kv = torch.cat([self.to_kv(latents), self.to_kv(features)])
        k, v = take_rows(kv, keys.rows, keys.inverse).view(len(kv), 2, self.heads, -1).unbind(1)
        attended = packed_attention(
            q, k, v, keys.offsets_q, keys.offsets_k, CONDITIONING_TOKENS, keys.max_k, causal=False
        )
        out: Tensor = self.to_out(attended.flatten(-2))
        return out


class GatedGELU(nn.Module):
    """The first half of the channels, gated by the second."""

    def forward(self, x: Tensor) -> Tensor:
        value, gate = x.chunk(2, dim=-1)
        return value * F.gelu(gate)


class DirectionNorm(nn.Module):
    """Keeps the direction of a vector and gives it length sqrt(dim), scaled per channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.normalize(x.float(), dim=-1) * math.sqrt(x.shape[-1]) * self.gamma
        return out


class PerceiverResampler(nn.Module):
    """Packed features of clips → 32 latents a clip: [clips, 32, dim]."""

    def __init__(self, dim: int, depth: int, heads: int, head_dim: int) -> None:
        super().__init__()
        inner = dim * 8 // 3
        self.latents = nn.Parameter(torch.empty(CONDITIONING_TOKENS, dim))
        nn.init.normal_(self.latents, std=0.02)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    CrossAttention(dim, heads, head_dim),
                    nn.Sequential(nn.Linear(dim, 2 * inner), GatedGELU(), nn.Linear(inner, dim)),
                ]
            )
            for _ in range(depth)
        )
        self.norm = DirectionNorm(dim)

    def forward(self, features: Tensor, frames: PackedFrames) -> Tensor:
        keys = latent_keys(frames)
        num_clips = len(frames.num_frames)
        latents = self.latents.repeat(num_clips, 1)
        for layer in self.layers:
            attention, feed_forward = layer.children()
            latents = latents + attention(latents, features, keys)
            latents = latents + feed_forward(latents)
        normed: Tensor = self.norm(latents)
        return normed.view(num_clips, CONDITIONING_TOKENS, -1)
