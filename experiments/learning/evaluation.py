"""Held-out sentences spoken by several checkpoints of a run, and their scores.

OUT/CHECKPOINT/    an evaluation as `myxtts evaluate` writes it; sets that do not depend on the checkpoint are
                   judged only with the last one
OUT.zip            all of it, in Opus if the library supports it, to be judged on another machine
OUT/learning.json, OUT/learning.svg     the scores, and their curves
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import statistics
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import soundfile
import soxr
import torch
import torch.nn.functional as F
from corpus import RECORDINGS
from curves import draw
from rich.console import Console
from rich.table import Table

from myxtts.config import STAGES
from myxtts.data.prepare import prepare
from myxtts.devices import Machine
from myxtts.errors import ConfigError, NoProgress
from myxtts.evaluation import (
    OTHER,
    RECONSTRUCTED,
    RECORDING,
    SYNTHESISED,
    HeldOutSentence,
    Judges,
    held_out_sentences,
)
from myxtts.model.mel import DVAE_MEL, LogMel
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.run_dir import RunDir
from myxtts.settings import load
from myxtts.synthesis.synthesizer import VocoderName
from myxtts.synthesis.voices import VoiceEncoder, read_references
from myxtts.tools import evaluate
from myxtts.tools.evaluate import ABOUT_FILE, ITEMS_FILE, SCORES_FILE, score

MEASURES = {"wer": "WER", "cer": "CER", "similarity": "similarity", "same_speaker_share": "≥ 0.345", "mos": "MOS"}
PACKED = (ITEMS_FILE, ABOUT_FILE, SCORES_FILE)
PACKED_SUFFIXES = (".svg", ".jsonl", ".log")
console = Console(width=140, highlight=False)


class Checkpoint(NamedTuple):
    """A step of the GPT and the vocoder it speaks through."""

    label: str
    gpt_step: int
    vocoder: VocoderName
    sets: tuple[str, ...]


def gpt_steps(run: Path) -> list[int]:
    """The steps of the GPT's checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "gpt").glob("step-[0-9]*"))


def checkpoints(run: Path) -> list[Checkpoint]:
    """Every checkpoint of the GPT by Griffin-Lim; the last one with all sets, and also by the decoder."""
    steps = gpt_steps(run)
    spoken = [Checkpoint(f"gpt-{step:06d}", step, "griffin-lim", (SYNTHESISED,)) for step in steps]
    if spoken:
        spoken[-1] = spoken[-1]._replace(sets=(RECORDING, RECONSTRUCTED, SYNTHESISED, OTHER))
    if spoken and any((run / "decoder").glob("step-[0-9]*")):
        decoded = spoken[-1]._replace(label=f"{spoken[-1].label}-decoder", vocoder="hifigan")
        spoken.append(decoded._replace(sets=(RECONSTRUCTED, SYNTHESISED, OTHER)))
    return spoken


def speak(run: Path, out: Path, checkpoint: Checkpoint, sampling: Mapping[str, Any]) -> None:
    """Speak the held-out sentences with a checkpoint, unless that was done before."""
    folder = out / checkpoint.label
    if (folder / ITEMS_FILE).is_file():
        about = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
        if any(value not in (None, about.get(name)) for name, value in sampling.items()):
            raise ConfigError(f"{folder} was spoken with other sampling settings; name another folder (--out)")
        return
    console.print(f"speaking at {checkpoint.label} by {checkpoint.vocoder}")
    asked = evaluate.EvaluationOptions(num_sentences=10**6, vocoder=checkpoint.vocoder, **sampling)
    with run_at(run, checkpoint) as then:
        evaluate.synthesise(then, folder, asked, NoProgress())
        losses = {}
        if checkpoint.vocoder == "griffin-lim":
            data = replace(load(then / "settings.yaml", {}).settings.data, tokenizer=then / "vocab.json")
            losses = held_out_losses(then, folder, held_out_sentences(prepare(data), data, 10**6))
    about = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
    step = checkpoint.gpt_step
    about |= {"run": run.name, "gpt_step": step, "gpt_seconds": gpt_seconds(run, step)}
    (folder / ABOUT_FILE).write_text(json.dumps(about | losses, indent=1), encoding="utf-8")
    _keep_sets(folder, checkpoint.sets)


@torch.no_grad()
def held_out_losses(run: Path, folder: Path, sentences: Sequence[HeldOutSentence]) -> dict[str, float]:
    """Cross-entropy of held-out codes in nats: conditioned on another clip, on the clip itself, on a wrong text.

    `folder` holds the recordings of the sentences and of their references.

    If the second is much lower than the first, the GPT copies words from the reference. The difference between the
    third and the first is how much it uses the text.
    """
    device = torch.device("cuda", 0) if Machine.look().gpus else torch.device("cpu")
    model = RunDir(run).load_model(without=("decoder",)).to(device).eval()
    encoder, log_mel = VoiceEncoder(model, device), LogMel(DVAE_MEL).to(device)
    waves = [torch.from_numpy(sentence.clip.wave).to(device)[None] for sentence in sentences]
    codes = [model.dvae.encode(log_mel(wave, model.mel_stats))[0] for wave in waves]
    own, clip = (
        [encoder.voice(read_references([folder / getattr(sentence, name).file]), name) for sentence in sentences]
        for name in ("reference", "clip")
    )
    texts = [sentence.clip.ids for sentence in sentences]
    cases = {
        "loss": (own, texts),
        "loss_hearing_clip": (clip, texts),
        "loss_wrong_text": (own, [*texts[1:], texts[0]]),
    }
    losses = {}
    for name, (voices, ids) in cases.items():
        latents = [evaluate.code_latents(model, *given) for given in zip(voices, ids, codes, strict=True)]
        losses[name] = float(F.cross_entropy(model.gpt.mel_head(torch.cat(latents)), torch.cat(codes)))
    console.print("held-out codes: " + ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))
    return losses


@contextlib.contextmanager
def run_at(run: Path, checkpoint: Checkpoint) -> Iterator[Path]:
    """Yield a copy of the run, made of links, whose only GPT checkpoint is this one.

    Its corpus is the unmodified recordings: no speaker is compared with a speed-changed copy of themselves.
    """
    with tempfile.TemporaryDirectory() as name:
        then = Path(name)
        for path in run.resolve().iterdir():
            if path.is_file() or (path.name in STAGES and path.name != "gpt"):
                (then / path.name).symlink_to(path)
        settings = (then / "settings.yaml").read_text(encoding="utf-8")
        (then / "settings.yaml").unlink()
        settings, found = re.subn(r"^( *train_data: .*/)\w+$", rf"\1{RECORDINGS}", settings, flags=re.MULTILINE)
        if found != 1:
            raise ConfigError(f"{run}/settings.yaml does not name the corpus of a stage as train_data")
        (then / "settings.yaml").write_text(settings, encoding="utf-8")
        step = f"step-{checkpoint.gpt_step:08d}"
        (then / "gpt").mkdir()
        (then / "gpt" / step).symlink_to(run.resolve() / "gpt" / step)
        yield then


def _keep_sets(folder: Path, sets: Collection[str]) -> None:
    """Drop the other sets and the audio files that no item refers to."""
    items = json.loads((folder / ITEMS_FILE).read_text(encoding="utf-8"))
    items = [item for item in items if item["set"] in sets]
    (folder / ITEMS_FILE).write_text(json.dumps(items, ensure_ascii=False, indent=1), encoding="utf-8")
    needed = {folder / item[name] for item in items for name in ("file", "reference") if name in item}
    for path in folder.rglob("*.wav"):
        if path not in needed:
            path.unlink()


def gpt_seconds(run: Path, step: int) -> float | None:
    """Training time up to a step, at the median step time."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    speeds = [line["step_ms"] for line in lines if line.get("stage") == "gpt" and line["kind"] == "step"]
    return step * statistics.median(speeds) / 1000 if speeds else None


def pack(out: Path, file: Path) -> None:
    """Pack everything to be judged into one file; Opus takes about a tenth of the size of WAV."""
    is_opus = "OPUS" in soundfile.available_subtypes("OGG")
    waves, temporary = sorted(out.rglob("*.wav")), file.with_suffix(".tmp")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as packed, ThreadPoolExecutor() as pool:
        for path, content in zip(waves, pool.map(_opus if is_opus else Path.read_bytes, waves), strict=True):
            packed.writestr(str(path.relative_to(out).with_suffix(".ogg" if is_opus else ".wav")), content)
        for path in sorted(out.rglob("*")):
            if path.name in PACKED:
                text = path.read_text(encoding="utf-8")
                packed.writestr(str(path.relative_to(out)), text.replace('.wav"', '.ogg"') if is_opus else text)
            elif path.suffix in PACKED_SUFFIXES or path.name == "learning.json":
                packed.write(path, str(path.relative_to(out)))
    temporary.replace(file)  # a process that is killed here leaves the last one
    console.print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")


def _opus(path: Path) -> bytes:
    wave, rate = soundfile.read(path, dtype="float32")
    wave = soxr.resample(wave, rate, OUTPUT_SAMPLE_RATE) if rate != OUTPUT_SAMPLE_RATE else wave
    content = io.BytesIO()
    soundfile.write(content, wave, OUTPUT_SAMPLE_RATE, format="OGG", subtype="OPUS")
    return content.getvalue()


def judge_all(out: Path, place: Judges) -> None:
    """Judge every checkpoint that has no scores yet; print a table and write the curves."""
    rows: list[dict[str, Any]] = []
    for items in sorted(out.glob(f"*/{ITEMS_FILE}")):
        scores_file = items.with_name(SCORES_FILE)
        if not scores_file.is_file():
            console.print(f"judging {items.parent.name}")
            score(items.parent, place, NoProgress())
        scores = json.loads(scores_file.read_text(encoding="utf-8"))
        known = ("gpt_step", "gpt_seconds", "vocoder", "loss", "loss_hearing_clip", "loss_wrong_text")
        about = {name: scores["about"].get(name) for name in known}
        for name, summary in scores["summary"].items():
            rows.append({"checkpoint": items.parent.name, "set": name, **about, **summary})
    (out / "learning.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    draw(rows, out / "learning.svg")
    table = Table(title="scores", title_justify="left")
    for column in ("checkpoint", "set", "clips", *MEASURES.values()):
        table.add_column(column, justify="left" if column in ("checkpoint", "set") else "right")
    for row in rows:
        values = ("" if row[name] is None else f"{row[name]:.2f}" for name in MEASURES)
        table.add_row(row["checkpoint"], row["set"], str(row["clips"]), *values)
    console.print(table)
