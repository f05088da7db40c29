"""One line that fits, on stderr only, live on a terminal and plain elsewhere."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence

import pytest

from covey.monitor import Progress
from covey.monitor.progress import Pace, fitted, line_of, number
from covey.process.counting import duration
from covey.types import Event, Last, Mean, StepReport, Sum


def report(step: int, **metrics: float) -> StepReport:
    values = {"reward": 0.5, "kl": 0.0031, "entropy": 0.84, **metrics}
    return StepReport(
        step=step,
        metrics={
            **{name.replace("__", "/"): Mean(value, 1.0) for name, value in values.items()},
            "num_tokens": Sum(2310.0),
            "learning_rate": Last(1e-6),
        },
        seconds={"step": 1.0, "rollout": 0.6, "reward": 0.05, "annotate": 0.1},
    )


class Clock:
    """A second passes at every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def shown(steps: Sequence[StepReport], total: int, **options: object) -> list[str]:
    stream = io.StringIO()
    progress = Progress(total, stream=stream, clock=Clock(), **options)  # type: ignore[arg-type]
    for one in steps:
        progress.update(one, total)
    progress.close()
    return stream.getvalue().splitlines()


def test_a_plain_line_says_everything_once() -> None:
    first, second = shown([report(1), report(2)], 60)
    parts = "reward 0.5  KL 0.0031  entropy 0.84  2,310 tok/s  rollout 60% reward 5% learn 35%"
    assert first == f"step 1/60  {parts}"
    assert second == f"step 2/60  {parts}  0:58 left"


def test_a_slow_first_step_says_nothing_about_the_time_left() -> None:
    now, times = [0.0], {1: 100.0, 2: 101.0, 3: 102.0}
    stream = io.StringIO()
    progress = Progress(clock=lambda: now[0], stream=stream)
    for step, time in times.items():
        now[0] = time
        progress.update(report(step), 10)
    assert [line.rpartition("  ")[2] for line in stream.getvalue().splitlines()[1:]] == ["0:08 left", "0:07 left"]
    assert "left" not in stream.getvalue().splitlines()[0]


def test_accuracy_is_shown_where_there_is_any() -> None:
    (line,) = shown([report(1, rewards__accuracy_reward__mean=0.625)], 60)
    assert "reward 0.5  accuracy 62%  KL" in line


def test_plain_lines_come_at_every_logging_step_the_first_and_the_last() -> None:
    lines = shown([report(step) for step in range(1, 8)], 7, every=3)
    assert [line.split()[1] for line in lines] == ["1/7", "3/7", "6/7", "7/7"]


def test_time_left_follows_the_recent_steps() -> None:
    assert shown([report(step) for step in range(1, 31)], 100)[-1].endswith("1:10 left")


def test_shares_are_of_the_recent_time_even_when_steps_share_a_rollout() -> None:
    pace = Pace()
    for step in range(40):
        rollout = {"rollout": 3.0, "reward": 0.0, "step": 4.0} if step % 2 == 0 else {"step": 1.0}
        pace.add(rollout, wall=0.0, tokens=0.0)
    assert pace.shares["rollout"] == pytest.approx(0.6, abs=0.02)
    assert sum(pace.shares.values()) == pytest.approx(1.0)


def test_bad_numbers_are_shown_as_they_are() -> None:
    (line,) = shown([report(1, reward=float("nan"), kl=float("inf"))], 10)
    assert "reward nan  KL inf" in line


def test_events_are_counted() -> None:
    bad = StepReport(step=1, metrics={}, events=(Event(kind="reward_failed", said="x"),) * 2)
    assert shown([bad, StepReport(step=2, metrics={})], 2)[-1] == "step 2/2  2 events  0:00 left"


def test_a_run_of_unknown_length_has_no_time_left() -> None:
    assert shown([StepReport(step=3, metrics={"reward": Mean(1.0, 2.0)})], 0) == ["step 3  reward 0.5"]


def test_nothing_is_shown_when_it_is_switched_off() -> None:
    assert shown([report(1)], 1, enabled=False) == []


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_the_line_fits_and_keeps_what_matters(width: int) -> None:
    pace = Pace()
    pace.add({"step": 1.0, "rollout": 0.5}, 1.0, 100.0)
    text = fitted(line_of(report(12), 60, pace), width).plain
    assert len(text) <= width
    assert text.startswith("step 12/60")
    assert "left" in text or width < 40
    assert ("learn" in text) == (width >= 120)


@pytest.mark.parametrize(
    "value, text", [(0.7123, "0.712"), (-12.345, "-12.3"), (3.1e-5, "3.1e-05"), (2310.4, "2,310"), (0.0, "0")]
)
def test_numbers_have_three_digits_that_count(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0:00"),
        (42, "0:42"),
        (725, "12:05"),
        (11_220, "3:07:00"),
        (183_600, "2 d 03:00"),
        (-1, "0:00"),
        (float("nan"), "?"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_stream_that_goes_away_ends_the_display_and_not_the_training() -> None:
    stream = io.StringIO()
    progress = Progress(2, stream=stream)
    progress.update(report(1))
    stream.close()
    progress.update(report(2))
    progress.close()


SCRIPT = """
import sys, time, warnings
from covey.monitor import Progress
from covey.types import Mean, StepReport

progress = Progress(3)
for step in (1, 2, 3):
    progress.update(StepReport(step=step, metrics={"reward": Mean(step, 10)}), 3)
    print("result", step, flush=True)
    if step == 2:
        sys.stderr.write("a warning from elsewhere\\n")
        progress.show("eval \\x1b[31maccuracy 60%")
progress.close()
progress.close()
"""


def on_a_terminal(**environment: str) -> tuple[str, str]:
    """(stdout, what the terminal at stderr received)"""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "70", **environment}
    with tempfile.TemporaryFile() as stdout:
        process = forked(SCRIPT, stdout.fileno(), slave, environment)
        os.close(slave)
        received = b""
        while select.select([master], [], [], 30)[0]:
            try:
                received += os.read(master, 4096)
            except OSError:  # the other side closed it
                break
        assert os.waitpid(process, 0)[1] == 0, received.decode()
        stdout.seek(0)
        out = stdout.read().decode()
    os.close(master)
    return out, received.decode()


def forked(script: str, stdout: int, stderr: int, environment: Mapping[str, str]) -> int:
    """Process id of a copy of this process that runs the script: the imports took a new one three seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    if child := os.fork():
        return child
    status = 1
    try:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.environ.clear()
        os.environ.update(environment)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        exec(script, {})
        sys.stdout.flush()
        status = 0
    finally:
        if status:
            traceback.print_exc()
        os._exit(status)


def test_on_a_terminal_one_line_is_redrawn_and_others_print_above_it() -> None:
    out, terminal = on_a_terminal()
    assert out == "result 1\nresult 2\nresult 3\n"
    assert "\x1b[2K" in terminal  # the line is erased and drawn again
    assert "a warning from elsewhere\r\n" in terminal
    assert "eval accuracy 60%" in terminal  # what a line carries of its own is not obeyed
    assert terminal.rindex("\x1b[?25h") > terminal.rindex("\x1b[?25l")  # the cursor is there again
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal)
    assert "step 3/3  reward 0.3" in plain.rstrip().splitlines()[-1]


def test_no_color_means_no_color() -> None:
    _, terminal = on_a_terminal(NO_COLOR="1")
    assert not re.search(r"\x1b\[(3|4|9)\d", terminal)


def test_a_terminal_that_cannot_redraw_gets_plain_lines() -> None:
    _, terminal = on_a_terminal(TERM="dumb")
    assert "\x1b" not in terminal
    assert [line.split()[1] for line in terminal.splitlines() if line.startswith("step")] == ["1/3", "2/3", "3/3"]


@pytest.mark.slow
def test_a_pipe_gets_plain_lines_and_stdout_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env={**os.environ, "FORCE_COLOR": "1"}
    )
    assert done.stdout == "result 1\nresult 2\nresult 3\n"
    assert "\x1b" not in done.stderr
    assert done.stderr.splitlines()[0] == "step 1/3  reward 0.1"
