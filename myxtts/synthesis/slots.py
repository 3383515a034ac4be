"""Slots of the key-value cache in which sentences are generated side by side: they join and leave between steps.

A sentence has a row with its own position, sampling options and random numbers; with guidance a second row follows
it, without text. No sentence depends on the others, except for rounding on a GPU. All memory is allocated once. A
step reads nothing back, so that it can be captured as a CUDA graph, one for each of a few numbers of rows. This
module knows neither text nor audio, and no requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from myxtts.config import CONDITIONING_TOKENS
from myxtts.devices import CudaGraph, Stream
from myxtts.errors import PipelineError
from myxtts.model.blocks import InOutLinear
from myxtts.model.gpt import GPT
from myxtts.synthesis.generation import (
    DAMAGED,
    PROMPT_CODE,
    Decoding,
    Generated,
    Prompt,
    RowSampling,
    Sampling,
    Shape,
    choose,
    rounded_up,
)

PREFILL_TOKENS = 64  # of a prefix that run between two steps: those who speak wait for no more
LEAST_ROWS = 4  # of a float32 product on a CPU: with fewer it takes another kernel, which rounds differently
CAPTURED_SLOTS = (256, 512)  # that attention of a captured step covers; a third graph covers all
NUM_OPTIONS = len(fields(Sampling)) - 1  # `penalise_prompt` matters only when a sentence joins


@dataclass(eq=False)
class Running:
    """A sentence in its slots."""

    rows: list[int]  # with guidance the second one is without text
    sampling: Sampling
    lengths: list[int]  # of the prefix of each row
    parts: list[tuple[int, int, Tensor]]
    """Of the prefixes, what has not run yet: the index of the row, the slot of the first token, [tokens, dim]."""
    num_codes: int = 0
    has_ended: bool = False

    @property
    def is_ready(self) -> bool:
        """True if its prefixes have run."""
        return not self.parts


class Slots:
    """Generates sentences side by side. Belongs to one thread."""

    def __init__(self, gpt: GPT, shape: Shape, vectors: Tensor | None, stream: Stream | None = None) -> None:
        """`shape.sentences` is the number of slots. With a stream, steps are captured right away."""
        self._gpt, self._vectors, self._stream, self.num_slots = gpt, vectors, stream, shape.sentences
        self._decoding = Decoding(gpt, shape)
        self._unused = len(self._decoding.slots) - 1  # the slot that rows without a sentence write to
        device, rows, columns = self._decoding.rows.device, shape.sentences, shape.steps + 1
        is_plain = device.type == "cpu" and any(isinstance(layer, InOutLinear) for layer in gpt.gpt.modules())
        self._least_rows = min(rows, LEAST_ROWS if is_plain else 1)

        def numbers(*size: int, value: int = 0) -> Tensor:
            return torch.full((rows, *size), value, dtype=torch.long, device=device)

        self._last_codes, self._place, self._most = numbers(), numbers(), numbers()
        self._ended, self._codes = numbers(value=1).bool(), numbers(columns)
        self._used = numbers(gpt.dims.audio_tokens).bool()
        self._draws, self._latents = numbers(columns).float(), numbers(columns, gpt.dims.dim).float()
        self._options = torch.ones(rows, NUM_OPTIONS, device=device)
        self._leader, self._other = numbers(), numbers()  # the row that chooses its code, and that without text
        self._state = [self._last_codes, self._place, self._most, self._ended, self._codes, self._used]
        self._state += [self._draws, self._latents, self._options, self._decoding.starts]
        self._of_row: list[Running | None] = [None] * rows
        self._set_rows()
        for row in range(rows):
            self._clear(row)
        self._graphs: dict[tuple[int, int], CudaGraph[None]] = {}
        self._prefill_graph: CudaGraph[None] | None = None
        if stream is not None:
            self._capture()

    @staticmethod
    def bytes_of(gpt: GPT, shape: Shape) -> int:
        """Memory of one slot, nearly exact."""
        dims, like = gpt.dims, gpt.mel_embedding.weight
        cache = 2 * dims.layers * dims.dim * Decoding.num_slots(shape) * like.element_size()
        return cache + (shape.steps + 1) * (4 * dims.dim + 12) + dims.audio_tokens

    @property
    def num_used(self) -> int:
        return sum(running is not None for running in self._of_row)

    @property
    def num_bytes(self) -> int:
        return 2 * self._decoding.keys.nbytes + sum(each.nbytes for each in self._state)

    @torch.inference_mode()
    def join(self, prompt: Prompt, sampling: Sampling) -> Running:
        """Give a sentence its slots, of which enough must be free; `prefill` runs its prefixes."""
        rows = [row for row, running in enumerate(self._of_row) if running is None][: slots_of(sampling)]
        running, device = Running(rows, sampling, [], []), self._place.device
        ids, voice = torch.tensor([[*prompt.ids, 0]], device=device), prompt.voice.to(device)
        for index, num_ids in enumerate((len(prompt.ids), 0)[: len(rows)]):
            (x,) = self._decoding.embedded(voice, ids, torch.tensor([num_ids], device=device))
            x = x[: CONDITIONING_TOKENS + num_ids + 2]
            running.lengths.append(len(x))
            for first in range(0, len(x), PREFILL_TOKENS):
                running.parts.append((index, first, x[first : first + PREFILL_TOKENS]))
            self._begin(rows[index], prompt, sampling)
        for row in rows:  # at the end: a failure before leaves the slots free
            self._of_row[row] = running
        self._set_rows()
        return running

    def _begin(self, row: int, prompt: Prompt, sampling: Sampling) -> None:
        num_codes, dims = len(prompt.draws), self._gpt.dims
        self._last_codes[row], self._place[row], self._most[row] = dims.start_code, 0, num_codes
        self._codes[row] = dims.stop_code
        self._draws[row, :num_codes] = prompt.draws.to(self._draws.device)
        self._used[row] = False
        if sampling.penalise_prompt:
            self._used[row, [PROMPT_CODE, dims.start_code]] = True
        kept = min(sampling.top_k or dims.audio_tokens, dims.audio_tokens)
        options = (sampling.greedy, sampling.temperature, kept, sampling.top_p, sampling.repetition_penalty)
        self._options[row] = torch.tensor([*options, sampling.guidance, sampling.central], dtype=torch.float32)

    @torch.inference_mode()
    def prefill(self, running: Running) -> None:
        """Run a part of a prefix; after the last one the sentence takes part in steps."""
        index, first, x = running.parts.pop(0)
        row = running.rows[index]
        if self._prefill_graph is None:
            place = self._place.new_tensor([row]), self._place.new_tensor([first])
            self._decoding.extend(x, *place, rounded_up(first + len(x)))
        else:  # what follows the part is overwritten before it is read
            self._part.zero_()[: len(x)] = x
            self._part_place.copy_(torch.tensor([[row], [first]]))
            self._prefill_graph.replay()
        if running.is_ready:
            for row, length in zip(running.rows, running.lengths, strict=True):
                self._decoding.starts[row] = length
                self._ended[row] = False

    def leave(self, running: Running) -> None:
        """Free the slots of a sentence at any time; others move up, so that steps compute fewer rows."""
        for row in running.rows:
            self._of_row[row] = None
            self._clear(row)
        while None in self._of_row[: self.num_used]:
            last = max(row for row, other in enumerate(self._of_row) if other is not None)
            self._move(last, self._of_row.index(None))
        self._set_rows()

    @torch.inference_mode()
    def step(self, num_steps: int = 1) -> list[Running]:
        """Choose the next codes of all sentences that are ready, and return these sentences."""
        ready = list({id(each): each for each in self._of_row if each is not None and each.is_ready}.values())
        if not ready:
            return []
        num_used = max(max(each.lengths) + each.num_codes for each in ready) + num_steps
        size = self._size(self._highest + 1, rounded_up(num_used))
        for _ in range(num_steps):
            if graph := self._graphs.get(size):
                graph.replay()
            else:
                self._step(*size)
        stopped = self._last_codes == self._gpt.dims.stop_code
        num_codes, ended = torch.stack([self._place - (stopped & self._ended).long(), self._ended.long()]).tolist()
        for each in ready:
            each.num_codes, each.has_ended = num_codes[each.rows[0]], bool(ended[each.rows[0]])
        return ready

    def generated(self, running: Running, start: int, end: int) -> Generated:
        """Some of the codes of a sentence; an error if their latents are not finite."""
        row = running.rows[0]
        latents = self._latents[row, start:end].clone()
        if not bool(latents.isfinite().all()):
            raise PipelineError(DAMAGED)
        return Generated(self._codes[row, start:end].clone().cpu(), latents)

    def _step(self, rows: int, used: int) -> None:
        """Touches only memory that stays and needs nothing from the host, so it can be captured."""
        place, ended, stop = self._place[:rows], self._ended[:rows], self._gpt.dims.stop_code
        logits, latents = self._decoding.step(self._last_codes[:rows], place, used=used)
        options = [column[:, None] for column in self._options[:rows].unbind(1)]
        greedy, temperature, top_k, top_p, penalty, guidance, central = options
        without = logits[self._other[:rows]]
        logits = without + guidance * (logits - without)
        logits[:, self._gpt.dims.start_code] = -torch.inf  # as in `CodeGenerator.step`
        sampling = RowSampling(
            greedy > 0,
            temperature,
            top_k,
            top_p,
            penalty,
            guidance,
            central > 0,
            self._most_kept,
            self._any_central,
        )
        drawn = self._draws[:rows].gather(1, place[:, None]).squeeze(1)
        chosen = choose(logits, self._used[:rows], sampling, drawn, self._vectors)[self._leader[:rows]]
        codes = torch.where(ended, self._last_codes[:rows], chosen)
        self._last_codes[:rows] = codes
        self._used[:rows].scatter_(1, codes[:, None], True)
        column = torch.where(ended, self._codes.shape[1] - 1, place)  # the last column is never read
        numbers = self._decoding.rows[:rows]
        self._codes.index_put_((numbers, column), codes)
        self._latents.index_put_((numbers, column), latents.float())
        place += ~ended
        ended |= (codes == stop) | (place >= self._most[:rows])

    def _set_rows(self) -> None:
        """What steps need to know about the rows."""
        leader, other = list(range(self.num_slots)), list(range(self.num_slots))
        for running in filter(None, self._of_row):
            leader[running.rows[-1]] = running.rows[0]
            other[running.rows[0]] = running.rows[-1]
        self._leader.copy_(torch.tensor(leader))
        self._other.copy_(torch.tensor(other))
        samplings = [running.sampling for running in self._of_row if running]
        self._highest = max((row for row, running in enumerate(self._of_row) if running), default=0)
        if self._stream is None:
            codes = self._gpt.dims.audio_tokens
            self._most_kept = max((min(each.top_k or codes, codes) for each in samplings), default=1)
            self._any_central = any(each.central for each in samplings)

    @torch.inference_mode()
    def _clear(self, row: int) -> None:
        """Let a row write to the slot that is never read; nothing of its sentence stays, which could be NaN."""
        self._ended[row], self._place[row], self._decoding.starts[row] = True, 0, self._unused
        self._decoding.keys[:, row].zero_()
        self._decoding.values[:, row].zero_()

    @torch.inference_mode()
    def _move(self, source: int, target: int) -> None:
        running = self._of_row[source]
        assert running is not None
        for each in (*self._state, self._decoding.keys.transpose(0, 1), self._decoding.values.transpose(0, 1)):
            each[target] = each[source]
        running.rows[running.rows.index(source)] = target
        self._of_row[target], self._of_row[source] = running, None
        self._clear(source)

    # Captured steps

    def _sizes(self) -> Iterator[tuple[int, int]]:
        """Rows and slots of the steps to capture."""
        rows = 1
        while True:
            for slots in (*CAPTURED_SLOTS, self._unused + 1):
                yield min(rows, self.num_slots), min(slots, self._unused + 1)
            if rows >= self.num_slots:
                return
            rows *= 2

    def _size(self, rows: int, slots: int) -> tuple[int, int]:
        """The size of a step with at least so many rows and slots."""
        if self._stream is None:
            return max(rows, self._least_rows), slots
        return min(size for size in self._graphs if size[0] >= rows and size[1] >= slots)

    def _capture(self) -> None:
        """Capture steps and a part of a prefix, while no sentence is there that the warm-ups could change."""
        assert self._stream is not None
        self._most_kept, self._any_central = self._gpt.dims.audio_tokens, self._vectors is not None
        pool = None
        with torch.inference_mode():
            for size in sorted(set(self._sizes()), reverse=True):  # the largest first: others fit into its memory
                self._graphs[size] = CudaGraph(partial(self._step, *size), self._stream, pool)
                pool = self._graphs[size].pool
            self._part = self._latents.new_zeros(
                PREFILL_TOKENS, self._gpt.dims.dim, dtype=self._decoding.keys.dtype
            )
            self._part_place = self._place.new_zeros(2, 1)
            if self._codes.shape[1] > PREFILL_TOKENS:  # else a part could reach beyond the last slot
                extend = partial(self._decoding.extend, self._part, *self._part_place)
                self._prefill_graph = CudaGraph(extend, self._stream, pool)
            for row in range(self.num_slots):
                self._clear(row)


def slots_of(sampling: Sampling) -> int:
    """Slots that a sentence takes."""
    return 1 if sampling.guidance == 1 else 2
