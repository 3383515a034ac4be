"""Warnings while a training runs, each with its likely cause and the setting to change.

Pure arithmetic over the latest reports; knows neither where they come from nor how a warning is shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from myxtts.observe.metrics import StepReport

WARMUP_REPORTS = 3
"""Reports at the beginning that decide nothing: kernels are compiled, buffers fill, memory is taken."""
WINDOW_REPORTS = 12
"""Reports that a warning looks at."""
FEWEST_REPORTS = 4
"""Reports that are needed to speak of most of the time."""
MOST_CV, MOST_IDLE, MOST_GROWTH = 0.3, 0.05, 0.05
CLEAR_REPORTS = 5
"""Reports in a row without its reason that end a warning; it is given again only after that."""
CPU_CLEAR_REPORTS = 100
"""The same on a CPU, where other programs come and go."""

_FLOW = ("host", "device", "handoff", "model")
"""The rings in the order in which a batch passes them: the first empty one lies behind the slow stage."""
_CAUSES = {
    "host": "gathering batches on the host is too slow: raise --num-workers, keep data.native_loading on, "
    "or move the cache to a faster disk with --cache-dir",
    "device": "batches are uploaded too late: turn on data.prefetch_to_gpu and data.enhanced_gpu_prefetch",
    "encode": "encoding batches takes longer than training on them: turn on data.optimize_cpu_gpu_overlap or give "
    "it a GPU of its own with --data-gpu and --model-gpu (codes are kept, so the first epoch is the slowest)",
    "handoff": "batches cross too slowly from the data GPU to the model GPU: choose two GPUs with peer access "
    "(myxtts check --gpus shows it)",
}
_NOT_THE_DATA = (
    "the buffers hold batches, so it is not the data: the step is compiled again for other shapes (keep "
    "--enable-static-shapes on) or other processes use the same device (nvidia-smi or top lists them)"
)
_CPU_CAUSES = {
    "host": _CAUSES["host"],
    "later": "preparing batches takes the same cores as training on them (codes are kept, so the first epoch is "
    "the slowest)",
    "": "other programs probably use the same cores (top lists them); on a CPU this is common and does no harm",
}
"""A CPU has one device, which is neither uploaded to nor shared out: the cores are all there is."""


class Warning(NamedTuple):
    """Something to change: what was found, its likely cause, and what to do about it."""

    code: str
    """variation, starving, or memory-ROLE."""
    text: str


def warnings_of(history: Sequence[StepReport]) -> list[Warning]:
    """What holds at the end of these reports of one stage, oldest first; the first ones are warm-up."""
    reports = history[WARMUP_REPORTS:][-WINDOW_REPORTS:]
    if len(reports) < FEWEST_REPORTS:
        return []
    found = []
    cause = _cause(reports)
    if (cv := reports[-1].step_cv) > MOST_CV:
        limit = f"more than {100 * MOST_CV:.0f} %"
        text = f"The time of a step varies by {100 * cv:.0f} % ({limit}): {cause or _not_the_data(reports)}."
        found.append(Warning("variation", text))
    idle_share = sum(report.idle_share for report in reports) / len(reports)
    if idle_share > MOST_IDLE and cause and _is_mostly_empty(reports, "model"):
        text = f"The model waits for batches {100 * idle_share:.0f} % of the time: {cause}."
        found.append(Warning("starving", text))
    roles = [role for role in reports[0].memory_mb if all(role in report.memory_mb for report in reports)]
    return found + [_growth_warning(role, reports) for role in roles if _grows(role, reports)]


class Watch:
    """Gives each warning once, until its reason has been gone for a while."""

    def __init__(self) -> None:
        self._history: deque[StepReport] = deque(maxlen=WARMUP_REPORTS + WINDOW_REPORTS)
        self._given: dict[str, int] = {}
        """Warnings by code, with the number of reports since their reason was last there."""

    def add(self, report: StepReport) -> list[Warning]:
        """The warnings that this report gives rise to; another stage starts afresh."""
        clear_reports = CPU_CLEAR_REPORTS if _is_on_cpu(report) else CLEAR_REPORTS
        if self._history and self._history[-1].stage != report.stage:
            self._history.clear()
            if not _is_on_cpu(report):  # there the cause is another program, whatever is trained
                self._given.clear()
        self._history.append(report)
        holding = warnings_of(list(self._history))
        fresh = [warning for warning in holding if warning.code not in self._given]
        quiet = {code: reports + 1 for code, reports in self._given.items() if reports + 1 < clear_reports}
        self._given = quiet | {warning.code: 0 for warning in holding}
        return fresh


def _cause(reports: Sequence[StepReport]) -> str:
    """What keeps the first ring empty that is so most of the time; "" if there is none."""
    empty = _empty_ring(reports)
    if _is_on_cpu(reports[-1]):
        return _CPU_CAUSES["host" if empty == "host" else "later"] if empty else ""
    if empty == "handoff" or (empty == "model" and "handoff" not in reports[-1].rings):
        return _CAUSES["encode"]
    return _CAUSES["handoff" if empty == "model" else empty] if empty else ""


def _not_the_data(reports: Sequence[StepReport]) -> str:
    return _CPU_CAUSES[""] if _is_on_cpu(reports[-1]) else _NOT_THE_DATA


def _is_on_cpu(report: StepReport) -> bool:
    """Only GPUs have memory to report."""
    return not report.memory_mb


def _empty_ring(reports: Sequence[StepReport]) -> str:
    """The first ring that is empty most of the time; "" if none is or the trainer never waited."""
    rings = [name for name in _FLOW if name in reports[-1].rings]
    if all(report.rings.get("model", (0, 0))[0] > 0 for report in reports):
        return ""
    return next((name for name in rings if _is_mostly_empty(reports, name)), "")


def _is_mostly_empty(reports: Sequence[StepReport], ring: str) -> bool:
    return sum(report.rings.get(ring, (0, 0))[0] == 0 for report in reports) > len(reports) / 2


def _grows(role: str, reports: Sequence[StepReport]) -> bool:
    """Whether a role's memory never falls and rises in most reports: one jump is a validation, not a leak."""
    used_mb = [report.memory_mb[role] for report in reports]
    rises = [later - earlier for earlier, later in pairwise(used_mb)]
    steadily = min(rises) >= 0 and sum(rise > 0 for rise in rises) > len(rises) / 2
    return steadily and len(reports) == WINDOW_REPORTS and used_mb[-1] > (1 + MOST_GROWTH) * used_mb[0]


def _growth_warning(role: str, reports: Sequence[StepReport]) -> Warning:
    first, last = reports[0], reports[-1]
    text = (
        f"The memory of the {role} role grew from {first.memory_mb[role]:.0f} to {last.memory_mb[role]:.0f} MB "
        f"between steps {first.step} and {last.step}: this looks like a leak, and would end in an out-of-memory "
        "error. Keep --enable-static-shapes on; if it is on, lower --save-step, so that a restart costs little."
    )
    return Warning(f"memory-{role}", text)
