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
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from myxtts.observe.charts import Bar, stacked_bar
from myxtts.observe.evaluation import evaluation
from myxtts.observe.findings import Finding
from myxtts.observe.history import StageHistory, duration, number, percent, settled, short, stages_of
from myxtts.observe.metrics import read_metrics
from myxtts.observe.page_style import STYLE
from myxtts.observe.panels import gpu_table, over_time, rings, stage_table, training
from myxtts.observe.recorded import is_run, json_lines, json_object, text_of, trace_of
from myxtts.observe.timeline import draw_timelines
from myxtts.observe.trace import Counter, Span
from myxtts.observe.watch import FEWEST_REPORTS, WARMUP_REPORTS, warnings_of

REPORT_FILE = "report.html"
MOST_SETTINGS_CHARS = 100_000
MOST_FINDINGS = 100
KEEPS_UP = 0.01
"""Up to this share of waiting there is nothing to look for."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

Record = Mapping[str, Any]


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
        "With a perfect feed": short(number(verdict.get("headspace")), " ×"),
        "Of the GPU's peak FLOP/s": percent(number(verdict.get("flops_share"))),
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
    return stage_table(verdict.get("stages")) + (explained + drawn if drawn else missing)


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


def _sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
