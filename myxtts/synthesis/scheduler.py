"""The one way from sentences to sound: jobs in, their pieces out, in turns that one thread drives.

    queue, client by client ─► slots: codes, a step for all ─► check ─► vocoder, by deadline ─► listener

Sentences join and leave the slots between steps; the next ones of a job are generated while those before become
sound. A sentence whose codes fail the quality check is tried again with other random numbers while nothing of it
was heard. A job is spoken in the same way whatever else is going on: where its pieces end and whether a sentence
is tried again never depends on time. Whoever speaks one text drives the turns in the calling thread; a server does
so in a thread of its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from myxtts.audio import Wave
from myxtts.devices import CAPTURING, Event, Stream, is_out_of_memory, release_memory, work_on
from myxtts.errors import MyXTTSError, PipelineError
from myxtts.model.gpt import Said
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.synthesis.alignment import TAIL_CODES, USUAL_TAIL_CODES, ends_of_texts
from myxtts.synthesis.generation import Generated, Prompt, Sampling, draws, num_threads
from myxtts.synthesis.slots import Running, Slots, slots_of
from myxtts.synthesis.text import PROBLEMS, REPETITION, Sentence, ends_in_loop, find_problem
from myxtts.synthesis.vocoding import GriffinLim, GriffinLimStream, HifiGan, HifiGanStream, faded, pause
from myxtts.synthesis.windows import Push, WindowStream

if TYPE_CHECKING:
    from myxtts.synthesis.voices import Voice

CHUNK_CODES = 20  # codes per piece: just under a second, as in XTTS-v2
GPU_FIRST_CODES = 6
"""Of the first piece on a GPU, after those of which nothing can be heard yet: the next piece is made long before
this one was played."""
GPU_GROWTH = 2  # pieces after the second are so much longer on a GPU: their context costs less, and none is urgent
SAFE_S = 1.0  # of those with a longer lead, jobs whose codes are complete go first: their clients may ask for more
LEAD_S = 5.0  # a listener who has so much more than was played lets others go first
SENTENCES_AHEAD = 2  # of a job, generated before the sound of those before them is made
GPU_PIECES, GPU_BATCHES = 16, 2  # pieces that become sound together, and batches that are under way
GPU_LOOKS = 16  # short sentences in which the end of the text is looked for together
GPU_JOINS = 8  # prefixes that run between two launches of steps
GPU_STEPS = 2  # launched at a time: what they chose is read while the next ones run
CPU_VOCODERS = 4  # pieces of different sentences that become sound at the same time, on as many cores
ALONE = 2  # a CPU generates so many sentences in one thread: a second one would only wait for memory too
Given = TypeVar("Given")
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class Attempt(NamedTuple):
    """The codes of a sentence, and what the quality check found."""

    codes: tuple[int, ...]
    problem: str | None
    number: int  # how many attempts there were


@dataclass(frozen=True)
class Piece:
    """Sound of a sentence, in order; the pause before a sentence belongs to its first piece."""

    wave: Wave  # float32 [samples] of 24 kHz
    sentence: int
    is_last_of_sentence: bool


class Listener(Protocol):
    """Who hears a job. The calls come from the thread that drives the turns, and must not block."""

    def piece(self, piece: Piece) -> None: ...

    def sentence(self, sentence: Sentence, attempt: Attempt, wave: Wave) -> None:
        """All of a sentence was heard; the wave is without the pause."""

    def end(self, error: Exception | None) -> None:
        """Called once, and nothing after it."""


@dataclass(eq=False)
class _Try:
    """One attempt at a sentence, and its sound so far."""

    number: int = 0
    num_taken: int = 0  # codes that were taken from the slots
    num_wanted: int = 1  # codes of the next part
    parts: deque[Generated] = field(default_factory=deque)  # to make sound of
    ends: dict[int, int | None] = field(default_factory=dict)  # of the text, by how many codes were looked at
    attempt: Attempt | None = None  # when all codes were taken
    stream: HifiGanStream | WindowStream | GriffinLimStream | None = None
    pieces: list[Wave] = field(default_factory=list)
    is_vocoding: bool = False
    is_complete: bool = False  # all its sound was made


@dataclass(eq=False)
class _Spoken:
    """A sentence between its ids and its sound."""

    sentence: Sentence
    current: _Try = field(default_factory=_Try)
    best: _Try | None = None  # where the best of several attempts is heard
    running: Running | None = None


@dataclass(eq=False)
class Job:
    """Sentences to speak in one voice, for one listener."""

    sentences: Sequence[Sentence]
    voice: Voice
    attempts: Sequence[Sampling]  # how the codes of each attempt are chosen
    seed: int
    listener: Listener
    speed: float = 1.0
    chunk_codes: int = CHUNK_CODES
    first_codes: int | None = None  # of the first piece, if it differs
    later_codes: int | None = None  # of pieces after the first two, if they differ
    streams: bool = True
    """Sound is heard in pieces, as soon as it is made, and a sentence is tried again only while none of it was
    heard. Otherwise it is heard sentence by sentence, and of several attempts the best."""
    side_by_side: int = 1  # sentences that are generated at the same time
    client: str = ""  # who asks: clients are served in turn
    is_cancelled: bool = False
    has_ended: bool = False
    accepted_at: float = field(default_factory=time.monotonic)
    began_at: float = 0.0
    heard_at: float | None = None  # the time of the first piece
    heard_s: float = 0.0

    def __post_init__(self) -> None:
        self.waiting = deque(_Spoken(sentence) for sentence in self.sentences)  # to be generated
        self.unfinished = deque(self.waiting)  # in order
        self.begun: list[_Spoken] = []  # and not finished

    @property
    def num_slots(self) -> int:
        return slots_of(self.attempts[0])

    @property
    def running(self) -> list[_Spoken]:
        return [spoken for spoken in self.begun if spoken.running is not None]

    @property
    def can_go_on(self) -> bool:
        """True if a sentence should be generated now; one that is heard next never waits for those after it."""
        if not self.waiting:
            return False
        is_next = self.waiting[0] is self.unfinished[0]
        num_ahead = self.waiting[0].sentence.number - self.unfinished[0].sentence.number
        has_room = len(self.running) < self.side_by_side and num_ahead <= SENTENCES_AHEAD * self.side_by_side
        return is_next or has_room

    def lead_s(self, now: float) -> float:
        """Sound that the listener has and has not played; a listener who has heard nothing comes first."""
        return self.accepted_at - 1e9 if self.heard_at is None else self.heard_s - (now - self.heard_at)

    def piece_codes(self, spoken: _Spoken) -> int:
        """Codes of the next piece of a sentence. What time it is must not matter."""
        first = self.first_codes or self.chunk_codes
        if spoken.sentence.number == 0 and spoken.current.num_taken <= first:
            return self.chunk_codes if spoken.current.num_taken else first
        return self.later_codes or self.chunk_codes

    def prompt(self, spoken: _Spoken) -> Prompt:
        sentence = spoken.sentence
        drawn = draws(self.seed, sentence.number, spoken.current.number, sentence.bounds.most)
        return Prompt(sentence.ids, self.voice.latents, drawn)


class _Part(NamedTuple):
    """A part of a sentence at the vocoder."""

    job: Job
    spoken: _Spoken
    current: _Try
    push: Push


class FairQueue:
    """Waiting jobs, taken from one client after the other. The caller holds a lock."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def put(self, job: Job) -> None:
        self._clients.setdefault(job.client, deque()).append(job)

    def first(self) -> Job | None:
        """The oldest job of the client that has waited for its turn the longest."""
        return next((jobs[0] for jobs in self._clients.values()), None)

    def remove(self, job: Job) -> None:
        """Take out a job; if it was the client's turn, the other clients come first now."""
        jobs = self._clients.pop(job.client) if self.first() is job else self._clients[job.client]
        jobs.remove(job)
        if jobs:
            self._clients[job.client] = jobs
        else:
            self._clients.pop(job.client, None)

    def all(self) -> list[Job]:
        return [job for jobs in self._clients.values() for job in jobs]


class Scheduler:
    """Speaks jobs side by side. One thread calls `turn`; `submit`, `cancel` and `notify` may be called by any."""

    def __init__(
        self,
        make_slots: Callable[[int], Slots],
        num_slots: int,
        vocoder: HifiGan | GriffinLim,
        device: torch.device,
        *,
        least_slots: int,
        kept: Slots | None = None,
        has_own_stream: bool = False,
    ) -> None:
        """As many slots as there is memory for, up to `num_slots`.

        With a stream of its own, a GPU makes sound while the next codes are generated; without, everything is
        launched on the stream of the thread that drives.
        """
        self._make_slots, self._vocoder, self.device, self._least_slots = make_slots, vocoder, device, least_slots
        self.kept: Slots | None = kept or self._allocated(num_slots)
        self._on_cpu, self._num_threads = device.type == "cpu", torch.get_num_threads()
        self.queue, self.changed, self.jobs = FairQueue(), threading.Condition(), list[Job]()
        self._has_news = False
        self.num_steps, self.step_s, self.audio_s = 0, 0.0, 0.0
        self._made: deque[tuple[list[_Part], Future[list[Tensor]]]] = deque()
        self._num_vocoding = self._num_batches = 0
        self._of: dict[Running, tuple[Job, _Spoken]] = {}
        self._most_vocoding = min(self._num_threads, CPU_VOCODERS) if self._on_cpu else GPU_PIECES * GPU_BATCHES
        self._stream = Stream(device) if has_own_stream else None
        self._copies, self._copied = Stream(device, high_priority=True), Event(device)  # of latents that were read
        self._vocoders: ThreadPoolExecutor | None = None

    def submit(self, job: Job) -> None:
        with self.changed:
            self.queue.put(job)
            self.notify()

    def cancel(self, job: Job) -> None:
        """End a job at the next turn, with `Cancelled`."""
        job.is_cancelled = True
        self.notify()

    def notify(self) -> None:
        with self.changed:
            self._has_news = True
            self.changed.notify_all()

    def wait(self) -> None:
        """Block until there was news since the last call."""
        with self.changed:
            self.changed.wait_for(lambda: self._has_news)
            self._has_news = False

    def advance(self) -> None:
        """A turn, or a wait if there is nothing to do."""
        if not self.turn():
            self.wait()

    def close(self) -> None:
        """Cancel what is left, and end the threads."""
        self.end_all(Cancelled())
        if self._vocoders is not None:
            self._vocoders.shutdown()
            self._vocoders = None

    def turn(self) -> bool:
        """One step with what belongs between two steps; False if nothing can be done until there is news."""
        self._take_sound()
        self._drop_cancelled()
        self._admit()
        self._make_sound()
        with num_threads(1 if self.slots.num_used <= ALONE else max(1, self._num_threads // 2)):
            has_joined = self._guarded(self._prefill)
            return self._guarded(self._step) or has_joined

    # Sentences in slots

    @property
    def slots(self) -> Slots:
        assert self.kept is not None, "there was no memory for any slots"
        return self.kept

    def _prefill(self) -> bool:
        """Run a part of a prefix; on a GPU of several, while steps run."""
        joining = self.slots.joining
        is_idle = not self._num_vocoding and len(joining) == len(self.jobs)  # nothing else needs the cores
        with num_threads(self._num_threads if is_idle else torch.get_num_threads()):
            if joining:
                self.slots.prefill(*joining[: 1 if self._on_cpu else GPU_JOINS])
        return bool(joining)

    def _step(self) -> bool:
        began_at, num_steps = time.monotonic(), 1 if self._on_cpu else GPU_STEPS
        stepped = self.slots.step(num_steps)
        if stepped is None:
            return False
        due = list[tuple[Job, _Spoken]]()
        for running in stepped:
            if running not in self._of:  # its job has just ended
                continue
            job, spoken = self._of[running]
            has_part = len(running.codes) - spoken.current.num_taken >= spoken.current.num_wanted
            if (has_part or running.has_ended or running.is_damaged) and not job.has_ended:
                due.append((job, spoken))
        if not self._on_cpu:
            self._look(due)
        for job, spoken in due:
            if not job.has_ended:  # as one does when another sentence of it fails
                self._isolated(job, partial(self._collect, spoken=spoken))
        # The next steps write where the copies read.
        self._copied = Event(self.device)
        self._copies.record(self._copied)
        Stream.current(self.device).wait(self._copied)
        self.num_steps += num_steps
        self.step_s += ((time.monotonic() - began_at) / num_steps - self.step_s) / min(self.num_steps, 100)
        return True

    def _guarded(self, work: Callable[[], bool]) -> bool:
        """The result of work on the slots; a failure replaces them, with fewer if memory was short."""
        try:
            return work()
        except RuntimeError as error:
            is_short = is_out_of_memory(error)
            if not is_short or self.slots.num_slots <= self._least_slots:
                _log.debug("A step failed, and with it all that was being generated", exc_info=True)
                self.end_all(self._explained(error), only_running=True)
            num_slots = max(self._least_slots, self.slots.num_slots // (2 if is_short else 1))
        self._replace_slots(num_slots)
        return True

    def _replace_slots(self, num_slots: int) -> None:
        """Generate what was in the slots again, in new ones: the same codes, of which some were taken already."""
        self._of.clear()
        for job in self.jobs:
            for spoken in job.running[::-1]:
                spoken.running = None
                job.waiting.appendleft(spoken)
        _log.warning("Continuing with %d slots instead of %d", num_slots, self.slots.num_slots)
        with self.changed:
            self.kept = None
            release_memory()
            self.kept = self._allocated(num_slots)

    def _allocated(self, num_slots: int) -> Slots:
        """So many slots, or as many as there is memory for."""
        while num_slots >= self._least_slots:
            slots = attempted(self._make_slots, num_slots)
            if slots is not None:
                return slots
            release_memory()
            _log.warning("Not enough memory for %d slots: trying %d", num_slots, num_slots // 2)
            num_slots //= 2
        raise self._explained(torch.OutOfMemoryError())

    def _admit(self) -> None:
        """Begin sentences while slots are free: of listeners who need them soon, then of new jobs."""
        while (job := self._next()) is not None and job.num_slots <= self.slots.num_slots - self.slots.num_used:
            if job not in self.jobs:
                with self.changed:
                    self.queue.remove(job)
                    self.jobs.append(job)
                job.began_at = time.monotonic()
            self._isolated(job, self._begin)

    def _next(self) -> Job | None:
        now = time.monotonic()
        waiting = min((job for job in self.jobs if job.can_go_on), key=lambda job: job.lead_s(now), default=None)
        with self.changed:
            new = self.queue.first()
            has_room = len(self.jobs) < self.slots.num_slots
        if waiting and (new is None or not has_room or waiting.lead_s(now) < LEAD_S):
            return waiting
        return new if has_room else None

    def _begin(self, job: Job) -> None:
        spoken = job.waiting.popleft()
        spoken.running = self.slots.join(job.prompt(spoken), job.attempts[spoken.current.number])
        self._of[spoken.running] = job, spoken
        spoken.current.num_wanted = CHUNK_CODES if spoken.sentence.is_short else job.piece_codes(spoken)
        if spoken not in job.begun:
            job.begun.append(spoken)

    def _collect(self, job: Job, spoken: _Spoken) -> None:
        """Take parts of a sentence that are complete from the slots."""
        if spoken.sentence.is_short:
            self._collect_short(job, spoken)
            return
        current, most = spoken.current, spoken.sentence.bounds.most
        while (running := spoken.running) is not None:
            size = current.num_wanted = job.piece_codes(spoken)
            num_left = len(running.codes) - current.num_taken
            ends_by_limit = len(running.codes) == most and num_left == size
            is_last = running.has_ended and (num_left < size or ends_by_limit)
            if num_left < size and not is_last:
                return
            end = current.num_taken + min(size, max(0, num_left))
            with self._copies.use():  # which does not wait for the steps that run now
                part, codes = self.slots.generated(running, current.num_taken, end), running.codes[:end]
            current.num_taken = end
            current.parts.append(part)
            if is_last:
                problem = find_problem(codes, spoken.sentence.bounds)
                current.attempt = Attempt(tuple(codes), problem, current.number + 1)
            elif job.streams and ends_in_loop(codes, len(part.codes)):
                current.attempt = Attempt(tuple(codes), REPETITION, current.number + 1)
            if current.attempt is not None:
                self._leave(spoken)

    def _look(self, due: Sequence[tuple[Job, _Spoken]]) -> None:
        """Look where the texts of short sentences end, for all at the same time."""
        some = [(spoken, said) for job, spoken in due if (said := _said(job, spoken)) is not None]
        for at in range(0, len(some), GPU_LOOKS):
            together = some[at : at + GPU_LOOKS]
            with self._copies.use():  # which does not wait for the steps that run now
                try:
                    ends = attempted(partial(ends_of_texts, self.slots.gpt), [said for _, said in together])
                except Exception:  # each is looked at alone then, and fails alone
                    _log.debug("Looking for the ends of %d texts failed", len(together), exc_info=True)
                    ends = None
            for (spoken, said), end in zip(together, ends or (), strict=False):
                spoken.current.ends[len(said.codes)] = end

    def _collect_short(self, job: Job, spoken: _Spoken) -> None:
        """Take a short sentence as a whole, without what was said after its text.

        The codes are looked at after fixed numbers of them, so that where a sentence ends does not depend on time.
        """
        running, current = spoken.running, spoken.current
        assert running is not None
        while running.has_ended or len(running.codes) >= current.num_wanted:
            size = min(current.num_wanted, len(running.codes))
            is_whole = running.has_ended and size == len(running.codes)
            if (said := _said(job, spoken)) is not None and size not in current.ends:
                with self._copies.use():
                    (current.ends[size],) = ends_of_texts(self.slots.gpt, [said])
            end = current.ends.get(size)
            goes_on = end is not None and size > end + USUAL_TAIL_CODES
            if not goes_on and not is_whole:
                current.num_wanted += CHUNK_CODES
                continue
            current.num_taken = end + TAIL_CODES if end is not None and goes_on else size
            codes = tuple(running.codes[: current.num_taken])
            with self._copies.use():
                current.parts.append(self.slots.generated(running, 0, current.num_taken))
            problem = find_problem(codes, spoken.sentence.bounds)
            current.attempt = Attempt(codes, problem, current.number + 1)
            self._leave(spoken)
            return

    def _leave(self, spoken: _Spoken) -> None:
        running, spoken.running = spoken.running, None
        if running is not None:
            del self._of[running]
            self.slots.leave(running)

    def _is_tried_again(self, job: Job, spoken: _Spoken) -> bool:
        """True if a sentence has failed the check before any of it was heard, and is generated again."""
        current = spoken.current
        if current.attempt is None or (job.streams and (current.pieces or len(current.parts) > 1)):
            return False
        if not job.streams:
            if spoken.best is None or _rank(current) < _rank(spoken.best):
                spoken.best = current
            assert spoken.best.attempt is not None
            spoken.best.attempt = spoken.best.attempt._replace(number=current.attempt.number)
        if current.attempt.problem is None or current.number == len(job.attempts) - 1:
            spoken.current = spoken.best or current
            return False
        spoken.current = _Try(current.number + 1)
        job.waiting.appendleft(spoken)
        self.notify()
        return True

    # Sound

    def _make_sound(self) -> None:
        """Hand parts to the vocoder, those first whose listener needs them first."""
        while self._num_vocoding < self._most_vocoding and (self._on_cpu or self._num_batches < GPU_BATCHES):
            chosen = self._chosen()
            if not chosen:
                return
            self._num_vocoding += len(chosen)
            for batch in [[part] for part in chosen] if self._on_cpu else [chosen]:
                self._num_batches += 1
                make = partial(self._waves, [part.push for part in batch], self._copied)
                if self._on_cpu or self._stream is not None:
                    self._pool().submit(make).add_done_callback(partial(self._put_sound, batch))
                else:
                    self._made.append((batch, _called(make)))
                    self.notify()

    def _chosen(self) -> list[_Part]:
        """Parts to make sound of; those of listeners who have heard nothing yet wait for no others."""
        now, chosen = time.monotonic(), list[_Part]()
        waiting = list[tuple[float, bool, float, int, Job, _Spoken]]()
        most = self._most_vocoding - self._num_vocoding if self._on_cpu else GPU_PIECES
        for job in self.jobs:
            for spoken in islice(job.unfinished, 1) if job.streams else job.begun:
                if spoken.current.parts and not spoken.current.is_vocoding:
                    lead_s, goes_on = job.lead_s(now), bool(job.waiting or spoken.running)
                    waiting.append((min(lead_s, SAFE_S), goes_on, lead_s, len(waiting), job, spoken))
        for *_, job, spoken in sorted(waiting):
            is_urgent = job.heard_at is None
            if len(chosen) == most or (chosen and chosen[0].job.heard_at is None and not is_urgent):
                break
            if not self._is_tried_again(job, spoken):
                chosen.append(self._part(job, spoken))
        return chosen

    def _part(self, job: Job, spoken: _Spoken) -> _Part:
        current = spoken.current
        part, is_last = current.parts.popleft(), current.attempt is not None and not current.parts
        if current.stream is None:
            current.stream = self._vocoder.begin(job.voice.for_vocoder, job.speed)
        current.is_vocoding = True
        return _Part(job, spoken, current, Push(current.stream, part, is_last))

    def _waves(self, pushes: Sequence[Push], copied: Event) -> list[Tensor]:
        """The next samples of streams of the vocoder; one by one if memory is short for all."""
        with self._stream.use() if self._stream is not None else contextlib.nullcontext():
            Stream.current(self.device).wait(copied)
            made = attempted(self._vocoder.push_many, pushes)
            if made is None:
                with CAPTURING:
                    release_memory()
                made = [self._vocoder.push_many([push])[0] for push in pushes]
            return made

    def _put_sound(self, batch: list[_Part], made: Future[list[Tensor]]) -> None:
        self._made.append((batch, made))
        self.notify()

    def _take_sound(self) -> None:
        """Let listeners hear what the vocoder has made."""
        while self._made:
            batch, made = self._made.popleft()
            self._num_vocoding -= len(batch)
            self._num_batches -= 1
            for index, part in enumerate(batch):
                part.current.is_vocoding = False
                if not part.job.has_ended:
                    self._isolated(part.job, partial(self._take_wave, part=part, made=made, index=index))

    def _take_wave(self, job: Job, part: _Part, made: Future[list[Tensor]], index: int) -> None:
        wave, current, is_last = made.result()[index].numpy(), part.current, part.push.last
        if len(wave):
            current.pieces.append(faded(wave, starts=not current.pieces, ends=is_last))
            if job.streams:
                is_first = len(current.pieces) == 1
                self._deliver(job, part.spoken, current.pieces[-1], is_first=is_first, is_last=is_last)
        current.is_complete = is_last
        while job.unfinished and job.unfinished[0].current.is_complete and not job.has_ended:
            self._finish(job, job.unfinished[0])
        if not job.unfinished:
            self.end(job, None)

    def _finish(self, job: Job, spoken: _Spoken) -> None:
        wave = np.concatenate(spoken.current.pieces or [np.zeros(0, np.float32)])
        if len(wave) and not job.streams:
            self._deliver(job, spoken, wave, is_first=True, is_last=True)
        assert spoken.current.attempt is not None
        job.listener.sentence(spoken.sentence, spoken.current.attempt, wave)
        job.unfinished.popleft()
        job.begun.remove(spoken)

    def _deliver(self, job: Job, spoken: _Spoken, wave: Wave, *, is_first: bool, is_last: bool) -> None:
        whole = np.concatenate([pause(), wave]) if is_first and job.heard_at is not None else wave
        job.heard_at = job.heard_at or time.monotonic()
        job.heard_s += len(whole) / OUTPUT_SAMPLE_RATE
        self.audio_s += len(whole) / OUTPUT_SAMPLE_RATE
        job.listener.piece(Piece(whole, spoken.sentence.number, is_last))

    def _pool(self) -> ThreadPoolExecutor:
        """Threads that make sound: on a CPU each with its share of the cores, for a GPU one per batch."""
        if self._vocoders is not None:
            return self._vocoders
        num_workers = self._most_vocoding if self._on_cpu else GPU_BATCHES
        begun = threading.Barrier(num_workers + 1)

        def begin() -> None:
            work_on(self.device)
            torch.get_num_threads()  # the first call in a thread undoes what was set before
            torch.set_num_threads(max(1, self._num_threads // num_workers))
            begun.wait()

        self._vocoders = ThreadPoolExecutor(num_workers, "vocoder")
        for _ in range(num_workers):
            self._vocoders.submit(begin)
        begun.wait()
        torch.set_num_threads(self._num_threads)  # a thread's call also sets it for threads that begin later
        return self._vocoders

    # Ends

    def _isolated(self, job: Job, work: Callable[[Job], None]) -> None:
        """Work for one job, whose failure ends only that job."""
        try:
            work(job)
        except Exception as error:
            if not isinstance(error, MyXTTSError):
                _log.debug("A job failed", exc_info=True)
            self.end(job, self._explained(error))

    def _drop_cancelled(self) -> None:
        with self.changed:
            dropped = [job for job in (*self.jobs, *self.queue.all()) if job.is_cancelled]
        for job in dropped:
            self.end(job, Cancelled())

    def end_all(self, error: MyXTTSError, *, only_running: bool = False) -> None:
        with self.changed:
            jobs = [job for job in self.jobs if job.running or not only_running]
            jobs += [] if only_running else self.queue.all()
        for job in jobs:
            self.end(job, error)

    def end(self, job: Job, error: Exception | None) -> None:
        """Free everything that a job has, and tell its listener."""
        if job.has_ended:
            return
        job.has_ended = True
        for spoken in job.running:
            try:
                self._leave(spoken)
            except RuntimeError:  # then the next step fails too, which replaces the slots or ends all jobs
                _log.debug("A sentence could not leave its slots", exc_info=True)
        with self.changed:
            if job in self.jobs:
                self.jobs.remove(job)
            else:
                self.queue.remove(job)
            self._has_news = True
        try:
            job.listener.end(error)
        except Exception:
            _log.exception("A listener failed at the end of its job")

    def _explained(self, error: Exception) -> MyXTTSError:
        if isinstance(error, MyXTTSError):
            return error
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            what = f"Out of memory on {self.device} while speaking one sentence at a time."
            cure = "Close other programs that use it, or speak on the CPU: CUDA_VISIBLE_DEVICES= myxtts speak …"
            explained = PipelineError(f"{what} {cure}")
        else:
            explained = PipelineError(f"Speaking failed: {type(error).__name__}: {error}")
        explained.__cause__ = error.with_traceback(None)  # which would hold tensors
        return explained


class Cancelled(MyXTTSError):
    """The request was cancelled, by its ticket or because the engine was closed without draining."""

    def __init__(self) -> None:
        super().__init__("The request was cancelled before its end.")


def attempted(work: Callable[[Given], Result], given: Given) -> Result | None:
    """The result of `work`, or None if memory was short; then nothing holds the tensors of the failed call."""
    try:
        return work(given)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None


def _said(job: Job, spoken: _Spoken) -> Said | None:
    """The codes of a short sentence in which the end of its text is looked for; of very few none is left out."""
    running = spoken.running
    codes = [] if running is None or not spoken.sentence.is_short else running.codes[: spoken.current.num_wanted]
    return Said(job.voice.latents, spoken.sentence.ids, codes) if len(codes) > USUAL_TAIL_CODES else None


def _rank(attempt: _Try) -> int:
    assert attempt.attempt is not None
    return PROBLEMS.index(attempt.attempt.problem)


def _called(work: Callable[[], list[Tensor]]) -> Future[list[Tensor]]:
    """The result of a call, or its error."""
    future: Future[list[Tensor]] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future
