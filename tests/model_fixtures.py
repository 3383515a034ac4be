"""XTTS-v2 as published: outputs of small networks of its form, and the entries of its state dicts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from myxtts.model.gpt import GPT, GPTDims
from myxtts.model.vocoder import Generator

FIXTURES = Path(__file__).parent / "fixtures"
Entries = dict[str, tuple[str, str, str]]
"""(shape, dtype, param or buffer) by name."""


GPT_DIMS = GPTDims(layers=2, dim=64, heads=4, text_tokens=300)
"""Of the GPT in the fixture."""


def reference_of(name: str) -> Any:
    """A fixture: inputs and outputs of a published network."""

    @pytest.fixture(scope="module", name="reference")
    def load_reference() -> Any:
        return torch.load(FIXTURES / f"{name}.pt", weights_only=True)

    return load_reference


@pytest.fixture(name="model")
def gpt_model(reference: dict[str, Any]) -> GPT:
    """The GPT of the fixture."""
    model = GPT(GPT_DIMS).eval()
    model.load_state_dict(reference["state_dict"])
    return model


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """In every thread: the switch is the process's."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def write_hifigan(path: Path, channels: int) -> Generator:
    """Write a random generator of mels as HiFi-GAN's authors do, and return it; the speaker changes nothing."""
    generator = Generator(80, channels, 1)
    for layer in (generator.cond_layer, *generator.conds):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    state, endings = {}, {"original0": "weight_g", "original1": "weight_v"}
    for name, value in generator.state_dict().items():
        owner, _, last = name.replace(".parametrizations.weight", "").rpartition(".")
        if owner in ("conv_pre", "conv_post") and last == "weight":
            state[f"{owner}.weight_g"] = 2 * value.flatten(1).norm(dim=1).view(-1, 1, 1)
            state[f"{owner}.weight_v"] = value / 2
            value.mul_(2)
        elif not owner.startswith("cond"):
            state[f"{owner}.{endings.get(last, last)}"] = value
    torch.save({"generator": state | {"conv_post.bias": torch.zeros(1)}}, path)
    return generator


def error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖; shapes must agree."""
    assert found.shape == expected.shape
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).norm() / expected.norm())


def published_entries(name: str) -> Entries:
    rows = [line.split("\t") for line in (FIXTURES / f"state_dict_{name}.txt").read_text().splitlines()]
    return {row[0]: (row[1], row[2], row[3]) for row in rows if len(row) == 4}


def entries_of(model: nn.Module) -> Entries:
    parameters = dict(model.named_parameters())
    return {
        name: (str(tuple(value.shape)), str(value.dtype)[6:], "param" if name in parameters else "buffer")
        for name, value in model.state_dict().items()
    }
