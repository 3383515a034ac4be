"""The parts of the report page that show a run over time: utilisation, step time, rings, loss, throughput.

Each function gives the HTML of one part, or says that nothing was recorded for it. Knows reports and readings (as
`nvml` gives them to JSON), not where they were kept.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from myxtts.observe.charts import Curve, line_chart, meter
from myxtts.observe.history import Numbers, StageHistory, number, numbers, percent, short
from myxtts.observe.trace import Counter

Record = Mapping[str, Any]

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
    head = _row("A batch", "mostly", "on average", "at most", "varies", "Stage busy", "Side by side", cell="th")
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
