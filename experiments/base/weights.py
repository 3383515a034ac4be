"""The teacher's weights in parts that are small enough to carry: int8 per row, voices in float16."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

PART_BYTES = 16_000_000
SMALLEST = 16_384  # numbers of a tensor that is worth quantising
Arrays = dict[str, npt.NDArray[np.generic]]


def pack(state: dict[str, torch.Tensor], voices: Arrays, out: Path) -> list[Path]:
    """Write the weights and the style vectors of the voices as teacher-0.bin, teacher-1.bin and so on."""
    arrays: Arrays = {}
    for name, tensor in state.items():
        value = tensor.float()
        if value.numel() < SMALLEST or "alpha" in name:  # dividing by a rounded alpha is audible
            arrays[name] = value.numpy()
            continue
        rows = value.flatten(1)
        scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
        arrays[name] = (rows / scale).round().to(torch.int8).view(value.shape).numpy()
        arrays[f"{name}|scale"] = scale[:, 0].numpy()
    arrays |= {f"voice|{name}": pack.astype(np.float16) for name, pack in voices.items()}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    whole = buffer.getvalue()
    paths = []
    for at, start in enumerate(range(0, len(whole), PART_BYTES)):
        paths.append(out / f"teacher-{at}.bin")
        paths[-1].write_bytes(whole[start : start + PART_BYTES])
    return paths


def load(folder: Path) -> tuple[dict[str, torch.Tensor], list[str], torch.Tensor]:
    """Return the state of `Teacher`, the names of its voices, and their style vectors (voices, 510, 256)."""
    parts = sorted(folder.glob("teacher-*.bin"), key=lambda path: int(path.stem.split("-")[1]))
    if not parts:
        raise SystemExit(f"No teacher-0.bin in {folder}; weights.py writes it.")
    with np.load(io.BytesIO(b"".join(path.read_bytes() for path in parts)), allow_pickle=False) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    names = sorted(name.removeprefix("voice|") for name in arrays if name.startswith("voice|"))
    styles = torch.stack([arrays[f"voice|{name}"] for name in names])
    state = {}
    for name, value in arrays.items():
        if name.startswith("voice|") or name.endswith("|scale"):
            continue
        scale = arrays.get(f"{name}|scale")
        state[name] = value if scale is None else value * scale.view(-1, *[1] * (value.dim() - 1))
    return state, names, styles
