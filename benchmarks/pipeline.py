"""What feeding costs: the same training step on one batch replayed, on cached codes, and on codes made on the fly.

`python benchmarks/pipeline.py` measures `normal` and `tiny` with 64 clips on one GPU; see `--help` for others. The
feed is the one that training uses: gather, upload and encode, on their own threads and streams.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from speech_like import MAX_MEL_FRAMES, make_clips

from myxtts.config import DataSettings, Settings, num_codes_of
from myxtts.data.batches import Batches, Gatherer, packed_tokens
from myxtts.data.clips import ClipSet
from myxtts.data.codes import CodesCache
from myxtts.devices import Plan
from myxtts.model.xtts import SIZES, XTTS
from myxtts.observe.trace import OFF, StepClock, StepTime, Trace, idle_share, step_timing
from myxtts.pipeline.feed import Feed, Streams, choose_depths
from myxtts.pipeline.frontend import GptFrontend
from myxtts.training.optim import Optimizer, Schedule
from myxtts.training.recipes import GptRecipe
from myxtts.training.trainer import Step, choose_mode

NUM_CLIPS = 2000
WARM_UP_STEPS = 8
console = Console(width=140, highlight=False)


@dataclass
class Bench:
    """A model with its step, and the feeds that it is trained from in turn."""

    size: str
    clips: ClipSet
    data: DataSettings
    cache_folder: Path

    def __post_init__(self) -> None:
        device = torch.device("cuda", 0)
        torch.manual_seed(0)
        self.model = XTTS(SIZES[self.size]).eval().requires_grad_(False)
        self.model.gpt.requires_grad_(True)
        self.recipe = GptRecipe(self.model.gpt).to(device).train()
        optimizer = Optimizer(self.recipe, 1e-5, Schedule(10, None))
        plan = Plan(device, device)
        mode = choose_mode(Settings(), "gpt", plan)
        self.streams = Streams.of(plan, self.data)
        self.stream = self.streams.model
        self.step = Step(self.recipe, optimizer, mode, self.stream)
        self.device = device
        tokens = packed_tokens(self.clips.num_ids, self.clips.num_samples)
        self.batches = Batches(tokens, self.data.batch_size, seed=1)

    def feed(self, mode: str, cached: bool, replay: bool, trace: Trace = OFF) -> Feed:
        cache = None
        if cached:
            hashes = self.clips.audio.hashes[self.clips.audio_rows]
            num_codes = num_codes_of(self.clips.num_samples)
            cache = CodesCache.open(self.cache_folder, hashes, num_codes, f"{self.size}")
        gatherer = Gatherer(self.clips, self.batches, self.data, 1, cache)
        frontend = GptFrontend(self.model, self.data, gatherer.frame_budget, autocast=True).to(self.device).eval()
        plan = Plan(self.device, self.device, mode)
        depths = choose_depths(self.data, plan, frontend.outputs)
        return Feed(gatherer, frontend, plan, self.data, depths, streams=self.streams, replay=replay, trace=trace)

    def measure(
        self, mode: str, cached: bool, replay: bool, num_steps: int
    ) -> tuple[list[StepTime], float, str, int]:
        """Step times, clips per second, how ready the rings were, and allocations during the timed steps."""
        with self.feed(mode, cached, replay) as feed, self.stream.use():
            feed.wait_until_warm(10)
            clock = StepClock(self.stream.handle)
            ready: dict[str, list[float]] = {}
            for number in range(WARM_UP_STEPS + num_steps):
                if number == WARM_UP_STEPS:
                    self.stream.finish()
                    clock = StepClock(self.stream.handle)
                    num_allocations = allocations()
                    started_at = time.perf_counter()
                self.step(feed.next, number, clock)
                for name, (count, depth) in feed.readiness().items():
                    ready.setdefault(name, []).append(count / depth)
            self.stream.finish()
            seconds = time.perf_counter() - started_at
            readiness = " ".join(f"{name} {sum(shares) / len(shares):.0%}" for name, shares in ready.items())
            return (
                clock.collect(),
                num_steps * self.data.batch_size / seconds,
                readiness,
                allocations() - num_allocations,
            )

    def fill_cache(self) -> float:
        """Let every batch of an epoch pass, so that all codes are known; seconds per batch."""
        with self.feed("buffered", cached=True, replay=False) as feed:
            started_at = time.perf_counter()
            for _ in range(self.batches.num_batches):
                with feed.next():
                    pass
            self.stream.finish()
            time.sleep(1)
        return (time.perf_counter() - started_at - 1) / self.batches.num_batches


def allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", action="append", choices=list(SIZES), help="may be given again")
    parser.add_argument("--clips", type=int, default=64, help="clips of a batch")
    parser.add_argument("--steps", type=int, default=0, help="timed steps [40 for normal, 400 for tiny]")
    options = parser.parse_args()
    table = Table(
        title=f"{options.clips} clips a step, LJSpeech-like; {torch.cuda.get_device_name()}, "
        f"PyTorch {torch.__version__}",
        title_justify="left",
    )
    for column in ("size", "feed", "clips/s", "of replay", "step ms", "idle", "CV", "allocations", "rings ready"):
        table.add_column(column, justify="left" if column in ("size", "feed", "rings ready") else "right")
    data = DataSettings(batch_size=options.clips, max_mel_frames=MAX_MEL_FRAMES)
    with tempfile.TemporaryDirectory() as folder:
        clips = make_clips(Path(folder), NUM_CLIPS)
        for size in options.size or ("normal", "tiny"):
            bench = Bench(size, clips, data, Path(folder))
            num_steps = options.steps or (40 if size in ("normal", "big") else 400)
            encode_ms = 1000 * bench.fill_cache()
            replayed = 0.0
            for name, mode, cached, replay in (
                ("one batch replayed", "buffered", True, True),
                ("codes cached", "buffered", True, False),
                ("codes on the fly", "buffered", False, False),
                ("cached, both roles of dual mode", "dual", True, False),
                ("one batch replayed, again", "buffered", True, True),
            ):
                steps, rate, readiness, allocated = bench.measure(mode, cached, replay, num_steps)
                timing, idle = step_timing(steps), f"{idle_share(steps):.2%}"
                replayed = replayed or rate
                row = (f"{rate:,.0f}", f"{rate / replayed:.1%}", f"{timing.median_ms:.2f}")
                table.add_row(size, name, *row, idle, f"{timing.cv:.1%}", str(allocated), readiness)
                console.print(size, name, *row, f"idle {idle} CV {timing.cv:.1%}", readiness)
            console.print(f"{size}: an epoch through the pipeline without training: {encode_ms:.1f} ms a batch")
            del bench
            torch.cuda.empty_cache()
    console.print(table)


if __name__ == "__main__":
    main()
