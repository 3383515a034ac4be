"""The YAML file of settings, as entries with their line: what the user wrote, not yet what it means.

Knows the sections' names and YAML's traps (duplicate keys, tabs, `1e-4`); not which keys exist.
"""

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from myxtts.config import Settings
from myxtts.settings.nearest import unknown_section

if TYPE_CHECKING:
    import yaml  # at run time only when there is a file to read: importing it takes longer than all else here

_NULL_TAG = "tag:yaml.org,2002:null"
_FLOAT_TAG = "tag:yaml.org,2002:float"
_MERGE_TAG = "tag:yaml.org,2002:merge"

_SCALAR_ERRORS = (ValueError, KeyError, IndexError, AttributeError, OverflowError)
"""What PyYAML's constructors let through for scalars that are not what their tag says (`!!bool perhaps`)."""


class Entry(NamedTuple):
    """One value as the user gave it: its dotted key as written, and where that was."""

    key: str
    value: Any
    where: str


@cache
def _loader_class() -> "type[yaml.SafeLoader]":
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML's safe subset, in which `1e-4` is the number everybody means, not a text as in YAML 1.1."""

    exponent = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$", re.ASCII)
    Loader.add_implicit_resolver(_FLOAT_TAG, exponent, list("-+.0123456789"))
    return Loader


def read_entries(path: Path, problems: list[str]) -> list[Entry]:
    """All values in the file; what is wrong with its form is added to the problems."""
    import yaml

    try:
        data = path.expanduser().read_bytes()
    except (OSError, ValueError, RuntimeError) as reason:
        words = getattr(reason, "strerror", None) or reason
        problems.append(f"{path}: cannot be read ({words}); name a YAML file with --config, or leave it out")
        return []
    try:
        loader = _loader_class()(data)
        root = loader.get_single_node()
        return [] if root is None else list(_entries(loader, root, path, problems))
    except yaml.MarkedYAMLError as error:
        problems.append(_syntax_problem(path, data, error))
    except yaml.YAMLError as error:
        words = getattr(error, "reason", None) or error
        problems.append(f"{path}: is not text that YAML allows ({words}); save it as plain UTF-8 text")
    except RecursionError:
        problems.append(f"{path}: is nested too deeply; expected sections holding one value per key")
    return []


def _syntax_problem(path: Path, data: bytes, error: "yaml.MarkedYAMLError") -> str:
    mark = error.problem_mark or error.context_mark
    line = mark.line if mark else 0
    lines = data.splitlines()
    if line < len(lines) and b"\t" in lines[line]:
        advice = "YAML indents with spaces: replace the tabs of this line"
    else:
        advice = "expected lines such as `batch_size: 16`, indented by two spaces under their section"
    return f"{path}:{line + 1}: is not valid YAML ({error.problem or error.context}); {advice}"


def _entries(loader: "yaml.SafeLoader", root: Any, path: Path, problems: list[str]) -> Iterator[Entry]:
    import yaml

    known = [section.name for section in fields(Settings)]
    for section, body, where in _items(loader, root, path, problems):
        if section not in known:
            problems.append(f"{where}: {unknown_section(section)}")
            continue
        for name, node, place in _items(loader, body, path, problems, section):
            try:
                yield Entry(f"{section}.{name}", loader.construct_object(node, deep=True), place)
            except (yaml.YAMLError, *_SCALAR_ERRORS) as error:
                words = getattr(error, "problem", None) or error
                key = f"{section}.{name}"
                problems.append(f"{place}: {key} has no readable value ({words}); write a plain one")


def _items(
    loader: "yaml.SafeLoader", node: Any, path: Path, problems: list[str], section: str = ""
) -> list[tuple[str, Any, str]]:
    """Name, value node and place of each line of a mapping, with YAML's merge keys (`<<`) resolved."""
    import yaml

    if node.tag == _NULL_TAG:
        return []
    if not isinstance(node, yaml.MappingNode):
        what = f"section {section}: found" if section else "found"
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
        place = f"{path}:{node.start_mark.line + 1}"
        problems.append(f"{place}: {what} {kind}, expected lines of the form `key: value`")
        return []
    first_lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            problems.append(f"{path}:{line}: found a key that is not a name; expected a line `key: value`")
        elif key.value in first_lines and key.tag != _MERGE_TAG:
            dotted = f"{section}.{key.value}" if section else f"section {key.value}"
            first = f"first on line {first_lines[key.value]}"
            problems.append(f"{path}:{line}: {dotted} is given twice, {first}; keep one of them")
        else:
            first_lines[key.value] = line
    loader.flatten_mapping(node)
    by_name = {key.value: (key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)}
    return [(name, value, f"{path}:{key.start_mark.line + 1}") for name, (key, value) in by_name.items()]
