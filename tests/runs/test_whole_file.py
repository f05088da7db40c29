"""Files that a user names for a result: whole or as they were, and written where they really are."""

import os
from pathlib import Path

import pytest

from covey.runs.storage import whole_file


def test_what_a_link_names_is_written_and_the_link_stays(tmp_path):
    (tmp_path / "disk").mkdir()
    link, there = tmp_path / "pairs.jsonl", tmp_path / "disk" / "pairs.jsonl"
    link.symlink_to(there)
    for content in ("first", "second"):
        with whole_file(link) as unfinished:
            unfinished.write_text(content)
        assert link.is_symlink()
        assert there.read_text() == content
    assert os.listdir(there.parent) == ["pairs.jsonl"]


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="no folder here takes no files of root")
def test_a_file_in_a_folder_that_takes_no_other_is_written_itself():
    with whole_file(Path("/proc/self/comm")) as unfinished:
        before = unfinished.read_text().strip()
        unfinished.write_text("written")
    try:
        assert Path("/proc/self/comm").read_text().strip() == "written"
    finally:
        Path("/proc/self/comm").write_text(before)


def test_what_fails_while_a_pipe_is_open_is_told_as_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConnectionRefusedError), whole_file(tmp_path / "pipe"):
        raise ConnectionRefusedError


def test_a_file_keeps_its_mode(tmp_path):
    path = tmp_path / "run.yaml"
    path.touch()
    for mode in (0o640, 0o600, 0o664):
        path.chmod(mode)
        with whole_file(path) as unfinished:
            unfinished.write_text("new")
        assert path.stat().st_mode & 0o777 == mode
