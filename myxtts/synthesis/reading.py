"""From text to sentences of token ids: cut, normalised, spelled with what the vocabulary has, none too long.

Whatever cannot be spoken is an error that says why, or is left out and told. Knows no weights and no audio.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import NamedTuple

from myxtts.config import LANGUAGES
from myxtts.errors import ConfigError
from myxtts.model.generation import MAX_NEW_CODES
from myxtts.model.packing import GPTDims
from myxtts.synthesis.guards import Bounds, bounds
from myxtts.synthesis.sentences import CHARACTER_LIMITS, shorten, split
from myxtts.text.normalize import normalize
from myxtts.text.phonemes import phonemize
from myxtts.text.tokenizer import Tokenizer, describe_characters

FULL_LIMIT_CODES = 400
"""Codes that a piece as long as `CHARACTER_LIMITS` allows takes; a model that knows fewer gets shorter pieces."""
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
        return max(8, int(CHARACTER_LIMITS[language] * min(1.0, self.max_codes / FULL_LIMIT_CODES)))


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
