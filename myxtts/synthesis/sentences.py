"""Text cut into pieces that XTTS can say in one go: at the ends of sentences, else at commas, else between words.

Pure functions from text to texts. What ends a sentence depends on the language: its abbreviations and ordinals are
those of the tables that `text` reads aloud. This module does not know how many tokens a piece becomes.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache

from myxtts.text.tables import LanguageTable, load_table

CHARACTER_LIMITS = {
    "en": 250, "de": 253, "fr": 273, "es": 239, "it": 213, "pt": 203, "pl": 224, "zh": 82, "ar": 166, "cs": 186,
    "ru": 182, "nl": 251, "tr": 226, "ja": 71, "hu": 224, "ko": 95, "hi": 150, "fa": 166,
}  # fmt: skip
"""The most characters of one piece, as XTTS-v2 was published: about eighteen seconds in every language. Persian,
which it does not know, gets Arabic's, for neither writes its short vowels."""
SHORT_SHARE = 0.1
"""Sentences shorter than this share of the limit are said together with a neighbour: alone they come out badly."""

_QUESTIONS, _WIDE_ENDS = "!?…؟।॥۔", "。！？｡"
_CLOSING = "\"'”’»›)\\]」』】"
_END = re.compile(rf"[.{_QUESTIONS}{_WIDE_ENDS}]+[{_CLOSING}]*")
_OPENING = re.compile(r"[\s\"'“‘„«‹(\[「『【¿¡–—-]*")
_PARAGRAPHS = re.compile(r"\n\s*\n|[\u2028\u2029]+")
_INITIAL = re.compile(r"(?:^|[^\w.])[^\W\d_]\.$|\w\.\w{1,3}\.$")
"""A letter by itself or dots inside a word: J. R. Smith, z. B., U.S., ه.ش."""
_NUMBER = re.compile(r"(?:^|[^\w.,])\d+\.$")
_LOOK_BACK = 24
"""Characters before a dot that are looked at; no abbreviation is longer."""
_BREAKS = (
    re.compile(rf"[.{_QUESTIONS}]+[{_CLOSING}]*(?=\s)|[{_WIDE_ENDS}]+"),
    re.compile(r"[;:](?=\s)|[؛；：]|(?<=\s)[–—-]+(?=\s)"),
    re.compile(r",(?=\s)|[،，、]|[)»”](?=\s)"),
    re.compile(r"\s"),
)
"""Where a sentence that is too long may be cut, the best places first."""


def split(text: str, language: str, limit: int) -> list[str]:
    """The text in pieces of at most `limit` characters, in order; none is empty."""
    pieces: list[str] = []
    for paragraph in _PARAGRAPHS.split(text):
        whole = [piece for sentence in _sentences(paragraph, language) for piece in shorten(sentence, limit)]
        pieces += _join_short(whole, limit)
    return pieces


def shorten(sentence: str, limit: int) -> list[str]:
    """One sentence in pieces of at most `limit` characters, cut near the middle again and again."""
    sentence = sentence.strip()
    if len(sentence) <= limit:
        return [sentence] if sentence else []
    cut = _cut(sentence)
    return shorten(sentence[:cut], limit) + shorten(sentence[cut:], limit)


def _cut(sentence: str) -> int:
    """Where the second half begins: behind the best mark within the middle half, nearest to the middle."""
    length = len(sentence)
    for mark in _BREAKS:
        ends = [match.end() for match in mark.finditer(sentence, length // 4, 3 * length // 4)]
        if inside := [end for end in ends if 0 < end < length]:
            return min(inside, key=lambda end: abs(2 * end - length))
    cut = max(1, length // 2)
    while cut < length - 1 and _clings(sentence[cut]):
        cut += 1
    return cut


def _clings(character: str) -> bool:
    """Whether a character belongs to the one before it: accents, joiners, variation selectors."""
    return unicodedata.category(character) in ("Mn", "Mc", "Me", "Cf")


def _sentences(paragraph: str, language: str) -> Iterator[str]:
    text = " ".join(paragraph.split())
    ends = _Ends(text, language)
    start = 0
    for match in _END.finditer(text):
        if ends.sentence(match, start):
            yield text[start : match.end()].strip()
            start = match.end()
    if rest := text[start:].strip():
        yield rest


class _Ends:
    """Decides which marks of a text end a sentence."""

    def __init__(self, text: str, language: str) -> None:
        self._text = text
        self._is_abbreviation, self._ordinal = _dots_of(language)
        # Where nothing is written in capitals, a small letter behind a dot says nothing.
        self._has_capitals = any(map(str.isupper, text))

    def sentence(self, match: re.Match[str], start: int) -> bool:
        """Whether a match of `_END` ends the sentence that began at `start`."""
        text, marks, end = self._text, match[0], match.end()
        if end == len(text) or any(mark in _WIDE_ENDS for mark in marks):
            return True
        only_dots = not any(mark in _QUESTIONS for mark in marks)
        if not text[end].isspace():
            return self._is_glued(match.start(), end, only_dots)
        opening = _OPENING.match(text, end)
        following = text[opening.end() : opening.end() + 1] if opening else ""
        if following.islower() and self._has_capitals:
            return False
        return not (only_dots and marks.startswith(".") and self._belongs_to_word(match.start(), start))

    def _is_glued(self, mark: int, end: int, only_dots: bool) -> bool:
        """Persian and its neighbours are often typed without a blank behind the mark."""
        before = self._text[max(0, mark - 2) : mark] if only_dots else ""
        is_abbreviation = only_dots and len(before) < 2
        around = before + self._text[end]
        return not is_abbreviation and all(unicodedata.category(letter) == "Lo" for letter in around)

    def _belongs_to_word(self, mark: int, start: int) -> bool:
        """Whether a dot is part of an abbreviation, an initial, an ordinal or the number of an item."""
        text = self._text
        before = text[max(start, mark + 1 - _LOOK_BACK) : mark + 1]
        if _NUMBER.search(before):
            is_item = before.strip()[:-1].isdigit()
            return is_item or (self._ordinal is not None and self._ordinal.match(text, mark) is not None)
        follows_number = text[mark + 1 :].lstrip()[:1].isdigit()
        return bool(_INITIAL.search(before)) or self._is_abbreviation(before.lower(), follows_number)


@cache
def _dots_of(language: str) -> tuple[Callable[[str, bool], bool], re.Pattern[str] | None]:
    """Tests for dots that end no sentence: abbreviations (some only before a number), and ordinals."""
    table: LanguageTable = load_table(language)
    always, before_number = (
        re.compile(rf"(?:^|\W)(?:{'|'.join(map(re.escape, words)) or '(?!)'})$")
        for words in (table.abbreviations, table.before_number)
    )

    def is_abbreviation(before: str, follows_number: bool) -> bool:
        return bool(always.search(before) or (follows_number and before_number.search(before)))

    return is_abbreviation, re.compile(table.ordinal) if r"\." in table.ordinal else None


def _join_short(pieces: list[str], limit: int) -> list[str]:
    joined: list[str] = []
    shortest = limit * SHORT_SHARE
    for piece in pieces:
        is_short = joined and min(len(joined[-1]), len(piece)) < shortest
        if is_short and len(joined[-1]) + 1 + len(piece) <= limit:
            joined[-1] += f" {piece}"
        else:
            joined.append(piece)
    return joined
