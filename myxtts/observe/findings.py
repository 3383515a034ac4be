"""What the tools conclude: one form for all of them, so that a report, a table and `--json` say the same."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from myxtts.config import MAX_AUTO_PREFETCH
from myxtts.observe.breakdown import (
    DATA_STAGES,
    GPU_STAGES,
    LEAST_LOSS,
    PAUSES,
    Evidence,
    Facts,
    Oscillation,
    Outlier,
    RingState,
    StageTime,
    busy_share,
    establish,
)
from myxtts.observe.metrics import StepReport

Level = Literal["pass", "info", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """A conclusion, why it holds, and what to change; `code` is stable and explained in docs/profiling.md."""

    code: str
    level: Level
    what: str
    why: str = ""
    fix: str = ""
    """A sentence; empty when there is nothing to do."""
    setting: str = ""
    """The dotted key to change, such as `data.batch_size`."""
    value: Any = None
    """What to change it to."""
    gain: float | None = None
    """Expected speed as a multiple of the present one."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


SLOW_CLIP_MS = 1.0
"""Copying a clip out of the packed cache takes a twentieth of this: what takes longer comes from a slow disk."""
MOST_NATIVE_WORKERS = 4
"""Gathering from the packed cache is copying: more threads than this only take turns on the memory bus."""
LEAST_AT_WORK = 0.5
"""A stage that is waited for and at work for less of that time is not slow, but comes too late to its work."""
SHALLOW = 2
"""Batches that a ring must exceed for its two sides to work at once."""
SPARE = 0.8
"""Of the time that training takes, which a stage may take so that it stays ahead."""


class Remedy(NamedTuple):
    """What to change."""

    fix: str = ""
    setting: str = ""
    value: Any = None
    gain: float | None = None


def percent(share: float) -> str:
    """A share as people read it."""
    return f"{100 * share:.0f} %"


def finding(code: str, level: Level, what: str, why: str, remedy: Remedy) -> Finding:
    """A finding with its remedy."""
    gain = None if remedy.gain is None else round(remedy.gain, 2)
    return Finding(code, level, what, why, remedy.fix, remedy.setting, remedy.value, gain)


def feed_finding(facts: Facts, stage: str, share: float) -> Finding:
    """Why the model waits for a stage for this share of its time, and what helps."""
    data = facts.evidence.settings.data
    time = facts.stages.get(stage)
    whom = "the feed" if time is None else stage
    what = f"The model waits for {whom} {percent(share)} of the time."
    if time is None:
        code, why, remedy = (
            "starving",
            "No stage left a span: a trace tells which one it is, or whether it is the program.",
            _buffer(facts, None),
        )
    elif stage in ("upload", "encode") and not data.prefetch_to_gpu:
        gain = 1 / max(1 - share, 0.01)
        remedy = Remedy("Upload batches before the model asks for them.", "data.prefetch_to_gpu", True, gain)
        code, why = "upload-late", "Batches are uploaded and encoded only when the model asks for one."
    elif stage == "gather":
        code, why, remedy = _gather(facts, time)
    elif _is_late(facts, stage):
        code, why, remedy = _late(facts, stage)
    else:
        code, why, remedy = {"upload": _upload, "encode": _encode, "handoff": _handoff}[stage](facts, time)
    return finding(code, "warn" if share >= LEAST_LOSS else "info", what, why, remedy)


def _gather(facts: Facts, time: StageTime) -> tuple[str, str, Remedy]:
    data, train_ms = facts.evidence.settings.data, facts.train_ms
    depth = facts.evidence.depths.get("host")
    keeps_up = time.period_ms < 0.95 * train_ms
    pace = f"A batch takes {time.mean_ms:.1f} ms with {time.workers} at work, and training on it {train_ms:.1f} ms"
    native = Remedy(
        "Gather from the packed cache instead of decoding files for every batch.",
        "data.native_loading",
        True,
        facts.gain_without("gather"),
    )
    if 0 < time.long_share < 0.4 and time.long_time_share > 0.5:
        one_in = f"One batch in {1 / time.long_share:.0f} takes up to {time.longest_ms:.0f} ms"
        find = Remedy("Look for clips that are very long, damaged, or on a slow disk.", "data.cache_dir")
        remedy = _buffer(facts, time) if keeps_up else find
        return (
            "gather-uneven",
            f"{one_in}, most take {time.median_ms:.1f} ms.",
            native if not data.native_loading else remedy,
        )
    if depth is not None and depth <= SHALLOW:
        why = f"The host ring holds {depth} batches, so gathering stops until one of them is uploaded."
        return "host-ring-small", why, _buffer(facts, time)
    if _is_late(facts, "gather"):
        return _late(facts, "gather")
    if keeps_up:
        return "host-ring-small", f"{pace}: fast enough on average, but not every time.", _buffer(facts, time)
    most = min(facts.evidence.cores or time.workers, MOST_NATIVE_WORKERS if data.native_loading else 10**6)
    is_disk = data.native_loading and time.mean_ms / data.batch_size > SLOW_CLIP_MS
    if time.workers < most and not is_disk:
        needed = min(math.ceil(time.mean_ms / (SPARE * train_ms)), most) if train_ms else most
        value = max(needed, time.workers + 1)
        gain = facts.gain_without("gather", time.mean_ms / value)
        return "workers-few", f"{pace}.", Remedy("Let more workers gather.", "data.num_workers", value, gain)
    if not data.native_loading:
        return "native-loading-off", f"{pace}: audio files are decoded for every batch.", native
    move = "Move the cache to a local disk, or give the machine memory to keep it in."
    clip_ms = time.mean_ms / data.batch_size
    why = f"{pace}: {clip_ms:.2f} ms a clip, where copying from memory takes 0.05 ms. The disk is slow."
    return "gather-slow", why, Remedy(move, "data.cache_dir", None, facts.gain_without("gather"))


def _upload(facts: Facts, time: StageTime) -> tuple[str, str, Remedy]:
    data, gain = facts.evidence.settings.data, facts.gain_without("upload")
    if not data.enhanced_gpu_prefetch:
        fix = "Upload from pinned memory on a copy stream of its own."
        why = f"A copy from pageable memory takes {time.mean_ms:.1f} ms and keeps its stream waiting."
        return "upload-unpinned", why, Remedy(fix, "data.enhanced_gpu_prefetch", True, gain)
    traffic = [reading.pcie_rx_mb_s for reading in facts.evidence.readings if reading.pcie_rx_mb_s is not None]
    seen = f" The driver saw up to {max(traffic):.0f} MB/s." if traffic else ""
    why = f"The copy of a batch takes {time.mean_ms:.1f} ms from pinned memory.{seen}"
    fix = "Look at the PCIe generation and width of the slot (nvidia-smi -q -d PCIE); no setting makes it faster."
    return "upload-slow", why, Remedy(fix, gain=gain)


def _encode(facts: Facts, time: StageTime) -> tuple[str, str, Remedy]:
    evidence, data, gain = facts.evidence, facts.evidence.settings.data, facts.gain_without("encode")
    if not data.optimize_cpu_gpu_overlap and not evidence.is_dual:
        fix = "Let the front end work beside the training step."
        why = (
            f"Encoding a batch takes {time.mean_ms:.1f} ms in the stream of the training step, which waits for it."
        )
        return "encode-serial", why, Remedy(fix, "data.optimize_cpu_gpu_overlap", True, gain)
    why = f"Encoding a batch takes {time.mean_ms:.1f} ms and training on it {facts.train_ms:.1f} ms."
    more = "A GPU" if evidence.model_gpu is None else "A faster data GPU" if evidence.is_dual else "A second GPU"
    remedy = Remedy(f"{more} would help; no setting makes it faster.", gain=gain)
    if not data.pad_to_fixed_length:
        fix = "Give batches one shape, so that the front end is captured and started with one launch."
        remedy = Remedy(fix, "data.pad_to_fixed_length", True, gain)
    elif evidence.num_gpus > 1 and not evidence.is_dual:
        remedy = second_gpu(facts, gain)
    return "encode-slow", why, remedy


def _handoff(facts: Facts, time: StageTime) -> tuple[str, str, Remedy]:
    why = f"A batch takes {time.mean_ms:.1f} ms from the data GPU to the model GPU."
    fix = "Choose two GPUs with peer access (myxtts check --gpus shows it), or drop --data-gpu and --model-gpu."
    return "handoff-slow", why, Remedy(fix, "data.data_gpu", None, facts.gain_without("handoff"))


def _is_late(facts: Facts, stage: str) -> bool:
    return facts.division.at_work.get(stage, 1.0) < LEAST_AT_WORK


def _late(facts: Facts, stage: str) -> tuple[str, str, Remedy]:
    """The stage is idle while it is waited for: its thread does not get the processor, or what follows is full."""
    keep = facts.rings.get("keep")
    if stage == "encode" and keep is not None and keep.depth and keep.mean_ready > 0.9 * keep.depth:
        why = "Fresh codes reach the cache too slowly, and the front end waits for them to be written."
        move = "Move the cache to a local disk; from the second epoch on there is nothing left to write."
        return "pipeline-late", why, Remedy(move, "data.cache_dir", None, facts.gain_without(stage))
    why = f"While the model waits, {stage} does nothing: its thread gets no processor time."
    fix = "Leave a core to the pipeline: fewer workers, and no other work on this machine."
    workers = max((facts.evidence.cores or 2) - 1, 1)
    lower = workers < facts.evidence.settings.data.num_workers
    setting, value = ("data.num_workers", workers) if lower else ("", None)
    return "pipeline-late", why, Remedy(fix, setting, value, facts.gain_without(stage))


def _buffer(facts: Facts, time: StageTime | None) -> Remedy:
    """Enough batches on the host to train on while the slowest one is gathered."""
    depth = (
        facts.evidence.depths.get("host") or facts.evidence.settings.data.prefetch_buffer_size or MAX_AUTO_PREFETCH
    )
    longest = math.ceil(time.longest_ms / facts.train_ms) + 2 if time is not None and facts.train_ms else 0
    stage = "gather" if time is not None else "feed"
    fix = "Keep more batches ready on the host."
    return Remedy(fix, "data.prefetch_buffer_size", max(2 * depth, longest), facts.gain_without(stage))


def second_gpu(facts: Facts, gain: float) -> Remedy:
    """Give the data role a GPU of its own."""
    model = facts.evidence.model_gpu or 0
    other = 1 if model == 0 else 0
    return Remedy(f"Use two GPUs: --data-gpu {other} --model-gpu {model}.", "data.data_gpu", other, gain)


CODES = {
    "native-loading-off": "decoding audio files for every batch is too slow",
    "workers-few": "more workers would gather batches in time",
    "gather-slow": "the disk gives the samples of a batch too slowly",
    "gather-uneven": "some batches take many times as long to gather as the others",
    "host-ring-small": "gathering is fast enough, but too few batches are kept ready",
    "upload-late": "batches are uploaded only when the model asks for them",
    "upload-unpinned": "batches are copied from pageable memory",
    "upload-slow": "the way from the host to the GPU is too slow",
    "encode-serial": "the front end works in the stream of the training step",
    "encode-slow": "the front end takes longer than training",
    "handoff-slow": "batches cross too slowly from the data GPU to the model GPU",
    "pipeline-late": "a stage is waited for and does nothing",
    "buffers-drain": "buffers hide for now that a stage is slower than training",
    "starving": "batches come late, and no stage shows why",
    "roles-compete": "training is slower beside the pipeline than alone",
    "host-sync": "the host waits for the device inside a step",
    "launch-bound": "kernels are so small that launching them takes longer",
    "host-late": "the GPU is idle although a batch is ready",
    "recompiling": "the step was compiled again behind the warm-up",
    "save-stall": "training stands still while a checkpoint is saved",
    "validate-stall": "validations take a large part of the time",
    "memory-growth": "memory grows with every step",
    "precision-off": "products are computed in fp32",
    "graph-off": "the step runs eagerly",
    "flops-low": "the GPU computes all the time, and little",
    "oscillating": "the GPU is busy and idle in turns",
    "uneven-steps": "the time of a step varies",
    "throttled": "the GPU lowers its clocks because it is hot or short of power",
    "power-capped": "the GPU runs at its power cap",
    "utilisation-misleads": "the driver's utilisation says more than the GPU computes",
    "data-gpu-idle": "the recipe gives the data GPU little to do",
    "no-readings": "the driver gave no readings",
    "no-steps": "nothing was measured",
    "feed-keeps-up": "the model does not wait for data",
}
"""What each code means; none is ever given another meaning."""

WORTH_A_WORD = 0.02
FEWEST_BATCHES, FASTER = 16, 1.1
"""Batches of a stage that tell its pace, and how much the model must be faster to empty the buffers."""
MOST_CV = 0.2
LEAST_KERNEL_SHARE, LEAST_FLOPS_SHARE = 0.85, 0.25
MOST_PAUSE, PAUSE_AIM = 0.02, 0.01
"""Share of the time that a pause may take, and that the proposed setting leaves it."""

Weighed = Iterator[tuple[float, Finding]]
"""Findings with the share of the time that they cost."""


def advise(facts: Facts) -> list[Finding]:
    """All findings: what to change, the dearest first; what comes of it; what else there is to know."""
    if not facts.is_measured:
        remedy = Remedy("Train at least a few steps; look for an error before the first one.")
        return [
            finding("no-steps", "fail", "No step was measured.", "There are no spans and no step times.", remedy)
        ]
    causes = [
        *_feed(facts),
        *_host(facts),
        *_pauses(facts),
        *_memory(facts),
        *_compute(facts),
        *_throttling(facts),
    ]
    causes.sort(key=lambda weighed: (weighed[1].level != "warn", -weighed[0]))
    found = [cause for _, cause in causes]
    return [*found, *_symptoms(facts, found), *_information(facts)]


def _feed(facts: Facts) -> Weighed:
    waits = dict(facts.division.waits)
    if not facts.evidence.settings.data.prefetch_to_gpu and "encode" in waits:
        waits["upload"] = waits.get("upload", 0.0) + waits.pop("encode")  # one cause, one finding
    for stage, share in waits.items():
        if share >= WORTH_A_WORD:
            yield share, feed_finding(facts, stage, share)
    yield from _drained(facts)
    yield from _competition(facts)


def _competition(facts: Facts) -> Weighed:
    """Steps that take longer beside the pipeline than alone, waits and pauses left out."""
    evidence, on_gpu = facts.evidence, facts.evidence.model_gpu is not None
    if facts.competition is None:
        return
    longer, cost = facts.competition
    gain, where = 1 / (1 - cost), "the GPU" if on_gpu else "the processor"
    what = f"Training takes {percent(longer)} longer beside the pipeline than alone."
    remedy = second_gpu(facts, gain) if evidence.num_gpus > 1 and on_gpu else Remedy()
    why = f"Data and model role share {where}, and their work takes turns."
    yield cost, finding("roles-compete", "warn" if on_gpu else "info", what, why, remedy)


def _drained(facts: Facts) -> Weighed:
    """A stage that is slower than the model, though buffers hid it for as long as somebody looked."""
    for stage in DATA_STAGES:
        time = facts.stages.get(stage)
        if (
            time is None
            or time.num_batches < FEWEST_BATCHES
            or facts.division.waits.get(stage, 0.0) >= WORTH_A_WORD
        ):
            continue
        if time.period_ms > FASTER * facts.batch_ms > 0:
            cost = 1 - facts.batch_ms / time.period_ms
            remedy = feed_finding(facts, stage, cost)
            what = (
                f"Batches leave {stage} every {time.period_ms:.1f} ms and are used every {facts.batch_ms:.1f} ms."
            )
            why = f"Buffers filled beforehand hide it; once empty, the model waits {percent(cost)} of the time."
            later = Remedy(remedy.fix, remedy.setting, remedy.value)
            yield cost, finding("buffers-drain", "warn", what, why, later)


def _host(facts: Facts) -> Weighed:
    evidence, host = facts.evidence, facts.division.shares["host"]
    if facts.recompilations:
        cost = facts.variation.excess(["recompilation"], facts.steps)
        host -= cost
        gain = 1 / (1 - cost) if cost >= WORTH_A_WORD else None
        remedy = Remedy("TORCH_LOGS=recompiles says what changed; please report it.", gain=gain)
        if not evidence.settings.data.pad_to_fixed_length:
            remedy = Remedy("Give every batch the same shapes.", "data.pad_to_fixed_length", True, gain)
        what = f"The step was compiled again {facts.recompilations} times in {len(facts.steps)} steps."
        yield max(cost, WORTH_A_WORD), finding("recompiling", "warn", what, "Shapes or types changed.", remedy)
    gain = 1 / max(1 - host, 0.01) if host >= WORTH_A_WORD else None
    if evidence.syncs_per_step is not None and evidence.syncs_per_step >= 0.5:
        what = f"The host waits for the device {evidence.syncs_per_step:.1f} times in a step."
        why = "The next kernels are launched only after that, and the GPU is idle meanwhile."
        yield max(host, WORTH_A_WORD), finding("host-sync", "warn", what, why, _step_remedy(facts, gain))
    elif evidence.kernel_share is not None and evidence.kernel_share < LEAST_KERNEL_SHARE:
        what = (
            f"Kernels run for {percent(evidence.kernel_share)} of a step; between them the GPU waits for launches."
        )
        remedy = _step_remedy(facts, gain)
        if not remedy.setting:
            remedy = _larger_batch(facts, 1 / max(evidence.kernel_share, 0.01))
        yield host, finding("launch-bound", "warn", what, "The kernels of such a batch are too small.", remedy)
    elif host >= WORTH_A_WORD:
        level: Level = "warn" if host >= LEAST_LOSS else "info"
        what = f"The model is idle {percent(host)} of the time although a batch is ready."
        why = "The program launches the next step too late: logging, another process, or too few cores."
        yield host, finding("host-late", level, what, why, _step_remedy(facts, gain))


def _step_remedy(facts: Facts, gain: float | None) -> Remedy:
    """What lets the host start a step sooner."""
    training, data = facts.evidence.settings.training, facts.evidence.settings.data
    if training.enable_eager_debug:
        return Remedy("Turn debugging off: it waits on purpose.", "training.enable_eager_debug", False, gain)
    if not training.enable_graph_mode and facts.evidence.model_gpu is not None:
        fix = "Capture the step, so that the host starts it with a few launches."
        return Remedy(fix, "training.enable_graph_mode", True, gain)
    if not data.pad_to_fixed_length and facts.evidence.model_gpu is not None:
        fix = "Give every batch the same shapes, so that the step can be captured."
        return Remedy(fix, "data.pad_to_fixed_length", True, gain)
    return Remedy("Look for `.item()`, printing and other work of the host between the steps.", gain=gain)


def _larger_batch(facts: Facts, most_gain: float | None) -> Remedy:
    """As many clips more as the memory has room for, up to four times."""
    data, evidence = facts.evidence.settings.data, facts.evidence
    shares = [
        reading.memory_used_mb / reading.memory_total_mb
        for reading in evidence.readings
        if reading.gpu == evidence.model_gpu and reading.memory_used_mb and reading.memory_total_mb
    ]
    factor = min(int(0.9 / max(shares)) if shares else 2, 4, math.ceil(most_gain or 2))
    if factor < 2:
        return Remedy("A larger batch would help, and does not fit; myxtts tune looks for the largest that does.")
    gain = None if most_gain is None else min(float(factor), most_gain)
    fix = "Train on more clips at once, with less accumulation if the effective batch shall stay."
    return Remedy(fix, "data.batch_size", factor * data.batch_size, gain)


def _pauses(facts: Facts) -> Weighed:
    for name, pause_ms in facts.division.pauses_ms.items():
        every = getattr(facts.evidence.settings.training, PAUSES[name])
        work_ms = every * facts.batch_ms * facts.evidence.settings.training.gradient_accumulation_steps
        cost = pause_ms / (work_ms + pause_ms)
        if cost >= MOST_PAUSE:
            value = every * math.ceil(pause_ms / (PAUSE_AIM * work_ms))
            gain = (1 - PAUSE_AIM) / (1 - cost)
            kind = "checkpoint" if name == "save" else "validation"
            what = f"A {kind} every {every} steps takes {pause_ms:.0f} ms, {percent(cost)} of the time."
            remedy = Remedy("Do it less often.", f"training.{PAUSES[name]}", value, gain)
            yield cost, finding(f"{name}-stall", "warn", what, "The model does nothing meanwhile.", remedy)


def _memory(facts: Facts) -> Weighed:
    for role, grown in facts.growth_mb.items():
        what = f"The memory of the {role} role grew by {grown:.0f} MB in {len(facts.steps)} steps."
        remedy = Remedy("Save more often, so that a restart costs little, and please report it.")
        if not facts.evidence.settings.data.pad_to_fixed_length:
            remedy = Remedy("Give every batch the same shapes.", "data.pad_to_fixed_length", True)
        yield 1.0, finding("memory-growth", "warn", what, "This ends in an out-of-memory error.", remedy)


def _compute(facts: Facts) -> Weighed:
    """What makes the training itself slow; it gains nothing as long as the model waits for data."""
    evidence, compute = facts.evidence, facts.division.shares["compute"]
    if evidence.model_gpu is None or facts.division.fed >= 2 * LEAST_LOSS:
        return
    settings, flops = evidence.settings, facts.flops_share
    if not settings.data.mixed_precision:
        remedy = Remedy("Compute in bf16 where that is safe.", "data.mixed_precision", True, 1 / (1 - compute / 2))
        why = "Tensor cores multiply bf16 at twice the speed of TF32, or better."
        yield compute / 2, finding("precision-off", "warn", "Products are computed in fp32.", why, remedy)
    if not settings.training.enable_graph_mode or not settings.training.enable_xla_compilation:
        key = "enable_xla_compilation" if settings.training.enable_graph_mode else "enable_graph_mode"
        why = "Uncompiled, every operation reads and writes all of its numbers."
        remedy = Remedy("Compile the step; the first one takes longer for it.", f"training.{key}", True)
        yield LEAST_LOSS, finding("graph-off", "warn", "The step runs eagerly.", why, remedy)
    is_plain = settings.data.mixed_precision and settings.training.enable_graph_mode
    if flops is not None and flops < LEAST_FLOPS_SHARE and compute >= 0.8 and is_plain:
        what = f"The GPU computes {percent(compute)} of the time and reaches {percent(flops)} of its speed."
        why = (
            f"Batches of {settings.data.batch_size} clips of a {settings.model.size} model are small work for it."
        )
        yield 0.0, finding("flops-low", "info", what, why, _larger_batch(facts, None))


def _throttling(facts: Facts) -> Weighed:
    told = [reading.throttled_by for reading in facts.evidence.readings if reading.throttled_by is not None]
    hot = [reasons for reasons in told if any("slowdown" in name or "brake" in name for name in reasons)]
    capped = [reasons for reasons in told if "power cap" in reasons]
    if len(hot) > 0.1 * len(told):
        what = f"The GPU lowered its clocks in {percent(len(hot) / len(told))} of the readings."
        remedy = Remedy("Look at fans, air flow and power supply (nvidia-smi -q -d PERFORMANCE).")
        why = ", ".join(sorted({name for reasons in hot for name in reasons})) + "."
        yield LEAST_LOSS, finding("throttled", "warn", what, why, remedy)
    elif len(capped) > 0.5 * len(told):
        what = f"The GPU ran at its power cap in {percent(len(capped) / len(told))} of the readings."
        yield 0.0, finding("power-capped", "info", what, "It is well used; a higher cap may help.", Remedy())


def _symptoms(facts: Facts, causes: list[Finding]) -> Iterator[Finding]:
    """What users see; it goes away with the first cause."""
    cause = next((found for found in causes if found.level == "warn"), None)
    where, whom = ("machine", "model") if facts.evidence.model_gpu is None else ("GPU", "GPU")
    unknown = f"No cause shows in the trace; look for other processes on this {where}."
    why = f"See {cause.code}." if cause else unknown
    remedy = Remedy(cause.fix, cause.setting, cause.value) if cause else Remedy()
    if facts.oscillation is not None:
        cycle = facts.oscillation
        turns = f"the {whom} goes from busy to idle and back ({percent(cycle.depth)} deep)"
        what = f"Every {cycle.period_s:.1f} s {turns}."
        yield finding("oscillating", "warn", what, why, remedy)
    if facts.variation.cv > MOST_CV:
        reasons = [outlier.reason for outlier in facts.variation.outliers]
        counted = ", ".join(f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons))
        what = f"The time of a step varies by {percent(facts.variation.cv)}"
        what += f"; steps of more than twice the median: {counted}." if counted else ", without single long steps."
        yield finding("uneven-steps", "warn", what, why, remedy)


def _information(facts: Facts) -> Iterator[Finding]:
    evidence, flops = facts.evidence, facts.flops_share
    told = facts.utilisation.get(-1 if evidence.model_gpu is None else evidence.model_gpu)
    if told is not None and flops is not None and told - flops > 0.3:
        what = f"The driver says {percent(told)} utilised; the GPU reaches {percent(flops)} of its speed."
        why = "The driver counts the time in which any kernel runs, however small; FLOP/s count the work."
        yield finding("utilisation-misleads", "info", what, why, Remedy())
    encode = facts.stages.get("encode")
    if evidence.is_dual and facts.division.fed < LEAST_LOSS and (encode is None or encode.busy_share < 0.4):
        what = (
            f"The data GPU is busy {percent(encode.busy_share if encode else 0)} of the time, and that is enough."
        )
        why = (
            "The recipe gives it little to do; two processes that both train (torchrun) may use both GPUs better."
        )
        yield finding("data-gpu-idle", "info", what, why, Remedy("myxtts tune measures both."))
    if evidence.no_readings and not evidence.readings:
        yield finding(
            "no-readings", "info", "There are no readings of GPUs.", f"{evidence.no_readings}.", Remedy()
        )
    if facts.division.fed < WORTH_A_WORD:
        waits = percent(facts.division.fed)
        yield finding("feed-keeps-up", "pass", f"The model waits {waits} of the time for data.", "", Remedy())


NO_HEADSPACE = 1.02
"""A perfect feed that gains less is no news."""


class _Bar(NamedTuple):
    """What a grade asks for."""

    grade: str
    data_busy: float
    model_busy: float
    cv: float
    speed: float = 0.0
    """Of two GPUs, as a multiple of one."""


_BARS = (
    _Bar("excellent", 0.6, 0.9, 0.2, speed=2.0),
    _Bar("good", 0.5, 0.8, 0.3),
    _Bar("minimum", 0.4, 0.7, 0.4),
)
_BELOW = "below minimum"


@dataclass(frozen=True)
class Verdict:
    """What was concluded. All shares are of the time of the steps that count, and between 0 and 1."""

    sentence: str
    grade: str
    """excellent, good, minimum or below minimum; empty on the CPU and where nothing was measured."""
    grade_notes: list[str]
    """What kept it from the next grade, and what did not count."""
    bound: str
    """What decides the speed: a data stage, `train`, `host`, or a pause (`save`, `validate`)."""
    shares: Mapping[str, float]
    """compute, wait, copy, host, other: they add to 1."""
    waits: Mapping[str, float]
    """`wait` and `copy` by the stage that the model waited for."""
    headspace: float | None
    """Speed with a perfect feed, as a multiple of the present one."""
    headspace_measured: bool
    """By replaying a batch, on a CPU as far as it can be explained; else it is reckoned from the waits."""
    stages: Mapping[str, StageTime]
    rings: Mapping[str, RingState]
    step_cv: float
    steady_cv: float
    """Without the outliers."""
    outliers: list[Outlier]
    oscillation: Oscillation | None
    recompilations: int
    growth_mb: Mapping[str, float]
    """By role; empty when nothing grew."""
    utilisation: Mapping[int, float]
    """By GPU, as the driver tells it."""
    flops_share: float | None
    findings: list[Finding]
    """The dearest cause first, then symptoms, then information."""

    def to_json(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        record = dict(vars(self))
        for name in ("stages", "rings"):
            record[name] = {key: value._asdict() for key, value in record[name].items()}
        record["outliers"] = [outlier._asdict() for outlier in self.outliers]
        record["oscillation"] = self.oscillation._asdict() if self.oscillation else None
        record["utilisation"] = {str(gpu): share for gpu, share in self.utilisation.items()}
        record["findings"] = [found.to_json() for found in self.findings]
        return record


def judge(evidence: Evidence) -> Verdict:
    """The verdict on this evidence."""
    facts = establish(evidence)
    findings = advise(facts)
    grade, notes = _grade(facts)
    return Verdict(
        sentence=_sentence(facts, findings),
        grade=grade,
        grade_notes=notes,
        bound=facts.bound,
        shares=facts.division.shares,
        waits=facts.division.waits,
        headspace=facts.headspace,
        headspace_measured=bool(evidence.replayed),
        stages=facts.stages,
        rings=facts.rings,
        step_cv=facts.variation.cv,
        steady_cv=facts.variation.steady_cv,
        outliers=facts.variation.outliers,
        oscillation=facts.oscillation,
        recompilations=facts.recompilations,
        growth_mb=facts.growth_mb,
        utilisation=facts.utilisation,
        flops_share=facts.flops_share,
        findings=findings,
    )


def _sentence(facts: Facts, findings: list[Finding]) -> str:
    if not facts.is_measured:
        return "Nothing was measured: no step was trained."
    shares, bound = facts.division.shares, facts.bound
    headspace = facts.headspace if facts.headspace is not None else 1.0
    if bound == "train" and facts.competition is not None and headspace >= 1 + LEAST_LOSS:
        return f"{_competing(facts, headspace)}{_first_change(findings)}."
    if bound == "train":
        text = f"Training itself is the limit: the model computes {percent(shares['compute'])} of the time"
    elif bound == "host":
        text = f"The program is the limit: the model is idle {percent(shares['host'])} of the time, though fed"
    elif bound in ("save", "validate"):
        text = f"Training stands still {percent(shares['other'])} of the time to {bound}"
    else:
        whom = bound if bound in DATA_STAGES else "the feed"
        text = (
            f"Training is bound by {whom}: the model waits for batches {percent(facts.division.fed)} of the time"
        )
    if headspace >= NO_HEADSPACE:
        text += f", and a perfect feed would be {headspace:.{1 if headspace >= 1.1 else 2}f}× faster"
    elif bound == "train":
        text += ", and a perfect feed would gain nothing"
    return f"{text}{_first_change(findings)}."


def _competing(facts: Facts, headspace: float) -> str:
    """What to say of a model that does not wait, and is faster with nothing beside it."""
    shared = "use the same GPU" if facts.evidence.model_gpu is not None else "use the same processor"
    busy = percent(facts.division.shares["compute"])
    return (
        f"Training is slower beside the pipeline than alone: the model computes {busy} of the time and does not "
        f"wait for batches, but both {shared}, and alone it would be {headspace:.1f}× as fast"
    )


def _first_change(findings: list[Finding]) -> str:
    first = next((found for found in findings if found.level == "warn"), None)
    if first is None or not first.setting or first.value is None:
        return ""
    return f"; set {first.setting} to {json.dumps(first.value)}"


def _grade(facts: Facts) -> tuple[str, list[str]]:
    """The order's grades; where the recipe gives the data GPU little to do, that counts against nobody."""
    evidence = facts.evidence
    if evidence.model_gpu is None or not facts.is_measured:
        return "", ["grades are for GPUs"] if facts.is_measured else []
    if evidence.ran_out_of_memory:
        return _BELOW, ["the GPU ran out of memory"]
    notes: list[str] = []
    data_busy: float | None = None
    if evidence.is_dual:
        data_busy = busy_share(evidence.spans, GPU_STAGES, facts.division.window)
        if data_busy <= _BARS[0].data_busy and facts.division.fed < LEAST_LOSS:
            busy = f"the recipe gives the data GPU little to do ({percent(data_busy)} busy)"
            notes.append(f"{busy}, and the model does not wait for it: this does not count")
            data_busy = None
        if evidence.baseline is None:
            notes.append("the speed on one GPU was not measured and does not count")
    grade = _BELOW
    for bar in reversed(_BARS):
        lacks = _lacks(facts, bar, data_busy)
        if lacks:
            notes += [f"not {bar.grade}: {lack}" for lack in lacks]
            break
        grade = bar.grade
    return grade, notes


def _lacks(facts: Facts, bar: _Bar, data_busy: float | None) -> list[str]:
    """What a grade asks for and the run does not reach; a `data_busy` of None does not count."""
    shares, speed = facts.division.shares, facts.evidence.baseline
    model_busy = shares["compute"] / max(1 - shares["other"], 0.01)
    lacks = []
    if model_busy <= bar.model_busy:
        lacks.append(
            f"the model GPU is busy {percent(model_busy)} of the time, not over {percent(bar.model_busy)}"
        )
    if data_busy is not None and data_busy <= bar.data_busy:
        lacks.append(f"the data GPU is busy {percent(data_busy)} of the time, not over {percent(bar.data_busy)}")
    if facts.variation.cv >= bar.cv:
        lacks.append(f"step times vary by {percent(facts.variation.cv)}, not under {percent(bar.cv)}")
    if facts.evidence.is_dual and speed is not None and speed < bar.speed:
        lacks.append(f"the run is {speed:.1f}× as fast as on one GPU, not {bar.speed:.0f}×")
    return lacks


WARMUP_REPORTS = 3
"""Reports at the beginning that decide nothing: kernels are compiled, buffers fill, memory is taken."""
WINDOW_REPORTS = 12
"""Reports that a warning looks at."""
FEWEST_REPORTS = 4
"""Reports that are needed to speak of most of the time."""
MOST_CV_LIVE, MOST_IDLE, MOST_GROWTH = 0.3, 0.05, 0.05
CLEAR_REPORTS = 5
"""Reports in a row without its reason that end a warning; it is given again only after that."""
CPU_CLEAR_REPORTS = 100
"""The same on a CPU, where other programs come and go."""

_FLOW = ("host", "device", "handoff", "model")
"""The rings in the order in which a batch passes them: the first empty one lies behind the slow stage."""
_CAUSES = {
    "host": "gathering batches on the host is too slow: raise --num-workers, keep data.native_loading on, "
    "or move the cache to a faster disk with --cache-dir",
    "device": "batches are uploaded too late: turn on data.prefetch_to_gpu and data.enhanced_gpu_prefetch",
    "encode": "encoding batches takes longer than training on them: turn on data.optimize_cpu_gpu_overlap or give "
    "it a GPU of its own with --data-gpu and --model-gpu (codes are kept, so the first epoch is the slowest)",
    "handoff": "batches cross too slowly from the data GPU to the model GPU: choose two GPUs with peer access "
    "(myxtts check --gpus shows it)",
}
_NOT_THE_DATA = (
    "the buffers hold batches, so it is not the data: the step is compiled again for other shapes (keep "
    "--enable-static-shapes on) or other processes use the same device (nvidia-smi or top lists them)"
)
_CPU_CAUSES = {
    "host": _CAUSES["host"],
    "later": "preparing batches takes the same cores as training on them (codes are kept, so the first epoch is "
    "the slowest)",
    "": "other programs probably use the same cores (top lists them); on a CPU this is common and does no harm",
}
"""A CPU has one device, which is neither uploaded to nor shared out: the cores are all there is."""


class Warning(NamedTuple):
    """Something to change: what was found, its likely cause, and what to do about it."""

    code: str
    """variation, starving, or memory-ROLE."""
    text: str


def warnings_of(history: Sequence[StepReport]) -> list[Warning]:
    """What holds at the end of these reports of one stage, oldest first; the first ones are warm-up."""
    reports = history[WARMUP_REPORTS:][-WINDOW_REPORTS:]
    if len(reports) < FEWEST_REPORTS:
        return []
    found = []
    cause = _cause(reports)
    if (cv := reports[-1].step_cv) > MOST_CV_LIVE:
        limit = f"more than {100 * MOST_CV:.0f} %"
        text = f"The time of a step varies by {100 * cv:.0f} % ({limit}): {cause or _not_the_data(reports)}."
        found.append(Warning("variation", text))
    idle_share = sum(report.idle_share for report in reports) / len(reports)
    if idle_share > MOST_IDLE and cause and _is_mostly_empty(reports, "model"):
        text = f"The model waits for batches {100 * idle_share:.0f} % of the time: {cause}."
        found.append(Warning("starving", text))
    roles = [role for role in reports[0].memory_mb if all(role in report.memory_mb for report in reports)]
    return found + [_growth_warning(role, reports) for role in roles if _grows(role, reports)]


class Watch:
    """Gives each warning once, until its reason has been gone for a while."""

    def __init__(self) -> None:
        self._history: deque[StepReport] = deque(maxlen=WARMUP_REPORTS + WINDOW_REPORTS)
        self._given: dict[str, int] = {}
        """Warnings by code, with the number of reports since their reason was last there."""

    def add(self, report: StepReport) -> list[Warning]:
        """The warnings that this report gives rise to; another stage starts afresh."""
        clear_reports = CPU_CLEAR_REPORTS if _is_on_cpu(report) else CLEAR_REPORTS
        if self._history and self._history[-1].stage != report.stage:
            self._history.clear()
            if not _is_on_cpu(report):  # there the cause is another program, whatever is trained
                self._given.clear()
        self._history.append(report)
        holding = warnings_of(list(self._history))
        fresh = [warning for warning in holding if warning.code not in self._given]
        quiet = {code: reports + 1 for code, reports in self._given.items() if reports + 1 < clear_reports}
        self._given = quiet | {warning.code: 0 for warning in holding}
        return fresh


def _cause(reports: Sequence[StepReport]) -> str:
    """What keeps the first ring empty that is so most of the time; "" if there is none."""
    empty = _empty_ring(reports)
    if _is_on_cpu(reports[-1]):
        return _CPU_CAUSES["host" if empty == "host" else "later"] if empty else ""
    if empty == "handoff" or (empty == "model" and "handoff" not in reports[-1].rings):
        return _CAUSES["encode"]
    return _CAUSES["handoff" if empty == "model" else empty] if empty else ""


def _not_the_data(reports: Sequence[StepReport]) -> str:
    return _CPU_CAUSES[""] if _is_on_cpu(reports[-1]) else _NOT_THE_DATA


def _is_on_cpu(report: StepReport) -> bool:
    """Only GPUs have memory to report."""
    return not report.memory_mb


def _empty_ring(reports: Sequence[StepReport]) -> str:
    """The first ring that is empty most of the time; "" if none is or the trainer never waited."""
    rings = [name for name in _FLOW if name in reports[-1].rings]
    if all(report.rings.get("model", (0, 0))[0] > 0 for report in reports):
        return ""
    return next((name for name in rings if _is_mostly_empty(reports, name)), "")


def _is_mostly_empty(reports: Sequence[StepReport], ring: str) -> bool:
    return sum(report.rings.get(ring, (0, 0))[0] == 0 for report in reports) > len(reports) / 2


def _grows(role: str, reports: Sequence[StepReport]) -> bool:
    """Whether a role's memory never falls and rises in most reports: one jump is a validation, not a leak."""
    used_mb = [report.memory_mb[role] for report in reports]
    rises = [later - earlier for earlier, later in pairwise(used_mb)]
    steadily = min(rises) >= 0 and sum(rise > 0 for rise in rises) > len(rises) / 2
    return steadily and len(reports) == WINDOW_REPORTS and used_mb[-1] > (1 + MOST_GROWTH) * used_mb[0]


def _growth_warning(role: str, reports: Sequence[StepReport]) -> Warning:
    first, last = reports[0], reports[-1]
    text = (
        f"The memory of the {role} role grew from {first.memory_mb[role]:.0f} to {last.memory_mb[role]:.0f} MB "
        f"between steps {first.step} and {last.step}: this looks like a leak, and would end in an out-of-memory "
        "error. Keep --enable-static-shapes on; if it is on, lower --save-step, so that a restart costs little."
    )
    return Warning(f"memory-{role}", text)
