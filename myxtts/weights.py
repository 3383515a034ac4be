"""Folders of weights: read XTTS-v2's published forms, write folders that coqui-tts loads (if `fits_coqui`).

    model.pth       GPT, vocoder and speaker encoder; a trainer's checkpoint also holds the DVAE
    dvae.pth        the DVAE;  mel_stats.pth  the 80 divisors of the mels
    vocab.json      the tokenizer;  config.json  sizes and sampling parameters
    myxtts.json     provenance of the weights, only in folders written here; other tools ignore it

The compact form, which only MyXTTS reads, has `weights-N.npz` in place of the `.pth` files: float16, and int8 with
a scale per row for as many large tensors as it takes to fit `COMPACT_BYTES`, compressed. `myxtts.json` lists them.

Combines files (`checkpoints`), names (`model.xtts`) and the vocabulary (`text.tokenizer`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from myxtts.checkpoints import (
    Tensors,
    UnreadableWeights,
    file_hash,
    read_tensors,
    require_match,
    write_compressed,
    write_pth,
)
from myxtts.config import (
    AUTO_MEL_FRAMES,
    HOP_SAMPLES,
    SAMPLE_RATE,
    SAMPLES_PER_CODE,
    STAGE_PARTS,
    STAGES,
    DataSettings,
)
from myxtts.files import write_text_atomically
from myxtts.model.gpt import grow_text_vocabulary
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE, Generator, HifiGanInput, modern_names
from myxtts.model.xtts import XTTS, XTTSDims, canonical_names, dims_of
from myxtts.text.tokenizer import FILE_NAME as VOCABULARY_FILE
from myxtts.text.tokenizer import Tokenizer

MODEL_FILES = ("model.pth", "best_model.pth", "weights-1.npz")
"""Possible names of the file with the weights, in order of preference."""
PARTS = ("gpt", "hifigan_decoder.waveform_decoder", "hifigan_decoder.speaker_encoder", "dvae", "mel_stats")
_DVAE_FILE, _STATS_FILE, _CONFIG_FILE = "dvae.pth", "mel_stats.pth", "config.json"
_PROVENANCE_FILE = "myxtts.json"
VOICES_FILE = "voices.safetensors"
READERS_FILE = "readers.safetensors"  # voices that the GPT learnt, see `synthesis.voices`
"""Built-in voices of a compact folder (`synthesis.voices`)."""

COMPACT_BYTES, SHARD_BYTES = 100_000_000, 45_000_000
"""The most that a compact folder takes, if int8 is enough for that, and each of its files."""
_SHARD, _SCALES = "weights-{}.npz", "|scales"
_INT8_ORDER = (
    "gpt.gpt", "gpt.conditioning_encoder", "gpt.conditioning_perceiver", "gpt.text_embedding", "gpt.text_head",
    "hifigan_decoder.speaker_encoder", "dvae", "hifigan_decoder.waveform_decoder.flow", "gpt.mel_head",
    "gpt.mel_embedding", "hifigan_decoder.waveform_decoder",
)  # fmt: skip
"""Parts whose tensors become int8, in this order, the largest first: rounding the vocoder is heard most."""
_SUMS = "dvae.codebook.embed_avg"  # left out where it follows: the codebook times how often each code is used
_EXACT, _EXACT_ELEMENTS = "dvae.codebook", 16384  # the codebook and small tensors stay as they are
_HUFFMAN_LOSS = 1.01  # whole bits for each value take a little more than the entropy
_ENTRY_BYTES = 512  # room for the entries and headers of a tensor in a file
_SPEAKER_LAYERS = ("cond_layer.", "conds.")  # of the decoder, which a HiFi-GAN does not have


@dataclass(frozen=True)
class Provenance:
    """The origin of weights, as far as synthesis depends on it; the defaults are XTTS-v2's."""

    untrained: tuple[str, ...] = ()  # stages that were never trained: their weights are random
    from_scratch: bool = False
    """True if training did not start from published weights: the model knows only what it was trained on."""
    max_text_length: int = DataSettings.max_text_length
    max_mel_frames: int = AUTO_MEL_FRAMES[1]
    use_phonemes: bool = False
    vocoder: Mapping[str, float] | None = None
    """Distances of the decoder and of Griffin-Lim from held-out recordings, by the validation of the decoder."""
    languages: tuple[str, ...] = ()  # those that the GPT was trained on; empty if they are not known
    text_dropout: float = 0.0  # share of the texts dropped in training: if any were, guidance works
    code_noise: float = 0.0  # share of the codes replaced in training: the distributions are flat
    guidance: float = 0.0  # that it is meant to speak with; 0: the usual one

    @classmethod
    def read(cls, folder: Path) -> Provenance:
        """The provenance of a folder; one without the file is a published one."""
        path = folder / _PROVENANCE_FILE
        if not path.is_file():
            return PUBLISHED
        try:
            found = dict(json.loads(path.read_text(encoding="utf-8")))
            found.pop("files", None)
            untrained = tuple(stage for stage in STAGES if stage in found["untrained"])
            return cls(**{**found, "untrained": untrained, "languages": tuple(found.get("languages", ()))})
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise UnreadableWeights(f"{path} is not what an export wrote ({error}); export again") from None

    @property
    def untrained_parts(self) -> list[str]:
        """Random parts that a decoder needs: it does without a speaker encoder that was never trained."""
        return [STAGE_PARTS[stage][0] for stage in self.untrained if stage != "speaker"]


PUBLISHED = Provenance()


def has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MODEL_FILES)


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
    model.speaker_is_trained = "speaker" not in provenance.untrained
    return LoadedFolder(model, used, absent + untrained, provenance)


def read_folder(folder: Path) -> Tensors:
    """All weights of an XTTS-v2 folder under the names of `XTTS`."""
    found = [folder / name for name in MODEL_FILES if (folder / name).is_file()]
    if not found:
        there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) if folder.is_dir() else "no folder"
        raise UnreadableWeights(f"No {' or '.join(MODEL_FILES)} in {folder} (there is: {there or 'nothing'})")
    is_compact = found[0].suffix == ".npz"
    state = _read_compact(folder) if is_compact else canonical_names(read_tensors(found[0]))
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


def start_from_hifigan(path: Path, generator: Generator, teacher: HifiGanInput, keeps_flow: bool = False) -> str:
    """Load a HiFi-GAN's generator, its first layer into `teacher`; return a sentence about what was loaded.

    The generator's speaker layers and its first layer remain to be learnt, or its flow, if it reads mels.
    The speaker layers start at zero.
    """
    new = (*_SPEAKER_LAYERS, "flow.") if generator.reads_mels else (*_SPEAKER_LAYERS, "conv_pre.")
    state = {
        name.removeprefix("generator."): value.float()
        for name, value in read_tensors(path).items()
        if name.startswith("generator.")
    }
    state = modern_names(_plain_ends(state))
    state.pop("conv_post.bias", None)  # XTTS's last layer has none; it shifts the whole wave a little
    own = {name: value for name, value in generator.state_dict().items() if not name.startswith(new)}
    expected = {name: value.shape for name, value in own.items()}
    expected |= {name: value.shape for name, value in teacher.state_dict().items()}
    channels, wanted = len(state.get("conv_pre.weight", ())), generator.conv_pre.out_channels
    if channels not in (0, wanted):
        raise UnreadableWeights(
            f"{path} is a generator of {channels} channels, and the decoder of this model has {wanted}; "
            "choose a --model-size with as many, or leave out --init-decoder"
        )
    require_match(state, expected, f"{path}, which should be the generator of a HiFi-GAN (V1),")
    teacher.load_state_dict({name: state[name] for name in teacher.state_dict()})
    generator.load_state_dict({name: state[name] for name in own}, strict=False)
    for layer in (generator.cond_layer, *generator.conds):
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)
    loaded, total = (sum(value.numel() for value in each.values()) for each in (own, generator.state_dict()))
    what = f"{loaded / 1e6:.1f} of {total / 1e6:.1f} million weights from {path}"
    first = "the first layer" if generator.flow is None else "the flow"
    if keeps_flow:
        return f"Decoder: {what}; {first} is that of --init-from, the speaker layers are new"
    return f"Decoder: {what}; {first} and the speaker layers are new"


def _plain_ends(state: Mapping[str, Tensor]) -> Tensors:
    """The first and the last layer without weight norm: XTTS's have none."""
    plain = dict(state)
    for name in ("conv_pre", "conv_post"):
        if f"{name}.weight_g" in plain and f"{name}.weight_v" in plain:
            scale, weight = plain.pop(f"{name}.weight_g"), plain.pop(f"{name}.weight_v")
            plain[f"{name}.weight"] = weight * (scale / weight.flatten(1).norm(dim=1).view(-1, 1, 1))
    return plain


def save_folder(folder: Path, model: XTTS, vocabulary: Tokenizer, provenance: Provenance = PUBLISHED) -> None:
    """Write a folder that coqui-tts loads if `fits_coqui`, in place of a compact one."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in [folder / VOICES_FILE, folder / READERS_FILE, *folder.glob(_SHARD.format("*"))]:
        path.unlink(missing_ok=True)
    write_text_atomically(folder / _PROVENANCE_FILE, json.dumps(asdict(provenance), indent=2))
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    main = {name: tensor for name, tensor in state.items() if not name.startswith("dvae.")}
    write_pth(folder / MODEL_FILES[0], {"model": main, "step": 0, "epoch": 0})
    write_pth(folder / _DVAE_FILE, {name.removeprefix("dvae."): state[name] for name in state if name not in main})
    write_pth(folder / _STATS_FILE, state["mel_stats"])
    vocabulary.save(folder / VOCABULARY_FILE)
    write_text_atomically(folder / _CONFIG_FILE, json.dumps(coqui_settings(model.dims, vocabulary), indent=2))


def save_compact(
    folder: Path, model: XTTS, vocabulary: Tokenizer, provenance: Provenance = PUBLISHED
) -> dict[str, int]:
    """Write the compact form, in place of any other, and return its bytes by file; voices may be there."""
    folder.mkdir(parents=True, exist_ok=True)
    voices = [path for name in (VOICES_FILE, READERS_FILE) if (path := folder / name).is_file()]
    named = len(vocabulary.to_json().encode()) + sum(path.stat().st_size for path in voices)
    shards, used = [Tensors()], 0
    for name, tensor in compacted(model.state_dict(), COMPACT_BYTES - named - 100 * _ENTRY_BYTES).items():
        more = _stored_bytes(tensor)
        if used + more > SHARD_BYTES:
            shards, used = [*shards, Tensors()], 0
        shards[-1][name], used = tensor, used + more
    older = [folder / name for name in (*MODEL_FILES, _DVAE_FILE, _STATS_FILE, _CONFIG_FILE)]
    for path in [*older, *folder.glob(_SHARD.format("*"))]:
        path.unlink(missing_ok=True)
    vocabulary.save(folder / VOCABULARY_FILE)
    written = [folder / VOCABULARY_FILE, *voices]
    for number, shard in enumerate(shards, 1):
        written.append(folder / _SHARD.format(number))
        write_compressed(written[-1], shard)
    sizes = {path.name: path.stat().st_size for path in written}
    files = {name: {"bytes": size, "xxh3": file_hash(folder / name)} for name, size in sizes.items()}
    content = json.dumps({**asdict(provenance), "files": files}, indent=2)
    write_text_atomically(folder / _PROVENANCE_FILE, content)
    return sizes


def compacted(state: Mapping[str, Tensor], most_bytes: int) -> Tensors:
    """The tensors of a compact folder: as many of the large ones in int8 as it takes to fit into `most_bytes`."""
    kept, order = Tensors(), list[tuple[int, int, str]]()
    for name, tensor in state.items():
        if name == _SUMS and state["dvae.codebook.cluster_size"].any():
            continue
        if not tensor.isfinite().all():
            raise UnreadableWeights(f"{name} is NaN or infinite: training diverged, and nothing was exported")
        is_large = tensor.is_floating_point() and tensor.dim() > 1 and tensor.numel() > _EXACT_ELEMENTS
        half = tensor.half() if is_large and not _belongs(name, _EXACT) else tensor
        kept[name] = half if half.isfinite().all() else tensor
        parts = [number for number, part in enumerate(_INT8_ORDER) if _belongs(name, part)]
        if is_large and parts and not _belongs(name, _EXACT):
            order.append((parts[0], -tensor.numel(), name))
    num_bytes = sum(map(_stored_bytes, kept.values()))
    for _, _, name in sorted(order):
        if num_bytes <= most_bytes:
            break
        rows, scales = quantised(state[name])
        num_bytes += _stored_bytes(rows) + _stored_bytes(scales) - _stored_bytes(kept[name])
        kept |= {name: rows, name + _SCALES: scales}
    return kept


def _stored_bytes(tensor: Tensor) -> int:
    """About the bytes of a tensor in a compact folder: the entropy of int8; floats hardly shrink."""
    if tensor.dtype != torch.int8:
        return _ENTRY_BYTES + tensor.nbytes
    shares = torch.bincount(tensor.flatten().int() + 128) / tensor.numel()
    return _ENTRY_BYTES + int(
        _HUFFMAN_LOSS * float(torch.special.entr(shares).sum()) / math.log(256) * tensor.numel()
    )


def quantised(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor as int8, and the value of 1 in each of its rows: off by at most 1/254 of the row's maximum."""
    rows = tensor.detach().float().flatten(1)
    scales = (rows.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (rows / scales[:, None]).round().to(torch.int8).view(tensor.shape), scales


def _read_compact(folder: Path) -> Tensors:
    """All weights of a compact folder in fp32; raises an error for files that are not those that were written."""
    stored = Tensors()
    for name in [name for name in shipped_files(folder) if name not in (VOICES_FILE, READERS_FILE)]:
        path = require_shipped(folder, name)
        stored |= read_tensors(path) if path.suffix == ".npz" else {}
    state = Tensors()
    for name, tensor in stored.items():
        scales = stored.get(name + _SCALES)
        if scales is not None and scales.shape != tensor.shape[:1]:
            raise UnreadableWeights(f"{folder} is damaged: {name} has other rows than its scales; export it again")
        if scales is not None:
            tensor = (tensor.flatten(1) * scales[:, None]).view(tensor.shape)
        if not name.endswith(_SCALES):
            state[name] = tensor.float() if tensor.is_floating_point() else tensor
    if "dvae.codebook.embed" in state and _SUMS not in state:
        state[_SUMS] = state["dvae.codebook.embed"] * state["dvae.codebook.cluster_size"]
    return state


def shipped_files(folder: Path) -> dict[str, Any]:
    """Bytes and checksum of the files of a compact folder, by name."""
    path = folder / _PROVENANCE_FILE
    try:
        return {str(name): dict(facts) for name, facts in json.loads(path.read_bytes()).get("files", {}).items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableWeights(f"{path} is not what an export wrote ({error}); export again") from None


def require_shipped(folder: Path, name: str) -> Path:
    """The path of a file of a compact folder; raises an error if it is not what was written."""
    path, expected = folder / name, shipped_files(folder).get(name, {})
    if not path.is_file():
        raise UnreadableWeights(f"{path} is missing; get the folder again, or export it again")
    if path.stat().st_size != expected.get("bytes") or file_hash(path) != expected.get("xxh3"):
        raise UnreadableWeights(
            f"{path} has {path.stat().st_size} bytes and is damaged: {expected.get('bytes')} bytes with another "
            "checksum were written. Get it again (git checkout, git lfs pull), or export it again"
        )
    return path


ONLY_HERE = (
    "coqui-tts cannot load this folder, because its conditioning, vocoder and speaker encoder have fixed sizes; "
    "myxtts speak, export and --init-from can. For coqui-tts, train --model-size normal or big"
)


def fits_coqui(dims: XTTSDims) -> bool:
    """True if coqui-tts can load such a model: it builds these parts in XTTS-v2's sizes, whatever the settings."""
    sizes, published = (
        (
            known.gpt.encoder_layers,
            known.vocoder_channels,
            known.speaker_dim,
            known.speaker_filters,
            known.decoder_input,
        )
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
