"""Splitting of test assertions in two halves: the program's value, and the expected value it is compared with.

`assert f(2) == 4` becomes `assert check(0, f(2))` for the tests' run, and `lambda given0, fixed0: given0 == fixed0` with
`fixed0 = 4` for the judge, which alone knows the 4. Assertions that cannot be split stay whole. Standard library only.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Need = Literal["all", "some", "none"]
"""Of the decoys in place of a value: none may hold, at least one must not, or nothing is asked."""

ALMOST = "almost equal"
"""The name, no identifier, of `assertAlmostEqual` in an expression of the judge's."""
PURE = frozenset(
    [
        "abs",
        "round",
        "sorted",
        "len",
        "set",
        "list",
        "tuple",
        "dict",
        "frozenset",
        "sum",
        "min",
        "max",
        "str",
        "repr",
        "int",
        "float",
        "bool",
        "complex",
        "bytes",
        "divmod",
        "pow",
        "zip",
        "range",
        "enumerate",
        "reversed",
        "ord",
        "chr",
        "hex",
        "bin",
        "oct",
        "ascii",
        "isclose",
        "isnan",
        "sqrt",
        "Counter",
        "OrderedDict",
        "deque",
        "Decimal",
        "Fraction",
        "hash",
    ]
)
"""Functions that the judge may call for itself: their value depends on their arguments alone."""
_MIXING = frozenset(("abs", "round", "isclose", "sorted", "set", "frozenset"))
"""Those of them that swallow a difference, so that they are the judge's also where an argument is the program's."""
MODULES = frozenset(
    ("math", "cmath", "collections", "decimal", "fractions", "itertools", "string", "operator", "datetime")
)
_CLOCKS = frozenset(("now", "today", "utcnow"))
_COMPARED: dict[str, type[ast.cmpop]] = {
    "assertEqual": ast.Eq, "assertEquals": ast.Eq, "assertListEqual": ast.Eq, "assertDictEqual": ast.Eq, "assertTupleEqual": ast.Eq,
    "assertSetEqual": ast.Eq, "assertSequenceEqual": ast.Eq, "assertMultiLineEqual": ast.Eq, "assertNotEqual": ast.NotEq,
    "assertIn": ast.In, "assertNotIn": ast.NotIn, "assertGreater": ast.Gt, "assertGreaterEqual": ast.GtE, "assertLess": ast.Lt,
    "assertLessEqual": ast.LtE, "assertIs": ast.Is, "assertIsNot": ast.IsNot,
}  # fmt: skip
_SPECIAL = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.Lambda)


@dataclass
class Site:
    """One assertion: `expression` over `given0`, `given1`, ... (the program's) and `fixed0`, ... (`fixed`, the tests')."""

    expression: ast.expr
    given: list[ast.expr] = field(default_factory=list)
    fixed: list[Any] = field(default_factory=list)
    needs: dict[str, Need] = field(default_factory=dict)
    must: bool = False
    """Reached in every run that passes."""

    @property
    def names(self) -> list[str]:
        return [f"given{n}" for n in range(len(self.given))] + [f"fixed{n}" for n in range(len(self.fixed))]


class Splitter(ast.NodeTransformer):
    """Takes the assertions of one test apart; `sites` are those found, numbered from `first`.

    `is_closed` says whether an expression does without the program; `evaluate` gives its value as a list of one, or an empty
    list where it has none that is data. `check` and `truth` are the names of the two functions that the tests' run brings.
    """

    def __init__(
        self,
        first: int,
        names: tuple[str, str],
        is_closed: Callable[[ast.expr], bool],
        evaluate: Callable[[ast.expr], list[Any]],
    ) -> None:
        self.sites: dict[int, Site] = {}
        self._first, (self._check, self._truth) = first, names
        self._is_closed, self._of = is_closed, evaluate
        self._values: dict[int, tuple[ast.expr, list[Any]]] = {}
        self._must: set[int] = set()

    def split(self, tree: ast.Module) -> ast.Module:
        self._must = set(_reached(tree))
        return ast.fix_missing_locations(self.visit(tree))

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        must = id(node) in self._must
        if node.msg is not None:
            node.msg = self.visit(node.msg)
        node.test = self._checked(node.test, must)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        must = id(node) in self._must
        call = node.value
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and isinstance(call.func.value, ast.Name)
        ):
            found = _assertion(call)
            if found is not None and call.func.value.id in ("self", "cls", "case", "test", "tc"):
                checked = self._checked(found[0], must)
                call.func.attr, call.args = "assertTrue", [checked, *found[1]]
                call.keywords = [word for word in call.keywords if word.arg == "msg"]
                return node
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in ("all", "any", "sum") and node.args:
            inner = node.args[0]
            if isinstance(inner, ast.GeneratorExp | ast.ListComp):
                inner.elt = self._true(inner.elt)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        node.test = self._true(node.test)
        return self.generic_visit(node)

    def _checked(self, test: ast.expr, must: bool) -> ast.expr:
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            test.values = [self._checked(value, must and not place) for place, value in enumerate(test.values)]
            return test
        site = Site(test, must=must)
        site.expression = self._half(test, site, "none" if isinstance(test, ast.UnaryOp) else "some")
        number = self._first + len(self.sites)
        self.sites[number] = site
        given = [self.visit(self._true(item)) for item in site.given]
        return ast.Call(ast.Name(self._check, ast.Load()), [ast.Constant(number), *given], [])

    def _evaluate(self, node: ast.expr) -> list[Any]:
        if id(node) not in self._values:
            self._values[id(node)] = (node, self._of(node) if self._is_closed(node) else [])
        return self._values[id(node)][1]

    def _half(self, node: ast.expr, site: Site, need: Need) -> ast.expr:
        """`node` for the judge; the parts that only the program has go to `site.given`."""
        if not _has(node, _SPECIAL):
            value = self._evaluate(node)
            if value:
                site.fixed.append(value[0])
                return _named(site, f"fixed{len(site.fixed) - 1}", need)
            if isinstance(node, ast.Compare) and self._comparable(node):
                operands = [node.left, *node.comparators]
                needs = _needs(node.ops, need)
                halves = [self._half(item, site, one) for item, one in zip(operands, needs, strict=True)]
                return ast.Compare(halves[0], node.ops, halves[1:])
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                return ast.UnaryOp(node.op, self._half(node.operand, site, "none"))
            if self._mixed(node):
                return self._rebuilt(node, site, need)
        site.given.append(node)
        return _named(site, f"given{len(site.given) - 1}", need)

    def _rebuilt(self, node: ast.expr, site: Site, need: Need) -> ast.expr:
        inner: Need = "some" if need == "all" and isinstance(node, ast.BinOp | ast.UnaryOp | ast.Call) else need
        if isinstance(node, ast.BinOp):
            return ast.BinOp(self._half(node.left, site, inner), node.op, self._half(node.right, site, inner))
        if isinstance(node, ast.UnaryOp):
            return ast.UnaryOp(node.op, self._half(node.operand, site, inner))
        if isinstance(node, ast.Call):
            words = [ast.keyword(word.arg, self._half(word.value, site, "none")) for word in node.keywords]
            return ast.Call(node.func, [self._half(item, site, inner) for item in node.args], words)
        assert isinstance(node, ast.List | ast.Tuple | ast.Set)
        kind: Any = type(node)
        parts = [self._half(item, site, need) for item in node.elts]
        return kind(parts) if isinstance(node, ast.Set) else kind(parts, ast.Load())

    def _comparable(self, node: ast.Compare) -> bool:
        """Not where identity is asked for of anything but None, True and False: it does not travel."""
        if not any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            return True
        return len(node.ops) == 1 and isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value in (None, True, False)  # fmt: skip

    def _mixed(self, node: ast.expr) -> bool:
        """An operation of the tests' own between what the program gives and what it does not."""
        if isinstance(node, ast.BinOp | ast.UnaryOp | ast.List | ast.Tuple | ast.Set):
            operands: list[ast.expr] = getattr(node, "elts", None) or [
                item for item in ast.iter_child_nodes(node) if isinstance(item, ast.expr)
            ]
        elif isinstance(node, ast.Call) and _is_pure(node.func) and self._is_closed(node.func):
            operands = [*node.args, *(word.value for word in node.keywords if word.arg is not None)]
            if len(operands) != len(node.args) + len(node.keywords):
                return False
        else:
            return False
        if any(isinstance(item, ast.Starred) for item in operands):
            return False
        if (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)) or _is_almost(node):
            return True  # a difference, which is compared with zero
        return any(self._evaluate(item) or self._mixed(item) for item in operands)

    def _true(self, node: ast.expr) -> ast.expr:
        """`node` as a truth value, with comparisons for equality that do not trust an object that equals everything."""
        if isinstance(node, ast.BoolOp):
            node.values = [self._true(value) for value in node.values]
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node.operand = self._true(node.operand)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            return ast.Call(ast.Name(self._truth, ast.Load()), [node.left, node.comparators[0]], [])
        return node


def _named(site: Site, name: str, need: Need) -> ast.expr:
    site.needs[name] = need
    return ast.Name(name, ast.Load())


def _needs(ops: list[ast.cmpop], outer: Need) -> list[Need]:
    """For each operand of a comparison, what decoys in its place have to come to."""
    if outer == "none" or any(isinstance(op, ast.NotEq | ast.NotIn | ast.Is | ast.IsNot) for op in ops):
        return ["none"] * (len(ops) + 1)
    if len(ops) > 1:
        return ["all" if all(isinstance(op, ast.Eq) for op in ops) else "some"] * (len(ops) + 1)
    if isinstance(ops[0], ast.In):
        return ["some", "all"]
    return ["all" if isinstance(ops[0], ast.Eq) else "some"] * 2


def _has(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
    return any(isinstance(inner, kinds) for inner in ast.walk(node))


def _is_pure(function: ast.expr) -> bool:
    if isinstance(function, ast.Name) and function.id == ALMOST:
        return True
    if isinstance(function, ast.Attribute):
        return isinstance(function.value, ast.Name) and function.value.id in MODULES and function.attr in _MIXING
    return isinstance(function, ast.Name) and function.id in _MIXING


def _is_almost(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == ALMOST


def _assertion(call: ast.Call) -> tuple[ast.expr, list[ast.expr]] | None:
    """The assertion of a call of unittest's, and the message after it."""
    assert isinstance(call.func, ast.Attribute)
    name, values = call.func.attr, call.args
    if any(isinstance(item, ast.Starred) for item in values) or any(word.arg != "msg" for word in call.keywords):
        return None
    if name in _COMPARED and len(values) >= 2:
        return ast.Compare(values[0], [_COMPARED[name]()], [values[1]]), values[2:3]
    if name == "assertAlmostEqual" and len(values) in (2, 3):
        return ast.Call(ast.Name(ALMOST, ast.Load()), values, []), []
    if name == "assertTrue" and values:
        return values[0], values[1:2]
    if name == "assertFalse" and values:
        return ast.UnaryOp(ast.Not(), values[0]), values[1:2]
    return None


def _reached(tree: ast.Module) -> Iterable[int]:
    """Statements that a test comes to whatever the program does, but for an exception: at its top, and in what it calls there."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    waiting: list[list[ast.stmt]] = [tree.body, *_cases(tree)]
    seen: set[str] = set()
    while waiting:
        for statement in waiting.pop():
            yield id(statement)
            if _may_leave(statement):
                break
            value = statement.value if isinstance(statement, ast.Expr) else None
            if (
                isinstance(value, ast.Call)
                and isinstance(value.func, ast.Name)
                and value.func.id in functions.keys() - seen
            ):
                seen.add(value.func.id)
                function = functions[value.func.id]
                if not function.decorator_list and not _has(function, (ast.Yield, ast.YieldFrom)):
                    waiting.append(function.body)


def _cases(tree: ast.Module) -> Iterable[list[ast.stmt]]:
    """The bodies of the methods that unittest runs, and of the functions that pytest would; the last of each name."""
    owners: list[list[ast.stmt]] = [tree.body]
    for node in tree.body:
        if (
            isinstance(node, ast.ClassDef)
            and not node.decorator_list
            and any("TestCase" in ast.unparse(base) for base in node.bases)
        ):
            owners.append(node.body)
    for owner in owners:
        methods = {node.name: node for node in owner if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        for name, method in methods.items():
            is_run = isinstance(method, ast.FunctionDef) and (owner is not tree.body or not method.args.args)
            if name.startswith("test") and is_run and not method.decorator_list:
                yield method.body


_LEAVING = ("exit", "_exit", "skip", "skipTest", "quit")


def _may_leave(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assert | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        return False
    return _has(statement, (ast.Return, ast.Raise)) or any(
        isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _LEAVING
        for node in ast.walk(statement)
    )


def is_closed(node: ast.expr, known: frozenset[str], modules: frozenset[str]) -> bool:
    """True if `node` can be evaluated without the program: it uses `known` names alone, and of `modules` no clock."""
    bound = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)}
    for inner in ast.walk(node):
        if isinstance(inner, (*_SPECIAL, ast.Starred)) or (isinstance(inner, ast.Attribute) and inner.attr in _CLOCKS):
            return False
        if isinstance(inner, ast.Name) and inner.id not in known | modules | bound:
            return False
    return True
