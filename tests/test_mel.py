"""Mels, PCM and resampling: equal to the reference, the same alone and in a batch, float32 everywhere."""

from __future__ import annotations

import pytest
import torch
from model_fixtures import error as relative_error
from model_fixtures import reference_of, waiting_is_an_error
from torch import Tensor

from myxtts.model.mel import (
    CONDITIONING_MEL,
    DVAE_MEL,
    SPEAKER_MEL,
    SPEAKER_SAMPLE_RATE,
    LogMel,
    MelSpec,
    pcm_to_wave,
    reflect,
    resample,
)

FRONT_ENDS = pytest.mark.parametrize(
    "spec", [DVAE_MEL, CONDITIONING_MEL, SPEAKER_MEL], ids=["dvae", "conditioning", "speaker"]
)
TOLERANCE = 1e-4
reference = reference_of("mels")


def error(found: Tensor, expected: Tensor) -> float:
    assert found.dtype == torch.float32
    return relative_error(found, expected)


def wave_of(spec: MelSpec, reference: dict[str, Tensor]) -> Tensor:
    return reference["wav16" if spec is SPEAKER_MEL else "wav22"]


@pytest.mark.parametrize(("spec", "name"), [(DVAE_MEL, "dvae_mel"), (CONDITIONING_MEL, "cond_mel")])
def test_equals_the_reference(reference: dict[str, Tensor], spec: MelSpec, name: str) -> None:
    log_mel = LogMel(spec)
    assert error(log_mel(reference["wav22"], reference["mel_norms"]), reference[name]) <= TOLERANCE
    unnormalised = reference[name] * reference["mel_norms"][:, None]
    assert error(log_mel(reference["wav22"]), unnormalised) <= TOLERANCE
    assert not log_mel.state_dict()  # the tables follow from the spec


def test_speaker_mel_and_resampling_equal_the_reference(reference: dict[str, Tensor]) -> None:
    log_mel = LogMel(SPEAKER_MEL)(reference["wav16"])
    assert error(log_mel, (reference["spk_mel"] + 1e-6).log()) <= TOLERANCE  # the fixture holds power
    assert error(log_mel.exp() - 1e-6, reference["spk_mel"]) <= TOLERANCE
    assert error(resample(reference["wav22"], SPEAKER_SAMPLE_RATE), reference["wav16"]) <= TOLERANCE


@pytest.mark.parametrize("num_samples", [1, 440, 441, 442, 22050])
def test_resampled_length_and_level(num_samples: int) -> None:
    resampled = resample(torch.ones(num_samples), SPEAKER_SAMPLE_RATE)
    assert resampled.shape == (-(-num_samples * 16000 // 22050),)
    if num_samples == 22050:
        assert (resampled[20:-20] - 1).abs().max() < 0.01  # a constant stays what it was


@pytest.mark.parametrize(("left", "right"), [(0, 0), (0, 7), (5, 0), (9, 9)])
def test_reflection_with_deterministic_algorithms_is_that_of_pad(left: int, right: int) -> None:
    waves = [torch.randn(2, 1, 40, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    results = [reflect(waves[0], left, right)]
    torch.use_deterministic_algorithms(True)
    try:
        results.append(reflect(waves[1], left, right))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*results)
    for result in results:
        (result * torch.arange(result.shape[-1])).sum().backward()
    assert torch.equal(waves[0].grad, waves[1].grad)


@FRONT_ENDS
def test_a_clip_in_a_batch_equals_the_clip_alone(reference: dict[str, Tensor], spec: MelSpec) -> None:
    log_mel, wave = LogMel(spec), wave_of(spec, reference)[0]
    num_samples = torch.tensor([len(wave), 20000, 12345, spec.hop_samples * 40, 700, 0], dtype=torch.int32)
    rows = torch.stack([torch.where(torch.arange(len(wave)) < length, wave, 0.0) for length in num_samples])
    before = rows.clone()
    mels, num_frames = log_mel(rows, num_samples=num_samples), num_samples // spec.hop_samples + 1
    assert torch.equal(rows, before)
    assert mels.isfinite().all()
    for length, mel, frames in zip(num_samples[:-1].tolist(), mels, num_frames.tolist(), strict=False):
        alone = log_mel(wave[:length])
        assert frames == alone.shape[-1]
        assert error(mel[:, :frames], alone) < 1e-6


@pytest.mark.parametrize("hz", [5000, 10000, 10300])
def test_targets_at_24_khz_keep_tones_and_have_no_images(hz: int) -> None:
    """An image of a tone lies as far above 11,025 Hz as the tone lies below."""
    tone = torch.sin(2 * torch.pi * hz * torch.arange(22050) / 22050)
    wave = resample(tone, 24000)[2000:22000].double() * torch.hann_window(20000, dtype=torch.float64)
    spectrum = torch.fft.rfft(wave).abs() / 5000
    at = round(hz * 20000 / 24000)
    assert float(spectrum[at - 5 : at + 6].max()) > 0.9
    assert float(spectrum[at + 50 :].max()) < 1e-3


def test_pcm_becomes_waves_and_stale_samples_silence() -> None:
    pcm = torch.tensor([[-32768, 32767, 1, 9], [16384, 9, 9, 9], [9, 9, 9, 9]], dtype=torch.int16)
    wave = pcm_to_wave(pcm, torch.tensor([3, 1, 0], dtype=torch.int32))
    expected = [[-1.0, 32767 / 32768, 1 / 32768, 0.0], [0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    assert wave.dtype == torch.float32
    assert wave.tolist() == expected


@FRONT_ENDS
def test_float32_under_autocast_and_in_a_bf16_model(reference: dict[str, Tensor], spec: MelSpec) -> None:
    wave = wave_of(spec, reference)
    expected = LogMel(spec)(wave)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), LogMel(spec, persistent=True)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model[1](wave), expected)
        assert resample(wave, SPEAKER_SAMPLE_RATE).dtype == torch.float32
    assert model[0].weight.dtype == torch.bfloat16
    assert all(table.dtype == torch.float32 for table in model[1].state_dict().values())


@pytest.mark.gpu
@FRONT_ENDS
def test_cuda_equals_cpu(reference: dict[str, Tensor], spec: MelSpec) -> None:
    wave = wave_of(spec, reference)
    num_samples = torch.tensor([wave.shape[1], 9999])
    log_mel = LogMel(spec)
    expected, expected_16k = log_mel(wave, num_samples=num_samples), resample(wave, SPEAKER_SAMPLE_RATE)
    log_mel.cuda()
    on_device, lengths = wave.cuda(), num_samples.cuda()
    with waiting_is_an_error():
        found, found_16k = log_mel(on_device, num_samples=lengths), resample(on_device, SPEAKER_SAMPLE_RATE)
    assert found.is_cuda
    assert error(found, expected) <= TOLERANCE
    assert error(found_16k, expected_16k) <= TOLERANCE
