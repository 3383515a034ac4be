"""`myxtts collect` against recordings whose truth is known: words cut, transcripts, speakers, planted flaws, cost.

    python benchmarks/collect.py make --speech DIR --out TRUTH [--size 4]     recordings and truth.json
    python benchmarks/collect.py ours --truth TRUTH --out DIR [-- FLAGS]      run `myxtts collect` on them
    python benchmarks/collect.py usual --truth TRUTH --out DIR --whisper DIR  sentences at Whisper's word times
    python benchmarks/collect.py judge --truth TRUTH --corpus DIR [--corpus DIR]
    python benchmarks/collect.py robust --truth TRUTH --out DIR [-- FLAGS]    silence, music, broken files
    python benchmarks/collect.py hours --truth TRUTH --out DIR [--hours 10]   time and memory for one long file

--speech holds corpora of separate clips, with metadata.csv (path|speaker|language|text|seconds|…). `--size 4`
makes about 13 minutes of sound, `--size 45` about 100. The words' edges are found by the energy of a clip before
anything is mixed into it. A corpus clip that begins or ends more than EDGE_S inside such a stretch cuts a word.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from harness import add_command, console, machine, make_table
from recordings import (
    RATE,
    REASONS,
    Recording,
    Said,
    Span,
    Wave,
    make,
    make_music,
    make_noise,
    read_table,
    read_truth,
    read_wave,
)  # fmt: skip

from myxtts.text.normalize import normalize
from myxtts.tools.judge import plain

EDGE_S = 0.03  # the precision of edges found by energy
SAME_PLACE_S = 3.0  # words farther apart in time are never aligned


def is_inside(moment: float, spans: Iterable[Span]) -> bool:
    return any(start + EDGE_S < moment < end - EDGE_S for start, end in spans)


@dataclass(eq=False)
class Piece:
    """A row of metadata.csv or, with a reason, of rejected.csv, and what was really said there."""

    recording: Recording
    channel: int | None
    start: float
    end: float
    row: dict[str, str]
    said: list[Said] = field(default_factory=list)
    num_words: int = 0
    edits: int = 0

    @property
    def language(self) -> str:
        return self.row.get("language") or (self.said[0].language if self.said else "en")

    @property
    def why(self) -> str:
        """The first reason, then its detail and the other reasons."""
        return "; ".join(self.row[name] for name in ("reason", "detail") if self.row.get(name))

    def covers(self, spans: Iterable[Span]) -> float:
        """The seconds of these spans that lie in the piece."""
        return sum(max(min(end, self.end) - max(start, self.start), 0) for start, end in spans)

    def margins(self) -> list[float]:
        """The silence between both edges and the nearest words; below 0 inside words."""
        spans, edges = [span for said in self.said for span in said.words], (self.start, self.end)
        return [min((max(start - at, at - end) for start, end in spans), default=1.0) for at in edges]

    def cuts(self, faint: bool = False) -> list[str]:
        """The places where the piece begins or ends inside a word or, if asked for, a faint sound."""
        return [
            f"{self.recording.file} at {moment:.3f} s: {said.text[:70]}"
            for moment in (self.start, self.end)
            for said in self.said
            if is_inside(moment, said.sounds if faint else said.words)
            if not (faint and is_inside(moment, said.words))
        ]


Timed = tuple[str, float, Piece | None]


def timed(text: str, language: str, spans: list[Span], piece: Piece | None = None) -> list[Timed]:
    """The words of a text, normalised, each at its share of the spans' time."""
    words = plain(normalize(text, language)).split()
    ends = np.cumsum([0, *(end - start for start, end in spans)])
    shares = (np.cumsum([len(word) for word in words]) - 0.5) / max(sum(map(len, words)), 1) * ends[-1]
    places = np.searchsorted(ends, shares, "right") - 1
    moments = [spans[place][0] + share - ends[place] for place, share in zip(places, shares, strict=True)]
    return [(word, moment, piece) for word, moment in zip(words, moments, strict=True)]


def align(said: list[Timed], heard: list[Timed]) -> Iterator[tuple[Timed | None, Timed | None]]:
    """Pair the words of both in the cheapest way, from the last; a word may be paired with None."""
    costs = [list(range(len(heard) + 1))]
    for number, (word, at, _) in enumerate(said, 1):
        above, row = costs[-1], [number]
        for place, (other, other_at, _) in enumerate(heard):
            pair = 3 if abs(at - other_at) > SAME_PLACE_S else word != other
            row.append(min(above[place + 1] + 1, row[place] + 1, above[place] + pair))
        costs.append(row)
    number, place = len(said), len(heard)
    while number or place:
        here = costs[number][place]
        only_said = number > 0 and here == costs[number - 1][place] + 1
        only_heard = not only_said and place > 0 and here == costs[number][place - 1] + 1
        number, place = number - (not only_heard), place - (not only_said)
        yield None if only_heard else said[number], None if only_said else heard[place]


class Findings:
    """A corpus compared with the truth."""

    def __init__(self, truth: list[Recording], folder: Path) -> None:
        self.folder, self.truth, self.pieces = folder, truth, list[Piece]()
        self.unaccounted = self.twice = 0.0
        rows = [*read_table(folder / "metadata.csv"), *read_table(folder / "rejected.csv")]
        for recording in truth:
            own = [row for row in rows if Path(row["source"]).name == recording.file]
            channels = {int(row["channel"]) if row.get("channel") else None for row in own}
            for channel in channels:
                mine = [row for row in own if channel is None or int(row["channel"]) == channel]
                spans = [(float(row["start"]), float(row["end"])) for row in mine]
                pieces = [Piece(recording, channel, *span, row) for span, row in zip(spans, mine, strict=True)]
                self._match(recording, channel, sorted(pieces, key=lambda piece: piece.start))
        self.used = [piece for piece in self.pieces if not piece.row.get("reason")]
        self.segments = [piece for piece in self.pieces if piece.row.get("text")]

    def _match(self, recording: Recording, channel: int | None, pieces: list[Piece]) -> None:
        """Find what was said in the pieces, account for every second, and count the errors of each text."""
        said, at = [each for each in recording.said if channel in (None, each.channel)], 0.0
        for piece in pieces:
            piece.said = [each for each in said if piece.covers(each.sounds) > 0.02]
            self.unaccounted += max(piece.start - at, 0)
            self.twice += max(min(at, piece.end) - piece.start, 0)
            at = max(at, piece.end)
        self.unaccounted += max(recording.seconds - at, 0)
        self.pieces += pieces
        told = sorted(
            (word for each in said for word in timed(each.text, each.language, each.words)), key=lambda x: x[1]
        )
        texts = [piece for piece in pieces if piece.row.get("text")]
        heard = [
            word
            for each in texts
            for word in timed(each.row["text"], each.language, [(each.start, each.end)], each)
        ]
        for word, other in align(told, heard):
            at = word[1] if word else 0.0
            owner = other[2] if other else next((each for each in texts if each.start <= at <= each.end), None)
            if owner:
                owner.num_words += word is not None
                owner.edits += not (word and other and word[0] == other[0])

    def share_used(self, said: Said) -> float:
        return sum(piece.covers(said.words) for piece in self.used if said in piece.said) / said.seconds

    def kept(self, is_flawed: bool) -> str:
        """The share of the words' time that clips in use hold."""
        chosen = [said for each in self.truth for said in each.said if bool(said.flaw) == is_flawed]
        total, held = sum(s.seconds for s in chosen), sum(s.seconds * self.share_used(s) for s in chosen)
        return f"{held / max(total, 1e-9):.1%} of {total / 60:.1f} min"

    def fate(self, said: Said) -> str:
        """Where a clip went: "" if it is used, else the reason of the piece with most of it."""
        pieces = [piece for piece in self.pieces if said in piece.said]
        if self.share_used(said) >= (0.1 if said.flaw else 0.5):
            is_alone = all({each.speaker for each in piece.said} == {said.speaker} for piece in pieces)
            return "separated" if said.flaw == "two speakers" and is_alone else ""
        largest = max(pieces, key=lambda piece: piece.covers(said.words), default=None)
        flaws = {each.flaw for each in largest.said if each.flaw} if largest else set()
        beside = flaws and not said.flaw
        return f"beside {min(flaws)}" if beside else largest.why if largest else "nowhere"

    def speakers(self) -> tuple[str, str, int]:
        """Names for voices; purity of the names and of the voices; clips in use with two voices."""
        pairs = [(piece.row["speaker_name"], {said.speaker for said in piece.said}) for piece in self.used]
        counts = Counter((name, min(voices)) for name, voices in pairs if len(voices) == 1)
        purities, kinds = [], []
        for side in (0, 1):
            best: Counter[str] = Counter()
            for pair, count in counts.items():
                best[pair[side]] = max(best[pair[side]], count)
            kinds.append(len(best))
            purities.append(best.total() / max(counts.total(), 1))
        mixed = sum(len(voices) > 1 for _, voices in pairs)
        return f"{kinds[0]} for {kinds[1]}", f"{purities[0]:.1%}, {purities[1]:.1%}", mixed

    def wrong_sound(self, truth: Path) -> int:
        """Clips in use whose file is not the sound of their source at their times."""
        wrong = 0
        for piece in self.used:
            clip, rate = soundfile.read(self.folder / "wavs" / Path(piece.row["audio_file"]).name, dtype="float32")
            source = read_wave(truth / piece.recording.file, rate, (piece.start, piece.end))
            source = source.mean(1) if piece.channel is None else source[:, piece.channel]
            length = min(len(clip), len(source))
            alike = np.corrcoef(clip[:length], source[:length])[0, 1]
            wrong += not alike > 0.95 or abs(len(clip) - len(source)) > 0.01 * rate
        return wrong


def error_rate(pieces: Iterable[Piece]) -> str:
    texts = [piece for piece in pieces if piece.row.get("text")]
    total = sum(piece.num_words for piece in texts)
    return f"{sum(piece.edits for piece in texts) / max(total, 1):.3f} of {total}"


def summary(found: Findings, truth: Path) -> dict[str, object]:
    """The rows of the table that compares corpora."""
    used, segments, seconds = found.used, found.segments, [piece.end - piece.start for piece in found.used] or [0]
    no_speech = [piece for piece in found.pieces if not piece.row.get("text")]
    lost = sum(piece.covers(said.words) for piece in no_speech for said in piece.said)
    right = [{said.language for said in piece.said} == {piece.row["language"]} for piece in used if piece.said]
    margins = np.percentile([margin for piece in used for margin in piece.margins()] or [0], [1, 10, 50])
    speakers, purities, mixed = found.speakers()
    return {
        "clips in use": len(used),
        "seconds of a clip: least, mean, most": f"{min(seconds):.1f}, {np.mean(seconds):.1f}, {max(seconds):.1f}",
        "words cut by clips in use": sum(len(piece.cuts()) for piece in used),
        "breaths or faint sounds cut by clips in use": sum(len(piece.cuts(faint=True)) for piece in used),
        "words cut by all segments": f"{sum(len(piece.cuts()) for piece in segments)} of {len(segments)}",
        "silence at clips' edges: 1 %, 10 %, 50 % (s)": ", ".join(f"{margin:.2f}" for margin in margins),
        "files that are not the sound of their times": found.wrong_sound(truth),
        "word error rate, all segments": error_rate(segments),
        "word error rate, clips in use": error_rate(used),
        "share of all sound in use": f"{sum(seconds) / sum(each.seconds for each in found.truth):.1%}",
        "clean speech in use": found.kept(is_flawed=False),
        "flawed speech in use": found.kept(is_flawed=True),
        "words in pieces said to have none (s)": f"{lost:.1f}",
        "music in clips in use (s)": f"{sum(piece.covers(piece.recording.music) for piece in used):.1f}",
        "speakers found": speakers,
        "purity of found speakers, of true ones": purities,
        "clips in use with two speakers": mixed,
        "language right": f"{sum(right)} of {len(right)}",
        "seconds without a reason": f"{found.unaccounted:.2f}",
        "seconds accounted for twice": f"{found.twice:.2f}",
    }


def judge(options: argparse.Namespace) -> None:
    """Compare corpora with the truth."""
    truth = read_truth(options.truth)
    all_found = [Findings(truth, folder) for folder in options.corpus]
    minutes = sum(recording.seconds for recording in truth) / 60
    title = f"{len(truth)} recordings, {minutes:.1f} minutes, {machine()}"
    table = make_table(title, "", *(found.folder.name for found in all_found))
    columns = [summary(found, options.truth) for found in all_found]
    for name in columns[0]:
        table.add_row(name, *(str(column[name]) for column in columns))
    console.print(table)
    for found in all_found:
        show_kinds(found)
        show_fates(found)
        cuts = [cut for piece in found.used for cut in piece.cuts()]
        console.print(*(f"cut: {cut}" for cut in cuts[: options.list]), sep="\n", markup=False)


def show_kinds(found: Findings) -> None:
    """Transcripts by kind of recording and by language."""
    columns = ("", "segments", "in use", "words cut", "errors, all segments", "errors, in use")
    table = make_table(f"{found.folder.name}: transcripts", *columns)
    groups: dict[str, list[Piece]] = defaultdict(list)
    for piece in found.segments:
        for name in (piece.recording.kind, *{f"language {said.language}" for said in piece.said}):
            groups[name].append(piece)
    for name, group in sorted(groups.items()):
        used = [piece for piece in group if piece in found.used]
        cells = (
            len(group),
            len(used),
            sum(len(piece.cuts()) for piece in used),
            error_rate(group),
            error_rate(used),
        )
        table.add_row(name, *map(str, cells))
    console.print(table)


def show_fates(found: Findings) -> None:
    """What became of clean clips and of planted flaws."""
    fates: dict[str, Counter[str]] = defaultdict(Counter)
    for said in (said for recording in found.truth for said in recording.said):
        fates[said.flaw or "none"][found.fate(said)] += 1
    columns = ("flaw", "planted", "in use", "set aside", "for its reason", "reasons")
    table = make_table(f"{found.folder.name}: flaws", *columns, left=("flaw", "reasons"))
    for flaw in ("none", *REASONS):
        aside, told = Counter({fate: count for fate, count in fates[flaw].items() if fate}), Counter[str]()
        for fate, count in aside.items():
            told[fate.partition(";")[0]] += count
        right = sum(count for fate, count in aside.items() if re.search(REASONS.get(flaw, "^$"), fate, re.I))
        cells = fates[flaw].total(), fates[flaw][""], aside.total(), right
        table.add_row(flaw, *map(str, cells), ", ".join(f"{fate} {count}" for fate, count in told.most_common()))
    console.print(table)


# Making corpora.


def memory_of(process: int) -> int:
    """Bytes of a process and its children; shared pages count once."""
    total = 0
    with contextlib.suppress(OSError):
        found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{process}/smaps_rollup").read_text(), re.M)
        total += int(found[1]) * 1024 if found else 0
        for task in Path(f"/proc/{process}/task").iterdir():
            total += sum(memory_of(int(child)) for child in (task / "children").read_text().split())
    return total


def collect(recordings: list[Path], out: Path, flags: list[str]) -> tuple[int, float, float, str]:
    """Run `myxtts collect`; return its exit code, seconds, MiB at the peak, and output."""
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "myxtts", "collect", *map(str, recordings), "--out", str(out), *flags]
    began, peak, log = time.perf_counter(), 0, out.with_name(f"{out.name}.log")
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(0.3)
    return process.returncode, time.perf_counter() - began, peak / 2**20, log.read_text(encoding="utf-8")


def ours(options: argparse.Namespace) -> None:
    """Run `myxtts collect` on all recordings."""
    truth = read_truth(options.truth)
    code, elapsed, memory, output = collect(
        [options.truth / each.file for each in truth], options.out, options.flags
    )
    factor = elapsed / sum(recording.seconds for recording in truth)
    console.print(output[-6000:], markup=False)
    console.print(
        f"exit code {code}, {elapsed:.0f} s, real-time factor {factor:.3f}, {memory:.0f} MiB, {machine()}"
    )


def usual(options: argparse.Namespace) -> None:
    """Make clips as fine-tuning front ends do: Whisper with its VAD filter, sentences cut at word times."""
    from faster_whisper import WhisperModel

    model = WhisperModel(str(options.whisper), device="cpu", compute_type="int8", cpu_threads=os.cpu_count() or 1)
    (options.out / "wavs").mkdir(parents=True, exist_ok=True)
    rows, began = ["audio_file|text|speaker_name|language|source|start|end"], time.perf_counter()
    for recording in read_truth(options.truth):
        path, language = options.truth / recording.file, recording.said[0].language
        wave = read_wave(path).mean(1)
        settings = {"language": language, "vad_filter": True, "word_timestamps": True}
        segments, _ = model.transcribe(soxr.resample(wave, RATE, 16_000), **settings)
        words = [word for segment in segments for word in segment.words]
        for number, (text, start, end) in enumerate(sentences(words, len(wave) / RATE)):
            name = f"wavs/{path.stem}-{number:04d}.wav"
            soundfile.write(options.out / name, wave[round(start * RATE) : round(end * RATE)], RATE)
            rows.append(f"{name}|{text}|one|{language}|{path}|{start:.4f}|{end:.4f}")
    (options.out / "metadata.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    console.print(f"{len(rows) - 1} clips in {time.perf_counter() - began:.0f} s")


def sentences(words: list[Any], seconds: float, buffer: float = 0.2) -> Iterator[tuple[str, float, float]]:
    """Sentences up to a full stop, 0.2 s longer than their words, or up to half-way to the neighbouring word."""
    first = 0
    for number, word in enumerate(words):
        if word.word.strip()[-1:] not in tuple("!.?"):
            continue
        begins, after = words[first].start, words[number + 1].start if number + 1 < len(words) else seconds
        start = max(begins - buffer, (words[first - 1].end + begins) / 2 if first else 0.0)
        end = min((word.end + after) / 2, word.end + buffer)
        if end - start >= 1 / 3:
            yield "".join(each.word for each in words[first : number + 1]).strip().replace("|", " "), start, end
        first = number + 1


# Bad input, and long input.


def write_broken(path: Path, wave: Wave, keep: float = 0.6) -> None:
    """Write a recording whose last part is missing."""
    soundfile.write(path, wave, RATE)
    os.truncate(path, int(path.stat().st_size * keep))


def write_folder(path: Path, wave: Wave) -> None:
    """Write a recording twice, and three broken files."""
    for number in range(5):
        soundfile.write(path / f"part-{number}.flac", wave, RATE)
    (path / "part-0.flac").write_bytes(b"")
    (path / "part-2.flac").write_bytes(b"this is no sound\n" * 500)
    os.truncate(path / "part-4.flac", 2000)


def bad_inputs(wave: Wave) -> dict[str, tuple[Callable[[Path], object], bool | None, str]]:
    """Names of inputs, how they are written, whether clips may be used (None: either), what the reasons name."""
    write, chance, end = soundfile.write, random.Random(1), "truncated|ends|missing|incomplete"
    phone = soxr.resample(wave, RATE, 8000)
    return {
        "silence": (lambda into: write(into / "a.wav", np.zeros(60 * RATE), RATE), False, "silence|no speech"),
        "noise": (
            lambda into: write(into / "a.wav", make_noise(60 * RATE, chance), RATE),
            False,
            "noise|no speech",
        ),
        "music only": (lambda into: write(into / "a.wav", make_music(60, chance), RATE), False, "music"),
        "8 kHz phone call": (lambda into: write(into / "a.wav", phone, 8000), None, "band"),
        "0-byte file": (lambda into: (into / "a.wav").write_bytes(b""), False, "empty|unreadable"),
        "text named .mp3": (lambda into: (into / "a.mp3").write_text("no\n" * 999), False, "not audio|unreadable"),
        "truncated MP3": (lambda into: write_broken(into / "a.mp3", wave), True, end),
        "truncated WAV": (lambda into: write_broken(into / "a.wav", wave), True, end),
        "truncated FLAC": (lambda into: write_broken(into / "a.flac", wave), True, end),
        "5 files, 3 broken": (
            lambda into: write_folder(into, wave),
            True,
            "(?=.*empty)(?=.*not audio).*truncated",
        ),
    }


def robust(options: argparse.Namespace) -> None:
    """Run `myxtts collect` on inputs that are not clean speech."""
    columns = ("input", "exit", "s", "clips", "reasons (s)", "as expected")
    table = make_table(f"Bad input, {machine()}", *columns, left=("input", "reasons (s)"))
    book = next(each.file for each in read_truth(options.truth) if "lj" in each.file)
    for name, (write, may_use, expected) in bad_inputs(read_wave(options.truth / book)[:, 0]).items():
        if not re.search(options.case, name):
            continue
        folder = options.out / re.sub(r"\W+", "_", name)
        (folder / "in").mkdir(parents=True)
        write(folder / "in")
        code, elapsed, _, output = collect([folder / "in"], folder / "corpus", options.flags)
        reasons: defaultdict[str, float] = defaultdict(float)
        for row in read_table(folder / "corpus" / "rejected.csv"):
            reasons[row["reason"]] += float(row["end"] or 0) - float(row["start"] or 0)
        clips = len(read_table(folder / "corpus" / "metadata.csv"))
        told = ", ".join(f"{reason} {seconds:.1f}" for reason, seconds in reasons.items())
        is_good = "Traceback" not in output and may_use in (None, clips > 0) and re.search(expected, told, re.I)
        table.add_row(name, str(code), f"{elapsed:.0f}", str(clips), told, "yes" if is_good else "NO")
    console.print(table)


def hours(options: argparse.Namespace) -> None:
    """One long file: the books of the truth with silence and music between, so that little time goes to words."""
    path, chance = options.out / "long.flac", random.Random(0)
    books = [options.truth / each.file for each in read_truth(options.truth) if each.kind == "book"]
    options.out.mkdir(parents=True, exist_ok=True)
    quiet, loud = make_noise(60 * RATE, chance) * 0.005, make_music(60, chance)
    with soundfile.SoundFile(path, "w", RATE, 1) as file:
        for number in range(int(options.hours * 60)):
            if number % int(options.hours * 60 / len(books)) == 0 and books:
                file.write(read_wave(books.pop())[:, 0])
            file.write(loud if number % 5 == 4 else quiet)
    table = make_table(
        f"Silence, music and speech, {machine()}", "", "hours", "s", "real-time factor", "MiB at peak"
    )
    for recording in (next(options.truth.glob("book-lj*")), path):
        seconds = soundfile.info(recording).duration
        code, elapsed, memory, output = collect([recording], options.out / f"of-{recording.stem}", options.flags)
        console.print(output[-3000:], markup=False)
        cells = (f"{seconds / 3600:.2f}", f"{elapsed:.0f}", f"{elapsed / seconds:.3f}", f"{memory:.0f}")
        table.add_row(f"{recording.stem}, exit code {code}", *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    commands = parser.add_subparsers(required=True)
    calls = {call.__name__: call for call in (make, ours, usual, judge, robust, hours)}
    added = {name: add_command(commands, name, call) for name, call in calls.items()}
    for name, command in added.items():
        if name != "make":
            command.add_argument("--truth", type=Path, required=True)
        if name != "judge":
            command.add_argument("--out", type=Path, required=True)
    added["make"].add_argument("--speech", type=Path, required=True)
    added["make"].add_argument("--size", type=int, default=4, help="clips in a recording")
    added["make"].add_argument("--seed", type=int, default=0, help="of what is chosen and planted")
    added["usual"].add_argument("--whisper", type=Path, required=True, help="a CTranslate2 folder")
    added["judge"].add_argument("--corpus", type=Path, required=True, action="append")
    added["judge"].add_argument("--list", type=int, default=20, help="cut words to show")
    added["robust"].add_argument("--case", default="", help="a regular expression of the inputs to try")
    added["hours"].add_argument("--hours", type=float, default=10)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:end], argparse.Namespace(flags=sys.argv[end + 1 :]))
    options.call(options)


if __name__ == "__main__":
    main()
