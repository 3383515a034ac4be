"""Evaluations: what is held out and whose voice says it, what the judges are asked, what users are told of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soundfile as sf
import torch
from conftest import SENTENCES, make_voice
from synthesis_fixtures import generate
from training_fixtures import SMALL, small, train

from myxtts.checkpoints import Notes
from myxtts.cli import main
from myxtts.config import DataSettings
from myxtts.data.clips import PreparedCorpus
from myxtts.data.corpus import read_corpus
from myxtts.data.prepare import prepare
from myxtts.errors import DatasetError
from myxtts.evaluation import JUDGE_SCRIPT, find_judges, held_out_sentences, summarise
from myxtts.model.xtts import XTTS
from myxtts.observe.report import write_report
from myxtts.run_dir import RunDir
from myxtts.settings import load, to_yaml
from myxtts.synthesis.generation import Prompt, Sampling
from myxtts.synthesis.voices import Voice
from myxtts.tools import judge
from myxtts.tools.evaluate import code_latents, interpret
from myxtts.tools.judge import mistakes, num_edits, plain

__all__ = ["small"]

SPEAKERS = ("anna", "ben")
FAKE_JUDGE = """#!{python} -S
import json, pathlib, sys
items = pathlib.Path(sys.argv[-1])
print(json.dumps({{"judges": ["Fake"]}}))
for item in json.loads(items.read_text(encoding="utf-8")):
    assert (items.parent / item["file"]).is_file() and (items.parent / item["reference"]).is_file()
    same = pathlib.Path(item["reference"]).name.startswith(item["speaker"])
    item["similarity"] = (0.7 if item["set"] == "recording" else 0.5) if same else 0.1
    if "text" in item:
        words, letters = len(item["text"].split()), len(item["text"])
        wrong = item["set"] == "synthesised"
        item |= {{"words": words, "letters": letters}}
        item |= {{"word_edits": words * wrong, "letter_edits": letters * wrong}}
        item |= {{"wer": float(wrong), "cer": float(wrong), "mos": 1.5 if wrong else 4.0, "heard": "murmur"}}
    print(json.dumps(item), flush=True)
"""
BROKEN_JUDGE = "#!{python} -S\nimport sys\nprint('{{}}')\nsys.exit('the weights are gone')\n"


def write_speakers(folder: Path, speakers: Mapping[str, Sequence[str]]) -> Path:
    """A corpus whose clips are named after who says them."""
    (folder / "wavs").mkdir(parents=True)
    lines = ["audio_file|text|speaker_name|language"]
    for seed, (speaker, texts) in enumerate(speakers.items()):
        for number, text in enumerate(texts):
            name = f"{speaker}_{number}"
            sf.write(folder / "wavs" / f"{name}.wav", make_voice(1.35 + 0.01 * number, seed=seed), 22050)
            lines.append(f"{name}|{text}|{speaker}|en")
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """A run of all three stages, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("evaluated")

    def make() -> Path:
        if not (folder / "run").exists():
            texts = [text[:20].strip() for text in SENTENCES[:7]]
            corpus = write_speakers(folder / "corpus", dict.fromkeys(SPEAKERS, texts))
            assert train(folder / "run", corpus, "--max-steps 1 --val-fraction 0.5 --stages dvae,gpt,decoder") == 0
        return folder / "run"

    return make


@pytest.fixture
def run(trained: Callable[[], Path], small: None, tmp_path: Path) -> Path:  # noqa: ARG001
    """A copy of it for one test."""
    folder = tmp_path / "run"
    shutil.copytree(trained(), folder)
    return folder


def install(folder: Path, script: str) -> Path:
    """A folder that looks like one with judges in it."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(script.format(python=sys.executable), encoding="utf-8")
    python.chmod(0o755)
    return folder


def evaluate(run: Path, *flags: object) -> int:
    return main(["evaluate", str(run), *map(str, flags)])


def read(run: Path, name: str) -> Any:
    return json.loads((run / "evaluation" / f"{name}.json").read_text(encoding="utf-8"))


def assert_reconstructed(run: Path, vocoder: str) -> None:
    """By that vocoder, as long as the recordings, and no silence."""
    assert read(run, "about")["vocoder"] == vocoder
    files = list((run / "evaluation" / "reconstructed").iterdir())
    for file in files:
        real, real_rate = sf.read(run / "evaluation" / "recording" / file.name)
        made, rate = sf.read(file)
        assert len(made) / rate == pytest.approx(len(real) / real_rate, abs=0.06)
        assert np.isfinite(made).all() and abs(made).max() > 0
    assert files


# What is synthesised


def test_held_out_sentences_are_said_in_the_voice_of_a_training_clip_and_judged(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judges = install(tmp_path / "judges", FAKE_JUDGE)
    assert evaluate(run, "--judge", judges, "--sentences", 4, "--vocoder", "hifigan") == 0
    items = read(run, "items")
    sets = [item["set"] for item in items]
    assert {name: sets.count(name) for name in sets} == dict.fromkeys(
        ("recording", "reconstructed", "synthesised", "other speaker"), 4
    )
    data = replace(load(run / "settings.yaml", {}).settings.data, tokenizer=run / "vocab.json")
    assert data.train_data is not None
    texts = {clip.id: clip.text for clip in read_corpus(data.train_data).clips}
    corpus, held = prepare(data), {item["clip"] for item in items}
    assert held <= set(corpus.val.names) and not held & set(corpus.train.names)
    said = {texts[name] for name in held}
    for item in items:
        other = SPEAKERS[item["speaker"] == SPEAKERS[0]]
        whose = other if item["set"] == "other speaker" else item["speaker"]
        reference = Path(item["reference"])
        assert reference.parts[0] == "reference" and reference.name.startswith(whose)
        assert item["clip"].startswith(item["speaker"]) and item["language"] == "en"
        source = reference.name.split("-")[0]
        assert source in corpus.train.names and texts[source] not in said
        assert item.get("text") == (None if item["set"] == "other speaker" else texts[item["clip"]])
    assert {item["speaker"] for item in items} == set(SPEAKERS)
    scores = read(run, "scores")
    assert scores["summary"]["synthesised"] == {
        "clips": 4, "wer": 1.0, "cer": 1.0, "similarity": 0.5, "same_speaker_share": 1.0, "mos": 1.5
    }  # fmt: skip
    assert scores["summary"]["other speaker"]["similarity"] == pytest.approx(0.1)
    assert scores["about"]["steps"] == {"dvae": 1, "gpt": 1, "decoder": 1}
    assert all(clip["heard"] == "murmur" for clip in scores["clips"] if "text" in clip)
    shown = capsys.readouterr().out
    assert "WER 1.00 against 0.00 of the recordings: not intelligible yet" in shown
    assert 'id="evaluation"' in (run / "report.html").read_text()
    assert_reconstructed(run, "hifigan")


def test_given_its_own_codes_the_gpt_has_the_latents_it_chose_them_with() -> None:
    torch.manual_seed(0)
    model = XTTS(SMALL.with_vocabulary(30, 1, 0)).eval()
    voices = [Voice(str(number), torch.randn(1, 32, 64), torch.zeros(16)) for number in range(2)]
    ids = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    for voice, one in zip(voices, ids, strict=True):
        prompt = Prompt(one.tolist(), voice.latents, torch.zeros(9))
        (spoken,) = generate(model.gpt, [prompt], Sampling(greedy=True))
        latents = code_latents(model, voice, one, spoken.codes)
        torch.testing.assert_close(latents, spoken.latents, rtol=1e-4, atol=1e-5)


# Judged elsewhere, not at all, or badly


def test_what_was_synthesised_here_can_be_judged_where_only_that_folder_is(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere, broken = tmp_path / "elsewhere", install(tmp_path / "broken", BROKEN_JUDGE)
    assert evaluate(run, "--only", "judge", "--judge", broken) == 2
    assert "Nothing to judge" in capsys.readouterr().err
    sounds = set()
    for seed in (1, 2):
        flags = ("--sentences", 2, "--vocoder", "griffin-lim", "--seed", seed)
        assert evaluate(run, "--only", "synthesise", *flags) == 0
        sounds.add(next((run / "evaluation" / "synthesised").iterdir()).read_bytes())
    assert len(sounds) == 2 and read(run, "about")["seed"] == 2
    assert_reconstructed(run, "griffin-lim")
    shutil.copytree(run / "evaluation", elsewhere / "evaluation")
    shutil.rmtree(run)
    assert evaluate(elsewhere, "--only", "judge", "--judge", broken) == 1
    assert "the weights are gone" in capsys.readouterr().err
    assert not (elsewhere / "evaluation" / "scores.json").exists()
    assert evaluate(elsewhere, "--only", "judge", "--judge", install(tmp_path / "judges", FAKE_JUDGE)) == 0
    assert "murmur" in (elsewhere / "report.html").read_text()


def test_without_judges_users_learn_how_to_install_them_and_lose_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "evaluation" / "items.json"
    kept.parent.mkdir()
    kept.write_text("[]")
    assert evaluate(tmp_path, "--judge", "nowhere") == 2
    told = capsys.readouterr().err
    assert "make judge" in told and "--install nowhere" in told and "--only synthesise" in told
    assert kept.read_text() == "[]"


def test_judges_are_found_here_or_beside_the_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, here = tmp_path / "project", tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "prefix", str(project / ".venv"))
    beside = install(project / ".judge", FAKE_JUDGE)
    assert find_judges().home == beside
    nearest = install(here / ".judge", FAKE_JUDGE)
    assert find_judges().python == nearest / "bin" / "python"


def test_what_cannot_be_evaluated_is_an_error_that_says_why(
    run: Path,
    trained: Callable[[], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*flags: object) -> str:
        assert evaluate(*flags, "--only", "synthesise") == 2  # type: ignore[arg-type]
        return capsys.readouterr().err

    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'nowhere'}: no such folder; give the --checkpoint-dir" in refused(tmp_path / "nowhere")
    assert f"{tmp_path / 'empty'} contains no run; give the --checkpoint-dir" in refused(tmp_path / "empty")
    assert "No held-out sentence is in 'de'; there are some in en" in refused(run, "--language", "de")
    assert f"{tmp_path / 'file'} cannot be written" in refused(run, "--out", tmp_path / "file")
    shutil.rmtree(run / "gpt")
    text = refused(run)
    assert "has not trained gpt yet" in text and "--stages gpt" in text
    shutil.copytree(trained() / "gpt", run / "gpt")
    settings = load(run / "settings.yaml", {"data.val_fraction": 0.0}).settings
    (run / "settings.yaml").write_text(to_yaml(settings))
    text = refused(run)
    assert "The run holds no clips out" in text and "--val-data" in text
    told = r"trained on (\d+) clips, and its corpus now has (\d+) to train on: sentences held out now may be among"
    ((before, now),) = re.findall(told, caplog.text)
    assert int(before) < int(now)
    real = RunDir.newest_notes

    def one_more_stage(run_dir: RunDir) -> dict[str, Notes]:
        same = deepcopy(real(run_dir)["gpt"])
        same.state["notes"]["identity"]["training clips"] = int(now)
        return real(run_dir) | {"decoder": same}

    monkeypatch.setattr(RunDir, "newest_notes", one_more_stage)
    refused(run)
    assert re.findall(told, caplog.text) == 2 * [(before, now)]
    assert not (run / "evaluation").exists()


# What is held out

Prepare = Callable[..., PreparedCorpus]


def held_out(folder: Path, prepared: Prepare, speaker: str, texts: Sequence[str]) -> list[Any]:
    """The sentences of a speaker that are held out when Anna says the first three for training."""
    known = write_speakers(folder / "train", {"anna": SENTENCES[:3]})
    data = DataSettings(train_data=known, val_data=write_speakers(folder / "val", {speaker: texts}))
    return held_out_sentences(prepared(known, val_data=data.val_data), data, 10)


def test_new_speakers_get_a_held_out_reference_and_trained_sentences_are_not_held_out(
    tmp_path: Path, run_prepare: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = held_out(tmp_path / "new", run_prepare, "zoe", SENTENCES[3:5])
    assert {(one.clip.name, one.reference.name) for one in chosen} == {("zoe_0", "zoe_1"), ("zoe_1", "zoe_0")}
    assert all(one.other.name.startswith("anna") for one in chosen)
    assert [one.text for one in held_out(tmp_path, run_prepare, "anna", SENTENCES[2:4])] == [SENTENCES[3]]
    told = "1 of the 10 sentences asked for: the run holds out 2 clips, 1 said by a training clip too"
    assert told in caplog.text


@pytest.mark.parametrize(
    ("speaker", "first", "problem"), [("zoe", 3, "another clip of the same speaker"), ("anna", 0, "memorised")]
)
def test_one_held_out_clip_may_be_of_no_use(
    tmp_path: Path, run_prepare: Prepare, speaker: str, first: int, problem: str
) -> None:
    with pytest.raises(DatasetError, match=problem):
        held_out(tmp_path, run_prepare, speaker, SENTENCES[first : first + 1])


# What scores mean


def a_score(name: str, **values: Any) -> dict[str, Any]:
    counts = {"words": 4, "word_edits": 0, "letters": 10, "letter_edits": 0, "wer": 0.0, "cer": 0.0, "mos": 4.0}
    return {"set": name, "clip": "a", "text": "t", "heard": "h", **counts, "similarity": 0.6, **values}


def test_mistakes_are_counted_over_all_words_not_averaged_over_clips() -> None:
    clips = [a_score("synthesised", words=9), a_score("synthesised", words=1, word_edits=1, similarity=0.2)]
    found = summarise([*clips, {"set": "other speaker", "similarity": 0.1}])
    assert found["synthesised"]["wer"] == pytest.approx(0.1)
    assert found["synthesised"]["same_speaker_share"] == 0.5
    assert found["other speaker"] == {
        "clips": 1, "wer": None, "cer": None, "similarity": 0.1, "same_speaker_share": 0.0, "mos": None
    }  # fmt: skip


@pytest.mark.parametrize(
    ("real", "codes", "ours", "said"),
    [
        (0.05, 0.06, 0.1, "as intelligible as they are"),
        (0.05, 0.06, 0.25, "intelligible with mistakes (codes and vocoder keep the words, the GPT errs"),
        (0.05, 0.7, 0.9, "not intelligible yet (codes and vocoder lose the words: WER 0.70 reconstructed)"),
        (0.8, 0.8, 0.9, "the judge does not understand the recordings either"),
    ],
)
def test_the_interpretation_says_what_is_lost_and_where(real: float, codes: float, ours: float, said: str) -> None:
    names = {"recording": real, "reconstructed": codes, "synthesised": ours}
    summary = {name: {"wer": wer, "cer": 0.0, "similarity": None, "mos": None} for name, wer in names.items()}
    assert f"WER {ours:.2f} against {real:.2f} of the recordings: {said}" in interpret(summary, {"en"})
    assert "CER 0.00 against 0.00" in interpret(summary, {"ja"}), "Japanese has no words to count"


# The page


def test_the_page_shows_the_evaluation_and_escapes_what_was_said_and_heard(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script> & \"quotes\" 'here'"
    odd = {"heard": evil, "trouble": evil, "file": evil}
    worst = [a_score("synthesised", wer=wer, text=f"{evil} {wer}", **odd) for wer in (0.1, 0.9, 0.5, 0.7, 0.0)]
    keys = ("clips", "wer", "cer", "similarity", "same_speaker_share", "mos")
    summary: dict[str, Any] = {
        "recording": dict(zip(keys, (5, 0.05, 0.02, 0.7, 1.0, 4.2), strict=True)),
        "synthesised": dict(zip(keys, (5, 0.62, 0.4, 0.4, 0.6, 2.5), strict=True)),
        evil: {"clips": 1, "wer": None},
    }
    scores = {"reading": f"not intelligible yet {evil}", "judges": [evil], "same_speaker_from": 0.345}
    scores |= {"summary": summary, "clips": worst, "about": {"seed": evil, "steps": {evil: evil}}}
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "scores.json").write_text(json.dumps(scores))
    page = write_report(tmp_path).read_text()
    section = page.split('id="evaluation"')[1].split("</section>")[0]
    assert "<script" not in section and "&lt;script&gt;" in section
    assert "<td>0.62</td>" in section and "<td>60.0 %</td>" in section and "not intelligible yet" in section
    assert "width:62.0%" in section and "left:5.0%" in section, "the bar, and the mark of the recordings"
    assert section.count("left:60.0%") == len(worst), "a mark for the similarity of each clip"
    assert "width:37.5%" in section and "left:80.0%" in section, "MOS 2.5 of 1 to 5, and where the recordings are"
    assert "WER 0.90" in section and "<td>2.50</td>" in section, "scores of one length, that line up"
    assert [f"here&#39; {wer}</b>" in section for wer in (0.9, 0.7, 0.5, 0.1)] == [True, True, True, False]


# The judge's own script


def test_texts_are_compared_by_what_is_said() -> None:
    assert plain("  “Don’t”, he SAID — twice!") == "don't he said twice"
    assert plain("كتاب‌ها يِک") == "کتاب ها یک"
    assert plain("हिन्दी।") == "हिन्दी"
    assert num_edits("kitten", "sitting") == 3 and num_edits([], ["a", "b"]) == 2 and num_edits("ab", "") == 2
    found = mistakes("The cat sat.", "the cats sat down")
    assert (found["words"], found["word_edits"], found["wer"]) == (3, 2, pytest.approx(2 / 3))
    assert (found["letters"], found["letter_edits"], found["heard"]) == (9, 5, "the cats sat down")


def test_the_judge_imports_nothing_of_the_project_and_says_what_is_missing(tmp_path: Path) -> None:
    assert not re.search(r"(from|import) myxtts", JUDGE_SCRIPT.read_text())
    if find_spec("faster_whisper") or find_spec("distillmos") or find_spec("speechbrain"):
        pytest.skip("judges are installed here")
    (tmp_path / "items.json").write_text("[]")
    command = [sys.executable, "-I", str(JUDGE_SCRIPT), "--home", str(tmp_path), str(tmp_path / "items.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "No judge is installed" in done.stderr and not done.stdout


def test_the_judges_are_pinned_and_their_weights_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(re.fullmatch(r"[\w.-]+==[\d.]+", package) for package in (*judge.RESOLVED, *judge.ALONE))
    weights = tmp_path / "whisper-base" / "model.bin"
    weights.parent.mkdir()
    weights.write_bytes(b"other weights")
    monkeypatch.setitem(sys.modules, "faster_whisper", ModuleType("faster_whisper"))
    monkeypatch.setattr(sys.modules["faster_whisper"], "WhisperModel", lambda *_, **__: "loaded", raising=False)
    with pytest.raises(SystemExit, match=r"model\.bin is damaged or another version.*expected d01c30.*make judge"):
        judge.Whisper(tmp_path)
    monkeypatch.setitem(judge.SHA256, "model.bin", sha256(b"other weights").hexdigest())
    judge.Whisper(tmp_path)
