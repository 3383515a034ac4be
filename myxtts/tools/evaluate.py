"""Held-out sentences of a run, synthesised and laid beside their recordings, ready to be judged (`judging`).

    OUT/recording/ reference/     clips as the network hears them: held out, and to take the voice from
    OUT/synthesised/              the text of the former in the voice of the latter
    OUT/reconstructed/            the clip's own codes back to sound: as good as a perfect GPT could be

All files a judge needs are in the folder, under names relative to it: it can be judged on another machine. Nothing
here knows a judge.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from myxtts.assembly.folder import RunFolder
from myxtts.assembly.voice import load_synthesizer
from myxtts.audio import Wave, write
from myxtts.checkpoint import write_atomically
from myxtts.config import SAMPLE_RATE, STAGES
from myxtts.data.fill import Progress
from myxtts.data.prepare import prepare
from myxtts.devices import Machine
from myxtts.errors import ConfigError, DatasetError
from myxtts.model.generation import Decoding
from myxtts.model.mel import DVAE_MEL, LogMel
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.model.xtts import XTTS
from myxtts.settings import load
from myxtts.synthesis.griffin_lim import GriffinLim
from myxtts.synthesis.speech import Speech, as_asked
from myxtts.synthesis.synthesizer import BATCH_SIZE, Synthesizer, VocoderName
from myxtts.synthesis.vocoding import HifiGan
from myxtts.synthesis.voices import UnusableReference, Voice
from myxtts.synthesis.writer import Written
from myxtts.tools.held_out import RECORDING, Recording, Sentence, held_out
from myxtts.tools.judging import (
    ABOUT_FILE,
    ITEMS_FILE,
    OTHER,
    RECONSTRUCTED,
    SCORES_FILE,
    SYNTHESISED,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """What to synthesise, and how."""

    num_sentences: int = 40
    language: str | None = None
    vocoder: VocoderName | None = None
    seed: int = 1
    temperature: float | None = None
    best_gpt: bool = False
    """The GPT that validated best instead of the newest."""
    guidance: float | None = None
    central: bool | None = None


def synthesise(folder: Path, out: Path, asked: Asked, progress: Progress) -> None:
    """Say the held-out sentences of a run and write everything that is to be judged."""
    run = RunFolder(folder)
    if not run.exists:
        raise ConfigError(f"There is no run in {folder}; name the --checkpoint-dir of a training")
    if "gpt" in run.untrained():
        raise ConfigError(f"The run in {folder} has not trained gpt yet: it cannot speak. Train it: --stages gpt")
    settings_file = folder / "settings.yaml"
    if not settings_file.is_file():
        raise ConfigError(f"{settings_file} is missing: without it nobody knows what the run was trained on")
    data = replace(load(settings_file, {}).settings.data, tokenizer=run.vocabulary_file)
    sentences = held_out(prepare(data, progress), data, asked.num_sentences, asked.language)
    synthesizer = load_synthesizer(folder, vocoder=asked.vocoder, best_gpt=asked.best_gpt)
    _make_room(out)
    _write_recordings(out, sentences)
    voices = _voices(synthesizer, out, sentences)
    sentences = [sentence for sentence in sentences if sentence.reference.file in voices]
    spoken = _speak(synthesizer, out, sentences, voices, asked, progress)
    vocoder = next(iter(spoken.values())).report.vocoder
    sampling = as_asked(synthesizer.sampling, asked)
    del synthesizer
    _reconstruct(run, out, sentences, voices, vocoder, asked.best_gpt, progress)
    about = {
        "run": folder.resolve().name,
        "steps": {stage: step for stage in STAGES if (step := _last_step(folder / stage)) is not None},
        "best_gpt": asked.best_gpt,
        "vocoder": vocoder,
        "seed": asked.seed,
        "temperature": sampling.temperature,
        "repetition_penalty": sampling.repetition_penalty,
        "guidance": sampling.guidance,
        "central": sampling.central,
        "made_at": time.strftime("%Y-%m-%d %H:%M"),
    }
    items = [item for sentence in sentences for item in _items(sentence, spoken[sentence.clip.file])]
    _write_json(out / ABOUT_FILE, about)
    _write_json(out / ITEMS_FILE, items)  # last: it says that everything else is there


def _make_room(out: Path) -> None:
    """A folder in which nothing says any more that it is complete."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for stale in (ITEMS_FILE, SCORES_FILE):
            (out / stale).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error


def _write_recordings(out: Path, sentences: Sequence[Sentence]) -> None:
    clips: dict[str, Recording] = {}
    for sentence in sentences:
        clips |= {clip.file: clip for clip in (sentence.clip, sentence.reference, sentence.other) if clip}
    for file, clip in clips.items():
        _save(out / file, clip.wave, SAMPLE_RATE)


def _voices(synthesizer: Synthesizer, out: Path, sentences: Sequence[Sentence]) -> dict[str, Voice]:
    """The voice of every reference, by its file; those that cannot be one are told and left out."""
    voices: dict[str, Voice] = {}
    problem = ""
    for file in sorted({sentence.reference.file for sentence in sentences}):
        try:
            voices[file] = synthesizer.voice([out / file])
        except UnusableReference as error:
            problem = str(error)
            _log.warning("Sentences are passed over for want of a voice. %s", error)
    if not voices:
        raise DatasetError(f"None of the references can be used. {problem}")
    return voices


def _speak(
    synthesizer: Synthesizer,
    out: Path,
    sentences: Sequence[Sentence],
    voices: Mapping[str, Voice],
    asked: Asked,
    progress: Progress,
) -> dict[str, Speech]:
    """Say all sentences, some at a time, and write each as soon as it is said."""
    sampling = as_asked(synthesizer.sampling, asked)
    spoken: dict[str, Speech] = {}
    progress.begin("Synthesising", len(sentences))
    try:
        for batch in _batches(sorted(sentences, key=lambda sentence: len(sentence.text))):
            speeches = synthesizer.speak_many(
                [sentence.text for sentence in batch],
                [voices[sentence.reference.file] for sentence in batch],
                [sentence.language for sentence in batch],
                sampling=sampling,
                seed=asked.seed,
            )
            for sentence, speech in zip(batch, speeches, strict=True):
                _save(out / _beside(SYNTHESISED, sentence), speech.wave, OUTPUT_SAMPLE_RATE)
                spoken[sentence.clip.file] = speech
            progress.advance(len(batch))
    finally:
        progress.end()
    return spoken


@torch.no_grad()
def _reconstruct(
    run: RunFolder,
    out: Path,
    sentences: Sequence[Sentence],
    voices: Mapping[str, Voice],
    vocoder: str,
    best_gpt: bool,
    progress: Progress,
) -> None:
    """The true codes of every clip to sound, in the way the run speaks."""
    device = torch.device("cuda", 0) if Machine.look().gpus else torch.device("cpu")
    trained = vocoder == HifiGan.name
    model = run.load_model(without=() if trained else ("decoder",), best_gpt=best_gpt)
    model = model.to(device).eval().requires_grad_(False)
    model.hifigan_decoder.remove_weight_norm()
    sounding = HifiGan(model.hifigan_decoder, BATCH_SIZE) if trained else GriffinLim(model.dvae, model.mel_stats)
    log_mel = LogMel(DVAE_MEL).to(device)
    progress.begin("Reconstructing", len(sentences))
    try:
        for batch in _batches(sentences):
            waves = [torch.from_numpy(sentence.clip.wave).to(device)[None] for sentence in batch]
            codes = [model.dvae.encode(log_mel(wave, model.mel_stats))[0] for wave in waves]
            own = [voices[sentence.reference.file] for sentence in batch]
            latents = code_latents(model, own, [sentence.clip.ids for sentence in batch], codes)
            written = [Written(some.cpu(), latent) for some, latent in zip(codes, latents, strict=True)]
            made = sounding.waves(written, [voice.speaker for voice in own], 1.0)
            for sentence, wave in zip(batch, made, strict=True):
                _save(out / _beside(RECONSTRUCTED, sentence), wave.numpy(), OUTPUT_SAMPLE_RATE)
            progress.advance(len(batch))
    finally:
        progress.end()


@torch.no_grad()
def code_latents(
    model: XTTS, voices: Sequence[Voice], ids: Sequence[Tensor], codes: Sequence[Tensor]
) -> list[Tensor]:
    """Latents [codes, dim] of every sentence when the GPT is told its codes instead of choosing them."""
    gpt, device = model.gpt, codes[0].device
    pad = torch.nn.utils.rnn.pad_sequence
    num_ids = torch.tensor([len(one) for one in ids], device=device)
    told = pad([torch.cat([one.new_tensor([gpt.dims.start_code]), one[:-1]]) for one in codes], batch_first=True)
    latents = torch.cat([voice.latents for voice in voices]).to(device)
    decoding = Decoding(gpt, latents, pad(list(ids), batch_first=True).to(device), num_ids, told.shape[1])
    steps = [decoding.step(told[:, at], decoding.slots[at : at + 1])[1] for at in range(told.shape[1])]
    every = torch.stack(steps, dim=1)
    return [every[row, : len(one)] for row, one in enumerate(codes)]


def _items(sentence: Sentence, speech: Speech) -> Iterator[dict[str, Any]]:
    """What the judges are asked about one sentence."""
    facts = {"clip": sentence.clip.name, "speaker": sentence.speaker, "language": sentence.language}
    judged = {**facts, "text": sentence.text, "reference": sentence.reference.file}
    troubles = [part.trouble for part in speech.report.sentences if part.trouble]
    told = {"trouble": ", ".join(troubles)} if troubles else {}
    yield {"set": RECORDING, "file": sentence.clip.file, **judged}
    yield {"set": RECONSTRUCTED, "file": _beside(RECONSTRUCTED, sentence), **judged}
    yield {"set": SYNTHESISED, "file": _beside(SYNTHESISED, sentence), **judged, **told}
    if sentence.other is not None:
        yield {"set": OTHER, "file": _beside(SYNTHESISED, sentence), **facts, "reference": sentence.other.file}


def _beside(folder: str, sentence: Sentence) -> str:
    return f"{folder}/{sentence.clip.file_name}"


def _batches(sentences: Sequence[Sentence]) -> Iterator[Sequence[Sentence]]:
    for first in range(0, len(sentences), BATCH_SIZE):
        yield sentences[first : first + BATCH_SIZE]


def _last_step(folder: Path) -> int | None:
    steps = [int(path.name.removeprefix("step-")) for path in folder.glob("step-[0-9]*")]
    return max(steps, default=None)


def _save(path: Path, wave: Wave, rate: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, wave, rate)
    except (OSError, RuntimeError) as error:  # libsndfile's own errors are RuntimeErrors
        raise ConfigError(f"{path} cannot be written: {error}") from error


def _write_json(path: Path, content: object) -> None:
    text = json.dumps(content, ensure_ascii=False, indent=1)
    write_atomically(path, lambda unfinished: _write(unfinished, text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
