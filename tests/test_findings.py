"""The table of performance rules: every row is sound, documented, and holds where it should."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import load_values

from myxtts.config import Settings, stage_steps, stages_of
from myxtts.observe import findings
from myxtts.observe.breakdown import Breakdown, ProfileData
from myxtts.observe.findings import RULES, SWITCHES, WAIT_RULES, Fix, Situation, Wait, hints, wait_rule
from myxtts.observe.trace import Span
from myxtts.settings import apply_presets, load, specs

ROOT = Path(__file__).parent.parent
SOURCES = [ROOT / "myxtts/observe/findings.py", ROOT / "myxtts/observe/diagnosis.py"]
SOURCES += [ROOT / f"myxtts/tools/{name}.py" for name in ("check", "profile", "tune")]


pytestmark = pytest.mark.usefixtures("empty_working_folder")


def settings(**given: object) -> Settings:
    """Settings of a training on data of the user's own, with their preset."""
    return apply_presets(load_values(**{"train_data": "DIR"} | given))[0].settings


def situation(given: dict[str, object], **facts: Any) -> Situation:
    """These settings on a good machine with a corpus of ten hours, or with other facts."""
    known: dict[str, Any] = {"num_gpus": 1, "gpu_memory_mb": 24210, "num_clips": 6000, "cores": 32}
    known |= {"num_val_clips": 100, "speech_hours": 10.0}
    known |= facts | ({"gpu_memory_mb": 0} if facts.get("num_gpus") == 0 else {})
    return Situation(settings=settings(**given), **known)


# The table


def test_every_setting_is_known_and_every_fixed_value_is_legal() -> None:
    for rule in RULES:
        assert not rule.setting or rule.setting in specs()
        if rule.value is not None and not callable(rule.value):
            assert load(None, {rule.setting: rule.value}).settings is not None
    fixes = [fix for fix in vars(findings).values() if isinstance(fix, Fix)]
    fixes += [fix for rule in WAIT_RULES for fix in rule.fixes if isinstance(fix, Fix)]
    assert len(fixes) > 6 and all(fix.text and (not fix.setting or fix.setting in specs()) for fix in fixes)
    assert all(fix in SWITCHES for rule in WAIT_RULES for fix in rule.fixes if isinstance(fix, str))


def test_no_sentence_stands_in_the_table_twice() -> None:
    texts = [text for rule in RULES for text in (rule.what, rule.why, rule.fix) if text]
    texts += [rule.why for rule in WAIT_RULES] + [
        fix.text for fix in vars(findings).values() if isinstance(fix, Fix)
    ]
    assert len(texts) == len(set(texts))
    switches = [rule.setting for rule in RULES if rule.when is None]
    assert len(switches) == len(set(switches)) == len(SWITCHES) >= 9


def test_rules_render_in_any_situation_in_which_they_hold() -> None:
    poor = {rule.setting.split(".")[1]: str(not rule.value).lower() for rule in SWITCHES.values()}
    poor |= {"num_workers": "1", "prefetch_buffer_size": "1", "batch_size": "2"}
    poor |= {"early_stop": "3", "max_steps": "100", "lora_rank": "4"}
    s = situation(poor, num_gpus=2, gpu_memory_mb=8000, num_clips=1, num_val_clips=0, speech_hours=0.1)
    found = [rule.finding(s) for rule in RULES if rule.holds(s)]
    assert {finding.setting for finding in found} >= SWITCHES.keys() | {"data.num_workers", "data.batch_size"}
    assert not any("{" in f"{finding.what}{finding.why}{finding.fix}" for finding in found)


def codes_in_use() -> set[str]:
    """Codes given to a finding or a rule, as written in the source."""
    found = {rule.code for rule in (*RULES, *WAIT_RULES)}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args:
                name, first = ast.unparse(node.func), node.args[1 if ast.unparse(node.func) == "_room" else 0]
                if name in ("Finding", "_found", "by_rule", "_room") and isinstance(first, ast.Constant):
                    found.add(first.value)
    return found | {"precision-off", "graph-off"}  # given by a variable


def test_every_code_stands_in_the_documentation_exactly_once() -> None:
    lines = (ROOT / "docs/profiling.md").read_text(encoding="utf-8").splitlines()
    cells = [line.split("|")[1] for line in lines if line.startswith("| `")]
    assert sorted(re.findall("`([a-z-]+)`", " ".join(cells))) == sorted(codes_in_use())
    assert len(lines) <= 200


# Facts that rules share with the training


@pytest.mark.parametrize(
    ("given", "stage", "expected"),
    [
        ({}, "gpt", (7, "--epochs")),
        ({"max_steps": "5"}, "gpt", (5, "--max-steps")),
        ({"max_steps": "7"}, "dvae", (7, "--max-steps")),
        ({"max_steps": "5", "dvae_steps": "3"}, "dvae", (3, "--dvae-steps")),
        ({"max_steps": "5", "decoder_steps": "6"}, "decoder", (6, "--decoder-steps")),
        ({"dvae_steps": "99"}, "dvae", (7, "--epochs")),
    ],
)
def test_the_steps_of_a_stage_end_with_its_epochs_or_its_limit(
    given: dict[str, object], stage: str, expected: tuple[int, str]
) -> None:
    training = settings(epochs="2", **given).training
    assert stage_steps(training, stage, num_clips=50, batch_size=16, step_batches=1)[0] <= 8
    assert stage_steps(training, stage, num_clips=100, batch_size=16, step_batches=2) == expected


def test_a_start_from_weights_trains_only_one_stage_unless_others_are_named() -> None:
    assert stages_of(settings()) == ("dvae", "gpt", "decoder")
    assert stages_of(settings(init_from="DIR")) == ("gpt",)
    assert stages_of(settings(init_from="DIR", size="base")) == ("decoder",), "its flow takes on the voice"
    assert stages_of(settings(init_from="DIR", size="base", tokenizer="F")) == ("gpt", "decoder")
    assert stages_of(settings(init_from="DIR", stages="dvae,gpt")) == ("dvae", "gpt")


# Hints


UNSUITABLE: list[tuple[dict[str, object], dict[str, Any], str, Any, str]] = [
    ({"batch_size": "24"}, {"num_clips": 9}, "data.batch_size", 9, "only 9 training clips"),
    ({"num_workers": "24"}, {"cores": 4}, "data.num_workers", 4, "4 usable cores"),
    ({}, {"num_gpus": 2}, "", None, "2 GPUs were found and one is used"),
    ({}, {"num_gpus": 2, "roles": (1, 0)}, "", None, "2 GPUs were found and one is used"),
    ({"preset": "40gb"}, {}, "training.preset", "24gb", "40gb is for a larger card"),
    ({"size": "normal"}, {"gpu_memory_mb": 11910}, "model.size", None, "11910 MB"),
    ({"max_steps": "500", "warmup_steps": "500"}, {}, "training.warmup_steps", 50, "--max-steps"),
    ({"max_steps": "2500", "early_stop": "2"}, {}, "training.early_stop", None, "step 3000"),
    ({}, {"num_val_clips": 0}, "", None, "no clip is left for validation"),
    ({"size": "big"}, {"speech_hours": 3.2}, "model.size", None, "3.2 hours"),
    ({"size": "normal"}, {"speech_hours": None, "num_clips": 300}, "model.size", None, "2.3 hours"),
    ({"pad_to_fixed_length": "false"}, {}, "data.pad_to_fixed_length", True, "is compiled, captured"),
    ({"init_from": "DIR", "learning_rate": "0.002"}, {}, "training.learning_rate", None, "rate"),
    ({"lora_rank": "16"}, {}, "model.lora_rank", 0, "without --init-from"),
]


@pytest.mark.parametrize(("given", "facts", "setting", "value", "words"), UNSUITABLE)
def test_unsuitable_settings_are_named_with_the_fix(
    given: dict[str, object], facts: dict[str, Any], setting: str, value: Any, words: str
) -> None:
    found = hints(situation(given, **facts))
    (hint,) = [finding for finding in found if words in f"{finding.what}: {finding.why}"]
    assert (hint.setting, hint.value) == (setting, value), found
    assert hint.fix or hint.value is not None
    known = {flag for spec in specs().values() for flag in spec.flags + spec.off_flags} | {"--nproc-per-node"}
    assert set(re.findall(r"--[a-z-]+", f"{hint.what} {hint.fix}")) <= known
    if "num_gpus" in facts:
        assert hint.fix.endswith("--data-gpu {} --model-gpu {}".format(*facts.get("roles", (0, 1))))


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({}, {}),
        ({"data_gpu": "0", "model_gpu": "1"}, {"num_gpus": 2}),
        ({}, {"cores": 2, "num_clips": 320}),  # the defaults follow the machine and the corpus by themselves
        ({}, {"num_clips": 3}),
        ({"max_steps": "2"}, {}),
        ({"max_steps": "3000", "early_stop": "2"}, {}),
        ({"init_from": "DIR", "decoder_steps": "300"}, {}),
        ({"size": "normal", "stages": "decoder"}, {"speech_hours": 1.0}),
        ({"size": "normal", "init_from": "DIR"}, {"speech_hours": 1.0}),
        ({"size": "normal", "gradient_checkpointing": "true"}, {"gpu_memory_mb": 11910}),
        ({"pad_to_fixed_length": "false", "optimization_level": "basic"}, {}),
        ({"init_from": "DIR", "lora_rank": "16"}, {}),
        ({"val_data": "DIR", "val_fraction": "0"}, {"num_val_clips": None}),
    ],
)
def test_settings_at_the_edge_of_suitable_get_no_hint(given: dict[str, object], facts: dict[str, Any]) -> None:
    assert hints(situation(given, **facts)) == []


# Waits without a profile


@pytest.mark.parametrize(
    ("phase", "given", "num_gpus", "setting", "value"),
    [
        ("gather", {"num_workers": "1"}, 1, "data.num_workers", 4),
        ("gather", {}, 1, "data.cache_dir", None),
        ("upload", {"prefetch_to_gpu": "false"}, 1, "data.prefetch_to_gpu", True),
        ("encode", {}, 2, "data.data_gpu", 1),
        ("encode", {}, 1, "", None),
        ("encode", {"optimize_cpu_gpu_overlap": "false"}, 0, "", None),  # without a GPU it has no effect
        ("handoff", {}, 2, "data.data_gpu", None),
    ],
)
def test_a_slow_phase_has_a_fix_that_follows_from_the_settings_alone(
    phase: str, given: dict[str, object], num_gpus: int, setting: str, value: Any
) -> None:
    wait = Wait(settings=settings(**given), num_gpus=num_gpus, cores=16, phase=phase)
    fix = wait_rule(wait).fix(wait)
    assert (fix.setting, fix.value) == (setting, value) and fix.text


def test_a_slow_object_store_explains_slow_gathering() -> None:
    spans = [
        Span("gather", "gather-0", 0, 1000, 0), Span("fetch", "gather-0", 100, 400),
        Span("gather", "gather-0", 1000, 200, 1),
    ]  # fmt: skip
    wait = Wait(cores=16, phase="gather", profile=Breakdown(ProfileData(spans=spans)))
    assert wait_rule(wait).code == "store-slow" and wait_rule(wait).why.format(s=wait).startswith(
        "33% of the time"
    )
    fix = wait_rule(wait).fix(wait)
    assert fix.setting == "data.shard_cache_gb" and "--shard-cache-gb" in fix.text
    rest = Breakdown(ProfileData(spans=[spans[0], spans[2]]))
    assert wait_rule(Wait(cores=16, phase="gather", profile=rest)).code != "store-slow"
