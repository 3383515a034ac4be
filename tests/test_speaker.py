"""The speaker encoder: equal to the reference, loadable from published weights, and trained by verification."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from conftest import SENTENCES, make_voice
from model_fixtures import error, reference_of
from safetensors.torch import load_file
from torch import Tensor
from training_fixtures import Start, arguments, assert_same_run, losses, newest, stop_at
from training_processes import Server

import myxtts.model.vocoder
import myxtts.training.recipes
from myxtts.config import MIN_SPEAKERS
from myxtts.data.batches import Sizes
from myxtts.model.vocoder import SpeakerEncoder
from myxtts.model.xtts import speaker_of_latents
from myxtts.run_dir import RunDir
from myxtts.synthesis.synthesizer import load_synthesizer, provenance
from myxtts.training.optim import Optimizer, Schedule
from myxtts.training.recipes import NOISE_DB, DecoderRecipe, SpeakerRecipe, add_noise

pytest_plugins = ["training_fixtures", "training_processes"]
TOLERANCE = 1e-4
NO_SIZES = Sizes(0, 0, 0, 0)
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


# Training


def pairs(num_voices: int = 6) -> dict[str, Tensor]:
    """Two crops of each voice, and what a recipe reads of them."""
    waves = [torch.from_numpy(make_voice(2.0, seed=seed)).float() for seed in range(num_voices)]
    crops = torch.stack([torch.stack([wave[:8000], wave[20000:28000]]) for wave in waves])
    crops = crops + 0.01 * torch.randn(crops.shape, generator=torch.Generator().manual_seed(0))
    return {
        "crops": crops,
        "voices": torch.arange(num_voices, dtype=torch.int32),
        "weights": torch.ones(num_voices),
        "totals": torch.full((5,), float(num_voices)),
    }


def make_recipe(monkeypatch: pytest.MonkeyPatch) -> SpeakerRecipe:
    monkeypatch.setattr(myxtts.training.recipes, "VARIED_SAMPLES", 6400)
    torch.manual_seed(2)
    return SpeakerRecipe(SpeakerEncoder(proj_dim=16, num_filters=(8, 8, 8, 8)))


def test_voices_are_learnt_and_the_embeddings_are_centred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(myxtts.training.recipes, "add_noise", lambda crops: crops)  # learns sooner
    monkeypatch.setattr(myxtts.training.recipes, "SPEEDS", (1.0, 1.0))
    recipe, batch = make_recipe(monkeypatch), pairs()
    optimizer = Optimizer(recipe, 3e-3, Schedule(0, None), betas=recipe.betas)
    found = []
    for step in range(100):
        total = recipe(batch, NO_SIZES)["total"]
        total.backward()
        optimizer.set_lr(step)
        optimizer.update()
        optimizer.zero_grad()
        recipe.after_step(step)
        found.append(float(total.detach()))
    assert sum(found[-10:]) < 0.7 * sum(found[:10])
    embeddings = recipe.encoder(batch["crops"].flatten(0, 1)).detach()
    assert float(embeddings.mean(0).norm()) < 0.8 * float(embeddings.norm(dim=1).mean())


def test_only_other_voices_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, batch = make_recipe(monkeypatch), pairs()
    alone = recipe.evaluate({name: value[:4] for name, value in batch.items()}, NO_SIZES)
    for change in (
        {"weights": torch.tensor([1.0, 1, 1, 1, 0, 0])},
        {"voices": torch.tensor([0, 1, 2, 3, -1, -1])},
    ):
        torch.testing.assert_close(recipe.evaluate(batch | change, NO_SIZES), alone)
    one_voice = recipe.evaluate(batch | {"voices": torch.zeros(6, dtype=torch.int32)}, NO_SIZES)
    assert float(one_voice["sum"]) == float(one_voice["error_sum"]) == 0
    assert float(one_voice["count"]) == 6


def test_noise_and_speed_are_drawn_in_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, batch = make_recipe(monkeypatch), pairs()
    torch.manual_seed(1)
    one, other = (recipe.evaluate(batch, NO_SIZES)["sum"] for _ in range(2))
    assert torch.equal(one, other)
    varied = recipe.vary(batch["crops"])
    assert varied.shape == (6, 2, 6400) and not torch.equal(varied, recipe.vary(batch["crops"]))
    noise = add_noise(varied) - varied
    has_noise = noise.square().mean(2) > 0
    assert has_noise.any() and not has_noise.all()
    level = 10 * torch.log10(varied.square().mean(2) / noise.square().mean(2))[has_noise]
    assert level.min() > NOISE_DB[0] - 0.1 and level.max() < NOISE_DB[1] + 0.1


def people(folder: Path, count: int) -> Path:
    """A corpus of so many speakers with three clips each."""
    (folder / "wavs").mkdir(parents=True)
    rows = ["audio_file|text|speaker_name"]
    for number, sentence in zip(range(3 * count), itertools.cycle(SENTENCES), strict=False):
        name = f"clip{number:03d}.wav"
        wave = make_voice(1.2, seed=number // 3)
        soundfile.write(folder / "wavs" / name, wave, 22050, subtype="PCM_16")
        rows.append(f"{name}|{sentence[:20]}|speaker {number // 3}")
    (folder / "metadata.csv").write_text("\n".join(rows) + "\n")
    return folder


STAGE = "--stages speaker --batch-size 4 --max-steps 9 --speaker-steps 4"


@pytest.mark.usefixtures("small")
def test_a_stopped_stage_continues_exactly(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = people(tmp_path / "corpus", MIN_SPEAKERS)
    whole = start(f"{STAGE} --save-step 2 --ema-decay 0.5", "whole", corpus)
    stop_at(monkeypatch, 3)
    parts = start(f"{STAGE} --save-step 2 --ema-decay 0.5", "parts", corpus)
    start(f"{STAGE} --save-step 2 --ema-decay 0.5", "parts", corpus)
    assert "continuing at step 3 of 4" in start.out
    assert_same_run(parts, whole, "speaker")
    saved = newest(whole, "speaker")
    assert not any(name.startswith("ema.") for name in saved.optimizer), "its batch norms cannot be averaged"
    state = RunDir(whole).load_model().state_dict()
    assert all(torch.equal(state[name], value) for name, value in saved.weights.items())


@pytest.mark.usefixtures("small")
def test_two_processes_train_one_encoder(tmp_path: Path, server: Server) -> None:
    command = arguments(tmp_path / "run", people(tmp_path / "corpus", MIN_SPEAKERS), STAGE)
    for run in server.start_ranks(command, hook="watch_ranks", KEPT=str(tmp_path)):
        assert run.wait() == 0, run.output
    ours, others = (load_file(tmp_path / f"speaker-{rank}.safetensors") for rank in range(2))
    for name, value in ours.items():
        if ".running_" not in name:  # the statistics of the first rank are broadcast before each step, and saved
            assert torch.equal(others[name], value), name


@pytest.mark.usefixtures("small")
def test_the_stage_is_trained_where_there_are_speakers(tmp_path: Path, start: Start) -> None:
    many, few = people(tmp_path / "many", MIN_SPEAKERS), people(tmp_path / "few", MIN_SPEAKERS - 1)
    run = start("--max-steps 1", "run", many)
    assert re.search(
        r"  dvae     1 steps\n  speaker  1 steps\n  gpt      1 steps\n  decoder  1 steps\n", start.out
    )
    assert RunDir(run).untrained() == [] and RunDir(run).load_model().speaker_is_trained
    assert provenance(RunDir(run)).untrained == ()
    start("--max-steps 2 --stages speaker", "run", many)
    assert "decoder  stale, and left as it is: it builds on speaker, which changes" in start.out
    assert RunDir(run).status("gpt").state == "complete", "the GPT knows no speaker encoder"

    run = start("--max-steps 1", "other", few)
    assert "Stage speaker is left out: the corpus names 7 speakers with two clips or more" in start.out
    assert not (run / "speaker").exists() and RunDir(run).untrained() == ["speaker"]
    assert "  not trained  speaker: random weights" in start.out
    start("--max-steps 1 --stages speaker", "third", few, code=2)
    assert "the stage learns from 8 or more" in start.err
    start("--max-steps 1 --stages speaker --batch-size 1", "third", many, code=2)
    assert "give --batch-size 2 or more" in start.err


@pytest.mark.usefixtures("small")
def test_without_the_stage_the_decoder_has_the_latents_of_the_gpt(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, seen = people(tmp_path / "corpus", 3), list[Tensor]()
    forward = DecoderRecipe.forward

    def seen_forward(self: DecoderRecipe, tensors: dict[str, Tensor], sizes: Sizes) -> dict[str, Tensor]:
        seen.append(tensors["speaker"].clone())
        return forward(self, tensors, sizes)

    monkeypatch.setattr(DecoderRecipe, "forward", seen_forward)
    run = start("--max-steps 1", "run", corpus)
    model = RunDir(run).load_model()
    assert not model.speaker_is_trained
    exported = tmp_path / "exported"
    assert "WARNING: speaker: never trained" in start.command("export", run, "--out", exported)
    for folder in (run, exported):
        synthesizer = load_synthesizer(folder, vocoder="hifigan", device=torch.device("cpu"))
        voice = synthesizer.voice([corpus / "wavs" / "clip000.wav"])
        expected = speaker_of_latents(voice.latents, model.dims.speaker_dim)[0]
        torch.testing.assert_close(voice.speaker, expected)
        assert float(voice.speaker.norm()) == pytest.approx(1)
    assert torch.cat(seen).norm(dim=1) == pytest.approx(1)
    references = torch.cat([RunDir(run).load_model().gpt.voice([torch.randn(40, 80)]) for _ in range(2)])
    one, other = speaker_of_latents(references, 8)
    assert not torch.allclose(one, other), "voices differ"


@pytest.mark.gpu
def test_cuda_equals_cpu(
    encoder: SpeakerEncoder, reference: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # or else "float32" convolutions are TF32
    encoder.cuda()
    wave = reference["wav16"].cuda()
    assert error(encoder(wave), reference["emb"]) <= TOLERANCE
    assert error(encoder(wave, l2_norm=True), reference["emb_l2"]) <= TOLERANCE


@pytest.mark.gpu
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("flags", ["--disable-xla-compilation", ""], ids=["captured", "compiled"])
def test_the_stage_is_captured_on_a_gpu(flags: str, tmp_path: Path, start: Start) -> None:
    corpus = people(tmp_path / "corpus", MIN_SPEAKERS)
    command = f"--stages speaker --batch-size 8 --max-steps 40 --val-data {corpus}"
    eager = start(f"{command} --disable-xla-compilation --disable-graph-mode", "eager", corpus)
    run = start(f"{command} {flags}", "run", corpus)
    assert "captured as a CUDA graph" in start.out
    assert losses(run, "speaker")[:5] == pytest.approx(losses(eager, "speaker")[:5], rel=0.25)
    weights = newest(run, "speaker").weights
    assert all(value.isfinite().all() for value in weights.values())
    tracked = weights["hifigan_decoder.speaker_encoder.bn1.num_batches_tracked"]
    assert int(tracked) == 40, "warming up changes no statistics"
