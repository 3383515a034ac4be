"""The engine: one thread that speaks many requests at once. It knows nothing of networks and protocols.

Any thread may `submit` a request with a function that is given its pieces and, exactly once, its end. Waiting
requests are admitted in turn, client by client.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from myxtts.audio import Wave
from myxtts.errors import MyXTTSError, PipelineError
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.synthesis.generation import Sampling
from myxtts.synthesis.synthesizer import (
    CHUNK_CODES,
    Report,
    SynthesisArguments,
    SynthesisOptions,
    Synthesizer,
    Utterance,
)
from myxtts.synthesis.voices import Voice

QUEUE_LIMIT = 256
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

    def __init__(
        self, utterance: Utterance, options: SynthesisOptions, request: Request, deliver: Deliver
    ) -> None:
        self.utterance, self.options, self.request, self.deliver = utterance, options, request, deliver
        self.is_cancelled = False

    @property
    def seed(self) -> int:
        """The seed that says the same again."""
        return self.options.seed

    def cancel(self) -> None:
        """Stop at the next step; `deliver` is given an `End` with `Cancelled` unless it had its end already."""
        self.is_cancelled = True


class FairQueue:
    """Waiting tickets, taken from one client after the other. The caller holds a lock."""

    def __init__(self) -> None:
        self._clients: OrderedDict[str, deque[Ticket]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def put(self, ticket: Ticket) -> None:
        self._clients.setdefault(ticket.request.client, deque()).append(ticket)

    def take(self) -> Ticket:
        """The oldest ticket of the client that waits for its turn the longest."""
        client, tickets = next(iter(self._clients.items()))
        ticket = tickets.popleft()
        del self._clients[client]
        if tickets:
            self._clients[client] = tickets
        return ticket


class Engine:
    """Speaks requests of many clients at once; the synthesizer must not speak otherwise meanwhile."""

    def __init__(
        self,
        synthesizer: Synthesizer,
        *,
        slots: int | None = None,  # noqa: ARG002 - one request at a time so far
        memory_bytes: int | None = None,  # noqa: ARG002
        queue_limit: int = QUEUE_LIMIT,
    ) -> None:
        self._synthesizer, self._queue_limit = synthesizer, queue_limit
        self._queue, self._changed = FairQueue(), threading.Condition()
        self._frontend = threading.Lock()
        self._is_closed = self._is_draining = False
        self._active: Ticket | None = None
        self._done = self._failed = self._cancelled = 0
        self._audio_s = self._busy_s = 0.0
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Deliver) -> Ticket:
        """Accept a request; from now on `deliver` is called in the engine's thread, and must not block.

        Raises `QueueFull`, `EngineClosed`, and the errors of `Synthesizer` for a text or voice it cannot speak.
        """
        arguments: SynthesisArguments = {
            "sampling": request.sampling,
            "speed": request.speed,
            "seed": request.seed,
        }
        with self._frontend:
            said, options = self._synthesizer.prepared(request.text, request.voice, request.language, arguments)
        ticket = Ticket(said, options, request, deliver)
        with self._changed:
            if self._is_closed:
                raise EngineClosed
            if len(self._queue) >= self._queue_limit:
                raise QueueFull(len(self._queue), self._retry_after_s())
            self._queue.put(ticket)
            self._changed.notify_all()
        return ticket

    def stats(self) -> Stats:
        with self._changed:
            used = int(self._active is not None)
            ended = (self._done, self._failed, self._cancelled)
            return Stats(1, used, used, len(self._queue), *ended, self._audio_s, 0, 0.0, 0)

    def close(self, drain: bool = True, timeout_s: float | None = None) -> None:
        """Accept no more requests and end: after what was accepted is spoken, or at once; cancels what is left."""
        with self._changed:
            self._is_closed, self._is_draining = True, drain
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._changed:
                self._is_draining = False
                self._changed.notify_all()
            self._thread.join()

    def _retry_after_s(self) -> float:
        mean_s = self._busy_s / max(1, self._done)
        return max(1.0, math.ceil(len(self._queue) * mean_s))

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (len(self._queue) or self._is_closed):
                    self._changed.wait()
                if not len(self._queue):
                    return
                self._active = self._queue.take()
            began_at = time.monotonic()
            end = self._spoken(self._active)
            with self._changed:
                self._busy_s += time.monotonic() - began_at
                self._done += end.error is None
                self._cancelled += isinstance(end.error, Cancelled)
                self._failed += end.error is not None and not isinstance(end.error, Cancelled)
                ticket, self._active = self._active, None
            try:
                ticket.deliver(end)
            except Exception:
                _log.exception("A listener failed at the end of its request")

    def _spoken(self, ticket: Ticket) -> End:
        try:
            stream = self._synthesizer.stream_prepared(
                ticket.utterance, ticket.options, ticket.request.chunk_codes or 10**6
            )
            for wave in stream:
                if ticket.is_cancelled or (self._is_closed and not self._is_draining):
                    raise Cancelled
                self._audio_s += len(wave) / OUTPUT_SAMPLE_RATE
                ticket.deliver(Piece(wave, 0, False))
            return End(stream.report)
        except MyXTTSError as error:
            return End(error=error)
        except Exception as error:
            _log.exception("A request failed")
            return End(error=PipelineError(f"The request failed: {error}"))
