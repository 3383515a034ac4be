"""What the terminal shows of a corpus: progress while it is prepared and a table when it is ready."""

from __future__ import annotations

import sys
import time
from collections import Counter

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from myxtts.config import LANGUAGE_NAMES, LANGUAGES, SAMPLE_RATE
from myxtts.data.clips import ClipSet, Prepared, set_aside_list

_LENGTH_STEP_SECONDS = 2
_BAR_WIDTH = 30


class ProgressLines:
    """A bar on a terminal; elsewhere a plain line now and then, so that logs stay readable."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._title = ""
        self._total = self._done = 0
        self._line_due_at = 0.0

    def begin(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._line_due_at = time.monotonic() + 2.0
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._bar.add_task(title, total=total)

    def advance(self, count: int) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], count)
        elif time.monotonic() >= self._line_due_at:
            self._line_due_at = time.monotonic() + 10.0
            print(f"{self._title}: {self._done} of {self._total}", file=sys.stderr)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def show_corpus(prepared: Prepared) -> None:
    """Print what a corpus holds, and what was set aside by reason."""
    console = Console(highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for split, clips in (("training", prepared.train), ("validation", prepared.val)):
        table.add_row(f"{split} clips", f"{len(clips)}", _duration(clips))
    both = (prepared.train, prepared.val)
    speakers = Counter(number for clips in both for number in clips.speakers.tolist())
    languages = Counter(number for clips in both for number in clips.languages.tolist())
    named = ", ".join(
        f"{escape(prepared.speaker_names[number] or 'unnamed')} {count}"
        for number, count in speakers.most_common(8)
    )
    table.add_row("speakers", str(len(speakers)), named + (", …" if len(speakers) > 8 else ""))
    spoken = (f"{LANGUAGE_NAMES[LANGUAGES[number]]} {count}" for number, count in languages.most_common())
    table.add_row("languages", str(len(languages)), ", ".join(spoken))
    table.add_row("vocabulary", str(prepared.tokenizer.num_tokens), "tokens")
    table.add_row("set aside", str(len(prepared.set_aside)), "clips")
    for reason, count in Counter(item.reason for item in prepared.set_aside).most_common():
        table.add_row("", str(count), f"{reason}")
    console.print(table)
    console.print(_length_table(np.concatenate([clips.num_samples for clips in both]) / SAMPLE_RATE))
    if prepared.set_aside:
        console.print(
            f"Each clip set aside is listed in {escape(str(set_aside_list(prepared.root)))}", soft_wrap=True
        )
    console.print(f"Ready: cache in {escape(str(prepared.root))}", soft_wrap=True)


def _duration(clips: ClipSet) -> str:
    minutes = float(clips.num_samples.sum()) / SAMPLE_RATE / 60
    return f"{minutes:.1f} minutes" if minutes < 60 else f"{minutes / 60:.2f} hours"


def _length_table(seconds: np.typing.NDArray[np.float64]) -> Table:
    edges = np.arange(0, seconds.max() + _LENGTH_STEP_SECONDS, _LENGTH_STEP_SECONDS)
    counts, _ = np.histogram(seconds, bins=edges)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for start, count in zip(edges, counts, strict=False):
        bar = "█" * round(_BAR_WIDTH * count / counts.max())
        table.add_row(f"{start:.0f}–{start + _LENGTH_STEP_SECONDS:.0f} s", str(count), bar)
    return table
