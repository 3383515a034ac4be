"""How a training ends: a spoken sample, where everything is, and what to type next; and the demonstration."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import soundfile
from training_fixtures import FLAGS, STAGES, Start, newest, stop_at

import myxtts.config
from myxtts import reports
from myxtts.config import DEMO
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
    offered = shown.partition("\nNext:\n")[2]
    typed = [shlex.split(line, comments=True) for line in offered.replace("\\\n", " ").splitlines()]
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
    assert "babble" in shown and "loss of gpt" in shown
    assert max(map(len, shown.partition("\nDone. ")[2].splitlines())) <= 120, "commands continue on a second line"
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

    lines = apply_demo(load(None, {"training.stages": "decoder"}))[1]
    assert "decoder_steps 2" in lines[1] and "needs thousands of steps" in lines[2]
    assert applied(True)[1] > 2 * applied(False)[1]
    assert applied(False, **{"data.batch_size": 5})[0] == 5
    assert applied(True, **{"training.max_steps": 7}) == (16, 7)


def test_own_data_get_all_stages_and_a_sample_of_their_own(start: Start) -> None:
    run = start("--max-steps 1 --decoder-steps 1", corpus=6)
    assert all(RunDir(run).has_checkpoint(stage) for stage in STAGES)
    assert f"in the voice of {start.clips(6)}" in start.out
    assert "by the trained decoder, 1 step (gpt: 1 step)" in start.out
    assert "What to expect: after 1 step of gpt from scratch" in start.out
    assert "minutes of each are enough" in start.out
    assert next_commands(start.out).keys() == {"speak", "report"}


def test_starting_from_xtts_v2_is_no_short_cut_to_persian(start: Start) -> None:
    start("--stages dvae,gpt --max-steps 1 --language fa")
    assert "does not know Persian" in start.out and "minutes of each" not in start.out


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
    assert "Speaking" not in start.out and "not trained" in start.out
    assert not (run / "sample.wav").exists()
    stop_at(monkeypatch, 1)
    start("--stages gpt --max-steps 3")
    assert newest(run).step == 1
    assert "the same command" in start.out and "Done." not in start.out and "sample" not in start.out


def from_here(shown: str) -> dict[str, str]:
    """What the screen says that other commands would do."""
    lines = shown.partition("\nFrom here:\n")[2].partition("\nNext:")[0].splitlines()
    return dict(line.strip().split(": ", 1) for line in lines)


def test_what_is_said_at_the_end_of_a_run_comes_true(start: Start) -> None:
    run = start("--max-steps 1")
    said = from_here(start.out)
    assert said == {
        "the same command": "nothing is left to train",
        "a larger --max-steps": "dvae continues, then gpt and decoder start over",
        "--stages gpt and a larger --max-steps": "only gpt continues; decoder is then stale",
    }
    start("--max-steps 1")
    assert "starting now" not in start.out
    start("--max-steps 2 --stages gpt")
    assert [(newest(run, stage).step, RunDir(run).status(stage).state) for stage in STAGES] == [
        (1, "complete"), (2, "complete"), (1, "stale")
    ]  # fmt: skip
    whole = "dvae continues at step 1 of 2; gpt starts over, 2 steps; decoder starts over, 2 steps"
    assert from_here(start.out)["without --stages"] == whole
    start("--max-steps 2")
    assert start.out.count("starting now") == 3 and start.out.count("starts over") == 2
    assert [newest(run, stage).step for stage in STAGES] == [2, 2, 2]


def test_what_is_said_of_stages_with_limits_of_their_own_comes_true(start: Start) -> None:
    run = start("--stages dvae,gpt --max-steps 1 --dvae-steps 2")
    said = from_here(start.out)
    assert said["a larger --dvae-steps"] == "dvae continues, then gpt starts over"
    assert said["a larger --max-steps"] == "gpt continues"
    assert said["--stages decoder"] == "trains decoder"
    start("--stages dvae,gpt --max-steps 3 --dvae-steps 2")
    assert "gpt      continues at step 1 of 3" in start.out and newest(run).step == 3
    start("--stages decoder --max-steps 1")
    assert newest(run, "decoder").step == 1
    start("--stages dvae,gpt --max-steps 3 --dvae-steps 3")
    assert "gpt      starts over, 3 steps" in start.out and "decoder  stale, and left as it is" in start.out
    assert newest(run, "dvae").step == newest(run).step == 3
    assert (
        from_here(start.out)["--stages gpt and a larger --max-steps"]
        == "only gpt continues; decoder is then stale"
    )


def test_the_time_of_all_stages_is_estimated_from_the_first_steps(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "SLOW_S", 0.0)
    start("--stages dvae,gpt --max-steps 4")
    assert re.findall(r"Time left for all stages: about \d+ s \(dvae \d+ s as measured, gpt \d+ s if", start.out)
    assert start.out.count("Time left for all stages") == 1, "the last stage has its own time left in every line"
    assert "From scratch on a CPU this is slow. Faster: a GPU; --init-from FOLDER" in start.out
