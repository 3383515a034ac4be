"""How much device memory tensors have right now: the sample that shows a leak, which a peak may hide for long.

Knows neither roles nor limits. PyTorch is imported only when somebody asks.
"""

from __future__ import annotations


def allocated_mb(gpu: int) -> float:
    """Memory of the tensors that this process has on a GPU, by PyTorch's number, in MB; does not wait for it."""
    import torch

    return torch.cuda.memory_allocated(gpu) / 2**20
