"""Recipes: they learn, micro-steps add up to one large batch, and clips that fill a batch up change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_fixtures import waiting_is_an_error
from torch import Tensor

from myxtts.config import NUM_STOPS, Settings, TrainingSettings
from myxtts.data.batches import MARGIN_CODES, Sizes
from myxtts.distributed import GradientSums
from myxtts.model.dvae import DVAE
from myxtts.model.gpt import AUDIO, GPT, TEXT, GPTDims, PackedBatch, add_adapters, packed_length
from myxtts.model.vocoder import (
    Discriminators,
    HifiGanDecoder,
    Resolution,
    SpeakerEncoder,
    frames_of,
    num_frames,
    num_samples,
)
from myxtts.model.xtts import SIZES as MODEL_SIZES
from myxtts.model.xtts import XTTS
from myxtts.training.optim import Optimizer, Schedule
from myxtts.training.recipes import (
    MANY_LAYERS,
    REVIVE_STEPS,
    DecoderRecipe,
    DvaeRecipe,
    GptRecipe,
    Phases,
    Recipe,
    StageFacts,
    disturbed,
)

Batch = dict[str, Tensor]
DIMS = GPTDims(
    layers=1, dim=32, heads=2, text_tokens=40, start_text=1, num_codes=24, max_text=20, max_codes=40,
    encoder_layers=1, perceiver_depth=1, perceiver_heads=2, perceiver_head_dim=16,
)  # fmt: skip
SIZES = Sizes(tokens=320, ids=10, samples=16 * 1024, frames=128)
LATENTS = 4
NAMES = ("gpt", "dvae", "decoder")
EVERY_RECIPE = pytest.mark.parametrize("name", NAMES)
pytestmark = pytest.mark.usefixtures("one_thread")


def with_totals(batches: list[Batch]) -> list[Batch]:
    """The micro-batches of one optimiser step, each with the totals of all."""
    totals = torch.zeros(5)
    for batch in batches:
        counts = torch.zeros(len(batch["weights"]), 5)
        counts[:, 4] = 1
        if "num_frames" in batch:
            counts[:, 2] = batch.get("num_codes", -(-batch["num_frames"] // 4))
            counts[:, 3] = batch["num_frames"]
            counts[:, 1] = counts[:, 2] + NUM_STOPS
        if "num_ids" in batch:
            counts[:, 0] = batch["num_ids"] + 1
        totals += (counts * batch["weights"][:, None]).sum(0)
    return [batch | {"totals": totals} for batch in batches]


def gpt_batch(seed: int = 0, num_clips: int = 4) -> Batch:
    random = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random).int()

    return {
        "ids": draw(2, 40, num_clips, 12),
        "num_ids": draw(3, 11, num_clips),
        "codes": draw(0, 24, num_clips, 20),
        "num_codes": draw(6, 17, num_clips),
        "mel": torch.randn(140, 80, generator=random),
        "num_frames": draw(5, 30, num_clips),
        "weights": torch.ones(num_clips),
    }


def dvae_batch(seed: int = 0, num_clips: int = 4) -> Batch:
    """A few spectra, each held for a while; rubbish behind every clip."""
    random = torch.Generator().manual_seed(seed)
    kinds = 2 * torch.randn(8, 80, generator=random)
    which = torch.randint(8, (num_clips, 9), generator=random)
    mel = kinds[which].repeat_interleave(8, 1).mT.contiguous()
    num_frames = torch.randint(20, 65, (num_clips,), generator=random).int()
    for clip, length in enumerate(num_frames.tolist()):
        mel[clip, :, length:] = torch.nan
    return {"mel": mel, "num_frames": num_frames, "weights": torch.ones(num_clips)}


def decoder_batch(seed: int = 0, num_clips: int = 4) -> Batch:
    random = torch.Generator().manual_seed(seed)
    phase = torch.arange(num_samples(LATENTS)) * (torch.rand(num_clips, 1, generator=random) + 1) / 25
    buzz = torch.stack([torch.sin(harmonic * phase) / harmonic for harmonic in range(1, 40)]).sum(0)
    return {
        "latents": torch.randn(num_clips, LATENTS + 2 * MARGIN_CODES, 8, generator=random),
        "wave": 0.2 * buzz + 0.01 * torch.randn(buzz.shape, generator=random),
        "speaker": torch.randn(num_clips, 4, generator=random),
        "weights": torch.ones(num_clips),
    }


def make(name: str, reads_mels: bool = False, channels: int = 16, **options: object) -> Recipe:
    torch.manual_seed(0)
    recipe: Recipe
    if name == "gpt":
        recipe = GptRecipe(GPT(DIMS), max_frames=30, **options)
    elif name == "dvae":
        dvae = DVAE(num_tokens=16, codebook_dim=8, hidden_dim=16, num_resnet_blocks=1)
        recipe = DvaeRecipe(dvae, **options)
        recipe.before_first_step(dvae_batch())
    else:
        sizes = {"decoder_input_dim": 8, "upsample_initial_channel": channels, "d_vector_dim": 4}
        vocoder = HifiGanDecoder(**sizes, reads_mels=reads_mels)
        vocoder.speaker_encoder = SpeakerEncoder(proj_dim=4, num_filters=(8, 8, 8, 8))
        discriminators = Discriminators(
            periods=(2, 3), period_widths=(4, 8), resolutions=(Resolution(256, 64, 256),), resolution_width=4
        )
        recipe = DecoderRecipe(vocoder, discriminators, **options)
    return recipe


BATCHES: dict[str, Callable[..., Batch]] = {"gpt": gpt_batch, "dvae": dvae_batch, "decoder": decoder_batch}


def joined(batches: list[Batch]) -> Batch:
    """One batch of the clips of several."""
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    if "ids" in whole:
        used = [batch["mel"][: int(batch["num_frames"].sum())] for batch in batches]
        whole["mel"] = torch.cat([*used, torch.full((20, 80), torch.nan)])
    return whole


def sizes_of(batch: Batch) -> Sizes:
    if "ids" not in batch:
        return SIZES
    tokens = int(packed_length(batch["num_ids"], batch["num_codes"]).sum())
    return Sizes(tokens=-(-tokens // 8) * 8, ids=10, samples=SIZES.samples, frames=len(batch["mel"]))


def run(recipe: Recipe, batch: Batch) -> dict[str, Tensor]:
    """The losses of a batch that is an optimiser step by itself."""
    (batch,) = with_totals([batch])
    return recipe(batch, sizes_of(batch))


def evaluate(recipe: Recipe, batch: Batch) -> dict[str, Tensor]:
    return recipe.evaluate(batch, sizes_of(batch))


def one_and_three(name: str) -> list[Batch]:
    return [BATCHES[name](seed=1, num_clips=1), BATCHES[name](seed=2, num_clips=3)]


def gradients(recipe: Recipe, batches: list[Batch]) -> dict[str, Tensor]:
    """Of one optimiser step: of all micro-batches together."""
    recipe.zero_grad()
    for batch in with_totals(batches):
        recipe(batch, sizes_of(batch))["total"].backward()
    return {name: value.grad.clone() for name, value in recipe.named_parameters() if value.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal to 1e-5 all together, and to 1e-3 each: those of a weight norm are small differences of large sums."""
    assert found.keys() == expected.keys()
    errors = {name: float((found[name] - value).norm()) for name, value in expected.items()}
    norms = {name: float(value.norm()) for name, value in expected.items()}
    largest = max(norms.values())
    assert largest > 1e-2
    assert sum(errors.values()) <= 1e-5 * sum(norms.values())
    for name, error in errors.items():
        assert error <= 1e-3 * max(norms[name], 1e-5 * largest), (name, error, norms[name])


def assert_same_codebooks(*recipes: Recipe) -> None:
    books = [recipe.dvae.codebook.state_dict() for recipe in recipes]
    torch.testing.assert_close(*books, rtol=1e-4, atol=1e-5)


# What all recipes have in common


@EVERY_RECIPE
def test_clips_that_fill_up_change_nothing(name: str) -> None:
    recipe, alone, fillers = make(name), BATCHES[name](seed=1, num_clips=2), BATCHES[name](seed=2, num_clips=2)
    fillers["weights"] = torch.zeros(2)
    for garbage in fillers.keys() & {"mel", "wave", "latents"}:
        fillers[garbage] = fillers[garbage] * (1e3 if name == "gpt" else torch.nan)
    whole = joined([alone, fillers])
    expected, again = copy.deepcopy(recipe), copy.deepcopy(recipe)
    assert_same(gradients(recipe, [whole]), gradients(expected, [alone]))
    assert_same(gradients(recipe, [alone, fillers | {"totals": torch.ones(5)}]), gradients(again, [alone]))

    torch.testing.assert_close(run(recipe, whole), run(expected, alone), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(evaluate(recipe, whole), evaluate(expected, alone))


@EVERY_RECIPE
def test_micro_steps_are_one_large_batch_and_weight_two_is_two_clips(name: str) -> None:
    one, other = one_and_three(name)
    heavy = one | {"weights": torch.full((1,), 2.0)}
    weighted, repeated = make(name), make(name)
    assert_same(gradients(make(name), [one, other]), gradients(make(name), [joined([one, other])]))
    expected = gradients(repeated, [joined([one, one, other])])
    assert_same(gradients(weighted, [joined([heavy, other])]), expected)
    if name == "dvae":
        for recipe in (weighted, repeated):
            recipe.after_step(1)
        assert_same_codebooks(weighted, repeated)


@EVERY_RECIPE
def test_a_batch_of_nothing_but_fillers_is_zero(name: str) -> None:
    recipe, batch = make(name), BATCHES[name]() | {"weights": torch.zeros(4)}
    losses = run(recipe, batch)
    losses["total"].backward()
    assert float(losses["total"].detach()) == 0
    assert all(loss.isfinite() for loss in losses.values())
    assert all(value.grad.abs().max() == 0 for value in recipe.parameters() if value.grad is not None)
    assert float(evaluate(recipe, batch)["count"]) == 0


@EVERY_RECIPE
def test_losses_are_scalars_and_only_the_total_has_a_gradient(name: str) -> None:
    recipe, batch = make(name), BATCHES[name]()
    losses = run(recipe, batch)
    assert all((loss.ndim, loss.dtype) == (0, torch.float32) for loss in losses.values())
    assert [loss for loss in losses if losses[loss].requires_grad] == ["total"]
    losses["total"].backward()
    assert all(value.grad is not None for value in recipe.parameters()), "unused ones would be exchanged late"


@EVERY_RECIPE
def test_evaluation_adds_up_over_batches_and_changes_nothing(name: str) -> None:
    recipe, halves = make(name), one_and_three(name)
    recipe.train()
    before = copy.deepcopy(dict(recipe.named_buffers()))
    parts = [evaluate(recipe, half) for half in halves]
    expected = evaluate(recipe, joined(halves))
    assert {"sum", "count"} <= expected.keys()
    assert all(not value.requires_grad for value in expected.values())
    for key, value in expected.items():
        torch.testing.assert_close(parts[0][key] + parts[1][key], value, rtol=1e-4, atol=1e-5)
    assert recipe.training
    torch.testing.assert_close(dict(recipe.named_buffers()), before, rtol=0, atol=0, equal_nan=True)


@EVERY_RECIPE
def test_fine_tuning_is_gentler_and_parts_hold_every_parameter_once(name: str) -> None:
    recipe = make(name)
    assert 0 < recipe.learning_rate(fine_tuning=True) < recipe.learning_rate(fine_tuning=False) < 1e-3
    assert 0 < recipe.betas[0] < recipe.betas[1] < 1
    held = [id(value) for part in recipe.parts().values() for value in part.parameters()]
    assert sorted(held) == sorted(id(value) for value in recipe.parameters())


@pytest.mark.parametrize("name", ["gpt", "dvae"])  # the decoder's many layers take long: only on a GPU
def test_compiles_to_one_graph(name: str) -> None:
    recipe, plain, batch = make(name), make(name), BATCHES[name]()
    compiled = torch.compile(recipe, fullgraph=True, dynamic=False, backend="eager")
    losses, expected = run(compiled, batch), run(plain, batch)
    torch.testing.assert_close(losses, expected)
    losses["total"].backward()
    expected["total"].backward()
    found, wanted = ({n: p.grad for n, p in r.named_parameters()} for r in (recipe, plain))
    assert_same(found, wanted)
    torch.testing.assert_close(dict(recipe.named_buffers()), dict(plain.named_buffers()))


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@EVERY_RECIPE
def test_gradients_of_several_processes_are_sums(name: str) -> None:
    recipe, batch = make(name), BATCHES[name]()
    expected, sums = gradients(make(name), [batch]), GradientSums(recipe)
    with sums.exchanged():
        run(recipe, batch)["total"].backward()
    assert_same({name: value.grad for name, value in recipe.named_parameters()}, expected)


# GPT


def test_text_weighs_a_hundredth_and_labels_are_smoothed_in_training_only() -> None:
    plain, smoothed, batch = make("gpt"), make("gpt", label_smoothing=0.1), gpt_batch()
    losses = run(plain, batch)
    torch.testing.assert_close(losses["total"], 0.01 * losses["text_loss"] + losses["audio_loss"])
    assert not torch.allclose(run(smoothed, batch)["audio_loss"], losses["audio_loss"])
    torch.testing.assert_close(evaluate(smoothed, batch), evaluate(plain, batch))


def trained_and_evaluated(**options: float) -> list[PackedBatch]:
    """The same batch as the GPT gets it in training and in validation, where the options change nothing."""
    recipe, batch, seen = make("gpt"), gpt_batch(), list[PackedBatch]()
    for name, value in options.items():
        setattr(recipe, name, value)
    recipe.gpt.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    run(recipe, batch)
    torch.testing.assert_close(evaluate(recipe, batch), evaluate(make("gpt"), batch))
    return seen


def test_noise_replaces_input_codes_in_training_and_nothing_else() -> None:
    trained, evaluated = trained_and_evaluated(code_noise=0.5)
    differs = trained.token != evaluated.token
    codes = (evaluated.kind == AUDIO) & (evaluated.token < DIMS.num_codes)
    assert 0.3 < float(differs[codes].float().mean()) < 0.7 and not differs[~codes].any()
    assert (trained.token[codes] < DIMS.num_codes).all()
    assert torch.equal(trained.targets, evaluated.targets)


def test_some_clips_are_trained_without_their_text_and_none_is_validated_so() -> None:
    counts = [
        [int((packed.kind == kind).sum()) for kind in (TEXT, AUDIO)]
        for packed in trained_and_evaluated(text_dropout=0.9)
    ]
    assert 2 * 4 <= counts[0][0] < counts[1][0], "START and STOP of a text stay"
    assert counts[0][1] == counts[1][1]


def test_references_are_disturbed_in_training_within_their_clips_and_nothing_else() -> None:
    trained, evaluated = trained_and_evaluated(reference_noise=1.0)
    assert torch.equal(trained.token, evaluated.token)
    before, after = evaluated.frames, trained.frames
    assert after.mel.isfinite().all() and not torch.equal(after.mel, before.mel)
    num_frames = int(before.num_frames.sum())
    assert torch.equal(after.mel[num_frames:], before.mel[num_frames:]), "padding stays"
    torch.manual_seed(3)
    alone = disturbed(before, torch.ones(before.mel.shape[1]), 0.0)
    assert torch.equal(alone.mel, before.mel), "no clip is chosen"


def test_the_dvae_learns_to_return_clips_as_they_are_when_it_hears_them_disturbed() -> None:
    recipe, batch = make("dvae"), dvae_batch()
    heard: list[tuple[Tensor, Tensor]] = []
    recipe.dvae.register_forward_pre_hook(lambda _, given: heard.append((given[0], given[2])))
    recipe.noise = 1.0
    run(recipe, batch)
    recipe.evaluate(batch, SIZES)
    (disturbed_mel, target), (clean, same) = heard
    assert torch.equal(target, clean) and torch.equal(clean, same), "validation hears clips as they are"
    inside = torch.arange(64) < batch["num_frames"][:, None]
    assert disturbed_mel.isfinite().all() and not disturbed_mel.mT[~inside].any()
    assert (disturbed_mel.mT[inside] != clean.mT[inside]).float().mean() > 0.9


def test_only_what_sizes_say_is_read() -> None:
    """Behind it stands what an earlier batch left there; with shapes of its own a batch is as long as it needs."""
    recipe, batch = make("gpt"), gpt_batch()
    sizes = sizes_of(batch)
    used = int(batch["num_frames"].sum())
    tight = Sizes(sizes.tokens, int(batch["num_ids"].max()), int(batch["num_codes"].max()) * 1024, used)
    torch.testing.assert_close(recipe.evaluate(batch, tight), recipe.evaluate(batch, sizes), rtol=1e-4, atol=1e-4)
    mel = dvae_batch(seed=3)
    short = Sizes(0, 0, -(-int(mel["num_frames"].max()) // 4) * 1024, 0)
    dvae = make("dvae")
    torch.testing.assert_close(dvae.evaluate(mel, short), dvae.evaluate(mel, SIZES))
    with pytest.raises(RuntimeError):
        recipe.evaluate(batch, Sizes(sizes.tokens, sizes.ids, sizes.samples, used - 1))


def test_adapters_learn_faster_than_a_whole_network_is_fine_tuned() -> None:
    recipe = make("gpt")
    whole = recipe.learning_rate(fine_tuning=True)
    add_adapters(recipe.gpt, rank=2)
    assert recipe.learning_rate(fine_tuning=True) > whole


# DVAE


def test_the_codebook_moves_once_a_step_by_all_its_micro_batches() -> None:
    halves = [dvae_batch(seed=1, num_clips=1), dvae_batch(seed=2, num_clips=3)]
    twice, direct = make("dvae"), make("dvae")
    before = twice.dvae.codebook.embed.clone()
    for half in with_totals(halves):
        twice(half, SIZES)
    assert torch.equal(twice.dvae.codebook.embed, before)
    whole = joined(halves)
    out = direct.dvae(whole["mel"].nan_to_num(), whole["num_frames"])
    direct.dvae.codebook.update(out.latents, out.codes, out.mask, decay=2 / 11)
    twice.after_step(1)
    assert not torch.allclose(twice.dvae.codebook.embed, before)
    assert_same_codebooks(twice, direct)
    assert float(twice.counts_and_sums.abs().max()) == 0


def test_fillers_and_what_is_not_finite_never_reach_the_codebook() -> None:
    alone, fillers, broken = dvae_batch(seed=1), dvae_batch(seed=2), dvae_batch(seed=3)
    fillers["weights"] = torch.zeros(4)
    broken["mel"] = torch.full_like(broken["mel"], torch.inf)
    recipe, expected = make("dvae"), make("dvae")
    (plain,) = with_totals([alone])
    expected(plain, SIZES)
    for batch in with_totals([alone, fillers, broken]):
        recipe(batch, SIZES)
    for same in (recipe, expected):
        same.after_step(1)
        same.dvae.codebook.cluster_size[:8] = 0
        same.after_step(50)
    assert_same_codebooks(recipe, expected)
    assert recipe.dvae.codebook.embed.isfinite().all()


def test_dead_codes_are_revived_every_ten_steps_and_alike_in_a_continued_run() -> None:
    recipe = make("dvae", seed=7)
    book = recipe.dvae.codebook
    (batch,) = with_totals([dvae_batch()])
    for _ in range(20):
        recipe(batch, SIZES)
        recipe.after_step(1)
    book.embed[:, :3], book.embed_avg[:, :3], book.cluster_size[:3] = 1e3, 0, 0
    recipe(batch, SIZES)
    continued = copy.deepcopy(recipe)
    recipe.after_step(49)
    assert not (recipe.dvae.encode(batch["mel"].nan_to_num(), batch["num_frames"]) < 3).any()
    for same in (recipe, continued):
        same(batch, SIZES)
        same.after_step(50)
    latents = recipe.candidates[recipe.candidate_weights > 0]
    for vector in book.embed.mT[:3]:
        assert (latents == vector).all(1).any()
    assert torch.equal(recipe.candidates, continued.candidates)
    assert int(book.usage().used) == len(book.cluster_size)
    recipe(batch, SIZES)
    recipe.after_step(51)
    assert book.embed.abs().max() < 2 * latents.abs().max(), "a revived code must not be thrown far away"


def test_a_fresh_codebook_follows_fast_and_a_trained_one_slowly() -> None:
    (batch,) = with_totals([dvae_batch()])
    moved = {}
    for fine_tuning in (False, True):
        recipe = make("dvae")
        recipe.fine_tuning = fine_tuning
        before = recipe.dvae.codebook.embed.clone()
        recipe(batch, SIZES)
        chosen = recipe.counts_and_sums[0] > 0
        recipe.after_step(1)
        moved[fine_tuning] = (recipe.dvae.codebook.embed - before)[:, chosen].norm()
    assert moved[False] > 2 * moved[True] > 0


@pytest.mark.parametrize("wanted", ["auto", "frozen", "trained"])
def test_fine_tuning_keeps_a_published_codebook_unless_asked_to_train_it(wanted: str) -> None:
    """Also if its file has no counts; then no code is thrown away for not being used in the first steps."""
    torch.manual_seed(0)
    model = XTTS(replace(MODEL_SIZES["tiny"], dvae_hidden=16, dvae_codebook_dim=8, dvae_blocks=1))
    book = model.dvae.codebook
    book.embed_avg.mul_(3.0)
    assert book.is_trained
    before = book.embed.clone()
    recipe = DvaeRecipe.build(model, Settings(training=TrainingSettings(codebook=wanted)), StageFacts(1, True))
    (batch,) = with_totals([dvae_batch()])
    recipe.before_first_step(batch)
    weight = model.dvae.encoder[0][0].weight
    for step in range(2 * REVIVE_STEPS):
        recipe(batch, SIZES)["total"].backward()
        recipe.after_step(step)
    assert weight.grad.any()
    if wanted == "trained":
        moved = ((book.embed - before).abs() > 1e-3).any(0).float()
        assert 0 < float(moved.mean()) < 0.2, "only those near the clips"
    else:
        assert torch.equal(book.embed, before) and not book.cluster_size.any()
        found = recipe(batch, SIZES)
        chosen = recipe.pictures(batch, SIZES)["code_usage"]
        assert 1 < found["perplexity"] <= found["codes_used"] == (chosen > 0).sum(), "of this batch"
        assert chosen.sum() == float((batch["num_frames"] / 4).ceil()[batch["weights"] > 0].sum())


def test_processes_share_one_codebook() -> None:
    """Two in one: the second's sums are added to the first's."""
    halves = with_totals([dvae_batch(seed=1), dvae_batch(seed=2)])
    (whole,) = with_totals([joined(halves)])
    sums: list[Tensor] = []
    second, first, one = (make("dvae") for _ in range(3))
    second.all_reduce = lambda values: sums.append(values.clone())
    first.all_reduce = lambda values: values.add_(sums[0])
    for recipe, batch in ((second, halves[1]), (first, halves[0]), (one, whole)):
        recipe(batch, SIZES)
        recipe.after_step(1)
    assert_same_codebooks(first, one)


# Decoder


def test_generator_and_discriminators_get_only_their_own_gradients() -> None:
    recipe = make("decoder")
    (batch,) = with_totals([decoder_batch()])
    recipe(batch, SIZES)["total"].backward()
    found = {name: value.grad.clone() for name, value in recipe.named_parameters()}
    assert all(value.requires_grad for value in recipe.parameters())
    assert not any("speaker_encoder" in name for name in found)

    discriminators, real = recipe.discriminators, batch["wave"].unsqueeze(1)
    recipe.zero_grad()
    fake = recipe.waves(batch)[1]
    reals, fakes = discriminators(real, fake.detach())
    pairs = list(zip(reals, fakes, strict=True))
    sum((a.logits - 1).square().mean() + b.logits.square().mean() for a, b in pairs).backward()
    discriminators.requires_grad_(False)
    reals, fakes = discriminators(real, fake)
    loss = 45 * sum((log_mel(fake) - log_mel(real)).abs().mean() / 2 for log_mel in recipe.log_mels) / 4
    for a, b in zip(reals, fakes, strict=True):
        loss = loss + (b.logits - 1).square().mean()
        loss = loss + 2 * sum((x - y).abs().mean() for x, y in zip(a.features, b.features, strict=True))
    loss.backward()
    expected = {name: value.grad for name, value in recipe.named_parameters()}
    for part in ("generator.", "discriminators."):
        ours, theirs = ({n: g for n, g in grads.items() if n.startswith(part)} for grads in (found, expected))
        assert len(theirs) > 10
        assert_same(ours, theirs)


def test_the_margins_are_the_neighbours_that_the_first_layer_sees() -> None:
    """In the middle of a long clip, a segment is generated as the clip is; frames have the phase of the wave."""
    recipe = make("decoder")
    latents, speaker = torch.randn(1, 40, 8), torch.randn(1, 4)
    whole = recipe.generator(HifiGanDecoder.frames(latents), speaker.unsqueeze(-1))
    batch = decoder_batch(num_clips=1) | {"speaker": speaker, "wave": torch.zeros(1, num_samples(34))}
    segment = recipe.waves(batch | {"latents": latents})[1]
    first = frames_of(MARGIN_CODES)
    expected = recipe.generator.conv_pre(HifiGanDecoder.frames(latents))[..., first : first + num_frames(34)]
    torch.testing.assert_close(recipe._first_layer(batch | {"latents": latents})[1], expected)
    middle = slice(20 * 256, -20 * 256)  # further from the ends than the network sees
    expected = whole[..., first * 256 : first * 256 + segment.shape[-1]]
    torch.testing.assert_close(segment[..., middle], expected[..., middle], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (StageFacts(), Phases(0, 0, 0)),
        (StageFacts(total_steps=1000), Phases(0, 300, 400)),
        (StageFacts(total_steps=1000, fine_tuning=True), Phases(0, 0, 100)),
        (StageFacts(total_steps=1000, fine_tuning=True, warm_start=True), Phases(50, 150, 250)),
        (StageFacts(total_steps=10**6), Phases(0, 20_000, 22_000)),
        (StageFacts(total_steps=10**6, warm_start=True), Phases(500, 2500, 4500)),
    ],
)
def test_phases_are_shares_of_the_stage(facts: StageFacts, expected: Phases) -> None:
    phases = Phases.of(facts)
    assert phases == expected
    assert phases.at(10**7) == ("adversarial", 1.0)
    assert phases.at(phases.full) == ("adversarial", 1.0)
    if phases.full > phases.adversarial:
        middle = (phases.full + phases.adversarial) // 2 - 1
        assert phases.at(middle) == ("adversarial", pytest.approx(0.5))


def test_each_phase_trains_its_part_alone_and_discriminators_come_in_gradually() -> None:
    recipe = make("decoder", facts=StageFacts(total_steps=100, warm_start=True))
    state, batch, trained, losses = copy.deepcopy(recipe.state_dict()), decoder_batch(), {}, {}
    for step in (0, 5, 15, 24):
        recipe.load_state_dict(state)
        recipe.begin_step(step)
        recipe.zero_grad(set_to_none=True)
        losses[step] = run(recipe, batch)
        losses[step]["total"].backward()
        found = [name for name, value in recipe.named_parameters() if value.grad is not None]
        trained[step] = {".".join(name.split(".")[:2]) for name in found}
    assert trained[0] == {"generator.conv_pre"}
    assert not any(name.startswith("disc") for name in trained[5]) and "generator.conds" in trained[5]
    assert {"discriminators.periods", "generator.conds"} <= trained[15]
    assert "teacher.conv_pre" not in trained[24]
    values = {step: {name: float(loss.detach()) for name, loss in found.items()} for step, found in losses.items()}
    assert all(found.keys() == values[0].keys() for found in values.values()), "one row of the log"
    present = {step: {name for name, value in found.items() if value} for step, found in values.items()}
    assert present[0] == {"total", "first_layer"}
    assert present[5] - present[15] == {"stft"}
    assert present[15] - present[5] == {"gen_adv", "feature_matching", "disc"} == present[24] - present[5]
    rest = {
        step: found["total"] - 45 * found["mel_loss"] - found["disc"]
        for step, found in values.items()
        if step >= 15
    }
    assert rest[15] == pytest.approx(rest[24] / 10, rel=1e-3)
    assert rest[24] == pytest.approx(values[24]["gen_adv"] + 2 * values[24]["feature_matching"], rel=1e-3)


def test_the_first_layer_learns_what_hifigans_own_returns() -> None:
    recipe = make("decoder", facts=StageFacts(total_steps=100, warm_start=True))
    recipe.begin_step(0)
    optimizer = Optimizer(recipe.parts(), 1e-2, Schedule(0, None), betas=recipe.betas)
    batch, distances = decoder_batch(), []
    for _ in range(8):
        losses = run(recipe, batch)
        losses["total"].backward()
        optimizer.update()
        optimizer.zero_grad()
        distances.append(float(losses["first_layer"]))
    assert distances[-1] < 0.9 * distances[0]


def mel_batch(dim: int) -> Batch:
    rows, codes = torch.randn(4, LATENTS + 2 * MARGIN_CODES, 320 + dim), torch.zeros(4, LATENTS, dtype=torch.int32)
    return decoder_batch() | {"latents": rows, "segment_codes": codes}


@pytest.mark.parametrize("facts", [StageFacts(warm_start=True), StageFacts(fine_tuning=True)])
def test_a_decoder_of_mels_trains_its_flow_alone_once_it_has_a_generator(facts: StageFacts) -> None:
    dims = replace(MODEL_SIZES["tiny"], decoder_input="mel", vocoder_channels=16, speaker_dim=4)
    model = XTTS(dims).requires_grad_(False)
    recipe, batch = DecoderRecipe.build(model, Settings(), facts), mel_batch(dims.gpt.dim)
    recipe.begin_step(0)
    before, losses = float(recipe.evaluate(batch, SIZES)["sum"]), []
    optimizer = Optimizer(recipe, 1e-3, Schedule(0, None), betas=recipe.betas)
    for _ in range(15):
        found = run(recipe, batch)
        assert set(found) == {"total", "flow"}
        found["total"].backward()
        trained = {name.split(".")[1] for name, value in recipe.named_parameters() if value.grad is not None}
        assert trained == {"flow"}
        optimizer.update()
        optimizer.zero_grad()
        losses.append(float(found["flow"]))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    after = [float(recipe.evaluate(batch, SIZES)["sum"]) for _ in range(2)]
    assert after[0] == after[1] < before  # always with the same noise
    ends = []
    for num_codes in (2, 0):  # what follows the end of a clip does not count
        batch["segment_codes"][:, num_codes:] = -1
        ends.append(float(recipe.evaluate(batch, SIZES)["sum"]))
    assert ends[0] not in (0.0, after[0]) and ends[1] == 0


def test_a_decoder_of_mels_from_scratch_learns_generator_and_flow() -> None:
    recipe, batch = make("decoder", reads_mels=True, facts=StageFacts(total_steps=100)), mel_batch(8)
    for step, names in ((0, {"flow", "mel_loss", "stft"}), (40, {"flow", "mel_loss", "disc", "gen_adv"})):
        recipe.begin_step(step)
        losses = run(recipe, batch)
        losses["total"].backward()
        assert all(losses[name] > 0 for name in names)
        assert recipe.generator.flow.first.weight.grad is not None
        assert recipe.generator.conv_pre.weight.grad.any()
    real, fake = recipe.waves(batch)
    assert real.shape == fake.shape and fake.isfinite().all()


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_steps_never_wait_for_the_device_and_compile_once(name: str, compiled: bool) -> None:
    # With 2 channels cuDNN and the compiler disagree about the layout of gradients; no size has fewer than 8.
    plain, recipe = make(name, channels=128), make(name, channels=128).cuda()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = torch.compile(recipe, fullgraph=True, dynamic=False) if compiled else recipe
    sizes = Sizes(tokens=400, ids=10, samples=SIZES.samples, frames=128)
    batches = [with_totals([BATCHES[name](seed=seed)])[0] for seed in range(3)]
    expected = float(plain(batches[0], sizes)["total"].detach())
    batches = [{key: value.cuda() for key, value in batch.items()} for batch in batches]

    def step(batch: Batch, number: int) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            total: Tensor = run(batch, sizes)["total"]
            recipe.evaluate(batch, sizes)
        total.backward()
        recipe.after_step(number)
        return total.detach()

    recipe.before_first_step(batches[0])
    first = step(batches[0], 50)
    torch.cuda.synchronize()
    with waiting_is_an_error():
        recipe.before_first_step(batches[1])
        for number, batch in enumerate(batches[1:], 49):
            step(batch, number)
    # A fresh decoder is so quiet that bf16 shows in its log-mels.
    assert float(first) == pytest.approx(expected, rel=0.2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == int(compiled)


# Compiling


@pytest.mark.parametrize("recompute", [False, True])
def test_equal_layers_are_compiled_once_and_validation_not_at_all(recompute: bool, graphs: Any) -> None:
    gpt = GPT(replace(DIMS, layers=MANY_LAYERS, encoder_layers=2)).train()
    gpt.checkpointing = recompute
    recipe = GptRecipe(gpt)
    batches = [with_totals([gpt_batch(seed)])[0] for seed in range(3)]
    expected = [recipe(batch, SIZES)["total"].item() for batch in batches]
    for region in recipe.regions():
        region.compile(backend=graphs, fullgraph=True, dynamic=False)
    for batch, value in zip(batches, expected, strict=True):
        total = recipe(batch, SIZES)["total"]
        total.backward()
        assert total.item() == pytest.approx(value, rel=1e-5)
    assert graphs.count == 3  # a block, a block of the conditioning encoder, the resampler
    recipe.evaluate(gpt_batch(7, num_clips=2), SIZES)
    assert graphs.count == 3
