"""Run apart: a reward model that is much larger than what learns, under a limit of the address space.

`python scoring_in_little_memory.py run SPARE_MIB FOLDER STEPS`: a tiny run to step STEPS that goes on where the folder's run stopped;
once everything is loaded it may take no more than SPARE_MIB beyond what it has (0: no limit).
`python scoring_in_little_memory.py one SPARE_MIB`: a batch with one text that does not fit alone; prints one JSON object.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch

torch.set_num_threads(1)
from datasets import Dataset  # noqa: E402
from out_of_memory import limit  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from covey.rewards import ModelReward, RewardSpec, Scorer  # noqa: E402
from faults.small_runs import trainer  # noqa: E402
from kit import group, tiny_reward_model, tiny_tokenizer  # noqa: E402


def apples():
    large = tiny_reward_model(hidden=768, max_position_embeddings=32768)
    return RewardSpec(name="apples", call=ModelReward(large, tiny_tokenizer(), "judge of apples", batch_size=32))


class Limit(TrainerCallback):
    """Takes the memory away after a first step, or at once where one was made before."""

    def __init__(self, folder, spare_mib):
        self.waits, self.spare_mib = not folder.exists(), spare_mib

    def on_step_begin(self, args, state, control, **kwargs):
        if not self.waits:
            limit(self.spare_mib)
            self.spare_mib = 0
        self.waits = False


def run(spare_mib, folder, steps):
    trainer(
        Path(folder),
        train_dataset=Dataset.from_list([{"prompt": f"Tom has {i} apples. " * (8 + i)} for i in range(4)]),
        reward_funcs=[apples()],
        callbacks=[Limit(Path(folder), spare_mib)],
        max_steps=int(steps),
        per_device_train_batch_size=32,
        num_generations=8,
        lr_scheduler_type="constant",
        logging_steps=1,
    ).train("auto")
    return {}


def one(spare_mib):
    scorer = Scorer([apples()])
    texts = ["apples", "pears", "plums", "pears " * 600]
    scorer.score([group(texts[:1])])
    limit(spare_mib)
    (scored,) = scorer.score([group(texts)])
    return {"scores": scored.rewards[:, 0].tolist(), "said": [event.said for event in scored.events]}


sys.stdout.write("\n" + json.dumps({"run": run, "one": one}[sys.argv[1]](int(sys.argv[2]), *sys.argv[3:])))
