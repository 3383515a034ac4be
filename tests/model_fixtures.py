"""XTTS-v2 as published: outputs of small networks of its form, and the entries of its state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FIXTURES = Path(__file__).parent / "fixtures"
Entries = dict[str, tuple[str, str, str]]
"""(shape, dtype, param or buffer) by name."""


def load_reference(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(FIXTURES / f"{name}.pt", weights_only=True)
    return loaded


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
