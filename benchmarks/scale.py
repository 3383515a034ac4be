"""The order of sharded corpora: what it costs for ten million clips, how well it shuffles, and how it trains.

    python benchmarks/scale.py [--clips 10000000] [--shards 1600] [--ranks 8] [--batch 64] [--steps 300] [--skip …]

The corpora are simulated: lengths like LJSpeech's, no audio. Only the training curves read recordings: the tiny
GPT stage on the embedded corpus, cut into artificial shards of few clips of a speaker, against a full shuffle.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import LiveTable, clip_seconds, console, machine, make_table, train_reports

from myxtts.config import SAMPLE_RATE
from myxtts.data import order
from myxtts.data.order import Batches, Cursor, packed_tokens

SEED = 1
SMALL_SHARD, SMALL_WINDOW = 4, 3  # clips of an artificial shard, and shards of a window


def corpus(num_clips: int, num_shards: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed tokens and shard of each clip; neighbours are in the same shard."""
    seconds = clip_seconds(np.random.default_rng(0), num_clips).astype(np.float32)
    tokens = packed_tokens((seconds * 8.5).astype(np.int32), (seconds * SAMPLE_RATE).astype(np.int32))
    return tokens.astype(np.int32), np.arange(num_clips) * num_shards // num_clips


def cost(options: argparse.Namespace) -> None:
    """Times of one rank, in a process of its own."""
    tokens, shards = corpus(options.clips, options.shards)
    given = shards.astype(np.uint32) if options.windows else None
    del shards
    started_at = time.perf_counter()

    def lap() -> str:
        nonlocal started_at
        took, started_at = time.perf_counter() - started_at, time.perf_counter()
        return f"{took:.2f} s"

    batches = Batches(tokens, options.batch, SEED, 0, options.ranks, None, given)
    times = [lap()]
    next(batches.plans(Cursor()))
    times.append(lap())
    for plan in batches.plans(Cursor()):
        if plan.after.epoch:
            break
    times.append(lap())
    next(batches.plans(Cursor(3, batches.num_batches // 2)))
    times.append(lap())
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("|".join([*times, f"{peak_mb:.0f} MB"]))


def show_cost(options: argparse.Namespace) -> None:
    size = f"{options.clips:,} clips in {options.shards:,} shards"
    title = f"{size}, simulated, one rank of {options.ranks}; {machine()}"
    table = LiveTable(title, "order", "open", "first batch", "an epoch", "resume", "peak of the process")
    for name, flag in (("windows of shards", ["--windows"]), ("full shuffle", [])):
        command = [sys.executable, __file__, "--cost", *flag]
        for option in ("clips", "shards", "ranks", "batch"):
            command += [f"--{option}", str(getattr(options, option))]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        table.add(name, *found.strip().split("|"))
    table.show()


def show_shuffling(options: argparse.Namespace) -> None:
    """How far clips that are neighbours in the corpus are apart in an epoch."""
    tokens, shards = corpus(options.clips, options.shards)
    columns = ("order", "median distance", "in the same batch", "within 10", "within 100", "padding")
    table = make_table("Neighbours of the corpus, in batches", *columns)
    for name, given in (("windows of shards", shards), ("full shuffle", None)):
        batches = Batches(tokens, options.batch, SEED, shards=given)
        clips, weights = batches.epoch(0)
        number = np.empty(len(tokens), np.int32)
        number[clips[weights > 0]] = np.nonzero(weights)[0]
        apart = np.abs(np.diff(number))
        within = [f"{(apart <= most).mean():.3%}" for most in (0, 10, 100)]
        useful = (tokens[clips] * weights).sum() / (batches.budget * len(clips))
        table.add_row(name, f"{np.median(apart):,.0f}", *within, f"{1 - useful:.2%}")
    console.print(table)


def show_curves(options: argparse.Namespace) -> None:
    """Losses of the tiny GPT stage in both orders, with the same seeds: the mean over the steps up to each."""
    import myxtts.run
    from myxtts.settings import load

    prepare, size, found = myxtts.run.prepare, order.SHARDS_PER_WINDOW, dict[tuple[str, int], list[float]]()
    least, order.SHARDS_PER_WINDOW, order.BATCHES_PER_WINDOW = order.BATCHES_PER_WINDOW, SMALL_WINDOW, 0
    find_budget = Batches._find_budget
    Batches._find_budget = lambda self: order.round_up(1.3 * find_budget(self), 8)  # few clips pack badly

    def in_shards(*given: Any) -> Any:
        prepared = prepare(*given)
        by_speaker = np.argsort(prepared.train.speakers, kind="stable")
        shards = np.empty(len(by_speaker), np.int64)
        shards[by_speaker] = np.arange(len(by_speaker)) // SMALL_SHARD
        return replace(prepared, train=replace(prepared.train, shards=shards))

    for name, seed in ((name, seed) for seed in (1, 2, 3) for name in ("windows of shards", "full shuffle")):
        myxtts.run.prepare = in_shards if name == "windows of shards" else prepare
        with tempfile.TemporaryDirectory() as folder:
            flags = {
                "model.size": "tiny", "data.batch_size": 2, "data.val_fraction": 0.0, "data.num_workers": 1,
                "training.checkpoint_dir": folder, "training.stages": "gpt", "training.seed": seed,
                "training.max_steps": options.steps, "training.epochs": options.steps, "training.log_step": 1,
                "training.save_step": options.steps, "training.evaluate_on": "off", "data.reference_clip": "same",
            }  # fmt: skip
            reports = train_reports(load(None, flags), Path(folder))
        found[name, seed] = [report.losses["total"] for report in reports]
    ends = np.linspace(0, options.steps, 7).astype(int)[1:]
    title = f"Loss of the tiny GPT stage: shards of {SMALL_SHARD} clips, windows of {SMALL_WINDOW}"
    table = make_table(title, "order", "seed", *(f"to step {end}" for end in ends))
    for (name, seed), losses in found.items():
        parts = np.split(np.array(losses), ends[:-1])
        table.add_row(name, str(seed), *(f"{part.mean():.3f}" for part in parts))
    console.print(table)
    myxtts.run.prepare, Batches._find_budget = prepare, find_budget
    order.SHARDS_PER_WINDOW, order.BATCHES_PER_WINDOW = size, least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"clips": 10_000_000, "shards": 1600, "ranks": 8, "batch": 64, "steps": 300}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--skip", default="", help="comma-separated: cost, shuffling, curves")
    for name in ("cost", "windows"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cost:
        cost(options)
        return
    for show in (show_cost, show_shuffling, show_curves):
        if show.__name__.removeprefix("show_") not in options.skip.split(","):
            show(options)


if __name__ == "__main__":
    main()
