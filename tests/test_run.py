"""What settings make of a run: where its weights come from, which of them it trains, what it shows and leaves."""

from __future__ import annotations

import json
import re
import shutil
import signal
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
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
from myxtts.checkpoints import UnreadableWeights
from myxtts.cli import main
from myxtts.config import STAGES, DataSettings, Settings
from myxtts.data.prepare import prepare
from myxtts.devices import Plan
from myxtts.files import lock
from myxtts.model.mel import DVAE_MEL, LogMel
from myxtts.model.xtts import SIZES, XTTS
from myxtts.observe.metrics import StepReport
from myxtts.run_dir import RunDir
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


@pytest.mark.usefixtures("xtts")
@pytest.mark.parametrize("source", ["xtts", "run"])
def test_weights_of_another_size_are_refused(
    source: str, clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if source == "run":
        assert train(tmp_path / "run", clips(4), "--stages dvae --max-steps 1") == 0
    assert train(tmp_path / "other", clips(4), f"--init-from {tmp_path / source} --model-size small") == 2
    assert "are of size tiny, and --model-size is small; give --model-size tiny" in capsys.readouterr().err


def test_a_run_does_not_fit_another_vocabulary(
    xtts: Path, clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", clips(7), "--stages dvae --max-steps 1") == 0
    flags = f"--init-from {tmp_path / 'run'} --tokenizer {xtts / 'vocab.json'}"
    assert train(tmp_path / "other", clips(4), flags) == 2
    assert "leave out --tokenizer to use that of the run" in capsys.readouterr().err


def test_a_folder_that_holds_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableWeights, match="is no run of MyXTTS"):
        RunDir(tmp_path).load_model()


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
    num_calls, checkpoint = 0, myxtts.model.gpt.checkpoint

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return checkpoint(*arguments, **options)

    monkeypatch.setattr(myxtts.model.gpt, "checkpoint", counted)
    flags = "--stages gpt --dropout 0.2 --max-steps 3"
    assert train(tmp_path / "plain", clips(4), flags) == 0
    assert num_calls == 0
    assert train(tmp_path / "sparing", clips(4), f"{flags} --gradient-checkpointing") == 0
    assert num_calls == 3
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
