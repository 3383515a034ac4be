"""What is said in the pieces of a stretch: each is heard twice, with its neighbours and alone.

A text is trusted as far as the two transcripts agree. They are aligned by words, not by times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from myxtts.audio import Wave
from myxtts.collect.cutting import Span, windows
from myxtts.collect.script import divide, error_rate, plain
from myxtts.collect.stretches import Stretch

if TYPE_CHECKING:
    from myxtts.collect.listeners import Listening

OTHER_LANGUAGE, TOO_MUCH_TEXT = "another language", "more text than speech"
_UNLIKELY, _CERTAIN, _KNOWN_SHARE = 0.1, 0.8, 0.1  # probabilities of languages
_LANGUAGE_FLOOR, _NEIGHBOUR_WEIGHT, _NEIGHBOURS = 1e-3, 0.15, 2
_MOST_LETTERS_PER_S = 30.0


class Hearing(NamedTuple):
    """What was heard of one piece: with its neighbours, and alone."""

    text: str
    alone: str
    language: str
    flags: dict[str, str]


def hear(listening: Listening, language: str, stretch: Stretch) -> tuple[Stretch, list[Hearing]]:
    """Hear every piece alone and together with its neighbours, in windows of up to 30 s."""
    pieces = stretch.pieces
    if not pieces:
        return stretch, []
    waves = [stretch.heard(piece.start, piece.end) for piece in pieces]
    alone = listening.hear(waves, [language] * len(waves), quick=True)
    likely = [heard["languages"] for heard in alone]
    spoken = [language] * len(pieces) if language else _languages(likely)
    if not language:
        _settle(listening, waves, spoken)
    misheard = [at for at, heard in enumerate(alone) if heard["language"] != spoken[at]]
    _hear_again(listening, waves, alone, misheard, spoken)
    groups = _windows(pieces, spoken)
    together = listening.hear(
        [stretch.heard(pieces[group[0]].start, pieces[group[-1]].end) for group in groups],
        [spoken[group[0]] for group in groups],
    )
    texts = _divided(groups, together, alone)
    unsure = [at for at, heard in enumerate(alone) if error_rate(texts[at], heard["text"], spoken[at]) > 0]
    _hear_again(listening, waves, alone, unsure, spoken, texts)
    texts = _divided(groups, together, alone)
    flags = [_flags(*each, language) for each in zip(pieces, texts, spoken, likely, strict=True)]
    return stretch, [
        Hearing(text, heard["text"], code, found)
        for text, heard, code, found in zip(texts, alone, spoken, flags, strict=True)
    ]


def _settle(listening: Listening, waves: Sequence[Wave], spoken: list[str]) -> None:
    """Hear pieces that seem to be in another language than most in both, and keep that of the likelier words."""
    usual = Counter(spoken).most_common(1)[0][0]
    odd = [at for at, code in enumerate(spoken) if code != usual]
    if odd:
        chosen = [waves[at] for at in odd]
        found = listening.hear(chosen + chosen, [spoken[at] for at in odd] + [usual] * len(odd))
        for number, at in enumerate(odd):
            own, other = found[number], found[number + len(odd)]
            if other["log_probability"] > own["log_probability"]:
                spoken[at] = usual


def _hear_again(
    listening: Listening,
    waves: Sequence[Wave],
    alone: list[dict[str, Any]],
    chosen: Sequence[int],
    spoken: Sequence[str],
    texts: Sequence[str] | None = None,
) -> None:
    """Hear some pieces with all care; with texts, the hearing that agrees better with them is kept."""
    if not chosen:
        return
    found = listening.hear([waves[at] for at in chosen], [spoken[at] for at in chosen])
    for at, heard in zip(chosen, found, strict=True):
        errors = (
            [error_rate(texts[at], one["text"], spoken[at]) for one in (heard, alone[at])] if texts else [0, 0]
        )
        if errors[0] <= errors[1]:
            alone[at] = heard


def _windows(pieces: Sequence[Span], spoken: Sequence[str]) -> list[list[int]]:
    """The numbers of the pieces that are heard together: neighbours in one language."""
    numbers = {piece: number for number, piece in enumerate(pieces)}
    found = []
    for group in windows(pieces):
        parts = groupby((numbers[piece] for piece in group), key=lambda number: spoken[number])
        found += [list(part) for _, part in parts]
    return found


def _divided(
    groups: Sequence[Sequence[int]], together: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The text of each piece in the transcript of its window."""
    found: list[str] = []
    for group, heard in zip(groups, together, strict=True):
        found += divide(heard["text"], [alone[at]["text"] for at in group])
    return found


def _languages(likely: Sequence[Mapping[str, float]]) -> list[str]:
    """The language of each piece: its own evidence and, if that is weak, that of its neighbours."""
    codes = list(likely[0])
    evidence = np.log(np.maximum([[each.get(code, 0.0) for code in codes] for each in likely], _LANGUAGE_FLOOR))
    total = evidence.copy()
    for distance in range(1, _NEIGHBOURS + 1):
        total[distance:] += _NEIGHBOUR_WEIGHT * evidence[:-distance]
        total[:-distance] += _NEIGHBOUR_WEIGHT * evidence[distance:]
    return [codes[at] for at in total.argmax(1)]


def _flags(piece: Span, text: str, spoken: str, likely: Mapping[str, float], asked: str) -> dict[str, str]:
    """Reasons to set a clip aside that need no threshold, with their details."""
    found = {}
    best = max(likely, key=lambda code: likely[code])
    if asked and likely.get(asked, 0.0) < _UNLIKELY and likely[best] > _CERTAIN:
        found[OTHER_LANGUAGE] = f"it sounds like {best}, not {asked}"
    elif sum(likely.values()) < _KNOWN_SHARE:
        found[OTHER_LANGUAGE] = f"none that MyXTTS speaks; nearest is {spoken}"
    letters = len(plain(text).replace(" ", ""))
    if letters > _MOST_LETTERS_PER_S * piece.seconds:
        found[TOO_MUCH_TEXT] = f"{letters} letters in {piece.seconds:.1f} s"
    return found
