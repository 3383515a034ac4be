"""Codes one after the other: a batch of sentences through the GPT with a cache of keys and values.

Prefixes of different lengths are padded on the right and share one cache of fixed size: slots 0 to `prefix` hold
the prefixes, slot prefix + i the i-th code of every sentence, and a mask hides the slots a sentence does not use.
Where a key lies does not matter, since positions are in the embeddings. So every step has the same shapes and
writes to the same memory: `Decoding.step` can be compiled or captured as a graph as it stands.
The latent of a step is the one that a second pass over the finished codes would compute: none is needed.
This module knows neither text nor sound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from myxtts.config import CONDITIONING_TOKENS
from myxtts.model.gpt import GPT
from myxtts.model.packing import Stream

MAX_NEW_CODES = 602
"""As many as the reference generates."""
_PROMPT_CODE = 1
"""What the reference writes for every position of the prompt where it counts repetitions."""
_SLOTS_STEP = 8
"""Slots of a cache come in multiples of this: every layer would copy a mask that is not aligned."""
_STEPS_BETWEEN_LOOKS = 8
"""The host asks only now and then whether all sentences have ended: asking waits for the device."""


@dataclass(frozen=True)
class Sampling:
    """How a code is chosen; the defaults are those of the reference's `inference`."""

    greedy: bool = False
    """Takes the likeliest code. Of the rest only the repetition penalty and the guidance still count."""
    temperature: float = 0.75
    top_k: int = 50
    """Only so many likeliest codes; 0 for all."""
    top_p: float = 0.85
    """Only the likeliest codes that together reach this probability; 1 for all."""
    repetition_penalty: float = 10.0
    """Divides the logits, or multiplies negative ones, of codes that the sentence already has; 1 for none."""
    guidance: float = 1.0
    """Weight of what the text adds to the log-probability of a code; 1 leaves it. Above 1 every step is computed
    without the text as well, which a model must have learnt (`text_dropout`). Only `Writer` does that."""
    central: bool = False
    """Instead of the code drawn, unless it is STOP, takes the one whose vector is nearest to the mean of those it
    was drawn from. Clearer and flatter, for a model that is unsure. Only `Writer` does that."""
    penalise_prompt: bool = True
    """Counts codes 1 and START as already spoken. The reference does, because it stores the prompt as a row of
    ones: code 1 is then hardly ever chosen, and models are used to it."""


class Step(NamedTuple):
    codes: Tensor
    """[sentences]: STOP once a sentence has ended."""
    latents: Tensor
    """[sentences, dim]: the hidden state that chose the code."""
    ended: Tensor
    """bool [sentences]"""


class Speech(NamedTuple):
    codes: Tensor
    """[sentences, longest]: STOP behind the end of a sentence."""
    num_codes: Tensor
    """[sentences]"""
    latents: Tensor
    """[sentences, longest, dim]: zeros behind the end of a sentence."""


class Decoding:
    """The state of one generation: cache and mask. Its memory serves generation after generation of one shape."""

    def __init__(self, model: GPT, voice: Tensor, ids: Tensor, num_ids: Tensor, num_steps: int) -> None:
        """Make room for `num_steps` codes behind prefixes of that shape, and read these: see `read`."""
        dims = model.dims
        if model.training:
            raise ValueError("generation needs model.eval(): dropout would be heard")
        if ids.shape[1] + 2 > dims.text_positions or num_steps > dims.audio_positions:
            raise ValueError(
                f"{ids.shape[1]} text tokens and {num_steps} codes, but the GPT has positions for {dims}"
            )
        self.model = model
        self.prefix = CONDITIONING_TOKENS + ids.shape[1] + 2
        num_slots = -(-(self.prefix + num_steps) // _SLOTS_STEP) * _SLOTS_STEP
        self.slots = torch.arange(num_slots, device=ids.device)
        self.is_prefix = torch.zeros(len(ids), num_slots, dtype=torch.bool, device=ids.device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.read(voice, ids, num_ids)

    def read(self, voice: Tensor, ids: Tensor, num_ids: Tensor) -> None:
        """Run the prefixes: voice [1 or sentences, 32, dim], padded ids [sentences, T], their lengths."""
        model, dims = self.model, self.model.dims
        self.is_prefix.copy_(self.slots < (CONDITIONING_TOKENS + 2 + num_ids)[:, None])
        places = torch.arange(ids.shape[1] + 2, device=ids.device)
        sentences = torch.arange(len(ids), device=ids.device)
        token = Stream(ids, num_ids, dims.start_text, dims.stop_text, 1).token(sentences[:, None], places - 1)
        text = model.text_embedding(token) + model.text_pos_embedding.emb(places)
        x = torch.cat([voice.expand(len(ids), -1, -1).to(text.dtype), text], dim=1)
        room = (0, 0, 0, len(self.slots) - self.prefix)
        for layer, block in enumerate(model.gpt.h):

            def attend(q: Tensor, k: Tensor, v: Tensor, layer: int = layer) -> Tensor:
                k, v = k.transpose(1, 2), v.transpose(1, 2)
                for cache, read in ((self.keys, k), (self.values, v)):
                    if layer == len(cache):
                        cache.append(F.pad(read, room))
                    else:
                        cache[layer].copy_(F.pad(read, room))
                return _attend(q, k, v, None)

            x = block(x, attend)

    def step(self, codes: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the next code and their latents; `codes` [sentences] stand at `place` [1], counted from 0."""
        model = self.model
        slot = self.prefix + place
        seen = self.is_prefix | ((self.slots >= self.prefix) & (self.slots <= slot))
        x = (model.mel_embedding(codes) + model.mel_pos_embedding.emb(place))[:, None]
        # What attention kernels add: given booleans, every layer would make it anew.
        mask = torch.zeros_like(seen, dtype=self.keys[0].dtype).masked_fill(~seen, -torch.inf)[:, None, None, :]
        for layer, block in enumerate(model.gpt.h):
            keys, values = self.keys[layer], self.values[layer]

            def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor = keys, values: Tensor = values) -> Tensor:
                keys.index_copy_(2, slot, k.transpose(1, 2))
                values.index_copy_(2, slot, v.transpose(1, 2))
                return _attend(q, keys, values, mask)

            x = block(x, attend)
        latents = model.norms(x)[:, 0]
        return model.mel_head(latents).float(), latents


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q [sentences, places, heads, head_dim], k and v [sentences, heads, slots, head_dim]; causal without mask."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, is_causal=mask is None)
    return out.transpose(1, 2)


@torch.no_grad()
def stream(
    model: GPT,
    voice: Tensor,
    ids: Tensor,
    num_ids: Tensor,
    sampling: Sampling,
    max_codes: int = MAX_NEW_CODES,
    generator: torch.Generator | None = None,
) -> Iterator[Step]:
    """Steps of a batch of sentences until all have ended (then up to seven more) or have `max_codes` codes."""
    if sampling.central or sampling.guidance != 1:
        raise ValueError("guidance and central codes are known to synthesis.writer alone")
    dims = model.dims
    decoding = Decoding(model, voice, ids, num_ids, max_codes)
    codes = torch.full((len(ids),), dims.start_code, device=ids.device)
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    spoken = torch.zeros(len(ids), dims.audio_tokens, dtype=torch.bool, device=ids.device)
    if sampling.penalise_prompt:
        spoken[:, [_PROMPT_CODE, dims.start_code]] = True
    for number in range(max_codes):
        logits, latents = decoding.step(codes, decoding.slots[number : number + 1])
        codes = torch.where(ended, dims.stop_code, choose(logits, spoken, sampling, generator))
        ended = ended | (codes == dims.stop_code)
        spoken.scatter_(1, codes[:, None], True)
        yield Step(codes, latents, ended)
        if number % _STEPS_BETWEEN_LOOKS == _STEPS_BETWEEN_LOOKS - 1 and bool(ended.all()):
            return


@torch.no_grad()
def generate(
    model: GPT,
    voice: Tensor,
    ids: Tensor,
    num_ids: Tensor,
    sampling: Sampling,
    max_codes: int = MAX_NEW_CODES,
    generator: torch.Generator | None = None,
) -> Speech:
    """Codes and latents of a batch of sentences."""
    steps = list(stream(model, voice, ids, num_ids, sampling, max_codes, generator))
    codes = torch.stack([step.codes for step in steps], dim=1)
    present = codes != model.dims.stop_code
    num_codes = present.sum(1)
    longest = int(num_codes.max())
    latents = torch.stack([step.latents for step in steps[:longest] or steps[:1]], dim=1)[:, :longest]
    return Speech(codes[:, :longest], num_codes, torch.where(present[:, :longest, None], latents, 0))


def choose(logits: Tensor, spoken: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """One code for each row of logits [sentences, codes]; `spoken` marks the codes a sentence already has."""
    if sampling.repetition_penalty != 1:
        penalised = torch.where(
            logits < 0, logits * sampling.repetition_penalty, logits / sampling.repetition_penalty
        )
        logits = torch.where(spoken, penalised, logits)
    if sampling.greedy:
        return logits.argmax(-1)
    # Sorted once: both cuts are then prefixes of the row, and the draw is an index into the order.
    logits, order = (logits / sampling.temperature).sort(stable=True, dim=-1, descending=True)
    if 0 < sampling.top_k < logits.shape[-1]:
        logits[:, sampling.top_k :] = -torch.inf
    probabilities = logits.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = torch.where(before < sampling.top_p, probabilities, 0)
    probabilities[:, 0] = probabilities[:, 0].clamp(min=torch.finfo(probabilities.dtype).tiny)
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return order.gather(-1, drawn).squeeze(-1)
