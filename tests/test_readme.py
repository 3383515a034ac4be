"""What the pages for users promise: links that lead somewhere, commands that exist, pictures of bearable size."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from myxtts.cli import make_parser

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "README.fa.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [page.name for page in PAGES]


def commands_of(page: Path) -> list[list[str]]:
    """The words of every line in a block of commands, without its comment."""
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    typed = [line for line in lines if line.startswith((".venv/bin/", "make ", "torchrun "))]
    return [shlex.split(part, comments=True) for line in typed for part in line.split("&&")]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_and_picture_of_a_page_is_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_of_a_page_is_understood(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for words in commands_of(page):
        if words[0] == "make":
            assert words[1] in targets, words
            continue
        if script := next((ROOT / word for word in words if word.startswith("benchmarks/")), None):
            source = "".join(path.read_text(encoding="utf-8") for path in script.parent.glob(f"{script.stem}*.py"))
            assert all(f'"{word}"' in source for word in words if word.startswith("--")), words
            continue
        program = next(place for place, word in enumerate(words) if word.endswith(("/myxtts", "train_main.py")))
        given = words[program + 1 :] if words[program].endswith("/myxtts") else ["train", *words[program + 1 :]]
        _, unknown = make_parser().parse_known_args(given)
        assert not unknown, words


def test_both_readmes_offer_the_same_commands() -> None:
    english, persian = ({" ".join(words[:2]) for words in commands_of(page)} for page in PAGES[:2])
    assert persian >= english


@pytest.mark.parametrize("page", PAGES[:2], ids=NAMES[:2])
def test_a_readme_shows_the_pipeline_and_the_report(page: Path) -> None:
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    assert pictures == ["docs/pipeline.svg", "docs/report.png"]


def test_pictures_are_small_and_stand_alone() -> None:
    drawing = (ROOT / "docs" / "pipeline.svg").read_text(encoding="utf-8")
    assert len(drawing) <= 20_000 and (ROOT / "docs" / "report.png").stat().st_size <= 250_000
    assert "href" not in drawing and "@import" not in drawing
    words = "".join(ElementTree.fromstring(drawing).itertext())
    assert all(stage in words for stage in ("gather", "upload", "encode", "hand-off", "train"))
