"""Atomic file writes, and the lock of a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from myxtts.errors import ConfigError, DatasetError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path next to `path`, sync the file and rename it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with as_os_error(), usual_mode(temporary):
            write(temporary)
        sync_path(temporary)
        temporary.replace(path)
    except OSError as error:
        raise DatasetError(_cannot_write(path, error)) from error
    finally:
        with contextlib.suppress(OSError):  # not there, or its parent is not a folder
            temporary.unlink()
    sync_path(path.parent)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 text file, completely or not at all."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@contextlib.contextmanager
def usual_mode(path: Path) -> Iterator[None]:
    """Give a file that is written here the permissions of the user's umask; safetensors would write 0600."""
    path.touch()
    mode = path.stat().st_mode & 0o777
    yield
    with contextlib.suppress(PermissionError):  # file systems without modes
        path.chmod(mode)


def sync_path(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network drives cannot sync folders
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def as_os_error() -> Iterator[None]:
    """Turn the errors that safetensors and PyTorch raise, for example on a full disk, into an OSError."""
    from safetensors import SafetensorError  # the command line works without packages, to say which one is missing

    try:
        yield
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1]))) from None
    except RuntimeError as error:  # PyTorch's own, raised while handling the real one
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _cannot_write(path: Path, error: OSError) -> str:
    why = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return f"Cannot write {path}: {why}"
    free_mb = shutil.disk_usage(path.parent).free / 1e6
    return (
        f"No room for {path}: {why} ({free_mb:.0f} MB are free).\n"
        "No partial file is left. Free some space, or choose a folder on another disk "
        "(--cache-dir DIR for a prepared corpus, --checkpoint-dir DIR for a run, --out DIR for other results)."
    )


@contextlib.contextmanager
def lock(folder: Path, name: str = "lock", of: str = "run", flag: str = "--checkpoint-dir") -> Iterator[None]:
    """Lock the folder of a run, or of something else that `flag` names; rank 0 locks it for all processes.

    The lock ends with the process.
    """
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Without a buffer: closing a file would try again to write what did not fit on a full disk.
            file = held.enter_context(open(folder / name, "ab", buffering=0))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BlockingIOError:
            holder = (folder / name).read_text(encoding="utf-8") or "another process"
            raise ConfigError(
                f"The {of} in {folder} is in use by {holder}.\n"
                f"Wait until it ends, or keep the two apart with {flag} DIR."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"Cannot keep a {of} in {folder}: {error.strerror or error}.\n"
                f"Choose a folder you can write to with {flag} DIR."
            ) from error
        yield


def has_ended(folder: Path) -> bool:
    """True if the process that last held the lock is gone; False if unknown, as for another machine."""
    try:
        if (process := _last_holder(folder)) is None:
            return False
        os.kill(process, 0)  # sends nothing, and fails if there is no such process
    except (ProcessLookupError, OverflowError):
        return True
    except (OSError, UnicodeDecodeError):  # no lock, or another user's process
        return False
    return False


def held_by(folder: Path) -> int | None:
    """The process of this machine that holds the lock now; None if none does."""
    if has_ended(folder):  # looked at first: to try the lock of a run that is just starting would stop it
        return None
    try:
        with open(folder / "lock", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the number may be that of a later process
        return None
    except BlockingIOError:
        return _last_holder(folder)
    except OSError:
        return None


def _last_holder(folder: Path) -> int | None:
    found = re.fullmatch(r"process (\d+) on (.+)", (folder / "lock").read_text(encoding="utf-8").strip())
    return int(found[1]) if found is not None and found[2] == socket.gethostname() else None
