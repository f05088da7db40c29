"""The library's files, each parsed once for all rules of the house."""

import ast
import gc
from functools import cache
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "covey"
FILES = sorted(SRC.rglob("*.py"))


@cache
def text_of(file: Path) -> str:
    return file.read_text()


@cache
def tree_of(file: Path) -> ast.Module:
    """The file's syntax tree.

    The trees stay: collections of garbage that look at them took half of the time."""
    gc.disable()
    try:
        return ast.parse(text_of(file))
    finally:
        gc.freeze()
        gc.enable()


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    """Every node of the file's tree."""
    return list(ast.walk(tree_of(file)))


def imported_by(node: ast.AST) -> list[str]:
    """Full names that a node imports; of other nodes none."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []
