"""The most a second GPU can gain in each training stage: the same step fed for real and with one batch replayed.

    python benchmarks/stages.py [--stage decoder] [--size normal] [--batch 32] [--no-compile] [--try-kernels]
    python benchmarks/stages.py --layouts [--size normal] [--seconds 100]

A replayed batch costs the model's GPU nothing, so no data GPU can do better. Clips are noise as long as LJSpeech's
and weights are fresh: neither changes the amount of computation. `--layouts` compares ways to compute the step of
the decoder on one random batch; those that would begin after so many seconds are left out.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from harness import MAX_MEL_FRAMES, LiveTable, console, machine, write_corpus
from torch import nn

from myxtts.config import SMALL_CORPUS, STAGES, Settings
from myxtts.data.batches import MARGIN_CODES, SEGMENT_CODES, Batch, Sizes
from myxtts.data.order import Cursor
from myxtts.data.prepare import prepare
from myxtts.devices import Stream, release_memory
from myxtts.model import vocoder
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE, HifiGanDecoder, num_samples
from myxtts.model.xtts import SIZES
from myxtts.observe.trace import StepClock
from myxtts.settings import load
from myxtts.tools.dry_run import DryRun
from myxtts.training.optim import Optimizer, Schedule
from myxtts.training.recipes import ADVERSARIAL, GENERATOR, DecoderRecipe, Phases, StageFacts
from myxtts.training.trainer import Step, StepMode

PHASES = ("gather", "upload", "encode", "train", "update")


def measure(corpus: Path, stage: str, options: argparse.Namespace) -> list[str]:
    """One row: mean times of the phases, speed with the feed, speed with a replayed batch, memory."""
    flags = {
        "data.train_data": str(corpus),
        "data.language": "en",
        "data.max_mel_frames": MAX_MEL_FRAMES,
        "data.batch_size": options.batch,
        "model.size": options.size,
        "training.enable_xla_compilation": not options.no_compile,
        **dict.fromkeys(SMALL_CORPUS, 0),
    }
    loaded = load(None, flags)
    dry_run = DryRun(loaded.settings, prepare(loaded.settings.data), stage)
    dry_run.measure(options.steps)  # the epoch that computes codes
    fed = dry_run.measure(options.steps, traced=True)
    replayed = dry_run.measure(options.steps, replay=True)
    lengths_us: dict[str, list[int]] = {}
    for span in fed.spans:
        lengths_us.setdefault(span.name, []).append(span.duration_us)
    means = {name: statistics.mean(values) / 1000 for name, values in lengths_us.items()}
    return [
        stage,
        str(options.batch),
        str(dry_run.step.mode),
        *(f"{means.get(phase, 0.0):.1f}" for phase in PHASES),
        f"{fed.clips_per_s:,.0f}",
        f"{replayed.clips_per_s:,.0f}",
        f"{replayed.clips_per_s / fed.clips_per_s - 1:+.1%}",
        f"{max(fed.memory_mb.values(), default=0) / 1024:.1f}",
    ]


class Way(NamedTuple):
    """One way to compute the decoder's step."""

    adjacent: bool = True  # images with adjacent channels
    tried: bool = False  # cuDNN tries its kernels
    compiled: bool = False
    clips: int = 64
    codes: int = SEGMENT_CODES
    phase: str = ADVERSARIAL
    networks: str = "all"  # the discriminators: on periods, on spectrograms, or all


WAYS = (
    Way(compiled=True),
    Way(compiled=True, phase=GENERATOR),
    Way(),
    Way(networks="periods"),
    Way(networks="resolutions"),
    Way(phase=GENERATOR),
    Way(compiled=True, clips=128),
    Way(compiled=True, adjacent=False),
    Way(compiled=True, tried=True),
    Way(clips=16),
    Way(adjacent=False),
)


def step_ms(way: Way, size: str, profiled: bool, steps: int = 8) -> float:
    """Median time of the decoder's step on one random batch, in bf16, captured."""
    device, dims = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"), SIZES[size]
    if dims.reads_mels:
        raise SystemExit(f"--layouts compares adversarial steps; the decoder of {size} trains a flow instead")
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch.backends.cudnn.benchmark = way.tried
    sizes = (dims.gpt.dim, dims.vocoder_channels, dims.speaker_dim)
    names = ("decoder_input_dim", "upsample_initial_channel", "d_vector_dim")
    model = SimpleNamespace(dims=dims, hifigan_decoder=HifiGanDecoder(**dict(zip(names, sizes, strict=True))))
    recipe = DecoderRecipe.build(model, Settings(), StageFacts()).to(device).train()  # type: ignore[arg-type]
    for name in {"periods": ["resolutions"], "resolutions": ["periods"]}.get(way.networks, []):
        setattr(recipe.discriminators, name, nn.ModuleList())
    recipe.phases = Phases(0, 10**9 if way.phase == GENERATOR else 0, 0)
    recipe.begin_step(0)
    shapes = {
        "latents": (way.clips, way.codes + 2 * MARGIN_CODES, dims.gpt.dim),
        "wave": (way.clips, num_samples(way.codes)),
        "speaker": (way.clips, dims.speaker_dim),
    }
    tensors = {name: 0.1 * torch.randn(shape, device=device) for name, shape in shapes.items()}
    tensors["weights"], tensors["totals"] = torch.ones(way.clips, device=device), torch.ones(5, device=device)
    stream, mode = Stream(device), StepMode(autocast=True, compiled=way.compiled, captured=device.type == "cuda")
    with stream.use():
        step = Step(recipe, Optimizer(recipe.parts(), 1e-4, Schedule(0, None)), mode, stream)
        batch, clock = Batch(tensors, Sizes(0, 0, 0, 0), Cursor()), StepClock(stream.handle)

        def train(number: int) -> None:
            clock.begin()
            step.micro(batch)
            step.update(number)
            clock.end()

        for number in range(steps):
            train(number)
        stream.finish()
        if profiled:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                train(steps)
                stream.finish()
            kernels = sorted(profile.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
            for kernel in kernels[:30]:
                ms = kernel.self_device_time_total / 1000
                console.print(f"{ms:8.2f} ms in {kernel.count:4} {kernel.key[:125]}", markup=False)
        return statistics.median(time.step_ms for time in clock.collect()[2:])


def compare_layouts(options: argparse.Namespace) -> None:
    """A table of all ways that begin within `--seconds`."""
    columns = (*Way._fields, "ms", "audio s/s", "GiB", "after s")
    table = LiveTable(f"decoder of {options.size} on {machine()}", *columns)
    is_adjacent, started_at = vocoder._is_adjacent, time.perf_counter()
    for way in WAYS:
        if time.perf_counter() - started_at > options.seconds:
            break
        vocoder.__dict__["_is_adjacent"] = is_adjacent if way.adjacent else lambda _: False
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        profiled = options.kernels and way in (Way(), Way(compiled=True))
        try:
            ms = step_ms(way, options.size, profiled)
        except RuntimeError as error:  # out of memory, or not to be compiled
            console.print(str(error)[:500], markup=False)
            ms = math.nan
        audio_s = way.clips * num_samples(way.codes) / OUTPUT_SAMPLE_RATE
        gib, elapsed = torch.cuda.max_memory_allocated() / 2**30, time.perf_counter() - started_at
        table.add(*way, f"{ms:.1f}", f"{1000 * audio_s / ms:,.0f}", f"{gib:.1f}", f"{elapsed:.0f}")
        release_memory()
    table.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", action="append", choices=STAGES, help="may be repeated [all]")
    parser.add_argument("--size", default="normal", choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--clips", type=int, default=300, help="of the corpus, which is seen once before")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--try-kernels", action="store_true", help="let cuDNN benchmark its convolutions")
    parser.add_argument("--layouts", action="store_true", help="compare ways to compute the decoder's step")
    parser.add_argument("--seconds", type=float, default=100, help="of --layouts")
    parser.add_argument("--kernels", action="store_true", help="also show where the time goes")
    options = parser.parse_args()
    if options.layouts:
        compare_layouts(options)
        return
    torch.backends.cudnn.benchmark = options.try_kernels
    columns = ("stage", "clips", "step", *PHASES, "clips/s", "replayed", "a second GPU", "GiB")
    table = LiveTable(f"{options.size} on {machine()}; times in ms", *columns)
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "clips", options.clips)
        for stage in options.stage or STAGES:
            table.add(*measure(Path(folder) / "clips", stage, options))
    table.show()


if __name__ == "__main__":
    main()
