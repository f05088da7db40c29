"""Run apart: `STEPS` steps of a tiny model with a reward that hangs or raises now and then, and what the process holds.

`python long_run.py TESTS FOLDER STEPS [COMPLETIONS]` prints one JSON list of `[step, MiB, files, threads, children]`; the rows are
also in `FOLDER/held.jsonl` while it runs. `COMPLETIONS` of a step are 8 unless told.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
sys.path.insert(0, f"{sys.argv[1]}/faults")
import torch

torch.set_num_threads(1)
from small_runs import reward_len, trainer  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

FOLDER, STEPS = Path(sys.argv[2]), int(sys.argv[3])
COMPLETIONS = int(sys.argv[4]) if len(sys.argv) > 4 else 8


def fails_sometimes(prompts, completions, trainer_state, **columns):
    if trainer_state.global_step % 50 == 7:
        time.sleep(600)
    if trainer_state.global_step % 50 == 31:
        raise ValueError("planted")
    return reward_len(prompts, completions)


class Look(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step % 20 == 0:
            memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            here = [len(os.listdir("/proc/self/fd")), threading.active_count(), len(children)]
            self.seen.append([state.global_step, memory / 2**20, *here])
            with (FOLDER / "held.jsonl").open("a") as file:
                file.write(json.dumps(self.seen[-1]) + "\n")


look = Look()
options = {"max_steps": STEPS, "save_steps": 10, "save_total_limit": 2, "rollout_log_steps": 5, "logging_steps": 50}
options |= {"rollout_total_limit": 50, "per_device_train_batch_size": COMPLETIONS}
trainer(FOLDER, reward_funcs=fails_sometimes, reward_timeout_seconds=0.2, callbacks=[look], **options).train()
sys.stdout.write(json.dumps(look.seen) + "\n")
