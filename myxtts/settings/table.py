"""The table of all settings, derived from the dataclasses of `myxtts.config`: there is no second list.

Knows keys, flags, types, accepted values and descriptions; not where a user's values come from.
"""

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin

from myxtts import config
from myxtts.config import Settings

PREPARE_KEYS = (
    "data.train_data",
    "data.val_data",
    "data.val_fraction",
    "data.language",
    "data.tokenizer",
    "data.vocab_size",
    "data.use_phonemes",
    "data.cache_dir",
    "data.min_clip_seconds",
    "data.max_text_length",
    "data.max_mel_frames",
    "data.trim_silence_db",
    "data.native_loading",
    "data.num_workers",
)
"""The settings that preparing a corpus reads; all but the last decide what it holds."""


@dataclass(frozen=True)
class Spec:
    """One setting as the table knows it: its place, its type and the values it accepts."""

    section: str
    name: str
    kind: type
    optional: bool
    default: Any
    flags: tuple[str, ...]
    off_flags: tuple[str, ...]
    aliases: tuple[str, ...]
    choices: tuple[str, ...]
    minimum: float | None
    maximum: float | None
    above: float | None
    metavar: str

    @property
    def key(self) -> str:
        """The canonical name: section and field."""
        return f"{self.section}.{self.name}"


@cache
def specs() -> Mapping[str, Spec]:
    """The table of all settings by canonical key, in the order of `myxtts.config`."""
    table = {}
    for section in fields(Settings):
        for item in fields(section.default):  # type: ignore[arg-type]
            spec = _spec_of(section.name, item.name, item.type, item.default, dict(item.metadata))
            table[spec.key] = spec
    return table


def _spec_of(section: str, name: str, annotation: Any, default: Any, rules: dict[str, Any]) -> Spec:
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) is tuple or not kinds:
        kinds = [annotation]
    kind = get_origin(kinds[0]) or kinds[0]
    flag = rules.pop("flag") or "--" + name.replace("_", "-")
    on_flags, off_flags = rules.pop("on_flags"), rules.pop("off_flags")
    if kind is bool:
        opposite = flag.replace("--enable-", "--disable-") if "--enable-" in flag else "--no-" + flag[2:]
        off_flags = (opposite, *off_flags)
    aliases = tuple(alias if "." in alias else f"{section}.{alias}" for alias in rules.pop("aliases"))
    return Spec(
        section=section,
        name=name,
        kind=kind,
        optional=type(None) in get_args(annotation),
        default=default,
        flags=(flag, *on_flags),
        off_flags=off_flags,
        aliases=aliases,
        **rules,
    )


@cache
def canonical() -> Mapping[str, str]:
    """Every key that may be written in a file, dotted, to the canonical key it stands for."""
    return {name: spec.key for spec in specs().values() for name in (spec.key, *spec.aliases)}


def expected(spec: Spec) -> str:
    """The values a setting accepts, in words."""
    if spec.kind is bool:
        text = "true or false"
    elif spec.kind is tuple:
        text = f"a list of {', '.join(spec.choices)}, in this order, each at most once"
    elif spec.choices:
        text = f"one of {', '.join(spec.choices)}"
    elif spec.kind is Path:
        text = "the path of a file" if spec.metavar == "FILE" else "the path of a folder"
    else:
        text = ("a whole number" if spec.kind is int else "a number") + _limits(spec)
    return text + (", or null" if spec.optional else "")


def _limits(spec: Spec) -> str:
    if spec.minimum is not None and spec.maximum is not None:
        return f" from {spec.minimum:.15g} to {spec.maximum:.15g}"
    lower = f" of at least {spec.minimum:.15g}" if spec.minimum is not None else ""
    above = f" above {spec.above:.15g}" if spec.above is not None else ""
    upper = f" up to {spec.maximum:.15g}" if spec.maximum is not None else ""
    return " and".join(filter(None, (lower, above, upper)))


@cache
def descriptions() -> Mapping[str, str]:
    """The string below each field, by canonical key; read from the source, for Python does not keep it."""
    section_of = {type(section.default).__name__: section.name for section in fields(Settings)}
    found = {}
    for node in ast.parse(inspect.getsource(config)).body:
        if isinstance(node, ast.ClassDef) and node.name in section_of:
            for field, text in pairwise(node.body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    key = f"{section_of[node.name]}.{ast.unparse(field.target)}"
                    found[key] = " ".join(ast.literal_eval(text.value).split())
    return found


def section_descriptions() -> Mapping[str, str]:
    """What each section is about, in the order of the file."""
    return {section.name: inspect.getdoc(type(section.default)) or "" for section in fields(Settings)}
