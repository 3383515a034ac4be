"""Chinese, Japanese and Korean in Latin letters, the way XTTS-v2's vocabulary expects them.

The romanisers are imported when a text first needs them: they are slow to load, and the Japanese one is an
optional extra. What remains unreadable is left as it is; numbers are words before text arrives here.
"""

import re
from functools import lru_cache
from typing import Any

from myxtts.errors import ConfigError

_PUNCTUATION = re.compile(r"\s*[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~，。、！？：；]+(?:\s*[!-/:-@，。、])*")


def romanize(text: str, language: str) -> str:
    """Text in the Latin spelling of `language` (zh, ja or ko); other languages are returned unchanged."""
    if language == "zh":
        return _pinyin(text)
    if language == "ja":
        return str(_japanese_romaniser().romaji(text)).lower()
    if language == "ko":
        return str(_korean_romaniser().translit(text))
    return text


def _pinyin(text: str) -> str:
    """Pinyin with tone digits, neutral tone 5, nothing between syllables.

    All punctuation becomes a comma: XTTS-v2 was trained on Chinese whose every mark was one, so a question
    mark would be a token the published weights have never met in this language.
    """
    from pypinyin import Style, pinyin

    text = _PUNCTUATION.sub(",", text)
    syllables = pinyin(text, style=Style.TONE3, heteronym=False, neutral_tone_with_five=True)
    return "".join(syllable[0] for syllable in syllables)


@lru_cache(maxsize=1)
def _japanese_romaniser() -> Any:
    try:
        from cutlet import Cutlet
    except ImportError as missing:
        raise ConfigError("Japanese text needs the extra 'ja': pip install 'myxtts[ja]'") from missing
    return Cutlet()


@lru_cache(maxsize=1)
def _korean_romaniser() -> Any:
    from hangul_romanize import Transliter
    from hangul_romanize.rule import academic

    return Transliter(academic)
