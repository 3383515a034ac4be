"""Presets and optimisation levels: what they set, and that the user's own values win."""

from pathlib import Path
from typing import Any

import pytest
from conftest import load_command

from myxtts.config import CARDS, OPTIMIZATION_LEVELS, PRESETS, Settings, preset_for
from myxtts.settings import LoadedSettings, apply_presets, load, specs, to_yaml, value_of

COLUMNS = (
    "data.batch_size", "data.prefetch_buffer_size", "data.num_workers", "training.gradient_accumulation_steps"
)  # fmt: skip
PROMISED = {"12gb": (8, 8, 8, 2), "16gb": (12, 6, 16, 1), "24gb": (32, 4, 16, 1)}


pytestmark = pytest.mark.usefixtures("empty_working_folder")


def presets_of(command: str = "", text: str | None = None) -> tuple[LoadedSettings, list[str]]:
    """The settings of a training on data of the user's own, and what was said about them."""
    return apply_presets(load_command(f"--train-data DIR {command}", text))


# The tables


def test_no_key_is_in_two_sources() -> None:
    of_presets = {key for values in PRESETS.values() for key in values}
    of_levels = {key for values in OPTIMIZATION_LEVELS.values() for key in values}
    assert of_levels == {"training.enable_graph_mode", "training.enable_xla_compilation"}
    assert of_presets.isdisjoint(of_levels), "which of the two wins would depend on their order"
    assert not (of_presets | of_levels) & {"training.preset", "training.optimization_level"}


@pytest.mark.parametrize("values", [*PRESETS.values(), *OPTIMIZATION_LEVELS.values()])
def test_tables_name_known_keys_with_values_that_load_accepts(values: dict[str, Any]) -> None:
    settings = load(None, values).settings
    assert {key: value_of(settings, key) for key in values} == values
    assert all(type(value) is specs()[key].kind for key, value in values.items())


@pytest.mark.parametrize("name", PROMISED)
def test_presets_are_the_promised_starting_points(name: str) -> None:
    assert PRESETS[name].items() >= dict(zip(COLUMNS, PROMISED[name], strict=True)).items()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_leaves_the_caps_to_the_card_and_larger_cards_get_larger_batches(name: str) -> None:
    values = PRESETS[name]
    assert not {"data.data_gpu_memory", "data.model_gpu_memory"} & values.keys()
    larger = list(PRESETS)[list(PRESETS).index(name) + 1 :]
    assert all(PRESETS[other]["data.batch_size"] > values["data.batch_size"] for other in larger)


@pytest.mark.parametrize(
    ("memory_mb", "name"),
    [(4096, "8gb"), (8192, "rtx3070"), (10240, "rtx3080"), (11910, "rtx3060"), (16000, "16gb"),
     (24210, "rtx3090"), (24564, "rtx4090"), (40960, "a100"), (143771, "40gb")],
)  # fmt: skip
def test_a_card_gets_the_preset_of_its_memory_and_of_its_name(memory_mb: int, name: str) -> None:
    assert preset_for(memory_mb) == CARDS.get(name, name)
    by_name, by_memory = (presets_of(f"--preset {preset}")[0] for preset in (name, preset_for(memory_mb)))
    assert by_name.settings.data == by_memory.settings.data and by_name.settings.model == by_memory.settings.model


# Applying them


def test_nothing_is_changed_or_said_when_neither_is_asked_for() -> None:
    for text in (None, to_yaml(Settings(), comments=True)):
        before = load_command("--train-data DIR", text)
        assert apply_presets(before) == (before, [])


def test_a_run_on_the_embedded_corpus_has_a_folder_of_its_own_unless_one_is_named() -> None:
    after, lines = apply_presets(load(None, {}))
    assert after.settings.training.checkpoint_dir == Path("demo")
    assert lines == ["embedded corpus: training.checkpoint_dir = demo (default checkpoints)"]
    for given in ({"training.checkpoint_dir": "here"}, {"data.train_data": "DIR"}):
        before = load(None, given)
        assert apply_presets(before) == (before, [])


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_all_its_settings_says_each_and_survives_being_written_down(name: str) -> None:
    after, lines = presets_of(f"--preset {name} --init-from DIR")
    before, given = presets_of("--init-from DIR")[0], PRESETS[name] | {"training.preset": name}
    assert [line.split()[2] for line in lines] == list(PRESETS[name])
    assert all(line.startswith(f"preset {name}: ") for line in lines)
    for key in specs():
        assert value_of(after.settings, key) == given.get(key, value_of(before.settings, key))
        assert after.is_set(key) == (key in given or key.endswith(("train_data", "init_from")))
    assert presets_of(text=to_yaml(after.settings))[0].settings == after.settings


def test_lines_show_the_default_that_is_replaced() -> None:
    _, lines = presets_of("--preset 12gb")
    assert "preset 12gb: data.batch_size = 8 (default 16)" in lines
    assert "preset 12gb: data.prefetch_buffer_size = 8 (default auto)" in lines
    assert "preset 12gb: model.gradient_checkpointing = true (default false)" in lines
    assert "preset 16gb: data.num_workers = 16 (the default)" in presets_of("--preset 16gb")[1]


def test_flags_and_lines_of_the_file_win_over_a_preset_and_are_said() -> None:
    after, lines = presets_of("--batch-size 16 --preset 12gb", "data: {num_workers: 3}")
    data = after.settings.data
    assert (data.batch_size, data.num_workers, data.prefetch_buffer_size) == (16, 3, 8)
    assert (after.origin["data.batch_size"], after.origin["data.num_workers"]) == ("flag", "file")
    assert "preset 12gb: data.batch_size stays 16 (flag --batch-size)" in lines
    assert "preset 12gb: data.num_workers stays 3 (file.yaml)" in lines
    assert len(lines) == len(PRESETS["12gb"])
    shipped = to_yaml(Settings(), comments=True).replace("#preset: null", "preset: 24gb")
    assert presets_of(text=shipped)[0].settings.data.batch_size == 32, "its other lines are commented out"
    assert presets_of(text=shipped.replace("#batch", "batch"))[0].settings.data.batch_size == 16, (
        "what is written holds"
    )


def test_adapters_are_left_out_of_a_start_from_scratch() -> None:
    after, lines = presets_of("--preset 8gb")
    assert after.settings.model.lora_rank == 0 and not after.is_set("model.lora_rank")
    assert "preset 8gb: model.lora_rank stays 0 (only for fine-tuning: with --init-from)" in lines
    assert presets_of("--preset 8gb --init-from DIR")[0].settings.model.lora_rank == 16


def test_the_basic_level_runs_the_plain_step_unless_the_user_says_otherwise() -> None:
    after, lines = presets_of("--optimization-level basic")
    training = after.settings.training
    assert not training.enable_graph_mode and not training.enable_xla_compilation
    assert "optimization level basic: training.enable_graph_mode = false (default true)" in lines
    after, lines = presets_of("--optimization-level basic --enable-graph-mode --disable-xla-compilation")
    assert after.settings.training.enable_graph_mode
    assert lines == [
        "optimization level basic: training.enable_graph_mode stays true (flag --enable-graph-mode)",
        "optimization level basic: training.enable_xla_compilation stays false (flag --disable-xla-compilation)",
    ]


@pytest.mark.parametrize("level", ["enhanced", "experimental"])
def test_levels_that_set_nothing_say_so_when_asked_for(level: str) -> None:
    after, (line,) = presets_of(f"--optimization-level {level}")
    assert line.startswith(f"optimization level {level}: no setting is changed")
    assert ("many kernels" in line) == (level == "experimental")
    assert after.settings.training.enable_graph_mode


def test_level_and_preset_go_together_and_applying_twice_changes_nothing() -> None:
    once = presets_of("--optimization-level basic --preset 8gb --init-from DIR --num-workers 2")
    assert once[0].settings.data.batch_size == 4
    assert not once[0].settings.training.enable_graph_mode
    assert apply_presets(once[0]) == once
