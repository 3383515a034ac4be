"""Two questions about training a GPT from scratch, answered by judges of speech.

Is a reference voice cut from another clip better than one cut from the clip itself? Two GPTs take the same steps
on the same codes. Is the checkpoint with the lowest validation loss the one that speaks best? Checkpoints of the
first GPT speak validation sentences, by which one is chosen, and test sentences, by which choices are compared.

    python experiments/learning/listening.py cut --speech en7.zip --out SPEECH   optional: aligns where no GPU is
    python experiments/learning/listening.py run --speech SPEECH --home DIR      trains, speaks: DIR/spoken.zip
    python experiments/learning/listening.py judge DIR/spoken.zip                where the judges are (make judge)

Corpus and settings are those of learn.py, with all speakers as targets. Sentences are spoken in the voice of
another recording of the speaker. No speaker is trained on validation or test sentences. Both GPTs train at once,
and checkpoints speak meanwhile; `--seconds` stops the trainings in time to speak with what there is.
"""

from __future__ import annotations

import argparse
import atexit
import json
import shutil
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from augment import MORE_SPEEDS, SPEEDS, at_other_speeds, spliced, write_cuts
from corpus import RECORDINGS, Spoken, plain, read_speech, split, unpacked, write_corpus
from evaluation import Checkpoint, gpt_steps, held_out_losses, pack, run_at
from learn import HAS_ESPEAK
from rich.table import Table
from training import NUM_CHECKPOINTS, Deadline, console, train_stage

from myxtts.config import MODEL_SIZES, SAMPLE_RATE
from myxtts.data.prepare import prepare
from myxtts.errors import MyXTTSError, NoProgress
from myxtts.evaluation import (
    RECORDING,
    SYNTHESISED,
    find_judges,
    held_out_sentences,
    run_judges,
    summarise,
    with_voices,
)
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.observe.metrics import read_metrics
from myxtts.settings import load
from myxtts.synthesis.synthesizer import load_synthesizer, save_wave

ARMS = ("other", "same")
"""Values of `data.reference_clip`; checkpoints are chosen among those of the first."""
HELD_OUT = {"cmu_slt": 27, "cmu_bdl": 27, "kathleen": 26}
NUM_TEST, NUM_CHOOSING = 32, 16
"""Sentences that compare and that choose; the validation loss is that of all held-out clips but the first."""
FEW = 8  # sentences that an evaluation speaks by default
MAX_SECONDS, MAX_MEL_FRAMES = 6.9, 640  # of a recording, and of a clip at the slowest speed
CHECKPOINTS_SPOKEN = 6  # the last ones; earlier ones do not speak yet
SPEAKING_S, POLL_S = 45.0, 1.0  # what is left of `--seconds` to speak with the last checkpoints
SEED, DRAWS = 1, 10_000
TEST, CHOOSING = "test", "choosing"
ITEMS, ABOUT, PARTS, CUTS = "items.json", "about.json", "parts.json", "cuts.json"
SCORES = {"wer": "WER", "cer": "CER", "similarity": "similarity", "same_speaker_share": "same", "mos": "MOS"}
LOSSES = {"loss": "other clip", "loss_hearing_clip": "the clip", "loss_wrong_text": "wrong text"}

Item = dict[str, Any]


# Train and speak


def cut(options: argparse.Namespace) -> None:
    """Copy the recordings that are short enough, and write where they can be cut."""
    out = options.out
    if out.resolve() == options.speech.resolve():
        raise SystemExit(f"{out} is the folder of the recordings; give another one with --out")
    folder = unpacked(options.speech, out / "all")
    clips = [clip for clip in read_speech(folder) if clip.seconds <= MAX_SECONDS]
    kept = {Path(clip.path).relative_to(folder.resolve()) for clip in clips}
    header, *lines = (folder / "metadata.csv").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if Path(line.split("|")[0]) in kept]
    for path in kept:
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / path, out / path)
    (out / "metadata.csv").write_text("\n".join([header, *lines, ""]), encoding="utf-8")
    shutil.rmtree(out / "all", ignore_errors=True)
    write_cuts(read_speech(out), out / CUTS)


def make_corpus(options: argparse.Namespace) -> None:
    """Write `gpt` with the validation clips, and `RECORDINGS` with the test clips before these."""
    folder = unpacked(options.speech, options.corpus)
    clips = [clip for clip in read_speech(folder) if clip.seconds <= MAX_SECONDS]
    wanted = {name: int(count) for name, _, count in (one.partition("=") for one in options.hold_out)}
    parts = split(clips, wanted or HELD_OUT)
    held_out = in_turns(parts.held_out)
    own = [clip for clip in parts.train if options.voice in (None, clip.speaker)]
    others = [clip for clip in parts.train if options.voice not in (None, clip.speaker)]
    trained = own + at_other_speeds(own, options.corpus / "speeds", SPEEDS)
    if options.spliced_hours:
        trained += spliced(own, options.corpus / "spliced", options.spliced_hours, SPEEDS, folder / CUTS)
    trained += others + at_other_speeds(others, options.corpus / "others", MORE_SPEEDS)
    write_corpus(parts._replace(train=trained, held_out=held_out[options.test :]), options.corpus / "gpt")
    write_corpus(parts._replace(held_out=held_out), options.corpus / RECORDINGS)
    chosen = {TEST: held_out[: options.test], CHOOSING: held_out[options.test :][: options.choosing]}
    texts = {plain(clip.text): part for part, some in chosen.items() for clip in some}
    (options.corpus / PARTS).write_text(json.dumps(texts), encoding="utf-8")
    hours = sum(clip.seconds for clip in trained) / 3600
    console.print(
        f"{len(clips)} recordings; {len(trained)} clips to train on, {hours:.1f} h; {len(held_out)} held out"
    )


def in_turns(clips: Sequence[Spoken]) -> list[Spoken]:
    """The clips in an order in which any part has about the same share of every speaker."""
    counts, before, places = Counter(clip.speaker for clip in clips), Counter[str](), list[tuple[float, str]]()
    for clip in clips:
        places.append(((before[clip.speaker] + 0.5) / counts[clip.speaker], clip.speaker))
        before[clip.speaker] += 1
    return [clips[at] for at in sorted(range(len(clips)), key=places.__getitem__)]


def speak(options: argparse.Namespace, arm: str, step: int) -> None:
    """Speak with one checkpoint, and add that to what is to be judged."""
    label, out, began = label_of(arm, step), options.out, time.perf_counter()
    parts = json.loads((options.corpus / PARTS).read_text(encoding="utf-8"))
    with run_at(options.home / arm, Checkpoint(label, step, "griffin-lim", ())) as then:
        data = replace(load(then / "settings.yaml", {}).settings.data, tokenizer=then / "vocab.json")
        found = held_out_sentences(prepare(data), data, 10**6)
        sentences = [one for one in found if plain(one.text) in parts]
        for clip in {clip.file: clip for one in sentences for clip in (one.clip, one.reference)}.values():
            save_wave(out / clip.file, clip.wave, SAMPLE_RATE)
        synthesizer = load_synthesizer(then, vocoder="griffin-lim")
        work = with_voices(synthesizer, out, sentences)
        texts, voices, languages = zip(*((one.text, voice, one.language) for one, voice in work), strict=True)
        # As evaluations of a run speak: the first attempt counts.
        speeches = synthesizer.speak_many(texts, voices, languages, seed=SEED, num_attempts=1)
        losses = held_out_losses(then, out, [one for one, _ in work])
    items, about = (read_json(out / name, empty) for name, empty in ((ITEMS, []), (ABOUT, {})))
    items = [item for item in items if item["label"] not in (label, RECORDING)]
    for (one, _), speech in zip(work, speeches, strict=True):
        save_wave(out / one.file(label), speech.wave, OUTPUT_SAMPLE_RATE)
        facts = {
            "text": one.text,
            "language": one.language,
            "reference": one.reference.file,
            "speaker": one.speaker,
        }
        facts["part"] = parts[plain(one.text)]
        items.append({"set": SYNTHESISED, "label": label, "file": one.file(label), **facts})
        items.append({"set": RECORDING, "label": RECORDING, "file": one.clip.file, **facts})
    write_json(out / ITEMS, items)
    write_json(out / ABOUT, about | {label: {"arm": arm, "step": step, **losses}})
    console.print(f"{label}: {len(work)} sentences spoken in {time.perf_counter() - began:.1f} s")


def run(options: argparse.Namespace) -> None:
    """Train both GPTs and speak with them; what is there already is not repeated."""
    began, deadline = time.perf_counter(), Deadline(options.seconds)

    def said(what: str) -> None:
        console.print(f"{what} after {time.perf_counter() - began:.0f} s")

    options.corpus, options.out, options.phonemes = options.home / "corpus", options.home / "spoken", HAS_ESPEAK
    options.decoder_steps, options.decoder_batch = 0, 1
    if options.arm is not None:
        train_arm(options, deadline)
        return
    if not (options.corpus / PARTS).is_file():
        make_corpus(options)
        said("corpus")
    options.run = options.home / ARMS[0]
    train_stage(options, "dvae", deadline, our_settings(options))
    said("dvae")
    for arm in ARMS[1:]:
        if not (options.home / arm).is_dir():
            ignored = shutil.ignore_patterns("gpt", "metrics.jsonl", "lock")
            shutil.copytree(options.home / ARMS[0], options.home / arm, ignore=ignored)
    left = deadline.left_s
    seconds = None if left is None else max(left - SPEAKING_S, 0.0)
    trainings = {arm: begin_training(options, arm, seconds) for arm in ARMS}
    tried = {label for label, facts in read_json(options.out / ABOUT, {}).items() if "loss" in facts}
    while any(training.poll() is None for training in trainings.values()) and not deadline.is_over:
        first = steps_to_compare(options, ARMS[0])
        speak_new(options, ARMS[0], [step for step in first if is_late(options, step)], tried)
        time.sleep(POLL_S)
    for arm, training in trainings.items():
        said(f"gpt of {arm}, exit status {training.poll()},")
        if training.poll() is None:
            training.kill()
        if training.wait():
            print("".join((options.home / f"{arm}.log").read_text(errors="replace").splitlines(True)[-30:]))
    reached = {arm: steps_to_compare(options, arm) for arm in ARMS}
    equal = sorted(set.intersection(*map(set, reached.values())))[-1:]
    for arm in ARMS:  # what compares the arms first: time may run out
        speak_new(options, arm, equal or reached[arm][-1:], tried)
    speak_new(options, ARMS[0], [step for step in reached[ARMS[0]] if is_late(options, step)], tried)
    said("all")


def our_settings(options: argparse.Namespace) -> dict[str, object]:
    return {
        "data.train_data": str(options.corpus / "gpt"),
        "data.max_mel_frames": MAX_MEL_FRAMES,
        # Every command removes the checkpoints of all stages that are too many for it.
        "training.keep_checkpoints": NUM_CHECKPOINTS + 2,
    }


def begin_training(options: argparse.Namespace, arm: str, seconds: float | None) -> subprocess.Popen[bytes]:
    """Train the GPT of an arm in a process of its own, which prints to a file."""
    command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm]
    if seconds is not None:
        command += ["--seconds", str(seconds)]
    with open(options.home / f"{arm}.log", "ab") as log:
        training = subprocess.Popen(command, stdout=log, stderr=log)
    atexit.register(training.kill)  # if this process fails
    return training


def train_arm(options: argparse.Namespace, deadline: Deadline) -> None:
    options.run = options.home / options.arm
    train_stage(options, "gpt", deadline, our_settings(options) | {"data.reference_clip": options.arm})


def steps_to_compare(options: argparse.Namespace, arm: str) -> list[int]:
    """The steps of an arm's checkpoints, except the one at which a deadline stopped it: the arms share these."""
    found = gpt_steps(options.home / arm)
    return [step for step in found if step % steps_between(options) == 0 or step == options.gpt_steps]


def steps_between(options: argparse.Namespace) -> int:
    return max(int(options.gpt_steps) // NUM_CHECKPOINTS, 1)


def is_late(options: argparse.Namespace, step: int) -> bool:
    return bool(step > options.gpt_steps - CHECKPOINTS_SPOKEN * steps_between(options))


def speak_new(options: argparse.Namespace, arm: str, steps: Collection[int], tried: set[str]) -> None:
    """Speak with the checkpoints that were not tried, and pack after each what there is so far."""
    for step in steps:
        if (label := label_of(arm, step)) in tried:
            continue
        tried.add(label)
        try:
            speak(options, arm, step)
            write_json(options.out / ABOUT, with_losses(options, read_json(options.out / ABOUT, {})))
            for name in ARMS:
                for path in (options.home / name / "metrics.jsonl", options.home / f"{name}.log"):
                    if path.is_file():
                        shutil.copy(path, options.out / f"{name}{path.suffix}")
            pack(options.out, options.zip or options.home / "spoken.zip")
        except Exception:  # the other checkpoints and the other training go on
            console.print_exception()


def with_losses(options: argparse.Namespace, about: Mapping[str, Item]) -> dict[str, Item]:
    """What is known of each checkpoint, with its validation and training losses: known after it was saved."""
    found = {label: dict(facts) for label, facts in about.items()}
    for arm in ARMS:
        if (file := options.home / arm / "metrics.jsonl").is_file():
            for line in read_metrics(file):
                label = label_of(arm, line.get("step", 0))
                name = {"validation": "validation", "step": "training"}.get(line["kind"])
                if line.get("stage") == "gpt" and label in found and name is not None:
                    found[label][name] = line["losses"]["total"]
    return found


def label_of(arm: str, step: int) -> str:
    return f"{arm}-{step:06d}"


# Judge


def judge(options: argparse.Namespace) -> None:
    """Judge what chooses, choose, judge what compares, and print the tables."""
    out = options.spoken
    if out.suffix == ".zip":
        with zipfile.ZipFile(out) as packed:
            packed.extractall(out := out.with_suffix(""))
    items, about = read_json(out / ITEMS, []), read_json(out / ABOUT, {})
    about = dict(sorted(about.items(), key=lambda known: known[1]["step"]))
    ours = [label for label, facts in about.items() if facts["arm"] == ARMS[0] and "validation" in facts]
    equal = [
        (label_of(ARMS[0], facts["step"]), label) for label, facts in about.items() if facts["arm"] != ARMS[0]
    ]
    choosing = judged(
        out, CHOOSING, [item for item in items if item["part"] == CHOOSING and item["label"] in ours]
    )
    show("Sentences that choose, by checkpoint", choosing, about)
    few = {item["text"] for item in [item for item in choosing if item["label"] == ours[0]][:FEW]}
    scores = {label: {"loss": about[label]["validation"]} for label in ours}
    for label, rows in by_label(choosing).items():
        whole, part = (
            summarise(some)[SYNTHESISED] for some in (rows, [row for row in rows if row["text"] in few])
        )
        found = {"wer": whole["wer"], f"wer of {len(few)}": part["wer"], "-similarity": whole["similarity"]}
        found["-mos"] = whole["mos"]
        signs = {name: -1.0 if name.startswith("-") else 1.0 for name in found}
        scores[label] |= {name.lstrip("-"): signs[name] * float(value or 0) for name, value in found.items()}
    picks = {by: min(ours, key=lambda label: scores[label][by]) for by in scores[ours[0]]} | {"newest": ours[-1]}
    for by, label in picks.items():
        console.print(f"chosen by {by}: {label}")
    wanted = {RECORDING, *(ours if options.all else picks.values()), *(label for pair in equal for label in pair)}
    test = judged(out, TEST, [item for item in items if item["part"] == TEST and item["label"] in wanted])
    show("Test sentences", test, about)
    show("by speaker", [row | {"label": f"{row['label']} {row['speaker']}"} for row in test], {})
    pairs = {(label, picks["loss"]) for label in picks.values()}
    pairs |= {pair for pair in equal if pair[0] in about}
    for ours_label, against in sorted(pair for pair in pairs if pair[0] != pair[1]):
        for name in ("wer", "similarity", "mos"):
            console.print(f"{ours_label} against {against}, {name}: {difference(test, ours_label, against, name)}")


def judged(out: Path, part: str, items: Sequence[Item]) -> list[Item]:
    """The items with their scores; those that were judged before are not judged again."""
    place = out / f"{part}-scores.json"
    known = {item["file"]: item for item in read_json(place, [])}
    if left := [item for item in items if item["file"] not in known]:
        write_json(out / "to-judge.json", left)
        console.print(f"judging {len(left)} clips")
        _, *lines = run_judges(find_judges(), out / "to-judge.json", len(left), NoProgress())
        known |= {line["file"]: line for line in lines}
        write_json(place, list(known.values()))
    return [known[item["file"]] for item in items]


def show(title: str, rows: Sequence[Item], about: dict[str, Any]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("", "clips", *SCORES.values(), "training loss", "validation", *LOSSES.values()):
        table.add_column(column, justify="right")
    for label, some in by_label(rows).items():
        (summary,) = summarise(some).values()
        values = [*(summary[name] for name in SCORES)]
        values += [about.get(label, {}).get(name) for name in ("training", "validation", *LOSSES)]
        cells = [
            "" if value is None else f"{value:.{2 if at < len(SCORES) else 3}f}" for at, value in enumerate(values)
        ]
        table.add_row(label, str(len(some)), *cells)
    console.print(table)


def by_label(rows: Sequence[Item]) -> dict[str, list[Item]]:
    return {
        label: [row for row in rows if row["label"] == label] for label in sorted({row["label"] for row in rows})
    }


def difference(rows: Sequence[Item], label: str, against: str, name: str) -> str:
    """The difference of a score between two checkpoints, with its 95 % interval over the sentences."""
    names = ("word_edits", "words") if name == "wer" else (name, None)
    one, other = ({row["text"]: row for row in by_label(rows)[each]} for each in (label, against))
    texts = sorted(one.keys() & other.keys())
    gaps, weights = np.zeros(len(texts)), np.ones(len(texts))
    for at, text in enumerate(texts):
        gaps[at] = (one[text].get(names[0]) or 0) - (other[text].get(names[0]) or 0)
        weights[at] = one[text][names[1]] if names[1] else 1
    drawn = np.random.default_rng(0).integers(0, len(texts), (DRAWS, len(texts)))
    low, high = np.quantile(gaps[drawn].sum(1) / weights[drawn].sum(1), [0.025, 0.975])
    return f"{gaps.sum() / weights.sum():+.3f} ({low:+.3f} to {high:+.3f})"


def read_json(path: Path, empty: Any) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else empty


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    cutting, running, judging = (commands.add_parser(name) for name in ("cut", "run", "judge"))
    cutting.set_defaults(call=cut)
    cutting.add_argument("--speech", type=Path, required=True)
    cutting.add_argument("--out", type=Path, required=True)
    running.set_defaults(call=run)
    running.add_argument("--speech", type=Path, required=True, help="a zip file or folder, see learn.py")
    running.add_argument("--home", type=Path, required=True)
    running.add_argument("--zip", type=Path, help="what to write instead of spoken.zip in --home")
    running.add_argument("--hold-out", nargs="*", default=[], metavar="SPEAKER=SENTENCES")
    running.add_argument("--voice", metavar="SPEAKER", help="splice sentences of this speaker only")
    running.add_argument(
        "--seconds", type=float, help="stop training in time to have spoken after so many seconds"
    )
    running.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)  # of a process that only trains
    running.add_argument("--test", type=int, default=NUM_TEST)
    running.add_argument("--choosing", type=int, default=NUM_CHOOSING)
    running.add_argument("--spliced-hours", type=float, default=6.0 if HAS_ESPEAK else 0.0)
    running.add_argument("--size", default="small", choices=MODEL_SIZES)
    running.add_argument("--batch", type=int, default=64)
    running.add_argument("--dvae-steps", type=int, default=2000)
    running.add_argument("--gpt-steps", type=int, default=3000)
    judging.set_defaults(call=judge)
    judging.add_argument("spoken", type=Path)
    judging.add_argument("--all", action="store_true", help="judge the test sentences of all checkpoints")
    options = parser.parse_args()
    try:
        options.call(options)
    except MyXTTSError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
