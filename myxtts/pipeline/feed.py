"""Batches for a trainer: gather → upload → encode (→ handoff), all workers overlapped.

Single-GPU buffered mode and dual-GPU mode are the same workers under another plan; in dual mode batches cross to
the model role's device in a handoff. One thread reads a feed: `with feed.next() as batch`. The tensors of a batch
may be used, in the feed's model stream, until the `with` block ends. This module knows no recipe.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor, nn

from myxtts.config import MAX_AUTO_BUFFER, MAX_AUTO_PREFETCH, DataSettings, Settings, most_gatherers, num_codes_of
from myxtts.data.batches import (
    Batch,
    Block,
    Field,
    Gatherer,
    HostBatch,
    LatentDims,
    Layout,
    References,
    host_layout,
    segment_codes,
)
from myxtts.data.clips import ClipSet, PreparedCorpus
from myxtts.data.codes import CodesCache
from myxtts.data.order import Batches, Cursor, packed_tokens
from myxtts.devices import Plan, Stream, explain_out_of_memory, explained_out_of_memory
from myxtts.errors import ConfigError
from myxtts.host import available_bytes, usable_cores
from myxtts.model.xtts import XTTS
from myxtts.observe.trace import OFF, Trace
from myxtts.pipeline import workers
from myxtts.pipeline.frontend import FRONTENDS, CudaGraphFrontend, Frontend
from myxtts.pipeline.ring import Ring, RingClosed

MODEL_DEPTH = 3  # fewest batches on the model role's device: one being filled, one ready, one in use
DEVICE_DEPTH = 2  # uploaded batches on the data role's device: one arriving, one being encoded
HANDOFF_DEPTH = 3  # triple buffering between two GPUs: one batch being filled, one ready, one in use
KEEP_DEPTH = 4  # batches of fresh codes on their way to the disk
DEVICE_SHARE = 0.05
"""Share of a device's memory, or of its cap, that waiting batches may take; the model needs the rest."""
HOST_SHARE, MAX_HOST_SHARE = 0.1, 0.5
"""Shares of the available host memory that `auto` buffer sizes take, and that explicit sizes may request."""
ENCODE_VERSION = 2
"""Increment it whenever the mels or codes of a clip change, so that cached codes are ignored."""
LATENTS_VERSION = 1
"""Likewise of latents and speaker embeddings."""
_POLL_S = 0.01


class Depths(NamedTuple):
    """Batches that the host ring and the model ring hold, and threads that gather."""

    host: int
    model: int
    gatherers: int = 1


VALIDATION_DEPTHS = Depths(host=2, model=3, gatherers=1)


def choose_depths(data: DataSettings, plan: Plan, outputs: Layout) -> Depths:
    """Depths for a front end with these outputs: the settings' numbers, or what workers and memory suggest."""
    gatherers = min(data.num_workers, most_gatherers(data, usable_cores()))
    batch_bytes, available = host_layout(data).num_bytes, available_bytes()
    prefetch, total = data.prefetch_buffer_size, data.pipeline_buffer_size
    if plan.model.type != "cuda" and prefetch is None and total is None:
        return Depths(MODEL_DEPTH, MODEL_DEPTH, gatherers)  # working ahead takes the cores that training needs
    on_device = _fitting(DEVICE_SHARE * _device_bytes(plan), outputs.num_bytes)
    if prefetch is None:
        prefetch = min(MAX_AUTO_PREFETCH, max(2 * gatherers, 4), _fitting(HOST_SHARE * available, batch_bytes))
        prefetch = prefetch if total is None else min(prefetch, max(total - MODEL_DEPTH, 1))
    if total is None:
        total = min(MAX_AUTO_BUFFER, prefetch + max(on_device, MODEL_DEPTH))
    model = max(MODEL_DEPTH, min(total - prefetch, on_device))
    host = max(prefetch, total - model)
    most = _fitting(MAX_HOST_SHARE * available, batch_bytes)
    if host > most:
        raise ConfigError(
            f"{host} batches in host memory need {host * batch_bytes / 2**20:.0f} MB, and "
            f"{available / 2**20:.0f} MB are available: at most {most} are possible.\n"
            "Lower --buffer-size and --prefetch-buffer-size, or --batch-size."
        )
    return Depths(host, model, gatherers)


def _fitting(room_bytes: float, batch_bytes: int) -> int:
    return max(int(room_bytes // batch_bytes), 1)


def _device_bytes(plan: Plan) -> float:
    """Memory of the model role's device, or its cap."""
    if plan.model.type != "cuda":
        return available_bytes()
    if plan.model_cap_mb is not None:
        return plan.model_cap_mb * 2**20
    return float(torch.cuda.mem_get_info(plan.model)[1])


class Streams(NamedTuple):
    """The streams of the workers and of the trainer."""

    model: Stream  # the trainer's; it has priority over the data role's when both share a GPU
    encode: Stream
    upload: Stream
    handoff_from: Stream
    handoff_to: Stream

    @classmethod
    def of(cls, plan: Plan, data: DataSettings) -> Streams:
        """Without overlap encoding uses the trainer's stream; without an upload stream, uploads use encoding's."""
        model = Stream(plan.model, high_priority=True)
        together = plan.data == plan.model and not data.optimize_cpu_gpu_overlap
        encode = model if together else Stream(plan.data)
        upload = Stream(plan.data) if data.enhanced_gpu_prefetch else encode
        to = Stream(plan.model)
        return cls(model, encode, upload, to if plan.data == plan.model else Stream(plan.data), to)


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
        streams: Streams | None = None,
        trace: Trace = OFF,
    ) -> None:
        """Allocate all buffers. A short feed passes `captured=False`: capturing the front end would take too long.

        `replay` delivers the first batch for ever. Feeds of one stage should share `streams`: PyTorch keeps
        working memory for every stream.
        """
        self.plan, self._data, self._gatherer, self._frontend = plan, data, gatherer, frontend
        self._cursor, self._replay, self._trace = cursor or Cursor(), replay, trace
        self._captured = captured and plan.data.type == "cuda" and data.pad_to_fixed_length
        self._leased: workers.BlockSlot | None = None
        self._jobs = gatherer.jobs(self._cursor, accumulate, num_batches)
        self._streams = streams or Streams.of(plan, data)
        self.model_stream = self._streams.model
        self._allocate(depths)
        self._num_gatherers = depths.gatherers
        self._workers: list[workers.Worker] = []
        self._on_demand: list[workers.Work] = []
        """The device's work, done by the reader's thread if nothing is uploaded ahead."""

    def start(self) -> None:
        """Start the workers; on CUDA with static shapes the front end is captured first, on an idle device."""
        on_device = self._device_works()
        gather = workers.Gather(self._gatherer, self._jobs, self.host_ring, self._trace)
        works: dict[str, workers.Work] = {f"gather-{number}": gather for number in range(self._num_gatherers)}
        if self._keep_ring is not None and self._gatherer.codes is not None:
            works["keep"] = workers.Keep(self._keep_ring, self._gatherer)
        if self._data.prefetch_to_gpu:
            works |= on_device
        else:
            self._on_demand = list(on_device.values())
        self._workers = [workers.Worker(name, work, self._rings, self.plan.data) for name, work in works.items()]
        for worker in self._workers:
            worker.start()

    def wait_until_warm(self, delay_s: float) -> float:
        """Wait for full buffers, at most `delay_s` after the first batch; return the seconds since that batch."""
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
        """The next batch, leased for the length of the `with` block; None after the last one."""
        slot = self._lease()
        if slot is None:
            yield None
            return
        gathered, tensors = slot.read_ticket(), slot.content.tensors
        if not self._data.pad_to_fixed_length:
            tensors = dict(self._frontend.used(tensors, gathered.sizes))
        self.model_stream.wait(slot.filled)
        try:
            yield Batch(tensors, gathered.sizes, gathered.after)
        finally:
            self.model_stream.record(slot.emptied)
            if not self._replay:
                self.model_ring.release(slot)
        self._cursor = gathered.after

    def skip(self) -> bool:
        """Take a batch without using it; False after the last one."""
        with self.next() as batch:
            return batch is not None

    def cursor(self) -> Cursor:
        """The position after the batches that have been read."""
        return self._cursor

    def readiness(self) -> dict[str, tuple[int, int]]:
        """Batches that are ready, and the depth, of every ring by name."""
        return {ring.name: (ring.num_ready, ring.depth) for ring in self._rings}

    @property
    def own_references(self) -> float | None:
        """Share of the clips that are their own reference voice; None if the stage uses none."""
        return self._gatherer.references.own_share if self._frontend.uses_references else None

    def buffers(self) -> str:
        """How many batches the rings hold, and where."""
        host, model, plan = self.host_ring.depth, self.model_ring.depth, self.plan
        between = sum(ring.depth for ring in (self.device_ring, self.handoff_ring) if ring is not None)
        split = f"{host} on the host, {model} on {plan.model}"
        return f"{host + model} batches ({split}), and {between} being prepared on {plan.data}"

    @property
    def num_ahead(self) -> int:
        """Batches that are ready ahead of the trainer, wherever they are."""
        return sum(ring.num_ready for ring in self._rings if ring is not self._keep_ring)

    def close(self) -> None:
        """Stop all workers and wait for their threads; may be called at any time, and again.

        Codes that are already on their way to the cache still get there.
        """
        for ring in self._rings:
            if ring is not self._keep_ring:
                ring.poison(None)
        for worker in self._workers:
            if worker.name != "keep":
                worker.join()
        if self._keep_ring is not None:
            self._keep_ring.finish(self._keep_ring.num_acquired)
        for worker in self._workers:
            worker.join()
        self._workers = []
        for stream in set(self._streams):
            with contextlib.suppress(RuntimeError):  # a device that failed stays failed; the reader has its error
                stream.finish()

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
        inputs = self._inputs()
        pinned = data.enhanced_gpu_prefetch and plan.data.type == "cuda"
        batches = [HostBatch(inputs, pinned) for _ in range(depths.host)]
        self.host_ring: workers.HostRing = Ring("host", batches, plan.data)
        self.device_ring = _block_ring("device", inputs, plan, "data", DEVICE_DEPTH)
        self.model_ring = _block_ring("model", outputs, plan, "model", depths.model)
        self.handoff_ring: workers.BlockRing | None = None
        if plan.mode == "dual":
            self.handoff_ring = _block_ring("handoff", outputs, plan, "data", HANDOFF_DEPTH)
        self._keep_ring: workers.BlockRing | None = None
        if self._frontend.uses_codes and self._gatherer.codes is not None:
            fresh = {name: Field(tuple(value.shape), "int16") for name, value in self._fresh().items()}
            layout = Layout({name: fresh.get(name) or outputs[name] for name in self._frontend.keeps})
            blocks = [Block(layout, torch.device("cpu"), pinned) for _ in range(KEEP_DEPTH)]
            self._keep_ring = Ring("keep", blocks, plan.data)
        for device in {plan.data, plan.model}:
            if device.type == "cuda":  # the zeros of fresh memory are written before any stream writes there
                torch.cuda.synchronize(device)
        rings = (self.host_ring, self.device_ring, self.model_ring, self.handoff_ring, self._keep_ring)
        self._rings: list[Ring[Any, Any]] = [ring for ring in rings if ring is not None]

    def _device_works(self) -> dict[str, workers.Work]:
        streams, trace, uploaded = self._streams, self._trace, self.device_ring
        encoded = self.model_ring if self.handoff_ring is None else self.handoff_ring
        encoder = self._frontend.encode_block
        if self._captured:
            with explained_out_of_memory(self.plan, "data", "preparing the front end"):
                sizes = self._gatherer.static_sizes
                encoder = CudaGraphFrontend(self._frontend, self._inputs(), sizes, streams.encode).encode_block
        works: dict[str, workers.Work] = {
            "upload": workers.Upload(self.host_ring, uploaded, streams.upload, trace),
            "encode": workers.Encode(
                encoder, uploaded, encoded, streams.encode, self._keep_ring, trace, self._fresh()
            ),
        }
        if encoded is not self.model_ring:
            across = (streams.handoff_from, streams.handoff_to)
            works["handoff"] = workers.Handoff(encoded, self.model_ring, *across, trace)
        return works

    def _inputs(self) -> Layout:
        return host_layout(self._data, self._frontend.uses_references, self._frontend.latents)

    def _fresh(self) -> dict[str, Tensor]:
        """Buffers of the front end that only the cache needs."""
        return {name: value for name, value in self._frontend.named_buffers() if name in self._frontend.keeps}

    def _lease(self) -> workers.BlockSlot | None:
        if self._replay and self._leased is not None:
            return self._leased
        try:
            if self.model_ring.num_ready == 0:
                for work in self._on_demand:
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
        """Raise the error that ended a worker, if one has failed, with its own traceback."""
        for worker in self._workers:
            if isinstance(worker.failure, torch.OutOfMemoryError):
                doing = f"running its {worker.name} worker"
                raise explain_out_of_memory(self.plan, worker.failure, "data", doing) from worker.failure
            if worker.failure is not None:
                raise worker.failure


def _block_ring(name: str, layout: Layout, plan: Plan, role: str, depth: int) -> workers.BlockRing:
    device = plan.data if role == "data" else plan.model
    with explained_out_of_memory(plan, role, "allocating its buffers"):
        return Ring(name, [Block(layout, device) for _ in range(depth)], device)


class FeedContext(Protocol):
    """The training stage that a feed serves."""

    stage: str
    settings: Settings
    prepared: PreparedCorpus
    plan: Plan
    model: XTTS

    @property
    def streams(self) -> Streams: ...
    @property
    def codes_key(self) -> str:
        """Names the codes that the DVAE makes; see `dvae_key`."""

    @property
    def latents_key(self) -> str:
        """Names the latents and speaker embeddings that the model makes; see `latents_key`."""


def build_feed(
    ctx: FeedContext,
    cursor: Cursor | None = None,
    *,
    validation: bool = False,
    once: bool = False,
    replay: bool = False,
    trace: Trace = OFF,
) -> Feed:
    """Training batches from the cursor on, for ever, or every training or validation clip `once`, cut the same."""
    data, plan = ctx.settings.data, ctx.plan
    clips = ctx.prepared.val if validation else ctx.prepared.train
    gatherer = build_gatherer(ctx, clips, once or validation)
    for audio, _ in clips.stores:
        if trace.enabled and (cache := getattr(audio, "cache", None)) is not None:  # of a sharded corpus
            cache.trace = trace
    frontend = _frontend(ctx, gatherer.frame_budget)
    return Feed(
        gatherer,
        frontend,
        plan,
        data,
        VALIDATION_DEPTHS if validation else choose_depths(data, plan, frontend.outputs),
        cursor=cursor,
        accumulate=1 if validation else ctx.settings.training.gradient_accumulation_steps,
        replay=replay,
        captured=not validation,
        streams=ctx.streams,
        trace=trace,
    )


def build_gatherer(ctx: FeedContext, clips: ClipSet, once: bool = False) -> Gatherer:
    """Batches of these clips in host memory, this rank's share; `once`: one epoch, which holds each clip once."""
    data, seed, plan = ctx.settings.data, ctx.settings.training.seed, ctx.plan
    tokens = packed_tokens(clips.num_ids, clips.num_samples)
    mixture = ctx.prepared.mixture if clips is ctx.prepared.train and not once else None
    num_epochs = 1 if once else None
    batches = Batches(tokens, data.batch_size, seed, plan.rank, plan.world_size, mixture, clips.shards, num_epochs)
    cache, references, latents = None, _references(ctx, clips), None
    if ctx.stage == "decoder" and data.cache_latents:
        cache, latents = _open_latents(ctx, clips, references), _latent_dims(ctx)
    elif FRONTENDS[ctx.stage].uses_codes:
        cache = open_codes(ctx, clips)
    segment = segment_codes(ctx.stage == "decoder" and ctx.model.dims.reads_mels)
    return Gatherer(clips, batches, data, seed, cache, references, latents, segment)


def _references(ctx: FeedContext, clips: ClipSet) -> References:
    """Other clips of the same speaker; validation clips also borrow from training clips, never the reverse."""
    data, train = ctx.settings.data, ctx.prepared.train
    if data.reference_clip == "same" and ctx.stage != "speaker":
        return References(clips)
    if clips is ctx.prepared.val:
        return References(clips, ctx.prepared.voices([clips, train], data), train)
    return References(clips, ctx.prepared.voices([clips], data), times=ctx.prepared.mixture.times)


def open_codes(ctx: FeedContext, clips: ClipSet) -> CodesCache:
    """The cached codes of these clips, and room for those that are missing."""
    hashes = clips.audio.hashes[clips.audio_rows]
    lengths, others = num_codes_of(clips.num_samples), ctx.prepared.other_roots
    return CodesCache.open(ctx.prepared.root, hashes, lengths, ctx.codes_key, others=others)


def _open_latents(ctx: FeedContext, clips: ClipSet, references: References) -> CodesCache:
    """The cached latents of these clips, each with its text and its reference of the first epoch."""
    made_from = references.made_from(ctx.settings.training.seed, clips)
    lengths = _latent_dims(ctx).row_lengths(num_codes_of(clips.num_samples))
    return CodesCache.open(ctx.prepared.root, made_from, lengths, ctx.latents_key, "latents")


def _latent_dims(ctx: FeedContext) -> LatentDims:
    dims = ctx.model.dims
    return LatentDims(dims.gpt.dim, dims.speaker_dim, segment_codes(dims.reads_mels))


def keep_latents(ctx: FeedContext, say: Callable[[str], None]) -> bool:
    """Compute the latents that are not in the cache, in the batches of the first epoch; False if they do not fit.

    Latents computed in other batches differ in their last bits: training reads all of them from the cache, so that
    a run does not depend on when each was written.
    """
    sets = [("training", ctx.prepared.train), ("validation", ctx.prepared.val)]
    for name, clips in [(name, clips) for name, clips in sets if len(clips)]:
        cache, root = _open_latents(ctx, clips, _references(ctx, clips)), ctx.prepared.root
        cache.close()
        needed, free = cache.absent_bytes, shutil.disk_usage(root).free
        if needed > free / 2 or not cache.is_on_disk:
            why = f"they take {needed / 1e9:.1f} GB, more than half of the {free / 1e9:.1f} GB free in {root}"
            say(f"Latents are computed for every batch: {why if cache.is_on_disk else f'{root} is read-only'}")
            return False
        if needed:
            started_at = time.perf_counter()
            with build_feed(ctx, validation=name == "validation", once=True) as feed, feed.model_stream.use():
                while feed.skip():
                    pass
            say(f"Latents of the {name} clips: {needed / 1e9:.2f} GB in {time.perf_counter() - started_at:.0f} s")
    return True


def _frontend(ctx: FeedContext, frame_budget: int) -> Frontend:
    data, device = ctx.settings.data, ctx.plan.data
    frontend = FRONTENDS[ctx.stage](ctx.model, data, frame_budget, data.mixed_precision and device.type == "cuda")
    with explained_out_of_memory(ctx.plan, "data", "loading the frozen networks"):
        return frontend.to(device).eval()


def dvae_key(model: XTTS, autocast: bool = False) -> str:
    """Names the codes that this DVAE makes: a hash of everything they depend on."""
    hasher = xxhash.xxh3_128(f"{ENCODE_VERSION} {'bf16' if autocast else 'fp32'}".encode())
    _update(hasher, model.dvae.encoder, model.dvae.codebook)
    hasher.update(model.mel_stats.detach().cpu().numpy().tobytes())
    return hasher.hexdigest()


def latents_key(model: XTTS, codes_key: str) -> str:
    """Names the latents and speaker embeddings of this model, which has these codes."""
    hasher = xxhash.xxh3_128(f"{LATENTS_VERSION} {codes_key} {model.speaker_is_trained}".encode())
    _update(hasher, model.gpt, model.hifigan_decoder.get_submodule("speaker_encoder"))
    return hasher.hexdigest()


def _update(hasher: xxhash.xxh3_128, *modules: nn.Module) -> None:
    for module in modules:
        for name, tensor in module.state_dict().items():
            hasher.update(name.encode())
            hasher.update(tensor.detach().cpu().contiguous().numpy().tobytes())
