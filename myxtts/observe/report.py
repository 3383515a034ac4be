"""A run as one HTML page to show a colleague: the verdict first, then what it rests on.

This module computes the values and `report.html` lays them out. The page loads nothing: sounds are part of it, and
its one script only shows the values under the pointer. Panels without data, damaged files and lines are left out.

    RUN/metrics.jsonl     reports of its steps              RUN/settings.yaml     its configuration
    RUN/trace.jsonl       spans of some steps               RUN/machine.json      the machine: names and values
    RUN/readings.jsonl    GPU readings                      RUN/verdict.json      the result of `myxtts profile`
    RUN/evaluation/scores.json    the result of `myxtts evaluate`     RUN/sample.wav      a spoken sentence
    RUN/samples/          what evaluations of the run spoke, and their newest pictures
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np

from myxtts.observe.diagnosis import FEWEST_REPORTS, WARMUP_REPORTS, warnings_of
from myxtts.observe.findings import Finding, overfitting
from myxtts.observe.metrics import (
    SAMPLES_FOLDER,
    Numbers,
    Record,
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
    stages_of,
    text_of,
)
from myxtts.observe.trace import Span, read_jsonl

REPORT_FILE = "report.html"
MOST_POINTS = 500  # points of a curve; a screen shows hardly more
FEWEST_SMOOTHED, NUM_MEANS = 80, 40  # a curve of so many points gets a second one through so many means
MOST_BARS = 600
TYPICAL_STEPS, NUM_WORST, NUM_HEARD = 4, 3, 4
MOST_SECONDS = 20  # of a sound on the page
KEEPS_UP = 0.01  # the data keeps up if the model waits for at most this share of the time
FLOW = ("gather", "upload", "encode", "handoff", "wait", "train", "update")
"""Spans with a colour of their own, in the order in which a batch passes them."""
STEP_SPANS = ("train", "update")

GPU_COLUMNS = ("at_us", "utilisation", "memory_used_mb", "power_w", "sm_clock_mhz", "temperature_c")
SCORES = ("clips", "wer", "cer", "similarity", "mos", "same_speaker_share")

JUDGED = {
    "wer": ("Words misheard", "WER of the spoken sentences"),
    "similarity": ("Similarity to the speaker", "1 is the same"),
    "mos": ("Quality", "MOS, 5 is excellent"),
}

Chart = dict[str, Any]  # what `report.html` needs to draw a chart
Scores = Mapping[str, Mapping[str, float]]  # the mean scores of each set of clips; NaN where no judge gave any


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run, into its folder unless `out` is given, and return its path."""
    if not is_run(run_folder):
        found = f"{run_folder} contains no run" if run_folder.is_dir() else f"{run_folder}: no such folder"
        raise FileNotFoundError(f"{found}; give the --checkpoint-dir of a run")
    out = out or run_folder / REPORT_FILE
    spans, _ = read_jsonl(run_folder / "trace.jsonl")
    page = render_report(
        run_folder.resolve().name,
        read_metrics(run_folder / "metrics.jsonl"),
        spans=spans,
        verdict=json_object(run_folder / "verdict.json"),
        readings=json_lines(run_folder / "readings.jsonl"),
        settings=text_of(run_folder / "settings.yaml"),
        machine=json_object(run_folder / "machine.json"),
        scores=json_object(run_folder / "evaluation" / "scores.json"),
        sound=partial(_sound, run_folder.resolve()),
        pictures=sorted((run_folder / SAMPLES_FOLDER).glob("*.png")),
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
    verdict: Record | None = None,
    readings: Sequence[Record] = (),
    settings: str = "",
    machine: Record | None = None,
    scores: Record | None = None,
    sound: Callable[[str], str] = lambda _: "",
    pictures: Sequence[Path] = (),
) -> str:
    """Return the page. `records` come from `read_metrics`, `verdict` from `myxtts profile`; `sound` returns the
    URI of an audio file of the run, by its path in there."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "short": lambda value, unit="": short(number(value), unit),
        "percent": lambda share, digits=1: percent(number(share), digits),
        "score": lambda value: _score(number(value)),
        "json": lambda value: json.dumps(value, default=str, ensure_ascii=False),
        "settled": settled,
        "p99": lambda values: float(np.nanpercentile(values, 99)) if np.isfinite(values).any() else math.nan,
        "sha256": lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode(),
        "duration": duration,
        "mean": _mean,
        "most": lambda values: max(values[np.isfinite(values)], default=math.nan),
        "pairs": lambda value: list(_mapping(value).items()),
    }
    template = environment.from_string(Path(__file__).with_name(REPORT_FILE).read_text(encoding="utf-8"))
    stages, verdict, gpus = stages_of(records), verdict or {}, _by_gpu(readings)
    trained = [stage for stage in stages if stage.steps]
    page = template.render(
        name=name,
        trained=trained,
        written=time.strftime("%Y-%m-%d %H:%M"),
        verdict=verdict,
        grade_notes=" ".join(str(note) for note in _sequence(verdict.get("grade_notes"))),
        sentence=verdict.get("sentence") or _sentence(trained),
        shares=_stacked({str(name): number(share) for name, share in _mapping(verdict.get("shares")).items()}),
        findings=_findings(verdict, stages),
        has_enough=any(len(stage.steps) >= WARMUP_REPORTS + FEWEST_REPORTS for stage in stages),
        over_time=_charts_over_time(trained, gpus),
        timelines=_timelines(spans),
        rings=[part for part in map(_rings, trained) if part["rows"]],
        training=[(stage.name, charts) for stage in stages if (charts := _training_charts(stage))],
        evaluation=_evaluation(scores or {}, sound),
        listen=[*_listen(scores or {}, sound), *(row for stage in stages for row in _spoken(stage, sound))],
        pictures=[(path.stem.replace("-", ": ", 1), _embedded(path)) for path in pictures],
        machine=machine or {},
        gpus=gpus,
        settings=settings,
    )
    return page.strip() + "\n"


def _sentence(trained: Sequence[StageHistory]) -> str:
    if not trained:
        return "This run has reported nothing yet."
    stage = trained[-1]
    speed, idle_share = settled(stage.column("clips_per_s")), settled(stage.column("idle_share"))
    outcome = ": the data keeps up." if idle_share <= KEEPS_UP else ". Run myxtts profile to see why."
    waits = f"its model waits {percent(idle_share)} of the time{outcome}"
    return f"Stage {stage.name} trains {short(speed)} clips/s, and {waits}"


def _sound(folder: Path, name: str) -> str:
    """Return the start of an audio file of a run as a URI; "" if there is none, or it is not in the folder."""
    import soundfile

    path = (folder / name).resolve()
    if not path.is_relative_to(folder) or not path.is_file():
        return ""
    file = io.BytesIO()
    try:
        rate = soundfile.info(path).samplerate
        wave, _ = soundfile.read(path, MOST_SECONDS * rate, dtype="float32")
        soundfile.write(file, wave, rate, format="MP3")
    except (RuntimeError, OSError, ValueError):
        return ""
    return f"data:audio/mpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _listen(scores: Record, sound: Callable[[str], str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return texts with the sounds to compare, by name: the sample of the run, and sentences of the evaluation."""
    rows = [("", [("Sample", sound("sample.wav"))])]
    clips = [clip for clip in _sequence(scores.get("clips")) if isinstance(clip, Mapping) and clip.get("text")]
    spoken = [clip for clip in clips if clip.get("set") == "synthesised"][:NUM_HEARD]
    for shown in spoken:
        same = [clip for clip in clips if clip.get("clip") == shown.get("clip")]
        files = {str(clip.get("set")): sound(f"evaluation/{clip.get('file')}") for clip in same}
        rows.append((str(shown["text"]), list(files.items())))
    return [(text, sounds) for text, sounds in rows if any(uri for _, uri in sounds)]


def _spoken(stage: StageHistory, sound: Callable[[str], str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the sentences that evaluations spoke: the recording first, then as the steps speak it, in order."""
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    for step, rows in stage.spoken:
        for row in [row for row in rows if isinstance(row, Mapping)][:NUM_HEARD]:
            recorded, file = (f"{SAMPLES_FOLDER}/{row.get(name)}" for name in ("recording", "file"))
            _, sounds = found.setdefault(recorded, (str(row.get("text")), [("recording", sound(recorded))]))
            sounds += [(f"{stage.name}, step {step:,}", uri)] if (uri := sound(file)) else []
    return [row for row in found.values() if len(row[1]) > 1]


def _embedded(path: Path) -> str:
    """Return a picture as a URI; "" if it cannot be read."""
    try:
        return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    except OSError:
        return ""


def _findings(verdict: Record, stages: Sequence[StageHistory]) -> Sequence[Any]:
    """Return what is overfitted, then the findings of the profile; without one, the warnings of the reports."""
    fitted = []
    for stage in stages:
        losses = [(step.step, step.losses.get("total", math.nan)) for step in stage.steps]
        fitted.append(overfitting(stage.name, stage.validations, losses))
    overfitted = [found for found in fitted if found is not None]
    if "findings" in verdict:
        return [*overfitted, *_sequence(verdict["findings"])]
    warnings = [(stage.name, *warning) for stage in stages for warning in warnings_of(stage.steps)]
    return [*overfitted, *(Finding(code, "warn", f"Stage {stage}: {text}") for stage, code, text in warnings)]


class Curve(NamedTuple):
    """Points in the order of drawing; NaN in y leaves a gap."""

    label: str
    x: Numbers
    y: Numbers
    look: Literal["line", "mean", "dots"] = "line"  # a long `line` is also smoothed, `mean` is only smoothed


def line_chart(
    title: str,
    unit: str,
    curves: Iterable[Curve],
    x_label: str,
    low: float | None = None,
    high: float | None = None,
) -> Chart | None:
    """Return a chart of these curves; `low` and `high` fix the y axis. None if there is no point."""
    curves = [curve for curve in curves if np.isfinite(curve.y).any()]
    if not curves:
        return None
    every_y = np.concatenate([curve.y[np.isfinite(curve.y)] for curve in curves])
    x_low, x_high = _ends(np.concatenate([curve.x[np.isfinite(curve.y)] for curve in curves]))
    x_low = 0.0 if 0 < x_low < x_high / 10 else x_low
    y_low, y_high = _visible(every_y, low, high)
    draw = partial(_path, ends=(x_low, x_high, y_low, y_high))
    drawn = []
    for label, x, y, look in curves:
        paths = [("dots", draw(x, y, dots=True))] if look == "dots" else [("line", draw(x, y))]
        if look != "dots" and len(y) >= FEWEST_SMOOTHED:
            paths = [("line faint", paths[0][1])] if look == "line" else []
            y = _stretch_means(np.clip(y, y_low, y_high))  # unclipped, an outlier would shift its stretch
            paths.append(("line", draw(_stretch_means(x), y)))
        drawn.append({"label": label, "last": short(float(y[np.isfinite(y)][-1])), "paths": paths})
    note, outside = "", every_y[(every_y > y_high) | (every_y < y_low)]
    if len(outside):
        extreme = float(outside.max() if outside.max() > y_high else outside.min())
        note = f"{len(outside):,} beyond the edge, up to {short(extreme)}"
    ticks: Chart = {"x_ticks": _ticks(x_low, x_high), "y_ticks": _ticks(y_low, y_high)}
    ticks["ends"] = " ".join(f"{end:.9g}" for end in (x_low, x_high, y_low, y_high))
    return {"title": title, "unit": unit, "x_label": x_label, "curves": drawn, "outside": note, **ticks}


def _path(x: Numbers, y: Numbers, ends: tuple[float, float, float, float], dots: bool = False) -> str:
    """Return an SVG path in a view of 1000 × 300; a point without neighbours becomes a dot."""
    x, y = _thinned(x, y)
    across = 1000 * (x - ends[0]) / (ends[1] - ends[0])
    down = 300 * (1 - np.clip((y - ends[2]) / (ends[3] - ends[2]), 0, 1))
    joined = np.isfinite(np.append(y, math.nan)) & (not dots)  # with one more, so that [-1] has no neighbour
    pieces = []
    for index in np.flatnonzero(np.isfinite(y)):
        move, dot = "L" if joined[index - 1] else "M", "" if joined[index - 1] or joined[index + 1] else "h0"
        pieces.append(f"{move}{across[index]:.1f} {down[index]:.1f}{dot}")
    return "".join(pieces)


def _thinned(x: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
    """Keep the lowest and the highest point of every stretch, so that outliers stay."""
    if len(x) <= MOST_POINTS:
        return x, y
    kept: list[int] = []
    for stretch in np.array_split(np.arange(len(x)), MOST_POINTS // 2):
        finite = stretch[np.isfinite(y[stretch])]
        ends = {finite[np.argmin(y[finite])], finite[np.argmax(y[finite])]} if len(finite) else {stretch[0]}
        kept += sorted(int(index) for index in ends)
    return x[kept], y[kept]


def _stretch_means(values: Numbers) -> Numbers:
    return numbers(_mean(stretch) for stretch in np.array_split(values, NUM_MEANS))


def _visible(values: Numbers, low: float | None, high: float | None) -> tuple[float, float]:
    """Return the range to show: all values, unless a few of them would flatten the rest."""
    first, second = np.percentile(values, [1, 99]) if len(values) >= 20 else (values.min(), values.max())
    spread = float(second - first) or abs(float(second)) * 0.1
    bottom = low if low is not None else max(float(values.min()), float(first) - spread / 2)
    top = high if high is not None else min(float(values.max()), float(second) + spread / 2)
    margin = 0.04 * (top - bottom)
    return _ends(np.array([bottom - margin * (low is None), top + margin * (high is None)]))


def _ends(values: Numbers) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    if high - low > max(abs(low), abs(high), 1e-9) * 1e-6:
        return low, high
    return low - max(abs(low) / 10, 0.5), high + max(abs(high) / 10, 0.5)


def _ticks(low: float, high: float, about: int = 5) -> list[tuple[float, str]]:
    """Return round numbers in a range, about that many: the position as a share of the axis, and the label."""
    rough = (high - low) / about
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * 0.999)
    values = [count * step for count in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    divisor, suffix = (1e6, " M") if step >= 1e5 else (1e3, " k") if step >= 1e3 else (1.0, "")
    digits = max(0, -math.floor(math.log10(step / divisor) + 1e-9))
    texts = [f"{value / divisor:.{digits}f}{suffix if value else ''}" for value in values]
    if not 1e-3 <= step < 1e9:
        texts = [f"{value:.0e}" for value in values]
    return [((value - low) / (high - low), text) for value, text in zip(values, texts, strict=True)]


def _charts_over_time(trained: Sequence[StageHistory], gpus: Mapping[str, Record]) -> list[Chart]:
    """Return charts of how busy everything was and how long steps took, over the time of the run."""
    unit_s, unit = _time_unit(max((stage.seconds[-1] for stage in trained), default=0.0))
    first_us = min((gpu["at_us"].min() for gpu in gpus.values()), default=0.0)
    last_us = max((gpu["at_us"].max() for gpu in gpus.values()), default=0.0)
    gpu_unit_s, gpu_unit = _time_unit((last_us - first_us) / 1e6)

    def of_stages(name: str, factor: float = 1, offset: float = 0) -> list[Curve]:
        times = [np.array(stage.seconds) / unit_s for stage in trained]
        columns = [offset + factor * stage.column(name) for stage in trained]
        return [Curve(stage.name, x, y) for stage, x, y in zip(trained, times, columns, strict=True)]

    def of_gpus(name: str, factor: float) -> list[Curve]:
        times = [(gpu["at_us"] - first_us) / (1e6 * gpu_unit_s) for gpu in gpus.values()]
        return [Curve(f"GPU {gpu}", x, factor * gpus[gpu][name]) for gpu, x in zip(gpus, times, strict=True)]

    ends_and_times = [(stage.name, *stage.step_times()) for stage in trained]
    every_step = [Curve(name, ends / unit_s, times) for name, ends, times in ends_and_times]
    x_label, gpu_label = f"{unit} of training", f"{gpu_unit} since the first reading"
    by_driver = "%, as reported by the driver"
    charts = [
        line_chart("Model busy", "% of the time", of_stages("idle_share", -100, 100), x_label, 0, 100),
        line_chart("Step time", "ms, of every step", every_step, x_label, 0),
        line_chart("MFU", "% of the measured matmul rate", of_stages("mfu", 100), x_label, 0, 100),
        line_chart("GPU utilisation", by_driver, of_gpus("utilisation", 100), gpu_label, 0, 100),
        line_chart("GPU memory", "GB", of_gpus("memory_used_mb", 1 / 1024), gpu_label, 0),
    ]
    return [chart for chart in charts if chart]


def _training_charts(stage: StageHistory) -> list[Chart]:
    steps, validated_at = stage.column("step"), numbers(step for step, _ in stage.validations)
    training = Curve("training", steps, stage.column("losses.total"))
    validation = Curve("validation", validated_at, numbers(loss for _, loss in stage.validations), "dots")
    speed = Curve("clips/s", steps, stage.column("clips_per_s"))
    charts = [line_chart("Loss", "total", [training, validation], "step")]
    judged_at = numbers(step for step, _ in stage.judged)
    for name, (title, unit) in JUDGED.items():
        scores = Curve("spoken sentences", judged_at, numbers(found.get(name) for _, found in stage.judged))
        charts.append(line_chart(title, unit, [scores], "step"))
    charts.append(line_chart("Throughput", "clips/s", [speed], "step", 0))
    return [chart for chart in charts if chart]


def _time_unit(longest_s: float) -> tuple[float, str]:
    if longest_s < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if longest_s < 3 * 3600 else (3600.0, "hours")


def _rings(stage: StageHistory) -> dict[str, Any]:
    """Return how full the rings of a stage were, and how often empty."""
    slots = {ring: depth for step in stage.steps for ring, (_, depth) in step.rings.items()}
    steps, rows, curves = stage.column("step"), [], []
    for ring in stage.ring_names:
        fill = stage.readiness(ring)
        if np.isfinite(fill).any():
            rows.append((ring, slots[ring], _mean(fill), _mean((fill == 0)[np.isfinite(fill)])))
            curves.append(Curve(ring, steps, 100 * fill, "mean"))
    chart = line_chart("Ready", "% of the slots", curves, "step", 0, 100)
    return {"stage": stage.name, "rows": rows, "chart": chart}


def _by_gpu(readings: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Return the readings of each GPU as columns."""
    groups: defaultdict[str, list[Record]] = defaultdict(list)
    for reading in readings:
        if math.isfinite(number(reading.get("at_us"))):
            groups[str(reading.get("gpu", "?"))].append(reading)
    found: dict[str, dict[str, Any]] = {}
    for gpu, group in sorted(groups.items()):
        reasons = {str(reason) for reading in group for reason in _sequence(reading.get("throttled_by"))}
        columns = {name: numbers(reading.get(name) for reading in group) for name in GPU_COLUMNS}
        found[gpu] = {**columns, "throttled_by": sorted(reasons)}
    return found


def _mean(values: Numbers) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan


class Bar(NamedTuple):
    """A part of a stacked bar, or a piece of work on a track, from `start` to `end` in shares of the whole."""

    label: str
    start: float
    end: float
    colour: str  # a class of the style sheet: `c1` and so on, or `s-` and the name of a span
    tip: str = ""


def _stacked(sizes: Mapping[str, float]) -> list[Bar]:
    sizes = {name: size for name, size in sizes.items() if size > 0}
    ends = [0.0, *accumulate(size / sum(sizes.values()) for size in sizes.values())]
    parts = zip(sizes, pairwise(ends), strict=True)
    return [Bar(name, start, end, f"s-{name}", percent(end - start)) for name, (start, end) in parts]


def _timelines(spans: Sequence[Span]) -> list[Chart]:
    """Return a few typical steps and, if it stands out, the slowest one."""
    steps = _steps(spans)
    if not steps:
        return []
    count = min(TYPICAL_STEPS, len(steps))
    rows = [steps[first : first + count] for first in range(len(steps) - count + 1)]
    typical = sorted(rows, key=lambda row: row[-1][1] - row[0][0])[len(rows) // 2]
    first = steps.index(typical[0]) + 1
    title = f"{count} typical steps ({first} to {first + count - 1} of the trace)"
    drawn = [_timeline(title, spans, typical[0][0], typical[-1][1])]
    lengths = [later[1] - earlier[1] for earlier, later in pairwise(steps)]
    if len(lengths) > 2 and max(lengths) > 1.3 * median(lengths):
        slowest = lengths.index(max(lengths)) + 1
        title = f"The slowest step ({slowest + 1} of the trace, {max(lengths) / median(lengths):.1f} × the median)"
        drawn.append(_timeline(title, spans, steps[slowest - 1][1], steps[slowest][1]))
    return drawn


def _steps(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Return start and end of each step in order; of each batch if the trace has no training."""
    chosen = [span for span in spans if span.name in STEP_SPANS] or [span for span in spans if span.batch >= 0]
    ends: defaultdict[int, list[int]] = defaultdict(list)
    for span in chosen:
        ends[span.batch] += [span.start_us, span.start_us + span.duration_us]
    return sorted((min(found), max(found)) for found in ends.values())


def _timeline(title: str, spans: Sequence[Span], start_us: int, end_us: int) -> Chart:
    length_us = max(end_us - start_us, 1)
    inside = [span for span in spans if span.start_us < end_us and span.start_us + span.duration_us > start_us]
    inside = sorted(inside, key=lambda span: -span.duration_us)[:MOST_BARS]
    tracks: defaultdict[tuple[bool, str], list[Bar]] = defaultdict(list)
    for span in sorted(inside, key=lambda span: (span.start_us, -span.duration_us)):
        first = max(span.start_us - start_us, 0) / length_us
        last = min(span.start_us + span.duration_us - start_us, length_us) / length_us
        batch = f", batch {span.batch}" if span.batch >= 0 else ""
        colour = f"s-{span.name}" if span.name in FLOW else "c6"
        tip = f"{span.name}{batch}: {span.duration_us / 1000:.2f} ms"
        tracks[span.device, span.track].append(Bar(span.name, first, last, colour, tip))
    place = {name: index for index, name in enumerate(FLOW)}
    in_order = sorted(tracks.items(), key=lambda item: (min(place.get(bar.label, 99) for bar in item[1]), item[0]))
    rows = [(f"{track} (GPU)" if device else track, bars) for (device, track), bars in in_order]
    legend = {bar.label: bar.colour for _, bars in rows for bar in bars}
    return {"title": title, "rows": rows, "ticks": _ticks(0, length_us / 1000), "legend": legend}


def _evaluation(scores: Record, sound: Callable[[str], str]) -> dict[str, Any] | None:
    """Return the scores of `myxtts evaluate`; None if nothing was judged."""
    rows = {str(name): row for name, row in _mapping(scores.get("summary")).items() if isinstance(row, Mapping)}
    if not rows:
        return None
    summary = {name: {key: number(row.get(key)) for key in SCORES} for name, row in rows.items()}
    clips = [clip for clip in _sequence(scores.get("clips")) if isinstance(clip, Mapping)]
    misheard = [clip for clip in clips if clip.get("set") == "synthesised" and number(clip.get("wer")) > 0]
    worst = sorted(misheard, key=lambda clip: (-clip["wer"], str(clip.get("clip"))))[:NUM_WORST]
    threshold = number(scores.get("same_speaker_from"))
    charts = [
        _score_chart("Words misheard", "WER, 1 is all of them", "wer", summary, 0, 1),
        _score_chart("Letters misheard", "CER, 1 is all of them", "cer", summary, 0, 1),
        _similarity_chart(summary, clips, threshold),
        _score_chart("Quality", "MOS, 5 is excellent", "mos", summary, 1, 5),
    ]
    return {
        "reading": scores.get("reading") or "",
        "threshold": threshold,
        "summary": summary,
        "charts": [chart for chart in charts if chart["rows"]],
        "worst": [{**clip, "sound": sound(f"evaluation/{clip.get('file')}")} for clip in worst],
        "about": scores.get("about"),
        "judges": _sequence(scores.get("judges")),
    }


def _score_chart(title: str, unit: str, key: str, summary: Scores, low: int, high: int) -> Chart:
    """Return a bar for each set, with a mark at the score of the recordings."""
    found = {name: row[key] for name, row in summary.items() if math.isfinite(row[key])}
    shares = {name: (score - low) / (high - low) for name, score in found.items()}
    marks = [_mark(shares["recording"], "c6", "the recordings")] if "recording" in shares else []
    rows = []
    for index, (name, share) in enumerate(shares.items()):
        rows.append((f"{name} {_score(found[name])}", [Bar("", 0, share, f"c{index % 6 + 1}"), *marks]))
    return {"title": title, "unit": f"{unit}; grey: the recordings", "rows": rows, "ticks": _ticks(low, high)}


def _similarity_chart(summary: Scores, clips: Sequence[Record], threshold: float) -> Chart:
    """Return a mark for each clip at its similarity, and one at the threshold for the same speaker."""
    rows = []
    for index, (name, row) in enumerate(summary.items()):
        found = numbers(clip.get("similarity") for clip in clips if clip.get("set") == name)
        marks = [_mark(value, f"c{index % 6 + 1}", _score(value)) for value in found[np.isfinite(found)].tolist()]
        if marks:
            same = [_mark(threshold, "c6", "same speaker from here on")] if math.isfinite(threshold) else []
            rows.append((f"{name} {_score(row['similarity'])}", [*same, *marks]))
    unit = f"of each clip; grey: {short(threshold)}, from where on two voices count as one"
    return {"title": "Similarity to the speaker", "unit": unit, "rows": rows, "ticks": _ticks(0, 1)}


def _mark(at: float, colour: str, tip: str) -> Bar:
    return Bar("", at, at + 0.006, colour, tip)


def _score(value: float) -> str:
    return f"{value:.2f}".replace("-", "−") if math.isfinite(value) else "–"


def _mapping(value: object) -> Record:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()
