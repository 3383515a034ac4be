"""Plans: which device does what, what stops a run before it starts, and what is said when memory runs out."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from myxtts.config import DataSettings, Settings, TrainingSettings
from myxtts.devices import (
    Event,
    Gpu,
    Machine,
    Plan,
    Stream,
    announcements,
    as_flag,
    device_named,
    explain_out_of_memory,
    make_plan,
)
from myxtts.errors import ConfigError, DatasetError, PipelineError
from myxtts.host import may_pin
from myxtts.run import train

CPU = torch.device("cpu")
CAPS = {"data_gpu_memory": 90000, "model_gpu_memory": 9000}
ISOLATED = {"enable_memory_isolation": True}
ONE_GPU = DataSettings()


def cuda(index: int) -> torch.device:
    return torch.device("cuda", index)


def machine(num_gpus: int, memory_mb: int = 24000, *, peers: bool = False) -> Machine:
    pairs = {(a, b) for a in range(num_gpus) for b in range(num_gpus) if a != b}
    return Machine([Gpu(i, f"Card {i}", memory_mb) for i in range(num_gpus)], frozenset(pairs if peers else ()))


def torchrun(rank: int, world_size: int, local_rank: int, local_world_size: int) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return dict(zip(names, map(str, (rank, world_size, local_rank, local_world_size)), strict=True))


def roles(data: int, model: int) -> dict[str, Any]:
    return {"data_gpu": data, "model_gpu": model}


def problems(machine: Machine, environment: dict[str, str] | None = None, **settings: Any) -> str:
    spelling = settings.pop("spelling", as_flag)
    with pytest.raises(ConfigError) as caught:
        make_plan(DataSettings(**settings), machine, environment or {}, spelling)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "num_gpus", "environment", "plan"),
    [
        pytest.param({}, 0, {}, Plan(CPU, CPU), id="without a GPU both roles are on the CPU"),
        pytest.param({}, 4, {}, Plan(cuda(0), cuda(0), "buffered"), id="both roles share the first GPU"),
        pytest.param(roles(1, 3), 4, {}, Plan(cuda(1), cuda(3), "dual"), id="as the flags say"),
        pytest.param({}, 2, torchrun(3, 4, 1, 2), Plan(cuda(1), cuda(1), rank=3, world_size=4), id="one GPU each"),
        pytest.param(
            roles(1, 0), 4, torchrun(1, 2, 1, 2), Plan(cuda(3), cuda(2), "dual", rank=1, world_size=2),
            id="two GPUs per process",
        ),
        pytest.param({}, 0, torchrun(1, 2, 1, 2), Plan(CPU, CPU, rank=1, world_size=2), id="they share a CPU"),
        pytest.param(
            {}, 1, {"RANK": "0", "WORLD_SIZE": "1"}, Plan(cuda(0), cuda(0)),
            id="a single process needs no local rank",
        ),
        pytest.param(
            roles(0, 1) | CAPS, 2, {}, Plan(cuda(0), cuda(1), "dual"), id="without isolation there are no caps"
        ),
        pytest.param(
            roles(0, 1) | CAPS | ISOLATED | {"data_gpu_memory": 4096}, 2, {},
            Plan(cuda(0), cuda(1), "dual", data_cap_mb=4096, model_cap_mb=9000),
            id="each role has its cap",
        ),
        pytest.param(
            CAPS | ISOLATED, 1, {}, Plan(cuda(0), cuda(0), data_cap_mb=9000, model_cap_mb=9000),
            id="roles that share a GPU share the cap of the model",
        ),
        pytest.param(
            roles(0, 1) | ISOLATED | {"model_gpu_memory": 9000}, 2, {},
            Plan(cuda(0), cuda(1), "dual", data_cap_mb=22976, model_cap_mb=9000),
            id="a cap that is not given follows the card",
        ),
    ],
)  # fmt: skip
def test_plans(settings: dict[str, Any], num_gpus: int, environment: dict[str, str], plan: Plan) -> None:
    assert make_plan(DataSettings(**settings), machine(num_gpus), environment) == plan


def test_the_environment_of_this_process_counts_unless_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in torchrun(1, 2, 1, 2).items():
        monkeypatch.setenv(name, value)
    assert make_plan(DataSettings(), machine(2)).model == cuda(1)
    assert make_plan(DataSettings(), machine(2), {}).model == cuda(0)


DROP = "drop --data-gpu and --model-gpu"
BOTH_CARDS = ("0: Card 0", "1: Card 1")
HIDDEN = "CUDA_VISIBLE_DEVICES"
TOO_MANY = ("3 processes on this machine, one GPU each, lack GPU 2.", "1: Card 1", "--nproc-per-node")
TOO_MANY_PAIRS = ("2 processes on this machine, two GPUs each, lack GPU 3.", "--nproc-per-node", DROP)
NO_PLACE = ("LOCAL_WORLD_SIZE", "torchrun")


@pytest.mark.parametrize(
    ("num_gpus", "environment", "settings", "parts"),
    [
        (2, {}, {"data_gpu": 1}, ["--data-gpu is given without --model-gpu", *BOTH_CARDS, "drop --data-gpu to"]),
        (2, {}, {"model_gpu": 1}, ["--model-gpu is given without --data-gpu", *BOTH_CARDS]),
        (
            2,
            {},
            {"data_gpu": 1, "spelling": str},
            ["data.data_gpu is given without data.model_gpu", "drop data.d"],
        ),
        (2, {}, {**roles(1, 1), "spelling": str}, ["drop data.data_gpu and data.model_gpu", *BOTH_CARDS]),
        (2, {}, roles(1, 1), ["both 1", *BOTH_CARDS, DROP]),
        (0, {}, roles(0, 1), ["Insufficient GPUs: Multi-GPU requires at least 2 GPUs", "found: none", DROP]),
        (1, {}, roles(0, 1), ["Multi-GPU requires at least 2 GPUs", "GPUs found: 0: Card 0, 24000 MB", DROP]),
        (2, {}, roles(0, 5), ["no GPU 5.", *BOTH_CARDS, DROP]),
        (2, {HIDDEN: "2,3"}, roles(2, 3), ["no GPU 2, 3.", *BOTH_CARDS, f"{HIDDEN}=2,3 hides any others"]),
        (0, {HIDDEN: ""}, roles(0, 1), [f"{HIDDEN}= hides"]),
        *[(2, torchrun(rank, 3, rank, 3), {}, TOO_MANY) for rank in range(3)],
        *[(3, torchrun(rank, 2, rank, 2), roles(0, 1), TOO_MANY_PAIRS) for rank in range(2)],
        (6, torchrun(0, 2, 0, 2), roles(0, 2), ["share", "such as 0 and 1"]),
        (8, {"RANK": "1", "WORLD_SIZE": "2"}, {}, ["RANK=1", *NO_PLACE]),
        (8, torchrun(1, 2, 1, 2) | {"RANK": "one"}, {}, ["RANK=one", *NO_PLACE]),
        (8, torchrun(2, 2, 0, 2), {}, ["RANK=2", *NO_PLACE]),
        (8, torchrun(1, 2, 2, 2), {}, ["RANK=1", *NO_PLACE]),
    ],
)
def test_what_cannot_be_planned_is_an_error_that_says_why_and_what_to_do(
    num_gpus: int, environment: dict[str, str], settings: dict[str, int], parts: Sequence[str]
) -> None:
    text = problems(machine(num_gpus), environment, **settings)
    assert text.startswith("1 problem") and [part for part in parts if part not in text] == []
    assert (HIDDEN in text) == (HIDDEN in environment)


def test_all_problems_are_reported_at_once() -> None:
    caps = {"data_gpu_memory": 8192, "model_gpu_memory": 16384}
    text = problems(machine(2, memory_mb=8000), {"RANK": "x"}, **roles(1, 1), **ISOLATED, **caps)
    assert text.startswith("4 problems")
    for part in ("RANK=x", "both 1", "--data-gpu-memory 8192", "--model-gpu-memory 16384"):
        assert part in text
    for given in ("data_gpu", "model_gpu"):
        assert "no GPU 7." in problems(machine(2), **{given: 7})


@pytest.mark.parametrize("memory_gb", [8, 12, 16, 24, 40, 80])
@pytest.mark.parametrize("settings", [{}, roles(0, 1)], ids=["shared", "dual"])
def test_default_caps_fit_every_card_and_too_large_ones_are_refused_with_numbers(
    memory_gb: int, settings: dict[str, Any]
) -> None:
    cards = machine(2, memory_mb=1024 * memory_gb)
    plan = make_plan(DataSettings(**settings, **ISOLATED), cards, {})
    assert plan.data_cap_mb == plan.model_cap_mb == 1024 * memory_gb - 1024
    limit = 1024 * memory_gb - 512
    make_plan(DataSettings(**settings, **ISOLATED, model_gpu_memory=limit), cards, {})
    text = problems(cards, **settings, **ISOLATED, model_gpu_memory=limit + 1)
    card = f"GPU {len(settings) // 2}: Card {len(settings) // 2}, {1024 * memory_gb} MB"
    for part in (f"--model-gpu-memory {limit + 1}", card, "CUDA context", f"at most {limit}, or leave it out"):
        assert part in text
    assert "--data-gpu-memory" not in text


@pytest.mark.parametrize("fixed", [True, False])
def test_train_applies_the_caps_and_determinism(
    fixed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(*_: object) -> None:
        assert torch.backends.cudnn.deterministic == torch.are_deterministic_algorithms_enabled() == fixed
        assert (os.environ.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8") == fixed
        raise DatasetError("far enough")

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    plan = Plan(cuda(0), cuda(1), "dual", data_cap_mb=4000, model_cap_mb=8000)
    applied, current = Mock(), Mock()
    monkeypatch.setattr(torch.cuda, "set_device", current)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Mock(return_value=Mock(total_memory=16000 * 2**20)))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", applied)
    monkeypatch.setattr("myxtts.run.make_plan", Mock(return_value=plan))
    monkeypatch.setattr("myxtts.run.prepare_corpus", stop)
    with pytest.raises(DatasetError, match="far enough"):
        train(Settings(training=TrainingSettings(checkpoint_dir=tmp_path / "run", deterministic=fixed)))
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic
    assert applied.call_args_list == [call(0.25, cuda(0)), call(0.5, cuda(1))]
    assert current.call_args_list == [call(cuda(1))], "the main thread opens no context on the first GPU"


@pytest.mark.parametrize(("free_gb", "pinned"), [(64, True), (16, False)])
def test_copies_are_pinned_only_while_host_memory_is_plentiful(
    free_gb: int, pinned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("myxtts.host.available_bytes", lambda: free_gb * 10**9)
    caplog.set_level(logging.INFO)
    assert may_pin(5 * 10**9, "Copies") is pinned
    assert ("Copies take 5.0 GB of host memory, with 16.0 GB free" in caplog.text) is not pinned


def test_the_machine_is_what_pytorch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    facts = {"multi_processor_count": 82, "uuid": "1-2"}
    cards = [
        SimpleNamespace(name=f"Card {index}", total_memory=24000 * 2**20 + index, **facts) for index in range(2)
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) == (0, 1))
    seen = Machine.look()
    known = [Gpu(index, f"Card {index}", 24000, 82, "1-2") for index in range(2)]
    assert seen == Machine(known, frozenset({(0, 1)}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not Machine.look().gpus


@pytest.mark.parametrize(
    ("cards", "roles"),
    [
        ([(24000, 82), (24000, 82)], (0, 1)),
        ([(24000, 82), (24000, 82), (24000, 82), (24000, 82)], (0, 1)),
        ([(24000, 82), (8000, 46)], (1, 0)),
        ([(8000, 46), (24000, 82)], (0, 1)),
        ([(24000, 128), (24000, 82)], (1, 0)),
        ([(24000, 82), (24000, 82), (8000, 46)], (2, 0)),
    ],
)
def test_the_strongest_card_trains_and_the_weakest_prepares(
    cards: list[tuple[int, int]], roles: tuple[int, int]
) -> None:
    assert Machine([Gpu(index, "Card", *card) for index, card in enumerate(cards)]).roles == roles


def test_a_device_is_named_by_the_words_of_pytorch() -> None:
    assert device_named(None, machine(0)) == device_named("cpu", machine(2)) == CPU
    assert device_named(None, machine(2)) == device_named("cuda", machine(2)) == cuda(0)
    assert device_named("cuda:1", machine(2)) == cuda(1) == device_named(cuda(1), machine(0))
    for name, found in (("cuda:2", "cuda:0: Card 0"), ("gpu1", "Found: cuda:0"), ("cuda:", "no such device")):
        with pytest.raises(ConfigError, match=found):
            device_named(name, machine(2))
    with pytest.raises(ConfigError, match="Found: no GPU; or give --device cpu"):
        device_named("cuda", machine(0))


def test_buffered_mode_is_announced_with_one_cap_for_both_roles() -> None:
    plan = make_plan(ONE_GPU, machine(1), {})
    expected = [
        "Intelligent GPU Pipeline: Single-GPU Buffered Mode",
        "Data GPU: cuda:0 (Card 0, 24000 MB)",
        "Model GPU: cuda:0 (Card 0, 24000 MB)",
        "Model placed on cuda:0 (Card 0, 24000 MB)",
        "Native loading: on, batches are gathered from the packed cache",
    ]
    assert announcements(plan, ONE_GPU, machine(1)) == expected
    isolated = DataSettings(**ISOLATED, native_loading=False)
    loading, cap = announcements(make_plan(isolated, machine(1), {}), isolated, machine(1))[4:]
    assert loading == "Native loading: off, audio files are decoded for every batch"
    for part in ("22976 MB on cuda:0", "both roles together", "data_gpu_memory has no effect", "CUDA context"):
        assert part in cap


def test_dual_mode_is_announced_with_caps_rank_and_the_way_of_copies() -> None:
    data = DataSettings(**roles(0, 1), **ISOLATED)
    plan = make_plan(data, machine(4), torchrun(1, 2, 1, 2))
    lines = announcements(plan, data, machine(4, peers=True))
    assert lines == [
        "Intelligent GPU Pipeline: Multi-GPU Mode",
        "Data GPU: cuda:2 (Card 2, 24000 MB)",
        "Model GPU: cuda:3 (Card 3, 24000 MB)",
        "Model placed on cuda:3 (Card 3, 24000 MB)",
        "Native loading: on, batches are gathered from the packed cache",
        "Memory caps: data 22976 MB on cuda:2, model 22976 MB on cuda:3; the CUDA context, about 512 MB, comes on "
        "top of each",
        "Multi-GPU configuration completed successfully",
        "Copies from cuda:2 to cuda:3: direct (peer access)",
        "Rank 1 of 2",
    ]
    assert any("through host memory, slower" in line for line in announcements(plan, data, machine(4)))


def test_the_cpu_is_announced_as_slow_and_without_caps() -> None:
    isolated = DataSettings(**ISOLATED)
    lines = announcements(make_plan(isolated, machine(0), {}), isolated, machine(0))
    assert lines[0] == "No GPU was found: data and model share the CPU, and training is slow"
    assert not any("GPU Pipeline" in line for line in lines) and "Model placed on cpu" in lines
    assert any("Memory isolation has no effect on the CPU" in line for line in lines)
    without = announcements(make_plan(ONE_GPU, machine(0), {}), ONE_GPU, machine(0))
    assert not any("isolation" in line for line in without)


def measured(monkeypatch: pytest.MonkeyPatch, *, free_mb: int) -> torch.OutOfMemoryError:
    """An error on a card with 15000 MB reserved of 24000."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free_mb * 2**20, 24000 * 2**20))
    numbers = {"memory_allocated": 14000, "memory_reserved": 15000, "max_memory_allocated": 14800}
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _device, number=number: number * 2**20)
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity ...")


def test_running_out_of_memory_names_role_device_cap_numbers_and_what_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = measured(monkeypatch, free_mb=8000)
    plan = Plan(cuda(0), cuda(1), "dual", data_cap_mb=16000, model_cap_mb=16384)
    explained = explain_out_of_memory(plan, error, "model", "computing gradients")
    assert isinstance(explained, PipelineError) and explained.__cause__ is error
    text, *advice = str(explained).split("\n  - ")
    assert "The model role ran out of memory on cuda:1 while computing gradients" in text
    for part in (
        "2.00 GiB",
        "14000 MB allocated",
        "14800 MB",
        "15000 MB reserved",
        "16384 MB (--model-gpu-memory)",
    ):
        assert part in text
    assert "--model-gpu-memory above 16384" in advice[0]
    assert "--batch-size" in advice[1] and "--grad-accum" in advice[1]
    assert "--gradient-checkpointing" in advice[2] and "--lora-rank" in advice[2]
    assert len(advice) == 3

    text, *advice = str(explain_out_of_memory(plan, error, "data", "encoding a batch")).split("\n  - ")
    assert "data role" in text and "cuda:0" in text and "16000 MB (--data-gpu-memory)" in text
    assert "--data-gpu-memory above 16000" in advice[0] and "--buffer-size" in advice[1]
    assert not any("--gradient-checkpointing" in line for line in advice)


def test_a_higher_cap_is_advised_only_when_the_cap_was_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Plan(cuda(0), cuda(0), data_cap_mb=20000, model_cap_mb=20000)
    full_card = str(explain_out_of_memory(shared, measured(monkeypatch, free_mb=500), "data", "encoding"))
    assert "20000 MB (--model-gpu-memory, for both roles together)" in full_card
    assert "higher cap" not in full_card and full_card.count("\n  - ") == 3
    full_cap = str(explain_out_of_memory(shared, measured(monkeypatch, free_mb=8000), "data", "encoding"))
    assert "--model-gpu-memory above 20000" in full_cap and full_cap.count("\n  - ") == 3
    no_cap = Plan(cuda(0), cuda(0))
    assert "cap" not in str(explain_out_of_memory(no_cap, measured(monkeypatch, free_mb=500), "model", "training"))


@pytest.mark.gpu
def test_a_stream_that_waits_for_an_event_sees_what_was_written_before_it() -> None:
    device = cuda(0)
    writer, reader, event = Stream(device), Stream(device, high_priority=True), Event(device)
    source = torch.zeros(1024, device=device)
    unordered, ordered = torch.empty_like(source), torch.empty_like(source)
    torch.cuda.synchronize(device)
    with writer.use():
        torch.cuda._sleep(300_000_000)
        source.fill_(7)
    writer.record(event)
    with reader.use():
        unordered.copy_(source)
        reader.wait(event)
        ordered.copy_(source)
    writer_was_busy = not event.is_passed  # the host did not wait
    reader.finish()
    assert writer_was_busy
    assert unordered.eq(0).all() and ordered.eq(7).all()
