"""The tools checked on this machine: their diagnoses, predictions and costs against measurements.

python benchmarks/tools.py planted [--case NAME]…    known bottlenecks: is each the first finding?
python benchmarks/tools.py tune [--config NAME]…     bad settings: does a training gain what `tune` predicts?
python benchmarks/tools.py overhead                  the cost of tracing and of sampling the driver
python benchmarks/tools.py commands                  every command promised to users, as written
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from harness import LiveTable, add_command, console, make_table, train_reports
from planted import CASES, Workload, run_planted, small_on_cpu

from myxtts.config import MAX_AUTO_BUFFER
from myxtts.data.prepare import EMBEDDED_CORPUS
from myxtts.observe.nvml import Sampler
from myxtts.observe.trace import StepClock, Trace
from myxtts.pipeline.feed import Feed
from myxtts.run import prepare_corpus
from myxtts.settings import LoadedSettings, with_values
from myxtts.tools import tune as tune_module
from myxtts.tools.dry_run import DryRun, Trial, temporary_codes, try_out
from myxtts.tools.tune import Tuning, tune

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def planted(options: argparse.Namespace) -> bool:
    """Profile trainings with a known bottleneck."""
    on_gpu = options.device != "cpu"
    names = options.case or [name for name, case in CASES.items() if on_gpu or case.on_cpu]
    return run_planted(Workload(Path.cwd(), options.size, on_gpu, options.compile), names)


# `tune`: bad settings are tuned, then trained with before and after, as `myxtts train` trains.

WITHIN, OF_THE_BEST = 0.15, 0.95
"""Allowed error of the predicted gain; share of the best speed by hand that tuning must reach."""
RUN_S, NORMAL_RUN_S = 3.0, 7.0
"""Seconds of a training that are measured, after the epoch that computes codes."""
TUNE_MINUTES = 0.6
COMPILATION = "training.enable_xla_compilation"
EAGER = {"training.enable_graph_mode": "false", "data.mixed_precision": "false", "data.batch_size": "16"}
DECODING = {"data.batch_size": "4", "data.num_workers": "1", "data.native_loading": "false"}


@dataclass(frozen=True)
class BadSettings:
    flags: Mapping[str, str]
    corpus: str
    max_batch: int
    """Ends the search for a batch size early, to save time."""


BAD: Mapping[str, BadSettings] = {
    "decoding": BadSettings(DECODING, "flac", max_batch=16),
    "eager-fp32": BadSettings(EAGER, "clips", max_batch=16),
    "few-clips": BadSettings({"data.batch_size": "2"}, "clips", max_batch=32),
}


def tuned(options: argparse.Namespace) -> bool:
    """Tune bad settings; True if the gain of every training is close to the predicted one."""
    if options.normal:
        return tuned_normal(options)
    columns = ("settings", "changes", "predicted", "measured", "ratio", "", "clips/s before, after", "seconds")
    table = LiveTable("Gain predicted by `myxtts tune` and measured in trainings", *columns, left=columns)
    on_gpu, all_right = options.device != "cpu", True
    # Compilation is left out: each of its trials would take a minute.
    switches = {key: value for key, value in tune_module.SWITCHES.items() if key != COMPILATION}
    with small_on_cpu(on_gpu), mock.patch.object(tune_module, "SWITCHES", switches):
        workload = Workload(Path.cwd(), options.size, on_gpu, compiled=False)
        for name in options.config or BAD:
            cells, right = _tuned_row(workload, name)
            all_right &= right
            table.add(name, *cells)
    table.show()
    return all_right


def _tuned_row(workload: Workload, name: str) -> tuple[list[str], bool]:
    started_at, bad = time.perf_counter(), BAD[name]
    loaded = workload.settings(bad.flags, bad.corpus)
    found = _tune(loaded, TUNE_MINUTES if workload.on_gpu else 5.0, bad.max_batch, workload.on_gpu)
    assert found.before is not None and found.after is not None and found.gain is not None
    runs = {"before": (loaded, found.before), "after": (with_values(loaded, found.values), found.after)}
    speeds = [
        clips_per_s(settings, Path.cwd() / f"{name}-{when}", RUN_S, trial.clips_per_s, workload.on_gpu)
        for when, (settings, trial) in runs.items()
    ]
    measured = speeds[1] / speeds[0]
    ratio = measured / found.gain
    right = abs(ratio - 1) <= WITHIN
    trials = f"{found.before.clips_per_s:,.0f}, {found.after.clips_per_s:,.0f}"
    changes = ", ".join(f"{change.setting.split('.')[1]} {change.new}" for change in found.changes)
    return [
        changes or "none",
        f"{found.gain:.2f}",
        f"{measured:.2f}",
        f"{ratio:.3f}",
        "right" if right else "WRONG",
        f"{speeds[0]:,.0f}, {speeds[1]:,.0f} (tune: {trials})",
        f"{time.perf_counter() - started_at:.0f}",
    ], right


def _tune(loaded: LoadedSettings, minutes: float, max_batch: int, on_gpu: bool) -> Tuning:
    """Run all trials in this process: starting one for each would take most of the time."""
    num_steps = tune_module.GPU_STEPS if on_gpu else tune_module.CPU_STEPS

    def measure(candidate: LoadedSettings) -> Trial:
        _free_memory(on_gpu)
        return try_out(candidate.settings, prepare_corpus(candidate.settings), "gpt", num_steps)

    prepared = prepare_corpus(loaded.settings)
    say = lambda line: console.print("  ", line)  # noqa: E731
    return tune(loaded, prepared, minutes=minutes, max_batch=max_batch, measure=measure, say=say)


def clips_per_s(loaded: LoadedSettings, folder: Path, seconds: float, expected: float, on_gpu: bool) -> float:
    """Speed of a training after its first epoch, over about so many seconds."""
    _free_memory(on_gpu)
    data, num_clips = loaded.settings.data, len(prepare_corpus(loaded.settings).train)
    per_step = data.batch_size * loaded.settings.training.gradient_accumulation_steps
    buffered = data.pipeline_buffer_size or MAX_AUTO_BUFFER
    first = num_clips // per_step + buffered  # computes codes, and what was buffered meanwhile
    counted = max(int(seconds * expected / per_step), 12)
    flags = {
        "training.checkpoint_dir": folder,
        "training.max_steps": first + counted,
        "training.stages": ("gpt",),
        "training.log_step": max(counted // 8, 2),
        "training.save_step": 10**6,
        "training.val_step": 10**6,
    }
    reports = train_reports(with_values(loaded, flags), folder)
    return statistics.median(report.clips_per_s for report in reports if report.step > first)


def tuned_normal(options: argparse.Namespace) -> bool:
    """Compare the tuned `normal` with batch sizes chosen by hand; on a GPU, compiled."""
    workload = Workload(Path.cwd(), "normal", on_gpu=True, compiled=True)
    start = workload.settings({"data.batch_size": "32", "data.pipeline_buffer_size": "12"}, "clips")
    found = _tune(start, options.minutes, max_batch=256, on_gpu=True)
    columns = ("settings", "clips/s in a training")
    table = LiveTable("`normal`: tuned against chosen by hand", *columns, left=columns)
    assert found.after is not None
    speeds: list[float] = []
    by_hand = [{"data.batch_size": size} for size in (64, 128, 256) if found.values != {"data.batch_size": size}]
    for values in (found.values, *by_hand):
        name = f"{'by hand' if speeds else 'tuned'}: {values or 'unchanged'}"
        run = Path.cwd() / f"run-{len(speeds)}"
        speeds.append(clips_per_s(with_values(start, values), run, NORMAL_RUN_S, found.after.clips_per_s, True))
        table.add(name, f"{speeds[-1]:,.0f}")
    share = speeds[0] / max(speeds[1:])
    table.show()
    console.print(f"Tuned reaches {share:.1%} of the best by hand, {'right' if share >= OF_THE_BEST else 'WRONG'}")
    return share >= OF_THE_BEST


def _free_memory(on_gpu: bool) -> None:
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# `overhead`: one feed and one step serve all; between blocks of steps only tracing and sampling are turned on or
# off. The order in a round is random, so that a GPU that warms up favours none; a second `off` shows the noise.

ALLOWED = {"tracing": 0.01, "sampling": 0.001}
WARM_UP_STEPS, FEWEST_ROUNDS, READINGS = 10, 4, 50
BLOCK_S, PERIOD_S = 1.0, 0.1
"""Length of a block; time between two readings of the driver, as in `profile`."""


@dataclass
class Blocks:
    """Blocks of steps, each observed in one way."""

    dry_run: DryRun
    feed: Feed
    trace: Trace
    sampler: Sampler

    def __post_init__(self) -> None:
        self._clock, self._number = StepClock(self.dry_run.stream.handle), 0

    def ms_per_step(self, how: str, num_steps: int) -> float:
        """Mean step time; the device's queue is empty before and after the block."""
        self.trace.enabled = how == "tracing"
        if how == "sampling":
            self.sampler.start()
        self.dry_run.stream.finish()
        started_at = time.perf_counter()
        for _ in range(num_steps):
            self.dry_run.step(self.feed.next, self._number, self._clock, self.trace)
            self._number += 1
        self.dry_run.stream.finish()
        seconds = time.perf_counter() - started_at
        self.sampler.stop()
        self._clock.collect()
        return 1000 * seconds / num_steps


def overhead(options: argparse.Namespace) -> bool:
    """Measure the cost of tracing and of sampling; True if both are small enough."""
    workload = Workload(Path.cwd(), options.size, on_gpu=True, compiled=not options.no_compile)
    loaded = workload.settings({"data.batch_size": str(options.batch)}, "clips")
    times: dict[str, list[float]] = {way: [] for way in ("off", "tracing", "sampling", "off again")}
    trace, sampler = Trace(), Sampler([0], PERIOD_S)
    with temporary_codes(prepare_corpus(loaded.settings)) as apart:
        dry_run = DryRun(loaded.settings, apart, "gpt")
        dry_run.fill_codes()
        device = dry_run.plan.model
        if device.type == "cuda":
            trace.anchor(device)
        with dry_run.feed(trace=trace) as feed:
            feed.wait_until_warm(2.0)
            blocks = Blocks(dry_run, feed, trace, sampler)
            blocks.ms_per_step("off", WARM_UP_STEPS)
            num_steps = max(int(BLOCK_S * 1000 / blocks.ms_per_step("off", WARM_UP_STEPS)), 3)
            console.print(f"blocks of {num_steps} steps of {options.batch} clips, {dry_run.step.mode}")
            ends_at = time.monotonic() + options.seconds
            while time.monotonic() < ends_at or len(times["off"]) < FEWEST_ROUNDS:
                for way in random.sample(list(times), len(times)):
                    times[way].append(blocks.ms_per_step(way, num_steps))
                console.print(" ".join(f"{way} {values[-1]:.3f}" for way, values in times.items()), "ms/step")
            trace.enabled = True  # spans that are still open were recorded by it
            trace.finish()
    all_right = _show_overhead(times, sampler.available, options.batch)
    console.print(f"{len(times['off'])} rounds of blocks of {num_steps} steps; right: at most two errors above")
    _show_reading_time(sampler)
    sampler.close()
    return all_right


def _show_overhead(times: dict[str, list[float]], sampled: bool, batch_size: int) -> bool:
    """Print the mean cost of each way, relative to `off` in the same round."""
    columns = ("", "clips/s", "ms/step", "cost", "± (standard error)", "allowed", " ")
    table, all_right = make_table("The cost of observing", *columns), True
    for way, values in times.items():
        shares = [value / base - 1 for value, base in zip(values, times["off"], strict=True)]
        cost, error = statistics.mean(shares), statistics.pstdev(shares) / len(shares) ** 0.5
        median = statistics.median(values)
        limit = verdict = ""
        if way in ALLOWED and (way != "sampling" or sampled):
            right = cost - 2 * error <= ALLOWED[way]
            all_right &= right
            limit, verdict = f"{ALLOWED[way]:.1%}", "right" if right else "WRONG"
        speed = f"{1000 * batch_size / median:,.1f}"
        table.add_row(way, speed, f"{median:.3f}", f"{cost:+.3%}", f"{error:.3%}", limit, verdict)
    console.print(table)
    return all_right


def _show_reading_time(sampler: Sampler) -> None:
    if not sampler.available:
        console.print(f"The driver was not sampled: {sampler.reason}")
        return
    started_at = time.perf_counter()
    for _ in range(READINGS):
        sampler.read()
    reading_s = (time.perf_counter() - started_at) / READINGS
    share = reading_s / PERIOD_S
    console.print(f"A reading takes {1000 * reading_s:.2f} ms of one core, {share:.2%} of it every {PERIOD_S} s")


# `commands`: FOLDER and CORPUS stand for what a user would name. Trainings are limited to a number of steps; the
# one without flags is interrupted, as with Ctrl+C. With too few GPUs, a command must end with the error for that.

LIMIT_S = 170.0
SHOWN_LINES = 4
TWO_GPUS = "Multi-GPU requires at least 2 GPUs"
SHORT = "--stages gpt --max-steps 20 --checkpoint-dir FOLDER --num-workers 4"
DUAL = "--data-gpu 0 --model-gpu 1"


@dataclass(frozen=True)
class Command:
    """A promised command line, the flags added to it here, and how it may end."""

    line: str
    more: str = ""
    codes: tuple[int, ...] = (0,)
    says: str = ""
    num_gpus: int = 0
    """With fewer GPUs it must fail and list those found."""
    stop_after_s: float = 0.0
    """Interrupted after so long; 0 lets it end by itself."""


STARTS = "Model training starting now"
COMMANDS = (
    Command("train_main.py", "--checkpoint-dir FOLDER", says="Single-GPU Buffered Mode", stop_after_s=60),
    Command("train_main.py --train-data CORPUS --val-data CORPUS", SHORT, says=STARTS),
    Command("train_main.py --config configs/config.yaml", SHORT, says=STARTS),
    Command(f"train_main.py {DUAL} --enable-memory-isolation --enable-static-shapes --data-gpu-memory 8192 "
            "--model-gpu-memory 16384 --model-size tiny --batch-size 16 --train-data CORPUS",
            SHORT, says="Multi-GPU Mode", num_gpus=2),
    Command("train_main.py --data-gpu 2 --model-gpu 3 --train-data CORPUS", SHORT, num_gpus=4),
    Command("train_main.py --buffer-size 100 --model-start-delay 3.0 --max-steps 100 --epochs 500 --grad-accum 4 "
            "--num-workers 16 --prefetch-buffer-size 8 --optimization-level enhanced --model-size small",
            "--stages gpt --checkpoint-dir FOLDER"),
    Command(f"validate_dual_gpu_pipeline.py {DUAL}", num_gpus=2),
    Command(f"utilities/dual_gpu_bottleneck_profiler.py --batch-size 16 --num-steps 100 {DUAL}",
            says="Training", num_gpus=2),
    Command("utilities/dual_gpu_bottleneck_profiler.py --batch-size 16 --num-steps 100", says="raining"),
    Command("utilities/analyze_data_pipeline_bottleneck.py", says="Pipeline efficiency"),
    Command("utilities/analyze_data_pipeline_bottleneck.py --config configs/config.yaml",
            says="Text preprocessing"),
    Command("utilities/validate_gpu_optimization.py", codes=(0, 1), says="native-loading"),
    Command("utilities/validate_gpu_optimization.py --config configs/config.yaml", codes=(0, 1)),
    Command("utilities/diagnose_gpu_bottleneck.py --batch-size 16 --num-batches 50", says="raining"),
    Command("utilities/gpu_profiler.py", says="ernel"),
    Command("quick_gpu_fix.py", "--minutes 1.5 --max-batch 32 --disable-xla-compilation", says="clips/s"),
    Command("test_gpu_optimization.py", codes=(0, 1), says="optimisations"),
    Command("-m unittest tests.test_dual_gpu_device_placement -v", says="OK"),
    Command("-m unittest tests.test_intelligent_gpu_pipeline -v", says="OK"),
    Command("tests/test_gpu_oscillation_fix.py", says="OK"),
)  # fmt: skip
"""In the promised order; `utilities/dual_gpu_bottleneck_profiler.py` also with one GPU."""


@dataclass(frozen=True)
class Ended:
    code: int
    seconds: float
    output: str


def run_commands(options: argparse.Namespace) -> bool:
    """Run the commands, several at a time; True if all ended as they should."""
    chosen = [command for command in COMMANDS if options.match in command.line]
    num_gpus, all_right = torch.cuda.device_count(), True
    started_at = time.perf_counter()
    columns = ("command", "added", "exit", "", "seconds")
    title = f"Commands as written, {num_gpus} GPU(s), {options.at_once} at a time"
    table = make_table(title, *columns, left=columns)
    folders = [Path.cwd() / str(number) for number in range(len(chosen))]
    with ThreadPoolExecutor(options.at_once) as pool:
        for command, ended in zip(chosen, pool.map(_run, chosen, folders), strict=True):
            right = _is_right(command, ended, num_gpus)
            all_right &= right
            cells = (str(ended.code), "right" if right else "WRONG", f"{ended.seconds:.0f}")
            table.add_row(command.line, command.more, *cells)
            console.rule(f"python {command.line} {command.more}", align="left")
            console.print(*cells, sep=" | ")
            lines = [line for line in ended.output.splitlines() if line.strip()]
            for line in lines[:SHOWN_LINES] if right else lines[-3 * SHOWN_LINES :]:
                console.print("   ", line[:140], markup=False)
            if options.keep is not None:
                with options.keep.open("a", encoding="utf-8") as file:
                    file.write(f"$ python {command.line} {command.more}\n{ended.output}\n[exit {ended.code}]\n\n")
    console.print(table)
    console.print(f"{len(chosen)} commands in {time.perf_counter() - started_at:.0f} s")
    return all_right


def _run(command: Command, folder: Path) -> Ended:
    words = f"{command.line} {command.more}".split()
    places = {"FOLDER": str(folder), "CORPUS": str(EMBEDDED_CORPUS)}
    arguments = [sys.executable, *(places.get(word, word) for word in words)]
    output, started_at = folder.with_suffix(".txt"), time.perf_counter()
    with output.open("w") as file:
        environment = os.environ | {"COLUMNS": "150"}
        process = subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            if command.stop_after_s:
                _interrupt_after(process, command.stop_after_s)
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = 124
    return Ended(code, time.perf_counter() - started_at, output.read_text(errors="replace"))


def _interrupt_after(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Send SIGINT unless the process has ended by then."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)


def _is_right(command: Command, ended: Ended, num_gpus: int) -> bool:
    if "Traceback" in ended.output:
        return False
    if num_gpus < command.num_gpus:
        return ended.code in (1, 2) and (TWO_GPUS in ended.output or "no GPU" in ended.output)
    says = command.says if num_gpus or "GPU" not in command.says else ""
    stopped = (130,) if command.stop_after_s else ()
    return ended.code in (*command.codes, *stopped) and says in ended.output


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = add_command(commands, "planted", planted)
    command.add_argument("--case", action="append", choices=list(CASES), help="may be repeated [all]")
    command.add_argument("--size", default="tiny", choices=("tiny", "small"))
    command.add_argument("--device", default=DEFAULT_DEVICE)
    command.add_argument("--compile", action="store_true", help="takes a minute for each case")
    command = add_command(commands, "tune", tuned)
    command.add_argument("--config", action="append", choices=list(BAD), help="may be repeated [all]")
    command.add_argument("--size", default="tiny", choices=("tiny", "small"))
    command.add_argument("--normal", action="store_true", help="tuned `normal` against batch sizes by hand")
    command.add_argument("--minutes", type=float, default=4.0, help="for tuning, with --normal")
    command.add_argument("--device", default=DEFAULT_DEVICE)
    command = add_command(commands, "overhead", overhead)
    command.add_argument("--size", default="normal", choices=("tiny", "small", "normal"))
    command.add_argument("--batch", type=int, default=64)
    command.add_argument("--seconds", type=float, default=30.0, help="of measuring, in turns")
    command.add_argument("--no-compile", action="store_true")
    command = add_command(commands, "commands", run_commands)
    command.add_argument("--match", default="", help="only commands that contain this text")
    command.add_argument("--at-once", type=int, default=6, help="commands running at the same time")
    command.add_argument("--keep", type=Path, help="file for everything they print")
    options = parser.parse_args()
    if getattr(options, "keep", None):
        options.keep = options.keep.resolve()
    temporary = tempfile.TemporaryDirectory(prefix="myxtts-tools-", ignore_cleanup_errors=True)
    with temporary as folder, contextlib.chdir(folder):  # an empty folder, where no configs/config.yaml is read
        return int(not options.call(options))


if __name__ == "__main__":
    sys.exit(main())
