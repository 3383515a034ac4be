"""What to do when the model waits for a data stage: the setting that helps most, its value, what it gains.

Pure functions from facts to one finding per stage. Knows the settings by name, not what carries them out.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from myxtts.observe.evidence import StageTime
from myxtts.observe.facts import LEAST_LOSS, Facts
from myxtts.observe.findings import Finding, Level

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
    depth = facts.evidence.depths.get("host") or facts.evidence.settings.data.prefetch_buffer_size
    longest = math.ceil(time.longest_ms / facts.train_ms) + 2 if time is not None and facts.train_ms else 0
    stage = "gather" if time is not None else "feed"
    fix = "Keep more batches ready on the host."
    return Remedy(fix, "data.prefetch_buffer_size", max(2 * depth, longest), facts.gain_without(stage))


def second_gpu(facts: Facts, gain: float) -> Remedy:
    """Give the data role a GPU of its own."""
    model = facts.evidence.model_gpu or 0
    other = 1 if model == 0 else 0
    return Remedy(f"Use two GPUs: --data-gpu {other} --model-gpu {model}.", "data.data_gpu", other, gain)
