"""SSML to segments of plain text, each with its language, its rate and the silence after it.

A subset of SSML 1.1: what the model can do, and what the number tables of `text` can read. Everything else is an
error that names the nearest thing there is, all errors of a document at once. Documents cannot declare a DTD, so
there are no entities but XML's own five. Knows no model.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import NamedTuple
from xml.etree import ElementTree

from myxtts.config import LANGUAGES
from myxtts.errors import ConfigError
from myxtts.settings import suggest_choice
from myxtts.text.numbers import LONGEST_NUMBER, NumberReader, cardinal, ordinal, spell_digits
from myxtts.text.tables import load_table

STRENGTHS = {"none": 0.0, "x-weak": 0.1, "weak": 0.25, "medium": 0.5, "strong": 0.8, "x-strong": 1.2}  # seconds
RATES = {"x-slow": 0.6, "slow": 0.8, "medium": 1.0, "default": 1.0, "fast": 1.25, "x-fast": 1.6}
SLOWEST, FASTEST = 0.5, 2.0
LONGEST_BREAK_S, ALL_BREAKS_S = 10.0, 600.0
DEEPEST = 32  # elements inside one another
ELEMENTS: dict[str, tuple[str, ...]] = {
    "speak": ("version", "xml:lang", "xmlns", "schemaLocation"),
    "p": ("xml:lang",),
    "s": ("xml:lang",),
    "lang": ("xml:lang",),
    "prosody": ("rate",),
    "break": ("time", "strength"),
    "say-as": ("interpret-as", "format"),
    "sub": ("alias",),
}
"""The elements and their attributes."""
_START = re.compile(r"\s*(?:<\?xml[^>]*\?>\s*)?<(?:speak[\s/>]|!DOCTYPE\s)")
_DECLARATION = re.compile(r"<!(?!--|\[CDATA\[)")
_NAMESPACES = ("{http://www.w3.org/2001/10/synthesis}", "{http://www.w3.org/XML/1998/namespace}")
_SCHEMA = "{http://www.w3.org/2001/XMLSchema-instance}"
_TIME = re.compile(r"\+?(\d{1,9}(?:\.\d{1,9})?|\.\d{1,9})(ms|s)")
_RATE = re.compile(r"([+-]?)(\d{1,9}(?:\.\d{1,9})?)(%?)")
_ORDERS = ("dmy", "mdy", "ymd")  # of a date
_MOST_PROBLEMS = 8

# Single letters alone are read as words in Persian: these are their names.
_PERSIAN_LETTERS = {
    "ا": "الف", "ب": "به", "پ": "په", "ت": "ته", "ث": "ثه", "ج": "جیم", "چ": "چه", "ح": "حه", "خ": "خه",
    "د": "دال", "ذ": "ذال", "ر": "ره", "ز": "زه", "ژ": "ژه", "س": "سین", "ش": "شین", "ص": "صاد", "ض": "ضاد",
    "ط": "طا", "ظ": "ظا", "ع": "عین", "غ": "غین", "ف": "فه", "ق": "قاف", "ک": "کاف", "گ": "گاف", "ل": "لام",
    "م": "میم", "ن": "نون", "و": "واو", "ه": "هه", "ی": "یه", "ي": "یه", "ك": "کاف",
}  # fmt: skip


class Segment(NamedTuple):
    """Text in one language at one rate."""

    text: str  # may be empty: then there is only silence
    language: str
    rate: float = 1.0
    pause_s: float | None = None  # the silence after it; None: as between two sentences


def is_markup(text: str) -> bool:
    """True if a text is meant as SSML: it begins with `<speak`, or with what may only precede that in XML."""
    return _START.match(text.removeprefix("\ufeff")) is not None


class Markup:
    """A parsed document."""

    def __init__(self, text: str) -> None:
        """Parse; raises an error for what is not XML, or has another root than `speak`."""
        if _DECLARATION.search(text):
            raise ConfigError("SSML: <!DOCTYPE …> and other declarations are not accepted; remove them")
        try:
            self._root = ElementTree.fromstring(text.removeprefix("\ufeff").strip())
        except (ElementTree.ParseError, ValueError) as error:
            hint = "; write & as &amp; and < as &lt; in text" if "token" in str(error) else ""
            raise ConfigError(f"SSML: the text is not well-formed XML: {error}{hint}") from None
        if _plain(self._root.tag) != "speak":
            raise ConfigError(f"SSML: the document is a <{_plain(self._root.tag)}>, expected <speak>")
        self.language = _code(_attributes(self._root).get("xml:lang", ""))
        """That of the document; empty if it names none that we know."""

    @property
    def text(self) -> str:
        """All text without markup, for example to detect its language."""
        return " ".join("".join(self._root.itertext()).split())

    def segments(self, language: str) -> list[Segment]:
        """The segments of a document in this language; one error lists the problems."""
        reader = _Reader()
        reader.read(self._root, language, 1.0, 0)
        reader.require(
            reader.paused_s <= ALL_BREAKS_S,
            f"all breaks together last {reader.paused_s:g} s",
            f"up to {ALL_BREAKS_S:g} s",
        )
        if reader.problems:
            shown = reader.problems[:_MOST_PROBLEMS]
            more = [f"… and {len(reader.problems) - len(shown)} more"] * (len(reader.problems) > len(shown))
            raise ConfigError("SSML:\n  " + "\n  ".join(shown + more))
        return reader.segments


class _Reader:
    """Walks through a document and collects segments and problems."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.problems: list[str] = []
        self.paused_s = 0.0

    def require(self, holds: bool, found: str, expected: str) -> None:
        if not holds:
            self.problems.append(f"{found}; expected {expected}")

    def read(self, element: ElementTree.Element, language: str, rate: float, depth: int) -> None:
        tag, given = _plain(element.tag), _attributes(element)
        if tag not in ELEMENTS:
            self.problems.append(_no_choice(f"<{tag[:40]}>", tag, ELEMENTS))
            return
        if depth > DEEPEST:
            self.problems.append(f"elements are nested more than {DEEPEST} deep")
            return
        for name in sorted(given.keys() - set(ELEMENTS[tag])):
            self.problems.append(_no_choice(f"<{tag} {name[:40]}=…>", name, ELEMENTS[tag]))
        if "xml:lang" in given and depth:
            language = self._language(tag, given["xml:lang"], language)
        if tag == "prosody":
            rate *= self._rate(given.get("rate", ""))
            self.require(SLOWEST <= rate <= FASTEST, f"a rate of {rate:.0%}", f"{SLOWEST:.0%} to {FASTEST:.0%}")
        if tag in ("break", "say-as", "sub"):
            self._leaf(element, tag, given, language, rate)
            return
        self._say(element.text, language, rate)
        for child in element:
            self.read(child, language, rate, depth + 1)
            self._say(child.tail, language, rate)
        if tag in ("p", "s") and self.segments and self.segments[-1].pause_s is None:
            self.segments[-1] = self.segments[-1]._replace(text=self.segments[-1].text + "\n\n")

    def _leaf(
        self, element: ElementTree.Element, tag: str, given: dict[str, str], language: str, rate: float
    ) -> None:
        text = " ".join((element.text or "").split())
        self.require(not len(element), f"<{tag}> has elements inside", "only text")
        if tag == "break":
            self.require(not text, f"<break> with the text {text[:20]!r} inside", "<break/>")
            self._pause(self._break(given))
        elif tag == "sub":
            self.require(
                "alias" in given, "<sub> without alias", '<sub alias="what is said">what is written</sub>'
            )
            self._say(given.get("alias", ""), language, rate)
        else:
            try:
                said = said_as(text, given.get("interpret-as", ""), given.get("format", ""), language)
                self._say(said, language, rate)
            except ConfigError as error:
                self.problems.append(str(error))

    def _say(self, text: str | None, language: str, rate: float) -> None:
        text = re.sub(r"\s+", " ", text or "")
        last = self.segments[-1] if self.segments else None
        continues = last is not None and last.pause_s is None
        has_words = any(map(str.isalnum, text))
        if last and continues and (not has_words or (last.language, last.rate) == (language, rate)):
            self.segments[-1] = last._replace(text=last.text + text)  # marks alone cannot be spoken
        elif has_words:
            self.segments.append(Segment(text, language, rate))

    def _pause(self, seconds: float) -> None:
        self.paused_s += seconds
        last = self.segments.pop() if self.segments else Segment("", LANGUAGES[0])
        self.segments.append(last._replace(pause_s=(last.pause_s or 0.0) + seconds))

    def _break(self, given: dict[str, str]) -> float:
        """Seconds of a break."""
        if "time" in given:
            found = _TIME.fullmatch(given["time"].strip())
            seconds = float(found[1]) / (1000 if found[2] == "ms" else 1) if found else math.inf
            is_short = seconds <= LONGEST_BREAK_S
            self.require(
                is_short, f'<break time="{given["time"][:20]}">', "a time such as 500ms or 1.2s, up to 10s"
            )
            return seconds if is_short else 0.0
        return STRENGTHS[self._choice("break strength", given.get("strength", "medium"), STRENGTHS) or "none"]

    def _rate(self, given: str) -> float:
        found = _RATE.fullmatch(given.strip())
        if not found or (found[1] and not found[3]):
            if not given or given[:1].isdigit() or given[:1] in "+-.":
                self.problems.append(f'<prosody rate="{given[:20]}">; expected a rate such as 80%, +20% or slow')
                return 1.0
            return RATES[self._choice("prosody rate", given.strip(), RATES) or "medium"]
        value = float(found[2]) / (100 if found[3] else 1)
        return 1 + (value if found[1] == "+" else -value) if found[1] else value

    def _language(self, tag: str, given: str, usual: str) -> str:
        code = _code(given)
        if not code:
            self.problems.append(_no_choice(f'<{tag} xml:lang="{given[:20]}">', given, LANGUAGES))
        return code or usual

    def _choice(self, what: str, given: str, choices: dict[str, float]) -> str:
        if given in choices:
            return given
        self.problems.append(_no_choice(f'<{what}="{given[:20]}">', given, choices))
        return ""


def _no_choice(found: str, word: str, choices: Iterable[str]) -> str:
    """The problem with something that is not a choice, with the nearest one."""
    known = tuple(choices)
    near = suggest_choice(word, known)
    return f"{found} is not supported. {near.capitalize() + ' ' if near else ''}Choices: {', '.join(known)}"


def _plain(name: str) -> str:
    """The name of an element or attribute without the namespaces of SSML and XML; others stay in it."""
    for space in (*_NAMESPACES, _SCHEMA):
        name = name.removeprefix(space)
    return name


def _attributes(element: ElementTree.Element) -> dict[str, str]:
    return {
        "xml:lang" if name == f"{_NAMESPACES[1]}lang" else _plain(name): value
        for name, value in element.attrib.items()
    }


def _code(language: str) -> str:
    """The code of a language with or without its region; empty if we do not know it."""
    code = re.split("[-_]", language.strip().lower())[0]
    return code if code in LANGUAGES else ""


def said_as(text: str, kind: str, form: str, language: str) -> str:
    """Text as `<say-as>` reads it in a language, in words."""
    if kind not in _KINDS:
        raise ConfigError(_no_choice(f'<say-as interpret-as="{kind[:20]}">', kind, _KINDS))
    if form and kind != "date":
        raise ConfigError(f'<say-as interpret-as="{kind}" format="{form[:20]}">: only dates have a format')
    plain = "".join(str(unicodedata.digit(letter, letter)) for letter in text).replace("\u2212", "-")
    return _KINDS[kind](plain, form, language)


def _unreadable(kind: str, text: str, expected: str) -> ConfigError:
    return ConfigError(f'<say-as interpret-as="{kind}">{text[:30]}</say-as>; expected {expected}')


def _whole(text: str, kind: str) -> tuple[str, str]:
    """Sign and digits of a whole number; marks and spaces between groups of three are left out."""
    found = re.fullmatch(r"([+-]?)(\d+|\d{1,3}(?:([., '\u066c])\d{3})(?:\3\d{3})*)", text)
    digits = re.sub(r"\D", "", found[2]).lstrip("0") or "0" if found else ""
    if not found or len(digits) > LONGEST_NUMBER:
        raise _unreadable(kind, text, f"a whole number of up to {LONGEST_NUMBER} digits")
    return found[1], digits


def _cardinal(text: str, _: str, language: str) -> str:
    sign, digits = _whole(text, "cardinal")
    table = load_table(language)
    signs = {"+": [table.plus], "-": [table.minus], "": []}[sign]
    return table.word_space.join([*signs, cardinal(digits, language)])


def _ordinal(text: str, _: str, language: str) -> str:
    _, digits = _whole(text, "ordinal")
    said = ordinal(digits, language)
    if digits == "0" or said == cardinal(digits, language):
        raise _unreadable("ordinal", text, f"a number that has an ordinal in the tables of {language!r}")
    return said


def _digits(text: str, _: str, language: str) -> str:
    if not re.fullmatch(r"[\d\s.,-]*\d[\d\s.,-]*", text):
        raise _unreadable("digits", text, "digits")
    return ", ".join(spell_digits(group, language) for group in re.findall(r"\d+", text))


def _telephone(text: str, _: str, language: str) -> str:
    if not re.fullmatch(r"\+?[\d\s()./-]*\d[\d\s()./-]*", text):
        raise _unreadable("telephone", text, "a number such as +98 21 1234 5678")
    return load_table(language).plus * (text[0] == "+") + " " + _digits(re.sub("[+()/]", " ", text), "", language)


def _characters(text: str, _: str, language: str) -> str:
    table = load_table(language)
    said = []
    for letter in re.sub(r"[\s\u200c]", "", text):
        word = _PERSIAN_LETTERS.get(letter, letter) if language == "fa" else letter
        if letter.isdigit():
            word = spell_digits(letter, language)
        elif not letter.isalpha():
            word = table.symbols.get(letter, "")
        if not word:
            raise _unreadable("characters", letter, f"letters, digits and signs that {language!r} has a word for")
        said.append(word)
    if not said:
        raise _unreadable("characters", text, "at least one letter")
    return ", ".join(said)


def _date(text: str, form: str, language: str) -> str:
    dates = load_table(language).dates
    found = re.fullmatch(r"(\d{1,4})\s?[-/.]\s?(\d{1,2})\s?[-/.]\s?(\d{1,4})", text)
    usual = "ymd" if found and len(found[1]) > 2 else dates.order if dates else "dmy"
    form = form or usual
    if form not in _ORDERS:
        raise ConfigError(_no_choice(f'<say-as interpret-as="date" format="{form[:20]}">', form, _ORDERS))
    parts = dict(zip(form, found.groups(), strict=True)) if found else {}
    year, month, day = (int(parts.get(part, 0)) for part in "ymd")
    if not (len(parts.get("y", "")) == 4 and 1 <= month <= 12 and 1 <= day <= 31):
        raise _unreadable("date", text, f"day, month and a year of four digits in the order {form}")
    written = f"{year:04}-{month:02}-{day:02}"
    if language == "fa":
        from myxtts.text.persian import normalize_persian  # compiles many patterns on import

        return normalize_persian(written)
    if dates is None:
        raise _unreadable("date", text, f"another language: the tables of {language!r} have no dates")
    return NumberReader(load_table(language)).read(written)


_KINDS: dict[str, Callable[[str, str, str], str]] = {
    "cardinal": _cardinal, "ordinal": _ordinal, "characters": _characters, "spell-out": _characters,
    "digits": _digits, "date": _date, "telephone": _telephone,
}  # fmt: skip
