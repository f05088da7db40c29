"""The rules of the house that a machine can check: size, direction of imports, collectives in one file, no swallowed error."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "covey"
FILES = sorted(SRC.rglob("*.py"))
LONG = re.compile(r"#\s*house: long, because \S+")

# A module may import from its own level only within its own folder, and from every level above it.
LEVELS = [
    {"metrics", "errors", "lean", "counting", "hub"},
    {"types", "names", "compiled"},
    {"ladder", "pulse", "interruption"},
    {"rendezvous"},
    {"world", "state", "options", "bounds", "places", "bounded", "arithmetic", "memory", "student"},
    {"outputs"},
    {"products"},
    {"fused_operations"},
    {"fused_adapters"},
    {"checks", "fused_layers"},
    {"config", "algorithms", "gym"},
    {"rollout", "rewards", "learner", "data", "runs", "demo", "models", "testing", "intervals"},
    {"monitor", "credit", "comparison", "cleaning", "invariants"},
    {"session", "evaluation", "assessment"},
    {"parts", "features", "reuse"},
    {"recording"},
    {"recovery", "saving"},
    {"build", "view"},
    {"loop", "doctor"},
    {"trainer"},
    {"faults"},
    {"cli", "__init__", "__main__"},
]


def name_of(file: Path) -> str:
    return file.relative_to(SRC).parts[0].removesuffix(".py")


def level_of(name: str) -> int:
    for level, names in enumerate(LEVELS):
        if name in names:
            return level
    raise AssertionError(f"src/covey/{name} has no level; add it to LEVELS where it belongs.")


def imports_of(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" if node.module == "covey" else node.module for alias in node.names]
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SRC)))
def test_a_file_has_at_most_400_lines(file):
    assert len(file.read_text().splitlines()) <= 400


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SRC)))
def test_a_function_has_at_most_60_lines(file):
    text = file.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
            assert node.end_lineno - node.lineno < 60 or LONG.search(body), f"{node.name} is too long"


def test_at_most_five_functions_ask_to_be_long():
    assert sum(len(LONG.findall(file.read_text())) for file in FILES) <= 5


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SRC)))
def test_imports_flow_one_way(file):
    mine = name_of(file)
    for module in imports_of(ast.parse(file.read_text())):
        parts = module.split(".")
        if parts[0] != "covey" or len(parts) < 2 or mine in {"__init__", "__main__"}:
            continue
        theirs = parts[1]
        if theirs == mine or not ((SRC / theirs).exists() or (SRC / f"{theirs}.py").exists()):
            continue
        allowed = level_of(theirs) < level_of(mine) or (mine, theirs) in SAME_LEVEL
        assert allowed, f"{file.relative_to(SRC)} imports covey.{theirs}, which is not above it"


# Exceptions within a level, each with its reason.
SAME_LEVEL = {
    ("data", "demo"),  # "demo" is the name of a data set, imported when it is asked for
    ("models", "demo"),  # and of a model
    ("rewards", "demo"),  # and of its reward
    ("world", "state"),
    ("testing", "algorithms"),
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SRC)))
def test_only_world_knows_of_other_processes(file):
    if name_of(file) == "world":
        return
    for module in imports_of(ast.parse(file.read_text())):
        assert not module.startswith(("torch.distributed", "accelerate")), f"{file.name} imports {module}"


def test_algorithms_import_torch_and_the_types_only():
    allowed = {"torch", "covey.types", "covey.metrics", "covey.errors", "covey.names", "covey.algorithms"}
    for file in (SRC / "algorithms").rglob("*.py"):
        for module in imports_of(ast.parse(file.read_text())):
            top = module.split(".")[0]
            is_own = any(module == name or module.startswith(name + ".") for name in allowed)
            assert is_own or top in sys.stdlib_module_names, f"{file.name} imports {module}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SRC)))
def test_no_exception_is_swallowed(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ExceptHandler):
            is_bare = node.type is None
            is_silent = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
            assert not is_bare, f"{file.name}:{node.lineno} catches everything"
            assert not is_silent, f"{file.name}:{node.lineno} swallows an exception"


def test_no_file_is_a_drawer():
    drawers = {"utils.py", "common.py", "helpers.py", "misc.py", "core.py", "base.py"}
    assert not {file.name for file in FILES} & drawers


def test_importing_covey_does_not_import_torch():
    code = "import covey, sys; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
