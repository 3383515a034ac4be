"""The optimiser: plain AdamW step by step, untouched by steps that are not finite, exact after a resume."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable

import pytest
import torch
from model_fixtures import waiting_is_an_error
from torch import Tensor, nn

from myxtts.errors import ConfigError
from myxtts.model.xtts import SIZES, XTTS
from myxtts.training.optim import Optimizer, Schedule, parameter_groups

CONSTANT = Schedule(0, None)
Gradients = list[Tensor]
pytestmark = pytest.mark.usefixtures("one_thread")


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 3))


def draw_gradients(model: nn.Module, seed: int, size: float = 1.0) -> Gradients:
    random = torch.Generator().manual_seed(seed)
    return [size * torch.randn(weight.shape, generator=random) for weight in model.parameters()]


def give(model: nn.Module, gradients: Gradients) -> None:
    for weight, gradient in zip(model.parameters(), gradients, strict=True):
        weight.grad = gradient.clone().to(weight.device)


def take_step(optimizer: Optimizer, step: int) -> None:
    optimizer.set_lr(step)
    optimizer.update()


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights, moments, step counts and averages, without the counters of skipped steps."""
    state = {name: value.detach().clone() for name, value in (model.state_dict() | optimizer.state_dict()).items()}
    return {name: value for name, value in state.items() if not name.startswith("skipped")}


def assert_identical(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def torch_adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    groups = [
        {"params": list(group.parameters.values()), "weight_decay": group.weight_decay}
        for group in parameter_groups(model, 0.1)
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.96), foreach=False)


@pytest.mark.parametrize("grad_clip", [0.0, 1.0])
def test_every_step_equals_plain_adamw_with_clipping_and_schedule(grad_clip: float) -> None:
    model = small_model()
    twin = copy.deepcopy(model)
    schedule = Schedule(3, 8)
    optimizer = Optimizer(model, 0.01, schedule, weight_decay=0.1, grad_clip=grad_clip)
    plain = torch_adamw(twin, 0.01)
    for step in range(10):
        gradients = draw_gradients(model, step, size=0.01 if step % 2 else 10.0)  # clipped in every other step
        give(model, gradients)
        give(twin, gradients)
        norm = nn.utils.clip_grad_norm_(twin.parameters(), grad_clip or math.inf)
        for group in plain.param_groups:
            group["lr"] = 0.01 * schedule.factor(step)
        plain.step()
        take_step(optimizer, step)
        assert float(optimizer.last_norm["model"]) == pytest.approx(float(norm), rel=1e-6)
        assert optimizer.lr_at(step) == pytest.approx(float(optimizer.lr))
        torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=1e-6)


def test_named_sets_are_clipped_separately_and_skipped_together() -> None:
    models = {"generator": small_model(0), "discriminators": small_model(1)}
    twins = copy.deepcopy(models)
    optimizer = Optimizer(models, 0.01, CONSTANT, weight_decay=0.1)
    plain = {name: torch_adamw(twin, 0.01) for name, twin in twins.items()}
    for step in range(3):
        for name, size in (("generator", 100.0), ("discriminators", 0.01)):
            gradients = draw_gradients(models[name], step, size)
            give(models[name], gradients)
            give(twins[name], gradients)
            nn.utils.clip_grad_norm_(twins[name].parameters(), 1.0)
            plain[name].step()
        take_step(optimizer, step)
    for name, twin in twins.items():
        torch.testing.assert_close(models[name].state_dict(), twin.state_dict(), rtol=0, atol=1e-6)
    assert optimizer.last_norm["generator"] > 100 > 1 > optimizer.last_norm["discriminators"]
    assert "exp_avg.discriminators.1.weight" in optimizer.state_dict()

    before = everything(models["generator"], optimizer)
    models["discriminators"][1].weight.grad[0, 0] = math.nan
    optimizer.update()
    assert_identical(everything(models["generator"], optimizer), before)


def test_norms_biases_embeddings_latents_and_magnitudes_are_spared_from_decay() -> None:
    with torch.device("meta"):
        gpt = XTTS(SIZES["tiny"]).gpt
    decayed, spared = parameter_groups(gpt, 0.01)
    assert (decayed.weight_decay, spared.weight_decay) == (0.01, 0.0)
    is_spared = re.compile(
        r".*\.bias|.*\bnorm\.weight|.*\.ln_[12f]\.weight|final_norm\.weight|.*\.gamma"
        r"|(text|mel)_embedding\.weight|(text|mel)_pos_embedding\.emb\.weight|conditioning_perceiver\.latents"
    )
    names = {name for name, _ in gpt.named_parameters()}
    assert spared.parameters.keys() == {name for name in names if is_spared.fullmatch(name)}
    assert decayed.parameters.keys() == names - spared.parameters.keys()
    assert {"text_embedding.weight", "conditioning_perceiver.latents"} <= spared.parameters.keys()
    assert {"gpt.h.0.attn.c_attn.weight", "mel_head.weight"} <= decayed.parameters.keys()

    decayed, spared = parameter_groups(nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 8, 3)), 0.01)
    assert list(decayed.parameters) == ["parametrizations.weight.original1"]
    assert set(spared.parameters) == {"bias", "parametrizations.weight.original0"}


def test_frozen_parameters_are_left_out_and_untouched() -> None:
    model = small_model()
    model[1].requires_grad_(False)
    before = copy.deepcopy(model[1])
    optimizer = Optimizer(model, 0.1, CONSTANT, ema_decay=0.5)
    give(model, draw_gradients(model, 0))  # even a gradient that should not be there
    take_step(optimizer, 0)
    assert_identical(model[1].state_dict(), before.state_dict())
    assert not [name for name in optimizer.state_dict() if ".1." in name]
    with pytest.raises(ValueError, match="frozen"):
        Optimizer(model.requires_grad_(False), 0.1, CONSTANT)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_step_with_a_non_finite_gradient_is_counted_and_changes_nothing(bad: float) -> None:
    model = small_model()
    twin = copy.deepcopy(model)
    optimizer, untroubled = (Optimizer(either, 0.01, CONSTANT, ema_decay=0.9) for either in (model, twin))
    counts = []
    for step, is_bad in enumerate([False, True, True, False, True, False]):
        gradients = draw_gradients(model, step)
        give(model, gradients)
        if is_bad:
            model[3].bias.grad[1] = bad
        else:
            give(twin, gradients)
            take_step(untroubled, step)
        take_step(optimizer, step)
        counts.append((int(optimizer.skipped), int(optimizer.skipped_in_a_row)))
        assert_identical(everything(model, optimizer), everything(twin, untroubled))
    assert counts == [(0, 0), (1, 1), (2, 2), (2, 0), (3, 1), (3, 0)]


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (Schedule(4, 104, floor=0.1), {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 1.0, 54: 0.55, 104: 0.1, 5000: 0.1}),
        (Schedule(4, 104, floor=0.1), {29: 0.1 + 0.45 * (1 + math.sqrt(0.5))}),
        (Schedule(10, None), {10: 1.0, 11: 1.0, 10**6: 1.0}),
        (Schedule(4, 120, lead_steps=16), {0: 1.0, 15: 1.0, 16: 0.2, 20: 1.0, 70: 0.55, 120: 0.1}),
        (Schedule(0, None), {0: 1.0}),
        (Schedule(0, 100), {0: 1.0}),
    ],
)
def test_the_schedule_rises_falls_along_a_cosine_and_stays_at_its_floor(
    schedule: Schedule, factors: dict[int, float]
) -> None:
    assert {step: schedule.factor(step) for step in factors} == pytest.approx(factors)
    assert Schedule(10, 5).factor(10) > 0, "a run shorter than its warm-up"


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_resuming_through_the_state_is_bit_identical(ema_decay: float) -> None:
    def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            give(model, draw_gradients(model, step))
            if step == 2:
                model[1].weight.grad[0, 0] = math.nan
            take_step(optimizer, step)

    def make(model: nn.Module) -> Optimizer:
        return Optimizer(model, 0.01, Schedule(2, 10), ema_decay=ema_decay)

    model = small_model()
    optimizer = make(model)
    train(model, optimizer, range(4))
    resumed = small_model(seed=1)
    resumed.load_state_dict(model.state_dict())
    other = make(resumed)
    addresses = {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
    other.load_state_dict({name: tensor.clone() for name, tensor in optimizer.state_dict().items()})
    assert addresses == {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
    assert int(other.skipped) == 1
    train(model, optimizer, range(4, 9))
    train(resumed, other, range(4, 9))
    assert_identical(everything(resumed, other), everything(model, optimizer))


def test_a_state_of_other_settings_is_refused_before_anything_is_loaded() -> None:
    model = small_model()
    state = Optimizer(model, 0.01, CONSTANT, ema_decay=0.9).state_dict()
    optimizer = Optimizer(model, 0.01, CONSTANT)
    state["exp_avg.0.weight"] = torch.ones(7, 6)
    with pytest.raises(ConfigError, match=r"ema\.0\.weight"):
        optimizer.load_state_dict(state)
    assert not optimizer.state_dict()["exp_avg.0.weight"].any()
    wrong_shape = {name: tensor[:1] if tensor.dim() else tensor for name, tensor in optimizer.state_dict().items()}
    with pytest.raises(ConfigError, match="shape"):
        optimizer.load_state_dict(wrong_shape)


def test_averaged_weights_follow_the_weights_and_can_take_their_place() -> None:
    model = small_model()
    optimizer = Optimizer(model, 0.1, CONSTANT, ema_decay=0.25)
    expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for step, decay in enumerate((1 / 10, 2 / 11, 3 / 12, 0.25, 0.25)):  # short while there is little to average
        give(model, draw_gradients(model, step))
        take_step(optimizer, step)
        for name, weight in model.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * weight.detach()
    averaged = {name: optimizer.state_dict()[f"ema.{name}"] for name in expected}
    torch.testing.assert_close(averaged, expected, rtol=0, atol=1e-6)

    trained = everything(model, optimizer)
    addresses = [weight.data_ptr() for weight in model.parameters()]
    with pytest.raises(RuntimeError, match="while validating"), optimizer.swap_ema():
        assert all(torch.equal(weight, trained[f"ema.{name}"]) for name, weight in model.named_parameters())
        assert addresses == [weight.data_ptr() for weight in model.parameters()]
        raise RuntimeError("while validating")
    assert_identical(everything(model, optimizer), trained)


def test_gradients_are_zeroed_in_place() -> None:
    model = small_model()
    optimizer = Optimizer(model, 0.01, CONSTANT)
    give(model, draw_gradients(model, 0))
    addresses = [weight.grad.data_ptr() for weight in model.parameters()]
    optimizer.zero_grad()
    assert not any(weight.grad.any() for weight in model.parameters())
    assert addresses == [weight.grad.data_ptr() for weight in model.parameters()]


def device_steps(captured: bool) -> tuple[dict[str, Tensor], int]:
    """Seven steps on the GPU, the fifth with an infinite loss; from the third on replayed from a graph, or not."""
    model = small_model().cuda()
    optimizer = Optimizer(model, 0.01, Schedule(2, 10), grad_clip=0.5, ema_decay=0.9)
    ids, factor = torch.arange(7, device="cuda"), torch.ones((), device="cuda")

    def device_part() -> None:
        optimizer.zero_grad()
        (factor * model(ids).square().sum()).backward()
        optimizer.update()

    run: Callable[[], None] = device_part
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(7):
            if captured and step == 2:
                with torch.cuda.graph(graph, stream=stream):
                    device_part()
                run = graph.replay
            with waiting_is_an_error():
                factor.fill_(math.inf if step == 4 else 1.0)
                optimizer.set_lr(step)
                run()
    torch.cuda.synchronize()
    return everything(model, optimizer), int(optimizer.skipped)


@pytest.mark.gpu
def test_the_device_never_makes_the_host_wait_and_a_graph_replays_what_eager_steps_do() -> None:
    eager, eager_skipped = device_steps(captured=False)
    replayed, replayed_skipped = device_steps(captured=True)
    assert eager_skipped == replayed_skipped == 1
    assert eager["step.1.weight"] == 6
    torch.testing.assert_close(replayed, eager, rtol=0, atol=1e-6)
