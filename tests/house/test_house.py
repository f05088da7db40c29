"""Rules of the house that a machine can check: size, direction of imports, collectives in one file, no swallowed error.

Each test reads every file and lists all violations in one message.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sources import FILES, SRC, nodes_of, text_of, tree_of

LONG = re.compile(r"#\s*house: long, because \S+")

FLOORS = [  # a room may import rooms of lower floors only; rooms of one floor do not know each other
    {"types", "errors", "raised", "demo"},
    {"names", "files", "process", "declared"},
    {"adapters", "data", "sandbox"},
    {"models"},
    {"algorithms", "config", "kernels", "rewards"},
    {"rollout", "learner", "runs", "testing", "merging"},
    {"evaluation", "environments", "ensembles"},
    {"monitor", "serving"},
    {"training"},
    {"experiments"},
    {"doctor", "feedback", "__init__"},
    {"cli"},
    {"__main__"},
]


def place_of(file: Path, line: int | None = None) -> str:
    return str(file.relative_to(SRC)) + ("" if line is None else f":{line}")


def name_of(file: Path) -> str:
    return file.relative_to(SRC).parts[0].removesuffix(".py")


def is_room(name: str) -> bool:
    return (SRC / name).is_dir() or (SRC / f"{name}.py").is_file()


def floor_of(room: str) -> int:
    for floor, rooms in enumerate(FLOORS):
        if room in rooms:
            return floor
    raise AssertionError(f"src/covey/{room} has no floor; add it to FLOORS where it belongs.")


def imports_of(file: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every import of a file, also those within functions."""
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "covey":
            yield from (
                (node.lineno, f"covey.{alias.name}" if is_room(alias.name) else "covey") for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


def is_allowed(mine: str, module: str) -> bool:
    """True if a file of the room `mine` may import `module`."""
    first, _, rest = module.partition(".")
    theirs = rest.partition(".")[0] or "__init__"
    return first != "covey" or theirs == mine or floor_of(theirs) < floor_of(mine)


def none_of(violations: list[str]) -> None:
    assert not violations, "\n" + "\n".join(violations)


def test_a_file_has_at_most_400_lines():
    lengths = {file: len(text_of(file).splitlines()) for file in FILES}
    none_of([f"{place_of(file)}: {length} lines" for file, length in lengths.items() if length > 400])


def test_a_function_has_at_most_60_lines_and_at_most_five_ask_to_be_long():
    too_long, asked = [], []
    for file in FILES:
        lines = text_of(file).splitlines()
        for node in nodes_of(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 60:
                asks = LONG.search("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                (asked if asks else too_long).append(f"{place_of(file, node.lineno)}: {node.name}")
    none_of(too_long)
    assert len(asked) <= 5, asked


def test_rooms_import_downwards():
    none_of(
        [
            f"{place_of(file, line)} imports {module}, which is not on a lower floor"
            for file in FILES
            for line, module in imports_of(file)
            if not is_allowed(name_of(file), module)
        ]
    )


def test_only_process_knows_of_other_processes():
    none_of(
        [
            f"{place_of(file, line)} imports {module}"
            for file in FILES
            if name_of(file) != "process"
            for line, module in imports_of(file)
            if module.startswith(("torch.distributed", "accelerate"))
        ]
    )


def test_algorithms_import_torch_and_the_types_only():
    allowed = {"torch", "covey.types", "covey.errors", "covey.names", "covey.declared", "covey.algorithms"}
    allowed |= {"typing_extensions"}  # `Unpack` for type checkers, in typing from Python 3.11 on
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
        for node in nodes_of(file)
        if isinstance(node, ast.ExceptHandler)
    ]
    catches_all = [f"{place} catches everything" for place, node in handlers if node.type is None]
    is_silent = lambda node: len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
    none_of(catches_all + [f"{place} swallows an exception" for place, node in handlers if is_silent(node)])


def test_a_name_of_a_module_is_assigned_once():
    """A second value reaches the functions above it too, such as where two files were joined."""
    twice = []
    for file in FILES:
        seen = set()
        for node in tree_of(file).body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            for name in (
                part.id
                for target in targets
                for part in getattr(target, "elts", [target])
                if isinstance(part, ast.Name)
            ):
                twice += [f"{place_of(file, node.lineno)} assigns {name} again"] * (name in seen)
                seen.add(name)
    none_of(twice)


def test_no_file_is_a_drawer():
    drawers = {"utils.py", "common.py", "helpers.py", "misc.py", "core.py", "base.py"}
    none_of([place_of(file) for file in FILES if file.name in drawers])


def test_importing_covey_does_not_import_torch():
    code = "import covey, sys; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_neither_commands_nor_the_view_nor_an_actor_on_ray_begin_with_torch():
    """A second of a command's time and 200 MB of each actor; `covey plan` computes with it."""
    names = [f"covey.cli.{file.stem}" for file in FILES if place_of(file).startswith("cli/") and file.stem != "plan"]
    names += ["covey.monitor.view.app", "covey.rewards.ray_actors", "covey.rewards.calling.worker"]
    code = f"""
import importlib, sys
for name in {[name.removesuffix(".__init__") for name in names]}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(name + " imports torch")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_one_function_finds_the_model_inside_adapters():
    """`models.unwrapped`; a critic copies the model before it takes the adapter off."""
    files = [file for file in FILES if ".get_base_model()" in text_of(file)]
    assert [place_of(file) for file in files] == ["learner/critic.py", "models/passes.py"]
