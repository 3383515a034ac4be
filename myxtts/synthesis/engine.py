"""The engine: a scheduler in a thread of its own, for the requests of many clients. It knows no protocols.

Any thread may submit a request with a function that is given its pieces and, exactly once, its end. A request is
spoken as `Synthesizer.stream` speaks it, whatever else is going on.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from myxtts.audio import Wave
from myxtts.devices import Stream, allocatable_bytes, work_on
from myxtts.errors import ConfigError, MyXTTSError, PipelineError
from myxtts.host import available_bytes, short_turns
from myxtts.synthesis.generation import Sampling
from myxtts.synthesis.scheduler import CHUNK_CODES, Attempt, Cancelled, Job, Piece
from myxtts.synthesis.synthesizer import (
    Report,
    SentenceReport,
    SynthesisArguments,
    SynthesisOptions,
    Synthesizer,
    Utterance,
)
from myxtts.synthesis.text import Sentence
from myxtts.synthesis.voices import Voice, read_references

QUEUE_LIMIT = 256
SLOTS_PER_CORE, GPU_SLOTS, LEAST_SLOTS = 4, 128, 2  # by default; and so many that a request with guidance fits
MEMORY_SHARE = 0.5  # of the free memory, for the slots
_log = logging.getLogger(__name__)


class QueueFull(MyXTTSError):
    """Too many requests wait; `retry_after_s` is when to try again."""

    def __init__(self, num_queued: int, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(
            f"{num_queued} requests are waiting, the most there may be; try again in {retry_after_s:.0f} s"
        )


class EngineClosed(MyXTTSError):
    """The engine accepts no more requests."""

    def __init__(self) -> None:
        super().__init__("The engine is closed or closing; send the request to another one, or after a restart.")


@dataclass(frozen=True)
class Request:
    """What to say and how; the fields are those of `Synthesizer.stream`."""

    text: str
    voice: Voice
    language: str
    speed: float = 1.0
    seed: int | None = None
    sampling: Sampling | None = None  # without one, what suits the model
    client: str = ""  # who asks: clients are served in turn
    chunk_codes: int | None = CHUNK_CODES
    """Codes per piece. None: a piece per sentence, and of several attempts the best, as `Synthesizer.speak`."""


@dataclass(frozen=True)
class End:
    """The end of a request: its report, or the error that ended it."""

    report: Report | None = None
    error: Exception | None = None


Deliver = Callable[[Piece | End], None]


@dataclass(frozen=True)
class Stats:
    """What the engine does now, and has done since it began."""

    slots: int
    slots_used: int
    active: int  # requests being spoken
    queued: int
    done: int
    failed: int
    cancelled: int
    audio_seconds: float  # delivered
    steps: int
    step_ms: float  # of late, on average
    memory_bytes: int  # of all slots


class Ticket:
    """A request that was accepted."""

    def __init__(self, seed: int, cancel: Callable[[], None]) -> None:
        self.seed = seed  # which says the same again
        self._cancel = cancel

    def cancel(self) -> None:
        """Stop at the next step; `deliver` is given an `End` with `Cancelled` unless it had its end already."""
        self._cancel()


class Engine:
    """Speaks requests of many clients at once. Nothing else may use the synthesizer meanwhile."""

    def __init__(
        self,
        synthesizer: Synthesizer,
        *,
        slots: int | None = None,
        memory_bytes: int | None = None,
        queue_limit: int = QUEUE_LIMIT,
    ) -> None:
        """As many `slots` as fit into `memory_bytes`, a share of the free memory by default."""
        self.synthesizer, self._queue_limit = synthesizer, queue_limit
        num_slots = _slots_that_fit(synthesizer, slots, memory_bytes)
        on_gpu = synthesizer.device.type == "cuda"
        self._scheduler = synthesizer.scheduler(num_slots, least_slots=LEAST_SLOTS, has_own_stream=on_gpu)
        synthesizer.capture(self._scheduler.slots)
        self._stream = Stream(synthesizer.device, high_priority=True)
        Stream.current(synthesizer.device).finish()  # what was allocated here is used on another stream
        self._changed, self._frontend = self._scheduler.changed, threading.Lock()
        self._is_closed = self._is_draining = False
        self._calls: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._done = self._failed = self._cancelled = 0
        self._request_s = 0.0
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Deliver) -> Ticket:
        """Accept a request; from now on `deliver` is called in the engine's thread, and must not block.

        Raises `QueueFull`, `EngineClosed`, and the errors of `Synthesizer` for a text or voice it cannot speak.
        """
        said, options = self.check(request)
        streams, size = request.chunk_codes is not None, request.chunk_codes or CHUNK_CODES
        listener = _Listener(self, deliver, said, options)
        how_heard = {"chunk_codes": size, "streams": streams, "client": request.client}
        job = listener.job = self.synthesizer.job(said, options, listener, **how_heard)
        with self._changed:
            self._require_open()
            num_queued = len(self._scheduler.queue)
            if num_queued >= self._queue_limit:
                raise QueueFull(num_queued, self._retry_after_s())
            self._scheduler.submit(job)
        return Ticket(options.seed, partial(self._scheduler.cancel, job))

    def voice(self, files: Sequence[Path], name: str | None = None) -> Voice:
        """The voice of recordings of one person.

        They are read here, and made a voice between two steps: the networks belong to the engine's thread.
        """
        with self._changed:
            self._require_open()
        references, future = read_references(files), Future[object]()
        with self._changed:
            self._require_open()
            make = partial(self.synthesizer.voice_of, references, name or files[0].stem)
            self._calls.append((make, future))
            self._scheduler.notify()
        voice = future.result()
        assert isinstance(voice, Voice)
        return voice

    def check(self, request: Request) -> tuple[Utterance, SynthesisOptions]:
        """The sentences of a request; raises the errors of `Synthesizer` for one that `submit` would refuse."""
        if request.chunk_codes is not None and request.chunk_codes < 1:
            expected = "1 or more, or None for whole sentences"
            raise ConfigError(f"chunk_codes is {request.chunk_codes}, expected {expected}")
        how: SynthesisArguments = {"sampling": request.sampling, "speed": request.speed, "seed": request.seed}
        with self._frontend:
            return self.synthesizer.prepared(request.text, request.voice, request.language, how)

    def stats(self) -> Stats:
        scheduler = self._scheduler
        with self._changed:
            kept = scheduler.kept
            slots = (kept.num_slots, kept.num_used) if kept else (0, 0)
            ended = (self._done, self._failed, self._cancelled)
            steps = (scheduler.num_steps, 1000 * scheduler.step_s)
            counts = (len(scheduler.jobs), len(scheduler.queue))
            return Stats(*slots, *counts, *ended, scheduler.audio_s, *steps, kept.num_bytes if kept else 0)

    def close(self, drain: bool = True, timeout_s: float | None = None) -> None:
        """Accept no more requests, and return when all have ended: spoken if `drain`, else cancelled.

        What is not spoken after `timeout_s` is cancelled.
        """
        with self._changed:
            self._is_closed, self._is_draining = True, drain
            self._scheduler.notify()
        self._thread.join(timeout_s)
        with self._changed:
            self._is_draining = False
            self._scheduler.notify()
        self._thread.join()

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineClosed

    def _retry_after_s(self) -> float:
        """When the queue should have room again."""
        return max(1.0, math.ceil(self._request_s / max(1, len(self._scheduler.jobs))))

    # The engine's thread

    def _serve(self) -> None:
        work_on(self.synthesizer.device)
        scheduler = self._scheduler
        try:
            with short_turns(), self._stream.use():
                while not self._is_over():
                    self._call()
                    scheduler.advance()
        except Exception as error:
            _log.exception("The engine failed")
            scheduler.end_all(PipelineError(f"The engine failed: {error}. Start it again."))
        finally:
            with self._changed:
                self._is_closed = True
            scheduler.close()
            for _, future in self._calls:
                future.set_exception(EngineClosed())

    def _is_over(self) -> bool:
        with self._changed:
            has_work = bool(self._scheduler.jobs or len(self._scheduler.queue))
            return self._is_closed and not (self._is_draining and has_work)

    def _call(self) -> None:
        while self._calls:
            work, future = self._calls.popleft()
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def ended(self, job: Job, end: End) -> None:
        """Count a request that has ended."""
        with self._changed:
            self._done += end.error is None
            self._cancelled += isinstance(end.error, Cancelled)
            self._failed += end.error is not None and not isinstance(end.error, Cancelled)
            if job.began_at:
                took_s = time.monotonic() - job.began_at
                self._request_s += (took_s - self._request_s) * (0.1 if self._request_s else 1.0)


class _Listener:
    """Delivers what a job says, with a report at its end."""

    job: Job

    def __init__(self, engine: Engine, deliver: Deliver, said: Utterance, options: SynthesisOptions) -> None:
        self._engine, self._deliver, self._said, self._options = engine, deliver, said, options
        self._synthesizer = engine.synthesizer
        self._reports: list[SentenceReport] = []

    def piece(self, piece: Piece) -> None:
        self._deliver(piece)

    def sentence(self, sentence: Sentence, attempt: Attempt, wave: Wave) -> None:
        self._reports.append(SentenceReport.of(sentence, attempt, wave))

    def end(self, error: Exception | None) -> None:
        end = End(error=error)
        if error is None:
            try:
                end = End(self._synthesizer.report(self._said, self._reports, self._options).require_sound())
            except MyXTTSError as silent:
                end = End(error=silent)
        self._engine.ended(self.job, end)
        self._deliver(end)


def _slots_that_fit(synthesizer: Synthesizer, wanted: int | None, memory_bytes: int | None) -> int:
    on_cpu, each = synthesizer.device.type == "cpu", synthesizer.slot_bytes
    if memory_bytes is None:
        free = available_bytes() if on_cpu else allocatable_bytes(synthesizer.device)
        memory_bytes = max(int(MEMORY_SHARE * free), LEAST_SLOTS * each)
    found = min(
        wanted or (SLOTS_PER_CORE * max(2, torch.get_num_threads()) if on_cpu else GPU_SLOTS), memory_bytes // each
    )
    if found < LEAST_SLOTS:
        given = f"{wanted or 'the usual number of'} slots in {memory_bytes:,} bytes"
        need = f"an engine needs {LEAST_SLOTS}, of {each:,} bytes each"
        raise ConfigError(f"{given}: only {found} fit, and {need}; give it more")
    return found
