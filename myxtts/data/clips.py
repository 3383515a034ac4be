"""A prepared corpus: clips that can be batched, its snapshot on disk, and the list of clips set aside.

A snapshot lets a later start open an unchanged corpus without reading its metadata. It is a store like the others
and is believed only if every file and folder it was made from has the same times and sizes.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
from numpy.random import default_rng

from myxtts import audio
from myxtts.config import (
    AUTO_MEL_FRAMES,
    HOP_SAMPLES,
    LANGUAGES,
    SAMPLE_RATE,
    CorpusSource,
    DataSettings,
    mel_frames,
    num_frames_of,
)
from myxtts.data.corpus import Corpus, SetAside, last_change
from myxtts.data.store import (
    Array,
    CacheDamaged,
    Joined,
    PackedRows,
    Pieces,
    RowReader,
    Rows,
    Sources,
    Store,
    StoreSpec,
    StoreWriter,
    build_store,
    checksum,
    hash64,
    num_shards,
    open_store,
)
from myxtts.errors import ConfigError, DatasetError, printable
from myxtts.files import write_atomically
from myxtts.text.normalize import normalize, phonemize
from myxtts.text.tokenizer import Tokenizer, describe_characters

CLOCK_TICK_NS = 20_000_000
"""A folder that changed within this time before it was listed may have changed again at the same time stamp."""
MAX_TEXT_CHARACTERS = 4000
"""Longer texts are set aside unread: no clip is that long, and normalising one would stall a worker."""
Problem = tuple[str, str]  # why a clip is set aside (a fixed phrase), and what was found
_FRAME_STEP = 32
_TOO_LONG_SHARE = 0.001  # of the clips, which `max_mel_frames: auto` may set aside
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodeOptions:
    """The settings that decide the samples of a clip."""

    max_samples: int
    trim_silence_db: float

    @classmethod
    def of(cls, data: DataSettings) -> DecodeOptions:
        """Return the options for these settings; the longest clip has exactly `max_mel_frames` mel frames."""
        return cls(mel_frames(data) * HOP_SAMPLES - 1, data.trim_silence_db)

    @property
    def max_seconds(self) -> float:
        return self.max_samples / SAMPLE_RATE

    def decode(self, source: Path | bytes, start: float = 0.0, duration: float | None = None) -> audio.Pcm:
        return audio.decode(source, SAMPLE_RATE, self.max_seconds, self.trim_silence_db, start, duration)


def frames_for(num_samples: Rows, share: float = 1.0) -> int:
    """Return the frames, rounded up, in which this share of the clips fits."""
    lengths = np.append(num_samples[num_samples > 0] if share < 1 else num_samples.max(initial=0), 1)
    return -(-num_frames_of(int(np.quantile(lengths, share, method="higher"))) // _FRAME_STEP) * _FRAME_STEP


def max_frames_of(num_samples: Rows) -> int:
    """Return the longest clip that `auto` takes: a few that are far longer would widen every batch."""
    least, most = AUTO_MEL_FRAMES
    return min(max(frames_for(num_samples, 1 - _TOO_LONG_SHARE), least), most)


LIMITS = {"too long": "--max-mel-frames", "too short": "--min-clip-seconds", "text too long": "--max-text-length"}
"""The flags of the settings for which clips are set aside, by reason."""


def beyond(reason: str, detail: str) -> Problem:
    """Return why a clip is set aside, with the flag of the limit if one can be changed."""
    return reason, f"{detail} ({LIMITS[reason]})" if reason in LIMITS else detail


class LabelledText(NamedTuple):
    text: str
    language: str


def spoken(text: str, language: str, use_phonemes: bool) -> str | Problem:
    """Return a text as it is spoken, or why it cannot be."""
    if len(text) > MAX_TEXT_CHARACTERS:
        return "text too long", f"{len(text)} characters, the limit is {MAX_TEXT_CHARACTERS}"
    try:
        words = normalize(text, language)
        found = phonemize([words], language)[0] if use_phonemes else words
    except ConfigError as error:  # the language needs a package that is not installed
        return "language not available", str(error)
    return found or ("empty text", f"nothing to speak in '{text[:40]}'")


def token_ids(tokenizer: Tokenizer, sentences: Sequence[LabelledText]) -> tuple[list[Array], dict[int, Problem]]:
    """Return the ids of spoken texts, and by position why some cannot be used."""
    problems: dict[int, Problem] = {}
    ids: list[Array] = [np.empty(0, np.int32)] * len(sentences)
    for at, (_, language) in enumerate(sentences):
        if language not in tokenizer.languages:
            fix = f"the vocabulary has no [{language}]; see myxtts vocabulary extend --language {language}"
            problems[at] = ("language not in vocabulary", fix)
    known = [at for at in range(len(sentences)) if at not in problems]
    texts, languages = [sentences[at].text for at in known], [sentences[at].language for at in known]
    for at, found in zip(known, tokenizer.encode_batch(texts, languages) if known else [], strict=True):
        ids[at] = np.asarray(found, np.int32)
        if tokenizer.unknown_id in found:
            unknown = tokenizer.unknown_characters(*sentences[at])
            problems[at] = ("unknown characters", describe_characters(unknown))
    return ids, problems


NO_SPEAKERS = (
    "no clip names its speaker, so each is its own reference voice, which makes cloning harder to learn. If one "
    "person speaks in all of them, {give}; otherwise name the speakers, in a column "
    "speaker_name or in speakers.csv"
)


class LazyAudio(RowReader):
    """The rows of an audio store, decoded from their files whenever they are read. Any thread may read."""

    def __init__(self, kept: Store, paths: Sequence[str], stats: Array, options: DecodeOptions) -> None:
        """`kept` holds length and checksum of each file's samples; `stats` [files, 3] its size and times then."""
        self.folder = kept.folder
        self.set_aside = kept.set_aside
        self.options = options
        rows = np.flatnonzero(kept.lengths)
        numbers = np.zeros((len(rows), 2), np.uint64)
        kept.gather_padded(rows, numbers)
        self.lengths, self.hashes = np.zeros(len(kept), np.int64), np.zeros(len(kept), np.uint64)
        self.lengths[rows], self.hashes[rows] = numbers.T
        self._paths, self._stats, self._warned = paths, stats, False

    def __getitem__(self, row: int) -> audio.Pcm:
        path = Path(self._paths[row])
        try:
            pcm = self.options.decode(path)
        except audio.UnusableAudio as error:
            raise _not_as_prepared(path, f"{error.reason} ({error.detail})") from None
        if len(pcm) != self.lengths[row]:
            raise _not_as_prepared(path, f"expected {self.lengths[row]} samples, found {len(pcm)}")
        if checksum(pcm) != self.hashes[row]:
            self._explain_other_samples(row, path)
        return pcm

    def gather(self, rows: Rows, out: Array, pieces: Pieces | None = None) -> None:
        """Decode row `rows[i]` to the start of `out[i]`, or a piece of it; the rest of `out[i]` stays as it is."""
        places = pieces or Pieces.whole(self.lengths[rows])
        for row, slot, start, length in zip(rows.tolist(), *places, strict=True):
            out[slot, :length] = self[row][start : start + length]

    def _explain_other_samples(self, row: int, path: Path) -> None:
        """Raise if the file was written to; otherwise only warn, once.

        Decoders differ in the last bit between processors, and preparing again would not change that.
        """
        try:
            now = path.stat()
        except OSError as error:
            raise _not_as_prepared(path, error.strerror or str(error)) from None
        if [now.st_size, now.st_mtime_ns, now.st_ctime_ns] != self._stats[row].tolist():
            raise _not_as_prepared(path, "the file was written to")
        if not self._warned:
            self._warned = True
            why = "was it prepared on another machine, or is the disk failing?"
            _log.warning(f"{path} has not changed but decodes to other samples than when it was prepared: {why}")


def _not_as_prepared(path: Path, found: str) -> DatasetError:
    why = "With native_loading off, the audio files are read for every batch."
    advice = "Restore the file or remove it from the metadata, then prepare again."
    return DatasetError(f"{path} has changed since the corpus was prepared: {found}.\n{why} {advice}")


AudioRows = PackedRows | LazyAudio
"""Samples, packed on disk or decoded when they are read; both have the same rows and checksums."""


class LazyNames(Sequence[str]):
    """Names of clips that are read when they are needed; so are their texts."""

    @abstractmethod
    def name(self, at: int) -> str: ...
    @abstractmethod
    def text(self, at: int) -> str: ...
    @abstractmethod
    def select(self, chosen: Rows) -> LazyNames: ...
    @property
    @abstractmethod
    def draws(self) -> Sources:
        """A hash of the text of each clip; 0 if the text is not here."""

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> LazyNames: ...
    def __getitem__(self, at: int | slice) -> str | LazyNames:
        return self.select(np.arange(len(self))[at]) if isinstance(at, slice) else self.name(range(len(self))[at])


@dataclass(frozen=True)
class ClipSet:
    """Clips that can be batched: the rows of each in the stores, its speaker, its language and its corpus."""

    audio: AudioRows | Joined[AudioRows]
    ids: PackedRows | Joined[PackedRows]
    audio_rows: Rows
    ids_rows: Rows
    speakers: Rows
    languages: Rows
    corpora: Rows
    names: Sequence[str]
    shards: Array | None = None
    """The shard of each clip, numbered as `audio` numbers them; None if the corpus has one."""

    def __len__(self) -> int:
        return len(self.audio_rows)

    @property
    def num_samples(self) -> Rows:
        return self.audio.lengths[self.audio_rows]

    @property
    def num_ids(self) -> Rows:
        return self.ids.lengths[self.ids_rows]

    def wave(self, number: int) -> npt.NDArray[np.float32]:
        """Return a clip as the network gets it, 22.05 kHz."""
        return np.divide(self.audio[int(self.audio_rows[number])], 32768, dtype=np.float32)

    def select(self, chosen: Rows) -> ClipSet:
        columns = {id(column := getattr(self, field)): column for field in _ROW_FIELDS}  # some are the same
        found = {key: column[chosen] for key, column in columns.items()}
        numbers = {field: found[id(getattr(self, field))] for field in _ROW_FIELDS}
        known, shards = self.names, None if self.shards is None else self.shards[chosen]
        names = known.select(chosen) if isinstance(known, LazyNames) else [known[at] for at in chosen.tolist()]
        return replace(self, **numbers, names=names, shards=shards)

    @property
    def stores(self) -> list[tuple[AudioRows, PackedRows]]:
        """Audio and ids of each corpus."""
        if isinstance(self.audio, Joined) and isinstance(self.ids, Joined):
            return list(zip(self.audio.parts, self.ids.parts, strict=True))
        assert not isinstance(self.audio, Joined) and not isinstance(self.ids, Joined)
        return [(self.audio, self.ids)]

    @classmethod
    def joined(cls, sets: Sequence[ClipSet]) -> ClipSet:
        """Return the clips of several sets, each with a store of its own, one set after another."""
        if len(sets) == 1:
            return sets[0]
        audio, ids = _joined([store for each in sets for store in each.stores])
        numbers = {field: np.concatenate([getattr(each, field) for each in sets]) for field in _ROW_FIELDS}
        for field, store in (("audio_rows", audio), ("ids_rows", ids)):
            if isinstance(store, Joined):
                numbers[field] += np.repeat(store.starts, [len(each) for each in sets])
        shards = None
        if any(each.shards is not None for each in sets):
            own = [np.zeros(len(each), np.int64) if each.shards is None else each.shards for each in sets]
            first = np.cumsum([0, *(num_shards(each.audio) for each in sets)])
            shards = np.concatenate([number + start for number, start in zip(own, first[:-1], strict=True)])
        return cls(audio, ids, **numbers, names=_JoinedNames([each.names for each in sets]).plain(), shards=shards)


class _JoinedNames(LazyNames):
    """The names of several sets, one set after another."""

    def __init__(self, parts: Sequence[Sequence[str]], chosen: Rows | None = None) -> None:
        self._parts, self._starts = parts, np.cumsum([0, *map(len, parts)])
        self._chosen = np.arange(self._starts[-1]) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def plain(self) -> Sequence[str]:
        """A list, if no part has to read its names."""
        return self if any(isinstance(part, LazyNames) for part in self._parts) else [*self]

    def name(self, at: int) -> str:
        part, place = self._place(at)
        return part[place]

    def text(self, at: int) -> str:
        part, place = self._place(at)
        return part.text(place) if isinstance(part, LazyNames) else ""

    def select(self, chosen: Rows) -> LazyNames:
        return _JoinedNames(self._parts, self._chosen[chosen])

    @property
    def draws(self) -> Sources:
        parts = (
            part.draws if isinstance(part, LazyNames) else np.zeros(len(part), np.uint64) for part in self._parts
        )
        return np.concatenate([*parts])[self._chosen]

    def _place(self, at: int) -> tuple[Sequence[str], int]:
        number = int(self._chosen[at])
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._parts[part], number - int(self._starts[part])


def _joined(
    stores: Sequence[tuple[AudioRows, PackedRows]],
) -> tuple[AudioRows | Joined[AudioRows], PackedRows | Joined[PackedRows]]:
    """Return the audio and the ids of several corpora, one after another."""
    if len(stores) == 1:
        return stores[0]
    return Joined([audio for audio, _ in stores]), Joined([ids for _, ids in stores])


_ROW_FIELDS = ("audio_rows", "ids_rows", "speakers", "languages", "corpora")


class Mixture:
    """Which clips an epoch holds: of each corpus, and under a temperature of each language, its part.

    The clips of such a group are walked through in a random order, pass after pass, and each epoch continues
    where the last one ended. This is a pure function of (seed, epoch).
    """

    def __init__(self, clips: ClipSet, weights: Sequence[float], language_temperature: float = 1.0) -> None:
        """`weights` has the times that an epoch takes the clips of each corpus."""
        of_clip, groups = np.array(weights, np.float64)[clips.corpora], clips.corpora
        if language_temperature > 1:
            of_language = np.bincount(clips.languages, of_clip)[clips.languages]
            evened = of_clip * of_language ** (1 / language_temperature - 1)
            of_clip = evened * of_clip.sum() / evened.sum()
            groups = clips.corpora * (clips.languages.max() + 1) + clips.languages
        _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        self._group, self._sizes = group.astype(np.int32), sizes
        self._taken = np.maximum(np.rint(np.bincount(group, of_clip)), 1).astype(np.int64)
        self.is_plain = bool((self._taken == sizes).all())
        """True if every epoch holds every clip once."""
        self.num_clips = int(self._taken.sum())
        """Clips of an epoch."""

    @property
    def times(self) -> npt.NDArray[np.float64]:
        """How often an epoch holds each clip, on average."""
        each: npt.NDArray[np.float64] = self._taken / self._sizes
        return each[self._group]

    @cached_property
    def _members(self) -> list[Rows]:
        return [np.flatnonzero(self._group == number) for number in range(len(self._sizes))]

    def clips(self, seed: int, epoch: int, redraw: int = 0) -> Rows:
        """Return the clips of an epoch in no particular order; `redraw` numbers other ones that it may hold."""
        if self.is_plain:
            return np.arange(self.num_clips)
        found = []
        for group, (members, taken) in enumerate(zip(self._members, self._taken.tolist(), strict=True)):
            first, size = epoch * taken, len(members)
            passes = range(first // size, (first + taken - 1) // size + 1)
            order = [default_rng([seed, number, group, redraw, 1]).permutation(members) for number in passes]
            start = first - passes[0] * size
            found.append(np.concatenate(order)[start : start + taken])
        return np.concatenate(found)

    def longest_epoch(self, lengths: Array, deviations: float) -> Rows:
        """Return the clips of an epoch with more long clips than nearly every other has, the longest included.

        For every length, the number of clips of at least this length exceeds its mean by so many `deviations`.
        """
        order = np.argsort(-lengths, kind="stable")
        whole, rest = np.divmod(self.times, 1)
        mean, variance = np.cumsum(rest[order]), np.zeros(len(order))
        for number, members in enumerate(self._members):
            if (share := float(rest[members[0]])) > 0:
                longer = np.cumsum(self._group[order] == number)
                # An epoch may hold the end of one pass and the start of another: two halves vary most.
                ends = max(share * (1 - share / 2), (1 - share**2) / 2 if whole[members[0]] else 0.0)
                variance += ends * longer * (1 - longer / len(members))
        most = np.minimum(np.ceil(mean + deviations * np.sqrt(variance)), self.num_clips - whole.sum())
        places = 2 * np.arange(1, len(order) + 1)  # of each clip at most two, one from either pass
        taken = places + np.minimum.accumulate(np.minimum(np.maximum.accumulate(most) - places, 0))
        whole[order] += np.diff(taken, prepend=0)
        return np.repeat(np.arange(len(order)), whole.astype(np.int64))


class Share(NamedTuple):
    """A part of the training clips."""

    kind: str  # corpus, language or speaker
    name: str
    num_clips: int
    hours: float
    share: float  # of the speech of an epoch


@dataclass(frozen=True)
class PreparedCorpus:
    train: ClipSet
    val: ClipSet
    speaker_names: list[str]
    set_aside: list[SetAside]
    vocabulary: str  # the tokenizer as JSON; building the object takes time, and few callers need it
    root: Path
    max_mel_frames: int
    """The setting, or for `auto` the frames of the longest clip, rounded up."""
    corpora: list[str]  # names of the training corpora
    other_roots: list[Path]  # caches of the training corpora after the first
    weights: tuple[float, ...] = (1.0,)  # of each training corpus
    single_speaker: tuple[bool, ...] = (False,)  # of each training corpus: its unnamed clips are of one person
    language_temperature: float = 1.0

    @cached_property
    def mixture(self) -> Mixture:
        """Which training clips an epoch holds."""
        return Mixture(self.train, self.weights, self.language_temperature)

    def shares(self) -> Iterator[Share]:
        """Yield how much of the training clips is of each corpus, language and speaker, by kind the most first."""
        samples, kinds = self.train.num_samples, ("corpus", "language", "speaker")
        names = (self.corpora, LANGUAGES, [name or "not named" for name in self.speaker_names])
        numbers = (self.train.corpora, self.train.languages, self.train.speakers)
        for kind, known, number in zip(kinds, names, numbers, strict=True):
            clips, hours = np.bincount(number), np.bincount(number, samples) / SAMPLE_RATE / 3600
            taken = np.bincount(number, samples * self.mixture.times)
            for place in np.argsort(-taken, kind="stable").tolist():
                if clips[place]:
                    share = float(taken[place] / taken.sum())
                    yield Share(kind, known[place], int(clips[place]), float(hours[place]), share)

    @property
    def unnamed_corpora(self) -> list[str]:
        """The training corpora in which no clip names its speaker, and which are not said to have only one."""
        is_named = np.array([bool(name) for name in self.speaker_names])[self.train.speakers]
        number_of_named = np.bincount(self.train.corpora[is_named], minlength=len(self.corpora)).tolist()
        facts = zip(self.corpora, number_of_named, self.single_speaker, strict=True)
        return [name for name, number, is_single in facts if not number and not is_single]

    def fitted(self, data: DataSettings) -> DataSettings:
        """Return the settings with the limit of this corpus in place of `auto`."""
        return replace(data, max_mel_frames=self.max_mel_frames)

    def voices(self, sets: Sequence[ClipSet], data: DataSettings) -> Rows:
        """Return a number for the voice of each clip of these sets.

        Clips without a speaker's name share one number if all are of one person, or those of a corpus that has a
        single speaker; else each has its own.
        """
        speakers = np.concatenate([each.speakers for each in sets])
        corpora = np.concatenate([each.corpora for each in sets])
        is_named = np.array([bool(name) for name in self.speaker_names])[speakers]
        sources = (*(data.sources or (CorpusSource(Path()),)), *data.val_sources)  # as corpora are numbered
        people = [source.speakers or number for number, source in enumerate(sources)]
        person = [0 if data.single_speaker else people.index(one) for one in people]
        is_single = [data.single_speaker or source.single_speaker for source in sources]
        own = -1 - len(sources) - np.arange(len(speakers))
        unnamed = np.where(np.array(is_single)[corpora], -1 - np.array(person)[corpora], own)
        return np.where(is_named, speakers, unnamed)

    @cached_property
    def num_speakers(self) -> int:
        """Speakers that two or more training clips name, so that these can be compared."""
        counts = np.bincount(self.train.speakers, minlength=len(self.speaker_names)).tolist()
        return sum(bool(name) and count > 1 for name, count in zip(self.speaker_names, counts, strict=True))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.vocabulary)


def set_aside_list(root: Path) -> Path:
    return root / "set_aside.csv"


def set_aside_csv(set_aside: Sequence[SetAside]) -> bytes:
    content = io.StringIO()
    table = csv.writer(content, delimiter="|", lineterminator="\n")
    table.writerow(SetAside._fields)
    table.writerows(map(printable, item) for item in set_aside)
    return content.getvalue().encode("utf-8", "replace")


def write_set_aside_list(root: Path, set_aside: Sequence[SetAside]) -> None:
    """List every clip that is not used in a file next to the stores, unless the folder is read-only."""
    path, encoded = set_aside_list(root), set_aside_csv(set_aside)
    with contextlib.suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
    if os.access(root, os.W_OK) and not (path.is_file() and path.read_bytes() == encoded):
        write_atomically(path, lambda temporary: temporary.write_bytes(encoded))


def save_snapshot(prepared: PreparedCorpus, state: str, corpora: Sequence[Corpus]) -> None:
    """Write a snapshot, unless the corpus changed just before it was read. A failure only costs the shortcut."""
    if prepared.train.shards is not None or prepared.val.shards is not None:  # opened as fast without one
        return
    listed = {folder: at for corpus in corpora for folder, at in corpus.listed.items()}
    if min(corpus.read_at for corpus in corpora) - max(listed.values(), default=0) < CLOCK_TICK_NS:
        return
    clips = [(corpus.folder, clip) for corpus in corpora for clip in corpus.clips]
    sides, (first, _) = (prepared.train, prepared.val), prepared.train.stores[0]
    ends = np.cumsum([0, *(len(corpus.clips) for corpus in corpora)]).tolist()
    has_own_val = len(corpora) > len(prepared.corpora)
    texts = {
        "paths": [str(folder.absolute() / clip.path) for folder, clip in clips],
        "folders": listed,
        "vocabulary": prepared.vocabulary,
        "set_aside": prepared.set_aside,
        "speakers": prepared.speaker_names,
        "max_mel_frames": prepared.max_mel_frames,
        "corpora": prepared.corpora,
        "other_roots": [str(root) for root in prepared.other_roots],
        "decoding": asdict(first.options) if isinstance(first, LazyAudio) else None,
        "files": list(pairwise(ends)),
        "names": [side.names for side in sides],
        "stores": [
            [str(rows.folder) for rows in pair if isinstance(rows, Store | LazyAudio)]
            for side in (sides if has_own_val else sides[:1])
            for pair in side.stores
        ],
    }
    numbers = [np.array([clip[-3:] for _, clip in clips], np.int64)]
    numbers += [getattr(side, field) for side in sides for field in _ROW_FIELDS]

    def build(writer: StoreWriter, rows: list[int]) -> None:
        encoded = np.frombuffer(json.dumps(texts).encode(), np.uint8)
        writer.append(rows, [encoded, *(np.ascontiguousarray(array).view(np.uint8).ravel() for array in numbers)])

    try:
        build_store(prepared.root, _snapshot_spec(state), build, replace=True)
    except DatasetError as error:
        _log.debug("No snapshot was written: %s", error)


def load_snapshot(root: Path, state: str) -> PreparedCorpus | None:
    """Return the corpus as it was prepared before, if nothing has changed since."""
    try:
        snapshot = open_store(_snapshot_spec(state).folder(root), np.uint8)
        if snapshot is None:
            return None
        texts = json.loads(snapshot[0].tobytes())
        stats, *numbers = (snapshot[row].view(np.int64) for row in range(1, len(snapshot)))
        stats = stats.reshape(-1, 3)
        if not _unchanged(texts["folders"], texts["paths"], stats):
            return None
        stores, num_corpora = _open_stores(texts, stats), len(texts["corpora"])
    except (OSError, CacheDamaged):
        return None
    per_side = len(_ROW_FIELDS)
    rows = [dict(zip(_ROW_FIELDS, side, strict=True)) for side in (numbers[:per_side], numbers[per_side:])]
    sources = [_joined(stores[:num_corpora]), _joined(stores[num_corpora:] or stores)]
    train, val = (
        ClipSet(audio, ids, **of_side, names=names)
        for (audio, ids), of_side, names in zip(sources, rows, texts["names"], strict=True)
    )
    set_aside = [SetAside(*item) for item in texts["set_aside"]]
    rest = (texts["vocabulary"], root, texts["max_mel_frames"], texts["corpora"], texts["other_roots"])
    return PreparedCorpus(train, val, texts["speakers"], set_aside, *rest[:-1], [Path(path) for path in rest[-1]])


def _snapshot_spec(state: str) -> StoreSpec:
    """One row of JSON, the size and times of every file, then `_ROW_FIELDS` for each side of the split."""
    sources = np.array([hash64(state, row) for row in range(2 + 2 * len(_ROW_FIELDS))], np.uint64)
    return StoreSpec("snapshot", np.uint8, sources, params={})


def _open_stores(texts: Any, stats: Array) -> list[tuple[AudioRows, Store]]:
    """Return the audio and the ids of each folder."""
    found: list[tuple[AudioRows, Store]] = []
    for (audio_folder, ids_folder), files in zip(texts["stores"], texts["files"], strict=True):
        ids = _require_store(Path(ids_folder), np.int32)
        if texts["decoding"] is None:
            found.append((_require_store(Path(audio_folder), np.int16), ids))
        else:
            own, kept = slice(*files), _require_store(Path(audio_folder), np.uint64)
            options = DecodeOptions(**texts["decoding"])
            found.append((LazyAudio(kept, texts["paths"][own], stats[own], options), ids))
    return found


def _require_store(folder: Path, dtype: type[np.generic]) -> Store:
    store = open_store(folder, dtype)
    if store is None:
        raise CacheDamaged(f"{folder} is missing or damaged")
    return store


def _unchanged(folders: dict[str, int], paths: list[str], stats: Array) -> bool:
    if any(last_change(Path(folder)) != at for folder, at in folders.items()):
        return False
    for path, stat in zip(paths, stats.tolist(), strict=True):
        now = os.stat(path)  # noqa: PTH116 (LJSpeech has 13,100 of them)
        if [now.st_size, now.st_mtime_ns, now.st_ctime_ns] != stat:
            return False
    return True
