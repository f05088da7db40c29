"""Every preset teaches the model that ships with Covey within 25 steps, by the reward or by a teacher that knows more."""

import pytest
import torch
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer, SFTTrainer, demo, sft_config
from covey import algorithms as alg

STEPS = 25
WITHOUT_REWARD = {"iw_opd": "", "mopd": "", "opsd": "", "sdft": "", "sdpo": ", feedback=None"}
"""Presets whose teacher alone moves the policy, each with what lets another model read the policy's prompt. By default the teacher
is the policy with feedback in its prompt, which this model cannot read, so that it unlearns its task."""


def trainer_of(algorithm, folder):
    """8 prompts x 8 completions a step, at the rate and with the schedule of the table in docs/algorithms-measured.md."""
    return GRPOTrainer(
        model=str(demo.model_path()),
        reward_funcs=demo.reward,
        train_dataset=Dataset.from_list(demo.rows("train", 512)),
        eval_dataset=Dataset.from_list(demo.rows("test", 64)),
        algorithm=algorithm,
        args=GRPOConfig(
            output_dir=str(folder),
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


def reward_of(trainer):
    return trainer.evaluate()["eval_reward"]  # 512 drawn answers, the same problems and seed each time


@pytest.mark.nightly  # `covey demo` trains by grpo before every change lands
@pytest.mark.parametrize("name", sorted(set(alg.PRESETS) - set(WITHOUT_REWARD)))
def test_the_reward_on_held_out_problems_rises(name, tmp_path):
    trainer = trainer_of(name, tmp_path / "run")
    before = reward_of(trainer)
    trainer.train()
    assert reward_of(trainer) > before + 0.04  # twice the error of the difference


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The same model after 40 steps on right answers, and its folder: 95% right on held-out problems."""
    folder = tmp_path_factory.mktemp("teacher")
    solved = [
        {"prompt": asked(problem), "completion": [{"role": "assistant", "content": demo.task.worked(problem)}]}
        for problem in demo.problems("train", 40 * 64)
    ]
    options = {"max_steps": 40, "per_device_train_batch_size": 64, "learning_rate": 1e-3, "save_strategy": "no"}
    args = sft_config(output_dir=str(folder / "run"), report_to="none", disable_tqdm=True, **options)
    trainer = SFTTrainer(str(demo.model_path()), args, Dataset.from_list(solved))
    trainer.train()
    trainer.save_model(str(folder / "model"))
    return trainer.model.eval(), folder / "model"


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(WITHOUT_REWARD))
def test_a_policy_that_learns_from_a_teacher_alone_comes_to_it(name, teacher, tmp_path):
    model, folder = teacher
    trainer = trainer_of(f"{name}, teacher='{folder}'{WITHOUT_REWARD[name]}", tmp_path / "run")
    before, distance = reward_of(trainer), distance_between(trainer, model)
    trainer.train()
    assert reward_of(trainer) > before + 0.14  # a third of the way from 0.53 to the teacher's
    assert distance_between(trainer, model) < 0.8 * distance


def distance_between(trainer, teacher):
    """Mean KL from the policy to its teacher, nats a token, on right answers to 64 held-out problems."""
    tokenizer, values = trainer.processing_class, []
    for problem in demo.problems("test", 64):
        prompt = tokenizer.apply_chat_template(asked(problem), add_generation_prompt=True, return_dict=False)
        answer = tokenizer(demo.task.worked(problem), add_special_tokens=False).input_ids
        with torch.no_grad():
            p, q = (
                model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 :].log_softmax(-1)
                for model in (trainer.model.eval(), teacher)
            )
        values.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(values).mean().item()


def asked(problem):
    return [{"role": "user", "content": problem.question}]
