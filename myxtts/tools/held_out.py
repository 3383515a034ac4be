"""Sentences that a run was not trained on, each with a recording of its speaker to take the voice from.

Chooses; neither speaks nor writes. Held out is what the training held out: the same corpus and split.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from myxtts.audio import Wave
from myxtts.config import LANGUAGES, SAMPLE_RATE, DataSettings
from myxtts.data.clips import ClipSet, Prepared
from myxtts.data.corpus import read_corpus
from myxtts.data.prepare import EMBEDDED_CORPUS
from myxtts.errors import ConfigError, DatasetError

RECORDING, REFERENCE = "recording", "reference"
"""Folders of held-out clips and of training clips."""
REFERENCE_SECONDS, REFERENCES_A_SPEAKER = 6.0, 4
"""The length that references are chosen near to, and how many of a speaker take turns."""
_log = logging.getLogger(__name__)
_UNSAFE = re.compile(r"[^\w.-]+")


class Recording(NamedTuple):
    """A clip of a corpus, and the folder of an evaluation it is laid into."""

    clips: ClipSet
    at: int
    folder: str

    @property
    def name(self) -> str:
        return self.clips.names[self.at]

    @property
    def file_name(self) -> str:
        """A safe one; the row tells clips apart whose names differ only in what is not."""
        return f"{_UNSAFE.sub('_', self.name)[-60:]}-{int(self.clips.audio_rows[self.at])}.wav"

    @property
    def file(self) -> str:
        """Where it lies in an evaluation."""
        return f"{self.folder}/{self.file_name}"

    @property
    def wave(self) -> Wave:
        """As the network hears it, 22.05 kHz."""
        pcm = self.clips.audio[int(self.clips.audio_rows[self.at])]
        return np.divide(pcm, 32768, dtype=np.float32)

    @property
    def ids(self) -> Tensor:
        """Of its text."""
        return torch.from_numpy(self.clips.ids[int(self.clips.ids_rows[self.at])].astype(np.int64))


class Sentence(NamedTuple):
    """A held-out clip with its text, and whose voice is to say it."""

    clip: Recording
    text: str
    language: str
    speaker: str
    reference: Recording
    """Another clip of the same speaker: of the training clips, where they have one."""
    other: Recording | None
    """A clip of somebody else, to compare with."""


def held_out(
    prepared: Prepared, data: DataSettings, num_sentences: int, language: str | None = None
) -> list[Sentence]:
    """Held-out sentences that no training clip says, speakers in turn, each with a reference."""
    val = prepared.val
    if not len(val):
        raise ConfigError(
            "The run holds no clips out: every sentence it knows was trained on, and an evaluation on those says "
            "nothing.\nTrain with --val-fraction above 0, or with --val-data DIR."
        )
    texts = _unseen_texts(prepared, data)
    spoken = [LANGUAGES[number] for number in val.languages.tolist()]
    if language is not None and language not in spoken:
        found = ", ".join(sorted(set(spoken)))
        raise ConfigError(f"No held-out sentence is in {language!r}; there are some in {found}")
    known = _references(prepared)
    turns: Counter[int] = Counter()
    passed_over: Counter[str] = Counter()
    chosen: list[tuple[int, Sentence]] = []
    for at, name in enumerate(val.names):
        speaker = int(val.speakers[at])
        own = [clip for clip in known[speaker] if clip.clips is not val or clip.at != at]
        obstacles = {
            "in another language": language not in (None, spoken[at]),
            "said by a training clip too": name not in texts,
            "without another clip of its speaker": not own,
        }
        if obstacle := next((reason for reason, holds in obstacles.items() if holds), ""):
            passed_over[obstacle] += 1
            continue
        turn = turns[speaker]
        turns[speaker] += 1
        strangers = [known[other][0] for other in sorted(known) if other != speaker]
        sentence = Sentence(
            clip=Recording(val, at, RECORDING),
            text=texts[name],
            language=spoken[at],
            speaker=prepared.speaker_names[speaker],
            reference=own[turn % len(own)],
            other=strangers[turn % len(strangers)] if strangers else None,
        )
        chosen.append((turn, sentence))
    if not chosen:
        raise DatasetError(
            f"None of the {len(val)} held-out clips can be used as it has no reference, which is another clip of "
            "the same speaker. Is the speaker column of the metadata right?"
        )
    if len(chosen) < num_sentences:
        reasons = "".join(f", {count} {reason}" for reason, count in passed_over.items())
        asked = f"{len(chosen)} of the {num_sentences} sentences asked for"
        _log.warning("%s: the run holds out %d clips%s", asked, len(val), reasons)
    chosen.sort(key=lambda one: one[0])
    return [sentence for _, sentence in chosen[:num_sentences]]


def _unseen_texts(prepared: Prepared, data: DataSettings) -> dict[str, str]:
    """The text of every held-out clip, by its name, but for those that a training clip says as well."""
    train = {clip.id: clip.text for clip in read_corpus(data.train_data or EMBEDDED_CORPUS).clips}
    val = {clip.id: clip.text for clip in read_corpus(data.val_data).clips} if data.val_data else train
    seen = {train[name] for name in prepared.train.names if name in train}
    unseen = {name: val[name] for name in prepared.val.names if name in val and val[name] not in seen}
    if not unseen:
        count = len(prepared.val)
        which = "The only held-out sentence" if count == 1 else f"Each of the {count} held-out sentences"
        raise DatasetError(
            f"{which} is said by a training clip too: an evaluation "
            "would only show what was learnt by heart. Hold out others (--val-data, metadata_eval.csv)."
        )
    return unseen


def _references(prepared: Prepared) -> Mapping[int, list[Recording]]:
    """Of every speaker some training clips of a good length; of one who was never heard, held-out ones."""
    known: defaultdict[int, list[Recording]] = defaultdict(list)
    for clips, folder in ((prepared.train, REFERENCE), (prepared.val, RECORDING)):
        by_speaker: defaultdict[int, list[int]] = defaultdict(list)
        off = np.abs(clips.num_samples / SAMPLE_RATE - REFERENCE_SECONDS)
        for at in np.argsort(off, kind="stable").tolist():
            by_speaker[int(clips.speakers[at])].append(at)
        for speaker, places in by_speaker.items():
            if speaker not in known:
                known[speaker] = [Recording(clips, at, folder) for at in places[:REFERENCES_A_SPEAKER]]
    return known
