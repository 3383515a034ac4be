"""Settings: every key and flag arrives, every mistake is named, and the generated pages are current."""

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from myxtts import config
from myxtts.config import LANGUAGES, Settings
from myxtts.errors import ConfigError
from myxtts.settings import (
    Loaded,
    Spec,
    add_flags,
    canonical,
    descriptions,
    flags_of,
    load,
    render_docs,
    render_yaml_with_comments,
    specs,
    to_yaml,
)

ROOT = Path(__file__).resolve().parents[1]

CONTRACT_COMMANDS = [
    "--train-data DIR --val-data DIR",
    "--data-gpu 0 --model-gpu 1 --enable-memory-isolation --enable-static-shapes --data-gpu-memory 8192 "
    "--model-gpu-memory 16384 --model-size tiny --batch-size 16 --train-data DIR",
    "--data-gpu 2 --model-gpu 3 --train-data DIR",
    "--buffer-size 100 --model-start-delay 3.0 --max-steps 100 --epochs 500 --grad-accum 4 --num-workers 16 "
    "--prefetch-buffer-size 8 --optimization-level enhanced --model-size small",
    "--disable-static-shapes --optimization-level basic",
    "--pad-to-fixed-length --optimization-level experimental",
    "--checkpoint-dir DIR --reset-training --lr 1e-4 --seed 7 --language fa --tokenizer vocab.json",
    "--init-from DIR --stages dvae,gpt,decoder --model-size normal",
    "--model-size big --stages gpt",
]

CONTRACT_KEYS = {
    "data.use_tf_native_loading": False,
    "data.native_loading": False,
    "data.num_workers": 8,
    "data.prefetch_buffer_size": 8,
    "data.batch_size": 32,
    "data.pipeline_buffer_size": 100,
    "data.data_gpu": 2,
    "data.model_gpu": 3,
    "data.pad_to_fixed_length": False,
    "data.max_text_length": 150,
    "data.max_mel_frames": 600,
    "data.enable_xla": False,
    "training.enable_xla_compilation": False,
    "data.mixed_precision": False,
    "data.prefetch_to_gpu": False,
    "data.enhanced_gpu_prefetch": False,
    "data.optimize_cpu_gpu_overlap": False,
    "training.enable_graph_mode": False,
    "training.enable_eager_debug": True,
    "training.gradient_accumulation_steps": 4,
    "training.checkpoint_dir": "elsewhere",
    "training.save_step": 50,
    "training.val_step": 60,
    "training.learning_rate": 0.0003,
    "training.epochs": 3,
}

CONTRACT_DEFAULTS = {
    "model.size": "tiny",
    "data.batch_size": 16,
    "training.gradient_accumulation_steps": 1,
    "training.epochs": 500,
    "training.max_steps": None,
    "data.num_workers": 16,
    "data.prefetch_buffer_size": 16,
    "data.pipeline_buffer_size": 50,
    "data.data_gpu": None,
    "data.model_gpu": None,
    "data.model_start_delay": 2.0,
    "data.enable_memory_isolation": False,
    "data.data_gpu_memory": 8192,
    "data.model_gpu_memory": 16384,
    "data.pad_to_fixed_length": True,
    "data.max_text_length": 200,
    "data.max_mel_frames": 800,
    "training.optimization_level": "enhanced",
    "training.checkpoint_dir": Path("checkpoints"),
    "training.reset_training": False,
}


@pytest.fixture(autouse=True)
def _empty_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository's own configs/config.yaml must not be found by accident."""
    monkeypatch.chdir(tmp_path)


def loaded(command: str = "", text: str | bytes | None = None) -> Loaded:
    """Settings as `train` loads them from a command line and the text of a file."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    namespace, unrecognized = parser.parse_known_args(command.split())
    file = namespace.config
    if text is not None:
        file = Path("file.yaml")
        file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return load(file, flags_of(namespace), unrecognized)


def error_of(command: str = "", text: str | bytes | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(command, text)
    return str(caught.value)


def value_at(settings: Settings, key: str) -> Any:
    section, name = canonical()[key].split(".")
    return getattr(getattr(settings, section), name)


def as_file(key: str, value: Any) -> str:
    section, name = key.split(".")
    return yaml.safe_dump({section: {name: value}})


def other_value(spec: Spec) -> Any:
    """A valid value that is not the default, as YAML holds it."""
    if spec.kind is bool:
        return not spec.default
    if spec.kind is tuple:
        return list(spec.choices[:2])
    if spec.choices:
        return next(choice for choice in spec.choices if choice != spec.default)
    if spec.kind is Path:
        return f"some/{spec.name}"
    low = spec.minimum if spec.minimum is not None else (spec.above or 0) + 0.125
    value = spec.kind(low)
    return value if value != spec.default else spec.kind(low + (1 if spec.kind is int else 0.25))


def in_own_type(spec: Spec, value: Any) -> Any:
    return spec.kind(value) if spec.kind in (Path, tuple) else value


def partner_of(key: str) -> dict[str, Any]:
    """What must be given together with a setting."""
    return {"data.data_gpu": {"model_gpu": 7}, "data.model_gpu": {"data_gpu": 7}}.get(key, {})


# The table


def test_at_most_80_settings_each_with_a_description_and_flags_of_its_own() -> None:
    assert len(specs()) <= 80
    assert all(len(descriptions()[key]) > 20 for key in specs())
    flags = [flag for spec in specs().values() for flag in spec.flags + spec.off_flags]
    assert len(flags) == len(set(flags))
    assert len(canonical()) == len(specs()) + sum(len(spec.aliases) for spec in specs().values())


def test_defaults_are_valid_and_those_of_the_contract() -> None:
    settings = load(None, {}).settings
    assert settings == Settings()
    assert loaded(text=to_yaml(settings)).settings == settings
    for key, default in CONTRACT_DEFAULTS.items():
        assert value_at(settings, key) == default, key


def test_languages_are_those_of_xtts_and_persian() -> None:
    assert " ".join(LANGUAGES) == "en es fr de it pt pl tr ru nl cs ar zh ja hu ko hi fa"
    assert set(config.LANGUAGE_NAMES) == set(LANGUAGES)


def test_importing_the_tree_is_light() -> None:
    code = "import sys, myxtts.config; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "numpy", "yaml", "argparse"} & set(modules.split())


def test_settings_cannot_be_changed_once_loaded() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load(None, {}).settings.data.batch_size = 3  # type: ignore[misc]


# Every key and every flag arrives


@pytest.mark.parametrize("key", list(specs()))
def test_every_key_is_seen_through_the_file(key: str) -> None:
    spec, value = specs()[key], other_value(specs()[key])
    text = yaml.safe_dump({spec.section: {spec.name: value, **partner_of(key)}})
    result = loaded(text=text)
    assert value_at(result.settings, key) == in_own_type(spec, value) != spec.default
    assert result.origin[key] == "file"
    assert result.is_set(key)


@pytest.mark.parametrize("key", list(specs()))
def test_every_flag_is_seen_and_wins_over_the_file(key: str) -> None:
    spec, value = specs()[key], other_value(specs()[key])
    if spec.kind is bool:
        spellings = list(spec.flags if value else spec.off_flags)
    else:
        text = ",".join(value) if spec.kind is tuple else str(value)
        spellings = [f"{flag} {text}" for flag in spec.flags] + [f"{flag}={text}" for flag in spec.flags]
    default = spec.default if not isinstance(spec.default, Path) else str(spec.default)
    file = yaml.safe_dump({spec.section: {spec.name: default, **partner_of(key)}})
    if partner_of(key):
        file = file.replace("null", "6")
    for spelling in spellings:
        result = loaded(spelling, file)
        assert value_at(result.settings, key) == in_own_type(spec, value) != spec.default
        assert result.origin[key] == "flag"


@pytest.mark.parametrize("key", [key for key, spec in specs().items() if spec.kind is bool])
def test_every_switch_can_be_turned_back_by_its_opposite_flag(key: str) -> None:
    spec = specs()[key]
    for flags, wanted in ((spec.flags, True), (spec.off_flags, False)):
        for flag in flags:
            assert value_at(loaded(flag, as_file(key, not wanted)).settings, key) is wanted


@pytest.mark.parametrize("command", CONTRACT_COMMANDS)
def test_commands_of_the_contract_are_accepted(command: str) -> None:
    loaded(command)


@pytest.mark.parametrize("key", list(CONTRACT_KEYS))
def test_keys_of_the_contract_are_accepted(key: str) -> None:
    section, name = key.split(".")
    value = CONTRACT_KEYS[key]
    result = loaded(text=yaml.safe_dump({section: {name: value, **partner_of(key)}}))
    found = value_at(result.settings, key)
    assert str(found) == str(value)
    assert result.origin[canonical()[key]] == "file"


def test_a_subset_of_flags_for_other_commands() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, only={"data.train_data", "data.num_workers"})
    namespace, rest = parser.parse_known_args(["--train-data", "D", "--num-workers", "3", "--lr=1"])
    assert flags_of(namespace) == {"data.train_data": "D", "data.num_workers": "3"}
    with pytest.raises(ConfigError, match="flag --lr has no meaning for this command"):
        load(None, flags_of(namespace), rest)
    assert "training settings" not in parser.format_help()


def test_help_shows_every_flag_and_every_description() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = " ".join(parser.format_help().split())
    for spec in specs().values():
        assert all(flag in text for flag in spec.flags + spec.off_flags)
        first_words = " ".join(descriptions()[spec.key].replace("`null`", "`none`").split()[:3])
        assert first_words in text


# Where a value comes from


def test_the_file_in_the_working_folder_is_found_and_a_named_one_wins() -> None:
    Path("configs").mkdir()
    Path("configs/config.yaml").write_text("data: {batch_size: 3}")
    assert loaded().settings.data.batch_size == 3
    assert loaded().config_file == Path("configs/config.yaml")
    assert loaded(text="").settings.data.batch_size == 16


def test_origin_tells_what_the_user_chose() -> None:
    result = loaded("--buffer-size 50", "data: {prefetch_buffer_size: 16, num_workers: 4}")
    assert result.origin["data.pipeline_buffer_size"] == "flag"  # equal to the default, but asked for
    assert result.origin["data.num_workers"] == "file"
    assert result.origin["data.prefetch_buffer_size"] == "default"  # a line that repeats the default
    assert set(loaded(text=render_yaml_with_comments()).origin.values()) == {"default"}


def test_values_given_by_a_program_need_not_be_text() -> None:
    settings = load(
        None, {"data.batch_size": 8, "data.train_data": Path("x"), "data.use_tf_native_loading": False}
    )
    assert settings.settings.data.batch_size == 8
    assert settings.settings.data.native_loading is False


def test_home_is_expanded_and_none_unsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    file = "data: {train_data: ~/corpus}\ntraining: {max_steps: 5}"
    result = loaded("--max-steps none", file)
    assert result.settings.data.train_data == Path("/home/someone/corpus")
    assert result.settings.training.max_steps is None
    assert "~nobody_at_all" in error_of(text="data: {train_data: ~nobody_at_all/x}")


def test_repeated_flag_the_last_one_counts() -> None:
    assert loaded("--batch-size 3 --batch-size 4").settings.data.batch_size == 4


def test_aliases_are_one_setting() -> None:
    assert loaded(text="data: {use_tf_native_loading: false}").settings.data.native_loading is False
    assert loaded(text="data: {enable_xla: false}").settings.training.enable_xla_compilation is False
    both = "data: {enable_xla: false}\ntraining: {enable_xla_compilation: %s}"
    assert loaded(text=both % "false").settings.training.enable_xla_compilation is False
    message = error_of(text=both % "true")
    assert "data.enable_xla" in message
    assert "training.enable_xla_compilation" in message
    assert "keep one" in message


def test_numbers_with_an_exponent_are_numbers() -> None:
    for text in ("1e-4", "1E-4", "1.0e-4", "0.0001", ".1e-3"):
        assert loaded(text=f"training: {{learning_rate: {text}}}").settings.training.learning_rate == 1e-4
    assert loaded(text="training: {learning_rate: 1}").settings.training.learning_rate == 1.0


def test_stages_as_list_or_text() -> None:
    for text in ("[dvae, gpt]", "'dvae,gpt'", "'dvae, gpt'"):
        assert loaded(text=f"training: {{stages: {text}}}").settings.training.stages == ("dvae", "gpt")


# Mistakes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: {batchsize: 3}", "data.batch_size"),
        ("data: {Batch-Size: 3}", "data.batch_size"),
        ("data: {prefetch_bufer: 3}", "data.prefetch_buffer_size"),
        ("data: {epochs: 3}", "epochs belongs in the section training"),
        ("training: {lr: 3}", "training.learning_rate"),
        ("training: {grad_accum: 3}", "training.gradient_accumulation_steps"),
        ("data: {zzzz: 3}", "the nearest known key is "),
        ("trainig: {epochs: 3}", "the nearest known one is training"),
        ("batch_size: 3", "under data:"),
        ("data: {'batch_size ': 3}", "data.batch_size"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(text: str, words: str) -> None:
    assert words in error_of(text=text)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("data.batch_size", "16", "without quotes"),
        ("data.batch_size", 16.5, "found 16.5, expected a whole number of at least 1"),
        ("data.batch_size", True, "found true"),
        ("data.batch_size", 0, "found 0"),
        ("data.batch_size", None, "found nothing"),
        ("data.batch_size", [16], "found a list"),
        ("data.batch_size", {"a": 1}, "found a mapping"),
        ("data.batch_size", 10**30, "found an enormous number"),
        ("data.mixed_precision", 1, "expected true or false"),
        ("data.mixed_precision", "true", "without quotes"),
        ("data.val_fraction", 0.6, "from 0 to 0.5"),
        ("data.val_fraction", float("nan"), "found nan"),
        ("training.learning_rate", 0, "above 0"),
        ("training.learning_rate", float("inf"), "found inf"),
        ("model.size", "smal", "did you mean small?"),
        ("model.size", 3, "one of tiny, small, normal, big"),
        ("model.size", "large", "one of tiny, small, normal, big; did you mean big?"),
        ("data.language", "zh-cn", "did you mean zh?"),
        ("data.language", "English", "did you mean en?"),
        ("data.language", "farsi", "did you mean fa?"),
        ("data.language", "persain", "did you mean fa?"),
        ("training.preset", "10gb", "8gb, 12gb, 16gb, 24gb, 40gb, or null; take 8gb, the next smaller"),
        ("training.preset", "80 GB", "take 40gb, the next smaller"),
        ("training.preset", "4gb", "40gb, or null; leave it out"),
        ("data.train_data", 3, "expected the path of a folder"),
        ("data.train_data", "", "expected the path of a folder"),
        ("data.train_data", "a\0b", "expected the path of a folder"),
        ("training.stages", ["gpt", "dvae"], "in this order"),
        ("training.stages", ["gpt", "gpt"], "each at most once"),
        ("training.stages", ["gtp"], "did you mean gpt?"),
        ("training.stages", [], "found a list"),
        ("training.stages", [["gpt"]], "found a list in the list"),
        ("data.min_clip_seconds", 9.5, "lower the first or raise the second"),
    ],
)
def test_values_that_do_not_fit_are_explained(key: str, value: Any, words: str) -> None:
    message = error_of(text=as_file(key, value))
    assert words in message
    assert key in message
    assert "file.yaml:" in message


@pytest.mark.parametrize("text", ["x", "1.5", "", "9" * 5000, "0", "none", "1e3"])
def test_bad_text_after_a_flag_is_reported_with_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match=r"flag --batch-size: data\.batch_size: found"):
        load(None, {"data.batch_size": text})


def test_all_mistakes_are_reported_at_once_with_their_places() -> None:
    text = "data:\n  batch_size: x\n  batchsize: 3\n  num_workers: 0\ntraining:\n  epochs: 1.5\nmodle: {}\n"
    message = error_of("--lr fast --grad-accum 0 --batchsise 4 --data-gpu 1 stray", text)
    assert message.startswith("10 problems")
    for words in (
        "file.yaml:2: data.batch_size",
        "file.yaml:3: unknown key data.batchsize",
        "file.yaml:4: data.num_workers",
        "file.yaml:6: training.epochs",
        "file.yaml:7: unknown section modle",
        "flag --lr: training.learning_rate: found 'fast'",
        "flag --grad-accum",
        "unknown flag --batchsise; the nearest known flag is --batch-size",
        "found 'stray' where a flag was expected",
        "flag --data-gpu: data.data_gpu is given without data.model_gpu",
    ):
        assert words in message


@pytest.mark.parametrize(
    "command",
    [
        "--enable-static-shapes --disable-static-shapes",
        "--disable-static-shapes --pad-to-fixed-length",
        "--mixed-precision --no-mixed-precision",
    ],
)
def test_contradicting_flags_are_an_error(command: str) -> None:
    message = error_of(command)
    assert "contradict" in message
    assert all(flag in message for flag in command.split())


def test_agreeing_flags_are_not() -> None:
    assert loaded("--enable-static-shapes --pad-to-fixed-length").settings.data.pad_to_fixed_length is True
    result = loaded("--disable-static-shapes --no-pad-to-fixed-length", "data: {pad_to_fixed_length: true}")
    assert result.settings.data.pad_to_fixed_length is False


def test_two_gpus_need_two_different_indices() -> None:
    assert "without data.model_gpu" in error_of("--data-gpu 0")
    assert "without data.data_gpu" in error_of("--model-gpu 0")
    assert "both 1" in error_of("--data-gpu 1", "data: {model_gpu: 1}")
    assert "without" not in error_of("--data-gpu x --model-gpu 1")  # a bad index is one mistake, not two
    assert loaded("--data-gpu 0", "data: {model_gpu: 1}").settings.data.model_gpu == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data:\n\tbatch_size: 3\n", "file.yaml:2: is not valid YAML .*replace the tabs"),
        ("data: [", "is not valid YAML"),
        ("data: {batch_size: 3, batch_size: 4}", "data.batch_size is given twice"),
        ("data:\n  batch_size: 3\n  batch_size: 3\n", "file.yaml:3: .* twice, first on line 2"),
        ("data: {}\ndata: {}", "section data is given twice, first on line 1"),
        ("- data", "found a list"),
        ("hello", "found a single value"),
        ("data: 3", "section data: found a single value"),
        ("data: {[a]: 3}", "not a name"),
        ("data: {}\n---\ndata: {}", "is not valid YAML"),
        ("data: {batch_size: !!python/object:os.system x}", "no readable value"),
        ("data: {batch_size: !!int ''}", "no readable value"),
        ("data: {batch_size: !!timestamp x}", "no readable value"),
        ("data: {mixed_precision: !!bool perhaps}", "no readable value"),
        ("data: {batch_size: 2001-99-99}", "no readable value"),
        ("data: {<<: 3}", "is not valid YAML"),
        ("training: {stages: &a [*a]}", "training.stages"),
        ("&a {data: *a}", "data.data"),
        ("[" * 20000, "nested too deeply"),
        ("data: {batch_size: " + "[" * 3000 + "]" * 3000 + "}", "nested too deeply|found a list"),
        (b"\xff\xfe\xfa", "save it as plain UTF-8"),
        (b"data: \xff", "save it as plain UTF-8"),
        ("data: \x00", "save it as plain UTF-8"),
    ],
)
def test_broken_files_are_explained(text: str | bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loaded(text=text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path, Path("a\0b"), Path("~nobody_at_all/x")):
        with pytest.raises(ConfigError, match=r"cannot be read .*--config"):
            load(path, {})


@pytest.mark.parametrize(
    "text", ["", "# nothing", "---", "~", "data:", "data:\nmodel:\n", "\ufeffdata: {}", "data: {}\r\n"]
)
def test_empty_files_and_sections_mean_the_defaults(text: str) -> None:
    assert loaded(text=text).settings == Settings()


def test_other_encodings_and_merge_keys() -> None:
    assert loaded(text="data: {batch_size: 3}".encode("utf-16")).settings.data.batch_size == 3
    merged = "data:\n  <<: {batch_size: 3, num_workers: 4}\n  batch_size: 5\n"
    data = loaded(text=merged).settings.data
    assert (data.batch_size, data.num_workers) == (5, 4)


# Properties

relaxed = hypothesis_settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.dates()
    | st.binary(max_size=5)
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3),
    max_leaves=8,
)
known_names = sorted({name for key in canonical() for name in key.split(".")})
names = st.sampled_from(known_names) | st.text(max_size=10)
yaml_fragments = st.sampled_from(
    [
        *"[]{}'\"|#=\n\t",
        "\n  ",
        ", ",
        "data:",
        "model:",
        "training:",
        "batch_size: ",
        "stages: ",
        "16",
        "...",
        *["&a ", "*a", "<<: ", "? ", "- ", "!!int ", "!!bool ", "!!set ", "!!omap ", "!x "],
    ]
)


def loads_or_explains(text: str | bytes) -> None:
    try:
        loaded(text=text)
    except ConfigError as error:
        assert "problem" in str(error)


@relaxed
@given(st.text() | st.binary() | st.lists(yaml_fragments, max_size=20).map("".join))
@example("&a {<<: *a, data: {<<: *a}}")
@example("data: &a {<<: [*a, *a], batch_size: 3}")
@example("data: {? !!omap [a] : 3}")
def test_any_text_loads_or_is_explained(text: str | bytes) -> None:
    loads_or_explains(text)


@relaxed
@given(st.dictionaries(names, trees | st.dictionaries(names, trees, max_size=5), max_size=4))
def test_any_tree_loads_or_is_explained(tree: dict[str, Any]) -> None:
    loads_or_explains(yaml.safe_dump(tree, allow_unicode=True))


@relaxed
@given(st.dictionaries(names | st.sampled_from(sorted(canonical())), scalars | trees, max_size=5))
def test_any_flags_load_or_are_explained(flags: dict[str, Any]) -> None:
    try:
        load(None, flags)
    except ConfigError as error:
        assert "problem" in str(error)


def valid_values(spec: Spec) -> st.SearchStrategy[Any]:
    low = spec.minimum if spec.minimum is not None else spec.above
    values: st.SearchStrategy[Any]
    if spec.kind is bool:
        values = st.booleans()
    elif spec.kind is tuple:
        values = st.sets(st.sampled_from(spec.choices), min_size=1).map(
            lambda chosen: tuple(c for c in spec.choices if c in chosen)
        )
    elif spec.choices:
        values = st.sampled_from(spec.choices)
    elif spec.kind is Path:
        letters = st.characters(blacklist_categories=["Cs"], blacklist_characters="\0")
        text = st.text(letters, min_size=1, max_size=12) | st.sampled_from(
            ["~", "~x", "none", "NULL", "a b", "#a: b"]
        )
        values = text.filter(str.strip).map(Path)
    elif spec.kind is int:
        values = st.integers(int(low or 0), int(spec.maximum or 10**15))
    else:
        values = st.floats(low, spec.maximum, exclude_min=spec.above is not None, allow_infinity=False)
    return values | st.none() if spec.optional else values


@st.composite
def valid_settings(draw: st.DrawFn) -> Settings:
    sections: dict[str, dict[str, Any]] = {"model": {}, "data": {}, "training": {}}
    for spec in specs().values():
        sections[spec.section][spec.name] = draw(valid_values(spec))
    data = sections["data"]
    if data["data_gpu"] is None or data["data_gpu"] == data["model_gpu"]:
        data["model_gpu"] = data["data_gpu"] = None
    elif data["model_gpu"] is None:
        data["model_gpu"] = data["data_gpu"] + 1 if data["data_gpu"] < 10**15 else 0
    data["min_clip_seconds"] = min(data["min_clip_seconds"], 0.7)
    return Settings(
        model=config.ModelSettings(**sections["model"]),
        data=config.DataSettings(**data),
        training=config.TrainingSettings(**sections["training"]),
    )


@hypothesis_settings(relaxed, max_examples=60)
@given(valid_settings())
def test_settings_survive_being_written_down(settings: Settings) -> None:
    assert loaded(text=to_yaml(settings)).settings == settings


@pytest.mark.parametrize("name", ["0E0", "12", "~", "none"])
def test_a_folder_may_be_called_like_a_number_or_a_word_of_yaml(name: str) -> None:
    settings = Settings(training=config.TrainingSettings(init_from=Path(name)))
    assert loaded(text=to_yaml(settings)).settings == settings


# Generated pages


def test_generated_pages_are_current() -> None:
    for path, text in (
        ("configs/config.yaml", render_yaml_with_comments()),
        ("docs/configuration.md", render_docs()),
    ):
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path} is stale: make docs"


def test_the_shipped_file_holds_every_key_at_its_default() -> None:
    tree = yaml.safe_load((ROOT / "configs/config.yaml").read_text(encoding="utf-8"))
    assert {f"{section}.{name}" for section in tree for name in tree[section]} == set(specs())
    assert load(ROOT / "configs/config.yaml", {}).settings == Settings()


def test_the_docs_page_names_every_key_flag_and_alias() -> None:
    page = render_docs()
    for spec in specs().values():
        assert f"| `{spec.name}` |" in page
        assert all(f"`{flag}" in page for flag in spec.flags + spec.off_flags)
        assert all(alias in page for alias in spec.aliases)
