"""The rules of trust: what the program says of itself and of this machine is so."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import REPORT, load_command, load_values, step_record
from training_fixtures import FLAGS, Clips, clips, small, stop_at, train

from myxtts.cli import main
from myxtts.config import OPTIMIZATION_LEVELS, PRESETS, TrainingSettings, preset_for, warmup_steps
from myxtts.data.clips import PreparedCorpus, set_aside_list
from myxtts.data.prepare import EMBEDDED_CORPUS
from myxtts.devices import Gpu, Machine
from myxtts.errors import ConfigError, printable
from myxtts.observe.findings import RULES, WAIT_RULES, Finding
from myxtts.observe.metrics import read_metrics, stages_of
from myxtts.reports import TrainingReports
from myxtts.run import prepare_corpus
from myxtts.settings import (
    apply_demo,
    apply_patch,
    apply_presets,
    descriptions,
    format_setting,
    load,
    specs,
    value_of,
)
from myxtts.terminal import ProgressPrinter, Screen, View, render, show_findings, show_lines
from myxtts.tools.check import CHECKS, CheckContext, Host, check
from myxtts.tools.dry_run import DryRun
from myxtts.tools.tune import known_faults

__all__ = ["clips", "small"]

PACKAGE = Path(__file__).resolve().parents[1] / "myxtts"
HOST = Host(16, 64 * 2**30, "550.54", lambda _: 500 * 10**9)

# What is announced is what is done


@pytest.mark.parametrize("flags", [{"preset": name} for name in PRESETS] + [{"optimization_level": "basic"}, {}])
def test_every_value_that_a_bundle_announces_is_used(flags: dict[str, object]) -> None:
    loaded, lines = apply_presets(load_values(**flags))
    loaded, more = apply_demo(loaded)
    said = re.findall(r": ([a-z_.]+) (?:=|stays) (\[.*\]|\S+)", "\n".join(lines))
    keys = {spec.name: key for key, spec in specs().items()}
    demo = re.findall(r"[:,] ([a-z_]+) (\[.*?\]|\w+)", more[1] if more else "")
    said += [(keys[name], value) for name, value in demo]
    assert len(said) >= 6
    for key, value in said:
        assert format_setting(key, value_of(loaded.settings, key)) == value
    assert {key for key, origin in loaded.origin.items() if origin == "preset"} <= {key for key, _ in said}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("flags", ["", "--prefetch-buffer-size 5 --buffer-size 9"])
def test_the_buffers_that_check_announces_are_built(clips: Clips, flags: str) -> None:
    loaded = load_command(f"--train-data {clips(4)} {FLAGS} {flags}")
    announced = CHECKS["buffers"](CheckContext(loaded, Machine(), Host.look())).what
    on_host, on_device = map(int, re.findall(r"(\d+) (?:batches|on)", announced))
    with DryRun(loaded.settings, prepare_corpus(loaded.settings)).feed() as feed:
        depths = {name: depth for name, (_, depth) in feed.readiness().items()}
    assert (depths["host"], depths["model"]) == (on_host, on_device)


def test_what_tune_announces_mends_what_check_finds(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("data: {native_loading: no, prefetch_to_gpu: no}\ntraining: {enable_eager_debug: yes}\n")
    machine = Machine([Gpu(0, "Card", 24210)])
    loaded = load(path, {})
    faults = known_faults(loaded, machine)
    assert {fault.code for fault in check(loaded, machine, HOST) if fault.level == "fail"} == {
        fault.code for fault in faults
    }
    apply_patch(loaded, {fault.setting: fault.value for fault in faults})
    mended = load(path, {})
    assert known_faults(mended, machine) == []
    assert not [found for found in check(mended, machine, HOST) if found.level == "fail"]


# A number on the screen was measured on this machine, or says where

SPEEDUP = re.compile(r"\d(?:\.\d+)?\s?(?:×|x as |times )|\d\s?% (?:faster|slower)")
TIME = re.compile(r"\d(?:\.\d+)?\s?(?:ms|s|GB/s|clips/s)\b")


def shown_texts() -> Iterator[tuple[str, str]]:
    """Every text in the package that is not a docstring, with its place."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        quiet = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in quiet:
                yield f"{path.name}:{node.lineno}", node.value


def test_no_message_promises_a_speedup_measured_elsewhere() -> None:
    texts = [*shown_texts(), *descriptions().items()]
    assert len(texts) > 2000
    assert not [(place, text) for place, text in texts if SPEEDUP.search(text)]


def test_rules_hold_no_number_but_those_of_the_machine_they_look_at() -> None:
    texts = [text for rule in RULES for text in (rule.what, rule.why, rule.fix)]
    texts += [rule.why for rule in WAIT_RULES]
    assert not [text for text in texts if SPEEDUP.search(text) or TIME.search(text)]
    assert not [text for text in texts if "compiled again" in text]


# A default never refuses the card it runs on


@pytest.mark.parametrize("memory_mb", [7972, 11910, 16080, 24210, 40370, 48590, 81150])
def test_no_default_and_no_preset_is_refused_on_a_card_of_8_to_80_gb(memory_mb: int) -> None:
    machine = Machine([Gpu(0, "Card", memory_mb)])
    bundles: list[dict[str, object]] = [{}, *({"preset": name} for name in PRESETS)]
    bundles += [{"optimization_level": name} for name in OPTIMIZATION_LEVELS]
    isolated = {"enable_memory_isolation": True}
    bundles += [isolated, isolated | {"preset": preset_for(memory_mb)}]
    for bundle in bundles:
        loaded, _ = apply_presets(load_values(train_data=str(EMBEDDED_CORPUS), **bundle))
        failed = [found for found in check(loaded, machine, HOST) if found.level == "fail"]
        own_wish = "compilation" if bundle.get("optimization_level") == "basic" else None
        assert [found.code for found in failed if found.code != own_wish] == [], (memory_mb, bundle)


# What is written in YAML holds, and text from files does nothing to a terminal


@pytest.mark.usefixtures("empty_working_folder")
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
NEUTRAL = r"ann\x1b[31m\x1b]0;title\x07 \u202egnp.exe\u2066 \x9b2J\x00\udcff"


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
    assert screen.getvalue().count(NEUTRAL.replace(r"\x07", "")) == 2, (
        "the styles of the view stay, and nothing else"
    )
    assert "\u202e" not in screen.getvalue() and "\x1b]" not in screen.getvalue()
    (corpus / "metadata.csv").write_text(f"clip000|A\x1b[2J text.|{HOSTILE[:9]}\nab\x1b[5msent|Text.\n", "utf-8")
    assert main(["prepare", "--train-data", str(corpus), "--language", "en"]) == 0
    assert main(["speak", "Hi.", "--language", "en", "--speaker", "a.wav", "--model", "no\x1b[2Jwhere"]) == 2
    shown = capsys.readouterr()
    assert not re.search("[\x1b\x07\x9b\u202e]", shown.out + shown.err)


def test_the_warm_up_suits_small_corpora_and_is_that_of_the_whole_run_in_a_trial() -> None:
    short, trial = TrainingSettings(epochs=500), TrainingSettings(epochs=500, max_steps=100, decoder_steps=2)
    assert [warmup_steps(short, count, 16) for count in (11, 160, 13_000)] == [34, 500, 500]
    assert warmup_steps(trial, 11, 16) == 34 and warmup_steps(replace(short, warmup_steps=700), 11, 16) == 700
    split = replace(short, gradient_accumulation_steps=4)
    assert warmup_steps(split, 13, 4) == warmup_steps(short, 13, 16), "however the clips of a step are divided"


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
    assert [record["step"] for record in steps] == [3, 5, 6, 8]
    assert [len(record["times_ms"]) for record in steps] == [3, 2, 1, 2], "each once, also of a stopped run"
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


# Nothing executes what a file says, and nothing is dropped without a reason that can be found

SHADOWED = ("random", "torch", "numpy", "json", "ruamel", "soundfile", "rich", "tokenizers", "multiprocessing")
ALIASES = "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefg", "bcdefgh", strict=True)
)


def test_modules_of_the_working_folder_are_not_executed(corpus: Path, tmp_path: Path) -> None:
    """Python itself starts worker processes so that they import from the working folder first."""
    folder, mark, script = tmp_path / "downloaded", tmp_path / "executed", tmp_path / "bin" / "myxtts"
    for path in (*(folder / f"{name}.py" for name in SHADOWED), folder / "myxtts" / "__init__.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(mark)!r}, 'a').write(__file__)\n")
    script.parent.mkdir()
    script.write_text("import sys\nfrom myxtts.cli import main\nsys.exit(main())\n")  # as pip installs it
    command = [sys.executable, script, "prepare", "--train-data", corpus, "--language", "en", "--num-workers", "2"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert not mark.exists(), mark.read_text()
    assert result.returncode == 0 and "training clips" in result.stdout, result.stderr


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/new:os.system [touch executed]",
        "a: &a [x,x,x,x,x,x,x,x,x]\n" + ALIASES,
        "data:\n  language: &a [*a]",
        "{a: " * 20_000,
        "- " * 40_000,
        "*" * 90_000,
    ],
    ids=["tag", "aliases", "recursion", "flow", "block", "long name"],
)
@pytest.mark.usefixtures("empty_working_folder")
def test_a_settings_file_is_only_text(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_command(text=text)
    assert len(str(refused.value)) < 2000
    assert not Path("executed").exists()


def test_every_row_is_used_or_listed_with_its_reason(
    make_corpus: Callable[..., Path], run_prepare: Callable[..., PreparedCorpus]
) -> None:
    folder = make_corpus()
    (folder / "wavs" / "clip001.wav").write_bytes(b"")
    (folder / "wavs" / "clip002.wav").write_text("no audio")
    with open(folder / "metadata.csv", "a", encoding="utf-8") as metadata:
        metadata.write(
            "absent|There is no such file.\nclip003|A second text.\nclip004\n|\n../../etc/passwd|Out.\n"
        )
    prepared = run_prepare(folder)
    with open(set_aside_list(prepared.root), encoding="utf-8", newline="") as file:
        listed = list(csv.DictReader(file, delimiter="|"))
    assert len(prepared.train) + len(prepared.val) + len(listed) == 11
    assert all(row["reason"] and row["where"] for row in listed)
