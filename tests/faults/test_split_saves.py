"""Checkpoints of a model that is split, written beside training by each process: whole or absent, whatever becomes of one's disk."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from covey.runs import checkpoint, checksums
from forked import Forked, free_port, rank_environment

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(600)  # processes of their own on a machine that others load


def started(folder: Path, *words: str) -> list[Forked]:
    port = free_port()
    script = [HERE / "split_saves.py", HERE.parent, folder, *words]
    return [Forked(*script, env=rank_environment(rank, port)) for rank in range(2)]


def both(folder: Path, *words: str) -> list[Forked]:
    """Two processes at their end."""
    ranks = started(folder, *words)
    for rank in ranks:
        rank.wait(280)
    return ranks


def names(folder: Path) -> list[str]:
    found = checkpoint.checkpoints(folder)
    assert [checksums.problems(path) for path in found] == [[]] * len(found)
    return [path.name for path in found]


def content(folder: Path) -> dict[str, bytes]:
    """Weights, and each process's part of the optimizer's state."""
    files = [*folder.glob("*.safetensors"), *folder.glob("sharded/*.distcp")]
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.slow
def test_steps_go_on_beside_a_save_and_a_disk_that_refuses_one_process_costs_that_save_only(tmp_path: Path) -> None:
    first, second = both(tmp_path / "run", "beside", "refuses")
    assert [first.returncode, second.returncode] == [0, 0], first.err + second.err
    assert 3 in json.loads(first.out.splitlines()[-1]), "a step began while checkpoint-2 was written"
    assert names(tmp_path / "run") == ["checkpoint-2", "checkpoint-6", "checkpoint-8"]
    said = [json.loads(line)["said"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [one for one in said if "checkpoint-4 could not be written" in one]
    assert "This process's part of the checkpoint could not be written" in second.err
    assert not list((tmp_path / "run").glob("*.tmp-*"))


@pytest.mark.nightly
def test_both_ways_of_saving_write_the_same_parts(tmp_path: Path) -> None:
    for way in ("beside", "waits"):
        assert [rank.returncode for rank in both(tmp_path / way, way)] == [0, 0]
    for name in names(tmp_path / "waits"):
        one, other = content(tmp_path / "beside" / name), content(tmp_path / "waits" / name)
        assert len(one) == 4, "model.safetensors, covey_state.safetensors and two parts"
        assert one == other


@pytest.mark.nightly
def test_a_process_that_dies_in_its_part_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    first, second = started(tmp_path / "run", "beside", "dies")
    assert second.wait(280) == -9
    began = time.monotonic()
    assert first.wait(280) != 0
    assert "rank 1" in first.err
    assert time.monotonic() - began < 50, "the heartbeat would have waited for longer"
    assert names(tmp_path / "run") == ["checkpoint-2"]
