"""The learning experiment: DVAE, GPT and decoder trained from scratch on a few hours of speech, scored by judges.

    python experiments/learning/learn.py all --speech en7.zip --home DIR       everything below except `judge`
    python experiments/learning/learn.py corpus --speech DIR --corpus DIR      hold out sentences, augment the rest
    python experiments/learning/learn.py train --corpus DIR --run DIR          train all stages, or one; resumes
    python experiments/learning/learn.py speak --run DIR --out DIR             speak the held-out sentences
    python experiments/learning/learn.py judge --judge DIR --out DIR           score them: table, curves

The speech is a folder or zip file with metadata.csv: path|speaker|language|text|seconds|sample_rate.
`--voice SPEAKER` is the only speaker that DVAE and decoder train on; the GPT also trains on the others.
`--seconds` saves and stops in time; the same command resumes.
"""

from __future__ import annotations

import argparse
import zipfile
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from augment import MORE_SPEEDS, SPEEDS, at_other_speeds, spliced
from corpus import HELD_OUT, RECORDINGS, Spoken, read_speech, split, unpacked, write_corpus
from evaluation import checkpoints, gpt_steps, judge_all, pack, speak
from training import Deadline, console, train_stage

from myxtts.config import MODEL_SIZES, STAGES
from myxtts.errors import DatasetError, MyXTTSError
from myxtts.evaluation import find_judges

HAS_ESPEAK = find_spec("espeakng_loader") is not None
HELD_OUT_OF_ONE = 40
"""Held-out sentences of the speaker named by `--voice`."""
SAMPLING = ("temperature", "guidance", "central")
JUDGED_SHARES = (0.25, 0.5, 1.0)
"""Points of the GPT's training that `all` speaks with."""


def corpus(options: argparse.Namespace) -> None:
    """Write the corpus of each stage.

    The decoder trains on recordings of the voice at several speeds, the DVAE also on spliced sentences, the GPT
    also on other speakers.
    """
    clips = read_speech(unpacked(options.speech, options.corpus))
    wanted = {name: int(count) for name, _, count in (one.partition("=") for one in options.hold_out)}
    wanted = wanted or ({options.voice: HELD_OUT_OF_ONE} if options.voice else HELD_OUT)
    parts = split(clips, wanted, options.without)
    if options.voice and options.voice not in {clip.speaker for clip in parts.train}:
        raise DatasetError(f"--voice {options.voice} is not among the speakers trained on; see metadata.csv")
    for name, some in parts._asdict().items():
        speakers = ", ".join(f"{speaker} {count}" for speaker, count in Counter(c.speaker for c in some).items())
        console.print(f"{name}: {len(some)} clips, {_hours(some)} ({speakers})")
    write_corpus(parts, options.corpus / RECORDINGS)
    own = [clip for clip in parts.train if options.voice in (None, clip.speaker)]
    others = [clip for clip in parts.train if options.voice not in (None, clip.speaker)]
    speeds = SPEEDS if options.voice else MORE_SPEEDS
    trained: list[Spoken] = []

    def add(name: str, made: Sequence[Spoken]) -> None:
        trained.extend(made)
        console.print(f"{name}: {len(made)} clips, {_hours(made)}")

    add("recordings", own)
    add("at other speeds", at_other_speeds(own, options.corpus / "speeds", speeds))
    write_corpus(parts._replace(train=trained), options.corpus / "decoder")
    if options.spliced_hours:
        add("spliced", spliced(own, options.corpus / "spliced", options.spliced_hours, speeds))
    write_corpus(parts._replace(train=trained), options.corpus / "dvae")
    if others:
        add("other speakers", others)
        add("other speakers at other speeds", at_other_speeds(others, options.corpus / "others", MORE_SPEEDS))
    write_corpus(parts._replace(train=trained), options.corpus / "gpt")


def _hours(clips: Sequence[Spoken]) -> str:
    return f"{sum(clip.seconds for clip in clips) / 3600:.2f} h"


def train(options: argparse.Namespace) -> None:
    """Train the stages in order until one runs out of time."""
    deadline = Deadline(options.seconds)
    for stage in options.stage or STAGES:
        if not train_stage(options, stage, deadline):
            break


def speak_held_out(options: argparse.Namespace) -> None:
    """Speak with all checkpoints, or those named: GPT steps, `last`, `best`, `decoder`."""
    chosen = checkpoints(options.run)
    if options.at:
        best = options.run / "gpt" / "best"
        step = best.read_text(encoding="utf-8").strip().removeprefix("step-") if best.is_file() else ""
        named = {"best": step, "last": str(gpt_steps(options.run)[-1])}
        wanted = {int(named.get(one, one)) for one in options.at if one != "decoder"}
        chosen = [
            checkpoint
            for checkpoint in chosen
            if ("decoder" in options.at if checkpoint.vocoder == "hifigan" else checkpoint.gpt_step in wanted)
        ]
    for checkpoint in chosen:
        speak(options.run, options.out, checkpoint, {name: getattr(options, name) for name in SAMPLING})
    pack(options.out, options.out.with_suffix(".zip"))


def everything(options: argparse.Namespace) -> None:
    """Write the corpus, train, and speak after the GPT and after the decoder."""
    deadline = Deadline(options.seconds)
    options.corpus, options.run, options.out = (options.home / name for name in ("corpus", "run", "spoken"))
    if not (options.corpus / "gpt" / "metadata_train.csv").is_file():
        corpus(options)
    options.at = []
    for stage in STAGES:
        if not train_stage(options, stage, deadline):
            break
        if stage == "gpt":
            reached = {round(share * options.gpt_steps) for share in JUDGED_SHARES}
            options.at = [str(step) for step in gpt_steps(options.run) if step in reached]
        if stage != "dvae" and not deadline.is_over:
            options.at += ["decoder"] * (stage == "decoder")
            speak_held_out(options)


def judge(options: argparse.Namespace) -> None:
    """Score a folder written by `speak`, or its zip file."""
    place, out = find_judges(options.judge), options.out
    if out.suffix == ".zip":
        out = out.with_suffix("")
        with zipfile.ZipFile(options.out) as packed:
            packed.extractall(out)
    judge_all(out, place)


def _training_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--size", default="small", choices=MODEL_SIZES)
    command.add_argument("--batch", type=int, default=64)
    command.add_argument("--decoder-batch", type=int, default=8)
    command.add_argument("--dvae-steps", type=int, default=5000)
    command.add_argument("--gpt-steps", type=int, default=8000)
    command.add_argument("--decoder-steps", type=int, default=2800)
    command.add_argument("--seconds", type=float, help="save and stop after so many seconds")
    command.add_argument("--phonemes", action=argparse.BooleanOptionalAction, default=HAS_ESPEAK)


def _corpus_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--speech", type=Path, required=True)
    command.add_argument("--hold-out", nargs="*", default=[], metavar="SPEAKER=SENTENCES")
    command.add_argument("--spliced-hours", type=float, default=12.0 if HAS_ESPEAK else 0.0)
    command.add_argument("--voice", metavar="SPEAKER", help="the only speaker of DVAE and decoder")
    command.add_argument("--without", nargs="*", default=[], metavar="SPEAKER", help="never trained on")


def _speaking_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--temperature", type=float)
    command.add_argument("--guidance", type=float, default=2.0)
    command.add_argument("--central", action=argparse.BooleanOptionalAction, default=True)


COMMANDS = {
    "all": (everything, ["--home"], [_corpus_flags, _training_flags, _speaking_flags]),
    "corpus": (corpus, ["--corpus"], [_corpus_flags]),
    "train": (train, ["--corpus", "--run"], [_training_flags]),
    "speak": (speak_held_out, ["--run", "--out"], [_speaking_flags]),
    "judge": (judge, ["--out"], []),
}
"""The function, the required folders and the groups of flags of each command."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    made = {name: commands.add_parser(name) for name in COMMANDS}
    for name, (call, folders, flags) in COMMANDS.items():
        made[name].set_defaults(call=call)
        for folder in folders:
            made[name].add_argument(folder, type=Path, required=True)
        for add_flags in flags:
            add_flags(made[name])
    made["train"].add_argument("--stage", action="append", choices=STAGES)
    made["speak"].add_argument("--at", nargs="*", default=[], metavar="STEP", help="a step, best, last or decoder")
    made["judge"].add_argument("--judge", type=Path, help="folder of the judges")
    options = parser.parse_args()
    if options.call in (everything, corpus) and not HAS_ESPEAK:
        console.print(
            "espeak-ng is not installed (pip install -e '.[phonemes]'): letters instead of phonemes, and no "
            "spliced sentences"
        )
    try:
        options.call(options)
    except MyXTTSError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
