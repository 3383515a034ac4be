"""A synthesizer from whatever holds a model: the folder of a run, or an XTTS-v2 folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from myxtts.assembly.folder import RunFolder
from myxtts.devices import Machine
from myxtts.errors import ConfigError
from myxtts.synthesis.reading import Limits
from myxtts.synthesis.synthesizer import Synthesizer, VocoderName, usable_vocoder

DECODER_PART = "hifigan_decoder.waveform_decoder"


def load_synthesizer(
    folder: Path, *, vocoder: VocoderName | None = None, device: torch.device | None = None
) -> Synthesizer:
    """The model of a folder, on the first GPU if there is one. A run without a decoder speaks by Griffin-Lim."""
    if device is None:
        device = torch.device("cuda", 0) if Machine.look().gpus else torch.device("cpu")
    run = RunFolder(folder)
    if not run.exists:
        if not folder.is_dir():
            raise ConfigError(f"There is no model in {folder}; name a run (--checkpoint-dir) or an XTTS-v2 folder")
        return Synthesizer.load(folder, device, vocoder=vocoder)
    imported = run.started_with().get("training.init_from") is not None
    speaks = imported or run.has_checkpoint("decoder")
    model = run.load_model(without=() if speaks else ("decoder",))
    data = _data_settings(folder)
    limits = None
    if not imported:  # what it never heard in training it cannot say
        limits = Limits(int(data.get("max_text_length", 200)), int(data.get("max_mel_frames", 800)) // 4)
    return Synthesizer(
        model,
        run.vocabulary(),
        device,
        vocoder=usable_vocoder([] if speaks else [DECODER_PART], vocoder),
        limits=limits,
        use_phonemes=bool(data.get("use_phonemes", False)),
    )


def _data_settings(folder: Path) -> dict[str, Any]:
    """The section `data` of the settings a run was last started with."""
    try:
        found = yaml.safe_load((folder / "settings.yaml").read_text(encoding="utf-8"))
        return dict(found["data"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return {}
