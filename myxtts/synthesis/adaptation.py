"""Adapts a voice to its recordings: offsets for the flow are learnt, the weights of the model stay as they are.

    recording ─ DVAE ─► codes ─ GPT ─► latents ─┐
              └─► HiFi-GAN's mel ───────────────┴─► loss of the flow ─► offsets for its blocks

The flow turns the embedding of a stranger into a voice that it was trained on. The offsets, which are added to
the scale and the shift of each block (as in AdaSpeech, Chen et al. 2021), are 5,120 numbers that change the timbre
and say nothing about words. Ten seconds of speech are enough for them, and no text is needed: the GPT reads an
empty one. The offsets are part of the voice, so voices with different offsets can share a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from myxtts.audio import Pcm
from myxtts.config import SAMPLE_RATE
from myxtts.errors import NO_PROGRESS, DatasetError, Progress, progress_bar
from myxtts.model.flow import NUM_OFFSETS
from myxtts.model.gpt import GPT, heard_latents
from myxtts.model.mel import DVAE_MEL, LogMel, resample
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE, HifiGanDecoder, HifiGanMel

if TYPE_CHECKING:
    from myxtts.synthesis.vocoding import Codec
    from myxtts.synthesis.voices import Voice

STEPS, LEARNING_RATE = 150, 0.03
SEGMENTS, SEGMENT_FRAMES = 4, 256  # of a step; 2.7 s each
EXAGGERATION = 1.15  # of what was learnt: the person is recognised more often, at a small loss in quality
EDGE_FRAMES = 8  # left out at either end of a segment: most of their neighbours lie outside
PIECE_SECONDS, LEAST_PIECE_SECONDS = 8, 1  # of a recording that the GPT hears at once


def adapted(
    voice: Voice,
    recordings: Sequence[Pcm],
    seconds: int,
    gpt: GPT,
    codec: Codec,
    fingerprint: str,
    progress: Progress = NO_PROGRESS,
) -> Voice:
    """The voice with offsets learnt from the first `seconds` of its recordings; always the same on one machine."""
    device = codec.mel_stats.device
    pieces = [flow_example(piece, voice, gpt, codec) for piece in _pieces(recordings, seconds, device)]
    given, target = (torch.cat(each, 2) for each in zip(*pieces, strict=True))
    length = min(SEGMENT_FRAMES, given.shape[2])
    embedding = voice.speaker.to(device)
    offsets = torch.zeros(NUM_OFFSETS, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([offsets], lr=LEARNING_RATE, betas=(0.9, 0.99))
    draws = torch.Generator().manual_seed(0)  # on the CPU: the same on every device
    with torch.enable_grad(), progress_bar(progress, f"Learning the voice {voice.name}", STEPS) as advance:
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * _schedule(step)
            first = torch.randint(given.shape[2] - length + 1, (SEGMENTS, 1), generator=draws)
            frames = (first + torch.arange(length)).to(device)
            wanted = target[0, :, frames].transpose(0, 1)
            noise = torch.randn(wanted.shape, generator=draws).to(device)
            times = torch.rand(SEGMENTS, generator=draws).to(device)
            g = torch.cat([embedding, offsets]).expand(SEGMENTS, -1)[:, :, None]
            errors = codec.flow.loss(wanted, given[0, :, frames].transpose(0, 1), g, noise, times)
            edge = min(EDGE_FRAMES, length // 4)
            optimizer.zero_grad()
            errors[..., edge : length - edge].mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            advance(1)
    learnt = EXAGGERATION * offsets.detach().cpu()
    if not learnt.isfinite().all():
        raise DatasetError(
            f"The voice {voice.name!r} could not be learnt: the recording or the weights are damaged."
        )
    return replace(voice, offsets=learnt, fingerprint=fingerprint)


def _schedule(step: int) -> float:
    """The share of the learning rate: a short warm-up, then half a cosine."""
    return min(1.0, (step + 1) / (STEPS / 10)) * (1 + math.cos(math.pi * step / STEPS)) / 2


def _pieces(recordings: Sequence[Pcm], seconds: int, device: torch.device) -> Iterator[Tensor]:
    """Waves [1, samples] of a few seconds; the last one of a recording may be shorter."""
    room, least = seconds * SAMPLE_RATE, LEAST_PIECE_SECONDS * SAMPLE_RATE
    for pcm in recordings:
        wave = torch.from_numpy(pcm[:room]).to(device).float() / 32768
        room -= len(wave)
        parts = torch.split(wave, PIECE_SECONDS * SAMPLE_RATE)
        yield from (part[None] for part in parts if part is parts[0] or len(part) >= least)
        if room < least:
            return


@torch.no_grad()
def flow_example(wave: Tensor, voice: Voice, gpt: GPT, codec: Codec) -> tuple[Tensor, Tensor]:
    """What the flow is given for a wave, and what it should draw: [1, channels, frames] each."""
    codes = codec.dvae.encode(LogMel(DVAE_MEL).to(wave.device)(wave, codec.mel_stats))
    latents = heard_latents(gpt, voice.latents, codes[0])
    rows = torch.cat([codec.dvae.mel_rows(codes, codec.mel_stats), latents[None]], 2)
    given = HifiGanDecoder.frames(rows, are_mels=True)
    target = HifiGanMel().to(wave.device)(resample(wave, OUTPUT_SAMPLE_RATE)[:, None])
    length = min(given.shape[2], target.shape[2])
    return given[..., :length], target[..., :length]
