"""Small trainings for tests: corpora, networks of a few thousand weights, and whole runs of the command line."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SENTENCES, write_corpus
from torch import Tensor

import myxtts.data.batches
import myxtts.model.flow
import myxtts.model.vocoder
import myxtts.pipeline.frontend
import myxtts.training.recipes
from myxtts.checkpoints import LoadedCheckpoint
from myxtts.cli import main
from myxtts.config import Settings, stages_of
from myxtts.data.batches import Sizes
from myxtts.devices import Machine
from myxtts.model.gpt import GPTDims
from myxtts.model.vocoder import Discriminators, Resolution
from myxtts.model.xtts import SIZES, XTTSDims
from myxtts.observe.metrics import read_metrics
from myxtts.pipeline import feed
from myxtts.pipeline.feed import Depths, Feed
from myxtts.reports import TrainingReports
from myxtts.run_dir import RunDir
from myxtts.training.recipes import DvaeRecipe

SMALL = XTTSDims(
    gpt=GPTDims(layers=1, dim=64, heads=1, num_codes=32, encoder_layers=1),
    dvae_hidden=16,
    dvae_codebook_dim=16,
    dvae_blocks=1,
    vocoder_channels=64,
    speaker_dim=16,
    speaker_filters=(8, 8, 8, 8),
)
_SHORT_SEGMENT = 4
STAGES = stages_of(Settings())
"""Those that a run on the corpora of `Clips` trains: their clips name no speakers."""
FLAGS = (
    "--language en --vocab-size 256 --batch-size 2 --max-mel-frames 128 --max-text-length 40 --num-workers 1 "
    "--model-start-delay 0 --warmup-steps 0 --log-step 1 --val-step 100 --save-step 100 --val-fraction 0 "
    "--lr 1e-3 --max-steps 4 --dropout 0 --code-noise 0 --text-dropout 0 --ema-decay 0"
)
"""Of every run here, unless it says otherwise."""
MEASURED = ("losses", "lr", "grad_norm", "epoch", "skipped", "total_steps")
"""What a report says of the training; the rest is about time."""


def shrink(monkeypatch: pytest.MonkeyPatch, *, with_gpus: bool = False) -> None:
    """Make `tiny` a network of a few thousand weights, with small discriminators and short segments."""
    discriminators = partial(Discriminators, periods=(2,), resolutions=(Resolution(256, 64, 256),))
    monkeypatch.setitem(SIZES, "tiny", SMALL)
    if not with_gpus:
        monkeypatch.setattr(Machine, "look", classmethod(lambda cls: cls()))
    monkeypatch.setattr(myxtts.training.recipes, "Discriminators", discriminators)
    monkeypatch.setattr(myxtts.model.vocoder, "RESBLOCK_KERNELS", (3,))
    monkeypatch.setattr(myxtts.model.vocoder, "RESBLOCK_DILATIONS", (1,))
    monkeypatch.setattr(myxtts.data.batches, "SEGMENT_CODES", _SHORT_SEGMENT)
    monkeypatch.setattr(myxtts.data.batches, "FLOW_CODES", 2 * _SHORT_SEGMENT)
    monkeypatch.setattr(myxtts.model.flow, "CHANNELS", 16)
    monkeypatch.setattr(myxtts.pipeline.frontend, "CROP_SAMPLES", 8000)
    monkeypatch.setattr(myxtts.training.recipes, "VARIED_SAMPLES", 6400)


@pytest.fixture
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Small networks in one thread, away from the repository, whose configs/config.yaml would be read.

    Only tests marked `gpu` see the machine's GPUs.
    """
    shrink(monkeypatch, with_gpus=request.node.get_closest_marker("gpu") is not None)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Clips:
    return Clips(tmp_path_factory.getbasetemp())


@dataclass(frozen=True)
class Clips:
    """Corpora of short clips, prepared once for all tests of a session."""

    base: Path

    def __call__(self, count: int = 4) -> Path:
        """A corpus of so many clips, of 0.6 to 1.2 seconds."""
        folder = self.base / f"training-clips-{count}"
        if not folder.exists():
            for number in range(count):
                write_corpus(folder, [SENTENCES[number][:20]], first=number, seconds=0.6 + 0.1 * (5 * number % 7))
        return folder


def arguments(folder: Path, corpus: Path, flags: str = "") -> list[str]:
    """The command line of a training."""
    given = ["--train-data", str(corpus), "--checkpoint-dir", str(folder)]
    return ["train", *given, *shlex.split(FLAGS), *shlex.split(flags)]


def train(folder: Path, corpus: Path, flags: str = "") -> int:
    """Train in this process, from the command line on; returns the exit code."""
    return main(arguments(folder, corpus, flags))


def newest(folder: Path, stage: str = "gpt") -> LoadedCheckpoint:
    """The last checkpoint of a run."""
    loaded = RunDir(folder).checkpoints(stage).newest()
    assert loaded is not None
    return loaded


def steps(folder: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The reports of a run that hold."""
    return [report for report in read_metrics(folder / "metrics.jsonl") if report["kind"] == kind]


def losses(folder: Path, stage: str = "gpt", name: str = "total") -> list[float]:
    return [report["losses"][name] for report in steps(folder) if report["stage"] == stage]


def measured(folder: Path) -> list[dict[str, Any]]:
    """What a run has measured, without times."""
    return [
        {name: report.get(name) for name in ("kind", "stage", "step", "is_best", *MEASURED)}
        for report in read_metrics(folder / "metrics.jsonl")
    ]


def assert_equal_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Bit by bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def assert_same_run(found: Path, expected: Path, *stages: str) -> None:
    """Weights, optimiser, random numbers, cursor and everything measured, bit by bit."""
    assert_same_checkpoints(found, expected, *stages)
    assert measured(found) == measured(expected)


def assert_same_checkpoints(found: Path, expected: Path, *stages: str) -> None:
    for stage in stages:
        ours, theirs = newest(found, stage), newest(expected, stage)
        assert (ours.step, ours.state) == (theirs.step, theirs.state)
        assert_equal_tensors(ours.weights, theirs.weights)
        assert_equal_tensors(ours.optimizer, theirs.optimizer)


def stop_at(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
    """Let a signal ask for a stop when a run of this process has made one of these steps, once for each."""
    tick, left = TrainingReports.tick, set(numbers)

    def tick_and_signal(self: TrainingReports, step: int) -> None:
        tick(self, step)
        if step in left:
            left.remove(step)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(TrainingReports, "tick", tick_and_signal)


@dataclass
class Start:
    """Runs commands; `out` and `err` are what the last one showed."""

    folder: Path
    clips: Clips
    screen: pytest.CaptureFixture[str]
    out: str = ""
    err: str = ""

    def __call__(self, flags: str = "", name: str | Path = "run", corpus: int | Path = 4, code: int = 0) -> Path:
        """Train on so many clips, in a folder of the test; returns that folder."""
        found = self.clips(corpus) if isinstance(corpus, int) else corpus
        self.command(*arguments(self.folder / name, found, flags), code=code)
        return self.folder / name

    def command(self, *words: str | Path, code: int = 0) -> str:
        """Run a command that ends with this code, and return what it prints."""
        self.screen.readouterr()
        found = main([str(word) for word in words])
        self.out, self.err = self.screen.readouterr()
        assert found == code, self.out + self.err
        return self.out


@pytest.fixture
def start(clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Start:
    return Start(tmp_path, clips, capsys)


# One run, observed


@dataclass
class Seen:
    """One run, and what was noticed of it."""

    folder: Path = Path()
    out: str = ""
    err: str = ""
    depths: list[Depths] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Of the mels of every micro-step."""

    @property
    def last(self) -> LoadedCheckpoint:
        return newest(self.folder, "dvae")


Observe = Callable[..., Seen]


@pytest.fixture
def run(start: Start, monkeypatch: pytest.MonkeyPatch) -> Observe:
    """Trains a DVAE for two steps of four clips, with some flags more."""
    now = Seen()
    forward = DvaeRecipe.forward

    class SeenFeed(Feed):
        def __init__(self, *positional: Any, **named: Any) -> None:
            now.depths.append(next(value for value in positional if isinstance(value, Depths)))
            super().__init__(*positional, **named)

    def seen_forward(self: DvaeRecipe, tensors: dict[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
        now.shapes.append(tuple(tensors["mel"].shape))
        return forward(self, tensors, sizes)

    monkeypatch.setattr(feed, "Feed", SeenFeed)
    monkeypatch.setattr(DvaeRecipe, "forward", seen_forward)
    monkeypatch.setattr("myxtts.pipeline.feed.usable_cores", lambda: 8)
    monkeypatch.setitem(SIZES, "small", replace(SMALL, dvae_hidden=32))
    num_runs = 0

    def observe(flags: str = "", num_clips: int = 4, code: int = 0) -> Seen:
        nonlocal now, num_runs
        num_runs += 1
        now = Seen()
        now.folder = start(f"--stages dvae --max-steps 2 {flags}", f"run-{num_runs}", num_clips, code)
        now.out, now.err = start.out, start.err
        return now

    return observe
