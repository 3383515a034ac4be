"""What users can rely on: what they write holds, and text from files does nothing to their terminal."""

from __future__ import annotations

import json

import pytest
from conftest import load_command

from myxtts.settings import apply_demo, apply_presets, format_setting, specs, value_of

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
