"""One small run, looked at from many sides."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parent))
from contract import ROWS, length, trainer


class Listener(TrainerCallback):
    def __init__(self):
        self.heard, self.logs, self.evaluated, self.kinds = [], [], [], set()

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name.startswith("on_"):
            super().__getattribute__("heard").append(name)
        return found

    def on_log(self, args, state, control, logs=None, **named):
        self.logs.append(dict(logs))

    def on_evaluate(self, args, state, control, metrics=None, **named):
        self.evaluated.append(dict(metrics))

    def on_step_end(self, args, state, control, model=None, processing_class=None, **named):
        self.kinds.add((type(model).__name__, processing_class is not None, type(state).__name__))


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Four steps with two rewards, logs of every second step, an evaluation in the middle, checkpoints."""
    folder, listener, calls = tmp_path_factory.mktemp("contract"), Listener(), []

    def half(completions, log_extra, log_metric, **columns):
        calls.append(columns)
        log_extra("letters", [len(text) for text in completions])
        log_metric("my_metric", 7.0)
        return [0.5 if i % 2 else None for i in range(len(completions))]

    one = trainer(
        folder, rewards=[length, half], callbacks=[listener], eval_dataset={"easy": Dataset.from_list(ROWS[:2])},
        reward_weights=[1.0, 2.0], max_steps=4, logging_steps=2, eval_strategy="steps", eval_steps=2, save_strategy="steps",
        save_steps=2, entropy_coef=0.01, beta=0.1, rollout_log_steps=1,
    )  # fmt: skip
    result = one.train()
    return SimpleNamespace(trainer=one, folder=folder / "out", listener=listener, calls=calls, result=result)
