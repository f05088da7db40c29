"""A process that forks one child a training run, so that a test can kill many runs without waiting for many imports.

`python async_runs.py TESTS`, then a line `FOLDER STEPS` on its input a run; it answers with the child's id once the run has saved for
the first time since it began, and with its exit code at its end.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import torch

torch.set_num_threads(1)
from small_runs import trainer  # noqa: E402
from transformers import TrainerCallback  # noqa: E402


class Tell(TrainerCallback):
    """Says when the first write has begun."""

    def __init__(self, told: int) -> None:
        self.told = told

    def on_step_begin(self, args, state, control, **kwargs):
        if self.told and state.global_step:
            os.write(self.told, b"x")
            self.told = 0


def train(folder: Path, steps: int, told: int) -> None:
    trainer(folder, max_steps=steps, save_total_limit=2, callbacks=[Tell(told)], save_async=True).train("auto")


for line in sys.stdin:
    folder, steps = line.split()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(Path(folder), int(steps), writer)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    sys.stdout.write(f"{child}\n")
    sys.stdout.flush()
    sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
    sys.stdout.flush()
