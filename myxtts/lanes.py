"""Lanes of work on a device, marks in them, and work captured to be started with one launch.

A lane is an ordered queue of work: a CUDA stream, or on the CPU the calling thread itself, so that one pipeline
serves both. A mark is a point in a lane that other lanes can wait for. Nothing here knows what the work is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")
WARM_UPS = 3
"""Runs before the capture: libraries set themselves up, compilers compile, gradients find their place."""


class Mark:
    """A point in a lane, recorded again and again; on the CPU everything before it has already happened."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(blocking=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def is_passed(self) -> bool:
        """Whether the lane has passed this point; asking does not wait."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait_on_host(self) -> None:
        """Return when the lane has passed this point: for owners that are no lane, such as a gathering thread."""
        if self.event is not None:
            self.event.synchronize()


class Lane:
    """An ordered queue of work on one device."""

    def __init__(self, device: torch.device, *, urgent: bool = False) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self._capture_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)  # type: ignore[no-untyped-call]

    def capture_stream(self) -> torch.cuda.Stream:
        """Where work for this lane is captured: what other threads put into the lane meanwhile stays out of it."""
        if self._capture_stream is None:
            self._capture_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._capture_stream

    def use(self) -> contextlib.AbstractContextManager[object]:
        """What the calling thread starts inside runs in this lane."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def record(self, mark: Mark) -> None:
        """Put the mark behind everything started in this lane so far."""
        if mark.event is not None and self.stream is not None:
            mark.event.record(self.stream)

    def wait(self, mark: Mark) -> None:
        """Let everything started in this lane from now on run after the mark; the host does not wait."""
        if mark.event is not None and self.stream is not None:
            self.stream.wait_event(mark.event)

    def finish(self) -> None:
        """Wait on the host until everything in this lane is done."""
        if self.stream is not None:
            self.stream.synchronize()


class Captured(Generic[Result]):
    """A piece of work as a graph. Random numbers go on after the capture as if there had been no warm-up.

    Whatever else the warm-ups change, the caller must put back. `result` holds the tensors that every replay fills
    anew. Graphs that never run at the same time may share the memory of a `pool`.
    """

    def __init__(self, work: Callable[[], Result], lane: Lane, pool: Any = None) -> None:
        random_state = torch.cuda.get_rng_state(lane.device)
        private = lane.capture_stream()
        with torch.cuda.device(lane.device):
            torch.cuda.synchronize()
            with torch.cuda.stream(private):
                for _ in range(WARM_UPS):
                    work()
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool, stream=private, capture_error_mode="thread_local"):
                self.result = work()
        torch.cuda.set_rng_state(random_state, lane.device)

    @property
    def pool(self) -> Any:
        """Memory that other graphs may share."""
        return self._graph.pool()

    def replay(self) -> Result:
        """Start the work in the current lane."""
        self._graph.replay()
        return self.result
