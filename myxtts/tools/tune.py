"""`myxtts tune`: better settings for this machine, found by training with each of them.

It first applies what the rules of `check` call a fault, all at once. Then it searches, in this order: a batch that
fits at all, workers and buffers, larger batches, no gradient checkpointing, one or two GPUs. It writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from myxtts.config import OPTIMIZATION_LEVELS, most_gatherers
from myxtts.data.clips import PreparedCorpus
from myxtts.devices import Machine, make_plan
from myxtts.errors import PipelineError
from myxtts.host import usable_cores
from myxtts.observe.breakdown import DATA_PHASES
from myxtts.observe.findings import RULES, SWITCHES, Finding, Situation
from myxtts.run_dir import RunDir
from myxtts.settings import LoadedSettings, format_setting, specs, value_of, with_values
from myxtts.tools.dry_run import Refused, Trial, try_out_apart

MIN_GAIN_GPU, MIN_GAIN_CPU = 1.03, 1.1  # a smaller speedup may be chance; training on a CPU shares its cores
MAX_MEMORY_SHARE = 0.85  # of a GPU or its cap: validation and other programs need the rest
GPU_STEPS, CPU_STEPS = 40, 4  # steps of a trial after its warm-up
MAX_BATCH_GPU, MAX_BATCH_CPU = 512, 32
BATCH, ACCUMULATE = "data.batch_size", "training.gradient_accumulation_steps"
WORKERS, CHECKPOINTING = "data.num_workers", "model.gradient_checkpointing"
DATA_GPU, MODEL_GPU = "data.data_gpu", "data.model_gpu"
BUFFERS = ("data.prefetch_buffer_size", "data.pipeline_buffer_size")
LEVEL = "training.optimization_level"
FAULT_CODES = {"compilation", "native-loading", "fixed-shapes", "precision", "upload", "workers", "prefetch"}
"""The checks whose faults have one right value; the rest is a matter of measuring."""
Say = Callable[[str], None]
Measure = Callable[[LoadedSettings, int], Trial]  # settings, in so many processes


@dataclass(frozen=True)
class Change:
    setting: str
    old: Any
    new: Any
    gain_measured: float | None  # speed as a multiple of that with the changes before it; None if not measured
    why: str


@dataclass
class Tuning:
    faults: list[Finding] = field(default_factory=list)  # what `check` knows before anything is measured
    changes: list[Change] = field(default_factory=list)
    before: Trial | None = None  # None if the configuration could not be trained
    after: Trial | None = None
    all_gpus: Trial | None = None  # several GPUs that all train; None if that was not measured
    largest_batch: int | None = None  # the largest that fits; None if all that were tried fit
    advice: list[Finding] = field(default_factory=list)  # advice that is no setting, or was only estimated
    notes: list[str] = field(default_factory=list)  # settings that were not changed, and why
    num_trials: int = 0
    minutes: float = 0.0
    ran_out_of_time: bool = False

    @property
    def gain(self) -> float | None:
        return self.after.clips_per_s / self.before.clips_per_s if self.before and self.after else None

    @property
    def values(self) -> dict[str, Any]:
        return {change.setting: change.new for change in self.changes}

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"gain": self.gain, "values": self.values}


def known_faults(loaded: LoadedSettings, machine: Machine | None = None) -> list[Finding]:
    """Return what the rules call a fault of the feed or the step, with the right value; measures nothing."""
    machine = Machine.look() if machine is None else machine
    situation = Situation(settings=loaded.settings, num_gpus=len(machine.gpus), cores=usable_cores())
    rules = [rule for rule in RULES if rule.code in FAULT_CODES and rule.holds(situation)]
    found = [(rule.when is None, rule.finding(situation)) for rule in rules]
    return [fault for is_switch, fault in found if is_switch or fault.level == "fail"]


class OutOfTime(Exception):
    """No further trial fits into the time."""


class Search:
    """The best settings so far, and the speed they reach."""

    def __init__(
        self, loaded: LoadedSettings, measure: Measure, machine: Machine, ends_at: float, most_clips: int, say: Say
    ) -> None:
        self.loaded, self.machine, self.found = loaded, machine, Tuning(known_faults(loaded, machine))
        self.min_gain = MIN_GAIN_GPU if machine.gpus else MIN_GAIN_CPU
        self._measure, self._ends_at, self._most_clips, self._say = measure, ends_at, most_clips, say
        self._longest_s = 0.0
        self._refusal: Refused | None = None  # why the last trial failed, if it did
        self._effective = self.value(BATCH) * self.value(ACCUMULATE)
        self._largest_under: LoadedSettings | None = None  # the settings whose largest batch is known
        training = loaded.settings.training
        self._batch_is_free = training.reset_training or not RunDir(training.checkpoint_dir).has_begun
        if not self._batch_is_free:
            kept = f"The batch is not changed because the run in {training.checkpoint_dir} has begun with it"
            new_run = "give another --checkpoint-dir, or --reset-training, to tune it for a new run"
            this_run = "a smaller --batch-size with as much more --grad-accum would continue this one"
            self.found.notes.append(f"{kept}: {new_run}; {this_run}")
        elif not machine.gpus and loaded.settings.data.train_data is None:
            self._batch_is_free = False
            size = f"the demonstration's batch of {self.value(BATCH)} clips"
            self.found.notes.append(f"Measured with {size}, which is not changed: give --train-data")

    @property
    def best(self) -> Trial:
        assert self.found.after is not None
        return self.found.after

    def value(self, key: str) -> Any:
        return value_of(self.loaded.settings, key)

    def run(self) -> None:
        """Try everything, in the order that the top of this file names."""
        try:
            self.found.before = self.found.after = self._attempt({})
            refusal = self._refusal
            self._mend_faults()
            if self.found.after is None:
                assert refusal is not None
                self._shrink_batch(refusal)
                self._mend_faults()
            self._try_feed()
            if self._grow_batch():
                self._try_feed()
            if self.value(CHECKPOINTING):
                self._keep_if_faster({CHECKPOINTING: False}, "the batch fits without recomputing activations")
            self._try_gpus()
        except OutOfTime:
            if self.found.after is None and not self.found.changes:
                raise PipelineError("Nothing was measured before the time was over; give more --minutes") from None
            self.found.ran_out_of_time = True
            self.found.notes.append("The time was over before everything was tried: give more --minutes")
        if self.found.after is not None:
            self.found.advice = list(_advice(self))

    def _attempt(self, values: Mapping[str, Any], num_processes: int = 1) -> Trial | None:
        """Measure the best settings so far with these values; None if they cannot be trained, see `_refusal`."""
        started_at = time.monotonic()
        if started_at + self._longest_s > self._ends_at:
            raise OutOfTime
        candidate = with_values(self.loaded, values)
        described = _listed(values) or "the present settings"
        described = described if num_processes == 1 else f"torchrun with {num_processes} processes"
        self.found.num_trials += 1
        self._refusal = None
        try:
            trial = self._measure(candidate, num_processes)
            self._check_memory(candidate, trial)
        except Refused as refusal:
            if time.monotonic() >= self._ends_at:
                raise OutOfTime from None
            self._refusal = refusal
            self._say(f"{described}: {str(refusal).splitlines()[0]}")
            return None
        self._longest_s = max(self._longest_s, time.monotonic() - started_at)
        self._say(f"{described}: {trial.clips_per_s:.1f} clips/s")
        return trial

    def _check_memory(self, candidate: LoadedSettings, trial: Trial) -> None:
        plan = make_plan(candidate.settings.data, self.machine, {})
        cards = {gpu.index: gpu.memory_mb for gpu in self.machine.gpus}
        for role, used_mb in trial.memory_mb.items():
            device, cap = (plan.data, plan.data_cap_mb) if role == "data" else (plan.model, plan.model_cap_mb)
            limit = cap or cards.get(device.index)
            if limit is not None and used_mb > MAX_MEMORY_SHARE * limit:
                spared = f"{100 - 100 * MAX_MEMORY_SHARE:.0f} % are kept free for validation and other programs"
                raise Refused(f"it takes {used_mb:.0f} of {limit} MB, and {spared}", out_of_memory=True)

    def _keep(self, values: Mapping[str, Any], trial: Trial | None, whys: Mapping[str, str] | str) -> None:
        """Continue with these values, measured or not. What a level implies changes with it and is not listed."""
        best = self.found.after
        gain = trial.clips_per_s / best.clips_per_s if trial is not None and best is not None else None
        whys = {next(iter(values)): whys} if isinstance(whys, str) else whys
        remark = "" if trial is not None else "not measured"
        for key, value in values.items():
            is_implied = (
                LEVEL in values and self.loaded.origin[key] == "preset" and key in OPTIMIZATION_LEVELS["basic"]
            )
            if self.value(key) != value and not is_implied:
                why = "; ".join(filter(None, [whys.get(key, ""), remark]))
                self.found.changes.append(Change(key, self.value(key), value, gain, why))
                gain, remark = None, remark or "measured with the line above"
        self.loaded, self.found.after = with_values(self.loaded, values), trial or best

    def _keep_if_faster(self, values: Mapping[str, Any], why: str) -> Trial | None:
        """Try values, and continue with them if they help; returns their trial, if they can be trained."""
        trial, named = self._attempt(values), _listed(values)
        self.found.notes = [note for note in self.found.notes if not note.startswith(f"{named} ")]
        if trial is None:
            self.found.notes.append(f"{named} is not possible here: {str(self._refusal).splitlines()[0]}")
        elif (gain := trial.clips_per_s / self.best.clips_per_s) >= self.min_gain:
            self._keep(values, trial, why)
        else:
            self.found.notes.append(f"{named} would be {gain:.2f}× as fast")
        return trial

    def _mend_faults(self) -> None:
        """Apply everything that the rules call a fault; if that is slower, try it switch by switch."""
        values = {fault.setting: fault.value for fault in self.found.faults}
        whys = {fault.setting: fault.why for fault in self.found.faults}
        if self.value(LEVEL) == "basic" and values.keys() & OPTIMIZATION_LEVELS["basic"].keys():
            values = {LEVEL: "enhanced"} | values
            whys[LEVEL] = "the step is compiled and launched as one graph"
        if not values:
            return
        try:
            trial = self._attempt(values)
        except OutOfTime:
            self._keep(values, None, whys)
            raise
        best = self.found.after
        if trial is not None and (best is None or trial.clips_per_s * self.min_gain >= best.clips_per_s):
            self._keep(values, trial, whys)
        elif best is not None:
            self._try_switches()

    def _try_switches(self) -> None:
        """Try the switches that are off, in the order of the rules."""
        for rule in SWITCHES.values():
            if rule.is_off(self.loaded.settings) and (self.machine.gpus or not rule.gpu_only):
                self._keep_if_faster({rule.setting: rule.value}, rule.why)

    def _try_feed(self) -> None:
        """Try workers and buffers, if batches come too late."""
        if self.best.headroom < self.min_gain:
            return
        most, workers = most_gatherers(self.loaded.settings.data, usable_cores()), self.value(WORKERS)
        for count in sorted({min(2 * workers, most), most}):
            if count > self.value(WORKERS):
                self._keep_if_faster({WORKERS: count}, "more threads gather batches")
        chosen = {key: specs()[key].default for key in BUFFERS if self.value(key) is not None}
        if chosen and self.best.headroom >= self.min_gain:
            self._keep_if_faster(chosen, "automatic buffers follow the workers and the free memory")

    def _try_gpus(self) -> None:
        """Measure the ways to use several GPUs: one of them, one for each role, or all of them with torchrun."""
        num_gpus, one = len(self.machine.gpus), {DATA_GPU: None, MODEL_GPU: None}
        if num_gpus < 2:
            return
        if self.value(DATA_GPU) is None:
            roles = dict(zip((DATA_GPU, MODEL_GPU), self.machine.roles, strict=True))
            self._keep_if_faster(roles, "the data role has its own GPU")
        else:
            self._keep_if_faster(one, "one GPU does the work of both roles faster")
        accumulate = max(1, round(self.value(ACCUMULATE) / num_gpus))
        self.found.all_gpus = self._attempt(one | {ACCUMULATE: accumulate}, num_gpus)
        if self.found.all_gpus is None:
            why = str(self._refusal).splitlines()[0]
            self.found.notes.append(f"torchrun --nproc-per-node {num_gpus} is not possible here: {why}")

    def _with_batch(self, size: int) -> dict[str, Any]:
        """Return this batch size and the accumulation that keeps the effective batch about the same."""
        return {BATCH: size, ACCUMULATE: max(1, round(self._effective / size))}

    def _shrink_batch(self, refusal: Refused) -> None:
        """Find the largest batch that fits, if the present one does not."""
        if not refusal.out_of_memory or not self._batch_is_free:
            raise refusal
        asked = too_large = self.value(BATCH)
        fitting: dict[int, Trial] = {}
        while too_large > 1 and not fitting:
            half = too_large // 2
            if (trial := self._attempt(self._with_batch(half))) is None:
                too_large = half
            else:
                fitting[half] = trial
        if not fitting:
            fix = "Give --gradient-checkpointing, for fine-tuning --lora-rank 16, or a smaller --model-size."
            raise PipelineError(f"Not even one clip fits. {fix}\n{refusal}")
        try:
            self._bisect_batch(fitting, too_large)
        finally:
            size = max(fitting)
            why = f"{asked} clips do not fit: {str(refusal).splitlines()[0]}"
            self._keep(self._with_batch(size), fitting[size], why)
            self._largest_under = self.loaded

    def _grow_batch(self) -> bool:
        """Double the batch while that helps, from the preset's for this card on; find the largest that fits."""
        if not self._batch_is_free or self.loaded is self._largest_under:
            return False
        start = size = self.value(BATCH)
        tried, index = {size: self.best}, self.value(MODEL_GPU) or 0
        memory_mb = next((gpu.memory_mb for gpu in self.machine.gpus if gpu.index == index), 0)
        known = Situation(settings=self.loaded.settings, gpu_memory_mb=memory_mb).card_batch
        try:
            while size < self._most_clips:
                doubled = min(max(2 * size, known), self._most_clips)
                if (trial := self._attempt(self._with_batch(doubled))) is None:
                    self._bisect_batch(tried, doubled)
                    break
                tried[doubled] = trial
                if trial.clips_per_s < self.min_gain * tried[size].clips_per_s:
                    break
                size = doubled
        except OutOfTime:
            self._keep_fastest_batch(start, tried)
            raise
        return self._keep_fastest_batch(start, tried)

    def _keep_fastest_batch(self, start: int, tried: Mapping[int, Trial]) -> bool:
        """Keep the batch that trained most clips per second, if it gains enough."""
        size = max(tried, key=lambda size: tried[size].clips_per_s)
        if tried[size].clips_per_s < self.min_gain * tried[start].clips_per_s:
            if len(tried) > 1:
                self.found.notes.append(f"The batch stays {start}: no other that was tried is faster")
            return False
        now = size * self._with_batch(size)[ACCUMULATE]
        effect = f"stays {now}" if now == self._effective else f"becomes {now}, it was {self._effective}"
        taken = ", ".join(f"{used / 1024:.1f} GB of {role}" for role, used in tried[size].memory_mb.items())
        why = f"more clips at once use the machine better; the effective batch {effect}"
        self._keep(self._with_batch(size), tried[size], why + (f"; takes {taken}" if taken else ""))
        return True

    def _bisect_batch(self, fitting: dict[int, Trial], too_large: int) -> None:
        """Find the largest batch below one that does not fit, to an eighth; adds each that fits to `fitting`."""
        try:
            while too_large - (fits := max(fitting)) > max(1, fits // 8):
                middle = (fits + too_large) // 2
                middle -= middle % 8 if middle - middle % 8 > fits else 0
                if (trial := self._attempt(self._with_batch(middle))) is None:
                    too_large = middle
                else:
                    fitting[middle] = trial
        finally:
            self.found.largest_batch = max(fitting)


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {format_setting(key, value)}" for key, value in values.items())


def tune(
    loaded: LoadedSettings,
    prepared: PreparedCorpus,
    *,
    stage: str = "gpt",
    minutes: float = 2.0,
    max_batch: int | None = None,
    machine: Machine | None = None,
    measure: Measure | None = None,
    say: Say = lambda _: None,
) -> Tuning:
    """Search for so many minutes, from settings with their presets applied; `say` gets a line per trial."""
    machine = Machine.look() if machine is None else machine
    num_steps, most = (GPU_STEPS, MAX_BATCH_GPU) if machine.gpus else (CPU_STEPS, MAX_BATCH_CPU)
    started_at = time.monotonic()
    ends_at = started_at + 60 * minutes

    def train(loaded: LoadedSettings, num_processes: int) -> Trial:
        limit_s = max(ends_at - time.monotonic(), 1.0)
        return try_out_apart(loaded.settings, stage, num_steps, limit_s, num_processes)

    most_clips = min(max_batch or most, len(prepared.train))
    search = Search(loaded, measure or train, machine, ends_at, most_clips, say)
    search.run()
    search.found.minutes = (time.monotonic() - started_at) / 60
    return search.found


def _advice(search: Search) -> Iterator[Finding]:
    """Yield what follows from the measured times but is no setting."""
    num_gpus, best, together = len(search.machine.gpus), search.best, search.found.all_gpus
    encode, train = best.phase_ms.get("encode", 0.0), best.phase_ms.get("train", 0.0)
    if together is not None:
        gain = together.clips_per_s / best.clips_per_s
        what = f"Training on all {num_gpus} GPUs is {gain:.2f}× as fast as what was found."
        clips = num_gpus * search.value(BATCH) * max(1, round(search.value(ACCUMULATE) / num_gpus))
        why = f"{together.clips_per_s:.1f} clips/s were measured with torchrun, and an effective batch of {clips}."
        drop = " and without --data-gpu and --model-gpu" if search.value(DATA_GPU) is not None else ""
        fix = f"Start with torchrun --nproc-per-node {num_gpus} train_main.py{drop}."
        yield Finding("tune-several-gpus", "info", what, why, fix if gain >= search.min_gain else "", gain=gain)
    elif num_gpus == 1 and train:
        gain = (train + encode) / max(train, encode)
        what = f"A second GPU would bring at most {gain:.2f}× as data GPU; if it also trains, at most double."
        why = f"The data role takes {encode:.1f} ms for a batch, training on it {train:.1f} ms."
        yield Finding("tune-second-gpu", "info", what, why)
    if best.headroom >= search.min_gain:
        feed_ms = {name: best.phase_ms.get(name, 0.0) for name in DATA_PHASES}
        slowest = max(feed_ms, key=lambda name: feed_ms[name])
        what = f"A perfect feed would still be {best.headroom:.2f}× as fast."
        why = f"Of the feed's phases {slowest} takes longest: {feed_ms[slowest]:.1f} ms for a batch."
        fix = "See myxtts profile: it names the phase that bounds, and why."
        yield Finding("tune-feed-bound", "warn", what, why, fix, gain=best.headroom)
