"""The price of evaluations: one run that never evaluates, one that waits for them, one that does not.

    python benchmarks/evaluation.py         `normal`, 64 clips, every 200 steps a validation and 8 spoken sentences
    python benchmarks/evaluation.py --size tiny --batch 4 --steps 24 --every 10 --clips 60      a trial on a CPU

Every run is one call of the function that `myxtts train` calls, on LJSpeech-like noise, from the same random
weights. Time counts from step `--from-step` to the last, from launch to launch, with everything in between:
evaluations, checkpoints, metrics.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import MAX_MEL_FRAMES, LiveTable, console, machine, write_corpus

from myxtts.config import SMALL_CORPUS
from myxtts.data.prepare import prepare
from myxtts.devices import release_memory
from myxtts.model.xtts import SIZES, XTTS
from myxtts.observe.metrics import Spoken, StepReport, ValidationReport
from myxtts.run import train
from myxtts.settings import load
from myxtts.training.trainer import Reporter
from myxtts.weights import save_folder

WAYS = {"never": "off", "on the model role": "model", "on the data role": "data"}


class Observed(Reporter):
    """When every step was launched, how long each took on the model stream, and when evaluations came."""

    def __init__(self) -> None:
        self.launched: dict[int, float] = {}
        self.times_ms: list[float] = []
        self.late_s: dict[int, float] = {}
        self.num_spoken = 0

    def tick(self, step: int) -> None:
        self.launched[step] = time.perf_counter()

    def step(self, report: StepReport) -> None:
        self.times_ms += report.times_ms

    def validation(self, report: ValidationReport) -> None:
        self.late_s[report.step] = time.perf_counter() - self.launched[report.step]

    def spoken(self, stage: str, step: int, sentences: Any) -> None:  # noqa: ARG002
        found: list[Spoken] = list(sentences)
        self.num_spoken += len(found)


def one_run(folder: Path, values: dict[str, Any], where: str) -> tuple[Observed, list[str]]:
    observed, lines = Observed(), list[str]()
    own = {"training.evaluate_on": where, "training.checkpoint_dir": str(folder)}
    train(load(None, {**values, **own}), reporter=observed, say=lines.append)
    return observed, lines


def settings_of(options: argparse.Namespace, corpus: Path) -> dict[str, Any]:
    return {
        "data.train_data": str(corpus),
        "data.language": "en",
        "data.max_mel_frames": MAX_MEL_FRAMES,
        "data.batch_size": options.batch,
        "data.val_fraction": options.held_out / options.clips,
        "model.size": options.size,
        "training.stages": "gpt",
        "training.max_steps": options.steps,
        "training.log_step": 20,
        "training.val_step": options.every,
        "training.save_step": 2 * options.every,
        "training.keep_checkpoints": 1,
        "training.spoken_sentences": options.sentences,
        **dict.fromkeys(SMALL_CORPUS, 0),
    }


def write_weights(folder: Path, size: str, values: dict[str, Any]) -> None:
    """Write a folder of random weights, drawn on the GPU if there is one, which takes a moment."""
    tokenizer = prepare(load(None, values).settings.data).tokenizer
    dims = SIZES[size].with_vocabulary(tokenizer.num_tokens, tokenizer.start_id, tokenizer.stop_id)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        model = XTTS(dims)
    save_folder(folder, model.cpu(), tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="normal", choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=420)
    parser.add_argument("--every", type=int, default=200, help="steps between two evaluations")
    parser.add_argument("--sentences", type=int, default=8)
    parser.add_argument("--clips", type=int, default=2000)
    parser.add_argument("--held-out", type=int, default=128)
    parser.add_argument("--from-step", type=int, default=20, help="earlier steps compile")
    options = parser.parse_args()
    first, last = min(options.from_step, options.steps // 4), options.steps - 1
    columns = ("evaluations", "clips/s", "of never", "model stream trains", "longest pause s", "results after s")
    title = (
        f"GPT stage of {options.size}, {options.batch} clips, evaluated every {options.every} steps, {machine()}"
    )
    table = LiveTable(title, *columns, left=("evaluations",))
    never = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus", options.clips)
        values = settings_of(options, folder / "corpus")
        write_weights(folder / "weights", options.size, values)
        values["training.init_from"] = str(folder / "weights")
        for way, where in WAYS.items():
            release_memory()
            found, lines = one_run(folder / where, values, where)
            elapsed = found.launched[last] - found.launched[first]
            clips_per_s = (last - first) * options.batch / elapsed
            never = never or clips_per_s
            pauses = [found.launched[step + 1] - found.launched[step] for step in range(first, last)]
            trained = sum(found.times_ms[first:last]) / 1000 / elapsed
            late = [f"{found.late_s[step]:.1f}" for step in sorted(found.late_s) if 1 < step < options.steps]
            rest = (f"{max(pauses):.2f}", ", ".join(late))
            table.add(way, f"{clips_per_s:,.1f}", f"{clips_per_s / never:.1%}", f"{min(trained, 1):.1%}", *rest)
            median = statistics.median(found.times_ms[first:last])
            console.print(f"  step {median:.1f} ms, {found.num_spoken} sentences spoken", markup=False)
            told = [line for line in lines if "valuat" in line or "spoken" in line]
            console.print(*(f"  {line}" for line in told), sep="\n", markup=False)
    table.show()


if __name__ == "__main__":
    main()
