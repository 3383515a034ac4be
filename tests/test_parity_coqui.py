"""An exported model says the same in coqui-tts, which this test needs.

Install it in an environment of its own, away from this project's dependencies:

    python3 -m venv coqui && coqui/bin/pip install torch==2.13.0
    coqui/bin/pip install librosa soundfile numba einops inflect num2words transformers==5.22.2 anyascii pyyaml \
        "fsspec[http]" packaging pysbd matplotlib tqdm coqpit-config==0.2.5 psutil tensorboard huggingface-hub \
        ko-speech-tools monotonic-alignment-search==0.2.1 six
    coqui/bin/pip install --no-deps torchaudio==2.11.0 torchcodec==0.13.0
    coqui/bin/pip install --no-deps coqui-tts==0.28.0 coqui-tts-trainer==0.4.0
    coqui/bin/pip install pytest pytest-timeout hypothesis xxhash safetensors tokenizers
    coqui/bin/pip install --no-deps -e .
    coqui/bin/python -m pytest -m parity
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from synthesis_fixtures import generate

from myxtts.model.conditioning import pack_frames
from myxtts.model.gpt import GPTDims
from myxtts.model.xtts import XTTS, XTTSDims
from myxtts.synthesis.generation import Prompt, Sampling
from myxtts.text.tokenizer import train
from myxtts.weights import load_folder, save_folder

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[XTTS, Any]:
    """A network with two blocks, and what coqui-tts makes of its exported folder."""
    config_module = pytest.importorskip("TTS.tts.configs.xtts_config")
    model_module = pytest.importorskip("TTS.tts.models.xtts")
    vocabulary = train(["the quick brown fox"] * 3, ["en"] * 3, 300)
    dims = replace(XTTSDims(), gpt=GPTDims(layers=2, dim=128, heads=2))
    torch.manual_seed(0)
    ours = XTTS(dims.with_vocabulary(vocabulary.num_tokens, vocabulary.start_id, vocabulary.stop_id)).eval()
    for parameter in ours.gpt.parameters():  # fresh weights decide nothing: every code would be as likely
        torch.nn.init.normal_(parameter, std=0.08)
    folder = tmp_path_factory.mktemp("exported")
    save_folder(folder, ours, vocabulary)
    again = load_folder(folder).model.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in ours.state_dict().items())
    config = config_module.XttsConfig()
    config.load_json(str(folder / "config.json"))
    theirs = model_module.Xtts.init_from_config(config)
    theirs.load_checkpoint(config, checkpoint_dir=str(folder), eval=True, strict=True)
    return ours, theirs


def test_conditioning_latents_are_the_same(pair: tuple[XTTS, Any]) -> None:
    ours, theirs = pair
    mel = torch.randn(1, 80, 300)
    expected = theirs.gpt.get_style_emb(mel).transpose(1, 2)
    frames = pack_frames(mel[0].T.contiguous(), torch.tensor([300]), 300)
    torch.testing.assert_close(ours.gpt.condition(frames), expected, rtol=1e-4, atol=1e-4)


def test_greedy_codes_are_the_same(pair: tuple[XTTS, Any]) -> None:
    ours, theirs = pair
    voice = torch.randn(1, 32, 128)
    ids = torch.randint(3, 60, (1, 12))
    asked = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "output_attentions": False}
    asked |= {"repetition_penalty": 10.0, "top_k": 50, "top_p": 0.85, "temperature": 0.75, "length_penalty": 1.0}
    expected = theirs.gpt.generate(cond_latents=voice, text_inputs=ids, **asked)[0]
    prompt = Prompt(ids[0].tolist(), voice, torch.zeros(len(expected)))
    sampling = Sampling(greedy=True, repetition_penalty=10.0)
    codes = generate(ours.gpt, [prompt], sampling)[0].codes
    assert len(codes) > 5 and torch.equal(codes, expected[: len(codes)])


def test_the_vocoder_makes_the_same_wave(pair: tuple[XTTS, Any]) -> None:
    ours, theirs = pair
    latents, speaker = torch.randn(1, 20, 128), torch.nn.functional.normalize(torch.randn(1, 512, 1), dim=1)
    expected = theirs.hifigan_decoder(latents, g=speaker)
    torch.testing.assert_close(ours.hifigan_decoder(latents, speaker), expected, rtol=1e-4, atol=1e-4)


def test_speaker_embeddings_are_the_same(pair: tuple[XTTS, Any]) -> None:
    ours, theirs = pair
    wave = 0.1 * torch.randn(1, 32000)
    expected = theirs.hifigan_decoder.speaker_encoder.forward(wave.clone(), l2_norm=True)
    found = ours.hifigan_decoder.speaker_encoder(wave, l2_norm=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
