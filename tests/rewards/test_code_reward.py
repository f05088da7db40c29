"""The code reward: which text is the program, which columns are its tests, and what its score is."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from covey.errors import ConfigError, RewardError
from covey.rewards import Scorer
from covey.rewards.builtin.code import Code, program_of, row_tests
from covey.types import Completion, Group, Prompt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can isolate")
RIGHT, WRONG = "def double(x):\n    return 2 * x", "def double(x):\n    return x + 2"
TESTS = ["assert double(2) == 4", "assert double(5) == 10"]


@pytest.mark.parametrize(
    "text, program",
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```py\nx = 1\n```\nBetter:\n```\nx = 2\n```", "x = 2\n"),
        ("  ```python\nx = 1\n  ```", "x = 1\n"),
        ("```python\nx = 1", None),
        ("```python\nx = 1\n```\nand then ```python\nx = 2", None),
        ("", ""),
    ],
)
def test_the_program_is_the_last_fenced_block(text: str, program: str | None) -> None:
    assert program_of(text) == program


@pytest.mark.parametrize(
    "columns, tests",
    [
        ({"tests": TESTS}, TESTS),
        ({"test_list": TESTS, "answer": "x"}, TESTS),
        ({"tests": "assert f() == 1"}, ["assert f() == 1"]),
        ({"tests": "[f() for _ in range(3)]"}, ["[f() for _ in range(3)]"]),
        ({"test": "def check(candidate): pass", "entry_point": "f"}, ["def check(candidate): pass\ncheck(f)"]),
        ({"input_output": '{"inputs": ["1\\n", ["2", "3"]], "outputs": ["2", "5"]}'},
         [{"input": "1\n", "output": "2"}, {"input": "2\n3", "output": "5"}]),
        ({"tests": json.dumps([{"input": "1", "output": "2"}])}, [{"input": "1", "output": "2"}]),
        ({"tests": None}, []), ({"tests": ""}, []), ({}, []), ({"tests": []}, []),
    ],
)  # fmt: skip
def test_tests_are_read_from_the_columns_that_data_sets_use(columns: dict[str, Any], tests: list[Any]) -> None:
    assert row_tests(columns, None) == tests


def test_a_column_of_any_name_can_be_given() -> None:
    assert row_tests({"tests": ["x"], "mine": ["y"]}, "mine") == ["y"]
    assert Code(column="mine").needs_one_of == ("mine",)


def test_tests_that_are_none_are_refused_in_a_sentence() -> None:
    with pytest.raises(RewardError, match="column 'tests' holds int, which is no test"):
        row_tests({"tests": 3}, None)
    with pytest.raises(RewardError, match="2 inputs and 1 outputs do not make pairs"):
        row_tests({"input_output": {"inputs": [1, 2], "outputs": [1]}}, None)
    with pytest.raises(ConfigError, match=r"code\(timeout=0\)"):
        Code(timeout=0)


def test_a_completion_is_scored_by_its_program() -> None:
    code = Code(workers=1)
    assert code(f"Sure!\n```python\n{RIGHT}\n```", tests=TESTS) == 1.0
    assert code([{"role": "assistant", "content": f"```\n{RIGHT}\n```"}], tests=TESTS) == 1.0
    assert code(f"```python\n{WRONG}\n```", tests=TESTS) == 0.0
    assert code("```python\n" + RIGHT, tests=TESTS) == 0.0  # cut off
    assert code("I do not know.", tests=TESTS) == 0.0
    assert code(RIGHT, tests=None) is None
    assert code("print(int(input()) * 2)", input_output='{"inputs": ["4"], "outputs": ["8"]}') == 1.0


def test_partial_scores_are_shares_of_the_tests() -> None:
    assert Code(workers=1, partial=True)(WRONG, tests=TESTS) == 0.5
    assert Code(workers=1)(WRONG, tests=TESTS) == 0.0


def test_tests_that_cannot_be_run_are_an_error_and_no_score() -> None:
    with pytest.raises(RewardError, match="the tests cannot be run: SyntaxError"):
        Code(workers=1)(RIGHT, tests=["assert double(2 =="])


def test_what_became_of_programs_is_logged() -> None:
    metrics: dict[str, float] = {}
    extras: dict[str, list[Any]] = {}
    Code(workers=1, timeout=0.5)(
        "while True: pass", tests=TESTS, log_metric=metrics.__setitem__, log_extra=extras.__setitem__
    )
    assert metrics["code/timeout"] == 1.0
    assert metrics["code/passed"] == 0.0
    assert extras["code"][0].startswith("timeout: ")


def test_programs_are_run_side_by_side_as_their_completions_come_in() -> None:
    prompt = Prompt(uid="0:0", text="Double it.", token_ids=(1, 2, 3), columns={"tests": TESTS})
    texts = (RIGHT, WRONG, "import os; os._exit(0)", "while True: pass")
    answers = tuple(Completion(token_ids=torch.tensor([5, 6]), text=text, finish="stop") for text in texts)
    scorer = Scorer.of([Code(workers=2, timeout=1)])
    (scored,) = scorer.score([Group(prompt=prompt, completions=answers)])
    scorer.close()
    assert scored.rewards is not None
    assert scored.rewards[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0]
