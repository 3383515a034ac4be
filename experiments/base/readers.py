"""Clips of many readers, of whom there is one recording each: cut in two where they pause, and transcribed.

    .judge/bin/python experiments/base/readers.py --whisper MODEL --out CORPUS FOLDER...

FOLDER/NAME.flac is one reader each; the two halves are a clip and its reference. A recording without a pause stays
whole. Short recordings in a FOLDER with `sample.txt` are of that text and are not cut. Writes a corpus folder.
"""

from __future__ import annotations

import argparse
import csv
from itertools import pairwise
from pathlib import Path
from typing import Any

import soundfile
from faster_whisper import WhisperModel

HEADER = "path|speaker|language|text|seconds|sample_rate"
LEAST_S, LEAST_PAUSE_S, LONGEST_S = 3.0, 0.12, 12.5
SUFFIXES = (".flac", ".wav", ".mp3", ".ogg")
LEAST_PROBABILITY = 0.5  # of a word, on average: below it the words are not trusted


def halves(words: list[Any], seconds: float) -> list[tuple[float, float, str]]:
    """Start, end and text of the parts: two if there is a long enough pause, else one."""
    pauses = [
        (after.start - before.end, (after.start + before.end) / 2, number)
        for number, (before, after) in enumerate(pairwise(words), 1)
        if LEAST_S <= (after.start + before.end) / 2 <= seconds - LEAST_S
    ]
    longest = max(pauses, default=(0.0, 0.0, 0))
    said = [word.word for word in words]
    if longest[0] < LEAST_PAUSE_S:
        return [(0.0, seconds, "".join(said).strip())]
    _, cut, number = longest
    return [(0.0, cut, "".join(said[:number]).strip()), (cut, seconds, "".join(said[number:]).strip())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--whisper", required=True, help="folder of a Whisper model for CTranslate2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--leave-out", nargs="*", default=[], help="readers that are held out")
    options = parser.parse_args()
    (options.out / "wavs").mkdir(parents=True, exist_ok=True)
    whisper = WhisperModel(options.whisper, device="cpu", compute_type="int8", cpu_threads=2)
    with open(options.out / "metadata.csv", "w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, delimiter="|", quoting=csv.QUOTE_NONE, escapechar=None, quotechar=None)
        rows.writerow(HEADER.split("|"))
        for folder in options.folders:
            known = folder / "sample.txt"
            text = known.read_text(encoding="utf-8").splitlines()[0].strip() if known.is_file() else None
            for path in sorted(
                each for each in folder.iterdir() if each.suffix in (".flac", ".wav", ".mp3", ".ogg")
            ):
                speaker = path.stem.split("-")[0].removeprefix("speaker_").removeprefix("sample_")
                if speaker in options.leave_out:
                    continue
                wave, rate = soundfile.read(path, dtype="float32", always_2d=True)
                seconds = len(wave) / rate
                if text is not None and seconds <= LONGEST_S:
                    parts = [(0.0, seconds, text)]
                else:
                    found, _ = whisper.transcribe(str(path), language="en", beam_size=2, word_timestamps=True)
                    words = [word for segment in found for word in segment.words]
                    if not words or sum(word.probability for word in words) < LEAST_PROBABILITY * len(words):
                        continue
                    parts = halves(words, seconds)
                for number, (begin, end, said) in enumerate(parts):
                    if not LEAST_S <= end - begin <= LONGEST_S or not said or "|" in said:
                        continue
                    name = f"wavs/{folder.name}_{speaker}_{number}.ogg"
                    part = wave[int(begin * rate) : int(end * rate)].mean(1)
                    soundfile.write(options.out / name, part, rate, format="OGG", subtype="VORBIS")
                    rows.writerow([name, f"{folder.name}_{speaker}", "en", said, f"{end - begin:.3f}", rate])


if __name__ == "__main__":
    main()
