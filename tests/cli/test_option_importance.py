"""`covey tune` says which of the searched options mattered."""

import math
import random
from types import SimpleNamespace

import pytest

from covey.experiments.child import Ended
from covey.experiments.search import dimensions
from covey.experiments.study import Search, Tuning, importances, in_words, open_study

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)


def study_of(trials, score, options=("rate", "beta")):
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=3))
    ranges = {name: optuna.distributions.FloatDistribution(0, 1) for name in options}
    for _ in range(trials):
        trial = study.ask(ranges)
        study.tell(trial, score(**trial.params))
    return study


def test_the_option_that_decides_comes_first_and_shares_sum_to_1():
    found = importances(study_of(40, lambda rate, beta: -((rate - 0.3) ** 2) + 0.001 * beta))
    assert list(found) == ["rate", "beta"]
    assert found["rate"] > 0.7
    assert sum(found.values()) == pytest.approx(1)


@pytest.mark.nightly
def test_a_short_noisy_search_still_finds_the_option_that_decides():
    def first(seed):
        noise = random.Random(seed)
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        ranges = {name: optuna.distributions.FloatDistribution(0, 1) for name in ("rate", "temperature", "inert")}
        for _ in range(14):
            trial = study.ask(ranges)
            rate, temperature = trial.params["rate"], trial.params["temperature"]
            bump = math.exp(-(((rate - 0.6) / 0.16) ** 2))
            study.tell(trial, 0.5 * bump + 0.08 * temperature + noise.gauss(0, 0.05))
        return next(iter(importances(study)))

    assert sum(first(seed) == "rate" for seed in range(20)) >= 18


def test_few_trials_or_one_option_say_nothing():
    assert importances(study_of(7, lambda rate, beta: rate)) == {}
    assert importances(study_of(20, lambda rate: rate, options=("rate",))) == {}
    assert in_words({}, 7) == []


def test_less_than_thirty_trials_are_called_a_hint():
    assert in_words({"rate": 0.9, "beta": 0.1}, 12) == [
        "importance: rate 90%, beta 10%; a hint, from 12 completed trials"
    ]
    assert in_words({"rate": 0.9, "beta": 0.1}, 30) == ["importance: rate 90%, beta 10%"]


def test_a_metric_that_no_evaluation_has_is_named_with_those_that_are_there(tmp_path):
    tuning = Tuning(
        folder=tmp_path, options={}, search=tuple(dimensions(["beta=0:1"], {"beta": "float"})), metric="eval_rewrad",
        is_smaller_better=False, pruner="none", trials=2, keeps_all=True, seed=0,
    )  # fmt: skip
    lines = []
    search = Search(tuning, open_study(tuning), SimpleNamespace(requested=False), lines.append)
    search.settle(search.following(), Ended(code=0, result={"metrics": {"eval_reward": 0.5, "loss": 1.0}}))
    assert "eval_rewrad is no number at the end of the run; its evaluations have eval_reward" in lines[-1]
