"""What a person's edits do to clips: texts, languages, speakers, decisions, and cuts.

Each edit is computed from the clips it was based on and made with `Catalog.apply`, which journals it. Audio is cut
by a function of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from myxtts.audio import UnusableAudio
from myxtts.collect.catalog import THRESHOLDS, TOLERANCE_S, Catalog, Cut, Edit, Segment, one_line
from myxtts.config import LANGUAGES
from myxtts.errors import ConfigError, DatasetError

SHORTEST_S, LONGEST_S = 0.2, 60.0
"""Limits of a clip that a person cuts; filters decide what is used of these."""
MAX_CHARACTERS = 2000
_ARGUMENTS = {"id", "value", "old", "new", "first", "second", "at", "start", "end"}


@dataclass
class _Plan:
    """The clips that an edit changes, removes and adds, and those it is based on."""

    updated: dict[int, dict[str, Any]] = field(default_factory=dict)
    removed: list[int] = field(default_factory=list)
    added: list[Segment] = field(default_factory=list)
    based_on: list[Segment] = field(default_factory=list)


def edit(
    catalog: Catalog,
    action: str,
    arguments: Mapping[str, Any],
    cut: Cut,
    versions: Mapping[int, int] | None = None,
) -> Edit | None:
    """Make one of `ACTIONS`; returns None if it changes nothing.

    `versions` are those of the clips that the person saw: if one has changed since, StaleEdit is raised.
    """
    if action not in ACTIONS:
        raise ConfigError(f"Unknown edit {action!r}; expected one of {', '.join(ACTIONS)}")
    if unknown := arguments.keys() - _ARGUMENTS:
        raise ConfigError(f"Unknown arguments for {action}: {', '.join(sorted(map(repr, unknown)))}")
    try:
        plan = ACTIONS[action](catalog, cut, **arguments)
    except TypeError as error:
        raise ConfigError(f"Wrong arguments for {action}: {error}") from error
    seen = {segment.id: segment.version for segment in plan.based_on} | dict(versions or {})
    return catalog.apply(
        action, arguments, updated=plan.updated, removed=plan.removed, added=plan.added, versions=seen
    )


def _set(catalog: Catalog, _: Cut, *, name: str, id: int, value: str) -> _Plan:
    segment, value = catalog.segment(id), one_line(_text(value))
    if name == "language" and value not in LANGUAGES:
        raise ConfigError(f"Unknown language {value!r}; expected one of {', '.join(LANGUAGES)}")
    changed: dict[str, Any] = {name: value, "edited": _with(segment, name)}
    if name == "text":
        changed["origin"] = "person"
    return _Plan({id: changed} if getattr(segment, name) != value else {}, based_on=[segment])


def _decide(catalog: Catalog, _: Cut, *, decision: str, id: int) -> _Plan:
    return _Plan({id: {"decision": decision}}, based_on=[catalog.segment(id)])


def _rename_speaker(catalog: Catalog, _: Cut, *, old: str, new: str) -> _Plan:
    new = one_line(_text(new))
    renamed = [segment for segment in catalog.segments() if segment.speaker == old]
    changes = {item.id: {"speaker": new, "edited": _with(item, "speaker")} for item in renamed if new != old}
    return _Plan(changes, based_on=renamed)


def _merge(catalog: Catalog, cut: Cut, *, first: int, second: int) -> _Plan:
    left, right = catalog.segment(first), catalog.segment(second)
    row = _row(catalog, left)
    if right not in row or row.index(right) != row.index(left) + 1:
        raise ConfigError("Only a clip and the one that follows it in the same recording can be merged.")
    joined = {name: f"{getattr(left, name)} {getattr(right, name)}".strip() for name in ("text", "heard")}
    changes = {
        **_recut(catalog, cut, replace(left, scores=_joint_scores(left, right)), left.start, right.end),
        **joined,
        "speaker": left.speaker or right.speaker,
        "language": left.language or right.language,
        "notes": {**right.notes, **left.notes},
        "flags": tuple(dict.fromkeys((*left.flags, *right.flags))),
        "decision": left.decision if left.decision == right.decision else "",
        "edited": _with(left, *right.edited, "text", "cut"),
    }
    return _Plan({first: changes}, removed=[second], based_on=[left, right])


def _split(catalog: Catalog, cut: Cut, *, id: int, at: float) -> _Plan:
    segment, at = catalog.segment(id), _number(at)
    if not segment.start + SHORTEST_S <= at <= segment.end - SHORTEST_S:
        raise ConfigError(f"A part of less than {SHORTEST_S} s would be left: split further from the ends.")
    texts, heard = (
        _divided(text, (at - segment.start) / segment.seconds) for text in (segment.text, segment.heard)
    )
    edited = {"edited": _with(segment, "text", "cut")}
    left, right = (
        {**_recut(catalog, cut, segment, *times), **edited, "text": texts[part], "heard": heard[part]}
        for part, times in enumerate(((segment.start, at), (at, segment.end)))
    )
    return _Plan({id: left}, added=[replace(segment, id=0, **right)], based_on=[segment])


def _move(catalog: Catalog, cut: Cut, *, id: int, start: float, end: float) -> _Plan:
    """Change the times of a clip; a neighbour that it reaches into is cut shorter."""
    segment, start, end = catalog.segment(id), _number(start), _number(end)
    source = catalog.source(segment.source)
    total = source.seconds
    if source.state == "new" and end > source.done_until[segment.channel] + TOLERANCE_S:
        raise ConfigError("This recording is still being collected: move this cut when all of it is heard.")
    if start < 0 or end > total + TOLERANCE_S:
        raise ConfigError(f"The recording has {total:.3f} s; {start:.3f} s to {end:.3f} s is not in it.")
    plan = _Plan({id: _recut(catalog, cut, segment, start, end)}, based_on=[segment])
    for other in _row(catalog, segment):
        if other.id == id or other.end <= start + TOLERANCE_S or other.start >= end - TOLERANCE_S:
            continue
        times = (other.start, start) if other.start < segment.start else (end, other.end)
        if times[1] - times[0] < SHORTEST_S:
            raise ConfigError("Too little would be left of the neighbouring clip: merge the two instead.")
        plan.updated[other.id] = _recut(catalog, cut, other, *times)
        plan.based_on.append(other)
    return plan


def _recut(catalog: Catalog, cut: Cut, segment: Segment, start: float, end: float) -> dict[str, Any]:
    """Cut a clip's audio again and return its changed fields; a clip that stays the same is not cut."""
    if abs(start - segment.start) < TOLERANCE_S and abs(end - segment.end) < TOLERANCE_S:
        return {}
    if not SHORTEST_S <= end - start <= LONGEST_S:
        limits = f"{SHORTEST_S:g} to {LONGEST_S:g} s"
        raise ConfigError(f"The clip would have {end - start:.2f} s; expected {limits}.")
    source, gain_db = catalog.source(segment.source), segment.scores.get("gain_db", 0.0)
    try:
        audio = cut(source, segment.channel, start, end, gain_db)
    except (OSError, RuntimeError, ValueError, UnusableAudio) as error:
        raise DatasetError(f"{source.path} cannot be cut again: {error or type(error).__name__}") from error
    return {
        "start": start,
        "end": end,
        "audio": audio,
        "scores": {**segment.scores, "seconds": end - start},
        "edited": _with(segment, "cut"),
    }


def _row(catalog: Catalog, segment: Segment) -> list[Segment]:
    return [other for other in catalog.segments(segment.source) if other.channel == segment.channel]


def _joint_scores(left: Segment, right: Segment) -> dict[str, float]:
    """Return the worse of the two scores where a filter reads them, or their mean, weighted by length."""
    share = left.seconds / (left.seconds + right.seconds)
    worse = {rule.score: max if rule.is_maximum else min for rule in THRESHOLDS.values()}
    both = {**right.scores, **left.scores}
    for name in left.scores.keys() & right.scores.keys():
        one, other = left.scores[name], right.scores[name]
        both[name] = worse[name](one, other) if name in worse else share * one + (1 - share) * other
    return both


def _divided(text: str, share: float) -> tuple[str, str]:
    """Split a text between the two words nearest to a share of its characters."""
    spaces = [at for at, letter in enumerate(text) if letter == " "]
    at = min([0, *spaces, len(text)], key=lambda at: abs(at - share * len(text)))
    return text[:at].strip(), text[at:].strip()


def _with(segment: Segment, *names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*segment.edited, *names)))


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_CHARACTERS:
        raise ConfigError(f"Expected a text of at most {MAX_CHARACTERS} characters.")
    return value


def _number(value: object) -> float:
    """Return a time in whole milliseconds, as the names of clips have it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e9 < value < 1e9:
        raise ConfigError(f"Expected a number of seconds, found {value!r}.")
    return round(float(value), 3)


ACTIONS: Mapping[str, Callable[..., _Plan]] = {
    "set_text": partial(_set, name="text"),
    "set_language": partial(_set, name="language"),
    "set_speaker": partial(_set, name="speaker"),
    "keep": partial(_decide, decision="keep"),
    "reject": partial(_decide, decision="reject"),
    "clear_decision": partial(_decide, decision=""),
    "rename_speaker": _rename_speaker,
    "merge": _merge,
    "split": _split,
    "move": _move,
}
"""The edits by name. All take the id of a clip, except rename_speaker (old, new) and merge (first, second)."""
