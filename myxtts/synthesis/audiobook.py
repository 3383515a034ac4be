"""Speaks a book: a file of sound for each chapter. A call that was interrupted is continued by the same call.

    OUT/01 Title.flac, .srt     finished chapters
    OUT/.work/book.json         what the book is spoken with
    OUT/.work/01.json           a finished chapter: the hash of its text, its file
    OUT/.work/01.pcm, .jsonl    the chapter in work: sound, and a line for each group of sentences in it

Sound is on the disk before its line in the journal is, so at most one group is lost: a sentence on a CPU.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile

from myxtts.audio import as_pcm
from myxtts.errors import ConfigError, DatasetError, Progress, progress_bar
from myxtts.files import lock, write_atomically, write_text_atomically
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.synthesis.alignment import Word
from myxtts.synthesis.books import Book, Chapter
from myxtts.synthesis.markup import Segment
from myxtts.synthesis.narration import (
    SUBTITLE_FORMATS,
    Cue,
    Line,
    Narrator,
    SpokenLine,
    cues_of,
    subtitles,
    with_silence,
)
from myxtts.synthesis.text import UnspeakableText

FORMATS: dict[str, dict[str, Any]] = {
    "flac": {"format": "FLAC", "subtype": "PCM_16"},
    "opus": {"format": "OGG", "subtype": "OPUS"},
    "mp3": {"format": "MP3"},
    "wav": {"format": "WAV", "subtype": "PCM_16"},
}
PARAGRAPH_PAUSE_S, TITLE_PAUSE_S = 0.6, 1.2
_WORK, _SAMPLE_BYTES = ".work", 2
_UNSAFE = re.compile(r"[^\w\u200c .,'()-]+")
_TITLE_CHARACTERS = 60


@dataclass(frozen=True)
class BookOptions:
    """How a book is written."""

    language: str
    form: str = "flac"  # one of `FORMATS`
    subtitle_form: str | None = None  # one of `narration.SUBTITLE_FORMATS`


class FinishedChapter(NamedTuple):
    file: Path
    seconds: float
    notes: tuple[str, ...]
    is_new: bool  # spoken by this call, not by an earlier one


def usual_seed(out: Path) -> int | None:
    """The seed of a book that was begun in this folder."""
    known = _read_json(out / _WORK / "book.json")
    return known.get("seed") if known else None


def speak_book(
    book: Book,
    narrator: Narrator,
    out: Path,
    options: BookOptions,
    progress: Progress,
    say: Callable[[str], None],
) -> list[FinishedChapter]:
    """Speak every chapter that is not finished; raises an error if the folder holds a book spoken otherwise."""
    work = out / _WORK
    with lock(work, of="book", flag="--out"):
        about = _about(book, narrator, options)
        _require_same(work / "book.json", about, out)
        width = max(2, len(str(len(book.chapters))))
        jobs = [
            _ChapterJob(out, f"{number:0{width}}", chapter, narrator, options, about)
            for number, chapter in enumerate(book.chapters, 1)
        ]
        finished: list[FinishedChapter] = []
        with progress_bar(progress, f"Speaking {book.title}", sum(job.num_characters for job in jobs)) as advance:
            advance(sum(job.num_done for job in jobs))
            for job in jobs:
                found = job.finished or _written(out, partial(job.run, advance))
                if found.is_new:
                    say(f"{found.file.name}  {_clock(found.seconds)}")
                finished.append(found)
    return finished


def _written(out: Path, work: Callable[[], FinishedChapter]) -> FinishedChapter:
    try:
        return work()
    except OSError as error:
        kept = "What was spoken is kept: make room, and give the same command again"
        raise DatasetError(f"{out} cannot be written: {error.strerror or error}. {kept}.") from error


class _ChapterJob:
    """One chapter."""

    def __init__(
        self,
        out: Path,
        number: str,
        chapter: Chapter,
        narrator: Narrator,
        options: BookOptions,
        about: dict[str, Any],
    ) -> None:
        work = out / _WORK
        self._out, self._chapter, self._narrator, self._options = out, chapter, narrator, options
        self._done, self._pcm, self._journal = (work / f"{number}.{end}" for end in ("json", "pcm", "jsonl"))
        name = " ".join(_UNSAFE.sub(" ", chapter.title).split())[:_TITLE_CHARACTERS].strip(" .")
        self._file = out / f"{number} {name or 'Chapter'}.{options.form}"
        self._key = hashlib.sha256(json.dumps([about, chapter]).encode()).hexdigest()
        self.num_characters = sum(map(len, chapter.paragraphs))

    @property
    def finished(self) -> FinishedChapter | None:
        """The result of an earlier call, if the chapter is what it was then."""
        known = _read_json(self._done)
        if not known or known.get("key") != self._key or not self._file.is_file():
            return None
        return FinishedChapter(self._file, known["seconds"], tuple(known["notes"]), is_new=False)

    @property
    def num_done(self) -> int:
        """Characters that were spoken by earlier calls."""
        if self.finished:
            return self.num_characters
        return sum(entry["characters"] for entry in self._read_journal()[0])

    def run(self, advance: Callable[[int], None]) -> FinishedChapter:
        """Speak what is missing and write the files."""
        entries, num_bytes = self._read_journal()
        lines, notes = self._lines()
        if not lines:
            return FinishedChapter(self._file, 0.0, tuple(notes), is_new=False)
        if not entries:
            _remove_file_of(self._done, self._out, self._file)
            write_text_atomically(self._journal, json.dumps({"key": self._key}) + "\n")
        num_samples = entries[-1]["end"] if entries else 0
        with open(self._pcm, "ab") as sound, open(self._journal, "ab") as journal:
            sound.truncate(_SAMPLE_BYTES * num_samples)
            journal.truncate(num_bytes or journal.tell())
            num_said = sum(entry["lines"] for entry in entries)  # another device makes groups of another size
            for group in self._narrator.groups(lines[num_said:]):
                spoken = self._narrator.speak(group)
                wave = np.concatenate([with_silence(each) for each in spoken])
                entry = _entry(spoken, num_samples, num_samples + len(wave))
                _append(sound, as_pcm(wave))
                _append(journal, json.dumps(entry, ensure_ascii=False).encode() + b"\n")
                entries.append(entry)
                num_samples += len(wave)
                advance(entry["characters"])
        return self._finish(entries, notes, num_samples)

    def _finish(self, entries: Sequence[dict[str, Any]], notes: list[str], num_samples: int) -> FinishedChapter:
        pcm = np.fromfile(self._pcm, "<i2", num_samples)
        content = io.BytesIO()  # libsndfile would hide why a file cannot be written
        form = FORMATS[self._options.form]
        with soundfile.SoundFile(content, "w", OUTPUT_SAMPLE_RATE, 1, **form) as file:
            for first in range(0, len(pcm), OUTPUT_SAMPLE_RATE):  # encoders need much stack for one long piece
                file.write(pcm[first : first + OUTPUT_SAMPLE_RATE])
        write_atomically(self._file, lambda path: path.write_bytes(content.getbuffer()))
        if self._options.subtitle_form:
            cues = [_cue(cue) for entry in entries for cue in entry["cues"]]
            subtitle_file = self._file.with_name(f"{self._file.stem}.{self._options.subtitle_form}")
            write_text_atomically(subtitle_file, subtitles(cues, self._options.subtitle_form))
        notes = [*notes, *(note for entry in entries for note in entry["notes"])]
        seconds = num_samples / OUTPUT_SAMPLE_RATE
        known = {"key": self._key, "file": self._file.name, "seconds": seconds, "notes": notes}
        write_text_atomically(self._done, json.dumps(known, ensure_ascii=False))
        self._pcm.unlink(missing_ok=True)
        self._journal.unlink(missing_ok=True)
        return FinishedChapter(self._file, seconds, tuple(notes), is_new=True)

    def _lines(self) -> tuple[list[Line], list[str]]:
        """The sentences of the chapter, and a note for each paragraph that cannot be spoken."""
        lines: list[Line] = []
        notes: list[str] = []
        for paragraph in (each + "." * each[-1].isalnum() for each in self._chapter.paragraphs):
            is_title = paragraph.rstrip(".") == self._chapter.title.rstrip(".")
            pause_s = TITLE_PAUSE_S if is_title else PARAGRAPH_PAUSE_S
            try:
                segment = Segment(paragraph, self._options.language, 1.0, pause_s)
                lines += self._narrator.lines([segment])
            except UnspeakableText as error:
                notes.append(f"left out {paragraph[:60]!r}: {str(error).splitlines()[0]}")
        return lines, notes

    def _read_journal(self) -> tuple[list[dict[str, Any]], int]:
        """The groups that were spoken before, and the bytes of the journal up to there; none of another text."""
        try:
            content = self._journal.read_bytes()
            available = self._pcm.stat().st_size // _SAMPLE_BYTES
        except FileNotFoundError:
            return [], 0
        head, *rest = content.splitlines(keepends=True) or [b""]
        entries: list[dict[str, Any]] = []
        if _parsed(head) != {"key": self._key}:
            return entries, 0
        num_bytes = len(head)
        for line in rest:
            entry = _parsed(line)
            if entry is None or not line.endswith(b"\n") or "lines" not in entry or entry["end"] > available:
                break
            entries.append(entry)
            num_bytes += len(line)
        return entries, num_bytes


def _about(book: Book, narrator: Narrator, options: BookOptions) -> dict[str, Any]:
    """What makes a book this one: its title, and what decides its sound apart from the text."""
    voice, model = narrator.voice, narrator.synthesizer
    latents = voice.latents.float().cpu().numpy().tobytes() + voice.for_vocoder.float().cpu().numpy().tobytes()
    return {
        "title": book.title,
        "model": model.fingerprint,
        "vocoder": model.vocoder.name,
        "voice": voice.name,
        "voice hash": hashlib.sha256(latents).hexdigest()[:16],
        "seed": narrator.seed,
        "speed": narrator.speed,
        "sampling": asdict(narrator.sampling or model.sampling),
        "attempts": narrator.num_attempts,
        "listen": narrator.judge is not None,
        "language": options.language,
        "format": options.form,
        "subtitles": options.subtitle_form,
    }


def _require_same(path: Path, about: dict[str, Any], out: Path) -> None:
    """Refuse to go on with a book that was begun otherwise; note how a new one is spoken."""
    known = _read_json(path)
    if known is None:
        write_text_atomically(path, json.dumps(about, indent=1))
        return
    if changed := [name for name in about if known.get(name) != about[name]]:
        shown = ", ".join(
            f"{name} ({known.get(name)}, now {about[name]})" for name in changed if name != "sampling"
        )
        raise ConfigError(
            f"The book in {out} was begun otherwise: {shown or 'with other sampling'}.\n"
            "Give the same flags to continue it, or another --out to start over."
        )


def _remove_file_of(done: Path, out: Path, file: Path) -> None:
    """Remove what an earlier text of a chapter became, if the new one gets another name."""
    known = _read_json(done)
    name = Path(str(known.get("file", ""))).name if known else ""
    if name and name != file.name:
        for suffix in (file.suffix, *(f".{form}" for form in SUBTITLE_FORMATS)):
            (out / f"{Path(name).stem}{suffix}").unlink(missing_ok=True)
    done.unlink(missing_ok=True)


def _entry(spoken: Sequence[SpokenLine], first_sample: int, end: int) -> dict[str, Any]:
    """The line of the journal for a group."""
    cues: list[Cue] = []
    notes: list[str] = []
    starts = first_sample
    for each in spoken:
        cues += cues_of(each, starts / OUTPUT_SAMPLE_RATE)
        starts += len(with_silence(each))
        notes += [
            f"came out badly ({sentence.problem}): {sentence.text[:60]!r}"
            for sentence in each.report.sentences
            if sentence.problem
        ]
    characters = sum(len(each.line.text) for each in spoken)
    return {"end": end, "lines": len(spoken), "characters": characters, "cues": cues, "notes": notes}


def _cue(written: Sequence[Any]) -> Cue:
    start_s, end_s, text, words = written
    return Cue(start_s, end_s, text, tuple(Word(*word) for word in words))


def _append(file: Any, content: bytes) -> None:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return _parsed(path.read_bytes())
    except FileNotFoundError:
        return None


def _parsed(content: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(content)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
