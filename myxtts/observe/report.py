"""A run as one HTML page to show a colleague: the verdict first, then what it rests on.

The page needs nothing from outside and runs no script. Whatever part of a run is missing is said to be missing,
and what is damaged is left out. Knows how findings look, not how they came about; all text is escaped.

    RUN/metrics.jsonl     the reports of the training       RUN/settings.yaml     its configuration
    RUN/trace.jsonl       spans of some steps               RUN/machine.json      where it ran: names and values
    RUN/readings.jsonl    readings of the GPUs              RUN/verdict.json      what `myxtts profile` concluded
    RUN/evaluation/scores.json    what the judges of `myxtts evaluate` said
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np

from myxtts.observe.diagnosis import FEWEST_REPORTS, WARMUP_REPORTS, warnings_of
from myxtts.observe.findings import Finding
from myxtts.observe.metrics import (
    Numbers,
    StageHistory,
    duration,
    is_run,
    json_lines,
    json_object,
    number,
    numbers,
    percent,
    read_metrics,
    settled,
    short,
    smoothed,
    stages_of,
    text_of,
    thinned,
    trace_of,
)
from myxtts.observe.trace import Counter, Span

STYLE = """
:root { color-scheme: light dark; --page: #f4f5f7; --card: #fff; --ink: #1c2128; --soft: #57606a; --rule: #dde1e6;
  --on: #fff; --good: #1a7f4e; --warn: #a35200; --bad: #b3261e; --info: #2563b8; --well: #f4f5f7;
  --1: #2563b8; --2: #c2570c; --3: #1a7f4e; --4: #7546bd; --5: #b4286f; --6: #59636e; --7: #0b7285; --8: #8a6a00; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1216; --card: #191e24; --ink: #e4e8ed; --soft: #9aa5b1;
  --rule: #303842; --on: #10141a; --good: #5cc88f; --warn: #f0a35a; --bad: #ff8a80; --info: #7db2ff;
  --well: #11151a; --1: #7db2ff; --2: #f5a05e; --3: #5cc88f; --4: #bda1f5; --5: #f291c1; --6: #9aa5b1;
  --7: #5bc7dc; --8: #e3c255; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); overflow-wrap: anywhere;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; }
h2 { font-size: 1.15rem; margin: 0 0 12px; }
h3 { font-size: 1rem; margin: 20px 0 8px; }
h2 + h3 { margin-top: 0; }
p { margin: 0 0 10px; }
header p, .note, .unit, .none, .xlabel, footer { color: var(--soft); font-size: .875rem; }
header { margin-bottom: 16px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 20px;
  margin-bottom: 16px; }
.sentence { font-size: 1.3rem; line-height: 1.4; font-weight: 600; max-width: 46em; }
.chip { display: inline-block; border-radius: 99px; padding: 1px 10px; font-size: .8rem; font-weight: 600;
  color: var(--on); background: var(--6); vertical-align: middle; }
.excellent, .good, .pass { background: var(--good); }
.minimum, .warn { background: var(--warn); }
.fail, .below { background: var(--bad); }
.info { background: var(--info); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(46%, 220px), 1fr)); gap: 10px;
  margin: 16px 0 0; }
.tiles div { background: var(--well); border-radius: 8px; padding: 8px 12px; }
.tiles dt { color: var(--soft); font-size: .8rem; }
.tiles dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 20px 28px; }
figure { margin: 0; min-width: 0; }
figcaption { font-size: .95rem; }
.legend { display: flex; flex-wrap: wrap; gap: 0 16px; margin: 2px 0 12px; font-size: .85rem; }
.bars + .legend, .lanes + .legend { margin: 8px 0 0; }
.key::before { content: ""; display: inline-block; width: .7em; height: .7em; border-radius: 2px;
  margin-right: 5px; background: var(--c); }
.plot { display: grid; grid-template-columns: 3.2rem minmax(0, 1fr); padding-right: .8rem; font-size: .75rem;
  color: var(--soft); font-variant-numeric: tabular-nums; }
.ys { position: relative; }
.ys span { position: absolute; right: .5rem; transform: translateY(50%); line-height: 1; white-space: nowrap; }
.area { border: solid var(--rule); border-width: 0 0 1px 1px; }
.area svg { display: block; width: 100%; height: 180px; overflow: visible; }
.xs { position: relative; height: 1.4rem; }
.plot .xs { grid-column: 2; }
.xs span { position: absolute; top: .2rem; transform: translateX(-50%); white-space: nowrap; }
.xlabel { text-align: center; margin: 0; font-size: .75rem; padding-left: 3.2rem; }
path { fill: none; vector-effect: non-scaling-stroke; stroke-linecap: round; stroke-linejoin: round; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { stroke: var(--c); stroke-width: 2; }
.faint { stroke-width: 1; opacity: .35; }
.dots { stroke: var(--c); stroke-width: 7; }
.bars { position: relative; height: 22px; background: var(--well); border-radius: 4px; overflow: hidden; }
.tall { height: 34px; }
.bars i { position: absolute; top: 0; bottom: 0; min-width: 1px; overflow: hidden; font-style: normal;
  font-size: .72rem; line-height: 22px; padding-left: 3px; white-space: nowrap; background: var(--c);
  color: var(--on); border-right: 1px solid var(--card); }
.tall i { line-height: 34px; font-size: .85rem; padding-left: 8px; }
.lane { display: grid; grid-template-columns: 11rem minmax(0, 1fr); gap: 0 10px; margin-bottom: 4px; }
.lanes .who { font-size: .8rem; color: var(--soft); text-align: right; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }
.lanes { padding-right: .8rem; }
.lanes .xs { font-size: .75rem; color: var(--soft); }
figcaption + .lanes { margin-top: 8px; }
.meter { height: 10px; background: var(--rule); border-radius: 5px; overflow: hidden; min-width: 60px; }
.meter i { display: block; height: 100%; background: var(--info); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--rule); white-space: nowrap; }
.facts td { width: 100%; white-space: normal; }
.scroll + .scroll { margin-top: 16px; }
.scroll + .grid2 { margin-top: 20px; }
article + .note { margin-top: 14px; }
.grid2 + .note, .scroll + .note { margin: 12px 0 0; }
th { color: var(--soft); font-weight: 500; }
tr:last-child > * { border-bottom: 0; }
article { border-top: 1px solid var(--rule); padding: 14px 0 6px; }
h2 + article { border-top: 0; padding-top: 0; }
article p { margin: 4px 0; max-width: 60em; }
code, pre { font: .85rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
code { background: var(--well); border-radius: 4px; padding: 1px 5px; }
pre { margin: 8px 0 0; padding: 12px; background: var(--well); border-radius: 8px; overflow: auto;
  max-height: 480px; overflow-wrap: normal; }
summary { cursor: pointer; color: var(--soft); }
.c1, .s-gather, .s-host { --c: var(--1); }
.c2, .s-wait { --c: var(--2); }
.c3, .s-train, .s-compute { --c: var(--3); }
.c4, .s-upload, .s-copy { --c: var(--4); }
.c5, .s-encode { --c: var(--5); }
.c6, .s-other { --c: var(--6); }
.s-update { --c: var(--7); }
.s-handoff { --c: var(--8); }
@media (max-width: 640px) {
  main { padding: 14px 10px 32px; }
  section { padding: 14px 12px; }
  .sentence { font-size: 1.1rem; }
  .lane { grid-template-columns: minmax(0, 1fr); margin-bottom: 6px; }
  .lanes .who { text-align: left; }
  .bars .slim { font-size: 0; }
  th, td { padding-right: 8px; font-size: .82rem; }
}
@media print { body { background: #fff; } section { break-inside: avoid; } pre { max-height: none; } }
"""


MOST_POINTS = 500
"""Points of a curve; a screen shows hardly more."""
FEWEST_SMOOTHED = 80
"""Points from which on a curve gets its running mean drawn over it."""
NUM_COLOURS = 6
SLIM = 0.2
"""Bars below this share have no room for their label on a phone."""
_WIDTH, _HEIGHT = 1000, 300


class Curve(NamedTuple):
    """Points to be drawn in order; NaN in y leaves a gap."""

    label: str
    x: Numbers
    y: Numbers
    look: Literal["line", "mean", "dots"] = "line"
    """All of it, with its running mean if it is long; the running mean only; or separate points."""


class Bar(NamedTuple):
    """A part of a stacked bar, or a piece of work on a lane, from `start` to `end` in shares of the whole."""

    label: str
    start: float
    end: float
    colour: str
    """A class of the style: `c1`... or the name of a stage with `s-` before it."""
    tip: str = ""


def line_chart(
    title: str,
    unit: str,
    curves: Sequence[Curve],
    x_label: str,
    low: float | None = None,
    high: float | None = None,
) -> str:
    """Curves as a figure; `low` and `high` pin the ends of the upright axis. Says so if there is nothing."""
    drawn = [curve for curve in curves if np.isfinite(curve.y).any()]
    head = f"<figcaption><b>{escape(title)}</b> <span class=unit>{escape(unit)}</span></figcaption>"
    if not drawn:
        return f"<figure class=chart>{head}<p class=none>Nothing was recorded.</p></figure>"
    x_low, x_high = _ends(np.concatenate([curve.x[np.isfinite(curve.y)] for curve in drawn]))
    x_low = 0.0 if 0 < x_low < x_high / 10 else x_low
    every_y = np.concatenate([curve.y[np.isfinite(curve.y)] for curve in drawn])
    y_low, y_high = _visible(every_y, low, high)
    num_beyond = int(((every_y > y_high) | (every_y < y_low)).sum())
    shapes, legend = [], []
    for index, curve in enumerate(drawn):
        colour = f"c{index % NUM_COLOURS + 1}"
        mean = _running_mean(curve, y_low, y_high)
        shapes += _shapes(curve, mean, colour, (x_low, x_high), (y_low, y_high))
        known = curve.y if mean is None else mean
        last = short(float(known[np.isfinite(known)][-1]))
        legend.append(f"<span class='key {colour}'>{escape(curve.label)} <b>{last}</b></span>")
    grid = "".join(
        f"<path class=grid d='M0 {y:.1f}H{_WIDTH}'/>"
        for y in (_HEIGHT * (1 - _share(tick, y_low, y_high)) for tick in ticks(y_low, y_high, 5))
    )
    if num_beyond:
        highest, lowest = float(every_y.max()), float(every_y.min())
        extreme = highest if highest > y_high else lowest
        legend.append(f"<span class=note>{num_beyond:,} beyond the edge, up to {short(extreme)}</span>")
    svg = f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' preserveAspectRatio=none>{grid}{''.join(shapes)}</svg>"
    label = escape(f"{title}, {unit}: {', '.join(curve.label for curve in drawn)} over {x_label}", quote=True)
    return (
        f"<figure class=chart>{head}<div class=legend>{''.join(legend)}</div>"
        f"<div class=plot role=img aria-label='{label}'>"
        f"<div class=ys>{_labels(y_low, y_high, 5, 'bottom')}</div><div class=area>{svg}</div>"
        f"<div class=xs>{_labels(x_low, x_high, 5, 'left')}</div></div>"
        f"<p class=xlabel>{escape(x_label)}</p></figure>"
    )


def stacked_bar(bars: Sequence[Bar]) -> str:
    """One bar of several parts with their shares below; what is too narrow for its label has a legend to tell."""
    parts = "".join(_bar(bar) for bar in bars)
    legend = "".join(
        f"<span class='key {escape(bar.colour)}'>{escape(bar.label)} <b>{percent(bar.end - bar.start)}</b></span>"
        for bar in bars
    )
    return f"<div class='bars tall'>{parts}</div><div class=legend>{legend}</div>"


def lanes(rows: Sequence[tuple[str, Sequence[Bar]]], length_ms: float) -> str:
    """Who did what and when: a named row of bars each, over an axis of milliseconds."""
    drawn = "".join(
        f"<div class=lane><span class=who>{escape(name)}</span>"
        f"<div class=bars>{''.join(map(_bar, bars))}</div></div>"
        for name, bars in rows
    )
    axis = f"<div class=xs>{_labels(0, length_ms, 5, 'left')}</div>"
    colours = {bar.label: bar.colour for _, bars in rows for bar in bars}
    legend = "".join(
        f"<span class='key {escape(colour)}'>{escape(label)}</span>" for label, colour in colours.items()
    )
    axis = f"<div class=lane><span class=who>ms</span>{axis}</div>"
    return f"<div class=lanes>{drawn}{axis}</div><div class=legend>{legend}</div>"


def meter(share: float) -> str:
    """A small bar that is filled to a share."""
    width = 100 * min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
    return f"<div class=meter><i style='width:{width:.1f}%'></i></div>"


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers inside a range, about that many of them."""
    rough = (high - low) / max(about, 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _running_mean(curve: Curve, low: float, high: float) -> Numbers | None:
    """Of a long line; without what lies beyond the edges, which would move it for long."""
    if curve.look == "dots" or len(curve.y) < FEWEST_SMOOTHED:
        return None
    return smoothed(np.clip(curve.y, low, high), len(curve.y) // 30)


def _shapes(
    curve: Curve, mean: Numbers | None, colour: str, x_ends: tuple[float, float], y_ends: tuple[float, float]
) -> list[str]:
    path = _path(curve.x, curve.y, x_ends, y_ends, dots=curve.look == "dots")
    if mean is None:
        return [f"<path class='{'dots' if curve.look == 'dots' else 'line'} {colour}' d='{path}'/>"]
    drawn = [f"<path class='line {colour}' d='{_path(curve.x, mean, x_ends, y_ends)}'/>"]
    return drawn if curve.look == "mean" else [f"<path class='line faint {colour}' d='{path}'/>", *drawn]


def _path(
    x: Numbers, y: Numbers, x_ends: tuple[float, float], y_ends: tuple[float, float], dots: bool = False
) -> str:
    """Lines through the points, anew behind each gap; a lone point is a line without length, drawn as a dot."""
    x, y = thinned(x, y, MOST_POINTS)
    pieces, is_down = [], False
    for index, (at, value) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
        if not math.isfinite(value):
            is_down = False
            continue
        place = f"{_WIDTH * _share(at, *x_ends):.1f} {_HEIGHT * (1 - _share(value, *y_ends)):.1f}"
        is_alone = not is_down and (index + 1 == len(y) or not math.isfinite(y[index + 1]))
        pieces.append(f"M{place}h0" if dots or is_alone else f"{'L' if is_down else 'M'}{place}")
        is_down = not dots
    return "".join(pieces)


def _visible(values: Numbers, low: float | None, high: float | None) -> tuple[float, float]:
    """The range worth showing: all of it, unless a few values would press the others flat."""
    first, second = np.percentile(values, [1, 99]) if len(values) >= 20 else (values.min(), values.max())
    spread = float(second - first) or abs(float(second)) * 0.1
    bottom = low if low is not None else max(float(values.min()), float(first) - spread / 2)
    top = high if high is not None else min(float(values.max()), float(second) + spread / 2)
    margin = 0.04 * (top - bottom)
    return _ends(
        np.array([bottom if low is not None else bottom - margin, top if high is not None else top + margin])
    )


def _ends(values: Numbers) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    smallest = max(abs(low), abs(high), 1e-9) * 1e-6
    return (
        (low, high) if high - low > smallest else (low - max(abs(low) / 10, 0.5), high + max(abs(high) / 10, 0.5))
    )


def _share(value: float, low: float, high: float) -> float:
    return min(max((value - low) / (high - low), 0.0), 1.0)


def _labels(low: float, high: float, about: int, side: str) -> str:
    marks = ticks(low, high, about)
    size = marks[1] - marks[0] if len(marks) > 1 else abs(high - low)
    return "".join(
        f"<span style='{side}:{100 * _share(mark, low, high):.1f}%'>{_tick_text(mark, size)}</span>"
        for mark in marks
    )


def _tick_text(value: float, size: float) -> str:
    divisor, suffix = (1e6, " M") if size >= 1e5 else (1e3, " k") if size >= 1e3 else (1.0, "")
    if value and not 1e-3 <= max(abs(value), size) < 1e9:
        return f"{value:.0e}"
    digits = max(0, -math.floor(math.log10(size / divisor) + 1e-9))
    return f"{value / divisor:.{digits}f}{suffix if value else ''}"


def _bar(bar: Bar) -> str:
    place = f"left:{100 * bar.start:.2f}%;width:{100 * (bar.end - bar.start):.2f}%"
    tip = f" title='{escape(bar.tip, quote=True)}'" if bar.tip else ""
    share = bar.end - bar.start
    fits = share > 0.02 + 0.012 * len(bar.label)
    look = f"{bar.colour} slim" if share < SLIM else bar.colour
    return f"<i class='{escape(look)}' style='{place}'{tip}>{escape(bar.label) if fits else ''}</i>"


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


Record = Mapping[str, Any]

RECORDING, SYNTHESISED = "recording", "synthesised"
NUM_WORST, NUM_SCORE_COLOURS = 3, 4
WORST_MOS, BEST_MOS = 1, 5
_MARK_WIDTH = 0.006
"""Of a clip's mark, as a share of the axis."""


class _Mark(NamedTuple):
    """A stretch of a row, in shares of the axis."""

    start: float
    width: float
    colour: str
    tip: str = ""


def evaluation(scores: Record) -> str:
    """The section's HTML; "" if nothing was judged."""
    summary = _mapping(scores.get("summary"))
    rows = {str(name): row for name, row in summary.items() if isinstance(row, Mapping)}
    if not rows:
        return ""
    clips = [clip for clip in _sequence(scores.get("clips")) if isinstance(clip, Mapping)]
    same_from = number(scores.get("same_speaker_from"))
    charts = [
        _bars("Words misheard", "WER, 1 is all of them; grey: the recordings", "wer", rows, 0, 1),
        _bars("Letters misheard", "CER, 1 is all of them; grey: the recordings", "cer", rows, 0, 1),
        _similarities(rows, clips, same_from),
        _bars("Quality", "MOS, 5 is excellent; grey: the recordings", "mos", rows, WORST_MOS, BEST_MOS),
    ]
    return (
        f"<p class=sentence>{escape(str(scores.get('reading') or ''))}</p>{_table(rows, same_from)}"
        f"<div class=grid2>{''.join(charts)}</div>{_worst(clips)}{_note(scores)}"
    )


def _table(rows: Mapping[str, Record], same_from: float) -> str:
    above = f"Above {short(same_from)}" if math.isfinite(same_from) else "Same speaker"
    head = "".join(f"<th>{name}</th>" for name in ("", "Clips", "WER", "CER", "Similarity", "MOS", above))
    body = ""
    for name, row in rows.items():
        scores = [_score(number(row.get(key))) for key in ("wer", "cer", "similarity", "mos")]
        share = percent(number(row.get("same_speaker_share")))
        cells = [short(number(row.get("clips"))), *scores, share]
        body += f"<tr><th>{escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    return f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>"


def _bars(title: str, unit: str, key: str, rows: Mapping[str, Record], low: int, high: int) -> str:
    """A bar for each set, and on each a mark where the recordings are."""
    values = {name: number(row.get(key)) for name, row in rows.items()}
    known = {name: value for name, value in values.items() if math.isfinite(value)}
    if not known:
        return ""
    shares = {name: min(max((value - low) / (high - low), 0.0), 1.0) for name, value in known.items()}
    lanes = []
    for place, (name, value) in enumerate(known.items()):
        marks = [_Mark(0, shares[name], f"c{place % NUM_COLOURS + 1}")]
        if RECORDING in shares and name != RECORDING:
            marks.append(_Mark(shares[RECORDING], _MARK_WIDTH, "c6", "the recordings"))
        lanes.append((f"{name} {_score(value)}", marks))
    return _lanes(title, unit, lanes, low, high)


def _similarities(rows: Mapping[str, Record], clips: Sequence[Record], same_from: float) -> str:
    """A mark for each clip at its similarity, and one where two voices begin to count as one."""
    lanes = []
    for place, name in enumerate(rows):
        found = [number(clip.get("similarity")) for clip in clips if clip.get("set") == name]
        known = [value for value in found if math.isfinite(value)]
        if known:
            colour = f"c{place % NUM_COLOURS + 1}"
            marks = [_Mark(min(max(value, 0.0), 1.0), _MARK_WIDTH, colour, f"{value:.2f}") for value in known]
            if math.isfinite(same_from):
                marks.insert(0, _Mark(same_from, _MARK_WIDTH / 2, "c6", "taken for the same speaker from here on"))
            lanes.append((f"{name} {_score(sum(known) / len(known))}", marks))
    unit = f"of each clip; grey: {short(same_from)}, from which on two voices are taken for one"
    return _lanes("Similarity to the speaker", unit, lanes, 0, 1) if lanes else ""


def _lanes(title: str, unit: str, lanes: Sequence[tuple[str, Sequence[_Mark]]], low: int, high: int) -> str:
    drawn = ""
    for name, marks in lanes:
        bars = "".join(
            f"<i class={mark.colour} style='left:{100 * mark.start:.1f}%;width:{100 * mark.width:.1f}%'"
            f" title='{escape(mark.tip, quote=True)}'></i>"
            for mark in marks
        )
        drawn += f"<div class=lane><span class=who>{escape(name)}</span><div class=bars>{bars}</div></div>"
    num_steps = 5 if high - low == 1 else high - low
    values = [low + (high - low) * step / num_steps for step in range(num_steps + 1)]
    ticks = "".join(
        f"<span style='left:{100 * (value - low) / (high - low):g}%'>{value:g}</span>" for value in values
    )
    axis = f"<div class=lane><span class=who></span><div class=xs>{ticks}</div></div>"
    head = f"<figcaption><b>{escape(title)}</b> <span class=unit>{escape(unit)}</span></figcaption>"
    return f"<figure>{head}<div class=lanes>{drawn}{axis}</div></figure>"


def _worst(clips: Sequence[Record]) -> str:
    """The sentences that were understood least, with what was heard instead."""
    spoken = [clip for clip in clips if clip.get("set") == SYNTHESISED and math.isfinite(number(clip.get("wer")))]
    spoken.sort(key=lambda clip: (-number(clip["wer"]), str(clip.get("clip"))))
    articles = ""
    for clip in [clip for clip in spoken if number(clip["wer"]) > 0][:NUM_WORST]:
        trouble = f", {escape(str(clip['trouble']))}" if clip.get("trouble") else ""
        articles += (
            f"<article><p><b dir=auto>{escape(str(clip.get('text') or ''))}</b></p>"
            f"<p>Heard: <span dir=auto>{escape(str(clip.get('heard') or 'nothing'))}</span></p>"
            f"<p class=note>WER {_score(number(clip['wer']))}{trouble} · "
            f"<code>{escape(str(clip.get('file') or ''))}</code></p></article>"
        )
    return f"<h3>Worst understood</h3>{articles}" if articles else ""


def _note(scores: Record) -> str:
    about = _mapping(scores.get("about"))
    steps = ", ".join(f"{stage} {step} steps" for stage, step in _mapping(about.get("steps")).items())
    facts = {
        "Judges": ", ".join(str(judge) for judge in _sequence(scores.get("judges"))),
        "vocoder": about.get("vocoder"),
        "seed": about.get("seed"),
        "temperature": about.get("temperature"),
        "guidance": about.get("guidance"),
        "central codes": "yes" if about.get("central") else None,
        "synthesised": about.get("made_at"),
        "of": steps,
    }
    told = " · ".join(f"{name} {escape(str(fact))}" for name, fact in facts.items() if fact not in (None, ""))
    return f"<p class=note>{told}</p>" if told else ""


def _score(value: float) -> str:
    return f"{value:.2f}".replace("-", "−") if math.isfinite(value) else "–"


def _mapping(value: object) -> Record:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


MOST_GPUS = 16
RING_COUNTER = " ring"
"""How the samples of a trace end that say how many batches of a ring are ready."""


def over_time(stages: Sequence[StageHistory], readings: Sequence[Record]) -> str:
    """How busy everything was and how long steps took, over the time of training."""
    trained = [stage for stage in stages if stage.steps]
    longest_s = max((stage.seconds[-1] for stage in trained), default=0.0)
    unit_s, unit = _time_unit(longest_s)
    x_label = f"{unit} of training"
    times = {stage.name: np.array(stage.seconds) / unit_s for stage in trained}
    busy = [Curve(stage.name, times[stage.name], 100 * (1 - stage.column("idle_share"))) for stage in trained]
    step_ms = [Curve(stage.name, times[stage.name], stage.column("step_ms")) for stage in trained]
    charts = [
        line_chart("Model busy", "% of the time", busy, x_label, 0, 100),
        line_chart("Step time", "ms", step_ms, x_label, 0),
    ]
    if readings:
        charts += _gpu_charts(readings)
    else:
        charts.append("<p class=note>No readings of the GPUs were kept.</p>")
    return _grid(charts)


def rings(stages: Sequence[StageHistory], counters: Sequence[Counter] = ()) -> str:
    """Of every ring how full it was, and how often empty; from the samples of a trace if there are no reports."""
    parts = []
    for stage in stages:
        steps = np.array([step.step for step in stage.steps], float)
        fills = {ring: stage.readiness(ring) for ring in stage.ring_names}
        depths = {ring: str(depth) for step in stage.steps for ring, (_, depth) in step.rings.items()}
        curves = [Curve(ring, steps, 100 * fill, "mean") for ring, fill in fills.items()]
        if table := _ring_table(fills, depths):
            chart = line_chart("Ready", "% of the slots", curves, "step", 0, 100)
            parts.append(f"<h3>Stage {escape(stage.name)}</h3>{_grid([table, chart])}")
    if not parts:
        samples: defaultdict[str, list[float]] = defaultdict(list)
        for counter in counters:
            if counter.name.endswith(RING_COUNTER) and counter.name != f"keep{RING_COUNTER}":
                samples[counter.name.removesuffix(RING_COUNTER)].append(counter.value)
        fills = {ring: numbers(values) / max(*values, 1.0) for ring, values in samples.items()}
        parts.append(_ring_table(fills, {ring: f"at least {max(values):.0f}" for ring, values in samples.items()}))
    explained = (
        "<p class=note>Batches pass the rings in this order. The slow stage is the one in front of the first ring "
        "that is mostly empty; a model ring that is never empty means that the GPU never waits for data.</p>"
    )
    return "".join(parts) + explained if any(parts) else "<p class=none>Nothing was recorded.</p>"


def _ring_table(fills: Mapping[str, Numbers], depths: Mapping[str, str]) -> str:
    """From the share of slots that were ready, at many moments."""
    rows = []
    for ring, fill in fills.items():
        known = fill[np.isfinite(fill)]
        if len(known):
            mean, empty = float(known.mean()), float((known == 0).mean())
            cells = (escape(ring), depths[ring], meter(mean), f"{100 * mean:.0f} %", f"{100 * empty:.0f} %")
            rows.append(_row(*cells))
    head = _row("Ring", "Slots", "Ready", "on average", "Empty", cell="th")
    return f"<div class=scroll><table>{head}{''.join(rows)}</table></div>" if rows else ""


def stage_table(stages: object) -> str:
    """How long each stage takes for a batch, from those of a verdict; "" without any."""
    rows = []
    for name, stage in stages.items() if isinstance(stages, Mapping) else ():
        if isinstance(stage, Mapping):
            times = [short(number(stage.get(f"{which}_ms")), " ms") for which in ("median", "mean", "longest")]
            shares = [percent(number(stage.get(which))) for which in ("cv", "busy_share")]
            rows.append(_row(escape(str(name)), *times, *shares, short(number(stage.get("workers")))))
    head = _row("A batch", "mostly", "on average", "at most", "varies", "Phase busy", "Side by side", cell="th")
    return f"<div class=scroll><table>{head}{''.join(rows)}</table></div>" if rows else ""


def training(stages: Sequence[StageHistory]) -> str:
    """Loss and throughput of every stage over its steps."""
    parts = []
    for stage in stages:
        steps = np.array([step.step for step in stage.steps], float)
        curves = [Curve("training", steps, stage.column("losses.total"))]
        if stage.validations:
            at, losses = (numbers(column) for column in zip(*stage.validations, strict=True))
            curves.append(Curve("validation", at, losses, "dots"))
        charts = [
            line_chart("Loss", "total", curves, "step"),
            line_chart("Throughput", "clips/s", [Curve("clips/s", steps, stage.column("clips_per_s"))], "step", 0),
        ]
        parts.append(f"<h3>Stage {escape(stage.name)}</h3>{_grid(charts)}")
    return "".join(parts) or "<p class=none>Nothing was recorded.</p>"


def gpu_table(readings: Sequence[Record]) -> str:
    """What was read of each GPU, in one line each; "" without readings."""
    rows = []
    for gpu, group in list(_by_gpu(readings).items())[:MOST_GPUS]:
        throttled = sorted({str(reason) for reading in group for reason in reading.get("throttled_by") or ()})
        cells = (
            f"GPU {gpu}",
            percent(_mean(group, "utilisation")),
            short(_most(group, "memory_used_mb") / 1024, " GB"),
            short(_mean(group, "power_w"), " W"),
            short(_mean(group, "sm_clock_mhz"), " MHz"),
            short(_most(group, "temperature_c"), " °C"),
            ", ".join(throttled) or "–",
        )
        rows.append(_row(*map(escape, cells)))
    if not rows:
        return ""
    head = _row("", "Utilisation", "Most memory", "Power", "Clock", "Hottest", "Throttled by", cell="th")
    return f"<div class=scroll><table>{head}{''.join(rows)}</table></div>"


def _gpu_charts(readings: Sequence[Record]) -> list[str]:
    groups = list(_by_gpu(readings).items())[:MOST_GPUS]
    times_s = np.concatenate([_column(group, "at_us") / 1e6 for _, group in groups] or [np.zeros(1)])
    unit_s, unit = _time_unit(float(times_s.max() - times_s.min()))

    def curves(name: str, factor: float) -> list[Curve]:
        return [
            Curve(
                f"GPU {gpu}",
                (_column(group, "at_us") / 1e6 - times_s.min()) / unit_s,
                factor * _column(group, name),
            )
            for gpu, group in groups
        ]

    x_label = f"{unit} since the first reading"
    return [
        line_chart("GPU utilisation", "%, as the driver reports it", curves("utilisation", 100), x_label, 0, 100),
        line_chart("GPU memory", "GB", curves("memory_used_mb", 1 / 1024), x_label, 0),
    ]


def _by_gpu(readings: Sequence[Record]) -> dict[str, list[Record]]:
    groups: defaultdict[str, list[Record]] = defaultdict(list)
    for reading in readings:
        if math.isfinite(number(reading.get("at_us"))):
            groups[str(reading.get("gpu", "?"))].append(reading)
    return dict(sorted(groups.items()))


def _column(group: Sequence[Record], name: str) -> Numbers:
    return numbers(reading.get(name) for reading in group)


def _mean(group: Sequence[Record], name: str) -> float:
    values = _column(group, name)
    return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan


def _most(group: Sequence[Record], name: str) -> float:
    values = _column(group, name)
    return float(np.nanmax(values)) if np.isfinite(values).any() else math.nan


def _time_unit(longest_s: float) -> tuple[float, str]:
    return (
        (1.0, "seconds") if longest_s < 300 else (60.0, "minutes") if longest_s < 3 * 3600 else (3600.0, "hours")
    )


def _grid(charts: Sequence[str]) -> str:
    return f"<div class=grid2>{''.join(charts)}</div>"


def _row(*cells: str, cell: str = "td") -> str:
    return f"<tr>{''.join(f'<{cell}>{content}</{cell}>' for content in cells)}</tr>"


REPORT_FILE = "report.html"
MOST_SETTINGS_CHARS = 100_000
MOST_FINDINGS = 100
KEEPS_UP = 0.01
"""Up to this share of waiting there is nothing to look for."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run, beside its files unless told where; returns where it is."""
    if not is_run(run_folder):
        found = "no file of one is there" if run_folder.is_dir() else "no such folder"
        raise FileNotFoundError(
            f"There is no run in {run_folder} ({found}); name the --checkpoint-dir of a training"
        )
    out = out or run_folder / REPORT_FILE
    spans, counters = trace_of(run_folder / "trace.jsonl")
    page = render_report(
        run_folder.resolve().name,
        read_metrics(run_folder / "metrics.jsonl"),
        spans=spans,
        counters=counters,
        verdict=json_object(run_folder / "verdict.json"),
        readings=json_lines(run_folder / "readings.jsonl"),
        settings=text_of(run_folder / "settings.yaml"),
        machine=json_object(run_folder / "machine.json"),
        scores=json_object(run_folder / "evaluation" / "scores.json"),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.tmp")
    unfinished.write_text(page, encoding="utf-8", errors="replace")
    unfinished.replace(out)
    return out


def render_report(
    name: str,
    records: Sequence[Record],
    *,
    spans: Sequence[Span] = (),
    counters: Sequence[Counter] = (),
    verdict: Record | None = None,
    readings: Sequence[Record] = (),
    settings: str = "",
    machine: Record | str = "",
    scores: Record | None = None,
    written_at: float | None = None,
) -> str:
    """The page. `records` are those of `read_metrics`; `verdict` has sentence, grade, shares and findings."""
    stages = stages_of(records)
    verdict = verdict or {}
    judged = evaluation(scores or {})
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(written_at))
    trained = ", ".join(f"{stage.name} {stage.steps[-1].step:,} steps" for stage in stages if stage.steps)
    sections = [
        _section("verdict", "Verdict", _verdict(verdict, stages)),
        _section("findings", "Findings", _findings(verdict, stages)),
        _section("time", "Utilisation and step time", over_time(stages, readings)),
        _section("timeline", "Where the time of a step goes", _timeline(verdict, spans)),
        _section("rings", "Are batches ready when they are needed?", rings(stages, counters)),
        _section("training", "Loss and throughput", training(stages)),
        _section("evaluation", "How well it speaks", judged) if judged else "",
        _section("machine", "Machine", _machine(machine, readings)),
        _section("settings", "Settings", _settings(settings)),
    ]
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<meta http-equiv='Content-Security-Policy' content=\"{_POLICY}\">"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(name)} · MyXTTS report</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1 dir='auto'>{escape(name)}</h1><p>MyXTTS run · {escape(trained or 'nothing trained yet')} · "
        f"as of {when}</p></header>\n{''.join(sections)}"
        "<footer>Made by <code>myxtts report</code>. A step's time and idle share are measured on the model's "
        "stream; GPU utilisation is what the driver reports, and counts a GPU as busy whenever any kernel runs."
        "</footer></main></body></html>\n"
    )


def _section(name: str, title: str, content: str) -> str:
    return f"<section id='{name}'><h2>{title}</h2>{content}</section>\n"


def _verdict(verdict: Record, stages: Sequence[StageHistory]) -> str:
    parts = [f"<p class=sentence>{escape(str(verdict.get('sentence') or _sentence(stages)))}</p>"]
    if grade := str(verdict.get("grade") or "").strip():
        notes = " ".join(str(note) for note in _sequence(verdict.get("grade_notes")))
        parts.append(f"<p>Grade {_chip(grade)} <span class=note>{escape(notes)}</span></p>")
    if bars := _share_bars(verdict.get("shares")):
        parts.append(f"<p class=note>One step is made of</p>{stacked_bar(bars)}")
    parts.append(_tiles(_figures(stages) | _profiled(verdict)))
    return "".join(parts)


def _sentence(stages: Sequence[StageHistory]) -> str:
    """What can be said without a profile."""
    trained = [stage for stage in stages if stage.steps]
    if not trained:
        return "This run has reported nothing yet."
    stage = trained[-1]
    speed, idle_share = settled(stage.column("clips_per_s")), settled(stage.column("idle_share"))
    trains = f"Stage {stage.name} trains {short(speed)} clips/s"
    waits = f"its model waits {percent(idle_share)} of the time"
    reading = ": the data keeps up." if idle_share <= KEEPS_UP else ". myxtts profile tells why."
    return f"{trains}, and {waits}{reading}"


def _figures(stages: Sequence[StageHistory]) -> dict[str, str]:
    trained = [stage for stage in stages if stage.steps]
    if not trained:
        return {}
    stage = trained[-1]
    found = {
        "Throughput": short(settled(stage.column("clips_per_s")), " clips/s"),
        "Step time": short(settled(stage.column("step_ms")), " ms"),
        "Step time varies": percent(settled(stage.column("step_cv"))),
        "Model waits": percent(settled(stage.column("idle_share"))),
        "Trained for": duration(max(stage.seconds[-1] for stage in trained)),
    }
    if stage.best_validation is not None:
        best_step, best_loss = stage.best_validation
        found[f"Best validation, step {best_step:,}"] = short(best_loss)
    if stage.steps[-1].skipped:
        found["Skipped steps"] = f"{stage.steps[-1].skipped:,}"
    return found


def _profiled(verdict: Record) -> dict[str, str]:
    """The figures of a verdict, as far as it has them."""
    texts = {
        "Decides the speed": str(verdict.get("bound") or ""),
        "With a perfect feed": short(number(verdict.get("headroom")), " ×"),
        "Of the GPU's peak FLOP/s": percent(number(verdict.get("mfu"))),
        "Recompilations": short(number(verdict.get("recompilations"))),
    }
    return {name: text for name, text in texts.items() if text not in ("", "–")}


def _share_bars(shares: object) -> list[Bar]:
    if not isinstance(shares, Mapping):
        return []
    sizes = {str(name): number(size) for name, size in shares.items()}
    sizes = {name: size for name, size in sizes.items() if size > 0}
    ends = list(accumulate(size / sum(sizes.values()) for size in sizes.values()))
    colours = [f"s-{_class(name)}" for name in sizes]
    return [Bar(*bar) for bar in zip(sizes, [0.0, *ends], ends, colours, strict=False)]


def _findings(verdict: Record, stages: Sequence[StageHistory]) -> str:
    """Those of the verdict in its order, what is well behind the rest; without a profile what the reports show."""
    found: list[object] = [*_sequence(verdict.get("findings"))]
    nothing = "<p>Nothing to change was found.</p>"
    if "findings" not in verdict:
        for stage in stages:
            for code, text in warnings_of(stage.steps):
                found.append(Finding(code, "warn", f"Stage {stage.name}: {text}"))
        if all(len(stage.steps) < WARMUP_REPORTS + FEWEST_REPORTS for stage in stages):
            nothing = "<p>Too little was reported to find anything.</p>"
        nothing += "<p class=note>myxtts profile looks closer than the reports of a training can.</p>"
    records = [item.to_json() if isinstance(item, Finding) else item for item in found]
    shown: dict[bool, list[str]] = {False: [], True: []}
    for record in records[:MOST_FINDINGS]:
        if isinstance(record, Mapping):
            shown[record.get("level") == "pass"].append(_finding(record))
    passed = f"<details><summary>Passed: {len(shown[True])}</summary>{''.join(shown[True])}</details>"
    return ("".join(shown[False]) or nothing) + (passed if shown[True] else "")


def _finding(item: Record) -> str:
    level = str(item.get("level") or "info")
    value = item.get("value")
    change = str(item.get("setting") or "")
    if change and value is not None:
        change += f": {json.dumps(value, default=str, ensure_ascii=False)}"
    gain = number(item.get("gain"))
    lines = [
        f"<p>{_chip(level)} <b>{escape(str(item.get('what') or ''))}</b> "
        f"<code>{escape(str(item.get('code') or ''))}</code></p>",
        f"<p>{escape(str(item['why']))}</p>" if item.get("why") else "",
        f"<p>Change: {escape(str(item['fix']))}</p>" if item.get("fix") else "",
        f"<p>Set <code>{escape(change)}</code></p>" if change else "",
        f"<p>Expected: <b>{short(gain)} ×</b> the present speed</p>" if math.isfinite(gain) else "",
    ]
    return f"<article>{''.join(lines)}</article>"


def _timeline(verdict: Record, spans: Sequence[Span]) -> str:
    explained = (
        "<p class=note>Every row is a thread or a stream. Gaps in the row that trains are time in which the "
        "model's GPU has nothing to do.</p>"
    )
    drawn = draw_timelines(spans)
    missing = "<p class=none>No trace was taken: myxtts profile takes one.</p>"
    return stage_table(verdict.get("phases")) + (explained + drawn if drawn else missing)


def _machine(machine: Record | str, readings: Sequence[Record]) -> str:
    if isinstance(machine, Mapping):
        rows = "".join(
            f"<tr><th>{escape(str(name))}</th><td>{escape(_plain(value))}</td></tr>"
            for name, value in machine.items()
        )
        described = f"<div class=scroll><table class=facts>{rows}</table></div>" if rows else ""
    else:
        described = f"<pre>{escape(machine)}</pre>" if machine.strip() else ""
    return described + gpu_table(readings) or "<p class=none>Nothing was recorded.</p>"


def _settings(settings: str) -> str:
    if not settings.strip():
        return "<p class=none>Nothing was recorded.</p>"
    cut = "\n…" if len(settings) > MOST_SETTINGS_CHARS else ""
    text = escape(settings[:MOST_SETTINGS_CHARS] + cut)
    return f"<details><summary>settings.yaml</summary><pre>{text}</pre></details>"


def _tiles(figures: Mapping[str, str]) -> str:
    tiles = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in figures.items())
    return f"<dl class=tiles>{tiles}</dl>" if tiles else ""


def _chip(word: str) -> str:
    return f"<span class='chip {_class(word)}'>{escape(word)}</span>"


def _class(word: str) -> str:
    """A word of the style from what may be a phrase."""
    return "".join(letter for letter in word.lower().partition(" ")[0] if letter.isalpha())


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
