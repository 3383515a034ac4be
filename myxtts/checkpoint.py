"""Tensors in files: read safely, compared with what is expected, written so that no half file is ever seen.

Knows names, shapes and bytes, not what they mean; never imports a model. Nothing here executes what a file says:
`.pth` files are read with `weights_only`, and foreign classes inside them become inert stand-ins.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from myxtts.errors import DatasetError

Tensors = dict[str, torch.Tensor]

MISMATCHES_SHOWN = 5
_KNOWN_FOREIGN = ("TTS.", "coqpit.", "trainer.", "collections.")
"""Packages whose classes stand beside the weights in published files: settings, never needed here."""


class UnreadableWeights(DatasetError):
    """A file of weights that is damaged, not what it claims to be, or does not fit."""


def read_tensors(path: Path) -> Tensors:
    """Every tensor of a `.pth` or `.safetensors` file by its full dotted name, memory-mapped where possible."""
    if not path.is_file():
        raise UnreadableWeights(f"No such file of weights: {path}")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    return dict(_named_tensors(_read_pth(path)))


def _read_safetensors(path: Path) -> Tensors:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise UnreadableWeights(f"{path} is damaged or no safetensors file: {error}") from None


def _read_pth(path: Path) -> Any:
    try:
        with _inert_foreign_classes(path):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except UnreadableWeights:
        raise
    except Exception as error:  # the unpickler raises whatever a damaged stream makes it raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UnreadableWeights(f"{path} is damaged or no PyTorch checkpoint: {reason[0][:200]}") from None


@contextlib.contextmanager
def _inert_foreign_classes(path: Path) -> Iterator[None]:
    """Let the settings objects in published checkpoints be read as objects without behaviour."""
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path) if zipfile.is_zipfile(path) else []
    strangers = [name for name in names if not name.startswith(_KNOWN_FOREIGN)]
    if strangers:
        raise UnreadableWeights(
            f"{path} refers to {strangers[0]}, which has no place beside weights; it was not loaded"
        )
    stand_ins: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
        (type(name.rpartition(".")[2], (), {}), name) for name in names
    ]
    with torch.serialization.safe_globals(stand_ins):
        yield


def _named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested mappings; other entries (settings, step counts) are passed over."""
    if isinstance(tree, torch.Tensor):
        yield prefix, tree
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _named_tensors(value, f"{prefix}.{name}" if prefix else str(name))


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Call `write` with a temporary path beside `path`, bring the file to the disk and move it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise DatasetError(f"Cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str] | None = None) -> None:
    """Write a `.safetensors` file; `notes` travel in its header."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, lambda temporary: save_file(contiguous, temporary, dict(notes or {})))


def write_pth(path: Path, content: Mapping[str, Any]) -> None:
    """Write a PyTorch file of tensors, numbers and text, as other tools of the ecosystem read it."""
    write_atomically(path, lambda temporary: torch.save(dict(content), temporary))


def require_match(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Size], source: str) -> None:
    """Raise an error naming the first entries that are missing, left over or of another shape."""
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is not expected" for name in found if name not in expected]
    problems += [
        f"{name} has shape {list(found[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    if problems:
        shown = "\n  ".join(problems[:MISMATCHES_SHOWN])
        more = f"\n  and {len(problems) - MISMATCHES_SHOWN} more" if len(problems) > MISMATCHES_SHOWN else ""
        raise UnreadableWeights(f"{source} does not fit this model:\n  {shown}{more}")
