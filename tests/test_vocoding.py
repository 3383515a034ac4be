"""Waves: streamed pieces equal the whole, batches equal single sentences, Griffin-Lim inverts a mel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import soxr
import torch
import torch.nn.functional as F
from conftest import make_voice
from synthesis_fixtures import make_model
from torch import Tensor

from myxtts.model.flow import NUM_OFFSETS, REACH, STEPS, MelFlow
from myxtts.model.mel import DVAE_MEL, LogMel, resample
from myxtts.model.vocoder import OUTPUT_SAMPLE_RATE, HifiGanDecoder, spectral_distance
from myxtts.model.xtts import XTTS
from myxtts.synthesis.generation import Generated
from myxtts.synthesis.vocoding import (
    LEAST_CHANNELS,
    CpuGenerator,
    GriffinLim,
    HifiGan,
    Stretch,
)
from myxtts.synthesis.windows import REACH_FRAMES, FusedGenerator, Push, run_generator
from myxtts.training.recipes import LOSS_MEL

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def decoder() -> HifiGanDecoder:
    return make_model().hifigan_decoder.eval()


@pytest.fixture(scope="module")
def sentences() -> list[Generated]:
    torch.manual_seed(0)
    return [Generated(torch.zeros(length), torch.randn(length, 64)) for length in (23, 37)]


SPEAKER = F.normalize(torch.randn(16, generator=torch.Generator().manual_seed(0)), dim=0)


def frames_met(decoder: HifiGanDecoder) -> list[int]:
    """The numbers of frames the generator is given from now on."""
    met: list[int] = []
    decoder.waveform_decoder.conv_pre.register_forward_pre_hook(lambda _, given: met.append(given[0].shape[2]))
    return met


@pytest.fixture
def mel_model() -> XTTS:
    """A model whose decoder reads the mels of its DVAE; its codes differ."""
    model = make_model(decoder_input="mel").eval().requires_grad_(False)
    flow = model.hifigan_decoder.waveform_decoder.flow
    for weight in (*model.dvae.decoder.parameters(), *flow.last.parameters(), flow.latents.weight):
        weight.normal_(std=0.3)
    model.mel_stats.copy_(torch.linspace(0.5, 2, 80))
    return model


def whole_waves(
    vocoder: HifiGan, sentences: list[Generated], speakers: list[Tensor], speed: float
) -> list[Tensor]:
    pushes = zip(sentences, speakers, strict=True)
    return [vocoder.begin(speaker, speed).push(sentence, last=True) for sentence, speaker in pushes]


def streamed(vocoder: HifiGan, sentence: Generated, chunk_codes: int, speed: float) -> list[Tensor]:
    stream = vocoder.begin(SPEAKER, speed)
    both = (rows.split(chunk_codes) for rows in (sentence.codes, sentence.latents))
    parts = [Generated(*part) for part in zip(*both, strict=True)]
    return [stream.push(part, last=part is parts[-1]) for part in parts]


def test_stretching_in_parts_equals_interpolating_the_whole() -> None:
    rows = torch.randn(41, 3)
    for factor in (Fraction(4), Fraction(160, 147), Fraction(4, 5), Fraction(3, 2), Fraction(1)):
        stretch = Stretch(factor)
        parts = [stretch.push(some, last=len(some) < 7) for some in rows.split(7)]
        whole = F.interpolate(rows.t()[None], scale_factor=float(factor), mode="linear")[0].t()
        torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=1e-4)


def test_waves_of_a_batch_equal_the_decoder(decoder: HifiGanDecoder, sentences: list[Generated]) -> None:
    waves = whole_waves(HifiGan(decoder), sentences, [SPEAKER, SPEAKER], 1.0)
    for sentence, wave in zip(sentences, waves, strict=True):
        with torch.no_grad():
            expected = decoder(sentence.latents[None], SPEAKER[None, :, None])[0, 0]
        assert wave.shape == expected.shape and expected.abs().max() > 0.01
        torch.testing.assert_close(wave, expected, atol=1e-4, rtol=1e-3)


def test_the_generator_sees_no_farther_than_its_reach(decoder: HifiGanDecoder) -> None:
    """Otherwise a piece of a stream would not equal the same stretch of the whole."""
    frames, speaker = torch.randn(1, 64, 60), torch.zeros(1, 16, 1)
    changed = frames.clone()
    changed[:, :, 30] += 1e6
    generator = decoder.waveform_decoder
    with torch.no_grad():
        differs = (generator(frames, speaker) != generator(changed, speaker)).flatten().nonzero()
    first, last = int(differs.min()) // 256, int(differs.max()) // 256
    assert 30 - REACH_FRAMES <= first < 20 and 40 < last <= 30 + REACH_FRAMES


@pytest.mark.parametrize(("chunk_codes", "speed"), [(3, 1.0), (20, 1.0), (20, 1.3), (1000, 0.7)])
@pytest.mark.parametrize("window", [None, 128, 40])
def test_pieces_equal_the_whole(
    decoder: HifiGanDecoder, sentences: list[Generated], chunk_codes: int, speed: float, window: int | None
) -> None:
    """In windows of one length too, as on a GPU; without, a piece costs what is new and its context."""
    met = frames_met(decoder)
    vocoder = HifiGan(decoder, window_frames=window)
    for sentence in sentences:
        (whole,) = whole_waves(HifiGan(decoder), [sentence], [SPEAKER], speed)
        met.clear()
        pieces = streamed(vocoder, sentence, chunk_codes, speed)
        torch.testing.assert_close(torch.cat(pieces), whole, atol=2e-4, rtol=1e-3)
        if window is None:
            assert max(met) <= 4.36 * chunk_codes / speed + 3 * REACH_FRAMES
        else:
            assert set(met) == {window}


def test_the_mel_of_a_code_depends_on_the_codes_within_its_reach(mel_model: XTTS) -> None:
    codes, reach = torch.zeros(1, 40).long(), mel_model.dvae.reach_codes
    rows = mel_model.dvae.mel_rows(codes, mel_model.mel_stats)[0]
    codes[0, 20] = 1
    changed = mel_model.dvae.mel_rows(codes, mel_model.mel_stats)[0]
    differs = (rows != changed).any(1).nonzero()
    assert (int(differs.min()), int(differs.max())) == (20 - reach, 20 + reach)


def test_a_drawn_frame_depends_on_the_frames_within_the_reach_of_the_flow(mel_model: XTTS) -> None:
    flow, speaker = mel_model.hifigan_decoder.waveform_decoder.flow, SPEAKER[None, :, None]
    for block in flow.blocks:
        block.outer.weight.normal_()
    given = torch.randn(1, 80 + mel_model.dims.gpt.dim, 2 * REACH + 20)
    changed = given.clone()
    changed[0, :, REACH + 10] += 5
    differs = (flow.draw(given, speaker) != flow.draw(changed, speaker))[0].any(0).nonzero()
    assert 10 <= int(differs.min()) < 30 and 2 * REACH - 10 < int(differs.max()) <= 2 * REACH + 10
    later = flow.draw(given[:, :, 7:], speaker, first_frame=7)  # the noise belongs to the frame
    torch.testing.assert_close(later[..., REACH:], flow.draw(given, speaker)[..., 7 + REACH :])


@pytest.mark.parametrize(("chunk_codes", "speed"), [(3, 1.0), (20, 1.0), (20, 1.3), (1000, 0.7)])
def test_pieces_of_a_decoder_of_mels_equal_the_whole(mel_model: XTTS, chunk_codes: int, speed: float) -> None:
    decoder = mel_model.hifigan_decoder
    vocoder, sentences = HifiGan(decoder, (mel_model.dvae, mel_model.mel_stats)), []
    for length in (23, 91):
        sentences.append(Generated(torch.randint(64, (length,)), torch.randn(length, 64)))
    waves = whole_waves(vocoder, sentences, [SPEAKER, SPEAKER], speed)
    for sentence, whole in zip(sentences, waves, strict=True):
        pieces = streamed(vocoder, sentence, chunk_codes, speed)
        torch.testing.assert_close(torch.cat(pieces), whole, atol=2e-4, rtol=1e-3)
        is_short = chunk_codes > 20 or len(sentence.codes) < 50
        assert is_short or len(pieces[-2]) > 0, "it does not wait for the end"
        if speed == 1:
            mels = mel_model.dvae.mel_rows(sentence.codes[None], mel_model.mel_stats)
            rows = torch.cat([mels, sentence.latents[None]], 2)
            expected = decoder(rows, SPEAKER[None, :, None])[0, 0]
            assert expected.std() > 1e-4
            torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("reads_mels", [False, True])
@pytest.mark.parametrize("window", [48, 128])
def test_pieces_of_many_sentences_are_computed_together(mel_model: XTTS, window: int, reads_mels: bool) -> None:
    """The way of a GPU: other lengths, speeds and speakers in one batch, each equal to its sentence alone."""
    torch.manual_seed(1)
    model = mel_model if reads_mels else make_model().eval().requires_grad_(False)
    given = (model.hifigan_decoder, (model.dvae, model.mel_stats))
    alone, together = HifiGan(*given), HifiGan(*given, window_frames=window)
    lengths, speeds = (3, 6, 7, 23, 40, 61), (1.0, 2.0, 0.7, 1.3, 0.5, 1.0)
    sentences = [Generated(torch.randint(64, (length,)), torch.randn(length, 64)) for length in lengths]
    speakers = list(F.normalize(torch.randn(len(lengths), 16), dim=1))
    if reads_mels:  # every other voice is adapted
        speakers[::2] = [torch.cat([speaker, 0.3 * torch.randn(NUM_OFFSETS)]) for speaker in speakers[::2]]
    streams = [together.begin(*each) for each in zip(speakers, speeds, strict=True)]
    waves = [torch.zeros(0) for _ in lengths]
    for first in range(0, max(lengths), 9):
        going = [number for number, length in enumerate(lengths) if first < length]
        parts = [Generated(*(rows[first : first + 9] for rows in sentences[number])) for number in going]
        pushes = [
            Push(streams[number], part, first + 9 >= lengths[number])
            for number, part in zip(going, parts, strict=True)
        ]
        for number, wave in zip(going, together.push_many(pushes), strict=True):
            waves[number] = torch.cat([waves[number], wave])
    for sentence, speaker, speed, wave in zip(sentences, speakers, speeds, waves, strict=True):
        expected = alone.begin(speaker, speed).push(sentence, last=True)
        assert expected.std() > 1e-4
        torch.testing.assert_close(wave, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("reads_mels", [False, True])
def test_sound_is_heard_after_as_many_codes_as_the_vocoder_says(mel_model: XTTS, reads_mels: bool) -> None:
    model = mel_model if reads_mels else make_model().eval().requires_grad_(False)
    for window in (None, 128):
        vocoder = HifiGan(model.hifigan_decoder, (model.dvae, model.mel_stats), window_frames=window)
        stream, heard = vocoder.begin(SPEAKER, 1.0), list[int]()
        for _ in range(vocoder.delay_codes + 1):
            heard.append(len(stream.push(Generated(torch.zeros(1).long(), torch.zeros(1, 64)), last=False)))
        assert heard[-1] > 0 and sum(heard[:-2]) == 0


def test_a_piece_costs_the_flow_what_is_new_and_the_context_of_one_step(
    mel_model: XTTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    met, follow = list[int](), MelFlow.follow

    def counted(flow: MelFlow, mel: Tensor, step: int, given: Tensor, g: Tensor) -> Tensor:
        met.append(mel.shape[2])
        return follow(flow, mel, step, given, g)

    monkeypatch.setattr(MelFlow, "follow", counted)
    vocoder = HifiGan(mel_model.hifigan_decoder, (mel_model.dvae, mel_model.mel_stats))
    streamed(vocoder, Generated(torch.randint(64, (120,)), torch.zeros(120, 64)), 20, 1.0)
    assert len(met) == 6 * STEPS and sorted(met)[len(met) // 2] <= 20 * 4.36 + 2 * REACH / STEPS


@pytest.fixture
def wide_decoder() -> HifiGanDecoder:
    """A decoder that is computed by `CpuGenerator`, whose wave fills the range."""
    torch.manual_seed(0)
    decoder = HifiGanDecoder(decoder_input_dim=64, upsample_initial_channel=LEAST_CHANNELS, d_vector_dim=16).eval()
    decoder.remove_weight_norm()
    for name, weight in decoder.requires_grad_(False).waveform_decoder.named_parameters():
        if name.endswith("weight") and "cond" not in name:
            num_inputs = 2 * len(weight) if name.startswith("ups") else weight[0].numel()
            weight.normal_(std=(2 if name.startswith("conv_post") else 0.7) * num_inputs**-0.5)
    return decoder


class KernelOnCpu:
    """What Triton makes of `_add_kernel`, on numbers in a row: adjacent channels, a program for each block."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*given: Any, num_warps: int) -> None:
            y, bias, one, other, total, active, count, per_sample, last_channel, scale, slope, *flags = given
            is_of_sample, num_added, has_total, has_active, block = flags
            assert 0 <= grid[0] * block - count < block and num_warps and (has_total or has_active)
            flat = [image.permute(0, 2, 3, 1).reshape(-1) for image in (y, one, other)]
            at = torch.arange(count)
            column = (at & last_channel) + is_of_sample * (at // per_sample * (last_channel + 1))
            value = flat[0] + bias.flatten()[column] + sum(flat[1 : 1 + num_added])
            rows = (len(y), 1, y.shape[3], y.shape[1])
            if has_total:
                total.copy_(value.view(rows).permute(0, 3, 1, 2))
            if has_active:
                active.copy_(F.leaky_relu(value * scale, slope).view(rows).permute(0, 3, 1, 2))

        return launch


def test_sums_in_one_kernel_make_the_same_waves(wide_decoder: HifiGanDecoder) -> None:
    generator = wide_decoder.waveform_decoder
    for name, parameter in generator.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.1)
    frames, speakers = torch.randn(3, 40, 64), torch.randn(3, 16)
    expected = run_generator(generator, frames, speakers)
    assert expected.std() > 0.05
    for kernel in (None, KernelOnCpu()):
        found = FusedGenerator(generator, kernel)(frames, speakers)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_a_vocoder_without_fused_kernels_says_why(
    wide_decoder: HifiGanDecoder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert FusedGenerator.compiled(wide_decoder.waveform_decoder) is None
    assert "without fused kernels, which is slower: import of triton halted" in caplog.text


@pytest.mark.gpu
def test_triton_compiles_the_kernel(wide_decoder: HifiGanDecoder) -> None:
    generator = wide_decoder.waveform_decoder.cuda().half()
    frames, speakers = torch.randn(3, 40, 64).cuda(), torch.randn(3, 16).cuda()
    made = FusedGenerator.compiled(generator)
    assert made is not None
    torch.testing.assert_close(
        made(frames, speakers), run_generator(generator, frames, speakers), atol=2e-2, rtol=0
    )


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_generator_of_a_cpu_equals_the_plain_one(
    wide_decoder: HifiGanDecoder, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    """Whole and in parts, over several chunks and threads; its threads change nobody's number of threads."""
    monkeypatch.setattr("myxtts.synthesis.vocoding._CHUNK_ELEMENTS", 1 << 15)
    torch.set_num_threads(num_threads)
    plain = wide_decoder.waveform_decoder
    generator = CpuGenerator(plain)
    frames, speaker = torch.randn(53, 64), SPEAKER
    expected = plain(frames.t()[None], speaker[None, :, None])[0, 0]
    assert expected.std() > 0.05
    for first, last in ((0, 53), (0, 1), (17, 40), (30, 53), (52, 53)):
        found = generator.wave(frames, speaker, first, last)
        torch.testing.assert_close(found, expected[first * 256 : last * 256], atol=2e-5, rtol=0)
    assert torch.get_num_threads() == num_threads
    for shorter in (1, 2, 5):
        expected = plain(frames[:shorter].t()[None], speaker[None, :, None])[0, 0]
        found = generator.wave(frames[:shorter], speaker, 0, shorter)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_threads_of_the_generator_of_a_cpu_start_no_others(
    wide_decoder: HifiGanDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(2)
    generator, used, multiply = CpuGenerator(wide_decoder.waveform_decoder), set[int](), torch.bmm

    def counted(*given: Tensor) -> Tensor:
        used.add(torch.get_num_threads())
        return multiply(*given)

    monkeypatch.setattr(torch, "bmm", counted)
    generator.wave(torch.randn(53, 64), SPEAKER, 0, 53)
    assert used == {1}


def test_pieces_of_a_wide_decoder_equal_the_whole(
    wide_decoder: HifiGanDecoder, sentences: list[Generated], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HifiGan, "_exact", None)  # `CpuGenerator` does all the work
    vocoder = HifiGan(wide_decoder)
    waves = whole_waves(vocoder, sentences, [SPEAKER] * 2, 1.0)
    for sentence, whole in zip(sentences, waves, strict=True):
        torch.testing.assert_close(torch.cat(streamed(vocoder, sentence, 20, 1.0)), whole, atol=2e-5, rtol=0)


def test_the_spectral_distance_prefers_griffin_lim_to_noise_with_the_right_mel() -> None:
    """A decoder learns the mel first and the pitch much later. The distance of log-mels prefers the noise."""
    model, mel = make_model(), LogMel(DVAE_MEL)
    voice = torch.from_numpy(make_voice(1.5))[None]
    rough = mel(voice)[..., :128] + torch.randn(1, 80, 32).repeat_interleave(4, dim=2) / 2  # as codes decode it
    model.dvae.decode = lambda codes: rough  # type: ignore[method-assign]  # noqa: ARG005
    griffin_lim = GriffinLim(model.dvae, torch.ones(80)).wave(torch.zeros(32, dtype=torch.long), 1.0)[None]
    real, log_mel, window = resample(voice, OUTPUT_SAMPLE_RATE), LogMel(LOSS_MEL), torch.hann_window(1024)
    filters = log_mel[1].mel_scale.fb  # type: ignore[union-attr]
    spectrum = torch.stft(torch.randn(real.shape), 1024, 256, window=window, return_complex=True)
    power, wanted = spectrum.abs().square().transpose(1, 2) @ filters, log_mel(real).exp().transpose(1, 2)
    gain = (wanted / power).sqrt() @ (filters / filters.sum(1, keepdim=True).clamp(min=1e-9)).t()
    noise = torch.istft(spectrum * gain.transpose(1, 2), 1024, 256, window=window, length=real.shape[1])
    length = griffin_lim.shape[1]
    real, noise = real[:, :length], noise[:, :length]
    assert spectral_distance(real, griffin_lim) < spectral_distance(real, noise) - 0.1
    assert (log_mel(real) - log_mel(griffin_lim)).abs().mean() > (log_mel(real) - log_mel(noise)).abs().mean()
    assert spectral_distance(real, 3 * real) < 0.01 < 0.9 < spectral_distance(real, torch.randn(real.shape))


def test_griffin_lim_inverts_a_mel() -> None:
    model, mel = make_model(), LogMel(DVAE_MEL)
    wanted = mel(torch.from_numpy(make_voice(1.5))[None])[..., :128]
    model.dvae.decode = lambda codes: wanted / 2  # type: ignore[method-assign]  # noqa: ARG005
    made = GriffinLim(model.dvae, 2 * torch.ones(80)).wave(torch.zeros(32, dtype=torch.long), 1.0)
    assert abs(len(made) / OUTPUT_SAMPLE_RATE - 32 * 1024 / 22050) < 0.001
    again = torch.from_numpy(soxr.resample(made.numpy(), OUTPUT_SAMPLE_RATE, 22050))
    inner = slice(4, 120)
    assert (mel(again[None])[..., :128] - wanted)[..., inner].abs().mean() < 0.6
    assert (mel(torch.randn(1, 40000))[..., :128] - wanted)[..., inner].abs().mean() > 2
