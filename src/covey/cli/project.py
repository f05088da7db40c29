"""The files of `covey init`, but for the data."""

REWARD = '''"""The reward function: the score of a completion. Change this file; `pytest` and `covey reward test` try it before a run does."""

import re

ANSWER = re.compile(r"####\\s*(-?\\d+)\\s*$")


def right_answer(completions, answer, **columns):
    """1.0 where the completion ends with `#### ` and the right number, else 0.0.

    `completions`: texts, or lists of chat messages, one for each answer of the model. `answer`: the column of the data, as
    long. Every other column comes by its name. Returns one number for each completion; None means "does not apply".
    """
    return [float(number_of(text_of(one)) == right) for one, right in zip(completions, answer)]


def number_of(text):
    """The number at the very end, as text; None where there is none."""
    found = ANSWER.search(text.strip())
    return found and str(int(found[1]))


def text_of(completion):
    """A completion's text, from text or from chat messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
'''

TEST = '''"""Run with `pytest`: the reward pays what it should, the data is sound, and a step of training works."""

import json
import subprocess
import sys
from pathlib import Path

from reward import right_answer

HERE = Path(__file__).parent


def rows(name):
    return [json.loads(line) for line in (HERE / "data" / name).open(encoding="utf-8")]


def test_the_reward_pays_the_right_answer_and_nothing_else():
    completions = ["3 + 4 = 7 #### 7", "#### 8", "7", "", "#### 7 or 8", [{"role": "assistant", "content": "#### 7"}]]
    assert right_answer(completions, answer=["7"] * 6) == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]


def test_every_row_has_a_prompt_and_an_answer_that_can_be_paid():
    for row in rows("train.jsonl") + rows("test.jsonl"):
        assert row["prompt"][-1]["role"] == "user"
        assert right_answer([f"#### {row['answer']}"], answer=[row["answer"]]) == [1.0]


def test_no_held_out_prompt_is_trained_on():
    trained = {json.dumps(row["prompt"]) for row in rows("train.jsonl")}
    assert not trained & {json.dumps(row["prompt"]) for row in rows("test.jsonl")}


def test_two_steps_of_training(tmp_path):
    words = ["train", "run.yaml", "--max-steps", "2", "--output-dir", str(tmp_path / "run"), "--max-eval-prompts", "8"]
    done = subprocess.run([sys.executable, "-m", "covey", *words], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
'''

CONFIG = """# covey train run.yaml        covey train --help-all names every option
model: {model}
dataset: data/train.jsonl
eval_dataset: data/test.jsonl
reward: [reward.py:right_answer]

learning_rate: {learning_rate}
per_device_train_batch_size: {batch}       # completions a step; num_generations of them answer one prompt
num_generations: 8
max_completion_length: {length}
max_steps: 60
eval_strategy: steps
eval_steps: 30
save_steps: 30
save_total_limit: 2
rollout_log_steps: 10
"""

README = """# {name}

| file | |
|---|---|
| `data/train.jsonl`, `data/test.jsonl` | prompts with their answers; replace them by yours, a row a line |
| `reward.py` | what a completion is paid |
| `run.yaml` | options of the run |
| `test_project.py` | tests of the three |

```
pytest                                                              # under a minute; needs pip install pytest
covey reward test --reward reward.py:right_answer --dataset data/train.jsonl
covey doctor run.yaml                                               # checks of the run before it starts
covey train run.yaml --output-dir runs/first                        # {minutes}
covey view runs                                                     # curves, alerts, what the model wrote
covey chat runs/first
```

With a model of your own: `model:` in `run.yaml` (a folder or a hub id), and a learning rate near 1e-6 for all its weights or 1e-5 for an
adapter (`lora_r: 16`).
"""

GITIGNORE = "runs/\n__pycache__/\n"
