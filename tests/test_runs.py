"""What a run remembers of its start, and what another start may and may not change; speaking from what it left."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import soundfile
import torch
from conftest import make_voice
from training_fixtures import Clips, clips, newest, small, train

from myxtts.checkpoints import UnreadableWeights
from myxtts.cli import main
from myxtts.config import SAMPLE_RATE
from myxtts.observe.findings import Finding
from myxtts.run_dir import RunDir
from myxtts.settings import load
from myxtts.synthesis.synthesizer import OWN_SAMPLING, load_synthesizer
from myxtts.text.tokenizer import Tokenizer, extend
from myxtts.tools.check import check
from myxtts.training.recipes import DvaeRecipe
from myxtts.weights import load_folder, save_folder

__all__ = ["clips", "small"]
pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture
def base(clips: Clips, tmp_path: Path) -> Path:
    """A folder in XTTS-v2's form, exported from a run."""
    assert train(tmp_path / "first", clips(), "--stages gpt --max-steps 1") == 0
    run = RunDir(tmp_path / "first")
    save_folder(tmp_path / "base", run.load_model(), run.vocabulary())
    return tmp_path / "base"


def test_a_continued_run_remembers_where_it_came_from(
    base: Path, clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "tuned"
    assert train(run, clips(), f"--init-from {base} --max-steps 1") == 0
    assert train(run, clips(), "--max-steps 2") == 0, "without --init-from: still only the GPT is trained"
    assert newest(run).step == 2
    assert not RunDir(run).has_checkpoint("dvae")
    capsys.readouterr()
    assert train(run, clips(), f"--init-from {tmp_path / 'first'} --max-steps 3") == 2
    assert "training.init_from: the run has" in capsys.readouterr().err


def test_adapters_are_not_put_on_the_weights_of_an_earlier_start(base: Path, clips: Clips, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, clips(), f"--init-from {base} --lora-rank 2 --stages gpt --max-steps 1 --lr 1e-9") == 0
    for path in (run / "gpt").glob("step-*"):  # as if it had died before anything was saved
        path.rename(run / path.name.replace("step", "lost"))
    assert train(run, clips(), f"--init-from {tmp_path / 'first'} --lora-rank 2 --stages gpt --max-steps 1") == 0
    assert RunDir(run).started_with()["training.init_from"] == str(tmp_path / "first")


def test_new_tokens_are_trained_beside_adapters(base: Path, clips: Clips, tmp_path: Path) -> None:
    larger = extend(Tokenizer.load(base), ["zwölf boxkämpfer jagen viktor quer"] * 3, "de", 5)
    larger.save(tmp_path / "larger.json")
    flags = f"--init-from {base} --tokenizer {tmp_path / 'larger.json'} --lora-rank 2 --max-steps 1"
    assert train(tmp_path / "run", clips(), flags) == 0
    kept = newest(tmp_path / "run").weights
    assert "gpt.text_embedding.weight" in kept and "gpt.text_head.weight" in kept
    assert len(kept["gpt.text_embedding.weight"]) == larger.num_tokens
    RunDir(tmp_path / "run").load_model()


def test_a_stage_that_another_is_built_upon_is_not_prolonged_by_the_way(clips: Clips, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, clips(), "--max-steps 1 --decoder-steps 1") == 0
    assert train(run, clips(), "--max-steps 3 --decoder-steps 2") == 0
    assert [newest(run, stage).step for stage in ("dvae", "gpt", "decoder")] == [1, 1, 2]
    assert train(run, clips(), "--max-steps 3 --decoder-steps 2 --stages gpt") == 0, "asked for by name it is"
    assert newest(run, "gpt").step == 3


def test_weights_that_were_never_trained_are_not_made_up(clips: Clips, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, clips(), "--max-steps 1 --stages dvae,gpt") == 0
    for path in (run / "gpt").glob("step-*"):
        path.rename(run / path.name.replace("step", "lost"))
    with pytest.raises(UnreadableWeights, match="has not trained gpt yet"):
        RunDir(run).load_model()


def test_a_reset_that_cannot_start_leaves_the_old_run_alone(clips: Clips, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, clips(), "--stages gpt --max-steps 1") == 0
    assert train(run, clips(), f"--stages gpt --max-steps 1 --reset-training --init-from {tmp_path / 'none'}") != 0
    assert newest(run).step == 1
    for number in (1, 2, 3):
        (run / "evaluation").mkdir()
        (run / "sample.wav").touch()
        assert train(run, clips(), "--stages gpt --max-steps 1 --reset-training") == 0
        assert (run / f"before-reset-{number}").is_dir()
        assert not (run / "evaluation").exists() and not (run / "sample.wav").exists(), "these are not of this run"
        if number == 2:
            (run / "before-reset-1").rename(tmp_path / "elsewhere")
    assert "reset_training: false" in (run / "settings.yaml").read_text()


def test_a_run_started_from_an_unfinished_one_speaks_as_that_does(clips: Clips, tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    assert train(first, clips(), "--stages dvae,gpt --max-steps 1") == 0
    for run, source in ((second, first), (third, second)):
        assert train(run, clips(), f"--init-from {source} --max-steps 1") == 0
        synthesizer = load_synthesizer(run, device=torch.device("cpu"))
        assert synthesizer.sampling == OWN_SAMPLING
        assert synthesizer.vocoder.name == "griffin-lim", "nobody ever trained the decoder"
    with pytest.raises(UnreadableWeights, match="decoder of this model is not trained"):
        load_synthesizer(third, vocoder="hifigan", device=torch.device("cpu"))


def test_a_run_speaks_and_is_exported(clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, reference = tmp_path / "run", tmp_path / "reference.wav"
    soundfile.write(reference, make_voice(6.5, seed=1), SAMPLE_RATE)
    assert train(run, clips(), "--stages dvae,gpt --max-steps 1") == 0
    arguments = ["speak", "Hello.", "--model", str(run), "--speaker", str(reference), "--language", "en"]
    capsys.readouterr()
    assert main([*arguments, "--seed", "1", "--out", str(tmp_path / "one.wav"), "--voice", "anna"]) == 0
    assert "griffin" in capsys.readouterr().out.lower(), "no decoder was trained, and that is said"
    wave, rate = soundfile.read(tmp_path / "one.wav")
    assert rate == 24000 and len(wave) > 0
    kept = ["speak", "Hello.", "--model", str(run), "--voice", "anna", "--language", "en", "--seed", "1"]
    assert main([*kept, "--out", str(tmp_path / "two.wav")]) == 0
    assert (tmp_path / "one.wav").read_bytes() == (tmp_path / "two.wav").read_bytes()
    assert main(["speak", "Hello.", "--model", str(run), "--language", "en"]) == 2
    capsys.readouterr()
    out = tmp_path / "out"
    assert main(["export", str(run), "--out", str(out)]) == 0
    assert "WARNING: decoder: never trained, these weights are random" in capsys.readouterr().out
    exported, own = (load_synthesizer(folder, device=torch.device("cpu")) for folder in (out, run))
    assert exported.vocoder.name == "griffin-lim", "a random decoder would only hum"
    assert exported.sampling == own.sampling == OWN_SAMPLING
    assert exported.limits == own.limits
    assert train(tmp_path / "tuned", clips(), f"--init-from {out} --max-steps 1") == 0
    assert RunDir(tmp_path / "tuned").untrained() == ["decoder"]
    assert main(["export", str(run), "--out", str(tmp_path / "tuned")]) == 2, "a run is not written over"


def test_weights_that_are_not_there_are_named_before_anything_else(
    base: Path, clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (base / "vocab.json").unlink()
    found = {
        tmp_path / "XTTS-v2": "there is no such folder",
        tmp_path / "empty": "holds neither XTTS weights (model.pth or best_model.pth) nor a run",
        base: "has weights, but no vocab.json",
        base / "model.pth": "that is a file",
    }
    for folder, why in found.items():
        capsys.readouterr()
        assert train(tmp_path / "first", clips(), f"--init-from {folder} --model-size small") == 2
        shown = capsys.readouterr().err
        assert f"--init-from {folder}: " in shown and why in shown and "Errno" not in shown


def test_a_run_goes_on_without_the_weights_it_was_started_from(base: Path, clips: Clips, tmp_path: Path) -> None:
    assert train(tmp_path / "tuned", clips(), f"--init-from {base} --max-steps 1") == 0
    base.rename(tmp_path / "elsewhere")
    assert train(tmp_path / "tuned", clips(), f"--init-from {base} --max-steps 2") == 0
    assert newest(tmp_path / "tuned").step == 2


def test_a_check_says_what_training_would_refuse(clips: Clips, tmp_path: Path) -> None:
    def finding(**given: object) -> Finding:
        named = {"data.train_data": str(clips()), "training.checkpoint_dir": str(tmp_path / "run")}
        flags = named | {name.replace("__", "."): value for name, value in given.items()}
        return next(found for found in check(load(None, flags)) if found.code == "run")

    small = {"data__batch_size": "2", "data__max_mel_frames": "128", "data__max_text_length": "40"}
    assert finding().level == "pass"
    assert train(tmp_path / "run", clips(), "--stages dvae --max-steps 1") == 0
    same = finding(**small)
    assert (same.level, same.what) == ("pass", f"Continues the run in {tmp_path / 'run'}")
    other = finding(**small | {"data__batch_size": "3", "training__seed": "7"})
    assert other.level == "fail" and "--reset-training" in other.fix
    assert "training.seed: the run has 1234, now 7" in other.why
    assert "clips of a step (--batch-size × --grad-accum × processes): the run has 2, now 3" in other.why
    assert (
        finding(**small | {"data__batch_size": "1", "training__gradient_accumulation_steps": "2"}).level == "pass"
    )
    assert finding(training__init_from="elsewhere").level == "fail"
    assert finding(training__reset_training=True).level == "pass"
    elsewhere = finding(**small | {"data__train_data": str(clips(3))})
    assert elsewhere.level == "warn" and str(clips()) in elsewhere.what and "--checkpoint-dir" in elsewhere.fix


def test_texts_that_the_vocabulary_of_the_run_cannot_write_are_explained(
    clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", clips(4), "--stages dvae --max-steps 1") == 0
    persian = tmp_path / "persian"
    shutil.copytree(clips(4), persian)
    names = [line.split("|")[0] for line in (persian / "metadata.csv").read_text().splitlines()]
    lines = "".join(f"{name}|سلام.\n" for name in names)
    (persian / "metadata.csv").write_text(lines, encoding="utf-8")
    assert train(tmp_path / "run", persian, "--stages dvae --max-steps 2 --language fa") != 0
    shown = capsys.readouterr().err
    assert f"the vocabulary of the run in {tmp_path / 'run'}" in shown and "another --checkpoint-dir" in shown


def test_the_best_gpt_can_be_had_instead_of_the_newest(
    clips: Clips, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    flags = f"--max-steps 3 --decoder-steps 1 --dvae-steps 1 --save-step 1 --keep 9 --val-data {clips(3)}"
    assert train(run, clips(4), flags) == 0
    (run / "gpt" / "best").write_text("step-00000001")
    kept = RunDir(run).checkpoints("gpt")
    for best, step in ((True, 1), (False, 3)):
        model = RunDir(run).load_model(best_gpt=best)
        assert torch.equal(model.gpt.mel_head.weight, kept.load(step).weights["gpt.mel_head.weight"])
    assert main(["export", str(run), "--out", str(tmp_path / "best"), "--best"]) == 0
    exported = load_folder(tmp_path / "best").model.gpt.mel_head.weight
    assert torch.equal(exported, kept.load(1).weights["gpt.mel_head.weight"])
    (run / "gpt" / "best").unlink()
    assert main(["export", str(run), "--out", str(tmp_path / "none"), "--best"]) == 1
    assert "Leave out --best to use the newest" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "best"), "--out", str(tmp_path / "none"), "--best"]) == 2


def test_a_run_that_has_not_reached_a_stage_goes_on_without_it(clips: Clips, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = "--dvae-steps 4 --save-step 1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DvaeRecipe, "after_step", interrupt_at(2))
        assert train(run, clips(4), f"--stages dvae,gpt {flags}") == 130
    assert not RunDir(run).has_checkpoint("gpt")
    assert train(run, clips(4), f"--stages dvae {flags}") == 0
    assert newest(run, "dvae").step == 4
    assert train(run, clips(4), f"--stages dvae,gpt {flags}") == 0


def interrupt_at(last: int) -> Callable[..., None]:
    """As if the process had been ended in this step."""
    after_step = DvaeRecipe.after_step

    def ended(self: DvaeRecipe, step: int) -> None:
        if step == last:
            raise KeyboardInterrupt
        after_step(self, step)

    return ended
