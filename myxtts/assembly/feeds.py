"""Feeds of a run: for the training clips, for the validation clips, with the front end that a stage needs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import xxhash
from torch import nn

from myxtts.config import DataSettings
from myxtts.data.batches import Batches, Cursor, packed_tokens
from myxtts.data.clips import ClipSet, Prepared
from myxtts.data.codes import CodesCache
from myxtts.data.gather import Gatherer, num_codes_of
from myxtts.devices import Plan, explain_out_of_memory
from myxtts.model.xtts import XTTS
from myxtts.observe.trace import OFF, Trace
from myxtts.pipeline.buffers import Depths, choose_depths
from myxtts.pipeline.feed import Feed, Lanes
from myxtts.pipeline.frontend import DecoderFrontend, DvaeFrontend, GptFrontend

VALIDATION_DEPTHS = Depths(host=2, model=3, gatherers=1)
ENCODE_VERSION = 2
"""Raise it whenever mels or codes of the same clip change: codes made before are then not read."""
_Frontend = GptFrontend | DvaeFrontend | DecoderFrontend


@dataclass(frozen=True)
class FeedMaker:
    """Everything the feeds of one stage have in common."""

    stage: str
    model: XTTS
    prepared: Prepared
    data: DataSettings
    asked: Collection[str]
    plan: Plan
    seed: int
    dvae_key: str
    lanes: Lanes

    def batches(self, clips: ClipSet) -> Batches:
        tokens = packed_tokens(clips.num_ids, clips.num_samples)
        return Batches(tokens, self.data.batch_size, self.seed, self.plan.rank, self.plan.world_size)

    def training(self, cursor: Cursor, accumulate: int, trace: Trace = OFF, replay: bool = False) -> Feed:
        """Batches without end from the cursor on."""
        gatherer = self._gatherer(self.prepared.train)
        frontend = self._frontend(gatherer)
        depths = choose_depths(self.data, self.asked, self.plan, frontend.outputs)
        return Feed(
            gatherer,
            frontend,
            self.plan,
            self.data,
            depths,
            cursor=cursor,
            accumulate=accumulate,
            trace=trace,
            replay=replay,
            lanes=self.lanes,
        )

    def validation(self) -> Feed:
        """Every validation clip once, always cut alike; each rank has its share."""
        gatherer = self._gatherer(self.prepared.val)
        num_batches = self.batches(self.prepared.val).num_batches
        return Feed(
            gatherer,
            self._frontend(gatherer),
            self.plan,
            self.data,
            VALIDATION_DEPTHS,
            num_batches=num_batches,
            captured=False,
            lanes=self.lanes,
        )

    def _gatherer(self, clips: ClipSet) -> Gatherer:
        cache = None
        if self.stage != "dvae":
            hashes = clips.audio.hashes[clips.audio_rows]
            cache = CodesCache.open(self.prepared.root, hashes, num_codes_of(clips.num_samples), self.dvae_key)
        voices = self.prepared.voices(clips) if self.data.reference_clip == "other" else None
        return Gatherer(clips, self.batches(clips), self.data, self.seed, cache, voices)

    def _frontend(self, gatherer: Gatherer) -> _Frontend:
        frontend: _Frontend
        autocast = self.data.mixed_precision and self.plan.data.type == "cuda"
        if self.stage == "dvae":
            frontend = DvaeFrontend(self.model, self.data)
        elif self.stage == "gpt":
            frontend = GptFrontend(self.model, self.data, gatherer.frame_budget, autocast)
        else:
            frontend = DecoderFrontend(self.model, self.data, gatherer.frame_budget, autocast)
        try:
            return frontend.to(self.plan.data).eval()
        except torch.OutOfMemoryError as error:
            raise explain_out_of_memory(self.plan, error, "data", "loading the frozen networks") from error


def dvae_key(model: XTTS, autocast: bool = False) -> str:
    """Names the codes that this DVAE makes: a hash of everything they depend on."""
    hasher = xxhash.xxh3_128(f"{ENCODE_VERSION} {'bf16' if autocast else 'fp32'}".encode())
    for module in (model.dvae.encoder, model.dvae.codebook):
        _add(hasher, module)
    hasher.update(model.mel_stats.detach().cpu().numpy().tobytes())
    return hasher.hexdigest()


def _add(hasher: xxhash.xxh3_128, module: nn.Module) -> None:
    for name, tensor in module.state_dict().items():
        hasher.update(name.encode())
        hasher.update(tensor.detach().cpu().contiguous().numpy().tobytes())
