"""Speaking with small random networks: what is said, that it is the same every time, and what is refused."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import torch
import torch.nn.functional as F

from myxtts.audio import Wave
from myxtts.checkpoints import UnreadableWeights, write_pth
from myxtts.cli import main
from myxtts.devices import Stream
from myxtts.errors import ConfigError, DatasetError, PipelineError
from myxtts.model.mel import DVAE_MEL, LogMel
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE
from myxtts.model.xtts import SIZES, XTTS
from myxtts.synthesis import generation, voices
from myxtts.synthesis import text as guards
from myxtts.synthesis.generation import Draft, Sampling, Shape, Writer, Writers, Written, choose, draws, guided
from myxtts.synthesis.synthesizer import (
    PUBLISHED_SAMPLING,
    SILENT,
    Manner,
    Speech,
    Synthesizer,
    as_asked,
    usable_vocoder,
)
from myxtts.synthesis.text import Bounds, Limits, Reader, UnspeakableText, bounds, trouble
from myxtts.synthesis.vocoding import (
    FAINT_NOTE,
    GPU_FRAMES_STEP,
    REACH_FRAMES,
    GriffinLim,
    HifiGan,
    Loudness,
    Stretch,
    is_faint,
)
from myxtts.synthesis.voices import UnusableReference, Voice, VoiceFolder, _chunks, published_voices
from myxtts.text.tokenizer import Tokenizer, train
from myxtts.weights import save_folder

CLEAR = replace(PUBLISHED_SAMPLING, guidance=2.0, central=True)
CPU = torch.device("cpu")
TEXTS = [
    "The harbour was quiet today.",
    "She opened the old window.",
    "Nobody planted another oak.",
]
LONG_TEXT = " ".join(TEXTS)
Speaking = Callable[..., Synthesizer]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Networks this small lose time to threads that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return train([text.lower() for text in TEXTS] * 2, ["en"] * 6, 120)


def make_model(vocabulary: Tokenizer, stop_bias: float = 0.5) -> XTTS:
    """A network whose sentences end by chance after some seconds and whose vocoder can be heard."""
    tiny = SIZES["tiny"]
    dims = replace(
        tiny,
        gpt=replace(tiny.gpt, layers=1, dim=64, heads=1, num_codes=64, encoder_layers=1),
        dvae_hidden=8,
        dvae_codebook_dim=8,
        dvae_blocks=1,
        vocoder_channels=16,
        speaker_dim=16,
        speaker_filters=(8, 8, 8, 8),
    ).with_vocabulary(vocabulary.num_tokens, vocabulary.start_id, vocabulary.stop_id)
    torch.manual_seed(0)
    model = XTTS(dims)
    for name, weight in model.gpt.named_parameters():
        if name.startswith(("gpt.h", "text_embedding", "mel_embedding", "mel_head")) and weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.2)
    with torch.no_grad():
        model.gpt.mel_head.bias[dims.gpt.stop_code] += stop_bias
        for name, weight in model.hifigan_decoder.waveform_decoder.named_parameters():
            if name.endswith("original0"):
                weight.mul_(10)
            if name.startswith("conv_post"):
                weight.normal_()
    return model


@pytest.fixture(scope="module")
def speaking(vocabulary: Tokenizer) -> Speaking:
    def make(stop_bias: float = 0.5, **options: object) -> Synthesizer:
        return Synthesizer(make_model(vocabulary, stop_bias), vocabulary, CPU, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="module")
def synthesizer(speaking: Speaking) -> Synthesizer:
    return speaking()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, voice: Callable[..., Wave]) -> Path:
    path = tmp_path_factory.mktemp("reference") / "anna.wav"
    sf.write(path, voice(5.0), 22050)
    return path


@pytest.fixture(scope="module")
def anna(synthesizer: Synthesizer, reference: Path) -> Voice:
    return synthesizer.voice([reference])


def codes_of(speech: Speech) -> list[int]:
    return [sentence.num_codes for sentence in speech.report.sentences]


# What is said


def test_text_and_a_reference_become_a_wave(synthesizer: Synthesizer, anna: Voice, tmp_path: Path) -> None:
    speech = synthesizer.speak(TEXTS[0], anna, "en", seed=4)
    assert speech.wave.dtype == np.float32 and np.isfinite(speech.wave).all()
    assert speech.wave[0] == speech.wave[-1] == 0, "an edge that jumps is heard as a click"
    report = speech.report
    assert (report.voice, report.language, report.vocoder, report.seed) == ("anna", "en", "hifigan", 4)
    assert report.sentences[0].text == TEXTS[0]
    assert report.seconds == pytest.approx(len(speech.wave) / 24000)
    assert report.seconds == pytest.approx(codes_of(speech)[0] * 1024 / 22050, abs=0.03)
    speech.save(tmp_path / "deep" / "out.wav")
    written, rate = sf.read(tmp_path / "deep" / "out.wav")
    assert rate == 24000 and len(written) == len(speech.wave)
    with pytest.raises(ConfigError, match=r"\.wav or \.flac"):
        speech.save(tmp_path / "out.txt")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        speech.save(tmp_path / "file" / "out.wav")
    assert set(report.to_dict()) >= {"seed", "sentences", "notes", "seconds"}


def test_a_seed_decides_what_is_said(synthesizer: Synthesizer, anna: Voice) -> None:
    one, same, other = (synthesizer.speak(TEXTS[0], anna, "en", seed=seed) for seed in (4, 4, 5))
    assert np.array_equal(one.wave, same.wave)
    assert not np.array_equal(one.wave, other.wave)
    drawn = synthesizer.speak(TEXTS[0], anna, "en")
    assert np.array_equal(synthesizer.speak(TEXTS[0], anna, "en", seed=drawn.report.seed).wave, drawn.wave)


def test_a_sentence_does_not_depend_on_those_beside_it(synthesizer: Synthesizer, anna: Voice) -> None:
    together = synthesizer.speak_many(TEXTS, anna, "en", seed=5)
    assert len({len(speech.wave) for speech in together}) > 1
    for text, speech in zip(TEXTS, together, strict=True):
        alone = synthesizer.speak(text, anna, "en", seed=5)
        assert codes_of(alone) == codes_of(speech)
        np.testing.assert_allclose(alone.wave, speech.wave, atol=1e-4)


def test_each_text_may_have_its_own_voice(synthesizer: Synthesizer, anna: Voice) -> None:
    torch.manual_seed(1)
    other = Voice("other", torch.randn(1, 32, 64), F.normalize(torch.randn(16), dim=0))
    first, second = synthesizer.speak_many([TEXTS[0]] * 2, [anna, other], ["en", "en-us"], seed=3)
    assert not np.array_equal(first.wave, second.wave)
    np.testing.assert_allclose(first.wave, synthesizer.speak(TEXTS[0], anna, "en", seed=3).wave, atol=1e-4)
    assert [first.report.voice, second.report.voice] == ["anna", "other"]


def test_long_texts_are_spoken_sentence_by_sentence(synthesizer: Synthesizer, anna: Voice) -> None:
    speech = synthesizer.speak(LONG_TEXT, anna, "en", seed=4)
    assert [sentence.text for sentence in speech.report.sentences] == TEXTS
    pauses = 2 * 0.1
    assert len(speech.wave) / 24000 == pytest.approx(speech.report.seconds + pauses, abs=0.001)


def test_many_sentences_are_spoken_in_groups(
    synthesizer: Synthesizer, anna: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = synthesizer.speak_many(TEXTS, anna, "en", seed=4)
    monkeypatch.setattr(synthesizer, "_batch_size", 2)
    monkeypatch.setattr("myxtts.synthesis.synthesizer.BATCHES_AT_ONCE", 1)
    for speech, same in zip(synthesizer.speak_many(TEXTS, anna, "en", seed=4), expected, strict=True):
        assert codes_of(speech) == codes_of(same)
        np.testing.assert_allclose(speech.wave, same.wave, atol=1e-4)


def test_speed_changes_the_length_and_not_the_codes(synthesizer: Synthesizer, anna: Voice) -> None:
    usual, slow, fast = (synthesizer.speak(TEXTS[0], anna, "en", seed=4, speed=speed) for speed in (1, 0.8, 1.5))
    assert codes_of(usual) == codes_of(slow) == codes_of(fast)
    assert len(slow.wave) / len(usual.wave) == pytest.approx(1 / 0.8, rel=0.02)
    assert len(fast.wave) / len(usual.wave) == pytest.approx(1 / 1.5, rel=0.02)


def test_the_published_settings_are_the_default(synthesizer: Synthesizer, anna: Voice) -> None:
    published = Sampling(temperature=0.75, top_k=50, top_p=0.85, repetition_penalty=5.0)
    expected = synthesizer.speak(TEXTS[0], anna, "en", seed=4, sampling=published)
    assert np.array_equal(synthesizer.speak(TEXTS[0], anna, "en", seed=4).wave, expected.wave)
    greedy = Sampling(greedy=True, repetition_penalty=5.0)
    speeches = [synthesizer.speak(TEXTS[0], anna, "en", seed=seed, sampling=greedy) for seed in (1, 2)]
    assert np.array_equal(speeches[0].wave, speeches[1].wave)


# Codes


def test_greedy_codes_are_those_of_generation(vocabulary: Tokenizer) -> None:
    gpt = make_model(vocabulary).gpt.eval()
    ids = [[5, 6, 7, 8], [9, 10]]
    voice = torch.randn(2, 32, 64)
    greedy = Sampling(greedy=True)
    padded = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    expected = generation.generate(gpt, voice, padded, torch.tensor([4, 2]), greedy, 30)
    drafts = [Draft(ids[row], voice[row : row + 1], 30, torch.zeros(30)) for row in range(2)]
    writer = Writers(gpt, CPU).begin(drafts, greedy)
    writer.finish()
    for row in range(2):
        num_codes = int(expected.num_codes[row])
        written = writer.written(row)
        assert torch.equal(written.codes, expected.codes[row, :num_codes])
        torch.testing.assert_close(written.latents, expected.latents[row, :num_codes])


def test_guidance_weighs_what_the_text_is_worth(vocabulary: Tokenizer) -> None:
    """Each step is as of two writers who hear the same codes, one of them without the text."""
    gpt, guidance = make_model(vocabulary).gpt.eval(), 3.0
    voice, ids = torch.randn(2, 32, 64), torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    read, unread = (
        generation.Decoding(gpt, voice, ids, num_ids, 12)
        for num_ids in (torch.tensor([4, 2]), torch.tensor([0, 0]))
    )
    sampling = Sampling(greedy=True, repetition_penalty=1, guidance=guidance)
    drafts = [
        Draft(ids[row, : 4 - 2 * row].tolist(), voice[row : row + 1], 12, torch.zeros(12)) for row in range(2)
    ]
    writer = Writers(gpt, CPU).begin(drafts, sampling)
    writer.finish()
    heard = torch.full((2,), gpt.dims.start_code)
    with torch.no_grad():
        for step in range(12):
            place = read.slots[step : step + 1]
            (logits, latents), (without, _) = read.step(heard, place), unread.step(heard, place)
            worth = logits.log_softmax(-1) - without.log_softmax(-1)
            scores = without.log_softmax(-1) + guidance * worth
            scores[:, gpt.dims.start_code] = -torch.inf
            heard = scores.argmax(-1)
            for row, code in enumerate(heard.tolist()):
                written = writer.written(row)
                if code == gpt.dims.stop_code or step > len(written.codes):
                    assert len(written.codes) <= step
                else:
                    assert written.codes[step] == code
                    torch.testing.assert_close(written.latents[step], latents[row])


def test_the_central_code_stands_for_about_the_mean_of_the_likely_ones() -> None:
    vectors = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [1.2, 1.2], [9.0, 9.0]])
    likely = torch.tensor([[0.3, 0.3, 0.3, 0.05, 0.0, 0.0, 0.05]]).log().expand(100, -1)
    sampling = Sampling(temperature=1, top_k=0, top_p=1, repetition_penalty=1, central=True)
    spoken = torch.zeros(likely.shape, dtype=torch.bool)
    chosen = choose(likely, spoken, sampling, torch.linspace(0, 0.999, 100), vectors)
    assert set(chosen.tolist()) == {3, 6}, "the middle of the first three, and STOP as often as it is drawn"
    assert 3 <= int((chosen == 6).sum()) <= 7


def test_a_model_without_a_codebook_cannot_find_the_central_code(synthesizer: Synthesizer, anna: Voice) -> None:
    """Said before anything is written: a stream has not begun."""
    for speak in (synthesizer.speak, synthesizer.stream):
        with pytest.raises(ConfigError, match=r"DVAE, which is missing or was never trained.*without --central"):
            speak(TEXTS[0], anna, "en", sampling=CLEAR)


def test_clear_speech_is_as_sure_in_company_and_draws_only_when_it_tries_again(
    vocabulary: Tokenizer, reference: Path
) -> None:
    model = make_model(vocabulary)
    model.dvae.codebook.cluster_size.fill_(1)
    synthesizer = Synthesizer(model, vocabulary, CPU)
    voice = synthesizer.voice([reference])
    alone = [synthesizer.speak(text, voice, "en", seed=3, sampling=CLEAR, num_attempts=1) for text in TEXTS]
    together = synthesizer.speak_many(TEXTS, voice, "en", seed=3, sampling=CLEAR, num_attempts=1)
    assert [codes_of(speech) for speech in alone] == [codes_of(speech) for speech in together]
    manner = Manner(CLEAR, 0, 3, 4)
    assert [manner.sampling_of(attempt).central for attempt in manner.attempts] == [True, False, False]
    assert manner.sampling_of(1).guidance == CLEAR.guidance


def test_guidance_leaves_a_text_that_adds_nothing() -> None:
    logits = torch.randn(3, 12)
    torch.testing.assert_close(guided(torch.cat([logits, logits]), 4.0), logits)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=1, top_k=0, top_p=1), Sampling(top_p=0.3), Sampling(top_k=2, top_p=1)],
)
def test_codes_are_drawn_as_generation_draws_them(sampling: Sampling) -> None:
    torch.manual_seed(0)
    times = 20000
    logits, spoken = 2 * torch.randn(1, 12).expand(times, -1), (torch.arange(12) % 3 == 0).expand(times, -1)
    ours = choose(logits, spoken, sampling, torch.rand(times)).bincount(minlength=12) / times
    theirs = generation.choose_by_logits(logits, spoken, sampling, None).bincount(minlength=12) / times
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0)
    assert torch.equal(ours > 0, theirs > 0)


def test_random_numbers_belong_to_one_attempt_at_one_sentence() -> None:
    assert torch.equal(draws(1, 2, 0, 50), draws(1, 2, 0, 50))
    others = [draws(*which, 50) for which in ((2, 2, 0), (1, 3, 0), (1, 2, 1))]
    assert not any(torch.equal(draws(1, 2, 0, 50), other) for other in others)


def test_start_is_no_code(vocabulary: Tokenizer) -> None:
    gpt = make_model(vocabulary, stop_bias=-100.0).gpt.eval()
    with torch.no_grad():
        gpt.mel_head.bias[gpt.dims.start_code] += 1000
    drafts = [Draft([5, 6, 7], torch.randn(1, 32, 64), 12, draws(0, 0, 0, 12))]
    writer = Writers(gpt, CPU).begin(drafts, PUBLISHED_SAMPLING)
    writer.finish()
    assert len(writer.written(0).codes) == 12 and writer.written(0).codes.max() < gpt.dims.num_codes


@pytest.mark.parametrize("sampling", [PUBLISHED_SAMPLING, CLEAR])
def test_a_step_can_be_captured(vocabulary: Tokenizer, sampling: Sampling) -> None:
    """It traces as one graph that is good for every step: no value goes to the host."""
    gpt = make_model(vocabulary).gpt.eval()
    drafts = [Draft([5, 6, 7], torch.randn(1, 32, 64), 12, draws(0, 0, 0, 12))]
    vectors = torch.randn(gpt.dims.num_codes, 8)
    plain, traced = (Writer(gpt, Shape(1, 3, 12), sampling, CPU, vectors=vectors) for _ in range(2))
    plain.begin(drafts)
    traced.begin(drafts)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        traced._step = torch.compile(traced._step, backend="eager", fullgraph=True)  # type: ignore[method-assign]
        plain.finish()
        traced.finish()
    assert torch.equal(plain.written(0).codes, traced.written(0).codes)


def test_few_shapes_are_captured_for_all_sentences(vocabulary: Tokenizer) -> None:
    """Each is captured while somebody waits."""
    gpt = make_model(vocabulary).gpt
    writers = Writers(gpt, CPU)
    writers._stream = Stream(CPU)
    shapes = set()
    for num_ids, most in product(range(1, 403, 20), range(2, 603, 20)):
        shape = writers._shape([Draft([3] * num_ids, torch.zeros(1, 32, 64), most, torch.zeros(most))])
        assert num_ids <= shape.ids <= gpt.dims.max_text and most <= shape.steps <= gpt.dims.max_codes
        shapes.add(shape)
    assert len(shapes) <= 3


# Sound


def test_stretching_in_parts_equals_interpolating_the_whole() -> None:
    rows = torch.randn(41, 3)
    for factor in (Fraction(4), Fraction(160, 147), Fraction(4, 5), Fraction(3, 2), Fraction(1)):
        stretch, parts = Stretch(factor), []
        for first in range(0, 41, 7):
            parts.append(stretch.push(rows[first : first + 7], last=first == 35))
        whole = F.interpolate(rows.t()[None], scale_factor=float(factor), mode="linear")[0].t()
        torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=1e-4)


def test_the_vocoder_alone_and_in_company_equals_the_decoder(vocabulary: Tokenizer) -> None:
    decoder = make_model(vocabulary).hifigan_decoder.eval()
    latents, speaker = [torch.randn(n, 64) for n in (23, 40)], torch.randn(16)
    sentences = [Written(torch.zeros(len(latent)), latent) for latent in latents]
    waves = HifiGan(decoder, 2).waves(sentences, [speaker, speaker], 1.0)
    for latent, wave in zip(latents, waves, strict=True):
        with torch.no_grad():
            expected = decoder(latent[None], speaker[None, :, None])[0, 0]
        assert wave.shape == expected.shape and expected.abs().max() > 0.01
        sure = len(wave) - REACH_FRAMES * 256  # at the very end the latents are continued instead of cut off
        torch.testing.assert_close(wave[:sure], expected[:sure], atol=1e-4, rtol=1e-3)


def test_the_generator_sees_no_farther_than_its_reach(vocabulary: Tokenizer) -> None:
    """Else a piece of a stream would not equal the same stretch of the whole, nor a sentence itself in company."""
    generator = make_model(vocabulary).hifigan_decoder.waveform_decoder.eval()
    frames, speaker = torch.randn(1, 64, 60), torch.zeros(1, 16, 1)
    changed = frames.clone()
    changed[:, :, 30] += 1e6
    with torch.no_grad():
        differs = (generator(frames, speaker) != generator(changed, speaker)).flatten().nonzero()
    first, last = int(differs.min()) // 256, int(differs.max()) // 256
    assert 30 - REACH_FRAMES <= first < 20 and 40 < last <= 30 + REACH_FRAMES


def test_on_a_gpu_the_generator_meets_few_lengths(
    synthesizer: Synthesizer, anna: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every length it has not met costs time; what it is padded with cannot be heard."""
    vocoder = synthesizer._vocoder
    assert isinstance(vocoder, HifiGan)
    speech, pieces = (
        synthesizer.speak(LONG_TEXT, anna, "en", seed=4).wave,
        list(synthesizer.stream(LONG_TEXT, anna, "en", seed=4)),
    )
    met: list[int] = []
    hook = vocoder._generator.register_forward_pre_hook(lambda _, given: met.append(given[0].shape[2]))
    monkeypatch.setattr(vocoder, "_frames_step", GPU_FRAMES_STEP)
    padded = list(synthesizer.stream(LONG_TEXT, anna, "en", seed=4))
    assert len(met) > 3 and set(met) == {128}
    np.testing.assert_allclose(np.concatenate(padded), np.concatenate(pieces), atol=1e-4)
    np.testing.assert_allclose(synthesizer.speak(LONG_TEXT, anna, "en", seed=4).wave, speech, atol=1e-4)
    hook.remove()
    assert met[-1] % 128 == 0


@pytest.mark.parametrize(("chunk_codes", "speed"), [(3, 1.0), (20, 1.0), (20, 1.3), (1000, 0.7)])
def test_a_stream_says_what_speak_says(
    synthesizer: Synthesizer, anna: Voice, speed: float, chunk_codes: int
) -> None:
    stream = synthesizer.stream(LONG_TEXT, anna, "en", seed=4, speed=speed, chunk_codes=chunk_codes)
    with pytest.raises(RuntimeError, match="when all"):
        _ = stream.report
    pieces = list(stream)
    speech = synthesizer.speak(LONG_TEXT, anna, "en", seed=4, speed=speed)
    assert len(pieces) >= len(TEXTS) and (chunk_codes > 20 or len(pieces) > 2 * len(TEXTS))
    whole = np.concatenate(pieces)
    assert len(whole) == len(speech.wave)
    np.testing.assert_allclose(whole, speech.wave, atol=2e-4)
    assert stream.report.sentences == speech.report.sentences


def test_pieces_of_a_stream_cost_what_is_new_in_them(
    synthesizer: Synthesizer, anna: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[int] = []
    generate = HifiGan._generate

    def counted(self: HifiGan, given: torch.Tensor, speaker: torch.Tensor) -> torch.Tensor:
        frames.append(given.shape[1])
        return generate(self, given, speaker)

    monkeypatch.setattr(HifiGan, "_generate", counted)
    pieces = list(synthesizer.stream(TEXTS[0], anna, "en", seed=4, chunk_codes=4))
    assert len(frames) > 4
    assert max(frames) <= 4 * 4.36 + 3 * REACH_FRAMES
    heard = sum(map(len, pieces)) / 256
    assert sum(frames) <= heard + len(frames) * (3 * REACH_FRAMES)


def test_the_first_piece_comes_before_the_rest_is_written(
    synthesizer: Synthesizer, anna: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    step = Writer._step

    def counted(self: Writer) -> None:
        steps.append(1)
        step(self)

    monkeypatch.setattr(Writer, "_step", counted)
    stream = synthesizer.stream(TEXTS[0], anna, "en", seed=4, chunk_codes=10)
    assert len(next(stream)) > 2000
    assert len(steps) == 10
    list(stream)
    assert len(steps) > 20


# Without a trained decoder


def test_griffin_lim_gives_a_mel_its_wave_back(vocabulary: Tokenizer, voice: Callable[..., Wave]) -> None:
    model = make_model(vocabulary)
    mel = LogMel(DVAE_MEL)
    wave = torch.from_numpy(voice(1.5))
    wanted = mel(wave[None])[..., :128]
    model.dvae.decode = lambda codes: wanted / 2  # type: ignore[method-assign]  # noqa: ARG005
    vocoder = GriffinLim(model.dvae, 2 * torch.ones(80))
    made = vocoder._wave(torch.zeros(32, dtype=torch.long), 1.0)
    assert abs(len(made) / 24000 - 32 * 1024 / 22050) < 0.001
    heard = mel(_at_22050(made)[None])[..., :128]
    inner = slice(4, 120)
    assert (heard - wanted)[..., inner].abs().mean() < 0.6
    assert (mel(torch.randn(1, 40000))[..., :128] - wanted)[..., inner].abs().mean() > 2


def _at_22050(wave: torch.Tensor) -> torch.Tensor:
    import soxr

    return torch.from_numpy(soxr.resample(wave.numpy(), OUTPUT_SAMPLE_RATE, 22050))


def test_speaking_by_griffin_lim_is_said(speaking: Speaking, reference: Path) -> None:
    synthesizer = speaking(vocoder="griffin-lim")
    voice = synthesizer.voice([reference])
    speech = synthesizer.speak(LONG_TEXT, voice, "en", seed=4, speed=2.0)
    assert speech.report.vocoder == "griffin-lim"
    assert any("no decoder is trained" in note for note in speech.report.notes())
    assert np.isfinite(speech.wave).all()
    again = list(synthesizer.stream(LONG_TEXT, voice, "en", seed=4, speed=2.0))
    np.testing.assert_allclose(np.concatenate(again), speech.wave, atol=1e-5)


# Guards


def test_bounds_grow_with_the_text() -> None:
    assert bounds(3, 602).fewest == 1
    usual = round(100 / 15 * 21.5)
    assert 2 * bounds(100, 602).fewest < usual < bounds(100, 602).most / 2
    assert bounds(10000, 602) == Bounds(602, 602)


def test_troubles_have_names() -> None:
    rng = np.random.default_rng(0)
    varied = rng.integers(0, 1000, 100).tolist()
    limits = Bounds(20, 200)
    assert trouble(varied, limits) is None
    assert trouble([], limits) == guards.EMPTY
    assert trouble(varied[:10], limits) == guards.TOO_SHORT
    assert trouble(varied * 2, limits) == guards.RUN_AWAY
    assert trouble([*varied, *[7] * 40], limits) == guards.REPETITION
    assert trouble([*varied[:20], *[1, 2, 3, 4, 5] * 8, *varied[20:60]], limits) == guards.REPETITION
    assert trouble([*varied[:40], *varied[:30] * 4], limits) == guards.REPETITION
    assert trouble([*varied, *[7] * 20], limits) is None, "a pause is no loop"
    assert guards.end_goes_in_circles([*varied, *varied[:30] * 4], 20)


def test_bad_sentences_are_tried_again_with_other_random_numbers(speaking: Speaking, reference: Path) -> None:
    """STOP is likely: many attempts are too short, and with enough of them one is not."""
    synthesizer = speaking(stop_bias=1.0)
    voice = synthesizer.voice([reference])
    once = synthesizer.speak_many(TEXTS, voice, "en", seed=0, num_attempts=1)
    often = synthesizer.speak_many(TEXTS, voice, "en", seed=0, num_attempts=8)
    troubles = [[speech.report.sentences[0].trouble for speech in speeches] for speeches in (once, often)]
    bad_once, bad_often = (found.count("too short") for found in troubles)
    assert bad_often < bad_once
    healed = [speech.report for speech in often if speech.report.sentences[0].num_attempts > 1]
    assert healed and any("attempts" in note for note in healed[0].notes())


def test_a_stream_tries_again_while_nothing_was_heard(synthesizer: Synthesizer, anna: Voice) -> None:
    once, often = (synthesizer.stream(TEXTS[0], anna, "en", seed=0, num_attempts=n) for n in (1, 6))
    assert list(once) and list(often)
    assert once.report.sentences[0].trouble == "too short"
    assert often.report.sentences[0].trouble is None and often.report.sentences[0].num_attempts > 1


def test_a_run_away_ends_and_is_reported(speaking: Speaking, reference: Path) -> None:
    synthesizer = speaking(stop_bias=-100.0)
    voice = synthesizer.voice([reference])
    speech = synthesizer.speak("A short text.", voice, "en", seed=4, num_attempts=2)
    assert speech.report.sentences[0].trouble == "run-away"
    assert speech.report.seconds < 5
    assert not speech.report.is_flawless
    (note,) = speech.report.notes()
    assert "run-away, 2 attempts" in note


def test_a_model_that_says_nothing_is_an_error(speaking: Speaking, reference: Path) -> None:
    synthesizer = speaking(stop_bias=100.0)
    voice = synthesizer.voice([reference])
    with pytest.raises(PipelineError, match="said nothing in 3 attempts"):
        synthesizer.speak(TEXTS[0], voice, "en")
    with pytest.raises(PipelineError, match="said nothing"):
        list(synthesizer.stream(TEXTS[0], voice, "en"))
    (speech,) = synthesizer.speak_many(TEXTS[:1], voice, "en")
    assert len(speech.wave) == 0 and speech.report.sentences[0].trouble == "empty"


def test_a_stream_that_goes_in_circles_is_stopped(speaking: Speaking, reference: Path) -> None:
    synthesizer = speaking(stop_bias=-100.0)
    with torch.no_grad():
        synthesizer._writers._gpt.mel_head.bias[7] += 100
    voice = synthesizer.voice([reference])
    loop = Sampling(repetition_penalty=1.0)
    stream = synthesizer.stream(TEXTS[0], voice, "en", seed=4, sampling=loop)
    seconds = sum(map(len, stream)) / 24000
    assert stream.report.sentences[0].trouble == "repetition"
    assert seconds < 3 < bounds(len(TEXTS[0]), 602).most / 21.5


def test_silence_is_reported(vocabulary: Tokenizer, reference: Path) -> None:
    model = make_model(vocabulary)
    with torch.no_grad():
        model.hifigan_decoder.waveform_decoder.conv_post.weight.zero_()
    synthesizer = Synthesizer(model, vocabulary, CPU)
    speech = synthesizer.speak(TEXTS[0], synthesizer.voice([reference]), "en", seed=4)
    assert speech.report.sentences[0].trouble == "silent"


def test_weights_that_compute_nan_are_an_error(vocabulary: Tokenizer, reference: Path) -> None:
    model = make_model(vocabulary)
    with torch.no_grad():
        model.gpt.final_norm.weight[3] = torch.nan
    synthesizer = Synthesizer(model, vocabulary, CPU)
    voice = synthesizer.voice([reference])
    with pytest.raises(PipelineError, match="NaN"):
        synthesizer.speak(TEXTS[0], voice, "en")
    with pytest.raises(PipelineError, match="NaN"):
        list(synthesizer.stream(TEXTS[0], voice, "en"))


# Bad input


@pytest.mark.parametrize("text", ["", "  \n ", "... !? «»", "😀 🎉", "\x00\x07"])
def test_a_text_without_words_is_refused(synthesizer: Synthesizer, anna: Voice, text: str) -> None:
    with pytest.raises(UnspeakableText, match="nothing to say"):
        synthesizer.speak(text, anna, "en")
    with pytest.raises(UnspeakableText, match="nothing to say"):
        synthesizer.stream(text, anna, "en")


def test_unknown_characters_are_told(synthesizer: Synthesizer, anna: Voice) -> None:
    report = synthesizer.speak("The café was quiet ∂ when the first boat came in.", anna, "en", seed=4).report
    assert report.unknown_characters == {"é": "e", "∂": ""}
    assert any("'é' as 'e', '∂' left out" in note for note in report.notes())
    with pytest.raises(UnspeakableText, match="ARABIC LETTER SEEN"):
        synthesizer.speak("سلام دنیا، حال شما چطور است؟", anna, "fa")


def test_unsupported_languages_are_named(synthesizer: Synthesizer, anna: Voice, vocabulary: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="'xx' is not supported; use one of en"):
        synthesizer.speak(TEXTS[0], anna, "xx")
    reader = Reader(Tokenizer(vocabulary.to_json().replace("[fa]", "[qq]")), Limits(402, 602))
    with pytest.raises(ConfigError, match="does not speak 'fa', it speaks ar, cs"):
        reader.read("سلام", "fa")


def test_texts_far_over_the_limits_are_cut_to_what_the_model_has_learnt(vocabulary: Tokenizer) -> None:
    limits = Limits(max_ids=60, max_codes=200)
    script = Reader(vocabulary, limits).read("1234567 " * 60 + "x" * 500 + LONG_TEXT * 5, "en")
    assert all(len(sentence.ids) <= 60 for sentence in script.sentences)
    assert all(sentence.bounds.most <= 200 for sentence in script.sentences)
    assert all(len(sentence.text) <= 125 for sentence in script.sentences)
    assert "".join(sentence.text for sentence in script.sentences).count("7") == 60


def test_settings_that_make_no_sense_are_all_named(synthesizer: Synthesizer, anna: Voice) -> None:
    wrong = Sampling(temperature=0, top_p=2, guidance=0.5)
    told = r"(?s)speed is 9.*temperature is 0.*top_p is 2.*guidance is 0\.5.*seed is -1"
    with pytest.raises(ConfigError, match=told):
        synthesizer.speak(TEXTS[0], anna, "en", speed=9, sampling=wrong, seed=-1)


def test_bad_references_are_all_named(
    synthesizer: Synthesizer, reference: Path, tmp_path: Path, voice: Callable[..., Wave]
) -> None:
    bad = {name: tmp_path / f"{name}.wav" for name in ("silent", "short", "text", "absent", "quiet")}
    sf.write(bad["silent"], np.zeros(66150, np.float32), 22050)
    sf.write(bad["short"], np.concatenate([voice(0.4), np.zeros(66150, np.float32)]), 22050)
    bad["folder"] = tmp_path / "folder"
    bad["folder"].mkdir()
    bad["text"].write_text("no audio at all, whatever the name says")
    sf.write(bad["quiet"], 0.3 + 0.001 * voice(3.0), 22050)
    with pytest.raises(UnusableReference) as caught:
        synthesizer.voice([reference, *bad.values()])
    message = str(caught.value)
    assert "silent.wav: silent" in message and "quiet.wav: silent" in message
    assert "short.wav: too short" in message
    assert "text.wav: not audio" in message and "absent.wav: there is no such file" in message
    assert "folder: is a folder" in message
    assert "anna.wav" not in message
    with pytest.raises(UnusableReference, match="at least one"):
        synthesizer.voice([])


# Voices


def test_a_voice_is_the_mean_of_its_recordings(
    synthesizer: Synthesizer, anna: Voice, reference: Path, tmp_path: Path, voice: Callable[..., Wave]
) -> None:
    sf.write(tmp_path / "second.flac", voice(4.0, rate=16000, seed=3), 16000)
    both = synthesizer.voice([reference, tmp_path / "second.flac"], name="both")
    second = synthesizer.voice([tmp_path / "second.flac"])
    assert both.latents.shape == (1, 32, 64) and both.speaker.shape == (16,)
    assert (second.name, both.name) == ("second", "both")
    torch.testing.assert_close(both.speaker, F.normalize(anna.speaker + second.speaker, dim=0))
    # Five seconds are a chunk of four and one of one; the second file is one chunk.
    torch.testing.assert_close(both.latents, (2 * anna.latents + second.latents) / 3, atol=1e-5, rtol=1e-4)


def test_long_recordings_are_heard_for_half_a_minute(
    synthesizer: Synthesizer, tmp_path: Path, voice: Callable[..., Wave], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert voices.HEARD_SECONDS == 30
    monkeypatch.setattr(voices, "HEARD_SECONDS", 6)
    wave = voice(9.0)
    sf.write(tmp_path / "long.wav", wave, 22050)
    sf.write(tmp_path / "cut.wav", wave[: 6 * 22050], 22050)
    long, cut = (synthesizer.voice([tmp_path / name]) for name in ("long.wav", "cut.wav"))
    torch.testing.assert_close(long.latents, cut.latents)
    torch.testing.assert_close(long.speaker, cut.speaker)


def test_all_recordings_are_heard_in_turn() -> None:
    one, two = torch.full((22050 * 20,), 1.0), torch.full((22050 * 9,), 2.0)
    heard = [(float(chunk[0]), len(chunk) / 22050) for chunk in _chunks([one, two])]
    assert heard == [(1, 4), (2, 4), (1, 4), (2, 4), (1, 4), (2, 1), (1, 4), (1, 4)]
    assert sum(len(chunk) for chunk in _chunks([one, one])) == 22050 * 30


def test_a_short_reference_is_told(synthesizer: Synthesizer, tmp_path: Path, voice: Callable[..., Wave]) -> None:
    sf.write(tmp_path / "short.wav", voice(1.6), 22050)
    speech = synthesizer.speak(TEXTS[0], synthesizer.voice([tmp_path / "short.wav"]), "en", seed=4)
    assert any("only 1.6 s" in note for note in speech.report.notes())


def test_voices_are_kept_by_name(synthesizer: Synthesizer, anna: Voice, tmp_path: Path) -> None:
    folder = VoiceFolder(tmp_path / "voices")
    assert folder.names() == []
    folder.save(anna)
    folder.save(replace(anna, name="خانم آنا"))
    assert folder.names() == sorted(["anna", "خانم آنا"])
    kept = folder.load("anna", synthesizer.fingerprint)
    assert torch.equal(kept.latents, anna.latents) and torch.equal(kept.speaker, anna.speaker)
    speeches = [synthesizer.speak(TEXTS[0], one, "en", seed=4) for one in (anna, kept)]
    assert np.array_equal(speeches[0].wave, speeches[1].wave)
    with pytest.raises(ConfigError, match="there are: anna"):
        folder.load("bert", synthesizer.fingerprint)
    with pytest.raises(ConfigError, match="cannot name a voice"):
        folder.save(replace(anna, name="../anna"))
    (tmp_path / "voices" / "anna.safetensors").write_bytes(b"damaged")
    with pytest.raises(UnreadableWeights, match="damaged"):
        folder.load("anna", synthesizer.fingerprint)


def test_a_voice_of_other_weights_is_refused(
    synthesizer: Synthesizer, anna: Voice, vocabulary: Tokenizer, tmp_path: Path
) -> None:
    trained = make_model(vocabulary)
    with torch.no_grad():
        trained.gpt.conditioning_perceiver.latents.add_(1e-4)
    other = Synthesizer(trained, vocabulary, CPU)
    folder = VoiceFolder(tmp_path)
    folder.save(anna)
    with pytest.raises(DatasetError, match="other weights"):
        folder.load("anna", other.fingerprint)
    with pytest.raises(DatasetError, match="another model"):
        other.speak(TEXTS[0], anna, "en")
    with pytest.raises(DatasetError, match="another model"):
        synthesizer.speak(TEXTS[0], replace(anna, latents=torch.zeros(1, 32, 128)), "en")


# How far it is


class Bars:
    """What a screen is told: title, sentences of all, and what was done of them after every advance."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, int, list[int]]] = []
        self.is_open = False

    def begin(self, title: str, total: int) -> None:
        assert not self.is_open
        self.is_open = True
        self.shown.append((title, total, [0]))

    def advance(self, count: int) -> None:
        assert self.is_open
        done = self.shown[-1][2]
        done.append(done[-1] + count)

    def end(self) -> None:
        self.is_open = False


@pytest.mark.parametrize("vocoder", ["hifigan", "griffin-lim"])
def test_sentences_are_counted_while_they_are_spoken(speaking: Speaking, reference: Path, vocoder: str) -> None:
    synthesizer = speaking(vocoder=vocoder, batch_size=2)
    bars = Bars()
    synthesizer.speak(LONG_TEXT, synthesizer.voice([reference]), "en", seed=4, num_attempts=1, progress=bars)
    assert [title for title, _, _ in bars.shown] == ["Speaking", "Making the sound"]
    for _, total, done in bars.shown:
        assert total == done[-1] == 3 and len(set(done)) > 2
    assert not bars.is_open


def test_every_bar_counts_all_sentences(
    synthesizer: Synthesizer, anna: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthesizer, "_batch_size", 2)
    monkeypatch.setattr("myxtts.synthesis.synthesizer.BATCHES_AT_ONCE", 1)
    bars = Bars()
    synthesizer.speak_many(TEXTS, anna, "en", seed=4, num_attempts=1, progress=bars)
    assert [(total, done[1], done[-1]) for _, total, done in bars.shown] == [
        (3, 0, 2),
        (3, 0, 2),
        (3, 2, 3),
        (3, 2, 3),
    ]


def test_attempts_have_bars_of_their_own(speaking: Speaking, reference: Path) -> None:
    synthesizer = speaking(stop_bias=-100.0)
    bars = Bars()
    speech = synthesizer.speak(
        LONG_TEXT, synthesizer.voice([reference]), "en", seed=0, num_attempts=2, progress=bars
    )
    assert all(sentence.trouble for sentence in speech.report.sentences)
    assert [title[:14] for title, _, _ in bars.shown] == ["Speaking", "Speaking again", "Making the sou"]
    assert [done[-1] for _, _, done in bars.shown] == [3, 3, 3]


def test_a_stream_counts_its_sentences(synthesizer: Synthesizer, anna: Voice) -> None:
    bars = Bars()
    stream = synthesizer.stream(LONG_TEXT, anna, "en", seed=4, progress=bars)
    assert not bars.shown
    next(stream)
    assert bars.is_open
    list(stream)
    assert bars.shown == [("Speaking", 3, [0, 0, 1, 2, 3])] and not bars.is_open
    cut_short = synthesizer.stream(LONG_TEXT, anna, "en", seed=4, progress=bars)
    next(cut_short)
    cut_short.close()
    assert not bars.is_open


def test_a_bar_ends_with_an_error(vocabulary: Tokenizer, reference: Path) -> None:
    model = make_model(vocabulary)
    bars = Bars()
    synthesizer = Synthesizer(model, vocabulary, CPU)
    voice = synthesizer.voice([reference])
    with torch.no_grad():
        model.gpt.final_norm.weight.fill_(torch.nan)
    with pytest.raises(PipelineError, match="NaN"):
        synthesizer.speak(TEXTS[0], voice, "en", seed=4, progress=bars)
    assert bars.shown and not bars.is_open


# At the command line


@pytest.fixture(scope="module")
def folders(vocabulary: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model that can be heard, and one that has hardly learnt to make sound."""
    made = {}
    for name, loudness in (("loud", 100.0), ("faint", 0.2)):
        model = make_model(vocabulary)
        with torch.no_grad():
            model.hifigan_decoder.waveform_decoder.conv_post.weight.mul_(loudness)
        made[name] = tmp_path_factory.mktemp(name)
        save_folder(made[name], model, vocabulary)
    return made


@pytest.mark.parametrize("way", ["text", "--from-file", "--stream"])
def test_a_file_that_cannot_be_heard_is_told(
    folders: dict[str, Path], reference: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], way: str
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.wav"
    text.write_text(LONG_TEXT)
    said = (
        ["--from-file", str(text)] if way == "--from-file" else [LONG_TEXT, *([way] if way == "--stream" else [])]
    )
    for name, times in (("loud", 0), ("faint", 1)):
        given = ["--speaker", str(reference), "--language", "en", "--seed", "4", "--out", str(out)]
        assert main(["speak", *said, "--model", str(folders[name]), *given]) == 0
        shown = capfd.readouterr()
        wave, _ = sf.read(out)
        loudest = abs(wave).max()
        assert (loudest > 0.05) if name == "loud" else (SILENT < loudest < 0.01)
        assert shown.out.splitlines().count(FAINT_NOTE) == times and shown.out.splitlines()[-1] == str(out)
        assert "Speaking" not in shown.err and "Making" not in shown.err, "nobody watches"


def test_what_the_command_line_asks_for_is_how_it_is_spoken(
    folders: dict[str, Path], reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Sampling] = []
    begin = Writers.begin

    def listen(self: Writers, drafts: Sequence[Draft], sampling: Sampling) -> Writer:
        heard.append(sampling)
        return begin(self, drafts, sampling)

    monkeypatch.setattr(Writers, "begin", listen)
    given = ["--model", str(folders["loud"]), "--speaker", str(reference), "--language", "en", "--seed", "4"]
    out = ["--out", str(tmp_path / "out.wav")]
    asked = {"--temperature": 0.5, "--repetition-penalty": 3.0, "--guidance": 2.0}
    assert main(["speak", TEXTS[0], *given, *out]) == 0
    usual = heard[0]
    for flag, value in asked.items():
        heard.clear()
        assert main(["speak", TEXTS[0], *given, *out, flag, str(value)]) == 0
        assert heard[0] == replace(usual, **{flag[2:].replace("-", "_"): value})
    assert as_asked(usual, Namespace(central=True, temperature=None)) == replace(usual, central=True)


def test_who_watches_sees_how_far_it_is(
    folders: dict[str, Path], reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = Bars()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("myxtts.terminal.ProgressLines", lambda: bars)
    given = ["--speaker", str(reference), "--language", "en", "--seed", "4", "--out", str(tmp_path / "out.wav")]
    assert main(["speak", LONG_TEXT, "--model", str(folders["loud"]), *given]) == 0
    assert bars.shown[-1][0] == "Making the sound" and bars.shown[-1][2][-1] == 3


def test_pieces_are_as_loud_as_the_whole() -> None:
    rng = np.random.default_rng(0)
    for scale, faint in ((0.1, False), (1e-3, True)):
        wave = (scale * rng.standard_normal(24001)).astype(np.float32)
        loudness = Loudness()
        for piece in np.array_split(wave, 37):
            loudness.add(piece)
        assert loudness.is_faint == is_faint(wave) == faint
    assert Loudness().is_faint


def test_without_a_model_the_flag_of_speak_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["speak", "Hello.", "--speaker", "x.wav", "--language", "en"]) != 0
    shown = capsys.readouterr().err
    assert "no model in checkpoints" in shown and "--model" in shown and "--checkpoint-dir" not in shown


# Folders


def test_an_xtts_folder_speaks(vocabulary: Tokenizer, reference: Path, tmp_path: Path) -> None:
    model = make_model(vocabulary)
    save_folder(tmp_path, model, vocabulary)
    loaded = Synthesizer.load(tmp_path, CPU)
    speech = loaded.speak(TEXTS[0], loaded.voice([reference]), "en", seed=4)
    given = Synthesizer(model, vocabulary, CPU)
    assert np.array_equal(speech.wave, given.speak(TEXTS[0], given.voice([reference]), "en", seed=4).wave)
    studio = {"gpt_cond_latent": torch.zeros(1, 32, 64), "speaker_embedding": torch.ones(1, 16, 1) / 4}
    write_pth(tmp_path / "speakers_xtts.pth", {"Claribel Dervla": studio})
    published = published_voices(tmp_path)
    assert list(published) == ["Claribel Dervla"]
    assert len(loaded.speak(TEXTS[0], published["Claribel Dervla"], "en", seed=4).wave)


def test_missing_parts_decide_the_vocoder() -> None:
    decoder, dvae = "hifigan_decoder.waveform_decoder", "dvae"
    assert usable_vocoder([]) == usable_vocoder([dvae]) == "hifigan"
    assert usable_vocoder([decoder]) == usable_vocoder([], "griffin-lim") == "griffin-lim"
    with pytest.raises(UnreadableWeights, match=r"decoder and the dvae .*--stages decoder or --stages dvae\)\.$"):
        usable_vocoder([decoder, dvae])
    with pytest.raises(UnreadableWeights, match=r"decoder .* not trained.*--stages decoder.*griffin-lim"):
        usable_vocoder([decoder], "hifigan")
    with pytest.raises(UnreadableWeights, match=r"dvae of this model is not trained.*--stages dvae\)\.$"):
        usable_vocoder([dvae], "griffin-lim")
    with pytest.raises(UnreadableWeights, match="mel_stats"):
        usable_vocoder(["mel_stats"])


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("sampling", [PUBLISHED_SAMPLING, CLEAR])
def test_captured_steps_say_what_plain_ones_say(
    vocabulary: Tokenizer, reference: Path, sampling: Sampling
) -> None:
    device, model = torch.device("cuda", 0), make_model(vocabulary)
    model.dvae.codebook.cluster_size.fill_(1)
    synthesizers: Sequence[Synthesizer] = [
        Synthesizer(deepcopy(model), vocabulary, device, dtype=torch.float32, capture=capture)
        for capture in (True, False)
    ]
    own_voices = [synthesizer.voice([reference]) for synthesizer in synthesizers]
    for texts in ([TEXTS[0]], TEXTS, [TEXTS[1]], TEXTS[:2]):  # shapes are used again
        captured, plain = (
            synthesizer.speak_many(texts, voice, "en", seed=7, sampling=sampling)
            for synthesizer, voice in zip(synthesizers, own_voices, strict=True)
        )
        for one, other in zip(captured, plain, strict=True):
            assert codes_of(one) == codes_of(other)
            np.testing.assert_allclose(one.wave, other.wave, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_stream_on_the_gpu_starts_soon_and_says_what_speak_says(vocabulary: Tokenizer, reference: Path) -> None:
    synthesizer = Synthesizer(make_model(vocabulary), vocabulary, torch.device("cuda", 0))
    voice = synthesizer.voice([reference])
    list(synthesizer.stream(TEXTS[0], voice, "en", seed=4))
    started_at = time.perf_counter()
    stream = synthesizer.stream(TEXTS[0], voice, "en", seed=4)
    pieces = [next(stream)]
    assert time.perf_counter() - started_at < 0.5
    pieces += stream
    speech = synthesizer.speak(TEXTS[0], voice, "en", seed=4)
    np.testing.assert_allclose(np.concatenate(pieces), speech.wave, atol=5e-3)
