"""The rules of trust: what the program says of itself and of this machine is so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import load_command, load_values
from training_fixtures import FLAGS, Clips, clips, small

from myxtts.config import OPTIMIZATION_LEVELS, PRESETS
from myxtts.data.prepare import EMBEDDED_CORPUS
from myxtts.devices import Gpu, Machine
from myxtts.observe.findings import RULES, WAIT_RULES
from myxtts.run import prepare_corpus
from myxtts.settings import (
    apply_demo,
    apply_patch,
    apply_presets,
    descriptions,
    format_setting,
    load,
    value_of,
)
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
    said = re.findall(r": ([a-z_.]+) (?:=|stays) (\[.*\]|\S+)", "\n".join([*lines, *more]))
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
    for bundle in (
        {},
        *({"preset": name} for name in PRESETS),
        *({"optimization_level": x} for x in OPTIMIZATION_LEVELS),
    ):
        loaded, _ = apply_presets(load_values(train_data=str(EMBEDDED_CORPUS), **bundle))
        failed = [found for found in check(loaded, machine, HOST) if found.level == "fail"]
        own_wish = "compilation" if bundle.get("optimization_level") == "basic" else None
        assert [found.code for found in failed if found.code != own_wish] == [], (memory_mb, bundle)
