"""Settings changed one by one: in a loaded configuration, and in the YAML file that it came from.

The file keeps its comments, its order and its line ends; only lines of the form `key: value` below their section
are touched, and what is absent is added to its section. Knows no reason for a change.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import math
import re
import shutil
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args, get_origin

from myxtts import config
from myxtts.config import HOP_SAMPLES, LANGUAGE_NAMES, SAMPLE_RATE, Settings
from myxtts.errors import ConfigError
from myxtts.files import write_atomically

if TYPE_CHECKING:
    import yaml

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


CONFIG_FLAG = "--config"
"""The flag that names the YAML file: the only one that is not a setting."""
_SYNONYMS = {name.lower(): code for code, name in LANGUAGE_NAMES.items()}
_SYNONYMS |= {"farsi": "fa", "mandarin": "zh", "large": "big", "medium": "normal", "base": "normal"}
"""Words for choices that are spelt otherwise."""
_GIGABYTES = re.compile(r"(\d{1,6})\s*g(i?b)?")


def suggestion(word: str, choices: Sequence[str]) -> str:
    """What to take instead of a word that is no choice, as advice; "" if nobody can tell.

    `zh-cn` and `en_US` mean their language. Of cards the next smaller one fits; the most similar would not.
    """
    word = word[:60].lower().strip()
    if (asked := _GIGABYTES.fullmatch(word)) and all(map(_GIGABYTES.fullmatch, choices)):
        sizes = {int(choice.rstrip("gib")): choice for choice in choices}
        if int(asked[1]) in sizes:
            return f"did you mean {sizes[int(asked[1])]}?"
        fitting = max((size for size in sizes if size < int(asked[1])), default=None)
        return f"take {sizes[fitting]}, the next smaller" if fitting else ""
    words = {choice: choice for choice in choices} | {w: c for w, c in _SYNONYMS.items() if c in choices}
    base = word.replace("_", "-").partition("-")[0]
    near = [base] if base in words else difflib.get_close_matches(word, words, n=1)
    return f"did you mean {words[near[0]]}?" if near else ""


def _nearest(word: str, known: Collection[str]) -> str:
    """The most similar known word; there always is one."""
    return difflib.get_close_matches(_plain(word), known, n=1, cutoff=0.0)[0]


def _plain(word: str) -> str:
    """A word in the form of a key, cut to a length that is quick to compare."""
    return word[:60].lower().replace("-", "_")


def _quoted(word: str) -> str:
    """A word as a message can show it, whatever a broken file holds; ordinary names stay as they are."""
    return word if len(word) <= 60 and word.isprintable() else repr(word[:60])


def unknown_key(written: str) -> str:
    """What is wrong with a dotted key that is in no section under that name."""
    section, _, name = written.partition(".")
    elsewhere = [key for key in canonical() if key.endswith(f".{name}")]
    if elsewhere:
        return f"unknown key {written}; {name} belongs in the section {elsewhere[0].partition('.')[0]}"
    spellings = {key.partition(".")[2]: canonical()[key] for key in canonical()}
    for spec in specs().values():  # who knows the flag writes its name into the file, too
        spellings.setdefault(spec.flags[0].lstrip("-").replace("-", "_"), spec.key)
    of_section = [word for word, key in spellings.items() if key.startswith(f"{section}.")]
    near = difflib.get_close_matches(_plain(name), of_section, n=1)
    key = spellings[near[0] if near else _nearest(name, spellings)]
    return f"unknown key {_quoted(written)}; the nearest known key is {key}"


def unknown_section(name: str) -> str:
    """What is wrong with a name at the left margin of the file that is not a section."""
    sections = list(dict.fromkeys(spec.section for spec in specs().values()))
    homes = [key for key in canonical() if key.endswith(f".{name}")]
    if homes:
        return f"{name} stands outside of any section; move it, indented, under {homes[0].partition('.')[0]}:"
    return (
        f"unknown section {_quoted(name)}; the nearest known one is {_nearest(name, sections)} "
        f"(the sections are {', '.join(sections)})"
    )


def unknown_arguments(arguments: Sequence[str]) -> list[str]:
    """One line for each argument no parser knew; the value that follows an unknown flag is passed over."""
    known = [CONFIG_FLAG, *(flag for spec in specs().values() for flag in spec.flags + spec.off_flags)]
    by_word = {_plain(flag): flag for flag in known}
    problems = []
    after_flag = False
    for argument in arguments:
        if argument.startswith("-"):
            word = argument.partition("=")[0]
            if word in known:
                problems.append(f"flag {word} has no meaning for this command; leave it out")
            else:
                near = by_word[_nearest(word, by_word)]
                problems.append(f"unknown flag {_quoted(word)}; the nearest known flag is {near}")
        elif not after_flag:
            problems.append(f"found {argument!r} where a flag was expected; flags start with --, see --help")
        after_flag = argument.startswith("-") and "=" not in argument
    return problems


_LARGEST_WHOLE_NUMBER = 10**15
"""Far above anything a setting can mean, and small enough to be exact as a float and to be printed."""


@dataclass(frozen=True)
class ContradictingFlags:
    """Stands for the value of a setting that two flags of one command line want different things of."""

    flags: tuple[str, ...]


class Unfit(Exception):
    """A value that a setting does not accept; the text says what was found, expected, and what to do."""


def converted(spec: Spec, raw: Any, text_is_parsed: bool) -> Any:
    """The value in the setting's own type; Unfit when it is not one the setting accepts.

    Text becomes a number or a switch only when it comes from a command line, where everything is text.
    """
    if isinstance(raw, ContradictingFlags):
        raise Unfit(f"found {' and '.join(raw.flags)}, which contradict each other; give only one of them")
    if raw is None or (isinstance(raw, str) and raw.lower() in ("none", "null")):
        if spec.optional:
            return None
        raise _unfit(spec, "nothing" if raw is None else shown(raw))
    if spec.kind is tuple:
        return _converted_list(spec, raw)
    if text_is_parsed and isinstance(raw, str):
        raw = _parsed(spec, raw)
    if spec.kind is Path:
        return _converted_path(spec, raw)
    if spec.kind is float and type(raw) is int and abs(raw) <= _LARGEST_WHOLE_NUMBER:
        raw = float(raw)
    if not _is_of_kind(spec, raw):
        quoted = isinstance(raw, str) and not isinstance(_parsed(spec, raw), str)
        raise _unfit(spec, shown(raw), quoted=quoted)
    if spec.choices and raw not in spec.choices:
        raise _unfit(spec, shown(raw), advice=suggestion(raw, spec.choices))
    if spec.kind in (int, float) and not _within_limits(spec, raw):
        raise _unfit(spec, shown(raw))
    return raw


def _is_of_kind(spec: Spec, raw: Any) -> bool:
    # To Python, and to nobody else, true is the whole number 1.
    return isinstance(raw, spec.kind) and (spec.kind is bool or not isinstance(raw, bool))


def _within_limits(spec: Spec, number: float) -> bool:
    return (
        (abs(number) <= _LARGEST_WHOLE_NUMBER if isinstance(number, int) else math.isfinite(number))
        and (spec.minimum is None or number >= spec.minimum)
        and (spec.above is None or number > spec.above)
        and (spec.maximum is None or number <= spec.maximum)
    )


def _parsed(spec: Spec, text: str) -> Any:
    """What a flag's text says in the setting's type, or the text itself when it says nothing of the kind."""
    if spec.kind is bool:
        words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
        return words.get(text.lower(), text)
    try:
        return spec.kind(text) if spec.kind in (int, float) else text
    except ValueError:
        return text


def _converted_path(spec: Spec, raw: Any) -> Path:
    if not isinstance(raw, (str, Path)) or not str(raw).strip() or "\0" in str(raw):
        raise _unfit(spec, shown(raw))
    try:
        # Asked of the text: `./~` is a folder of that name, but as a Path no longer looks different from `~`.
        return Path(raw).expanduser() if str(raw).startswith("~") else Path(raw)
    except RuntimeError as unknown_user:
        raise _unfit(spec, f"{shown(str(raw))}, whose user this machine does not know") from unknown_user


def _converted_list(spec: Spec, raw: Any) -> tuple[str, ...]:
    items = [item.strip() for item in raw.split(",")] if isinstance(raw, str) else raw
    if not isinstance(items, (list, tuple)) or not items:
        raise _unfit(spec, shown(raw))
    for item in items:
        if not isinstance(item, str):
            raise _unfit(spec, f"{shown(item)} in the list")
        if item not in spec.choices:
            raise _unfit(spec, f"{shown(item)} in the list", advice=suggestion(item, spec.choices))
    if list(items) != [choice for choice in spec.choices if choice in items]:
        raise _unfit(spec, f"the list {', '.join(items)}")
    return tuple(items)


def _unfit(spec: Spec, found: str, *, advice: str = "", quoted: bool = False) -> Unfit:
    if quoted:
        advice = "write it without quotes"
    elif not advice and spec.default is None:
        advice = "leave it out for the default"
    elif not advice:
        advice = f"the default is {shown(spec.default)}"
    return Unfit(f"found {found}, expected {expected(spec)}; {advice}")


def shown(value: Any) -> str:
    """A value as a message shows it. Containers are only named: a YAML file can nest them without end."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:60] + "…")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) > _LARGEST_WHOLE_NUMBER:
        return "an enormous number"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else f"a value of type {type(value).__name__}"


def how_to_set(key: str, value: Any) -> str:
    """How to give a setting a value: `give --batch-size 9, or set data.batch_size: 9`."""
    spec = specs()[key]
    flag = spec.off_flags[0] if value is False else spec.flags[0]
    flag += "" if spec.kind is bool else f" {plain(value)}"
    return f"give {flag}, or set {key}: {value if isinstance(value, str) else shown(value)}"


def plain(value: Any) -> str:
    """A value as a user types it after a flag; switches are on or off."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return ",".join(value) if isinstance(value, tuple) else str(value)


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
def _loader_class() -> type[yaml.SafeLoader]:
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


def _syntax_problem(path: Path, data: bytes, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    line = mark.line if mark else 0
    lines = data.splitlines()
    if line < len(lines) and b"\t" in lines[line]:
        advice = "YAML indents with spaces: replace the tabs of this line"
    else:
        advice = "expected lines such as `batch_size: 16`, indented by two spaces under their section"
    return f"{path}:{line + 1}: is not valid YAML ({error.problem or error.context}); {advice}"


def _entries(loader: yaml.SafeLoader, root: Any, path: Path, problems: list[str]) -> Iterator[Entry]:
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
    loader: yaml.SafeLoader, node: Any, path: Path, problems: list[str], section: str = ""
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


DEFAULT_CONFIG_FILE = Path("configs/config.yaml")
"""Read when no file is named, if it exists in the working folder."""

Origin = Literal["default", "file", "flag", "preset"]


@dataclass(frozen=True)
class Loaded:
    """Checked settings, and where each came from.

    A line of the file that repeats the default counts as "default": the file that ships lists every key, and
    must not keep buffer sizes and bundles from following the machine. A flag always counts as set, and so does
    what a preset or an optimisation level gave ("preset", see `presets.apply`).
    """

    settings: Settings
    origin: Mapping[str, Origin]
    config_file: Path | None

    def is_set(self, key: str) -> bool:
        """Whether the user chose this setting (`data.batch_size`), by itself or with a preset."""
        return self.origin[key] != "default"


def load(config_file: Path | None, flags: Mapping[str, object], unrecognized: Sequence[str] = ()) -> Loaded:
    """Settings from the defaults, the file and the flags (see `flags_of`), or one ConfigError.

    `unrecognized` is what `parse_known_args` left over; it is reported together with everything else.
    """
    if config_file is None and DEFAULT_CONFIG_FILE.is_file():
        config_file = DEFAULT_CONFIG_FILE
    problems: list[str] = []
    values: dict[str, Any] = {key: spec.default for key, spec in specs().items()}
    origin: dict[str, Origin] = dict.fromkeys(values, "default")
    where: dict[str, str] = {}
    unfit: set[str] = set()

    from_file = [] if config_file is None else read_entries(config_file, problems)
    for key, value, place in _settle(from_file, problems, unfit, text_is_parsed=False):
        where[key], values[key] = place, value
        origin[key] = "default" if value == specs()[key].default else "file"
    from_flags = [Entry(key, value, _flag_place(key)) for key, value in flags.items()]
    for key, value, place in _settle(from_flags, problems, unfit, text_is_parsed=True):
        where[key], values[key], origin[key] = place, value, "flag"
    problems += unknown_arguments(unrecognized)

    settings = _build(values)
    for keys, text in _conflicts(settings):
        if unfit.isdisjoint(keys):
            places = [where[key] for key in keys if key in where]
            problems.append(f"{', '.join(places)}: {text}")
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  - ".join([f"{count} in the settings:", *problems]))
    return Loaded(settings, origin, config_file)


def _build(values: Mapping[str, Any]) -> Settings:
    sections = {}
    for section in fields(Settings):
        kind: Any = type(section.default)
        sections[section.name] = kind(**{f.name: values[f"{section.name}.{f.name}"] for f in fields(kind)})
    return Settings(**sections)


def _settle(
    entries: Sequence[Entry], problems: list[str], unfit: set[str], *, text_is_parsed: bool
) -> Iterator[Entry]:
    """The usable entries of one source under their canonical keys; the others are added to the problems."""
    seen: dict[str, Entry] = {}
    for entry in entries:
        key = canonical().get(entry.key)
        if key is None:
            problems.append(f"{entry.where}: {unknown_key(entry.key)}")
            continue
        try:
            value = converted(specs()[key], entry.value, text_is_parsed)
        except Unfit as reason:
            problems.append(f"{entry.where}: {entry.key}: {reason}")
            unfit.add(key)
            continue
        before = seen.setdefault(key, Entry(entry.key, value, entry.where))
        if before.value != value:
            problems.append(
                f"{entry.where}: {entry.key} is {shown(value)}, but {before.key} ({before.where}), "
                f"which is the same setting, is {shown(before.value)}; keep one of the two lines"
            )
            unfit.add(key)
        yield Entry(key, value, entry.where)


def _conflicts(settings: Settings) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong between settings that are right each by itself: their keys and the text."""
    data = settings.data
    gpus = ("data.data_gpu", "data.model_gpu")
    if (data.data_gpu is None) != (data.model_gpu is None):
        given, missing = gpus if data.model_gpu is None else reversed(gpus)
        yield gpus, f"{given} is given without {missing}; give both to use two GPUs, or neither to use one"
    elif data.data_gpu is not None and data.data_gpu == data.model_gpu:
        yield (
            gpus,
            f"data.data_gpu and data.model_gpu are both {data.data_gpu}; name two different GPUs, "
            "or leave out both to use one",
        )
    longest_seconds = data.max_mel_frames * HOP_SAMPLES / SAMPLE_RATE
    if data.min_clip_seconds >= longest_seconds:
        yield (
            ("data.min_clip_seconds", "data.max_mel_frames"),
            f"no clip can be at least {data.min_clip_seconds:g} seconds (data.min_clip_seconds) and at most "
            f"{data.max_mel_frames} mel frames (data.max_mel_frames, {longest_seconds:.2f} seconds) long; "
            "lower the first or raise the second",
        )


def _flag_place(key: str) -> str:
    spec = specs().get(canonical().get(key, ""))
    return f"flag {spec.flags[0]}" if spec else "flags"


class Parser(argparse.ArgumentParser):
    """A parser that says what a misspelt command, choice or flag may have been."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self._given = args or ()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """A flag that is missing may be there and misspelt, so those that nobody knows are named as well."""
        known = self._option_string_actions
        given = self._given if self._subparsers is None else ()  # else most of them are for a subparser to know
        flags = dict.fromkeys(word.partition("=")[0] for word in given if word.startswith("--"))
        near = {flag: difflib.get_close_matches(flag, known, n=1) for flag in flags if flag not in known}
        hints = [f"\nunknown flag {flag}; did you mean {found[0]}?" for flag, found in near.items() if found]
        super().error(message + "".join(hints))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if advice := suggestion(str(value), [str(choice) for choice in action.choices or ()]):
                error.message += f"; {advice}"
            raise


class _Record(argparse.Action):
    """Notes the flag as it was spelled, with its text or, for a switch, whether it says on or off."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, spec: Spec, help: str) -> None:
        self.spec = spec
        switch = spec.kind is bool
        super().__init__(
            option_strings,
            dest,
            nargs=0 if switch else None,
            default=argparse.SUPPRESS,
            metavar=None if switch else metavar(spec),
            help=help,
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        flag: str | None = None,
    ) -> None:
        del parser
        value = flag not in self.spec.off_flags if self.spec.kind is bool else values
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), (flag, value)])


def metavar(spec: Spec) -> str:
    """What stands for the value in `--help`."""
    if spec.choices:
        return ",".join(spec.choices) if spec.kind is tuple else "{" + ",".join(spec.choices) + "}"
    return spec.metavar or {int: "N", float: "X"}.get(spec.kind, "TEXT")


def add_flags(parser: argparse.ArgumentParser, only: Collection[str] | None = None) -> None:
    """Adds `--config` and the flags of all settings, or of those whose canonical keys are in `only`."""
    parser.add_argument(
        CONFIG_FLAG,
        type=Path,
        metavar="F",
        help=f"YAML file of settings; flags win over it [default: {DEFAULT_CONFIG_FILE} if it exists]",
    )
    for section, about in section_descriptions().items():
        wanted = [s for s in specs().values() if s.section == section and (only is None or s.key in only)]
        if not wanted:
            continue
        group = parser.add_argument_group(f"{section} settings", about)
        for spec in wanted:
            words = descriptions()[spec.key].replace("`null`", "`none`")
            text = f"{words} [default: {plain(spec.default)}]"
            group.add_argument(
                *spec.flags,
                *spec.off_flags,
                dest=spec.key,
                action=_Record,
                spec=spec,
                help=text.replace("%", "%%"),
            )


def flags_of(namespace: argparse.Namespace) -> dict[str, object]:
    """The settings given on this command line, by canonical key.

    Of a flag that is repeated the last one counts, as users of a shell expect; different flags of one setting
    that disagree (`--enable-static-shapes --disable-static-shapes`) become an error in `load`.
    """
    given: dict[str, object] = {}
    for key in specs():
        uses: list[tuple[str, object]] = getattr(namespace, key, [])
        last = dict(uses)
        if len(set(last.values())) > 1:
            given[key] = ContradictingFlags(tuple(last))
        elif uses:
            given[key] = uses[-1][1]
    return given


_LEVELS: Mapping[str, Mapping[str, Any]] = {
    "basic": {"training.enable_graph_mode": False, "training.enable_xla_compilation": False},
    "enhanced": {},
    "experimental": {},  # what it tries is the trainer's choice, not a setting
}

_COLUMNS = (
    "data.batch_size", "training.gradient_accumulation_steps", "data.data_gpu_memory", "data.model_gpu_memory",
    "data.prefetch_buffer_size", "data.num_workers", "model.gradient_checkpointing", "model.lora_rank",
)  # fmt: skip
_CARDS: Mapping[str, tuple[Any, ...]] = {
    "8gb":  ( 4, 8,  2048,  6144, 8,  8, True,   16),
    "12gb": ( 8, 2,  4096,  8192, 8,  8, True, None),
    "16gb": (12, 1,  6144, 10240, 6, 16, None, None),
    "24gb": (32, 1,  8192, 16384, 4, 16, None, None),
    "40gb": (64, 1,  8192, 32768, 4, 16, None, None),
}  # fmt: skip
"""Starting points by the card's memory; None leaves a setting alone. The caps of a row share one such card."""

_FOR_FINE_TUNING = frozenset({"model.lora_rank"})
"""Left alone in a start from scratch: adapters beside weights that know nothing learn nothing."""
_CARD_SLACK = 0.9
"""A card reports some per cent less memory than it is sold with."""


def bundle(level: str) -> dict[str, Any]:
    """The settings that an optimisation level gives, by canonical key."""
    return dict(_LEVELS[level])


def preset(name: str) -> dict[str, Any]:
    """The settings that the preset of a card gives, by canonical key."""
    return {key: value for key, value in zip(_COLUMNS, _CARDS[name], strict=True) if value is not None}


def preset_for(gpu_memory_mb: int, cap_mb: int | None = None) -> str:
    """The preset for a card with this much memory, of which the model may use `cap_mb`; at least the smallest."""
    fitting = [
        name
        for name in _CARDS
        if gpu_memory_mb >= _least_memory_mb(name)
        and (cap_mb is None or preset(name)["data.model_gpu_memory"] <= cap_mb)
    ]
    return fitting[-1] if fitting else next(iter(_CARDS))


def _least_memory_mb(name: str) -> float:
    return _CARD_SLACK * 1024 * int(name.removesuffix("gb"))


def apply_presets(loaded: Loaded) -> tuple[Loaded, list[str]]:
    """Settings with what their level and preset give wherever the user did not choose, and lines that say so."""
    lines: list[str] = []
    level, name = loaded.settings.training.optimization_level, loaded.settings.training.preset
    if not bundle(level) and loaded.is_set("training.optimization_level"):
        kernels = "; the compiler also tries many kernels" if level == "experimental" else ""
        lines.append(f"optimization level {level}: no setting is changed{kernels}")
    loaded = _filled(loaded, f"optimization level {level}", bundle(level), lines)
    if name is not None:
        loaded = _filled(loaded, f"preset {name}", preset(name), lines)
    if loaded.settings.data.train_data is None and not loaded.is_set("training.checkpoint_dir"):
        loaded = _filled(loaded, "embedded corpus", {"training.checkpoint_dir": DEMO_FOLDER}, lines)
    return loaded, lines


DEMO_FOLDER = Path("demo")
"""For runs on the embedded corpus: the user's first own training must not meet one in the default folder."""


DEMO = {
    "training.stages": ("dvae", "gpt"),
    "data.batch_size": 2,
    "training.dvae_steps": 450,
    "training.max_steps": 500,
    "training.decoder_steps": 2,
    "training.save_step": 225,
    "training.warmup_steps": 20,
    "training.val_step": 225,
}
"""A few minutes on two CPU cores, of which small batches make the most. The decoder is left out: it would take
them all for a few steps, so what speaks is Griffin and Lim's method. Its limit is for those who ask for it."""
DEMO_ON_GPU = DEMO | {
    "data.batch_size": 16,
    "training.dvae_steps": 2000,
    "training.max_steps": 2000,
    "training.decoder_steps": 500,
    "training.save_step": 500,
    "training.warmup_steps": 100,
    "training.val_step": 500,
}
"""A minute or two of a GPU: enough to learn the embedded sentences by heart."""


def apply_demo(loaded: Loaded, *, on_gpu: bool = False) -> tuple[Loaded, list[str]]:
    """Short limits for the embedded corpus, unless the user says how long to train."""
    if any(loaded.is_set(f"training.{name}") for name in ("epochs", "max_steps", "dvae_steps", "decoder_steps")):
        return loaded, []
    lines = ["No --train-data given: a short demonstration on the embedded corpus"]
    values = dict(DEMO_ON_GPU if on_gpu else DEMO)
    if "decoder" not in (loaded.settings.training.stages or ()):
        del values["training.decoder_steps"]
    return _filled(loaded, "demonstration", values, lines), lines


def _filled(loaded: Loaded, source: str, values: Mapping[str, Any], lines: list[str]) -> Loaded:
    settings = loaded.settings
    origin: dict[str, Origin] = dict(loaded.origin)
    for key, value in values.items():
        spec = specs()[key]
        if origin[key] in ("file", "flag"):
            own = _value(settings, key)
            lines.append(f"{source}: {key} stays {_shown(own)} ({_place(loaded, key, own)})")
        elif key in _FOR_FINE_TUNING and settings.training.init_from is None:
            lines.append(f"{source}: {key} stays {shown(spec.default)} (only for fine-tuning: with --init-from)")
        else:
            section = replace(getattr(settings, spec.section), **{spec.name: value})
            settings = replace(settings, **{spec.section: section})
            origin[key] = "preset"
            default = "the default" if value == spec.default else f"default {shown(spec.default)}"
            lines.append(f"{source}: {key} = {_shown(value)} ({default})")
    return replace(loaded, settings=settings, origin=origin)


def _shown(value: Any) -> str:
    return plain(value) if isinstance(value, tuple) else shown(value)


def _value(settings: Settings, key: str) -> Any:
    spec = specs()[key]
    return getattr(getattr(settings, spec.section), spec.name)


def _place(loaded: Loaded, key: str, own: Any) -> str:
    """Where the user's own value stands."""
    if loaded.origin[key] == "file":
        return str(loaded.config_file)
    spec = specs()[key]
    return f"flag {spec.off_flags[0] if own is False else spec.flags[0]}"


DOCS_PAGE = Path("docs/configuration.md")

_CONFIG_HEADER = """\
# Settings of MyXTTS: every key at its default. Change what you need, delete what you like:
# a missing line means the default, and a flag on the command line wins over this file.
# This file is generated from myxtts/config.py (make docs).
"""

_DOCS_HEADER = """\
# Settings

This page is generated from `myxtts/config.py` (`make docs`); `myxtts train --help` shows the same texts.

* A setting comes from its default, then from the YAML file (`--config F`, or `configs/config.yaml` if that
  exists in the working folder), then from its flag: the later one wins.
* The file has the sections {sections}; every key may be left out. Mistakes in the
  file and in the flags are reported all together before anything starts.
* A line of the file that repeats the default does not pin it: buffer sizes still follow the machine. A flag
  pins it.
* A flag whose setting may be `null` takes the word `none` for it.
"""


def to_yaml(settings: Settings) -> str:
    """The settings as a YAML file that loads back to equal settings."""
    import yaml

    sections: dict[str, dict[str, Any]] = {}
    for spec in specs().values():
        value = getattr(getattr(settings, spec.section), spec.name)
        sections.setdefault(spec.section, {})[spec.name] = _yaml_value(value)
    # Escaped where needed: YAML counts U+0085, U+2028 and U+2029 as line breaks and would fold them away.
    foldable = any(mark in repr(settings) for mark in ("\\x85", "\\u2028", "\\u2029"))
    return yaml.safe_dump(sections, sort_keys=False, allow_unicode=not foldable)


def _yaml_value(value: Any) -> Any:
    if isinstance(value, Path):
        # A relative folder may be called "~", "none" or "1e3"; written like that it would mean something else.
        text = str(value)
        means_else = text.startswith("~") or text.lower() in ("none", "null") or _is_number(text)
        return f"./{text}" if means_else else text
    return list(value) if isinstance(value, tuple) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def render_yaml_with_comments() -> str:
    """`configs/config.yaml`: every key at its default below its description."""
    import yaml

    lines = [_CONFIG_HEADER]
    for section, about in section_descriptions().items():
        lines += [f"# {about}", f"{section}:"]
        for spec in specs().values():
            if spec.section == section:
                value = yaml.safe_dump({spec.name: _yaml_value(spec.default)}).strip()
                lines += [*_comment(spec), f"  {value}", ""]
    return "\n".join(lines)


def _comment(spec: Spec) -> list[str]:
    limits = _accepted(spec)
    return textwrap.wrap(
        descriptions()[spec.key] + (f" ({limits})" if limits else ""),
        width=108,
        initial_indent="  # ",
        subsequent_indent="  # ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _accepted(spec: Spec) -> str:
    """The accepted values where the default alone does not tell them, and the other names of the key."""
    parts = [] if spec.kind in (bool, Path) else [expected(spec)]
    parts += [f"also accepted as {alias}" for alias in spec.aliases]
    return "; ".join(parts).capitalize()


def render_docs() -> str:
    """`docs/configuration.md`: one table a section."""
    sections = section_descriptions()
    lines = [_DOCS_HEADER.format(sections=", ".join(f"`{name}`" for name in sections))]
    for section, about in sections.items():
        lines += [f"## `{section}`", "", about, ""]
        lines += ["| key | flag | default | meaning |", "|---|---|---|---|"]
        lines += [_docs_row(spec) for spec in specs().values() if spec.section == section]
        lines.append("")
    names = ", ".join(f"`{code}` {name}" for code, name in LANGUAGE_NAMES.items())
    lines += ["## Languages", "", names + ".", ""]
    return "\n".join(lines)


def _docs_row(spec: Spec) -> str:
    value = "" if spec.kind is bool else f" {metavar(spec)}"
    flags = "<br>".join(f"`{flag}{value}`" for flag in spec.flags + spec.off_flags)
    limits = _accepted(spec)
    meaning = descriptions()[spec.key] + (f" *{limits}.*" if limits else "")
    default = spec.default if isinstance(spec.default, str) else shown(spec.default)
    return f"| `{spec.name}` | {flags} | `{default}` | {meaning} |"


def write_pages(root: Path) -> None:
    """Writes the generated files below the root of the repository."""
    for path, text in ((DEFAULT_CONFIG_FILE, render_yaml_with_comments()), (DOCS_PAGE, render_docs())):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")


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
        after, _ = apply_presets(load(draft, {}))
        was, _ = apply_presets(load(path, {})) if path is not None else (after, [])
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


if __name__ == "__main__":
    write_pages(Path(__file__).resolve().parents[1])
