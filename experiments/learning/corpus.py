"""The corpus of the learning experiment: which sentences are held out, and how text is tokenised.

A held-out sentence is held out for every speaker who reads it.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from myxtts.config import DataSettings
from myxtts.data.prepare import spoken_corpus
from myxtts.errors import DatasetError, NoProgress
from myxtts.text.tokenizer import train as train_vocabulary

HELD_OUT = {"kathleen": 20, "cmu_slt": 10, "cmu_bdl": 10}
"""Held-out sentences by speaker; all three read the same ones."""
MIN_WORDS, MAX_WORDS = 5, 14
"""Length of a held-out sentence: in a shorter one a single word decides too much of the WER."""
COLUMNS = ("path", "speaker", "language", "text", "seconds", "sample_rate")
RECORDINGS = "recordings"
"""The corpus of unmodified clips, from which reference voices and comparisons are taken."""
HEADER = "audio_file|text|speaker_name|language\n"


class Spoken(NamedTuple):
    """One line of the speech folder's metadata."""

    path: str
    speaker: str
    language: str
    text: str
    seconds: float


class Split(NamedTuple):
    train: list[Spoken]
    held_out: list[Spoken]
    unused: list[Spoken]
    """Held-out sentences read by other speakers, and speakers excluded from training."""


def read_speech(folder: Path) -> list[Spoken]:
    """Return the clips of a folder whose metadata.csv has the columns `COLUMNS`."""
    file = folder / "metadata.csv"
    if not file.is_file():
        raise DatasetError(f"{file} is missing; name a folder of recordings with lines of {'|'.join(COLUMNS)}")
    header, *lines = file.read_text(encoding="utf-8").splitlines() or [""]
    if tuple(header.split("|")) != COLUMNS:
        raise DatasetError(f"{file} begins with {header[:60]!r}, expected the header {'|'.join(COLUMNS)}")
    rows = [line.split("|") for line in lines if line]
    if wrong := [row for row in rows if len(row) != len(COLUMNS)]:
        raise DatasetError(f"{file}: {len(wrong)} lines do not have {len(COLUMNS)} columns, the first: {wrong[0]}")
    return [Spoken(str(folder.resolve() / row[0]), row[1], row[2], row[3], float(row[4])) for row in rows]


def unpacked(speech: Path, corpus: Path) -> Path:
    """Return the speech folder; a zip file is extracted once, into the corpus folder."""
    if speech.suffix != ".zip":
        return speech
    folder = corpus / "speech"
    if not folder.is_dir():
        with zipfile.ZipFile(speech) as packed:
            packed.extractall(folder)
    return next(folder.rglob("metadata.csv")).parent


def plain(text: str) -> str:
    """Lower-case words without punctuation: the key by which sentences are compared."""
    return " ".join(re.sub(r"[^\w']+", " ", text.lower()).split())


def split(clips: Sequence[Spoken], held_out: Mapping[str, int] = HELD_OUT, without: Collection[str] = ()) -> Split:
    """Choose the held-out sentences; the result does not depend on the order of the clips.

    Speakers in `without` are not trained on but may still read held-out sentences: unseen voices.
    """
    by_sentence: dict[str, list[Spoken]] = {}
    for clip in clips:
        by_sentence.setdefault(plain(clip.text), []).append(clip)
    wanted, chosen = Counter(held_out), dict[str, Spoken]()
    for sentence in sorted(by_sentence, key=lambda text: hashlib.blake2b(text.encode()).digest()):
        if not MIN_WORDS <= len(sentence.split()) <= MAX_WORDS:
            continue
        readers = {clip.speaker: clip for clip in by_sentence[sentence]}
        if speaker := next((name for name in wanted if wanted[name] and name in readers), None):
            chosen[sentence] = readers[speaker]
            wanted[speaker] -= 1
    if missing := +wanted:
        raise DatasetError(f"Not enough sentences of {MIN_WORDS} to {MAX_WORDS} words to hold out: {missing}")
    parts = Split([], [], [])
    for clip in clips:
        sentence = plain(clip.text)
        if chosen.get(sentence) is clip:
            parts.held_out.append(clip)
        else:
            (parts.unused if sentence in chosen or clip.speaker in without else parts.train).append(clip)
    return parts


def write_corpus(parts: Split, folder: Path) -> None:
    """Write the metadata of a corpus folder; the audio files are named by their absolute paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, clips in (("metadata_train.csv", parts.train), ("metadata_eval.csv", parts.held_out)):
        rows = (f"{clip.path}|{clip.text}|{clip.speaker}|{clip.language}\n" for clip in clips)
        (folder / name).write_text(HEADER + "".join(rows), encoding="utf-8")


def character_vocabulary(corpus: Path, use_phonemes: bool) -> Path:
    """Write a vocabulary of single letters or phonemes to the corpus folder once, and return its path.

    A few thousand sentences are too few to learn the pronunciation of a thousand BPE tokens.
    """
    file = corpus / f"{'phonemes' if use_phonemes else 'letters'}.json"
    if not file.is_file():
        data = DataSettings(train_data=corpus, language="en", use_phonemes=use_phonemes)
        content = json.loads(train_vocabulary(*spoken_corpus(data, NoProgress()), data.vocab_size).to_json())
        special = {token["content"] for token in content["added_tokens"]}
        vocabulary = content["model"]["vocab"].items()
        kept = {token: number for token, number in vocabulary if len(token) == 1 or token in special}
        content["model"] |= {"vocab": kept, "merges": []}
        file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return file
