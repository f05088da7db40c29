"""Covey without extras: what needs a package of an extra is a few rooms and files, and nobody else imports them early."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import requires
from pathlib import Path

from sources import FILES, SRC, imported_by, tree_of

NEED_AN_EXTRA = re.compile(
    r"covey\.(serving|environments\.harbor_trial|feedback\.endpoint|monitor\.view\.(access|app|query)|kernels\.triton_(attention|layer|sampling)|process\.connections)\b"
)
IMPORTED_AS = {"pillow": "PIL", "math-verify": "math_verify", "reasoning-gym": "reasoning_gym"}


def packages_of_extras() -> set[str]:
    """Packages, as they are imported, that only extras bring."""
    lines = [line for line in requires("covey") or () if "extra ==" in line and not line.endswith("'dev'")]
    names = {re.match(r"[\w-]+", line)[0] for line in lines} - {"covey"}
    return {IMPORTED_AS.get(name, name) for name in names}


def early(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported; not those for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from early(node)


@cache
def early_imports(file: Path) -> frozenset[str]:
    return frozenset(name for node in early(tree_of(file)) for name in imported_by(node))


def with_parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts) + 1)}


def test_only_these_files_need_an_extra_to_be_imported():
    files = {
        ".".join(file.relative_to(SRC.parent).with_suffix("").parts).removesuffix(".__init__"): file for file in FILES
    }
    extras = packages_of_extras()
    assert {"starlette", "peft", "PIL", "optuna"} <= extras
    imports = {
        name: {part for n in (*early_imports(file), name) for part in with_parents(n)} for name, file in files.items()
    }
    needy, found = set(extras), set(files)
    while found:
        found = {name for name in files.keys() - needy if (imports[name] - {name}) & needy}
        needy |= found
    assert sorted(name for name in needy - extras if not NEED_AN_EXTRA.match(name)) == []
    assert "covey.serving.endpoint" in needy
