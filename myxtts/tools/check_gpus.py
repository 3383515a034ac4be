"""`myxtts check --gpus`: tries on this machine what a run will rely on, instead of looking at settings.

Real bytes are copied and compared, a cap is really exceeded, and a short training goes through the whole pipeline.
Where GPUs are missing the pipeline is rehearsed on what there is, and a finding says what could not be seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

import torch

from myxtts.config import Settings
from myxtts.data.clips import Prepared
from myxtts.data.fill import NoProgress, Progress
from myxtts.data.prepare import prepare
from myxtts.devices import Machine, Plan, apply_caps
from myxtts.errors import MyXTTSError
from myxtts.host import host_memory
from myxtts.lanes import Lane
from myxtts.observe.findings import Finding
from myxtts.settings import Loaded
from myxtts.tools import check_settings
from myxtts.tools.case import Case, Host
from myxtts.tools.check import answers
from myxtts.tools.witness import NUM_STEPS, Seen, witness

CPU = torch.device("cpu")
_MB = 2**20
COPY_BYTES, NUM_COPIES = 64 * _MB, 4
SLOW_GB_PER_S = 3.0
"""Copies from pinned memory that are slower point at a slot with too few lanes; PCIe 3.0 x16 reaches 12."""
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
    loaded: Loaded,
    machine: Machine | None = None,
    host: Host | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Finding]:
    """Findings about the GPUs, then the others of `check`; takes from seconds to minutes, most of it compiling."""
    case = Case(loaded, machine or Machine.look(), host or Host.look())
    plan = case.plan if isinstance(case.plan, Plan) else _fallback(case)
    attempt = Attempt(case, plan, isinstance(case.plan, Plan), progress or NoProgress(), say)
    tried = [driver(case), check_settings.gpus(case), check_settings.devices(case), *peers(case)]
    tried.append(check_settings.caps(case))
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
    upload_s = _seconds(Lane(plan.data), lambda: there.copy_(sent, non_blocking=True))
    way = f"pinned memory → {plan.data} {_speed(upload_s)}"
    if plan.data == plan.model:
        across = there
    else:
        handoff_s = _seconds(Lane(plan.model), lambda: across.copy_(there, non_blocking=True))
        way += f" → {plan.model} {_speed(handoff_s)}"
    if not torch.equal(across.cpu(), sent):
        why = "this happens where the board's IOMMU redirects direct copies between devices"
        fix = "turn off IOMMU/ACS for the GPUs in the BIOS; until then leave out --data-gpu and --model-gpu"
        return Finding("transfer", "fail", f"Bytes arrive damaged: {way}", why, fix)
    if COPY_BYTES / upload_s < SLOW_GB_PER_S * 1e9:
        why = "the GPU has few PCIe lanes, or another process uses them"
        fix = "move the card to a slot with 16 lanes (nvidia-smi -q -d PCIE shows the present ones)"
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
            f"Rehearsing {NUM_STEPS} steps of stage {stage}{' (compiling takes a while)' * attempt.on_gpu}"
        )
        seen = witness(loaded, prepared, stage, attempt.plan)
    except (MyXTTSError, RuntimeError, OSError) as error:  # of a compiler or a driver too: this is what was asked
        fix = "do what the error says; what the compiler cannot do, --disable-xla-compilation avoids"
        yield Finding("rehearsal", "fail", "The rehearsal ended with an error", str(error)[:MOST_ERROR_TEXT], fix)
        return
    yield _judge_pipeline(seen, settings, time.perf_counter() - started_at)
    yield _judge_placement(seen)
    if attempt.on_gpu:
        yield _judge_optimisations(seen, settings)


def _judge_pipeline(seen: Seen, settings: Settings, seconds: float) -> Finding:
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
    what = f"{NUM_STEPS} steps of stage {seen.stage}, `{settings.model.size}`, {settings.data.batch_size} clips"
    return Finding("rehearsal", "pass", f"{what}: {stages} → train, in {seconds:.0f} s")


def _judge_placement(seen: Seen) -> Finding:
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


def _judge_optimisations(seen: Seen, settings: Settings) -> Finding:
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


def _for_cpu(loaded: Loaded) -> Loaded:
    settings = loaded.settings
    smaller = replace(
        settings,
        model=replace(settings.model, size=CPU_SIZE),
        data=replace(settings.data, batch_size=min(settings.data.batch_size, CPU_BATCH), model_start_delay=0.5),
        training=replace(settings.training, init_from=None, gradient_accumulation_steps=1),
    )
    return replace(loaded, settings=smaller)


def _prepared(attempt: Attempt) -> Prepared:
    """The user's corpus if it was prepared before; otherwise the embedded one, for preparing may take an hour."""
    case = attempt.case
    if case.prepared is not None:
        return case.prepared
    data = case.data_of_run
    if case.data.train_data is not None and not case.has_stores:
        attempt.say("The corpus is not prepared yet: rehearsing with the embedded one")
        data = replace(data, train_data=None, val_data=None)
    return prepare(data, attempt.progress)


def _seconds(lane: Lane, copy: Callable[[], object]) -> float:
    """Seconds of one copy, the first one not counted."""
    with lane.use():
        copy()
        lane.finish()
        started_at = time.perf_counter()
        for _ in range(NUM_COPIES):
            copy()
        lane.finish()
    return (time.perf_counter() - started_at) / NUM_COPIES


def _speed(seconds: float) -> str:
    return f"({COPY_BYTES / seconds / 1e9:.1f} GB/s)"


def _names(devices: set[torch.device]) -> str:
    return " and ".join(sorted(map(str, devices))) or "no device"
