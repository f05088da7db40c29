"""Reasoning Gym's tasks as rows and reward, and the answers that its graders must never see."""

from __future__ import annotations

import pytest

from covey.data import gym, load
from covey.errors import DataError
from covey.rewards import Scorer
from covey.rewards.builtin.gym import answer_of
from kit import group

pytest.importorskip("reasoning_gym")
from reasoning_gym.factory import DATASETS


def test_rows_depend_on_the_seed_and_their_place_alone():
    first, some = gym.rows("leg_counting[:6]"), gym.rows("leg_counting[2:4]")
    assert len(first) == 6
    assert [row["prompt"] for row in some] == [row["prompt"] for row in first[2:4]]
    assert first[0]["prompt"] != gym.rows("leg_counting[:1]", seed=1)[0]["prompt"]
    assert set(first[0]) == {"prompt", "answer", "gym"}


@pytest.mark.parametrize(
    "name", ["leg_counting", "basic_arithmetic", "countdown", "simple_integration", "n_queens", "sudoku"]
)
def test_a_tasks_own_answers_score_one_and_others_less(name):
    for row in gym.rows(f"{name}[:3]"):
        assert gym.score(row["answer"], row["gym"]) == 1.0
        assert gym.score("", row["gym"]) < 0.2
        assert gym.score("I do not know", row["gym"]) < 0.2


def test_a_scorer_runs_the_graders_and_abstains_where_there_is_none():
    (row,) = gym.rows("leg_counting[:1]")
    texts = [f"<answer>{row['answer']}</answer>", "<answer>-1</answer>", f"#### {row['answer']}", ""]
    scorer = Scorer.of("gym")
    mine, other = scorer.score([group(texts, columns=row), group(["4"], uid="0:1", columns={"gym": None})])
    scorer.close()
    assert mine.rewards[:, 0].tolist()[:3:2] == [1.0, 1.0]
    assert max(mine.rewards[1, 0], mine.rewards[3, 0]) < 0.2
    assert other.rewards.isnan().all()


@pytest.mark.parametrize(
    "name, answer",
    [
        ("n_queens", "__import__('os').system('touch {file}')"),
        ("n_queens", "[x for x in open('{file}', 'w')]"),
        ("spiral_matrix", '[exec(\'open("{file}", "w")\')]'),
        ("string_insertion", "[c for c in str(open('{file}', 'w'))]"),
        ("binary_matrix", "open('{file}','w') and [[0]]"),
        ("countdown", "__import__('pathlib').Path('{file}').touch()"),
        ("countdown", "S('__im'+'port__(\"os\").mkdir(\"{file}\")')"),
        ("polynomial_multiplication", "(lambda: open('{file}', 'w'))()"),
        ("simple_integration", "preview(x, output='dvi', filename='{file}', viewer='file')"),
        ("puzzle24", "[open('{file}', 'w') for x in (1,)]"),
    ],
)
def test_an_answer_that_is_a_program_is_not_run(name, answer, tmp_path):
    file = tmp_path / "escaped"
    (row,) = gym.rows(f"{name}[:1]")
    assert gym.score(answer.format(file=file), row["gym"]) == 0.0
    assert not file.exists()


@pytest.mark.parametrize(
    "answer", ["9**9**9**9", "x**(10**10)", "sin", "a.b", "x if x else y", "'a'", "x" * 6000, "(" * 4000]
)
def test_formulas_that_are_none_or_never_end_score_nothing(answer):
    (row,) = gym.rows("countdown[:1]")
    assert gym.score(answer, row["gym"]) < 0.2


def test_every_grader_that_evaluates_answers_is_guarded():
    known = {name for name, (kind, _) in DATASETS.items() if gym.evaluates(kind)}
    assert known
    assert known <= gym._LITERALS | gym._FORMULAS


def test_a_task_that_is_not_there_is_told_with_the_nearest():
    with pytest.raises(DataError, match="Did you mean leg_counting"):
        gym.rows("leg_countin")
    with pytest.raises(DataError, match="no rows"):
        gym.rows("leg_counting[5:5]")


def test_a_task_is_a_data_set_by_name():
    found = load("gym:leg_counting[:3]")
    assert found.column_names == ["prompt", "answer", "gym"]
    assert found["prompt"][2] == gym.rows("leg_counting[2:3]")[0]["prompt"]
    assert len(load("gym:leg_counting", limit=5)) == 5


def test_the_answer_is_the_last_that_is_marked():
    assert answer_of("<answer>1</answer> no, <answer> 2 </answer>") == "2"
    assert answer_of("so #### 3") == "3"
    assert answer_of("<think>a</think>\n4\n5 ") == "4\n5"
