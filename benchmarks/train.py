"""Training end to end: real corpus folder, real pipeline, logging and checkpoints on; and the rival beside it.

    python benchmarks/train.py speed                     clips/s of normal, small and tiny, LJSpeech-like noise
    python benchmarks/train.py memory                    fine-tuning `normal` under caps of 8 and 12 GB
    python benchmarks/train.py curve --corpus DIR --weights DIR --out FILE     losses on real speech, for `compare`
    python benchmarks/train.py compare OURS RIVAL…       tables of what `curve` and benchmarks/rival.py wrote

Every measurement is one call of what `myxtts train` calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from rich.console import Console
from rich.table import Table

from myxtts.config import SAMPLE_RATE, DataSettings
from myxtts.data.prepare import prepare
from myxtts.errors import MyXTTSError
from myxtts.model.xtts import SIZES, XTTS
from myxtts.observe.metrics import MetricsLog, StepReport, ValidationReport
from myxtts.run import train
from myxtts.settings import load
from myxtts.training.trainer import Reporter
from myxtts.weights import save_folder

WORDS = (
    "one",
    "two",
    "three",
    "four",
    "five",
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
)
console = Console(width=140, highlight=False)


class Collected(Reporter):
    """Keeps every report, and logs it as a run does."""

    def __init__(self, folder: Path) -> None:
        self.reports: list[StepReport] = []
        self._log = MetricsLog(folder)

    def begin(self, stage: str, step: int, total_steps: int) -> None:  # noqa: ARG002
        self._log.begin(stage, step)

    def step(self, report: StepReport) -> None:
        self.reports.append(report)
        self._log.step(report)

    def validation(self, report: ValidationReport) -> None:
        self._log.validation(report)


def run(folder: Path, **flags: object) -> list[StepReport]:
    """One training run with these settings; what it reported."""
    defaults = {"data.language": "en", "training.checkpoint_dir": str(folder), "training.stages": "gpt"}
    loaded = load(None, {**defaults, **{name.replace("__", "."): value for name, value in flags.items()}})
    collected = Collected(folder)
    train(loaded, reporter=collected, say=lambda _: None)
    return collected.reports


def write_corpus(folder: Path, num_clips: int) -> None:
    """A folder of noise as long as LJSpeech's clips, with text as long as LJSpeech's."""
    random = np.random.default_rng(0)
    (folder / "wavs").mkdir(parents=True)
    lines = []
    for number in range(num_clips):
        seconds = float(np.clip(random.normal(6.57, 2.18), 1.2, 10.1))
        noise = random.integers(-3000, 3000, int(seconds * SAMPLE_RATE), np.int16)
        soundfile.write(folder / "wavs" / f"c{number}.wav", noise, SAMPLE_RATE)
        words = random.choice(WORDS, max(int(seconds * 2.6), 1))
        lines.append(f"c{number}|{' '.join(words)}\n")
    (folder / "metadata.csv").write_text("".join(lines))


def speed(options: argparse.Namespace) -> None:
    table = Table(title=f"GPT stage end to end, {machine()}", title_justify="left")
    for column in ("size", "clips", "clips/s", "step ms", "CV", "idle", "peak GiB", "ahead"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "corpus", options.corpus_clips)
        for size in options.size or ("normal", "small", "tiny"):
            reports = run(
                Path(folder) / size,
                data__train_data=str(Path(folder) / "corpus"),
                data__max_mel_frames=880,
                data__batch_size=options.batch,
                model__size=size,
                training__max_steps=options.steps,
                training__log_step=20,
                training__save_step=max(options.steps // 2, 1),
                training__val_step=10**6,
            )
            steady = [report for report in reports if report.step > options.steps // 4]
            rate = statistics.median(report.clips_per_s for report in steady)
            cells = [
                f"{rate:,.0f}",
                f"{statistics.median(report.step_ms for report in steady):.1f}",
                f"{statistics.median(report.step_cv for report in steady):.1%}",
                f"{statistics.mean(report.idle_share for report in steady):.2%}",
                f"{max(reports[-1].memory_mb.values(), default=0) / 1024:.1f}",
                str(round(statistics.median(report.ahead for report in steady))),
            ]
            table.add_row(size, str(options.batch), *cells)
            console.print(size, *cells)
    console.print(table)


def memory(options: argparse.Namespace) -> None:
    """Peak memory and speed of fine-tuning `normal` under a cap, or the error that says why not."""
    table = Table(title=f"fine-tuning `normal` under a cap, {machine()}", title_justify="left")
    for column in ("cap MB", "clips", "options", "clips/s", "peak MB", "result"):
        table.add_column(column, justify="right")
    cases: list[tuple[int, int, dict[str, object]]] = [
        (8192, 4, {"model__lora_rank": 16, "model__gradient_checkpointing": True}),
        (8192, 8, {"model__lora_rank": 16, "model__gradient_checkpointing": True}),
        (8192, 4, {"model__lora_rank": 16}),
        (12288, 16, {"model__lora_rank": 16, "model__gradient_checkpointing": True}),
        (12288, 4, {"model__gradient_checkpointing": True}),
        (12288, 8, {"model__gradient_checkpointing": True}),
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "corpus", 300)
        for number, (cap, batch, extra) in enumerate(cases):
            shown = ", ".join(f"{name.split('__')[1]} {value}" for name, value in extra.items())
            try:
                reports = run(
                    Path(folder) / str(number),
                    data__train_data=str(Path(folder) / "corpus"),
                    data__max_mel_frames=880,
                    data__batch_size=batch,
                    data__enable_memory_isolation=True,
                    data__model_gpu_memory=cap,
                    model__size="normal",
                    training__max_steps=options.steps,
                    training__log_step=5,
                    training__enable_xla_compilation=False,
                    **extra,
                )
                peak = max(reports[-1].memory_mb.values())
                cells = (f"{reports[-1].clips_per_s:,.0f}", f"{peak:,.0f}", "trains")
            except MyXTTSError as error:
                cells = ("", "", str(error).splitlines()[0][:60])
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_per_process_memory_fraction(1.0)
            table.add_row(str(cap), str(batch), shown, *cells)
            console.print(cap, batch, shown, *cells)
    console.print(table)


def curve(options: argparse.Namespace) -> None:
    """Train from given weights on given speech as the rival does, and keep the losses of every step."""
    with tempfile.TemporaryDirectory() as folder:
        reports = run(
            Path(folder),
            data__train_data=str(options.corpus),
            data__batch_size=options.batch,
            data__max_mel_frames=options.max_mel_frames,
            data__val_fraction=0,
            model__size=options.size,
            training__init_from=str(options.weights),
            training__max_steps=options.steps,
            training__learning_rate=options.lr,
            training__warmup_steps=0,
            training__grad_clip=0,
            model__dropout=0.1,
            training__log_step=options.log_step,
            training__enable_xla_compilation=not options.no_compile,
        )
    losses = [[report.losses["text_loss"], report.losses["audio_loss"]] for report in reports]
    rate = statistics.median(report.clips_per_s for report in reports[len(reports) // 4 :])
    result = {"name": "MyXTTS", "clips_per_s": rate, "batch": options.batch, "losses": losses}
    options.out.write_text(json.dumps(result))
    console.print(f"{rate:.0f} clips/s, last losses {losses[-1]}")


def weights(options: argparse.Namespace) -> None:
    """Write a folder of fresh weights with a vocabulary of the corpus: the common start of both trainers."""
    data = DataSettings(train_data=options.corpus, language="en", max_mel_frames=options.max_mel_frames)
    vocabulary = prepare(data).tokenizer
    torch.manual_seed(0)
    dims = SIZES[options.size].with_vocabulary(vocabulary.num_tokens, vocabulary.start_id, vocabulary.stop_id)
    save_folder(options.out, XTTS(dims), vocabulary)


def compare(options: argparse.Namespace) -> None:
    """Speeds, and loss curves in means over twenty steps."""
    results: list[dict[str, Any]] = [json.loads(path.read_text()) for path in options.results]
    for result, path in zip(results, options.results, strict=True):
        result.setdefault("name", path.stem)
        console.print(f"{result['name']}: batch {result.get('batch')}, {result['clips_per_s']:.1f} clips/s")
    table = Table(title="mean losses (text, audio)", title_justify="left")
    table.add_column("steps")
    for result in results:
        table.add_column(result["name"], justify="right")
    length = min(len(result["losses"]) for result in results)
    for start in range(0, length, 20):
        cells = []
        for result in results:
            text, audio = np.mean(result["losses"][start : start + 20], axis=0)
            cells.append(f"{text:.3f}  {audio:.3f}")
        table.add_row(f"{start + 1}–{min(start + 20, length)}", *cells)
    console.print(table)


def machine() -> str:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{name}, PyTorch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    speed_command = commands.add_parser("speed")
    speed_command.add_argument("--size", action="append", choices=list(SIZES))
    speed_command.add_argument("--batch", type=int, default=64)
    speed_command.add_argument("--steps", type=int, default=200)
    speed_command.add_argument("--corpus-clips", type=int, default=2000)
    speed_command.set_defaults(call=speed)
    memory_command = commands.add_parser("memory")
    memory_command.add_argument("--steps", type=int, default=20)
    memory_command.set_defaults(call=memory)
    for name, call in (("curve", curve), ("weights", weights)):
        command = commands.add_parser(name)
        command.add_argument("--corpus", type=Path, required=True)
        command.add_argument("--weights", type=Path)
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--size", default="normal", choices=list(SIZES))
        command.add_argument("--batch", type=int, default=16)
        command.add_argument("--steps", type=int, default=200)
        command.add_argument("--max-mel-frames", type=int, default=880)
        command.add_argument("--lr", type=float, default=1e-4)
        command.add_argument("--log-step", type=int, default=1, help="curves need 1; speed is better read with 20")
        command.add_argument("--no-compile", action="store_true", help="spare the minute that compiling takes")
        command.set_defaults(call=call)
    compare_command = commands.add_parser("compare")
    compare_command.add_argument("results", type=Path, nargs="+")
    compare_command.set_defaults(call=compare)
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
