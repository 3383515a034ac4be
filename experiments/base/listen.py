"""Speak test sentences in test voices, and have them judged.

    listen.py speak MODEL CASES OUT [--adapt] [--vocoder NAME] [--guidance X]   on any machine
    listen.py judge OUT...                                                where the judges are (make judge)

MODEL is a run or a folder of weights. CASES is a folder with cases.json, a list of {"group", "text", "language",
"reference", and optionally "other"}; these are recordings of one person, named relative to the folder. The voice
is made of the first, and compared with the other, if there is one. OUT gets the speech as FLAC, copies of the
recordings, and items.json, the input of the judges: it can be judged on another machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import soundfile
from rich.console import Console
from rich.table import Table

from myxtts.errors import NO_PROGRESS
from myxtts.evaluation import SYNTHESISED, find_judges, summarise
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.synthesis.synthesizer import load_synthesizer
from myxtts.tools.evaluate import score

SEED = 1
MEASURES = {
    "wer": "WER",
    "cer": "CER",
    "similarity": "similarity",
    "same_speaker_share": "same speaker",
    "mos": "MOS",
}
console = Console(width=120, highlight=False)


def speak(model: Path, cases_folder: Path, out: Path, vocoder: Any, guidance: float | None, adapt: bool) -> None:
    """Speak all cases in batches and write the judges' input."""
    cases = json.loads((cases_folder / "cases.json").read_text(encoding="utf-8"))
    (out / "reference").mkdir(parents=True, exist_ok=True)
    synthesizer = load_synthesizer(model, vocoder=vocoder)
    sampling = synthesizer.sampling if guidance is None else replace(synthesizer.sampling, guidance=guidance)
    names = sorted({case["reference"] for case in cases})
    voices = {name: synthesizer.voice([cases_folder / name], adapt=adapt) for name in names}
    compared = [case.get("other", case["reference"]) for case in cases]
    copies = {name: f"reference/{number}{Path(name).suffix}" for number, name in enumerate(sorted(set(compared)))}
    for name, copy in copies.items():
        shutil.copyfile(cases_folder / name, out / copy)
    started = time.perf_counter()
    speeches = synthesizer.speak_many(
        [case["text"] for case in cases],
        [voices[case["reference"]] for case in cases],
        [case["language"] for case in cases],
        sampling=sampling,
        seed=SEED,
    )
    seconds = sum(speech.report.seconds for speech in speeches)
    items = []
    for number, (case, name, speech) in enumerate(zip(cases, compared, speeches, strict=True)):
        soundfile.write(out / f"{number:04}.flac", speech.wave, OUTPUT_SAMPLE_RATE)
        items.append({**case, "set": SYNTHESISED, "file": f"{number:04}.flac", "reference": copies[name]})
    (out / "items.json").write_text(json.dumps(items, ensure_ascii=False, indent=1), encoding="utf-8")
    console.print(
        f"{len(items)} sentences, {seconds:.0f} s of speech in {time.perf_counter() - started:.1f} s: {out}"
    )


def judge(folders: list[Path]) -> None:
    """Have the judges score each folder, and print one table."""
    table = Table("speech", "group", "clips", *MEASURES.values())
    for folder in folders:
        clips = score(folder, find_judges(), NO_PROGRESS)["clips"]
        for name in sorted({clip["group"] for clip in clips}):
            row = summarise([clip for clip in clips if clip["group"] == name])[SYNTHESISED]
            cells = [f"{row[measure]:.2f}" if row.get(measure) is not None else "" for measure in MEASURES]
            table.add_row(folder.name, name, str(row["clips"]), *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    speaking = commands.add_parser("speak")
    for name in ("model", "cases", "out"):
        speaking.add_argument(name, type=Path)
    speaking.add_argument("--vocoder", choices=("hifigan", "griffin-lim"))
    speaking.add_argument("--guidance", type=float)
    speaking.add_argument("--adapt", action="store_true", help="learn the voices from their references")
    commands.add_parser("judge").add_argument("folders", type=Path, nargs="+")
    asked = parser.parse_args()
    if asked.command == "judge":
        judge(asked.folders)
    else:
        speak(asked.model, asked.cases, asked.out, asked.vocoder, asked.guidance, asked.adapt)


if __name__ == "__main__":
    main()
