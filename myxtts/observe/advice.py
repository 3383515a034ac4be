"""From facts to findings: each conclusion with its cost, the dearest cause first, then symptoms and information.

Every code that a verdict can give stands in `CODES` and in docs/profiling.md. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from myxtts.observe.division import PAUSES
from myxtts.observe.evidence import DATA_STAGES
from myxtts.observe.facts import LEAST_LOSS, Facts
from myxtts.observe.findings import Finding, Level
from myxtts.observe.remedies import Remedy, feed_finding, finding, percent, second_gpu

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
