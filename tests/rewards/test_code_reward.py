"""The code reward: which text is the program, which columns are its tests, and what its score is."""

from __future__ import annotations

import base64
import json
import pickle
import sys
import zlib
from typing import Any

import pytest
import torch

from covey.errors import ConfigError, RewardError
from covey.process import cores
from covey.rewards import Scorer
from covey.rewards.builtin.code import Code, program_of
from covey.rewards.builtin.code_tests import FunctionCall, row_tests
from covey.sandbox import Sandbox, isolation, run, shared
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


def packed(cases: list[dict[str, str]]) -> str:
    """Private tests as LiveCodeBench publishes them."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


ROWS = {
    "APPS, a function": {
        "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, [7]]})
    },
    "LiveCodeBench": {
        "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
        "private_test_cases": packed([{"input": "3\n4", "output": "7", "testtype": "functional"}]),
        "metadata": json.dumps({"func_name": "add"}),
    },
    "cases that name it": {
        "test_cases": [{"type": "function_call", "fn_name": "add", "input": [3, 4], "output": 7}],
    },
}
ADD = {
    "a function": "def add(a, b):\n    return a + b",
    "a method": "class Solution:\n    def add(self, a: int, b: int) -> Optional[int]:\n        return reduce(operator.add, [a, b])",
}


@pytest.mark.parametrize("program", ADD)
@pytest.mark.parametrize("row", ROWS)
def test_tests_that_name_a_function_call_it_or_the_method_of_solution(row: str, program: str) -> None:
    code = Code(workers=1)
    assert code(f"```python\n{ADD[program]}\n```", **ROWS[row]) == 1.0
    assert code(f"```python\n{ADD[program].replace('+', '-').replace('.add,', '.sub,')}\n```", **ROWS[row]) == 0.0
    assert code("```python\ndef other(a, b):\n    return a + b\n```", **ROWS[row]) == 0.0


@pytest.mark.parametrize(
    "expected, answers, others",
    [
        ([1, 2], ["[1, 2]", "(1, 2)"], ["[2, 1]", "[1]"]),
        ([[1, 2], [3]], ["[[1, 2], [3]]", "[(1, 2), (3,)]", "((1, 2), (3,))"], ["[[1, 2]]", "[1, 2, 3]"]),
        (2.5, ["2.5", "5 / 2"], ["2.4"]),
        ({"1": True}, ["{1: True}"], ["{1: False}"]),
        (None, ["None"], ["0", "False"]),
    ],
)
def test_tuples_are_the_lists_of_json(expected: Any, answers: list[str], others: list[str]) -> None:
    row = {"input_output": {"fn_name": "f", "inputs": [["x"]], "outputs": [expected]}}
    code = Code(workers=1)
    assert [code(f"def f(x):\n    return {answer}", **row) for answer in answers] == [1.0] * len(answers)
    assert [code(f"def f(x):\n    return {answer}", **row) for answer in others] == [0.0] * len(others)


def test_public_and_private_tests_are_taken_together_and_stdin_ones_read() -> None:
    row = {
        "public_test_cases": json.dumps([{"input": "2\n", "output": "4\n", "testtype": "stdin"}]),
        "private_test_cases": packed([{"input": "3\n", "output": "6\n", "testtype": "stdin"}]),
    }
    assert Code(workers=1, partial=True)("print(4 if input() == '2' else 0)", **row) == 0.5
    assert Code(workers=1)("print(int(input()) * 2.0)", **row) == 1.0  # the same number, written otherwise


@pytest.mark.parametrize(
    "program, expected",
    [
        ("class Base:\n    def f(self, x): return x\nclass Solution(Base): pass", [1, 2]),
        ("class Solution:\n    f = lambda self, x: x", [1, 2]),
        ("class Solution:\n    @staticmethod\n    def f(x): return x", [1, 2]),
        ("def f(x): return (tuple(x), ((1, (2, 3)),))", [[1, 2], [[1, [2, 3]]]]),
        ("def f(x): return sum(x) / 9", 0.333333),
        ("def f(x): return {'a': [0.1 + 0.2, (1,)]}", {"a": [0.3, [1]]}),
        ("from functools import partial\nf = partial(lambda a, b: b, 1)", [1, 2]),
    ],
)
def test_functions_of_every_make_give_what_is_near_enough(program: str, expected: Any) -> None:
    row = {"input_output": {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [expected]}}
    wrong = {"input_output": {"fn_name": "f", "inputs": [[[1, 2]]], "outputs": [[expected, 0.5]]}}
    assert Code(workers=1)(program, **row) == 1.0
    assert Code(workers=1)(program, **wrong) == 0.0


class Dangerous:
    def __reduce__(self) -> Any:
        return (print, ("never",))


@pytest.mark.parametrize(
    "row, said",
    [
        ({"input_output": {"fn_name": "a b", "inputs": [[1]], "outputs": [1]}}, "fn_name 'a b' is no name of a function"),
        ({"input_output": {"fn_name": "f", "inputs": [1], "outputs": [1]}}, "the list of its arguments, not int"),
        ({"test_cases": [{"input": "1", "output": "1", "testtype": "functional"}]}, "names no function; give fn_name"),
        ({"private_test_cases": "no tests"}, "is neither JSON nor tests packed as LiveCodeBench packs them"),
        ({"private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(Dangerous()))).decode()}, "only text is read"),
        ({"tests": [{"fn_name": "f", "type": "function_call", "input": "x y", "output": "1"}]}, "a value of JSON belongs"),
    ],
)  # fmt: skip
def test_tests_of_functions_that_cannot_be_read_are_refused_in_a_sentence(row: dict[str, Any], said: str) -> None:
    with pytest.raises(RewardError, match=said):
        row_tests(row, None)


def test_arguments_keep_their_values() -> None:
    (call,) = row_tests(
        {"input_output": {"fn_name": "f", "inputs": [[{"1": "a"}, [1e400, -0.5], "x'"]], "outputs": [[]]}}, None
    )
    assert call == FunctionCall("f", ({1: "a"}, [float("inf"), -0.5], "x'"), ([], ()))
    assert call.statement(True) == "assert Solution().f({1: 'a'}, [float('inf'), -0.5], \"x'\") in ([], ())"


def test_a_column_of_any_name_can_be_given() -> None:
    assert row_tests({"tests": ["x"], "mine": ["y"]}, "mine") == ["y"]
    assert Code(column="mine").needs_one_of == ("mine",)


def test_tests_that_are_none_are_refused_in_a_sentence() -> None:
    with pytest.raises(RewardError, match="column 'tests' holds int, which is no test"):
        row_tests({"tests": 3}, None)
    with pytest.raises(RewardError, match="2 inputs and 1 outputs do not make pairs"):
        row_tests({"input_output": {"inputs": [1, 2], "outputs": [1]}}, None)
    with pytest.raises(ConfigError, match=r"Code's timeout=0 must be above 0"):
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


def test_the_reward_and_the_functions_of_the_sandbox_share_one() -> None:
    shared.cache_clear()
    assert isolation().safe
    assert run("x = 1").passed
    assert Code()(RIGHT, tests=TESTS) == 1.0
    assert shared.cache_info().currsize == 1


def test_what_became_of_programs_is_logged() -> None:
    metrics: dict[str, float] = {}
    extras: dict[str, list[Any]] = {}
    Code(workers=1, timeout=0.5)(
        "while True: pass", tests=TESTS, log_metric=metrics.__setitem__, log_extra=extras.__setitem__
    )
    assert metrics["code/timeout"] == 1.0
    assert metrics["code/passed"] == 0.0
    assert extras["code"][0].startswith("timeout: ")


@pytest.mark.slow
def test_programs_are_run_side_by_side_as_their_completions_come_in() -> None:
    prompt = Prompt(uid="0:0", text="Double it.", token_ids=(1, 2, 3), columns={"tests": TESTS})
    texts = (RIGHT, WRONG, "import os; os._exit(0)", "while True: pass")
    answers = tuple(Completion(token_ids=torch.tensor([5, 6]), text=text, finish="stop") for text in texts)
    scorer = Scorer.of([Code(workers=2, timeout=1)])
    (scored,) = scorer.score([Group(prompt=prompt, completions=answers)])
    scorer.close()
    assert scored.rewards is not None
    assert scored.rewards[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("before", ["", "<think>\n```python\nx = 1\n```\n</think>\n", "x = 1[/THINK]\n"])
def test_a_program_that_speaks_of_thoughts_is_whole(before: str) -> None:
    program = '```python\ndef answer(text):\n    return text.split("</think>")[-1]\n```\n'
    tests = ["assert answer('<think>5</think>6') == '6'"]
    assert Code(workers=1)(before + program, tests=tests) == 1.0
    assert Code(workers=1)(f"<think>\n{program}</think>\n```python\nunfinished", tests=tests) == 0.0


@pytest.mark.parametrize("column", ["test_imports", "setup", "test_setup_code", "test_setup"])
def test_code_before_the_tests_is_a_text_or_a_list_of_lines(column: str) -> None:
    reward, setup = Code(workers=1), "def twice(x): return 2 * x"
    for cell in (setup, ["import math", setup]):
        assert reward(RIGHT, tests=["assert double(4) == twice(4)"], **{column: cell}) == 1.0


def test_programs_run_at_once_only_as_the_ranks_of_a_machine_and_its_quota_allow(tmp_path, monkeypatch):
    """Or the programs of all ranks share the cores, and right ones run past their time."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(64))
    monkeypatch.setattr(cores, "_QUOTA", tmp_path / "cpu.max")
    expected = {"": 8, "max 100000": 8, "1550000 100000": 2, "50000 100000": 1}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for quota, workers in expected.items():
        (tmp_path / "cpu.max").write_text(quota)
        assert Code().__covey_reward__.concurrency == Sandbox().workers == workers
    assert Sandbox(3).workers == 3
