"""Segments are spoken in order with their pauses; the best attempt is kept; words and cues have their times."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthesis_fixtures import LONG_TEXT, TEXTS

from myxtts.audio import Wave
from myxtts.model.gpt import Said, text_attention
from myxtts.synthesis import alignment, narration
from myxtts.synthesis.alignment import Word, ends_of_texts, token_of_each_code, word_times
from myxtts.synthesis.markup import Segment
from myxtts.synthesis.narration import Cue, Line, Narrator, SpokenLine, cues_of, subtitles
from myxtts.synthesis.synthesizer import Report, Synthesizer
from myxtts.synthesis.text import UnspeakableText
from myxtts.synthesis.voices import Voice

pytest_plugins = ["synthesis_fixtures"]
RATE = 24000


def test_pauses_and_rates_are_those_of_the_segments(synthesizer: Synthesizer, anna: Voice) -> None:
    segments = [Segment("", "en", 1.0, 0.5), Segment(TEXTS[0], "en", 1.0, 1.0), Segment(TEXTS[1], "en", 0.8)]
    narrator = Narrator(synthesizer, anna, seed=3, speed=1.25)
    stream = narrator.stream(narrator.lines(segments), cues := [])
    found = np.concatenate([*stream])
    first = synthesizer.speak(TEXTS[0], anna, "en", seed=3, speed=1.25)
    second = synthesizer.speak(TEXTS[1], anna, "en", seed=3)
    silences = [np.zeros(round(seconds * RATE), np.float32) for seconds in (0.5, 1.0, 0.1)]
    np.testing.assert_array_equal(
        found, np.concatenate([silences[0], first.wave, silences[1], second.wave, silences[2]])
    )
    assert [sentence.text for sentence in stream.report.sentences] == TEXTS[:2]
    assert [cue.text for cue in cues] == TEXTS[:2]
    assert cues[1].start_s == pytest.approx(0.5 + len(first.wave) / RATE + 1.0, abs=1e-3)
    with pytest.raises(UnspeakableText):
        narrator.stream(narrator.lines(segments[:1]))


def test_the_attempt_with_the_fewest_wrong_words_is_kept(synthesizer: Synthesizer, anna: Voice) -> None:
    heard: list[Wave] = []

    def judge(wave: Wave, text: str, language: str) -> float:
        assert (text, language) == (TEXTS[0], "en")
        heard.append(wave)
        return [0.5, 0.25, 0.75][len(heard) - 1]

    narrator = Narrator(synthesizer, anna, seed=3, num_attempts=3, judge=judge)
    (spoken,) = narrator.speak(narrator.lines([Segment(TEXTS[0], "en")]))
    assert len(heard) == 3 and not np.array_equal(heard[0][:2000], heard[1][:2000])
    assert spoken.error_rate == 0.25 and np.array_equal(spoken.wave, heard[1])


def test_a_sentence_without_wrong_words_is_spoken_once(synthesizer: Synthesizer, anna: Voice) -> None:
    heard = []
    narrator = Narrator(synthesizer, anna, seed=3, judge=lambda *said: float(heard.append(said) or 0.0))
    spoken = narrator.speak(narrator.lines([Segment(LONG_TEXT, "en")])[:1])
    if not any(sentence.problem for sentence in spoken[0].report.sentences):
        assert len(heard) == 1


def test_lines_are_grouped_by_rate_only_where_batches_are_fast(
    synthesizer: Synthesizer, anna: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [Line("a", "en", rate, 0.0) for rate in (1.0, 1.0, 0.8, 0.8, 1.0)]
    narrator = Narrator(synthesizer, anna, seed=1)
    assert [len(group) for group in narrator.groups(lines)] == [1] * 5
    with monkeypatch.context() as patched:
        patched.setattr(synthesizer, "device", torch.device("cuda"))
        assert [len(group) for group in narrator.groups(lines)] == [2, 2, 1]


# When words are said


def diagonal(num_codes: int, num_ids: int, sharpness: float = 20.0) -> torch.Tensor:
    """Attention of a head that reads the ids evenly, [codes, ids]."""
    places = torch.arange(num_codes)[:, None] * num_ids / num_codes
    return (-((torch.arange(num_ids) + 0.5 - places) ** 2) * sharpness / 10).softmax(-1)


def test_the_path_follows_the_sharpest_head_and_never_goes_back() -> None:
    blurred = torch.full((60, 20), 1 / 20)
    path, certainty = token_of_each_code(torch.stack([blurred, diagonal(60, 20)]))
    assert (np.diff(path) >= 0).all() and np.abs(path - np.arange(60) / 3).max() <= 1.5
    assert certainty > 0.5 > token_of_each_code(blurred[None])[1]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 1000))
def test_any_attention_gives_a_path_within_the_text(num_codes: int, num_ids: int, seed: int) -> None:
    attention = torch.rand(3, num_codes, num_ids, generator=torch.Generator().manual_seed(seed))
    path, certainty = token_of_each_code(attention)
    assert len(path) == num_codes and path.min() >= 0 and path.max() < num_ids and 0 <= certainty <= 1


def speech_with_silence(seconds: float, *silences: tuple[float, float]) -> Wave:
    times = np.arange(round(seconds * RATE)) / RATE
    wave = np.sin(times * 1000).astype(np.float32)
    for start, end in silences:
        wave[(times >= start) & (times < end)] = 0
    return wave


IDS = [41, 10, 11, 2, 12, 13, 2, 14, 15, 2, 16, 17]
"""A language token and four words of two tokens each, with spaces."""


def timed(monkeypatch: pytest.MonkeyPatch, text: str, wave: Wave, attention: torch.Tensor) -> tuple[Word, ...]:
    monkeypatch.setattr(alignment, "text_attention", lambda *_: [attention])
    return word_times(None, None, text, "en", IDS, list(range(attention.shape[1])), wave)  # type: ignore[arg-type]


def test_words_have_the_times_of_their_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    wave = speech_with_silence(4.0, (0.0, 0.3), (3.8, 4.0))
    words = timed(monkeypatch, "It rained all day.", wave, diagonal(86, 12)[None])
    assert [word.text for word in words] == ["It", "rained", "all", "day."]
    np.testing.assert_allclose([word.start_s for word in words], [0.3, 1.33, 2.33, 3.33], atol=0.15)
    assert words[0].start_s == pytest.approx(0.3, abs=0.02) and words[-1].end_s == pytest.approx(3.8, abs=0.02)
    assert all(0 <= word.start_s < word.end_s <= 4 for word in words)


def test_an_edge_in_a_silence_becomes_its_two_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    wave = speech_with_silence(4.0, (1.25, 1.9))
    _, second, *_ = words = timed(monkeypatch, "It rained all day.", wave, diagonal(86, 12)[None])
    assert (words[0].end_s, second.start_s) == (pytest.approx(1.25, abs=0.02), pytest.approx(1.9, abs=0.02))


def test_words_that_cannot_be_told_apart_have_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    wave, sharp = speech_with_silence(4.0), diagonal(86, 12)[None]
    assert timed(monkeypatch, "It rained all day.", wave, torch.full_like(sharp, 1 / 12)) == ()
    assert timed(monkeypatch, "It rained.", wave, sharp) == ()
    assert timed(monkeypatch, "", wave, sharp) == ()


def test_a_number_is_one_word_with_the_time_of_all_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    words = timed(monkeypatch, "About $30.", speech_with_silence(3.0), diagonal(65, 9)[None, :, :9])
    assert words == ()  # said in three words, but the ids have four
    words = timed(monkeypatch, "Only 1,000 people", speech_with_silence(4.0), diagonal(86, 12)[None])
    assert [word.text for word in words] == ["Only", "1,000", "people"]
    assert words[1].end_s - words[1].start_s > 1.5


def test_the_attention_of_a_spoken_sentence_is_that_of_training(synthesizer: Synthesizer, anna: Voice) -> None:
    (sentence,) = synthesizer.speak(TEXTS[0], anna, "en", seed=1).report.sentences
    assert sentence.num_codes == len(sentence.codes) and sentence.ids
    said = Said(anna.latents, sentence.ids, sentence.codes)
    (attention,) = text_attention(synthesizer.gpt, said)
    dims = synthesizer.gpt.dims
    assert attention.shape == (dims.layers * dims.heads, sentence.num_codes, len(sentence.ids))
    assert (attention >= 0).all() and (attention.sum(-1) <= 1 + 1e-4).all()
    changed = said._replace(codes=(*sentence.codes[:-2], 0, 0))
    shorter, longer = said._replace(codes=said.codes[:9]), said._replace(ids=[*said.ids, 5, 6, 7])
    together = text_attention(synthesizer.gpt, shorter, changed, longer)
    torch.testing.assert_close(together[1][:, :-2], attention[:, :-2])  # later codes change nothing
    torch.testing.assert_close(together[0], attention[:, :9])  # nor do sentences that are looked at with it
    torch.testing.assert_close(together[2], text_attention(synthesizer.gpt, longer)[0])


# Subtitles


def line_with_words(text: str, seconds: float) -> SpokenLine:
    words = text.split()
    each = seconds / max(1, len(words))
    times = tuple(Word(word, number * each, (number + 1) * each) for number, word in enumerate(words))
    report = Report("en", "anna", "hifigan", 1, 1.0, (), {})
    return SpokenLine(Line(text, "en", 1.0, 0.0), np.zeros(round(seconds * RATE), np.float32), report, times, None)


def test_long_sentences_are_several_cues_if_their_words_have_times() -> None:
    text = " ".join(f"word{number}" for number in range(40))
    timed_line = line_with_words(text, 20.0)
    cues = [*cues_of(timed_line, 100.0)]
    assert len(cues) > 2 and " ".join(cue.text for cue in cues) == text
    assert all(len(cue.text) <= 84 for cue in cues)
    assert cues[0].start_s == 100.0 and cues[-1].end_s == pytest.approx(120.0)
    (whole,) = cues_of(timed_line._replace(words=()), 100.0)
    assert whole == Cue(100.0, 120.0, text)


@given(st.lists(st.text(st.characters(categories=["Ll", "Nd"]), min_size=1, max_size=99), max_size=30))
def test_no_word_is_lost_in_cues(words: list[str]) -> None:
    cues = [*cues_of(line_with_words(" ".join(words), 5.0), 0.0)]
    assert [word.text for cue in cues for word in cue.words] == words


def test_srt_and_vtt_are_written_as_their_formats_demand() -> None:
    cues = [
        Cue(0.0, 1.5, "a < b"),
        Cue(3661.0, 3662.25, "c d", (Word("c", 3661.0, 3661.5), Word("d", 3661.6, 3662))),
    ]
    assert subtitles(cues, "srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\na < b\n\n2\n01:01:01,000 --> 01:01:02,250\nc d\n"
    )
    assert subtitles(cues, "vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\na &lt; b\n\n"
        "01:01:01.000 --> 01:01:02.250\nc <01:01:01.600><c>d</c>\n"
    )
    lines = re.findall(r"^[^\d\n].*$", subtitles([Cue(0, 9, "word " * 30)], "srt"), re.MULTILINE)
    assert max(map(len, lines)) <= 42


def test_a_report_of_several_lines_keeps_every_note(synthesizer: Synthesizer, anna: Voice) -> None:
    reports = [synthesizer.speak(text, anna, "en", seed=1).report for text in TEXTS[:2]]
    reports[1] = replace(reports[1], unknown_characters={"ß": "s"}, other_notes=("a", "b"))
    found = narration.merged([replace(reports[0], other_notes=("a",)), reports[1]])
    assert found.unknown_characters == {"ß": "s"} and found.other_notes == ("a", "b")
    assert len(found.sentences) == 2


READ, ELSEWHERE = 0.9, 0.04


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 1, 2, 2, 3, 4, 4], 7),  # token by token, to the full stop
        ([1, 1, 2, 2], None),  # it was not said to its end
        ([4, 3, 2, 1, 4, 1, 4], None),  # nothing is read here
        ([4, 4, 4, 4, 4, 4, 4], None),
    ],
)
def test_a_text_ends_where_the_head_that_reads_looks_away(
    tokens: list[int], expected: int | None, synthesizer: Synthesizer, anna: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it the same is said again, and then something else, at which no token is looked at."""
    attention = torch.full((1, 30, 5), ELSEWHERE)
    said = tokens + [None] * 4 + tokens
    for code, token in enumerate(said):
        if token is not None:
            attention[0, code, token] = READ - 4 * ELSEWHERE
    monkeypatch.setattr(alignment, "text_attention", lambda *_: [attention])
    assert ends_of_texts(synthesizer.gpt, [Said(anna.latents, range(5), range(30))]) == [expected]


@pytest.mark.filterwarnings("error")
def test_a_text_of_two_tokens_is_not_read_in_one_code(
    synthesizer: Synthesizer, anna: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = torch.full((1, 30, 2), ELSEWHERE)
    attention[0, 0, 0] = READ
    monkeypatch.setattr(alignment, "text_attention", lambda *_: [attention])
    assert ends_of_texts(synthesizer.gpt, [Said(anna.latents, range(2), range(30))]) == [None]
