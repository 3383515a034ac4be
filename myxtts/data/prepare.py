"""A corpus made ready for training: whatever the cache lacks is prepared, then the cache is opened.

The first start and every later one are the same call. Three stores hold the result, each keyed by what decides
its rows: `audio` (int16 PCM, one row per clip; without native loading `lengths`, which says how much of it there
is), `text` (how a sentence is spoken, one row per distinct sentence) and `ids` (its token ids). A new vocabulary
redoes only the ids; a new or changed clip redoes only itself.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from myxtts.audio import DECODE_VERSION, LIBRARIES
from myxtts.config import LANGUAGES, SAMPLE_RATE, DataSettings
from myxtts.data import snapshot
from myxtts.data.cache import StoreSpec, build_store, cache_root, identity, open_store, user_cache
from myxtts.data.clips import ClipSet, Prepared, write_set_aside_list
from myxtts.data.corpus import Clip, Corpus, read_corpus
from myxtts.data.decoded import DecodedAudio, DecodeOptions
from myxtts.data.fill import (
    NoProgress,
    Progress,
    distinct_sentences,
    fill_audio,
    fill_ids,
    fill_text,
    spoken_texts,
)
from myxtts.data.metadata import SetAside
from myxtts.data.scripts import warn_of_other_script
from myxtts.data.split import held_out
from myxtts.data.store import Sources, Store, StoreWriter
from myxtts.data.workers import Workers
from myxtts.errors import DatasetError
from myxtts.host import usable_cores
from myxtts.text import language, normalize, phonemes, tokenizer
from myxtts.text.language import detect_languages
from myxtts.text.tokenizer import Tokenizer

EMBEDDED_CORPUS = Path(__file__).parent.parent / "embedded"
"""The recordings inside the package, used when no data is named."""

_log = logging.getLogger(__name__)


def prepare(data: DataSettings, progress: Progress | None = None, verify: bool = False) -> Prepared:
    """Open the cache of the corpus that the settings name, building first whatever it lacks.

    With `verify` every byte is compared with its checksum, and what does not match is built again; without it
    each row is compared when it is first read.
    """
    folders = [data.train_data or EMBEDDED_CORPUS, *([data.val_data] if data.val_data else [])]
    root = _root(data, folders[0])
    found = snapshot.state_of(folders, data)
    if not verify and (known := snapshot.load(root, found)) is not None:
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
    prepared = Prepared(train, val, speaker_names, set_aside, vocabulary.to_json(), root)
    if snapshot.state_of(folders, data) == found:  # else the metadata changed between two looks at it
        snapshot.save(prepared, found, [part.corpus for part in parts])
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
        spec = StoreSpec("languages", np.uint8, sources, {"detector": language.fingerprint()}, limits={})
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
        recipe = {"normalize": normalize.fingerprint()}
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
