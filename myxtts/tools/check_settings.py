"""Checks of the settings against the machine, one question each: is everything on that makes training fast?

`fail` means that the run would not start, or that a switch costs a large part of what the machine can do; `warn`
that it would be slower or less safe than it could be. On the CPU computing is always the slowest part, so that
what only a GPU would gain by is no failure there. Nothing here looks at a corpus.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from myxtts.config import MODEL_SIZES, PRESETS
from myxtts.data.crops import MAX_CROP_FRAMES
from myxtts.data.gather import host_layout
from myxtts.devices import Plan, make_plan
from myxtts.errors import ConfigError
from myxtts.observe.findings import Finding, Level
from myxtts.pipeline.buffers import MOST_GATHERERS, choose_depths
from myxtts.pipeline.frontend import GptFrontend
from myxtts.settings import presets
from myxtts.settings.values import shown
from myxtts.tools.case import Case, change

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
    data, asked = case.data, {"data.data_gpu_memory", "data.model_gpu_memory"} & case.asked
    by_flag = {key for key in asked if case.loaded.origin[key] != "preset"}
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
    if key not in case.asked:
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
    suggested = int(presets.preset(_suited_preset(case, case.model_gpu.memory_mb))[key])
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
        depths = choose_depths(case.data, case.asked, plan, frontend.outputs)
    except ConfigError as error:
        fix = "lower --buffer-size and --prefetch-buffer-size, or --batch-size"
        return Finding("buffers", "fail", "The buffers do not fit the host's memory", str(error), fix)
    host_mb = depths.host * host_layout(case.data).num_bytes / 2**20
    device_mb = depths.model * frontend.outputs.num_bytes / 2**20
    on_device = f"{depths.model} on {plan.model} ({device_mb:.0f} MB)"
    return Finding("buffers", "pass", f"{depths.host} batches on the host ({host_mb:.0f} MB), {on_device}")


def preset(case: Case) -> Finding:
    """Which preset is known to be good on this card."""
    if case.model_gpu is None:
        return Finding("preset", "info", "No GPU: there is no preset for this machine")
    name, used = _suited_preset(case, case.model_gpu.memory_mb), case.training.preset
    if used == name:
        return Finding("preset", "pass", f"The preset for this card is used: {name}")
    values = ", ".join(f"{key.split('.')[1]} {shown(value)}" for key, value in presets.preset(name).items())
    what, why = f"The preset for this card is {name}", f"it gives {values}; what you set yourself wins over it"
    level: Level = "info"
    if used is not None and PRESETS.index(used) > PRESETS.index(name):
        level, why = "warn", f"{used} is for a larger card, and its batches may not fit; {why}"
    return Finding("preset", level, what, why, **change("training.preset", name))


def _suited_preset(case: Case, card_mb: int) -> str:
    """By the memory of the card, or by the cap where one holds the model to less."""
    name, cap = presets.preset_for(card_mb), case.data.model_gpu_memory
    if not case.data.enable_memory_isolation:
        return name
    smaller = PRESETS[: PRESETS.index(name) + 1]
    fitting = [other for other in smaller if presets.preset(other)["data.model_gpu_memory"] <= cap]
    return fitting[-1] if fitting else PRESETS[0]


def _problems(error: ConfigError) -> str:
    """The problems that an error lists, without its title."""
    return "; ".join(line.removeprefix("  - ") for line in str(error).splitlines()[1:])
