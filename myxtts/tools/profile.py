"""Where the time of a training goes, measured on the user's real configuration: `myxtts profile`.

The stage is rehearsed three times: as in the first epoch, as in every later one, traced, and with one batch over
and over, which is what a perfect feed would give. Judges nothing (`observe.verdict` does) and draws nothing.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from myxtts.audio import UnusableAudio
from myxtts.config import LANGUAGES, DataSettings, Settings, most_gatherers
from myxtts.data.batches import Batches, Cursor, Gatherer, HostBatch, Job, host_layout, packed_tokens
from myxtts.data.clips import ClipSet, DecodeOptions, PreparedCorpus
from myxtts.data.corpus import Clip, Corpus, read_corpus
from myxtts.data.prepare import EMBEDDED_CORPUS
from myxtts.devices import Machine, Plan
from myxtts.files import write_atomically, write_text_atomically
from myxtts.host import usable_cores
from myxtts.observe.breakdown import PhaseTime, ProfileData
from myxtts.observe.diagnosis import Diagnosis, diagnose
from myxtts.observe.findings import MIN_SHARE, SWITCHES, Finding, Level, Wait, sentence, wait_rule
from myxtts.observe.nvml import Reading, Sampler
from myxtts.observe.trace import Span, Trace
from myxtts.settings import LoadedSettings
from myxtts.text.language import detect_languages
from myxtts.text.normalize import normalize, phonemize
from myxtts.tools.dry_run import (
    KernelView,
    Measured,
    NotedRehearsal,
    forward_share,
    kernel_view,
    matrix_flops,
    mean_stage_ms,
    set_apart,
    useful_flops,
)

TEXTS, FILES = 200, 64
"""Of the corpus that are looked at, evenly spread over it."""
REPLAYED_STEPS = 4


@dataclass(frozen=True)
class Timing:
    """How long something takes; all zero when it was never done."""

    count: int
    mean_ms: float
    std_ms: float
    longest_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        times_ms = 1000 * np.array(seconds or [0.0])
        return cls(len(seconds), float(times_ms.mean()), float(times_ms.std()), float(times_ms.max()))

    @property
    def cv(self) -> float:
        """Coefficient of variation: the standard deviation as a share of the mean."""
        return self.std_ms / self.mean_ms if self.mean_ms else 0.0


@dataclass(frozen=True)
class TextAnalysis:
    """Text preprocessing, on one core."""

    normalize: Timing
    tokenize: Timing
    detect_ms: float | None
    """Per sentence, with the loading of the detector; None when no language has to be detected."""
    num_sentences: int
    """Of the corpus."""

    @property
    def sample_ms(self) -> float:
        """All of it, for one sentence."""
        return self.normalize.mean_ms + self.tokenize.mean_ms + (self.detect_ms or 0.0)


@dataclass(frozen=True)
class AudioAnalysis:
    """Audio loading: a file decoded, and a batch gathered as the settings say."""

    decode: Timing
    """Per file."""
    gather: Timing
    """Per batch, by one thread."""
    batch_size: int
    slowest: str
    """The file that took longest to decode."""

    @property
    def times_faster(self) -> float:
        """Gathering a batch against decoding its files."""
        return self.decode.mean_ms * self.batch_size / self.gather.mean_ms if self.gather.mean_ms else 0.0


@dataclass(frozen=True)
class FeedAnalysis:
    """How well the feed keeps up."""

    host: Timing
    """Between two batches in host memory, with all threads that gather."""
    first_epoch: Timing
    """Between two batches ready for the model, from a feed that is drained and computes codes."""
    feed: Timing
    """The same when codes are known: every epoch but the first."""
    phases: dict[str, PhaseTime]
    """Of the latter."""
    step_ms: float
    """Training on a batch."""
    step_is_given: bool
    """By the user; else it was measured here by replaying a batch."""
    num_gpus: int

    @property
    def on_gpu(self) -> bool:
        return self.num_gpus > 0

    @property
    def supply_ms(self) -> float:
        """Between two batches; what encoding takes a CPU says nothing about a step on a GPU."""
        return self.host.mean_ms if self.step_is_given and not self.on_gpu else self.feed.mean_ms

    @property
    def wait_ms(self) -> float:
        """That a step waits for its batch, in the long run."""
        return max(self.supply_ms - self.step_ms, 0.0)

    @property
    def idle_share(self) -> float:
        """Estimated share of the time in which the model's device has nothing to do."""
        return self.wait_ms / (self.wait_ms + self.step_ms) if self.wait_ms else 0.0

    @property
    def slowest(self) -> str:
        """The phase that bounds the supply."""
        if self.step_is_given and not self.on_gpu:
            return "gather"
        return max(self.phases, key=lambda name: self.phases[name].period_ms, default="gather")


def time_text(clips: Sequence[Clip], data: DataSettings, prepared: PreparedCorpus) -> TextAnalysis:
    """What happens once to every sentence."""
    languages = {
        name: LANGUAGES[int(number)]
        for part in (prepared.train, prepared.val)
        for name, number in zip(part.names, part.languages, strict=True)
    }
    chosen = [clip for clip in _spread(clips, TEXTS) if clip.id in languages]
    unknown = [clip for clip in chosen if not clip.language and data.language is None]
    detect_ms = None
    if unknown:
        detect = partial(detect_languages, [clip.text for clip in unknown], [clip.speaker for clip in unknown])
        detect_ms = 1000 * _seconds(detect) / len(unknown)

    def speak(clip: Clip) -> str:
        words = normalize(clip.text, languages[clip.id])
        return phonemize([words], languages[clip.id])[0] if data.use_phonemes else words

    lines = [(speak(clip), languages[clip.id]) for clip in chosen]  # loads the tables before anything is timed
    spoken_s = [_seconds(partial(speak, clip)) for clip in chosen]
    encode = prepared.tokenizer.encode_batch
    encode([line for line, _ in lines[:1]], [code for _, code in lines[:1]])
    encoded_s = [_seconds(partial(encode, [line], [code])) for line, code in lines]
    return TextAnalysis(Timing.of(spoken_s), Timing.of(encoded_s), detect_ms, len({clip.text for clip in clips}))


def time_decoding(corpus: Corpus, data: DataSettings, num_files: int = FILES) -> dict[str, float]:
    """Seconds that decoding takes, by file; those that cannot be decoded are left out, as in training."""
    options, taken_s = DecodeOptions.of(data), {}
    for clip in _spread(corpus.clips, num_files):
        started_at = time.perf_counter()
        try:
            options.decode(corpus.folder / clip.path)
        except UnusableAudio:
            continue
        taken_s[clip.path] = time.perf_counter() - started_at
    return taken_s


def time_audio(corpus: Corpus, data: DataSettings, source: ClipSet, num_batches: int) -> AudioAnalysis:
    """Decoding files, and gathering batches."""
    decoded_s = time_decoding(corpus, data)
    gatherer, batch = _gatherer(source, data), HostBatch(host_layout(data), pinned=False)
    gathered_s = [_seconds(partial(gatherer.fill, batch, job)) for job in _jobs(gatherer, num_batches)]
    slowest = max(decoded_s, key=lambda path: decoded_s[path], default="")
    return AudioAnalysis(Timing.of([*decoded_s.values()]), Timing.of(gathered_s), data.batch_size, slowest)


def time_host(source: ClipSet, data: DataSettings, num_batches: int) -> Timing:
    """Between two batches in host memory, gathered by as many threads as a training would start."""
    num_threads = min(data.num_workers, most_gatherers(data, usable_cores()), num_batches)
    gatherer, layout = _gatherer(source, data), host_layout(data)
    jobs = iter([*_jobs(gatherer, num_batches)])
    done_at = [time.perf_counter()]

    def work(batch: HostBatch) -> None:
        for job in jobs:  # an iterator over a list gives each item to one thread
            gatherer.fill(batch, job)
            done_at.append(time.perf_counter())

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(work, [HostBatch(layout, pinned=False) for _ in range(num_threads)]))
    return Timing.of([*np.diff(sorted(done_at)).tolist()])


def time_feed(
    loaded: LoadedSettings, prepared: PreparedCorpus, stage: str, num_batches: int, step_ms: float | None
) -> FeedAnalysis:
    """The feed of a stage drained twice, and the time of a step; codes are kept where `prepared` says."""
    data, rehearsal = loaded.settings.data, NotedRehearsal(loaded, prepared, stage)
    first_epoch = rehearsal.drain(num_batches)  # which leaves codes behind
    later = rehearsal.drain(num_batches)
    if given := step_ms is not None:
        taken_ms = step_ms
    else:
        steps = rehearsal.measure(REPLAYED_STEPS, replay=True).times
        taken_ms = float(np.mean([step.step_ms for step in steps])) / rehearsal.accumulate
    return FeedAnalysis(
        host=time_host(prepared.train, data, num_batches),
        first_epoch=Timing.of(first_epoch.seconds),
        feed=Timing.of(later.seconds),
        phases=later.phases,
        step_ms=taken_ms,
        step_is_given=given,
        num_gpus=len(Machine.look().gpus),
    )


def _gatherer(source: ClipSet, data: DataSettings) -> Gatherer:
    tokens = packed_tokens(source.num_ids, source.num_samples)
    return Gatherer(source, Batches(tokens, data.batch_size, seed=0), data, seed=0)


def _jobs(gatherer: Gatherer, num_batches: int) -> Iterator[Job]:
    return gatherer.jobs(Cursor(), num_batches=num_batches)


def _spread(clips: Sequence[Clip], count: int) -> list[Clip]:
    """So many clips, evenly spread."""
    return list(itertools.islice(clips, 0, None, max(len(clips) // count, 1)))[:count]


def _seconds(work: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


UNEVEN = 1.0
"""Coefficient of variation above which some files are far slower than the others."""
MUCH_DETECTION = 0.5
"""Share of the text preprocessing."""
CODES = {
    "data-feed-slow": "Batches are made more slowly than they are trained on.",
    "data-feed-fast": "Batches are made faster than they are trained on.",
    "data-first-epoch": "The first epoch is slower, because it computes the codes that later ones find.",
    "data-audio-decoded": "Files are decoded for every batch; the packed cache spares that.",
    "data-audio-packed": "Gathering from the packed cache, compared with decoding the files.",
    "data-audio-uneven": "Some files take far longer to decode than the others.",
    "data-text-once": "What text preprocessing costs; it is done once.",
    "data-text-detection": "Most of the text preprocessing is language detection; naming the language spares it.",
}
"""What each finding means."""


@dataclass(frozen=True)
class DataAnalysis:
    """What the data side does, and what to change."""

    text: TextAnalysis
    audio: AudioAnalysis
    feed: FeedAnalysis
    findings: list[Finding] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Everything that was measured and what follows from it."""
        record = asdict(self)
        record["text"]["sample_ms"] = self.text.sample_ms
        record["audio"] |= {"decode_cv": self.audio.decode.cv, "gather_cv": self.audio.gather.cv}
        derived = ("supply_ms", "wait_ms", "idle_share", "slowest")
        record["feed"] |= {name: getattr(self.feed, name) for name in derived}
        return record


def analyse(
    loaded: LoadedSettings,
    prepared: PreparedCorpus,
    *,
    stage: str = "gpt",
    num_batches: int = 20,
    step_ms: float | None = None,
) -> DataAnalysis:
    """All three analyses; without `step_ms` the step is measured here."""
    data = loaded.settings.data
    corpus = read_corpus(data.train_data or EMBEDDED_CORPUS)
    text = time_text(corpus.clips, data, prepared)
    audio = time_audio(corpus, data, prepared.train, num_batches)
    with set_apart(prepared) as apart:
        feed = time_feed(loaded, apart, stage, num_batches, step_ms)
    return DataAnalysis(text, audio, feed, findings_of(text, audio, feed, data))


def findings_of(text: TextAnalysis, audio: AudioAnalysis, feed: FeedAnalysis, data: DataSettings) -> list[Finding]:
    """What follows from the figures, the feed first."""
    return [*_of_feed(feed, data), *_of_audio(audio, data), *_of_text(text)]


def _of_feed(feed: FeedAnalysis, data: DataSettings) -> Iterator[Finding]:
    step = f"training on it {'takes' if feed.step_is_given else 'took'} {feed.step_ms:.1f} ms."
    why = f"A batch comes every {feed.supply_ms:.1f} ms, and {step}"
    gain = feed.supply_ms / feed.step_ms if feed.step_ms else 1.0
    if feed.idle_share > MIN_SHARE:
        what = f"The model would wait {100 * feed.idle_share:.0f} % of the time for {feed.slowest}."
        phase = feed.slowest if data.prefetch_to_gpu else "upload"
        wait = Wait(settings=Settings(data=data), num_gpus=feed.num_gpus, cores=usable_cores(), phase=phase)
        fix, setting, value = wait_rule(wait).fix(wait)
        yield Finding("data-feed-slow", "warn", what, why, sentence(fix), setting, value, gain)
    else:
        what = f"Batches come {1 / max(gain, 1e-9):.1f} times as fast as they are used."
        yield Finding("data-feed-fast", "pass", what, why)
    if feed.step_is_given and not feed.on_gpu:
        return  # what encoding takes this CPU says nothing about the GPU
    slower = feed.first_epoch.mean_ms / max(feed.feed.mean_ms, feed.step_ms, 1e-9)
    if slower > 1 + MIN_SHARE and feed.first_epoch.mean_ms > feed.step_ms:
        what = f"The first epoch is up to {slower:.1f} times as slow as the others."
        why = f"Computing codes, a batch comes every {feed.first_epoch.mean_ms:.1f} ms; they are kept."
        yield Finding("data-first-epoch", "info", what, why)


def _of_audio(audio: AudioAnalysis, data: DataSettings) -> Iterator[Finding]:
    decode, gather = audio.decode, audio.gather
    why = f"Decoding takes {decode.mean_ms:.1f} ms a file, gathering {gather.mean_ms:.1f} ms a batch."
    if data.native_loading:
        what = f"A batch comes {audio.times_faster:.1f} times as fast from the packed cache as from its files."
        yield Finding("data-audio-packed", "pass", what, why)
    else:
        what = f"The {audio.batch_size} files of a batch are decoded every time it is gathered."
        fix = sentence(SWITCHES["data.native_loading"].fix)
        yield Finding("data-audio-decoded", "warn", what, why, fix, "data.native_loading", True)
    if decode.cv > UNEVEN:
        what = f"Decoding varies by {100 * decode.cv:.0f} %: some files are far slower than the others."
        why = f"{audio.slowest} took {decode.longest_ms:.0f} ms, a file on average {decode.mean_ms:.1f} ms."
        fix = "" if data.native_loading else "Look at those files."
        level: Level = "info" if data.native_loading else "warn"
        yield Finding("data-audio-uneven", level, what, why, fix)


def _of_text(text: TextAnalysis) -> Iterator[Finding]:
    total_s = text.sample_ms * text.num_sentences / 1000
    what = f"A sentence takes {text.sample_ms:.2f} ms, all {text.num_sentences} about {total_s:.1f} s on one core."
    why = "This is done once and kept: the next start reads the result."
    yield Finding("data-text-once", "pass", what, why)
    if text.detect_ms is not None and text.detect_ms > MUCH_DETECTION * text.sample_ms:
        what = f"{100 * text.detect_ms / text.sample_ms:.0f} % of the text preprocessing is language detection."
        why = "Neither the metadata nor the settings name a language."
        fix = "Name the language, if all clips share one: --language."
        yield Finding("data-text-detection", "info", what, why, fix, "data.language")


PLACES = {
    "gather": "host",
    "upload": "data",
    "encode": "data",
    "handoff": "data",
    "wait": "host",
    "train": "model",
    "update": "model",
}
"""The stages in the order in which a batch passes them, and whose time they take."""
NOTES = {"wait": "the program waits for a batch", "train": "forward and backward", "update": "clipping and AdamW"}
FIRST_STEPS_GPU, FIRST_STEPS_CPU = 20, 2
"""Steps of the first pass, which also tells how long a step takes."""
CPU_BATCHES = 8
"""Batches that are taken from a feed on a CPU."""
MOST_CPU_S = 30.0
"""Seconds that a pass may take on a CPU, where a step can take many."""
SLOW_STEP_S = 2.0
"""A step beyond which its forward and backward passes are not told apart: that takes some steps more."""
DECODED_FILES = 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PhaseRow:
    """A phase of the pipeline or of the step."""

    phase: str
    where: str
    """host, data or model: whose time it takes."""
    mean_ms: float
    """For a batch."""
    p95_ms: float
    share: float
    """Of the whole time, in which a worker of this stage was busy with it."""
    note: str = ""


@dataclass(frozen=True)
class GpuUse:
    """Readings of a GPU, as means; None is what the driver does not tell."""

    gpu: int
    role: str
    utilisation: float | None
    memory_used_mb: float | None
    memory_total_mb: float | None
    power_w: float | None
    temperature_c: float | None


@dataclass(frozen=True)
class Profile:
    """What was measured, and what it means; only `data` when nothing was trained."""

    stage: str
    device: str
    num_steps: int
    batch_size: int
    notes: list[str] = field(default_factory=list)
    clips_per_s: float | None = None
    """In the long run."""
    first_epoch_clips_per_s: float | None = None
    """While codes are computed; None where the stage needs none."""
    rows: list[PhaseRow] = field(default_factory=list)
    verdict: Diagnosis | None = None
    gpus: list[GpuUse] = field(default_factory=list)
    memory_mb: dict[str, float] = field(default_factory=dict)
    kernels: KernelView | None = None
    data: DataAnalysis | None = None
    trace: Trace | None = None
    """Of the pass that the verdict is about."""

    @property
    def findings(self) -> list[Finding]:
        """What to change, the dearest first."""
        return [*(self.verdict.findings if self.verdict else []), *(self.data.findings if self.data else [])]

    def to_json(self) -> dict[str, Any]:
        """Everything but the trace."""
        parts = {name: part for name, part in vars(self).items() if name not in ("trace", "rows", "gpus")}
        for name in ("verdict", "kernels", "data"):
            parts[name] = parts[name].to_json() if parts[name] is not None else None
        parts |= {"rows": [asdict(row) for row in self.rows], "gpus": [asdict(gpu) for gpu in self.gpus]}
        return parts | {"findings": [found.to_json() for found in self.findings]}


def keep(found: Profile, run_folder: Path) -> None:
    """Leave the verdict and its spans in a run, for its page."""
    if found.verdict is not None and found.trace is not None:
        verdict = json.dumps(found.verdict.to_json(), indent=1)
        write_text_atomically(run_folder / "verdict.json", verdict)
        write_atomically(run_folder / "trace.jsonl", found.trace.write_jsonl)


def profile(
    loaded: LoadedSettings,
    prepared: PreparedCorpus,
    *,
    num_steps: int = 50,
    stage: str = "gpt",
    data_only: bool = False,
    kernels: bool = False,
    step_ms: float | None = None,
) -> Profile:
    """Measure a stage; `data_only` only its data side, against a step of `step_ms` if that is given."""
    machine = Machine.look()
    on_gpu = bool(machine.gpus)
    if data_only:
        num_batches = num_steps if on_gpu else min(num_steps, CPU_BATCHES)
        _log.info("Looking at texts and recordings, then taking %d batches", num_batches)
        analysis = analyse(loaded, prepared, stage=stage, num_batches=num_batches, step_ms=step_ms)
        device = "GPU" if on_gpu else "CPU"
        return Profile(stage, device, num_batches, loaded.settings.data.batch_size, data=analysis)
    with set_apart(prepared) as apart:
        _log.info("Setting up the stage %s as a training would", stage)
        rehearsal = NotedRehearsal(loaded, apart, stage)
        return _profile(rehearsal, loaded, apart, machine, num_steps, kernels)


def _profile(
    rehearsal: NotedRehearsal,
    loaded: LoadedSettings,
    prepared: PreparedCorpus,
    machine: Machine,
    num_steps: int,
    kernels: bool,
) -> Profile:
    plan = rehearsal.plan
    on_gpu = plan.model.type == "cuda"
    first_steps = min(num_steps, FIRST_STEPS_GPU if on_gpu else FIRST_STEPS_CPU)
    _log.info("Training %d steps as in the first epoch", first_steps)
    first = rehearsal.measure(first_steps, traced=True)
    step_s, notes = first.seconds / len(first.times), []
    affordable = max(int(MOST_CPU_S / step_s), FIRST_STEPS_CPU)
    if not on_gpu and affordable < num_steps:
        notes.append(f"{affordable} of {num_steps} steps were measured, for one takes {step_s:.1f} s on this CPU")
        num_steps = affordable
    _log.info("Training at least %d steps as in every later epoch, about %.0f s", num_steps, num_steps * step_s)
    rehearsal.fill_codes()  # the first pass computed those of a few batches only
    indices = sorted({device.index for device in (plan.data, plan.model) if device.index is not None})
    with Sampler(indices) as sampler:
        measured = rehearsal.steady(num_steps)
        readings, no_readings = sampler.samples(), sampler.reason if on_gpu else "This machine has no GPU"
    trace = rehearsal.trace
    _log.info("Training %d steps on one batch, as if the feed were perfect", num_steps)
    replayed = rehearsal.measure(num_steps, replay=True, traced=True)
    view = kernel_view(rehearsal) if kernels or on_gpu else None  # only kernels show that the host waits
    _log.info("Drawing conclusions")
    evidence = _evidence(rehearsal, loaded, prepared, measured, replayed)
    evidence = replace(evidence, readings=readings, no_readings=no_readings, num_gpus=len(machine.gpus))
    if view is not None:
        evidence = replace(evidence, kernel_share=view.kernel_share, syncs_per_step=view.syncs_per_step)
    rows = [*_rows(measured, first, rehearsal.stage)]
    if on_gpu or step_s < SLOW_STEP_S:
        rows = [*_with_passes(rows, rehearsal, mean_stage_ms(replayed)["train"])]
    return Profile(
        stage=rehearsal.stage,
        device=machine.label(plan.model),
        num_steps=len(measured.times),
        batch_size=loaded.settings.data.batch_size,
        notes=notes,
        clips_per_s=rehearsal.long_run_clips_per_s(measured),
        first_epoch_clips_per_s=None if rehearsal.stage == "dvae" else rehearsal.long_run_clips_per_s(first),
        rows=[_decode_row(loaded.settings.data), *rows],
        verdict=diagnose(evidence),
        gpus=_uses(readings, plan),
        memory_mb=measured.memory_mb,
        kernels=view if kernels else None,
        trace=trace,
    )


def _evidence(
    rehearsal: NotedRehearsal,
    loaded: LoadedSettings,
    prepared: PreparedCorpus,
    measured: Measured,
    replayed: Measured,
) -> ProfileData:
    """What the rehearsal says of itself and of its device."""
    num_clips = loaded.settings.data.batch_size * rehearsal.accumulate
    peak_flops = matrix_flops(rehearsal.plan, rehearsal.stream) if rehearsal.stage == "gpt" else None
    flops = useful_flops(rehearsal.step.recipe, prepared.train, num_clips) if peak_flops else None
    return ProfileData(
        spans=measured.spans,
        counters=measured.counters,
        replayed=replayed.times,
        settings=loaded.settings,
        depths=rehearsal.depths,
        data_gpu=rehearsal.plan.data.index,
        model_gpu=rehearsal.plan.model.index,
        cores=usable_cores(),
        recompilations=measured.recompilations,
        flops_per_step=flops,
        peak_flops=peak_flops,
    )


def _rows(measured: Measured, first: Measured, stage: str) -> Iterator[PhaseRow]:
    """The stages in order; beside `encode` the same in the first epoch."""
    spans, earlier = _by_name(measured.spans), _by_name(first.spans)
    for name, where in PLACES.items():
        if name == "encode" and stage != "dvae" and earlier[name]:
            note = "first epoch: codes are computed, later they are found"
            yield _row("encode (first)", where, earlier[name], first.seconds, note)
        if spans[name]:
            yield _row(name, where, spans[name], measured.seconds, NOTES.get(name, ""))


def _row(name: str, where: str, spans: Sequence[Span], seconds: float, note: str) -> PhaseRow:
    lengths_ms = np.array([span.duration_us for span in spans]) / 1000
    workers = len({span.track for span in spans})
    share = float(lengths_ms.sum()) / 1000 / seconds / workers
    note = ", ".join(filter(None, [note, f"{workers} threads" if workers > 1 else ""]))
    return PhaseRow(name, where, float(lengths_ms.mean()), float(np.quantile(lengths_ms, 0.95)), share, note)


def _by_name(spans: Sequence[Span]) -> defaultdict[str, list[Span]]:
    named: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        named[span.name].append(span)
    return named


def _with_passes(rows: Sequence[PhaseRow], rehearsal: NotedRehearsal, train_ms: float) -> Iterator[PhaseRow]:
    """The same with the two passes of training below it, where they can be told apart."""
    for row in rows:
        yield row
        share = forward_share(rehearsal, train_ms) if row.phase == "train" else None
        if share is not None:
            for name, part in (("forward", share), ("backward", 1 - share)):
                yield PhaseRow(f"  {name}", row.where, part * row.mean_ms, part * row.p95_ms, part * row.share)


def _decode_row(data: DataSettings) -> PhaseRow:
    """What reading a batch from its files takes, or would take."""
    corpus = read_corpus(data.train_data or EMBEDDED_CORPUS)
    seconds = [*time_decoding(corpus, data, DECODED_FILES).values()] or [0.0]
    note = "once, when the corpus is prepared" if data.native_loading else "for every batch, part of gather"
    batch_ms = 1000 * data.batch_size * np.array([np.mean(seconds), np.quantile(seconds, 0.95)])
    return PhaseRow("load and decode", "host", float(batch_ms[0]), float(batch_ms[1]), 0.0, note)


def _uses(readings: Sequence[Reading], plan: Plan) -> list[GpuUse]:
    roles = {plan.data.index: "data", plan.model.index: "model" if plan.mode == "dual" else "data and model"}
    return [
        GpuUse(
            gpu=gpu,
            role=roles.get(gpu, ""),
            **{name: _mean(readings, gpu, name) for name in ("utilisation", "power_w", "temperature_c")},
            **{name: _mean(readings, gpu, name) for name in ("memory_used_mb", "memory_total_mb")},
        )
        for gpu in sorted({reading.gpu for reading in readings})
    ]


def _mean(readings: Sequence[Reading], gpu: int, name: str) -> float | None:
    told = [value for r in readings if r.gpu == gpu and (value := getattr(r, name)) is not None]
    return float(np.mean(told)) if told else None
