"""The rules of the source tree: layers, where some things may stand, sizes, names, and how much prose there is."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "myxtts"

LAYERS = [
    {"errors", "config", "host"},
    {"files"},
    {"audio", "devices", "checkpoints", "text", "model", "observe"},
    {"settings"},
    {"data", "weights", "distributed"},
    {"run_dir"},
    {"pipeline", "training", "synthesis"},
    {"evaluation"},
    {"run"},
    {"tools", "collect"},
    {"web"},
    {"terminal"},
    {"reports"},
    {"cli"},
    {"__main__"},
]
"""From the bottom up. A module imports from lower layers, and within its own package."""
ONLY_IMPORTS = {"model": {"config"}, "observe": {"config"}}
CUDA_HOMES = {"host", "devices", "pipeline", "observe"}
PRINT_HOMES = {"cli", "terminal"}
GRAB_BAGS = {
    "utils", "util", "common", "helper", "helpers", "manager", "misc", "enhanced", "smart", "optimized", "v2"
}  # fmt: skip
METAPHORS = {"lane", "witness", "noted", "surroundings", "takes", "manner", "rehearsal"}
"""Words that name a technical thing after something else: a lane is a stream, a rehearsal is a dry run."""
MOST_MODULES, MOST_PACKAGE_LINES, LONGEST_IMPORT_CHAIN = 97, 40_040, 14
MOST_FUNCTION_LINES, MOST_MARKDOWN_FILES, MOST_README_LINES = 60, 14, 150
LONG_FUNCTIONS = {"benchmarks/data.py:gather": 80}

PACKAGE_FILES = sorted(PACKAGE.rglob("*.py"))
SOURCE_FILES = [
    *PACKAGE_FILES,
    *sorted((ROOT / "benchmarks").rglob("*.py")),
    *sorted((ROOT / "experiments").rglob("*.py")),
    *sorted(ROOT.glob("*.py")),
]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def nodes(files: list[Path], *kinds: type[ast.AST]) -> Iterator[tuple[Path, str, Any]]:
    """Every syntax node of these kinds with its file and its place in words."""
    for path in files:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, kinds):
                yield path, f"{path.relative_to(ROOT)}:{node.lineno}", node


def unit_of(path: Path) -> str:
    """The top-level module or package of ours that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in PACKAGE_FILES}


def imports_of(node: ast.AST) -> Iterator[str]:
    """The modules of ours that a node imports, at its start or inside functions, unless only for type checking."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.ImportFrom):
        named = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name if name in MODULES else str(node.module) for name in named)
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imports_of(child)


@cache
def longest_chain(module: str) -> list[str]:
    imported = {name for name in imports_of(tree_of(MODULES[module])) if name in MODULES} - {"myxtts", module}
    return [module, *max((longest_chain(name) for name in imported), key=len, default=[])]


def layer_of(unit: str) -> int:
    found = [number for number, units in enumerate(LAYERS) if unit in units]
    assert found, f"{unit} belongs to no layer: add it to LAYERS"
    return found[0]


def test_imports_are_absolute_and_only_downwards_and_their_chains_short() -> None:
    wrong = []
    files = [path for path in PACKAGE_FILES if path != PACKAGE / "__init__.py"]
    for path, place, node in nodes(files, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.ImportFrom) and node.level:
            wrong.append(f"{place}: relative import")
        unit = unit_of(path)
        others = {name.split(".")[1] for name in imports_of(node) if name.startswith("myxtts.")} - {unit}
        allowed = ONLY_IMPORTS.get(unit, others)
        for other in others:
            if layer_of(other) >= layer_of(unit) or other not in allowed:
                wrong.append(f"{place}: {unit} must not import {other}")
    assert not wrong, "\n".join(wrong)
    chain = max((longest_chain(module) for module in MODULES), key=len)
    assert len(chain) <= LONGEST_IMPORT_CHAIN, " → ".join(chain)


def test_cuda_and_print_stand_where_they_belong() -> None:
    homes = {"torch.cuda": CUDA_HOMES, "print": PRINT_HOMES}
    wrong = [
        f"{place} uses {used}"
        for path, place, node in nodes(PACKAGE_FILES, ast.Attribute, ast.Name)
        if (used := ast.unparse(node)) in homes and unit_of(path) not in homes[used]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_bare_except_and_no_pickle() -> None:
    wrong = []
    for _, place, node in nodes(SOURCE_FILES, ast.ExceptHandler):
        caught = ast.unparse(node.type) if node.type else ""
        swallows = all(isinstance(statement, ast.Pass) for statement in node.body)
        if not caught or (caught in ("Exception", "BaseException") and swallows):
            wrong.append(f"{place} hides errors")
    for _, place, node in nodes(SOURCE_FILES, ast.Import, ast.ImportFrom):
        names = {alias.name for alias in node.names} | {getattr(node, "module", "")}
        if names & {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal"}:
            wrong.append(f"{place} imports a pickle")
    for _, place, node in nodes(SOURCE_FILES, ast.Call):
        call, keywords = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
        if keywords.get("allow_pickle", "unsaid" if call == "np.load" else "False") != "False":
            wrong.append(f"{place} must say allow_pickle=False")
        if call == "torch.load" and keywords.get("weights_only") != "True":
            wrong.append(f"{place} must say weights_only=True")
        if call in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            wrong.append(f"{place} must call yaml.safe_load")
    assert not wrong, "\n".join(wrong)


def test_functions_are_short_and_modules_explain_themselves() -> None:
    files = [path for path in SOURCE_FILES if path != PACKAGE / "__init__.py"]
    wrong = [f"{path} has no module docstring" for path in files if not ast.get_docstring(tree_of(path))]
    for path, _, node in nodes(SOURCE_FILES, ast.FunctionDef, ast.AsyncFunctionDef):
        name, length = f"{path.relative_to(ROOT)}:{node.name}", node.end_lineno - node.lineno + 1
        if length > LONG_FUNCTIONS.get(name, MOST_FUNCTION_LINES):
            wrong.append(f"{name} has {length} lines")
    assert not wrong, "\n".join(wrong)


def test_package_and_prose_stay_small() -> None:
    assert len([path for path in PACKAGE_FILES if path.name != "__init__.py"]) <= MOST_MODULES
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE_FILES)
    assert lines <= MOST_PACKAGE_LINES, f"myxtts has {lines} lines"
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    tracked = listed.stdout.split() or [str(path) for path in ROOT.rglob("*.md") if ".venv" not in path.parts]
    assert len(tracked) <= MOST_MARKDOWN_FILES, tracked
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MOST_README_LINES


def test_names_are_the_words_of_the_field_and_no_metaphors() -> None:
    paths = [str(path.relative_to(ROOT)) for path in SOURCE_FILES]
    wrong = [path for path in paths if words_of(path.removesuffix(".py")) & (GRAB_BAGS | METAPHORS)]
    for _, place, node in nodes(SOURCE_FILES, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef):
        banned = METAPHORS | ({"mark"} if isinstance(node, ast.ClassDef) else set())
        if words_of(node.name) & banned:
            wrong.append(f"{place} {node.name}")
    assert not wrong, "\n".join(wrong)


def words_of(name: str) -> set[str]:
    """The words of a path or of a name in snake case or camel case, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+\d*|[A-Z]+", name)}
