"""`myxtts evaluate`: held-out sentences of a run, synthesised and judged, as a table and on the run's page."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from myxtts.config import LANGUAGES
from myxtts.errors import ConfigError

ABOUT = "synthesise held-out sentences of a run, and judge words, speaker and quality against the recordings"
FOLDER = "evaluation"
"""Of a run; its page shows the scores that lie there."""


def add_evaluate(commands: Any) -> None:
    """Add the command to the command line."""
    evaluate = commands.add_parser("evaluate", help=ABOUT, description=ABOUT, allow_abbrev=False)
    evaluate.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of the run")
    sentences = "how many to say, speakers in turn [default: 40]"
    evaluate.add_argument("--sentences", type=_count, default=40, metavar="N", help=sentences)
    evaluate.add_argument("--language", choices=LANGUAGES, help="only sentences in this language")
    judges = "where the judges are installed [default: .judge, made by make judge]"
    evaluate.add_argument("--judge", type=Path, metavar="DIR", help=judges)
    out = "the folder for sounds and scores [default: RUN/evaluation]"
    evaluate.add_argument("--out", type=Path, metavar="DIR", help=out)
    parts = ["synthesise", "judge"]
    evaluate.add_argument("--only", choices=parts, help="one half; the other can follow on another machine")
    evaluate.add_argument("--best", action="store_true", help="the GPT that validated best, not the newest")
    evaluate.add_argument("--vocoder", choices=["hifigan", "griffin-lim"], help="what makes the sound")
    evaluate.add_argument("--seed", type=int, default=1, help="the same seed says it the same way [default: 1]")
    evaluate.add_argument("--temperature", type=float, help="how adventurous [default: 0.75]")
    evaluate.add_argument(
        "--guidance", type=float, help="above 1 the text counts more, for a run with --text-dropout [default: 1]"
    )
    evaluate.add_argument(
        "--central", action="store_true", default=None, help="the middle of the likely codes: clearer, but flatter"
    )
    evaluate.set_defaults(run=run, refuse=evaluate.error)


def run(options: argparse.Namespace) -> int:
    """Look for the judges first: without them nothing need be computed."""
    from myxtts.screens import ProgressLines, show_lines
    from myxtts.tools.judging import find_judges, judge

    if not options.run_folder.is_dir():
        raise ConfigError(f"There is no run in {options.run_folder}; name the --checkpoint-dir of a training")
    out = options.out or options.run_folder / FOLDER
    judges = find_judges(options.judge) if options.only != "synthesise" else None
    if options.only != "judge":
        _synthesise(options, out)
    if judges is None:
        there = f" --out {out}" if options.out else ""
        show_lines([f"{out}: ready to be judged (myxtts evaluate {options.run_folder} --only judge{there})"])
        return 0
    scores = judge(out, judges, ProgressLines())
    show_scores(scores)
    show_lines([str(scores["reading"]), *_pages(options.run_folder, out)])
    return 0


def show_scores(scores: Mapping[str, Any]) -> None:
    """Print the sums of every set; a dash where no judge heard it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    columns = ("clips", "WER", "CER", "similarity", f"above {scores['same_speaker_from']}", "MOS")
    table.add_column("set")
    for name in columns:
        table.add_column(name, justify="right")
    for name, row in scores["summary"].items():
        shown = [_number(row["wer"], 3), _number(row["cer"], 3), _number(row["similarity"], 2)]
        share = row["same_speaker_share"]
        shown += [f"{100 * share:.0f} %" if share is not None else "–", _number(row["mos"], 2)]
        table.add_row(name, str(row["clips"]), *shown)
    Console(highlight=False).print(table)


def _synthesise(options: argparse.Namespace, out: Path) -> None:
    from myxtts.screens import ProgressLines
    from myxtts.tools.evaluate import Asked, synthesise

    asked = Asked(
        num_sentences=options.sentences,
        language=options.language,
        vocoder=options.vocoder,
        seed=options.seed,
        temperature=options.temperature,
        guidance=options.guidance,
        central=options.central,
        best_gpt=options.best,
    )
    synthesise(options.run_folder, out, asked, ProgressLines())


def _pages(run_folder: Path, out: Path) -> list[str]:
    """Where to look: the scores, and the run's page if they are part of it."""
    from myxtts.observe.report import write_report

    scores = str(out / "scores.json")
    if out.resolve() != (run_folder / FOLDER).resolve():
        return [scores]
    try:
        return [scores, str(write_report(run_folder))]
    except OSError as error:
        return [scores, f"No page was written: {error}"]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too few, at least 1")
    return number
