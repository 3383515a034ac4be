"""The sequence that the GPT reads, and how the sequences of a batch share one row.

    32 conditioning latents | START text… STOP | START codes… STOP STOP STOP

Text and audio have their own vocabularies, and positions that count from 0. A batch of B clips becomes one row of
`budget` positions; everything here happens on the device of its tensors, in a fixed number of vectorised
operations on static shapes, without waiting for that device. Lengths that do not fit fail with an assertion on it.
This module knows no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from myxtts.config import CONDITIONING_TOKENS, NUM_STOPS
from myxtts.model.blocks import cover, offsets_of, segment_of
from myxtts.model.conditioning import PackedFrames

IGNORE = -100
"""Target of places in a loss list that no clip uses."""
CONDITIONING, TEXT, AUDIO, PADDING = range(4)
"""What a position of the row holds."""

Counts = TypeVar("Counts")


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


def packed_length(num_ids: Counts, num_codes: Counts, num_stops: int = NUM_STOPS) -> Counts:
    """Positions that clips take in the row; of numbers, arrays or tensors."""
    ids: Any = num_ids
    codes: Any = num_codes
    length: Counts = CONDITIONING_TOKENS + (ids + 2) + (codes + num_stops)
    return length


class PackedBatch(NamedTuple):
    """A batch as one row, and where in it the losses are taken."""

    frames: PackedFrames
    kind: Tensor
    """[budget]: CONDITIONING, TEXT, AUDIO or PADDING."""
    token: Tensor
    """[budget]: id in the vocabulary of its kind."""
    position: Tensor
    """[budget]: place within its own part of the sequence."""
    clip: Tensor
    """[budget]: number of the clip; the number of clips in the padding."""
    offsets: Tensor
    """int32: every clip, then the padding (see `blocks.cover`)."""
    max_length: int
    """No clip takes more positions."""
    loss_rows: Tensor
    """[text_budget + audio_budget]: position in the row of each target, text first; -1 where unused."""
    loss_places: Tensor
    """[budget]: the inverse of it."""
    targets: Tensor
    """[text_budget + audio_budget]: IGNORE where unused."""
    weights: Tensor
    """fp32 [text_budget + audio_budget]: the clip's weight, 0 where unused."""
    text_budget: int
    first_code: Tensor
    """[clips]: position in the row of START of the audio, whose output is the first code's latent."""
    num_codes: Tensor
    """[clips]"""
    max_codes: int


class Stream(NamedTuple):
    """Text or codes of a batch: padded tokens [clips, width], and what stands before and behind them."""

    tokens: Tensor
    lengths: Tensor
    start: int
    stop: int
    num_stops: int
    """STOPs that count as targets."""

    @property
    def target_offsets(self) -> Tensor:
        """Where each clip's targets start in the loss list, and where the last clip's end: [clips + 1]."""
        return offsets_of(self.lengths + self.num_stops)

    def token(self, clip: Tensor, place: Tensor) -> Tensor:
        """Token at a place of a clip: START at -1, then its tokens, then STOP."""
        width = self.tokens.shape[1]
        inside = self.tokens.reshape(-1)[clip * width + place.clamp(0, width - 1)].long()
        return torch.where(place < 0, self.start, torch.where(place < self.lengths[clip], inside, self.stop))

    def loss_list(self, first_rows: Tensor, budget: int, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Row, target and weight of each place of the loss list; `first_rows` [clips] are those of START."""
        offsets = self.target_offsets
        places = torch.arange(budget, device=offsets.device)
        clip = segment_of(places, offsets)
        used = clip < len(self.lengths)
        clip = clip.clamp(max=len(self.lengths) - 1)
        place = places - offsets[clip]
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
    num_stops: int = NUM_STOPS,
    text_budget: int | None = None,
    audio_budget: int | None = None,
) -> PackedBatch:
    """One row from padded ids [clips, T] and codes [clips, N] with their lengths [clips], weights [clips] or 1.

    `text_budget` and `audio_budget` bound the targets of a batch. Left out, they follow from the shapes and hold
    for every batch; bounds from the corpus save the heads, about two per cent of the work, a part of theirs.
    """
    num_clips, max_ids, max_codes = len(ids), ids.shape[1], codes.shape[1]
    _check_positions(dims, max_ids, max_codes + num_stops)
    text = Stream(ids, num_ids.long(), dims.start_text, dims.stop_text, 1)
    audio = Stream(codes, num_codes.long(), dims.start_code, dims.stop_code, num_stops)
    most = budget - num_clips * (CONDITIONING_TOKENS + 1)  # every other position of a clip has a target
    text_budget = min(num_clips * (max_ids + 1), most) if text_budget is None else text_budget
    audio_budget = min(num_clips * (max_codes + num_stops), most) if audio_budget is None else audio_budget

    starts = offsets_of(packed_length(text.lengths, audio.lengths, num_stops))
    _assert_fits(text, audio, starts, (budget, text_budget, audio_budget))
    first_text = starts[:-1] + CONDITIONING_TOKENS
    first_code = first_text + text.lengths + 2
    weights = torch.ones(num_clips, device=ids.device) if weights is None else weights.float()
    text_list = text.loss_list(first_text, text_budget, weights)
    audio_list = audio.loss_list(first_code, audio_budget, weights)
    loss_rows, targets, target_weights = (torch.cat(pair) for pair in zip(text_list, audio_list, strict=True))
    kind, token, position, clip, loss_places = _row(text, audio, starts, budget, text_budget)
    max_length = min(packed_length(max_ids, max_codes, num_stops), budget)
    return PackedBatch(
        frames=frames,
        kind=kind,
        token=token,
        position=position,
        clip=clip,
        offsets=cover(starts, budget, max_length),
        max_length=max_length,
        loss_rows=loss_rows,
        loss_places=loss_places,
        targets=targets,
        weights=target_weights,
        text_budget=text_budget,
        first_code=first_code,
        num_codes=audio.lengths,
        max_codes=max_codes,
    )


def _row(
    text: Stream, audio: Stream, starts: Tensor, budget: int, text_budget: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Kind, token, position, clip and place in the loss lists of every position."""
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
    text_slot = torch.where(text_place <= text.lengths[known], text.target_offsets[known] + text_place, -1)
    audio_slot = text_budget + audio.target_offsets[known] + audio_place
    slot = torch.where(is_text, text_slot, torch.where(is_audio, audio_slot, -1))
    return kind, token, position, clip, slot


def _assert_fits(text: Stream, audio: Stream, starts: Tensor, budgets: tuple[int, int, int]) -> None:
    """Checked on the device and reported from there: looking at the answer here would wait for it."""
    totals = (starts[-1], text.target_offsets[-1], audio.target_offsets[-1])
    fits = [total <= budget for total, budget in zip(totals, budgets, strict=True)]
    fits += [stream.lengths.max() <= stream.tokens.shape[1] for stream in (text, audio)]
    torch._assert_async(torch.stack(fits).all(), "a batch exceeds its budget, or a clip the width of its tensor")


def _check_positions(dims: GPTDims, num_ids: int, num_codes: int) -> None:
    if num_ids + 2 > dims.text_positions:
        raise ValueError(
            f"room for {num_ids} text tokens, but the GPT has positions for {dims.text_positions - 2}"
        )
    if num_codes > dims.audio_positions:
        raise ValueError(f"room for {num_codes} codes and stops, but the GPT has {dims.audio_positions} positions")
