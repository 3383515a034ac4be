"""A pool of worker processes that survives the crash of any item and never outlives its parent.

It uses processes, because most of the work holds the GIL, and a fork server, so that workers inherit no lock,
thread or open file of the parent.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.sharedctypes import Synchronized
from typing import Any, TypeVar

from myxtts.errors import DatasetError
from myxtts.host import hidden_working_folder

Item = TypeVar("Item")
Result = TypeVar("Result")
Work = Callable[[Sequence[Item]], Result]

_CHUNKS_AHEAD = 2  # chunks in flight per process: enough to keep it busy, few enough to bound the memory
_PRELOADED = ["myxtts.data.prepare", "myxtts.data.jobs", "num2words"]
"""Modules that the fork server imports once for all processes."""

_reserved: Synchronized[int]  # in a worker: the end of the space in use in the file that all workers write to


class _WorkerProcess(ForkServerProcess):
    """A process without the user's main script, which would prepare again if it has no `__main__` guard."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        main = sys.modules["__main__"]
        hidden: dict[str, Any] = {name: main.__dict__.get(name) for name in ("__spec__", "__file__")}
        try:
            main.__dict__.update(dict.fromkeys(hidden))
            # Ctrl-C is sent to all processes; only the parent handles it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            with hidden_working_folder():
                return ForkServerProcess._Popen(process_obj)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            main.__dict__.update(hidden)


class WorkerContext(ForkServerContext):
    """Starts worker processes."""

    Process = _WorkerProcess

    def __init__(self) -> None:
        super().__init__()
        self.set_forkserver_preload(_PRELOADED)


class ProcessPool:
    """Worker processes, started when first needed and used for one kind of work after another."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._context = WorkerContext()
        try:
            with hidden_working_folder():  # this starts a process too
                self.reserved: Synchronized[int] = self._context.Value("Q", 0)
            """The end of the space in use in the shared file; see `reserve`."""
        except OSError as error:
            raise DatasetError(f"Cannot set up worker processes: {error} (is /dev/shm or /tmp full?)") from error
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes in the background."""
        pool = self._started_pool()

        def occupy() -> None:
            with contextlib.suppress(RuntimeError):  # the pool was closed or broke in the meantime
                for _ in range(self.num_workers):
                    pool.submit(os.getpid)

        threading.Thread(target=occupy, daemon=True).start()

    def run(
        self, work: Work[Item, Result], chunks: Iterable[Sequence[Item]]
    ) -> Iterator[tuple[Sequence[Item], Result | None]]:
        """Yield (chunk, work(chunk)) as chunks finish; for a single item that kills its process, (chunk, None)."""
        pending = iter(chunks)
        while True:
            suspects: list[Sequence[Item]] = []
            yield from self._run_until_crash(work, pending, suspects)
            if not suspects:
                return
            self.close()
            with self._new_pool(1) as pool:
                try:
                    pool.submit(os.getpid).result()
                except BrokenProcessPool:  # no process can start at all, which is not the fault of an item
                    message = "Worker processes die as soon as they start; is the machine out of memory?"
                    raise DatasetError(message) from None
            yield from self._run_suspects(work, suspects)

    def close(self) -> None:
        """Stop the processes; chunks that have not started are dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _run_until_crash(
        self, work: Work[Item, Result], pending: Iterator[Sequence[Item]], suspects: list[Sequence[Item]]
    ) -> Iterator[tuple[Sequence[Item], Result]]:
        pool = self._started_pool()
        in_flight: dict[Future[Result], Sequence[Item]] = {}
        while not suspects:
            while len(in_flight) < _CHUNKS_AHEAD * self.num_workers:
                chunk = next(pending, None)
                if chunk is None:
                    break
                try:
                    in_flight[pool.submit(work, chunk)] = chunk
                except BrokenProcessPool:
                    suspects.append(chunk)
                    break
            if not in_flight:
                return
            done, _ = wait(in_flight, return_when=FIRST_COMPLETED)
            for future in done:
                chunk = in_flight.pop(future)
                try:
                    result = future.result()
                except BrokenProcessPool:
                    suspects.append(chunk)
                else:
                    yield chunk, result
        suspects.extend(in_flight.values())

    def _run_suspects(
        self, work: Work[Item, Result], suspects: Sequence[Sequence[Item]]
    ) -> Iterator[tuple[Sequence[Item], Result | None]]:
        """Run chunks one at a time, halving those that kill their process, until single items remain."""
        queue = deque(suspects)
        while queue:
            chunk = queue.popleft()
            with self._new_pool(1) as pool:
                try:
                    result = pool.submit(work, chunk).result()
                except BrokenProcessPool:
                    if len(chunk) == 1:
                        yield chunk, None
                    else:
                        queue.extend((chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]))
                else:
                    yield chunk, result

    def _started_pool(self) -> ProcessPoolExecutor:
        self._pool = self._pool or self._new_pool(self.num_workers)
        return self._pool

    def _new_pool(self, num_workers: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(num_workers, self._context, _start_worker, (self.reserved,))


def reserve(num_bytes: int) -> int:
    """In a worker: reserve the next bytes of the file that all workers write to and return their offset."""
    with _reserved.get_lock():
        offset = _reserved.value
        _reserved.value += num_bytes
    return offset


def _start_worker(reserved: Synchronized[int]) -> None:
    global _reserved
    _reserved = reserved
    behave_as_worker()


def behave_as_worker() -> None:
    """In a new worker process: leave Ctrl-C to the parent, and end with it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the pool already uses every core
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
