"""`myxtts check`: everything that can be said about a run before it starts, as findings.

`CHECKS` look at settings, machine, corpus and disk; those about performance settings read the rules of
`observe.findings`. `check_gpus` also tries the GPUs with a short dry run.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path

import torch

from myxtts.config import (
    AUTO_MEL_FRAMES,
    CARDS,
    MODEL_SIZES,
    PRESETS,
    SAMPLE_RATE,
    DataSettings,
    Settings,
    stages_of,
)
from myxtts.data.batches import MAX_CROP_FRAMES, host_layout
from myxtts.data.clips import PreparedCorpus
from myxtts.data.corpus import Corpus, held_out, read_corpus
from myxtts.data.prepare import cache_folder, corpus_folders, prepare, prepared_before, with_tokenizer_of_run
from myxtts.data.shards import is_sharded
from myxtts.devices import Gpu, Machine, Plan, Stream, apply_caps, make_plan
from myxtts.errors import ConfigError, DatasetError, MyXTTSError, NoProgress, Progress
from myxtts.host import available_bytes, host_memory, nvidia_driver, usable_cores
from myxtts.model.gpt import adapter_state, add_adapters
from myxtts.model.xtts import SIZES, XTTS
from myxtts.observe.breakdown import DATA_PHASES, ProfileData
from myxtts.observe.diagnosis import BELOW_MINIMUM, Diagnosis
from myxtts.observe.findings import Finding, Level, Situation, hints, rule_finding
from myxtts.pipeline.feed import choose_depths
from myxtts.pipeline.frontend import GptFrontend
from myxtts.run import check_resumable
from myxtts.run_dir import RunDir
from myxtts.settings import LoadedSettings, format_setting, format_source, how_to_set, load, specs
from myxtts.tools.dry_run import OBSERVED_STEPS, Observation, observe_pipeline
from myxtts.weights import is_trained_in

BYTES_PER_TRAINED_WEIGHT, BYTES_PER_SAVED_WEIGHT = 16, 12
"""The weight and two moments of AdamW, four bytes each; in training also the gradient."""
MAX_SET_ASIDE = 0.05  # share of a corpus that may be unusable without a warning
EXPANSION, COMPRESSED_EXPANSION = {".wav": 1.0, ".flac": 2.0}, 12.0
"""How much larger audio is in the packed cache than in its file; for lossy formats a guess."""
KEEP_APART = "keep the two apart with --checkpoint-dir DIR, or give --reset-training"
MORE_SPACE = "free some space, or name another disk with --cache-dir"
GET_DRIVER = "install the driver, or start the container with --gpus all"


@dataclass(frozen=True)
class Host:
    """The machine apart from its GPUs."""

    cores: int
    available_bytes: int
    driver: str  # version of the NVIDIA driver; empty if there is none
    free_bytes: Callable[[Path], int]  # free space on the disk that a path is on or would be created on

    @classmethod
    def look(cls) -> Host:
        return cls(usable_cores(), available_bytes(), nvidia_driver(), _free_bytes)


class CheckContext:
    """Settings on a machine, and what follows from them."""

    def __init__(self, loaded: LoadedSettings, machine: Machine, host: Host) -> None:
        self.loaded, self.machine, self.host = loaded, machine, host
        settings = loaded.settings
        self.model, self.data, self.training = settings.model, settings.data, settings.training
        self.stages, self.on_gpu = stages_of(settings), bool(machine.gpus)
        self.cache_folder = cache_folder(settings.data)

    @cached_property
    def plan(self) -> Plan | ConfigError:
        """Which device would do what, or the error that prevents it."""
        try:
            return make_plan(self.data, self.machine, spelling=self.loaded.spelling)
        except ConfigError as error:
            return error

    @property
    def model_gpu(self) -> Gpu | None:
        """The GPU that would train; without a plan the one asked for, else the first; None on the CPU."""
        index = self.plan.model.index if isinstance(self.plan, Plan) else self.data.model_gpu
        found = [gpu for gpu in self.machine.gpus if gpu.index == index]
        return next(iter([*found, *self.machine.gpus]), None)

    @property
    def model_memory_mb(self) -> int:
        """Memory of the model role: its cap, its GPU, or on the CPU the free host memory."""
        if self.model_gpu is None:
            return self.host.available_bytes // 2**20
        cap_mb = self.plan.model_cap_mb if isinstance(self.plan, Plan) else None
        return self.model_gpu.memory_mb if cap_mb is None else cap_mb

    @cached_property
    def situation(self) -> Situation:
        """The facts for the rules; of an unprepared corpus only the number of clips is known."""
        num_clips, num_val_clips, hours = 1, None, None
        if self.prepared is not None:
            num_clips, num_val_clips = self.prepared.mixture.num_clips, len(self.prepared.val)
            hours = float(self.prepared.train.num_samples.sum()) / SAMPLE_RATE / 3600
        elif not isinstance(self.corpora, DatasetError):
            parts = [part.clips for part in self.corpora][: max(len(self.data.sources), 1)]
            num_clips = max(sum(int((~held_out(clips, self.data)).sum()) for clips in parts), 1)
            num_val_clips = sum(map(len, parts)) - num_clips or None
        return Situation(
            settings=self.loaded.settings,
            num_gpus=len(self.machine.gpus),
            roles=self.machine.roles,
            cores=self.host.cores,
            gpu_memory_mb=self.model_gpu.memory_mb if self.model_gpu is not None else 0,
            num_clips=num_clips,
            num_val_clips=num_val_clips,
            speech_hours=hours,
        )

    @property
    def network(self) -> XTTS:
        return _shapes(self.model.size, self.model.lora_rank if "gpt" in self.stages else 0)

    def num_trained(self, stage: str) -> int:
        """Return how many weights a stage trains and saves, without the decoder's discriminators."""
        if stage == "gpt" and self.model.lora_rank:
            return sum(value.numel() for value in adapter_state(self.network.gpt).values())
        state = self.network.state_dict()
        return sum(value.numel() for name, value in state.items() if is_trained_in(stage, name))

    @cached_property
    def continued(self) -> RunDir | None:
        run = RunDir(self.training.checkpoint_dir)
        return run if run.has_begun and not self.training.reset_training else None

    @cached_property
    def data_of_run(self) -> DataSettings:
        """The data settings with the vocabulary that the run has, or starts from."""
        own = self.continued.vocabulary_file if self.continued is not None else None
        return with_tokenizer_of_run(self.data, own, self.training.init_from)

    @cached_property
    def corpora(self) -> list[Corpus] | DatasetError:
        """The folders as their metadata describes them, or why that cannot be read."""
        if isinstance(self._opened, DatasetError):
            return self._opened
        try:
            return [read_corpus(folder) for folder in corpus_folders(self.data) if not is_sharded(folder)]
        except DatasetError as error:
            return error

    @property
    def prepared(self) -> PreparedCorpus | None:
        """The corpus, if it was prepared with these settings and nothing has changed since."""
        return None if isinstance(self._opened, DatasetError) else self._opened

    @cached_property
    def _opened(self) -> PreparedCorpus | DatasetError | None:
        try:
            return prepared_before(self.data_of_run)
        except DatasetError as error:
            return error

    @property
    def has_stores(self) -> bool:
        """True if the corpus was prepared before, perhaps with other settings."""
        return any(self.cache_folder.glob("ids-*"))

    @property
    def packed_bytes(self) -> int:
        """The approximate size of the corpus in the packed cache."""
        corpora = [] if isinstance(self.corpora, DatasetError) else self.corpora
        sizes: Counter[str] = Counter()
        for clip in (clip for corpus in corpora for clip in corpus.clips):
            sizes[Path(clip.path).suffix.lower()] += clip.size_bytes
        return int(sum(size * EXPANSION.get(kind, COMPRESSED_EXPANSION) for kind, size in sizes.items()))


@cache
def _shapes(size: str, lora_rank: int) -> XTTS:
    """Return the network without memory: only its shapes."""
    with torch.device("meta"):
        model = XTTS(SIZES[size])
    if lora_rank:
        add_adapters(model.gpt, lora_rank)
    return model


def _free_bytes(path: Path) -> int:
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def check(loaded: LoadedSettings, machine: Machine | None = None, host: Host | None = None) -> list[Finding]:
    """Return findings about a run with these settings on this machine; starts nothing and writes nothing."""
    return run_checks(CheckContext(loaded, machine or Machine.look(), host or Host.look()))


def run_checks(ctx: CheckContext) -> list[Finding]:
    """Return what every check finds, then the hints about other settings."""
    findings = [check_one(ctx) for check_one in CHECKS.values()]
    if isinstance(ctx.corpora, DatasetError):
        return findings
    settled = {finding.setting for finding in findings if finding.level != "pass" and finding.setting}
    settled |= {key for key, origin in ctx.loaded.origin.items() if origin == "preset"}  # not the user's choice
    more = [hint for hint in hints(ctx.situation) if hint.code == "hint" and hint.setting not in settled]
    return findings + [_with_flag(hint) for hint in more]


def passed(findings: Sequence[Finding]) -> bool:
    """True if nothing fails; warnings do not count."""
    return all(finding.level != "fail" for finding in findings)


def to_json(findings: Sequence[Finding]) -> str:
    counts, found = Counter(finding.level for finding in findings), [asdict(finding) for finding in findings]
    return json.dumps({"passed": passed(findings), "counts": counts, "findings": found}, indent=2)


def _with_flag(finding: Finding) -> Finding:
    """Return the finding with the flag that changes its setting."""
    if not finding.setting or finding.value is None:
        return finding
    how = how_to_set(finding.setting, finding.value)
    return replace(finding, fix=f"{finding.fix}: {how}" if finding.fix else how)


def by_rule(code: str, ctx: CheckContext, otherwise: str, gpu_only: bool = False) -> Finding:
    """Return what the first rule of a check finds; `gpu_only`: without a GPU nothing found proves nothing."""
    found = rule_finding(code, ctx.situation)
    if found is not None:
        return _with_flag(found)
    return _skipped(code) if gpu_only and not ctx.on_gpu else Finding(code, "pass", otherwise)


def _skipped(code: str, why: str = "there is no GPU") -> Finding:
    return Finding(code, "skip", f"Not checked: {why}")


def gpus(ctx: CheckContext) -> Finding:
    if ctx.machine.gpus:
        found = "; ".join(map(str, ctx.machine.gpus))
        return Finding("gpus", "pass", f"{len(ctx.machine.gpus)} GPU(s) found: {found}")
    if not ctx.host.driver:
        why = "no NVIDIA driver is installed on this machine, or the container was started without its GPUs"
        fix = f"{GET_DRIVER}; without a GPU training works, slowly"
        return Finding("gpus", "warn", "No GPU: training runs on the CPU", why, fix)
    why = f"the driver ({ctx.host.driver}) is installed, but PyTorch {torch.__version__} sees no GPU"
    fix = f"check CUDA_VISIBLE_DEVICES, and that the driver is new enough for CUDA {torch.version.cuda}"
    if torch.version.cuda is None:
        fix = "this PyTorch was built without CUDA: install a CUDA build from pytorch.org"
    return Finding("gpus", "fail", "The GPUs of this machine cannot be used", why, fix)


def devices(ctx: CheckContext) -> Finding:
    try:
        without_caps = replace(ctx.data, enable_memory_isolation=False)
        plan = make_plan(without_caps, ctx.machine, spelling=ctx.loaded.spelling)
    except ConfigError as error:
        names = " and ".join(ctx.loaded.spelling(f"data.{role}_gpu") for role in ("data", "model"))
        fix = f"name GPUs of this list, or leave out {names}"
        return Finding("devices", "fail", _problems(error), "", fix)
    if plan.mode == "buffered":
        where = f"Single-GPU buffered mode on {ctx.machine.label(plan.model)}"
        return Finding("devices", "pass", where if ctx.on_gpu else "Data and model share the CPU")
    cards = {gpu.index: gpu for gpu in ctx.machine.gpus}
    data_gpu, model_gpu = cards[plan.data.index], cards[plan.model.index]
    if data_gpu.memory_mb > model_gpu.memory_mb:
        why = f"the model needs more memory than the batches, and its GPU ({model_gpu}) has less than {data_gpu}"
        fix = f"swap them: --data-gpu {model_gpu.index} --model-gpu {data_gpu.index}"
        return Finding("devices", "warn", "The smaller GPU trains", why, fix, "data.model_gpu", data_gpu.index)
    return Finding("devices", "pass", f"Dual-GPU mode: batches are made on {data_gpu}; trained on {model_gpu}")


def caps(ctx: CheckContext) -> Finding:
    keys = ("data.data_gpu_memory", "data.model_gpu_memory")
    chosen = [key for key in keys if ctx.loaded.origin[key] in ("file", "flag")]
    if not ctx.data.enable_memory_isolation:
        if not chosen:
            return Finding("caps", "pass", "No memory caps: each role takes what it needs")
        what, key = f"{' and '.join(chosen)} given, but memory isolation is off", "data.enable_memory_isolation"
        return _with_flag(Finding("caps", "warn", what, "without it no cap has an effect", "", key, True))
    if not ctx.on_gpu:
        return Finding("caps", "warn", "On the CPU memory isolation has no effect", "the roles share host memory")
    if isinstance(ctx.plan, ConfigError):
        return Finding("caps", "fail", "The memory caps are not possible", _problems(ctx.plan), "lower the caps")
    if ctx.plan.mode == "buffered" and keys[0] in chosen:
        why = "both roles share one GPU, and PyTorch holds a process to one cap per GPU: --model-gpu-memory"
        fix = "leave out --data-gpu-memory, or use two GPUs"
        return Finding("caps", "warn", "--data-gpu-memory has no effect", why, fix)
    roles = f"data {ctx.plan.data_cap_mb} MB, " if ctx.plan.mode == "dual" else "both roles together, "
    return Finding("caps", "pass", f"Memory caps: {roles}model {ctx.plan.model_cap_mb} MB")


def native_loading(ctx: CheckContext) -> Finding:
    """Check that batches come from the packed cache, unless the disk has no room for it."""
    found = by_rule("native-loading", ctx, "Batches are gathered from the packed cache")
    if found.level == "pass" or ctx.packed_bytes <= ctx.host.free_bytes(ctx.cache_folder):
        return found
    why = f"{found.why}, but the disk has no room for about {_size(ctx.packed_bytes)}"
    return Finding("native-loading", "warn", found.what, why, MORE_SPACE)


def prefetch(ctx: CheckContext) -> Finding:
    size, auto = ctx.data.prefetch_buffer_size, "Batches ready on the host: as workers and memory suggest"
    return by_rule("prefetch", ctx, auto if size is None else f"{size} batches are kept ready on the host")


def model_memory(ctx: CheckContext) -> Finding:
    """Check that weights, gradients and optimiser of the largest stage leave room for a batch."""
    least = {stage: BYTES_PER_TRAINED_WEIGHT * ctx.num_trained(stage) for stage in ctx.stages}
    if "gpt" in least and ctx.model.lora_rank:
        frozen = sum(value.numel() for value in ctx.network.gpt.state_dict().values())
        least["gpt"] += (2 if ctx.data.mixed_precision and ctx.on_gpu else 4) * frozen
    stage = max(least, key=lambda name: least[name])
    needed_mb, room_mb = least[stage] // 2**20, ctx.model_memory_mb
    needs = f"the stage {stage} of `{ctx.model.size}` needs {needed_mb} MB before the first batch"
    if needed_mb < 0.7 * room_mb:
        return Finding("model-memory", "pass", f"Of {room_mb} MB {needs}")
    level: Level = "fail" if needed_mb > room_mb else "warn"
    problem = "does not fit" if level == "fail" else "leaves little room for batches"
    what = f"The model {problem}: {room_mb} MB for it"
    if stage == "gpt" and not ctx.model.lora_rank and ctx.training.init_from is not None:
        return _with_flag(Finding("model-memory", level, what, needs, "", "model.lora_rank", 16))
    smaller = MODEL_SIZES[max(MODEL_SIZES.index(ctx.model.size) - 1, 0)]
    return _with_flag(Finding("model-memory", level, what, needs, "", "model.size", smaller))


def buffers(ctx: CheckContext) -> Finding:
    """Check that the buffers asked for fit the memory; says where the batches will wait."""
    if isinstance(ctx.plan, ConfigError):
        return _skipped("buffers", "it is not settled which device does what")
    plan = replace(ctx.plan, model_cap_mb=ctx.model_memory_mb)
    frames = ctx.prepared.max_mel_frames if ctx.prepared else ctx.data.max_mel_frames or AUTO_MEL_FRAMES[0]
    data = replace(ctx.data, max_mel_frames=frames)
    budget = data.batch_size * min(MAX_CROP_FRAMES, frames)
    frontend = GptFrontend(ctx.network, data, budget)
    try:
        depths = choose_depths(data, plan, frontend.outputs)
    except ConfigError as error:
        fix = "lower --buffer-size and --prefetch-buffer-size, or --batch-size"
        return Finding("buffers", "fail", "The buffers do not fit the host's memory", str(error), fix)
    host_mb = depths.host * host_layout(data).num_bytes / 2**20
    device_mb = depths.model * frontend.outputs.num_bytes / 2**20
    on_device = f"{depths.model} on {plan.model} ({device_mb:.0f} MB)"
    return Finding("buffers", "pass", f"{depths.host} batches on the host ({host_mb:.0f} MB), {on_device}")


def card_preset(ctx: CheckContext) -> Finding:
    card = ctx.situation.card
    if card is None:
        return _skipped("preset")
    if CARDS.get(used := ctx.training.preset or "", used) == card:
        return Finding("preset", "pass", f"The preset for this card is used: {used}")
    values = ", ".join(f"{key.split('.')[1]} {format_setting(key, value)}" for key, value in PRESETS[card].items())
    why, found = f"it gives {values}; what you set yourself wins over it", rule_finding("preset", ctx.situation)
    if found is not None:
        return _with_flag(replace(found, why=f"{found.why}; {card} suits it: {why}"))
    return _with_flag(
        Finding("preset", "info", f"The preset for {ctx.model_gpu} is {card}", why, "", "training.preset", card)
    )


def weights(ctx: CheckContext) -> Finding:
    for key in ("training.init_from", "training.init_decoder", "data.tokenizer"):
        path: Path | None = attrgetter(key)(ctx.loaded.settings)
        if path is not None and not path.exists():
            fix = f"correct {specs()[key].flags[0]}, or leave it out"
            return Finding("weights", "fail", f"{key} = {path}: there is no such file or folder", "", fix)
    source = ctx.training.init_from
    return Finding("weights", "pass", f"Starts from {source}" if source else "Starts from scratch")


def run(ctx: CheckContext) -> Finding:
    folder = ctx.training.checkpoint_dir
    if ctx.continued is None:
        over = f"Starts over in {folder}; the run there is put aside"
        return Finding("run", "pass", over if RunDir(folder).has_begun else f"A new run in {folder}")
    if ctx.data.train_data is None:  # `train` would apply the settings of the demonstration
        return Finding("run", "pass", f"The demonstration in {folder} can be continued")
    try:
        check_resumable(ctx.loaded.settings, ctx.continued, ctx.prepared)
    except MyXTTSError as error:
        what, *why = str(error).splitlines()
        fix = why.pop() if why else KEEP_APART
        return Finding("run", "fail", what.rstrip(":"), "; ".join(line.strip() for line in why), fix)
    with suppress(ConfigError):
        own = corpus_folders(replace(load(folder / "settings.yaml", {}).settings.data, val_data=None))
        now = corpus_folders(replace(ctx.data, val_data=None))
        then, now = ([path.resolve() for path in folders] for folders in (own, now))
        if ctx.prepared is None and then != now:
            what = f"The run in {folder} was made with another corpus: {', '.join(map(str, own))}"
            only_if = "training continues it only if clips and vocabulary are the same"
            return Finding("run", "warn", what, only_if, KEEP_APART)
    return Finding("run", "pass", f"Continues the run in {folder}")


def corpus(ctx: CheckContext) -> Finding:
    if isinstance(ctx.corpora, DatasetError):
        fix = "correct --train-data and --val-data; docs/recordings.md shows the forms of a corpus"
        return Finding("corpus", "fail", "The corpus cannot be read", str(ctx.corpora), fix)
    num_clips = sum(len(part.clips) for part in ctx.corpora)
    aside = [item for part in ctx.corpora for item in part.set_aside]
    if ctx.prepared is not None:
        num_clips, aside = len(ctx.prepared.train) + len(ctx.prepared.val), ctx.prepared.set_aside
    reasons = ", ".join(f"{count} × {why}" for why, count in Counter(item.reason for item in aside).most_common(3))
    if empty := [str(part.folder) for part in ctx.corpora if not part.clips]:
        what = f"No line of the metadata in {empty[0]} has a file"
        return Finding("corpus", "fail", what, reasons, "correct the metadata")
    what = f"{num_clips} clips in {' and '.join(map(str, corpus_folders(ctx.data)))}"
    if len(aside) > MAX_SET_ASIDE * (num_clips + len(aside)):
        fix = "run myxtts prepare: it lists every clip with its reason"
        return Finding("corpus", "warn", f"{what}; {len(aside)} cannot be used", reasons, fix)
    if ctx.data.train_data is None:
        why = "settings are checked as they are; a run without --train-data is a short demonstration with others"
        return Finding("corpus", "info", f"{what}: the embedded corpus", why, "give --train-data")
    return Finding("corpus", "pass", what, reasons)


def prepared(ctx: CheckContext) -> Finding:
    if ctx.prepared is not None:
        return Finding("prepared", "pass", f"The corpus is prepared in {ctx.cache_folder}")
    if isinstance(ctx.corpora, DatasetError):
        return _skipped("prepared", "the corpus cannot be read")
    what, why, fix = "The corpus is not prepared yet", "training prepares it when it starts", ""
    if ctx.has_stores:
        what = f"The cache in {ctx.cache_folder} was last used with other settings or clips"
        why = "training looks through it when it starts, and redoes what has changed"
    if ctx.continued is None:  # a run that continues has its own vocabulary: only training can prepare with it
        folder = "".join(f" --train-data {format_source(source)}" for source in ctx.data.sources)
        fix = f"run myxtts prepare{folder} to do it now"
    return Finding("prepared", "info", what, why, fix)


def disk_cache(ctx: CheckContext) -> Finding:
    if ctx.prepared is not None or not ctx.data.native_loading:
        return Finding("disk-cache", "pass", "No more room is needed for the cache")
    return _room(ctx, "disk-cache", "the prepared corpus", ctx.packed_bytes, ctx.cache_folder, MORE_SPACE)


def disk_checkpoints(ctx: CheckContext) -> Finding:
    """Check that the disk has room for all checkpoints: those kept, the best, and one being written."""
    kept, folder = ctx.training.keep_checkpoints + 2, ctx.training.checkpoint_dir
    per_weight = BYTES_PER_SAVED_WEIGHT + (4 if ctx.training.ema_decay != 0 else 0)
    needed = kept * per_weight * sum(ctx.num_trained(stage) for stage in ctx.stages)
    fix = "free some space, name another disk with --checkpoint-dir, or give --keep 1"
    return _room(ctx, "disk-checkpoints", f"{kept} checkpoints of each stage", needed, folder, fix)


def _room(ctx: CheckContext, code: str, what: str, needed: int, folder: Path, fix: str) -> Finding:
    free = ctx.host.free_bytes(folder)
    text = f"{_size(free)} free at {folder}; about {_size(needed)} for {what}"
    level: Level = "fail" if needed > free else "warn" if 1.5 * needed > free else "pass"
    return Finding(code, level, text, "", "" if level == "pass" else fix)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _problems(error: ConfigError) -> str:
    """Return the problems that an error lists, without its title."""
    return "; ".join(line.removeprefix("  - ") for line in str(error).splitlines()[1:])


CHECKS: Mapping[str, Callable[[CheckContext], Finding]] = {
    "gpus": gpus,
    "devices": devices,
    "caps": caps,
    "native-loading": native_loading,
    "workers": lambda ctx: by_rule(
        "workers", ctx, f"{min(ctx.data.num_workers, ctx.host.cores)} worker(s), {ctx.host.cores} usable core(s)"
    ),
    "prefetch": prefetch,
    "upload": lambda ctx: by_rule(
        "upload", ctx, "Batches are uploaded ahead, from pinned memory, on streams of their own", gpu_only=True
    ),
    "batch-size": lambda ctx: by_rule("batch-size", ctx, f"{ctx.data.batch_size} clips per batch"),
    "fixed-shapes": lambda ctx: by_rule("fixed-shapes", ctx, "Every batch has the same shapes"),
    "compilation": lambda ctx: by_rule("compilation", ctx, "Steps are compiled and captured", gpu_only=True),
    "precision": lambda ctx: by_rule("precision", ctx, "bf16 where that is safe", gpu_only=True),
    "model-memory": model_memory,
    "buffers": buffers,
    "preset": card_preset,
    "weights": weights,
    "run": run,
    "corpus": corpus,
    "prepared": prepared,
    "disk-cache": disk_cache,
    "disk-checkpoints": disk_checkpoints,
}
"""Every check by its code, in the order of the findings."""


_MB = 2**20
COPY_BYTES, NUM_COPIES = 64 * _MB, 4
MIN_GB_PER_S = 3.0
"""Slower copies from pinned memory point at a slot with too few lanes; PCIe 3.0 x16 reaches 12."""
MAX_ERROR_CHARS = 2000  # errors of compilers contain whole programs
CPU_SIZE, CPU_BATCH = "tiny", 2
"""Model and batch of a dry run on a CPU, where a step of a larger model takes minutes."""


def check_gpus(
    loaded: LoadedSettings,
    machine: Machine | None = None,
    host: Host | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Finding]:
    """Return findings about the GPUs, then those of `check`; compiling for the dry run may take minutes."""
    ctx = CheckContext(loaded, machine or Machine.look(), host or Host.look())
    plan = ctx.plan
    if isinstance(plan, ConfigError):  # both roles on one device, with a handoff if two were asked for
        device = torch.device("cuda", ctx.machine.gpus[0].index) if ctx.on_gpu else torch.device("cpu")
        plan = Plan(device, device, "buffered" if ctx.data.data_gpu is None else "dual")
    tried = [driver(ctx), gpus(ctx), devices(ctx), *peers(ctx), caps(ctx)]
    if ctx.on_gpu:
        tried += [*caps_held(plan), transfer(plan)]
    else:
        tried.append(_skipped("transfer"))
    tried += [*dry_run(ctx, plan, progress or NoProgress(), say), *not_checked(ctx, plan)]
    codes = {finding.code for finding in tried}
    return tried + [finding for finding in run_checks(ctx) if finding.code not in codes]


def driver(ctx: CheckContext) -> Finding:
    if ctx.host.driver or ctx.on_gpu:
        version = ctx.host.driver or "of unknown version"
        return Finding("driver", "pass", f"NVIDIA driver {version}, PyTorch {torch.__version__}")
    return _skipped("driver", "no NVIDIA driver was found")


def peers(ctx: CheckContext) -> Iterator[Finding]:
    plan = ctx.plan
    if not isinstance(plan, Plan) or plan.mode != "dual":
        return
    across = f"from {plan.data} to {plan.model}"
    if (plan.data.index, plan.model.index) in ctx.machine.peers:
        yield Finding("peers", "pass", f"Copies {across} are direct")
    else:
        why = "these GPUs have no peer access: every batch goes through host memory, which is slower but works"
        fix = "use two GPUs under one PCIe switch or with NVLink; nvidia-smi topo -m shows how they are connected"
        yield Finding("peers", "warn", f"No direct copies {across}", why, fix)


def caps_held(plan: Plan) -> Iterator[Finding]:
    apply_caps(plan)
    for device, cap_mb in {plan.data: plan.data_cap_mb, plan.model: plan.model_cap_mb}.items():
        if cap_mb is None:
            continue
        try:
            torch.empty((cap_mb + 1) * _MB, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            yield Finding("caps-held", "pass", f"{device} refuses to go beyond {cap_mb} MB")
        else:
            fix = "check whether PYTORCH_CUDA_ALLOC_CONF names another allocator, which ignores caps"
            yield Finding("caps-held", "fail", f"{device} gives more than its cap of {cap_mb} MB", "", fix)


def transfer(plan: Plan) -> Finding:
    """Check that random bytes come back unchanged from pinned memory through the GPUs to the host."""
    sent = torch.from_numpy(host_memory(COPY_BYTES)).random_()
    there = torch.empty_like(sent, device=plan.data)
    across = torch.empty_like(sent, device=plan.model)
    upload_s = _seconds(Stream(plan.data), lambda: there.copy_(sent, non_blocking=True))
    way = f"pinned memory → {plan.data} ({COPY_BYTES / upload_s / 1e9:.1f} GB/s)"
    if plan.data == plan.model:
        across = there
    else:
        handoff_s = _seconds(Stream(plan.model), lambda: across.copy_(there, non_blocking=True))
        way += f" → {plan.model} ({COPY_BYTES / handoff_s / 1e9:.1f} GB/s)"
    if not torch.equal(across.cpu(), sent):
        why = "this happens where the board's IOMMU redirects direct copies between devices"
        fix = "turn off IOMMU/ACS for the GPUs in the BIOS; until then leave out --data-gpu and --model-gpu"
        return Finding("transfer", "fail", f"Bytes arrive damaged: {way}", why, fix)
    if COPY_BYTES / upload_s < MIN_GB_PER_S * 1e9:
        why = "the GPU has few PCIe lanes, or another process uses them"
        fix = "move the card to a slot with 16 lanes (nvidia-smi -q -d PCIE shows the present ones)"
        return Finding("transfer", "warn", f"Uploads are slow: {way}", why, fix)
    return Finding("transfer", "pass", f"{COPY_BYTES // _MB} MB arrive unchanged: {way}")


def dry_run(ctx: CheckContext, plan: Plan, progress: Progress, say: Callable[[str], None]) -> Iterator[Finding]:
    stage, on_gpu = "gpt" if "gpt" in ctx.stages else ctx.stages[0], plan.model.type == "cuda"
    settings = ctx.loaded.settings if on_gpu else _for_cpu(ctx.loaded.settings)
    started_at = time.perf_counter()
    try:
        prepared = _prepared(ctx, progress, say)
        say(f"Dry run: {OBSERVED_STEPS} steps of stage {stage}{' (compiling takes a while)' * on_gpu}")
        seen = observe_pipeline(settings, prepared, stage, plan)
    except (MyXTTSError, RuntimeError, OSError) as error:  # also those of a compiler or driver
        fix = "do what the error says; what the compiler cannot do, --disable-xla-compilation avoids"
        yield Finding("rehearsal", "fail", "The dry run ended with an error", str(error)[:MAX_ERROR_CHARS], fix)
        return
    yield _judge_pipeline(seen, settings, time.perf_counter() - started_at)
    yield _judge_placement(seen)
    yield _judge_optimisations(seen, settings) if on_gpu else _skipped("optimisations")
    yield _skipped("grade", "grades are for GPUs") if seen.profile is None else _judge_speed(seen.profile)


def _judge_pipeline(seen: Observation, settings: Settings, seconds: float) -> Finding:
    needed = DATA_PHASES if seen.plan.mode == "dual" else DATA_PHASES[:3]
    problems = []
    if missing := [phase for phase in needed if phase not in seen.spans]:
        problems.append(f"these phases did nothing: {', '.join(missing)}")
    if seen.changed_tensors:
        problems.append(f"the first batch arrived changed: {', '.join(sorted(seen.changed_tensors))}")
    if not all(math.isfinite(loss) for loss in seen.losses):
        problems.append(f"losses are not finite: {seen.losses}")
    if not seen.has_learnt:
        problems.append("no weight has changed")
    if problems:
        fix = "run the tests (make test); if they pass, report this with the output of check --gpus --json"
        return Finding("rehearsal", "fail", "The pipeline does not work here", "; ".join(problems), fix)
    what = (
        f"{OBSERVED_STEPS} steps of stage {seen.stage}, `{settings.model.size}`, {settings.data.batch_size} clips"
    )
    return Finding("rehearsal", "pass", f"{what}: {' → '.join(needed)} → train, in {seconds:.0f} s")


def _judge_placement(seen: Observation) -> Finding:
    plan = seen.plan
    wrong = [
        f"{what} on {' and '.join(sorted(map(str, found))) or 'no device'} instead of {device}"
        for what, found, device in (
            ("the model", seen.model_devices, plan.model),
            ("its batches", seen.batch_devices, plan.model),
            ("frozen networks", seen.frozen_devices or {plan.data}, plan.data),
        )
        if found != {device}
    ]
    if wrong:
        return Finding("placement", "fail", "Not everything is where it belongs", "; ".join(wrong), "report this")
    return Finding("placement", "pass", f"Model and batches are on {plan.model}, frozen networks on {plan.data}")


def _judge_optimisations(seen: Observation, settings: Settings) -> Finding:
    """Check the optimisations that the dry run showed: one that is off although its setting is on is a fault."""
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
    fix = f"check {', '.join(sorted({key for _, key in off}))}"
    return Finding("optimisations", "fail" if broken else "warn", what, why, fix)


def _judge_speed(profile: ProfileData) -> Finding:
    """Return the grade of some steps: how busy the GPUs are and how evenly they work."""
    verdict = Diagnosis(profile)
    is_low = verdict.grade == BELOW_MINIMUM
    fix = "myxtts profile shows what the steps wait for, and what to change" if is_low else ""
    notes = "; ".join(verdict.grade_notes)
    return Finding("grade", "warn" if is_low else "pass", f"Grade: {verdict.grade}", notes, fix)


def not_checked(ctx: CheckContext, plan: Plan) -> Iterator[Finding]:
    if ctx.on_gpu and isinstance(ctx.plan, Plan):
        return
    unseen = ["copies between GPUs", "memory caps", "the model on a GPU of its own"]
    where = f"both roles were tried on {plan.model}"
    smaller = "" if ctx.on_gpu else f", with `{CPU_SIZE}` and batches of at most {CPU_BATCH} clips"
    yield Finding("not-checked", "info", f"Not checked here: {', '.join(unseen)}", f"{where}{smaller}")


def _for_cpu(settings: Settings) -> Settings:
    return replace(
        settings,
        model=replace(settings.model, size=CPU_SIZE),
        data=replace(settings.data, batch_size=min(settings.data.batch_size, CPU_BATCH), model_start_delay=0.5),
        training=replace(settings.training, init_from=None, gradient_accumulation_steps=1),
    )


def _prepared(ctx: CheckContext, progress: Progress, say: Callable[[str], None]) -> PreparedCorpus:
    """Return the user's corpus if it was ever prepared, else the embedded one: preparing may take an hour."""
    if ctx.prepared is not None:
        return ctx.prepared
    data = ctx.data_of_run
    if ctx.data.train_data is not None and not ctx.has_stores:
        say("The corpus is not prepared yet: the dry run uses the embedded one")
        data = replace(data, train_data=None, val_data=None)
    return prepare(data, progress)


def _seconds(stream: Stream, copy: Callable[[], object]) -> float:
    """Return the seconds of one copy; the first does not count."""
    with stream.use():
        copy()
        stream.finish()
        started_at = time.perf_counter()
        for _ in range(NUM_COPIES):
            copy()
        stream.finish()
    return (time.perf_counter() - started_at) / NUM_COPIES
