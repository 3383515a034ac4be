"""When each word of a sentence is said, from the attention of the GPT that said it.

The codes of a sentence are run through the GPT once more, all at the same time. One head looks at the text token
that is being said; the best monotonic path through its attention gives every token its codes. In a pause it
already looks at the next word, so the edges of words are moved to those of silence nearby. docs/speaking.md says
how exact the times are. The same head tells when a text was said. A GPT without such a head gives neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from myxtts.audio import Wave
from myxtts.model.gpt import GPT, Said, sharpest, text_attention
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.text.normalize import normalize
from myxtts.text.tables import load_table

SPACE_ID = 2  # in every vocabulary of XTTS
LEAST_CERTAINTY = 0.2  # geometric mean of the attention along the path; with the base model it is 0.4 to 0.6
LATE_CODES = 0.7  # sound of a code begins so much later than its place: measured on the base model
_MOST_SKIPPED = 4  # tokens that are passed within one code
_FLOOR = 1e-3  # of the attention, so that a path may cross tokens that are hardly looked at
_WINDOW_S, _QUIET, _SHORTEST_SILENCE_S = 0.01, 0.02, 0.1
"""Windows below a share of the loudest one are quiet; so many of them are a silence, not a plosive."""
_BEFORE_S, _AFTER_S = 0.12, 0.03  # an edge of words so near to a silence belongs to it
_SHORTEST_WORD_S = 0.06

LEAST_LOOK = 0.5  # of the attention of a code that says the text; once the text is said, it falls to about 0.1
LEAST_FORWARD = 0.9  # of the steps from code to code: they do not go back in the text
TAIL_CODES = 4  # after the text: its sound ends, and nothing new has begun
USUAL_TAIL_CODES = 16  # within which a sentence ends by itself: 12 to 14 with the base model

Times = npt.NDArray[np.float64]


class Word(NamedTuple):
    """A word as it was written, and when it is said, in seconds from the start of its sentence."""

    text: str
    start_s: float
    end_s: float


def token_of_each_code(attention: Tensor) -> tuple[npt.NDArray[np.int64], float]:
    """The text token that is said in each code [codes], and how certain the path is, from 0 to 1.

    `attention` [heads, codes, ids] is that of `text_attention`; of all heads the sharpest is used.
    """
    head = sharpest(attention)
    weights = (head / head.sum(-1, keepdim=True).clamp(min=1e-6)).cpu().numpy().astype(np.float64)
    log = np.log(np.clip(weights, _FLOOR, 1.0))
    num_codes, num_ids = log.shape
    best = np.full(num_ids, -np.inf)
    best[:_MOST_SKIPPED] = log[0, :_MOST_SKIPPED]
    steps = np.zeros(log.shape, np.int64)
    for code in range(1, num_codes):
        shifted = [np.concatenate([np.full(by, -np.inf), best])[:num_ids] for by in range(_MOST_SKIPPED + 1)]
        steps[code] = np.argmax(shifted, axis=0)
        best = np.max(shifted, axis=0) + log[code]
    last = max(0, num_ids - _MOST_SKIPPED)
    place = last + int(np.argmax(best[last:]))
    certainty = float(np.exp(best[place] / num_codes))
    path = np.zeros(num_codes, np.int64)
    for code in range(num_codes - 1, -1, -1):
        path[code] = place
        place -= int(steps[code, place])
    return path, certainty


def ends_of_texts(gpt: GPT, sentences: Sequence[Said]) -> list[int | None]:
    """How many codes say each text; None if they do not reach its end, or if this GPT does not show it.

    The head that reads goes through the text once, and hardly looks at it any more when it was said.
    """
    heads = [sharpest(attention) for attention in text_attention(gpt, *sentences)]
    numbers = torch.cat([part for head in heads for part in (head.sum(-1), head.argmax(-1).float())]).cpu().numpy()
    found, at = list[int | None](), 0
    for said, head in zip(sentences, heads, strict=True):
        looks, tokens = numbers[at : at + 2 * len(head)].reshape(2, -1)
        found.append(_end_of_text(looks >= LEAST_LOOK, tokens.astype(np.int64), len(said.ids)))
        at += 2 * len(head)
    return found


def _end_of_text(looks: npt.NDArray[np.bool_], tokens: npt.NDArray[np.int64], num_ids: int) -> int | None:
    """The end by whether each code looks at the text, and at which token."""
    last = np.flatnonzero(looks & (tokens >= num_ids - 2))  # the last letter or the full stop
    elsewhere = np.flatnonzero(~looks[:-1] & ~looks[1:])
    after = elsewhere[elsewhere > last[0]] if len(last) else elsewhere[:0]
    if not len(after):
        return None
    read = tokens[: after[0]][looks[: after[0]]]
    has_read = len(read) > 1 and len(set(read.tolist())) >= num_ids / 2
    return int(after[0]) if has_read and (np.diff(read) >= 0).mean() >= LEAST_FORWARD else None


def word_times(
    gpt: GPT, voice: Tensor, text: str, language: str, ids: Sequence[int], codes: Sequence[int], wave: Wave
) -> tuple[Word, ...]:
    """The words of a spoken sentence; none if the text has no spaces, or if they cannot be told apart.

    `ids` and `codes` are what the model read and said, `wave` is its sound at any speed.
    """
    written, num_said = _written_words(text, language)
    spaces = np.cumsum(np.asarray(ids) == SPACE_ID)
    if not written or not codes or not len(wave) or num_said != int(spaces[-1]) + 1:
        return ()
    (attention,) = text_attention(gpt, Said(voice, ids, codes))
    path, certainty = token_of_each_code(attention)
    if certainty < LEAST_CERTAINTY:
        return ()
    # A space belongs to the word before it: the sound of the next one has not begun.
    said = np.where(np.asarray(ids) == SPACE_ID, spaces - 1, spaces)[path]
    places = np.searchsorted(said, [first for _, first in written])
    seconds = len(wave) / OUTPUT_SAMPLE_RATE
    edges = np.minimum((places + LATE_CODES) * seconds / len(codes), seconds)
    starts, ends = _moved_to_silence(np.array([0.0, *edges[1:], seconds]), wave)
    return tuple(Word(word, *times) for (word, _), *times in zip(written, starts, ends, strict=True))


def _written_words(text: str, language: str) -> tuple[list[tuple[str, int]], int]:
    """The words as written, each with the number of words said before it, and how many are said in all.

    A word that adds nothing to what is said stays with its neighbour. None if the language has no spaces.
    """
    found: list[tuple[str, int]] = []
    num_said, words = 0, text.split() if load_table(language).word_space else []
    for last in range(len(words)):
        before, num_said = num_said, max(num_said, len(normalize(" ".join(words[: last + 1]), language).split()))
        if found and (num_said == before or found[-1][1] == before):
            found[-1] = (f"{found[-1][0]} {words[last]}", found[-1][1])
        else:
            found.append((words[last], before))
    return found, num_said


def _moved_to_silence(edges: Times, wave: Wave) -> tuple[list[float], list[float]]:
    """Starts and ends of words, given their edges: an edge in or near a silence becomes the two ends of it."""
    starts, ends, last = edges[:-1].tolist(), edges[1:].tolist(), float(edges[-1])
    silences = _silences(wave)
    for place, edge in enumerate(edges.tolist()):
        near = [one for one in silences if one[0] - _BEFORE_S <= edge <= one[1] + _AFTER_S]
        if 0 < place < len(starts):  # the first and the last silence are before and after all words
            near = [one for one in near if one[0] > 0 and one[1] < last]
        if not near:
            continue
        begins, stops = max(near, key=lambda one: one[1] - one[0])
        if place < len(starts):
            starts[place] = stops
        if place:
            ends[place - 1] = begins
    for place in range(len(starts)):  # two edges may be near to the same silence
        starts[place] = min(last, max([starts[place], *ends[max(0, place - 1) : place]]))
        ends[place] = min(last, max(ends[place], starts[place] + _SHORTEST_WORD_S))
    return starts, ends


def _silences(wave: Wave) -> list[tuple[float, float]]:
    """The silent stretches of a sentence, in seconds."""
    size = round(_WINDOW_S * OUTPUT_SAMPLE_RATE)
    windows = np.pad(wave, (0, -len(wave) % size)).reshape(-1, size)
    loudness = np.sqrt(np.square(windows, dtype=np.float64).mean(1))
    quiet = np.concatenate([[False], loudness < _QUIET * loudness.max(), [False]])
    changes = np.flatnonzero(quiet[1:] != quiet[:-1]) * _WINDOW_S
    pairs = zip(
        changes[::2].tolist(), np.minimum(changes[1::2], len(wave) / OUTPUT_SAMPLE_RATE).tolist(), strict=True
    )
    return [(begins, stops) for begins, stops in pairs if stops - begins >= _SHORTEST_SILENCE_S]
