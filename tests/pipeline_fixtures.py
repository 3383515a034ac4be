"""A small corpus, a smaller network and feeds of them, for the tests of the pipeline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_voice
from torch import Tensor

from myxtts.config import HOP_SAMPLES, SAMPLE_RATE, DataSettings, num_codes_of
from myxtts.data.batches import (
    SEGMENT_CODES,
    Gatherer,
    GatherJob,
    LatentDims,
    Layout,
    References,
    Sizes,
    fit,
    host_layout,
    segment_codes,
)
from myxtts.data.clips import ClipSet
from myxtts.data.codes import CodesCache
from myxtts.data.order import Batches, Cursor, packed_tokens
from myxtts.data.store import Array, Rows, Store, StoreWriter
from myxtts.devices import Plan
from myxtts.model.gpt import GPTDims
from myxtts.model.mel import CONDITIONING_MEL, DVAE_MEL, LogMel
from myxtts.model.xtts import XTTS, XTTSDims
from myxtts.pipeline.feed import Depths, Feed
from myxtts.pipeline.frontend import Frontend, GptFrontend, Tensors

CPU = torch.device("cpu")
PLANS = {"buffered": Plan(CPU, CPU), "dual": Plan(CPU, CPU, "dual")}
DEPTHS = Depths(host=3, model=3, gatherers=2)
SEED = 5
SMALL = XTTSDims(
    gpt=GPTDims(layers=1, dim=64, heads=1, text_tokens=300, num_codes=32, encoder_layers=1, perceiver_depth=1),
    dvae_hidden=16,
    dvae_codebook_dim=16,
    dvae_blocks=1,
    vocoder_channels=16,
    speaker_dim=16,
    speaker_filters=(8, 8, 8, 8),
)
LATENTS = LatentDims(latent=SMALL.gpt.dim, speaker=SMALL.speaker_dim, segment=SEGMENT_CODES)
SPEECH = DataSettings(batch_size=3, max_mel_frames=330, max_text_length=24, cache_latents=False)
"""Up to 3.8 seconds, so that some reference voices are longer than half a clip; 330 frames are no whole codes."""
SHORT = DataSettings(batch_size=3, max_mel_frames=66, max_text_length=24, cache_latents=False)
"""Less than a second: where only the way of a batch matters."""


def make_clips(folder: Path, data: DataSettings, num_clips: int = 14) -> ClipSet:
    """Voices of many lengths, the longest as long as allowed; some clips share their text, and one its audio."""
    random = np.random.default_rng(3)
    longest = data.max_mel_frames * HOP_SAMPLES - 1
    samples = random.integers(longest // 3, longest, num_clips)
    samples[:4] = longest, longest, longest // 4, longest - HOP_SAMPLES
    audio = [
        (32767 * make_voice(count / SAMPLE_RATE, seed=number)[:count]).astype(np.int16)
        for number, count in enumerate(samples.tolist())
    ]
    texts = [random.integers(3, 300, random.integers(4, data.max_text_length + 1)) for _ in range(num_clips - 3)]
    order = random.permutation(num_clips)
    order[0] = order[1]
    return ClipSet(
        audio=_store(folder / "audio", audio, np.int16),
        ids=_store(folder / "ids", texts, np.int32),
        audio_rows=order,
        ids_rows=random.integers(0, len(texts), num_clips),
        speakers=random.integers(0, 4, num_clips),
        languages=random.integers(0, 18, num_clips),
        corpora=np.zeros(num_clips, np.int64),
        names=[f"clip{number}" for number in range(num_clips)],
    )


def _store(folder: Path, rows: list[Array], dtype: type) -> Store:
    writer = StoreWriter(folder, np.arange(len(rows), dtype=np.uint64))
    writer.append(range(len(rows)), [row.astype(dtype) for row in rows])
    writer.finish({})
    return Store(folder, dtype)


def make_model() -> XTTS:
    """A random network whose codebook lies where the latents are, so that codes differ."""
    torch.manual_seed(0)
    model = XTTS(SMALL).eval().requires_grad_(False)
    model.mel_stats.copy_(torch.linspace(0.5, 2, len(model.mel_stats)))
    wave = torch.from_numpy(make_voice(6.0, seed=90))
    latents = model.dvae._latents(LogMel(DVAE_MEL)(wave[None], model.mel_stats), None)[0]
    chosen = torch.linspace(0, len(latents) - 1, SMALL.gpt.num_codes).long()
    model.dvae.codebook.embed.copy_(latents[chosen.roll(7)].t())
    return model


class Stamps(Frontend):
    """A front end that only copies, so that a torn or repeated batch shows in every sample of it."""

    uses_codes = False
    copied = ("clips", "crop_samples", "weights", "totals")

    def __init__(self, model: XTTS, data: DataSettings, frame_budget: int = 0) -> None:
        super().__init__(model, data, frame_budget)
        layout = host_layout(data)
        self.outputs = Layout({name: layout[name] for name in ("pcm", *self.copied)})

    def encode(self, batch: Tensors, out: Tensors, sizes: Sizes, codes_known: bool) -> None:  # noqa: ARG002
        inside = torch.arange(out["pcm"].shape[1], device=out["pcm"].device) < batch["num_samples"][:, None]
        out["pcm"].copy_(torch.where(inside, batch["pcm"], 0))
        for name in self.copied:
            out[name].copy_(batch[name])


@dataclass(repr=False)
class Corpus:
    """Clips in batches, and whatever a test makes of them."""

    data: DataSettings
    clips: ClipSet
    model: XTTS
    voices: Rows | None = None

    @classmethod
    def make(cls, folder: Path, data: DataSettings = SPEECH, num_clips: int = 14) -> Corpus:
        return cls(data, make_clips(folder, data, num_clips), make_model())

    @property
    def batches(self) -> Batches:
        return Batches(packed_tokens(self.clips.num_ids, self.clips.num_samples), self.data.batch_size, SEED)

    def cache(self, folder: Path, dvae_key: str = "dvae") -> CodesCache:
        hashes = self.clips.audio.hashes[self.clips.audio_rows]
        return CodesCache.open(folder, hashes, num_codes_of(self.clips.num_samples), dvae_key)

    @property
    def references(self) -> References:
        return References(self.clips, self.voices)

    def latents(self, folder: Path) -> CodesCache:
        lengths = LATENTS.row_lengths(num_codes_of(self.clips.num_samples))
        return CodesCache.open(folder, self.references.made_from(SEED, self.clips), lengths, "gpt", "latents")

    def gatherer(self, codes: CodesCache | None = None, data: DataSettings | None = None) -> Gatherer:
        latents = LATENTS if codes is not None and codes.kind == "latents" else None
        segment = segment_codes(self.model.dims.reads_mels)
        return Gatherer(
            self.clips, self.batches, data or self.data, SEED, codes, self.references, latents, segment
        )

    def feed(
        self,
        plan: Plan = PLANS["buffered"],
        make_frontend: Callable[[XTTS, DataSettings, int], Frontend] = GptFrontend,
        *,
        codes: CodesCache | None = None,
        data: DataSettings | None = None,
        depths: Depths = DEPTHS,
        **options: object,
    ) -> Feed:
        """A feed that the caller starts and closes."""
        data = data or self.data
        gatherer = self.gatherer(codes, data)
        frontend = make_frontend(self.model, data, gatherer.frame_budget).to(plan.data)
        return Feed(gatherer, frontend, plan, data, depths, **options)


def reading_mels(corpus: Corpus) -> Corpus:
    """The same with a decoder that reads mels."""
    model = XTTS(replace(SMALL, decoder_input="mel")).eval().requires_grad_(False)
    own = {name: value for name, value in corpus.model.state_dict().items() if "waveform_decoder" not in name}
    model.load_state_dict(own, strict=False)
    return replace(corpus, model=model)


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus.make(tmp_path_factory.mktemp("speech"), SPEECH)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus.make(tmp_path_factory.mktemp("short"), SHORT)


@dataclass
class Read:
    """A copy of a batch that has been given back."""

    tensors: dict[str, Tensor]
    sizes: Sizes
    after: Cursor


def read(feed: Feed, count: int = 1000) -> list[Read]:
    """Up to `count` batches of a started feed, copied to the host."""
    batches: list[Read] = []
    while len(batches) < count:
        with feed.next() as batch:
            if batch is None:
                break
            with feed.model_stream.use():
                tensors = {name: tensor.cpu().clone() for name, tensor in batch.tensors.items()}
            batches.append(Read(tensors, batch.sizes, batch.after))
    return batches


def assert_same(ours: list[Read], theirs: list[Read]) -> None:
    """Bit by bit."""
    assert [batch.after for batch in ours] == [batch.after for batch in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.tensors.keys() == other.tensors.keys()
        for name, tensor in one.tensors.items():
            assert torch.equal(tensor, other.tensors[name]), name


def jobs(corpus: Corpus, count: int) -> list[GatherJob]:
    """What a feed should deliver."""
    return list(corpus.gatherer().jobs(Cursor(), 1, count))


def wave_alone(corpus: Corpus, clip: int) -> Tensor:
    """A clip as a float wave [1, samples], with nothing behind it."""
    return torch.from_numpy(corpus.clips.audio[corpus.clips.audio_rows[clip]].astype(np.float32) / 32768)[None]


def codes_alone(corpus: Corpus, clip: int) -> Tensor:
    """The codes of a clip that the DVAE hears alone."""
    mel = LogMel(DVAE_MEL)(wave_alone(corpus, clip), corpus.model.mel_stats)
    return corpus.model.dvae.encode(mel)[0]


def references_alone(corpus: Corpus, clips: Rows, epoch: int) -> list[Tensor]:
    """The reference voice [1, samples] of each clip of a batch."""
    chosen = fit(corpus.references.crops(SEED, epoch, clips), corpus.gatherer().frame_budget)
    places = zip(*chosen, strict=True)
    return [wave_alone(corpus, source)[:, start : start + samples] for source, start, samples in places]


def crop_mels_alone(corpus: Corpus, clips: Rows, epoch: int) -> list[Tensor]:
    """The conditioning mel [frames, channels] of each reference voice, heard alone."""
    mel = LogMel(CONDITIONING_MEL)
    return [mel(wave, corpus.model.mel_stats)[0].t() for wave in references_alone(corpus, clips, epoch)]


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """No thread and no open file more than before."""
    threads, files = set(threading.enumerate()), num_open_files()
    yield
    assert set(threading.enumerate()) <= threads
    assert num_open_files() <= files


def worker_threads() -> set[str]:
    """Names of the threads that work for a feed."""
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if name.startswith(("gather-", "upload", "encode", "handoff", "keep"))}


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a Path keeps the folder itself open


def wait_for(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
