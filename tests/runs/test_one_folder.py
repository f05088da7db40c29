"""Processes of one run that were given no folder, or different ones, write into the main process's."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.errors import ConfigError
from covey.runs import RunFolder
from covey.runs.lock import FolderLock
from faults.small_runs import trainer
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
    codes = []
    for lock in (second, first):
        lock.release()
        lock.release()  # a second time is nothing
        codes.append(locked_by_another(tmp_path))
    assert codes == [1, 0], "by another process, after each release"


def test_a_run_that_fails_while_it_is_built_lets_its_folder_go(tmp_path: Path) -> None:
    """As in a notebook, where the process and the trainer go on."""
    first = trainer(tmp_path, max_steps=1, lr_scheduler_kwargs={"wrong": 1})
    with pytest.raises(ConfigError, match="lr_scheduler_kwargs"):
        first.train()
    assert locked_by_another(tmp_path) == 0


def test_a_folder_is_let_go_where_its_last_records_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.create(tmp_path)
    monkeypatch.setattr(run.metrics, "close", lambda: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        run.close()
    assert locked_by_another(tmp_path) == 0


def locked_by_another(folder: Path) -> int:
    """Exit code of another process that locks the folder; 1 where it is in use."""
    code = "from pathlib import Path; from covey.runs.lock import FolderLock; FolderLock(Path.cwd()).take()"
    return Forked("-c", code, cwd=folder).wait(60)
