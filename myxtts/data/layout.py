"""What a batch looks like in memory: named arrays in one block, the same on the host and on a device.

One block means one allocation for the life of a slot and one copy between two of them. PyTorch is not imported
here: preparing a corpus needs shapes, not tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from myxtts.data.batches import Cursor

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT_BYTES = 256
"""Where an array of a block may start: what memory of a GPU is aligned to."""


@dataclass(frozen=True)
class Field:
    """One array of a block; its dtype by the name that numpy and PyTorch share."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Layout(Mapping[str, Field]):
    """Named fields and where each of them starts in a block of `num_bytes`."""

    def __init__(self, fields: Mapping[str, Field]) -> None:
        self._fields = dict(fields)
        self._starts: dict[str, int] = {}
        end = 0
        for name, field in self._fields.items():
            self._starts[name] = end
            end += -(-field.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.num_bytes = end

    def __getitem__(self, name: str) -> Field:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def arrays(self, block: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
        """Views of a block of host memory."""
        return {
            name: block[start : start + self[name].num_bytes].view(self[name].dtype).reshape(self[name].shape)
            for name, start in self._starts.items()
        }

    def tensors(self, block: Tensor) -> dict[str, Tensor]:
        """Views of a uint8 tensor on any device."""
        import torch

        return {
            name: block[start : start + self[name].num_bytes]
            .view(getattr(torch, self[name].dtype))
            .view(self[name].shape)
            for name, start in self._starts.items()
        }


@dataclass(frozen=True)
class Sizes:
    """How much of a batch's arrays is used, known on the host; the same for all batches under static shapes."""

    tokens: int
    """Positions of the GPT's packed row."""
    ids: int
    """Longest text of a clip."""
    samples: int
    """Longest clip."""
    frames: int
    """Conditioning frames of all clips together."""
    codes: int = 0
    """Codes of all clips together, with one more for each as a gap; 0 if they have to be computed clip by clip."""


@dataclass(frozen=True)
class Batch:
    """What a recipe reads: tensors on the device of the model role, valid while the lease lasts."""

    tensors: Mapping[str, Tensor]
    sizes: Sizes
    after: Cursor
    """Where to continue once this batch has been trained on."""
