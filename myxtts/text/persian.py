"""Persian normalisation: one spelling per word, half-spaces as in the standard, numbers in words.

* Punctuation becomes the shared marks `, ; ? . ! :`. They are in the XTTS vocabulary and occur in every language,
  so published weights already know them; Persian marks would be new tokens with the same meaning. Quotation marks
  are dropped, as in the other languages.
* Short vowels, sukun and shadda are removed: they are written so rarely that they only split one word into several
  spellings. Tanvin is kept: it is pronounced, and without it «حتماً» reads as another word.
* The half-space (ZWNJ) is kept only after letters that join to the left. After the others it is invisible, so
  «کار‌ها» and «کارها» become one spelling. It is inserted where people write a space («می روم») or nothing
  («کتابها»). «بیشتر», «کمتر» and «بهتر» have none: the standard writes these three as one word.
* «خانۀ», «خانهٔ» and «خانه ی» all become «خانه‌ی»: the ی is what is spoken.
* «/» between two numbers is a decimal mark, as on Persian keyboards; three numbers are a date. Before three zeros
  it is a thousands mark («۵۰۰/۰۰۰»), and so is a point.
* Latin words stay, in lower case, because the vocabulary has no capitals.

Word lists are in `languages/fa.toml`; `numbers` spells whole numbers.
"""

import re
import unicodedata

from myxtts.text.numbers import (
    CLOCK,
    PHONE,
    RANGE,
    cardinal,
    is_rising,
    keep_apart,
    ordinal,
    spell_digits,
    split_number,
)
from myxtts.text.tables import CharacterTable, any_of, clean_characters, load_table

ZWNJ = "\u200c"
HAMZA_ABOVE = "\u0654"
_LETTERS = "\u0621-\u063a\u0641-\u064b\u0654\u0671-\u06d3"
LETTER = f"[{_LETTERS}]"
_NON_JOINERS = "اآدذرزژوؤء"
_PLURALS = "ها(?:یی|یم|یت|یش|یمان|یتان|یشان|ی)?"
_SPOKEN_PLURALS = "ها(?:م|ش|شون|تون|یمون|یتون|یشون)"  # not هات (hot) and هامون (the lake)
_PRONOUNS = "ام|ات|اش|ای(?! کاش)|اند|ایم|اید|امان|اتان|اشان|مان|تان|شان|مون|تون|شون"
_PERSON = "(?:م|ی|د|یم|ید|ند|ه|ن|ین)"
_CLITIC = "(?:ش|شان|شون|مان|تان|ت)?"

_ZWNJ_RUN = re.compile(rf"{ZWNJ}{{2,}}")
_EDGE_ZWNJ = re.compile(rf"(?<![{_LETTERS}0-9]){ZWNJ}|{ZWNJ}(?!{LETTER})|(?<=[{_NON_JOINERS}]){ZWNJ}")
_USELESS_ZWNJ = re.compile(rf"(?<!{LETTER}){ZWNJ}|{ZWNJ}(?!{LETTER})|(?<=[{_NON_JOINERS}]){ZWNJ}")
_TA_MARBUTA = re.compile(rf"ة(?=[\s{ZWNJ}]?ال{LETTER})")
_EZAFE = re.compile(rf"(?<={LETTER})ه(?:ٔ|[ {ZWNJ}]ی(?!{LETTER}|{ZWNJ}))")
_SPACE_BEFORE_MARK = re.compile(r"\s+(?=[,;:?!.)](?:\s|$|[,;:?!.)]))")
_GLUED_MARK = re.compile(rf"([,;?!:]|(?<={LETTER}{{2}})\.)(?={LETTER})")

_DATE = re.compile(r"(?<![\w./-])(\d{4}|\d{1,2})([/-])(\d{1,2})\2(\d{4}|\d{1,2})(?![\w/-])")
_ORDINAL = re.compile(rf"(?<![\w.,/])(\d+)(?:[ {ZWNJ}]?(?:ا?مین)|[ {ZWNJ}]?ام|{ZWNJ}?م)(?!{LETTER}|\w)")
_ERAS = {"م": "میلادی", "ش": "هجری شمسی", "ق": "هجری قمری"}
_YEAR = re.compile(rf"(?<![\w.,/])([12](?!000)\d{{3}}(?=م)|1[0-4]\d\d\s?(?=[شق]))([مشق])(?!\w|{ZWNJ}|\.{LETTER})")
_AFTER_CHRIST = re.compile(rf"(?<=\d)\s?م\.(?!{LETTER})")
_CELSIUS = re.compile(r"°\s?c(?!\w)")
_MIXED_FRACTION = re.compile(r"(?<=\d)\s?(?=[½¼¾])")
_FIRST_PERCENT = re.compile(r"(?<=\d)\s?%(?=\s?-\s?\d[\d.,]*\s?%)")
_SLASHED_THOUSANDS = re.compile(r"[1-9]\d{0,2}[./]000")
_AMOUNT = re.compile(
    r"(?P<sign>(?<![\w.,/)%°-])[-−+](?=[$€£¥₺₽₹%]?\s?\d))?(?:(?P<before>[$€£¥₺₽₹%])\s?)?"
    r"(?P<number>\d+(?:[.,/]\d+)*)(?:\s(?P<magnitude>هزار|میلیون|میلیارد|تریلیون)(?!\w))?(?:\s?(?P<after>[$€£¥₺₽₹%°]))?"
)


class _PersianCharacters(CharacterTable):
    """A table applied to its own results: presentation forms decompose into Arabic letters."""

    def __missing__(self, code: int) -> str:
        self[code] = cleaned = super().__missing__(code).translate(self)
        return cleaned


_TABLE = load_table("fa")
_WORDS = _TABLE.words
_CHARACTERS = _PersianCharacters(_TABLE.characters)


def _patterns() -> dict[str, re.Pattern[str]]:
    """Return the patterns that need the word lists."""
    verb = (
        f"(?:(?:{any_of(_WORDS['present_stems'])}){_PERSON}|(?:{any_of(_WORDS['past_stems'])}){_PERSON}?"
        f"|{any_of(_WORDS['colloquial_verbs'])}){_CLITIC}"
    )
    start, end = rf"(?<!{LETTER})(?<!{ZWNJ})", rf"(?!{LETTER}|{ZWNJ})"
    verb_end = rf"(?!{LETTER}|{ZWNJ}(?!(?:ام|ای|است|ایم|اید|اند)(?!{LETTER})))"  # می خورده‌اند
    bracketed = [short for short in _TABLE.abbreviations if short[0] == "("]
    abbreviation = rf"(?<!{LETTER})(?<!\.)(?:{any_of(_TABLE.abbreviations)})|{any_of(bracketed)}"
    superlative = rf"ترین(?:{ZWNJ}?{_PLURALS})?"
    several = rf"{LETTER}(?:{LETTER}|{ZWNJ})+"
    degree = rf"تر(?:ی|ها|های)?|{superlative}"
    comparable = any_of(_WORDS["comparable"])
    return {
        "special": re.compile(rf"[0-9{''.join(map(re.escape, {**_TABLE.symbols, **_TABLE.units}))}]"),
        "symbol": re.compile(f"[{''.join(map(re.escape, _TABLE.symbols))}]"),
        "abbreviation": re.compile(rf"(?:{abbreviation})(?!{LETTER})"),
        "before_number": re.compile(rf"(?<!{LETTER})({any_of(_TABLE.before_number)})\s?(?=\d)"),
        "spaced_verb": re.compile(rf"(?<!ماه ){start}(ن?می) ({verb}){verb_end}"),
        "glued_verb": re.compile(rf"{start}(ن?می)({verb}){verb_end}"),
        "plural": re.compile(rf"{start}({several}(?<!ها)(?<!های)(?<!هایی)) ({_PLURALS}|{_SPOKEN_PLURALS}){end}"),
        "glued_plural": re.compile(rf"(?<!{LETTER})({LETTER}+(?![{_NON_JOINERS}]){LETTER})({_PLURALS}){end}"),
        "superlative": re.compile(rf"{start}({several}) ({superlative}){end}"),
        "comparative": re.compile(rf"{start}({comparable}) ?({degree}){end}"),
        "one_piece": re.compile(rf"{start}(بیش|کم|به){ZWNJ}({degree}){end}"),
        "pronoun": re.compile(rf"{start}({LETTER}(?:{LETTER}|{ZWNJ})*[^\Wا]ه) ({_PRONOUNS}){end}"),
        "thirtieth": re.compile(rf"{start}(سی) (ام(?:ین)?){end}"),
    }


_PATTERNS = _patterns()
_KEPT_APART = {
    "glued_verb": frozenset(_WORDS["not_verbs"]),
    "superlative": frozenset(_WORDS["never_joined"]),
    "plural": frozenset(_WORDS["never_joined"]),
    "glued_plural": frozenset(_WORDS["never_joined"] + _WORDS["not_plurals"]),
    "pronoun": frozenset(_WORDS["never_joined"] + _WORDS["ending_in_h"]),
}
"""Words that only look as if they had the affix of a pattern."""


def normalize_persian(text: str) -> str:
    """Return Persian text as it is spoken."""
    text = clean_characters(text, _CHARACTERS).lower()
    text = _unify_spelling(text)
    if _PATTERNS["special"].search(text):
        text = _read_numbers(text)
        text = _PATTERNS["symbol"].sub(lambda match: f" {_TABLE.symbols[match[0]]} ", text)
    text = _PATTERNS["abbreviation"].sub(lambda match: f" {_TABLE.abbreviations[match[0]]}", text)
    text = " ".join(text.split())
    text = _join_affixes(text)
    text = _SPACE_BEFORE_MARK.sub("", _GLUED_MARK.sub(r"\1 ", text))
    if ZWNJ in text:
        text = _USELESS_ZWNJ.sub("", text)
    return unicodedata.normalize("NFC", " ".join(text.split()))


def _unify_spelling(text: str) -> str:
    """Bring letters and half-spaces to one standard spelling."""
    if ZWNJ in text:
        text = _EDGE_ZWNJ.sub("", _ZWNJ_RUN.sub(ZWNJ, text))
    text = _TA_MARBUTA.sub("ت", text).replace("ة", "ه")
    # Composing (NFC) can restore an alef with hamza after the character table was applied.
    return text.replace("ًا", "اً").replace("أ", "ا")


def _join_affixes(text: str) -> str:
    """Insert a half-space before affixes that were written separately or without any space."""

    def joined(name: str, text: str, group: int = 1) -> str:
        """Insert a half-space between the two groups of a pattern, except in words it must not touch."""
        apart = _KEPT_APART.get(name, ())
        return _PATTERNS[name].sub(lambda m: m[0] if m[group] in apart else f"{m[1]}{ZWNJ}{m[2]}", text)

    text = _EZAFE.sub(f"ه{ZWNJ}ی", text).replace(HAMZA_ABOVE, "")
    if "می" in text:
        text = joined("glued_verb", joined("spaced_verb", text), group=0)
    if "تر" in text:
        text = joined("comparative", joined("superlative", text))
        text = _PATTERNS["one_piece"].sub(r"\1\2", text)
    if "ها" in text:
        text = joined("plural", joined("glued_plural", text))
    if "ه " in text:
        text = joined("pronoun", text)
    return joined("thirtieth", text) if "سی ا" in text else text


def _read_numbers(text: str) -> str:
    """Read every number as words, the more specific readings first."""
    text = _PATTERNS["before_number"].sub(lambda m: f"{_TABLE.before_number[m[1]]} ", text)
    text = _YEAR.sub(lambda m: f"{m[1].strip()} {_ERAS[m[2]]}", _AFTER_CHRIST.sub(" میلادی", text))
    text = _CELSIUS.sub(f"° سانتی{ZWNJ}گراد", text)
    text = _FIRST_PERCENT.sub("", _MIXED_FRACTION.sub(" و ", text))
    text = _DATE.sub(_date, text)
    text = CLOCK.sub(_clock, text)
    text = PHONE.sub(_phone, text)
    text = RANGE.sub(lambda m: f"{m[1]} تا {m[2]}" if is_rising(m[1], m[2], ",") else m[0], text)
    text = _ORDINAL.sub(lambda m: ordinal(m[1], "fa") + ("ین" if m[0].endswith("ین") else ""), text)
    return _AMOUNT.sub(_amount, text)


def _date(match: re.Match[str]) -> str:
    first, mark, month, last = match.groups()
    year_first = len(first) == 4 or (len(last) < 4 and int(first) > 31)
    year, day = (first, last) if year_first else (last, first)
    is_year = len(year) == 4 or (mark == "/" and int(year) > 31)
    if not (is_year and 1 <= int(month) <= 12 and 1 <= int(day) <= 31):
        return match[0]
    # The Persian calendar differs by some 621 years, so dates written in digits are not ambiguous.
    months = _WORDS["solar_months" if int(year) < 1600 else "western_months"]
    return f"{ordinal(day.lstrip('0'), 'fa')} {months[int(month) - 1]} {cardinal(year, 'fa')}"


def _clock(match: re.Match[str]) -> str:
    hour, minute, second = (int(part) if part else 0 for part in match.groups())
    words = cardinal(str(hour), "fa")
    if minute:
        words += f" و {cardinal(str(minute), 'fa')} دقیقه"
    if second:
        words += f" و {cardinal(str(second), 'fa')} ثانیه"
    return words


def _phone(match: re.Match[str]) -> str:
    plus = "مثبت " if match[0][0] == "+" else ""
    return plus + ", ".join(spell_digits(group, "fa") for group in re.findall(r"\d+", match[0]))


def _amount(match: re.Match[str]) -> str:
    """Read a number with its sign and unit; two decimals of money are its hundredths."""
    number = match["number"]
    if _SLASHED_THOUSANDS.fullmatch(number):
        number = number[:-4] + "000"
    parts = split_number(number.replace("/", "."), ",")
    unit = match["before"] or match["after"]
    magnitude = f" {match['magnitude']}" if match["magnitude"] else ""
    if parts is None:
        words = f" {_TABLE.point} ".join(cardinal(part, "fa") for part in re.findall(r"\d+", number))
    elif unit and len(_TABLE.units[unit]) == 2 and len(parts[1]) == 2 and not magnitude:
        (name,), (hundredth,) = _TABLE.units[unit]
        words, unit = f"{cardinal(parts[0], 'fa')} {name}", None
        if parts[1] != "00":
            words += f" و {cardinal(parts[1].lstrip('0'), 'fa')} {hundredth}"
    else:
        words = _decimal(*parts) + magnitude
    if unit:
        words += f" {_TABLE.units[unit][0][0]}"
    if match["sign"]:
        words = f"{_TABLE.plus if match['sign'] == '+' else _TABLE.minus} {words}"
    return keep_apart(words, match)


def _decimal(whole: str, decimals: str) -> str:
    """Read «سه ممیز چهارده»; leading zeros of the decimals are read one by one."""
    if not decimals:
        return cardinal(whole, "fa")
    zeros = len(decimals) - len(decimals.lstrip("0"))
    parts = [*decimals[:zeros], *([decimals[zeros:]] if decimals[zeros:] else [])]
    return f"{cardinal(whole, 'fa')} {_TABLE.point} {' '.join(cardinal(part, 'fa') for part in parts)}"
