"""Small runs on a GPU, and what they leave."""

import torch
from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from kit import tiny_model, tiny_tokenizer

PROMPTS = ["2 + 2 =", "Tom has", "12 + 30", "What is", "Anna had 20 pens", "The answer", "How many", "Why"]


def reward(completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]


def trainer_of(folder, model=None, peft_config=None, callbacks=(), eval_dataset=None, **changed):
    given = {
        "max_steps": 3,
        "save_strategy": "no",
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 32,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return GRPOTrainer(
        model=model or tiny_model(layers=2, hidden=64),
        processing_class=tiny_tokenizer(),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        eval_dataset=eval_dataset,
        peft_config=peft_config,
        callbacks=list(callbacks),
        args=GRPOConfig(output_dir=str(folder), **{**given, **changed}),
    )


def flat(model):
    return torch.cat([parameter.detach().float().flatten().cpu() for parameter in model.parameters()])


def trained(folder, resume=None, **changed):
    one = trainer_of(folder, **changed)
    before = flat(one.model)
    one.train(resume_from_checkpoint=resume)
    return one, before


def numbers(one, name):
    return [entry[name] for entry in one.state.log_history if name in entry]
