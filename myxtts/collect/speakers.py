"""Who speaks: groups clips by the similarity of their voices. Pure: knows embeddings and names, no audio."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

SAME_SPEAKER = 0.4  # mean cosine similarity of two groups of clips above which they are one speaker
_BLOCK = 1000  # clips that are compared with each other at a time
_SMALL_SHARE, _SMALL_CLIPS, _STRAY = 0.02, 3, 0.3

Voices = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


def group(voices: Voices, count: int | None = None) -> Labels:
    """Return the number of the speaker of each clip, the most frequent first; `count` is known or found.

    `voices` are rows of length 1.
    """
    if not len(voices):
        return np.zeros(0, np.int64)
    labels = np.zeros(0, np.int64)
    for start in range(0, len(voices), _BLOCK):
        block = voices[start : start + _BLOCK]
        found = _joined(block, np.ones(len(block)), None if len(voices) > _BLOCK else count)
        labels = np.concatenate([labels, found + labels.max(initial=-1) + 1])
    if len(voices) > _BLOCK:
        sizes = np.bincount(labels).astype(float)
        labels = _joined(_centres(voices, labels), sizes, count)[labels]
    if count is None:
        labels = _without_strays(voices, labels)
    order = [label for label, _ in Counter(labels.tolist()).most_common()]
    return np.array([order.index(label) for label in labels.tolist()])


def named(labels: Labels, known: Sequence[str], taken: Collection[str] = ()) -> list[str]:
    """Return a name for each clip: that which most clips of its group have, else one that is not taken."""
    names: dict[int, str] = {}
    for label in sorted(set(labels.tolist())):
        here = Counter(known[at] for at in np.flatnonzero(labels == label).tolist() if known[at])
        fresh = (f"speaker{number}" for number in itertools.count(1))
        best = next((name for name, _ in here.most_common() if name not in names.values()), None)
        names[label] = best or next(name for name in fresh if name not in {*taken, *names.values()})
    return [names[label] for label in labels.tolist()]


def assigned(voices: Voices, known: Mapping[str, Voices]) -> list[str]:
    """The known speaker of each clip, or "" if it is none of them."""
    if not known:
        return [""] * len(voices)
    names = list(known)
    centres = _unit(np.stack([rows.mean(0) for rows in known.values()]))
    alike = voices @ centres.T
    return [names[row.argmax()] if row.max() >= SAME_SPEAKER else "" for row in alike]


def _joined(voices: Voices, weights: npt.NDArray[np.float64], count: int | None) -> Labels:
    """Join the two most similar groups (average linkage) until `count` are left, or none are similar enough."""
    alike = (voices @ voices.T).astype(np.float64)
    np.fill_diagonal(alike, -np.inf)
    labels, sizes, left = np.arange(len(voices)), weights.copy(), len(voices)
    while left > (count or 1):
        one, other = divmod(int(alike.argmax()), len(alike))
        if count is None and alike[one, other] < SAME_SPEAKER:
            break
        share = sizes[one] / (sizes[one] + sizes[other])
        merged = share * alike[one] + (1 - share) * alike[other]
        merged[[one, other]] = -np.inf
        alike[one], alike[:, one] = merged, merged
        alike[other], alike[:, other] = -np.inf, -np.inf
        sizes[one] += sizes[other]
        labels[labels == other] = one
        left -= 1
    return np.unique(labels, return_inverse=True)[1]


def _without_strays(voices: Voices, labels: Labels) -> Labels:
    """Give groups of a few clips, mostly short or noisy ones, to the most similar speaker if there is one."""
    sizes = np.bincount(labels)
    small = (sizes < _SMALL_CLIPS) | (sizes < _SMALL_SHARE * len(labels))
    if small.all() or not small.any():
        return labels
    large = np.flatnonzero(~small)
    alike = voices @ _unit(_centres(voices, labels))[large].T
    moved = small[labels] & (alike.max(1) >= _STRAY)
    return np.where(moved, large[alike.argmax(1)], labels)


def _centres(voices: Voices, labels: Labels) -> Voices:
    """The mean voice of each group, not of length 1: the products of means are the means of products."""
    sums = np.zeros((int(labels.max()) + 1, voices.shape[1]), np.float32)
    np.add.at(sums, labels, voices)
    found: Voices = (sums / np.bincount(labels)[:, None]).astype(np.float32)
    return found


def _unit(rows: Voices) -> Voices:
    found: Voices = rows / (np.linalg.norm(rows, axis=1, keepdims=True) + 1e-9)
    return found
