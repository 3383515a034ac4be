"""Voices that are adapted to their recordings, and readers: what is learnt, saved, mixed, refused and chosen."""

from __future__ import annotations

import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import make_voice
from synthesis_fixtures import TEXTS, make_model, speaking, vocabulary

from myxtts import cli
from myxtts.audio import Pcm, decode
from myxtts.checkpoints import UnreadableWeights
from myxtts.cli import main
from myxtts.config import CONDITIONING_TOKENS, SAMPLE_RATE
from myxtts.errors import ConfigError, DatasetError
from myxtts.model.conditioning import pack_frames
from myxtts.model.flow import NUM_OFFSETS
from myxtts.model.gpt import heard_latents, heard_loss, pack, packed_length
from myxtts.model.mel import DVAE_MEL, LogMel
from myxtts.model.xtts import XTTS
from myxtts.run_dir import RunDir, readers_file
from myxtts.synthesis import adaptation
from myxtts.synthesis.adaptation import flow_example
from myxtts.synthesis.synthesizer import Synthesizer, load_synthesizer, readers_of
from myxtts.synthesis.vocoding import HifiGan
from myxtts.synthesis.voices import Voice, VoiceLibrary, mixed, published_voices
from myxtts.weights import READERS_FILE, save_compact

pytest_plugins = ["synthesis_fixtures"]
pytestmark = pytest.mark.usefixtures("one_thread")


def flow_model() -> XTTS:
    """A model whose flow is not zero at its end, as that of a new one is."""
    model = make_model(decoder_input="mel").requires_grad_(False)
    flow = model.hifigan_decoder.waveform_decoder.flow
    torch.manual_seed(0)
    for weight in (*flow.last.parameters(), flow.latents.weight):
        weight.normal_(std=0.1)
    return model


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STEPS": 16, "SEGMENTS": 2, "SEGMENT_FRAMES": 64}.items():
        monkeypatch.setattr(adaptation, name, value)


@pytest.fixture
def flowing() -> Synthesizer:
    return speaking(flow_model())


def error(synthesizer: Synthesizer, voice: Voice, recording: Pcm) -> float:
    """The mean error of the flow on a recording, with noise that is always the same."""
    assert isinstance(synthesizer.vocoder, HifiGan) and synthesizer.vocoder.codec is not None
    codec, draws = synthesizer.vocoder.codec, torch.Generator().manual_seed(5)
    given, wanted = flow_example(torch.from_numpy(recording)[None] / 32768, voice, synthesizer.gpt, codec)
    noise, speaker = torch.randn(wanted.shape, generator=draws), voice.for_vocoder[None, :, None]
    losses = [codec.flow.loss(wanted, given, speaker, noise, torch.tensor([time])).mean() for time in (0.2, 0.7)]
    return float(sum(losses))


def test_a_voice_is_learnt_from_its_recording(flowing: Synthesizer, reference: Path) -> None:
    plain, learnt = flowing.voice([reference]), flowing.voice([reference], adapt=True)
    assert plain.offsets is None and learnt.offsets is not None and learnt.offsets.shape == (NUM_OFFSETS,)
    assert torch.equal(learnt.latents, plain.latents) and torch.equal(learnt.speaker, plain.speaker)
    recording = decode(reference, SAMPLE_RATE, 60)
    assert error(flowing, learnt, recording) < 0.9 * error(flowing, plain, recording)
    again = flowing.voice([reference], adapt=True)
    assert torch.equal(again.offsets, learnt.offsets)
    assert not any(weight.requires_grad for weight in flowing.gpt.parameters())
    said, differently = (flowing.speak(TEXTS[0], voice, "en", seed=1).wave for voice in (plain, learnt))
    assert said.shape == differently.shape and abs(said - differently).max() > 1e-3


@pytest.mark.parametrize("seconds", [1.2, 31.0])
def test_short_and_long_recordings_are_learnt(flowing: Synthesizer, seconds: float) -> None:
    pcm = (make_voice(seconds) * 32767).astype("int16")
    voice = flowing.voice_of(([pcm], []), "anna", adapt=True)
    assert voice.offsets is not None and voice.offsets.isfinite().all() and voice.offsets.any()


def test_offsets_of_zero_change_nothing(flowing: Synthesizer, reference: Path) -> None:
    plain = flowing.voice([reference])
    same = replace(plain, offsets=torch.zeros(NUM_OFFSETS), fingerprint=flowing.fingerprint)
    one, other = (flowing.speak(TEXTS[0], voice, "en", seed=1).wave for voice in (plain, same))
    assert (one == other).all()


def test_latents_without_a_text_are_those_of_an_empty_one(flowing: Synthesizer, reference: Path) -> None:
    """Those that training computes, for a batch of one clip."""
    gpt, codes = flowing.gpt, torch.arange(7)
    voice = flowing.voice([reference]).latents
    frames = pack_frames(torch.randn(50, 80), torch.tensor([50]), 50)
    empty = (torch.zeros(1, 1, dtype=torch.long), torch.tensor([0]))
    batch = pack(gpt.dims, frames, *empty, codes[None], torch.tensor([7]), budget=packed_length(0, 7))
    with torch.no_grad():
        expected = gpt.code_latents(batch)[0]
        latents = heard_latents(gpt, gpt.condition(frames), codes)
    torch.testing.assert_close(latents, expected.float(), atol=1e-4, rtol=1e-3)
    assert not torch.allclose(latents, heard_latents(gpt, voice, codes), atol=1e-3)


def test_an_adapted_voice_is_saved_built_in_and_mixed(
    flowing: Synthesizer, reference: Path, tmp_path: Path
) -> None:
    learnt, plain = flowing.voice([reference], "anna", adapt=True), flowing.voice([reference], "plain")
    library = VoiceLibrary(tmp_path)
    for voice in (learnt, plain):
        library.save(voice)
    loaded = library.load("anna", flowing.fingerprint)
    assert (
        torch.equal(loaded.offsets, learnt.offsets) and library.load("plain", flowing.fingerprint).offsets is None
    )
    half = mixed("half", [(learnt, 1.0), (plain, 1.0)], flowing.fingerprint)
    assert torch.allclose(half.offsets, learnt.offsets / 2) and half.fingerprint == learnt.fingerprint
    assert mixed("both", [(plain, 1.0), (plain, 1.0)], flowing.fingerprint).fingerprint == plain.fingerprint
    library.build_in([learnt, plain])
    built_in = published_voices(tmp_path / "voices.safetensors")
    assert (
        torch.allclose(built_in["anna"].offsets, learnt.offsets, atol=1e-3) and built_in["plain"].offsets is None
    )


def test_an_adapted_voice_belongs_to_its_flow(flowing: Synthesizer, reference: Path, tmp_path: Path) -> None:
    learnt, plain = flowing.voice([reference], "anna", adapt=True), flowing.voice([reference], "plain")
    trained = flow_model()
    trained.hifigan_decoder.waveform_decoder.flow.last.bias.add_(1e-3)
    other, library = speaking(trained), VoiceLibrary(tmp_path)
    library.save(learnt)
    with pytest.raises(DatasetError, match="other weights"):
        library.load("anna", other.fingerprint)
    with pytest.raises(DatasetError, match="another model"):
        other.speak(TEXTS[0], learnt, "en")
    assert other.speak(TEXTS[0], plain, "en", seed=1).wave.any()  # embeddings do not depend on the flow


def test_only_a_flow_can_be_adapted(synthesizer: Synthesizer, reference: Path) -> None:
    assert not synthesizer.adapts
    with pytest.raises(ConfigError, match="cannot be adapted"):
        synthesizer.voice([reference], adapt=True)


def test_damaged_offsets_are_no_voice(flowing: Synthesizer, reference: Path, tmp_path: Path) -> None:
    library = VoiceLibrary(tmp_path)
    for offsets in (torch.zeros(3), torch.full((NUM_OFFSETS,), torch.nan)):
        library.save(replace(flowing.voice([reference], "anna"), offsets=offsets))
        with pytest.raises(DatasetError, match="not a voice"):
            library.load("anna")


def test_the_commands_adapt_if_the_model_can(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    save_compact(folder, flow_model(), vocabulary())
    model, out = ["--model", str(folder)], ["--out", str(tmp_path / "x.wav"), "--language", "en"]
    for flag, name in (([], "learnt"), (["--no-adapt"], "plain")):
        assert main(["voices", "--add", name, str(reference), *flag, *model]) == 0
        speaker = ["--speaker", str(reference), "--voice", f"said {name}"]
        assert main(["speak", "Hello.", *speaker, *flag, *model, *out]) == 0
    library = VoiceLibrary(folder)
    found = {voice.name: voice.offsets is not None for voice in library.all()}
    assert found == {"learnt": True, "said learnt": True, "plain": False, "said plain": False}
    assert main(["export", str(folder), "--out", str(tmp_path / "export"), "--to", "compact"]) == 0
    built_in = published_voices(tmp_path / "export" / "voices.safetensors")
    assert {name: voice.offsets is not None for name, voice in built_in.items()} == found
    save_compact(folder, make_model(), vocabulary())
    capsys.readouterr()
    assert main(["voices", "--add", "other", str(reference), "--adapt", *model]) == 2
    assert "cannot be adapted" in capsys.readouterr().err
    for command in (["voices"], ["speak", "Hello.", *out]):
        assert main([*command, "--no-adapt", *model]) == 2
        assert "--no-adapt says how a voice is made of a recording" in capsys.readouterr().err


# Readers


def some_readers() -> list[Voice]:
    dims = flow_model().dims
    latents = torch.randn(3, 1, CONDITIONING_TOKENS, dims.gpt.dim, generator=torch.Generator().manual_seed(3))
    return [Voice(f"reader {number}", each, torch.ones(dims.speaker_dim)) for number, each in enumerate(latents)]


def test_the_loss_of_codes_is_that_of_their_latents(flowing: Synthesizer) -> None:
    voice, codes = some_readers()[0].latents, torch.tensor([3, 1, 4, 1, 5])
    logs = flowing.gpt.mel_head(heard_latents(flowing.gpt, voice, codes)).log_softmax(-1)
    expected = -sum(float(row[code]) for row, code in zip(logs, codes, strict=True))
    assert heard_loss(flowing.gpt, voice, codes) == pytest.approx(expected, rel=1e-5)


def test_a_voice_reads_as_the_reader_in_whom_its_codes_are_likeliest(reference: Path) -> None:
    plain, readers = speaking(flow_model()), some_readers()
    own = plain.voice([reference])
    reading = speaking(flow_model(), readers=readers).voice([reference])
    assert torch.equal(reading.speaker, own.speaker) and reading.fingerprint == own.fingerprint
    assert isinstance(plain.vocoder, HifiGan) and plain.vocoder.codec is not None
    wave = torch.from_numpy(decode(reference, SAMPLE_RATE, 60))[None] / 32768
    codec = plain.vocoder.codec
    codes = codec.dvae.encode(LogMel(DVAE_MEL)(wave, codec.mel_stats))[0]
    losses = [heard_loss(plain.gpt, reader.latents, codes) for reader in readers]
    assert torch.equal(reading.latents, readers[losses.index(min(losses))].latents)


def test_griffin_lim_speaks_as_the_gpt_reads_so_it_reads_in_the_person_s_voice(reference: Path) -> None:
    own = speaking(flow_model()).voice([reference])
    voice = speaking(flow_model(), readers=some_readers(), vocoder="griffin-lim").voice([reference])
    assert torch.equal(voice.latents, own.latents)


def test_a_run_without_a_gpt_of_its_own_reads_as_its_first_weights(reference: Path, tmp_path: Path) -> None:
    weights, folder, export = tmp_path / "weights", tmp_path / "run", tmp_path / "export"
    VoiceLibrary(weights).build_in(some_readers())
    (weights / "voices.safetensors").rename(weights / READERS_FILE)
    save_compact(weights, flow_model(), vocabulary())
    run = RunDir(folder)
    run.start(flow_model(), vocabulary(), [], {"training.init_from": str(weights)}, readers_file(weights))
    names = [reader.name for reader in some_readers()]
    shutil.rmtree(weights)
    assert [reader.name for reader in readers_of(folder)] == names
    voice = load_synthesizer(folder, vocoder="hifigan", device="cpu").voice([reference])
    assert any(torch.equal(voice.latents, reader.latents.half().float()) for reader in some_readers())
    assert main(["export", str(folder), "--out", str(export), "--to", "compact"]) == 0
    assert [reader.name for reader in readers_of(export)] == names and not VoiceLibrary(export).all()
    assert main(["export", str(export), "--out", str(tmp_path / "coqui")]) == 0
    assert [reader.name for reader in readers_of(tmp_path / "coqui")] == names
    content = (folder / READERS_FILE).read_bytes()
    (folder / READERS_FILE).write_bytes(content[:-2] + b"xx")
    with pytest.raises(UnreadableWeights, match="checksum"):
        readers_of(folder)
    (folder / "gpt" / "step-00000001").mkdir(parents=True)
    assert not readers_of(folder)


def test_a_run_that_trained_its_flow_learns_voices_only_if_asked(flowing: Synthesizer, tmp_path: Path) -> None:
    for stage, usual in (("gpt", True), ("decoder", False)):
        (tmp_path / stage / "step-00000001").mkdir(parents=True)
        found = [cli._adapts(Namespace(adapt=asked), tmp_path, flowing) for asked in (None, True, False)]
        assert found == [usual, True, False]
