"""Shared by the benchmarks: tables, the machine's name, LJSpeech-like corpora of noise, one measured training run.

PyTorch is imported inside the functions, because worker processes of benchmarks/data.py import this module too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import soundfile
from rich.console import Console
from rich.table import Table

from myxtts.config import SAMPLE_RATE

if TYPE_CHECKING:
    from myxtts.observe.metrics import StepReport, ValidationReport
    from myxtts.settings import LoadedSettings
    from myxtts.text.tokenizer import Tokenizer

MAX_MEL_FRAMES = 880
"""Longer than any clip of `clip_seconds`."""
TEXT = "one two three four five the quick brown fox jumps over a lazy dog"
console = Console(width=150, highlight=False)


class LiveTable:
    """A table that also prints every row as it is added, so that an interrupted benchmark still shows results."""

    def __init__(self, title: str, *columns: str, left: Collection[str] = ()) -> None:
        self._table = make_table(title, *columns, left=left)

    def add(self, *cells: object) -> None:
        row = [str(cell) for cell in cells]
        self._table.add_row(*row)
        console.print(*row, sep=" | ", markup=False)

    def show(self) -> None:
        console.print(self._table)


def make_table(title: str, *columns: str, left: Collection[str] = ("",)) -> Table:
    """A table whose columns are aligned to the right, except those in `left`."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def machine() -> str:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{name}, PyTorch {torch.__version__}"


def add_command(commands: Any, name: str, call: Callable[[argparse.Namespace], object]) -> argparse.ArgumentParser:
    """Add a subcommand that calls this function with the parsed options."""
    command: argparse.ArgumentParser = commands.add_parser(name)
    command.set_defaults(call=call)
    return command


def clip_seconds(random: np.random.Generator, count: int | None = None) -> np.ndarray:
    """Lengths like those of LJSpeech: 1.2 to 10.1 s, 6.6 on average."""
    return np.clip(random.normal(6.57, 2.18, count), 1.2, 10.1)


def write_corpus(
    folder: Path,
    num_clips: int,
    *,
    seconds: tuple[float, float] | None = None,
    extension: str = "wav",
    rate: int = SAMPLE_RATE,
) -> None:
    """Write a corpus of noise with random words: clips as long as LJSpeech's, or of any length in `seconds`."""
    random, words = np.random.default_rng(0), TEXT.split()
    (folder / "wavs").mkdir(parents=True)
    lines = []
    for number in range(num_clips):
        length = float(random.uniform(*seconds) if seconds else clip_seconds(random))
        noise = random.integers(-3000, 3000, int(length * rate), np.int16)
        soundfile.write(folder / "wavs" / f"c{number}.{extension}", noise, rate)
        lines.append(f"c{number}|{' '.join(random.choice(words, max(int(length * 2.6), 1)))}\n")
    (folder / "metadata.csv").write_text("".join(lines))


def fresh_weights(
    folder: Path, size: str, vocabulary: Tokenizer, prepare: Callable[[Any], None] | None = None
) -> None:
    """Write an XTTS-v2 folder of random weights, seed 0; `prepare` may change the model before."""
    import torch

    from myxtts.model.xtts import SIZES, XTTS
    from myxtts.weights import save_folder

    torch.manual_seed(0)
    dims = SIZES[size].with_vocabulary(vocabulary.num_tokens, vocabulary.start_id, vocabulary.stop_id)
    model = XTTS(dims)
    if prepare is not None:
        prepare(model)
    save_folder(folder, model, vocabulary)


def train_reports(loaded: LoadedSettings, folder: Path) -> list[StepReport]:
    """Train as `myxtts train` does, metrics and checkpoints included; return the reports of the steps."""
    from myxtts.observe.metrics import MetricsLog
    from myxtts.run import train
    from myxtts.training.trainer import Reporter

    log = MetricsLog(folder)
    steps: list[StepReport] = []

    class Collected(Reporter):
        def begin(self, stage: str, step: int, _total_steps: int, own_references: float | None) -> None:
            log.begin(stage, step, own_references)

        def step(self, report: StepReport) -> None:
            steps.append(report)
            log.step(report)

        def validation(self, report: ValidationReport) -> None:
            log.validation(report)

    train(loaded, reporter=Collected(), say=lambda _: None)
    return steps
