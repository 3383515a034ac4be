"""A corpus made ready for training: whatever the cache lacks is prepared, then the cache is opened.

The first start and every later one are the same call. Three stores hold the result, each keyed by what decides
its rows: `audio` (int16 PCM, one row per clip; without native loading `lengths`, which says how much of it there
is), `text` (how a sentence is spoken, one row per distinct sentence) and `ids` (its token ids). A new vocabulary
redoes only the ids; a new or changed clip redoes only itself.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from myxtts import __version__, audio
from myxtts.audio import DECODE_VERSION, LIBRARIES
from myxtts.config import LANGUAGES, PREPARE_KEYS, SAMPLE_RATE, DataSettings
from myxtts.data.clips import (
    AudioRows,
    ClipSet,
    DecodedAudio,
    DecodeOptions,
    PreparedCorpus,
    measured,
    write_set_aside_list,
)
from myxtts.data.corpus import METADATA_FILES, Clip, Corpus, SetAside, held_out, last_change, read_corpus
from myxtts.data.pool import Workers, reserve
from myxtts.data.store import (
    FORMAT_VERSION,
    Array,
    CacheDamaged,
    Rows,
    Sources,
    Store,
    StoreSpec,
    StoreWriter,
    build_store,
    cache_root,
    identity,
    open_store,
    pack,
    user_cache,
    write_at,
)
from myxtts.errors import ConfigError, DatasetError, NoProgress, Progress
from myxtts.host import usable_cores
from myxtts.text import language as detection
from myxtts.text import normalize as normalization
from myxtts.text import phonemes, tokenizer
from myxtts.text.language import detect_languages, warn_of_other_script
from myxtts.text.normalize import normalize
from myxtts.text.phonemes import phonemize
from myxtts.text.tokenizer import Tokenizer, describe_characters

AUDIO_CHUNK = 32
TEXT_CHUNK = 512
LONGEST_TEXT = 4000
"""Characters beyond which a text is set aside unread: no clip is that long, and it would stall a worker."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Problem = tuple[int, str, str]
"""A row, the reason it is set aside, and what was found."""
_log = logging.getLogger(__name__)


class Sentence(NamedTuple):
    """A text to be spoken, and its language."""

    text: str
    language: str


class _Decoded(NamedTuple):
    """Rows of one chunk that stand in the data file from `offset` on, and why the others do not."""

    rows: list[int]
    records: Array
    offset: int
    problems: list[Problem]


def fill_audio(
    writer: StoreWriter,
    rows: Sequence[int],
    corpus: Corpus,
    options: DecodeOptions,
    packed: bool,
    workers: Workers,
    progress: Progress,
) -> None:
    """Decode the clips at `rows` into the store; what cannot be used is set aside.

    Unless `packed`, the store gets what `measured` says of the samples in place of them.
    """
    _announce("BUILDING AUDIO CACHE" if packed else "BUILDING LENGTHS CACHE", len(rows), workers)
    workers.reserved.value = writer.end
    jobs = [(row, corpus.clips[row]) for row in rows]
    work = partial(_decode_chunk, corpus.folder, options, packed, writer.data_path)
    for chunk, decoded in _worked(workers, work, jobs, AUDIO_CHUNK, "Decoding audio", progress):
        if decoded is None:
            writer.set_aside(chunk[0][0], "crashed the decoder", "decoding this file alone ends the process")
            continue
        writer.enter(decoded.rows, decoded.records, decoded.offset)
        for problem in decoded.problems:
            writer.set_aside(*problem)
    writer.end = workers.reserved.value


def _decode_chunk(
    folder: Path, options: DecodeOptions, packed: bool, data_path: Path, chunk: Sequence[tuple[int, Clip]]
) -> _Decoded:
    """In a worker: decode some clips and write them to a place of their own in the data file."""
    rows: list[int] = []
    arrays: list[Array] = []
    problems: list[Problem] = []
    for row, clip in chunk:
        try:
            arrays.append(_decode_clip(folder, options, clip))
            rows.append(row)
        except audio.UnusableAudio as error:
            setting = " (max_mel_frames)" if error.reason == "too long" else ""
            problems.append((row, error.reason, error.detail + setting))
    block, records = pack(arrays)
    if not packed:
        block, records = pack(measured(records))
    offset = reserve(len(block))
    with open(data_path, "r+b") as file:
        write_at(file.fileno(), block, offset)
    return _Decoded(rows, records, offset, problems)


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
    if audio.is_silent(pcm):
        raise audio.UnusableAudio("silent", f"its samples stay within {audio.SILENCE} of 32768")
    return pcm


def fill_text(
    writer: StoreWriter,
    rows: Sequence[int],
    sentences: Sequence[Sentence],
    use_phonemes: bool,
    workers: Workers,
    progress: Progress,
) -> None:
    """Write how each sentence at `rows` is spoken."""
    _announce("BUILDING TEXT CACHE (Text Preprocessing)", len(rows), workers)
    jobs = []
    for row in rows:
        length = len(sentences[row].text)
        if length <= LONGEST_TEXT:
            jobs.append((row, *sentences[row]))
        else:
            writer.set_aside(row, "text too long", f"{length} characters; no more than {LONGEST_TEXT} are read")
    work = partial(_speak_chunk, use_phonemes)
    for chunk, result in _worked(workers, work, jobs, TEXT_CHUNK, "Preparing text", progress):
        if result is None:
            writer.set_aside(chunk[0][0], "crashed the normaliser", "reading this text ends the process")
            continue
        packed, records, problems = result
        labels = [LANGUAGES.index(language) for _, _, language in chunk]
        writer.append_packed([row for row, _, _ in chunk], packed, records, labels)
        for problem in problems:
            writer.set_aside(*problem)


def _speak_chunk(
    use_phonemes: bool, chunk: Sequence[tuple[int, str, str]]
) -> tuple[bytearray, Array, list[Problem]]:
    """In a worker: texts as they are spoken, packed as UTF-8, and the rows that cannot be."""
    spoken: list[str] = []
    problems: list[Problem] = []
    for row, text, language in chunk:
        try:
            words = normalize(text, language)
            spoken.append(phonemize([words], language)[0] if use_phonemes else words)
        except ConfigError as error:  # this language needs something that is not installed
            spoken.append("")
            problems.append((row, "language not available", str(error)))
        else:
            if not spoken[-1]:
                problems.append((row, "empty text", f"nothing to speak in '{text[:40]}'"))
    return *pack([np.frombuffer(text.encode(), np.uint8) for text in spoken]), problems


def fill_ids(
    writer: StoreWriter,
    rows: Sequence[int],
    text: Store,
    vocabulary: Tokenizer,
    workers: Workers,
    progress: Progress,
) -> None:
    """Token ids of the spoken texts at `rows`; characters the vocabulary lacks are named, never dropped."""
    labels = text.labels.tolist()
    known = []
    for row in rows:
        language = LANGUAGES[labels[row]]
        if row in text.set_aside:
            continue
        if language in vocabulary.languages:
            known.append(row)
        else:
            fix = f"the vocabulary has no [{language}]; see myxtts vocabulary extend --language {language}"
            writer.set_aside(row, "language not in vocabulary", fix)
    spoken = spoken_texts(text, known)
    jobs = [(row, line, LANGUAGES[labels[row]]) for row, line in zip(known, spoken, strict=True)]
    work = partial(_encode_chunk, vocabulary.to_json())
    for chunk, result in _worked(workers, work, jobs, TEXT_CHUNK, "Tokenising", progress):
        if result is None:
            writer.set_aside(chunk[0][0], "crashed the tokenizer", "encoding this text ends the process")
            continue
        packed, records, problems = result
        writer.append_packed([row for row, _, _ in chunk], packed, records)
        for problem in problems:
            writer.set_aside(*problem)


def _encode_chunk(
    vocabulary: str, chunk: Sequence[tuple[int, str, str]]
) -> tuple[bytearray, Array, list[Problem]]:
    """In a worker: token ids, packed, and the rows whose text has characters without an id."""
    tokenizer = _tokenizer(vocabulary)
    ids = tokenizer.encode_batch([text for _, text, _ in chunk], [language for _, _, language in chunk])
    problems = [
        (row, "unknown characters", describe_characters(tokenizer.unknown_characters(text, language)))
        for (row, text, language), row_ids in zip(chunk, ids, strict=True)
        if tokenizer.unknown_id in row_ids
    ]
    packed, records = pack([np.asarray(row_ids, np.int32) for row_ids in ids])
    return packed, records, problems


@lru_cache(maxsize=1)
def _tokenizer(vocabulary: str) -> Tokenizer:
    return Tokenizer(vocabulary)


def distinct_sentences(clips: Sequence[Clip], languages: Sequence[str]) -> tuple[list[Sentence], Rows]:
    """Every sentence once, and for each clip the row of its sentence."""
    rows: dict[Sentence, int] = {}
    clip_rows = [
        rows.setdefault(Sentence(clip.text, code), len(rows)) for clip, code in zip(clips, languages, strict=True)
    ]
    return list(rows), np.array(clip_rows, np.int64)


def spoken_texts(text: Store, rows: Sequence[int]) -> list[str]:
    """Rows of a text store as strings."""
    return [content.decode() for content in text.bytes_of(np.asarray(rows, np.int64))]


def _announce(title: str, num_samples: int, workers: Workers) -> None:
    _log.info("%s", title)
    _log.info("Processing %d samples", num_samples)
    _log.info("Using %d parallel workers", workers.num_workers)


def _worked(
    workers: Workers,
    work: Callable[[Sequence[Item]], Result],
    jobs: Sequence[Item],
    chunk_size: int,
    title: str,
    progress: Progress,
) -> Iterator[tuple[Sequence[Item], Result | None]]:
    """The results of `work` on all jobs, chunk by chunk, with the progress shown."""
    chunks = (jobs[start : start + chunk_size] for start in range(0, len(jobs), chunk_size))
    progress.begin(title, len(jobs))
    try:
        for chunk, result in workers.run(work, chunks):
            yield chunk, result
            progress.advance(len(chunk))
    finally:
        progress.end()


SNAPSHOTS_KEPT = 4
CLOCK_TICK_NS = 20_000_000
"""A folder changed this shortly before it was listed may have changed again with the same time."""

_ROWS = ("audio_rows", "ids_rows", "speakers", "languages")
_SEPARATOR = "\0"
_DIGEST_BYTES = 16


def state_of(folders: Sequence[Path], data: DataSettings) -> str:
    """A name for everything but the audio files that decides what a corpus is prepared to."""
    files = [folder / name for folder in folders for name in METADATA_FILES]
    if data.tokenizer is not None:
        files += [data.tokenizer, data.tokenizer / "vocab.json"]
    code = sorted(Path(__file__).parent.glob("*.py"))
    versions = (__version__, DECODE_VERSION, LIBRARIES, FORMAT_VERSION)
    code_of_text = (normalization.fingerprint(), detection.fingerprint(), tokenizer.code_fingerprint())
    sounds = phonemes.fingerprint() if data.use_phonemes else ""
    decisive = [getattr(data, key.removeprefix("data.")) for key in PREPARE_KEYS[:-1]]
    places = [str(folder.absolute()) for folder in folders]
    hasher = xxhash.xxh3_128(repr((versions, code_of_text, sounds, decisive, places)).encode())
    for path in (*files, *code):
        try:
            content = path.read_bytes() if path.is_file() else None
        except OSError:  # whoever needs the file will say so
            content = None
        hasher.update(repr((path.name, content and len(content))).encode())
        hasher.update(content or b"")
    return hasher.hexdigest()


def save_snapshot(prepared: PreparedCorpus, state: str, corpora: Sequence[Corpus]) -> None:
    """Keep a snapshot beside the stores, if that can be written and the corpus is at rest."""
    listed = {folder: at for corpus in corpora for folder, at in corpus.listed.items()}
    if min(corpus.read_at for corpus in corpora) - max(listed.values(), default=0) < CLOCK_TICK_NS:
        return
    clips = [(corpus.folder, clip) for corpus in corpora for clip in corpus.clips]
    audio = prepared.train.audio
    details = {
        "set_aside": prepared.set_aside,
        "speakers": prepared.speaker_names,
        "decoding": asdict(audio.options) if isinstance(audio, DecodedAudio) else None,
    }
    arrays: dict[str, Any] = {
        "paths": _blob(str(folder.absolute() / clip.path) for folder, clip in clips),
        "stats": np.array([clip[-3:] for _, clip in clips], np.int64).reshape(-1, 3),
        "folders": _blob(listed),
        "folder_times": np.array(list(listed.values()), np.int64),
        "vocabulary": np.frombuffer(prepared.vocabulary.encode(), np.uint8),
        "details": _blob([json.dumps(details)]),
        "train_files": np.array([0, len(corpora[0].clips)]),
        "val_files": np.array([len(clips) - len(corpora[-1].clips), len(clips)]),
    }
    for name, part in (("train", prepared.train), ("val", prepared.val)):
        arrays[f"{name}_names"] = _blob(part.names)
        arrays[f"{name}_stores"] = _blob([str(part.audio.folder), str(part.ids.folder)])
        for field in _ROWS:
            arrays[f"{name}_{field}"] = getattr(part, field)
    temporary = prepared.root / f"tmp-snapshot-{os.getpid()}"
    with contextlib.suppress(OSError):  # a full disk or a read-only cache only costs the shortcut
        for left_behind in prepared.root.glob("tmp-snapshot-*"):  # by a killed process, or one that now fails
            left_behind.unlink(missing_ok=True)
        try:
            content = io.BytesIO()
            np.savez(content, **arrays)
            temporary.write_bytes(xxhash.xxh3_128_digest(content.getvalue()) + content.getvalue())
            temporary.rename(_path(prepared.root, state))
        finally:
            temporary.unlink(missing_ok=True)
        kept = sorted(prepared.root.glob("snapshot-*"), key=lambda path: path.stat().st_mtime_ns)
        for path in kept[:-SNAPSHOTS_KEPT]:
            path.unlink()


def load_snapshot(root: Path, state: str) -> PreparedCorpus | None:
    """The corpus as it was prepared before, if nothing has changed since."""
    try:
        raw = _path(root, state).read_bytes()
        if raw[:_DIGEST_BYTES] != xxhash.xxh3_128_digest(raw[_DIGEST_BYTES:]):
            return None
        with np.load(io.BytesIO(raw[_DIGEST_BYTES:]), allow_pickle=False) as arrays:
            if not _unchanged(arrays):
                return None
            details = json.loads(arrays["details"].tobytes())
            train = _clip_set(arrays, "train", details["decoding"], None)
            return PreparedCorpus(
                train=train,
                val=_clip_set(arrays, "val", details["decoding"], train),
                speaker_names=details["speakers"],
                set_aside=[SetAside(*item) for item in details["set_aside"]],
                vocabulary=arrays["vocabulary"].tobytes().decode(),
                root=root,
            )
    except (OSError, CacheDamaged):
        return None


def _clip_set(arrays: Any, name: str, decoding: dict[str, Any] | None, other: ClipSet | None) -> ClipSet:
    """One side of the split; what `other` has open already is shared with it."""
    audio_folder, ids_folder = map(Path, _texts(arrays[f"{name}_stores"]))
    audio: AudioRows
    if other is not None and other.audio.folder == audio_folder:
        audio = other.audio
    elif decoding is None:
        audio = _open(audio_folder, np.int16)
    else:
        files = slice(*arrays[f"{name}_files"].tolist())
        paths, stats = _texts(arrays["paths"])[files], arrays["stats"][files]
        audio = DecodedAudio(_open(audio_folder, np.uint64), paths, stats, DecodeOptions(**decoding))
    ids = other.ids if other is not None and other.ids.folder == ids_folder else _open(ids_folder, np.int32)
    rows = {field: arrays[f"{name}_{field}"] for field in _ROWS}
    return ClipSet(audio, ids, **rows, names=_texts(arrays[f"{name}_names"]))


def _open(folder: Path, dtype: npt.DTypeLike) -> Store:
    if (folder / "damaged").exists():
        raise CacheDamaged(f"{folder} was marked as damaged")
    store = Store(folder, dtype)
    with contextlib.suppress(OSError):
        os.utime(folder)  # when it was last used decides which stores are kept
    return store


def _unchanged(arrays: Any) -> bool:
    times = arrays["folder_times"].tolist()
    for folder, at in zip(_texts(arrays["folders"]), times, strict=True):
        if last_change(Path(folder)) != at:
            return False
    for path, stat in zip(_texts(arrays["paths"]), arrays["stats"].tolist(), strict=True):
        now = os.stat(path)  # noqa: PTH116 (13,100 of them)
        if [now.st_size, now.st_mtime_ns, now.st_ctime_ns] != stat:
            return False
    return True


def _blob(texts: Any) -> Array:
    return np.frombuffer(_SEPARATOR.join(texts).encode("utf-8", "surrogateescape"), np.uint8)


def _texts(blob: Array) -> list[str]:
    joined = blob.tobytes().decode("utf-8", "surrogateescape")
    return joined.split(_SEPARATOR) if joined else []


def _path(root: Path, state: str) -> Path:
    return root / f"snapshot-{state}.npz"


EMBEDDED_CORPUS = Path(__file__).parent.parent / "embedded"
"""The recordings inside the package, used when no data is named."""


def prepare(data: DataSettings, progress: Progress | None = None, verify: bool = False) -> PreparedCorpus:
    """Open the cache of the corpus that the settings name, building first whatever it lacks.

    With `verify` every byte is compared with its checksum, and what does not match is built again; without it
    each row is compared when it is first read.
    """
    folders = [data.train_data or EMBEDDED_CORPUS, *([data.val_data] if data.val_data else [])]
    root = _root(data, folders[0])
    found = state_of(folders, data)
    if not verify and (known := load_snapshot(root, found)) is not None:
        _log.info("LOADING CACHE FROM DISK")
        write_set_aside_list(root, known.set_aside)
        return known
    with _workers(data) as workers:
        tools = _Tools(workers, progress or NoProgress(), verify)
        train_part = _Part(data, folders[0], tools)
        vocabulary = _vocabulary(data, train_part)
        parts = [train_part, *(_Part(data, folder, tools) for folder in folders[1:])]
        speaker_names = sorted({clip.speaker for part in parts for clip in part.corpus.clips})
        clips = [part.clip_set(vocabulary, speaker_names) for part in parts]
    if len(clips[0]) == 0:
        raise _nothing_usable(folders[0], train_part.set_aside)
    train, val = train_part.split(clips[0])
    if data.val_data:
        val = clips[1]
    set_aside = [item for part in parts for item in part.set_aside]
    write_set_aside_list(root, set_aside)
    prepared = PreparedCorpus(train, val, speaker_names, set_aside, vocabulary.to_json(), root)
    if state_of(folders, data) == found:  # else the metadata changed between two looks at it
        save_snapshot(prepared, found, [part.corpus for part in parts])
    return prepared


def spoken_corpus(data: DataSettings, progress: Progress) -> tuple[list[str], list[str]]:
    """Every distinct sentence of a corpus as it is spoken, with its language; touches no audio."""
    with _workers(data) as workers:
        return _Part(data, data.train_data or EMBEDDED_CORPUS, _Tools(workers, progress, False)).spoken()


@dataclass(frozen=True)
class _Tools:
    """What building a store takes besides the corpus."""

    workers: Workers
    progress: Progress
    verify: bool


class _Part:
    """One folder of recordings on its way through the three stores."""

    def __init__(self, data: DataSettings, folder: Path, tools: _Tools) -> None:
        self.data = data
        self.tools = tools
        self.corpus: Corpus = read_corpus(folder)
        self.root = _root(data, folder)
        self.sentences, self.sentence_rows = distinct_sentences(self.corpus.clips, self._languages())
        self.text = self._text_store()
        self.set_aside = list(self.corpus.set_aside)
        self.usable: list[Clip] = []

    def spoken(self) -> tuple[list[str], list[str]]:
        """Every sentence as it is spoken, and its language."""
        rows = [row for row in range(len(self.text)) if row not in self.text.set_aside]
        return spoken_texts(self.text, rows), [LANGUAGES[self.text.labels[row]] for row in rows]

    def clip_set(self, vocabulary: Tokenizer, speaker_names: list[str]) -> ClipSet:
        """The usable clips with their rows; the others join `set_aside`."""
        self.audio = self._audio()
        ids = self._ids_store(vocabulary)
        problems = self._problems(ids)
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
            names=[clip.id for clip in self.usable],
        )

    def _problems(self, ids: Store) -> dict[int, tuple[str, str]]:
        """Why clips cannot be used, by row; where several reasons hold, the audio's comes first."""
        least, most = self.data.min_clip_seconds, DecodeOptions.of(self.data).max_samples
        seconds = self.audio.lengths / SAMPLE_RATE
        num_ids = ids.lengths[self.sentence_rows]
        problems: dict[int, tuple[str, str]] = {}
        for row in np.flatnonzero(num_ids > self.data.max_text_length).tolist():
            limit = f"the limit is {self.data.max_text_length} (max_text_length)"
            problems[row] = ("text too long", f"{num_ids[row]} tokens, {limit}")
        for store in (ids, self.text):
            for row in np.flatnonzero(np.isin(self.sentence_rows, list(store.set_aside))).tolist():
                problems[row] = store.set_aside[int(self.sentence_rows[row])]
        for row in np.flatnonzero(seconds < least).tolist():
            problems[row] = ("too short", f"{seconds[row]:.2f} s, the least is {least:.2f} s (min_clip_seconds)")
        for row in np.flatnonzero(self.audio.lengths > most).tolist():
            limit = f"the limit is {most / SAMPLE_RATE:.2f} s (max_mel_frames)"
            problems[row] = ("too long", f"{seconds[row]:.2f} s, {limit}")
        return problems | self.audio.set_aside

    def split(self, clips: ClipSet) -> tuple[ClipSet, ClipSet]:
        """Training and validation clips."""
        if all(clip.held_out for clip in self.usable):
            raise DatasetError(f"No usable clip in {self.corpus.folder} but those of metadata_eval.csv")
        chosen = held_out(self.usable, self.data)
        return clips.select(np.flatnonzero(~chosen)), clips.select(np.flatnonzero(chosen))

    def _languages(self) -> list[str]:
        """The language of every clip: what the metadata says, else the setting, else what is detected.

        Detection looks at all sentences of a speaker together, so its result is kept for exactly these clips.
        """
        clips = self.corpus.clips
        named = [clip.language or self.data.language or "" for clip in clips]
        unknown = [clip for clip, language in zip(clips, named, strict=True) if not language]
        if self.data.language:
            warn_of_other_script(self.data.language, [clip.text for clip in clips if not clip.language])
        if not unknown:
            return named

        def fill(writer: StoreWriter, rows: list[int]) -> None:
            _log.info("Detecting the language of %d sentences", len(unknown))
            self.tools.workers.start()
            found = detect_languages([clip.text for clip in unknown], [clip.speaker for clip in unknown])
            writer.append(rows, [np.array([LANGUAGES.index(code) for code in found], np.uint8)])

        sources = _sources([identity(*(part for clip in unknown for part in (clip.text, clip.speaker)))])
        spec = StoreSpec("languages", np.uint8, sources, {"detector": detection.fingerprint()}, limits={})
        detected = iter(self._store(spec, "language", fill)[0].tolist())
        return [code or LANGUAGES[next(detected)] for code in named]

    def _audio(self) -> Store | DecodedAudio:
        corpus, tools, packed = self.corpus, self.tools, self.data.native_loading
        options = DecodeOptions.of(self.data)
        recipe: dict[str, object] = {"decode": DECODE_VERSION, "libraries": LIBRARIES, "rate": SAMPLE_RATE}
        if options.trim_silence_db > 0:  # a row then no longer tells how long its file was
            recipe |= {"trim": options.trim_silence_db, "max_seconds": options.max_seconds}
        files = [(clip.path, clip.size_bytes, clip.modified_ns, clip.changed_ns) for clip in corpus.clips]
        spec = StoreSpec(
            kind="audio" if packed else "lengths",
            dtype=np.int16 if packed else np.uint64,
            sources=_sources(identity(*file) for file in files),
            recipe=recipe,
            limits={"max_seconds": options.max_seconds},
        )
        store = self._store(
            spec,
            spec.kind,
            lambda writer, rows: fill_audio(writer, rows, corpus, options, packed, tools.workers, tools.progress),
            verify=not packed,  # all its rows are read at once, and they are tiny
        )
        if packed:
            return store
        paths = [str(corpus.folder.absolute() / path) for path, *_ in files]
        return DecodedAudio(store, paths, np.array([stat for _, *stat in files], np.int64), options)

    def _text_store(self) -> Store:
        tools = self.tools
        recipe = {"normalize": normalization.fingerprint()}
        if self.data.use_phonemes:
            recipe["phonemes"] = phonemes.fingerprint()
        sources = _sources(identity(*sentence) for sentence in self.sentences)
        return self._store(
            StoreSpec("text", np.uint8, sources, recipe, limits={}),
            "text",
            lambda writer, rows: fill_text(
                writer, rows, self.sentences, self.data.use_phonemes, tools.workers, tools.progress
            ),
        )

    def vocabulary_store(self) -> Store:
        """One row: a vocabulary trained on what is spoken here, as the text of its file."""
        num_tokens = self.data.vocab_size

        def fill(writer: StoreWriter, rows: list[int]) -> None:
            texts, languages = self.spoken()
            _log.info("Training a vocabulary of up to %d tokens on %d sentences", num_tokens, len(texts))
            vocabulary = tokenizer.train(texts, languages, num_tokens)
            writer.append(rows, [np.frombuffer(vocabulary.to_json().encode(), np.uint8)])

        spoken = identity(self.text.hashes.tobytes(), self.text.labels.tobytes())
        recipe = {"code": tokenizer.code_fingerprint(), "num_tokens": num_tokens}
        return self._store(StoreSpec("vocabulary", np.uint8, _sources([spoken]), recipe, {}), "vocabulary", fill)

    def _ids_store(self, vocabulary: Tokenizer) -> Store:
        tools = self.tools
        # What is spoken and in which language decides the ids, however both were found.
        sources = self.text.hashes ^ self.text.labels.astype(np.uint64)
        recipe = {"vocabulary": vocabulary.fingerprint, "code": tokenizer.code_fingerprint()}
        return self._store(
            StoreSpec("ids", np.int32, sources, recipe, limits={}),
            "token",
            lambda writer, rows: fill_ids(writer, rows, self.text, vocabulary, tools.workers, tools.progress),
        )

    def _store(
        self, spec: StoreSpec, name: str, fill: Callable[[StoreWriter, list[int]], None], verify: bool = False
    ) -> Store:
        store = open_store(self.root, spec)
        if store is not None:
            _log.info("LOADING %s CACHE FROM DISK", name.upper())
        if store is not None and (verify or self.tools.verify) and not store.all_intact():
            _log.warning("Some rows of %s are not what was written; they are prepared again", store.folder)
            store = None
        return store or build_store(self.root, spec, fill)


def _workers(data: DataSettings) -> Workers:
    try:
        return Workers(min(data.num_workers, usable_cores()))
    except OSError as error:
        raise DatasetError(f"Cannot set up worker processes: {error} (is /dev/shm or /tmp full?)") from error


def _root(data: DataSettings, folder: Path) -> Path:
    """The embedded corpus lies inside the installed package, which is no place to write to."""
    return cache_root(folder, data.cache_dir or (user_cache() if folder == EMBEDDED_CORPUS else None))


def _sources(identities: Iterable[int]) -> Sources:
    return np.fromiter(identities, np.uint64)


def _vocabulary(data: DataSettings, part: _Part) -> Tokenizer:
    """The vocabulary that was named, else one trained on this corpus and kept beside its stores."""
    if data.tokenizer is not None:
        return Tokenizer.load(data.tokenizer)
    store = part.vocabulary_store()
    return Tokenizer(store[0].tobytes().decode(), source=str(store.folder))


def _nothing_usable(folder: Path, set_aside: Sequence[SetAside]) -> DatasetError:
    counts = Counter(item.reason for item in set_aside).most_common()
    reasons = "\n".join(f"  {count} × {reason}" for reason, count in counts) or "  the metadata is empty"
    example = f"\nFor example {set_aside[0].id}: {set_aside[0].detail}" if set_aside else ""
    return DatasetError(f"No usable clip in {folder}. Set aside:\n{reasons}{example}")
