"""Settings tried one after another, each on top of what has helped so far, within a time.

Keeps the account: what was measured, what was changed and by how much that helped, what was left alone and why.
Does not know what is worth trying, nor how a configuration is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from myxtts.devices import Machine
from myxtts.observe.findings import Finding
from myxtts.settings import Loaded, presets
from myxtts.settings.values import shown
from myxtts.tools.config_patch import value_of, with_values
from myxtts.tools.trial import Measure, Refused, Trial

LEAST_GAIN_GPU, LEAST_GAIN_CPU = 1.03, 1.1
"""What a change must bring to be kept: less may be chance, the more so where training shares its cores."""
MEMORY_SHARE = 0.85
"""Of a card or its cap that training may take: validation and other programs need the rest."""


@dataclass(frozen=True)
class Change:
    """One setting to change."""

    setting: str
    old: Any
    new: Any
    gain_measured: float | None
    """Speed with it as a multiple of that with the changes before it; None where nothing was measured before."""
    why: str


@dataclass
class Tuning:
    """What was found."""

    changes: list[Change] = field(default_factory=list)
    before: Trial | None = None
    """None when the configuration could not be trained."""
    after: Trial | None = None
    largest_batch: int | None = None
    """The largest that fits; None when none was tried that does not."""
    advice: list[Finding] = field(default_factory=list)
    """What is no setting, or was only reckoned."""
    notes: list[str] = field(default_factory=list)
    """What was left alone, and why."""
    num_trials: int = 0
    minutes: float = 0.0

    @property
    def gain(self) -> float | None:
        """Of all changes together, as measured."""
        return self.after.clips_per_s / self.before.clips_per_s if self.before and self.after else None

    @property
    def values(self) -> dict[str, Any]:
        """The settings to write."""
        return {change.setting: change.new for change in self.changes}

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"gain": self.gain, "values": self.values}


class OutOfTime(Exception):
    """No trial more fits into the time given."""


class Experiment:
    """The settings so far, and the speed they reach."""

    def __init__(
        self, loaded: Loaded, measure: Measure, machine: Machine, ends_at: float, say: Callable[[str], None]
    ) -> None:
        self.loaded, self.machine, self.found = loaded, machine, Tuning()
        self.refusal: Refused | None = None
        """Why the last trial failed, if it did."""
        self._measure, self._ends_at, self._say = measure, ends_at, say
        self._longest_s = 0.0

    @property
    def least_gain(self) -> float:
        """What a change must bring on this machine."""
        return LEAST_GAIN_GPU if self.machine.gpus else LEAST_GAIN_CPU

    @property
    def best(self) -> Trial:
        """With the settings so far."""
        assert self.found.after is not None
        return self.found.after

    def value(self, key: str) -> Any:
        """A setting as it is so far."""
        return value_of(self.loaded, key)

    def attempt(self, values: Mapping[str, Any]) -> Trial | None:
        """Measure the settings so far with these values; None if they cannot be trained, see `refusal`."""
        started_at = time.monotonic()
        if started_at + self._longest_s > self._ends_at:
            raise OutOfTime
        candidate = with_values(self.loaded, values)
        described = _listed(values) or "the present settings"
        self.found.num_trials += 1
        self.refusal = None
        try:
            trial = self._measure(candidate)
            self._check_memory(candidate, trial)
        except Refused as refusal:
            if time.monotonic() >= self._ends_at:
                raise OutOfTime from None
            self.refusal = refusal
            self._say(f"{described}: {str(refusal).splitlines()[0]}")
            return None
        self._longest_s = max(self._longest_s, time.monotonic() - started_at)
        self._say(f"{described}: {trial.clips_per_s:.1f} clips/s")
        return trial

    def begin(self) -> bool:
        """Measure the present settings; False if they cannot be trained."""
        self.found.before = self.found.after = self.attempt({})
        return self.found.before is not None

    def keep(self, values: Mapping[str, Any], trial: Trial, why: str) -> None:
        """Go on with these values. What a level implies is changed with the level and not listed."""
        best = self.found.after
        gain = trial.clips_per_s / best.clips_per_s if best is not None else None
        for key, value in values.items():
            is_implied = self.loaded.origin[key] == "preset" and key in presets.bundle("basic")
            if self.value(key) != value and not is_implied:
                self.found.changes.append(Change(key, self.value(key), value, gain, why))
                gain, why = None, "belongs to the line above"
        self.loaded, self.found.after = with_values(self.loaded, values), trial

    def keep_if_faster(self, values: Mapping[str, Any], why: str) -> Trial | None:
        """Try values, and go on with them if they help; their trial, if they can be trained."""
        trial = self.attempt(values)
        self.found.notes = [note for note in self.found.notes if not note.startswith(f"{_listed(values)} ")]
        if trial is not None and trial.clips_per_s >= self.least_gain * self.best.clips_per_s:
            self.keep(values, trial, why)
        elif trial is not None:
            self.note(f"{_listed(values)} would be {trial.clips_per_s / self.best.clips_per_s:.2f}× as fast")
        else:
            self.note(f"{_listed(values)} is not possible here: {str(self.refusal).splitlines()[0]}")
        return trial

    def note(self, text: str) -> None:
        """Say what was left alone, and why."""
        self.found.notes.append(text)

    def _check_memory(self, candidate: Loaded, trial: Trial) -> None:
        data = candidate.settings.data
        cards = {gpu.index: gpu.memory_mb for gpu in self.machine.gpus}
        for role, used_mb in trial.memory_mb.items():
            index, cap = data.model_gpu, data.model_gpu_memory
            if role == "data":
                index, cap = data.data_gpu, data.data_gpu_memory
            limit = cards.get(index or 0, cap)
            if data.enable_memory_isolation:
                limit = min(limit, cap)
            if used_mb > MEMORY_SHARE * limit:
                spared = f"{100 - 100 * MEMORY_SHARE:.0f} % are kept free for validation and other programs"
                raise Refused(f"it takes {used_mb:.0f} of {limit} MB, and {spared}", out_of_memory=True)


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {shown(value)}" for key, value in values.items())
