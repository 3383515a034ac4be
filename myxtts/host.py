"""The host's resources: cores, free memory, and memory that a GPU can read directly.

PyTorch is imported only to pin memory: preparing a corpus does without the second it takes to load.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

_log = logging.getLogger(__name__)
MAX_PINNED_SHARE = 0.25  # share of the free host memory that one purpose may pin
TURN_S = 0.0005
HostMemory = npt.NDArray[np.uint8]
DRIVER_FILE = Path("/proc/driver/nvidia/version")
DRIVER_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the last under WSL
_CGROUP_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_MEMORY_USED = Path("/sys/fs/cgroup/memory.current")
_turns_lock = threading.Lock()
_turns = {"asked": 0, "usual_s": 0.0}


def usable_cores() -> int:
    """Return the cores this process may use: its affinity, limited by the quota of a container."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP_CPU_LIMIT.read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup, or "max": no quota
        return cores


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Let threads take turns more often: one that drives a GPU needs a moment many times per step.

    This holds for the process, until the last of those that asked for it has ended.
    """
    with _turns_lock:
        if not _turns["asked"]:
            _turns["usual_s"] = sys.getswitchinterval()
            sys.setswitchinterval(min(_turns["usual_s"], TURN_S))
        _turns["asked"] += 1
    try:
        yield
    finally:
        with _turns_lock:
            _turns["asked"] -= 1
            if not _turns["asked"]:
                sys.setswitchinterval(_turns["usual_s"])


@contextlib.contextmanager
def hidden_working_folder() -> Iterator[None]:
    """Keep Python processes that are started meanwhile from importing a `random.py` of the working folder."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def available_bytes() -> int:
    """Return the host memory this process can still allocate without swapping."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = 1024 * int(fields["MemAvailable"].split()[0])
    try:
        limit = int(_CGROUP_MEMORY_LIMIT.read_text())
        return max(0, min(available, limit - int(_CGROUP_MEMORY_USED.read_text())))
    except (OSError, ValueError):  # no cgroup, or "max": no limit
        return available


def process_bytes() -> int:
    """Return the memory that this process holds for itself: mapped files do not count."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields.get("RssAnon", fields["VmRSS"]).split()[0])  # kernels before 4.5 lack the first


def may_pin(num_bytes: int, what: str) -> bool:
    """True if so much host memory may be pinned, which nothing else can use then; if not, the log says so."""
    available = available_bytes()
    if num_bytes <= MAX_PINNED_SHARE * available:
        return True
    text = "%s take %.1f GB of host memory, with %.1f GB free: they are not pinned, so copying takes longer"
    _log.info(text, what, num_bytes / 1e9, available / 1e9)
    return False


def host_memory(num_bytes: int, pinned: bool = True) -> HostMemory:
    """Return zeroed host memory, pinned if a CUDA device exists, so that copies to it need no staging."""
    if not pinned or not nvidia_driver():
        return np.zeros(num_bytes, np.uint8)
    import torch

    block = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    memory: HostMemory = block.numpy()
    return memory


def nvidia_driver() -> str:
    """The version of the NVIDIA driver, `unknown` if it does not say, and "" if there is none."""
    try:
        words = DRIVER_FILE.read_text(encoding="utf-8").splitlines()[0].split()
        return next((word for word in words if word[0].isdigit()), "unknown")
    except (OSError, IndexError):
        return "unknown" if any(path.exists() for path in DRIVER_DEVICES) else ""
