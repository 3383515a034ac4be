"""Presets and optimisation levels: what they set, that the user's own values win, and what hints warn of."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from myxtts.config import OPTIMIZATION_LEVELS, PRESETS, Settings, preset_for
from myxtts.hints import training_hints
from myxtts.settings import LoadedSettings, add_flags, apply_presets, flags_of, load, specs, to_yaml, value_of

COLUMNS = (
    "data.batch_size", "data.data_gpu_memory", "data.model_gpu_memory", "data.prefetch_buffer_size",
    "data.num_workers", "training.gradient_accumulation_steps",
)  # fmt: skip
PROMISED = {
    "12gb": ( 8, 4096,  8192, 8,  8, 2),
    "16gb": (12, 6144, 10240, 6, 16, 1),
    "24gb": (32, 8192, 16384, 4, 16, 1),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _empty_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository's own configs/config.yaml must not be found by accident."""
    monkeypatch.chdir(tmp_path)


def loaded(command: str = "", text: str | None = None) -> LoadedSettings:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    file = None
    if text is not None:
        file = Path("file.yaml")
        file.write_text(text, encoding="utf-8")
    return load(file, flags_of(parser.parse_args(["--train-data", "DIR", *command.split()])))


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
def test_the_caps_of_a_preset_fit_its_card_and_larger_cards_get_larger_batches(name: str) -> None:
    values, memory_mb = PRESETS[name], 1024 * int(name.removesuffix("gb"))
    assert values["data.data_gpu_memory"] + values["data.model_gpu_memory"] <= memory_mb
    larger = list(PRESETS)[list(PRESETS).index(name) + 1 :]
    assert all(PRESETS[other]["data.batch_size"] > values["data.batch_size"] for other in larger)


@pytest.mark.parametrize(
    ("memory_mb", "name"),
    [(4096, "8gb"), (8192, "8gb"), (11910, "12gb"), (16000, "16gb"), (24210, "24gb"), (143771, "40gb")],
)
def test_a_card_gets_the_largest_preset_that_its_reported_memory_carries(memory_mb: int, name: str) -> None:
    assert preset_for(memory_mb) == name


# Applying them


def test_nothing_is_changed_or_said_when_neither_is_asked_for() -> None:
    for before in (loaded(), loaded(text=to_yaml(Settings(), comments=True))):
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
    before = loaded(f"--preset {name} --init-from DIR")
    after, lines = apply_presets(before)
    given = PRESETS[name]
    assert [line.split()[2] for line in lines] == list(given)
    assert all(line.startswith(f"preset {name}: ") for line in lines)
    for key in specs():
        assert value_of(after.settings, key) == given.get(key, value_of(before.settings, key))
    again, _ = apply_presets(loaded(text=to_yaml(after.settings)))
    assert again.settings == after.settings


def test_lines_show_the_default_that_is_replaced() -> None:
    _, lines = apply_presets(loaded("--preset 12gb"))
    assert "preset 12gb: data.batch_size = 8 (default 16)" in lines
    assert "preset 12gb: data.prefetch_buffer_size = 8 (default auto)" in lines
    assert "preset 12gb: model.gradient_checkpointing = true (default false)" in lines
    assert "preset 16gb: data.num_workers = 16 (the default)" in apply_presets(loaded("--preset 16gb"))[1]


def test_what_a_preset_set_counts_as_asked_for() -> None:
    before = loaded("--preset 24gb")
    after, _ = apply_presets(before)
    assert after.origin["data.batch_size"] == "preset" and after.is_set("data.batch_size")
    assert after.is_set("data.num_workers"), "also where the preset repeats the default"
    assert not after.is_set("data.pipeline_buffer_size")
    assert not before.is_set("data.batch_size"), "the settings given in are not changed"


def test_flags_and_lines_of_the_file_win_over_a_preset_and_are_said() -> None:
    after, lines = apply_presets(loaded("--batch-size 16 --preset 12gb", "data: {num_workers: 3}"))
    data = after.settings.data
    assert (data.batch_size, data.num_workers, data.prefetch_buffer_size) == (16, 3, 8)
    assert (after.origin["data.batch_size"], after.origin["data.num_workers"]) == ("flag", "file")
    assert "preset 12gb: data.batch_size stays 16 (flag --batch-size)" in lines
    assert "preset 12gb: data.num_workers stays 3 (file.yaml)" in lines
    assert len(lines) == len(PRESETS["12gb"])


def test_a_preset_named_in_the_shipped_file_works_although_the_file_lists_every_key() -> None:
    text = to_yaml(Settings(), comments=True).replace("preset: null", "preset: 24gb")
    assert apply_presets(loaded(text=text))[0].settings.data.batch_size == 32


def test_adapters_are_left_out_of_a_start_from_scratch() -> None:
    after, lines = apply_presets(loaded("--preset 8gb"))
    assert after.settings.model.lora_rank == 0
    assert not after.is_set("model.lora_rank")
    assert "preset 8gb: model.lora_rank stays 0 (only for fine-tuning: with --init-from)" in lines
    assert apply_presets(loaded("--preset 8gb --init-from DIR"))[0].settings.model.lora_rank == 16


def test_the_basic_level_runs_the_plain_step_unless_the_user_says_otherwise() -> None:
    after, lines = apply_presets(loaded("--optimization-level basic"))
    assert not after.settings.training.enable_graph_mode
    assert not after.settings.training.enable_xla_compilation
    assert "optimization level basic: training.enable_graph_mode = false (default true)" in lines
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


# Hints


GOOD = "--train-data DIR --max-steps 20000 --preset 24gb"


def hints_for(command: str = GOOD, **facts: Any) -> list[str]:
    """Hints for a command on a good machine with a corpus of ten hours, or with other facts."""
    settings = apply_presets(loaded(command))[0].settings
    known: dict[str, Any] = {"num_gpus": 1, "gpu_memory_mb": 24210, "num_clips": 6000, "cores": 32}
    known |= {"num_val_clips": 100, "speech_hours": 10.0}
    return training_hints(settings, **(known | facts))


def test_good_settings_get_no_hint() -> None:
    assert hints_for() == []
    assert hints_for("--train-data DIR") == []
    assert hints_for("--train-data DIR --model-size normal --init-from DIR") == []
    assert hints_for("--data-gpu 0 --model-gpu 1", num_gpus=2) == []


UNSUITABLE: list[tuple[str, dict[str, Any], str]] = [
    ("--batch-size 16", {"num_clips": 9}, r"data.batch_size = 16: .* 9 training clips.* --batch-size 9$"),
    ("--num-workers 24", {"cores": 4}, r"data.num_workers = 24: .* 4 usable cores.* --num-workers 4$"),
    ("--buffer-size 400", {}, r"data.pipeline_buffer_size = 400: .* 375 batches.* --buffer-size 375$"),
    ("--prefetch-buffer-size 400", {}, r"data.prefetch_buffer_size = 400: .* --prefetch-buffer-size 375$"),
    ("", {"num_gpus": 2}, r"2 GPUs .* one is used; .*--nproc-per-node 2.*--data-gpu 0 --model-gpu 1"),
    ("--preset 40gb", {}, r"training.preset = 40gb: .* 24210 MB.* --preset 24gb"),
    ("--model-size normal", {"gpu_memory_mb": 11910}, r"model.size = normal: .* 11910 MB.* --preset 12gb"),
    ("--max-steps 500 --save-step 50", {}, r"training.warmup_steps = 500: --max-steps .* --warmup-steps 50 "),
    ("--epochs 1 --save-step 50", {}, r"training.warmup_steps = 500: --epochs .* step 375"),
    ("--epochs 4 --grad-accum 4 --save-step 50", {}, r"training.warmup_steps = 500: --epochs .* step 375"),
    ("--dvae-steps 300 --save-step 50", {}, r"training.warmup_steps = 500: --dvae-steps .* step 300"),
    ("--decoder-steps 300 --save-step 50", {}, r"training.warmup_steps = 500: --decoder-steps .* step 300"),
    ("--max-steps 900", {}, r"training.save_step = 1000: .* step 900.* lower --save-step"),
    ("--max-steps 2500 --early-stop 2", {}, r"training.early_stop = 2: .* step 3000 .* lower --val-step"),
    ("", {"num_val_clips": 0}, r"no clip is left for validation: .* --val-data.* --val-fraction"),
    ("--val-fraction 0", {"num_val_clips": None}, r"no clip is left for validation"),
    ("--val-fraction 0 --early-stop 3", {"num_val_clips": None}, r"training.early_stop = 3 never acts"),
    ("--model-size big", {"speech_hours": 3.2}, r"model.size = big: 3.2 hours.* --init-from"),
    ("--model-size normal", {"speech_hours": None, "num_clips": 1000}, r"model.size = normal: 2.6 hours"),
    ("--disable-static-shapes", {}, r"data.pad_to_fixed_length = false: .* --enable-static-shapes"),
    ("--enable-eager-debug", {}, r"training.enable_eager_debug = true: slow on purpose"),
    ("--init-from DIR --lr 0.002", {}, r"training.learning_rate = 0.002: .* leave out --lr"),
    ("--lora-rank 16", {}, r"model.lora_rank = 16: without --init-from"),
]


@pytest.mark.parametrize(("command", "facts", "words"), UNSUITABLE)
def test_unsuitable_settings_are_named_with_the_fix(command: str, facts: dict[str, Any], words: str) -> None:
    matching = [hint for hint in hints_for(command, **facts) if re.search(words, hint)]
    assert len(matching) == 1, hints_for(command, **facts)
    known = {flag for spec in specs().values() for flag in spec.flags + spec.off_flags} | {"--nproc-per-node"}
    assert set(re.findall(r"--[a-z-]+", matching[0])) <= known


@pytest.mark.parametrize(
    ("command", "facts"),
    [
        ("--num-workers 4", {"cores": 4}),
        ("", {"cores": 2, "num_clips": 320}),  # the defaults follow the machine and the corpus by themselves
        ("--batch-size 16 --warmup-steps 0 --save-step 100", {"num_clips": 16}),
        ("--max-steps 501 --save-step 501", {}),
        ("--max-steps 300 --warmup-steps 0 --save-step 300", {}),
        ("--max-steps 3000 --early-stop 2", {}),
        ("--stages gpt --dvae-steps 300", {}),
        ("--init-from DIR --dvae-steps 300 --decoder-steps 300", {}),
        ("--model-size normal --stages decoder", {"speech_hours": 1.0}),
        ("--model-size normal --init-from DIR", {"speech_hours": 1.0}),
        ("--model-size small", {"speech_hours": 1.0}),
        ("--model-size normal --gradient-checkpointing", {"gpu_memory_mb": 11910}),
        ("--model-size normal", {"num_gpus": 0, "gpu_memory_mb": 0}),
        ("--disable-static-shapes --disable-xla-compilation", {}),
        ("--disable-static-shapes --optimization-level basic", {}),
        ("--disable-static-shapes", {"num_gpus": 0, "gpu_memory_mb": 0}),
        ("--init-from DIR --lr 0.001", {}),
        ("--lr 0.002", {}),
        ("--init-from DIR --lora-rank 16", {}),
        ("--val-data DIR --val-fraction 0", {"num_val_clips": None}),
    ],
)
def test_settings_at_the_edge_of_suitable_get_no_hint(command: str, facts: dict[str, Any]) -> None:
    assert hints_for(command, **facts) == []
