"""XTTS-v2 folders: every published form is read, what is written is read back bit for bit, damage is named."""

from __future__ import annotations

import json
import resource
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_fixtures import entries_of, published_entries
from torch import Tensor

from myxtts.checkpoints import UnreadableWeights, read_tensors, require_match, write_pth, write_tensors
from myxtts.errors import DatasetError
from myxtts.model.xtts import SIZES, XTTS, XTTSDims, canonical_names, dims_of
from myxtts.run_dir import inherited
from myxtts.synthesis.synthesizer import sampling_for
from myxtts.text.tokenizer import Tokenizer, extend, train
from myxtts.weights import Provenance, fits_coqui, load_folder, read_folder, save_compact, save_folder

ENGLISH = ["the quick brown fox", "the lazy dog", "nothing but the truth"] * 2


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return train(ENGLISH, ["en"] * len(ENGLISH), 300)


@pytest.fixture(scope="module")
def model(vocabulary: Tokenizer) -> XTTS:
    """A network of XTTS-v2's form with few weights."""
    tiny = SIZES["tiny"]
    small = replace(tiny, gpt=replace(tiny.gpt, layers=2, dim=128, heads=2), speaker_filters=(8, 8, 8, 8))
    torch.manual_seed(0)
    return XTTS(small.with_vocabulary(vocabulary.num_tokens, vocabulary.start_id, vocabulary.stop_id))


def same_weights(one: XTTS, other: XTTS) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_normal_is_xtts_v2_entry_for_entry() -> None:
    with torch.device("meta"):
        model = XTTS(SIZES["normal"])
    published = {"mel_stats": ("(80,)", "float32", "buffer")}
    lists = {"gpt": "gpt", "hifigan": "hifigan_decoder", "speaker_encoder": "hifigan_decoder", "dvae": "dvae"}
    counts = []
    for name, part in lists.items():
        listed = {f"{part}.{entry}": facts for entry, facts in published_entries(name).items()}
        counts.append((len(listed), sum(p.numel() for entry, p in model.named_parameters() if entry in listed)))
        published |= listed
    assert entries_of(model) == published
    assert counts == [(426, 441_018_563), (241, 17_827_808), (295, 8_028_492), (56, 51_567_184)]


def test_round_trip_is_bit_identical(model: XTTS, vocabulary: Tokenizer, tmp_path: Path) -> None:
    save_folder(tmp_path / "one", model, vocabulary)
    first = load_folder(tmp_path / "one")
    assert same_weights(first.model, model) and not first.fresh_parts
    assert first.vocabulary.fingerprint == vocabulary.fingerprint
    save_folder(tmp_path / "two", first.model, first.vocabulary)
    assert same_weights(load_folder(tmp_path / "two").model, model)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_read_off_the_weights(size: str) -> None:
    with torch.device("meta"):
        state = XTTS(SIZES[size]).state_dict()
    assert dims_of(state) == SIZES[size] == XTTSDims.from_dict(SIZES[size].to_dict())


def test_every_published_form_has_the_same_names(model: XTTS) -> None:
    state = model.state_dict()
    without_dvae = {name: value for name, value in state.items() if not name.startswith("dvae.")}
    published = {f"model.{name}": value for name, value in without_dvae.items()}
    trainer = {f"xtts.{name}": value for name, value in without_dvae.items()}
    trainer |= {name: value for name, value in state.items() if name.startswith("dvae.")}
    trainer["torch_mel_spectrogram_dvae.mel_stft.window"] = torch.ones(4)
    old = published | {
        "model.gpt.gpt_inference.lm_head.0.weight": torch.ones(4),
        "model.gpt.gpt.wte.weight": torch.ones(4),
    }
    for suffix, index in (("weight_g", 0), ("weight_v", 1)):
        for name in [name for name in old if name.endswith(f"parametrizations.weight.original{index}")]:
            old[name.replace(f"parametrizations.weight.original{index}", suffix)] = old.pop(name)
    assert canonical_names(published).keys() == canonical_names(old).keys() == without_dvae.keys()
    assert canonical_names(trainer).keys() == state.keys()


def test_a_grown_vocabulary_keeps_every_old_row(model: XTTS, vocabulary: Tokenizer, tmp_path: Path) -> None:
    save_folder(tmp_path, model, vocabulary)
    larger = extend(vocabulary, ["سلام دنیا", "می‌روم"] * 3, "fas", 20)
    grown = load_folder(tmp_path, larger).model
    assert grown.dims.gpt.text_tokens == larger.num_tokens > vocabulary.num_tokens
    for name in ("text_embedding.weight", "text_head.weight", "text_head.bias"):
        old, new = model.gpt.state_dict()[name], grown.gpt.state_dict()[name]
        assert torch.equal(new[: len(old)], old) and new.isfinite().all()


def test_a_folder_without_a_dvae_gets_a_fresh_one(model: XTTS, vocabulary: Tokenizer, tmp_path: Path) -> None:
    save_folder(tmp_path, model, vocabulary)
    (tmp_path / "dvae.pth").unlink()
    loaded = load_folder(tmp_path)
    assert loaded.fresh_parts == ["dvae"]
    assert not any(tensor.is_meta for tensor in loaded.model.state_dict().values())


def test_what_does_not_fit_is_named(model: XTTS, vocabulary: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(
        UnreadableWeights, match=r"b is missing\n  c is not expected\n  a has shape \[3\], expected \[2\]"
    ):
        require_match(
            {"a": torch.ones(3), "c": torch.ones(1)}, {"a": torch.Size([2]), "b": torch.Size([1])}, "x.pth"
        )
    save_folder(tmp_path, model, vocabulary)
    dvae = read_tensors(tmp_path / "dvae.pth")
    write_pth(tmp_path / "dvae.pth", {**dvae, "decoder.0.weight": torch.ones(3)})
    with pytest.raises(UnreadableWeights, match=r"does not fit.*\n  dvae.decoder.0.weight has shape \[3\]"):
        load_folder(tmp_path)
    write_pth(tmp_path / "dvae.pth", dvae)
    with pytest.raises(UnreadableWeights, match="To add a language"):
        load_folder(tmp_path, train(["a b"], ["en"], 300))


@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.99])
def test_truncated_files_are_refused_by_name(tmp_path: Path, keep: float) -> None:
    for path, write in ((tmp_path / "model.pth", write_pth), (tmp_path / "model.safetensors", write_tensors)):
        write(path, {"weight": torch.randn(1000)})
        content = path.read_bytes()
        path.write_bytes(content[: int(keep if keep > 1 else keep * len(content))])
        with pytest.raises(UnreadableWeights, match=path.name):
            read_tensors(path)


class Payload:
    """What a malicious checkpoint would carry."""

    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("executed",))


def test_code_in_a_checkpoint_is_never_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": torch.ones(2), "config": Payload()}, tmp_path / "model.pth")
    with pytest.raises(UnreadableWeights, match=r"print|not loaded"):
        read_tensors(tmp_path / "model.pth")
    assert "executed" not in capsys.readouterr().out


def test_settings_objects_of_coqui_are_read_as_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TTS.tts.configs.xtts_config"
    settings = type("XttsConfig", (), {"__module__": name, "lr": 5e-6})
    with monkeypatch.context() as patch:
        for package in ("TTS", "TTS.tts", "TTS.tts.configs", name):
            patch.setitem(sys.modules, package, types.ModuleType(package))
        sys.modules[name].XttsConfig = settings  # type: ignore[attr-defined]
        torch.save({"model": {"weight": torch.ones(2)}, "config": settings()}, tmp_path / "model.pth")
    assert list(read_tensors(tmp_path / "model.pth")) == ["model.weight"]


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(UnreadableWeights, match="there is: nothing"):
        read_folder(tmp_path)
    write_pth(tmp_path / "model.pth", {"other": torch.ones(2)})
    with pytest.raises(UnreadableWeights, match="holds no XTTS"):
        read_folder(tmp_path)
    with pytest.raises(DatasetError, match="no folder"):
        read_folder(tmp_path / "absent")


def test_export_from_the_command_line(
    model: XTTS, vocabulary: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from myxtts.cli import main

    def export(source: str, out: str, *flags: str) -> tuple[int, str]:
        code = main(["export", str(tmp_path / source), "--out", str(tmp_path / out), *flags])
        return code, "".join(capsys.readouterr())

    save_folder(tmp_path / "in", model, vocabulary)
    extend(vocabulary, ["سلام دنیا"] * 3, "fas", 20).save(tmp_path / "larger.json")
    flags = ("--to", "coqui", "--tokenizer", str(tmp_path / "larger.json"))
    code, shown = export("in", "out", *flags)
    assert code == 0 and "text tokens" in shown and "in place of" not in shown
    assert shown.count("WARNING") == 1 and "coqui-tts cannot load this folder" in shown
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "model.pth", "dvae.pth", "mel_stats.pth", "vocab.json", "config.json", "myxtts.json"
    }  # fmt: skip
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "vocab.json").write_text("mine")
    for source, out, expected, why in (
        ("in", "out", 0, "in place of the weights that were there"),
        ("in", "in", 2, ""),
        ("absent", "out", 2, "no such folder"),
        ("in", "own", 2, "holds other files (vocab.json)"),
        ("in", "own/vocab.json", 2, "is a file"),
    ):
        code, shown = export(source, out)
        assert code == expected and why in shown
    assert [path.read_text() for path in (tmp_path / "own").iterdir()] == ["mine"]


def test_coqui_loads_the_sizes_with_the_vocoder_and_speaker_encoder_of_xtts_v2() -> None:
    assert [size for size, dims in SIZES.items() if fits_coqui(dims)] == ["normal", "big"]


@pytest.mark.parametrize("save", [save_folder, save_compact])
def test_a_decoder_of_mels_is_known_by_its_weights(
    save: Callable[..., object], model: XTTS, vocabulary: Tokenizer, tmp_path: Path
) -> None:
    model = XTTS(replace(model.dims, decoder_input="mel"))
    save(tmp_path, model, vocabulary)
    loaded = load_folder(tmp_path).model
    assert loaded.dims == model.dims and loaded.dims.decoder_dim == 320 + model.dims.gpt.dim
    found, expected = (some.hifigan_decoder.waveform_decoder.flow.first.weight for some in (loaded, model))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert XTTSDims.from_dict(json.loads(json.dumps(model.dims.to_dict()))) == model.dims
    older = {name: value for name, value in model.dims.to_dict().items() if name != "decoder_input"}
    assert XTTSDims.from_dict(older).decoder_input == "latents"


def test_what_an_export_says_of_itself_is_honoured_and_carried_on(
    model: XTTS, vocabulary: Tokenizer, tmp_path: Path
) -> None:
    known = Provenance(
        ("decoder",),
        True,
        max_text_length=40,
        max_mel_frames=128,
        languages=("en",),
        text_dropout=0.2,
        guidance=1.5,
    )
    save_folder(tmp_path, model, vocabulary, known)
    loaded = load_folder(tmp_path)
    assert loaded.provenance == known
    assert loaded.fresh_parts == ["hifigan_decoder.waveform_decoder"]
    learnt = {"training.text_dropout": 0.2, "training.code_noise": 0.0}
    expected = {"from_scratch": True, "untrained": ["decoder"], "languages": ["en"], "trained_with": learnt}
    assert inherited(tmp_path) == expected | {"guidance": 1.5}
    assert sampling_for(known, model).guidance == 1.5
    (tmp_path / "myxtts.json").write_text("[1]")
    with pytest.raises(UnreadableWeights, match=r"myxtts\.json is not what an export wrote"):
        load_folder(tmp_path)
    (tmp_path / "myxtts.json").unlink()
    assert load_folder(tmp_path).provenance == Provenance(), "a published folder"


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may become larger than this: to a program the same as a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_disk")
@pytest.mark.parametrize(("write", "name"), [(write_tensors, "w.safetensors"), (write_pth, "w.pth")])
def test_a_disk_without_room_is_told_in_words(
    write: Callable[[Path, dict[str, Tensor]], None], name: str, tmp_path: Path
) -> None:
    with pytest.raises(DatasetError) as told:
        write(tmp_path / name, {"w": torch.zeros(100_000)})
    text = str(told.value)
    assert text.startswith(f"No room for {tmp_path / name}: File too large (")
    assert "--checkpoint-dir" in text and "serializing" not in text
    assert not list(tmp_path.iterdir())
