"""The sampler: the reference's codes, the same alone and in a batch, drawn from the right distribution."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_fixtures import GPT_DIMS as DIMS
from model_fixtures import gpt_model, reference_of
from synthesis_fixtures import generate
from torch import Tensor

from myxtts.model.blocks import InOutLinear
from myxtts.model.conditioning import pack_frames
from myxtts.model.gpt import GPT, pack
from myxtts.synthesis.generation import (
    Decoding,
    FusedBlocks,
    Prompt,
    RowSampling,
    Sampling,
    Shape,
    choose,
    convert,
    draws,
    rounded_up,
    usual_dtype,
)

__all__ = ["gpt_model"]

reference = reference_of("gpt")
GREEDY = Sampling(greedy=True)
PLAIN = Sampling(temperature=1, top_k=0, top_p=1, repetition_penalty=1)
STOP = DIMS.stop_code
Sentences = list[Prompt]


@pytest.fixture
def prompts(reference: dict[str, Any]) -> Sentences:
    """Three voices with 20, 13 and 7 tokens, to generate up to 60 codes of each."""
    texts = [text[text > 0].tolist() for text in reference["text"]]
    voices = reference["style_emb"].transpose(1, 2).split(1)
    return [Prompt(text, voices[row], draws(0, row, 0, 60)) for row, text in enumerate(texts)]


def up_to(num_codes: int, prompts: Sentences) -> Sentences:
    return [prompt._replace(draws=draws(0, 0, 0, num_codes)) for prompt in prompts]


def likelier(model: GPT, code: int, by: float) -> None:
    model.mel_head.bias.data[code] += by


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_greedy_codes_equal_the_reference(
    model: GPT, prompts: Sentences, reference: dict[str, Any], device: str
) -> None:
    (expected,) = reference["greedy_codes"]
    for capture in (False, True):
        found = generate(model.to(device), up_to(len(expected), prompts), GREEDY, capture=capture)
        assert torch.equal(found[0].codes, expected)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), replace(PLAIN, guidance=2.0)])
def test_a_batch_equals_one_by_one(model: GPT, prompts: Sentences, sampling: Sampling) -> None:
    likelier(model, STOP, 1.2)
    together = generate(model, prompts, sampling)
    assert len({len(found.codes) for found in together}) > 1, "the sentences should end at different steps"
    for prompt, found in zip(prompts, together, strict=True):
        (alone,) = generate(model, [prompt], sampling)
        assert torch.equal(found.codes, alone.codes)
        torch.testing.assert_close(found.latents, alone.latents, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_cache_equals_computing_everything_again(
    model: GPT, prompts: Sentences, reference: dict[str, Any], guidance: float
) -> None:
    """A second pass over the finished codes finds the same latents, and the same codes in them."""
    found = generate(model, up_to(40, prompts), Sampling(greedy=True, repetition_penalty=1, guidance=guidance))
    codes = torch.nn.utils.rnn.pad_sequence([one.codes for one in found], batch_first=True)
    lengths = torch.tensor([len(one.codes) for one in found])
    frames = pack_frames(torch.zeros(3, 80), torch.ones(3, dtype=torch.long), 1)
    model.condition = lambda _: reference["style_emb"].transpose(1, 2)  # type: ignore[method-assign]
    with_text, without = (
        model.code_latents(pack(DIMS, frames, reference["text"], num_ids, codes, lengths, budget=400))
        for num_ids in (reference["text_lengths"], torch.zeros(3, dtype=torch.long))
    )
    scores = model.mel_head(without).lerp(model.mel_head(with_text), guidance)
    scores[..., DIMS.start_code] = -torch.inf
    for one, latents, likely in zip(found, with_text, scores.argmax(-1), strict=True):
        torch.testing.assert_close(one.latents, latents[: len(one.codes)], rtol=1e-5, atol=1e-5)
        assert torch.equal(one.codes, likely[: len(one.codes)])


def test_matrices_of_16_bits_hardly_change_the_probabilities(model: GPT, prompts: Sentences) -> None:
    if usual_dtype(torch.device("cpu")) == torch.float32:
        pytest.skip("PyTorch has no float16 kernels for this CPU")
    (codes,) = (found.codes for found in generate(model, prompts[:1], GREEDY))

    def log_probabilities() -> Tensor:
        ids, row = torch.tensor(prompts[0].ids), torch.zeros(1, dtype=torch.long)
        decoding = Decoding(model, Shape(1, len(ids), len(codes)))
        with torch.no_grad():
            prefix = decoding.prefix(prompts[0].voice, ids)
            decoding.extend(prefix, row, decoding.slots[: len(prefix)], rounded_up(len(prefix)))
            decoding.starts.fill_(len(prefix))
            steps = [(code[None], torch.tensor([at])) for at, code in enumerate(codes)]
            logits = [decoding.step(*step, len(decoding.slots))[0] for step in steps]
        return torch.cat(logits).double().log_softmax(-1)

    before = log_probabilities()
    convert(model, torch.float16)
    assert not any(isinstance(layer, InOutLinear) for layer in model.gpt.modules())
    assert not isinstance(model.mel_head, torch.nn.Linear)
    after = log_probabilities()
    assert 0 < (before.exp() * (before - after)).sum(-1).max() < 1e-5


def test_a_cpu_without_16_bit_kernels_keeps_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.quantized.engine", "qnnpack")
    assert usual_dtype(torch.device("cpu")) == torch.float32


def test_generation_stops_with_the_last_sentence(model: GPT, prompts: Sentences) -> None:
    steps: list[int] = []
    model.mel_head.register_forward_hook(lambda *_: steps.append(1))
    likelier(model, STOP, 100.0)
    found = generate(model, prompts, GREEDY)
    assert len(steps) == 1 and all(one.latents.shape == (0, 64) for one in found)


def test_dropout_and_overlong_requests_are_refused(model: GPT, prompts: Sentences) -> None:
    with pytest.raises(ValueError, match="positions"):
        generate(model, up_to(609, prompts), GREEDY)
    model.train()
    with pytest.raises(ValueError, match="eval"):
        generate(model, prompts, GREEDY)


# Choosing a code


def expected_share(logits: Tensor, used: Tensor, sampling: Sampling) -> Tensor:
    """The probability of each code by the definitions of the penalty, top-k and top-p."""
    penalties = [sampling.repetition_penalty if is_used else 1 for is_used in used.tolist()]
    penalised = [x * by if x < 0 else x / by for x, by in zip(logits.tolist(), penalties, strict=True)]
    scores = [x / sampling.temperature for x in penalised]
    order = sorted(range(len(scores)), key=lambda code: -scores[code])[: sampling.top_k or None]
    share = dict(zip(order, torch.tensor([scores[code] for code in order]).softmax(0).tolist(), strict=True))
    kept, reached = [], 0.0
    for code in order:
        kept.append(code)
        reached += share[code]
        if reached >= sampling.top_p:
            break
    result = torch.zeros(len(scores))
    result[kept] = torch.tensor([share[code] / reached for code in kept])
    return result


SAMPLINGS = [Sampling(), Sampling(top_p=0.3), Sampling(top_k=2, top_p=1, repetition_penalty=3), PLAIN]
SAMPLINGS += [replace(PLAIN, temperature=0.25), replace(PLAIN, top_k=2)]
SAMPLINGS += [replace(PLAIN, top_p=0.1 * tenths) for tenths in range(1, 10)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_codes_follow_the_penalised_and_cut_distribution(sampling: Sampling) -> None:
    logits = 2 * torch.randn(12, generator=torch.Generator().manual_seed(0))
    used, times = torch.arange(12) % 3 == 0, 20000
    drawn = (torch.arange(times) + 0.5) / times
    every = logits.expand(times, -1)
    chosen = choose(every, used.expand(times, -1), one_for_all(sampling, every), drawn)
    found, expected = chosen.bincount(minlength=12) / times, expected_share(logits, used, sampling)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    assert torch.equal(found > 0, expected > 1e-4)


def one_for_all(sampling: Sampling, logits: Tensor) -> RowSampling:
    """The same sampling for every row."""
    return RowSampling.of([sampling] * len(logits), logits.shape[1])


def test_the_prompt_counts_as_used_unless_switched_off(model: GPT, prompts: Sentences) -> None:
    likelier(model, 1, 3.0)  # code 1 would win
    for penalise, wins in ((True, False), (False, True)):
        found = generate(model, up_to(1, prompts), Sampling(greedy=True, penalise_prompt=penalise))
        assert all((int(one.codes[0]) == 1) == wins for one in found)


def test_start_is_never_chosen(model: GPT, prompts: Sentences) -> None:
    likelier(model, DIMS.start_code, 1000.0)
    likelier(model, STOP, -1000.0)
    (found,) = generate(model, up_to(12, prompts[:1]), Sampling())
    assert len(found.codes) == 12 and found.codes.max() < DIMS.num_codes


def test_random_numbers_belong_to_one_attempt_at_one_sentence() -> None:
    assert torch.equal(draws(1, 2, 0, 50), draws(1, 2, 0, 50))
    others = [draws(*which, 50) for which in ((2, 2, 0), (1, 3, 0), (1, 2, 1))]
    assert not any(torch.equal(draws(1, 2, 0, 50), other) for other in others)


def test_the_central_code_is_nearest_to_the_mean_of_the_likely_ones() -> None:
    vectors = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [1.2, 1.2], [9.0, 9.0]])
    likely = torch.tensor([[0.3, 0.3, 0.3, 0.05, 0.0, 0.0, 0.05]]).log().expand(100, -1)
    used = torch.zeros(likely.shape, dtype=torch.bool)
    sampling = one_for_all(replace(PLAIN, central=True), likely)
    chosen = choose(likely, used, sampling, torch.linspace(0, 0.999, 100), vectors)
    assert set(chosen.tolist()) == {3, 6}, "the middle of the first three, and STOP as often as it is drawn"
    assert 3 <= int((chosen == 6).sum()) <= 7


class KernelOnCpu:
    """What Triton makes of a function that computes some rows, on a CPU."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given: self._launch(grid, *given)


def attend(grid: tuple[int, int], *given: Any) -> None:
    q, k, v, keys, values, slots, out, scale, per_row, per_head, unused, heads, dim, _ = given
    assert grid == (len(slots), heads) and q.stride() == k.stride() == v.stride() == (per_row, dim, 1)
    assert per_head == (unused + 1) * dim and keys.is_contiguous() and values.is_contiguous()
    for row, slot in enumerate(slots.tolist()):
        keys[row, :, slot], values[row, :, slot] = k[row], v[row]
        there = [*range(slot if slot < unused else 0), slot]
        shares = (scale * q[row, :, None] @ keys[row][:, there].mT).softmax(-1)
        out[row] = (shares @ values[row][:, there])[:, 0]


def add(grid: tuple[int], *given: Any) -> None:
    x, more, weight, bias, out, epsilon, dim, block = given
    assert grid[0] * dim == x.numel() == more.numel() and x.is_contiguous() and dim <= block < 2 * dim
    out.copy_(F.layer_norm(x.add_(more.view(x.shape)), (dim,), weight, bias, epsilon))


def test_fused_blocks_compute_what_the_blocks_do(model: GPT) -> None:
    with torch.inference_mode():
        FusedBlocks(model, (KernelOnCpu(attend), KernelOnCpu(add))).check(model)
        found = []
        x = torch.randn(2, 5, DIMS.dim, generator=torch.manual_seed(0))
        for is_fused in (False, True):
            decoding = Decoding(model, Shape(3, 10, 10))
            if is_fused:
                decoding.fused = FusedBlocks(model, (KernelOnCpu(attend), KernelOnCpu(add)))
            slots = torch.arange(10).view(2, 5)
            found.append((decoding.begin(x.clone(), torch.tensor([2, 0]), slots), decoding.keys, decoding.values))
            found[-1] += (decoding.extend(x[0].clone(), torch.tensor([2]), slots[1]),)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=5e-3, rtol=0)
    assert found[0][1].abs().max() > 0.1


def test_kernels_that_compute_something_else_are_not_used(model: GPT) -> None:
    doubled = KernelOnCpu(lambda grid, x, more, *given: add(grid, x, 2 * more, *given))
    for broken in ((KernelOnCpu(attend), doubled), (KernelOnCpu(lambda *_: None), KernelOnCpu(add))):
        with torch.inference_mode(), pytest.raises(ValueError, match="an error of"):
            FusedBlocks(model, broken).check(model)


def test_steps_without_fused_kernels_say_why(
    model: GPT, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert FusedBlocks.compiled(model) is None
    assert "without fused kernels, which is slower: import of triton halted" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_compiles_the_kernels(model: GPT, dtype: torch.dtype) -> None:
    model.cuda()
    convert(model, dtype)
    assert FusedBlocks.compiled(model) is not None
