"""Subclasses: hooks that training has are called, the others are refused when the class is made."""

import inspect

import pytest
import torch
from contract import ROWS, length, trainer
from datasets import Dataset
from transformers import Trainer

from covey import GRPOTrainer
from covey.errors import ConfigError, RewardError
from covey.training.hooks import HONOURED, INSTEAD


@pytest.mark.parametrize(
    ("hook", "instead"),
    [
        ("compute_loss", "objective="),
        ("_compute_loss", "objective="),
        ("_generate_and_score_completions", "advantage="),
        ("_prepare_inputs", "num_generations"),
        ("training_step", "TrainerCallback"),
        ("_generate", "rollout_func="),
        ("create_optimizer", "optimizers="),
        ("get_train_dataloader", "shuffle_dataset=False"),
        ("_save_checkpoint", "on_save"),
        ("prediction_step", "evaluate()"),
    ],
)
def test_a_hook_that_nothing_calls_is_refused_with_what_to_use(hook, instead):
    with pytest.raises(ConfigError) as caught:
        type("Mine", (GRPOTrainer,), {hook: lambda self, *words, **named: None})
    assert f"Mine overrides {hook}, which nothing here calls" in str(caught.value)
    assert instead in str(caught.value)


def test_a_mixin_is_looked_at_too():
    class Mixin:
        def training_step(self, model, inputs):
            return None

    with pytest.raises(ConfigError, match="Mixin, a base of Mine, overrides training_step"):
        type("Mine", (Mixin, GRPOTrainer), {})


def test_a_hook_that_is_set_afterwards_is_refused_too(tmp_path, monkeypatch):
    class Mine(GRPOTrainer):
        pass

    one = trainer(tmp_path, kind=Mine)
    with pytest.raises(ConfigError, match="compute_loss is set on a Mine, and nothing here calls it: write the loss"):
        one.compute_loss = lambda model, inputs: 0.0
    with pytest.raises(ConfigError, match="_calculate_rewards is set on a trainer that is made already; override it"):
        one._calculate_rewards = lambda *given: None
    monkeypatch.setattr(Mine, "training_step", lambda *given: None, raising=False)
    with pytest.raises(ConfigError, match="Mine overrides training_step, which nothing here calls"):
        trainer(tmp_path, kind=Mine)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda *given: None, raising=False)
    with pytest.raises(ConfigError, match="GRPOTrainer overrides _compute_loss, which nothing here calls"):
        trainer(tmp_path)


def test_every_method_of_transformers_trainer_is_there_or_refused():
    """Nothing of its interface is silently ignored, whatever the version."""
    methods = {name for name, value in vars(Trainer).items() if inspect.isfunction(value)}
    unknown = methods - set(dir(GRPOTrainer)) - set(INSTEAD)
    assert not unknown, sorted(unknown)
    assert not set(INSTEAD) & HONOURED


def test_log_is_called_for_every_log(tmp_path):
    class Mine(GRPOTrainer):
        def log(self, logs, start_time=None):
            logs["mine"] = 1.0
            self._metrics["train"]["collected"].append(3.0)
            super().log(logs, start_time)

    one = trainer(
        tmp_path, kind=Mine, max_steps=2, logging_steps=1, eval_dataset=Dataset.from_list(ROWS[:2]), eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    one.train()
    kinds = ["eval" if "eval_reward" in e else "end" if "train_loss" in e else "step" for e in one.state.log_history]
    assert kinds == ["step", "step", "eval", "end"]
    assert all(entry["mine"] == 1.0 for entry in one.state.log_history)
    assert one.state.log_history[0]["collected"] == 3.0


def test_calculate_rewards_is_called_and_may_ask_the_rewards(tmp_path):
    seen = []

    class Mine(GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            given = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            seen.append((inputs[0]["answer"], inputs[0]["prompt"] == prompts[0], tuple(given.shape)))
            return given * 0 + torch.arange(len(prompts)).unsqueeze(-1)

    one = trainer(tmp_path, kind=Mine, rewards=length)
    one.train()
    assert seen == [(seen[0][0], True, (4, 1))]
    assert one.state.log_history[-1]["rewards/length/mean"] == 1.5, "0, 1, 2, 3"


def test_calculate_rewards_may_do_without_them_and_counts_in_evaluation(tmp_path):
    class Mine(GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            return [[5.0]] * len(prompts)

    one = trainer(tmp_path, kind=Mine, eval_dataset=Dataset.from_list(ROWS[:2]))
    assert one.evaluate()["eval_reward"] == 5.0


def test_calculate_rewards_of_another_shape_is_refused(tmp_path):
    class Mine(GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            return torch.zeros(len(prompts))

    with pytest.raises(
        RewardError, match=r"returned shape \[4\]; return one score for each of 4 completions by each of 1"
    ):
        trainer(tmp_path, kind=Mine).train()


def test_evaluate_may_be_replaced(tmp_path):
    class Mine(GRPOTrainer):
        def evaluate(self, *words, **named):
            return {**super().evaluate(*words, **named), "eval_mine": 4.0}

    one = trainer(tmp_path, kind=Mine, eval_dataset=Dataset.from_list(ROWS[:2]), eval_strategy="steps", eval_steps=1,
                  metric_for_best_model="mine")  # fmt: skip
    one.train()
    assert one.state.best_metric == 4.0
