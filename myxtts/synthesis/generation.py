"""The sampler: a step of the GPT over a key-value cache, and the choice of a code for every row.

Every sentence has its own random numbers, drawn on the host before it begins, and its own limit. Its codes depend
neither on other rows nor on the device, except for rounding. A step reads and writes the same memory each time and
needs nothing from the host, so it can be captured as a CUDA graph. `slots` decides which rows there are. This
module knows neither text nor audio.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from myxtts.config import CONDITIONING_TOKENS
from myxtts.model.blocks import InOutLinear
from myxtts.model.gpt import GPT, Attend

MAX_NEW_CODES = 602  # codes of a sentence at most, as in the reference
PROMPT_CODE = 1  # the code that the reference stores for every prompt position when it counts repetitions
DAMAGED = "The GPT computes NaN or infinity: its weights are damaged or diverged. Use an earlier checkpoint."
_SLOTS_STEP = 16
"""Attention covers a multiple of so many slots. A CPU then rounds alike for any number of them, so that a row does
not depend on the length of others. A GPU would copy a mask of another size in every layer to align it."""
TOLERANCE = 0.05  # of fused kernels, of the largest latent: they round less often
_log = logging.getLogger(__name__)


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
        self.fused: FusedBlocks | None = None  # computes the same on a GPU, in fewer kernels

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

        Returns what leaves the stack. Attention covers the first `used` slots. Other rows may be in the
        middle of their sentences.
        """
        mask = self._mask(slot, used)

        def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            _write(keys, values, row, slot, k, v)
            k, v = keys[:, :, :used].index_select(0, row), values[:, :, :used].index_select(0, row)
            return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask)[0].transpose(0, 1)

        return self._run(x, attend)

    def begin(self, x: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        """Run the beginnings of several sequences, x [n, tokens, dim], into slots [n, tokens] of rows [n]."""

        def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            _write(keys, values, row[:, None], slot, k, v)
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        return self._run(x, attend)

    def step(self, codes: Tensor, place: Tensor, used: int) -> tuple[Tensor, Tensor]:
        """Logits of the next codes and their latents; `codes` of the first rows stand at `place`, from 0.

        Attention covers the first `used` slots; fused, those that each row has filled.
        """
        rows, slot = self.rows[: len(codes)], self.starts[: len(codes)] + place
        mask = self._mask(slot, used)[:, None, None, :] if self.fused is None else None

        def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            if self.fused is not None:
                return self.fused.attended(q, k, v, keys, values, slot)
            _write(keys, values, rows, slot, k, v)
            keys, values = keys[: len(q), :, :used], values[: len(q), :, :used]
            return F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask)[:, :, 0]

        latents: Tensor = self.model.final_norm(self._run(self.embedded(codes, place), attend))
        return self.model.mel_head(latents).float(), latents

    def _run(self, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        """What leaves the stack; the attention of each block is given its cache, and writes to it first."""
        caches = zip(self.keys, self.values, strict=True)
        attends = [partial(attention, keys=keys, values=values) for keys, values in caches]
        if self.fused is not None:
            return self.fused(x, attends)
        for block, attend in zip(self.model.gpt.h, attends, strict=True):
            x = block(x, attend)
        normed: Tensor = self.model.gpt.ln_f(x)
        return normed

    def _mask(self, slot: Tensor, used: int | None) -> Tensor:
        """What hides the slots after `slot` [n]: [n, used], to add. From booleans every layer would compute it."""
        hidden = self.slots[:used] > slot[:, None]
        return torch.zeros_like(hidden, dtype=self.keys.dtype).masked_fill(hidden, -torch.inf)


def _write(keys: Tensor, values: Tensor, rows: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write keys and values of tokens to their slots of a cache."""
    for cache, made in ((keys, k), (values, v)):
        cache.transpose(1, 2).index_put_((rows, slots), made)


tl: Any = None  # triton.language, once the kernels are compiled
_SLOTS_READ = 64  # by a program of the attention at a time


def _attend_kernel(  # type: ignore[no-untyped-def]
    q, k, v, keys, values, slots, out, scale, per_row, per_head, unused,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`FusedBlocks.attended`, for one row and head: until the end each place of a block has its own softmax."""
    row, head = tl.program_id(0), tl.program_id(1)
    at, place = tl.arange(0, DIM), tl.arange(0, BLOCK)
    made, cached = row * per_row + head * DIM + at, (row.to(tl.int64) * HEADS + head) * per_head
    query = tl.load(q + made).to(tl.float32) * scale
    key, value, slot = tl.load(k + made), tl.load(v + made), tl.load(slots + row)
    tl.store(keys + cached + slot * DIM + at, key)
    tl.store(values + cached + slot * DIM + at, value)
    newest = tl.sum(query * key.to(tl.float32), 0)
    best = newest + tl.zeros([BLOCK], tl.float32)
    total, sums = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK, DIM], tl.float32)
    filled = tl.where(slot == unused, 0, slot).to(tl.int32)
    for first in range(0, filled, BLOCK):
        inside = first + place < filled
        there = cached + (first + place)[:, None] * DIM + at[None, :]
        some_keys = tl.load(keys + there, inside[:, None], 0.0).to(tl.float32)
        some_values = tl.load(values + there, inside[:, None], 0.0).to(tl.float32)
        scores = tl.where(inside, tl.sum(some_keys * query[None, :], 1), float("-inf"))
        higher = tl.maximum(best, scores)
        share, weight = tl.exp(best - higher), tl.exp(scores - higher)
        total = total * share + weight
        sums = sums * share[:, None] + weight[:, None] * some_values
        best = higher
    highest = tl.max(best, 0)
    share, weight = tl.exp(best - highest), tl.exp(newest - highest)
    summed = tl.sum(sums * share[:, None], 0) + weight * value.to(tl.float32)
    tl.store(out + (row * HEADS + head) * DIM + at, summed / (tl.sum(total * share, 0) + weight))


def _add_kernel(  # type: ignore[no-untyped-def]
    x, more, weight, bias, out, epsilon, DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """`FusedBlocks.added`, for one row."""
    at = tl.arange(0, BLOCK)
    inside, there = at < DIM, tl.program_id(0) * DIM + at
    added = tl.load(x + there, inside, 0.0).to(tl.float32) + tl.load(more + there, inside, 0.0).to(tl.float32)
    tl.store(x + there, added, inside)
    numbers = added.to(x.dtype.element_ty).to(tl.float32)
    centred = tl.where(inside, numbers - tl.sum(numbers, 0) / DIM, 0.0)
    normed = centred / tl.sqrt(tl.sum(centred * centred, 0) / DIM + epsilon)
    scale, offset = (tl.load(weight + at, inside, 0.0), tl.load(bias + at, inside, 0.0))
    tl.store(out + there, normed * scale.to(tl.float32) + offset.to(tl.float32), inside)


class FusedBlocks:
    """The GPT's blocks and the norm after them on a GPU, equal up to rounding, in half as many kernels.

    A step has little arithmetic and hundreds of kernels, which wait for each other, and for room beside a vocoder.
    """

    def __init__(self, gpt: GPT, kernels: tuple[Any, Any]) -> None:
        self._stack, (self._attend, self._add) = gpt.gpt, kernels

    @classmethod
    @torch.inference_mode()
    def compiled(cls, gpt: GPT) -> FusedBlocks | None:
        """None where Triton or a C compiler is missing, or computes something else."""
        global tl
        try:
            import triton
            import triton.language

            tl = triton.language
            made = cls(gpt, (triton.jit(_attend_kernel), triton.jit(_add_kernel)))
            made.check(gpt)
        except Exception as error:
            _log.info("Codes are generated without fused kernels, which is slower: %s", error)
            _log.debug("The reason in full", exc_info=True)
            return None
        return made

    def check(self, gpt: GPT) -> None:
        """Raise an error if a step, of which the last row is nobody's, finds other latents than unfused."""
        decoding, latents = Decoding(gpt, Shape(4, 30, 100)), list[Tensor]()
        drawn = torch.Generator(decoding.slots.device).manual_seed(0)
        for cache in (decoding.keys, decoding.values):
            cache.copy_(torch.randn(cache.shape, generator=drawn, device=cache.device))
        decoding.starts.copy_(torch.tensor([0, _SLOTS_READ, _SLOTS_READ + 9, len(decoding.slots) - 1]))
        codes, place = decoding.rows, torch.tensor([0, 1, 70, 0]).to(decoding.rows)
        for fused in (None, self):
            decoding.fused = fused
            latents.append(decoding.step(codes, place, len(decoding.slots))[1].float())
        error = float((latents[1] - latents[0])[:-1].abs().max() / latents[0].abs().max())
        if not (error < TOLERANCE and bool(latents[1].isfinite().all())):
            raise ValueError(f"an error of {error}")

    def __call__(self, x: Tensor, attends: Sequence[Attend]) -> Tensor:
        """What leaves the stack, of x [..., dim], which is overwritten; with the attention of each block."""
        blocks: Sequence[Any] = [*self._stack.h]
        norms = [*(block.ln_1 for block in blocks), self._stack.ln_f]
        x, normed = x.contiguous(), norms[0](x)
        for block, attend, after in zip(blocks, attends, norms[1:], strict=True):
            attention, wide = block.attn, block.mlp.c_fc
            q, k, v = attention.c_attn(normed).view(*x.shape[:-1], 3, attention.heads, -1).unbind(-3)
            normed = self.added(x, attention.c_proj(attend(q, k, v).flatten(-2)), block.ln_2)
            hidden = torch._addmm_activation(wide.bias, normed.flatten(0, -2), wide.weight, use_gelu=True)
            normed = self.added(x, block.mlp.c_proj(hidden), after)
        assert isinstance(normed, Tensor)
        return normed

    def added(self, x: Tensor, more: Tensor, norm: nn.LayerNorm) -> Tensor:
        """Add to x; returns its norm."""
        out, dim = torch.empty_like(x), x.shape[-1]
        numbers = (norm.eps, dim, 1 << (dim - 1).bit_length())
        self._add[x.numel() // dim,](x, more, norm.weight, norm.bias, out, *numbers)
        return out

    def attended(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
        """The attention of rows [n, heads, head_dim] to their slots before `slots` [n], where it writes k and v.

        `keys` and `values` [rows, heads, slots, head_dim] are the cache. The last slot is nobody's: a row there
        attends to itself.
        """
        (rows, heads, dim), out = q.shape, q.new_empty(q.shape)
        numbers = (dim**-0.5, q.stride(0), keys.stride(1), keys.shape[2] - 1)
        self._attend[rows, heads](q, k, v, keys, values, slots, out, *numbers, heads, dim, _SLOTS_READ)
        return out


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
