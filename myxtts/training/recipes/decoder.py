"""The decoder's recipe: the vocoder against its discriminators. Knows nothing of the GPT that made the latents."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from myxtts.data.layout import Sizes
from myxtts.model.discriminators import Discriminators, Judgement
from myxtts.model.mel import FrontEnd, LogMel
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE, HifiGanDecoder
from myxtts.training.losses import Totals, by_clip, deception, discrimination, feature_matching, mean_of
from myxtts.training.recipes.recipe import Recipe, Tensors

FROM_SCRATCH_LR, FINE_TUNING_LR = 2e-4, 1e-4
"""Not far apart: the discriminators are fresh in both cases."""
FEATURE_WEIGHT, MEL_WEIGHT = 2.0, 45.0
"""HiFi-GAN's, beside 1 for the adversarial loss."""
LISTENING_MEL = FrontEnd(
    sample_rate=OUTPUT_SAMPLE_RATE, fft_samples=1024, window_samples=1024, hop_samples=256, window="hann",
    num_mels=80, max_hz=OUTPUT_SAMPLE_RATE / 2, equal_area=True, log_floor=1e-8, floor_is_added=False,
)  # fmt: skip
"""How waves are compared: up to the highest frequency, down to about the noise of 16 bits."""


class DecoderRecipe(Recipe):
    """The GPT's latents and a speaker to sound, against discriminators that learn beside it.

    Reads latents float32 [B, L, dim], wave float32 [B, num_samples(L)] at 24 kHz, and speaker float32
    [B, speaker_dim]. Validation loss: distance of log-mels per clip. Of the vocoder only the waveform decoder is
    trained, never the speaker encoder beside it.
    """

    betas = (0.8, 0.99)

    def __init__(
        self,
        vocoder: HifiGanDecoder,
        discriminators: Discriminators,
        world_size: int = 1,
        feature_weight: float = FEATURE_WEIGHT,
        mel_weight: float = MEL_WEIGHT,
    ) -> None:
        super().__init__(world_size)
        self.generator = vocoder.waveform_decoder
        self.discriminators = discriminators
        self.log_mel = LogMel(LISTENING_MEL)
        self.feature_weight, self.mel_weight = feature_weight, mel_weight

    def forward(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:  # noqa: ARG002 - one signature for all
        """ "disc" gives gradients to the discriminators alone, the other losses to the generator alone."""
        real, fake = self._waves(tensors)
        judged_real, judged_fake = self.discriminators(real, fake.detach())
        heard = self._judge_frozen(fake)
        losses = {
            "gen_adv": deception(heard),
            "feature_matching": feature_matching(judged_real, heard),
            "mel_loss": self._mel_distance(real, fake),
            "disc": discrimination(judged_real, judged_fake),
        }
        factors = {"feature_matching": self.feature_weight, "mel_loss": self.mel_weight}
        weights, totals = tensors["weights"], Totals.of(tensors)
        by_name = {name: (loss * weights).sum() for name, loss in losses.items()}
        total = torch.stack([factors.get(name, 1.0) * loss for name, loss in by_name.items()]).sum()
        means = {name: mean_of(loss, weights.sum()) for name, loss in by_name.items()}
        return {"total": self.world_size * total / totals.clips, **means}

    def sums(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:  # noqa: ARG002
        weights = tensors["weights"]
        return {"sum": (self._mel_distance(*self._waves(tensors)) * weights).sum(), "count": weights.sum()}

    @torch.no_grad()
    def pictures(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:  # noqa: ARG002
        real, fake = (self.log_mel(wave[:1].float())[0, 0] for wave in self._waves(tensors))
        return {"mel": real, "generated": fake}

    def parts(self) -> dict[str, nn.Module]:
        return {"generator": self.generator, "discriminators": self.discriminators}

    def learning_rate(self, fine_tuning: bool) -> float:
        return FINE_TUNING_LR if fine_tuning else FROM_SCRATCH_LR

    def _waves(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Real and generated waves, [B, 1, N] each; filling clips are silent."""
        present = (tensors["weights"] > 0)[:, None, None]
        latents = torch.where(present, tensors["latents"], 0)
        speaker = torch.where(present, tensors["speaker"].unsqueeze(-1), 0)
        fake: Tensor = self.generator(HifiGanDecoder.frames(latents), speaker)
        return torch.where(present, tensors["wave"].unsqueeze(1), 0), fake

    def _judge_frozen(self, fake: Tensor) -> list[Judgement]:
        """What the discriminators make of generated waves, with gradients for these but not for their weights.

        Their weights are handed in as constants: switching `requires_grad` off and on cannot be compiled.
        """
        return [
            functional_call(network, {name: weight.detach() for name, weight in network.named_parameters()}, fake)
            for network in (*self.discriminators.periods, *self.discriminators.resolutions)
        ]

    def _mel_distance(self, real: Tensor, fake: Tensor) -> Tensor:
        """Mean distance of the log-mels, [B]; halved, that of powers is that of magnitudes, HiFi-GAN's measure."""
        target: Tensor = self.log_mel(real)
        return by_clip((self.log_mel(fake) - target).abs()) / 2
