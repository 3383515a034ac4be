"""The same training with coqui-tts: clips per second, step times, memory and losses, for comparison.

    python benchmarks/coqui.py --weights FOLDER --corpus FOLDER --batch 32 --precision bf16 --out coqui.json

`--weights` is a folder written by `benchmarks/train.py weights`, `--corpus` an LJSpeech-style one. Dataset,
loader, front ends, network, loss and optimiser are coqui-tts', with the settings of its LJSpeech recipe. It is
favoured twice: files are decoded by soundfile, and losses are read after the last step. The learning rate falls as
ours does, so that the curves can be compared.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import soundfile
import torch
from harness import console, make_table
from torch import Tensor

from myxtts.training.optim import Schedule

FALLBACK = Path(__file__).resolve().parent.parent / "vendor-coqui" / "fallback"
"""Dependencies of coqui-tts for a machine without package registries; installed packages take precedence."""
INSTALL = """coqui-tts cannot be imported: {error}
In a separate virtual environment with PyTorch (as for tests/test_parity_coqui.py):
  pip install librosa einops num2words transformers anyascii coqpit-config psutil ko-speech-tools six rich
  pip install --no-deps torchaudio==2.11.0 torchcodec==0.13.0 coqui-tts==0.28.0 coqui-tts-trainer==0.4.0"""
PACKAGES = (
    *("coqui-tts", "coqui-tts-trainer", "coqpit-config", "transformers", "huggingface-hub", "tokenizers"),
    *("torchaudio", "torchcodec", "librosa", "scipy", "numpy", "einops", "num2words", "soundfile", "torch"),
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DEVICE_NAME = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"


@dataclass(frozen=True)
class Run:
    """Results of a run: times of the steps after warm-up, unweighted losses (text, mel) of all steps."""

    clips_per_s: float
    step_ms: float
    """Median time from the end of one update on the device to the end of the next."""
    cv: float
    loader_ms: float
    """Mean wait for the loader within a step."""
    peak_gib: float | None
    epochs: int
    """How often the loader's workers were started; a small corpus restarts them more often."""
    losses: list[tuple[float, float]]


def import_coqui() -> tuple[Any, Callable[[Any], Any]]:
    """Return coqui-tts' GPT trainer module and its `to_cuda`; exit with 2 if it is not installed."""
    if FALLBACK.is_dir():
        sys.path.append(str(FALLBACK))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        trainer = importlib.import_module("TTS.tts.layers.xtts.trainer.gpt_trainer")
        to_device = importlib.import_module("trainer.generic_utils").to_cuda
        importlib.import_module("torchaudio").load = load_wave  # type: ignore[attr-defined]
    except ImportError as error:
        console.print(INSTALL.format(error=error), markup=False)
        sys.exit(2)
    return trainer, to_device


def load_wave(path: str) -> tuple[Tensor, int]:
    """Return (channels, samples) and the sample rate, like `torchaudio.load` but without FFmpeg."""
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    return torch.from_numpy(samples.T.copy()), rate


def read_samples(corpus: Path, language: str) -> list[dict[str, str]]:
    """The clips of a corpus in the form of coqui-tts' formatters; the last column is the text."""
    lines = (corpus / "metadata.csv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|") for line in lines if "|" in line]
    files = {row[0]: corpus / "wavs" / f"{row[0]}.wav" for row in rows}
    missing = [file for file in files.values() if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{len(missing)} of {len(files)} clips have no file, such as {missing[0]}")
    return [{"text": row[-1], "audio_file": str(files[row[0]]), "language": language} for row in rows]


def build(trainer: Any, weights: Path, options: argparse.Namespace) -> Any:
    """coqui-tts' model with our weights, on the device, configured as in its recipe."""
    config = trainer.GPTTrainerConfig()
    config.load_json(str(weights / "config.json"))
    config.batch_size, config.num_loader_workers = options.batch, options.workers
    config.lr, config.training_seed = options.lr, options.seed
    config.optimizer, config.optimizer_wd_only_on_weights = "AdamW", True
    config.optimizer_params = {"betas": [0.9, 0.96], "eps": 1e-8, "weight_decay": 1e-2}
    arguments = config.model_args
    arguments.xtts_checkpoint, arguments.dvae_checkpoint = str(weights / "model.pth"), str(weights / "dvae.pth")
    arguments.tokenizer_file, arguments.mel_norm_file = str(weights / "vocab.json"), str(weights / "mel_stats.pth")
    arguments.min_conditioning_length, arguments.max_conditioning_length = 66150, 132300
    arguments.max_wav_length, arguments.max_text_length = 255995, 200
    model = trainer.GPTTrainer(config)
    require_loaded(model.xtts.gpt, torch.load(weights / "model.pth", weights_only=True)["model"], "gpt.")
    require_loaded(model.dvae, torch.load(weights / "dvae.pth", weights_only=True), "")
    return model.to(DEVICE)


def require_loaded(module: torch.nn.Module, exported: dict[str, Tensor], prefix: str) -> None:
    """coqui-tts silently skips weights that do not fit: check that every weight is the exported one."""
    for name, value in module.state_dict().items():
        if not torch.equal(value, exported[prefix + name].to(value.dtype)):
            raise RuntimeError(f"coqui-tts did not load {prefix}{name}: it would train a different network")


def make_loader(model: Any, samples: list[dict[str, str]]) -> Any:
    """coqui-tts' loader. If it can read none of the texts, its dataset would draw clips for ever."""
    loader = model.get_data_loader(config=model.config, is_eval=False, samples=samples)
    readable = 0
    for sample in samples:
        try:
            readable += len(loader.dataset.get_text(sample["text"], sample["language"])) <= 200
        except AssertionError:  # raised for a letter that the vocabulary lacks
            continue
    console.print(f"{readable} of {len(samples)} texts are readable to coqui-tts; it skips the others")
    if not readable:
        raise RuntimeError("coqui-tts can read none of the texts: is this the vocabulary of the corpus' language?")
    return loader


def train(model: Any, to_device: Callable[[Any], Any], loader: Any, options: argparse.Namespace) -> Run:
    """The loop of coqui-tts' trainer without logging, evaluation and checkpoints."""
    optimizer, batches = model.get_optimizer(), endless(loader)
    factor = Schedule(0, options.warm_up + options.steps).factor  # coqui-tts never steps its own schedule
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model.on_train_epoch_start(SimpleNamespace(model=model))
    waits, ends, clips, losses = [], [], [], []
    for _ in range(options.warm_up + options.steps):
        asked_at = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - asked_at)
        clips.append(len(batch["text_lengths"]))
        batch = {name: to_device(value) for name, value in model.format_batch(batch).items()}
        batch = model.format_batch_on_device(batch)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=options.precision == "bf16"):
            _, loss = model.train_step(batch, None)
        loss["loss"].backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(torch.stack([loss["loss_text_ce"].detach(), loss["loss_mel_ce"].detach()]))
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    times = [end - start for start, end in pairwise(ends[options.warm_up - 1 :])]
    arguments = model.config.model_args
    weights = torch.tensor([arguments.gpt_loss_text_ce_weight, arguments.gpt_loss_mel_ce_weight])
    curve = torch.stack(losses).float().cpu() / weights
    return Run(
        clips_per_s=sum(clips[options.warm_up :]) / sum(times),
        step_ms=1000 * statistics.median(times),
        cv=statistics.pstdev(times) / statistics.mean(times),
        loader_ms=1000 * statistics.mean(waits[options.warm_up :]),
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else None,
        epochs=math.ceil(len(ends) / len(loader)),
        losses=[(text, mel) for text, mel in curve.tolist()],
    )


def endless(loader: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    while True:
        yield from loader


def versions() -> dict[str, str]:
    """Version by package."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "-"
    return found


def check(trainer: Any) -> None:
    """Exercise what a run needs beyond imports, and print versions and locations."""
    words = trainer.VoiceBpeTokenizer().preprocess_text("It is 12 o'clock.", "en")
    mel = trainer.TorchMelSpectrogram(mel_norm_file=None)(torch.randn(1, 22050))
    console.print(f"{words!r}, mel of a second {tuple(mel.shape)}")
    for package, version in versions().items():
        module = sys.modules.get({"coqui-tts": "TTS", "coqui-tts-trainer": "trainer"}.get(package, package))
        console.print(f"{package:18} {version:14} {getattr(module, '__file__', '') or ''}", soft_wrap=True)
    console.print(DEVICE_NAME)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only import everything and print versions")
    parser.add_argument("--weights", type=Path, help="folder written by train.py weights")
    parser.add_argument("--corpus", type=Path, help="folder with metadata.csv and wavs/")
    parser.add_argument("--language", default="en", help="[en]")
    parser.add_argument("--batch", type=int, default=32, help="clips of a step [32]")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: with TF32 [fp32]")
    parser.add_argument("--steps", type=int, default=30, help="timed steps [30]")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before them, at least 1 [5]")
    parser.add_argument("--lr", type=float, default=5e-6, help="[5e-6]")
    parser.add_argument("--workers", type=int, default=8, help="processes of its loader [8]")
    parser.add_argument("--seed", type=int, default=1, help="[1]")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if not options.check and not (options.weights and options.corpus):
        parser.error("--weights and --corpus are needed (or --check)")
    if min(options.warm_up, options.steps) < 1:
        parser.error("--warm-up and --steps must be at least 1")
    return options


def main() -> None:
    options = parse_options()
    trainer, to_device = import_coqui()
    if options.check:
        check(trainer)
        return
    torch.manual_seed(options.seed)
    if options.precision == "bf16":
        torch.backends.cuda.matmul.allow_tf32 = True
    model = build(trainer, options.weights, options)
    loader = make_loader(model, read_samples(options.corpus, options.language))
    run = train(model, to_device, loader, options)
    columns = ("precision", "batch", "clips/s", "step ms", "CV", "loader ms", "GiB", "text loss", "mel loss")
    table = make_table(f"coqui-tts {versions()['coqui-tts']}, {DEVICE_NAME}", *columns)
    (text, mel), peak = run.losses[-1], "-" if run.peak_gib is None else f"{run.peak_gib:.1f}"
    row = (f"{run.clips_per_s:,.1f}", f"{run.step_ms:.1f}", f"{run.cv:.1%}", f"{run.loader_ms:.1f}", peak)
    table.add_row(options.precision, str(options.batch), *row, f"{text:.3f}", f"{mel:.3f}")
    console.print(table)
    if options.out:
        result = asdict(run) | {"settings": vars(options), "device": DEVICE_NAME, "versions": versions()}
        options.out.write_text(json.dumps(result, indent=1, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
