"""Kernels are one room with one door: nobody else loads compiled code, and nobody imports a file of it."""

import ast

from sources import FILES, SRC, imported_by, nodes_of

from covey import kernels

OUTSIDE = [file for file in FILES if (SRC / "kernels") not in file.parents]
ONLY_KERNELS = ("triton", "torch.nn.attention")


def test_outside_of_kernels_only_its_door_is_imported():
    names = {f"covey.kernels.{name}" for name in kernels.__all__} | {"covey.kernels"}
    found = {
        (str(file.relative_to(SRC)), name)
        for file in OUTSIDE
        for node in nodes_of(file)
        for name in imported_by(node)
        if name.startswith("covey.kernels") and name not in names
    }
    assert not found


def test_only_kernels_know_triton_flex_attention_onednn_and_shared_libraries():
    found = set()
    for file in OUTSIDE:
        nodes, place = nodes_of(file), str(file.relative_to(SRC))
        found |= {(place, name) for node in nodes for name in imported_by(node) if name.startswith(ONLY_KERNELS)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                said = ast.unparse(node)
                loads = said in ("ctypes.CDLL", "ctypes.cdll") and not _is_the_c_library(nodes, node)
                if said.startswith("torch.ops.mkldnn") or loads:
                    found.add((place, said))
    assert not found


def _is_the_c_library(nodes: list[ast.AST], function: ast.AST) -> bool:
    """`ctypes.CDLL(None)`, the functions that the process has already."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.func is function]
    return bool(calls) and all(ast.unparse(call.args[0]) == "None" for call in calls)
