"""A folder of recordings as a list of `Clip`s, and everything that was set aside with its reason.

Joins the rows of the metadata with the files of the folder; opens no audio and knows nothing of caches,
tokenizers or batches.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from myxtts.audio import EXTENSIONS
from myxtts.config import LANGUAGE_NAMES, LANGUAGES
from myxtts.data.metadata import Row, SetAside, metadata_files, read_rows, read_speakers

_LANGUAGE_CODES = {name.lower(): code for code, name in LANGUAGE_NAMES.items()} | {"farsi": "fa"}


class Clip(NamedTuple):
    """One recording with its text. `speaker` and `language` are empty where the corpus does not say them."""

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
    """What a folder holds, in the order of its metadata."""

    folder: Path
    read_at: int = field(default_factory=time.time_ns)
    clips: list[Clip] = field(default_factory=list)
    set_aside: list[SetAside] = field(default_factory=list)
    listed: dict[str, int] = field(default_factory=dict)
    """Folders that were searched for audio, with the time of their last change just before (-1: not there).
    Entries in place of audio that are no files, such as broken links, are among them."""


def read_corpus(folder: Path) -> Corpus:
    """Read the metadata of `folder` and find the audio file of every line."""
    corpus = Corpus(folder)
    files = _AudioFiles(folder)
    first_seen: dict[str, str] = {}
    metadata = metadata_files(folder)
    speakers = read_speakers(folder / "speakers.csv")
    for path, held_out in metadata:
        for row in read_rows(path):
            if isinstance(row, SetAside):
                corpus.set_aside.append(row)
            elif row.audio in first_seen:
                detail = f"first seen at {first_seen[row.audio]}"
                corpus.set_aside.append(SetAside(row.audio, "duplicate id", detail, row.where))
            else:
                first_seen[row.audio] = row.where
                clip = _clip(row, files, speakers.get(row.audio), held_out)
                if isinstance(clip, Clip):
                    corpus.clips.append(clip)
                else:
                    corpus.set_aside.append(clip)
    corpus.listed = files.listed
    return corpus


def _clip(row: Row, files: _AudioFiles, named: Row | None, held_out: bool) -> Clip | SetAside:
    """The clip of one line, or why there is none; `named` is its line of speakers.csv."""
    if not row.text:
        return SetAside(row.audio, "empty text", "the text column is empty", row.where)
    speaker = row.speaker or (named.speaker if named else "")
    language = row.language or (named.language if named else "")
    code = language_code(language)
    if language and not code:
        detail = f"'{language}' is none of {' '.join(LANGUAGES)}"
        return SetAside(row.audio, "unknown language", detail, row.where)
    found = files.find(row.audio)
    if found is None:
        is_whole = row.audio.lower().endswith(EXTENSIONS)
        name = f"file {row.audio}" if is_whole else f"{row.audio}{'|'.join(EXTENSIONS)}"
        detail = f"no {name} in {files.folder / 'wavs'} or {files.folder}"
        return SetAside(row.audio, "missing file", detail, row.where)
    path, stat = found
    return Clip(
        id=row.audio,
        text=row.text,
        speaker=speaker,
        language=code,
        held_out=held_out,
        where=row.where,
        path=path,
        size_bytes=stat.st_size,
        modified_ns=stat.st_mtime_ns,
        changed_ns=stat.st_ctime_ns,
    )


@cache
def language_code(name: str) -> str:
    """`en`, `en-US`, `EN_us` or `English` as `en`; empty when it is no language of ours."""
    word = name.strip().lower()
    code = _LANGUAGE_CODES.get(word) or word.replace("_", "-").split("-")[0]
    return code if code in LANGUAGES else ""


class _AudioFiles:
    """Finds audio by id with one listing per folder instead of several `stat` calls per clip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.listed: dict[str, int] = {}
        self._listings: dict[str, dict[str, os.DirEntry[str]]] = {}

    def find(self, audio: str) -> tuple[str, os.stat_result] | None:
        """Path relative to the corpus (an absolute one stays absolute) and the file's `stat`."""
        for parent in ("wavs/", ""):
            folder, separator, name = (parent + audio if audio[0] != "/" else audio).rpartition("/")
            listing = self._listing(folder + separator)
            for extension in ("", *EXTENSIONS):
                entry = listing.get(name + extension)
                if entry is None:
                    continue
                try:
                    if entry.is_file():
                        return folder + separator + entry.name, entry.stat()
                except OSError:  # deleted since it was listed
                    continue
                # A link to nowhere: when its target appears, the folder of the link does not change.
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
    """When a folder's entries or rights last changed, in nanoseconds; -1 if there is no such folder."""
    try:
        stat = folder.stat()
        return max(stat.st_mtime_ns, stat.st_ctime_ns)  # programs that copy folders set the first back
    except (OSError, ValueError):  # ValueError: a NUL byte in the name
        return -1
