"""Presets and optimisation levels: what they set, and that the user's own values win."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from myxtts.config import OPTIMIZATION_LEVELS, PRESETS, Settings
from myxtts.errors import ConfigError
from myxtts.settings import (
    Loaded,
    add_flags,
    apply_presets,
    bundle,
    flags_of,
    load,
    preset,
    preset_for,
    render_yaml_with_comments,
    specs,
    to_yaml,
)

BASIC = {"training.enable_graph_mode": False, "training.enable_xla_compilation": False}

ORDERED = {
    "12gb": {
        "data.batch_size": 8,
        "data.data_gpu_memory": 4096,
        "data.model_gpu_memory": 8192,
        "data.prefetch_buffer_size": 8,
        "data.num_workers": 8,
        "training.gradient_accumulation_steps": 2,
        "model.gradient_checkpointing": True,
    },
    "16gb": {
        "data.batch_size": 12,
        "data.data_gpu_memory": 6144,
        "data.model_gpu_memory": 10240,
        "data.prefetch_buffer_size": 6,
        "data.num_workers": 16,
        "training.gradient_accumulation_steps": 1,
    },
    "24gb": {
        "data.batch_size": 32,
        "data.data_gpu_memory": 8192,
        "data.model_gpu_memory": 16384,
        "data.prefetch_buffer_size": 4,
        "data.num_workers": 16,
        "training.gradient_accumulation_steps": 1,
    },
}
"""The order's starting points."""


@pytest.fixture(autouse=True)
def _empty_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository's own configs/config.yaml must not be found by accident."""
    monkeypatch.chdir(tmp_path)


def loaded(command: str = "", text: str | None = None) -> Loaded:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    file = None
    if text is not None:
        file = Path("file.yaml")
        file.write_text(text, encoding="utf-8")
    return load(file, flags_of(parser.parse_args(["--train-data", "DIR", *command.split()])))


def test_a_run_on_the_embedded_corpus_has_a_folder_of_its_own_unless_one_is_named() -> None:
    after, lines = apply_presets(load(None, {}))
    assert after.settings.training.checkpoint_dir == Path("demo")
    assert lines == ["embedded corpus: training.checkpoint_dir = demo (default checkpoints)"]
    for given in ({"training.checkpoint_dir": "here"}, {"data.train_data": "DIR"}):
        before = load(None, given)
        assert apply_presets(before) == (before, [])


def value_at(settings: Settings, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(settings, section), name)


# The tables


def test_every_name_has_its_bundle_and_no_key_is_in_two_sources() -> None:
    of_presets = {key for name in PRESETS for key in preset(name)}
    of_levels = {key for level in OPTIMIZATION_LEVELS for key in bundle(level)}
    assert of_levels == set(BASIC)
    assert of_presets.isdisjoint(of_levels), "which of the two wins would depend on their order"
    assert not (of_presets | of_levels) & {"training.preset", "training.optimization_level"}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_known_keys_with_values_that_load_accepts(name: str) -> None:
    values = preset(name)
    settings = load(None, values).settings
    for key, value in values.items():
        assert key in specs()
        assert value_at(settings, key) == value
        assert type(value) is specs()[key].kind


@pytest.mark.parametrize("level", OPTIMIZATION_LEVELS)
def test_levels_name_known_keys_with_values_that_load_accepts(level: str) -> None:
    values = bundle(level)
    settings = load(None, values).settings
    assert all(value_at(settings, key) == value for key, value in values.items())


@pytest.mark.parametrize("name", ORDERED)
def test_presets_of_the_order_are_its_starting_points(name: str) -> None:
    assert preset(name) == ORDERED[name]


@pytest.mark.parametrize("name", PRESETS)
def test_the_caps_of_a_preset_fit_its_card_and_larger_cards_get_larger_batches(name: str) -> None:
    values, memory_mb = preset(name), 1024 * int(name.removesuffix("gb"))
    assert values["data.data_gpu_memory"] + values["data.model_gpu_memory"] <= memory_mb
    larger = PRESETS[PRESETS.index(name) + 1 :]
    assert all(preset(other)["data.batch_size"] > values["data.batch_size"] for other in larger)


def test_the_bundles_handed_out_are_copies() -> None:
    preset("12gb").clear()
    bundle("basic").clear()
    assert preset("12gb")
    assert bundle("basic")


@pytest.mark.parametrize(
    ("memory_mb", "name"),
    [
        (4096, "8gb"),
        (8192, "8gb"),
        (11910, "12gb"),
        (16000, "16gb"),
        (24210, "24gb"),
        (40326, "40gb"),
        (143771, "40gb"),
    ],
)
def test_a_card_gets_the_largest_preset_that_its_reported_memory_carries(memory_mb: int, name: str) -> None:
    assert preset_for(memory_mb) == name


def test_a_preset_that_does_not_exist_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 12gb"):
        loaded("--preset 12GB")


# Applying them


def test_nothing_is_changed_or_said_when_neither_is_asked_for() -> None:
    for before in (loaded(), loaded(text=render_yaml_with_comments())):
        after, lines = apply_presets(before)
        assert after == before
        assert lines == []


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_all_its_settings_and_says_each(name: str) -> None:
    after, lines = apply_presets(loaded(f"--preset {name} --init-from DIR"))
    values = preset(name)
    assert {key: value_at(after.settings, key) for key in values} == values
    assert [line.split()[2] for line in lines] == list(values)
    assert all(line.startswith(f"preset {name}: ") for line in lines)
    untouched = [key for key in specs() if key not in values]
    before = loaded(f"--preset {name} --init-from DIR")
    assert all(value_at(after.settings, key) == value_at(before.settings, key) for key in untouched)


def test_lines_show_the_default_that_is_replaced() -> None:
    _, lines = apply_presets(loaded("--preset 12gb"))
    assert "preset 12gb: data.batch_size = 8 (default 16)" in lines
    assert "preset 12gb: model.gradient_checkpointing = true (default false)" in lines
    _, lines = apply_presets(loaded("--preset 16gb"))
    assert "preset 16gb: data.num_workers = 16 (the default)" in lines


def test_what_a_preset_set_counts_as_asked_for() -> None:
    before = loaded("--preset 24gb")
    assert not before.is_set("data.prefetch_buffer_size")
    after, _ = apply_presets(before)
    assert after.origin["data.prefetch_buffer_size"] == "preset"
    assert after.is_set("data.prefetch_buffer_size")
    assert after.is_set("data.num_workers"), "also where the preset repeats the default"
    assert not after.is_set("data.pipeline_buffer_size")
    assert not before.is_set("data.prefetch_buffer_size"), "the settings given in are not changed"


def test_flags_and_lines_of_the_file_win_over_a_preset_and_are_said() -> None:
    after, lines = apply_presets(loaded("--batch-size 16 --preset 12gb", "data: {num_workers: 3}"))
    assert after.settings.data.batch_size == 16  # a flag counts even when it repeats the default
    assert after.settings.data.num_workers == 3
    assert after.settings.data.prefetch_buffer_size == 8
    assert after.origin["data.batch_size"] == "flag"
    assert after.origin["data.num_workers"] == "file"
    assert "preset 12gb: data.batch_size stays 16 (flag --batch-size)" in lines
    assert "preset 12gb: data.num_workers stays 3 (file.yaml)" in lines
    assert len(lines) == len(preset("12gb"))


def test_a_preset_named_in_the_shipped_file_works_although_the_file_lists_every_key() -> None:
    text = render_yaml_with_comments().replace("preset: null", "preset: 24gb")
    after, _ = apply_presets(loaded(text=text))
    assert after.settings.data.batch_size == 32


def test_adapters_are_left_out_of_a_start_from_scratch() -> None:
    after, lines = apply_presets(loaded("--preset 8gb"))
    assert after.settings.model.lora_rank == 0
    assert not after.is_set("model.lora_rank")
    assert "preset 8gb: model.lora_rank stays 0 (only for fine-tuning: with --init-from)" in lines
    assert apply_presets(loaded("--preset 8gb --init-from DIR"))[0].settings.model.lora_rank == 16


def test_the_basic_level_runs_the_plain_step() -> None:
    after, lines = apply_presets(loaded("--optimization-level basic"))
    assert not after.settings.training.enable_graph_mode
    assert not after.settings.training.enable_xla_compilation
    assert after.settings.data.optimize_cpu_gpu_overlap
    assert "optimization level basic: training.enable_graph_mode = false (default true)" in lines
    assert len(lines) == 2


def test_a_switch_the_user_set_wins_over_the_level_and_is_named_by_the_right_flag() -> None:
    after, lines = apply_presets(
        loaded("--optimization-level basic --enable-graph-mode --disable-xla-compilation")
    )
    assert after.settings.training.enable_graph_mode
    assert lines == [
        "optimization level basic: training.enable_graph_mode stays true (flag --enable-graph-mode)",
        "optimization level basic: training.enable_xla_compilation stays false (flag --disable-xla-compilation)",
    ]


@pytest.mark.parametrize("level", ["enhanced", "experimental"])
def test_levels_that_set_nothing_say_so_when_asked_for(level: str) -> None:
    after, lines = apply_presets(loaded(f"--optimization-level {level}"))
    assert len(lines) == 1 and lines[0].startswith(f"optimization level {level}: no setting is changed")
    assert ("many kernels" in lines[0]) == (level == "experimental")
    assert after.settings.training.enable_graph_mode


def test_level_and_preset_go_together_and_applying_twice_changes_nothing() -> None:
    once = apply_presets(loaded("--optimization-level basic --preset 8gb --init-from DIR --num-workers 2"))
    assert once[0].settings.data.batch_size == 4
    assert not once[0].settings.training.enable_graph_mode
    assert apply_presets(once[0]) == once


@pytest.mark.parametrize("name", PRESETS)
def test_applied_settings_survive_being_written_down(name: str) -> None:
    after, _ = apply_presets(loaded(f"--preset {name} --optimization-level basic --init-from DIR"))
    again, _ = apply_presets(loaded(text=to_yaml(after.settings)))
    assert again.settings == after.settings
