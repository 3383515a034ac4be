"""A whole corpus made ready: what is used, what is set aside and why, and which clips are held out."""

import csv
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
from conftest import SENTENCES, write_corpus

from myxtts import audio
from myxtts.config import LANGUAGES, SAMPLE_RATE, DataSettings
from myxtts.data import prepare as prepare_module
from myxtts.data.clips import DecodeOptions, PreparedCorpus, set_aside_list
from myxtts.data.corpus import read_corpus
from myxtts.data.prepare import EMBEDDED_CORPUS, prepare, spoken_corpus
from myxtts.errors import DatasetError
from myxtts.terminal import ProgressLines
from myxtts.text import tokenizer
from myxtts.text.language import warn_of_other_script

Prepare = Callable[..., PreparedCorpus]


def write_broken_corpus(folder: Path, voice: Callable[..., np.ndarray]) -> dict[str, str]:
    """A folder with two good clips and one of every kind of broken ones; returns the reason expected for each."""
    wavs = folder / "wavs"
    wavs.mkdir(parents=True)
    for name in ("good1", "good2", "notext", "blank", "dup", "foreign", "longtext", "novel", "marks"):
        sf.write(wavs / f"{name}.wav", voice(1.0), SAMPLE_RATE)
    good = (wavs / "good1.wav").read_bytes()
    sf.write(wavs / "cutflac.flac", voice(2.0), SAMPLE_RATE)
    sf.write(wavs / "cutmp3.mp3", voice(2.0), SAMPLE_RATE)
    sf.write(wavs / "cutogg.ogg", voice(2.0), SAMPLE_RATE)
    for path in wavs.glob("cut*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    (wavs / "cutwav.wav").write_bytes(good[: len(good) // 2])
    (wavs / "empty.wav").touch()
    (wavs / "prose.wav").write_text("These are not samples.\n" * 100)
    (wavs / "noise.opus").write_bytes(random.Random(1).randbytes(4000))
    sf.write(wavs / "nothing.wav", np.zeros(0), SAMPLE_RATE)
    sf.write(wavs / "nan.wav", np.full(SAMPLE_RATE, np.nan, np.float32), SAMPLE_RATE, subtype="FLOAT")
    sf.write(wavs / "silent.wav", np.zeros(SAMPLE_RATE), SAMPLE_RATE)
    sf.write(wavs / "hum.flac", 0.3 + 0.001 * voice(1.0), SAMPLE_RATE)
    sf.write(wavs / "short.wav", voice(0.3), SAMPLE_RATE)
    sf.write(wavs / "long.wav", voice(11.0, 8000), 8000)
    expected = dict.fromkeys(("cutflac", "cutmp3", "cutogg", "cutwav"), "truncated or damaged") | {
        "empty": "empty file",
        "prose": "not audio",
        "noise": "not audio",
        "nothing": "no samples",
        "nan": "not audio",
        "silent": "silent",
        "hum": "silent",
        "short": "too short",
        "long": "too long",
        "absent": "missing file",
        "notext": "empty text",
        "blank": "empty text",
        "foreign": "unknown language",
        "longtext": "text too long",
        "novel": "text too long",
        "marks": "empty text",
        "latin": "wrong encoding",
        "onlyid": "malformed line",
        "many": "malformed line",
        "dup": "duplicate id",
    }
    texts = {"notext": "", "blank": "   ", "longtext": "word " * 300, "novel": "word " * 2000, "marks": "\u200b"}
    lines = [f"{name}|{texts.get(name, 'A sentence that is read aloud.')}|s|en" for name in expected]
    lines = [line for line in lines if line.split("|")[0] not in ("latin", "onlyid", "many", "foreign", "dup")]
    lines += ["good1|The first good one.|s|en", "good2|The second good one.|s|en", "foreign|Moi.|s|fi"]
    lines += ["onlyid", "many|a|b|c|d|e", "dup|Once.|s|en", "dup|Twice.|s|en"]
    raw = "\r\n".join(["audio_file|text|speaker_name|language", *lines]).encode("utf-8-sig")
    (folder / "metadata.csv").write_bytes(raw + b"\r\nlatin|caf\xe9|s|en\r\n")
    return expected


def test_every_kind_of_broken_input_is_named(tmp_path: Path, voice, run_prepare: Prepare) -> None:
    folder = tmp_path / "corpus"
    expected = write_broken_corpus(folder, voice)
    prepared = run_prepare(folder, val_fraction=0.0)
    assert sorted(prepared.train.names) == ["dup", "good1", "good2"]
    assert {item.id: item.reason for item in prepared.set_aside} == expected
    assert all(item.detail and item.where.startswith("metadata.csv:") for item in prepared.set_aside)
    with open(set_aside_list(prepared.root), encoding="utf-8", newline="") as file:
        listed = list(csv.DictReader(file, delimiter="|"))
    assert {row["id"]: row["reason"] for row in listed} == expected
    assert len(listed) == len(prepared.set_aside)
    by_id = {row["id"]: row for row in listed}
    assert "0.30 s" in by_id["short"]["detail"]
    assert "0xe9" in by_id["latin"]["detail"]
    assert "first seen at metadata.csv" in by_id["dup"]["detail"]
    again = run_prepare(folder, val_fraction=0.0)
    assert again.set_aside == prepared.set_aside  # the second start, from the cache, says the same


def test_nothing_usable_is_an_error_that_says_why(make_corpus, run_prepare: Prepare) -> None:
    folder = make_corpus()
    for path in (folder / "wavs").iterdir():
        path.write_bytes(b"")
    (folder / "wavs" / "clip005.wav").unlink()
    with pytest.raises(DatasetError, match=r"(?s)No usable clip in .*corpus.*5 × empty file.*1 × missing file"):
        run_prepare(folder)
    (folder / "metadata.csv").write_text("id|text\n")
    with pytest.raises(DatasetError, match="the metadata is empty"):
        run_prepare(folder)
    (folder / "metadata.csv").write_text("clip001|\nclip002\n")
    with pytest.raises(DatasetError, match=r"(?s)1 × empty text.*1 × malformed line"):
        run_prepare(folder)
    sf.write(folder / "wavs" / "clip001.wav", np.sin(np.arange(SAMPLE_RATE) / 9), SAMPLE_RATE)
    (folder / "metadata.csv").write_text(f"clip001|{'word ' * 2000}\n")
    with pytest.raises(DatasetError, match="text too long"):
        run_prepare(folder)


@pytest.mark.parametrize(
    ("language", "texts", "is_warned"),
    [
        ("fa", ["Plain letters.", "And more of them."], True),
        ("zh", ["Plain letters.", "And more of them."], True),
        ("en", ["\u0633\u0644\u0627\u0645 \u062f\u0646\u06cc\u0627", "\u062e\u0648\u0628\u0645"], True),
        ("fa", ["\u0633\u0644\u0627\u0645 \u062f\u0646\u06cc\u0627", "\u062e\u0648\u0628\u0645", "1984"], False),
        ("de", ["Plain letters.", "Gr\u00fc\u00dfe!"], False),
        ("fa", ["\u0633\u0644\u0627\u0645 \u062f\u0646\u06cc\u0627", "A Latin line."], False),
        ("ja", ["\u4eca\u65e5\u306f", "\u30c6\u30b9\u30c8\u3067\u3059"], False),
        ("ru", ["1984", "..."], False),
    ],
)
def test_a_named_language_that_writes_other_letters_is_doubted_once(
    language: str, texts: list[str], is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_other_script(language, texts)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == is_warned
    assert not is_warned or (f"--language {language}" in warnings[0] and texts[0] in warnings[0])


def test_preparing_doubts_the_named_language_but_not_that_of_the_metadata(
    make_corpus, run_prepare: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    run_prepare(make_corpus(), language="fa")
    assert caplog.text.count("--language fa means Persian") == 1


def test_unknown_characters_are_named_per_clip(make_corpus, run_prepare: Prepare, tmp_path: Path) -> None:
    folder = make_corpus(["Plain letters only.", "A stra\u00dfe and a \u03c0 here.", "One \u4e2d character."])
    vocabulary = tmp_path / "vocab.json"
    tokenizer.train(["plain letters"], ["en"], 256).save(vocabulary)
    prepared = run_prepare(folder, tokenizer=vocabulary)
    assert [item.id for item in prepared.set_aside] == ["clip001", "clip002"]
    assert {item.reason for item in prepared.set_aside} == {"unknown characters"}
    first, second = (item.detail for item in prepared.set_aside)
    assert "U+00DF" in first
    assert "U+03C0" in first
    assert "U+4E2D" in second


def test_a_language_the_vocabulary_lacks_is_named(make_corpus, run_prepare: Prepare, tmp_path: Path) -> None:
    content = json.loads(tokenizer.train(["plain letters"], ["en"], 256).to_json())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "[fa]"]
    del content["model"]["vocab"]["[fa]"]
    (tmp_path / "vocab.json").write_text(json.dumps(content))
    with pytest.raises(DatasetError, match=r"(?s)language not in vocabulary.*vocabulary extend --language fa"):
        run_prepare(make_corpus(), tokenizer=tmp_path / "vocab.json", language="fa")


def test_a_file_rewritten_or_deleted_while_it_is_read(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded in this process, so that the change comes between the listing and the end of the reading."""
    options = DecodeOptions(9 * SAMPLE_RATE, 0.0)
    clip = read_corpus(corpus).clips[0]
    path, decode = corpus / clip.path, audio.decode

    def rewrite() -> None:
        path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
        os.utime(path, ns=(clip.modified_ns, clip.modified_ns))

    for change in (rewrite, path.unlink):

        def decode_and_change(*arguments: object, change: Callable[[], None] = change) -> audio.Pcm:
            pcm = decode(*arguments)
            change()
            return pcm

        assert len(prepare_module._decode_clip(corpus, options, read_corpus(corpus).clips[0])) > 0
        monkeypatch.setattr(audio, "decode", decode_and_change)
        with pytest.raises(audio.UnusableAudio, match="changed while read"):
            prepare_module._decode_clip(corpus, options, clip)
        monkeypatch.setattr(audio, "decode", decode)


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
    texts = [f"Sentence {number} is read by three people." for number in range(8)] * 3
    folder = make_corpus(texts, seconds=0.6)
    for fraction in (0.0001, 0.1, 0.5):
        prepared = run_prepare(folder, val_fraction=fraction)
        val_texts = {int(name[4:]) % 8 for name in prepared.val.names}
        assert val_texts
        assert val_texts.isdisjoint(int(name[4:]) % 8 for name in prepared.train.names)
        assert len(prepared.val) == 3 * len(val_texts)


def test_training_never_goes_empty(make_corpus, run_prepare: Prepare) -> None:
    folder = make_corpus(["The same words.", "The same words."])
    prepared = run_prepare(folder, val_fraction=0.5)
    assert (len(prepared.train), len(prepared.val)) == (2, 0)
    folder = make_corpus([f"Sentence {number}." for number in range(2)], name="two")
    prepared = run_prepare(folder, val_fraction=0.5)
    assert (len(prepared.train), len(prepared.val)) == (1, 1)
    folder = make_corpus(["Alone."], name="one")
    assert len(run_prepare(folder).train) == 1


def test_the_corpus_may_name_the_split(forty: Path, run_prepare: Prepare) -> None:
    lines = (forty / "metadata.csv").read_text().splitlines()
    (forty / "metadata_train.csv").write_text("\n".join(lines[:30]))
    (forty / "metadata_eval.csv").write_text("\n".join(lines[30:33]))
    prepared = run_prepare(forty)
    assert held_out(prepared) == {"clip030", "clip031", "clip032"}
    assert len(prepared.train) == 30
    (forty / "metadata_train.csv").write_text("absent|No audio.\n")
    with pytest.raises(DatasetError, match="metadata_eval"):
        run_prepare(forty)


def test_a_validation_folder_is_used_whole(forty: Path, make_corpus, run_prepare: Prepare) -> None:
    other = make_corpus(["Words for checking.", "And some more of them."], name="val", first=70)
    prepared = run_prepare(forty, val_data=other)
    assert held_out(prepared) == {"clip070", "clip071"}
    assert len(prepared.train) == 40
    (other / "wavs" / "clip070.wav").write_bytes(b"")
    prepared = run_prepare(forty, val_data=other)
    assert held_out(prepared) == {"clip071"}
    assert "clip070|empty file" in set_aside_list(prepared.root).read_text()  # one list holds all


def languages_of(prepared: PreparedCorpus) -> dict[str, str]:
    both = (prepared.train, prepared.val)
    return {
        name: LANGUAGES[language]
        for part in both
        for name, language in zip(part.names, part.languages.tolist(), strict=True)
    }


def test_where_the_language_comes_from(make_corpus, run_prepare: Prepare) -> None:
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
    numbers = {
        name: number
        for part in (named.train, named.val)
        for name, number in zip(part.names, part.speakers, strict=True)
    }
    assert numbers == {"clip000": 1, "clip001": 2, "clip002": 0}


def test_phonemes_change_the_ids(corpus: Path, run_prepare: Prepare) -> None:
    pytest.importorskip("espeakng_loader", reason="needs the extra myxtts[phonemes]")
    letters = run_prepare(corpus).train
    sounds = run_prepare(corpus, use_phonemes=True).train
    row = letters.ids_rows[0]
    assert letters.ids[row].tolist() != sounds.ids[row].tolist()
    assert np.array_equal(letters.audio[0], sounds.audio[0])


def test_spoken_corpus_touches_no_audio(corpus: Path, messages) -> None:
    for path in (corpus / "wavs").iterdir():
        path.write_bytes(b"")
    texts, languages = spoken_corpus(DataSettings(train_data=corpus, language="en"), ProgressLines())
    assert len(texts) == 6
    assert languages == ["en"] * 6
    assert messages.work() == {"TEXT": 6}


def test_a_second_start_imports_no_decoder(corpus: Path, run_prepare: Prepare) -> None:
    """What makes it fast: neither a worker nor the detector nor PyTorch is touched."""
    first = run_prepare(corpus)
    code = (
        "import sys; from pathlib import Path; from myxtts.config import DataSettings\n"
        "from myxtts.data import pool, prepare\n"
        "pool.ProcessPool.run = prepare.audio.decode = prepare.normalize = prepare.detect_languages = None\n"
        "data = DataSettings(train_data=Path(sys.argv[1]), language='en', vocab_size=256)\n"
        "print(len(prepare.prepare(data).train), 'torch' in sys.modules, 'lingua' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(corpus)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(len(first.train)), "False", "False"], done.stderr


def test_the_command_needs_no_pytorch(corpus: Path) -> None:
    code = "import sys; from myxtts.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "prepare", "--train-data", str(corpus), "--language", "en"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_the_embedded_corpus(user_cache: Path) -> None:
    prepared = prepare(DataSettings())
    both = (prepared.train, prepared.val)
    assert prepared.root.is_relative_to(user_cache)
    assert prepared.set_aside == []
    assert len(prepared.train) > len(prepared.val) > 0
    assert sum(part.num_samples.sum() for part in both) / SAMPLE_RATE > 120  # a few minutes
    assert len({number for part in both for number in part.speakers.tolist()}) > 1
    assert "fa" in languages_of(prepared).values()
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


# What one clip does to the others.


def test_detection_of_a_grown_corpus_is_that_of_a_fresh_one(
    make_corpus, run_prepare: Prepare, tmp_path: Path
) -> None:
    folder = make_corpus(SENTENCES)
    run_prepare(folder, language=None)
    make_corpus(["1984.", "Hotel Roma.", "Ja."], first=len(SENTENCES))  # they tell nothing by themselves
    grown = languages_of(run_prepare(folder, language=None))
    fresh = languages_of(run_prepare(folder, language=None, cache_dir=tmp_path / "elsewhere"))
    assert grown == fresh
    assert len(grown) == len(SENTENCES) + 3 and grown["clip020"] == "en"


def test_another_detector_is_asked_again(
    corpus: Path, run_prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(languages_of(run_prepare(corpus, language=None)).values()) == {"en"}
    monkeypatch.setattr("myxtts.data.prepare.language_fingerprint", lambda: "another")
    monkeypatch.setattr("myxtts.data.prepare.detect_languages", lambda texts, _: ["de"] * len(texts))
    assert set(languages_of(run_prepare(corpus, language=None)).values()) == {"de"}


def test_clips_held_out_are_not_trained_on_beside_other_validation_data(
    forty: Path, run_prepare: Prepare, tmp_path: Path
) -> None:
    other = write_corpus(tmp_path / "other")
    lines = (forty / "metadata.csv").read_text().splitlines()
    (forty / "metadata.csv").write_text("\n".join(lines[5:]))
    (forty / "metadata_eval.csv").write_text("\n".join(lines[:5]))
    prepared = run_prepare(forty, val_data=other)
    assert len(prepared.train) == 35 and len(prepared.val) == 6


def test_a_language_that_is_not_available_costs_its_clips_only(corpus: Path, run_prepare: Prepare) -> None:
    lines = (corpus / "metadata.csv").read_text().splitlines()
    rows = ["audio_file|text|speaker_name|language"] + [f"{line}|x|en" for line in lines]
    rows[1] = "clip000|안녕하세요|x|ko"
    (corpus / "metadata.csv").write_text("\n".join(rows), encoding="utf-8")
    pytest.importorskip("espeakng_loader")
    prepared = run_prepare(corpus, use_phonemes=True)
    assert [(item.id, item.reason) for item in prepared.set_aside] == [("clip000", "language not available")]


def test_clips_set_aside_are_not_looked_at_again(make_corpus, run_prepare: Prepare, messages) -> None:
    folder = make_corpus(SENTENCES[:6])
    run_prepare(folder, max_mel_frames=100)
    make_corpus(SENTENCES[6:7], first=6, seconds=0.6)
    messages.take()
    prepared = run_prepare(folder, max_mel_frames=100)
    assert messages.work()["AUDIO"] == 1
    assert {item.reason for item in prepared.set_aside} == {"too long"}
    assert all("max_mel_frames" in item.detail for item in prepared.set_aside)


def test_workers_asked_for_are_started_and_no_more_than_cores(
    corpus: Path, run_prepare: Prepare, messages, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("myxtts.data.prepare.usable_cores", lambda: 3)
    for asked, used in ((1, 1), (16, 3)):
        run_prepare(corpus, num_workers=asked, cache_dir=tmp_path / str(asked))
        assert f"Using {used} parallel workers" in messages.take()
