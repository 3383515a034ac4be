"""Whole numbers as words: num2words where it can be trusted, own spellers for Persian, Hindi and Chinese.

Takes digits as a string, because a leading zero or an absurd length decides how a number is read. What the
digits mean in a sentence (a price, a date, an ordinal) is `numbers`' business.
"""

from functools import lru_cache
from typing import Any

from myxtts.text.tables import load_table

LONGEST_NUMBER = 15
"""Digits up to which a number is read as a number; longer ones, like a card number, digit by digit."""


@lru_cache(maxsize=8192)
def cardinal(digits: str, language: str) -> str:
    """`digits` (ASCII, any length) in words; digit by digit when it is a code rather than an amount."""
    if len(digits) > LONGEST_NUMBER or (len(digits) > 1 and digits[0] == "0"):
        return spell_digits(digits, language)
    return _whole_number(int(digits), language)


def spell_digits(digits: str, language: str) -> str:
    """Every digit by itself."""
    joint = "" if language in ("zh", "ja") else " "
    return joint.join(_whole_number(int(digit), language) for digit in digits)


@lru_cache(maxsize=1024)
def ordinal(digits: str, language: str) -> str:
    """The ordinal of `digits`; the cardinal where the language has no such word here."""
    if len(digits) > LONGEST_NUMBER or digits[0] == "0":
        return cardinal(digits, language)
    if language == "fa":
        return _persian_ordinal(_persian(int(digits)))
    words = load_table(language).ordinal_words
    if words:
        return _ordinal_from_table(int(digits), language, words)
    try:
        return str(_num2words(int(digits), lang=language, to="ordinal"))
    except (NotImplementedError, OverflowError, ValueError, KeyError, IndexError):
        return cardinal(digits, language)


def _whole_number(value: int, language: str) -> str:
    if language == "fa":
        return _persian(value)
    if language == "hi":
        return _hindi(value)
    if language == "zh":
        return _chinese(value)
    return str(_num2words(value, lang=language))


def _num2words(value: int, **options: Any) -> Any:
    from num2words import num2words  # slow to import, and most sentences have no digits

    return num2words(value, **options)


def _ordinal_from_table(value: int, language: str, words: dict[str, str]) -> str:
    """Ordinals of a language that builds them word by word: hundreds stay cardinal, tens and units change."""
    if str(value) in words:
        return words[str(value)]
    hundreds, rest = divmod(value, 100)
    if rest == 0:
        return cardinal(str(value), language)
    tens = str(rest) if str(rest) in words else str(rest - rest % 10)
    units = "" if str(rest) in words else str(rest % 10)
    front = cardinal(str(hundreds * 100), language) if hundreds else ""
    return " ".join(part for part in (front, words[tens], words.get(units, "")) if part)


def _persian(value: int) -> str:
    """Persian: groups of three joined by «و»; a lone thousand is «هزار», not «یک هزار»."""
    words = load_table("fa").words
    if value == 0:
        return str(words["ones"][0])
    groups: list[str] = []
    for scale in words["scales"]:
        value, group = divmod(value, 1000)
        if group == 1 and scale == words["scales"][1]:
            groups.append(scale)
        elif group:
            groups.append(f"{_persian_group(group, words)} {scale}".rstrip())
    return " و ".join(reversed(groups))


def _persian_group(value: int, words: dict[str, Any]) -> str:
    hundreds, rest = divmod(value, 100)
    parts = [words["hundreds"][hundreds]] if hundreds else []
    if rest >= 20:
        parts.append(words["tens"][rest // 10])
        rest %= 10
    if rest:
        parts.append(words["ones"][rest])
    return " و ".join(parts)


def _persian_ordinal(words: str) -> str:
    if words.endswith("سه"):
        return words[:-1] + "وم"
    return words + ("\u200cام" if words.endswith("ی") else "م")


def _hindi(value: int) -> str:
    """Hindi: irregular words up to 99, then hundreds, thousands, lakhs, crores ..."""
    words = load_table("hi").words
    if value < 100:
        return str(words["below_hundred"][value])
    parts: list[str] = []
    for size, name in (
        (10**13, "नील"),
        (10**11, "खरब"),
        (10**9, "अरब"),
        (10**7, "करोड़"),
        (10**5, "लाख"),
        (1000, "हज़ार"),
        (100, "सौ"),
    ):
        count, value = divmod(value, size)
        if count:
            parts.append(f"{_hindi(count)} {name}")
    if value:
        parts.append(_hindi(value))
    return " ".join(parts)


def _chinese(value: int) -> str:
    """Chinese: groups of four (万, 亿, 兆); one 零 for any run of empty places; 两 before 百, 千, 万 and 亿."""
    if value == 0:
        return "零"
    spoken, gap = "", False
    for power, name in ((12, "兆"), (8, "亿"), (4, "万"), (0, "")):
        group = value // 10**power % 10000
        if group == 0:
            gap = bool(spoken)
            continue
        if spoken and (gap or group < 1000):
            spoken += "零"
        spoken += ("两" if group == 2 and name else _chinese_group(group, first=not spoken)) + name
        gap = False
    return spoken


def _chinese_group(group: int, *, first: bool) -> str:
    spoken = ""
    for place, name in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit = group // place % 10
        if digit == 0:
            if spoken and group % place and not spoken.endswith("零"):
                spoken += "零"
        elif digit == 1 and place == 10 and not spoken and first:
            spoken += name
        else:
            spoken += ("两" if digit == 2 and place >= 100 else "零一二三四五六七八九"[digit]) + name
    return spoken
