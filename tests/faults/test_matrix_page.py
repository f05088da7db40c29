"""The page of faults names the tests that do them: each exists, and no row is missing."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "faults.md").read_text()
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)))
ELSEWHERE = {*range(34, 40), 42, 43}


@cache
def names_in(file: str) -> frozenset[str]:
    (path,) = TESTS.rglob(file)
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_row_is_there_once() -> None:
    rows = [int(row) for row in re.findall(r"^\| R(\d\d) \|", PAGE, re.MULTILINE)]
    assert rows == [row for row in range(1, 46) if row not in ELSEWHERE]


def test_each_row_names_a_test_or_says_why_there_is_none() -> None:
    for row in re.findall(r"^\| R\d\d \|.*$", PAGE, re.MULTILINE):
        assert "::test_" in row or "nothing to kill" in row, row


def test_each_test_that_the_page_names_exists() -> None:
    assert len(NAMED) > 100
    assert [f"{file}::{name}" for file, name in NAMED if name not in names_in(file)] == []
