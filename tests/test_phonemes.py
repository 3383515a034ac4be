"""Phonemes by espeak-ng: known words, punctuation, threads, and what is said when it is missing."""

import ctypes.util
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from myxtts.config import LANGUAGES
from myxtts.errors import ConfigError
from myxtts.text import normalize as phonemes
from myxtts.text.normalize import phonemes_fingerprint, phonemize, voices

try:
    import espeakng_loader  # noqa: F401
except ImportError:
    installed = ctypes.util.find_library("espeak-ng") is not None
else:
    installed = True
needs_espeak = pytest.mark.skipif(not installed, reason='needs espeak-ng: pip install "myxtts[phonemes]"')


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """Makes the next call open the library again, and the one after the test too."""
    phonemes.open_library.cache_clear()
    yield
    phonemes.open_library.cache_clear()


@needs_espeak
@pytest.mark.parametrize(
    ("language", "word", "expected"),
    [("en", "hello", "həlˈoʊ"), ("de", "guten Morgen", "ɡˈuːtən mˈɔɾɡən"), ("fa", "سلام", "salˈɑm")],
)
def test_known_words(language: str, word: str, expected: str) -> None:
    assert phonemize([word], language) == [expected]


@needs_espeak
def test_every_language_but_the_romanised_ones_has_a_voice() -> None:
    assert set(voices()) == set(LANGUAGES) - {"ko", "ja"}
    assert all(phonemize(["a"], language) != [""] for language in voices())
    with pytest.raises(ConfigError, match="ko"):
        phonemize(["annyeong"], "ko")
    assert phonemize(["chat"], "fr") != phonemize(["chat"], "en")


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
def test_long_text_and_foreign_words() -> None:
    (long,) = phonemize(["word " * 500], "en")
    assert len(long.split()) == 500
    (mixed,) = phonemize(["سلام hello"], "fa")
    assert "(" not in mixed and len(mixed.split()) == 2


@needs_espeak
def test_a_nul_does_not_cut_the_text_short() -> None:
    assert phonemize(["hello\0world"], "en") == phonemize(["hello world"], "en")


@needs_espeak
def test_four_threads_give_what_one_gives() -> None:
    english = [f"the number {number} was written, then forgotten" for number in range(60)]
    persian = ["سلام دنیا", "کتاب را می‌خوانم"] * 30
    jobs = [(english, "en"), (persian, "fa")] * 12
    expected = [phonemize(texts, language) for texts, language in jobs[:2]] * 12
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda job: phonemize(*job), jobs)) == expected


@needs_espeak
def test_fingerprint_names_the_version() -> None:
    assert phonemes_fingerprint().startswith("espeak-ng 1.")


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
        "from myxtts.errors import ConfigError; from myxtts.text import normalize as phonemes\n"
        "library, _ = phonemes._find_library()\n"
        "phonemes._find_library = lambda: (library, '/nowhere/espeak-ng-data')\n"
        "try: phonemes.phonemize(['hello'], 'en')\n"
        "except ConfigError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "/nowhere/espeak-ng-data" in result.stdout


def test_unknown_language() -> None:
    with pytest.raises(ConfigError, match="'xx'"):
        phonemize(["hello"], "xx")
