"""Voices: made from recordings, saved by name, published with XTTS-v2; and what is refused."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import torch
import torch.nn.functional as F
from conftest import make_voice
from synthesis_fixtures import TEXTS, make_model, speaking

from myxtts.checkpoints import UnreadableWeights, write_pth
from myxtts.errors import ConfigError, DatasetError
from myxtts.synthesis import voices
from myxtts.synthesis.synthesizer import Synthesizer
from myxtts.synthesis.voices import UnusableReference, Voice, VoiceLibrary, mixed

pytest_plugins = ["synthesis_fixtures"]
pytestmark = pytest.mark.usefixtures("one_thread")

Recorded = Callable[..., Path]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    def record(name: str, wave: np.ndarray, rate: int = 22050) -> Path:
        sf.write(tmp_path / name, wave, rate)
        return tmp_path / name

    return record


def test_a_voice_is_the_mean_of_its_recordings(
    synthesizer: Synthesizer, anna: Voice, reference: Path, recorded: Recorded
) -> None:
    path = recorded("second.flac", make_voice(4.0, rate=16000, seed=3), 16000)
    both, second = synthesizer.voice([reference, path], name="both"), synthesizer.voice([path])
    assert both.latents.shape == (1, 32, 64) and both.speaker.shape == (16,)
    assert (second.name, both.name) == ("second", "both")
    torch.testing.assert_close(both.speaker, F.normalize(anna.speaker + second.speaker, dim=0))
    # Five seconds are a chunk of four and one of one; the second file is one chunk.
    torch.testing.assert_close(both.latents, (2 * anna.latents + second.latents) / 3, atol=1e-5, rtol=1e-4)


def test_recordings_are_used_in_turn_and_for_half_a_minute(
    synthesizer: Synthesizer, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert voices.USED_SECONDS == 30
    monkeypatch.setattr(voices, "USED_SECONDS", 6)
    one, two = make_voice(9.0), make_voice(9.0, seed=2)
    long, cut, other = recorded("long.wav", one), recorded("cut.wav", one[: 6 * 22050]), recorded("two.wav", two)
    made, same = synthesizer.voice([long]), synthesizer.voice([cut])
    torch.testing.assert_close(made.latents, same.latents)
    torch.testing.assert_close(made.speaker, same.speaker)
    in_turn = synthesizer.voice([long, other])  # four seconds of the first, two of the second
    parts = [recorded("four.wav", one[: 4 * 22050]), recorded("rest.wav", two[: 2 * 22050])]
    torch.testing.assert_close(in_turn.latents, synthesizer.voice(parts).latents)


def test_a_short_reference_is_noted(synthesizer: Synthesizer, recorded: Recorded) -> None:
    voice = synthesizer.voice([recorded("short.wav", make_voice(1.6))])
    assert any("only 1.6 s" in note for note in synthesizer.speak(TEXTS[0], voice, "en", seed=4).report.notes())


def test_bad_references_are_all_named(
    synthesizer: Synthesizer, reference: Path, recorded: Recorded, tmp_path: Path
) -> None:
    nothing = np.zeros(66150, np.float32)
    bad = {
        "silent.wav: silent": recorded("silent.wav", nothing),
        "short.wav: too short": recorded("short.wav", np.concatenate([make_voice(0.4), nothing])),
        "quiet.wav: silent": recorded("quiet.wav", 0.3 + 0.001 * make_voice(3.0)),
        "text.wav: not audio": tmp_path / "text.wav",
        "absent.wav: there is no such file": tmp_path / "absent.wav",
        "folder: is a folder": tmp_path / "folder",
        "pipe.wav: unreadable file (not a regular file)": tmp_path / "pipe.wav",
        "nan.wav: not audio (the samples contain NaN": tmp_path / "nan.wav",
    }
    os.mkfifo(tmp_path / "pipe.wav")
    sf.write(tmp_path / "nan.wav", np.full(66150, np.nan), 22050, subtype="FLOAT")
    (tmp_path / "text.wav").write_text("no audio at all, whatever the name says")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UnusableReference) as caught:
        synthesizer.voice([reference, *bad.values()])
    assert all(told in str(caught.value) for told in bad) and "anna.wav" not in str(caught.value)
    with pytest.raises(UnusableReference, match="at least one"):
        synthesizer.voice([])


def test_voices_are_saved_by_name(synthesizer: Synthesizer, anna: Voice, tmp_path: Path) -> None:
    library = VoiceLibrary(tmp_path)
    assert library.all() == []
    with pytest.raises(ConfigError, match="no built-in voice"):
        library.default("en")
    library.save(replace(anna, languages=("en", "fa"), description="calm"))
    library.save(replace(anna, name="خانم آنا"))
    assert [voice.name for voice in library.all()] == sorted(["anna", "خانم آنا"])
    assert (library.all()[0].languages, library.all()[0].description) == (("en", "fa"), "calm")
    kept = library.load("anna", synthesizer.fingerprint)
    assert torch.equal(kept.latents, anna.latents) and torch.equal(kept.speaker, anna.speaker)
    with pytest.raises(ConfigError, match="there are: anna"):
        library.load("bert", synthesizer.fingerprint)
    for name in ("../anna", "../../x", "/tmp/anna", "a/b", ".", " ", "nul\0", "x" * 201, "é" * 101):
        for use in (library.save, lambda voice: library.load(voice.name, "")):
            with pytest.raises(ConfigError, match="cannot name a voice"):
                use(replace(anna, name=name))
    (tmp_path / "voices" / "anna.safetensors").write_bytes(b"damaged")
    with pytest.raises(UnreadableWeights, match="damaged"):
        library.load("anna", synthesizer.fingerprint)


def test_a_saved_voice_is_deleted(anna: Voice, tmp_path: Path) -> None:
    library = VoiceLibrary(tmp_path)
    library.save(anna)
    assert library.delete(anna.name) and not library.delete(anna.name) and library.all() == []
    with pytest.raises(ConfigError, match="cannot name a voice"):
        library.delete("../anna")


def test_voices_are_mixed_by_weight(synthesizer: Synthesizer, anna: Voice) -> None:
    other = replace(anna, name="other", latents=anna.latents.flip(1), speaker=anna.speaker.flip(0))
    half = mixed("half", [(anna, 2.0), (other, 2.0)], synthesizer.fingerprint)
    assert torch.allclose(half.latents, (anna.latents + other.latents) / 2, atol=1e-6)
    assert half.speaker.norm().item() == pytest.approx(1.0) and half.description == "50% anna + 50% other"
    alone = mixed("alone", [(anna, 3.0)], synthesizer.fingerprint)
    assert torch.allclose(alone.latents, anna.latents) and torch.allclose(alone.speaker, anna.speaker, atol=1e-6)
    assert synthesizer.speak(TEXTS[0], half, "en", seed=1).wave.any()


ENTRY = b'"latents": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}'
OVERLAPPING = ENTRY.replace(b"latents", b"speaker").replace(b"[0, 16]", b"[8, 24]")


@pytest.mark.parametrize(("header", "length"), [(ENTRY + b", " + OVERLAPPING, 0), (ENTRY, 2**62), (ENTRY, 2000)])
def test_a_hostile_file_is_no_voice(tmp_path: Path, header: bytes, length: int) -> None:
    """Overlapping tensors, a huge header, and one that is cut off."""
    content = struct.pack("<Q", length or len(header) + 2) + b"{" + header + b"}" + bytes(32)
    (tmp_path / "voices").mkdir()
    (tmp_path / "voices" / "x.safetensors").write_bytes(content)
    with pytest.raises(UnreadableWeights, match="damaged or no safetensors file"):
        VoiceLibrary(tmp_path).load("x", "")


@pytest.mark.parametrize("latents", [torch.zeros(4), torch.zeros(1, 32, 64).long(), torch.zeros(1, 32, 64) / 0])
def test_other_tensors_are_no_voice(tmp_path: Path, latents: torch.Tensor) -> None:
    library, speaker = VoiceLibrary(tmp_path), torch.ones(16)
    library.save(Voice("x", latents, speaker))
    write_pth(tmp_path / "speakers_xtts.pth", {"y": {"gpt_cond_latent": latents, "speaker_embedding": speaker}})
    for name in "xy":
        with pytest.raises(DatasetError, match="not finite"):
            library.load(name, "")


def test_a_voice_of_other_weights_is_refused(synthesizer: Synthesizer, anna: Voice, tmp_path: Path) -> None:
    trained = make_model()
    trained.gpt.conditioning_perceiver.latents.data.add_(1e-4)
    other = speaking(trained)
    library = VoiceLibrary(tmp_path)
    library.save(anna)
    with pytest.raises(DatasetError, match="other weights"):
        library.load("anna", other.fingerprint)
    with pytest.raises(DatasetError, match="another model"):
        other.speak(TEXTS[0], anna, "en")
    with pytest.raises(DatasetError, match="another model"):
        synthesizer.speak(TEXTS[0], replace(anna, latents=torch.zeros(1, 32, 128)), "en")


PUBLISHED = ["Claribel Dervla", "Daisy Studious", "Gracie Wise", "Tammie Ema", "Alison Dietlinde", "Ana Florence",
             "Annmarie Nele", "Asya Anara", "Brenda Stern", "Alma María"]  # fmt: skip


def test_published_speakers_are_found_by_name(tmp_path: Path, synthesizer: Synthesizer, anna: Voice) -> None:
    speaker = {"gpt_cond_latent": torch.zeros(1, 32, 64), "speaker_embedding": torch.ones(1, 16, 1) / 4}
    write_pth(tmp_path / "speakers_xtts.pth", dict.fromkeys(PUBLISHED, speaker))
    library = VoiceLibrary(tmp_path)
    maria = library.load("Alma María", synthesizer.fingerprint)
    assert torch.equal(maria.latents, torch.zeros(1, 32, 64)) and maria.speaker.tolist() == [0.25] * 16
    assert synthesizer.speak(TEXTS[0], maria, "en", seed=4).report.voice == "Alma María"
    with pytest.raises(ConfigError, match=r"the nearest: Claribel Dervla.*myxtts voices shows all 10"):
        library.load("claribel", "")
    library.save(replace(anna, name="Ana Florence"))
    assert [voice.name for voice in library.all()] == PUBLISHED
    assert library.default("en") == "Claribel Dervla"
    assert torch.equal(library.load("Ana Florence", synthesizer.fingerprint).latents, anna.latents)
