"""The report page: what it says of a run, of parts of one, and of hostile ones; and that it needs nothing else."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from myxtts.observe.findings import Finding
from myxtts.observe.metrics import MetricsLog, StepReport, duration, stages_of, thinned
from myxtts.observe.report import Curve, line_chart, render_report, ticks, write_report
from myxtts.observe.trace import Counter, Span

REPORT = StepReport(
    stage="gpt",
    step=10,
    total_steps=1000,
    epoch=0,
    losses={"total": 3.4, "text_loss": 4.1},
    lr=1e-4,
    grad_norm={"model": 0.8},
    clips_per_s=512.0,
    step_ms=107.0,
    step_cv=0.02,
    idle_share=0.003,
    ahead=20,
    rings={"host": (12, 16), "device": (2, 2), "model": (3, 3), "keep": (0, 4)},
    memory_mb={"model": 12595.0},
    skipped=0,
    eta_s=754.0,
    elapsed_s=1.0,
)
VERDICT = {
    "sentence": "The model waits 11 % of every step for data.",
    "grade": "good",
    "shares": {"compute": 0.81, "wait": 0.11, "copy": 0.02, "host": 0.04, "other": 0.02},
    "headroom": 1.13,
    "grade_notes": ["The data GPU has little to do."],
    "bound": "gather",
    "phases": {"gather": {"median_ms": 80.5, "mean_ms": 90.0, "longest_ms": 400.0, "cv": 0.3, "workers": 4}},
    "findings": [
        {"code": "all-well", "level": "pass", "what": "Nothing was compiled again."},
        Finding(
            code="gather-bound",
            level="warn",
            what="Gathering is slow.",
            why="The host ring is empty.",
            fix="Add threads.",
            setting="data.num_workers",
            value=12,
            gain=1.1,
        ),
    ],
}
SECTIONS = ["verdict", "findings", "time", "timeline", "rings", "training", "machine", "settings"]
VOID = {"meta"}


class Page(HTMLParser):
    """A page as a browser reads it; fails if an element is not closed where it should be."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {}
        self._open: list[str] = []
        self._section = ""
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._section = dict(attrs)["id"] or ""
            self.sections[self._section] = ""
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if self._section:
            self.sections[self._section] += f" {data}"

    def paths(self, look: str) -> list[str]:
        return [
            attrs["d"] or ""
            for tag, attrs in self.tags
            if tag == "path" and look in (attrs["class"] or "").split()
        ]

    def bars(self) -> list[tuple[str, str]]:
        """Stage and tip of every bar of a timeline."""
        return [
            (attrs["class"] or "", attrs["title"] or "")
            for tag, attrs in self.tags
            if tag == "i" and "title" in attrs
        ]


def on_step(step: int, **values: Any) -> dict[str, Any]:
    return {"kind": "step", **vars(replace(REPORT, **{"step": step, "elapsed_s": float(step), **values}))}


def a_run(steps: int = 20) -> list[dict[str, Any]]:
    validation = {"kind": "validation", "stage": "gpt", "step": steps, "losses": {"total": 2.5}, "is_best": True}
    return [*(on_step(10 * step, losses={"total": 3 - step / steps}) for step in range(1, steps + 1)), validation]


def a_trace(slow: int = -1) -> list[Span]:
    spans, at_us = [], 1_000_000
    for step in range(20):
        spans.append(Span("gather", f"gather-{step % 2}", at_us - 50_000, 40_000, step + 1))
        wait_us = 80_000 if step == slow else 500
        spans.append(Span("wait", "MainThread", at_us, wait_us, step))
        spans.append(Span("train", "model stream", at_us + wait_us, 90_000, step, device=True))
        spans.append(Span("update", "model stream", at_us + wait_us + 90_000, 9_000, step, device=True))
        at_us += wait_us + 100_000
    return spans


def gpu_readings() -> list[dict[str, Any]]:
    return [
        {
            "at_us": 100_000 * number,
            "gpu": gpu,
            "utilisation": 0.25 + gpu / 2,
            "memory_used_mb": 2048.0 * (gpu + 1),
            "power_w": None,
            "temperature_c": 61,
            "throttled_by": ["power cap"] * gpu,
        }
        for number in range(30)
        for gpu in (0, 1)
    ]


def test_everything_of_a_run_is_on_its_page_and_the_verdict_comes_first() -> None:
    page = Page(
        render_report(
            "my-voice",
            a_run(),
            spans=a_trace(),
            verdict=VERDICT,
            readings=gpu_readings(),
            settings="data:\n  batch_size: 64\n",
            machine={"PyTorch": "2.11.0", "GPUs": ["H200", "H200"]},
        )
    )
    assert list(page.sections) == SECTIONS
    shown = page.sections
    assert "The model waits 11 % of every step for data." in shown["verdict"] and "good" in shown["verdict"]
    assert re.search(r"compute\s+81.0 %", shown["verdict"]) and re.search(
        r"perfect feed\s+1.13 ×", shown["verdict"]
    )
    assert "The data GPU has little to do." in shown["verdict"]
    assert re.search(r"gather\s+80.5 ms\s+90 ms\s+400 ms\s+30.0 %\s+–\s+4", shown["timeline"])
    assert re.search(r"Throughput\s+512 clips/s", shown["verdict"])
    assert re.search(r"Best validation, step 20\s+2.5", shown["verdict"])
    assert shown["findings"].index("Gathering is slow.") < shown["findings"].index("Nothing was compiled again.")
    for part in ("gather-bound", "The host ring is empty.", "Add threads.", "data.num_workers: 12", "1.1 ×"):
        assert part in shown["findings"]
    assert "GPU 1" in shown["time"] and "Step time" in shown["time"]
    assert re.search(r"host\s+16\s+75 %\s+0 %", shown["rings"]) and "keep" not in shown["rings"]
    assert "Loss" in shown["training"] and "Throughput" in shown["training"]
    assert re.search(r"GPU 1\s+75.0 %\s+4 GB\s+–\s+–\s+61 °C\s+power cap", shown["machine"])
    assert "2.11.0" in shown["machine"] and "batch_size: 64" in shown["settings"]


def test_the_page_loads_nothing_runs_nothing_and_adapts_to_screen_and_light() -> None:
    page = Page(render_report("run", a_run(), spans=a_trace(), readings=gpu_readings(), verdict=VERDICT))
    attributes = {name for _, attrs in page.tags for name in attrs}
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "use", "image"}
    assert not {name for name in attributes if name.startswith("on")} | attributes & {"src", "href", "srcset"}
    assert "url(" not in page.html and "@import" not in page.html and "//" not in page.html
    found = [attrs for tag, attrs in page.tags if tag == "meta"]
    metas = {attrs.get("name") or attrs.get("http-equiv"): attrs.get("content") or "" for attrs in found}
    assert metas["Content-Security-Policy"].startswith("default-src 'none'")
    assert "width=device-width" in metas["viewport"]
    assert "prefers-color-scheme: dark" in page.html


def test_text_from_outside_is_never_markup() -> None:
    evil = "</style></pre>'\"><script>alert(1)</script><img src=x onerror=alert(1)>&lt;"
    finding = {"code": evil, "level": evil, "what": evil, "why": evil, "fix": evil, "setting": evil, "value": evil}
    page = Page(
        render_report(
            evil,
            [
                on_step(1, stage=evil, losses={"total": 1.0, evil: 2.0}, rings={evil: (1, 2)}),
                {"kind": "validation", "stage": evil, "step": 1, "losses": {"total": 1.0}, "is_best": True},
            ],
            spans=[Span(evil, evil, 0, 10, 1), Span("train", evil, 0, 10, 1)],
            counters=[Counter(f"{evil} ring", 1, 1.0)],
            verdict={
                "sentence": evil,
                "grade": evil,
                "shares": {evil: 1},
                "grade_notes": [evil],
                "bound": evil,
                "phases": {evil: {}},
                "findings": [finding],
            },
            readings=[{"at_us": 1, "gpu": evil, "utilisation": 0.5, "throttled_by": [evil]}],
            settings=evil,
            machine={evil: evil},
        )
    )
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert not {name for _, attrs in page.tags for name in attrs if name.startswith("on")}
    assert page.html.count("<style>") == page.html.count("</style>") == 1
    for section in SECTIONS:
        assert "<script>alert(1)</script>" in page.sections[section], section


@pytest.mark.parametrize(
    "left", [{}, {"records": a_run()}, {"spans": a_trace()}, {"readings": gpu_readings()}, {"verdict": VERDICT}]
)
def test_parts_that_are_missing_are_said_to_be_missing(left: dict[str, Any]) -> None:
    page = Page(render_report("run", left.pop("records", []), **left))
    assert list(page.sections) == SECTIONS
    assert all(len(text.split()) > 3 for text in page.sections.values())
    assert "Nothing was recorded." in page.sections["settings"]


def test_a_run_that_has_reported_nothing_says_so() -> None:
    page = Page(render_report("run", []))
    assert "This run has reported nothing yet." in page.sections["verdict"]
    assert "Too little was reported" in page.sections["findings"]
    assert "No trace was taken" in page.sections["timeline"] and "No readings" in page.sections["time"]


def test_files_that_were_cut_off_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.step(REPORT)
    log.close()
    with open(log.path, "a", encoding="utf-8") as file:
        file.write('{"kind": "step", "stage": "gpt", "st')
    spans = [json.dumps({"kind": "span", **span._asdict()}) for span in a_trace()]
    (tmp_path / "trace.jsonl").write_text("\n".join([*spans, '{"kind": "span", "name": 1}', '{"kind": "sp']))
    readings = [json.dumps(reading) for reading in gpu_readings()]
    (tmp_path / "readings.jsonl").write_text("\n".join([*readings, '{"at_us": 3']))
    (tmp_path / "verdict.json").write_text('{"sentence": "half a')
    (tmp_path / "settings.yaml").write_bytes(b"speaker: \xff\xfe\n")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "512 clips/s" in page.sections["verdict"] and "half a" not in page.html
    assert "typical steps" in page.sections["timeline"] and "GPU 1" in page.sections["time"]
    assert "speaker:" in page.sections["settings"]


def test_the_page_is_written_beside_the_run_or_where_it_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").touch()
    assert write_report(tmp_path) == tmp_path / "report.html"
    elsewhere = tmp_path / "pages" / "mine.html"
    assert write_report(tmp_path, elsewhere) == elsewhere and elsewhere.stat().st_size > 1000
    assert [path.name for path in elsewhere.parent.iterdir()] == ["mine.html"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_report(tmp_path / "nowhere")


def test_a_folder_that_is_no_run_gets_no_page(tmp_path: Path) -> None:
    (tmp_path / "training.md").write_text("# Training")
    with pytest.raises(FileNotFoundError, match="no file of one"):
        write_report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["training.md"]


def test_numbers_that_are_not_finite_leave_gaps() -> None:
    losses: list[float | None] = [3.0, 2.9, None, math.nan, 2.8, 2.7, math.inf, 2.6]
    records = [
        on_step(step, losses={"total": loss}, step_ms=None, idle_share=None, clips_per_s=math.nan, elapsed_s=None)
        for step, loss in enumerate(losses)
    ]
    page = Page(render_report("run", [*records, {"kind": "validation", "stage": "gpt", "step": 3, "losses": {}}]))
    assert not re.search(r"\b(nan|inf|None)\b", "".join(page.sections.values()))
    (curve,) = (path for path in page.paths("line") if path.count("M") == 3)
    assert curve.endswith("h0"), "a value between gaps is a dot"
    assert not page.paths("dots")


def test_a_hundred_thousand_reports_make_a_small_page_on_which_outliers_stay() -> None:
    records = [on_step(1)] * 100_000
    records = [{**record, "step": step, "elapsed_s": float(step)} for step, record in enumerate(records)]
    records[70_000] = {**records[70_000], "step_ms": 150.0}
    html = render_report("run", records)
    assert len(html.encode()) < 200_000
    assert "1 beyond the edge, up to 150" in Page(html).sections["time"]
    x, y = thinned(np.arange(100_000.0), np.where(np.arange(100_000) == 70_000, 9.0, 1.0), 500)
    assert len(x) <= 500 and y.max() == 9.0 and (np.diff(x) > 0).all()


def test_validations_are_dots_among_the_losses() -> None:
    assert len(Page(render_report("run", a_run())).paths("dots")) == 1
    assert not Page(render_report("run", a_run()[:-1])).paths("dots")


def test_every_stage_has_curves_of_its_own() -> None:
    records = [*a_run(), *(on_step(step, stage="decoder", losses={"total": 40.0}) for step in (1, 2, 3))]
    shown = Page(render_report("run", records)).sections["training"]
    assert shown.count("Throughput") == 2 and "Stage gpt" in shown and "Stage decoder" in shown


def test_time_goes_on_over_pauses_and_stages() -> None:
    clock = [("dvae", 5.0), ("dvae", 9.0), ("gpt", 4.0), ("gpt", 8.0), ("gpt", 3.0), ("gpt", 6.0)]
    stages = stages_of(on_step(step, stage=stage, elapsed_s=at) for step, (stage, at) in enumerate(clock))
    assert [stage.seconds for stage in stages] == [[5.0, 9.0], [13.0, 17.0, 20.0, 23.0]]


def test_the_timeline_shows_typical_steps_and_the_one_that_stands_out() -> None:
    even, uneven = (Page(render_report("run", [], spans=a_trace(slow))) for slow in (-1, 11))
    assert "4 typical steps" in even.sections["timeline"] and "slowest" not in even.sections["timeline"]
    assert sum(name.startswith("s-train") for name, _ in even.bars()) == 4
    assert "The slowest step (12 of the trace" in uneven.sections["timeline"]
    assert any(name.startswith("s-wait") and "80.00 ms" in tip for name, tip in uneven.bars())


def test_a_trace_without_training_shows_batches() -> None:
    spans = [Span("gather", "gather-0", 1000 * batch, 900, batch) for batch in range(9)]
    page = Page(render_report("run", [], spans=spans))
    assert [name.split()[0] for name, _ in page.bars()] == ["s-gather"] * 4


def test_rings_that_are_often_empty_show_it() -> None:
    records = [on_step(step, rings={"host": (0 if step % 4 else 8, 16)}) for step in range(40)]
    assert re.search(r"host\s+16\s+12 %\s+75 %", Page(render_report("run", records)).sections["rings"])
    counters = [Counter("model ring", number, value) for number, value in enumerate([0.0, 3.0, 3.0, 0.0])]
    shown = Page(render_report("run", [], counters=counters)).sections["rings"]
    assert re.search(r"model\s+at least 3\s+50 %\s+50 %", shown)


def test_without_a_profile_the_warnings_of_the_training_are_the_findings() -> None:
    empty = {"host": (0, 16), "device": (0, 2), "model": (0, 3)}
    starved = [on_step(step, rings=empty, idle_share=0.3) for step in range(20)]
    assert "raise --num-workers" in Page(render_report("run", starved)).sections["findings"]
    assert "Nothing to change was found." in Page(render_report("run", a_run())).sections["findings"]


@pytest.mark.parametrize(
    ("idle_share", "reading"),
    [(0.003, "the data keeps up"), (0.3, "profile tells why"), (None, "profile tells why")],
)
def test_without_a_profile_the_sentence_says_whether_the_data_keeps_up(idle_share: object, reading: str) -> None:
    page = render_report("run", [on_step(step, idle_share=idle_share) for step in range(20)])
    assert reading in page.partition("class=sentence>")[2].partition("</p>")[0]


def test_odd_verdicts_do_not_break_the_page() -> None:
    verdict = {
        "sentence": None,
        "grade": " ",
        "shares": {"compute": None, "wait": -1},
        "findings": ["x", {}, 3],
        "phases": 1,
    }
    assert "512 clips/s" in Page(render_report("run", a_run(), verdict=verdict)).sections["verdict"]


def test_outliers_do_not_press_a_curve_flat() -> None:
    values = 100.0 + np.arange(200.0) % 3
    values[0] = 60_000.0
    chart = line_chart("Step time", "ms", [Curve("gpt", np.arange(200.0), values)], "step", 0)
    assert "1 beyond the edge, up to 60,000" in chart
    assert ">100</span>" in chart and ">20 k</span>" not in chart


def test_ticks_are_round_numbers() -> None:
    assert ticks(0, 100, 5) == [0, 20, 40, 60, 80, 100]
    assert ticks(0.31, 0.72, 4) == pytest.approx([0.4, 0.6])
    assert ticks(17, 20_000, 5) == [5000, 10_000, 15_000, 20_000]


def test_durations_read_naturally() -> None:
    texts = [duration(seconds) for seconds in (42, 750, 18_720, 190_000, None, math.nan)]
    assert texts == ["42 s", "12 min", "5 h 12 min", "2 d 4 h", "–", "–"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
def test_no_screen_is_too_narrow_for_the_page(tmp_path: Path) -> None:
    """In a real browser: frames as wide as a phone, a tablet and a desktop; none of them scrolls sideways."""
    long_words = "a_word_without_any_place_to_break_it_" * 8
    verdict = {**VERDICT, "sentence": long_words}
    page = render_report(long_words, a_run(), spans=a_trace(3), verdict=verdict, readings=gpu_readings(),
                         settings=long_words, machine={"host": long_words})  # fmt: skip
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    (tmp_path / "frames.html").write_text(
        "<body><script>for (const width of [320, 390, 800, 1400]) {"
        "const frame = document.createElement('iframe');"
        "frame.width = width; frame.onload = () => { const page = frame.contentDocument.documentElement;"
        "document.body.append(`[${width}: ${page.scrollWidth <= page.clientWidth}]`); };"
        "frame.src = 'page.html'; document.body.append(frame); }</script></body>"
    )
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
               "--disable-background-networking", "--disable-component-update", "--allow-file-access-from-files",
               f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom"]  # fmt: skip
    command = [*browser, (tmp_path / "frames.html").as_uri()]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert sorted(re.findall(r"\[(\d+: \w+)]", seen)) == ["1400: true", "320: true", "390: true", "800: true"]
