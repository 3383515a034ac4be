"""What is measured over many clips: the losses of the validation clips, and what mels are divided by."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from myxtts.assembly.feeds import FeedMaker
from myxtts.config import HOP_SAMPLES, Settings
from myxtts.data.clips import ClipSet
from myxtts.model.mel import DVAE_MEL, LogMel
from myxtts.training.recipes import Recipe

MEL_STATISTICS_CLIPS = 256


def validate(maker: FeedMaker, recipe: Recipe, settings: Settings) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Mean losses over all validation clips and ranks, "total" the one that decides; pictures of one batch."""
    sums: dict[str, Tensor] = {}
    pictures: dict[str, Tensor] = {}
    with maker.validation() as feed, feed.model_lane.use():
        autocast = settings.data.mixed_precision and maker.plan.model.type == "cuda"
        while True:
            with feed.next() as batch:
                if batch is None:
                    break
                with torch.autocast(maker.plan.model.type, torch.bfloat16, enabled=autocast):
                    found = recipe.evaluate(batch.tensors, batch.sizes)
                    if not pictures:  # copied while the batch is held
                        found_pictures = recipe.pictures(batch.tensors, batch.sizes)
                        pictures = {name: picture.float().cpu() for name, picture in found_pictures.items()}
                for name, value in found.items():
                    sums[name] = sums.get(name, torch.zeros_like(value)) + value.float()
        values = torch.stack(list(sums.values()))
        if maker.plan.world_size > 1:
            dist.all_reduce(values)
        means = dict(zip(sums, values.tolist(), strict=True))
    losses = {"total": means["sum"] / max(means["count"], 1e-6)}
    for name in means:
        if name.endswith("_sum"):
            part = name.removesuffix("_sum")
            losses[part] = means[name] / max(means[f"{part}_count"], 1e-6)
    return losses, pictures


@torch.no_grad()
def mel_statistics(clips: ClipSet, device: torch.device) -> Tensor:
    """What mels are divided by, [80]: the root mean square of each band over some training clips."""
    log_mel = LogMel(DVAE_MEL).to(device)
    chosen = range(0, len(clips), max(len(clips) // MEL_STATISTICS_CLIPS, 1))
    total = torch.zeros(DVAE_MEL.num_mels, dtype=torch.float64, device=device)
    num_frames = 0
    for clip in chosen:
        pcm = torch.from_numpy(clips.audio[int(clips.audio_rows[clip])].copy()).to(device)
        mel = log_mel(pcm.float() / 32768)[:, : len(pcm) // HOP_SAMPLES + 1]
        total += mel.double().square().sum(1)
        num_frames += mel.shape[1]
    return (total / max(num_frames, 1)).sqrt().float().cpu()
