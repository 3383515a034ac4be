"""What this machine offers a process: cores and host memory that a GPU can read directly.

Knows no corpus, model or pipeline. PyTorch is imported only when memory is pinned, because preparing a corpus
needs neither it nor the second it takes to load.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

HostMemory = npt.NDArray[np.uint8]
_CGROUP_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Cores this process may really use: its affinity, cut by the quota of a container."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP_CPU_LIMIT.read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup, or "max": no quota
        return cores


def host_memory(num_bytes: int) -> HostMemory:
    """Zeroed host memory; pinned where a CUDA device exists, so that copies to it need no staging."""
    if not _has_nvidia_driver():
        return np.zeros(num_bytes, np.uint8)
    import torch

    pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    memory: HostMemory = pinned.numpy()
    return memory


def _has_nvidia_driver() -> bool:
    places = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")  # the last under WSL
    return any(Path(place).exists() for place in places)
