"""Whole runs: where weights come from, what is trained, shown and left, what another start may change."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import soundfile
import torch
from conftest import make_voice
from torch import Tensor
from training_fixtures import (
    SMALL,
    Clips,
    assert_equal_tensors,
    assert_same_run,
    clips,
    losses,
    newest,
    small,
    steps,
    stop_at,
    train,
)

import myxtts.model.gpt
from myxtts.checkpoints import UnreadableWeights, read_tensors, write_pth
from myxtts.cli import main
from myxtts.config import SAMPLE_RATE, SMALL_CORPUS, STAGES, DataSettings, Settings
from myxtts.data.prepare import prepare
from myxtts.devices import Plan
from myxtts.files import lock
from myxtts.model.mel import DVAE_MEL, LogMel
from myxtts.model.xtts import SIZES, XTTS
from myxtts.observe.findings import Finding
from myxtts.observe.metrics import StepReport
from myxtts.run import auto_values, prepare_corpus
from myxtts.run_dir import RunDir
from myxtts.settings import load
from myxtts.synthesis.synthesizer import OWN_SAMPLING, load_synthesizer, override_sampling
from myxtts.text.tokenizer import Tokenizer, extend
from myxtts.tools.check import check
from myxtts.training.trainer import StepMode, choose_mode
from myxtts.weights import load_folder, save_folder

__all__ = ["clips", "small"]

pytestmark = pytest.mark.usefixtures("small")

UNCHANGED = "--lr 1e-12 --max-steps 1"
"""A training that leaves every weight where it was, to the last digits."""


@pytest.fixture
def xtts(small: None, clips: Clips, tmp_path: Path) -> Path:  # noqa: ARG001 - patches sizes first
    """A folder as XTTS-v2 is published, of a small network with the vocabulary of the corpus."""
    data = DataSettings(train_data=clips(4), language="en", vocab_size=256, num_workers=1, val_fraction=0)
    vocabulary = prepare(data).tokenizer
    torch.manual_seed(99)
    dims = SMALL.with_vocabulary(vocabulary.num_tokens, vocabulary.start_id, vocabulary.stop_id)
    model = XTTS(dims)
    model.mel_stats.copy_(torch.linspace(1, 2, 80))
    save_folder(tmp_path / "xtts", model, vocabulary)
    return tmp_path / "xtts"


def state_of(folder: Path) -> dict[str, Tensor]:
    model = RunDir(folder).load_model() if RunDir(folder).exists else load_folder(folder).model
    return {name: value.detach() for name, value in model.state_dict().items()}


def part(state: dict[str, Tensor], *, gpt: bool) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.startswith("gpt.") is gpt}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9, msg=name)


# Where weights come from


def test_from_published_weights_only_the_gpt_is_trained_unless_told_otherwise(
    xtts: Path, clips: Clips, tmp_path: Path
) -> None:
    run, before = tmp_path / "run", state_of(xtts)
    assert train(run, clips(4), f"--init-from {xtts}") == 0
    assert [stage for stage in STAGES if (run / stage).exists()] == ["gpt"]
    after = state_of(run)
    assert_equal_tensors(part(after, gpt=False), part(before, gpt=False))
    changed = [name for name, value in part(before, gpt=True).items() if not torch.equal(after[name], value)]
    assert len(changed) > 0.9 * len(part(before, gpt=True))
    assert train(tmp_path / "still", clips(4), f"--init-from {xtts} {UNCHANGED}") == 0
    assert_close(state_of(tmp_path / "still"), before)


def test_every_stage_starts_from_the_weights_that_were_named(xtts: Path, clips: Clips, tmp_path: Path) -> None:
    assert train(tmp_path / "run", clips(4), f"--init-from {xtts} --stages dvae,gpt,decoder {UNCHANGED}") == 0
    found, expected = state_of(tmp_path / "run"), state_of(xtts)
    assert_close(found, {name: value for name, value in expected.items() if "codebook" not in name})


def test_a_run_may_start_from_another_run(clips: Clips, tmp_path: Path) -> None:
    """From the averaged weights, where it kept them."""
    assert train(tmp_path / "first", clips(4), "--stages dvae,gpt --ema-decay 0.5 --max-steps 3") == 0
    assert train(tmp_path / "second", clips(4), f"--init-from {tmp_path / 'first'} {UNCHANGED}") == 0
    assert not (tmp_path / "second" / "dvae").exists()
    assert_close(state_of(tmp_path / "second"), state_of(tmp_path / "first"))
    last = newest(tmp_path / "first").weights
    started = part(state_of(tmp_path / "second"), gpt=True)
    assert max(float((value - last[name]).abs().max()) for name, value in started.items()) > 1e-4


def test_weights_of_another_size_or_vocabulary_are_refused(
    xtts: Path, clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(run, clips(7), "--stages dvae --max-steps 1") == 0
    size = "are of size tiny, and --model-size is small; give --model-size tiny"
    for flags, message in (
        (f"--init-from {xtts} --model-size small", size),
        (f"--init-from {run} --model-size small", size),
        (f"--init-from {run} --tokenizer {xtts / 'vocab.json'}", "leave out --tokenizer to use that of the run"),
    ):
        assert train(tmp_path / "other", clips(4), flags) == 2
        assert message in capsys.readouterr().err


def test_stages_start_from_the_seed_however_they_are_reached(clips: Clips, tmp_path: Path) -> None:
    """All in one process, or one after the other: initial weights, dropout and judges are the same."""
    flags = "--dropout 0.2 --max-steps 2 --lr 1e-6"
    assert train(tmp_path / "whole", clips(4), f"--stages dvae,gpt,decoder {flags}") == 0
    for stages in ("dvae", "dvae,gpt", "dvae,gpt,decoder"):
        torch.manual_seed(len(stages))
        assert train(tmp_path / "parts", clips(4), f"--stages {stages} {flags}") == 0
    for stage in STAGES:
        expected = newest(tmp_path / "whole", stage).weights
        for name, value in newest(tmp_path / "parts", stage).weights.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5, msg=name)
        assert losses(tmp_path / "parts", stage) == pytest.approx(losses(tmp_path / "whole", stage), rel=1e-6)


def follows_codebook(state: dict[str, Tensor]) -> bool:
    """Whether codes are as far apart for the GPT as they are for the DVAE."""
    heard, meant = state["gpt.mel_embedding.weight"], state["dvae.codebook.embed"].t()
    apart = [torch.pdist(vectors[: len(meant)]) for vectors in (heard, meant)]
    return float(torch.corrcoef(torch.stack(apart))[0, 1]) > 0.5


def test_a_gpt_from_scratch_begins_with_the_codebook(clips: Clips, tmp_path: Path) -> None:
    """Also when only the DVAE comes from elsewhere; never with adapters, which would not keep it."""
    assert train(tmp_path / "dvae", clips(4), "--stages dvae --max-steps 2") == 0
    begins = {"run": "--stages dvae,gpt", "after": f"--init-from {tmp_path / 'dvae'} --stages gpt"}
    for name, flags in begins.items():
        assert train(tmp_path / name, clips(4), f"{flags} {UNCHANGED}") == 0
        assert follows_codebook(state_of(tmp_path / name)), name
    assert train(tmp_path / "lora", clips(4), f"--stages dvae,gpt --lora-rank 2 {UNCHANGED}") == 0
    assert not follows_codebook(state_of(tmp_path / "lora"))
    trained = newest(tmp_path / "run").weights
    assert_close(state_of(tmp_path / "run"), trained)


def test_mels_are_divided_by_the_root_mean_square_of_the_corpus(clips: Clips, tmp_path: Path) -> None:
    assert train(tmp_path / "run", clips(4), "--stages dvae --max-steps 1") == 0
    found = prepare(DataSettings(train_data=clips(4), language="en", num_workers=1, val_fraction=0)).train
    waves = [torch.from_numpy(found.audio[row].copy()).float() / 32768 for row in found.audio_rows.tolist()]
    stats = newest(tmp_path / "run", "dvae").weights["mel_stats"]
    mels = torch.cat([LogMel(DVAE_MEL)(wave, stats)[:, : len(wave) // 256 + 1] for wave in waves], 1)
    torch.testing.assert_close(mels.square().mean(1), torch.ones(80), rtol=1e-4, atol=0)


# What is trained, and how


def test_adapters_alone_are_kept_and_merge_into_the_weights_they_adapt(
    xtts: Path, clips: Clips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"--init-from {xtts} --lora-rank 3 --dropout 0.2 --max-steps 4"
    assert train(tmp_path / "whole", clips(4), flags) == 0
    stop_at(monkeypatch, 2)
    for _ in range(2):
        assert train(tmp_path / "run", clips(4), flags) == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole", "gpt")

    kept, before, after = newest(tmp_path / "run").weights, state_of(xtts), state_of(tmp_path / "run")
    assert kept
    assert all(name.endswith((".lora_a", ".lora_b")) for name in kept)
    adapted = {name.rpartition(".")[0] for name in kept}
    assert len(adapted) == len(kept) / 2 == 4
    for layer in adapted:
        before[f"{layer}.weight"] = before[f"{layer}.weight"] + kept[f"{layer}.lora_a"] @ kept[f"{layer}.lora_b"]
        assert kept[f"{layer}.lora_b"].abs().max() > 0
    assert after.keys() == before.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, msg=name)


def test_gradient_checkpointing_changes_memory_and_no_loss(
    clips: Clips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Mock(side_effect=myxtts.model.gpt.checkpoint)
    monkeypatch.setattr(myxtts.model.gpt, "checkpoint", checkpoint)
    flags = "--stages gpt --dropout 0.2 --max-steps 3"
    assert train(tmp_path / "plain", clips(4), flags) == 0
    assert not checkpoint.called
    assert train(tmp_path / "sparing", clips(4), f"{flags} --gradient-checkpointing") == 0
    assert checkpoint.call_count == 3
    assert losses(tmp_path / "sparing") == pytest.approx(losses(tmp_path / "plain"), rel=1e-6)


def test_named_speakers_lend_each_other_reference_voices(clips: Clips, tmp_path: Path) -> None:
    corpus = tmp_path / "named"
    shutil.copytree(clips(4), corpus, ignore=shutil.ignore_patterns(".myxtts"))
    seen = {}
    for speakers in ("ann", ""):
        rows = "".join(f"clip{number:03}|{speakers}\n" for number in range(4))
        (corpus / "speakers.csv").write_text(f"id|speaker\n{rows}")
        for way in ("other", "same"):
            run = tmp_path / f"{speakers or 'nobody'}-{way}"
            assert train(run, corpus, f"--stages gpt --max-steps 2 --reference-clip {way}") == 0
            seen[speakers, way] = losses(run)
    assert seen["ann", "other"] != seen["ann", "same"]
    assert seen["", "other"] == seen["", "same"] == seen["ann", "same"]


GPU_PLAN = Plan(torch.device("cuda", 0), torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("settings", "plan", "expected"),
    [
        ({}, {}, StepMode(autocast=True, compiled=True, captured=True)),
        ({"data.mixed_precision": False}, {}, StepMode(compiled=True, captured=True)),
        ({"data.pad_to_fixed_length": False}, {}, StepMode(autocast=True)),
        ({}, {"world_size": 2}, StepMode(autocast=True, compiled=True)),
        ({}, {"model": torch.device("cpu")}, StepMode()),
        ({"model.gradient_checkpointing": True, "model.dropout": 0.1}, {}, StepMode(autocast=True, compiled=True)),
        ({"training.enable_xla_compilation": False}, {}, StepMode(autocast=True, captured=True)),
        ({"training.enable_graph_mode": False}, {}, StepMode(autocast=True)),
        ({"training.optimization_level": "experimental"}, {}, StepMode(True, True, True, tuned=True)),
        (
            {"training.optimization_level": "experimental", "training.enable_graph_mode": False},
            {},
            StepMode(autocast=True),
        ),
        ({"training.enable_eager_debug": True}, {}, StepMode(autocast=True, debug=True)),
        ({"training.enable_eager_debug": True}, {"model": torch.device("cpu")}, StepMode(debug=True)),
    ],
)
def test_how_a_step_is_run(settings: dict[str, Any], plan: dict[str, Any], expected: StepMode) -> None:
    chosen = Settings()
    for key, value in settings.items():
        section, name = key.split(".")
        chosen = replace(chosen, **{section: replace(getattr(chosen, section), **{name: value})})
    assert choose_mode(chosen, "gpt", replace(GPU_PLAN, **plan)) == expected


# What is shown and left


def test_a_run_announces_itself_and_leaves_everything_in_its_folder(
    clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    flags = f"--max-steps 2 --model-start-delay 0.5 --val-data {clips(3)}"
    assert train(run, clips(4), flags) == 0
    shown = capsys.readouterr().out
    stages = [
        rf"Stage {stage}\nBuffer size: 6 batches \(3 on the host, 3 on cpu\)\nTraining step: eager, fp32\n"
        r"Waiting up to 0\.5s for data pipeline to warm up\nModel training starting now \(\d+ .*\n"
        r"step 1/2  loss .*\nstep 2/2  loss .*\nvalidation at step 2  loss .*  the best so far\n"
        for stage in STAGES
    ]
    expected = (
        r"training clips +4 [\s\S]*"
        r"Intelligent GPU Pipeline: Single-GPU Buffered Mode.*\n[\s\S]*"
        r"Buffer size: auto, up to 50 batches\nModel placed on .*\n"
        rf"(Hint: .*\n)*{''.join(stages)}Speaking a sentence of the corpus …\n(.*\n)+"
        rf"Done\. Everything is in {re.escape(str(run))}"
    )
    assert re.search(expected, shown), shown
    reports = steps(run)
    assert [(report["stage"], report["step"]) for report in reports] == [(s, n) for s in STAGES for n in (1, 2)]
    names = {field.name for field in fields(StepReport)}
    assert all(names <= report.keys() for report in reports)
    assert all(report["clips_per_s"] > 0 and report["step_ms"] > 0 for report in reports)
    for stage in STAGES:
        (events,) = (run / "tensorboard" / stage).glob("events.out.tfevents.*")
        content = events.read_bytes()
        for tag in (b"loss/total", b"train/lr", b"speed/idle_share", b"validation/total", f"{stage}/".encode()):
            assert tag in content, (stage, tag)
    assert json.loads((run / "model.json").read_text())["dims"]["dvae_hidden"] == SIZES["tiny"].dvae_hidden


def test_the_settings_it_leaves_continue_the_run(
    clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", clips(4), "--stages dvae --seed 77") == 0
    capsys.readouterr()
    assert main(["train", "--config", str(tmp_path / "run" / "settings.yaml")]) == 0
    assert "Stage dvae: finished at step 4" in capsys.readouterr().out


def test_an_interrupt_while_the_corpus_is_prepared_ends_at_once(
    clips: Clips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("myxtts.run.prepare", lambda *_: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    try:
        assert train(tmp_path / "run", clips(4)) == 130
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_in_use_is_refused(clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock(tmp_path / "run"):
        assert train(tmp_path / "run", clips(4)) == 2
    assert "is in use by process" in capsys.readouterr().err


# Another start, and speaking from what a run left


@pytest.fixture
def base(clips: Clips, tmp_path: Path) -> Path:
    """A folder in XTTS-v2's form, exported from a run."""
    assert train(tmp_path / "first", clips(), "--stages gpt --max-steps 1") == 0
    run = RunDir(tmp_path / "first")
    save_folder(tmp_path / "base", run.load_model(), run.vocabulary())
    return tmp_path / "base"


def test_a_continued_run_remembers_where_it_came_from(
    base: Path, clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "tuned"
    assert train(run, clips(), f"--init-from {base} --max-steps 1") == 0
    assert train(run, clips(), "--max-steps 2") == 0, "without --init-from: still only the GPT is trained"
    assert newest(run).step == 2
    assert not RunDir(run).has_checkpoint("dvae")
    capsys.readouterr()
    assert train(run, clips(), f"--init-from {tmp_path / 'first'} --max-steps 3") == 2
    assert "training.init_from: the run has" in capsys.readouterr().err
    base.rename(tmp_path / "elsewhere")
    assert train(run, clips(), f"--init-from {base} --max-steps 3") == 0, "the weights are not read again"
    assert newest(run).step == 3


def test_adapters_are_not_put_on_the_weights_of_an_earlier_start(base: Path, clips: Clips, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, clips(), f"--init-from {base} --lora-rank 2 --stages gpt --max-steps 1 --lr 1e-9") == 0
    for path in (run / "gpt").glob("step-*"):  # as if it had died before anything was saved
        path.rename(run / path.name.replace("step", "lost"))
    assert train(run, clips(), f"--init-from {tmp_path / 'first'} --lora-rank 2 --stages gpt --max-steps 1") == 0
    assert RunDir(run).started_with()["training.init_from"] == str(tmp_path / "first")


def test_a_published_dvae_keeps_its_codebook_and_a_missing_one_is_trained_from_scratch(
    base: Path, clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dvae = read_tensors(base / "dvae.pth")
    vectors = torch.randn_like(dvae["codebook.embed"])
    write_pth(base / "dvae.pth", {**dvae, "codebook.embed": vectors, "codebook.cluster_size": vectors[0].abs()})
    assert train(tmp_path / "tuned", clips(), f"--init-from {base} --stages dvae --max-steps 3") == 0
    assert "Codebook: frozen" in capsys.readouterr().out
    found = newest(tmp_path / "tuned", "dvae").weights
    assert torch.equal(found["dvae.codebook.embed"], vectors)
    assert not torch.equal(found["dvae.decoder.0.weight"], dvae["decoder.0.weight"])

    (base / "dvae.pth").unlink()
    assert train(tmp_path / "new", clips(), f"--init-from {base} --stages dvae --max-steps 3") == 0
    assert "Codebook: frozen" not in capsys.readouterr().out
    assert newest(tmp_path / "new", "dvae").weights["dvae.codebook.cluster_size"].any()
    assert train(tmp_path / "random", clips(), f"--init-from {base} --max-steps 1") == 0
    assert "without a trained DVAE" in capsys.readouterr().out


def test_new_tokens_are_trained_beside_adapters(base: Path, clips: Clips, tmp_path: Path) -> None:
    larger = extend(Tokenizer.load(base), ["zwölf boxkämpfer jagen viktor quer"] * 3, "de", 5)
    larger.save(tmp_path / "larger.json")
    flags = f"--init-from {base} --tokenizer {tmp_path / 'larger.json'} --lora-rank 2 --max-steps 1"
    assert train(tmp_path / "run", clips(), flags) == 0
    kept = newest(tmp_path / "run").weights
    assert "gpt.text_embedding.weight" in kept and "gpt.text_head.weight" in kept
    assert len(kept["gpt.text_embedding.weight"]) == larger.num_tokens
    RunDir(tmp_path / "run").load_model()


def test_a_stage_that_another_is_built_upon_is_not_prolonged_by_the_way(clips: Clips, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, clips(), "--max-steps 1 --decoder-steps 1") == 0
    assert train(run, clips(), "--max-steps 3 --decoder-steps 2") == 0
    assert [newest(run, stage).step for stage in ("dvae", "gpt", "decoder")] == [1, 1, 2]
    assert train(run, clips(), "--max-steps 3 --decoder-steps 2 --stages gpt") == 0, "asked for by name it is"
    assert newest(run, "gpt").step == 3


def test_weights_that_were_never_trained_are_not_made_up(clips: Clips, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, clips(), "--max-steps 1 --stages dvae,gpt") == 0
    for path in (run / "gpt").glob("step-*"):
        path.rename(run / path.name.replace("step", "lost"))
    with pytest.raises(UnreadableWeights, match="has not trained gpt yet"):
        RunDir(run).load_model()
    with pytest.raises(UnreadableWeights, match="is no run of MyXTTS"):
        RunDir(tmp_path).load_model()


def test_a_reset_that_cannot_start_leaves_the_old_run_alone(clips: Clips, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, clips(), "--stages gpt --max-steps 1") == 0
    assert train(run, clips(), f"--stages gpt --max-steps 1 --reset-training --init-from {tmp_path / 'none'}") != 0
    assert newest(run).step == 1
    for number in (1, 2, 3):
        (run / "evaluation").mkdir()
        (run / "sample.wav").touch()
        assert train(run, clips(), "--stages gpt --max-steps 1 --reset-training") == 0
        assert (run / f"before-reset-{number}").is_dir()
        assert not (run / "evaluation").exists() and not (run / "sample.wav").exists(), "these are not of this run"
        if number == 2:
            (run / "before-reset-1").rename(tmp_path / "elsewhere")
    assert "reset_training: false" in (run / "settings.yaml").read_text()


def test_a_run_started_from_an_unfinished_one_speaks_as_that_does(clips: Clips, tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    assert train(first, clips(), "--stages dvae,gpt --max-steps 1") == 0
    for run, source in ((second, first), (third, second)):
        assert train(run, clips(), f"--init-from {source} --max-steps 1") == 0
        synthesizer = load_synthesizer(run, device=torch.device("cpu"))
        assert synthesizer.sampling == OWN_SAMPLING
        assert synthesizer.vocoder.name == "griffin-lim", "nobody ever trained the decoder"
    with pytest.raises(UnreadableWeights, match="decoder of this model is not trained"):
        load_synthesizer(third, vocoder="hifigan", device=torch.device("cpu"))


def test_a_run_speaks_and_is_exported(clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, reference = tmp_path / "run", tmp_path / "reference.wav"
    soundfile.write(reference, make_voice(6.5, seed=1), SAMPLE_RATE)
    assert train(run, clips(), "--stages dvae,gpt --max-steps 1") == 0
    assert "  not trained  decoder, speaker encoder: random weights" in capsys.readouterr().out
    arguments = ["speak", "Hello.", "--model", str(run), "--speaker", str(reference), "--language", "en"]
    capsys.readouterr()
    assert main([*arguments, "--seed", "1", "--out", str(tmp_path / "one.wav"), "--voice", "anna"]) == 0
    assert "griffin" in capsys.readouterr().out.lower(), "no decoder was trained, and that is said"
    wave, rate = soundfile.read(tmp_path / "one.wav")
    assert rate == 24000 and len(wave) > 0
    kept = ["speak", "Hello.", "--model", str(run), "--voice", "anna", "--language", "en", "--seed", "1"]
    assert main([*kept, "--out", str(tmp_path / "two.wav")]) == 0
    assert (tmp_path / "one.wav").read_bytes() == (tmp_path / "two.wav").read_bytes()
    assert main(["speak", "Hello.", "--model", str(run), "--language", "en"]) == 2
    capsys.readouterr()
    out = tmp_path / "out"
    assert main(["export", str(run), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "WARNING: decoder and speaker encoder: never trained, these weights are random" in shown
    exported, own = (load_synthesizer(folder, device=torch.device("cpu")) for folder in (out, run))
    assert exported.vocoder.name == "griffin-lim", "a random decoder would only hum"
    assert exported.sampling == own.sampling == OWN_SAMPLING
    assert exported.limits == own.limits
    assert train(tmp_path / "tuned", clips(), f"--init-from {out} --max-steps 1") == 0
    assert RunDir(tmp_path / "tuned").untrained() == ["decoder"]
    assert main(["export", str(run), "--out", str(tmp_path / "tuned")]) == 2, "a run is not written over"


AUTO = "--dropout auto --code-noise auto --text-dropout auto --ema-decay auto"


def test_a_gpt_from_scratch_on_few_hours_is_trained_and_speaks_in_the_way_that_was_measured(
    clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(run, clips(), f"--stages dvae,gpt --max-steps 1 {AUTO} --label-smoothing 0.1") == 0
    applied = "model.dropout 0.1, training.code_noise 0.3, training.text_dropout 0.1, training.ema_decay 0.995"
    assert f"less than 10 hours of speech, the gpt stage has {applied}" in capsys.readouterr().out
    assert newest(run).state["notes"]["trained_with"] == SMALL_CORPUS
    assert not any(name.startswith("ema.") for name in newest(run, "dvae").optimizer), "only the GPT is averaged"
    assert any(name.startswith("ema.") for name in newest(run).optimizer)
    assert train(run, clips(), f"--stages gpt --max-steps 2 {AUTO}") == 0, "continued with the same"
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    for folder in (run, tmp_path / "out"):
        sampling = load_synthesizer(folder, device=torch.device("cpu")).sampling
        assert (sampling.guidance, sampling.central) == (2.0, True)
    given = argparse.Namespace(temperature=None, repetition_penalty=None, guidance=1.0, central=False)
    assert override_sampling(sampling, given) == OWN_SAMPLING, "flags win"


def test_own_values_win_over_those_for_few_hours(
    clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("model: {dropout: 0.0}\ntraining: {code_noise: 0.2, ema_decay: auto}\n")
    settings = load(own, {"data.train_data": str(clips()), "training.text_dropout": 0}).settings
    prepared = prepare_corpus(settings)
    assert auto_values(settings, prepared) == {"training.ema_decay": 0.995}
    tuned = replace(settings, training=replace(settings.training, init_from=tmp_path))
    embedded = replace(settings, data=replace(settings.data, train_data=None))
    assert auto_values(tuned, prepared) == auto_values(embedded, prepared) == {}
    monkeypatch.setattr("myxtts.run.SMALL_CORPUS_HOURS", 0.0)
    assert auto_values(settings, prepared) == {}
    assert train(tmp_path / "large", clips(), f"--stages gpt --max-steps 1 {AUTO}") == 0
    assert "hours of speech, the gpt stage" not in capsys.readouterr().out
    assert set(newest(tmp_path / "large").state["notes"]["trained_with"].values()) == {0.0}


def test_weights_that_are_not_there_are_named_before_anything_else(
    base: Path, clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (base / "vocab.json").unlink()
    found = {
        tmp_path / "XTTS-v2": "there is no such folder",
        tmp_path / "empty": "holds neither XTTS weights (model.pth or best_model.pth) nor a run",
        base: "has weights, but no vocab.json",
        base / "model.pth": "that is a file",
    }
    for folder, why in found.items():
        capsys.readouterr()
        assert train(tmp_path / "first", clips(), f"--init-from {folder} --model-size small") == 2
        shown = capsys.readouterr().err
        assert f"--init-from {folder}: " in shown and why in shown and "Errno" not in shown


def test_a_check_says_what_training_would_refuse(clips: Clips, tmp_path: Path) -> None:
    def finding(**given: object) -> Finding:
        named = {"data.train_data": str(clips()), "training.checkpoint_dir": str(tmp_path / "run")}
        flags = named | {name.replace("__", "."): value for name, value in given.items()}
        return next(found for found in check(load(None, flags)) if found.code == "run")

    small = {"data__batch_size": "2", "data__max_mel_frames": "128", "data__max_text_length": "40"}
    assert finding().level == "pass"
    assert train(tmp_path / "run", clips(), "--stages dvae --max-steps 1") == 0
    same = finding(**small)
    assert (same.level, same.what) == ("pass", f"Continues the run in {tmp_path / 'run'}")
    other = finding(**small | {"data__batch_size": "3", "training__seed": "7"})
    assert other.level == "fail" and "--reset-training" in other.fix
    assert "training.seed: the run has 1234, now 7" in other.why
    assert "clips of a step (--batch-size × --grad-accum × processes): the run has 2, now 3" in other.why
    assert (
        finding(**small | {"data__batch_size": "1", "training__gradient_accumulation_steps": "2"}).level == "pass"
    )
    assert finding(training__init_from="elsewhere").level == "fail"
    assert finding(training__reset_training=True).level == "pass"
    elsewhere = finding(**small | {"data__train_data": str(clips(3))})
    assert elsewhere.level == "warn" and str(clips()) in elsewhere.what and "--checkpoint-dir" in elsewhere.fix


def test_texts_that_the_vocabulary_of_the_run_cannot_write_are_explained(
    clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", clips(4), "--stages dvae --max-steps 1") == 0
    persian = tmp_path / "persian"
    shutil.copytree(clips(4), persian)
    names = [line.split("|")[0] for line in (persian / "metadata.csv").read_text().splitlines()]
    lines = "".join(f"{name}|سلام.\n" for name in names)
    (persian / "metadata.csv").write_text(lines, encoding="utf-8")
    assert train(tmp_path / "run", persian, "--stages dvae --max-steps 2 --language fa") != 0
    shown = capsys.readouterr().err
    assert f"the vocabulary of the run in {tmp_path / 'run'}" in shown and "another --checkpoint-dir" in shown


def test_the_best_gpt_can_be_had_instead_of_the_newest(
    clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    flags = f"--max-steps 3 --decoder-steps 1 --dvae-steps 1 --save-step 1 --keep 9 --val-data {clips(3)}"
    assert train(run, clips(4), flags) == 0
    (run / "gpt" / "best").write_text("step-00000001")
    kept = RunDir(run).checkpoints("gpt")
    for best, step in ((True, 1), (False, 3)):
        model = RunDir(run).load_model(best_gpt=best)
        assert torch.equal(model.gpt.mel_head.weight, kept.load(step).weights["gpt.mel_head.weight"])
    assert main(["export", str(run), "--out", str(tmp_path / "best"), "--best"]) == 0
    exported = load_folder(tmp_path / "best").model.gpt.mel_head.weight
    assert torch.equal(exported, kept.load(1).weights["gpt.mel_head.weight"])
    (run / "gpt" / "best").unlink()
    assert main(["export", str(run), "--out", str(tmp_path / "none"), "--best"]) == 1
    assert "Leave out --best to use the newest" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "best"), "--out", str(tmp_path / "none"), "--best"]) == 2


def test_a_run_that_has_not_reached_a_stage_goes_on_without_it(
    clips: Clips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, flags = tmp_path / "run", "--dvae-steps 4"
    stop_at(monkeypatch, 2)
    assert train(run, clips(4), f"--stages dvae,gpt {flags}") == 0
    assert not RunDir(run).has_checkpoint("gpt")
    assert train(run, clips(4), f"--stages dvae {flags}") == 0
    assert newest(run, "dvae").step == 4
    assert train(run, clips(4), f"--stages dvae,gpt {flags}") == 0
