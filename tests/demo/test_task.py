"""The demo's task: problems whose answers are right, splits that share no calculation, a reward that cannot be talked into 1."""

import random

import pytest

from covey.demo.task import TEMPLATES, calculate, draw, final_answer, problems, reward, rows, worked


def test_the_same_seed_gives_the_same_problems_and_another_seed_others():
    assert rows("train", 50, seed=1) == rows("train", 50, seed=1)
    assert rows("train", 50, seed=1) != rows("train", 50, seed=2)


def test_no_held_out_calculation_is_ever_trained_on():
    train = {(p.template, p.numbers) for p in problems("train", 4096)}
    held_out = {(p.template, p.numbers) for p in problems("test", 300)}
    assert not train & held_out
    assert not {p.question for p in problems("train", 4096, seed=7)} & {p.question for p in problems("test", 300)}


def test_answers_are_those_of_the_operations_by_hand():
    for problem in (draw(random.Random(i)) for i in range(300)):
        value = problem.numbers[0]
        for operation, number in zip(problem.operations, problem.numbers[1:], strict=True):
            value = calculate(operation, value, number)
        assert value == problem.answer
        assert 1 <= value <= 99
        assert all(str(number) in problem.question for number in problem.numbers)


def test_every_kind_of_problem_is_in_both_splits():
    for split in ("train", "test"):
        assert {p.template for p in problems(split, 300)} == set(range(len(TEMPLATES)))


def test_a_worked_answer_scores_and_a_misreading_does_not():
    problem = next(p for p in problems("train", 50) if p.operations == "+-")
    completions = [worked(problem), worked(problem, "+"), worked(problem, "++")]
    assert reward(completions, [str(problem.answer)] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "text, found",
    [
        ("3 + 4 = 7 #### 7", "7"),
        ("#### 07", "7"),
        ("#### 7 apples", None),
        ("7", None),
        ("", None),
        ("#### 7 #### 8", "8"),
    ],
)
def test_only_a_number_at_the_very_end_is_an_answer(text, found):
    assert final_answer(text) == found


def test_chat_completions_score_like_text():
    assert reward([[{"role": "assistant", "content": "#### 5"}]], ["5"]) == [1.0]
