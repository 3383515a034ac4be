"""Prepares a corpus for training: opens its cache, after building whatever the cache lacks.

The first start and every later one are the same call. A corpus goes through these stores, each keyed by everything
that decides its rows:

    languages   detected language of the clips whose metadata names none
    text        each distinct sentence as it is spoken
    vocabulary  the tokenizer trained on these texts, unless one is named
    audio       int16 samples of each clip (without native loading `lengths`: only lengths and checksums)
    ids         token ids of each sentence

A new vocabulary rebuilds only the ids; a new or changed clip adds only its own rows.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from myxtts import __version__, audio
from myxtts.audio import DECODE_VERSION, LIBRARIES
from myxtts.config import HOP_SAMPLES, LANGUAGES, PREPARE_KEYS, SAMPLE_RATE, CorpusSource, DataSettings, Settings
from myxtts.data.clips import (
    ClipSet,
    DecodeOptions,
    LabelledText,
    LazyAudio,
    PreparedCorpus,
    beyond,
    frames_for,
    load_snapshot,
    max_frames_of,
    save_snapshot,
    set_aside_list,
    spoken,
    token_ids,
    write_set_aside_list,
)
from myxtts.data.corpus import (
    METADATA_FILES,
    Clip,
    Corpus,
    Flags,
    SetAside,
    choose_in_shards,
    held_out,
    labelled,
    read_corpus,
)
from myxtts.data.locations import Location, shard_cache
from myxtts.data.pool import ProcessPool, reserve
from myxtts.data.shards import (
    Package,
    ShardedCorpus,
    Shards,
    ids_folder,
    is_sharded,
    join_ids,
    location_of,
    refuse_query,
    write_ids,
)
from myxtts.data.store import (
    FORMAT_VERSION,
    Array,
    Labels,
    Store,
    StoreSpec,
    StoreWriter,
    build_store,
    cache_root,
    hash64,
    open_store,
    pack,
    user_cache,
    write_at,
)
from myxtts.errors import NO_PROGRESS, DatasetError, Progress, progress_bar
from myxtts.host import usable_cores
from myxtts.text.language import detect_languages, language_fingerprint, warn_of_other_script
from myxtts.text.normalize import normalize_fingerprint, phonemes_fingerprint
from myxtts.text.tokenizer import Tokenizer, tokenizer_fingerprint, train

EMBEDDED_CORPUS = Path(__file__).parent.parent / "embedded"
"""The recordings inside the package, used when no data is named."""
AUDIO_CHUNK = 32
TEXT_CHUNK = 512

_NOT_DECISIVE = ("data.train_data", "data.num_workers")

_log = logging.getLogger(__name__)


def prepare(
    settings: DataSettings | Settings, progress: Progress | None = None, verify: bool = False
) -> PreparedCorpus:
    """Open the cache of the corpus that the settings name, after building whatever it lacks.

    With `verify` every byte is compared with its checksum, and rows that do not match are rebuilt; without it each
    row is compared when it is first read.
    """
    data = settings.data if isinstance(settings, Settings) else settings
    root, state = cache_folder(data), _state_of(data)
    if not verify and (known := _snapshot(data)) is not None:
        _log.info("LOADING CACHE FROM DISK")
        write_set_aside_list(root, known.set_aside)
        return known
    with ProcessPool(min(data.num_workers, usable_cores())) as pool:
        tools = Tools(pool, progress or NO_PROGRESS, verify)
        parts = [_open(data, source, tools) for source in training_sources(data)]
        num_corpora = len(parts)
        tokenizer = _tokenizer_for(data, parts)
        parts += [_open(data, source, tools) for source in _named(data.val_sources)]
        speaker_names = sorted({name for part in parts for name in part.speakers})
        lengths = np.concatenate([part.audio.lengths for part in parts[:num_corpora]])
        limit = data.max_mel_frames or max_frames_of(lengths)
        clips = [part.clip_set(number, tokenizer, speaker_names, limit) for number, part in enumerate(parts)]
    set_aside = [item for part in parts for item in part.set_aside]
    write_set_aside_list(root, set_aside)
    sides = [part.split(clips[number]) for number, part in enumerate(parts[:num_corpora])]
    train_clips, val_clips = (ClipSet.joined(sets) for sets in zip(*sides, strict=True))
    if data.val_data:
        val_clips = ClipSet.joined(clips[num_corpora:])
    frames = data.max_mel_frames or max(frames_for(part.num_samples) for part in (train_clips, val_clips))
    names = [part.name or part.folder.absolute().name for part in parts[:num_corpora]]
    roots = [part.root for part in parts[1:num_corpora]]
    rest = (tokenizer.to_json(), root, frames, names, roots)
    prepared = PreparedCorpus(train_clips, val_clips, speaker_names, set_aside, *rest)
    if _state_of(data) == state:  # otherwise the metadata changed while it was read
        save_snapshot(prepared, state, [part.corpus for part in parts if isinstance(part, _Part)])
    return _mixed(prepared, data)


def prepared_before(data: DataSettings) -> PreparedCorpus | None:
    """Return the corpus if it was prepared with these settings and nothing has changed since."""
    if all(is_sharded(folder) for folder in corpus_folders(data)):
        return prepare(data) if _has_all_ids(data) else None
    return _snapshot(data)


def _snapshot(data: DataSettings) -> PreparedCorpus | None:
    known = load_snapshot(cache_folder(data), _state_of(data))
    return known and _mixed(known, data)


def _mixed(prepared: PreparedCorpus, data: DataSettings) -> PreparedCorpus:
    """Return the corpus with the weights of the settings, which decide nothing that is kept on disk."""
    sources = data.sources or (CorpusSource(EMBEDDED_CORPUS),)
    weights = tuple(source.weight for source in sources)
    single = tuple(data.single_speaker or source.single_speaker for source in sources)
    temperature = data.language_temperature
    return replace(prepared, weights=weights, single_speaker=single, language_temperature=temperature)


def spoken_corpus(data: DataSettings, progress: Progress) -> tuple[list[str], list[str]]:
    """Return every distinct sentence of each corpus as it is spoken, and its language; no audio is read."""
    with ProcessPool(min(data.num_workers, usable_cores())) as pool:
        tools = Tools(pool, progress)
        return _spoken_of([_open(data, source, tools) for source in training_sources(data)])


class NamedSource(NamedTuple):
    name: str  # of the corpus, which begins the ids of its clips; empty if it is the only one
    source: CorpusSource


def training_sources(data: DataSettings) -> list[NamedSource]:
    """Return the training corpora; several have different names, by default those of their folders."""
    return _named(data.sources or (CorpusSource(EMBEDDED_CORPUS),))


def _named(sources: Sequence[CorpusSource]) -> list[NamedSource]:
    found: dict[str, CorpusSource] = {}
    for number, source in enumerate(sources, 1):
        refuse_query(location_of(source.folder))
        name = source.folder.resolve().name
        while name in found:
            name = f"{name}-{number}"
        found[name] = source
    return [NamedSource(name if len(sources) > 1 else "", source) for name, source in found.items()]


def read_training(data: DataSettings) -> list[Corpus]:
    """Return the training corpora as metadata and options describe them; clips have the names of prepared ones."""
    return [_read(named) for named in training_sources(data)]


def read_validation(data: DataSettings) -> list[Corpus]:
    """Return the same of the validation corpora that are named."""
    return [_read(named) for named in _named(data.val_sources)]


def _read(named: NamedSource) -> Corpus:
    if is_sharded(named.source.folder):  # it has no metadata; its shards have the texts, see `LazyNames`
        return Corpus(named.source.folder)
    corpus = labelled(read_corpus(named.source.folder), named.name, named.source.speakers or named.name)
    clips = [clip._replace(language=clip.language or named.source.language or "") for clip in corpus.clips]
    return replace(corpus, clips=clips)


def corpus_folders(data: DataSettings) -> list[Path]:
    """Return the folders of the training corpora and of the validation corpora that are named."""
    return [source.folder for _, source in [*training_sources(data), *_named(data.val_sources)]]


def cache_folder(data: DataSettings, corpus: Path | None = None) -> Path:
    """Return where a prepared corpus, by default the one for training, is or will be."""
    folder = corpus or corpus_folders(data)[0]
    if not (location := location_of(folder)).is_local:
        return (data.cache_dir or user_cache()) / f"{location.name}-{hash64(location):016x}"
    # The embedded corpus is inside the installed package, which is not a place to write to.
    return cache_root(folder, data.cache_dir or (user_cache() if folder == EMBEDDED_CORPUS else None))


def with_tokenizer_of_run(data: DataSettings, run: Path | None, init_from: Path | None) -> DataSettings:
    """Return the settings with the tokenizer of a run: its own, else the one named, else that of `init_from`."""
    return replace(data, tokenizer=run or data.tokenizer or init_from)


def _state_of(data: DataSettings) -> str:
    """Return a hash of everything but the audio files that decides the prepared corpus."""
    folders = corpus_folders(data)
    files = [folder / name for folder in folders for name in METADATA_FILES]
    if data.tokenizer is not None:
        files += [data.tokenizer, data.tokenizer / "vocab.json"]
    decisive = (
        (__version__, DECODE_VERSION, LIBRARIES, FORMAT_VERSION),
        (normalize_fingerprint(), language_fingerprint(), tokenizer_fingerprint()),
        phonemes_fingerprint() if data.use_phonemes else "",
        [replace(source, weight=1.0, single_speaker=False) for source in data.sources],
        [getattr(data, key.removeprefix("data.")) for key in PREPARE_KEYS if key not in _NOT_DECISIVE],
        [str(folder.absolute()) for folder in folders],
    )
    hasher = xxhash.xxh3_128(repr(decisive).encode())
    for path in (*files, *sorted(Path(__file__).parent.glob("*.py"))):
        try:
            content = path.read_bytes() if path.is_file() else None
        except OSError:  # reported by the code that needs the file
            content = None
        hasher.update(repr((path.name, content and len(content))).encode())
        hasher.update(content or b"")
    return hasher.hexdigest()


@dataclass(frozen=True)
class Tools:
    pool: ProcessPool
    progress: Progress
    verify: bool = False  # every store is verified when it is opened

    def announce(self, title: str, num_samples: int) -> None:
        _log.info("%s", title)
        _log.info("Processing %d samples", num_samples)
        _log.info("Using %d parallel workers", self.pool.num_workers)


class _AnyPart(ABC):
    """One corpus on its way to sets of clips."""

    name: str  # empty if it is the only corpus
    folder: Path
    root: Path
    data: DataSettings
    set_aside: list[SetAside]

    @abstractmethod
    def held_out(self) -> Flags:
        """Which usable clips are held out."""

    def split(self, clips: ClipSet) -> tuple[ClipSet, ClipSet]:
        """Return the training and the validation clips."""
        if not len(clips):
            counts = Counter(item.reason for item in self.set_aside).most_common()
            reasons = "\n".join(f"  {count} × {reason}" for reason, count in counts) or "  the metadata is empty"
            first = next(iter(self.set_aside), None)
            example = f"\nFor example {first.id or first.where}: {first.detail}" if first else ""
            listed = f"\nAll are listed in {path}" if (path := set_aside_list(self.root)).exists() else ""
            raise DatasetError(f"No usable clip in {self.folder}. Set aside:\n{reasons}{example}{listed}")
        chosen = self.held_out()
        if chosen.all():
            raise DatasetError(f"No usable clip in {self.folder} except those held out (metadata_eval.csv)")
        return clips.select(np.flatnonzero(~chosen)), clips.select(np.flatnonzero(chosen))


class _ShardedPart(_AnyPart):
    """A sharded corpus: prepared before, except for the ids of another vocabulary than its own."""

    def __init__(self, data: DataSettings, named: NamedSource, tools: Tools) -> None:
        self.name, source = named
        self.data, self.tools, self.folder = data, tools, source.folder
        self.root = cache_folder(data, source.folder)
        self.corpus = ShardedCorpus(location_of(source.folder), shard_cache(data))
        self.corpus.require(data)
        if tools.verify:
            self.corpus.verify(tools.progress)
        self.audio, self.set_aside = self.corpus.audio, self.corpus.set_aside
        label = source.speakers or self.name
        self.speakers = [name and f"{label}/{name}" if label else name for name in self.corpus.speakers]
        self._rows = np.empty(0, np.int64)

    def clip_set(self, number: int, tokenizer: Tokenizer, speaker_names: list[str], max_frames: int) -> ClipSet:
        """The same as `_Part.clip_set`."""
        ids, aside = self.corpus.ids(tokenizer, self.root) or self._build_ids(tokenizer)
        self.set_aside = [*self.set_aside, *aside]
        num_samples, num_ids = self.audio.lengths, ids.lengths
        least, most = self.data.min_clip_seconds * SAMPLE_RATE, max_frames * HOP_SAMPLES - 1
        unfit = {
            "text too long": num_ids > self.data.max_text_length,
            "too short": num_samples < least,
            "too long": num_samples > most,
        }
        usable = num_ids > 0
        for reason, flags in unfit.items():
            for row in np.flatnonzero(flags & usable).tolist():
                found = f"{num_ids[row]} tokens" if "text" in reason else f"{num_samples[row] / SAMPLE_RATE:.2f} s"
                shard = self.corpus.shards[int(self.audio.shards[row])]["name"]
                self.set_aside.append(SetAside(f"clip {row}", *beyond(reason, found), f"shard {shard}"))
            usable &= ~flags
        rows = self._rows = np.flatnonzero(usable)
        index, known = self._index(), {name: at for at, name in enumerate(speaker_names)}
        speakers: Array = np.array([known[name] for name in self.speakers], np.int32)  # half of int64
        return ClipSet(
            audio=self.audio,
            ids=ids,
            audio_rows=rows,
            ids_rows=rows,
            speakers=index["speaker"] if speaker_names == self.speakers else speakers[index["speaker"]],
            languages=index["language"],
            corpora=np.full(len(rows), number, np.int16),
            names=self.corpus.names(rows, f"{self.name}/" if self.name else ""),
            shards=index["shard"],
        )

    def held_out(self) -> Flags:
        return choose_in_shards(self._index("held_out", "draw", "shard", "speaker", "language"), self.data)

    def _index(self, *names: str) -> dict[str, Array]:
        """Return columns of the usable clips; they stay mapped if all are usable."""
        index = self.corpus.index
        if len(self._rows) == len(index["shard"]):
            return index
        return {name: index[name][self._rows] for name in names or ("speaker", "language", "shard")}

    def _build_ids(self, tokenizer: Tokenizer) -> tuple[Shards, list[SetAside]]:
        """Make the ids of this vocabulary in the cache."""
        shards, progress = self.corpus.shards, self.tools.progress
        _log.info("BUILDING TOKEN CACHE for another vocabulary than the corpus' own, in %s", self.root)
        make = partial(_write_ids, self.corpus.location, self.root, tokenizer.to_json())
        with progress_bar(progress, "Tokenising", sum(shard["clips"] for shard in shards)) as advance:
            for chunk, done in self.tools.pool.run(make, [[shard["name"]] for shard in shards]):
                if done is None:
                    raise DatasetError(f"Tokenising shard {chunk[0]} kills the process")
                advance(done)
        folder = Location(str(self.root)) / ids_folder(tokenizer)
        made = [package for shard in shards if (package := Package.find(folder / shard["name"]))]
        join_ids(made, folder / f"index-{self.corpus.key}")
        found = self.corpus.ids(tokenizer, self.root)
        assert found is not None
        return found


def _write_ids(corpus: Location, root: Path, vocabulary: str, names: Sequence[str]) -> int:
    """In a worker: make the ids of shards; return the number of their clips."""
    tokenizer = _tokenizer_of(vocabulary)
    target = Location(str(root)) / ids_folder(tokenizer)
    return sum(write_ids(corpus / "shards" / name, target / name, tokenizer).facts["clips"] for name in names)


def _has_all_ids(data: DataSettings) -> bool:
    """True if every corpus, all sharded, has the ids of the vocabulary."""
    tools = Tools(ProcessPool(1), NO_PROGRESS)
    parts = [_ShardedPart(data, named, tools) for named in [*training_sources(data), *_named(data.val_sources)]]
    tokenizer = _tokenizer_for(data, parts)
    return all(part.corpus.ids(tokenizer, part.root) for part in parts)


def _open(data: DataSettings, named: NamedSource, tools: Tools) -> _Part | _ShardedPart:
    return (_ShardedPart if is_sharded(named.source.folder) else _Part)(data, named, tools)


def _tokenizer_for(data: DataSettings, parts: Sequence[_Part | _ShardedPart]) -> Tokenizer:
    """Return the tokenizer that is named, else that of the first sharded corpus, else one trained on the texts."""
    if data.tokenizer:
        return Tokenizer.load(data.tokenizer)
    for part in parts:
        if isinstance(part, _ShardedPart):
            return part.corpus.tokenizer()
    return _trained_tokenizer([part for part in parts if isinstance(part, _Part)])


class _Part(_AnyPart):
    """A folder of recordings on its way through the stores."""

    def __init__(self, data: DataSettings, named: NamedSource, tools: Tools) -> None:
        self.name, source = named
        self.data = replace(data, language=source.language or data.language)
        self.tools = tools
        self.root, self.folder = cache_folder(data, source.folder), source.folder
        self.corpus = read_corpus(source.folder)
        rows: dict[LabelledText, int] = {}
        pairs = zip(self.corpus.clips, self._languages(), strict=True)
        sentence_rows = [rows.setdefault(LabelledText(clip.text, code), len(rows)) for clip, code in pairs]
        self.sentence_rows = np.array(sentence_rows, np.int64)
        """For each clip the row of its sentence; equal sentences share one."""
        params = {"normalize": normalize_fingerprint()}
        if data.use_phonemes:
            params["phonemes"] = phonemes_fingerprint()
        sources = np.fromiter((hash64(*sentence) for sentence in rows), np.uint64)
        build = partial(build_text, tools, list(rows), data.use_phonemes)
        self.text = self.store(StoreSpec("text", np.uint8, sources, params), "text", build)
        self.corpus = labelled(self.corpus, self.name, source.speakers or self.name)
        self.speakers = {clip.speaker for clip in self.corpus.clips}
        self.set_aside = list(self.corpus.set_aside)
        self.usable: list[Clip] = []

    def _languages(self) -> list[str]:
        """Return the language of every clip: from the metadata, the settings, or detected.

        What is detected is kept by text and speaker, so a sentence is examined once.
        """
        clips = self.corpus.clips
        named = [clip.language or self.data.language or "" for clip in clips]
        unknown = [clip for clip, language in zip(clips, named, strict=True) if not language]
        if self.data.language:
            warn_of_other_script(self.data.language, [clip.text for clip in clips if not clip.language])
        if not unknown:
            return named

        pairs = [(clip.text, clip.speaker) for clip in unknown]

        def build(writer: StoreWriter, rows: list[int]) -> None:
            _log.info("Detecting the language of %d sentences", len(rows))
            self.tools.pool.start()
            copied = np.setdiff1d(np.arange(len(pairs)), rows)
            known = {
                pairs[row]: LANGUAGES[label] for row, label in zip(copied, writer.labels[copied], strict=True)
            }
            added = [pairs[row] for row in rows]
            found = detect_languages([text for text, _ in added], [speaker for _, speaker in added], known)
            writer.append(rows, [np.empty(0, np.uint8)] * len(rows), [LANGUAGES.index(code) for code in found])

        sources = np.fromiter((hash64(*pair) for pair in pairs), np.uint64)
        spec = StoreSpec("languages", np.uint8, sources, {"detector": language_fingerprint()})
        detected = iter(self.store(spec, "language", build).labels.tolist())
        return [code or LANGUAGES[next(detected)] for code in named]

    def clip_set(self, number: int, tokenizer: Tokenizer, speaker_names: list[str], max_frames: int) -> ClipSet:
        """Return the usable clips of the corpus of this number, and add the others to `set_aside`."""
        # Spoken text and language decide the ids, however they were found.
        sources = self.text.hashes ^ self.text.labels.astype(np.uint64)
        params = {"vocabulary": tokenizer.fingerprint, "code": tokenizer_fingerprint()}
        spec = StoreSpec("ids", np.int32, sources, params)
        ids = self.store(spec, "token", partial(build_ids, self.tools, self.text, tokenizer))
        problems = self._problems(ids, max_frames)
        clips = self.corpus.clips
        self.set_aside += [SetAside(clips[row].id, *problems[row], clips[row].where) for row in sorted(problems)]
        rows = np.array([row for row in range(len(clips)) if row not in problems], np.int64)
        self.usable = [clips[row] for row in rows.tolist()]
        numbers = {name: number for number, name in enumerate(speaker_names)}
        return ClipSet(
            audio=self.audio,
            ids=ids,
            audio_rows=rows,
            ids_rows=self.sentence_rows[rows],
            speakers=np.array([numbers[clip.speaker] for clip in self.usable], np.int64),
            languages=self.text.labels[self.sentence_rows[rows]],
            corpora=np.full(len(rows), number, np.int64),
            names=[clip.id for clip in self.usable],
        )

    @cached_property
    def audio(self) -> Store | LazyAudio:
        corpus, packed, options = self.corpus, self.data.native_loading, DecodeOptions.of(self.data)
        params: dict[str, object] = {"decode": DECODE_VERSION, "libraries": LIBRARIES, "rate": SAMPLE_RATE}
        if options.trim_silence_db > 0:  # the length of a row is then not that of its file
            params |= {"trim": options.trim_silence_db, "max_seconds": options.max_seconds}
        files = [(clip.path, clip.size_bytes, clip.modified_ns, clip.changed_ns) for clip in corpus.clips]
        kind, dtype = ("audio", np.int16) if packed else ("lengths", np.uint64)
        sources = np.fromiter((hash64(*file) for file in files), np.uint64)
        spec = StoreSpec(kind, dtype, sources, params, {"max_seconds": options.max_seconds})
        build = partial(_build_audio, self.tools, corpus, options, packed)
        # Lengths are few bytes and all read at once, so they are always verified.
        store = self.store(spec, spec.kind, build, verify=not packed)
        if packed:
            return store
        paths = [str(corpus.folder.absolute() / path) for path, *_ in files]
        return LazyAudio(store, paths, np.array([stat for _, *stat in files], np.int64), options)

    def _problems(self, ids: Store, max_frames: int) -> dict[int, tuple[str, str]]:
        """Return why clips cannot be used, by row; if several reasons hold, that of the audio is given."""
        least, most = self.data.min_clip_seconds, max_frames * HOP_SAMPLES - 1
        most_ids, seconds = self.data.max_text_length, self.audio.lengths / SAMPLE_RATE
        num_ids = ids.lengths[self.sentence_rows]
        problems: dict[int, tuple[str, str]] = {}
        for row in np.flatnonzero(num_ids > most_ids).tolist():
            problems[row] = beyond("text too long", f"{num_ids[row]} tokens, the limit is {most_ids}")
        for store in (ids, self.text):
            for row in np.flatnonzero(np.isin(self.sentence_rows, list(store.set_aside))).tolist():
                problems[row] = store.set_aside[int(self.sentence_rows[row])]
        for row in np.flatnonzero(seconds < least).tolist():
            problems[row] = beyond("too short", f"{seconds[row]:.2f} s, the least is {least:.2f} s")
        for row in np.flatnonzero(self.audio.lengths > most).tolist():
            problems[row] = beyond("too long", f"{seconds[row]:.2f} s, the limit is {most / SAMPLE_RATE:.2f} s")
        return problems | self.audio.set_aside

    def held_out(self) -> Flags:
        return held_out(self.usable, self.data)

    def store(
        self, spec: StoreSpec, name: str, build: Callable[[StoreWriter, list[int]], None], verify: bool = False
    ) -> Store:
        if (store := open_store(spec.folder(self.root), spec.dtype)) is not None:
            _log.info("LOADING %s CACHE FROM DISK", name.upper())
            if not (verify or self.tools.verify) or store.all_intact():
                return store
            _log.warning("Some rows of %s do not match their checksums; they are built again", store.folder)
        return build_store(self.root, spec, build)


def _spoken_of(parts: Sequence[_Part | _ShardedPart]) -> tuple[list[str], list[str]]:
    """Return every sentence as it is spoken, and its language; of a sharded corpus a sample."""
    sentences: list[LabelledText] = []
    for part in parts:
        if isinstance(part, _ShardedPart):
            sentences += part.corpus.sentences()
        else:
            sentences += (sentence for _, sentence in _spoken(part.text, range(len(part.text))))
    return [sentence.text for sentence in sentences], [sentence.language for sentence in sentences]


def _trained_tokenizer(parts: Sequence[_Part]) -> Tokenizer:
    """Return the tokenizer trained on the spoken texts; it is stored as one row of JSON."""
    num_tokens = parts[0].data.vocab_size

    def build(writer: StoreWriter, rows: list[int]) -> None:
        texts, languages = _spoken_of(parts)
        _log.info("Training a vocabulary of up to %d tokens on %d sentences", num_tokens, len(texts))
        tokenizer = train(texts, languages, num_tokens)
        writer.append(rows, [np.frombuffer(tokenizer.to_json().encode(), np.uint8)])

    made_from = [b"".join(getattr(part.text, name).tobytes() for part in parts) for name in ("hashes", "labels")]
    params = {"code": tokenizer_fingerprint(), "num_tokens": num_tokens}
    spec = StoreSpec("vocabulary", np.uint8, np.array([hash64(*made_from)], np.uint64), params)
    store = parts[0].store(spec, "vocabulary", build)
    return Tokenizer(store[0].tobytes().decode(), source=str(store.folder))


def _spoken(text: Store, rows: Iterable[int]) -> Iterator[tuple[int, LabelledText]]:
    """Yield the rows that can be spoken."""
    labels = text.labels.tolist()
    for row in rows:
        if row not in text.set_aside:
            yield row, LabelledText(text[row].tobytes().decode(), LANGUAGES[labels[row]])


Job = tuple[int, Any]  # a row to be built, and what it is built from
NotBuilt = list[tuple[int, str, str]]  # rows that are set aside, with reason and detail


class _Made(NamedTuple):
    rows: list[int]
    arrays: Sequence[Array]
    set_aside: NotBuilt
    labels: Labels = 0


def _build_audio(
    tools: Tools, corpus: Corpus, options: DecodeOptions, packed: bool, writer: StoreWriter, rows: Sequence[int]
) -> None:
    """Decode the clips at `rows`; unless `packed`, store only their lengths and checksums."""
    tools.announce("BUILDING AUDIO CACHE" if packed else "BUILDING LENGTHS CACHE", len(rows))
    jobs = [(row, corpus.clips[row]) for row in rows]
    make = partial(_decode_chunk, corpus.folder, options, packed)
    _build_rows(tools, writer, make, jobs, AUDIO_CHUNK, "Decoding audio", "decoder")


def build_text(
    tools: Tools, sentences: Sequence[LabelledText], use_phonemes: bool, writer: StoreWriter, rows: Sequence[int]
) -> None:
    """Write the sentences at `rows` as they are spoken, labelled with their language."""
    tools.announce("BUILDING TEXT CACHE (Text Preprocessing)", len(rows))
    jobs = [(row, sentences[row]) for row in rows]
    make = partial(_normalize_chunk, use_phonemes)
    _build_rows(tools, writer, make, jobs, TEXT_CHUNK, "Preparing text", "normaliser")


def build_ids(tools: Tools, text: Store, tokenizer: Tokenizer, writer: StoreWriter, rows: Sequence[int]) -> None:
    """Write the token ids of the spoken texts at `rows`; texts with unknown characters are set aside."""
    make = partial(_encode_chunk, tokenizer.to_json())
    jobs = list(_spoken(text, rows))
    _build_rows(tools, writer, make, jobs, TEXT_CHUNK, "Tokenising", "tokenizer")


def _build_rows(
    tools: Tools,
    writer: StoreWriter,
    make: Callable[[Sequence[Job]], _Made],
    jobs: Sequence[Job],
    chunk_size: int,
    title: str,
    program: str,
) -> None:
    """Make all rows in the pool and add to the index what the workers write to the data file."""
    pool, progress = tools.pool, tools.progress
    pool.reserved.value = writer.end
    chunks = (jobs[start : start + chunk_size] for start in range(0, len(jobs), chunk_size))
    with progress_bar(progress, title, len(jobs)) as advance:
        for chunk, built in pool.run(partial(_write_chunk, writer.data_path, make), chunks):
            if built is None:
                set_aside = [(chunk[0][0], f"crashed the {program}", "processing it alone kills the process")]
            else:
                rows, records, offset, set_aside = built
                writer.add_to_index(rows, records, offset)
            writer.set_aside += set_aside
            advance(len(chunk))
    writer.end = pool.reserved.value


def _write_chunk(
    data_path: Path, make: Callable[[Sequence[Job]], _Made], chunk: Sequence[Job]
) -> tuple[list[int], Array, int, NotBuilt]:
    """In a worker: make rows, write them to a reserved place in the data file, and return where they are."""
    rows, arrays, set_aside, labels = make(chunk)
    block, records = pack(arrays, labels)
    offset = reserve(len(block))
    with open(data_path, "r+b") as file:
        write_at(file.fileno(), block, offset)
    return rows, records, offset, set_aside


def _decode_chunk(folder: Path, options: DecodeOptions, packed: bool, chunk: Sequence[tuple[int, Clip]]) -> _Made:
    rows: list[int] = []
    arrays: list[Array] = []
    set_aside: NotBuilt = []
    for row, clip in chunk:
        try:
            arrays.append(_decode_clip(folder, options, clip))
            rows.append(row)
        except audio.UnusableAudio as error:
            set_aside.append((row, *beyond(error.reason, error.detail)))
    if not packed:
        records = pack(arrays)[1]
        arrays = list(np.stack([records["length"].astype(np.uint64), records["hash"]], axis=1))
    return _Made(rows, arrays, set_aside)


def _decode_clip(folder: Path, options: DecodeOptions, clip: Clip) -> audio.Pcm:
    path = folder / clip.path
    pcm = options.decode(path)
    try:
        now = path.stat()
    except OSError as error:
        raise audio.UnusableAudio("changed while read", error.strerror or str(error)) from None
    listed = (clip.size_bytes, clip.modified_ns, clip.changed_ns)
    if (now.st_size, now.st_mtime_ns, now.st_ctime_ns) != listed:
        raise audio.UnusableAudio("changed while read", "the file was written to during preparation")
    audio.refuse_silence(pcm)
    return pcm


def _normalize_chunk(use_phonemes: bool, chunk: Sequence[tuple[int, LabelledText]]) -> _Made:
    """In a worker: turn texts into what is spoken, as UTF-8."""
    made = [spoken(*sentence, use_phonemes) for _, sentence in chunk]
    rows = [row for row, _ in chunk]
    set_aside = [(row, *text) for row, text in zip(rows, made, strict=True) if not isinstance(text, str)]
    arrays = [np.frombuffer((text if isinstance(text, str) else "").encode(), np.uint8) for text in made]
    return _Made(rows, arrays, set_aside, [LANGUAGES.index(sentence.language) for _, sentence in chunk])


def _encode_chunk(vocabulary: str, chunk: Sequence[tuple[int, LabelledText]]) -> _Made:
    """In a worker: turn spoken texts into token ids."""
    rows = [row for row, _ in chunk]
    arrays, problems = token_ids(_tokenizer_of(vocabulary), [sentence for _, sentence in chunk])
    return _Made(rows, arrays, [(rows[at], *problem) for at, problem in problems.items()])


_tokenizer_of = lru_cache(maxsize=1)(Tokenizer)
