"""Reference solutions of MBPP are judged right, and wrong once they are mutated: a fourth and a 32nd of them by day, all of them nightly."""

from __future__ import annotations

import ast
import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from covey.sandbox import Sandbox

MBPP = Path(__file__).parents[1] / "data" / "mbpp" / "mbpp.jsonl"
pytestmark = pytest.mark.slow


class _Spoil(ast.NodeTransformer):
    """Functions return something that no test expects."""

    def visit_Return(self, node: ast.Return) -> ast.Return:
        return ast.Return(ast.Constant("no test expects this"))


@pytest.mark.parametrize("one_of, one_mutant_of", [(4, 32), pytest.param(1, 1, marks=pytest.mark.nightly)])
def test_mbpp_references_pass_and_their_mutants_fail(one_of: int, one_mutant_of: int) -> None:
    rows = [json.loads(line) for line in MBPP.read_text().splitlines()]
    assert len(rows) == 974
    mutants, rows = rows[::one_mutant_of], rows[::one_of]
    with Sandbox() as sandbox, ThreadPoolExecutor(sandbox.workers) as threads:

        def verdict(row: dict, code: str) -> bool:
            return sandbox.run(code, row["test_list"], setup=row["test_setup_code"], timeout=60).passed

        right = list(threads.map(lambda row: verdict(row, row["code"]), rows))
        wrong = list(threads.map(lambda row: verdict(row, _mutant(row["code"])), mutants))
    assert [row["task_id"] for row, passed in zip(rows, right, strict=True) if not passed] == []
    assert [row["task_id"] for row, passed in zip(mutants, wrong, strict=True) if passed] == []


def _mutant(code: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that are none, in the references
        return ast.unparse(ast.fix_missing_locations(_Spoil().visit(ast.parse(code))))
