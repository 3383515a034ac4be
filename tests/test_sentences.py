"""Texts to sentences: where they are cut, what becomes of them; and the check of the codes generated for them."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxtts.config import LANGUAGES
from myxtts.errors import ConfigError
from myxtts.synthesis.text import (
    Bounds,
    Limits,
    TextFrontend,
    UnspeakableText,
    bounds,
    ends_in_loop,
    find_problem,
    has_loop,
    shorten,
    split,
    split_complete,
)
from myxtts.text.tokenizer import Tokenizer, train

LONG = "; ".join(["we walked along the river, and we counted all the bridges"] * 6)


def test_a_text_being_written_is_cut_after_complete_sentences() -> None:
    said, rest = list[str](), ""
    text = "Dr. Smith paid 3.50 for it. Was it\nworth it? Perhaps"
    for character in text:
        complete, rest = split_complete(rest + character, "en", 100)
        said += complete
    assert (said, rest) == (["Dr. Smith paid 3.50 for it.", "Was it worth it?"], "Perhaps")
    assert split_complete("A title\n\nThe text. ", "en", 100) == (["A title"], "The text. ")
    assert split_complete("خوبم. شما", "fa", 100) == (["خوبم."], "شما")
    assert split_complete("", "en", 100) == ([], "")
    pieces, rest = split_complete(LONG, "en", 80)
    assert len(rest) <= 80 and " ".join([*pieces, rest]) == LONG


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("en", "The harbour was quiet.| Was anybody there?| Nobody answered!| The lights…| All of them were out."),
        ("en", "“The harbour was quiet.”| (Nobody answered.)| 'Was anybody there?'| All of them had gone."),
        ("fa", "حال شما چطور است؟| خیلی خوبم، ممنون.| «شما هم خوبید؟»| ما فردا می‌رویم!| خداحافظ عزیزم؛ تا فردا."),
        ("fa", "حال شما چطور است؟|خیلی خوبم ممنون.|شما چطور هستید؟|ما فردا می‌رویم!|خداحافظ دوستان من"),
        ("ar", "كيف حالك اليوم؟| أنا بخير، شكرا.| إلى اللقاء غدا!"),
        ("hi", "आप कैसे हैं, सब ठीक?| हम कल सुबह जाएँगे।| फिर मिलेंगे दोस्तों।"),
        ("zh", "今天的天气非常好啊！|我们一起去公园散步吧？|好的我们现在就出发。"),
        ("ja", "今日は天気がとても良い。|公園へ行きましょうか？|はい、すぐに行きます。"),
        ("en", "a text without capitals goes on.| it has two sentences."),
        # Dots inside a sentence do not end it.
        ("en", "Dr. Smith and Mr. J. R. Jones met in the U.S. in no. 5."),
        ("en", "It costs 3.50 dollars and weighs 1.5 kilos."),
        ("en", "He asked “Why?” and nobody answered him."),
        ("en", "1. The first item of the list"),
        ("de", "Am 3. Mai kam er z. B. mit Fr. Dr. Meier an, usw. und so fort."),
        ("fa", "در سال ۱۳۰۰ ه.ش. و ۵۰۰ ق.م. چه گذشت؟"),
        ("fa", "او ۳.۵ ثانیه ایستاد"),
        ("ru", "Он купил хлеб, молоко и т. д. на ул. Ленина."),
        ("hi", "डॉ. शर्मा कल सुबह आएँगे।"),
    ],
)
def test_sentences_end_at_the_marks_of_their_language(language: str, text: str) -> None:
    """`|` marks the places where a text must be cut, and no other; sentences are long enough to stay alone."""
    expected = [part.strip() for part in text.split("|")]
    assert split(text.replace("|", ""), language, 100) == expected


def test_short_sentences_are_said_with_a_neighbour() -> None:
    assert split("Yes. No! Perhaps. Well?", "en", 250) == ["Yes. No! Perhaps. Well?"]
    long = "The harbour was quiet when the first boat came in."
    assert split(f"{long} {long}", "en", 250) == [long, long]


def test_blank_lines_end_a_sentence_and_line_breaks_do_not() -> None:
    title = "A title that has no full stop"
    assert split(f"{title}\n\nThe text\nbelow it.", "en", 80) == [title, "The text below it."]


def test_long_sentences_are_cut_at_the_best_mark_near_the_middle() -> None:
    persian = "، ".join(["کنار رودخانه قدم زدیم"] * 8)
    for text, limit, mark in ((LONG, 150, ";"), (LONG.replace(";", ","), 150, ","), (persian, 60, "،")):
        pieces = shorten(text, limit)
        assert all(piece.endswith(mark) for piece in pieces[:-1])
        assert all(len(piece) <= limit for piece in pieces)
    words = LONG.replace(";", "").replace(",", "")
    assert " ".join(shorten(words, 100)) == words


def test_words_without_end_are_cut_but_never_before_an_accent() -> None:
    pieces = shorten("e\u0301" * 200, 33)
    assert "".join(pieces) == "e\u0301" * 200
    assert all(len(piece) <= 33 and piece.startswith("e") for piece in pieces)


@settings(max_examples=150, deadline=None)
@given(
    st.text(st.sampled_from("ab AZ.,;!?؟،۔سلا۱5«»\"'\n…。、\u200c\u0301()"), max_size=400),
    st.sampled_from(LANGUAGES),
    st.integers(8, 80),
)
def test_no_character_is_lost_and_no_piece_is_too_long(text: str, language: str, limit: int) -> None:
    pieces = split(text, language, limit)
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert all(0 < len(piece) <= limit for piece in pieces)


REPEATED = [
    ".",
    " ",
    '"',
    ")",
    "7",
    "a",
    "\u0301",
    "\u064e",
    "؟",
    "،",
    "a. ",
    '." ',
    "?!",
    "- ",
    "\n ",
    "\u200c",
    "1.",
    "。",
]


@pytest.mark.parametrize("piece", REPEATED)
def test_the_time_to_split_is_linear_in_the_length(piece: str) -> None:
    """Quadratic time would take 16 times as long for 4 times the text."""
    times = {}
    for length in (4000, 16000):
        text = piece * (length // len(piece))
        tries = []
        for _ in range(3):
            started_at = time.process_time()
            pieces = split(text, "fa", 160)
            tries.append(time.process_time() - started_at)
        times[length] = min(tries)
        assert "".join("".join(pieces).split()) == "".join(text.split())
    assert times[16000] < 9 * times[4000] + 0.01


# The text front end


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return train(["the harbour was quiet today.", "she opened the old window."] * 3, ["en"] * 6, 120)


def test_texts_far_over_the_limits_are_cut_to_what_the_model_has_learnt(vocabulary: Tokenizer) -> None:
    frontend = TextFrontend(vocabulary, Limits(max_ids=60, max_codes=200))
    text = "1234567 " * 60 + "x" * 500 + "The harbour was quiet. She opened the old window. " * 7
    sentences, _ = frontend.sentences(text, "en")
    assert [sentence.number for sentence in sentences] == list(range(len(sentences)))
    for sentence in sentences:
        assert len(sentence.ids) <= 60 and sentence.bounds.most <= 200 and len(sentence.text) <= 125
    assert "".join(sentence.text for sentence in sentences).count("7") == 60


def test_characters_that_the_vocabulary_lacks_are_replaced_or_left_out(vocabulary: Tokenizer) -> None:
    frontend = TextFrontend(vocabulary, Limits(402, 602))
    (sentence,), replaced = frontend.sentences("The thé ∂ was old.", "en")
    assert sentence.ids == vocabulary.encode_batch(["the the was old."], ["en"])[0]
    assert replaced == {"é": "e", "∂": ""}
    with pytest.raises(UnspeakableText, match=r"in language 'fa': .*ARABIC LETTER SEEN"):
        frontend.sentences("سلام دنیا، حال شما چطور است؟", "fa")


def test_a_text_of_days_is_refused(vocabulary: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="more than 500,000 characters"):
        TextFrontend(vocabulary, Limits(402, 602)).sentences("old " * 150_000, "en")


def test_unsupported_languages_are_named(vocabulary: Tokenizer) -> None:
    without_persian = Tokenizer(vocabulary.to_json().replace("[fa]", "[qq]"))
    frontend = TextFrontend(without_persian, Limits(402, 602))
    assert frontend.language_code(" EN-us") == "en"
    with pytest.raises(ConfigError, match="'xx' is not supported; use one of en"):
        frontend.language_code("xx")
    with pytest.raises(ConfigError, match="does not speak 'fa', it speaks ar, cs"):
        frontend.language_code("fa")


# The quality check


def test_bounds_grow_with_the_text() -> None:
    assert bounds(3, 602).fewest == 1
    usual = round(100 / 15 * 21.5)
    assert 2 * bounds(100, 602).fewest < usual < bounds(100, 602).most / 2
    assert bounds(10000, 602) == Bounds(602, 602)


VARIED = np.random.default_rng(0).integers(0, 1000, 100).tolist()


@pytest.mark.parametrize(
    ("codes", "problem"),
    [
        (VARIED, None),
        ([], "empty"),
        (VARIED[:10], "too short"),
        (VARIED * 2, "run-away"),
        ([*VARIED, *[7] * 40], "repetition"),
        ([*VARIED[:20], *[1, 2, 3, 4, 5] * 8, *VARIED[20:60]], "repetition"),
        ([*VARIED[:40], *VARIED[:30] * 4], "repetition"),
        ([*VARIED, *[7] * 20], None),  # a pause
    ],
)
def test_problems_have_names(codes: list[int], problem: str | None) -> None:
    assert find_problem(codes, Bounds(20, 200)) == problem


def test_loops_are_found_wherever_they_are() -> None:
    """As by comparing every code with the one a period earlier."""

    def has_run(codes: list[int], period: int) -> bool:
        pairs = zip(codes[period:], codes, strict=False)
        equal = "".join("x" if code == earlier else " " for code, earlier in pairs)
        return "x" * (max(32, 3 * period) - period) in equal

    chance, found = random.Random(0), [0, 0]
    for _ in range(2000):
        period, few = chance.randrange(1, 36), chance.choice([2, 200])
        loop = [chance.randrange(few) for _ in range(period)] * 40
        length = max(32, 3 * period) + chance.randrange(-3, 4)
        edges = ([chance.randrange(few) for _ in range(chance.randrange(50))] for _ in range(2))
        codes = [*next(edges), *loop[:length], *next(edges)]
        expected = any(has_run(codes, period) for period in range(1, 33))
        assert has_loop(codes) == expected
        found[expected] += 1
    assert min(found) > 200


def test_a_loop_is_found_while_it_grows() -> None:
    assert ends_in_loop([*VARIED, *VARIED[:30] * 4], 20) and not ends_in_loop(VARIED, 20)
