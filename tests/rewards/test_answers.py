"""Final answers: found in a text, compared by value."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from covey.rewards import resolve
from covey.rewards.builtin.answers import answer_text_of, final_answer, gold_answer, is_same, marked_answer, number

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k" / "test.jsonl"


@pytest.mark.parametrize(
    "text, answer",
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 7\nno wait\n#### 8\n", "8"),
        ("####7", "7"),
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{f(\{1, 2\})} done", r"f(\{1, 2\})"),
        (r"#### 1 and \boxed{2}", "2"),
        (r"\boxed{2} and" + "\n#### 1", "1"),
        (r"\boxed{never closed", None),
        (r"\boxed 9", "9"),
        (r"\boxed{5} or \boxed{6}", "5, 6"),
        (r"\boxed{5}, but no: \boxed{6}", "6"),
        (r"\boxed{5}\boxed{}", None),
        ("####", None),
        ("the answer is 7", None),
        ("", None),
    ],
)
def test_the_last_mark_is_the_answer(text, answer):
    assert marked_answer(text) == answer


@pytest.mark.parametrize(
    "text, answer",
    [
        ("He pays 3 dollars, so 1,250 are left.", "1,250"),
        ("10-5=5", "5"),
        ("it is -3.5", "-3.5"),
        ("costs $1,234.50.", "$1,234.50"),
        ("one half is 1/2", "1/2"),
        ("gpt4 has no number alone", None),
        ("#### 7 then 9", "7 then 9"),
        ("no number", None),
        ("The answer is $2$ (that is, 2 of the 5).", "$2$"),
        ("60 61 62", None),
        ("5, 6 or 7", None),
        ("The answer is not 72.", None),
        ("72%%", "72%%"),
        ("5 million", "5 million"),
        (r"\boxed{72", None),
        ("72\n####", None),
    ],
)
def test_without_a_mark_it_is_the_last_number(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "text, value",
    [
        ("42", 42),
        ("-3", -3),
        ("1,250.00", 1250),
        ("$1,250", 1250),
        ("0.1", Fraction(1, 10)),
        (".5", Fraction(1, 2)),
        ("3/4", Fraction(3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\$50", 50),
        (r"50\%", 50),
        (r"12\text{ cm}", 12),
        ("7.", 7),
        (r"3\frac{1}{2}", Fraction(7, 2)),
        ("-3 1/2", Fraction(-7, 2)),
        (r"0.\overline{3}", Fraction(1, 3)),
        ("1.5e3", 1500),
        ("1,2", None),
        ("1, 200", None),
        ("1 2", None),
        ("5!", None),
        ("5 million", 5_000_000),
        (r"3\times10^8", 300_000_000),
        (r"1\text{ or }2", None),
        (r"5\text{ hours }30", None),
        ("1/0", None),
        ("2^3", None),
        ("x", None),
        ("", None),
        ("9" * 1000, None),
    ],
)
def test_numbers_are_exact(text, value):
    assert number(text) == value


@pytest.mark.parametrize(
    "answer, gold, same",
    [
        ("72", "72", True),
        ("72.0", "72", True),
        ("72 dollars", "72", True),
        ("x = 5", "5", False),
        ("50%", "50", False),
        ("5 cm", "5 m", False),
        ("1, 2", "12", False),
        ("1 2", "12", False),
        ("1 000", "1000", True),
        (r"3\frac{1}{2}", "3.5", True),
        (r"\text{not }5", "5", False),
        ("$-10", "-10", True),
        ("５", "5", True),
        ("71", "72", False),
        ("7", "72", False),
        ("72 73", "72", False),
        ("x^2", "2", False),
        ("2x", "2", False),
        ("0.333333", "1/3", False),
        ("Paris", "paris", True),
        (r"\text{Paris}", "Paris", True),
        ("London", "Paris", False),
        ("", "", False),
        (r"\sqrt{2}", r"\sqrt{2}", True),
        (r"\left(1,2\right)", "(1,2)", True),
    ],
)
def test_sameness_is_by_value(answer, gold, same):
    assert is_same(answer, gold) is same


def test_every_gsm8k_solution_holds_a_number_that_equals_itself():
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        gold = gold_answer(row["answer"])
        assert number(gold) is not None, row
        assert is_same(final_answer(row["answer"]), gold)
    assert len(rows) == 1319


def turns(*texts):
    """An answer of several turns, with a tool's between them."""
    between = {"role": "tool", "name": "calculator", "content": r"\boxed{99}"}
    messages = [message for text in texts for message in ({"role": "assistant", "content": text}, between)]
    return messages[:-1]


@pytest.mark.parametrize(
    "texts, answer",
    [
        ((r"I guess \boxed{5}", r"\boxed{6}"), "6"),
        ((r"\boxed{5}", r"\boxed{6} or \boxed{7}"), "6, 7"),
        ((r"\boxed{6}", "Is there more that I can do in 3 steps?"), "6"),
        ((r"<think>5?</think> \boxed{6}", "<think>all done</think> Bye."), "6"),
        ((r"\boxed{5}", "#### 6"), "6"),
        ((r"\boxed{6}", "<answer>six, after 3 checks</answer>"), "6"),
        (("#### 6", r"<think>\boxed{5}</think> Bye."), "6"),
        (("The answer is 6.", "I used 2 tools."), "6"),
        ((r"\boxed{5}", r"now \boxed{6"), None),
        (("No idea.", "Sorry."), None),
    ],
)
def test_of_several_turns_the_last_that_marks_an_answer_holds_it(texts, answer):
    completion = turns(*texts)
    assert final_answer(answer_text_of(completion)) == answer
    scores = [resolve(name).call(completions=[completion], answer=[answer or "6"]) for name in ("math", "exact")]
    assert scores == [[float(answer is not None)]] * 2


def test_a_choice_is_that_of_the_last_turn_that_marks_one():
    score = resolve("choice").call
    assert score(completions=[turns(r"\boxed{A}", "<answer>B</answer>", "Bye.")], answer=["B"]) == [1.0]
