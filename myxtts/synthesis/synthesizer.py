"""The synthesizer: a model, its vocabulary and a device; text and a voice in, speech out.

    text ─ text ─► sentences of ids ─ scheduler ─► pieces of sound ─► Speech
    files ─ voices ─► Voice

`load_synthesizer` loads a training run or an XTTS-v2 folder.
"""

from __future__ import annotations

import contextlib
import io
import secrets
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np
import soundfile
import torch

from myxtts import config
from myxtts.audio import Wave, write
from myxtts.checkpoints import UnreadableWeights
from myxtts.config import LANGUAGE_NAMES, LANGUAGES, SAMPLE_RATE, DataSettings, TrainingSettings, mel_frames
from myxtts.data.clips import ClipSet, LazyNames
from myxtts.data.prepare import read_training
from myxtts.devices import device_named, release_memory
from myxtts.errors import NO_PROGRESS, ConfigError, MyXTTSError, PipelineError, Progress, progress_bar
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.model.xtts import XTTS
from myxtts.run_dir import RunDir, readers_file
from myxtts.settings import load
from myxtts.synthesis.adaptation import adapted
from myxtts.synthesis.generation import MAX_NEW_CODES, Sampling, Shape, convert, usual_dtype
from myxtts.synthesis.scheduler import (
    CHUNK_CODES,
    GPU_FIRST_CODES,
    GPU_GROWTH,
    Attempt,
    Job,
    Piece,
    Scheduler,
    attempted,
)
from myxtts.synthesis.slots import Slots
from myxtts.synthesis.text import Limits, Sentence, TextFrontend
from myxtts.synthesis.vocoding import GriffinLim, HifiGan, is_faint
from myxtts.synthesis.voices import (
    USED_SECONDS,
    References,
    Voice,
    VoiceEncoder,
    belongs,
    fingerprint,
    published_voices,
    read_references,
)
from myxtts.synthesis.windows import MAX_SPEED
from myxtts.text.tokenizer import Tokenizer
from myxtts.weights import Provenance, has_weights, load_folder

PUBLISHED_SAMPLING = Sampling(temperature=0.75, top_k=50, top_p=0.85, repetition_penalty=5.0)
"""As in XTTS-v2's `config.json`, whose length penalty only matters to beam search."""
OWN_SAMPLING = replace(PUBLISHED_SAMPLING, repetition_penalty=1.0, penalise_prompt=False)
"""For a model trained from scratch: speech repeats codes, and a model of a small corpus knows which. With the
published penalty a model that had memorised eight sentences could say none of them."""
OWN_GUIDANCE = 2.0  # docs/results.md: words are clearer than without, and no scale from 1.5 to 3 is better
SAMPLING_FLAGS = ("temperature", "repetition_penalty", "guidance", "central")  # fields of `Sampling` with a flag
NUM_ATTEMPTS = 3
BATCH_SIZE = 16  # sentences generated together
MIN_SPEED, MAX_GUIDANCE = 0.5, 10.0
SILENT = 1e-3  # the wave of a sentence that never reaches this is silent
FAINT_NOTE = "hardly anything can be heard: the model has not learnt to make sound yet"
_FORMATS = (".wav", ".flac")
VocoderName = Literal["hifigan", "griffin-lim"]
_VOCODER_PARTS: dict[VocoderName, tuple[str, ...]] = {
    "hifigan": ("hifigan_decoder.waveform_decoder", "hifigan_decoder.speaker_encoder"),
    "griffin-lim": ("dvae",),
}


class SynthesisArguments(TypedDict, total=False):
    """Keyword arguments of `speak`, `speak_many` and `stream`; the defaults are those of `SynthesisOptions`."""

    sampling: Sampling | None
    speed: float
    seed: int | None
    num_attempts: int
    progress: Progress


@dataclass(frozen=True)
class SynthesisOptions:
    sampling: Sampling  # without the argument, what suits the model
    seed: int  # without the argument, a random one, which the report names
    speed: float = 1.0
    num_attempts: int = NUM_ATTEMPTS
    progress: Progress = NO_PROGRESS

    def check(self, has_codebook: bool) -> None:
        """Raise one error that lists every unusable value; central codes need the codebook of a trained DVAE."""
        sampling, penalty, guidance = self.sampling, self.sampling.repetition_penalty, self.sampling.guidance
        demands = {
            f"speed is {self.speed}, expected {MIN_SPEED} to {MAX_SPEED}": MIN_SPEED <= self.speed <= MAX_SPEED,
            f"temperature is {sampling.temperature}, expected above 0": sampling.temperature > 0,
            f"top_k is {sampling.top_k}, expected 0 (all) or more": sampling.top_k >= 0,
            f"top_p is {sampling.top_p}, expected above 0 and up to 1": 0 < sampling.top_p <= 1,
            f"repetition penalty is {penalty}, expected 1 or more": penalty >= 1,
            f"guidance is {guidance}, expected 1 to {MAX_GUIDANCE:g}": 1 <= guidance <= MAX_GUIDANCE,
            "central codes need the DVAE, which is missing or was never trained (--stages dvae, or dvae.pth next "
            "to XTTS-v2's weights); speak without --central": has_codebook or not sampling.central,
            f"attempts are {self.num_attempts}, expected 1 or more": self.num_attempts >= 1,
            f"seed is {self.seed}, expected 0 or more": self.seed >= 0,
        }
        if problems := [problem for problem, holds in demands.items() if not holds]:
            raise ConfigError("Cannot speak with these settings:\n  " + "\n  ".join(problems))

    @property
    def attempts(self) -> list[Sampling]:
        """How the codes of each attempt are chosen.

        Greedy decoding gets one attempt: a second would be the same. Later attempts draw their codes: a central
        code would be the same again.
        """
        again = replace(self.sampling, central=False)
        return [self.sampling] + [again] * (0 if self.sampling.greedy else self.num_attempts - 1)


def override_sampling(usual: Sampling, options: object) -> Sampling:
    """The usual sampling with the `SAMPLING_FLAGS` that are attributes of `options` and not None."""
    values = {name: getattr(options, name, None) for name in SAMPLING_FLAGS}
    return replace(usual, **{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True)
class SentenceReport:
    text: str
    num_codes: int
    seconds: float
    num_attempts: int
    problem: str | None
    """`empty`, `run-away`, `repetition` or `too short` if the best attempt still was; `silent` if its wave is."""
    is_faint: bool
    ids: tuple[int, ...] = ()  # what the model read, and the codes it said: see `alignment`
    codes: tuple[int, ...] = ()

    @classmethod
    def of(cls, sentence: Sentence, attempt: Attempt, wave: Wave) -> SentenceReport:
        seconds = len(wave) / OUTPUT_SAMPLE_RATE
        is_silent = attempt.problem is None and abs(wave).max(initial=0) < SILENT
        problem = "silent" if is_silent else attempt.problem
        facts = (sentence.text, len(attempt.codes), seconds, attempt.number, problem, is_faint(wave))
        return cls(*facts, tuple(sentence.ids), attempt.codes)


@dataclass(frozen=True)
class Report:
    """How a text was spoken; the same seed, weights and text give the same wave."""

    language: str
    voice: str
    vocoder: str
    seed: int
    speed: float
    sentences: tuple[SentenceReport, ...]
    unknown_characters: dict[str, str]  # those the vocabulary lacks, and what was said instead; "" if left out
    other_notes: tuple[str, ...] = ()  # about the model and the voice

    @property
    def seconds(self) -> float:
        """Length of the speech, without the pauses between sentences."""
        return sum(sentence.seconds for sentence in self.sentences)

    def notes(self) -> list[str]:
        """Everything the user should know, a sentence each."""
        notes = list(self.other_notes)
        if self.unknown_characters:
            pairs = (f"{a!r} as {b!r}" if b else f"{a!r} left out" for a, b in self.unknown_characters.items())
            notes.append(f"the vocabulary lacks characters of the text: {', '.join(pairs)}")
        for number, sentence in enumerate(self.sentences, 1):
            attempts, quoted = f"{sentence.num_attempts} attempts", repr(sentence.text[:60])
            if sentence.problem:
                notes.append(f"sentence {number} came out badly ({sentence.problem}, {attempts}): {quoted}")
            elif sentence.num_attempts > 1:
                notes.append(f"sentence {number} needed {attempts}: {quoted}")
        if all(sentence.is_faint for sentence in self.sentences):
            notes.append(FAINT_NOTE)
        return notes

    def require_sound(self) -> Report:
        """This report; raises an error if no sentence has any codes."""
        if not any(sentence.num_codes for sentence in self.sentences):
            said = f"The model said nothing in {self.sentences[0].num_attempts} attempts"
            why = "it ends every sentence at once. Is it trained enough, and on this language?"
            raise PipelineError(f"{said} at {self.sentences[0].text[:60]!r}: {why}")
        return self


class Utterance(NamedTuple):
    voice: Voice
    language: str
    sentences: list[Sentence]
    unknown_characters: dict[str, str]


@dataclass(frozen=True)
class Speech:
    """A wave of 24 kHz and its report."""

    wave: Wave
    report: Report

    def save(self, path: Path | str) -> None:
        """Write the wave as 16-bit WAV or FLAC, by the extension."""
        check_output(Path(path))
        save_wave(Path(path), self.wave, OUTPUT_SAMPLE_RATE)


def check_output(path: Path) -> None:
    """Raise an error if speech cannot be written under that name; call it before anything is computed."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"{path}: speech is written as WAV or FLAC; name a file that ends in .wav or .flac")


def save_wave(path: Path, wave: Wave, rate: int) -> None:
    """Write a wave, and the folders above it."""
    with _writing(path):
        write(path, wave, rate)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, soundfile.SoundFileError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be written: {why}") from error


class _File(io.FileIO):
    """A file that keeps the reason why it could not be written: libsndfile would hide it."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            return len(data)

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class SpeechStream(Iterator[Wave]):
    """An iterator over waves of 24 kHz; `report` is available once it is exhausted.

    Do not use the synthesizer for anything else before the stream is exhausted or closed.
    """

    def __init__(self, waves: Generator[Wave, None, Report]) -> None:
        self._waves = waves
        self._report: Report | None = None

    def __next__(self) -> Wave:
        try:
            return next(self._waves)
        except StopIteration as end:
            self._report = self._report or end.value
            raise

    def close(self) -> None:
        self._waves.close()

    def save(self, path: Path) -> None:
        """Write every piece as soon as it is ready, as 16-bit audio in the format of the extension.

        A stream that fails or is interrupted leaves no file.
        """
        form = ("w", OUTPUT_SAMPLE_RATE, 1, "PCM_16", None, path.suffix[1:])
        with contextlib.closing(self), _writing(path), _File(path, "w") as out:
            try:
                with soundfile.SoundFile(out, *form) as file:
                    for piece in self:
                        file.write(piece)
                        file.flush()
                        out.check()
                out.check()
            except BaseException:  # Ctrl-C too
                path.unlink(missing_ok=True)
                raise

    @property
    def report(self) -> Report:
        if self._report is None:
            raise RuntimeError("a stream has its report when all of it has been played")
        return self._report


class VocoderChoice(NamedTuple):
    name: VocoderName
    note: str = ""  # the reason, where the user did not choose


def usable_vocoder(
    fresh_parts: Collection[str],
    wanted: VocoderName | None = None,
    distances: Mapping[str, float] | None = None,
    reads_mels: bool = False,
) -> VocoderChoice:
    """The vocoder for a model whose `fresh_parts` (of `weights.PARTS`) were never trained, or an error.

    Of two that are trained, the one nearer to the recordings by the `distances` of the decoder's validation. A
    decoder that reads mels needs the DVAE too.
    """
    for part in ("gpt", "mel_stats"):
        if part in fresh_parts:
            raise UnreadableWeights(f"The model has no {part}, without which it cannot speak.")
    names: tuple[VocoderName, ...] = (wanted,) if wanted else ("hifigan", "griffin-lim")
    needed = {**_VOCODER_PARTS, "hifigan": (*_VOCODER_PARTS["hifigan"], *(("dvae",) if reads_mels else ()))}
    missing = {name: [part for part in needed[name] if part in fresh_parts] for name in names}
    trained = [name for name, parts in missing.items() if not parts]
    if distances and len(trained) == 2:
        decoder, griffin_lim = distances["decoder"], distances["griffin_lim"]
        numbers = f"held-out recordings (distance {griffin_lim:.2f}, the decoder {decoder:.2f})"
        if decoder <= griffin_lim:
            return VocoderChoice("hifigan", f"using the decoder; Griffin-Lim is farther from {numbers}")
        return VocoderChoice("griffin-lim", f"using Griffin-Lim, which is nearer to {numbers}")
    if trained:
        lacks_decoder = trained == ["griffin-lim"] and wanted is None
        note = "no trained decoder; using Griffin-Lim, which sounds hollow" if lacks_decoder else ""
        return VocoderChoice(trained[0], note)
    lacking = dict.fromkeys(part for parts in missing.values() for part in parts)
    words = [part.split(".")[-1].replace("_", " ") for part in lacking]
    choices = dict.fromkeys("dvae" if parts == ["dvae"] else "decoder" for parts in missing.values())
    stages = " or ".join(f"--stages {stage}" for stage in choices)
    other = " or use --vocoder griffin-lim" if wanted == "hifigan" and "dvae" not in fresh_parts else ""
    untrained = f"The {' and the '.join(words)} of this model {'is' if len(words) == 1 else 'are'} not trained"
    raise UnreadableWeights(f"{untrained}, so nothing turns its codes into sound: train it ({stages}){other}.")


class Synthesizer:
    """Speaks. Not thread-safe: whoever drives it works in the calling thread, and on its stream of the GPU.

    Takes over the model: moves it to the device, folds the vocoder's weight norm and rounds the GPT to
    16 bits unless `dtype` says otherwise. `limits` bound a sentence if the model was trained on less than it has
    positions for. Every report includes the `notes`, and says if `languages`, those that the model was trained on,
    lack that of the text. In the voice of a recording the GPT reads as one of the `readers`, if there are any.
    On a GPU the first speech takes some tenths of a second longer, while its steps are captured.
    """

    def __init__(
        self,
        model: XTTS,
        vocabulary: Tokenizer,
        device: torch.device,
        *,
        vocoder: VocoderName = "hifigan",
        notes: Sequence[str] = (),
        languages: Collection[str] = (),
        readers: Sequence[Voice] = (),
        limits: Limits | None = None,
        use_phonemes: bool = False,
        sampling: Sampling = PUBLISHED_SAMPLING,
        dtype: torch.dtype | None = None,
        batch_size: int = BATCH_SIZE,
        capture: bool = True,
    ) -> None:
        model = model.to(device).eval().requires_grad_(False)
        model.hifigan_decoder.remove_weight_norm()
        self._dims, self._batch_size, self._capture = model.dims, batch_size, capture
        self.device = device
        self.sampling, self._notes, self.languages = sampling, tuple(notes), languages
        self.limits = limits or Limits(model.dims.gpt.max_text, min(MAX_NEW_CODES, model.dims.gpt.max_codes))
        decides = model.dims.reads_mels and vocoder == "hifigan"  # the flow, on who speaks
        self._encoder = VoiceEncoder(model, device, readers if decides else ())
        self.fingerprint = fingerprint(model)
        self._frontend = TextFrontend(vocabulary, self.limits, use_phonemes=use_phonemes)
        convert(model.gpt, dtype or usual_dtype(device))
        self.gpt, codebook = model.gpt, model.dvae.codebook
        self._vectors = codebook.embed.t().float().contiguous() if codebook.is_trained else None
        self.vocoder: HifiGan | GriffinLim = (
            HifiGan(model.hifigan_decoder, (model.dvae, model.mel_stats))
            if vocoder == "hifigan"
            else GriffinLim(model.dvae, model.mel_stats)
        )
        self._slots: Slots | None = None  # kept on a GPU, with its captured steps

    @property
    def adapts(self) -> bool:
        """True if voices can be adapted to their recordings: the decoder has a flow, and it is used."""
        return isinstance(self.vocoder, HifiGan) and self.vocoder.codec is not None

    def voice(
        self,
        files: Sequence[Path | str],
        name: str | None = None,
        *,
        adapt: bool = False,
        progress: Progress = NO_PROGRESS,
    ) -> Voice:
        """The voice of one or several recordings of one person.

        `adapt` also learns what the weights do not know of it (`synthesis.adaptation`): half a minute on two CPU
        cores. Only for models with a flow, such as the base model.
        """
        references = read_references([Path(file) for file in files])
        return self.voice_of(references, name or Path(files[0]).stem, adapt=adapt, progress=progress)

    def voice_of(
        self, references: References, name: str, *, adapt: bool = False, progress: Progress = NO_PROGRESS
    ) -> Voice:
        """The voice of recordings that were read before."""
        if adapt and not self.adapts:
            reason = "it speaks through Griffin-Lim" if "-" in self.fingerprint else "its decoder has no flow"
            raise ConfigError(
                f"Voices of this model cannot be adapted to a recording: {reason}. Leave out --adapt, or "
                "fine-tune it on recordings of the person (myxtts train). Models of the size base have a flow."
            )

        def encode(references: References) -> Voice:
            voice = self._encoder.voice(references, name)
            if not adapt or not isinstance(self.vocoder, HifiGan) or self.vocoder.codec is None:
                return voice
            codec = self.vocoder.codec
            return adapted(voice, references[0], USED_SECONDS, self.gpt, codec, self.fingerprint, progress)

        voice = attempted(encode, references)
        if voice is None:
            self._slots = None
            release_memory()
            voice = attempted(encode, references)
        if voice is None:
            cure = "Close other programs that use it, or use the CPU: CUDA_VISIBLE_DEVICES= myxtts speak …"
            cure += " Without learning the voice (--no-adapt) less is needed." if adapt else ""
            raise PipelineError(f"Out of memory on {self.device} while encoding a voice. {cure}")
        return voice

    def speak(self, text: str, voice: Voice, language: str, **arguments: Unpack[SynthesisArguments]) -> Speech:
        """Speak a text of any length."""
        (speech,) = self.speak_many([text], voice, language, **arguments)
        speech.report.require_sound()
        return speech

    def speak_many(
        self,
        texts: Sequence[str],
        voice: Voice | Sequence[Voice],
        language: str | Sequence[str],
        **arguments: Unpack[SynthesisArguments],
    ) -> list[Speech]:
        """Speak several texts, their sentences side by side; one voice and one language for all, or one for each.

        Every speech equals that of `speak`, on a GPU up to rounding: kernels for more rows add in another order,
        and of two codes about equally likely the other one may be chosen. A text without any codes has an empty
        wave, and a report that says so.
        """
        options = self._options(arguments)
        voices = [voice] * len(texts) if isinstance(voice, Voice) else voice
        languages = [language] * len(texts) if isinstance(language, str) else language
        said = [self._utterance(*each) for each in zip(texts, voices, languages, strict=True)]
        num_sentences = sum(len(each.sentences) for each in said)
        with progress_bar(options.progress, "Speaking", num_sentences) as advance:
            heard = [_Heard(advance) for _ in said]
            jobs = [
                self.job(each, options, listener, streams=False, side_by_side=self._batch_size)
                for each, listener in zip(said, heard, strict=True)
            ]
            with self._driven(jobs) as scheduler:
                while any(not job.has_ended for job in jobs):
                    scheduler.advance()
                    _raise_errors(heard)
        speeches = []
        for utterance, one in zip(said, heard, strict=True):
            pieces = [piece.wave for piece in one.pieces] or [np.zeros(0, np.float32)]
            speeches.append(Speech(np.concatenate(pieces), self.report(utterance, one.reports, options)))
        return speeches

    def stream(
        self,
        text: str,
        voice: Voice,
        language: str,
        *,
        chunk_codes: int = CHUNK_CODES,
        **arguments: Unpack[SynthesisArguments],
    ) -> SpeechStream:
        """The speech of `speak` in pieces, as soon as they are ready; Griffin-Lim gives whole sentences.

        A sentence is tried again only while none of it was heard.
        """
        prepared = self.prepared(text, voice, language, arguments)
        return SpeechStream(self._stream(*prepared, max(1, chunk_codes)))

    def prepared(
        self, text: str, voice: Voice, language: str, arguments: SynthesisArguments
    ) -> tuple[Utterance, SynthesisOptions]:
        """The sentences of a text and the checked options; an error for what cannot be spoken."""
        options = self._options(arguments)
        return self._utterance(text, voice, language), options

    def job(self, said: Utterance, options: SynthesisOptions, listener: Any, **how: Any) -> Job:
        """What a scheduler speaks for a listener."""
        given = (said.sentences, said.voice, options.attempts, options.seed, listener, options.speed)
        if self.device.type == "cpu":
            return Job(*given, **how)
        chunk, delay = how.get("chunk_codes", CHUNK_CODES), self.vocoder.delay_codes
        first = delay + min(GPU_FIRST_CODES, chunk)
        return Job(*given, first_codes=first, later_codes=GPU_GROWTH * chunk, **how)

    def scheduler(self, num_slots: int, *, fitting: Sequence[Job] = (), **how: Any) -> Scheduler:
        """A scheduler with so many slots, each for any sentence, or for those of some jobs."""
        sizes = [(len(each.ids), each.bounds.most) for job in fitting for each in job.sentences]
        limits = [
            max(column) for column in zip(*sizes or [(self.limits.max_ids, self.limits.max_codes)], strict=True)
        ]

        def make(count: int) -> Slots:
            return Slots(self.gpt, Shape(count, *limits), self._vectors, capture=self._capture)

        return Scheduler(make, num_slots, self.vocoder, self.device, **how)

    def capture(self, slots: Slots) -> None:
        """Capture on a GPU what these slots and the vocoder will meet, instead of when it is first met."""
        if self._capture:
            slots.capture(self.sampling)
            self.vocoder.capture()

    @property
    def slot_bytes(self) -> int:
        """Memory of a slot for any sentence."""
        return Slots.bytes_of(self.gpt, Shape(1, self.limits.max_ids, self.limits.max_codes))

    @contextlib.contextmanager
    def _driven(self, jobs: Sequence[Job]) -> Iterator[Scheduler]:
        """A scheduler with these jobs, for the calling thread to drive."""
        on_cpu, rows = self.device.type == "cpu", max((job.num_slots for job in jobs), default=1)
        wanted = rows * max(1, min(self._batch_size, sum(len(job.sentences) for job in jobs)))
        kept, self._slots = self._slots, None
        kept = kept if kept is not None and kept.num_slots >= wanted else None
        # Captured steps serve any sentence; on a CPU memory is taken as it is needed.
        num_slots, fitting = (wanted, jobs) if on_cpu else (1 << (wanted - 1).bit_length(), ())
        scheduler = self.scheduler(num_slots, fitting=fitting, least_slots=rows, kept=kept)
        try:
            for job in jobs:
                scheduler.submit(job)
            yield scheduler
        finally:
            scheduler.close()
            self._slots = None if on_cpu else scheduler.kept

    def _stream(
        self, utterance: Utterance, options: SynthesisOptions, chunk_codes: int
    ) -> Generator[Wave, None, Report]:
        with progress_bar(options.progress, "Speaking", len(utterance.sentences)) as advance:
            heard = _Heard(advance)
            job = self.job(utterance, options, heard, chunk_codes=chunk_codes)
            with self._driven([job]) as scheduler:
                while not job.has_ended or heard.pieces:
                    while heard.pieces:
                        yield heard.pieces.popleft().wave
                    if not job.has_ended:
                        scheduler.advance()
                _raise_errors([heard])
        return self.report(utterance, heard.reports, options).require_sound()

    def _options(self, arguments: SynthesisArguments) -> SynthesisOptions:
        defaults: dict[str, Any] = {"sampling": self.sampling, "seed": secrets.randbits(31)}
        given = {name: value for name, value in arguments.items() if value is not None}
        options = SynthesisOptions(**(defaults | given))
        options.check(self._vectors is not None)
        return options

    def _utterance(self, text: str, voice: Voice, language: str) -> Utterance:
        """Split a text into sentences; refuse a voice of other weights, which would sound like noise."""
        fits = voice.latents.shape[2] == self._dims.gpt.dim and len(voice.speaker) == self._dims.speaker_dim
        fits = fits and (voice.offsets is None or "-" in self.fingerprint)
        if not fits or not belongs(voice, self.fingerprint):
            cure = "make it again from its recordings (myxtts voices --add)"
            raise UnreadableWeights(f"The voice {voice.name!r} was made by another model; {cure}.")
        code = self._frontend.language_code(language)
        return Utterance(voice, code, *self._frontend.sentences(text, code))

    def report(self, said: Utterance, sentences: Sequence[SentenceReport], options: SynthesisOptions) -> Report:
        """How a text was spoken."""
        voice, how = said.voice, (self.vocoder.name, options.seed, options.speed)
        notes = self._notes + voice.notes
        if self.languages and said.language not in self.languages:
            trained = ", ".join(LANGUAGE_NAMES[code] for code in self.languages if code in LANGUAGE_NAMES)
            notes += (f"the model was never trained on {LANGUAGE_NAMES[said.language]}, only on {trained}",)
        return Report(said.language, voice.name, *how, tuple(sentences), said.unknown_characters, notes)


class _Heard:
    """Keeps what a job says."""

    def __init__(self, advance: Any) -> None:
        self._advance = advance
        self.pieces: deque[Piece] = deque()
        self.reports: list[SentenceReport] = []
        self.error: Exception | None = None

    def piece(self, piece: Piece) -> None:
        self.pieces.append(piece)

    def sentence(self, sentence: Sentence, attempt: Attempt, wave: Wave) -> None:
        self.reports.append(SentenceReport.of(sentence, attempt, wave))
        self._advance(1)

    def end(self, error: Exception | None) -> None:
        self.error = error


def _raise_errors(heard: Sequence[_Heard]) -> None:
    for each in heard:
        if each.error is not None:
            raise each.error


def usual_model() -> Path:
    """The folder of the model that speaks if none is named: the run in `checkpoints`, else the base model."""
    run = TrainingSettings.checkpoint_dir
    if RunDir(run).exists:
        return run
    if not has_weights(config.BASE_FOLDER):
        raise ConfigError(
            f"There is no run in the folder {run}, and this copy of MyXTTS has no base model (no weights in "
            f"{config.BASE_FOLDER}). Name a run or an XTTS-v2 folder with --model DIR, or train one: myxtts train"
        )
    return config.BASE_FOLDER


def load_synthesizer(
    folder: Path | str | None = None,
    *,
    vocoder: VocoderName | None = None,
    device: torch.device | str | None = None,
    best_gpt: bool = False,
) -> Synthesizer:
    """Load a run or a folder of weights onto the first GPU, or the CPU; by default the `usual_model`.

    Without `vocoder` it speaks through the decoder, or through Griffin-Lim if the decoder is not trained, or is
    farther from held-out recordings by its own validation.
    `best_gpt` takes the GPT of a run with the best validation loss instead of the newest.
    """
    folder = usual_model() if folder is None else Path(folder)
    device = device_named(device)
    run = RunDir(folder)
    if run.exists:
        known = provenance(run)
        choice = usable_vocoder(known.untrained_parts, vocoder, known.vocoder, run.dims().reads_mels)
        model, vocabulary = run.load_model(without=known.untrained, best_gpt=best_gpt), run.vocabulary()
    elif not folder.is_dir():
        cure = "give the folder of a run or of XTTS-v2 (myxtts speak: --model DIR)"
        raise ConfigError(f"{folder}: no such folder; {cure}")
    elif best_gpt:
        raise ConfigError(f"--best chooses among the checkpoints of a run; {folder} is a folder of weights")
    else:
        model, vocabulary, fresh_parts, known = load_folder(folder)
        choice = usable_vocoder(fresh_parts, vocoder, known.vocoder, model.dims.reads_mels)
    return synthesizer_of(model, vocabulary, device, known, choice, readers_of(folder))


def readers_of(folder: Path) -> list[Voice]:
    """Voices that the GPT of a run or of a folder of weights learnt; empty if they are not known."""
    path = readers_file(folder)
    return [] if path is None else list(published_voices(path).values())


def synthesizer_of(
    model: XTTS,
    vocabulary: Tokenizer,
    device: torch.device,
    known: Provenance,
    choice: VocoderChoice,
    readers: Sequence[Voice] = (),
    capture: bool = True,
) -> Synthesizer:
    """A synthesizer that speaks as a model of this origin should."""
    speaks: dict[str, Any] = {
        "vocoder": choice.name,
        "notes": [choice.note] if choice.note else [],
        "languages": known.languages,
        "use_phonemes": known.use_phonemes,
        "readers": readers,
        "capture": capture,
    }
    if known.from_scratch:
        limits = Limits(known.max_text_length, known.max_mel_frames // 4)
        return Synthesizer(model, vocabulary, device, limits=limits, sampling=sampling_for(known, model), **speaks)
    return Synthesizer(model, vocabulary, device, **speaks)


def sampling_for(known: Provenance, model: XTTS) -> Sampling:
    """How a model trained from scratch speaks: with guidance and central codes if it was trained for them."""
    guidance = known.guidance or (OWN_GUIDANCE if known.text_dropout else 1.0)
    central = known.code_noise > 0 and model.dvae.codebook.is_trained  # central codes need its vectors
    return replace(OWN_SAMPLING, guidance=guidance, central=central)


def provenance(run: RunDir) -> Provenance:
    """The settings of a run that speaking depends on; defaults where its settings cannot be read."""
    try:
        data = load(run.folder / "settings.yaml", {}).settings.data
    except ConfigError:
        data = DataSettings()
    frames = run.started_with().get("data.max_mel_frames") or mel_frames(data)
    known = (data.max_text_length, frames, data.use_phonemes)
    notes = {stage: found.state["notes"] for stage, found in run.newest_notes().items()}
    learnt = run.trained_with()
    return Provenance(
        tuple(run.untrained()),
        run.from_scratch,
        *known,
        notes.get("decoder", {}).get("vocoder"),
        languages=tuple(run.languages()),
        text_dropout=float(learnt.get("training.text_dropout") or 0),
        code_noise=float(learnt.get("training.code_noise") or 0),
        guidance=float(run.started_with().get("guidance") or 0),
    )


SAMPLE_FILE, REFERENCE_FILE = "sample.wav", "reference.wav"
SAMPLE_SEED = 0
_ENOUGH_SECONDS = 3.0  # a recording of this length is enough for a voice


class Example(NamedTuple):
    """A clip of the corpus to try a run with: its voice and its text."""

    recording: Path
    text: str
    language: str


def example(data: DataSettings, clips: ClipSet, folder: Path) -> Example | None:
    """The first clip in the main language long enough for a voice, or the longest; of a shard, put in `folder`."""
    main_language = np.bincount(clips.languages).argmax()
    seconds = np.where(clips.languages == main_language, clips.num_samples / SAMPLE_RATE, 0.0)
    chosen = int(np.argmax(np.minimum(seconds, _ENOUGH_SECONDS)))
    try:
        name, names = clips.names[chosen], clips.names
        if isinstance(names, LazyNames) and (text := names.text(chosen)):
            save_wave(folder / REFERENCE_FILE, clips.wave(chosen), SAMPLE_RATE)
            return Example(folder / REFERENCE_FILE, text, LANGUAGES[main_language])
        corpora = read_training(data)
    except (MyXTTSError, OSError):
        return None
    found = [(corpus, clip) for corpus in corpora for clip in corpus.clips if clip.id == name]
    said = [(corpus.folder / clip.path, clip.text) for corpus, clip in found[:1]]
    return Example(*said[0], LANGUAGES[main_language]) if said else None


def speak_sample(folder: Path, said: Example, device: torch.device | None = None) -> Speech:
    """Speak an example with a run, always with the same seed, and write `SAMPLE_FILE` to its folder."""
    synthesizer = load_synthesizer(folder, device=device)
    voice = synthesizer.voice([said.recording])
    speech = synthesizer.speak(said.text, voice, said.language, seed=SAMPLE_SEED)
    speech.save(folder / SAMPLE_FILE)
    return speech
