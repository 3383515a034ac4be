"""The speaker encoder: equal to the reference, loadable from published weights, and free of side effects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_fixtures import error, reference_of

import myxtts.model.vocoder
from myxtts.model.vocoder import SpeakerEncoder

TOLERANCE = 1e-4
reference = reference_of("speaker_encoder")

# The fixture's first stage has four channels, a squeeze of which to an eighth leaves none.
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")


@pytest.fixture
def encoder(reference: dict[str, Any]) -> SpeakerEncoder:
    encoder = SpeakerEncoder(reference["input_dim"], reference["proj_dim"], reference["num_filters"])
    encoder.load_state_dict(reference["state_dict"], strict=True)
    return encoder.eval().requires_grad_(False)


def test_equals_the_reference(encoder: SpeakerEncoder, reference: dict[str, Any]) -> None:
    wave = reference["wav16"].clone()
    assert error(encoder(wave, l2_norm=False), reference["emb"]) <= TOLERANCE
    assert error(encoder(wave, l2_norm=True), reference["emb_l2"]) <= TOLERANCE
    assert torch.equal(wave, reference["wav16"]), "the caller's wave was changed"


def test_own_tables_equal_the_published_ones(reference: dict[str, Any]) -> None:
    fresh = SpeakerEncoder(reference["input_dim"], reference["proj_dim"], reference["num_filters"]).state_dict()
    tables = [name for name in fresh if name.startswith("torch_spec.")]
    assert len(tables) == 3
    for name in tables:
        assert error(fresh[name], reference["state_dict"][name]) < 1e-5


def test_a_batch_equals_its_clips(encoder: SpeakerEncoder, reference: dict[str, Any]) -> None:
    together = encoder(reference["wav16"])
    assert error(torch.cat([encoder(wave[None]) for wave in reference["wav16"]]), together) < 1e-5


def test_loudness_does_not_matter(encoder: SpeakerEncoder, reference: dict[str, Any]) -> None:
    # Not exactly, because 1e-6 is added before the logarithm.
    assert error(encoder(2 * reference["wav16"]), encoder(reference["wav16"])) < 0.01


def test_half_precision_stays_near(encoder: SpeakerEncoder, reference: dict[str, Any]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert error(encoder(reference["wav16"]), reference["emb"]) < 0.03
    encoder.bfloat16()
    assert error(encoder(reference["wav16"]), reference["emb"]) < 0.03


def test_one_graph(reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(myxtts.model.vocoder, "BLOCKS_PER_LAYER", (1, 1, 1, 1))
    encoder = SpeakerEncoder(proj_dim=8, num_filters=(8, 8, 8, 8)).eval()
    compiled = torch.compile(encoder, fullgraph=True, dynamic=False, backend="eager")
    assert error(compiled(reference["wav16"]), encoder(reference["wav16"])) < 1e-6


@pytest.mark.gpu
def test_cuda_equals_cpu(
    encoder: SpeakerEncoder, reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # or else "float32" convolutions are TF32
    encoder.cuda()
    wave = reference["wav16"].cuda()
    assert error(encoder(wave), reference["emb"]) <= TOLERANCE
    assert error(encoder(wave, l2_norm=True), reference["emb_l2"]) <= TOLERANCE
