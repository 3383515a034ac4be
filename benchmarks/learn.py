"""The learning experiment: DVAE, GPT and decoder from scratch on a few hours of real speech, heard by judges.

    python benchmarks/learn.py all --speech en7.zip --home DIR       what follows, but for `judge`
    python benchmarks/learn.py corpus --speech DIR --corpus DIR      held-out sentences, for every speaker alike
    python benchmarks/learn.py train --corpus DIR --run DIR          the stages, or one; called again it goes on
    python benchmarks/learn.py speak --run DIR --out DIR             the held-out sentences at every moment kept
    python benchmarks/learn.py judge --judge DIR --out DIR           judges (`make judge`), a table and curves

Speech is a folder or zip file with metadata.csv: path|speaker|language|text|seconds|sample_rate.
`--voice SPEAKER` is whom DVAE and decoder hear; others only teach the GPT to read.
`--seconds` ends a training in time, saved; the same command continues.
"""

from __future__ import annotations

import argparse
import zipfile
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from learn_corpus import HELD_OUT, RECORDINGS, Spoken, read_speech, split, unpacked, write_corpus
from learn_more import MORE_SPEEDS, SPEEDS, at_other_speeds, spliced
from learn_speech import gpt_steps, judge_all, moments, pack, speak
from learn_train import Deadline, console, train_stage

from myxtts.config import MODEL_SIZES, STAGES
from myxtts.errors import DatasetError, MyXTTSError
from myxtts.tools.evaluate import find_judges

HAS_ESPEAK = find_spec("espeakng_loader") is not None
HELD_OUT_OF_ONE = 40
"""Sentences of the speaker that `--voice` names."""
SAMPLING = ("temperature", "guidance", "central")
JUDGED_MOMENTS = (0.25, 0.5, 1.0)
"""Of the GPT's training, for `all`."""


def corpus(options: argparse.Namespace) -> None:
    """What each stage trains on.

    The decoder: recordings of the voice at several speeds. The DVAE: besides, sentences put together from pieces
    of them. The GPT: besides, what others read.
    """
    clips = read_speech(unpacked(options.speech, options.corpus))
    wanted = {name: int(count) for name, _, count in (one.partition("=") for one in options.hold_out)}
    parts = split(
        clips, wanted or ({options.voice: HELD_OUT_OF_ONE} if options.voice else HELD_OUT), options.without
    )
    if options.voice and options.voice not in {clip.speaker for clip in parts.train}:
        raise DatasetError(f"--voice {options.voice} is none of the speakers trained on; see metadata.csv")
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
        add("put together", spliced(own, options.corpus / "spliced", options.spliced_hours, speeds))
    write_corpus(parts._replace(train=trained), options.corpus / "dvae")
    if others:
        add("of others", others)
        add("of others at other speeds", at_other_speeds(others, options.corpus / "others", MORE_SPEEDS))
    write_corpus(parts._replace(train=trained), options.corpus / "gpt")


def _hours(clips: Sequence[Spoken]) -> str:
    return f"{sum(clip.seconds for clip in clips) / 3600:.2f} h"


def train(options: argparse.Namespace) -> None:
    deadline = Deadline(options.seconds)
    for stage in options.stage or STAGES:
        if not train_stage(options, stage, deadline):
            console.print(f"time is up in stage {stage}; the same command continues")
            return


def say(options: argparse.Namespace) -> None:
    """All moments, or those named: steps of the GPT, `last`, `best`, `decoder`."""
    chosen = moments(options.run)
    if options.at:
        best = options.run / "gpt" / "best"
        step = best.read_text(encoding="utf-8").strip().removeprefix("step-") if best.is_file() else ""
        named = {"best": step, "last": str(gpt_steps(options.run)[-1])}
        wanted = {int(named.get(one, one)) for one in options.at if one != "decoder"}
        chosen = [
            moment
            for moment in chosen
            if ("decoder" in options.at if moment.vocoder == "hifigan" else moment.gpt_step in wanted)
        ]
    for moment in chosen:
        speak(options.run, options.out, moment, {name: getattr(options, name) for name in SAMPLING})
    pack(options.out, options.out.with_suffix(".zip"))


def everything(options: argparse.Namespace) -> None:
    deadline = Deadline(options.seconds)
    options.corpus, options.run, options.out = (options.home / name for name in ("corpus", "run", "spoken"))
    if not (options.corpus / "gpt" / "metadata_train.csv").is_file():
        corpus(options)
    options.at = []
    for stage in STAGES:
        ended = train_stage(options, stage, deadline)
        if stage == "gpt":
            reached = {round(share * options.gpt_steps) for share in JUDGED_MOMENTS}
            options.at = [str(step) for step in gpt_steps(options.run) if step in reached] if ended else []
        if stage != "dvae" and ended and not deadline.is_over:
            options.at += ["decoder"] * (stage == "decoder")
            say(options)
        if not ended:
            console.print(f"time is up in stage {stage}; the same command continues")
            return


def judge(options: argparse.Namespace) -> None:
    """Judge a folder that `speak` wrote, or the file it packed."""
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
    command.add_argument("--seconds", type=float, help="stop and save after so long")
    command.add_argument("--phonemes", action=argparse.BooleanOptionalAction, default=HAS_ESPEAK)


def _corpus_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--speech", type=Path, required=True)
    command.add_argument("--hold-out", nargs="*", default=[], metavar="SPEAKER=SENTENCES")
    command.add_argument("--spliced-hours", type=float, default=12.0 if HAS_ESPEAK else 0.0, help="put together")
    command.add_argument("--voice", metavar="SPEAKER", help="the only one whom DVAE and decoder hear")
    command.add_argument("--without", nargs="*", default=[], metavar="SPEAKER", help="never trained on")


def _speaking_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--temperature", type=float)
    command.add_argument("--guidance", type=float, default=2.0)
    command.add_argument("--central", action=argparse.BooleanOptionalAction, default=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    made = {name: commands.add_parser(name) for name in ("all", "corpus", "train", "speak", "judge")}
    calls = {"all": everything, "corpus": corpus, "train": train, "speak": say, "judge": judge}
    folders = {
        "all": ["--home"],
        "corpus": ["--corpus"],
        "train": ["--corpus", "--run"],
        "speak": ["--run", "--out"],
        "judge": ["--out"],
    }
    for name, command in made.items():
        command.set_defaults(call=calls[name])
        for folder in folders[name]:
            command.add_argument(folder, type=Path, required=True)
    for name in ("all", "corpus"):
        _corpus_flags(made[name])
    for name in ("all", "train"):
        _training_flags(made[name])
    for name in ("all", "speak"):
        _speaking_flags(made[name])
    made["train"].add_argument("--stage", action="append", choices=STAGES)
    made["speak"].add_argument("--at", nargs="*", default=[], metavar="STEP", help="a step, best, last or decoder")
    made["judge"].add_argument("--judge", type=Path, help="folder of the judges")
    options = parser.parse_args()
    if options.call in (everything, corpus) and not HAS_ESPEAK:
        console.print(
            "espeak-ng is not installed (pip install -e '.[phonemes]'): letters instead of phonemes, and no "
            "sentences put together"
        )
    try:
        options.call(options)
    except MyXTTSError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
