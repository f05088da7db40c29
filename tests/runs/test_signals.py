"""The first signal asks, a second Ctrl-C ends; handlers of others are called and put back. Real signals, real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from covey.runs.signals import StopRequest
from kit import rest_nightly

LOOP = """
import sys, time
from covey.runs.signals import StopRequest

print("ready", flush=True)
with StopRequest() as stop:
    print("entered", flush=True)
    while not stop.requested or "stubborn" in sys.argv:
        time.sleep(0.01)
        if stop.requested:
            print("asked", flush=True)
    print("saved", flush=True)
sys.exit(stop.exit_code)
"""


def started(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", LOOP, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert process.stdout.readline() == "entered\n"
    return process


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_a_signal_lets_the_loop_finish_and_says_the_code(number: signal.Signals, code: int) -> None:
    with started() as process:
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert "saved" in out
    assert process.returncode == code


@pytest.mark.parametrize("before", rest_nightly([[], [signal.SIGTERM], [signal.SIGUSR1]], 2))
def test_a_second_ctrl_c_ends_the_process_at_once(before: list[signal.Signals]) -> None:
    with started("stubborn") as process:
        assert process.stdout is not None
        for number in [*before, signal.SIGINT]:
            process.send_signal(number)
            assert process.stdout.readline() == "asked\n"
            time.sleep(0.6)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130


SLOW = """
import sys, time
from covey.runs.signals import StopRequest

print("ready", flush=True)
with StopRequest() as stop:
    print("entered", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("saving", flush=True)
    time.sleep(2.5)
    print("saved", flush=True)
sys.exit(stop.exit_code)
"""


@pytest.mark.parametrize(
    "first, second, code",
    rest_nightly(
        [
            (signal.SIGTERM, signal.SIGINT, 75),
            (signal.SIGINT, signal.SIGTERM, 130),
            (signal.SIGTERM, signal.SIGTERM, 75),
            (signal.SIGUSR1, signal.SIGTERM, 75),
        ],
        1,
    ),
)
def test_a_second_signal_of_the_same_stop_does_not_throw_the_save_away(first, second, code) -> None:
    with subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "entered\n"]
        process.send_signal(first)
        assert process.stdout.readline() == "saving\n"
        time.sleep(1.0)
        process.send_signal(second)
        out, _ = process.communicate(timeout=60)
    assert out == "saved\n"
    assert process.returncode == code


def test_a_closed_terminal_ends_nothing_and_its_default_comes_back() -> None:
    before = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_script_leaves_as_its_signal_says() -> None:
    for name, kind, code in (("SIGINT", KeyboardInterrupt, None), ("SIGTERM", SystemExit, 75)):
        stop = StopRequest()
        stop.adopt([[None], [name]])
        with pytest.raises(kind) as left:
            stop.leave()
        assert getattr(left.value, "code", None) == code
    StopRequest().leave()


def test_a_signal_that_a_launcher_repeats_is_one_request() -> None:
    with started() as process:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert "saved" in out
    assert process.returncode == 75


def test_nothing_asked_is_exit_code_zero() -> None:
    with StopRequest() as stop:
        assert not stop.requested
    assert stop.exit_code == 0
    assert stop.name is None


def test_handlers_of_others_are_called_and_put_back() -> None:
    called: list[int] = []
    mine = lambda number, frame: called.append(number)
    before = signal.signal(signal.SIGUSR1, mine)
    try:
        interrupt = signal.getsignal(signal.SIGINT)
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop.requested
            assert stop.name == "SIGUSR1"
            os.kill(os.getpid(), signal.SIGINT)  # within half a second: the same request, and no KeyboardInterrupt
        assert called == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_handlers_are_put_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="inside"), StopRequest():
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_off_the_main_thread_nothing_is_installed_and_nothing_breaks() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def work() -> None:
        with StopRequest() as stop:
            seen.extend([stop.requested, signal.getsignal(signal.SIGTERM)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, before]


def test_a_forked_child_can_still_be_terminated() -> None:
    script = """
import os, signal, time
from covey.runs.signals import StopRequest
with StopRequest() as stop:
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM, status
    assert not stop.requested
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
