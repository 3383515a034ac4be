"""A synthesizer from whatever holds a model: the folder of a run, or an XTTS-v2 folder; a run's first words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from myxtts.assembly.folder import RunFolder
from myxtts.config import LANGUAGES, SAMPLE_RATE, DataSettings
from myxtts.data.clips import ClipSet
from myxtts.data.corpus import read_corpus
from myxtts.data.prepare import EMBEDDED_CORPUS
from myxtts.devices import Machine
from myxtts.errors import ConfigError, DatasetError
from myxtts.synthesis.speech import Speech
from myxtts.synthesis.synthesizer import Synthesizer, VocoderName, usable_vocoder
from myxtts.weights import STAGE_PARTS, Provenance

SAMPLE_FILE = "sample.wav"
SAMPLE_SEED = 0
_ENOUGH_SECONDS = 3.0
"""Of a recording for its voice to be caught."""


def load_synthesizer(
    folder: Path,
    *,
    vocoder: VocoderName | None = None,
    device: torch.device | None = None,
    best_gpt: bool = False,
) -> Synthesizer:
    """The model of a folder, on the first GPU if there is one. A run without a decoder speaks by Griffin-Lim.

    `best_gpt` takes the GPT of a run that validated best instead of the newest.
    """
    if device is None:
        device = torch.device("cuda", 0) if Machine.look().gpus else torch.device("cpu")
    run = RunFolder(folder)
    if not run.exists:
        if not folder.is_dir():
            raise ConfigError(
                f"There is no model in {folder}, for there is no such folder. Name that of a training run or of "
                "XTTS-v2 (myxtts speak: --model DIR)"
            )
        if best_gpt:
            raise ConfigError(f"--best chooses among the checkpoints of a run; {folder} is a folder of weights")
        return Synthesizer.load(folder, device, vocoder=vocoder)
    known = provenance(run)
    vocoder = usable_vocoder([STAGE_PARTS[stage] for stage in known.untrained], vocoder)
    model = run.load_model(without=known.untrained, best_gpt=best_gpt)
    return Synthesizer.suited(model, run.vocabulary(), device, known, vocoder)


def provenance(run: RunFolder) -> Provenance:
    """What speaking with the weights of a run takes into account."""
    data = _data_settings(run.folder)
    lengths = {name: int(data[name]) for name in ("max_text_length", "max_mel_frames") if name in data}
    phonemes = bool(data.get("use_phonemes", False))
    return Provenance(tuple(run.untrained()), run.from_scratch, use_phonemes=phonemes, **lengths)


@dataclass(frozen=True)
class Example:
    """A clip of a corpus, for a run to be tried with: its voice, its words."""

    recording: Path
    text: str
    language: str


def example(data: DataSettings, clips: ClipSet) -> Example | None:
    """The first clip in the corpus's main language that is long enough for a voice, or the longest.

    None if the corpus is no longer there, or no longer has the clip.
    """
    main_language = np.bincount(clips.languages).argmax()
    seconds = np.where(clips.languages == main_language, clips.num_samples / SAMPLE_RATE, 0.0)
    chosen = int(np.argmax(np.minimum(seconds, _ENOUGH_SECONDS)))
    folder = data.train_data or EMBEDDED_CORPUS
    try:
        found = [clip for clip in read_corpus(folder).clips if clip.id == clips.names[chosen]]
    except (DatasetError, OSError):
        return None
    return Example(folder / found[0].path, found[0].text, LANGUAGES[main_language]) if found else None


def speak_sample(folder: Path, said: Example, device: torch.device | None = None) -> Speech:
    """Let a run say a sentence in a voice of its corpus, the same way each time; writes `SAMPLE_FILE` there."""
    synthesizer = load_synthesizer(folder, device=device)
    voice = synthesizer.voice([said.recording])
    speech = synthesizer.speak(said.text, voice, said.language, seed=SAMPLE_SEED)
    speech.save(folder / SAMPLE_FILE)
    return speech


def _data_settings(folder: Path) -> dict[str, Any]:
    """The section `data` of the settings a run was last started with."""
    try:
        found = yaml.safe_load((folder / "settings.yaml").read_text(encoding="utf-8"))
        return dict(found["data"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return {}
