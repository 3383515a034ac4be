"""Two questions about training a GPT from scratch, answered by judges of speech.

Is a reference voice cut from another clip better than one cut from the clip itself? Two GPTs take the same steps
on the same codes. Is the checkpoint with the lowest validation loss the one that speaks best? Checkpoints of the
first GPT speak validation sentences, by which one is chosen, and test sentences, by which choices are compared.

    python experiments/learning/listening.py run --speech en7.zip --home DIR     trains, speaks: DIR/spoken.zip
    python experiments/learning/listening.py judge DIR/spoken.zip                where the judges are (make judge)

Corpus and settings are those of learn.py, with all speakers as targets. Sentences are spoken in the voice of
another recording of the speaker. No speaker is trained on validation or test sentences.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from augment import SPEEDS, at_other_speeds, spliced
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
CHECKPOINTS_SPOKEN = 6  # the newest; earlier ones do not speak yet
SEED, DRAWS = 1, 10_000
TEST, CHOOSING = "test", "choosing"
ITEMS, ABOUT, PARTS = "items.json", "about.json", "parts.json"
SCORES = {"wer": "WER", "cer": "CER", "similarity": "similarity", "same_speaker_share": "same", "mos": "MOS"}
LOSSES = {"loss": "other clip", "loss_hearing_clip": "the clip", "loss_wrong_text": "wrong text"}

Item = dict[str, Any]


# Train and speak


def make_corpus(options: argparse.Namespace) -> None:
    """Write `dvae` and `gpt` with the validation clips, and `RECORDINGS` with the test clips before these."""
    clips = [clip for clip in read_speech(unpacked(options.speech, options.corpus)) if clip.seconds <= MAX_SECONDS]
    wanted = {name: int(count) for name, _, count in (one.partition("=") for one in options.hold_out)}
    parts = split(clips, wanted or HELD_OUT)
    held_out = in_turns(parts.held_out)
    trained = parts.train + at_other_speeds(parts.train, options.corpus / "speeds", SPEEDS)
    if options.spliced_hours:
        trained += spliced(parts.train, options.corpus / "spliced", options.spliced_hours, SPEEDS)
    for name in ("dvae", "gpt"):
        write_corpus(parts._replace(train=trained, held_out=held_out[options.test :]), options.corpus / name)
    write_corpus(parts._replace(held_out=held_out), options.corpus / RECORDINGS)
    chosen = {TEST: held_out[: options.test], CHOOSING: held_out[options.test :][: options.choosing]}
    texts = {plain(clip.text): part for part, some in chosen.items() for clip in some}
    (options.corpus / PARTS).write_text(json.dumps(texts), encoding="utf-8")
    hours = sum(clip.seconds for clip in trained) / 3600
    console.print(
        f"{len(clips)} recordings; {len(trained)} clips to train on, {hours:.1f} h; {len(held_out)} held out"
    )


def in_turns(clips: Sequence[Spoken]) -> list[Spoken]:
    """The clips of all speakers, one of each in turn."""
    speakers = sorted({clip.speaker for clip in clips})
    rows = zip_longest(*([clip for clip in clips if clip.speaker == speaker] for speaker in speakers))
    return [clip for row in rows for clip in row if clip is not None]


def speak(options: argparse.Namespace, arm: str, step: int) -> None:
    """Speak with one checkpoint, and add that to what is to be judged."""
    label, out, began = f"{arm}-{step:06d}", options.out, time.perf_counter()
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
    known = [line for line in read_metrics(options.home / arm / "metrics.jsonl") if line.get("stage") == "gpt"]
    losses |= {
        name: line["losses"]["total"]
        for name, kind in (("validation", "validation"), ("training", "step"))
        for line in known
        if (line["kind"], line["step"]) == (kind, step)
    }
    write_json(out / ITEMS, items)
    write_json(out / ABOUT, about | {label: {"arm": arm, "step": step, **losses}})
    console.print(f"{label}: {len(work)} sentences spoken in {time.perf_counter() - began:.1f} s")


def run(options: argparse.Namespace) -> None:
    """Train both GPTs and speak with them; what is there already is not repeated."""
    began, deadline = time.perf_counter(), Deadline(None)
    options.corpus, options.out, options.phonemes = options.home / "corpus", options.home / "spoken", HAS_ESPEAK
    options.decoder_steps, options.decoder_batch = 0, 1
    if not (options.corpus / PARTS).is_file():
        make_corpus(options)
    for arm in ARMS:
        # Every command removes the checkpoints of all stages that are too many for it.
        ours = {"data.max_mel_frames": MAX_MEL_FRAMES, "training.keep_checkpoints": NUM_CHECKPOINTS + 1}
        options.run = options.home / arm
        if arm != ARMS[0] and not options.run.is_dir():
            shutil.copytree(
                options.home / ARMS[0], options.run, ignore=shutil.ignore_patterns("gpt", "metrics.jsonl")
            )
        train_stage(options, "dvae", deadline, ours)
        train_stage(options, "gpt", deadline, ours | {"data.reference_clip": arm})
        console.print(f"after {time.perf_counter() - began:.0f} s")
        steps = gpt_steps(options.run)[-CHECKPOINTS_SPOKEN if arm == ARMS[0] else -1 :]
        for step in steps:
            try:
                speak(options, arm, step)
            except Exception:  # the other checkpoints and the other training go on
                console.print_exception()
        pack(options.out, options.zip or options.home / "spoken.zip")
        console.print(f"after {time.perf_counter() - began:.0f} s")


# Judge


def judge(options: argparse.Namespace) -> None:
    """Judge what chooses, choose, judge what compares, and print the tables."""
    out = options.spoken
    if out.suffix == ".zip":
        with zipfile.ZipFile(out) as packed:
            packed.extractall(out := out.with_suffix(""))
    items, about = read_json(out / ITEMS, []), read_json(out / ABOUT, {})
    ours = [label for label, facts in about.items() if facts["arm"] == ARMS[0]]
    lasts = {facts["arm"]: label for label, facts in about.items()}  # the last label of each arm
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
    picks = {by: min(ours, key=lambda label: scores[label][by]) for by in scores[ours[0]]} | {
        "newest": lasts[ARMS[0]]
    }
    for by, label in picks.items():
        console.print(f"chosen by {by}: {label}")
    wanted = {RECORDING, *lasts.values(), *(ours if options.all else picks.values())}
    test = judged(out, TEST, [item for item in items if item["part"] == TEST and item["label"] in wanted])
    show("Test sentences", test, about)
    pairs = {(label, picks["loss"]) for label in picks.values()}
    pairs |= {(lasts[ARMS[0]], lasts[arm]) for arm in ARMS[1:] if arm in lasts}
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
    running, judging = commands.add_parser("run"), commands.add_parser("judge")
    running.set_defaults(call=run)
    running.add_argument("--speech", type=Path, required=True, help="a zip file or folder, see learn.py")
    running.add_argument("--home", type=Path, required=True)
    running.add_argument("--zip", type=Path, help="what to write instead of spoken.zip in --home")
    running.add_argument("--hold-out", nargs="*", default=[], metavar="SPEAKER=SENTENCES")
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
