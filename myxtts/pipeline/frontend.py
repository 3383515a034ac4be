"""Front ends: frozen networks that compute a recipe's inputs from an uploaded batch, on the data role's device.

    dvae      PCM ─► mel
    speaker   PCM, reference audio ─► a crop of each at 16 kHz
    gpt       PCM ─► codes, unless cached; reference audio ─► conditioning mel
    decoder   as gpt, then GPT ─► latents of a segment of each clip; the segment at 24 kHz; speaker embedding
              or codes ─ DVAE ─► mels in place of the latents

On CUDA with static shapes a front end is captured as a CUDA graph: one launch per batch, which hardly disturbs the
trainer's thread. Nothing here waits for the device or knows rings and threads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from myxtts.config import HOP_SAMPLES, SAMPLE_RATE, SAMPLES_PER_CODE, DataSettings, num_frames_of
from myxtts.data.batches import (
    MARGIN_CODES,
    MAX_CROP_FRAMES,
    MIN_CROP_SAMPLES,
    TOTALS,
    Block,
    Field,
    Gathered,
    LatentDims,
    Layout,
    Sizes,
    max_codes,
    segment_codes,
)
from myxtts.devices import CudaGraph, Stream
from myxtts.model.blocks import offsets_of, segment_of
from myxtts.model.conditioning import pack_frames
from myxtts.model.dvae import FRAMES_PER_CODE
from myxtts.model.gpt import pack
from myxtts.model.mel import CONDITIONING_MEL, DVAE_MEL, SPEAKER_SAMPLE_RATE, LogMel, pcm_to_wave, resample
from myxtts.model.vocoder import CROP_SAMPLES, OUTPUT_SAMPLE_RATE, SAMPLES_PER_FRAME, frames_of, num_samples
from myxtts.model.xtts import XTTS, speaker_of_latents

Tensors = Mapping[str, Tensor]


class Frontend(nn.Module, ABC):
    """Computes the inputs of one recipe."""

    uses_codes: bool  # True if the outputs include codes, which can be cached
    uses_references = True
    outputs: Layout
    latents: LatentDims | None = None
    """Sizes of the latents that are cached, if any are."""
    keeps: tuple[str, ...] = ("codes",)
    """The tensors that go to the cache: outputs, or buffers that hold those of the last batch."""
    mel_stats: Tensor

    def __init__(self, model: XTTS, data: DataSettings, frame_budget: int = 0, autocast: bool = False) -> None:  # noqa: ARG002
        super().__init__()
        self.autocast = autocast
        self.register_buffer("mel_stats", model.mel_stats)

    @abstractmethod
    def encode(self, batch: Tensors, out: Tensors, sizes: Sizes, codes_known: bool) -> None:
        """Fill `out` from an uploaded batch; `codes_known` if the batch holds what the cache keeps."""

    def used(self, out: Tensors, sizes: Sizes) -> Tensors:  # noqa: ARG002 - the sizes of some outputs are fixed
        """The part of `out` that a batch of these sizes fills; all of it under static shapes."""
        return out

    def encode_block(self, source: Block, target: Block, gathered: Gathered) -> None:
        self.encode(source.tensors, target.tensors, gathered.sizes, gathered.codes_known)


def _outputs(batch_size: int, **fields: Field) -> Layout:
    weights, totals = Field((batch_size,), "float32"), Field((len(TOTALS),), "float32")
    return Layout({**fields, "weights": weights, "totals": totals})


class GptFrontend(Frontend):
    """Text ids, codes and packed conditioning mels."""

    uses_codes = True

    def __init__(self, model: XTTS, data: DataSettings, frame_budget: int, autocast: bool = False) -> None:
        super().__init__(model, data, frame_budget, autocast)
        size, numbers = data.batch_size, Field((data.batch_size,), "int32")
        self.dvae = model.dvae
        self.dvae_mel, self.conditioning_mel = LogMel(DVAE_MEL), LogMel(CONDITIONING_MEL)
        self.outputs = _outputs(
            size,
            ids=Field((size, data.max_text_length), "int32"),
            num_ids=numbers,
            codes=Field((size, max_codes(data)), "int32"),
            num_codes=numbers,
            mel=Field((frame_budget, model.dims.gpt.mel_channels), "float32"),
            num_frames=numbers,
        )

    @torch.no_grad()
    def encode(self, batch: Tensors, out: Tensors, sizes: Sizes, codes_known: bool) -> None:
        for name in ("ids", "num_ids", "num_codes", "weights", "totals"):
            out[name].copy_(batch[name])
        out["num_frames"].copy_(num_frames_of(batch["crop_samples"]))
        out["mel"][: sizes.frames].copy_(self._crop_mels(batch, out["num_frames"], sizes.frames))
        wave = pcm_to_wave(batch["pcm"][:, : sizes.samples], batch["num_samples"])
        if codes_known:
            out["codes"].copy_(batch["codes"])
        else:
            with torch.autocast(wave.device.type, torch.bfloat16, enabled=self.autocast):
                codes = self._codes(wave, batch, sizes.codes)
            inside = torch.arange(codes.shape[1], device=codes.device) < batch["num_codes"][:, None]
            out["codes"][:, : codes.shape[1]].copy_(torch.where(inside, codes, 0))

    def used(self, out: Tensors, sizes: Sizes) -> Tensors:
        codes = out["codes"][:, : sizes.samples // SAMPLES_PER_CODE]
        return {**out, "ids": out["ids"][:, : sizes.ids], "codes": codes, "mel": out["mel"][: sizes.frames]}

    def _codes(self, wave: Tensor, batch: Tensors, budget: int) -> Tensor:
        """Codes [clips, most codes], packed with one code between two clips so that no padding is encoded.

        Without a budget, for the rare batch that exceeds it, the padded clips are encoded.
        """
        lengths = batch["num_samples"]
        if budget == 0:
            mel = self.dvae_mel(wave, self.mel_stats, lengths)[..., : wave.shape[1] // HOP_SAMPLES]
            return self.dvae.encode(mel, num_frames_of(lengths))
        num_codes, num_frames = batch["num_codes"].long(), num_frames_of(lengths.long())
        offsets = offsets_of(num_codes + 1)
        clip, place = _places(offsets, budget)
        is_code = place < num_codes[clip]

        def inside(parts: int) -> Tensor:
            """[parts * budget]: True for the frames, or pairs of frames, that belong to the clip."""
            pieces = parts * place[:, None] + torch.arange(parts, device=wave.device)
            stride = FRAMES_PER_CODE // parts
            return ((pieces * stride < num_frames[clip, None]) & is_code[:, None]).flatten()

        frame = FRAMES_PER_CODE * place[:, None] + torch.arange(FRAMES_PER_CODE, device=wave.device)
        frame = frame.flatten().clamp(0, wave.shape[1] // HOP_SAMPLES)
        rows = (clip.repeat_interleave(FRAMES_PER_CODE), frame)
        mel = self.dvae_mel(wave, self.mel_stats, lengths, rows)
        codes = self.dvae.encode_packed(mel, (inside(4), inside(2), is_code))
        places = torch.arange(-(-wave.shape[1] // SAMPLES_PER_CODE), device=wave.device)
        return codes[(offsets[:-1, None] + places).clamp(max=budget - 1)]

    def _crop_mels(self, batch: Tensors, num_frames: Tensor, budget: int) -> Tensor:
        """Packed mels of the reference crops, [budget, channels], zeros after the last."""
        lengths = batch["crop_samples"]
        crop = pcm_to_wave(batch["reference"], lengths)
        offsets = offsets_of(num_frames)
        clip, frame = _places(offsets, budget)
        rows = (clip, frame.clamp(0, crop.shape[1] // HOP_SAMPLES))
        mel = self.conditioning_mel(crop, self.mel_stats, lengths, rows)
        return torch.where((torch.arange(budget, device=mel.device) < offsets[-1])[:, None], mel, 0)


def _places(offsets: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Clip index and position within the clip of each packed row; padding rows keep counting."""
    rows = torch.arange(budget, device=offsets.device)
    clip = segment_of(rows, offsets).clamp(max=len(offsets) - 2)
    return clip, rows - offsets[clip]


class DvaeFrontend(Frontend):
    """Mels for the DVAE, zero after each clip."""

    uses_codes = uses_references = False

    def __init__(self, model: XTTS, data: DataSettings, frame_budget: int = 0, autocast: bool = False) -> None:
        super().__init__(model, data, frame_budget, autocast)
        self.mel = LogMel(DVAE_MEL)
        shape = (data.batch_size, model.dims.gpt.mel_channels, max_codes(data) * FRAMES_PER_CODE)
        numbers = Field((data.batch_size,), "int32")
        self.outputs = _outputs(data.batch_size, mel=Field(shape, "float32"), num_frames=numbers)

    @torch.no_grad()
    def encode(self, batch: Tensors, out: Tensors, sizes: Sizes, codes_known: bool) -> None:  # noqa: ARG002
        wave = pcm_to_wave(batch["pcm"][:, : sizes.samples], batch["num_samples"])
        frames = wave.shape[1] // HOP_SAMPLES
        mel = self.mel(wave, self.mel_stats, batch["num_samples"])[..., :frames]
        out["num_frames"].copy_(num_frames_of(batch["num_samples"]))
        inside = torch.arange(frames, device=mel.device) < out["num_frames"][:, None]
        out["mel"][..., :frames].copy_(torch.where(inside[:, None], mel, 0))
        for name in ("weights", "totals"):
            out[name].copy_(batch[name])

    def used(self, out: Tensors, sizes: Sizes) -> Tensors:
        return {**out, "mel": out["mel"][..., : sizes.samples // HOP_SAMPLES]}


class SpeakerFrontend(Frontend):
    """Two crops of each voice at 16 kHz, one of the clip and one of its reference, and the number of the voice."""

    uses_codes = False

    def __init__(self, model: XTTS, data: DataSettings, frame_budget: int = 0, autocast: bool = False) -> None:
        super().__init__(model, data, frame_budget, autocast)
        size = data.batch_size
        crops = Field((size, 2, CROP_SAMPLES), "float32")
        self.outputs = _outputs(size, crops=crops, voices=Field((size,), "int32"))

    @torch.no_grad()
    def encode(self, batch: Tensors, out: Tensors, sizes: Sizes, codes_known: bool) -> None:  # noqa: ARG002
        span = CROP_SAMPLES * SAMPLE_RATE // SPEAKER_SAMPLE_RATE
        wave = pcm_to_wave(batch["pcm"][:, : sizes.samples], batch["num_samples"])
        clip = _looped(wave, batch["num_samples"], span, batch["segments"] * SAMPLES_PER_CODE)
        reference = pcm_to_wave(batch["reference"], batch["crop_samples"])
        other = _looped(reference, batch["crop_samples"], span)
        out["crops"].copy_(resample(torch.stack([clip, other], 1), SPEAKER_SAMPLE_RATE))
        for name in ("voices", "weights", "totals"):
            out[name].copy_(batch[name])


def _looped(wave: Tensor, lengths: Tensor, width: int, starts: Tensor | None = None) -> Tensor:
    """`width` samples of each clip from `starts` on; a clip that ends before is repeated."""
    places = torch.arange(width, device=wave.device) + (0 if starts is None else starts[:, None].long())
    return wave.gather(1, places % lengths[:, None].long())


class DecoderFrontend(Frontend):
    """Latents of the frozen GPT for a segment of every clip, the segment at 24 kHz, and the speaker embedding.

    For a decoder that reads mels, those that the frozen DVAE decodes stand before the latents.

    The latents have a margin of MARGIN_CODES on either side, in which the first and the last of the clip are
    repeated. Also the codes of the segment, -1 after the end of the clip.
    """

    uses_codes = True
    all_latents: Tensor  # bits of those of the last batch that was not in the cache

    def __init__(self, model: XTTS, data: DataSettings, frame_budget: int, autocast: bool = False) -> None:
        super().__init__(model, data, frame_budget, autocast)
        self.inputs = GptFrontend(model, data, frame_budget, autocast)
        self.gpt, self.reads_mels = model.gpt, model.dims.reads_mels
        self.speaker_encoder: nn.Module = model.hifigan_decoder.speaker_encoder  # type: ignore[assignment]
        self.speaker_is_trained, self.speaker_dim = model.speaker_is_trained, model.dims.speaker_dim
        self.num_codes = segment_codes(self.reads_mels)
        size, dim = data.batch_size, model.dims.gpt.dim
        if data.cache_latents:
            self.latents, self.keeps = (
                LatentDims(dim, self.speaker_dim, self.num_codes),
                ("codes", "all_latents", "speaker"),
            )
            every = torch.zeros(size, max_codes(data), dim, dtype=torch.int16)
            self.register_buffer("all_latents", every, persistent=False)
        self.outputs = _outputs(
            size,
            latents=Field((size, self.num_codes + 2 * MARGIN_CODES, model.dims.decoder_dim), "float32"),
            wave=Field((size, num_samples(self.num_codes)), "float32"),
            speaker=Field((size, model.dims.speaker_dim), "float32"),
            segment_codes=Field((size, self.num_codes), "int32"),
            codes=self.inputs.outputs["codes"],
        )

    @torch.no_grad()
    def encode(self, batch: Tensors, out: Tensors, sizes: Sizes, codes_known: bool) -> None:
        if self.latents is not None and codes_known:
            latents = batch["latents"].view(torch.bfloat16)
            for name in ("speaker", "codes"):
                out[name].copy_(batch[name])
        else:
            latents = self._encode_latents(batch, out, sizes, codes_known)
        if self.reads_mels:
            with torch.autocast(latents.device.type, torch.bfloat16, enabled=self.autocast):
                mels = self.inputs.dvae.mel_rows(out["codes"].long(), self.mel_stats, batch["num_codes"])
            mels = self._segment(mels, batch, math.log(DVAE_MEL.log_floor))
            latents = torch.cat([mels.float(), latents.float()], 2)
        out["latents"].copy_(latents)
        segments = batch["segments"].long()
        places = segments[:, None] + torch.arange(self.num_codes, device=segments.device)
        codes = out["codes"].gather(1, places.clamp(max=out["codes"].shape[1] - 1))
        out["segment_codes"].copy_(torch.where(places < batch["num_codes"][:, None], codes, -1))
        wave = pcm_to_wave(batch["pcm"][:, : sizes.samples], batch["num_samples"])
        out["wave"].copy_(_segment_24k(wave, segments, self.num_codes))
        for name in ("weights", "totals"):
            out[name].copy_(batch[name])

    def _encode_latents(self, batch: Tensors, out: Tensors, sizes: Sizes, codes_known: bool) -> Tensor:
        """Latents of the segment and its margins; writes codes, speaker embeddings, and all latents to cache."""
        device, layout = batch["pcm"].device, self.inputs.outputs
        between = layout.tensors(torch.empty(layout.num_bytes, dtype=torch.uint8, device=device))
        self.inputs.encode(batch, between, sizes, codes_known)
        out["codes"].copy_(between["codes"])
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
            latents, voices = self._latents(between, sizes)
        if self.latents is not None:
            latents = latents.bfloat16()  # as they are kept
            self.all_latents[:, : latents.shape[1]].copy_(latents.view(torch.int16))
        if self.speaker_is_trained:  # of the first three seconds of the reference; a shorter one is repeated
            lengths = batch["crop_samples"]
            reference = _looped(pcm_to_wave(batch["reference"], lengths), lengths, MIN_CROP_SAMPLES)
            out["speaker"].copy_(self.speaker_encoder(resample(reference, SPEAKER_SAMPLE_RATE), l2_norm=True))
        elif voices is not None:
            out["speaker"].copy_(speaker_of_latents(voices, self.speaker_dim))
        return self._segment(latents, batch, 0.0)

    def _segment(self, rows: Tensor, batch: Tensors, silence: float) -> Tensor:
        """Rows of the codes of all clips, cut to the segments and their margins; `silence` after short clips.

        A clip shorter than the segment has silence after its last sample. Its latents are not known and are zeros.
        """
        num_codes = batch["num_codes"][:, None]
        places = torch.arange(self.num_codes + 2 * MARGIN_CODES, device=rows.device) - MARGIN_CODES
        places = batch["segments"].long()[:, None] + places
        present = places < num_codes + MARGIN_CODES
        places = torch.minimum(places, num_codes - 1).clamp(0, rows.shape[1] - 1)
        chosen = rows.gather(1, places[..., None].expand(-1, -1, rows.shape[2]))
        return torch.where(present[..., None], chosen, silence)

    def _latents(self, batch: Tensors, sizes: Sizes) -> tuple[Tensor, Tensor | None]:
        """Latents of all codes; conditioning latents of the voices, if these stand in for speaker embeddings."""
        codes, num_codes = batch["codes"], batch["num_codes"]
        frames = pack_frames(batch["mel"][: sizes.frames], batch["num_frames"], MAX_CROP_FRAMES)
        texts = (batch["ids"][:, : sizes.ids], batch["num_ids"])
        packed = pack(self.gpt.dims, frames, *texts, codes, num_codes, budget=sizes.tokens)
        return self.gpt.code_latents(packed), None if self.speaker_is_trained else self.gpt.condition(frames)


def _segment_24k(wave: Tensor, segments: Tensor, num_codes: int) -> Tensor:
    """The audio of a number of codes from `segments` [clips] on, at 24 kHz [clips, samples].

    It begins whole frames of the generator after the first latent of the margin. It is resampled with more audio
    on either side, so that its ends see their real neighbours.
    """
    extra = 1470  # becomes exactly 1600 samples
    span = (num_codes + MARGIN_CODES + 1) * SAMPLES_PER_CODE + 2 * extra
    first = (segments[:, None] - MARGIN_CODES) * SAMPLES_PER_CODE - extra
    places = first + torch.arange(span, device=wave.device)
    inside = (places >= 0) & (places < wave.shape[1])
    segment = torch.where(inside, wave.gather(1, places.clamp(0, wave.shape[1] - 1)), 0)
    start = extra * OUTPUT_SAMPLE_RATE // SAMPLE_RATE + frames_of(MARGIN_CODES) * SAMPLES_PER_FRAME
    return resample(segment, OUTPUT_SAMPLE_RATE)[:, start : start + num_samples(num_codes)]


FRONTENDS: dict[str, type[Frontend]] = {
    "dvae": DvaeFrontend,
    "speaker": SpeakerFrontend,
    "gpt": GptFrontend,
    "decoder": DecoderFrontend,
}
"""The front end of each stage of `config.STAGES`."""
_WAYS = ((True, True), (False, True), (False, False))
"""(codes known, packed): codes from the cache, encoded packed, or encoded with padding."""


class CudaGraphFrontend:
    """A front end as CUDA graphs: the batch is copied in, the graph is replayed, the outputs are copied out.

    There is a graph for each way to obtain the codes; they share their memory. Create it before any worker runs:
    warming up and capturing allocate, replaying does not.
    """

    def __init__(self, frontend: Frontend, inputs: Layout, sizes: Sizes, stream: Stream) -> None:
        self._uses_codes = frontend.uses_codes
        self._in, self._out = Block(inputs, stream.device), Block(frontend.outputs, stream.device)
        for name in ("num_samples", "num_ids", "num_codes", "crop_samples"):
            self._in.tensors[name].fill_(1)  # no length may be 0
        self._graphs: dict[tuple[bool, bool], CudaGraph[None]] = {}
        encode, pool = partial(frontend.encode, self._in.tensors, self._out.tensors), None
        for codes_known, packed in _WAYS if frontend.uses_codes else _WAYS[:1]:
            work = partial(encode, sizes if packed else replace(sizes, codes=0), codes_known)
            self._graphs[codes_known, packed] = CudaGraph(work, stream, pool)
            pool = self._graphs[codes_known, packed].pool

    def encode_block(self, source: Block, target: Block, gathered: Gathered) -> None:
        """The same as `Frontend.encode_block`, in the current stream."""
        codes_known = gathered.codes_known or not self._uses_codes
        self._in.memory.copy_(source.memory)
        self._graphs[codes_known, codes_known or gathered.sizes.codes > 0].replay()
        target.memory.copy_(self._out.memory)
