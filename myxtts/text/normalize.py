"""Text normalisation: a sentence as people write it becomes the sentence as it is spoken, lower case, no digits.

For XTTS-v2's seventeen languages the result on ordinary text equals what its published weights were trained
on. Persian has a module of its own. This module knows the order of the steps; the words are in the tables of
`languages/`, the numbers in `numbers`. It knows nothing of tokens, audio or files of a corpus.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from myxtts.config import LANGUAGES
from myxtts.errors import ConfigError
from myxtts.text import tables
from myxtts.text.numbers import NumberReader
from myxtts.text.tables import CharacterTable, LanguageTable, clean_characters, fingerprint_of, load_table

_PUNCTUATION = re.compile(r"\s*[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~，。、！？：；]+(?:\s*[!-/:-@，。、])*")


def romanize(text: str, language: str) -> str:
    """Text in the Latin spelling of `language` (zh, ja or ko); other languages are returned unchanged."""
    if language == "zh":
        return _pinyin(text)
    if language == "ja":
        return str(_japanese_romaniser().romaji(text)).lower()
    if language == "ko":
        return str(_korean_romaniser().translit(text))
    return text


def _pinyin(text: str) -> str:
    """Pinyin with tone digits, neutral tone 5, nothing between syllables.

    All punctuation becomes a comma: XTTS-v2 was trained on Chinese whose every mark was one, so a question
    mark would be a token the published weights have never met in this language.
    """
    from pypinyin import Style, pinyin

    text = _PUNCTUATION.sub(",", text)
    syllables = pinyin(text, style=Style.TONE3, heteronym=False, neutral_tone_with_five=True)
    return "".join(syllable[0] for syllable in syllables)


@lru_cache(maxsize=1)
def _japanese_romaniser() -> Any:
    try:
        from cutlet import Cutlet
    except ImportError as missing:
        raise ConfigError("Japanese text needs the extra 'ja': pip install 'myxtts[ja]'") from missing
    return Cutlet()


@lru_cache(maxsize=1)
def _korean_romaniser() -> Any:
    from hangul_romanize import Transliter
    from hangul_romanize.rule import academic

    return Transliter(academic)


SOURCES = (
    "normalize.py",
    "numbers.py",
    "persian.py",
    "tables.py",
)
"""The modules whose code decides the result of `normalize`."""
SPEAKING_PACKAGES = (
    "num2words",
    "pypinyin",
    "hangul_romanize",
    "cutlet",
    "fugashi",
    "unidic_lite",
    "jaconv",
    "mojimoji",
)
_ROMANIZED = ("zh", "ja", "ko")


def normalize(text: str, language: str) -> str:
    """`text` as it is spoken in `language` (a code of `LANGUAGES`; a region such as pt-br is ignored)."""
    spoken = _steps.get(language)
    if spoken is None:
        spoken = _steps[language] = _steps_of(language)
    return spoken(text)


def _steps_of(language: str) -> Callable[[str], str]:
    """The function that normalises `language`, whatever region the code names."""
    code = re.split("[-_]", language.lower())[0]
    if code not in LANGUAGES:
        raise ConfigError(f"language {language!r} is not supported; use one of {', '.join(LANGUAGES)}")
    if code == "fa":
        from myxtts.text.persian import normalize_persian  # its many patterns are compiled on import

        return normalize_persian
    return _LanguageSteps(load_table(code))


class _LanguageSteps:
    """The steps for one language, its patterns compiled once; `numbers` and symbols only where needed."""

    def __init__(self, table: LanguageTable) -> None:
        self._code = table.code
        self._characters = CharacterTable(table.characters | ({"I": "ı", "İ": "i"} if table.code == "tr" else {}))
        self._numbers = NumberReader(table)
        self._symbols = table.symbols
        self._symbol = re.compile(_any_of(table.symbols))
        # One scan decides whether a sentence needs any of the slow steps; most do not.
        marks = [mark for mark in (*table.symbols, *table.units) if len(mark) == 1]
        self._special = re.compile(f"[0-9]|{_any_of(marks)}")
        self._abbreviations = table.abbreviations
        self._abbreviation = re.compile(rf"(?<!\w)(?:{_any_of(table.abbreviations)})(?!\w)")

    def __call__(self, text: str) -> str:
        text = clean_characters(text, self._characters)
        special = self._special.search(text) is not None
        if special:
            text = self._numbers.read(text)
        text = text.lower()
        if special:
            text = self._symbol.sub(self._read_symbol, text)
        if self._abbreviations:
            text = self._abbreviation.sub(self._expand_abbreviation, text)
        if self._code in _ROMANIZED:
            text = romanize(" ".join(text.split()), self._code)
        if not text.isascii():
            text = unicodedata.normalize("NFC", text)
        return " ".join(text.split())

    def _expand_abbreviation(self, match: re.Match[str]) -> str:
        return self._abbreviations[match[0]]

    def _read_symbol(self, match: re.Match[str]) -> str:
        return f" {self._symbols[match[0]]} "


_steps: dict[str, Callable[[str], str]] = {}


def _any_of(words: Iterable[str]) -> str:
    """A pattern for any of `words`, the longest first; nothing when there is none."""
    return "|".join(sorted(map(re.escape, words), key=len, reverse=True)) or "(?!)"


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """Changes when the result of `normalize` could: code, tables, Unicode and package versions."""
    folder = Path(__file__).parent
    files = [folder / name for name in SOURCES] + sorted(tables.TABLES_FOLDER.glob("*.toml"))
    return fingerprint_of(files, SPEAKING_PACKAGES)
