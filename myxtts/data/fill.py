"""The work behind a cache: rows of PCM or its lengths, of spoken text and of token ids, made by worker processes.

Work is cut into chunks that share nothing but the file they write to, so it grows with the cores. Only small
things travel between processes: samples go straight from the worker that decoded them to the file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from myxtts import audio
from myxtts.config import LANGUAGES
from myxtts.data.corpus import Clip, Corpus
from myxtts.data.decoded import DecodeOptions, measured
from myxtts.data.store import Array, Rows, Store, StoreWriter, pack, write_at
from myxtts.data.workers import Workers, reserve
from myxtts.errors import ConfigError
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


class Progress(Protocol):
    """Something that shows how far a long piece of work is."""

    def begin(self, title: str, total: int) -> None: ...
    def advance(self, count: int) -> None: ...
    def end(self) -> None: ...


class NoProgress:
    """Shows no progress."""

    def begin(self, title: str, total: int) -> None: ...
    def advance(self, count: int) -> None: ...
    def end(self) -> None: ...


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
