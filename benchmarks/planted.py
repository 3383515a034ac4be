"""Planted bottlenecks: known slowdowns of a real training, and the finding that `myxtts profile` must name first.

A case is settings, a corpus, and a patch around one of the pipeline's own functions. Delays are multiples of the
step time, so that a case shows on any machine. Run by `benchmarks/tools.py planted`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from harness import MAX_MEL_FRAMES, LiveTable, write_corpus

from myxtts.data.batches import Gathered, Gatherer, GatherJob, HostBatch
from myxtts.devices import Machine, Stream
from myxtts.model.gpt import Block, GPTDims
from myxtts.model.xtts import SIZES, XTTSDims
from myxtts.pipeline.frontend import GptFrontend
from myxtts.pipeline.workers import Upload
from myxtts.run import prepare_corpus
from myxtts.settings import LoadedSettings, load
from myxtts.tools.dry_run import DryRun, temporary_codes
from myxtts.tools.profile import Profile, profile
from myxtts.training.trainer import Step

CLEARLY = 2.5
"""Delay of a planted worker for one batch, in step times."""
PAUSE_STEP, RECOMPILE_STEP, SLOW_CLIP = 20, 15, 50
LEAK_BYTES, SCRATCH_BYTES = 8 * 2**20, 16 * 2**20
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
"""Replaces `tiny` on a CPU, where a step of the real one would take seconds."""


@dataclass(frozen=True)
class Baseline:
    """The training before anything is planted."""

    step_s: float
    """Time of a step on a replayed batch."""
    batch_size: int
    on_gpu: bool


Patch = AbstractContextManager[object]


def slow_gathering(base: Baseline, workers: int = 4) -> Patch:
    """Delay every batch, as a slow disk would: more than all workers together can hide, and over 1 ms a clip."""
    seconds = max(CLEARLY * workers * base.step_s, 0.0015 * base.batch_size)
    return _delay_filling(lambda _: seconds)


def slow_clip(base: Baseline) -> Patch:
    """Delay the batches that hold one of every fifty clips, by more than a step on average."""
    share = 1 - (1 - 1 / SLOW_CLIP) ** base.batch_size
    seconds = (CLEARLY if base.on_gpu else 1.2) * base.step_s / share  # a CPU has time for few steps
    return _delay_filling(lambda job: seconds if (job.plan.clips % SLOW_CLIP == 0).any() else 0.0)


def gathering_for_many(base: Baseline) -> Patch:
    """Two steps for a batch: four threads hide it, unless the ring lets only one of them work."""
    return _delay_filling(lambda _: 2 * base.step_s)


def _delay_filling(seconds_of: Callable[[GatherJob], float]) -> Patch:
    fill = Gatherer.fill

    def slow_fill(self: Gatherer, batch: HostBatch, job: GatherJob) -> Gathered:
        time.sleep(seconds_of(job))
        return fill(self, batch, job)

    return mock.patch.object(Gatherer, "fill", slow_fill)


def slow_encoding(base: Baseline) -> Patch:
    """A long kernel of one block in the front end: it takes time but hardly any of the GPU from the model."""
    encode, seconds = GptFrontend.encode, CLEARLY * base.step_s
    cycles = int(seconds * _cycles_per_s()) if base.on_gpu else 0

    def slow_encode(self: GptFrontend, *arguments: Any) -> None:
        torch.cuda._sleep(cycles) if cycles else time.sleep(seconds)  # type: ignore[no-untyped-call]
        encode(self, *arguments)

    return mock.patch.object(GptFrontend, "encode", slow_encode)


def _cycles_per_s() -> float:
    """Cycles of `torch.cuda._sleep` in a second, measured because the clock follows the load."""
    for cycles in (10**7, 10**8):
        torch.cuda.synchronize()
        started_at = time.perf_counter()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return 10**8 / (time.perf_counter() - started_at)


def slow_transfer(base: Baseline) -> Patch:
    """Other host-to-device copies before every batch, as on a slot with few PCIe lanes."""
    begin, seconds = Upload.__init__, CLEARLY * base.step_s

    def throttled_init(self: Upload, source: Any, target: Any, stream: Stream, *rest: Any) -> None:
        host = torch.zeros(SCRATCH_BYTES, dtype=torch.uint8, pin_memory=base.on_gpu)
        device = torch.zeros_like(host, device=stream.device)
        started_at, count = time.perf_counter(), 20
        for _ in range(count):
            device.copy_(host)
        copies = max(round(seconds / ((time.perf_counter() - started_at) / count)), 1)

        @contextlib.contextmanager
        def use() -> Iterator[None]:
            with Stream.use(stream):
                for _ in range(copies):
                    device.copy_(host, non_blocking=True)
                yield

        stream.use = use  # type: ignore[method-assign]
        begin(self, source, target, stream, *rest)

    return mock.patch.object(Upload, "__init__", throttled_init)


def host_syncs(_: Baseline) -> Patch:
    """Read a value from the device in every layer of the network."""
    forward = Block.forward

    def reading_forward(self: Block, *arguments: Any, **named: Any) -> Any:
        out = forward(self, *arguments, **named)
        out.sum().item()
        return out

    return mock.patch.object(Block, "forward", reading_forward)


def recompilations(_: Baseline) -> Patch:
    """Compile something for another shape every few steps."""
    compiled = torch.compile(lambda x: (x.sin() * 2 + x.cos()).sum(), dynamic=False)
    micro, calls = Step.micro, itertools.count()

    def compiling_micro(self: Step, *arguments: Any, **named: Any) -> None:
        if (number := next(calls)) % RECOMPILE_STEP == 0:
            compiled(torch.ones(8 + number, device=self.stream.device))
        micro(self, *arguments, **named)

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(Step, "micro", compiling_micro))
    stack.enter_context(torch._dynamo.config.patch(recompile_limit=1000))
    return stack


def leak(_: Baseline) -> Patch:
    """Allocate some memory in every step and keep it."""
    kept: list[Any] = []
    return _before_each_step(
        lambda step, _: kept.append(torch.empty(LEAK_BYTES, dtype=torch.uint8, device=step.stream.device))
    )


def pausing(base: Baseline) -> Patch:
    """Every so many steps, stop training for half as long as these steps take."""
    seconds = 0.5 * PAUSE_STEP * base.step_s
    return _before_each_step(lambda _, number: time.sleep(seconds if number and number % PAUSE_STEP == 0 else 0))


def _before_each_step(work: Callable[[Step, int], object]) -> Patch:
    train = Step.__call__

    def step(self: Step, next_batch: Any, number: int, *rest: Any) -> None:
        work(self, number)
        train(self, next_batch, number, *rest)

    return mock.patch.object(Step, "__call__", step)


@dataclass(frozen=True)
class Case:
    """A bottleneck and the expected diagnosis."""

    codes: tuple[str, ...]
    """The first finding must be one of these; if empty, there must be no warning at all."""
    bounds: tuple[str, ...]
    """What may be named as the bottleneck; empty if anything may."""
    plant: Callable[[Baseline], Patch] = lambda _: nullcontext()
    flags: Mapping[str, str] = field(default_factory=dict)
    corpus: str = "clips"
    on_cpu: bool = True
    kernels: bool = False
    """Only `profile --kernels` can see it."""
    size: str = ""
    num_steps: int = 40


EAGER = {"training.enable_graph_mode": "false"}
SHALLOW = {"data.prefetch_buffer_size": "1", "data.pipeline_buffer_size": "4"}
DECODING = {"data.native_loading": "false", "data.num_workers": "1"}
UNPINNED = {"data.enhanced_gpu_prefetch": "false", "data.batch_size": "192", "data.max_mel_frames": "2416"}
"""Short clips padded to a long maximum: 240 MB to copy and little to train on, so no step can hide the copy."""
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
    "pausing": Case(("host-late",), ("host",), pausing),
    "launch-bound": Case(("launch-bound",), ("host",), flags=EAGER | {"data.batch_size": "1"},
                         on_cpu=False, kernels=True),
    "nothing": Case((), ("train",), flags={"data.batch_size": "32"}, size="normal", num_steps=25),
}  # fmt: skip
"""By name; in `nothing` the steps are so long that the data role's share of the GPU does not show."""


@dataclass
class Workload:
    """Corpora and settings of the trainings that are measured."""

    folder: Path
    size: str
    on_gpu: bool
    compiled: bool
    _step_s: dict[str, float] = field(default_factory=dict)

    def settings(self, flags: Mapping[str, str], corpus: str, size: str = "") -> LoadedSettings:
        """Good settings, with these changes."""
        given = {
            "data.language": "en", "data.vocab_size": "256", "data.val_fraction": "0", "data.batch_size": "16",
            "data.max_mel_frames": str(MAX_MEL_FRAMES), "data.num_workers": "4", "data.model_start_delay": "0.3",
            "data.train_data": str(self._corpus(corpus)), "model.size": size or self.size,
            "training.enable_xla_compilation": str(self.compiled).lower(), "training.val_step": "1000000",
        }  # fmt: skip
        small = {} if self.on_gpu else {"data.max_mel_frames": "128", "model.size": "tiny", "data.batch_size": "4"}
        return load(None, given | dict(flags) | small)

    def profile(self, case: Case) -> Profile:
        """Return what `myxtts profile` finds."""
        loaded = self.settings(case.flags, case.corpus, case.size)
        prepared = prepare_corpus(loaded.settings)
        base = Baseline(self._seconds_of_a_step(loaded), loaded.settings.data.batch_size, self.on_gpu)
        try:
            with case.plant(base):
                num_steps = case.num_steps if self.on_gpu else CPU_STEPS
                return profile(loaded.settings, prepared, num_steps=num_steps, kernels=case.kernels)
        finally:
            gc.collect()
            if self.on_gpu:
                torch.cuda.empty_cache()

    def _seconds_of_a_step(self, loaded: LoadedSettings) -> float:
        """Measured once for all cases with the same model, batch size and training settings."""
        key = repr((loaded.settings.model, loaded.settings.data.batch_size, loaded.settings.training))
        if key not in self._step_s:
            with temporary_codes(prepare_corpus(loaded.settings)) as apart:
                dry_run = DryRun(loaded.settings, apart, "gpt")
                times = dry_run.measure(15 if self.on_gpu else 5, replay=True).times
            self._step_s[key] = float(np.median([step.step_ms for step in times])) / 1000
        return self._step_s[key]

    def _corpus(self, kind: str) -> Path:
        """LJSpeech-like `clips`; `short` ones; `flac` at a rate that must be resampled. Short and few on a CPU."""
        folder = self.folder / kind
        if not folder.exists():
            count = {"clips": 1000, "flac": 200, "short": 400}[kind] if self.on_gpu else 60
            seconds = (0.6, 1.2) if kind == "short" or not self.on_gpu else None
            form: dict[str, Any] = {"extension": "flac", "rate": 44100} if kind == "flac" else {}
            write_corpus(folder, count, seconds=seconds, **form)
        return folder


@contextlib.contextmanager
def small_on_cpu(on_gpu: bool) -> Iterator[None]:
    """Without a GPU, pretend that there is none and make `tiny` smaller."""
    if on_gpu:
        yield
        return
    no_gpus: Any = classmethod(lambda cls: cls())
    with mock.patch.dict(SIZES, {"tiny": CPU_DIMS}), mock.patch.object(Machine, "look", no_gpus):
        yield


def run_planted(workload: Workload, names: list[str]) -> bool:
    """Plant and profile each case; True if all were diagnosed."""
    columns = ("planted", "expected", "first finding", "bound", "gain", "", "seconds", "other warnings")
    title = "Planted bottlenecks and the first finding of `myxtts profile`"
    table, all_right = LiveTable(title, *columns, left=columns), True
    with small_on_cpu(workload.on_gpu):
        for name in names:
            started_at = time.perf_counter()
            cells, right = _row(CASES[name], workload)
            all_right &= right
            cells.insert(-1, f"{time.perf_counter() - started_at:.1f}")
            table.add(name, *cells)
    table.show()
    return all_right


def _row(case: Case, workload: Workload) -> tuple[list[str], bool]:
    found = workload.profile(case)
    assert found.verdict is not None
    warned = [finding for finding in found.findings if finding.level in ("warn", "fail")]
    if not case.codes and not workload.compiled:  # compilation was turned off to save time
        warned = [finding for finding in warned if finding.code != "graph-off"]
    first = warned[0] if warned else None
    right = first.code in case.codes if first and case.codes else first is None and not case.codes
    right &= not case.bounds or found.verdict.bound in case.bounds
    others = " ".join(finding.code for finding in warned[1:])
    return [
        f"{' '.join(case.codes) or 'no warning'} ({' '.join(case.bounds)})",
        first.code if first else "none",
        found.verdict.bound,
        f"{first.gain:.2f}" if first and first.gain else "",
        "right" if right else "WRONG",
        others if right else f"{others} {found.verdict.sentence}",
    ], right
