"""The recipes of CONTRIBUTING.md, followed step by step."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import write_corpus

PACKAGE = Path(__file__).parent.parent / "myxtts"

TABLE = """
# Tokilandic: written in Cyrillic letters, and unknown to num2words and lingua
script = "cyrillic"
digits = ["нул", "ун", "ду", "три", "квар", "квин", "ше", "сет", "ок", "нон"]
minus = "миним"

[symbols]
"&" = "ет"

[abbreviations]
"др." = "доктор"
"""
USE = """
from myxtts.text.language import detect_languages
from myxtts.text.normalize import normalize
from myxtts.text.tokenizer import train
spoken = normalize("Др. Али & 42 котка!", "xtk")
print(spoken)
print(train([spoken], ["xtk"], 256).languages >= {"xtk", "el"})
print(detect_languages(["Ωραία μέρα", "Привет, мир"], ["a", "b"]))
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the package without its recordings."""
    return shutil.copytree(PACKAGE, tmp_path / "copy" / "myxtts", ignore=shutil.ignore_patterns("wavs"))


def run(copied: Path, *arguments: str, code: int | None = 0) -> str:
    environment = os.environ | {"PYTHONPATH": str(copied.parent)}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, env=environment, cwd=copied.parent, capture_output=True, text=True, check=False, timeout=120
    )
    assert code is None or done.returncode == code, done.stderr
    return done.stdout + done.stderr


def add_line(path: Path, after: str, line: str) -> None:
    content = path.read_text(encoding="utf-8")
    assert content.count(after) == 1
    path.write_text(content.replace(after, after + line), encoding="utf-8")


def test_adding_a_language(copied: Path, tmp_path: Path) -> None:
    """A table, and an entry in `LANGUAGE_NAMES`: here for two languages, one of them with a script of its own."""
    (copied / "text" / "languages" / "xtk.toml").write_text(TABLE, encoding="utf-8")
    (copied / "text" / "languages" / "el.toml").write_text('script = "greek"\n', encoding="utf-8")
    add_line(copied / "config.py", '"fa": "Persian",', ' "xtk": "Tokilandic", "el": "Greek",')
    spoken, has_tokens, detected = run(copied, "-c", USE).splitlines()
    assert spoken == "доктор али ет квар ду котка!"
    assert has_tokens == "True"
    assert detected == "['el', 'ru']"
    corpus = write_corpus(tmp_path / "corpus", ["Ала бала 7 пъти.", "Кала & мала.", "Др. Тала нала."])
    log = run(copied, "-m", "myxtts.cli", "prepare", "--train-data", str(corpus), "--language", "xtk")
    assert "Tokilandic 3" in log
    assert len((corpus / ".myxtts" / "set_aside.csv").read_text().splitlines()) == 1


FIELD = '''
    patience: int = setting(3, minimum=1)
    """Validations without improvement before a note is printed."""
'''


def test_adding_a_setting(copied: Path, tmp_path: Path) -> None:
    """A field in config.py: flag, help, YAML key, limits and documentation follow."""
    add_line(copied / "config.py", '"""What is trained, for how long, and what is saved."""\n', FIELD)
    shown = run(copied, "-m", "myxtts.cli", "train", "--help")
    assert "--patience" in shown and "Validations without improvement" in shown
    (tmp_path / "c.yaml").write_text("training:\n  patience: 0\n")
    refused = run(copied, "-m", "myxtts.cli", "check", "--config", str(tmp_path / "c.yaml"), code=2)
    assert "training.patience" in refused and "at least 1" in refused


RULE = """
    Rule(
        "batch-size", "warn", "data.batch_size", 8,
        "{s.settings.data.batch_size} is an odd number of clips", "this rule is made up", "give an even one",
        when=lambda s: s.settings.data.batch_size % 2 == 1,
    ),
"""


def test_adding_a_performance_rule(copied: Path) -> None:
    """A row of the table: `check` shows it, with its fix and the flag."""
    add_line(copied / "observe" / "findings.py", "\nRULES = (", RULE.rstrip("\n"))
    flags = ("--json", "--batch-size", "7", "--train-data", str(PACKAGE / "embedded"))
    assert "7 is an odd number of clips" in run(copied, "-m", "myxtts.cli", "check", *flags, code=None)
