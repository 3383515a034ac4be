"""Voices: the conditioning of a speaker, computed from recordings, stored and found by name, or built in.

    files ─ mono, 22.05 kHz ─► chunks of 4 s ─ conditioning mel ─► 32 latents, averaged over all chunks
                            └► up to 30 s of each file at 16 kHz ─► speaker embedding, averaged over the files

A voice belongs to the weights that made it, which its fingerprint identifies. `adaptation` adds offsets to it that
are learnt from the same recordings. Knows no text and speaks nothing.

Where a flow decides who speaks, the GPT may read in another voice. A GPT that learnt few real voices says wrong
words in those of strangers. With `readers`, voices that it learnt, a voice gets the latents of the one in which
the codes of its recordings are the least unexpected.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

from myxtts import config
from myxtts.audio import SILENCE, Pcm, UnusableAudio, decode, is_silent, trim_silence
from myxtts.checkpoints import Tensors, read_tensors, write_tensors
from myxtts.config import CONDITIONING_TOKENS, SAMPLE_RATE
from myxtts.errors import ConfigError, DatasetError
from myxtts.model.flow import NUM_OFFSETS
from myxtts.model.gpt import heard_loss
from myxtts.model.mel import CONDITIONING_MEL, DVAE_MEL, SPEAKER_SAMPLE_RATE, LogMel, resample
from myxtts.model.xtts import XTTS, speaker_of_latents
from myxtts.weights import VOICES_FILE, require_shipped

CHUNK_SECONDS, LEAST_CHUNK_SECONDS, USED_SECONDS = 4, 0.33, 30
"""As published with XTTS-v2. Several files contribute chunks in turn, up to 30 seconds together."""
READER_CHUNKS = 3  # that choose a reader; each takes a pass through the GPT for every reader
LONGEST_SECONDS = 600  # a longer file is taken for a recording session by mistake
SHORTEST_SECONDS, ENOUGH_SECONDS = 1.0, 3.0
SILENCE_DB = 40.0  # speech has ended where the level is this far below the loudest part
PUBLISHED_FILE = "speakers_xtts.pth"
_ABOUT = "about"  # the tensor with the languages and descriptions of the voices of a file, as JSON
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
    fingerprint: str = ""  # identifies the weights that made it, see `fingerprint`; empty if unknown
    notes: tuple[str, ...] = ()  # notes for the user about its recordings
    languages: tuple[str, ...] = ()  # those of the speaker; empty if unknown
    description: str = ""
    offsets: Tensor | None = None  # [NUM_OFFSETS] for the flow, if the voice was adapted to its recordings

    @property
    def for_vocoder(self) -> Tensor:
        """The speaker embedding, with the offsets behind it if there are any."""
        return self.speaker if self.offsets is None else torch.cat([self.speaker, self.offsets])


class VoiceEncoder:
    """Makes voices with the weights of one model, on the device it is on."""

    def __init__(self, model: XTTS, device: torch.device, readers: Sequence[Voice] = ()) -> None:
        self._gpt, self._dvae, self._readers = model.gpt, model.dvae, readers
        self._speaker_encoder = cast(nn.Module, model.hifigan_decoder.speaker_encoder)
        self._dims, self._encodes = model.dims, model.speaker_is_trained
        self._mel_stats = model.mel_stats
        self._mel, self._dvae_mel = LogMel(CONDITIONING_MEL).to(device), LogMel(DVAE_MEL).to(device)
        self._device = device
        self._fingerprint = fingerprint(model).partition("-")[0]

    @torch.no_grad()
    def voice(self, references: References, name: str) -> Voice:
        """The voice of one or several recordings of the same speaker."""
        recordings, notes = references
        waves = [torch.from_numpy(pcm).to(self._device).float() / 32768 for pcm in recordings]
        mels = [self._mel(chunk[None], self._mel_stats)[0].t() for chunk in _chunks(waves)]
        latents = self._gpt.voice(mels)
        if self._encodes:
            speaker = self._embedding(waves)
        else:
            speaker = speaker_of_latents(latents, self._dims.speaker_dim)[0]
        if not (latents.isfinite().all() and speaker.isfinite().all()):
            raise DatasetError("The voice is NaN or infinite: the weights are damaged, or training diverged.")
        if self._readers:
            latents = self._reader(waves).latents.to(latents)
        return Voice(name, latents.cpu(), speaker.cpu(), self._fingerprint, tuple(notes))

    def _reader(self, waves: Sequence[Tensor]) -> Voice:
        mels = [self._dvae_mel(chunk[None], self._mel_stats) for chunk in _chunks(waves)[:READER_CHUNKS]]
        codes = [self._dvae.encode(mel)[0] for mel in mels]

        def loss(reader: Voice) -> float:
            return sum(heard_loss(self._gpt, reader.latents, each) for each in codes)

        return min(self._readers, key=loss)

    def _embedding(self, waves: Sequence[Tensor]) -> Tensor:
        waves_16k = [resample(wave[None, : USED_SECONDS * SAMPLE_RATE], SPEAKER_SAMPLE_RATE) for wave in waves]
        embeddings = torch.cat([self._speaker_encoder(wave, l2_norm=True) for wave in waves_16k])
        return F.normalize(embeddings.mean(0), dim=0)


References = tuple[list[Pcm], list[str]]  # recordings at 22.05 kHz, and notes for the user


def read_references(files: Sequence[Path]) -> References:
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
    """A hash of the weights that make voices, and after a hyphen one of the flow that voices are adapted to.

    The fingerprint of a voice is the first half of this, or all of it if the voice was adapted. Small tensors are
    hashed: training changes all of these weights. Adapters of the GPT change none, so voices stay valid.
    """
    gpt, decoder = model.gpt, model.hifigan_decoder
    encoders = (gpt.conditioning_encoder, gpt.conditioning_perceiver, cast(nn.Module, decoder.speaker_encoder))
    made = _hash(encoders, model.mel_stats.detach().float().cpu().numpy().tobytes())
    flow = decoder.waveform_decoder.flow
    return made if flow is None else f"{made}-{_hash([flow])}"


def belongs(voice: Voice, model_fingerprint: str) -> bool:
    """True if the voice was made, and adapted, by the model of that fingerprint, or if its origin is unknown."""
    made_by = model_fingerprint if voice.offsets is not None else model_fingerprint.partition("-")[0]
    return voice.fingerprint in ("", made_by)


def _hash(parts: Sequence[nn.Module], first: bytes = b"") -> str:
    digest = xxhash.xxh3_128(first)
    for part in parts:
        for name, tensor in part.state_dict().items():
            if tensor.numel() <= _FINGERPRINTED:
                digest.update(name.encode() + tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


class VoiceLibrary:
    """The named voices of a model: those saved in its folder `voices`, and those that came with it.

    Voices of the base model are saved in the user's own folder, which an update of MyXTTS leaves alone.
    """

    def __init__(self, model_folder: Path) -> None:
        self._model = model_folder
        self.folder = (_user_folder() if model_folder == config.BASE_FOLDER else model_folder) / "voices"

    def built_in(self) -> dict[str, Voice]:
        """The voices that came with the model, by name, in their order: the first ones are preferred."""
        found = published_voices(self._model / PUBLISHED_FILE)
        if (self._model / VOICES_FILE).is_file():
            found |= published_voices(require_shipped(self._model, VOICES_FILE))
        return found

    def all(self) -> list[Voice]:
        """All voices, the built-in ones first; of two with one name, the saved one."""
        saved = {path.stem: _read_voice(path) for path in sorted(self.folder.glob("*.safetensors"))}
        return list((self.built_in() | saved).values())

    def default(self, language: str = "") -> str:
        """The name of the first built-in voice of that language, or else of any."""
        voices = list(self.built_in().values())
        if not voices:
            raise ConfigError(f"{self._model} has no built-in voice: give --speaker FILE, a recording of one")
        return next((voice for voice in voices if language in voice.languages), voices[0]).name

    def save(self, voice: Voice) -> Path:
        """Store a voice under its name; replaces an earlier one of that name."""
        path = self.path(voice.name)
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {"latents": voice.latents, "speaker": voice.speaker, "fingerprint": _as_bytes(voice.fingerprint)}
        tensors |= {} if voice.offsets is None else {"offsets": voice.offsets}
        write_tensors(path, tensors | _about([voice]))
        return path

    def build_in(self, voices: Sequence[Voice]) -> None:
        """Make these the built-in voices of a compact folder, in float16; `weights.save_compact` follows."""
        (self._model / VOICES_FILE).unlink(missing_ok=True)
        if not voices:
            return
        pairs = {f"{voice.name}.gpt_cond_latent": voice.latents.half() for voice in voices}
        pairs |= {f"{voice.name}.speaker_embedding": voice.speaker.half() for voice in voices}
        pairs |= {f"{v.name}.offsets": v.offsets.half() for v in voices if v.offsets is not None}
        self._model.mkdir(parents=True, exist_ok=True)
        write_tensors(self._model / VOICES_FILE, pairs | _about(voices))

    def delete(self, name: str) -> bool:
        """Delete a saved voice; False if there is none of that name. Built-in voices cannot be deleted."""
        path = self.path(name)
        found = path.is_file()
        path.unlink(missing_ok=True)
        return found

    def load(self, name: str, expected: str = "") -> Voice:
        """The voice of that name; a saved one must come from the model of that fingerprint, if any."""
        path = self.path(name)
        if not path.is_file():
            if (voice := self.built_in().get(name)) is None:
                raise ConfigError(self._unknown(name))
            return voice
        voice = _read_voice(path)
        if expected and not (voice.fingerprint and belongs(voice, expected)):
            raise DatasetError(
                f"The voice {name!r} in {self.folder} was made by other weights, such as an earlier version's. "
                f"Make it again from recordings: myxtts voices --add {shlex.quote(name)} FILE…"
            )
        return voice

    def _unknown(self, name: str) -> str:
        names = [voice.name for voice in self.all()]
        where = f"No voice {name!r} of the model in {self._model}"
        if len(names) <= _FEW_NAMES:
            return f"{where} (there are: {', '.join(names) or 'none yet'})."
        by_word = {known.lower(): known for known in names}
        near = get_close_matches(name.lower(), by_word, cutoff=0.4)
        nearest = ", ".join(by_word[word] for word in near) or "none"
        return f"{where} (the nearest: {nearest}). myxtts voices shows all {len(names)}."

    def path(self, name: str) -> Path:
        """The file of a saved voice; an error if the name could not be that of a file in this folder."""
        if not _NAME.fullmatch(name) or len(name.encode()) > _LONGEST_NAME:
            expected = f"up to {_LONGEST_NAME} letters, digits, spaces, dots and hyphens"
            raise ConfigError(f"{name[:60]!r} cannot name a voice; use {expected}.")
        return self.folder / f"{name}.safetensors"


def mixed(name: str, parts: Sequence[tuple[Voice, float]], fingerprint: str) -> Voice:
    """The weighted mean of voices of one model; the weights are positive and need not add up to 1."""
    total = sum(weight for _, weight in parts)
    latents = sum((voice.latents * (weight / total) for voice, weight in parts), torch.zeros(()))
    speaker = F.normalize(sum((voice.speaker * weight for voice, weight in parts), torch.zeros(())), dim=0)
    languages = tuple(dict.fromkeys(language for voice, _ in parts for language in voice.languages))
    described = " + ".join(f"{weight / total:.0%} {voice.name}" for voice, weight in parts)
    adapted = [(voice.offsets, weight / total) for voice, weight in parts if voice.offsets is not None]
    offsets = sum((each * share for each, share in adapted), torch.zeros(())) if adapted else None
    made_by = fingerprint if adapted else fingerprint.partition("-")[0]
    return Voice(name, latents, speaker, made_by, (), languages, described, offsets)


def published_voices(path: Path) -> dict[str, Voice]:
    """The speakers in a file such as XTTS-v2's `speakers_xtts.pth`, by name; none if there is no such file."""
    tensors = read_tensors(path) if path.is_file() else {}
    about, voices = _read_about(path, tensors), {}
    for key, latents in tensors.items():
        name, _, kind = key.rpartition(".")
        speaker = tensors.get(f"{name}.speaker_embedding")
        if kind == "gpt_cond_latent" and speaker is not None:
            latents, speaker = latents.reshape(1, *latents.shape[-2:]), speaker.flatten()
            offsets = tensors.get(f"{name}.offsets")
            if not _is_voice(latents, speaker, offsets):
                raise DatasetError(f"{path} is damaged: {name!r} has other shapes or types, or is not finite.")
            offsets = offsets if offsets is None else offsets.float()
            voices[name] = Voice(name, latents.float(), speaker.float(), offsets=offsets, **about.get(name, {}))
    return {name: voices[name] for name in {**about, **voices} if name in voices}


def _read_voice(path: Path) -> Voice:
    """A saved voice."""
    tensors = read_tensors(path)
    if missing := {"latents", "speaker", "fingerprint"} - tensors.keys():
        raise DatasetError(f"{path} is not a voice: it lacks {', '.join(sorted(missing))}.")
    offsets = tensors.get("offsets")
    is_voice = _is_voice(tensors["latents"], tensors["speaker"], offsets)
    if tensors["fingerprint"].dtype != torch.uint8 or not is_voice:
        raise DatasetError(f"{path} is not a voice: its tensors have other shapes or types, or are not finite.")
    about = _read_about(path, tensors).get(path.stem, {})
    made_by = _text(tensors["fingerprint"])
    return Voice(path.stem, tensors["latents"], tensors["speaker"], made_by, offsets=offsets, **about)


def _as_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _text(stored: Tensor) -> str:
    return bytes(stored.tolist()).decode(errors="replace")


def _about(voices: Sequence[Voice]) -> Tensors:
    """Languages and descriptions of voices as a tensor of their file."""
    facts = {each.name: {"languages": each.languages, "description": each.description} for each in voices}
    return {_ABOUT: _as_bytes(json.dumps(facts, ensure_ascii=False))}


def _read_about(path: Path, tensors: Tensors) -> dict[str, dict[str, Any]]:
    """What `_about` wrote, by the name of the voice; empty for files without it."""
    try:
        found = json.loads(_text(tensors[_ABOUT])) if _ABOUT in tensors else {}
        return {
            str(name): {"languages": tuple(map(str, facts["languages"])), "description": str(facts["description"])}
            for name, facts in found.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DatasetError(f"{path} is damaged: it describes its voices in an unknown form ({error}).") from None


def _user_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "myxtts"
    except RuntimeError:  # as in a container that runs under a number
        raise ConfigError("There is no home folder to keep voices in; set HOME or XDG_DATA_HOME.") from None


def _is_voice(latents: Tensor, speaker: Tensor, offsets: Tensor | None) -> bool:
    fits = latents.dim() == 3 and latents.shape[:2] == (1, CONDITIONING_TOKENS) and speaker.dim() == 1
    fits = fits and (offsets is None or offsets.shape == (NUM_OFFSETS,))
    parts = [latents, speaker, *([] if offsets is None else [offsets])]
    return fits and all(each.is_floating_point() and bool(each.isfinite().all()) for each in parts)
