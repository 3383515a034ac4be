"""Voices: the conditioning of a speaker, computed from recordings, stored and found by name.

    files ─ mono, 22.05 kHz ─► chunks of 4 s ─ conditioning mel ─► 32 latents, averaged over all chunks
                            └► up to 30 s of each file at 16 kHz ─► speaker embedding, averaged over the files

A voice belongs to the weights that made it, which its fingerprint identifies. Knows no text and speaks nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, zip_longest
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

from myxtts.audio import SILENCE, Pcm, UnusableAudio, decode, is_silent, trim_silence
from myxtts.checkpoints import read_tensors, write_tensors
from myxtts.config import CONDITIONING_TOKENS, SAMPLE_RATE
from myxtts.errors import ConfigError, DatasetError
from myxtts.model.mel import CONDITIONING_MEL, SPEAKER_SAMPLE_RATE, LogMel, resample
from myxtts.model.xtts import XTTS, speaker_of_latents

CHUNK_SECONDS, LEAST_CHUNK_SECONDS, USED_SECONDS = 4, 0.33, 30
"""As published with XTTS-v2. Several files contribute chunks in turn, up to 30 seconds together."""
LONGEST_SECONDS = 600  # a longer file is taken for a recording session by mistake
SHORTEST_SECONDS, ENOUGH_SECONDS = 1.0, 3.0
SILENCE_DB = 40.0  # speech has ended where the level is this far below the loudest part
PUBLISHED_FILE = "speakers_xtts.pth"
LIST = "list"  # the name that asks for the names of all voices
_FEW_NAMES, _LONGEST_NAME = 8, 200  # the name of a file may have 255 bytes
_NAME = re.compile(r"[^\W_][\w .'-]*")
_FINGERPRINTED = 65536


class UnusableReference(DatasetError):
    """Reference recordings that make no voice; names every file that is a problem."""


@dataclass(frozen=True)
class Voice:
    """A speaker, as one set of weights represents it."""

    name: str
    latents: Tensor  # [1, 32, dim]: conditions the GPT
    speaker: Tensor  # [speaker_dim], of length 1: conditions the vocoder
    fingerprint: str = ""  # identifies the weights that made it; empty if unknown
    notes: tuple[str, ...] = ()  # notes for the user about its recordings


class VoiceEncoder:
    """Makes voices with the weights of one model, on the device it is on."""

    def __init__(self, model: XTTS, device: torch.device) -> None:
        self._gpt = model.gpt
        self._speaker_encoder = cast(nn.Module, model.hifigan_decoder.speaker_encoder)
        self._speaker_dim, self._encodes = model.dims.speaker_dim, model.speaker_is_trained
        self._mel_stats = model.mel_stats
        self._mel = LogMel(CONDITIONING_MEL).to(device)
        self._device = device
        self.fingerprint = fingerprint(model)

    @torch.no_grad()
    def voice(self, files: Sequence[Path], name: str | None = None) -> Voice:
        """The voice of one or several recordings of the same speaker."""
        recordings, notes = read_references(files)
        waves = [torch.from_numpy(pcm).to(self._device).float() / 32768 for pcm in recordings]
        mels = [self._mel(chunk[None], self._mel_stats)[0].t() for chunk in _chunks(waves)]
        latents = self._gpt.voice(mels)
        speaker = self._embedding(waves) if self._encodes else speaker_of_latents(latents, self._speaker_dim)[0]
        if not (latents.isfinite().all() and speaker.isfinite().all()):
            raise DatasetError("The voice is NaN or infinite: the weights are damaged, or training diverged.")
        return Voice(name or files[0].stem, latents.cpu(), speaker.cpu(), self.fingerprint, tuple(notes))

    def _embedding(self, waves: Sequence[Tensor]) -> Tensor:
        waves_16k = [resample(wave[None, : USED_SECONDS * SAMPLE_RATE], SPEAKER_SAMPLE_RATE) for wave in waves]
        embeddings = torch.cat([self._speaker_encoder(wave, l2_norm=True) for wave in waves_16k])
        return F.normalize(embeddings.mean(0), dim=0)


def read_references(files: Sequence[Path]) -> tuple[list[Pcm], list[str]]:
    """PCM of every file at 22.05 kHz, and notes; one error for all that are silent, too short or not audio."""
    if not files:
        raise UnusableReference("A voice needs at least one recording: a few seconds of clean speech.")
    recordings, problems, speech_seconds = [], [], 0.0
    for path in files:
        try:
            pcm = decode(path, SAMPLE_RATE, LONGEST_SECONDS)
        except UnusableAudio as error:
            known = f"{error.reason} ({error.detail})" if path.exists() else "there is no such file"
            problems.append(f"{path}: {'is a folder; name a recording in it' if path.is_dir() else known}")
            continue
        seconds = len(trim_silence(pcm, SAMPLE_RATE, SILENCE_DB)) / SAMPLE_RATE
        if is_silent(pcm):
            problems.append(f"{path}: silent (no sample reaches {SILENCE} of 32768)")
        elif seconds < SHORTEST_SECONDS:
            problems.append(f"{path}: too short ({seconds:.2f} s of sound, at least {SHORTEST_SECONDS:.0f} s)")
        recordings.append(pcm)
        speech_seconds += seconds
    if problems:
        listed = "\n  ".join(problems)
        raise UnusableReference(
            f"These recordings cannot be a reference:\n  {listed}\n"
            "Use 6 to 30 seconds of one person's clean speech."
        )
    note = f"the reference holds only {speech_seconds:.1f} s of sound; 6 s or more give a far better voice"
    return recordings, [note] if speech_seconds < ENOUGH_SECONDS else []


def _chunks(waves: Sequence[Tensor]) -> list[Tensor]:
    """Chunks of the recordings up to `USED_SECONDS`, the first of every file before the second of any."""
    length, least = CHUNK_SECONDS * SAMPLE_RATE, int(LEAST_CHUNK_SECONDS * SAMPLE_RATE)
    cut = [[chunk for chunk in torch.split(wave, length) if len(chunk) >= least] for wave in waves]
    room, chosen = USED_SECONDS * SAMPLE_RATE, []
    for chunk in chain.from_iterable(zip_longest(*cut)):
        if chunk is not None and room >= least:
            chosen.append(chunk[:room])
            room -= len(chosen[-1])
    return chosen


def fingerprint(model: XTTS) -> str:
    """A hash of the small tensors among the weights that make voices.

    Training changes all of these weights, so the large ones need not be read. Adapters of the GPT change none:
    voices stay valid.
    """
    gpt, speaker_encoder = model.gpt, cast(nn.Module, model.hifigan_decoder.speaker_encoder)
    digest = xxhash.xxh3_128(model.mel_stats.detach().float().cpu().numpy().tobytes())
    for part in (gpt.conditioning_encoder, gpt.conditioning_perceiver, speaker_encoder):
        for name, tensor in part.state_dict().items():
            if tensor.numel() <= _FINGERPRINTED:
                digest.update(name.encode() + tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


class VoiceLibrary:
    """The named voices of a model: those saved in its folder `voices`, and those published with XTTS-v2."""

    def __init__(self, model_folder: Path) -> None:
        self._published = model_folder / PUBLISHED_FILE
        self.folder = model_folder / "voices"

    def names(self) -> list[str]:
        saved = {path.stem for path in self.folder.glob("*.safetensors")}
        return sorted(saved | published_voices(self._published).keys())

    def save(self, voice: Voice) -> Path:
        """Store a voice under its name; replaces an earlier one of that name."""
        path = self.path(voice.name)
        self.folder.mkdir(parents=True, exist_ok=True)
        mark = torch.tensor(list(voice.fingerprint.encode()), dtype=torch.uint8)
        write_tensors(path, {"latents": voice.latents, "speaker": voice.speaker, "fingerprint": mark})
        return path

    def load(self, name: str, expected: str) -> Voice:
        """The voice of that name; a saved one must come from the weights with the fingerprint `expected`."""
        path = self.path(name)
        if not path.is_file():
            published = published_voices(self._published).get(name)
            if published is None:
                raise ConfigError(self._unknown(name))
            return published
        tensors = read_tensors(path)
        if missing := {"latents", "speaker", "fingerprint"} - tensors.keys():
            raise DatasetError(f"{path} is not a voice: it lacks {', '.join(sorted(missing))}.")
        if tensors["fingerprint"].dtype != torch.uint8 or not _is_voice(tensors["latents"], tensors["speaker"]):
            raise DatasetError(
                f"{path} is not a voice: its tensors have other shapes or types, or are not finite."
            )
        made_by = bytes(tensors["fingerprint"].tolist()).decode(errors="replace")
        if made_by != expected:
            raise DatasetError(
                f"The voice {name!r} in {self.folder} was made by other weights; make it again from recordings."
            )
        return Voice(name, tensors["latents"], tensors["speaker"], made_by)

    def _unknown(self, name: str) -> str:
        names = self.names()
        listed = ", ".join(names) or "none yet"
        if name == LIST:
            return f"Voices of {self.folder.parent} for --voice NAME: {listed}"
        if len(names) <= _FEW_NAMES:
            return f"No voice {name!r} in {self.folder} (there are: {listed})."
        nearest = ", ".join(get_close_matches(name, names, cutoff=0.4)) or "none"
        return (
            f"No voice {name!r} in {self.folder} nor in {self._published} (the nearest: {nearest}). "
            f"--voice {LIST} shows all {len(names)}."
        )

    def path(self, name: str) -> Path:
        """The file of a saved voice; an error if the name could not be that of a file in this folder."""
        if not _NAME.fullmatch(name) or len(name.encode()) > _LONGEST_NAME:
            expected = f"up to {_LONGEST_NAME} letters, digits, spaces, dots and hyphens"
            raise ConfigError(f"{name[:60]!r} cannot name a voice; use {expected}.")
        return self.folder / f"{name}.safetensors"


def published_voices(path: Path) -> dict[str, Voice]:
    """The speakers published with XTTS-v2 in `speakers_xtts.pth`, by name; none if there is no such file."""
    tensors = read_tensors(path) if path.is_file() else {}
    voices = {}
    for key, latents in tensors.items():
        name, _, kind = key.rpartition(".")
        speaker = tensors.get(f"{name}.speaker_embedding")
        if kind == "gpt_cond_latent" and speaker is not None:
            latents, speaker = latents.reshape(1, *latents.shape[-2:]), speaker.flatten()
            if not _is_voice(latents, speaker):
                raise DatasetError(f"{path} is damaged: {name!r} has other shapes or types, or is not finite.")
            voices[name] = Voice(name, latents.float(), speaker.float())
    return voices


def _is_voice(latents: Tensor, speaker: Tensor) -> bool:
    fits = latents.dim() == 3 and latents.shape[:2] == (1, CONDITIONING_TOKENS) and speaker.dim() == 1
    return fits and all(each.is_floating_point() and bool(each.isfinite().all()) for each in (latents, speaker))
