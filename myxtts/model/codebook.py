"""The vectors that codes stand for: finding the nearest, moving them to the means of what chose them, reviving.

Van den Oord et al., "Neural Discrete Representation Learning", appendix A.1. Knows latents and codes, not what
they are made of. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEAD_SHARE, FRESH_SHARE = 0.01, 0.1
"""Of the mean code's use: below the one a code is dead, with the other it starts again. Between them lie about
230 updates, in which a fresh code must be chosen; started as a mean code it would be missed for twice as long."""

InPlace = Callable[[Tensor], object]
"""Changes a tensor in place on every process alike: a sum over all (`all_reduce`) or one's value for all."""


class Usage(NamedTuple):
    """How evenly the codebook is used, over about the last hundred updates; tensors on the codebook's device."""

    counts: Tensor
    """Mean number of latents per update that chose each code, [num_tokens]."""
    used: Tensor
    """Number of codes that are not dead."""
    perplexity: Tensor
    """exp(entropy) of the choice: `num_tokens` when all codes are used alike, 1 when only one is."""


class Codebook(nn.Module):
    """The vectors that codes stand for, and the running means they are made of. Never sees a gradient."""

    embed: Tensor
    """The vectors as columns, [dim, num_tokens]: `embed_avg` divided by the smoothed `cluster_size`."""
    cluster_size: Tensor
    """Running mean of the number of latents per update that chose each code, [num_tokens]."""
    embed_avg: Tensor
    """Running mean of the sum of these latents, [dim, num_tokens]."""

    def __init__(self, dim: int, num_tokens: int, decay: float = 0.99, eps: float = 1e-5) -> None:
        super().__init__()
        self.decay, self.eps = decay, eps
        vectors = torch.randn(dim, num_tokens)
        self.register_buffer("embed", vectors)
        self.register_buffer("cluster_size", torch.zeros(num_tokens))
        self.register_buffer("embed_avg", vectors.clone())

    @property
    def is_trained(self) -> bool:
        """Whether a latent ever chose a code: until then the vectors are chance."""
        return bool(self.cluster_size.any())

    def nearest(self, latents: Tensor) -> Tensor:
        """Codes [...] of the vectors nearest to latents [..., dim]; of equally near ones the lowest code."""
        with torch.autocast(latents.device.type, enabled=False):
            points, vectors = latents.flatten(0, -2).float(), self.embed.float()
            # |x - v|² multiplied out needs one matrix product instead of a [points, dim, codes] difference.
            # |x|² is the same for all codes, but rounds near ties to ties as the reference does.
            distances = points.square().sum(1, keepdim=True) - 2 * (points @ vectors)
            distances = distances + vectors.square().sum(0, keepdim=True)
            return distances.argmin(dim=1).view(latents.shape[:-1])

    def vectors(self, codes: Tensor) -> Tensor:
        """The vectors [..., dim] of codes [...]."""
        return F.embedding(codes, self.embed.t())

    @torch.no_grad()
    def update(
        self,
        latents: Tensor,
        codes: Tensor,
        mask: Tensor | None = None,
        all_reduce: InPlace | None = None,
        decay: float | None = None,
    ) -> None:
        """Moves every vector towards the mean of the latents that chose it.

        latents [..., dim], codes [...], mask [...] with 0 for what does not count. `all_reduce` adds its argument
        up over the processes; it is called once, so that all of them make the same step. A `decay` lower than the
        codebook's own follows latents that still move fast.
        """
        decay = self.decay if decay is None else decay
        with torch.autocast(latents.device.type, enabled=False):
            points, one_hot = latents.flatten(0, -2).float(), self._one_hot(codes, mask)
            # A matrix product, not index_add_: its order of summation is fixed, so a resumed run is identical.
            counts_and_sums = torch.cat([one_hot.sum(0, keepdim=True), points.t() @ one_hot])
        if all_reduce is not None:
            all_reduce(counts_and_sums)
        self.cluster_size.lerp_(counts_and_sums[0], 1 - decay)
        self.embed_avg.lerp_(counts_and_sums[1:], 1 - decay)
        # Laplace smoothing: as if each code had been chosen `eps` times more, with the total unchanged.
        total = self.cluster_size.sum()
        smoothed = (self.cluster_size + self.eps) / (total + self.eps * len(self.cluster_size)) * total
        self.embed.copy_(self.embed_avg / smoothed)

    @torch.no_grad()
    def revive(
        self,
        latents: Tensor,
        generator: torch.Generator,
        mask: Tensor | None = None,
        dead_share: float = DEAD_SHARE,
        share: InPlace | None = None,
    ) -> Tensor:
        """Moves dead codes onto latents drawn at random; returns how many, as a tensor on the device.

        Dead is a code chosen less than `dead_share` times as often as the mean code. In a codebook that was never
        updated all codes are: call this before the first step, or hardly a code will ever be near the latents.
        `share` gives all processes the draw of one.
        """
        points, num_codes = latents.flatten(0, -2).to(self.embed.dtype), len(self.cluster_size)
        lots = torch.rand(len(points), generator=generator, device=points.device)
        counts = torch.ones_like(lots, dtype=torch.bool) if mask is None else mask.flatten() > 0
        order = torch.where(counts, lots, -1.0).argsort(descending=True)
        # Each latent once while they last: of two equal vectors one would never be chosen.
        turns = torch.arange(num_codes, device=points.device) % counts.sum().clamp_min(1)
        fresh = points[order[turns]].t().contiguous()
        if share is not None:
            share(fresh)
        dead, mean = self._dead(dead_share), self.cluster_size.mean()
        start = FRESH_SHARE * torch.where(mean > 0, mean, len(points) / num_codes)
        self.embed.copy_(torch.where(dead, fresh, self.embed))
        self.embed_avg.copy_(torch.where(dead, fresh * start, self.embed_avg))
        self.cluster_size.copy_(torch.where(dead, start, self.cluster_size))
        return dead.sum()

    @torch.no_grad()
    def usage(self, dead_share: float = DEAD_SHARE) -> Usage:
        """How evenly the codes have been chosen lately; dead as in `revive`."""
        shares = self.cluster_size / self.cluster_size.sum().clamp_min(self.eps)
        entropy = torch.special.entr(shares).sum()
        return Usage(self.cluster_size.clone(), (~self._dead(dead_share)).sum(), entropy.exp())

    def _dead(self, dead_share: float) -> Tensor:
        return self.cluster_size <= dead_share * self.cluster_size.mean()

    def _one_hot(self, codes: Tensor, mask: Tensor | None) -> Tensor:
        # Compared rather than F.one_hot, which reads the largest code on the host.
        tokens = torch.arange(len(self.cluster_size), device=codes.device)
        one_hot = (codes.flatten()[:, None] == tokens).float()
        return one_hot if mask is None else one_hot * mask.flatten()[:, None]
