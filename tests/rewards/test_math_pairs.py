"""The reward `math` on pairs of a gold answer and a completion: no wrong answer is right, and bombs harm only themselves."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from math_pairs import BOMBS, pairs

from covey.errors import RewardError
from covey.rewards import resolve
from covey.rewards.builtin import math, verifier, verify
from covey.rewards.builtin.formulas import readable
from example_counts import examples
from kit import rest_nightly

GSM8K = Path(__file__).parents[1] / "data" / "gsm8k" / "test.jsonl"

math_reward = resolve("math").call


def scores(pairs, **columns):
    return math_reward(completions=[text for _, text in pairs], answer=[gold for gold, _ in pairs], **columns)


def test_every_pair_has_its_score():
    pytest.importorskip("math_verify")
    expected = {(gold, text): score for gold, text, score in pairs()}
    given_scores = dict(zip(expected, scores(list(expected)), strict=True))
    assert {pair: score for pair, score in given_scores.items() if score != expected[pair]} == {}


@pytest.mark.nightly
def test_bombs_are_wrong_and_the_answers_beside_them_are_judged():
    pytest.importorskip("math_verify")
    honest = [(r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}"), ("7", r"\boxed{7}"), ("x", r"\boxed{y}")]
    before = os.times()
    assert scores([*BOMBS, *honest, *BOMBS]) == [0.0] * len(BOMBS) + [1.0, 1.0, 0.0] + [0.0] * len(BOMBS)
    after = os.times()
    assert after.user - before.user < 5  # of this process: the bombs go off elsewhere


@pytest.mark.slow
def test_answers_that_use_their_time_up_are_wrong_however_many_there_are():
    pytest.importorskip("math_verify")
    bombs = [("x", rf"\boxed{{({n}x+1)^{{99999}}}}") for n in range(2, 36)]
    assert scores([*bombs, (r"\sqrt{2}", r"\boxed{2^{1/2}}")]) == [0.0] * len(bombs) + [1.0]


@pytest.mark.slow
def test_an_answer_gets_more_time_where_the_machine_is_slow(monkeypatch):
    pytest.importorskip("math_verify")
    request = {"gold": "2x-y+1=0", "answer": "y=2x+1", "anchored": False, "seconds": 0.01}
    assert verifier._at_pace(request, 1.0)[0]["end"] == "late"
    monkeypatch.setattr(
        verifier, "_REFERENCE_SECONDS", verifier._REFERENCE_SECONDS / 1000
    )  # as if all took so much longer
    reply, slowness = verifier._at_pace(request, 1.0)
    assert (reply, slowness > 100) == ({"equal": True, "end": "whole"}, True)


def test_a_formula_that_ends_its_own_process_is_wrong_and_one_that_is_ended_has_no_verdict():
    kill = lambda number: lambda: os.kill(os.getpid(), number)
    assert verifier._apart(kill(signal.SIGSYS), 5.0) == {"equal": False, "end": "whole"}
    assert verifier._apart(kill(signal.SIGKILL), 5.0)["end"] == "interrupted"


def test_a_comparison_that_another_process_ends_is_no_verdict():
    pytest.importorskip("math_verify")
    shared = verify.Verifier()
    shared.is_equal("x", "y", seconds=1)
    assert shared._process is not None
    number = shared._process.pid

    def kill_its_child():
        while not (children := Path(f"/proc/{number}/task/{number}/children").read_text().split()):
            time.sleep(0.01)
        os.kill(int(children[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill_its_child)
    killer.start()
    with pytest.raises(verify.InterruptedComparisonError):
        shared.is_equal("7", "99999999!", seconds=20)
    killer.join()
    with pytest.raises(TimeoutError) as late:
        shared.is_equal("7", "99999999!", seconds=0.05)
    assert late.type is TimeoutError
    shared.close()


def test_answers_behind_one_that_is_late_are_compared_side_by_side_and_stay_in_order(monkeypatch):
    monkeypatch.setattr(math, "cores_of_rank", lambda: 2)
    both = threading.Barrier(2)

    def late(seconds):
        raise TimeoutError

    def right(seconds):
        both.wait(timeout=20)  # for the other, which one thread would not come to
        return True

    assert math._verdicts([lambda seconds: False, late, right, right, lambda seconds: None]) == [
        0.0,
        0.0,
        1.0,
        1.0,
        None,
    ]


FORMS = [
    "#### {}", "\\boxed{{{}}}", "$\\boxed{{{}}}$", "The answer is {}.", "so it is {}.", "**{}**", "#### ${}", "#### {}.00",
    "Therefore, {} in all.", "#### {} dollars", "Final Answer: {}",
]  # fmt: skip


@pytest.mark.parametrize("form, turn", rest_nightly(product(FORMS, range(3)), set(product(FORMS, range(1)))))
def test_gold_answers_of_gsm8k_are_right_in_every_usual_form_and_others_are_wrong(form, turn):
    """A twelfth of the rows in a form and turn: each row is read in two or three forms, in CI nearly each in one."""
    lines = GSM8K.read_text(encoding="utf-8").splitlines()[(FORMS.index(form) + 4 * turn) % 12 :: 12]
    rows = [json.loads(line) for line in lines]
    golds = [row["answer"] for row in rows]
    answers = [gold.rpartition("#### ")[2].replace(",", "") for gold in golds]
    right = scores([(gold, "3 + 4 = 7.\n" + form.format(a)) for gold, a in zip(golds, answers, strict=True)])
    assert set(right) == {1.0}
    wrong = scores([(gold, "3 + 4 = 7.\n" + form.format(int(a) + 1)) for gold, a in zip(golds, answers, strict=True)])
    assert set(wrong) == {0.0}


def test_a_noun_of_the_question_may_stand_after_a_number_and_a_percentage_where_it_asks_for_one():
    prompts = [
        "How many eggs are left?",
        "What percentage is that?",
        [{"role": "user", "content": "How many percent?"}],
    ]
    right = [("18", r"\boxed{18\text{ eggs}}"), ("50", r"\boxed{50\%}"), ("50", "#### 50%")]
    assert scores(right, prompts=prompts) == [1.0] * 3
    assert scores(right) == [0.0] * 3
    assert scores([("18", "#### 18 million")], prompts=["How many million are left?"]) == [0.0]


def test_without_math_verify_numbers_are_judged_and_a_gold_formula_is_refused(monkeypatch):
    monkeypatch.setattr(verify, "is_installed", lambda: False)
    assert scores([("72", "#### 72"), ("1/2", r"\boxed{\frac12}"), (r"\sqrt{2}", r"\boxed{\sqrt2}")]) == [1.0] * 3
    assert scores([("72", "#### 71"), ("72", r"\boxed{\sqrt{72}}"), ("Paris", "#### Rome")]) == [0.0] * 3
    with pytest.raises(RewardError, match=r"gold answer '\\\\sqrt\{2\}' is a formula, .*pip install 'covey\[math\]'"):
        scores([(r"\sqrt{2}", r"\boxed{2^{1/2}}")])


@examples(100)
@given(
    numbers=st.lists(st.integers(0, 999), min_size=2, max_size=4),
    between=st.sampled_from([" ", "  ", "\\,", "\\;", "\\quad ", "\\\\", "!", " \\text{ to } ", "_", "?", ":", "~"]),
)
def test_numbers_side_by_side_are_never_one_formula(numbers, between):
    text = between.join(map(str, numbers))
    is_space = between in (" ", "  ", "\\,", "\\;", "~")
    is_grouped = is_space and numbers[0] > 0 and all(number >= 100 for number in numbers[1:])
    assert is_grouped or scores([("".join(map(str, numbers)), f"\\boxed{{{text}}}")]) == [0.0]
    assert readable(text) is None
