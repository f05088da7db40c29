"""Processes of one run that were given no folder, or different ones, write into the main process's."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.runs.lock import FolderLock
from forked import Forked, free_port, rank_environment

SCRIPT = """
import os, sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {tests!r} + "/faults"]
from small_runs import trainer
rank = os.environ["RANK"]
one = trainer(Path("runs/train-" + rank), max_steps=1, save_strategy="no", use_cpu=True, per_device_train_batch_size=4)
one.train()
Path("rank-" + rank).write_text(str(one.args.output_dir) + " " + str(one.output_dir))
"""


@pytest.mark.slow
def test_two_processes_that_chose_different_folders_agree_on_the_first_ones(tmp_path: Path) -> None:
    script, port = SCRIPT.format(tests=str(Path(__file__).parents[1])), free_port()
    ranks = [Forked("-c", script, cwd=tmp_path, env=rank_environment(rank, port)) for rank in range(2)]
    assert [rank.wait(240) for rank in ranks] == [0, 0], [rank.err for rank in ranks]
    assert {(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)} == {"runs/train-0 runs/train-0"}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["train-0"]
    assert (tmp_path / "runs" / "train-0" / "metrics.jsonl").is_file()


def test_a_folder_stays_locked_until_all_of_a_process_have_released_it(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.take()
    second.take()
    other = (
        f"from pathlib import Path; from covey.runs.lock import FolderLock; FolderLock(Path({str(tmp_path)!r})).take()"
    )
    codes = []
    for lock in (second, first):
        lock.release()
        lock.release()  # a second time is nothing
        codes.append(Forked("-c", other, cwd=tmp_path).wait(60))
    assert codes == [1, 0], "by another process, after each release"
