"""How many batches wait where: what the user asked for, or what workers and memory suggest."""

from __future__ import annotations

import pytest
import torch
from pipeline_fixtures import CPU, Stamps

from myxtts.config import DataSettings
from myxtts.devices import Plan
from myxtts.errors import ConfigError
from myxtts.pipeline import feed
from myxtts.pipeline.feed import Depths, choose_depths

MB = 2**20
GPU = torch.device("cuda", 0)
"""Only its name is used: how much memory it has is given as its cap."""


def depths_for(
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, object] | None = None,
    *,
    cores: int = 8,
    host_mb: int = 64_000,
    gpu_mb: int | None = 24_000,
    **others: object,
) -> Depths:
    monkeypatch.setattr(feed, "usable_cores", lambda: cores)
    monkeypatch.setattr(feed, "available_bytes", lambda: host_mb * MB)
    settings = asked or {}
    data = DataSettings(batch_size=16, **settings, **others)
    plan = Plan(CPU, CPU) if gpu_mb is None else Plan(GPU, GPU, "buffered", gpu_mb, gpu_mb)
    return choose_depths(data, plan, Stamps(data).outputs)


def test_numbers_that_the_user_gives_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"prefetch_buffer_size": 7, "pipeline_buffer_size": 30}
    assert depths_for(monkeypatch, both, cores=1) == Depths(host=7, model=23, gatherers=1)
    assert depths_for(monkeypatch, both, gpu_mb=None)[:2] == (7, 23)
    both = {"prefetch_buffer_size": 40, "pipeline_buffer_size": 30}
    assert depths_for(monkeypatch, both) == Depths(host=40, model=3, gatherers=4)
    assert depths_for(monkeypatch, {"prefetch_buffer_size": 11}).host == 11
    assert sum(depths_for(monkeypatch, {"pipeline_buffer_size": 100})[:2]) == 100
    assert depths_for(monkeypatch, {"pipeline_buffer_size": 1}) == Depths(host=1, model=3, gatherers=4)


def test_what_does_not_fit_the_gpu_waits_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    depths = depths_for(monkeypatch, {"pipeline_buffer_size": 100}, gpu_mb=2000)
    assert depths.host + depths.model == 100
    assert depths.model == int(0.05 * 2000 * MB // Stamps(DataSettings(batch_size=16)).outputs.num_bytes)


def test_defaults_follow_the_workers_and_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = depths_for(monkeypatch)
    assert roomy == Depths(host=8, model=42, gatherers=4)
    assert depths_for(monkeypatch, num_workers=1) == Depths(4, 46, 1)
    assert depths_for(monkeypatch, cores=2).gatherers == 2
    assert depths_for(monkeypatch, native_loading=False, cores=12).gatherers == 12
    assert depths_for(monkeypatch, native_loading=False, num_workers=6, cores=12) == Depths(12, 38, 6)
    assert depths_for(monkeypatch, host_mb=300).host < roomy.host
    assert depths_for(monkeypatch, gpu_mb=1000).model < roomy.model
    assert depths_for(monkeypatch, gpu_mb=256).model == 3  # one being filled, one ready, one in use


def test_on_the_cpu_few_batches_are_made_ahead_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert depths_for(monkeypatch, gpu_mb=None) == Depths(host=3, model=3, gatherers=4)


def test_buffers_larger_than_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"(?s)2000 MB are available.*at most \d+ are possible.*--buffer-size"):
        depths_for(monkeypatch, {"prefetch_buffer_size": 500}, host_mb=2000)
    with pytest.raises(ConfigError, match="--prefetch-buffer-size"):
        depths_for(monkeypatch, {"pipeline_buffer_size": 5000}, host_mb=2000)
