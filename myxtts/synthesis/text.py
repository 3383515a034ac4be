"""Text to sentences of token ids, and the check of the codes that are generated for them.

The text front end splits a text into sentences, normalises them, replaces characters the vocabulary lacks, and
keeps every sentence within what the model can say in one go. Text that cannot be spoken raises an error that says
why. Knows no weights and no audio.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from myxtts.config import LANGUAGES, SAMPLE_RATE, SAMPLES_PER_CODE
from myxtts.errors import ConfigError
from myxtts.model.gpt import GPTDims
from myxtts.synthesis.generation import MAX_NEW_CODES
from myxtts.text.normalize import normalize, phonemize
from myxtts.text.tables import LanguageTable, load_table
from myxtts.text.tokenizer import Tokenizer, describe_characters

CODES_PER_SECOND = SAMPLE_RATE / SAMPLES_PER_CODE
FASTEST, SLOWEST = 36.0, 6.0
"""Limits of the speaking rate, in characters per second; about 15 are usual."""
PAUSES_SECONDS = 1.5
"""Allowance for silence before, after and within a sentence."""
LONGEST_PERIOD, REPEATED_CODES, REPETITIONS = 32, 32, 3
"""A loop repeats up to 32 codes (1.5 s) at least three times in a row, and lasts at least 32 codes."""

PROBLEMS = (None, "too short", "repetition", "run-away", "empty")
"""Problems of the codes of a sentence, the mildest first."""
_, TOO_SHORT, REPETITION, RUN_AWAY, EMPTY = PROBLEMS


class Bounds(NamedTuple):
    """The plausible number of codes of a sentence."""

    fewest: int
    most: int


def bounds(num_characters: int, max_codes: int) -> Bounds:
    """Bounds for a sentence of so many characters, by a model that generates at most `max_codes`."""
    fewest = max(1, math.floor(num_characters / FASTEST * CODES_PER_SECOND))
    most = math.ceil((PAUSES_SECONDS + num_characters / SLOWEST) * CODES_PER_SECOND)
    return Bounds(min(fewest, max_codes), min(most, max_codes))


def find_problem(codes: Sequence[int], limits: Bounds) -> str | None:
    """The worst problem of a whole sentence, one of `PROBLEMS`."""
    if not codes:
        return EMPTY
    if len(codes) >= limits.most:
        return RUN_AWAY
    if has_loop(codes):
        return REPETITION
    return TOO_SHORT if len(codes) < limits.fewest else None


def has_loop(codes: Sequence[int]) -> bool:
    """True if some stretch of the codes repeats in a row."""
    return any(
        _longest_echo(codes, period) + period >= max(REPEATED_CODES, REPETITIONS * period)
        for period in range(1, LONGEST_PERIOD + 1)
    )


def _longest_echo(codes: Sequence[int], period: int) -> int:
    """The longest run of codes that equal those `period` places before them."""
    longest = run = 0
    for code, earlier in zip(codes[period:], codes, strict=False):
        run = run + 1 if code == earlier else 0
        longest = max(longest, run)
    return longest


def ends_in_loop(codes: Sequence[int], num_added: int) -> bool:
    """True if the last `num_added` codes may have closed a loop; looks no further back than that needs."""
    return has_loop(codes[-(REPETITIONS * LONGEST_PERIOD + num_added) :])


SHORT_SHARE = 0.1
"""Sentences shorter than this share of the limit are joined to a neighbour: alone they come out badly."""

_QUESTIONS, _WIDE_ENDS = "!?…؟।॥۔", "。！？｡"
_CLOSING = "\"'”’»›)\\]」』】"
_END = re.compile(rf"[.{_QUESTIONS}{_WIDE_ENDS}]+[{_CLOSING}]*")
_OPENING = re.compile(r"[\s\"'“‘„«‹(\[「『【¿¡–—-]*")
_PARAGRAPHS = re.compile(r"\n\s*\n|[\u2028\u2029]+")
_INITIAL = re.compile(r"(?:^|[^\w.])[^\W\d_]\.$|\w\.\w{1,3}\.$")
"""A single letter or dots inside a word: J. R. Smith, z. B., U.S., ه.ش."""
_NUMBER = re.compile(r"(?:^|[^\w.,])\d+\.$")
_LOOK_BACK = 24
"""Characters before a dot to search for an abbreviation; none is longer."""
_BREAKS = (
    re.compile(rf"[.{_QUESTIONS}]+[{_CLOSING}]*(?=\s)|[{_WIDE_ENDS}]+"),
    re.compile(r"[;:](?=\s)|[؛；：]|(?<=\s)[–—-]+(?=\s)"),
    re.compile(r",(?=\s)|[،，、]|[)»”](?=\s)"),
    re.compile(r"\s"),
)
"""Where a sentence that is too long may be cut, best places first."""


def split(text: str, language: str, limit: int) -> list[str]:
    """Split a text into sentences of at most `limit` characters, none of them empty."""
    pieces: list[str] = []
    for paragraph in _PARAGRAPHS.split(text):
        whole = [piece for sentence in _sentences(paragraph, language) for piece in shorten(sentence, limit)]
        pieces += _join_short(whole, limit)
    return pieces


def shorten(sentence: str, limit: int) -> list[str]:
    """Cut a sentence near its middle until no piece exceeds `limit` characters."""
    sentence = sentence.strip()
    if len(sentence) <= limit:
        return [sentence] if sentence else []
    cut = _cut(sentence)
    return shorten(sentence[:cut], limit) + shorten(sentence[cut:], limit)


def _cut(sentence: str) -> int:
    """Index after the best break in the middle half of the sentence, the one nearest to the middle."""
    length = len(sentence)
    for mark in _BREAKS:
        ends = [match.end() for match in mark.finditer(sentence, length // 4, 3 * length // 4)]
        if inside := [end for end in ends if 0 < end < length]:
            return min(inside, key=lambda end: abs(2 * end - length))
    cut = max(1, length // 2)
    while cut < length - 1 and _joins_previous(sentence[cut]):
        cut += 1
    return cut


def _joins_previous(character: str) -> bool:
    """True for accents, joiners and variation selectors."""
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
    """Decides which punctuation marks of a text end a sentence."""

    def __init__(self, text: str, language: str) -> None:
        self._text = text
        self._is_abbreviation, self._ordinal = _dots_of(language)
        # In a text without capitals, a lower-case letter after a dot says nothing.
        self._has_capitals = any(map(str.isupper, text))

    def sentence(self, match: re.Match[str], start: int) -> bool:
        """True if a match of `_END` ends the sentence that began at `start`."""
        text, marks, end = self._text, match[0], match.end()
        if end == len(text) or any(mark in _WIDE_ENDS for mark in marks):
            return True
        only_dots = not any(mark in _QUESTIONS for mark in marks)
        if not text[end].isspace():
            return self._ends_without_space(match.start(), end, only_dots)
        opening = _OPENING.match(text, end)
        following = text[opening.end() : opening.end() + 1] if opening else ""
        if following.islower() and self._has_capitals:
            return False
        return not (only_dots and marks.startswith(".") and self._belongs_to_word(match.start(), start))

    def _ends_without_space(self, mark: int, end: int, only_dots: bool) -> bool:
        """Persian and similar scripts are often typed without a space after the mark."""
        before = self._text[max(0, mark - 2) : mark] if only_dots else ""
        is_abbreviation = only_dots and len(before) < 2
        around = before + self._text[end]
        return not is_abbreviation and all(unicodedata.category(letter) == "Lo" for letter in around)

    def _belongs_to_word(self, mark: int, start: int) -> bool:
        """True if a dot is part of an abbreviation, an initial, an ordinal or the number of a list item."""
        text = self._text
        before = text[max(start, mark + 1 - _LOOK_BACK) : mark + 1]
        if _NUMBER.search(before):
            is_item = before.strip()[:-1].isdigit()
            return is_item or (self._ordinal is not None and self._ordinal.match(text, mark) is not None)
        follows_number = text[mark + 1 :].lstrip()[:1].isdigit()
        return bool(_INITIAL.search(before)) or self._is_abbreviation(before.lower(), follows_number)


@cache
def _dots_of(language: str) -> tuple[Callable[[str, bool], bool], re.Pattern[str] | None]:
    """A test for abbreviations (some only before a number), and the pattern of ordinals with a dot."""
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


FULL_LIMIT_CODES = 400
"""Codes of a sentence of `max_characters`; models that know fewer get shorter sentences."""
_SHOWN = 8


class UnspeakableText(ConfigError):
    """A text with nothing that this model could say."""


@dataclass(frozen=True)
class Limits:
    """The longest sentence of a model: for XTTS-v2 by its positions, for others by what they were trained on."""

    max_ids: int
    max_codes: int

    @classmethod
    def of(cls, dims: GPTDims) -> Limits:
        """The limits of the GPT's positions."""
        return cls(dims.max_text, min(MAX_NEW_CODES, dims.max_codes))

    def characters(self, language: str) -> int:
        """The most characters of one sentence."""
        return max(8, int(load_table(language).max_characters * min(1.0, self.max_codes / FULL_LIMIT_CODES)))


class Sentence(NamedTuple):
    """One sentence of a text, ready to be spoken."""

    number: int
    """Its place in the text, which decides its random numbers."""
    text: str
    """As the user wrote it."""
    ids: list[int]
    bounds: Bounds


class TextFrontend:
    """Turns texts into sentences for one vocabulary."""

    def __init__(self, vocabulary: Tokenizer, limits: Limits, *, use_phonemes: bool = False) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._use_phonemes = use_phonemes

    def language_code(self, language: str) -> str:
        """The language without its region; an error if we or the vocabulary do not support it."""
        code = re.split("[-_]", language.strip().lower())[0]
        if code not in LANGUAGES:
            raise ConfigError(f"language {language!r} is not supported; use one of {', '.join(LANGUAGES)}")
        if code not in self._vocabulary.languages:
            known = ", ".join(sorted(self._vocabulary.languages & set(LANGUAGES)))
            raise ConfigError(
                f"This model does not speak {language!r}, it speaks {known}. To teach it, extend its vocabulary "
                "(myxtts vocabulary extend) and train it on recordings."
            )
        return code

    def sentences(self, text: str, language: str) -> tuple[list[Sentence], dict[str, str]]:
        """Return the sentences of a text, and replacements for characters the vocabulary lacks.

        A replacement is the letter without its accent, or "" for a character that is left out. `language` is a
        result of `language_code`.
        """
        sentences: list[Sentence] = []
        replaced: dict[str, str] = {}
        num_lost = num_letters = 0
        pending = split(text, language, self._limits.characters(language))[::-1]
        while pending:
            piece = pending.pop()
            words = normalize(piece, language)
            spoken = phonemize([words], language)[0] if self._use_phonemes and words else words
            for character in self._vocabulary.unknown_characters(spoken, language):
                replaced.setdefault(character, self._replacement(character, language))
            ids = self._encode("".join(replaced.get(character, character) for character in spoken), language)
            if len(ids) > self._limits.max_ids:
                if len(piece) == 1:
                    raise UnspeakableText(
                        f"{piece!r} alone needs {len(ids)} tokens; the model takes {self._limits.max_ids}."
                    )
                pending += shorten(piece, (len(piece) + 1) // 2)[::-1]
                continue
            letters = [character for character in spoken if character.isalnum()]
            num_lost += sum(not replaced.get(letter, letter) for letter in letters)
            num_letters += len(letters)
            if ids:
                limits = bounds(len(words), self._limits.max_codes)
                sentences.append(Sentence(len(sentences), piece, ids, limits))
        if not num_letters:
            raise UnspeakableText(
                f"There is nothing to say: {text.strip()[:40]!r} has neither letters nor digits."
            )
        if 2 * num_lost > num_letters or not sentences:
            dropped = [character for character, said in replaced.items() if not said][:_SHOWN]
            raise UnspeakableText(
                f"The vocabulary lacks {num_lost} of the {num_letters} letters of the text in language "
                f"{language!r}: {describe_characters(dropped)} …\n"
                "Is the text written in that language, and was the model trained on it?"
            )
        return sentences, replaced

    def _encode(self, spoken: str, language: str) -> list[int]:
        """Token ids; none if there is no letter or digit."""
        if not any(map(str.isalnum, spoken)):
            return []
        (ids,) = self._vocabulary.encode_batch([" ".join(spoken.split())], [language])
        return ids

    def _replacement(self, character: str, language: str) -> str:
        plain = unicodedata.normalize("NFKD", character)[0]
        has_plain = plain.isalnum() and not self._vocabulary.unknown_characters(plain, language)
        return plain if has_plain else ""
