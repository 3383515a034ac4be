"""The curves of the learning experiment as a small SVG file: three panels over the GPT's training steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from myxtts.evaluation import RECONSTRUCTED, RECORDING, SYNTHESISED

PANELS = {"wer": "WER", "similarity": "similarity", "mos": "MOS"}
WIDTH, HEIGHT, LEFT, TOP, GAP = 240, 170, 34, 24, 46
STYLES = {
    (SYNTHESISED, "griffin-lim"): ("synthesised, Griffin-Lim", 'stroke="#1f77b4"'),
    (SYNTHESISED, "hifigan"): ("synthesised, decoder", 'stroke="#ff7f0e"'),
    (RECORDING, ""): ("recordings", 'stroke="grey" stroke-dasharray="2 3"'),
    (RECONSTRUCTED, "griffin-lim"): ("their codes, Griffin-Lim", 'stroke="grey" stroke-dasharray="6 3"'),
    (RECONSTRUCTED, "hifigan"): ("their codes, decoder", 'stroke="grey" stroke-dasharray="10 3 2 3"'),
}
"""Label and line style by set and vocoder."""


def draw(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write one panel per measure; recordings and their codes are horizontal lines."""
    panels = [_panel(number, name, rows) for number, name in enumerate(PANELS)]
    width = LEFT + len(PANELS) * (WIDTH + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + 56}"',
        '  font-family="sans-serif" font-size="10" fill="none" stroke-width="1.5">',
        '<rect width="100%" height="100%" fill="white"/>',
        *(line for panel in panels for line in panel),
        *_legend(),
        "</svg>",
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _panel(number: int, name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    judged = [row for row in rows if row.get(name) is not None]
    if not judged:
        return []
    values = [row[name] for row in judged]
    last_step = max(row["gpt_step"] for row in judged)
    step = _tick_step(max(values) - min(values) or 1.0)
    low, high = math.floor(min(values) / step) * step, math.ceil(max(values) / step) * step
    left = LEFT + number * (WIDTH + GAP)

    def x(gpt_step: float) -> int:
        return round(left + WIDTH * gpt_step / (1.04 * last_step))

    def y(value: float) -> float:
        return round(TOP + HEIGHT * (1 - (value - low) / (high - low)), 1)

    lines = [
        f'<rect x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" stroke="black" stroke-width="0.8"/>',
        _text(left + WIDTH / 2, TOP - 8, PANELS[name], 'font-size="12" text-anchor="middle"'),
    ]
    places = range(0, last_step + 1, max(last_step // 4, 1))
    lines.append("".join(_text(x(at), TOP + HEIGHT + 13, str(at), 'text-anchor="middle"') for at in places))
    ticks = [low + step * count for count in range(round((high - low) / step) + 1)]
    lines.append("".join(_text(left - 4, y(tick) + 3, f"{tick:g}", 'text-anchor="end"') for tick in ticks))
    for (kind, vocoder), (_, style) in STYLES.items():
        of_kind = [row for row in judged if row["set"] == kind and vocoder in ("", row["vocoder"])]
        if kind == SYNTHESISED and of_kind:
            points = [(x(row["gpt_step"]), y(row[name])) for row in of_kind]
            lines.append(f'<polyline {style} points="{" ".join(f"{a},{b}" for a, b in points)}"/>')
            lines += [f'<circle {style} cx="{a}" cy="{b}" r="2"/>' for a, b in points]
        elif of_kind:
            lines.append(f'<path {style} d="M{left} {y(of_kind[-1][name])}h{WIDTH}"/>')
    return lines


def _tick_step(span: float) -> float:
    """The round distance that gives three to eight ticks."""
    magnitude = 10 ** math.floor(math.log10(span))
    return next(step * magnitude for step in (0.2, 0.5, 1, 2) if span / (step * magnitude) <= 7)


def _legend() -> list[str]:
    lines, y = [_text(LEFT, TOP + HEIGHT + 40, "GPT training steps")], TOP + HEIGHT + 37
    for number, (label, style) in enumerate(STYLES.values()):
        x = LEFT + 120 + 150 * number
        lines += [f'<path {style} d="M{x} {y}h20"/>', _text(x + 25, y + 3, label)]
    return lines


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="black"{" " * bool(style)}{style}>{text}</text>'
