"""The sampler: codes for a batch of sentences, generated step by step in memory of fixed shape.

Every sentence has its own random numbers, drawn on the host before it begins, and its own limit. Its codes depend
neither on the rest of the batch nor on the device, except for rounding. A step reads and writes the same memory
each time and needs nothing from the host, so on a GPU it is captured once per shape as a CUDA graph. This module
knows neither text nor audio.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from myxtts.config import CONDITIONING_TOKENS
from myxtts.devices import CudaGraph, Stream, allocatable_bytes, release_memory
from myxtts.errors import NO_PROGRESS, PipelineError
from myxtts.model.blocks import InOutLinear
from myxtts.model.gpt import GPT, GPTDims, PaddedTokens

MAX_NEW_CODES = 602  # codes of a sentence at most, as in the reference
KEPT_SHARE = 0.25  # of the GPU's free memory, for shapes whose memory and CUDA graph are kept
CAPTURED_SHAPES = ((62, 192), (126, 448))
"""Ids and steps of captured shapes, for about 40 and 115 characters; a third covers all positions of the GPT. Few,
because each is captured while the user waits; more than one, because attention takes time for every slot, used or
not. With START and STOP the ids make multiples of 64, which attention kernels prefer."""
PROMPT_CODE = 1  # the code that the reference stores for every prompt position when it counts repetitions
DAMAGED = "The GPT computes NaN or infinity: its weights are damaged or diverged. Use an earlier checkpoint."
_SLOTS_STEP = 16
"""Attention covers a multiple of so many slots. A CPU then rounds alike for any number of them, so that a row does
not depend on the length of others. A GPU would copy a mask of another size in every layer to align it."""
_STEPS_BETWEEN_CHECKS = 8
"""Steps of a CUDA graph between checks for the end of all sentences: a check waits for the device."""

_ALONE = 2  # a CPU generates up to so many sentences in one thread: a second one would only wait for memory too

Advance = Callable[[int], None]


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
        self.longest_prefix = CONDITIONING_TOKENS + shape.ids + 2
        self.slots = torch.arange(self.num_slots(shape), device=like.device)
        self.rows = torch.arange(shape.sentences, device=like.device)
        self.starts = torch.zeros_like(self.rows)  # the slot of a row's first code
        size = (dims.layers, shape.sentences, dims.heads, len(self.slots), dims.dim // dims.heads)
        self.keys, self.values = like.new_zeros(size), like.new_zeros(size)

    @staticmethod
    def num_slots(shape: Shape) -> int:
        """Slots of a row: for the prefix, the codes, and one that a row without a sentence writes to."""
        return rounded_up(CONDITIONING_TOKENS + shape.ids + 2 + shape.steps + 1)

    def prefill(self, voice: Tensor, ids: Tensor, num_ids: Tensor) -> None:
        """Run the prefixes: voice [1 or sentences, 32, dim], padded ids [sentences, T], their lengths.

        With room for twice as many sentences, the second half are the same ones without text. Their prefixes
        differ in one token, the STOP after START, which is run at the end of the first half's.
        """
        num_sentences, common, length = len(ids), CONDITIONING_TOKENS + 1, self.longest_prefix
        is_twice, mask = len(self.rows) > num_sentences, None
        lengths = torch.cat([num_ids, torch.zeros_like(num_ids)]) if is_twice else num_ids
        self.starts.copy_(CONDITIONING_TOKENS + 2 + lengths)
        x = self.embedded(voice, ids, num_ids)
        if is_twice:
            x = torch.cat([x, self.stop_without_text().expand(num_sentences, -1, -1)], dim=1)
        if is_twice or x.device.type == "cpu":  # a CPU rounds as `extend` does
            mask = torch.ones(x.shape[1], rounded_up(x.shape[1]), dtype=torch.bool, device=ids.device).tril()
            mask[length:, common:length] = False
        for layer, block in enumerate(self.model.gpt.h):

            def attend(q: Tensor, k: Tensor, v: Tensor, layer: int = layer) -> Tensor:
                q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                for cache, made in ((self.keys[layer].zero_(), k), (self.values[layer].zero_(), v)):
                    cache[:num_sentences, :, :length] = made[:, :, :length]
                    if is_twice:
                        cache[num_sentences:, :, :common] = made[:, :, :common]
                        cache[num_sentences:, :, common] = made[:, :, -1]
                if mask is not None:
                    k, v = (F.pad(each, (0, 0, 0, mask.shape[1] - each.shape[2])) for each in (k, v))
                made = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
                return made.transpose(1, 2)

            x = block(x, attend)

    def embedded(self, voice: Tensor, ids: Tensor, num_ids: Tensor) -> Tensor:
        """The prefixes as the first block reads them, [sentences, 32 + T + 2, dim]; arguments as `prefill`."""
        model, dims = self.model, self.model.dims
        places = torch.arange(ids.shape[1] + 2, device=ids.device)
        padded = PaddedTokens(ids, num_ids, dims.start_text, dims.stop_text, 1)
        token = padded.token(torch.arange(len(ids), device=ids.device)[:, None], places - 1)
        text = model.text_embedding(token) + model.text_pos_embedding.emb(places)
        return torch.cat([voice.expand(len(ids), -1, -1).to(text.dtype), text], dim=1)

    def stop_without_text(self) -> Tensor:
        """STOP right after START, as the first block reads it: [1, dim]."""
        place = self.rows.new_ones(1)
        token = torch.full_like(place, self.model.dims.stop_text)
        made: Tensor = self.model.text_embedding(token) + self.model.text_pos_embedding.emb(place)
        return made

    def extend(self, x: Tensor, row: Tensor, first: Tensor, used: int | None = None) -> None:
        """Run a part of a prefix, x [tokens, dim], into the slots of `row` [1] from `first` [1] on.

        Attention covers the first `used` slots. Other rows may be in the middle of their sentences.
        """
        slot = first + torch.arange(len(x), device=x.device)
        mask = self._mask(slot, used)
        for block, keys, values in zip(self.model.gpt.h, self.keys, self.values, strict=True):

            def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor = keys, values: Tensor = values) -> Tensor:
                for cache, made in ((keys, k), (values, v)):
                    cache.transpose(1, 2).index_put_((row, slot), made)
                k, v = keys[:, :, :used].index_select(0, row), values[:, :, :used].index_select(0, row)
                return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask)[0].transpose(
                    0, 1
                )

            x = block(x, attend)

    def step(
        self, codes: Tensor, place: Tensor, num_codes: int | None = None, used: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits of the next codes and their latents; `codes` [rows] stand at `place` [rows or 1], from 0.

        With `num_codes`, the number of codes so far, attention skips the slots that are still empty in all rows;
        or it covers the first `used`. `codes` may be of the first rows only.
        """
        model = self.model
        used = used if num_codes is None else rounded_up(self.longest_prefix + num_codes)
        rows, slot = self.rows[: len(codes)], self.starts[: len(codes)] + place
        x = model.mel_embedding(codes) + model.mel_pos_embedding.emb(place)
        mask = self._mask(slot, used)[:, None, None, :]
        for block, keys, values in zip(model.gpt.h, self.keys, self.values, strict=True):

            def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor = keys, values: Tensor = values) -> Tensor:
                for cache, made in ((keys, k), (values, v)):
                    cache.transpose(1, 2).index_put_((rows, slot), made)
                keys, values = keys[: len(q), :, :used], values[: len(q), :, :used]
                return F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask)[:, :, 0]

            x = block(x, attend)
        latents = model.norms(x)
        return model.mel_head(latents).float(), latents

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
    wave: Tensor | None = None  # [samples], where it was made at the same time


def draws(seed: int, sentence: int, attempt: int, num_codes: int) -> Tensor:
    """Random numbers for one attempt at one sentence of a text."""
    name = f"{seed} {sentence} {attempt}".encode()
    number = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
    return torch.rand(num_codes, generator=torch.Generator().manual_seed(number))


class RowSampling(NamedTuple):
    """The fields of `Sampling` as tensors, [rows, 1] each: every row chooses in its own way."""

    greedy: Tensor
    temperature: Tensor
    top_k: Tensor  # all codes if all are kept
    top_p: Tensor
    repetition_penalty: Tensor
    guidance: Tensor
    central: Tensor
    most_kept: int  # the largest `top_k`
    any_central: bool


def choose(
    logits: Tensor,
    used: Tensor,
    sampling: Sampling | RowSampling,
    drawn: Tensor,
    vectors: Tensor | None = None,
) -> Tensor:
    """Choose a code for each row of logits [sentences, codes] with the random numbers `drawn` [sentences].

    `used` marks the codes a sentence already has. `vectors` [codes, dim], the DVAE's codebook, are needed for
    central codes.
    """
    rows = sampling if isinstance(sampling, RowSampling) else None
    if rows or sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        logits = torch.where(used, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    if not rows and sampling.greedy:
        return logits.argmax(-1)
    # In order: top-p then keeps a prefix of the row, and the draw is an index into the order.
    num_kept = sampling.most_kept if isinstance(sampling, RowSampling) else sampling.top_k or logits.shape[-1]
    num_kept = min(num_kept, logits.shape[-1])
    kept, order = (logits / sampling.temperature).topk(num_kept)
    if rows:
        kept = kept.masked_fill(torch.arange(num_kept, device=kept.device) >= rows.top_k, -torch.inf)
    probabilities = kept.softmax(-1)
    reached = probabilities.cumsum(-1)
    inside = (reached - probabilities < sampling.top_p) & (kept > -torch.inf)
    inside[:, 0] = True
    last = inside.sum(-1, keepdim=True) - 1
    total = reached.gather(-1, last)
    # Below the total even after rounding, so that the code found is one of those inside.
    passed = (reached <= drawn[:, None] * total * (1 - 1e-6)) & inside
    place = torch.minimum(passed.sum(-1, keepdim=True), last)
    if rows:
        place = place.masked_fill(rows.greedy, 0)
    chosen = order.gather(-1, place).squeeze(-1)
    if rows.any_central if rows else sampling.central:
        assert vectors is not None, "central codes need the vectors of the codebook"
        likely = torch.zeros_like(logits).scatter(-1, order, torch.where(inside, probabilities, 0))
        likely = likely[:, : len(vectors)]
        mean = (likely @ vectors) / likely.sum(-1, keepdim=True)
        central = (vectors.square().sum(-1) - 2 * mean @ vectors.t()).argmin(-1)
        is_central = chosen < len(vectors)
        chosen = torch.where(is_central & rows.central[:, 0] if rows else is_central, central, chosen)
    return chosen


def guided(logits: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance: from logits [2 * sentences, codes], with the text first, to [sentences, codes]."""
    with_text, without = logits.chunk(2)
    return without + scale * (with_text - without)


def captured_shape(dims: GPTDims, fitting: Shape) -> Shape:
    """The smallest shape to capture that has room for `fitting`."""
    shapes = (*CAPTURED_SHAPES, (dims.max_text, dims.max_codes))
    ids, steps = next(shape for shape in shapes if fitting.ids <= shape[0] and fitting.steps <= shape[1])
    return Shape(1 << (fitting.sentences - 1).bit_length(), min(ids, dims.max_text), min(steps, dims.max_codes))


class CodeGenerator:
    """Generates a batch. With a stream, it captures a step as a CUDA graph and serves batch after batch."""

    def __init__(
        self,
        gpt: GPT,
        shape: Shape,
        sampling: Sampling,
        stream: Stream | None = None,
        vectors: Tensor | None = None,
    ) -> None:
        self._gpt, self._shape, self._sampling, self._stream, self._vectors = gpt, shape, sampling, stream, vectors
        rows, steps = shape.sentences, shape.steps
        # Guidance decodes every sentence a second time, without its text.
        self._num_copies = 1 if sampling.guidance == 1 else 2
        self._decoding = Decoding(gpt, shape._replace(sentences=self._num_copies * rows))
        self._stop, device = gpt.dims.stop_code, self._decoding.slots.device
        self._last_codes = torch.zeros(rows, dtype=torch.long, device=device)
        self._place = torch.zeros(1, dtype=torch.long, device=device)
        self._ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self._most = torch.zeros(rows, dtype=torch.long, device=device)
        self._used = torch.zeros(rows, gpt.dims.audio_tokens, dtype=torch.bool, device=device)
        self._draws = torch.zeros(rows, steps, device=device)
        self._codes = torch.zeros(rows, steps, dtype=torch.long, device=device)
        self._latents = torch.zeros(rows, steps, gpt.dims.dim, device=device)
        self._graph: CudaGraph[None] | None = None
        self._on_cpu = device.type == "cpu"
        self._num_steps = 0
        self.num_bytes = 2 * self._decoding.keys.nbytes + self._latents.nbytes  # nearly all of its memory

    @torch.no_grad()
    def begin(self, prompts: Sequence[Prompt]) -> None:
        """Run the prefixes of a batch; rows without a prompt count as ended."""
        device, num_sentences = self._last_codes.device, self._shape.sentences
        ids = torch.zeros(num_sentences, self._shape.ids, dtype=torch.long)
        num_ids = torch.zeros(num_sentences, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt.ids)] = torch.tensor(prompt.ids)
            num_ids[row] = len(prompt.ids)
        voices = [prompt.voice for prompt in prompts]
        voices += voices[:1] * (num_sentences - len(prompts))
        self._decoding.prefill(torch.cat(voices).to(device), ids.to(device), num_ids.to(device))
        self._reset(prompts)
        if self._stream is not None and self._graph is None:
            self._graph = CudaGraph(self.step, self._stream)
            self._reset(prompts)  # capturing runs warm-up steps, which write

    @torch.inference_mode()
    def advance(self, num_steps: int) -> bool:
        """Take `num_steps` steps, or as many as there is room for; True if all sentences have ended."""
        is_alone = self._on_cpu and self._shape.sentences <= _ALONE
        with num_threads(1 if is_alone else torch.get_num_threads()):
            for _ in range(min(num_steps, self._shape.steps - self._num_steps)):
                if self._graph is None:
                    self.step(self._num_steps + 1)
                else:
                    self._graph.replay()
                self._num_steps += 1
        return self._num_steps == self._shape.steps or bool(self._ended.all())

    def parts(self, num_codes: int) -> Iterator[tuple[Generated, bool]]:
        """The first sentence in parts of `num_codes`, each with whether the sentence has ended.

        A CPU generates the next part while the caller uses one. Close the iterator to stop early.
        """
        num_before, has_ended = 0, False
        with ThreadPoolExecutor(1) as worker:

            def begin() -> Callable[[], bool]:
                work = partial(self.advance, num_codes)
                return worker.submit(work).result if self._on_cpu else work

            result = begin()
            while not has_ended:
                has_ended = result()
                part = self.generated(0, num_before)
                num_before += len(part.codes)
                if not has_ended:
                    result = begin()
                yield part, has_ended

    def finish(self, advance: Advance = NO_PROGRESS.advance) -> None:
        """Generate until all sentences have ended; calls `advance` with the number that just did."""
        num_ended, is_done = int(self._ended.sum()), False
        while not is_done:
            is_done = self.advance(1 if self._graph is None else _STEPS_BETWEEN_CHECKS)
            num_more = int(self._ended.sum()) - num_ended
            if num_more:
                advance(num_more)
                num_ended += num_more

    def generated(self, row: int, start: int = 0) -> Generated:
        """The codes of a sentence so far, from `start` on; an error if its latents are not finite."""
        codes = self._codes[row, start:].cpu()
        codes = codes[codes != self._stop]
        latents = self._latents[row, start : start + len(codes)].clone()
        if not bool(latents.isfinite().all()):
            raise PipelineError(DAMAGED)
        return Generated(codes, latents)

    def step(self, num_codes: int | None = None) -> None:
        """Choose the next code of every sentence; touches only memory that stays, so it can be captured.

        `num_codes` is as in `Decoding.step`; a captured step serves any number.
        """
        codes = self._last_codes.repeat(self._num_copies)
        logits, latents = self._decoding.step(codes, self._place, num_codes)
        if self._num_copies == 2:
            logits, latents = guided(logits, self._sampling.guidance), latents.chunk(2)[0]
        logits[:, self._gpt.dims.start_code] = -torch.inf  # never a target, but barely trained models choose it
        drawn = self._draws.index_select(1, self._place).squeeze(1)
        chosen = choose(logits, self._used, self._sampling, drawn, self._vectors)
        self._last_codes.copy_(torch.where(self._ended, self._stop, chosen))
        self._used.scatter_(1, self._last_codes[:, None], True)
        self._codes.index_copy_(1, self._place, self._last_codes[:, None])
        self._latents.index_copy_(1, self._place, latents[:, None].float())
        self._place += 1
        self._ended |= (self._last_codes == self._stop) | (self._place >= self._most)

    def _reset(self, prompts: Sequence[Prompt]) -> None:
        most, drawn = torch.zeros(self._most.shape, dtype=torch.long), torch.zeros(self._draws.shape)
        for row, prompt in enumerate(prompts):
            most[row] = len(prompt.draws)
            drawn[row, : len(prompt.draws)] = prompt.draws
        self._most.copy_(most)
        self._draws.copy_(drawn)
        self._last_codes.fill_(self._gpt.dims.start_code)
        self._place.zero_()
        self._ended.copy_(most == 0)
        self._used.zero_()
        if self._sampling.penalise_prompt:
            self._used[:, [PROMPT_CODE, self._gpt.dims.start_code]] = True
        self._codes.fill_(self._stop)
        self._num_steps = 0


class CodeGenerators:
    """Makes generators for batches of any shape; on a GPU keeps the most recent ones with their CUDA graphs."""

    def __init__(
        self,
        gpt: GPT,
        vectors: Tensor | None = None,
        dtype: torch.dtype | None = torch.float32,
        *,
        capture: bool = True,
    ) -> None:
        """Converts the GPT. `vectors` [codes, dim] are the DVAE's codebook, needed for central codes."""
        convert(gpt, dtype or usual_dtype(gpt.mel_embedding.weight.device))
        self.gpt, device = gpt, gpt.mel_embedding.weight.device
        self.has_codebook = vectors is not None
        self.vectors = None if vectors is None else vectors.float().contiguous()
        self.stream = Stream(device) if capture and device.type == "cuda" else None
        self._kept: OrderedDict[tuple[Shape, Sampling], CodeGenerator] = OrderedDict()

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> CodeGenerator:
        """A generator that has run the prompts; the caller may use it until the next call."""
        longest = max(len(prompt.ids) for prompt in prompts), max(len(prompt.draws) for prompt in prompts)
        shape = Shape(len(prompts), *longest)
        if self.stream is not None:
            shape = captured_shape(self.gpt.dims, shape)
        generator = self._kept.pop((shape, sampling), None)
        if generator is None:
            generator = CodeGenerator(self.gpt, shape, sampling, self.stream, self.vectors)
        if self.stream is not None:
            self._kept[shape, sampling] = generator
            self._drop_oldest(allocatable_bytes(self.stream.device))
        generator.begin(prompts)
        return generator

    def _drop_oldest(self, free_bytes: int) -> None:
        """Drop all but the newest shape until the kept ones take at most their share of the memory."""
        num_bytes = [generator.num_bytes for generator in self._kept.values()]
        most = KEPT_SHARE * (free_bytes + sum(num_bytes))
        while len(self._kept) > 1 and sum(num_bytes) > most:
            self._kept.popitem(last=False)
            num_bytes.pop(0)

    def drop_all(self) -> bool:
        """Free the memory of all kept shapes; True if there were any."""
        had_any = bool(self._kept)
        self._kept.clear()
        release_memory()
        return had_any
