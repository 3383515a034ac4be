"""The pages for users: links lead somewhere, commands exist, pictures are small."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from myxtts.cli import make_parser

ROOT = Path(__file__).parent.parent
READMES = [ROOT / "README.md", ROOT / "README.fa.md"]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SCRIPT_FOLDERS = ("benchmarks/", "experiments/")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
each_readme = pytest.mark.parametrize("page", READMES, ids=lambda page: page.name)


def commands_of(page: Path) -> list[list[str]]:
    """The words of every command line in a block without a language, comments removed."""
    blocks = re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    typed = [line for line in lines if line.startswith((".venv/bin/", "make ", "torchrun "))]
    return [shlex.split(part, comments=True) for line in typed for part in line.split("&&")]


@each_page
def test_every_link_and_picture_of_a_page_is_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


@each_page
def test_every_script_named_on_a_page_is_there(page: Path) -> None:
    named = re.findall(r"\b(?:benchmarks|experiments|utilities)/[\w/]+\.py\b", page.read_text(encoding="utf-8"))
    assert not [name for name in named if not (ROOT / name).is_file()]


@each_page
def test_every_command_of_a_page_is_understood(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for words in commands_of(page):
        if words[0] == "make":
            assert words[1] in targets, words
            continue
        if words[0].endswith("/pip"):
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert words[1:-1] == ["install", "-e"] and words[-1][2:-1] in extras, words
            continue
        if script := next((ROOT / word for word in words if word.startswith(SCRIPT_FOLDERS)), None):
            source = script.read_text(encoding="utf-8")
            assert all(f'"{word}"' in source for word in words if word.startswith("--")), words
            continue
        program = next(place for place, word in enumerate(words) if word.endswith(("/myxtts", "train_main.py")))
        given = words[program + 1 :] if words[program].endswith("/myxtts") else ["train", *words[program + 1 :]]
        _, unknown = make_parser().parse_known_args(given)
        assert not unknown, words


def test_both_readmes_offer_the_same_commands_and_pages() -> None:
    english, persian = ({" ".join(words[:2]) for words in commands_of(page)} for page in READMES)
    assert persian >= english
    linked = [set(re.findall(r"\]\(((?:docs|configs)/[^)#]+|[A-Z]+\.md)", page.read_text())) for page in READMES]
    assert linked[1] >= linked[0]


def test_the_persian_readme_names_every_script() -> None:
    page = READMES[1].read_text(encoding="utf-8")
    scripts = [*ROOT.glob("*.py"), *(ROOT / "utilities").glob("*.py")]
    assert scripts and not [script.name for script in scripts if script.name not in page]


@each_readme
def test_a_readme_shows_the_pipeline(page: Path) -> None:
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    assert "docs/pipeline.svg" in pictures


def test_pictures_are_small_and_stand_alone() -> None:
    drawing = (ROOT / "docs" / "pipeline.svg").read_text(encoding="utf-8")
    assert len(drawing) <= 20_000
    assert "href" not in drawing and "@import" not in drawing
    words = "".join(ElementTree.fromstring(drawing).itertext())
    assert all(worker in words for worker in ("gather", "upload", "encode", "hand-off", "train"))
