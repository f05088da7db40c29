"""Every preset, and compositions that need the whole step or remember something, through the real trainer on a tiny model."""

import math

import pytest
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from kit import rest_nightly, tiny_model, tiny_tokenizer

COMPOSED = {
    "covariance and prompt means": alg.dapo().replace(
        objective=alg.ClipCov(share=0.1, lower=0.0), aggregate=alg.prompt_mean
    ),
    "adaptive KL, moving reference": alg.grpo(
        kl=alg.KL(coefficient=alg.AdaptiveKL(0.05, horizon=10)), reference=alg.Every(1, 0.6)
    ),
    "adaptive entropy of top tokens": alg.dapo().replace(
        regularizers=alg.EntropyBonus(alg.AdaptiveEntropy(9.0, 0.01), alg.TopEntropy(0.5)), weights=alg.TopEntropy(0.5)
    ),
    "whitened weights": alg.dapo(correction=alg.Correction("token", "truncate", 2.0, normalize=True)),
}
ALGORITHMS = {**{name: preset() for name, preset in alg.PRESETS.items()}, **COMPOSED}
IN_CI = ("ppo", "adaptive KL, moving reference")
"""One of each way to use a rollout; every preset's gradient is compared in tests/learner/test_two_processes.py."""


def reward(completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]


def trained(algorithm, folder):
    trainer = GRPOTrainer(
        model=tiny_model(hidden=16),
        processing_class=tiny_tokenizer(),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": ["2 + 2 =", "Tom has", "12 + 30", "What is"]}),
        algorithm=algorithm,
        args=GRPOConfig(
            output_dir=str(folder / "run"),
            max_steps=2,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_generations=4,
            num_iterations=2,
            max_completion_length=6,
            learning_rate=1e-3,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        ),
    )
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", rest_nightly(ALGORITHMS, IN_CI))
def test_two_steps_on_one_rollout_move_the_model(name, tmp_path):
    first, second = trained(ALGORITHMS[name], tmp_path)
    assert first["grad_norm"] > 0
    assert math.isfinite(second["loss"])
    assert first["approx_kl"] == pytest.approx(0.0, abs=1e-9)  # on-policy
    assert second["approx_kl"] > 1e-6  # the first step has moved it
    if ALGORITHMS[name].kl is not None:
        assert "kl" in second
    if ALGORITHMS[name].critic is not None:
        assert second["value_loss"] > 0


def test_a_coefficient_with_memory_moves_during_training(tmp_path):
    _, second = trained(COMPOSED["adaptive entropy of top tokens"], tmp_path)
    assert second["entropy_coef"] == pytest.approx(0.015)


@pytest.mark.parametrize("name", rest_nightly(["remax", "ppo", "reinforce_pp"], 1))
def test_what_an_algorithm_needs_of_a_rollout_is_there_in_evaluation_too(name, tmp_path):
    held_out = Dataset.from_dict({"prompt": ["3 + 4 =", "Ada has", "7 + 1", "Who is"]})
    trainer = GRPOTrainer(
        model=tiny_model(hidden=16),
        processing_class=tiny_tokenizer(),
        reward_funcs=reward,
        train_dataset=held_out,
        eval_dataset=held_out,
        algorithm=name,
        args=GRPOConfig(
            output_dir=str(tmp_path), num_generations=4, max_completion_length=6, use_cpu=True, report_to="none"
        ),
    )
    assert math.isfinite(trainer.evaluate()["eval_loss"])
