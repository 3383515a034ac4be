"""Whether texts are written in the letters of the language a user named for them: a wrong code costs a training.

Letters alone decide, so this is cheap and knows nothing of words; English named as French goes unnoticed.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Sequence
from functools import cache

from myxtts.config import LANGUAGE_NAMES

MOST_TEXTS = 1000
"""Texts that are looked at, spread over all."""
NEARLY_ALL = 0.9
_SCRIPTS = {
    "ar": ("ARABIC",),
    "fa": ("ARABIC",),
    "hi": ("DEVANAGARI",),
    "ja": ("HIRAGANA", "KATAKANA", "CJK"),
    "ko": ("HANGUL",),
    "ru": ("CYRILLIC",),
    "zh": ("CJK",),
}
"""How Unicode's names of a language's letters begin; all others write Latin letters."""

_log = logging.getLogger(__name__)


def warn_of_other_script(language: str, texts: Sequence[str]) -> None:
    """Say so when nearly all texts are in other letters than those of `language`."""
    scripts = _SCRIPTS.get(language, ("LATIN",))
    judged = [
        (text, share)
        for text in texts[:: 1 + len(texts) // MOST_TEXTS]
        if (share := _share(text, scripts)) is not None
    ]
    others = [text for text, share in judged if share < 0.5]
    if others and len(others) >= NEARLY_ALL * len(judged):
        _log.warning(
            "WARNING: --language %s means %s, but nearly all texts are written in other letters, such as %r: "
            "name another language, or leave it out to have it detected",
            language,
            LANGUAGE_NAMES[language],
            others[0][:40],
        )


def _share(text: str, scripts: tuple[str, ...]) -> float | None:
    """Of a text's letters, those of these scripts; None without letters."""
    of_letters = [_script(letter) in scripts for letter in text if letter.isalpha()]
    return sum(of_letters) / len(of_letters) if of_letters else None


@cache
def _script(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0]
