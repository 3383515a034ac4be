"""The files that a run or a profile left, read as far as they are whole: a kill may have cut any of them off.

What is damaged is left out, with a warning where more than a line is lost. Knows which files a run has and what
its lock says, nothing of what the others say.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
from pathlib import Path
from typing import Any

from myxtts.observe.trace import Counter, Span

PARTS = (
    "metrics.jsonl",
    "settings.yaml",
    "machine.json",
    "trace.jsonl",
    "readings.jsonl",
    "verdict.json",
    "evaluation/scores.json",
)
"""Files of a run that say something about it: a folder without any of them is no run."""

_HOLDER = re.compile(r"process (\d+) on (.+)")
_log = logging.getLogger(__name__)


def is_run(folder: Path) -> bool:
    """Whether a training or a profile left anything in a folder."""
    return any((folder / part).is_file() for part in PARTS)


def has_ended(folder: Path) -> bool:
    """Whether the process that trained here last is gone; False where nobody can tell, as on another machine."""
    try:
        holder = _HOLDER.fullmatch((folder / "lock").read_text(encoding="utf-8").strip())
        if holder is None or holder[2] != socket.gethostname():
            return False
        os.kill(int(holder[1]), 0)  # sends nothing, and fails if there is no such process
    except (ProcessLookupError, OverflowError):
        return True
    except (OSError, UnicodeDecodeError):  # no lock, or somebody else's process
        return False
    return False


def text_of(path: Path) -> str:
    """The text of a file; "" if there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def json_object(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is none, or if it is damaged."""
    try:
        found = json.loads(text_of(path) or "{}")
    except ValueError as error:
        _log.warning("%s is damaged and left out: %s", path, error)
        return {}
    return found if isinstance(found, dict) else {}


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, one a line; lines that were cut off are passed over."""
    found = []
    for line in text_of(path).splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict)]


def trace_of(path: Path) -> tuple[list[Span], list[Counter]]:
    """What `Trace.write_jsonl` wrote; records of another form are passed over."""
    spans: list[Span] = []
    counters: list[Counter] = []
    for record in json_lines(path):
        kind = record.pop("kind", "")
        with contextlib.suppress(TypeError):
            if kind == "span":
                spans.append(Span(**record))
            elif kind == "counter":
                counters.append(Counter(**record))
    return spans, counters
