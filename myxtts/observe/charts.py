"""Charts as HTML and inline SVG: curves, stacked bars, lanes of a timeline.

The SVG holds only shapes and is stretched to the room there is; every word stands beside it as HTML, so that it
stays readable on a phone. Colours are classes of `page_style`. Knows nothing of training; escapes all text given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Literal, NamedTuple

import numpy as np

from myxtts.observe.history import Numbers, percent, short, smoothed, thinned

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
    for number, curve in enumerate(drawn):
        colour = f"c{number % NUM_COLOURS + 1}"
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
