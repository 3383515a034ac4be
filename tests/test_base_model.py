"""The base model: its compact form, its built-in voices, and speaking without a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from synthesis_fixtures import CPU, TEXTS, make_model, vocabulary

from myxtts import config
from myxtts.checkpoints import UnreadableWeights, read_tensors, write_tensors
from myxtts.cli import main
from myxtts.errors import ConfigError
from myxtts.model.xtts import SIZES, XTTS
from myxtts.synthesis.synthesizer import load_synthesizer
from myxtts.synthesis.voices import Voice, VoiceLibrary
from myxtts.text.tokenizer import extend
from myxtts.weights import (
    COMPACT_BYTES,
    SHARD_BYTES,
    Provenance,
    compacted,
    load_folder,
    quantised,
    read_folder,
    save_compact,
    save_folder,
)

pytest_plugins = ["synthesis_fixtures"]
Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]
KNOWN = Provenance(untrained=("decoder",), from_scratch=True, languages=("en", "fa"), code_noise=0.3)


def rounding(stored: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error of a tensor as a share of the maximum of its row."""
    rows = exact.flatten(1)
    errors = (stored.flatten(1) - rows).abs().amax(1) / rows.abs().amax(1).clamp(min=1e-30)
    return float(errors.max())


def test_rounded_rows_are_off_by_less_than_half_a_step() -> None:
    torch.manual_seed(0)
    exact = torch.randn(40, 8, 5) * torch.logspace(-30, 30, 40)[:, None, None]
    exact[3] = 0
    rows, scales = quantised(exact)
    assert rows.dtype == torch.int8 and rows.shape == exact.shape and scales.shape == (40,)
    restored = rows.float() * scales[:, None, None]
    assert rounding(restored, exact) <= 1.001 / 254 and not restored[3].any()


def test_the_size_base_fits_the_repository(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = XTTS(SIZES["base"].with_vocabulary(2048, 0, 1))
    for weight in model.requires_grad_(False).parameters():
        if weight.dim() > 1:  # trained weights are not uniform, which matters for compression
            weight.normal_(std=0.02)
    model.dvae.codebook.cluster_size.fill_(1.0)
    written = save_compact(tmp_path, model, vocabulary(), KNOWN)
    files = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sum(files.values()) <= COMPACT_BYTES and max(files.values()) <= SHARD_BYTES
    assert written == {name: size for name, size in files.items() if name != "myxtts.json"}
    assert sum(files.values()) > 0.95 * COMPACT_BYTES, "no more is rounded than has to be"
    state, exact = read_folder(tmp_path), model.state_dict()
    assert state.keys() == exact.keys()
    assert max(rounding(state[name], exact[name]) for name in exact if exact[name].dim() > 1) <= 1.001 / 254
    small = [name for name in exact if exact[name].dim() < 2 or name.startswith("dvae.codebook")]
    assert all(torch.equal(state[name], exact[name]) for name in small)
    stored = {name: value for path in tmp_path.glob("weights-*") for name, value in read_tensors(path).items()}
    kinds = {name: value.dtype for name, value in stored.items() if value.numel() > 20_000}
    assert kinds["gpt.gpt.h.0.mlp.c_fc.weight"] == torch.int8
    rounded = [name for name, kind in kinds.items() if kind == torch.int8]
    assert any("waveform_decoder.flow" in name for name in rounded), "the vocoder comes last"


def test_a_small_network_is_not_rounded_to_int8_and_a_diverged_one_not_written(tmp_path: Path) -> None:
    model = make_model()
    kept = compacted(model.state_dict(), COMPACT_BYTES)
    assert not any(value.dtype == torch.int8 for value in kept.values())
    assert compacted({"gpt.gpt.h.0": torch.full((2, 10_000), 1e6)}, 10**9)["gpt.gpt.h.0"].dtype == torch.float32
    save_compact(tmp_path, model, vocabulary())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model.gpt.text_head.weight.data[0, 0] = torch.nan
    with pytest.raises(UnreadableWeights, match=r"text_head.*training diverged"):
        save_compact(tmp_path, model, vocabulary())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_is_known_of_the_weights_and_a_larger_vocabulary_survive_the_compact_form(tmp_path: Path) -> None:
    save_compact(tmp_path, make_model(has_codebook=True), vocabulary(), KNOWN)
    larger = extend(vocabulary(), ["سلام دنیا", "می‌روم"] * 3, "fa", 20)
    loaded = load_folder(tmp_path, larger)
    assert loaded.provenance == KNOWN and loaded.fresh_parts == ["hifigan_decoder.waveform_decoder"]
    assert loaded.model.dims.gpt.text_tokens == larger.num_tokens > vocabulary().num_tokens
    assert loaded.model.dvae.codebook.is_trained
    save_folder(tmp_path, loaded.model, larger, loaded.provenance)
    assert not list(tmp_path.glob("weights-*")), "a folder has one form"
    save_compact(tmp_path, loaded.model, larger, loaded.provenance)
    assert not list(tmp_path.glob("*.pth")) and load_folder(tmp_path).provenance == KNOWN


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        ("weights-1.npz", lambda content: content[:-1], "is damaged"),
        ("weights-1.npz", lambda content: content[:-9] + b"x" + content[-8:], "is damaged"),
        ("weights-1.npz", None, "No model.pth"),
        ("vocab.json", lambda content: content + b" ", "is damaged"),
        ("vocab.json", None, "vocab.json is missing"),
        ("myxtts.json", None, "myxtts.json is not what an export wrote"),
        ("myxtts.json", lambda _: b"[1]", "not what an export wrote"),
        ("myxtts.json", lambda _: b'{"files": {"vocab.json": 3}}', "not what an export wrote"),
    ],
)
def test_damaged_compact_folders_are_refused(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes] | None, problem: str
) -> None:
    save_compact(tmp_path, make_model(), vocabulary())
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    if damage is not None:
        (tmp_path / name).write_bytes(damage(content))
    with pytest.raises(UnreadableWeights, match=problem):
        read_folder(tmp_path)


@pytest.fixture
def base(tmp_path: Path, anna: Voice, monkeypatch: Patch) -> Path:
    """A base model with two built-in voices, in a copy of MyXTTS of its own; the working folder has no run."""
    folder = tmp_path / "base"
    zahra = {"name": "zahra", "languages": ("fa",), "description": "bright"}
    bert = {"name": "bert", "languages": ("en", "fa"), "description": "calm, low"}
    VoiceLibrary(folder).build_in([Voice(latents=anna.latents, speaker=anna.speaker, **about)
                                   for about in (zahra, bert)])  # fmt: skip
    save_compact(folder, make_model(), vocabulary(), Provenance(languages=("en", "fa")))
    monkeypatch.setattr(config, "BASE_FOLDER", folder)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return folder


def myxtts(capsys: Capture, *words: object) -> tuple[int, list[str]]:
    code = main([str(word) for word in words])
    return code, "".join(capsys.readouterr()).splitlines()


@pytest.mark.usefixtures("base")
def test_the_base_model_says_what_a_recording_alone_cannot_give(reference: Path, capsys: Capture) -> None:
    code, shown = myxtts(capsys, "speak", TEXTS[0], "--speaker", reference)
    assert code == 0 and "resembles hardly any real person" in shown[1]  # this one has no flow to adapt


@pytest.mark.usefixtures("base")
def test_a_recording_does_not_replace_a_built_in_voice(reference: Path, capsys: Capture) -> None:
    code, shown = myxtts(capsys, "speak", TEXTS[0], "--speaker", reference, "--voice", "bert")
    assert code == 2 and "'bert' is a built-in voice" in shown[0]
    code, shown = myxtts(capsys, "speak", TEXTS[0], "--speaker", reference, "--voice", "me")
    assert code == 0 and shown[0].startswith("Voice saved: ") and shown[0].endswith("me.safetensors")
    assert myxtts(capsys, "speak", " ") == (
        2,
        ["error: There is nothing to say: '' has no letters and no digits."],
    )


@pytest.mark.usefixtures("base")
def test_the_base_model_speaks_at_once_in_a_voice_of_the_language(capsys: Capture) -> None:
    code, shown = myxtts(capsys, "speak", TEXTS[0], "--seed", 4)
    assert code == 0 and shown[0] == "Speaking English with the base model, voice bert"
    assert abs(soundfile.read("speech.wav")[0]).max() > 0.005
    code, shown = myxtts(capsys, "speak", TEXTS[0], "--seed", 4, "--voice", "zahra")
    assert code == 0 and shown[0].endswith("voice zahra")
    code, shown = myxtts(capsys, "speak", TEXTS[0], "--voice", "zara")
    assert code == 2 and "there are: zahra, bert" in shown[0]


@pytest.mark.usefixtures("base")
def test_what_cannot_be_spoken_is_refused_before_the_model_is_loaded(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr("myxtts.synthesis.synthesizer.load_synthesizer", None)
    for words, problem in (
        ([TEXTS[0], "--speaker", "absent.wav"], "absent.wav: there is no such file"),
        ([TEXTS[0], "--voice", "zara"], "there are: zahra, bert"),
        (["<speak>Hello <brake/></speak>"], "<brake>"),
        (["!!! ..."], "There is nothing to say: '!!! ...' has no letters and no digits"),
    ):
        code, shown = myxtts(capsys, "speak", *words)
        assert code and problem in "".join(shown)


@pytest.mark.usefixtures("base")
def test_a_language_that_cannot_be_recognised_is_that_of_the_voice(capsys: Capture) -> None:
    code, shown = myxtts(capsys, "speak", "1234", "--seed", 4)
    assert code == 0 and shown[0] == "Speaking English with the base model, voice bert"
    code, shown = myxtts(capsys, "speak", "1234", "--voice", "zahra")
    assert code == 2 and "in language 'fa'" in shown[-2] + shown[-1]


def test_a_folder_of_runs_is_no_model(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "runs" / "e1"
    run.mkdir(parents=True)
    (run / "model.json").write_text("{}")
    code, shown = myxtts(capsys, "speak", TEXTS[0], "--model", tmp_path / "runs")
    assert code == 2 and shown == [f"error: {tmp_path}/runs is a folder of runs; name one of them: --model {run}"]


def test_voices_are_listed_and_added_where_an_update_keeps_them(
    base: Path, reference: Path, tmp_path: Path, capsys: Capture
) -> None:
    code, shown = myxtts(capsys, "voices")
    assert code == 0 and shown == [
        "Voices of the base model, for --voice NAME:",
        "  zahra  fa        bright",
        "  bert   en fa     calm, low",
    ]
    code, shown = myxtts(capsys, "voices", "--add", "ann", reference, "--language", "en", "--description", "mine")
    assert code == 0 and shown[-1] == str(tmp_path / "user" / "myxtts" / "voices" / "ann.safetensors")
    assert not (base / "voices").exists()
    assert myxtts(capsys, "voices")[1][-1] == "  ann    en        mine"
    assert myxtts(capsys, "speak", TEXTS[0], "--voice", "ann")[1][0].endswith("voice ann")
    for wrong in (["--add", "ann"], [reference], ["--add", "../x", reference], ["--model", "nowhere"]):
        assert myxtts(capsys, "voices", *wrong)[0] == 2


@pytest.mark.usefixtures("base")
def test_a_run_in_the_usual_folder_speaks_before_the_base_model(
    reference: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    Path("checkpoints").mkdir()
    assert myxtts(capsys, "speak", TEXTS[0])[0] == 0
    content = json.dumps({"dims": SIZES["base"].to_dict()})  # a run that has trained nothing
    Path("checkpoints/model.json").write_text(content)
    code, shown = myxtts(capsys, "speak", TEXTS[0], "--speaker", reference)
    assert code == 1 and "The model has no gpt" in shown[0]
    assert myxtts(capsys, "speak", TEXTS[0], "--model", "base")[0] == 0
    Path("checkpoints/model.json").unlink()
    assert load_synthesizer(device=CPU).languages == ("en", "fa")
    monkeypatch.setattr(config, "BASE_FOLDER", Path("absent"))
    with pytest.raises(ConfigError, match="no base model"):
        load_synthesizer()


def test_damaged_voices_are_refused(base: Path, capsys: Capture) -> None:
    content = (base / "voices.safetensors").read_bytes()
    (base / "voices.safetensors").write_bytes(content[:-2] + b"xx")
    code, shown = myxtts(capsys, "speak", TEXTS[0])
    assert code == 1 and "voices.safetensors" in shown[0] and "is damaged" in shown[0]
    tensors = {"x.gpt_cond_latent": torch.zeros(1, 32, 64), "x.speaker_embedding": torch.zeros(16)}
    for about in ("[1]", '{"x": {"languages": 3, "description": ""}}', '{"x": {}}'):
        stored = torch.tensor(list(about.encode()), dtype=torch.uint8)
        write_tensors(base / "voices.safetensors", tensors | {"about": stored})
        (base / "myxtts.json").write_text(json.dumps(listed(base)))
        code, shown = myxtts(capsys, "voices")
        assert code == 1 and "describes its voices in an unknown form" in shown[0]


def listed(folder: Path) -> dict[str, Any]:
    """`myxtts.json` with the checksums of the files that are there."""
    from myxtts.checkpoints import file_hash

    content = json.loads((folder / "myxtts.json").read_text())
    for name in content["files"]:
        content["files"][name] = {"bytes": (folder / name).stat().st_size, "xxh3": file_hash(folder / name)}
    return dict(content)


def test_an_export_takes_the_voices_of_its_source_along(
    base: Path, reference: Path, tmp_path: Path, capsys: Capture, anna: Voice
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_folder(source, make_model(), vocabulary(), KNOWN)
    assert myxtts(capsys, "voices", "--model", source, "--add", "ann", reference, "--language", "en")[0] == 0
    VoiceLibrary(source).save(Voice("old", anna.latents, anna.speaker, "of other weights"))
    code, shown = myxtts(capsys, "export", source, "--out", out, "--to", "compact")
    assert code == 0 and "MB" in "".join(shown) and "coqui-tts cannot" not in "".join(shown)
    assert any("voice old is left out: other weights made it" in line for line in shown)
    (ann,) = VoiceLibrary(out).built_in().values()
    torch.testing.assert_close(ann.latents, anna.latents, atol=2e-3, rtol=1e-3)
    assert (ann.name, ann.languages) == ("ann", ("en",))
    assert {path.name for path in out.iterdir()} == {
        "weights-1.npz", "vocab.json", "myxtts.json", "voices.safetensors"
    }  # fmt: skip
    assert myxtts(capsys, "export", base, "--out", out, "--to", "compact")[0] == 0
    assert list(VoiceLibrary(out).built_in()) == ["zahra", "bert"]
    assert myxtts(capsys, "speak", TEXTS[0], "--model", out)[1][0].endswith(f"the model in {out}, voice bert")


@pytest.mark.parametrize("uses", [0.0, 2.0])
def test_a_codebook_with_and_without_counts_stays_trained_in_the_compact_form(tmp_path: Path, uses: float) -> None:
    model = make_model(has_codebook=True)
    codebook = model.dvae.codebook
    codebook.cluster_size.fill_(uses)
    codebook.embed_avg.copy_(codebook.embed * (uses or 3))
    save_compact(tmp_path, model, vocabulary())
    loaded = load_folder(tmp_path).model.dvae.codebook
    assert loaded.is_trained
    for name in ("embed", "embed_avg", "cluster_size"):
        torch.testing.assert_close(getattr(loaded, name), getattr(codebook, name))


def test_the_shipped_model_says_short_texts_and_nothing_else() -> None:
    """It has heard no clips of less than three seconds: by itself it goes on after these."""
    shipped = Path(config.__file__).with_name("base")
    synthesizer, voices = load_synthesizer(shipped), VoiceLibrary(shipped)
    voice = voices.load(voices.default("en"), synthesizer.fingerprint)
    for text in ("Yes.", "Good morning.", "Stop!"):
        report = synthesizer.speak(text, voice, "en", seed=1).report
        assert report.sentences[0].problem is None and report.sentences[0].num_attempts == 1
        assert 0.3 < report.seconds < 1.3
