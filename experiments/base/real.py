"""Real recordings of the base model's corpus: zip files of Ogg clips, without the speakers held out of training.

    python experiments/base/real.py pack en7.zip de_nl3.zip --out CARRY       (real-0.zip and real-1.zip)
    python experiments/base/real.py unpack CARRY/real-*.zip --out CORPUS      (adds to the corpus, or begins one)

Clips travel and stay as Ogg, which `prepare` reads.
"""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from texts import HEADER
from voices import HELD_OUT_PEOPLE

METADATA = "metadata.csv"
PARTS = 2


class Recording(NamedTuple):
    """A clip in a zip file: the file, its name there, its line of metadata, and its size."""

    source: Path
    name: str
    fields: list[str]
    size: int


def recordings(source: Path) -> list[Recording]:
    """Return the clips of a zip file, without those of `HELD_OUT_PEOPLE`."""
    with zipfile.ZipFile(source) as file:
        sizes = {info.filename: info.file_size for info in file.infolist()}
        name = next(name for name in sizes if PurePosixPath(name).name == METADATA)
        header, *lines = file.read(name).decode().splitlines()
    if header != HEADER:
        raise SystemExit(f"{source}: {name} begins with {header[:60]!r}, expected {HEADER!r}")
    rows = [line.split("|") for line in lines]
    found = [(str(PurePosixPath(name).parent / row[0]), row) for row in rows if row[1] not in HELD_OUT_PEOPLE]
    if missing := [path for path, _ in found if path not in sizes]:
        raise SystemExit(f"{source}: {len(missing)} clips of {name} are missing, the first: {missing[0]}")
    return [Recording(source, path, row, sizes[path]) for path, row in found]


def pack(sources: list[Path], out: Path) -> None:
    """Write all clips for training into zip files of equal size."""
    parts: list[list[Recording]] = [[] for _ in range(PARTS)]
    sizes = [0] * PARTS
    for item in (item for source in sources for item in recordings(source)):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(item)
        sizes[smallest] += item.size
    archives = {source: zipfile.ZipFile(source) for source in sources}
    for number, part in enumerate(parts):
        path = out / f"real-{number}.zip"
        with zipfile.ZipFile(path, "w") as file:
            lines = [HEADER, *("|".join(item.fields) for item in part)]
            file.writestr(METADATA, "\n".join(lines) + "\n", zipfile.ZIP_DEFLATED)
            for item in part:
                file.writestr(item.fields[0], archives[item.source].read(item.name))
        print(f"{path}: {len(part)} clips, {path.stat().st_size / 1e6:.1f} MB")


def unpack(sources: list[Path], out: Path) -> None:
    """Add the clips of zip files to a corpus folder."""
    (out / "wavs").mkdir(parents=True, exist_ok=True)
    metadata = out / METADATA
    if not metadata.is_file():
        metadata.write_text(HEADER + "\n", encoding="utf-8")
    for source in sources:
        items = recordings(source)
        with zipfile.ZipFile(source) as file, open(metadata, "a", encoding="utf-8") as lines:
            for item in items:
                path = out / "wavs" / item.fields[0]
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(file.read(item.name))
                lines.write("|".join([f"wavs/{item.fields[0]}", *item.fields[1:]]) + "\n")
        hours = sum(float(item.fields[4]) for item in items) / 3600
        print(f"{source}: {len(items)} clips, {hours:.2f} h, {len({item.fields[1] for item in items})} speakers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("pack", "unpack"))
    parser.add_argument("zips", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    {"pack": pack, "unpack": unpack}[options.command](options.zips, options.out)


if __name__ == "__main__":
    main()
