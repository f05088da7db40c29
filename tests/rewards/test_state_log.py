"""The log of the trainer's state, which grows with the run: a reward that does not read it costs nothing for it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerState

from covey.rewards.calling.state_log import log_of
from covey.rewards.calling.workers import WorkerPool, light_state
from covey.rewards.surroundings import copied_state
from covey.training.saving import write_trainer_state


def state_of(steps: int) -> TrainerState:
    log = [{"loss": float(step), "step": step} for step in range(1, steps + 1)]
    return TrainerState(global_step=steps, log_history=log, stateful_callbacks={"a": {"args": {"log_history": []}}})


def newest(prompts: list[Any], completions: list[str], trainer_state: Any, **columns: Any) -> list[float]:
    """Sum of the losses in the log, which it then spoils."""
    log = trainer_state.log_history
    log[-1]["loss"] += 1e6
    return [sum(entry["loss"] for entry in log) - 1e6 + 100 * trainer_state.global_step] * len(completions)


def test_a_reward_gets_a_log_of_its_own_once_it_reads_it() -> None:
    state = state_of(3)
    mine = copied_state(state)
    assert isinstance(mine, TrainerState)
    assert log_of(mine)[0] is state.log_history, "not copied yet"
    state.log_history.append({"loss": 4.0, "step": 4})
    assert [entry["step"] for entry in mine.log_history] == [1, 2, 3], "as it was when the reward was called"
    mine.log_history[0]["loss"] = 9.0
    mine.log_history.clear()
    mine.stateful_callbacks["a"]["args"]["log_history"].append(1)
    assert state.log_history[0] == {"loss": 1.0, "step": 1}
    assert state.stateful_callbacks == {"a": {"args": {"log_history": []}}}
    assert mine.log_history == []
    mine.log_history = [{"step": 7}]
    again = pickle.loads(pickle.dumps(mine))
    assert type(again) is TrainerState
    assert (again.log_history, again.global_step) == ([{"step": 7}], 3)

    inner = copied_state(again_copied := copied_state(state))  # of a reward that scores with others
    inner.log_history[0]["loss"] = 8.0
    inner.log_history.append({"step": 8})
    assert again_copied.log_history == state.log_history
    assert state.log_history[0] == {"loss": 1.0, "step": 1}


def test_a_worker_process_is_sent_each_entry_of_the_log_once() -> None:
    state = state_of(3)
    pool = WorkerPool("newest", newest)

    def called() -> float:
        mine = copied_state(state)
        keywords = {"prompts": ["p"], "completions": ["c"], "trainer_state": light_state(mine)}
        return float(pool.call(keywords, (), 60.0, log_of(mine))["values"][0])

    try:
        assert called() == 6 + 300
        (worker,) = pool.processes.workers
        sizes, real = [], worker.ask
        worker.ask = lambda request, seconds: sizes.append(len(request["log"][1])) or real(request, seconds)
        assert called() == 6 + 300
        state.log_history.append({"loss": 4.0, "step": 4})
        assert called() == 10 + 300
        state.log_history = [{"loss": 5.0, "step": step} for step in range(1, 6)]  # the run went back, and on
        assert called() == 25 + 300
        state.log_history.append({"loss": 7.0, "step": 6})
        assert called() == 32 + 300
        state.log_history = []
        state.log_history.append({"loss": 2.0, "step": 1})
        assert called() == 2 + 300
        assert sizes == [0, 1, 5, 1, 1]
    finally:
        pool.close()


def test_the_state_of_a_checkpoint_holds_what_transformers_writes_with_an_entry_a_line(tmp_path: Path) -> None:
    for steps in (0, 1, 5):
        state = state_of(steps)
        write_trainer_state(tmp_path / "ours.json", state)
        state.save_to_json(str(tmp_path / "theirs.json"))
        ours, theirs = ((tmp_path / name).read_text() for name in ("ours.json", "theirs.json"))
        assert json.loads(ours) == json.loads(theirs)
        assert TrainerState.load_from_json(str(tmp_path / "ours.json")) == state
        assert ours.count("\n") == state_lines(steps)

    before = (tmp_path / "ours.json").read_text()
    state.log_history[-1]["tensor"] = torch.ones(1)  # a callback's
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_trainer_state(tmp_path / "ours.json", state)
    assert (tmp_path / "ours.json").read_text() == before


def state_lines(steps: int) -> int:
    """Lines of a file with so many entries: one each."""
    empty = json.dumps({**vars(state_of(0)), "log_history": []}, indent=2)
    return empty.count("\n") + 1 + steps
