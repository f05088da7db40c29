"""Averages of a run's weights: by hand, evaluated in place of the run's own, kept at its end, and resumed to the bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from covey import GRPOConfig, GRPOTrainer
from covey.errors import ConfigError
from covey.merging import Recipe, WeightAverage, merge_models
from covey.models.merging.weights import Weights
from covey.process.world import World
from covey.rollout import NativeSampler, SamplingParams
from covey.training.evaluator import averaged
from kit import rest_nightly, tiny_model, tiny_tokenizer


def line(value: float = 0.0) -> torch.nn.Linear:
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, value)
    return layer


def walk(average: WeightAverage, values: list[float]) -> float:
    for step, value in enumerate(values, 1):
        torch.nn.init.constant_(average.model.weight, value)
        average.update(step)
    return average.average["weight"].item()


def test_an_exponential_moving_average_forgets_its_start_as_it_warms_up():
    # decays 2/11, 3/12, 4/13, then below the limit of 0.5: from 0, after weights 1, 2, 4
    by_hand = 0.0
    for decay, value in ((2 / 11, 1.0), (3 / 12, 2.0), (4 / 13, 4.0)):
        by_hand = decay * by_hand + (1 - decay) * value
    assert walk(WeightAverage(line(), decay=0.5), [1.0, 2.0, 4.0]) == pytest.approx(by_hand)


def test_the_decay_is_never_above_the_one_asked_for():
    assert walk(WeightAverage(line(), decay=0.1), [1.0, 2.0]) == pytest.approx(0.1 * 0.9 + 0.9 * 2.0)


def test_a_soup_is_the_mean_of_every_second_step():
    average = WeightAverage(line(9.0), every=2)
    assert average.is_empty
    assert walk(average, [1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(3.0)


def test_the_average_of_bfloat16_weights_moves_by_less_than_they_can():
    layer = line(1.0).to(torch.bfloat16)
    average = WeightAverage(layer, decay=0.999)
    average.count = 10**6  # warmed up
    torch.nn.init.constant_(layer.weight, 1.0078125)
    average.update(1)
    assert average.average["weight"].item() == pytest.approx(1.0 + 0.001 * 0.0078125, abs=1e-7)


def test_weights_are_their_own_again_after_a_look_at_the_average():
    layer = line(1.0)
    average = WeightAverage(layer, decay=0.5)
    walk(average, [0.1])
    own = layer.weight.detach().clone()
    with average.in_place():
        assert layer.weight.item() == average.average["weight"].item() != own.item()
    assert torch.equal(layer.weight, own)


def reward(completions, **columns):
    return [float(len(text) % 3) for text in completions]


def trainer(folder, **options):
    args = {
        "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 4, "max_completion_length": 4,
        "learning_rate": 1e-2, "report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "disable_tqdm": True, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1,
    }  # fmt: skip
    rows = Dataset.from_list([{"prompt": f"{i} + 2 ="} for i in range(6)])
    config = GRPOConfig(str(folder), **{**args, **options})
    return GRPOTrainer(tiny_model(), reward, config, rows, eval_dataset=rows, processing_class=tiny_tokenizer())


def test_a_run_ends_with_its_average_and_evaluates_it(tmp_path):
    plain, averaged = (
        trainer(tmp_path / "plain"),
        trainer(tmp_path / "ema", ema_decay=0.9, eval_strategy="steps", eval_steps=4),
    )
    weights = []
    update = WeightAverage.update
    plain.train()
    by_hand = WeightAverage(averaged.model, decay=0.9)

    def seen(self, step):
        weights.append({name: p.detach().clone() for name, p in self.model.named_parameters()})
        update(self, step)
        update(by_hand, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightAverage, "update", seen)
        averaged.train()
    assert len(weights) == 4
    for name, p in plain.model.named_parameters():
        assert torch.equal(p, weights[-1][name])  # training itself is as without an average
    for name, p in averaged.model.named_parameters():
        assert torch.equal(p, by_hand.average[name])
    told = next(entry for entry in averaged.state.log_history if "eval_loss" in entry)
    again = averaged.evaluate()
    for name in ("eval_reward", "eval_completions/mean_length", "eval_entropy"):
        assert again[name] == told[name]  # what was evaluated is what is kept


def test_checkpoints_of_a_run_are_merged_into_a_model_without_what_belongs_to_training(tmp_path):
    trainer(tmp_path / "run").train()
    early, late = (tmp_path / "run" / f"checkpoint-{step}" for step in (2, 4))
    merge_models([early, late], tmp_path / "soup", Recipe())
    first, second, soup = (
        AutoModelForCausalLM.from_pretrained(one).state_dict() for one in (early, late, tmp_path / "soup")
    )
    for name, weight in soup.items():
        torch.testing.assert_close(weight, (first[name] + second[name]) / 2, atol=1e-6, rtol=0)
    assert Weights(tmp_path / "soup").names == Weights(early).names
    assert not {"manifest.json", "covey_state.json"} & {file.name for file in (tmp_path / "soup").iterdir()}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*later checkpoint")
@pytest.mark.parametrize("options", [{"ema_decay": 0.9}, {"soup_steps": 1}])
def test_a_resumed_average_is_the_one_left_alone(tmp_path, options):
    alone = trainer(tmp_path / "alone", **options)
    alone.train()
    resumed = trainer(tmp_path / "alone", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "alone" / "checkpoint-2"))
    for (name, a), b in zip(alone.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ema_decay": 0.9, "soup_steps": 2}, "keep one of them"),
        ({"ema_decay": 1.0}, "must be below 1"),
        ({"ema_decay": 1.5}, "at most 1"),
        ({"soup_steps": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_averaged_is_refused(tmp_path, options, said):
    with pytest.raises(ConfigError, match=said):
        GRPOConfig(str(tmp_path), **options)


@pytest.mark.parametrize("size", rest_nightly([1, 2], [2]))
def test_an_evaluation_that_raises_leaves_the_sampler_with_the_trained_weights(size):
    """The caller may go on training after the error. Of several processes none sends weights: the others may not have failed."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    average = WeightAverage(model, decay=0.5)
    average.update(1)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    average.update(2)
    sampler = NativeSampler(model, tokenizer, dtype="bfloat16")  # of which it keeps a copy
    policy = SimpleNamespace(policy=SimpleNamespace(model=model))
    parts = SimpleNamespace(
        average=average, evaluation_sampler=None, sampler=sampler, learner=policy, world=World(size=size)
    )
    drawn = lambda: [group.completions[0].logprobs for group in sampler.sample(["2 + 2 ="], 1, SamplingParams(seed=0))]
    before = drawn()[0]

    def evaluate():
        with averaged(parts, 2):
            assert not torch.equal(drawn()[0], before)
            raise ValueError("a reward")

    with pytest.raises(ValueError, match="a reward"):
        evaluate()
    assert torch.equal(drawn()[0], before) == (size == 1)
