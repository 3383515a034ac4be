"""Preparing and loading a corpus, compared with the usual ways on this machine: `make bench`.

Both sides of a comparison run alternately, and ratios are reported: absolute figures of a shared machine mean
little. `--only gather` (startup, text, decode, limits, memory) runs one part.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import soundfile as sf
from harness import console, make_table
from rich.table import Table

from myxtts.config import HOP_SAMPLES, SAMPLE_RATE, DataSettings, num_frames_of
from myxtts.data.batches import Gatherer, HostBatch, host_layout
from myxtts.data.clips import frames_for, max_frames_of
from myxtts.data.corpus import read_corpus
from myxtts.data.order import Batches, Cursor, packed_tokens
from myxtts.data.prepare import EMBEDDED_CORPUS, prepare

if TYPE_CHECKING:
    import torch  # not imported by worker processes, which would start two seconds later

CLIPS = 2000
LARGE_CLIPS = 13_100
BATCH = 32
ROUNDS = 5
PARTS: dict[str, Callable[[Path], Table]] = {}


def part(function: Callable[[Path], Table]) -> Callable[[Path], Table]:
    """Register a part of the benchmark under its name."""
    PARTS[function.__name__] = function
    return function


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(PARTS), action="append", help="run this part (may be repeated)")
    parser.add_argument("--folder", type=Path, help="where to put the test corpora (default: a temporary folder)")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, *values = options.child
        console.print_json(json.dumps(CHILDREN[name](*values)))
        return
    cpu = re.findall(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())[:1]
    console.print(
        f"{date.today()}  {', '.join(cpu) or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}\n"
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name in options.only or PARTS:
            console.print(PARTS[name](Path(folder)), "")


@part
def gather(folder: Path) -> Table:
    """Batches of 32 clips on the host, against the usual loaders and a plain copy of the same bytes."""
    import torch

    corpus = folder / "gather"
    write_corpus(corpus, CLIPS, "wav")
    data = DataSettings(train_data=corpus, batch_size=BATCH, max_mel_frames=1040, val_fraction=0.0, language="en")
    clips = prepare(data).train
    names = [corpus / "wavs" / f"{name}.wav" for name in clips.names]
    batches = Batches(packed_tokens(clips.num_ids, clips.num_samples), BATCH, seed=1)
    gatherer, host = Gatherer(clips, batches, data, seed=1), HostBatch(host_layout(data))
    jobs = list(gatherer.jobs(Cursor(), num_batches=batches.num_batches))
    num_samples = [int(clips.num_samples[job.plan.clips].sum()) for job in jobs]
    source = np.ones(sum(num_samples), np.int16)
    target = np.empty(max(num_samples), np.int16)

    def packed() -> None:
        for job in jobs:
            gatherer.fill(host, job)

    def memcpy() -> None:
        start = 0
        for count in num_samples:
            target[:count] = source[start : start + count]
            start += count

    files = [[names[clip] for clip in job.plan.clips] for job in jobs]
    flat = [name for batch in files for name in batch]

    def loader(num_workers: int, dtype: str = "float32") -> Callable[[], None]:
        loading = torch.utils.data.DataLoader(
            WavFiles(flat, dtype),
            BATCH,
            num_workers=num_workers,
            collate_fn=pad_together,
            persistent_workers=num_workers > 0,
        )
        return lambda: [None for _ in loading] and None

    ours, plain_copy, spdl = "packed cache, gather", "memcpy of the same bytes", "SPDL load_wav, 2 threads"
    sides = {
        ours: packed,
        plain_copy: memcpy,
        "DataLoader + soundfile, 0 workers": loader(0),
        "DataLoader + soundfile, 2 workers": loader(2),
        "the same reading int16, 0 workers": loader(0, "int16"),
        spdl: lambda: spdl_batches(files),
    }
    first = time.perf_counter()
    packed()
    first = time.perf_counter() - first
    seconds = alternate(sides)
    title = f"gather: {CLIPS} WAV clips of 1-12 s in batches of {BATCH}, page cache warm"
    table = make_table(title, "", "clips/s", "× gather")
    for name, value in seconds.items():
        table.add_row(name, f"{len(flat) / value:,.0f}", f"{seconds[ours] / value:.3f}")
    table.add_row("packed cache, first epoch (verifies checksums)", f"{len(flat) / first:,.0f}", "")
    best = min(value for name, value in seconds.items() if "DataLoader" in name)
    table.caption = (
        f"gather is {best / seconds[ours]:.1f}× the better DataLoader, {seconds[spdl] / seconds[ours]:.1f}× SPDL, "
        f"{seconds[plain_copy] / seconds[ours]:.0%} of memcpy; padding {batches.padding(0):.2%}"
    )
    return table


@part
def startup(folder: Path) -> Table:
    """Time to build the cache of a corpus of LJSpeech's size, and to open it up to the first batch."""
    corpus = folder / "startup"
    write_corpus(corpus, LARGE_CLIPS, "wav", distinct=400)
    arguments = ["startup", str(corpus)]
    built = child(arguments)
    opened = [child(arguments) for _ in range(ROUNDS)]
    table = make_table(f"startup: {LARGE_CLIPS} clips, a fresh process each time", "", "seconds")
    seconds = statistics.median(run["seconds"] for run in opened)
    table.add_row("first start: build, open, first batch on the host", f"{built['seconds']:.1f}")
    table.add_row(f"second start, median of {ROUNDS}", f"{seconds:.3f}")
    table.add_row("second start, slowest", f"{max(run['seconds'] for run in opened):.3f}")
    table.caption = f"opening is {built['seconds'] / seconds:.0f}× faster than building"
    shutil.rmtree(corpus)
    return table


def child_startup(corpus: str) -> dict[str, float]:
    import myxtts.data.batches  # noqa: F401 - imports are not part of the time

    start = time.perf_counter()
    data = DataSettings(train_data=Path(corpus), batch_size=BATCH, max_mel_frames=1040, language="en")
    clips = prepare(data).train
    batches = Batches(packed_tokens(clips.num_ids, clips.num_samples), BATCH, seed=1)
    gatherer = Gatherer(clips, batches, data, seed=1)
    gatherer.fill(HostBatch(host_layout(data)), next(gatherer.jobs(Cursor())))
    return {"seconds": time.perf_counter() - start}


@part
def text(folder: Path) -> Table:
    """Detect, normalise and tokenise unlabelled sentences: one loop against batches and processes."""
    sentences = folder / "sentences.txt"
    sentences.write_text("\n".join(make_sentences(LARGE_CLIPS)), encoding="utf-8")
    ways = {
        "naive loop: detector, normaliser, tokenizer per sentence": ("naive", 1),
        "same loop, language found per speaker instead": ("loop", 1),
        "MyXTTS, 1 core": ("warm", 1),
        "MyXTTS, 2 cores": ("warm", 2),
        "MyXTTS, 1 core, starting its process included": ("cold", 1),
        "MyXTTS, 2 cores, starting its processes included": ("cold", 2),
    }
    runs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(3):
        for name, (way, cores) in ways.items():
            runs[name].append(child(["text", str(sentences), way], cores)["seconds"])
    seconds = {name: statistics.median(values) for name, values in runs.items()}
    naive, loop, one, two, *_ = seconds.values()
    title = f"text: {LARGE_CLIPS} sentences, median of 3 fresh processes"
    table = make_table(title, "", "seconds", "× naive")
    for name, value in seconds.items():
        table.add_row(name, f"{value:.2f}", f"{naive / value:.1f}")
    table.caption = f"1 to 2 cores: {one / two:.2f}×; not detecting every sentence: {naive / loop:.1f}×"
    return table


def child_text(path: str, way: str) -> dict[str, float]:
    from myxtts.data.pool import ProcessPool
    from myxtts.data.prepare import Sentence, Tools, build_ids, build_text
    from myxtts.data.store import Store, StoreWriter, hash64
    from myxtts.errors import NO_PROGRESS
    from myxtts.text.language import detect_languages
    from myxtts.text.normalize import normalize
    from myxtts.text.tokenizer import train

    texts = Path(path).read_text(encoding="utf-8").splitlines()
    vocabulary = train([normalize(line, "en") for line in texts[:2000]], ["en"] * 2000, 1024)
    if way in ("warm", "cold"):
        sources = np.fromiter(map(hash64, texts), np.uint64)
        with tempfile.TemporaryDirectory() as folder, ProcessPool(cores()) as pool:
            start = time.perf_counter()
            for _ in pool.run(list, [[0]] * cores() if way == "warm" else []):
                start = time.perf_counter()
            tools = Tools(pool, NO_PROGRESS)
            writer = StoreWriter(Path(folder) / "text", sources)
            rows = range(len(texts))
            languages = detect_languages(texts, [""] * len(texts))
            sentences = [Sentence(*pair) for pair in zip(texts, languages, strict=True)]
            build_text(tools, sentences, False, writer, rows)
            writer.finish({})
            ids = StoreWriter(Path(folder) / "ids", sources)
            build_ids(tools, Store(Path(folder) / "text", np.uint8), vocabulary, ids, rows)
            ids.finish({})
            return {"seconds": time.perf_counter() - start}
    detector = per_sentence_detector()
    start = time.perf_counter()
    languages = detect_languages(texts, [""] * len(texts)) if way == "loop" else None
    for at, line in enumerate(texts):
        language = languages[at] if languages else detector(line)
        vocabulary.encode_batch([normalize(line, language)], [language])
    return {"seconds": time.perf_counter() - start}


def per_sentence_detector() -> Callable[[str], str]:
    from lingua import IsoCode639_1, LanguageDetectorBuilder

    from myxtts.config import LANGUAGES

    codes = [getattr(IsoCode639_1, code.upper()) for code in LANGUAGES]
    detector = LanguageDetectorBuilder.from_iso_codes_639_1(*codes).with_preloaded_language_models().build()

    def detect(line: str) -> str:
        found = detector.detect_language_of(line)
        return found.iso_code_639_1.name.lower() if found else "en"

    return detect


@part
def decode(folder: Path) -> Table:
    """Decoding into the cache on one core and on two."""
    title = "decode: seconds of audio decoded per second, 3,000 clips, median of 3"
    table = make_table(title, "", "1 core", "2 cores", "scaling", "whole preparation, 2 cores")
    for extension in ("wav", "flac", "mp3"):
        corpus = folder / extension
        write_corpus(corpus, 3000, extension, distinct=300)
        rates: dict[tuple[int, str], list[float]] = {}
        for _ in range(3):
            for count in (1, 2):
                result = child(["decode", str(corpus), str(folder / "cache")], count)
                for what in ("decoding", "all"):
                    rates.setdefault((count, what), []).append(result["audio_seconds"] / result[what])
                shutil.rmtree(folder / "cache")
        one, two, whole = (statistics.median(rates[key]) for key in ((1, "decoding"), (2, "decoding"), (2, "all")))
        table.add_row(extension.upper(), f"{one:,.0f}", f"{two:,.0f}", f"{two / one / 2:.0%}", f"{whole:,.0f}")
        shutil.rmtree(corpus)
    return table


def child_decode(corpus: str, cache: str) -> dict[str, float]:
    data = DataSettings(
        train_data=Path(corpus), cache_dir=Path(cache), max_mel_frames=1040, language="en", num_workers=cores()
    )
    clock = PhaseClock()
    start = time.perf_counter()
    prepared = prepare(data, clock)
    whole = time.perf_counter() - start
    samples = prepared.train.num_samples.sum() + prepared.val.num_samples.sum()
    audio_seconds = float(samples) / SAMPLE_RATE
    return {"decoding": clock.seconds["Decoding audio"], "all": whole, "audio_seconds": audio_seconds}


class PhaseClock:
    """A progress bar that records how long each phase of a preparation takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def begin(self, title: str, total: int) -> None:  # noqa: ARG002 (the interface of a progress bar)
        self._title, self._began_at = title, time.perf_counter()

    def advance(self, count: int) -> None: ...

    def end(self) -> None:
        self.seconds[self._title] = time.perf_counter() - self._began_at


LENGTHS: dict[str, Callable[[np.random.Generator], npt.NDArray[np.float64]]] = {
    "like LJSpeech": lambda random: 10.1 * random.beta(3.2, 1.75, 13_100),
    "like VCTK": lambda random: random.lognormal(np.log(3.3), 0.38, 44_000),
    "like Common Voice": lambda random: random.normal(5.4, 2.0, 60_000).clip(1.2, 15),
    "like LibriTTS": lambda random: random.lognormal(np.log(4.1), 0.78, 100_000).clip(0.6, 35),
}
"""Seconds of the clips of made-up corpora: about the means of the real ones, with tails that are assumed."""


@part
def limits(_: Path) -> Table:
    """What a longer limit for clips gains and costs in batches of 64; no audio is made."""
    columns = ("max_mel_frames", "clips lost", "speech lost", "GPT padding", "DVAE padding", "PCM of a batch")
    table = make_table("limits: the longest clip", "", *columns)
    for name, lengths in LENGTHS.items():
        samples = (lengths(np.random.default_rng(0)) * SAMPLE_RATE).astype(np.int64)
        for limit in (800, 1040, 1728, 2416, None):
            frames = limit or max_frames_of(np.where(samples < 2416 * HOP_SAMPLES, samples, 0))
            kept = samples[num_frames_of(samples) <= frames]
            width = limit or frames_for(kept)
            batches = Batches(packed_tokens(kept // 2900 + 5, kept), 64, seed=0)
            table.add_row(
                name, str(limit or f"auto: {width}"), f"{1 - len(kept) / len(samples):.2%}",
                f"{1 - kept.sum() / samples.sum():.2%}", f"{batches.padding(0):.2%}",
                f"{1 - num_frames_of(kept).mean() / width:.0%}", f"{64 * width * HOP_SAMPLES * 2 / 2**20:.0f} MiB",
            )  # fmt: skip
    return table


@part
def memory(folder: Path) -> Table:
    """Peak memory of preparing ten hours without a language label, all processes together."""
    corpus = folder / "memory"
    write_corpus(corpus, 5600, "flac", distinct=300)
    command = [sys.executable, __file__, "--child", "decode_undetected", str(corpus), str(folder / "cache")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = own = 0
    while process.poll() is None:
        sizes = [proportional_bytes(pid) for pid in family(process.pid)]
        peak, own = max(peak, sum(size for size, _ in sizes)), max(own, sum(size for _, size in sizes))
        time.sleep(0.02)
    table = make_table("memory: preparing ten hours of FLAC on 2 cores, 5,600 clips", "", "MiB")
    table.add_row("peak of all processes together, shared pages once", f"{peak / 2**20:.0f}")
    table.add_row("of which not backed by files", f"{own / 2**20:.0f}")
    shutil.rmtree(corpus)
    return table


def child_decode_undetected(corpus: str, cache: str) -> dict[str, float]:
    prepare(DataSettings(train_data=Path(corpus), cache_dir=Path(cache), max_mel_frames=1040))
    return {}


CHILDREN = {
    "startup": child_startup,
    "text": child_text,
    "decode": child_decode,
    "decode_undetected": child_decode_undetected,
}


def child(arguments: Sequence[str], num_cores: int | None = None) -> dict[str, float]:
    """Run one side in its own process, bound to some cores."""
    command = [sys.executable, __file__, "--child", *arguments]
    allowed = set(sorted(os.sched_getaffinity(0))[:num_cores])
    output = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, preexec_fn=lambda: os.sched_setaffinity(0, allowed)
    )
    result: dict[str, float] = json.loads(output.stdout)
    return result


def cores() -> int:
    return len(os.sched_getaffinity(0))


def alternate(sides: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median seconds of each side, measured in turns so that noise affects all alike."""
    runs: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(ROUNDS + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if round_number:  # the first round warms up caches and worker processes
                runs[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in runs.items()}


class WavFiles:
    """The usual dataset: one file decoded per item."""

    def __init__(self, paths: Sequence[Path], dtype: str) -> None:
        self._paths = paths
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, at: int) -> torch.Tensor:
        import torch

        return torch.from_numpy(sf.read(self._paths[at], dtype=self._dtype)[0])


def pad_together(clips: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.nn.utils.rnn.pad_sequence(clips, batch_first=True)


def spdl_batches(files: Sequence[Sequence[Path]]) -> None:
    from spdl.io import load_wav, to_numpy
    from spdl.pipeline import PipelineBuilder

    def load(paths: Sequence[Path]) -> np.ndarray:
        clips = [to_numpy(load_wav(path.read_bytes()))[:, 0] for path in paths]
        batch = np.zeros((len(clips), max(map(len, clips))), np.int16)
        for row, clip in zip(batch, clips, strict=True):
            row[: len(clip)] = clip
        return batch

    pipeline = PipelineBuilder().add_source(files).pipe(load, concurrency=2).add_sink(4).build(num_threads=2)
    with pipeline.auto_stop():
        for _ in pipeline:
            pass


def write_corpus(folder: Path, num_clips: int, extension: str, distinct: int | None = None) -> None:
    """Write clips of 1-12 s; from `distinct` clips on they are hard links to the first ones."""
    rng = np.random.default_rng(7)
    wavs = folder / "wavs"
    wavs.mkdir(parents=True)
    for number in range(num_clips):
        path = wavs / f"clip{number:05d}.{extension}"
        if distinct and number >= distinct:
            os.link(wavs / f"clip{number % distinct:05d}.{extension}", path)
            continue
        tone = np.cumsum(rng.normal(0, 0.02, int(rng.uniform(1, 12) * SAMPLE_RATE)))
        sf.write(path, (np.sin(tone * 20) * 0.3).astype(np.float32), SAMPLE_RATE)
    lines = [f"clip{number:05d}|{sentence}" for number, sentence in enumerate(make_sentences(num_clips))]
    (folder / "metadata.csv").write_text("\n".join(lines), encoding="utf-8")


def make_sentences(count: int) -> Iterator[str]:
    """Sentences as long as LJSpeech's, made of the embedded corpus' words, some with numbers."""
    english = [clip.text for clip in read_corpus(EMBEDDED_CORPUS).clips if clip.language == "en"]
    words = [word for sentence in english for word in sentence.split()]
    choice = random.Random(11)
    for _ in range(count):
        picked = choice.choices(words, k=choice.randint(8, 26))
        if choice.random() < 0.2:
            picked.insert(
                choice.randrange(len(picked)), choice.choice(("1,250", "$35", "3rd", "Mr.", "42%", "1871"))
            )
        yield " ".join(picked)


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for member in found:
        for task in Path(f"/proc/{member}/task").glob("*/children"):
            with_children = task.read_text() if task.exists() else ""
            found.extend(int(text) for text in with_children.split())
    return found


def proportional_bytes(pid: int) -> tuple[int, int]:
    """Proportional set size of a process, and its part that is not backed by files."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0, 0
    kilobytes = {name: int(value) for name, value in re.findall(r"^(Pss|Pss_Anon): +(\d+)", rollup, re.MULTILINE)}
    return kilobytes["Pss"] * 1024, kilobytes.get("Pss_Anon", 0) * 1024


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main()
