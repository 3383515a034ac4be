"""Turns a written sentence into the sentence as it is spoken: lower case, without digits; on request as phonemes.

For XTTS-v2's seventeen languages the words of ordinary text equal what its published weights were trained on. This
module holds the order of the steps; words are in `languages/`, numbers in `numbers`, Persian in `persian`.

Phonemes (IPA) come from the C library espeak-ng. It is GPL-3, so it is an extra: `pip install -e '.[phonemes]'`
installs the library and its data as a wheel; without it an espeak-ng of the system is used. The library keeps its
state in globals: used by several threads it silently returns wrong phonemes, or crashes. There is one instance per
process with one lock; to use more cores, use processes.
"""

from __future__ import annotations

import ctypes
import re
import threading
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from myxtts.config import LANGUAGES
from myxtts.errors import INSTALL_EXTRA, ConfigError
from myxtts.text.numbers import NumberReader
from myxtts.text.tables import (
    CharacterTable,
    LanguageTable,
    any_of,
    clean_characters,
    fingerprint_of,
    load_table,
    table_files,
)

SOURCES = ("normalize.py", "numbers.py", "persian.py", "tables.py")
"""The modules that decide the result of `normalize`."""
PACKAGES = (
    "num2words", "pypinyin", "hangul_romanize", "cutlet", "fugashi", "unidic_lite", "jaconv", "mojimoji",
)  # fmt: skip
_PUNCTUATION = re.compile(r"\s*[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~，。、！？：；]+(?:\s*[!-/:-@，。、])*")
_SYNCHRONOUS, _DONT_EXIT, _UTF8, _IPA = 2, 0x8000, 1, 2
"""From espeak-ng's `speak_lib.h`. Without DONT_EXIT the library ends the process if its data is missing."""
_MARK = r"""[!?;…—–"“”„«»()،؛؟۔。，、！？：；।]|[.,:](?!\d)|(?<!\d)[.,:]|(?<!\S)-+(?!\S)"""
_PAUSE = re.compile(rf"(\s*(?:(?:{_MARK})\s*)+)")
"""Punctuation with the space around it, except inside numbers and words."""
_LANGUAGE_SWITCH = re.compile(r"\([a-z][a-z-]*\)")
"""espeak-ng's mark around a foreign word, such as `(en)`; the text itself has no brackets at this point."""

_espeak_lock = threading.Lock()


def normalize(text: str, language: str) -> str:
    """Return `text` as it is spoken in `language` (a code of `LANGUAGES`; a region such as pt-br is ignored)."""
    return _steps_of(language)(text)


@cache
def _steps_of(language: str) -> Callable[[str], str]:
    code = re.split("[-_]", language.lower())[0]
    if code not in LANGUAGES:
        raise ConfigError(f"language {language!r} is not supported; use one of {', '.join(LANGUAGES)}")
    if code == "fa":
        from myxtts.text.persian import normalize_persian  # compiles many patterns on import

        return normalize_persian
    return _LanguageSteps(load_table(code))


class _LanguageSteps:
    """The steps of one language, with its compiled patterns."""

    def __init__(self, table: LanguageTable) -> None:
        self._romanize = _ROMANIZERS[table.code]() if table.code in _ROMANIZERS else None
        self._characters = CharacterTable(table.characters)
        self._numbers = NumberReader(table)
        self._symbols = table.symbols
        self._symbol = re.compile(any_of(table.symbols))
        # One scan finds out if a sentence needs the slow steps; most do not.
        marks = [mark for mark in (*table.symbols, *table.units) if len(mark) == 1]
        self._special = re.compile(f"[0-9]|{any_of(marks)}")
        self._abbreviations = table.abbreviations
        self._abbreviation = re.compile(rf"(?<!\w)(?:{any_of(table.abbreviations)})(?!\w)")

    def __call__(self, text: str) -> str:
        text = clean_characters(text, self._characters)
        special = self._special.search(text) is not None
        if special:
            text = self._numbers.read(text)
        text = text.lower()
        if special:
            text = self._symbol.sub(lambda match: f" {self._symbols[match[0]]} ", text)
        if self._abbreviations:
            text = self._abbreviation.sub(lambda match: self._abbreviations[match[0]], text)
        if self._romanize is not None:
            text = self._romanize(" ".join(text.split()))
        if not text.isascii():
            text = unicodedata.normalize("NFC", text)
        return " ".join(text.split())


def _pinyin() -> Callable[[str], str]:
    """Return the function that writes pinyin with tone digits, neutral tone 5, and no spaces between syllables.

    All punctuation becomes a comma: XTTS-v2 was trained on such Chinese, so its published weights have never seen
    a question mark in this language.
    """
    from pypinyin import Style, lazy_pinyin

    def written(text: str) -> str:
        marked = _PUNCTUATION.sub(",", text)
        return "".join(lazy_pinyin(marked, style=Style.TONE3, neutral_tone_with_five=True))

    return written


def _romaji() -> Callable[[str], str]:
    try:
        from cutlet import Cutlet
    except ImportError as missing:
        raise ConfigError(f"Japanese text needs the extra 'ja': {INSTALL_EXTRA.format('ja')}") from missing
    romaji = Cutlet().romaji
    return lambda text: str(romaji(text)).lower()


def _latin_korean() -> Callable[[str], str]:
    from hangul_romanize import Transliter
    from hangul_romanize.rule import academic

    translit: Callable[[str], str] = Transliter(academic).translit
    return translit


_ROMANIZERS = {"zh": _pinyin, "ja": _romaji, "ko": _latin_korean}
"""Languages that XTTS-v2 reads in Latin letters."""


@cache
def normalize_fingerprint() -> str:
    """Return a hash that changes when the result of `normalize` could: code, tables, Unicode, package versions."""
    sources = [Path(__file__).with_name(name) for name in SOURCES]
    return fingerprint_of([*sources, *table_files()], PACKAGES)


def phonemize(texts: Sequence[str], language: str) -> list[str]:
    """Return normalised texts in IPA with stress marks and punctuation. Threads that call this take turns."""
    voice = voices().get(language)
    if voice is None:
        raise ConfigError(f"No espeak-ng voice for the language {language!r}; there are {', '.join(voices())}.")
    with _espeak_lock:
        library = open_library()
        if getattr(library, "voice_in_use", None) != voice and library.espeak_SetVoiceByName(voice.encode()) != 0:
            has_it = INSTALL_EXTRA.format("phonemes")
            raise ConfigError(f"This espeak-ng has no voice {voice!r} for {language}; one that has: {has_it}")
        library.voice_in_use = voice  # type: ignore[attr-defined]
        return [_phonemes_of(library, text) for text in texts]


@cache
def voices() -> dict[str, str]:
    """Return espeak-ng's voice by language, for those it can read once they are normalised."""
    of_tables = ((code, load_table(code).espeak_voice) for code in LANGUAGES)
    return {code: code if voice is None else voice for code, voice in of_tables if voice != ""}


def phonemes_fingerprint() -> str:
    """Return the version of espeak-ng, which decides the phonemes together with `normalize_fingerprint`."""
    with _espeak_lock:
        return f"espeak-ng {open_library().espeak_Info(None).decode()}"


def _phonemes_of(library: ctypes.CDLL, text: str) -> str:
    """Return the phonemes; punctuation is kept by this function, because espeak-ng drops it."""
    pieces = _PAUSE.split(text.replace("\0", " "))
    for at in range(0, len(pieces), 2):
        encoded = ctypes.create_string_buffer(pieces[at].encode())
        position = ctypes.c_void_p(ctypes.addressof(encoded))
        clauses = []
        while position.value is not None:  # the library returns clauses of limited length
            clauses.append(library.espeak_TextToPhonemes(ctypes.byref(position), _UTF8, _IPA) or b"")
        pieces[at] = " ".join(_LANGUAGE_SWITCH.sub("", b" ".join(clauses).decode()).split())
    return "".join(pieces)


@cache
def open_library() -> ctypes.CDLL:
    """Return the initialised library of this process. Only one thread at a time may use it."""
    library, data = _find_library()
    library.espeak_Initialize.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
    library.espeak_SetVoiceByName.argtypes = [ctypes.c_char_p]
    library.espeak_TextToPhonemes.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_int]
    library.espeak_TextToPhonemes.restype = ctypes.c_char_p
    library.espeak_Info.argtypes = [ctypes.c_void_p]
    library.espeak_Info.restype = ctypes.c_char_p
    if library.espeak_Initialize(_SYNCHRONOUS, 0, data.encode() if data else None, _DONT_EXIT) <= 0:
        expected = "The folder must exist, and its path may have at most about 150 characters."
        raise ConfigError(f"espeak-ng could not read its data ({data or 'installed on the system'}). {expected}")
    return library


def _find_library() -> tuple[ctypes.CDLL, str | None]:
    """Return the wheel's library and its data folder, or the system's library, which knows its folder."""
    try:
        import espeakng_loader
    except ImportError:
        from ctypes.util import find_library

        name = find_library("espeak-ng")
        if name is None:
            message = f"Phonemes need espeak-ng, which is not installed. Run: {INSTALL_EXTRA.format('phonemes')}"
            raise ConfigError(message) from None
        return ctypes.CDLL(name), None
    return ctypes.CDLL(str(espeakng_loader.get_library_path())), str(espeakng_loader.get_data_path())
