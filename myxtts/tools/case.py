"""What a check looks at: the settings of a run, the machine, and the corpus as far as it can be known quickly.

Everything about the machine is in two objects that tests replace. Nothing here judges, prepares a corpus or starts
a training.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from myxtts.assembly.folder import PREFIXES, RunFolder
from myxtts.config import STAGES, DataSettings, ModelSettings, TrainingSettings
from myxtts.data import snapshot
from myxtts.data.cache import cache_root, user_cache
from myxtts.data.clips import Prepared
from myxtts.data.corpus import Corpus, read_corpus
from myxtts.data.prepare import EMBEDDED_CORPUS
from myxtts.devices import Gpu, Machine, Plan, make_plan
from myxtts.errors import ConfigError, DatasetError
from myxtts.host import available_bytes, usable_cores
from myxtts.model.lora import adapter_state, add_adapters
from myxtts.model.xtts import SIZES, XTTS, XTTSDims
from myxtts.settings import Loaded
from myxtts.settings.table import specs
from myxtts.settings.values import shown

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_DRIVER_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the last under WSL
_EXPANSION = {".wav": 1.0, ".flac": 2.0}
_COMPRESSED_EXPANSION = 12.0
"""How much larger audio is in the packed cache than in its file; of lossy formats the packed size is a guess."""


@dataclass(frozen=True)
class Host:
    """The machine apart from its GPUs."""

    cores: int
    available_bytes: int
    driver: str
    """Version of the NVIDIA driver; empty when there is none."""
    free_bytes: Callable[[Path], int]
    """Room on the disk that a path is on or would be made on."""

    @classmethod
    def look(cls) -> Host:
        """The machine this process runs on."""
        return cls(usable_cores(), available_bytes(), _driver_version(), _free_bytes)


@dataclass(frozen=True)
class Case:
    """Settings on a machine."""

    loaded: Loaded
    machine: Machine
    host: Host

    @property
    def model(self) -> ModelSettings:
        return self.loaded.settings.model

    @property
    def data(self) -> DataSettings:
        return self.loaded.settings.data

    @property
    def training(self) -> TrainingSettings:
        return self.loaded.settings.training

    @property
    def on_gpu(self) -> bool:
        return bool(self.machine.gpus)

    @property
    def is_dual(self) -> bool:
        """Two GPUs were asked for, whether there are two or not."""
        return self.data.data_gpu is not None

    @property
    def stages(self) -> tuple[str, ...]:
        """What would be trained."""
        return self.training.stages or (STAGES if self.training.init_from is None else ("gpt",))

    @property
    def asked(self) -> frozenset[str]:
        """Settings that the user chose."""
        return frozenset(key for key in self.loaded.origin if self.loaded.is_set(key))

    @cached_property
    def plan(self) -> Plan | ConfigError:
        """Which device would do what, or what is in its way."""
        try:
            return make_plan(self.data, self.machine)
        except ConfigError as error:
            return error

    @property
    def model_gpu(self) -> Gpu | None:
        """The card that would train; without a plan the one asked for, else the first; None on the CPU."""
        by_index: dict[int | None, Gpu] = {gpu.index: gpu for gpu in self.machine.gpus}
        if isinstance(self.plan, Plan):
            return by_index.get(self.plan.model.index)
        return by_index.get(self.data.model_gpu) or next(iter(self.machine.gpus), None)

    @property
    def model_memory_mb(self) -> int:
        """What the model role may take: its cap, its card, or on the CPU what the host has left."""
        if self.model_gpu is None:
            return self.host.available_bytes // 2**20
        return self.data.model_gpu_memory if self.data.enable_memory_isolation else self.model_gpu.memory_mb

    @property
    def network(self) -> XTTS:
        """The network without memory: only its shapes."""
        return _shapes(SIZES[self.model.size], self.model.lora_rank if "gpt" in self.stages else 0)

    def num_trained(self, stage: str) -> int:
        """Weights that a stage trains and keeps in its checkpoints, without the judges of the decoder."""
        if stage == "gpt" and self.model.lora_rank:
            return sum(value.numel() for value in adapter_state(self.network.gpt).values())
        state = self.network.state_dict()
        return sum(value.numel() for name, value in state.items() if name.startswith(PREFIXES[stage]))

    @cached_property
    def data_of_run(self) -> DataSettings:
        """The data settings with the vocabulary that the run has, or starts from."""
        folder = RunFolder(self.training.checkpoint_dir)
        if folder.has_begun and not self.training.reset_training:
            return replace(self.data, tokenizer=folder.vocabulary_file)
        if self.data.tokenizer is None and self.training.init_from is not None:
            return replace(self.data, tokenizer=self.training.init_from)
        return self.data

    @property
    def corpus_folders(self) -> list[Path]:
        return [self.data.train_data or EMBEDDED_CORPUS, *([self.data.val_data] if self.data.val_data else [])]

    @property
    def cache_folder(self) -> Path:
        """Where the prepared corpus lies or will lie."""
        folder = self.corpus_folders[0]
        return cache_root(folder, self.data.cache_dir or (user_cache() if folder == EMBEDDED_CORPUS else None))

    @cached_property
    def corpora(self) -> list[Corpus] | DatasetError:
        """The folders as their metadata describes them, or why that cannot be read."""
        try:
            return [read_corpus(folder) for folder in self.corpus_folders]
        except DatasetError as error:
            return error

    @cached_property
    def prepared(self) -> Prepared | None:
        """The corpus, if it was prepared with these settings and nothing has changed since."""
        data = self.data_of_run
        return snapshot.load(self.cache_folder, snapshot.state_of(self.corpus_folders, data))

    @property
    def has_stores(self) -> bool:
        """The corpus was prepared before, perhaps with other settings: little or nothing is left to do."""
        return any(self.cache_folder.glob("ids-*"))

    @property
    def packed_bytes(self) -> int:
        """About the size of the corpus in the packed cache."""
        if isinstance(self.corpora, DatasetError):
            return 0
        clips = [clip for corpus in self.corpora for clip in corpus.clips]
        return int(
            sum(
                clip.size_bytes * _EXPANSION.get(Path(clip.path).suffix.lower(), _COMPRESSED_EXPANSION)
                for clip in clips
            )
        )


def change(key: str, value: Any) -> dict[str, Any]:
    """The part of a finding that says which setting to change, to what, and how to write it."""
    spec = specs()[key]
    flag = spec.off_flags[0] if value is False else spec.flags[0]
    flag += "" if spec.kind is bool else f" {value}"
    return {"fix": f"give {flag}, or set {key}: {shown(value)}", "setting": key, "value": value}


@cache
def _shapes(dims: XTTSDims, lora_rank: int) -> XTTS:
    with torch.device("meta"):
        model = XTTS(dims)
    if lora_rank:
        add_adapters(model.gpt, lora_rank)
    return model


def _driver_version() -> str:
    try:
        words = _DRIVER_FILE.read_text(encoding="utf-8").splitlines()[0].split()
        return next((word for word in words if word[0].isdigit()), "unknown")
    except (OSError, IndexError):
        return "unknown" if any(path.exists() for path in _DRIVER_DEVICES) else ""


def _free_bytes(path: Path) -> int:
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
