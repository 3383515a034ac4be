"""The corpus of the learning experiment: which sentences are held out, and how text is spelled.

A sentence that is held out is so for every speaker who reads it. Trains and speaks nothing.
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
"""Sentences to be judged, by who says them; all three read the same ones."""
FEWEST_WORDS, MOST_WORDS = 5, 14
"""Of a sentence that is judged: of shorter ones a single word decides too much."""
COLUMNS = ("path", "speaker", "language", "text", "seconds", "sample_rate")
RECORDINGS = "recordings"
"""The corpus of the clips as they were recorded, from which voices and comparisons are taken."""
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
    """Held-out sentences as said by other speakers, and speakers that were left out."""


def read_speech(folder: Path) -> list[Spoken]:
    """The clips of a folder with lines of `COLUMNS` in its metadata.csv."""
    file = folder / "metadata.csv"
    if not file.is_file():
        raise DatasetError(
            f"{file} is missing; name a folder with recordings and lines of {'|'.join(COLUMNS)} there"
        )
    header, *lines = file.read_text(encoding="utf-8").splitlines() or [""]
    if tuple(header.split("|")) != COLUMNS:
        raise DatasetError(f"{file} begins with {header[:60]!r}, expected the header {'|'.join(COLUMNS)}")
    rows = [line.split("|") for line in lines if line]
    if wrong := [row for row in rows if len(row) != len(COLUMNS)]:
        raise DatasetError(f"{file}: {len(wrong)} lines do not have {len(COLUMNS)} columns, the first: {wrong[0]}")
    return [Spoken(str(folder.resolve() / row[0]), row[1], row[2], row[3], float(row[4])) for row in rows]


def unpacked(speech: Path, beside: Path) -> Path:
    """The folder of the speech; a zip file is unpacked once, beside the corpus."""
    if speech.suffix != ".zip":
        return speech
    folder = beside / "speech"
    if not folder.is_dir():
        with zipfile.ZipFile(speech) as packed:
            packed.extractall(folder)
    return next(folder.rglob("metadata.csv")).parent


def plain(text: str) -> str:
    """A sentence as it is compared: words alone."""
    return " ".join(re.sub(r"[^\w']+", " ", text.lower()).split())


def split(clips: Sequence[Spoken], held_out: Mapping[str, int] = HELD_OUT, without: Collection[str] = ()) -> Split:
    """Choose the sentences to hold out; the same clips give the same split, in any order.

    A speaker in `without` is not trained on. Held-out sentences are still said in that voice: it is then one that
    the model never heard.
    """
    by_sentence: dict[str, list[Spoken]] = {}
    for clip in clips:
        by_sentence.setdefault(plain(clip.text), []).append(clip)
    wanted, chosen = Counter(held_out), dict[str, Spoken]()
    for sentence in sorted(by_sentence, key=lambda text: hashlib.blake2b(text.encode()).digest()):
        if not FEWEST_WORDS <= len(sentence.split()) <= MOST_WORDS:
            continue
        readers = {clip.speaker: clip for clip in by_sentence[sentence]}
        for speaker in wanted:  # the first named who still wants sentences
            if wanted[speaker] and speaker in readers:
                chosen[sentence] = readers[speaker]
                wanted[speaker] -= 1
                break
    if missing := +wanted:
        raise DatasetError(f"Not enough sentences of {FEWEST_WORDS} to {MOST_WORDS} words to hold out: {missing}")
    train: list[Spoken] = []
    unused: list[Spoken] = []
    for clip in clips:
        left_out = plain(clip.text) in chosen or clip.speaker in without
        (unused if left_out else train).append(clip)
    judged = [clip for clip in clips if chosen.get(plain(clip.text)) is clip]
    return Split(train, judged, [clip for clip in unused if clip not in judged])


def write_corpus(parts: Split, folder: Path) -> None:
    """A corpus folder whose recordings stay where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, clips in (("metadata_train.csv", parts.train), ("metadata_eval.csv", parts.held_out)):
        rows = (f"{clip.path}|{clip.text}|{clip.speaker}|{clip.language}\n" for clip in clips)
        (folder / name).write_text(HEADER + "".join(rows), encoding="utf-8")


def single_letters(corpus: Path, use_phonemes: bool) -> Path:
    """A vocabulary of single letters or phonemes, made once and kept in the corpus.

    With some thousand sentences there is too little text to learn how each of a thousand pieces of words sounds.
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
