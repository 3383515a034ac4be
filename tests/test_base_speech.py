"""The speech of the base model: voices and sentences that are held out, joins, batches, and what is dropped."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from real import pack, unpack
from speech import BUCKET, Pending, batches, fault, played_samples, resample, resampling_filter
from teacher import SnakeBlock, Spoken, span
from texts import FEWEST, HEADER, MOST, TEST_SENTENCES, Texts, assemble, clean, join, normal, split
from voices import HELD_OUT_PEOPLE, HELD_OUT_VOICES, NATIVES, SHIFTS, cast, make_voices, native_voices

from myxtts.data.corpus import read_corpus

KNOWN = sorted([*HELD_OUT_VOICES, *NATIVES["fr"], *NATIVES["it"], *(f"af_{number}" for number in range(9))])
WORDS = ["the", "old", "boat", "sails", "slowly", "over", "dark", "water", "while", "children", "sing"]


def sentences(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, rng.integers(4, 12))) + f" {n}." for n in range(count)]


def test_no_voice_contains_a_held_out_one_and_a_third_is_shifted() -> None:
    voices = make_voices(KNOWN, 120, 12, np.random.default_rng(0))
    assert not voices.weights[:, [KNOWN.index(name) for name in HELD_OUT_VOICES]].any()
    assert not set(voices.names) & set(HELD_OUT_VOICES)
    assert len(set(voices.names)) == len(voices.weights) == 120 and (voices.shifts > 0).sum() == 40
    np.testing.assert_allclose(voices.weights.sum(1), 1, atol=1e-5)
    assert len(native_voices(voices, KNOWN, "fr")) >= 13 and len(native_voices(voices, KNOWN, "it")) >= 13
    assert not len(native_voices(voices, KNOWN, "fa"))


def test_french_is_only_spoken_by_natives_and_half_of_italian() -> None:
    rng = np.random.default_rng(0)
    voices = make_voices(KNOWN, 120, 12, rng)
    share = {
        language: np.isin(cast(voices, KNOWN, language, 4000, rng), native_voices(voices, KNOWN, language)).mean()
        for language in ("fr", "it", "en")
    }
    assert share["fr"] == 1 and 0.5 < share["it"] < 0.7 and share["en"] == 0


def test_joined_clips_are_of_one_to_three_sentences_and_never_too_long() -> None:
    lengths = np.random.default_rng(1).integers(8, 200, 2000)
    clips = join(lengths, np.random.default_rng(2))
    sizes = [sum(lengths[clip]) + len(clip) - 1 for clip in clips]
    assert {len(clip) for clip in clips} == {1, 2, 3} and min(sizes) >= FEWEST and max(sizes) <= MOST
    assert sum(map(len, clips)) == len({at for clip in clips for at in clip}) > 1200


def test_a_held_out_sentence_is_held_out_in_every_spelling() -> None:
    both = [form for text in sentences(300) for form in (text, text.upper().replace(".", "!"))]
    train, test = split(both, 40)
    assert len(test) == 40 and not {normal(both[at]) for at in train} & {normal(both[at]) for at in test}


def test_sentences_are_cleaned() -> None:
    assert clean("!‏از سه  چیز", "fa") == "از سه چیز."
    assert clean("¿ Problemas , dónde?", "es") == "¿Problemas, dónde?"
    assert clean("“Well…” he said,", "en") == "Well… he said."


def test_texts_survive_the_file_and_voices_fit_their_language(tmp_path: Path) -> None:
    lines = [f"{text}\t{text}" for text in sentences(TEST_SENTENCES["en"] + 200)]
    for language in ("en", "fr"):
        (tmp_path / f"{language}.0.tsv").write_text("\n".join(lines), encoding="utf-8")
    letters = {letter: at for at, letter in enumerate(" .0123456789abcdefghijklmnopqrstuvwxyz", 16)}
    made, test = assemble(tmp_path, letters, {"en": 0.5, "fr": 0.2}, KNOWN)
    made.save(tmp_path / "texts.npz")
    texts = Texts.load(tmp_path / "texts.npz")
    held_out, french = {text for _, text, _ in test}, set(native_voices(texts.voices, KNOWN, "fr"))
    assert len(held_out) == TEST_SENTENCES["en"]  # the French ones are among them
    for clip in range(len(texts.clips)):
        parts = [texts.sentences[at] for at in texts.parts(clip)]
        assert texts.ids(clip).tolist() == [letters[letter] for letter in " ".join(parts)]
        assert texts.text(clip) == made.text(clip) == " ".join(parts)[: -1 if texts.bare[clip] else None]
        assert texts.clip_voice[clip] in french if texts.language(clip) == "fr" else not held_out & set(parts)


def test_every_clip_is_in_one_batch_and_few_shapes_occur() -> None:
    rng, nothing = np.random.default_rng(3), Spoken(*[torch.zeros(1)] * 3)
    blocks = [[Pending(50 * b + n, int(rng.integers(120, 160)), nothing) for n in range(50)] for b in range(20)]
    made = list(batches(iter(blocks), 2000, float("inf")))
    assert sorted(item.clip for batch, _ in made for item in batch) == list(range(1000))
    for batch, frames in made:
        counts = [item.frames for item in batch]
        assert counts == sorted(counts, reverse=True) and counts[0] <= frames and frames % BUCKET == 0
    assert len({(len(batch), frames) for batch, frames in made}) <= 4


@pytest.mark.parametrize("speed", SHIFTS[1:])
def test_a_shifted_tone_is_the_same_tone_at_another_pitch(speed: tuple[int, int]) -> None:
    time = torch.arange(24_000 * 2, dtype=torch.float64)[None] / 24_000
    shifted = resample(torch.sin(20_000 * time[:, :24_000]).float(), resampling_filter(speed), speed)
    assert shifted.shape[1] == played_samples(24_000, speed)
    expected = torch.sin(20_000 * speed[0] / speed[1] * time[:, : shifted.shape[1]])
    assert (shifted - expected)[:, 100:-100].square().mean() < 1e-7


def test_broken_clips_are_named() -> None:
    checks = [(0.5, 0.05, 0), (np.nan, 0.05, 0), (0.001, 1e-4, 0), (1.2, 0.3, 0.02)]
    reasons = [fault(np.array(found), 5.0, 70) for found in checks] + [fault(np.array(checks[0]), 11.0, 50)]
    assert reasons == ["", "not a number", "silent", "clipped", "too long"]


def test_a_row_does_not_depend_on_the_padding_of_its_batch() -> None:
    torch.manual_seed(0)
    block, style, counts = SnakeBlock(16, 7), torch.randn(3, 128), torch.tensor([60, 41, 30])
    x = torch.randn(3, 64, 16) * span(counts, 64).mask
    with torch.inference_mode():
        batch = block(x, style, span(counts, 64))
        alone = block(x[1:2, :41], style[1:2], span(counts[1:2], 41))
    torch.testing.assert_close(batch[1:2, :41], alone, rtol=1e-4, atol=1e-4)


def test_held_out_people_never_travel(tmp_path: Path) -> None:
    names = [*HELD_OUT_PEOPLE, "anna", "bert"]
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as file:
        lines = [HEADER, *(f"{name}/1.ogg|{name}|en|Hello.|2.5|24000" for name in names)]
        file.writestr("all/metadata.csv", "\n".join(lines))
        for name in names:
            file.writestr(f"all/{name}/1.ogg", b"sound")
    pack([tmp_path / "all.zip"], tmp_path)
    unpack(sorted(tmp_path.glob("real-*.zip")), tmp_path / "corpus")
    corpus = read_corpus(tmp_path / "corpus")
    assert sorted(clip.speaker for clip in corpus.clips) == ["anna", "bert"] and not corpus.set_aside
