"""Slots of the key-value cache in which sentences are generated side by side: they join and leave between steps.

A sentence has a row with its own position, sampling options and random numbers; with guidance a second row follows
it, without text. No sentence depends on the others, except for rounding on a GPU. All memory is allocated once.

On a GPU the host runs ahead: `step` launches some steps and then reads what the steps before them chose; prefixes
run on a stream of their own meanwhile, several together; steps have a higher priority. A step needs nothing from
the host, so it is captured as a CUDA graph, one for each of some sizes. This module knows neither text nor audio,
and no requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from myxtts.config import CONDITIONING_TOKENS
from myxtts.devices import WARM_UPS, CudaGraph, Event, Stream, send
from myxtts.errors import PipelineError
from myxtts.model.blocks import InOutLinear
from myxtts.model.gpt import GPT
from myxtts.synthesis.generation import (
    DAMAGED,
    OPTIONS,
    PROMPT_CODE,
    Decoding,
    FusedBlocks,
    Generated,
    Prompt,
    RowSampling,
    Sampling,
    Shape,
    choose,
    options_of,
    rounded_up,
)

PREFILL_TOKENS, GPU_PREFILL_TOKENS = 64, 128
"""Of a prefix that run at a time. On a CPU those who speak wait for them; a GPU takes hardly longer for the most
prefixes as a whole."""
LEAST_ROWS = 4  # of a float32 product on a CPU: with fewer it takes another kernel, which rounds differently
PREFIXES = (1, 2, 4, 8)  # that begin together on a GPU
CAPTURED_ROWS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 68, 72, 80, 88, 96, 104, 112, 120, 128)
"""Of steps that are captured ahead. With few sizes, one more sentence would make the step of all much longer."""
CAPTURED_SLOTS = (128, 192, 224, 256, 384, 512)
"""That attention covers then; another graph covers all. Fused blocks read what each row has filled in any case."""
FEW_ROWS, MET_ROWS, MET_SLOTS = 16, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128), (256, 384, 512)
"""Of steps that are captured when they are met, and slots for few rows, whose attention takes little time."""
FUSES = True  # blocks of the GPT into fewer kernels, on a GPU
COMPACT = 0.85  # on a GPU sentences move to lower rows if a step then computes less than this share of the rows
CAPTURED_KEPT = 64  # of the likeliest codes that are sorted, where no `top_k` is larger
AHEAD = 1  # launches of steps that a GPU has yet to compute while those before them are read
GPU_BEGINS = 4  # sentences that begin together on a GPU
BEGIN = 4  # numbers of a sentence that begins, before its options: row, slot, codes, if the prompt counts as used
NEWS = 4  # numbers of a row that are read after a step: codes so far, if it ended, if it is finite, the last code


@dataclass(eq=False)
class Running:
    """A sentence in its slots."""

    rows: list[int]  # with guidance the second one is without text
    sampling: Sampling
    prompt: Prompt
    most: int  # codes
    codes: list[int] = field(default_factory=list)  # that were read so far
    has_ended: bool = False
    is_ready: bool = False  # its prefixes have run: it takes part in steps
    is_damaged: bool = False  # a latent is not finite
    num_launched: int = 0  # steps, of which some may not have been read yet
    parts: list[_Part] = field(default_factory=list)  # of the prefixes, kept until all have run
    num_parts_run: int = 0
    ran: Event | None = None  # the end of the prefixes, on a stream of their own

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest prefix."""
        return CONDITIONING_TOKENS + len(self.prompt.ids) + 2

    @property
    def num_slots(self) -> int:
        """Slots of its prefix, and of the codes of all steps that were launched."""
        return self.num_tokens + self.num_launched

    @property
    def is_clean(self) -> bool:
        """True if nothing it has written can be NaN."""
        return bool(self.codes) and not self.is_damaged


class _Part(NamedTuple):
    """Some tokens of a prefix: the voice, then the text."""

    row: int
    first: int  # slot
    end: int
    ids: Sequence[int]  # of the whole text
    voice: Tensor


class _Launched(NamedTuple):
    """Steps whose results are on their way to the host."""

    news: Tensor  # [steps, rows, NEWS], on the host
    passed: Event
    running: list[tuple[Running, int]]  # with the row that each had


class _Size(NamedTuple):
    """What the work of a step depends on."""

    rows: int
    slots: int  # that attention covers
    most_kept: int
    any_central: bool


class Slots:
    """Generates sentences side by side. Belongs to one thread, which always uses the same stream."""

    def __init__(self, gpt: GPT, shape: Shape, vectors: Tensor | None, *, capture: bool = False) -> None:
        """`shape.sentences` is the number of slots. With `capture`, steps are captured on a GPU when first met."""
        self.gpt, self._vectors, self.shape = gpt, vectors, shape
        device, plain = gpt.mel_embedding.weight.device, InOutLinear
        is_plain = device.type == "cpu" and any(isinstance(layer, plain) for layer in gpt.gpt.modules())
        self._least_rows = LEAST_ROWS if is_plain else 1
        rows, columns = max(shape.sentences, self._least_rows), shape.steps + 1
        self.num_slots, self._num_rows, self._device = shape.sentences, rows, device
        self._decoding = Decoding(gpt, shape._replace(sentences=rows))
        self._unused = len(self._decoding.slots) - 1  # the slot that rows without a sentence write to

        def numbers(*size: int, value: int = 0) -> Tensor:
            return torch.full((rows, *size), value, dtype=torch.long, device=device)

        self._last_codes, self._place, self._most = numbers(), numbers(), numbers()
        self._ended, self._news = numbers(value=1).bool(), numbers(NEWS)
        self._used = numbers(gpt.dims.audio_tokens).bool()
        self._draws, self._latents = numbers(columns).float(), numbers(columns, gpt.dims.dim).float()
        self._sum = numbers().float()  # of the latents: not finite if one of them is not
        self._options = torch.ones(rows, len(OPTIONS), device=device)
        self._pairs = numbers(2)  # the row that chooses the code, and the one without text
        self._state = [self._last_codes, self._place, self._most, self._ended, self._used]
        self._state += [self._draws, self._latents, self._sum, self._options, self._decoding.starts]
        self._of_row: list[Running | None] = [None] * rows
        self._all: list[Running] = []
        self._pairs_sent: list[list[int]] = []
        self._launched = deque[_Launched]()
        self._graphs: dict[_Size, CudaGraph[None]] = {}
        self._covering: dict[_Size, _Size] = {}  # of sizes that were met, the captured one that serves them
        self._is_captured = False  # ahead, for all sizes
        self._stream = Stream(device, high_priority=True) if capture and device.type == "cuda" else None
        self._runs_ahead = device.type == "cuda"
        self._prefixes: _CapturedPrefixes | None = None
        self._begins: CudaGraph[None] | None = None
        self._is_cleared = True  # since the last prefixes: the next ones must not overtake it
        self._moved = Event(device)  # the last move of a row: who reads on another stream must not overtake it
        width = BEGIN + len(OPTIONS) + columns
        self._given = torch.zeros(GPU_BEGINS, width, device=device)  # of sentences that begin
        for row in range(rows):
            self._clear(row)

    @staticmethod
    def bytes_of(gpt: GPT, shape: Shape) -> int:
        """Memory of one slot, nearly exact."""
        dims, like = gpt.dims, gpt.mel_embedding.weight
        cache = 2 * dims.layers * dims.dim * Decoding.num_slots(shape) * like.element_size()
        return cache + (shape.steps + 1) * (4 * dims.dim + 4) + dims.audio_tokens

    @property
    def num_used(self) -> int:
        return sum(running is not None for running in self._of_row)

    @property
    def num_bytes(self) -> int:
        return 2 * self._decoding.keys.nbytes + sum(each.nbytes for each in self._state)

    @property
    def joining(self) -> list[Running]:
        """Sentences with prefixes that have yet to run."""
        return [running for running in self._all if running.num_parts_run < len(running.parts)]

    @torch.inference_mode()
    def join(self, prompt: Prompt, sampling: Sampling) -> Running:
        """Give a sentence its slots, of which enough must be free; `prefill` runs its prefixes."""
        rows = [row for row, running in enumerate(self._of_row) if running is None][: slots_of(sampling)]
        running = Running(rows, sampling, prompt, len(prompt.draws))
        size = PREFILL_TOKENS if self._stream is None else GPU_PREFILL_TOKENS
        for row, ids in zip(rows, (prompt.ids, ()), strict=False):
            end = CONDITIONING_TOKENS + len(ids) + 2
            spans = [(at, min(at + size, end)) for at in range(0, end, size)]
            running.parts += [_Part(row, *span, ids, prompt.voice) for span in spans]
            self._of_row[row] = running
        self._all.append(running)
        return running

    @torch.inference_mode()
    def prefill(self, *some: Running) -> None:
        """Run a part of each prefix; after the last one a sentence takes part in steps, on a GPU later."""
        if self._prefixes is None and self._stream is not None:
            self._prefixes = _CapturedPrefixes(self._decoding)
        parts = [running.parts[running.num_parts_run] for running in some]
        passed = None
        if self._prefixes is not None:
            passed, self._is_cleared = self._prefixes.run(parts, waits=self._is_cleared), False
        for running, part in zip(some, parts, strict=True):
            if passed is None:
                ids, row = (torch.tensor([*each]).long().to(self._device) for each in (part.ids, [part.row]))
                x = self._decoding.prefix(part.voice.to(self._device), ids)[part.first : part.end]
                slots = self._decoding.slots[part.first : part.end]
                self._decoding.extend(x, row, slots, rounded_up(part.end))
            running.num_parts_run += 1
            if running.num_parts_run == len(running.parts):
                running.ran = passed
                if passed is None:
                    self._start([running])

    def _start(self, some: list[Running]) -> None:
        """Let sentences whose prefixes have run take part in steps."""
        rows, codes = [], self.gpt.dims.audio_tokens
        for running in some:
            options, drawn = options_of(running.sampling, codes), running.prompt.draws
            for row, num_ids in zip(running.rows, (len(running.prompt.ids), 0), strict=False):
                numbers = (row, CONDITIONING_TOKENS + num_ids + 2, len(drawn), running.sampling.penalise_prompt)
                rows.append((*numbers, *options, *drawn.tolist()))
            running.is_ready, running.ran, running.num_parts_run = True, None, 0
            running.parts.clear()
        for at in range(0, len(rows), GPU_BEGINS):
            # Where there are fewer, the last one is written several times.
            here = np.zeros(self._given.shape, np.float32)
            for place, row_numbers in zip(here, rows[at : at + GPU_BEGINS] + rows[-1:] * GPU_BEGINS, strict=False):
                place[: len(row_numbers)] = row_numbers
            send(self._given, torch.from_numpy(here))
            if self._stream is None:
                self._begin()
                continue
            if self._begins is None:  # what runs before the capture changes nothing more
                self._begins = CudaGraph(self._begin, self._stream)
            self._begins.replay()

    def _begin(self) -> None:
        """Write the state of rows that begin. Needs nothing from the host, so it can be captured."""
        numbers, options, drawn = self._given.tensor_split([BEGIN, BEGIN + len(OPTIONS)], 1)
        rows, starts, most, penalises = numbers.long().unbind(1)
        used = self._used.new_zeros(len(rows), self._used.shape[1])
        used[:, PROMPT_CODE] = used[:, self.gpt.dims.start_code] = penalises > 0
        for there, value in ((self._place, 0), (self._sum, 0), (self._ended, False)):
            there.index_fill_(0, rows, value)
        self._last_codes.index_fill_(0, rows, self.gpt.dims.start_code)
        state = (self._most, self._decoding.starts, self._used, self._options, self._draws)
        for there, values in zip(state, (most, starts, used, options, drawn), strict=True):
            there.index_copy_(0, rows, values)

    @torch.inference_mode()
    def leave(self, running: Running) -> None:
        """Free the slots of a sentence at any time."""
        if self._prefixes is not None and not running.is_ready:
            self._prefixes.wait()
        for row in running.rows:
            self._of_row[row] = None
            if not (running.has_ended and running.is_clean and len(running.rows) == 1):
                self._clear(row, running)
        running.rows = []
        self._all.remove(running)

    @torch.inference_mode()
    def step(self, num_steps: int = 1) -> list[Running] | None:
        """Choose the next codes of all sentences that are ready; returns those whose codes were read, which is
        one call later on a GPU. None if there is nothing to do.
        """
        is_idle = not self._launched
        self._start_those_that_can(waits=is_idle)
        ready = [each for each in self._all if each.is_ready and each.num_launched < each.most]
        if not ready and is_idle:
            return None
        if ready:
            self._compact()
            for each in ready:
                each.num_launched = min(each.num_launched + num_steps, each.most)
            self._launch(ready, num_steps)
        most = AHEAD if self._runs_ahead and ready else 0
        return self._read(self._launched.popleft()) if len(self._launched) > most else []

    def generated(self, running: Running, start: int, end: int) -> Generated:
        """Some of the codes that were read of a sentence; an error if its latents are not finite."""
        if running.is_damaged:
            raise PipelineError(DAMAGED)
        Stream.current(self._device).wait(self._moved)
        return Generated(
            torch.tensor(running.codes[start:end], dtype=torch.long),
            self._latents[running.rows[0], start:end].clone(),
        )

    def _start_those_that_can(self, *, waits: bool) -> None:
        """Let sentences take part whose prefixes have run; wait for them if there is nothing else to do."""
        is_idle = waits and not any(each.is_ready for each in self._all)
        some = [each for each in self._all if each.ran is not None and (is_idle or each.ran.is_passed)]
        for passed in {each.ran for each in some if each.ran is not None}:
            Stream.current(self._device).wait(passed)
        self._start(some)

    def _launch(self, ready: list[Running], num_steps: int) -> None:
        highest = max(row for row, running in enumerate(self._of_row) if running) + 1
        num_slots = max(each.num_slots for each in ready)
        size = self._size(highest, rounded_up(num_slots))
        self._set_pairs()
        if self._stream is not None and size not in self._graphs:
            self._capture(size)
        on_gpu, passed = self._device.type == "cuda", Event(self._device)
        news = torch.empty(num_steps, highest, NEWS, dtype=torch.long, pin_memory=on_gpu)
        for step in range(num_steps):
            if graph := self._graphs.get(size):
                graph.replay()
            else:
                self._step(size)
            news[step].copy_(self._news[:highest], non_blocking=True)
        Stream.current(self._device).record(passed)
        self._launched.append(_Launched(news, passed, [(each, each.rows[0]) for each in ready]))

    def _read(self, launched: _Launched) -> list[Running]:
        """The sentences of these steps that are still there, with their new codes."""
        launched.passed.wait_on_host()
        found = [(running, row) for running, row in launched.running if running.rows and not running.has_ended]
        for news in launched.news.tolist():
            for running, row in found:
                num_codes, has_ended, is_finite, code = news[row]
                if num_codes > len(running.codes):
                    running.codes.append(code)
                running.has_ended, running.is_damaged = has_ended == 1, is_finite == 0
        return [running for running, _ in found]

    def _step(self, size: _Size) -> None:
        """Touches only memory that stays and needs nothing from the host, so it can be captured."""
        rows = size.rows
        place, ended, stop = self._place[:rows], self._ended[:rows], self.gpt.dims.stop_code
        starts = self._decoding.starts[:rows]
        logits, latents = self._decoding.step(self._last_codes[:rows], place.masked_fill(ended, 0), size.slots)
        options, (leader, other) = self._options[:rows], self._pairs[:rows].unbind(1)
        without = logits[other]
        logits = without + options[:, OPTIONS.index("guidance"), None] * (logits - without)
        logits[:, self.gpt.dims.start_code] = -torch.inf  # never a target, but barely trained models choose it
        drawn = self._draws[:rows].gather(1, place[:, None]).squeeze(1)
        sampling = RowSampling(options, size.most_kept, size.any_central)
        chosen = choose(logits, self._used[:rows], sampling, drawn, self._vectors)[leader]
        codes = torch.where(ended, self._last_codes[:rows], chosen)
        self._last_codes[:rows] = codes
        self._used[:rows].scatter_(1, codes[:, None], True)
        column = torch.where(ended, self._latents.shape[1] - 1, place)  # the last column is never read
        numbers, latents = self._decoding.rows[:rows], latents.float()
        self._latents.index_put_((numbers, column), latents)
        self._sum[:rows] += torch.where(ended, 0, latents.sum(-1))
        place += ~ended
        stopped = codes == stop
        ended |= stopped | (place >= self._most[:rows])
        starts.masked_fill_(ended, self._unused)  # a sentence writes nothing after its end
        num_codes = place - stopped.long()
        news = [num_codes, ended.long(), self._sum[:rows].isfinite().long(), codes]
        self._news[:rows] = torch.stack(news, 1)

    def _set_pairs(self) -> None:
        pairs = [[row, row] for row in range(self._num_rows)]
        for running in self._all:
            pairs[running.rows[-1]][0] = running.rows[0]
            pairs[running.rows[0]][1] = running.rows[-1]
        if pairs != self._pairs_sent:
            send(self._pairs, torch.tensor(pairs))
            self._pairs_sent = pairs

    @torch.inference_mode()
    def _clear(self, row: int, running: Running | None = None) -> None:
        """Let a row write to the slot that is never read; nothing of its sentence stays that could be NaN."""
        self._ended[row], self._place[row], self._decoding.starts[row] = True, 0, self._unused
        self._is_cleared = True
        if running is not None and running.is_clean and self._device.type == "cpu":
            return
        # Steps that still run write to the slot after the last code.
        used = running.num_slots + 1 if running is not None and running.is_clean else self._unused + 1
        for cache in (self._decoding.keys, self._decoding.values):
            cache[:, row, :, :used] = 0

    def _compact(self) -> None:
        """Move sentences to lower rows where a step then computes fewer of them."""
        share = 1 if self._stream is None else COMPACT
        while None in self._of_row[: self.num_used]:
            last = max(row for row, running in enumerate(self._of_row) if running is not None)
            if share * self._row_count(last + 1) <= self._row_count(self.num_used):
                return
            moved = self._of_row[last]
            assert moved is not None
            if not moved.is_ready:  # its prefixes are written where it is
                return
            self._move(moved, last, self._of_row.index(None))

    def _move(self, running: Running, source: int, target: int) -> None:
        used = rounded_up(running.num_slots)
        cache = [each.transpose(0, 1)[:, :, :, :used] for each in (self._decoding.keys, self._decoding.values)]
        for each in (*self._state, *cache):
            each[target] = each[source]
        running.rows[running.rows.index(source)] = target
        self._of_row[target], self._of_row[source] = running, None
        self._clear(source, running)
        Stream.current(self._device).record(self._moved)

    # Sizes of steps, of which each is captured once

    def _row_count(self, rows: int) -> int:
        """The number of rows of a step with at least so many."""
        if self._stream is None:
            return max(rows, self._least_rows)
        counts = CAPTURED_ROWS if self._is_captured else MET_ROWS
        return next((count for count in _up_to(counts, self._num_rows) if count >= rows), rows)

    def _size(self, rows: int, slots: int) -> _Size:
        codes = self.gpt.dims.audio_tokens
        samplings = [running.sampling for running in self._all]
        most_kept = max(min(each.top_k or codes, codes) for each in samplings)
        any_central = any(each.central for each in samplings)
        if self._stream is None:
            return _Size(self._row_count(rows), slots, most_kept, any_central)
        most_kept = codes if most_kept > CAPTURED_KEPT else min(codes, CAPTURED_KEPT)
        met = _Size(rows, slots, most_kept, any_central)
        if met not in self._covering:
            fitting = [size for size in self._graphs if all(a >= b for a, b in zip(size, met, strict=True))]
            if not (self._is_captured and fitting):
                slots = next(count for count in self._slot_counts(MET_SLOTS) if count >= slots)
                return met._replace(rows=self._row_count(rows), slots=slots)
            self._covering[met] = min(fitting)
        return self._covering[met]

    def capture(self, sampling: Sampling) -> None:
        """Capture steps of many sizes for this sampling, and of a few for any other: none is captured later.

        The largest come first: others fit into their memory.
        """
        if self._stream is None:
            return
        if FUSES:
            Stream.current(self._device).finish()
            with self._stream.use():
                self._decoding.fused = FusedBlocks.compiled(self.gpt)
        self._set_pairs()
        codes, every_slot = self.gpt.dims.audio_tokens, self._unused + 1
        most_kept = min(codes, CAPTURED_KEPT) if 0 < sampling.top_k <= CAPTURED_KEPT else codes
        sizes = {
            _Size(rows, every_slot, codes, self._vectors is not None) for rows in self._rows_up_to(MET_ROWS[::2])
        }
        for rows in self._rows_up_to(CAPTURED_ROWS):
            for slots in self._slot_counts(MET_SLOTS[::2] if rows <= FEW_ROWS else CAPTURED_SLOTS):
                sizes.add(_Size(rows, slots, most_kept, sampling.central))
        for size in sorted(sizes, reverse=True):
            self._capture(size)
        self._prefixes = _CapturedPrefixes(self._decoding)
        self._begins = CudaGraph(self._begin, self._stream)
        self._clear(0)  # the capture has let it begin
        self._is_captured = True

    def _slot_counts(self, counts: tuple[int, ...]) -> Iterator[int]:
        return _up_to(() if self._decoding.fused else counts, self._unused + 1)

    def _rows_up_to(self, counts: tuple[int, ...]) -> Iterator[int]:
        return _up_to(counts, self._num_rows)

    @torch.inference_mode()
    def _capture(self, size: _Size) -> None:
        """Capture a step while no row takes part in it: the warm-ups change nothing that is read."""
        assert self._stream is not None
        kept = [(each, each.clone()) for each in (self._ended, self._place, self._decoding.starts)]
        self._ended.fill_(True)
        self._place.zero_()
        self._decoding.starts.fill_(self._unused)
        pool = next((graph.pool for graph in self._graphs.values()), None)
        warm_ups = 1 if self._graphs else WARM_UPS
        self._graphs[size] = CudaGraph(partial(self._step, size), self._stream, pool, warm_ups=warm_ups)
        for each, before in kept:
            each.copy_(before)


class _CapturedPrefixes:
    """Runs parts of prefixes on a stream of their own, while steps go on."""

    @torch.inference_mode()
    def __init__(self, decoding: Decoding) -> None:
        device, unused, most = decoding.slots.device, len(decoding.slots) - 1, PREFIXES[-1]
        self._unused, self._device, self._stream = unused, device, Stream(device)
        self._decoding = decoding
        self._voices = torch.zeros(most, CONDITIONING_TOKENS, decoding.model.dims.dim, device=device)
        # Of each part the row, then its tokens' slots, ids and places in the text.
        self._numbers = torch.zeros(most, 1 + 3 * GPU_PREFILL_TOKENS, dtype=torch.long, device=device)
        self._numbers[:, 1 : 1 + GPU_PREFILL_TOKENS] = unused
        self._begins: dict[int, CudaGraph[Tensor]] = {}
        for count in reversed(PREFIXES):
            self._begins[count] = CudaGraph(partial(self._begin, count), self._stream, self._pool)
        self._extends = CudaGraph(self._extend, self._stream, self._pool)

    def _inputs(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, slots and x of parts, as the first block reads it where it is text."""
        ends, model = [1 + part * GPU_PREFILL_TOKENS for part in range(3)], self._decoding.model
        rows, slots, ids, places = self._numbers[:count].tensor_split(ends, 1)
        return rows[:, 0], slots, model.text_embedding(ids) + model.text_pos_embedding.emb(places)

    def _begin(self, count: int) -> Tensor:
        rows, slots, x = self._inputs(count)
        x = torch.cat([self._voices[:count].to(x.dtype), x[:, CONDITIONING_TOKENS:]], 1)
        return self._decoding.begin(x, rows, slots)

    def _extend(self) -> Tensor:
        rows, slots, x = self._inputs(1)
        return self._decoding.extend(x[0], rows, slots[0])

    @property
    def _pool(self) -> Any:
        return next((graph.pool for graph in self._begins.values()), None)

    def run(self, parts: list[_Part], *, waits: bool) -> Event:
        """Launch parts of different sentences; `waits` for what was launched on the current stream."""
        begun, passed = Event(self._device), Event(self._device)
        if waits:
            Stream.current(self._device).record(begun)
            self._stream.wait(begun)
        first = [part for part in parts if not part.first]
        with self._stream.use():
            for at in range(0, len(first), PREFIXES[-1]):
                some = first[at : at + PREFIXES[-1]]
                self._send(some)
                send(self._voices[: len(some)], torch.cat([part.voice for part in some]))
                self._begins[next(count for count in PREFIXES if count >= len(some))].replay()
            for part in parts:
                if part.first:
                    self._send([part])
                    self._extends.replay()
            self._stream.record(passed)
        return passed

    def _send(self, parts: list[_Part]) -> None:
        # What follows a part is written where nothing is read.
        dims, size = self._decoding.model.dims, GPU_PREFILL_TOKENS
        numbers = np.zeros(self._numbers.shape, np.int64)
        numbers[:, 1 : 1 + size] = self._unused
        for row, part in zip(numbers, parts, strict=False):
            places = np.arange(part.first, part.end)
            ids = [0] * CONDITIONING_TOKENS + [dims.start_text, *part.ids, dims.stop_text]
            row[0] = part.row
            slots, tokens, of_text = (row[at : at + len(places)] for at in (1, 1 + size, 1 + 2 * size))
            slots[:], tokens[:] = places, ids[part.first : part.end]
            of_text[:] = (places - CONDITIONING_TOKENS).clip(0)
        send(self._numbers, torch.from_numpy(numbers))

    def wait(self) -> None:
        """Let the current stream wait for what was launched."""
        passed = Event(self._device)
        self._stream.record(passed)
        Stream.current(self._device).wait(passed)


def _up_to(counts: tuple[int, ...], most: int) -> Iterator[int]:
    """The counts below `most`, and `most`."""
    yield from (count for count in counts if count < most)
    yield most


def slots_of(sampling: Sampling) -> int:
    """Slots that a sentence takes."""
    return 1 if sampling.guidance == 1 else 2
