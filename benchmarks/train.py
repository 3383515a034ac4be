"""Training end to end: a corpus folder, the real pipeline, metrics, checkpoints; and compared with coqui-tts.

    python benchmarks/train.py speed                     clips/s of normal, small and tiny, LJSpeech-like noise
    python benchmarks/train.py speed --deterministic     the same, and again with --deterministic
    python benchmarks/train.py sharded                   the same from a folder and from a sharded corpus
    python benchmarks/train.py memory                    fine-tuning `normal` under caps of 8 and 12 GB
    python benchmarks/train.py presets                   every preset under the cap of its card, a few steps each
    python benchmarks/train.py weights --corpus DIR --out DIR    fresh weights that both trainers start from
    python benchmarks/train.py curve --corpus DIR --weights DIR --out FILE     losses on real speech, for `compare`
    python benchmarks/train.py compare OURS COQUI…       tables of what `curve` and benchmarks/coqui.py wrote

Every measurement is one call of the function that `myxtts train` calls.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import (
    MAX_MEL_FRAMES,
    LiveTable,
    add_command,
    console,
    fresh_weights,
    machine,
    make_table,
    train_reports,
    write_corpus,
)

from myxtts.config import PRESETS, SMALL_CORPUS, STAGES, DataSettings, Settings
from myxtts.data import sources
from myxtts.data.clips import PreparedCorpus
from myxtts.data.jobs import JobOptions, prepare_sharded
from myxtts.data.prepare import prepare
from myxtts.devices import CONTEXT_MB, MARGIN_MB, apply_caps, explained_out_of_memory, make_plan
from myxtts.errors import NO_PROGRESS, MyXTTSError
from myxtts.model.xtts import SIZES, XTTS
from myxtts.observe.metrics import StepReport
from myxtts.observe.trace import StepClock
from myxtts.pipeline.feed import build_feed
from myxtts.run import StageContext, set_up
from myxtts.run_dir import RunDir
from myxtts.settings import load
from myxtts.text.tokenizer import Tokenizer

LORA, RECOMPUTE = {"model.lora_rank": 16}, {"model.gradient_checkpointing": True}
MEMORY_CASES: list[tuple[int, int, dict[str, object]]] = [
    (8192, 4, LORA | RECOMPUTE),
    (8192, 8, LORA | RECOMPUTE),
    (8192, 4, {**LORA}),
    (12288, 16, LORA | RECOMPUTE),
    (12288, 4, {**RECOMPUTE}),
    (12288, 8, {**RECOMPUTE}),
]
"""Cap in MB, clips, settings."""


def run(folder: Path, flags: dict[str, object]) -> list[StepReport]:
    """One run of the GPT stage with these settings."""
    defaults = {"data.language": "en", "training.checkpoint_dir": str(folder), "training.stages": "gpt"}
    defaults |= dict.fromkeys(SMALL_CORPUS, 0)
    return train_reports(load(None, {**defaults, **flags}), folder)


def speed(options: argparse.Namespace) -> None:
    columns = ("size", "clips", "clips/s", "step ms", "CV", "idle", "peak GiB", "ahead")
    table = LiveTable(f"GPT stage end to end, {machine()}", *columns, "deterministic")
    modes = (False, True) if options.deterministic else (False,)
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "corpus", options.corpus_clips)
        for size, fixed in itertools.product(options.size or ("normal", "small", "tiny"), modes):
            flags: dict[str, object] = {
                "data.train_data": str(Path(folder) / "corpus"),
                "data.max_mel_frames": MAX_MEL_FRAMES,
                "data.batch_size": options.batch,
                "model.size": size,
                "training.max_steps": options.steps,
                "training.log_step": 20,
                "training.save_step": max(options.steps // 2, 1),
                "training.val_step": 10**6,
                "training.deterministic": fixed,
            }
            reports = run(Path(folder) / f"{size}-{fixed}", flags)
            steady = [report for report in reports if report.step > options.steps // 4]
            table.add(
                size,
                options.batch,
                f"{statistics.median(report.clips_per_s for report in steady):,.0f}",
                f"{statistics.median(report.step_ms for report in steady):.1f}",
                f"{statistics.median(report.step_cv for report in steady):.1%}",
                f"{statistics.mean(report.idle_share for report in steady):.2%}",
                f"{max(reports[-1].memory_mb.values(), default=0) / 1024:.1f}",
                round(statistics.median(report.ahead for report in steady)),
                "yes" if fixed else "no",
            )
    table.show()


def sharded(options: argparse.Namespace) -> None:
    """`normal` fed from one store and from shards of the same clips, in turns."""
    folder = options.folder
    if not (folder / "shards").exists():
        write_corpus(folder / "corpus", options.corpus_clips)
        sources.SLICE_CLIPS = 16
        given = load(None, {"data.train_data": str(folder / "corpus"), "data.language": "en"}).settings.data
        made = prepare_sharded(given, folder / "shards", JobOptions(shard_mb=options.shard_mb), None, NO_PROGRESS)
        console.print(f"{made.made} shards")
    table = LiveTable(
        f"GPT stage of {options.size}, {options.batch} clips, {machine()}", "corpus", "clips/s", "idle"
    )
    for number, name in enumerate(("corpus", "shards") * options.rounds):
        flags: dict[str, object] = {
            "data.train_data": str(folder / name),
            "data.max_mel_frames": MAX_MEL_FRAMES,
            "data.batch_size": options.batch,
            "model.size": options.size,
            "training.max_steps": options.steps,
            "training.log_step": 10,
            "training.save_step": 10**6,
            "training.evaluate_on": "off",
        }
        reports = run(folder / f"run-{number}-{options.steps}", flags)
        steady = [report for report in reports if report.step > options.steps // 3]
        speed = statistics.median(report.clips_per_s for report in steady)
        table.add(name, f"{speed:,.1f}", f"{statistics.mean(report.idle_share for report in steady):.2%}")
    table.show()


def memory(options: argparse.Namespace) -> None:
    """Peak memory and speed of fine-tuning `normal` under a cap, or the error that says why not."""
    columns = ("cap MB", "clips", "options", "clips/s", "peak MB", "result")
    table = LiveTable(f"fine-tuning `normal` under a cap, {machine()}", *columns)
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "corpus", 300)
        for number, (cap, batch, extra) in enumerate(MEMORY_CASES):
            flags: dict[str, object] = {
                "data.train_data": str(Path(folder) / "corpus"),
                "data.max_mel_frames": MAX_MEL_FRAMES,
                "data.batch_size": batch,
                "data.enable_memory_isolation": True,
                "data.model_gpu_memory": cap,
                "model.size": "normal",
                "training.max_steps": options.steps,
                "training.log_step": 5,
                "training.enable_xla_compilation": False,
            }
            try:
                last = run(Path(folder) / str(number), flags | extra)[-1]
                cells = (f"{last.clips_per_s:,.0f}", f"{max(last.memory_mb.values()):,.0f}", "trains")
            except MyXTTSError as error:
                cells = ("", "", str(error).splitlines()[0][:60])
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_per_process_memory_fraction(1.0)
            shown = ", ".join(f"{name.split('.')[1]} {value}" for name, value in extra.items())
            table.add(cap, batch, shown, *cells)
    table.show()


def presets(options: argparse.Namespace) -> None:
    """Peak memory of each preset under the default cap of its card: `normal` where that fits, else `small`.

    The network starts from the same random weights each time and is not compiled, to save minutes.
    """
    columns = ("preset", "stage", "size", "clips", "accumulate", "cap MB", "allocated MB", "reserved MB", "result")
    table = LiveTable(f"presets under the cap of their card, {machine()}", *columns, left=("result",))
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        write_corpus(corpus, 160)
        flags = {"data.train_data": str(corpus), "data.language": "en", "training.enable_xla_compilation": False}
        prepared = prepare(load(None, flags).settings.data)
        models = {size: random_model(size, prepared.tokenizer) for size in ("normal", "small")}
        for name, stage in itertools.product(options.preset or PRESETS, options.stage or ("gpt", "decoder")):
            cap = 1024 * int(name.removesuffix("gb")) - CONTEXT_MB - MARGIN_MB
            values = {**flags, **PRESETS[name], "data.enable_memory_isolation": True, "data.model_gpu_memory": cap}
            for size, model in models.items():
                settings = load(None, {**values, "model.size": size}).settings
                result = few_steps(settings, prepared, stage, deepcopy(model), options.steps)
                allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
                torch.cuda.set_per_process_memory_fraction(1.0)
                cells = (settings.data.batch_size, settings.training.gradient_accumulation_steps, cap)
                table.add(name, stage, size, *cells, allocated // 2**20, reserved // 2**20, result)
                if result == "trains":
                    break
    table.show()


def random_model(size: str, tokenizer: Tokenizer) -> XTTS:
    """A network on the host, its weights drawn on the GPU, which takes a moment instead of many seconds."""
    with torch.device("cuda"):
        dims = SIZES[size].with_vocabulary(tokenizer.num_tokens, tokenizer.start_id, tokenizer.stop_id)
        return XTTS(dims).cpu()


def few_steps(settings: Settings, prepared: PreparedCorpus, stage: str, model: XTTS, num_steps: int) -> str:
    """Train some optimiser steps under the cap of the settings; "trains", or the first line of the error."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    plan = make_plan(settings.data)
    apply_caps(plan)
    context = StageContext(stage, settings, prepared, plan, model, RunDir(Path("presets")))
    try:
        with explained_out_of_memory(plan, "model", "training"):
            step = set_up(context, total=10**6)
            with build_feed(context) as feed, step.stream.use():
                clock = StepClock(step.stream.handle)
                for number in range(num_steps):
                    step(feed.next, number, clock)
                step.stream.finish()
    except MyXTTSError as error:
        return str(error).splitlines()[0][:90]
    return "trains"


def curve(options: argparse.Namespace) -> None:
    """Train from given weights on given speech as coqui-tts does, and keep the losses of every step."""
    flags: dict[str, object] = {
        "data.train_data": str(options.corpus),
        "data.batch_size": options.batch,
        "data.max_mel_frames": options.max_mel_frames,
        "data.val_fraction": 0,
        "model.size": options.size,
        "model.dropout": 0.1,
        "training.init_from": str(options.weights),
        "training.max_steps": options.steps,
        "training.learning_rate": options.lr,
        "training.warmup_steps": 0,
        "training.grad_clip": 0,
        "training.log_step": options.log_step,
        "training.enable_xla_compilation": not options.no_compile,
    }
    with tempfile.TemporaryDirectory() as folder:
        reports = run(Path(folder), flags)
    losses = [[report.losses["text_loss"], report.losses["audio_loss"]] for report in reports]
    rate = statistics.median(report.clips_per_s for report in reports[len(reports) // 4 :])
    result = {"name": "MyXTTS", "clips_per_s": rate, "batch": options.batch, "losses": losses}
    options.out.write_text(json.dumps(result))
    console.print(f"{rate:.0f} clips/s, last losses {losses[-1]}")


def weights(options: argparse.Namespace) -> None:
    """Write fresh weights with a vocabulary of the corpus: the common start of both trainers."""
    data = DataSettings(train_data=options.corpus, language="en", max_mel_frames=options.max_mel_frames)
    fresh_weights(options.out, options.size, prepare(data).tokenizer)


def compare(options: argparse.Namespace) -> None:
    """Speeds, and loss curves as means over twenty steps."""
    results: list[dict[str, Any]] = [json.loads(path.read_text()) for path in options.results]
    for result, path in zip(results, options.results, strict=True):
        result.setdefault("name", path.stem)
        console.print(f"{result['name']}: batch {result.get('batch')}, {result['clips_per_s']:.1f} clips/s")
    names = [result["name"] for result in results]
    table = make_table("mean losses (text, audio)", "steps", *names, left=("steps",))
    length = min(len(result["losses"]) for result in results)
    for start in range(0, length, 20):
        means = [np.mean(result["losses"][start : start + 20], axis=0) for result in results]
        cells = [f"{text:.3f}  {audio:.3f}" for text, audio in means]
        table.add_row(f"{start + 1}–{min(start + 20, length)}", *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = add_command(commands, "speed", speed)
    command.add_argument("--size", action="append", choices=list(SIZES))
    command.add_argument("--batch", type=int, default=64)
    command.add_argument("--steps", type=int, default=200)
    command.add_argument("--corpus-clips", type=int, default=2000)
    command.add_argument("--deterministic", action="store_true", help="also with --deterministic, for its price")
    command = add_command(commands, "sharded", sharded)
    command.add_argument("--size", default="normal", choices=list(SIZES))
    command.add_argument("--batch", type=int, default=64)
    command.add_argument("--steps", type=int, default=150)
    command.add_argument("--rounds", type=int, default=2)
    command.add_argument("--corpus-clips", type=int, default=2000)
    command.add_argument("--shard-mb", type=float, default=20.0)
    command.add_argument("--folder", type=Path, required=True, help="of corpora and runs, which stay there")
    command = add_command(commands, "presets", presets)
    command.add_argument("--preset", action="append", choices=list(PRESETS))
    command.add_argument("--stage", action="append", choices=STAGES)
    command.add_argument("--steps", type=int, default=2)
    command = add_command(commands, "memory", memory)
    command.add_argument("--steps", type=int, default=20)
    for name, call in (("curve", curve), ("weights", weights)):
        command = add_command(commands, name, call)
        command.add_argument("--corpus", type=Path, required=True)
        command.add_argument("--weights", type=Path)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--size", default="normal", choices=list(SIZES))
        command.add_argument("--batch", type=int, default=16)
        command.add_argument("--steps", type=int, default=200)
        command.add_argument("--max-mel-frames", type=int, default=MAX_MEL_FRAMES)
        command.add_argument("--lr", type=float, default=1e-4)
        command.add_argument("--log-step", type=int, default=1, help="1 for curves, 20 for speed")
        command.add_argument("--no-compile", action="store_true", help="saves a minute of compilation")
    command = add_command(commands, "compare", compare)
    command.add_argument("results", type=Path, nargs="+")
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
