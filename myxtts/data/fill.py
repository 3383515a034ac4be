"""The work behind a cache: rows of PCM, of spoken text and of token ids, made by worker processes.

Work is cut into chunks that share nothing but the file they write to, so it grows with the cores. Only small
things travel between processes: samples go straight from the worker that decoded them to the file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from myxtts import audio
from myxtts.config import LANGUAGES, SAMPLE_RATE
from myxtts.data.corpus import Clip
from myxtts.data.store import Array, Store, StoreWriter, pack, write_at
from myxtts.data.workers import Workers, reserve
from myxtts.text.language import detect_languages
from myxtts.text.normalize import normalize
from myxtts.text.phonemes import phonemize
from myxtts.text.tokenizer import Tokenizer, describe_characters

AUDIO_CHUNK = 32
TEXT_CHUNK = 512
LONGEST_TEXT = 4000
"""Characters beyond which a text is set aside unread: no clip is that long, and it would stall a worker."""

Item = TypeVar("Item")
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
    """A text to be spoken. Without a language, the speaker says whose other sentences tell it."""

    text: str
    language: str
    speaker: str


@dataclass(frozen=True)
class DecodeOptions:
    """What decides the samples of a clip besides its file."""

    folder: Path
    max_seconds: float
    trim_silence_db: float


class _Decoded(NamedTuple):
    """Rows of one chunk that stand in the data file from `offset` on, and why the others do not."""

    rows: list[int]
    records: Array
    offset: int
    problems: list[Problem]


def fill_audio(
    writer: StoreWriter,
    rows: Sequence[int],
    clips: Sequence[Clip],
    options: DecodeOptions,
    workers: Workers,
    progress: Progress,
) -> None:
    """Decode the clips at `rows` into the store; what cannot be used is set aside."""
    _announce("BUILDING AUDIO CACHE", len(rows), workers)
    progress.begin("Decoding audio", len(rows))
    workers.reserved.value = writer.end
    chunks = _chunks([(row, clips[row]) for row in rows], AUDIO_CHUNK)
    for chunk, decoded in workers.run(partial(_decode_chunk, options, writer.data_path), chunks):
        if decoded is None:
            detail = "decoding this file alone ends the process"
            decoded = _Decoded([], pack([])[1], 0, [(chunk[0][0], "crashed the decoder", detail)])
        writer.enter(decoded.rows, decoded.records, decoded.offset)
        for problem in decoded.problems:
            writer.set_aside(*problem)
        progress.advance(len(chunk))
    writer.end = workers.reserved.value
    progress.end()


def _decode_chunk(options: DecodeOptions, data_path: Path, chunk: Sequence[tuple[int, Clip]]) -> _Decoded:
    """In a worker: decode some clips and write them to a place of their own in the data file."""
    rows: list[int] = []
    arrays: list[Array] = []
    problems: list[Problem] = []
    for row, clip in chunk:
        try:
            arrays.append(_decode_clip(options, clip))
            rows.append(row)
        except audio.UnusableAudio as error:
            problems.append((row, error.reason, error.detail))
    packed, records = pack(arrays)
    offset = reserve(len(packed))
    with open(data_path, "r+b") as file:
        write_at(file.fileno(), packed, offset)
    return _Decoded(rows, records, offset, problems)


def _decode_clip(options: DecodeOptions, clip: Clip) -> audio.Pcm:
    path = options.folder / clip.path
    pcm = audio.decode(path, SAMPLE_RATE, options.max_seconds, options.trim_silence_db)
    try:
        now = path.stat()
    except OSError as error:
        raise audio.UnusableAudio("changed while read", error.strerror or str(error)) from None
    listed = (clip.size_bytes, clip.modified_ns, clip.changed_ns)
    if (now.st_size, now.st_mtime_ns, now.st_ctime_ns) != listed:
        raise audio.UnusableAudio("changed while read", "the file was written to during preparation")
    return pcm


def fill_text(
    writer: StoreWriter,
    rows: Sequence[int],
    sentences: Sequence[Sentence],
    use_phonemes: bool,
    workers: Workers,
    progress: Progress,
) -> None:
    """Find the language where it is not known, and write how each sentence at `rows` is spoken."""
    _announce("BUILDING TEXT CACHE (Text Preprocessing)", len(rows), workers)
    workers.start()
    wanted = []
    for row in rows:
        length = len(sentences[row].text)
        if length <= LONGEST_TEXT:
            wanted.append(row)
        else:
            writer.set_aside(row, "text too long", f"{length} characters; no more than {LONGEST_TEXT} are read")
    languages = _languages([sentences[row] for row in wanted])
    jobs = [(row, sentences[row].text, language) for row, language in zip(wanted, languages, strict=True)]
    progress.begin("Preparing text", len(jobs))
    for chunk, result in workers.run(partial(_speak_chunk, use_phonemes), _chunks(jobs, TEXT_CHUNK)):
        if result is None:
            writer.set_aside(chunk[0][0], "crashed the normaliser", "reading this text ends the process")
        else:
            packed, records = result
            labels = [LANGUAGES.index(language) for _, _, language in chunk]
            writer.append_packed([row for row, _, _ in chunk], packed, records, labels)
            for at in np.flatnonzero(records["length"] == 0).tolist():
                writer.set_aside(chunk[at][0], "empty text", f"nothing to speak in '{chunk[at][1][:40]}'")
        progress.advance(len(chunk))
    progress.end()


def _languages(sentences: Sequence[Sentence]) -> list[str]:
    unknown = [sentence for sentence in sentences if not sentence.language]
    if not unknown:
        return [sentence.language for sentence in sentences]
    _log.info("Detecting the language of %d sentences", len(unknown))
    found = detect_languages([sentence.text for sentence in unknown], [sentence.speaker for sentence in unknown])
    detected = iter(found)
    return [sentence.language or next(detected) for sentence in sentences]


def _speak_chunk(use_phonemes: bool, chunk: Sequence[tuple[int, str, str]]) -> tuple[bytearray, Array]:
    """In a worker: texts as they are spoken, packed as UTF-8."""
    spoken = [normalize(text, language) for _, text, language in chunk]
    if use_phonemes:
        for language in {language for _, _, language in chunk}:
            places = [at for at, job in enumerate(chunk) if job[2] == language]
            for at, sounds in zip(places, phonemize([spoken[at] for at in places], language), strict=True):
                spoken[at] = sounds
    return pack([np.frombuffer(text.encode(), np.uint8) for text in spoken])


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
    progress.begin("Tokenising", len(jobs))
    work = partial(_encode_chunk, vocabulary.to_json())
    for chunk, result in workers.run(work, _chunks(jobs, TEXT_CHUNK)):
        if result is None:
            writer.set_aside(chunk[0][0], "crashed the tokenizer", "encoding this text ends the process")
        else:
            packed, records, problems = result
            writer.append_packed([row for row, _, _ in chunk], packed, records)
            for problem in problems:
                writer.set_aside(*problem)
        progress.advance(len(chunk))
    progress.end()


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


def spoken_texts(text: Store, rows: Sequence[int]) -> list[str]:
    """Rows of a text store as strings."""
    return [content.decode() for content in text.bytes_of(np.asarray(rows, np.int64))]


def _announce(title: str, num_samples: int, workers: Workers) -> None:
    _log.info("%s", title)
    _log.info("Processing %d samples", num_samples)
    _log.info("Using %d parallel workers", workers.num_workers)


def _chunks(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
