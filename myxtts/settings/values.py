"""One value: from what a user wrote to what a setting accepts, or the words that say why not.

Knows a setting's row of the table; neither files nor flags, nor any other setting.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from myxtts.settings.nearest import suggestion
from myxtts.settings.table import Spec, expected

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


def plain(value: Any) -> str:
    """A value as a user types it after a flag; switches are on or off."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return ",".join(value) if isinstance(value, tuple) else str(value)
