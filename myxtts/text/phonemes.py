"""Phonemes (IPA) of normalised text from espeak-ng, called through its C library.

espeak-ng is GPL-3 and therefore an extra: `pip install "myxtts[phonemes]"` installs the library and its data as a
wheel; without it an espeak-ng of the system is used. espeak-ng drops punctuation, which a voice model needs for
its pauses, so text is split at punctuation and joined again.

The library keeps its state in globals and is not thread-safe: used by several threads it silently returns wrong
phonemes, or crashes. There is one instance per process with one lock; to use more cores, use processes.
"""

import ctypes
import ctypes.util
import re
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from myxtts.config import LANGUAGES
from myxtts.errors import ConfigError
from myxtts.text.tables import fingerprint_of, load_table, table_files

_SYNCHRONOUS, _DONT_EXIT, _UTF8, _IPA = 2, 0x8000, 1, 2
"""From espeak-ng's `speak_lib.h`. Without DONT_EXIT the library ends the process if its data is missing."""

_MARK = r"""[!?;…—–"“”„«»()،؛؟۔。，、！？：；।]|[.,:](?!\d)|(?<!\d)[.,:]|(?<!\S)-+(?!\S)"""
_PAUSE = re.compile(rf"(\s*(?:(?:{_MARK})\s*)+)")
"""Punctuation with the space around it, except inside numbers and words."""
_LANGUAGE_SWITCH = re.compile(r"\([a-z][a-z-]*\)")
"""espeak-ng's mark around a foreign word, such as `(en)`; the text itself has no brackets at this point."""

_lock = threading.Lock()


def phonemize(texts: Sequence[str], language: str) -> list[str]:
    """Return the texts in IPA with stress marks and punctuation. Threads that call this take turns."""
    voice = voices().get(language)
    if voice is None:
        raise ConfigError(f"No espeak-ng voice for the language {language!r}; there are {', '.join(voices())}.")
    with _lock:
        library = open_library()
        if getattr(library, "voice_in_use", None) != voice and library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise ConfigError(
                f"The installed espeak-ng has no voice {voice!r} for {language}. One that has it: "
                'pip install "myxtts[phonemes]"'
            )
        library.voice_in_use = voice  # type: ignore[attr-defined]
        return [_phonemes_of_text(library, text) for text in texts]


@cache
def voices() -> dict[str, str]:
    """Return espeak-ng's voice by language, for those it can read once they are normalised."""
    of_tables = ((code, load_table(code).espeak_voice) for code in LANGUAGES)
    return {code: code if voice is None else voice for code, voice in of_tables if voice != ""}


def phonemes_fingerprint() -> str:
    """Return a hash that changes when the phonemes could: code, tables, version of the library."""
    with _lock:
        version = open_library().espeak_Info(None).decode()
    return f"espeak-ng {version} {fingerprint_of([Path(__file__), *table_files()])}"


def _phonemes_of_text(library: ctypes.CDLL, text: str) -> str:
    pieces = _PAUSE.split(text.replace("\0", " "))
    spoken = [_phonemes_of_piece(library, piece) for piece in pieces[::2]]
    return "".join(part for pair in zip(spoken, [*pieces[1::2], ""], strict=True) for part in pair)


def _phonemes_of_piece(library: ctypes.CDLL, piece: str) -> str:
    """Return the phonemes of text without punctuation; the library returns clauses of limited length."""
    encoded = ctypes.create_string_buffer(piece.encode())
    position = ctypes.c_void_p(ctypes.addressof(encoded))
    clauses = []
    while position.value is not None:
        clauses.append(library.espeak_TextToPhonemes(ctypes.byref(position), _UTF8, _IPA) or b"")
    phonemes = b" ".join(clauses).decode()
    return " ".join(_LANGUAGE_SWITCH.sub("", phonemes).split())


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
        raise ConfigError(
            f"espeak-ng could not read its data ({data or 'installed on the system'}). The folder must "
            "exist, and its path may not be longer than about 150 characters."
        )
    return library


def _find_library() -> tuple[ctypes.CDLL, str | None]:
    """Return the wheel's library and its data folder, or the system's library, which knows its folder."""
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
