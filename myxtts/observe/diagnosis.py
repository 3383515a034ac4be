"""What a profile means: findings, a grade and a sentence; and the live warnings of a run."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from myxtts.observe.breakdown import (
    DATA_PHASES,
    GPU_PHASES,
    MIN_LOSS,
    UNKNOWN_PHASE,
    Breakdown,
    busy_share,
)
from myxtts.observe.findings import (
    FASTER_DISK,
    LARGER_BATCH,
    MIN_SHARE,
    MORE_WORKERS,
    PEER_ACCESS,
    SECOND_GPU,
    SWITCHES,
    Finding,
    Fix,
    Level,
    Losses,
    Wait,
    overfitting,
    second_gpu,
    sentence,
    switch,
    wait_rule,
)
from myxtts.observe.metrics import StepReport, ValidationReport
from myxtts.observe.trace import Timing

MIN_BATCHES, FASTER = 16, 1.1
"""Batches that show the pace of a phase, and how much faster the model must be to empty the buffers."""
MAX_CV, MIN_KERNEL_SHARE, MIN_MFU, MIN_HEADROOM = 0.2, 0.85, 0.25, 1.02
SHAPES = "data.pad_to_fixed_length"
STEP_SWITCHES = ("training.enable_eager_debug", "training.enable_graph_mode", SHAPES)
"""Switches that let the host launch a step sooner."""
PRECISION, GRAPH = ("data.mixed_precision",), ("training.enable_graph_mode", "training.enable_xla_compilation")

Costed = Iterator[tuple[float, Finding]]  # findings with the share of the time that they cost


class _Grade(NamedTuple):
    """The least that a grade asks for."""

    name: str
    data_busy: float
    model_busy: float
    cv: float


_GRADES = (
    _Grade("minimum", 0.4, 0.7, 0.4),
    _Grade("good", 0.5, 0.8, 0.3),
    _Grade("excellent", 0.6, 0.9, 0.2),
)
BELOW_MINIMUM = "below minimum"
_JSON = (
    "sentence", "grade", "grade_notes", "bound", "shares", "waits", "headroom", "headroom_measured", "phases",
    "rings", "step_cv", "steady_cv", "outliers", "oscillation", "recompilations", "growth_mb", "utilisation",
    "mfu", "findings",
)  # fmt: skip


@dataclass(frozen=True)
class Diagnosis(Breakdown):
    @cached_property
    def findings(self) -> list[Finding]:
        """Causes, the most expensive first; then symptoms; then information."""
        if not self.shares:
            fix = Fix("train at least a few steps; look for an error before the first one")
            return [_found("no-steps", "fail", "No step was measured", "there are no spans of the model", fix)]
        groups = (_waits, _drained, _contention, _host, _memory, _compute, _throttling)
        costed = [cause for group in groups for cause in group(self)]
        costed.sort(key=lambda cause: (cause[1].level != "warn", -cause[0]))
        causes = [finding for _, finding in costed]
        return [*causes, *_symptoms(self, causes), *_information(self)]

    def wait(self, phase: str = UNKNOWN_PHASE) -> Wait:
        """Return the situation of these steps, in which the model waits for a phase."""
        return Wait(
            phase=phase if phase in self.phases else UNKNOWN_PHASE,
            profile=self,
            settings=self.data.settings,
            num_gpus=max(self.data.num_gpus, 1) if self.data.on_gpu else 0,
            cores=self.data.cores,
        )

    @cached_property
    def sentence(self) -> str:
        """The bottleneck, what a perfect feed would gain, and the first thing to change."""
        if not self.shares:
            return "Nothing was measured: no step was trained."
        headroom, share = self.headroom if self.headroom is not None else 1.0, _percent(self.shares["compute"])
        if self.bound == "train" and self.contention is not None and headroom >= 1 + MIN_LOSS:
            shared = "GPU" if self.data.on_gpu else "processor"
            text = f"Training shares its {shared} with the feed: the model computes {share} of the time and never "
            return f"{text}waits for batches, but alone it would be {headroom:.1f}× as fast{self._first_change}."
        if self.bound == "train":
            text = f"Training itself is the limit: the model computes {share} of the time"
        elif self.bound == "host":
            idle = _percent(self.shares["host"])
            text = f"The program is the limit: the model is idle {idle} of the time, though fed"
        else:
            phase = self.bound if self.bound in DATA_PHASES else "the feed"
            text = (
                f"Training is bound by {phase}: the model waits for batches {_percent(self.starved)} of the time"
            )
        if headroom >= MIN_HEADROOM:
            text += f", and a perfect feed would be {headroom:.{1 if headroom >= 1.1 else 2}f}× faster"
        elif self.bound == "train":
            text += ", and a perfect feed would gain nothing"
        return f"{text}{self._first_change}."

    @property
    def _first_change(self) -> str:
        first = next((found for found in self.findings if found.level == "warn"), None)
        if first is None or not first.setting or first.value is None:
            return ""
        return f"; set {first.setting} to {json.dumps(first.value)}"

    @property
    def grade(self) -> str:
        """excellent, good, minimum or below minimum; empty on the CPU and if nothing was measured."""
        return self._graded[0]

    @property
    def grade_notes(self) -> list[str]:
        """The requirements missed for the next grade, and those that did not count."""
        return self._graded[1]

    @cached_property
    def _graded(self) -> tuple[str, list[str]]:
        data = self.data
        if not data.on_gpu or not self.shares:
            return "", ["grades are for GPUs"] if self.shares else []
        if data.ran_out_of_memory:
            return BELOW_MINIMUM, ["the GPU ran out of memory"]
        notes, data_busy = list[str](), None
        if data.is_dual:
            data_busy = busy_share(data.spans, GPU_PHASES, self.window)
            if data_busy <= _GRADES[-1].data_busy and self.starved < MIN_LOSS:
                busy = f"the stage gives the data GPU little to do ({_percent(data_busy)} busy)"
                notes.append(f"{busy}, and the model does not wait for it: this does not count")
                data_busy = None
            notes.append("the speed against one GPU is no part of the grade; myxtts tune measures it")
        reached = BELOW_MINIMUM
        for grade in _GRADES:
            if missing := self._missing_for(grade, data_busy):
                return reached, [*notes, *(f"not {grade.name}: {lack}" for lack in missing)]
            reached = grade.name
        return reached, notes

    def _missing_for(self, grade: _Grade, data_busy: float | None) -> list[str]:
        """Return what a grade asks for and the run does not reach; a `data_busy` of None does not count."""
        roles = ("model", self.shares["compute"], grade.model_busy), ("data", data_busy, grade.data_busy)
        missing = [
            f"the {role} GPU is busy {_percent(busy)} of the time, not over {_percent(least)}"
            for role, busy, least in roles
            if busy is not None and busy <= least
        ]
        if self.step_cv >= grade.cv:
            missing.append(f"step times vary by {_percent(self.step_cv)}, not under {_percent(grade.cv)}")
        return missing

    @property
    def recompilations(self) -> int:
        return self.data.recompilations

    def to_json(self) -> dict[str, Any]:
        return {name: _plain(getattr(self, name)) for name in _JSON}


def _plain(value: Any) -> Any:
    """Return a value in types that JSON has."""
    if isinstance(value, Timing):
        return asdict(value) | {"cv": value.cv}
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _found(
    code: str, level: Level, what: str, why: str = "", fix: Fix | None = None, gain: float | None = None
) -> Finding:
    """Return a finding with its texts as sentences."""
    text, setting, value = fix or Fix()
    gain = None if gain is None else round(gain, 2)
    return Finding(code, level, sentence(what), sentence(why), sentence(text), setting, value, gain)


def _waits(stats: Diagnosis) -> Costed:
    waits = dict(stats.waits)
    if not stats.data.settings.data.prefetch_to_gpu and "encode" in waits:
        waits["upload"] = waits.get("upload", 0.0) + waits.pop("encode")  # one cause, one finding
    for phase, share in waits.items():
        if share < MIN_SHARE:
            continue
        wait = stats.wait(phase)
        rule = wait_rule(wait)
        fix = rule.fix(wait)
        if rule.code == "upload-late":
            gain = 1 / max(1 - share, 0.01)
        else:
            period_ms = wait.time.mean_ms / fix.value if rule.code == "workers-few" else 0.0
            gain = stats.gain_without(wait.phase, period_ms)
        who = phase if phase in stats.phases else "the feed"
        what, why = f"The model waits for {who} {_percent(share)} of the time", rule.why.format(s=wait)
        yield share, _found(rule.code, "warn" if share >= MIN_LOSS else "info", what, why, fix, gain)


def _drained(stats: Diagnosis) -> Costed:
    """Yield phases that are slower than the model, though buffers hid it during the measurement."""
    for phase in DATA_PHASES:
        time = stats.phases.get(phase)
        if time is None or time.count < MIN_BATCHES or stats.waits.get(phase, 0.0) >= MIN_SHARE:
            continue
        if time.period_ms > FASTER * stats.batch_ms > 0:
            cost = 1 - stats.batch_ms / time.period_ms
            pace = f"every {time.period_ms:.1f} ms and are used every {stats.batch_ms:.1f} ms"
            why = f"full buffers hide it; once they are empty, the model waits {_percent(cost)} of the time"
            fix = wait_rule(wait := stats.wait(phase)).fix(wait)
            yield cost, _found("buffers-drain", "warn", f"Batches leave {phase} {pace}", why, fix)


def _contention(stats: Diagnosis) -> Costed:
    """Yield the slowdown of steps that share their device with the feed, waits left out."""
    if stats.contention is None:
        return
    (slowdown, cost), fix, on_gpu = stats.contention, second_gpu(stats.wait()), stats.data.on_gpu
    what = f"Training takes {_percent(slowdown)} longer while the feed runs than alone"
    why = f"data and model role share the {'GPU' if on_gpu else 'processor'}, and their work takes turns"
    gain = 1 / (1 - cost) if fix is not None else None
    yield cost, _found("roles-compete", "warn" if on_gpu else "info", what, why, fix, gain)


def _host(stats: Diagnosis) -> Costed:
    data, host, wait = stats.data, stats.shares["host"], stats.wait()
    if data.recompilations:
        cost = stats.excess_share("recompilation")
        host -= cost
        fix = switch(SHAPES, wait) or Fix("TORCH_LOGS=recompiles shows what changed; please report it")
        what = f"The step was compiled again {data.recompilations} times in {len(stats.steps)} steps"
        gain = 1 / (1 - cost) if cost >= MIN_SHARE else None
        yield max(cost, MIN_SHARE), _found("recompiling", "warn", what, "shapes or types changed", fix, gain)
    gain = 1 / max(1 - host, 0.01) if host >= MIN_SHARE else None
    names = STEP_SWITCHES if data.on_gpu else STEP_SWITCHES[:1]
    turned = next((found for name in names if (found := switch(name, wait))), None)
    fix = turned or Fix("look for `.item()`, printing and other work of the host between the steps")
    if data.syncs_per_step is not None and data.syncs_per_step >= 0.5:
        what = f"The host waits for the device {data.syncs_per_step:.1f} times in a step"
        why = "the next kernels are launched only after that, and the GPU is idle meanwhile"
        yield max(host, MIN_SHARE), _found("host-sync", "warn", what, why, fix, gain)
    elif data.kernel_share is not None and data.kernel_share < MIN_KERNEL_SHARE:
        what = f"Kernels run for {_percent(data.kernel_share)} of a step; between them the GPU waits for launches"
        if turned is None:
            fix, gain = _larger_batch(stats, 1 / max(data.kernel_share, 0.01))
        yield host, _found("launch-bound", "warn", what, "the kernels of such a batch are too small", fix, gain)
    elif host >= MIN_SHARE:
        what = f"The model is idle {_percent(host)} of the time although a batch is ready"
        why = "the program launches the next step too late: logging, another process, or too few cores"
        yield host, _found("host-late", "warn" if host >= MIN_LOSS else "info", what, why, fix, gain)


def _larger_batch(stats: Diagnosis, most_gain: float | None = None) -> tuple[Fix, float | None]:
    """Return a batch up to four times as large, as far as the memory allows, and its gain."""
    used = [
        reading.memory_used_mb / reading.memory_total_mb
        for reading in stats.data.readings
        if reading.gpu == stats.data.model_gpu and reading.memory_used_mb and reading.memory_total_mb
    ]
    factor = min(int(0.9 / max(used)) if used else 2, 4, math.ceil(most_gain or 2))
    if factor < 2:
        return Fix("a larger batch would help and does not fit; myxtts tune finds the largest that does"), None
    gain = None if most_gain is None else min(float(factor), most_gain)
    return LARGER_BATCH._replace(value=factor * stats.data.settings.data.batch_size), gain


def _memory(stats: Diagnosis) -> Costed:
    for role, grown in stats.growth_mb.items():
        what = f"The memory of the {role} role grew by {grown:.0f} MB in {len(stats.steps)} steps"
        fix = switch(SHAPES, stats.wait()) or Fix("save more often to lose less at a restart; please report it")
        yield 1.0, _found("memory-growth", "warn", what, "this ends in an out-of-memory error", fix)


def _compute(stats: Diagnosis) -> Costed:
    """Yield what makes training itself slow; it gains nothing as long as the model waits for data."""
    compute, settings = stats.shares["compute"], stats.data.settings
    if not stats.data.on_gpu or stats.starved >= 2 * MIN_LOSS:
        return
    for code, names, cost in (("precision-off", PRECISION, compute / 2), ("graph-off", GRAPH, MIN_LOSS)):
        off = next((SWITCHES[name] for name in names if SWITCHES[name].is_off(settings)), None)
        if off is not None:
            yield cost, _found(code, "warn", off.what, off.why, Fix(off.fix, off.setting, off.value))
    is_plain = settings.data.mixed_precision and settings.training.enable_graph_mode
    if stats.mfu is not None and stats.mfu < MIN_MFU and compute >= 0.8 and is_plain:
        what = f"The GPU computes {_percent(compute)} of the time and reaches {_percent(stats.mfu)} of its speed"
        why = f"batches of {settings.data.batch_size} clips of a {settings.model.size} model are small work for it"
        yield 0.0, _found("flops-low", "info", what, why, _larger_batch(stats)[0])


def _throttling(stats: Diagnosis) -> Costed:
    known = [reading.throttled_by for reading in stats.data.readings if reading.throttled_by is not None]
    hot = [reasons for reasons in known if any("slowdown" in name or "brake" in name for name in reasons)]
    capped = [reasons for reasons in known if "power cap" in reasons]
    if len(hot) > 0.1 * len(known):
        what = f"The GPU lowered its clocks in {_percent(len(hot) / len(known))} of the readings"
        fix = Fix("check fans, air flow and power supply (nvidia-smi -q -d PERFORMANCE)")
        why = ", ".join(sorted({name for reasons in hot for name in reasons}))
        yield MIN_LOSS, _found("throttled", "warn", what, why, fix)
    elif len(capped) > 0.5 * len(known):
        what = f"The GPU ran at its power cap in {_percent(len(capped) / len(known))} of the readings"
        yield 0.0, _found("power-capped", "info", what, "it is well used; a higher cap may help")


def _symptoms(stats: Diagnosis, causes: list[Finding]) -> Iterator[Finding]:
    """Yield what users see; it goes away with the first cause."""
    cause = next((found for found in causes if found.level == "warn"), None)
    fix: tuple[str, str, Any] = ("", "", None)
    who, where = ("GPU", "GPU") if stats.data.on_gpu else ("model", "machine")
    why = f"No cause shows in the trace; look for other processes on this {where}."
    if cause is not None:
        why, fix = f"See {cause.code}.", (cause.fix, cause.setting, cause.value)
    if (cycle := stats.oscillation) is not None:
        cycles = f"Every {cycle.period_s:.1f} s the {who} goes from busy to idle and back"
        yield Finding("oscillating", "warn", f"{cycles} ({_percent(cycle.depth)} deep).", why, *fix)
    if stats.step_cv > MAX_CV:
        reasons = [outlier.reason for outlier in stats.outliers]
        counted = ", ".join(f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons))
        what = f"The time of a step varies by {_percent(stats.step_cv)}"
        what += f"; steps of more than twice the median: {counted}." if counted else ", without single long steps."
        yield Finding("uneven-steps", "warn", what, why, *fix)


def _information(stats: Diagnosis) -> Iterator[Finding]:
    data, mfu, starved = stats.data, stats.mfu, stats.starved
    utilised = None if data.model_gpu is None else stats.utilisation.get(data.model_gpu)
    if utilised is not None and mfu is not None and utilised - mfu > 0.3:
        what = f"The driver reports {_percent(utilised)} utilisation; the GPU reaches {_percent(mfu)} of its speed"
        why = "the driver counts the time in which any kernel runs, however small; FLOP/s count the work"
        yield _found("utilisation-misleads", "info", what, why)
    busy = stats.phases["encode"].busy_share if "encode" in stats.phases else 0.0
    if data.is_dual and starved < MIN_LOSS and busy < 0.4:
        why = "the stage gives it little to do; two processes that both train (torchrun) may use both GPUs better"
        what = f"The data GPU is busy {_percent(busy)} of the time, and that is enough"
        fix = Fix("compare clips/s of a short run with torchrun; myxtts tune measures one GPU against two")
        yield _found("data-gpu-idle", "info", what, why, fix)
    if data.no_readings and not data.readings:
        yield _found("no-readings", "info", "There are no readings of GPUs", data.no_readings)
    if starved < MIN_SHARE:
        yield _found("feed-keeps-up", "pass", f"The model waits {_percent(starved)} of the time for data")


WARMUP_REPORTS = 3  # first reports that decide nothing: kernels are compiled, buffers fill, memory is taken
WINDOW_REPORTS, FEWEST_REPORTS = 12, 4
"""Reports that a warning looks at, and the fewest that show what happens most of the time."""
MAX_LIVE_CV, MAX_IDLE = 0.3, 0.05
CLEAR_REPORTS, CPU_CLEAR_REPORTS = 5, 100
"""Reports without its reason that end a warning; on a CPU other programs come and go."""

_RINGS = ("host", "device", "handoff", "model")
"""In the order in which a batch passes them: the slow phase is the one that fills the first empty ring."""


def _listed(cause: str, *fixes: Fix | str) -> str:
    named = [Fix(SWITCHES[fix].fix, fix) if isinstance(fix, str) else fix for fix in fixes]
    return f"{cause}: {', or '.join(f'{fix.text} ({fix.setting})' for fix in named)}"


_KEPT = " (codes are cached, so the first epoch is the slowest)"
_GATHER_SLOW = _listed("gathering batches is too slow", MORE_WORKERS, "data.native_loading", FASTER_DISK)
_CAUSES = {
    "host": _GATHER_SLOW,
    "device": _listed("batches are uploaded too late", "data.prefetch_to_gpu", "data.enhanced_gpu_prefetch"),
    "encode": _listed("encoding takes longer than training", "data.optimize_cpu_gpu_overlap", SECOND_GPU) + _KEPT,
    "handoff": _listed("batches cross too slowly from the data GPU to the model GPU", PEER_ACCESS),
    "": "the buffers hold batches, so it is not the data: the step may run with varying shapes (keep "
    "--enable-static-shapes on), or other processes use the same device (nvidia-smi or top lists them)",
}
_CPU_CAUSES = {
    "host": _GATHER_SLOW,
    "later": f"preparing batches uses the same cores as training on them{_KEPT}",
    "": "other programs probably use the same cores (top lists them); on a CPU this is common and harmless",
}
"""On a CPU nothing is uploaded, and the cores are all there is."""
TREND_REPORTS, MAX_TREND_REPORTS = 12, 64
"""The fewest reports that show a trend of memory, and the most that are kept: then every second one is dropped."""
MIN_GROWTH_MB, MIN_HOST_GROWTH_MB = 64.0, 512.0
"""Growth below which memory does not leak: the memory of the host varies more, with the work of the allocator."""
MIN_GROWTH_SPREADS, MIN_LATER_SHARE = 8.0, 0.7
"""A leak grows this much more than it varies around its line, a jump at most 6, and does not level off."""
_PLACES = {"gpu": "on the GPU", "data": "on the data GPU", "model": "on the model GPU", "host": "by this process"}
_LEAK = "Keep --enable-static-shapes on. If it is on, lower --save-step, so that a restart costs little."


class Warning(NamedTuple):
    """Something to change: what was found, its likely cause, and what to do."""

    code: str  # variation, starving, overfitting, or memory-ROLE, where a role is gpu, data, model or host
    text: str


def warnings_of(history: Sequence[StepReport]) -> list[Warning]:
    """Return the warnings that hold at the end of these reports of one stage, oldest first."""
    reports = history[WARMUP_REPORTS:][-WINDOW_REPORTS:]
    if len(reports) < FEWEST_REPORTS:
        return []
    found, empty = [], _empty_ring(reports)
    cause = _cause(empty, reports[-1])
    if (cv := reports[-1].step_cv) > MAX_LIVE_CV:
        limit = f"more than {100 * MAX_LIVE_CV:.0f} %"
        found.append(Warning("variation", f"The time of a step varies by {100 * cv:.0f} % ({limit}): {cause}."))
    idle = sum(report.idle_share for report in reports) / len(reports)
    if idle > MAX_IDLE and empty and _is_mostly_empty(reports, "model"):
        found.append(Warning("starving", f"The model waits for batches {100 * idle:.0f} % of the time: {cause}."))
    return found


class MemoryTrends:
    """Finds memory that grows until it ends the run, from the memory in use at each report of one stage."""

    def __init__(self) -> None:
        self._num_reports = 0
        self._points: dict[str, list[tuple[int, float]]] = {}
        """By role, steps and MB: recent ones as reported, earlier ones ever fewer."""

    def add(self, report: StepReport) -> list[Warning]:
        """Return a warning for each kind of memory that will be used up before the last step."""
        self._num_reports += 1
        if self._num_reports <= WARMUP_REPORTS:
            return []
        found = []
        for role, (used_mb, limit_mb) in report.in_use_mb.items():
            points = self._points.setdefault(role, [])
            points.append((report.step, used_mb))
            least_mb = MIN_HOST_GROWTH_MB if role == "host" else MIN_GROWTH_MB
            slopes = (steady_growth(window, least_mb) for window in (points, points[-TREND_REPORTS:]))
            if (slope := next(filter(None, slopes), None)) is not None:
                end = report.step + (limit_mb - used_mb) / slope
                if end < (report.total_steps or math.inf):
                    found.append(_leak(role, slope, end, report))
            if len(points) == MAX_TREND_REPORTS:
                del points[1::2]
        return found


def _leak(role: str, slope: float, end: float, report: StepReport) -> Warning:
    used_mb, limit_mb = report.in_use_mb[role]
    now = f"{used_mb:.0f} MB at step {report.step}"
    what = f"The memory held {_PLACES[role]} grows by {slope:.3g} MB a step and is {now}"
    last = f" of {report.total_steps}" if report.total_steps else ""
    ends = f"at about step {end:.0f}{last} it reaches the limit of {limit_mb:.0f} MB, which ends the run"
    return Warning(f"memory-{role}", f"{what}: {ends}. {_LEAK}")


def steady_growth(points: Sequence[tuple[int, float]], least_mb: float) -> float | None:
    """Return how many MB a series grows per step; None if it only varies, jumps once or levels off."""
    if len(points) < TREND_REPORTS:
        return None
    steps, used_mb = np.array(points, float).T
    slope, level = np.polyfit(steps, used_mb, 1)
    grown = slope * (steps[-1] - steps[0])
    spread = 1.5 * np.median(np.abs(used_mb - slope * steps - level))  # unlike the mean square, blind to a peak
    half = len(points) // 2
    earlier, later = (np.polyfit(steps[part], used_mb[part], 1)[0] for part in (slice(half), slice(half, None)))
    is_steady = grown > MIN_GROWTH_SPREADS * spread and later > MIN_LATER_SHARE * earlier
    return float(slope) if grown > least_mb and is_steady else None


class LiveWarnings:
    """Gives each warning once, until its reason has been gone for a while."""

    def __init__(self) -> None:
        self._history: deque[StepReport] = deque(maxlen=WARMUP_REPORTS + WINDOW_REPORTS)
        self._trends = MemoryTrends()
        self._given: dict[str, int] = {}
        """By code, the reports since the reason last held."""
        self._losses: dict[str, tuple[Losses, Losses]] = {}  # by stage, of validation and of training
        self._overfitted: set[tuple[str, int]] = set()  # stages and steps of their best validation

    def add(self, report: StepReport) -> list[Warning]:
        """Return the new warnings after this report; another stage starts afresh."""
        on_gpu = bool(report.memory_mb)
        clear_reports = CLEAR_REPORTS if on_gpu else CPU_CLEAR_REPORTS
        if self._history and self._history[-1].stage != report.stage:
            self._history.clear()
            self._trends = MemoryTrends()
            if on_gpu:  # on a CPU the cause is another program, whatever is trained
                self._given.clear()
        self._history.append(report)
        self._of(report.stage)[1].append((report.step, report.losses.get("total", math.nan)))
        holding = warnings_of(list(self._history)) + self._trends.add(report)
        fresh = [warning for warning in holding if warning.code not in self._given]
        quiet = {code: reports + 1 for code, reports in self._given.items() if reports + 1 < clear_reports}
        self._given = quiet | {warning.code: 0 for warning in holding}
        return fresh

    def validated(self, report: ValidationReport) -> list[Warning]:
        """Return a warning if the stage overfits; once for each step that was the best."""
        validations, training = self._of(report.stage)
        validations.append((report.step, report.losses.get("total", math.nan)))
        found = overfitting(report.stage, validations, training)
        best = min(validations, key=itemgetter(1))[0]
        if found is None or (report.stage, best) in self._overfitted:
            return []
        self._overfitted.add((report.stage, best))
        return [Warning(found.code, f"{found.what}. {found.why} {found.fix}")]

    def _of(self, stage: str) -> tuple[Losses, Losses]:
        return self._losses.setdefault(stage, ([], []))


def _cause(empty: str, report: StepReport) -> str:
    """Return why a ring is empty, or with "" why steps vary although none is."""
    if not report.memory_mb:
        return _CPU_CAUSES[empty if empty in ("", "host") else "later"]
    if empty == "handoff" or (empty == "model" and "handoff" not in report.rings):
        return _CAUSES["encode"]
    return _CAUSES["handoff" if empty == "model" else empty]


def _empty_ring(reports: Sequence[StepReport]) -> str:
    """Return the first ring that is empty most of the time; "" if none is or the trainer never waited."""
    if all(report.rings.get("model", (0, 0))[0] > 0 for report in reports):
        return ""
    rings = [name for name in _RINGS if name in reports[-1].rings]
    return next((name for name in rings if _is_mostly_empty(reports, name)), "")


def _is_mostly_empty(reports: Sequence[StepReport], ring: str) -> bool:
    return sum(report.rings.get(ring, (0, 0))[0] == 0 for report in reports) > len(reports) / 2
