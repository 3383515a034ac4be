"""The per-language tables of text normalisation: `languages/<code>.toml`, read when first asked for and kept.

A table is data only: words, marks and regular expressions of one language. How they are applied is written
in `normalize`, `numbers` and `persian`; adding an abbreviation or a currency needs no code.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_METADATA = (".dist-info", ".egg-info")


def fingerprint_of(files: Iterable[Path], packages: Iterable[str] = ()) -> str:
    """Hex digest of the bytes of the files, the versions of the packages found, and Unicode's version."""
    import hashlib  # opens a shared library

    digest = hashlib.sha256(unicodedata.unidata_version.encode())
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    digest.update("\n".join(sorted(_installed(tuple(packages)))).encode())
    return digest.hexdigest()[:16]


@cache
def _installed(packages: tuple[str, ...]) -> list[str]:
    """name-version of the packages found, from folder names: reading their metadata would import far more."""
    prefixes = tuple(f"{package}-" for package in packages)
    found: set[str] = set()
    for folder in map(Path, sys.path):
        if prefixes and folder.is_dir():
            names = (entry.name for entry in folder.iterdir())
            found.update(name for name in names if name.lower().startswith(prefixes) and name.endswith(_METADATA))
    return sorted(found)


_APOSTROPHES = "\u2018\u2019\u201b\u02bc\u02b9\u2032\u00b4\u0060\u02bb\uff07\u055a\ua78c"
_QUOTES = '"\u201c\u201d\u201e\u201f\u00ab\u00bb\u2039\u203a\u2033\u301d\u301e\u301f\uff02\u300c\u300d\u300e\u300f'
_HYPHENS = "\u2010\u2011\u2012\u2013\u2043\ufe63\uff0d\u05be"
_PAUSES = "\u2014\u2015\u2e3a\u2e3b"
_SPACED_OUT = "*_~^|\\<>\u2022\u00b7\u2027\u30fb\u2023\u25e6\u00a6\u00a8\u00af\u00b8\u02d8\u02dc\u02c6\u02da"

# The marks some language reads aloud, or needs for finding an ordinal: NFKC would destroy their meaning.
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
    # İ lower-cases to i and a combining dot, which no vocabulary wants.
    "\u0130": "i",
}


def _clean(character: str) -> str:
    """What one character becomes; the rules in order of precedence."""
    if character in _EXPLICIT:
        return _EXPLICIT[character]
    code, category = ord(character), unicodedata.category(character)
    if character in _KEPT or code in _HANGUL_JAMO:
        return character
    if (digit := unicodedata.digit(character, None)) is not None:
        return str(digit)
    if category in _REMOVED_CATEGORIES or code in _VARIATION_SELECTORS:
        return ""
    if category in ("Zs", "Zl", "Zp") or category == "So":
        return " "
    plain = unicodedata.normalize("NFKC", character)
    if plain == character:
        return character
    return "".join(map(_clean, plain))


class CharacterTable(dict[int, str]):
    """A table for `str.translate` that decides about a character when it first meets it."""

    def __init__(self, replacements: dict[str, str]) -> None:
        super().__init__({ord(character): to for character, to in replacements.items()})

    def __missing__(self, code: int) -> str:
        self[code] = cleaned = _clean(chr(code))
        return cleaned


def clean_characters(text: str, table: CharacterTable) -> str:
    """The text with every character replaced as `table` says, in composed form (NFC)."""
    if text.isascii():
        return text.translate(table)
    text = unicodedata.normalize("NFC", text).translate(table)
    return text if text.isascii() else unicodedata.normalize("NFC", text)


TABLES_FOLDER = Path(__file__).parent / "languages"


@dataclass(frozen=True, slots=True)
class Dates:
    """How a date in digits is read aloud; `months` are in the form that follows a day."""

    order: str
    """`dmy`, `mdy` or `ymd`: what 1.2.2003 means here; a date that starts with its year is always ymd."""
    spoken: str
    """Template of {day}, {ordinal} (the day as an ordinal), {month} and {year}."""
    months: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LanguageTable:
    """Everything `languages/<code>.toml` says; the field is the key."""

    code: str
    abbreviations: dict[str, str] = field(default_factory=dict)
    """Lower-case abbreviation, dots included, to the words it stands for."""
    before_number: dict[str, str] = field(default_factory=dict)
    """The same, but only in front of a number: `no. 5`."""
    symbols: dict[str, str] = field(default_factory=dict)
    """One character to the words it is read as."""
    characters: dict[str, str] = field(default_factory=dict)
    """One character to its replacement, before anything else is looked at."""
    units: dict[str, list[list[str]]] = field(default_factory=dict)
    """Mark written before or after an amount to the grammatical forms spoken after it, and, for money, the
    forms of its hundredth: `"$" = [["dollar", "dollars"], ["cent", "cents"]]`."""
    feminine_units: str = ""
    """Marks of `units` whose noun is feminine where the words for one and two agree with it."""
    thousands: str = ","
    """Marks between groups of three digits."""
    point: str = "point"
    """The decimal mark, spoken."""
    fraction: str = "digits"
    """How decimals are read: `digits` one by one, `number` as one number, `named` as tenths, hundredths ...."""
    dot: str = "point"
    """The dot of 1.2.3, spoken."""
    minus: str = "minus"
    plus: str = "plus"
    range: str = ""
    """The word between the ends of 3-5; empty keeps the hyphen."""
    unit_joint: str = " "
    """What stands between the whole amount and its hundredths: five dollars, fifty cents."""
    plural: str = "one"
    """Which number takes which form of a unit: `one`, `french`, `russian`, `polish`, `czech`, `arabic`."""
    magnitudes: str = ""
    """Regular expression of the words that may stand between an amount and its unit: $5 million."""
    magnitude_joint: str = " "
    spelled: str = ""
    """Regular expression of digits that are always read one by one."""
    quotient: str = ""
    """Template of {numerator} and {denominator} for 1/2; empty keeps the stroke."""
    percent_first: str = ""
    """The word for % where it is spoken before the number."""
    ordinal: str = ""
    """Regular expression of what makes the digits before it an ordinal."""
    ordinal_endings: dict[str, list[list[str]]] = field(default_factory=dict)
    """Written ordinal suffix to [pattern, replacement] pairs that make the spoken ordinal agree with it."""
    ordinal_words: dict[str, str] = field(default_factory=dict)
    """Ordinals of languages that num2words cannot give them for; tens and units combine."""
    before_noun: list[list[str]] = field(default_factory=list)
    """[pattern, replacement] pairs turning a number into the form that stands before a masculine noun."""
    before_feminine: list[list[str]] = field(default_factory=list)
    repairs: list[list[str]] = field(default_factory=list)
    """[pattern, replacement] pairs run over a text in which numbers were read."""
    spaced: bool = True
    """Whether number words keep a space from letters they touch (mp3: mp three)."""
    time: str = "{hour} {minute}"
    full_hour: str = "{hour}"
    dates: Dates | None = None
    words: dict[str, Any] = field(default_factory=dict)
    """Word lists that only this language's own module understands."""


@cache
def load_table(code: str) -> LanguageTable:
    """The table of one language."""
    import tomllib

    data = tomllib.loads((TABLES_FOLDER / f"{code}.toml").read_text(encoding="utf-8"))
    if dates := data.pop("dates", None):
        data["dates"] = Dates(dates["order"], dates["spoken"], tuple(dates["months"]))
    return LanguageTable(code=code, **data)
