"""Written text becomes spoken text, whatever the string; spoken text becomes phonemes by espeak-ng."""

import ctypes.util
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxtts.config import LANGUAGES
from myxtts.errors import ConfigError
from myxtts.text import normalize as normalize_module
from myxtts.text import tables
from myxtts.text.normalize import (
    PACKAGES,
    normalize,
    normalize_fingerprint,
    phonemes_fingerprint,
    phonemize,
    voices,
)
from myxtts.text.numbers import cardinal, ordinal, plural_form, split_number

ZWNJ = "\u200c"  # the Persian half-space, "|" in the cases
SPOKEN = tomllib.loads((Path(__file__).parent / "spoken.toml").read_text(encoding="utf-8"))
CASES = [(language, written, spoken) for language, cases in SPOKEN["texts"].items() for written, spoken in cases]
SPEAKABLE = [language for language in LANGUAGES if language != "zh"]  # pinyin marks its tones with digits


@pytest.mark.parametrize(("language", "written", "spoken"), CASES)
def test_written_becomes_spoken(language: str, written: str, spoken: str) -> None:
    if language == "ja":
        pytest.importorskip("cutlet")
    found = normalize(written.replace("|", ZWNJ), language).replace(ZWNJ, "|")
    assert found == unicodedata.normalize("NFC", spoken)


@pytest.mark.parametrize("language", [language for language in LANGUAGES if language not in ("zh", "ja", "ko")])
def test_spoken_text_stays_as_it_is(language: str) -> None:
    for written, _ in SPOKEN["texts"][language]:
        once = normalize(written.replace("|", ZWNJ), language)
        assert normalize(once, language) == once


def test_numbers_become_words() -> None:
    for name, words_of in (("cardinals", cardinal), ("ordinals", ordinal)):
        for language, words in SPOKEN[name].items():
            assert {value: words_of(value, language).replace(ZWNJ, "|") for value in words} == words


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_whole_number_has_words(language: str) -> None:
    values = [*range(130), 200, 999, 1000, 1001, 2023, *(10**power + 7 for power in range(4, 20))]
    for value in values:
        words = cardinal(str(value), language) + ordinal(str(value), language)
        assert words and not re.search(r"\d", words)


@pytest.mark.parametrize(
    ("number", "thousands", "parts"),
    [
        ("1,234", ",", ("1234", "")), ("1.234", ",", ("1", "234")), ("1.234,5", ".", ("1234", "5")),
        ("1,234.5", ".", ("1234", "5")), ("0,123", ",", ("0", "123")), ("1,00,000", ",", ("100000", "")),
        ("1.2.3", ".", None), ("1'000", ",", ("1000", "")), ("12", ",", ("12", "")),
        ("1.234.567", ",", ("1234567", "")),
    ],
)  # fmt: skip
def test_separators(number: str, thousands: str, parts: tuple[str, str] | None) -> None:
    assert split_number(number, thousands) == parts


@pytest.mark.parametrize(
    ("rule", "forms"),
    [
        ("russian", "one few many many many one few one"),
        ("polish", "one few many many many many few many"),
        ("czech", "one few many many many many many many"),
    ],
)
def test_plurals_follow_the_language(rule: str, forms: str) -> None:
    counts = ("1", "2", "5", "11", "12", "21", "22", "1001")
    assert [plural_form(count, ["one", "few", "many"], rule) for count in counts] == forms.split()


@pytest.mark.parametrize("language", LANGUAGES)
def test_tables_cover_the_common_symbols(language: str) -> None:
    table = tables.load_table(language)
    assert set("&@%#$£€°+−=×÷±§№½¼¾²³ºª") <= set(table.symbols)
    assert set("$€£%°") <= set(table.units)
    for pattern, replacement in [*table.repairs, *table.before_noun, *table.before_feminine]:
        re.sub(pattern, replacement, "")


def test_region_is_ignored_and_unknown_language_names_the_known() -> None:
    assert normalize("20%", "pt-BR") == normalize("20%", "pt") == "vinte por cento"
    assert normalize("你好", "zh-cn") == "ni3hao3"
    with pytest.raises(ConfigError, match=r"'vi'.*en, es, .*fa"):
        normalize("xin", "vi")


WRITTEN = st.text(
    st.one_of(
        st.characters(),
        st.sampled_from(" .,-:/'%$€£°º0123456789۱۲۳٤٥६७８９½²№"),
        st.sampled_from("aAIİéßñжクا می‌ها कि한中"),
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(text=WRITTEN)
@pytest.mark.parametrize("language", [language for language in SPEAKABLE if language != "ja"])
def test_any_string_is_spoken(language: str, text: str) -> None:
    spoken = normalize(text, language)
    assert spoken == spoken.strip() and "  " not in spoken
    assert not any(character.isdigit() for character in spoken)
    kept = ZWNJ if language == "fa" else ""
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn") for c in spoken if c not in kept)


@settings(max_examples=40, deadline=None)
@given(text=WRITTEN)
def test_any_string_becomes_pinyin_and_romaji(text: str) -> None:
    assert "  " not in normalize(text, "zh")
    pytest.importorskip("cutlet")
    assert not any(character.isdigit() for character in normalize(text, "ja"))


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from(" .,!?abcdeéñçüŞğabcمیرومکتابهاخانه\u200c‌"), max_size=40))
@pytest.mark.parametrize("language", ["en", "fr", "tr", "fa"])
def test_normalising_twice_changes_nothing(language: str, text: str) -> None:
    once = normalize(text, language)
    assert normalize(once, language) == once


@pytest.mark.parametrize("language", SPEAKABLE)
def test_enormous_numbers(language: str) -> None:
    if language == "ja":
        pytest.importorskip("cutlet")
    for text in ("9" * 400, "1" + ",000" * 40, "0." + "123" * 40, "-" + "7" * 30 + "%", "$" + "8" * 40 + ".25"):
        assert not re.search(r"\d", normalize(text, language))
    assert not re.search(r"\d", normalize("1" * 5000, "en"))


def test_import_is_cheap_and_loads_no_speaking_package() -> None:
    code = (
        "import sys, time; t = time.perf_counter();"
        "import myxtts.text.normalize as n; took = time.perf_counter() - t;"
        "n.normalize('No digits here, Dr. Who.', 'en'); n.normalize_fingerprint();"
        "print([m for m in ('num2words', 'pypinyin', 'hangul_romanize', 'cutlet') if m in sys.modules], took)"
    )
    loaded, took = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert loaded == "[]"
    assert float(took) < 0.5  # the target is 30 ms; the rest is room for a busy machine


def test_fingerprint_follows_tables_and_package_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint() -> str:
        normalize_fingerprint.cache_clear()
        return normalize_fingerprint()

    before = fingerprint()
    assert re.fullmatch(r"[0-9a-f]{16}", before)
    copy = shutil.copytree(tables.TABLES_FOLDER, tmp_path / "languages")
    with monkeypatch.context() as patched:
        patched.setattr(tables, "TABLES_FOLDER", copy)
        assert fingerprint() == before
        with open(copy / "fa.toml", "a", encoding="utf-8") as table:
            table.write("\n# changed\n")
        assert fingerprint() != before
    found = tables._installed(PACKAGES)
    assert any(name.startswith("num2words-") for name in found)
    assert all(name.endswith((".dist-info", ".egg-info")) for name in found)  # fugashi-info is a program
    with monkeypatch.context() as patched:
        patched.setattr(tables, "_installed", lambda packages: [f"{packages[0]}-999.dist-info"])
        assert fingerprint() != before
    assert fingerprint() == before


# Phonemes.

installed = importlib.util.find_spec("espeakng_loader") or ctypes.util.find_library("espeak-ng")
needs_espeak = pytest.mark.skipif(not installed, reason="needs espeak-ng: pip install -e '.[phonemes]'")


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """Makes the next call open the library again, and the one after the test too."""
    normalize_module.open_library.cache_clear()
    yield
    normalize_module.open_library.cache_clear()


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
def test_words_are_not_cut_whatever_they_hold() -> None:
    number, clitic, compound = phonemize(["3.5", "don't", "well-known"], "en")
    assert "." not in number and len(number.split()) == 3
    assert "'" not in clitic and "-" not in compound
    assert phonemize(["3.5, don't"], "en") == [f"{number}, {clitic}"]
    (long,), (mixed,) = phonemize(["word " * 500], "en"), phonemize(["سلام hello"], "fa")
    assert len(long.split()) == 500
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
        with pytest.raises(ConfigError, match=r"pip install -e '\.\[phonemes\]'"):
            call()


@needs_espeak
@pytest.mark.usefixtures("fresh_library")
def test_system_library_is_used_without_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    library, _ = normalize_module._find_library()
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.1")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: opened.append(name) or library)
    assert normalize_module._find_library() == (library, None)
    assert opened == ["libespeak-ng.so.1"]


@needs_espeak
def test_unreadable_data_is_an_error_not_the_end_of_the_process() -> None:
    """In a process of its own: initialised twice, the library would lose its data for the other tests."""
    code = (
        "from myxtts.errors import ConfigError; from myxtts.text import normalize\n"
        "library, _ = normalize._find_library()\n"
        "normalize._find_library = lambda: (library, '/nowhere/espeak-ng-data')\n"
        "try: normalize.phonemize(['hello'], 'en')\n"
        "except ConfigError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "/nowhere/espeak-ng-data" in result.stdout
