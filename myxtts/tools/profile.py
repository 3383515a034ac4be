"""`myxtts profile`: where the time of a run goes, measured with the user's own settings, data and devices.

`profile` trains a stage for some steps three times: as in the first epoch, as in every later one, and on one batch
again and again, which shows what a perfect feed would give. With `data_only` it times the data side alone: text
preprocessing, audio loading and the feed. What the numbers mean comes from `observe`; nothing is drawn here.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from myxtts.audio import UnusableAudio
from myxtts.config import LANGUAGES, DataSettings, Settings, most_gatherers
from myxtts.data.batches import HostBatch, host_layout
from myxtts.data.clips import DecodeOptions, PreparedCorpus
from myxtts.data.corpus import Clip, Corpus
from myxtts.data.order import Cursor
from myxtts.data.prepare import read_training
from myxtts.devices import Machine, Plan, peak_flops
from myxtts.files import write_atomically, write_text_atomically
from myxtts.host import usable_cores
from myxtts.observe.breakdown import PhaseTime, ProfileData
from myxtts.observe.diagnosis import Diagnosis
from myxtts.observe.findings import MIN_SHARE, SWITCHES, Finding, Level, Wait, sentence, wait_rule
from myxtts.observe.nvml import Reading, Sampler
from myxtts.observe.trace import Span, Timing, Trace
from myxtts.pipeline.feed import build_gatherer
from myxtts.pipeline.frontend import FRONTENDS
from myxtts.text.language import detect_languages
from myxtts.text.normalize import normalize, phonemize
from myxtts.tools.dry_run import DryRun, KernelView, Measurement, kernel_view, temporary_codes
from myxtts.training.recipes import useful_flops

SAMPLED_TEXTS, SAMPLED_FILES, DECODED_FILES = 200, 64, 16
"""Texts and files that are timed, evenly spread over the corpus; the last for one row of a profile."""
REPLAYED_STEPS = 4
MAX_DECODE_CV = 1.0  # coefficient of variation above which some files are far slower to decode than the others
MAX_DETECTION_SHARE = 0.5  # share of the text preprocessing that language detection may take without a remark
FIRST_STEPS_GPU, FIRST_STEPS_CPU = 20, 2  # steps of the first pass, which also shows how long a step takes
CPU_BATCHES, MAX_CPU_S = 8, 30.0
"""On a CPU, where a step can take many seconds: batches taken from a feed, and seconds of a pass."""
MAX_SPLIT_S = 2.0  # a step that takes longer is not split into its passes, which takes some steps more
PHASES = {
    "gather": "host",
    "upload": "data",
    "encode": "data",
    "handoff": "data",
    "wait": "host",
    "train": "model",
    "update": "model",
}
"""The phases in the order in which a batch passes them, and whose time they take."""
NOTES = {"wait": "the program waits for a batch", "train": "forward and backward", "update": "clipping and AdamW"}

_log = logging.getLogger(__name__)


# A stage


@dataclass(frozen=True)
class PhaseRow:
    """A phase of the feed or of the step."""

    phase: str
    where: str  # host, data or model: whose time it takes
    mean_ms: float  # per batch
    p95_ms: float
    share: float  # share of the time in which a worker of this phase is busy with it
    note: str = ""


@dataclass(frozen=True)
class GpuUse:
    """Mean readings of a GPU; None if the driver does not report them."""

    gpu: int
    role: str
    utilisation: float | None
    memory_used_mb: float | None
    memory_total_mb: float | None
    power_w: float | None
    temperature_c: float | None


@dataclass(frozen=True)
class Profile:
    """What was measured and what it means; only `data` if nothing was trained."""

    stage: str
    device: str
    num_steps: int
    batch_size: int
    notes: list[str] = field(default_factory=list)
    clips_per_s: float | None = None  # sustained speed
    first_epoch_clips_per_s: float | None = None  # speed while codes are computed; None if the stage needs none
    rows: list[PhaseRow] = field(default_factory=list)
    verdict: Diagnosis | None = None
    gpus: list[GpuUse] = field(default_factory=list)
    memory_mb: dict[str, float] = field(default_factory=dict)
    kernels: KernelView | None = None
    data: DataAnalysis | None = None
    trace: Trace | None = None  # the spans that the verdict is about

    @property
    def findings(self) -> list[Finding]:
        """What to change, most expensive first."""
        return [*(self.verdict.findings if self.verdict else []), *(self.data.findings if self.data else [])]

    def to_json(self) -> dict[str, Any]:
        """Everything but the trace."""
        parts = asdict(replace(self, verdict=None, data=None, trace=None))
        del parts["trace"]
        parts["verdict"] = self.verdict.to_json() if self.verdict else None
        parts["data"] = self.data.to_json() if self.data else None
        return parts | {"findings": [asdict(found) for found in self.findings]}


def keep(found: Profile, run_folder: Path) -> None:
    """Save the verdict and its spans in a run, for its report."""
    if found.verdict is not None and found.trace is not None:
        write_text_atomically(run_folder / "verdict.json", json.dumps(found.verdict.to_json(), indent=1))
        write_atomically(run_folder / "trace.jsonl", found.trace.write_jsonl)


def profile(
    settings: Settings,
    prepared: PreparedCorpus,
    *,
    num_steps: int = 50,
    stage: str = "gpt",
    data_only: bool = False,
    kernels: bool = False,
    step_ms: float | None = None,
) -> Profile:
    """Measure a stage; `data_only` only its data side, against a step of `step_ms` if that is given."""
    machine, batch_size = Machine.look(), settings.data.batch_size
    if data_only:
        num_batches = num_steps if machine.gpus else min(num_steps, CPU_BATCHES)
        _log.info("Looking at texts and recordings, then taking %d batches", num_batches)
        analysis = _analyse(settings, prepared, stage, num_batches, step_ms)
        return Profile(stage, "GPU" if machine.gpus else "CPU", num_batches, batch_size, data=analysis)
    with temporary_codes(prepared) as apart:
        _log.info("Setting up the stage %s as a run would", stage)
        return _profile_stage(DryRun(settings, apart, stage), machine, num_steps, kernels)


def _profile_stage(dry_run: DryRun, machine: Machine, num_steps: int, kernels: bool) -> Profile:
    plan, data = dry_run.plan, dry_run.settings.data
    on_gpu = plan.model.type == "cuda"
    first_steps = min(num_steps, FIRST_STEPS_GPU if on_gpu else FIRST_STEPS_CPU)
    _log.info("Training %d steps as in the first epoch", first_steps)
    first = dry_run.measure(first_steps, traced=True)
    step_s, notes = first.seconds / len(first.times), []
    affordable = max(int(MAX_CPU_S / step_s), FIRST_STEPS_CPU)
    if not on_gpu and affordable < num_steps:
        notes.append(f"{affordable} of {num_steps} steps were measured: one takes {step_s:.1f} s on this CPU")
        num_steps = affordable
    _log.info("Training at least %d steps as in every later epoch, about %.0f s", num_steps, num_steps * step_s)
    dry_run.fill_codes()  # the first pass computed those of a few batches only
    indices = sorted({device.index for device in (plan.data, plan.model) if device.index is not None})
    with Sampler(indices) as sampler:
        measured = dry_run.steady(num_steps)
        readings, no_readings = sampler.samples(), sampler.reason if on_gpu else "This machine has no GPU"
    _log.info("Training %d steps on one batch, as if the feed were perfect", num_steps)
    replayed = dry_run.measure(num_steps, replay=True, traced=True)
    view = kernel_view(dry_run) if kernels or on_gpu else None  # only kernels show that the host waits
    _log.info("Drawing conclusions")
    found = _profile_data(dry_run, measured, replayed, view)
    found = replace(found, readings=readings, no_readings=no_readings, num_gpus=len(machine.gpus))
    forward_share = dry_run.forward_share() if on_gpu or step_s < MAX_SPLIT_S else None
    return Profile(
        stage=dry_run.stage,
        device=machine.label(plan.model),
        num_steps=len(measured.times),
        batch_size=data.batch_size,
        notes=notes,
        clips_per_s=measured.sustained_clips_per_s,
        first_epoch_clips_per_s=first.sustained_clips_per_s if FRONTENDS[dry_run.stage].uses_codes else None,
        rows=[_decode_row(data), *_rows(measured, first, dry_run.stage, forward_share)],
        verdict=Diagnosis(found),
        gpus=_gpu_uses(readings, plan),
        memory_mb=measured.memory_mb,
        kernels=view if kernels else None,
        trace=measured.trace,
    )


def _profile_data(
    dry_run: DryRun, measured: Measurement, replayed: Measurement, view: KernelView | None
) -> ProfileData:
    step, plan = dry_run.step, dry_run.plan
    flops = useful_flops(step.recipe, dry_run.ctx.prepared.train)
    peak = peak_flops(step.stream, torch.bfloat16 if step.mode.autocast else torch.float32)
    return ProfileData(
        spans=measured.spans,
        counters=measured.counters,
        replayed=replayed.times,
        settings=dry_run.settings,
        depths=measured.depths,
        data_gpu=plan.data.index,
        model_gpu=plan.model.index,
        cores=usable_cores(),
        recompilations=measured.recompilations,
        kernel_share=view.kernel_share if view else None,
        syncs_per_step=view.syncs_per_step if view else None,
        flops_per_step=measured.clips_per_step * flops if flops else None,
        peak_flops=peak,
    )


def _rows(measured: Measurement, first: Measurement, stage: str, forward: float | None) -> Iterator[PhaseRow]:
    """The phases in order, `encode` also as in the first epoch, and the passes of `train` if they are known."""
    for name, where in PHASES.items():
        spans, earlier = ([s for s in found.spans if s.name == name] for found in (measured, first))
        if name == "encode" and FRONTENDS[stage].uses_codes and earlier:
            note = "first epoch: codes are computed, later they are found"
            yield _row("encode (first)", where, earlier, first.seconds, note)
        if spans:
            row = _row(name, where, spans, measured.seconds, NOTES.get(name, ""))
            yield row
            if name == "train" and forward is not None:
                for part, share in (("  forward", forward), ("  backward", 1 - forward)):
                    yield PhaseRow(part, where, share * row.mean_ms, share * row.p95_ms, share * row.share)


def _row(name: str, where: str, spans: Sequence[Span], seconds: float, note: str) -> PhaseRow:
    timing = Timing.of(span.duration_us / 1000 for span in spans)
    workers = len({span.track for span in spans})
    share = timing.mean_ms * timing.count / 1000 / seconds / workers
    note = ", ".join(filter(None, [note, f"{workers} threads" if workers > 1 else ""]))
    return PhaseRow(name, where, timing.mean_ms, timing.p95_ms, share, note)


def _decode_row(data: DataSettings) -> PhaseRow:
    """The time to read a batch from its files."""
    timing = Timing.of(time_decoding(read_training(data), data, DECODED_FILES).values())
    note = "once, when the corpus is prepared" if data.native_loading else "for every batch, part of gather"
    mean_ms, p95_ms = data.batch_size * timing.mean_ms, data.batch_size * timing.p95_ms
    return PhaseRow("load and decode", "host", mean_ms, p95_ms, 0.0, note)


def _gpu_uses(readings: Sequence[Reading], plan: Plan) -> list[GpuUse]:
    roles = {plan.data.index: "data", plan.model.index: "model" if plan.mode == "dual" else "data and model"}

    def mean(gpu: int, name: str) -> float | None:
        known = [value for r in readings if r.gpu == gpu and (value := getattr(r, name)) is not None]
        return float(np.mean(known)) if known else None

    names = [part.name for part in fields(GpuUse)][2:]
    gpus = sorted({reading.gpu for reading in readings})
    return [GpuUse(gpu, roles.get(gpu, ""), *(mean(gpu, name) for name in names)) for gpu in gpus]


# The data side


@dataclass(frozen=True)
class TextAnalysis:
    """Text preprocessing on one core, per sentence."""

    normalize: Timing
    tokenize: Timing
    detect_ms: float | None  # language detection with the loading of its model; None if every language is known
    num_sentences: int  # sentences of the whole corpus

    @property
    def sample_ms(self) -> float:
        """All of it, for one sentence."""
        return self.normalize.mean_ms + self.tokenize.mean_ms + (self.detect_ms or 0.0)


@dataclass(frozen=True)
class AudioAnalysis:
    """Audio loading: decoding a file, and gathering a batch on one thread."""

    decode: Timing
    gather: Timing
    batch_size: int
    slowest: str  # the file that took longest to decode

    @property
    def times_faster(self) -> float:
        """Speed of gathering a batch relative to decoding its files."""
        return self.decode.mean_ms * self.batch_size / self.gather.mean_ms if self.gather.mean_ms else 0.0


@dataclass(frozen=True)
class FeedAnalysis:
    """How well the feed keeps up. Times are those between two batches."""

    host: Timing  # in host memory, with all gathering threads
    first_epoch: Timing  # ready for the model, from a drained feed that computes codes
    feed: Timing  # the same with known codes, as in every later epoch
    phases: dict[str, PhaseTime]  # phases of the feed with known codes
    step_ms: float  # training on a batch
    step_is_given: bool  # True if the user gave `step_ms`; else it was measured on one batch
    num_gpus: int

    @property
    def on_gpu(self) -> bool:
        return self.num_gpus > 0

    @property
    def is_remote(self) -> bool:
        """True if the step is that of a GPU elsewhere: encoding on this CPU says nothing about it."""
        return self.step_is_given and not self.on_gpu

    @property
    def supply_ms(self) -> float:
        """Time between two batches, as far as this machine shows it."""
        return self.host.mean_ms if self.is_remote else self.feed.mean_ms

    @property
    def wait_ms(self) -> float:
        """Time that a step waits for its batch, in the long run."""
        return max(self.supply_ms - self.step_ms, 0.0)

    @property
    def idle_share(self) -> float:
        """Estimated share of the time in which the model's device is idle."""
        return self.wait_ms / (self.wait_ms + self.step_ms) if self.wait_ms else 0.0

    @property
    def slowest(self) -> str:
        """The phase that bounds the supply."""
        if self.is_remote:
            return "gather"
        return max(self.phases, key=lambda name: self.phases[name].period_ms, default="gather")


@dataclass(frozen=True)
class DataAnalysis:
    """The data side, and what to change."""

    text: TextAnalysis
    audio: AudioAnalysis
    feed: FeedAnalysis
    findings: list[Finding] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        record = asdict(self)
        record["text"]["sample_ms"] = self.text.sample_ms
        record["audio"] |= {"decode_cv": self.audio.decode.cv, "gather_cv": self.audio.gather.cv}
        derived = ("on_gpu", "supply_ms", "wait_ms", "idle_share", "slowest")
        record["feed"] |= {name: getattr(self.feed, name) for name in derived}
        return record


def _analyse(
    settings: Settings, prepared: PreparedCorpus, stage: str, num_batches: int, step_ms: float | None
) -> DataAnalysis:
    data = prepared.fitted(settings.data)
    corpora = read_training(data)
    text = time_text([clip for corpus in corpora for clip in corpus.clips], data, prepared)
    with temporary_codes(prepared) as apart:
        dry_run = DryRun(settings, apart, stage)
        audio = time_audio(corpora, dry_run, num_batches)
        feed = time_feed(dry_run, num_batches, step_ms)
    return DataAnalysis(text, audio, feed, data_findings(text, audio, feed, data))


def time_text(clips: Sequence[Clip], data: DataSettings, prepared: PreparedCorpus) -> TextAnalysis:
    """Time what is done once to every sentence."""
    languages = {
        name: LANGUAGES[int(number)]
        for part in (prepared.train, prepared.val)
        if clips  # of sharded corpora there are none, and all their texts would be read for the names
        for name, number in zip(part.names, part.languages, strict=True)
    }
    chosen = [clip for clip in _spread(clips, SAMPLED_TEXTS) if clip.id in languages]
    unknown = [clip for clip in chosen if not clip.language and data.language is None]
    detect_ms = None
    if unknown:
        texts, speakers = [clip.text for clip in unknown], [clip.speaker for clip in unknown]
        detect_ms = _duration_ms(partial(detect_languages, texts, speakers)) / len(unknown)

    def spell(clip: Clip) -> str:
        words = normalize(clip.text, languages[clip.id])
        return phonemize([words], languages[clip.id])[0] if data.use_phonemes else words

    lines = [([spell(clip)], [languages[clip.id]]) for clip in chosen]  # loads the tables before anything is timed
    spelled = Timing.of(_duration_ms(partial(spell, clip)) for clip in chosen)
    encode = prepared.tokenizer.encode_batch
    for line in lines[:1]:
        encode(*line)
    encoded = Timing.of(_duration_ms(partial(encode, *line)) for line in lines)
    return TextAnalysis(spelled, encoded, detect_ms, len({clip.text for clip in clips}))


def time_decoding(corpora: Sequence[Corpus], data: DataSettings, num_files: int) -> dict[str, float]:
    """Milliseconds that decoding takes, by file; without files that cannot be decoded."""
    options, taken_ms = DecodeOptions.of(data), {}
    clips = [c._replace(path=str(corpus.folder / c.path)) for corpus in corpora for c in corpus.clips]
    for clip in _spread(clips, num_files):
        try:
            taken_ms[clip.path] = _duration_ms(partial(options.decode, Path(clip.path)))
        except UnusableAudio:
            continue
    return taken_ms


def time_audio(corpora: Sequence[Corpus], dry_run: DryRun, num_batches: int) -> AudioAnalysis:
    """Time decoding files and gathering batches."""
    data = dry_run.settings.data
    decoded_ms = time_decoding(corpora, data, SAMPLED_FILES)
    gatherer, batch = build_gatherer(dry_run.ctx, dry_run.ctx.prepared.train), _host_batch(dry_run)
    jobs = gatherer.jobs(Cursor(), num_batches=num_batches)
    gathered = Timing.of(_duration_ms(partial(gatherer.fill, batch, job)) for job in jobs)
    slowest = max(decoded_ms, key=lambda path: decoded_ms[path], default="")
    return AudioAnalysis(Timing.of(decoded_ms.values()), gathered, data.batch_size, slowest)


def time_host(dry_run: DryRun, num_batches: int) -> Timing:
    """Time between two batches in host memory, gathered by as many threads as a run would start."""
    data = dry_run.settings.data
    num_threads = min(data.num_workers, most_gatherers(data, usable_cores()), num_batches)
    gatherer = build_gatherer(dry_run.ctx, dry_run.ctx.prepared.train)
    jobs = iter([*gatherer.jobs(Cursor(), num_batches=num_batches)])
    done_at = [time.perf_counter()]

    def work(batch: HostBatch) -> None:
        for job in jobs:  # an iterator over a list gives each item to one thread
            gatherer.fill(batch, job)
            done_at.append(time.perf_counter())

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(work, [_host_batch(dry_run) for _ in range(num_threads)]))
    return Timing.of(1000 * np.diff(sorted(done_at)))


def time_feed(dry_run: DryRun, num_batches: int, step_ms: float | None) -> FeedAnalysis:
    """Drain the feed of a stage twice, and time a step; codes are written where its corpus says."""
    first_epoch, _ = dry_run.drain(num_batches)  # computes the codes that the next one finds
    later, phases = dry_run.drain(num_batches)
    taken_ms = step_ms
    if taken_ms is None:
        steps = dry_run.measure(REPLAYED_STEPS, replay=True).times
        taken_ms = float(np.mean([step.step_ms for step in steps])) / dry_run.step.accumulate
    return FeedAnalysis(
        host=time_host(dry_run, num_batches),
        first_epoch=first_epoch,
        feed=later,
        phases=phases,
        step_ms=taken_ms,
        step_is_given=step_ms is not None,
        num_gpus=len(Machine.look().gpus),
    )


def data_findings(
    text: TextAnalysis, audio: AudioAnalysis, feed: FeedAnalysis, data: DataSettings
) -> list[Finding]:
    """What follows from the numbers, the feed first."""
    return [*_feed_findings(feed, data), *_audio_findings(audio, data), *_text_findings(text)]


def _feed_findings(feed: FeedAnalysis, data: DataSettings) -> Iterator[Finding]:
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
    slower = feed.first_epoch.mean_ms / max(feed.feed.mean_ms, feed.step_ms, 1e-9)
    if not feed.is_remote and slower > 1 + MIN_SHARE and feed.first_epoch.mean_ms > feed.step_ms:
        what = f"The first epoch is up to {slower:.1f} times as slow as the others."
        why = f"Computing codes, a batch comes every {feed.first_epoch.mean_ms:.1f} ms; they are kept."
        yield Finding("data-first-epoch", "info", what, why)


def _audio_findings(audio: AudioAnalysis, data: DataSettings) -> Iterator[Finding]:
    decode, gather = audio.decode, audio.gather
    why = f"Decoding takes {decode.mean_ms:.1f} ms per file, gathering {gather.mean_ms:.1f} ms per batch."
    if data.native_loading:
        what = f"A batch comes {audio.times_faster:.1f} times as fast from the packed cache as from its files."
        yield Finding("data-audio-packed", "pass", what, why)
    else:
        what = f"The {audio.batch_size} files of a batch are decoded every time it is gathered."
        fix = sentence(SWITCHES["data.native_loading"].fix)
        yield Finding("data-audio-decoded", "warn", what, why, fix, "data.native_loading", True)
    if decode.cv > MAX_DECODE_CV:
        what = f"Decoding varies by {100 * decode.cv:.0f} %: some files are far slower than the others."
        why = f"{audio.slowest} took {decode.longest_ms:.0f} ms, a file on average {decode.mean_ms:.1f} ms."
        level: Level = "info" if data.native_loading else "warn"
        yield Finding("data-audio-uneven", level, what, why, "" if data.native_loading else "Look at those files.")


def _text_findings(text: TextAnalysis) -> Iterator[Finding]:
    total_s = text.sample_ms * text.num_sentences / 1000
    what = f"A sentence takes {text.sample_ms:.2f} ms, all {text.num_sentences} about {total_s:.1f} s on one core."
    why = "This is done once and kept: the next start reads the result."
    yield Finding("data-text-once", "pass", what, why)
    if text.detect_ms is not None and text.detect_ms > MAX_DETECTION_SHARE * text.sample_ms:
        what = f"{100 * text.detect_ms / text.sample_ms:.0f} % of the text preprocessing is language detection."
        why = "Neither the metadata nor the settings name a language."
        fix = "Name the language, if all clips share one: --language."
        yield Finding("data-text-detection", "info", what, why, fix, "data.language")


def _host_batch(dry_run: DryRun) -> HostBatch:
    reference = FRONTENDS[dry_run.stage].uses_references
    return HostBatch(host_layout(dry_run.settings.data, reference), pinned=False)


def _spread(clips: Sequence[Clip], count: int) -> list[Clip]:
    """So many clips, evenly spread."""
    return [*clips[:: max(len(clips) // count, 1)][:count]]


def _duration_ms(work: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started_at)
