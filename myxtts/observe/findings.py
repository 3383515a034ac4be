"""What the tools conclude: one form for all of them, so that a report, a table and `--json` say the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["pass", "info", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """A conclusion, why it holds, and what to change; `code` is stable and explained in docs/profiling.md."""

    code: str
    level: Level
    what: str
    why: str = ""
    fix: str = ""
    """A sentence; empty when there is nothing to do."""
    setting: str = ""
    """The dotted key to change, such as `data.batch_size`."""
    value: Any = None
    """What to change it to."""
    gain: float | None = None
    """Expected speed as a multiple of the present one."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
