"""A tracker that blocks, crawls or fails: no step waits for it, nothing is lost that it would have taken, and it is told once."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
import urllib.request
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from covey.errors import CoveyError
from covey.monitor.call_queue import CallQueue
from covey.monitor.trackers import Trackers, reads_checkpoints
from faults.small_runs import lines, reward_len, trainer

RUN = {"logging_steps": 1, "save_strategy": "no", "max_completion_length": 3}


class Recorder(TrainerCallback):
    """A tracker that takes note of what it is told, and where."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, dict[str, float]]] = []
        self.threads: set[str] = set()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.seen.append(("log", state.global_step, logs))


def tracked(kind: type, folder: Path, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> tuple[Any, Any]:
    """A trainer that reports to this kind of tracker, chosen by name as any other, and the tracker."""
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "mine", kind)
    one = trainer(folder, report_to="mine", **{**RUN, **changed})
    return one, next(callback for callback in one.callback_handler.callbacks if isinstance(callback, kind))


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What a stuck tracker waits for; set at the end of the test, so that its thread ends."""
    event, others = threading.Event(), set(threading.enumerate())
    yield event
    event.set()
    for thread in set(threading.enumerate()) - others:
        if thread.name.startswith("covey-"):
            thread.join(30)


def test_a_run_ends_and_is_whole_beside_a_tracker_that_blocks_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, released: threading.Event
) -> None:
    class Blocked(Recorder):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            super().on_log(args, state, control, logs)
            released.wait()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen.append(("end", state.global_step, {}))

    one, tracker = tracked(Blocked, tmp_path / "run", monkeypatch, max_steps=4)
    one.trackers.patience_seconds = 0.01
    one.train()
    assert one.state.global_step == 4
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3, 4]
    assert [step for _, step, _ in tracker.seen] == [1], "it is still in its first call"
    assert caplog.text.count("Blocked has not come back from on_log at step 1 for 0 seconds. Training goes on") == 1
    assert caplog.text.count("did not take") == caplog.text.count("did not take 5 of its calls in time") == 1
    # four steps and the summary


def test_a_tracker_that_is_only_slow_gets_everything_in_order_on_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow(Recorder):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            time.sleep(0.05)
            super().on_log(args, state, control, logs)
            state.global_step, control.should_training_stop = -1, True  # its own copies

    one, tracker = tracked(Slow, tmp_path / "run", monkeypatch, max_steps=5)
    one.train()
    expected = [(entry["step"], entry.get("loss")) for entry in one.state.log_history]
    assert [(step, logs.get("loss")) for _, step, logs in tracker.seen] == expected
    assert [step for step, _ in expected] == [1, 2, 3, 4, 5, 5]
    assert tracker.threads == {"covey-Slow"}
    assert "Slow" not in caplog.text
    assert not any(thread.name == "covey-Slow" for thread in threading.enumerate())


def test_a_run_that_fails_still_hands_over_what_its_tracker_has_not_taken_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Recorder):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            time.sleep(0.05)
            super().on_log(args, state, control, logs)

    def fails_at_last(prompts: Any, completions: Any, trainer_state: Any, **columns: Any) -> list[float]:
        if trainer_state.global_step >= 3:
            raise ValueError("planted")
        return reward_len(prompts, completions)

    one, tracker = tracked(
        Slow, tmp_path / "run", monkeypatch, max_steps=9, reward_funcs=fails_at_last, on_reward_error="raise"
    )
    with pytest.raises(CoveyError):
        one.train()
    assert [step for _, step, _ in tracker.seen] == [1, 2, 3]


def test_a_server_that_takes_the_connection_and_never_answers_holds_up_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{server.getsockname()[1]}/log"

    class Remote(Recorder):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            super().on_log(args, state, control, logs)
            urllib.request.urlopen(address, data=str(logs).encode())  # waits without a limit

    one, tracker = tracked(Remote, tmp_path / "run", monkeypatch, max_steps=3)
    one.trackers.patience_seconds = 0.01
    one.train()
    assert len(lines(tmp_path / "run")) == 3
    assert len(tracker.seen) == 1
    connection, _ = server.accept()
    connection.close()
    server.close()
    for thread in threading.enumerate():
        if thread.name == "covey-Remote":
            thread.join(30)


def test_a_tracker_that_fails_again_and_again_is_told_once_and_once_more_when_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(Recorder):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if 2 <= state.global_step <= 4:
                raise ConnectionError("nobody answers")
            super().on_log(args, state, control, logs)

    one, tracker = tracked(Away, tmp_path / "run", monkeypatch, max_steps=6)
    one.train()
    assert [step for _, step, _ in tracker.seen] == [1, 5, 6, 6]
    told = [record.message for record in caplog.records if "Away" in record.message]
    assert told == [
        "Away failed in on_log at step 2 (ConnectionError: nobody answers); training goes on, and metrics.jsonl has every number.",
        "Away works again in on_log at step 5, after 3 calls that failed.",
    ]


def test_a_tracker_that_fails_in_its_logs_alone_is_told_once_however_much_else_of_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(Recorder):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            raise OSError(28, "No space left on device")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Nothing, as most trackers do."""

    one, _ = tracked(Full, tmp_path / "run", monkeypatch, max_steps=4)
    one.train()
    assert [record.message for record in caplog.records if "Full" in record.message] == [
        "Full failed in on_log at step 1 (OSError: [Errno 28] No space left on device); training goes on, and metrics.jsonl has every number."
    ]


def test_a_fault_that_begins_in_an_outage_of_other_calls_is_told_once_they_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise OSError("full")

    queue = CallQueue("Full")
    for step in (1, 2, 3):
        queue.call(f"on_log at step {step}", fail if step == 1 else lambda: None)
        queue.call(f"on_save at step {step}", fail)
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "Full failed in on_log at step 1",
        "Full failed in on_save at step 2",
    ]


def test_a_tracker_that_takes_logs_and_no_tables_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", object())
    trackers = Trackers("trackio")
    for step in (1, 2, 3):
        trackers.hand_over("TrackioCallback", f"on_log at step {step}", lambda: None)
        trackers.send_completions(step, None)
    assert caplog.text.count("TrackioCallback failed in the completions at step 1 (AttributeError") == 1
    assert caplog.text.count("failed in") == 1


def test_an_exception_that_a_tracker_raises_at_each_call_keeps_nothing_of_those_calls() -> None:
    class Logs(dict[str, float]): ...

    dead, queue = OSError(28, "No space left on device"), CallQueue("Full")

    def on_log(logs: Logs) -> None:
        raise dead  # as TensorBoard's writer does once its thread has died

    logs = Logs()
    kept = weakref.ref(logs)
    queue.call("on_log at step 1", partial(on_log, logs))
    del logs
    assert kept() is None


def test_a_tracker_that_uploads_finds_the_checkpoint_though_it_is_slow_and_the_next_save_deletes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Uploads(Recorder):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            time.sleep(0.1)
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self.seen.append(("save", state.global_step, {"is_there": (folder / "model.safetensors").exists()}))

    given = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    one, tracker = tracked(Uploads, tmp_path / "run", monkeypatch, **given)
    one.train()
    assert [(step, told["is_there"]) for what, step, told in tracker.seen if what == "save"] == [
        (1, True), (2, True), (3, True),
    ]  # fmt: skip


def test_a_tracker_that_does_not_listen_to_saves_does_not_make_them_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tracker = tracked(Recorder, tmp_path / "run", monkeypatch)
    assert not reads_checkpoints(tracker)


def test_a_callback_of_ones_own_is_called_at_once_and_on_the_thread_of_training(tmp_path: Path) -> None:
    own = Recorder()
    trainer(tmp_path / "run", callbacks=[own], max_steps=1, **RUN).train()
    assert own.threads == {threading.main_thread().name}


def test_an_evaluation_after_training_is_told_to_the_tracker_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, tracker = tracked(Recorder, tmp_path / "run", monkeypatch, max_steps=1)
    one.train()
    one.evaluate(one.train_dataset.select(range(2)))
    assert "eval_reward" in tracker.seen[-1][2]
    assert tracker.threads == {"covey-Recorder", threading.main_thread().name}


def test_a_tracker_that_takes_long_to_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Starts(Recorder):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for _ in range(2000):
                if "Starts has been starting" in caplog.text:
                    return
                time.sleep(0.01)

    one, _ = tracked(Starts, tmp_path / "run", monkeypatch, max_steps=1)
    one.trackers.patience_seconds = 0.1
    one.train()
    assert "Starts has been starting for 0 seconds; training begins when it is done." in caplog.text


def test_no_more_than_so_many_calls_wait_and_the_rest_is_counted(
    caplog: pytest.LogCaptureFixture, released: threading.Event
) -> None:
    lane, done = CallQueue("Mine", most=3, patience_seconds=60), list[int]()
    lane.put("the first", released.wait)
    for _ in range(2000):
        if not lane._waiting:
            break
        time.sleep(0.01)
    for i in range(10):
        lane.put(f"call {i}", lambda i=i: done.append(i))  # type: ignore[misc]
    assert caplog.text.count("3 calls wait for Mine, so new ones are left out until it goes on") == 1
    released.set()
    assert lane.flush()
    assert done == [0, 1, 2]
    assert "Mine did not take 7 of its calls in time" in caplog.text
    lane.close()


def test_a_thread_that_could_not_be_prepared_is_prepared_again_before_the_next_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts, done = list[int](), list[str]()

    def begin() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("away")

    lane = CallQueue("Mine", prepare=lambda: begin)
    for what in ("one", "two", "three"):
        lane.put(what, lambda what=what: done.append(what))  # type: ignore[misc]
    lane.close()
    assert (len(attempts), done) == (2, ["two", "three"])
    assert "Mine failed in one (OSError: away)" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
