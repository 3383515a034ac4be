"""The command line: exit codes, what is shown, and that mistakes are named together and without a traceback."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import soundfile as sf
from conftest import write_corpus
from training_fixtures import Clips, clips, small

import myxtts
from myxtts import __version__, terminal
from myxtts.cli import main
from myxtts.config import LANGUAGES, DataSettings, Settings, TrainingSettings
from myxtts.text.tokenizer import Tokenizer

__all__ = ["clips", "small"]

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("empty_working_folder")


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(arguments if arguments[0].endswith(".py") else ("-m", "myxtts.cli", *arguments))]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_help_lists_the_commands_and_every_language(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("--help", "prepare --help", "train --help", "vocabulary extend --help", "--version"):
        with pytest.raises(SystemExit) as left:
            main(line.split())
        assert left.value.code == 0
    shown = capsys.readouterr().out
    flags = ("--train-data", "--cache-dir", "--base", "--batch-size")
    assert all(word in shown for word in ("prepare", "train", "vocabulary", *flags, __version__, *LANGUAGES))


def test_help_and_the_front_door_import_only_what_is_used() -> None:
    code = (
        "import sys, myxtts\n"
        "print(sorted(name for name in sys.modules if name.startswith('myxtts.')))\n"
        "from myxtts.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "for wrong in ('train --epoch 3', 'check --config no.yaml', 'profile --batch-size 0', 'tune --lr x', "
        "'prepare DIR', 'runs no', 'vocabulary train --out v.json --lr 1'): assert main(wrong.split()) == 2\n"
        "print([name for name in ('torch', 'numpy', 'soundfile', 'rich') if name in sys.modules])\n"
        "from myxtts import prepare; print('myxtts.data.prepare' in sys.modules, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *_, heavy, last = result.stdout.splitlines()
    assert (first, heavy, last) == ("[]", "[]", "True False")
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = myxtts.tarin
    assert set(dir(myxtts)) >= {"load_synthesizer", "prepare", "train", "__version__"}


@pytest.mark.parametrize(
    "script",
    [
        "train_main",
        "quick_gpu_fix",
        "validate_dual_gpu_pipeline",
        "test_gpu_optimization",
        "utilities/gpu_profiler",
    ],
)
def test_a_python_without_the_packages_says_what_to_run_instead(script: str, tmp_path: Path) -> None:
    for name in ("safetensors", "numpy", "torch", "rich", "ruamel"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('none', name='{name}')")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run(str(ROOT / f"{script}.py"), "--train-data", "DIR", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(r"no package \w+\. Run make train .* then use \.venv/bin/python\.", done.stderr), done.stderr


@pytest.mark.usefixtures("small")
def test_a_voice_is_trained_and_heard_from_python(clips: Clips, tmp_path: Path) -> None:
    corpus, run_folder = clips(), tmp_path / "run"
    data = DataSettings(
        train_data=corpus, language="en", vocab_size=256, batch_size=2, max_mel_frames=128, max_text_length=40,
        num_workers=1, model_start_delay=0.0, val_fraction=0.0,
    )  # fmt: skip
    training = TrainingSettings(checkpoint_dir=run_folder, stages=("dvae", "gpt"), max_steps=1)
    settings = Settings(data=data, training=training)
    assert len(myxtts.prepare(settings).train) == len(myxtts.prepare(data).train) == 4
    result = myxtts.train(settings)
    assert all(state.done for state in result.states.values()) and len(result.prepared.train) == 4
    synthesizer = myxtts.load_synthesizer(str(run_folder))
    recording = write_corpus(tmp_path / "speaker", ["Hello."], seconds=3.0) / "wavs" / "clip000.wav"
    voice = synthesizer.voice([str(recording)])
    synthesizer.speak("Hello.", voice, "en", seed=1).save("hello.wav")
    assert sf.info("hello.wav").samplerate == 24000


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("", "usage: myxtts"),
        ("vocabulary train", "usage: myxtts"),
        ("speek Hello.", "did you mean speak?"),
        ("speak Hello. --langauge en", "unknown flag --langauge; did you mean --language?"),
        ("speak Hello. --language persian", "did you mean fa?"),
        ("speak Hello. --speeker=a.wav", "unknown flag --speeker; did you mean --speaker?"),
        ("report run --outt page.html", "unknown flag --outt; did you mean --out?"),
        ("watch run elsewhere", "unknown arguments elsewhere"),
    ],
)
def test_incomplete_and_misspelt_commands_are_answered_with_what_was_meant(
    line: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(line.split())
    assert left.value.code == 2
    assert advice in capsys.readouterr().err


def test_prepare_shows_progress_messages_and_a_table(corpus: Path) -> None:
    (corpus / "speakers.csv").write_text("id|speaker|language\nclip000|Ann [bold]|en\nclip001|Bob|de\n")
    (corpus / "wavs" / "clip005.wav").write_bytes(b"")
    with open(corpus / "metadata.csv", "a") as metadata:
        metadata.write("clip000|Again.\nabsent|Nobody.\n")
    first = run("prepare", "--train-data", str(corpus), "--language", "en", "--num-workers", "1")
    assert first.returncode == 0, first.stderr
    built = {"BUILDING TEXT CACHE (Text Preprocessing)", "BUILDING AUDIO CACHE"}
    assert built | {"Processing 6 samples", "Using 1 parallel workers"} <= set(first.stderr.splitlines())
    shown = re.sub(r" +", " ", first.stdout)
    for part in (
        "training clips 4 0.1 minutes", "validation clips 1 0.0 minutes", "speakers 3", "Ann [bold] 1",
        "languages 2 English 4, German 1", "set aside 3 clips", "1 empty file", "1 duplicate id",
        "1 missing file", "0–2 s", f"listed in {corpus}/.myxtts/set_aside.csv",
        f"Ready: cache in {corpus}/.myxtts",
    ):  # fmt: skip
        assert part in shown, part
    second = run("prepare", "--train-data", str(corpus), "--language", "en")
    assert second.returncode == 0 and second.stdout == first.stdout and "BUILDING" not in second.stderr
    for name in ("TEXT", "AUDIO", "TOKEN"):
        assert f"LOADING {name} CACHE FROM DISK" in second.stderr.splitlines()


def test_progress_lines_when_not_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    now = 100.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    progress = terminal.ProgressLines()
    progress.begin("Decoding audio", 100)
    for _ in range(10):
        now += 1.5
        progress.advance(10)
    progress.end()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["Decoding audio: 20 of 100, 0:12 left", "Decoding audio: 90 of 100, 0:02 left"]


def test_train_main_trains_from_another_folder_and_says_where_everything_is(corpus: Path, tmp_path: Path) -> None:
    """The one real network that is trained from a command line."""
    flags = ["--language", "en", "--stages", "gpt", "--max-steps", "1", "--batch-size", "2", "--dashboard"]
    result = run(str(ROOT / "train_main.py"), "--train-data", str(corpus), *flags, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for part in ("Corpus: 4 training clips", "Model training starting now", "Done. Everything is in checkpoints"):
        assert part in result.stdout
    assert "step 1/1  loss" in result.stdout and "╭" not in result.stdout, "no terminal, no live view"
    assert (tmp_path / "checkpoints" / "gpt" / "step-00000001" / "weights.safetensors").is_file()


@pytest.mark.parametrize(
    ("line", "code", "expected"),
    [
        ("prepare --train-data absent", 1, "No such corpus folder: /"),
        ("prepare --train-data .", 1, "No metadata in ."),
        ("prepare --train-data DIR/wavs", 1, "metadata.csv is in the folder above: give --train-data /"),
        ("train --train-data absent", 1, "metadata.csv with lines id|text"),
        ("vocabulary train --out /proc/no/v.json", 1, "/proc/no/v.json"),
        ("vocabulary extend --base absent.json --out v.json", 2, "--language is missing"),
        ("vocabulary extend --base absent.json --language fa --out v.json", 1, "--base absent.json: there is no"),
        ("train --tokenizer absent.json", 1, "--tokenizer absent.json: there is no such file"),
        ("speak --from-file absent.txt --language en --speaker s.wav", 2, "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_used_is_an_error_in_plain_words(
    line: str, code: int, expected: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.replace("DIR", str(corpus)).split()) == code
    shown = capsys.readouterr().err
    assert expected in shown and "Errno" not in shown and "Traceback" not in shown
    assert shown.startswith("error: ") and not Path("v.json").exists()


def test_prepare_repairs_damage_and_needs_something_to_use(
    corpus: Path, capsys: pytest.CaptureFixture[str], messages
) -> None:
    arguments = ["prepare", "--train-data", str(corpus), "--language", "en"]
    assert main(arguments) == 0
    (audio,) = (corpus / ".myxtts").glob("audio-*")
    content = bytearray((audio / "data.bin").read_bytes())
    content[100] ^= 1
    (audio / "data.bin").write_bytes(content)
    messages.take()
    assert main(arguments) == 0
    assert messages.work() == {"AUDIO": 1}
    for path in (corpus / "wavs").iterdir():
        path.write_text("no audio")
    assert main(arguments) == 1
    assert "6 × not audio" in capsys.readouterr().err


def test_settings_change_what_is_set_aside(make_corpus: Callable[..., Path], capsys) -> None:
    folder = make_corpus(seconds=1.0)
    sf.write(folder / "wavs" / "clip000.wav", [0.1, -0.1] * 22050, 22050)
    for flags, code, said in (
        ("--max-mel-frames 100", 0, "too long"),
        ("--min-clip-seconds 1.5", 0, "too short"),
        ("--max-text-length 8", 1, "text too long"),
    ):
        assert main(["prepare", "--train-data", str(folder), "--language", "en", *flags.split()]) == code
        shown = capsys.readouterr()
        assert said in (shown.err if code else shown.out)


def test_a_vocabulary_is_trained_and_extended(
    corpus: Path, make_corpus: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = Path("first.json"), Path("second.json")
    assert main(["vocabulary", "train", "--train-data", str(corpus), "--language", "en", "--out", str(first)]) == 0
    assert re.search(r"first\.json: \d+ tokens", capsys.readouterr().out)
    persian = make_corpus(["سلام دنیا، حال شما چطور است؟", "امروز هوا بسیار خوب است."], name="fa", first=50)
    data = ["--train-data", str(persian), "--language", "fa"]
    assert main(["vocabulary", "extend", "--base", str(first), "--out", str(second), *data]) == 0
    old, new = Tokenizer.load(first), Tokenizer.load(second)
    assert new.num_tokens > old.num_tokens and "fa" in new.languages
    assert new.unknown_characters("سلام", "fa") == [] != old.unknown_characters("سلام", "fa")


def test_make_refuses_variables_that_it_does_not_know() -> None:
    def make(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["make", "-n", "-C", ROOT, *words], capture_output=True, text=True, check=False)

    assert "unknown variable data; write DATA=corpus" in make("train", "data=corpus").stderr
    assert "unknown variable DTA; known are: DATA" in make("train", "DTA=corpus").stderr
    assert '--train-data "my corpus"' in make("train", "DATA=my corpus", "PYTHON=python3").stdout


def test_the_reader_of_the_output_may_leave(corpus: Path) -> None:
    """`myxtts prepare … | head -1` ends without a traceback."""
    command = f"{sys.executable} -m myxtts.cli prepare --train-data {corpus} --language en | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert "training clips" in result.stdout
    assert "Traceback" not in result.stderr
