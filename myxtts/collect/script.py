"""Transcripts and scripts: compares two hearings of the same speech, and finds what was said in a script.

Everything is aligned by words, never by a recogniser's times. Pure: knows no audio or models.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from myxtts.errors import ConfigError
from myxtts.text.normalize import normalize

AGREES_UP_TO = 0.25  # error rate up to which a script's words replace those that were heard
FOREIGN_BELOW = 0.2  # share of clips found in a script below which it is of something else
_LEAST_FOUND = 5  # clips that prove that a script is of something else
_ARABIC_MARKS = "\u064b\u064c\u064d\u064e\u064f\u0650\u0651\u0652\u0640"
_SPELLED_ALIKE = str.maketrans({"’": "'", "\u200c": " ", "ي": "ی", "ك": "ک"} | dict.fromkeys(_ARABIC_MARKS, ""))
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # kana and Chinese characters: each is a word
_WORDS = re.compile(rf"[{_UNSPACED}][^\w\s]*|[^\s{_UNSPACED}]+")
_CUE_LINES = re.compile(r"^WEBVTT.*$|^(?:[ \t]*\d+[ \t]*\n)?[ \t]*[\d:.,]+[ \t]*-->.*$", re.MULTILINE)
_COMMENTS = re.compile(r"(?<=\n\n)NOTE\b.*?(?=\n\n|\Z)", re.DOTALL)  # of WebVTT
_TAG = re.compile(r"<[^>]*>|\{\\[^}]*\}")
_GRAM, _SLACK, _SPREAD = 3, 6, 3


def plain(text: str) -> str:
    """A text in the form that is compared: lower-case letters, marks and digits, single spaces."""
    text = unicodedata.normalize("NFKC", text).lower().translate(_SPELLED_ALIKE)
    kept = (letter if unicodedata.category(letter)[0] in "LMN" or letter == "'" else " " for letter in text)
    return " ".join("".join(kept).split())


def words_of(text: str) -> list[str]:
    """The words of a text with their punctuation; kana and Chinese characters are words of one character."""
    return _WORDS.findall(text)


def edit_distance(one: str, other: str) -> int:
    """Insertions, deletions and substitutions between two strings (Myers' bit vectors)."""
    if not one:
        return len(other)
    where: dict[str, int] = defaultdict(int)
    for place, letter in enumerate(one):
        where[letter] |= 1 << place
    mask, last = (1 << len(one)) - 1, 1 << (len(one) - 1)
    plus, minus, distance = mask, 0, len(one)
    for letter in other:
        match = where.get(letter, 0)
        vertical = match | minus
        horizontal = (((match & plus) + plus) ^ plus) | match
        up, down = minus | ~(horizontal | plus) & mask, plus & horizontal
        distance += bool(up & last) - bool(down & last)
        up, down = (up << 1 | 1) & mask, (down << 1) & mask
        plus, minus = down | ~(vertical | up) & mask, up & vertical
    return distance


def error_rate(text: str, heard: str, language: str) -> float:
    """The character errors between two texts as a share of the first; "14" and "fourteen" are the same."""
    both = (normalize(said, language) if re.search(r"\d", said) else said for said in (text, heard))
    one, other = (plain(said).replace(" ", "") for said in both)
    if not one:
        return 0.0 if not other else 1.0
    return min(1.0, edit_distance(one, other) / len(one))


def divide(text: str, parts: Sequence[str]) -> list[str]:
    """Divide a transcript among the clips whose own transcripts are `parts`, so that the fewest letters differ."""
    words = words_of(text)
    own = [plain(part).replace(" ", "") for part in parts]
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, (0,))}
    for number, choices in enumerate(_bounds(words, parts)):
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for end in choices:
            found[end] = min(
                (cost + edit_distance(own[number], _letters(words[start:end])), (*path, end))
                for start, (cost, path) in best.items()
                if start <= end
            )
        best = found
    (_, path), *_ = best.values()
    return [_joined(words[first:last]) for first, last in pairwise(path)]


def _bounds(words: Sequence[str], parts: Sequence[str]) -> list[list[int]]:
    """Where each part may end: one place if the words around it are the same in both, else several."""
    keys = [plain(word) for word in words]
    owned = [[plain(word) for word in words_of(part)] for part in parts]
    others = [key for part in owned for key in part]
    opcodes = SequenceMatcher(None, keys, others, autojunk=False).get_opcodes()
    found, at, before = [], 0, 0
    for part in owned[:-1]:
        at += len(part)
        near = [code for code in opcodes if code[3] <= at <= code[4]]
        if any(code[0] == "equal" and code[3] < at < code[4] for code in near):
            choices = [code[1] + at - code[3] for code in near if code[0] == "equal"][:1]
        else:
            low = min((code[1] for code in near), default=0) - _SPREAD
            high = max((code[2] for code in near), default=len(words)) + _SPREAD
            choices = list(range(max(before, low), max(before, min(len(words), high)) + 1))
        before = choices[0]
        found.append(choices)
    return [*found, [len(words)]]


def _letters(words: Sequence[str]) -> str:
    return plain(" ".join(words)).replace(" ", "")


def _joined(words: Sequence[str]) -> str:
    """Words with spaces between them, except between characters that are written without."""
    return re.sub(rf"(?<=[{_UNSPACED}、。！？]) (?=[{_UNSPACED}])", "", " ".join(words)).strip()


def read_script(path: Path) -> str:
    """The text of a script; of subtitles, only the words."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"The script {path} cannot be read: {why}") from None
    if path.suffix.lower() in (".srt", ".vtt"):
        text = "\n".join(text.splitlines())
        text = _COMMENTS.sub("", text) if path.suffix.lower() == ".vtt" else text
        text = _TAG.sub("", _CUE_LINES.sub("", text))
    return text


class Found(NamedTuple):
    """What a script says where a clip is: its text, and the error rate of what was heard."""

    text: str
    error: float
    end: int


class Script:
    """A text whose words can be found by what was heard."""

    def __init__(self, text: str) -> None:
        self._words = words_of(text)
        self._keys = [plain(word) for word in self._words]
        self._places: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for place in range(len(self._keys) - _GRAM + 1):
            self._places[tuple(self._keys[place : place + _GRAM])].append(place)

    def find(self, heard: str, language: str, expected: int = 0) -> Found | None:
        """Find a clip; of several places the one nearest after `expected`. None if the script does not agree."""
        spellings = [heard, normalize(heard, language)] if re.search(r"\d", heard) else [heard]
        tried = [found for said in spellings if (found := self._find(said, expected)) is not None]
        best = min(tried, key=lambda found: found.error, default=None)
        return best if best is not None and best.error <= AGREES_UP_TO else None

    def _find(self, heard: str, expected: int) -> Found | None:
        keys = [plain(word) for word in words_of(heard)]
        votes: Counter[int] = Counter()
        for place in range(len(keys) - _GRAM + 1):
            for there in self._places.get(tuple(keys[place : place + _GRAM]), ()):
                votes[there - place] += 1
        near = [expected] if len(keys) < 2 * _GRAM else []
        most = max(votes.values(), default=0)
        places = [place for place, count in votes.items() if count == most] + near
        tried = (self._around(keys, place) for place in sorted(places, key=lambda at: _distance(at, expected))[:4])
        return min((found for found in tried if found is not None), key=lambda found: found.error, default=None)

    def _around(self, keys: Sequence[str], place: int) -> Found | None:
        """The words near a place that agree best with what was heard."""
        first = max(0, place - _SLACK)
        there = self._keys[first : place + len(keys) + _SLACK]
        blocks = SequenceMatcher(None, keys, there, autojunk=False).get_matching_blocks()[:-1]
        if not blocks or not keys:
            return None
        longest = max(blocks, key=lambda block: block.size)
        shifts = {place, *(first + block.b - block.a for block in (blocks[0], longest, blocks[-1]))}
        near = [shift + step for shift in shifts for step in range(-_SPREAD, _SPREAD + 1)]
        starts, ends = {at for at in near if at >= 0}, {at + len(keys) for at in near}
        said = "".join(keys).replace(" ", "")
        choices = [
            (edit_distance(said, _letters(self._words[one:other])), abs(one - place), one, other)
            for one, other in itertools.product(starts, ends)
            if one < other <= len(self._words)
        ]
        if not choices:
            return None
        edits, _, one, other = min(choices)
        return Found(_joined(self._words[one:other]), edits / max(1, len(said)), other)


def _distance(place: int, expected: int) -> int:
    """Going back in a script is less likely than going on."""
    return max(place - expected, 2 * (expected - place))


def is_foreign(num_found: int, num_clips: int) -> bool:
    """True if so few clips are in a script that it must be of another book or language."""
    return num_clips >= _LEAST_FOUND and num_found < FOREIGN_BELOW * num_clips


def is_said_twice(text: str) -> bool:
    """True if a text is one that is said twice in a row."""
    words = words_of(text)
    halves = [" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])]
    return is_repeated(halves[0], halves[1:]) and is_repeated(halves[1], halves[:1])


def is_repeated(text: str, following: Sequence[str], most_error: float = 0.2) -> bool:
    """True if a text is said again, whole, in the texts that follow it."""
    said, later = (plain(part).replace(" ", "") for part in (text, " ".join(following)))
    if len(words_of(plain(text))) < _GRAM and len(said) < 4 * _GRAM:
        return False
    found = SequenceMatcher(None, said, later, autojunk=False).find_longest_match()
    if found.size < 0.3 * len(said):
        return False
    start = max(0, found.b - found.a)
    return edit_distance(said, later[start : start + len(said)]) <= most_error * len(said)
