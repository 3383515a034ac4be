"""Settings: every key and flag arrives, every mistake is named, and the generated pages are current."""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import load_command
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from myxtts.config import LANGUAGES, Settings, descriptions
from myxtts.errors import ConfigError
from myxtts.settings import (
    MAX_FILE_BYTES,
    Spec,
    add_flags,
    apply_patch,
    canonical,
    flags_of,
    load,
    patched,
    render_docs,
    specs,
    to_yaml,
    value_of,
    with_settings,
    with_values,
)

ROOT = Path(__file__).resolve().parents[1]

CONTRACT_COMMANDS = [
    "--data-gpu 0 --model-gpu 1 --enable-memory-isolation --enable-static-shapes --data-gpu-memory 8192 "
    "--model-gpu-memory 16384 --model-size tiny --batch-size 16 --train-data DIR",
    "--buffer-size 100 --model-start-delay 3.0 --max-steps 100 --epochs 500 --grad-accum 4 --num-workers 16 "
    "--prefetch-buffer-size 8 --optimization-level enhanced --model-size small",
    "--checkpoint-dir DIR --reset-training --lr 1e-4 --seed 7 --language fa --tokenizer vocab.json "
    "--disable-static-shapes --init-from DIR --stages dvae,gpt,decoder --val-data DIR",
]
"""Every flag that users were promised, in commands they were promised."""

CONTRACT_KEYS = """
    data.use_tf_native_loading data.native_loading data.enable_xla training.enable_xla_compilation
    data.mixed_precision data.prefetch_to_gpu data.enhanced_gpu_prefetch data.optimize_cpu_gpu_overlap
    training.enable_graph_mode training.enable_eager_debug training.save_step training.val_step
    training.learning_rate
"""
"""Every promised key that is not among CONTRACT_DEFAULTS."""

CONTRACT_DEFAULTS = {
    "model.size": "tiny", "data.batch_size": 16, "training.gradient_accumulation_steps": 1, "training.epochs": 500,
    "training.max_steps": None, "data.num_workers": 16, "data.prefetch_buffer_size": None,
    "data.pipeline_buffer_size": None, "data.data_gpu": None, "data.model_gpu": None,
    "data.model_start_delay": 2.0, "data.enable_memory_isolation": False, "data.data_gpu_memory": None,
    "data.model_gpu_memory": None,
    "data.pad_to_fixed_length": True, "data.max_text_length": 200, "data.max_mel_frames": None,
    "training.optimization_level": "enhanced", "training.checkpoint_dir": Path("checkpoints"),
    "training.reset_training": False,
}  # fmt: skip
"""`auto` buffers stop at the promised 16 and 50, and `auto` caps follow the card: see their tests."""


pytestmark = pytest.mark.usefixtures("empty_working_folder")


def error_of(command: str = "", text: str | bytes | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_command(command, text)
    return str(caught.value)


PAIR = {"data.data_gpu": ["model_gpu"], "data.model_gpu": ["data_gpu"]}


def as_file(key: str, value: Any) -> str:
    """A file with one setting, and with what must be given together with it; JSON is YAML."""
    section, name = key.split(".")
    partner = dict.fromkeys(PAIR.get(key, ()), 7)
    return json.dumps({section: {name: value, **partner}}, ensure_ascii=False)


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


# The table


def test_at_most_80_settings_each_with_a_description_and_flags_of_its_own() -> None:
    assert len(specs()) <= 80
    assert all(len(descriptions()[key]) > 20 for key in specs())
    flags = [flag for spec in specs().values() for flag in spec.flags + spec.off_flags]
    assert len(flags) == len(set(flags))
    assert len(canonical()) == len(specs()) + sum(len(spec.aliases) for spec in specs().values())


def test_defaults_flags_keys_and_languages_are_those_of_the_contract() -> None:
    settings = load(None, {}).settings
    assert settings == Settings()
    assert {key: value_of(settings, key) for key in CONTRACT_DEFAULTS} == CONTRACT_DEFAULTS
    for command in CONTRACT_COMMANDS:
        load_command(command)
    assert set(CONTRACT_KEYS.split()) <= canonical().keys()
    assert " ".join(LANGUAGES) == "en es fr de it pt pl tr ru nl cs ar zh ja hu ko hi fa"


# Every key and every flag arrives


@pytest.mark.parametrize("key", list(canonical()))
def test_every_key_is_seen_through_the_file(key: str) -> None:
    spec = specs()[canonical()[key]]
    value = other_value(spec)
    result = load_command(text=as_file(key, value))
    assert value_of(result.settings, spec.key) == in_own_type(spec, value) != spec.default
    assert result.origin[spec.key] == "file"
    assert result.is_set(spec.key)


@pytest.mark.parametrize("key", list(specs()))
def test_every_flag_is_seen_and_wins_over_the_file(key: str) -> None:
    spec, value = specs()[key], other_value(specs()[key])
    text = ",".join(value) if spec.kind is tuple else str(value)
    cases = [(form, value) for flag in spec.flags for form in (f"{flag} {text}", f"{flag}={text}")]
    if spec.kind is bool:
        cases = [*((flag, True) for flag in spec.flags), *((flag, False) for flag in spec.off_flags)]
    in_file = 6 if key in PAIR else "here" if spec.kind is Path else spec.default
    for command, wanted in cases:
        result = load_command(command, as_file(key, not wanted if spec.kind is bool else in_file))
        assert value_of(result.settings, key) == in_own_type(spec, wanted)
        assert result.origin[key] == "flag"


def test_a_subset_of_flags_for_other_commands() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, only={"data.train_data", "data.num_workers"})
    namespace, rest = parser.parse_known_args(["--train-data", "D", "--num-workers", "3", "--lr=1"])
    assert flags_of(namespace) == {"data.train_data": ["D"], "data.num_workers": "3"}
    with pytest.raises(ConfigError, match="flag --lr has no meaning for this command"):
        load(None, flags_of(namespace), rest)
    assert "training settings" not in parser.format_help()


def test_help_shows_every_flag_and_every_description() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = " ".join(parser.format_help().split())
    for spec in specs().values():
        assert all(flag in text for flag in spec.flags + spec.off_flags)
        assert " ".join(descriptions()[spec.key].split()[:3]) in text
    assert "up to 16. [default: auto]" in text


# Where a value comes from


def test_the_file_in_the_working_folder_is_found_and_a_named_one_wins() -> None:
    Path("configs").mkdir()
    Path("configs/config.yaml").write_text("data: {batch_size: 3}")
    assert load_command().settings.data.batch_size == 3
    assert load_command().config_file == Path("configs/config.yaml")
    assert load_command(text="").settings.data.batch_size == 16


def test_origin_tells_what_the_user_chose() -> None:
    result = load_command("--epochs 500", "data: {prefetch_buffer_size: 16, num_workers: 4, batch_size: 16}")
    assert result.origin["training.epochs"] == "flag"  # equal to the default, but asked for
    assert result.origin["data.prefetch_buffer_size"] == result.origin["data.num_workers"] == "file"
    assert result.origin["data.batch_size"] == "file"  # also a line that repeats the default
    assert set(load_command(text=to_yaml(Settings(), comments=True)).origin.values()) == {"default"}


def test_home_is_expanded_null_unsets_and_a_buffer_size_may_be_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    file = "data: {train_data: ~/corpus, cache_dir: ~}\ntraining: {max_steps: 5, dvae_steps: 5}"
    result = load_command("--max-steps none --dvae-steps null", file).settings
    assert result.data.train_data == Path("/home/someone/corpus")
    assert result.training.max_steps is result.training.dvae_steps is result.data.cache_dir is None
    assert "~nobody_at_all" in error_of(text="data: {train_data: ~nobody_at_all/x}")
    text = "data: {prefetch_buffer_size: 16, pipeline_buffer_size: 9}"
    data = load_command("--buffer-size auto", text).settings.data
    assert (data.prefetch_buffer_size, data.pipeline_buffer_size) == (16, None)
    assert load_command(text="data: {prefetch_buffer_size: auto}").settings == Settings()
    assert "a whole number of at least 1, or auto" in error_of("--buffer-size 0")


def test_aliases_are_one_setting_and_of_repeated_flags_the_last_one_counts() -> None:
    assert load_command("--disable-static-shapes --enable-static-shapes").settings.data.pad_to_fixed_length
    both = "data: {enable_xla: false}\ntraining: {enable_xla_compilation: %s}"
    assert load_command(text=both % "false").settings.training.enable_xla_compilation is False
    message = error_of(text=both % "true")
    assert "file.yaml:2: training.enable_xla_compilation is given twice, first as data.enable_xla" in message
    assert "file.yaml:1" in message


def test_values_are_read_as_their_setting_understands_them() -> None:
    for text in ("1e-4", "1E-4", ".1e-3", "'1e-4'"):
        assert load_command(text=f"training: {{learning_rate: {text}}}").settings.training.learning_rate == 1e-4
    for text in ("[dvae, gpt]", "'dvae,gpt'", "'dvae, gpt'", "\n    - dvae\n    - gpt"):
        assert load_command(text=f"training:\n  stages: {text}").settings.training.stages == ("dvae", "gpt")
    for text in ("no", "Off", "FALSE"):
        assert load_command(text=f"data: {{mixed_precision: {text}}}").settings.data.mixed_precision is False
    assert load_command(text="data: {train_data: 2024}").settings.data.train_data == Path("2024")


# Mistakes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: {Batch-Size: 3}", "data.batch_size"),
        ("data: {prefetch_bufer: 3}", "data.prefetch_buffer_size"),
        ("data: {epochs: 3}", "epochs belongs in the section training"),
        ("training: {grad_accum: 3}", "training.gradient_accumulation_steps"),
        ("trainig: {epochs: 3}", "the nearest known one of model, data, training is training"),
        ("batch_size: 3", "batch_size belongs in the section data"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(text: str, words: str) -> None:
    assert words in error_of(text=text)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("data.batch_size", 16.5, "found '16.5', expected a whole number of at least 1; the default is 16"),
        ("data.batch_size", True, "found 'true'"),
        ("data.batch_size", [16], "found ['16']"),
        ("data.batch_size", 10**30, "expected a whole number"),
        ("data.mixed_precision", 1, "expected true or false"),
        ("data.val_fraction", 0.6, "from 0 to 0.5"),
        ("data.val_fraction", float("nan"), "found 'NaN'"),
        ("training.learning_rate", 0, "above 0"),
        ("model.size", "large", "one of tiny, small, base, normal, big; did you mean big?"),
        ("data.language", "zh-cn", "did you mean zh?"),
        ("data.language", "persain", "did you mean fa?"),
        ("training.preset", "10gb", "one of 8gb, 12gb, 16gb, 24gb, 40gb, rtx3060"),
        ("data.train_data", "a\0b", "expected the path of a folder"),
        ("training.stages", ["gpt", "dvae"], "in this order"),
        ("training.stages", ["dvae", "gtp"], "did you mean gpt?"),
        ("training.stages", [["gpt"]], "found [[]]"),
        ("data.min_clip_seconds", 28.5, "lower the first or raise the second"),
    ],
)
def test_values_that_do_not_fit_are_explained(key: str, value: Any, words: str) -> None:
    message = error_of(text=as_file(key, value))
    assert words in message
    assert key in message
    assert "file.yaml:1" in message


@pytest.mark.parametrize("text", ["1.5", "", "9" * 5000, "0", "none", "1e3"])
def test_bad_text_after_a_flag_is_reported_with_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match=r"flag --batch-size: data\.batch_size: found"):
        load(None, {"data.batch_size": text})


def test_all_mistakes_are_reported_at_once_with_their_places() -> None:
    text = "data:\n  batch_size: x\n  batchsize: 3\n  num_workers: 0\ntraining:\n  epochs: 1.5\nmodle: {}\n"
    text += "model:\n  size: big\n  size: big\n"
    message = error_of("--lr fast --grad-accum 0 --batchsise 4 --data-gpu 1 stray", text)
    assert message.startswith("10 problems")
    for words in (
        "file.yaml:2: data.batch_size",
        "file.yaml:3: unknown key 'data.batchsize'",
        "file.yaml:4: data.num_workers",
        "file.yaml:6: training.epochs",
        "file.yaml:7: unknown section 'modle'",
        "file.yaml:10: model.size is given twice, first as model.size (file.yaml:9)",
        "flag --lr: training.learning_rate: found 'fast'",
        "flag --grad-accum",
        "unknown flag --batchsise; the nearest known flag is --batch-size",
        "found 'stray' where a flag was expected",
    ):
        assert words in message


ALIAS_BOMB = "a: &a [x]\n" + "".join(f"{n}: &{n} [{f'*{m}, ' * 9}]\n" for m, n in pairwise("abcdefghi"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data:\n\tbatch_size: 3\n", "file.yaml:2: is not valid YAML .*indented by spaces"),
        ("- data", "the file is not a mapping"),
        ("data: 3", "file.yaml:1: section data is not a mapping"),
        ("data: {batch_size: !!python/object/apply:os.system [touch executed]}", "batch_size: found"),
        ("training: {stages: &a [*a]}", "training.stages"),
        ("&a {data: *a}", "data.data"),
        (ALIAS_BOMB + "data: {batch_size: *i}", "batch_size: found"),
        ("[" * 700, "nested too deeply"),
        (b"data: \xff", "cannot be read .*UTF-8"),
        ("data: \x00", "cannot be read .*UTF-8"),
        (b"#" * 10**8, f"larger than {MAX_FILE_BYTES // 1000} kB"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_broken_and_hostile_files_are_explained(text: str | bytes, words: str) -> None:
    began_at = time.monotonic()
    with pytest.raises(ConfigError, match=words):
        load_command(text=text)
    assert not Path("executed").exists()
    assert time.monotonic() - began_at < 20


@pytest.mark.parametrize("path", ["missing.yaml", ".", "a\0b", "~nobody_at_all/x"])
def test_files_that_cannot_be_read(path: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read .*--config"):
        load(Path(path), {})


@pytest.mark.parametrize("text", ["", "# nothing", "---", "data: null\nmodel: ~\n", "\ufeffdata: {}\r\n"])
def test_empty_files_and_sections_mean_the_defaults(text: str) -> None:
    assert load_command(text=text).settings == Settings()


# Properties

relaxed = hypothesis_settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.just(["x", ""]))
names = st.sampled_from(sorted(canonical())) | st.text(max_size=10)
words = ["data:", "training:", "batch_size:", "stages:", "16", "...", "&a", "*a", "<<:", "?", "-", "!!int", "!x"]
fragments = st.sampled_from([*"[]{}'\"|#=\n\t ,", "\n  ", *words, *(f"{word} " for word in words)])


@relaxed
@given(
    st.text() | st.binary() | st.lists(fragments, max_size=20).map("".join),
    st.dictionaries(names, values, max_size=4),
)
@example("&a {<<: *a, data: {<<: *a}}", {})
@example("data: {? [a] : 3}", {"data.batch_size": "x"})
def test_any_file_and_any_flags_load_or_are_explained(text: str | bytes, flags: dict[str, Any]) -> None:
    file = Path("file.yaml")
    file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    try:
        load(file, flags)
    except ConfigError as error:
        assert "problem" in str(error)


@relaxed
@given(st.text(st.characters(blacklist_characters="\0"), min_size=1, max_size=12).filter(str.strip))
@example("~x")
@example("NULL")
@example("نمونه/صدا")
def test_a_folder_of_any_name_survives_being_written_down(name: str) -> None:
    settings = with_settings(Settings(), {"training.init_from": Path(name)})
    assert load_command(text=to_yaml(settings)).settings == settings


def test_settings_survive_being_written_down() -> None:
    others = {key: in_own_type(spec, other_value(spec)) for key, spec in specs().items()}
    others |= {"data.model_gpu": 3, "training.learning_rate": 1e-7, "data.model_start_delay": 1e15}
    settings = with_settings(Settings(), others)
    for comments in (False, True):
        assert load_command(text=to_yaml(settings, comments=comments)).settings == settings


# Changing a file


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("data: {batch_size: 8, num_workers: 2}", {}, "data: {batch_size: 32, num_workers: 2}\n"),
        ("data:\n  batch_size:  # unset\n", {}, "data:\n  batch_size: 32  # unset\n"),
        ("data:\n  batch_size: '8'\n# end\n", {}, "data:\n  batch_size: 32\n# end\n"),
        (
            "data:\r\n    batch_size:   16    # small card\r\n    language: 'en'\r\n",
            {},
            "data:\r\n    batch_size:   32    # small card\r\n    language: 'en'\r\n",
        ),
        ("", {}, "data:\n  batch_size: 32\n"),
        (
            "# mine\ndata:\n    # fits\n    batch_size: 8\n\n# about training\ntraining:\n  seed: 1",
            {"data.num_workers": 4, "training.save_step": 50, "model.gradient_checkpointing": False},
            "# mine\ndata:\n    num_workers: 4\n    # fits\n    batch_size: 8\n\n# about training\ntraining:\n"
            "  save_step: 50\n  seed: 1\n\nmodel:\n  gradient_checkpointing: false\n",
        ),
        (
            "data:\n  use_tf_native_loading: false\n  enable_xla: false\n",
            {"data.native_loading": True, "training.enable_xla_compilation": True},
            "data:\n  use_tf_native_loading: true\n  enable_xla: true\n",
        ),
    ],
    ids=["one line", "no value", "quotes", "line ends", "no file", "absent keys and sections", "aliases"],
)
def test_only_the_characters_of_a_value_change(text: str, values: dict[str, Any], expected: str) -> None:
    assert patched(text, values or {"data.batch_size": 32}) == expected


def test_the_shipped_file_keeps_everything_but_the_changed_lines() -> None:
    before = to_yaml(Settings(), comments=True)
    after = patched(before, {"data.batch_size": 32, "training.enable_graph_mode": False, "data.data_gpu": 0})
    changed = [(old, new) for old, new in zip(before.splitlines(), after.splitlines(), strict=True) if old != new]
    assert changed == [
        ("  #batch_size: 16", "  batch_size: 32"),
        ("  #data_gpu: null", "  data_gpu: 0"),
        ("  #enable_graph_mode: true", "  enable_graph_mode: false"),
    ]


def test_applying_writes_the_file_and_keeps_every_backup() -> None:
    config = Path("config.yaml").resolve()
    before = "# my settings\ndata:\n  batch_size: 8  # fits\n  num_workers: 2\n"
    config.write_text(before)
    path, backup = apply_patch(load(config, {}), {"data.batch_size": 32, "model.size": "small"})
    assert (path, backup) == (config, config.with_name("config.yaml.bak")) and backup.read_text() == before
    assert config.read_text().startswith("# my settings\ndata:\n  batch_size: 32  # fits\n")
    written = load(config, {}).settings
    assert (written.data.batch_size, written.data.num_workers, written.model.size) == (32, 2, "small")
    _, second = apply_patch(load(config, {}), {"data.batch_size": 64})
    assert second == config.with_name("config.yaml.bak1") and backup.read_text() == before
    path, none = apply_patch(load(None, {}), {"data.batch_size": 32})  # where the next command finds it
    assert none is None and path.resolve() == Path("configs/config.yaml").resolve()
    assert load(None, {}).settings.data.batch_size == 32


def test_nothing_is_written_that_would_not_load() -> None:
    text = "data: {batch_size: 8}\n"
    with pytest.raises(ConfigError, match="nothing was written"):
        apply_patch(load_command(text=text), {"data.num_workers": 3})
    assert [(file.name, file.read_text()) for file in Path().iterdir()] == [("file.yaml", text)]


def test_changed_values_count_as_the_users_own() -> None:
    assert with_values(load(None, {}), {"data.batch_size": 16}).is_set("data.batch_size")


# Generated pages


def test_generated_pages_are_current_and_name_every_key_flag_and_alias() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page == render_docs(page), "docs/configuration.md is stale: make docs"
    file = (ROOT / "configs/config.yaml").read_text(encoding="utf-8")
    assert file == to_yaml(Settings(), comments=True), "configs/config.yaml is stale: make docs"
    assert file.count("\n  #prefetch_buffer_size: auto\n") == 1
    for spec in specs().values():
        assert f"| `{spec.name}` |" in page
        assert all(f"`{flag}" in page for flag in spec.flags + spec.off_flags)
        assert all(alias in page for alias in spec.aliases)


def test_urls_of_corpora_read_back_without_their_secrets() -> None:
    given = ["s3://bucket/a:2,language=de", "https://host:8080/b"]
    loaded = load(None, {"data.train_data": given})
    text = to_yaml(loaded.settings)
    assert '"s3://bucket/a/:2,language=de", "https://host:8080/b/"' in text
    assert load(None, {"data.train_data": ["s3://bucket/a/:2,language=de", "https://host:8080/b/"]}) == loaded
    signed = load(None, {"data.train_data": "https://host/a.tar?X-Amz-Signature=SECRET"})
    assert "https://host/a.tar?" in (text := to_yaml(signed.settings)) and "SECRET" not in text
    for wrong in ("https://me:SECRET@host/a", "https://me:SECRET@host", "https://host/a?key=SECRET:b"):
        with pytest.raises(ConfigError) as caught:
            load(None, {"data.train_data": wrong})
        assert "SECRET" not in str(caught.value)
