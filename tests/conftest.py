"""Shared fixtures: small synthetic corpora, and a cache folder of its own for every test.

A machine that runs only the GPU tests may lack the audio libraries, so these are imported where they are used.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

# cuBLAS reads this once, at the first product of the process: plain runs on a GPU come before deterministic ones.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ["MYXTTS_BASE"] = "no-base-model"  # no test depends on whether this copy has one

from myxtts.config import DataSettings
from myxtts.observe.metrics import StepReport
from myxtts.settings import LoadedSettings, add_flags, flags_of, load, specs

pytest.register_assert_rewrite("training_fixtures", "training_processes")

if TYPE_CHECKING:
    from myxtts.data.clips import PreparedCorpus

Wave = npt.NDArray[np.float32]

SENTENCES = (
    "The harbour was quiet when the first boat came in.",
    "She opened the window and listened to the rain.",
    "Nobody remembered who had planted the old oak.",
    "The train to the coast leaves at a quarter past nine.",
    "He folded the letter twice and put it away.",
    "A small dog followed them all the way home.",
    "They talked about the weather until the tea was cold.",
    "The museum closes early on the last day of the month.",
    "Somewhere in the house a clock began to strike.",
    "We walked along the river and counted the bridges.",
    "Her brother had never learned how to swim.",
    "The baker puts the bread out before sunrise.",
    "I could not find the key in any of my pockets.",
    "Snow fell all night and covered the garden.",
    "The teacher asked a question that no one could answer.",
)

REPORT = StepReport(
    stage="gpt", step=250, total_steps=1000, epoch=3, lr=1.2e-4, grad_norm={"model": 0.8}, skipped=0,
    losses={"total": 3.412, "text_loss": 4.1, "audio_loss": 3.37}, clips_per_s=512.3, step_ms=107.24,
    step_cv=0.02, idle_share=0.003, ahead=12, memory_mb={"model": 12288.0}, eta_s=754.0, elapsed_s=60.0, mfu=0.47,
    rings={"host": (8, 16), "device": (1, 2), "model": (3, 3), "keep": (0, 4)},
    times_ms=(107.0, 107.2),
)  # fmt: skip
"""A step of a run in which all is well."""
EMPTY_RINGS = {"host": (0, 16), "device": (0, 2), "model": (0, 3)}


def step_record(step: int = REPORT.step, **values: Any) -> dict[str, Any]:
    """The same as a record of metrics.jsonl, with some values replaced."""
    return {"kind": "step", **vars(replace(REPORT, step=step, **values)), "written_at": 1000.0}


def validation_record(step: int, loss: float) -> dict[str, Any]:
    return {"kind": "validation", "stage": "gpt", "step": step, "losses": {"total": loss}, "is_best": True}


@pytest.fixture
def empty_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from the repository, whose configs/config.yaml would be read."""
    monkeypatch.chdir(tmp_path)


def load_command(command: str = "", text: str | bytes | None = None) -> LoadedSettings:
    """Settings as `train` loads them from a command line and the text of a file."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    namespace, unrecognized = parser.parse_known_args(command.split())
    file = namespace.config
    if text is not None:
        file = Path("file.yaml")
        file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    return load(file, flags_of(namespace), unrecognized)


def load_values(**values: object) -> LoadedSettings:
    """Settings by names without their sections, such as batch_size."""
    keys = {spec.name: spec.key for spec in specs().values()}
    return load(None, {keys[name]: value for name, value in values.items()})


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder of this test: nothing is ever read from or written to the real one."""
    folder = tmp_path_factory.mktemp("user-cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run PyTorch in one thread: small networks lose time to threads that wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def graphs() -> Any:
    """A backend for `torch.compile` that runs graphs as they are and counts them."""
    import torch

    def run(graph: Any, _: object) -> Any:
        run.count += 1
        return graph.forward

    torch._dynamo.reset()
    run.count = 0
    return run


def make_voice(seconds: float, rate: int = 22050, seed: int = 0) -> Wave:
    """Something like a voice: a buzz of moving pitch that swells and fades, with a little breath."""
    random = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    pitch = 110 + 20 * (seed % 7) + 15 * np.sin(2 * np.pi * 1.3 * time)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    buzz = sum(np.sin(harmonic * phase) / harmonic for harmonic in range(1, 12))
    swell = 0.4 + 0.3 * np.sin(2 * np.pi * 3 * time + seed)
    wave = 0.3 * buzz * swell + random.normal(0, 0.005, len(time))
    return np.clip(wave, -0.99, 0.99).astype(np.float32)


def write_corpus(
    folder: Path, texts: Sequence[str] = SENTENCES[:6], *, first: int = 0, seconds: float | None = None
) -> Path:
    """An LJSpeech folder with one clip per text, `clip000` and on; further calls add to its metadata."""
    import soundfile as sf

    (folder / "wavs").mkdir(parents=True, exist_ok=True)
    with open(folder / "metadata.csv", "a", encoding="utf-8") as metadata:
        for number, text in enumerate(texts, first):
            length = seconds or 0.6 + 0.13 * (number * 7 % 19)
            path = folder / "wavs" / f"clip{number:03d}.wav"
            sf.write(path, make_voice(length, seed=number), 22050, subtype="PCM_16")
            metadata.write(f"clip{number:03d}|{text}\n")
    return folder


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[..., Path]:
    """Writes a corpus below the test's folder: `make_corpus()`, `make_corpus(texts)`, `make_corpus(name="b")`."""

    def make(texts: Sequence[str] = SENTENCES[:6], *, name: str = "corpus", **options: float) -> Path:
        return write_corpus(tmp_path / name, texts, **options)

    return make


@pytest.fixture
def corpus(make_corpus: Callable[..., Path]) -> Path:
    """Six English clips."""
    return make_corpus()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"may not mount: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def run_prepare() -> Callable[..., PreparedCorpus]:
    """`prepare` with the language given, so that no detector is loaded."""
    from myxtts.data.prepare import prepare

    def run(folder: Path, *, verify: bool = False, **settings: object) -> PreparedCorpus:
        settings = {"train_data": folder, "language": "en", "num_workers": 2, "vocab_size": 256} | settings
        return prepare(DataSettings(**settings), verify=verify)

    return run


def contents(prepared: PreparedCorpus) -> dict[str, tuple[bytes, list[int], int, int]]:
    """Samples, ids, speaker and language of every clip by its name."""
    return {
        name: (part.audio[audio_row].tobytes(), part.ids[ids_row].tolist(), int(speaker), int(language))
        for part in (prepared.train, prepared.val)
        for name, audio_row, ids_row, speaker, language in zip(
            part.names, part.audio_rows, part.ids_rows, part.speakers, part.languages, strict=True
        )
    }


def prepare_and_count_reads(data: DataSettings, monkeypatch: pytest.MonkeyPatch) -> tuple[PreparedCorpus, int]:
    """`prepare`, and how many metadata files it read: none if a snapshot was used."""
    from myxtts.data import corpus
    from myxtts.data.prepare import prepare

    reads: list[Path] = []
    original = corpus.read_rows
    with monkeypatch.context() as patched:
        patched.setattr(corpus, "read_rows", lambda path: reads.append(path) or original(path))
        return prepare(data), len(reads)


class Messages:
    """What was logged since the last look."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def take(self) -> list[str]:
        texts = [record.getMessage() for record in self._caplog.records]
        self._caplog.clear()
        return texts

    def work(self) -> dict[str, int]:
        """How many rows were made, by the name of the cache that was built: {"AUDIO": 6, "TEXT": 6}."""
        texts = self.take()
        return {
            title.split()[1]: int(count.split()[1])
            for title, count in pairwise(texts)
            if title.startswith("BUILDING")
        }


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Messages:
    caplog.set_level(logging.INFO)
    return Messages(caplog)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs GPUs this machine does not have; look for them only when such a test was asked for."""
    needed = {"gpu": 1, "two_gpus": 2}
    asked = [(item, needed[name]) for item in items for name in needed if item.get_closest_marker(name)]
    if not asked:
        return
    import torch

    found = torch.cuda.device_count()
    for item, count in asked:
        if found < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} CUDA GPU(s), found {found}"))
