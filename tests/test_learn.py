"""Which sentences the learning experiment holds out, and what it makes of the others."""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import learn
import learn_align
from learn_align import Cut, cut
from learn_corpus import COLUMNS, RECORDINGS, Spoken, plain, read_speech, single_letters, split, write_corpus
from learn_espeak import ESPEAK_SAMPLE_RATE, said_words
from learn_more import SPEEDS, at_other_speeds, some_words, spliced

from myxtts.data.corpus import read_corpus
from myxtts.errors import DatasetError
from myxtts.text.normalize import phonemize
from myxtts.text.tokenizer import Tokenizer

WANTED = {"ada": 3, "ben": 2}


def spoken(speaker: str, text: str) -> Spoken:
    return Spoken(f"/speech/{speaker}-{text[:9]}.ogg", speaker, "en", text, 3.0)


@pytest.fixture
def clips() -> list[Spoken]:
    """Two speakers of the same twenty sentences, punctuated differently, and one with other sentences."""
    texts = [f"The number of this sentence is {word}" for word in "abcdefghijklmnopqrst"]
    shared = [spoken("ada", f"{text}.") for text in texts] + [spoken("ben", text.lower()) for text in texts]
    return shared + [spoken("eve", f"Something else was said {number} times.") for number in range(5)]


def test_a_sentence_is_held_out_for_every_speaker_who_reads_it(clips: list[Spoken]) -> None:
    parts = split(clips, WANTED)
    held_out = {plain(clip.text) for clip in parts.held_out}
    assert len(held_out) == 5
    assert not held_out & {plain(clip.text) for clip in parts.train}
    assert {plain(clip.text) for clip in parts.unused} == held_out
    assert sorted([*parts.train, *parts.held_out, *parts.unused]) == sorted(clips)


def test_each_speaker_says_as_many_sentences_as_wanted(clips: list[Spoken]) -> None:
    assert Counter(clip.speaker for clip in split(clips, WANTED).held_out) == WANTED


def test_the_order_of_the_clips_does_not_matter(clips: list[Spoken]) -> None:
    shuffled = random.Random(1).sample(clips, len(clips))
    assert set(split(shuffled, WANTED).held_out) == set(split(clips, WANTED).held_out)


def test_a_speaker_left_out_is_judged_but_never_trained_on(clips: list[Spoken]) -> None:
    parts = split(clips, WANTED, without=["ada"])
    assert "ada" not in {clip.speaker for clip in parts.train}
    assert Counter(clip.speaker for clip in parts.held_out) == WANTED


def test_too_few_sentences_are_an_error_that_names_the_speaker(clips: list[Spoken]) -> None:
    with pytest.raises(DatasetError, match="ben"):
        split(clips, {"ben": 21})


def test_the_corpus_folder_is_one_that_training_reads(tmp_path: Path, clips: list[Spoken]) -> None:
    speech = tmp_path / "speech"
    speech.mkdir()
    lines = ["path|speaker|language|text|seconds|sample_rate"]
    for number, clip in enumerate(clips):
        (speech / f"{number}.ogg").touch()
        lines.append(f"{number}.ogg|{clip.speaker}|en|{clip.text}|3.0|16000")
    (speech / "metadata.csv").write_text("\n".join(lines), encoding="utf-8")
    write_corpus(split(read_speech(speech), WANTED), tmp_path / "corpus")
    found = read_corpus(tmp_path / "corpus")
    assert not found.set_aside
    assert Counter(clip.speaker for clip in found.clips if clip.held_out) == WANTED
    assert len([clip for clip in found.clips if not clip.held_out]) == 35

    vocabulary = Tokenizer.load(single_letters(tmp_path / "corpus", use_phonemes=False))
    (ids,) = vocabulary.encode_batch(["the number"], ["en"])
    assert len(ids) == len("[en]the number") - 3


def test_a_clip_at_another_speed_is_another_speaker_who_says_the_same(tmp_path: Path) -> None:
    tone = (8000 * np.sin(2 * np.pi * 200 * np.arange(16000) / 16000)).astype(np.int16)
    soundfile.write(tmp_path / "a.wav", tone, 16000)
    clip = Spoken(str(tmp_path / "a.wav"), "ada", "en", "One two three.", 1.0)
    made = at_other_speeds([clip], tmp_path / "speeds", SPEEDS)
    assert [one.speaker for one in made] == [f"ada at {speed}" for speed in SPEEDS]
    for one, speed in zip(made, SPEEDS, strict=True):
        assert one.text == clip.text
        assert soundfile.info(one.path).duration == pytest.approx(one.seconds) == pytest.approx(1 / speed)


def test_the_voice_is_kept_apart_from_those_it_learns_to_read_from(tmp_path: Path, clips: list[Spoken]) -> None:
    rows = []
    for number, clip in enumerate(clips):
        soundfile.write(tmp_path / f"{number}.wav", np.zeros(800, np.int16), 16000)
        rows.append(f"{number}.wav|{clip.speaker}|en|{clip.text}|0.05|16000")
    (tmp_path / "metadata.csv").write_text("\n".join(["|".join(COLUMNS), *rows]), encoding="utf-8")
    voice = clips[0].speaker
    options = argparse.Namespace(
        speech=tmp_path, corpus=tmp_path / "c", voice=voice, hold_out=[f"{voice}=1"], without=[], spliced_hours=0
    )
    learn.corpus(options)
    speakers = {
        name: {line.split("|")[2] for line in (tmp_path / "c" / name).read_text().splitlines()[1:]}
        for name in ("dvae/metadata_train.csv", "decoder/metadata_train.csv", "gpt/metadata_train.csv")
    }
    own = {voice, *(f"{voice} at {speed}" for speed in SPEEDS)}
    assert speakers["dvae/metadata_train.csv"] == speakers["decoder/metadata_train.csv"] == own
    assert own < speakers["gpt/metadata_train.csv"]
    recorded = (tmp_path / "c" / RECORDINGS / "metadata_train.csv").read_text()
    assert {line.split("|")[2] for line in recorded.splitlines()[1:]} == {clip.speaker for clip in clips}


@pytest.fixture
def said(tmp_path: Path) -> list[Spoken]:
    """Recordings of which the beginnings of the words are known, faster than those they are compared with."""
    texts = ["Peter took a copper kettle and took it back.", "Ten quiet cats too tired to cook kept to the attic."]
    clips = []
    for number, text in enumerate(texts):
        wave, _ = said_words(plain(text), words_per_minute=200)
        soundfile.write(tmp_path / f"{number}.wav", 0.9 * wave / np.abs(wave).max(), ESPEAK_SAMPLE_RATE)
        clips.append(Spoken(str(tmp_path / f"{number}.wav"), "ada", "en", text, len(wave) / ESPEAK_SAMPLE_RATE))
    return clips


def test_a_recording_is_cut_where_its_words_begin_and_it_is_quiet(said: list[Spoken]) -> None:
    for clip in said:
        whole, begins = said_words(plain(clip.text), words_per_minute=200)
        found = cut(clip)
        assert found is not None
        words, wave, places = found
        assert " ".join(words) == plain(clip.text)
        assert places[0] == (0, 0) and places[-1] == (len(words), len(wave))
        assert len(places) > 4
        start = int(np.correlate(whole[: len(wave)], wave[:4000].astype(np.float32)).argmax())
        for word, sample in places[1:-1]:
            assert abs(start + sample - begins[word]) < 0.06 * ESPEAK_SAMPLE_RATE
            around = wave[sample - 128 : sample + 128].astype(np.float32)
            assert around.std() < 0.3 * wave.std()


def test_pieces_of_clips_make_sentences_in_their_speakers_voice(tmp_path: Path, said: list[Spoken]) -> None:
    made = spliced(said, tmp_path / "made", hours=0.01, speeds=SPEEDS)
    assert sum(one.seconds for one in made) >= 36
    assert {one.speaker for one in made} == {"ada", *(f"ada at {speed}" for speed in SPEEDS)}
    for one in made:
        wave, rate = soundfile.read(one.path)
        assert len(wave) / rate == pytest.approx(one.seconds) and wave.std() > 0.02
        assert set(plain(one.text).split()) <= {word for clip in said for word in plain(clip.text).split()}
    assert len({plain(one.text) for one in made}) > len(made) / 2


def test_the_words_of_a_piece_are_those_that_sound_in_it() -> None:
    words = list("abcdefgh")
    wave = np.repeat(np.arange(len(words), dtype=np.int16), 100)
    clip = Cut(words, wave, [(0, 0), (2, 200), (3, 300), (6, 600), (8, 800)])
    pieces = [some_words(clip, random.Random(number)) for number in range(100)]
    for some, sound in pieces:
        assert some == [words[number] for number in np.unique(sound)]
        assert len(sound) == 100 * len(some)
    assert {"".join(some) for some, _ in pieces} >= {"ab", "abc", "cdef", "def", "defgh", "gh"}


@pytest.mark.parametrize(("text", "loudness"), [("Not a sound.", 0.0), ("...", 0.5), ("A click.", None)])
def test_a_clip_without_words_or_sound_is_not_cut(tmp_path: Path, text: str, loudness: float | None) -> None:
    wave = np.zeros(20000)
    if loudness is None:
        wave[3] = 1.0
    else:
        wave = loudness * np.sin(np.arange(20000) / 20)
    soundfile.write(tmp_path / "a.wav", wave, ESPEAK_SAMPLE_RATE)
    assert cut(Spoken(str(tmp_path / "a.wav"), "ada", "en", text, 1.0)) is None


def test_what_was_aligned_badly_is_not_cut_there(said: list[Spoken], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        learn_align, "_warped", lambda mine, other: np.minimum(np.arange(len(other)) // 4, len(mine))
    )
    for clip in said:
        found = cut(clip)
        assert found is not None
        for (first, begin), (last, end) in pairwise(found.places):
            assert (end - begin) / (last - first) > 0.05 * ESPEAK_SAMPLE_RATE


def test_what_espeak_says_changes_no_phonemes(said: list[Spoken]) -> None:
    before = phonemize(["guten Tag, wie geht es"], "de")
    cut(said[0])
    assert phonemize(["guten Tag, wie geht es"], "de") == before
