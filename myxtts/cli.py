"""The `myxtts` command: reads the command line, sets up logging and screens, calls one function per command.

Everything heavy is imported by the command that needs it, so that `--help` is immediate.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from myxtts import __version__
from myxtts.config import DataSettings
from myxtts.errors import ConfigError, DatasetError, MyXTTSError
from myxtts.evaluate_command import add_evaluate
from myxtts.settings import PREPARE_KEYS, Loaded, Parser, add_flags, flags_of, load
from myxtts.speak_command import add_speak
from myxtts.tool_commands import add_tool_commands, dashboard

if TYPE_CHECKING:
    from myxtts.text.tokenizer import Tokenizer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an expected error is shown as its text, not as a traceback."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    options.unknown = unknown
    if unknown and "refuse" in options:
        options.refuse(f"unknown arguments {' '.join(unknown)}")
    logging.basicConfig(format="%(message)s", level=logging.DEBUG if options.verbose else logging.INFO)
    logging.getLogger("torch").setLevel(logging.WARNING)  # it has statistics to tell when a process ends
    try:
        return int(options.run(options))
    except MyXTTSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("\ninterrupted; nothing half-made was left behind", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="myxtts", description="The XTTS trainer that never lets a GPU wait.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"myxtts {__version__}")
    parser.add_argument("--verbose", action="store_true", help="show debugging messages")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    about = "train a model on a corpus, or continue a training"
    train = commands.add_parser("train", help=about, description=about, allow_abbrev=False)
    add_flags(train)
    train.add_argument("--dashboard", action="store_true", help="a live view instead of progress lines")
    train.set_defaults(run=_train)

    about = "turn a folder of recordings into a packed, verified cache"
    prepare = commands.add_parser("prepare", help=about, description=about, allow_abbrev=False)
    add_flags(prepare, only=PREPARE_KEYS)
    prepare.set_defaults(run=_prepare)

    about = "train a text vocabulary on a corpus, or extend one with a language"
    actions = commands.add_parser("vocabulary", help=about, description=about).add_subparsers(
        required=True, metavar="ACTION"
    )
    _add_vocabulary_action(actions.add_parser("train", help="a new vocabulary", allow_abbrev=False))
    about = "add a language to an existing vocabulary; every old id stays valid"
    extend = actions.add_parser("extend", help=about, description=about, allow_abbrev=False)
    extend.add_argument("--base", type=Path, required=True, metavar="FILE", help="the vocab.json to extend")
    extend.add_argument(
        "--merges", type=_count, default=500, metavar="N", help="merges to add at most [default: 500]"
    )
    _add_vocabulary_action(extend)

    add_tool_commands(commands)
    add_speak(commands)
    add_evaluate(commands)

    about = "write a folder that coqui-tts and the tools built on it load"
    export = commands.add_parser("export", help=about, description=about, allow_abbrev=False)
    export.add_argument("source", type=Path, metavar="FOLDER", help="a run, or a folder of XTTS weights")
    export.add_argument("--to", choices=["coqui"], default="coqui", help="the form to write [default: coqui]")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write")
    export.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="a larger vocab.json to grow the network for"
    )
    export.add_argument("--best", action="store_true", help="of a run the GPT that validated best, not the newest")
    export.set_defaults(run=_export, refuse=export.error)
    return parser


def _add_vocabulary_action(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, required=True, metavar="FILE", help="the vocab.json to write")
    add_flags(command, only=PREPARE_KEYS)
    command.set_defaults(run=_vocabulary)


def _load(options: argparse.Namespace) -> Loaded:
    loaded = load(options.config, flags_of(options), options.unknown)
    _require_file("--tokenizer", loaded.settings.data.tokenizer)
    return loaded


def _require_file(flag: str, path: Path | None) -> None:
    """A vocabulary is a file, or the folder that holds it."""
    if path is not None and not path.exists():
        raise DatasetError(f"{flag} {path}: there is no such file; name a vocab.json, or the folder that holds it")


def _train(options: argparse.Namespace) -> int:
    from myxtts.assembly.session import train
    from myxtts.data.clips import Prepared
    from myxtts.devices import Machine
    from myxtts.reports import TrainingReports, closing, stopped
    from myxtts.screens import ProgressLines, ProgressPrinter, show_corpus, show_lines
    from myxtts.settings import presets

    loaded, applied = presets.apply(_load(options))
    if loaded.settings.data.train_data is None:
        loaded, demo = presets.apply_demo(loaded, on_gpu=bool(Machine.look().gpus))
        applied += demo
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        show_lines(applied)
    if not is_first:
        logging.getLogger().setLevel(logging.WARNING)
    folder = loaded.settings.training.checkpoint_dir
    corpora: list[Prepared] = []

    def show(prepared: Prepared) -> None:
        corpora.append(prepared)
        show_corpus(prepared)

    is_shown = is_first and not options.dashboard
    with ProgressPrinter(0 if is_shown else 1) as printer, dashboard(folder, is_first and options.dashboard):
        reports = TrainingReports(folder, printer) if is_first else None
        try:
            states = train(loaded, reports, ProgressLines(), lambda line: show_lines([line]), show)
        finally:
            if reports is not None:
                reports.close()
    if reports is None:
        return 0
    is_done = all(state.done for state in states.values())
    settings = loaded.settings
    show_lines(closing(settings, corpora[0], reports.has_trained) if is_done else [stopped(settings, states)])
    return 0


def _prepare(options: argparse.Namespace) -> int:
    _prepare_and_show(_load(options).settings.data, verify=True)
    return 0


def _prepare_and_show(data: DataSettings, verify: bool) -> None:
    from myxtts.data.prepare import prepare
    from myxtts.screens import ProgressLines, show_corpus

    progress = ProgressLines()
    if data.train_data is None:
        logging.info("No --train-data given: using the embedded corpus")
    show_corpus(prepare(data, progress, verify=verify))


def _vocabulary(options: argparse.Namespace) -> int:
    from myxtts.data.prepare import spoken_corpus
    from myxtts.screens import ProgressLines
    from myxtts.text import tokenizer

    data = _load(options).settings.data
    base: Path | None = getattr(options, "base", None)
    if base is not None and data.language is None:
        raise ConfigError("vocabulary extend: --language is missing; give the language to add, such as fa")
    _require_file("--base", base)
    old = tokenizer.Tokenizer.load(base) if base is not None else None
    texts, languages = spoken_corpus(data, ProgressLines())
    vocabulary: Tokenizer
    if old is None:
        vocabulary = tokenizer.train(texts, languages, data.vocab_size)
    else:
        spoken = [text for text, language in zip(texts, languages, strict=True) if language == data.language]
        if not spoken:
            found = " ".join(sorted(set(languages))) or "nothing"
            raise ConfigError(f"No sentence of the corpus is in {data.language} (its metadata says: {found})")
        vocabulary = tokenizer.extend(old, spoken, data.language or "", options.merges)
        print(f"{vocabulary.num_tokens - old.num_tokens} tokens added to the {old.num_tokens} of {base}")
    vocabulary.save(options.out)
    print(f"{options.out}: {vocabulary.num_tokens} tokens")
    return 0


def _export(options: argparse.Namespace) -> int:
    from myxtts.assembly.folder import RunFolder
    from myxtts.assembly.voice import provenance
    from myxtts.text.tokenizer import Tokenizer
    from myxtts.weights import load_folder, save_folder

    if options.out.resolve() == options.source.resolve():
        raise ConfigError(f"--out {options.out} is the folder that is read; name another one")
    replaced = _export_replaced(options.out)
    _require_file("--tokenizer", options.tokenizer)
    larger = Tokenizer.load(options.tokenizer) if options.tokenizer else None
    run = RunFolder(options.source)
    if run.exists:
        if larger is not None:
            raise ConfigError("--tokenizer grows a folder of weights; the vocabulary of a run is its own")
        known = provenance(run)
        save_folder(options.out, run.load_model(best_gpt=options.best), run.vocabulary(), known)
        print(f"{options.out}: {run.dims().gpt.text_tokens} text tokens{replaced}")
        _warn_untrained(known.untrained)
        return 0
    if options.best:
        raise ConfigError(f"--best chooses among the checkpoints of a run; {options.source} has only weights")
    loaded = load_folder(options.source, larger)
    save_folder(options.out, loaded.model, loaded.vocabulary, loaded.provenance)
    fresh = f", fresh weights for {', '.join(loaded.fresh_parts)}" if loaded.fresh_parts else ""
    print(f"{options.out}: {loaded.model.dims.gpt.text_tokens} text tokens{fresh}{replaced}")
    _warn_untrained(loaded.provenance.untrained)
    return 0


def _export_replaced(out: Path) -> str:
    """Words for an export that is written over; anything else that is in the way is an error."""
    from myxtts.weights import MODEL_FILES

    if out.is_file():
        raise ConfigError(f"--out {out} is a file; name a folder for the export")
    found = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if found and not any(name in found for name in MODEL_FILES):
        raise ConfigError(
            f"--out {out} holds other files ({', '.join(found[:4])}{', …' if len(found) > 4 else ''}); an export "
            "would write among them. Name a new or empty folder, or one of an earlier export."
        )
    return ", in place of the weights that were there" if found else ""


def _warn_untrained(stages: Sequence[str]) -> None:
    if stages:
        hum = "; coqui-tts makes a hum of it, myxtts speak uses Griffin-Lim instead" if "decoder" in stages else ""
        print(f"WARNING: {' and '.join(stages)}: never trained, these weights are random{hum}")


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


if __name__ == "__main__":
    sys.exit(main())
