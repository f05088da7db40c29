"""Reward functions on real Ray actors: the same scores and exceptions as here, a dead actor replaced, a late one killed."""

import os
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from ray_rewards import alone, deadly, deadly_length, fatal, length, picky, slow

from covey import GRPOConfig, GRPOTrainer
from covey.rewards import Scorer, on_ray
from covey.types import Completion, Group, Prompt
from kit import tiny_model, tiny_tokenizer

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Actors import this file by its name."""
    here = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2] / "src")])
    ray.init(num_cpus=4, log_to_driver=False, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": here}})
    yield
    ray.shutdown()


def groups(*texts, prompts=2):
    """`prompts` prompts with a completion for each text, whose column is the place of the prompt."""
    done = tuple(Completion(token_ids=torch.tensor([5, 6]), text=text, finish="stop") for text in texts)
    return [
        Group(
            prompt=Prompt(uid=f"0:{p}", text=f"prompt {p}", token_ids=(1,), columns={"place": p, "folder": ""}),
            completions=done,
        )
        for p in range(prompts)
    ]


def scores(scorer, given):
    """Of groups that are all scored."""
    scored = scorer.score(given)
    assert not [event for one in scored for event in one.events]
    return [one.rewards[:, 0].tolist() for one in scored]


def test_the_scores_are_the_functions_own_and_prompts_are_split_over_the_actors():
    given = groups("a", "bbb", prompts=4)
    here, there = Scorer.of([length]), Scorer.of([on_ray(length, replicas=2)])
    assert scores(there, given) == scores(here, given) == [[1 + 100 * p, 3 + 100 * p] for p in range(4)]
    processes = [one.extras["process"] for one in there.score(given)]
    assert all(len(set(pair)) == 1 for pair in processes)  # a prompt's completions stay together
    assert len({pair[0] for pair in processes}) == 2
    assert os.getpid() not in {pair[0] for pair in processes}


def test_an_exception_is_the_functions_own_and_costs_one_completion():
    scorer = Scorer.of([on_ray(picky)])
    (scored,) = scorer.score(groups("aa", "bad", "c", prompts=1))
    assert torch.isnan(scored.rewards[:, 0]).tolist() == [False, True, False]
    assert any("I do not read this" in str(event) for event in scored.events)
    with pytest.raises(ValueError, match="I do not read this"):
        on_ray(picky)(prompts=["q"], completions=["bad"])


def test_an_actor_that_ends_is_replaced_and_its_part_asked_again(tmp_path):
    given = [
        Group(
            prompt=Prompt(uid=f"0:{p}", text=f"q{p}", token_ids=(1,), columns={"folder": str(tmp_path)}),
            completions=groups("a", "b")[0].completions,
        )
        for p in range(4)
    ]
    assert scores(Scorer.of([on_ray(deadly, replicas=2)]), given) == [[1.0, 1.0]] * 4


def test_a_completion_that_always_ends_the_actor_is_lost_alone():
    (scored,) = Scorer.of([on_ray(fatal)]).score(groups("a", "bad", "c", prompts=1))
    assert scored.rewards[:, 0].isnan().tolist() == [False, True, False]


def test_a_late_actor_is_killed_and_the_others_are_scored():
    scorer = Scorer.of([on_ray(slow)])
    assert scores(scorer, groups("a", prompts=1)) == [[1.0]]  # the actor runs
    started = time.monotonic()
    (scored,) = scorer.score(groups("a", "slow", prompts=1))
    assert scored.rewards[:, 0].isnan().tolist()[1]
    assert time.monotonic() - started < 60
    assert scores(scorer, groups("a", prompts=1)) == [[1.0]]


def test_a_reward_of_one_completion_and_of_async_def_runs_there_too():
    assert scores(Scorer.of([on_ray(alone, replicas=2)]), groups("a", "bbb")) == [[1.0, 3.0], [2.0, 4.0]]


def test_a_run_whose_reward_is_on_actors_of_which_one_dies_learns_what_it_learns_without(tmp_path):
    weights = []
    for name, judge in (
        ("here", alone),
        ("there", on_ray(alone, replicas=2)),
        ("dying", on_ray(deadly_length, replicas=2)),
    ):
        args = GRPOConfig(
            str(tmp_path / name),
            use_cpu=True,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=8,
            max_steps=3,
            learning_rate=1e-2,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        rows = Dataset.from_list([{"prompt": f"{i} and", "place": i, "folder": str(tmp_path)} for i in range(8)])
        trainer = GRPOTrainer(tiny_model(), judge, args, rows, processing_class=tiny_tokenizer())
        before = [one.clone() for one in trainer.model.parameters()]
        trainer.train()
        weights.append(list(trainer.model.parameters()))
        assert any(not torch.equal(a, b) for a, b in zip(before, weights[-1], strict=True))
    assert all(torch.equal(a, b) for other in weights[1:] for a, b in zip(weights[0], other, strict=True))
