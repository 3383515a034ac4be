"""The sampler: the reference's codes, the same alone and in a batch, drawn from the right distribution."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from threading import active_count
from typing import Any

import pytest
import torch
from model_fixtures import GPT_DIMS as DIMS
from model_fixtures import gpt_model, reference_of
from torch import Tensor

from myxtts.devices import Stream
from myxtts.model.blocks import InOutLinear
from myxtts.model.conditioning import pack_frames
from myxtts.model.gpt import GPT, pack
from myxtts.synthesis.generation import (
    CodeGenerator,
    CodeGenerators,
    Decoding,
    Generated,
    Prompt,
    Sampling,
    Shape,
    captured_shape,
    choose,
    draws,
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


def generate(
    model: GPT, prompts: Sentences, sampling: Sampling = GREEDY, *, capture: bool = False
) -> list[Generated]:
    generator = CodeGenerators(model, capture=capture).begin(prompts, sampling)
    generator.finish()
    return [generator.generated(row) for row in range(len(prompts))]


def likelier(model: GPT, code: int, by: float) -> None:
    model.mel_head.bias.data[code] += by


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_greedy_codes_equal_the_reference(
    model: GPT, prompts: Sentences, reference: dict[str, Any], device: str
) -> None:
    (expected,) = reference["greedy_codes"]
    for capture in (False, True):
        found = generate(model.to(device), up_to(len(expected), prompts), capture=capture)
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


def test_guidance_runs_the_prefix_once(model: GPT, prompts: Sentences) -> None:
    """And one token more: without text, the prefix of a sentence differs in its STOP."""
    met: list[torch.Size] = []
    model.gpt.h[0].register_forward_pre_hook(lambda _, given: met.append(given[0].shape[:2]))
    for guidance in (1.0, 2.0):
        CodeGenerators(model, capture=False).begin(prompts[:1], replace(PLAIN, guidance=guidance))
    length = 32 + len(prompts[0].ids) + 2
    assert met == [(1, length), (1, length + 1)]


def test_matrices_of_16_bits_hardly_change_the_probabilities(model: GPT, prompts: Sentences) -> None:
    if usual_dtype(torch.device("cpu")) == torch.float32:
        pytest.skip("PyTorch has no float16 kernels for this CPU")
    (codes,) = (found.codes for found in generate(model, prompts[:1]))

    def log_probabilities() -> Tensor:
        decoding = Decoding(model, Shape(1, len(prompts[0].ids), len(codes)))
        with torch.no_grad():
            decoding.prefill(prompts[0].voice, torch.tensor([prompts[0].ids]), torch.tensor([len(prompts[0].ids)]))
            logits = [decoding.step(code[None], torch.tensor([at]), at + 1)[0] for at, code in enumerate(codes)]
        return torch.cat(logits).double().log_softmax(-1)

    before = log_probabilities()
    CodeGenerators(model, dtype=torch.float16)
    assert not any(isinstance(layer, InOutLinear) for layer in model.gpt.modules())
    assert not isinstance(model.mel_head, torch.nn.Linear)
    after = log_probabilities()
    assert 0 < (before.exp() * (before - after)).sum(-1).max() < 1e-5


def test_a_cpu_without_16_bit_kernels_keeps_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.quantized.engine", "qnnpack")
    assert usual_dtype(torch.device("cpu")) == torch.float32


def test_parts_are_the_sentence(model: GPT, prompts: Sentences) -> None:
    """And a sentence may be left after any part; the number of threads is what it was."""
    num_threads = torch.get_num_threads()
    (whole,) = generate(model, prompts[:1])
    generators = CodeGenerators(model, capture=False)
    parts, ends = zip(*generators.begin(prompts[:1], GREEDY).parts(7), strict=True)
    assert torch.equal(torch.cat([part.codes for part in parts]), whole.codes)
    torch.testing.assert_close(torch.cat([part.latents for part in parts]), whole.latents)
    assert ends == (False,) * (len(ends) - 1) + (True,)
    before = active_count()
    for part, _ in generators.begin(prompts[:1], GREEDY).parts(7):
        assert torch.equal(part.codes, whole.codes[:7])
        break
    assert active_count() == before and torch.get_num_threads() == num_threads


def test_generation_stops_with_the_last_sentence(model: GPT, prompts: Sentences) -> None:
    steps: list[int] = []
    model.mel_head.register_forward_hook(lambda *_: steps.append(1))
    likelier(model, STOP, 100.0)
    found = generate(model, prompts)
    assert len(steps) == 1 and all(one.latents.shape == (0, 64) for one in found)
    generator = CodeGenerators(model).begin(prompts, GREEDY)
    ended: list[int] = []
    generator.finish(ended.append)
    assert sum(ended) == len(prompts)


def test_dropout_and_overlong_requests_are_refused(model: GPT, prompts: Sentences) -> None:
    with pytest.raises(ValueError, match="positions"):
        generate(model, up_to(609, prompts))
    model.train()
    with pytest.raises(ValueError, match="eval"):
        generate(model, prompts)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(guidance=2.0, central=True)])
def test_a_step_can_be_captured(model: GPT, prompts: Sentences, sampling: Sampling) -> None:
    """It traces as one graph that serves every step: no value goes to the host."""
    vectors = torch.randn(DIMS.num_codes, 8, generator=torch.Generator().manual_seed(0))
    plain, traced = (CodeGenerator(model, Shape(3, 20, 60), sampling, vectors=vectors) for _ in range(2))
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for generator in (plain, traced):
            generator.begin(prompts)
        step = torch.compile(traced.step, backend="eager", fullgraph=True)
        for _ in range(8):
            step()
        plain.advance(8)
    for row in range(3):
        expected, found = (generator.generated(row).codes for generator in (plain, traced))
        assert len(expected) and torch.equal(expected, found)


def test_a_generator_serves_batch_after_batch(model: GPT, prompts: Sentences) -> None:
    likelier(model, STOP, 1.2)
    generator = CodeGenerator(model, Shape(4, 20, 60), Sampling())
    generator.begin([prompt._replace(voice=torch.full((1, 32, 64), torch.nan)) for prompt in prompts])
    generator.advance(5)  # fills the cache with NaN, of which nothing may stay
    for batch in (prompts, prompts[::-1][:2]):  # rows without a prompt count as ended
        generator.begin(batch)
        generator.finish()
        for row, found in enumerate(generate(model, batch, Sampling())):
            assert torch.equal(generator.generated(row).codes, found.codes)


def test_few_shapes_are_captured_for_all_sentences() -> None:
    """Each is captured while the user waits."""
    shapes = set()
    for num_ids, num_steps in product(range(1, 403, 20), range(2, 603, 20)):
        shape = captured_shape(DIMS, Shape(3, num_ids, num_steps))
        assert num_ids <= shape.ids <= DIMS.max_text and num_steps <= shape.steps <= DIMS.max_codes
        shapes.add(shape)
    assert len(shapes) <= 3 and {shape.sentences for shape in shapes} == {4}


def test_kept_shapes_take_a_share_of_the_free_memory(
    model: GPT, prompts: Sentences, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is that of the CPU here, and nothing is captured."""
    made, free = list[CodeGenerator](), [1 << 40]
    monkeypatch.setattr(CodeGenerator, "begin", lambda self, _: made.append(self))
    monkeypatch.setattr("myxtts.synthesis.generation.allocatable_bytes", lambda _: free[0])
    generators = CodeGenerators(model)
    generators.stream = Stream(torch.device("cpu"))

    def begin(num_sentences: int) -> CodeGenerator:
        return generators.begin(prompts[:1] * num_sentences, GREEDY)

    shapes = [begin(rows) for rows in (1, 2, 4, 8, 16, 32, 64)]
    assert shapes == [begin(rows) for rows in (1, 2, 4, 8, 16, 32, 64)], "with much memory all are kept"
    free[0] = shapes[-1].num_bytes  # of which all shapes together take half
    assert begin(64) is shapes[-1]
    assert begin(1) is not shapes[0] and begin(64) is not shapes[-1], "the largest alone is more than its share"
    assert generators.drop_all() and not generators.drop_all()


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
    chosen = choose(logits.expand(times, -1), used.expand(times, -1), sampling, drawn)
    found, expected = chosen.bincount(minlength=12) / times, expected_share(logits, used, sampling)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    assert torch.equal(found > 0, expected > 1e-4)


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
    chosen = choose(likely, used, replace(PLAIN, central=True), torch.linspace(0, 0.999, 100), vectors)
    assert set(chosen.tolist()) == {3, 6}, "the middle of the first three, and STOP as often as it is drawn"
    assert 3 <= int((chosen == 6).sum()) <= 7
