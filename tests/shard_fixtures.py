"""Prepares small sharded corpora; imports little, because worker processes of the tests import it too."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from myxtts.config import DataSettings
from myxtts.data.jobs import JobOptions, Outcome, prepare_sharded
from myxtts.data.sources import Recording
from myxtts.errors import NO_PROGRESS

SMALL_SHARDS = JobOptions(shard_mb=0.2)


def settings(folder: Path, **values: object) -> DataSettings:
    return DataSettings(**{"train_data": folder, "language": "en", "num_workers": 2, "vocab_size": 256} | values)


def shard(folder: Path, out: Path, options: JobOptions = SMALL_SHARDS, **values: object) -> Outcome:
    return prepare_sharded(settings(folder, **values), out, options, None, NO_PROGRESS)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a corpus but its locks, of which no leftover may be among them."""
    locks = (".lock", ".making", ".held")
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in locks]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if ".myxtts" not in path.parts}


class _Deadly(type(Path())):  # type: ignore[misc]
    def stat(self, **_: bool) -> os.stat_result:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@dataclass(frozen=True)
class DeadlyUnit:
    audio: Path
    name: str = "unit"
    key: str = "1"
    num_bytes: int = 1

    def recordings(self) -> Iterator[Recording]:
        for number in range(4):
            yield Recording(
                f"r{number}", "A sentence.", _Deadly("x") if number == 2 else self.audio, language="en"
            )
