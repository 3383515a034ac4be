"""Which steps of a trace are worth a look, and who did what during them, as lanes of a picture.

Knows spans and the name of the work that makes a step; a trace without any shows whole batches instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from statistics import median

from myxtts.observe.charts import Bar, lanes
from myxtts.observe.trace import Span

STEP_SPANS = ("train", "update")
"""What is done once for every step, on the model's lane."""
TYPICAL_STEPS = 4
MOST_BARS, MOST_LANES = 600, 20
FLOW = ("gather", "upload", "encode", "handoff", "wait", "train", "update")
"""The work that has a colour of its own in `page_style`, in the order in which a batch passes it."""

Window = tuple[int, int]
"""Start and end in microseconds."""


def draw_timelines(spans: Sequence[Span]) -> str:
    """A few typical steps and, if it stands out, the slowest one; "" without spans."""
    steps = _steps(spans)
    if not steps:
        return ""
    typical = _typical(steps)
    first, last = steps.index(typical[0]), steps.index(typical[-1])
    title = f"{len(typical)} typical steps" if len(typical) > 1 else "One step"
    drawn = _draw(f"{title} ({first + 1} to {last + 1} of the trace)", spans, (typical[0][0], typical[-1][1]))
    lengths = [later[1] - earlier[1] for earlier, later in pairwise(steps)]
    if len(lengths) > 2 and max(lengths) > 1.3 * median(lengths):
        slowest = lengths.index(max(lengths)) + 1
        about = f"The slowest step ({slowest + 1} of the trace, {max(lengths) / median(lengths):.1f} × the median)"
        drawn += _draw(about, spans, (steps[slowest - 1][1], steps[slowest][1]))
    return drawn


def _steps(spans: Sequence[Span]) -> list[Window]:
    """Where each step lies, in order; a trace without training gives the batches instead."""
    chosen = [span for span in spans if span.name in STEP_SPANS] or [span for span in spans if span.batch >= 0]
    ends: defaultdict[int, list[int]] = defaultdict(list)
    for span in chosen:
        ends[span.batch] += [span.start_us, span.start_us + span.duration_us]
    return sorted((min(found), max(found)) for found in ends.values())


def _typical(steps: Sequence[Window]) -> Sequence[Window]:
    """Steps in a row that take as long as such rows mostly do."""
    count = min(TYPICAL_STEPS, len(steps))
    rows = [steps[first : first + count] for first in range(len(steps) - count + 1)]
    return sorted(rows, key=lambda row: row[-1][1] - row[0][0])[len(rows) // 2]


def _draw(title: str, spans: Sequence[Span], window: Window) -> str:
    start_us, end_us = window
    length_us = max(end_us - start_us, 1)
    tracks: defaultdict[tuple[bool, str], list[Bar]] = defaultdict(list)
    inside = [span for span in spans if span.start_us < end_us and span.start_us + span.duration_us > start_us]
    inside.sort(key=lambda span: -span.duration_us)
    for span in sorted(inside[:MOST_BARS], key=lambda span: (span.start_us, -span.duration_us)):
        colour = f"s-{span.name}" if span.name in FLOW else "c6"
        batch = f", batch {span.batch}" if span.batch >= 0 else ""
        first = max(span.start_us, start_us) - start_us
        last = min(span.start_us + span.duration_us, end_us) - start_us
        tip = f"{span.name}{batch}: {span.duration_us / 1000:.2f} ms"
        tracks[span.device, span.track].append(Bar(span.name, first / length_us, last / length_us, colour, tip))
    in_order = sorted(tracks.items(), key=lambda item: (min(_place(bar.label) for bar in item[1]), item[0]))
    rows = [(f"{track} (GPU)" if device else track, bars) for (device, track), bars in in_order]
    left_out = len(rows) - MOST_LANES
    more = f"<p class=note>{left_out} more tracks are not shown.</p>" if left_out > 0 else ""
    return f"<h3>{escape(title)}</h3>{lanes(rows[:MOST_LANES], length_us / 1000)}{more}"


def _place(name: str) -> int:
    return FLOW.index(name) if name in FLOW else len(FLOW)
