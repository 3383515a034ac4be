"""Text to sentences of token ids, and the check of the codes that are generated for them.

The text front end splits a text into sentences, normalises them, replaces characters the vocabulary lacks, and
keeps every sentence within what the model can say in one go. Text that cannot be spoken raises an error that says
why. Knows no weights and no audio.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from myxtts.config import LANGUAGES, SAMPLE_RATE, SAMPLES_PER_CODE
from myxtts.errors import ConfigError
from myxtts.text.normalize import normalize, phonemize
from myxtts.text.tables import load_table
from myxtts.text.tokenizer import Tokenizer, describe_characters

CODES_PER_SECOND = SAMPLE_RATE / SAMPLES_PER_CODE
MAX_CHARACTERS_PER_SECOND, MIN_CHARACTERS_PER_SECOND = 36.0, 6.0  # about 15 are usual
PAUSES_SECONDS = 1.5  # allowance for silence before, after and within a sentence
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
    fewest = max(1, math.floor(num_characters / MAX_CHARACTERS_PER_SECOND * CODES_PER_SECOND))
    most = math.ceil((PAUSES_SECONDS + num_characters / MIN_CHARACTERS_PER_SECOND) * CODES_PER_SECOND)
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
    for period in range(1, LONGEST_PERIOD + 1):
        least = max(REPEATED_CODES, REPETITIONS * period) - period  # in a row that equal those a period earlier
        for at in range(period + least - 1, len(codes), least):  # any such run covers one of these places
            if codes[at] != codes[at - period]:
                continue
            first, last = at, at + 1
            while first > period and codes[first - 1] == codes[first - 1 - period]:
                first -= 1
            while last < len(codes) and codes[last] == codes[last - period]:
                last += 1
            if last - first >= least:
                return True
    return False


def ends_in_loop(codes: Sequence[int], num_added: int) -> bool:
    """True if the last `num_added` codes may have closed a loop; looks no further back than that needs."""
    return has_loop(codes[-(REPETITIONS * LONGEST_PERIOD + num_added) :])


SHORT_SHARE = 0.1
"""Sentences shorter than this share of the limit are joined to a neighbour: alone they come out badly."""
ALONE_SHARE = 0.104  # of the most characters of a language: sentences below it are short (English: 26 characters)

_QUESTIONS, _WIDE_ENDS = "!?…؟।॥۔", "。！？｡"
_CLOSING = "\"'”’»›)\\]」』】"
_OPENING = r"\s\"'“‘„«‹(\[「『【¿¡–—-"
_END = re.compile(rf"[.{_QUESTIONS}{_WIDE_ENDS}]+[{_CLOSING}]*(?=[{_OPENING}]*(?P<following>.?))")
"""Marks that may end a sentence, and the character that follows them, past spaces and opening quotes."""
_PARAGRAPHS = re.compile(r"\n\s*\n|[\u2028\u2029]+")
_INITIAL = re.compile(r"(?:^|[^\w.])[^\W\d_]\.$|\w\.\w{1,3}\.$")
"""A single letter or dots inside a word: J. R. Smith, z. B., U.S., ه.ش."""
_NUMBER = re.compile(r"(?:^|[^\w.,])\d+\.$")
_LOOK_BACK = 24  # characters before a dot to search for an abbreviation; none is longer
_BREAKS = (
    re.compile(rf"[.{_QUESTIONS}]++[{_CLOSING}]*+(?P<inside>(?!\s))?|[{_WIDE_ENDS}]+"),
    re.compile(r"[;:](?=\s)|[؛；：]|(?<=\s)[–—-]+(?=\s)"),
    re.compile(r",(?=\s)|[،，、]|[)»”](?=\s)"),
    re.compile(r"\s"),
)
"""Where a sentence that is too long may be cut, best places first; not where the group `inside` matches. A run of
marks is matched as a whole, also inside a word: searching each of its suffixes would take quadratic time."""


def split(text: str, language: str, limit: int) -> list[str]:
    """Split a text into sentences of at most `limit` characters, none of them empty."""
    pieces: list[str] = []
    for paragraph in _PARAGRAPHS.split(text):
        whole = [piece for sentence in _sentences(paragraph, language) for piece in shorten(sentence, limit)]
        pieces += _join_short(whole, limit)
    return pieces


def split_complete(text: str, language: str, limit: int) -> tuple[list[str], str]:
    """Split a text that is still being written into its complete sentences and the rest.

    What follows a full stop tells whether it ends a sentence, so the last sentence is complete once the next one
    has begun. A rest of more than `limit` characters is cut.
    """
    *earlier, last = _PARAGRAPHS.split(text)
    *complete, rest = [*_sentences(last, language)] or [""]
    pieces = [sentence for paragraph in earlier for sentence in _sentences(paragraph, language)] + complete
    *cut, rest = shorten(rest, limit) or [""]
    return pieces + cut, rest + " " * bool(rest and text[-1:].isspace())


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
        matches = mark.finditer(sentence, length // 4, 3 * length // 4)
        ends = [match.end() for match in matches if match.lastgroup is None and 0 < match.end() < length]
        if ends:
            return min(ends, key=lambda end: abs(2 * end - length))
    middle = max(1, length // 2)
    # Accents, joiners and variation selectors stay with the letter before them, unless there is nothing else.
    for cut in range(middle, max(middle, 3 * length // 4) + 1):
        if unicodedata.category(sentence[cut]) not in ("Mn", "Mc", "Me", "Cf"):
            return cut
    return middle


def _sentences(paragraph: str, language: str) -> Iterator[str]:
    text = " ".join(paragraph.split())
    has_capitals = any(map(str.isupper, text))
    start = 0
    for match in _END.finditer(text):
        if _ends_sentence(match, start, language, has_capitals):
            yield text[start : match.end()].strip()
            start = match.end()
    if rest := text[start:].strip():
        yield rest


def _ends_sentence(match: re.Match[str], start: int, language: str, has_capitals: bool) -> bool:
    """True if a match of `_END` ends the sentence that began at `start`."""
    text, marks, mark, end = match.string, match[0], match.start(), match.end()
    if end == len(text) or any(character in _WIDE_ENDS for character in marks):
        return True
    only_dots = not any(character in _QUESTIONS for character in marks)
    if not text[end].isspace():
        # Persian and similar scripts are often typed without a space after the mark.
        around = (text[max(0, mark - 2) : mark] if only_dots else "") + text[end]
        is_abbreviation = only_dots and mark < 2
        return not is_abbreviation and all(unicodedata.category(letter) == "Lo" for letter in around)
    # In a text without capitals, a lower-case letter after a dot says nothing.
    if match["following"].islower() and has_capitals:
        return False
    return not (only_dots and marks.startswith(".") and _belongs_to_word(text, mark, start, language))


def _belongs_to_word(text: str, mark: int, start: int, language: str) -> bool:
    """True if a dot is part of an abbreviation, an initial, an ordinal or the number of a list item."""
    always, before_number, ordinal = _dots_of(language)
    before = text[max(start, mark + 1 - _LOOK_BACK) : mark + 1]
    if _NUMBER.search(before):
        is_item = before.strip()[:-1].isdigit()
        return is_item or ordinal.match(text, mark) is not None
    if _INITIAL.search(before) or always.search(before.lower()):
        return True
    return text[mark + 1 : mark + 3].lstrip()[:1].isdigit() and before_number.search(before.lower()) is not None


@cache
def _dots_of(language: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Patterns of abbreviations, of those before a number only, and of ordinals with a dot."""
    table = load_table(language)
    always, before_number = (
        re.compile(rf"(?:^|\W)(?:{'|'.join(map(re.escape, words)) or '(?!)'})$")
        for words in (table.abbreviations, table.before_number)
    )
    return always, before_number, re.compile(table.ordinal if r"\." in table.ordinal else "(?!)")


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


MAX_TEXT_CHARACTERS = 500_000  # of one text: about nine hours of speech
FULL_LIMIT_CODES = 400  # codes of a sentence of `max_characters`; models that know fewer get shorter sentences
_SHOWN = 8


class UnspeakableText(ConfigError):
    """A text with nothing that this model could say."""


def require_words(text: str, said: Iterable[str]) -> None:
    """Raise an error if a text is spoken without a letter or digit."""
    if not any(map(str.isalnum, said)):
        raise UnspeakableText(f"There is nothing to say: {text.strip()[:40]!r} has no letters and no digits.")


@dataclass(frozen=True)
class Limits:
    """The longest sentence of a model: for XTTS-v2 by its positions, for others by what they were trained on."""

    max_ids: int
    max_codes: int

    def characters(self, language: str) -> int:
        """The most characters of one sentence."""
        return max(8, int(load_table(language).max_characters * min(1.0, self.max_codes / FULL_LIMIT_CODES)))


class Sentence(NamedTuple):
    """One sentence of a text, ready to be spoken."""

    number: int  # its place in the text, which decides its random numbers
    text: str  # as the user wrote it
    ids: list[int]
    bounds: Bounds
    is_short: bool = False
    """About two seconds or less: a model that has heard no short clips says more than the text."""


class TextFrontend:
    """Turns texts into sentences for one vocabulary."""

    def __init__(self, vocabulary: Tokenizer, limits: Limits, *, use_phonemes: bool = False) -> None:
        self._vocabulary, self._limits, self._use_phonemes = vocabulary, limits, use_phonemes

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
        if len(text) > MAX_TEXT_CHARACTERS:
            raise ConfigError(
                f"The text has more than {MAX_TEXT_CHARACTERS:,} characters, about nine hours of speech; "
                "split it, and speak the parts one after another."
            )
        sentences: list[Sentence] = []
        replaced: dict[str, str] = {}
        letters: list[str] = []
        pending = split(text, language, self._limits.characters(language))[::-1]
        while pending:
            piece = pending.pop()
            words = normalize(piece, language)
            spoken = phonemize([words], language)[0] if self._use_phonemes and words else words
            for character in self._vocabulary.unknown_characters(spoken, language):
                replaced.setdefault(character, self._replacement(character, language))
            said = " ".join("".join(replaced.get(character, character) for character in spoken).split())
            has_words = any(map(str.isalnum, said))
            ids = self._vocabulary.encode_batch([said], [language])[0] if has_words else []
            if len(ids) > self._limits.max_ids:
                if len(piece) == 1:
                    raise UnspeakableText(
                        f"{piece!r} alone needs {len(ids)} tokens; the model takes {self._limits.max_ids}."
                    )
                pending += shorten(piece, (len(piece) + 1) // 2)[::-1]
                continue
            letters += filter(str.isalnum, spoken)
            if ids:
                limits = bounds(len(words), self._limits.max_codes)
                is_short = len(words) < ALONE_SHARE * load_table(language).max_characters
                sentences.append(Sentence(len(sentences), piece, ids, limits, is_short))
        require_words(text, letters)
        num_lost = sum(not replaced.get(letter, letter) for letter in letters)
        if 2 * num_lost > len(letters) or not sentences:
            dropped = [character for character, said in replaced.items() if not said][:_SHOWN]
            raise UnspeakableText(
                f"The vocabulary lacks {num_lost} of the {len(letters)} letters of the text in language "
                f"{language!r}: {describe_characters(dropped)} …\n"
                "Is the text written in that language, and was the model trained on it?"
            )
        return sentences, replaced

    def _replacement(self, character: str, language: str) -> str:
        plain = unicodedata.normalize("NFKD", character)[0]
        has_plain = plain.isalnum() and not self._vocabulary.unknown_characters(plain, language)
        return plain if has_plain else ""
