"""Generation: the reference's codes, the same with and without cache, alone and in a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from myxtts.model.conditioning import pack_frames
from myxtts.model.gpt import GPT, GPTDims, pack
from myxtts.synthesis.generation import Decoding, Sampling, Speech, choose_by_logits, generate, stream

FIXTURES = Path(__file__).parent / "fixtures"
DIMS = GPTDims(layers=2, dim=64, heads=4, text_tokens=300)
GREEDY = Sampling(greedy=True)
STOP = DIMS.stop_code
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(FIXTURES / "gpt.pt", weights_only=True)
    return loaded


@pytest.fixture
def model(reference: dict[str, Any]) -> GPT:
    gpt = GPT(DIMS).eval()
    gpt.load_state_dict(reference["state_dict"])
    return gpt


@pytest.fixture
def sentences(reference: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Three voices, padded ids and their lengths: 20, 13 and 7 tokens."""
    return reference["style_emb"].transpose(1, 2), reference["text"], reference["text_lengths"]


def alone(model: GPT, sentences: tuple[Tensor, Tensor, Tensor], number: int, max_codes: int) -> Speech:
    voices, ids, num_ids = sentences
    one = slice(number, number + 1)
    return generate(model, voices[one], ids[one, : int(num_ids[number])], num_ids[one], GREEDY, max_codes)


def stops_early(model: GPT, by: float) -> GPT:
    """Makes STOP likelier, so that sentences end at different steps."""
    with torch.no_grad():
        model.mel_head.bias[STOP] += by
    return model


def test_greedy_codes_equal_the_reference(model: GPT, sentences: Any, reference: dict[str, Any]) -> None:
    expected = reference["greedy_codes"]
    assert torch.equal(alone(model, sentences, 0, expected.shape[1]).codes, expected)


def test_a_batch_equals_one_by_one(model: GPT, sentences: Any) -> None:
    stops_early(model, 1.2)
    together = generate(model, *sentences, GREEDY, 60)
    assert len(set(together.num_codes.tolist())) > 1, "the sentences should end at different steps"
    for number in range(3):
        single = alone(model, sentences, number, 60)
        length = int(single.num_codes[0])
        assert together.num_codes[number] == length
        assert torch.equal(together.codes[number, :length], single.codes[0])
        torch.testing.assert_close(together.latents[number, :length], single.latents[0], rtol=1e-5, atol=1e-5)
        assert (together.codes[number, length:] == STOP).all()
        assert not together.latents[number, length:].any()


def test_the_cache_equals_computing_everything_again(model: GPT, sentences: Any) -> None:
    """A second pass over the finished codes finds the same latents, and the same codes in them."""
    voices, ids, num_ids = sentences
    speech = generate(model, *sentences, Sampling(greedy=True, repetition_penalty=1), 40)
    frames = pack_frames(torch.zeros(3, 80), torch.ones(3, dtype=torch.long), 1)
    row = pack(DIMS, frames, ids, num_ids, speech.codes, speech.num_codes, budget=400)
    model.condition = lambda _: voices  # type: ignore[method-assign]
    latents = model.code_latents(row)
    torch.testing.assert_close(speech.latents, latents, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.mel_head(latents).argmax(-1), speech.codes)


def test_one_voice_for_all_sentences(model: GPT, sentences: Any) -> None:
    voices, ids, num_ids = sentences
    shared = generate(model, voices[:1], ids, num_ids, GREEDY, 12)
    repeated = generate(model, voices[:1].repeat(3, 1, 1), ids, num_ids, GREEDY, 12)
    assert torch.equal(shared.codes, repeated.codes)


def test_sentences_that_say_nothing(model: GPT, sentences: Any) -> None:
    speech = generate(stops_early(model, 100.0), *sentences, GREEDY, 20)
    assert speech.codes.shape == (3, 0)
    assert speech.latents.shape == (3, 0, 64)
    assert speech.num_codes.tolist() == [0, 0, 0]


def test_a_stream_ends_soon_after_its_sentences(model: GPT, sentences: Any) -> None:
    steps = list(stream(stops_early(model, 100.0), *sentences, GREEDY))
    assert 1 <= len(steps) <= 8
    assert all(step.ended.all() and (step.codes == STOP).all() for step in steps)


def test_dropout_and_overlong_requests_are_refused(model: GPT, sentences: Any) -> None:
    with pytest.raises(ValueError, match="positions"):
        generate(model, *sentences, GREEDY, 609)
    model.train()
    with pytest.raises(ValueError, match="eval"):
        generate(model, *sentences, GREEDY, 5)


def test_a_step_is_one_graph_for_all_places(model: GPT, sentences: Any) -> None:
    voices, ids, num_ids = sentences
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        eager, compiled = (Decoding(model, voices, ids, num_ids, 8) for _ in range(2))
        step = torch.compile(compiled.step, backend="aot_eager", fullgraph=True, dynamic=False)
        codes = torch.tensor([DIMS.start_code] * 3)
        for number in range(4):
            place = torch.tensor([number])
            expected, _ = eager.step(codes, place)
            torch.testing.assert_close(step(codes, place)[0], expected)
            codes = expected.argmax(-1)


def test_memory_that_served_before_changes_nothing(model: GPT, sentences: Any) -> None:
    voices, ids, num_ids = sentences
    codes, place = torch.tensor([DIMS.start_code] * 3), torch.tensor([0])
    with torch.no_grad():
        used = Decoding(model, voices.flip(0), ids.flip(0), num_ids.flip(0), 8)
        used.step(codes, torch.tensor([3]))
        memory = [cache.data_ptr() for cache in (*used.keys, *used.values, used.is_prefix)]
        for cache in (*used.keys, *used.values):
            cache[:, :, used.prefix :] = torch.nan  # a voice that was none
        used.read(voices, ids, num_ids)
        fresh = Decoding(model, voices, ids, num_ids, 8)
        torch.testing.assert_close(used.step(codes, place), fresh.step(codes, place))
    assert memory == [cache.data_ptr() for cache in (*used.keys, *used.values, used.is_prefix)]


# Choosing a code

LOGITS = torch.tensor([[0.5, 0.4, 0.3, 0.2, -1.0, -2.0]]).log_softmax(-1)
NOTHING = torch.zeros(1, 6, dtype=torch.bool)


def drawn(sampling: Sampling, spoken: Tensor = NOTHING, times: int = 4000) -> Tensor:
    """How often each code is chosen."""
    rows = choose_by_logits(
        LOGITS.repeat(times, 1), spoken.repeat(times, 1), sampling, torch.Generator().manual_seed(0)
    )
    return rows.bincount(minlength=6) / times


def test_sampling_follows_the_probabilities() -> None:
    plain = Sampling(temperature=1, top_k=0, top_p=1, repetition_penalty=1)
    torch.testing.assert_close(drawn(plain), LOGITS.exp()[0], atol=0.03, rtol=0)
    hot = Sampling(temperature=0.25, top_k=0, top_p=1, repetition_penalty=1)
    torch.testing.assert_close(drawn(hot), (4 * LOGITS).softmax(-1)[0], atol=0.03, rtol=0)


def test_top_k_and_top_p_cut_the_tail() -> None:
    top_two = Sampling(temperature=1, top_k=2, top_p=1, repetition_penalty=1)
    expected = torch.zeros(6)
    expected[:2] = LOGITS[0, :2].softmax(-1)
    torch.testing.assert_close(drawn(top_two), expected, atol=0.03, rtol=0)
    share = LOGITS.exp()[0]
    for count in range(1, 6):  # the code that crosses the threshold is still in
        threshold = float(share[:count].sum()) - 1e-4
        nucleus = Sampling(temperature=1, top_k=0, top_p=threshold, repetition_penalty=1)
        assert (drawn(nucleus) > 0).tolist() == [True] * count + [False] * (6 - count)
    assert drawn(Sampling(top_p=0.0, repetition_penalty=1))[0] == 1


def test_the_penalty_counts_what_was_spoken() -> None:
    logits = torch.tensor([[2.0, 1.5, -0.1, -0.15]])
    spoken = torch.tensor([[True, False, False, False]])
    greedy = Sampling(greedy=True, repetition_penalty=2)
    assert choose_by_logits(logits, spoken, greedy, None).tolist() == [1]
    assert choose_by_logits(logits[:, 2:], spoken[:, :2], greedy, None).tolist() == [
        1
    ]  # negative logits move away from 0
    assert choose_by_logits(logits, spoken, Sampling(greedy=True, repetition_penalty=1), None).tolist() == [0]


def test_the_prompt_counts_as_spoken_unless_told_otherwise(model: GPT, sentences: Any) -> None:
    with torch.no_grad():
        model.mel_head.bias[1] += 3.0  # code 1 would win
    penalised = generate(model, *sentences, Sampling(greedy=True, penalise_prompt=True), 1)
    free = generate(model, *sentences, Sampling(greedy=True, penalise_prompt=False), 1)
    assert (free.codes == 1).all()
    assert (penalised.codes != 1).all()


def test_a_generator_decides_the_draw(model: GPT, sentences: Any) -> None:
    def codes(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        drawn_codes: list[list[int]] = generate(model, *sentences, Sampling(), 10, generator).codes.tolist()
        return drawn_codes

    assert codes(1) == codes(1)
    assert codes(1) != codes(2)


@pytest.mark.gpu
@gpu
def test_greedy_codes_on_the_gpu(model: GPT, sentences: Any, reference: dict[str, Any]) -> None:
    expected = reference["greedy_codes"]
    voices, ids, num_ids = (value.cuda() for value in sentences)
    speech = generate(model.cuda(), voices, ids, num_ids, GREEDY, expected.shape[1])
    assert torch.equal(speech.codes[:1].cpu(), expected)
    with torch.autocast("cuda", torch.bfloat16):
        generate(model, voices, ids, num_ids, GREEDY, expected.shape[1])
