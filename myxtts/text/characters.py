"""Unicode clean-up shared by all languages: every character becomes one that text of a corpus is meant to hold.

Look-alikes, compatibility forms, digits of other scripts and typographic marks are mapped to the plain marks
the XTTS vocabulary knows; invisible characters, emoji and unassigned code points go. This module knows no
language: what only one language wants is in the `characters` of its table.
"""

import unicodedata

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
