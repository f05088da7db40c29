"""One live line that says how training goes; plain lines where there is no terminal. Everything goes to stderr."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from covey.process.counting import duration, is_terminal
from covey.process.terminal import safe
from covey.types import StepReport

_MEMORY = 0.9
"""Weight that times of earlier steps keep at each step: shares and time left follow the last ten or so."""
_PHASES = ("rollout", "reward", "learn")

Part = tuple[str, str, int]
"""Label, value, rank: on a narrow terminal the parts of the highest rank go first."""


class Progress:
    """The line `step 12/60  reward 0.71  KL 0.003  2,310 tok/s  rollout 61% reward 2% learn 37%  0:42 left`.

    At every `every`-th step, the first and the last it is a line that stays. On a terminal it is also redrawn in place at
    every step, and what others print meanwhile appears above it. `NO_COLOR` is respected. `enabled=False` shows nothing.
    A terminal that goes away (closed window, broken pipe) ends the display, not the training.
    """

    def __init__(
        self,
        total_steps: int = 0,
        *,
        enabled: bool = True,
        every: int = 1,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total_steps, self.every = total_steps, max(1, every)
        self._stream = stream
        self._is_on = enabled
        self._clock = clock
        self._pace = Pace()
        self._last_update: float | None = None
        self._events = self._steps = 0
        self._live: Live | None = None
        self._stays = False
        """True if the step that the live line shows stands above it too."""

    def update(self, report: StepReport, total_steps: int | None = None) -> None:
        """Show a step that has just ended."""
        self.total_steps = total_steps or self.total_steps
        self._events += len(report.events)
        now = self._clock()
        wall = report.seconds.get("step", 0.0) if self._last_update is None else now - self._last_update
        self._last_update = now
        if self._steps == 1:
            self._pace = Pace()  # the first step compiles kernels and fills caches, and says little about the next ones
        self._steps += 1
        self._pace.add(report.seconds, wall, report["num_tokens"])
        if self._is_on:
            self._draw(
                report.step, line_of(report, self.total_steps, self._pace, self._events, has_pace=self._steps > 1)
            )

    def show(self, text: str) -> None:
        """A line above the live one, such as the result of an evaluation."""
        if self._is_on:
            self._write(f"{safe(text)}\n")

    def close(self) -> None:
        """Leave the last line on the screen. May be called twice."""
        live, self._live = self._live, None
        if live is not None:
            live.transient = self._stays
            self._guarded(live.stop)

    def _draw(self, step: int, parts: Sequence[Part]) -> None:
        stream = self._stream or sys.stderr
        is_due = step == 1 or step % self.every == 0 or step >= self.total_steps > 0
        if self._live is None and not is_terminal(stream):
            if is_due:
                self._write("  ".join(f"{label} {value}".strip() for label, value, _ in parts) + "\n")
            return
        if self._live is None:
            self._live = self._started(stream)
        text = fitted(parts, self._live.console.width - 1)
        if is_due:
            self._guarded(partial(self._live.console.print, text))
        self._stays = is_due
        self._guarded(partial(self._live.update, text, refresh=True))

    def _started(self, stream: TextIO) -> Live:
        console = Console(file=stream)
        # stdout is left alone unless it is the terminal too: a pipe that reads results must not lose any
        live = Live(console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty(), redirect_stderr=True)
        self._guarded(live.start)
        console.show_cursor(True)  # a process that is killed must not leave the terminal without one
        return live

    def _write(self, text: str) -> None:
        def write() -> None:
            if self._live is not None:
                self._live.console.print(text, end="", markup=False, highlight=False)
                return
            stream = self._stream or sys.stderr
            stream.write(text)
            stream.flush()

        self._guarded(write)

    def _guarded(self, act: Callable[[], object]) -> None:
        try:
            act()
        except (OSError, ValueError):  # the terminal is gone, or the stream was closed
            self._is_on = False


class Pace:
    """Decaying averages of wall time a step, of time by phase, and of tokens."""

    def __init__(self) -> None:
        self.wall = self.weight = self.tokens = 0.0
        self.phases = dict.fromkeys(_PHASES, 0.0)

    def add(self, seconds: Mapping[str, float], wall: float, tokens: float) -> None:
        """`seconds` by phase, as in `StepReport`; `step` less rollout and reward counts as learning."""
        step = seconds.get("step", 0.0)
        rollout, reward = seconds.get("rollout", 0.0), seconds.get("reward", 0.0)
        new = {"rollout": rollout, "reward": reward, "learn": max(0.0, step - rollout - reward)}
        self.phases = {name: _MEMORY * self.phases[name] + new[name] for name in _PHASES}
        self.wall = _MEMORY * self.wall + wall
        self.weight = _MEMORY * self.weight + 1.0
        self.tokens = _MEMORY * self.tokens + (tokens if math.isfinite(tokens) else 0.0)

    @property
    def seconds_per_step(self) -> float:
        return self.wall / self.weight if self.weight else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.wall if self.wall > 0 else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Part of the measured time in each phase; empty before anything was measured."""
        total = sum(self.phases.values())
        return {name: value / total for name, value in self.phases.items()} if total > 0 else {}


def line_of(report: StepReport, total_steps: int, pace: Pace, events: int = 0, *, has_pace: bool = True) -> list[Part]:
    """Parts of the progress line of a step, in order. The time left needs `has_pace`: a step after the first."""
    parts: list[Part] = [("step", f"{report.step}/{total_steps}" if total_steps else str(report.step), 0)]
    first = ("reward", "reward", 1) if "reward" in report.metrics else ("loss", "loss", 1)
    for label, name, rank in (first, ("KL", "kl", 4), ("entropy", "entropy", 6)):
        if name in report.metrics:
            parts.append((label, number(report[name]), rank))
    of_rewards = (
        n for n in sorted(report.metrics) if n.startswith("rewards/") and n.endswith("/mean") and "accuracy" in n
    )
    accuracy = "accuracy" if "accuracy" in report.metrics else next(of_rewards, None)
    if accuracy is not None:
        parts.insert(2, ("accuracy", f"{report[accuracy]:.0%}" if math.isfinite(report[accuracy]) else "nan", 2))
    if pace.tokens:
        parts.append(("", f"{pace.tokens_per_second:,.0f} tok/s", 5))
    if pace.shares:
        parts.append(("", " ".join(f"{name} {share:.0%}" for name, share in pace.shares.items()), 7))
    if events:
        parts.append(("", f"{events} event{'s' if events > 1 else ''}", 3))
    if total_steps and (has_pace or report.step >= total_steps):
        parts.append(("", f"{duration((total_steps - report.step) * pace.seconds_per_step)} left", 1))
    return parts


def evaluation_line(step: int, metrics: Mapping[str, float]) -> str:
    """`evaluation at step 20: eval_reward 0.71  eval_rewards/math/mean 0.71  ...`: rewards first, then lengths, then the loss."""
    names = [name for name in metrics if name.endswith("reward")]
    names += [name for name in metrics if "rewards/" in name and name.endswith("/mean")]
    names += [name for name in metrics if name.endswith(("accuracy", "completions/mean_length"))]
    names += (
        [name for name in metrics if name.endswith("_loss")]
        if not any(name.endswith("reward") for name in metrics)
        else []
    )
    values = "  ".join(f"{name} {number(metrics[name])}" for name in dict.fromkeys(names))
    return f"evaluation at step {step}: {values}"


def fitted(parts: Sequence[Part], width: int) -> Text:
    """The parts on one line of at most `width` characters; the least important are dropped first."""
    shown = list(parts)
    while len(shown) > 1 and _join(shown).cell_len > width:
        shown.remove(max(shown, key=lambda part: part[2]))
    text = _join(shown)
    text.truncate(max(width, 1), overflow="ellipsis")
    return text


def number(value: float) -> str:
    """Three digits that count: `0.712`, `-12.3`, `3.1e-05`, `2,310`, `nan`."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def _join(parts: Sequence[Part]) -> Text:
    pieces = [Text.assemble((f"{label} " if label else "", "dim"), value) for label, value, _ in parts]
    line = Text("  ").join(pieces)
    line.no_wrap = True
    return line
