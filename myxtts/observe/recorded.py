"""The files that a run or a profile left, read as far as they are whole: a kill may have cut any of them off.

What is damaged is left out, with a warning where more than a line is lost. Knows nothing of what the files say.
"""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

from myxtts.observe.trace import Counter, Span

_log = logging.getLogger(__name__)


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
