"""What is decided when all clips are known: words of scripts, speakers, repeated takes.

Reads and writes the catalog only. A person's edits stay.
"""

from __future__ import annotations

import base64
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from myxtts.collect import speakers
from myxtts.collect.catalog import Catalog, Segment, Source
from myxtts.collect.recordings import script_of
from myxtts.collect.script import Script, error_rate, is_foreign, is_repeated, is_said_twice, read_script
from myxtts.errors import ConfigError

ONE_SPEAKER = "speaker1"
_FOUND = re.compile(r"speaker\d+")  # numbered, not named
REPEATED = "repeated take"
_REPEATED_WITHIN_S, _REPEATED_CLIPS = 60.0, 4


def finish(catalog: Catalog, how_many: str, script: Script | None) -> list[str]:
    """Do what needs all clips of recordings that are cut: scripts, speakers, repeated takes.

    `how_many` speakers there are is a number, auto or one; with "" or anything else, only new clips are named.
    Returns what is worth saying.
    """
    new = [source for source in catalog.sources() if source.state == "cut"]
    notes = _use_scripts(catalog, script, new)
    if new or how_many:
        _name_speakers(catalog, catalog.segments(), how_many)
        _find_repeated(catalog)
    for source in new:
        catalog.update_source(source.id, state="done")
    return notes


def _use_scripts(catalog: Catalog, script: Script | None, sources: Sequence[Source]) -> list[str]:
    notes = []
    for source in sources:
        beside = script_of(Path(source.path))
        try:
            text = Script(read_script(beside)) if beside else script
        except ConfigError as error:  # it was readable before the recording was heard
            notes.append(f"The script of {Path(source.path).name} is not used: {error}")
            continue
        if text is None:
            continue
        segments, expected, changes = catalog.segments(source.id), 0, {}
        for segment in segments:
            found = text.find(segment.notes.get("window", segment.text), segment.language, expected)
            if found is not None:
                expected = found.end
                scores = {
                    "heard_error": error_rate(found.text, segment.heard, segment.language),
                    "script_error": found.error,
                }
                changes[segment.id] = {"text": found.text, "origin": "script", "scores": scores}
        name = Path(source.path).name
        if is_foreign(len(changes), len(segments)):
            notes.append(
                f"The script of {name} is not used: it has {len(changes)} of {len(segments)} clips, so it is of "
                "another text or language"
            )
            continue
        catalog.update_segments(changes)
        notes.append(f"The script of {name} has the words of {len(changes)} of {len(segments)} clips")
    return notes


def _name_speakers(catalog: Catalog, segments: Sequence[Segment], how_many: str) -> None:
    """Name the speakers of clips that have none; if asked, those of all clips that only have a number."""
    again = how_many in ("auto", "one") or how_many.isdecimal()
    free = [each for each in segments if not each.speaker or (again and _FOUND.fullmatch(each.speaker))]
    free = [each for each in free if "speaker" not in each.edited]
    with_voice = [each for each in free if "voice" in each.notes]
    names = {each.id: each.speaker or ONE_SPEAKER for each in free}
    if how_many == "one":
        names = dict.fromkeys(names, ONE_SPEAKER)
    elif with_voice:
        voices = _voices(with_voice)
        count = int(how_many) if how_many.isdecimal() else None
        found = [""] * len(with_voice) if again else speakers.assigned(voices, _known_voices(segments))
        new = [at for at, name in enumerate(found) if not name]
        labels = speakers.group(voices[new], count)
        taken = {segment.speaker for segment in segments if segment.speaker}
        fresh = speakers.named(labels, [with_voice[at].speaker for at in new], taken)
        for at, name in zip(new, fresh, strict=True):
            found[at] = name
        names |= {each.id: name for each, name in zip(with_voice, found, strict=True)}
    catalog.update_segments({number: {"speaker": name} for number, name in names.items()})
    _score_speakers(catalog)


def _known_voices(segments: Sequence[Segment]) -> dict[str, npt.NDArray[np.float32]]:
    known = defaultdict(list)
    for segment in segments:
        if segment.speaker and "voice" in segment.notes:
            known[segment.speaker].append(segment)
    return {name: _voices(held) for name, held in known.items()}


def _score_speakers(catalog: Catalog) -> None:
    """The similarity of every clip, and of the 1.5 s of it that differ most, to the voice of its speaker."""
    changes: dict[int, dict[str, Any]] = {}
    held = sorted((each for each in catalog.segments() if "voice" in each.notes), key=lambda each: each.speaker)
    for _, group in groupby(held, key=lambda each: each.speaker):
        clips = list(group)
        voices = _voices(clips)
        mean = voices.mean(0) / (np.linalg.norm(voices.mean(0)) + 1e-9)
        for clip, alike in zip(clips, (voices @ mean).tolist(), strict=True):
            weakest = float((_unpacked(clip.notes["windows"], len(mean)) @ mean).min())
            changes[clip.id] = {"scores": {"speaker_similarity": alike, "window_similarity": weakest}}
    catalog.update_segments(changes)


def _find_repeated(catalog: Catalog) -> None:
    """Flag clips whose words the same speaker says again in them or soon after: the last take is kept."""
    changes: dict[int, dict[str, Any]] = {}
    segments = catalog.segments()
    for at, segment in enumerate(segments):
        later = [
            other
            for other in segments[at + 1 : at + 1 + _REPEATED_CLIPS]
            if (other.source, other.channel, other.speaker) == (segment.source, segment.channel, segment.speaker)
            and other.start - segment.end < _REPEATED_WITHIN_S
        ]
        flags = tuple(flag for flag in segment.flags if flag != REPEATED)
        note = "said twice" if is_said_twice(segment.text) else ""
        if later and is_repeated(segment.text, [other.text for other in later]):
            note = f"said again at {later[0].start:.1f} s or soon after"
        flags += (REPEATED,) if note else ()
        if flags != segment.flags:
            changes[segment.id] = {"flags": flags, "notes": {REPEATED: note}}
    catalog.update_segments(changes)


def packed(voices: Sequence[Sequence[float]]) -> str:
    """Embeddings as a text for the notes of a clip, a byte for each number."""
    rows = np.array(voices, np.float32)
    return base64.b64encode(np.rint(127 * rows / (np.abs(rows).max() + 1e-9)).astype(np.int8).tobytes()).decode()


def _unpacked(text: str, width: int = -1) -> npt.NDArray[np.float32]:
    """Embeddings as rows of length 1; one if no width is given."""
    found = np.frombuffer(base64.b64decode(text), np.int8).astype(np.float32)
    rows = found.reshape(-1, width if width > 0 else len(found))
    unit: npt.NDArray[np.float32] = rows / (np.linalg.norm(rows, axis=1, keepdims=True) + 1e-9)
    return unit


def _voices(segments: Sequence[Segment]) -> npt.NDArray[np.float32]:
    """The voices of clips, as rows of length 1."""
    return np.concatenate([_unpacked(each.notes["voice"]) for each in segments])
