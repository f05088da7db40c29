"""Tests of code out of the columns of data sets: MBPP, HumanEval, APPS, TACO and LiveCodeBench in the forms they are published in."""

import ast
import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.errors import RewardError

COLUMNS = ("tests", "test_list", "test", "input_output", "test_cases", "private_test_cases", "public_test_cases")
"""Columns searched for tests, in this order; LiveCodeBench's columns are joined."""
_TOGETHER = ("private_test_cases", "public_test_cases")
_LARGEST = 2**28
"""Bytes of a compressed column when it is unpacked."""
_MOST_SPELLINGS = 4

PRELUDE = (
    "from typing import *; "
    "import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator, random, re, string, sys; "
    "from bisect import bisect_left, bisect_right, insort; "
    "from collections import Counter, OrderedDict, defaultdict, deque; from copy import deepcopy; "
    "from functools import cache, cmp_to_key, lru_cache, reduce; "
    "from heapq import heapify, heappop, heappush, heappushpop, heapreplace, nlargest, nsmallest; "
    "from itertools import accumulate, chain, combinations, groupby, pairwise, permutations, product, zip_longest; "
    "from math import ceil, comb, factorial, floor, gcd, inf, isqrt, lcm, log2, sqrt\n"
)
"""Imports that coding sites provide for a solution, so that published solutions lack them."""


@dataclass(frozen=True)
class FunctionCall:
    """A test that calls `name`, or the method of that name of a class `Solution`, with `arguments` and expects one of `expected`."""

    name: str
    arguments: tuple[Any, ...]
    expected: tuple[Any, ...]

    def statement(self, is_method: bool) -> str:
        """The test as an assertion; one about fractions, or about lists in lists in lists, uses the function of `NEAR`."""
        call = f"{'Solution().' if is_method else ''}{self.name}({', '.join(map(_literal, self.arguments))})"
        if any(_needs_near(value) for value in self.expected):
            return f"assert near_any({call}, [{', '.join(map(_literal, self.expected))}])"
        if len(self.expected) == 1:
            return f"assert {call} == {_literal(self.expected[0])}"
        return f"assert {call} in ({', '.join(map(_literal, self.expected))})"


NEAR = """
def near_any(found, values):
    return any(near_enough(found, value) for value in values)

def near_enough(found, expected):
    if isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(near_enough, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(near_enough(found[key], expected[key]) for key in expected)
    is_number = type(found) in (int, float) and type(expected) in (int, float)
    if is_number and float in (type(found), type(expected)) and abs(expected) < 1e300:
        return abs(found - expected) <= 1e-8 + 1e-5 * abs(expected)
    return found == expected
"""
"""Equality with the tolerance of `numpy.allclose` for fractions, as the harness of APPS has it; a tuple is a list."""


def _needs_near(value: Any) -> bool:
    """True for what `==` with a few spellings does not cover: a fraction in it, or lists of the third depth."""
    if isinstance(value, float):
        return value == value and abs(value) != float("inf")
    if isinstance(value, Mapping):
        return any(map(_needs_near, value.values())) or any(isinstance(item, list | tuple) for item in value.values())
    if isinstance(value, list | tuple):
        deep = (inner for item in value if isinstance(item, list | tuple) for inner in item)
        return any(isinstance(item, list | tuple | Mapping) for item in deep) or any(map(_needs_near, value))
    return False


def row_tests(columns: Mapping[str, Any], column: str | None) -> list[Any]:
    """The row's tests: statements, pairs of input and output, or `FunctionCall`s; empty where it has none.

    Raises RewardError for any other form.
    """
    name = column or next((name for name in COLUMNS if not _is_empty(columns.get(name))), None)
    if name is None:
        return []
    if column is None and name in _TOGETHER:
        return [_exact(test) for part in _TOGETHER for test in _tests_in(part, columns)]
    return _tests_in(name, columns)


def _exact(test: Any) -> Any:
    """A test of LiveCodeBench, whose harness compares the numbers that scripts print exactly."""
    return {**test, "exact": True} if isinstance(test, dict) else test


def _tests_in(name: str, columns: Mapping[str, Any]) -> list[Any]:
    tests = columns.get(name)
    if _is_empty(tests):
        return []
    if name == "test" and columns.get("entry_point"):
        return [f"{tests}\ncheck({columns['entry_point']})"]
    if isinstance(tests, str) and name in _TOGETHER and not tests.lstrip().startswith(("{", "[")):
        tests = _unpack(tests, name)
    elif isinstance(tests, str) and tests.lstrip().startswith(("{", "[")):
        tests = _load(tests)
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        return _of_lists(tests)
    if isinstance(tests, str | Mapping):
        tests = [tests]
    if not isinstance(tests, Sequence):
        raise RewardError(
            f"column {name!r} holds {type(tests).__name__}, which is no test; use text, a list, or pairs."
        )
    return [_of_case(case, columns) for case in tests]


def for_program(tests: Sequence[Any], program: str) -> tuple[str, list[Any], str]:
    """The program, its tests as the sandbox takes them, and code for these: calls of a function become assertions, and its usual
    imports are added."""
    if not any(isinstance(test, FunctionCall) for test in tests):
        return program, list(tests), ""
    is_method = {name: _is_method(program, name) for name in {getattr(test, "name", "") for test in tests}}
    statements = [test.statement(is_method[test.name]) if isinstance(test, FunctionCall) else test for test in tests]
    return (program if "__future__" in program else PRELUDE + program), statements, NEAR


def _is_method(program: str, name: str) -> bool:
    """True if the program has a class `Solution` which has `name`, or must have inherited it; false of what is no Python."""
    try:
        body = ast.parse(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the sandbox says so
        return False
    solutions = [node for node in body if isinstance(node, ast.ClassDef) and node.name == "Solution"]
    return any(name in _defines(node.body) for node in solutions) or (bool(solutions) and name not in _defines(body))


def _defines(body: list[ast.stmt]) -> set[str]:
    named = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    targets = [item for node in body if isinstance(node, ast.Assign) for item in node.targets]
    return named | {item.id for item in targets if isinstance(item, ast.Name)}


def _of_lists(tests: Mapping[str, Any]) -> list[Any]:
    """APPS and TACO: lists of inputs and outputs, for a script or, with `fn_name`, for a function."""
    inputs, outputs, name = tests["inputs"], tests["outputs"], tests.get("fn_name")
    if len(inputs) != len(outputs):
        raise RewardError(f"{len(inputs)} inputs and {len(outputs)} outputs do not make pairs.")
    if not name:
        return [_pair(stdin, expected) for stdin, expected in zip(inputs, outputs, strict=True)]
    calls = []
    for arguments, expected in zip(inputs, outputs, strict=True):
        if not isinstance(arguments, list | tuple):
            raise RewardError(
                f"fn_name needs each of inputs to be the list of its arguments, not {type(arguments).__name__}."
            )
        several = [expected, expected[0]] if isinstance(expected, list | tuple) and len(expected) == 1 else [expected]
        calls.append(
            _call(name, [_with_numbers(item) for item in arguments], [_with_numbers(item) for item in several])
        )
    return calls


def _of_case(case: Any, columns: Mapping[str, Any]) -> Any:
    """LiveCodeBench and its kin: a test says itself whether it is for a function, whose arguments are lines of JSON."""
    if not isinstance(case, Mapping) or not {"input", "output"} <= case.keys():
        return case
    kind = str(case.get("testtype") or case.get("type") or "stdin")
    if kind not in ("functional", "function_call"):
        return _pair(case["input"], case["output"])
    name = case.get("fn_name") or _function_of(columns)
    if not name:
        raise RewardError(
            f"a test of type {kind!r} names no function; give fn_name, or func_name in the column metadata."
        )
    arguments, expected = case["input"], case["output"]
    if isinstance(arguments, str):
        arguments = [_value(line) for line in arguments.split("\n") if line.strip()]
    return _call(str(name), list(arguments), [_value(expected) if isinstance(expected, str) else expected])


def _function_of(columns: Mapping[str, Any]) -> Any:
    metadata = columns.get("metadata")
    metadata = _load(metadata) if isinstance(metadata, str) else metadata
    return (metadata.get("func_name") if isinstance(metadata, Mapping) else None) or columns.get("fn_name")


def _call(name: Any, arguments: Sequence[Any], expected: Sequence[Any]) -> FunctionCall:
    if not str(name).isidentifier():
        raise RewardError(f"fn_name {name!r} is no name of a function.")
    spellings = [spelling for value in expected for spelling in _spellings(value)]
    return FunctionCall(str(name), tuple(arguments), tuple(spellings))


def _spellings(value: Any) -> list[Any]:
    """JSON knows lists alone: a tuple for the outer one, for the inner ones, or for both, is the same answer."""
    if not isinstance(value, list):
        return [value]
    inner = [tuple(item) if isinstance(item, list) else item for item in value]
    spellings = [value, tuple(value), *([inner, tuple(inner)] if any(isinstance(item, list) for item in value) else [])]
    return spellings[:_MOST_SPELLINGS]


def _with_numbers(value: Any) -> Any:
    """A dictionary with integer keys restored, which JSON has turned into text, as the harness of APPS reads it."""
    if isinstance(value, Mapping) and value and all(str(key).lstrip("-").isdigit() for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def _literal(value: Any) -> str:
    """Python for a value of JSON."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f"float({str(value)!r})"
    if isinstance(value, list | tuple):
        inside = ", ".join(map(_literal, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _pair(stdin: Any, expected: Any) -> dict[str, str]:
    return {"input": _lines(stdin), "output": _lines(expected)}


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RewardError(f"a test of a function has {text[:60]!r} where a value of JSON belongs.") from error


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # a statement that starts with a bracket
        return text


class _TextOnly(pickle.Unpickler):
    """Reads text out of a pickle, and nothing that would import or run anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise RewardError(f"a column of tests holds a pickle of {module}.{name}; only text is read.")


def _unpack(text: str, name: str) -> Any:
    """LiveCodeBench's private tests: base64 of zlib of a pickle of JSON."""
    try:
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(base64.b64decode(text, validate=True), _LARGEST)
        if unpacking.unconsumed_tail:
            raise RewardError(f"column {name!r} unpacks to more than {_LARGEST >> 20} MiB, which is not read.")
        return json.loads(_TextOnly(io.BytesIO(data)).load())
    except (ValueError, zlib.error, pickle.UnpicklingError, EOFError, TypeError) as error:
        raise RewardError(
            f"column {name!r} is neither JSON nor tests packed as LiveCodeBench packs them: {error}."
        ) from error
