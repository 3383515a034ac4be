"""The folder of a training run: checkpoints that are whole or not there, which one to continue, and who may write.

Every stage of a run has a folder of its own:

    step-00001000/    weights.safetensors, optimizer.safetensors, state.json: sealed, see `checkpoint`
    best              names the checkpoint with the best loss, which is never rotated away

A checkpoint is written under a name `tmp-...`, synced and renamed into place; older ones go only after that.
This module knows names, tensors and bytes. What they mean to a model, an optimiser or a schedule is its caller's
business, and so are the other files of a run (settings, vocabulary, metrics).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from myxtts.errors import ConfigError, DatasetError
from myxtts.files import as_os_error, sync_path, write_atomically

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
        with as_os_error():
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


_CHECKPOINT_NAME = re.compile(r"(replaced-)?step-\d{8,}")

_log = logging.getLogger(__name__)


class Snapshot(NamedTuple):
    """What a checkpoint holds. The tensors are the writer's alone until it is done with them: see `to_host`."""

    weights: Tensors
    optimizer: Tensors
    state: dict[str, Any]
    """Anything JSON can say: cursor, schedule, best loss, settings."""


class LoadedCheckpoint(NamedTuple):
    """A checkpoint read back. Its tensors map the files, and stay valid when a rotation deletes these."""

    step: int
    folder: Path
    weights: Tensors
    optimizer: Tensors
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one stage. Any process may read them; only the one that holds the `lock` may save.

    Saving happens in a thread of its own, one checkpoint at a time. A save that fails is logged and counted in
    `num_failed`: a full disk costs a checkpoint, not the training.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self.num_failed = 0
        self._writer = ThreadPoolExecutor(1, "checkpoint-writer")
        self._pending: Future[Exception | None] | None = None

    def save(self, step: int, snapshot: Snapshot, best: bool = False, background: bool = True) -> None:
        """Write a checkpoint once the one before it is written; the tensors are in use until `wait` returns."""
        self.wait()
        state = json.loads(json.dumps(snapshot.state))  # now, for the caller goes on changing its own
        self._pending = self._writer.submit(self._save, step, snapshot._replace(state=state), best)
        if not background:
            self.wait()

    def wait(self) -> Exception | None:
        """Block until the last save is over; returns what made it fail."""
        return self._pending.result() if self._pending else None

    def close(self) -> None:
        """Finish the save in flight and end the thread."""
        self._writer.shutdown()

    def newest(self, optimizer: bool = True) -> LoadedCheckpoint | None:
        """The checkpoint saved last among those that are whole; None if nothing was ever saved.

        Without `optimizer`, here and below, that file is neither checked nor read.
        """
        found = self._newest_first()
        found.sort(key=lambda folder: _serial(folder) > 0)  # whose age is unknown comes first, to be reported
        for folder in found:
            with _damage_logged():
                return _load(folder, optimizer)
        if found:
            raise UnreadableWeights(
                f"Every checkpoint in {self.folder} is damaged: {', '.join(folder.name for folder in found)}.\n"
                "Bring one back from a copy, or start over with --reset-training."
            )
        return None

    def load(self, step: int, optimizer: bool = True) -> LoadedCheckpoint:
        """The checkpoint of one step."""
        return _load(self.folder / _name(step), optimizer)

    def best(self, optimizer: bool = True) -> LoadedCheckpoint | None:
        """The checkpoint with the best loss; None if none was named or it is damaged."""
        name = self._best_name()
        if name:
            with _damage_logged():
                return _load(self.folder / name, optimizer)
        return None

    def _newest_first(self) -> list[Path]:
        """By the order of saving: after a reset, the latest is not the one with the most steps."""
        folders = [path for path in self.folder.glob("*step-*") if _CHECKPOINT_NAME.fullmatch(path.name)]
        return sorted(folders, key=lambda folder: (_serial(folder), folder.name), reverse=True)

    def _best_name(self) -> str:
        try:
            return (self.folder / "best").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def _save(self, step: int, snapshot: Snapshot, best: bool) -> Exception | None:
        """Save and rotate, or clean up and say why not. Runs in the writer's thread."""
        final = self.folder / _name(step)
        temporary = self.folder / f"tmp-{final.name}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            serial = 1 + max(map(_serial, self._newest_first()), default=0)
            notes = {"step": step, "stage": self.folder.name, "serial": serial, "state": snapshot.state}
            write_sealed(temporary, {"weights": snapshot.weights, "optimizer": snapshot.optimizer}, notes)
            self._move_into_place(temporary, final)
            if best:
                write_atomically(self.folder / "best", lambda path: path.write_text(final.name, encoding="utf-8"))
            self._rotate()
        except Exception as error:  # whatever it is, it must not end the training
            self.num_failed += 1
            with contextlib.suppress(OSError):
                self._remove_leftovers()
            if isinstance(error, OSError) and error.strerror:
                error = DatasetError(error.strerror)
            _log.error(
                "Saving %s failed: %s (%.0f MB needed, %.0f MB free). Older checkpoints are kept.",
                *(final, error, _num_mb(snapshot), _free_mb(self.folder)),
            )
            return error
        return None

    def _move_into_place(self, temporary: Path, final: Path) -> None:
        if final.exists():  # renamed to a name that `newest` reads too: a kill may come before the next line
            replaced = final.with_name(f"replaced-{final.name}")
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        temporary.rename(final)
        sync_path(self.folder)

    def _rotate(self) -> None:
        found = self._newest_first()
        kept = [folder.name for folder in found if folder.name.startswith("step-")][: self.keep]
        for folder in found:
            if folder.name not in (*kept, self._best_name()):
                folder.rename(folder.with_name(f"tmp-{folder.name}"))  # what is half deleted is no checkpoint
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove what rotation, a failed save or a killed process left; done on saving, as readers must not."""
        for folder in self.folder.glob("tmp-*step-*"):
            shutil.rmtree(folder, ignore_errors=True)


def to_host(tensors: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None, pin: bool = False) -> Tensors:
    """Copies on the host, complete on return; `into` is the result of an earlier call, whose memory is used again.

    Nobody may still be reading `into`: call `Checkpoints.wait` before. `pin` is for tensors on an accelerator.
    """
    host = {}
    for name, tensor in tensors.items():
        room = (into or {}).get(name)
        if room is None or (room.shape, room.dtype) != (tensor.shape, tensor.dtype):
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
        host[name] = room.copy_(tensor.detach())
    return host


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], ignore: Collection[str] = ()) -> list[str]:
    """A line for every setting that differs; `ignore` names settings, or whole sections, by their dotted path."""
    before, after = _by_dotted_name(saved), _by_dotted_name(now)
    return [
        f"{name}: the run has {before.get(name, 'nothing')}, now {after.get(name, 'nothing')}"
        for name in {**before, **after}
        if (name in before, before.get(name)) != (name in after, after.get(name))
        and not any(f"{name}.".startswith(f"{ignored}.") for ignored in ignore)
    ]


def require_same(
    folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any], ignore: Collection[str] = ()
) -> None:
    """Refuse to continue the run in `folder` under settings that its checkpoints were not made with."""
    found = differences(saved, now, ignore)
    if found:
        raise ConfigError(
            f"The run in {folder} was made with other settings:\n  " + "\n  ".join(found) + "\n"
            "Use the settings of the run, keep the two apart with --checkpoint-dir DIR, "
            "or start over with --reset-training."
        )


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _load(folder: Path, optimizer: bool) -> LoadedCheckpoint:
    notes = read_notes(folder)
    found = read_sealed(folder, ["weights", "optimizer"] if optimizer else ["weights"])
    return LoadedCheckpoint(notes["step"], folder, found["weights"], found.get("optimizer", {}), notes["state"])


def _serial(folder: Path) -> int:
    """Counts the saves of a stage; an unreadable checkpoint counts as its oldest."""
    try:
        return int(read_notes(folder)["serial"])
    except UnreadableWeights:
        return 0


@contextlib.contextmanager
def _damage_logged() -> Iterator[None]:
    try:
        yield
    except UnreadableWeights as error:
        _log.warning("A damaged checkpoint is passed over: %s", error)


def _num_mb(snapshot: Snapshot) -> float:
    return sum(tensor.nbytes for tensor in [*snapshot.weights.values(), *snapshot.optimizer.values()]) / 1e6


def _free_mb(folder: Path) -> float:
    try:
        return shutil.disk_usage(folder).free / 1e6
    except OSError:  # not even the folder could be made
        return 0.0


def _by_dotted_name(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings as JSON gives them back, so that a path equals its text and a tuple equals a list."""
    flat = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_by_dotted_name(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = json.loads(json.dumps(value, default=str))
    return flat
