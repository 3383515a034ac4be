"""Sharded corpora: one corpus in many parts of about a gigabyte, local or remote, under one mapped index.

    corpus.json       settings, sources, shards with sizes and checksums of their files; replaced at once
    vocab.json        the tokenizer of the corpus
    shards/NAME/      audio.bin: samples; clips.npy: a column for each number of a clip; clips.jsonl: spoken text,
                      id, written text and place of each clip; set_aside.csv
    ids-VOCABULARY/   NAME/ of each shard: ids.bin, clips.npy; index-KEY/: their columns joined
    index-KEY/        the columns of all shards, joined; speakers.json; set_aside.csv

Every folder is a package: it is committed once, its meta.json last, and never changes. A shard is named by a hash
of what it is made from, and an index by a hash of the names of its shards. So new recordings add packages, and
only corpus.json is replaced. Ids of another vocabulary than the corpus' own are such a folder in the cache.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import itertools
import json
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from myxtts.audio import DECODE_VERSION, LIBRARIES, Pcm, UnusableAudio, refuse_silence
from myxtts.config import LANGUAGES, SAMPLE_RATE, DataSettings
from myxtts.data.clips import (
    DecodeOptions,
    LabelledText,
    LazyNames,
    Problem,
    beyond,
    set_aside_csv,
    spoken,
    token_ids,
)
from myxtts.data.corpus import SetAside
from myxtts.data.locations import FileCache, Location, MissingObject, Wanted
from myxtts.data.store import (
    Array,
    CacheDamaged,
    OpenFile,
    PackedRows,
    Rows,
    checked_json,
    hash64,
    mark_damaged,
    meta_hash,
    only_process,
    pack,
    user_cache,
)
from myxtts.errors import ConfigError, DatasetError, Progress, progress_bar
from myxtts.files import sync_path
from myxtts.text.language import detect_languages, language_fingerprint
from myxtts.text.normalize import normalize_fingerprint, phonemes_fingerprint
from myxtts.text.tokenizer import Tokenizer, tokenizer_fingerprint

if TYPE_CHECKING:  # a second start needs no sources
    from myxtts.data.sources import Recording, Unit

FORMAT = 1
CLIP_COLUMNS = {
    "draw": "<u8", "offset": "<i8", "hash": "<u8", "shard": "<i4", "num_samples": "<i4", "speaker": "<i4",
    "source": "<i2", "language": "|i1", "held_out": "|i1",
}  # fmt: skip
IDS_COLUMNS = {"offset": "<i8", "hash": "<u8", "num_ids": "<i4"}
"""What the index knows of a clip, 40 and 20 bytes. `draw` is the hash of the text by which clips are held out. The
widest columns come first, so that each is aligned."""
CLIPS_PER_WRITE, TEXTS_PER_CALL = 32, 512
OPEN_FILES = 64  # of each reader: four windows of 16 shards
MOST_SENTENCES = 500_000  # that a vocabulary is trained on
_SHARDS_OF_TEXTS = 4  # whose texts are kept in memory

Columns = dict[str, Array]


def columns_bytes(dtypes: Mapping[str, str]) -> int:
    """Return the bytes of a clip."""
    return sum(np.dtype(dtype).itemsize for dtype in dtypes.values())


def create_columns(path: Path, dtypes: Mapping[str, str], count: int) -> Columns:
    """Return the columns of a new file, mapped: one after another in one array of bytes."""
    size = columns_bytes(dtypes) * count
    if size == 0:  # an empty file cannot be mapped
        np.save(path, np.zeros(0, np.uint8), allow_pickle=False)
        return {name: np.zeros(0, dtype) for name, dtype in dtypes.items()}
    mapped = np.lib.format.open_memmap(path, "w+", np.uint8, (size,))
    with open(path, "r+b") as file:  # a mapped write to a full disk would kill the process
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return _split(mapped, dtypes)


def open_columns(path: Path, dtypes: Mapping[str, str]) -> Columns:
    """Return the columns of a file: mapped, so that only what is used is read."""
    content = np.load(path, mmap_mode="r" if path.stat().st_size > 4096 else None, allow_pickle=False)
    return _split(content, dtypes)


def _split(content: Array, dtypes: Mapping[str, str]) -> Columns:
    count = len(content) // columns_bytes(dtypes)
    ends = np.cumsum([0, *(count * np.dtype(dtype).itemsize for dtype in dtypes.values())]).tolist()
    places = zip(dtypes.items(), itertools.pairwise(ends), strict=True)
    return {name: np.asarray(content[first:end]).view(dtype) for (name, dtype), (first, end) in places}


# Packages


@dataclass(frozen=True)
class Package:
    """A folder that was committed as a whole, with size and checksum of each file, and facts about it."""

    location: Location
    files: dict[str, tuple[int, str]]
    facts: dict[str, Any]

    @classmethod
    def find(cls, location: Location) -> Package | None:
        """Return the package at a location; None if there is none, or only a damaged one."""
        try:
            body = read_checked(location / "meta.json")
        except MissingObject:
            return None
        if location.is_local and Path(location.path, "damaged").exists():
            return None
        return cls(
            location, {name: (size, digest) for name, (size, digest) in body["files"].items()}, body["facts"]
        )

    @classmethod
    def require(cls, location: Location) -> Package:
        """Return the package at a location; raise if there is none."""
        if (found := cls.find(location)) is None:
            raise CacheDamaged(_damaged(location / "meta.json"))
        return found

    def wanted(self, name: str) -> Wanted:
        return (self.location / name, *self.files[name])

    def read(self, name: str) -> bytes:
        content = (self.location / name).read()
        if (len(content), xxhash.xxh3_128_hexdigest(content)) != self.files[name]:
            raise CacheDamaged(_damaged(self.location / name))
        return content

    def columns(self, dtypes: Mapping[str, str], cache: FileCache | None = None) -> Columns:
        """Return the columns of clips.npy, mapped if they are local or in a cache."""
        if cache is None and not self.location.is_local:
            return _split(np.load(io.BytesIO(self.read("clips.npy")), allow_pickle=False), dtypes)
        location, size, digest = self.wanted("clips.npy")
        for _ in range(2):  # a copy in the cache may be damaged
            with contextlib.suppress(FileNotFoundError):
                opened = cache.open(location, size, digest) if cache else os.open(location.path, os.O_RDONLY)
                file = OpenFile(opened)  # mapped before another process can remove it from the cache
                if file_checksum(path := Path(f"/proc/self/fd/{file.descriptor}")) == (size, digest):
                    return open_columns(path, dtypes)
            if cache is not None and not location.is_local:
                cache.drop(digest)
        raise CacheDamaged(_damaged(location))

    def set_aside(self) -> list[SetAside]:
        lines = csv.reader(io.StringIO(self.read("set_aside.csv").decode()), delimiter="|")
        return [SetAside(*line) for line in lines][1:]


def read_checked(location: Location) -> dict[str, Any]:
    """Return the body of a JSON file that holds its own checksum."""
    try:
        content = json.loads(location.read())
        if content["hash"] == meta_hash(content["body"]):
            return dict(content["body"])
    except (ValueError, KeyError, TypeError):
        pass
    raise CacheDamaged(_damaged(location))


def file_checksum(path: Path) -> tuple[int, str]:
    digest, block, size = xxhash.xxh3_128(), memoryview(bytearray(1 << 20)), 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
    return size, digest.hexdigest()


def _damaged(location: Location) -> str:
    what = location if location.name == "corpus.json" else location.parent
    advice = f"Remove {what} and run myxtts prepare with the same sources: only that is made again."
    return f"{location} does not match its checksum (truncated, or a failing disk?).\n{advice}"


@contextlib.contextmanager
def package_under_way(target: Location) -> Iterator[Path]:
    """Give a new folder for the files of a package; it is gone afterwards, even if the process is killed.

    A folder is on the disk of its target, so that it can be renamed, and locked while its process lives.
    """
    place = Path(target.parent.path) if target.is_local else user_cache() / "uploads"
    with only_process(place, ".making"):
        folder = place / f"making-{uuid.uuid4().hex}"
        folder.mkdir()
        lock = open(folder / "lock", "wb")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        lock.close()
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(corpus: Location) -> None:
    """Remove the unfinished packages of processes that were killed."""
    places = [user_cache() / "uploads"]
    if corpus.is_local:
        places = [Path(corpus.path), *(path for path in Path(corpus.path).glob("*") if path.is_dir())]
    for place in places:
        if not list(place.glob("making-*")):
            continue
        with only_process(place, ".making"):
            for folder in place.glob("making-*"):
                with contextlib.suppress(OSError), open(folder / "lock", "ab") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if its process lives
                    shutil.rmtree(folder)


def commit(folder: Path, target: Location, facts: Mapping[str, object]) -> Package:
    """Make the files of a folder the package at `target`, unless another process was faster; return it."""
    names = sorted(path.name for path in folder.iterdir() if path.name != "lock")
    files = {name: file_checksum(folder / name) for name in names}
    (folder / "meta.json").write_bytes(checked_json({"files": files, "facts": dict(facts)}))
    if not target.is_local:
        if Package.find(target) is None:
            for name in (*names, "meta.json"):
                (target / name).upload(folder / name)
    else:
        for name in (*names, "meta.json"):
            sync_path(folder / name)
        (folder / "lock").unlink()
        if (place := Path(target.path)).exists() and Package.find(target) is None:  # damaged
            shutil.rmtree(place)
        with contextlib.suppress(OSError):  # another process was faster
            folder.rename(place)
        sync_path(place.parent)
    found = Package.find(target)
    if found is None:
        raise DatasetError(f"Cannot write {target}: it is not there after it was written. Is the disk failing?")
    return found


# Shards


@dataclass(frozen=True)
class ShardSpec:
    """What a shard is made from; it can be sent to another machine."""

    units: tuple[Unit, ...]
    source: int  # number of the source in the corpus
    label: str  # what ids and speakers begin with; empty for the first source
    speakers: str
    language: str | None  # of recordings that name none; else it is detected
    options: DecodeOptions
    use_phonemes: bool
    person: str = ""  # who speaks in all recordings without a name

    @property
    def params(self) -> dict[str, object]:
        """What decides the content besides the recordings."""
        phonemes = phonemes_fingerprint() if self.use_phonemes else ""
        versions = (FORMAT, DECODE_VERSION, LIBRARIES, SAMPLE_RATE, normalize_fingerprint(), phonemes)
        own = (self.source, self.label, self.speakers, self.language, self.language or language_fingerprint())
        person = {"person": self.person} if self.person else {}
        return {"versions": versions, "own": own, **person, **asdict(self.options)}

    @property
    def name(self) -> str:
        made_from = [self.params, [(unit.name, unit.key) for unit in self.units]]
        return xxhash.xxh3_128_hexdigest(json.dumps(made_from).encode())[:20]


Report = Callable[[int], object]
"""Called with the number of each recording before it is decoded."""


class _Clips:
    """The clips of a shard that is being written."""

    def __init__(self, folder: Path, spec: ShardSpec) -> None:
        self.folder, self.spec = folder, spec
        self.recordings: list[Recording] = []
        self.set_aside: list[SetAside] = []
        self._records: list[Array] = []
        self._end = 0
        self._waiting: list[Pcm] = []

    def add(self, recording: Recording, number: int, skip: Collection[int]) -> None:
        if number in skip:
            self.drop(recording, ("crashed the decoder", "processing it kills the process"))
        else:
            try:
                pcm = self.spec.options.decode(recording.audio, recording.start, recording.duration)
                refuse_silence(pcm)
            except UnusableAudio as error:
                self.drop(recording, beyond(error.reason, error.detail))
            else:
                self.recordings.append(recording._replace(audio=b""))
                self._waiting.append(pcm)
        if len(self._waiting) >= CLIPS_PER_WRITE:
            self.write()

    def drop(self, recording: Recording, problem: Problem) -> None:
        self.set_aside.append(SetAside(self._prefix + recording.id, *problem, recording.where))

    @property
    def _prefix(self) -> str:
        return f"{self.spec.label}/" if self.spec.label else ""

    def write(self) -> None:
        block, records = pack(self._waiting)
        records["offset"] += np.uint64(self._end)
        with open(self.folder / "audio.bin", "ab") as file:
            file.write(block)
        self._end += len(block)
        self._records.append(records)
        self._waiting = []

    def finish(self) -> dict[str, object]:
        """Write all but the samples; return the facts of the shard."""
        self.write()
        records, count, spec = np.concatenate(self._records), len(self.recordings), self.spec
        start = f"{spec.speakers}/" if spec.speakers else ""
        speakers = [start + one.speaker if one.speaker else spec.person for one in self.recordings]
        names = sorted(set(speakers))
        numbers = {name: number for number, name in enumerate(names)}
        languages = self._languages(speakers)
        with open(self.folder / "clips.jsonl", "w", encoding="utf-8", errors="surrogatepass") as file:
            for one, language in zip(self.recordings, languages, strict=True):
                found = spoken(one.text, language, spec.use_phonemes)
                if not isinstance(found, str):
                    self.drop(one, found)
                said = found if isinstance(found, str) else ""
                line = [said, self._prefix + one.id, one.text, one.where]
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        columns = create_columns(self.folder / "clips.npy", CLIP_COLUMNS, count)
        columns["draw"][:] = np.fromiter(
            (hash64("held out", one.text) for one in self.recordings), np.uint64, count
        )
        columns["offset"][:], columns["hash"][:] = records["offset"], records["hash"]
        columns["num_samples"][:] = records["length"]
        columns["speaker"][:] = [numbers[name] for name in speakers]
        columns["source"][:] = spec.source
        columns["language"][:] = [LANGUAGES.index(code) for code in languages]
        columns["held_out"][:] = [one.held_out for one in self.recordings]
        (self.folder / "set_aside.csv").write_bytes(set_aside_csv(self.set_aside))
        units = [(unit.name, unit.key) for unit in spec.units]
        return {"clips": count, "speakers": names, "set_aside": len(self.set_aside), "units": units}

    def _languages(self, speakers: Sequence[str]) -> list[str]:
        """Return the language of every clip: from the source, the settings, or detected within the shard."""
        found = [one.language or self.spec.language or "" for one in self.recordings]
        unknown = [at for at, code in enumerate(found) if not code]
        if unknown:
            texts = [self.recordings[at].text for at in unknown]
            detected = detect_languages(texts, [speakers[at] for at in unknown])
            for at, code in zip(unknown, detected, strict=True):
                found[at] = code
        return found


def write_shard(spec: ShardSpec, target: Location, report: Report, skip: Collection[int] = ()) -> Package:
    """Make a shard and commit it; recordings with a number in `skip` are set aside, for they kill the process."""
    with package_under_way(target) as folder:
        clips = _Clips(folder, spec)
        items = itertools.chain.from_iterable(unit.recordings() for unit in spec.units)
        for number, item in enumerate(items):
            report(number)
            if isinstance(item, SetAside):
                clips.set_aside.append(item._replace(id=clips._prefix + item.id))
            else:
                clips.add(item, number, skip)
        return commit(folder, target, clips.finish())


# Ids


def ids_folder(tokenizer: Tokenizer) -> str:
    return f"ids-{hash64(tokenizer.fingerprint, tokenizer_fingerprint()):016x}"


def write_ids(shard: Location, target: Location, tokenizer: Tokenizer) -> Package:
    """Make and commit the ids of a shard; a clip without usable ids has none."""
    if (known := Package.find(target)) is not None:
        return known
    package = Package.require(shard)
    lines = read_lines(package)
    languages = package.columns(CLIP_COLUMNS)["language"].tolist()
    set_aside: list[SetAside] = []
    with package_under_way(target) as folder, open(folder / "ids.bin", "wb") as file:
        columns = create_columns(folder / "clips.npy", IDS_COLUMNS, len(lines))
        usable = [at for at, line in enumerate(lines) if line[0]]
        for first in range(0, len(usable), TEXTS_PER_CALL):
            chunk = usable[first : first + TEXTS_PER_CALL]
            ids, problems = token_ids(
                tokenizer, [LabelledText(lines[at][0], LANGUAGES[languages[at]]) for at in chunk]
            )
            set_aside += [SetAside(lines[chunk[at]][1], *why, lines[chunk[at]][3]) for at, why in problems.items()]
            block, records = pack([row if at not in problems else row[:0] for at, row in enumerate(ids)])
            columns["offset"][chunk] = records["offset"] + np.uint64(file.tell())
            columns["hash"][chunk], columns["num_ids"][chunk] = records["hash"], records["length"]
            file.write(block)
        file.flush()
        (folder / "set_aside.csv").write_bytes(set_aside_csv(set_aside))
        return commit(folder, target, {"clips": len(lines), "set_aside": len(set_aside)})


def read_lines(package: Package) -> list[list[str]]:
    """Return spoken text, id, written text and place of the clips of a shard."""
    text = package.read("clips.jsonl").decode("utf-8", "surrogatepass")
    return [json.loads(line) for line in text.split("\n")[:-1]]


# The index


def join_shards(shards: Sequence[Package], target: Location) -> Package:
    """Make and commit the index: the columns of all shards, their speakers, and what was set aside."""
    if (known := Package.find(target)) is not None:
        return known
    speakers = sorted({name for shard in shards for name in shard.facts["speakers"]})
    numbers = {name: number for number, name in enumerate(speakers)}
    with package_under_way(target) as folder:
        joined = create_columns(folder / "clips.npy", CLIP_COLUMNS, sum(shard.facts["clips"] for shard in shards))
        first = 0
        for number, shard in enumerate(shards):
            own, columns = slice(first, first + shard.facts["clips"]), shard.columns(CLIP_COLUMNS)
            for name, column in columns.items():
                joined[name][own] = column
            joined["shard"][own] = number
            new = np.array([numbers[name] for name in shard.facts["speakers"]], np.int32)
            joined["speaker"][own] = new[columns["speaker"]] if len(new) else 0
            first = own.stop
        (folder / "speakers.json").write_text(json.dumps(speakers), encoding="utf-8")
        aside = [item for shard in shards if shard.facts["set_aside"] for item in shard.set_aside()]
        (folder / "set_aside.csv").write_bytes(set_aside_csv(aside))
        return commit(folder, target, {"clips": first, "speakers": len(speakers)})


def join_ids(parts: Sequence[Package], target: Location) -> Package:
    """Make and commit the joined columns of the ids of all shards."""
    if (known := Package.find(target)) is not None:
        return known
    each = [part.columns(IDS_COLUMNS) for part in parts]
    with package_under_way(target) as folder:
        joined = create_columns(folder / "clips.npy", IDS_COLUMNS, sum(len(one["num_ids"]) for one in each))
        for name, column in joined.items():
            if each:
                np.concatenate([one[name] for one in each], out=column)
        aside = [item for part in parts if part.facts["set_aside"] for item in part.set_aside()]
        (folder / "set_aside.csv").write_bytes(set_aside_csv(aside))
        return commit(folder, target, {"files": [part.files["ids.bin"] for part in parts]})


# Reading


class Shards(PackedRows):
    """The rows of many packages, of which a few are open at a time; remote ones are fetched into a cache."""

    def __init__(
        self, columns: Columns, length: str, shards: Rows, files: Sequence[Wanted], dtype: str, cache: FileCache
    ) -> None:
        """`columns` has the place, length and hash of every row, and `shards` the number of its file."""
        self.ahead: list[list[Wanted]] = [[file] for file in files]
        """What is read of each shard, in other stores too."""
        self.dtype = np.dtype(dtype)
        self.lengths, self.hashes, self._offsets = columns[length], columns["hash"], columns["offset"]
        self.shards, self.files, self.cache = shards, files, cache
        self._verified = np.zeros(len(shards), bool)
        self._open: dict[int, OpenFile] = {}
        self._lock = threading.Lock()

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def fetch_ahead(self, shards: Sequence[int]) -> None:
        """Fetch what is read of these shards in the background, in this order."""
        self.cache.fetch_ahead([wanted for shard in shards for wanted in self.ahead[shard]])

    def _file_of(self, row: int) -> OpenFile:
        shard = int(self.shards[row])
        if (found := self._open.get(shard)) is not None:
            return found
        try:  # fetched without the lock, so that other threads go on reading
            file = OpenFile(self.cache.open(*self.files[shard]))
        except OSError as error:
            location = self.files[shard][0]
            what = f"{location} cannot be read: {error.strerror or error}."
            if isinstance(error, FileNotFoundError):
                mark_damaged(Path(location.parent.path))
                what += " If it was pruned (prepare --prune), start again."
            raise CacheDamaged(f"{what}\n{_how_to_repair(location)}") from None
        with self._lock:
            self._open[shard] = file
            while len(self._open) > OPEN_FILES:
                del self._open[next(iter(self._open))]  # the oldest; closed when the last thread has read from it
        return file

    def _recover(self, row: int, offset: int, out: memoryview) -> None:
        location, _, digest = self.files[shard := int(self.shards[row])]
        if not location.is_local:  # damaged on its way or in the cache
            self.cache.drop(digest)
            with self._lock:
                self._open.pop(shard, None)
            if self.is_intact(row) and self._is_read(row, offset, out, True):
                return
        else:
            mark_damaged(Path(location.parent.path))
        found = f"{location}: a clip at byte {self._offsets[row]} does not match its checksum"
        raise CacheDamaged(f"{found} (truncated, or a failing disk?).\n{_how_to_repair(location)}")


def _how_to_repair(location: Location) -> str:
    """What to do about a shard, by one of its files; a damaged local one has been marked."""
    folder = location.parent
    first = "" if location.is_local else f"Remove {folder}. "
    again = f"Run myxtts prepare --out {folder.parent.parent} with the same sources and settings again"
    return f"{first}{again}: only shard {folder.name} is made again."


class ShardNames(LazyNames):
    """Names and texts of clips, read from their shards."""

    def __init__(
        self, index: Columns, starts: Rows, packages: Callable[[int], Package], rows: Rows, start: str
    ) -> None:
        self._index, self._starts, self._packages, self.rows, self._start = index, starts, packages, rows, start
        self._lines = lru_cache(_SHARDS_OF_TEXTS)(lambda shard: read_lines(packages(shard)))

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, at: int) -> str:
        return self._start + self._line(at)[1]

    def text(self, at: int) -> str:
        return self._line(at)[2]

    def _line(self, at: int) -> list[str]:
        row = int(self.rows[at])
        shard = int(self._index["shard"][row])
        return self._lines(shard)[row - int(self._starts[shard])]

    @property
    def draws(self) -> Array:
        return self._index["draw"][self.rows]

    def select(self, chosen: Rows) -> ShardNames:
        rows = chosen if len(self.rows) == len(self._index["shard"]) else self.rows[chosen]
        return ShardNames(self._index, self._starts, self._packages, rows, self._start)


def url_of(folder: Path) -> str:
    """Return the URL that a path of the settings was made of, in which it lost a slash; or the path, absolute."""
    url = re.sub(r"^(s3|gs|[a-z]*tps?):/+", r"\1://", str(folder))  # ftp too, so that it is refused as a URL
    return url if "://" in url else str(folder.absolute())


def location_of(folder: Path) -> Location:
    return Location.parse(url_of(folder))


def refuse_query(corpus: Location) -> Location:
    if corpus.query:
        advice = "Name the corpus without it; credentials are read from the environment"
        raise ConfigError(f"{corpus}: a signed URL opens one file, and a corpus has many.\n{advice}.")
    return corpus


def is_sharded(folder: Path) -> bool:
    """True for a sharded corpus, and for every remote one."""
    return not location_of(folder).is_local or (folder / "corpus.json").is_file()


def content_settings(data: DataSettings) -> dict[str, object]:
    """Return the settings that decide the content of a corpus and must be the same when it is read."""
    return {"use_phonemes": data.use_phonemes, "trim_silence_db": data.trim_silence_db}


def read_corpus_file(location: Location) -> dict[str, Any] | None:
    """Return what corpus.json says; None if there is none."""
    try:
        body = read_checked(location / "corpus.json")
    except MissingObject:
        return None
    if body["format"] != FORMAT:
        raise DatasetError(f"{location} has format {body['format']}, this MyXTTS reads {FORMAT}: prepare it again")
    for name in (body["index"], *(shard["name"] for shard in body["shards"])):
        if not re.fullmatch("[0-9a-f]{20}", str(name)):  # folders of these names are replaced in the cache
            raise DatasetError(f"{location} names {name!r}, not 20 hexadecimal digits: do not use this corpus")
    return body


class ShardedCorpus:
    """A sharded corpus that is open: its index is mapped, its shards are opened when they are read."""

    def __init__(self, location: Location, cache: FileCache, body: Mapping[str, Any] | None = None) -> None:
        """`body` is what corpus.json will say of a corpus that is not finished."""
        self.location, self.cache = refuse_query(location), cache
        body = read_corpus_file(location) if body is None else body
        if body is None:
            advice = f"Make one with myxtts prepare --train-data SOURCE --out {location}."
            raise DatasetError(f"{location} is no sharded corpus: it has no corpus.json.\n{advice}")
        self.key, self.params = str(body["index"]), body["params"]
        self.shards: list[dict[str, Any]] = body["shards"]
        self._index = Package.require(location / f"index-{self.key}")
        self.index = self._index.columns(CLIP_COLUMNS, cache)
        self.speakers: list[str] = json.loads(self._index.read("speakers.json"))
        self.starts: Rows = np.cumsum([0, *(shard["clips"] for shard in self.shards)])[:-1]
        folder = location / "shards"
        files = [(folder / shard["name"] / "audio.bin", *shard["audio"]) for shard in self.shards]
        self.audio = Shards(self.index, "num_samples", self.index["shard"], files, "<i2", cache)

    @property
    def set_aside(self) -> list[SetAside]:
        return self._index.set_aside()

    def require(self, data: DataSettings, params: Mapping[str, Any] | None = None) -> None:
        """Raise if the corpus was made with other settings than these, as far as they decide its content."""
        known = self.params if params is None else params
        for name, value in content_settings(data).items():
            if known[name] != value:
                what = f"{self.location} was prepared with {name} {known[name]}, the settings say {value}"
                raise DatasetError(f"{what}.\nUse the same, or prepare another corpus.")

    def verify(self, progress: Progress) -> None:
        """Read every local shard; raise if some do not match their checksums, which are then made again."""
        damaged = []
        with progress_bar(progress, "Verifying shards", len(self.audio.files)) as advance:
            for location, *expected in self.audio.files if self.location.is_local else ():
                path = Path(location.path)
                if not path.is_file() or file_checksum(path) != tuple(expected):
                    mark_damaged(Path(location.parent.path))
                    damaged.append(location)
                advance(1)
        if damaged:
            found = f"{len(damaged)} shards do not match their checksums: {', '.join(map(str, damaged[:5]))}"
            raise CacheDamaged(f"{found}.\n{_how_to_repair(damaged[0])}")

    def sentences(self) -> list[LabelledText]:
        """Return what is spoken in at most `MOST_SENTENCES` clips, always the same."""
        draws = self.index["draw"]
        rows = np.arange(len(draws))
        if len(rows) > MOST_SENTENCES:
            rows = np.sort(np.argpartition(draws, MOST_SENTENCES)[:MOST_SENTENCES])
        found: dict[LabelledText, None] = {}
        for shard in np.unique(self.index["shard"][rows]).tolist():
            lines = read_lines(self.package(shard))
            for row in rows[self.index["shard"][rows] == shard].tolist():
                language = LANGUAGES[int(self.index["language"][row])]
                found[LabelledText(lines[row - int(self.starts[shard])][0], language)] = None
        return [sentence for sentence in found if sentence.text]

    def tokenizer(self) -> Tokenizer:
        return Tokenizer((self.location / "vocab.json").read().decode(), source=str(self.location / "vocab.json"))

    def package(self, shard: int) -> Package:
        """A shard itself, for its texts."""
        return Package.require(self.location / "shards" / self.shards[shard]["name"])

    def names(self, rows: Rows, start: str) -> ShardNames:
        return ShardNames(self.index, self.starts, self.package, rows, start)

    def ids(self, tokenizer: Tokenizer, cached: Path) -> tuple[Shards, list[SetAside]] | None:
        """Return the ids of a vocabulary and what it set aside, from the corpus or below `cached`, or None."""
        for place in (self.location, Location(str(cached))):
            folder = place / ids_folder(tokenizer)
            if (joined := Package.find(folder / f"index-{self.key}")) is not None:
                names, files = [shard["name"] for shard in self.shards], joined.facts["files"]
                wanted = [(folder / name / "ids.bin", *file) for name, file in zip(names, files, strict=True)]
                columns = joined.columns(IDS_COLUMNS, self.cache)
                rows = Shards(columns, "num_ids", self.index["shard"], wanted, "<i4", self.cache)
                self.audio.ahead = [list(files) for files in zip(wanted, self.audio.files, strict=True)]
                return rows, joined.set_aside()
        return None
