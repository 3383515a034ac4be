"""Worker processes for chunks of items: few in flight, outliving a crash of any item, not outliving their parent.

Processes rather than threads, because most of the work holds the interpreter's lock; a fork server rather than
plain forks, so that no lock, thread or open file of the parent is inherited.
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

Item = TypeVar("Item")
Result = TypeVar("Result")
Work = Callable[[Sequence[Item]], Result]

_CHUNKS_AHEAD = 2
"""Chunks handed out per process: enough to keep it busy, few enough to bound what is in memory."""
_PRELOADED = ["myxtts.data.prepare", "num2words"]
"""What the fork server imports once for all processes."""

_reserved: Synchronized[int]
"""In a worker: the end of what is taken in the file that all workers write to."""


class _WorkerProcess(ForkServerProcess):
    """A process that does not import the user's main script, as forked ones otherwise do.

    What workers run lives in modules; a script without a `__main__` guard would start preparing once more.
    """

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        main = sys.modules["__main__"]
        hidden: dict[str, Any] = {name: main.__dict__.get(name) for name in ("__spec__", "__file__")}
        try:
            main.__dict__.update(dict.fromkeys(hidden))
            # An interrupt from the keyboard goes to all processes; only the parent is to see it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            return ForkServerProcess._Popen(process_obj)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            main.__dict__.update(hidden)


class _WorkerContext(ForkServerContext):
    Process = _WorkerProcess


class Workers:
    """A pool of processes, started when first needed and used for one kind of work after the other."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._context = _WorkerContext()
        self._context.set_forkserver_preload(_PRELOADED)
        self.reserved: Synchronized[int] = self._context.Value("Q", 0)
        """The end of what is taken in the shared file; see `reserve`."""
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Let the processes come up in the background while the caller does something else."""
        threading.Thread(
            target=_start_processes, args=(self._started_pool(), self.num_workers), daemon=True
        ).start()

    def run(
        self, work: Work[Item, Result], chunks: Iterable[Sequence[Item]]
    ) -> Iterator[tuple[Sequence[Item], Result | None]]:
        """Yield (chunk, work(chunk)) as chunks finish; a single item whose process died comes with None."""
        waiting = iter(chunks)
        while True:
            suspects: list[Sequence[Item]] = []
            yield from self._run_until_crash(work, waiting, suspects)
            if not suspects:
                return
            self.close()
            self._require_a_working_process()
            yield from self._run_suspects(work, suspects)

    def close(self) -> None:
        """End the processes; chunks not begun are dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _run_until_crash(
        self, work: Work[Item, Result], waiting: Iterator[Sequence[Item]], suspects: list[Sequence[Item]]
    ) -> Iterator[tuple[Sequence[Item], Result]]:
        pool = self._started_pool()
        handed_out: dict[Future[Result], Sequence[Item]] = {}
        while not suspects:
            while len(handed_out) < _CHUNKS_AHEAD * self.num_workers:
                chunk = next(waiting, None)
                if chunk is None:
                    break
                try:
                    handed_out[pool.submit(work, chunk)] = chunk
                except BrokenProcessPool:
                    suspects.append(chunk)
                    break
            if not handed_out:
                return
            done, _ = wait(handed_out, return_when=FIRST_COMPLETED)
            for future in done:
                chunk = handed_out.pop(future)
                try:
                    result = future.result()
                except BrokenProcessPool:
                    suspects.append(chunk)
                else:
                    yield chunk, result
        suspects.extend(handed_out.values())

    def _run_suspects(
        self, work: Work[Item, Result], suspects: Sequence[Sequence[Item]]
    ) -> Iterator[tuple[Sequence[Item], Result | None]]:
        """One of these chunks killed its process: run each alone, halving those that do it again."""
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

    def _require_a_working_process(self) -> None:
        """Tell a machine on which no process can start from an item that ends its process."""
        with self._new_pool(1) as pool:
            try:
                pool.submit(os.getpid).result()
            except BrokenProcessPool:
                raise DatasetError(
                    "Worker processes end as soon as they start; is the machine out of memory?"
                ) from None

    def _started_pool(self) -> ProcessPoolExecutor:
        self._pool = self._pool or self._new_pool(self.num_workers)
        return self._pool

    def _new_pool(self, num_workers: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(num_workers, self._context, _start_worker, (self.reserved,))


def _start_processes(pool: ProcessPoolExecutor, num_workers: int) -> None:
    with contextlib.suppress(RuntimeError):  # closed meanwhile; a broken pool is one of these too
        for _ in range(num_workers):
            pool.submit(os.getpid)


def reserve(num_bytes: int) -> int:
    """In a worker: take the next bytes of the file that all workers write to; returns where they begin."""
    with _reserved.get_lock():
        offset = _reserved.value
        _reserved.value += num_bytes
    return offset


def _start_worker(reserved: Synchronized[int]) -> None:
    global _reserved
    _reserved = reserved
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
