"""The GPT: equal to the reference number for number, and to itself however clips are packed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from model_fixtures import GPT_DIMS as DIMS
from model_fixtures import gpt_model, reference_of
from torch import Tensor

from myxtts.config import CONDITIONING_TOKENS
from myxtts.model.blocks import cover, offsets_of, segment_of
from myxtts.model.conditioning import ClipGroupNorm, pack_frames
from myxtts.model.gpt import (
    AUDIO,
    GPT,
    IGNORE,
    PADDING,
    TEXT,
    GPTDims,
    Losses,
    PackedBatch,
    adapter_state,
    add_adapters,
    grow_text_vocabulary,
    merge_adapters,
    pack,
    packed_length,
    store_frozen_in_bf16,
)

__all__ = ["gpt_model"]

reference = reference_of("gpt")
Batch = dict[str, Tensor]


@pytest.fixture
def fixture_batch(reference: dict[str, Any]) -> PackedBatch:
    mel = reference["cond_mels"][:, 0].transpose(1, 2).reshape(-1, 80)
    frames = pack_frames(mel, torch.tensor([517] * 3), 517)
    text = reference["text"], reference["text_lengths"]
    return pack(DIMS, frames, *text, reference["audio_codes"], reference["num_codes"], budget=400)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


def random_batch(seed: int, num_clips: int, num_frames: int = 160, most_frames: int = 60) -> Batch:
    """Padded tensors with random lengths, rubbish behind them, NaN behind the frames."""
    random = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    counts = draw(1, min(most_frames, num_frames // num_clips) + 1, num_clips)
    mel = torch.randn(num_frames, 80, generator=random)
    mel[int(counts.sum()) :] = torch.nan
    return {
        "mel": mel,
        "num_frames": counts.int(),
        "ids": draw(0, 300, num_clips, 14).int(),
        "num_ids": draw(1, 15, num_clips).int(),
        "codes": draw(0, 1024, num_clips, 30).short(),
        "num_codes": draw(1, 31, num_clips).int(),
        "weights": torch.ones(num_clips),
    }


def packed(batch: Batch, budget: int, dims: GPTDims = DIMS) -> PackedBatch:
    frames = pack_frames(batch["mel"], batch["num_frames"], 60)
    names = ("ids", "num_ids", "codes", "num_codes")
    return pack(dims, frames, *(batch[name] for name in names), budget=budget, weights=batch["weights"])


def clips_of(batch: Batch) -> Iterator[Batch]:
    """Each clip alone: no frame, token or position more than it has."""
    mels = batch["mel"][: int(batch["num_frames"].sum())].split(batch["num_frames"].tolist())
    for number, mel in enumerate(mels):
        clip = {name: value[number : number + 1] for name, value in batch.items() if name != "mel"}
        clip["ids"] = clip["ids"][:, : int(clip["num_ids"])]
        clip["codes"] = clip["codes"][:, : int(clip["num_codes"])]
        yield clip | {"mel": mel}


def length_of(batch: Batch) -> int:
    return int(packed_length(batch["num_ids"], batch["num_codes"]).sum())


def total(losses: Losses) -> Tensor:
    return 0.01 * losses.text_sum + losses.audio_sum


def gradients(model: GPT, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    # Some gradients vanish but for rounding (a bias of all keys moves no softmax): measured against the largest.
    floor = 1e-3 * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        error = float((found[name] - gradient).abs().max())
        assert error <= tolerance * max(float(gradient.abs().max()), floor), (name, error)


# The reference


def test_conditioning_latents_equal_the_reference(model: GPT, reference: dict[str, Any]) -> None:
    mels = reference["cond_mels"][:, 0].transpose(1, 2)
    expected = reference["style_emb"].transpose(1, 2)
    frames = pack_frames(mels.reshape(-1, 80), torch.tensor([517] * 3), 517)
    assert relative_error(model.condition(frames), expected) < 2e-6
    assert relative_error(model.voice(list(mels)), expected.mean(0, keepdim=True)) < 2e-6


def test_hidden_states_logits_code_latents_and_losses_equal_the_reference(
    model: GPT, reference: dict[str, Any], fixture_batch: PackedBatch
) -> None:
    hidden, latents = model.norms(model.stack(fixture_batch)), model.code_latents(fixture_batch)
    assert latents.shape == (3, 60, 64)
    text_losses, audio_losses = [], []
    for number, expected in enumerate(reference["sequences"]):
        start, end = fixture_batch.offsets[number : number + 2].tolist()
        found = hidden[start:end]  # the reference has one position more, behind the last target
        assert end - start == len(expected["hidden"]) - 1
        assert relative_error(found, expected["hidden"][:-1]) < 2e-6
        text, audio = found[CONDITIONING_TOKENS:].split([len(expected["text_in"]), len(expected["audio_in"]) - 1])
        assert relative_error(model.text_head(text), expected["text_logits"]) < 2e-6
        assert relative_error(model.mel_head(audio), expected["audio_logits"][:-1]) < 2e-6
        num_codes = int(reference["num_codes"][number])
        assert (
            relative_error(latents[number, :num_codes], expected["hidden"][-len(audio) - 1 :][:num_codes]) < 2e-6
        )
        assert not latents[number, num_codes:].any()
        for kind, losses in (("text", text_losses), ("audio", audio_losses)):
            losses.append(
                F.cross_entropy(expected[f"{kind}_logits"], expected[f"{kind}_target"], reduction="none")
            )
    found = model(fixture_batch)
    assert relative_error(found.text, torch.cat([loss[:-1] for loss in text_losses]).mean()) < 2e-6
    assert relative_error(found.audio, torch.cat([loss[:-1] for loss in audio_losses]).mean()) < 2e-6
    # Only near: the reference hides the text's STOP from its codes while training.
    assert relative_error(found.text, reference["coqui_loss_text"]) < 1e-5
    assert relative_error(found.audio, reference["coqui_loss_mel"]) < 1e-3


# Packed rows


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), rest=st.integers(0, 40), more=st.integers(0, 3)
)
def test_segments_cover_every_row(lengths: list[int], rest: int, more: int) -> None:
    num_rows, longest = sum(lengths) + rest, max(*lengths, 1) + more
    offsets = cover(offsets_of(torch.tensor(lengths)), num_rows, longest)
    assert offsets.dtype == torch.int32
    assert offsets[: len(lengths) + 1].diff().tolist() == lengths
    assert offsets[0] == 0
    assert offsets[-1] == num_rows
    assert ((offsets.diff() >= 0) & (offsets.diff() <= longest)).all()
    rows = torch.arange(num_rows)
    segments = segment_of(rows, offsets)
    assert ((offsets[segments] <= rows) & (rows < offsets[segments + 1])).all()


def test_norm_of_packed_clips_is_group_norm_of_each() -> None:
    norm = ClipGroupNorm(128)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = 100 + torch.randn(40, 128)  # a mean far from zero, where sums of squares would lose all digits
    found = norm(x, pack_frames(torch.zeros(40, 80), torch.tensor([10, 25]), 25))
    for clip, start, end in ((x[:10], 0, 10), (x[10:35], 10, 35)):
        expected = F.group_norm(clip.t()[None].double(), 32, norm.weight.double(), norm.bias.double())[0].t()
        assert relative_error(found[start:end].double(), expected) < 1e-4
    torch.testing.assert_close(found[35:], norm.bias.expand(5, -1))


def test_a_row_by_hand() -> None:
    dims = GPTDims(text_tokens=300, start_text=261, stop_text=0)
    batch = {
        "mel": torch.zeros(8, 80),
        "num_frames": torch.tensor([3, 4]),
        "ids": torch.tensor([[7, 8, 99], [5, 99, 99]]),
        "num_ids": torch.tensor([2, 1]),
        "codes": torch.tensor([[9, 99], [10, 11]]),
        "num_codes": torch.tensor([1, 2]),
        "weights": torch.tensor([1.0, 0.5]),
    }
    row = packed(batch, 2 * 32 + 4 + 5 + 3 + 6 + 2, dims)
    assert row.offsets[:3].tolist() == [0, 32 + 9, 2 * 32 + 18]
    first, second, padding = row.token.split([41, 41, 2])
    assert first[32:].tolist() == [261, 7, 8, 0, 1024, 9, 1025, 1025, 1025]
    assert second[32:].tolist() == [261, 5, 0, 1024, 10, 11, 1025, 1025, 1025]
    assert row.kind[32:41].tolist() == [TEXT] * 4 + [AUDIO] * 5
    assert row.position[:41].tolist() == [*range(32), *range(4), *range(5)]
    assert row.position[41:82].tolist() == [*range(32), *range(3), *range(6)]
    assert row.kind[82:].tolist() == [PADDING] * 2
    assert row.clip.tolist() == [0] * 41 + [1] * 41 + [2] * 2
    assert padding.tolist() == [0, 0]
    text_targets, audio_targets = row.targets[:8].tolist(), row.targets[8:].tolist()
    assert text_targets == [7, 8, 0, 5, 0] + [IGNORE] * 3
    assert audio_targets == [9, *[1025] * 4, 10, 11, *[1025] * 4, IGNORE]
    assert row.loss_rows.tolist() == [32, 33, 34, 73, 74, -1, -1, -1, *range(36, 41), *range(76, 82), -1]
    assert row.weights.tolist() == [1, 1, 1, 0.5, 0.5, 0, 0, 0] + [1] * 5 + [0.5] * 6 + [0]
    places = torch.full((84,), -1)
    used = row.loss_rows >= 0
    places[row.loss_rows[used]] = torch.arange(20)[used]
    assert torch.equal(row.loss_index, places)


@pytest.mark.parametrize(
    ("seed", "clip_weights", "padding"),
    [(0, [1, 1], 8), (1, [1, 1, 1], 56), (2, [1] * 4, 392), (3, [1] * 5, 8), (9, [1, 0, 1, 0.5], 1000)],
)
def test_packed_equals_one_by_one(model: GPT, seed: int, clip_weights: list[float], padding: int) -> None:
    batch = random_batch(seed, num_clips=len(clip_weights)) | {"weights": torch.tensor(clip_weights).float()}
    alone = [model(packed(clip, length_of(clip))) for clip in clips_of(batch)]
    together = model(packed(batch, length_of(batch) + padding))
    for clip, losses in zip(clips_of(batch), alone, strict=True):
        assert losses.text_count == float(clip["weights"]) * (int(clip["num_ids"]) + 1)
        assert losses.audio_count == float(clip["weights"]) * (int(clip["num_codes"]) + 4)
    for name in Losses._fields:
        expected = torch.stack([getattr(losses, name) for losses in alone]).sum()
        assert relative_error(getattr(together, name), expected) < 1e-5
    used = [total(losses) for losses, weight in zip(alone, clip_weights, strict=True) if weight]
    expected_gradients = gradients(model, torch.stack(used).sum())
    assert all(gradient.any() for gradient in expected_gradients.values())
    assert_same_gradients(gradients(model, total(together)), expected_gradients)


def test_too_much_for_a_budget_is_an_error() -> None:
    batch = random_batch(0, num_clips=3)
    packed(batch, length_of(batch))
    with pytest.raises(RuntimeError, match="exceeds its budget"):
        packed(batch, length_of(batch) - 1)
    with pytest.raises(RuntimeError, match="exceeds its budget"):
        packed(batch | {"num_codes": torch.tensor([5, 31, 5])}, 600)
    with pytest.raises(RuntimeError, match="more frames"):
        packed(batch | {"num_frames": torch.tensor([60, 60, 60])}, 600)
    with pytest.raises(ValueError, match="608 positions"):
        packed(batch | {"codes": torch.zeros(3, 605, dtype=torch.long)}, 600)


def test_before_training_codes_that_sound_alike_and_neighbouring_places_are_alike() -> None:
    torch.manual_seed(0)
    gpt = GPT(GPTDims(layers=1, dim=64, heads=1, num_codes=32, encoder_layers=1))
    vectors = torch.randn(32, 48)
    vectors[7] = vectors[3] + 0.01
    start = gpt.mel_embedding.weight[32:].clone()
    gpt.init_from_codebook(vectors)
    for weight in (gpt.mel_embedding.weight, gpt.mel_head.weight):
        apart = torch.cdist(weight[:32], weight[:32])
        assert apart[3, 7] < 0.1 * apart.median()
        true = torch.cdist(vectors, vectors)
        assert torch.corrcoef(torch.stack([apart.flatten(), true.flatten()]))[0, 1] > 0.8
    assert torch.equal(gpt.mel_embedding.weight[32:], start), "START and STOP have no vectors"
    assert float(gpt.mel_embedding.weight[:32].std()) == pytest.approx(0.02, rel=0.05)
    for places in (gpt.mel_pos_embedding.emb.weight, gpt.text_pos_embedding.emb.weight):
        steps = (places[1:] - places[:-1]).norm(dim=1)
        torch.testing.assert_close(steps, steps[:1].expand_as(steps), rtol=1e-3, atol=1e-6)
        assert steps[0] < (places[40:] - places[:-40]).norm(dim=1).min()


def test_label_smoothing(model: GPT) -> None:
    row = packed(random_batch(5, num_clips=1), 600)
    logits = model.mel_head(model.norms(model.stack(row))[row.first_code :][: int(row.num_codes) + 4])
    targets = row.targets[row.text_budget :][: len(logits)]
    expected = F.cross_entropy(logits, targets, label_smoothing=0.1)
    assert relative_error(model(row, label_smoothing=0.1).audio, expected) < 1e-5


# Training


def test_checkpointing_changes_memory_not_numbers_and_dropout_is_for_training_only(
    reference: dict[str, Any],
) -> None:
    model = GPT(DIMS, dropout=0.1)
    model.load_state_dict(reference["state_dict"])
    row = packed(random_batch(1, num_clips=2), 200)
    kept, results = [], []
    for model.checkpointing in (False, True):
        torch.manual_seed(7)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=sizes: s.append(x.numel()) or x, lambda x: x):
            loss = total(model(row))
        kept.append(sum(sizes))
        results.append(gradients(model, loss))
    assert_same_gradients(results[1], results[0])
    assert kept[1] < kept[0]
    assert not torch.equal(model(row).audio, model(row).audio)
    model.eval()
    assert torch.equal(model(row).audio, model(row).audio)


# Growth and adapters


def test_growing_the_vocabulary_keeps_every_old_row(model: GPT) -> None:
    old = model.state_dict()
    grown = grow_text_vocabulary(old, 310, torch.Generator().manual_seed(1))
    again = grow_text_vocabulary(old, 310, torch.Generator().manual_seed(1))
    larger = GPT(replace(DIMS, text_tokens=310)).eval()
    larger.load_state_dict(grown)
    for name, value in grown.items():
        assert torch.equal(value[: len(old[name])], old[name])
        assert torch.equal(value, again[name])
    changed = {name for name in grown if grown[name].shape != old[name].shape}
    assert changed == {"text_embedding.weight", "text_head.weight", "text_head.bias"}
    assert len(old["text_embedding.weight"]) == 300  # the given state is left alone
    rows = grown["text_embedding.weight"]
    assert float(rows[300:].std()) < float(rows[:300].std())
    assert len(rows[300:].unique(dim=0)) == 10
    row = packed(random_batch(2, num_clips=2), 300)
    assert torch.equal(larger(row).audio, model(row).audio)
    assert 0 < float((larger(row).text - model(row).text).detach()) < 0.1
    prefixed = {f"gpt.{name}": value for name, value in old.items()}
    assert len(grow_text_vocabulary(prefixed, 301, prefix="gpt.")["gpt.text_head.bias"]) == 301
    with pytest.raises(ValueError, match="has 300 rows"):
        grow_text_vocabulary(old, 299)


def test_adapters_train_alone_and_merge(model: GPT) -> None:
    row = packed(random_batch(2, num_clips=2), 300)
    before = model(row).audio
    base = {name: value.clone() for name, value in model.state_dict().items()}
    add_adapters(model, rank=4, train_also=["text_head"])
    assert torch.equal(model(row).audio, before)

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in model.state_dict() if "lora_" in name or name.startswith("text_head")}
    assert len(trained) == 2 * 4 * 2 + 2
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        total(model(row)).div(100).backward()
        optimizer.step()
    adapted = model(row).audio.detach()
    assert float(before.detach() - adapted) > 1e-3
    for name, value in base.items():
        assert torch.equal(model.state_dict()[name], value) != name.startswith("text_head")

    assert set(adapter_state(model)) == trained
    copy = GPT(DIMS).eval()
    copy.load_state_dict(base)
    add_adapters(copy, rank=4)
    assert not copy.load_state_dict(adapter_state(model), strict=False).unexpected_keys
    assert torch.equal(copy(row).audio, adapted)

    merge_adapters(model)
    assert list(model.state_dict()) == list(base)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert relative_error(model(row).audio, adapted) < 1e-5
    with pytest.raises(ValueError, match="already"):
        add_adapters(copy, rank=4)


# On a GPU


def on_gpu(batch: Batch) -> Batch:
    return {name: value.cuda() for name, value in batch.items()}


def assert_close_in_bf16(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    floor = 1e-3 * max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert found[name].isfinite().all(), name
        error = float((found[name].cpu() - gradient).norm()) / max(float(gradient.norm()), floor)
        assert error < 0.05, (name, error)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_on_the_gpu_is_near_fp32_on_the_cpu(model: GPT, compiled: bool) -> None:
    batch = random_batch(4, num_clips=5, num_frames=400)
    losses = model(packed(batch, 700))
    expected = gradients(model, total(losses))
    model.cuda()

    def step(inputs: Batch) -> Losses:
        with torch.autocast("cuda", torch.bfloat16):
            found: Losses = model(packed(inputs, 700))
            return found

    found = (torch.compile(step, fullgraph=True, dynamic=False) if compiled else step)(on_gpu(batch))
    assert relative_error(found.text.cpu(), losses.text) < 5e-3
    assert relative_error(found.audio.cpu(), losses.audio) < 5e-3
    assert_close_in_bf16(gradients(model, total(found)), expected)


@pytest.mark.gpu
def test_fp32_on_the_gpu_equals_the_cpu(model: GPT) -> None:
    batch = random_batch(4, num_clips=3)
    losses = model(packed(batch, 500))
    expected = gradients(model, total(losses))
    model.cuda()
    found = model(packed(on_gpu(batch), 500))
    assert relative_error(found.audio.cpu(), losses.audio) < 1e-4
    on_cpu = {name: gradient.cpu() for name, gradient in gradients(model, total(found)).items()}
    assert_same_gradients(on_cpu, expected, tolerance=1e-3)


def test_frozen_matrices_in_bf16_halve_memory_and_stay_near() -> None:
    torch.manual_seed(0)
    model = GPT(DIMS)
    batch = packed(random_batch(3, 4), 800)
    expected = model(batch).audio
    add_adapters(model, rank=4)
    before = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    store_frozen_in_bf16(model)
    after = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    assert after < 0.52 * before
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(batch).audio
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    found.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
