"""Settings from the defaults, a YAML file and the command line, and back into a YAML file.

All mistakes in the file and the flags are reported in one `ConfigError`: where they are, what was found, what was
expected and what to do. YAML is only parsed, never turned into objects: each setting reads its own text, from the
file as from a flag. This module does not know what a setting does.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
import reprlib
import shutil
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from inspect import getdoc
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from myxtts import config
from myxtts.config import (
    CARDS,
    LANGUAGE_NAMES,
    OPTIMIZATION_LEVELS,
    PRESETS,
    SYNONYMS,
    CorpusSource,
    Settings,
    descriptions,
)
from myxtts.errors import ConfigError, without_secrets
from myxtts.files import write_atomically

DEFAULT_CONFIG_FILE = Path("configs/config.yaml")  # read if no file is given and the working folder has it
MAX_FILE_BYTES = 100_000  # six times the shipped file; parsing takes up to a minute per megabyte
_MAX_NUMBER = 10**15  # far above anything a setting can mean, and exact as a float
_SWITCH_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_PLAIN_TEXT = re.compile(r"[\w./]([\w./ -]*[\w./-])?")  # text that YAML reads back unchanged without quotes
_SECTIONS = tuple(field.name for field in fields(Settings))

Origin = Literal["default", "file", "flag", "preset"]
Entry = tuple[str, Any, str]  # a setting as the user gave it: its key, its value and its place


@dataclass(frozen=True)
class Spec:
    """One setting: its place, its type and the values it accepts (see `config.setting`)."""

    section: str
    name: str
    kind: type
    optional: bool
    default: Any
    flags: tuple[str, ...]
    off_flags: tuple[str, ...]
    aliases: tuple[str, ...]
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    metavar: str = ""
    none: str = "null"
    unset: str = ""
    several: bool = False

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    def expected(self) -> str:
        if self.kind is bool:
            text = "true or false"
        elif self.kind is tuple:
            text = f"a list of {', '.join(self.choices)}, in this order, each at most once"
        elif self.choices:
            text = f"one of {', '.join(self.choices)}"
        elif self.kind is Path:
            text = "the path of a file" if self.metavar == "FILE" else "the path of a folder"
            text += " with or without options, or a list of these" if self.several else ""
        else:
            text = "a whole number" if self.kind is int else "a number"
            of_at_least = "of at least" if self.maximum is None else "from"
            up_to = "and up to" if self.minimum is None else "to"
            for word, limit in ((of_at_least, self.minimum), ("above", self.above), (up_to, self.maximum)):
                text += f" {word} {limit:.15g}" if limit is not None else ""
        return text + (f", or {self.none}" if self.optional else "")

    @property
    def default_word(self) -> str:
        return self.unset or format_setting(self.key, self.default)

    def accepts(self, value: Any) -> bool:
        if self.kind is tuple:
            return bool(value) and list(value) == [choice for choice in self.choices if choice in value]
        if self.kind in (bool, str, Path):
            return not self.choices or value in self.choices
        highest = _MAX_NUMBER if self.maximum is None else self.maximum
        is_high_enough = self.minimum is None or value >= self.minimum
        return is_high_enough and value <= highest and (self.above is None or value > self.above)

    def flag_for(self, value: Any) -> str:
        return self.off_flags[0] if value is False else self.flags[0]

    def placeholder(self) -> str:
        """The name of the value in `--help`; "" for a switch."""
        if self.choices:
            return ",".join(self.choices) if self.kind is tuple else "{" + ",".join(self.choices) + "}"
        return self.metavar or {int: "N", float: "X"}.get(self.kind, "")


@cache
def specs() -> Mapping[str, Spec]:
    """All settings by canonical key, in the order of `myxtts.config`."""
    sections: list[Any] = list(fields(Settings))
    found = [_spec_of(section.name, item) for section in sections for item in fields(section.default)]
    return {spec.key: spec for spec in found}


def _spec_of(section: str, item: Any) -> Spec:
    rules = dict(item.metadata)
    optional = type(None) in get_args(item.type)
    kind = get_args(item.type)[0] if optional else item.type
    kind = get_origin(kind) or kind
    flag = rules.pop("flag", "--" + item.name.replace("_", "-"))
    off_flags = rules.pop("off_flags", ())
    if kind is bool:
        opposite = flag.replace("--enable-", "--disable-") if "--enable-" in flag else "--no-" + flag[2:]
        off_flags = (opposite, *off_flags)
    flags = (flag, *rules.pop("on_flags", ()))
    aliases = tuple(alias if "." in alias else f"{section}.{alias}" for alias in rules.pop("aliases", ()))
    return Spec(section, item.name, kind, optional, item.default, flags, off_flags, aliases, **rules)


@cache
def canonical() -> Mapping[str, str]:
    """The canonical key of every dotted key that a file may hold."""
    return {name: spec.key for spec in specs().values() for name in (spec.key, *spec.aliases)}


def _sections() -> Iterator[tuple[str, str, list[Spec]]]:
    for section in fields(Settings):
        members = [spec for spec in specs().values() if spec.section == section.name]
        yield section.name, getdoc(type(section.default)) or "", members


class _InvalidValue(Exception):
    """A setting does not accept a value; the text says what was found, what is expected, and what to do."""

    def __init__(self, spec: Spec, raw: Any, advice: str = "") -> None:
        words = raw.split(",") if isinstance(raw, str) else raw if isinstance(raw, list) else []
        unknown = [word for word in words if isinstance(word, str) and spec.choices and word not in spec.choices]
        advice = advice or next(filter(None, (suggest_choice(word, spec.choices) for word in unknown)), "")
        if not advice:
            default = f"the default is {spec.default_word}"
            advice = "leave it out for the default" if spec.default is None else default
        found = "nothing" if raw is None else reprlib.repr(without_secrets(raw) if isinstance(raw, str) else raw)
        super().__init__(f"found {found}, expected {spec.expected()}; {advice}")


_UNSET = object()  # the value of a setting that is given as if it were left out


def _parse_value(spec: Spec, raw: Any) -> Any:
    raw = raw[0] if spec.several and isinstance(raw, list) and len(raw) == 1 else raw
    if spec.unset and isinstance(raw, str) and raw.lower() == spec.unset:
        return _UNSET
    if spec.optional and (raw is None or (isinstance(raw, str) and raw.lower() in ("none", "null", spec.none))):
        return None
    value = raw
    if spec.several:
        return _parse_sources(spec, raw)
    if isinstance(raw, str) and spec.kind is bool:
        value = _SWITCH_WORDS.get(raw.lower(), raw)
    elif isinstance(raw, (str, list)) and spec.kind is tuple:
        items = raw.split(",") if isinstance(raw, str) else raw
        value = tuple(item.strip() if isinstance(item, str) else item for item in items)
    elif isinstance(raw, str) and spec.kind is Path:
        value = _parse_path(raw)
    elif type(raw) in (str, int) and spec.kind in (int, float):
        with contextlib.suppress(ValueError, OverflowError):
            value = spec.kind(raw)
    # Python counts true as the whole number 1.
    is_of_kind = isinstance(value, spec.kind) and isinstance(value, bool) is (spec.kind is bool)
    if not is_of_kind or not spec.accepts(value):
        raise _InvalidValue(spec, raw)
    return value


def _parse_path(raw: str) -> Path | None:
    """The path, None if there is none in the text. Decided by the text: as paths, "./~" and "~" are equal."""
    with contextlib.suppress(RuntimeError):  # a user that this machine does not know
        if raw.strip() and "\0" not in raw:
            return Path(raw).expanduser() if raw.startswith("~") else Path(raw)
    return None


def _parse_sources(spec: Spec, raw: Any) -> Path | tuple[CorpusSource, ...]:
    """One folder without options, or the corpora of a list."""
    texts = raw if isinstance(raw, list) else [raw]
    sources = tuple(_parse_source(spec, text) for text in texts)
    if not sources:
        raise _InvalidValue(spec, raw)
    is_plain = len(sources) == 1 and sources[0] == CorpusSource(sources[0].folder)
    return sources[0].folder if is_plain else sources


def _parse_source(spec: Spec, raw: Any) -> CorpusSource:
    """A folder and the options after the last colon, unless a slash follows that; one in a name is refused."""
    text = raw if isinstance(raw, str) else ""
    if re.match(r"\w+://[^/]*@", text):
        raise _InvalidValue(spec, raw, "credentials are read from the environment, not from a URL")
    found_options = re.search(r":([^:/]*|([^:/]*,)?\s*speakers=[^:]*[^:/])$", text)
    path, options = (text[: found_options.start()], found_options[1]) if found_options else (text, None)
    if (folder := _parse_path(path)) is None:
        raise _InvalidValue(spec, raw)
    found: dict[str, Any] = {}
    for option in [] if options is None else options.split(","):
        name, value = _parse_option(option.strip())
        if not name or name in found:
            near = suggest_choice(option.partition("=")[2], config.LANGUAGES) if "language" in option else ""
            weight = f"a weight above 0 and up to {config.MAX_WEIGHT:g}"
            known = f"{weight}, language=CODE, speakers=NAME (without a slash) and single-speaker"
            cure = f"the options after a colon, separated by commas and each given once, are {known}"
            named = f"a folder with a colon in its name ends with a slash: {text}/"
            raise _InvalidValue(spec, raw, f"{option!r} is no option{near and f', {near}'}: {cure}; {named}")
        found[name] = value
    return CorpusSource(folder, **found)


def _parse_option(option: str) -> tuple[str, Any]:
    """The field of `CorpusSource` that an option sets, and its value; "" for what is no option."""
    name, _, value = (part.strip() for part in option.partition("="))
    if (name == "language" and value in config.LANGUAGES) or (name == "speakers" and value and "/" not in value):
        return name, value
    if option == "single-speaker":
        return "single_speaker", True
    with contextlib.suppress(ValueError):
        if 0 < (weight := float(option)) <= config.MAX_WEIGHT:
            return "weight", weight
    return "", None


def format_source(source: CorpusSource) -> str:
    """Return a corpus as a flag names it."""
    text = _path_text(source.folder)
    text += "/" if ":" in text else ""
    options = [config.format_weight(source.weight)] if source.weight != 1 else []
    options += [f"language={source.language}"] if source.language else []
    options += [f"speakers={source.speakers}"] if source.speakers else []
    options += ["single-speaker"] if source.single_speaker else []
    return ":".join([text, *([",".join(options)] if options else [])])


def _path_text(path: Path) -> str:
    """A path as it reads back: `./~` and `./null` are folders of these names, not the home folder or nothing.

    A URL has lost a slash as a path; its secrets are left out.
    """
    text = re.sub(r"^(s3|gs|https?):/", r"\1://", without_secrets(str(path)))
    return f"./{text}" if text.startswith("~") or text.lower() in ("none", "null") else text


def format_setting(key: str, value: Any) -> str:
    """Return a value as the YAML file writes it."""
    if value is None:
        return specs()[key].none
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        items = (format_source(item) if isinstance(item, CorpusSource) else item for item in value)
        return f"[{', '.join(map(_quoted, items))}]"
    if specs()[key].several:
        return _quoted(format_source(CorpusSource(value)))
    if isinstance(value, (int, float)):
        return str(value)
    return _quoted(_path_text(value) if isinstance(value, Path) else value)


def _quoted(text: str) -> str:
    if _PLAIN_TEXT.fullmatch(text):
        return text
    escaped = text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
    return f'"{escaped}"'


def how_to_set(key: str, value: Any) -> str:
    """Return how to give a setting a value: `give --batch-size 9, or set data.batch_size: 9`."""
    spec = specs()[key]
    flag = spec.flag_for(value) + ("" if spec.kind is bool else f" {value}")
    return f"give {flag}, or set {key}: {format_setting(key, value)}"


def suggest_choice(word: str, choices: Sequence[str]) -> str:
    """Return advice on what to use instead of a word that is not a choice; "" if none comes close.

    `zh-cn` and `en_US` mean their language. A word with digits must match: 10gb resembles 40gb.
    """
    word = word[:60].lower().strip()
    words = {choice: choice for choice in choices} | {w: c for w, c in SYNONYMS.items() if c in choices}
    base = word.replace("_", "-").partition("-")[0]
    cutoff = 0.9 if any(map(str.isdigit, word)) else 0.6
    near = [base] if base in words else difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return f"did you mean {words[near[0]]}?" if near else ""


def _nearest(word: str, known: Collection[str]) -> str:
    return difflib.get_close_matches(word[:60].lower().replace("-", "_"), known, n=1, cutoff=0.0)[0]


def _unknown_key(written: str) -> str:
    section, _, name = written.rpartition(".")
    if homes := [key for key in canonical() if key.endswith(f".{name}")]:
        return f"unknown key {written}; {name} belongs in the section {homes[0].partition('.')[0]}"
    if not section:
        near = _nearest(name, _SECTIONS)
        return f"unknown section {reprlib.repr(name)}; the nearest known one of {', '.join(_SECTIONS)} is {near}"
    # a user who knows the flag writes its name into the file.
    spellings = {spec.flags[0].lstrip("-").replace("-", "_"): spec.key for spec in specs().values()}
    spellings |= {key.partition(".")[2]: known for key, known in canonical().items()}
    return f"unknown key {reprlib.repr(written)}; the nearest known key is {spellings[_nearest(name, spellings)]}"


def _unknown_arguments(arguments: Sequence[str]) -> Iterator[str]:
    """One problem for each argument that the parser did not know, except the values of unknown flags."""
    known = ["--config", *(flag for spec in specs().values() for flag in spec.flags + spec.off_flags)]
    by_word = {flag.replace("-", "_"): flag for flag in known}
    after_flag = False
    for argument in arguments:
        word, is_complete, _ = argument.partition("=")
        if word in known:
            yield f"flag {word} has no meaning for this command; leave it out"
        elif argument.startswith("-"):
            yield f"unknown flag {word[:60]}; the nearest known flag is {by_word[_nearest(word, by_word)]}"
        elif not after_flag:
            yield f"found {argument!r} where a flag was expected; flags start with --, see --help"
        after_flag = argument.startswith("-") and not is_complete


def _read_entries(path: Path, problems: list[str]) -> list[Entry]:
    """Return all values of the file as text; mistakes in its form are added to the problems."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        with open(path.expanduser(), "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES // 1000} kB")
        return list(_entries(YAML(typ="safe", pure=True).compose(data), path, problems))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = f"{error.problem or error.context}"[:100]  # it quotes the file
        advice = "expected lines such as `batch_size: 16`, indented by spaces under their section"
        problems.append(f"{path}:{mark.line + 1}: is not valid YAML ({what}); {advice}")
    except RecursionError:
        problems.append(f"{path}: is nested too deeply; expected sections holding one value per key")
    except (OSError, ValueError, RuntimeError, YAMLError) as error:
        words = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        problems.append(f"{path}: cannot be read ({words}); name a YAML file in UTF-8 with --config, or none")
    return []


def _entries(root: Any, path: Path, problems: list[str]) -> Iterator[Entry]:
    for heading, body in _pairs(root):
        section, line = heading.value, heading.start_mark.line + 1
        if section not in _SECTIONS:
            problems.append(f"{path}:{line}: {_unknown_key(section)}")
            continue
        for name, node in _pairs(body):
            yield f"{section}.{name.value}", _raw_value(node), f"{path}:{name.start_mark.line + 1}"
    for what, node in [("the file", root), *((f"section {key.value}", body) for key, body in _pairs(root))]:
        if node is not None and node.id != "mapping" and _raw_value(node) not in (None, "null"):
            place = f"{path}:{node.start_mark.line + 1}"
            problems.append(f"{place}: {what} is not a mapping; expected lines of the form `key: value`")


def _pairs(node: Any) -> list[tuple[Any, Any]]:
    """Key and value nodes of a mapping; none for any other node."""
    pairs: list[tuple[Any, Any]] = node.value if node is not None and node.id == "mapping" else []
    for key, _ in pairs:
        if key.id != "scalar":
            raise ValueError(f"the key on line {key.start_mark.line + 1} is not a name")
    return pairs


def _raw_value(node: Any) -> Any:
    """The text of a scalar, None for an empty one, a list of these. Other containers are never a value."""
    if node.id == "mapping":
        return {}
    if node.id == "sequence":
        return [_raw_value(item) if item.id == "scalar" else [] for item in node.value]
    return None if node.style is None and node.value in ("", "~") else node.value


@dataclass(frozen=True)
class LoadedSettings:
    """Checked settings and the origin of each; "preset" stands for presets, levels and the demonstration.

    What the file or a flag says holds, even where it repeats a default: no preset changes it.
    """

    settings: Settings
    origin: Mapping[str, Origin]
    config_file: Path | None

    def is_set(self, key: str) -> bool:
        """True if the user chose this setting (`data.batch_size`), directly or with a preset."""
        return self.origin[key] != "default"

    def spelling(self, key: str) -> str:
        """The setting as the user writes it: its key if it is in the file, else its flag."""
        return key if self.origin[key] == "file" else specs()[key].flags[0]


def as_loaded(settings: Settings) -> LoadedSettings:
    """Return settings that were not loaded as if all that differ from their defaults were given as flags."""
    origin: dict[str, Origin] = {
        key: "default" if value_of(settings, key) == spec.default else "flag" for key, spec in specs().items()
    }
    return LoadedSettings(settings, origin, None)


def load(config_file: Path | None, flags: Mapping[str, Any], unrecognized: Sequence[str] = ()) -> LoadedSettings:
    """Return the settings from defaults, file and flags (see `flags_of`); `unrecognized` ones are problems."""
    if config_file is None and DEFAULT_CONFIG_FILE.is_file():
        config_file = DEFAULT_CONFIG_FILE
    problems: list[str] = []
    values: dict[str, Any] = {}
    where: dict[str, str] = {}
    invalid: set[str] = set()
    origin: dict[str, Origin] = dict.fromkeys(specs(), "default")
    from_file = [] if config_file is None else _read_entries(config_file, problems)
    flag_of = {name: f"flag {specs()[key].flags[0]}" for name, key in canonical().items()}
    from_flags = [(key, value, flag_of.get(key, "flags")) for key, value in flags.items()]
    sources: tuple[tuple[Origin, list[Entry]], ...] = (("file", from_file), ("flag", from_flags))
    for source, entries in sources:
        for key, value, place in _settle(entries, problems, invalid):
            where[key], values[key], origin[key] = place, value, source
            if value is _UNSET:
                values[key], origin[key] = specs()[key].default, "default"
    problems += _unknown_arguments(unrecognized)
    settings = with_settings(Settings(), values)
    for keys, text in _conflicts(settings):
        if invalid.isdisjoint(keys):
            problems.append(f"{', '.join(where[key] for key in keys if key in where)}: {text}")
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  - ".join([f"{count} in the settings:", *problems]))
    return LoadedSettings(settings, origin, config_file)


def _settle(entries: list[Entry], problems: list[str], invalid: set[str]) -> Iterator[Entry]:
    """The usable entries of one source under their canonical keys; the others are added to the problems."""
    seen: dict[str, Entry] = {}
    for written, raw, place in entries:
        if (key := canonical().get(written)) is None:
            problems.append(f"{place}: {_unknown_key(written)}")
            continue
        try:
            value = _parse_value(specs()[key], raw)
        except _InvalidValue as reason:
            problems.append(f"{place}: {written}: {reason}")
            invalid.add(key)
            continue
        if key in seen and (seen[key][0] == written or seen[key][1] != value):
            first = f"first as {seen[key][0]} ({seen[key][2]})"
            problems.append(f"{place}: {written} is given twice, {first}; keep one of the two")
            invalid.add(key)
        seen.setdefault(key, (written, value, place))
        yield key, value, place


def _conflicts(settings: Settings) -> Iterator[tuple[tuple[str, ...], str]]:
    """Keys of valid settings that do not go together, and the problem."""
    data = settings.data
    longest_s = config.mel_frames(data) * config.HOP_SAMPLES / config.SAMPLE_RATE
    if data.min_clip_seconds >= longest_s:
        shortest = f"data.min_clip_seconds is {data.min_clip_seconds:g}"
        longest = f"data.max_mel_frames is {data.max_mel_frames or 'auto'} ({longest_s:.2f} seconds)"
        text = f"no clip fits: {shortest}, but {longest}; lower the first or raise the second"
        yield ("data.min_clip_seconds", "data.max_mel_frames"), text
    for key, sources in (("data.train_data", data.sources), ("data.val_data", data.val_sources)):
        folders = [source.folder.resolve() for source in sources]
        for folder in {folder for folder in folders if folders.count(folder) > 1}:
            more = f", with a weight such as {folder.name}:2 for more of it" if key == "data.train_data" else ""
            yield (key,), f"{key} names {folder} more than once; name it once{more}"
    if any(source.weight != 1 for source in data.val_sources):
        yield ("data.val_data",), "data.val_data has a weight; leave it out: validation uses every clip once"


def value_of(settings: Settings, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(settings, section), name)


def with_settings(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return the settings with other values, given by canonical key."""
    for key, value in values.items():
        section, name = key.split(".")
        settings = replace(settings, **{section: replace(getattr(settings, section), **{name: value})})
    return settings


def with_values(loaded: LoadedSettings, values: Mapping[str, Any]) -> LoadedSettings:
    """Return the loaded settings with other values, as if the file had them."""
    origin: dict[str, Origin] = {**loaded.origin, **dict.fromkeys(values, "file")}
    return replace(loaded, settings=with_settings(loaded.settings, values), origin=origin)


class Parser(argparse.ArgumentParser):
    """A parser that suggests what a misspelt command, choice or flag may have been."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self._given = args or ()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Exit with the message, and with unknown flags: a flag that is missing may have been misspelt."""
        known = self._option_string_actions
        given = self._given if self._subparsers is None else ()  # most of the others belong to a subparser
        flags = dict.fromkeys(word.partition("=")[0] for word in given if word.startswith("--"))
        near = {flag: difflib.get_close_matches(flag, known, n=1) for flag in flags if flag not in known}
        hints = [f"\nunknown flag {flag}; did you mean {found[0]}?" for flag, found in near.items() if found]
        super().error(message + "".join(hints))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if advice := suggest_choice(str(value), [str(choice) for choice in action.choices or ()]):
                error.message += f"; {advice}"
            raise


def add_flags(parser: argparse.ArgumentParser, only: Collection[str] | None = None) -> None:
    """Add `--config` and the flags of all settings, or of those whose canonical keys are in `only`."""
    about = f"YAML file of settings; flags win over it [default: {DEFAULT_CONFIG_FILE} if it exists]"
    parser.add_argument("--config", type=Path, metavar="F", help=about)
    for section, about, members in _sections():
        wanted = [spec for spec in members if only is None or spec.key in only]
        if not wanted:
            continue
        group = parser.add_argument_group(f"{section} settings", about)
        for spec in wanted:
            default = {"true": "on", "false": "off"}.get(spec.default_word, spec.default_word)
            text = f"{descriptions()[spec.key]} [default: {default}]".replace("%", "%%")
            target: dict[str, Any] = {"dest": spec.key, "default": argparse.SUPPRESS}
            if spec.kind is bool:
                group.add_argument(*spec.flags, action="store_true", help=text, **target)
                text = f"Turns {spec.name} off."
                group.add_argument(*spec.off_flags, action="store_false", help=text, **target)
            else:
                action = "append" if spec.several else "store"
                group.add_argument(*spec.flags, action=action, metavar=spec.placeholder(), help=text, **target)


def flags_of(namespace: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(namespace).items() if key in specs()}


def apply_presets(
    loaded: LoadedSettings, start: tuple[str, Mapping[str, Any]] = ("", {})
) -> tuple[LoadedSettings, list[str]]:
    """Fill what the user did not choose from `start` (a source and its settings), level and preset, and say so."""
    lines: list[str] = []
    loaded = _filled(loaded, *start, lines)
    level, name = loaded.settings.training.optimization_level, loaded.settings.training.preset
    if not OPTIMIZATION_LEVELS[level] and loaded.is_set("training.optimization_level"):
        kernels = "; the compiler also tries many kernels" if level == "experimental" else ""
        lines.append(f"optimization level {level}: no setting is changed{kernels}")
    loaded = _filled(loaded, f"optimization level {level}", OPTIMIZATION_LEVELS[level], lines)
    if name is not None:
        loaded = _filled(loaded, f"preset {name}", PRESETS[CARDS.get(name, name)], lines)
    if loaded.settings.data.train_data is None and not loaded.is_set("training.checkpoint_dir"):
        loaded = _filled(loaded, "embedded corpus", {"training.checkpoint_dir": config.DEMO_FOLDER}, lines)
    return loaded, lines


def apply_demo(loaded: LoadedSettings, *, on_gpu: bool = False) -> tuple[LoadedSettings, list[str]]:
    """Give the embedded corpus the settings of a short run, except those of the user; return lines that say so."""
    values = dict(config.DEMO_ON_GPU if on_gpu else config.DEMO)
    if loaded.settings.training.init_from is not None:
        values = {} if on_gpu else dict(config.DEMO_FINE_TUNING)
    if loaded.is_set("training.epochs"):
        values = {key: value for key, value in values.items() if not key.endswith("steps")}
    has_decoder = "decoder" in (loaded.settings.training.stages or ())
    if not has_decoder:
        values.pop("training.decoder_steps", None)
    filled = _filled(loaded, "demonstration", values, [])
    used = [key for key in values if loaded.origin[key] == "default" and filled.origin[key] == "preset"]
    listed = ", ".join(f"{specs()[key].name} {format_setting(key, values[key])}" for key in used)
    about = "No --train-data given: a short demonstration on the embedded corpus"
    lines = [about, *([f"demonstration: {listed}"] if listed else [])]
    if has_decoder and "training.decoder_steps" in used and not on_gpu:
        lines.append("A decoder needs thousands of steps, each of seconds on a CPU: this only tries it out")
    return filled, lines


def _filled(loaded: LoadedSettings, source: str, values: Mapping[str, Any], lines: list[str]) -> LoadedSettings:
    origin: dict[str, Origin] = dict(loaded.origin)
    used = {}
    for key, value in values.items():
        own, default = value_of(loaded.settings, key), specs()[key].default
        stays = f"{source}: {key} stays {format_setting(key, own)}"
        if origin[key] == "file" and own == value:
            continue
        if origin[key] in ("file", "flag"):
            place = loaded.config_file if origin[key] == "file" else f"flag {specs()[key].flag_for(own)}"
            lines.append(f"{stays} ({place})")
        elif source == "demonstration" and origin[key] == "preset":
            lines.append(f"{stays} (set by a preset)")
        elif key in config.FINE_TUNING_KEYS and loaded.settings.training.init_from is None:
            lines.append(f"{stays} (only for fine-tuning: with --init-from)")
        else:
            used[key], origin[key] = value, "preset"
            was = "the default" if value == default else f"default {specs()[key].default_word}"
            lines.append(f"{source}: {key} = {format_setting(key, value)} ({was})")
    return replace(loaded, settings=with_settings(loaded.settings, used), origin=origin)


_CONFIG_HEADER = """\
# Settings of MyXTTS: every key with its default, switched off by a #. Remove the # to set a key.
# What is set here holds: no preset changes it, only a flag on the command line wins over it.
# This file is generated from myxtts/config.py (make docs).
"""


def to_yaml(settings: Settings, *, comments: bool = False) -> str:
    """Return the settings as a YAML file that loads back to equal settings.

    With `comments` every key has its description, and keys at their default are commented out.
    """
    lines = [_CONFIG_HEADER] if comments else []
    for section, about, members in _sections():
        lines += [f"# {about}"] if comments else []
        lines.append(f"{section}:")
        for spec in members:
            value = value_of(settings, spec.key)
            off = "#" if comments and value == spec.default else ""
            setting = f"  {off}{spec.name}: {spec.default_word if off else format_setting(spec.key, value)}"
            description = textwrap.wrap(_described(spec), 104, break_on_hyphens=False)
            lines += [*(f"  # {line}" for line in description), setting, ""] if comments else [setting]
    return "\n".join(lines if comments else [*lines, ""])


def _described(spec: Spec) -> str:
    """The description, with accepted values where the default does not show them, and other names."""
    parts = [] if spec.kind in (bool, Path) else [spec.expected()]
    parts += [f"also accepted as {alias}" for alias in spec.aliases]
    return descriptions()[spec.key] + (f" ({'; '.join(parts).capitalize()}.)" if parts else "")


def render_docs(page: str) -> str:
    """Return `docs/configuration.md` with its introduction, and a current table for each section."""
    lines = [page.partition("\n## ")[0]]
    for section, about, members in _sections():
        lines += [f"## `{section}`", "", about, "", "| key | flag | default | meaning |", "|---|---|---|---|"]
        for spec in members:
            flags = [f"`{flag} {spec.placeholder()}".rstrip() + "`" for flag in spec.flags + spec.off_flags]
            lines.append(f"| `{spec.name}` | {'<br>'.join(flags)} | `{spec.default_word}` | {_described(spec)} |")
        lines.append("")
    names = ", ".join(f"`{code}` {name}" for code, name in LANGUAGE_NAMES.items())
    return "\n".join([*lines, "## Languages", "", names + ".", ""])


def patched(text: str, values: Mapping[str, Any]) -> str:
    """Return the text of a YAML file with these settings changed or added, and everything else as it was.

    A setting that is commented out, as in the shipped file, is switched on where it stands.
    Only the characters of the values are replaced, at the positions that the parser reports: a round trip through
    ruamel's tree would change spaces, line ends and `null` in other lines and move comments.
    """
    from ruamel.yaml import YAML

    line_end = "\r\n" if "\r\n" in text else "\n"
    text += line_end if text and not text.endswith("\n") else ""
    edits: list[tuple[int, int, str]] = []
    missing = dict(values)
    sections = {key.value: (key, body) for key, body in _pairs(YAML(typ="safe", pure=True).compose(text))}
    for section, (_, body) in sections.items():
        for name, node in _pairs(body):
            if (key := canonical().get(f"{section}.{name.value}", "")) in values:
                missing.pop(key, None)
                start, end, new = node.start_mark.index, node.end_mark.index, format_setting(key, values[key])
                if start == end:  # an empty value, for which the parser reports the start of what follows
                    start = end = text.find(":", name.end_mark.index) + 1
                    new = f" {new}"
                edits.append((start, end, new))
    for section in {key.partition(".")[0] for key in missing}:
        heading, body = sections.get(section, (None, None))
        indent = " " * _pairs(body)[0][0].start_mark.column if _pairs(body) else "  "
        lines = []
        for name, value in [(key.partition(".")[2], missing[key]) for key in missing if key.startswith(section)]:
            line = f"{name}: {format_setting(f'{section}.{name}', value)}"
            off = re.compile(rf"^ +#(?={name}:)[^\r\n]*", re.MULTILINE)
            if heading is not None and (found := off.search(text, heading.end_mark.index)):
                edits.append((*found.span(), found[0].partition("#")[0] + line))
            else:
                lines.append(f"{indent}{line}{line_end}")
        place = len(text) if heading is None else text.find("\n", heading.end_mark.index) + 1
        start_of_section = f"{line_end if text else ''}{section}:{line_end}" if heading is None else ""
        edits.append((place, place, "".join([start_of_section, *lines])))
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def apply_patch(loaded: LoadedSettings, values: Mapping[str, Any]) -> tuple[Path, Path | None]:
    """Write these settings, unless others would change too; return the file, and the backup of an old one."""
    path = (loaded.config_file or DEFAULT_CONFIG_FILE).expanduser().resolve()
    before = path.read_bytes() if path.exists() else b""
    backups = (path.with_name(f"{path.name}.bak{number or ''}") for number in range(1000))
    backup = next(place for place in backups if not place.exists()) if before else None

    def write(draft: Path) -> None:
        was = apply_presets(load(path if before else None, {}))[0].settings
        draft.write_bytes(patched(before.decode("utf-8"), values).encode())
        now, wanted = apply_presets(load(draft, {}))[0].settings, with_settings(was, values)
        if wrong := [key for key in specs() if value_of(now, key) != value_of(wanted, key)]:
            raise ConfigError(f"{', '.join(wrong)} would have another value")
        if backup is not None:
            shutil.copymode(path, draft)
            shutil.copy2(path, backup)

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_atomically(path, write)
    except (ConfigError, UnicodeDecodeError) as error:
        listed = ", ".join(f"{key}: {format_setting(key, value)}" for key, value in values.items())
        raise ConfigError(f"{path}: nothing was written ({error}). Enter by hand: {listed}") from None
    return path, backup


if __name__ == "__main__":
    DEFAULT_CONFIG_FILE.write_text(to_yaml(Settings(), comments=True), encoding="utf-8")
    page = Path("docs/configuration.md")
    page.write_text(render_docs(page.read_text(encoding="utf-8")), encoding="utf-8")
