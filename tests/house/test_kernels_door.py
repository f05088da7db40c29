"""Kernels are one room with one door: nobody else loads compiled code, and nobody imports a file of it."""

import ast
from pathlib import Path

from covey import kernels

SRC = Path(__file__).parents[2] / "src" / "covey"
OUTSIDE = [file for file in sorted(SRC.rglob("*.py")) if (SRC / "kernels") not in file.parents]
ONLY_KERNELS = ("triton", "torch.nn.attention")


def imported(tree: ast.AST) -> list[str]:
    """Full names of everything imported anywhere in a file."""
    names = []
    for node in ast.walk(tree):
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_outside_of_kernels_only_its_door_is_imported():
    names = {f"covey.kernels.{name}" for name in kernels.__all__} | {"covey.kernels"}
    found = {
        (str(file.relative_to(SRC)), name)
        for file in OUTSIDE
        for name in imported(ast.parse(file.read_text()))
        if name.startswith("covey.kernels") and name not in names
    }
    assert not found


def test_only_kernels_know_triton_flex_attention_onednn_and_shared_libraries():
    found = set()
    for file in OUTSIDE:
        text = file.read_text()
        tree = ast.parse(text)
        found |= {(str(file.relative_to(SRC)), name) for name in imported(tree) if name.startswith(ONLY_KERNELS)}
        for node in ast.walk(tree):
            said = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            loads = said in ("ctypes.CDLL", "ctypes.cdll") and not _is_the_c_library(tree, node)
            if said.startswith("torch.ops.mkldnn") or loads:
                found.add((str(file.relative_to(SRC)), said))
    assert not found


def _is_the_c_library(tree: ast.AST, function: ast.AST) -> bool:
    """`ctypes.CDLL(None)`, the functions that the process has already."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.func is function]
    return bool(calls) and all(ast.unparse(call.args[0]) == "None" for call in calls)
