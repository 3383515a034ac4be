"""The part of the report page that shows an evaluation: how well the run speaks, against the recordings.

Knows the file `scores.json` of `myxtts evaluate` and no more; what in it is damaged or missing is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from myxtts.observe.history import number, percent, short

Record = Mapping[str, Any]

RECORDING, SYNTHESISED = "recording", "synthesised"
NUM_WORST, NUM_COLOURS = 3, 4
WORST_MOS, BEST_MOS = 1, 5
_MARK_WIDTH = 0.006
"""Of a clip's mark, as a share of the axis."""


class _Mark(NamedTuple):
    """A stretch of a row, in shares of the axis."""

    start: float
    width: float
    colour: str
    tip: str = ""


def evaluation(scores: Record) -> str:
    """The section's HTML; "" if nothing was judged."""
    summary = _mapping(scores.get("summary"))
    rows = {str(name): row for name, row in summary.items() if isinstance(row, Mapping)}
    if not rows:
        return ""
    clips = [clip for clip in _sequence(scores.get("clips")) if isinstance(clip, Mapping)]
    same_from = number(scores.get("same_speaker_from"))
    charts = [
        _bars("Words misheard", "WER, 1 is all of them; grey: the recordings", "wer", rows, 0, 1),
        _bars("Letters misheard", "CER, 1 is all of them; grey: the recordings", "cer", rows, 0, 1),
        _similarities(rows, clips, same_from),
        _bars("Quality", "MOS, 5 is excellent; grey: the recordings", "mos", rows, WORST_MOS, BEST_MOS),
    ]
    return (
        f"<p class=sentence>{escape(str(scores.get('reading') or ''))}</p>{_table(rows, same_from)}"
        f"<div class=grid2>{''.join(charts)}</div>{_worst(clips)}{_note(scores)}"
    )


def _table(rows: Mapping[str, Record], same_from: float) -> str:
    above = f"Above {short(same_from)}" if math.isfinite(same_from) else "Same speaker"
    head = "".join(f"<th>{name}</th>" for name in ("", "Clips", "WER", "CER", "Similarity", "MOS", above))
    body = ""
    for name, row in rows.items():
        scores = [_score(number(row.get(key))) for key in ("wer", "cer", "similarity", "mos")]
        share = percent(number(row.get("same_speaker_share")))
        cells = [short(number(row.get("clips"))), *scores, share]
        body += f"<tr><th>{escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    return f"<div class=scroll><table><tr>{head}</tr>{body}</table></div>"


def _bars(title: str, unit: str, key: str, rows: Mapping[str, Record], low: int, high: int) -> str:
    """A bar for each set, and on each a mark where the recordings are."""
    values = {name: number(row.get(key)) for name, row in rows.items()}
    known = {name: value for name, value in values.items() if math.isfinite(value)}
    if not known:
        return ""
    shares = {name: min(max((value - low) / (high - low), 0.0), 1.0) for name, value in known.items()}
    lanes = []
    for place, (name, value) in enumerate(known.items()):
        marks = [_Mark(0, shares[name], f"c{place % NUM_COLOURS + 1}")]
        if RECORDING in shares and name != RECORDING:
            marks.append(_Mark(shares[RECORDING], _MARK_WIDTH, "c6", "the recordings"))
        lanes.append((f"{name} {_score(value)}", marks))
    return _lanes(title, unit, lanes, low, high)


def _similarities(rows: Mapping[str, Record], clips: Sequence[Record], same_from: float) -> str:
    """A mark for each clip at its similarity, and one where two voices begin to count as one."""
    lanes = []
    for place, name in enumerate(rows):
        found = [number(clip.get("similarity")) for clip in clips if clip.get("set") == name]
        known = [value for value in found if math.isfinite(value)]
        if known:
            colour = f"c{place % NUM_COLOURS + 1}"
            marks = [_Mark(min(max(value, 0.0), 1.0), _MARK_WIDTH, colour, f"{value:.2f}") for value in known]
            if math.isfinite(same_from):
                marks.insert(0, _Mark(same_from, _MARK_WIDTH / 2, "c6", "taken for the same speaker from here on"))
            lanes.append((f"{name} {_score(sum(known) / len(known))}", marks))
    unit = f"of each clip; grey: {short(same_from)}, from which on two voices are taken for one"
    return _lanes("Similarity to the speaker", unit, lanes, 0, 1) if lanes else ""


def _lanes(title: str, unit: str, lanes: Sequence[tuple[str, Sequence[_Mark]]], low: int, high: int) -> str:
    drawn = ""
    for name, marks in lanes:
        bars = "".join(
            f"<i class={mark.colour} style='left:{100 * mark.start:.1f}%;width:{100 * mark.width:.1f}%'"
            f" title='{escape(mark.tip, quote=True)}'></i>"
            for mark in marks
        )
        drawn += f"<div class=lane><span class=who>{escape(name)}</span><div class=bars>{bars}</div></div>"
    num_steps = 5 if high - low == 1 else high - low
    values = [low + (high - low) * step / num_steps for step in range(num_steps + 1)]
    ticks = "".join(
        f"<span style='left:{100 * (value - low) / (high - low):g}%'>{value:g}</span>" for value in values
    )
    axis = f"<div class=lane><span class=who></span><div class=xs>{ticks}</div></div>"
    head = f"<figcaption><b>{escape(title)}</b> <span class=unit>{escape(unit)}</span></figcaption>"
    return f"<figure>{head}<div class=lanes>{drawn}{axis}</div></figure>"


def _worst(clips: Sequence[Record]) -> str:
    """The sentences that were understood least, with what was heard instead."""
    spoken = [clip for clip in clips if clip.get("set") == SYNTHESISED and math.isfinite(number(clip.get("wer")))]
    spoken.sort(key=lambda clip: (-number(clip["wer"]), str(clip.get("clip"))))
    articles = ""
    for clip in [clip for clip in spoken if number(clip["wer"]) > 0][:NUM_WORST]:
        trouble = f", {escape(str(clip['trouble']))}" if clip.get("trouble") else ""
        articles += (
            f"<article><p><b dir=auto>{escape(str(clip.get('text') or ''))}</b></p>"
            f"<p>Heard: <span dir=auto>{escape(str(clip.get('heard') or 'nothing'))}</span></p>"
            f"<p class=note>WER {_score(number(clip['wer']))}{trouble} · "
            f"<code>{escape(str(clip.get('file') or ''))}</code></p></article>"
        )
    return f"<h3>Worst understood</h3>{articles}" if articles else ""


def _note(scores: Record) -> str:
    about = _mapping(scores.get("about"))
    steps = ", ".join(f"{stage} {step} steps" for stage, step in _mapping(about.get("steps")).items())
    facts = {
        "Judges": ", ".join(str(judge) for judge in _sequence(scores.get("judges"))),
        "vocoder": about.get("vocoder"),
        "seed": about.get("seed"),
        "temperature": about.get("temperature"),
        "guidance": about.get("guidance"),
        "central codes": "yes" if about.get("central") else None,
        "synthesised": about.get("made_at"),
        "of": steps,
    }
    told = " · ".join(f"{name} {escape(str(fact))}" for name, fact in facts.items() if fact not in (None, ""))
    return f"<p class=note>{told}</p>" if told else ""


def _score(value: float) -> str:
    return f"{value:.2f}".replace("-", "−") if math.isfinite(value) else "–"


def _mapping(value: object) -> Record:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()
