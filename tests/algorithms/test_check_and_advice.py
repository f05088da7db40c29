"""A faulty part is found and the fault is said in words; values far from what works get one sentence with its source."""

from types import SimpleNamespace

import pytest
import torch

from covey import algorithms as alg
from covey import testing
from covey.algorithms.advice import advise


def divides_by_the_width(tokens):
    return -tokens.advantages * tokens.logp / tokens.logp.shape[1]


def divides_by_the_rows(tokens):
    return -tokens.advantages * tokens.logp / tokens.logp.shape[0]


def centres_over_the_batch(tokens):
    return -(tokens.advantages - tokens.advantages.mean()) * tokens.logp


def weighs_by_place(tokens):
    return -tokens.advantages * tokens.logp * torch.arange(1, len(tokens.logp) + 1).unsqueeze(1)


def explodes(tokens):
    return -tokens.advantages * (3 * (tokens.logp - tokens.old_logp)).exp()


def returns_a_mean(tokens):
    return (tokens.advantages * tokens.logp).mean()


def goes_uphill(tokens):
    return tokens.advantages * tokens.logp


def ignores_the_advantage(tokens):
    return -tokens.logp * (1 + tokens.advantages)


@pytest.mark.parametrize(
    "part, said",
    [
        (divides_by_the_width, "Padding to more tokens changes the gradient"),
        (divides_by_the_rows, "In micro-batches of 6, 6 rows the gradient differs"),
        (centres_over_the_batch, "take what it must know of the step in prepare"),
        (weighs_by_place, "In micro-batches"),
        (explodes, "With log-ratios of +40 in float32"),
        (returns_a_mean, "no mean: the library divides"),
        (goes_uphill, "its gradient is not that of the policy gradient"),
        (ignores_the_advantage, "its gradient is not that of the policy gradient"),
    ],
)
def test_a_faulty_objective_is_explained(part, said):
    with pytest.raises(AssertionError) as caught:
        testing.check_objective(part)
    assert str(caught.value).startswith(f"{part.__name__} is no sound objective:")
    assert said in str(caught.value)


def test_an_objective_that_learns_from_nothing_is_found_once_it_claims_another_direction():
    ignores_the_advantage.exempt = ("policy_gradient",)
    with pytest.raises(AssertionError, match="With all advantages 0 there is still a gradient"):
        testing.check_objective(ignores_the_advantage)
    ignores_the_advantage.exempt = ("policy_gradient", "zero_advantage")
    testing.check_objective(ignores_the_advantage)
    del ignores_the_advantage.exempt


def divides_by_a_tiny_deviation(scores):
    apart = scores.total - scores.total.nanmean(1, keepdim=True)
    deviation = apart.square().nanmean(1, keepdim=True).sqrt()
    return (apart / (deviation + 1e-12)).nan_to_num(0.0)


def is_moved_by_the_unscored(scores):
    rewards = scores.total.nan_to_num(0.0)
    return (rewards - rewards.mean(1, keepdim=True)) * ~scores.total.isnan()


def leaves_nan(scores):
    apart = scores.total - scores.total.mean(1, keepdim=True)
    return apart / apart.square().mean(1, keepdim=True).sqrt()


def pays_the_first(scores):
    return (scores.total - scores.total[:, :1]).nan_to_num(0.0)


def counts_the_padding(scores):
    return (scores.total - scores.total.nanmean(1, keepdim=True)).nan_to_num(0.0) * scores.mask.shape[-1]


@pytest.mark.parametrize(
    "part, said",
    [
        (divides_by_a_tiny_deviation, "rewards that are all 0.1 gets an advantage"),
        (is_moved_by_the_unscored, "moves the advantages of its siblings"),
        (leaves_nan, "With groups of one completion it returns numbers that are not finite"),
        (pays_the_first, "no place may matter"),
        (counts_the_padding, "Padding to more tokens changes the advantages"),
        (lambda scores: scores.total.sum(), "it must return [P, G]"),
    ],
)
def test_a_faulty_advantage_is_explained(part, said):
    with pytest.raises(AssertionError) as caught:
        testing.check_advantage(part)
    assert said in str(caught.value)


def test_other_faulty_parts_are_explained():
    with pytest.raises(AssertionError, match="a KL is 0 there"):
        testing.check_kl(lambda logp, ref_logp: logp - ref_logp + 1)
    with pytest.raises(AssertionError, match="differs"):
        testing.check_regularizer(lambda tokens: tokens.entropy / tokens.mask.sum())
    with pytest.raises(AssertionError, match="alpha is a number from 0"):
        testing.check_reference(lambda report: report["kl"])
    with pytest.raises(AssertionError, match="not finite"):
        testing.check_critic(
            lambda tokens: (tokens.values - tokens.returns).exp().log().exp() / tokens.mask.sum(-1, keepdim=True)
        )
    with pytest.raises(AssertionError, match="In micro-batches"):
        testing.check_aggregate(lambda per_token, tokens, totals: per_token.mean())
    with pytest.raises(AssertionError, match="is nan"):
        testing.check_controller(SimpleNamespace(init=lambda: 0.1, update=lambda value, report: float("nan")))


def test_values_in_the_known_range_get_no_advice():
    assert (
        advise(learning_rate=1e-6, num_generations=8, beta=0.0, epsilon=0.2, epsilon_high=0.28, temperature=1.0) == []
    )
    assert advise(learning_rate=1e-5, is_lora=True) == []
    assert advise(epsilon=3e-4, epsilon_high=4e-4, importance_sampling_level="sequence") == []
    assert advise(epsilon=0.2, epsilon_high=5.0, loss_type="cispo") == []
    assert advise(entropy_coef=0.0) == advise(entropy_coef=0.01) == []


@pytest.mark.parametrize(
    "options, option, words",
    [
        ({"learning_rate": 1e-4}, "learning_rate", "high for training all weights"),
        ({"learning_rate": 1e-9}, "learning_rate", "hardly anything moves"),
        ({"learning_rate": 1e-6, "is_lora": True}, "learning_rate", "low for LoRA"),
        ({"learning_rate": 1e-2, "is_lora": True}, "learning_rate", "high even for LoRA"),
        ({"num_generations": 2}, "num_generations", "+-0.7"),
        ({"num_generations": 3}, "num_generations", "noisy baseline"),
        ({"num_generations": 2, "scale_rewards": "none"}, "num_generations", "noisy baseline"),
        ({"beta": 1.0}, "beta", "0 to 0.04"),
        ({"epsilon": 0.2, "importance_sampling_level": "sequence"}, "epsilon", "hardly ever clips"),
        ({"epsilon": 3e-4}, "epsilon", "clips nearly every token"),
        ({"epsilon": 0.2, "loss_type": "cispo"}, "epsilon_high", "ceiling of the ratio itself"),
        ({"temperature": 0.2}, "temperature", "alike"),
        ({"num_iterations": 8}, "num_iterations", "off-policy"),
        ({"entropy_coef": -0.01}, "entropy_coef", "pays for certainty"),
        ({"entropy_coef": 1.0}, "entropy_coef", "can outweigh the reward"),
    ],
)
def test_a_value_far_off_gets_one_sentence_and_a_source(options, option, words):
    (advice,) = advise(**options)
    assert advice.option == option
    assert words in advice.said
    assert advice.source
    assert str(advice).endswith(")")


def test_small_models_are_spared_the_learning_rates_of_large_ones():
    assert advise(learning_rate=1e-3, num_parameters=2_000_000) == []
    (advice,) = advise(learning_rate=1e-6, num_parameters=2_000_000)
    assert "hardly moves at it" in advice.said
    (advice,) = advise(learning_rate=1e-6, num_parameters=2_000_000, is_lora=True)
    assert "an adapter on one below 100 million hardly moves" in advice.said
    assert advise(learning_rate=1e-4, num_parameters=2_000_000, is_lora=True) == []
    assert advise(learning_rate=1e-3, num_parameters=2_000_000_000) != []


@pytest.mark.parametrize(
    "given",
    [
        {"num_parameters": 2_000_000},
        {"num_parameters": 2_000_000, "is_lora": True},
        {"num_parameters": 2_000_000_000},
        {"num_parameters": 2_000_000_000, "is_lora": True},
        {"optimizer": "adamw_torch_fused"},
        {"optimizer": "paged_adamw_8bit"},
    ],
)
def test_a_learning_rate_of_5e_2_is_advised_against_for_any_model(given):
    (advice,) = advise(learning_rate=5e-2, **given)
    assert advice.option == "learning_rate"
    assert "learning_rate=0.05 is high" in advice.said


def test_plain_descent_has_another_scale_of_learning_rates():
    assert advise(learning_rate=5e-2, optimizer="sgd") == []
    assert advise(learning_rate=1e-2, optimizer="sgd", is_lora=True, num_parameters=2_000_000_000) == []
    (advice,) = advise(learning_rate=100.0, optimizer="sgd")
    assert "high even for SGD" in advice.said


@pytest.mark.parametrize(
    "name, warns",
    [
        ("dapo", True),
        ("dapo, objective=zero, regularizer=distill(teacher='big')", False),
        ("mopd, teacher=big", False),
        ("mopd, teacher=big, reward=1.0", True),
        ("iw_opd, teacher=big", False),
        ("sdpo", False),
        ("rlsd", True),
    ],
)
def test_a_small_group_is_advised_against_where_rewards_teach(name, warns):
    from covey import GRPOConfig
    from covey.training.build import advice_for
    from kit import tiny_model

    args = GRPOConfig(output_dir="x", num_generations=3, per_device_train_batch_size=6)
    remarks = advice_for(args, tiny_model(), alg.from_name(name))
    assert any("noisy baseline" in remark for remark in remarks) == warns


@pytest.mark.parametrize(
    "name, warns",
    [
        ("mopd", True),
        ("iw_opd", True),
        ("opsd", True),
        ("sdft", True),
        ("dapo, objective=zero, regularizer=distill(teacher='policy', feedback='best')", True),
        ("mopd, teacher=big", False),
        ("iw_opd, feedback=solution", False),
        ("opsd, feedback=solution", False),
        ("mopd, reward=1.0", False),
        ("rlsd", False),
        ("sdpo", False),
        ("grpo", False),
    ],
)
def test_a_policy_that_is_its_only_teacher_by_default_is_advised_against(name, warns):
    from covey import GRPOConfig
    from covey.training.build import advice_for
    from kit import tiny_model

    remarks = advice_for(GRPOConfig(output_dir="x"), tiny_model(), alg.from_name(name))
    assert any("The only teacher is the policy itself" in remark for remark in remarks) == warns


@pytest.mark.parametrize(
    "weights, warns",
    [(["linear:1:0:9", 1.0], True), ([lambda step: 1.0, 1.0], True), ([0.5, 1.0], False), (None, False)],
)
def test_a_best_evaluation_by_weights_that_move_is_advised_against(weights, warns):
    from covey import GRPOConfig
    from covey.training.build import advice_for
    from kit import tiny_model

    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    for metric in (None, "reward", "rewards/right/mean"):
        args = GRPOConfig(output_dir="x", reward_weights=weights, metric_for_best_model=metric, **best)
        remarks = advice_for(args, tiny_model(), None)
        assert any("reward_weights move" in remark for remark in remarks) == (warns and "/" not in (metric or ""))
