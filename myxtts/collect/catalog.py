"""The catalog of a collected corpus: recordings, the clips cut from them, and every edit a person made.

`DIR/collect.db` is the only truth. `metadata.csv` and `rejected.csv` are derived from it. Whether a clip is used
is computed from its scores, so a threshold may change at any time. This module knows nothing of models, decoding
or the web.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from myxtts.errors import ConfigError, DatasetError
from myxtts.files import lock as lock_folder
from myxtts.files import write_text_atomically

DATABASE, LOCK, CLIPS = "collect.db", "collect.lock", "wavs"
METADATA, REJECTED = "metadata.csv", "rejected.csv"
_FORMAT = 2
_WAIT_S = 30.0  # for another process that is writing
TOLERANCE_S = 0.0005  # times are whole milliseconds
_OF_THE_TEXT = {"heard_error", "script_error"}
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value);
CREATE TABLE sources (
    id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT, size INTEGER, mtime_ns INTEGER, seconds REAL,
    sample_rate INTEGER, channels INTEGER, state TEXT, reason TEXT, detail TEXT, done_until TEXT,
    UNIQUE (path, size, mtime_ns));
CREATE TABLE segments (
    id INTEGER PRIMARY KEY AUTOINCREMENT, source INTEGER, channel INTEGER, start REAL, "end" REAL, text TEXT,
    language TEXT, speaker TEXT, origin TEXT, scores TEXT, heard TEXT, notes TEXT, flags TEXT, decision TEXT,
    audio TEXT, edited TEXT, version INTEGER);
CREATE INDEX segments_in_order ON segments (source, channel, start);
CREATE TABLE unused (
    id INTEGER PRIMARY KEY, source INTEGER, channel INTEGER, start REAL, "end" REAL, reason TEXT, detail TEXT);
CREATE TABLE journal (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL, action TEXT, arguments TEXT, changes TEXT, state TEXT);
INSERT INTO facts VALUES ('version', 0), ('filters', '{}')
"""
_FROM_FORMAT_1 = """
CREATE TEMP VIEW spans AS
    SELECT source, channel, "end" FROM segments UNION SELECT source, channel, "end" FROM unused;
UPDATE sources SET done_until = CASE channels WHEN 1 THEN json_array(done_until + 0.0) ELSE json_array(
    (SELECT coalesce(max("end"), 0.0) FROM spans WHERE source = sources.id AND channel = 0),
    (SELECT coalesce(max("end"), 0.0) FROM spans WHERE source = sources.id AND channel = 1)) END;
DROP VIEW spans
"""


@dataclass(frozen=True)
class Source:
    """A recording. `state` is new, cut, done or failed; `done_until` is how much of each channel is finished."""

    id: int
    path: str
    size: int
    mtime_ns: int
    seconds: float
    sample_rate: int
    channels: int
    state: str = "new"
    reason: str = ""
    detail: str = ""
    done_until: tuple[float, ...] = (0.0,)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A clip. Times are seconds in its source."""

    id: int = 0
    source: int
    channel: int = 0
    start: float
    end: float
    text: str = ""
    language: str = ""
    speaker: str = ""
    origin: str = "whisper"
    """Who wrote the text: whisper, script or person."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """What was measured, by name; `THRESHOLDS` lists those that filters read."""
    heard: str = ""
    """The transcript of the clip when it is heard alone."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Details by reason, and anything else worth showing."""
    flags: tuple[str, ...] = ()
    """Reasons to set the clip aside that are not thresholds, such as "repeated take"."""
    decision: str = ""
    """A person's word, which wins over filters: keep, reject, or empty."""
    audio: str = ""
    """Name of the clip's file in wavs/."""
    edited: tuple[str, ...] = ()
    """The fields that a person set ("cut" for the times), which `update_segments` leaves alone."""
    version: int = 0
    """The catalog's version when the clip was last changed; an edit based on an older one is refused."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Unused:
    """A span of a source that is in no clip."""

    source: int
    channel: int
    start: float
    end: float
    reason: str
    detail: str = ""


class Threshold(NamedTuple):
    """A filter: the score it reads, the reason it gives, the range worth choosing from, and its description."""

    name: str
    score: str
    reason: str
    low: float
    high: float
    step: float
    unit: str
    description: str

    @property
    def is_maximum(self) -> bool:
        return self.name.startswith("max_")

    def refuses(self, value: float | None, limit: float | None) -> bool:
        """True if a score is beyond the limit; a filter that is off or a score that is missing refuses nothing."""
        if value is None or limit is None:
            return False
        return value > limit + 1e-6 if self.is_maximum else value < limit - 1e-6


def _threshold(
    default: float | None, score: str, reason: str, span: tuple[float, float, float], unit: str, about: str
) -> Any:
    return field(default=default, metadata={"rule": (score, reason, *span, unit, about)})


@dataclass(frozen=True, kw_only=True)
class Filters:
    """The thresholds that decide which clips are used; None switches one off."""

    max_heard_error: float | None = _threshold(
        0.15, "heard_error", "heard differently", (0, 1, 0.01), "",
        "Most characters, as a share, by which the two transcripts of a clip may differ.",
    )  # fmt: skip
    min_mos: float | None = _threshold(
        2.5, "mos", "low quality", (1, 5, 0.05), "", "Lowest predicted mean opinion score, from 1 to 5."
    )
    min_snr_db: float | None = _threshold(
        10.0, "snr_db", "noise", (0, 60, 1), "dB", "Lowest ratio of speech to background noise."
    )
    max_clipping: float | None = _threshold(
        0.001, "clipping", "clipping", (0, 0.02, 0.0005), "", "Most samples, as a share, at full scale."
    )
    min_bandwidth_hz: float | None = _threshold(
        5000.0, "bandwidth_hz", "narrow bandwidth", (0, 12000, 250), "Hz",
        "Lowest upper end of the spectrum; a phone call reaches 3400 Hz.",
    )  # fmt: skip
    max_music: float | None = _threshold(
        0.25, "music", "music", (0, 1, 0.01), "", "Highest likelihood of music, from 0 to 1."
    )
    min_speech: float | None = _threshold(
        0.3, "speech", "little speech", (0, 1, 0.01), "", "Lowest share of a clip that is speech."
    )
    min_speaker_similarity: float | None = _threshold(
        None, "speaker_similarity", "another speaker", (0, 1, 0.01), "",
        "Lowest similarity of a clip's voice to the other clips of its speaker.",
    )  # fmt: skip
    min_window_similarity: float | None = _threshold(
        0.3, "window_similarity", "several speakers", (0, 1, 0.01), "",
        "Lowest similarity of any 1.5 seconds of a clip to the voice of its speaker.",
    )  # fmt: skip
    min_seconds: float | None = _threshold(2.0, "seconds", "too short", (0, 10, 0.1), "s", "Shortest clip.")
    max_seconds: float | None = _threshold(12.0, "seconds", "too long", (2, 30, 0.5), "s", "Longest clip.")

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Filters:
        """Return filters from names and values, for example of a request; raise for anything else."""
        names = {item.name for item in fields(cls)}
        if unknown := sorted(set(values) - names):
            raise ConfigError(f"Unknown filter: {', '.join(unknown)}. The filters are {', '.join(sorted(names))}.")
        for name, value in values.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if value is not None and not is_number:
                raise ConfigError(f"The filter {name} is {value!r}; expected a number, or null to switch it off.")
        return cls(**values)


THRESHOLDS = {item.name: Threshold(item.name, *item.metadata["rule"]) for item in fields(Filters)}
"""The filters by their names in `Filters`, in the order in which reasons are given."""


def measured(segment: Segment, rule: Threshold) -> float | None:
    """Return what a filter reads of a clip, or None if there is nothing to read.

    How well the two hearings of a clip agree says nothing about a text that a person wrote.
    """
    if rule.score == "seconds":
        return segment.seconds
    is_moot = rule.score == "heard_error" and segment.origin == "person"
    return None if is_moot else segment.scores.get(rule.score)


def reasons(segment: Segment, filters: Filters) -> list[tuple[str, str]]:
    """Return why a clip is not used, each with a detail; empty if it is used."""
    impossible = [("no text", "")] * (not segment.text) + [("no audio", "")] * (not segment.audio)
    if segment.decision == "keep":
        return impossible
    if segment.decision == "reject":
        return [("rejected by a person", "")]
    found = [(flag, segment.notes.get(flag, "")) for flag in segment.flags]
    for name, rule in THRESHOLDS.items():
        value, limit = measured(segment, rule), getattr(filters, name)
        if rule.refuses(value, limit):
            bound = "at most" if rule.is_maximum else "at least"
            found.append((rule.reason, f"{value:.4g} {rule.unit}".strip() + f", {bound} {limit:g}"))
    return found + impossible


def used(segment: Segment, filters: Filters) -> bool:
    """True if a clip is part of the corpus."""
    return not reasons(segment, filters)


class Taken(NamedTuple):
    """What one reason takes; a clip with several counts for its first."""

    reason: str
    threshold: float | None
    segments: int
    seconds: float


@dataclass(frozen=True)
class Table:
    """What is used of the audio, and what is not: clips by their first reason, and spans that are in no clip."""

    used: Taken
    set_aside: tuple[Taken, ...]
    unused: tuple[Taken, ...]

    @property
    def seconds(self) -> float:
        """All audio, each channel that is cut separately."""
        return sum(taken.seconds for taken in (self.used, *self.set_aside, *self.unused))


class Change(NamedTuple):
    """A clip before and after an edit: the fields that differ, or None where there is no such clip.

    Clip 0 stands for the filters.
    """

    segment: int
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None

    @property
    def turned(self) -> Change:
        return Change(self.segment, self.after, self.before)


@dataclass(frozen=True)
class Edit:
    """A row of the journal. `state` is done, undone, or dropped: undone, then followed by another edit."""

    id: int
    time: float
    action: str
    arguments: Mapping[str, Any]
    changes: tuple[Change, ...]
    state: str = "done"


class StaleEdit(DatasetError):
    """An edit of something that has changed since it was read."""


_SOURCE_FIELDS = tuple(item.name for item in fields(Source))
_SEGMENT_FIELDS = tuple(item.name for item in fields(Segment))
_JSON_FIELDS = ("scores", "notes", "flags", "edited", "done_until")
_VISIBLE_FIELDS = {"start", "end", "text", "language", "speaker", "decision", "audio"}
_SOURCE_STATES = ("new", "cut", "done", "failed")


class Catalog:
    """The catalog in a folder, to be used in a `with` statement, by any number of threads.

    The pipeline opens it with `lock`, which a second process is refused. Pages and readers open it without: every
    change is one transaction, so they may edit while the pipeline runs.
    """

    def __init__(self, folder: Path, create: bool = False, *, lock: bool = True) -> None:
        self.folder = folder
        self._guard = threading.RLock()
        self._held = contextlib.ExitStack()
        path = folder / DATABASE
        if create:
            _make_folder(folder)
        elif not path.is_file():
            raise DatasetError(
                f"{folder} holds no collected corpus: there is no {DATABASE}. myxtts collect makes one."
            )
        try:
            if lock:
                self._held.enter_context(lock_folder(folder, LOCK, "corpus", "--out"))
            self._database = sqlite3.connect(path, _WAIT_S, isolation_level=None, check_same_thread=False)
            self._held.callback(self._database.close)
            self._open()
        except sqlite3.Error as error:
            self._held.close()
            raise DatasetError(f"{path} cannot be opened: {error}") from error
        except BaseException:
            self._held.close()
            raise

    def _open(self) -> None:
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("BEGIN IMMEDIATE")
        (found,) = self._database.execute("PRAGMA user_version").fetchone()
        for statement in {0: _SCHEMA, 1: _FROM_FORMAT_1}.get(found, "").split(";"):
            self._database.execute(statement)
        if found < _FORMAT:
            self._database.execute(f"PRAGMA user_version = {_FORMAT}")
        self._database.execute("COMMIT")
        if found > _FORMAT:
            raise DatasetError(
                f"{self.folder / DATABASE} is from a newer MyXTTS (format {found}). Upgrade myxtts."
            )

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database and give the lock back."""
        with self._guard:
            self._held.close()

    def _read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._guard, self._as_dataset_error():
            return self._database.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _as_dataset_error(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OverflowError) as error:
            raise DatasetError(f"{self.folder / DATABASE}: {error}") from error

    @contextlib.contextmanager
    def _write(self) -> Iterator[int]:
        """One transaction; yields the version that it makes, which stays the old one if nothing is written."""
        with self._guard, self._as_dataset_error():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                version, before = self.version + 1, self._database.total_changes
                yield version
                if self._database.total_changes > before:
                    self._database.execute("UPDATE facts SET value = ? WHERE name = 'version'", (version,))
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    @property
    def version(self) -> int:
        """The number of transactions that changed something so far, of all processes."""
        return int(self._read("SELECT value FROM facts WHERE name = 'version'")[0][0])

    def sources(self) -> list[Source]:
        """Return the recordings by path."""
        rows = self._read(f"SELECT {_names(_SOURCE_FIELDS)} FROM sources ORDER BY path, id")
        return [_source(row) for row in rows]

    def source(self, source_id: int) -> Source:
        """Return one recording."""
        rows = self._read(f"SELECT {_names(_SOURCE_FIELDS)} FROM sources WHERE id = ?", source_id)
        if not rows:
            raise DatasetError(f"{self.folder} holds no recording {source_id}")
        return _source(rows[0])

    def source_for(self, path: str, size: int, mtime_ns: int) -> Source | None:
        """Return the recording with this path and state of its file, if it is known."""
        where = "path = ? AND size = ? AND mtime_ns = ?"
        rows = self._read(f"SELECT {_names(_SOURCE_FIELDS)} FROM sources WHERE {where}", path, size, mtime_ns)
        return _source(rows[0]) if rows else None

    def add_source(
        self, path: str, size: int, mtime_ns: int, seconds: float = 0.0, sample_rate: int = 0, channels: int = 1,
        state: str = "new", reason: str = "", detail: str = "",
    ) -> Source:  # fmt: skip
        """Add a recording."""
        values = (path, size, mtime_ns, seconds, sample_rate, channels, state, reason, detail, (0.0,) * channels)
        _check_state(state)
        with self._write():
            row = [_stored(*pair) for pair in zip(_SOURCE_FIELDS[1:], values, strict=True)]
            query = f"INSERT INTO sources ({_names(_SOURCE_FIELDS[1:])}) VALUES ({_marks(row)})"
            added = self._database.execute(query, row).lastrowid
        return Source(added or 0, *values)

    def update_source(self, source_id: int, **changes: Any) -> Source:
        """Change fields of a recording."""
        _check_state(changes.get("state", "new"))
        with self._write():
            self._update("sources", source_id, _SOURCE_FIELDS, changes)
        return self.source(source_id)

    def segments(self, source: int | None = None, ids: Sequence[int] | None = None) -> list[Segment]:
        """Return the clips, or those of one recording or with these ids, in the order of their times."""
        query, values = f"SELECT {_names(_SEGMENT_FIELDS)} FROM segments", list[Any]()
        if source is not None:
            query, values = f"{query} WHERE source = ?", [source]
        elif ids is not None:
            query, values = f"{query} WHERE id IN (SELECT value FROM json_each(?))", [json.dumps([*ids])]
        return [_segment(row) for row in self._read(f"{query} ORDER BY source, channel, start, id", *values)]

    def segment(self, segment_id: int) -> Segment:
        """Return one clip."""
        found = self.segments(ids=[segment_id])
        if not found:
            raise StaleEdit(f"Clip {segment_id} is gone: it was merged or undone. Reload the page.")
        return found[0]

    def unused(self, source: int | None = None) -> list[Unused]:
        """Return the spans that the pipeline put into no clip; a clip that a person made there wins over them."""
        query = 'SELECT source, channel, start, "end", reason, detail FROM unused'
        where, values = ("", []) if source is None else (" WHERE source = ?", [source])
        return [Unused(*row) for row in self._read(f"{query}{where} ORDER BY source, channel, start", *values)]

    def add_segments(
        self,
        source: int,
        segments: Sequence[Segment],
        unused: Sequence[Unused],
        done_until: float,
        channel: int = 0,
    ) -> list[int]:
        """Add what the pipeline finished of a channel, in one transaction; returns the ids of the clips."""
        with self._write() as version:
            new = [replace(segment, id=0, source=source) for segment in segments]
            self._check_overlaps(source, new)
            ids = [self._insert(segment, version) for segment in new]
            rows = [(source, span.channel, span.start, span.end, span.reason, span.detail) for span in unused]
            columns = 'source, channel, start, "end", reason, detail'
            self._database.executemany(f"INSERT INTO unused ({columns}) VALUES ({_marks(range(6))})", rows)
            done = [*self.source(source).done_until]
            done[channel] = done_until
            self._update("sources", source, _SOURCE_FIELDS, {"done_until": done})
        return ids

    def _check_overlaps(self, source: int, new: Sequence[Segment]) -> None:
        low, high = min((clip.start for clip in new), default=0.0), max((clip.end for clip in new), default=0.0)
        query = 'SELECT channel, start, "end" FROM segments WHERE source = ? AND start < ? AND "end" > ?'
        spans = self._read(query, source, high, low) + [(clip.channel, clip.start, clip.end) for clip in new]
        for before, after in pairwise(sorted(spans)):
            if before[0] == after[0] and after[1] < before[2] - TOLERANCE_S:
                raise ValueError(f"clips of source {source} overlap: {before[2]} s > {after[1]} s")

    def update_segments(self, changes: Mapping[int, Mapping[str, Any]]) -> None:
        """Write results of later stages: scores and notes are added to those there, other fields replace theirs.

        What a person has edited stays as it is, and clips that a person has merged are passed over.
        """
        with self._write() as version:
            held = {segment.id: segment for segment in self.segments(ids=[*changes])}
            for segment_id in held.keys() & changes.keys():
                found, values = held[segment_id], changes[segment_id]
                kept = {*found.edited} | ({"start", "end", "audio"} if "cut" in found.edited else set())
                new = {name: value for name, value in values.items() if name not in kept}
                if "text" in kept:  # what was found out about the words is not about a person's
                    new.pop("origin", None)
                    new["scores"] = {k: v for k, v in new.get("scores", {}).items() if k not in _OF_THE_TEXT}
                for name in new.keys() & {"scores", "notes"}:
                    new[name] = {**getattr(found, name), **new[name]}
                if new.keys() & _VISIBLE_FIELDS:
                    new["version"] = version
                self._update("segments", segment_id, _SEGMENT_FIELDS, new)

    @property
    def filters(self) -> Filters:
        return Filters(**json.loads(self._read("SELECT value FROM facts WHERE name = 'filters'")[0][0]))

    def set_filters(self, filters: Filters) -> Edit | None:
        """Change the filters: an edit like any other, which can be undone."""
        return self.apply("set_filters", {}, filters=filters)

    def apply(
        self, action: str, arguments: Mapping[str, Any], *, updated: Mapping[int, Mapping[str, Any]] | None = None,
        removed: Sequence[int] = (), added: Sequence[Segment] = (), filters: Filters | None = None,
        versions: Mapping[int, int] | None = None,
    ) -> Edit | None:  # fmt: skip
        """Make a person's edit: one transaction with a row in the journal. Returns None if it changes nothing.

        Raises StaleEdit if a clip in `versions` has another version by now. `myxtts.collect.edits` computes edits.
        """
        with self._write() as version:
            self._check_versions(versions or {})
            changes = []
            for segment_id, values in (updated or {}).items():
                held = asdict(self.segment(segment_id))
                differing = [name for name, value in values.items() if held[name] != value]
                if differing:
                    before, after = ({name: row[name] for name in differing} for row in (held, values))
                    changes.append(Change(segment_id, before, after))
            changes += [Change(gone, _plain(self.segment(gone)), None) for gone in removed]
            if filters is not None and filters != (held_filters := self.filters):
                changes.append(Change(0, asdict(held_filters), asdict(filters)))
            self._make(changes, version)
            changes += [Change(self._insert(new, version), None, _plain(new)) for new in added]
            if not changes:
                return None
            self._database.execute("UPDATE journal SET state = 'dropped' WHERE state = 'undone'")
            edit = Edit(0, time.time(), action, arguments, tuple(changes))
            row = (edit.time, action, json.dumps(arguments), json.dumps(changes), edit.state)
            query = f"INSERT INTO journal (time, action, arguments, changes, state) VALUES ({_marks(row)})"
            return replace(edit, id=self._database.execute(query, row).lastrowid or 0)

    def _check_versions(self, versions: Mapping[int, int]) -> None:
        for segment_id, version in versions.items():
            if self.segment(segment_id).version != version:
                raise StaleEdit(f"Clip {segment_id} was changed elsewhere, so this edit was not made.")

    def undo(self, expected: int | None = None) -> Edit | None:
        """Take back the last edit that is not undone, and return it; None if there is none.

        Raises StaleEdit if that is another edit than `expected`, for example of a second tab.
        """
        return self._step("done", "undone", "DESC", expected)

    def redo(self, expected: int | None = None) -> Edit | None:
        """Make the edit again that was undone last, and return it; None if there is none."""
        return self._step("undone", "done", "ASC", expected)

    def _step(self, state: str, then: str, order: str, expected: int | None) -> Edit | None:
        with self._write() as version:
            rows = self._read(f"SELECT * FROM journal WHERE state = ? ORDER BY id {order} LIMIT 1", state)
            if not rows:
                return None
            edit = replace(_edit(rows[0]), state=then)
            if expected is not None and edit.id != expected:
                raise StaleEdit("Another edit was made elsewhere meanwhile, so nothing was undone or redone.")
            turned = [change if then == "done" else change.turned for change in edit.changes]
            self._make(turned, version)
            self._database.execute("UPDATE journal SET state = ? WHERE id = ?", (then, edit.id))
        return edit

    def next_steps(self) -> tuple[Edit | None, Edit | None]:
        """Return the edits that undo and redo would turn."""
        found = [
            self._read(f"SELECT * FROM journal WHERE state = '{state}' ORDER BY id {order} LIMIT 1")
            for state, order in (("done", "DESC"), ("undone", "ASC"))
        ]
        undo, redo = (_edit(rows[0]) if rows else None for rows in found)
        return undo, redo

    def journal(self) -> list[Edit]:
        """Return every edit, also those that were undone, in order."""
        return [_edit(row) for row in self._read("SELECT * FROM journal ORDER BY id")]

    def _make(self, changes: Iterable[Change], version: int) -> None:
        for segment_id, before, after in changes:
            if segment_id == 0:
                self._database.execute("UPDATE facts SET value = ? WHERE name = 'filters'", (json.dumps(after),))
            elif after is None:
                self._database.execute("DELETE FROM segments WHERE id = ?", (segment_id,))
            elif before is None:
                self._insert(_from_plain({**after, "id": segment_id}), version)
            else:
                self._update("segments", segment_id, _SEGMENT_FIELDS, {**after, "version": version})

    def _insert(self, segment: Segment, version: int) -> int:
        values = {**_plain(replace(segment, version=version)), "id": segment.id or None}
        row = [_stored(name, value) for name, value in values.items()]
        query = f"INSERT INTO segments ({_names(values)}) VALUES ({_marks(row)})"
        return self._database.execute(query, row).lastrowid or 0

    def _update(self, table: str, row_id: int, names: Sequence[str], changes: Mapping[str, Any]) -> None:
        if unknown := changes.keys() - {*names[1:]}:
            raise ValueError(f"{table} have no {', '.join(sorted(unknown))}")
        if changes:
            assignments = ", ".join(f'"{name}" = ?' for name in changes)
            row = [_stored(name, value) for name, value in changes.items()]
            self._database.execute(f"UPDATE {table} SET {assignments} WHERE id = ?", (*row, row_id))


def _make_folder(folder: Path) -> None:
    """Make the folder of a new catalog; one that holds something else's corpus is refused."""
    foreign = [name for name in (METADATA, "metadata_train.csv", CLIPS) if (folder / name).exists()]
    if foreign and not (folder / DATABASE).is_file():
        raise DatasetError(
            f"{folder} holds {foreign[0]}, but was not made by myxtts collect. Give --out a new or empty folder."
        )
    try:
        (folder / CLIPS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatasetError(f"Cannot make {folder / CLIPS}: {error.strerror or error}") from error


def _check_state(state: str) -> None:
    if state not in _SOURCE_STATES:
        raise ValueError(f"{state!r} is no state of a source: {', '.join(_SOURCE_STATES)}")


def _names(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _marks(values: Iterable[object]) -> str:
    return ", ".join("?" for _ in values)


def _stored(name: str, value: Any) -> Any:
    """Return a field as it is stored; scores that are not finite numbers are left out."""
    if name == "scores":
        value = {key: float(score) for key, score in value.items() if math.isfinite(score)}
    return json.dumps(value, ensure_ascii=False) if name in _JSON_FIELDS else value


def _plain(segment: Segment) -> dict[str, Any]:
    """Return a clip's fields as JSON can hold them, without those that belong to its row."""
    values = {item.name: getattr(segment, item.name) for item in fields(segment)}
    values |= {"scores": dict(segment.scores), "notes": dict(segment.notes)}
    return {name: value for name, value in values.items() if name != "id"}


def _from_plain(values: Mapping[str, Any]) -> Segment:
    return Segment(**{**values, "flags": tuple(values["flags"]), "edited": tuple(values["edited"])})


def _source(row: tuple[Any, ...]) -> Source:
    return Source(*(*row[:-1], tuple(json.loads(row[-1]))))


def _segment(row: tuple[Any, ...]) -> Segment:
    values = dict(zip(_SEGMENT_FIELDS, row, strict=True))
    return _from_plain(values | {name: json.loads(values[name]) for name in values.keys() & {*_JSON_FIELDS}})


def _edit(row: tuple[Any, ...]) -> Edit:
    number, when, action, arguments, changes, state = row
    made = tuple(Change(*change) for change in json.loads(changes))
    return Edit(number, when, action, json.loads(arguments), made, state)


def _spans_in_no_clip(source: Source, segments: Sequence[Segment], unused: Sequence[Unused]) -> list[Unused]:
    """Return everything of a recording that is in none of its clips, channel by channel, each with a reason."""
    found: list[Unused] = []
    for channel in range(source.channels):
        clips = sorted((item.start, item.end) for item in segments if item.channel == channel)
        spans = sorted((item for item in unused if item.channel == channel), key=lambda item: item.start)
        at, total = 0.0, max([source.seconds, *(end for _, end in clips), *(item.end for item in spans)])
        for start, end in [*clips, (total, total)]:
            while spans and spans[0].end <= at:
                spans.pop(0)
            for span in spans:
                if span.start >= start:
                    break
                found += _between(source, channel, at, max(at, span.start))
                first, last = max(at, span.start), min(start, span.end)
                found += [replace(span, start=first, end=last)] * (last > first)
                at = max(at, last)
            found += _between(source, channel, at, start)
            at = max(at, end)
    if source.state == "failed" and not found and not segments:
        found = [Unused(source.id, 0, 0.0, 0.0, source.reason, source.detail)]
    return found


def _between(source: Source, channel: int, start: float, end: float) -> list[Unused]:
    """Return a span that the pipeline did not explain, in up to two parts: before and after it stopped."""
    reason = (source.reason, source.detail) if source.state == "failed" else ("not processed yet", "")
    done_until = math.inf if source.state == "done" else source.done_until[channel]
    middle = min(max(start, done_until), end)
    parts = [(start, middle, ("outside the cuts", "")), (middle, end, reason)]
    return [Unused(source.id, channel, first, last, *why) for first, last, why in parts if last - first > 1e-9]


def table(catalog: Catalog, filters: Filters | None = None) -> Table:
    """Return what each filter takes, with the catalog's filters or others, and what is in no clip."""
    lost: dict[str, list[float]] = defaultdict(list)
    every: list[Segment] = []
    for _, segments, spans in _by_source(catalog):
        every += segments
        for span in spans:
            lost[span.reason].append(span.end - span.start)
    in_no_clip = tuple(Taken(reason, None, len(held), sum(held)) for reason, held in sorted(lost.items()))
    return replace(count(every, filters or catalog.filters), unused=in_no_clip)


def _by_source(catalog: Catalog) -> Iterator[tuple[Source, list[Segment], list[Unused]]]:
    """Every recording with its clips and the spans that are in none."""
    segments, unused = defaultdict(list), defaultdict(list)
    for segment in catalog.segments():
        segments[segment.source].append(segment)
    for span in catalog.unused():
        unused[span.source].append(span)
    for source in catalog.sources():
        yield source, segments[source.id], _spans_in_no_clip(source, segments[source.id], unused[source.id])


def count(segments: Iterable[Segment], filters: Filters) -> Table:
    """Return what filters take of clips, worst first."""
    limits = {rule.reason: getattr(filters, name) for name, rule in THRESHOLDS.items()}
    held: dict[str, list[float]] = defaultdict(list)
    for segment in segments:
        found = reasons(segment, filters)
        held[found[0][0] if found else ""].append(segment.seconds)
    taken = [Taken(reason, limits.get(reason), len(seconds), sum(seconds)) for reason, seconds in held.items()]
    aside = sorted((row for row in taken if row.reason), key=lambda row: -row.seconds)
    return Table(Taken("", None, len(held[""]), sum(held[""])), tuple(aside), ())


def write_corpus(catalog: Catalog) -> None:
    """Write metadata.csv and rejected.csv; a change that another process makes meanwhile is written too."""
    written = None
    while written != (version := catalog.version):
        chosen, refused = _rows(catalog)
        write_text_atomically(catalog.folder / METADATA, chosen)
        write_text_atomically(catalog.folder / REJECTED, refused)
        written = version


def _rows(catalog: Catalog) -> tuple[str, str]:
    filters, held = catalog.filters, [*_by_source(catalog)]
    names = sorted({name for _, segments, _ in held for segment in segments for name in segment.scores})
    chosen = [["audio_file", "text", "speaker_name", "language", "source", "channel", "start", "end", *names]]
    refused = [["source", "channel", "start", "end", "reason", "detail", "audio_file", "text"]]
    for source, segments, spans in held:
        rows: list[Segment | Unused] = [*segments, *spans]
        for row in sorted(rows, key=lambda row: (row.channel, row.start, row.end)):
            where = [source.path, str(row.channel), f"{row.start:.3f}", f"{row.end:.3f}"]
            if isinstance(row, Unused):
                refused.append([*where, row.reason, row.detail, "", ""])
            elif why := reasons(row, filters):
                others = "; ".join(f"{reason} {detail}".strip() for reason, detail in why[1:])
                detail = "; also ".join(filter(None, (why[0][1], others)))
                refused.append([*where, why[0][0], detail, row.audio, row.text])
            else:
                scores = [f"{row.scores[name]:.6g}" if name in row.scores else "" for name in names]
                chosen.append([row.audio, row.text, row.speaker, row.language, *where, *scores])
    chosen_text, refused_text = ("".join(map(_line, rows)) for rows in (chosen, refused))
    return chosen_text, refused_text


def one_line(text: str) -> str:
    """Return text without line breaks, control characters or anything that is not a character."""
    return " ".join(_CONTROL.sub(" ", text.encode("utf-8", "ignore").decode()).split())


def _line(values: Iterable[str]) -> str:
    return "|".join(map(_field, values)) + "\n"


def _field(value: str) -> str:
    """Return a value as `prepare` reads it back: quotes around all of it would be taken for a spreadsheet's."""
    value = one_line(value.replace("|", " "))
    return '"' + value.replace('"', '""') + '"' if len(value) > 1 and value[0] == value[-1] == '"' else value


Cut = Callable[[Source, int, float, float, float], str]
"""Cuts (source, channel, start, end, gain in dB) to a file in wavs/ and returns its name."""
