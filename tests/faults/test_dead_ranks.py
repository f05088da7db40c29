"""One of two real processes is killed, stopped, hung or failed: the other says which within a bounded time and exits."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

import pytest
from rank_pairs import Pair, pair

from covey.runs import checkpoint

pytestmark = pytest.mark.timeout(900)  # processes of their own on a machine that others load


KILLED = "rank 1 (process {pid} on {host}) ended without a word (killed?)"
NEVER = 3600
"""Seconds of patience of a run that has to end without any: a wait for it is one that `Pair.ends` gives up."""


def expect_rank_1_named(both: Pair, said: str) -> None:
    """Rank 0 exits, and its sentence says what became of rank 1."""
    assert both.ends(0) == 76, both.said(0)[-3000:]
    expected = said.format(pid=both.processes[1].pid, host=socket.gethostname())
    assert "error: rank 1" in both.said(0)
    assert expected in both.said(0), both.said(0)[-3000:]
    assert "--resume auto" in both.said(0)


@pytest.mark.parametrize(
    "fault, said, patience",
    [
        ("kill, split", KILLED, NEVER),
        pytest.param("exit", KILLED, NEVER, marks=pytest.mark.nightly),
        pytest.param("raise", "failed with LookupError: there is no such answer", NEVER, marks=pytest.mark.nightly),
        pytest.param("stop", "has not been heard of for", 10, marks=pytest.mark.nightly),
        ("hang", "lives but did not come within", 10),
    ],
)
@pytest.mark.slow
def test_the_other_process_says_which_rank_is_gone_and_exits(fault, said, patience, tmp_path: Path) -> None:
    with pair(tmp_path, fault, patience=patience) as both:
        expect_rank_1_named(both, said)
        if patience < NEVER:
            assert time.time() - float((tmp_path / "at").read_text()) < 120
    if fault == "hang":
        assert "hang (two_ranks.py:" in both.said(0), "it says where the other one is"
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    # a split model's newest checkpoint needs the part that the killed process may still have been writing
    assert newest.name in (("checkpoint-1", "checkpoint-2") if fault == "kill, split" else ("checkpoint-2",))


@pytest.mark.slow
def test_a_run_whose_rank_was_killed_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    with pair(tmp_path, "kill", patience=NEVER) as both:
        expect_rank_1_named(both, KILLED)
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    assert newest.name == "checkpoint-2"
    with pair(tmp_path, "none", "resume") as both:
        assert [both.ends(0), both.ends(1)] == [0, 0], both.said(0)[-2000:]
    (tmp_path / "whole").mkdir()
    with pair(tmp_path / "whole", "none") as both:
        assert [both.ends(0), both.ends(1)] == [0, 0], both.said(0)[-2000:]
    for name in ("model.safetensors", "covey_state.safetensors"):
        one, other = (folder / "run" / "checkpoint-5" / name for folder in (tmp_path, tmp_path / "whole"))
        assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    "when",
    [
        pytest.param("told in a rollout", marks=pytest.mark.slow),
        *(
            pytest.param(when, marks=pytest.mark.nightly)
            for when in (
                "told in an update",
                "told in an update, split",
                "told in an evaluation",
                "told in an evaluation, split",
            )
        ),
    ],
)
def test_a_stop_that_one_process_hears_is_heeded_by_all_in_the_middle_of_the_step(when: str, tmp_path: Path) -> None:
    with pair(tmp_path, when) as both:
        assert [both.ends(0), both.ends(1)] == [75, 75], both.said(0)[-2000:]
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    assert newest.name == "checkpoint-2"  # nothing of the third step
    assert checkpoint.load_state(newest)["state"]["is_evaluation_due"] == ("evaluation" in when)
    assert not (tmp_path / "run" / "evaluations").exists()


@pytest.mark.slow
def test_nan_on_one_process_alone_is_left_out_by_both(tmp_path: Path) -> None:
    with pair(tmp_path, "nan") as both:
        assert [both.ends(0), both.ends(1)] == [0, 0], both.said(0)[-2000:]
    told = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [line["step"] for line in told if line["kind"] == "non_finite_step"] == [3]
    state, before = (checkpoint.load_state(tmp_path / "run" / f"checkpoint-{step}") for step in (3, 2))
    assert state["scheduler"]["last_epoch"] == before["scheduler"]["last_epoch"]
    weights = [(tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors").read_bytes() for step in (2, 3, 5)]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.slow
def test_the_main_process_may_be_the_one_that_dies(tmp_path: Path) -> None:
    with pair(tmp_path, "none", patience=10) as both:
        deadline = time.monotonic() + 200
        while not (tmp_path / "run" / "checkpoint-1").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        both.processes[0].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        assert both.ends(1) == 76, both.said(1)[-2000:]
        assert time.monotonic() - killed < 120
        assert "rank 0" in both.said(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "differs"),
    [
        pytest.param("fewer rows", "rows of train_dataset", marks=pytest.mark.nightly),
        pytest.param("other lengths", "digest of prompts of train_dataset", marks=pytest.mark.nightly),
        ("other options", "0.2 learning_rate where rank 0 has 0.1"),
    ],
)
def test_a_rank_with_other_data_or_options_is_told_before_the_first_step(
    fault: str, differs: str, tmp_path: Path
) -> None:
    with pair(tmp_path, fault) as both:
        assert [both.ends(0), both.ends(1)] == [2, 2], both.said(0)[-2000:]
    for rank in range(2):
        assert "rank 1 has" in both.said(rank)
        assert differs in both.said(rank)
        assert "give every process the same data and options" in both.said(rank)
