"""Building blocks shared by the networks: linear layers in their stored shapes, and operations on packed rows.

A packed tensor holds sequences of different lengths one after the other, without padding between them: a tensor
[rows, …] and `offsets`, int32 [segments + 1], where segment i is rows offsets[i]:offsets[i + 1]. Every row belongs
to a segment, including the rows after the last sequence (see `cover`): attention kernels leave rows outside all
segments uninitialised, and one NaN there times a gradient of zero is a NaN in every weight. This module does not
know text, codes or mels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class InOutLinear(nn.Module):
    """A linear layer whose weight is stored as [in, out], as in GPT-2's checkpoints."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_inputs, num_outputs))
        self.bias = nn.Parameter(torch.zeros(num_outputs))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class PointwiseLinear(nn.Module):
    """A linear layer whose weight is stored as [out, in, 1]: a convolution of width 1 as a matrix product.

    As convolutions over [clips, channels, frames] the conditioning encoder took four times as long.
    """

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, num_inputs, 1))
        self.bias = nn.Parameter(torch.empty(num_outputs))
        bound = num_inputs**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.squeeze(-1), self.bias)


def offsets_of(lengths: Tensor) -> Tensor:
    """Cumulative offsets, int64 [n + 1], of lengths [n]."""
    return F.pad(lengths.long().cumsum(0), (1, 0))


def segment_of(rows: Tensor, offsets: Tensor) -> Tensor:
    """Segment of each row: the number of segments that end at or before it. A binary search does not compile."""
    return (rows[:, None] >= offsets[1:]).sum(1)


def cover(offsets: Tensor, num_rows: int, longest: int) -> Tensor:
    """Offsets int32 of segments that cover all rows: the given ones, cut at `num_rows`, then the remaining rows.

    No segment is longer than `longest`, because kernels skip whatever lies beyond that length in a segment. The
    number of extra segments depends on shapes only, so most of them are usually empty.
    """
    steps = torch.arange(1, -(-num_rows // longest) + 1, device=offsets.device) * longest
    return torch.cat([offsets, offsets[-1:] + steps]).clamp(max=num_rows).int()


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, max_q: int, max_k: int, causal: bool
) -> Tensor:
    """Attention within each segment: q [rows_q, heads, head_dim], k and v [rows_k, heads, head_dim] → shape of q.

    `max_q` and `max_k` bound the segment lengths. They are Python ints, so the host does not wait for the device.
    """
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        window = (-1, 0) if causal else (-1, -1)
        from torch.nn.attention.varlen import varlen_attn  # imports the compiler, which takes seconds

        out = varlen_attn(q, k, v, offsets_q, offsets_k, max_q, max_k, window_size=window)
        assert isinstance(out, Tensor)  # a tuple only if auxiliary outputs are requested
        return out
    # Packed kernels support neither CPUs nor fp32: pad on the right, attend, pack again.
    if q.device.type == "cpu" and not torch.compiler.is_compiling():  # no device to wait for: pad only as needed
        max_q, max_k = (max(int(offsets.diff().max()), 1) for offsets in (offsets_q, offsets_k))
    index_q, _ = _unpacking(offsets_q, max_q, len(q))
    index_k, present = _unpacking(offsets_k, max_k, len(k))
    queries, keys, values = (x[index].transpose(1, 2) for x, index in ((q, index_q), (k, index_k), (v, index_k)))
    if causal:  # the padding is in the future of every real query
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    else:
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=present[:, None, None, :])
    rows = torch.arange(len(q), device=q.device)
    segments = segment_of(rows, offsets_q)
    return out.transpose(1, 2)[segments, rows - offsets_q[segments]]


def _unpacking(offsets: Tensor, longest: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Row index of every position of [segments, longest], and a mask of the positions a query may attend to."""
    places = torch.arange(longest, device=offsets.device)
    lengths = offsets.diff()[:, None]
    # Even an empty segment attends to one position: a softmax over nothing is NaN in some kernels.
    present = places < lengths.clamp(min=1)
    return (offsets[:-1, None] + places).clamp(max=num_rows - 1), present


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _rows_or_zero(x, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return _rows_or_zero(grads[0], inverse), None, None


def _rows_or_zero(x: Tensor, index: Tensor) -> Tensor:
    return torch.where((index >= 0)[:, None], x[index.clamp(min=0)], 0)


def take_rows(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Rows x[index], zeros where the index is -1; no row may be taken twice.

    `inverse` is the position of each row of x in the result, or -1. It turns the backward pass into a gather too:
    no atomic additions, and rows that were not taken get zero gradients whatever a kernel left in memory.
    """
    taken: Tensor = _TakeRows.apply(x, index, inverse)  # type: ignore[no-untyped-call]
    return taken
