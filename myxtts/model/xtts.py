"""XTTS as a whole: its parts, its four sizes, and the names its weights have in the XTTS-v2 ecosystem.

    reference wave ─ conditioning mel ─► GPT's latents           reference wave ─► speaker embedding
    text ids, latents ─ GPT ─► codes ─ GPT once more ─► latents of the codes ─ vocoder, embedding ─► wave
    training: wave ─ mel ─ DVAE ─► the codes that the GPT learns to predict

Pure composition: no file, device or tokenizer is known here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from myxtts.config import MODEL_SIZES
from myxtts.model.dvae import DVAE
from myxtts.model.gpt import GPT, GPTDims
from myxtts.model.vocoder import HifiGanDecoder, SpeakerEncoder, modern_names

HEAD_DIM = 64
"""Channels of an attention head in every size: what packed attention kernels are fastest at."""
TRAINER_PREFIX = "xtts."
"""Coqui's trainer stores the model under this name, beside the DVAE and two mel front ends."""
_DVAE_BLOCK = re.compile(r"dvae\.encoder\.\d+\.net\.0\.weight")
_NOT_WEIGHTS = ("torch_mel_spectrogram_style_encoder.", "torch_mel_spectrogram_dvae.")
_LEFT_OVER = ("gpt.gpt_inference.", "gpt.gpt.wte.", "gpt.gpt.wpe.")
"""In old checkpoints: a second view of the same weights, and embeddings that XTTS removed from its GPT-2."""


@dataclass(frozen=True)
class XTTSDims:
    """Sizes of all parts; the defaults are XTTS-v2's. Stored in every checkpoint."""

    gpt: GPTDims = field(default_factory=GPTDims)
    dvae_hidden: int = 512
    dvae_codebook_dim: int = 512
    dvae_blocks: int = 3
    vocoder_channels: int = 512
    speaker_dim: int = 512
    speaker_filters: tuple[int, ...] = (32, 64, 128, 256)

    def with_vocabulary(self, text_tokens: int, start_text: int, stop_text: int) -> XTTSDims:
        """The same network for another text vocabulary."""
        gpt = replace(self.gpt, text_tokens=text_tokens, start_text=start_text, stop_text=stop_text)
        return replace(self, gpt=gpt)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> XTTSDims:
        filters = tuple(values["speaker_filters"])
        return cls(**{**values, "gpt": GPTDims(**values["gpt"]), "speaker_filters": filters})


SIZES = {
    "tiny": XTTSDims(
        gpt=GPTDims(layers=4, dim=256, heads=4, num_codes=256, encoder_layers=2),
        dvae_hidden=128,
        dvae_codebook_dim=128,
        dvae_blocks=2,
        vocoder_channels=128,
        speaker_dim=128,
        speaker_filters=(8, 16, 32, 64),
    ),
    "small": XTTSDims(
        gpt=GPTDims(layers=12, dim=512, heads=8, encoder_layers=4),
        dvae_hidden=256,
        dvae_codebook_dim=256,
        vocoder_channels=256,
        speaker_dim=256,
        speaker_filters=(16, 32, 64, 128),
    ),
    "normal": XTTSDims(),
    "big": XTTSDims(gpt=GPTDims(layers=36, dim=1280, heads=20)),
}
"""`normal` is XTTS-v2 to the last parameter."""
assert tuple(SIZES) == MODEL_SIZES


class XTTS(nn.Module):
    """All networks of XTTS. Attribute names are those of XTTS-v2's `model.pth`, with the DVAE added."""

    mel_stats: Tensor

    def __init__(self, dims: XTTSDims, *, dropout: float = 0.0, checkpointing: bool = False) -> None:
        super().__init__()
        self.dims = dims
        self.gpt = GPT(dims.gpt, dropout=dropout, checkpointing=checkpointing)
        self.hifigan_decoder = HifiGanDecoder(
            decoder_input_dim=dims.gpt.dim,
            upsample_initial_channel=dims.vocoder_channels,
            d_vector_dim=dims.speaker_dim,
        )
        self.hifigan_decoder.speaker_encoder = SpeakerEncoder(
            proj_dim=dims.speaker_dim, num_filters=dims.speaker_filters
        )
        self.dvae = DVAE(
            num_tokens=dims.gpt.num_codes,
            codebook_dim=dims.dvae_codebook_dim,
            hidden_dim=dims.dvae_hidden,
            num_resnet_blocks=dims.dvae_blocks,
        )
        self.register_buffer("mel_stats", torch.ones(dims.gpt.mel_channels))


def canonical_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A published or trainer checkpoint under the names of `XTTS`: prefixes, old names and left-overs resolved."""
    if any(name.startswith("model.") for name in state):  # model.pth keeps its weights below "model"
        state = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
    named = {}
    for name, value in state.items():
        bare = name.removeprefix(TRAINER_PREFIX)
        if not bare.startswith((*_NOT_WEIGHTS, *_LEFT_OVER)):
            named[bare] = value
    return modern_names(named)


def dims_of(state: Mapping[str, Tensor]) -> XTTSDims:
    """Sizes of the network that weights under canonical names belong to; absent parts get XTTS-v2's."""
    text_tokens, dim = state["gpt.text_embedding.weight"].shape
    values: dict[str, Any] = {
        "gpt": GPTDims(
            layers=_count(state, "gpt.gpt.h."),
            dim=dim,
            heads=dim // HEAD_DIM,
            text_tokens=text_tokens,
            num_codes=len(state["gpt.mel_embedding.weight"]) - 2,
            max_text=len(state["gpt.text_pos_embedding.emb.weight"]) - 2,
            max_codes=len(state["gpt.mel_pos_embedding.emb.weight"]) - 3,
            encoder_layers=_count(state, "gpt.conditioning_encoder.attn."),
        )
    }
    vocoder, speaker = "hifigan_decoder.waveform_decoder.conv_pre.weight", "hifigan_decoder.speaker_encoder."
    if vocoder in state:
        values["vocoder_channels"] = len(state[vocoder])
    if f"{speaker}fc.weight" in state:
        values["speaker_dim"] = len(state[f"{speaker}fc.weight"])
        stages = (state[f"{speaker}layer{number}.0.conv1.weight"] for number in range(1, 5))
        values["speaker_filters"] = tuple(len(weight) for weight in stages)
    if "dvae.codebook.embed" in state:
        values["dvae_hidden"] = len(state["dvae.encoder.0.0.weight"])
        values["dvae_codebook_dim"] = len(state["dvae.codebook.embed"])
        values["dvae_blocks"] = sum(
            bool(re.fullmatch(r"dvae\.encoder\.\d+\.net\.0\.weight", name)) for name in state
        )
    return XTTSDims(**values)


def _count(state: Mapping[str, Tensor], prefix: str) -> int:
    """How many numbered modules stand below a prefix."""
    return len({name.removeprefix(prefix).split(".")[0] for name in state if name.startswith(prefix)})
