"""Rules of the house that a machine can check: size, direction of imports, collectives in one file, no swallowed error.

Each test reads every file and lists all violations in one message.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "covey"
FILES = sorted(SRC.rglob("*.py"))
LONG = re.compile(r"#\s*house: long, because \S+")

# A module may import from its own level only within its own folder, and from every level above it.
LEVELS = [
    {"metrics", "errors", "lean", "counting", "hub"},
    {"types", "names"},
    {"ladder", "pulse", "interruption"},
    {"rendezvous"},
    {"world", "state", "options", "bounds", "places", "bounded", "arithmetic", "memory", "student"},
    {"checks", "kernels"},
    {"config", "algorithms", "gym"},
    {"rollout", "rewards", "learner", "data", "runs", "demo", "models", "testing", "intervals"},
    {"monitor", "credit", "comparison", "cleaning", "invariants"},
    {"session", "evaluation", "assessment"},
    {"parts", "features"},
    {"recording"},
    {"recovery", "saving"},
    {"build", "view"},
    {"loading"},
    {"loop", "doctor"},
    {"trainer"},
    {"faults"},
    {"cli", "__init__", "__main__"},
]

# Exceptions within a level, each with its reason.
SAME_LEVEL = {
    ("data", "demo"),  # "demo" is the name of a data set, imported when it is asked for
    ("models", "demo"),  # and of a model
    ("rewards", "demo"),  # and of its reward
    ("world", "state"),
    ("testing", "algorithms"),
}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def place_of(file: Path, line: int | None = None) -> str:
    return str(file.relative_to(SRC)) + ("" if line is None else f":{line}")


def name_of(file: Path) -> str:
    return file.relative_to(SRC).parts[0].removesuffix(".py")


def level_of(name: str) -> int:
    for level, names in enumerate(LEVELS):
        if name in names:
            return level
    raise AssertionError(f"src/covey/{name} has no level; add it to LEVELS where it belongs.")


def imports_of(file: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every import of a file, also those within functions."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "covey":
            yield from ((node.lineno, f"covey.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


def is_allowed(mine: str, module: str) -> bool:
    """Whether a file of the top-level name `mine` may import `module`."""
    parts = module.split(".")
    if parts[0] != "covey" or len(parts) < 2 or mine in {"__init__", "__main__"}:
        return True
    theirs = parts[1]
    if theirs == mine or not ((SRC / theirs).exists() or (SRC / f"{theirs}.py").exists()):
        return True
    return level_of(theirs) < level_of(mine) or (mine, theirs) in SAME_LEVEL


def none_of(violations: list[str]) -> None:
    assert not violations, "\n" + "\n".join(violations)


def test_a_file_has_at_most_400_lines():
    lengths = {file: len(file.read_text().splitlines()) for file in FILES}
    none_of([f"{place_of(file)}: {length} lines" for file, length in lengths.items() if length > 400])


def test_a_function_has_at_most_60_lines_and_at_most_five_ask_to_be_long():
    too_long, asked = [], []
    for file in FILES:
        lines = file.read_text().splitlines()
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 60:
                asks = LONG.search("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                (asked if asks else too_long).append(f"{place_of(file, node.lineno)}: {node.name}")
    none_of(too_long)
    assert len(asked) <= 5, asked


def test_imports_flow_one_way():
    none_of(
        [
            f"{place_of(file, line)} imports {module}, which is not above it"
            for file in FILES
            for line, module in imports_of(file)
            if not is_allowed(name_of(file), module)
        ]
    )


def test_only_world_knows_of_other_processes():
    none_of(
        [
            f"{place_of(file, line)} imports {module}"
            for file in FILES
            if name_of(file) != "world"
            for line, module in imports_of(file)
            if module.startswith(("torch.distributed", "accelerate"))
        ]
    )


def test_algorithms_import_torch_and_the_types_only():
    allowed = {"torch", "covey.types", "covey.metrics", "covey.errors", "covey.names", "covey.algorithms"}
    none_of(
        [
            f"{place_of(file, line)} imports {module}"
            for file in FILES
            if name_of(file) == "algorithms"
            for line, module in imports_of(file)
            if not any(module == name or module.startswith(name + ".") for name in allowed)
            and module.split(".")[0] not in sys.stdlib_module_names
        ]
    )


def test_no_exception_is_swallowed():
    handlers = [
        (place_of(file, node.lineno), node)
        for file in FILES
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.ExceptHandler)
    ]
    catches_all = [f"{place} catches everything" for place, node in handlers if node.type is None]
    is_silent = lambda node: len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
    none_of(catches_all + [f"{place} swallows an exception" for place, node in handlers if is_silent(node)])


def test_no_file_is_a_drawer():
    drawers = {"utils.py", "common.py", "helpers.py", "misc.py", "core.py", "base.py"}
    none_of([place_of(file) for file in FILES if file.name in drawers])


def test_importing_covey_does_not_import_torch():
    code = "import covey, sys; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
