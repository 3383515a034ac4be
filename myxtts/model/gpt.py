"""The GPT of XTTS: reads a voice and a text, predicts the codes of the speech. Training forward on packed rows.

A GPT-2 stack (layer norm first, learned biases, tanh GELU) over conditioning latents, text and codes. Names and
shapes of the parameters are those of the published checkpoints, which is why code embeddings are called `mel`.
This module knows no device, file or tokenizer; what a row looks like is said in `packing`, how codes are produced
one by one in `generation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from myxtts.config import CONDITIONING_TOKENS
from myxtts.model.blocks import InOutLinear, packed_attention, take_rows
from myxtts.model.conditioning import ConditioningEncoder, PackedFrames, PerceiverResampler, pack_frames
from myxtts.model.packing import AUDIO, CONDITIONING, IGNORE, GPTDims, PackedBatch

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of q, k and v, each [..., heads, head_dim]: over a packed row, or over a cache."""

LONGEST_WAVE, WAVE_HEIGHT = 1000.0, 0.03
"""Of positions before training: wavelength divided by 2π, in positions; as high as other embeddings are."""
EMBEDDING_AT_FIRST, LOGIT_AT_FIRST = 0.02, 0.8
"""Standard deviations before training: of a code's embedding, and of its logit."""


class Losses(NamedTuple):
    """Sums over the targets of a batch, so that micro-steps of different sizes can be weighted by their tokens."""

    text_sum: Tensor
    text_count: Tensor
    audio_sum: Tensor
    audio_count: Tensor

    @property
    def text(self) -> Tensor:
        """Mean over targets; 0 when there are none."""
        return self.text_sum / self.text_count.clamp(min=1)

    @property
    def audio(self) -> Tensor:
        return self.audio_sum / self.audio_count.clamp(min=1)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = InOutLinear(dim, 3 * dim)
        self.c_proj = InOutLinear(dim, dim)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        out: Tensor = self.c_proj(attend(q, k, v).flatten(-2))
        return out


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.c_fc = InOutLinear(dim, 4 * dim)
        self.c_proj = InOutLinear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return out


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.ln_1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = FeedForward(dim)

    def forward(self, x: Tensor, attend: Attend, recompute: bool = False) -> Tensor:
        """`recompute` keeps nothing but x for the backward pass."""
        if not recompute:
            return self._apply_both(x, attend)
        out: Tensor = checkpoint(
            self._apply_both, x, attend, use_reentrant=False, preserve_rng_state=self.dropout > 0
        )
        return out

    def _apply_both(self, x: Tensor, attend: Attend) -> Tensor:
        x = x + F.dropout(self.attn(self.ln_1(x), attend), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.ln_2(x)), self.dropout, self.training)


class Stack(nn.Module):
    """The transformer's blocks and its last norm."""

    def __init__(self, layers: int, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        for name, weight in self.h.named_parameters():
            if name.endswith("c_proj.weight"):  # GPT-2: what adds to the residual starts smaller the deeper it is
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5)


class PositionEmbedding(nn.Module):
    def __init__(self, num_positions: int, dim: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(num_positions, dim)
        nn.init.normal_(self.emb.weight, std=0.02)

    @torch.no_grad()
    def begin_with_waves(self) -> None:
        """Sines and cosines of many lengths: neighbours are alike, and so is every step from one to the next."""
        num_positions, dim = self.emb.weight.shape
        lengths = LONGEST_WAVE ** torch.linspace(0, 1, dim // 2)
        angles = torch.arange(num_positions)[:, None] / lengths
        self.emb.weight.copy_(WAVE_HEIGHT * torch.cat([angles.sin(), angles.cos()], dim=1))


class GPT(nn.Module):
    """Conditioning encoder and resampler, embeddings, stack and heads.

    `dropout` acts on embeddings and residuals (0.1 in the reference), never on attention. `checkpointing`
    recomputes each block in the backward pass instead of keeping its activations; it may be switched any time.
    """

    def __init__(self, dims: GPTDims, *, dropout: float = 0.0, checkpointing: bool = False) -> None:
        super().__init__()
        self.dims = dims
        self.dropout = dropout
        self.checkpointing = checkpointing
        dim = dims.dim
        self.conditioning_encoder = ConditioningEncoder(dims.mel_channels, dim, dims.heads, dims.encoder_layers)
        self.text_embedding = nn.Embedding(dims.text_tokens, dim)
        self.mel_embedding = nn.Embedding(dims.audio_tokens, dim)
        self.gpt = Stack(dims.layers, dim, dims.heads, dropout)
        self.mel_pos_embedding = PositionEmbedding(dims.audio_positions, dim)
        self.text_pos_embedding = PositionEmbedding(dims.text_positions, dim)
        self.final_norm = nn.LayerNorm(dim)
        self.text_head = nn.Linear(dim, dims.text_tokens)
        self.mel_head = nn.Linear(dim, dims.audio_tokens)
        self.conditioning_perceiver = PerceiverResampler(
            dim, dims.perceiver_depth, dims.perceiver_heads, dims.perceiver_head_dim
        )
        nn.init.normal_(self.text_embedding.weight, std=0.02)
        nn.init.normal_(self.mel_embedding.weight, std=0.02)

    @torch.no_grad()
    def begin_with_codebook(self, vectors: Tensor) -> None:
        """What can be known before any training, given the vectors of the codes [codes, any size].

        Codes that sound alike are heard alike and compete alike: in a few hours of speech each is too rare for
        that to be learnt of every pair. Embeddings and head get the vectors in a random projection; START, STOP
        and biases stay. Positions are waves.
        """
        self.mel_pos_embedding.begin_with_waves()
        self.text_pos_embedding.begin_with_waves()
        codes, dim = len(vectors), self.dims.dim
        projected = (vectors - vectors.mean(0)) @ torch.randn(vectors.shape[1], dim, device=vectors.device)
        projected = projected / projected.std().clamp_min(1e-6)
        self.mel_embedding.weight[:codes].copy_(EMBEDDING_AT_FIRST * projected)
        self.mel_head.weight[:codes].copy_(LOGIT_AT_FIRST / dim**0.5 * projected)

    def set_dropout(self, dropout: float) -> None:
        """Another share of dropout from now on, for a model whose weights came from somewhere else."""
        self.dropout = dropout
        for block in self.gpt.h:
            block.dropout = dropout  # type: ignore[assignment]

    def forward(self, batch: PackedBatch, label_smoothing: float = 0.0) -> Losses:
        """Losses of a packed batch; heads and final norms run only where there is a target."""
        x = take_rows(self.stack(batch), batch.loss_rows, batch.loss_places)
        text, audio = self.norms(x).tensor_split([batch.text_budget])
        text_targets, audio_targets = batch.targets.tensor_split([batch.text_budget])
        text_weights, audio_weights = batch.weights.tensor_split([batch.text_budget])
        return Losses(
            _weighted_sum(self.text_head(text), text_targets, text_weights, label_smoothing),
            text_weights.sum(),
            _weighted_sum(self.mel_head(audio), audio_targets, audio_weights, label_smoothing),
            audio_weights.sum(),
        )

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        """What the heads read, at every position of the row: [budget, dim]."""
        return self.norms(self.stack(batch))

    def code_latents(self, batch: PackedBatch) -> Tensor:
        """The vocoder's input, one latent per code: [clips, max_codes, dim], zeros behind a clip's last code.

        The latent of a code is the hidden state that predicts it: the first one stands at START.
        """
        places = torch.arange(batch.max_codes, device=batch.first_code.device)
        present = places < batch.num_codes[:, None]
        rows = torch.where(present, batch.first_code[:, None] + places, 0)
        return torch.where(present[..., None], self.norms(self.stack(batch)[rows]), 0)

    def condition(self, frames: PackedFrames) -> Tensor:
        """Latents of each clip's voice: [clips, 32, dim]."""
        latents: Tensor = self.conditioning_perceiver(self.conditioning_encoder(frames), frames)
        return latents

    def voice(self, chunks: Sequence[Tensor]) -> Tensor:
        """Latents of one voice, [1, 32, dim]: the mean over chunks of its recordings, mels [frames, 80] each."""
        num_frames = torch.tensor([len(chunk) for chunk in chunks], device=chunks[0].device)
        frames = pack_frames(torch.cat(list(chunks)), num_frames, max(len(chunk) for chunk in chunks))
        return self.condition(frames).mean(0, keepdim=True)

    def stack(self, batch: PackedBatch) -> Tensor:
        """The row through embeddings and blocks, before the final norms: [budget, dim]."""
        longest = batch.max_length

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return packed_attention(q, k, v, batch.offsets, batch.offsets, longest, longest, causal=True)

        x = F.dropout(self.embed(batch), self.dropout, self.training)
        for block in self.gpt.h:
            x = block(x, attend, recompute=self.checkpointing and torch.is_grad_enabled())
        return x

    def embed(self, batch: PackedBatch) -> Tensor:
        """[budget, dim]: latents at conditioning positions, token plus position elsewhere."""
        is_voice, is_audio = batch.kind == CONDITIONING, batch.kind == AUDIO
        # One lookup in both tables: two, each masked, would pile up the gradients of all masked rows on one entry.
        tokens = torch.cat([self.text_embedding.weight, self.mel_embedding.weight])
        positions = torch.cat([self.text_pos_embedding.emb.weight, self.mel_pos_embedding.emb.weight])
        token = batch.token + self.dims.text_tokens * is_audio
        position = batch.position + self.dims.text_positions * is_audio
        embedded = F.embedding(token, tokens) + F.embedding(position, positions)

        latents = self.condition(batch.frames).flatten(0, 1)
        num_clips = len(batch.num_codes)
        index = torch.where(is_voice, batch.clip * CONDITIONING_TOKENS + batch.position, -1)
        places = torch.arange(CONDITIONING_TOKENS, device=index.device)
        inverse = (batch.offsets[:num_clips, None].long() + places).flatten()
        return torch.where(is_voice[:, None], take_rows(latents, index, inverse), embedded)

    def norms(self, x: Tensor) -> Tensor:
        """The stack's last norm, then another one: the published weights expect both."""
        out: Tensor = self.final_norm(self.gpt.ln_f(x))
        return out


def _weighted_sum(logits: Tensor, targets: Tensor, weights: Tensor, label_smoothing: float) -> Tensor:
    losses = F.cross_entropy(
        logits.float(), targets, ignore_index=IGNORE, label_smoothing=label_smoothing, reduction="none"
    )
    return (losses * weights).sum()


def grow_text_vocabulary(
    state: Mapping[str, Tensor], new_size: int, generator: torch.Generator | None = None, prefix: str = ""
) -> dict[str, Tensor]:
    """The state with room for `new_size` text tokens: old rows untouched, new ones near the mean of the old.

    A new token then starts with about the average of the old logits, so that it takes no more than its share of
    the probability and the old distribution stays as it was. A little noise tells new tokens apart.
    """
    grown = dict(state)
    for name in ("text_embedding.weight", "text_head.weight", "text_head.bias"):
        old = state[prefix + name]
        num_added = new_size - len(old)
        if num_added < 0:
            raise ValueError(
                f"{prefix}{name} has {len(old)} rows; a vocabulary can grow, not shrink to {new_size}"
            )
        rows = old.float()
        added = rows.mean(0, keepdim=True).expand(num_added, *old.shape[1:]).clone()
        if rows.dim() == 2:
            noise = torch.randn(added.shape, generator=generator)
            added += 0.1 * (rows.std() * noise).to(old.device)
        grown[prefix + name] = torch.cat([old, added.to(old.dtype)])
    return grown
