"""A short name for code and libraries that decide a result, so that what was made by others is never reused."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_METADATA = (".dist-info", ".egg-info")


def fingerprint_of(files: Iterable[Path], packages: Iterable[str] = ()) -> str:
    """Hex digest of the bytes of the files, the versions of the packages found, and Unicode's version."""
    import hashlib  # opens a shared library

    digest = hashlib.sha256(unicodedata.unidata_version.encode())
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    digest.update("\n".join(sorted(_installed(tuple(packages)))).encode())
    return digest.hexdigest()[:16]


@cache
def _installed(packages: tuple[str, ...]) -> list[str]:
    """name-version of the packages found, from folder names: reading their metadata would import far more."""
    prefixes = tuple(f"{package}-" for package in packages)
    found: set[str] = set()
    for folder in map(Path, sys.path):
        if prefixes and folder.is_dir():
            names = (entry.name for entry in folder.iterdir())
            found.update(name for name in names if name.lower().startswith(prefixes) and name.endswith(_METADATA))
    return sorted(found)
