"""Sharded corpora: ten million clips in a sparse corpus of 1.6 TB, gathering from many shards, and preparing.

python benchmarks/shards.py [--only large|gather|prepare] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from harness import console, make_table, write_corpus
from rich.table import Table

from myxtts.config import SAMPLE_RATE, DataSettings
from myxtts.data import sources
from myxtts.data.clips import ClipSet, DecodeOptions
from myxtts.data.jobs import JobOptions, prepare_sharded
from myxtts.data.locations import Location
from myxtts.data.prepare import prepare
from myxtts.data.shards import (
    CLIP_COLUMNS,
    FORMAT,
    IDS_COLUMNS,
    Package,
    ShardSpec,
    checked_json,
    create_columns,
    file_checksum,
    ids_folder,
    join_ids,
    join_shards,
    write_shard,
)
from myxtts.data.sources import open_source
from myxtts.data.store import checksum
from myxtts.errors import NO_PROGRESS
from myxtts.host import process_bytes
from myxtts.text.tokenizer import Tokenizer, train

CLIPS, SHARDS, INDEX = 10_000_000, 1600, "0" * 20
LENGTHS = np.linspace(1.0, 6.26, 64) * SAMPLE_RATE  # 3.63 s on average: 1.6 TB
BATCH, WINDOW = 32, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(PARTS), action="append", help="run this part (may be repeated)")
    parser.add_argument("--folder", type=Path, help="where to put the corpora (default: a temporary folder)")
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open is not None:
        print(json.dumps(read_large(options.open)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name in options.only or PARTS:
            console.print(PARTS[name](Path(folder)), "")


def large(folder: Path) -> Table:
    """The index of ten million clips: made, opened, and read from end to end."""
    corpus = folder / "large"
    table = make_table(f"{CLIPS:,} clips in {SHARDS:,} shards", "", "s", "", left=("",))
    started = time.perf_counter()
    vocabulary = train(["some words of a text"], ["en"], 256)
    shards, ids = write_sparse(Location(str(corpus)), vocabulary)
    table.add_row("sparse shards written", f"{time.perf_counter() - started:.1f}", "")
    started = time.perf_counter()
    index = join_shards(shards, Location(str(corpus / f"index-{INDEX}")))
    joined = join_ids(ids, Location(str(corpus / ids_folder(vocabulary) / f"index-{INDEX}")))
    size = sum(part.files["clips.npy"][0] for part in (index, joined)) / CLIPS
    table.add_row("index joined", f"{time.perf_counter() - started:.1f}", f"{size:.1f} bytes a clip")
    for name in ("opened, the first time", "opened"):
        found = json.loads(subprocess.check_output([sys.executable, __file__, "--open", str(corpus)]))
        memory = f"{found['private'] / 1e6:.0f} MB private memory, {found['before'] / 1e6:.0f} before"
        table.add_row(name, f"{found['open']:.2f}", memory)
    table.add_row("addressed", "", f"{found['bytes'] / 1e12:.2f} TB")
    table.add_row("1,000 random clips of the whole", f"{found['random']:.2f}", "each shard opened, rows verified")
    table.add_row("1,000 random clips of 16 shards", f"{found['window']:.2f}", "rows verified")
    return table


def write_sparse(corpus: Location, vocabulary: Tokenizer) -> tuple[list[Package], list[Package]]:
    """Shards whose samples and ids are holes of their files, and the checksums of zeros."""
    random, per_shard = np.random.default_rng(0), CLIPS // SHARDS
    lengths = LENGTHS.astype(np.int64)
    zeros = np.array([checksum(np.zeros(length, np.int16)) for length in lengths], np.uint64)
    id_zeros = np.array([checksum(np.zeros(count, np.int32)) for count in range(200)], np.uint64)
    shards, ids, facts = [], [], []
    for number in range(SHARDS):
        place, name = corpus / "shards" / f"{number:020x}", f"{number:020x}"
        Path(place.path).mkdir(parents=True)
        chosen = random.integers(0, len(lengths), per_shard)
        offsets = np.cumsum(-(-2 * lengths[chosen] // 64) * 64)
        columns = create_columns(Path(place.path, "clips.npy"), CLIP_COLUMNS, per_shard)
        columns["draw"][:] = random.integers(0, 2**64, per_shard, np.uint64)
        columns["offset"][1:] = offsets[:-1]
        columns["hash"][:], columns["num_samples"][:] = zeros[chosen], lengths[chosen]
        columns["speaker"][:] = np.sort(random.integers(0, 10, per_shard))
        speakers = [f"speaker {number}-{at}" for at in range(10)]
        about = {"clips": per_shard, "speakers": speakers, "set_aside": 0, "units": []}
        shards.append(sparse_package(place, "audio.bin", int(offsets[-1]), about))
        facts.append({"name": name, "source": 0, **about, "audio": shards[-1].files["audio.bin"]})
        place = corpus / ids_folder(vocabulary) / name
        Path(place.path).mkdir(parents=True)
        count = random.integers(20, 120, per_shard)
        offsets = np.cumsum(-(-4 * count // 64) * 64)
        columns = create_columns(Path(place.path, "clips.npy"), IDS_COLUMNS, per_shard)
        columns["offset"][1:], columns["hash"][:], columns["num_ids"][:] = offsets[:-1], id_zeros[count], count
        ids.append(sparse_package(place, "ids.bin", int(offsets[-1]), {"set_aside": 0}))
    (corpus / "vocab.json").write(vocabulary.to_json().encode())
    params = {"use_phonemes": False, "trim_silence_db": 0.0}
    body = {"format": FORMAT, "params": params, "sources": ["x"], "index": INDEX, "shards": facts}
    (corpus / "corpus.json").write(checked_json(body))
    return shards, ids


def sparse_package(place: Location, name: str, size: int, facts: dict[str, object]) -> Package:
    with open(Path(place.path, name), "wb") as file:
        file.truncate(size)
    files = {name: (size, "0" * 32), "clips.npy": file_checksum(Path(place.path, "clips.npy"))}
    (place / "meta.json").write(checked_json({"files": files, "facts": facts}))
    return Package(place, files, facts)


def read_large(corpus: Path) -> dict[str, float]:
    """In a process of its own: open the corpus and gather from it."""
    before, started = process_bytes(), time.perf_counter()
    clips = prepare(DataSettings(train_data=corpus, language="en", num_workers=1)).train
    found = {"open": time.perf_counter() - started, "before": before, "private": process_bytes()}
    found["bytes"] = 2 * float(clips.num_samples.astype(np.int64).sum())
    random = np.random.default_rng(1)
    assert clips.shards is not None
    window = np.flatnonzero(clips.shards < WINDOW)
    for name, chosen in {"random": len(clips), "window": window}.items():
        started = time.perf_counter()
        gather(clips, random.choice(chosen, 1000))
        found[name] = time.perf_counter() - started
    return found


def gather(clips: ClipSet, chosen: np.ndarray) -> None:
    out, ids = np.empty((BATCH, 11 * SAMPLE_RATE), np.int16), np.empty((BATCH, 400), np.int32)
    for start in range(0, len(chosen), BATCH):
        batch = chosen[start : start + BATCH]
        clips.audio.gather(clips.audio_rows[batch], out)
        clips.ids.gather_padded(clips.ids_rows[batch], ids[: len(batch)])


def gather_shards(folder: Path) -> Table:
    """Clips a second from one store and from 16 shards, both in the page cache and verified before."""
    write_corpus(folder / "clips", 2000)
    sources.SLICE_CLIPS = 16
    given = DataSettings(train_data=folder / "clips", language="en", val_fraction=0.0)
    size = sum(path.stat().st_size for path in (folder / "clips" / "wavs").iterdir()) / 1e6
    made = prepare_sharded(given, folder / "sharded", JobOptions(shard_mb=size / 15), None, NO_PROGRESS)
    sets = {
        "one store": prepare(given).train,
        f"{made.made} shards": prepare(DataSettings(train_data=folder / "sharded", val_fraction=0.0)).train,
    }
    order, times = np.random.default_rng(0).permutation(2000), {name: [] for name in sets}
    for _ in range(6):
        for name, clips in sets.items():
            started = time.perf_counter()
            gather(clips, order[: len(clips)])
            times[name].append((time.perf_counter() - started) / len(clips))
    table = make_table(f"batches of {BATCH} clips, audio and ids", "", "clips/s", "", left=("",))
    best = {name: 1 / min(each[1:]) for name, each in times.items()}
    for name, speed in best.items():
        table.add_row(name, f"{speed:.0f}", f"{100 * speed / best['one store']:.1f} %")
    return table


def prepare_rate(folder: Path) -> Table:
    """Hours of speech that one core prepares in an hour: decoding, resampling, normalising, checksums, writing."""
    table = make_table("one core", "", "s", "hours of speech an hour", left=("",))
    forms = {"WAV 22.05 kHz": ("wav", SAMPLE_RATE), "FLAC 24 kHz": ("flac", 24_000), "MP3 32 kHz": ("mp3", 32_000)}
    for name, (extension, rate) in forms.items():
        write_corpus(folder / extension, 300, extension=extension, rate=rate)
        units = tuple(open_source(str(folder / extension)))
        spec = ShardSpec(units, 0, "", "", "en", DecodeOptions(30 * SAMPLE_RATE, 0.0), False)
        (folder / f"of-{extension}").mkdir()
        started, cpu = time.perf_counter(), time.process_time()
        made = write_shard(spec, Location(str(folder / f"of-{extension}" / spec.name)), lambda _: None)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        table.add_row(name, f"{seconds:.2f} ({cpu:.2f} of the core)", f"{made.facts['hours'] * 3600 / cpu:.0f}")
    return table


PARTS: dict[str, Callable[[Path], Table]] = {"large": large, "gather": gather_shards, "prepare": prepare_rate}

if __name__ == "__main__":
    main()
