"""How long the data side takes: a sentence, a file, a batch on the host, a batch from the whole feed.

Measured on the user's own texts, files and cache with the user's settings; a GPU is not needed. Concludes nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from myxtts.audio import UnusableAudio
from myxtts.config import LANGUAGES, DataSettings
from myxtts.data.batches import Batches, Cursor, packed_tokens
from myxtts.data.clips import ClipSet, Prepared
from myxtts.data.corpus import Clip, Corpus
from myxtts.data.decoded import DecodeOptions
from myxtts.data.gather import Gatherer, HostBatch, Job, host_layout
from myxtts.host import usable_cores
from myxtts.observe.evidence import StageTime
from myxtts.pipeline.buffers import MOST_GATHERERS
from myxtts.settings import Loaded
from myxtts.text.language import detect_languages
from myxtts.text.normalize import normalize
from myxtts.text.phonemes import phonemize
from myxtts.tools.noted import NotedRehearsal

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
    stages: dict[str, StageTime]
    """Of the latter."""
    step_ms: float
    """Training on a batch."""
    step_is_given: bool
    """By the user; else it was measured here by replaying a batch."""
    on_gpu: bool

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
        """The stage that bounds the supply."""
        if self.step_is_given and not self.on_gpu:
            return "gather"
        return max(self.stages, key=lambda name: self.stages[name].period_ms, default="gather")


def time_text(clips: Sequence[Clip], data: DataSettings, prepared: Prepared) -> TextAnalysis:
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
    num_threads = min(data.num_workers, usable_cores(), MOST_GATHERERS if data.native_loading else num_batches)
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
    loaded: Loaded, prepared: Prepared, stage: str, num_batches: int, step_ms: float | None
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
        stages=later.stages,
        step_ms=taken_ms,
        step_is_given=given,
        on_gpu=rehearsal.plan.model.type == "cuda",
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
