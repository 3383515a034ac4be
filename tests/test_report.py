"""The report page: what it says about a run, about parts of one, and about hostile text; it needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf
from conftest import EMPTY_RINGS, make_voice, step_record, validation_record

from myxtts.observe.findings import Finding
from myxtts.observe.metrics import duration, stages_of
from myxtts.observe.report import Curve, line_chart, render_report, write_report
from myxtts.observe.trace import Span

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
            "gather-bound", "warn", "Gathering is slow.", "The host ring is empty.", "Add threads.",
            setting="data.num_workers", value=12, gain=1.1,
        ),
    ],
}  # fmt: skip
MACHINE = {"PyTorch": "2.11.0", "GPUs": ["H200", "H200"]}
SETTINGS = "data:\n  batch_size: 64\n"
SECTIONS = ["verdict", "training", "findings", "time", "timeline", "rings", "machine", "settings"]


def sections(page: str) -> dict[str, str]:
    """The visible text of each panel."""
    found = re.findall(r'<section id="(\w+)">(.*?)</section>', page, re.DOTALL)
    return {name: " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split()) for name, html in found}


def a_run(steps: int = 20) -> list[dict[str, Any]]:
    reports = [
        step_record(10 * number, losses={"total": 3 - number / steps}, elapsed_s=10.0 * number)
        for number in range(1, steps + 1)
    ]
    return [*reports, validation_record(steps, 2.5)]


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
            "at_us": 100_000 * number, "gpu": gpu, "utilisation": 0.25 + gpu / 2, "power_w": None,
            "memory_used_mb": 2048.0 * (gpu + 1), "temperature_c": 61, "throttled_by": ["power cap"] * gpu,
        }
        for number in range(30)
        for gpu in (0, 1)
    ]  # fmt: skip


def a_page(**parts: Any) -> str:
    everything = {"spans": a_trace(), "verdict": VERDICT, "readings": gpu_readings(), "settings": SETTINGS}
    return render_report("my-voice", a_run(), **{**everything, "machine": MACHINE, **parts})


def test_everything_of_a_run_is_on_its_page_and_the_verdict_comes_first() -> None:
    shown = sections(a_page())
    assert list(shown) == SECTIONS
    for part in (
        "The model waits 11 % of every step for data.", "Grade good The data GPU has little to do.",
        "compute 81.0 %", "With a perfect feed 1.13 ×", "Throughput 512 clips/s", "MFU 47.0 %",
        "Best validation, step 20 2.5", "Bottleneck gather", "Trained for 3 min",
    ):  # fmt: skip
        assert part in shown["verdict"], part
    assert shown["findings"].index("Gathering is slow.") < shown["findings"].index("Nothing was compiled again.")
    for part in ("gather-bound", "The host ring is empty.", "Add threads.", "data.num_workers: 12", "1.1 ×"):
        assert part in shown["findings"]
    assert all(part in shown["time"] for part in ("GPU 1 75", "Step time ms, of every step gpt 107", "MFU"))
    assert "gather 80.5 ms 90 ms 400 ms 30.0 % – 4" in shown["timeline"]
    assert "host 16 50 % 0 %" in shown["rings"] and "keep" not in shown["rings"]
    assert "Loss total training 2 validation 2.5" in shown["training"] and "Throughput" in shown["training"]
    assert "GPU 1 75.0 % 4 GB – – 61 °C power cap" in shown["machine"]
    assert "2.11.0" in shown["machine"] and "batch_size: 64" in shown["settings"]


def script_of(page: str) -> str:
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    return str(script)


def test_the_page_loads_nothing_runs_only_its_own_script_and_adapts_to_screen_and_light() -> None:
    page = a_page()
    assert page.startswith("<!DOCTYPE html>") and page.endswith("</html>\n")
    assert not re.search(r"<(link|img|iframe|object|use|image)\b|\s(on\w+|src|href|srcset)=", page)
    assert not re.search(r"url\(|@import|//|innerHTML|fetch|eval", page)
    digest = base64.b64encode(hashlib.sha256(script_of(page).encode()).digest()).decode()
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
    allowed += "media-src data:; img-src data:"
    assert f'content="{allowed}"' in page
    assert page.count("<table") == page.count('<div class="scroll"><table'), "wide tables scroll on a phone"
    assert "width=device-width" in page and "prefers-color-scheme: dark" in page and "max-width: 640px" in page


def test_text_from_outside_is_never_markup() -> None:
    evil = "</style></pre>'\"><script>alert(1)</script><img src=x onerror=alert(1)>&lt;"
    finding = dict.fromkeys(("code", "level", "what", "why", "fix", "setting", "value"), evil)
    verdict = {"shares": {evil: 1}, "grade_notes": [evil], "phases": {evil: {}}, "findings": [finding]}
    reports = [
        step_record(1, stage=evil, losses={"total": 1.0, evil: 2.0}, rings={evil: (1, 2)}),
        {**validation_record(1, 1.0), "stage": evil},
    ]
    page = render_report(
        evil,
        reports,
        spans=[Span(evil, evil, 0, 10, 1), Span("train", evil, 0, 10, 1)],
        verdict=verdict | dict.fromkeys(("sentence", "grade", "bound"), evil),
        readings=[{"at_us": 1, "gpu": evil, "utilisation": 0.5, "throttled_by": [evil]}],
        settings=evil,
        machine={evil: evil},
    )
    assert evil not in page and page.count("<script") == page.count("</script") == 1 and "<img" not in page
    assert script_of(page) == script_of(render_report("run", [])), "the script holds nothing of the run"
    assert page.count("<style>") == page.count("</style>") == 1
    shown = re.findall(r'<section id="(\w+)">(.*?)</section>', page, re.DOTALL)
    assert [name for name, html in shown if "&lt;script&gt;" in html] == SECTIONS


def test_panels_without_data_are_left_out() -> None:
    parts = {"spans": a_trace(), "readings": gpu_readings(), "verdict": VERDICT, "settings": SETTINGS}
    panels = {"spans": "timeline", "readings": "time machine", "verdict": "findings timeline"}
    for name, part in parts.items():
        expected = ["verdict", *panels.get(name, name).split()]
        assert list(sections(render_report("run", [], **{name: part}))) == expected
    assert list(sections(render_report("run", a_run()))) == ["verdict", "training", "findings", "time", "rings"]


def test_files_that_were_cut_off_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step_record()) + '\n{"kind": "step", "stage": "gpt", "st')
    spans = [json.dumps({"kind": "span", **span._asdict()}) for span in a_trace()]
    (tmp_path / "trace.jsonl").write_text("\n".join([*spans, '{"kind": "span", "name": 1}', "3", '{"kind": "sp']))
    readings = [json.dumps(reading) for reading in gpu_readings()]
    (tmp_path / "readings.jsonl").write_text("\n".join([*readings, '{"at_us": 3']))
    (tmp_path / "verdict.json").write_text('{"sentence": "half a')
    (tmp_path / "settings.yaml").write_bytes(b"speaker: \xff\xfe\n")
    shown = sections(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "512 clips/s" in shown["verdict"] and "half a" not in str(shown)
    assert "typical steps" in shown["timeline"] and "GPU 1" in shown["time"]
    assert "speaker:" in shown["settings"]


def test_the_page_is_written_beside_a_run_or_where_it_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="contains no run"):
        write_report(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such folder; give the --checkpoint-dir of a run"):
        write_report(tmp_path / "nowhere")
    assert not list(tmp_path.iterdir())
    (tmp_path / "settings.yaml").touch()
    assert write_report(tmp_path) == tmp_path / "report.html"
    elsewhere = tmp_path / "pages" / "mine.html"
    assert write_report(tmp_path, elsewhere) == elsewhere and elsewhere.stat().st_size > 1000
    assert [path.name for path in elsewhere.parent.iterdir()] == ["mine.html"]


def test_numbers_that_are_not_finite_leave_gaps() -> None:
    losses: list[float | None] = [3.0, 2.9, None, math.nan, 2.8, 2.7, math.inf, 2.6]
    unknown = dict.fromkeys(("idle_share", "elapsed_s", "mfu", "times_ms")) | {"clips_per_s": math.nan}
    records = [step_record(step, losses={"total": loss}, **unknown) for step, loss in enumerate(losses)]
    page = render_report("run", [*records, {"kind": "validation", "stage": "gpt", "step": 3, "losses": {}}])
    assert not re.search(r"\b(nan|inf|None)\b", str(sections(page).values()))
    training = page.partition('id="training"')[2].partition("</section>")[0]
    (path,) = re.findall(r'<path class="line c1" d="([^"]*)"', training)
    assert path.count("M") == 3 and path.endswith("h0"), "a value between gaps is a dot"


def test_the_page_of_a_long_run_is_small() -> None:
    """The page of 6,000 reports is as large as that of any longer run: curves are as long as they are wide."""
    record = step_record(1)
    reports = [{**record, "step": step, "elapsed_s": float(step)} for step in range(6_000)]
    small, large = (len(render_report("run", reports[:count]).encode()) for count in (3_000, 6_000))
    assert large < 1.2 * small < 200_000


def test_a_long_curve_is_drawn_with_its_course_and_outliers_do_not_flatten_it() -> None:
    values = 100.0 + np.arange(200.0) % 3
    values[0] = 60_000.0
    curve = Curve("gpt", np.arange(200.0), values)
    chart = line_chart("Step time", "ms", [curve], "step", 0)
    assert chart is not None and chart["outside"] == "1 beyond the edge, up to 60,000"
    assert [look for look, _ in chart["curves"][0]["paths"]] == ["line faint", "line"]
    labels = [label for _, label in chart["y_ticks"]]
    assert labels == ["0", "50", "100"] and "M" in chart["curves"][0]["paths"][1][1]
    assert line_chart("Step time", "ms", [curve._replace(y=np.full(200, math.nan))], "step") is None


@pytest.mark.parametrize(
    ("low", "high", "labels"), [(0.31, 0.72, "0.4 0.5 0.6 0.7"), (100, 20_000, "0 5_k 10_k 15_k 20_k")]
)
def test_axes_are_labelled_with_round_numbers(low: float, high: float, labels: str) -> None:
    ends = np.array([low, high])
    chart = line_chart("", "", [Curve("", ends, ends)], "")
    assert chart is not None and [label.replace(" ", "_") for _, label in chart["x_ticks"]] == labels.split()


def test_every_stage_has_curves_of_its_own_and_validations_are_dots() -> None:
    rings = [{"host": (0 if step % 4 else 8, 16)} for step in range(40)]
    decoder = (step_record(step, stage="decoder", rings=ring) for step, ring in enumerate(rings))
    page = render_report("run", [*a_run(), *decoder])
    shown = sections(page)
    assert shown["training"].count("Throughput") == 2
    assert "Stage gpt" in shown["training"] and "Stage decoder" in shown["training"]
    assert page.count('<path class="dots') == 1
    assert "host 16 12 % 75 %" in shown["rings"], "of the last stage"


def test_time_goes_on_over_pauses_and_stages() -> None:
    clock = [("dvae", 5.0), ("dvae", 9.0), ("gpt", 4.0), ("gpt", 8.0), ("gpt", 3.0), ("gpt", 6.0)]
    stages = stages_of(step_record(step, stage=stage, elapsed_s=at) for step, (stage, at) in enumerate(clock))
    assert [stage.seconds for stage in stages] == [[5.0, 9.0], [13.0, 17.0, 20.0, 23.0]]


def test_the_timeline_shows_typical_steps_and_the_one_that_stands_out() -> None:
    even, uneven = (render_report("run", [], spans=a_trace(slow)) for slow in (-1, 11))
    assert "4 typical steps" in sections(even)["timeline"] and "slowest" not in sections(even)["timeline"]
    assert even.count('title="train, batch') == 4
    assert "The slowest step (12 of the trace" in sections(uneven)["timeline"]
    assert 'title="wait, batch 11: 80.00 ms"' in uneven


def test_without_a_profile_the_reports_say_whether_the_data_keeps_up() -> None:
    assert "This run has reported nothing yet." in sections(render_report("run", []))["verdict"]
    assert "findings" not in sections(render_report("run", [step_record()])), "too few reports to find anything"
    for idle_share, verdict, finding in (
        (0.003, "the data keeps up", "Nothing to change was found."),
        (0.3, "Run myxtts profile", "raise --num-workers"),
        (None, "Run myxtts profile", ""),
    ):
        reports = [step_record(step, rings=EMPTY_RINGS, idle_share=idle_share) for step in range(20)]
        shown = sections(render_report("run", reports))
        assert verdict in shown["verdict"] and finding in shown["findings"]


def test_a_stage_whose_validation_worsens_while_its_loss_falls_overfits() -> None:
    reports = [step_record(step, losses={"total": 3 - step / 100}) for step in range(0, 200, 5)]
    validations = [validation_record(40 * number, loss) for number, loss in enumerate((3.0, 2.5, 2.6, 2.7, 2.9))]
    for verdict in (None, VERDICT):
        shown = sections(render_report("run", [*reports, *validations], verdict=verdict))["findings"]
        assert "Stage gpt overfits: its validation loss was 2.5 at step 40 and is 2.9 now" in shown
    rising = [step_record(step, losses={"total": 3 + step / 100}) for step in range(0, 200, 5)]
    for records in ([*reports, *validations[:4]], [*rising, *validations]):
        assert "overfits" not in sections(render_report("run", records))["findings"]


def test_odd_verdicts_and_scores_do_not_break_the_page() -> None:
    for scores in ({}, {"summary": []}, {"summary": {"a": 3}}):
        assert "evaluation" not in sections(a_page(scores=scores))
    scores = {"summary": {"a": {"wer": "x"}}, "clips": [3, {}], "about": 1}
    assert "evaluation" in sections(a_page(scores=scores))
    shares = {"compute": None, "wait": -1}
    odd = {"sentence": None, "grade": " ", "shares": shares, "findings": ["x", {}, 3], "phases": 1}
    shown = sections(a_page(verdict=odd))
    assert "512 clips/s" in shown["verdict"] and "Grade" not in shown["verdict"]
    assert "Nothing to change was found." in shown["findings"]


def test_durations_read_naturally() -> None:
    texts = [duration(seconds) for seconds in (42, 750, 18_720, 190_000, None, math.nan)]
    assert texts == ["42 s", "12 min", "5 h 12 min", "2 d 4 h", "–", "–"]


def test_what_a_run_and_its_evaluation_said_can_be_heard_on_the_page(tmp_path: Path) -> None:
    clips = []
    for name in ("recording", "synthesised"):
        (tmp_path / "evaluation" / name).mkdir(parents=True)
        sf.write(tmp_path / "evaluation" / name / "a.wav", make_voice(1.0), 24000)
        clips.append({"set": name, "clip": "a", "text": "Hello <b>.", "wer": 0.5, "file": f"{name}/a.wav"})
    sf.write(tmp_path / "sample.wav", make_voice(30.0), 24000)
    sf.write(tmp_path.parent / "secret.wav", make_voice(1.0), 24000)
    clips.append({**clips[1], "clip": "b", "file": "../../secret.wav"})
    clips.append({**clips[1], "clip": "c", "file": "scores.json"})
    scores = {"summary": {"synthesised": {"wer": 0.5}}, "clips": clips}
    (tmp_path / "evaluation" / "scores.json").write_text(json.dumps(scores))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert list(sections(page))[:2] == ["listen", "verdict"], "sound comes first"
    assert sections(page)["listen"] == "Listen Sample Hello <b>. recording synthesised"
    sounds = [base64.b64decode(found) for found in re.findall(r'src="data:audio/mpeg;base64,([^"]+)"', page)]
    assert len(sounds) == 4, "the sample, the pair, and the worst understood; nothing from outside the run"
    assert sf.info(io.BytesIO(sounds[0])).duration == pytest.approx(20, abs=0.2) and len(page) < 600_000


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript here")
def test_a_chart_shows_the_values_under_the_pointer() -> None:
    curves = [
        Curve("a", np.array([0.0, 10.0]), np.array([1.0, 3.0])),
        Curve("b", np.array([5.0]), np.array([2.0])),
    ]
    chart = line_chart("Loss", "total", curves, "step", 0, 4)
    assert chart is not None
    paths = [{"label": curve["label"], "d": curve["paths"][0][1]} for curve in chart["curves"]]
    stub = f"""
        const paths = {json.dumps(paths)}, heard = {{}}, tip = {{style: {{}}}};
        const area = {{dataset: {{ends: {json.dumps(chart["ends"])}, x: "step"}}, appendChild: () => tip,
          querySelectorAll: () => paths.map(one => ({{dataset: {{label: one.label}}, getAttribute: () => one.d}})),
          getBoundingClientRect: () => ({{left: 100, width: 200}}),
          addEventListener: (name, act) => {{ heard[name] = act; }}}};
        const document = {{querySelectorAll: () => [area], createElement: () => tip}};
        {script_of(a_page())}
        heard.pointermove({{clientX: 290}});
        console.log(tip.textContent.split("\\n").join("|"), tip.style.left, tip.hidden);
        heard.pointerleave();
        console.log(tip.hidden);
    """
    shown = subprocess.run(["node", "-e", stub], capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown.split("\n")[:2] == ["step 10|a 3|b 2 100% false", "true"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
def test_no_screen_is_too_narrow_for_the_page(tmp_path: Path) -> None:
    """In a real browser: frames as wide as a phone, a tablet and a desktop; none of them scrolls sideways."""
    long_words = "a_word_without_any_place_to_break_it_" * 8
    verdict = {**VERDICT, "sentence": long_words}
    page = a_page(spans=a_trace(3), verdict=verdict, settings=long_words, machine={"host": long_words})
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    (tmp_path / "frames.html").write_text(
        "<body><script>for (const width of [320, 800, 1400]) {"
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
    assert sorted(re.findall(r"\[(\d+: \w+)]", seen)) == ["1400: true", "320: true", "800: true"]
