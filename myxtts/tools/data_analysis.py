"""Three analyses of the data side, text preprocessing, audio loading, pipeline efficiency, and what to change.

Runs without a GPU; then a step is measured on the CPU, or the user says how long it takes on a GPU. Nothing is
written to the user's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from myxtts.config import DataSettings
from myxtts.data.clips import Prepared
from myxtts.data.corpus import read_corpus
from myxtts.data.prepare import EMBEDDED_CORPUS
from myxtts.host import usable_cores
from myxtts.observe.findings import Finding, Level
from myxtts.pipeline.buffers import MOST_GATHERERS
from myxtts.settings import Loaded
from myxtts.tools.data_timing import AudioAnalysis, FeedAnalysis, TextAnalysis, time_audio, time_feed, time_text
from myxtts.tools.trial import set_apart

WORTH_A_WORD = 0.02
"""Share of the time that a GPU may wait."""
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
        record["feed"]["stages"] = {name: time._asdict() for name, time in self.feed.stages.items()}
        record["text"]["sample_ms"] = self.text.sample_ms
        record["audio"] |= {"decode_cv": self.audio.decode.cv, "gather_cv": self.audio.gather.cv}
        derived = ("supply_ms", "wait_ms", "idle_share", "slowest")
        record["feed"] |= {name: getattr(self.feed, name) for name in derived}
        return record


def analyse(
    loaded: Loaded, prepared: Prepared, *, stage: str = "gpt", num_batches: int = 20, step_ms: float | None = None
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
    if feed.idle_share > WORTH_A_WORD:
        what = f"The model would wait {100 * feed.idle_share:.0f} % of the time for {feed.slowest}."
        fix, setting, value = _faster(feed.slowest, data, feed.on_gpu)
        yield Finding("data-feed-slow", "warn", what, why, fix, setting, value, gain)
    else:
        what = f"Batches come {1 / max(gain, 1e-9):.1f} times as fast as they are used."
        yield Finding("data-feed-fast", "pass", what, why)
    if feed.step_is_given and not feed.on_gpu:
        return  # what encoding takes this CPU says nothing about the GPU
    slower = feed.first_epoch.mean_ms / max(feed.feed.mean_ms, feed.step_ms, 1e-9)
    if slower > 1 + WORTH_A_WORD and feed.first_epoch.mean_ms > feed.step_ms:
        what = f"The first epoch is up to {slower:.1f} times as slow as the others."
        why = f"Computing codes, a batch comes every {feed.first_epoch.mean_ms:.1f} ms; they are kept."
        yield Finding("data-first-epoch", "info", what, why)


def _faster(stage: str, data: DataSettings, on_gpu: bool) -> tuple[str, str, Any]:
    """What makes a stage faster: a sentence, and the setting with its value."""
    if not data.prefetch_to_gpu:
        return "Prepare batches while the model trains.", "data.prefetch_to_gpu", True
    if stage == "gather":
        most = min(usable_cores(), MOST_GATHERERS) if data.native_loading else usable_cores()
        if not data.native_loading:
            return "Gather from the packed cache.", "data.native_loading", True
        if data.num_workers < most:
            return f"Gather with {most} threads.", "data.num_workers", most
        return "Move the cache to a faster local disk (--cache-dir).", "", None
    if stage == "upload" and not data.enhanced_gpu_prefetch:
        return "Copy from pinned memory.", "data.enhanced_gpu_prefetch", True
    if stage == "encode" and not data.optimize_cpu_gpu_overlap:
        return "Let the data role work beside the model.", "data.optimize_cpu_gpu_overlap", True
    if stage == "encode" and on_gpu:
        return "Give the data role a GPU of its own: --data-gpu 0 --model-gpu 1.", "", None
    return "Train on a GPU: on the CPU data and model take turns.", "", None


def _of_audio(audio: AudioAnalysis, data: DataSettings) -> Iterator[Finding]:
    decode, gather = audio.decode, audio.gather
    why = f"Decoding takes {decode.mean_ms:.1f} ms a file, gathering {gather.mean_ms:.1f} ms a batch."
    if data.native_loading:
        what = f"A batch comes {audio.times_faster:.1f} times as fast from the packed cache as from its files."
        yield Finding("data-audio-packed", "pass", what, why)
    else:
        what = f"The {audio.batch_size} files of a batch are decoded every time it is gathered."
        fix = "Gather from the packed cache, which is made once."
        yield Finding("data-audio-decoded", "warn", what, why, fix, "data.native_loading", True)
    if decode.cv > UNEVEN:
        what = f"Decoding varies by {100 * decode.cv:.0f} %: some files are far slower than the others."
        why = f"{audio.slowest} took {decode.longest_ms:.0f} ms, a file on average {decode.mean_ms:.1f} ms."
        fix = "" if data.native_loading else "Gather from the packed cache, or look at those files."
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
