"""The reward test inside of `covey doctor`: a reward that would teach the wrong thing fails before a run is paid for."""

import pytest

from covey.doctor import rewards
from covey.rewards import JudgeReward
from covey.rewards.builtin.registry import resolve
from covey.rewards.contract import RewardSpec

ROWS = [{"prompt": f"{i} + {i + 1} =", "answer": str(2 * i + 1)} for i in range(3, 20)]


def said(spec, status, *, seconds=1e-4, rows=ROWS):
    return "\n".join(f"{one.said} {one.fix}" for one in rewards.tested([spec], rows, seconds) if one.status == status)


def pays_digits(completions, answer, **columns):
    """Right answers earn 1, and so does anything without a digit."""
    return [float(a in c or not any(map(str.isdigit, c))) for c, a in zip(completions, answer, strict=True)]


def pays_the_wrong_ones(completions, answer, **columns):
    return [float(a not in c) for c, a in zip(completions, answer, strict=True)]


@pytest.mark.slow
def test_a_sound_reward_passes():
    assert "exact passes the reward test: right, wrong and worthless answers of 8 rows" in said(
        resolve("exact"), "PASS"
    )
    assert said(resolve("exact"), "FAIL") == said(resolve("exact"), "WARN") == ""


@pytest.mark.parametrize(
    "reward, words", [(pays_digits, "garbage earns half"), (pays_the_wrong_ones, "the right answer scores no more")]
)
def test_a_reward_that_pays_what_is_not_right_fails(reward, words):
    found = said(resolve(reward), "FAIL")
    assert words in found
    assert f"covey reward test --reward {reward.__name__}" in found


def test_a_reward_of_form_is_not_blamed_for_paying_wrong_answers():
    assert said(resolve("length(target=5)"), "FAIL") == ""


def test_what_would_cost_time_or_money_is_left_out_and_said():
    judge = RewardSpec(name="judge", call=JudgeReward("http://127.0.0.1:1/v1", "m", rubric="Is it right?"))
    assert "judge was not put to the reward test: it asks a model for every answer" in said(judge, "PASS")
    assert "takes too long for it" in said(resolve("exact"), "PASS", seconds=1.0)


def test_a_reward_that_counts_for_nothing_is_not_tested():
    import dataclasses

    assert list(rewards.tested([dataclasses.replace(resolve(pays_digits), weight=0.0)], ROWS, 1e-4)) == []
