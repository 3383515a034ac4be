"""What observing costs: the same training with tracing on, with the driver sampled, and with neither, in turns.

One feed and one step serve all; between blocks of steps only what observes is turned on or off, and the order of a
round is drawn by lot, so that a GPU which warms up favours nobody. A second `off` shows what is chance.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tools_planted import Field

from myxtts.observe.nvml import Sampler
from myxtts.observe.trace import StepClock, Trace
from myxtts.pipeline.feed import Feed
from myxtts.run import prepare_corpus
from myxtts.tools.dry_run import DryRun, temporary_codes

MOST_TRACING, MOST_SAMPLING = 0.01, 0.001
WARM_UP_STEPS, FEWEST_ROUNDS = 10, 4
BLOCK_S = 1.0
PERIOD_S = 0.1
"""Between two readings of the driver, as `profile` takes them."""
READINGS = 50
console = Console(width=140, highlight=False)


class _Blocks:
    """Blocks of steps, each observed in one way."""

    def __init__(self, dry_run: DryRun, feed: Feed, trace: Trace, sampler: Sampler) -> None:
        self._dry_run, self._feed, self._trace, self._sampler = dry_run, feed, trace, sampler
        self._clock, self._number = StepClock(dry_run.stream.handle), 0

    def ms_per_step(self, how: str, num_steps: int) -> float:
        """Time of a step, with the device's queue empty before and behind the block."""
        self._trace.enabled = how == "tracing"
        if how == "sampling":
            self._sampler.start()
        self._dry_run.stream.finish()
        started_at = time.perf_counter()
        for _ in range(num_steps):
            self._dry_run.step(self._feed.next, self._number, self._clock, self._trace)
            self._number += 1
        self._dry_run.stream.finish()
        seconds = time.perf_counter() - started_at
        self._sampler.stop()
        self._clock.collect()
        return 1000 * seconds / num_steps


def overhead(folder: Path, size: str, batch_size: int, seconds: float, compiled: bool) -> bool:
    """Measure for so long, and print what each way of observing costs; whether that is little enough."""
    os.chdir(folder)
    loaded = Field(folder, size, on_gpu=True, compiled=compiled).settings(
        {"data.batch_size": str(batch_size)}, "clips"
    )
    ways = ("off", "tracing", "sampling", "off again")
    times: dict[str, list[float]] = {way: [] for way in ways}
    trace, sampler = Trace(), Sampler([0], PERIOD_S)
    with temporary_codes(prepare_corpus(loaded.settings)) as apart:
        dry_run = DryRun(loaded.settings, apart, "gpt")
        dry_run.fill_codes()
        device = dry_run.plan.model
        if device.type == "cuda":
            trace.anchor(device)
        with dry_run.feed(trace=trace) as feed:
            feed.wait_until_warm(2.0)
            blocks = _Blocks(dry_run, feed, trace, sampler)
            blocks.ms_per_step("off", WARM_UP_STEPS)
            num_steps = max(int(BLOCK_S * 1000 / blocks.ms_per_step("off", WARM_UP_STEPS)), 3)
            console.print(f"blocks of {num_steps} steps of {batch_size} clips, {dry_run.step.mode}")
            ends_at = time.monotonic() + seconds
            while time.monotonic() < ends_at or len(times["off"]) < FEWEST_ROUNDS:
                for way in random.sample(ways, len(ways)):
                    times[way].append(blocks.ms_per_step(way, num_steps))
                console.print(" ".join(f"{way} {values[-1]:.3f}" for way, values in times.items()), "ms/step")
            trace.enabled = True  # spans that are still open belong to it
            trace.finish()
    return _shown(times, sampler, batch_size, num_steps)


def _shown(times: dict[str, list[float]], sampler: Sampler, batch_size: int, num_steps: int) -> bool:
    """The table; costs are medians over rounds, against `off` of the same round."""
    table = Table(title="What observing costs", title_justify="left")
    for column in ("", "clips/s", "ms/step", "cost", "± (standard error)", "allowed", ""):
        table.add_column(column, justify="right")
    allowed = {"tracing": MOST_TRACING, "sampling": MOST_SAMPLING}
    all_right = True
    for way, values in times.items():
        shares = [value / base - 1 for value, base in zip(values, times["off"], strict=True)]
        cost, error = statistics.mean(shares), statistics.pstdev(shares) / len(shares) ** 0.5
        median = statistics.median(values)
        right = cost - 2 * error <= allowed.get(way, 1.0)
        told = way in allowed and (way != "sampling" or sampler.available)
        all_right &= right or not told
        limit = f"{allowed[way]:.1%}" if way in allowed else ""
        verdict = ("right" if right else "WRONG") if told else ""
        speed = f"{1000 * batch_size / median:,.1f}"
        table.add_row(way, speed, f"{median:.3f}", f"{cost:+.3%}", f"{error:.3%}", limit, verdict)
    console.print(table)
    console.print(f"{len(times['off'])} rounds of blocks of {num_steps} steps; right: not above by two errors")
    if sampler.available:
        started_at = time.perf_counter()
        for _ in range(READINGS):
            sampler.read()
        reading_ms = 1000 * (time.perf_counter() - started_at) / READINGS
        share = reading_ms / 1000 / PERIOD_S
        console.print(f"A reading takes {reading_ms:.2f} ms of one core, {share:.2%} of it every {PERIOD_S} s")
    else:
        console.print(f"The driver was not sampled: {sampler.reason}")
    sampler.close()
    return all_right
