"""A whole corpus made ready: what is used, what is set aside and why, and which clips are held out."""

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from conftest import SENTENCES, make_voice

from myxtts import audio
from myxtts.config import LANGUAGES, SAMPLE_RATE, DataSettings
from myxtts.data import prepare as prepare_module
from myxtts.data.clips import DecodeOptions, PreparedCorpus, max_frames_of, set_aside_list
from myxtts.data.corpus import read_corpus
from myxtts.data.prepare import EMBEDDED_CORPUS, prepare, spoken_corpus
from myxtts.errors import DatasetError
from myxtts.terminal import ProgressLines, show_corpus
from myxtts.text import tokenizer

Prepare = Callable[..., PreparedCorpus]


BROKEN = dict.fromkeys(("cutflac", "cutmp3", "cutogg", "cutwav"), "truncated or damaged") | {
    "empty": "empty file",
    "prose": "not audio",
    "nothing": "no samples",
    "silent": "silent",
    "hum": "silent",
    "short": "too short",
    "long": "too long",
    "absent": "missing file",
    "blank": "empty text",
    "marks": "empty text",
    "longtext": "text too long",
    "novel": "text too long",
    "foreign": "unknown language",
    "latin": "wrong encoding",
    "onlyid": "malformed line",
    "dup": "duplicate id",
}
"""Clips of the broken corpus and the reason why each is set aside."""


def write_broken_corpus(folder: Path) -> None:
    """Three good clips ("dup" is good once) and one of every kind of broken ones."""
    wavs = folder / "wavs"
    wavs.mkdir(parents=True)
    for name in ("good1", "good2", "blank", "dup", "foreign", "longtext", "novel", "marks", "cutwav"):
        sf.write(wavs / f"{name}.wav", make_voice(1.0), SAMPLE_RATE)
    for suffix in ("flac", "mp3", "ogg"):
        sf.write(wavs / f"cut{suffix}.{suffix}", make_voice(2.0), SAMPLE_RATE)
    for path in wavs.glob("cut*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    (wavs / "empty.wav").touch()
    (wavs / "prose.wav").write_text("These are not samples.\n" * 100)
    sf.write(wavs / "nothing.wav", np.zeros(0), SAMPLE_RATE)
    sf.write(wavs / "silent.wav", np.zeros(SAMPLE_RATE), SAMPLE_RATE)
    sf.write(wavs / "hum.flac", 0.3 + 0.001 * make_voice(1.0), SAMPLE_RATE)
    sf.write(wavs / "short.wav", make_voice(0.3), SAMPLE_RATE)
    sf.write(wavs / "long.wav", make_voice(29.0, 8000), 8000)
    texts = {"blank": "   ", "longtext": "word " * 300, "novel": "word " * 2000, "marks": "\u200b"}
    lines = ["audio_file|text|speaker_name|language", "onlyid", "dup|Once.|s|en", "foreign|Moi.|s|fi"]
    usual = [name for name in BROKEN if name not in ("latin", "onlyid", "foreign")]
    lines += [f"{name}|{texts.get(name, 'A sentence.')}|s|en" for name in (*usual, "good1", "good2")]
    raw = "\r\n".join(lines).encode("utf-8-sig")
    (folder / "metadata.csv").write_bytes(raw + b"\r\nlatin|caf\xe9|s|en\r\n")


def test_every_kind_of_broken_input_is_named(tmp_path: Path, run_prepare: Prepare, capsys) -> None:
    folder = tmp_path / "corpus"
    write_broken_corpus(folder)
    prepared = run_prepare(folder, val_fraction=0.0)
    assert sorted(prepared.train.names) == ["dup", "good1", "good2"]
    assert {item.id: item.reason for item in prepared.set_aside} == BROKEN
    show_corpus(prepared)
    output = capsys.readouterr().out
    assert f"listed in {set_aside_list(prepared.root)}" in output.replace("\n", " ")
    for flag in ("--max-mel-frames", "--min-clip-seconds", "--max-text-length"):
        assert f"(see {flag})" in output
    assert all(item.detail and item.where.startswith("metadata.csv:") for item in prepared.set_aside)
    with open(set_aside_list(prepared.root), encoding="utf-8", newline="") as file:
        listed = {row["id"]: row for row in csv.DictReader(file, delimiter="|")}
    assert {name: row["reason"] for name, row in listed.items()} == BROKEN
    assert len(prepared.set_aside) == len(BROKEN)
    for name, detail in (("short", "0.30 s"), ("latin", "0xe9"), ("dup", "first seen at metadata.csv")):
        assert detail in listed[name]["detail"]
    again = run_prepare(folder, val_fraction=0.0)
    assert again.set_aside == prepared.set_aside  # the second start, from the cache, says the same


def test_texts_cannot_disguise_messages(make_corpus, run_prepare: Prepare, capsys) -> None:
    """Escape sequences could clear a terminal, and an override of the direction turns a path around."""
    folder = make_corpus(["One."])
    with open(folder / "metadata.csv", "a", encoding="utf-8") as metadata:
        metadata.write("evil\x1b[2J\u202eid|Two.\n")
    (folder / "speakers.csv").write_text("id|speaker\nclip000|ann\x1b[31m[bold]\n", encoding="utf-8")
    prepared = run_prepare(folder)
    show_corpus(prepared)
    listed = set_aside_list(prepared.root).read_text()
    (folder / "wavs" / "clip000.wav").unlink()
    with pytest.raises(DatasetError, match="No usable clip") as caught:
        run_prepare(folder)
    for text in (capsys.readouterr().out, listed, str(caught.value)):
        assert not {"\x1b", "\u202e"} & set(text)
    assert r"evil\x1b[2J\u202eid|missing file" in listed
    assert str(set_aside_list(prepared.root)) in str(caught.value)


def test_nothing_usable_is_an_error_that_says_why(make_corpus, run_prepare: Prepare) -> None:
    folder = make_corpus()
    for path in (folder / "wavs").iterdir():
        path.write_bytes(b"")
    (folder / "wavs" / "clip005.wav").unlink()
    with pytest.raises(DatasetError, match=r"(?s)No usable clip in .*corpus.*5 × empty file.*1 × missing file"):
        run_prepare(folder)
    sf.write(folder / "wavs" / "clip001.wav", np.sin(np.arange(SAMPLE_RATE) / 9), SAMPLE_RATE)
    for metadata, why in {
        "id|text\n": "the metadata is empty",
        "clip001|\nclip002\n": r"(?s)1 × empty text.*1 × malformed line",
        f"clip001|{'word ' * 2000}\n": "text too long",
    }.items():
        (folder / "metadata.csv").write_text(metadata)
        with pytest.raises(DatasetError, match=why):
            run_prepare(folder)


@pytest.mark.parametrize(
    ("language", "texts", "is_warned"),
    [
        ("fa", ["Plain letters.", "And more of them."], True),
        ("zh", ["Plain letters.", "And more of them."], True),
        ("en", ["سلام دنیا", "خوبم"], True),
        ("fa", ["سلام دنیا", "خوبم", "1984"], False),
        ("de", ["Plain letters.", "Grüße!"], False),
        ("fa", ["سلام دنیا", "A Latin line."], False),
        ("ja", ["今日は", "テストです"], False),
        ("ru", ["1984", "..."], False),
    ],
)
def test_a_named_language_that_writes_other_letters_is_doubted_once(
    make_corpus, language: str, texts: list[str], is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    spoken_corpus(DataSettings(train_data=make_corpus(texts), language=language), ProgressLines())
    warnings = [text for record in caplog.records if "--language" in (text := record.getMessage())]
    assert len(warnings) == is_warned
    assert not is_warned or (f"--language {language}" in warnings[0] and texts[0] in warnings[0])


def test_unknown_characters_are_named_per_clip(make_corpus, run_prepare: Prepare, tmp_path: Path) -> None:
    folder = make_corpus(["Plain letters only.", "A stra\u00dfe and a \u03c0 here.", "One \u4e2d character."])
    vocabulary = tmp_path / "vocab.json"
    tokenizer.train(["plain letters"], ["en"], 256).save(vocabulary)
    first, second = run_prepare(folder, tokenizer=vocabulary).set_aside
    assert (first.id, second.id) == ("clip001", "clip002")
    assert first.reason == second.reason == "unknown characters"
    assert "U+00DF" in first.detail and "U+03C0" in first.detail and "U+4E2D" in second.detail


def test_a_language_the_vocabulary_lacks_is_named(make_corpus, run_prepare: Prepare, tmp_path: Path) -> None:
    content = json.loads(tokenizer.train(["plain letters"], ["en"], 256).to_json())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "[fa]"]
    del content["model"]["vocab"]["[fa]"]
    (tmp_path / "vocab.json").write_text(json.dumps(content))
    with pytest.raises(DatasetError, match=r"(?s)language not in vocabulary.*vocabulary extend --language fa"):
        run_prepare(make_corpus(), tokenizer=tmp_path / "vocab.json", language="fa")


@pytest.mark.parametrize("change", ["rewritten", "deleted"])
def test_a_file_changed_while_it_is_read_is_refused(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Decoded in this process, so that the change comes between the listing and the end of the reading."""
    options = DecodeOptions(9 * SAMPLE_RATE, 0.0)
    clip = read_corpus(corpus).clips[0]
    path, decode = corpus / clip.path, audio.decode
    assert len(prepare_module._decode_clip(corpus, options, clip)) > 0

    def decode_and_change(*arguments: object) -> audio.Pcm:
        pcm = decode(*arguments)
        if change == "deleted":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
            os.utime(path, ns=(clip.modified_ns, clip.modified_ns))
        return pcm

    monkeypatch.setattr(audio, "decode", decode_and_change)
    with pytest.raises(audio.UnusableAudio, match="changed while read"):
        prepare_module._decode_clip(corpus, options, clip)


def held_out(prepared: PreparedCorpus) -> set[str]:
    assert not set(prepared.train.names) & set(prepared.val.names)
    return set(prepared.val.names)


@pytest.fixture
def forty(make_corpus) -> Path:
    return make_corpus([f"This is sentence number {number} of forty." for number in range(40)], seconds=0.6)


def test_the_split_is_stable_under_other_clips(forty: Path, make_corpus, run_prepare: Prepare) -> None:
    before = held_out(run_prepare(forty, val_fraction=0.2))
    assert 1 <= len(before) <= 20
    assert held_out(run_prepare(forty, val_fraction=0.0)) == set()
    make_corpus([f"Another text, the {number}th." for number in range(20)], first=40, seconds=0.6)
    lines = (forty / "metadata.csv").read_text().splitlines()
    (forty / "metadata.csv").write_text("\n".join(reversed(lines[5:])))
    after = held_out(run_prepare(forty, val_fraction=0.2))
    removed = {f"clip{number:03d}" for number in range(5)}
    assert {name for name in after if name < "clip040"} == before - removed
    assert any(name >= "clip040" for name in after)
    assert held_out(run_prepare(forty, val_fraction=0.4)) > after


def test_one_text_is_never_on_both_sides(make_corpus, run_prepare: Prepare) -> None:
    folder = make_corpus([f"Sentence {number} is read by three people." for number in range(8)] * 3, seconds=0.6)
    for fraction in (0.0001, 0.1, 0.5):
        prepared = run_prepare(folder, val_fraction=fraction)
        train, val = ({int(name[4:]) % 8 for name in part.names} for part in (prepared.train, prepared.val))
        assert val and val.isdisjoint(train)
        assert len(prepared.val) == 3 * len(val)


@pytest.mark.parametrize(
    ("texts", "sizes"), [(["The same."] * 2, (2, 0)), (["First.", "Second."], (1, 1)), (["Alone."], (1, 0))]
)
def test_training_never_goes_empty(
    make_corpus, run_prepare: Prepare, texts: list[str], sizes: tuple[int, int]
) -> None:
    prepared = run_prepare(make_corpus(texts), val_fraction=0.5)
    assert (len(prepared.train), len(prepared.val)) == sizes


def test_the_corpus_may_name_the_split(forty: Path, make_corpus, run_prepare: Prepare) -> None:
    lines = (forty / "metadata.csv").read_text().splitlines()
    (forty / "metadata_train.csv").write_text("\n".join(lines[:30]))
    (forty / "metadata_eval.csv").write_text("\n".join(lines[30:33]))
    prepared = run_prepare(forty)
    assert held_out(prepared) == {"clip030", "clip031", "clip032"}
    assert len(prepared.train) == 30
    prepared = run_prepare(forty, val_data=make_corpus(name="other"))  # those held out are not trained on either
    assert (len(prepared.train), len(prepared.val)) == (30, 6)
    (forty / "metadata_train.csv").write_text("absent|No audio.\n")
    with pytest.raises(DatasetError, match="metadata_eval"):
        run_prepare(forty)


def test_a_validation_folder_is_used_whole(forty: Path, make_corpus, run_prepare: Prepare) -> None:
    other = make_corpus(["Words for checking.", "And some more of them."], name="val", first=70)
    (other / "wavs" / "clip070.wav").write_bytes(b"")
    prepared = run_prepare(forty, val_data=other)
    assert (held_out(prepared), len(prepared.train)) == ({"clip071"}, 40)
    assert "clip070|empty file" in set_aside_list(prepared.root).read_text()  # one list holds all


def by_name(prepared: PreparedCorpus, field: str) -> dict[str, int]:
    parts = (prepared.train, prepared.val)
    return {
        name: int(value) for part in parts for name, value in zip(part.names, getattr(part, field), strict=True)
    }


def languages_of(prepared: PreparedCorpus) -> dict[str, str]:
    return {name: LANGUAGES[number] for name, number in by_name(prepared, "languages").items()}


def test_where_the_language_comes_from(make_corpus, run_prepare: Prepare, capsys) -> None:
    german = "Der Zug fährt heute leider erst zwanzig Minuten später ab."
    texts = ["The train is twenty minutes late today, I am afraid.", german, "قطار امروز بیست دقیقه دیر می‌رسد."]
    folder = make_corpus(texts)
    detected = languages_of(run_prepare(folder, language=None))
    assert detected == {"clip000": "en", "clip001": "de", "clip002": "fa"}
    assert set(languages_of(run_prepare(folder, language="nl")).values()) == {"nl"}
    (folder / "speakers.csv").write_text("id|speaker|language\nclip000|ann|it\nclip001|bob|\n")
    named = run_prepare(folder, language="nl")
    assert languages_of(named) == {"clip000": "it", "clip001": "nl", "clip002": "nl"}
    assert named.speaker_names == ["", "ann", "bob"]
    show_corpus(named)
    assert "names its speaker" not in capsys.readouterr().out
    (folder / "speakers.csv").unlink()
    show_corpus(run_prepare(folder, language="nl"))
    assert "Hint: no clip names its speaker" in capsys.readouterr().out
    assert by_name(named, "speakers") == {"clip000": 1, "clip001": 2, "clip002": 0}


def test_phonemes_change_the_ids_and_cost_clips_in_languages_without_a_voice(
    corpus: Path, run_prepare: Prepare
) -> None:
    pytest.importorskip("espeakng_loader", reason="needs the extra phonemes")
    letters = run_prepare(corpus).train
    sounds = run_prepare(corpus, use_phonemes=True).train
    row = letters.ids_rows[0]
    assert letters.ids[row].tolist() != sounds.ids[row].tolist()
    assert np.array_equal(letters.audio[0], sounds.audio[0])
    (corpus / "speakers.csv").write_text("id|speaker|language\nclip000|x|ko\n")
    prepared = run_prepare(corpus, use_phonemes=True)
    assert [(item.id, item.reason) for item in prepared.set_aside] == [("clip000", "language not available")]


def test_spoken_corpus_touches_no_audio(corpus: Path, messages) -> None:
    for path in (corpus / "wavs").iterdir():
        path.write_bytes(b"")
    texts, languages = spoken_corpus(DataSettings(train_data=corpus, language="en"), ProgressLines())
    assert len(texts) == 6
    assert languages == ["en"] * 6
    assert messages.work() == {"TEXT": 6}


def test_a_second_start_is_many_times_as_fast(forty: Path, run_prepare: Prepare) -> None:
    taken = []
    for _ in range(3):
        started_at = time.perf_counter()
        run_prepare(forty)
        taken.append(time.perf_counter() - started_at)
    assert taken[0] > 5 * min(taken[1:]), taken


def test_no_start_imports_pytorch_and_a_second_one_no_decoder(corpus: Path) -> None:
    """A second start is fast because it uses neither a worker nor the decoder nor the detector."""
    code = (
        "import sys; from myxtts.cli import main; from myxtts.data import pool, prepare\n"
        "first = main(sys.argv[1:])\n"
        "pool.ProcessPool.run = prepare.audio.decode = prepare.normalize = prepare.detect_languages = None\n"
        "print(first, main(sys.argv[1:]), 'torch' in sys.modules, 'lingua' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "prepare", "--train-data", str(corpus), "--language", "en"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split()[-4:] == ["0", "0", "False", "False"], done.stderr


def test_the_embedded_corpus(user_cache: Path) -> None:
    prepared = prepare(DataSettings())
    assert prepared.root.is_relative_to(user_cache)
    assert prepared.set_aside == []
    assert len(prepared.train) > len(prepared.val) > 0
    samples = sum(part.num_samples.sum() for part in (prepared.train, prepared.val))
    assert samples / SAMPLE_RATE > 120  # a few minutes
    assert len(set(by_name(prepared, "speakers").values())) > 1
    assert {"en", "fa"} <= {LANGUAGES[number] for number in prepared.train.languages.tolist()}


def test_the_embedded_corpus_is_small_and_licensed() -> None:
    files = [path for path in EMBEDDED_CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 5_000_000
    assert not (EMBEDDED_CORPUS / ".myxtts").exists()
    licence = (EMBEDDED_CORPUS / "LICENSE.txt").read_text()
    rows = [line.split("|") for line in (EMBEDDED_CORPUS / "speakers.csv").read_text().splitlines()[1:]]
    assert {row[1] for row in rows} <= {line.split()[0] for line in licence.splitlines() if line.strip()}
    assert all(row[3].strip() for row in rows)  # the licence of every clip
    ids = {line.split("|")[0] for line in (EMBEDDED_CORPUS / "metadata.csv").read_text().splitlines()}
    assert ids == {row[0] for row in rows} == {path.stem for path in (EMBEDDED_CORPUS / "wavs").iterdir()}


def test_the_language_of_a_sentence_is_detected_once(
    make_corpus, run_prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def detect(texts: list[str], _: list[str], known: dict[tuple[str, str], str]) -> list[str]:
        assert {text for text, _ in known} == set(asked)
        asked.extend(texts)
        return ["de" if known else "en"] * len(texts)

    monkeypatch.setattr("myxtts.data.prepare.detect_languages", detect)
    folder = make_corpus()
    assert set(languages_of(run_prepare(folder, language=None)).values()) == {"en"}
    make_corpus(["Ja."], first=6)
    assert sorted(languages_of(run_prepare(folder, language=None)).values()) == ["de", *["en"] * 6]
    (folder / "metadata.csv").write_text("".join((folder / "metadata.csv").read_text().splitlines(True)[3:]))
    run_prepare(folder, language=None)
    assert asked == [*SENTENCES[:6], "Ja."]
    asked.clear()
    monkeypatch.setattr("myxtts.data.prepare.language_fingerprint", lambda: "another")
    run_prepare(folder, language=None)
    assert len(asked) == 4


def test_clips_set_aside_are_not_looked_at_again(make_corpus, run_prepare: Prepare, messages) -> None:
    folder = make_corpus(SENTENCES[:6])
    run_prepare(folder, max_mel_frames=100)
    make_corpus(SENTENCES[6:7], first=6, seconds=0.6)
    messages.take()
    prepared = run_prepare(folder, max_mel_frames=100)
    assert messages.work()["AUDIO"] == 1
    assert {item.reason for item in prepared.set_aside} == {"too long"}
    assert all("--max-mel-frames" in item.detail for item in prepared.set_aside)


def test_the_longest_clip_follows_the_corpus_unless_it_is_named(make_corpus, run_prepare: Prepare) -> None:
    folder = make_corpus(SENTENCES[:5], seconds=2.0)
    make_corpus(SENTENCES[5:6], first=5, seconds=12.0)
    followed, named = run_prepare(folder), run_prepare(folder, max_mel_frames=800)
    assert (followed.max_mel_frames, followed.set_aside) == (1056, [])  # 12 s are 1034 frames
    assert run_prepare(folder).max_mel_frames == 1056  # from the snapshot
    assert (named.max_mel_frames, [item.reason for item in named.set_aside]) == (800, ["too long"])
    assert "--max-mel-frames" in named.set_aside[0].detail
    assert run_prepare(make_corpus(name="short", seconds=2.0)).max_mel_frames == 192  # 2 s are 173


@pytest.mark.parametrize(
    ("seconds", "rare", "frames"),
    [(2.0, 9.0, 800), (9.0, 10.0, 800), (9.4, 10.0, 832), (12.0, 18.0, 1056), (30.0, 30.0, 2416)],
)
def test_auto_sets_aside_at_most_a_thousandth_beyond_nine_seconds(
    seconds: float, rare: float, frames: int
) -> None:
    lengths = np.r_[np.full(9991, seconds), np.full(9, rare), np.zeros(5)] * SAMPLE_RATE
    assert max_frames_of(lengths.astype(np.int64)) == frames
    assert max_frames_of(np.zeros(5, np.int64)) == 800


def test_workers_asked_for_are_started_and_no_more_than_cores(
    corpus: Path, run_prepare: Prepare, messages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("myxtts.data.prepare.usable_cores", lambda: 3)
    for asked, used in ((1, 1), (16, 3)):
        run_prepare(corpus, num_workers=asked, cache_dir=tmp_path / str(asked))
        assert f"Using {used} parallel workers" in messages.take()
