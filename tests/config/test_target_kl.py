"""The option `target_kl`, for any algorithm."""

import pytest

from covey import GRPOConfig, algorithms
from covey.errors import ConfigError
from covey.training.build_algorithm import build_algorithm


def config(**given):
    return GRPOConfig(output_dir="unused", use_cpu=True, **given)


def test_the_kl_target_reaches_every_algorithm():
    assert build_algorithm(config(target_kl=0.05)).target_kl == 0.05
    assert build_algorithm(config(target_kl=0.05, algorithm="gspo")).target_kl == 0.05


def test_two_targets_are_refused_and_one_stands():
    own = algorithms.grpo().replace(target_kl=0.3)
    assert build_algorithm(config(), own).target_kl == 0.3
    with pytest.raises(ConfigError, match=r"target_kl is 0.02 in the options and 0.3 in the algorithm"):
        build_algorithm(config(target_kl=0.02), own)


def test_a_target_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="target_kl"):
        config(target_kl=0)
