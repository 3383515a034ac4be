"""Training by several processes, as far as one GPU can show it: cost of a process group, overlap, equal losses.

    python benchmarks/distributed.py [--size normal] [--batch 64] [--steps 20] [--seconds 150] [--skip losses]

NCCL allows one process per GPU. So this measures a step without a process group and in one of a single process;
two processes that exchange gradients through gloo on the same GPU, against one with the whole batch; and the step
captured with an exchange that takes as long as it would on 2, 4 and 8 GPUs: a kernel that only waits, on another
stream. It uses one multiprocessor where NCCL uses up to 24, and no memory bandwidth. Cases that would begin after
so many seconds are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import MAX_MEL_FRAMES, LiveTable, console, machine, train_reports, write_corpus
from torch import Tensor

from myxtts.config import SMALL_CORPUS
from myxtts.data.prepare import prepare
from myxtts.devices import Stream, make_plan, release_memory
from myxtts.model.xtts import SIZES, XTTS
from myxtts.observe.metrics import read_metrics
from myxtts.observe.trace import StepClock
from myxtts.pipeline.feed import build_feed
from myxtts.run import StageContext, set_up
from myxtts.run_dir import RunDir
from myxtts.settings import load
from myxtts.training.trainer import Step, StepMode

LINKS = {"NVLink": (360.0, 12.0), "PCIe 5.0 x16": (40.0, 20.0), "PCIe 4.0 x16": (20.0, 20.0)}
"""Assumed: GB/s of bus bandwidth that NCCL's all_reduce reaches between GPUs of one machine, µs to start one."""
SIMULATED = [("NVLink", 2), ("NVLink", 4), ("NVLink", 8), ("PCIe 5.0 x16", 2), ("PCIe 5.0 x16", 4)]
SIMULATED += [("PCIe 5.0 x16", 8), ("PCIe 4.0 x16", 8)]
WARM_UP = 3
CLIPS, STEPS = 16, 12  # of the runs that are compared
AllReduce = Callable[..., Any]


def exchange_us(num_bytes: int, link: str, num_gpus: int) -> float:
    """Time of a ring's all_reduce on paper."""
    gb_per_s, start_us = LINKS[link]
    return start_us + 2 * (num_gpus - 1) / num_gpus * num_bytes / gb_per_s / 1e3


# Two processes on one device


def rank(options: argparse.Namespace) -> None:
    """One process of a training: RANK and WORLD_SIZE of the environment, each as if on a machine of its own."""
    start = dist.init_process_group
    dist.init_process_group = lambda _, device_id, **how: start("gloo", **how)  # noqa: ARG005
    flags = {
        "data.train_data": str(options.corpus),
        "data.val_data": str(options.corpus),
        "data.language": "en",
        "data.max_mel_frames": MAX_MEL_FRAMES,
        "data.batch_size": CLIPS // int(os.environ.get("WORLD_SIZE", "1")),
        "data.mixed_precision": False,
        "model.size": "tiny",
        "model.dropout": 0,
        "training.checkpoint_dir": str(options.out),
        "training.stages": "gpt",
        "training.max_steps": STEPS,
        "training.warmup_steps": 0,
        "training.val_step": STEPS // 4,
        "training.log_step": 1,
        "training.enable_xla_compilation": False,
        "training.gradient_reduction": options.reduction,
        **dict.fromkeys(SMALL_CORPUS, 0),
    }
    train_reports(load(None, flags), options.out)


def compare_losses(corpus: Path, folder: Path, limit_s: float = 600) -> None:
    """Train the same with one process and with two, also with bf16 exchange; print the validation losses."""
    cases = {"one process": (1, "float32"), "two, float32": (2, "float32"), "two, bfloat16": (2, "bfloat16")}
    running: list[tuple[str, subprocess.Popen[str]]] = []
    for number, (name, (count, reduction)) in enumerate(cases.items()):
        with socket.create_server(("127.0.0.1", 0)) as server:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        for place_rank in range(count):
            own = {"RANK": place_rank, "WORLD_SIZE": count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            command = [sys.executable, __file__, "--rank-of", str(folder / str(number))]
            command += ["--corpus", str(corpus), "--reduction", reduction]
            environment = os.environ | place | {key: str(value) for key, value in own.items()}
            process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
            running.append((name, process))
    for name, process in running:
        try:
            _, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
        if process.returncode:
            console.print(f"{name} failed:\n{errors[-1500:]}", markup=False)
    curves = {}
    for number, name in enumerate(cases):
        with contextlib.suppress(OSError):
            found = read_metrics(folder / str(number) / "metrics.jsonl")
            curves[name] = [each["losses"]["total"] for each in found if each["kind"] == "validation"]
    table = LiveTable(f"validation loss of tiny, fp32, {CLIPS} clips a step", "", *cases, "difference", left=[""])
    for row, losses in enumerate(zip(*curves.values(), strict=True)):
        differences = ", ".join(f"{abs(loss / losses[0] - 1):.1e}" for loss in losses[1:])
        table.add(f"evaluation {row + 1}", *(f"{loss:.6f}" for loss in losses), differences)
    table.show()


# One process


class Bench:
    """The GPT's step on one batch; the network is compiled once."""

    def __init__(self, corpus: Path, size: str, batch: int, num_steps: int) -> None:
        flags = {
            "data.train_data": str(corpus),
            "data.language": "en",
            "data.max_mel_frames": MAX_MEL_FRAMES,
            "data.batch_size": batch,
            "model.size": size,
            **dict.fromkeys(SMALL_CORPUS, 0),
        }
        settings = load(None, flags).settings
        prepared = prepare(settings.data)
        plan = make_plan(settings.data)
        tokenizer = prepared.tokenizer
        with torch.device(plan.model):  # drawing weights on the host takes many seconds
            dims = SIZES[size].with_vocabulary(tokenizer.num_tokens, tokenizer.start_id, tokenizer.stop_id)
            model = XTTS(dims).cpu()
        self.batch, self.num_steps = batch, num_steps
        self.ctx = StageContext("gpt", settings, prepared, plan, model, RunDir(Path("benchmark")))
        self.first = set_up(self.ctx, total=10**6)
        self.stream: Stream = self.first.stream
        self.num_gradient_bytes = sum(p.nbytes for p in self.first.recipe.parameters() if p.requires_grad)

    def measure(self, mode: StepMode, reduction: str = "float32", all_reduce: AllReduce | None = None) -> float:
        """Median time of a step in milliseconds."""
        first = self.first
        before = dist.all_reduce
        dist.all_reduce = all_reduce or before
        step = Step(first.recipe, first.optimizer, mode, self.stream, reduction=reduction)
        clock = StepClock(self.stream.handle)
        try:
            with build_feed(self.ctx, replay=True) as feed, self.stream.use():
                for number in range(WARM_UP + self.num_steps):
                    step(feed.next, number, clock)
                self.stream.finish()
        finally:
            dist.all_reduce = before
            step.close()
        times = [time.step_ms for time in clock.collect()[WARM_UP:]]
        return statistics.median(times)


def recording(begins: list[tuple[int, Any]], original: AllReduce) -> AllReduce:
    """An all_reduce that also notes how many bytes it exchanges, and an event when it may begin."""

    def all_reduce(tensor: Tensor, async_op: bool = False) -> Any:
        event = torch.cuda.Event(enable_timing=True) if tensor.is_cuda else None
        if event is not None:
            event.record()
        begins.append((tensor.nbytes, event))
        return original(tensor, async_op=async_op)

    return all_reduce


class Waiting:
    """An exchange of which nothing happens but that it takes its time."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


def cycles_per_us(num_cycles: int = 20_000_000) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(num_cycles)
    begin.record()
    torch.cuda._sleep(num_cycles)
    end.record()
    torch.cuda.synchronize()
    return num_cycles / begin.elapsed_time(end) / 1e3


def simulated(link: str, num_gpus: int, rate: float, waited_us: list[float]) -> AllReduce:
    """An all_reduce that takes as long as on so many GPUs, one at a time on a stream of its own."""
    stream = torch.cuda.Stream()

    def all_reduce(tensor: Tensor, async_op: bool = False) -> Waiting:  # noqa: ARG001
        length_us = exchange_us(tensor.nbytes, link, num_gpus)
        waited_us.append(length_us)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(rate * length_us))
            event = torch.cuda.Event()
            event.record()
        return Waiting(event)

    return all_reduce


@contextlib.contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    on_gpu = device.type == "cuda"
    backend, own = ("nccl", device) if on_gpu else ("gloo", None)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=own)
    yield
    release_memory()
    dist.destroy_process_group()


def measure_group(bench: Bench, mode: StepMode, table: LiveTable) -> tuple[float, list[tuple[int, Any]]]:
    """Rows for one process without a group and in one; the best time, and when buckets began in the last step."""
    launched = StepMode(autocast=mode.autocast)
    modes = {"captured": mode, "launched": launched} if mode.captured else {"launched": launched}
    alone = {}

    def add(name: str, how: str, reduction: str, step_ms: float) -> None:
        alone.setdefault(how, step_ms)
        against = f"{alone[how] / step_ms - 1:+.1%}"
        table.add(name, how, reduction, f"{step_ms:.2f}", f"{1000 * bench.batch / step_ms:,.0f}", against)

    for how, each in modes.items():
        add("no process group", how, "", bench.measure(each))
    begins: list[tuple[int, Any]] = []
    with group_of_one(bench.ctx.plan.model):
        for how, each in modes.items():
            for reduction in ("float32", "bfloat16"):
                add("group of one", how, reduction, bench.measure(each, reduction))
        bench.num_steps = 5
        bench.measure(launched, "float32", recording(begins, dist.all_reduce))
    return alone[next(iter(modes))], begins


def show_buckets(bench: Bench, begins: list[tuple[int, Any]]) -> None:
    """When the exchange of each bucket of the last step may begin, after that of the first."""
    num_steps = WARM_UP + bench.num_steps
    last = begins[-(len(begins) // num_steps) :]
    sizes = [num_bytes for num_bytes, _ in last]
    console.print(
        f"{bench.num_gradient_bytes / 2**20:,.0f} MB of gradients in {len(sizes)} buckets of "
        f"{min(sizes) / 2**20:.1f} to {max(sizes) / 2**20:.1f} MB"
    )
    if last[0][1] is None:
        return
    at_ms = [last[0][1].elapsed_time(event) for _, event in last]
    shown = ", ".join(f"{ms:.1f}" for ms in at_ms)
    console.print(f"ready, in ms after the first (launched kernel by kernel): {shown}")
    late = sum(size for size, ms in zip(sizes, at_ms, strict=True) if ms > 0.95 * at_ms[-1]) / sum(sizes)
    console.print(f"{late:.1%} of the bytes are ready in the last 5 % of that time")


def show_scaling(bench: Bench, mode: StepMode, alone_ms: float, deadline: float) -> None:
    """The captured step with simulated exchanges."""
    columns = ("link", "GPUs", "exchange", "exchange ms", "step ms", "added ms", "efficiency", "clips/s")
    table = LiveTable("the captured step with an exchange that takes as long as on paper", *columns, left=["link"])
    rate = cycles_per_us()
    bench.num_steps = 8
    for link, num_gpus in SIMULATED:
        for reduction in ("float32", "bfloat16"):
            if time.perf_counter() > deadline:
                console.print(f"left out for lack of time: {link}, {num_gpus} GPUs, {reduction}")
                continue
            waited_us: list[float] = []
            step_ms = bench.measure(mode, reduction, simulated(link, num_gpus, rate, waited_us))
            num_buckets = len(waited_us) // 4  # three warm-ups and the capture; the first has as many
            total_ms = sum(waited_us[-num_buckets:]) / 1000
            efficiency = alone_ms / step_ms
            clips_per_s = f"{num_gpus * 1000 * bench.batch / step_ms:,.0f}"
            added = f"{step_ms - alone_ms:+.2f}"
            cells = (f"{total_ms:.1f}", f"{step_ms:.2f}", added, f"{efficiency:.1%}", clips_per_s)
            table.add(link, num_gpus, reduction, *cells)
    table.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="normal", choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--skip", choices=("losses", "speed"))
    parser.add_argument("--rank-of", dest="out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--reduction", default="float32", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        rank(options)
        return
    deadline = time.perf_counter() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        few, many = Path(folder) / "few", Path(folder) / "many"
        write_corpus(few, CLIPS)
        write_corpus(many, 4 * options.batch)
        if options.skip != "losses":
            compare_losses(few, Path(folder))
        if options.skip == "speed":
            return
        bench = Bench(many, options.size, options.batch, options.steps)
        on_gpu = bench.ctx.plan.model.type == "cuda"
        mode = StepMode(autocast=on_gpu, captured=on_gpu)
        columns = ("", "step", "exchange", "step ms", "clips/s", "against no group")
        table = LiveTable(f"GPT of {options.size} on {machine()}", *columns, left=[""])
        alone_ms, begins = measure_group(bench, mode, table)
        table.show()
        show_buckets(bench, begins)
        if on_gpu:
            for link, (gb_per_s, start_us) in LINKS.items():
                console.print(f"assumed for {link}: {gb_per_s:.0f} GB/s of bus bandwidth, {start_us:.0f} µs each")
            with group_of_one(bench.ctx.plan.model):
                show_scaling(bench, mode, alone_ms, deadline)


if __name__ == "__main__":
    main()
