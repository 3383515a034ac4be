"""Recordings of many readers to a corpus, at several speeds: each speed counts as another person.

    python experiments/base/people.py --out CORPUS --speeds 1 0.9 0.95 1.06 1.12 -- LibriSpeech/train-clean-5 ...

SOURCES are folders in LibriSpeech's layout (READER/CHAPTER/*.flac with *.trans.txt), or corpora, such as those
that `readers.py` writes. Readers that are held out of training are left out, as are too short or long clips.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import soundfile
from texts import HEADER
from voices import HELD_OUT_PEOPLE

SHORTEST_S, LONGEST_S = 2.0, 12.4
READER_S = 330.0  # of one reader, at speed 1
SEED = 1


class Reading(NamedTuple):
    path: Path
    reader: str
    language: str
    text: str


def readings(source: Path) -> Iterator[Reading]:
    """The clips of a source, with their texts."""
    if (source / "metadata.csv").is_file():
        for line in (source / "metadata.csv").read_text(encoding="utf-8").splitlines()[1:]:
            name, reader, language, text, *_ = line.split("|")
            yield Reading(source / name, reader, language, text)
    for texts in sorted(source.glob("*/*/*.trans.txt")):
        for line in texts.read_text(encoding="utf-8").splitlines():
            name, _, text = line.partition(" ")
            reader = f"libri_{name.partition('-')[0]}"
            yield Reading(texts.parent / f"{name}.flac", reader, "en", text.capitalize())


def chosen(found: Sequence[Reading]) -> list[Reading]:
    """As much of every reader as is wanted, at random."""
    by_reader = defaultdict(list)
    for reading in found:
        if reading.reader not in HELD_OUT_PEOPLE:
            by_reader[reading.reader].append(reading)
    kept = []
    for reader in sorted(by_reader):
        random.Random(f"{SEED} {reader}").shuffle(by_reader[reader])
        room = READER_S
        for reading in by_reader[reader]:
            seconds = soundfile.info(reading.path).duration
            if SHORTEST_S <= seconds <= LONGEST_S and room > 0:
                kept.append(reading)
                room -= seconds
    return kept


def at_speeds(out: Path, speeds: Sequence[float], reading: Reading) -> list[str]:
    """Write a clip with scaled sample rates, and return the lines of the metadata."""
    wave, rate = soundfile.read(reading.path, dtype="int16")
    folder = Path("wavs") / reading.reader
    (out / folder).mkdir(parents=True, exist_ok=True)
    lines = []
    for speed in speeds:
        name, scaled = folder / f"{reading.path.stem}-{speed:g}.wav", round(speed * rate)
        soundfile.write(out / name, wave, scaled)
        reader = reading.reader if speed == 1 else f"{reading.reader} at {speed:g}"
        lines.append(f"{name}|{reader}|{reading.language}|{reading.text}|{len(wave) / scaled:.3f}|{scaled}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0])
    options = parser.parse_args()
    kept = chosen([reading for source in options.sources for reading in readings(source)])
    with ProcessPoolExecutor() as pool:
        made = pool.map(partial(at_speeds, options.out, options.speeds), kept, chunksize=8)
        lines = [HEADER, *(line for some in made for line in some)]
    (options.out / "metadata.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    readers = {one.reader for one in kept}
    print(f"{options.out}: {len(kept)} clips of {len(readers)} readers, at {len(options.speeds)} speeds")


if __name__ == "__main__":
    main()
