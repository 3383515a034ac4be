"""Evaluations while training goes on: what they find, leave alone, keep and say; and which GPT a run uses."""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import soundfile as sf
import torch
from conftest import SENTENCES
from test_evaluate import install, write_speakers
from test_speaker import people
from training_fixtures import (
    Start,
    assert_equal_tensors,
    assert_same_checkpoints,
    measured,
    newest,
    steps,
    stop_at,
)

import myxtts.evaluation
from myxtts.config import MIN_SPEAKERS
from myxtts.devices import CAPTURING, Plan
from myxtts.errors import PipelineError
from myxtts.evaluation import MOST_SAMPLES, Evaluator, Speaker
from myxtts.model.xtts import XTTS
from myxtts.observe.metrics import MetricsLog
from myxtts.observe.report import write_report
from myxtts.reports import TrainingReports
from myxtts.run import StageContext
from myxtts.run_dir import RunDir
from myxtts.settings import load
from myxtts.synthesis.synthesizer import Synthesizer
from myxtts.training.trainer import Evaluation, Trainer
from myxtts.weights import load_folder

pytest_plugins = ["training_fixtures"]
pytestmark = pytest.mark.usefixtures("small")

Losses = list[float]


@pytest.fixture(autouse=True)
def no_judges(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The judges of this machine, next to its venv, are not found."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))


@pytest.fixture
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two speakers, of whose sentences some are held out."""
    folder = tmp_path_factory.getbasetemp() / "evaluated-speech"
    if not folder.exists():
        texts = [text[:20].strip() for text in SENTENCES[:7]]
        write_speakers(folder, dict.fromkeys(("anna", "ben"), texts))
    return folder


def give_losses(monkeypatch: pytest.MonkeyPatch, *losses: float) -> None:
    """Let validations find these, in this order."""
    found = iter(losses)
    for module in ("myxtts.run", "myxtts.evaluation"):
        monkeypatch.setattr(f"{module}.validate", lambda *_: ({"total": next(found)}, {}))


def in_any_order(run: Path) -> list[dict[str, Any]]:
    """What a run has measured: evaluations come some steps later."""
    return sorted(measured(run), key=str)


# Training goes on


@pytest.mark.parametrize(
    ("stage", "where"),
    [*((stage, "data") for stage in ("dvae", "speaker", "gpt", "decoder")), ("gpt", "cpu"), ("decoder", "cpu")],
)
def test_evaluations_on_copies_change_nothing_and_find_the_same(
    stage: str, where: str, start: Start, tmp_path: Path
) -> None:
    if stage == "speaker":
        clips = people(tmp_path / "people", MIN_SPEAKERS)
        start = replace(start, clips=lambda *_: clips)
    flags = f"--stages {stage} --dropout 0.2 --ema-decay 0.9 --max-steps 6 --val-data {start.clips(3)}"
    inside = start(f"{flags} --val-step 3 --evaluate-on model", "inside")
    assert "while training goes on" not in start.out
    aside = start(f"{flags} --val-step 3 --evaluate-on {where} --deterministic", "aside")  # awaits each one
    assert "Evaluations run on cpu while training goes on" in start.out
    never = start(f"{flags} --evaluate-on off", "never")
    for run in (inside, aside):
        assert_equal_tensors(newest(run, stage).weights, newest(never, stage).weights)
        assert_equal_tensors(newest(run, stage).optimizer, newest(never, stage).optimizer)
    assert not steps(never, "validation")
    assert [report["step"] for report in steps(aside, "validation")] == [3, 6]
    assert in_any_order(aside) == in_any_order(inside)
    assert newest(aside, stage).state == newest(inside, stage).state


@pytest.mark.parametrize(
    ("data", "model", "flags", "expected"),
    [
        ("cuda:0", "cuda:0", {}, "data"),
        ("cuda:0", "cuda:0", {"training.enable_graph_mode": False}, "model"),
        ("cuda:0", "cuda:1", {"training.enable_graph_mode": False}, "data"),
        ("cuda:0", "cuda:0", {"training.evaluate_on": "model"}, "model"),
        ("cpu", "cpu", {}, "model"),
    ],
)
def test_by_default_training_goes_on_where_evaluations_cannot_take_its_memory(
    data: str, model: str, flags: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    plan = Plan(torch.device(data), torch.device(model), "buffered" if data == model else "dual")
    settings, unused = load(None, flags).settings, cast(Any, None)
    assert StageContext("gpt", settings, unused, plan, unused, RunDir(tmp_path)).evaluates_on == expected


def test_training_does_not_wait_and_a_newer_copy_replaces_one_that_waits(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first evaluation ends when step 8 is reached; those of steps 4 and 6 are replaced."""
    go_on, tick = threading.Event(), TrainingReports.tick

    def late_validate(*_: object) -> tuple[dict[str, float], dict[str, Any]]:
        assert go_on.wait(60)
        return {"total": 1.0}, {}

    def tick_and_release(self: TrainingReports, step: int) -> None:
        tick(self, step)
        if step == 9:
            go_on.set()

    monkeypatch.setattr(myxtts.evaluation, "validate", late_validate)
    monkeypatch.setattr(TrainingReports, "tick", tick_and_release)
    flags = f"--stages dvae --max-steps 10 --val-step 2 --evaluate-on data --val-data {start.clips(3)}"
    run = start(flags)
    assert {report["step"] for report in steps(run, "validation")} <= {2, 8, 10}
    assert {report["step"] for report in steps(run, "validation")} >= {2, 10}, "the last one is awaited"
    assert "Step 4 is not evaluated, step 6 is: evaluations take longer than the 2 steps between two" in start.out
    assert "Step 6 is not evaluated, step 8 is" in start.out


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore"), "CUDA out of memory"),
        (ValueError(), "ValueError"),
    ],
)
def test_an_evaluation_that_fails_is_reported_and_training_goes_on(
    error: Exception, said: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(myxtts.evaluation, "validate", fail)
    flags = f"--stages dvae --max-steps 4 --val-step 2 --evaluate-on data --val-data {start.clips(3)}"
    run = start(f"{flags} --deterministic")
    assert newest(run, "dvae").step == 4
    lacks_memory = isinstance(error, torch.OutOfMemoryError)
    assert ("from here on training waits for evaluations" in start.out) is lacks_memory
    assert [report["step"] for report in steps(run, "validation")] == ([4] if lacks_memory else [])
    for step in (2,) if lacks_memory else (2, 4):
        assert re.search(rf"The evaluation of step {step} failed: {said}.*; training goes on; --eval", start.out)


def test_a_loss_that_is_not_finite_is_said_and_never_the_best(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_losses(monkeypatch, math.nan, 2.0)
    flags = f"--stages dvae --max-steps 4 --val-step 2 --evaluate-on data --val-data {start.clips(3)}"
    run = start(f"{flags} --deterministic --save-step 2")
    assert "The validation loss of step 2 is not finite" in start.out
    assert [report["is_best"] for report in steps(run, "validation")] == [False, True]
    best = RunDir(run).checkpoints("dvae").best()
    assert best is not None and best.step == 4


def test_nothing_is_captured_while_a_piece_of_an_evaluation_runs(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture takes the lock that every piece holds; it can take it between two of them."""
    held, piece = list[bool](), Evaluator._piece

    def is_free() -> bool:
        taken = list[bool]()

        def attempt() -> None:
            taken.append(CAPTURING.acquire(blocking=False))
            if taken[0]:
                CAPTURING.release()

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        return taken[0]

    def observed(self: Evaluator) -> Any:
        held.append(is_free())
        context = piece(self)
        enter = type(context).__enter__

        class Observed:
            def __enter__(self) -> None:
                enter(context)
                held.append(is_free())

            def __exit__(self, *error: Any) -> Any:
                return context.__exit__(*error)

        return Observed()

    monkeypatch.setattr(Evaluator, "_piece", observed)
    start(f"--stages gpt --max-steps 2 --evaluate-on data --val-data {start.clips(3)}")
    assert held[:4] == [True, False, True, False] and len(held) >= 6, "the feed, the batches, the end"


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["data", "cpu"])
def test_on_a_gpu_evaluations_leave_captured_steps_alone(where: str, start: Start, speech: Path) -> None:
    """The decoder is captured again in every phase, while an evaluation may be running."""
    flags = "--stages dvae,gpt,decoder --deterministic --ema-decay 0.9 --max-steps 20 --val-fraction 0.5"
    aside = start(f"{flags} --val-step 3 --evaluate-on {where}", "aside", speech)
    assert f"Evaluations run on {'cpu' if where == 'cpu' else 'cuda:0'} while training goes on" in start.out
    assert start.out.count("captured as a CUDA graph") == 3 and "failed" not in start.out
    never = start(f"{flags} --evaluate-on off", "never", speech)
    for stage in ("dvae", "gpt", "decoder"):
        assert_equal_tensors(newest(aside, stage).weights, newest(never, stage).weights)
        assert_equal_tensors(newest(aside, stage).optimizer, newest(never, stage).optimizer)
        assert len([report for report in steps(aside, "validation") if report["stage"] == stage]) == 8


@pytest.mark.gpu
def test_on_a_gpu_evaluations_find_what_the_model_role_finds_and_speak(start: Start, speech: Path) -> None:
    flags = "--stages dvae,gpt,decoder --max-steps 20 --val-step 10 --val-fraction 0.5"
    run = start(f"{flags} --spoken-sentences 3 --evaluate-on data", corpus=speech)
    assert "Evaluations run on cuda:0 while training goes on" in start.out
    assert not any(word in start.out for word in ("failed", "not spoken", "speak no sentences")), start.out
    spoken = {(record["stage"], record["step"]) for record in steps(run, "spoken")}
    assert spoken >= {("gpt", 20), ("decoder", 20)}, "the last ones are awaited"
    for record in steps(run, "spoken"):
        for row in record["sentences"]:
            assert sf.info(run / "samples" / row["file"]).samplerate == 24000
    inside = start(f"{flags} --deterministic --evaluate-on model", "inside", speech)
    aside = start(f"{flags} --deterministic --evaluate-on data", "aside", speech)
    ours, theirs = (
        {(report["stage"], report["step"]): report["losses"]["total"] for report in steps(folder, "validation")}
        for folder in (aside, inside)
    )
    assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.two_gpus
def test_on_two_gpus_evaluations_run_on_the_data_gpu(start: Start, speech: Path) -> None:
    flags = "--stages gpt --deterministic --max-steps 20 --val-step 5 --val-fraction 0.5"
    flags += " --data-gpu 0 --model-gpu 1"
    never = start(f"{flags} --evaluate-on off", "never", speech)
    aside = start(f"{flags} --evaluate-on data", "aside", speech)
    assert "Evaluations run on cuda:0 while training goes on" in start.out and "failed" not in start.out
    assert_equal_tensors(newest(aside).weights, newest(never).weights)


def test_a_last_evaluation_that_a_kill_cut_short_is_repeated(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint is there by then, and the stage is done."""
    flags = f"--stages dvae --dvae-steps 2 --evaluate-on data --val-data {start.clips(3)}"
    expected = newest(start(flags, "whole"), "dvae").state
    add = Trainer._add_evaluations

    def die(self: Trainer, wait: bool = False) -> bool:
        if wait:
            self.ctx.checkpoints.wait()
            raise PipelineError("killed")
        return add(self, wait)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_add_evaluations", die)
        run = start(flags, "killed", code=1)
    assert newest(run, "dvae").state["pending"] == 2
    assert newest(start(flags, "killed"), "dvae").state == expected


def test_weights_that_cannot_be_copied_fail_one_evaluation(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Evaluator) -> None:
        raise RuntimeError("the copy failed")

    monkeypatch.setattr(Evaluator, "_take", fail)
    start(f"--stages dvae --max-steps 2 --evaluate-on data --val-data {start.clips(3)}")
    assert "The evaluation of step 2 failed: the copy failed" in start.out


# Results that come later


def test_early_stopping_acts_at_the_next_validation_whether_a_run_was_stopped_or_not(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5}
    found: Callable[..., Evaluation] = lambda _, step, __: Evaluation(step, {"total": losses.get(step, 0.5)})  # noqa: E731
    monkeypatch.setattr(Evaluator, "_work", found)
    flags = f"--stages dvae --max-steps 50 --val-step 2 --early-stop 2 --val-data {start.clips(3)}"
    flags += " --evaluate-on data"
    whole = start(flags, "whole")
    assert newest(whole, "dvae").step == 10, "the second validation without improvement is that of step 8"
    assert (newest(whole, "dvae").state["done"], newest(whole, "dvae").state["stale_validations"]) == (True, 2)
    with monkeypatch.context() as patch:
        stop_at(patch, 5, 8, 9)
        for expected in (5, 8, 9, 10):
            parts = start(flags, "parts")
            assert newest(parts, "dvae").step == expected
    assert_same_checkpoints(parts, whole, "dvae")
    assert in_any_order(parts) == in_any_order(whole)
    start(flags, "whole")
    assert newest(whole, "dvae").step == 10, "the stage has ended"


def test_an_evaluation_that_a_kill_cut_short_is_repeated(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = (
        f"--stages gpt --max-steps 4 --val-step 2 --save-step 2 --ema-decay 0.5 --deterministic "
        f"--val-data {start.clips(3)} --evaluate-on data"
    )
    whole, tick = start(flags, "whole"), TrainingReports.tick

    class KilledError(Exception):
        pass

    def hang(self: Evaluator, *_: object) -> None:
        while not self._is_closed:
            time.sleep(0.01)
        raise myxtts.evaluation._Closed

    def die(self: TrainingReports, step: int) -> None:
        tick(self, step)
        if step == 3:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "_work", hang)
        patch.setattr(TrainingReports, "tick", die)
        with pytest.raises(KilledError):
            start(flags, "killed")
    killed = start.folder / "killed"
    assert (newest(killed).step, newest(killed).state["pending"]) == (2, 2)
    start(flags, "killed")
    assert_same_checkpoints(killed, whole, "gpt")
    assert in_any_order(killed) == in_any_order(whole)
    assert [report["step"] for report in steps(killed, "validation")] == [2, 4]


def test_the_best_weights_are_kept_though_their_step_was_not_saved(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The averaged weights of step 2 come from the copy; those of steps 1 and 3 were not kept, or not for long."""
    give_losses(monkeypatch, 9.0, 3.0, 1.0, 2.0, 2.5)
    aside = f"--val-step 1 --evaluate-on data --deterministic --val-data {start.clips(3)}"
    run = start(f"--stages dvae,gpt --dvae-steps 1 --max-steps 4 --ema-decay 0.5 {aside}")
    kept = {path.name for path in (run / "gpt").glob("*step-*")}
    assert kept == {"evaluated-step-00000002", "step-00000004"}
    saved = start("--stages dvae,gpt --dvae-steps 1 --ema-decay 0.5 --evaluate-on off --save-step 2", "saved")
    optimizer = RunDir(saved).checkpoints("gpt").load(2).optimizer
    expected = {name: value for name, value in optimizer.items() if name.startswith("ema.gpt.")}
    assert expected
    best = RunDir(run).checkpoints("gpt").best(optimizer=False)
    assert best is not None and (best.step, best.notes.val_loss) == (2, 1.0)
    assert set(best.weights) == set(newest(run).weights)
    for name, value in expected.items():
        torch.testing.assert_close(best.weights[name.removeprefix("ema.")], value, rtol=0, atol=0)
    start.command("export", run, "--out", tmp_path / "best", "--best")
    head = load_folder(tmp_path / "best").model.gpt.mel_head.weight
    assert torch.equal(head, best.weights["gpt.mel_head.weight"])
    assert newest(run).step == 4, "nothing continues from weights without an optimiser"


# Sound


SPEAK = "--spoken-sentences 2 --val-fraction 0.5 --evaluate-on data --deterministic"


def test_evaluations_speak_held_out_sentences_and_leave_them_in_the_run(start: Start, speech: Path) -> None:
    run = start(f"--stages dvae,gpt,decoder --max-steps 4 --val-step 2 {SPEAK}", corpus=speech)
    said = start.out.replace("\n", "")
    plain = start("--stages dvae,gpt,decoder --max-steps 4 --val-fraction 0.5 --evaluate-on off", "plain", speech)
    for stage in ("gpt", "decoder"):
        assert_equal_tensors(newest(run, stage).weights, newest(plain, stage).weights)
    records = steps(run, "spoken")
    assert [(record["stage"], record["step"]) for record in records] == [
        ("gpt", 2), ("gpt", 4), ("decoder", 2), ("decoder", 4)
    ]  # fmt: skip
    assert "spoken at step 4  2 sentences" in said and str(run / "samples" / "gpt-00000004") in said
    for record in records:
        for row in record["sentences"]:
            heard, recorded = (sf.info(run / "samples" / row[name]) for name in ("file", "recording"))
            assert (heard.subtype, recorded.subtype) == ("OPUS", "OPUS")
            assert recorded.duration == pytest.approx(1.35, abs=0.1)
            assert row["text"] in [text[:20].strip() for text in SENTENCES]
    first, last = ([row["text"] for row in record["sentences"]] for record in (records[0], records[-1]))
    assert first == last, "a fixed set"
    events = b"".join(path.read_bytes() for path in (run / "tensorboard" / "gpt").iterdir())
    for tag in (b"spoken/0", b"spoken/1", b"gpt/alignment", b"gpt/spoken", b"gpt/recorded"):
        assert tag in events, tag
    page = (run / "report.html").read_text(encoding="utf-8")
    players = re.findall(r'<span class="sound"><span>([^<]*)</span> <audio[^>]*src="data:audio/mpeg', page)
    assert players[-3:] == ["recording", "decoder, step 2", "decoder, step 4"], "the recording first"
    assert re.search(r'<figcaption>gpt: alignment</figcaption><img class="picture" src="data:image/png', page)


def test_a_stage_that_trains_no_gpt_speaks_as_the_readers_of_its_run(
    start: Start, speech: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, readers, found = myxtts.evaluation.synthesizer_of, [object()], list[object]()

    def seen(model: XTTS, *arguments: Any, **options: Any) -> Synthesizer:
        found.append(arguments[4])
        return original(model, *arguments[:4], **options)

    monkeypatch.setattr(myxtts.evaluation, "readers_of", lambda _: readers)
    monkeypatch.setattr(myxtts.evaluation, "synthesizer_of", seen)
    start(f"--max-steps 2 --dvae-steps 1 --decoder-steps 2 --val-step 2 {SPEAK}", corpus=speech)
    assert found[0] == [] and found[-1] is readers


@pytest.mark.parametrize("where", ["model", "data"])
def test_a_failure_to_speak_costs_the_sentences_and_nothing_else(
    where: str, start: Start, speech: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Speaker, "speak", fail)
    flags = f"--stages dvae,gpt --dvae-steps 1 --max-steps 6 --val-step 2 {SPEAK} --evaluate-on {where}"
    run = start(flags, corpus=speech)
    assert start.out.count("The sentences of step 2 were not spoken: CUDA out of memory") == 1
    assert start.out.count("were not spoken") == 1 and "which speak no sentences" in start.out
    found = [report["step"] for report in steps(run, "validation") if report["stage"] == "gpt"]
    assert found == [2, 4, 6] and newest(run).step == 6


def test_few_samples_of_a_stage_are_kept_the_first_and_the_newest_among_them(tmp_path: Path) -> None:
    speaker = Speaker.__new__(Speaker)
    speaker._folder, speaker._stage = tmp_path, "gpt"
    for step in range(100, 3100, 100):
        (tmp_path / f"gpt-{step:08d}").mkdir()
        speaker._prune()
    (tmp_path / "decoder-00000100").mkdir()
    kept = sorted(int(path.name[4:]) for path in tmp_path.glob("gpt-*"))
    assert len(kept) == MOST_SAMPLES and kept[0] == 100 and kept[-1] == 3000
    assert max(later - earlier for earlier, later in pairwise(kept)) <= 900


def test_the_alignment_shows_where_in_the_text_each_code_attends(start: Start) -> None:
    """Of the only head: the weights of attention add up to at most 1, and the future has none."""
    shown = {}
    image = MetricsLog.image

    def seen(self: MetricsLog, tag: str, array: Any, step: int) -> None:
        shown[tag] = array
        image(self, tag, array, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsLog, "image", seen)
        start(f"--stages gpt --max-steps 1 --val-data {start.clips(3)}")
    alignment = shown["gpt/alignment"]
    ids, codes = alignment.shape
    assert 3 <= ids <= 20 and 10 <= codes <= 32
    assert (alignment >= 0).all() and (alignment.sum(0) <= 1).all() and alignment.sum() > 0


def test_without_sentences_to_hold_out_training_says_why_and_goes_on(start: Start) -> None:
    start(f"--stages dvae,gpt --max-steps 2 --spoken-sentences 2 --val-data {start.clips(3)}")
    assert "Evaluations speak no sentences: Training clips say all 3 held-out sentences too" in start.out


# Judges, and the GPT that they choose


JUDGE = """#!{python} -S
import json, os, pathlib, sys
assert os.nice(0) == 19, "judges must not take the CPU from the data"
items = pathlib.Path(sys.argv[-1])
print(json.dumps({{"judges": ["Fake"]}}))
for item in json.loads(items.read_text(encoding="utf-8")):
    step = int(item["file"].split("/")[0].rpartition("-")[2])
    assert (items.parent / item["file"]).is_file() and (items.parent / item["reference"]).is_file()
    item |= {{"words": 10, "word_edits": EDITS.get(step, 9), "letters": 10, "letter_edits": 1}}
    print(json.dumps(item | {{"similarity": 0.1 * step, "mos": 2.0}}), flush=True)
"""


@pytest.fixture
def judges(tmp_path: Path) -> Callable[[dict[int, int]], None]:
    """Installs judges that mishear so many words of ten, by the step."""

    def make(edits: dict[int, int]) -> None:
        install(tmp_path / ".judge", JUDGE.replace("EDITS", f"{{{edits}}}"))

    return make


def test_judges_score_what_is_spoken_and_choose_the_gpt_that_the_decoder_is_trained_on(
    start: Start, speech: Path, judges: Callable[[dict[int, int]], None], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    judges({2: 3, 4: 6})
    flags = f"--max-steps 4 --dvae-steps 1 --decoder-steps 2 --val-step 2 {SPEAK}"
    run = start(f"--stages dvae,gpt {flags} --best-by wer --keep 1", corpus=speech)
    assert {record["step"]: record["scores"]["wer"] for record in steps(run, "judged")} == {2: 0.3, 4: 0.6}, (
        start.out
    )
    assert "judged at step 4  WER 0.60  similarity 0.40  MOS 2.00" in start.out
    events = b"".join(path.read_bytes() for path in (run / "tensorboard" / "gpt").iterdir())
    assert b"judges/wer" in events and "Words misheard" in (run / "report.html").read_text(encoding="utf-8")
    start(f"--stages dvae,gpt,decoder {flags} --best-by wer --keep 1", corpus=speech)
    used = RunDir(run).checkpoints("gpt").used()
    assert used is not None and (used.step, used.folder.name) == (2, "evaluated-step-00000002")
    assert newest(run, "decoder").notes.trained_on["gpt"] == used.notes.fingerprint
    assert RunDir(run).status("decoder").state == "complete"
    caplog.clear()
    for name, extra in (("usual", []), ("best", ["--best"])):
        start.command("export", run, "--out", tmp_path / name, *extra)
        head = load_folder(tmp_path / name).model.gpt.mel_head.weight
        assert torch.equal(head, used.weights["gpt.mel_head.weight"])
    assert "was trained on" not in caplog.text, "these belong together"
    # Without the flag the run uses its newest GPT: the decoder is stale, which is said, and so does --best.
    start(f"--stages dvae,gpt {flags}", corpus=speech)
    why = "decoder was trained on the gpt of step 2, and this is the gpt of step 4"
    assert f"decoder  stale, and left as it is: {why}" in start.out
    start.command("export", run, "--out", tmp_path / "mixed")
    assert why in caplog.text and "trains decoder again" in caplog.text


def test_a_choice_without_what_it_needs_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("myxtts.evaluation.JUDGE_FOLDER", "no-judges")  # this copy may have some
    monkeypatch.setattr("myxtts.evaluation.find_spec", lambda _: None)
    run = start("--stages gpt --best-by wer", code=2)
    assert "--best-by wer needs the judges. No judges of speech in" in start.err and not run.exists()
    start("--stages gpt --best-by loss --evaluate-on off", code=2)
    assert "--best-by loss needs evaluations, and --evaluate-on is off" in start.err
    start("--stages gpt --early-stop 2 --evaluate-on off", code=2)
    assert "--early-stop 2 needs evaluations" in start.err


def test_the_page_shows_the_curves_of_the_judges(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.begin("gpt", 0)
    for step in (10, 20):
        log._append({"kind": "judged", "stage": "gpt", "step": step, "scores": {"wer": 0.5, "mos": 3.0}})
    log.close()
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Words misheard" in page and "MOS, 5 is excellent" in page and "Similarity to the speaker" not in page
