"""`--search`: ranges and choices of any option of `covey train`, and a sentence for what is none."""

import pytest

from covey.cli import train
from covey.errors import ConfigError
from covey.experiments.search import dimensions

KINDS = {flag.name: flag.kind for flag in train.flags()}


def one(word):
    return dimensions([word], KINDS)[0]


def test_a_range_is_one_of_the_options_type():
    rate = one("learning_rate=1e-6:1e-4:log")
    assert (rate.low, rate.high, rate.is_log, rate.is_whole) == (1e-6, 1e-4, True, False)
    group = one("num-generations=4:16")
    assert (group.name, group.is_whole, group.ends) == ("num_generations", True, (4, 16))


def test_steps_are_whole_numbers_and_shares_of_a_run_are_not():
    assert one("warmup_steps=0:20").ends == (0, 20)
    assert one("logging_steps=1:5").is_whole
    assert not one("warmup_steps=0:0.2").is_whole
    assert not one("num_train_epochs=1:4").is_whole


def test_choices_are_read_as_yaml_reads_them():
    assert one("beta=0,0.01,1e-3").choices == (0, 0.01, 0.001)
    assert one("loss_type=grpo,dapo").choices == ("grpo", "dapo")
    assert one("disable_dropout=true,false").choices == (True, False)
    assert one("reward_weights=[1.0]").choices == ([1.0],)


def test_an_import_path_is_a_choice_and_no_range():
    assert one("algorithm=ideas.py:mine,dapo").choices == ("ideas.py:mine", "dapo")
    assert one("algorithm=ideas.py:mine").choices == ("ideas.py:mine",)


def test_a_dimension_knows_its_values():
    assert one("learning_rate=1e-6:1e-4").holds(1e-5)
    assert not one("learning_rate=1e-6:1e-4").holds(1e-3)
    assert one("loss_type=grpo,dapo").holds("dapo")


def test_optuna_gets_the_same_range():
    optuna = pytest.importorskip("optuna")
    of = optuna.distributions
    assert one("learning_rate=1e-6:1e-4:log").distribution() == of.FloatDistribution(1e-6, 1e-4, log=True)
    assert one("num_generations=4:16").distribution() == of.IntDistribution(4, 16)
    assert one("loss_type=grpo,dapo").distribution() == of.CategoricalDistribution(("grpo", "dapo"))


@pytest.mark.parametrize(
    "word, said",
    [
        ("learning_rate", "write name=low:high"),
        ("learning_rat=1:2", "Did you mean learning_rate?"),
        ("output_dir=a,b", "cannot be searched"),
        ("learning_rate=2:1", "must be the smaller one"),
        ("learning_rate=1:1", "must be the smaller one"),
        ("learning_rate=1:x", "not two numbers"),
        ("learning_rate=0:1:log", "above 0"),
        ("learning_rate=1:2:lin", "only log may follow"),
        ("num_generations=2:4.5", "takes whole numbers"),
        ("warmup_steps=0.1:20", "whole numbers of steps, or shares of the run"),
        ("learning_rate=nan:1", "must be the smaller one"),
    ],
)
def test_what_is_no_range_is_said(word, said):
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        one(word)


def test_one_option_is_searched_once_and_something_is():
    with pytest.raises(ConfigError, match="twice"):
        dimensions(["beta=0,1", "beta=0:1"], KINDS)
    with pytest.raises(ConfigError, match="--search is missing"):
        dimensions([], KINDS)
