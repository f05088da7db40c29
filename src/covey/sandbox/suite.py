"""Tests as text, made ready to run: statements, cases of unittest, functions `test_...()` that nobody calls.

The same in both places where tests run: a process of their own (judge.py), or the program's (arena.py). Standard library only.
"""

import ast
import builtins
import importlib
import sys
import types
import unittest
import warnings
from collections.abc import Callable
from typing import Any, Literal

FILE = "<tests>"
_OURS = {
    "math": ("isclose", "sqrt", "pi", "inf", "nan", "isnan"),
    "collections": ("Counter", "defaultdict", "deque", "OrderedDict"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "datetime": ("date", "datetime", "timedelta"),
}
"""Names that tests use without an import since the code under test usually has one: taken from the library all the same."""
_MODULES = frozenset(
    [
        "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq",
        "itertools", "json", "math", "operator", "os", "random", "re", "statistics", "sys", "typing", "unittest",
    ]
)  # fmt: skip
"""Modules of which the same is true. Others may be what the code under test calls its own: `queue`, `code`, `array`."""


class Failed(AssertionError):  # noqa: N818 - what happened
    """A case of the tests' did not pass."""


class Suite:
    """Tests, parsed and compiled; what they import at their top is imported. Raises the error that makes them invalid."""

    def __init__(
        self, setup: str, tests: list[str], rewrite: Callable[[ast.Module, int], ast.Module] | None = None
    ) -> None:
        """`rewrite` gets each tree and its number: -1 for the setup, then 0, 1, ... for the tests."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trees = [parsed(text) for text in (setup, *tests)]
            nodes = [node for tree in trees for node in ast.walk(tree)]
            used, bound = names_of(nodes)
            self.free = used - bound
            self.subject = subject_of(trees, self.free)
            self.is_shared = any(isinstance(node, ast.Global) for node in nodes)
            self.changed = _changed(nodes)
            self._functions = _waiting_functions(trees, used)
            text = "\n".join((setup, *tests))
            self.is_main = any(word in text for word in ("__main__", "unittest.main", "pickle", "doctest"))
            self._skips = "skip" in text.lower() or "expectedFailure" in text
            _import(trees)
            self.modules = sorted({name for node in nodes for name in modules_of(node)})
            for number, tree in enumerate(trees if rewrite is not None else []):
                assert rewrite is not None
                trees[number] = rewrite(tree, number - 1)
            codes = [
                compile(ast.fix_missing_locations(_Main().visit(tree)), FILE, "exec", dont_inherit=True)
                for tree in trees
            ]
        self.setup, self.tests = codes[0], codes[1:]
        self._cases, self._load, self._suite = unittest.TestCase, unittest.TestLoader(), unittest.TestSuite
        self._outcome, self._has_run = unittest.TestResult, [False]

    def library_values(self) -> dict[str, Any]:
        """Names of the library's that the tests use without an import of their own, and their values."""
        origins = {
            name: library_name(name) for name in self.free if name != self.subject and not hasattr(builtins, name)
        }
        self.modules += [of[0] for of in origins.values() if of is not None]
        modules = {name: (importlib.import_module(of[0]), of[1]) for name, of in origins.items() if of is not None}
        return {name: getattr(module, part) if part else module for name, (module, part) in modules.items()}

    def run(self, number: int, space: dict[str, Any], names: Any) -> None:
        """Run test `number` in the globals `space` and the locals `names`. Raises what the test raises."""
        before = dict(space)
        self._has_run[0] = False
        exec(self.tests[number], space, names)
        fresh = {name: value for name, value in space.items() if before.get(name) is not value}
        if not self._has_run[0]:
            self._run_cases(fresh)
        for name in self._functions:
            if name in fresh and type(fresh[name]) is types.FunctionType:
                fresh[name]()

    def main_of(self, space: dict[str, Any]) -> Callable[..., None]:
        """`unittest.main` of the tests: runs the cases defined so far, and returns."""

        def main(*arguments: Any, **keywords: Any) -> None:
            self._has_run[0] = True
            self._run_cases(dict(space))

        return main

    def _run_cases(self, fresh: dict[str, Any]) -> None:
        suite = self._suite()
        for value in fresh.values():
            if type in _mro(type(value)) and self._cases in _mro(value) and value.__module__ != "unittest.case":
                suite.addTests(self._load.loadTestsFromTestCase(value))
        count, result = suite.countTestCases(), self._outcome()
        if not count:
            return
        passed: list[Any] = []
        result.failfast = True
        result.addSuccess = passed.append  # type: ignore[assignment,method-assign]
        suite.run(result)
        bad = [*result.failures, *result.errors]
        if bad:
            raise Failed("\n".join(text for _, text in bad[:3])[-1500:])
        excused = len(result.skipped) + len(result.expectedFailures)
        if len(passed) + excused != count or (excused and not self._skips):
            raise Failed("a test was left out")


MAIN = "main of the tests"
"""The name, no identifier, that stands in the tests for `unittest.main`."""
_mro = type.__dict__["__mro__"].__get__


class _Inline(ast.NodeTransformer):
    """`exec("...")` and `eval("...")` of a text in the tests become its code, whose comparisons are then seen."""

    def visit_Expr(self, node: ast.Expr) -> Any:
        code = _literal(node.value, "exec")
        return self.generic_visit(node) if code is None else [self.visit(part) for part in code.body]

    def visit_Call(self, node: ast.Call) -> Any:
        code = _literal(node, "eval")
        return self.generic_visit(node) if code is None else self.visit(code.body)


def parsed(text: str) -> ast.Module:
    """The tree of a test, with the code in texts that it executes itself. Raises what `ast.parse` raises."""
    tree: ast.Module = _Inline().visit(ast.parse(text))
    return tree


def _literal(node: ast.expr, name: Literal["exec", "eval"]) -> Any:
    """The tree of the one argument of a call of `exec` or `eval`, where it is a text that can be parsed."""
    match node:
        case ast.Call(func=ast.Name(id=called), args=[ast.Constant(value=str(code))], keywords=[]) if called == name:
            try:
                return ast.parse(code.strip(" \t"), mode=name)
            except SyntaxError:
                return None
    return None


class _Main(ast.NodeTransformer):
    """`unittest.main(...)` becomes a call of the run's own, which does not end the process."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "unittest.main":
            return ast.copy_location(ast.Call(ast.Name(MAIN, ast.Load()), [], []), node)
        return self.generic_visit(node)


def names_of(nodes: list[ast.AST]) -> tuple[frozenset[str], frozenset[str]]:
    """The names that tests read, and those that they bind in any place."""
    used: set[str] = set()
    bound: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return frozenset(used), frozenset(bound)


def subject_of(trees: list[ast.Module], free: frozenset[str]) -> str | None:
    """The name of Python's that the code under test redefines, where the tests name nothing else of that code's.

    It is the one name of the library that they call, or else the one builtin that every test calls first.
    """
    if any(not hasattr(builtins, name) and library_name(name) is None for name in free):
        return None
    called = [
        [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        for tree in trees[1:]
    ]
    of_library = {name for names in called for name in names if name in free and library_name(name) is not None}
    if len(of_library) == 1:
        return of_library.pop()
    firsts = {names[0] if names else None for names in called}
    first = firsts.pop() if len(firsts) == 1 else None
    return first if first in free else None


def library_name(name: str) -> tuple[str, str] | None:
    """The module of the library's that a name without an import is taken from, and its name there; empty for the module."""
    for module, names in _OURS.items():
        if name in names and name != "datetime":
            return module, name
    return (name, "") if name in _MODULES else None


def _import(trees: list[ast.Module]) -> None:
    """Import what the tests do at their top, so that a missing module is blamed on the tests, not on the program."""
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom) and not _is_optional(node):
                exec(compile(ast.Module([node], []), FILE, "exec", dont_inherit=True), {})


def modules_of(node: ast.AST) -> list[str]:
    """Modules that an import names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


def _is_optional(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.level > 0 or node.module in (None, "__future__", "solution"))


def _waiting_functions(trees: list[ast.Module], used: frozenset[str]) -> list[str]:
    """`def test_...():` that the tests do not call themselves: pytest would."""
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    waiting = [node for node in functions if node.name.startswith("test") and not node.args.args]
    return [node.name for node in waiting if node.name not in used]


def _changed(nodes: list[ast.AST]) -> frozenset[str]:
    """Modules that the tests themselves change, by assignment or by name in a text (`patch("time.sleep")`)."""
    modules = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            modules.add(ast.unparse(node.value).partition(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            modules.add(node.value.partition(".")[0])
    return frozenset(name for name in modules if name in sys.modules)
