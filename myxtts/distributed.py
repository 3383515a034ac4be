"""Processes that train one run together: their connection, the end of one, and the sums of their gradients.

Nothing here knows networks, losses or files. All ranks call collectives in the same order.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from myxtts.devices import Plan, release_memory
from myxtts.errors import PipelineError

MEET_S = 600.0  # that the ranks have to start
JOIN_S = 120.0  # that the ranks have to connect to the first one, after they have met
GREETING_S = 5.0  # that one who has connected has to say which rank it is
GRACE_S = 5.0
"""Seconds in which the thread that trains can end by itself after another rank has; then the process is ended."""
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}
"""A machine that has lost its power answers no probe for so many seconds."""
DONE = "done"
_GREETING = struct.Struct(">qq")  # the token and the rank


@contextlib.contextmanager
def process_group(plan: Plan) -> Iterator[None]:
    """Connect the processes of a run, if there are several. If one of them ends, so do the others, with its
    error."""
    if plan.world_size == 1:
        yield
        return
    backend, device = ("nccl", plan.model) if plan.model.type == "cuda" else ("gloo", None)
    monitor: RankMonitor | None = None
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=MEET_S)))
        dist.init_process_group(
            backend,
            store=_of_this_start(store, rank, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(hours=2),  # rank 0 may decode a large corpus while the others wait
            device_id=device,
        )
        monitor = RankMonitor(plan)
        yield
    except BaseException as error:
        what = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        is_lost = isinstance(error, RuntimeError) and (
            isinstance(error, dist.DistError) or re.search("gloo|NCCL", str(error)) is not None
        )
        known = monitor.lost(wait_s=GRACE_S if is_lost else 0) if monitor is not None else ""
        if monitor is not None:
            monitor.close("" if known else what)
        if not is_lost:
            raise
        what = re.sub(r"^\[.*?\] | This is typically .*", "", what)[:200]
        found = known or f"Rank {plan.rank} lost the other processes of the run; did one of them end? ({what})"
        raise PipelineError(explained(found)) from error
    monitor.close(DONE)
    release_memory()  # NCCL waits for CUDA graphs that hold collectives
    dist.destroy_process_group()  # not after an error: it would wait for processes that wait in a collective


def _of_this_start(store: Store, rank: int, world_size: int) -> Store:
    """Return the part of the store that belongs to the processes that run now.

    When torchrun restarts processes, PyTorch 2.13 gives them the store of those that have ended, with their
    addresses. So each rank shows rank 0 a random number, and takes the name of the part from an answer with it.
    """

    def read(kind: str, number: int) -> list[str]:
        key = f"myxtts {kind} {number}"
        return store.get(key).decode().split() if store.check([key]) else [""]

    number, part, deadline = secrets.token_hex(8), secrets.token_hex(8), time.monotonic() + MEET_S
    if rank > 0:
        store.set(f"myxtts hello {rank}", number)
        while (answer := read("welcome", rank))[0] != number:
            _wait_for("rank 0", deadline)
        store.set(f"myxtts ready {rank}", answer[1])
        return PrefixStore(answer[1], store)
    while missing := [other for other in range(1, world_size) if read("ready", other) != [part]]:
        for other in missing:
            store.set(f"myxtts welcome {other}", f"{read('hello', other)[0]} {part}")
        _wait_for(f"rank {missing[0]}", deadline)
    return PrefixStore(part, store)


def _wait_for(who: str, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise dist.DistStoreError(f"{who} did not come within {MEET_S:.0f} s")
    time.sleep(0.02)


def explained(found: str) -> str:
    return f"{found}\nStart all again: the same command continues from the last checkpoint."


def barrier(plan: Plan) -> None:
    if plan.world_size > 1:
        dist.barrier()


def of_first_rank(plan: Plan, *values: int) -> tuple[int, ...]:
    """The values that rank 0 has; all ranks must call this."""
    if plan.world_size == 1:
        return values
    shared = torch.tensor(values, dtype=torch.int64, device=plan.model)
    dist.broadcast(shared, src=0)
    return tuple(int(value) for value in shared.tolist())


class RankMonitor:
    """Connections between rank 0 and the others, on which the end of a process shows at once.

    The system closes the connections of a process that ends, however it ends. Rank 0 then tells the others. A
    collective alone would not do: NCCL's wait for ever for a rank that was killed. Whoever ends in order says so,
    and who ends with an error gives it.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._why, self._is_lost, self._is_closed = "", threading.Event(), threading.Event()
        try:
            self._connections = self._connected(os.environ["MASTER_ADDR"])
        except OSError as error:
            raise PipelineError(explained(f"Rank {plan.rank} could not connect to the others: {error}")) from error
        for connection in self._connections.values():
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._thread = threading.Thread(target=self._watch, name="rank-monitor", daemon=True)
        self._thread.start()

    def lost(self, wait_s: float = 0) -> str:
        """Which rank has ended, and why; "" if none has so far."""
        self._is_lost.wait(wait_s)
        return self._why

    def close(self, why: str) -> None:
        """Tell the others that this process ends, and why: DONE for in order, "" if they know already."""
        self._is_closed.set()
        if why:
            by_first = why == DONE or self._plan.rank > 0
            self._tell(why if by_first else self._about(0, why))
        self._thread.join()
        for connection in self._connections.values():
            connection.close()

    def _connected(self, host: str) -> dict[int, socket.socket]:
        """Connections by rank: to all others on rank 0, to rank 0 on the others."""
        if self._plan.rank > 0:
            port, token = of_first_rank(self._plan, 0, 0)
            first = socket.create_connection((host, port), timeout=JOIN_S)
            first.sendall(_GREETING.pack(token, self._plan.rank))
            return {0: first}
        family, token = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0], secrets.randbits(62)
        found: dict[int, socket.socket] = {}
        with socket.create_server(("", 0), family=family, backlog=socket.SOMAXCONN) as server:
            of_first_rank(self._plan, server.getsockname()[1], token)
            server.settimeout(JOIN_S)
            while len(found) < self._plan.world_size - 1:
                connection, _ = server.accept()
                connection.settimeout(GREETING_S)
                greeting = b""
                with contextlib.suppress(OSError):
                    greeting = connection.recv(_GREETING.size, socket.MSG_WAITALL)
                if len(greeting) == _GREETING.size and _GREETING.unpack(greeting)[0] == token:
                    found[_GREETING.unpack(greeting)[1]] = connection
                else:  # not one of ours
                    connection.close()
        return found

    def _watch(self) -> None:
        """Wait for the first line or the end of each connection; nothing else is ever sent on it."""
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map() and not self._is_closed.is_set():
                for key, _ in selector.select(timeout=0.2):
                    said = _line(self._connections[key.data])
                    selector.unregister(key.fileobj)
                    if said != DONE:
                        self._end(said if said and self._plan.rank > 0 else self._about(key.data, said))
                        return

    def _about(self, rank: int, why: str) -> str:
        """What all ranks say of the end of one."""
        why = why or "it was killed or has crashed; its own output may say more"
        return f"Rank {rank} of {self._plan.world_size} has ended: {why}"

    def _tell(self, line: str) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(f"{' '.join(line.split())[:1000]}\n".encode())

    def _end(self, why: str) -> None:
        """Pass the news on, and end this process unless the thread that trains does."""
        self._why = why
        self._is_lost.set()
        if self._plan.rank == 0:
            self._tell(why)
        if not self._is_closed.wait(GRACE_S):
            sys.stderr.write(f"error: {explained(why)}\n")
            sys.stderr.flush()
            os._exit(1)


def _line(connection: socket.socket) -> str:
    """What was sent, up to the end of a line; "" if the connection was closed without."""
    received = b""
    with contextlib.suppress(OSError):
        while not received.endswith(b"\n") and (more := connection.recv(4096)):
            received += more
    return received.decode(errors="replace").strip()


# Gradients

BUCKET_BYTES = 32 * 2**20
ALIGNMENT = 16  # numbers; kernels read several at once
REDUCTIONS = {"float32": None, "bfloat16": torch.bfloat16}


class Bucket(NamedTuple):
    """Gradients that are exchanged together."""

    gradients: Tensor  # flat
    sent: Tensor  # the same memory, or a copy in another type
    parameters: list[int]


class GradientSums:
    """Gradients summed over all processes, in buckets, while the backward pass computes the others.

    The first backward pass shows in which order gradients become ready. From then on each of them is a part of a
    bucket, and a bucket is exchanged as soon as it is complete, in the same order on all ranks. gloo does that in
    its own threads, NCCL on its own stream, also in a CUDA graph. Gradients of unused parameters are 0.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        """For the parameters that are trained now; `dtype` is that of the exchange, None for their own."""
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._dtype, self._is_last = dtype, False
        self._buckets, self._bucket_of = list[Bucket](), dict[int, int]()
        self._order, self._num_missing, self._works = list[int](), list[int](), list[dist.Work]()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self._parameters)
        ]

    @property
    def buckets(self) -> Sequence[Bucket]:
        """In the order in which they are exchanged; none before the first backward pass."""
        return self._buckets

    @contextlib.contextmanager
    def exchanged(self) -> Iterator[None]:
        """Sum what was accumulated when this context ends; the backward pass in it is the last of the step."""
        self._works, self._num_missing = [], [len(bucket.parameters) for bucket in self._buckets]
        self._is_last = True
        try:
            yield
        finally:
            self._is_last = False
        if not self._buckets:
            self._make_buckets()
        while len(self._works) < len(self._buckets):  # not all parameters were used
            self._exchange_next()
        for work, bucket in zip(self._works, self._buckets, strict=True):
            work.wait()
            if bucket.sent is not bucket.gradients:
                bucket.gradients.copy_(bucket.sent)
        self._works = []

    def close(self) -> None:
        """Leave the parameters alone from here on."""
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, number: int, _: Tensor) -> None:
        if not self._is_last:
            return
        if not self._buckets:
            self._order.append(number)
            return
        self._num_missing[self._bucket_of[number]] -= 1
        while len(self._works) < len(self._buckets) and self._num_missing[len(self._works)] == 0:
            self._exchange_next()

    def _exchange_next(self) -> None:
        bucket = self._buckets[len(self._works)]
        if bucket.sent is not bucket.gradients:
            bucket.sent.copy_(bucket.gradients)
        work = dist.all_reduce(bucket.sent, async_op=True)
        assert work is not None
        self._works.append(work)

    @torch.no_grad()
    def _make_buckets(self) -> None:
        """Divide the parameters in the order of rank 0, and move their gradients to where they are exchanged."""
        unused = [number for number in reversed(range(len(self._parameters))) if number not in set(self._order)]
        order = torch.tensor(self._order + unused, device=self._parameters[0].device)
        dist.broadcast(order, src=0)
        groups, num_bytes = list[list[int]](), math.inf
        for number in order.tolist():
            parameter = self._parameters[number]
            is_other = bool(groups) and self._parameters[groups[-1][-1]].dtype != parameter.dtype
            if is_other or num_bytes + parameter.nbytes > BUCKET_BYTES:
                groups.append([])
                num_bytes = 0
            groups[-1].append(number)
            num_bytes += parameter.nbytes
        for index, group in enumerate(groups):
            self._buckets.append(self._bucket(group))
            self._bucket_of |= dict.fromkeys(group, index)

    def _bucket(self, numbers: list[int]) -> Bucket:
        parameters = [self._parameters[number] for number in numbers]
        lengths = [math.ceil(parameter.numel() / ALIGNMENT) * ALIGNMENT for parameter in parameters]
        flat = torch.zeros(sum(lengths), dtype=parameters[0].dtype, device=parameters[0].device)
        for parameter, part in zip(parameters, torch.split(flat, lengths), strict=True):
            view = part.as_strided(parameter.shape, parameter.stride())
            if parameter.grad is not None:
                view.copy_(parameter.grad)
            parameter.grad = view
        is_same = self._dtype in (None, flat.dtype)
        return Bucket(flat, flat if is_same else torch.empty_like(flat, dtype=self._dtype), numbers)
