"""The same training in coqui-tts' own code: clips per second, step times, memory and losses, to hold ours against.

    python benchmarks/rival.py --weights FOLDER --corpus FOLDER --batch 32 --precision bf16 --out rival.json

`--weights` is a folder that `myxtts.weights.save_folder` wrote, `--corpus` an LJSpeech-style one. Dataset, loader,
front ends, network, loss and optimizer are the rival's, with the settings of its LJSpeech recipe; only files are
decoded by soundfile, and losses are fetched after the last step: both flatter it. The learning rate falls as ours
does, so that curves can be compared.
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
from rich.console import Console
from rich.table import Table
from torch import Tensor

from myxtts.training.optim import Schedule

FALLBACK = Path(__file__).resolve().parent.parent / "vendor-coqui" / "fallback"
"""What coqui-tts needs and a machine without registries may lack; what is installed there comes first."""
INSTALL = """coqui-tts cannot be imported: {error}
In a virtual environment of its own, beside PyTorch (as for tests/test_parity_coqui.py):
  pip install librosa einops num2words transformers anyascii coqpit-config psutil ko-speech-tools six rich
  pip install --no-deps torchaudio==2.11.0 torchcodec==0.13.0 coqui-tts==0.28.0 coqui-tts-trainer==0.4.0"""
PACKAGES = (
    *("coqui-tts", "coqui-tts-trainer", "coqpit-config", "transformers", "huggingface-hub", "tokenizers"),
    *("torchaudio", "torchcodec", "librosa", "scipy", "numpy", "einops", "num2words", "soundfile", "torch"),
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DEVICE_NAME = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
console = Console(width=120, highlight=False)


@dataclass(frozen=True)
class Run:
    """What a run gave; times are of the steps after warm-up, losses (text, mel) of all, unweighted."""

    clips_per_s: float
    step_ms: float
    """Median, from the end of an update on the device to the end of the next."""
    cv: float
    loader_ms: float
    """Mean wait for the loader within a step."""
    peak_gib: float | None
    epochs: int
    """How often the loader's workers were started, which a small corpus pays for more often."""
    losses: list[tuple[float, float]]


def import_rival() -> tuple[Any, Callable[[Any], Any]]:
    """The rival's module of GPT training and what moves its batches; exits with 2 where it is not installed."""
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
    """What `torchaudio.load` returns, (channels, samples) and the rate, without FFmpeg."""
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    return torch.from_numpy(samples.T.copy()), rate


def read_samples(corpus: Path, language: str) -> list[dict[str, str]]:
    """The clips of a corpus as the rival's formatters list them; the last column is the text."""
    lines = (corpus / "metadata.csv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|") for line in lines if "|" in line]
    files = {row[0]: corpus / "wavs" / f"{row[0]}.wav" for row in rows}
    missing = [file for file in files.values() if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"{len(missing)} of {len(files)} clips have no file, such as {missing[0]}")
    return [{"text": row[-1], "audio_file": str(files[row[0]]), "language": language} for row in rows]


def build(trainer: Any, weights: Path, options: argparse.Namespace) -> Any:
    """The rival's model with our weights, on the device, set up as its recipe sets it up."""
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
    """It loads what fits and says nothing of the rest: make sure that every weight is the exported one."""
    for name, value in module.state_dict().items():
        if not torch.equal(value, exported[prefix + name].to(value.dtype)):
            raise RuntimeError(f"coqui-tts did not load {prefix}{name}: it would train another network than ours")


def make_loader(model: Any, samples: list[dict[str, str]]) -> Any:
    """The rival's loader; a corpus whose every text it refuses would make its dataset draw clips for ever."""
    loader = model.get_data_loader(config=model.config, is_eval=False, samples=samples)
    readable = 0
    for sample in samples:
        try:
            readable += len(loader.dataset.get_text(sample["text"], sample["language"])) <= 200
        except AssertionError:  # how it reports a letter that the vocabulary lacks
            continue
    console.print(f"{readable} of {len(samples)} texts are readable to coqui-tts; it passes over the others")
    if not readable:
        raise RuntimeError("coqui-tts can read none of the texts: is this the vocabulary of the corpus' language?")
    return loader


def train(model: Any, to_device: Callable[[Any], Any], loader: Any, options: argparse.Namespace) -> Run:
    """The loop of its trainer without logging, evaluation and checkpoints."""
    optimizer, batches = model.get_optimizer(), endless(loader)
    factor = Schedule(0, options.warm_up + options.steps).factor  # its own schedule never steps
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
    """What takes part, by package."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "-"
    return found


def check(trainer: Any) -> None:
    """Touch what a run needs beyond imports, and say what was found where."""
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
    parser.add_argument("--weights", type=Path, help="folder that myxtts exported")
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
    trainer, to_device = import_rival()
    if options.check:
        check(trainer)
        return
    torch.manual_seed(options.seed)
    if options.precision == "bf16":
        torch.backends.cuda.matmul.allow_tf32 = True
    model = build(trainer, options.weights, options)
    loader = make_loader(model, read_samples(options.corpus, options.language))
    run = train(model, to_device, loader, options)
    table = Table(title=f"coqui-tts {versions()['coqui-tts']}, {DEVICE_NAME}", title_justify="left")
    for column in ("precision", "batch", "clips/s", "step ms", "CV", "loader ms", "GiB", "text loss", "mel loss"):
        table.add_column(column, justify="right")
    (text, mel), peak = run.losses[-1], "-" if run.peak_gib is None else f"{run.peak_gib:.1f}"
    row = (f"{run.clips_per_s:,.1f}", f"{run.step_ms:.1f}", f"{run.cv:.1%}", f"{run.loader_ms:.1f}", peak)
    table.add_row(options.precision, str(options.batch), *row, f"{text:.3f}", f"{mel:.3f}")
    console.print(table)
    if options.out:
        result = asdict(run) | {"settings": vars(options), "device": DEVICE_NAME, "versions": versions()}
        options.out.write_text(json.dumps(result, indent=1, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
