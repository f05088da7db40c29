"""No file of the library imports itself through others, late imports and those for types included."""

from pathlib import Path

from sources import FILES, SRC, imported_by, nodes_of


def modules() -> dict[str, Path]:
    """Every file by the name it is imported by."""
    named = lambda file: ".".join(file.relative_to(SRC.parent).with_suffix("").parts).removesuffix(".__init__")
    return {named(file): file for file in FILES}


def imported(file: Path, known: set[str]) -> set[str]:
    """The modules that any import statement names, wherever it stands."""
    names = [name for node in nodes_of(file) for name in imported_by(node)]
    return {name if name in known else name.rpartition(".")[0] for name in names} & known


def import_graph() -> dict[str, set[str]]:
    files = modules()
    return {name: imported(file, set(files)) - {name} for name, file in files.items()}


def strongly_connected(graph: dict[str, set[str]]) -> list[list[str]]:
    """The components of a directed graph that hold circles: nodes that reach each other."""
    reach = {name: _reachable(graph, name) for name in _without_leaves(graph)}
    found = {tuple(sorted({name} | {other for other in reach[name] if name in reach.get(other, ())})) for name in reach}
    return sorted(map(list, found))


def _without_leaves(graph: dict[str, set[str]]) -> set[str]:
    """The nodes that are in a circle or lead to one."""
    left = set(graph)
    while leaves := {name for name in left if not graph[name] & left}:
        left -= leaves
    return left


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen, waiting = set[str](), [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def test_no_file_is_in_a_circle():
    circles = [component for component in strongly_connected(import_graph()) if len(component) > 1]
    assert circles == []


def test_a_circle_is_found_however_long_it_is():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"e2"}, "e2": {"e"}}
    assert [one for one in strongly_connected(graph) if len(one) > 1] == [["a", "b", "c"], ["e", "e2"]]
