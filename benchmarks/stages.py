"""What a second GPU would bring in each stage: the same step fed for real and with one batch replayed, on one GPU.

    python benchmarks/stages.py [--stage decoder] [--size normal] [--batch 32] [--no-compile] [--try-kernels]

A perfect feed, one that costs the model's GPU nothing, is the best that a data GPU of its own can give. The clips
are noise as long as LJSpeech's, the weights fresh: neither changes what is computed.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from train import machine, write_corpus

from myxtts.config import STAGES
from myxtts.data.prepare import prepare
from myxtts.model.xtts import SIZES
from myxtts.settings import load
from myxtts.tools.dry_run import DryRun

console = Console(width=140, highlight=False)


def measure(folder: Path, stage: str, options: argparse.Namespace) -> list[str]:
    """One row: first epoch, later epochs, replay; and what the stages of the pipeline take."""
    flags = {
        "data.train_data": str(folder),
        "data.language": "en",
        "data.max_mel_frames": 880,
        "data.batch_size": options.batch,
        "model.size": options.size,
        "training.enable_xla_compilation": not options.no_compile,
    }
    loaded = load(None, flags)
    dry_run = DryRun(loaded.settings, prepare(loaded.settings.data), stage)
    dry_run.measure(options.steps)  # the epoch that computes codes
    fed = dry_run.measure(options.steps, traced=True)
    replayed = dry_run.measure(options.steps, replay=True)
    spans = fed.phase_ms()
    return [
        stage,
        str(options.batch),
        str(dry_run.step.mode),
        *(f"{spans.get(name, 0.0):.1f}" for name in ("gather", "upload", "encode", "train", "update")),
        f"{fed.clips_per_s:,.0f}",
        f"{replayed.clips_per_s:,.0f}",
        f"{replayed.clips_per_s / fed.clips_per_s - 1:+.1%}",
        f"{max(fed.memory_mb.values(), default=0) / 1024:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stage", action="append", choices=STAGES, help="may be given again [all]")
    parser.add_argument("--size", default="normal", choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--clips", type=int, default=300, help="of the corpus, which is seen once before")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--try-kernels", action="store_true", help="lets cuDNN choose convolutions by trying them")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = options.try_kernels
    table = Table(title=f"{options.size} on {machine()}; times in ms", title_justify="left")
    for column in ("stage", "clips", "step", "gather", "upload", "encode", "train", "update"):
        table.add_column(column, justify="right")
    for column in ("clips/s", "replayed", "a second GPU", "GiB"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "clips", options.clips)
        for stage in options.stage or STAGES:
            cells = measure(Path(folder) / "clips", stage, options)
            console.print(*cells)
            table.add_row(*cells)
    console.print(table)


if __name__ == "__main__":
    main()
