"""One training step of the GPT on a GPU: clips per second, MFU, memory, compilation time.

`python benchmarks/model.py` measures `normal` at several batch sizes and every size at one, eager and compiled;
`--quick` only `normal` with 64 clips. Lengths are LJSpeech's. Forward, backward and AdamW; bf16 autocast.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from harness import LiveTable, clip_seconds, console, machine
from torch import Tensor

from myxtts.config import CONDITIONING_TOKENS, HOP_SAMPLES, SAMPLE_RATE
from myxtts.data.order import Batches, Cursor
from myxtts.model.conditioning import pack_frames
from myxtts.model.gpt import GPT, GPTDims, Losses, pack, packed_length
from myxtts.model.xtts import SIZES
from myxtts.training.recipes import GptRecipe

MAX_IDS, MAX_CODES, MAX_FRAMES = 200, 218, 517
MODES = ("regions", "compiled", "eager")
"""Each kind of layer compiled once, as training does; everything compiled as one graph; not compiled."""
NUM_BATCHES = 4
"""Different batches in turn, so that a recompilation for new lengths would show."""


class Batch(NamedTuple):
    """A batch as the model role receives it: padded ids and codes, packed conditioning mels, and lengths."""

    ids: Tensor
    num_ids: Tensor
    codes: Tensor
    num_codes: Tensor
    mel: Tensor
    num_frames: Tensor


def speech(num_clips: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of text tokens, codes and conditioning frames of clips as long as LJSpeech's."""
    random = np.random.default_rng(seed)
    seconds = clip_seconds(random, num_clips)
    num_ids = (seconds * 7.5 * random.uniform(0.8, 1.2, num_clips)).astype(np.int64).clip(4, MAX_IDS)
    frames = seconds * SAMPLE_RATE // HOP_SAMPLES + 1
    crop = random.uniform(3, 6, num_clips) * SAMPLE_RATE // HOP_SAMPLES
    crop = np.where(crop < frames, crop, frames // 2).astype(np.int64).clip(1, MAX_FRAMES)
    return num_ids, np.ceil(frames / 4).astype(np.int64), crop


def make_batches(dims: GPTDims, batch_size: int) -> tuple[list[Batch], int, float]:
    """Return batches as `data.batches` makes them, their token budget, and the mean FLOPs of a step."""
    num_ids, num_codes, num_frames = speech(max(2000, 8 * batch_size))
    plans = Batches(packed_length(num_ids, num_codes), batch_size, seed=1)
    chosen = [plan.clips for plan, _ in zip(plans.plans(Cursor()), range(NUM_BATCHES), strict=False)]
    most_frames = max(int(num_frames[clips].sum()) for clips in chosen)
    frame_budget = math.ceil(most_frames / 64) * 64
    batches, flops = [], []
    for clips in chosen:
        counts = [torch.tensor(values[clips], device="cuda") for values in (num_ids, num_codes, num_frames)]
        batches.append(
            Batch(
                torch.randint(3, 255, (batch_size, MAX_IDS), device="cuda", dtype=torch.int32),
                counts[0].int(),
                torch.randint(0, dims.num_codes, (batch_size, MAX_CODES), device="cuda", dtype=torch.int32),
                counts[1].int(),
                torch.randn(frame_budget, dims.mel_channels, device="cuda"),
                counts[2].int(),
            )
        )
        flops.append(step_flops(dims, num_ids[clips], num_codes[clips], num_frames[clips]))
    return batches, plans.budget, statistics.mean(flops)


def step_flops(dims: GPTDims, num_ids: np.ndarray, num_codes: np.ndarray, num_frames: np.ndarray) -> float:
    """Useful FLOPs of forward and backward: no padding, causal attention counted as half."""
    d, tokens = dims.dim, packed_length(num_ids, num_codes).astype(np.float64)
    stack = dims.layers * (24 * d * d * tokens.sum() + 2 * d * np.square(tokens).sum())
    heads = 2 * d * (dims.text_tokens * (num_ids + 1).sum() + dims.audio_tokens * (num_codes + 4).sum())
    frames = num_frames.astype(np.float64)
    encoder = dims.encoder_layers * (8 * d * d * frames.sum() + 4 * d * np.square(frames).sum())
    inner = dims.perceiver_heads * dims.perceiver_head_dim
    latents = CONDITIONING_TOKENS * len(num_ids)
    keys = 4 * d * inner * (frames + CONDITIONING_TOKENS).sum()
    perceiver = dims.perceiver_depth * (keys + latents * (4 * d * inner + 2 * d * 8190))
    return float(3 * (stack + heads + encoder + perceiver))


def step_of(model: GPT, budget: int) -> Callable[..., Tensor]:
    """Return a function that packs a batch and computes its loss."""

    def loss(batch: Batch) -> Tensor:
        frames = pack_frames(batch.mel, batch.num_frames, MAX_FRAMES)
        packed = pack(model.dims, frames, batch.ids, batch.num_ids, batch.codes, batch.num_codes, budget=budget)
        losses: Losses = model(packed)
        return 0.01 * losses.text + losses.audio

    return loss


def measure(size: str, batch_size: int, mode: str, peak: float, steps: int = 24) -> list[str]:
    """Return the row of a case: speed, variation, MFU against `peak` TFLOP/s, memory, time of the first steps."""
    dims = SIZES[size].gpt
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = GPT(dims).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batches, budget, flops = make_batches(dims, batch_size)
    loss_of = step_of(model, budget)
    if mode == "compiled":
        loss_of = torch.compile(loss_of, fullgraph=True, dynamic=False)
    elif mode == "regions":
        for region in GptRecipe(model).regions():
            region.compile(fullgraph=True, dynamic=False)

    def step(number: int) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(batches[number % NUM_BATCHES])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    started_at = time.perf_counter()
    for number in range(NUM_BATCHES + 1):
        step(number)
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - started_at
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.cuda.set_sync_debug_mode("error")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for number in range(steps):
        step(number)
        events[number + 1].record()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    times = [first.elapsed_time(second) for first, second in pairwise(events)]
    step_ms = statistics.median(times)
    tflops = flops / step_ms / 1e9
    variation = statistics.stdev(times) / statistics.mean(times)
    cells = (f"{batch_size / step_ms * 1000:,.0f}", f"{step_ms:.1f}", f"{variation:.1%}", f"{tflops:.0f}")
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}"
    recompiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    return [*cells, f"{tflops / peak:.1%}", memory, f"{compile_s:.0f}", str(recompiled)]


def conditioning_ms(size: str, batch_size: int) -> float:
    """Forward and backward of the conditioning encoder and resampler alone, compiled."""
    dims = SIZES[size].gpt
    torch._dynamo.reset()
    model = GPT(dims).cuda()
    batches, _, _ = make_batches(dims, batch_size)

    @torch.compile(fullgraph=True, dynamic=False)
    def condition(batch: Batch) -> Tensor:
        return model.condition(pack_frames(batch.mel, batch.num_frames, MAX_FRAMES)).float().square().sum()

    def forward_and_backward(number: int) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = condition(batches[number % NUM_BATCHES])
        loss.backward()

    return median_ms(forward_and_backward, warm_up=4, count=8)


def matmul_tflops() -> float:
    """TFLOP/s of a large bf16 matmul on random data: the denominator of MFU."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / median_ms(lambda _: a @ b, warm_up=3, count=10) / 1e9


def median_ms(work: Callable[[int], object], warm_up: int, count: int) -> float:
    """Median device time of a call, after some that do not count."""
    times = []
    for number in range(warm_up + count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work(number)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[warm_up:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only `normal`, 64 clips")
    parser.add_argument("--case", action="append", metavar="SIZE:CLIPS:MODE", help="such as tiny:64:eager")
    options = parser.parse_args()
    peak = matmul_tflops()
    console.print(f"{machine()}, bf16 matmul {peak:.0f} TFLOP/s")
    columns = ("clips/s", "step ms", "CV", "TFLOP/s", "MFU", "GiB", "first steps s", "recompiled")
    table = LiveTable(
        "one training step of the GPT, LJSpeech-like lengths", "size", "clips", "", *columns, left=[""]
    )
    cases = [("normal", 64, mode) for mode in MODES]
    if options.case:
        named = [case.split(":") for case in options.case]
        cases = [(size, int(count), mode) for size, count, mode in named if mode in MODES]
        if len(cases) < len(named):
            parser.error(f"MODE is one of {', '.join(MODES)}")
    elif not options.quick:
        cases += [("normal", count, mode) for count in (16, 32, 128) for mode in ("regions", "eager")]
        others = [(size, count) for size in ("tiny", "small", "big") for count in (16, 64, 128)]
        cases += [(size, count, mode) for size, count in others for mode in ("regions", "eager")]
    for size, batch_size, mode in cases:
        table.add(size, batch_size, mode, *measure(size, batch_size, mode, peak))
    table.show()
    if not options.case:
        alone = conditioning_ms("normal", 64)
        console.print(f"conditioning of 64 clips, normal, forward and backward: {alone:.1f} ms")


if __name__ == "__main__":
    main()
