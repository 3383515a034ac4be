"""XTTS-v2 folders: read the published forms, write folders that coqui-tts loads (if `fits_coqui`).

    model.pth       GPT, vocoder and speaker encoder; a trainer's checkpoint also holds the DVAE
    dvae.pth        the DVAE;  mel_stats.pth  the 80 divisors of the mels
    vocab.json      the tokenizer;  config.json  sizes and sampling parameters
    myxtts.json     provenance of the weights, only in folders written here; other tools ignore it

Combines files (`checkpoints`), names (`model.xtts`) and the vocabulary (`text.tokenizer`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from myxtts.checkpoints import Tensors, UnreadableWeights, read_tensors, require_match, write_pth
from myxtts.config import HOP_SAMPLES, SAMPLE_RATE, SAMPLES_PER_CODE, STAGE_PARTS, STAGES, DataSettings
from myxtts.files import write_text_atomically
from myxtts.model.gpt import grow_text_vocabulary
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.model.xtts import XTTS, XTTSDims, canonical_names, dims_of
from myxtts.text.tokenizer import FILE_NAME as VOCABULARY_FILE
from myxtts.text.tokenizer import Tokenizer

MODEL_FILES = ("model.pth", "best_model.pth")
"""Possible names of the file with the weights, in order of preference."""
PARTS = ("gpt", "hifigan_decoder.waveform_decoder", "hifigan_decoder.speaker_encoder", "dvae", "mel_stats")
_DVAE_FILE, _STATS_FILE, _CONFIG_FILE = "dvae.pth", "mel_stats.pth", "config.json"
_PROVENANCE_FILE = "myxtts.json"


@dataclass(frozen=True)
class Provenance:
    """The origin of weights, as far as synthesis depends on it; the defaults are XTTS-v2's."""

    untrained: tuple[str, ...] = ()  # stages that were never trained: their weights are random
    from_scratch: bool = False
    """True if training did not start from published weights: the model knows only what it was trained on."""
    max_text_length: int = DataSettings.max_text_length
    max_mel_frames: int = 2416
    use_phonemes: bool = False
    vocoder: Mapping[str, float] | None = None
    """Distances of the decoder and of Griffin-Lim from held-out recordings, by the validation of the decoder."""
    languages: tuple[str, ...] = ()  # those that the GPT was trained on; empty if they are not known
    text_dropout: float = 0.0  # share of the texts dropped in training: if any were, guidance works
    code_noise: float = 0.0  # share of the codes replaced in training: the distributions are flat

    @classmethod
    def read(cls, folder: Path) -> Provenance:
        """The provenance of a folder; one without the file is a published one."""
        path = folder / _PROVENANCE_FILE
        if not path.is_file():
            return PUBLISHED
        try:
            found = dict(json.loads(path.read_text(encoding="utf-8")))
            untrained = tuple(stage for stage in STAGES if stage in found["untrained"])
            return cls(**{**found, "untrained": untrained, "languages": tuple(found.get("languages", ()))})
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise UnreadableWeights(f"{path} is not what an export wrote ({error}); export again") from None

    @property
    def random_parts(self) -> list[str]:
        """Stages that were never trained, and the speaker encoder, which no stage trains, in words."""
        return [*self.untrained, *(["speaker encoder"] if self.from_scratch else [])]

    @property
    def untrained_parts(self) -> list[str]:
        return [STAGE_PARTS[stage][0] for stage in self.untrained]


PUBLISHED = Provenance()


class LoadedFolder(NamedTuple):
    """A model from a folder, its vocabulary, and the parts with random weights: missing or never trained."""

    model: XTTS
    vocabulary: Tokenizer
    fresh_parts: list[str]
    provenance: Provenance = PUBLISHED


def load_folder(folder: Path, vocabulary: Tokenizer | None = None) -> LoadedFolder:
    """The model in an XTTS-v2 folder; for a larger `vocabulary`, text embedding and head are extended."""
    state = read_folder(folder)
    own = Tokenizer.load(folder) if (folder / VOCABULARY_FILE).is_file() else vocabulary
    if own is None:
        raise UnreadableWeights(f"{folder} has no {VOCABULARY_FILE}; name one with --tokenizer")
    used = vocabulary or own
    rows = len(state["gpt.text_embedding.weight"])
    if own.num_tokens > rows or used.num_tokens < rows:
        sizes = f"{rows} text tokens, its vocabulary has {own.num_tokens}, the one to use {used.num_tokens}"
        extend = "To add a language, extend the folder's own: myxtts vocabulary extend"
        raise UnreadableWeights(f"The weights in {folder} know {sizes}. {extend}")
    state = grow_text_vocabulary(state, used.num_tokens, torch.Generator().manual_seed(0), prefix="gpt.")
    dims = dims_of(state).with_vocabulary(used.num_tokens, used.start_id, used.stop_id)
    with torch.device("meta"):  # the weights are replaced at once
        model = XTTS(dims)
    absent, provenance = load_state(model, state, str(folder)), Provenance.read(folder)
    untrained = [part for part in provenance.untrained_parts if part not in absent]
    return LoadedFolder(model, used, absent + untrained, provenance)


def read_folder(folder: Path) -> Tensors:
    """All weights of an XTTS-v2 folder under the names of `XTTS`."""
    found = [folder / name for name in MODEL_FILES if (folder / name).is_file()]
    if not found:
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) if folder.is_dir() else "no folder"
        raise UnreadableWeights(f"No {' or '.join(MODEL_FILES)} in {folder} (there is: {there or 'nothing'})")
    state = canonical_names(read_tensors(found[0]))
    if "gpt.text_embedding.weight" not in state:
        raise UnreadableWeights(f"{found[0]} holds no XTTS: {len(state)} tensors such as {next(iter(state), '-')}")
    if (folder / _DVAE_FILE).is_file():
        dvae = read_tensors(folder / _DVAE_FILE)
        state |= {f"dvae.{name.removeprefix('dvae.')}": value for name, value in dvae.items()}
    if "mel_stats" not in state and (folder / _STATS_FILE).is_file():
        state["mel_stats"] = next(iter(read_tensors(folder / _STATS_FILE).values()))
    return state


def load_state(model: XTTS, state: Mapping[str, Tensor], source: str) -> list[str]:
    """Load weights, initialise the parts that `state` lacks, and return those; raise if anything else differs."""
    absent = [part for part in PARTS if not any(_belongs(name, part) for name in state)]
    expected = {
        name: tensor.shape
        for name, tensor in model.state_dict().items()
        if not any(_belongs(name, part) for part in absent)
    }
    require_match(state, expected, source)
    own = model.state_dict()
    if wrong := [name for name in expected if own[name].is_floating_point() != state[name].is_floating_point()]:
        raise UnreadableWeights(f"{source} does not fit this model: {wrong[0]} holds {state[wrong[0]].dtype}")
    model.load_state_dict(dict(state), strict=False, assign=True)
    if absent:
        fresh = XTTS(model.dims)
        for part in absent:
            parent, _, name = part.rpartition(".")
            setattr(model.get_submodule(parent), name, getattr(fresh.get_submodule(parent), name))
    return absent


def save_folder(folder: Path, model: XTTS, vocabulary: Tokenizer, provenance: Provenance = PUBLISHED) -> None:
    """Write a folder that coqui-tts loads if `fits_coqui`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(folder / _PROVENANCE_FILE, json.dumps(asdict(provenance), indent=2))
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    main = {name: tensor for name, tensor in state.items() if not name.startswith("dvae.")}
    write_pth(folder / MODEL_FILES[0], {"model": main, "step": 0, "epoch": 0})
    write_pth(folder / _DVAE_FILE, {name.removeprefix("dvae."): state[name] for name in state if name not in main})
    write_pth(folder / _STATS_FILE, state["mel_stats"])
    vocabulary.save(folder / VOCABULARY_FILE)
    write_text_atomically(folder / _CONFIG_FILE, json.dumps(coqui_settings(model.dims, vocabulary), indent=2))


ONLY_HERE = (
    "coqui-tts cannot load this folder, which fixes the sizes of conditioning, vocoder and speaker encoder; "
    "myxtts speak, export and --init-from can. For coqui-tts, train --model-size normal or big"
)


def fits_coqui(dims: XTTSDims) -> bool:
    """True if coqui-tts can load such a model: it builds these parts in XTTS-v2's sizes, whatever the settings."""
    sizes, published = (
        (known.gpt.encoder_layers, known.vocoder_channels, known.speaker_dim, known.speaker_filters)
        for known in (dims, XTTSDims())
    )
    return sizes == published


def coqui_settings(dims: XTTSDims, vocabulary: Tokenizer) -> dict[str, Any]:
    """The model's sizes under coqui-tts' names, with XTTS-v2's published sampling parameters."""
    gpt = dims.gpt
    return {
        "model": "xtts",
        "languages": sorted("zh-cn" if code == "zh" else code for code in vocabulary.languages),
        "audio": {"sample_rate": SAMPLE_RATE, "output_sample_rate": OUTPUT_SAMPLE_RATE},
        "temperature": 0.75,
        "top_k": 50,
        "top_p": 0.85,
        "repetition_penalty": 5.0,
        "length_penalty": 1.0,
        "gpt_cond_len": 30,
        "gpt_cond_chunk_len": 4,
        "max_ref_len": 30,
        "model_args": {
            "gpt_layers": gpt.layers,
            "gpt_n_model_channels": gpt.dim,
            "gpt_n_heads": gpt.heads,
            "gpt_number_text_tokens": gpt.text_tokens,
            "gpt_start_text_token": gpt.start_text,
            "gpt_stop_text_token": gpt.stop_text,
            "gpt_num_audio_tokens": gpt.audio_tokens,
            "gpt_start_audio_token": gpt.start_code,
            "gpt_stop_audio_token": gpt.stop_code,
            "gpt_max_audio_tokens": gpt.max_codes,
            "gpt_max_text_tokens": gpt.max_text,
            "gpt_max_prompt_tokens": 70,
            "gpt_code_stride_len": SAMPLES_PER_CODE,
            "gpt_use_perceiver_resampler": True,
            "gpt_use_masking_gt_prompt_approach": True,
            "input_sample_rate": SAMPLE_RATE,
            "output_sample_rate": OUTPUT_SAMPLE_RATE,
            "output_hop_length": HOP_SAMPLES,
            "decoder_input_dim": gpt.dim,
            "d_vector_dim": dims.speaker_dim,
        },
    }


def is_trained_in(stage: str, name: str) -> bool:
    return any(_belongs(name, part) for part in STAGE_PARTS[stage])


def _belongs(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")
