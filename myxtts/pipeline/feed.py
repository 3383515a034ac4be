"""Batches for a trainer: gather → upload → encode (→ handoff), every stage overlapped.

Single-GPU buffered mode and dual-GPU mode are the same stages under another plan; in dual mode batches cross to
the model role's device in a handoff. One thread reads a feed: `with feed.next() as batch`. The tensors of a batch
may be used, in the feed's model lane, until the `with` block ends. This module knows no recipe.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from myxtts.config import DataSettings
from myxtts.data.batches import Cursor
from myxtts.data.gather import Gathered, Gatherer, HostBatch, host_layout
from myxtts.data.layout import Batch, Field, Layout
from myxtts.devices import Plan, explain_out_of_memory
from myxtts.lanes import Lane
from myxtts.observe.trace import OFF, Trace
from myxtts.pipeline.buffers import Depths
from myxtts.pipeline.frontend import CapturedFrontend, Frontend
from myxtts.pipeline.ring import Ring, RingClosed, Slot
from myxtts.pipeline.stage import Block, BlockRing, Encode, Gather, Handoff, Keep, Stage, Upload, Work

UPLOAD_DEPTH = 2
"""Uploaded batches on the data role's device: one arriving, one being encoded."""
HANDOFF_DEPTH = 3
"""Triple buffering where batches change hands: one being filled, one ready, one in use."""
KEEP_DEPTH = 4
"""Batches of fresh codes on their way to the disk."""
_POLL_S = 0.01

_log = logging.getLogger(__name__)


class Lanes(NamedTuple):
    """Where the stages work, and the trainer."""

    model: Lane
    """The trainer's: ahead of the data role's kernels when both share a GPU."""
    encode: Lane
    upload: Lane
    handoff_from: Lane
    handoff_to: Lane

    @classmethod
    def of(cls, plan: Plan, data: DataSettings) -> Lanes:
        """Not told to overlap, the front end works where the trainer does, and copies where the front end does."""
        model = Lane(plan.model, urgent=True)
        together = plan.data == plan.model and not data.optimize_cpu_gpu_overlap
        encode = model if together else Lane(plan.data)
        upload = Lane(plan.data) if data.enhanced_gpu_prefetch else encode
        to = Lane(plan.model)
        return cls(model, encode, upload, to if plan.data == plan.model else Lane(plan.data), to)


class Feed:
    """The pipeline of one recipe under one plan. A context manager: started on entry, closed on exit."""

    def __init__(
        self,
        gatherer: Gatherer,
        frontend: Frontend,
        plan: Plan,
        data: DataSettings,
        depths: Depths,
        *,
        cursor: Cursor | None = None,
        accumulate: int = 1,
        num_batches: int | None = None,
        replay: bool = False,
        captured: bool = True,
        lanes: Lanes | None = None,
        trace: Trace = OFF,
    ) -> None:
        """`captured=False` spares a short feed the time it takes to record the front end as a graph.

        Feeds that follow each other should share `lanes`: PyTorch keeps working memory for every stream.
        """
        self.plan, self._data, self._gatherer, self._frontend = plan, data, gatherer, frontend
        self._cursor, self._trace = cursor or Cursor(), trace
        self._replay = replay
        self._captured = captured and plan.data.type == "cuda" and data.pad_to_fixed_length
        self._leased: Slot[Block, Gathered] | None = None
        self._jobs = gatherer.jobs(self._cursor, accumulate, num_batches)
        self._lanes = lanes or Lanes.of(plan, data)
        self.model_lane = self._lanes.model
        self._rings: list[Ring[Any, Any]] = []
        self._allocate(depths)
        self._stages: list[Stage] = []
        self._works: list[Work] = []
        """Device stages that run when a batch is asked for, if nothing is uploaded ahead."""
        self._num_gatherers = depths.gatherers

    def start(self) -> None:
        """Start the stages; on CUDA with static shapes the front end is captured first, on an idle device."""
        device_works = self._device_works(self._captured_frontend())
        gather = Gather(self._gatherer, self._jobs, self.host_ring, self._trace)
        works: list[tuple[str, Work]] = [(f"gather-{number}", gather) for number in range(self._num_gatherers)]
        if self._keep_ring is not None and self._gatherer.codes is not None:
            works.append(("keep", Keep(self._keep_ring, self._gatherer.codes)))
        if self._data.prefetch_to_gpu:
            works += device_works
        else:
            self._works = [work for _, work in device_works]
        self._stages = [Stage(name, work, self._rings) for name, work in works]
        for stage in self._stages:
            stage.start()

    def wait_until_warm(self, delay_s: float) -> float:
        """Return when the buffers are full, at the latest `delay_s` after the first batch; seconds since then."""
        last = self.model_ring if self._data.prefetch_to_gpu else self.host_ring
        ahead = (self.host_ring, last)
        while last.num_ready == 0 and not last.is_full:
            self._check()
            time.sleep(_POLL_S)
        first_at = time.perf_counter()
        while time.perf_counter() - first_at < delay_s and not all(ring.is_full for ring in ahead):
            self._check()
            time.sleep(_POLL_S)
        return time.perf_counter() - first_at

    @contextlib.contextmanager
    def next(self) -> Iterator[Batch | None]:
        """The next batch, held for the length of the `with` block; None behind the last one."""
        slot = self._lease()
        if slot is None:
            yield None
            return
        gathered, tensors = slot.read_ticket(), slot.content.tensors
        if not self._data.pad_to_fixed_length:
            tensors = dict(self._frontend.used(tensors, gathered.sizes))
        self.model_lane.wait(slot.filled)
        try:
            yield Batch(tensors, gathered.sizes, gathered.after)
        finally:
            self.model_lane.record(slot.emptied)
            if not self._replay:
                self.model_ring.release(slot)
        self._cursor = gathered.after

    def cursor(self) -> Cursor:
        """Where to continue after the batches that have been read."""
        return self._cursor

    def readiness(self) -> dict[str, tuple[int, int]]:
        """Of every ring how many batches are ready, and how many it holds."""
        return {ring.name: (ring.num_ready, ring.depth) for ring in self._rings}

    @property
    def num_ahead(self) -> int:
        """Batches that are ready ahead of the trainer, wherever they are."""
        return sum(ring.num_ready for ring in self._rings if ring is not self._keep_ring)

    def close(self) -> None:
        """Stop all stages and wait for their threads; may be called at any time, and again.

        Codes that are already on their way to the cache still get there.
        """
        for ring in self._rings:
            if ring is not self._keep_ring:
                ring.poison(None)
        for stage in self._stages:
            if stage.name != "keep":
                stage.join()
        if self._keep_ring is not None:
            self._keep_ring.finish(self._keep_ring.num_acquired)
        for stage in self._stages:
            stage.join()
        self._stages = []
        for lane in set(self._lanes):
            with contextlib.suppress(RuntimeError):  # a device that failed stays failed; the reader has its error
                lane.finish()

    def __enter__(self) -> Feed:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _allocate(self, depths: Depths) -> None:
        plan, data, outputs = self.plan, self._data, self._frontend.outputs
        inputs, pinned = host_layout(data), data.enhanced_gpu_prefetch and plan.data.type == "cuda"
        batches = [HostBatch(inputs, pinned) for _ in range(depths.host)]
        self._inputs, role = inputs, "data"
        try:
            self.host_ring: Ring[HostBatch, Gathered] = Ring("host", batches, plan.data)
            self.upload_ring: BlockRing = _block_ring("device", inputs, plan.data, UPLOAD_DEPTH)
            role = "model"
            self.model_ring: BlockRing = _block_ring("model", outputs, plan.model, depths.model)
            self.encoded_ring, role = self.model_ring, "data"
            if plan.mode == "dual":
                self.encoded_ring = _block_ring("handoff", outputs, plan.data, HANDOFF_DEPTH)
        except torch.OutOfMemoryError as error:
            raise explain_out_of_memory(plan, error, role, "allocating its buffers") from error
        self._keep_ring: BlockRing | None = None
        if self._frontend.uses_codes and self._gatherer.codes is not None:
            layout = Layout({"codes": Field(outputs["codes"].shape, outputs["codes"].dtype)})
            pinned_blocks = [Block(layout, torch.device("cpu"), pinned) for _ in range(KEEP_DEPTH)]
            self._keep_ring = Ring("keep", pinned_blocks, plan.data)
        for device in {plan.data, plan.model}:
            if device.type == "cuda":  # the zeros of fresh memory are written before any lane writes there
                torch.cuda.synchronize(device)
        self._rings = [self.host_ring, self.upload_ring, self.model_ring]
        self._rings += [self.encoded_ring] if plan.mode == "dual" else []
        self._rings += [self._keep_ring] if self._keep_ring is not None else []

    def _captured_frontend(self) -> Frontend | CapturedFrontend:
        if not self._captured:
            return self._frontend
        try:
            return CapturedFrontend(self._frontend, self._inputs, self._gatherer.static_sizes, self._lanes.encode)
        except torch.OutOfMemoryError as error:
            raise explain_out_of_memory(self.plan, error, "data", "preparing the front end") from error

    def _device_works(self, frontend: Frontend | CapturedFrontend) -> list[tuple[str, Work]]:
        lanes, trace = self._lanes, self._trace
        works: list[tuple[str, Work]] = [
            ("upload", Upload(self.host_ring, self.upload_ring, lanes.upload, trace)),
            (
                "encode",
                Encode(frontend, self.upload_ring, self.encoded_ring, lanes.encode, self._keep_ring, trace),
            ),
        ]
        if self.encoded_ring is not self.model_ring:
            across = Handoff(self.encoded_ring, self.model_ring, lanes.handoff_from, lanes.handoff_to, trace)
            works.append(("handoff", across))
        return works

    def _lease(self) -> Slot[Block, Gathered] | None:
        if self._replay and self._leased is not None:
            return self._leased
        try:
            if self.model_ring.num_ready == 0:
                for work in self._works:
                    work()
            with self._trace.span("wait", batch=self.model_ring.num_taken):
                self._leased = self.model_ring.take()
        except RingClosed:
            self._check()
            raise
        except torch.OutOfMemoryError as error:
            raise explain_out_of_memory(self.plan, error, "data", "encoding a batch") from error
        if self._trace.enabled:
            for name, (ready, _) in self.readiness().items():
                self._trace.count(f"{name} ring", ready)
        return self._leased

    def _check(self) -> None:
        """Raise what ended a stage, if one has failed: the error itself, with its own traceback."""
        for stage in self._stages:
            if isinstance(stage.failure, torch.OutOfMemoryError):
                doing = f"running its {stage.name} stage"
                raise explain_out_of_memory(self.plan, stage.failure, "data", doing) from stage.failure
            if stage.failure is not None:
                raise stage.failure


def _block_ring(name: str, layout: Layout, device: torch.device, depth: int) -> BlockRing:
    return Ring(name, [Block(layout, device) for _ in range(depth)], device)
