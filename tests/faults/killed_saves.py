"""A process that forks one child a training run, which stops itself right before it saves, so that strace sees that save.

`python killed_saves.py TESTS`, then a line `FOLDER FIRST LAST` on its input a run; it answers with the child's id, and with its exit code
at its end. FIRST 0: a run to step LAST that goes on where the folder's run stopped. Else the run stops itself after the update of step
FIRST, and ends once that step's checkpoint is written and the older one pruned.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import torch

torch.set_num_threads(1)
from transformers import TrainerCallback  # noqa: E402

from faults.small_runs import trainer  # noqa: E402


class AtTheSave(TrainerCallback):
    """Stops right before one save, to be continued by whoever watches it, and ends right after it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGSTOP)

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os._exit(0)


def train(folder: Path, first: int, last: int) -> None:
    if first == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    options = {
        "max_steps": max(last, 4),
        "save_total_limit": 1,
        "logging_steps": 1,
        "num_iterations": 2,
        "rollout_log_steps": 1,
    }
    trainer(folder, callbacks=[AtTheSave(first)] if first else [], **options).train("auto")


sys.stdout.write("ready\n")
sys.stdout.flush()
for line in sys.stdin:
    folder, first, last = line.split()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(Path(folder), int(first), int(last))
            code = 0
        finally:
            os._exit(code)
    sys.stdout.write(f"{child}\n")
    sys.stdout.flush()
    sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
    sys.stdout.flush()
