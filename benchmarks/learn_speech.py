"""What the runs of the learning experiment say, at several moments of their training, and what judges think of it.

OUT/MOMENT/     an evaluation as `myxtts evaluate` writes it; the sets that would be the same at every moment
                are judged only at the last
OUT.zip         all of it, in Opus where the library writes that: to judge on another machine
OUT/learning.json, OUT/learning.svg     the numbers, and curves where matplotlib is installed
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import statistics
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import soundfile
import soxr
import torch
import torch.nn.functional as F
from learn_corpus import RECORDINGS
from rich.console import Console
from rich.table import Table

from myxtts.config import STAGES
from myxtts.data.prepare import prepare
from myxtts.devices import Machine
from myxtts.errors import ConfigError, NoProgress
from myxtts.model.mel import DVAE_MEL, LogMel
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.run_dir import RunDir
from myxtts.settings import load
from myxtts.synthesis.synthesizer import VocoderName
from myxtts.synthesis.voices import VoiceEncoder
from myxtts.tools import evaluate
from myxtts.tools.evaluate import (
    ABOUT_FILE,
    ITEMS_FILE,
    OTHER,
    RECONSTRUCTED,
    RECORDING,
    SCORES_FILE,
    SYNTHESISED,
    Judges,
    held_out_sentences,
    score,
)

MEASURES = {"wer": "WER", "cer": "CER", "similarity": "similarity", "same_speaker_share": "≥ 0.345", "mos": "MOS"}
PACKED = (ITEMS_FILE, ABOUT_FILE, SCORES_FILE)
console = Console(width=140, highlight=False)


class Moment(NamedTuple):
    """A point of the training at which the model speaks."""

    label: str
    gpt_step: int
    vocoder: VocoderName
    sets: tuple[str, ...]


def gpt_steps(run: Path) -> list[int]:
    """Steps of the GPT of which there is a checkpoint."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "gpt").glob("step-[0-9]*"))


def moments(run: Path) -> list[Moment]:
    """Every checkpoint of the GPT by Griffin-Lim; the last one with all that is compared, and by its decoder."""
    steps = gpt_steps(run)
    spoken = [Moment(f"gpt-{step:06d}", step, "griffin-lim", (SYNTHESISED,)) for step in steps]
    if spoken:
        spoken[-1] = spoken[-1]._replace(sets=(RECORDING, RECONSTRUCTED, SYNTHESISED, OTHER))
    if spoken and any((run / "decoder").glob("step-[0-9]*")):
        decoded = spoken[-1]._replace(label=f"{spoken[-1].label}-decoder", vocoder="hifigan")
        spoken.append(decoded._replace(sets=(RECONSTRUCTED, SYNTHESISED, OTHER)))
    return spoken


def speak(run: Path, out: Path, moment: Moment, sampling: Mapping[str, Any]) -> None:
    """Say the held-out sentences as the run would have at that moment; what is there already stays."""
    folder = out / moment.label
    if (folder / ITEMS_FILE).is_file():
        about = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
        if any(value not in (None, about.get(name)) for name, value in sampling.items()):
            raise ConfigError(f"{folder} was spoken in another way; name another folder (--out)")
        return
    console.print(f"speaking at {moment.label} by {moment.vocoder}")
    asked = evaluate.EvaluationOptions(num_sentences=10**6, vocoder=moment.vocoder, **sampling)
    with as_it_was(run, moment) as then:
        evaluate.synthesise(then, folder, asked, NoProgress())
        losses = told_losses(then, folder) if moment.vocoder == "griffin-lim" else {}
    about = json.loads((folder / ABOUT_FILE).read_text(encoding="utf-8"))
    about |= {"run": run.name, "gpt_step": moment.gpt_step, "gpt_seconds": gpt_seconds(run, moment.gpt_step)}
    (folder / ABOUT_FILE).write_text(json.dumps(about | losses, indent=1), encoding="utf-8")
    _keep_sets(folder, moment.sets)


@torch.no_grad()
def told_losses(run: Path, folder: Path) -> dict[str, float]:
    """Loss of the held-out codes in nats: in a voice from another clip, from the clip itself, with a wrong text.

    If the second is much lower than the first, the GPT takes words from the reference instead of the text; by as
    much as the third is higher, it reads.
    """
    data = replace(load(run / "settings.yaml", {}).settings.data, tokenizer=run / "vocab.json")
    sentences = held_out_sentences(prepare(data), data, 10**6)
    device = torch.device("cuda", 0) if Machine.look().gpus else torch.device("cpu")
    model = RunDir(run).load_model(without=("decoder",)).to(device).eval()
    encoder, log_mel = VoiceEncoder(model, device), LogMel(DVAE_MEL).to(device)
    waves = [torch.from_numpy(sentence.clip.wave).to(device)[None] for sentence in sentences]
    codes = [model.dvae.encode(log_mel(wave, model.mel_stats))[0] for wave in waves]
    own, clip = (
        [encoder.voice([folder / getattr(sentence, name).file]) for sentence in sentences]
        for name in ("reference", "clip")
    )
    texts = [sentence.clip.ids for sentence in sentences]
    told = {
        "loss": (own, texts),
        "loss_hearing_clip": (clip, texts),
        "loss_wrong_text": (own, [*texts[1:], texts[0]]),
    }
    losses = {}
    for name, (voices, ids) in told.items():
        latents = evaluate.code_latents(model, voices, ids, codes)
        losses[name] = float(F.cross_entropy(model.gpt.mel_head(torch.cat(latents)), torch.cat(codes)))
    console.print("held-out codes: " + ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))
    return losses


@contextlib.contextmanager
def as_it_was(run: Path, moment: Moment) -> Iterator[Path]:
    """A folder that is the run, but for later checkpoints of the GPT; no weights are copied.

    Its corpus is the recordings alone: nobody is compared with himself at another speed.
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
        step = f"step-{moment.gpt_step:08d}"
        (then / "gpt").mkdir()
        (then / "gpt" / step).symlink_to(run.resolve() / "gpt" / step)
        yield then


def _keep_sets(folder: Path, sets: Collection[str]) -> None:
    """Judge only these sets; files that no item needs go."""
    items = json.loads((folder / ITEMS_FILE).read_text(encoding="utf-8"))
    items = [item for item in items if item["set"] in sets]
    (folder / ITEMS_FILE).write_text(json.dumps(items, ensure_ascii=False, indent=1), encoding="utf-8")
    needed = {folder / item[name] for item in items for name in ("file", "reference") if name in item}
    for path in folder.rglob("*.wav"):
        if path not in needed:
            path.unlink()


def gpt_seconds(run: Path, step: int) -> float | None:
    """How long the GPT had trained by a step, at the speed it mostly had."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    speeds = [line["step_ms"] for line in lines if line.get("stage") == "gpt" and line["kind"] == "step"]
    return step * statistics.median(speeds) / 1000 if speeds else None


def pack(out: Path, file: Path) -> None:
    """Everything to be judged in one file; sound in Opus, about a tenth of its size."""
    is_opus = "OPUS" in soundfile.available_subtypes("OGG")
    with zipfile.ZipFile(file, "w") as packed:
        for path in sorted(out.rglob("*")):
            name = path.relative_to(out)
            if path.suffix == ".wav" and is_opus:
                packed.writestr(str(name.with_suffix(".ogg")), _opus(path))
            elif path.name in PACKED:
                text = path.read_text(encoding="utf-8")
                packed.writestr(str(name), text.replace('.wav"', '.ogg"') if is_opus else text)
            elif path.suffix in (".wav", ".svg") or path.name == "learning.json":
                packed.write(path, str(name))
    console.print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")


def _opus(path: Path) -> bytes:
    wave, rate = soundfile.read(path, dtype="float32")
    wave = soxr.resample(wave, rate, OUTPUT_SAMPLE_RATE) if rate != OUTPUT_SAMPLE_RATE else wave
    content = io.BytesIO()
    soundfile.write(content, wave, OUTPUT_SAMPLE_RATE, format="OGG", subtype="OPUS")
    return content.getvalue()


def judge_all(out: Path, place: Judges) -> None:
    """Judge every moment that was not judged yet; a table of all, and curves."""
    rows: list[dict[str, Any]] = []
    for items in sorted(out.glob(f"*/{ITEMS_FILE}")):
        scores_file = items.with_name(SCORES_FILE)
        if not scores_file.is_file():
            console.print(f"judging {items.parent.name}")
            score(items.parent, place, NoProgress())
        scores = json.loads(scores_file.read_text(encoding="utf-8"))
        told = ("gpt_step", "gpt_seconds", "vocoder", "loss", "loss_hearing_clip", "loss_wrong_text")
        about = {name: scores["about"].get(name) for name in told}
        for name, summary in scores["summary"].items():
            rows.append({"moment": items.parent.name, "set": name, **about, **summary})
    (out / "learning.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    _draw(rows, out / "learning.svg")
    table = Table(title="what the judges say", title_justify="left")
    for column in ("moment", "set", "clips", *MEASURES.values()):
        table.add_column(column, justify="left" if column in ("moment", "set") else "right")
    for row in rows:
        values = ("" if row[name] is None else f"{row[name]:.2f}" for name in MEASURES)
        table.add_row(row["moment"], row["set"], str(row["clips"]), *values)
    console.print(table)


def _draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Curves over the steps of the GPT, with the recordings and what their codes allow as lines across."""
    if find_spec("matplotlib") is None:
        console.print("matplotlib is not installed: no curves are drawn")
        return
    import matplotlib  # type: ignore[import-not-found, unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {"griffin-lim": "Griffin-Lim", "hifigan": "decoder"}
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.5))
    for panel, name in zip(panels, ("wer", "similarity", "mos"), strict=True):
        judged = [row for row in rows if row[name] is not None]
        for vocoder, shown in names.items():
            said = [row for row in judged if row["set"] == SYNTHESISED and row["vocoder"] == vocoder]
            if said:
                steps, values = [row["gpt_step"] for row in said], [row[name] for row in said]
                panel.plot(steps, values, "o-", label=f"synthesised, {shown}")
        for row in judged:
            if row["set"] == RECORDING:
                panel.axhline(row[name], linestyle=":", color="grey", label="recordings")
            elif row["set"] == RECONSTRUCTED:
                style, shown = "--" if row["vocoder"] == "griffin-lim" else "-.", names[row["vocoder"]]
                panel.axhline(row[name], linestyle=style, color="grey", label=f"their codes, {shown}")
        panel.set(title=MEASURES[name], xlabel="steps of the GPT", xlim=(0, None))
    panels[0].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(file)
