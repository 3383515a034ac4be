"""The GPT of XTTS: predicts the codes of speech from a voice and a text. Batches are packed into one row.

    clip 0: conditioning 32 | START text STOP | START codes STOP×4    clip 1: …    padding

A GPT-2 stack (pre-norm, learned biases, tanh GELU) over conditioning latents, text and codes. The module holds, in
this order: sizes, packing, the network with its losses, growing the text vocabulary, and LoRA adapters. Parameters
have the names and shapes of the published checkpoints, which is why code embeddings are called `mel`. The module
does not know devices, files or tokenizers; sampling codes one by one is in `synthesis.generation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from myxtts.config import CONDITIONING_TOKENS, NUM_STOPS
from myxtts.model.blocks import InOutLinear, cover, offsets_of, packed_attention, segment_of, take_rows
from myxtts.model.conditioning import ConditioningEncoder, PackedFrames, PerceiverResampler, pack_frames

IGNORE = -100  # target of unused entries of a loss list
CONDITIONING, TEXT, AUDIO, PADDING = range(4)  # kinds of positions of a packed row
LONGEST_WAVE, WAVE_AMPLITUDE = 1000.0, 0.03
"""Initial position embeddings: longest wavelength / 2π in positions; amplitude, like that of other embeddings."""
INITIAL_EMBEDDING_STD, INITIAL_LOGIT_STD = 0.02, 0.8

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of q, k and v, each [..., heads, head_dim]: over a packed row, or over a cache."""


@dataclass(frozen=True)
class GPTDims:
    """Sizes of the GPT and its special tokens; the defaults are XTTS-v2's."""

    layers: int = 30
    dim: int = 1024
    heads: int = 16
    text_tokens: int = 6681
    start_text: int = 261
    stop_text: int = 0
    num_codes: int = 1024
    max_text: int = 402
    max_codes: int = 605
    mel_channels: int = 80
    encoder_layers: int = 6
    perceiver_depth: int = 2
    perceiver_heads: int = 8
    perceiver_head_dim: int = 64

    @property
    def start_code(self) -> int:
        return self.num_codes

    @property
    def stop_code(self) -> int:
        return self.num_codes + 1

    @property
    def audio_tokens(self) -> int:
        return self.num_codes + 2

    @property
    def text_positions(self) -> int:
        return self.max_text + 2

    @property
    def audio_positions(self) -> int:
        return self.max_codes + 3


def packed_length(num_ids: Any, num_codes: Any) -> Any:
    """Positions of a clip in the row; for numbers, arrays and tensors."""
    return CONDITIONING_TOKENS + (num_ids + 2) + (num_codes + NUM_STOPS)


class PackedBatch(NamedTuple):
    """A batch as one row, and the rows that losses are computed from."""

    frames: PackedFrames
    kind: Tensor  # [budget]: CONDITIONING, TEXT, AUDIO or PADDING
    token: Tensor  # [budget]: id in the vocabulary of the position's kind
    position: Tensor  # [budget]: position within its part of the sequence
    clip: Tensor  # [budget]: index of the clip; the number of clips for padding
    offsets: Tensor  # int32: every clip, then the padding (see `blocks.cover`)
    max_length: int  # upper bound of the positions of a clip
    loss_rows: Tensor  # [text_budget + audio_budget]: row of each target, text first; -1 where unused
    loss_index: Tensor  # [budget]: the inverse of `loss_rows`
    targets: Tensor  # [text_budget + audio_budget]: IGNORE where unused
    weights: Tensor  # fp32 [text_budget + audio_budget]: the clip's weight, 0 where unused
    text_budget: int
    first_code: Tensor  # [clips]: row of START of the audio, whose output is the first code's latent
    num_codes: Tensor  # [clips]
    max_codes: int


class PaddedTokens(NamedTuple):
    """Text or codes of a batch, padded, with their START and STOP tokens."""

    tokens: Tensor  # [clips, width]
    lengths: Tensor
    start: int
    stop: int
    num_stops: int  # STOPs after each sequence, all of them targets

    @property
    def budget(self) -> int:
        """Upper bound of the targets of a batch of this shape."""
        return len(self.tokens) * (self.tokens.shape[1] + self.num_stops)

    @property
    def target_offsets(self) -> Tensor:
        """Offsets of the clips in the loss list, [clips + 1]."""
        return offsets_of(self.lengths + self.num_stops)

    def token(self, clip: Tensor, place: Tensor) -> Tensor:
        """Token at a place of a clip: START at -1, then its tokens, then STOP."""
        width = self.tokens.shape[1]
        inside = self.tokens.reshape(-1)[clip * width + place.clamp(0, width - 1)].long()
        return torch.where(place < 0, self.start, torch.where(place < self.lengths[clip], inside, self.stop))

    def loss_list(self, first_rows: Tensor, budget: int, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Row, target and weight of each target; `first_rows` [clips] are the rows of START."""
        offsets = self.target_offsets
        entries = torch.arange(budget, device=offsets.device)
        clip = segment_of(entries, offsets)
        used = clip < len(self.lengths)
        clip = clip.clamp(max=len(self.lengths) - 1)
        place = entries - offsets[clip]
        row = torch.where(used, first_rows[clip] + place, -1)
        return row, torch.where(used, self.token(clip, place), IGNORE), torch.where(used, weights[clip], 0.0)


def pack(
    dims: GPTDims,
    frames: PackedFrames,
    ids: Tensor,
    num_ids: Tensor,
    codes: Tensor,
    num_codes: Tensor,
    *,
    budget: int,
    weights: Tensor | None = None,
) -> PackedBatch:
    """Pack padded ids [clips, T] and codes [clips, N] with their lengths [clips] into a row of `budget` positions.

    `weights` [clips] default to 1.
    """
    num_clips, max_ids, max_codes = len(ids), ids.shape[1], codes.shape[1]
    if max_ids > dims.max_text:
        raise ValueError(f"room for {max_ids} text tokens, but the GPT has positions for {dims.max_text}")
    if max_codes + NUM_STOPS > dims.audio_positions:
        raise ValueError(
            f"room for {max_codes + NUM_STOPS} codes and stops, but the GPT has {dims.audio_positions} positions"
        )
    text = PaddedTokens(ids, num_ids.long(), dims.start_text, dims.stop_text, num_stops=1)
    audio = PaddedTokens(codes, num_codes.long(), dims.start_code, dims.stop_code, NUM_STOPS)
    max_targets = budget - num_clips * (CONDITIONING_TOKENS + 1)  # conditioning and one STOP have no target
    text_budget, audio_budget = min(text.budget, max_targets), min(audio.budget, max_targets)

    starts = offsets_of(packed_length(text.lengths, audio.lengths))
    # Checked on the device: reading the result here would make the host wait.
    totals = (starts[-1], text.target_offsets[-1], audio.target_offsets[-1])
    fits = [total <= most for total, most in zip(totals, (budget, text_budget, audio_budget), strict=True)]
    fits += [text.lengths.max() <= max_ids, audio.lengths.max() <= max_codes]
    torch._assert_async(torch.stack(fits).all(), "a batch exceeds its budget, or a clip the width of its tensor")
    first_text = starts[:-1] + CONDITIONING_TOKENS
    first_code = first_text + text.lengths + 2
    weights = torch.ones(num_clips, device=ids.device) if weights is None else weights.float()
    text_list = text.loss_list(first_text, text_budget, weights)
    audio_list = audio.loss_list(first_code, audio_budget, weights)
    loss_rows, targets, target_weights = (torch.cat(pair) for pair in zip(text_list, audio_list, strict=True))
    kind, token, position, clip, loss_index = _row(text, audio, starts, budget, text_budget)
    max_length = min(packed_length(max_ids, max_codes), budget)
    return PackedBatch(
        frames=frames,
        kind=kind,
        token=token,
        position=position,
        clip=clip,
        offsets=cover(starts, budget, max_length),
        max_length=max_length,
        loss_rows=loss_rows,
        loss_index=loss_index,
        targets=targets,
        weights=target_weights,
        text_budget=text_budget,
        first_code=first_code,
        num_codes=audio.lengths,
        max_codes=max_codes,
    )


def _row(
    text: PaddedTokens, audio: PaddedTokens, starts: Tensor, budget: int, text_budget: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Kind, token, position, clip and index in the loss list of every row."""
    num_clips = len(text.lengths)
    rows = torch.arange(budget, device=starts.device)
    clip = segment_of(rows, starts)
    known = clip.clamp(max=num_clips - 1)
    place = rows - starts[clip]
    text_place = place - CONDITIONING_TOKENS
    audio_place = text_place - (text.lengths[known] + 2)
    kind = (text_place >= 0).long() + (audio_place >= 0).long()
    kind = torch.where(clip < num_clips, kind, PADDING)
    is_text, is_audio = kind == TEXT, kind == AUDIO
    token = torch.where(is_audio, audio.token(known, audio_place - 1), text.token(known, text_place - 1))
    token = torch.where(is_text | is_audio, token, 0)
    position = torch.where(is_text, text_place, torch.where(is_audio, audio_place, place))
    position = torch.where(kind == PADDING, 0, position)
    text_index = torch.where(text_place <= text.lengths[known], text.target_offsets[known] + text_place, -1)
    audio_index = text_budget + audio.target_offsets[known] + audio_place
    loss_index = torch.where(is_text, text_index, torch.where(is_audio, audio_index, -1))
    return kind, token, position, clip, loss_index


class Losses(NamedTuple):
    """Sums over the targets of a batch, so that micro-steps can be weighted by their number of tokens."""

    text_sum: Tensor
    text_count: Tensor
    audio_sum: Tensor
    audio_count: Tensor

    @property
    def text(self) -> Tensor:
        """Mean over the text targets; 0 if there are none."""
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
        q, k, v = self.c_attn(x).view(*x.shape[:-1], 3, self.heads, -1).unbind(-3)
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
        """With `recompute`, only x is kept for the backward pass."""
        if not recompute:
            return self._forward(x, attend)
        out: Tensor = checkpoint(
            self._forward, x, attend, use_reentrant=False, preserve_rng_state=self.dropout > 0
        )
        return out

    def _forward(self, x: Tensor, attend: Attend) -> Tensor:
        x = x + self._dropped(self.attn(self.ln_1(x), attend))
        return x + self._dropped(self.mlp(self.ln_2(x)))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.training and self.dropout else x


class Stack(nn.Module):
    """The transformer's blocks and its final norm."""

    def __init__(self, layers: int, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        for name, weight in self.h.named_parameters():
            if name.endswith("c_proj.weight"):  # GPT-2 scales residual projections by 1 / sqrt(2 layers)
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5)


class PositionEmbedding(nn.Module):
    def __init__(self, num_positions: int, dim: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(num_positions, dim)
        nn.init.normal_(self.emb.weight, std=0.02)

    @torch.no_grad()
    def init_sinusoidal(self) -> None:
        """Set sines and cosines of many wavelengths: neighbours are similar and equally far apart."""
        num_positions, dim = self.emb.weight.shape
        lengths = LONGEST_WAVE ** torch.linspace(0, 1, dim // 2)
        angles = torch.arange(num_positions)[:, None] / lengths
        self.emb.weight.copy_(WAVE_AMPLITUDE * torch.cat([angles.sin(), angles.cos()], dim=1))


class GPT(nn.Module):
    """Conditioning network, embeddings, transformer stack and heads.

    `dropout` applies to embeddings and residuals (0.1 in the reference), never to attention. `checkpointing`
    recomputes each block in the backward pass instead of keeping its activations; it may be switched at any time.
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
    def init_from_codebook(self, vectors: Tensor) -> None:
        """Initialise code embeddings and logits from the DVAE's vectors [codes, size], and positions as sinusoids.

        Similar codes start with similar embeddings and logits; a few hours of speech are too few to learn that for
        every pair. Embeddings and head get a random projection of the vectors; START, STOP and biases stay.
        """
        self.mel_pos_embedding.init_sinusoidal()
        self.text_pos_embedding.init_sinusoidal()
        codes, dim = len(vectors), self.dims.dim
        projected = (vectors - vectors.mean(0)) @ torch.randn(vectors.shape[1], dim, device=vectors.device)
        projected = projected / projected.std().clamp_min(1e-6)
        self.mel_embedding.weight[:codes].copy_(INITIAL_EMBEDDING_STD * projected)
        self.mel_head.weight[:codes].copy_(INITIAL_LOGIT_STD / dim**0.5 * projected)

    def set_dropout(self, dropout: float) -> None:
        """Change the dropout probability."""
        self.dropout = dropout
        for block in self.gpt.h:
            block.dropout = dropout  # type: ignore[assignment]

    def forward(self, batch: PackedBatch, label_smoothing: float = 0.0) -> Losses:
        """Losses of a packed batch; final norms and heads run only on rows with a target."""
        x = take_rows(self.stack(batch), batch.loss_rows, batch.loss_index)
        text, audio = self.norms(x).tensor_split([batch.text_budget])
        text_targets, audio_targets = batch.targets.tensor_split([batch.text_budget])
        text_weights, audio_weights = batch.weights.tensor_split([batch.text_budget])
        return Losses(
            _weighted_sum(self.text_head(text), text_targets, text_weights, label_smoothing),
            text_weights.sum(),
            _weighted_sum(self.mel_head(audio), audio_targets, audio_weights, label_smoothing),
            audio_weights.sum(),
        )

    def code_latents(self, batch: PackedBatch) -> Tensor:
        """The vocoder's input, one latent per code: [clips, max_codes, dim], zeros after a clip's last code.

        The latent of a code is the hidden state that predicts it: the first one is that of START.
        """
        places = torch.arange(batch.max_codes, device=batch.first_code.device)
        present = places < batch.num_codes[:, None]
        rows = torch.where(present, batch.first_code[:, None] + places, 0)
        return torch.where(present[..., None], self.norms(self.stack(batch)[rows]), 0)

    def condition(self, frames: PackedFrames) -> Tensor:
        """Conditioning latents of each clip, [clips, 32, dim]."""
        latents: Tensor = self.conditioning_perceiver(self.conditioning_encoder(frames), frames)
        return latents

    def voice(self, chunks: Sequence[Tensor]) -> Tensor:
        """Conditioning latents of one voice, [1, 32, dim]: the mean over chunks of its mels, [frames, 80] each."""
        num_frames = torch.tensor([len(chunk) for chunk in chunks], device=chunks[0].device)
        frames = pack_frames(torch.cat(list(chunks)), num_frames, max(len(chunk) for chunk in chunks))
        return self.condition(frames).mean(0, keepdim=True)

    def stack(self, batch: PackedBatch) -> Tensor:
        """Embeddings and blocks, without the final norms: [budget, dim]."""
        longest = batch.max_length

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return packed_attention(q, k, v, batch.offsets, batch.offsets, longest, longest, causal=True)

        x = F.dropout(self.embed(batch), self.dropout, self.training)
        for block in self.gpt.h:
            x = block(x, attend, recompute=self.checkpointing and torch.is_grad_enabled())
        return x

    def embed(self, batch: PackedBatch) -> Tensor:
        """[budget, dim]: latents at conditioning positions, token plus position embedding elsewhere."""
        is_voice, is_audio = batch.kind == CONDITIONING, batch.kind == AUDIO
        # One lookup in a joint table: two masked lookups would add the gradients of all masked rows to one entry.
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
        """The stack's final norm, then another one: the published weights expect both."""
        out: Tensor = self.final_norm(self.gpt.ln_f(x))
        return out


def _weighted_sum(logits: Tensor, targets: Tensor, weights: Tensor, label_smoothing: float) -> Tensor:
    losses = F.cross_entropy(
        logits.float(), targets, ignore_index=IGNORE, label_smoothing=label_smoothing, reduction="none"
    )
    return (losses * weights).sum()


class Said(NamedTuple):
    """A sentence that was said: conditioning latents of the voice [1, 32, dim], what was read, and the codes."""

    voice: Tensor
    ids: Sequence[int]
    codes: Sequence[int]


def _embedded(gpt: GPT, said: Said) -> Tensor:
    """The positions of a sequence that predict its codes, and those before them: [positions, dim]."""
    dims, like = gpt.dims, gpt.mel_embedding.weight
    text = torch.tensor([dims.start_text, *said.ids, dims.stop_text], device=like.device)
    audio = torch.tensor([dims.start_code, *said.codes[:-1]], device=like.device)
    read = gpt.text_embedding(text) + gpt.text_pos_embedding.emb(torch.arange(len(text), device=like.device))
    heard = gpt.mel_embedding(audio) + gpt.mel_pos_embedding.emb(torch.arange(len(audio), device=like.device))
    return torch.cat([said.voice[0].to(like), read, heard])


@torch.no_grad()
def heard_latents(gpt: GPT, voice: Tensor, codes: Tensor) -> Tensor:
    """The latents of codes [n] without their text: float32 [n, dim]."""
    x = _embedded(gpt, Said(voice, (), codes.tolist()))[None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    for block in gpt.gpt.h:
        x = block(x, attend)
    return gpt.norms(x)[0, -len(codes) :].float()


@torch.no_grad()
def heard_loss(gpt: GPT, voice: Tensor, codes: Tensor) -> float:
    """How unexpected codes [n] are to the GPT in that voice: the sum of their cross-entropies."""
    logits = gpt.mel_head(heard_latents(gpt, voice, codes).to(gpt.mel_embedding.weight.dtype))
    return F.cross_entropy(logits.float(), codes, reduction="sum").item()


@torch.no_grad()
def text_attention(gpt: GPT, *sentences: Said) -> list[Tensor]:
    """How much each head attends to each text token while it predicts each code: [heads, codes, ids], float32.

    One for each sentence; `heads` are those of all layers.
    """
    like, first_id = gpt.mel_embedding.weight, CONDITIONING_TOKENS + 1
    rows = [_embedded(gpt, said) for said in sentences]
    first_codes = [first_id + len(said.ids) + 1 for said in sentences]
    x = nn.utils.rnn.pad_sequence(rows, batch_first=True)  # nothing looks at what follows it
    most_codes, most_ids = (max(len(each[part]) for each in sentences) for part in (2, 1))
    places, row = torch.arange(x.shape[1], device=like.device), torch.arange(len(x), device=like.device)[:, None]
    asked = torch.tensor(first_codes, device=like.device)[:, None] + places[:most_codes]
    hidden, asked = (places > asked[:, :, None])[:, None], asked.clamp(max=len(places) - 1)
    found: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", q[row, asked].float(), k.float()) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        found.append(weights[..., first_id : first_id + most_ids].clone())
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    for block in gpt.gpt.h:
        x = block(x, attend)
    together = zip(torch.cat(found, 1), sentences, strict=True)
    return [heads[:, : len(said.codes), : len(said.ids)] for heads, said in together]


def sharpest(attention: Tensor) -> Tensor:
    """The attention of one head [codes, ids]: the sharpest, a diagonal if the GPT reads."""
    return attention.index_select(0, attention.max(-1).values.mean(-1).argmax(0, keepdim=True))[0]


def grow_text_vocabulary(
    state: Mapping[str, Tensor], new_size: int, generator: torch.Generator | None = None, prefix: str = ""
) -> dict[str, Tensor]:
    """The state with `new_size` text tokens: old rows unchanged, new ones near the mean of the old.

    A new token starts with about the average of the old logits, so it takes no more than its share of the
    probability and the old distribution is kept. A little noise makes the new tokens distinct.
    """
    grown = dict(state)
    for name in ("text_embedding.weight", "text_head.weight", "text_head.bias"):
        old = state[prefix + name]
        num_added = new_size - len(old)
        if num_added < 0:
            raise ValueError(f"{prefix}{name} has {len(old)} rows; it can grow, not shrink to {new_size}")
        rows = old.float()
        added = rows.mean(0, keepdim=True).expand(num_added, *old.shape[1:]).clone()
        if rows.dim() == 2:
            noise = torch.randn(added.shape, generator=generator)
            added += 0.1 * (rows.std() * noise).to(old.device)
        grown[prefix + name] = torch.cat([old, added.to(old.dtype)])
    return grown


class AdaptedLinear(InOutLinear):
    """LoRA: x·W + b + x·A·B with W and b frozen. B starts at zero, so the output is unchanged at first."""

    def __init__(self, base: InOutLinear, rank: int) -> None:
        nn.Module.__init__(self)
        num_inputs, num_outputs = base.weight.shape
        self.weight, self.bias = base.weight, base.bias
        self.lora_a = nn.Parameter(base.weight.new_empty(num_inputs, rank, dtype=torch.float32))
        self.lora_b = nn.Parameter(base.weight.new_zeros(rank, num_outputs, dtype=torch.float32))
        nn.init.normal_(self.lora_a, std=num_inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x @ self.lora_a) @ self.lora_b

    @torch.no_grad()
    def merged(self) -> InOutLinear:
        """An equivalent layer without adapter."""
        plain = InOutLinear.__new__(InOutLinear)
        nn.Module.__init__(plain)
        weight = self.weight.float() + self.lora_a @ self.lora_b
        plain.weight, plain.bias = nn.Parameter(weight.to(self.weight.dtype)), self.bias
        return plain


def add_adapters(model: GPT, rank: int, train_also: Sequence[str] = ()) -> None:
    """Freeze the model and put adapters on all four matrices of every block.

    `train_also` lists prefixes of parameters that are trained in full, such as "text_embedding" and "text_head"
    after the vocabulary has grown: adapters cannot learn the embedding of a new token.
    """
    if rank < 1:
        raise ValueError(f"rank {rank}: an adapter needs at least 1")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(name.startswith(prefix) for prefix in train_also))
    for parent, name, layer in list(_layers(model)):
        if isinstance(layer, AdaptedLinear):
            raise ValueError("the model has adapters already")
        setattr(parent, name, AdaptedLinear(layer, rank))


def store_frozen_in_bf16(model: GPT) -> None:
    """Store frozen matrices in bf16, which autocast casts them to anyway. Halves their memory.

    Trained parameters stay in fp32, the optimiser's master copy. Norms and biases are small and stay too.
    """
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.dim() > 1:
            parameter.data = parameter.data.bfloat16()


def merge_adapters(model: GPT) -> None:
    """Fold the adapters into the weights and unfreeze them: a plain GPT with a plain state dict."""
    for parent, name, layer in list(_layers(model)):
        if isinstance(layer, AdaptedLinear):
            setattr(parent, name, layer.merged())
    model.requires_grad_(True)


def adapter_state(model: GPT) -> dict[str, Tensor]:
    """The trained parameters only; load them with `model.load_state_dict(state, strict=False)`."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in model.state_dict().items() if name in trained}


def _layers(model: GPT) -> Iterator[tuple[nn.Module, str, InOutLinear]]:
    for parent in model.gpt.h.modules():
        for name, child in parent.named_children():
            if isinstance(child, InOutLinear):
                yield parent, name, child
