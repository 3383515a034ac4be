"""Where texts are cut: at sentences in every language, at commas and spaces where these are too long."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxtts.config import LANGUAGES
from myxtts.synthesis.text import shorten, split

LONG = "; ".join(["we walked along the river, and we counted all the bridges"] * 6)


def check(text: str, language: str) -> None:
    """`|` marks the places where a text must be cut, and no other; sentences are long enough to stay alone."""
    expected = [part.strip() for part in text.split("|")]
    assert split(text.replace("|", ""), language, 100) == expected


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
    ],
)
def test_sentences_end_at_the_marks_of_their_language(language: str, text: str) -> None:
    check(text, language)


@pytest.mark.parametrize(
    ("language", "text"),
    [
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
def test_dots_inside_a_sentence_do_not_end_it(language: str, text: str) -> None:
    check(text, language)


def test_short_sentences_are_said_with_a_neighbour() -> None:
    assert split("Yes. No! Perhaps. Well?", "en", 250) == ["Yes. No! Perhaps. Well?"]
    long = "The harbour was quiet when the first boat came in."
    assert split(f"{long} {long}", "en", 250) == [long, long]


def test_blank_lines_end_a_sentence_and_line_breaks_do_not() -> None:
    assert split("A title that has no full stop\n\nThe text\nbelow it.", "en", 80) == [
        "A title that has no full stop",
        "The text below it.",
    ]


def test_long_sentences_are_cut_at_the_best_mark_near_the_middle() -> None:
    pieces = shorten(LONG, 150)
    assert all(piece.endswith(";") for piece in pieces[:-1])
    assert [len(piece) <= 150 for piece in pieces] == [True] * len(pieces)
    assert all(piece.endswith(",") for piece in shorten(LONG.replace(";", ","), 150)[:-1])
    assert all(piece.endswith("،") for piece in shorten("، ".join(["کنار رودخانه قدم زدیم"] * 8), 60)[:-1])
    words = shorten(LONG.replace(";", "").replace(",", ""), 100)
    assert {word for piece in words for word in piece.split()} == set(
        LONG.replace(";", "").replace(",", "").split()
    )


def test_words_without_end_are_cut_but_never_before_an_accent() -> None:
    pieces = shorten("e\u0301" * 200, 33)
    assert "".join(pieces) == "e\u0301" * 200
    assert all(len(piece) <= 33 and piece.startswith("e") for piece in pieces)


def test_nothing_is_no_sentence() -> None:
    assert split("", "en", 250) == split(" \n\n\t ", "fa", 166) == []


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
