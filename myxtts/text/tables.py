"""The per-language tables of text normalisation: `languages/<code>.toml`, read when first asked for and kept.

A table is data only: words, marks and regular expressions of one language. How they are applied is written
in `normalize`, `numbers` and `persian`; adding an abbreviation or a currency needs no code.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

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
