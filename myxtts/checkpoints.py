"""Tensor files and checkpoints: complete or absent, checked when read, rotated when written.

Every stage of a run has a folder of its own:

    step-00001000/              weights.safetensors, optimizer.safetensors, state.json with sizes and checksums
    step-00001000/scores.json   scores that were not known when it was saved
    evaluated-step-00000600/    the weights of a step that was evaluated and not saved: nothing continues from them

A checkpoint is written to `tmp-...`, synced and renamed; only then are older ones removed. The newest stay, and
the best one. The module knows names, tensors and bytes, and two entries of a state: `val_loss`, and `trained_on`
with the fingerprints of the earlier stages that this one builds on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from myxtts.errors import ConfigError, DatasetError
from myxtts.files import as_os_error, sync_path, usual_mode, write_atomically, write_text_atomically

Tensors = dict[str, Tensor]

CHECKPOINT_FORMAT = 1
"""Increase it when the form of a checkpoint changes: checkpoints of another version are not read."""
MISMATCHES_SHOWN = 5
_KNOWN_FOREIGN = ("TTS.", "coqpit.", "trainer.", "collections.")
"""Packages whose classes (settings, not needed here) are stored with the weights in published files."""
_CHECKPOINT_NAME = re.compile(r"(replaced-)?step-\d{8,}")
_EVALUATED = "evaluated-"
SCORES_FILE = "scores.json"
BEST_BY: Mapping[str, int] = {"loss": 1, "wer": 1, "similarity": -1, "mos": -1}
"""The scores that can choose a checkpoint, and their sign: less is better, or more."""
UNJUDGED_KEPT = 3  # evaluated weights that wait for their scores

_log = logging.getLogger(__name__)


class UnreadableWeights(DatasetError):
    """Weights that are damaged, of an unknown kind, or do not fit the model."""


def read_tensors(path: Path) -> Tensors:
    """The tensors of a `.pth`, `.safetensors` or `.npz` file by their full names, memory-mapped where possible."""
    if not path.is_file():
        raise UnreadableWeights(f"No such file of weights: {path}")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix == ".npz":
        return _read_npz(path)
    return dict(_named_tensors(_read_pth(path)))


def _read_safetensors(path: Path) -> Tensors:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise UnreadableWeights(f"{path} is damaged or no safetensors file: {error}") from None


def _read_npz(path: Path) -> Tensors:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: torch.from_numpy(file[name]) for name in file.files}
    except (OSError, ValueError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UnreadableWeights(f"{path} is damaged or no file of arrays: {error}") from None


def _read_pth(path: Path) -> Any:
    """The content of a PyTorch file; the settings objects of published checkpoints become empty classes."""
    strangers: list[str] = []
    try:
        is_zip = zipfile.is_zipfile(path)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path) if is_zip else []
        strangers = [name for name in names if not name.startswith(_KNOWN_FOREIGN)]
        stand_ins: list[Any] = [(type(name.rpartition(".")[2], (), {}), name) for name in names]
        if not strangers:
            with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings(action="ignore"):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # the unpickler raises whatever a damaged stream makes it raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        if type(error).__name__ == "UnpicklingError":  # its text advises to execute what the file says
            reason = "it holds something other than weights, which is not loaded"
        raise UnreadableWeights(f"{path} is damaged or no PyTorch checkpoint: {reason}") from None
    raise UnreadableWeights(f"{path} was not loaded: it refers to {strangers[0]}, which is no part of weights")


def _named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested mappings; other entries (settings, step counts) are skipped."""
    if isinstance(tree, Tensor):
        yield prefix, tree
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _named_tensors(value, f"{prefix}.{name}" if prefix else str(name))


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, lambda temporary: save_file(contiguous, temporary))


def write_compressed(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write an `.npz` file: int8 takes about 10 % less than in a `.safetensors` file."""

    def write(temporary: Path) -> None:
        arrays: dict[str, Any] = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
        with open(temporary, "wb") as file:  # given a path, NumPy adds an ending
            np.savez_compressed(file, **arrays)

    write_atomically(path, write)


def write_pth(path: Path, content: Any) -> None:
    """Write a PyTorch file of tensors, numbers and text, for other tools to read."""

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:  # given a path, PyTorch hides the reason of an error
            torch.save(content, file)

    write_atomically(path, write)


def require_match(found: Mapping[str, Tensor], expected: Mapping[str, torch.Size], source: str) -> None:
    """Raise an error with the first entries that are missing, unknown or of another shape."""
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


class Snapshot(NamedTuple):
    """Contents of a checkpoint to save: contiguous host tensors that share no memory, see `to_host`."""

    weights: Tensors
    optimizer: Tensors | None  # None if only the weights of an evaluation are kept
    state: dict[str, Any]  # JSON values: cursor, best loss, settings


class Notes(NamedTuple):
    """What a checkpoint says about itself, without its tensors."""

    step: int
    folder: Path
    state: dict[str, Any]
    fingerprint: str  # step and checksum of the weights
    serial: int  # number of the save
    scores: dict[str, float]
    """The validation loss of these weights ("loss"), and what the judges said of their speech; see `BEST_BY`."""

    @property
    def trained_on(self) -> dict[str, str]:
        """Fingerprints of the earlier stages that this one was trained on; empty if they are not known."""
        return dict(self.state.get("trained_on", {}))

    def was_trained_on(self, fingerprints: Mapping[str, str]) -> bool:
        """True if these are the earlier stages it was trained on, as far as that is known."""
        return all(self.trained_on.get(name, known) == known for name, known in fingerprints.items())

    @property
    def val_loss(self) -> float | None:
        """The validation loss of these weights; None if they were not validated."""
        return self.scores.get("loss")

    @property
    def is_averaged(self) -> bool:
        """True if the weights are those of an evaluation: already averaged, without an optimiser."""
        return self.folder.name.startswith(_EVALUATED)


class LoadedCheckpoint(NamedTuple):
    """A checkpoint read back. Its tensors map the files and stay valid after rotation deletes them."""

    notes: Notes
    weights: Tensors
    optimizer: Tensors

    @property
    def step(self) -> int:
        return self.notes.step

    @property
    def folder(self) -> Path:
        return self.notes.folder

    @property
    def state(self) -> dict[str, Any]:
        return self.notes.state


class Checkpoints:
    """The checkpoints of one stage. Any process may read them; only the process with the run's lock may save.

    A background thread saves them, one at a time. A failed save is logged and counted in `num_failed`: a full disk
    costs a checkpoint, not the run.
    """

    def __init__(self, folder: Path, keep: int, best_by: str | None = None) -> None:
        """`best_by` names the score of the checkpoint that is `used`; None for the newest."""
        self.folder = folder
        self.keep = keep
        self._best_by = best_by
        self.num_failed = 0
        self._thread = ThreadPoolExecutor(1, "checkpoint-writer")
        self._pending: Future[Exception | None] | None = None

    def save(self, step: int, snapshot: Snapshot) -> None:
        """Save in the background, after the previous checkpoint; the tensors are in use until `wait` returns."""
        self.wait()
        state = json.loads(json.dumps(snapshot.state))  # a copy: the caller keeps changing its own
        self._pending = self._thread.submit(self._save, step, snapshot._replace(state=state))

    def save_evaluated(self, step: int, snapshot: Snapshot) -> None:
        """Save the weights of an evaluation, after all that is being saved; returns when they are on disk."""
        self._thread.submit(self._save, step, snapshot).result()

    def rate(self, step: int, scores: Mapping[str, float]) -> None:
        """Note scores of the weights of a step, in the background, if they are on disk."""
        self._thread.submit(self._rate, step, dict(scores))

    def wait(self) -> Exception | None:
        """Block until the last save has ended; returns its error, if any."""
        return self._pending.result() if self._pending else None

    def close(self) -> None:
        """Finish everything and end the thread."""
        self._thread.shutdown()

    def newest(self, optimizer: bool = True) -> LoadedCheckpoint | None:
        """The latest undamaged checkpoint, None if nothing was saved; `optimizer` says if that file is read."""
        found = self._folders()
        known = [notes.folder for notes in self.all_notes()]
        for folder in [*(folder for folder in found if folder not in known), *known]:  # reports damaged ones
            with _damage_logged():
                return _load(folder, optimizer)
        if not found:
            return None
        damaged = f"Every checkpoint in {self.folder} is damaged: {', '.join(folder.name for folder in found)}."
        raise UnreadableWeights(f"{damaged}\nRestore one from a backup, or start over with --reset-training.")

    def load(self, step: int, optimizer: bool = True) -> LoadedCheckpoint:
        return _load(self.folder / _name(step), optimizer)

    def read(self, folder: Path) -> LoadedCheckpoint:
        """A checkpoint by its folder, with its optimiser."""
        return _load(folder, optimizer=True)

    @property
    def newest_is_damaged(self) -> bool:
        """True if an older checkpoint is used because the last saved one cannot be read."""
        found, used = self.all_notes(), self.newest(optimizer=False)
        return used is not None and (len(found) < len(self._folders()) or found[0].folder != used.folder)

    def best(self, optimizer: bool = True) -> LoadedCheckpoint | None:
        """The best checkpoint by `best_by`, or by its loss; None without scores, or if none can be read."""
        for notes in self._best_first():
            with _damage_logged():
                return _load(notes.folder, optimizer)
        return None

    def all_notes(self) -> list[Notes]:
        """The notes of all checkpoints, the last saved first: it may not have the most steps."""
        found = []
        for folder in self._folders():
            with contextlib.suppress(UnreadableWeights):
                found.append(_notes(folder, _read_body(folder)))
        return sorted(found, key=lambda notes: (notes.serial, notes.folder.name), reverse=True)

    def current(self) -> list[Notes]:
        """The notes of checkpoints that were trained on the same earlier stages as the last saved one."""
        found = self.all_notes()
        return [notes for notes in found if notes.was_trained_on(found[0].trained_on)]

    def prune(self) -> None:
        """Remove what a killed process left, and superseded checkpoints, unless the newest ones are damaged."""
        superseded = self._superseded()
        if superseded and (newest := self.newest()) is not None:
            self._remove([folder for folder in superseded if folder != newest.folder])
        self._remove([])

    def _folders(self) -> list[Path]:
        return [path for path in self.folder.glob("*step-*") if _CHECKPOINT_NAME.fullmatch(path.name)]

    def used(self) -> LoadedCheckpoint | None:
        """The checkpoint that speaks and that later stages build on, without its optimiser; None without any."""
        return (self.best(optimizer=False) if self._best_by else None) or self.newest(optimizer=False)

    def used_notes(self) -> Notes | None:
        """The notes of the checkpoint that is `used`, unless it is damaged."""
        return next(iter([*(self._best_first() if self._best_by else []), *self.all_notes()]), None)

    def evaluated(self) -> list[Notes]:
        """The notes of evaluated weights that were not saved, the last first, trained on what the newest was."""
        found, last = [], self.all_notes()[:1]
        for folder in sorted(self.folder.glob(f"{_EVALUATED}step-*"), reverse=True):
            with contextlib.suppress(UnreadableWeights):
                found.append(_notes(folder, _read_body(folder)))
        return [notes for notes in found if not last or notes.was_trained_on(last[0].trained_on)]

    def _best_first(self) -> list[Notes]:
        """The checkpoints that have the score that counts, or else a validation loss."""
        found, by = [*self.current(), *self.evaluated()], self._best_by or "loss"
        by = by if any(by in notes.scores for notes in found) else "loss"
        rated = [notes for notes in found if by in notes.scores]
        return sorted(rated, key=lambda notes: (BEST_BY[by] * notes.scores[by], notes.step))

    def _superseded(self) -> list[Path]:
        """Checkpoints that are neither among the newest nor the best one, and evaluated weights likewise.

        While a stage that starts over is unfinished, the last checkpoint of before is kept too.
        """
        found, current, evaluated = self.all_notes(), self.current(), self.evaluated()
        newest = [notes for notes in current if notes.folder.name.startswith("step-")][: self.keep]
        before = [notes for notes in found if notes not in current and not found[0].state["done"]][:1]
        unjudged = [notes for notes in evaluated if (self._best_by or "loss") not in notes.scores]
        kept = [notes.folder for notes in [*newest, *self._best_first()[:1], *before, *unjudged[:UNJUDGED_KEPT]]]
        marked = self.folder / "best"  # names the best checkpoint of 0.1.0, whose notes do not say their loss
        if marked.is_file() and not self._best_first():
            kept.append(self.folder / marked.read_text(encoding="utf-8", errors="replace").strip())
        every = [*self._folders(), *self.folder.glob(f"{_EVALUATED}step-*")]
        return [folder for folder in every if folder not in kept]

    def _rate(self, step: int, scores: Mapping[str, float]) -> None:
        """Add to the scores of a checkpoint, and rotate. Runs in the background thread."""
        try:
            for folder in [self.folder / f"{prefix}{_name(step)}" for prefix in ("", _EVALUATED)]:
                if folder.is_dir():
                    known = _scores(folder)
                    write_text_atomically(folder / SCORES_FILE, json.dumps(known | dict(scores)))
            self._remove(self._superseded())
        except (OSError, DatasetError) as error:
            _log.warning("The scores of step %d in %s are lost: %s", step, self.folder, error)

    def _save(self, step: int, snapshot: Snapshot) -> Exception | None:
        """Save and rotate, or clean up and return the error. Runs in the background thread."""
        final = self.folder / f"{_EVALUATED if snapshot.optimizer is None else ''}{_name(step)}"
        temporary = self.folder / f"tmp-{final.name}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove([])
            serial = 1 + max((notes.serial for notes in self.all_notes()), default=0)
            notes = {"step": step, "stage": self.folder.name, "serial": serial, "state": snapshot.state}
            tensors = {"weights": snapshot.weights, "optimizer": snapshot.optimizer}
            _write(temporary, {name: content for name, content in tensors.items() if content is not None}, notes)
            if final.exists():
                # `newest` reads this name too, in case the process is killed before the next rename.
                replaced = final.with_name(f"replaced-{final.name}")
                shutil.rmtree(replaced, ignore_errors=True)
                final.rename(replaced)
            temporary.rename(final)
            sync_path(self.folder)
            self._remove(self._superseded())
        except Exception as error:  # no error may end the run
            self.num_failed += 1
            with contextlib.suppress(OSError):
                self._remove([])
            if isinstance(error, OSError) and error.strerror:
                error = DatasetError(error.strerror)
            every = (*snapshot.weights.values(), *(snapshot.optimizer or {}).values())
            num_bytes = sum(tensor.nbytes for tensor in every)
            free = 0
            with contextlib.suppress(OSError):  # the folder could not be created
                free = shutil.disk_usage(self.folder).free
            room = f"{num_bytes / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free"
            _log.error("Saving %s failed: %s (%s). Older checkpoints are kept.", final, error, room)
            return error
        return None

    def _remove(self, superseded: Iterable[Path]) -> None:
        """Remove these, and what a failed save or a killed process left."""
        for folder in superseded:
            folder.rename(folder.with_name(f"tmp-{folder.name}"))  # so that a half-deleted one is not read
        for folder in self.folder.glob("tmp-*step-*"):
            shutil.rmtree(folder, ignore_errors=True)


def to_host(tensors: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None, pin: bool = False) -> Tensors:
    """Copies on the host, complete on return. `into` is the result of an earlier call, whose memory is reused.

    Call `Checkpoints.wait` before reusing memory. `pin` is for tensors on a GPU.
    """
    host = {}
    for name, tensor in tensors.items():
        room = (into or {}).get(name)
        if room is None or (room.shape, room.dtype) != (tensor.shape, tensor.dtype):
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
        host[name] = room.copy_(tensor.detach())
    return host


def require_same(
    folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any], advice: Sequence[str] = ()
) -> None:
    """Raise an error with every setting that differs."""
    found = [
        f"{name}: the run has {saved.get(name, 'nothing')}, now {now.get(name, 'nothing')}"
        for name in {**saved, **now}
        if (name in saved, saved.get(name)) != (name in now, now.get(name))
    ]
    if found:
        listed = "\n".join(
            [f"The run in {folder} was made with other settings:", *map("  {}".format, found), *advice]
        )
        keep_apart = "keep the two apart with --checkpoint-dir DIR"
        raise ConfigError(f"{listed}\nUse its settings, {keep_apart}, or start over with --reset-training.")


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _write(folder: Path, tensors: Mapping[str, Tensors], notes: Mapping[str, Any]) -> None:
    """Write a folder of `NAME.safetensors` files and `state.json`, and sync it."""
    folder.mkdir()
    files = {}
    for name, content in tensors.items():
        path = folder / f"{name}.safetensors"
        with as_os_error(), usual_mode(path):
            save_file(content, path)
        sync_path(path)
        files[name] = {"bytes": path.stat().st_size, "xxh3": file_hash(path)}
    body = json.loads(json.dumps({"format": CHECKPOINT_FORMAT, "files": files, "notes": notes}))
    text = json.dumps({"hash": _body_hash(body), "body": body}, indent=1)
    (folder / "state.json").write_text(text, encoding="utf-8")
    sync_path(folder / "state.json")
    sync_path(folder)


def _load(folder: Path, optimizer: bool) -> LoadedCheckpoint:
    body = _read_body(folder)
    weights = _read_checked(folder, "weights", body)
    state = _read_checked(folder, "optimizer", body) if optimizer else {}
    return LoadedCheckpoint(_notes(folder, body), weights, state)


def _notes(folder: Path, body: Mapping[str, Any]) -> Notes:
    known = body["notes"]
    fingerprint, loss = f"{known['step']}-{body['files']['weights']['xxh3'][:16]}", known["state"].get("val_loss")
    scores = ({} if loss is None else {"loss": float(loss)}) | _scores(folder)
    return Notes(known["step"], folder, known["state"], fingerprint, known["serial"], scores)


def _scores(folder: Path) -> dict[str, float]:
    """What was noted by `rate`; nothing if that is damaged."""
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        found = json.loads((folder / SCORES_FILE).read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in found.items() if name in BEST_BY}
    return {}


def _read_body(folder: Path) -> dict[str, Any]:
    path = folder / "state.json"
    with _as_unreadable(path):
        text = path.read_bytes()
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        content = json.loads(text)
        body = dict(content["body"])
        if content["hash"] == _body_hash(body) and body["format"] == CHECKPOINT_FORMAT:
            return body
    raise UnreadableWeights(f"{path} is not what was written")


def _read_checked(folder: Path, name: str, body: Mapping[str, Any]) -> Tensors:
    path, expected = folder / f"{name}.safetensors", body["files"].get(name)
    if expected is None:
        raise UnreadableWeights(f"{folder} was written without {path.name}")
    with _as_unreadable(path):
        num_bytes = path.stat().st_size
        if num_bytes != expected["bytes"]:
            raise UnreadableWeights(f"{path} has {num_bytes} bytes instead of {expected['bytes']}")
        if file_hash(path) != expected["xxh3"]:
            raise UnreadableWeights(f"{path} does not match its checksum")
    return _read_safetensors(path)


@contextlib.contextmanager
def _as_unreadable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnreadableWeights(f"Cannot read {path}: {error.strerror or error}") from None


def _body_hash(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def file_hash(path: Path) -> str:
    with _as_unreadable(path), open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


@contextlib.contextmanager
def _damage_logged() -> Iterator[None]:
    try:
        yield
    except UnreadableWeights as error:
        _log.warning("A damaged checkpoint is passed over: %s", error)
