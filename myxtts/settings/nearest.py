"""What to say about a key, section, flag or choice that does not exist: the nearest one that does."""

import difflib
import re
from collections.abc import Collection, Sequence

from myxtts.config import LANGUAGE_NAMES
from myxtts.settings.table import canonical, specs

CONFIG_FLAG = "--config"
"""The flag that names the YAML file: the only one that is not a setting."""
_SYNONYMS = {name.lower(): code for code, name in LANGUAGE_NAMES.items()}
_SYNONYMS |= {"farsi": "fa", "mandarin": "zh", "large": "big", "medium": "normal", "base": "normal"}
"""Words for choices that are spelt otherwise."""
_GIGABYTES = re.compile(r"(\d{1,6})\s*g(i?b)?")


def suggestion(word: str, choices: Sequence[str]) -> str:
    """What to take instead of a word that is no choice, as advice; "" if nobody can tell.

    `zh-cn` and `en_US` mean their language. Of cards the next smaller one fits; the most similar would not.
    """
    word = word[:60].lower().strip()
    if (asked := _GIGABYTES.fullmatch(word)) and all(map(_GIGABYTES.fullmatch, choices)):
        sizes = {int(choice.rstrip("gib")): choice for choice in choices}
        if int(asked[1]) in sizes:
            return f"did you mean {sizes[int(asked[1])]}?"
        fitting = max((size for size in sizes if size < int(asked[1])), default=None)
        return f"take {sizes[fitting]}, the next smaller" if fitting else ""
    words = {choice: choice for choice in choices} | {w: c for w, c in _SYNONYMS.items() if c in choices}
    base = word.replace("_", "-").partition("-")[0]
    near = [base] if base in words else difflib.get_close_matches(word, words, n=1)
    return f"did you mean {words[near[0]]}?" if near else ""


def _nearest(word: str, known: Collection[str]) -> str:
    """The most similar known word; there always is one."""
    return difflib.get_close_matches(_plain(word), known, n=1, cutoff=0.0)[0]


def _plain(word: str) -> str:
    """A word in the form of a key, cut to a length that is quick to compare."""
    return word[:60].lower().replace("-", "_")


def _quoted(word: str) -> str:
    """A word as a message can show it, whatever a broken file holds; ordinary names stay as they are."""
    return word if len(word) <= 60 and word.isprintable() else repr(word[:60])


def unknown_key(written: str) -> str:
    """What is wrong with a dotted key that is in no section under that name."""
    section, _, name = written.partition(".")
    elsewhere = [key for key in canonical() if key.endswith(f".{name}")]
    if elsewhere:
        return f"unknown key {written}; {name} belongs in the section {elsewhere[0].partition('.')[0]}"
    spellings = {key.partition(".")[2]: canonical()[key] for key in canonical()}
    for spec in specs().values():  # who knows the flag writes its name into the file, too
        spellings.setdefault(spec.flags[0].lstrip("-").replace("-", "_"), spec.key)
    of_section = [word for word, key in spellings.items() if key.startswith(f"{section}.")]
    near = difflib.get_close_matches(_plain(name), of_section, n=1)
    key = spellings[near[0] if near else _nearest(name, spellings)]
    return f"unknown key {_quoted(written)}; the nearest known key is {key}"


def unknown_section(name: str) -> str:
    """What is wrong with a name at the left margin of the file that is not a section."""
    sections = list(dict.fromkeys(spec.section for spec in specs().values()))
    homes = [key for key in canonical() if key.endswith(f".{name}")]
    if homes:
        return f"{name} stands outside of any section; move it, indented, under {homes[0].partition('.')[0]}:"
    return (
        f"unknown section {_quoted(name)}; the nearest known one is {_nearest(name, sections)} "
        f"(the sections are {', '.join(sections)})"
    )


def unknown_arguments(arguments: Sequence[str]) -> list[str]:
    """One line for each argument no parser knew; the value that follows an unknown flag is passed over."""
    known = [CONFIG_FLAG, *(flag for spec in specs().values() for flag in spec.flags + spec.off_flags)]
    by_word = {_plain(flag): flag for flag in known}
    problems = []
    after_flag = False
    for argument in arguments:
        if argument.startswith("-"):
            word = argument.partition("=")[0]
            if word in known:
                problems.append(f"flag {word} has no meaning for this command; leave it out")
            else:
                near = by_word[_nearest(word, by_word)]
                problems.append(f"unknown flag {_quoted(word)}; the nearest known flag is {near}")
        elif not after_flag:
            problems.append(f"found {argument!r} where a flag was expected; flags start with --, see --help")
        after_flag = argument.startswith("-") and "=" not in argument
    return problems
