"""Profiling: planted bottlenecks are found in the real pipeline, the data side is analysed, scripts lead there."""

from __future__ import annotations

import html
import json
import logging
import runpy
import shlex
import sys
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import load_command
from rich.console import Console
from training_fixtures import FLAGS, Clips, clips, small, train

import myxtts.cli
from myxtts.config import DataSettings, Settings
from myxtts.data.batches import Gatherer, References
from myxtts.observe.findings import Finding
from myxtts.observe.trace import Timing
from myxtts.pipeline.feed import open_codes
from myxtts.pipeline.frontend import DvaeFrontend
from myxtts.run import prepare_corpus
from myxtts.terminal import show_profile
from myxtts.tools import dry_run
from myxtts.tools.profile import (
    AudioAnalysis,
    FeedAnalysis,
    Profile,
    TextAnalysis,
    data_findings,
    profile,
    time_host,
)

__all__ = ["clips", "small"]

ROOT = Path(__file__).parent.parent
SLOW_S = 0.2
"""A planted bottleneck takes this long for each batch: many times a step, on a busy machine too."""
pytestmark = pytest.mark.usefixtures("small")


def load_flags(corpus: Path, flags: str = "") -> Settings:
    return load_command(f"--train-data {corpus} {FLAGS} {flags}").settings


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm up for one step: there is nothing to compile."""
    monkeypatch.setattr(dry_run, "WARM_UP_STEPS", 1)
    monkeypatch.setattr(dry_run, "SPLIT_PASSES", 1)
    monkeypatch.setattr(dry_run, "KERNEL_STEPS", 1)


@pytest.fixture
def run(clips: Clips) -> Callable[..., Profile]:
    """A profile of the quickest stage: `run("--num-workers 2")`, or with options of `profile`."""

    def start(flags: str = "", **options: Any) -> Profile:
        settings = load_flags(clips(4), flags)
        return profile(settings, prepare_corpus(settings), **{"num_steps": 6, "stage": "dvae"} | options)

    return start


def slow_down(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    original = getattr(owner, name)

    def slow(*arguments: Any) -> Any:
        time.sleep(SLOW_S)
        return original(*arguments)

    monkeypatch.setattr(owner, name, slow)


@pytest.fixture
def slow_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch, Gatherer, "fill")


def rows(found: Profile) -> dict[str, Any]:
    return {row.phase.strip(): row for row in found.rows}


# Planted bottlenecks


@pytest.mark.parametrize(
    ("owner", "name", "phase"), [(Gatherer, "fill", "gather"), (DvaeFrontend, "encode", "encode")]
)
def test_a_slow_phase_is_named_with_its_cost(
    run: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch, owner: type, name: str, phase: str
) -> None:
    slow_down(monkeypatch, owner, name)
    found = run()
    assert found.verdict is not None
    assert found.verdict.bound == phase
    assert found.findings[0].code == f"{phase}-slow"
    assert rows(found)[phase].p95_ms >= rows(found)[phase].mean_ms >= 1000 * SLOW_S
    if phase == "gather":
        assert found.findings[0].gain is not None and found.findings[0].gain > 1.5
        assert rows(found)["gather"].share > 0.8
        assert found.verdict.headroom is not None and found.verdict.headroom > 1.5


@pytest.mark.usefixtures("slow_gathering")
def test_full_buffers_do_not_hide_a_slow_feed(run: Callable[..., Profile]) -> None:
    """Batches waiting in the buffers would last for all measured steps, but not for a training."""
    found = run("--model-start-delay 5 --prefetch-buffer-size 5 --buffer-size 8")
    assert found.verdict is not None
    assert found.verdict.bound == "gather"
    assert found.clips_per_s < 1.3 * 2 / SLOW_S


def test_without_a_bottleneck_no_data_stage_is_blamed(run: Callable[..., Profile]) -> None:
    found = run(stage="gpt", num_steps=3)
    assert found.verdict is not None
    assert found.verdict.bound in ("train", "host")
    assert not [finding for finding in found.findings if finding.level == "warn" and finding.setting]


@pytest.mark.usefixtures("slow_gathering")
def test_a_batch_begun_before_the_first_measured_step_is_followed_to_its_phase(clips: Clips) -> None:
    settings = load_flags(clips(4))
    measured = dry_run.DryRun(settings, prepare_corpus(settings), "dvae").measure(3, traced=True)
    gathered = {span.batch for span in measured.spans if span.name == "gather"}
    waited = [span.batch for span in measured.spans if span.name == "wait" and span.duration_us > 5000]
    assert waited and set(waited) <= gathered


def test_codes_are_all_there_when_the_long_run_is_measured(
    run: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    steady = dry_run.DryRun.steady

    def look_first(self: dry_run.DryRun, *given: int) -> Any:
        assert open_codes(self.ctx, self.ctx.prepared.train).known(np.arange(4)).all()
        return steady(self, *given)

    monkeypatch.setattr(dry_run.DryRun, "steady", look_first)
    run(stage="gpt", num_steps=1)


def test_memory_that_grows_below_an_earlier_peak_is_a_leak(
    run: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = iter(range(1000, 10_000, 5))
    monkeypatch.setattr(dry_run, "allocated_mb", lambda _: float(next(held)))
    monkeypatch.setattr(dry_run.DryRun, "_gpus", lambda _: {"gpu": 0})
    assert run(num_steps=20).findings[0].code == "memory-growth"


# What a profile holds


def test_a_profile_says_everything_on_the_screen_and_as_json(
    run: Callable[..., Profile],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow_down(monkeypatch, torch.Tensor, "backward")
    with caplog.at_level(logging.INFO):
        found = run(stage="gpt", num_steps=2, kernels=True)
    for phase in ("Setting up the stage gpt", "in the first epoch", "every later epoch", "one batch"):
        assert phase in caplog.text
    table = rows(found)
    assert {"load and decode", "gather", "upload", "encode (first)", "encode", "wait", "train"} <= table.keys()
    assert table["forward"].mean_ms + table["backward"].mean_ms == pytest.approx(table["train"].mean_ms)
    assert found.kernels is not None and sum(kernel.share for kernel in found.kernels.kernels) <= 1.001
    assert found.kernels.kernels[0].ms_per_step >= found.kernels.kernels[-1].ms_per_step > 0
    record = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert record["verdict"]["sentence"] == found.verdict.sentence if found.verdict else False
    assert sum(record["verdict"]["shares"].values()) == pytest.approx(1)
    assert record["first_epoch_clips_per_s"] > 0

    screen = StringIO()
    show_profile(found, Console(file=screen, width=160))
    shown = screen.getvalue()
    assert shown.startswith(record["verdict"]["sentence"][:60])
    assert all(stage in shown for stage in ("gather", "backward", "update", "aten::", "Ring host"))

    assert found.trace is not None
    found.trace.write_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"gather", "encode", "train", "update"} <= {event["name"] for event in events}


def test_the_verdict_is_put_on_the_page_of_the_run_it_is_about(
    clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(run, clips(4), "--stages dvae --max-steps 2") == 0
    flags = "--stages dvae --num-steps 2 --vocab-size 256 --language en --max-mel-frames 128 --dropout 0"
    for corpus, size, is_its_own in ((clips(3), "2", False), (clips(4), "1", False), (clips(4), "2", True)):
        capsys.readouterr()
        command = f"profile --train-data {corpus} --checkpoint-dir {run} --batch-size {size} {flags}"
        assert myxtts.cli.main(shlex.split(command)) == 0
        shown = capsys.readouterr().out
        assert ("On the page of the run" in shown) == is_its_own
        assert "Stage dvae" in shown
        assert (run / "verdict.json").exists() == (run / "trace.jsonl").exists() == is_its_own
    sentence = json.loads((run / "verdict.json").read_text())["sentence"]
    assert html.escape(sentence) in (run / "report.html").read_text()


def kernel(start_us: float, end_us: float, stream: int, name: str = "kernel", place: str = "CUDA") -> Any:
    times = SimpleNamespace(start=start_us, end=end_us)
    return SimpleNamespace(
        name=name, time_range=times, device_resource_id=stream, device_type=SimpleNamespace(name=place)
    )


def test_kernels_of_the_training_stream_show_launch_gaps_and_waits_of_the_host() -> None:
    warming = [kernel(0, 5, stream=7)]  # the front end, long before training
    training = [kernel(1000 + 100 * number, 1060 + 100 * number, stream=8) for number in range(10)]
    syncs = [
        kernel(at, at + 1, 0, "cudaStreamSynchronize", "CPU") for at in (3, 1010, 1110, 1210, 1310, 1410, 9999)
    ]
    share, waits = dry_run.kernel_occupancy([*warming, *training, *syncs], num_steps=3)
    assert share == pytest.approx(600 / 960)
    assert waits == pytest.approx(1.0)  # five inside, two of which are the measurement's own
    assert dry_run.kernel_occupancy([], 3) == (None, None)
    steps = [kernel(1000, 1001, 0, dry_run.STEP_RANGE, "CPU")]  # work before the first step is no launch gap
    filling = [kernel(100 * number, 100 * number + 5, stream=8) for number in range(9)]
    assert dry_run.kernel_occupancy([*filling, *steps, *training], num_steps=3)[0] == share


@pytest.mark.gpu
def test_on_a_gpu_kernels_work_and_grade_are_there(run: Callable[..., Profile]) -> None:
    found = run(stage="gpt", num_steps=20, kernels=True)
    assert found.verdict is not None and found.kernels is not None
    assert found.verdict.grade
    assert found.kernels.kernel_share is not None and 0 < found.kernels.kernel_share <= 1
    assert found.verdict.mfu is not None and 0 < found.verdict.mfu < 1
    assert not any(kernel.name.startswith("aten::") for kernel in found.kernels.kernels)
    assert {"upload", "encode", "train", "update"} <= rows(found).keys()


# The data side


def test_the_data_side_alone_gives_three_analyses(run: Callable[..., Profile]) -> None:
    found = run(data_only=True, num_steps=4)
    assert found.verdict is None and found.data is not None
    text, audio, feed = found.data.text, found.data.audio, found.data.feed
    assert text.normalize.count == text.tokenize.count == text.num_sentences == 4
    assert text.detect_ms is None
    assert 0 < text.sample_ms < 100
    assert audio.decode.count == 4 and audio.decode.mean_ms > 0 and audio.decode.std_ms >= 0
    assert audio.gather.count == 4 and Path(audio.slowest).parent.name == "wavs"
    assert feed.host.count == feed.feed.count == 4
    assert feed.step_ms > 0 and not feed.step_is_given
    record = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert record["data"]["feed"]["idle_share"] == pytest.approx(feed.idle_share)

    screen = StringIO()
    show_profile(found, Console(file=screen, width=120))
    for heading in ("Text preprocessing", "Audio loading", "Pipeline efficiency", "Estimated GPU idle", "CV"):
        assert heading in screen.getvalue()


def test_all_corpora_are_profiled_in_their_languages(clips: Clips) -> None:
    named = " ".join(f"--train-data {clips(number)}:language=en" for number in (2, 3))
    settings = load_command(f"{named} {FLAGS.replace('--language en', '')}").settings
    assert settings.data.language is None
    found = profile(settings, prepare_corpus(settings), num_steps=2, stage="dvae", data_only=True)
    assert found.data is not None
    assert found.data.text.detect_ms is None, "the languages are given"
    assert found.data.text.normalize.count == found.data.audio.decode.count == 5


@pytest.mark.usefixtures("slow_gathering")
def test_a_slow_host_is_set_against_the_step_of_the_users_gpu(
    run: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("myxtts.tools.profile.usable_cores", lambda: 4)
    found = run(data_only=True, num_steps=4, step_ms=1000 * SLOW_S / 4)
    assert found.data is not None
    assert found.data.feed.idle_share == pytest.approx(0.75, abs=0.1)
    first = found.findings[0]
    assert (first.code, first.level) == ("data-feed-slow", "warn")
    assert (first.setting, first.value) == ("data.num_workers", 4)
    assert first.gain == pytest.approx(4, rel=0.3)


@pytest.mark.usefixtures("slow_gathering")
def test_more_threads_gather_more(clips: Clips, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("myxtts.tools.profile.usable_cores", lambda: 4)
    sources: list[bool] = []

    def crops(self: References, seed: int, epoch: int, drawn: Any) -> Any:
        found = own_crops(self, seed, epoch, drawn)
        sources.append(bool((found.sources != drawn).all()))
        return found

    own_crops = References.crops
    monkeypatch.setattr(References, "crops", crops)
    timed = []
    for count in (1, 4):
        settings = load_flags(clips(4), f"--single-speaker --num-workers {count}")
        with dry_run.temporary_codes(prepare_corpus(settings)) as apart:
            timed.append(time_host(dry_run.DryRun(settings, apart), 8))
    assert timed[0].mean_ms > 1.5 * timed[1].mean_ms
    assert len(sources) > 16 and all(sources), "the references are other clips, as in training"


TEXT = TextAnalysis(Timing(9, 0.1), Timing(9, 0.1), None, 1000)
AUDIO = AudioAnalysis(Timing(9, 2.0, 1.0), Timing(9, 0.5, 0.1), 16, "wavs/a.wav")


def feed_of(supply_ms: float, step_ms: float, **changes: Any) -> FeedAnalysis:
    supply = Timing(9, supply_ms)
    parts = {"host": supply, "first_epoch": supply, "feed": supply, "phases": {}, "step_ms": step_ms}
    return FeedAnalysis(**parts | {"step_is_given": False, "num_gpus": 1} | changes)


def found_in(feed: FeedAnalysis, **settings: Any) -> dict[str, Finding]:
    return {finding.code: finding for finding in data_findings(TEXT, AUDIO, feed, DataSettings(**settings))}


def test_findings_of_the_data_side_follow_its_figures() -> None:
    quick = found_in(feed_of(5.0, 50.0))
    assert quick.keys() == {"data-feed-fast", "data-audio-packed", "data-text-once"}
    assert "10.0 times as fast" in quick["data-feed-fast"].what
    assert "64.0 times as fast" in quick["data-audio-packed"].what
    slow = found_in(feed_of(100.0, 50.0), prefetch_to_gpu=False, native_loading=False)
    assert slow["data-feed-slow"].setting == "data.prefetch_to_gpu"
    assert slow["data-feed-slow"].gain == pytest.approx(2.0)
    assert slow["data-audio-decoded"].value is True
    first = found_in(feed_of(5.0, 50.0, first_epoch=Timing(9, 100.0)))
    assert "2.0 times as slow" in first["data-first-epoch"].what


# The old names


@pytest.mark.parametrize(
    ("script", "leads_to"),
    [
        ("quick_gpu_fix.py", "tune"),
        ("utilities/dual_gpu_bottleneck_profiler.py", "profile"),
        ("utilities/analyze_data_pipeline_bottleneck.py", "profile --data-only"),
        ("utilities/diagnose_gpu_bottleneck.py", "profile"),
        ("utilities/gpu_profiler.py", "profile --kernels"),
        ("validate_dual_gpu_pipeline.py", "check --gpus"),
        ("test_gpu_optimization.py", "check --gpus"),
        ("utilities/validate_gpu_optimization.py", "check"),
    ],
)
def test_a_script_is_a_door_to_its_command(script: str, leads_to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(myxtts.cli, "main", lambda arguments: called.append(arguments) or 7)
    monkeypatch.setattr(sys, "argv", [script, "--batch-size", "16"])
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert ended.value.code == 7
    assert called == [[*shlex.split(leads_to), "--batch-size", "16"]]
    assert len((ROOT / script).read_text().splitlines()) <= 20


def test_the_commands_run_and_answer_in_json(
    clips: Clips,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    shared = (
        f"--train-data {clips(4)} --language en --vocab-size 256 --max-mel-frames 128 --max-text-length 40 "
        "--num-workers 1 --model-start-delay 0 --val-fraction 0 --stage dvae --json"
    )
    command = f"profile --batch-size 2 --num-batches 2 {shared} --trace {tmp_path / 'trace.json'}"
    assert myxtts.cli.main(shlex.split(command)) == 0
    assert json.loads(capsys.readouterr().out)["num_steps"] == 2
    assert (tmp_path / "trace.json").exists() and f"Trace written to {tmp_path / 'trace.json'}" in caplog.text
    for flags, problem in (("--trace no/x.json", "no: no such folder"), ("--trace x --data-only", "--data-only")):
        assert myxtts.cli.main(shlex.split(f"profile {flags} {shared}")) == 2
        assert problem in capsys.readouterr().err

    from test_tune import Pretended

    measure = Pretended(mb_per_clip=0)
    monkeypatch.setattr(
        "myxtts.tools.tune.try_out_apart", lambda settings, *_: measure(SimpleNamespace(settings=settings))
    )
    command = f"tune --batch-size 2 --max-batch 4 --minutes 1 --apply {shared}"
    assert myxtts.cli.main(shlex.split(command)) == 0
    assert json.loads(capsys.readouterr().out)["values"] == {"data.batch_size": 4}
    assert (tmp_path / "configs" / "config.yaml").read_text() == "data:\n  batch_size: 4\n"
