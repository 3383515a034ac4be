"""Training that starts from the base model: when it does, with which settings, and how it continues."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import soundfile
from conftest import SENTENCES, load_command, write_corpus
from training_fixtures import SMALL, Start, newest, stop_at

from myxtts import config, reports, run
from myxtts.config import DEMO_FINE_TUNING, FINE_TUNING, FLOW_TUNING, SAMPLE_RATE, Settings
from myxtts.model.xtts import SIZES
from myxtts.run import fine_tuning_values, steps_after_a_trial
from myxtts.run_dir import RunDir
from myxtts.settings import apply_presets, with_settings
from myxtts.synthesis.synthesizer import provenance

pytest_plugins = ["training_fixtures"]
pytestmark = pytest.mark.usefixtures("small")
Patch = pytest.MonkeyPatch
BRIEF = "--stages gpt --vocab-size 256 --num-workers 1 --model-start-delay 0 --val-fraction 0 --batch-size 2"


@pytest.fixture
def base(request: pytest.FixtureRequest, start: Start, tmp_path: Path, monkeypatch: Patch) -> Path:
    """A base model that knows English, in the compact form."""
    request.getfixturevalue("small")
    folder = tmp_path / "myxtts-base"
    monkeypatch.setitem(SIZES, "base", replace(SMALL, dvae_hidden=32))
    monkeypatch.setattr(config, "BASE_FOLDER", folder)
    flags = "--model-size base --stages dvae,gpt --max-steps 2 --code-noise 0.2 --max-text-length 60"
    made = start(flags, "made", corpus=write_corpus(tmp_path / "words", SENTENCES, seconds=0.7))
    start.command("export", made, "--out", folder, "--to", "compact")
    return folder


def train(start: Start, name: str, flags: str = "", code: int = 0) -> str:
    given = ["--train-data", start.clips(), "--checkpoint-dir", name, *shlex.split(f"{BRIEF} {flags}")]
    return start.command("train", *given, code=code)


def test_a_run_starts_from_the_base_model_with_settings_for_so_little_speech_and_goes_on_with_them(
    base: Path, start: Start, monkeypatch: Patch
) -> None:
    row = {"model.lora_rank": 2, "training.max_steps": 4, "training.warmup_steps": 1}
    monkeypatch.setattr(run, "FINE_TUNING", {5.0: row})
    stop_at(monkeypatch, 2)
    shown = train(start, "tuned", "--language en")
    assert f"base model: training.init_from = {base} (default auto)" in shown
    assert "base model: model.size = base (default tiny)" in shown
    assert "Fine-tuning on 0.1 minutes of speech: --lora-rank 2, --max-steps 4, --warmup-steps 1" in shown
    assert "Like the weights it starts from, the gpt stage has training.code_noise 0.2" in shown
    assert newest(Path("tuned")).step == 2
    assert "continues at step 2 of 4" in train(start, "tuned", "--language en")
    loaded = newest(Path("tuned"))
    assert loaded.step == 4 and any("lora" in name for name in loaded.weights)
    assert provenance(RunDir(Path("tuned"))).code_noise == 0.2, "it speaks as the base model does"
    assert "a larger --max-steps: gpt continues" in start.out
    assert "Continues the run" in start.command(
        "check",
        "--all",
        "--train-data",
        start.clips(),
        "--checkpoint-dir",
        "tuned",
        *BRIEF.split(),
        "--language",
        "en",
    )
    train(start, "tuned", "--language en --max-steps 5")
    assert newest(Path("tuned")).step == 5
    with monkeypatch.context() as patched:  # an installation that has moved, or has lost its base model
        patched.setattr(config, "BASE_FOLDER", Path("elsewhere"))
        assert "complete at step 5" in train(start, "tuned", "--language en --max-steps 5")


@pytest.mark.usefixtures("base")
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--init-from none", ""),
        ("--model-size tiny", "does not fit --model-size"),
        ("--language fa", "does not fit --language fa"),
        ("--tokenizer myxtts-base --model-size small", "does not fit --model-size and --tokenizer"),
    ],
)
def test_other_wishes_start_from_scratch(start: Start, flags: str, why: str, caplog: Any) -> None:
    caplog.set_level("INFO")
    flags += "" if "--language" in flags else " --language en"
    train(start, "own", f"{flags} --stages dvae --max-steps 1")
    assert RunDir(Path("own")).started_with()["training.init_from"] is None
    assert why in caplog.text and ("base model" in caplog.text) == bool(why)


def test_sentences_that_the_base_model_cannot_read_are_answered_with_the_way_out(
    base: Path, start: Start, tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path / "russian", ["Доброе утро.", "Как дела сегодня?"], seconds=1.0)
    flags = ["--train-data", corpus, "--checkpoint-dir", "own", *BRIEF.split(), "--max-steps", "1"]
    start.command("train", *flags, code=1)
    assert "--init-from none starts from scratch" in start.err
    larger = ["--base", base / "vocab.json", "--language", "ru", "--train-data", corpus, "--out", "larger.json"]
    start.command("vocabulary", "extend", *larger)
    added = ["--init-from", base, "--tokenizer", "larger.json", "--model-size", "base"]
    start.command("train", *flags, "--language", "ru", *added)
    assert newest(Path("own")).step == 1 and RunDir(Path("own")).started_with()["has_grown_vocabulary"]


@pytest.mark.usefixtures("base")
def test_the_demonstration_fine_tunes_the_base_model(start: Start, monkeypatch: Patch) -> None:
    monkeypatch.setattr(config, "DEMO_FINE_TUNING", {**DEMO_FINE_TUNING, "training.max_steps": 2})
    shown = start.command("train", "--num-workers", "1")
    assert "demonstration: batch_size 2, learning_rate 0.0001, max_steps 2, warmup_steps 8" in shown
    assert "fine-tuned on four minutes of speech" in shown and "babble" not in shown
    assert abs(soundfile.read("demo/sample.wav")[0]).max() > 0
    assert not RunDir(Path("demo")).has_checkpoint("dvae")
    assert "complete at step 2" in start.command("train", "--num-workers", "1")


@pytest.mark.usefixtures("base")
def test_who_fine_tunes_on_a_cpu_is_not_advised_to_start_from_weights(start: Start, monkeypatch: Patch) -> None:
    monkeypatch.setattr(reports, "SLOW_S", 0.0)
    shown = train(start, "tuned", "--language en --max-steps 4 --log-step 1")
    assert "Fine-tuning on a CPU is slow." in shown and "From scratch" not in shown


def speech(minutes: float) -> Any:
    samples = np.full(3, minutes * 60 * SAMPLE_RATE / 3)
    return cast(Any, SimpleNamespace(train=SimpleNamespace(num_samples=samples)))


def test_fine_tuning_follows_the_minutes_of_speech_unless_the_user_decides() -> None:
    started = with_settings(Settings(), {"training.init_from": Path("XTTS-v2")})
    few, more = FINE_TUNING.values()
    for minutes, expected in ((1, few), (4.9, few), (5, more), (59, more), (60, {}), (600, {})):
        assert fine_tuning_values(started, speech(minutes), {}) == expected
    assert fine_tuning_values(Settings(), speech(1), {}) == {}, "from scratch"
    staged = with_settings(started, {"training.stages": ("gpt", "decoder")})
    assert fine_tuning_values(staged, speech(1), {}) == {}
    for key in ("training.epochs", "training.max_steps", "training.learning_rate", "model.lora_rank"):
        assert fine_tuning_values(started, speech(1), {key: "flag"}) == {}
    assert fine_tuning_values(started, speech(1), {"data.batch_size": "flag", "training.epochs": "default"}) == few
    flow = with_settings(started, {"model.size": "base"})
    assert [fine_tuning_values(flow, speech(minutes), {}) for minutes in (1, 10, 600)] == [*FLOW_TUNING.values()]
    kept = fine_tuning_values(flow, speech(10), {"training.max_steps": "flag"})
    assert kept == {"training.learning_rate": 5e-4, "training.warmup_steps": 40}, (
        "a trial of a few steps learns too"
    )
    assert "training.max_steps" not in fine_tuning_values(flow, speech(10), {"training.epochs": "flag"})
    asked = with_settings(flow, {"training.max_steps": 30})
    assert steps_after_a_trial(asked, speech(1), {"training.max_steps": "flag"}, kept) == {
        "training.max_steps": 400
    }
    assert steps_after_a_trial(flow, speech(1), {}, FLOW_TUNING[5.0]) == {}, "not a trial"
    with_adapters = with_settings(started, {"model.lora_rank": 8})  # by a preset: they have a rate of their own
    assert "training.learning_rate" not in fine_tuning_values(with_adapters, speech(20), {})


def test_auto_and_none_are_different_starts() -> None:
    assert not load_command("--init-from auto").is_set("training.init_from")
    assert load_command("--init-from none").is_set("training.init_from")
    assert load_command("--init-from none").settings.training.init_from is None
    file = "training:\n  init_from: DIR\n"
    assert load_command("", file).settings.training.init_from == Path("DIR")
    given = load_command("--init-from auto", file)
    assert given.settings.training.init_from is None and not given.is_set("training.init_from")
    start = ("base model", {"training.init_from": Path("BASE"), "model.size": "base"})
    loaded, lines = apply_presets(load_command("--train-data DIR --preset 8gb"), start)
    assert loaded.settings.model.lora_rank == 16, "presets know that it is fine-tuning"
    assert lines[0] == "base model: training.init_from = BASE (default auto)"
