"""GiGPO: advantages of turns, against numbers computed by hand."""

import torch

from covey import algorithms as alg
from covey.algorithms.turn_advantages import GiGPO, turns_of
from covey.types import EpisodeNotes, Scores


def scores(*episodes, totals, masks):
    return Scores(
        per_function=torch.tensor(totals)[None, :, None],
        weights=torch.ones(1),
        mask=torch.tensor(masks).bool()[None],
        episodes=(tuple(episodes),),
    )


def test_turns_are_the_runs_of_tokens_that_the_model_wrote():
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1]).bool()
    assert turns_of(mask).tolist() == [-1, 0, 0, -1, 1, -1, -1, 2]


def test_a_turn_goes_on_behind_tokens_that_no_environment_answered():
    mask, observed = (
        torch.tensor([[0, 1, 0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 1, 0, 0, 0], [0] * 8]).bool(),
        torch.zeros(3, 8),
    )
    observed[0, [0, 4]], observed[1, 2] = 1, 1
    expected = [[-1, 0, -1, 0, -1, 1, 1, -1], [0, -1, -1, -1, 1, -1, -1, -1], [-1] * 8]
    assert turns_of(mask, observed.bool()).tolist() == expected


def test_two_episodes_that_meet_in_a_state_are_judged_there_by_their_discounted_returns():
    # Episode 1: states s, a, rewards 0, 1. Episode 2: states s, b, a, rewards 0, 0, 3. gamma 1/2, no division.
    # Returns: (0 + 1/2, 1) and (0 + 0 + 3/4, 3/2, 3). State s: 0.5 and 0.75, mean 0.625. State a: 1 and 3, mean 2. b is alone.
    # Episode part: totals 1 and 3, mean 2.
    first = EpisodeNotes(states=("s", "a"), rewards=(0.0, 1.0))
    second = EpisodeNotes(states=("s", "b", "a"), rewards=(0.0, 0.0, 3.0))
    masks = [[1, 1, 0, 1, 0, 0], [1, 0, 1, 0, 1, 1]]
    given = scores(first, second, totals=[1.0, 3.0], masks=masks)
    found = GiGPO(weight=1.0, gamma=0.5, scale="none")(given)
    expected = [
        [-1 - 0.125, -1 - 0.125, 0, -1 - 1, 0, 0],
        [1 + 0.125, 0, 1 + 0, 0, 1 + 1, 1 + 1],
    ]
    assert torch.allclose(found[0], torch.tensor(expected))


def test_a_reward_of_the_whole_counts_at_the_last_turn():
    # Without rewards of turns: returns (1/2, 1) and (0, 0). State s: 0.5 and 0, half-distance 0.25; state a: 1 and 0, 0.5.
    notes = [EpisodeNotes(states=("s", "a")), EpisodeNotes(states=("s", "a"))]
    found = GiGPO(gamma=0.5, scale="none")(scores(*notes, totals=[1.0, 0.0], masks=[[1, 0, 1], [1, 0, 1]]))
    assert torch.allclose(found[0], torch.tensor([[0.5 + 0.25, 0, 0.5 + 0.5], [-0.5 - 0.25, 0, -0.5 - 0.5]]))


def test_with_a_deviation_two_turns_of_a_state_are_one_over_root_two_apart_from_their_mean():
    notes = [EpisodeNotes(states=("s",)), EpisodeNotes(states=("s",))]
    found = GiGPO(epsilon=0.0)(scores(*notes, totals=[5.0, 1.0], masks=[[1], [1]]))
    assert torch.allclose(
        found[0, :, 0], torch.tensor([2**0.5, -(2**0.5)])
    )  # an episode's part and a turn's, each 1 / sqrt 2


def test_what_nobody_scored_gets_nothing_and_moves_nobody():
    notes = [EpisodeNotes(states=("s",))] * 3
    three = GiGPO()(scores(*notes, totals=[5.0, 1.0, float("nan")], masks=[[1], [1], [1]]))
    two = GiGPO()(scores(*notes[:2], totals=[5.0, 1.0], masks=[[1], [1]]))
    assert three[0, 2].tolist() == [0.0]
    assert torch.equal(three[0, :2], two[0])


def test_it_is_a_preset():
    assert alg.PRESETS["gigpo"]().advantage == GiGPO()
