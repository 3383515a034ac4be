"""Every command that users are promised, run as written: its exit code, its time and what it says.

`FOLDER` and `CORPUS` stand for what a user would name. Long trainings get a number of steps where nothing says how
long, and one that takes none is asked to stop, as with Ctrl+C. Commands for two GPUs must end with the error
that says so on a machine with fewer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from myxtts.data.prepare import EMBEDDED_CORPUS

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 170.0
SHOWN_LINES = 4
TWO_GPUS = "Multi-GPU requires at least 2 GPUs"
SHORT = "--stages gpt --max-steps 20 --checkpoint-dir FOLDER --num-workers 4"
console = Console(width=150, highlight=False)


@dataclass(frozen=True)
class Command:
    """A line of the promise, what was added to it, and how it may end."""

    line: str
    more: str = ""
    codes: tuple[int, ...] = (0,)
    says: str = ""
    num_gpus: int = 0
    """Fewer lead to an error that names them."""
    stop_after_s: float = 0.0
    """Asked to stop so long after its start; 0 lets it end by itself."""


DUAL = "--data-gpu 0 --model-gpu 1"
COMMANDS = (
    Command("train_main.py", "--checkpoint-dir FOLDER", says="Single-GPU Buffered Mode", stop_after_s=60),
    Command("train_main.py --train-data CORPUS --val-data CORPUS", SHORT, says="Model training starting now"),
    Command("train_main.py --config configs/config.yaml", SHORT, says="Model training starting now"),
    Command(
        f"train_main.py {DUAL} --enable-memory-isolation --enable-static-shapes --data-gpu-memory 8192 "
        "--model-gpu-memory 16384 --model-size tiny --batch-size 16 --train-data CORPUS",
        SHORT,
        says="Multi-GPU Mode",
        num_gpus=2,
    ),
    Command("train_main.py --data-gpu 2 --model-gpu 3 --train-data CORPUS", SHORT, num_gpus=4),
    Command(
        "train_main.py --buffer-size 100 --model-start-delay 3.0 --max-steps 100 --epochs 500 --grad-accum 4 "
        "--num-workers 16 --prefetch-buffer-size 8 --optimization-level enhanced --model-size small",
        "--stages gpt --checkpoint-dir FOLDER",
    ),
    Command(f"validate_dual_gpu_pipeline.py {DUAL}", num_gpus=2),
    Command(
        f"utilities/dual_gpu_bottleneck_profiler.py --batch-size 16 --num-steps 100 {DUAL}",
        says="Training",
        num_gpus=2,
    ),
    Command("utilities/dual_gpu_bottleneck_profiler.py --batch-size 16 --num-steps 100", says="raining"),
    Command("utilities/analyze_data_pipeline_bottleneck.py", says="Pipeline efficiency"),
    Command(
        "utilities/analyze_data_pipeline_bottleneck.py --config configs/config.yaml", says="Text preprocessing"
    ),
    Command("utilities/validate_gpu_optimization.py", codes=(0, 1), says="native-loading"),
    Command("utilities/validate_gpu_optimization.py --config configs/config.yaml", codes=(0, 1)),
    Command("utilities/diagnose_gpu_bottleneck.py --batch-size 16 --num-batches 50", says="raining"),
    Command("utilities/gpu_profiler.py", says="ernel"),
    Command("quick_gpu_fix.py", "--minutes 1.5 --max-batch 32 --disable-xla-compilation", says="clips/s"),
    Command("test_gpu_optimization.py", codes=(0, 1), says="optimisations"),
    Command("-m unittest tests.test_dual_gpu_device_placement -v", says="OK"),
    Command("-m unittest tests.test_intelligent_gpu_pipeline -v", says="OK"),
    Command("tests/test_gpu_oscillation_fix.py", says="OK"),
)
"""In the order of the promise; `utilities/dual_gpu_bottleneck_profiler.py` also with one GPU."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    seconds: float
    output: str


def run_commands(folder: Path, match: str, at_once: int, keep: Path | None) -> bool:
    """Run them, some beside each other; whether all ended as they should."""
    chosen = [command for command in COMMANDS if match in command.line]
    num_gpus = torch.cuda.device_count()
    started_at = time.perf_counter()
    table = Table(title=f"Commands as written, {num_gpus} GPU(s), {at_once} at a time", title_justify="left")
    for column in ("command", "added", "exit", "", "seconds"):
        table.add_column(column)
    all_right = True
    with ThreadPoolExecutor(at_once) as pool:
        ends = pool.map(lambda numbered: _run(numbered[1], folder / str(numbered[0])), enumerate(chosen))
        for command, ended in zip(chosen, ends, strict=True):
            right = _is_right(command, ended, num_gpus)
            all_right &= right
            cells = (str(ended.code), "right" if right else "WRONG", f"{ended.seconds:.0f}")
            table.add_row(command.line, command.more, *cells)
            console.rule(f"python {command.line} {command.more}", align="left")
            console.print(*cells, sep=" | ")
            lines = [line for line in ended.output.splitlines() if line.strip()]
            for line in lines[:SHOWN_LINES] if right else lines[-3 * SHOWN_LINES :]:
                console.print("   ", line[:140], markup=False)
            if keep is not None:
                with keep.open("a", encoding="utf-8") as file:
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
                _stop_later(process, command.stop_after_s)
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = 124
    return Ended(code, time.perf_counter() - started_at, output.read_text(errors="replace"))


def _stop_later(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Ask for a stop unless it has ended by then."""
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
