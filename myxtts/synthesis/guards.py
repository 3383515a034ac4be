"""What can be told about codes without listening: how many a text should need, and whether they go in circles.

Pure: numbers in, a verdict out. Who tries again, and how often, is decided elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from myxtts.config import SAMPLE_RATE, SAMPLES_PER_CODE

CODES_PER_SECOND = SAMPLE_RATE / SAMPLES_PER_CODE
FASTEST, SLOWEST = 36.0, 6.0
"""Spoken characters per second that no reader exceeds or falls below; about 15 are usual."""
PAUSES_SECONDS = 1.5
"""What silence before, after and within a sentence may add."""
LONGEST_PERIOD, REPEATED_CODES, REPETITIONS = 32, 32, 3
"""A loop: the same up to 1.5 seconds at least three times on end, and for at least 1.5 seconds in all."""

EMPTY, RUN_AWAY, REPETITION, TOO_SHORT = "empty", "run-away", "repetition", "too short"
WORST_FIRST = (EMPTY, RUN_AWAY, REPETITION, TOO_SHORT)


class Bounds(NamedTuple):
    """How many codes a sentence may have."""

    fewest: int
    most: int


def bounds(num_characters: int, max_codes: int) -> Bounds:
    """Bounds for a sentence of so many spoken characters, and of what the model can say in one go."""
    fewest = max(1, math.floor(num_characters / FASTEST * CODES_PER_SECOND))
    most = math.ceil((PAUSES_SECONDS + num_characters / SLOWEST) * CODES_PER_SECOND)
    return Bounds(min(fewest, max_codes), min(most, max_codes))


def trouble(codes: Sequence[int], limits: Bounds) -> str | None:
    """What is wrong with the codes of a whole sentence: one of `WORST_FIRST`, or nothing."""
    if not codes:
        return EMPTY
    if len(codes) >= limits.most:
        return RUN_AWAY
    if goes_in_circles(codes):
        return REPETITION
    return TOO_SHORT if len(codes) < limits.fewest else None


def goes_in_circles(codes: Sequence[int]) -> bool:
    """Whether some stretch repeats itself on end."""
    return any(
        _longest_echo(codes, period) + period >= max(REPEATED_CODES, REPETITIONS * period)
        for period in range(1, LONGEST_PERIOD + 1)
    )


def _longest_echo(codes: Sequence[int], period: int) -> int:
    """The longest run of codes that equal those `period` places before them."""
    longest = run = 0
    for now, before in zip(codes[period:], codes, strict=False):
        run = run + 1 if now == before else 0
        longest = max(longest, run)
    return longest


def end_goes_in_circles(codes: Sequence[int], num_added: int) -> bool:
    """The same while a sentence grows, after `num_added` more codes; what was looked at before costs nothing."""
    return goes_in_circles(codes[-(REPETITIONS * LONGEST_PERIOD + num_added) :])


def severity(found: str | None) -> int:
    """The larger the worse; 0 for no trouble."""
    return 0 if found is None else len(WORST_FIRST) - WORST_FIRST.index(found)
