"""SSML becomes segments of text, language, rate and pause; what is not supported is named in one error."""

from __future__ import annotations

from xml.sax.saxutils import escape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myxtts.config import LANGUAGES
from myxtts.errors import ConfigError
from myxtts.synthesis.markup import ALL_BREAKS_S, RATES, STRENGTHS, Markup, Segment, is_markup, said_as


def segments(inner: str, language: str = "en") -> list[Segment]:
    return Markup(f"<speak>{inner}</speak>").segments(language)


def problem(inner: str, language: str = "en") -> str:
    with pytest.raises(ConfigError) as caught:
        segments(inner, language)
    return str(caught.value)


def test_markup_is_recognised_by_its_root_element() -> None:
    assert is_markup("<speak>a</speak>")
    assert is_markup('\ufeff <?xml version="1.0"?>\n<speak xml:lang="en">a</speak>')
    assert is_markup("<!DOCTYPE speak><speak>a</speak>")  # to be refused, not spoken
    assert not is_markup("I <speak> English") and not is_markup("<speaker>a</speaker>") and not is_markup("")


def test_text_rates_languages_and_pauses_become_segments() -> None:
    found = segments(
        'One <break time="500ms"/> two <prosody rate="80%">three '
        '<lang xml:lang="fa-IR">چهار</lang></prosody> five.'
    )
    assert [(part.text.strip(), part.language, part.rate, part.pause_s) for part in found] == [
        ("One", "en", 1.0, 0.5),
        ("two", "en", 1.0, None),
        ("three", "en", 0.8, None),
        ("چهار", "fa", 0.8, None),
        ("five.", "en", 1.0, None),
    ]


def test_the_language_of_the_document_loses_its_region_and_an_unknown_one_is_left_to_detection() -> None:
    assert Markup('<speak xml:lang="pt-BR">a</speak>').language == "pt"
    assert Markup('<speak xml:lang="tlh">a</speak>').language == ""
    document = Markup('<speak xmlns="http://www.w3.org/2001/10/synthesis" version="1.1"><p>One</p> two</speak>')
    assert document.text == "One two"
    assert document.segments("en") == [Segment("One\n\n two", "en")]


def test_marks_alone_stay_with_the_words_before_them() -> None:
    assert segments('<lang xml:lang="fa">سلام</lang>.') == [Segment("سلام.", "fa")]


def test_breaks_add_up_and_may_come_first() -> None:
    assert segments('<break time="1s"/>a<break strength="weak"/><break time="1.5s"/>') == [
        Segment("", LANGUAGES[0], 1.0, 1.0),
        Segment("a", "en", 1.0, 1.75),
    ]
    assert segments("a<break/>b")[0].pause_s == STRENGTHS["medium"]


@pytest.mark.parametrize(
    ("rate", "expected"), [("slow", RATES["slow"]), ("80%", 0.8), ("+20%", 1.2), ("-10%", 0.9), ("1.5", 1.5)]
)
def test_rates_are_words_percentages_changes_or_numbers(rate: str, expected: float) -> None:
    assert segments(f'<prosody rate="{rate}">a</prosody>')[0].rate == pytest.approx(expected)


SAID = [
    ("en", "cardinal", "1,250", "one thousand, two hundred and fifty"),
    ("en", "cardinal", "-7", "minus seven"),
    ("en", "ordinal", "21", "twenty-first"),
    ("en", "digits", "007", "zero zero seven"),
    ("en", "characters", "BBC2", "B, B, C, two"),
    ("en", "spell-out", "a&b", "a, and, b"),
    ("en", "telephone", "+98 (21) 55", "plus nine eight, two one, five five"),
    ("en", "date", "3/4/1999", "march fourth, one thousand, nine hundred and ninety-nine"),
    ("fa", "cardinal", "۱۲۳", "صد و بیست و سه"),
    ("fa", "ordinal", "۳", "سوم"),
    ("fa", "digits", "۱۲", "یک دو"),
    ("fa", "characters", "ب‌ت۲", "به, ته, دو"),
    ("fa", "telephone", "۰۲۱ ۵۵", "صفر دو یک, پنج پنج"),
    ("fa", "date", "1402/1/5", "پنجم فروردین هزار و چهارصد و دو"),
]


@pytest.mark.parametrize(("language", "kind", "written", "spoken"), SAID)
def test_say_as_reads_with_the_number_tables_of_the_language(
    language: str, kind: str, written: str, spoken: str
) -> None:
    text = f'<say-as interpret-as="{kind}">{escape(written)}</say-as>'
    assert segments(text, language)[0].text.strip() == spoken


def test_the_format_of_a_date_decides_its_order() -> None:
    assert said_as("03/04/1999", "date", "dmy", "en").startswith("april third")


@pytest.mark.parametrize(
    ("language", "kind", "written"),
    [
        ("zh", "ordinal", "3"),
        ("en", "cardinal", "four"),
        ("en", "cardinal", "1" * 16),
        ("en", "date", "13/14/1999"),
        ("en", "characters", "☃"),
        ("en", "telephone", "call me"),
        ("en", "digits", ""),
    ],
)
def test_what_the_tables_cannot_read_is_an_error(language: str, kind: str, written: str) -> None:
    assert f'interpret-as="{kind}"' in problem(f'<say-as interpret-as="{kind}">{written}</say-as>', language)


def test_one_error_names_every_problem_and_the_nearest_choice() -> None:
    said = problem(
        '<brake/><break time="9 h"/><prosody rate="slwo" pitch="x">a</prosody><lang xml:lang="xx">b</lang>'
        '<say-as interpret-as="ordnal">3</say-as><sub>c</sub><prosody rate="400%">d</prosody>'
    )
    for part in ("break?", '"9 h"', "slow?", "pitch", '"xx"', "ordinal?", "alias", "400%"):
        assert part in said


def test_declarations_and_entities_are_refused() -> None:
    bomb = '<!DOCTYPE a [<!ENTITY b "ha"><!ENTITY c "&b;&b;&b;&b;">]><speak>&c;</speak>'
    external = '<!DOCTYPE a SYSTEM "file:///etc/passwd"><speak>a</speak>'
    for document in (bomb, external):
        with pytest.raises(ConfigError, match="DOCTYPE"):
            Markup(document)
    for broken in (
        "<speak>&b;</speak>",
        "<speak>a & b</speak>",
        "<speak>",
        "<speak>a</speak><speak/>",
        "<speak>\0</speak>",
    ):
        with pytest.raises(ConfigError, match="well-formed"):
            Markup(broken)
    assert segments("a <!-- not said --> <![CDATA[b & c]]>") == [Segment("a b & c", "en")]


def test_silence_and_depth_are_limited() -> None:
    assert "together" in problem('<break time="10s"/>' * (int(ALL_BREAKS_S / 10) + 1))
    assert "deep" in problem("<p>" * 5000 + "a" + "</p>" * 5000)


TEXTS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff"), max_size=20
)


@st.composite
def documents(draw: st.DrawFn, depth: int) -> tuple[str, str]:
    """Valid markup, and its words."""
    text = draw(TEXTS)
    markup, said = escape(text), text
    for _ in range(draw(st.integers(0, 3)) if depth else 0):
        inner, words = draw(documents(depth - 1))
        start, end = draw(
            st.sampled_from([
                ("<p>", "</p>"), ("<s>", "</s>"), ('<lang xml:lang="fa">', "</lang>"),
                ('<prosody rate="95%">', "</prosody>"), ("<break/>", ""),
            ])
        )  # fmt: skip
        markup += start + inner + end
        said += words
    return markup, said


@settings(max_examples=60)
@given(documents(depth=2))
def test_no_word_is_lost_or_added_by_markup(document: tuple[str, str]) -> None:
    markup, said = document
    found = segments(markup)
    letters = [letter for part in found for letter in part.text if letter.isalnum()]
    assert letters == [letter for letter in said if letter.isalnum()]
    assert all(part.language in LANGUAGES and 0.5 <= part.rate <= 2 for part in found)


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused_with_a_message(text: str) -> None:
    for document in (f"<speak>{text}</speak>", f"<speak {text}>", text):
        try:
            Markup(document).segments("en")
        except ConfigError as error:
            assert "SSML" in str(error)
