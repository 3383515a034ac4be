"""From recordings to a corpus: decode and find speech, hear, check, and write down, each in threads of its own.

    reader: decode, VAD, cuts ─► hear: words, twice ─► check: clip, voice, quality ─► catalog (this thread)

Between the stages are bounded queues, so memory does not grow with the length of a recording. One transaction adds
a stretch of about a minute: after kill -9 the next call continues there. What needs all clips follows at the end.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, Generic, TypeVar

from myxtts.audio import DAMAGED, UnusableAudio
from myxtts.collect import quality
from myxtts.collect.catalog import (
    CLIPS,
    Catalog,
    Filters,
    Segment,
    Source,
    Table,
    Unused,
    table,
    used,
    write_corpus,
)
from myxtts.collect.cutting import FRAME_S, NO_PAUSE, NO_SPEECH, PIECE, TOO_SHORT, Span, speech_frames
from myxtts.collect.finishing import ONE_SPEAKER, finish, packed
from myxtts.collect.hearing import Hearing, hear
from myxtts.collect.listeners import INSTALL, Listening, start_listeners
from myxtts.collect.recordings import (
    Recording,
    clip_name,
    find_recordings,
    has_speaker_per_channel,
    save_clip,
    script_of,
)
from myxtts.collect.script import Script, error_rate, read_script
from myxtts.collect.stretches import Stretch, stretches
from myxtts.config import LANGUAGE_NAMES
from myxtts.errors import ConfigError, Progress, progress_bar
from myxtts.host import usable_cores

_WEAK_IN_BASE = {"ar", "cs", "fa", "hi", "hu"}
_DETAILS = {
    NO_PAUSE: "no silence to cut at within 12 s",
    TOO_SHORT: "less than 2 s of speech between long pauses",
}
_STAGES = {"speech": "voice activity", "hear": "words", "voice": "speakers", "mos": "quality"}
_WORTH_TRYING_AGAIN = ("needs PyAV", "unreadable file", "missing file")
"""Reasons of failed recordings that can go away without a change of the file."""
_AHEAD = 2  # finished stretches that may wait for the next stage
_POLL_S = 0.2
_MUSIC_MARGIN_S = 0.5  # audio around a clip in which music is looked for

Item = TypeVar("Item")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CollectOptions:
    """What the user asks for."""

    out: Path
    recordings: Sequence[Path] = ()
    language: str = ""
    speakers: str = ""
    """A number, auto, one, file or folder; empty for auto, without changing speakers that are known."""
    speaker: str = ""
    script: Path | None = None
    whisper: str = ""
    judge: Path | None = None
    download: bool = False
    filters: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a corpus holds after a call."""

    folder: Path
    sources: list[Source]
    table: Table
    speakers: dict[str, float]
    """Seconds in use by speaker, most first; likewise languages."""
    languages: dict[str, float]
    times: dict[str, float]
    """Seconds that each stage worked in this call, several at a time."""
    notes: list[str]


Start = Callable[[Path | None, str, bool], AbstractContextManager[Listening]]


def collect(options: CollectOptions, progress: Progress, start: Start = start_listeners) -> Outcome:
    """Add recordings to a corpus, or with none decide again with other filters; returns what it holds then."""
    script = Script(read_script(options.script)) if options.script else None
    found = find_recordings(options.recordings, options.out)
    if options.recordings and not found:
        raise ConfigError(f"No recordings in {', '.join(map(str, options.recordings))}.")
    with Catalog(options.out, create=bool(found)) as catalog:
        if options.filters:
            catalog.set_filters(Filters.checked({**vars(catalog.filters), **options.filters}))
        notes = _replaced(catalog, found)
        sources = [_register(catalog, path) for path in found]
        notes += _apply_to_known(catalog, sources, options)
        pending, times = [source for source in sources if source.state == "new"], dict[str, float]()
        for beside in filter(None, (script_of(Path(source.path)) for source in pending)):
            read_script(beside)  # raises now rather than after hours of listening
        if pending:
            with start(options.judge, options.whisper, options.download) as listening:
                notes += _check_models(listening.models, options)
                times = _run(catalog, pending, options, listening, progress)
                notes += _weak_languages(catalog, listening.models)
        notes += finish(catalog, options.speakers, script)
        write_corpus(catalog)
        return _outcome(catalog, times, notes)


def _register(catalog: Catalog, path: Path) -> Source:
    """Return a recording's row; one that cannot be opened is noted with the reason."""
    size, mtime_ns = _state_of(path)
    known = catalog.source_for(str(path), size, mtime_ns) or _moved(catalog, path, size, mtime_ns)
    if known is not None and (known.state != "failed" or known.reason not in _WORTH_TRYING_AGAIN):
        return known
    source = known or catalog.add_source(str(path), size, mtime_ns)
    try:
        with Recording(path) as recording:
            facts = recording.facts
        apart = has_speaker_per_channel(path)
    except UnusableAudio as error:
        return catalog.update_source(source.id, state="failed", reason=error.reason, detail=error.detail)
    channels = 2 if apart else 1
    found = {"seconds": facts.seconds, "sample_rate": facts.sample_rate, "channels": channels}
    begun = {"state": "new", "reason": "", "detail": "", "done_until": (0.0,) * channels}
    return catalog.update_source(source.id, **begun, **found)


def _state_of(path: Path) -> tuple[int, int]:
    """Size and time of a file; zeros if it is gone or a link to nothing, which opening it then reports."""
    try:
        about = path.stat()
    except OSError:
        return 0, 0
    return about.st_size, about.st_mtime_ns


def _moved(catalog: Catalog, path: Path, size: int, mtime_ns: int) -> Source | None:
    """The recording that was this file before it was moved, with its path corrected."""
    for source in catalog.sources():
        old = Path(source.path)
        if (old.name, source.size, source.mtime_ns) == (path.name, size, mtime_ns) and not old.exists():
            return catalog.update_source(source.id, path=str(path))
    return None


def _apply_to_known(catalog: Catalog, sources: Sequence[Source], options: CollectOptions) -> list[str]:
    """Use a script and speakers that are named now for recordings that were heard before; says what it cannot."""
    known = [source for source in sources if source.state == "done"]
    for source in known:
        if options.script:
            catalog.update_source(source.id, state="cut")  # `finish` uses the script
        clips = catalog.segments(source.id)
        names = {clip.id: _given_speaker(source, clip.channel, options) for clip in clips}
        catalog.update_segments({clip: {"speaker": name} for clip, name in names.items() if name})
    if known and options.language:
        return [f"{len(known)} recordings were heard before: --language changes them only in a new --out"]
    return []


def _replaced(catalog: Catalog, found: Sequence[Path]) -> list[str]:
    """Say which recordings have changed since they were collected."""
    states = {path: _state_of(path) for path in found}
    old = {
        source.path
        for source in catalog.sources()
        if states.get(Path(source.path), (source.size, source.mtime_ns)) != (source.size, source.mtime_ns)
    }
    why = "changed since it was collected: the corpus has clips of both versions. A new --out has the new one only"
    return [f"{Path(path).name} {why}" for path in sorted(old)]


def _check_models(models: Mapping[str, str], options: CollectOptions) -> list[str]:
    """Refuse what the models that are installed cannot do; returns what is said at the end."""
    _log.info("Listening with %s", ", ".join(models.values()))
    if "voice" not in models and not options.speaker and options.speakers not in ("one", "file", "folder"):
        raise ConfigError(
            "Speakers cannot be told apart without ECAPA-TDNN. If one person speaks, add --speakers one or "
            f"--speaker NAME; if each file or folder is one person, --speakers file or folder.\n{INSTALL}"
        )
    return ["No quality filter: DistillMOS is not installed (make judge)"] * ("mos" not in models)


def _weak_languages(catalog: Catalog, models: Mapping[str, str]) -> list[str]:
    """Say in which languages the smallest Whisper is not to be trusted."""
    found = {segment.language for segment in catalog.segments()} & _WEAK_IN_BASE
    names = " and ".join(LANGUAGE_NAMES[code] for code in sorted(found))
    weak = f"Whisper base makes many mistakes in {names}; a larger one is better: --whisper large-v3 --download"
    return [weak] if found and "base" in models["hear"] else []


class _Stopped(Exception):
    """The stages are being ended."""


class _Stage(Generic[Item, Result]):
    """Works on items in threads and gives the results in the order of the items.

    `feeding_s` and `working_s` are the processor seconds of its threads, without what models take.
    """

    def __init__(
        self, items: Iterable[Item], work: Callable[[Item], Result], workers: int, stop: threading.Event
    ) -> None:
        self._items, self._work, self._stop = items, work, stop
        self.feeding_s = self.working_s = 0.0
        self._results: Queue[Future[Result] | None] = Queue(workers + _AHEAD)
        self._pool, self._guard = ThreadPoolExecutor(workers), threading.Lock()
        self._feeder = threading.Thread(target=self._feed)
        self._feeder.start()

    def _feed(self) -> None:
        try:
            for item in self._items:
                self.feeding_s = time.thread_time()
                self._put(self._pool.submit(self._timed, item))
            self._put(None)
        except _Stopped:
            return
        except BaseException as error:
            failed: Future[Result] = Future()
            failed.set_exception(error)
            with contextlib.suppress(_Stopped):
                self._put(failed)

    def _timed(self, item: Item) -> Result:
        began = time.thread_time()
        result = self._work(item)
        with self._guard:
            self.working_s += time.thread_time() - began
        return result

    def _put(self, result: Future[Result] | None) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(Full):
                return self._results.put(result, timeout=_POLL_S)
        raise _Stopped

    def __iter__(self) -> Iterator[Result]:
        while not self._stop.is_set():
            with contextlib.suppress(Empty):
                result = self._results.get(timeout=_POLL_S)
                if result is None:
                    return
                yield result.result()
        raise _Stopped

    def close(self) -> None:
        """End the threads. What waits for a model is not waited for: it fails when the model's process ends."""
        self._feeder.join()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _run(
    catalog: Catalog, sources: Sequence[Source], options: CollectOptions, listening: Listening, progress: Progress
) -> dict[str, float]:
    """Send recordings through the stages; returns how long each worked."""
    stop, cores = threading.Event(), usable_cores()
    with contextlib.ExitStack() as stages:
        stages.callback(stop.set)
        parts = (part for source in sources for part in stretches(source, listening))
        hearing = _Stage(parts, partial(hear, listening, options.language), 1 + max(1, cores // 4), stop)
        stages.callback(hearing.close)
        checker = partial(_check, listening, options, catalog.folder / CLIPS)
        checking = _Stage(hearing, checker, max(1, cores // 2), stop)
        stages.callback(checking.close)
        stages.callback(stop.set)
        stages.callback(listening.close)  # first of all, so that nothing waits for an answer
        total = sum(source.seconds * source.channels for source in sources)
        done = sum(sum(source.done_until) for source in sources)
        with progress_bar(progress, "Listening (seconds)", round(total), round(done)) as advance:
            for stretch, segments, unused in checking:
                _record(catalog, stretch, segments, unused)
                advance(round(stretch.end) - round(stretch.start))
        own = {"decoding": hearing.feeding_s, "texts": hearing.working_s, "clips": checking.working_s}
        return own | {_STAGES[what]: seconds for what, seconds in listening.times().items()}


Checked = tuple[Stretch, list[Segment], list[Unused]]


def _check(
    listening: Listening, options: CollectOptions, folder: Path, heard: tuple[Stretch, list[Hearing]]
) -> Checked:
    """Score the pieces of a stretch and write their clips."""
    stretch, hearings = heard
    source, channel, pieces = stretch.source, stretch.channel, stretch.pieces
    waves = [stretch.heard(piece.start, piece.end) for piece in pieces]
    voices = listening.voices(waves) if "voice" in listening.models and waves else [{}] * len(waves)
    ratings = listening.mos(waves) if "mos" in listening.models and waves else [None] * len(waves)
    segments = []
    for piece, hearing, voice, mos in zip(pieces, hearings, voices, ratings, strict=True):
        start, end = round(stretch.start + piece.start, 3), round(stretch.start + piece.end, 3)
        wave = stretch.part(piece.start, piece.end)
        scores = _scores(stretch, piece) | ({"mos": mos} if mos is not None else {})
        scores["heard_error"] = error_rate(hearing.text, hearing.alone, hearing.language)
        notes = {"window": hearing.text, **hearing.flags}
        if voice:
            notes |= {"voice": packed([voice["voice"]]), "windows": packed(voice["windows"])}
        name = clip_name(source.path, source.id, channel, start, end)
        save_clip(folder / name, wave, stretch.rate, scores["gain_db"])
        given = _given_speaker(source, channel, options)
        words = hearing.text or hearing.alone  # heard only once: the filter then sets it aside
        known: dict[str, Any] = {"text": words, "heard": hearing.alone, "language": hearing.language}
        known |= {"start": start, "end": end, "audio": name, "speaker": given, "flags": tuple(hearing.flags)}
        segments.append(Segment(source=source.id, channel=channel, scores=scores, notes=notes, **known))
    return stretch, segments, _unused(stretch)


def _scores(stretch: Stretch, piece: Span) -> dict[str, float]:
    wave, heard = stretch.part(piece.start, piece.end), stretch.heard(piece.start, piece.end)
    first, last = (round(at / FRAME_S) for at in (piece.start, piece.end))
    is_speech = speech_frames(stretch.probabilities)
    margin = round(_MUSIC_MARGIN_S / FRAME_S)
    low, high = max(0, first - margin), min(len(is_speech), last + margin)
    return {
        "snr_db": quality.snr_db(quality.levels_of(heard), is_speech[first:last]),
        "clipping": quality.clipping(wave),
        "bandwidth_hz": quality.bandwidth_hz(wave, stretch.rate),
        "speech": float(is_speech[first:last].mean()),
        "music": quality.music(stretch.heard(low * FRAME_S, high * FRAME_S), is_speech[low:high]),
        "gain_db": quality.gain_db(wave, stretch.rate),
    }


def _unused(stretch: Stretch) -> list[Unused]:
    """The spans of a stretch that are in no clip, each with its reason."""
    found = []
    for span in stretch.spans:
        if span.kind != PIECE:
            start, end = (round(stretch.start + at, 3) for at in (span.start, span.end))
            silent = span.kind == NO_SPEECH
            why = quality.kind_without_speech(stretch.heard(span.start, span.end)) if silent else span.kind
            detail = _DETAILS.get(span.kind, "")
            found.append(Unused(stretch.source.id, stretch.channel, start, end, why, detail))
    return found


def _given_speaker(source: Source, channel: int, options: CollectOptions) -> str:
    """The speaker's name as far as the user gave it."""
    path = Path(source.path)
    one = ONE_SPEAKER if options.speakers == "one" else ""
    given = {"file": path.stem, "folder": path.parent.name}.get(options.speakers, options.speaker or one)
    sides = ("-left", "-right") if options.speakers == "file" and source.channels > 1 else ("", "")
    return given + sides[channel] if given else ""


def _record(catalog: Catalog, stretch: Stretch, segments: list[Segment], unused: list[Unused]) -> None:
    """Write down what is finished, in one transaction."""
    source, end = stretch.source, stretch.end
    done_until = round(end, 3)
    if stretch.damage and source.seconds > end:
        done_until = round(source.seconds, 3)
        lost = Unused(source.id, stretch.channel, round(end, 3), done_until, DAMAGED, stretch.damage)
        unused = [*unused, lost]
    catalog.add_segments(source.id, segments, unused, done_until, stretch.channel)
    if stretch.is_end:
        state = "failed" if end == 0 else "cut"
        reason = DAMAGED if stretch.damage else "no samples" if end == 0 else ""
        seconds = round(max(end, source.seconds) if stretch.damage else end, 3)
        catalog.update_source(source.id, state=state, reason=reason, detail=stretch.damage, seconds=seconds)


def _outcome(catalog: Catalog, times: dict[str, float], notes: list[str]) -> Outcome:
    sources = catalog.sources()
    chosen = [segment for segment in catalog.segments() if used(segment, catalog.filters)]
    unfinished = sum(source.state == "new" for source in sources)
    if unfinished:
        notes = [*notes, f"{unfinished} recordings are unfinished: name them again to continue"]
    by_speaker, by_language = _seconds_by("speaker", chosen), _seconds_by("language", chosen)
    return Outcome(catalog.folder, sources, table(catalog), by_speaker, by_language, times, notes)


def _seconds_by(name: str, segments: Sequence[Segment]) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for segment in segments:
        seconds[getattr(segment, name)] += segment.seconds
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
