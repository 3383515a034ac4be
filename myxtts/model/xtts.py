"""XTTS as a whole: its parts, its sizes, and the names of its weights in the XTTS-v2 ecosystem.

    reference audio ─ conditioning network ─► voice latents        reference audio ─► speaker embedding
    text ids, voice latents ─ GPT ─► codes and their latents ─ vocoder, speaker embedding ─► waveform
    with `decoder_input` "mel": codes ─ DVAE ─► mel ─ flow, latents, speaker embedding ─► mel ─ vocoder ─► waveform
    training: audio ─ mel ─ DVAE ─► codes, the GPT's targets

Composition only: the module does not know files, devices or tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from myxtts.model.dvae import DVAE, FRAMES_PER_CODE
from myxtts.model.gpt import GPT, GPTDims
from myxtts.model.vocoder import HifiGanDecoder, SpeakerEncoder, modern_names

HEAD_DIM = 64  # channels per attention head in every size: packed attention kernels are fastest at 64
TRAINER_PREFIX = "xtts."
"""Prefix of the model in checkpoints of Coqui's trainer, which also hold the DVAE and two mel front ends."""
_UNUSED = ("torch_mel_spectrogram_", "gpt.gpt_inference.", "gpt.gpt.wte.", "gpt.gpt.wpe.")
"""The mel front ends, and in old checkpoints a second view of the GPT and embeddings that XTTS does not use."""


@dataclass(frozen=True)
class XTTSDims:
    """Sizes of all parts; the defaults are XTTS-v2's. Stored with every run."""

    gpt: GPTDims = field(default_factory=GPTDims)
    dvae_hidden: int = 512
    dvae_codebook_dim: int = 512
    dvae_blocks: int = 3
    vocoder_channels: int = 512
    speaker_dim: int = 512
    speaker_filters: tuple[int, ...] = (32, 64, 128, 256)
    decoder_input: Literal["latents", "mel"] = "latents"
    """What the vocoder reads: the GPT's latents, or a mel that a flow draws from these and the DVAE's mel."""

    @property
    def reads_mels(self) -> bool:
        return self.decoder_input == "mel"

    @property
    def decoder_dim(self) -> int:
        """Channels of the vocoder's input, per code."""
        return self.gpt.dim + (FRAMES_PER_CODE * self.gpt.mel_channels if self.reads_mels else 0)

    def with_vocabulary(self, text_tokens: int, start_text: int, stop_text: int) -> XTTSDims:
        """The same sizes with another text vocabulary."""
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
    "base": XTTSDims(
        gpt=GPTDims(layers=12, dim=512, heads=8, num_codes=4096, encoder_layers=4),
        dvae_hidden=256,
        dvae_codebook_dim=256,
        decoder_input="mel",
    ),
    "normal": XTTSDims(),
    "big": XTTSDims(gpt=GPTDims(layers=36, dim=1280, heads=20)),
}
"""The values of `--model-size`; `normal` is exactly XTTS-v2. The names are listed in `config.MODEL_SIZES` too, so
that `--help` does not import PyTorch."""


def sizes_of(dims: XTTSDims) -> list[str]:
    """The names of the size with these dimensions; if there is none, of those with a GPT as wide."""
    gpt = dims.gpt
    exact = [
        name
        for name, known in SIZES.items()
        if known.with_vocabulary(gpt.text_tokens, gpt.start_text, gpt.stop_text) == dims
    ]
    return exact or [name for name, known in SIZES.items() if known.gpt.dim == gpt.dim]


class XTTS(nn.Module):
    """All networks of XTTS. Attribute names are those of XTTS-v2's `model.pth`, plus the DVAE."""

    mel_stats: Tensor

    def __init__(self, dims: XTTSDims) -> None:
        super().__init__()
        self.dims = dims
        self.speaker_is_trained = True
        """False if the speaker encoder is random: the vocoder has `speaker_of_latents` instead, or zeros."""
        self.gpt = GPT(dims.gpt)
        self.hifigan_decoder = HifiGanDecoder(
            decoder_input_dim=dims.gpt.dim,
            upsample_initial_channel=dims.vocoder_channels,
            d_vector_dim=dims.speaker_dim,
            reads_mels=dims.reads_mels,
        )
        speaker_encoder = SpeakerEncoder(proj_dim=dims.speaker_dim, num_filters=dims.speaker_filters)
        self.hifigan_decoder.speaker_encoder = speaker_encoder
        self.dvae = DVAE(
            num_tokens=dims.gpt.num_codes,
            codebook_dim=dims.dvae_codebook_dim,
            hidden_dim=dims.dvae_hidden,
            num_resnet_blocks=dims.dvae_blocks,
        )
        self.register_buffer("mel_stats", torch.ones(dims.gpt.mel_channels))


def speaker_of_latents(latents: Tensor, dim: int) -> Tensor:
    """Conditioning latents of voices [B, 32, channels] to speaker embeddings of length 1, [B, dim].

    Their mean, mapped by the first functions of a cosine transform: orthogonal rows that need not be stored.
    """
    channels = latents.shape[2]
    places = (torch.arange(channels, device=latents.device) + 0.5) * torch.pi / channels
    rows = torch.cos(torch.arange(1, dim + 1, device=latents.device)[:, None] * places)
    return F.normalize(latents.float().mean(1) @ rows.t(), dim=1)


def canonical_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a published or trainer checkpoint under the names of `XTTS`."""
    if any(name.startswith("model.") for name in state):  # model.pth stores its weights under "model"
        state = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
    named = {}
    for name, value in state.items():
        bare = name.removeprefix(TRAINER_PREFIX)
        if not bare.startswith(_UNUSED):
            named[bare] = value
    return modern_names(named)


def dims_of(state: Mapping[str, Tensor]) -> XTTSDims:
    """The sizes of the network with these weights, under canonical names; XTTS-v2's for missing parts."""
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
        is_mel = vocoder.replace("conv_pre", "flow.first") in state
        values["decoder_input"] = "mel" if is_mel else "latents"
    if f"{speaker}fc.weight" in state:
        values["speaker_dim"] = len(state[f"{speaker}fc.weight"])
        layers = (state[f"{speaker}layer{number}.0.conv1.weight"] for number in range(1, 5))
        values["speaker_filters"] = tuple(len(weight) for weight in layers)
    if "dvae.codebook.embed" in state:
        values["dvae_hidden"] = len(state["dvae.encoder.0.0.weight"])
        values["dvae_codebook_dim"] = len(state["dvae.codebook.embed"])
        blocks = (re.fullmatch(r"dvae\.encoder\.\d+\.net\.0\.weight", name) for name in state)
        values["dvae_blocks"] = sum(map(bool, blocks))
    return XTTSDims(**values)


def _count(state: Mapping[str, Tensor], prefix: str) -> int:
    """Number of numbered modules below a prefix."""
    return len({name.removeprefix(prefix).split(".")[0] for name in state if name.startswith(prefix)})
