"""The recipes of CONTRIBUTING.md for the network: what it takes to add a model size and a training stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pipeline_fixtures import SHORT, Corpus
from torch import Tensor, nn

from myxtts.config import MODEL_SIZES, STAGE_PARTS, STAGES, ModelSettings, Settings
from myxtts.data.batches import Sizes
from myxtts.model.gpt import GPTDims
from myxtts.model.xtts import SIZES, XTTS, XTTSDims, dims_of
from myxtts.pipeline.frontend import FRONTENDS, DvaeFrontend
from myxtts.run_dir import initial_model
from myxtts.text.tokenizer import train
from myxtts.training.optim import Optimizer, Schedule
from myxtts.training.recipes import RECIPES, Recipe, StageFacts, Tensors
from myxtts.weights import PARTS, is_trained_in

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_size_has_a_name_and_dimensions() -> None:
    assert tuple(SIZES) == MODEL_SIZES, "add the size to config.MODEL_SIZES and to model.xtts.SIZES, in one order"


def test_every_stage_has_parts_a_recipe_and_a_front_end() -> None:
    assert tuple(RECIPES) == tuple(FRONTENDS) == tuple(STAGE_PARTS) == STAGES
    trained = [part for parts in STAGE_PARTS.values() for part in parts]
    assert set(trained) <= set(PARTS) and len(set(trained)) == len(trained)


def test_a_new_size_is_a_name_and_its_dimensions(monkeypatch: pytest.MonkeyPatch) -> None:
    gpt = GPTDims(layers=3, dim=128, heads=2, num_codes=64, encoder_layers=1)
    monkeypatch.setitem(SIZES, "micro", replace(SIZES["tiny"], gpt=gpt, vocoder_channels=64))
    vocabulary = train(["a small vocabulary", "for a small model"], ["en", "en"], 60)
    model = initial_model(Settings(model=ModelSettings(size="micro")), vocabulary)
    wanted = SIZES["micro"].with_vocabulary(vocabulary.num_tokens, vocabulary.start_id, vocabulary.stop_id)
    assert model.dims == wanted == XTTSDims.from_dict(wanted.to_dict())
    found = dims_of(model.state_dict())
    assert found.with_vocabulary(vocabulary.num_tokens, vocabulary.start_id, vocabulary.stop_id) == wanted


class MelDecoderRecipe(Recipe):
    """A made-up stage: trains only the decoder of the DVAE, on the mels of the DVAE's front end."""

    betas = (0.9, 0.99)
    from_scratch_lr, fine_tuning_lr = 5e-3, 1e-4

    @classmethod
    def build(cls, model: XTTS, settings: Settings, facts: StageFacts) -> MelDecoderRecipe:  # noqa: ARG003
        model.dvae.decoder.requires_grad_(True)
        return cls(model.dvae)

    def __init__(self, dvae: nn.Module) -> None:
        super().__init__()
        self.dvae = dvae

    def forward(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:
        sums = self.sums(tensors, sizes)
        loss = sums["sum"] / sums["count"]
        return {"total": loss, "mel_loss": loss.detach()}

    def sums(self, tensors: Tensors, sizes: Sizes) -> dict[str, Tensor]:  # noqa: ARG002
        out = self.dvae(tensors["mel"], tensors["num_frames"])
        weights = out.mask * tensors["weights"][:, None]
        return {"sum": (out.mse.mean(1).unflatten(1, (-1, 4)).mean(2) * weights).sum(), "count": weights.sum()}


def test_a_new_stage_is_a_recipe_and_three_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STAGE_PARTS, "mel_decoder", ("dvae.decoder",))
    monkeypatch.setitem(RECIPES, "mel_decoder", MelDecoderRecipe)
    monkeypatch.setitem(FRONTENDS, "mel_decoder", DvaeFrontend)
    corpus = Corpus.make(tmp_path, SHORT)
    recipe = RECIPES["mel_decoder"].build(corpus.model, Settings(data=SHORT), StageFacts())
    optimizer = Optimizer(recipe, recipe.learning_rate(fine_tuning=False), Schedule(0, None), betas=recipe.betas)
    before = {name: value.clone() for name, value in corpus.model.state_dict().items()}
    losses = []
    with corpus.feed(make_frontend=FRONTENDS["mel_decoder"]) as feed:
        for step in range(30):
            with feed.next() as batch:
                assert batch is not None
                found = recipe(batch.tensors, batch.sizes)
                found["total"].backward()
            optimizer.set_lr(step)
            optimizer.update()
            optimizer.zero_grad()
            recipe.after_step(step)
            losses.append(float(found["mel_loss"]))
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    after = corpus.model.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {name for name in after if is_trained_in("mel_decoder", name)}, "a checkpoint of the stage"
