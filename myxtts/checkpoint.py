"""Tensors in files: read safely, compared with what is expected, written so that no half file is ever seen.

Knows names, shapes and bytes, not what they mean; never imports a model. Nothing here executes what a file says:
`.pth` files are read with `weights_only`, and foreign classes inside them become inert stand-ins. A sealed folder
is a few files of tensors and `state.json`, which is written last and holds their checksums and its own.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from myxtts.errors import DatasetError

Tensors = dict[str, torch.Tensor]

FOLDER_FORMAT = 1
"""Raise it whenever a sealed folder changes its form: folders of another version are not read."""
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


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path beside `path`, bring the file to the disk and move it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _as_os_error():
            write(temporary)
        sync_path(temporary)
        temporary.replace(path)
    except OSError as error:
        raise DatasetError(_cannot_write(path, error)) from error
    finally:
        temporary.unlink(missing_ok=True)
    sync_path(path.parent)


def _cannot_write(path: Path, error: OSError) -> str:
    why = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return f"Cannot write {path}: {why}"
    free_mb = shutil.disk_usage(path.parent).free / 1e6
    return (
        f"No room for {path}: {why} ({free_mb:.0f} MB are free).\n"
        "Nothing half-made was left behind. Free some space, or choose a folder on another disk "
        "(--checkpoint-dir DIR for a run, --out DIR for an export)."
    )


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """What the libraries that write tensors make of a full disk, as Python would have raised it."""
    try:
        yield
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from None
    except RuntimeError as error:  # PyTorch's own, which came upon the real one
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def sync_path(path: Path) -> None:
    """Bring a file or the entries of a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network drives cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str] | None = None) -> None:
    """Write a `.safetensors` file; `notes` travel in its header."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, lambda temporary: save_file(contiguous, temporary, dict(notes or {})))


def write_pth(path: Path, content: Mapping[str, Any]) -> None:
    """Write a PyTorch file of tensors, numbers and text, as other tools of the ecosystem read it."""

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:  # given a name, PyTorch does not say what is wrong
            torch.save(dict(content), file)

    write_atomically(path, write)


def write_sealed(folder: Path, tensors: Mapping[str, Tensors], notes: Mapping[str, Any]) -> None:
    """Make a folder of `NAME.safetensors` files and `state.json`, and bring it to the disk.

    The tensors are contiguous, on the host and share no memory; `notes` is anything JSON can say.
    """
    folder.mkdir()
    files = {}
    for name, content in tensors.items():
        path = folder / f"{name}.safetensors"
        with _as_os_error():
            save_file(content, path)
        with contextlib.suppress(PermissionError):  # file systems without modes
            path.chmod(folder.stat().st_mode & 0o666)  # safetensors lets nobody but the owner read its files
        sync_path(path)
        files[name] = {"bytes": path.stat().st_size, "xxh3": _file_hash(path)}
    body = json.loads(json.dumps({"format": FOLDER_FORMAT, "files": files, "notes": notes}))
    text = json.dumps({"hash": _body_hash(body), "body": body}, indent=1)
    (folder / "state.json").write_text(text, encoding="utf-8")
    sync_path(folder / "state.json")
    sync_path(folder)


def read_sealed(folder: Path, names: Collection[str]) -> dict[str, Tensors]:
    """Some of the files of a sealed folder, if they are those that were written; memory-mapped."""
    files = _sealed_body(folder)["files"]
    found = {}
    for name in names:
        path = folder / f"{name}.safetensors"
        if name not in files:
            raise UnreadableWeights(f"{folder} was written without {path.name}")
        with _reading(path):
            num_bytes = path.stat().st_size
            if num_bytes != files[name]["bytes"]:
                raise UnreadableWeights(f"{path} has {num_bytes} bytes instead of {files[name]['bytes']}")
            if _file_hash(path) != files[name]["xxh3"]:
                raise UnreadableWeights(f"{path} does not match its checksum")
        found[name] = _read_safetensors(path)
    return found


def read_notes(folder: Path) -> dict[str, Any]:
    """The notes of a sealed folder."""
    return dict(_sealed_body(folder)["notes"])


def _sealed_body(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    with _reading(path):
        text = path.read_bytes()
    try:
        content = json.loads(text)
        body = dict(content["body"])
        if content["hash"] == _body_hash(body) and body["format"] == FOLDER_FORMAT:
            return body
    except (ValueError, KeyError, TypeError):
        pass
    raise UnreadableWeights(f"{path} is not what was written")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnreadableWeights(f"Cannot read {path}: {error.strerror or error}") from None


def _body_hash(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def _file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


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
