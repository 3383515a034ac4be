"""Devices of a process: which role runs where, memory caps, streams, events and CUDA graphs.

A plan assigns devices to the roles `data` and `model`. It follows from the settings, the GPUs of the machine and
torchrun's environment. A stream is an ordered queue of work: a CUDA stream, or the calling thread on the CPU.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from myxtts.config import DataSettings
from myxtts.errors import ConfigError, PipelineError
from myxtts.host import available_bytes, process_bytes

_MB = 2**20
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
CONTEXT_MB, MARGIN_MB = 512, 512
"""Memory that a cap leaves of a card: the CUDA context, which is outside PyTorch's cap, and room for others."""


@dataclass(frozen=True)
class Plan:
    """Devices and memory caps of the two roles in this process, and its rank among the processes of a run."""

    data: torch.device
    model: torch.device
    mode: str = "buffered"  # both roles share a device; `dual`: batches are copied from one device to the other
    data_cap_mb: int | None = None
    model_cap_mb: int | None = None
    """Equal if the roles share a device, which can have only one cap. Without effect on the CPU."""
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class Gpu:
    """A GPU visible to this process, with PyTorch's index."""

    index: int
    name: str
    memory_mb: int
    multiprocessors: int = 0
    uuid: str = ""

    def __str__(self) -> str:
        return f"{self.index}: {self.name}, {self.memory_mb} MB"


@dataclass(frozen=True)
class Machine:
    """The GPUs visible to this process, and the pairs of them with peer access."""

    gpus: Sequence[Gpu] = ()
    peers: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def look(cls) -> Machine:
        indices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        cards = [torch.cuda.get_device_properties(index) for index in indices]
        return cls(
            [
                Gpu(index, card.name, card.total_memory // _MB, card.multi_processor_count, str(card.uuid))
                for index, card in enumerate(cards)
            ],
            frozenset(pair for pair in permutations(indices, 2) if torch.cuda.can_device_access_peer(*pair)),
        )

    @property
    def roles(self) -> tuple[int, int]:
        """The GPUs for the data and the model role, if there are two: the strongest trains, the weakest prepares.

        More memory counts first, then more multiprocessors; equal cards are taken in their order.
        """
        strength = {gpu.index: (gpu.memory_mb, gpu.multiprocessors) for gpu in self.gpus}
        data = min(strength, key=lambda index: strength[index], default=0)
        others = [index for index in strength if index != data]
        return data, max(others, key=lambda index: strength[index], default=1)

    def cap_mb(self, device: torch.device) -> int | None:
        """The default cap of a card: its memory without the CUDA context and a margin; None on the CPU."""
        memory_mb = next((gpu.memory_mb for gpu in self.gpus if gpu.index == device.index), None)
        return memory_mb - CONTEXT_MB - MARGIN_MB if memory_mb and device.type == "cuda" else None

    def label(self, device: torch.device) -> str:
        """A device with the name and memory of its card, for messages."""
        names = [f"{device} ({gpu.name}, {gpu.memory_mb} MB)" for gpu in self.gpus if gpu.index == device.index]
        return names[0] if device.type == "cuda" and names else str(device)


@dataclass(frozen=True)
class _Place:
    """torchrun's four variables: rank and world size in the run and on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


Spelling = Callable[[str], str]
"""A setting by its key (`data.data_gpu`) as the user wrote it: the flag, or the key in a YAML file."""


def as_flag(key: str) -> str:
    return f"--{key.partition('.')[2].replace('_', '-')}"


def make_plan(
    data: DataSettings,
    machine: Machine | None = None,
    environment: Mapping[str, str] | None = None,
    spelling: Spelling = as_flag,
) -> Plan:
    """The plan of this process; a ConfigError lists every problem, with the settings as the user wrote them."""
    machine = Machine.look() if machine is None else machine
    environment = os.environ if environment is None else environment
    problems: list[str] = []
    place = _read_place(environment, problems)
    problems += _gpu_problems(data, machine, place.local_world_size, environment, spelling)
    problems += _cap_problems(data, machine, place.local_world_size, spelling)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  - ".join([f"{count} with the devices:", *problems]))

    data_device, model_device = (
        torch.device("cuda", index) if machine.gpus else torch.device("cpu")
        for index in _indices(data, place.local_rank)
    )
    is_dual = data_device != model_device
    data_cap = model_cap = None
    if data.enable_memory_isolation:
        data_cap = model_cap = data.model_gpu_memory or machine.cap_mb(model_device)
        if is_dual:
            data_cap = data.data_gpu_memory or machine.cap_mb(data_device)
    mode = "dual" if is_dual else "buffered"
    return Plan(data_device, model_device, mode, data_cap, model_cap, place.rank, place.world_size)


def _read_place(environment: Mapping[str, str], problems: list[str]) -> _Place:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = {name: environment[name] for name in names if name in environment}
    with contextlib.suppress(ValueError):  # not numbers
        place = _Place(**{name.lower(): int(value) for name, value in given.items()})
        is_inside = 0 <= place.rank < place.world_size and 0 <= place.local_rank < place.local_world_size
        # With only some of the variables, one of several processes would take the GPU of another.
        if is_inside and (place.world_size == 1 or len(given) == len(names)):
            return place
    found = ", ".join(f"{name}={value}" for name, value in given.items())
    cure = f"start with torchrun, which sets {', '.join(names)}, or unset them to train with one process"
    problems.append(f"the environment has {found}, which is no place among the processes of a run; {cure}")
    return _Place()


def _indices(data: DataSettings, local_rank: int) -> tuple[int, int]:
    """GPU indices of the data and model roles for a process on this machine."""
    if data.data_gpu is None or data.model_gpu is None:
        return local_rank, local_rank
    return data.data_gpu + 2 * local_rank, data.model_gpu + 2 * local_rank


def _gpu_problems(
    data: DataSettings, machine: Machine, num_processes: int, environment: Mapping[str, str], spelling: Spelling
) -> Iterator[str]:
    asked_for = {"data.data_gpu": data.data_gpu, "data.model_gpu": data.model_gpu}
    given = {spelling(key): index for key, index in asked_for.items() if index is not None}
    drop = f"drop {' and '.join(given)}"
    found = f"GPUs found: {'; '.join(map(str, machine.gpus)) or 'none'}"
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        found += f" (CUDA_VISIBLE_DEVICES={visible} hides any others and counts from 0)"
    if len(given) == 1:
        (here,), (missing,) = given, (key for key, index in asked_for.items() if index is None)
        missing = as_flag(missing) if here.startswith("--") else missing
        yield f"{here} is given without {missing}. {found}; give both to use two of them, or {drop} to use one"
    elif given and data.data_gpu == data.model_gpu:
        both = f"{' and '.join(given)} are both {data.data_gpu}"
        yield f"{both}. {found}; name two different ones, or {drop} to use one"

    indices = {gpu.index for gpu in machine.gpus}
    used = [index for rank in range(num_processes) for index in set(_indices(data, rank))]
    used = list(given.values()) if len(given) == 1 else used
    absent = [str(index) for index in sorted(set(used) - indices)]
    if given and len(indices) < 2:
        where = "it" if indices else "the CPU"
        yield f"Insufficient GPUs: Multi-GPU requires at least 2 GPUs. {found}; {drop} to train on {where}"
    elif indices and absent and num_processes == 1:
        asked = " ".join(f"{flag} {index}" for flag, index in given.items())
        yield f"{asked}: there is no GPU {', '.join(absent)}. {found}; name two of these, or {drop} to use one"
    elif indices and absent:
        cure = "start fewer (torchrun --nproc-per-node)" + (f", or {drop}" if given else "")
        each = "two GPUs each" if given else "one GPU each"
        yield f"{num_processes} processes on this machine, {each}, lack GPU {', '.join(absent)}. {found}; {cure}"
    elif indices and len(set(used)) < len(used):
        share = f"{num_processes} processes on this machine, each two GPUs further than the last, would share GPUs"
        yield f"{share}; name neighbours, such as 0 and 1, or {drop}. {found}"


def _cap_problems(data: DataSettings, machine: Machine, num_processes: int, spelling: Spelling) -> Iterator[str]:
    if not data.enable_memory_isolation or (data.data_gpu is None) != (data.model_gpu is None):
        return
    pairs = [_indices(data, rank) for rank in range(num_processes)]
    caps = [("data.model_gpu_memory", data.model_gpu_memory, index) for _, index in pairs]
    if data.data_gpu is not None:
        caps += [("data.data_gpu_memory", data.data_gpu_memory, index) for index, _ in pairs]
    cards = {gpu.index: gpu for gpu in machine.gpus}
    for key, cap, index in caps:
        if (gpu := cards.get(index)) and cap is not None and cap > gpu.memory_mb - CONTEXT_MB:
            room = f"GPU {gpu} has room for, as the CUDA context takes about {CONTEXT_MB} MB outside the cap"
            default = machine.cap_mb(torch.device("cuda", index))
            cure = f"give at most {gpu.memory_mb - CONTEXT_MB}, or leave it out for {default}"
            yield f"{spelling(key)} {cap} is more than {room}; {cure}"


def announcements(plan: Plan, data: DataSettings, machine: Machine | None = None) -> list[str]:
    """The lines a run prints about its devices and its loading when it starts."""
    machine = Machine.look() if machine is None else machine
    on_cpu = plan.model.type == "cpu"
    mode = "Multi-GPU Mode" if plan.mode == "dual" else "Single-GPU Buffered Mode"
    lines = [f"Intelligent GPU Pipeline: {mode}"]
    if on_cpu:
        lines = ["No GPU was found: data and model share the CPU, and training is slow"]
    else:
        lines += [f"Data GPU: {machine.label(plan.data)}", f"Model GPU: {machine.label(plan.model)}"]
    lines.append(f"Model placed on {machine.label(plan.model)}")
    loading = "on, batches are gathered" if data.native_loading else "off, audio files are decoded for every batch"
    lines.append(f"Native loading: {loading}{' from the packed cache' if data.native_loading else ''}")
    context = f"the CUDA context, about {CONTEXT_MB} MB, comes on top"
    cap = f"{plan.model_cap_mb} MB on {plan.model}"
    if data.enable_memory_isolation and on_cpu:
        lines.append("Memory isolation has no effect on the CPU: nothing is capped")
    elif plan.model_cap_mb is not None and plan.mode == "dual":
        lines.append(f"Memory caps: data {plan.data_cap_mb} MB on {plan.data}, model {cap}; {context} of each")
    elif plan.model_cap_mb is not None:
        why = "PyTorch keeps one cap per GPU, so data_gpu_memory has no effect"
        lines.append(f"Memory cap: {cap} for both roles together ({why}); {context}")
    if plan.mode == "dual":
        lines.append("Multi-GPU configuration completed successfully")
        is_direct = (plan.data.index, plan.model.index) in machine.peers
        way = "direct (peer access)" if is_direct else "through host memory, slower (no peer access)"
        lines.append(f"Copies from {plan.data} to {plan.model}: {way}")
    if plan.world_size > 1:
        lines.append(f"Rank {plan.rank} of {plan.world_size}")
    return lines


def device_named(name: torch.device | str | None = None, machine: Machine | None = None) -> torch.device:
    """The device of this name, `cpu`, `cuda` or `cuda:1`; without one the first GPU, or the CPU."""
    if isinstance(name, torch.device):
        return name
    gpus = (Machine.look() if machine is None else machine).gpus
    known = {f"cuda:{gpu.index}": torch.device("cuda", gpu.index) for gpu in gpus}
    known |= {"cuda": known["cuda:0"]} if gpus else {}
    known |= {"cpu": torch.device("cpu")}
    name = name or next(iter(known))
    if name not in known:
        found = "; ".join(f"cuda:{gpu}" for gpu in gpus) or "no GPU"
        raise ConfigError(f"--device {name}: there is no such device. Found: {found}; or give --device cpu")
    return known[name]


def work_on(device: torch.device) -> None:
    """Make a GPU the current one of the calling thread, so that it opens no context on the first GPU."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def apply_caps(plan: Plan) -> None:
    """Limit PyTorch's allocations on each GPU of the plan to its cap."""
    for device, cap_mb in ((plan.data, plan.data_cap_mb), (plan.model, plan.model_cap_mb)):
        if device.type == "cuda" and cap_mb is not None:
            total_bytes = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, cap_mb * _MB / total_bytes), device)


def explain_out_of_memory(plan: Plan, error: torch.OutOfMemoryError, role: str, doing: str) -> PipelineError:
    """The error to raise instead: the role and device, what it was `doing`, current memory, and what to change."""
    device, cap_mb = (plan.data, plan.data_cap_mb) if role == "data" else (plan.model, plan.model_cap_mb)
    is_shared = plan.data == plan.model
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    text = f"The {role} role ran out of memory on {device} while {doing}"
    text += f": it asked for {asked[1]} more." if asked else "."
    advice = []
    if device.type == "cuda":
        free_mb, total_mb = (number // _MB for number in torch.cuda.mem_get_info(device))
        allocated_mb = torch.cuda.memory_allocated(device) // _MB
        peak_mb = torch.cuda.max_memory_allocated(device) // _MB
        reserved_mb = torch.cuda.memory_reserved(device) // _MB
        text += f" It has {allocated_mb} MB allocated (at most {peak_mb} MB so far) and {reserved_mb} MB reserved;"
        text += f" {free_mb} MB of the card's {total_mb} MB are free."
        if cap_mb is not None:
            flag = "--data-gpu-memory" if role == "data" and not is_shared else "--model-gpu-memory"
            text += f" The cap is {cap_mb} MB ({flag}{', for both roles together' if is_shared else ''})."
            if cap_mb - reserved_mb < free_mb:  # the cap was reached before the card was full
                advice.append(f"a higher cap: {flag} above {cap_mb}")
    smaller_batch = "a smaller --batch-size with more --grad-accum: the effective batch stays the same"
    smaller_buffer = "a smaller --buffer-size: fewer batches wait on the GPU"
    less_model = "--gradient-checkpointing, or for fine-tuning --lora-rank 16"
    cures = [smaller_batch, less_model]
    cures.insert(0 if role == "data" else 2, smaller_buffer)
    advice += cures if is_shared else cures[:2]
    explained = PipelineError("\n  - ".join([f"{text} Change one of:", *advice[:3]]))
    explained.__cause__ = error
    return explained


@contextlib.contextmanager
def explained_out_of_memory(plan: Plan, role: str, doing: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise explain_out_of_memory(plan, error, role, doing) from error


def is_out_of_memory(error: Exception) -> bool:
    """True for a lack of memory, also where ending a capture raised another error because of it."""
    causes = (error, error.__context__, error.__cause__)
    return any(isinstance(each, torch.OutOfMemoryError) for each in causes) or "allocate memory" in str(error)


def allocatable_bytes(device: torch.device) -> int:
    """Memory of a GPU that PyTorch can still allocate in this process, under its cap if it has one."""
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    cap = int(torch.cuda.get_per_process_memory_fraction(index) * total)
    return min(free + reserved, cap) - allocated


def release_memory() -> None:
    """Give memory that PyTorch keeps for reuse back to the GPUs."""
    gc.collect()  # an error that was handled may still hold tensors
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state.cpu(), device)
    else:
        torch.set_rng_state(state.cpu())


@contextlib.contextmanager
def deterministic(plan: Plan, enabled: bool) -> Iterator[None]:
    """Let a GPU compute the same bits each time, as a CPU does; must begin before the first work on the GPU.

    PyTorch then takes kernels without atomic additions, also for the backward pass of attention, and cuBLAS and
    cuDNN keep to one algorithm.
    """
    if not enabled or plan.model.type != "cuda":
        yield
        return
    if os.environ.get(_CUBLAS) not in (":4096:8", ":16:8"):
        os.environ[_CUBLAS] = ":4096:8"
    cudnn, fill = torch.backends.cudnn, torch.utils.deterministic
    before = (cudnn.benchmark, cudnn.deterministic, fill.fill_uninitialized_memory)  # type: ignore[attr-defined]
    cudnn.benchmark, cudnn.deterministic = False, True
    fill.fill_uninitialized_memory = False  # type: ignore[attr-defined] # every kernel here writes before it reads
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        cudnn.benchmark, cudnn.deterministic, fill.fill_uninitialized_memory = before  # type: ignore[attr-defined]


def all_random_states(plan: Plan) -> dict[str, torch.Tensor]:
    """The random states of the model role's devices in all processes, each of which must call this."""
    own = random_state(plan.model)
    if plan.world_size == 1:
        return {"random.0": own}
    states = [torch.empty_like(own, device=plan.model) for _ in range(plan.world_size)]
    dist.all_gather(states, own.to(plan.model))
    return {f"random.{rank}": state.cpu() for rank, state in enumerate(states)}


def _gpus_of(plan: Plan) -> dict[str, tuple[torch.device, int | None]]:
    """The device of each role with its cap; "gpu" if both roles share one, nothing on the CPU."""
    if plan.model.type != "cuda":
        return {}
    model = (plan.model, plan.model_cap_mb)
    return {"gpu": model} if plan.data == plan.model else {"data": (plan.data, plan.data_cap_mb), "model": model}


def peak_memory_mb(plan: Plan) -> dict[str, float]:
    """Peak memory allocated on the device of each role."""
    return {role: torch.cuda.max_memory_allocated(device) / _MB for role, (device, _) in _gpus_of(plan).items()}


def memory_in_use_mb(plan: Plan) -> dict[str, tuple[float, float]]:
    """Memory held now and the most there can be, on the device of each role and by this process on the host."""
    held = process_bytes() / _MB
    found = {"host": (held, held + available_bytes() / _MB)}
    for role, (device, cap_mb) in _gpus_of(plan).items():
        limit_mb = cap_mb or torch.cuda.get_device_properties(device).total_memory / _MB - CONTEXT_MB
        found[role] = (torch.cuda.memory_allocated(device) / _MB, limit_mb)
    return found


Result = TypeVar("Result")
CAPTURING = threading.RLock()
"""Held while a CUDA graph is captured. A thread that allocates or waits for a whole device holds it too: either
would end the capture."""
WARM_UPS = 3  # runs before a capture: libraries initialise, compilers compile, gradients are allocated


class Event:
    """A reusable point in a stream; on the CPU all work before it is already done."""

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.Event(blocking=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def is_passed(self) -> bool:
        """True if the stream has passed this point; does not wait."""
        return self.handle is None or bool(self.handle.query())  # type: ignore[no-untyped-call]

    def wait_on_host(self) -> None:
        """Block the calling thread until the stream has passed this point."""
        if self.handle is not None:
            self.handle.synchronize()


class Stream:
    """An ordered queue of work on one device."""

    def __init__(self, device: torch.device, *, high_priority: bool = False) -> None:
        self.device, self._priority = device, -1 if high_priority else 0
        self.handle: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.handle = torch.cuda.Stream(device, priority=self._priority)  # type: ignore[no-untyped-call]

    @classmethod
    def current(cls, device: torch.device) -> Stream:
        """The stream on which the calling thread launches work."""
        stream = cls(torch.device("cpu"))
        stream.device, stream.handle = device, torch.cuda.current_stream(device) if device.type == "cuda" else None
        return stream

    @cached_property
    def capture_stream(self) -> torch.cuda.Stream:
        """A separate stream for captures, so that work from other threads stays out of the graphs.

        What is captured keeps the priority of the stream that it was captured on.
        """
        return torch.cuda.Stream(self.device, priority=self._priority)  # type: ignore[no-untyped-call]

    def use(self) -> contextlib.AbstractContextManager[object]:
        """A context in which the calling thread launches work on this stream."""
        return contextlib.nullcontext() if self.handle is None else torch.cuda.stream(self.handle)

    def record(self, event: Event) -> None:
        """Record the event after all work launched on this stream so far."""
        if event.handle is not None and self.handle is not None:
            event.handle.record(self.handle)

    def wait(self, event: Event) -> None:
        """Make work launched on this stream from here on wait for the event; the host does not wait."""
        if event.handle is not None and self.handle is not None:
            self.handle.wait_event(event.handle)

    def finish(self) -> None:
        """Block the host until all work on this stream is done."""
        if self.handle is not None:
            self.handle.synchronize()


def send(there: torch.Tensor, here: torch.Tensor) -> None:
    """Copy a tensor of the host; the host does not wait."""
    there.copy_(here.pin_memory() if there.is_cuda and not here.is_cuda else here, non_blocking=True)


class CudaGraph(Generic[Result]):
    """Work captured as a CUDA graph. The random number generator is restored after warm-up and capture.

    The caller restores everything else that the warm-ups change. `result` holds the tensors that every replay
    overwrites. Graphs that never run at the same time may share the memory of a `pool`.
    """

    def __init__(
        self, work: Callable[[], Result], stream: Stream, pool: Any = None, *, warm_ups: int = WARM_UPS
    ) -> None:
        random_state = torch.cuda.get_rng_state(stream.device)
        private = stream.capture_stream
        with CAPTURING, torch.cuda.device(stream.device):
            torch.cuda.synchronize()
            with torch.cuda.stream(private):
                for _ in range(warm_ups):
                    work()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool, stream=private, capture_error_mode="thread_local"):
                self.result = work()
        torch.cuda.set_rng_state(random_state, stream.device)

    @property
    def pool(self) -> Any:
        return self._graph.pool()

    def replay(self) -> Result:
        """Launch the work on the current stream."""
        self._graph.replay()
        return self.result


MATMUL_SIZE, MATMULS_PER_ROUND, MATMUL_ROUNDS = 4096, 3, 3
"""Products that measure a GPU's peak: about 2 ms on an H200, 50 ms on an RTX 3060; the first round is slow."""


def peak_flops(stream: Stream, dtype: torch.dtype) -> float | None:
    """Measured operations per second of large matrix products on an idle GPU; None on the CPU or without room."""
    if stream.handle is None:
        return None
    generator = torch.Generator(stream.device).manual_seed(0)  # leaves the random numbers of a run alone
    shape, seconds = (MATMUL_SIZE, MATMUL_SIZE), []
    try:
        with stream.use():
            factor = torch.randn(shape, dtype=dtype, device=stream.device, generator=generator)
            product = factor @ factor
            for _ in range(MATMUL_ROUNDS):
                stream.finish()
                started_at = time.perf_counter()
                for _ in range(MATMULS_PER_ROUND):
                    torch.mm(factor, factor, out=product)
                stream.finish()
                seconds.append(time.perf_counter() - started_at)
    except torch.OutOfMemoryError:
        return None
    return MATMULS_PER_ROUND * 2 * MATMUL_SIZE**3 / min(seconds)
