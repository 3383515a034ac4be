"""How a training ends: a spoken sample, where everything is, and what to type next; and the demonstration."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
import soundfile
from training_fixtures import FLAGS, Start, newest, stop_at

import myxtts.config
from myxtts import reports
from myxtts.config import DEMO, STAGES
from myxtts.data.prepare import EMBEDDED_CORPUS
from myxtts.errors import PipelineError
from myxtts.reports import TrainingReports
from myxtts.run_dir import RunDir
from myxtts.settings import apply_demo, load

pytest_plugins = ["training_fixtures"]
pytestmark = pytest.mark.usefixtures("small")


@pytest.fixture
def short_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demonstration in two steps a stage."""
    steps = {"training.dvae_steps": 2, "training.max_steps": 2, "training.warmup_steps": 0}
    monkeypatch.setattr(myxtts.config, "DEMO", {**DEMO, **steps})


def next_commands(shown: str) -> dict[str, list[str]]:
    """What the screen offers to type, by the name of the command."""
    typed = [shlex.split(line, comments=True) for line in shown.partition("\nNext:\n")[2].splitlines()]
    assert all(Path(words[0]).name == "myxtts" for words in typed)
    return {words[1]: words[1:] for words in typed}


@pytest.mark.usefixtures("short_demo")
def test_the_demonstration_ends_with_a_voice_and_what_to_do_next(start: Start) -> None:
    run = Path("demo")
    shown = start.command("train")
    wave, rate = soundfile.read(run / "sample.wav")
    assert rate == 24000 and abs(wave).max() > 0
    assert 'src="data:audio/mpeg' in (run / "report.html").read_text(encoding="utf-8")
    assert any(b"sample" in file.read_bytes() for file in (run / "tensorboard" / "gpt").iterdir())
    assert not RunDir(run).has_checkpoint("decoder")
    assert shown.count("demonstration: stages [dvae, gpt], batch_size 2, dvae_steps 2, max_steps 2") == 1
    assert "embedded corpus: training.checkpoint_dir = demo (default checkpoints)" in shown
    assert "decoder_steps" not in shown, "no decoder is trained"
    assert "Persian" in shown and "English" in shown
    assert f"in the voice of {EMBEDDED_CORPUS}" in shown and "by Griffin-Lim (gpt: 2 steps)" in shown
    for place in ("sample.wav", "report.html", "gpt"):
        assert str(run / place) in shown.partition("Done.")[2]
    assert "babble" in shown
    offered = next_commands(shown)
    assert offered.keys() == {"train", "speak", "report"}
    start.command(*offered["speak"])
    assert Path("speech.wav").is_file()
    start.command(*offered["report"])

    spoken_at = (run / "sample.wav").stat().st_mtime_ns
    assert str(run / "sample.wav") in start.command("train")
    assert (run / "sample.wav").stat().st_mtime_ns == spoken_at, "what was finished before is not spoken again"

    own = [str(start.clips()) if word == "DIR" else word for word in offered["train"]]
    start.command(*own, *shlex.split(FLAGS), "--stages", "dvae", "--max-steps", "1")  # with other settings
    assert RunDir(Path("checkpoints")).has_begun


def test_the_demonstration_trains_longer_on_a_gpu_and_leaves_wishes_alone() -> None:
    def applied(on_gpu: bool, **flags: object) -> tuple[int, int | None]:
        settings = apply_demo(load(None, flags), on_gpu=on_gpu)[0].settings
        return settings.data.batch_size, settings.training.max_steps

    assert applied(True)[1] > 2 * applied(False)[1]
    assert applied(False, **{"data.batch_size": 5})[0] == 5
    assert applied(True, **{"training.max_steps": 7}) == (16, 7)


def test_own_data_get_all_stages_and_a_sample_of_their_own(start: Start) -> None:
    run = start("--max-steps 1 --decoder-steps 1", corpus=6)
    assert all(RunDir(run).has_checkpoint(stage) for stage in STAGES)
    assert f"in the voice of {start.clips(6)}" in start.out
    assert "by the trained decoder, 1 step (gpt: 1 step)" in start.out
    assert "What to expect: after 1 step of gpt from scratch" in start.out
    assert next_commands(start.out).keys() == {"speak", "report"}


def test_enough_steps_need_no_excuse(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "FEW_STEPS", 1)
    monkeypatch.setattr("myxtts.synthesis.synthesizer.is_faint", lambda _: True)
    start("--stages dvae,gpt --max-steps 1")
    assert "What to expect" not in start.out
    assert "hardly anything can be heard" in start.out


def test_a_sample_that_fails_spoils_nothing(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PipelineError("The model said nothing in 3 attempts")

    run, corpus = tmp_path / "run", tmp_path / "corpus"
    shutil.copytree(start.clips(), corpus)
    run.mkdir()
    with monkeypatch.context() as patched:
        (run / "sample.wav").write_bytes(b"of an older training")
        patched.setattr(reports, "speak_sample", fail)
        start("--stages dvae,gpt --max-steps 1", corpus=corpus)
    assert "No sample was spoken: The model said nothing in 3 attempts" in start.out
    assert "Done." in start.out and "speak" not in next_commands(start.out)
    assert not (run / "sample.wav").exists()

    write_page = TrainingReports.close

    def close(reports: TrainingReports) -> None:
        write_page(reports)
        shutil.rmtree(corpus)

    (run / "sample.wav").write_bytes(b"of an older training")
    monkeypatch.setattr(TrainingReports, "close", close)
    start("--stages dvae,gpt --max-steps 2", corpus=corpus)  # the corpus is gone when the run ends
    assert next_commands(start.out).keys() == {"report"}
    assert not (run / "sample.wav").exists()


def test_a_training_that_cannot_speak_yet_or_is_interrupted_speaks_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("--stages dvae --max-steps 1")
    assert "No sample was spoken: The model has no gpt" in start.out
    assert not (run / "sample.wav").exists()
    stop_at(monkeypatch, 1)
    start("--stages gpt --max-steps 3")
    assert newest(run).step == 1
    assert "the same command" in start.out and "Done." not in start.out and "sample" not in start.out
