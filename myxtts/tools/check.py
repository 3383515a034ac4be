"""`myxtts check`: every question that can be answered about a run before it starts, as findings.

The list of questions stands here, with those about corpus, disk and weights; `check_settings` asks about the
settings, `check_gpus` tries the GPUs. A finding is data: whoever calls decides how to show it and what to return.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from myxtts.assembly.folder import RunFolder
from myxtts.assembly.identity import require_same_run
from myxtts.config import SAMPLE_RATE
from myxtts.data.split import held_out
from myxtts.devices import Machine
from myxtts.errors import ConfigError, DatasetError, MyXTTSError
from myxtts.observe.findings import Finding, Level
from myxtts.settings import Loaded, load, presets
from myxtts.settings.table import specs
from myxtts.tools import check_settings
from myxtts.tools.case import Case, Host, change

CODES = {
    "gpus": "GPUs of the machine, and whether PyTorch can use them",
    "devices": "the GPUs that the settings ask for, and their roles",
    "caps": "memory caps: possible, and with an effect",
    "native-loading": "batches are gathered from the packed cache",
    "workers": "threads and processes that prepare and load",
    "prefetch": "batches kept ready in host memory",
    "upload": "batches are uploaded ahead of use, beside the training step",
    "batch-size": "clips per micro-step, for this card",
    "fixed-shapes": "every batch has the same shapes",
    "compilation": "the step is compiled and captured",
    "precision": "bf16 where that is safe",
    "model-memory": "weights, gradients and optimiser against the memory",
    "buffers": "batches that wait, against the memory",
    "preset": "settings known to be good on this card",
    "weights": "the weights and the vocabulary that training starts from",
    "run": "the run in the folder can be continued with these settings",
    "corpus": "the corpus is there and readable",
    "prepared": "the corpus is in the cache already",
    "disk-cache": "room on the disk for the prepared corpus",
    "disk-checkpoints": "room on the disk for the checkpoints",
    "hint": "a setting that would work but does not suit machine or corpus",
    "driver": "the NVIDIA driver (--gpus)",
    "peers": "direct copies between the two GPUs (--gpus)",
    "caps-held": "an allocation beyond a cap is refused (--gpus)",
    "transfer": "bytes copied to the GPUs and back arrive unchanged (--gpus)",
    "rehearsal": "a short training through the whole pipeline (--gpus)",
    "placement": "model and batches are on the model's device, frozen work on the data's (--gpus)",
    "optimisations": "pinned memory, graphs, bf16 and fixed shapes, seen while the rehearsal ran (--gpus)",
    "not-checked": "what this machine could not show (--gpus)",
}
"""Every code that a check can give, and what it is about."""

KEEP_APART = "keep the two apart with --checkpoint-dir DIR, or give --reset-training"
SET_ASIDE_SHARE = 0.05
"""Of a corpus that may be unusable before it is worth a warning."""
SAVED_BYTES_PER_WEIGHT = 12
"""Of a checkpoint: the weight and two moments of AdamW."""


def check(loaded: Loaded, machine: Machine | None = None, host: Host | None = None) -> list[Finding]:
    """Findings about a run with these settings on this machine; starts nothing and writes nothing."""
    return answers(Case(loaded, machine or Machine.look(), host or Host.look()))


def answers(case: Case) -> list[Finding]:
    """What every question finds, and then the hints that say something else."""
    findings = [question(case) for question in QUESTIONS]
    settled = {finding.setting for finding in findings if finding.level != "pass"}
    return findings + [hint for hint in hints(case) if not hint.setting or hint.setting not in settled]


def passed(findings: Sequence[Finding]) -> bool:
    """Whether nothing fails; warnings do not count."""
    return all(finding.level != "fail" for finding in findings)


def to_json(findings: Sequence[Finding]) -> str:
    """Findings for other programs."""
    counts = Counter(finding.level for finding in findings)
    found = [finding.to_json() for finding in findings]
    return json.dumps({"passed": passed(findings), "counts": counts, "findings": found}, indent=2)


def native_loading(case: Case) -> Finding:
    """Whether batches come from the packed cache."""
    if case.data.native_loading:
        return Finding("native-loading", "pass", "Batches are gathered from the packed cache")
    why = "every clip is decoded again for every batch, in Python: gathering from the cache is 17 times as fast"
    needed, free = case.packed_bytes, case.host.free_bytes(case.cache_folder)
    if needed > free:
        why += f"; but the disk has no room for about {_size(needed)}"
        fix = "free some space, or name another disk with --cache-dir"
        return Finding("native-loading", "warn", "Audio files are decoded for every batch", why, fix)
    fix_it = change("data.native_loading", True)
    return Finding("native-loading", "fail", "Audio files are decoded for every batch", why, **fix_it)


def weights(case: Case) -> Finding:
    """Whether what training starts from is there."""
    for key in ("training.init_from", "data.tokenizer"):
        path: Path | None = getattr(case.training if key.startswith("training") else case.data, key.split(".")[1])
        if path is not None and not path.exists():
            fix = f"correct {specs()[key].flags[0]}, or leave it out"
            return Finding("weights", "fail", f"{key} = {path}: there is no such file or folder", "", fix)
    source = case.training.init_from
    return Finding("weights", "pass", f"Starts from {source}" if source else "Starts from scratch")


def run(case: Case) -> Finding:
    """Whether training would continue what is in its folder, or refuse to."""
    folder = RunFolder(case.training.checkpoint_dir)
    if not folder.has_begun:
        return Finding("run", "pass", f"A new run in {folder.folder}")
    if case.training.reset_training:
        return Finding("run", "pass", f"Starts over in {folder.folder}; the run there is put aside")
    try:
        require_same_run(case.loaded.settings, folder, case.prepared)
    except MyXTTSError as error:
        what, *why = str(error).splitlines()
        fix = why.pop() if why else KEEP_APART
        return Finding("run", "fail", what.rstrip(":"), "; ".join(line.strip() for line in why), fix)
    if case.prepared is None and (other := _other_corpus(case, folder)):
        what = f"The run in {folder.folder} was made with another corpus: {other}"
        only_if = "training continues it only if clips and vocabulary are the same"
        return Finding("run", "warn", what, only_if, KEEP_APART)
    return Finding("run", "pass", f"Continues the run in {folder.folder}")


def _other_corpus(case: Case, folder: RunFolder) -> str:
    """The corpus of the run, if it is another one and that is known."""
    try:
        own = load(folder.folder / "settings.yaml", {}).settings.data.train_data
    except ConfigError:
        return ""
    then, now = (path and path.resolve() for path in (own, case.data.train_data))
    return "" if then == now else str(own or "the embedded one")


def corpus(case: Case) -> Finding:
    """Whether there is a corpus, and most of it can be used."""
    if isinstance(case.corpora, DatasetError):
        fix = "correct --train-data and --val-data; docs/recordings.md shows the forms of a corpus"
        return Finding("corpus", "fail", "The corpus cannot be read", str(case.corpora), fix)
    num_clips = sum(len(part.clips) for part in case.corpora)
    aside = [item for part in case.corpora for item in part.set_aside]
    if case.prepared is not None:
        num_clips, aside = len(case.prepared.train) + len(case.prepared.val), case.prepared.set_aside
    reasons = ", ".join(f"{count} × {why}" for why, count in Counter(item.reason for item in aside).most_common(3))
    if not len(case.corpora[0].clips):
        return Finding(
            "corpus", "fail", "No line of the metadata has an audio file", reasons, "correct the metadata"
        )
    what = f"{num_clips} clips in {' and '.join(map(str, case.corpus_folders))}"
    if len(aside) > SET_ASIDE_SHARE * (num_clips + len(aside)):
        fix = "run myxtts prepare: it lists every clip with its reason"
        return Finding("corpus", "warn", f"{what}; {len(aside)} cannot be used", reasons, fix)
    if case.data.train_data is None:
        return Finding(
            "corpus", "info", f"{what}: the embedded corpus, for a demonstration", "", "give --train-data"
        )
    return Finding("corpus", "pass", what, reasons)


def prepared(case: Case) -> Finding:
    """Whether the corpus is in the cache as these settings need it."""
    if case.prepared is not None:
        return Finding("prepared", "pass", f"The corpus is prepared in {case.cache_folder}")
    if isinstance(case.corpora, DatasetError):
        return Finding("prepared", "info", "Not checked: the corpus cannot be read")
    folder = "" if case.data.train_data is None else f" --train-data {case.data.train_data}"
    if case.has_stores:
        what = f"The cache in {case.cache_folder} was last used with other settings or clips"
        why = "training looks through it when it starts, and redoes what has changed"
    else:
        what, why = "The corpus is not prepared yet", "training prepares it when it starts"
    if RunFolder(case.training.checkpoint_dir).has_begun and not case.training.reset_training:
        return Finding("prepared", "info", what, why)  # with the vocabulary of the run, which only training knows
    return Finding("prepared", "info", what, why, f"run myxtts prepare{folder} to have it done before")


def disk_cache(case: Case) -> Finding:
    """Whether the prepared corpus has room."""
    if case.prepared is not None or not case.data.native_loading:
        return Finding("disk-cache", "pass", "No more room is needed for the cache")
    fix = "free some space, or name another disk with --cache-dir"
    return _room(case, "disk-cache", "the prepared corpus", case.packed_bytes, case.cache_folder, fix)


def disk_checkpoints(case: Case) -> Finding:
    """Whether the checkpoints of all stages have room: those kept, the best one, and one being written."""
    kept = case.training.keep_checkpoints + 2
    per_weight = SAVED_BYTES_PER_WEIGHT + (4 if case.training.ema_decay else 0)
    needed = kept * per_weight * sum(case.num_trained(stage) for stage in case.stages)
    fix = "free some space, name another disk with --checkpoint-dir, or give --keep 1"
    folder = case.training.checkpoint_dir
    return _room(case, "disk-checkpoints", f"{kept} checkpoints of each stage", needed, folder, fix)


def hints(case: Case) -> Iterator[Finding]:
    """What `train` would point out; the setting that a hint begins with is the one to change."""
    if isinstance(case.corpora, DatasetError):
        return
    card = case.model_gpu
    clips, hours = case.corpora[0].clips, None
    num_clips = int((~held_out(clips, case.data)).sum())
    num_val_clips = len(clips) - num_clips or None
    if case.prepared is not None:
        num_clips, num_val_clips = len(case.prepared.train), len(case.prepared.val)
        hours = float(case.prepared.train.num_samples.sum()) / SAMPLE_RATE / 3600
    for text in presets.hints(
        case.loaded.settings,
        len(case.machine.gpus),
        card.memory_mb if card else 0,
        max(num_clips, 1),
        case.host.cores,
        num_val_clips=num_val_clips,
        speech_hours=hours,
    ):
        what, _, fix = text.rpartition("; ")
        key = text.split(" = ")[0]
        if case.loaded.origin.get(key) == "preset":  # what a bundle or the demonstration sets is not the user's
            continue
        yield Finding("hint", "warn", what or text, "", fix if what else "", key if key in specs() else "")


def _room(case: Case, code: str, what: str, needed: int, folder: Path, fix: str) -> Finding:
    free = case.host.free_bytes(folder)
    text = f"{_size(free)} free at {folder}; about {_size(needed)} for {what}"
    level: Level = "fail" if needed > free else "warn" if 1.5 * needed > free else "pass"
    return Finding(code, level, text, "", "" if level == "pass" else fix)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


QUESTIONS: Sequence[Callable[[Case], Finding]] = (
    check_settings.gpus,
    check_settings.devices,
    check_settings.caps,
    native_loading,
    check_settings.workers,
    check_settings.prefetch,
    check_settings.upload,
    check_settings.batch_size,
    check_settings.fixed_shapes,
    check_settings.compilation,
    check_settings.precision,
    check_settings.model_memory,
    check_settings.buffers,
    check_settings.preset,
    weights,
    run,
    corpus,
    prepared,
    disk_cache,
    disk_checkpoints,
)
"""Every question, in the order of the answers."""
