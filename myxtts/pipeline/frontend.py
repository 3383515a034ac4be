"""The data role's work on a batch: from what the host sent to what a recipe reads. Everything here is frozen.

    Gpt      PCM ─► codes (unless they came from the cache), reference voice ─► conditioning mel
    Dvae     PCM ─► mel
    Decoder  as Gpt, then the frozen GPT ─► latents of a piece of the clip; the piece at 24 kHz; who speaks

On CUDA with static shapes the work is captured once as a graph and replayed: one launch per batch, so that the
trainer's thread is hardly disturbed. Nothing here waits for the device or knows rings and threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from myxtts.config import HOP_SAMPLES, SAMPLE_RATE, SAMPLES_PER_CODE, DataSettings, num_frames_of
from myxtts.data.batches import (
    MAX_CROP_FRAMES,
    MAX_CROP_SAMPLES,
    MIN_CROP_SAMPLES,
    SEGMENT_CODES,
    TOTALS,
    Field,
    Layout,
    Sizes,
    max_codes,
)
from myxtts.devices import CudaGraph, Stream
from myxtts.model.blocks import offsets_of, segment_of
from myxtts.model.conditioning import pack_frames
from myxtts.model.dvae import FRAMES_PER_CODE
from myxtts.model.gpt import pack
from myxtts.model.mel import CONDITIONING_MEL, DVAE_MEL, SPEAKER_SAMPLE_RATE, LogMel, pcm_to_wave, resample
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE, num_samples
from myxtts.model.xtts import XTTS

Tensors = Mapping[str, Tensor]


class Frontend(Protocol):
    """What stands between a batch of the host and a recipe."""

    uses_codes: bool
    outputs: Layout

    def encode(self, batch: Tensors, out: Tensors, sizes: Sizes, codes_known: bool) -> None:
        """Fill `out` from an uploaded batch, both on the data role's device."""

    def used(self, out: Tensors, sizes: Sizes) -> Tensors:
        """The part of `out` that a batch of these sizes fills; all of it under static shapes."""


class GptFrontend(nn.Module):
    """Text ids, codes and packed conditioning mels."""

    uses_codes = True
    mel_stats: Tensor

    def __init__(self, model: XTTS, data: DataSettings, frame_budget: int, autocast: bool = False) -> None:
        super().__init__()
        self.autocast = autocast
        size, numbers = data.batch_size, Field((data.batch_size,), "int32")
        self.dvae = model.dvae
        self.dvae_mel, self.conditioning_mel = LogMel(DVAE_MEL), LogMel(CONDITIONING_MEL)
        self.register_buffer("mel_stats", model.mel_stats)
        self.outputs = Layout(
            {
                "ids": Field((size, data.max_text_length), "int32"),
                "num_ids": numbers,
                "codes": Field((size, max_codes(data)), "int32"),
                "num_codes": numbers,
                "mel": Field((frame_budget, model.dims.gpt.mel_channels), "float32"),
                "num_frames": numbers,
                "weights": Field((size,), "float32"),
                "totals": Field((len(TOTALS),), "float32"),
            }
        )

    @torch.no_grad()
    def encode(self, batch: Tensors, out: Tensors, sizes: Sizes, codes_known: bool) -> None:
        wave = pcm_to_wave(batch["pcm"][:, : sizes.samples], batch["num_samples"])
        for name in ("ids", "num_ids", "num_codes", "weights", "totals"):
            out[name].copy_(batch[name])
        if codes_known:
            out["codes"].copy_(batch["codes"])
        else:
            with torch.autocast(wave.device.type, torch.bfloat16, enabled=self.autocast):
                codes = self._packed_codes(wave, batch, sizes.codes) if sizes.codes else self._codes(wave, batch)
            inside = torch.arange(codes.shape[1], device=codes.device) < batch["num_codes"][:, None]
            out["codes"][:, : codes.shape[1]].copy_(torch.where(inside, codes, 0))
        out["num_frames"].copy_(num_frames_of(batch["crop_samples"]))
        out["mel"][: sizes.frames].copy_(self._crop_mels(wave, batch, out["num_frames"], sizes.frames))

    def used(self, out: Tensors, sizes: Sizes) -> Tensors:
        codes = sizes.samples // SAMPLES_PER_CODE
        ids, codes_used, mel = out["ids"][:, : sizes.ids], out["codes"][:, :codes], out["mel"][: sizes.frames]
        return {**out, "ids": ids, "codes": codes_used, "mel": mel}

    def _packed_codes(self, wave: Tensor, batch: Tensors, budget: int) -> Tensor:
        """Codes [clips, most codes] of clips laid behind each other, a code apart: no padding is encoded."""
        num_codes, num_frames = batch["num_codes"].long(), num_frames_of(batch["num_samples"].long())
        offsets = offsets_of(num_codes + 1)
        clip, place = _places(offsets, budget)
        quarter = place < num_codes[clip]

        def inside(parts: int) -> Tensor:
            """[parts * budget]: which pieces of a code's frames belong to the clip."""
            pieces = parts * place[:, None] + torch.arange(parts, device=wave.device)
            stride = FRAMES_PER_CODE // parts
            return ((pieces * stride < num_frames[clip, None]) & quarter[:, None]).flatten()

        frame = FRAMES_PER_CODE * place[:, None] + torch.arange(FRAMES_PER_CODE, device=wave.device)
        frame = frame.flatten().clamp(0, wave.shape[1] // HOP_SAMPLES)
        rows = (clip.repeat_interleave(FRAMES_PER_CODE), frame)
        mel = self.dvae_mel(wave, self.mel_stats, batch["num_samples"], rows)
        codes = self.dvae.encode_packed(mel, (inside(4), inside(2), quarter))
        places = torch.arange(-(-wave.shape[1] // SAMPLES_PER_CODE), device=wave.device)
        return codes[(offsets[:-1, None] + places).clamp(max=budget - 1)]

    def _codes(self, wave: Tensor, batch: Tensors) -> Tensor:
        """The same clip by clip, for the rare batch that has more codes than there is room for."""
        lengths = batch["num_samples"]
        mel = self.dvae_mel(wave, self.mel_stats, lengths)[..., : wave.shape[1] // HOP_SAMPLES]
        return self.dvae.encode(mel, num_frames_of(lengths))

    def _crop_mels(self, wave: Tensor, batch: Tensors, num_frames: Tensor, budget: int) -> Tensor:
        """Mels of the reference voices, one behind the other, [budget, channels], zeros behind the last."""
        starts, lengths = batch["crop_starts"], batch["crop_samples"]
        places = torch.arange(min(MAX_CROP_SAMPLES, wave.shape[1]), device=wave.device)
        slots = batch["crop_slots"][:, None].long()
        crop = wave[slots, (starts[:, None] + places).clamp(max=wave.shape[1] - 1)]
        crop = torch.where(places < lengths[:, None], crop, 0)
        offsets = offsets_of(num_frames)
        clip, frame = _places(offsets, budget)
        rows = (clip, frame.clamp(0, len(places) // HOP_SAMPLES))
        mel = self.conditioning_mel(crop, self.mel_stats, lengths, rows)
        return torch.where((torch.arange(budget, device=wave.device) < offsets[-1])[:, None], mel, 0)


def _places(offsets: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Of each row of a packed tensor the clip, and its place in the clip; rows behind the last clip count on."""
    rows = torch.arange(budget, device=offsets.device)
    clip = segment_of(rows, offsets).clamp(max=len(offsets) - 2)
    return clip, rows - offsets[clip]


class DvaeFrontend(nn.Module):
    """Mels as the DVAE hears them, silent behind each clip."""

    uses_codes = False
    mel_stats: Tensor

    def __init__(self, model: XTTS, data: DataSettings) -> None:
        super().__init__()
        size = data.batch_size
        self.mel = LogMel(DVAE_MEL)
        self.register_buffer("mel_stats", model.mel_stats)
        self.outputs = Layout(
            {
                "mel": Field((size, model.dims.gpt.mel_channels, max_codes(data) * FRAMES_PER_CODE), "float32"),
                "num_frames": Field((size,), "int32"),
                "weights": Field((size,), "float32"),
                "totals": Field((len(TOTALS),), "float32"),
            }
        )

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


class DecoderFrontend(nn.Module):
    """Latents of the frozen GPT for a piece of every clip, the piece itself at 24 kHz, and who speaks."""

    uses_codes = True

    def __init__(self, model: XTTS, data: DataSettings, frame_budget: int, autocast: bool) -> None:
        super().__init__()
        size, dims = data.batch_size, model.dims
        self.inputs = GptFrontend(model, data, frame_budget, autocast)
        self.gpt = model.gpt
        self.speaker_encoder: nn.Module = model.hifigan_decoder.speaker_encoder  # type: ignore[assignment]
        self.autocast = autocast
        self.outputs = Layout(
            {
                "latents": Field((size, SEGMENT_CODES, dims.gpt.dim), "float32"),
                "wave": Field((size, num_samples(SEGMENT_CODES)), "float32"),
                "speaker": Field((size, dims.speaker_dim), "float32"),
                "weights": Field((size,), "float32"),
                "totals": Field((len(TOTALS),), "float32"),
                "codes": self.inputs.outputs["codes"],
            }
        )
        self._between = self.inputs.outputs

    @torch.no_grad()
    def encode(self, batch: Tensors, out: Tensors, sizes: Sizes, codes_known: bool) -> None:
        device = batch["pcm"].device
        between = self._between.tensors(torch.empty(self._between.num_bytes, dtype=torch.uint8, device=device))
        self.inputs.encode(batch, between, sizes, codes_known)
        frames = pack_frames(between["mel"][: sizes.frames], between["num_frames"], MAX_CROP_FRAMES)
        texts = (between["ids"][:, : sizes.ids], between["num_ids"])
        packed = pack(self.gpt.dims, frames, *texts, between["codes"], between["num_codes"], budget=sizes.tokens)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
            latents = self.gpt.code_latents(packed)
        places = batch["segments"][:, None].long() + torch.arange(SEGMENT_CODES, device=device)
        # A clip shorter than the piece has zeros behind its last latent, and silence behind its last sample.
        present = places < between["num_codes"][:, None]
        places = places.clamp(max=latents.shape[1] - 1)
        chosen = latents.gather(1, places[..., None].expand(-1, -1, latents.shape[2]))
        out["latents"].copy_(torch.where(present[..., None], chosen, 0))
        wave = pcm_to_wave(batch["pcm"][:, : sizes.samples], batch["num_samples"])
        out["wave"].copy_(_piece_24k(wave, batch["segments"], out["wave"].shape[1]))
        out["speaker"].copy_(self._speaker(wave, batch))
        out["codes"].copy_(between["codes"])
        for name in ("weights", "totals"):
            out[name].copy_(batch[name])

    def used(self, out: Tensors, sizes: Sizes) -> Tensors:  # noqa: ARG002 - pieces are all alike
        return out

    def _speaker(self, wave: Tensor, batch: Tensors) -> Tensor:
        """Embeddings of three seconds from the start of the reference voice, the clip repeated where it ends."""
        slots = batch["crop_slots"][:, None].long()
        places = batch["crop_starts"][:, None].long() + torch.arange(MIN_CROP_SAMPLES, device=wave.device)
        heard = wave[slots, places % batch["num_samples"].long()[slots]]
        embedding: Tensor = self.speaker_encoder(resample(heard, SPEAKER_SAMPLE_RATE), l2_norm=True)
        return embedding


def _piece_24k(wave: Tensor, segments: Tensor, width: int) -> Tensor:
    """What SEGMENT_CODES codes from `segments` [clips] on stand for, at 24 kHz, with its surroundings heard."""
    margin = 1470  # samples that become exactly 1600
    span = SEGMENT_CODES * SAMPLES_PER_CODE + 2 * margin
    places = segments[:, None].long() * SAMPLES_PER_CODE - margin + torch.arange(span, device=wave.device)
    inside = (places >= 0) & (places < wave.shape[1])
    piece = torch.where(inside, wave.gather(1, places.clamp(0, wave.shape[1] - 1)), 0)
    first = margin * OUTPUT_SAMPLE_RATE // SAMPLE_RATE
    return resample(piece, OUTPUT_SAMPLE_RATE)[:, first : first + width]


_WAYS = ((True, True), (False, True), (False, False))
"""Codes known; computed for clips packed together; computed clip by clip."""


class CapturedFrontend:
    """A front end whose work is a CUDA graph: inputs are copied in, outputs are copied out, one launch between.

    There is a graph for each way to come by the codes; they share their memory. Make it before any stage runs:
    warming up and capturing allocate, replaying does not.
    """

    def __init__(self, frontend: Frontend, inputs: Layout, sizes: Sizes, stream: Stream) -> None:
        device = stream.device
        self.uses_codes, self.outputs = frontend.uses_codes, frontend.outputs
        self._in = torch.zeros(inputs.num_bytes, dtype=torch.uint8, device=device)
        self._out = torch.zeros(self.outputs.num_bytes, dtype=torch.uint8, device=device)
        batch, out = inputs.tensors(self._in), self.outputs.tensors(self._out)
        for name in ("num_samples", "num_ids", "num_codes", "crop_samples"):
            batch[name].fill_(1)  # the smallest batch there is: no length may be 0
        self._graphs: dict[tuple[bool, bool], CudaGraph[None]] = {}
        pool = None
        for codes_known, packed in _WAYS if frontend.uses_codes else _WAYS[:1]:
            work = partial(frontend.encode, batch, out, sizes if packed else replace(sizes, codes=0), codes_known)
            self._graphs[codes_known, packed] = CudaGraph(work, stream, pool)
            pool = self._graphs[codes_known, packed].pool

    def encode_block(self, batch: Tensor, out: Tensor, sizes: Sizes, codes_known: bool) -> None:
        """The same from block to block, in the current stream."""
        way = (codes_known, codes_known or sizes.codes > 0) if self.uses_codes else _WAYS[0]
        self._in.copy_(batch)
        self._graphs[way].replay()
        out.copy_(self._out)
