"""What the tests of this folder share: rows, a reward, a trainer made as a TRL script makes one."""

from datasets import Dataset

from covey import GRPOConfig, GRPOTrainer
from kit import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"Tom has {i} apples.", "answer": str(i)} for i in range(8)]
CHAT = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in ROWS]


def length(completions, **columns):
    return [float(len(text)) for text in completions]


def options(tmp_path, **changed):
    given = {
        "output_dir": str(tmp_path / "out"),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 4,
        "max_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return GRPOConfig(**{**given, **changed})


ARGUMENTS = {
    "eval_dataset", "callbacks", "optimizers", "peft_config", "reward_processing_classes", "processing_class", "tools",
    "environment_factory", "rollout_func",
}  # fmt: skip


def trainer(tmp_path, rewards=length, rows=ROWS, model=None, kind=GRPOTrainer, **given):
    own = {name: given.pop(name) for name in list(given) if name in ARGUMENTS}
    own.setdefault("processing_class", tiny_tokenizer())
    data = Dataset.from_list(rows) if isinstance(rows, list) else rows
    args = options(tmp_path, **given)
    return kind(model=model or tiny_model(layers=1), reward_funcs=rewards, args=args, train_dataset=data, **own)
