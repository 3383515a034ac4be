"""The engine: one thread that speaks many requests at once. It knows nothing of networks and protocols.

    submit ─► queue, client by client ─► slots: codes, a step for all ─► vocoder, by deadline ─► deliver

Any thread may submit a request with a function that is given its pieces and, exactly once, its end. Sentences join
and leave the slots between steps; the next one of a request is generated while the one before becomes sound. A
request is spoken as `Synthesizer.stream` speaks it, whatever else is going on: where its pieces end and whether a
sentence is tried again never depends on time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from myxtts.audio import Wave
from myxtts.devices import allocatable_bytes, is_out_of_memory, release_memory, work_on
from myxtts.errors import ConfigError, MyXTTSError, PipelineError
from myxtts.host import available_bytes
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.synthesis.generation import Generated, Sampling, num_threads
from myxtts.synthesis.slots import Running, Slots, slots_of
from myxtts.synthesis.synthesizer import (
    CHUNK_CODES,
    Attempt,
    Report,
    SentenceReport,
    SynthesisArguments,
    SynthesisOptions,
    Synthesizer,
    Utterance,
    attempted,
    checked,
)
from myxtts.synthesis.text import PROBLEMS, REPETITION, Sentence, ends_in_loop
from myxtts.synthesis.vocoding import GriffinLimStream, HifiGanStream, Push, faded, pause
from myxtts.synthesis.voices import Voice

QUEUE_LIMIT = 256
SLOTS_PER_CORE, GPU_SLOTS, LEAST_SLOTS = 4, 128, 2  # by default; and so many that a request with guidance fits
MEMORY_SHARE = 0.5  # of the free memory, for the slots
LEAD_S = 5.0  # a listener who has so much more than was played lets others go first
SENTENCES_AHEAD = 2  # of a request, generated before the sound of those before them is made
GPU_PIECES = 16  # that become sound together
GPU_STEPS = 4  # steps between checks for what has ended: a check waits for the device
CPU_VOCODERS = 4  # pieces of different requests that become sound at the same time, on as many cores
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


class Cancelled(MyXTTSError):
    """The request was cancelled, by its ticket or because the engine was closed without draining."""

    def __init__(self) -> None:
        super().__init__("The request was cancelled before its end.")


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
class Piece:
    """Sound of a sentence, in order; the pause before a sentence belongs to its first piece."""

    wave: Wave  # float32 [samples] of 24 kHz
    sentence: int
    is_last_of_sentence: bool


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

    def __init__(self, options: SynthesisOptions, cancel: Callable[[], None]) -> None:
        self.seed = options.seed  # which says the same again
        self.is_cancelled = False
        self._notify = cancel

    def cancel(self) -> None:
        """Stop at the next step; `deliver` is given an `End` with `Cancelled` unless it had its end already."""
        self.is_cancelled = True
        self._notify()


@dataclass(eq=False)
class _Spoken:
    """A sentence between its ids and its sound."""

    sentence: Sentence
    attempt: int = 0
    codes: list[int] = field(default_factory=list)  # those that were taken from the slots
    parts: deque[tuple[Generated, Attempt | None]] = field(default_factory=deque)
    """To make sound of, the last one with the result of the quality check."""
    best: tuple[Generated, Attempt] | None = None  # of several attempts at a whole sentence
    stream: HifiGanStream | GriffinLimStream | None = None
    pieces: list[Wave] = field(default_factory=list)

    def restart(self, attempt: int) -> None:
        """Forget what nobody heard."""
        self.attempt, self.codes, self.stream = attempt, [], None
        self.parts.clear()


@dataclass(eq=False)
class _Job:
    """A request on its way."""

    ticket: Ticket
    request: Request
    utterance: Utterance
    options: SynthesisOptions
    deliver: Deliver
    sentences: deque[_Spoken] = field(init=False)  # whose sound is not finished
    to_generate: deque[_Spoken] = field(init=False)
    running: tuple[_Spoken, Running] | None = None
    reports: list[SentenceReport] = field(default_factory=list)
    accepted_at: float = field(default_factory=time.monotonic)
    began_at: float = 0.0
    heard_at: float | None = None  # the time of the first piece
    heard_s: float = 0.0
    is_vocoding: bool = False
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.sentences = deque(_Spoken(sentence) for sentence in self.utterance.sentences)
        self.to_generate = deque(self.sentences)

    @property
    def num_slots(self) -> int:
        return slots_of(self.options.sampling)

    def lead_s(self, now: float) -> float:
        """Sound that the listener has and has not played; a listener who has heard nothing comes first."""
        return self.accepted_at - 1e9 if self.heard_at is None else self.heard_s - (now - self.heard_at)

    @property
    def can_go_on(self) -> bool:
        """True if a sentence should be generated now."""
        if self.running is not None or not self.to_generate:
            return False
        return self.to_generate[0].sentence.number - self.sentences[0].sentence.number <= SENTENCES_AHEAD


class _Part(NamedTuple):
    """A part of a sentence at the vocoder."""

    job: _Job
    push: Push
    attempt: Attempt | None  # if it is the last part


class FairQueue:
    """Waiting requests, taken from one client after the other. The caller holds a lock."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[_Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def put(self, job: _Job) -> None:
        self._clients.setdefault(job.request.client, deque()).append(job)

    def first(self) -> _Job | None:
        """The oldest request of the client that has waited for its turn the longest."""
        return next((jobs[0] for jobs in self._clients.values()), None)

    def remove(self, job: _Job) -> None:
        """Take out a request; if it was the client's turn, the other clients come first now."""
        client = job.request.client
        jobs = self._clients.pop(client) if self.first() is job else self._clients[client]
        jobs.remove(job)
        if jobs:
            self._clients[client] = jobs
        else:
            self._clients.pop(client, None)

    def all(self) -> list[_Job]:
        return [job for jobs in self._clients.values() for job in jobs]


class Engine:
    """Speaks requests of many clients at once. The synthesizer may make voices meanwhile, and nothing else."""

    def __init__(
        self,
        synthesizer: Synthesizer,
        *,
        slots: int | None = None,
        memory_bytes: int | None = None,
        queue_limit: int = QUEUE_LIMIT,
    ) -> None:
        """As many `slots` as fit into `memory_bytes`, a share of the free memory by default."""
        self._synthesizer, self._queue_limit = synthesizer, queue_limit
        self._kept: Slots | None = _allocated(synthesizer, _slots_that_fit(synthesizer, slots, memory_bytes))
        self._on_cpu = synthesizer.device.type == "cpu"
        self._queue, self._changed, self._frontend = FairQueue(), threading.Condition(), threading.Lock()
        self._has_news = self._is_closed = self._is_draining = False
        self._jobs: list[_Job] = []
        self._made: deque[tuple[list[_Part], Future[list[Tensor]]]] = deque()
        self._done = self._failed = self._cancelled = self._num_steps = 0
        self._audio_s = self._step_s = self._request_s = 0.0
        self._num_threads = torch.get_num_threads()
        self._num_vocoding, self._most_vocoding = 0, GPU_PIECES
        self._vocoders = self._start_vocoders() if self._on_cpu else None
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Deliver) -> Ticket:
        """Accept a request; from now on `deliver` is called in the engine's thread, and must not block.

        Raises `QueueFull`, `EngineClosed`, and the errors of `Synthesizer` for a text or voice it cannot speak.
        """
        if request.chunk_codes is not None and request.chunk_codes < 1:
            expected = "1 or more, or None for whole sentences"
            raise ConfigError(f"chunk_codes is {request.chunk_codes}, expected {expected}")
        how: SynthesisArguments = {"sampling": request.sampling, "speed": request.speed, "seed": request.seed}
        with self._frontend:
            said, options = self._synthesizer.prepared(request.text, request.voice, request.language, how)
        job = _Job(Ticket(options, self._notify), request, said, options, deliver)
        with self._changed:
            if self._is_closed:
                raise EngineClosed
            if len(self._queue) >= self._queue_limit:
                raise QueueFull(len(self._queue), self._retry_after_s())
            self._queue.put(job)
            self._notify()
        return job.ticket

    def stats(self) -> Stats:
        with self._changed:
            slots = (self._kept.num_slots, self._kept.num_used) if self._kept else (0, 0)
            num_bytes = self._kept.num_bytes if self._kept else 0
            ended = (self._done, self._failed, self._cancelled)
            steps = (self._num_steps, 1000 * self._step_s)
            return Stats(*slots, len(self._jobs), len(self._queue), *ended, self._audio_s, *steps, num_bytes)

    def close(self, drain: bool = True, timeout_s: float | None = None) -> None:
        """Accept no more requests, and return when all have ended: spoken if `drain`, else cancelled.

        What is not spoken after `timeout_s` is cancelled.
        """
        with self._changed:
            self._is_closed, self._is_draining = True, drain
            self._notify()
        self._thread.join(timeout_s)
        with self._changed:
            self._is_draining = False
            self._notify()
        self._thread.join()

    def _notify(self) -> None:
        with self._changed:
            self._has_news = True
            self._changed.notify_all()

    def _retry_after_s(self) -> float:
        """When the queue should have room again."""
        return max(1.0, math.ceil(self._request_s / max(1, len(self._jobs))))

    # The engine's thread

    @property
    def _slots(self) -> Slots:
        assert self._kept is not None, "the engine has failed for lack of memory"
        return self._kept

    def _serve(self) -> None:
        work_on(self._synthesizer.device)
        threads = max(1, self._num_threads // 2) if self._on_cpu else self._num_threads
        try:
            with num_threads(threads):
                while self._turn():
                    pass
        except Exception as error:
            _log.exception("The engine failed")
            self._end_all(PipelineError(f"The engine failed: {error}. Start it again."))
        finally:
            with self._changed:
                self._is_closed = True
            self._end_all(Cancelled())
            if self._vocoders is not None:
                self._vocoders.shutdown()

    def _turn(self) -> bool:
        """One step with what belongs between two steps; False if there is nothing left to do, ever."""
        with self._changed:
            self._has_news = False
            is_over = self._is_closed and not (self._is_draining and (self._jobs or len(self._queue)))
        if is_over:
            return False
        self._take_sound()
        self._drop_cancelled()
        self._admit()
        self._make_sound()
        joining = next((job for job in self._jobs if job.running and not job.running[1].is_ready), None)
        has_joined = joining is not None and self._guarded(partial(self._prefill, joining))
        if not self._guarded(self._step) and not has_joined:
            with self._changed:
                self._changed.wait_for(lambda: self._has_news)
        return True

    def _prefill(self, job: _Job) -> bool:
        assert job.running is not None
        self._slots.prefill(job.running[1])
        return True

    def _step(self) -> bool:
        began_at, num_steps = time.monotonic(), 1 if self._on_cpu else GPU_STEPS
        stepped = set(self._slots.step(num_steps))
        if not stepped:
            return False
        for job in [job for job in self._jobs if job.running and job.running[1] in stepped]:
            self._isolated(job, self._collect)
        self._num_steps += num_steps
        took_s = (time.monotonic() - began_at) / num_steps
        self._step_s += (took_s - self._step_s) / min(self._num_steps, 100)
        return True

    def _guarded(self, work: Callable[[], bool]) -> bool:
        """The result of work on the slots; a failure makes them anew, fewer if memory was short."""
        try:
            return work()
        except RuntimeError as error:
            is_short = is_out_of_memory(error)
            if not is_short or self._slots.num_slots <= LEAST_SLOTS:
                _log.exception("A step failed, and with it all that was being generated")
                self._end_all(_explained(error), only_running=True)
            num_slots = max(LEAST_SLOTS, self._slots.num_slots // (2 if is_short else 1))
        self._replace_slots(num_slots)
        return True

    def _replace_slots(self, num_slots: int) -> None:
        """Generate what was in the slots again, in new ones: the same codes, of which some were taken already."""
        for job in self._jobs:
            if job.running is not None:
                job.to_generate.appendleft(job.running[0])
                job.running = None
        _log.warning("Continuing with %d slots instead of %d", num_slots, self._slots.num_slots)
        with self._changed:
            self._kept = None
            release_memory()
            self._kept = _allocated(self._synthesizer, num_slots)

    def _admit(self) -> None:
        """Begin sentences while slots are free: of listeners who need them soon, then of new requests."""
        while (job := self._next()) is not None and job.num_slots <= self._slots.num_slots - self._slots.num_used:
            if job not in self._jobs:
                with self._changed:
                    self._queue.remove(job)
                    self._jobs.append(job)
                job.began_at = time.monotonic()
            self._isolated(job, self._generate)

    def _next(self) -> _Job | None:
        now = time.monotonic()
        waiting = sorted((job for job in self._jobs if job.can_go_on), key=lambda job: job.lead_s(now))
        with self._changed:
            new = self._queue.first()
            has_room = len(self._jobs) < self._slots.num_slots
        if waiting and (new is None or not has_room or waiting[0].lead_s(now) < LEAD_S):
            return waiting[0]
        return new if has_room else None

    def _generate(self, job: _Job) -> None:
        spoken = job.to_generate.popleft()
        prompt = job.options.prompt(spoken.sentence, job.utterance.voice, spoken.attempt)
        job.running = spoken, self._slots.join(prompt, job.options.sampling_for(spoken.attempt))

    def _collect(self, job: _Job) -> None:
        """Take parts of a sentence that are complete from the slots."""
        assert job.running is not None
        (spoken, running), size = job.running, job.request.chunk_codes or job.running[0].sentence.bounds.most + 1
        ends_by_limit = running.num_codes == spoken.sentence.bounds.most
        while job.running is not None:
            num_left = running.num_codes - len(spoken.codes)
            is_last = running.has_ended and (num_left < size or (ends_by_limit and num_left == size))
            if num_left < size and not is_last:
                return
            part = self._slots.generated(
                running, len(spoken.codes), len(spoken.codes) + max(0, min(size, num_left))
            )
            spoken.codes += part.codes.tolist()
            whole, attempt = part._replace(codes=torch.tensor(spoken.codes)), None
            if is_last:
                attempt = checked(whole, spoken.sentence, spoken.attempt)
            elif ends_in_loop(spoken.codes, len(part.codes)):
                attempt = Attempt(whole, REPETITION, spoken.attempt + 1)
            spoken.parts.append((part, attempt))
            if attempt is not None:
                self._slots.leave(running)
                job.running = None

    def _make_sound(self) -> None:
        """Hand parts to the vocoder, those first whose listener needs them first."""
        now, chosen = time.monotonic(), list[_Part]()
        ready = [job for job in self._jobs if job.sentences[0].parts and not job.is_vocoding]
        for job in sorted(ready, key=lambda job: job.lead_s(now)):
            spoken = job.sentences[0]
            if self._num_vocoding + len(chosen) >= self._most_vocoding:
                break
            if self._retries(job):
                continue
            part, attempt = spoken.parts.popleft()
            if attempt is not None and spoken.best is not None:
                part, attempt = spoken.best
            if spoken.stream is None:
                speaker = job.utterance.voice.speaker
                spoken.stream = self._synthesizer.vocoder.begin(speaker, job.options.speed)
            job.is_vocoding = True
            chosen.append(_Part(job, Push(spoken.stream, part, attempt is not None), attempt))
        self._num_vocoding += len(chosen)
        for batch in [[each] for each in chosen] if self._vocoders else [chosen] * bool(chosen):
            make = partial(self._synthesizer.waves, [each.push for each in batch])
            if self._vocoders is None:
                self._made.append((batch, _called(make)))
                self._has_news = True
            else:
                self._vocoders.submit(make).add_done_callback(partial(self._put_sound, batch))

    def _put_sound(self, batch: list[_Part], made: Future[list[Tensor]]) -> None:
        self._made.append((batch, made))
        self._notify()

    def _take_sound(self) -> None:
        """Deliver what the vocoder has made."""
        while self._made:
            batch, made = self._made.popleft()
            self._num_vocoding -= len(batch)
            for index, part in enumerate(batch):
                part.job.is_vocoding = False
                if not part.job.has_ended:
                    self._isolated(part.job, partial(self._deliver, attempt=part.attempt, made=made, index=index))

    def _deliver(self, job: _Job, attempt: Attempt | None, made: Future[list[Tensor]], index: int) -> None:
        spoken, wave = job.sentences[0], made.result()[index].numpy()
        if len(wave):
            is_first = not spoken.pieces
            spoken.pieces.append(faded(wave, starts=is_first, ends=attempt is not None))
            has_sound = any(report.seconds for report in job.reports)
            whole = np.concatenate([pause(), spoken.pieces[-1]]) if is_first and has_sound else spoken.pieces[-1]
            job.heard_at = job.heard_at or time.monotonic()
            job.heard_s += len(whole) / OUTPUT_SAMPLE_RATE
            self._audio_s += len(whole) / OUTPUT_SAMPLE_RATE
            job.deliver(Piece(whole, spoken.sentence.number, attempt is not None))
        if attempt is not None:
            heard = np.concatenate(spoken.pieces or [np.zeros(0, np.float32)])
            job.reports.append(SentenceReport.of(spoken.sentence, attempt, heard))
            job.sentences.popleft()
            if not job.sentences:
                report = self._synthesizer.report(job.utterance, job.reports, job.options)
                self._end(job, End(report.require_sound()))

    def _retries(self, job: _Job) -> bool:
        """True if a sentence has failed the check before any of it was heard, and is generated again."""
        spoken = job.sentences[0]
        part, attempt = spoken.parts[0]
        if attempt is None or spoken.pieces:
            return False
        if job.request.chunk_codes is None:
            is_better = spoken.best is None or _rank(attempt) < _rank(spoken.best[1])
            best = (part, attempt) if is_better or spoken.best is None else spoken.best
            spoken.best = best[0], best[1]._replace(num_attempts=attempt.num_attempts)
        if attempt.problem is None or spoken.attempt == job.options.attempts[-1]:
            return False
        if job.running is not None:  # what was begun ahead of time waits
            job.running[0].restart(job.running[0].attempt)
            job.to_generate.appendleft(job.running[0])
            self._slots.leave(job.running[1])
            job.running = None
        spoken.restart(spoken.attempt + 1)
        job.to_generate.appendleft(spoken)
        self._has_news = True
        return True

    # Ends

    def _isolated(self, job: _Job, work: Callable[[_Job], None]) -> None:
        """Work for one request, whose failure ends only that request."""
        try:
            work(job)
        except Exception as error:
            if not isinstance(error, MyXTTSError):
                _log.exception("A request failed")
            self._end(job, End(error=_explained(error)))

    def _drop_cancelled(self) -> None:
        with self._changed:
            dropped = [job for job in (*self._jobs, *self._queue.all()) if job.ticket.is_cancelled]
        for job in dropped:
            self._end(job, End(error=Cancelled()))

    def _end_all(self, error: MyXTTSError, *, only_running: bool = False) -> None:
        with self._changed:
            jobs = [job for job in self._jobs if job.running or not only_running]
            jobs += [] if only_running else self._queue.all()
        for job in jobs:
            self._end(job, End(error=error))

    def _end(self, job: _Job, end: End) -> None:
        """Free everything that a request has, and tell its listener."""
        if job.has_ended:
            return
        job.has_ended = True
        if job.running is not None:
            self._slots.leave(job.running[1])
            job.running = None
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
                took_s = time.monotonic() - job.began_at
                self._request_s += (took_s - self._request_s) * (0.1 if self._request_s else 1.0)
            else:
                self._queue.remove(job)
            self._done += end.error is None
            self._cancelled += isinstance(end.error, Cancelled)
            self._failed += end.error is not None and not isinstance(end.error, Cancelled)
            self._has_news = True
        try:
            job.deliver(end)
        except Exception:
            _log.exception("A listener failed at the end of its request")

    def _start_vocoders(self) -> ThreadPoolExecutor:
        """Threads that make sound, each with its share of the cores."""
        num_workers = min(self._num_threads, CPU_VOCODERS)
        begun = threading.Barrier(num_workers + 1)

        def begin() -> None:
            torch.get_num_threads()  # the first call in a thread undoes what was set before
            torch.set_num_threads(max(1, self._num_threads // num_workers))
            begun.wait()

        pool = ThreadPoolExecutor(num_workers, "vocoder")
        for _ in range(num_workers):
            pool.submit(begin)
        begun.wait()
        torch.set_num_threads(self._num_threads)  # a thread's call also sets it for threads that begin later
        self._most_vocoding = num_workers
        return pool


def _rank(attempt: Attempt) -> int:
    return PROBLEMS.index(attempt.problem)


def _explained(error: Exception) -> MyXTTSError:
    if isinstance(error, MyXTTSError):
        return error
    if isinstance(error, RuntimeError) and is_out_of_memory(error):
        cure = "Close other programs that use it, or serve fewer requests at a time."
        return PipelineError(f"Out of memory while speaking. {cure}")
    return PipelineError(f"The request failed: {type(error).__name__}: {error}")


def _called(work: Callable[[], list[Tensor]]) -> Future[list[Tensor]]:
    """The result of a call, or its error."""
    future: Future[list[Tensor]] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


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


def _allocated(synthesizer: Synthesizer, num_slots: int) -> Slots:
    """So many slots, or as many as there is memory for."""
    while num_slots >= LEAST_SLOTS:
        slots = attempted(synthesizer.new_slots, num_slots)
        if slots is not None:
            return slots
        release_memory()
        _log.warning("Not enough memory for %d slots: trying %d", num_slots, num_slots // 2)
        num_slots //= 2
    raise PipelineError(
        f"Out of memory: not even {LEAST_SLOTS} slots fit. Close other programs that use {synthesizer.device}."
    )
