"""The synthesizer: a model, its vocabulary and a device; text and a voice in, speech out.

    text ─ reading ─► sentences of ids ─ takes, writer ─► codes and latents ─ vocoding ─► waves ─ speech ─► Speech
    files ─ voices ─► Voice

Here the parts are put together. Where models come from is the caller's business, save for XTTS-v2 folders.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from myxtts.audio import Wave
from myxtts.checkpoint import UnreadableWeights
from myxtts.data.fill import Progress
from myxtts.model.generation import Sampling
from myxtts.model.xtts import XTTS
from myxtts.synthesis.griffin_lim import GriffinLim
from myxtts.synthesis.progress import NO_PROGRESS, Bars
from myxtts.synthesis.reading import Limits, Reader, Script
from myxtts.synthesis.speech import (
    OWN_SAMPLING,
    PUBLISHED_SAMPLING,
    Report,
    SentenceReport,
    Speech,
    check_manner,
    joined,
    require_sound,
    sentence_report,
)
from myxtts.synthesis.stream import SpeechStream
from myxtts.synthesis.takes import Manner, Part, Take, take_all
from myxtts.synthesis.vocoding import GPU_FRAMES_STEP, HifiGan
from myxtts.synthesis.voices import Listener, Voice
from myxtts.synthesis.writer import Writers, round_stack
from myxtts.text.tokenizer import Tokenizer
from myxtts.weights import Provenance, load_folder

VocoderName = Literal["hifigan", "griffin-lim"]
NUM_ATTEMPTS = 3
BATCH_SIZE, BATCHES_AT_ONCE = 16, 8
"""Sentences that are written together, and how many such batches are sorted by length before."""
CHUNK_CODES = 20
"""Codes between two pieces of a stream: not quite a second, as in XTTS-v2."""
_DECODER, _SPEAKER, _DVAE = "hifigan_decoder.waveform_decoder", "hifigan_decoder.speaker_encoder", "dvae"


def usable_vocoder(fresh_parts: Collection[str], wanted: VocoderName | None = None) -> VocoderName:
    """The vocoder for a model of which some parts (`weights.PARTS`) were never trained, or an error."""
    needed = {"hifigan": (_DECODER, _SPEAKER), "griffin-lim": (_DVAE,)}
    for part in ("gpt", "mel_stats"):
        if part in fresh_parts:
            raise UnreadableWeights(f"The model has no {part}, without which it cannot speak.")
    names: tuple[VocoderName, ...] = (wanted,) if wanted else ("hifigan", "griffin-lim")
    for name in names:
        if not set(needed[name]) & set(fresh_parts):
            return name
    words = {_DECODER: "decoder", _SPEAKER: "speaker encoder", _DVAE: "dvae"}
    missing = [words[part] for name in names for part in needed[name] if part in fresh_parts]
    stages = " or ".join(f"--stages {name}" for name in missing if name != words[_SPEAKER]) or "--stages decoder"
    other = " or use --vocoder griffin-lim" if wanted == "hifigan" and _DVAE not in fresh_parts else ""
    raise UnreadableWeights(
        f"The {' and the '.join(missing)} of this model {'is' if len(missing) == 1 else 'are'} not trained, so "
        f"nothing turns its codes into sound: train it ({stages}){other}."
    )


class Synthesizer:
    """Speaks. Not for several threads at once.

    Takes the model over: moves it to the device, folds the vocoder's weight norm and, on a GPU, rounds the GPT's
    stack to bfloat16 unless `dtype` says otherwise. `limits` are those of what the model was trained on, if it was
    shown less than it has positions for; `sampling` is what suits it. On a GPU the first speech of a new shape
    takes some tenths of a second longer, in which its step is captured.
    """

    def __init__(
        self,
        model: XTTS,
        vocabulary: Tokenizer,
        device: torch.device,
        *,
        vocoder: VocoderName = "hifigan",
        limits: Limits | None = None,
        use_phonemes: bool = False,
        sampling: Sampling = PUBLISHED_SAMPLING,
        dtype: torch.dtype | None = None,
        batch_size: int = BATCH_SIZE,
        capture: bool = True,
    ) -> None:
        model = model.to(device).eval().requires_grad_(False)
        model.hifigan_decoder.remove_weight_norm()
        self._batch_size, self.sampling = batch_size, sampling
        self._listener = Listener(model, device)
        self._reader = Reader(vocabulary, limits or Limits.of(model.dims.gpt), use_phonemes=use_phonemes)
        round_stack(model.gpt, dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32))
        vectors = model.dvae.codebook.embed.t() if model.dvae.codebook.is_trained else None
        self._writers = Writers(model.gpt, device, vectors, capture=capture)
        self._dims = model.dims
        self._vocoder: HifiGan | GriffinLim = (
            HifiGan(model.hifigan_decoder, batch_size, GPU_FRAMES_STEP if device.type == "cuda" else 1)
            if vocoder == "hifigan"
            else GriffinLim(model.dvae, model.mel_stats)
        )

    @classmethod
    def load(cls, folder: Path, device: torch.device, *, vocoder: VocoderName | None = None) -> Synthesizer:
        """The synthesizer of an XTTS-v2 folder; without a trained decoder there it speaks by Griffin-Lim."""
        loaded = load_folder(folder)
        name = usable_vocoder(loaded.fresh_parts, vocoder)
        return cls.suited(loaded.model, loaded.vocabulary, device, loaded.provenance, name)

    @classmethod
    def suited(
        cls,
        model: XTTS,
        vocabulary: Tokenizer,
        device: torch.device,
        provenance: Provenance,
        vocoder: VocoderName,
    ) -> Synthesizer:
        """A synthesizer that asks no more of a model than it was trained for."""
        own = provenance.from_scratch
        return cls(
            model,
            vocabulary,
            device,
            vocoder=vocoder,
            limits=Limits(provenance.max_text_length, provenance.max_mel_frames // 4) if own else None,
            use_phonemes=provenance.use_phonemes,
            sampling=OWN_SAMPLING if own else PUBLISHED_SAMPLING,
        )

    @property
    def fingerprint(self) -> str:
        """Of the weights that voices belong to: for `VoiceFolder.load`."""
        return self._listener.fingerprint

    def voice(self, files: Sequence[Path], name: str | None = None) -> Voice:
        """The voice of one or several recordings of one person."""
        return self._listener.voice(files, name)

    def speak(
        self,
        text: str,
        voice: Voice,
        language: str,
        *,
        sampling: Sampling | None = None,
        speed: float = 1.0,
        seed: int | None = None,
        num_attempts: int = NUM_ATTEMPTS,
        progress: Progress = NO_PROGRESS,
    ) -> Speech:
        """A text of any length in a voice. Without a seed one is drawn; the report names it."""
        (speech,) = self.speak_many(
            [text],
            voice,
            language,
            sampling=sampling,
            speed=speed,
            seed=seed,
            num_attempts=num_attempts,
            progress=progress,
        )
        require_sound(speech.report)
        return speech

    def speak_many(
        self,
        texts: Sequence[str],
        voice: Voice | Sequence[Voice],
        language: str | Sequence[str],
        *,
        sampling: Sampling | None = None,
        speed: float = 1.0,
        seed: int | None = None,
        num_attempts: int = NUM_ATTEMPTS,
        progress: Progress = NO_PROGRESS,
    ) -> list[Speech]:
        """Several texts at once, the sentences of all of them in batches; each as `speak` would say it.

        The same only up to rounding: kernels for batches add in another order, and where two codes are about
        equally likely the other one may come out. A text that comes out empty has an empty wave and a report that
        says so. One voice and one language serve all texts, or each has its own.
        """
        started_at = time.perf_counter()
        voices = [voice] * len(texts) if isinstance(voice, Voice) else list(voice)
        languages = [language] * len(texts) if isinstance(language, str) else list(language)
        manner = self._manner(sampling, speed, seed, num_attempts)
        for one in voices:
            self._require_own(one)
        scripts = [self._reader.read(text, code) for text, code in zip(texts, languages, strict=True)]
        parts = [part for script, one in zip(scripts, voices, strict=True) for part in _parts(script, one)]
        speakers = [one.speaker for script, one in zip(scripts, voices, strict=True) for _ in script.sentences]
        spoken = self._spoken(parts, speakers, manner, speed, progress)
        speeches = []
        for script, one in zip(scripts, voices, strict=True):
            own, reports = [], []
            for sentence in script.sentences:
                take, wave = next(spoken)
                loudest = float(abs(wave).max(initial=0))
                reports.append(sentence_report(sentence.text, take, len(wave), loudest))
                own.append(wave)
            report = self._report(script, one, manner, speed, reports, time.perf_counter() - started_at)
            speeches.append(Speech(joined(own), report))
        return speeches

    def _spoken(
        self, parts: Sequence[Part], speakers: Sequence[Tensor], manner: Manner, speed: float, progress: Progress
    ) -> Iterator[tuple[Take, Wave]]:
        """Each part with its wave, in order; a few batches at a time, so that a book does not fill the GPU."""
        for first in range(0, len(parts), BATCHES_AT_ONCE * self._batch_size):
            some = slice(first, first + BATCHES_AT_ONCE * self._batch_size)
            bars = Bars(progress, len(parts), first)
            takes = take_all(self._writers, parts[some], manner, bars)
            with bars.bar("Making the sound") as advance:
                waves = self._vocoder.waves([take.written for take in takes], speakers[some], speed, advance)
            yield from ((take, wave.numpy()) for take, wave in zip(takes, waves, strict=True))

    def stream(
        self,
        text: str,
        voice: Voice,
        language: str,
        *,
        sampling: Sampling | None = None,
        speed: float = 1.0,
        seed: int | None = None,
        num_attempts: int = NUM_ATTEMPTS,
        chunk_codes: int = CHUNK_CODES,
        progress: Progress = NO_PROGRESS,
    ) -> SpeechStream:
        """What `speak` says, in pieces as soon as they can be heard; the stream has the report when it is over.

        A sentence is tried again only while nothing of it was heard. By Griffin-Lim pieces are whole sentences.
        """
        manner = self._manner(sampling, speed, seed, num_attempts)
        self._require_own(voice)
        script = self._reader.read(text, language)

        def report(reports: Sequence[SentenceReport], spent_seconds: float) -> Report:
            whole = self._report(script, voice, manner, speed, reports, spent_seconds)
            require_sound(whole)
            return whole

        texts = [sentence.text for sentence in script.sentences]
        parts = list(zip(texts, _parts(script, voice), strict=True))
        bars = Bars(progress, len(parts))
        begin = partial(self._vocoder.begin, voice.speaker, speed)
        return SpeechStream(self._writers, parts, manner, begin, report, chunk_codes, bars)

    def _manner(self, sampling: Sampling | None, speed: float, seed: int | None, num_attempts: int) -> Manner:
        sampling = sampling or self.sampling
        check_manner(sampling, speed, num_attempts, seed, self._writers.knows_codes)
        return Manner(sampling, secrets.randbits(31) if seed is None else seed, num_attempts, self._batch_size)

    def _require_own(self, voice: Voice) -> None:
        """A voice of other weights would be noise to these."""
        fits = voice.latents.shape[2] == self._dims.gpt.dim and len(voice.speaker) == self._dims.speaker_dim
        if not fits or (voice.fingerprint and voice.fingerprint != self.fingerprint):
            raise UnreadableWeights(
                f"The voice {voice.name!r} was made by another model; make it again from its recordings."
            )

    def _report(
        self,
        script: Script,
        voice: Voice,
        manner: Manner,
        speed: float,
        reports: Sequence[SentenceReport],
        spent_seconds: float,
    ) -> Report:
        return Report(
            script.language,
            voice.name,
            self._vocoder.name,
            manner.seed,
            speed,
            tuple(reports),
            dict(script.unknown),
            spent_seconds,
            voice.notes,
        )


def _parts(script: Script, voice: Voice) -> list[Part]:
    numbered = enumerate(script.sentences)
    return [Part(number, sentence.ids, voice.latents, sentence.bounds) for number, sentence in numbered]
