"""Rules of trust: nothing executes what a file says, and nothing is dropped without a reason that can be found."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import load_command

from myxtts.data.clips import PreparedCorpus, set_aside_list
from myxtts.errors import ConfigError

SHADOWED = ("random", "torch", "numpy", "json", "ruamel", "soundfile", "rich", "tokenizers", "multiprocessing")
ALIASES = "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefg", "bcdefgh", strict=True)
)


def test_modules_of_the_working_folder_are_not_executed(corpus: Path, tmp_path: Path) -> None:
    """Python itself starts worker processes so that they import from the working folder first."""
    folder, mark, script = tmp_path / "downloaded", tmp_path / "executed", tmp_path / "bin" / "myxtts"
    for path in (*(folder / f"{name}.py" for name in SHADOWED), folder / "myxtts" / "__init__.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(mark)!r}, 'a').write(__file__)\n")
    script.parent.mkdir()
    script.write_text("import sys\nfrom myxtts.cli import main\nsys.exit(main())\n")  # as pip installs it
    command = [sys.executable, script, "prepare", "--train-data", corpus, "--language", "en", "--num-workers", "2"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert not mark.exists(), mark.read_text()
    assert result.returncode == 0 and "training clips" in result.stdout, result.stderr


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/new:os.system [touch executed]",
        "a: &a [x,x,x,x,x,x,x,x,x]\n" + ALIASES,
        "data:\n  language: &a [*a]",
        "{a: " * 20_000,
        "- " * 40_000,
        "*" * 90_000,
    ],
    ids=["tag", "aliases", "recursion", "flow", "block", "long name"],
)
@pytest.mark.usefixtures("empty_working_folder")
def test_a_settings_file_is_only_text(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_command(text=text)
    assert len(str(refused.value)) < 2000
    assert not Path("executed").exists()


def test_every_row_is_used_or_listed_with_its_reason(
    make_corpus: Callable[..., Path], run_prepare: Callable[..., PreparedCorpus]
) -> None:
    folder = make_corpus()
    (folder / "wavs" / "clip001.wav").write_bytes(b"")
    (folder / "wavs" / "clip002.wav").write_text("no audio")
    with open(folder / "metadata.csv", "a", encoding="utf-8") as metadata:
        metadata.write(
            "absent|There is no such file.\nclip003|A second text.\nclip004\n|\n../../etc/passwd|Out.\n"
        )
    prepared = run_prepare(folder)
    with open(set_aside_list(prepared.root), encoding="utf-8", newline="") as file:
        listed = list(csv.DictReader(file, delimiter="|"))
    assert len(prepared.train) + len(prepared.val) + len(listed) == 11
    assert all(row["reason"] and row["where"] for row in listed)
