"""The price of evaluations: a run that never evaluates, one that waits for evaluations, one that does not wait.

    python benchmarks/evaluation.py         `normal`, 64 clips, every 200 steps a validation and 8 spoken sentences
    python benchmarks/evaluation.py --size tiny --batch 4 --steps 26 --every 10 --from-step 4 --clips 60    a trial

Every run is one call of the function that `myxtts train` calls, in a process of its own, on LJSpeech-like noise,
from the same random weights, whose sentences end after six seconds on average. A checkpoint is saved at every
second evaluation. Time counts over two evaluations and a checkpoint, from `--from-step` on, from launch to launch,
with everything in between. The last row is what another card could give at most: batches that cost nothing (one of
them, replayed) and no evaluation.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import MAX_MEL_FRAMES, LiveTable, console, machine, write_corpus

from myxtts.config import SMALL_CORPUS
from myxtts.data.prepare import prepare
from myxtts.model.xtts import SIZES, XTTS
from myxtts.observe.metrics import Spoken, StepReport, ValidationReport
from myxtts.run import train
from myxtts.settings import load
from myxtts.tools.dry_run import DryRun
from myxtts.training.trainer import Reporter
from myxtts.weights import save_folder

WAYS = {"never": "off", "on the model role": "model", "on the data role": "data"}
ANOTHER_CARD = "another card, at most"
CODES_A_SENTENCE = 130  # six seconds
LIMIT_S = 240  # of one run


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


def settings_of(options: argparse.Namespace, folder: Path, where: str) -> dict[str, Any]:
    return {
        "data.train_data": str(folder / "corpus"),
        "data.language": "en",
        "data.max_mel_frames": MAX_MEL_FRAMES,
        "data.batch_size": options.batch,
        "data.val_fraction": options.held_out / options.clips,
        "model.size": options.size,
        "training.stages": "gpt",
        "training.init_from": str(folder / "weights"),
        "training.checkpoint_dir": str(folder / where),
        "training.evaluate_on": where,
        "training.max_steps": options.steps,
        "training.log_step": 10,
        "training.val_step": options.every,
        "training.save_step": 2 * options.every,
        "training.keep_checkpoints": 1,
        "training.spoken_sentences": options.sentences,
        **dict.fromkeys(SMALL_CORPUS, 0),
    }


def make(options: argparse.Namespace, folder: Path) -> None:
    """Write the corpus, and random weights, drawn on the GPU if there is one, which takes a moment."""
    write_corpus(folder / "corpus", options.clips)
    values = settings_of(options, folder, "off") | {"training.init_from": None}
    tokenizer = prepare(load(None, values).settings.data).tokenizer
    dims = SIZES[options.size].with_vocabulary(tokenizer.num_tokens, tokenizer.start_id, tokenizer.stop_id)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        model = XTTS(dims)
    with torch.no_grad():
        model.gpt.mel_head.bias[dims.gpt.stop_code] = math.log(dims.gpt.num_codes / CODES_A_SENTENCE)
    save_folder(folder / "weights", model.cpu(), tokenizer)


def trained(options: argparse.Namespace, folder: Path, where: str) -> dict[str, Any]:
    """Train once, and what that took."""
    observed, lines = Observed(), list[str]()
    train(load(None, settings_of(options, folder, where)), reporter=observed, say=lines.append)
    first, last = options.from_step, options.from_step + 2 * options.every
    elapsed = observed.launched[last] - observed.launched[first]
    times = observed.times_ms[first:last]
    pauses = [observed.launched[step + 1] - observed.launched[step] for step in range(first, last)]
    return {
        "clips_per_s": (last - first) * options.batch / elapsed,
        "trains": min(sum(times) / 1000 / elapsed, 1.0),
        "step_ms": statistics.median(times),
        "longest_pause_s": max(pauses),
        "late_s": [observed.late_s[step] for step in sorted(observed.late_s) if 1 < step < last],
        "num_spoken": observed.num_spoken,
        "said": [line for line in lines if any(word in line for word in ("valuat", "spoken", "sentences"))],
    }


def another_card(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What `myxtts tune` and `profile` ask of a dry run: its speed if batches cost this card nothing."""
    settings = load(None, settings_of(options, folder, "off")).settings
    dry_run = DryRun(settings, prepare(settings.data), "gpt")
    dry_run.measure(min(20, options.steps))  # compiles, and computes codes
    steps = min(40, options.steps)
    fed, replayed = dry_run.measure(steps), dry_run.measure(steps, replay=True)
    said = [f"dry run: {fed.clips_per_s:,.1f} clips/s with the feed, {replayed.clips_per_s:,.1f} without"]
    return {"clips_per_s": replayed.clips_per_s, "said": said}


def apart(options: argparse.Namespace, way: str, folder: Path) -> dict[str, Any] | None:
    """The result of one run in a process of its own; None if that failed, which is printed."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder), "--way", way]
    try:
        subprocess.run(command, check=True, timeout=options.limit)
        return dict(json.loads(result.read_text(encoding="utf-8")))
    except (subprocess.SubprocessError, OSError) as error:
        console.print(f"{way}: {type(error).__name__}: {error}"[:300], markup=False)
        return None
    finally:
        shutil.rmtree(folder / WAYS.get(way, "off"), ignore_errors=True)


def one_way(options: argparse.Namespace) -> None:
    way, folder = options.way, options.folder
    found = another_card(options, folder) if way == ANOTHER_CARD else trained(options, folder, WAYS[way])
    (folder / "result.json").write_text(json.dumps(found), encoding="utf-8")


def row(found: dict[str, Any], never: float | None) -> list[str]:
    cells = [f"{found['clips_per_s']:,.1f}", f"{found['clips_per_s'] / never:.1%}" if never else ""]
    if "trains" in found:
        cells += [f"{found['trains']:.1%}", f"{found['step_ms']:.1f}", f"{found['longest_pause_s']:.2f}"]
        cells += [", ".join(f"{late:.1f}" for late in found["late_s"]), str(found["num_spoken"])]
    return cells


def compare(options: argparse.Namespace) -> None:
    columns = ("evaluations", "clips/s", "of never", "model stream trains", "step ms", "longest pause s")
    columns += ("results after s", "spoken")
    sentences = f"{options.sentences} sentences every {options.every} steps"
    title = f"GPT stage of {options.size}, {options.batch} clips, {sentences}, {machine()}"
    table, speeds = LiveTable(title, *columns, left=("evaluations",)), dict[str, float]()
    with tempfile.TemporaryDirectory() as name:
        began = time.perf_counter()
        make(options, Path(name))
        console.print(f"corpus and weights: {time.perf_counter() - began:.0f} s")
        for way in options.ways:
            began = time.perf_counter()
            if (found := apart(options, way, Path(name))) is None:
                continue
            speeds[way] = found["clips_per_s"]
            console.print(*(f"  {line}" for line in found["said"]), sep="\n", markup=False)
            table.add(way, *row(found, speeds.get("never")))
            console.print(f"  {time.perf_counter() - began:.0f} s")
    table.show()
    if ANOTHER_CARD in speeds and (ours := speeds.get("on the data role")):
        gain = speeds[ANOTHER_CARD] / ours - 1
        console.print(f"Another card would give at most {gain:+.1%} over evaluating on the data role of this one.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="normal", choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--every", type=int, default=200, help="steps between two evaluations")
    parser.add_argument("--sentences", type=int, default=8)
    parser.add_argument("--clips", type=int, default=2000)
    parser.add_argument("--held-out", type=int, default=128)
    parser.add_argument("--from-step", type=int, default=40, help="earlier steps compile and compute codes")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which a run is given up")
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, ANOTHER_CARD), default=[*WAYS, ANOTHER_CARD])
    parser.add_argument("--way", choices=(*WAYS, ANOTHER_CARD), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < options.from_step + 2 * options.every:
        parser.error("--steps must be at least --from-step and twice --every")
    if options.way:
        one_way(options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
