"""Work on chunks of items in processes: bounded, outliving a crash of any item, never outliving its parent.

Processes rather than threads, because most of the work holds the interpreter's lock; a fork server rather than
plain forks, so that no lock, thread or open file of the parent is inherited.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_CHUNKS_AHEAD = 2
"""Chunks handed out per process: enough to keep it busy, few enough to bound what is in memory."""


class Workers(Generic[Item, Result]):
    """Runs `work(chunk)` in `num_workers` processes, each of which first calls `start(*start_args)`."""

    def __init__(
        self,
        work: Callable[[Sequence[Item]], Result],
        num_workers: int,
        start: Callable[..., None] | None = None,
        start_args: tuple[Any, ...] = (),
    ) -> None:
        self._work = work
        self._num_workers = num_workers
        self._start_args = (start, start_args)

    def run(self, chunks: Iterable[Sequence[Item]]) -> Iterator[tuple[Sequence[Item], Result | None]]:
        """Yield (chunk, result) as chunks finish; a single item whose process died comes with None."""
        waiting = iter(chunks)
        while True:
            suspects: list[Sequence[Item]] = []
            yield from self._run_until_crash(waiting, suspects)
            if not suspects:
                return
            yield from self._run_suspects(suspects)

    def _run_until_crash(
        self, waiting: Iterator[Sequence[Item]], suspects: list[Sequence[Item]]
    ) -> Iterator[tuple[Sequence[Item], Result]]:
        with self._pool(self._num_workers) as pool:
            handed_out: dict[Future[Result], Sequence[Item]] = {}
            while not suspects:
                while len(handed_out) < _CHUNKS_AHEAD * self._num_workers:
                    chunk = next(waiting, None)
                    if chunk is None:
                        break
                    handed_out[pool.submit(self._work, chunk)] = chunk
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

    def _run_suspects(self, suspects: Sequence[Sequence[Item]]) -> Iterator[tuple[Sequence[Item], Result | None]]:
        """One of these chunks killed its process: run each alone, halving those that do it again."""
        queue = deque(suspects)
        while queue:
            chunk = queue.popleft()
            with self._pool(1) as pool:
                try:
                    yield chunk, pool.submit(self._work, chunk).result()
                except BrokenProcessPool:
                    if len(chunk) == 1:
                        yield chunk, None
                    else:
                        queue.extend((chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]))

    def _pool(self, num_workers: int) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([getattr(self._work, "func", self._work).__module__])
        return ProcessPoolExecutor(num_workers, context, _start_worker, self._start_args)


def _start_worker(start: Callable[..., None] | None, start_args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if start is not None:
        start(*start_args)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
