"""The learning experiment: which sentences it holds out, how it cuts recordings, what each stage trains on."""

from __future__ import annotations

import argparse
import json
import random
import sys
import zipfile
from collections import Counter
from pathlib import Path

import learn
import listening
import numpy as np
import pytest
import soundfile
from align import RATE, Cut, cut, speak_words
from augment import SPEEDS, cut_all, some_words, spliced, write_cuts
from corpus import COLUMNS, RECORDINGS, Spoken, plain, split
from test_evaluate import install
from training import Deadline

from myxtts.data.corpus import read_corpus
from myxtts.text.normalize import phonemize

pytest_plugins = ["training_fixtures"]

WANTED, SPEAKERS = {"ada": 3, "ben": 2}, ("ada", "ben", "eve")
TEXTS = [f"The number of this sentence is {word}." for word in "abcdefghijklmnopqrst"]
CLIPS = [Spoken(f"/{who}/{text}", who, "en", text, 3.0) for who in SPEAKERS for text in TEXTS]


@pytest.mark.parametrize("without", [(), ("ada",)])
def test_a_sentence_is_held_out_for_every_speaker_in_any_order_of_the_clips(without: tuple[str, ...]) -> None:
    parts = split(CLIPS, WANTED, without)
    held_out = {plain(clip.text) for clip in parts.held_out}
    assert len(held_out) == 5 and Counter(clip.speaker for clip in parts.held_out) == WANTED
    assert not any(plain(clip.text) in held_out or clip.speaker in without for clip in parts.train)
    assert sorted([*parts.train, *parts.held_out, *parts.unused]) == sorted(CLIPS)
    assert set(split(CLIPS[::-1], WANTED, without).held_out) == set(parts.held_out)


def test_only_the_gpt_trains_on_other_speakers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ["|".join(COLUMNS)]
    for number, clip in enumerate(CLIPS):
        soundfile.write(tmp_path / f"{number}.wav", np.zeros(800, np.int16), 16000)
        rows.append(f"{number}.wav|{clip.speaker}|en|{clip.text}|0.05|16000")
    (tmp_path / "metadata.csv").write_text("\n".join(rows), encoding="utf-8")
    typed = "learn corpus --voice ada --hold-out ada=1 --spliced-hours 0 --speech"
    monkeypatch.setattr(sys, "argv", [*typed.split(), f"{tmp_path}", "--corpus", f"{tmp_path}/c"])
    learn.main()
    found = {name: read_corpus(tmp_path / "c" / name) for name in ("dvae", "decoder", "gpt", RECORDINGS)}
    speakers = {name: {clip.speaker for clip in corpus.clips} for name, corpus in found.items()}
    assert speakers["dvae"] == speakers["decoder"] == {"ada", *(f"ada at {speed}" for speed in SPEEDS)}
    assert speakers["gpt"] > speakers["dvae"] and speakers[RECORDINGS] == set(SPEAKERS)


@pytest.fixture
def recordings(tmp_path: Path) -> list[Spoken]:
    texts = ["Peter took a copper kettle and took it back.", "Ten quiet cats too tired to cook kept to the attic."]
    for number, text in enumerate(texts):
        wave, _ = speak_words(plain(text), words_per_minute=200)
        soundfile.write(tmp_path / f"{number}.wav", 0.9 * wave / np.abs(wave).max(), RATE)
    return [Spoken(str(tmp_path / f"{number}.wav"), "ada", "en", text, 3.0) for number, text in enumerate(texts)]


def test_a_recording_is_cut_where_a_word_begins_and_it_is_quiet(tmp_path: Path, recordings: list[Spoken]) -> None:
    german = phonemize(["guten Tag"], "de")
    for clip in recordings:
        whole, begins = speak_words(plain(clip.text), words_per_minute=200)
        found = cut(clip)
        assert found is not None and " ".join(found.words) == plain(clip.text) and len(found.places) > 4
        start = int(np.correlate(whole[: len(found.wave)], found.wave[:4000].astype(np.float32)).argmax())
        for word, sample in found.places[1:-1]:
            assert abs(start + sample - begins[word]) < 0.06 * RATE
            assert found.wave[sample - 128 : sample + 128].astype(float).std() < 0.3 * found.wave.std()
    assert phonemize(["guten Tag"], "de") == german  # espeak-ng's voice is restored
    for text, loudness in (("Not a sound.", 0.0), ("...", 0.5)):
        soundfile.write(tmp_path / "a.wav", loudness * np.sin(np.arange(20000) / 20), RATE)
        assert cut(Spoken(str(tmp_path / "a.wav"), "ada", "en", text, 1.0)) is None


def test_spliced_sentences_consist_of_pieces(tmp_path: Path, recordings: list[Spoken]) -> None:
    clip = Cut(list("abcd"), np.repeat(np.arange(4, dtype=np.int16), 100), [(0, 0), (2, 200), (3, 300), (4, 400)])
    for words, piece in (some_words(clip, random.Random(number)) for number in range(20)):
        assert words == ["abcd"[number] for number in np.unique(piece)]
    write_cuts(recordings, known := tmp_path / "cuts.json")
    made = spliced(recordings, tmp_path / "made", hours=0.01, speeds=SPEEDS, known=known)
    assert [one and one.places for one in cut_all(recordings, known)] == [
        one and [list(place) for place in one.places] for one in map(cut, recordings)
    ]
    assert sum(one.seconds for one in made) >= 36
    assert {one.speaker for one in made} == {"ada", *(f"ada at {speed}" for speed in SPEEDS)}
    assert all(soundfile.info(one.path).duration == pytest.approx(one.seconds) for one in made)


JUDGE = """#!{python} -S
import json, pathlib, sys
items = pathlib.Path(sys.argv[-1])
print(json.dumps({{"judges": ["Fake"]}}))
for item in json.loads(items.read_text(encoding="utf-8")):
    assert (items.parent / item["file"]).is_file() and (items.parent / item["reference"]).is_file()
    item |= {{"words": 10, "word_edits": 2 if "000001" in item["label"] else 5, "letters": 9, "letter_edits": 1}}
    print(json.dumps(item | {{"similarity": 0.5, "mos": 2.0}}), flush=True)
"""


class Ended:
    def poll(self) -> int:
        return 0

    wait = poll


def train_here(options: argparse.Namespace, arm: str, seconds: float | None) -> Ended:
    """Train in this process, whose networks are small."""
    listening.train_arm(argparse.Namespace(**vars(options) | {"arm": arm}), Deadline(seconds))
    return Ended()


@pytest.mark.usefixtures("small")
def test_checkpoints_are_chosen_by_some_sentences_and_compared_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, noise = ["|".join(COLUMNS)], np.random.default_rng(0)
    for number, clip in enumerate(CLIPS):
        soundfile.write(tmp_path / f"{number}.wav", noise.integers(-3000, 3000, 20000, np.int16), 16000)
        rows.append(f"{number}.wav|{clip.speaker}|en|{clip.text}|1.25|16000")
    (tmp_path / "metadata.csv").write_text("\n".join(rows), encoding="utf-8")
    monkeypatch.setattr(listening, "CHECKPOINTS_SPOKEN", 2)
    monkeypatch.setattr(listening, "begin_training", train_here)
    typed = "listening run --hold-out ada=3 ben=3 --test 2 --choosing 2 --spliced-hours 0 --size tiny --batch 4"
    typed += f" --dvae-steps 1 --gpt-steps 2 --speech {tmp_path} --home {tmp_path / 'home'}"
    monkeypatch.setattr(sys, "argv", typed.split())
    listening.main()
    said = capsys.readouterr().out
    assert "on another clip of its speaker" in said and "on itself, as --reference-clip same asks" in said
    with zipfile.ZipFile(tmp_path / "home" / "spoken.zip") as packed:
        items = json.loads(packed.read("items.json"))
    texts = {part: {item["text"] for item in items if item["part"] == part} for part in ("test", "choosing")}
    validated = {clip.text for clip in read_corpus(tmp_path / "home/corpus/gpt").clips if clip.held_out}
    assert len(texts["test"]) == len(texts["choosing"]) == 2 and texts["choosing"] < validated
    assert not texts["test"] & {clip.text for clip in read_corpus(tmp_path / "home/corpus/gpt").clips}
    install(tmp_path / ".judge", JUDGE)
    monkeypatch.setattr(sys, "argv", ["listening", "judge", str(tmp_path / "home" / "spoken.zip")])
    listening.main()
    said = capsys.readouterr().out
    assert "chosen by wer: other-000001" in said and "chosen by newest: other-000002" in said
    assert "judging 4 clips" in said and "other-000002 against same-000002, wer: +0.000 (+0.000 to +0.000)" in said
    listening.main()
    assert "judging" not in capsys.readouterr().out
