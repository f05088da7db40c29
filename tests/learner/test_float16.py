"""float16 with loss scaling, trained for real on a CPU: an overflow skips its step, halves the scale, and resuming keeps the scale."""

import logging

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from covey import GRPOConfig, GRPOTrainer
from kit import rest_nightly, tiny_model, tiny_tokenizer

TOO_LARGE = 2.0**40
"""A loss scale whose gradients are infinite in float16."""


class Overflow(TrainerCallback):
    """Makes the scale of one step too large, and keeps the weights after each step."""

    def __init__(self, at=None):
        self.at, self.scales, self.weights, self.trainer = at, {}, {}, None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.at:
            self.scaler.update(TOO_LARGE)

    def on_step_end(self, args, state, control, **kwargs):
        self.scales[state.global_step] = self.scaler.get_scale()
        self.weights[state.global_step] = flat(self.trainer.model)
        if self.scales[state.global_step] == TOO_LARGE / 2:
            self.scaler.update(2.0**10)  # halving would take many steps more

    @property
    def scaler(self):
        return self.trainer._running.learner.scaler


def flat(model):
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def by_ids(completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]


def trained(folder, overflow, resume=None, reward=by_ids, **changed):
    options = {
        "max_steps": 4,
        "save_steps": 3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "fp16": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    one = GRPOTrainer(
        model=tiny_model(hidden=64),
        processing_class=tiny_tokenizer(),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": ["2 + 2 =", "Tom has"]}),
        args=GRPOConfig(output_dir=str(folder), **{**options, **changed}),
        callbacks=[overflow],
    )
    overflow.trainer = one
    one.train(resume_from_checkpoint=resume)
    return one


@pytest.mark.slow
def test_products_and_gradients_are_float16s_and_close_to_float32s(tmp_path):
    half, whole = Overflow(), Overflow()
    first = trained(tmp_path / "half", half, max_steps=1, save_strategy="no")
    assert first._running.learner.policy.compute_dtype == torch.float16
    assert {parameter.dtype for parameter in first.model.parameters()} == {torch.float32}
    whole.on_step_end = lambda *given, **named: None
    second = trained(tmp_path / "whole", whole, max_steps=1, save_strategy="no", fp16=False, bf16=False)
    norms = [one.state.log_history[0]["grad_norm"] for one in (first, second)]
    assert norms[0] == pytest.approx(norms[1], rel=0.02)
    assert norms[0] != norms[1]


def test_an_overflow_skips_its_step_halves_the_scale_and_a_resumed_run_goes_on_with_it(tmp_path):
    whole = Overflow(at=2)
    one = trained(tmp_path, whole)
    assert whole.scales == {1: 2.0**16, 2: TOO_LARGE / 2, 3: 2.0**10, 4: 2.0**10}
    assert torch.equal(whole.weights[2], whole.weights[1]), "the step that overflowed changed nothing"
    assert not torch.equal(whole.weights[3], whole.weights[2])
    assert not torch.isfinite(torch.tensor(one.state.log_history[1]["grad_norm"]))
    again = Overflow()
    with pytest.warns(UserWarning, match="goes on from step 3"):
        other = trained(tmp_path, again, resume=str(tmp_path / "checkpoint-3"))
    assert again.scales == {4: 2.0**10}, "the scale of the checkpoint, not a new run's 65536"
    assert other._running.learner.scaler.state_dict() == one._running.learner.scaler.state_dict()
    assert torch.equal(again.weights[4], whole.weights[4])


def test_a_run_without_float16_goes_on_with_it_and_a_new_scale(tmp_path):
    first, again = Overflow(), Overflow()
    first.on_step_end = lambda *given, **named: None
    trained(tmp_path, first, max_steps=1, save_steps=1, fp16=False, bf16=False)
    trained(tmp_path, again, resume=str(tmp_path / "checkpoint-1"), max_steps=2)
    assert again.scales == {2: 2.0**16}


@pytest.mark.parametrize("tied", rest_nightly([[1, 2, 3, 4], [2]], 1), ids=["all", "one"])
def test_a_step_whose_rewards_tie_changes_nothing_and_the_run_goes_on(tmp_path, tied):
    calls = []

    def reward(completion_ids, **columns):
        calls.append(1)
        return [0.0 if len(calls) in tied else float(sum(ids) % 7) for ids in completion_ids]

    seen = Overflow()
    one = trained(tmp_path, seen, reward=reward)
    assert one.state.global_step == 4
    assert set(seen.scales.values()) == {2.0**16}
    assert torch.equal(seen.weights[2], seen.weights[1])
    assert torch.equal(seen.weights[4], seen.weights[3]) == (4 in tied)


def test_on_a_cpu_it_is_accepted_with_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="covey"):
        config = GRPOConfig(output_dir=str(tmp_path), fp16=True, use_cpu=True, report_to="none")
    assert config.fp16
    assert config.bf16 is False
    assert "fp16=True on a CPU is slow" in caplog.text
