"""The page on which a person hears and mends a collected corpus: `myxtts collect --review DIR`.

The catalog makes every edit; this module lists clips, draws waveforms and sends sound. Clips are named by their
ids: nothing that comes from the network becomes a path.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import soundfile as sf

from myxtts.collect.catalog import (
    CLIPS,
    THRESHOLDS,
    Catalog,
    Cut,
    Edit,
    Filters,
    Segment,
    Source,
    StaleEdit,
    count,
    measured,
    reasons,
    table,
    write_corpus,
)
from myxtts.collect.edits import ACTIONS, edit
from myxtts.config import LANGUAGE_NAMES
from myxtts.errors import ConfigError, MyXTTSError
from myxtts.web.pages import file_routes, json_get, json_post, page_app, require_packages, serve_page

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

FILES = {"/": "review.html"} | {f"/{name}": name for name in ("page.js", "review.js", "review.css", "style.css")}
CONTEXT_S = 2.0  # of the recording that is drawn on both sides of the selected clip
NARROW, WIDE = 160, 800  # points of a waveform
MAX_ROWS = 200  # in one request
_CACHED_PEAKS = 4096
_MOST_CHANGES = 1000  # clips of one edit that are read one by one; after more, everything is read
_WRITE_AFTER_S = 2.0

_log = logging.getLogger(__name__)


class Review:
    """A catalog as the page needs it: clips in memory, as new as the catalog, and why each is not used."""

    def __init__(self, catalog: Catalog, cut: Cut) -> None:
        self._catalog, self._cut, self._lock = catalog, cut, threading.RLock()
        self._version = -1
        self._segments: dict[int, Segment] = {}
        self._reasons: dict[int, list[tuple[str, str]]] = {}
        self._following: dict[int, int] = {}
        self._sources: dict[int, Source] = {}
        self._peaks: OrderedDict[tuple[object, ...], bytes] = OrderedDict()
        self._timer: threading.Timer | None = None
        self._writing, self._written = threading.Lock(), -1
        self._problem, self._read_again_at = "", 0.0

    def _refresh(self, changed: Iterable[int] | None = None) -> None:
        """Read these clips, which an edit changed, or everything if the catalog has changed otherwise.

        Reading everything while `collect` runs takes at most a fifth of the time.
        """
        version, started = self._catalog.version, time.monotonic()
        changed = None if changed is None else {*changed}
        whole = changed is None or 0 in changed or len(changed) > _MOST_CHANGES
        if version == self._version or (changed is None and started < self._read_again_at):
            return
        filters = self._catalog.filters
        if whole:
            self._segments, self._reasons = {}, {}
            self._hold(self._catalog.segments(), filters)
            self._sources = {source.id: source for source in self._catalog.sources()}
            self._read_again_at = time.monotonic() + 4 * (time.monotonic() - started)
        else:
            for gone in changed or ():
                self._segments.pop(gone, None)
            self._hold(self._catalog.segments(ids=sorted(changed or ())), filters)
        self._version = version if whole or version == self._version + 1 else self._version
        ordered = sorted(self._segments.values(), key=_place)
        pairs = pairwise(ordered)
        self._following = {one.id: other.id for one, other in pairs if _place(one)[:2] == _place(other)[:2]}

    def _hold(self, segments: Iterable[Segment], filters: Filters) -> None:
        for segment in segments:
            self._reasons[segment.id] = reasons(segment, filters)
            self._segments[segment.id] = replace(segment, notes={})  # voices are in them, which no page shows

    @property
    def version(self) -> int:
        return self._catalog.version

    def state(self) -> dict[str, Any]:
        """Return everything but the clips."""
        with self._lock:
            self._refresh()
            clips, undo_redo = self._segments.values(), self._catalog.next_steps()
            speakers, languages = (
                Counter(getattr(clip, name) for clip in clips) for name in ("speaker", "language")
            )
            why = Counter(reason for clip in clips for reason, _ in self._reasons[clip.id])
            in_use = [clip for clip in clips if not self._reasons[clip.id]]
            return {
                "version": self._version,
                "folder": self._catalog.folder.resolve().name,
                "filters": asdict(self._catalog.filters),
                "clips": len(clips),
                "seconds": sum(clip.seconds for clip in clips),
                "used": {"clips": len(in_use), "seconds": sum(clip.seconds for clip in in_use)},
                "decided": sum(bool(clip.decision) for clip in clips),
                "sources": [
                    {"id": source.id, "name": Path(source.path).name} for source in self._sources.values()
                ],
                "speakers": sorted(speakers.items()),
                "languages": sorted(languages.items()),
                "reasons": why.most_common(),
                "scores": sorted({name for clip in clips for name in clip.scores}),
                "undo": _step(undo_redo[0]),
                "redo": _step(undo_redo[1]),
                "problem": self._problem,
            }

    def ids(self, wanted: Mapping[str, str]) -> dict[str, Any]:
        """Return the ids of the clips that a query selects, in its order."""
        with self._lock:
            self._refresh()
            chosen = [clip for clip in self._segments.values() if self._matches(clip, wanted)]
            sort, filters = wanted.get("sort", "worst"), self._catalog.filters
            if sort == "worst":
                chosen.sort(key=lambda clip: (bool(clip.decision), -_badness(clip, filters), *_place(clip)))
            elif sort == "time":
                chosen.sort(key=_place)
            else:
                chosen = _by_score(chosen, sort)
            if wanted.get("down") == "1":
                chosen.reverse()
            return {"ids": [clip.id for clip in chosen], "seconds": sum(clip.seconds for clip in chosen)}

    def _matches(self, clip: Segment, wanted: Mapping[str, str]) -> bool:
        why, sought = self._reasons[clip.id], wanted.get("text", "").casefold()
        uses = {"used": not why, "aside": bool(why), "undecided": not clip.decision}
        uses["edited"] = bool(clip.decision or clip.edited)
        return (
            uses.get(wanted.get("use", ""), True)
            and wanted.get("source", "") in ("", str(clip.source))
            and ("speaker" not in wanted or wanted["speaker"] == clip.speaker)
            and ("language" not in wanted or wanted["language"] == clip.language)
            and ("reason" not in wanted or wanted["reason"] in (reason for reason, _ in why))
            and (not sought or sought in clip.text.casefold())
        )

    def rows(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return clips as the page shows them; one that is gone is left out."""
        with self._lock:
            self._refresh()
            return [self._row(self._segments[number]) for number in ids[:MAX_ROWS] if number in self._segments]

    def _row(self, clip: Segment) -> dict[str, Any]:
        row = {item.name: getattr(clip, item.name) for item in fields(clip)}
        source = self._sources.get(clip.source) or self._catalog.source(clip.source)
        shown = {
            "file": Path(source.path).name,
            "total": source.seconds,
            "following": self._following.get(clip.id),
        }
        return {**row, **shown, "reasons": self._reasons[clip.id]}

    @contextlib.contextmanager
    def _editing(self) -> Iterator[None]:
        """One edit at a time; after a stale one the next request reads the catalog at once."""
        with self._lock:
            self._refresh()
            try:
                yield
            except StaleEdit:
                self._read_again_at = 0.0
                raise

    def edit(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make an edit and return what the page must show again."""
        action, arguments, versions = str(body.get("action")), body.get("arguments"), body.get("versions", {})
        if action not in ACTIONS or not isinstance(arguments, dict) or not isinstance(versions, dict):
            raise ConfigError("Expected an action, its arguments, and the versions of the clips that it changes.")
        if not all(isinstance(arguments.get(name, 0), int) for name in ("id", "first", "second")):
            raise ConfigError("Clips are named by numbers.")
        seen = {int(number): version for number, version in versions.items() if number.isdecimal()}
        with self._editing():
            return self._after(edit(self._catalog, action, arguments, self._cut, seen))

    def step(self, name: str, expected: object) -> dict[str, Any]:
        """Undo or redo the edit that the page expects to be next."""
        with self._editing():
            turn = self._catalog.undo if name == "undo" else self._catalog.redo
            return self._after(turn(expected if isinstance(expected, int) else None))

    def set_filters(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Apply filters."""
        with self._editing():
            return self._after(self._catalog.set_filters(Filters.checked(values)))

    def preview(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what filters would take, without applying them."""
        filters = Filters.checked(values)
        with self._lock:
            self._refresh()
            clips = list(self._segments.values())
        found = count(clips, filters)
        return {"used": found.used._asdict(), "set_aside": [row._asdict() for row in found.set_aside]}

    def summary(self) -> dict[str, Any]:
        """Return where every second of the recordings went."""
        found = table(self._catalog)
        rows = {"set_aside": found.set_aside, "unused": found.unused}
        listed = {name: [row._asdict() for row in taken] for name, taken in rows.items()}
        return {"seconds": found.seconds, "used": found.used._asdict(), **listed}

    def _after(self, made: Edit | None) -> dict[str, Any]:
        """Return the clips that an edit changed and their neighbours, or that the page must read all of them."""
        before, changed = {*self._segments}, {change.segment for change in made.changes} if made else set()
        self._refresh(changed)
        if made:
            self.write_soon()
        if 0 in changed or len(changed) > MAX_ROWS // 2:
            return {"edit": _step(made), "all": True, "state": self.state()}
        near = {number for pair in self._following.items() if changed & {*pair} for number in pair} - changed
        rows, gone = self.rows([*sorted(changed), *near]), sorted(changed - self._segments.keys())
        new = sorted(changed & self._segments.keys() - before)
        return {"edit": _step(made), "all": False, "rows": rows, "gone": gone, "made": new, "state": self.state()}

    def audio(self, number: int) -> Path:
        """Return the file of a clip."""
        name = self._catalog.segment(number).audio
        if not name or Path(name).name != name:
            raise StaleEdit(f"Clip {number} has no audio.")
        return self._catalog.folder / CLIPS / name

    def peaks(self, number: int, wide: bool) -> dict[str, Any]:
        """Return the waveform of a clip; a wide one shows the recording on both sides too, if it is there."""
        clip = self._catalog.segment(number)
        source = self._catalog.source(clip.source)
        start, end = clip.start, clip.end
        if wide:
            start, end = max(0.0, start - CONTEXT_S), min(max(source.seconds, end), end + CONTEXT_S)
            with contextlib.suppress(sf.LibsndfileError, OSError, RuntimeError, ValueError):
                channel = clip.channel if source.channels > 1 else None
                points = self._cached(Path(source.path), channel, start, end, WIDE)
                return {"start": start, "end": end, "peaks": list(points)}
        try:
            points = self._cached(self.audio(number), None, 0.0, clip.seconds, WIDE if wide else NARROW)
        except (sf.LibsndfileError, OSError, RuntimeError, ValueError) as error:
            raise MyXTTSError(f"The audio of clip {number} cannot be read: {error}") from error
        return {"start": clip.start, "end": clip.end, "peaks": list(points)}

    def _cached(self, path: Path, channel: int | None, start: float, end: float, num_points: int) -> bytes:
        key = (path, channel, start, end, num_points)
        with self._lock:
            if key in self._peaks:
                self._peaks.move_to_end(key)
                return self._peaks[key]
        points = waveform(path, channel, start, end, num_points)
        with self._lock:
            self._peaks[key] = points
            while len(self._peaks) > _CACHED_PEAKS:
                self._peaks.popitem(last=False)
        return points

    def write_soon(self) -> None:
        """Write the CSV files when no edit has come for a while."""
        if self._timer:
            self._timer.cancel()
        self._timer = threading.Timer(_WRITE_AFTER_S, self.write)
        self._timer.daemon = True
        self._timer.start()

    def write(self) -> None:
        """Write the CSV files unless they are up to date; a failure is shown, and the next edit tries again."""
        with self._writing:
            try:
                version = self._catalog.version
                if version != self._written:
                    write_corpus(self._catalog)
                self._written, self._problem = version, ""
            except MyXTTSError as error:
                self._problem = str(error)
                _log.warning("%s", error)

    def close(self) -> None:
        """Write what is not written yet."""
        if self._timer:
            self._timer.cancel()
            self._timer.join()
            self.write()


def _place(clip: Segment) -> tuple[int, int, float]:
    return clip.source, clip.channel, clip.start


def _badness(clip: Segment, filters: Filters) -> float:
    """Return how far a clip is beyond the strictest filter, as a share of its range; flags count as 1."""
    found = [-1.0]
    for name, rule in THRESHOLDS.items():
        value, limit = measured(clip, rule), getattr(filters, name)
        if value is not None and limit is not None:
            beyond = value - limit if rule.is_maximum else limit - value
            found.append(beyond / (rule.high - rule.low))
    return max(found) + len(clip.flags) + (not clip.text)


def _by_score(clips: list[Segment], name: str) -> list[Segment]:
    """Sort by a score or a field, ascending; clips without the score come last."""
    if name in ("text", "speaker", "language"):
        return sorted(clips, key=lambda clip: (getattr(clip, name), *_place(clip)))
    if name == "seconds":
        return sorted(clips, key=lambda clip: clip.seconds)
    return sorted(clips, key=lambda clip: (name not in clip.scores, clip.scores.get(name, 0.0)))


def _step(made: Edit | None) -> dict[str, Any] | None:
    """Return an edit as the page names it."""
    return {"id": made.id, "action": made.action, "arguments": made.arguments} if made else None


def waveform(path: Path, channel: int | None, start: float, end: float, num_points: int) -> bytes:
    """Return the loudest sample of each of `num_points` equal parts of a span, from 0 to 255.

    Without a channel it is that of the mean of all channels.
    """
    with sf.SoundFile(path) as file:
        first = min(round(start * file.samplerate), file.frames)
        file.seek(first)
        frames = min(round(end * file.samplerate), file.frames) - first
        samples = file.read(frames, dtype="float32", always_2d=True)
    if channel is not None:
        samples = samples[:, channel : channel + 1]
    if not samples.size:
        return bytes(num_points)
    wave = np.abs(samples.mean(axis=1))
    edges = np.linspace(0, len(wave), num_points, endpoint=False).astype(np.int64)
    loudest = np.maximum.reduceat(wave, edges)
    return bytes(np.clip(np.rint(np.nan_to_num(loudest) * 255), 0, 255).astype(np.uint8))


def review_app(review: Review) -> Starlette:
    """Return the page's application."""
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import FileResponse, JSONResponse
    from starlette.routing import Route

    def audio(request: Request) -> Response:
        path = review.audio(request.path_params["number"])
        if not path.is_file():
            return JSONResponse({"error": f"{path.name} is missing in wavs/."}, 404)
        return FileResponse(path, headers={"cache-control": "private, max-age=3600"})

    def about(_: Request) -> Any:
        rules = [{**rule._asdict(), "is_maximum": rule.is_maximum} for rule in THRESHOLDS.values()]
        return {"thresholds": rules, "languages": LANGUAGE_NAMES}

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        review.write_soon()  # the last page may have been killed
        yield
        await run_in_threadpool(review.close)

    routes = [
        *file_routes(Path(__file__).parent, FILES),
        Route("/api/about", json_get(about)),
        Route("/api/state", json_get(lambda _: review.state())),
        Route("/api/version", json_get(lambda _: {"version": review.version})),
        Route("/api/summary", json_get(lambda _: review.summary())),
        Route("/api/ids", json_get(lambda request: review.ids(request.query_params))),
        Route("/api/rows", json_get(lambda request: review.rows(_numbers(request.query_params.get("ids", ""))))),
        Route("/api/peaks/{number:int}", json_get(_peaks_of(review))),
        Route("/audio/{number:int}", audio),
        Route("/api/edit", json_post(review.edit), methods=["POST"]),
        Route("/api/undo", json_post(lambda body: review.step("undo", body.get("expected"))), methods=["POST"]),
        Route("/api/redo", json_post(lambda body: review.step("redo", body.get("expected"))), methods=["POST"]),
        Route("/api/preview", json_post(review.preview), methods=["POST"]),
        Route("/api/filters", json_post(review.set_filters), methods=["POST"]),
    ]
    return page_app(routes, lifespan=lifespan, statuses={StaleEdit: 409})


def _peaks_of(review: Review) -> Callable[[Request], Any]:
    return lambda request: review.peaks(request.path_params["number"], "wide" in request.query_params)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")[:MAX_ROWS] if part.isdecimal() and len(part) < 16]


def _say(address: str) -> None:
    sys.stderr.write(f"The review page is open at\n  {address}\nEdits are saved at once. Ctrl-C ends it.\n")
    sys.stderr.flush()


def serve_review(
    folder: Path,
    *,
    port: int = 0,
    open_browser: bool = True,
    cut: Cut | None = None,
    say: Callable[[str], object] = _say,
) -> None:
    """Serve the review page of a collected corpus until Ctrl-C."""
    require_packages()
    if cut is None:
        from myxtts.collect.recordings import cut_clip

        cut = partial(cut_clip, folder)
    with Catalog(folder, lock=False) as catalog:
        serve_page(review_app(Review(catalog, cut)), port=port, open_browser=open_browser, say=say)
