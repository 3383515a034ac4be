"""Rules about what is slow, why, and which setting to change: one table for every tool that gives advice.

`RULES` look at settings, machine and corpus before anything runs: `check` and the hints of `train` read them, and
`tune` tries their switches. `WAIT_RULES` explain why the model waits for a phase: `diagnosis` reads them with a
profile at hand, `profile --data-only` without one. The live warnings of a run name the same fixes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, itemgetter
from statistics import fmean
from typing import Any, Literal, NamedTuple

from myxtts.config import (
    HOP_SAMPLES,
    MAX_AUTO_PREFETCH,
    MODEL_SIZES,
    PRESETS,
    SAMPLE_RATE,
    DataSettings,
    Settings,
    TrainingSettings,
    least_memory_mb,
    mel_frames,
    most_gatherers,
    preset_for,
    stage_steps,
    stages_of,
)
from myxtts.observe.breakdown import DATA_PHASES, UNKNOWN_PHASE, Breakdown, PhaseTime, ProfileData

Level = Literal["pass", "info", "skip", "warn", "fail"]  # `skip`: this machine cannot check it

MIN_BATCH = 4  # clips below which launching kernels takes longer than running them, on any card
MIN_PREFETCH = 4  # batches in host memory below which one slow clip stops the feed
MIN_HOURS = 5.0  # hours of speech below which `normal` and `big` overfit instead of learning to speak
MAX_FINE_TUNING_RATE = 1e-3


@dataclass(frozen=True)
class Finding:
    """A conclusion, why it holds, and what to change; `code` is stable and explained in docs/profiling.md."""

    code: str
    level: Level
    what: str
    why: str = ""
    fix: str = ""  # a sentence; empty if there is nothing to do
    setting: str = ""  # the dotted key to change, such as `data.batch_size`
    value: Any = None  # the value to change it to
    gain: float | None = None  # expected speed as a multiple of the present one, from measured times


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The settings, machine and corpus that rules look at."""

    settings: Settings = field(default_factory=Settings)
    num_gpus: int = 0  # GPUs that this process may use
    roles: tuple[int, int] = (0, 1)  # the GPUs for data and model, if there are two
    cores: int = 0
    gpu_memory_mb: int = 0  # memory of the GPU that trains; 0 on the CPU
    num_clips: int = 1  # training clips of all processes
    num_val_clips: int | None = None
    speech_hours: float | None = None
    processes: int = 1

    @property
    def data(self) -> DataSettings:
        return self.settings.data

    @property
    def training(self) -> TrainingSettings:
        return self.settings.training

    @property
    def on_gpu(self) -> bool:
        return self.num_gpus > 0

    @property
    def card(self) -> str | None:
        """The preset for the GPU that trains; None on the CPU."""
        cap_mb = self.data.model_gpu_memory if self.data.enable_memory_isolation else None
        return preset_for(self.gpu_memory_mb, cap_mb) if self.gpu_memory_mb else None

    @property
    def card_batch(self) -> int:
        return int(PRESETS[self.card]["data.batch_size"]) if self.card is not None else 0

    @property
    def wants_graph(self) -> bool:
        """True if the step is a graph as soon as shapes are fixed."""
        return self.on_gpu and self.training.enable_graph_mode and not self.training.enable_eager_debug

    @property
    def decodes_live(self) -> bool:
        return self.on_gpu and not self.data.native_loading

    @property
    def is_large(self) -> bool:
        return self.settings.model.size in MODEL_SIZES[MODEL_SIZES.index("normal") :]

    @property
    def is_whole(self) -> bool:
        """True if a large network is trained without adapters and with all activations kept."""
        return self.is_large and not (self.settings.model.lora_rank or self.settings.model.gradient_checkpointing)

    @property
    def most_workers(self) -> int:
        return most_gatherers(self.data, self.cores)

    @property
    def hours(self) -> float:
        """Hours of speech, or the most that so many clips can hold."""
        longest_s = mel_frames(self.data) * HOP_SAMPLES / SAMPLE_RATE
        return self.num_clips * longest_s / 3600 if self.speech_hours is None else self.speech_hours

    @property
    def own_clips(self) -> int:
        """Training clips of this process."""
        return self.num_clips // self.processes

    @property
    def validates(self) -> bool:
        if self.num_val_clips is None:
            return self.data.val_data is not None or self.data.val_fraction > 0
        return self.num_val_clips > 0

    @cached_property
    def end(self) -> tuple[int, str]:
        """The last step of the shortest stage, and the flag that ends it."""
        batch, batches = self.data.batch_size, self.training.gradient_accumulation_steps * self.processes
        stages = stages_of(self.settings)
        return min(stage_steps(self.training, stage, self.num_clips, batch, batches) for stage in stages)

    @property
    def first_early_stop(self) -> int:
        return (self.training.early_stop + 1) * self.training.val_step


@dataclass(frozen=True)
class Rule:
    """Advice before anything runs. Texts have no full stop; `{s.cores}` stands for a part of the situation."""

    code: str  # the check that it belongs to, or `hint`
    level: Level | Callable[[Situation], Level]
    setting: str
    value: Any  # the value to change it to, or a function that returns it
    what: str
    why: str = ""
    fix: str = ""  # the change in words; if empty, the flag says it all
    when: Callable[[Situation], bool] | None = None
    """None for a switch (`tune` tries these): the rule holds whenever the setting differs from `value`."""
    gpu_only: bool = False
    hint: Callable[[Situation], bool] = lambda _: False
    """True if `train` says it too when it starts; hints are always said."""

    def holds(self, situation: Situation) -> bool:
        if self.gpu_only and not situation.on_gpu:
            return False
        return self.is_off(situation.settings) if self.when is None else self.when(situation)

    def is_off(self, settings: Settings) -> bool:
        return bool(attrgetter(self.setting)(settings) != self.value)

    def finding(self, situation: Situation) -> Finding:
        level, value = (part(situation) if callable(part) else part for part in (self.level, self.value))
        what, why, fix = (text.format(s=situation) for text in (self.what, self.why, self.fix))
        if self.code == "hint" and self.setting:
            what = f"{self.setting} = {attrgetter(self.setting)(situation.settings)}: {what}"
        return Finding(self.code, level, what, why, fix, self.setting, value)


RULES = (
    Rule(
        "compilation", "fail", "training.enable_eager_debug", False,
        "Eager debugging is on", "it checks every operation and is slow on purpose", "turn it off",
        hint=lambda _: True,
    ),
    Rule(
        "native-loading", "fail", "data.native_loading", True,
        "Audio files are decoded for every batch",
        "the packed cache holds them decoded once, for all epochs", "gather from the packed cache",
    ),
    Rule(
        "fixed-shapes", lambda s: "fail" if s.wants_graph else "warn", "data.pad_to_fixed_length", True,
        "Batches differ in shape",
        "only a step with fixed shapes is compiled, captured as a graph and free of allocations",
        "use one shape for every batch", hint=lambda s: s.wants_graph,
    ),
    Rule(
        "compilation", lambda s: "warn" if s.is_large else "fail", "training.enable_graph_mode", True,
        "Steps run eagerly", "a graph is launched at once, an eager step kernel by kernel",
        "run the step as a graph", gpu_only=True,
    ),
    Rule(
        "compilation", "warn", "training.enable_xla_compilation", True,
        "Steps are not compiled", "fused kernels read and write memory less often",
        "compile the step, which makes the first one slower", gpu_only=True,
    ),
    Rule(
        "precision", "fail", "data.mixed_precision", True,
        "Everything is computed in fp32", "bf16 uses the tensor cores and halves the memory of activations",
        "compute in bf16 where that is safe", gpu_only=True,
    ),
    Rule(
        "upload", "fail", "data.prefetch_to_gpu", True,
        "Batches are uploaded and encoded only when the model asks for them",
        "a batch that is prepared ahead does not make its step wait", "upload batches ahead of use",
    ),
    Rule(
        "upload", "warn", "data.enhanced_gpu_prefetch", True,
        "Batches are copied from pageable memory",
        "copies from pinned memory on a stream of their own overlap with computation",
        "upload from pinned memory", gpu_only=True,
    ),
    Rule(
        "upload", "warn", "data.optimize_cpu_gpu_overlap", True,
        "The data role's kernels share the trainer's stream",
        "on a stream of their own they overlap with the training step",
        "let encoding overlap with the training step", gpu_only=True,
    ),
    Rule(
        "workers", lambda s: "fail" if s.decodes_live and 2 * s.data.num_workers <= s.cores else "warn",
        "data.num_workers", lambda s: s.cores, "{s.data.num_workers} of {s.cores} usable cores are used",
        "they prepare the corpus and gather the batches", when=lambda s: s.data.num_workers < s.most_workers,
    ),
    Rule(
        "prefetch", lambda s: "fail" if s.on_gpu and s.data.prefetch_buffer_size == 1 else "warn",
        "data.prefetch_buffer_size", MAX_AUTO_PREFETCH,
        "Only {s.data.prefetch_buffer_size} batch(es) kept ready on the host",
        "one slow clip stops the feed",
        when=lambda s: 0 < (s.data.prefetch_buffer_size or 0) < MIN_PREFETCH,
    ),
    Rule(
        "batch-size", lambda s: "fail" if s.data.batch_size < MIN_BATCH else "warn",
        "data.batch_size", lambda s: s.card_batch, "Only {s.data.batch_size} clips per batch",
        "launching kernels takes longer than running them; {s.card_batch} suits this card",
        when=lambda s: s.card_batch > 0 and s.data.batch_size < max(s.card_batch // 4, MIN_BATCH),
    ),
    Rule(
        "batch-size", "warn", "data.batch_size", lambda s: s.card_batch, "{s.data.batch_size} clips per batch",
        "full training of `{s.settings.model.size}` may not fit the GPU with batches of this size",
        when=lambda s: s.card_batch > 0 and s.is_whole and s.data.batch_size > 2 * s.card_batch,
    ),
    Rule(
        "preset", "warn", "training.preset", lambda s: s.card,
        "The preset {s.training.preset} is for a larger card",
        "its batches may not fit the {s.gpu_memory_mb} MB of this GPU", hint=lambda _: True,
        when=lambda s: s.card is not None and s.training.preset is not None
        and least_memory_mb(s.training.preset) > least_memory_mb(s.card),
    ),
    Rule(
        "hint", "warn", "data.num_workers", lambda s: s.cores,
        "this machine has {s.cores} usable cores, and no more workers are started",
        when=lambda s: s.data.num_workers > s.cores and s.data.num_workers != DataSettings().num_workers,
    ),
    Rule(
        "hint", "warn", "", None, "{s.num_gpus} GPUs were found and one is used",
        fix="train on all with torchrun --nproc-per-node {s.num_gpus}, or let a second one prepare the batches "
        "with --data-gpu {s.roles[0]} --model-gpu {s.roles[1]}",
        when=lambda s: s.num_gpus > 1 and s.data.data_gpu is None,
    ),
    Rule(
        "hint", "warn", "model.size", None, "full training may not fit the {s.gpu_memory_mb} MB of the GPU",
        fix="start with --preset {s.card}",
        when=lambda s: s.card in ("8gb", "12gb") and s.training.preset is None and s.is_whole,
    ),
    Rule(
        "hint", "warn", "data.batch_size", lambda s: s.own_clips,
        "there are only {s.own_clips} training clips, and the rest of a batch is padding",
        when=lambda s: DataSettings().batch_size != s.data.batch_size > s.own_clips > 0,
    ),
    Rule(
        "hint", "warn", "", None, "no clip is left for validation: there is no best checkpoint",
        fix="give --val-data, or a --val-fraction such as 0.02", when=lambda s: not s.validates,
    ),
    Rule(
        "hint", "warn", "model.size", None, "{s.hours:.1f} hours of speech are too few to train it from scratch",
        fix="start from XTTS-v2 with --init-from, or use --model-size small",
        when=lambda s: s.is_large and s.hours < MIN_HOURS
        and s.training.init_from is None and "gpt" in stages_of(s.settings),
    ),
    Rule(
        "hint", "warn", "training.warmup_steps", lambda s: s.end[0] // 10,
        "{s.end[1]} ends a stage at step {s.end[0]}, before the learning rate has risen",
        when=lambda s: 0 < (s.training.warmup_steps or 0) >= s.end[0],
    ),
    Rule(
        "hint", "warn", "training.early_stop", None,
        "it acts at step {s.first_early_stop} at the earliest, and {s.end[1]} ends a stage at step {s.end[0]}",
        fix="lower --val-step or leave out --early-stop",
        when=lambda s: s.training.early_stop > 0 and s.validates and s.first_early_stop > s.end[0],
    ),
    Rule(
        "hint", "warn", "training.learning_rate", None,
        "so high a rate destroys what the weights of --init-from have learnt",
        fix="leave out --lr for the default of fine-tuning",
        when=lambda s: s.training.init_from is not None and (s.training.learning_rate or 0) > MAX_FINE_TUNING_RATE,
    ),
    Rule(
        "hint", "warn", "model.lora_rank", 0,
        "without --init-from the adapters are added to untrained weights and learn little",
        fix="name weights to start from, or train every weight",
        when=lambda s: s.training.init_from is None and s.settings.model.lora_rank > 0,
    ),
)  # fmt: skip
"""`tune` tries the switches in this order: bf16 gains little while the host is busy launching kernels."""
SWITCHES = {rule.setting: rule for rule in RULES if rule.when is None}


def hints(situation: Situation) -> list[Finding]:
    """Return what to say when a run starts: settings that work but do not suit the machine or the corpus."""
    said = [rule for rule in RULES if rule.code == "hint" or rule.hint(situation)]
    return [rule.finding(situation) for rule in said if rule.holds(situation)]


def rule_finding(code: str, situation: Situation) -> Finding | None:
    """Return what the first rule of a check finds; None if all is well."""
    return next((rule.finding(situation) for rule in RULES if rule.code == code and rule.holds(situation)), None)


WORSE_VALIDATIONS, WORSE_SHARE = 3, 0.02  # a stage overfits after so many validations, all worse by this share
Losses = list[tuple[int, float]]  # steps and losses of one stage, in order


def overfitting(stage: str, validations: Losses, training: Losses) -> Finding | None:
    """Return a finding if validation became worse while the training loss fell on; None otherwise."""
    known = [found for found in validations if math.isfinite(found[1])]
    best_step, best = min(known, key=itemgetter(1), default=(0, 0.0))
    later = [loss for step, loss in known if step > best_step]
    before = [loss for step, loss in training if step <= best_step and math.isfinite(loss)][-WORSE_VALIDATIONS:]
    after = [loss for step, loss in training if step > best_step and math.isfinite(loss)][-WORSE_VALIDATIONS:]
    if len(later) < WORSE_VALIDATIONS or min(later) <= (1 + WORSE_SHARE) * best:
        return None
    if not before or not after or fmean(after) >= fmean(before):
        return None
    was = f"its validation loss was {best:.4g} at step {best_step:,} and is {later[-1]:.4g} now"
    why = "The training loss fell meanwhile: the network memorises its clips. The ear may judge otherwise."
    fix = "More recordings help, and --early-stop ends such a stage sooner."
    if stage == "gpt":
        fix += " Where they are off, --dropout 0.1 and --code-noise 0.3 help too; speak --best uses the best GPT."
    return Finding("overfitting", "warn", f"Stage {stage} overfits: {was}", why, fix)


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


class Fix(NamedTuple):
    """A change in words, without a full stop, and as a setting."""

    text: str = ""
    setting: str = ""
    value: Any = None


MORE_WORKERS = Fix("raise --num-workers", "data.num_workers")
DEEPER_RING = Fix("keep more batches ready on the host", "data.prefetch_buffer_size")
FASTER_DISK = Fix("move the cache to a fast local disk", "data.cache_dir")
NEARER_SHARDS = Fix(
    "raise --shard-cache-gb so that shards stay here, copy the corpus to a local disk, or use a nearer store",
    "data.shard_cache_gb",
)
SECOND_GPU = Fix("give the data role its own GPU with --data-gpu and --model-gpu", "data.data_gpu")
PEER_ACCESS = Fix("choose two GPUs with peer access (myxtts check --gpus shows it), or use one", "data.data_gpu")
LARGER_BATCH = Fix("train on more clips at once, with less accumulation for the same step", "data.batch_size")

MIN_SHARE = 0.02  # share of the time below which a loss is not mentioned
MIN_ACTIVE = 0.5  # a phase that is active for less than this share of the model's wait is late, not slow
SPARE = 0.8  # share of the training time that a phase may take and still stay ahead
SLOW_CLIP_MS = 1.0  # a clip that takes longer to gather from the packed cache comes from a slow disk
MIN_FETCH_SHARE = 0.3  # of the time of gathering; above it the store of a remote corpus is what is slow
SHALLOW = 2  # batches that a ring must exceed for its two sides to work at once


@dataclass(frozen=True, kw_only=True)
class Wait(Situation):
    """A situation in which the model waits for a phase; with an empty profile only the settings count."""

    phase: str
    profile: Breakdown = field(default_factory=lambda: Breakdown(ProfileData()))

    @property
    def time(self) -> PhaseTime:
        return self.profile.phases.get(self.phase, PhaseTime(workers=self.data.num_workers))

    @property
    def pace(self) -> str:
        batch = f"a batch takes {self.time.mean_ms:.1f} ms with {self.time.workers} worker(s)"
        return f"{batch}, training on it {self.profile.train_ms:.1f} ms"

    @property
    def is_dual(self) -> bool:
        return self.profile.data.is_dual or self.data.data_gpu is not None

    @property
    def keeps_up(self) -> bool:
        return self.time.period_ms < 0.95 * self.profile.train_ms

    @property
    def one_in(self) -> float:
        return 1 / self.time.long_share

    @property
    def is_late(self) -> bool:
        """True if the phase is idle while the model waits for it."""
        return self.profile.active_share(self.phase) < MIN_ACTIVE

    @property
    def host_depth(self) -> int:
        return self.profile.data.depths.get("host", 0)

    @property
    def clip_ms(self) -> float:
        return self.time.mean_ms / self.data.batch_size

    @property
    def fetch_share(self) -> float:
        """The share of the time of gathering that goes by until a shard of a remote corpus has arrived."""
        spans = self.profile.data.spans
        fetch_us, gather_us = (sum(s.duration_us for s in spans if s.name == name) for name in ("fetch", "gather"))
        return fetch_us / gather_us if gather_us else 0.0

    @property
    def has_few_workers(self) -> bool:
        """True if more workers would gather faster; they do not help when the disk is slow."""
        is_disk = self.data.native_loading and self.clip_ms > SLOW_CLIP_MS
        return self.time.workers < self.most_workers and not is_disk

    @property
    def traffic(self) -> str:
        seen = [reading.pcie_rx_mb_s for reading in self.profile.data.readings if reading.pcie_rx_mb_s is not None]
        return f"; the driver reports up to {max(seen):.0f} MB/s" if seen else ""

    @property
    def hardware(self) -> str:
        return "a GPU" if not self.on_gpu else "a faster data GPU" if self.is_dual else "a second GPU"


def switch(setting: str, situation: Situation) -> Fix | None:
    """Return how to turn a switch, if it is off and matters here."""
    rule = SWITCHES[setting]
    return Fix(rule.fix, setting, rule.value) if rule.holds(situation) else None


def _more_workers(s: Wait) -> Fix:
    value, train_ms = s.most_workers, s.profile.train_ms
    if train_ms:
        value = max(min(math.ceil(s.time.mean_ms / (SPARE * train_ms)), value), s.time.workers + 1)
    return MORE_WORKERS._replace(value=value)


def _fewer_workers(s: Wait) -> Fix:
    workers = max(s.cores - 1, 1)
    text = "leave a core to the feed: fewer workers, and no other work on this machine"
    return Fix(text, "data.num_workers", workers) if workers < s.data.num_workers else Fix(text)


def _deeper_ring(s: Wait) -> Fix:
    """Return a host ring that outlasts the slowest batch."""
    depth = s.host_depth or s.data.prefetch_buffer_size or MAX_AUTO_PREFETCH
    longest = math.ceil(s.time.longest_ms / s.profile.train_ms) + 2 if s.profile.train_ms else 0
    return DEEPER_RING._replace(value=max(2 * depth, longest))


def second_gpu(s: Wait) -> Fix | None:
    has_spare = s.num_gpus >= 2 and not s.is_dual
    return SECOND_GPU._replace(value=0 if s.profile.data.model_gpu else 1) if has_spare else None


@dataclass(frozen=True)
class WaitRule:
    """Why the model waits for a phase; texts as in `Rule`."""

    code: str
    phases: tuple[str, ...]
    why: str
    fixes: tuple[str | Fix | Callable[[Wait], Fix | None], ...]
    """The first that is possible; a string is a switch."""
    when: Callable[[Wait], bool] = lambda _: True

    def fix(self, wait: Wait) -> Fix:
        for fix in self.fixes:
            found = switch(fix, wait) if isinstance(fix, str) else fix(wait) if callable(fix) else fix
            if found is not None:
                return found._replace(text=found.text.format(s=wait))
        return Fix()


WAIT_RULES = (
    WaitRule(
        "starving", (UNKNOWN_PHASE,),
        "the trace has no spans of the feed, so the slow phase is unknown", (_deeper_ring,),
    ),
    WaitRule(
        "upload-late", ("upload", "encode"), "batches are uploaded and encoded only when the model asks for one",
        ("data.prefetch_to_gpu",), SWITCHES["data.prefetch_to_gpu"].holds,
    ),
    WaitRule(
        "store-slow", ("gather",),
        "{s.fetch_share:.0%} of the time of gathering is spent waiting for shards of the remote corpus to arrive",
        (NEARER_SHARDS,), lambda s: s.fetch_share > MIN_FETCH_SHARE,
    ),
    WaitRule(
        "gather-uneven", ("gather",),
        "one batch in {s.one_in:.0f} takes up to {s.time.longest_ms:.0f} ms, most take {s.time.median_ms:.1f} ms",
        ("data.native_loading", lambda s: _deeper_ring(s) if s.keeps_up else None,
         Fix("look for clips that are very long, damaged, or on a slow disk", "data.cache_dir")),
        lambda s: 0 < s.time.long_share < 0.4 and s.time.long_time_share > 0.5,
    ),
    WaitRule(
        "host-ring-small", ("gather",),
        "the host ring holds {s.host_depth} batches, so gathering stops until one is uploaded",
        (_deeper_ring,), lambda s: 0 < s.host_depth <= SHALLOW,
    ),
    WaitRule(
        "pipeline-late", ("encode",),
        "fresh codes are written to the cache too slowly, and the front end waits for that",
        (FASTER_DISK,), lambda s: s.is_late and "keep" in s.profile.rings and s.profile.rings["keep"].is_full,
    ),
    WaitRule(
        "pipeline-late", DATA_PHASES,
        "while the model waits, {s.phase} is idle: its thread gets no processor time",
        (_fewer_workers,), lambda s: s.is_late,
    ),
    WaitRule(
        "host-ring-small", ("gather",), "{s.pace}: fast enough on average, but not every time",
        (_deeper_ring,), lambda s: s.keeps_up,
    ),
    WaitRule("workers-few", ("gather",), "{s.pace}", (_more_workers,), lambda s: s.has_few_workers),
    WaitRule(
        "native-loading-off", ("gather",), "{s.pace}: audio files are decoded for every batch",
        ("data.native_loading",), SWITCHES["data.native_loading"].holds,
    ),
    WaitRule(
        "gather-slow", ("gather",),
        "{s.pace}: {s.clip_ms:.2f} ms per clip, which points to a slow disk",
        (FASTER_DISK,),
    ),
    WaitRule(
        "upload-unpinned", ("upload",),
        "a copy from pageable memory takes {s.time.mean_ms:.1f} ms and blocks its stream",
        ("data.enhanced_gpu_prefetch",), SWITCHES["data.enhanced_gpu_prefetch"].holds,
    ),
    WaitRule(
        "upload-slow", ("upload",),
        "the copy of a batch takes {s.time.mean_ms:.1f} ms from pinned memory{s.traffic}",
        (Fix("check PCIe generation and width of the slot (nvidia-smi -q -d PCIE): no setting makes it faster"),),
    ),
    WaitRule(
        "encode-serial", ("encode",),
        "encoding a batch takes {s.time.mean_ms:.1f} ms in the stream of the training step, which waits for it",
        ("data.optimize_cpu_gpu_overlap",),
        lambda s: not s.is_dual and SWITCHES["data.optimize_cpu_gpu_overlap"].holds(s),
    ),
    WaitRule(
        "encode-slow", ("encode",),
        "encoding a batch takes {s.time.mean_ms:.1f} ms, training on it {s.profile.train_ms:.1f} ms",
        ("data.pad_to_fixed_length", second_gpu, Fix("{s.hardware} would help: no setting makes it faster")),
    ),
    WaitRule(
        "handoff-slow", ("handoff",),
        "a batch takes {s.time.mean_ms:.1f} ms from the data GPU to the model GPU", (PEER_ACCESS,),
    ),
)  # fmt: skip
"""In this order: the first one that holds explains the wait."""


def wait_rule(wait: Wait) -> WaitRule:
    return next(rule for rule in WAIT_RULES if wait.phase in rule.phases and rule.when(wait))
