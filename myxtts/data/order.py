"""Order: which clips the batches of an epoch hold, and which batches each rank takes.

Every batch has exactly `batch_size` clips and at most a fixed budget of packed tokens, so that every step has the
same shapes. The clips of an epoch come in windows of a few shards, so that a reader needs only these shards at
hand. The batches are a pure function of (seed, epoch), numbered over all ranks: rank r of W takes every W-th batch
from the cursor on, so a run may go on with other ranks. Only the windows that are read are arranged. This module
reads no clip.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.random import Generator, default_rng

from myxtts.config import CONDITIONING_TOKENS, NUM_STOPS, num_codes_of
from myxtts.data.store import Array, Rows
from myxtts.errors import DatasetError

if TYPE_CHECKING:
    from myxtts.data.clips import Mixture

TOKEN_MULTIPLE = 8  # the budget is rounded up to a multiple of this, which tensor cores need
BUDGET_SLACK = 0.003
"""The least share by which the budget exceeds the mean batch; large corpora balance far better than this."""
SHARDS_PER_WINDOW, BATCHES_PER_WINDOW = 16, 256
"""A window has at least so many: few batches cannot all have nearly the same number of tokens."""
_SMALL = 5000
"""An epoch of fewer clips than this is arranged in no time, so that the budget follows more of them."""
_SAMPLED_WINDOWS = 3
_ATTEMPTS = 64
_ATTEMPTS_PER_DRAW = 16
_DEVIATIONS = 2.5
"""Room for epochs of a mixture with more long clips than the average one, in standard deviations."""
_SWAP_ROUNDS = 64
"""Batches of 16 and more clips need a few rounds; batches of 4 need many to come within two per cent."""
_CLIPS, _SHARDS = 2, 3  # purposes of random numbers; those of a mixture have 1

Weights = npt.NDArray[np.float32]


def packed_tokens(num_ids: Rows, num_samples: Rows) -> Rows:
    """Positions of a clip in the GPT's packed row: conditioning, text with START and STOP, codes with STOPs."""
    return CONDITIONING_TOKENS + (num_ids + 2) + (num_codes_of(num_samples) + NUM_STOPS)


@dataclass(frozen=True)
class Cursor:
    """A position in the order: an epoch, and the number of batches that all ranks have taken from it."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class BatchPlan:
    """One batch before it is gathered. Weight 0 marks a clip that only pads the last batch of an epoch."""

    clips: Rows
    weights: Weights
    after: Cursor  # where to continue once all ranks have trained on their batches of this step
    epoch: int
    window: int
    peers: Rows  # [ranks, clips] of this step, this rank included
    peer_weights: Weights


def mean_clips(num_clips: int, batch_size: int) -> float:
    """Return the mean number of clips with weight in a batch: the last batch of an epoch is padded."""
    return num_clips / math.ceil(num_clips / batch_size)


class _Numbered(NamedTuple):
    """A batch of any rank."""

    clips: Rows
    weights: Weights
    after: Cursor
    epoch: int
    window: int


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
        shards: Array | None = None,
        num_epochs: int | None = None,
    ) -> None:
        """Without a `mixture` every epoch holds every clip once. `shards` has the shard of each clip.

        After `num_epochs` the batches end; ranks for which the last step has none left get one of weight 0.
        """
        if len(num_tokens) == 0:
            raise DatasetError("There is no clip to batch.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}")
        self._num_tokens, self._batch_size, self._seed = num_tokens.astype(np.int32), batch_size, seed
        self._rank, self._world_size, self._num_epochs = rank, world_size, num_epochs
        self._mixture, self._shards = mixture, shards
        self._num_clips = len(num_tokens) if mixture is None else mixture.num_clips
        self.num_batches = math.ceil(self._num_clips / batch_size)
        """Batches of an epoch, over all ranks."""
        least = BATCHES_PER_WINDOW * batch_size
        windows = None if shards is None else _Windows(self._num_tokens, seed, mixture, shards, least)
        self._windows = windows if windows is not None and windows.num_shards > windows.size else None
        self.budget = self._find_budget()
        """The most packed tokens of any batch of any epoch."""

    def epoch(self, epoch: int) -> tuple[Rows, Weights]:
        """Return clips and weights of all batches of one epoch, in their order: [num_batches, batch_size] each."""
        found = [self._window(epoch, window) for window in self._ranges(epoch)]
        return np.concatenate([clips for clips, _ in found]), np.concatenate([weights for _, weights in found])

    def plans(self, cursor: Cursor) -> Iterator[BatchPlan]:
        """Yield this rank's batches from the cursor on, without end or up to `num_epochs`."""
        batches = self._from(cursor)
        while step := list(itertools.islice(batches, self._world_size)):
            padding = step[-1]._replace(weights=np.zeros(self._batch_size, np.float32))
            step += [padding] * (self._world_size - len(step))
            clips, weights, _, epoch, window = step[self._rank]
            peers = np.stack([each.clips for each in step])
            peer_weights = np.stack([each.weights for each in step])
            yield BatchPlan(clips, weights, step[-1].after, epoch, window, peers, peer_weights)

    def shards_from(self, epoch: int, window: int) -> list[int]:
        """Return the shards that the batches of a window come from, then those of the window that follows."""
        if self._shards is None:
            return []
        places = itertools.dropwhile(lambda place: place[:2] != (epoch, window), self._places(epoch))
        found = [np.unique(self._shards[self._clips(*place)]) for *place, _ in itertools.islice(places, 2)]
        return list(dict.fromkeys(np.concatenate(found).tolist()))

    def samples(self) -> Iterator[tuple[int, Rows]]:
        """Yield two epochs and their batches, of many windows those of `_some_windows`."""
        for epoch in range(2):
            yield from ((epoch, self._window(epoch, window)[0]) for window in self._some_windows(epoch))

    def padding(self, epoch: int) -> float:
        """Return the share of the budget that is unused or spent on padding clips, over an epoch."""
        clips, weights = self.epoch(epoch)
        return 1.0 - float((self._num_tokens[clips] * weights).sum()) / (self.budget * self.num_batches)

    def _from(self, cursor: Cursor) -> Iterator[_Numbered]:
        """Yield the batches of all ranks from the cursor on."""
        for epoch, window, numbers in self._places(cursor.epoch):
            first = max(numbers.start, cursor.batch if epoch == cursor.epoch else 0)
            if first >= numbers.stop:
                continue
            clips, weights = self._window(epoch, window)
            for number in range(first, numbers.stop):
                is_last, at = number + 1 == self.num_batches, number - numbers.start
                after = Cursor(epoch + 1) if is_last else Cursor(epoch, number + 1)
                yield _Numbered(clips[at], weights[at], after, epoch, window)

    def _places(self, first: int) -> Iterator[tuple[int, int, range]]:
        """Yield the windows from an epoch on: epoch, window and its batches."""
        end = self._num_epochs
        for epoch in itertools.count(first) if end is None else range(first, end):
            yield from ((epoch, window, numbers) for window, numbers in self._ranges(epoch).items())

    def _ranges(self, epoch: int) -> dict[int, range]:
        """Return the batches of each window that has any; clips that fill no batch go to the next window."""
        if self._windows is None:
            return {0: range(self.num_batches)}
        bounds = (self._windows.of_epoch(epoch).starts // self._batch_size).tolist()
        bounds[-1] = self.num_batches
        return {number: range(*pair) for number, pair in enumerate(pairwise(bounds)) if pair[0] < pair[1]}

    def _some_windows(self, epoch: int) -> list[int]:
        """Return the windows in which the mean clip is longest."""
        if self._windows is None:
            return [0]
        means = self._windows.of_epoch(epoch).means
        return sorted(self._ranges(epoch), key=lambda window: -means[window])[:_SAMPLED_WINDOWS]

    def _clips(self, epoch: int, window: int, redraw: int = 0) -> Rows:
        """Return the clips of a window's batches, among them those that are left over from the window before."""
        if self._windows is not None:
            numbers = self._ranges(epoch)[window]
            last = min(numbers.stop * self._batch_size, self._num_clips)
            return self._windows.clips(epoch, window, numbers.start * self._batch_size, last)
        if self._mixture is None:
            return np.arange(self._num_clips)
        return self._mixture.clips(self._seed, epoch, redraw)

    def _window(self, epoch: int, window: int) -> tuple[Rows, Weights]:
        """Return clips and weights of a window's batches: [batches, batch_size] each."""
        for attempt in range(_ATTEMPTS):
            if attempt % _ATTEMPTS_PER_DRAW == 0:  # others of a mixture only if no arrangement of these fits
                drawn = self._clips(epoch, window, attempt // _ATTEMPTS_PER_DRAW)
            clips, weights = self._arrange(drawn, epoch, attempt, window)
            if self._num_tokens[clips].sum(axis=1).max() <= self.budget:
                return clips, weights
        what = f"batches of {self._batch_size} clips with at most {self.budget} tokens"
        raise DatasetError(f"Epoch {epoch} could not be arranged in {what}; use another batch size or seed")

    def _arrange(self, drawn: Rows, epoch: int, attempt: int, window: int) -> tuple[Rows, Weights]:
        """Return these clips in random batches of nearly equal token totals; the shortest clip pads the last."""
        random = default_rng([self._seed, epoch, attempt, window])  # trailing zeros change no seed
        num_padding = -len(drawn) % self._batch_size
        shortest = self._num_tokens.argmin()
        if self._windows is not None:  # its shard may not be at hand
            shortest = drawn[self._num_tokens[drawn].argmin()]
        padding = np.full(num_padding, shortest)
        items = np.concatenate([random.permutation(drawn), padding])
        weights = np.repeat(np.array([1, 0], np.float32), [len(drawn), num_padding])
        batches = _dealt(self._num_tokens[items], self._batch_size, random)
        batches = random.permuted(random.permutation(batches), axis=1)
        return items[batches], weights[batches]

    def _find_budget(self) -> int:
        """Return the smallest budget that every epoch fits within a few of its `_ATTEMPTS` arrangements."""
        mixture, windows = self._mixture, self._windows
        hardest: Iterator[tuple[int, int, Rows]]
        is_small = self._num_clips < _SMALL
        epochs = range(2 if not is_small else 16 if windows is None else 4)
        if windows is None:
            longest = None if mixture is None else mixture.longest_epoch(self._num_tokens, _DEVIATIONS)
            hardest = ((epoch, 0, self._clips(epoch, 0) if longest is None else longest) for epoch in epochs)
        else:
            windows.find_most_mean(epochs)
            every = ((epoch, window) for epoch in epochs for window in self._ranges(epoch))
            some = ((epoch, window) for epoch in epochs for window in self._some_windows(epoch))
            drawn = ((*at, self._clips(*at)) for at in (every if is_small else some))
            hardest = itertools.chain(drawn, ((epoch, 0, windows.around_longest(epoch)) for epoch in epochs))
        totals = [
            self._num_tokens[self._arrange(clips, epoch, 0, window)[0]].sum(axis=1)
            for epoch, window, clips in hardest
        ]
        largest = [each.max() for each in totals]
        if windows is None:
            mean, most = float(totals[0].mean()), float(np.quantile(largest, 0.75))
        else:  # half as far again from the mean: other windows may be harder
            mean = windows.most_mean * self._batch_size
            most = max(largest) + max(max(largest) - mean, 0) / 2
        return round_up(max(mean * (1 + BUDGET_SLACK), most), TOKEN_MULTIPLE)


class _Epoch(NamedTuple):
    """The windows of an epoch: each is some parts of shards."""

    parts: list[Rows]  # of each window; part `shard + turn * num_shards` has the clips with more turns than `turn`
    starts: Rows  # clips of the epoch before each window, and all of them
    means: npt.NDArray[np.float64]  # tokens of a clip in each window
    turns: npt.NDArray[np.uint16] | None  # how often the epoch holds each clip; None if once


class _Windows:
    """The clips of an epoch one after another, in windows of a few shards; random, but only within a window."""

    def __init__(
        self, num_tokens: npt.NDArray[np.int32], seed: int, mixture: Mixture | None, shards: Array, least: int
    ) -> None:
        """A window has about `least` clips or more."""
        self._num_tokens, self._seed = num_tokens, seed
        self._mixture = None if mixture is None or mixture.is_plain else mixture
        by_shard = np.argsort(shards, kind="stable")
        self._by_shard, tokens = by_shard.astype(np.uint32), num_tokens[by_shard]
        self._firsts = np.append(0, np.flatnonzero(np.diff(shards[by_shard])) + 1)
        """Where in `_by_shard` the clips of each shard begin."""
        self.num_shards = len(self._firsts)
        self.size = max(SHARDS_PER_WINDOW, math.ceil(least * self.num_shards / len(shards)))
        """Shards of a window."""
        self._sizes = np.diff(self._firsts, append=len(shards))
        self._tokens = np.add.reduceat(tokens, self._firsts, dtype=np.int64)
        self._of_longest = int(np.searchsorted(self._firsts, tokens.argmax(), "right")) - 1
        self._epochs: dict[int, _Epoch] = {}
        self.most_mean = math.inf
        """The most tokens of the mean clip of any window of any epoch."""

    def of_epoch(self, epoch: int) -> _Epoch:
        """Return the windows of an epoch; those of the last two are kept."""
        if epoch not in self._epochs:
            while len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = self._cut(epoch)
        return self._epochs[epoch]

    def find_most_mean(self, epochs: range) -> None:
        largest = [self._cut(epoch).means.max() for epoch in epochs]
        self.most_mean = float(np.quantile(largest, 0.75))

    def clips(self, epoch: int, window: int, start: int, end: int) -> Rows:
        """Return the clips of the epoch from `start` to `end`, which lies in this window."""
        starts = self.of_epoch(epoch).starts
        first = int(np.searchsorted(starts, start, "right")) - 1
        clips = np.concatenate([self._of_window(epoch, number) for number in range(first, window + 1)])
        return clips[start - starts[first] : end - starts[first]]

    def around_longest(self, epoch: int) -> Rows:
        """Return the clips of the window with the longest clip, were every clip to come once in this epoch."""
        shards = [parts % self.num_shards for parts in self.of_epoch(epoch).parts]
        window = next((window for window in shards if self._of_longest in window), shards[0])
        return np.concatenate([self._of_shard(shard) for shard in {self._of_longest, *window.tolist()}])

    def _cut(self, epoch: int) -> _Epoch:
        """Return windows of random shards, chosen so that the mean clip is nearly as long in each.

        A clip that comes several times in an epoch is in as many parts of its shard, each with a place of its own.
        """
        turns, parts, sizes, tokens = self._parts(epoch)
        num_windows = math.ceil(len(parts) / self.size)
        excess = tokens - np.rint(sizes * (tokens.sum() / sizes.sum())).astype(np.int64)
        even = np.append(excess, 0) + tokens.sum() // len(parts)
        for attempt in range(_ATTEMPTS):
            random = default_rng([self._seed, epoch, attempt, 0, _SHARDS])
            items = np.full(num_windows * self.size, -1)  # -1 is no part, of mean length
            items[: len(parts)] = random.permutation(len(parts))
            rows = items[random.permutation(_dealt(even[items], self.size, random))]
            windows = [row[row >= 0] for row in rows]
            starts = np.cumsum([0, *(sizes[window].sum() for window in windows)])
            means = np.array([tokens[window].sum() for window in windows]) / np.diff(starts)
            if means.max() <= self.most_mean:
                break
        return _Epoch([parts[window] for window in windows], starts, means, turns)

    def _parts(self, epoch: int) -> tuple[npt.NDArray[np.uint16] | None, Rows, Rows, Rows]:
        """Return how often an epoch holds each clip, and the parts of shards with their clips and tokens."""
        if self._mixture is None:
            return None, np.arange(self.num_shards), self._sizes, self._tokens
        drawn = self._mixture.clips(self._seed, epoch)
        turns = np.bincount(drawn, minlength=len(self._by_shard)).astype(np.uint16)
        turns_by_shard, tokens_by_shard = turns[self._by_shard], self._num_tokens[self._by_shard]
        sizes, tokens = [], []
        for turn in range(turns.max()):
            has = turns_by_shard > turn
            sizes.append(np.add.reduceat(has, self._firsts, dtype=np.int64))
            tokens.append(np.add.reduceat(has * tokens_by_shard, self._firsts, dtype=np.int64))
        parts = np.flatnonzero(np.concatenate(sizes))
        return turns, parts, np.concatenate(sizes)[parts], np.concatenate(tokens)[parts]

    def _of_window(self, epoch: int, window: int) -> Rows:
        """Return the clips of a window; those that it may leave over, the last, are of its mean length."""
        found, of_parts = self.of_epoch(epoch), list[Rows]()
        for part in found.parts[window].tolist():
            turn, shard = divmod(part, self.num_shards)
            own = self._of_shard(shard)
            of_parts.append(own if found.turns is None else own[found.turns[own] > turn])
        clips = default_rng([self._seed, epoch, window, 0, _CLIPS]).permutation(np.concatenate(of_parts))
        from_mean = np.abs(self._num_tokens[clips] - found.means[window])
        return clips[np.argsort(-from_mean, kind="stable")]

    def _of_shard(self, shard: int) -> Rows:
        first = self._firsts[shard]
        return self._by_shard[first : first + self._sizes[shard]].astype(np.int64)


def _dealt(num_tokens: Rows, batch_size: int, random: Generator) -> Rows:
    """Return the numbers of all items in rows of `batch_size` with nearly equal totals of tokens.

    Items are sorted by length with some noise and dealt stratum by stratum, one to each batch: the longest goes to
    the batch with the fewest tokens so far. Swaps then even out the totals.
    """
    num_batches = len(num_tokens) // batch_size
    noisy = num_tokens * random.uniform(0.8, 1.25, len(num_tokens))
    strata = np.argsort(-noisy, kind="stable").reshape(batch_size, num_batches)
    batches = np.empty((num_batches, batch_size), np.int64)
    totals = np.zeros(num_batches, np.int64)
    for number, stratum in enumerate(strata):
        longest_first = stratum[np.argsort(-num_tokens[stratum], kind="stable")]
        emptiest_first = np.argsort(totals, kind="stable")
        batches[emptiest_first, number] = longest_first
        totals[emptiest_first] += num_tokens[longest_first]
    for shift in range(min(_SWAP_ROUNDS, num_batches)):
        if totals.max() <= totals.mean() * (1 + BUDGET_SLACK):
            break
        totals = _swap_towards_mean(batches, num_tokens, totals, shift)
    return batches


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
