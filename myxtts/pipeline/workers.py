"""The workers of the pipeline: each takes a slot, does one thing in its own stream, and passes the batch on.

    Gather   clips ─► host ring           host threads
    Upload   host ring ─► device ring     upload stream
    Encode   device ring ─► model ring    encode stream; fresh codes or latents also go to the `keep` ring
    Handoff  handoff ring ─► model ring   dual mode only, where encode fills the handoff ring
    Keep     fresh codes or latents ─► the cache on disk

The first worker that fails poisons all rings with its error: the trainer raises that error and every other worker
ends. No worker knows how many others there are, nor whether it has a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from myxtts.data.batches import Block, Gathered, Gatherer, GatherJob, HostBatch
from myxtts.devices import Stream, work_on
from myxtts.observe.trace import Trace
from myxtts.pipeline.ring import Ring, RingClosed, Slot

Work = Callable[[], bool]  # passes one batch on; returns False when none is left

_log = logging.getLogger(__name__)


HostRing = Ring[HostBatch, Gathered]
BlockRing = Ring[Block, Gathered]
BlockSlot = Slot[Block, Gathered]
EncodeBlock = Callable[[Block, Block, Gathered], None]
"""Fills the second block with what a recipe reads of the first, in the current stream."""


class Gather:
    """Fills host slots; several threads may call one object and work on different batches."""

    def __init__(self, gatherer: Gatherer, jobs: Iterator[GatherJob], ring: HostRing, trace: Trace) -> None:
        self._gatherer, self._jobs, self._ring, self._trace = gatherer, jobs, ring, trace
        self._lock = threading.Lock()

    def __call__(self) -> bool:
        with self._lock:  # a job and its place in the order belong together
            try:
                job, number = next(self._jobs, None), self._ring.next_number()
            except BaseException as error:  # to the next thread a failure must not look like the end
                self._ring.poison(error)
                raise
        if job is None:
            self._ring.finish(number)
            return False
        slot = self._ring.acquire(number)
        slot.emptied.wait_on_host()  # the CPU writes here, and no stream can wait for it
        with self._trace.span("gather", batch=number):
            gathered = self._gatherer.fill(slot.content, job)
        self._ring.commit(slot, gathered)
        return True


class Upload:
    """One copy per batch from the host to the data role's device."""

    def __init__(self, source: HostRing, target: BlockRing, stream: Stream, trace: Trace) -> None:
        self._source, self._target, self._stream, self._trace = source, target, stream, trace
        self._memory = {id(slot.content): torch.from_numpy(slot.content.memory) for slot in source.slots}

    def __call__(self) -> bool:
        slot = self._source.take()
        if slot is None:
            self._target.finish(self._source.num_taken)
            return False
        to, stream = self._target.acquire(), self._stream
        stream.wait(to.emptied)
        with self._trace.device_span("upload", "upload stream", stream.handle, slot.number), stream.use():
            to.content.memory.copy_(self._memory[id(slot.content)], non_blocking=True)
        stream.record(to.filled)
        stream.record(slot.emptied)
        self._target.commit(to, slot.read_ticket())
        self._source.release(slot)
        return True


class Encode:
    """The front end's work. What was not in the cache goes to the keep ring as well, if there is one."""

    def __init__(
        self,
        encode: EncodeBlock,
        source: BlockRing,
        target: BlockRing,
        stream: Stream,
        keep: BlockRing | None,
        trace: Trace,
        fresh: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`fresh` are results of the last batch that only the cache needs."""
        self._encode, self._source, self._target, self._fresh = encode, source, target, fresh or {}
        self._stream, self._keep, self._trace = stream, keep, trace

    def __call__(self) -> bool:
        slot = self._source.take()
        if slot is None:
            self._target.finish(self._source.num_taken)
            if self._keep is not None:
                self._keep.finish(self._keep.num_acquired)
            return False
        gathered, to, stream = slot.read_ticket(), self._target.acquire(), self._stream
        stream.wait(slot.filled)
        stream.wait(to.emptied)
        with self._trace.device_span("encode", "encode stream", stream.handle, slot.number), stream.use():
            self._encode(slot.content, to.content, gathered)
        if self._keep is not None and not gathered.codes_known:
            kept = self._keep.acquire()
            with stream.use():
                for name, tensor in kept.content.tensors.items():
                    made = self._fresh[name] if name in self._fresh else to.content.tensors[name]
                    tensor.copy_(made, non_blocking=True)
            stream.record(kept.filled)
            self._keep.commit(kept, gathered)
        stream.record(to.filled)
        stream.record(slot.emptied)
        self._target.commit(to, gathered)
        self._source.release(slot)
        return True


class Handoff:
    """Copies batches to the model role's device; each side has its own stream for it."""

    def __init__(
        self, source: BlockRing, target: BlockRing, source_stream: Stream, target_stream: Stream, trace: Trace
    ) -> None:
        self._source, self._target, self._trace = source, target, trace
        self._from, self._to = source_stream, target_stream

    def __call__(self) -> bool:
        slot = self._source.take()
        if slot is None:
            self._target.finish(self._source.num_taken)
            return False
        to = self._target.acquire()
        for stream in (self._from, self._to):  # both: the span is of the copy, not of the wait for the front end
            stream.wait(slot.filled)
        self._to.wait(to.emptied)
        span = self._trace.device_span("handoff", "handoff stream", self._to.handle, slot.number)
        # PyTorch lets a copy between two GPUs wait for, and be waited for by, the current streams of both.
        with span, self._from.use(), self._to.use():
            to.content.memory.copy_(slot.content.memory, non_blocking=True)
        self._to.record(to.filled)
        self._from.record(slot.emptied)
        self._target.commit(to, slot.read_ticket())
        self._source.release(slot)
        return True


class Keep:
    """Writes what is fresh to the cache. It waits for the device on the host, which holds up nothing else."""

    def __init__(self, ring: BlockRing, gatherer: Gatherer) -> None:
        self._ring, self._gatherer = ring, gatherer

    def __call__(self) -> bool:
        slot = self._ring.take()
        if slot is None:
            return False
        slot.filled.wait_on_host()
        made = {name: tensor.numpy() for name, tensor in slot.content.tensors.items()}
        self._gatherer.keep(slot.read_ticket().clips, made)
        self._ring.release(slot)
        return True


class Worker:
    """Repeats its work on a thread of its own until none is left; `failure` is the error that ended it early."""

    def __init__(self, name: str, work: Work, rings: Sequence[Ring[Any, Any]], device: torch.device) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self._work, self._rings, self._device = work, rings, device
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread to end, if it was started."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            work_on(self._device)
            while self._work():
                pass
        except RingClosed:
            _log.debug("worker %s ends: its ring is closed", self.name)
        except BaseException as error:
            error.add_note(f"(in the {self.name} worker of the pipeline)")
            self.failure = error
            for ring in self._rings:
                ring.poison(error)
