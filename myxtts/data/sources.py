"""Where recordings come from: folders, tar archives, Parquet, lhotse and manifests, on this machine or remote.

A source is cut into units that are read independently, each from start to end. Nothing is unpacked to the disk.
"""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import math
import os
import re
import tarfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar, cast

from myxtts.audio import EXTENSIONS
from myxtts.config import LANGUAGES
from myxtts.data.corpus import COLUMN_NAMES, METADATA_FILES, Clip, SetAside, language_code, read_corpus
from myxtts.data.corpus import FORMS as FOLDERS
from myxtts.data.locations import Entry, Location, MissingObject
from myxtts.data.store import hash64
from myxtts.errors import INSTALL_EXTRA, ConfigError, DatasetError, without_secrets

FORMS = """\
  *.tar, *.tar.gz      WebDataset: KEY.wav (or .flac, .mp3, .ogg, .opus) next to KEY.txt or KEY.json
  *.parquet            columns for the audio ({bytes, path}) and the text, as of an audio dataset of Hugging Face
  *.jsonl, *.json      one object a line: audio_filepath, text (NeMo, Emilia) or a cut of lhotse; *.jsonl.gz too.
                       With X.tar next to X.jsonl, or audio_1.tar next to manifest_1.json, the audio is in the tar
  cuts.*.jsonl.gz      lhotse Shar, with recording.*.tar
  DIR/metadata.csv     and the other folders of recordings, on this machine
Name a file, a folder of such files, or several as in s3://bucket/train-{000..123}.tar."""
TARS, LINES = (".tar", ".tar.gz", ".tgz"), (".jsonl", ".jsonl.gz", ".json", ".json.gz")
FIELDS = {
    "audio": ("audio_filepath", *COLUMN_NAMES["audio"][:-1], "mp3", "flac", "speech"),
    "text": (*COLUMN_NAMES["text"], "raw_transcription"),
    "speaker": COLUMN_NAMES["speaker"],
    "language": COLUMN_NAMES["language"],
    "start": ("offset", "start"),
    "duration": ("duration",),
    "id": ("id", "utt_id", "__key__"),
}
"""Names of fields and columns by meaning; the first that is there and not empty counts."""
HELD_OUT = re.compile(r"(^|/)(validation|valid|val|dev|eval|test)([^a-z/][^/]*)?(/|$)")
"""Names of files and folders of splits that are for validation."""
SLICE_CLIPS, SLICE_BYTES, ROWS_PER_READ = 512, 256 << 20, 32
"""Clips of a slice of a manifest or a folder on average; bytes of row groups in a unit; rows read at once."""
MAX_AUDIO_BYTES, MAX_TEXT_BYTES = 1 << 30, 1 << 20  # of one member of an archive, one row, one line
BYTES_PER_SECOND, BYTES_PER_CLIP = 32_000, 211_200  # assumed where only the length is known, or not even that
MAX_FILES = 1_000_000  # that a pattern in braces may name

Item = TypeVar("Item")


class Recording(NamedTuple):
    """A clip as its source describes it."""

    id: str  # unique within its unit
    text: str
    audio: bytes | Path
    speaker: str = ""
    language: str = ""
    start: float = 0.0  # seconds, for a piece of a longer file
    duration: float | None = None
    where: str = ""  # for messages and set_aside.csv: line of a manifest, member of a tar
    held_out: bool = False


Found = Recording | SetAside


class _Row(NamedTuple):
    """A line of a manifest: a recording without its audio, and the name of its file; of its cut in a Shar."""

    recording: Recording
    audio: str
    cut: str = ""


class Unit(Protocol):
    """A picklable part of a source that one job reads: a tar, a Parquet row group, a slice of a manifest."""

    @property
    def name(self) -> str: ...  # stable and relative to the source; units sort by it
    @property
    def key(self) -> str: ...  # a hash of all that decides the content: relative path, size, time or ETag
    @property
    def num_bytes(self) -> int: ...  # of audio, estimated, for cutting shards
    def recordings(self) -> Iterator[Found]: ...  # what cannot be read is set aside, never dropped


@dataclass(frozen=True)
class _Unit:
    name: str
    key: str
    num_bytes: int
    read: Callable[[], Iterable[Found]]

    def recordings(self) -> Iterator[Found]:
        seen: set[str] = set()
        held_out = bool(HELD_OUT.search(self.name.partition("#")[0]))
        for found in self.read():
            if isinstance(found, Recording):
                found = _checked(found._replace(held_out=found.held_out or held_out), seen)
            yield found


def _checked(found: Recording, seen: set[str]) -> Found:
    text, language = " ".join(found.text.split()), language_code(found.language)
    times = (found.start, found.duration or 0.0)
    problem = None
    if not found.id or not found.id.isprintable():
        problem = "unsafe name", "the name is empty or not printable"
    elif found.id in seen:
        problem = "duplicate id", "seen before in the same part of the source"
    elif not text:
        problem = "empty text", "the text is empty"
    elif found.language and not language:
        problem = "unknown language", f"'{found.language}' is none of {' '.join(LANGUAGES)}"
    elif not all(0 <= value < math.inf for value in times):
        problem = "malformed line", f"start {times[0]} and duration {times[1]} seconds"
    elif not found.audio:
        problem = "missing file", "there is no audio"
    seen.add(found.id)
    return SetAside(found.id, *problem, found.where) if problem else found._replace(text=text, language=language)


def open_source(text: str) -> list[Unit]:
    """Return the units of a folder, a file or several, sorted by name; the content tells the kind."""
    folder = Location.parse(text)
    if folder.is_local and (Path(text) / "corpus.json").is_file():
        raise DatasetError(f"{folder} is a sharded corpus: train on it, or name the sources it was made from.")
    if folder.is_local and any((Path(text) / name).is_file() for name in METADATA_FILES):
        return _folder_units(Path(text))
    root, entries = _files(text)
    tars, tables, lines = (
        [entry for entry in entries if entry.location.name.lower().endswith(suffixes)]
        for suffixes in (TARS, (".parquet",), LINES)
    )
    if folder.is_local and Path(text).is_dir() and not (tars or tables or lines):
        return _folder_units(Path(text))
    pairs, unpaired = _pairs(tars, lines)
    if pairs and not unpaired:
        lines = []
    kinds = {"tar archives": tars, "Parquet files": tables, "manifests": lines}
    present = [f"{len(found)} {kind}" for kind, found in kinds.items() if found]
    if len(present) != 1:
        names = Counter(PurePosixPath(entry.location.name).suffix or "no suffix" for entry in entries)
        held = ", ".join(f"{count} files with {suffix}" for suffix, count in names.most_common(5))
        what = f"{folder} holds {' and '.join(present)}: name one kind" if present else f"{folder} holds {held}"
        raise DatasetError(f"{what}.\nUnderstood are:\n{FORMS}\n{FOLDERS if not present else ''}".rstrip())
    if tables:
        with ThreadPoolExecutor(16) as pool:
            parts: Iterable[list[Unit]] = list(pool.map(partial(_table_units, root), tables))
    elif lines:
        parts = [_manifest_units(root, entry) for entry in lines]
    else:
        parts = [[_tar_unit(root, tar, pairs.get(tar))] for tar in tars]
    return sorted(itertools.chain.from_iterable(parts), key=lambda unit: (unit.name, unit.key))


def _files(text: str) -> tuple[Location, list[Entry]]:
    """Return where the names of units begin, and every file that the text names or its folder holds."""
    if re.search(r"\{[^{}]*(,|\.\.)[^{}]*\}", text) and not Path(text).exists():
        fixed = text.partition("{")[0].rpartition("/")[0]
        locations = [Location.parse(name) for name in itertools.islice(_expanded(text), MAX_FILES + 1)]
        if len(locations) > MAX_FILES:
            raise DatasetError(f"{Location.parse(text)} names more than {MAX_FILES:,} files.")
        with ThreadPoolExecutor(16) as pool:
            return Location.parse(fixed), list(pool.map(Location.entry, locations))
    location = Location.parse(text)
    is_file = location.name.lower().endswith((*TARS, ".parquet", *LINES))
    if Path(location.path).is_file() if location.is_local else is_file:
        return location.parent, [location.entry()]
    if location.is_local and not Path(location.path).is_dir():
        raise DatasetError(f"No such file or folder: {Path(text).absolute()}\nUnderstood are:\n{FORMS}")
    entries = location.list()
    if len(entries) > 1:  # other JSON files describe a dataset as a whole
        is_other = re.compile(r"(?!.*manifest).*\.json(\.gz)?")
        entries = [entry for entry in entries if not is_other.fullmatch(entry.location.name)]
    if not entries:
        raise DatasetError(f"{location} is empty or does not exist.\nUnderstood are:\n{FORMS}")
    return location, entries


def _expanded(text: str) -> Iterator[str]:
    """Yield `a-08`, `a-09`, `a-10` for `a-{08..10}` and `a-x`, `a-y` for `a-{x,y}`."""
    found = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", text)
    if found is None:
        yield text
        return
    first, last, words = found.groups()
    values: Iterable[str] = (
        words.split(",") if words else (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    )
    for value in values:
        yield from _expanded(text[: found.start()] + value + text[found.end() :])


def _relative(root: Location, location: Location) -> str:
    if location.is_local:
        return os.path.relpath(location.path, root.path)
    return location.path.removeprefix(f"{root.path}/" if root.path else "")


def _key(*parts: object) -> str:
    return f"{hash64(*parts):016x}"


def _pairs(tars: Sequence[Entry], lines: Sequence[Entry]) -> tuple[dict[Entry, Entry], list[Entry]]:
    """Return the manifest of each tar that has one, and manifests without a tar."""
    by_name = {_stem(entry): entry for entry in tars}
    pairs, unpaired = {}, []
    for entry in lines:
        stem = _stem(entry)
        folder, _, name = stem.rpartition("/")
        names = [name, re.sub("^cuts", "recording", name), re.sub("^manifest", "audio", name)]
        tar = next((tar for other in names if (tar := by_name.get(f"{folder}/{other}"))), None)
        if tar is None:
            unpaired.append(entry)
        else:
            pairs[tar] = entry
    return pairs, unpaired


def _stem(entry: Entry) -> str:
    path = f"/{entry.location.path}"
    return next((path[: -len(end)] for end in (*TARS, *LINES) if path.lower().endswith(end)), path)


# Folders


def _folder_units(folder: Path) -> list[Unit]:
    corpus = read_corpus(folder)
    units = [
        _Unit(name, _key(*[clip[:5] + clip[7:9] for clip in clips]), sum(clip.size_bytes for clip in clips),
              partial(_read_clips, folder, clips))  # the line of the metadata does not count
        for name, clips in _slices("", corpus.clips, lambda clip: (clip.speaker, clip.id))
    ]  # fmt: skip
    if corpus.set_aside:
        units.append(_Unit("set aside", _key(*corpus.set_aside), 0, partial(list, corpus.set_aside)))
    return sorted(cast(list[Unit], units), key=lambda unit: (unit.name, unit.key))


def _read_clips(folder: Path, clips: Sequence[Clip]) -> Iterator[Found]:
    for clip in clips:
        said = Recording(clip.id, clip.text, folder / clip.path, clip.speaker, clip.language, where=clip.where)
        yield said._replace(held_out=clip.held_out)


def _slices(
    source: str, items: Sequence[Item], name_of: Callable[[Item], tuple[str, str]]
) -> Iterator[tuple[str, list[Item]]]:
    """Yield slices with their names. The ids decide where slices end, so that a new clip changes only its own."""
    begun: list[Item] = []
    ordered = sorted(items, key=lambda item: name_of(item)[0])
    for item, after in zip(ordered, [*ordered[1:], None], strict=True):
        begun.append(item)
        is_end = hash64("slice", name_of(item)[1]) % SLICE_CLIPS == 0
        if after is None or len(begun) == 8 * SLICE_CLIPS or is_end:
            yield f"{source}#{'/'.join(name_of(begun[0]))}", begun
            begun = []


# Tar archives


def _tar_unit(root: Location, tar: Entry, manifest: Entry | None) -> Unit:
    name = _relative(root, tar.location)
    described = (manifest.size, manifest.version) if manifest else ()
    read = partial(_read_tar, tar.location, manifest.location if manifest else None)
    return _Unit(name, _key(name, tar.size, tar.version, *described), tar.size, read)


def _read_tar(tar: Location, manifest: Location | None) -> Iterator[Found]:
    rows: dict[str, list[_Row]] = defaultdict(list)
    for found in itertools.chain.from_iterable(
        _described(*line) for line in (_lines(manifest) if manifest else ())
    ):
        if isinstance(found, SetAside):
            yield found
        else:
            rows[_split(found.audio)[0] or found.cut].append(found)
    is_empty, names = True, {PurePosixPath(key).name: key for key in rows}
    for key, parts, where in _groups(tar):
        is_empty = False
        if isinstance(parts, SetAside):
            yield parts
        elif manifest is None:
            yield _from_parts(key, parts, where)
        elif "audio" in parts:
            described = rows.pop(key, None) or rows.pop(names.get(PurePosixPath(key).name, ""), None)
            for row in described or ():
                yield row.recording._replace(audio=parts["audio"])
            if not described:
                yield SetAside(key, "no text", f"{manifest} does not name this recording", where)
    for row in itertools.chain.from_iterable(rows.values()):
        missing = f"no member {row.audio or row.cut} in {tar}"
        yield SetAside(row.recording.id, "missing file", missing, row.recording.where)
    if is_empty:
        yield SetAside("", "empty archive", "the archive has no members with audio or text", str(tar))


def _from_parts(key: str, parts: Mapping[str, bytes], where: str) -> Found:
    """Return the recording that neighbouring members of one key make up."""
    if "audio" not in parts:
        return SetAside(key, "missing file", f"no {key}.wav or {key}.flac next to {where}", where)
    if "text" not in parts and "json" not in parts:
        return SetAside(key, "no text", f"no {key}.txt or {key}.json next to it", where)
    try:
        fields = json.loads(parts.get("json") or b"{}")
        text = parts["text"].decode("utf-8-sig") if "text" in parts else _value(fields, "text")
        if not isinstance(fields, dict):
            raise ValueError("the JSON is no object")
    except (ValueError, RecursionError, AttributeError) as error:
        return SetAside(key, "wrong encoding", f"the text cannot be read: {error}", where)
    speaker, language = _value(fields, "speaker"), _value(fields, "language")
    return Recording(key, text, parts["audio"], speaker, language, where=where)


class _Member(tarfile.TarInfo):
    """A member that reports damage, where tarfile sees the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        found = super().frombuf(buf, encoding, errors)
        if found.type not in tarfile.REGULAR_TYPES and found.size > MAX_TEXT_BYTES:
            raise tarfile.ReadError(f"a header of {found.size} bytes")
        return found

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> _Member:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} at byte {tar.offset}") from None


def _groups(location: Location) -> Iterator[tuple[str, dict[str, bytes] | SetAside, str]]:
    """Yield key, parts and place of neighbouring members with one key; damage as the last item."""
    current, parts, where = "", dict[str, bytes](), ""
    try:
        with location.open() as file, tarfile.open(fileobj=file, mode="r|*", tarinfo=_Member) as tar:
            for member in tar:
                place = f"{location.name}:{member.name}"
                key, kind = _split(member.name.removeprefix("./"))
                if member.isdir() or not kind:
                    continue
                if problem := _problem(member, kind):
                    yield key, SetAside(key, *problem, place), place
                    continue
                if (key != current or kind in parts) and parts:
                    yield current, parts, where
                    parts = {}
                content = cast(BinaryIO, tar.extractfile(member)).read()
                current, where = key, place if kind == "audio" or not parts else where
                parts[kind] = content
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        if parts:
            yield current, parts, where
        found = f"{error or 'it ends too early'}; what follows is lost"
        yield "", SetAside("", "damaged archive", found, str(location)), str(location)
        return
    if parts:
        yield current, parts, where


def _problem(member: tarfile.TarInfo, kind: str) -> tuple[str, str] | None:
    limit = MAX_AUDIO_BYTES if kind == "audio" else MAX_TEXT_BYTES
    if not member.isreg():
        return "unsafe member", "a link or a device in place of a file"
    if _leaves(member.name):
        return "unsafe name", "the name leaves its folder"
    return ("too large", f"{member.size} bytes, expected at most {limit}") if member.size > limit else None


def _leaves(name: str) -> bool:
    return name.startswith("/") or ".." in name.split("/")


def _split(name: str) -> tuple[str, str]:
    """Return the key of a member and what it holds; nothing that is read, if empty."""
    for suffixes, kind in ((EXTENSIONS, "audio"), ((".normalized.txt", ".txt"), "text"), ((".json",), "json")):
        for suffix in suffixes:
            if name.lower().endswith(suffix):
                return name[: -len(suffix)], kind
    return name, ""


# Manifests


class _Line(NamedTuple):
    """A line of a manifest and what its first recording says."""

    text: bytes
    where: str
    speaker: str
    id: str
    audio: tuple[str, ...]
    seconds: float


def _manifest_units(root: Location, manifest: Entry) -> list[Unit]:
    folder, source = manifest.location.parent, _relative(root, manifest.location)
    lines, is_usable = list[_Line](), False
    for text, where in _lines(manifest.location):
        rows = [found for found in _described(text, where) if isinstance(found, _Row)]
        is_usable = is_usable or bool(rows)
        speaker, clip = (rows[0].recording.speaker, rows[0].recording.id) if rows else ("", where)
        seconds = sum(row.recording.duration or 0.0 for row in rows)
        lines.append(_Line(text, where, speaker, clip, tuple(row.audio for row in rows), seconds))
    if not is_usable:
        raise _no_fields(manifest.location, lines)
    units: list[Unit] = []
    for name, chosen in _slices(source, lines, lambda line: (line.speaker, line.id)):
        packed = zlib.compress(b"\n".join(line.text for line in chosen), 1)
        stats = [_stat(folder, audio) for line in chosen for audio in line.audio]
        num_bytes = int(sum(line.seconds for line in chosen) * BYTES_PER_SECOND) or sum(size for size, _ in stats)
        num_bytes = num_bytes or BYTES_PER_CLIP * len(chosen)
        read = partial(_read_lines, folder, packed, [line.where for line in chosen])
        place = () if folder.is_local else (folder,)  # sizes and times of remote audio are not known
        units.append(_Unit(name, _key(packed, *stats, *place), num_bytes, read))
    return units


def _no_fields(manifest: Location, lines: Sequence[_Line]) -> DatasetError:
    expected = "Expected one JSON object a line, with the audio ({}) and the text ({})".format(
        *(", ".join(FIELDS[meaning]) for meaning in ("audio", "text"))
    )
    if not lines:
        return DatasetError(f"{manifest} is empty. {expected}.")
    try:
        fields = json.loads(lines[0].text)
        found = f"only the fields {', '.join(map(str, fields))}" if isinstance(fields, dict) else "no object"
    except (ValueError, RecursionError):
        found = f"no JSON: {lines[0].text[:60]!r}"
    return DatasetError(
        f"{manifest} has no usable line; the first holds {found[:300]}.\n{expected}, or a cut of lhotse."
    )


def _stat(folder: Location, audio: str) -> tuple[int, str]:
    """Return size and version of a local file; remote ones would take a request each."""
    path = Path(folder.path) / audio
    try:
        stat = path.stat() if folder.is_local else None
    except (OSError, ValueError):  # ValueError: a NUL byte
        stat = None
    return (stat.st_size, str(stat.st_mtime_ns)) if stat else (0, "")


def _lines(location: Location) -> Iterator[tuple[bytes, str]]:
    """Yield the lines that are not blank, each with its place."""
    try:
        with location.open() as raw, gzip.open(raw) if location.name.endswith(".gz") else raw as file:
            name = location.name
            for number in itertools.count(1):
                line = file.readline(MAX_TEXT_BYTES)
                if not line:
                    return
                if line.strip():
                    yield line.strip(), f"{name}:{number}"
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DatasetError(f"{location} is damaged: {error}. Restore it, or write it again.") from None


def _described(line: bytes, where: str) -> Iterator[_Row | SetAside]:
    """Yield the recordings that a line describes."""
    try:
        fields = json.loads(line.decode("utf-8-sig"))
        if not isinstance(fields, dict):
            raise ValueError("no JSON object")
        if "supervisions" in fields:
            yield from _cut(fields, where)
            return
        audio, text = _value(fields, "audio"), _value(fields, "text")
        if not audio:
            raise ValueError(f"no audio in the fields {', '.join(fields)}"[:200])
        if not any(name in fields for name in FIELDS["text"]):
            raise ValueError(f"no text in the fields {', '.join(fields)}"[:200])
        times = [_value(fields, name) for name in ("start", "duration")]
        start, duration = (float(given) if given else None for given in times)
        place, _, query = audio.partition("?") if "://" in audio else (audio, "", "")
        path = "/".join(part for part in without_secrets(place).split("/") if part not in ("", ".", ".."))
        own = (f"-{hash64(query):016x}" if query else "") + (f"@{start:g}" if start else "")
        name = _value(fields, "id") or _split(path)[0] + own
        speaker, language = _value(fields, "speaker"), _value(fields, "language")
        yield _Row(Recording(name, text, b"", speaker, language, start or 0.0, duration, where), audio)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        yield SetAside("", "malformed line", str(error), where)


def _cut(cut: Mapping[str, Any], where: str) -> Iterator[_Row | SetAside]:
    """Yield the supervised parts of a cut of lhotse."""
    recording, name = cut.get("recording") or {}, str(cut["id"])
    kind = str(cut.get("type", "MonoCut"))
    if kind not in ("MonoCut", "MultiCut") or recording.get("transforms"):
        what = f"{kind} or a recording with transforms; save the audio of such cuts first"
        yield SetAside(name, "unsupported cut", what, where)
        return
    source = (recording.get("sources") or [{}])[0]
    if source.get("type", "shar") not in ("file", "url", "shar"):
        yield SetAside(name, "unsupported cut", f"audio from a {source.get('type')}", where)
        return
    audio = "" if source.get("type", "shar") == "shar" else str(source["source"])
    said = cut["supervisions"] or []
    if not said:
        yield SetAside(name, "no text", "the cut has no supervisions", where)
    for number, part in enumerate(said):
        start = max(float(cut.get("start", 0)) + float(part.get("start", 0)), 0.0)
        speaker, language = str(part.get("speaker") or ""), str(part.get("language") or "")
        own = name if len(said) == 1 else f"{name}-{number}"
        text, duration = str(part.get("text") or ""), float(part["duration"])
        yield _Row(Recording(own, text, b"", speaker, language, start, duration, where), audio, name)


def _value(fields: Mapping[str, Any], meaning: str) -> str:
    """Return the first field of a meaning that holds a word or a number."""
    values = (fields.get(name) for name in FIELDS[meaning])
    return next(
        (str(value) for value in values if isinstance(value, str | int | float) and str(value).strip()), ""
    )


def _read_lines(folder: Location, packed: bytes, places: Sequence[str]) -> Iterator[Found]:
    last: tuple[str, bytes | Path] = ("", b"")  # pieces of one long recording follow each other
    for line, where in zip(zlib.decompress(packed).split(b"\n"), places, strict=True):
        for found in _described(line, where):
            if isinstance(found, SetAside):
                yield found
                continue
            if found.audio != last[0] or not last[1]:
                audio = _audio(folder, found.audio)
                if isinstance(audio, SetAside):
                    yield audio._replace(id=found.recording.id, where=where)
                    continue
                last = (found.audio, audio)
            yield found.recording._replace(audio=last[1])


def _audio(folder: Location, name: str) -> bytes | Path | SetAside:
    """Return the audio that a manifest in `folder` names; a remote one may name only what is below it."""
    is_url = "://" in name
    if not folder.is_local and (is_url or not name or _leaves(name)):
        below = f"{folder}/"
        if not name.startswith(below) or _leaves(name.removeprefix(below)):
            return SetAside("", "unsafe name", f"{name} is not below {folder}", "")
        name, is_url = name.removeprefix(below), False
    try:
        location = replace(Location.parse(name), is_trusted=False) if is_url else folder / name
        if location.is_local:
            path = Path(folder.path) / name
            return path if path.is_file() else SetAside("", "missing file", f"no regular file {path}", "")
        if (size := location.entry().size) > MAX_AUDIO_BYTES:
            return SetAside("", "too large", f"{size} bytes, expected at most {MAX_AUDIO_BYTES}", "")
        return location.read()
    except MissingObject as error:
        return SetAside("", "missing file", str(error), "")
    except (ValueError, ConfigError) as error:  # ValueError: a NUL byte
        return SetAside("", "unsafe name", str(error), "")


# Parquet


def _table_units(root: Location, entry: Entry) -> list[Unit]:
    """Return the units of one file: runs of row groups."""
    name = _relative(root, entry.location)
    with entry.location.open_random() as file:
        metadata = _opened(entry.location, file)[0].metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    units, begun, num_bytes, first_row, rows = list[Unit](), list[int](), 0, 0, 0
    for number, group in enumerate(groups):
        begun, num_bytes, rows = [*begun, number], num_bytes + group.total_byte_size, rows + group.num_rows
        if num_bytes >= SLICE_BYTES or number == len(groups) - 1:
            read = partial(_read_table, entry.location, begun, first_row)
            key = _key(name, entry.size, entry.version, *begun)
            units.append(_Unit(f"{name}#{begun[0]:05d}", key, num_bytes, read))
            begun, num_bytes, first_row = [], 0, rows
    return units


def _opened(location: Location, file: BinaryIO) -> tuple[Any, dict[str, str]]:
    """Return the Parquet file and the names of its columns by meaning."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DatasetError(f"Parquet files need pyarrow: run {INSTALL_EXTRA.format('parquet')} first.") from None
    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowException as error:
        raise DatasetError(f"{location} is no Parquet file, or damaged: {error}") from None
    types = {column.name: column.type for column in table.schema_arrow}
    columns = {
        meaning: found
        for meaning in ("audio", "text", "speaker", "language")
        if (found := next((name for name in FIELDS[meaning] if name in types), None))
    }
    if "language" in columns and not pyarrow.types.is_string(types[columns["language"]]):  # a number of a list
        del columns["language"]
    for meaning in ("audio", "text"):
        if meaning not in columns:
            expected = f"expected one of {', '.join(FIELDS[meaning])}"
            raise DatasetError(f"{location} has no column for the {meaning}, only {', '.join(types)}; {expected}.")
    return table, columns


def _read_table(location: Location, groups: Sequence[int], row: int) -> Iterator[Found]:
    import pyarrow

    with location.open_random() as file:
        table, columns = _opened(location, file)
        try:
            for batch in table.iter_batches(ROWS_PER_READ, row_groups=groups, columns=[*columns.values()]):
                for values in batch.to_pylist():
                    yield _from_row({name: values[column] for name, column in columns.items()}, location, row)
                    row += 1
        except (pyarrow.ArrowException, OSError) as error:
            where = f"{location.name}:{row}"
            yield SetAside("", "damaged archive", f"{error}; what follows in these row groups is lost", where)


def _from_row(values: Mapping[str, Any], location: Location, row: int) -> Found:
    audio, where = values["audio"], f"{location.name}:{row}"
    held = audio if isinstance(audio, dict) else {"bytes" if isinstance(audio, bytes) else "path": audio}
    path = str(held.get("path") or "")
    name = f"{row:06d}-{PurePosixPath(without_secrets(path).partition('?')[0]).stem}".rstrip("-")
    content: bytes | Path | SetAside = held.get("bytes") or b""
    if not content and path:
        is_outside = _leaves(path) or "://" in path
        unsafe = SetAside(name, "unsafe name", f"{path} leaves the folder of the table", where)
        content = unsafe if is_outside else _audio(location.parent, path)
    if isinstance(content, SetAside):
        return content._replace(id=name, where=where)
    if len(content) > MAX_AUDIO_BYTES if isinstance(content, bytes) else False:
        return SetAside(name, "too large", f"more than {MAX_AUDIO_BYTES} bytes of audio", where)
    text, speaker, language = (str(values.get(part) or "") for part in ("text", "speaker", "language"))
    return Recording(name, text, content, speaker, language, where=where)
