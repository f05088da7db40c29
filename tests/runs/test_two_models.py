"""Processes whose weights have parted train two models; a save finds it on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from forked import Forked, free_port, rank_environment

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
    port = free_port()
    places = [{**rank_environment(rank, port), "ACCELERATE_USE_CPU": "1"} for rank in range(2)]
    ranks = [Forked("-c", CODE, tmp_path, env=place) for place in places]
    for rank in ranks:
        assert rank.wait(120) == 0, rank.err
        assert rank.out.startswith("The weight weight of rank 1 differs from rank 0's"), rank.err
