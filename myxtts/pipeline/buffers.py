"""How many batches wait where: what the user asked for, or what workers and memory suggest.

`pipeline_buffer_size` batches are ready in all: encoded ones on the model role's device as far as they fit there,
the rest as gathered ones in host memory, at least `prefetch_buffer_size` of them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from myxtts.config import DataSettings
from myxtts.data.gather import host_layout
from myxtts.data.layout import Layout
from myxtts.devices import Plan
from myxtts.errors import ConfigError
from myxtts.host import available_bytes, usable_cores

MODEL_DEPTH = 3
"""The least on the model role's device: one being filled, one ready, one in use."""
DEVICE_SHARE = 0.05
"""Of a device's memory, or of its cap, that waiting batches may take; the model needs the rest."""
HOST_SHARE, HOST_SHARE_ASKED = 0.1, 0.5
"""Of the available host memory that buffers take by themselves, and that a user may ask for."""
MOST_GATHERERS = 4
"""Gathering from the packed cache is copying: more threads than this only take turns on the memory bus."""


class Depths(NamedTuple):
    """Batches that the host ring and the model ring hold, and threads that gather."""

    host: int
    model: int
    gatherers: int = 1


def choose_depths(data: DataSettings, asked: Collection[str], plan: Plan, outputs: Layout) -> Depths:
    """Depths for a front end with these outputs; `asked` names the settings that the user chose."""
    gatherers = min(data.num_workers, usable_cores())
    if data.native_loading:
        gatherers = min(gatherers, MOST_GATHERERS)
    batch_bytes, available = host_layout(data).num_bytes, available_bytes()
    if plan.model.type != "cuda" and not {"data.prefetch_buffer_size", "data.pipeline_buffer_size"} & set(asked):
        return Depths(MODEL_DEPTH, MODEL_DEPTH, gatherers)  # working ahead takes the cores that training needs
    prefetch, total = data.prefetch_buffer_size, data.pipeline_buffer_size
    if "data.prefetch_buffer_size" not in asked:
        prefetch = min(prefetch, max(2 * gatherers, 4), _fitting(HOST_SHARE * available, batch_bytes))
    if "data.pipeline_buffer_size" not in asked:
        room = prefetch + _fitting(DEVICE_SHARE * _device_bytes(plan), outputs.num_bytes)
        total = min(total, max(room, prefetch + MODEL_DEPTH))
    elif "data.prefetch_buffer_size" not in asked:
        prefetch = min(prefetch, max(total - MODEL_DEPTH, 1))
    on_device = _fitting(DEVICE_SHARE * _device_bytes(plan), outputs.num_bytes)
    model = max(MODEL_DEPTH, min(total - prefetch, on_device))
    host = max(prefetch, total - model)
    most = _fitting(HOST_SHARE_ASKED * available, batch_bytes)
    if host > most:
        raise ConfigError(
            f"{host} batches in host memory need {host * batch_bytes / 2**20:.0f} MB, and "
            f"{available / 2**20:.0f} MB are available: at most {most} are possible.\n"
            "Lower --buffer-size and --prefetch-buffer-size, or --batch-size."
        )
    return Depths(host, model, gatherers)


def _fitting(room_bytes: float, batch_bytes: int) -> int:
    return max(int(room_bytes // batch_bytes), 1)


def _device_bytes(plan: Plan) -> float:
    """Memory of the model role's device, or its cap."""
    if plan.model.type != "cuda":
        return available_bytes()
    if plan.model_cap_mb is not None:
        return plan.model_cap_mb * 2**20
    return float(torch.cuda.mem_get_info(plan.model)[1])
