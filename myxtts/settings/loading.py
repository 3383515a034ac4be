"""Defaults, then the YAML file, then the flags: merged, checked, and every problem reported in one error.

Does not look at the machine: whether a folder exists or a GPU is present is for those who use it to say.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from myxtts.config import HOP_SAMPLES, SAMPLE_RATE, Settings
from myxtts.errors import ConfigError
from myxtts.settings.nearest import unknown_arguments, unknown_key
from myxtts.settings.table import canonical, specs
from myxtts.settings.values import Unfit, converted, shown
from myxtts.settings.yaml_file import Entry, read_entries

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
