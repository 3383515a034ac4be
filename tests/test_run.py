"""Whole runs: where weights come from, what is trained, shown and left, what another start may change."""

from __future__ import annotations

import argparse
import mmap
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
    STAGES,
    Start,
    assert_equal_tensors,
    assert_same_checkpoints,
    assert_same_run,
    losses,
    newest,
    steps,
    stop_at,
)

import myxtts.model.gpt
import myxtts.pipeline.feed
import myxtts.run
from myxtts.checkpoints import UnreadableWeights, read_tensors, write_pth
from myxtts.config import SAMPLE_RATE, SMALL_CORPUS, DataSettings
from myxtts.data.prepare import prepare
from myxtts.devices import Plan
from myxtts.files import lock
from myxtts.model.mel import DVAE_MEL, LogMel
from myxtts.model.xtts import XTTS
from myxtts.observe.findings import Finding
from myxtts.observe.metrics import StepReport, json_lines
from myxtts.observe.nvml import Reading, Sampler
from myxtts.reports import TrainingReports
from myxtts.run import auto_values, prepare_corpus
from myxtts.run_dir import RunDir
from myxtts.settings import load
from myxtts.synthesis.synthesizer import OWN_SAMPLING, load_synthesizer, override_sampling, provenance
from myxtts.text.tokenizer import Tokenizer, extend
from myxtts.tools.check import check
from myxtts.training.trainer import StepMode, choose_mode
from myxtts.weights import load_folder, save_folder

pytest_plugins = ["training_fixtures"]
pytestmark = pytest.mark.usefixtures("small")

CPU = torch.device("cpu")
UNCHANGED = "--lr 1e-12 --max-steps 1"
"""A training that leaves every weight where it was, to the last digits."""


@pytest.fixture
def xtts(start: Start, tmp_path: Path) -> Path:
    """A folder as XTTS-v2 is published, of a small network with the vocabulary of the corpus."""
    data = DataSettings(train_data=start.clips(4), language="en", vocab_size=256, num_workers=1, val_fraction=0)
    vocabulary = prepare(data).tokenizer
    torch.manual_seed(99)
    model = XTTS(SMALL.with_vocabulary(vocabulary.num_tokens, vocabulary.start_id, vocabulary.stop_id))
    model.mel_stats.copy_(torch.linspace(1, 2, 80))
    save_folder(tmp_path / "xtts", model, vocabulary)
    return tmp_path / "xtts"


def state_of(folder: Path) -> dict[str, Tensor]:
    return (RunDir(folder).load_model() if RunDir(folder).exists else load_folder(folder).model).state_dict()


def part(state: dict[str, Tensor], *, gpt: bool) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.startswith("gpt.") is gpt}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9, msg=name)


# Where weights come from


def test_from_published_weights_only_the_gpt_is_trained_unless_told_otherwise(xtts: Path, start: Start) -> None:
    run, before = start(f"--init-from {xtts}"), state_of(xtts)
    assert [stage for stage in STAGES if (run / stage).exists()] == ["gpt"]
    after = state_of(run)
    assert_equal_tensors(part(after, gpt=False), part(before, gpt=False))
    changed = [name for name, value in part(before, gpt=True).items() if not torch.equal(after[name], value)]
    assert len(changed) > 0.9 * len(part(before, gpt=True))


def test_every_stage_starts_from_the_weights_that_were_named(xtts: Path, start: Start) -> None:
    found, expected = state_of(start(f"--init-from {xtts} --stages dvae,gpt,decoder {UNCHANGED}")), state_of(xtts)
    assert_close(found, {name: value for name, value in expected.items() if "codebook" not in name})


def test_a_run_may_start_from_another_run(start: Start) -> None:
    """From the averaged weights, where it kept them."""
    first = start("--stages dvae,gpt --ema-decay 0.5 --max-steps 3", "first")
    second = start(f"--init-from {first} {UNCHANGED}", "second")
    assert not (second / "dvae").exists()
    assert_close(state_of(second), state_of(first))
    last, started = newest(first).weights, part(state_of(second), gpt=True)
    assert max(float((value - last[name]).abs().max()) for name, value in started.items()) > 1e-4


def test_weights_of_another_size_or_vocabulary_are_refused(xtts: Path, start: Start) -> None:
    run = start("--stages dvae --max-steps 1", corpus=7)
    size = "are of size tiny, and --model-size is small; give --model-size tiny"
    for flags, message in (
        (f"--init-from {xtts} --model-size small", size),
        (f"--init-from {run} --model-size small", size),
        (f"--init-from {run} --tokenizer {xtts / 'vocab.json'}", "leave out --tokenizer to use that of the run"),
    ):
        start(flags, "other", code=2)
        assert message in start.err


def test_stages_start_from_the_seed_however_they_are_reached(start: Start) -> None:
    """All in one process, or one after the other: initial weights, dropout and judges are the same."""
    flags = "--dropout 0.2 --max-steps 2 --lr 1e-6"
    whole = start(f"--stages dvae,gpt,decoder {flags}", "whole")
    for stages in ("dvae", "dvae,gpt", "dvae,gpt,decoder"):
        torch.manual_seed(len(stages))
        parts = start(f"--stages {stages} {flags}", "parts")
    for stage in STAGES:
        expected = newest(whole, stage).weights
        for name, value in newest(parts, stage).weights.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5, msg=name)
        assert losses(parts, stage) == pytest.approx(losses(whole, stage), rel=1e-6)


FIRST, SECOND, HOST = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")


@pytest.mark.parametrize(
    ("data", "model"),
    [
        pytest.param(HOST, HOST, id="cpu"),
        pytest.param(FIRST, FIRST, id="one", marks=pytest.mark.gpu),
        pytest.param(FIRST, SECOND, id="two", marks=[pytest.mark.gpu, pytest.mark.two_gpus]),
    ],
)
def test_a_run_in_dual_mode_is_that_of_buffered_mode(
    data: torch.device, model: torch.device, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stages with validation, from the command line on; on the CPU bit for bit."""
    flags = f"--max-steps 2 --val-data {start.clips(3)} --disable-xla-compilation --disable-graph-mode"
    monkeypatch.setattr(myxtts.run, "make_plan", lambda *_, **__: Plan(model, model, "buffered"))
    buffered = start(flags, "buffered")
    monkeypatch.setattr(myxtts.run, "make_plan", lambda *_, **__: Plan(data, model, "dual"))
    dual = start(flags, "dual")
    assert "Multi-GPU configuration completed successfully" in start.out
    assert f"Copies from {data} to {model}" in start.out
    for report in steps(dual):
        assert {"host", "device", "handoff", "model"} <= report["rings"].keys()
    if model == HOST:
        assert_same_checkpoints(dual, buffered, *STAGES)
    for stage in STAGES:
        assert losses(dual, stage) == pytest.approx(losses(buffered, stage), rel=0.05)


TWO_ROLES = [
    pytest.param(HOST, HOST, id="cpu"),
    pytest.param(FIRST, FIRST, id="one", marks=pytest.mark.gpu),
    pytest.param(FIRST, SECOND, id="two", marks=[pytest.mark.gpu, pytest.mark.two_gpus]),
    pytest.param(SECOND, FIRST, id="two-reversed", marks=[pytest.mark.gpu, pytest.mark.two_gpus]),
]


@pytest.mark.parametrize(("data", "model"), TWO_ROLES)
def test_a_run_in_dual_mode_continues_exactly(
    data: torch.device, model: torch.device, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(myxtts.run, "make_plan", lambda *_, **__: Plan(data, model, "dual"))
    flags = "--stages gpt --max-steps 5 --deterministic --dropout 0.2"
    whole = start(flags, "whole")
    stop_at(monkeypatch, 2)
    for expected in (2, 5):
        parts = start(flags, "parts")
        assert newest(parts).step == expected
    assert_same_run(parts, whole, "gpt")


@pytest.mark.parametrize(("data", "model"), TWO_ROLES[1:])
def test_the_compiled_and_captured_step_trains_on_the_card_of_its_role(
    data: torch.device, model: torch.device, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for way in ("", "--disable-xla-compilation --disable-graph-mode"):
        monkeypatch.setattr(myxtts.run, "make_plan", lambda *_, **__: Plan(data, model, "dual"))
        run = start(f"--stages gpt --max-steps 6 {way}", f"run {len(way)}")
        found[way] = losses(run)
        assert ("Training step: compiled, captured as a CUDA graph" in start.out) == (not way), start.out
    assert found[""] == pytest.approx(found["--disable-xla-compilation --disable-graph-mode"], rel=0.05)


def follows_codebook(state: dict[str, Tensor]) -> bool:
    """Whether codes are as far apart for the GPT as they are for the DVAE."""
    heard, meant = state["gpt.mel_embedding.weight"], state["dvae.codebook.embed"].t()
    apart = [torch.pdist(vectors[: len(meant)]) for vectors in (heard, meant)]
    return float(torch.corrcoef(torch.stack(apart))[0, 1]) > 0.5


def test_a_gpt_from_scratch_begins_with_the_codebook(start: Start) -> None:
    """Also when only the DVAE comes from elsewhere; never with adapters, which would not keep it."""
    dvae = start("--stages dvae --max-steps 2", "dvae")
    whole, after, adapters = (
        "--stages dvae,gpt",
        f"--init-from {dvae} --stages gpt",
        "--stages dvae,gpt --lora-rank 2",
    )
    for number, flags in enumerate((whole, after, adapters)):
        assert follows_codebook(state_of(start(f"{flags} {UNCHANGED}", f"run-{number}"))) is (flags != adapters)


def test_mels_are_divided_by_the_root_mean_square_of_the_corpus(start: Start) -> None:
    run = start("--stages dvae --max-steps 1")
    found = prepare(DataSettings(train_data=start.clips(4), language="en", num_workers=1, val_fraction=0)).train
    waves = [torch.from_numpy(found.audio[row].copy()).float() / 32768 for row in found.audio_rows.tolist()]
    stats = newest(run, "dvae").weights["mel_stats"]
    mels = torch.cat([LogMel(DVAE_MEL)(wave, stats)[:, : len(wave) // 256 + 1] for wave in waves], 1)
    torch.testing.assert_close(mels.square().mean(1), torch.ones(80), rtol=1e-4, atol=0)


# What is trained, and how


def test_adapters_alone_are_kept_and_merge_into_the_weights_they_adapt(
    xtts: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"--init-from {xtts} --lora-rank 3 --dropout 0.2 --max-steps 4"
    whole = start(flags, "whole")
    stop_at(monkeypatch, 2)
    for _ in range(2):
        run = start(flags)
    assert_same_run(run, whole, "gpt")

    kept, before, after = newest(run).weights, state_of(xtts), state_of(run)
    assert all(name.endswith((".lora_a", ".lora_b")) for name in kept)
    adapted = {name.rpartition(".")[0] for name in kept}
    assert len(adapted) == len(kept) / 2 == 4
    for layer in adapted:
        before[f"{layer}.weight"] = before[f"{layer}.weight"] + kept[f"{layer}.lora_a"] @ kept[f"{layer}.lora_b"]
        assert kept[f"{layer}.lora_b"].abs().max() > 0
    assert after.keys() == before.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, msg=name)


def test_gradient_checkpointing_changes_memory_and_no_loss(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Mock(side_effect=myxtts.model.gpt.checkpoint)
    monkeypatch.setattr(myxtts.model.gpt, "checkpoint", checkpoint)
    flags = "--stages gpt --dropout 0.2 --max-steps 3"
    plain = start(flags, "plain")
    assert not checkpoint.called
    sparing = start(f"{flags} --gradient-checkpointing", "sparing")
    assert checkpoint.call_count == 3
    assert losses(sparing) == pytest.approx(losses(plain), rel=1e-6)


def test_named_speakers_lend_each_other_reference_voices(start: Start, tmp_path: Path) -> None:
    corpus = tmp_path / "named"
    shutil.copytree(start.clips(4), corpus, ignore=shutil.ignore_patterns(".myxtts"))
    seen = {}
    for speakers in ("ann", ""):
        rows = "".join(f"clip{number:03}|{speakers}\n" for number in range(4))
        (corpus / "speakers.csv").write_text(f"id|speaker\n{rows}")
        for way in ("other", "same", "other --single-speaker"):
            flags = f"--stages gpt --max-steps 2 --reference-clip {way}"
            seen[speakers, way] = losses(start(flags, f"{speakers}-{way}", corpus))
    assert seen["ann", "other"] == seen["", "other --single-speaker"] == seen["ann", "other --single-speaker"]
    assert seen["ann", "other"] != seen["ann", "same"]
    assert seen["", "other"] == seen["", "same"] == seen["ann", "same"]


GPU_PLAN = Plan(torch.device("cuda", 0), torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("settings", "plan", "expected"),
    [
        ({}, {}, StepMode(autocast=True, compiled=True, captured=True)),
        ({"data.mixed_precision": False}, {}, StepMode(compiled=True, captured=True)),
        ({"data.pad_to_fixed_length": False}, {}, StepMode(autocast=True)),
        ({}, {"world_size": 2}, StepMode(autocast=True, compiled=True, captured=True)),
        ({}, {"model": torch.device("cpu")}, StepMode()),
        ({"model.gradient_checkpointing": True, "model.dropout": 0.1}, {}, StepMode(autocast=True, compiled=True)),
        ({"training.enable_xla_compilation": False}, {}, StepMode(autocast=True, captured=True)),
        ({"training.enable_graph_mode": False}, {}, StepMode(autocast=True)),
        ({"training.optimization_level": "experimental"}, {}, StepMode(True, True, True, tuned=True)),
        ({"training.enable_eager_debug": True}, {}, StepMode(autocast=True, debug=True)),
        ({"training.deterministic": True}, {}, StepMode(autocast=True, captured=True, deterministic=True)),
        ({"training.deterministic": True}, {"model": torch.device("cpu")}, StepMode()),
        ({"training.enable_eager_debug": True}, {"model": torch.device("cpu")}, StepMode(debug=True)),
    ],
)
def test_how_a_step_is_run(settings: dict[str, Any], plan: dict[str, Any], expected: StepMode) -> None:
    assert choose_mode(load(None, settings).settings, "gpt", replace(GPU_PLAN, **plan)) == expected


# What is shown and left


def test_the_readings_of_the_gpus_are_kept_for_the_page(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(1_000_000, 0, utilisation=0.93, memory_used_mb=11_000, memory_total_mb=24_000, power_w=212.0)
    monkeypatch.setattr(Sampler, "read", lambda _: [reading, reading._replace(gpu=1, utilisation=0.41)])
    run = start("--stages dvae --max-steps 2")
    kept = json_lines(run / "readings.jsonl")
    assert [(line["gpu"], line["utilisation"]) for line in kept] == [(0, 0.93), (1, 0.41)] * 2, (
        "with every step line"
    )
    assert "212" in (run / "report.html").read_text(encoding="utf-8")


def test_a_run_announces_itself_and_leaves_everything_in_its_folder(start: Start) -> None:
    run = start(f"--max-steps 2 --model-start-delay 0.5 --val-data {start.clips(3)}")
    stages = [
        rf"Stage {stage}\nBuffer size: 6 batches \(3 on the host, 3 on cpu\), and 2 being .*\n"
        r"(Reference voices: 100 % of .*--single-speaker\n)?Training step: eager, fp32\n"
        r"Waiting up to 0\.5s for data pipeline to warm up\nModel training starting now \(\d+ .*\n"
        r"step 1/2  loss .*\nstep 2/2  loss .*\nvalidation at step 2  loss .*  the best so far\n"
        for stage in STAGES
    ]
    expected = (
        r"Corpus: 4 training clips [\s\S]*"
        r"No GPU was found: .*\n[\s\S]*"
        r"Model placed on .*\nNative loading: on, .*\n"
        r"(Hint: .*\n)*Plan of the run in .*:\n  dvae     2 steps\n  gpt      2 steps\n  decoder  2 steps\n"
        rf"{''.join(stages)}Speaking a sentence of the corpus …\n(.*\n)+"
        rf"Done\. Everything is in {re.escape(str(run))}"
    )
    assert re.search(expected, start.out), start.out
    reports = steps(run)
    assert [(report["stage"], report["step"]) for report in reports] == [(s, n) for s in STAGES for n in (1, 2)]
    begun = [line for line in json_lines(run / "metrics.jsonl") if line["kind"] == "begin"]
    assert {line["stage"]: line["own_references"] for line in begun} == {"dvae": None, "gpt": 1.0, "decoder": 1.0}
    names = {field.name for field in fields(StepReport)}
    assert all(names <= report.keys() for report in reports)
    assert all(report["clips_per_s"] > 0 and report["step_ms"] > 0 for report in reports)
    for stage in STAGES:
        content = b"".join(path.read_bytes() for path in (run / "tensorboard" / stage).iterdir())
        for tag in (b"loss/total", b"train/lr", b"speed/idle_share", b"validation/total", f"{stage}/".encode()):
            assert tag in content, (stage, tag)


def test_batches_are_as_wide_as_the_longest_clip_needs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    widths, layout = set(), myxtts.pipeline.feed.host_layout
    seen = lambda data, *rest: widths.add(data.max_mel_frames) or layout(data, *rest)  # noqa: E731
    monkeypatch.setattr(myxtts.pipeline.feed, "host_layout", seen)
    run = start("--stages gpt --max-steps 1 --max-mel-frames auto")
    assert widths == {96}  # 1.1 s are 95 frames
    assert provenance(RunDir(run)).max_mel_frames == 96
    assert "max_mel_frames: auto" in (run / "settings.yaml").read_text()


def test_the_settings_it_leaves_continue_the_run(start: Start) -> None:
    run = start("--stages dvae --seed 77")
    assert "Stage dvae: finished at step 4" in start.command("train", "--config", run / "settings.yaml")


def test_an_interrupt_while_the_corpus_is_prepared_ends_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("myxtts.run.prepare", lambda *_: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    try:
        start(code=130)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_in_use_is_refused(start: Start, tmp_path: Path) -> None:
    with lock(tmp_path / "run"):
        start(code=2)
    assert "is in use by process" in start.err


# Another start, and speaking from what a run left


@pytest.fixture
def base(start: Start, tmp_path: Path) -> Path:
    """A folder in XTTS-v2's form, exported from the run in `first`."""
    start.command("export", start("--stages gpt --max-steps 1", "first"), "--out", tmp_path / "base")
    return tmp_path / "base"


def test_a_continued_run_remembers_where_it_came_from(base: Path, start: Start, tmp_path: Path) -> None:
    run = start(f"--init-from {base} --max-steps 1")
    start("--max-steps 2")  # without --init-from: still only the GPT is trained
    assert newest(run).step == 2
    assert not RunDir(run).has_checkpoint("dvae")
    start(f"--init-from {tmp_path / 'first'} --max-steps 3", code=2)
    assert "training.init_from: the run has" in start.err
    base.rename(tmp_path / "elsewhere")
    start(f"--init-from {base} --max-steps 3")  # the weights are not read again
    assert newest(run).step == 3


def lose_checkpoints(run: Path) -> None:
    """As if the run had died before anything of its GPT was saved."""
    for path in (run / "gpt").glob("step-*"):
        path.rename(run / path.name.replace("step", "lost"))


def test_adapters_are_not_put_on_the_weights_of_an_earlier_start(base: Path, start: Start, tmp_path: Path) -> None:
    flags = "--lora-rank 2 --stages gpt --max-steps 1"
    run = start(f"--init-from {base} {flags}")
    lose_checkpoints(run)
    start(f"--init-from {tmp_path / 'first'} {flags}")
    assert RunDir(run).started_with()["training.init_from"] == str(tmp_path / "first")


def test_a_published_dvae_keeps_its_codebook_and_a_missing_one_is_trained_from_scratch(
    base: Path, start: Start
) -> None:
    (base / "myxtts.json").unlink()  # a published folder has none
    dvae = read_tensors(base / "dvae.pth")
    vectors = torch.randn_like(dvae["codebook.embed"])
    write_pth(base / "dvae.pth", {**dvae, "codebook.embed": vectors, "codebook.cluster_size": vectors[0].abs()})
    found = newest(start(f"--init-from {base} --stages dvae --max-steps 3", "tuned"), "dvae").weights
    assert "Codebook: frozen" in start.out
    assert torch.equal(found["dvae.codebook.embed"], vectors)
    assert not torch.equal(found["dvae.decoder.0.weight"], dvae["decoder.0.weight"])

    (base / "dvae.pth").unlink()
    found = newest(start(f"--init-from {base} --stages dvae --max-steps 3", "new"), "dvae").weights
    assert "Codebook: frozen" not in start.out
    assert found["dvae.codebook.cluster_size"].any()
    start(f"--init-from {base} --max-steps 1", "random")
    assert "without a trained DVAE" in start.out


def test_new_tokens_are_trained_beside_adapters(base: Path, start: Start, tmp_path: Path) -> None:
    larger = extend(Tokenizer.load(base), ["zwölf boxkämpfer jagen viktor quer"] * 3, "de", 5)
    larger.save(tmp_path / "larger.json")
    run = start(f"--init-from {base} --tokenizer {tmp_path / 'larger.json'} --lora-rank 2 --max-steps 1")
    kept = newest(run).weights
    assert "gpt.text_head.weight" in kept and len(kept["gpt.text_embedding.weight"]) == larger.num_tokens
    RunDir(run).load_model()


def test_weights_that_were_never_trained_are_not_made_up(start: Start, tmp_path: Path) -> None:
    run = start("--max-steps 1 --stages dvae,gpt")
    lose_checkpoints(run)
    with pytest.raises(UnreadableWeights, match="has not trained gpt yet"):
        RunDir(run).load_model()
    with pytest.raises(UnreadableWeights, match="is no run of MyXTTS"):
        RunDir(tmp_path).load_model()


def test_a_run_started_from_an_unfinished_one_speaks_as_that_does(start: Start) -> None:
    run = start("--stages dvae,gpt --max-steps 1", "first")
    for name in ("second", "third"):
        run = start(f"--init-from {run} --max-steps 1", name)
    synthesizer = load_synthesizer(run, device=CPU)
    assert synthesizer.sampling == OWN_SAMPLING
    assert synthesizer.vocoder.name == "griffin-lim", "no run has trained the decoder"
    with pytest.raises(UnreadableWeights, match="decoder of this model is not trained"):
        load_synthesizer(run, vocoder="hifigan", device=CPU)


def test_a_run_speaks_and_is_exported(start: Start, tmp_path: Path) -> None:
    run, reference, out = start("--stages dvae,gpt --max-steps 1"), tmp_path / "reference.wav", tmp_path / "out"
    soundfile.write(reference, make_voice(6.5, seed=1), SAMPLE_RATE)
    assert "  not trained  speaker, decoder: random weights" in start.out
    speak = ["speak", "Hello.", "--model", run, "--language", "en", "--seed", "1"]
    shown = start.command(*speak, "--speaker", reference, "--voice", "anna", "--out", tmp_path / "one.wav")
    assert "griffin" in shown.lower(), "no decoder was trained, and that is said"
    wave, rate = soundfile.read(tmp_path / "one.wav")
    assert rate == 24000 and len(wave) > 0
    start.command(*speak, "--voice", "anna", "--out", tmp_path / "two.wav")
    assert (tmp_path / "one.wav").read_bytes() == (tmp_path / "two.wav").read_bytes()
    start.command(*speak, code=2)
    exported = start.command("export", run, "--out", out)
    assert "WARNING: speaker and decoder: never trained, these weights are random" in exported
    theirs, own = (load_synthesizer(folder, device=CPU) for folder in (out, run))
    assert theirs.vocoder.name == "griffin-lim", "a random decoder would only hum"
    assert theirs.sampling == own.sampling == OWN_SAMPLING
    assert theirs.limits == own.limits
    tuned = start(f"--init-from {out} --max-steps 1", "tuned")
    assert RunDir(tuned).untrained() == ["speaker", "decoder"]
    start.command("export", run, "--out", tuned, code=2)  # a run is not written over


AUTO = "--dropout auto --code-noise auto --text-dropout auto --ema-decay auto"


def test_a_gpt_from_scratch_on_few_hours_is_trained_and_speaks_in_the_way_that_was_measured(
    start: Start, tmp_path: Path
) -> None:
    run = start(f"--stages dvae,gpt --max-steps 1 {AUTO}")
    applied = "model.dropout 0.1, training.code_noise 0.3, training.text_dropout 0.1, training.ema_decay 0.995"
    assert f"less than 10 hours of speech, the gpt stage has {applied}" in start.out
    assert newest(run).state["notes"]["trained_with"] == SMALL_CORPUS
    assert not any(name.startswith("ema.") for name in newest(run, "dvae").optimizer), "only the GPT is averaged"
    assert any(name.startswith("ema.") for name in newest(run).optimizer)
    start(f"--stages gpt --max-steps 2 {AUTO}")  # continued with the same
    start.command("export", run, "--out", tmp_path / "out")
    for folder in (run, tmp_path / "out"):
        sampling = load_synthesizer(folder, device=torch.device("cpu")).sampling
        assert (sampling.guidance, sampling.central) == (2.0, True)
    given = argparse.Namespace(temperature=None, repetition_penalty=None, guidance=1.0, central=False)
    assert override_sampling(sampling, given) == OWN_SAMPLING, "flags win"


def test_own_values_win_over_those_for_few_hours(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("model: {dropout: 0.0}\ntraining: {code_noise: 0.2, ema_decay: auto}\n")
    settings = load(own, {"data.train_data": str(start.clips()), "training.text_dropout": 0}).settings
    prepared = prepare_corpus(settings)
    assert auto_values(settings, prepared) == {"training.ema_decay": 0.995}
    tuned = replace(settings, training=replace(settings.training, init_from=tmp_path))
    embedded = replace(settings, data=replace(settings.data, train_data=None))
    assert auto_values(tuned, prepared) == auto_values(embedded, prepared) == {}
    monkeypatch.setattr("myxtts.run.SMALL_CORPUS_HOURS", 0.0)
    assert auto_values(settings, prepared) == {}
    large = start(f"--stages gpt --max-steps 1 {AUTO}", "large")
    assert "hours of speech, the gpt stage" not in start.out
    assert set(newest(large).state["notes"]["trained_with"].values()) == {0.0}


def test_weights_that_are_not_there_are_named_before_anything_else(
    base: Path, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (base / "vocab.json").unlink()
    found = {
        tmp_path / "XTTS-v2": "there is no such folder",
        tmp_path / "empty": "holds neither XTTS weights (model.pth or best_model.pth or weights-1.npz) nor a run",
        base: "has weights, but no vocab.json",
        base / "model.pth": "that is a file",
    }
    for folder, why in found.items():
        start(f"--init-from {folder} --model-size small", "first", code=2)
        assert f"--init-from {folder}: " in start.err and why in start.err and "Errno" not in start.err


def test_a_check_says_what_training_would_refuse(start: Start) -> None:
    run = start.folder / "run"

    def finding(**given: object) -> Finding:
        named = {"data.train_data": str(start.clips()), "training.checkpoint_dir": str(run)}
        flags = named | {name.replace("__", "."): value for name, value in given.items()}
        return next(found for found in check(load(None, flags)) if found.code == "run")

    small = {"data__batch_size": "2", "data__max_mel_frames": "128", "data__max_text_length": "40"}
    in_halves = small | {"data__batch_size": "1", "training__gradient_accumulation_steps": "2"}
    assert finding().level == "pass"
    start("--stages dvae --max-steps 1")
    same = finding(**small)
    assert (same.level, same.what) == ("pass", f"Continues the run in {run}")
    other = finding(**small | {"data__batch_size": "3", "training__seed": "7"})
    assert other.level == "fail" and "--reset-training" in other.fix
    assert "training.seed: the run has 1234, now 7" in other.why
    assert "clips of a step (--batch-size × --grad-accum × processes): the run has 2, now 3" in other.why
    assert finding(**in_halves).level == "pass"
    assert finding(training__init_from="elsewhere").level == "fail"
    assert finding(training__reset_training=True).level == "pass"
    elsewhere = finding(**small | {"data__train_data": str(start.clips(3))})
    assert elsewhere.level == "warn" and "--checkpoint-dir" in elsewhere.fix
    assert str(start.clips()) in elsewhere.what


def test_texts_that_the_vocabulary_of_the_run_cannot_write_are_explained(start: Start, tmp_path: Path) -> None:
    run, persian = start("--stages dvae --max-steps 1"), tmp_path / "persian"
    shutil.copytree(start.clips(4), persian)
    names = [line.split("|")[0] for line in (persian / "metadata.csv").read_text().splitlines()]
    (persian / "metadata.csv").write_text("".join(f"{name}|سلام.\n" for name in names), encoding="utf-8")
    start("--stages dvae --max-steps 2 --language fa", corpus=persian, code=1)
    assert f"the vocabulary of the run in {run}" in start.err and "another --checkpoint-dir" in start.err


def test_the_best_gpt_is_used_with_a_warning_that_the_decoder_was_trained_on_the_newest(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = iter([9.0, 1.0, 3.0, 2.0, 9.0])  # one for the dvae, three for the gpt, one for the decoder
    monkeypatch.setattr("myxtts.run.validate", lambda *_: ({"total": next(found)}, {}))
    flags = "--max-steps 3 --decoder-steps 1 --dvae-steps 1 --val-step 1 --save-step 1 --keep 1"
    run = start(f"{flags} --val-data {start.clips(3)}")
    kept = RunDir(run).checkpoints("gpt")
    assert [notes.step for notes in kept.all_notes()] == [3, 1]
    for best, step in ((False, 3), (True, 1)):
        caplog.clear()
        start.command("export", run, "--out", tmp_path / f"best-{best}", *["--best"] * best)
        exported = load_folder(tmp_path / f"best-{best}").model.gpt.mel_head.weight
        assert torch.equal(exported, kept.load(step).weights["gpt.mel_head.weight"])
        trained_on = "decoder was trained on the gpt of step 3, and this is the gpt of step 1"
        assert (trained_on in caplog.text) is best
    assert "leave out --best to use the gpt that decoder was trained on" in caplog.text
    other = start("--max-steps 1 --stages gpt", "other")
    start.command("export", other, "--out", tmp_path / "none", "--best", code=1)
    assert "Leave out --best to use the newest" in start.err
    start.command("export", tmp_path / "best-True", "--out", tmp_path / "none", "--best", code=2)


def test_stages_that_were_not_trained_together_are_named_wherever_the_run_is_loaded(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    run = start("--max-steps 1 --stages dvae,gpt")
    start("--max-steps 2 --stages dvae")
    for act in (lambda: load_synthesizer(run, device=CPU), lambda: start(f"--init-from {run}", "other")):
        caplog.clear()
        act()
        assert f"{run}: gpt was trained on the dvae of step 1, and this is the dvae of step 2" in caplog.text
        assert "the command of the run, or train --stages gpt, trains gpt again" in caplog.text
    caplog.clear()
    start("--max-steps 2 --stages gpt")
    load_synthesizer(run, device=CPU)
    assert "WARNING" not in caplog.text


def test_the_runs_of_a_folder_are_listed_with_what_their_command_would_do(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert "No run in" in start.command("runs")
    start.command("runs", tmp_path / "none", code=2)
    start(f"--max-steps 1 --val-data {start.clips(3)}")
    start("--max-steps 2 --stages gpt")
    stop_at(monkeypatch, 1)
    start("--max-steps 3", "deeper/stopped", 5)
    start("--max-steps 1 --stages dvae --reset-training")
    first, second = start.command("runs").split("deeper/stopped tiny  English")
    assert str(start.clips(4)) in first and str(start.clips(5)) in second
    rows = [re.split(r"\s{2,}", line.strip()) for line in (first + second).splitlines()]
    assert ["dvae", "1/3", "unfinished", "–", "continues"] in rows
    assert ["gpt", "–", "missing", "–", "trains it"] in rows
    assert ["dvae", "1/1", "complete", "–", "nothing"] in rows
    (tmp_path / "deeper" / "stopped" / "model.json").write_text("{")
    assert "stopped" not in start.command("runs") and "is left out: " in caplog.text
    aside = start.command("runs", "run/before-reset-1")
    assert re.search(r"dvae +1/1 +complete +\d+\.\d+ +leaves it", aside)
    assert re.search(r"gpt +2/2 +complete +\d+\.\d+ +nothing", aside)
    assert re.search(r"decoder +1/1 +stale: decoder was trained on the gpt of step 1,.* leaves it", aside)


def test_a_run_that_has_not_reached_a_stage_goes_on_without_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, 2)
    run = start("--stages dvae,gpt --dvae-steps 4")
    assert not RunDir(run).has_checkpoint("gpt")
    start("--stages dvae --dvae-steps 4")
    assert newest(run, "dvae").step == 4
    start("--stages dvae,gpt --dvae-steps 4")


@pytest.mark.parametrize("role", ["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_leak_of_5_mb_a_step_is_warned_of(role: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    leaked, tick = list[Any](), TrainingReports.tick

    def leak(reports: TrainingReports, step: int) -> None:
        tick(reports, step)
        if role == "gpu":
            leaked.append(torch.ones(5 * 2**20, dtype=torch.uint8, device="cuda"))
        else:  # mapped: an allocation may reuse what earlier tests have freed
            leaked.append(mmap.mmap(-1, 5 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            leaked[-1].write(b"1" * (5 * 2**20))

    monkeypatch.setattr(TrainingReports, "tick", leak)
    monkeypatch.setattr("myxtts.observe.diagnosis.MIN_HOST_GROWTH_MB", 64.0)
    stop_at(monkeypatch, 60)
    start("--stages dvae --max-steps 100000 --epochs 1000000 --disable-xla-compilation")
    place = "on the GPU" if role == "gpu" else "by this process"
    found = re.search(
        rf"The memory held {place} grows by ([\d.]+) MB a step .* at about step", start.out + start.err
    )
    assert found and 4 < float(found[1]) < 7


def test_latents_are_kept_unless_there_is_no_room_or_no_use_for_them(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folders() -> set[str]:
        return {path.name[:7] for path in tmp_path.rglob("latents-*")}

    flags, kept = (
        f"--stages decoder --cache-dir {tmp_path / 'cache'}",
        r"Latents of the training clips: .* in \d+ s",
    )
    start(f"{flags} --max-steps 1", "short")
    assert "Latents" not in start.out and not folders()  # less than an epoch
    first = start(flags, "first")
    assert re.search(kept, start.out) and folders()
    again = start(flags, "again")
    assert "Latents" not in start.out
    assert_same_run(again, first, "decoder")
    start(f"{flags} --no-cache-latents", "off")
    assert "Latents" not in start.out
    start(f"{flags} --seed 2", "other references")
    assert re.search(kept, start.out)
    usage = Mock(return_value=Mock(free=1000))
    monkeypatch.setattr("myxtts.pipeline.feed.shutil.disk_usage", usage)
    start(f"{flags} --seed 3", "full")
    assert "Latents are computed for every batch: they take 0.0 GB, more than half of the 0.0 GB free" in start.out
