"""From recordings to a corpus: decode and find speech, hear, check, and write down, each in threads of its own.

    reader: decode, VAD, cuts ─► hear: words, twice ─► check: clip, voice, quality ─► catalog (this thread)

Between the stages are bounded queues, so memory does not grow with the length of a recording. One transaction adds a
stretch of about a minute: after kill -9 the next call continues there. What needs all clips follows at the end:
scripts, speakers and repeated takes.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import soxr

from myxtts.audio import DAMAGED, UnusableAudio, Wave
from myxtts.collect import quality, speakers
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
from myxtts.collect.cutting import (
    FRAME_S,
    LEVELS_PER_FRAME,
    NO_PAUSE,
    NO_SPEECH,
    PIECE,
    TOO_SHORT,
    Numbers,
    Span,
    plan,
    speech_frames,
    windows,
)  # fmt: skip
from myxtts.collect.listeners import FRAME_SAMPLES, INSTALL, RATE, Listening, start_listeners
from myxtts.collect.recordings import (
    BLOCK_S,
    Recording,
    clip_name,
    find_recordings,
    has_speaker_per_channel,
    mono,
    save_clip,
    script_of,
)  # fmt: skip
from myxtts.collect.script import Script, divide, error_rate, is_foreign, is_repeated, plain, read_script
from myxtts.errors import ConfigError, Progress, progress_bar
from myxtts.files import sync_path
from myxtts.host import usable_cores

ONE_SPEAKER = "speaker1"
REPEATED, OTHER_LANGUAGE, TOO_MUCH_TEXT = "repeated take", "another language", "more text than speech"
_DETAILS = {
    NO_PAUSE: "no silence to cut at within 12 s",
    TOO_SHORT: "less than 2 s of speech between long pauses",
}
_CONTEXT_S = 3.2  # heard by the VAD before a block, to be in the state it would have reached
_AHEAD = 2  # finished stretches that may wait for the next stage
_POLL_S = 0.2
_OTHER_CHANNEL_DB = 12.0
_UNLIKELY, _CERTAIN, _KNOWN_SHARE = 0.1, 0.8, 0.3  # probabilities of languages
_LANGUAGE_FLOOR, _NEIGHBOUR_WEIGHT, _NEIGHBOURS = 1e-3, 0.15, 2
_MOST_LETTERS_PER_S = 30.0
_REPEATED_WITHIN_S, _REPEATED_CLIPS = 60.0, 4
_MUSIC_MARGIN_S = 0.5  # audio around a clip in which music is looked for

Item, Result = TypeVar("Item"), TypeVar("Result")

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
    filters: Filters
    speakers: dict[str, float]
    """Seconds in use by speaker, most first; likewise languages."""
    languages: dict[str, float]
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
        notes: list[str] = []
        sources = [source for path in found if (source := _register(catalog, path))]
        pending = [source for source in sources if source.state not in ("done", "failed")]
        if pending:
            with start(options.judge, options.whisper, options.download) as listening:
                notes += _check_models(listening.models, options)
                _run(catalog, pending, options, listening, progress)
        changed = {source.id for source in pending}
        notes += finish(catalog, options, script, changed)
        write_corpus(catalog)
        return _outcome(catalog, notes)


def _register(catalog: Catalog, path: Path) -> Source | None:
    """Return a recording's row; one that cannot be opened is noted with the reason."""
    about = path.stat()
    known = catalog.source_for(str(path), about.st_size, about.st_mtime_ns)
    if known is not None and known.state != "failed":
        return known
    source = known or catalog.add_source(str(path), about.st_size, about.st_mtime_ns)
    try:
        with Recording(path) as recording:
            facts = recording.facts
        apart = has_speaker_per_channel(path)
    except UnusableAudio as error:
        return catalog.update_source(source.id, state="failed", reason=error.reason, detail=error.detail)
    about_it = {"seconds": facts.seconds, "sample_rate": facts.sample_rate, "channels": 2 if apart else 1}
    return catalog.update_source(source.id, state="new", reason="", detail="", **about_it)


def _check_models(models: Mapping[str, str], options: CollectOptions) -> list[str]:
    """Refuse what the models that are installed cannot do; returns what is said at the end."""
    _log.info("Listening with %s", ", ".join(models.values()))
    if "voice" not in models and not options.speaker and options.speakers not in ("one", "file", "folder"):
        raise ConfigError(
            "Speakers cannot be told apart without ECAPA-TDNN. If one person speaks, add --speakers one or --speaker "
            "NAME; if each file or folder is one person, --speakers file or folder. Else install it:\n"
            + INSTALL.splitlines()[1]
        )
    return ["No quality filter: DistillMOS is not installed (make judge)"] * ("mos" not in models)


class _Stopped(Exception):
    """The stages are being ended."""


class _Stage(Generic[Item, Result]):
    """Works on items in threads and gives the results in the order of the items."""

    def __init__(
        self, items: Iterable[Item], work: Callable[[Item], Result], workers: int, stop: threading.Event
    ) -> None:
        self._items, self._work, self._stop = items, work, stop
        self._results: Queue[Future[Result] | None] = Queue(workers + _AHEAD)
        self._pool = ThreadPoolExecutor(workers)
        self._feeder = threading.Thread(target=self._feed)
        self._feeder.start()

    def _feed(self) -> None:
        try:
            for item in self._items:
                self._put(self._pool.submit(self._work, item))
            self._put(None)
        except _Stopped:
            return
        except BaseException as error:
            failed: Future[Result] = Future()
            failed.set_exception(error)
            with contextlib.suppress(_Stopped):
                self._put(failed)

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
        self._feeder.join()
        self._pool.shutdown(cancel_futures=True)


class Stretch(NamedTuple):
    """About a minute of one channel, and how it is cut. Spans are relative to its start."""

    source: Source
    channel: int
    start: float
    spans: list[Span]
    rate: int
    wave: Wave
    probabilities: npt.NDArray[np.float32]
    is_end: bool = False
    damage: str = ""

    def part(self, start: float, end: float) -> Wave:
        """The samples between two times at the recording's rate."""
        first, *ends = (round((self.start + at) * self.rate) for at in (0.0, start, end))
        return self.wave[max(0, ends[0] - first) : max(0, ends[1] - first)]

    def heard(self, start: float, end: float) -> Wave:
        """The same at the rate of the models."""
        return at_rate(self.part(start, end), self.rate)

    @property
    def end(self) -> float:
        return self.start + (self.spans[-1].end if self.spans else 0.0)

    @property
    def pieces(self) -> list[Span]:
        return [span for span in self.spans if span.kind == PIECE]


class Hearing(NamedTuple):
    """What was heard of one piece: with its neighbours, and alone."""

    text: str
    alone: str
    language: str
    flags: dict[str, str]


def _run(
    catalog: Catalog, sources: Sequence[Source], options: CollectOptions, listening: Listening, progress: Progress
) -> None:
    """Send recordings through the stages."""
    stop, cores = threading.Event(), usable_cores()
    with contextlib.ExitStack() as stages:
        stages.callback(stop.set)
        stretches = (part for source in sources for part in _stretches(catalog, source, listening))
        hearing = _Stage(stretches, partial(_hear, listening, options.language), 1 + max(1, cores // 4), stop)
        stages.callback(hearing.close)
        checker = partial(_check, listening, options, catalog.folder / CLIPS)
        checking = _Stage(hearing, checker, max(1, cores // 2), stop)
        stages.callback(checking.close)
        stages.callback(stop.set)
        total = sum(source.seconds * source.channels for source in sources)
        done = sum(_position(catalog, source, channel) for source in sources for channel in range(source.channels))
        with progress_bar(progress, "Listening (seconds)", round(total), round(done)) as advance:
            for stretch, segments, unused in checking:
                _record(catalog, stretch, segments, unused)
                advance(round(stretch.end) - round(stretch.start))


def _position(catalog: Catalog, source: Source, channel: int) -> float:
    """How far a channel is finished."""
    if source.channels == 1:
        return source.done_until
    ends = [segment.end for segment in catalog.segments(source.id) if segment.channel == channel]
    return max([0.0, *ends, *(span.end for span in catalog.unused(source.id) if span.channel == channel)])


def _stretches(catalog: Catalog, source: Source, listening: Listening) -> Iterator[Stretch]:
    """Cut what is left of a recording; its last stretch says that it ends, and what is wrong with it."""
    for channel in range(source.channels):
        position, is_last = _position(catalog, source, channel), channel == source.channels - 1
        nothing = np.zeros(0, np.float32)
        end, damage = position, ""
        try:
            with Recording(Path(source.path)) as recording:
                for stretch in _cut(recording, source, channel, position, listening):
                    end = stretch.end
                    yield stretch
                damage = recording.damage
        except (UnusableAudio, OSError) as error:
            damage = error.detail if isinstance(error, UnusableAudio) else str(error)
            is_last = True
        if is_last or damage:
            yield Stretch(source, channel, end, [], RATE, nothing, nothing, is_last, damage)


def _cut(
    recording: Recording, source: Source, channel: int, position: float, listening: Listening
) -> Iterator[Stretch]:
    """Cut one channel from a position on. Blocks begin at the same times in every call, so the cuts are the same."""
    side = channel if source.channels > 1 else None
    rate, begin = recording.facts.sample_rate, position // BLOCK_S * BLOCK_S
    before = recording.part(max(0.0, begin - _CONTEXT_S), begin)
    held = _Held(begin, rate)
    for block, is_end in _with_last(recording.blocks(begin)):
        held.add(mono(block.samples, side), *_analyse(before, block.samples, rate, side, listening))
        before = block.samples[-round(_CONTEXT_S * rate) :]
        held.drop(max(position, held.start))
        spans = plan(held.probabilities, held.levels, is_start=held.start == 0, is_end=is_end)
        if is_end and spans:  # the last frame may reach beyond the end
            spans[-1] = spans[-1]._replace(end=max(spans[-1].start, len(held.wave) / rate))
        if spans:
            yield Stretch(source, channel, held.start, spans, rate, held.wave, held.probabilities)
            held.drop(held.start + spans[-1].end)


class _Held:
    """Audio that is not cut yet, with its analysis; it begins at a frame of the VAD."""

    def __init__(self, start: float, rate: int) -> None:
        self.start, self._rate = start, rate
        self.wave = self.probabilities = self.levels = np.zeros(0, np.float32)

    def add(self, wave: Wave, probabilities: Numbers, levels: Numbers) -> None:
        self.wave = np.concatenate([self.wave, wave])
        self.probabilities = np.concatenate([self.probabilities, probabilities])
        self.levels = np.concatenate([self.levels, levels])

    def drop(self, until: float) -> None:
        frames = round((until - self.start) / FRAME_S)
        after = self.start + frames * FRAME_S
        self.wave = self.wave[round(after * self._rate) - round(self.start * self._rate) :]
        self.probabilities = self.probabilities[frames:]
        self.levels = self.levels[frames * LEVELS_PER_FRAME :]
        self.start = after


def _with_last(blocks: Iterator[Item]) -> Iterator[tuple[Item, bool]]:
    """Yield items, and whether each is the last."""
    current = next(blocks, None)
    while current is not None:
        following = next(blocks, None)
        yield current, following is None
        current = following


def _analyse(
    before: Wave, samples: Wave, rate: int, side: int | None, listening: Listening
) -> tuple[Numbers, Numbers]:
    """The probabilities of speech and the levels of a block; `before` is what the VAD hears first."""
    wave = at_rate(mono(samples, side), rate)
    wave = np.pad(wave, (0, -len(wave) % FRAME_SAMPLES))
    context = at_rate(mono(before, side), rate)
    context = context[len(context) % FRAME_SAMPLES :]
    speech = listening.speech(np.concatenate([context, wave]))[len(context) // FRAME_SAMPLES :]
    levels = quality.levels_of(wave)
    if side is not None:  # a voice that is louder in the other channel belongs there
        other = at_rate(mono(samples, 1 - side), rate)
        theirs = quality.levels_of(np.pad(other, (0, len(wave) - len(other))))
        louder = (theirs - levels).reshape(-1, LEVELS_PER_FRAME).mean(1) > _OTHER_CHANNEL_DB
        speech = np.where(louder, np.float32(0), speech)
    return speech, levels


def at_rate(wave: Wave, rate: int) -> Wave:
    """Samples at the rate of the models."""
    resampled: Wave = soxr.resample(wave, rate, RATE) if rate != RATE and len(wave) else wave
    return resampled


def _hear(listening: Listening, language: str, stretch: Stretch) -> tuple[Stretch, list[Hearing]]:
    """Hear every piece alone and together with its neighbours, in windows of up to 30 s."""
    pieces = stretch.pieces
    if not pieces:
        return stretch, []
    waves = [stretch.heard(piece.start, piece.end) for piece in pieces]
    alone = listening.hear(waves, [language] * len(waves), quick=True)
    likely = [heard["languages"] for heard in alone]
    spoken = [language] * len(pieces) if language else _languages(likely)
    _hear_again(
        listening, waves, alone, [at for at, heard in enumerate(alone) if heard["language"] != spoken[at]], spoken
    )
    groups = _windows(pieces, spoken)
    together = listening.hear(
        [stretch.heard(pieces[group[0]].start, pieces[group[-1]].end) for group in groups],
        [spoken[group[0]] for group in groups],
    )
    texts = _divided(groups, together, alone)
    unsure = [at for at, heard in enumerate(alone) if error_rate(texts[at], heard["text"]) > 0]
    _hear_again(listening, waves, alone, unsure, spoken, texts)
    texts = _divided(groups, together, alone)
    flags = [_flags(*each, language) for each in zip(pieces, texts, spoken, likely, strict=True)]
    return stretch, [
        Hearing(text, heard["text"], code, found)
        for text, heard, code, found in zip(texts, alone, spoken, flags, strict=True)
    ]


def _hear_again(
    listening: Listening,
    waves: Sequence[Wave],
    alone: list[dict[str, Any]],
    chosen: Sequence[int],
    spoken: Sequence[str],
    texts: Sequence[str] | None = None,
) -> None:
    """Hear some pieces with all care; with texts, the hearing that agrees better with them is kept."""
    if not chosen:
        return
    found = listening.hear([waves[at] for at in chosen], [spoken[at] for at in chosen])
    for at, heard in zip(chosen, found, strict=True):
        if texts is None or error_rate(texts[at], heard["text"]) <= error_rate(texts[at], alone[at]["text"]):
            alone[at] = heard


def _windows(pieces: Sequence[Span], spoken: Sequence[str]) -> list[list[int]]:
    """The numbers of the pieces that are heard together: neighbours in one language."""
    numbers = {piece: number for number, piece in enumerate(pieces)}
    found = []
    for group in windows(pieces):
        parts = groupby((numbers[piece] for piece in group), key=lambda number: spoken[number])
        found += [list(part) for _, part in parts]
    return found


def _divided(
    groups: Sequence[Sequence[int]], together: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The text of each piece in the transcript of its window."""
    found: list[str] = []
    for group, heard in zip(groups, together, strict=True):
        found += divide(heard["text"], [alone[at]["text"] for at in group])
    return found


def _languages(likely: Sequence[Mapping[str, float]]) -> list[str]:
    """The language of each piece: its own evidence and, if that is weak, that of its neighbours."""
    codes = list(likely[0])
    evidence = np.log(np.maximum([[each.get(code, 0.0) for code in codes] for each in likely], _LANGUAGE_FLOOR))
    total = evidence.copy()
    for distance in range(1, _NEIGHBOURS + 1):
        total[distance:] += _NEIGHBOUR_WEIGHT * evidence[:-distance]
        total[:-distance] += _NEIGHBOUR_WEIGHT * evidence[distance:]
    return [codes[at] for at in total.argmax(1)]


def _flags(piece: Span, text: str, spoken: str, likely: Mapping[str, float], asked: str) -> dict[str, str]:
    """Reasons to set a clip aside that need no threshold, with their details."""
    found = {}
    best = max(likely, key=lambda code: likely[code])
    if asked and likely.get(asked, 0.0) < _UNLIKELY and likely[best] > _CERTAIN:
        found[OTHER_LANGUAGE] = f"it sounds like {best}, not {asked}"
    elif sum(likely.values()) < _KNOWN_SHARE:
        found[OTHER_LANGUAGE] = f"none that MyXTTS speaks; nearest is {spoken}"
    letters = len(plain(text).replace(" ", ""))
    if letters > _MOST_LETTERS_PER_S * piece.seconds:
        found[TOO_MUCH_TEXT] = f"{letters} letters in {piece.seconds:.1f} s"
    return found


Checked = tuple[Stretch, list[Segment], list[Unused]]


def _check(
    listening: Listening, options: CollectOptions, folder: Path, heard: tuple[Stretch, list[Hearing]]
) -> Checked:
    """Score the pieces of a stretch and write their clips."""
    stretch, hearings = heard
    source, channel, pieces = stretch.source, stretch.channel, stretch.pieces
    waves = [stretch.heard(piece.start, piece.end) for piece in pieces]
    voices = listening.voices(waves) if "voice" in listening.models and waves else [{}] * len(waves)
    moss = listening.mos(waves) if "mos" in listening.models and waves else [None] * len(waves)
    segments = []
    for piece, hearing, voice, mos in zip(pieces, hearings, voices, moss, strict=True):
        start, end = round(stretch.start + piece.start, 3), round(stretch.start + piece.end, 3)
        wave = stretch.part(piece.start, piece.end)
        scores = _scores(stretch, piece) | {"heard_error": error_rate(hearing.text, hearing.alone)}
        scores |= {"mos": mos} if mos is not None else {}
        notes = {"window": hearing.text, **hearing.flags}
        if voice:
            scores["half_similarity"] = voice["half_similarity"]
            notes["voice"] = _packed(voice["voice"])
        name = clip_name(source.path, source.id, channel, start, end)
        save_clip(folder / name, wave, stretch.rate, scores["gain_db"])
        given = _given_speaker(source, channel, options)
        known = {"text": hearing.text, "heard": hearing.alone, "language": hearing.language, "speaker": given}
        where = {"source": source.id, "channel": channel, "start": start, "end": end, "audio": name}
        segments.append(Segment(**where, **known, scores=scores, notes=notes, flags=tuple(hearing.flags)))
    return stretch, segments, _unused(stretch)


def _scores(stretch: Stretch, piece: Span) -> dict[str, float]:
    wave, heard = stretch.part(piece.start, piece.end), stretch.heard(piece.start, piece.end)
    first, last = (round(at / FRAME_S) for at in (piece.start, piece.end))
    is_speech = speech_frames(stretch.probabilities)
    margin = round(_MUSIC_MARGIN_S / FRAME_S)
    low, high = max(0, first - margin), min(len(is_speech), last + margin)
    return {
        "snr_db": quality.snr_db(quality.levels_of(heard)),
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
            times = (round(stretch.start + at, 3) for at in (span.start, span.end))
            silent = span.kind == NO_SPEECH
            reason = quality.kind_without_speech(stretch.heard(span.start, span.end)) if silent else span.kind
            found.append(Unused(stretch.source.id, stretch.channel, *times, reason, _DETAILS.get(span.kind, "")))
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
    if stretch.damage and source.seconds > end:
        lost = (round(end, 3), round(source.seconds, 3))
        unused = [*unused, Unused(source.id, stretch.channel, *lost, DAMAGED, stretch.damage)]
    sync_path(catalog.folder / CLIPS)
    catalog.add_segments(source.id, segments, unused, round(end, 3))
    if stretch.is_end:
        state = "failed" if stretch.damage and end == 0 else "done"
        reason = DAMAGED if stretch.damage else ""
        seconds = max(end, source.seconds) if stretch.damage else end
        catalog.update_source(source.id, state=state, reason=reason, detail=stretch.damage, seconds=seconds)


def finish(catalog: Catalog, options: CollectOptions, script: Script | None, changed: set[int]) -> list[str]:
    """Do what needs all clips: scripts, speakers, repeated takes. Returns what is worth saying."""
    notes = _use_scripts(catalog, script, changed)
    segments = catalog.segments()
    if changed or options.speakers or any(not segment.speaker for segment in segments):
        _name_speakers(catalog, segments, options)
        _find_repeated(catalog)
    return notes


def _use_scripts(catalog: Catalog, script: Script | None, changed: set[int]) -> list[str]:
    notes = []
    for source in catalog.sources():
        beside = script_of(Path(source.path)) if source.id in changed else None
        text = Script(read_script(beside)) if beside else script if source.id in changed else None
        if text is None:
            continue
        segments, expected, changes = catalog.segments(source.id), 0, {}
        for segment in segments:
            found = text.find(segment.notes.get("window", segment.text), expected)
            if found is not None:
                expected = found.end
                scores = {"heard_error": error_rate(found.text, segment.heard), "script_error": found.error}
                changes[segment.id] = {"text": found.text, "origin": "script", "scores": scores}
        name = Path(source.path).name
        if is_foreign(len(changes), len(segments)):
            notes.append(
                f"The script of {name} is not used: it has {len(changes)} of {len(segments)} clips, so it is of "
                "another text or language"
            )
            continue
        catalog.update_segments(changes)
        notes.append(f"The script of {name} has the words of {len(changes)} of {len(segments)} clips")
    return notes


def _name_speakers(catalog: Catalog, segments: Sequence[Segment], options: CollectOptions) -> None:
    """Name the speakers of clips that have none; if asked, those of all clips that nobody named."""
    again = options.speakers in ("auto", "one") or options.speakers.isdecimal()
    free = [each for each in segments if not each.speaker or (again and each.speaker.startswith("speaker"))]
    free = [each for each in free if "speaker" not in each.edited]
    with_voice = [each for each in free if "voice" in each.notes]
    names = {each.id: each.speaker or ONE_SPEAKER for each in free}
    if options.speakers == "one":
        names = dict.fromkeys(names, ONE_SPEAKER)
    elif with_voice:
        voices = _voices(with_voice)
        count = int(options.speakers) if options.speakers.isdecimal() else None
        found = [""] * len(with_voice) if again else speakers.assigned(voices, _known_voices(segments))
        new = [at for at, name in enumerate(found) if not name]
        labels = speakers.group(voices[new], count)
        taken = {segment.speaker for segment in segments if segment.speaker}
        fresh = speakers.named(labels, [with_voice[at].speaker for at in new], taken)
        for at, name in zip(new, fresh, strict=True):
            found[at] = name
        names |= {each.id: name for each, name in zip(with_voice, found, strict=True)}
    catalog.update_segments({number: {"speaker": name} for number, name in names.items()})
    _score_speakers(catalog)


def _known_voices(segments: Sequence[Segment]) -> dict[str, npt.NDArray[np.float32]]:
    known = defaultdict(list)
    for segment in segments:
        if segment.speaker and "voice" in segment.notes:
            known[segment.speaker].append(segment)
    return {name: _voices(held) for name, held in known.items()}


def _score_speakers(catalog: Catalog) -> None:
    """The similarity of every clip to the other clips of its speaker."""
    changes: dict[int, dict[str, Any]] = {}
    held = sorted((each for each in catalog.segments() if "voice" in each.notes), key=lambda each: each.speaker)
    for _, group in groupby(held, key=lambda each: each.speaker):
        clips = list(group)
        alike = speakers.similarity(_voices(clips), np.zeros(len(clips), np.int64))
        for clip, value in zip(clips, alike.tolist(), strict=True):
            changes[clip.id] = {"scores": {"speaker_similarity": value}}
    catalog.update_segments(changes)


def _find_repeated(catalog: Catalog) -> None:
    """Flag clips whose words the same speaker says again soon after: the last take is kept."""
    changes: dict[int, dict[str, Any]] = {}
    segments = catalog.segments()
    for at, segment in enumerate(segments):
        later = [
            other
            for other in segments[at + 1 : at + 1 + _REPEATED_CLIPS]
            if (other.source, other.channel, other.speaker) == (segment.source, segment.channel, segment.speaker)
            and other.start - segment.end < _REPEATED_WITHIN_S
        ]
        flags = tuple(flag for flag in segment.flags if flag != REPEATED)
        if later and is_repeated(segment.text, [other.text for other in later]):
            flags = (*flags, REPEATED)
        if flags != segment.flags:
            note = {REPEATED: f"said again at {later[0].start:.1f} s or soon after"} if later else {}
            changes[segment.id] = {"flags": flags, "notes": note}
    catalog.update_segments(changes)


def _packed(voice: Sequence[float]) -> str:
    return base64.b64encode(np.array(voice, np.float16).tobytes()).decode()


def _voices(segments: Sequence[Segment]) -> npt.NDArray[np.float32]:
    """The embeddings of clips, of length 1."""
    rows = [np.frombuffer(base64.b64decode(each.notes["voice"]), np.float16) for each in segments]
    found = np.stack(rows).astype(np.float32)
    unit: npt.NDArray[np.float32] = found / (np.linalg.norm(found, axis=1, keepdims=True) + 1e-9)
    return unit


def _outcome(catalog: Catalog, notes: list[str]) -> Outcome:
    filters, by_speaker, by_language = catalog.filters, Counter[str](), Counter[str]()
    for segment in catalog.segments():
        if used(segment, filters):
            by_speaker[segment.speaker] += segment.seconds  # type: ignore[assignment]
            by_language[segment.language] += segment.seconds  # type: ignore[assignment]
    sources = catalog.sources()
    unfinished = sum(source.state in ("new", "cut") for source in sources)
    if unfinished:
        notes = [*notes, f"{unfinished} recordings are unfinished: name them again to continue"]
    totals = (dict(held.most_common()) for held in (by_speaker, by_language))
    return Outcome(catalog.folder, sources, table(catalog), filters, *totals, notes)
