"""What a prepared corpus looked like when it was last opened, so that an unchanged one opens without being read.

A snapshot is used only when the settings, the code, the bytes of the metadata, the folders that were searched and
the size and times of every audio file are exactly what they were; otherwise the corpus is read as if there were
none. It never replaces a check that the stores make of themselves.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from myxtts import __version__
from myxtts.audio import DECODE_VERSION, LIBRARIES
from myxtts.config import DataSettings
from myxtts.data.clips import AudioRows, ClipSet, Prepared
from myxtts.data.corpus import Corpus, last_change
from myxtts.data.decoded import DecodedAudio, DecodeOptions
from myxtts.data.metadata import METADATA_FILES, SetAside
from myxtts.data.store import FORMAT_VERSION, Array, CacheDamaged, Store
from myxtts.settings import PREPARE_KEYS
from myxtts.text import language, normalize, phonemes, tokenizer

SNAPSHOTS_KEPT = 4
CLOCK_TICK_NS = 20_000_000
"""A folder changed this shortly before it was listed may have changed again with the same time."""

_ROWS = ("audio_rows", "ids_rows", "speakers", "languages")
_SEPARATOR = "\0"
_DIGEST_BYTES = 16


def state_of(folders: Sequence[Path], data: DataSettings) -> str:
    """A name for everything but the audio files that decides what a corpus is prepared to."""
    files = [folder / name for folder in folders for name in METADATA_FILES]
    if data.tokenizer is not None:
        files += [data.tokenizer, data.tokenizer / "vocab.json"]
    code = sorted(Path(__file__).parent.glob("*.py"))
    versions = (__version__, DECODE_VERSION, LIBRARIES, FORMAT_VERSION)
    code_of_text = (normalize.fingerprint(), language.fingerprint(), tokenizer.code_fingerprint())
    sounds = phonemes.fingerprint() if data.use_phonemes else ""
    decisive = [getattr(data, key.removeprefix("data.")) for key in PREPARE_KEYS[:-1]]
    places = [str(folder.absolute()) for folder in folders]
    hasher = xxhash.xxh3_128(repr((versions, code_of_text, sounds, decisive, places)).encode())
    for path in (*files, *code):
        try:
            content = path.read_bytes() if path.is_file() else None
        except OSError:  # whoever needs the file will say so
            content = None
        hasher.update(repr((path.name, content and len(content))).encode())
        hasher.update(content or b"")
    return hasher.hexdigest()


def save(prepared: Prepared, state: str, corpora: Sequence[Corpus]) -> None:
    """Keep a snapshot beside the stores, if that can be written and the corpus is at rest."""
    listed = {folder: at for corpus in corpora for folder, at in corpus.listed.items()}
    if min(corpus.read_at for corpus in corpora) - max(listed.values(), default=0) < CLOCK_TICK_NS:
        return
    clips = [(corpus.folder, clip) for corpus in corpora for clip in corpus.clips]
    audio = prepared.train.audio
    details = {
        "set_aside": prepared.set_aside,
        "speakers": prepared.speaker_names,
        "decoding": asdict(audio.options) if isinstance(audio, DecodedAudio) else None,
    }
    arrays: dict[str, Any] = {
        "paths": _blob(str(folder.absolute() / clip.path) for folder, clip in clips),
        "stats": np.array([clip[-3:] for _, clip in clips], np.int64).reshape(-1, 3),
        "folders": _blob(listed),
        "folder_times": np.array(list(listed.values()), np.int64),
        "vocabulary": np.frombuffer(prepared.vocabulary.encode(), np.uint8),
        "details": _blob([json.dumps(details)]),
        "train_files": np.array([0, len(corpora[0].clips)]),
        "val_files": np.array([len(clips) - len(corpora[-1].clips), len(clips)]),
    }
    for name, part in (("train", prepared.train), ("val", prepared.val)):
        arrays[f"{name}_names"] = _blob(part.names)
        arrays[f"{name}_stores"] = _blob([str(part.audio.folder), str(part.ids.folder)])
        for field in _ROWS:
            arrays[f"{name}_{field}"] = getattr(part, field)
    temporary = prepared.root / f"tmp-snapshot-{os.getpid()}"
    with contextlib.suppress(OSError):  # a full disk or a read-only cache only costs the shortcut
        for left_behind in prepared.root.glob("tmp-snapshot-*"):  # by a killed process, or one that now fails
            left_behind.unlink(missing_ok=True)
        try:
            content = io.BytesIO()
            np.savez(content, **arrays)
            temporary.write_bytes(xxhash.xxh3_128_digest(content.getvalue()) + content.getvalue())
            temporary.rename(_path(prepared.root, state))
        finally:
            temporary.unlink(missing_ok=True)
        kept = sorted(prepared.root.glob("snapshot-*"), key=lambda path: path.stat().st_mtime_ns)
        for path in kept[:-SNAPSHOTS_KEPT]:
            path.unlink()


def load(root: Path, state: str) -> Prepared | None:
    """The corpus as it was prepared before, if nothing has changed since."""
    try:
        raw = _path(root, state).read_bytes()
        if raw[:_DIGEST_BYTES] != xxhash.xxh3_128_digest(raw[_DIGEST_BYTES:]):
            return None
        with np.load(io.BytesIO(raw[_DIGEST_BYTES:]), allow_pickle=False) as arrays:
            if not _unchanged(arrays):
                return None
            details = json.loads(arrays["details"].tobytes())
            train = _clip_set(arrays, "train", details["decoding"], None)
            return Prepared(
                train=train,
                val=_clip_set(arrays, "val", details["decoding"], train),
                speaker_names=details["speakers"],
                set_aside=[SetAside(*item) for item in details["set_aside"]],
                vocabulary=arrays["vocabulary"].tobytes().decode(),
                root=root,
            )
    except (OSError, CacheDamaged):
        return None


def _clip_set(arrays: Any, name: str, decoding: dict[str, Any] | None, other: ClipSet | None) -> ClipSet:
    """One side of the split; what `other` has open already is shared with it."""
    audio_folder, ids_folder = map(Path, _texts(arrays[f"{name}_stores"]))
    audio: AudioRows
    if other is not None and other.audio.folder == audio_folder:
        audio = other.audio
    elif decoding is None:
        audio = _open(audio_folder, np.int16)
    else:
        files = slice(*arrays[f"{name}_files"].tolist())
        paths, stats = _texts(arrays["paths"])[files], arrays["stats"][files]
        audio = DecodedAudio(_open(audio_folder, np.uint64), paths, stats, DecodeOptions(**decoding))
    ids = other.ids if other is not None and other.ids.folder == ids_folder else _open(ids_folder, np.int32)
    rows = {field: arrays[f"{name}_{field}"] for field in _ROWS}
    return ClipSet(audio, ids, **rows, names=_texts(arrays[f"{name}_names"]))


def _open(folder: Path, dtype: npt.DTypeLike) -> Store:
    if (folder / "damaged").exists():
        raise CacheDamaged(f"{folder} was marked as damaged")
    store = Store(folder, dtype)
    with contextlib.suppress(OSError):
        os.utime(folder)  # when it was last used decides which stores are kept
    return store


def _unchanged(arrays: Any) -> bool:
    times = arrays["folder_times"].tolist()
    for folder, at in zip(_texts(arrays["folders"]), times, strict=True):
        if last_change(Path(folder)) != at:
            return False
    for path, stat in zip(_texts(arrays["paths"]), arrays["stats"].tolist(), strict=True):
        now = os.stat(path)  # noqa: PTH116 (13,100 of them)
        if [now.st_size, now.st_mtime_ns, now.st_ctime_ns] != stat:
            return False
    return True


def _blob(texts: Any) -> Array:
    return np.frombuffer(_SEPARATOR.join(texts).encode("utf-8", "surrogateescape"), np.uint8)


def _texts(blob: Array) -> list[str]:
    joined = blob.tobytes().decode("utf-8", "surrogateescape")
    return joined.split(_SEPARATOR) if joined else []


def _path(root: Path, state: str) -> Path:
    return root / f"snapshot-{state}.npz"
