"""From text to sentences of token ids: cut, normalised, spelled with what the vocabulary has, none too long.

Whatever cannot be spoken is an error that says why, or is left out and told. Knows no weights and no audio.
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
from myxtts.text.normalize import normalize
from myxtts.text.phonemes import phonemize
from myxtts.text.tables import LanguageTable, load_table
from myxtts.text.tokenizer import Tokenizer, describe_characters

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


FULL_LIMIT_CODES = 400
"""Codes of the longest piece of a language (`max_characters`); a model that knows fewer gets shorter pieces."""
_SHOWN = 8


class UnspeakableText(ConfigError):
    """A text that holds nothing this model could say."""


@dataclass(frozen=True)
class Limits:
    """The longest sentence a model has learnt: for XTTS-v2 what it has positions for, else what it was shown."""

    max_ids: int
    max_codes: int

    @classmethod
    def of(cls, dims: GPTDims) -> Limits:
        """All that there are positions for."""
        return cls(dims.max_text, min(MAX_NEW_CODES, dims.max_codes))

    def characters(self, language: str) -> int:
        """The most characters of one piece."""
        return max(8, int(load_table(language).max_characters * min(1.0, self.max_codes / FULL_LIMIT_CODES)))


class Sentence(NamedTuple):
    """One piece of a text, ready to be spoken."""

    text: str
    """As the user wrote it."""
    ids: list[int]
    bounds: Bounds


class Script(NamedTuple):
    """A text, ready to be spoken."""

    language: str
    sentences: list[Sentence]
    unknown: dict[str, str]
    """Characters that the vocabulary lacks, and what is said for them: their letter without accent, or nothing."""


class Reader:
    """Reads texts for one vocabulary."""

    def __init__(self, vocabulary: Tokenizer, limits: Limits, *, use_phonemes: bool = False) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._use_phonemes = use_phonemes

    def read(self, text: str, language: str) -> Script:
        """The sentences of a text, or an error that says what is wrong with it."""
        script = Script(self._code(language), [], {})
        num_lost = num_letters = 0
        for piece in split(text, script.language, self._limits.characters(script.language)):
            lost, letters = self._add(script, piece)
            num_lost, num_letters = num_lost + lost, num_letters + letters
        if not num_letters:
            shown = repr(text.strip()[:40])
            raise UnspeakableText(f"There is nothing to say: {shown} holds neither letters nor digits.")
        if 2 * num_lost > num_letters or not script.sentences:
            silent = [character for character, said in script.unknown.items() if not said][:_SHOWN]
            raise UnspeakableText(
                f"The vocabulary lacks {num_lost} of the {num_letters} letters of the text in language "
                f"{script.language!r}: {describe_characters(silent)} …\n"
                "Is that the language the text is written in, and was the model trained on it?"
            )
        return script

    def _code(self, language: str) -> str:
        """The language without its region, known to us and to the vocabulary."""
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

    def _add(self, script: Script, piece: str) -> tuple[int, int]:
        """Add a piece to the script, in parts if it needs too many ids; counts its letters, lost ones first."""
        language = script.language
        words = normalize(piece, language)
        spoken = phonemize([words], language)[0] if self._use_phonemes and words else words
        for character in self._vocabulary.unknown_characters(spoken, language):
            script.unknown.setdefault(character, self._instead_of(character, language))
        letters = [character for character in spoken if character.isalnum()]
        num_lost = sum(not script.unknown.get(letter, letter) for letter in letters)
        said = "".join(script.unknown.get(character, character) for character in spoken)
        if not any(map(str.isalnum, said)):
            return num_lost, len(letters)
        (ids,) = self._vocabulary.encode_batch([" ".join(said.split())], [language])
        if len(ids) <= self._limits.max_ids:
            script.sentences.append(Sentence(piece, ids, bounds(len(words), self._limits.max_codes)))
            return num_lost, len(letters)
        if len(piece) == 1:
            raise UnspeakableText(f"{piece!r} alone needs {len(ids)} tokens; there is room for {self._limits}.")
        counts = [self._add(script, part) for part in shorten(piece, (len(piece) + 1) // 2)]
        return sum(lost for lost, _ in counts), sum(total for _, total in counts)

    def _instead_of(self, character: str, language: str) -> str:
        """A letter without its accent where the vocabulary has that."""
        plain = unicodedata.normalize("NFKD", character)[0]
        has_plain = plain.isalnum() and not self._vocabulary.unknown_characters(plain, language)
        return plain if has_plain else ""
