"""A run folder that an earlier version of Covey wrote is gone on with: `earlier_run/` was written before files moved into rooms."""

import math
import shutil
from pathlib import Path

import pytest
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from kit import tiny_model, tiny_tokenizer

EARLIER = Path(__file__).parent / "earlier_run"
SUM_OF_WEIGHTS = 49.49634408047859
"""Of all weights after step 4, as the earlier version computed them without a stop."""


def reward(completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_of_an_earlier_version_goes_on_from_its_checkpoint_to_the_same_weights(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(EARLIER, run)
    args = GRPOConfig(
        output_dir=str(run), max_steps=4, save_steps=2, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=6, learning_rate=1e-3, beta=0.02, sync_ref_model=True, ref_model_sync_steps=1,
        rollout_log_steps=0, logging_steps=1, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=tiny_model(hidden=16),
        processing_class=tiny_tokenizer(),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": ["2 + 2 =", "Tom has", "A bird"]}),
        args=args,
    )
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert trainer.state.global_step == 4
    weights = math.fsum(float(weight.double().sum()) for weight in trainer.model.parameters())
    assert weights == pytest.approx(SUM_OF_WEIGHTS, abs=1e-5)
