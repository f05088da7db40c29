"""The judge of tests that run beside the program: it alone knows the expected values, and writes the verdicts.

It takes the tests apart, sends them over without what they expect, and answers each assertion as it is reached. An object that
decides itself what it equals is asked about other values too. A test has passed when its run says so, and every assertion that
must have been reached has been, and held. Standard library only.
"""

from __future__ import annotations

import ast
import base64
import builtins
import importlib
import json
import marshal
import os
import socket
import sys
import types
import warnings
from typing import Any

from covey.rewards.sandbox import decoys, judge, plain, wire
from covey.rewards.sandbox.channel import Channel, ends
from covey.rewards.sandbox.guard import WATCHED
from covey.rewards.sandbox.splitting import ALMOST, MODULES, PURE, Site, Splitter, is_closed

_TOPS = frozenset(name.partition(".")[0] for name in WATCHED)
_KNOWN_TYPES = frozenset(("True", "False", "None", "NotImplemented", "Ellipsis"))


def arbitrate(tests: bytes, connection: socket.socket, verdict: int) -> None:
    """Write one JSON line to `verdict` for each test of `{"setup": str, "tests": [str]}`, then `{"done": true}`."""
    plan = json.loads(tests)
    try:
        parts = _Parts(plan["setup"], plan["tests"])
    except BaseException as error:  # noqa: BLE001 - the border to the tests' code
        return judge._write(verdict, {"setup": judge._said(error)})
    key = os.urandom(32)
    try:
        wire.send(connection, {**parts.hello, "key": key.hex()})
        _Hearing(parts, ends(connection, key, judge=True), verdict).hold()
    except Exception as error:  # noqa: BLE001 - the program's side may send anything
        judge._write(verdict, {"gone": f"{type(error).__name__}: {error}"[:300]})


class _Parts:
    """Tests, taken apart: `hello` for their run, `sites` for the judge. Raises the error that makes them invalid."""

    def __init__(self, setup: str, tests: list[str]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trees = [ast.parse(text) for text in (setup, *tests)]
            nodes = [node for tree in trees for node in ast.walk(tree)]
            self._used, self._bound = judge.names_of(nodes)
            self._subject = judge._subject(trees, self._used - self._bound)
            is_shared, changed = any(isinstance(node, ast.Global) for node in nodes), _changed(nodes)
            functions = _waiting_functions(trees, self._used)
            self.space: dict[str, Any] = {"__builtins__": dict(builtins.__dict__), ALMOST: decoys.almost}
            self._modules = {name: name for name in MODULES if name not in self._bound and name != "datetime"}
            imports = self._import(trees)
            known = self._known()
            self._closed = frozenset((PURE - self._bound - {self._subject}) | _KNOWN_TYPES | set(self._given))
            tag = os.urandom(8).hex()
            self.names = (f"check {tag}", f"truth {tag}")
            self.sites: dict[int, Site] = {}
            self.of_test: list[list[int]] = []
            codes = [self._taken_apart(tree, f"main {tag}" if "unittest" in self._used else "") for tree in trees]
            self.expressions = [_function(site) for site in self.sites.values()]
            text = "\n".join((setup, *tests))
            self.hello: dict[str, Any] = {
                "setup": _packed(codes[0]),
                "tests": _packed(codes[1:]),
                "expressions": _packed(self.expressions),
                "known": known,
                "imports": imports,
                "check": self.names[0],
                "truth": self.names[1],
                "main": f"main {tag}",
                "subjects": [name for name in (self._subject,) if name],
                "shared": is_shared,
                "is_main": any(word in text for word in ("__main__", "unittest.main", "pickle", "doctest")),
                "functions": functions,
                "changed": changed,
                "skips": "skip" in text.lower() or "expectedFailure" in text,
            }

    def values(self, number: int, given: list[Any]) -> Any:
        """Value of assertion `number` with plain data in place of all the program's values."""
        site = self.sites[number]
        return _call(self.expressions[number], self.space, dict(zip(site.names, [*given, *site.fixed], strict=True)))

    def _import(self, trees: list[ast.Module]) -> list[str]:
        """Import what the tests do at their top, so that what is missing here is known to be no fault of the program's."""
        self._given: set[str] = set()
        found = []
        for tree in trees:
            for node in tree.body:
                if isinstance(node, ast.Import | ast.ImportFrom) and not _is_optional(node):
                    found += (
                        [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                    )
                    exec(compile(ast.Module([node], []), "<tests>", "exec", dont_inherit=True), self.space)
                    self._note(node)
        return [name for name in found if name.partition(".")[0] in sys.stdlib_module_names]

    def _note(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name
            if (
                isinstance(node, ast.ImportFrom)
                and node.module in MODULES
                and alias.name in PURE | {"pi", "inf", "nan", "e"}
            ):
                self._given.add(name)
            elif isinstance(node, ast.Import) and alias.name in MODULES and name == alias.name:
                self._modules[name] = name

    def _known(self) -> dict[str, tuple[str, str]]:
        """Names of the library's that the tests use without an import of their own: their module and name in it."""
        known: dict[str, tuple[str, str]] = {}
        for name in self._used - self._bound - {self._subject} - set(dir(builtins)):
            found = judge.library_name(name)
            if found is not None:
                known[name] = found
                module = importlib.import_module(found[0])
                self.space[name] = getattr(module, found[1]) if found[1] else module
                if found[1] in PURE | {"pi", "inf", "nan"}:
                    self._given.add(name)
        self._modules = {name: name for name in self._modules if name in self.space}
        return known

    def _taken_apart(self, tree: ast.Module, main: str) -> Any:
        splitter = Splitter(len(self.sites), self.names, self._does_without, self._evaluate)
        tree = splitter.split(_Main(main).visit(tree) if main else tree)
        code = compile(tree, "<tests>", "exec", dont_inherit=True)
        self.of_test.append([number for number, site in splitter.sites.items() if site.must])
        self.sites.update(splitter.sites)
        return code

    def _does_without(self, node: ast.expr) -> bool:
        return is_closed(node, self._closed, frozenset(self._modules))

    def _evaluate(self, node: ast.expr) -> list[Any]:
        if isinstance(node, ast.Name) and node.id in self._modules:
            return []
        try:
            value = _call(compile(ast.Expression(node), "<tests>", "eval", dont_inherit=True), self.space, {})
            return [value] if plain.encode(value)[1] else []
        except Exception:  # noqa: BLE001 - it is evaluated beside the program then, where it raises again
            return []


class _Hearing:
    """One program's tests, from the first message to the verdict."""

    def __init__(self, parts: _Parts, channel: Channel, verdict: int) -> None:
        self._parts, self._channel, self._verdict = parts, channel, verdict
        self._held: dict[int, bool] = {}
        self._failed = ""

    def hold(self) -> None:
        while True:
            try:
                message = self._channel.receive()
            except wire.Broken:
                return judge._write(self._verdict, {"gone": "it ended its process, or broke the connection"})
            if "site" in message:
                self._answer(message)
            elif "test" in message:
                judge._write(self._verdict, {"test": message["test"], **self._outcome(message)})
                self._held.clear()
                self._failed = ""
            elif "setup" in message:
                return judge._write(self._verdict, {"code": _raised(message["setup"]), "setting_up": True})
            elif message.get("raised"):
                return judge._write(self._verdict, {"code": _raised(message["raised"])})
            elif "done" in message:
                return judge._write(self._verdict, {"done": True})

    def _outcome(self, message: dict[str, Any]) -> dict[str, Any]:
        raised = message["raised"]
        if message["tampered"]:
            return {"outcome": "wrong", "said": f"the code changed {message['tampered']}, which the tests lean on"}
        if raised is not None:
            kind, said = str(raised[0]), f"{raised[0]}: {raised[1]}" if raised[1] else str(raised[0])
            if kind in ("AssertionError", "_Failed"):
                return {"outcome": "wrong", "kind": kind, "said": said if raised[1] else self._failed or said}
            return {"outcome": "raised", "kind": kind, "said": said}
        for number in self._parts.of_test[message["test"] + 1]:
            if not self._held.get(number, False):
                return {"outcome": "wrong", "said": self._failed or "an assertion was not reached, or did not hold"}
        return {"outcome": "passed" if message["passed"] else "wrong", "said": "its run did not come to its end"}

    def _answer(self, message: dict[str, Any]) -> None:
        number, whole = message["site"], message["whole"]
        try:
            if all(whole):
                reply: dict[str, Any] = {
                    "holds": bool(self._parts.values(number, [wire.decode(item, _none) for item in message["given"]]))
                }
            else:
                reply = self._ask(number, message["given"], whole)
        except wire.Broken:
            raise
        except Exception as error:  # noqa: BLE001 - the assertion raises, as it would beside the program
            reply = {"holds": False, "raise": [type(error).__name__, str(error)[:500]]}
        holds = bool(reply.get("holds"))
        self._held[number] = self._held.get(number, True) and holds
        if not holds and not self._failed:
            self._failed = f"AssertionError: {ast.unparse(self._parts.sites[number].expression)}"[:300]
        self._channel.send(reply)

    def _ask(self, number: int, given: list[Any], whole: list[bool]) -> dict[str, Any]:
        """Ask the run about the expected values and about decoys, in an order that says nothing."""
        site = self._parts.sites[number]
        real = {f"fixed{n}": plain.encode(value)[0] for n, value in enumerate(site.fixed)}
        cases = [("real", real)]
        for name, need in site.needs.items():
            if need != "none":
                cases += [
                    (name, {**real, name: plain.encode(value)[0]})
                    for value in self._others(site, name, need, given, whole)
                ]
        cases = decoys.shuffled(cases)
        self._channel.send({"ask": [case for _, case in cases]})
        answers = self._channel.receive()["answers"]
        if len(answers) != len(cases):
            raise wire.Broken("answers to other questions")
        said: dict[str, list[int]] = {}
        for (name, _), answer in zip(cases, answers, strict=True):
            said.setdefault(name, []).append(answer)
        if said["real"] == [-1]:
            return {"holds": False, "raised": next(place for place, case in enumerate(cases) if case[0] == "real")}
        return {"holds": said["real"] == [1] and all(_is_honest(site, name, said) for name in said if name != "real")}

    def _others(self, site: Site, name: str, need: str, given: list[Any], whole: list[bool]) -> list[Any]:
        place = int(name[5:])
        if name.startswith("given") and not whole[place]:
            lonely = len(site.given) > 1 and not any(whole) and not site.fixed and need == "all"
            return list(decoys.FOREIGN) if lonely else []
        value = site.fixed[place] if name.startswith("fixed") else wire.decode(given[place], _none)
        return decoys.near(value) + (decoys.far(value) if need == "some" else [])


def _is_honest(site: Site, name: str, said: dict[str, list[int]]) -> bool:
    answers = said[name]
    if site.needs[name] == "all":
        return 1 not in answers
    return any(answer != 1 for answer in answers)


class _Main(ast.NodeTransformer):
    """`unittest.main(...)` becomes a call of the run's own, which does not end the process."""

    def __init__(self, name: str) -> None:
        self._name = name

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr == "main"
            and ast.unparse(node.func) == "unittest.main"
        ):
            return ast.copy_location(ast.Call(ast.Name(self._name, ast.Load()), [], []), node)
        return self.generic_visit(node)


def _waiting_functions(trees: list[ast.Module], used: frozenset[str]) -> list[str]:
    """`def test_...():` that the tests do not call themselves: pytest would."""
    found = [
        node
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    ]
    return [node.name for node in found if node.name not in used and not node.args.args]


def _changed(nodes: list[ast.AST]) -> list[str]:
    """Modules that the tests themselves change."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            found.add(ast.unparse(node.value).partition(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            found.add(node.value.partition(".")[0])
    return sorted(found & _TOPS)


def _is_optional(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.level > 0 or node.module in (None, "__future__", "solution"))


def _function(site: Site) -> Any:
    names = [ast.arg(name) for name in site.names]
    arguments = ast.arguments(posonlyargs=[], args=names, kwonlyargs=[], kw_defaults=[], defaults=[])
    tree = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, site.expression)))
    return compile(tree, "<tests>", "eval", dont_inherit=True).co_consts[0]


def _call(code: Any, space: dict[str, Any], words: dict[str, Any]) -> Any:
    return types.FunctionType(code, space)(**words)


def _packed(codes: Any) -> str:
    return base64.b64encode(marshal.dumps(codes)).decode()


def _raised(told: list[str]) -> dict[str, str]:
    return {"raised": str(told[0]), "said": str(told[1])}


def _none(message: list[Any]) -> Any:
    raise wire.Broken("a reference where there is none")
