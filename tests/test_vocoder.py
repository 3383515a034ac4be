"""The vocoder equal to XTTS-v2's number for number, and the discriminators that train it."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_fixtures import error, reference_of, write_hifigan
from torch import Tensor

from myxtts.checkpoints import UnreadableWeights
from myxtts.model import vocoder as vocoder_module
from myxtts.model.vocoder import (
    RESOLUTIONS,
    DiscriminatorOutput,
    Discriminators,
    Generator,
    HifiGanDecoder,
    HifiGanInput,
    PeriodDiscriminator,
    ResolutionDiscriminator,
    num_frames,
    num_samples,
)
from myxtts.weights import start_from_hifigan

reference = reference_of("hifigan")
SIZES = ("decoder_input_dim", "upsample_initial_channel", "d_vector_dim")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def vocoder(reference: dict[str, Any]) -> HifiGanDecoder:
    model = HifiGanDecoder(**{name: reference[name] for name in SIZES})
    model.load_state_dict(reference["state_dict"])
    return model.eval()


def small_discriminators(**options: Any) -> Discriminators:
    torch.manual_seed(0)
    return Discriminators(period_widths=(4, 8, 8), resolution_width=4, **options)


class TestEqualsTheReference:
    def test_with_and_without_weight_norm(self, vocoder: HifiGanDecoder, reference: dict[str, Any]) -> None:
        copies = [copy.deepcopy(vocoder) for _ in range(2)]
        for model in copies:
            model.remove_weight_norm()
            assert not any("parametrizations" in name for name in model.state_dict())
        assert vocoder.state_dict().keys() == reference["state_dict"].keys()
        for model in (vocoder, *copies):
            assert error(model(reference["latents"], reference["g"]), reference["wav"]) <= 1e-4


class TestVocoder:
    @pytest.mark.parametrize("latents", [1, 2, 12, 13, 151, 605])
    def test_lengths_are_known_beforehand(self, latents: int) -> None:
        frames = HifiGanDecoder.frames(torch.zeros(1, latents, 2))
        assert frames.shape == (1, 2, num_frames(latents))
        assert num_samples(latents) == 256 * num_frames(latents)
        assert num_samples(latents) / 24000 == pytest.approx(latents * 1024 / 22050, abs=256 / 24000)

    def test_output_of_a_batch_is_that_of_its_rows(self, vocoder: HifiGanDecoder) -> None:
        latents, g = torch.randn(3, 5, 32), torch.randn(3, 16, 1)
        together = vocoder(latents, g)
        assert together.shape == (3, 1, num_samples(5))
        alone = torch.cat([vocoder(latents[i : i + 1], g[i : i + 1]) for i in range(3)])
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
        assert error(vocoder(latents, -g), together) > 1e-3, "the voice must be heard"

    def test_samples_are_not_rounded_under_autocast(
        self, vocoder: HifiGanDecoder, reference: dict[str, Any]
    ) -> None:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            wave = vocoder(reference["latents"], reference["g"])
        assert wave.dtype == torch.float32
        assert (wave != wave.bfloat16()).float().mean() > 0.9
        assert error(wave, reference["wav"]) < 10 ** (-44 / 20)

    def test_frames_may_be_cut_like_samples(self, vocoder: HifiGanDecoder) -> None:
        latents, g = torch.randn(1, 60, 32), torch.randn(1, 16, 1)
        frames, wave = vocoder.frames(latents), vocoder(latents, g)
        cut = vocoder.waveform_decoder(frames[..., 50:200], g)
        # Far from the cuts nothing is missing: about 40 frames to each side is more than the network sees.
        torch.testing.assert_close(
            cut[..., 40 * 256 : 110 * 256], wave[..., 90 * 256 : 160 * 256], atol=1e-5, rtol=1e-4
        )

    def test_a_fresh_one_starts_near_silence(self) -> None:
        torch.manual_seed(0)
        model = HifiGanDecoder(decoder_input_dim=32, upsample_initial_channel=64, d_vector_dim=16)
        assert model(torch.randn(1, 4, 32), F.normalize(torch.randn(1, 16, 1), dim=1)).abs().mean() < 0.2


class TestStartFromHifiGan:
    def test_only_the_first_layer_and_the_speaker_are_new(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        hifigan = write_hifigan(tmp_path / "generator.pth.tar", 32)
        ours, teacher = Generator(8, 32, 4), HifiGanInput(32)
        said = start_from_hifigan(tmp_path / "generator.pth.tar", ours, teacher)
        assert re.fullmatch(r"Decoder: 0\.1 of 0\.1 million weights from .*; the first layer and .* are new", said)
        wave = 0.1 * torch.randn(2, 1, 20 * 256)
        expected = hifigan(teacher.mel(wave), torch.zeros(2, 1, 1))
        assert expected.abs().mean() > 1e-4
        assert error(ours.body(teacher(wave), torch.randn(2, 4, 1)), expected) < 1e-5
        assert all(value.requires_grad for value in ours.parameters())
        assert not any(value.requires_grad for value in teacher.parameters())

    def test_all_of_it_fits_a_generator_of_mels(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        hifigan = write_hifigan(tmp_path / "generator.pth.tar", 32)
        ours, teacher = Generator(1, 32, 4, reads_mels=True), HifiGanInput(32)
        said = start_from_hifigan(tmp_path / "generator.pth.tar", ours, teacher)
        assert said.endswith("the flow and the speaker layers are new")
        mel, speaker = teacher.mel(0.1 * torch.randn(2, 1, 20 * 256)), torch.randn(2, 4, 1)
        expected = hifigan(mel, torch.zeros(2, 1, 1))
        assert error(ours(mel, speaker), expected) < 1e-5

    def test_its_mel_is_of_magnitudes_around_the_middle_of_each_frame(self) -> None:
        """Filters with the corners of Slaney's scale: 200/3 Hz a mel up to 1 kHz, then 27 for a factor of 6.4."""
        teacher, time = HifiGanInput(4), torch.arange(16 * 256) / 22050
        corners = [200 / 3 * mel if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27) for mel in _slaney_mels()]
        for band in (5, 30, 70):
            tone = 0.3 * torch.sin(2 * torch.pi * corners[band + 1] * time)
            assert (teacher.mel(tone.view(1, 1, -1))[0, :, 3:-3].argmax(0) == band).all()
        click = torch.zeros(1, 1, 16 * 256)
        click[..., 7 * 256 + 128] = 1
        mel = teacher.mel(click)
        assert mel.shape == (1, 80, 16)
        assert mel.mean(1).argmax() == 7
        torch.testing.assert_close(mel[..., 6], mel[..., 8], rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "No such file of weights"),
            (b"no weights", "damaged or no PyTorch checkpoint"),
            ({"model": {"a": torch.zeros(2)}}, "should be the generator of a HiFi-GAN .* is missing"),
            (64, "a generator of 64 channels, and the decoder of this model has 32; choose a --model-size"),
        ],
    )
    def test_a_file_that_does_not_fit_is_refused(self, content: object, message: str, tmp_path: Path) -> None:
        path = tmp_path / "generator.pth.tar"
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, int):
            write_hifigan(path, content)
        elif content is not None:
            torch.save(content, path)
        with pytest.raises(UnreadableWeights, match=f"(?s){message}"):
            start_from_hifigan(path, Generator(8, 32, 4), HifiGanInput(32))


def _slaney_mels() -> list[float]:
    highest = 15 + 27 * math.log(8) / math.log(6.4)
    return [highest * number / 81 for number in range(82)]


def test_waves_and_gradients_are_the_same_in_the_layout_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    generator = Generator(8, 32, 4)
    frames, g = torch.randn(2, 8, 12), torch.randn(2, 4, 1)

    def gradients() -> Tensor:
        generator.zero_grad()
        wave = generator(frames, g)
        (wave * torch.linspace(-1, 1, wave.shape[-1])).sum().backward()
        return torch.cat([wave.flatten(), *(value.grad.flatten() for value in generator.parameters())])

    expected = gradients()
    monkeypatch.setattr(vocoder_module, "_is_adjacent", lambda _: True)
    assert error(gradients(), expected) < 1e-3  # gradients of a weight norm are small differences of large sums


@pytest.mark.parametrize("number", range(5))
def test_discriminators_are_the_same_in_the_layout_for_gpus(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = small_discriminators(periods=(2, 3), resolutions=RESOLUTIONS).networks[number]
    wave = torch.randn(2, 1, 4801, requires_grad=True)

    def gradients() -> Tensor:
        network.zero_grad()
        wave.grad = None
        logits, features = network(wave)
        loss = (logits * torch.linspace(-1, 1, logits.shape[-1])).sum()
        (loss + sum(feature.square().sum() for feature in features)).backward()
        found = [logits, *features, wave.grad, *(value.grad for value in network.parameters())]
        return torch.cat([value.flatten() for value in found])

    expected = gradients()
    monkeypatch.setattr(vocoder_module, "_is_adjacent", lambda _: True)
    assert error(gradients(), expected) < 1e-4


class TestDiscriminators:
    def test_of_the_papers_have_their_size(self) -> None:
        with torch.device("meta"):
            full = Discriminators()
        counts = [sum(p.numel() for p in networks.parameters()) for networks in (full.periods, full.resolutions)]
        assert counts[0] == pytest.approx(41.1e6, rel=0.01)
        assert counts[1] == pytest.approx(0.28e6, rel=0.03)

    def test_shapes(self) -> None:
        model, wave = small_discriminators(), torch.rand(3, 1, 4801) - 0.5
        assert len(model.networks) == 5 + 3
        for network in model.networks:
            logits, features = network(wave)
            assert (len(logits), logits.ndim) == (3, 2)
            assert [(len(feature), feature.ndim) for feature in features] == [(3, 4)] * len(network.layers)

    def test_real_and_fake_together_are_as_alone(self) -> None:
        model = small_discriminators()
        real, fake = torch.rand(2, 1, 4800) - 0.5, torch.rand(2, 1, 4800) - 0.5
        for together, wave in zip(model(real, fake), (real, fake), strict=True):
            for ours, network in zip(together, model.networks, strict=True):
                alone = network(wave)
                assert isinstance(ours, DiscriminatorOutput)
                torch.testing.assert_close(ours.logits, alone.logits)
                torch.testing.assert_close(ours.features, alone.features)

    def test_periods_see_every_pth_sample_alone(self) -> None:
        torch.manual_seed(0)
        network, wave = PeriodDiscriminator(7, (4, 8, 8)), torch.randn(2, 1, 999)
        phases = F.pad(wave, (0, 2), mode="reflect").view(2, -1, 7).mT.reshape(14, 1, -1)
        for layer, stride in zip(network.layers, (3, 3, 1), strict=True):
            phases = F.leaky_relu(F.conv1d(phases, layer.weight[..., 0], layer.bias, stride, 2), 0.1)
        phases = F.conv1d(phases, network.last.weight[..., 0], network.last.bias, 1, 1)
        judged = network(wave).logits.view(2, -1, 7)
        torch.testing.assert_close(judged, phases.view(2, 7, -1).mT)

    @pytest.mark.parametrize("resolution", RESOLUTIONS, ids=str)
    def test_spectrograms_show_a_tone_where_it_is(self, resolution) -> None:
        time = torch.arange(24000) / 24000
        tone = torch.sin(2 * torch.pi * 3000 * time).view(1, 1, -1)
        seen = ResolutionDiscriminator(resolution, 4).magnitudes(tone)
        assert seen.shape == (1, resolution.fft_samples // 2 + 1, 24000 // resolution.hop_samples)
        assert (seen[0, :, 10:-10].argmax(0) == 3000 * resolution.fft_samples // 24000).all()

    def test_silence_has_finite_gradients(self) -> None:
        model, silence = small_discriminators(), torch.zeros(1, 1, 4800, requires_grad=True)
        sum(network(silence).logits.sum() for network in model.networks).backward()
        assert silence.grad.isfinite().all()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


class TestOnTheGpu:
    pytestmark = pytest.mark.gpu

    def test_float32_equals_the_cpu(self, vocoder: HifiGanDecoder, reference: dict[str, Any]) -> None:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            wave = vocoder.cuda()(reference["latents"].cuda(), reference["g"].cuda())
        assert error(wave, reference["wav"]) <= 1e-4

    def test_bfloat16_is_near(self, vocoder: HifiGanDecoder, reference: dict[str, Any]) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            wave = vocoder.cuda()(reference["latents"].cuda(), reference["g"].cuda())
        assert error(wave, reference["wav"]) <= 3e-2
