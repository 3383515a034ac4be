"""The rules of the source tree: layers, where some things may stand, sizes, names, and how much prose there is."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "myxtts"

LAYERS = [
    {"errors", "config", "host"},
    {"files"},
    {"audio", "devices", "checkpoints", "text", "model", "observe"},
    {"settings"},
    {"data", "weights"},
    {"run_dir"},
    {"pipeline", "training", "synthesis"},
    {"run"},
    {"tools"},
    {"terminal"},
    {"reports"},
    {"cli"},
]
"""From the bottom up. A module imports from lower layers, and within its own package."""
ONLY_IMPORTS = {"model": {"config"}, "observe": {"config"}}
CUDA_HOMES = {"host", "devices", "pipeline", "observe"}
PRINT_HOMES = {"cli", "terminal"}
FORBIDDEN_NAME_PARTS = {
    "utils", "util", "common", "helper", "helpers", "manager", "misc", "enhanced", "smart", "optimized", "v2"
}  # fmt: skip
MOST_FUNCTION_LINES, MOST_MARKDOWN_FILES = 60, 12
LONG_FUNCTIONS: dict[str, int] = {
    "benchmarks/data.py:gather": 80,
}


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if ".venv" not in path.parts)


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def unit_of(path: Path) -> str:
    """The top-level module or package of ours that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import at line {node.lineno}"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "myxtts" else [module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("myxtts.") and "__" not in name)


PACKAGE_FILES = [path for path in python_files(PACKAGE) if path.name != "__init__.py" or path.parent != PACKAGE]
SOURCE_FILES = [*PACKAGE_FILES, *python_files(ROOT / "benchmarks"), *sorted(ROOT.glob("*.py"))]


def layer_of(unit: str) -> int:
    found = [number for number, units in enumerate(LAYERS) if unit in units]
    assert found, f"{unit} belongs to no layer: add it to LAYERS"
    return found[0]


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_downwards(path: Path) -> None:
    unit = unit_of(path)
    for other in set(imported_units(path)) - {unit}:
        downwards = layer_of(other) < layer_of(unit)
        assert downwards, f"{unit} must not import {other}"
        if unit in ONLY_IMPORTS:
            assert other in ONLY_IMPORTS[unit], f"{unit} may import only {ONLY_IMPORTS[unit]}"


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_cuda_and_print_stand_where_they_belong(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda"):
            assert unit_of(path) in CUDA_HOMES, f"{path}:{node.lineno} uses torch.cuda"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            assert unit_of(path) in PRINT_HOMES, f"{path}:{node.lineno} prints"


@pytest.mark.parametrize("path", SOURCE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_bare_except_and_no_pickle(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else ""
            swallows = all(isinstance(statement, ast.Pass) for statement in node.body)
            assert caught, f"{path}:{node.lineno} catches everything"
            assert not (caught in ("Exception", "BaseException") and swallows), (
                f"{path}:{node.lineno} hides errors"
            )
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", "") or ""}
            assert not names & {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal"}, (
                f"{path}:{node.lineno}"
            )
        if isinstance(node, ast.Call):
            call, keywords = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            assert keywords.get("allow_pickle") != "True", f"{path}:{node.lineno}"
            if call == "np.load":
                assert keywords.get("allow_pickle") == "False", f"{path}:{node.lineno} must say allow_pickle=False"
            if call == "torch.load":
                assert keywords.get("weights_only") == "True", f"{path}:{node.lineno} must say weights_only=True"
            assert call not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"), f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", SOURCE_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short_and_explain_themselves(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    tree = tree_of(path)
    assert ast.get_docstring(tree), f"{name} has no module docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= LONG_FUNCTIONS.get(f"{name}:{node.name}", MOST_FUNCTION_LINES), f"{name}:{node.name}"


def test_no_grab_bag_names() -> None:
    for path in SOURCE_FILES:
        parts = {piece for part in path.relative_to(ROOT).parts for piece in part.removesuffix(".py").split("_")}
        assert not parts & FORBIDDEN_NAME_PARTS, path


def test_exceptions_to_the_sizes_are_still_needed() -> None:
    for place in LONG_FUNCTIONS:
        name, function = place.split(":")
        lengths = [
            (node.end_lineno or 0) - node.lineno + 1
            for node in ast.walk(tree_of(ROOT / name))
            if isinstance(node, ast.FunctionDef) and node.name == function
        ]
        assert lengths and max(lengths) > MOST_FUNCTION_LINES, place


def test_little_prose() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    tracked = listed.stdout.split() or [str(path) for path in ROOT.rglob("*.md") if ".venv" not in path.parts]
    assert len(tracked) <= MOST_MARKDOWN_FILES, tracked


def test_readme_stays_readable() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
