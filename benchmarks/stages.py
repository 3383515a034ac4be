"""The most a second GPU can gain in each training stage: the same step fed for real and with one batch replayed.

    python benchmarks/stages.py [--stage decoder] [--size normal] [--batch 32] [--no-compile] [--try-kernels]

A replayed batch costs the model's GPU nothing, so no data GPU can do better. Clips are noise as long as LJSpeech's
and weights are fresh: neither changes the amount of computation.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from harness import MAX_MEL_FRAMES, LiveTable, machine, write_corpus

from myxtts.config import SMALL_CORPUS, STAGES
from myxtts.data.prepare import prepare
from myxtts.model.xtts import SIZES
from myxtts.settings import load
from myxtts.tools.dry_run import DryRun

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", action="append", choices=STAGES, help="may be repeated [all]")
    parser.add_argument("--size", default="normal", choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--clips", type=int, default=300, help="of the corpus, which is seen once before")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--try-kernels", action="store_true", help="let cuDNN benchmark its convolutions")
    options = parser.parse_args()
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
