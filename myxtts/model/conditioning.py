"""The conditioning network: the mel of a reference recording to 32 latents that condition the GPT on its voice.

The encoder is a bidirectional transformer without position embeddings or feed-forward layers; in the perceiver
resampler 32 learned queries attend to its output. Clips are packed, [frames, 80] with offsets, and padding is
never attended to.
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
    """Conditioning mels of a batch, one clip after the other."""

    mel: Tensor  # [frames, channels]; zeros after the last clip
    offsets: Tensor  # int32: every clip, then the padding (see `blocks.cover`)
    members: Tensor
    """fp32 [parts, clips, frames / parts]: 1 where a frame belongs to a clip. Split into parts, because one
    product over all frames would occupy only a few multiprocessors."""
    num_frames: Tensor  # fp32 [clips, 1], at least 1: the divisor of means over a clip
    max_frames: int  # upper bound of the frames of a clip

    def sum_by_clip(self, x: Tensor) -> Tensor:
        """[frames, columns] → [clips, columns], as a product: no atomic additions in either direction."""
        return torch.bmm(self.members, x.view(len(self.members), -1, x.shape[1])).sum(0)

    def spread(self, x: Tensor) -> Tensor:
        """[clips, columns] → [frames, columns]: the row of each frame's clip, zeros for padding."""
        return torch.bmm(self.members.transpose(1, 2), x.expand(len(self.members), -1, -1)).flatten(0, 1)


def pack_frames(mel: Tensor, num_frames: Tensor, max_frames: int) -> PackedFrames:
    """Describe packed mels [frames, channels] with `num_frames` [clips]; frames after their sum are padding.

    Fastest if the length of `mel` is a multiple of 64.
    """
    frames = torch.arange(len(mel), device=mel.device)
    offsets = offsets_of(num_frames)
    fits = (offsets[-1] <= len(mel)) & (num_frames.max() <= max_frames)
    torch._assert_async(fits, "conditioning mels have more frames than there is room for")
    clips = torch.arange(len(num_frames), device=mel.device)
    parts = math.gcd(len(mel), _PARTS)
    members = (clips[:, None] == segment_of(frames, offsets).view(parts, 1, -1)).float()
    # The memory after the clips may hold anything, NaN included, and must not reach a matrix product.
    mel = torch.where((frames < offsets[-1])[:, None], mel, 0)
    divisor = num_frames.clamp(min=1).float()[:, None]
    return PackedFrames(mel, cover(offsets, len(mel), max_frames), members, divisor, max_frames)


class ClipGroupNorm(nn.Module):
    """GroupNorm over packed frames: statistics per clip and group of channels, in fp32.

    Frames are first reduced to their groups, so the sums over clips have only 32 columns. Padding frames become
    the bias.
    """

    def __init__(self, channels: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        # 32 in XTTS-v2; the reference uses fewer for narrow networks.
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
            # The variance of a clip from those of its frames and their means: no difference of large squares.
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
        # The channels are grouped by head, then q, k and v; in GPT-2 all q come first.
        q, k, v = self.qkv(h).unflatten(-1, (self.heads, 3, -1)).unbind(-2)
        longest = frames.max_frames
        attended = packed_attention(q, k, v, frames.offsets, frames.offsets, longest, longest, causal=False)
        # The residual is the normalised tensor, not x: unusual, but the published weights depend on it.
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
    """Layout of the perceiver's keys: the 32 latents of each clip, then its frames."""

    rows: Tensor  # row in [all latents, then all frames] of each key; -1 after the last clip
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
    inverse, offsets_q = torch.cat([of_latents, of_frames]), clips * CONDITIONING_TOKENS
    return LatentKeys(index, inverse, offsets_q.int(), offsets_k.int(), frames.max_frames + CONDITIONING_TOKENS)


class CrossAttention(nn.Module):
    """The latents of a clip attend to themselves and to the clip's frames, without a norm before."""

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
        lengths = (CONDITIONING_TOKENS, keys.max_k)
        attended = packed_attention(q, k, v, keys.offsets_q, keys.offsets_k, *lengths, causal=False)
        out: Tensor = self.to_out(attended.flatten(-2))
        return out


class GatedGELU(nn.Module):
    """The first half of the channels, gated by the second."""

    def forward(self, x: Tensor) -> Tensor:
        value, gate = x.chunk(2, dim=-1)
        return value * F.gelu(gate)


class RMSNorm(nn.Module):
    """RMSNorm: scales each vector to length sqrt(dim), then each channel by `gamma`."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.normalize(x.float(), dim=-1) * math.sqrt(x.shape[-1]) * self.gamma
        return out


class PerceiverResampler(nn.Module):
    """Packed features of clips → 32 latents per clip, [clips, 32, dim]."""

    def __init__(self, dim: int, depth: int, heads: int, head_dim: int) -> None:
        super().__init__()
        inner = dim * 8 // 3
        self.latents = nn.Parameter(torch.empty(CONDITIONING_TOKENS, dim))
        nn.init.normal_(self.latents, std=0.02)
        self.layers = nn.ModuleList()
        for _ in range(depth):
            attention = CrossAttention(dim, heads, head_dim)
            feed_forward = nn.Sequential(nn.Linear(dim, 2 * inner), GatedGELU(), nn.Linear(inner, dim))
            self.layers.append(nn.ModuleList([attention, feed_forward]))
        self.norm = RMSNorm(dim)

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
