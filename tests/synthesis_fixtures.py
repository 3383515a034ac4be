"""Small random networks that speak, and what they speak with: texts, a vocabulary, a reference recording."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from conftest import make_voice

from myxtts.model.gpt import GPT
from myxtts.model.xtts import SIZES, XTTS
from myxtts.synthesis.generation import Generated, Prompt, Sampling, Shape
from myxtts.synthesis.slots import Slots, slots_of
from myxtts.synthesis.synthesizer import PUBLISHED_SAMPLING, Speech, Synthesizer
from myxtts.synthesis.voices import Voice
from myxtts.text.tokenizer import Tokenizer, train

CLEAR = replace(PUBLISHED_SAMPLING, guidance=2.0, central=True)
CPU = torch.device("cpu")
TEXTS = ["The harbour was quiet today.", "She opened the old window.", "Nobody planted another oak."]
LONG_TEXT = " ".join(TEXTS)


@cache
def vocabulary() -> Tokenizer:
    return train([text.lower() for text in TEXTS] * 2, ["en"] * 6, 120)


def make_model(*, stop_bias: float = 0.5, has_codebook: bool = False, **dims_options: Any) -> XTTS:
    """A network whose sentences end by chance after some seconds and whose vocoder can be heard."""
    tiny, known = SIZES["tiny"], vocabulary()
    dims = replace(
        tiny,
        gpt=replace(tiny.gpt, layers=1, dim=64, heads=1, num_codes=64, encoder_layers=1),
        dvae_hidden=8,
        dvae_codebook_dim=8,
        dvae_blocks=1,
        vocoder_channels=16,
        speaker_dim=16,
        speaker_filters=(8, 8, 8, 8),
        **dims_options,
    ).with_vocabulary(known.num_tokens, known.start_id, known.stop_id)
    torch.manual_seed(0)
    model = XTTS(dims)
    for name, weight in model.gpt.named_parameters():
        if name.startswith(("gpt.h", "text_embedding", "mel_embedding", "mel_head")) and weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.2)
    with torch.no_grad():
        model.gpt.mel_head.bias[dims.gpt.stop_code] += stop_bias
        for name, weight in model.hifigan_decoder.waveform_decoder.named_parameters():
            if name.endswith("original0"):
                weight.mul_(10)
            if name.startswith("conv_post"):
                weight.normal_()
    model.dvae.codebook.cluster_size.fill_(float(has_codebook))
    return model


def speaking(model: XTTS | None = None, **options: Any) -> Synthesizer:
    return Synthesizer(model or make_model(), vocabulary(), options.pop("device", CPU), **options)


def generate(gpt: GPT, prompts: list[Prompt], sampling: Sampling, **options: Any) -> list[Generated]:
    """Sentences generated side by side, with the latents of their codes."""
    ids, steps = (max(map(len, some)) for some in zip(*((each.ids, each.draws) for each in prompts), strict=True))
    shape = Shape(len(prompts) * slots_of(sampling), ids, steps)
    slots = Slots(gpt, shape, options.pop("vectors", None), **options)
    running = [slots.join(prompt, sampling) for prompt in prompts]
    while not all(each.has_ended for each in running):
        for each in slots.joining:
            slots.prefill(each)
        slots.step()
    return [slots.generated(each, 0, len(each.codes)) for each in running]


def num_codes(speech: Speech) -> list[int]:
    return [sentence.num_codes for sentence in speech.report.sentences]


@pytest.fixture(scope="session")
def synthesizer() -> Synthesizer:
    return speaking()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "anna.wav"
    soundfile.write(path, make_voice(5.0), 22050)
    return path


@pytest.fixture(scope="session")
def anna(synthesizer: Synthesizer, reference: Path) -> Voice:
    return synthesizer.voice([reference])
