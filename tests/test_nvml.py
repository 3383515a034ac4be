"""Readings of GPUs: what a driver tells, what it does not, and which GPU is which; the driver is a fake."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_fixtures import wait_for

from myxtts import cli
from myxtts.devices import Gpu, Machine
from myxtts.observe import nvml
from myxtts.observe.nvml import PCIE_EVERY, Reading, Sampler
from myxtts.reports import machine


class FakeNvml:
    """A driver with some GPUs; `silent` names the questions it does not answer, a handle is the GPU's number."""

    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self, count: int = 2, silent: tuple[str, ...] = ()) -> None:
        self.num_open = 0
        self.asked: list[str] = []
        answers: dict[str, Callable[..., Any]] = {
            "Init": lambda: self._count(1),
            "Shutdown": lambda: self._count(-1),
            "DeviceGetCount": lambda: count,
            "DeviceGetHandleByIndex": lambda number: number,
            "DeviceGetUUID": lambda handle: f"GPU-{handle}abc-def",
            "DeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=50 + handle, memory=10),
            "DeviceGetMemoryInfo": lambda _: SimpleNamespace(used=3 * 2**30, total=12 * 2**30),
            "DeviceGetPowerUsage": lambda _: 170_500,
            "DeviceGetClockInfo": lambda *_: 1800,
            "DeviceGetTemperature": lambda *_: 64,
            "DeviceGetPcieThroughput": lambda _, counter: 2048 * (1 + counter),
            "DeviceGetCurrentClocksThrottleReasons": lambda _: 0x1 | 0x4 | 0x40,
        }
        for name, answer in answers.items():
            setattr(self, f"nvml{name}", self._question(name, answer, name in silent))

    def _count(self, change: int) -> None:
        self.num_open += change

    def _question(self, name: str, answer: Callable[..., Any], is_silent: bool) -> Callable[..., Any]:
        def asked(*arguments: Any) -> Any:
            self.asked.append(name)
            if is_silent:
                raise self.NVMLError("Not Supported")
            return answer(*arguments)

        return asked


def sampler(nvml: FakeNvml, indices: list[int], **options: Any) -> Sampler:
    options = {"environment": {}, "uuids": []} | options
    return Sampler(indices, 0.001, nvml=nvml, **options)


def gpu_read(nvml: FakeNvml, index: int, **options: Any) -> int | None:
    """The driver's number of the GPU that is read as PyTorch's `index`."""
    readings = sampler(nvml, [index], **options).read()
    return round(100 * (readings[0].utilisation or 0)) - 50 if readings else None


def test_a_reading_holds_what_the_driver_tells_in_the_units_of_its_names() -> None:
    (reading,) = sampler(FakeNvml(), [1]).read()
    assert reading._replace(at_us=0) == Reading(
        at_us=0, gpu=1, utilisation=0.51, memory_used_mb=3072, memory_total_mb=12288, power_w=170.5,
        sm_clock_mhz=1800, temperature_c=64, pcie_rx_mb_s=4, pcie_tx_mb_s=2,
        throttled_by=("power cap", "hardware thermal slowdown"),
    )  # fmt: skip
    assert json.loads(json.dumps(reading._asdict()))["power_w"] == 170.5


@pytest.mark.parametrize(
    ("question", "fields"),
    [
        ("DeviceGetUtilizationRates", {"utilisation"}),
        ("DeviceGetMemoryInfo", {"memory_used_mb", "memory_total_mb"}),
        ("DeviceGetPowerUsage", {"power_w"}),
        ("DeviceGetClockInfo", {"sm_clock_mhz"}),
        ("DeviceGetTemperature", {"temperature_c"}),
        ("DeviceGetPcieThroughput", {"pcie_rx_mb_s", "pcie_tx_mb_s"}),
        ("DeviceGetCurrentClocksThrottleReasons", {"throttled_by"}),
    ],
)
def test_what_a_card_does_not_tell_is_absent_and_the_rest_is_there(question: str, fields: set[str]) -> None:
    (reading,) = sampler(FakeNvml(silent=(question,)), [0]).read()
    assert {name for name, value in reading._asdict().items() if value is None} == fields


def test_a_sampler_reads_in_the_background_until_stopped_and_can_go_on() -> None:
    nvml = FakeNvml()
    watch = sampler(nvml, [0, 1])
    assert watch.available and not watch.reason
    watch.start()
    watch.start()
    assert [thread.name for thread in threading.enumerate()].count("nvml") == 1
    wait_for(lambda: len(watch.samples()) >= 6)
    watch.stop()
    assert "nvml" not in [thread.name for thread in threading.enumerate()]
    kept = watch.samples()
    assert {reading.gpu for reading in kept} == {0, 1}
    assert [reading.at_us for reading in kept] == sorted(reading.at_us for reading in kept)
    watch.start()
    wait_for(lambda: len(watch.samples()) > len(kept))
    watch.close()
    watch.close()
    assert nvml.num_open == 0
    assert len(watch.samples()) > len(kept), "readings outlive the sampler"


def test_traffic_is_asked_seldom_and_only_the_latest_readings_are_kept() -> None:
    nvml = FakeNvml()
    with sampler(nvml, [0]) as watch:
        wait_for(lambda: len(watch.samples()) > 2 * PCIE_EVERY)
        first = watch.samples()[: PCIE_EVERY + 1]
    told = [number for number, reading in enumerate(first) if reading.pcie_rx_mb_s is not None]
    assert told == [0, PCIE_EVERY], "the answer takes long"
    with sampler(nvml, [0], limit=5) as watch:
        wait_for(lambda: nvml.asked.count("DeviceGetPowerUsage") > 20 + 2 * PCIE_EVERY)
        assert len(watch.samples()) == 5


def test_without_a_driver_or_its_library_there_are_no_readings_and_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with sampler(FakeNvml(silent=("Init",)), [0]) as watch:
        assert not watch.available and "driver" in watch.reason
        assert watch.read() == [] and watch.samples() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Sampler([0]) as watch:
        assert not watch.available and "pip install nvidia-ml-py" in watch.reason


def test_a_gpu_that_is_not_there_is_named_and_the_others_are_read() -> None:
    watch = sampler(FakeNvml(count=1), [0, 3])
    assert watch.available and "GPU 3" in watch.reason
    assert [reading.gpu for reading in watch.read()] == [0]


@pytest.mark.parametrize(
    ("visible", "index", "expected"),
    [
        (None, 1, 1),
        ("2,0", 0, 2),
        ("2,0", 1, 0),
        (" 3 , 1 ", 1, 1),
        ("GPU-3abc-def", 0, 3),
        ("GPU-3ab,1", 0, 3),
        ("GPU-3ab,1", 1, 1),
        ("0,7,1", 0, 0),
        ("0,7,1", 1, None),
        ("-1", 0, None),
        ("", 0, None),
        ("MIG-3abc", 0, None),
    ],
)
def test_gpus_are_counted_as_cuda_counts_the_visible_ones(
    visible: str | None, index: int, expected: int | None
) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_read(FakeNvml(count=4), index, environment=environment) == expected


def test_the_uuids_of_pytorch_win_over_any_order() -> None:
    environment, swapped = {"CUDA_VISIBLE_DEVICES": "0,1"}, ["1ABC-def", "0abc-def"]
    for index, uuids, expected in ((0, swapped, 1), (1, swapped, 0), (0, ["9abc"], None)):
        assert gpu_read(FakeNvml(), index, environment=environment, uuids=uuids) == expected


def test_watch_counts_the_gpus_as_its_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run sees the second and third card, the fastest first; another process counts all by their slots."""
    read = cli._gpu_readings(tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(count=4))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert len(read()) == 4, "before the run has begun nothing better is known"
    for damaged in ("", "[]", "{"):
        (tmp_path / "machine.json").write_text(damaged)
        assert nvml.gpus_of_run(tmp_path) == ()
    gpus = [Gpu(0, "Fast", 24000, 82, "2abc-def"), Gpu(1, "Slow", 8000, 46, "1abc-def")]
    monkeypatch.setattr(Machine, "look", classmethod(lambda cls: cls(gpus)))
    (tmp_path / "machine.json").write_text(json.dumps(machine()))
    utilisation = {reading["gpu"]: reading["utilisation"] for reading in read()}
    assert utilisation == {0: 0.52, 1: 0.51}, "the driver's third card is the first of the run"


def test_a_gpu_lost_while_reading_ends_neither_thread_nor_program() -> None:
    nvml = FakeNvml()
    with sampler(nvml, [0]) as watch:
        wait_for(lambda: len(watch.samples()) >= 1)
        nvml.nvmlDeviceGetUtilizationRates = nvml._question("lost", lambda _: None, True)  # type: ignore[attr-defined]
        wait_for(lambda: watch.samples()[-1].utilisation is None)
        assert watch.samples()[0].utilisation == 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_driver_tells_of_the_gpu_that_pytorch_uses() -> None:
    taken = torch.zeros(2**28, dtype=torch.uint8, device="cuda:0")
    with Sampler([0], 0.01) as watch:
        wait_for(lambda: len(watch.samples()) >= 3)
        reading = watch.samples()[-1]
        assert watch.available, watch.reason
    assert reading.memory_used_mb is not None and reading.memory_used_mb >= taken.numel() / 2**20
    total_mb = torch.cuda.get_device_properties(0).total_memory / 2**20
    assert reading.memory_total_mb == pytest.approx(total_mb, rel=0.05)
