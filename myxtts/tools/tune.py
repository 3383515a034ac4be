"""Better settings for this machine, found by measuring: every change has been trained with before it is proposed.

What is tried, in this order: a batch that fits at all, the switches that are off, workers and buffers, larger
batches, gradient checkpointing, one or two GPUs. Measures nothing itself (`trial`), and writes nothing
(`config_patch`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

from myxtts.config import OPTIMIZATION_LEVELS
from myxtts.data.clips import PreparedCorpus
from myxtts.devices import Machine
from myxtts.errors import PipelineError
from myxtts.host import usable_cores
from myxtts.observe.findings import Finding
from myxtts.pipeline.feed import MOST_GATHERERS
from myxtts.run_dir import RunDir
from myxtts.settings import LoadedSettings, format_setting, specs, value_of, with_values
from myxtts.tools.dry_run import Refused, Trial, try_out_apart

Measure = Callable[[LoadedSettings], Trial]
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
        self,
        loaded: LoadedSettings,
        measure: Measure,
        machine: Machine,
        ends_at: float,
        say: Callable[[str], None],
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
        return value_of(self.loaded.settings, key)

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
            is_implied = self.loaded.origin[key] == "preset" and key in OPTIMIZATION_LEVELS["basic"]
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

    def _check_memory(self, candidate: LoadedSettings, trial: Trial) -> None:
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
    return ", ".join(f"{key} {format_setting(key, value)}" for key, value in values.items())


GPU_STEPS, CPU_STEPS = 40, 4
"""Steps of a trial behind its warm-up."""
MAX_BATCH_GPU, MAX_BATCH_CPU = 512, 32
DDP_EFFICIENCY = 0.95
"""Of its speed alone that each of several GPUs reaches: the rest goes into exchanging gradients."""
BATCH, ACCUMULATE = "data.batch_size", "training.gradient_accumulation_steps"
WORKERS, CHECKPOINTING = "data.num_workers", "model.gradient_checkpointing"
DATA_GPU, MODEL_GPU = "data.data_gpu", "data.model_gpu"
BUFFERS = ("data.prefetch_buffer_size", "data.pipeline_buffer_size")
LEVEL = "training.optimization_level"


class Switch(NamedTuple):
    """A setting that is on or off."""

    value: bool
    """What it should be."""
    needs_gpu: bool
    """Whether only a GPU makes it matter."""
    why: str
    """It helps."""


SWITCHES: Mapping[str, Switch] = {
    "training.enable_eager_debug": Switch(False, False, "checking every operation is slow on purpose"),
    "data.native_loading": Switch(
        True, False, "batches come from the packed cache instead of being decoded each time"
    ),
    "data.pad_to_fixed_length": Switch(True, False, "equal shapes are compiled once and launched as one graph"),
    "training.enable_graph_mode": Switch(True, True, "the step is launched as one graph"),
    "training.enable_xla_compilation": Switch(True, True, "compiled kernels read and write memory less often"),
    "data.mixed_precision": Switch(True, True, "bf16 uses the GPU's tensor cores"),
    "data.prefetch_to_gpu": Switch(True, False, "batches are prepared while the model trains"),
    "data.enhanced_gpu_prefetch": Switch(True, True, "copies from pinned memory run beside computation"),
    "data.optimize_cpu_gpu_overlap": Switch(True, True, "the data role works beside the training step"),
}
"""In this order, for what products cost does not show while the host is still busy launching them."""
CODES = {
    "tune-several-gpus": "More GPUs than are used: what training on all of them with torchrun would bring.",
    "tune-second-gpu": "What a second GPU would bring, reckoned from the measured times of the stages.",
    "tune-feed-bound": "Batches still come too slowly when everything that can be set has been tried.",
}
"""What each advice means."""


def tune(
    loaded: LoadedSettings,
    prepared: PreparedCorpus,
    *,
    stage: str = "gpt",
    minutes: float = 10.0,
    max_batch: int | None = None,
    machine: Machine | None = None,
    measure: Measure | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Tuning:
    """Search for at most so many minutes, from settings with their presets applied; `say` hears of each trial."""
    machine = Machine.look() if machine is None else machine
    started_at = time.monotonic()
    ends_at = started_at + 60 * minutes
    if measure is None:
        measure = partial(_measure_until, ends_at, stage, GPU_STEPS if machine.gpus else CPU_STEPS)
    most = max_batch or (MAX_BATCH_GPU if machine.gpus else MAX_BATCH_CPU)
    experiment = Experiment(loaded, measure, machine, ends_at, say)
    _search(experiment, _BatchSearch(experiment, min(most, len(prepared.train))))
    experiment.found.minutes = (time.monotonic() - started_at) / 60
    return experiment.found


def _measure_until(ends_at: float, stage: str, num_steps: int, loaded: LoadedSettings) -> Trial:
    return try_out_apart(loaded.settings, stage, num_steps, max(ends_at - time.monotonic(), 1.0))


def _search(experiment: Experiment, batch: _BatchSearch) -> None:
    single = None
    try:
        if not experiment.begin():
            batch.shrink()
        _try_switches(experiment)
        _try_feed(experiment)
        if batch.grow():
            _try_feed(experiment)
        if experiment.value(CHECKPOINTING):
            experiment.keep_if_faster({CHECKPOINTING: False}, "the batch fits without recomputing activations")
        single = _try_roles(experiment)
    except OutOfTime:
        if experiment.found.after is None:
            raise PipelineError("The time was over before anything was measured; give more --minutes") from None
        experiment.note("The time was over before everything was tried: give more --minutes")
    if single is None and experiment.value(DATA_GPU) is None:
        single = experiment.best
    _advise(experiment, single)


def _try_switches(experiment: Experiment) -> None:
    on_gpu = bool(experiment.machine.gpus)
    level = experiment.value(LEVEL)
    if level == "basic" and on_gpu:
        values = {LEVEL: "enhanced"} | {key: specs()[key].default for key in OPTIMIZATION_LEVELS[level]}
        experiment.keep_if_faster(values, "the step is compiled and launched as one graph")
    refused_beside: dict[str, LoadedSettings] = {}
    while off := [
        key
        for key, switch in SWITCHES.items()
        if (on_gpu or not switch.needs_gpu)
        and experiment.value(key) != switch.value
        and refused_beside.get(key) is not experiment.loaded  # beside others it may help
    ]:
        for key in off:
            if refused_beside.get(key) is not experiment.loaded:
                experiment.keep_if_faster({key: SWITCHES[key].value}, SWITCHES[key].why)
                refused_beside[key] = experiment.loaded


def _try_feed(experiment: Experiment) -> None:
    """Workers and buffers, if batches come too late."""
    if experiment.best.headspace < experiment.least_gain:
        return
    most = usable_cores()
    if experiment.value("data.native_loading"):
        most = min(most, MOST_GATHERERS)
    workers = experiment.value(WORKERS)
    for count in sorted({min(2 * workers, most), most}):
        if count > experiment.value(WORKERS):
            experiment.keep_if_faster({WORKERS: count}, "more threads gather batches")
    chosen = {key: specs()[key].default for key in BUFFERS if experiment.loaded.is_set(key)}
    if chosen and experiment.best.headspace >= experiment.least_gain:
        experiment.keep_if_faster(chosen, "left at their defaults, buffers follow the workers and the free memory")


def _try_roles(experiment: Experiment) -> Trial | None:
    """Two GPUs for the two roles, or one; what one GPU alone does, if that was measured."""
    gpus = [gpu.index for gpu in experiment.machine.gpus]
    if len(gpus) < 2:
        return experiment.best
    if experiment.value(DATA_GPU) is None:
        alone = experiment.best
        values = {DATA_GPU: gpus[0], MODEL_GPU: gpus[1]}
        experiment.keep_if_faster(values, "the data role no longer shares the GPU with the model")
        return alone
    return experiment.keep_if_faster(
        {DATA_GPU: None, MODEL_GPU: None}, "one GPU does the work of both roles faster"
    )


class _BatchSearch:
    """The batch; accumulation follows, so that the effective batch stays as near as can be."""

    def __init__(self, experiment: Experiment, largest: int) -> None:
        self._experiment, self._largest = experiment, largest
        training = experiment.loaded.settings.training
        self._effective = experiment.value(BATCH) * experiment.value(ACCUMULATE)
        self._largest_under: LoadedSettings | None = None
        """The settings of which the largest batch is known already."""
        self._is_free = training.reset_training or not RunDir(training.checkpoint_dir).has_begun
        if not self._is_free:
            experiment.note(
                f"The batch was left alone, for the run in {training.checkpoint_dir} has begun with it: give "
                "another --checkpoint-dir, or --reset-training, to tune it for a new run; a smaller --batch-size "
                "with as much more --grad-accum would go on with this one"
            )

    def shrink(self) -> None:
        """Find the largest batch that fits, because the present one does not."""
        experiment, refusal = self._experiment, self._experiment.refusal
        assert refusal is not None
        if not refusal.out_of_memory or not self._is_free:
            raise refusal
        asked = too_large = experiment.value(BATCH)
        fitting: dict[int, Trial] = {}
        while too_large > 1 and not fitting:
            trial = experiment.attempt(self._values(too_large // 2))
            if trial is None:
                too_large //= 2
            else:
                fitting[too_large // 2] = trial
        if not fitting:
            fix = "Give --gradient-checkpointing, for fine-tuning --lora-rank 16, or a smaller --model-size."
            raise PipelineError(f"Not even one clip fits. {fix}\n{refusal}")
        try:
            self._bisect(fitting, too_large)
        finally:
            size = max(fitting)
            why = f"{asked} clips do not fit: {str(refusal).splitlines()[0]}"
            experiment.keep(self._values(size), fitting[size], why)
            self._largest_under = experiment.loaded

    def grow(self) -> bool:
        """Double the batch while that helps; when one does not fit, find the largest that does."""
        experiment = self._experiment
        if not self._is_free or experiment.loaded is self._largest_under:
            return False
        start = size = experiment.value(BATCH)
        tried = {size: experiment.best}
        try:
            while size < self._largest:
                doubled = min(2 * size, self._largest)
                trial = experiment.attempt(self._values(doubled))
                if trial is None:
                    self._bisect(tried, doubled)
                    break
                tried[doubled] = trial
                if trial.clips_per_s < experiment.least_gain * tried[size].clips_per_s:
                    break
                size = doubled
        except OutOfTime:
            self._keep_fastest(start, tried)
            raise
        return self._keep_fastest(start, tried)

    def _keep_fastest(self, start: int, tried: Mapping[int, Trial]) -> bool:
        """The batch that trained most clips a second, if that is worth a change."""
        experiment = self._experiment
        size = max(tried, key=lambda size: tried[size].clips_per_s)
        if tried[size].clips_per_s < experiment.least_gain * tried[start].clips_per_s:
            if len(tried) > 1:
                experiment.note(f"The batch stays {start}: no other that was tried is faster")
            return False
        now = size * self._values(size)[ACCUMULATE]
        effect = f"stays {now}" if now == self._effective else f"becomes {now}, it was {self._effective}"
        taken = ", ".join(f"{used / 1024:.1f} GB of {role}" for role, used in tried[size].memory_mb.items())
        why = f"more clips at once use the machine better; the effective batch {effect}"
        experiment.keep(self._values(size), tried[size], why + (f"; takes {taken}" if taken else ""))
        return True

    def _bisect(self, fitting: dict[int, Trial], too_large: int) -> None:
        """Find the largest batch under one that does not fit, to an eighth; each that fits joins the others."""
        try:
            while too_large - (fits := max(fitting)) > max(1, fits // 8):
                middle = (fits + too_large) // 2
                middle -= middle % 8 if middle - middle % 8 > fits else 0
                trial = self._experiment.attempt(self._values(middle))
                if trial is None:
                    too_large = middle
                else:
                    fitting[middle] = trial
        finally:
            self._experiment.found.largest_batch = max(fitting)

    def _values(self, size: int) -> dict[str, Any]:
        return {BATCH: size, ACCUMULATE: max(1, round(self._effective / size))}


def _advise(experiment: Experiment, single: Trial | None) -> None:
    """What follows from the measured times, but is no setting or cannot be measured by one process.

    `single`: what one GPU alone does, if that was measured.
    """
    num_gpus, best, advice = len(experiment.machine.gpus), experiment.best, experiment.found.advice
    encode, train = best.stage_ms.get("encode", 0.0), best.stage_ms.get("train", 0.0)
    if num_gpus > 1 and single is not None:
        gain = DDP_EFFICIENCY * num_gpus * single.clips_per_s / best.clips_per_s
        what = f"Training on all {num_gpus} GPUs would be about {gain:.1f}× as fast as what was found."
        why = f"One GPU alone trains {single.clips_per_s:.1f} clips/s, and each can have batches of its own."
        drop = " and without --data-gpu and --model-gpu" if experiment.value(DATA_GPU) is not None else ""
        fix = f"Start with torchrun --nproc-per-node {num_gpus} train_main.py{drop}."
        if gain >= experiment.least_gain:
            advice.append(Finding("tune-several-gpus", "info", what, why, fix, gain=gain))
    elif num_gpus == 1 and train:
        gain = (train + encode) / max(train, encode)
        both = f"about {2 * DDP_EFFICIENCY:.1f}× if it trains as well"
        what = f"A second GPU would bring at most {gain:.2f}× as data GPU, {both}."
        why = f"The data role takes {encode:.1f} ms for a batch, training on it {train:.1f} ms."
        advice.append(Finding("tune-second-gpu", "info", what, why))
    if best.headspace >= experiment.least_gain:
        feed_ms = {name: best.stage_ms.get(name, 0.0) for name in ("gather", "upload", "encode", "handoff")}
        slowest = max(feed_ms, key=lambda name: feed_ms[name])
        what = f"A perfect feed would still be {best.headspace:.2f}× as fast."
        why = f"Of the feed's stages {slowest} takes longest: {feed_ms[slowest]:.1f} ms for a batch."
        fix = "See myxtts profile: it says which stage bounds, and why."
        advice.append(Finding("tune-feed-bound", "warn", what, why, fix, gain=best.headspace))
