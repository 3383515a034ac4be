"""The cost of the feed: the same step on one batch replayed, on cached codes, and on codes computed on the fly.

`python benchmarks/pipeline.py` measures `normal` and `tiny` with 64 clips on one GPU; see `--help` for others. The
feed is the one that training uses: gather, upload and encode, on their own threads and streams.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from harness import MAX_MEL_FRAMES, LiveTable, clip_seconds, console, machine

from myxtts.config import SAMPLE_RATE, DataSettings, Settings, num_codes_of
from myxtts.data.batches import Gatherer
from myxtts.data.clips import ClipSet
from myxtts.data.codes import CodesCache
from myxtts.data.order import Batches, packed_tokens
from myxtts.data.store import Store, StoreWriter
from myxtts.devices import Plan
from myxtts.model.xtts import SIZES, XTTS
from myxtts.observe.trace import OFF, StepClock, StepTime, Trace, idle_share, step_timing
from myxtts.pipeline.feed import Feed, Streams, choose_depths
from myxtts.pipeline.frontend import GptFrontend
from myxtts.training.optim import Optimizer, Schedule
from myxtts.training.recipes import GptRecipe
from myxtts.training.trainer import Step, choose_mode

NUM_CLIPS = 2000
TEXT_TOKENS = 255
WARM_UP_STEPS = 8
FEEDS = {
    "one batch replayed": ("buffered", True, True),
    "codes cached": ("buffered", True, False),
    "codes on the fly": ("buffered", False, False),
    "cached, both roles of dual mode": ("dual", True, False),
    "one batch replayed, again": ("buffered", True, True),
}
"""By name: mode, codes cached, replayed."""


def make_clips(folder: Path) -> ClipSet:
    """Noise and random text, as long as LJSpeech's, in the stores that preparing a corpus makes."""
    random, num_clips = np.random.default_rng(0), NUM_CLIPS
    seconds = clip_seconds(random, num_clips)
    noise = random.integers(-3000, 3000, int(10.1 * SAMPLE_RATE) + num_clips, np.int16)
    every = np.arange(num_clips)
    audio = StoreWriter(folder / "audio", every.astype(np.uint64))
    for start in range(0, num_clips, 64):
        rows = range(start, min(start + 64, num_clips))
        audio.append(rows, [noise[row : row + int(seconds[row] * SAMPLE_RATE)] for row in rows])
    audio.finish({})
    num_ids = (seconds * 7.5 * random.uniform(0.8, 1.2, num_clips)).astype(np.int64).clip(4, 200)
    ids = StoreWriter(folder / "ids", every.astype(np.uint64))
    ids.append(range(num_clips), [random.integers(3, TEXT_TOKENS, count, np.int32) for count in num_ids])
    ids.finish({})
    none = np.zeros(num_clips, np.int64)
    names = [f"clip-{number}" for number in range(num_clips)]
    return ClipSet(
        Store(folder / "audio", np.int16), Store(folder / "ids", np.int32), every, every, none, none, none, names
    )


@dataclass
class Bench:
    """A model with its step, and the feeds it trains from in turn."""

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
        """Return step times, clips per second, the fill of the rings, and allocations during the timed steps."""
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
        """Run one epoch through the feed, so that all codes are cached; return seconds per batch."""
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
    parser.add_argument("--size", action="append", choices=list(SIZES), help="may be repeated [normal, tiny]")
    parser.add_argument("--clips", type=int, default=64, help="clips of a batch")
    parser.add_argument("--steps", type=int, default=0, help="timed steps [40 for normal, 400 for tiny]")
    options = parser.parse_args()
    columns = ("size", "feed", "clips/s", "of replay", "step ms", "idle", "CV", "allocations", "rings ready")
    title = f"{options.clips} clips a step, LJSpeech-like; {machine()}"
    table = LiveTable(title, *columns, left=("size", "feed", "rings ready"))
    data = DataSettings(batch_size=options.clips, max_mel_frames=MAX_MEL_FRAMES)
    with tempfile.TemporaryDirectory() as folder:
        clips = make_clips(Path(folder))
        for size in options.size or ("normal", "tiny"):
            bench = Bench(size, clips, data, Path(folder))
            num_steps = options.steps or (40 if size in ("normal", "big") else 400)
            encode_ms = 1000 * bench.fill_cache()
            replayed = 0.0
            for name, (mode, cached, replay) in FEEDS.items():
                steps, rate, readiness, allocated = bench.measure(mode, cached, replay, num_steps)
                timing, replayed = step_timing(steps), replayed or rate
                cells = (f"{rate:,.0f}", f"{rate / replayed:.1%}", f"{timing.median_ms:.2f}")
                cells = (*cells, f"{idle_share(steps):.2%}", f"{timing.cv:.1%}", f"{allocated}", readiness)
                table.add(size, name, *cells)
            console.print(f"{size}: an epoch through the pipeline without training: {encode_ms:.1f} ms a batch")
            del bench
            torch.cuda.empty_cache()
    table.show()


if __name__ == "__main__":
    main()
