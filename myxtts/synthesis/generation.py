"""Codes of a batch of sentences, written step by step into memory of fixed shape.

Every sentence has its own random numbers, drawn on the host before it begins, and its own limit: what it says
depends neither on the sentences beside it nor on the device, save for the rounding of the arithmetic. A step reads
and writes the same memory each time and asks nothing of the host, so on a GPU it is captured once for each shape
and started with one launch. Knows neither text nor sound.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from myxtts.config import CONDITIONING_TOKENS
from myxtts.devices import CudaGraph, Stream
from myxtts.errors import Progress
from myxtts.model.gpt import GPT, PaddedTokens

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Bars:
    """The bars of some of the sentences of a speech, one after the other."""

    progress: Progress
    total: int
    """Sentences of the whole speech."""
    num_before: int = 0
    """Sentences that are done and not among these."""

    @contextmanager
    def bar(self, title: str, num_done: int = 0) -> Iterator[Advance]:
        """A bar at `num_done` of these sentences, and what moves it."""
        self.progress.begin(title, self.total)
        try:
            self.progress.advance(self.num_before + num_done)
            yield self.progress.advance
        finally:
            self.progress.end()


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
        token = PaddedTokens(ids, num_ids, dims.start_text, dims.stop_text, 1).token(
            sentences[:, None], places - 1
        )
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
        codes = torch.where(ended, dims.stop_code, choose_by_logits(logits, spoken, sampling, generator))
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


def choose_by_logits(
    logits: Tensor, spoken: Tensor, sampling: Sampling, generator: torch.Generator | None
) -> Tensor:
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


KEPT_WRITERS = 6
"""Shapes whose memory and graph stay on the GPU."""
SHORTER_SHAPES = ((62, 192), (126, 448))
"""Ids and steps of captured shapes, for about 40 and 115 characters; the third is all that the GPT has positions
for. Attention takes time for every slot, used or not, but every further shape would be captured while a listener
waits. With START and STOP the ids are round numbers, which attention likes."""

"""On a GPU: asking whether all sentences have ended waits for the device."""

"""What the reference writes for every position of the prompt where it counts repetitions."""


class Draft(NamedTuple):
    """A sentence to be written."""

    ids: Sequence[int]
    voice: Tensor
    """[1, 32, dim]"""
    most: int
    """It ends after so many codes, whatever the model says."""
    draws: Tensor
    """float32 [most], each in [0, 1): one random number for each code."""


class Shape(NamedTuple):
    sentences: int
    ids: int
    steps: int


class Written(NamedTuple):
    """What a sentence has so far, or a part of it."""

    codes: Tensor
    """[codes], on the host"""
    latents: Tensor
    """float32 [codes, dim], on the device"""


def draws(seed: int, sentence: int, attempt: int, num_codes: int) -> Tensor:
    """Random numbers of one attempt at one sentence of a text."""
    name = f"{seed} {sentence} {attempt}".encode()
    number = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
    return torch.rand(num_codes, generator=torch.Generator().manual_seed(number))


def choose(
    logits: Tensor, spoken: Tensor, sampling: Sampling, drawn: Tensor, vectors: Tensor | None = None
) -> Tensor:
    """One code for each row of logits [sentences, codes], by the random numbers `drawn` [sentences].

    The same distribution as `generation.choose`, whose draw depends on the whole batch. `vectors` [codes, dim] are
    what the codes stand for, to find the central one.
    """
    if sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        logits = torch.where(spoken, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    if sampling.greedy:
        return logits.argmax(-1)
    logits, order = (logits / sampling.temperature).sort(stable=True, dim=-1, descending=True)
    if 0 < sampling.top_k < logits.shape[-1]:
        logits[:, sampling.top_k :] = -torch.inf
    probabilities = logits.softmax(-1)
    reached = probabilities.cumsum(-1)
    inside = reached - probabilities < sampling.top_p
    inside[:, 0] = True
    total = torch.where(inside, probabilities, 0).sum(-1)
    # Below the total even when rounded, so that the code found is one of those inside.
    passed = (reached <= (drawn * total * (1 - 1e-6))[:, None]) & inside
    place = torch.minimum(passed.sum(-1), inside.sum(-1) - 1)
    chosen = order.gather(-1, place[:, None]).squeeze(-1)
    if sampling.central:
        assert vectors is not None, "the central code is found by what codes stand for"
        likely = torch.zeros_like(logits).scatter(-1, order, torch.where(inside, probabilities, 0))
        likely = likely[:, : len(vectors)]
        mean = (likely @ vectors) / likely.sum(-1, keepdim=True)
        central = (vectors.square().sum(-1) - 2 * mean @ vectors.t()).argmin(-1)
        chosen = torch.where(chosen < len(vectors), central, chosen)
    return chosen


def guided(logits: Tensor, guidance: float) -> Tensor:
    """Logits [sentences, codes] that lean on the text; given those with it, and below them those without."""
    with_text, without = logits.chunk(2)
    return without + guidance * (with_text - without)


class Writer:
    """The state of one batch. With a stream, a step is captured and the memory is used for batch after batch."""

    def __init__(
        self,
        gpt: GPT,
        shape: Shape,
        sampling: Sampling,
        device: torch.device,
        stream: Stream | None = None,
        vectors: Tensor | None = None,
    ) -> None:
        self.shape = shape
        self._vectors = vectors
        self._gpt, self._sampling, self._stream = gpt, sampling, stream
        self._ways = 1 if sampling.guidance == 1 else 2
        """In which every sentence is decoded: with its text, and without."""
        rows, steps = shape.sentences, shape.steps
        self._stop = gpt.dims.stop_code
        self._codes = torch.zeros(rows, dtype=torch.long, device=device)
        self._place = torch.zeros(1, dtype=torch.long, device=device)
        self._ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self._most = torch.zeros(rows, dtype=torch.long, device=device)
        self._spoken = torch.zeros(rows, gpt.dims.audio_tokens, dtype=torch.bool, device=device)
        self._draws = torch.zeros(rows, steps, device=device)
        self._written = torch.zeros(rows, steps, dtype=torch.long, device=device)
        self._latents = torch.zeros(rows, steps, gpt.dims.dim, device=device)
        self._decoding: Decoding | None = None
        self._graph: CudaGraph[None] | None = None
        self._num_steps = 0

    @torch.no_grad()
    def begin(self, drafts: Sequence[Draft]) -> None:
        """Read the voices and texts of a batch; rows that it does not use count as ended."""
        device = self._codes.device
        ids = torch.zeros(self.shape.sentences, self.shape.ids, dtype=torch.long)
        num_ids = torch.zeros(self.shape.sentences, dtype=torch.long)
        for row, draft in enumerate(drafts):
            ids[row, : len(draft.ids)] = torch.tensor(draft.ids)
            num_ids[row] = len(draft.ids)
        voices = [draft.voice for draft in drafts]
        voices += voices[:1] * (self.shape.sentences - len(drafts))
        if self._ways == 2:
            voices, ids, num_ids = voices * 2, ids.repeat(2, 1), torch.cat([num_ids, torch.zeros_like(num_ids)])
        prefixes = torch.cat(voices).to(device), ids.to(device), num_ids.to(device)
        if self._decoding is None:
            self._decoding = Decoding(self._gpt, *prefixes, self.shape.steps)
        else:
            self._decoding.read(*prefixes)
        self._reset(drafts)
        if self._stream is not None and self._graph is None:
            self._graph = CudaGraph(self._step, self._stream)
            self._reset(drafts)  # the warm-ups have written

    @torch.no_grad()
    def advance(self, num_steps: int) -> bool:
        """So many more steps, or fewer when that is all there is room for; whether all sentences have ended."""
        for _ in range(min(num_steps, self.shape.steps - self._num_steps)):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
            self._num_steps += 1
        return self._num_steps == self.shape.steps or bool(self._ended.all())

    def finish(self, sentences_ended: Advance | None = None) -> None:
        """All steps there are to make; `sentences_ended` hears how many sentences end, as they do."""
        ended = self.num_ended
        has_ended = False
        while not has_ended:
            has_ended = self.advance(1 if self._graph is None else _STEPS_BETWEEN_LOOKS)
            if sentences_ended is not None and (now := self.num_ended) > ended:
                sentences_ended(now - ended)
                ended = now

    @property
    def num_ended(self) -> int:
        """Rows that have ended, those that are not used among them."""
        return int(self._ended.sum())

    def written(self, row: int, start: int = 0) -> Written:
        """The codes of a sentence from `start` on, as far as they have been written."""
        codes = self._written[row, start : self._num_steps].cpu()
        codes = codes[codes != self._stop]
        return Written(codes, self._latents[row, start : start + len(codes)].clone())

    def _step(self) -> None:
        """The next code of every sentence; touches only memory that stays."""
        assert self._decoding is not None
        logits, latents = self._decoding.step(self._codes.repeat(self._ways), self._place)
        if self._ways == 2:
            logits, latents = guided(logits, self._sampling.guidance), latents.chunk(2)[0]
        logits[:, self._gpt.dims.start_code] = -torch.inf  # never a target, but little trained models try it
        drawn = self._draws.index_select(1, self._place).squeeze(1)
        chosen = choose(logits, self._spoken, self._sampling, drawn, self._vectors)
        self._codes.copy_(torch.where(self._ended, self._stop, chosen))
        self._spoken.scatter_(1, self._codes[:, None], True)
        self._written.index_copy_(1, self._place, self._codes[:, None])
        self._latents.index_copy_(1, self._place, latents[:, None].float())
        self._place += 1
        self._ended |= (self._codes == self._stop) | (self._place >= self._most)

    def _reset(self, drafts: Sequence[Draft]) -> None:
        rows, steps = self.shape.sentences, self.shape.steps
        most, drawn = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, steps)
        for row, draft in enumerate(drafts):
            most[row] = draft.most
            drawn[row, : draft.most] = draft.draws
        self._most.copy_(most)
        self._draws.copy_(drawn)
        self._codes.fill_(self._gpt.dims.start_code)
        self._place.zero_()
        self._ended.copy_(most == 0)
        self._spoken.zero_()
        if self._sampling.penalise_prompt:
            self._spoken[:, [_PROMPT_CODE, self._gpt.dims.start_code]] = True
        self._written.fill_(self._stop)
        self._num_steps = 0


def round_stack(gpt: GPT, dtype: torch.dtype) -> None:
    """Round everything that runs once for each code; what hears the reference keeps its precision."""
    for module in (gpt.gpt, gpt.final_norm, gpt.mel_head, gpt.mel_embedding, gpt.text_embedding):
        module.to(dtype)
    for positions in (gpt.mel_pos_embedding, gpt.text_pos_embedding):
        positions.to(dtype)


class Writers:
    """Writers for whatever batches come; on a GPU those of the latest shapes are kept with their graphs."""

    def __init__(
        self, gpt: GPT, device: torch.device, vectors: Tensor | None = None, *, capture: bool = True
    ) -> None:
        """`vectors` [codes, dim] are what the codes stand for, for those who ask for central ones."""
        self._gpt, self._device = gpt, device
        self._vectors = None if vectors is None else vectors.float().contiguous()
        self._stream = Stream(device) if capture and device.type == "cuda" else None
        self._kept: OrderedDict[tuple[Shape, Sampling], Writer] = OrderedDict()

    @property
    def knows_codes(self) -> bool:
        """Whether it can find a central one."""
        return self._vectors is not None

    def begin(self, drafts: Sequence[Draft], sampling: Sampling) -> Writer:
        """A writer that has read the drafts. It is the caller's until the next call."""
        shape = self._shape(drafts)
        writer = self._kept.pop((shape, sampling), None)
        if writer is None:
            while len(self._kept) >= KEPT_WRITERS:
                self._kept.popitem(last=False)
            writer = Writer(self._gpt, shape, sampling, self._device, self._stream, self._vectors)
        if self._stream is not None:
            self._kept[shape, sampling] = writer
        writer.begin(drafts)
        return writer

    def _shape(self, drafts: Sequence[Draft]) -> Shape:
        """The smallest that fits; where shapes are captured, one of few."""
        rows = len(drafts)
        num_ids, steps = max(len(draft.ids) for draft in drafts), max(draft.most for draft in drafts)
        if self._stream is None:
            return Shape(rows, num_ids, steps)
        dims = self._gpt.dims
        shapes = (*SHORTER_SHAPES, (dims.max_text, dims.max_codes))
        ids, most = next(shape for shape in shapes if num_ids <= shape[0] and steps <= shape[1])
        return Shape(1 << (rows - 1).bit_length(), min(ids, dims.max_text), min(most, dims.max_codes))
