"""The synthesizer: a model, its vocabulary and a device; text and a voice in, speech out.

    text ─ reading ─► sentences of ids ─ takes, writer ─► codes and latents ─ vocoding ─► waves ─ speech ─► Speech
    files ─ voices ─► Voice

Here the parts are put together. Where models come from is the caller's business, save for XTTS-v2 folders.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from myxtts.audio import Wave, write
from myxtts.checkpoints import UnreadableWeights
from myxtts.config import LANGUAGES, SAMPLE_RATE, DataSettings
from myxtts.data.clips import ClipSet
from myxtts.data.corpus import read_corpus
from myxtts.data.prepare import EMBEDDED_CORPUS
from myxtts.devices import Machine
from myxtts.errors import NO_PROGRESS, ConfigError, DatasetError, PipelineError, Progress
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.model.xtts import XTTS
from myxtts.run_dir import RunDir
from myxtts.settings import load
from myxtts.synthesis.generation import (
    Advance,
    Bars,
    Draft,
    Sampling,
    Writer,
    Writers,
    Written,
    draws,
    round_stack,
)
from myxtts.synthesis.text import (
    REPETITION,
    Bounds,
    Limits,
    Reader,
    Script,
    end_goes_in_circles,
    severity,
    trouble,
)
from myxtts.synthesis.vocoding import GPU_FRAMES_STEP, GriffinLim, HifiGan
from myxtts.synthesis.voices import Listener, Voice
from myxtts.text.tokenizer import Tokenizer
from myxtts.weights import Provenance, load_folder


class Part(NamedTuple):
    """One sentence of a text, in the voice that says it."""

    number: int
    """Its place in the text, which decides its random numbers."""
    ids: Sequence[int]
    voice: Tensor
    """[1, 32, dim]"""
    bounds: Bounds


class Take(NamedTuple):
    """The best attempt at a sentence."""

    written: Written
    trouble: str | None
    """What the guards still object to after the last attempt."""
    num_attempts: int


@dataclass(frozen=True)
class Manner:
    """How sentences are written."""

    sampling: Sampling
    seed: int
    num_attempts: int
    batch_size: int
    """Sentences at a time, at most."""

    def draft(self, part: Part, attempt: int) -> Draft:
        drawn = draws(self.seed, part.number, attempt, part.bounds.most)
        return Draft(part.ids, part.voice, part.bounds.most, drawn)

    def sampling_of(self, attempt: int) -> Sampling:
        """A central code would be the same again: later attempts draw one."""
        return replace(self.sampling, central=False) if attempt else self.sampling

    @property
    def attempts(self) -> range:
        """Trying again helps only where chance decides."""
        return range(1 if self.sampling.greedy else self.num_attempts)


def take_all(writers: Writers, parts: Sequence[Part], manner: Manner, bars: Bars) -> list[Take]:
    """A take of every part, in order; sentences of similar length are written together."""
    best: dict[int, Take] = {}
    waiting = sorted(range(len(parts)), key=lambda index: parts[index].bounds.most)
    for attempt in manner.attempts:
        title = f"Speaking again (attempt {attempt + 1})" if attempt else "Speaking"
        with bars.bar(title, len(parts) - len(waiting)) as advance:
            for first in range(0, len(waiting), manner.batch_size):
                batch = waiting[first : first + manner.batch_size]
                drafts = [manner.draft(parts[index], attempt) for index in batch]
                writer = writers.begin(drafts, manner.sampling_of(attempt))
                writer.finish(advance)
                for row, index in enumerate(batch):
                    found = judge(writer.written(row), parts[index].bounds, attempt)
                    best[index] = min(best.get(index, found), found, key=lambda take: severity(take.trouble))
        waiting = [index for index in waiting if best[index].trouble]
        for index in waiting:
            best[index] = best[index]._replace(num_attempts=attempt + 1)
        if not waiting:
            break
    return [best[index] for index in range(len(parts))]


def judge(written: Written, limits: Bounds, attempt: int) -> Take:
    """A whole sentence and what the guards say."""
    require_finite(written)
    return Take(written, trouble(written.codes.tolist(), limits), attempt + 1)


def require_finite(written: Written) -> None:
    """Raise an error when the network computes no numbers."""
    if not bool(written.latents.isfinite().all()):
        raise PipelineError(
            "The GPT computes NaN or infinity: its weights are damaged, or its training diverged. "
            "Use an earlier checkpoint."
        )


PUBLISHED_SAMPLING = Sampling(temperature=0.75, top_k=50, top_p=0.85, repetition_penalty=5.0)
"""As XTTS-v2's `config.json` has it; its length penalty of 1 counts only for a beam search, and there is none."""
OWN_SAMPLING = replace(PUBLISHED_SAMPLING, repetition_penalty=1.0, penalise_prompt=False)
"""For a model trained from scratch: speech repeats codes, and a model of a small corpus knows well which. With the
published penalty one that had learnt eight sentences by heart said none of them."""
ASKED = ("temperature", "repetition_penalty", "guidance", "central")
"""What a command line may ask for."""
SLOWEST_SPEED, FASTEST_SPEED = 0.5, 2.0
MOST_GUIDANCE = 10.0
PAUSE_SECONDS = 0.1
"""Silence between two sentences, beside what the model puts at their ends."""
SILENT = 1e-3
"""A wave that nowhere reaches this is no speech."""
_FADE_SAMPLES = OUTPUT_SAMPLE_RATE // 250
_FORMATS = (".wav", ".flac")


@dataclass(frozen=True)
class SentenceReport:
    """One sentence as it was spoken."""

    text: str
    num_codes: int
    seconds: float
    num_attempts: int
    trouble: str | None
    """`empty`, `run-away`, `repetition` or `too short` if the best attempt still was; `silent` if its wave is."""


@dataclass(frozen=True)
class Report:
    """How a speech came about; with the same seed, weights and texts it comes about again."""

    language: str
    voice: str
    vocoder: str
    seed: int
    speed: float
    sentences: tuple[SentenceReport, ...]
    unknown_characters: dict[str, str]
    """Characters that the vocabulary lacks, and what was said for them."""
    spent_seconds: float
    """From the text to the last sample; of the whole batch where texts were spoken together."""
    voice_notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Of speech, without the pauses between sentences."""
        return sum(sentence.seconds for sentence in self.sentences)

    @property
    def is_flawless(self) -> bool:
        return not self.notes()

    def notes(self) -> list[str]:
        """What the user should know, in sentences."""
        notes = list(self.voice_notes)
        if self.vocoder != "hifigan":
            notes.append("no decoder is trained: the wave is Griffin and Lim's guess from the DVAE's mel")
        if self.unknown_characters:
            pairs = (f"{a!r} as {b!r}" if b else f"{a!r} left out" for a, b in self.unknown_characters.items())
            notes.append(f"the vocabulary lacks characters of the text: {', '.join(pairs)}")
        for number, sentence in enumerate(self.sentences, 1):
            if sentence.trouble:
                notes.append(
                    f"sentence {number} came out badly ({sentence.trouble}, {sentence.num_attempts} attempts): "
                    f"{sentence.text[:60]!r}"
                )
            elif sentence.num_attempts > 1:
                notes.append(f"sentence {number} needed {sentence.num_attempts} attempts: {sentence.text[:60]!r}")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"seconds": self.seconds, "notes": self.notes()}


@dataclass(frozen=True)
class Speech:
    """A wave of 24 kHz and its report."""

    wave: Wave
    report: Report

    def save(self, path: Path) -> None:
        """Write the wave as 16-bit WAV or FLAC, by the extension."""
        check_output(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, self.wave, OUTPUT_SAMPLE_RATE)
        except (OSError, RuntimeError) as error:  # libsndfile's own errors are RuntimeErrors
            raise ConfigError(f"{path} cannot be written: {error}") from error


def check_output(path: Path) -> None:
    """Raise an error, before anything is computed, if speech cannot be written under that name."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"{path}: speech is written as WAV or FLAC; name a file that ends in .wav or .flac")


def as_asked(usual: Sampling, asked: object) -> Sampling:
    """The sampling with what somebody asked for by these names, and the usual where that is None or absent."""
    values = {name: getattr(asked, name, None) for name in ASKED}
    return replace(usual, **{name: value for name, value in values.items() if value is not None})


def check_manner(sampling: Sampling, speed: float, num_attempts: int, seed: int | None, knows_codes: bool) -> None:
    """One error with every value that cannot be used; `knows_codes` says whether the model has a trained DVAE."""
    penalty, guidance = sampling.repetition_penalty, sampling.guidance
    demands = {
        f"speed is {speed}, expected {SLOWEST_SPEED} to {FASTEST_SPEED}": SLOWEST_SPEED <= speed <= FASTEST_SPEED,
        f"temperature is {sampling.temperature}, expected above 0": sampling.temperature > 0,
        f"top_k is {sampling.top_k}, expected 0 (all) or more": sampling.top_k >= 0,
        f"top_p is {sampling.top_p}, expected above 0 and up to 1": 0 < sampling.top_p <= 1,
        f"repetition penalty is {penalty}, expected 1 or more": penalty >= 1,
        f"guidance is {guidance}, expected 1 to {MOST_GUIDANCE:g}": 1 <= guidance <= MOST_GUIDANCE,
        "central codes are found by the DVAE, which is missing or was never trained (--stages dvae, or dvae.pth "
        "beside XTTS-v2's weights); speak without --central": knows_codes or not sampling.central,
        f"attempts are {num_attempts}, expected 1 or more": num_attempts >= 1,
        f"seed is {seed}, expected 0 or more": seed is None or seed >= 0,
    }
    if problems := [problem for problem, holds in demands.items() if not holds]:
        raise ConfigError("This cannot be spoken with:\n  " + "\n  ".join(problems))


def sentence_report(text: str, take: Take, num_samples: int, loudest: float) -> SentenceReport:
    """The report of one sentence; silence counts only where there should be sound."""
    silent = "silent" if take.trouble is None and loudest < SILENT else take.trouble
    seconds = num_samples / OUTPUT_SAMPLE_RATE
    return SentenceReport(text, len(take.written.codes), seconds, take.num_attempts, silent)


def require_sound(report: Report) -> None:
    """Raise an error when no sentence of a speech says anything."""
    if not any(sentence.num_codes for sentence in report.sentences):
        first = report.sentences[0]
        raise PipelineError(
            f"The model said nothing in {first.num_attempts} attempts at {first.text[:60]!r}: it ends every "
            "sentence at once. Is it trained enough, and on this language?"
        )


def softened(wave: Wave, *, starts: bool, ends: bool) -> Wave:
    """A copy that starts from silence and ends in it, so that no edge of a sentence clicks."""
    wave = wave.copy()
    length = min(_FADE_SAMPLES, len(wave))
    rise = np.linspace(0, 1, length, dtype=np.float32)
    if starts:
        wave[:length] *= rise
    if ends:
        wave[len(wave) - length :] *= rise[::-1]
    return wave


def pause() -> Wave:
    return np.zeros(round(PAUSE_SECONDS * OUTPUT_SAMPLE_RATE), np.float32)


def joined(waves: Sequence[Wave]) -> Wave:
    """Sentences one after the other with pauses between them; those that say nothing leave none."""
    parts: list[Wave] = []
    for wave in waves:
        if len(wave):
            parts += [pause()] * bool(parts) + [softened(wave, starts=True, ends=True)]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


class SentenceStream(Protocol):
    """A vocoder at one sentence."""

    def push(self, written: Written, last: bool) -> Tensor:
        """Samples on the host that some more codes make certain."""
        ...


class SpeechStream:
    """An iterator over waves of 24 kHz; once it is exhausted, `report` says how the whole came about.

    Nothing else may be spoken with the same synthesizer before it is exhausted or closed.
    """

    def __init__(
        self,
        writers: Writers,
        parts: Sequence[tuple[str, Part]],
        manner: Manner,
        begin: Callable[[], SentenceStream],
        report: Callable[[Sequence[SentenceReport], float], Report],
        chunk_codes: int,
        bars: Bars,
    ) -> None:
        self._writers, self._manner, self._begin = writers, manner, begin
        self._make_report = report
        self._chunk_codes = max(1, chunk_codes)
        self._started_at = time.perf_counter()
        self._report: Report | None = None
        self._waves = self._shown(parts, bars)

    def __iter__(self) -> Iterator[Wave]:
        return self

    def __next__(self) -> Wave:
        return next(self._waves)

    def close(self) -> None:
        """Leave the rest unsaid."""
        self._waves.close()

    @property
    def report(self) -> Report:
        if self._report is None:
            raise RuntimeError("the report of a stream is there when all of it has been heard")
        return self._report

    def _shown(self, parts: Sequence[tuple[str, Part]], bars: Bars) -> Generator[Wave]:
        with bars.bar("Speaking") as advance:
            yield from self._speak(parts, advance)

    def _speak(self, parts: Sequence[tuple[str, Part]], advance: Advance) -> Iterator[Wave]:
        reports: list[SentenceReport] = []
        heard = False
        for text, part in parts:
            num_samples, loudest = 0, 0.0
            sentence = _Sentence(self._writers, part, self._manner, self._begin, self._chunk_codes)
            for wave in sentence:
                if heard and not num_samples:
                    yield pause()
                heard = True
                num_samples += len(wave)
                loudest = max(loudest, float(abs(wave).max()))
                yield wave
            reports.append(sentence_report(text, sentence.take, num_samples, loudest))
            advance(1)
        self._report = self._make_report(reports, time.perf_counter() - self._started_at)


class _Sentence:
    """One sentence in pieces, tried again while nothing of it was heard; `take` is there at the end."""

    def __init__(
        self,
        writers: Writers,
        part: Part,
        manner: Manner,
        begin: Callable[[], SentenceStream],
        chunk_codes: int,
    ) -> None:
        self._writers, self._part, self._manner = writers, part, manner
        self._begin, self._chunk_codes = begin, chunk_codes
        self.take: Take

    def __iter__(self) -> Iterator[Wave]:
        for attempt in self._manner.attempts:
            is_last_attempt = attempt == self._manner.attempts[-1]
            drafts = [self._manner.draft(self._part, attempt)]
            writer = self._writers.begin(drafts, self._manner.sampling_of(attempt))
            heard = False
            for wave in self._pieces(writer, attempt, is_last_attempt):
                heard = True
                yield wave
            if heard or self.take.trouble is None:
                return

    def _pieces(self, writer: Writer, attempt: int, is_last_attempt: bool) -> Iterator[Wave]:
        vocoder = self._begin()
        codes: list[int] = []
        heard = ended = False
        while not ended:
            ended = writer.advance(self._chunk_codes)
            more = writer.written(0, len(codes))
            codes += more.codes.tolist()
            if not ended and end_goes_in_circles(codes, len(more.codes)):
                ended = True
                self.take = Take(writer.written(0), REPETITION, attempt + 1)
            elif ended:
                self.take = judge(writer.written(0), self._part.bounds, attempt)
            else:
                require_finite(more)
            if ended and self.take.trouble and not heard and not is_last_attempt:
                return
            wave = vocoder.push(more, last=ended).numpy()
            if len(wave):
                yield softened(wave, starts=not heard, ends=ended)
                heard = True


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


SAMPLE_FILE = "sample.wav"
SAMPLE_SEED = 0
_ENOUGH_SECONDS = 3.0
"""Of a recording for its voice to be caught."""


def load_synthesizer(
    folder: Path,
    *,
    vocoder: VocoderName | None = None,
    device: torch.device | None = None,
    best_gpt: bool = False,
) -> Synthesizer:
    """The model of a folder, on the first GPU if there is one. A run without a decoder speaks by Griffin-Lim.

    `best_gpt` takes the GPT of a run that validated best instead of the newest.
    """
    if device is None:
        device = torch.device("cuda", 0) if Machine.look().gpus else torch.device("cpu")
    run = RunDir(folder)
    if not run.exists:
        if not folder.is_dir():
            raise ConfigError(
                f"There is no model in {folder}, for there is no such folder. Name that of a training run or of "
                "XTTS-v2 (myxtts speak: --model DIR)"
            )
        if best_gpt:
            raise ConfigError(f"--best chooses among the checkpoints of a run; {folder} is a folder of weights")
        return Synthesizer.load(folder, device, vocoder=vocoder)
    known = provenance(run)
    vocoder = usable_vocoder(known.untrained_parts, vocoder)
    model = run.load_model(without=known.untrained, best_gpt=best_gpt)
    return Synthesizer.suited(model, run.vocabulary(), device, known, vocoder)


def provenance(run: RunDir) -> Provenance:
    """What speaking with the weights of a run takes into account."""
    data = _data_settings(run.folder)
    lengths = {name: int(data[name]) for name in ("max_text_length", "max_mel_frames") if name in data}
    phonemes = bool(data.get("use_phonemes", False))
    return Provenance(tuple(run.untrained()), run.from_scratch, use_phonemes=phonemes, **lengths)


@dataclass(frozen=True)
class Example:
    """A clip of a corpus, for a run to be tried with: its voice, its words."""

    recording: Path
    text: str
    language: str


def example(data: DataSettings, clips: ClipSet) -> Example | None:
    """The first clip in the corpus's main language that is long enough for a voice, or the longest.

    None if the corpus is no longer there, or no longer has the clip.
    """
    main_language = np.bincount(clips.languages).argmax()
    seconds = np.where(clips.languages == main_language, clips.num_samples / SAMPLE_RATE, 0.0)
    chosen = int(np.argmax(np.minimum(seconds, _ENOUGH_SECONDS)))
    folder = data.train_data or EMBEDDED_CORPUS
    try:
        found = [clip for clip in read_corpus(folder).clips if clip.id == clips.names[chosen]]
    except (DatasetError, OSError):
        return None
    return Example(folder / found[0].path, found[0].text, LANGUAGES[main_language]) if found else None


def speak_sample(folder: Path, said: Example, device: torch.device | None = None) -> Speech:
    """Let a run say a sentence in a voice of its corpus, the same way each time; writes `SAMPLE_FILE` there."""
    synthesizer = load_synthesizer(folder, device=device)
    voice = synthesizer.voice([said.recording])
    speech = synthesizer.speak(said.text, voice, said.language, seed=SAMPLE_SEED)
    speech.save(folder / SAMPLE_FILE)
    return speech


def _data_settings(folder: Path) -> dict[str, Any]:
    """The section `data` of the settings a run was last started with."""
    try:
        return vars(load(folder / "settings.yaml", {}).settings.data)
    except ConfigError:
        return {}
