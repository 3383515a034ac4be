"""Text normalisation: turns a written sentence into the sentence as it is spoken, in lower case, without digits.

For XTTS-v2's seventeen languages the result on ordinary text equals what its published weights were trained on.
This module holds the order of the steps; words are in `languages/`, numbers in `numbers`, Persian in `persian`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from myxtts.config import LANGUAGES
from myxtts.errors import ConfigError
from myxtts.text.numbers import NumberReader
from myxtts.text.tables import (
    CharacterTable,
    LanguageTable,
    any_of,
    clean_characters,
    fingerprint_of,
    load_table,
    table_files,
)

_PUNCTUATION = re.compile(r"\s*[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~，。、！？：；]+(?:\s*[!-/:-@，。、])*")


def _pinyin(text: str) -> str:
    """Return pinyin with tone digits, neutral tone 5, and no spaces between syllables.

    All punctuation becomes a comma: XTTS-v2 was trained on such Chinese, so its published weights have never seen
    a question mark in this language.
    """
    from pypinyin import Style, pinyin

    text = _PUNCTUATION.sub(",", text)
    syllables = pinyin(text, style=Style.TONE3, heteronym=False, neutral_tone_with_five=True)
    return "".join(syllable[0] for syllable in syllables)


def _romaji(text: str) -> str:
    return str(_cutlet().romaji(text)).lower()


@cache
def _cutlet() -> Any:
    try:
        from cutlet import Cutlet
    except ImportError as missing:
        raise ConfigError("Japanese text needs the extra 'ja': pip install 'myxtts[ja]'") from missing
    return Cutlet()


def _latin_korean(text: str) -> str:
    return str(_transliter().translit(text))


@cache
def _transliter() -> Any:
    from hangul_romanize import Transliter
    from hangul_romanize.rule import academic

    return Transliter(academic)


_ROMANIZERS = {"zh": _pinyin, "ja": _romaji, "ko": _latin_korean}
"""Languages that XTTS-v2 reads in Latin letters."""
SOURCES = ("normalize.py", "numbers.py", "persian.py", "tables.py")
"""The modules that decide the result of `normalize`."""
PACKAGES = (
    "num2words", "pypinyin", "hangul_romanize", "cutlet", "fugashi", "unidic_lite", "jaconv", "mojimoji",
)  # fmt: skip


def normalize(text: str, language: str) -> str:
    """Return `text` as it is spoken in `language` (a code of `LANGUAGES`; a region such as pt-br is ignored)."""
    spoken = _steps.get(language)
    if spoken is None:
        spoken = _steps[language] = _steps_of(language)
    return spoken(text)


def _steps_of(language: str) -> Callable[[str], str]:
    """Return the function that normalises `language`."""
    code = re.split("[-_]", language.lower())[0]
    if code not in LANGUAGES:
        raise ConfigError(f"language {language!r} is not supported; use one of {', '.join(LANGUAGES)}")
    if code == "fa":
        from myxtts.text.persian import normalize_persian  # compiles many patterns on import

        return normalize_persian
    return _LanguageSteps(load_table(code))


class _LanguageSteps:
    """The steps of one language, with its compiled patterns."""

    def __init__(self, table: LanguageTable) -> None:
        self._romanize = _ROMANIZERS.get(table.code)
        self._characters = CharacterTable(table.characters)
        self._numbers = NumberReader(table)
        self._symbols = table.symbols
        self._symbol = re.compile(any_of(table.symbols))
        # One scan finds out if a sentence needs the slow steps; most do not.
        marks = [mark for mark in (*table.symbols, *table.units) if len(mark) == 1]
        self._special = re.compile(f"[0-9]|{any_of(marks)}")
        self._abbreviations = table.abbreviations
        self._abbreviation = re.compile(rf"(?<!\w)(?:{any_of(table.abbreviations)})(?!\w)")

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
        if self._romanize is not None:
            text = self._romanize(" ".join(text.split()))
        if not text.isascii():
            text = unicodedata.normalize("NFC", text)
        return " ".join(text.split())

    def _expand_abbreviation(self, match: re.Match[str]) -> str:
        return self._abbreviations[match[0]]

    def _read_symbol(self, match: re.Match[str]) -> str:
        return f" {self._symbols[match[0]]} "


_steps: dict[str, Callable[[str], str]] = {}


@cache
def normalize_fingerprint() -> str:
    """Return a hash that changes when the result of `normalize` could: code, tables, Unicode, package versions."""
    folder = Path(__file__).parent
    return fingerprint_of([*(folder / name for name in SOURCES), *table_files()], PACKAGES)
