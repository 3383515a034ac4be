"""Bottlenecks planted in a real training, one after another, and what `myxtts profile` says first of each.

A case is settings, a corpus and a plant (`tools_plants`). Judges nothing itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import soundfile
import torch
from rich.console import Console
from rich.table import Table
from tools_plants import (
    SAVE_STEP,
    Ground,
    gathering_for_many,
    host_syncs,
    leak,
    recompilations,
    saving,
    slow_clip,
    slow_encoding,
    slow_gathering,
    slow_transfer,
)

from myxtts.config import SAMPLE_RATE
from myxtts.devices import Machine
from myxtts.model.gpt import GPTDims
from myxtts.model.xtts import SIZES, XTTSDims
from myxtts.run import prepare_corpus
from myxtts.settings import LoadedSettings, load
from myxtts.tools.dry_run import DryRun, temporary_codes
from myxtts.tools.profile import Profile, profile

CPU_STEPS = 45
CPU_DIMS = XTTSDims(
    gpt=GPTDims(layers=1, dim=64, heads=1, num_codes=32, encoder_layers=1),
    dvae_hidden=16,
    dvae_codebook_dim=16,
    dvae_blocks=1,
    vocoder_channels=64,
    speaker_dim=16,
    speaker_filters=(8, 8, 8, 8),
)
"""On a CPU `tiny` is this small: a step of the real one would take seconds there."""
console = Console(width=150, highlight=False)

Plant = Callable[[Ground], AbstractContextManager[object]]


@dataclass(frozen=True)
class Case:
    """A bottleneck, and what must be said of it first."""

    codes: tuple[str, ...]
    """Any of these is right as the first finding; for none there must be no warning at all."""
    bounds: tuple[str, ...]
    """What may be named as the stage that decides the speed; empty where that says nothing."""
    plant: Plant = lambda _: nullcontext()
    flags: Mapping[str, str] = field(default_factory=dict)
    corpus: str = "clips"
    on_cpu: bool = True
    kernels: bool = False
    """Only the kernel view shows it: `profile --kernels`."""
    size: str = ""
    num_steps: int = 40


EAGER = {"training.enable_graph_mode": "false"}
SHALLOW = {"data.prefetch_buffer_size": "1", "data.pipeline_buffer_size": "4"}
DECODING = {"data.native_loading": "false", "data.num_workers": "1"}
UNPINNED = {"data.enhanced_gpu_prefetch": "false", "data.batch_size": "192", "data.max_mel_frames": "2416"}
"""Short clips in room for long ones: 240 MB to copy for little to train on, so that no step can hide the copy."""
CASES: Mapping[str, Case] = {
    "slow-disk": Case(("gather-slow",), ("gather",), slow_gathering),
    "slow-clip": Case(("gather-uneven",), ("gather",), slow_clip, {"data.num_workers": "1"}, num_steps=80),
    "few-workers": Case(("workers-few",), ("gather",), flags=DECODING, corpus="flac", on_cpu=False),
    "small-ring": Case(("host-ring-small",), ("gather",), gathering_for_many, SHALLOW),
    "unpinned": Case(("upload-unpinned",), ("upload",), flags=UNPINNED, corpus="short", on_cpu=False),
    "slow-encode": Case(("encode-slow",), ("encode",), slow_encoding),
    "slow-transfer": Case(("upload-slow",), ("upload",), slow_transfer),
    "host-sync": Case(("host-sync",), ("host",), host_syncs, EAGER, on_cpu=False, kernels=True),
    "recompiling": Case(("recompiling",), (), recompilations),
    "leak": Case(("memory-growth",), (), leak, on_cpu=False),
    "saving": Case(("save-stall",), ("save",), saving, {"training.save_step": str(SAVE_STEP)}),
    "launch-bound": Case(("launch-bound",), ("host",), flags=EAGER | {"data.batch_size": "1"},
                         on_cpu=False, kernels=True),
    "nothing": Case((), ("train",), flags={"data.batch_size": "32"}, size="normal", num_steps=25),
}  # fmt: skip
"""By name; `nothing` is a size that the data side cannot slow down by sharing its GPU."""


class Field:
    """Corpora and settings to plant in."""

    def __init__(self, folder: Path, size: str, on_gpu: bool, compiled: bool) -> None:
        self._folder, self._size, self.on_gpu, self._compiled = folder, size, on_gpu, compiled
        self._step_s: dict[str, float] = {}

    def settings(self, flags: Mapping[str, str], corpus: str, size: str = "") -> LoadedSettings:
        """Those of a good training, but for these."""
        given = {
            "data.language": "en", "data.vocab_size": "256", "data.val_fraction": "0", "data.batch_size": "16",
            "data.max_mel_frames": "880", "data.num_workers": "4", "data.model_start_delay": "0.3",
            "data.train_data": str(self._corpus(corpus)), "model.size": size or self._size,
            "training.enable_xla_compilation": str(self._compiled).lower(), "training.val_step": "1000000",
        }  # fmt: skip
        small = {} if self.on_gpu else {"data.max_mel_frames": "128", "model.size": "tiny", "data.batch_size": "4"}
        return load(None, given | dict(flags) | small)

    def measure(self, case: Case) -> Profile:
        """What `myxtts profile` finds."""
        loaded = self.settings(case.flags, case.corpus, case.size)
        prepared = prepare_corpus(loaded.settings)
        ground = Ground(self._seconds_of_a_step(loaded), loaded.settings.data.batch_size, self.on_gpu)
        try:
            with case.plant(ground):
                num_steps = case.num_steps if self.on_gpu else CPU_STEPS
                return profile(loaded.settings, prepared, num_steps=num_steps, kernels=case.kernels)
        finally:
            gc.collect()
            if self.on_gpu:
                torch.cuda.empty_cache()

    def _seconds_of_a_step(self, loaded: LoadedSettings) -> float:
        """Alike for all plants in the same training; those that are only settings do not ask how long it takes."""
        key = repr((loaded.settings.model, loaded.settings.data.batch_size, loaded.settings.training))
        if key not in self._step_s:
            with temporary_codes(prepare_corpus(loaded.settings)) as apart:
                dry_run = DryRun(loaded.settings, apart, "gpt")
                times = dry_run.measure(15 if self.on_gpu else 5, replay=True).times
            self._step_s[key] = float(np.median([step.step_ms for step in times])) / 1000
        return self._step_s[key]

    def _corpus(self, kind: str) -> Path:
        """Noise as long as LJSpeech's clips; `short` clips; `flac` of a rate that must be changed."""
        folder = self._folder / kind
        if folder.exists():
            return folder
        random, rate = np.random.default_rng(0), 44100 if kind == "flac" else SAMPLE_RATE
        (folder / "wavs").mkdir(parents=True)
        count = {"clips": 1000, "flac": 200, "short": 400}[kind] if self.on_gpu else 60
        lines = []
        for number in range(count):
            seconds = float(np.clip(random.normal(6.57, 2.18), 1.2, 10.1))
            seconds = random.uniform(0.6, 1.2) if kind == "short" or not self.on_gpu else seconds
            noise = random.integers(-3000, 3000, int(seconds * rate), np.int16)
            soundfile.write(folder / "wavs" / f"c{number}.{'flac' if kind == 'flac' else 'wav'}", noise, rate)
            lines.append(f"c{number}|{' '.join(random.choice(['one', 'two', 'three', 'four'], 4))}\n")
        (folder / "metadata.csv").write_text("".join(lines))
        return folder


def planted(folder: Path, names: list[str], size: str, on_gpu: bool, compiled: bool) -> bool:
    """Plant and profile each case; whether all were found."""
    os.chdir(folder)  # where no configs/config.yaml is read
    patches = contextlib.ExitStack()
    if not on_gpu:
        patches.enter_context(mock.patch.dict(SIZES, {"tiny": CPU_DIMS}))
        patches.enter_context(mock.patch.object(Machine, "look", classmethod(lambda cls: cls())))
    table = Table(title="Planted bottlenecks and the first finding of `myxtts profile`", title_justify="left")
    for column in ("planted", "expected", "first finding", "bound", "gain", "", "seconds", "other warnings"):
        table.add_column(column)
    field_, all_right = Field(folder, size, on_gpu, compiled), True
    with patches:
        for name in names:
            started_at = time.perf_counter()
            cells, right = _row(CASES[name], field_, compiled)
            all_right &= right
            cells.insert(-1, f"{time.perf_counter() - started_at:.1f}")
            table.add_row(name, *cells)
            console.print(name, *cells, sep=" | ")
    console.print(table)
    return all_right


def _row(case: Case, field_: Field, compiled: bool) -> tuple[list[str], bool]:
    found = field_.measure(case)
    assert found.verdict is not None
    warned = [finding for finding in found.findings if finding.level in ("warn", "fail")]
    if not case.codes and not compiled:  # what was turned off to spare the time may be said, and nothing else
        warned = [finding for finding in warned if finding.code != "graph-off"]
    first = warned[0] if warned else None
    right = first.code in case.codes if first and case.codes else first is None and not case.codes
    right &= not case.bounds or found.verdict.bound in case.bounds
    gain = f"{first.gain:.2f}" if first and first.gain else ""
    expected = f"{' '.join(case.codes) or 'no warning'} ({' '.join(case.bounds)})"
    others = " ".join(finding.code for finding in warned[1:])
    shown = "" if right else f" {found.verdict.sentence}"
    return [
        expected,
        first.code if first else "none",
        found.verdict.bound,
        gain,
        "right" if right else "WRONG",
        others + shown,
    ], right
