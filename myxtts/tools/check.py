"""`myxtts check`: every question that can be answered about a run before it starts, as findings.

The list of questions stands here, with those about corpus, disk and weights; `check_settings` asks about the
settings, `check_gpus` tries the GPUs. A finding is data: whoever calls decides how to show it and what to return.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from myxtts.config import (
    MODEL_SIZES,
    PRESETS,
    SAMPLE_RATE,
    STAGES,
    DataSettings,
    ModelSettings,
    Settings,
    TrainingSettings,
    least_memory_mb,
    preset_for,
)
from myxtts.data.batches import MAX_CROP_FRAMES, host_layout
from myxtts.data.clips import PreparedCorpus
from myxtts.data.corpus import Corpus, held_out, read_corpus
from myxtts.data.prepare import (
    cache_folder,
    corpus_folders,
    prepare,
    prepared_before,
    with_tokenizer_of_run,
)
from myxtts.devices import Gpu, Machine, Plan, Stream, apply_caps, make_plan
from myxtts.errors import ConfigError, DatasetError, MyXTTSError, NoProgress, Progress
from myxtts.hints import training_hints
from myxtts.host import available_bytes, host_memory, usable_cores
from myxtts.model.gpt import adapter_state, add_adapters
from myxtts.model.xtts import SIZES, XTTS, XTTSDims
from myxtts.observe.findings import Finding, Level
from myxtts.pipeline.feed import MOST_GATHERERS, choose_depths
from myxtts.pipeline.frontend import GptFrontend
from myxtts.run import check_resumable
from myxtts.run_dir import RunDir
from myxtts.settings import LoadedSettings, format_setting, load, specs
from myxtts.tools.dry_run import OBSERVED_STEPS, Observation, observe_pipeline
from myxtts.weights import is_trained_in

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_DRIVER_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the last under WSL
_EXPANSION = {".wav": 1.0, ".flac": 2.0}
_COMPRESSED_EXPANSION = 12.0
"""How much larger audio is in the packed cache than in its file; of lossy formats the packed size is a guess."""


@dataclass(frozen=True)
class Host:
    """The machine apart from its GPUs."""

    cores: int
    available_bytes: int
    driver: str
    """Version of the NVIDIA driver; empty when there is none."""
    free_bytes: Callable[[Path], int]
    """Room on the disk that a path is on or would be made on."""

    @classmethod
    def look(cls) -> Host:
        """The machine this process runs on."""
        return cls(usable_cores(), available_bytes(), _driver_version(), _free_bytes)


@dataclass(frozen=True)
class Case:
    """Settings on a machine."""

    loaded: LoadedSettings
    machine: Machine
    host: Host

    @property
    def model(self) -> ModelSettings:
        return self.loaded.settings.model

    @property
    def data(self) -> DataSettings:
        return self.loaded.settings.data

    @property
    def training(self) -> TrainingSettings:
        return self.loaded.settings.training

    @property
    def on_gpu(self) -> bool:
        return bool(self.machine.gpus)

    @property
    def is_dual(self) -> bool:
        """Two GPUs were asked for, whether there are two or not."""
        return self.data.data_gpu is not None

    @property
    def stages(self) -> tuple[str, ...]:
        """What would be trained."""
        return self.training.stages or (STAGES if self.training.init_from is None else ("gpt",))

    @cached_property
    def plan(self) -> Plan | ConfigError:
        """Which device would do what, or what is in its way."""
        try:
            return make_plan(self.data, self.machine)
        except ConfigError as error:
            return error

    @property
    def model_gpu(self) -> Gpu | None:
        """The card that would train; without a plan the one asked for, else the first; None on the CPU."""
        by_index: dict[int | None, Gpu] = {gpu.index: gpu for gpu in self.machine.gpus}
        if isinstance(self.plan, Plan):
            return by_index.get(self.plan.model.index)
        return by_index.get(self.data.model_gpu) or next(iter(self.machine.gpus), None)

    @property
    def model_memory_mb(self) -> int:
        """What the model role may take: its cap, its card, or on the CPU what the host has left."""
        if self.model_gpu is None:
            return self.host.available_bytes // 2**20
        return self.data.model_gpu_memory if self.data.enable_memory_isolation else self.model_gpu.memory_mb

    @property
    def network(self) -> XTTS:
        """The network without memory: only its shapes."""
        return _shapes(SIZES[self.model.size], self.model.lora_rank if "gpt" in self.stages else 0)

    def num_trained(self, stage: str) -> int:
        """Weights that a stage trains and keeps in its checkpoints, without the judges of the decoder."""
        if stage == "gpt" and self.model.lora_rank:
            return sum(value.numel() for value in adapter_state(self.network.gpt).values())
        state = self.network.state_dict()
        return sum(value.numel() for name, value in state.items() if is_trained_in(stage, name))

    @cached_property
    def data_of_run(self) -> DataSettings:
        """The data settings with the vocabulary that the run has, or starts from."""
        folder = RunDir(self.training.checkpoint_dir)
        continues = folder.has_begun and not self.training.reset_training
        own = folder.vocabulary_file if continues else None
        return with_tokenizer_of_run(self.data, own, self.training.init_from)

    @property
    def cache_folder(self) -> Path:
        """Where the prepared corpus lies or will lie."""
        return cache_folder(self.data)

    @cached_property
    def corpora(self) -> list[Corpus] | DatasetError:
        """The folders as their metadata describes them, or why that cannot be read."""
        try:
            return [read_corpus(folder) for folder in corpus_folders(self.data)]
        except DatasetError as error:
            return error

    @cached_property
    def prepared(self) -> PreparedCorpus | None:
        """The corpus, if it was prepared with these settings and nothing has changed since."""
        return prepared_before(self.data_of_run)

    @property
    def has_stores(self) -> bool:
        """The corpus was prepared before, perhaps with other settings: little or nothing is left to do."""
        return any(self.cache_folder.glob("ids-*"))

    @property
    def packed_bytes(self) -> int:
        """About the size of the corpus in the packed cache."""
        if isinstance(self.corpora, DatasetError):
            return 0
        clips = [clip for corpus in self.corpora for clip in corpus.clips]
        return int(
            sum(
                clip.size_bytes * _EXPANSION.get(Path(clip.path).suffix.lower(), _COMPRESSED_EXPANSION)
                for clip in clips
            )
        )


def change(key: str, value: Any) -> dict[str, Any]:
    """The part of a finding that says which setting to change, to what, and how to write it."""
    spec = specs()[key]
    flag = spec.flag_for(value) + ("" if spec.kind is bool else f" {value}")
    return {"fix": f"give {flag}, or set {key}: {format_setting(key, value)}", "setting": key, "value": value}


@cache
def _shapes(dims: XTTSDims, lora_rank: int) -> XTTS:
    with torch.device("meta"):
        model = XTTS(dims)
    if lora_rank:
        add_adapters(model.gpt, lora_rank)
    return model


def _driver_version() -> str:
    try:
        words = _DRIVER_FILE.read_text(encoding="utf-8").splitlines()[0].split()
        return next((word for word in words if word[0].isdigit()), "unknown")
    except (OSError, IndexError):
        return "unknown" if any(path.exists() for path in _DRIVER_DEVICES) else ""


def _free_bytes(path: Path) -> int:
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


BYTES_PER_TRAINED_WEIGHT = 16
"""In training: the weight, its gradient and two moments of AdamW, four bytes each."""
LEAST_PREFETCH = 4
"""Batches in host memory below which one slow clip is felt."""
LEAST_BATCH = 4
"""Clips below which launching kernels takes longer than running them, whatever the card."""
_GRAPH_GAIN = {"tiny": 5.8, "small": 1.4, "normal": 1.26}
"""How much faster a compiled or captured step was than an eager one: docs/performance.md."""
_BF16_GAIN = 2.4
"""fp32 against bf16, the same GPT on one H200: docs/performance.md, "The rival beside it"."""


def gpus(case: Case) -> Finding:
    """Whether there is a GPU that PyTorch can use."""
    found = "; ".join(map(str, case.machine.gpus))
    if found:
        return Finding("gpus", "pass", f"{len(case.machine.gpus)} GPU(s) found: {found}")
    if not case.host.driver:
        why = "no NVIDIA driver is installed on this machine, or the container was started without its GPUs"
        fix = "install the driver, or start the container with --gpus all; without a GPU training works, slowly"
        return Finding("gpus", "warn", "No GPU: training runs on the CPU", why, fix)
    build = torch.version.cuda
    why = f"the driver ({case.host.driver}) is there, but PyTorch {torch.__version__} sees no GPU"
    fix = "look at CUDA_VISIBLE_DEVICES, and whether the driver is new enough for CUDA " + str(build)
    if build is None:
        fix = "this PyTorch was built without CUDA: install a CUDA build from pytorch.org"
    return Finding("gpus", "fail", "The GPUs of this machine cannot be used", why, fix)


def devices(case: Case) -> Finding:
    """Whether the devices that the settings ask for exist, and suit their roles."""
    try:
        plan = make_plan(replace(case.data, enable_memory_isolation=False), case.machine)
    except ConfigError as error:
        fix = "name GPUs of this list, or leave out --data-gpu and --model-gpu"
        return Finding("devices", "fail", _problems(error), "", fix)
    if plan.mode == "buffered":
        where = f"Single-GPU buffered mode on {case.machine.label(plan.model)}"
        return Finding("devices", "pass", where if case.on_gpu else "Data and model share the CPU")
    cards = {gpu.index: gpu for gpu in case.machine.gpus}
    data_gpu, model_gpu = cards[plan.data.index], cards[plan.model.index]
    if data_gpu.memory_mb > model_gpu.memory_mb:
        why = f"the model needs more memory than the batches, and its GPU ({model_gpu}) has less than {data_gpu}"
        fix = f"swap them: --data-gpu {model_gpu.index} --model-gpu {data_gpu.index}"
        return Finding("devices", "warn", "The smaller GPU trains", why, fix, "data.model_gpu", data_gpu.index)
    return Finding("devices", "pass", f"Dual-GPU mode: batches are made on {data_gpu}; trained on {model_gpu}")


def caps(case: Case) -> Finding:
    """Whether memory caps are possible, and have an effect."""
    data, keys = case.data, ("data.data_gpu_memory", "data.model_gpu_memory")
    by_flag = {key for key in keys if case.loaded.origin[key] in ("file", "flag")}
    if not data.enable_memory_isolation:
        if not by_flag:
            return Finding("caps", "pass", "No memory caps: each role takes what it needs")
        what = f"{' and '.join(sorted(by_flag))} given, but memory isolation is off"
        why = "without it no cap has an effect"
        return Finding("caps", "warn", what, why, **change("data.enable_memory_isolation", True))
    if not case.on_gpu:
        why = "host memory is not divided between the roles"
        return Finding("caps", "warn", "Memory isolation has no effect on the CPU", why)
    try:
        plan = make_plan(case.data, case.machine)
    except ConfigError as error:
        return Finding("caps", "fail", "The memory caps cannot be held", _problems(error), "lower the caps")
    if plan.mode == "buffered" and "data.data_gpu_memory" in by_flag:
        why = "both roles share one GPU, and PyTorch holds a process to one cap per GPU: --model-gpu-memory"
        fix = "leave out --data-gpu-memory, or use two GPUs"
        return Finding("caps", "warn", "--data-gpu-memory has no effect", why, fix)
    roles = f"data {plan.data_cap_mb} MB, " if plan.mode == "dual" else "both roles together, "
    return Finding("caps", "pass", f"Memory caps: {roles}model {plan.model_cap_mb} MB")


def workers(case: Case) -> Finding:
    """Whether as many workers may start as the work can use."""
    cores, native = case.host.cores, case.data.native_loading
    started = min(case.data.num_workers, cores)
    needed = min(cores, MOST_GATHERERS) if native else cores
    if started >= needed:
        return Finding("workers", "pass", f"{started} worker(s) on {cores} usable core(s)")
    level: Level = "fail" if case.on_gpu and not native and 2 * started <= needed else "warn"
    why = "every batch is decoded by them" if not native else "they prepare the corpus and gather the batches"
    what = f"{started} of {cores} usable cores are used"
    return Finding("workers", level, what, why, **change("data.num_workers", cores))


def prefetch(case: Case) -> Finding:
    """Whether enough batches wait in host memory."""
    size, key = case.data.prefetch_buffer_size, "data.prefetch_buffer_size"
    if size is None:
        return Finding("prefetch", "pass", "Batches ready on the host: as workers and memory suggest")
    if size >= LEAST_PREFETCH:
        return Finding("prefetch", "pass", f"{size} batches are kept ready on the host")
    level: Level = "fail" if case.on_gpu and size == 1 else "warn"
    why = "nothing is gathered while the only batch waits" if size == 1 else "one slow clip stops the pipeline"
    return Finding("prefetch", level, f"Only {size} batch(es) kept ready on the host", why, **change(key, 16))


def upload(case: Case) -> Finding:
    """Whether batches reach the GPU beside the training step instead of before it."""
    data = case.data
    if not case.on_gpu:
        return Finding("upload", "info", "No GPU: nothing is uploaded")
    if not data.prefetch_to_gpu:
        why = "each step waits for the upload and the encoding of its own batch"
        fix = change("data.prefetch_to_gpu", True)
        return Finding("upload", "fail", "Batches are uploaded only when the model asks for them", why, **fix)
    if not data.enhanced_gpu_prefetch:
        why = "copies from memory that is not pinned stop the host, and none runs beside a kernel"
        fix = change("data.enhanced_gpu_prefetch", True)
        return Finding("upload", "warn", "Uploads neither come from pinned memory nor overlap", why, **fix)
    if not data.optimize_cpu_gpu_overlap:
        why = "mels and codes are computed between two training steps instead of beside them"
        fix = change("data.optimize_cpu_gpu_overlap", True)
        return Finding("upload", "warn", "The data role's kernels share the trainer's stream", why, **fix)
    return Finding("upload", "pass", "Batches are uploaded ahead, from pinned memory, on streams of their own")


def batch_size(case: Case) -> Finding:
    """Whether a batch keeps the card busy, and has a chance to fit it."""
    size, key = case.data.batch_size, "data.batch_size"
    if case.model_gpu is None:
        return Finding("batch-size", "pass", f"{size} clips a batch")
    suggested = int(PRESETS[_suited_preset(case, case.model_gpu.memory_mb)][key])
    if size < max(suggested // 4, LEAST_BATCH):
        level: Level = "fail" if size < LEAST_BATCH else "warn"
        why = f"starting kernels takes longer than running them; {suggested} suits this card"
        return Finding("batch-size", level, f"Only {size} clips a batch", why, **change(key, suggested))
    is_whole = case.model.lora_rank == 0 and not case.model.gradient_checkpointing
    if size > 2 * suggested and is_whole and case.model.size in MODEL_SIZES[2:]:
        why = f"`{case.model.size}` trained whole may not fit {case.model_memory_mb} MB with it"
        return Finding("batch-size", "warn", f"{size} clips a batch", why, **change(key, suggested))
    return Finding("batch-size", "pass", f"{size} clips a batch")


def fixed_shapes(case: Case) -> Finding:
    """Whether every batch has the same shapes."""
    if case.data.pad_to_fixed_length:
        return Finding("fixed-shapes", "pass", "Every batch has the same shapes: compiled once, no allocations")
    training = case.training
    compiled = training.enable_graph_mode and training.enable_xla_compilation and not training.enable_eager_debug
    level: Level = "fail" if case.on_gpu and compiled else "warn"
    why = (
        "the step is compiled again for every new shape" if compiled else "memory is allocated for every new shape"
    )
    return Finding("fixed-shapes", level, "Shapes vary", why, **change("data.pad_to_fixed_length", True))


def compilation(case: Case) -> Finding:
    """Whether the step is compiled and captured."""
    training, gain = case.training, _GRAPH_GAIN.get(case.model.size)
    if training.enable_eager_debug:
        fix = change("training.enable_eager_debug", False)
        return Finding("compilation", "fail", "Eager debugging is on", "it is slow on purpose", **fix, gain=gain)
    if not case.on_gpu:
        return Finding("compilation", "pass", "On the CPU steps run eagerly, whatever the settings say")
    if not training.enable_graph_mode:
        level: Level = "fail" if case.model.size in MODEL_SIZES[:2] else "warn"
        why = f"every kernel is started from Python, which bounds the step of `{case.model.size}`"
        fix = change("training.enable_graph_mode", True)
        return Finding("compilation", level, "Steps run eagerly", why, **fix, gain=gain)
    if not training.enable_xla_compilation:
        fix = change("training.enable_xla_compilation", True)
        why = "kernels are not fused; the step is only captured as a graph"
        return Finding("compilation", "warn", "Steps are not compiled", why, **fix)
    return Finding("compilation", "pass", "Steps are compiled, and captured where shapes are fixed")


def precision(case: Case) -> Finding:
    """Whether the GPU computes in bf16."""
    if case.data.mixed_precision:
        where = "" if case.on_gpu else " (on a GPU; the CPU computes in fp32)"
        return Finding("precision", "pass", f"bf16 where that is safe{where}")
    level: Level = "fail" if case.on_gpu else "warn"
    why = "the tensor cores of the GPU stay unused, and activations take twice the memory"
    fix = change("data.mixed_precision", True)
    return Finding("precision", level, "Everything is computed in fp32", why, **fix, gain=_BF16_GAIN)


def model_memory(case: Case) -> Finding:
    """Whether weights, gradients and optimiser of the largest stage leave room for a batch."""
    least = {stage: BYTES_PER_TRAINED_WEIGHT * case.num_trained(stage) for stage in case.stages}
    if "gpt" in least and case.model.lora_rank:
        frozen = sum(value.numel() for value in case.network.gpt.state_dict().values())
        least["gpt"] += (2 if case.data.mixed_precision and case.on_gpu else 4) * frozen
    stage = max(least, key=lambda name: least[name])
    needed_mb, room_mb = least[stage] // 2**20, case.model_memory_mb
    needs = f"the stage {stage} of `{case.model.size}` needs {needed_mb} MB before the first batch"
    if needed_mb < 0.7 * room_mb:
        return Finding("model-memory", "pass", f"Of {room_mb} MB {needs}")
    level: Level = "fail" if needed_mb > room_mb else "warn"
    kept = "does not fit" if level == "fail" else "leaves little room for batches"
    what = f"The model {kept}: {room_mb} MB for it"
    if stage == "gpt" and not case.model.lora_rank and case.training.init_from is not None:
        return Finding("model-memory", level, what, needs, **change("model.lora_rank", 16))
    smaller = MODEL_SIZES[max(MODEL_SIZES.index(case.model.size) - 1, 0)]
    return Finding("model-memory", level, what, needs, **change("model.size", smaller))


def buffers(case: Case) -> Finding:
    """Whether the buffers asked for fit the memory; says where the batches will wait."""
    if not isinstance(case.plan, Plan):
        return Finding("buffers", "info", "Not checked: there is no plan of devices")
    plan = replace(case.plan, model_cap_mb=case.model_memory_mb)
    budget = case.data.batch_size * min(MAX_CROP_FRAMES, case.data.max_mel_frames)
    frontend = GptFrontend(case.network, case.data, budget)
    try:
        depths = choose_depths(case.data, plan, frontend.outputs)
    except ConfigError as error:
        fix = "lower --buffer-size and --prefetch-buffer-size, or --batch-size"
        return Finding("buffers", "fail", "The buffers do not fit the host's memory", str(error), fix)
    host_mb = depths.host * host_layout(case.data).num_bytes / 2**20
    device_mb = depths.model * frontend.outputs.num_bytes / 2**20
    on_device = f"{depths.model} on {plan.model} ({device_mb:.0f} MB)"
    return Finding("buffers", "pass", f"{depths.host} batches on the host ({host_mb:.0f} MB), {on_device}")


def card_preset(case: Case) -> Finding:
    """Which preset is known to be good on this card."""
    if case.model_gpu is None:
        return Finding("preset", "info", "No GPU: there is no preset for this machine")
    name, used = _suited_preset(case, case.model_gpu.memory_mb), case.training.preset
    if used == name:
        return Finding("preset", "pass", f"The preset for this card is used: {name}")
    values = ", ".join(f"{key.split('.')[1]} {format_setting(key, value)}" for key, value in PRESETS[name].items())
    what, why = f"The preset for this card is {name}", f"it gives {values}; what you set yourself wins over it"
    level: Level = "info"
    if used is not None and least_memory_mb(used) > least_memory_mb(name):
        level, why = "warn", f"{used} is for a larger card, and its batches may not fit; {why}"
    return Finding("preset", level, what, why, **change("training.preset", name))


def _suited_preset(case: Case, card_mb: int) -> str:
    """By the memory of the card, or by the cap where one holds the model to less."""
    name, cap = preset_for(card_mb), case.data.model_gpu_memory
    if not case.data.enable_memory_isolation:
        return name
    smaller = [other for other in PRESETS if least_memory_mb(other) <= least_memory_mb(name)]
    fitting = [other for other in smaller if PRESETS[other]["data.model_gpu_memory"] <= cap]
    return fitting[-1] if fitting else next(iter(PRESETS))


def _problems(error: ConfigError) -> str:
    """The problems that an error lists, without its title."""
    return "; ".join(line.removeprefix("  - ") for line in str(error).splitlines()[1:])


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


def check(loaded: LoadedSettings, machine: Machine | None = None, host: Host | None = None) -> list[Finding]:
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
    folder = RunDir(case.training.checkpoint_dir)
    if not folder.has_begun:
        return Finding("run", "pass", f"A new run in {folder.folder}")
    if case.training.reset_training:
        return Finding("run", "pass", f"Starts over in {folder.folder}; the run there is put aside")
    try:
        check_resumable(case.loaded.settings, folder, case.prepared)
    except MyXTTSError as error:
        what, *why = str(error).splitlines()
        fix = why.pop() if why else KEEP_APART
        return Finding("run", "fail", what.rstrip(":"), "; ".join(line.strip() for line in why), fix)
    if case.prepared is None and (other := _other_corpus(case, folder)):
        what = f"The run in {folder.folder} was made with another corpus: {other}"
        only_if = "training continues it only if clips and vocabulary are the same"
        return Finding("run", "warn", what, only_if, KEEP_APART)
    return Finding("run", "pass", f"Continues the run in {folder.folder}")


def _other_corpus(case: Case, folder: RunDir) -> str:
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
    what = f"{num_clips} clips in {' and '.join(map(str, corpus_folders(case.data)))}"
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
    if RunDir(case.training.checkpoint_dir).has_begun and not case.training.reset_training:
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
    for text in training_hints(
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
    gpus,
    devices,
    caps,
    native_loading,
    workers,
    prefetch,
    upload,
    batch_size,
    fixed_shapes,
    compilation,
    precision,
    model_memory,
    buffers,
    card_preset,
    weights,
    run,
    corpus,
    prepared,
    disk_cache,
    disk_checkpoints,
)
"""Every question, in the order of the answers."""


CPU = torch.device("cpu")
_MB = 2**20
COPY_BYTES, NUM_COPIES = 64 * _MB, 4
SLOW_GB_PER_S = 3.0
"""Copies from pinned memory that are slower point at a slot with too few streams; PCIe 3.0 x16 reaches 12."""
MOST_ERROR_TEXT = 2000
"""Characters of an error; those of compilers hold whole programs."""
CPU_SIZE, CPU_BATCH = "tiny", 2
"""What is rehearsed on a CPU, where a step of a larger model takes minutes."""


@dataclass(frozen=True)
class Attempt:
    """What the rehearsal of a case uses."""

    case: Case
    plan: Plan
    """That of the run, or both roles on one device when there is no such plan."""
    is_plan_of_run: bool
    progress: Progress
    say: Callable[[str], None]

    @property
    def on_gpu(self) -> bool:
        return self.plan.model.type == "cuda"


def check_gpus(
    loaded: LoadedSettings,
    machine: Machine | None = None,
    host: Host | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Finding]:
    """Findings about the GPUs, then the others of `check`; takes from seconds to minutes, most of it compiling."""
    case = Case(loaded, machine or Machine.look(), host or Host.look())
    plan = case.plan if isinstance(case.plan, Plan) else _fallback(case)
    attempt = Attempt(case, plan, isinstance(case.plan, Plan), progress or NoProgress(), say)
    tried = [driver(case), gpus(case), devices(case), *peers(case)]
    tried.append(caps(case))
    if attempt.on_gpu:
        tried += [*caps_held(attempt), transfer(attempt)]
    tried += [*rehearsal(attempt), *not_checked(attempt)]
    codes = {finding.code for finding in tried}
    return tried + [finding for finding in answers(case) if finding.code not in codes]


def driver(case: Case) -> Finding:
    """Whether there is a driver; who asks about GPUs is not served by a CPU."""
    if case.host.driver or case.on_gpu:
        version = case.host.driver or "of unknown version"
        return Finding("driver", "pass", f"NVIDIA driver {version}, PyTorch {torch.__version__}")
    fix = "install the driver, or start the container with its GPUs (--gpus all); the CPU trains without"
    return Finding("driver", "fail", "No NVIDIA driver was found", "", fix)


def peers(case: Case) -> Iterator[Finding]:
    """How batches cross between the two GPUs; nothing where they do not."""
    plan = case.plan
    if not isinstance(plan, Plan) or plan.mode != "dual":
        return
    across = f"from {plan.data} to {plan.model}"
    if (plan.data.index, plan.model.index) in case.machine.peers:
        yield Finding("peers", "pass", f"Copies {across} are direct")
    else:
        why = "these GPUs have no peer access: every batch goes through host memory, which is slower but works"
        fix = "use two GPUs under one PCIe switch or with NVLink; nvidia-smi topo -m shows how they are connected"
        yield Finding("peers", "warn", f"No direct copies {across}", why, fix)


def caps_held(attempt: Attempt) -> Iterator[Finding]:
    """Whether a cap refuses what exceeds it; nothing where there are no caps."""
    plan = attempt.plan
    apply_caps(plan)
    for device, cap_mb in {plan.data: plan.data_cap_mb, plan.model: plan.model_cap_mb}.items():
        if cap_mb is None:
            continue
        try:
            torch.empty((cap_mb + 1) * _MB, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            yield Finding("caps-held", "pass", f"{device} refuses to go beyond {cap_mb} MB")
        else:
            fix = "look whether PYTORCH_CUDA_ALLOC_CONF names another allocator, which ignores caps"
            yield Finding("caps-held", "fail", f"{device} gives more than its cap of {cap_mb} MB", "", fix)


def transfer(attempt: Attempt) -> Finding:
    """Whether random bytes come back unchanged: pinned memory, the data GPU, the model GPU, the host."""
    plan = attempt.plan
    sent = torch.from_numpy(host_memory(COPY_BYTES)).random_()
    there = torch.empty_like(sent, device=plan.data)
    across = torch.empty_like(sent, device=plan.model)
    upload_s = _seconds(Stream(plan.data), lambda: there.copy_(sent, non_blocking=True))
    way = f"pinned memory → {plan.data} {_speed(upload_s)}"
    if plan.data == plan.model:
        across = there
    else:
        handoff_s = _seconds(Stream(plan.model), lambda: across.copy_(there, non_blocking=True))
        way += f" → {plan.model} {_speed(handoff_s)}"
    if not torch.equal(across.cpu(), sent):
        why = "this happens where the board's IOMMU redirects direct copies between devices"
        fix = "turn off IOMMU/ACS for the GPUs in the BIOS; until then leave out --data-gpu and --model-gpu"
        return Finding("transfer", "fail", f"Bytes arrive damaged: {way}", why, fix)
    if COPY_BYTES / upload_s < SLOW_GB_PER_S * 1e9:
        why = "the GPU has few PCIe streams, or another process uses them"
        fix = "move the card to a slot with 16 streams (nvidia-smi -q -d PCIE shows the present ones)"
        return Finding("transfer", "warn", f"Uploads are slow: {way}", why, fix)
    return Finding("transfer", "pass", f"{COPY_BYTES // _MB} MB arrive unchanged: {way}")


def rehearsal(attempt: Attempt) -> Iterator[Finding]:
    """What a short training through the whole pipeline shows."""
    case = attempt.case
    stage = "gpt" if "gpt" in case.stages else case.stages[0]
    loaded = case.loaded if attempt.on_gpu else _for_cpu(case.loaded)
    settings = loaded.settings
    started_at = time.perf_counter()
    try:
        prepared = _prepared(attempt)
        attempt.say(
            f"Rehearsing {OBSERVED_STEPS} steps of stage {stage}{' (compiling takes a while)' * attempt.on_gpu}"
        )
        seen = observe_pipeline(loaded.settings, prepared, stage, attempt.plan)
    except (MyXTTSError, RuntimeError, OSError) as error:  # of a compiler or a driver too: this is what was asked
        fix = "do what the error says; what the compiler cannot do, --disable-xla-compilation avoids"
        yield Finding("rehearsal", "fail", "The rehearsal ended with an error", str(error)[:MOST_ERROR_TEXT], fix)
        return
    yield _judge_pipeline(seen, settings, time.perf_counter() - started_at)
    yield _judge_placement(seen)
    if attempt.on_gpu:
        yield _judge_optimisations(seen, settings)


def _judge_pipeline(seen: Observation, settings: Settings, seconds: float) -> Finding:
    needed = {"gather", "upload", "encode"} | ({"handoff"} if seen.plan.mode == "dual" else set())
    problems = []
    if missing := needed - seen.spans:
        problems.append(f"these stages of the pipeline did nothing: {', '.join(sorted(missing))}")
    if seen.changed_tensors:
        problems.append(f"the first batch arrived changed: {', '.join(sorted(seen.changed_tensors))}")
    if not all(math.isfinite(loss) for loss in seen.losses):
        problems.append(f"losses are not finite: {seen.losses}")
    if not seen.has_learnt:
        problems.append("no weight has changed")
    if problems:
        fix = "run the tests (make test); if they pass, report this with the output of check --gpus --json"
        return Finding("rehearsal", "fail", "The pipeline does not work here", "; ".join(problems), fix)
    stages = " → ".join(name for name in ("gather", "upload", "encode", "handoff") if name in needed)
    clips = f"`{settings.model.size}`, {settings.data.batch_size} clips"
    what = f"{OBSERVED_STEPS} steps of stage {seen.stage}, {clips}"
    return Finding("rehearsal", "pass", f"{what}: {stages} → train, in {seconds:.0f} s")


def _judge_placement(seen: Observation) -> Finding:
    plan = seen.plan
    expected = [
        ("the model", seen.model_devices, plan.model),
        ("its batches", seen.batch_devices, plan.model),
        ("frozen networks", seen.frozen_devices or {plan.data}, plan.data),
    ]
    wrong = [
        f"{what} on {_names(found)} instead of {device}" for what, found, device in expected if found != {device}
    ]
    if wrong:
        return Finding("placement", "fail", "Not everything is where it belongs", "; ".join(wrong), "report this")
    return Finding("placement", "pass", f"Model and batches are on {plan.model}, frozen networks on {plan.data}")


def _judge_optimisations(seen: Observation, settings: Settings) -> Finding:
    """What makes training fast, as it was seen; what is off although its setting is on is a fault."""
    states = [
        ("pinned memory", "data.enhanced_gpu_prefetch", seen.is_pinned),
        ("batches uploaded ahead", "data.prefetch_to_gpu", seen.is_ahead),
        ("fixed shapes", "data.pad_to_fixed_length", len(seen.sizes) == 1),
        ("bf16", "data.mixed_precision", seen.mode.autocast),
        ("compiled step", "training.enable_xla_compilation", seen.mode.compiled),
        ("captured step", "training.enable_graph_mode", seen.mode.captured),
        ("no allocation after warm-up", "data.pad_to_fixed_length", seen.grew_mb < 1),
        ("no recompilation after warm-up", "data.pad_to_fixed_length", seen.num_recompiled == 0),
    ]
    off = [(name, key) for name, key, is_on in states if not is_on]
    if not off:
        return Finding("optimisations", "pass", f"Seen to be on: {', '.join(name for name, *_ in states)}")
    broken = [name for name, key in off if attrgetter(key)(settings)]
    what = f"Not on: {', '.join(name for name, _ in off)}"
    why = f"asked for, and yet not on: {', '.join(broken)}" if broken else "the settings turn them off"
    fix = f"look at {', '.join(sorted({key for _, key in off}))}"
    return Finding("optimisations", "fail" if broken else "warn", what, why, fix)


def not_checked(attempt: Attempt) -> Iterator[Finding]:
    """What the machine could not show; nothing where the whole of it was seen."""
    if attempt.is_plan_of_run and attempt.on_gpu:
        return
    unseen = ["copies between GPUs", "memory caps", "the model on a GPU of its own"]
    if not attempt.on_gpu:
        unseen += ["uploads from pinned memory", "compilation", "bf16"]
    where = f"both roles were rehearsed on {attempt.plan.model}"
    smaller = "" if attempt.on_gpu else f", with `{CPU_SIZE}` and batches of at most {CPU_BATCH} clips"
    yield Finding("not-checked", "info", f"Not checked here: {', '.join(unseen)}", f"{where}{smaller}")


def _fallback(case: Case) -> Plan:
    """Both roles on one device, with the hand-over between them if two were asked for."""
    device = torch.device("cuda", case.machine.gpus[0].index) if case.on_gpu else CPU
    return Plan(device, device, "dual" if case.is_dual else "buffered")


def _for_cpu(loaded: LoadedSettings) -> LoadedSettings:
    settings = loaded.settings
    smaller = replace(
        settings,
        model=replace(settings.model, size=CPU_SIZE),
        data=replace(settings.data, batch_size=min(settings.data.batch_size, CPU_BATCH), model_start_delay=0.5),
        training=replace(settings.training, init_from=None, gradient_accumulation_steps=1),
    )
    return replace(loaded, settings=smaller)


def _prepared(attempt: Attempt) -> PreparedCorpus:
    """The user's corpus if it was prepared before; otherwise the embedded one, for preparing may take an hour."""
    case = attempt.case
    if case.prepared is not None:
        return case.prepared
    data = case.data_of_run
    if case.data.train_data is not None and not case.has_stores:
        attempt.say("The corpus is not prepared yet: rehearsing with the embedded one")
        data = replace(data, train_data=None, val_data=None)
    return prepare(data, attempt.progress)


def _seconds(stream: Stream, copy: Callable[[], object]) -> float:
    """Seconds of one copy, the first one not counted."""
    with stream.use():
        copy()
        stream.finish()
        started_at = time.perf_counter()
        for _ in range(NUM_COPIES):
            copy()
        stream.finish()
    return (time.perf_counter() - started_at) / NUM_COPIES


def _speed(seconds: float) -> str:
    return f"({COPY_BYTES / seconds / 1e9:.1f} GB/s)"


def _names(devices: set[torch.device]) -> str:
    return " and ".join(sorted(map(str, devices))) or "no device"
