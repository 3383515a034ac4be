"""Evaluation of a run: speak its held-out sentences, have them judged, and summarise the scores.

    OUT/recording/ reference/     clips as the network gets them: held out, and to take the voice from
    OUT/synthesised/              the text of a held-out clip in the voice of its reference
    OUT/reconstructed/            the clip's own codes back to sound: as good as a perfect GPT could be
    OUT/items.json about.json     what to judge, and how it was made;  scores.json  the result

The folder has everything the judges need, under names relative to it, so it can be judged on another machine. The
judges themselves are in `judge.py`, a script that runs in its own environment.
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

from myxtts.config import SAMPLE_RATE
from myxtts.data.prepare import prepare
from myxtts.devices import device_named, work_on
from myxtts.errors import ConfigError, Progress, progress_bar
from myxtts.evaluation import (
    OTHER,
    RECONSTRUCTED,
    RECORDING,
    SAME_SPEAKER,
    SYNTHESISED,
    HeldOutSentence,
    Judges,
    VoicedSentences,
    held_out_sentences,
    run_judges,
    summarise,
    with_voices,
)
from myxtts.files import write_text_atomically
from myxtts.model.mel import DVAE_MEL, LogMel
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.model.xtts import XTTS
from myxtts.run_dir import RunDir
from myxtts.settings import load
from myxtts.synthesis.generation import Decoding, Generated, Sampling, Shape
from myxtts.synthesis.synthesizer import (
    BATCH_SIZE,
    SAMPLING_FLAGS,
    Synthesizer,
    VocoderName,
    load_synthesizer,
    override_sampling,
    save_wave,
)
from myxtts.synthesis.vocoding import GriffinLim, HifiGan
from myxtts.synthesis.voices import Voice

ITEMS_FILE, ABOUT_FILE, SCORES_FILE = "items.json", "about.json", "scores.json"
LOST, WORSE = 0.35, 0.1
"""Error rates above that of the recordings at which speech is not intelligible, and worse than they are."""
UNRELIABLE = 0.6  # a judge with this error rate on real speech cannot judge
_UNSPACED = {"zh", "ja"}  # languages without spaces between words, where only letters can be counted
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationOptions:
    """The sentences to synthesise, and the way to speak them."""

    num_sentences: int = 40
    language: str | None = None
    vocoder: VocoderName | None = None
    seed: int = 1
    temperature: float | None = None
    best_gpt: bool = False
    guidance: float | None = None
    central: bool | None = None
    device: str | None = None


def synthesise(folder: Path, out: Path, options: EvaluationOptions, progress: Progress) -> None:
    """Speak the held-out sentences of a run and write everything that is to be judged."""
    run = RunDir(folder)
    if not run.exists:
        raise ConfigError(f"{folder} contains no run; give the --checkpoint-dir of a run")
    if "gpt" in run.untrained():
        raise ConfigError(f"The run in {folder} has not trained gpt yet: it cannot speak. Train it: --stages gpt")
    if not (settings_file := folder / "settings.yaml").is_file():
        raise ConfigError(f"{settings_file} is missing; it says what the run was trained on")
    data = replace(load(settings_file, {}).settings.data, tokenizer=run.vocabulary_file)
    prepared, notes = prepare(data, progress), run.newest_notes()
    trained_on = {saved.state["notes"]["identity"]["training clips"] for saved in notes.values()}
    if others := trained_on - {now := len(prepared.train)}:
        found = f"The run trained on {max(others)} clips, and its corpus now has {now} to train on"
        _log.warning("%s: sentences held out now may be among those it trained on", found)
    sentences = held_out_sentences(prepared, data, options.num_sentences, options.language)
    work_on(device := device_named(options.device))
    synthesizer = load_synthesizer(folder, vocoder=options.vocoder, device=device, best_gpt=options.best_gpt)
    sampling, vocoder = override_sampling(synthesizer.sampling, options), synthesizer.vocoder.name
    _write_recordings(out, sentences)
    work = with_voices(synthesizer, out, sentences)
    problems = _speak(synthesizer, out, work, sampling, options.seed, progress)
    del synthesizer
    _reconstruct(run, out, work, vocoder, options.best_gpt, device, progress)
    about = {
        "run": folder.resolve().name,
        "steps": {stage: saved.step for stage, saved in notes.items()},
        "best_gpt": options.best_gpt,
        "vocoder": vocoder,
        "seed": options.seed,
        **{name: getattr(sampling, name) for name in SAMPLING_FLAGS},
        "made_at": time.strftime("%Y-%m-%d %H:%M"),
    }
    items = [item for sentence, _ in work for item in _items(sentence, problems[sentence.clip.file])]
    _write_json(out / ABOUT_FILE, about)
    _write_json(out / ITEMS_FILE, items)  # last: it says that everything else is there


def _write_recordings(out: Path, sentences: Sequence[HeldOutSentence]) -> None:
    """Write the clips, after removing the files that would declare the folder complete."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for stale in (ITEMS_FILE, SCORES_FILE):
            (out / stale).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error
    clips = {clip.file: clip for each in sentences for clip in (each.clip, each.reference, each.other) if clip}
    for file, clip in clips.items():
        save_wave(out / file, clip.wave, SAMPLE_RATE)


def _speak(
    synthesizer: Synthesizer, out: Path, work: VoicedSentences, sampling: Sampling, seed: int, progress: Progress
) -> dict[str, str]:
    """Speak all sentences and write them, a batch at a time; returns what the quality check says of each clip."""
    problems: dict[str, str] = {}
    with progress_bar(progress, "Synthesising", len(work)) as advance:
        for first in range(0, len(work), BATCH_SIZE):
            sentences, voices = zip(*work[first : first + BATCH_SIZE], strict=True)
            texts, languages = [each.text for each in sentences], [each.language for each in sentences]
            speeches = synthesizer.speak_many(texts, voices, languages, sampling=sampling, seed=seed)
            for sentence, speech in zip(sentences, speeches, strict=True):
                save_wave(out / sentence.file(SYNTHESISED), speech.wave, OUTPUT_SAMPLE_RATE)
                found = [part.problem for part in speech.report.sentences if part.problem]
                problems[sentence.clip.file] = ", ".join(found)
            advance(len(sentences))
    return problems


@torch.no_grad()
def _reconstruct(
    run: RunDir,
    out: Path,
    work: VoicedSentences,
    vocoder_name: str,
    best_gpt: bool,
    device: torch.device,
    progress: Progress,
) -> None:
    """Turn the true codes of every clip into sound, by the vocoder the run speaks with."""
    trained = vocoder_name == HifiGan.name
    model = run.load_model(without=() if trained else ("decoder",), best_gpt=best_gpt, warn=False)
    model = model.to(device).eval().requires_grad_(False)
    model.hifigan_decoder.remove_weight_norm()
    dvae = (model.dvae, model.mel_stats)
    vocoder = HifiGan(model.hifigan_decoder, dvae) if trained else GriffinLim(*dvae)
    log_mel = LogMel(DVAE_MEL).to(device)
    with progress_bar(progress, "Reconstructing", len(work)) as advance:
        for sentence, voice in work:
            wave = torch.from_numpy(sentence.clip.wave).to(device)[None]
            codes = model.dvae.encode(log_mel(wave, model.mel_stats))[0]
            latents = code_latents(model, voice, sentence.clip.ids, codes)
            made = vocoder.begin(voice.speaker, 1.0).push(Generated(codes.cpu(), latents), last=True)
            save_wave(out / sentence.file(RECONSTRUCTED), made.numpy(), OUTPUT_SAMPLE_RATE)
            advance(1)


@torch.no_grad()
def code_latents(model: XTTS, voice: Voice, ids: Tensor, codes: Tensor) -> Tensor:
    """Latents [codes, dim] of a sentence with its codes given instead of chosen (teacher forcing)."""
    gpt, device = model.gpt, codes.device
    decoding = Decoding(gpt, Shape(1, len(ids), len(codes)))
    prefix = decoding.prefix(voice.latents.to(device), ids.to(device))
    inputs = torch.cat([codes.new_tensor([gpt.dims.start_code]), codes[:-1]])
    whole = torch.cat([prefix, decoding.embedded(inputs, decoding.slots[: len(codes)])])
    made = decoding.extend(whole, decoding.rows, decoding.slots[: len(whole)])
    latents: Tensor = gpt.norms(made[len(prefix) :])
    return latents


def _items(sentence: HeldOutSentence, problems: str) -> Iterator[dict[str, Any]]:
    """The items of items.json for one sentence."""
    facts = {"clip": sentence.clip.name, "speaker": sentence.speaker, "language": sentence.language}
    judged = {**facts, "text": sentence.text, "reference": sentence.reference.file}
    trouble = {"trouble": problems} if problems else {}
    yield {"set": RECORDING, "file": sentence.clip.file, **judged}
    yield {"set": RECONSTRUCTED, "file": sentence.file(RECONSTRUCTED), **judged}
    yield {"set": SYNTHESISED, "file": sentence.file(SYNTHESISED), **judged, **trouble}
    if sentence.other is not None:
        yield {"set": OTHER, "file": sentence.file(SYNTHESISED), **facts, "reference": sentence.other.file}


def _write_json(path: Path, content: object) -> None:
    write_text_atomically(path, json.dumps(content, ensure_ascii=False, indent=1))


def score(out: Path, judges: Judges, progress: Progress) -> dict[str, Any]:
    """Have the judges score what `synthesise` wrote to `out`; writes the result to scores.json and returns it."""
    path = out / ITEMS_FILE
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        cure = "Synthesise first: myxtts evaluate RUN --only synthesise"
        raise ConfigError(f"Nothing to judge: there is no {path}. {cure}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Synthesise again.") from None
    if not isinstance(items, list) or not items:
        raise ConfigError(f"{path} holds nothing to judge. Synthesise again.")
    try:
        about = dict(json.loads((out / ABOUT_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        about = {}
    first, *clips = run_judges(judges, path, len(items), progress)
    summary = summarise(clips)
    scores = {
        "reading": interpret(summary, {str(item.get("language")) for item in items}),
        "judges": first.get("judges", []),
        "same_speaker_from": SAME_SPEAKER,
        "about": about,
        "summary": summary,
        "clips": clips,
    }
    _write_json(out / SCORES_FILE, scores)
    return scores


def interpret(summary: Mapping[str, Mapping[str, Any]], languages: set[str]) -> str:
    """One line that says what the numbers of a summary mean."""
    measure = "cer" if languages <= _UNSPACED else "wer"
    real, codes, ours = (summary.get(name, {}).get(measure) for name in (RECORDING, RECONSTRUCTED, SYNTHESISED))
    parts = []
    if real is not None and ours is not None:
        meaning = _intelligibility(real, codes, ours, measure.upper())
        parts.append(f"{measure.upper()} {ours:.2f} against {real:.2f} of the recordings: {meaning}")
    spoken, other = summary.get(SYNTHESISED, {}), summary.get(OTHER, {}).get("similarity")
    if (similarity := spoken.get("similarity")) is not None:
        against = f" against {other:.2f} to another speaker" if other is not None else ""
        share = spoken["same_speaker_share"]
        often = "" if share >= 0.8 else "sometimes " if share >= 0.3 else "not yet "
        parts.append(f"similarity {similarity:.2f}{against}: the speaker is {often}recognised")
    if (quality := spoken.get("mos")) is not None:
        known = summary.get(RECORDING, {}).get("mos")
        parts.append(f"MOS {quality:.1f}" + (f" against {known:.1f}" if known is not None else ""))
    return "; ".join(parts) or "Nothing was judged."


def _intelligibility(real: float, codes: float | None, ours: float, word: str) -> str:
    if real >= UNRELIABLE:
        return "the judge does not understand the recordings either, so this says little"
    if ours - real < WORSE:
        return "as intelligible as they are"
    degree = "not intelligible yet" if ours - real >= LOST else "intelligible with mistakes"
    if codes is None:
        return degree
    lost_before = codes - real >= (ours - real) / 2
    cause = "codes and vocoder lose the words" if lost_before else "codes and vocoder keep the words, the GPT errs"
    return f"{degree} ({cause}: {word} {codes:.2f} reconstructed)"
