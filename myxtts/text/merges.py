"""Learning the merges of a byte-pair encoding: which neighbours to join, and in what order.

The native trainer of `tokenizers` gives the same merges (a test compares them) several times faster, but it
cannot start from words that old merges have already joined, nor leave pairs out; growing a vocabulary needs
both. This module knows words as lists of pieces and nothing of files, languages or special tokens.
"""

import heapq
from collections import Counter, defaultdict
from itertools import pairwise

Pair = tuple[str, str]
LEAST_COUNT = 2
"""A pair seen once is chance, not a habit of the language."""


def learn_merges(
    words: list[tuple[list[str], int]],
    vocabulary: dict[str, int],
    num_tokens: int,
    must_contain: frozenset[str] | None = None,
) -> list[Pair]:
    """Joins the most frequent pair of neighbours, over and over, until `num_tokens` tokens are made.

    `words` are pieces with their counts; the pieces are joined in place. What comes of a merge is added to
    `vocabulary` under the next id. Ties go to the smaller ids, so nothing depends on the order of the words.
    With `must_contain`, only tokens holding one of these letters are made.
    """
    next_id = max(vocabulary.values()) + 1
    end_id = next_id + num_tokens
    counts: Counter[Pair] = Counter()
    found_in: dict[Pair, set[int]] = defaultdict(set)

    def count(index: int, sign: int) -> set[Pair]:
        pieces, times = words[index]
        pairs = list(pairwise(pieces))
        if must_contain is not None:
            pairs = [pair for pair in pairs if not must_contain.isdisjoint(pair[0] + pair[1])]
        for pair in pairs:
            counts[pair] += sign * times
            found_in[pair].add(index)
        return set(pairs)

    def ranked(pair: Pair) -> tuple[int, int, int, Pair]:
        return -counts[pair], vocabulary[pair[0]], vocabulary[pair[1]], pair

    for index in range(len(words)):
        count(index, +1)
    # A count in the queue may be out of date: one that fell is corrected when it comes up, one that rose is
    # entered again at once.
    queue = [ranked(pair) for pair in counts]
    heapq.heapify(queue)
    merges: list[Pair] = []
    while queue and next_id < end_id:
        entry = heapq.heappop(queue)
        pair = entry[-1]
        if counts[pair] < LEAST_COUNT:
            continue
        if -entry[0] != counts[pair]:
            heapq.heappush(queue, ranked(pair))
            continue
        merges.append(pair)
        if pair[0] + pair[1] not in vocabulary:
            vocabulary[pair[0] + pair[1]] = next_id
            next_id += 1
        risen = set()
        for index in sorted(found_in.pop(pair)):
            count(index, -1)
            words[index][0][:] = joined(words[index][0], pair)
            risen |= count(index, +1)
        for other in risen:
            heapq.heappush(queue, ranked(other))
    return merges


def joined(pieces: list[str], pair: Pair) -> list[str]:
    """The pieces with every occurrence of the pair made one, from the left."""
    result: list[str] = []
    position = 0
    while position < len(pieces):
        if tuple(pieces[position : position + 2]) == pair:
            result.append(pair[0] + pair[1])
            position += 2
        else:
            result.append(pieces[position])
            position += 1
    return result
