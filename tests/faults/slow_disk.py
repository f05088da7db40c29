"""Run apart, under strace that delays every fsync: a run of `STEPS` steps, and what lay on the disk when each began.

`python slow_disk.py TESTS FOLDER STEPS` prints one JSON object.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
sys.path.insert(0, f"{sys.argv[1]}/faults")
import torch

torch.set_num_threads(1)
from small_runs import trainer  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from covey.runs import checkpoint, checksums  # noqa: E402

FOLDER, STEPS = Path(sys.argv[2]), int(sys.argv[3])


class Look(TrainerCallback):
    def __init__(self) -> None:
        self.seen = []

    def on_step_begin(self, args, state, control, **kwargs):
        being_written = [path.name for path in FOLDER.glob("checkpoint-*.tmp-*")]
        self.seen.append([state.global_step, len(being_written), [p.name for p in checkpoint.checkpoints(FOLDER)]])


look = Look()
trainer(FOLDER, max_steps=STEPS, save_steps=3, callbacks=[look]).train()
good = [path.name for path in checkpoint.checkpoints(FOLDER) if not checksums.problems(path)]
sys.stdout.write(json.dumps({"seen": look.seen, "good": good}) + "\n")
