"""Role-conditioned advantages against numbers of SPIRAL's and prime-rl's own code, in runs, and over a resume."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from datasets import Dataset

from covey import GRPOTrainer
from covey import algorithms as alg
from covey.errors import ConfigError
from covey.types import EpisodeNotes, Scores
from faults.small_runs import lines, options, weights
from kit import group, tiny_model, tiny_tokenizer

GAMES = [(1.0, -1.0), (1.0, -1.0), (-1.0, 1.0), (0.0, 0.0), (1.0, -1.0), (0.5, -0.25)]
SPIRAL = [
    *((1.0, -1.0), (0.95, -0.95), (-1.0975, 1.0975), (-0.042625, 0.042625), (0.95950625, -0.95950625)),
    (0.4115309375, -0.1615309375),
]
"""Of `EMA(0.95)` and `prepare_trajectories` of spiral-rl/spiral: the average is read, then moved, then taken from the reward."""
AFTER = (0.109045609375, -0.096545609375)
PRIME = [(1.0, -1.0), (0.9, -0.9), (-1.19, 1.19), (-0.071, 0.071), (0.9361, -0.9361), (0.34249, -0.09249)]
"""Of prime-rl's `RAEAlgorithm` with decay 0.9."""


def scores_of(rewards, roles=None, column=None, **values):
    """Scores of groups whose completions have `roles` [P][G], and whose prompts have `values` by column."""
    groups = [
        group(
            [""] * len(row),
            rewards=[[reward] for reward in row],
            columns={name: column_values[p] for name, column_values in values.items()},
        )
        for p, row in enumerate(rewards)
    ]
    scores = Scores.of(groups, slice_column=column)
    if roles is None:
        return scores
    notes = tuple(tuple(EpisodeNotes(role=role) for role in row) for row in roles)
    return Scores(per_function=scores.per_function, weights=scores.weights, mask=scores.mask, slices=scores.slices, episodes=notes)  # fmt: skip


@pytest.mark.parametrize(("decay", "expected"), [(0.95, SPIRAL), (0.9, PRIME)], ids=["SPIRAL", "prime-rl"])
def test_advantages_are_those_of_the_published_code(decay, expected):
    part = alg.RoleConditioned(decay=decay)
    by_environment = scores_of(GAMES, [("white", "black")] * len(GAMES))
    torch.testing.assert_close(part(by_environment), torch.tensor(expected), rtol=0, atol=1e-7)
    flat = [[reward] for game in GAMES for reward in game]
    by_column = scores_of(flat, column="player", player=["white", "black"] * len(GAMES))
    column = alg.RoleConditioned("player", decay)(by_column)
    torch.testing.assert_close(column.view(-1, 2), torch.tensor(expected), rtol=0, atol=1e-7)


def test_the_average_goes_on_where_the_rollout_before_left_it():
    part, roles = alg.RoleConditioned(), [("white", "black")] * 3
    first, second = scores_of(GAMES[:3], roles), scores_of(GAMES[3:], roles)
    later = part.recalled(part.remembered(first))
    torch.testing.assert_close(later(second), torch.tensor(SPIRAL[3:]), rtol=0, atol=1e-7)
    assert later.remembered(second) == pytest.approx({"white": AFTER[0], "black": AFTER[1]}, abs=1e-9)


def test_a_role_of_an_environment_and_a_column_are_a_pair():
    scores = scores_of([(1.0, -1.0), (3.0, 5.0)], [("white", "black")] * 2, "game", game=["poker", "chess"])
    averages = alg.RoleConditioned("game", 0.5).remembered(scores)
    assert averages == {"poker/white": 0.5, "poker/black": -0.5, "chess/white": 1.5, "chess/black": 2.5}


def test_unscored_completions_get_nothing_and_move_nothing():
    roles = [("white", "black", "white")]
    part = alg.RoleConditioned(decay=0.5)
    assert part(scores_of([(1.0, float("nan"), 1.0)], roles)).tolist() == [[1.0, 0.0, 0.5]]
    assert part.remembered(scores_of([(1.0, float("nan"), 1.0)], roles)) == {"white": 0.75}


def test_an_advantage_around_it_judges_and_remembers_the_same_rewards():
    scores = scores_of([(1.0, 1.0)], [("white", "black")])
    shaped = alg.Shaped(alg.RoleConditioned(decay=0.5), (lambda scores: torch.tensor([[1.0, -1.0]]),))
    algorithm = alg.grpo().replace(advantage=shaped)
    assert algorithm.judge(scores)[0].tolist() == [[2.0, 0.0]]
    memory = algorithm.remembered(scores)
    assert memory == {"advantage/white": 1.0, "advantage/black": 0.0}
    assert algorithm.resolve(memory).judge(scores)[0].tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("decay", [1.0, -0.1, True, "0.9", float("nan")])
def test_a_decay_that_is_none_is_refused(decay):
    with pytest.raises(ConfigError, match="decay"):
        alg.RoleConditioned(decay=decay)


ROWS = [{"prompt": f"q {i}", "player": ("white", "black")[i % 2]} for i in range(8)]
PART = "dr_grpo, advantage=RoleConditioned(column='player', decay=0.8)"


def signed(completions, player, **columns):
    """A zero-sum game of sorts: what is good for white is bad for black."""
    return [
        (1 if name == "white" else -1) * (len(text) % 5 - 1.0) for text, name in zip(completions, player, strict=True)
    ]


def played(folder, changed_rows=ROWS, **changed):
    args = options(folder, **{"max_steps": 4, "logging_steps": 1, "algorithm": PART, "num_generations": 1, **changed})
    return GRPOTrainer(
        tiny_model("qwen2"), signed, args, Dataset.from_list(changed_rows), processing_class=tiny_tokenizer()
    )


def test_a_run_logs_the_averages_and_a_resumed_one_goes_on_from_them_to_the_bit(tmp_path):
    whole = played(tmp_path / "whole", save_strategy="steps", save_steps=2)
    whole.train()
    logged = [{key: value for key, value in line.items() if key.startswith("advantage/")} for line in lines(tmp_path / "whole")]  # fmt: skip
    assert logged[0].keys() == {"advantage/white", "advantage/black"}
    assert logged[0] != logged[-1]
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "half" / "checkpoint-2")
    again = played(tmp_path / "half", save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-2"))
    assert torch.equal(weights(again), weights(whole))
    state = [one._parts.session.latest.controllers for one in (whole, again)]
    assert state[0] == state[1]
    assert json.dumps(state[0]) != json.dumps(dict.fromkeys(state[0], 0.0))


def test_a_column_that_is_not_there_is_refused_before_the_first_rollout(tmp_path):
    with pytest.raises(ConfigError, match="by the column 'role', and the data set has prompt, player"):
        played(tmp_path, algorithm="dr_grpo, advantage=RoleConditioned(column='role')")


def test_a_row_without_a_role_is_named(tmp_path):
    rows = [*ROWS[:3], {"prompt": "q", "player": None}]
    with pytest.raises(ConfigError, match="row 3, names no role"):
        played(tmp_path, rows)
