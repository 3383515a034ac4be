"""Languages as data: `languages/<code>.toml`, read when first needed and cached.

A table holds words, marks and regular expressions of one language. `normalize`, `numbers` and `persian` apply
them; adding an abbreviation, a currency or a whole language needs no code.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any


def fingerprint_of(files: Iterable[Path], packages: Iterable[str]) -> str:
    """Return a hash of the files, the versions of the installed packages, and Unicode's version."""
    import hashlib  # opens a shared library

    digest = hashlib.sha256(unicodedata.unidata_version.encode())
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    digest.update("\n".join(_installed(tuple(packages))).encode())
    return digest.hexdigest()[:16]


@cache
def _installed(packages: tuple[str, ...]) -> list[str]:
    """Return name-version of the packages from folder names; `importlib.metadata` would import far more."""
    starts, ends = tuple(f"{package}-" for package in packages), (".dist-info", ".egg-info")
    names = {entry.name for folder in map(Path, sys.path) if folder.is_dir() for entry in folder.iterdir()}
    return sorted(name for name in names if name.lower().startswith(starts) and name.endswith(ends))


_APOSTROPHES = "\u2018\u2019\u201b\u02bc\u02b9\u2032\u00b4\u0060\u02bb\uff07\u055a\ua78c"
_QUOTES = '"\u201c\u201d\u201e\u201f\u00ab\u00bb\u2039\u203a\u2033\u301d\u301e\u301f\uff02\u300c\u300d\u300e\u300f'
_HYPHENS = "\u2010\u2011\u2012\u2013\u2043\ufe63\uff0d\u05be"
_PAUSES = "\u2014\u2015\u2e3a\u2e3b"
_SPACED_OUT = "*_~^|\\<>\u2022\u00b7\u2027\u30fb\u2023\u25e6\u00a6\u00a8\u00af\u00b8\u02d8\u02dc\u02c6\u02da"

# Marks that some language reads aloud or uses for ordinals; NFKC would destroy their meaning.
_KEPT = (
    "\u00ba\u00aa\u00b0\u00b2\u00b3\u00bc\u00bd\u00be\u2116\u2212\u00d7\u00f7\u00b1\u00a7\u00a2\u00a3\u00a5\u20ac"
)
_HANGUL_JAMO = range(0x3130, 0x3190)
_VARIATION_SELECTORS = frozenset((*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0), *range(0x180B, 0x180F)))
_REMOVED_CATEGORIES = frozenset(("Cc", "Cf", "Cs", "Co", "Cn"))

_EXPLICIT = {
    **dict.fromkeys(_APOSTROPHES, "'"),
    **dict.fromkeys(_QUOTES, ""),
    **dict.fromkeys(_HYPHENS, "-"),
    **dict.fromkeys(_PAUSES, " - "),
    **dict.fromkeys(_SPACED_OUT, " "),
    **dict.fromkeys("\t\n\r\v\f\x1c\x1d\x1e\x1f\x85", " "),
    **dict.fromkeys("[{\u3010\u3014\u3008\u300a", "("),
    **dict.fromkeys("]}\u3011\u3015\u3009\u300b", ")"),
    "\u2026": "...",
    "\u2044": "/",
    "\u2215": "/",
    "\u3001": ",",
    "\u3002": ".",
    "\u301c": "-",
    # lower() turns İ into i and a combining dot, which no vocabulary has.
    "\u0130": "i",
}


def _clean(character: str) -> str:
    """Return the replacement of one character; the rules are in order of precedence."""
    if character in _EXPLICIT:
        return _EXPLICIT[character]
    code, category = ord(character), unicodedata.category(character)
    if character in _KEPT or code in _HANGUL_JAMO:
        return character
    if (digit := unicodedata.digit(character, None)) is not None:
        return str(digit)
    if category in _REMOVED_CATEGORIES or code in _VARIATION_SELECTORS:
        return ""
    if category in ("Zs", "Zl", "Zp", "So"):
        return " "
    plain = unicodedata.normalize("NFKC", character)
    return character if plain == character else "".join(map(_clean, plain))


class CharacterTable(dict[int, str]):
    """A table for `str.translate` that computes the replacement of a character on first use."""

    def __init__(self, replacements: dict[str, str]) -> None:
        super().__init__({ord(character): to for character, to in replacements.items()})

    def __missing__(self, code: int) -> str:
        self[code] = cleaned = _clean(chr(code))
        return cleaned


def clean_characters(text: str, table: CharacterTable) -> str:
    """Return the text with every character replaced by the table, in composed form (NFC)."""
    if text.isascii():
        return text.translate(table)
    text = unicodedata.normalize("NFC", text).translate(table)
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def any_of(words: Iterable[str]) -> str:
    """Return a pattern for any of `words`, the longest first; it matches nothing if there are none."""
    return "|".join(sorted(map(re.escape, words), key=len, reverse=True)) or "(?!)"


TABLES_FOLDER = Path(__file__).parent / "languages"


@dataclass(frozen=True, slots=True)
class Dates:
    """How a date in digits is read; `months` are in the form that follows a day."""

    order: str
    """`dmy`, `mdy` or `ymd`: the meaning of 1.2.2003. A date that starts with its year is always ymd."""
    spoken: str  # template with {day}, {ordinal} (the day as an ordinal), {month} and {year}
    months: list[str]


@dataclass(frozen=True, slots=True)
class LanguageTable:
    """The content of `languages/<code>.toml`; every field is a key, and every key has a default."""

    code: str
    script: str = "latin"
    """`latin`, `arabic`, `cyrillic`, `devanagari`, `hangul`, `kana`, `han`, or the first word of the Unicode names
    of its letters: `greek`, `hebrew`. Languages that share a script are distinguished by statistics."""
    max_characters: int = 200
    """Longest text spoken in one piece: about 18 seconds, as XTTS-v2 publishes it for its languages."""
    espeak_voice: str | None = None
    """espeak-ng's voice, if it is not the language code; empty if espeak-ng cannot read the normalised text."""
    digits: list[str] = field(default_factory=list)
    """The words for 0 to 9 of a language that num2words does not know; every number is read digit by digit."""
    word_space: str = " "  # the separator of words: empty in Chinese and Japanese
    abbreviations: dict[str, str] = field(default_factory=dict)
    """Lower-case abbreviation, including dots, to the words it stands for."""
    before_number: dict[str, str] = field(default_factory=dict)
    """Abbreviations that are expanded only before a number: `no. 5`."""
    symbols: dict[str, str] = field(default_factory=dict)  # one character to the words it is read as
    characters: dict[str, str] = field(default_factory=dict)
    """One character to its replacement, before all other steps."""
    units: dict[str, list[list[str]]] = field(default_factory=dict)
    """Mark before or after an amount to the grammatical forms of its unit and, for money, of its hundredth:
    `"$" = [["dollar", "dollars"], ["cent", "cents"]]`."""
    feminine_units: str = ""
    """Marks of `units` with a feminine noun, in languages whose one and two agree with it."""
    thousands: str = ","  # marks between groups of three digits
    point: str = "point"  # the word for the decimal mark
    fraction: str = "digits"
    """How decimals are read: `digits` (one by one), `number` (as one number), `named` (tenths, hundredths)."""
    dot: str = "point"  # the word for the dot of 1.2.3
    minus: str = "minus"
    plus: str = "plus"
    range: str = ""  # the word between the ends of 3-5; empty keeps the hyphen
    unit_joint: str = " "  # separator of an amount and its hundredths: five dollars, fifty cents
    plural: str = "one"
    """The rule for the form of a unit: `one`, `french`, `russian`, `polish`, `czech`, `arabic`."""
    magnitudes: str = ""  # regular expression of the words between an amount and its unit: $5 million
    magnitude_joint: str = " "
    spelled: str = ""  # regular expression of digits that are always read one by one
    quotient: str = ""  # template with {numerator} and {denominator} for 1/2; empty keeps the slash
    percent_first: str = ""  # the word for % if it is spoken before the number
    ordinal: str = ""  # regular expression of the suffix that makes digits an ordinal
    ordinal_endings: dict[str, list[list[str]]] = field(default_factory=dict)
    """Written ordinal suffix to [pattern, replacement] pairs that make the spoken ordinal agree with it."""
    ordinal_words: dict[str, str] = field(default_factory=dict)
    """Ordinals of languages for which num2words has none; tens and units combine."""
    before_noun: list[list[str]] = field(default_factory=list)
    """[pattern, replacement] pairs that put a number into the form before a masculine noun."""
    before_feminine: list[list[str]] = field(default_factory=list)
    repairs: list[list[str]] = field(default_factory=list)
    """[pattern, replacement] pairs applied after numbers were read."""
    spaced: bool = True  # number words are separated from letters they touch (mp3: mp three)
    time: str = "{hour} {minute}"
    full_hour: str = "{hour}"
    dates: Dates | None = None
    words: dict[str, Any] = field(default_factory=dict)  # word lists for code that is specific to this language


@cache
def load_table(code: str) -> LanguageTable:
    import tomllib  # opening a prepared corpus does not need it

    data = tomllib.loads((TABLES_FOLDER / f"{code}.toml").read_text(encoding="utf-8"))
    if "dates" in data:
        data["dates"] = Dates(**data["dates"])
    return LanguageTable(code=code, **data)


def table_files() -> list[Path]:
    return sorted(TABLES_FOLDER.glob("*.toml"))
