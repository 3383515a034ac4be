"""Language detection: what letters decide, what the speaker decides, and how seldom statistics are asked."""

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from myxtts.config import LANGUAGES
from myxtts.errors import DatasetError
from myxtts.text import language
from myxtts.text.language import detect_languages

SENTENCES = {
    "en": [
        "the quick brown fox jumps over the lazy dog", "she had never seen the house before that evening",
        "we walked along the river until it was dark", "nothing explained where they had all gone",
    ],
    "de": [
        "das Haus steht auf einem Hügel über der Stadt", "sie hatte den Brief noch nicht gelesen",
        "wir gehen morgen früh an den Fluss und baden", "niemand wusste, woher der Mann gekommen war",
    ],
    "nl": [
        "het huis staat op een heuvel boven de stad", "ze had de brief nog niet gelezen",
        "we lopen morgen vroeg naar de rivier en zwemmen", "niemand wist waar de oude man vandaan kwam",
    ],
    "es": ["la casa está en una colina sobre la ciudad", "ella todavía no había leído aquella carta"],
    "pl": ["dom stoi na wzgórzu nad miastem i rzeką", "jeszcze nie przeczytała tego listu od matki"],
    "tr": ["ev şehrin üstündeki bir tepede duruyor", "mektubu henüz okumamıştı ve kimse ona sormadı"],
}  # fmt: skip
PERSIAN_ON_ARABIC_KEYBOARD = "او مي خواهد كتاب تازه را بخواند"


def corpus(code: str, count: int) -> list[str]:
    """Distinct sentences of a language, made of the halves of the ones above."""
    sentences = SENTENCES[code]
    made = [f"{first}, {second}" for first in sentences for second in sentences if first != second]
    return [f"{text} {number}" for number in range(count // len(made) + 1) for text in made][:count]


class Call(NamedTuple):
    method: str
    candidates: tuple[str, ...]
    accurate: bool
    texts: list[str]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Every call of lingua, in order."""
    seen: list[Call] = []
    real = language._detector

    class Watched:
        def __init__(self, candidates: tuple[str, ...], accurate: bool) -> None:
            self._which = candidates, accurate

        def __getattr__(self, method: str) -> Callable[..., Any]:
            def call(*texts: list[str]) -> Any:
                seen.append(Call(method, *self._which, [text for batch in texts for text in batch]))
                return getattr(real(*self._which), method)(*texts)

            return call

    monkeypatch.setattr(language, "_detector", Watched)
    return seen


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("안녕하세요", "ko"), ("これは本です。", "ja"), ("東京の天気", "ja"), ("今天天气很好", "zh"),
        ("我在一家日式餐厅吃了の字招牌的一碗拉面", "zh"), ("नमस्ते दुनिया", "hi"), ("Привет, мир", "ru"),
        ("سلام، حال شما چطور است؟ خوبید؟", "fa"), ("می‌رود", "fa"), ("البته که می‌آیم", "fa"),
        ("ذهبت إلى المدرسة في الصباح", "ar"), ("هذه سيارة جميلة", "ar"), ("السلام عليكم", "ar"),
        ("Он сказал OK и ушёл", "ru"), ("서울 FM 라디오 방송국입니다", "ko"),
    ],
)  # fmt: skip
def test_letters_decide_where_they_can(text: str, expected: str, calls: list[Call]) -> None:
    assert detect_languages([text], ["someone"]) == [expected]
    assert calls == []


@pytest.mark.parametrize(
    "text", ["سلام", PERSIAN_ON_ARABIC_KEYBOARD, "hello", "Erdoğan said nothing", "He said нет and left the room"]
)
def test_letters_of_several_languages_decide_nothing(text: str, calls: list[Call]) -> None:
    detect_languages([text], ["someone"])
    assert any(text in call.texts for call in calls)


def test_one_sentence_is_enough() -> None:
    for code, sentences in SENTENCES.items():
        assert detect_languages(sentences[:1], ["someone"]) == [code]
    assert detect_languages([PERSIAN_ON_ARABIC_KEYBOARD], ["someone"]) == ["fa"]
    assert detect_languages([], []) == []


def test_one_language_per_speaker_costs_a_few_passages(calls: list[Call]) -> None:
    texts = corpus("en", 400) + corpus("de", 400)
    found = detect_languages(texts, ["a"] * 400 + ["b"] * 400)
    assert found == ["en"] * 400 + ["de"] * 400
    passages = [passage for call in calls for passage in call.texts]
    assert len(passages) <= 2 * 8
    assert all(len(passage) >= 300 for passage in passages)


@pytest.mark.parametrize("other", ["de", "nl"])
def test_a_few_sentences_in_another_language_are_noticed(other: str) -> None:
    texts = corpus("en", 285) + corpus(other, 12)
    random.Random(0).shuffle(texts)
    expected = [other if text in set(corpus(other, 12)) else "en" for text in texts]
    assert detect_languages(texts, ["same"] * len(texts)) == expected


def test_many_languages_in_one_voice_and_speakers_of_one_sentence() -> None:
    expected = [code for code in ("en", "de", "tr") for _ in range(2)]
    texts = [text for code in ("en", "de", "tr") for text in corpus(code, 2)]
    for speakers in (["same"] * 6, list("abcdef")):
        assert detect_languages(texts, speakers) == expected


def test_no_more_than_four_large_models_are_loaded(calls: list[Call]) -> None:
    pairs = [(code, text) for code in SENTENCES for text in corpus(code, 2)]
    assert detect_languages([text for _, text in pairs], ["same"] * len(pairs)) == [code for code, _ in pairs]
    assert all(len(call.candidates) <= 4 for call in calls if call.accurate)


def test_speakers_of_one_sentence_help_each_other() -> None:
    doubtful = "Harrison is still my chauffeur."
    assert detect_languages([doubtful], ["alone"]) != ["en"]
    texts = [*corpus("en", 40), doubtful]
    assert set(detect_languages(texts, [str(number) for number in range(41)])) == {"en"}


def test_each_text_is_looked_at_once_however_often_it_occurs(calls: list[Call]) -> None:
    texts = corpus("en", 6) + corpus("de", 6)
    detect_languages(texts, ["same"] * 12)
    once = calls.copy()
    calls.clear()
    assert len(detect_languages(texts * 50, ["same"] * 600)) == 600
    assert calls == once


def test_known_sentences_are_evidence_but_not_examined_again(calls: list[Call]) -> None:
    known = {(text, "same"): "en" for text in corpus("en", 400)}
    german, doubtful = SENTENCES["de"][1], "Harrison is still my chauffeur."
    added, repeated = [german, doubtful, "No.", "..."], corpus("en", 1)
    speakers = ["same", "same", "new", "new", "new"]
    assert detect_languages(added + repeated, speakers, known) == ["de", "en", "en", "en", "en"]
    assert {text for call in calls for text in call.texts} <= set(added)
    known = {("می‌خواهم بروم", "p"): "fa", ("هذه سيارة جميلة", "q"): "ar"}
    calls.clear()
    assert detect_languages(["سلام", "سلام"], ["p", "q"], known) == ["fa", "ar"]
    assert calls == []


def test_order_of_the_corpus_does_not_matter() -> None:
    texts = corpus("en", 30) + corpus("nl", 30) + ["سلام", "می‌رود", "..."]
    speakers = (["a", "b"] * 32)[:63]
    straight = dict(zip(zip(texts, speakers, strict=True), detect_languages(texts, speakers), strict=True))
    order = list(range(63))
    random.Random(1).shuffle(order)
    shuffled = detect_languages([texts[i] for i in order], [speakers[i] for i in order])
    assert shuffled == [straight[texts[i], speakers[i]] for i in order]


def test_speaker_decides_what_letters_leave_open(calls: list[Call]) -> None:
    texts = ["سلام", "می‌خواهم بروم", "سلام", "هذه سيارة جميلة", *["これは本です。"] * 20, "東京大学"]
    speakers = ["p", "p", "q", "q", *["j"] * 21]
    assert detect_languages(texts, speakers) == ["fa", "fa", "ar", "ar", *["ja"] * 21]
    assert calls == []


def test_texts_without_letters_follow_their_speaker_then_the_corpus() -> None:
    texts = ["Привет, мир", "...", "今天天气很好", "你好吗", "12"]
    assert detect_languages(texts, ["r", "r", "z", "z", "nobody"]) == ["ru", "ru", "zh", "zh", "zh"]


@pytest.mark.parametrize("text", ["Ωραία μέρα", "", "123 ... !", "١٢٣"])
def test_nothing_recognisable_is_an_error_that_says_what_to_do(text: str) -> None:
    with pytest.raises(DatasetError, match="--language"):
        detect_languages([text, "..."], ["a", "a"])


def test_missing_lingua_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lingua", None)
    language._detector.cache_clear()
    with pytest.raises(DatasetError, match=r"--language.*pip install lingua-language-detector"):
        detect_languages(["hello there"], ["a"])
    assert detect_languages(["Привет"], ["a"]) == ["ru"]


def test_mixed_speakers_share_the_large_models_which_are_unloaded_afterwards(calls: list[Call]) -> None:
    pairs = [(code, text) for code in ("en", "de") for text in corpus(code, 12)]
    texts = [text for _, text in pairs] * 5
    speakers = [speaker for speaker in "vwxyz" for _ in pairs]
    assert detect_languages(texts, speakers) == [code for code, _ in pairs] * 5
    large = [(call.method, len(call.texts)) for call in calls if call.accurate]
    assert large == [("compute_language_confidence_values_in_parallel", len(pairs)), ("unload_language_models", 0)]


def test_memory_stays_far_below_a_gigabyte() -> None:
    """One voice mixing four Latin languages, the most expensive case, in a process of its own; megabytes."""
    code = (
        "import re; from tests.test_language import *\n"
        "texts = [text for code in ('en', 'de', 'nl', 'tr') for text in corpus(code, 50)]\n"
        "detect_languages(texts, ['same'] * len(texts))\n"
        # Not ru_maxrss: it starts at what the process that called exec held.
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 150 < int(result.stdout) < 450


def test_only_our_languages_come_back() -> None:
    texts = ["Jeg kan ikke finde min bog nogen steder i huset", "Bună ziua, ce mai faceți astăzi"]
    assert set(detect_languages(texts, ["a", "b"])) <= set(LANGUAGES)
