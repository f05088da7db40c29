"""Held-out scores: taken at the right evaluation, on the same questions, of rewards that mean the same."""

import numpy as np
import pytest
from run_folders import write_run

from covey.errors import ConfigError, RunFolderError
from covey.evaluation.compare.results import Score, choose_score, result_of, shared_sets
from covey.evaluation.compare.run_data import read_runs
from covey.evaluation.compare.sides import as_sides

FLIPS = np.random.default_rng(3).integers(0, 2, 40)


def sides_of(*groups):
    return as_sides([[run for path in group for run in read_runs(str(path))] for group in groups])


def test_the_last_evaluation_counts_and_another_can_be_asked_for(tmp_path):
    a = write_run(tmp_path / "a", scores={0: [0] * 40, 4: FLIPS})
    b = write_run(tmp_path / "b", scores={0: [0] * 40, 4: [1] * 40, 8: FLIPS})
    found = result_of(sides_of([a], [b]), "eval", Score())
    assert (found.steps, found.effects[0].value, found.is_share) == ([[4], [8]], 0.0, True)
    found = result_of(sides_of([a], [b]), "eval", Score(), step=4)
    assert found.effects[0].value == pytest.approx(1 - FLIPS.mean())
    with pytest.raises(ConfigError, match="not evaluated at step 8; it was at 0, 4"):
        result_of(sides_of([a], [b]), "eval", Score(), step=8)


def test_seeds_and_questions_are_paired(tmp_path):
    a = [write_run(tmp_path / f"a{s}", seed=s, scores={4: FLIPS}) for s in range(3)]
    b = [write_run(tmp_path / f"b{s}", seed=s, scores={4: np.maximum(FLIPS, np.arange(40) % 3 == s)}) for s in range(3)]
    (effect,) = result_of(sides_of(a, reversed(b)), "eval", Score()).effects
    assert (effect.basis, effect.is_paired, effect.seeds, effect.questions) == ("seeds and questions", True, (3, 3), 40)


def test_only_shared_questions_count_also_in_the_means(tmp_path):
    a = write_run(tmp_path / "a", scores={4: [1, 1, 0, 0]}, questions=["p", "q", "r", "s"])
    b = write_run(tmp_path / "b", scores={4: [1, 1, 1, 0]}, questions=["p", "q", "r", "other"])
    found = result_of(sides_of([a], [b]), "eval", Score())
    assert [mean.value for mean in found.means] == pytest.approx([2 / 3, 1.0])
    assert (found.num_questions, found.effects[0].questions) == ([4, 4], 3)


def test_different_questions_are_refused(tmp_path):
    a = write_run(tmp_path / "a", scores={4: [1, 1]}, questions=["p", "q"])
    b = write_run(tmp_path / "b", scores={4: [1, 1]}, questions=["r", "s"])
    with pytest.raises(RunFolderError, match="different questions of eval"):
        result_of(sides_of([a], [b]), "eval", Score())


def test_a_run_without_evaluation_is_named(tmp_path):
    a, b = write_run(tmp_path / "a", scores={4: [1, 1]}), write_run(tmp_path / "b")
    with pytest.raises(RunFolderError, match=r"b has no evaluation.*--eval-dataset"):
        shared_sets(sides_of([a], [b]))


def test_other_sets_are_refused_by_name(tmp_path):
    a = write_run(tmp_path / "a", scores={4: [1, 1]}, set_name="eval_math")
    b = write_run(tmp_path / "b", scores={4: [1, 1]}, set_name="eval_code")
    with pytest.raises(RunFolderError, match=r"no held-out set was evaluated in every run .*eval_math.*eval_code"):
        shared_sets(sides_of([a], [b]))
    with pytest.raises(ConfigError, match="'eval_math'; it has eval_code"):
        shared_sets(sides_of([a], [b]), "eval_math")


def test_rewards_that_are_no_shares_become_so_at_a_threshold(tmp_path):
    a = write_run(tmp_path / "a", scores={4: [0.2, 0.6, 0.9]})
    b = write_run(tmp_path / "b", scores={4: [0.7, 0.6, 0.9]})
    found = result_of(sides_of([a], [b]), "eval", Score())
    assert (found.unit, found.effects[0].value) == ("reward", pytest.approx(0.5 / 3))
    found = result_of(sides_of([a], [b]), "eval", Score(threshold=0.5))
    assert (found.unit, found.effects[0].value) == ("points", pytest.approx(1 / 3))
    assert found.title == "accuracy on eval (reward of 0.5 or more)"


def test_logged_means_do_where_the_answers_were_not_kept(tmp_path):
    a = [write_run(tmp_path / f"a{s}", seed=s, scores={4: [0.1 * s]}, keep_answers=False) for s in range(3)]
    b = [write_run(tmp_path / f"b{s}", seed=s, scores={4: [0.1 * s + 0.3]}, keep_answers=False) for s in range(3)]
    (effect,) = result_of(sides_of(a, b), "eval", Score()).effects
    assert (effect.basis, effect.questions, effect.value) == ("seeds", 0, pytest.approx(0.3))


def test_totals_of_different_rewards_are_not_compared(tmp_path):
    a = write_run(tmp_path / "a", scores={4: [1, 1]}, rewards=("match", "style"))
    b = write_run(tmp_path / "b", scores={4: [1, 1]}, rewards=("match",))
    c = write_run(tmp_path / "c", scores={4: [1, 1]}, rewards=("match", "style"), reward_weights=[1.0, 0.1])
    assert choose_score(sides_of([a], [b]), "eval", None, None).column == "reward/match"
    with pytest.raises(ConfigError, match="--score: reward/match, reward/style"):
        choose_score(sides_of([a], [c]), "eval", None, None)
    assert choose_score(sides_of([a], [c]), "eval", "style", None).column == "reward/style"
    with pytest.raises(ConfigError, match="every run has reward, reward/match"):
        choose_score(sides_of([a], [b]), "eval", "style", None)


def test_three_sides_are_told_from_the_first_with_holms_p_values(tmp_path):
    paths = [write_run(tmp_path / name, scores={4: row}) for name, row in
             (("a", [0] * 6), ("b", [1] * 6), ("c", [1] * 6))]  # fmt: skip
    found = result_of(sides_of(*[[path] for path in paths]), "eval", Score())
    assert [effect.p_value for effect in found.effects] == pytest.approx([0.0625, 0.0625])
