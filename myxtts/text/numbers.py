"""Reads numbers in text as words: dates, times, ranges, phone numbers, money, ordinals, amounts.

Works from a `LanguageTable` and returns text without digits. Whole numbers are spelled by num2words, except in
Persian, Hindi and Chinese. Persian sentences have their own module, because their conventions differ too much.
"""

from __future__ import annotations

import re
from functools import lru_cache, partial
from typing import Any

from myxtts.errors import ConfigError
from myxtts.text.tables import LanguageTable, any_of, load_table

LONGEST_NUMBER = 15  # numbers with more digits, such as card numbers, are read digit by digit


@lru_cache(maxsize=8192)
def cardinal(digits: str, language: str) -> str:
    """Return `digits` (ASCII, any length) in words; digit by digit if it is a code rather than an amount."""
    if len(digits) > LONGEST_NUMBER or (len(digits) > 1 and digits[0] == "0"):
        return spell_digits(digits, language)
    return _whole_number(int(digits), language)


def spell_digits(digits: str, language: str) -> str:
    return load_table(language).word_space.join(_whole_number(int(digit), language) for digit in digits)


@lru_cache(maxsize=1024)
def ordinal(digits: str, language: str) -> str:
    """Return the ordinal of `digits`, or the cardinal if there is no word for it."""
    if len(digits) > LONGEST_NUMBER or digits[0] == "0":
        return cardinal(digits, language)
    if language == "fa":
        number = _persian(int(digits))
        if number.endswith("سه"):
            return number[:-1] + "وم"
        return number + ("\u200cام" if number.endswith("ی") else "م")
    if words := load_table(language).ordinal_words:
        return _ordinal_from_table(int(digits), language, words)
    try:
        return str(_num2words(int(digits), lang=language, to="ordinal"))
    except (NotImplementedError, OverflowError, ValueError, KeyError, IndexError):
        return cardinal(digits, language)


def _whole_number(value: int, language: str) -> str:
    if language in _OWN_RULES:
        return _OWN_RULES[language](value)
    if digits := load_table(language).digits:
        return " ".join(digits[int(digit)] for digit in str(value))
    try:
        return str(_num2words(value, lang=language))
    except NotImplementedError:
        advice = f"list the words for 0 to 9 as `digits` in {language}.toml"
        raise ConfigError(f"num2words cannot count in {language!r}: {advice}") from None


def _num2words(value: Any, **options: Any) -> Any:
    from num2words import num2words  # slow to import, and most sentences have no digits

    return num2words(value, **options)


def _ordinal_from_table(value: int, language: str, words: dict[str, str]) -> str:
    """Return an ordinal built word by word: hundreds stay cardinal, tens and units change."""
    if str(value) in words:
        return words[str(value)]
    hundreds, rest = value - value % 100, value % 100
    if rest == 0:
        return cardinal(str(value), language)
    spoken = [cardinal(str(hundreds), language)] if hundreds else []
    parts = [rest] if str(rest) in words else [rest - rest % 10, rest % 10]
    return " ".join(spoken + [words[str(part)] for part in parts if str(part) in words])


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


def _hindi(value: int) -> str:
    """Hindi: irregular words up to 99, then hundreds, thousands, lakhs, crores ..."""
    words = load_table("hi").words
    if value < 100:
        return str(words["below_hundred"][value])
    parts: list[str] = []
    for power, name in words["scales"]:
        count, value = divmod(value, 10**power)
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


_OWN_RULES = {"fa": _persian, "hi": _hindi, "zh": _chinese}

YEAR_FIRST_DATE = re.compile(
    r"(?<![0-9A-Za-z.,/-])(?P<year>\d{4})([-/.])(?P<month>\d{1,2})\2(?P<day>\d{1,2})\.?(?![\w/-])"
)
YEAR_LAST_DATE = re.compile(
    r"(?<![0-9A-Za-z.,/-])(?P<day>\d{1,2})([-/.])\s?(?P<month>\d{1,2})\2\s?(?P<year>\d{4})(?![\w/-]|[.,]\d)"
)
CLOCK = re.compile(r"(?<![0-9A-Za-z:.,])([01]?\d|2[0-4]):([0-5]\d)(?::([0-5]\d))?(?![\d:])")
PHONE = re.compile(
    r"(?<![0-9A-Za-z-])(?:\+\d+(?:[ -]\d+)+|\+\d{8,}|0\d+(?:[ -]\d{2,})+|\d{2,}(?:-\d{2,}){2,})(?![\w-])"
)
RANGE = re.compile(r"(?<![0-9A-Za-z.,/:-])(\d+(?:[.,]\d+)?)\s?-\s?(\d+(?:[.,]\d+)?)(?![\d/:-]|[.,]\d)")
QUOTIENT = re.compile(r"(?<![0-9A-Za-z.,/:-])(\d{1,3})/(\d{1,3})(?![\w/:-]|[.,]\d)")
NUMBER = r"\d+(?:[.,]\d+|'\d{3}(?!\d))*"
_BLANK_GROUPS = re.compile(r"(?<![\d.,])([1-9]\d{0,2})((?: \d{3})+)(?![\d]| \d)")


def split_number(number: str, thousands: str) -> tuple[str, str] | None:
    """Return whole part and decimals of a number with any separators; None if it is not one number (1.2.3)."""
    number = number.replace("'", "")
    marks = re.findall(r"[.,]", number)
    parts = re.split(r"[.,]", number)
    if not marks:
        return number, ""
    if len(marks) == 1:
        grouped = marks[0] in thousands and len(parts[1]) == 3 and len(parts[0]) <= 3 and parts[0][0] != "0"
        return (parts[0] + parts[1], "") if grouped else (parts[0], parts[1])
    middle_fits = all(len(part) in (2, 3) for part in parts[1:-1])
    if len(set(marks)) == 1 and middle_fits and len(parts[-1]) == 3 and len(parts[0]) <= 3:
        return "".join(parts), ""
    if len(set(marks[:-1])) == 1 and marks[-1] != marks[0] and middle_fits and len(parts[-2]) == 3:
        return "".join(parts[:-1]), parts[-1]
    return None


def is_rising(low: str, high: str, thousands: str) -> bool:
    """True if two numbers can be the ends of a range; a score (3-2) or a code (01-02) is not one."""
    ends = [split_number(end, thousands) or (end, "") for end in (low, high)]
    if any(len(whole) > LONGEST_NUMBER or (whole[0] == "0" and len(whole) > 1) for whole, _ in ends):
        return False
    return float(".".join(ends[0])) < float(".".join(ends[1]))


def keep_apart(words: str, match: re.Match[str]) -> str:
    """Return `words` with a space next to a letter that touches `match`."""
    before, after = match.string[match.start() - 1 : match.start()], match.string[match.end() : match.end() + 1]
    return f"{' ' if before.isalnum() else ''}{words}{' ' if after.isalnum() else ''}"


def plural_form(count: str, forms: list[str], rule: str) -> str:
    """Return the grammatical form that goes with `count` (digits)."""
    number = int(count[-3:])
    large = len(count.lstrip("0")) > 3
    few = number % 10 in (2, 3, 4) and number % 100 not in (12, 13, 14)
    one = number == 1 and not large
    match rule:
        case "russian":
            index = 0 if number % 10 == 1 and number % 100 != 11 else 1 if few else 2
        case "polish":
            index = 0 if one else 1 if few else 2
        case "czech":
            index = 0 if one else 1 if number in (2, 3, 4) and not large else 2
        case "arabic":
            index = 1 if 3 <= number % 100 <= 10 else 0
        case "french":
            index = 0 if number in (0, 1) and not large else 1
        case _:
            index = 0 if one else 1
    return forms[min(index, len(forms) - 1)]


def substitute(pairs: list[list[str]], text: str) -> str:
    """Apply [pattern, replacement] pairs in order."""
    for pattern, replacement in pairs:
        text = re.sub(pattern, replacement, text)
    return text


class NumberReader:
    """Reads the numbers in sentences of one language; holds its compiled patterns."""

    def __init__(self, table: LanguageTable) -> None:
        self._table = table
        marks = any_of(table.units)
        magnitude = rf"(?:\s(?P<magnitude>(?i:{table.magnitudes or '(?!)'}))\b)?"
        ordinal_mark = table.ordinal or r"(?!)"
        self._amount = re.compile(
            rf"(?P<sign>(?<![\w.,/)-])[-−](?=(?:{marks})?\s?\d))?(?:(?P<before>{marks})\s?)?(?P<number>{NUMBER})"
            rf"(?:(?P<ordinal>{ordinal_mark})|{magnitude}(?:\s?(?P<after>{marks})(?!\w))?)"
        )
        # The template already has the word for the hour, so a written one is dropped: 14:30 Uhr.
        unit = table.full_hour.replace("{hour}", "").strip()
        self._clock_time = re.compile(CLOCK.pattern + (rf"(?:\s?{re.escape(unit)}\b)?" if unit else ""), re.I)
        self._before_number = re.compile(rf"(?<!\w)({any_of(table.before_number)})\s?(?=\d)", re.I)

    def read(self, text: str) -> str:
        """Return the text with every number in words."""
        table = self._table
        text = self._before_number.sub(lambda m: table.before_number[m[1].lower()] + " ", text)
        if " " in table.thousands:
            text = _BLANK_GROUPS.sub(lambda m: m[1] + m[2].replace(" ", ""), text)
        if table.dates:
            text = YEAR_LAST_DATE.sub(self._date, YEAR_FIRST_DATE.sub(self._date, text))
        text = self._clock_time.sub(self._clock, text)
        text = PHONE.sub(self._phone, text)
        if table.spelled:
            text = re.sub(table.spelled, lambda m: spell_digits(m[0], table.code), text)
        if table.quotient:
            read = self._cardinal
            spoken = table.quotient.format
            text = QUOTIENT.sub(lambda m: spoken(numerator=read(m[1]), denominator=read(m[2])), text)
        if table.range:
            rising = partial(is_rising, thousands=table.thousands)
            text = RANGE.sub(lambda m: f"{m[1]} {table.range} {m[2]}" if rising(m[1], m[2]) else m[0], text)
        text = self._amount.sub(self._read_amount, text)
        return substitute(table.repairs, text)

    def _cardinal(self, digits: str) -> str:
        return cardinal(digits, self._table.code)

    def _date(self, match: re.Match[str]) -> str:
        dates, day, month = self._table.dates, match["day"], match["month"]
        assert dates
        month_first = (dates.order == "mdy" and int(day) <= 12) or int(month) > 12
        if match.re is YEAR_LAST_DATE and month_first:
            day, month = month, day
        if not (1 <= int(month) <= 12 and 1 <= int(day) <= 31):
            return match[0]
        day = day.lstrip("0")
        return dates.spoken.format(
            day=self._cardinal(day),
            ordinal=ordinal(day, self._table.code),
            month=dates.months[int(month) - 1],
            year=self._cardinal(match["year"]),
        )

    def _clock(self, match: re.Match[str]) -> str:
        hour, minute, second = match.groups()
        hour_words = self._cardinal(str(int(hour)))
        apart = " " if match.string[match.end() : match.end() + 1].isalpha() else ""  # as in 2:30pm
        if minute == "00" and not second:
            return self._table.full_hour.format(hour=hour_words) + apart
        words = self._table.time.format(hour=hour_words, minute=self._minutes(minute))
        return (f"{words} {self._minutes(second)}" if second else words) + apart

    def _minutes(self, digits: str) -> str:
        # 12:05 keeps its zero in languages that say only the numbers, and loses it if a unit is named.
        return self._cardinal(digits if self._table.time == "{hour} {minute}" else str(int(digits)))

    def _phone(self, match: re.Match[str]) -> str:
        groups = re.findall(r"\d+", match[0])
        words = ", ".join(spell_digits(group, self._table.code) for group in groups)
        return f"{self._table.plus} {words}" if match[0][0] == "+" else words

    def _read_amount(self, match: re.Match[str]) -> str:
        table = self._table
        parts = split_number(match["number"], table.thousands)
        unit = match["before"] or match["after"]
        if parts is None:  # 1.2.3 or 1,2,3: number by number, the dot as a word, the comma as a pause
            spoken = {".": f" {table.dot} ", ",": ", "}
            pieces = re.findall(r"\d+|[.,]", match["number"].replace("'", ""))
            words = "".join(spoken.get(piece) or self._cardinal(piece) for piece in pieces)
        elif match["ordinal"] and not parts[1]:
            endings = table.ordinal_endings.get(match["ordinal"].lower(), [])
            words = substitute(endings, ordinal(parts[0], table.code))
        elif unit == "%" and table.percent_first:
            words = f"{table.percent_first}{self._decimal(*parts)}"
        elif unit:
            words = self._with_unit(*parts, unit, match["magnitude"])
        else:
            words = self._decimal(*parts) + (f" {match['magnitude']}" if match["magnitude"] else "")
        if match["ordinal"] and (parts is None or parts[1]):
            words += match["ordinal"]
        if match["sign"]:
            words = table.minus + table.word_space + words
        return keep_apart(words, match) if table.spaced else words

    def _decimal(self, whole: str, decimals: str) -> str:
        table = self._table
        if not decimals:
            return self._cardinal(whole)
        if table.fraction == "named" and len(decimals) <= 3 and len(whole) <= 12 and decimals.strip("0"):
            from decimal import Decimal

            # Tenths and hundredths, for languages whose grammar needs it.
            return str(_num2words(Decimal(f"{whole}.{decimals}"), lang=table.code))
        zeros = len(decimals) - len(decimals.lstrip("0"))
        if table.fraction == "digits" or zeros == len(decimals) or len(decimals) > 6:
            fraction = spell_digits(decimals, table.code)
        else:
            fraction = " ".join(self._cardinal(part) for part in (*decimals[:zeros], decimals[zeros:]))
        return table.word_space.join((self._cardinal(whole), table.point, fraction))

    def _with_unit(self, whole: str, decimals: str, unit: str, magnitude: str | None) -> str:
        """Read an amount and its unit, agreeing in number; two decimals of money are its hundredths."""
        table = self._table
        forms, *hundredths = table.units[unit]
        if magnitude:
            return f"{self._decimal(whole, decimals)} {magnitude}{table.magnitude_joint}{forms[-1]}"
        if decimals and (len(decimals) != 2 or not hundredths):
            return f"{self._decimal(whole, decimals)} {plural_form('2', forms, table.plural)}"
        spoken = self._counted(whole, forms, unit in table.feminine_units)
        if not decimals.strip("0"):
            return spoken
        cents = self._counted(decimals.lstrip("0"), hundredths[0], False)
        return f"{spoken}{table.unit_joint}{cents}"

    def _counted(self, count: str, forms: list[str], feminine: bool) -> str:
        table = self._table
        number = substitute(table.before_feminine if feminine else table.before_noun, self._cardinal(count))
        joint = "" if table.code == "ko" else table.word_space
        return f"{number}{joint}{plural_form(count, forms, table.plural)}"
