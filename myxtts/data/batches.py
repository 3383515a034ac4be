"""Which clips make a batch, and in which order.

Every batch has exactly `batch_size` clips and no more packed tokens than one fixed budget, so that every step has
the same shapes. The order is a pure function of (seed, epoch, rank, world size): no state but a cursor, nothing
to do with how many workers gather. This module starts no threads and touches no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.random import default_rng

from myxtts.config import CONDITIONING_TOKENS, HOP_SAMPLES, NUM_STOPS, SAMPLES_PER_CODE
from myxtts.data.store import Rows
from myxtts.errors import DatasetError

TOKEN_MULTIPLE = 8
"""The budget is rounded up to a multiple of this, for the sake of tensor cores."""
BUDGET_SLACK = 0.003
"""How much above the mean batch the budget starts; large corpora balance far better than this."""
_ATTEMPTS = 64
_SWAP_ROUNDS = 64
"""Batches of 16 and more need a few; those of 4 clips need many to come within two per cent."""

Weights = npt.NDArray[np.float32]


def packed_tokens(num_ids: Rows, num_samples: Rows) -> Rows:
    """Positions a clip takes in the GPT's packed row: conditioning, text with start and stop, codes likewise."""
    num_codes = -(-(num_samples // HOP_SAMPLES + 1) // (SAMPLES_PER_CODE // HOP_SAMPLES))
    return CONDITIONING_TOKENS + (num_ids + 2) + (num_codes + NUM_STOPS)


@dataclass(frozen=True)
class Cursor:
    """Where an epoch stands: the number of batches this rank has taken from it."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class BatchPlan:
    """One batch before it is gathered. Weight 0 marks a clip that only fills up the last batches of an epoch."""

    clips: Rows
    weights: Weights
    after: Cursor
    """Where to continue once this batch has been trained on."""
    epoch: int = 0
    peers: Rows | None = None
    """[ranks, clips]: what all ranks, this one included, train on at the same time."""
    peer_weights: Weights | None = None


def mean_clips(num_clips: int, batch_size: int) -> float:
    """Clips of a batch that count, on average over an epoch: its last batch is filled up with some that do not."""
    return num_clips / math.ceil(num_clips / batch_size)


class Batches:
    """The batches of one rank, epoch after epoch."""

    def __init__(self, num_tokens: Rows, batch_size: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        if len(num_tokens) == 0:
            raise DatasetError("There is no clip to batch.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self._num_tokens = num_tokens
        self._batch_size = batch_size
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self.num_batches = math.ceil(len(num_tokens) / (batch_size * world_size))
        """Batches of an epoch on each rank."""
        self.budget = self._find_budget()
        """Packed tokens that every batch of every epoch fits."""

    def epoch(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Clips and weights of every batch of this rank in one epoch: [num_batches, batch_size] each."""
        clips, weights = self._everyone(epoch)
        return clips[:, self._rank], weights[:, self._rank]

    def _everyone(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The same of all ranks: [num_batches, ranks, batch_size] each."""
        for attempt in range(_ATTEMPTS):
            clips, weights = self._arrange(epoch, attempt)
            if self._num_tokens[clips].sum(axis=1).max() <= self.budget:
                shape = (self.num_batches, self._world_size, self._batch_size)
                return clips.reshape(shape), weights.reshape(shape)
        raise DatasetError(
            f"Epoch {epoch} could not be arranged in batches of {self._batch_size} clips with at most "
            f"{self.budget} tokens; use another batch size or seed"
        )

    def plans(self, cursor: Cursor) -> Iterator[BatchPlan]:
        """Batches from the cursor on, without end."""
        epoch, batch = cursor.epoch, cursor.batch
        while True:
            clips, weights = self._everyone(epoch)
            for at in range(batch, self.num_batches):
                after = Cursor(epoch, at + 1) if at + 1 < self.num_batches else Cursor(epoch + 1)
                mine = (clips[at, self._rank], weights[at, self._rank])
                yield BatchPlan(*mine, after, epoch, clips[at], weights[at])
            epoch, batch = epoch + 1, 0

    def padding(self, epoch: int) -> float:
        """Share of the budget that trains nothing, over this rank's epoch: room left and clips that only fill."""
        clips, weights = self.epoch(epoch)
        return 1.0 - float((self._num_tokens[clips] * weights).sum()) / (self.budget * self.num_batches)

    def _arrange(self, epoch: int, attempt: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """All clips once, in batches of nearly equal token totals, in random order.

        Clips are sorted by length with some noise and dealt out stratum by stratum, one to each batch: the
        longest of a stratum to the batch that has the fewest tokens so far. A few rounds of swaps even out the
        rest, which matters for small batches and small corpora.
        """
        random = default_rng([self._seed, epoch, attempt])
        num_clips, batch_size = len(self._num_tokens), self._batch_size
        num_batches = self.num_batches * self._world_size
        clips = random.permutation(num_clips)
        fill = np.full(num_batches * batch_size - num_clips, self._num_tokens.argmin())
        items = np.concatenate([clips, fill])
        weights = np.repeat(np.array([1, 0], np.float32), [len(clips), len(fill)])
        noisy = self._num_tokens[items] * random.uniform(0.8, 1.25, len(items))
        strata = np.argsort(-noisy, kind="stable").reshape(batch_size, num_batches)
        batches = np.empty((num_batches, batch_size), np.int64)
        totals = np.zeros(num_batches, np.int64)
        for number, stratum in enumerate(strata):
            longest_first = stratum[np.argsort(-self._num_tokens[items[stratum]], kind="stable")]
            emptiest_first = np.argsort(totals, kind="stable")
            batches[emptiest_first, number] = longest_first
            totals[emptiest_first] += self._num_tokens[items[longest_first]]
        for shift in range(min(_SWAP_ROUNDS, num_batches)):
            if totals.max() <= totals.mean() * (1 + BUDGET_SLACK):
                break
            totals = _swap_towards_mean(batches, self._num_tokens[items], totals, shift)
        batches = random.permuted(random.permutation(batches), axis=1)
        return items[batches], weights[batches]

    def _find_budget(self) -> int:
        """The least budget that epochs are sure to fit: `epoch` may try several arrangements for it."""
        epochs = range(16 if len(self._num_tokens) < 5000 else 2)
        totals = [self._num_tokens[self._arrange(epoch, 0)[0]].sum(axis=1) for epoch in epochs]
        mean = float(totals[0].mean())
        largest = float(np.quantile([batch_totals.max() for batch_totals in totals], 0.75))
        return math.ceil(max(mean * (1 + BUDGET_SLACK), largest) / TOKEN_MULTIPLE) * TOKEN_MULTIPLE


def _swap_towards_mean(batches: Rows, num_tokens: Rows, totals: Rows, shift: int) -> Rows:
    """Pair the fullest batches with the emptiest, swap in each pair the two clips that even it out best.

    Changes `batches` in place and returns the new totals. Another `shift` makes other pairs, so that a batch
    whose partner cannot help it finds one that can.
    """
    order = np.argsort(totals, kind="stable")
    empty, full = np.roll(order[: len(order) // 2], shift), order[::-1][: len(order) // 2]
    if len(full) == 0:
        return totals
    gaps = totals[full] - totals[empty]
    moved = num_tokens[batches[full]][:, :, None] - num_tokens[batches[empty]][:, None, :]
    remaining = np.abs(gaps[:, None, None] - 2 * moved).reshape(len(full), -1)
    best = remaining.argmin(axis=1)
    worth = remaining[np.arange(len(full)), best] < gaps
    full, empty = full[worth], empty[worth]
    from_full, from_empty = np.divmod(best[worth], batches.shape[1])
    batches[full, from_full], batches[empty, from_empty] = batches[empty, from_empty], batches[full, from_full]
    new_totals: Rows = num_tokens[batches].sum(axis=1)
    return new_totals
