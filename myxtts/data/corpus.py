"""Reads a folder of recordings: a list of `Clip`s, and what was set aside with the reason.

Joins the rows of the metadata with the files of the folder. Opens no audio and knows nothing of caches, tokenizers
or batches.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import glob
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from myxtts.audio import EXTENSIONS
from myxtts.config import LANGUAGE_NAMES, LANGUAGES, DataSettings
from myxtts.data.store import Rows, hash64, refuse_folder
from myxtts.errors import DatasetError, printable

FORMS = """\
  DIR/metadata.csv with lines id|text or id|raw text|normalised text, and DIR/wavs/ID.wav
  DIR/metadata.csv with a header line such as audio_file|text|speaker_name|language
  DIR/ID.wav with its text in DIR/ID.txt; subfolders of DIR are taken for speakers
Columns may also be separated by tabs, commas or semicolons. metadata_train.csv and metadata_eval.csv in place of
metadata.csv choose the validation clips. An optional DIR/speakers.csv with the header id|speaker|language names
speakers. Audio may be WAV, FLAC, MP3, OGG or Opus at any rate, mono or stereo."""
CUT_INTO_CLIPS = """\
Training needs clips of 2 to 12 seconds, each with its text. myxtts collect RECORDINGS --out DIR makes them from
long recordings. If you have clips and texts, save both in one of these forms:"""

METADATA_FILES = ("metadata_train.csv", "metadata.csv", "metadata.tsv", "metadata_eval.csv", "speakers.csv")
"""Every file that describes clips."""
MAX_DEPTH = 4  # levels of folders that are searched for recordings with texts
_OTHER_SEPARATORS = "\t;,"
_CONSISTENT_SHARE = 0.9  # of the lines have the same number of columns if a mark other than | separates them

COLUMN_NAMES = {
    "audio": ("audio_file", "audio", "path", "file", "file_name", "filename", "wav", "id"),
    "text": ("normalized_text", "normalised_text", "text", "sentence", "transcription", "transcript"),
    "speaker": ("speaker_name", "speaker", "speaker_id", "client_id"),
    "language": ("language", "lang", "locale"),
}
"""Header names by meaning; if a file has several with one meaning, the first in this list is used."""
HELD_OUT_SHARDS, MOST_OF_A_SHARD = 16, 0.25
"""A corpus of more shards holds out clips of so many, at most this share of each: they are read whole."""
_LANGUAGE_CODES = {name.lower(): code for code, name in LANGUAGE_NAMES.items()} | {"farsi": "fa"}

Flags = npt.NDArray[np.bool_]
_log = logging.getLogger(__name__)


class SetAside(NamedTuple):
    """A clip that is not used: the reason (a fixed phrase, for counting), what was found, and where."""

    id: str
    reason: str
    detail: str
    where: str


class Row(NamedTuple):
    """One usable line of metadata."""

    where: str
    audio: str
    text: str
    speaker: str
    language: str


def metadata_files(folder: Path) -> list[tuple[Path, bool]]:
    """Return the metadata files, if any, each with True if its clips are held out for validation."""
    if not folder.is_dir():
        if folder.is_file() and folder.name.lower().endswith(EXTENSIONS):
            raise DatasetError(f"{folder} is a single recording.\n{CUT_INTO_CLIPS}\n{FORMS}")
        missing = f"No such corpus folder: {folder.absolute()}"
        if near := sorted(folder.parent.glob(f"{glob.escape(folder.name)}:*")):
            missing += f" (for {near[0].name}, with a colon in its name, give {near[0]}/)"
        shards = f"myxtts prepare --train-data {folder} --out CORPUS (docs/scale.md)"
        is_file = f"{folder} is a file. Name its folder, or make a sharded corpus of it: {shards}."
        what = is_file if folder.is_file() else missing
        raise DatasetError(f"{what}\nA corpus is a folder in one of these forms:\n{FORMS}")
    train = [path for name in METADATA_FILES[:3] if (path := folder / name).is_file()]
    if len(train) > 1:
        first, *others = (path.name for path in train)
        _log.info("%s: %s is read, %s is not", folder, first, " and ".join(others))
    held_out = folder / "metadata_eval.csv"
    return [(path, False) for path in train[:1]] + [(held_out, True) for _ in train[:1] if held_out.is_file()]


def read_rows(path: Path) -> Iterator[Row | SetAside]:
    """Yield the lines of a metadata file, with or without a header."""
    lines, undecodable = _lines(path)
    if not lines:
        found = [f"{item.where}: {item.detail}." for item in undecodable]
        reason = found[0] if found else f"Expected one of these forms:\n{FORMS}"
        raise DatasetError(f"{path} holds no usable line. {reason}")
    yield from undecodable
    mark = _separator([line for _, line in lines[:1000]])
    header = _fields(lines[0][1], mark)
    columns = _columns(path, header)
    if columns:
        unused = [name for at, name in enumerate(header) if at not in columns.values()]
        if unused:
            _log.info("%s: columns not used: %s", path, printable(", ".join(unused)))
        fewest, most = max(columns["audio"], columns["text"]) + 1, len(header)
    else:
        _refuse_speaker_column(path, [_fields(line, mark) for _, line in lines])
        fewest, most = 2, 3
    for where, line in lines[1 if columns else 0 :]:
        yield _row(where, _fields(line, mark), fewest, most, columns, mark)


def _separator(lines: list[str]) -> str:
    """Return what separates the columns: `|` unless another mark makes a header or columns of equal number."""
    for mark in _OTHER_SEPARATORS:
        names = {name.lower() for name in _fields(lines[0], mark)}
        if all(names & set(COLUMN_NAMES[meaning]) for meaning in ("audio", "text")):
            return mark
    if sum("|" in line for line in lines) * 2 >= len(lines):
        return "|"
    lengths: dict[str, int] = {}  # of the first column, which is shortest where a mark separates ids
    for mark in _OTHER_SEPARATORS:
        rows = [_fields(line, mark) for line in lines]
        most, times = Counter(map(len, rows)).most_common(1)[0]
        if most in (2, 3) and times >= _CONSISTENT_SHARE * len(lines):
            lengths[mark] = sum(len(row[0]) for row in rows)
    return min(lengths, key=lengths.__getitem__, default="|")


def read_pairs(folder: Path, listed: dict[str, int]) -> list[Row | SetAside]:
    """Return the recordings of a folder without metadata, each with the text of the `.txt` of the same name.

    Adds what the result depends on to `listed`. Links to folders are not followed, so that no search is endless.
    """
    found: list[Row | SetAside] = []
    others: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=refuse_folder):
        at = Path(parent).relative_to(folder)
        listed[parent] = last_change(Path(parent))
        visible = sorted(name for name in folders if not name.startswith("."))
        folders[:] = [
            name for name in visible if len(at.parts) < MAX_DEPTH and not Path(parent, name).is_symlink()
        ]
        why = f"a link, or more than {MAX_DEPTH} folders deep"
        found += [
            SetAside(str(at / name), "folder not searched", why, "") for name in visible if name not in folders
        ]
        for name in sorted(names):
            if name.lower().endswith(EXTENSIONS):
                found.append(_pair(folder, at / name, listed))
            else:
                others.append(str(at / name))
    if not any(isinstance(row, Row) for row in found):
        raise _no_texts(folder, [row.where for row in found if row.where], others)
    return found


def _pair(folder: Path, recording: Path, listed: dict[str, int]) -> Row | SetAside:
    """Return a recording with the text next to it; LibriTTS has a second, normalised one, which is preferred."""
    name = str(recording)
    texts = [recording.with_suffix(suffix) for suffix in (".normalized.txt", ".txt")]
    text = next((path for path in texts if (folder / path).is_file()), None)
    if text is None:
        return SetAside(name, "no text", f"there is no {texts[-1].name} next to the recording", name)
    listed[str(folder / text)] = last_change(folder / text)
    try:
        spoken = " ".join((folder / text).read_bytes().decode("utf-8-sig").split())
    except (OSError, UnicodeDecodeError) as error:
        return SetAside(name, "wrong encoding", f"{text} cannot be read as UTF-8: {error}", name)
    speaker = next((part for part in recording.parts[:-1] if part not in ("wavs", "clips", "audio")), "")
    return Row(str(text), name, spoken, speaker, "")


def _no_texts(folder: Path, recordings: list[str], others: list[str]) -> DatasetError:
    if (folder / "shards").is_dir():
        what = f"{folder} is a sharded corpus that is not finished: it has no corpus.json."
        return DatasetError(
            f"{what}\nRun myxtts prepare with its sources again, with all its shares (--shard K/N)."
        )
    held = ", ".join((recordings or others)[:5]) + ", …" * (len(recordings or others) > 5)
    above = folder.absolute().parent
    if listed := sorted(path.name for path in above.glob("metadata*.csv")):
        there = f"{listed[0]} is in the folder above"
        return DatasetError(f"No metadata in {folder}, but {there}: give --train-data {above}")
    if recordings:
        what = f"No metadata in {folder}, only {len(recordings)} recording(s) without texts: {held}."
        return DatasetError(f"{what}\n{CUT_INTO_CLIPS}\n{FORMS}")
    what = f"No metadata in {folder}, and no recordings (it holds: {held or 'nothing'})."
    return DatasetError(f"{what}\nExpected one of these forms:\n{FORMS}")


def _row(
    where: str, fields: list[str], fewest: int, most: int, columns: dict[str, int], mark: str
) -> Row | SetAside:
    if not fewest <= len(fields) <= most:
        detail = f"{len(fields)} fields separated by {mark!r}, expected {fewest} to {most}"
        other = [other for other in _OTHER_SEPARATORS if other in fields[0]] if len(fields) == 1 else []
        if other:  # not recognised, because many texts hold the mark too
            detail += f"; if columns are separated by {other[0]!r}, put every text in double quotes"
        return SetAside(fields[0][:80], "malformed line", detail, where)
    if columns:
        named = {meaning: fields[at] for meaning, at in columns.items() if at < len(fields)}
        row = Row(where, named["audio"], named["text"], named.get("speaker", ""), named.get("language", ""))
    else:
        row = Row(where, fields[0], fields[-1] or fields[1], "", "")
    return row if row.audio else SetAside("", "malformed line", "the id is empty", where)


def _lines(path: Path) -> tuple[list[tuple[str, str]], list[SetAside]]:
    """Return lines that are not blank, each with its place; one bad byte costs one line, not the file."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror or error}") from error
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        # Invalid UTF-16 becomes a lone surrogate, so that decoding its line fails below.
        text = raw.decode("utf-16", errors="replace").replace("\ufffd", "\udcff")
        raw = text.encode("utf-8", errors="surrogatepass")
    raw = raw.removeprefix(codecs.BOM_UTF8)
    lines: list[tuple[str, str]] = []
    undecodable: list[SetAside] = []
    for number, raw_line in enumerate(raw.split(b"\n" if b"\n" in raw else b"\r"), 1):
        try:
            line = raw_line.decode()
        except UnicodeDecodeError as error:
            clip_id = raw_line.split(b"|")[0].decode("ascii", errors="replace")[:80]
            detail = f"byte 0x{raw_line[error.start]:02x} is not UTF-8; save the file as UTF-8"
            undecodable.append(SetAside(clip_id, "wrong encoding", detail, f"{path.name}:{number}"))
        else:
            if line and not line.isspace():
                lines.append((f"{path.name}:{number}", line))
    return lines, undecodable


def _fields(line: str, mark: str) -> list[str]:
    """Return the fields without the quotes a spreadsheet puts around them ("…", inner quotes doubled)."""
    if mark in ";,":  # where these separate columns, a text that holds them is quoted
        with contextlib.suppress(csv.Error):
            return [value.strip() for value in next(csv.reader([line.strip()], delimiter=mark), [""])]
        return [line]
    fields = [value.strip() for value in line.split(mark)]
    for at, value in enumerate(fields if '"' in line else []):
        inner = value[1:-1]
        if len(value) >= 2 and value[0] == value[-1] == '"' and '"' not in inner.replace('""', ""):
            fields[at] = inner.replace('""', '"').strip()
    return fields


def _columns(path: Path, header: list[str]) -> dict[str, int]:
    """Return column positions by meaning, empty if the line is no header; raise if it lacks audio or text."""
    names = [name.lower() for name in header]
    columns: dict[str, int] = {}
    for meaning, known in COLUMN_NAMES.items():
        present = [name for name in known if name in names]
        if present:
            columns[meaning] = names.index(present[0])
    missing = [meaning for meaning in ("audio", "text") if meaning not in columns]
    if not missing:
        return columns
    first_known = any(names[0] in known for known in COLUMN_NAMES.values())
    if len(columns) > 1 or (first_known and all(map(str.isidentifier, names))):
        lacks = " and ".join({"audio": "the recordings", "text": "the text"}[meaning] for meaning in missing)
        expected = " and ".join(f"one of {', '.join(COLUMN_NAMES[meaning])}" for meaning in missing)
        shown = "|".join(names)[:80]
        raise DatasetError(f"{path}: the header {shown} has no column for {lacks}; expected {expected}.")
    return {}


def _refuse_speaker_column(path: Path, lines: list[list[str]]) -> None:
    """Raise if the third column, which is text without a header, repeats a few values like a speaker column."""
    rows = [fields for fields in lines if len(fields) == 3 and fields[2]]
    texts, thirds = {row[1] for row in rows}, {row[2] for row in rows}
    if len(rows) >= 10 and len(thirds) * 5 <= len(rows) and len(thirds) * 2 < len(texts):
        found = f"only {len(thirds)} different values in {len(rows)} lines (such as '{min(thirds)[:40]}')"
        advice = "If it names speakers, put this line first: audio_file|text|speaker_name"
        raise DatasetError(f"{path}: the third column holds {found}, so it is not text.\n{advice}")


def read_speakers(path: Path) -> dict[str, Row]:
    """Return speaker and language by clip id from speakers.csv, if there is one."""
    if not path.is_file():
        return {}
    lines, undecodable = _lines(path)
    if undecodable:
        raise DatasetError(f"{path.parent / undecodable[0].where}: {undecodable[0].detail}")
    marks = [mark for mark in "|\t;," if lines and mark in lines[0][1]] or ["|"]
    names = [name.lower() for name in _fields(lines[0][1], marks[0])] if lines else []
    if names[:2] != ["id", "speaker"]:
        first = "|".join(names)[:60]
        raise DatasetError(f"{path} starts with '{first}'; expected the header id|speaker or id|speaker|language")
    named = {}
    for where, line in lines[1:]:
        clip_id, speaker, *rest = [*_fields(line, marks[0]), "", ""]
        named[clip_id] = Row(where, clip_id, "", speaker, rest[0] if names[2:3] == ["language"] else "")
    return named


class Clip(NamedTuple):
    """One recording with its text. `speaker` and `language` are empty if the corpus does not name them."""

    id: str
    text: str
    speaker: str
    language: str
    held_out: bool
    where: str
    path: str
    size_bytes: int
    modified_ns: int
    changed_ns: int


@dataclass
class Corpus:
    """The content of a folder, in the order of its metadata."""

    folder: Path
    read_at: int = field(default_factory=time.time_ns)
    clips: list[Clip] = field(default_factory=list)
    set_aside: list[SetAside] = field(default_factory=list)
    listed: dict[str, int] = field(default_factory=dict)
    """Folders that were searched for audio, with the time of their last change before that (-1: absent). Broken
    links in place of audio are listed too."""


def read_corpus(folder: Path) -> Corpus:
    """Read the metadata of `folder` and find the audio file for every line."""
    metadata = metadata_files(folder)
    files = _AudioFiles(folder, ("wavs/", "") if metadata else ("",))
    corpus = Corpus(folder, listed=files.listed)
    first_seen: dict[str, str] = {}
    speakers = read_speakers(folder / "speakers.csv")
    for path, held_out in metadata or [(folder, False)]:
        for row in read_rows(path) if metadata else read_pairs(path, files.listed):
            found: Clip | SetAside
            if isinstance(row, SetAside):
                found = row
            elif (seen_at := first_seen.setdefault(row.audio, row.where)) != row.where:
                found = SetAside(row.audio, "duplicate id", f"first seen at {seen_at}", row.where)
            else:
                found = _clip(row, files, speakers.get(row.audio), held_out)
            if isinstance(found, Clip):
                corpus.clips.append(found)
            else:
                corpus.set_aside.append(found)
    return corpus


def labelled(corpus: Corpus, name: str, speakers: str) -> Corpus:
    """Return the corpus with ids `NAME/ID` and speakers `SPEAKERS/SPEAKER`, where these are not empty."""
    start, person = (f"{word}/" if word else "" for word in (name, speakers))
    aside = [item._replace(id=start + item.id) for item in corpus.set_aside]
    clips = [
        clip._replace(id=start + clip.id, speaker=clip.speaker and person + clip.speaker) for clip in corpus.clips
    ]
    return replace(corpus, clips=clips, set_aside=aside)


def _clip(row: Row, files: _AudioFiles, named: Row | None, held_out: bool) -> Clip | SetAside:
    """Return the clip of one line, or why there is none; `named` is its line of speakers.csv."""
    if not row.text:
        return SetAside(row.audio, "empty text", "the text column is empty", row.where)
    speaker = row.speaker or (named.speaker if named else "")
    language = row.language or (named.language if named else "")
    code = language_code(language)
    if language and not code:
        detail = f"'{language}' is none of {' '.join(LANGUAGES)}"
        return SetAside(row.audio, "unknown language", detail, row.where)
    if (found := files.find(row.audio)) is None:
        name = row.audio if row.audio.lower().endswith(EXTENSIONS) else f"{row.audio}{'|'.join(EXTENSIONS)}"
        detail = f"no regular file {name} in {files.folder / 'wavs'} or {files.folder}"
        return SetAside(row.audio, "missing file", detail, row.where)
    path, stat = found
    times = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return Clip(row.audio, row.text, speaker, code, held_out, row.where, path, *times)


@cache
def language_code(name: str) -> str:
    """Return `en` for `en`, `en-US`, `EN_us` or `English`; empty for a language that is not supported."""
    word = name.strip().lower()
    code = _LANGUAGE_CODES.get(word) or word.replace("_", "-").split("-")[0]
    return code if code in LANGUAGES else ""


class _AudioFiles:
    """Finds audio by id with one listing per folder instead of several `stat` calls per clip."""

    def __init__(self, folder: Path, parents: tuple[str, ...]) -> None:
        self.folder, self._parents = folder, parents
        self.listed: dict[str, int] = {}
        self._listings: dict[str, dict[str, os.DirEntry[str]]] = {}

    def find(self, audio: str) -> tuple[str, os.stat_result] | None:
        """Return the path, relative to the corpus unless the id is absolute, and the file's `stat`."""
        for parent in self._parents:
            folder, separator, name = (parent + audio if audio[0] != "/" else audio).rpartition("/")
            listing = self._listing(folder + separator)
            for extension in ("", *EXTENSIONS):
                entry = listing.get(name + extension)
                if entry is None:
                    continue
                with contextlib.suppress(OSError):  # deleted since it was listed, or a link to itself
                    if entry.is_file():
                        return folder + separator + entry.name, entry.stat()
                # A broken link: when its target appears, the folder of the link does not change.
                self.listed[entry.path] = last_change(Path(entry.path))
        return None

    def _listing(self, folder: str) -> dict[str, os.DirEntry[str]]:
        if folder not in self._listings:
            self.listed[str(self.folder / folder)] = last_change(self.folder / folder)
            try:
                with os.scandir(self.folder / folder) as entries:
                    self._listings[folder] = {entry.name: entry for entry in entries}
            except (OSError, ValueError):  # ValueError: a NUL byte in the id
                self._listings[folder] = {}
        return self._listings[folder]


def last_change(folder: Path) -> int:
    """Return when a folder's entries or permissions last changed, in nanoseconds; -1 if it does not exist."""
    try:
        stat = folder.stat()
        return max(stat.st_mtime_ns, stat.st_ctime_ns)  # cp -a and rsync set mtime back
    except (OSError, ValueError):  # ValueError: a NUL byte in the name
        return -1


def held_out(clips: Sequence[Clip], data: DataSettings) -> Flags:
    """Return which clips are for validation."""
    chosen = np.array([clip.held_out for clip in clips], bool)
    return choose_held_out(
        chosen, lambda: np.array([hash64("held out", clip.text) for clip in clips], np.uint64), data
    )


def choose_held_out(chosen: Flags, draws: Callable[[], npt.NDArray[np.uint64]], data: DataSettings) -> Flags:
    """Return which clips are for validation: those that the corpus has `chosen`, otherwise by a hash of the text.

    The hash makes the choice the same on every machine and independent of other clips, and keeps a sentence that
    several speakers read on one side.
    """
    if chosen.any() or data.val_data or data.val_fraction == 0 or not len(chosen):
        return chosen
    draw = draws() / 2.0**64
    chosen = np.asarray(draw < max(data.val_fraction, np.nextafter(draw.min(), 1)))
    if chosen.all():  # so few sentences: train on the last one
        chosen = np.asarray(draw < draw.max())
    return chosen


def choose_in_shards(index: Mapping[str, npt.NDArray[Any]], data: DataSettings) -> Flags:
    """Return which clips of a sharded corpus are for validation: of many shards, sentences that only a few hold.

    What other shards say too is trained on. If that is most of it, every shard holds clips out, as of few shards.
    """
    draws, shards, marked = index["draw"], index["shard"], np.asarray(index["held_out"] != 0)
    number = int(shards.max(initial=0)) + 1
    if number <= HELD_OUT_SHARDS or marked.any() or data.val_data or data.val_fraction == 0:
        return choose_held_out(marked, lambda: draws, data)
    share = min(data.val_fraction * number / HELD_OUT_SHARDS, MOST_OF_A_SHARD)
    drawn = np.flatnonzero(draws < share * 2.0**64)
    few = _few_shards(shards[drawn], index["language"][drawn], index["speaker"][drawn], number)
    few &= np.bincount(shards[drawn], minlength=number) < np.bincount(shards)  # none is held out as a whole
    is_own = few[shards[drawn]]
    own = drawn[is_own]
    said_elsewhere = np.sort(np.append(draws[drawn[~is_own]], ~np.uint64(0)))
    own = own[said_elsewhere[np.searchsorted(said_elsewhere, draws[own])] != draws[own]]
    if 2 * len(own) <= is_own.sum():
        _log.info("Few sentences are in one shard only: validation clips are in all %d shards", number)
        return choose_held_out(marked, lambda: draws, data)
    marked[own] = True
    return marked


def _few_shards(shards: Rows, languages: Rows, speakers: Rows, number: int) -> Flags:
    """Return which shards are chosen: that with most languages and then speakers that the others lack, in turn."""
    named = np.int64(len(LANGUAGES))  # languages are numbered before speakers
    kinds = named + int(speakers.max(initial=0)) + 1
    pairs = np.sort(np.concatenate([shards * kinds + languages, shards * kinds + named + speakers]))
    of_shard, kind = np.divmod(pairs[np.diff(pairs, prepend=-1) > 0], kinds)
    worth = np.where(kind < named, kinds, 1)
    few, ties = np.zeros(number, bool), np.random.default_rng(0).random(number)
    for _ in range(HELD_OUT_SHARDS):
        best = np.where(few, -1.0, np.bincount(of_shard, worth, number) + ties).argmax()
        few[best] = True
        worth[np.isin(kind, kind[of_shard == best])] = 0
    return few
