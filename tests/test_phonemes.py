"""Phonemes by espeak-ng: known words, punctuation, threads, and what is said when it is missing."""

import ctypes.util
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from myxtts.config import LANGUAGES
from myxtts.errors import ConfigError
from myxtts.text import phonemes
from myxtts.text.phonemes import phonemes_fingerprint, phonemize, voices

installed = importlib.util.find_spec("espeakng_loader") or ctypes.util.find_library("espeak-ng")
needs_espeak = pytest.mark.skipif(not installed, reason='needs espeak-ng: pip install "myxtts[phonemes]"')


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """Makes the next call open the library again, and the one after the test too."""
    phonemes.open_library.cache_clear()
    yield
    phonemes.open_library.cache_clear()


@needs_espeak
def test_known_words() -> None:
    known = {"en": ("hello", "həlˈoʊ"), "de": ("guten Morgen", "ɡˈuːtən mˈɔɾɡən"), "fa": ("سلام", "salˈɑm")}
    for language, (word, expected) in known.items():
        assert phonemize([word], language) == [expected]
    assert phonemes_fingerprint().startswith("espeak-ng 1.")


@needs_espeak
def test_every_language_but_the_romanised_ones_has_a_voice() -> None:
    assert set(voices()) == set(LANGUAGES) - {"ko", "ja"}
    assert all(phonemize(["a"], language) != [""] for language in voices())
    assert phonemize(["chat"], "fr") != phonemize(["chat"], "en")
    for language in ("ko", "xx"):
        with pytest.raises(ConfigError, match=language):
            phonemize(["annyeong"], language)


@needs_espeak
def test_punctuation_and_spaces_survive() -> None:
    hello, world = phonemize(["hello", "world"], "en")
    assert phonemize(["Hello, world! hello... (world) - hello?"], "en") == [
        f"{hello}, {world}! {hello}... ({world}) - {hello}?"
    ]
    salam = phonemize(["سلام"], "fa")[0]
    assert phonemize(["سلام، سلام؟"], "fa") == [f"{salam}، {salam}؟"]
    assert phonemize(["", "...", " ? "], "en") == ["", "...", " ? "]


@needs_espeak
def test_numbers_and_words_are_not_cut() -> None:
    number, clitic, compound = phonemize(["3.5", "don't", "well-known"], "en")
    assert "." not in number and len(number.split()) == 3
    assert "'" not in clitic and "-" not in compound
    assert phonemize(["3.5, don't"], "en") == [f"{number}, {clitic}"]


@needs_espeak
def test_long_text_foreign_words_and_nul() -> None:
    (long,) = phonemize(["word " * 500], "en")
    assert len(long.split()) == 500
    (mixed,) = phonemize(["سلام hello"], "fa")
    assert "(" not in mixed and len(mixed.split()) == 2
    assert phonemize(["hello\0world"], "en") == phonemize(["hello world"], "en")


@needs_espeak
def test_four_threads_give_what_one_gives() -> None:
    english = [f"the number {number} was written, then forgotten" for number in range(60)]
    persian = ["سلام دنیا", "کتاب را می‌خوانم"] * 30
    jobs = [(english, "en"), (persian, "fa")] * 12
    expected = [phonemize(texts, language) for texts, language in jobs[:2]] * 12
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda job: phonemize(*job), jobs)) == expected


@pytest.mark.usefixtures("fresh_library")
def test_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    monkeypatch.setattr(ctypes.util, "find_library", lambda _: None)
    for call in (lambda: phonemize(["hello"], "en"), phonemes_fingerprint):
        with pytest.raises(ConfigError, match=r'pip install "myxtts\[phonemes\]"'):
            call()


@needs_espeak
@pytest.mark.usefixtures("fresh_library")
def test_system_library_is_used_without_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    library, _ = phonemes._find_library()
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.1")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: opened.append(name) or library)
    assert phonemes._find_library() == (library, None)
    assert opened == ["libespeak-ng.so.1"]


@needs_espeak
def test_unreadable_data_is_an_error_not_the_end_of_the_process() -> None:
    """In a process of its own: initialised twice, the library would lose its data for the other tests."""
    code = (
        "from myxtts.errors import ConfigError; from myxtts.text import phonemes\n"
        "library, _ = phonemes._find_library()\n"
        "phonemes._find_library = lambda: (library, '/nowhere/espeak-ng-data')\n"
        "try: phonemes.phonemize(['hello'], 'en')\n"
        "except ConfigError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "/nowhere/espeak-ng-data" in result.stdout
