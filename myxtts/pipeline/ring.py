"""Slots of preallocated memory that pass batches from one owner to the next, in order.

A slot is FREE, FILLING, READY or LEASED and has one owner at a time. A hand-over carries an event of the stream
that worked on the slot; the stream of the next owner waits for it. The host waits for a slot to change its state,
which paces the workers; owners that work on the host, `gather` and `keep`, also wait for the event there. An error
poisons a ring: it is raised to all who wait for it, and to all who come later. This module knows no batches.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from myxtts.devices import Event

Content = TypeVar("Content")
Ticket = TypeVar("Ticket")


class State(enum.Enum):
    """Who may use a slot."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    LEASED = "leased"


class RingClosed(Exception):
    """The ring was poisoned; `__cause__` is the error, or None if the pipeline was closed."""


class Slot(Generic[Content, Ticket]):
    """Memory for one batch, its ticket (what the host knows about it), and the events of its last two owners."""

    def __init__(self, content: Content, number: int, device: torch.device) -> None:
        self.content = content
        self.number = number
        """Position, among all batches, of the batch that is or will be next in this slot."""
        self.state = State.FREE
        self.ticket: Ticket | None = None
        self.filled = Event(device)
        """Passed when the content is complete."""
        self.emptied = Event(device)
        """Passed when the last reader is done with the content."""

    def read_ticket(self) -> Ticket:
        """The ticket of a committed batch."""
        assert self.ticket is not None
        return self.ticket


class Ring(Generic[Content, Ticket]):
    """One slot per content; batch n lives in slot n modulo the depth. Safe for many threads.

    `acquire` → fill, record `slot.filled` → `commit` → `take` → read, record `slot.emptied` → `release`.
    Producers may fill several slots at once and commit in any order; `take` hands them out in order.
    """

    def __init__(self, name: str, contents: Sequence[Content], device: torch.device) -> None:
        if not contents:
            raise ValueError(f"ring {name} needs at least one slot")
        self.name = name
        self.slots = [Slot[Content, Ticket](content, number, device) for number, content in enumerate(contents)]
        self._changed = threading.Condition()
        self._next_fill = 0
        self._next_take = 0
        self._end: int | None = None
        self._error: BaseException | None = None
        self._poisoned = False
        self.num_taken = 0
        self.num_waits = 0
        """How often `take` had to wait: the ring starved."""
        self.waited_s = 0.0
        """Total time that `take` waited."""

    @property
    def depth(self) -> int:
        return len(self.slots)

    @property
    def num_acquired(self) -> int:
        """Positions that producers have claimed."""
        with self._changed:
            return self._next_fill

    @property
    def num_ready(self) -> int:
        """Batches waiting to be taken."""
        with self._changed:
            return sum(slot.state is State.READY for slot in self.slots)

    @property
    def is_full(self) -> bool:
        """True if every slot is ready or in use, or the last batch is on its way."""
        with self._changed:
            done = self._end is not None and self._next_fill >= self._end
            return done or all(slot.state in (State.READY, State.LEASED) for slot in self.slots)

    def next_number(self) -> int:
        """Claim the next position, for producers that work in parallel; the caller must fill exactly that one."""
        with self._changed:
            self._next_fill += 1
            return self._next_fill - 1

    def acquire(self, number: int | None = None) -> Slot[Content, Ticket]:
        """The slot to fill next, or the slot of a claimed position, as soon as it is free."""
        number = self.next_number() if number is None else number
        slot = self.slots[number % self.depth]
        with self._changed:
            self._wait_for(lambda: slot.state is State.FREE and slot.number == number)
            slot.state = State.FILLING
        return slot

    def commit(self, slot: Slot[Content, Ticket], ticket: Ticket) -> None:
        """Hand over a slot that is filled, or will be when its `filled` event is passed."""
        with self._changed:
            self._require(slot, State.FILLING)
            slot.ticket = ticket
            slot.state = State.READY
            self._changed.notify_all()

    def finish(self, number: int) -> None:
        """End the order: there are no batches from this position on."""
        with self._changed:
            self._end = number if self._end is None else min(self._end, number)
            self._changed.notify_all()

    def take(self) -> Slot[Content, Ticket] | None:
        """Lease the next batch in order as soon as it is ready; None after the last one."""

        def due() -> bool:
            slot = self.slots[self._next_take % self.depth]
            return slot.state is State.READY and slot.number == self._next_take

        with self._changed:
            if not due():
                started_at = time.perf_counter()
                self._wait_for(lambda: due() or (self._end is not None and self._next_take >= self._end))
                self.waited_s += time.perf_counter() - started_at
                if not due():
                    return None
                self.num_waits += 1
            elif self._poisoned:
                self._raise()
            slot = self.slots[self._next_take % self.depth]
            slot.state = State.LEASED
            self._next_take += 1
            self.num_taken += 1
        return slot

    def release(self, slot: Slot[Content, Ticket]) -> None:
        """Free a slot whose content is used up, or will be when its `emptied` event is passed."""
        with self._changed:
            self._require(slot, State.LEASED)
            slot.state = State.FREE
            slot.ticket = None
            slot.number += self.depth
            self._changed.notify_all()

    def poison(self, error: BaseException | None) -> None:
        """Raise this error to all who wait, or close the ring with None. Only the first call counts."""
        with self._changed:
            if not self._poisoned:
                self._poisoned, self._error = True, error
            self._changed.notify_all()

    def _wait_for(self, condition: object) -> None:
        assert callable(condition)
        while not condition():
            if self._poisoned:
                self._raise()
            self._changed.wait()
        if self._poisoned:
            self._raise()

    def _raise(self) -> None:
        raise RingClosed(f"ring {self.name} is closed") from self._error

    def _require(self, slot: Slot[Content, Ticket], state: State) -> None:
        if slot.state is not state:
            raise RuntimeError(f"slot {slot.number} of ring {self.name} is {slot.state.value}, not {state.value}")
