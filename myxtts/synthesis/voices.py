"""Voices: what the model keeps of a reference recording, made from files, stored and found again by name.

    files ─ mono, 22.05 kHz ─► chunks of 4 s ─ conditioning mel ─► 32 latents, their mean over all chunks
                            └► up to 30 s of each file at 16 kHz ─► speaker embedding, their mean over the files

A voice belongs to the weights that made it, which its fingerprint names. Knows neither text nor how to speak.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
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
from myxtts.model.xtts import XTTS

CHUNK_SECONDS, LEAST_CHUNK_SECONDS, HEARD_SECONDS = 4, 0.33, 30
"""As XTTS-v2 was published; of several files the GPT hears chunks in turn, until it has heard 30 seconds."""
LONGEST_SECONDS = 600
"""A longer file is no reference but a recording session."""
SHORTEST_SECONDS, ENOUGH_SECONDS = 1.0, 3.0
SILENCE_DB = 40.0
"""How far below its loudest part speech has ended."""
PUBLISHED_FILE = "speakers_xtts.pth"
_NAME = re.compile(r"[^\W_][\w .'-]*")
_FINGERPRINTED = 65536


class UnusableReference(DatasetError):
    """Reference recordings that no voice can be made of; names every file that is in the way."""


@dataclass(frozen=True)
class Voice:
    """A voice as one set of weights knows it."""

    name: str
    latents: Tensor
    """[1, 32, dim]: what the GPT is told."""
    speaker: Tensor
    """[speaker_dim], of length 1: what the vocoder is told."""
    fingerprint: str = ""
    """Of the weights that made it; empty when unknown."""
    notes: tuple[str, ...] = ()
    """What a user should know about its recordings."""


class Listener:
    """Makes voices with the weights of one model, on the device it is on."""

    def __init__(self, model: XTTS, device: torch.device) -> None:
        self._gpt = model.gpt
        self._speaker_encoder = cast(nn.Module, model.hifigan_decoder.speaker_encoder)
        self._mel_stats = model.mel_stats
        self._mel = LogMel(CONDITIONING_MEL).to(device)
        self._device = device
        self.fingerprint = fingerprint(model)

    @torch.no_grad()
    def voice(self, files: Sequence[Path], name: str | None = None) -> Voice:
        """The voice of one or several recordings of the same speaker."""
        recordings, notes = read_references(files)
        waves = [torch.from_numpy(pcm).to(self._device).float() / 32768 for pcm in recordings]
        heard = [wave[: HEARD_SECONDS * SAMPLE_RATE] for wave in waves]
        heard_16k = [resample(wave[None], SPEAKER_SAMPLE_RATE) for wave in heard]
        embeddings = torch.cat([self._speaker_encoder(wave, l2_norm=True) for wave in heard_16k])
        speaker = F.normalize(embeddings.mean(0), dim=0)
        mels = [self._mel(chunk[None], self._mel_stats)[0].t() for chunk in _chunks(waves)]
        latents = self._gpt.voice(mels)
        if not (latents.isfinite().all() and speaker.isfinite().all()):
            raise DatasetError("The model makes no voice but NaN: its weights are damaged, or training diverged.")
        return Voice(name or Path(files[0]).stem, latents.cpu(), speaker.cpu(), self.fingerprint, tuple(notes))


def read_references(files: Sequence[Path]) -> tuple[list[Pcm], list[str]]:
    """PCM of every file at 22.05 kHz, and notes; or an error with all that are silent, too short or no audio."""
    if not files:
        raise UnusableReference("A voice needs at least one recording of it: a few seconds of clean speech.")
    recordings, problems, speech_seconds = [], [], 0.0
    for path in map(Path, files):
        try:
            pcm = decode(path, SAMPLE_RATE, LONGEST_SECONDS)
        except UnusableAudio as error:
            problems.append(f"{path}: {_plainly(path, error)}")
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
    notes = []
    if speech_seconds < ENOUGH_SECONDS:
        notes.append(
            f"the reference holds only {speech_seconds:.1f} s of sound; 6 s or more catch a voice far better"
        )
    return recordings, notes


def _plainly(path: Path, error: UnusableAudio) -> str:
    """Why a file that a user named cannot be heard."""
    if path.is_dir():
        return "is a folder; name a recording in it"
    return f"{error.reason} ({error.detail})" if path.exists() else "there is no such file"


def _chunks(waves: Sequence[Tensor]) -> list[Tensor]:
    """Pieces of the recordings, each file's first before any file's second, until enough is heard."""
    length, least = CHUNK_SECONDS * SAMPLE_RATE, int(LEAST_CHUNK_SECONDS * SAMPLE_RATE)
    cut = [[chunk for chunk in torch.split(wave, length) if len(chunk) >= least] for wave in waves]
    room, chosen = HEARD_SECONDS * SAMPLE_RATE, []
    for chunk in chain.from_iterable(zip_longest(*cut)):
        if chunk is not None and room >= least:
            chosen.append(chunk[:room])
            room -= len(chosen[-1])
    return chosen


def fingerprint(model: XTTS) -> str:
    """Changes when a voice would: a hash of the small tensors among the weights that make one.

    Training moves all of them, so that the large ones need not be read; adapters of the GPT touch none, and voices
    then stay as they are.
    """
    gpt, speaker_encoder = model.gpt, model.hifigan_decoder.speaker_encoder
    parts = (gpt.conditioning_encoder, gpt.conditioning_perceiver, speaker_encoder)
    digest = xxhash.xxh3_128(model.mel_stats.detach().float().cpu().numpy().tobytes())
    for part in parts:
        for name, tensor in cast(nn.Module, part).state_dict().items():
            if tensor.numel() <= _FINGERPRINTED:
                digest.update(name.encode() + tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


class VoiceFolder:
    """Voices by name, one safetensors file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.safetensors"))

    def save(self, voice: Voice) -> Path:
        """Store a voice under its name, over an older one of that name."""
        path = self._path(voice.name)
        self.folder.mkdir(parents=True, exist_ok=True)
        written = {"latents": voice.latents, "speaker": voice.speaker, "fingerprint": _bytes(voice.fingerprint)}
        write_tensors(path, written)
        return path

    def load(self, name: str, expected: str) -> Voice:
        """The voice of that name, if it was made by the weights with the fingerprint `expected`."""
        path = self._path(name)
        if not path.is_file():
            there = ", ".join(self.names()) or "none yet"
            raise ConfigError(f"No voice {name!r} in {self.folder} (there are: {there}).")
        tensors = read_tensors(path)
        if missing := {"latents", "speaker", "fingerprint"} - tensors.keys():
            raise DatasetError(f"{path} is no voice: it lacks {', '.join(sorted(missing))}.")
        made_by = bytes(tensors["fingerprint"].tolist()).decode(errors="replace")
        if made_by != expected:
            raise DatasetError(
                f"The voice {name!r} in {self.folder} was made by other weights than these, which would not know "
                "it. Make it again from its recordings."
            )
        return Voice(name, tensors["latents"], tensors["speaker"], made_by)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} cannot name a voice; use letters, digits, spaces, dots and hyphens.")
        return self.folder / f"{name}.safetensors"


def _bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def published_voices(folder: Path) -> dict[str, Voice]:
    """The voices that come with an XTTS-v2 folder, by name; none when it has none."""
    path = folder / PUBLISHED_FILE
    if not path.is_file():
        return {}
    tensors = read_tensors(path)
    latents, speaker = ".gpt_cond_latent", ".speaker_embedding"
    names = [name.removesuffix(latents) for name in tensors if name.endswith(latents)]
    return {
        name: Voice(
            name,
            tensors[name + latents].reshape(1, CONDITIONING_TOKENS, -1).float(),
            tensors[name + speaker].flatten().float(),
        )
        for name in names
        if name + speaker in tensors
    }
