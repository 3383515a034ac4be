"""What users can rely on: what they write holds, and text from files does nothing to their terminal."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import REPORT, load_command, step_record
from training_fixtures import Clips, clips, small, stop_at, train

from myxtts.cli import main
from myxtts.errors import printable
from myxtts.observe.findings import Finding
from myxtts.observe.metrics import read_metrics, stages_of
from myxtts.reports import TrainingReports
from myxtts.settings import apply_demo, apply_presets, format_setting, specs, value_of
from myxtts.terminal import ProgressPrinter, Screen, View, render, show_findings, show_lines

__all__ = ["clips", "small"]

pytestmark = pytest.mark.usefixtures("empty_working_folder")


@pytest.mark.parametrize("key", list(specs()))
def test_what_is_written_in_the_file_holds_even_where_it_repeats_the_default(key: str) -> None:
    section, name = key.split(".")
    default = specs()[key].default
    written = json.loads(json.dumps(default, default=str))
    others = {"training.preset": "8gb", "training.optimization_level": "basic", "training.init_from": "weights"}
    flags = " ".join(f"{specs()[other].flags[0]} {value}" for other, value in others.items() if other != key)
    loaded = load_command(flags, json.dumps({section: {name: written}}))
    for filled in (apply_presets(loaded)[0], apply_demo(apply_presets(loaded)[0])[0]):
        assert value_of(filled.settings, key) == default, format_setting(key, default)
        assert filled.origin[key] == "file"


HOSTILE = "ann\x1b[31m\x1b]0;title\x07 \u202egnp.exe\u2066 \x9b2J\x00\udcff"
NEUTRAL = "ann[31m]0;title gnp.exe 2J?"


def test_text_from_files_cannot_change_or_mislead_the_terminal(
    capsys: pytest.CaptureFixture[str], corpus: Path
) -> None:
    assert printable(HOSTILE) == NEUTRAL and printable("سلام\u200cها\n\tو") == "سلام\u200cها\n\tو"
    show_lines([HOSTILE])
    show_findings([Finding("corpus", "warn", HOSTILE, HOSTILE, HOSTILE)])
    ProgressPrinter().report(replace(REPORT, losses={"total": 1.0, HOSTILE[:4]: 2.0}))
    assert capsys.readouterr().out.count("ann") == 5
    screen = io.StringIO()
    terminal = Screen(file=screen, force_terminal=True, width=200)
    terminal.print(render([step_record(stage=HOSTILE)], (), View(200, title=HOSTILE)))
    assert screen.getvalue().count(NEUTRAL) == 2, "the styles of the view stay, and nothing else"
    assert "\u202e" not in screen.getvalue() and "\x1b]" not in screen.getvalue()
    (corpus / "metadata.csv").write_text(f"clip000|A\x1b[2J text.|{HOSTILE[:9]}\nab\x1b[5msent|Text.\n", "utf-8")
    assert main(["prepare", "--train-data", str(corpus), "--language", "en"]) == 0
    assert main(["speak", "Hi.", "--language", "en", "--speaker", "a.wav", "--model", "no\x1b[2Jwhere"]) == 2
    shown = capsys.readouterr()
    assert not re.search("[\x1b\x07\x9b\u202e]", shown.out + shown.err)


@pytest.mark.usefixtures("small")
def test_the_time_of_every_step_is_kept_and_pictures_end_with_their_clip(
    clips: Clips, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: dict[str, int] = {}
    show = lambda _, name, image, __: widths.update({name: image.shape[-1]})  # noqa: E731
    monkeypatch.setattr(TrainingReports, "picture", show)
    run, flags = tmp_path / "run", f"--stages dvae --max-steps 8 --log-step 3 --val-data {clips(3)}"
    with monkeypatch.context() as patched:
        stop_at(patched, 5)
        assert train(run, clips(), flags) == 0
    assert train(run, clips(), flags) == 0
    reports = read_metrics(run / "metrics.jsonl")
    steps = [record for record in reports if record["kind"] == "step"]
    timed = [(record["timed_from"], len(record["times_ms"])) for record in steps]
    assert [record["step"] for record in steps] == [3, 5, 6, 8]
    assert timed == [(1, 3), (4, 2), (6, 1), (7, 2)], "each step once, also of a run that was stopped"
    ends_s, times_ms = stages_of(reports)[0].step_times()
    assert (times_ms > 0).all() and (np.diff(ends_s) > 0).all() and len(times_ms) == 8
    assert widths["dvae/mel"] == widths["dvae/reconstruction"] < 110, "1.2 seconds, in a batch of 128 frames"


def test_a_terminal_wraps_lines_between_words_and_leaves_commands_in_one_piece(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    command = f"  myxtts speak {'words ' * 20}"
    show_lines(["settings " * 30, command])
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == command and len(lines) == 5 and max(map(len, lines)) <= 60
    assert set(" ".join(lines).split()) == {"settings"}
