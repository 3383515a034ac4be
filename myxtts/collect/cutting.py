"""Where to cut a recording: pieces of 2 to 12 seconds that begin and end in silence.

Input are probabilities of speech (one per 32 ms) and levels in dB (one per 8 ms), output are spans that cover the
audio without a gap. A cut is made only where the VAD hears no speech and the level is near the background. Speech
without such a place within 12 seconds is set aside, never cut in a word. Pure: knows no audio, files or models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SHORTEST_S, LONGEST_S = 2.0, 12.0
WINDOW_S = 30.0  # most that is heard at a time
RATE, FRAME_SAMPLES = 16_000, 512  # of what the VAD hears
LEVELS_PER_FRAME = 4
FRAME_S = FRAME_SAMPLES / RATE
LEVEL_S = FRAME_S / LEVELS_PER_FRAME
PIECE, TOO_SHORT, NO_PAUSE, NO_SPEECH = "piece", "too short", "no pause", "no speech"

_SPEECH_FROM, _SILENCE_BELOW = 0.5, 0.35  # probabilities; between them the state stays
_LEAST_SPEECH_S = 0.06
_LEAST_PAUSE_S, _LEAST_QUIET_S = 0.25, 0.2  # shorter silence may be the closure of a stop within a word
_PAUSE_AT_ANY_LEVEL_S, _BELOW_SPEECH_DB, _MARGIN_S = 0.8, 10.0, 0.2  # where the background is not quiet
_KEPT_SILENCE_S, _KEPT_MORE_S, _LONG_PAUSE_S = 0.25, 0.1, 0.8  # at each end of a piece; more before a long pause
_HARD_PAUSE_S, _HARDEST_PAUSE_S = 1.0, 1.6  # always cut; at the first unless the part before would be too short
_LONGEST_STRETCH_S = 45.0  # of speech without a hard pause
_LOCAL_S = 10.0  # the background is measured this far to both sides
_QUIET_SHARE, _LEAST_RANGE_DB, _MOST_RANGE_DB = 0.3, 6.0, 60.0
_BEST_S = (4.0, 9.0)
_GAP_S = 3.0  # longest silence inside a window
_REFUSED_COST, _PIECE_COST, _SHORT_COST, _LONG_COST, _LONGEST_GAIN_S = 10.0, 0.3, 0.5, 0.3, 0.8

Numbers = npt.NDArray[np.float32]


class Span(NamedTuple):
    """A part of a recording. `kind` is PIECE for a clip, else why it is none. Times are in seconds."""

    start: float
    end: float
    kind: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


class _Utterance(NamedTuple):
    """Speech between two pauses with the silence that a clip keeps, and the length of the pause after it."""

    start: float
    end: float
    pause: float


def plan(probabilities: Numbers, levels_db: Numbers, *, is_start: bool, is_end: bool) -> list[Span]:
    """Return spans from 0 to as far as is certain: later audio cannot change them. At the end that is everything.

    `is_start` says that the recording begins here, `is_end` that it ends here. At any other place, audio that
    begins in speech continues what was set aside before.
    """
    total = len(probabilities) * FRAME_S
    speech = speech_frames(probabilities)
    utterances = _utterances(speech, levels_db, total)
    spans: list[Span] = []
    if utterances and speech[0] and not is_start:
        spans.append(Span(0.0, utterances[0].end, NO_PAUSE))
        utterances = utterances[1:]
    certain = total if is_end else max(0.0, _at_frame(total - 2 * _KEPT_SILENCE_S))
    for stretch in _stretches(utterances):
        parts = _pieces(stretch)
        if not is_end and not _is_closed(stretch):
            if total - stretch[0].start <= _LONGEST_STRETCH_S:
                certain = stretch[0].start
                break
            parts = [part for part in parts if part.end <= total - 2 * LONGEST_S] or parts[:1]
            certain = parts[-1].end
        spans += parts
    return list(_without_gaps(spans, max([certain, *(span.end for span in spans)])))


def windows(pieces: Sequence[Span]) -> list[list[Span]]:
    """Group neighbouring pieces that are heard together, in their order: up to 30 seconds from start to end."""
    groups: list[list[Span]] = []
    for piece in pieces:
        near = groups and piece.start - groups[-1][-1].end <= _GAP_S
        if near and piece.end - groups[-1][0].start <= WINDOW_S:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def speech_frames(probabilities: Numbers) -> npt.NDArray[np.bool_]:
    """True for every frame of speech; two thresholds keep the state from flickering."""
    state, found = False, np.zeros(len(probabilities), bool)
    for at, probability in enumerate(probabilities.tolist()):
        state = probability >= (_SILENCE_BELOW if state else _SPEECH_FROM)
        found[at] = state
    for start, end in runs(found):
        if (end - start) * FRAME_S < _LEAST_SPEECH_S:
            found[start:end] = False
    return found


def runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The first and the one after the last index of every run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _utterances(speech: npt.NDArray[np.bool_], levels_db: Numbers, total: float) -> list[_Utterance]:
    found, start, began = [], 0.0, bool(len(speech) and speech[0])
    for pause in _pauses(speech, levels_db):
        is_first, is_last = pause.first == 0, pause.last == len(speech)
        if began:
            kept = _KEPT_SILENCE_S + _KEPT_MORE_S * (pause.end - pause.start >= _LONG_PAUSE_S)
            end = min(pause.start + kept, total if is_last else pause.left)
            found.append(_Utterance(start, _at_frame(end), pause.end - pause.start))
        start = _at_frame(max(pause.end - _KEPT_SILENCE_S, 0.0 if is_first else pause.right))
        began = not is_last
    return [*found, _Utterance(start, total, 0.0)] if began else found


def _at_frame(seconds: float) -> float:
    """The nearest time between two frames, so that what follows can be analysed by itself."""
    return round(seconds / FRAME_S) * FRAME_S


class _Pause(NamedTuple):
    """Frames without speech, the quiet time in them from start to end, and the last and first places to cut."""

    first: int
    last: int
    start: float
    end: float
    left: float
    right: float


def _pauses(speech: npt.NDArray[np.bool_], levels_db: Numbers) -> Iterator[_Pause]:
    """The places without speech where the level is near the background as well.

    What sounds between two quiet times, such as music, is in no piece.
    """
    for first, last in runs(~speech):
        at_edge, seconds = first == 0 or last == len(speech), (last - first) * FRAME_S
        least = 0.0 if at_edge else _LEAST_QUIET_S
        level, loud, quiet = _background(levels_db, first * LEVELS_PER_FRAME, last * LEVELS_PER_FRAME)
        quiet = [(start, end) for start, end in quiet if end - start >= least - 1e-6]
        if not quiet and (at_edge or (seconds >= _PAUSE_AT_ANY_LEVEL_S and level <= loud - _BELOW_SPEECH_DB)):
            margins = _MARGIN_S * (first > 0), _MARGIN_S * (last < len(speech))
            quiet = [(first * FRAME_S + margins[0], max(first * FRAME_S, last * FRAME_S - margins[1]))]
        if quiet and (at_edge or seconds >= _LEAST_PAUSE_S):
            (start, before), (after, end) = quiet[0], quiet[-1]
            middle = (start + end) / 2
            one = len(quiet) == 1
            yield _Pause(first, last, start, end, middle if one else before, middle if one else after)


def _background(levels_db: Numbers, first: int, last: int) -> tuple[float, float, list[tuple[float, float]]]:
    """The level of a pause, that of the speech around it, and the times in which it is near the background."""
    around = round(_LOCAL_S / LEVEL_S)
    local = levels_db[max(0, first - around) : last + around]
    loud = float(np.percentile(local, 90))
    floor = max(float(np.percentile(local, 10)), loud - _MOST_RANGE_DB)
    here = levels_db[first:last]
    quiet = runs(here <= min(floor + _QUIET_SHARE * (loud - floor), loud - _LEAST_RANGE_DB))
    times = [((first + start) * LEVEL_S, (first + end) * LEVEL_S) for start, end in quiet]
    return float(np.median(here)), loud, times


def _stretches(utterances: Sequence[_Utterance]) -> Iterator[list[_Utterance]]:
    """Utterances that may share a piece."""
    stretch: list[_Utterance] = []
    for utterance in utterances:
        stretch.append(utterance)
        if _is_closed(stretch):
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _is_closed(stretch: Sequence[_Utterance]) -> bool:
    seconds = stretch[-1].end - stretch[0].start
    return stretch[-1].pause >= (_HARD_PAUSE_S if seconds >= SHORTEST_S else _HARDEST_PAUSE_S)


def _pieces(stretch: Sequence[_Utterance]) -> list[Span]:
    """The cheapest way to join utterances: few pieces of good length, cut at long pauses."""
    best: list[tuple[float, int]] = [(0.0, 0)]  # cost up to an utterance, and the first of the last piece
    for last, utterance in enumerate(stretch):
        choices = []
        for first in range(last, -1, -1):
            seconds = utterance.end - stretch[first].start
            if seconds > LONGEST_S and first < last:
                break
            choices.append((best[first][0] + _cost(seconds, utterance.pause), first))
        best.append(min(choices))
    parts, end = [], len(stretch)
    while end:
        start = best[end][1]
        span = Span(stretch[start].start, stretch[end - 1].end, PIECE)
        kind = TOO_SHORT if span.seconds < SHORTEST_S else NO_PAUSE if span.seconds > LONGEST_S else PIECE
        parts.append(span._replace(kind=kind))
        end = start
    return parts[::-1]


def _cost(seconds: float, pause: float) -> float:
    if not SHORTEST_S <= seconds <= LONGEST_S:
        return _REFUSED_COST
    shape = _SHORT_COST * max(0.0, _BEST_S[0] - seconds) + _LONG_COST * max(0.0, seconds - _BEST_S[1])
    return _PIECE_COST + shape - min(pause, _LONGEST_GAIN_S)


def _without_gaps(spans: Sequence[Span], until: float) -> Iterator[Span]:
    at = 0.0
    for span in spans:
        if span.start > at:
            yield Span(at, span.start, NO_SPEECH)
        yield span
        at = span.end
    if until > at:
        yield Span(at, until, NO_SPEECH)
