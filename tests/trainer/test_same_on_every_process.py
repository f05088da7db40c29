"""What processes of a run compare before they load a model: texts that differ where the run would."""

import pytest

from covey import GRPOConfig
from covey import algorithms as alg
from covey.rewards.contract import RewardSpec
from covey.training import invariants
from covey.training.invariants import comparable_parts


def longer(completions, **columns):
    return [float(len(one)) for one in completions]


def told(algorithm, name="longer"):
    return comparable_parts(algorithm, [RewardSpec(name=name, call=longer)])


@pytest.mark.parametrize("name", alg.PRESETS)
def test_the_same_preset_made_twice_says_the_same(name):
    first, second = told(alg.PRESETS[name]()), told(alg.PRESETS[name]())
    assert first == second
    assert not any(" at 0x" in text for text in first.values())


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (alg.dapo(kl=0.1), "as the algorithm's kl"),
        (alg.dapo().replace(objective=alg.Clipped(low=0.2, high=0.4)), "as the algorithm's objective"),
        (alg.dapo().replace(aggregate=alg.prompt_mean), "as the algorithm's aggregate"),
    ],
)
def test_another_parameter_of_a_part_is_named(other, differs):
    ours, theirs = told(alg.dapo()), told(other)
    assert differs in {name for name in ours if ours[name] != theirs[name]} <= {differs, "as the algorithm's name"}


def test_another_reward_is_named():
    assert told(alg.dapo(), "shorter")["as rewards"] == "shorter" != told(alg.dapo())["as rewards"]


def test_an_option_that_this_transformers_does_not_have_is_left_out(monkeypatch, tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    monkeypatch.setattr(invariants, "HONOURED", invariants.HONOURED | {"an_option_of_the_next_version"})
    assert invariants.comparable_options(args)["num_generations"] == "8"
