"""One set of sampling parameters for sampler and learner, and evaluations that fill the sampler."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from covey import algorithms as alg
from covey.rollout import NativeSampler
from kit import rest_nightly, tiny_model, tiny_tokenizer

ROWS = Dataset.from_list([{"prompt": f"What is {i} + 1?"} for i in range(12)])


def length(completions, **columns):
    return [float(len(text) % 5) for text in completions]


def trainer_of(folder, **options):
    args = GRPOConfig(
        **{
            "output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none", "num_generations": 4,
            "per_device_train_batch_size": 8, "max_completion_length": 6, "max_steps": 2, "save_strategy": "no", "optim": "sgd",
            "learning_rate": 1.0, "seed": 3, **options,
        }
    )  # fmt: skip
    model = tiny_model("qwen2")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8)  # peaked, as a trained model is
    return GRPOTrainer(model, length, args, ROWS, ROWS, processing_class=tiny_tokenizer())


@pytest.mark.parametrize(
    "options",
    rest_nightly([{"temperature": 0.5}, {"repetition_penalty": 1.3}, {"top_k": 5}, {"min_p": 0.2}], 1),
    ids=lambda one: next(iter(one)),
)
def test_an_option_in_generation_kwargs_is_the_option(options, tmp_path):
    named, inner = trainer_of(tmp_path / "a", **options), trainer_of(tmp_path / "b", generation_kwargs=options)
    for trainer in (named, inner):
        trainer.train()
    for a, b in zip(named.model.parameters(), inner.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_evaluation_fills_the_sampler_whatever_its_batch_size(tmp_path, monkeypatch):
    asked, sample = [], NativeSampler.sample
    monkeypatch.setattr(
        NativeSampler,
        "sample",
        lambda own, prompts, n, params: asked.append(len(prompts)) or sample(own, prompts, n, params),
    )
    found = {}
    for size in (4, 8, 48):
        trainer = trainer_of(tmp_path / str(size), per_device_eval_batch_size=size)
        asked.clear()
        found[size] = trainer.evaluate()
        assert asked[-1] == len(ROWS)
        assert asked.count(len(ROWS)) == 1
    measured = ("runtime", "second", "loss", "logp_difference")  # of time, of batches, of rounding
    numbers = [
        {name: value for name, value in one.items() if not any(word in name for word in measured)}
        for one in found.values()
    ]
    assert len(numbers[0]) > 3
    for one in found.values():  # no KL and no other term: the policy's loss is all of it, over however many batches
        assert one["eval_policy_loss"] == pytest.approx(one["eval_loss"], abs=1e-7)
    for other in numbers[1:]:
        assert other == pytest.approx(numbers[0], nan_ok=True)


def test_a_short_last_batch_of_an_evaluation_counts_by_its_completions(tmp_path):
    bonus = alg.grpo().replace(regularizers=alg.entropy_bonus(1.0))  # its loss is a mean over completions
    options = {"algorithm": bonus}
    whole, parts = (
        trainer_of(tmp_path / str(size), per_device_eval_batch_size=size, **options).evaluate() for size in (48, 40)
    )
    assert parts["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-5)
