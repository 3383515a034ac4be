"""The sampler: a step of the GPT over a key-value cache, and the choice of a code for every row.

Every sentence has its own random numbers, drawn on the host before it begins, and its own limit. Its codes depend
neither on other rows nor on the device, except for rounding. A step reads and writes the same memory each time and
needs nothing from the host, so it can be captured as a CUDA graph. `slots` decides which rows there are. This
module knows neither text nor audio.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from myxtts.config import CONDITIONING_TOKENS
from myxtts.model.blocks import InOutLinear
from myxtts.model.gpt import GPT

MAX_NEW_CODES = 602  # codes of a sentence at most, as in the reference
PROMPT_CODE = 1  # the code that the reference stores for every prompt position when it counts repetitions
DAMAGED = "The GPT computes NaN or infinity: its weights are damaged or diverged. Use an earlier checkpoint."
_SLOTS_STEP = 16
"""Attention covers a multiple of so many slots. A CPU then rounds alike for any number of them, so that a row does
not depend on the length of others. A GPU would copy a mask of another size in every layer to align it."""


@dataclass(frozen=True)
class Sampling:
    """How a code is chosen; the defaults are those of the reference's `inference`."""

    greedy: bool = False
    """Take the likeliest code. Only the repetition penalty and the guidance still apply."""
    temperature: float = 0.75
    top_k: int = 50  # keep this many of the likeliest codes; 0 keeps all
    top_p: float = 0.85  # keep the likeliest codes that together reach this probability; 1 keeps all
    repetition_penalty: float = 10.0
    """Divides the logits of codes the sentence already has, or multiplies negative ones; 1 is off."""
    guidance: float = 1.0
    """Scale of classifier-free guidance; 1 is off. Above, every step also runs without the text, which the model
    must have been trained for (`text_dropout`)."""
    central: bool = False
    """Replace the code drawn, unless it is STOP, by the one whose vector is nearest to the mean of the candidates:
    clearer and less expressive, for a model with flat distributions."""
    penalise_prompt: bool = True
    """Count codes 1 and START as already generated. The reference does, because it stores the prompt as a row of
    ones: code 1 is hardly ever chosen, and published models were tuned that way."""


class HalfLinear(nn.Module):
    """A linear layer on a CPU with its matrix in float16, half the memory to read per code; it adds in float32."""

    def __init__(self, linear: InOutLinear | nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        weight = weight if isinstance(linear, nn.Linear) else weight.t().contiguous()
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return out


def usual_dtype(device: torch.device) -> torch.dtype:
    """Type of the GPT's matrices: 16 bits, except on CPUs for which PyTorch has no fast product of that kind."""
    if device.type == "cpu":
        return torch.float16 if torch.backends.quantized.engine in ("x86", "fbgemm") else torch.float32
    return torch.bfloat16


def convert(gpt: GPT, dtype: torch.dtype) -> None:
    """Convert what runs once per code; the conditioning encoder keeps its precision. On a CPU only matrices."""
    if dtype == torch.float16 and gpt.mel_embedding.weight.device.type == "cpu":
        for parent in [*gpt.gpt.modules()]:
            for name, layer in [*parent.named_children()]:
                if isinstance(layer, InOutLinear):
                    setattr(parent, name, HalfLinear(layer))
        gpt.mel_head = HalfLinear(gpt.mel_head)  # type: ignore[assignment]
        return
    embeddings = (gpt.mel_embedding, gpt.text_embedding, gpt.mel_pos_embedding, gpt.text_pos_embedding)
    for module in (gpt.gpt, gpt.final_norm, gpt.mel_head, *embeddings):
        module.to(dtype)


@contextlib.contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Let operations that this thread calls use `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Shape(NamedTuple):
    """The size of a batch: its sentences, and the most text tokens and codes of one."""

    sentences: int
    ids: int
    steps: int


class Decoding:
    """GPT decoding with a key-value cache: rows, each a sentence at a position of its own.

    The slots of a row hold its prefix and then its codes, and what is left of an earlier sentence.
    """

    def __init__(self, model: GPT, shape: Shape) -> None:
        dims, like = model.dims, model.mel_embedding.weight
        if model.training:
            raise ValueError("generation needs model.eval(): dropout would change the codes")
        if shape.ids + 2 > dims.text_positions or shape.steps > dims.audio_positions:
            raise ValueError(
                f"{shape.ids} text tokens and {shape.steps} codes, but the GPT has positions for {dims}"
            )
        self.model = model
        self.slots = torch.arange(self.num_slots(shape), device=like.device)
        self.rows = torch.arange(shape.sentences, device=like.device)
        self.starts = torch.zeros_like(self.rows)  # the slot of a row's first code
        size = (dims.layers, shape.sentences, dims.heads, len(self.slots), dims.dim // dims.heads)
        self.keys, self.values = like.new_zeros(size), like.new_zeros(size)

    @staticmethod
    def num_slots(shape: Shape) -> int:
        """Slots of a row: for the prefix, the codes, and one that a row without a sentence writes to."""
        return rounded_up(CONDITIONING_TOKENS + shape.ids + 2 + shape.steps + 1)

    def prefix(self, voice: Tensor, ids: Tensor) -> Tensor:
        """Voice [1, 32, dim] and the ids of a text [n], as the first block reads them: [32 + n + 2, dim]."""
        model, dims = self.model, self.model.dims
        ids = F.pad(ids, (1, 0), value=dims.start_text)
        ids = F.pad(ids, (0, 1), value=dims.stop_text)
        places = torch.arange(len(ids), device=ids.device)
        text = model.text_embedding(ids) + model.text_pos_embedding.emb(places)
        return torch.cat([voice[0].to(text.dtype), text])

    def embedded(self, codes: Tensor, place: Tensor) -> Tensor:
        """Codes [n] at their places, as the first block reads them."""
        made: Tensor = self.model.mel_embedding(codes) + self.model.mel_pos_embedding.emb(place)
        return made

    def extend(self, x: Tensor, row: Tensor, slot: Tensor, used: int | None = None) -> Tensor:
        """Run a part of a sequence, x [tokens, dim], into slots [tokens] of `row` [1].

        Returns what leaves the last block. Attention covers the first `used` slots. Other rows may be in the
        middle of their sentences.
        """
        mask = self._mask(slot, used)

        def attend(q: Tensor, _k: Tensor, _v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            k, v = keys[:, :, :used].index_select(0, row), values[:, :, :used].index_select(0, row)
            return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask)[0].transpose(0, 1)

        return self._run(x, row, slot, attend)

    def begin(self, x: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        """Run the beginnings of several sequences, x [n, tokens, dim], into slots [n, tokens] of rows [n]."""

        def attend(q: Tensor, k: Tensor, v: Tensor, _keys: Tensor, _values: Tensor) -> Tensor:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        return self._run(x, row[:, None], slot, attend)

    def step(self, codes: Tensor, place: Tensor, used: int) -> tuple[Tensor, Tensor]:
        """Logits of the next codes and their latents; `codes` of the first rows stand at `place`, from 0.

        Attention covers the first `used` slots.
        """
        rows, slot = self.rows[: len(codes)], self.starts[: len(codes)] + place
        mask = self._mask(slot, used)[:, None, None, :]

        def attend(q: Tensor, _k: Tensor, _v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            keys, values = keys[: len(q), :, :used], values[: len(q), :, :used]
            return F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask)[:, :, 0]

        latents = self.model.norms(self._run(self.embedded(codes, place), rows, slot, attend))
        return self.model.mel_head(latents).float(), latents

    def _run(self, x: Tensor, rows: Tensor, slots: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        """What leaves the last block; each writes keys and values of x to its cache before it attends."""
        for block, keys, values in zip(self.model.gpt.h, self.keys, self.values, strict=True):

            def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor = keys, values: Tensor = values) -> Tensor:
                for cache, made in ((keys, k), (values, v)):
                    cache.transpose(1, 2).index_put_((rows, slots), made)
                return attention(q, k, v, keys, values)

            x = block(x, attend)
        return x

    def _mask(self, slot: Tensor, used: int | None) -> Tensor:
        """What hides the slots after `slot` [n]: [n, used], to add. From booleans every layer would compute it."""
        hidden = self.slots[:used] > slot[:, None]
        return torch.zeros_like(hidden, dtype=self.keys.dtype).masked_fill(hidden, -torch.inf)


def rounded_up(num_slots: int) -> int:
    """A number of slots that attention can cover."""
    return -(-num_slots // _SLOTS_STEP) * _SLOTS_STEP


class Prompt(NamedTuple):
    """The input for one sentence."""

    ids: Sequence[int]
    voice: Tensor  # [1, 32, dim]
    draws: Tensor
    """float32 [most codes], each in [0, 1): a random number per code. The sentence ends when they are used up."""


class Generated(NamedTuple):
    """The codes of a sentence, or of a part of it."""

    codes: Tensor  # [codes], on the host
    latents: Tensor  # float32 [codes, dim], on the device: the hidden states that chose the codes


def draws(seed: int, sentence: int, attempt: int, num_codes: int) -> Tensor:
    """Random numbers for one attempt at one sentence of a text."""
    name = f"{seed} {sentence} {attempt}".encode()
    number = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
    return torch.rand(num_codes, generator=torch.Generator().manual_seed(number))


OPTIONS = [field.name for field in fields(Sampling) if field.name != "penalise_prompt"]
"""What a choice depends on. `penalise_prompt` matters only when a sentence begins."""


def options_of(sampling: Sampling, num_codes: int) -> list[float]:
    """The values of `OPTIONS`, for a GPT with so many codes."""
    kept = min(sampling.top_k or num_codes, num_codes)
    return [float(kept if name == "top_k" else getattr(sampling, name)) for name in OPTIONS]


class RowSampling(NamedTuple):
    """The sampling of rows, of which each chooses in its own way."""

    options: Tensor  # float32 [rows, options]
    most_kept: int  # the largest `top_k`
    any_central: bool

    @classmethod
    def of(cls, samplings: Sequence[Sampling], num_codes: int) -> RowSampling:
        rows = [options_of(sampling, num_codes) for sampling in samplings]
        most_kept = max(int(row[OPTIONS.index("top_k")]) for row in rows)
        return cls(torch.tensor(rows), most_kept, any(sampling.central for sampling in samplings))


def choose(
    logits: Tensor, used: Tensor, sampling: RowSampling, drawn: Tensor, vectors: Tensor | None = None
) -> Tensor:
    """Choose a code for each row of logits [rows, codes] with the random numbers `drawn` [rows].

    `used` marks the codes a sentence already has. `vectors` [codes, dim], the DVAE's codebook, are needed for
    central codes.
    """
    columns = [column[:, None] for column in sampling.options.unbind(1)]
    greedy, temperature, top_k, top_p, penalty, _, is_central = columns
    logits = torch.where(used, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    # In order: top-p then keeps a prefix of the row, and the draw is an index into the order.
    num_kept = min(sampling.most_kept, logits.shape[-1])
    kept, order = (logits / temperature).topk(num_kept)
    kept = kept.masked_fill(torch.arange(num_kept, device=kept.device) >= top_k, -torch.inf)
    probabilities = kept.softmax(-1)
    reached = probabilities.cumsum(-1)
    inside = (reached - probabilities < top_p) & (kept > -torch.inf)
    inside[:, 0] = True
    last = inside.sum(-1, keepdim=True) - 1
    total = reached.gather(-1, last)
    # Below the total even after rounding, so that the code found is one of those inside.
    passed = (reached <= drawn[:, None] * total * (1 - 1e-6)) & inside
    place = torch.minimum(passed.sum(-1, keepdim=True), last).masked_fill(greedy > 0, 0)
    chosen = order.gather(-1, place).squeeze(-1)
    if sampling.any_central:
        assert vectors is not None, "central codes need the vectors of the codebook"
        likely = torch.zeros_like(logits).scatter(-1, order, torch.where(inside, probabilities, 0))
        likely = likely[:, : len(vectors)]
        mean = (likely @ vectors) / likely.sum(-1, keepdim=True)
        central = (vectors.square().sum(-1) - 2 * mean @ vectors.t()).argmin(-1)
        chosen = torch.where((chosen < len(vectors)) & (is_central[:, 0] > 0), central, chosen)
    return chosen
