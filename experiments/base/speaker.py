"""Train the stage `speaker` with ECAPA-TDNN as a teacher, and with the flags of `myxtts train`.

    python experiments/base/speaker.py --teacher ecapa-*.bin --train-data DIR --checkpoint-dir RUN ...

Verification alone learns the voices of the corpus. The teacher was trained on thousands of real people, so our
encoder also learns to find the crops of a batch as similar as the teacher does, and to predict its embeddings. The
checkpoints are those of a plain stage `speaker`: the run goes on with `myxtts train`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from ecapa import Ecapa
from torch import Tensor, nn

from myxtts.cli import main as myxtts
from myxtts.model.vocoder import SpeakerEncoder
from myxtts.training.recipes import RECIPES, SpeakerRecipe, Tensors, Totals

TEACHER_DIM = 192
PREDICTION_WEIGHT, SIMILARITY_WEIGHT = 2.0, 20.0


class DistilledRecipe(SpeakerRecipe):
    """Verification, and the likeness to a teacher: its embeddings, predicted by a layer, and their cosines."""

    teacher: Ecapa

    def __init__(self, encoder: SpeakerEncoder, world_size: int = 1) -> None:
        super().__init__(encoder, world_size)
        self.head = nn.Linear(encoder.fc.out_features, TEACHER_DIM, bias=False)

    def losses(self, embeddings: Tensor, clean: Tensor, tensors: Tensors) -> dict[str, Tensor]:
        losses = super().losses(embeddings, clean, tensors)
        ours, theirs = embeddings.flatten(0, 1), self.teacher.to(clean.device)(clean.flatten(0, 1))
        prediction = 1 - F.cosine_similarity(self.head(ours).float(), theirs).mean()
        with torch.autocast(clean.device.type, enabled=False):
            difference = ours @ ours.t() - theirs @ theirs.t()
        similarity = difference.square().sum() / (len(ours) * (len(ours) - 1))  # the diagonal is 0
        taught = PREDICTION_WEIGHT * prediction + SIMILARITY_WEIGHT * similarity
        share = tensors["weights"].sum() / Totals.of(tensors).clips
        about = {
            "prediction": prediction.detach(),
            "similarity": similarity.detach(),
            "verification": losses["total"].detach(),
        }
        return {**losses, **about, "total": losses["total"] + share * taught}

    def extra_modules(self) -> dict[str, nn.Module]:
        return {"head": self.head}

    def clip_shapes(self, num_samples: int) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        return {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, nargs="+", required=True, help="its checkpoint, or ecapa-*.bin")
    options, flags = parser.parse_known_args()
    DistilledRecipe.teacher = Ecapa.read(options.teacher)
    RECIPES["speaker"] = DistilledRecipe
    return myxtts(["train", "--stages", "speaker", *flags])


if __name__ == "__main__":
    sys.exit(main())
