"""Order: which clips the batches of an epoch hold, and which batches each rank takes.

Every batch has exactly `batch_size` clips and at most a fixed budget of packed tokens, so that every step has the
same shapes. Which clips an epoch holds is a pure function of (seed, epoch), their order one of (seed, epoch, rank,
world size): the only state is a cursor. This module reads no clip.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from numpy.random import default_rng

from myxtts.config import CONDITIONING_TOKENS, NUM_STOPS, num_codes_of
from myxtts.data.store import Rows
from myxtts.errors import DatasetError

if TYPE_CHECKING:
    from myxtts.data.clips import Mixture

TOKEN_MULTIPLE = 8  # the budget is rounded up to a multiple of this, which tensor cores need
BUDGET_SLACK = 0.003
"""The least share by which the budget exceeds the mean batch; large corpora balance far better than this."""
_ATTEMPTS = 64
_ATTEMPTS_PER_DRAW = 16
_DEVIATIONS = 2.5
"""Room for epochs of a mixture with more long clips than the average one, in standard deviations."""
_SWAP_ROUNDS = 64
"""Batches of 16 and more clips need a few rounds; batches of 4 need many to come within two per cent."""

Weights = npt.NDArray[np.float32]


def packed_tokens(num_ids: Rows, num_samples: Rows) -> Rows:
    """Positions of a clip in the GPT's packed row: conditioning, text with START and STOP, codes with STOPs."""
    return CONDITIONING_TOKENS + (num_ids + 2) + (num_codes_of(num_samples) + NUM_STOPS)


@dataclass(frozen=True)
class Cursor:
    """A position in the order: an epoch, and the number of batches this rank has taken from it."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class BatchPlan:
    """One batch before it is gathered. Weight 0 marks a clip that only pads the last batches of an epoch."""

    clips: Rows
    weights: Weights
    after: Cursor  # where to continue once this batch has been trained on
    epoch: int
    peers: Rows  # [ranks, clips] of this step, this rank included
    peer_weights: Weights


def mean_clips(num_clips: int, batch_size: int) -> float:
    """Return the mean number of clips with weight in a batch: the last batches of an epoch are padded."""
    return num_clips / math.ceil(num_clips / batch_size)


class Batches:
    """The batches of one rank, epoch after epoch."""

    def __init__(
        self,
        num_tokens: Rows,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        mixture: Mixture | None = None,
    ) -> None:
        """Without a `mixture` every epoch holds every clip once."""
        if len(num_tokens) == 0:
            raise DatasetError("There is no clip to batch.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self._num_tokens, self._batch_size, self._seed = num_tokens, batch_size, seed
        self._rank, self._world_size, self._mixture = rank, world_size, mixture
        self._num_clips = len(num_tokens) if mixture is None else mixture.num_clips
        self.num_batches = math.ceil(self._num_clips / (batch_size * world_size))
        """Batches of an epoch on each rank."""
        self.budget = self._find_budget()
        """The most packed tokens of any batch of any epoch."""

    def epoch(self, epoch: int) -> tuple[Rows, Weights]:
        """Return clips and weights of this rank's batches in one epoch: [num_batches, batch_size] each."""
        clips, weights = self._all_ranks(epoch)
        return clips[:, self._rank], weights[:, self._rank]

    def _all_ranks(self, epoch: int) -> tuple[Rows, Weights]:
        """Return clips and weights of all ranks: [num_batches, ranks, batch_size] each."""
        for attempt in range(_ATTEMPTS):
            clips, weights = self._arrange(epoch, attempt)
            if self._num_tokens[clips].sum(axis=1).max() <= self.budget:
                shape = (self.num_batches, self._world_size, self._batch_size)
                return clips.reshape(shape), weights.reshape(shape)
        what = f"batches of {self._batch_size} clips with at most {self.budget} tokens"
        raise DatasetError(f"Epoch {epoch} could not be arranged in {what}; use another batch size or seed")

    def plans(self, cursor: Cursor) -> Iterator[BatchPlan]:
        """Yield batches from the cursor on, forever."""
        first, rank = cursor.batch, self._rank
        for epoch in itertools.count(cursor.epoch):
            clips, weights = self._all_ranks(epoch)
            for at in range(first, self.num_batches):
                after = Cursor(epoch, at + 1) if at + 1 < self.num_batches else Cursor(epoch + 1)
                yield BatchPlan(clips[at, rank], weights[at, rank], after, epoch, clips[at], weights[at])
            first = 0

    def padding(self, epoch: int) -> float:
        """Return the share of the budget that is unused or spent on padding clips, over this rank's epoch."""
        clips, weights = self.epoch(epoch)
        return 1.0 - float((self._num_tokens[clips] * weights).sum()) / (self.budget * self.num_batches)

    def _arrange(self, epoch: int, attempt: int, drawn: Rows | None = None) -> tuple[Rows, Weights]:
        """Return the clips of an epoch, or those `drawn`, in random batches of nearly equal token totals.

        Clips are sorted by length with some noise and dealt stratum by stratum, one to each batch: the longest
        goes to the batch with the fewest tokens so far. Swaps then even out the totals.
        """
        random = default_rng([self._seed, epoch, attempt])
        num_clips, batch_size = self._num_clips, self._batch_size
        if drawn is None and self._mixture is not None:  # others only if no arrangement of these fits
            drawn = self._mixture.clips(self._seed, epoch, attempt // _ATTEMPTS_PER_DRAW)
        num_batches = self.num_batches * self._world_size
        num_padding = num_batches * batch_size - num_clips
        padding = np.full(num_padding, self._num_tokens.argmin())
        items = np.concatenate([random.permutation(num_clips if drawn is None else drawn), padding])
        weights = np.repeat(np.array([1, 0], np.float32), [num_clips, num_padding])
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
        """Return the smallest budget that every epoch fits within a few of its `_ATTEMPTS` arrangements."""
        mixture = self._mixture
        drawn = None if mixture is None else mixture.longest_epoch(self._num_tokens, _DEVIATIONS)
        epochs = range(16 if self._num_clips < 5000 else 2)
        totals = [self._num_tokens[self._arrange(epoch, 0, drawn)[0]].sum(axis=1) for epoch in epochs]
        largest = float(np.quantile([batch_totals.max() for batch_totals in totals], 0.75))
        return round_up(max(float(totals[0].mean()) * (1 + BUDGET_SLACK), largest), TOKEN_MULTIPLE)


def _swap_towards_mean(batches: Rows, num_tokens: Rows, totals: Rows, shift: int) -> Rows:
    """Pair the fullest batches with the emptiest and swap in each pair the two clips that even it out best.

    Changes `batches` in place and returns the new totals. Each `shift` makes different pairs.
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


def round_up(number: float, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
