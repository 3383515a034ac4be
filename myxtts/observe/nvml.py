"""Readings of the GPUs from NVML: utilisation, memory, power, clocks, PCIe traffic, temperature, throttling.

A background thread samples NVML and keeps the latest readings. A value that a card or driver does not report is
None, never zero. Without a driver there are no readings, and the sampler says why. GPUs are counted as PyTorch
counts them; CUDA_VISIBLE_DEVICES and CUDA's order can make that differ from the driver's count.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from myxtts.observe.trace import now_us

MACHINE_FILE, UUIDS = "machine.json", "GPU UUIDs"
PCIE_EVERY = 10
"""PCIe traffic is in every tenth reading only: the driver measures it for 20 ms per direction while we wait."""
THROTTLES = {
    0x02: "clocks set by the user",
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Reasons for reduced clocks, by NVML's bits; idling is left out."""


class Reading(NamedTuple):
    """One GPU at one moment; None if not reported."""

    at_us: int  # on the clock of `Span`
    gpu: int  # PyTorch's index
    utilisation: float | None = None
    """Share of the driver's last sample period (up to a second) in which any kernel ran."""
    memory_used_mb: float | None = None  # by all processes
    memory_total_mb: float | None = None
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    pcie_rx_mb_s: float | None = None
    pcie_tx_mb_s: float | None = None
    throttled_by: tuple[str, ...] | None = None


class Sampler:
    """Samples GPUs in the background and keeps the latest `limit` readings. A context manager.

    `nvml` replaces the module pynvml; `uuids` are those of PyTorch's GPUs in order. Reading creates no CUDA
    context, so a process that only watches takes no GPU memory.
    """

    def __init__(
        self,
        indices: Sequence[int],
        period_s: float = 0.1,
        *,
        limit: int = 40_000,
        nvml: Any = None,
        environment: Mapping[str, str] | None = None,
        uuids: Sequence[str] | None = None,
    ) -> None:
        self.reason = ""
        """Why some GPUs have no readings."""
        self._period_s = period_s
        self._samples: deque[Reading] = deque(maxlen=limit)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._handles: dict[int, Any] = {}
        self._nvml = self._open(nvml)
        if self._nvml is not None:
            visible = _visible(self._nvml, os.environ if environment is None else environment, uuids)
            self._handles = {index: visible[index] for index in indices if visible.get(index) is not None}
            absent = [str(index) for index in indices if index not in self._handles]
            if absent:
                self.reason = f"the driver shows no GPU {', '.join(absent)} to this process"

    @property
    def available(self) -> bool:
        """True if there is a GPU to read; otherwise see `reason`."""
        return bool(self._handles)

    def start(self) -> None:
        if self._thread is None and self.available:
            self._ended.clear()
            self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None

    def close(self) -> None:
        """Stop and shut NVML down; may be called more than once."""
        self.stop()
        if self._nvml is not None:
            _ask(self._nvml, self._nvml.nvmlShutdown)
        self._nvml, self._handles = None, {}

    def read(self, *, pcie: bool = True) -> list[Reading]:
        """Return a reading of each GPU taken on the calling thread; it is not kept."""
        return [_read(self._nvml, handle, index, pcie) for index, handle in self._handles.items()]

    def samples(self) -> list[Reading]:
        with self._lock:
            return list(self._samples)

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, nvml: Any) -> Any:
        if nvml is None:
            try:
                nvml = importlib.import_module("pynvml")
            except ImportError:
                self.reason = "nvidia-ml-py is not installed: pip install nvidia-ml-py"
                return None
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self.reason = f"no NVIDIA driver answers ({error})"
            return None
        return nvml

    def _run(self) -> None:
        for count in itertools.count():
            readings = self.read(pcie=count % PCIE_EVERY == 0)
            with self._lock:
                self._samples.extend(readings)
            if self._ended.wait(self._period_s):
                return


def _ask(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer, or None if it refuses."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def _read(nvml: Any, handle: Any, index: int, pcie: bool) -> Reading:
    rates = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    power_mw = _ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
    # Newer drivers call these event reasons; all of them still accept this name.
    reasons = _ask(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    counters = (nvml.NVML_PCIE_UTIL_RX_BYTES, nvml.NVML_PCIE_UTIL_TX_BYTES) if pcie else ()
    traffic = [_ask(nvml, nvml.nvmlDeviceGetPcieThroughput, handle, counter) for counter in counters]
    received, sent = (None if value is None else value / 1024 for value in traffic or (None, None))
    return Reading(
        at_us=now_us(),
        gpu=index,
        utilisation=None if rates is None else rates.gpu / 100,
        memory_used_mb=None if memory is None else memory.used / 2**20,
        memory_total_mb=None if memory is None else memory.total / 2**20,
        power_w=None if power_mw is None else power_mw / 1000,
        sm_clock_mhz=_ask(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        temperature_c=_ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        pcie_rx_mb_s=received,
        pcie_tx_mb_s=sent,
        throttled_by=None if reasons is None else tuple(name for bit, name in THROTTLES.items() if reasons & bit),
    )


def _visible(nvml: Any, environment: Mapping[str, str], uuids: Sequence[str] | None) -> dict[int, Any]:
    """Return NVML's handles by PyTorch's index: by UUID if PyTorch uses CUDA already, else as CUDA counts."""
    count = _ask(nvml, nvml.nvmlDeviceGetCount) or 0
    handles = [_ask(nvml, nvml.nvmlDeviceGetHandleByIndex, number) for number in range(count)]
    names = [_bare(_ask(nvml, nvml.nvmlDeviceGetUUID, handle) if handle is not None else "") for handle in handles]
    uuids = _torch_uuids() if uuids is None else uuids
    if uuids:
        by_name = dict(zip(names, handles, strict=True))
        return {index: by_name.get(_bare(uuid)) for index, uuid in enumerate(uuids)}
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return dict(enumerate(handles))
    visible: dict[int, Any] = {}
    for entry in (entry.strip() for entry in listed.split(",")):
        if entry.isdecimal():
            numbers = [int(entry)] if int(entry) < count else []
        else:
            numbers = [number for number, name in enumerate(names) if entry and name.startswith(_bare(entry))]
        if len(numbers) != 1 or entry.startswith("MIG-"):
            break  # CUDA ignores an unknown entry and all that follow
        visible[len(visible)] = handles[numbers[0]]
    return visible


def gpus_of_run(folder: Path) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that a run sees, in its order; none before it has begun to train."""
    with suppress(OSError, ValueError, AttributeError):
        known = json.loads((folder / MACHINE_FILE).read_bytes()).get(UUIDS, "")
        return tuple(uuid for uuid in known.split(", ") if uuid)
    return ()


def _bare(uuid: str | None) -> str:
    """Remove the prefix GPU-, which NVML writes and PyTorch does not."""
    return (uuid or "").removeprefix("GPU-").lower()


def _torch_uuids() -> list[str]:
    """Return the UUIDs of PyTorch's GPUs if it uses CUDA already; asking earlier would initialise CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def allocated_mb(gpu: int) -> float:
    """Return the memory of this process's tensors on a GPU, without waiting for the GPU."""
    import torch

    return torch.cuda.memory_allocated(gpu) / 2**20
