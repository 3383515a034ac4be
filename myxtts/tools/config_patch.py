"""Settings changed one by one: in a loaded configuration, and in the YAML file that it came from.

The file keeps its comments, its order and its line ends; only lines of the form `key: value` below their section
are touched, and what is absent is added to its section. Knows no reason for a change.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from myxtts.checkpoint import write_atomically
from myxtts.errors import ConfigError
from myxtts.settings import DEFAULT_CONFIG_FILE, Loaded, Origin, load, presets
from myxtts.settings.table import canonical, specs

_SECTION = re.compile(r"(?P<name>\w+):[ \t]*(#.*)?")
_LINE = re.compile(
    r"(?P<indent>[ ]+)(?P<name>\w+)[ \t]*:(?P<space>[ \t]*)"
    r"(?P<value>\"[^\"]*\"|'[^']*'|[^#\"'\n]*?)(?P<rest>[ \t]*|[ \t]+#.*)"
)


def value_of(loaded: Loaded, key: str) -> Any:
    """A setting by its canonical key."""
    spec = specs()[key]
    return getattr(getattr(loaded.settings, spec.section), spec.name)


def with_values(loaded: Loaded, values: Mapping[str, Any]) -> Loaded:
    """The same configuration with other values, as if they stood in its file."""
    settings = loaded.settings
    origin: dict[str, Origin] = dict(loaded.origin)
    for key, value in values.items():
        spec = specs()[key]
        section = replace(getattr(settings, spec.section), **{spec.name: value})
        settings = replace(settings, **{spec.section: section})
        origin[key] = "default" if value == spec.default else "file"
    return replace(loaded, settings=settings, origin=origin)


def yaml_value(value: Any) -> str:
    """A value as the file has it; only what the tools set: switches, numbers, names, nothing."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def patched(text: str, values: Mapping[str, Any]) -> str:
    """The text of a YAML file with these settings changed or added, everything else as it was."""
    lines = text.splitlines(keepends=True)
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    missing = dict(values)
    ends: dict[str, int] = {}
    indents: dict[str, str] = {}
    section = ""
    for number, line in enumerate(lines):
        body = line.rstrip("\r\n")
        if heading := _SECTION.fullmatch(body):
            section = heading["name"]
            ends[section] = number
        elif section and (found := _LINE.fullmatch(body)):
            indent = indents.setdefault(section, found["indent"])
            if found["indent"] != indent:  # inside of something that is no plain value
                continue
            ends[section] = number
            key = canonical().get(f"{section}.{found['name']}", "")
            if key in values:
                missing.pop(key, None)
                before = f"{indent}{found['name']}:{found['space'] or ' '}"
                lines[number] = f"{before}{yaml_value(values[key])}{found['rest']}{line[len(body) :]}"
        elif body.strip() and not body.lstrip().startswith("#"):
            if body[0] not in " \t":  # something else than a plain section
                section = ""
            elif section:
                ends[section] = number
    return "".join(_with_missing(lines, missing, ends, indents, end))


def _with_missing(
    lines: list[str], missing: Mapping[str, Any], ends: Mapping[str, int], indents: Mapping[str, str], end: str
) -> list[str]:
    """Lines with the absent settings behind the last one of their section, or in a section of their own."""
    added: dict[int, list[str]] = {}
    fresh: dict[str, list[str]] = {}
    for key, value in missing.items():
        section, _, name = key.partition(".")
        line = f"{indents.get(section, '  ')}{name}: {yaml_value(value)}{end}"
        if section in ends:
            added.setdefault(ends[section], []).append(line)
        else:
            fresh.setdefault(section, []).append(line)
    result: list[str] = []
    for number, line in enumerate(lines):
        is_open = number in added and not line.endswith("\n")
        result += [line + end if is_open else line, *added.get(number, [])]
    for section, below in fresh.items():
        if result and not result[-1].endswith("\n"):
            result[-1] += end
        result += [*([end] if result else []), f"{section}:{end}", *below]
    return result


def apply_patch(loaded: Loaded, values: Mapping[str, Any]) -> tuple[Path, Path | None]:
    """Write these settings into the configuration's file; returns it and its backup, if there was a file before.

    Nothing is written unless the result loads, has these values, and has all others as before.
    """
    path = (loaded.config_file or DEFAULT_CONFIG_FILE).expanduser().resolve()
    before = path.read_bytes() if path.exists() else b""
    try:
        text = patched(before.decode("utf-8"), values)
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; nothing was written. Enter the settings by hand") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    backup = _free_name(path) if before else None

    def write(draft: Path) -> None:
        draft.write_bytes(text.encode())
        _check(draft, path if before else None, values)
        if backup is not None:
            shutil.copymode(path, draft)
            shutil.copy2(path, backup)

    write_atomically(path, write)
    return path, backup


def _check(draft: Path, path: Path | None, values: Mapping[str, Any]) -> None:
    """Raise unless the draft says the same as the file at `path`, but for these values."""
    listed = ", ".join(f"{key}: {yaml_value(value)}" for key, value in values.items())
    by_hand = f"nothing was written. Enter by hand: {listed}"
    try:
        after, _ = presets.apply(load(draft, {}))
        was, _ = presets.apply(load(path, {})) if path is not None else (after, [])
    except ConfigError as error:
        raise ConfigError(f"The file would not load with the changes ({error}); {by_hand}") from None
    for key in specs():
        expected = values[key] if key in values else value_of(was, key)
        if value_of(after, key) != expected:
            given = yaml_value(value_of(after, key))
            raise ConfigError(f"{key} would be {given}, not {yaml_value(expected)}; {by_hand}")


def _free_name(path: Path) -> Path:
    """Where the copy of a file goes that no earlier copy is lost for."""
    names = (f"{path.name}.bak{number or ''}" for number in range(1000))
    return next(place for name in names if not (place := path.with_name(name)).exists())
