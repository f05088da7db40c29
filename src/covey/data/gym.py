"""Reasoning Gym's tasks by name: `gym:leg_counting` as a data set whose rows say how to find their own grader again."""

import ast
import inspect
import json
import re
from functools import lru_cache
from typing import Any

from covey.errors import DataError, did_you_mean, needed

COLUMN = "gym"
"""The column that holds a row's task, seed and place, as JSON."""
DEFAULT_ROWS = 1000
_SELECTION = re.compile(r"(?P<task>\w+)(\[(?P<start>\d*):(?P<stop>\d*)\])?")

_LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose grader gives the answer to Python's `eval` when it is not in the form that was asked for."""
_FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Tasks whose grader gives the answer to sympy's parser, which evaluates it as Python."""
_EVALUATES = re.compile(
    r"(?<![\w.])(?:eval|exec|sympify)\((?!entry\[)|sympy\.parse_expr\(|sp\.parse_expr\(|\bparse_expr\(answer"
)
_FUNCTIONS = frozenset("Abs acos asin atan ceiling cos cosh exp floor ln log sin sinh sqrt tan tanh".split())  # noqa: SIM905
_LONGEST_ANSWER = 5000
_LARGEST_POWER = 100


def rows(selection: str, seed: int = 0) -> list[dict[str, Any]]:
    """The rows of `task`, `task[:500]` or `task[500:600]`: `prompt`, `answer` and the column that the reward `gym` reads.

    A row depends on the seed and its place alone. Raises DataError for a task that is not there, ConfigError without the
    library.
    """
    match = _SELECTION.fullmatch(selection)
    if match is None:
        raise DataError(f"gym:{selection} cannot be read; write gym:leg_counting or gym:leg_counting[:500].")
    start, stop = int(match["start"] or 0), int(match["stop"] or DEFAULT_ROWS)
    if stop <= start:
        raise DataError(f"gym:{selection} has no rows; the second number must be above the first.")
    made = task(match["task"], seed, stop)
    entries = [made[i] for i in range(start, stop)]
    where = [json.dumps({"task": match["task"], "seed": seed, "place": i, "size": stop}) for i in range(start, stop)]
    return [
        {"prompt": entry["question"], "answer": str(entry["answer"]), COLUMN: place}
        for entry, place in zip(entries, where, strict=True)
    ]


def score(answer: str, where: str) -> float:
    """Score of an answer by the task's own grader, from 0 to 1; 0 for an answer that the grader would run as a program."""
    location = json.loads(where)
    made, entry = _entry(location["task"], location["seed"], location["place"], location["size"])
    if len(answer) > _LONGEST_ANSWER or not is_harmless(location["task"], answer):
        return 0.0
    return float(made.score_answer(answer, entry))


def is_harmless(name: str, answer: str) -> bool:
    """True if this answer is safe for the task's grader: a plain value or a formula, where the grader evaluates answers."""
    if name in _LITERALS:
        return _is_literal(answer) or (re.fullmatch(r"[\w\s,-]*", answer) is not None and "__" not in answer)
    return name not in _FORMULAS or _is_formula(answer)


@lru_cache(maxsize=32)
def task(name: str, seed: int, size: int) -> Any:
    """A task of Reasoning Gym, once it is known that its grader does not run answers."""
    with needed("gym: tasks need Reasoning Gym", "gym"):
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    if name not in DATASETS:
        raise DataError(f"Reasoning Gym has no task {name!r}.{did_you_mean(name, DATASETS)}")
    made = reasoning_gym.create_dataset(name, seed=seed, size=size)
    if evaluates(type(made)) and name not in _LITERALS | _FORMULAS:
        raise DataError(f"The grader of {name!r} may run what a model writes as a program, so it is not used here.")
    return made


def evaluates(kind: type) -> bool:
    """True if a grader's source hands text to `eval` or sympy's parser."""
    return _EVALUATES.search(inspect.getsource(kind.score_answer)) is not None  # type: ignore[attr-defined]


@lru_cache(maxsize=10_000)
def _entry(name: str, seed: int, place: int, size: int) -> tuple[Any, dict[str, Any]]:
    made = task(name, seed, size)
    return made, made[place]


def _is_literal(answer: str) -> bool:
    try:
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _is_formula(answer: str) -> bool:
    """Numbers, letters, operators and the functions of school; nothing else that Python knows."""
    try:
        tree = ast.parse(answer.strip().replace("^", "**"), mode="eval")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return all(_is_allowed(node) for node in ast.walk(tree))


def _is_allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and not isinstance(node.value, bool)
    if isinstance(node, ast.Name):
        return len(node.id) == 1 or node.id in _FUNCTIONS
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _is_small_power(node.right) and not any(isinstance(inner, ast.Pow) for inner in ast.walk(node.left))
    plain = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load)
    return isinstance(node, plain)


def _is_small_power(power: ast.expr) -> bool:
    """At most two numbers up to 100 and any letters, without a power of its own."""
    numbers = [inner.value for inner in ast.walk(power) if isinstance(inner, ast.Constant)]
    has_tower = any(isinstance(inner, ast.Pow) for inner in ast.walk(power))
    small = all(isinstance(value, int | float) and abs(value) <= _LARGEST_POWER for value in numbers)
    return small and len(numbers) <= 2 and not has_tower
