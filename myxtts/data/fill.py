"""The work behind a cache: rows of PCM, of spoken text and of token ids, made in parallel.

Audio and text are cut into chunks and worked on in processes that share nothing but the file they write to, so
the work grows with the cores; token ids come from one native call that is parallel by itself.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from myxtts import audio
from myxtts.config import LANGUAGES, SAMPLE_RATE
from myxtts.data.corpus import Clip
from myxtts.data.store import Array, Store, StoreWriter, pack, write_at
from myxtts.data.workers import Workers
from myxtts.text.language import detect_languages
from myxtts.text.normalize import normalize
from myxtts.text.phonemes import phonemize
from myxtts.text.tokenizer import Tokenizer, describe_characters

AUDIO_CHUNK = 32
TEXT_CHUNK = 256
IDS_CHUNK = 8192
LONGEST_TEXT = 4000
"""Characters beyond which a text is set aside unread: no clip is that long, and it would stall a worker."""

Item = TypeVar("Item")
_log = logging.getLogger(__name__)


class Progress(Protocol):
    """Something that shows how far a long piece of work is."""

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
    """Rows of one chunk that now stand in data.bin from `offset` on, and why the others do not."""

    rows: list[int]
    records: Array
    offset: int
    problems: list[tuple[int, str, str]]


class _Decoder:
    """Decodes chunks and writes them into the shared data file, each chunk at a place of its own."""

    def __init__(self, options: DecodeOptions, data_path: Path, end: Synchronized[int]) -> None:
        self._options = options
        self._descriptor = os.open(data_path, os.O_WRONLY)
        self._end = end

    def decode(self, chunk: Sequence[tuple[int, Clip]]) -> _Decoded:
        rows: list[int] = []
        arrays: list[Array] = []
        problems = []
        for row, clip in chunk:
            try:
                arrays.append(self._decode_clip(clip))
                rows.append(row)
            except audio.UnusableAudio as error:
                problems.append((row, error.reason, error.detail))
        packed, records = pack(arrays)
        with self._end.get_lock():
            offset = self._end.value
            self._end.value += len(packed)
        write_at(self._descriptor, packed, offset)
        return _Decoded(rows, records, offset, problems)

    def _decode_clip(self, clip: Clip) -> audio.Pcm:
        options = self._options
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

    def close(self) -> None:
        os.close(self._descriptor)


_decoder: _Decoder
"""The decoder of a worker process."""


def _start_decoder(options: DecodeOptions, data_path: Path, end: Synchronized[int]) -> None:
    global _decoder
    _decoder = _Decoder(options, data_path, end)


def _decode_chunk(chunk: Sequence[tuple[int, Clip]]) -> _Decoded:
    return _decoder.decode(chunk)


def fill_audio(
    writer: StoreWriter,
    rows: Sequence[int],
    clips: Sequence[Clip],
    options: DecodeOptions,
    num_workers: int,
    progress: Progress,
) -> None:
    """Decode the clips at `rows` into the store; what cannot be used is set aside."""
    end: Synchronized[int] = multiprocessing.get_context("forkserver").Value("Q", writer.end)
    chunks = list(_chunks([(row, clips[row]) for row in rows], AUDIO_CHUNK))
    num_workers = max(1, min(num_workers, len(chunks)))
    start_args = (options, writer.data_path, end)
    _announce("BUILDING AUDIO CACHE", len(rows), num_workers)
    progress.begin("Decoding audio", len(rows))
    for chunk, decoded in Workers(_decode_chunk, num_workers, _start_decoder, start_args).run(chunks):
        if decoded is None:
            (row, _), *_ = chunk
            writer.set_aside(row, "crashed the decoder", "decoding this file alone kills the process")
        else:
            writer.enter(decoded.rows, decoded.records, decoded.offset)
            for row, reason, detail in decoded.problems:
                writer.set_aside(row, reason, detail)
        progress.advance(len(chunk))
    progress.end()
    writer.end = end.value


def _speak_chunk(use_phonemes: bool, chunk: Sequence[tuple[int, str, str]]) -> tuple[bytearray, Array]:
    """Texts as they are spoken, packed as UTF-8."""
    spoken = [normalize(text, language) for _, text, language in chunk]
    if use_phonemes:
        for language in {language for _, _, language in chunk}:
            places = [at for at, job in enumerate(chunk) if job[2] == language]
            for at, sounds in zip(places, phonemize([spoken[at] for at in places], language), strict=True):
                spoken[at] = sounds
    return pack([np.frombuffer(text.encode(), np.uint8) for text in spoken])


def fill_text(
    writer: StoreWriter,
    rows: Sequence[int],
    sentences: Sequence[Sentence],
    use_phonemes: bool,
    num_workers: int,
    progress: Progress,
) -> None:
    """Find the language where it is not known, and write how each sentence at `rows` is spoken."""
    too_long = {row for row in rows if len(sentences[row].text) > LONGEST_TEXT}
    for row in sorted(too_long):
        detail = f"{len(sentences[row].text)} characters; the most that is read is {LONGEST_TEXT}"
        writer.set_aside(row, "text too long", detail)
    wanted = [row for row in rows if row not in too_long]
    languages = _languages([sentences[row] for row in wanted])
    jobs = [(row, sentences[row].text, language) for row, language in zip(wanted, languages, strict=True)]
    chunks = list(_chunks(jobs, TEXT_CHUNK))
    num_workers = max(1, min(num_workers, len(chunks)))
    _announce("BUILDING TEXT CACHE (Text Preprocessing)", len(rows), num_workers)
    progress.begin("Preparing text", len(jobs))
    for chunk, result in Workers(partial(_speak_chunk, use_phonemes), num_workers).run(chunks):
        if result is None:
            writer.set_aside(chunk[0][0], "crashed the normaliser", "this text alone kills the process")
            continue
        packed, records = result
        chunk_rows = [row for row, _, _ in chunk]
        writer.append_packed(chunk_rows, packed, records, [LANGUAGES.index(code) for _, _, code in chunk])
        for at in np.flatnonzero(records["length"] == 0).tolist():
            writer.set_aside(chunk[at][0], "empty text", f"nothing to speak in '{chunk[at][1][:40]}'")
        progress.advance(len(chunk))
    progress.end()


def fill_ids(
    writer: StoreWriter, rows: Sequence[int], text: Store, tokenizer: Tokenizer, progress: Progress
) -> None:
    """Token ids of the spoken texts at `rows`; characters the vocabulary lacks are named, never dropped."""
    known = []
    for row in rows:
        code = LANGUAGES[text.labels[row]]
        if row in text.set_aside:
            continue
        if code in tokenizer.languages:
            known.append(row)
        else:
            fix = f"the vocabulary has no [{code}]; add it with myxtts vocabulary extend --language {code}"
            writer.set_aside(row, "language not in vocabulary", fix)
    progress.begin("Tokenising", len(known))
    for chunk in _chunks(known, IDS_CHUNK):
        texts = [spoken_text(text, row) for row in chunk]
        languages = [LANGUAGES[text.labels[row]] for row in chunk]
        ids = tokenizer.encode_batch(texts, languages)
        writer.append(chunk, [np.asarray(row_ids, np.int32) for row_ids in ids])
        for row, row_ids, row_text, language in zip(chunk, ids, texts, languages, strict=True):
            if tokenizer.unknown_id in row_ids:
                unknown = tokenizer.unknown_characters(row_text, language)
                writer.set_aside(row, "unknown characters", describe_characters(unknown))
        progress.advance(len(chunk))
    progress.end()


def spoken_text(text: Store, row: int) -> str:
    """One row of a text store as a string."""
    return text[row].tobytes().decode()


def _languages(sentences: Sequence[Sentence]) -> list[str]:
    unknown = [sentence for sentence in sentences if not sentence.language]
    if unknown:
        _log.info("Detecting the language of %d sentences", len(unknown))
    detected = iter(
        detect_languages([sentence.text for sentence in unknown], [sentence.speaker for sentence in unknown])
        if unknown
        else ()
    )
    return [sentence.language or next(detected) for sentence in sentences]


def _announce(title: str, num_samples: int, num_workers: int) -> None:
    _log.info("%s", title)
    _log.info("Processing %d samples", num_samples)
    _log.info("Using %d parallel workers", num_workers)


def _chunks(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
