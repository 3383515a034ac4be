"""Phonemes (IPA) of text by espeak-ng, called through its C library.

espeak-ng is GPL-3 and therefore an extra: `pip install "myxtts[phonemes]"` brings the library and its data
in a wheel; without the wheel an espeak-ng installed on the system is used. espeak-ng drops punctuation, which
a voice model needs for its pauses, so text is cut at punctuation here and put together again.

The library keeps its state in globals and is not thread-safe: shared by threads it gives wrong phonemes
without an error, or crashes. There is one instance per process and one lock around it; to use more cores, use
processes. This module knows neither normalisation nor tokens.
"""

import ctypes
import ctypes.util
import re
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from myxtts.errors import ConfigError
from myxtts.text.tables import fingerprint_of

VOICES = {
    "en": "en-us", "es": "es", "fr": "fr", "de": "de", "it": "it", "pt": "pt-br", "pl": "pl", "tr": "tr",
    "ru": "ru", "nl": "nl", "cs": "cs", "ar": "ar", "zh": "cmn", "hu": "hu", "hi": "hi", "fa": "fa",
}  # fmt: skip
"""espeak-ng's voice for the languages it can read once they are normalised. Korean and Japanese are not among
them: it would read romanised Korean as English and spell romaji letter by letter."""

_SYNCHRONOUS, _DONT_EXIT, _UTF8, _IPA = 2, 0x8000, 1, 2
"""From espeak-ng's `speak_lib.h`. Without DONT_EXIT the library ends the process when its data is missing."""

_MARK = r"""[!?;…—–"“”„«»()،؛؟۔。，、！？：；।]|[.,:](?!\d)|(?<!\d)[.,:]|(?<!\S)-+(?!\S)"""
_PAUSE = re.compile(rf"(\s*(?:(?:{_MARK})\s*)+)")
"""Punctuation with the space around it; not the points and commas of numbers, nor what is within words."""
_LANGUAGE_SWITCH = re.compile(r"\([a-z][a-z-]*\)")
"""What espeak-ng writes around a foreign word, such as `(en)`; a piece has no brackets of its own."""

_lock = threading.Lock()


def phonemize(texts: Sequence[str], language: str) -> list[str]:
    """The texts in IPA with stress marks, punctuation kept. Threads may call this; they take turns."""
    voice = VOICES.get(language)
    if voice is None:
        raise ConfigError(f"No espeak-ng voice for the language {language!r}; there are {', '.join(VOICES)}.")
    with _lock:
        library = open_library()
        if getattr(library, "voice_in_use", None) != voice and library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise ConfigError(
                f"The installed espeak-ng has no voice {voice!r} for {language}. One that has it: "
                'pip install "myxtts[phonemes]"'
            )
        library.voice_in_use = voice  # type: ignore[attr-defined]
        return [_phonemes_of_text(library, text) for text in texts]


def fingerprint() -> str:
    """Changes when the phonemes could: the code of this module and the version of the library."""
    with _lock:
        version = open_library().espeak_Info(None).decode()
    return f"espeak-ng {version} {fingerprint_of([Path(__file__)])}"


def _phonemes_of_text(library: ctypes.CDLL, text: str) -> str:
    pieces = _PAUSE.split(text.replace("\0", " "))
    spoken = [_phonemes_of_piece(library, piece) for piece in pieces[::2]]
    return "".join(part for pair in zip(spoken, [*pieces[1::2], ""], strict=True) for part in pair)


def _phonemes_of_piece(library: ctypes.CDLL, piece: str) -> str:
    """Phonemes of text without punctuation; the library returns them by clauses of limited length."""
    encoded = ctypes.create_string_buffer(piece.encode())
    position = ctypes.c_void_p(ctypes.addressof(encoded))
    clauses = []
    while position.value is not None:
        clauses.append(library.espeak_TextToPhonemes(ctypes.byref(position), _UTF8, _IPA) or b"")
    phonemes = b" ".join(clauses).decode()
    return " ".join(_LANGUAGE_SWITCH.sub("", phonemes).split())


@cache
def open_library() -> ctypes.CDLL:
    """The library of this process, initialised. Only one thread at a time may use it."""
    library, data = _find_library()
    library.espeak_Initialize.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
    library.espeak_SetVoiceByName.argtypes = [ctypes.c_char_p]
    library.espeak_TextToPhonemes.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, ctypes.c_int]
    library.espeak_TextToPhonemes.restype = ctypes.c_char_p
    library.espeak_Info.argtypes = [ctypes.c_void_p]
    library.espeak_Info.restype = ctypes.c_char_p
    if library.espeak_Initialize(_SYNCHRONOUS, 0, data.encode() if data else None, _DONT_EXIT) <= 0:
        raise ConfigError(
            f"espeak-ng could not read its data ({data or 'installed on the system'}). The folder must "
            "exist, and its path may not be longer than about 150 characters."
        )
    return library


def _find_library() -> tuple[ctypes.CDLL, str | None]:
    """The wheel's library and its data folder, or the system's, which knows where its data is."""
    try:
        import espeakng_loader
    except ImportError:
        name = ctypes.util.find_library("espeak-ng")
        if name is None:
            raise ConfigError(
                'Phonemes need espeak-ng, which is not installed. Run: pip install "myxtts[phonemes]"'
            ) from None
        return ctypes.CDLL(name), None
    return ctypes.CDLL(str(espeakng_loader.get_library_path())), str(espeakng_loader.get_data_path())
