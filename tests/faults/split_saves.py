"""Run apart, in each of two processes: a tiny run of eight steps with a split model, saved at every second one.

`python split_saves.py TESTS FOLDER WAY [FAULT]`; WAY is "beside" or "waits". With FAULT rank 1 takes a second for its files of
checkpoint-2, and its disk refuses those of checkpoint-4 ("refuses") or it dies in them ("dies").
"""

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import torch

torch.set_num_threads(1)
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from covey import GRPOConfig, GRPOTrainer  # noqa: E402
from covey.process.part_saves import PartSave  # noqa: E402
from kit import tiny_model, tiny_tokenizer  # noqa: E402

FOLDER, WAY, FAULT = Path(sys.argv[2]), sys.argv[3], (*sys.argv[4:], "")[0]
written = PartSave._written


def troubled(self: PartSave, folder: Path) -> OSError | None:
    step = folder.parent.name.split(".")[0]
    if FAULT and step == "checkpoint-2":
        time.sleep(1.0)
    if FAULT and step == "checkpoint-4":
        if FAULT == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return OSError(errno.ENOSPC, "No space left on device")
    return written(self, folder)


class Look(TrainerCallback):
    """Steps that began while a checkpoint was being written."""

    def __init__(self) -> None:
        self.beside: list[int] = []

    def on_step_begin(self, args, state, control, **kwargs):
        if list(FOLDER.glob("checkpoint-*.tmp-*")):
            self.beside.append(state.global_step)


def reward(completion_ids, **columns):
    return [float(sum(ids) % 7) for ids in completion_ids]


if os.environ["RANK"] == "1":
    PartSave._written = troubled  # type: ignore[method-assign]
args = GRPOConfig(
    str(FOLDER), fsdp=True, max_steps=8, save_steps=2, save_async=WAY == "beside", num_generations=2, max_completion_length=4,
    per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=1, report_to="none", disable_tqdm=True, use_cpu=True, bf16=False,
)  # fmt: skip
rows = Dataset.from_list([{"prompt": f"{i} + {i} ="} for i in range(16)])
look = Look()
model = tiny_model(hidden=16, layers=2)
GRPOTrainer(model, reward, args, rows, processing_class=tiny_tokenizer(), callbacks=[look]).train()
sys.stdout.write(json.dumps(look.beside) + "\n")
