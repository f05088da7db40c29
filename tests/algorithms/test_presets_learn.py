"""Every preset teaches the model that ships with Covey: its reward on held-out problems rises within 25 steps."""

import pytest
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer, demo
from covey import algorithms as alg

STEPS = 25
WITHOUT_REWARD = {"opsd", "sdft", "sdpo"}
"""They learn from the policy with feedback in its prompt alone, which this model cannot read."""


@pytest.mark.nightly  # `covey demo` trains by grpo before every change lands
@pytest.mark.parametrize("name", sorted(set(alg.PRESETS) - WITHOUT_REWARD))
def test_the_reward_on_held_out_problems_rises(name, tmp_path):
    """8 prompts x 8 completions a step, at the rate and with the schedule of the table in docs/algorithms-measured.md."""
    trainer = GRPOTrainer(
        model=str(demo.model_path()),
        reward_funcs=demo.reward,
        train_dataset=Dataset.from_list(demo.rows("train", 512)),
        eval_dataset=Dataset.from_list(demo.rows("test", 64)),
        algorithm=name,
        args=GRPOConfig(
            output_dir=str(tmp_path / "run"),
            max_steps=STEPS,
            per_device_train_batch_size=64,
            gradient_accumulation_steps=1,
            num_generations=8,
            max_completion_length=32,
            learning_rate=5e-4,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=5,
            logging_steps=10,
            per_device_eval_batch_size=512,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        ),
    )
    before = trainer.evaluate()["eval_reward"]  # 512 drawn answers, the same problems and seed both times
    trainer.train()
    assert trainer.evaluate()["eval_reward"] > before + 0.04  # twice the error of the difference
