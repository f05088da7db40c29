"""Processes whose weights have parted train two models; a save finds it on all of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
import torch
from covey import GRPOConfig
from covey.errors import InvariantError
from covey.training.invariants import expect_same_weights
from covey.process.world import World

world = World.of(GRPOConfig(output_dir=sys.argv[1], use_cpu=True, bf16=False, report_to="none"))
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
expect_same_weights(model, world)
model.bias.requires_grad_(False)
with torch.no_grad():
    model.bias += world.rank  # frozen: not what the processes train together
expect_same_weights(model, world)
with torch.no_grad():
    model.weight[1, 2] += 1e-6 * world.rank
try:
    expect_same_weights(model, world)
except InvariantError as error:
    sys.stdout.write(str(error))
    sys.stdout.flush()
"""


@pytest.mark.slow
def test_weights_that_differ_between_processes_are_named_on_every_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
        command = [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen(command, env={**os.environ, **place}, text=True, **pipes))
    answers = [rank.communicate(timeout=120) for rank in ranks]
    for said, errors in answers:
        assert said.startswith("The weight weight of rank 1 differs from rank 0's"), errors
