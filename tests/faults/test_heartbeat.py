"""Two pulses over one store: who is silent, who has ended, who waits elsewhere, and what a wait that cannot be woken does."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import HashStore

from covey.errors import RankError
from covey.process.heartbeat import Heartbeat, HeartbeatState

WAIT = 60.0
SILENCE = 8.0
"""Long enough that a loaded machine is not taken for a dead process."""


@pytest.fixture
def both() -> Iterator[list[Heartbeat]]:
    store = HashStore()
    pulses = [Heartbeat(store, rank, 2, silence=SILENCE, patience=1.0) for rank in range(2)]
    for one in pulses:
        one.start()
    yield pulses
    for one in pulses:
        one.stop()


def wait_until(condition: Callable[[], bool], seconds: float = WAIT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_meeting_returns_what_the_collective_returns(both: list[Heartbeat]) -> None:
    assert both[0].collective(lambda: 3) == 3


def test_what_a_collective_raises_is_raised_here(both: list[Heartbeat]) -> None:
    with pytest.raises(LookupError, match="no such thing"):
        both[0].collective(lambda: {}["no such thing"])


def test_a_process_that_said_why_it_ended_is_named_with_it(both: list[Heartbeat]) -> None:
    both[1].end("failed with ValueError: bad")
    with pytest.raises(RankError, match=r"rank 1 \(process \d+ on .*\) failed with ValueError: bad. Rank 0 waited"):
        both[0].collective(lambda: time.sleep(WAIT))
    assert both[0].is_abandoned


def test_a_stop_of_one_is_heard_by_the_other_in_this_run_alone(both: list[Heartbeat]) -> None:
    for one in both:
        one.begin()
    assert not both[0].hears_stop(False)
    assert both[1].hears_stop(True)
    wait_until(lambda: both[0].hears_stop(False))
    both[0].begin()  # another run, before the other process has begun it
    assert not both[0].hears_stop(False)
    both[1].begin()
    wait_until(lambda: both[0].others[1].runs == 2)
    assert not both[0].hears_stop(False)


def test_a_stop_is_heard_while_the_one_that_was_asked_waits_for_the_other(both: list[Heartbeat]) -> None:
    asked, meets = threading.Event(), threading.Event()
    both[1].is_stop_requested = asked.is_set
    both[1].patience = WAIT
    waiting = threading.Thread(target=lambda: both[1].collective(meets.wait))
    waiting.start()
    try:
        assert not both[0].hears_stop(False)
        asked.set()
        wait_until(lambda: both[0].hears_stop(False))
        assert waiting.is_alive()
    finally:
        meets.set()
        waiting.join()


def test_a_process_that_falls_silent_is_given_up() -> None:
    store = HashStore()
    mine, other = [Heartbeat(store, rank, 2, silence=2.0, patience=WAIT) for rank in range(2)]
    mine.start()
    other.start()
    wait_until(lambda: 1 in mine.others)
    other.stop()
    with pytest.raises(RankError, match=r"has not been heard of for \d+ s; it was last in"):
        mine.collective(lambda: time.sleep(WAIT))
    mine.stop()


@pytest.mark.slow
def test_a_process_that_falls_silent_while_it_is_waited_for_is_not_said_to_live() -> None:
    store = HashStore()
    mine, other = [Heartbeat(store, rank, 2, silence=4.0, patience=4.0) for rank in range(2)]
    mine.start()
    other.start()
    silent = threading.Timer(0.3, other.stop)
    silent.start()
    with pytest.raises(RankError, match="has not been heard of for"):  # heard of last after the wait began
        mine.collective(lambda: time.sleep(WAIT))
    mine.stop()


def test_a_process_that_lives_but_does_not_come_is_given_up_after_the_patience(both: list[Heartbeat]) -> None:
    with pytest.raises(RankError, match=r"lives but did not come within \d+ s"):
        both[0].collective(lambda: time.sleep(WAIT))


def test_processes_that_wait_in_different_places_are_told(
    both: list[Heartbeat], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(both[0], "patience", WAIT)
    monkeypatch.setattr("covey.process.heartbeat.PARTED_SECONDS", 1.0)

    def elsewhere() -> None:
        with pytest.raises(RankError):
            both[1].collective(lambda: time.sleep(WAIT))

    other = threading.Thread(target=elsewhere)
    other.start()
    with pytest.raises(RankError, match=r"rank 1 .* waits in elsewhere .* waits in test_processes.*they have parted"):
        both[0].collective(lambda: time.sleep(WAIT))
    both[0].end("has gone")  # where the other one has not seen yet that they parted, it sees this
    both[0].stop()
    other.join(WAIT)
    assert not other.is_alive()


def test_an_error_that_all_have_at_the_same_point_lets_them_meet_again(both: list[Heartbeat]) -> None:
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda one=one: found.append(one.fails_together(ValueError("x")))) for one in both
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert found == [True, True]


def test_an_error_that_only_one_has_ends_it_for_the_others(both: list[Heartbeat]) -> None:
    found: list[str] = []
    both[0].patience = WAIT  # a busy machine may take longer than a second to tell of the error

    def wait() -> None:
        with pytest.raises(RankError) as caught:
            both[0].collective(lambda: time.sleep(WAIT))
        found.append(str(caught.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not both[1].fails_together(ValueError("only here"))
    waiting.join(WAIT)
    assert "failed with ValueError: only here" in found[0]


@pytest.mark.slow
def test_a_wait_that_cannot_be_woken_ends_the_process_with_exit_code_76() -> None:
    script = """
import time
from torch.distributed import HashStore
from covey.process.heartbeat import Heartbeat
store = HashStore()
mine, other = [Heartbeat(store, r, 2, silence=60.0, patience=60.0, is_pollable=r == 1) for r in range(2)]
mine.start(), other.start()
other.end("has gone")
mine.collective(lambda: time.sleep(100))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 76
    assert "rank 1" in done.stderr
    assert "has gone" in done.stderr


def test_a_beat_of_another_version_is_read() -> None:
    assert HeartbeatState.parse(b'{"beat": 3, "colour": "red"}') == HeartbeatState(beat=3)
