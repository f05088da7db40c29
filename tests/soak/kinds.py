"""The faults: each is done once to a run of its own, which must then end as if nothing had happened."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from covey.runs import checkpoint
from soak.bench import Bench, damaged, end_of, events, last_step, resumed_from, wait_until
from soak.victim import Plan


@dataclass(frozen=True)
class Outcome:
    """Effect of one fault on a run."""

    survived: bool
    lost: int = 0
    """Steps that had to be made again, or whose update was left out."""
    said: str = ""
    """Description of the failure, if the fault was not survived."""
    came_late: bool = False
    """The run had ended before the fault: it says nothing."""


def killed(bench: Bench) -> Outcome:
    """SIGKILL at a random moment of the run, from its first import to its last save."""
    return _signalled(bench, signal.SIGKILL, {-signal.SIGKILL})


def killed_saving(bench: Bench) -> Outcome:
    """SIGKILL at a random moment of a save."""
    folder = bench.fresh()
    process = bench.start(Plan(str(folder)))
    wanted = f"checkpoint-{bench.random.choice([2, 4, 6, 8, 10])}.tmp*"
    wait_until(lambda: any(folder.glob(wanted)) or process.poll() is not None)
    time.sleep(bench.random.uniform(0, 0.05))
    process.send_signal(signal.SIGKILL)
    return _goes_on(bench, folder, bench.finish(process), {-signal.SIGKILL})


def terminated(bench: Bench) -> Outcome:
    """SIGTERM at a random moment."""
    return _signalled(bench, signal.SIGTERM, {75, -signal.SIGTERM})


def interrupted_twice(bench: Bench) -> Outcome:
    """SIGINT, and another 0.6 seconds later."""
    return _signalled(bench, signal.SIGINT, {130, 1, -signal.SIGINT}, again=0.6)


def paused(bench: Bench) -> Outcome:
    """SIGSTOP, and SIGCONT a second later."""
    folder = bench.fresh()
    process = bench.start(Plan(str(folder)))
    _wait_somewhere(bench)
    if process.poll() is not None:
        return Outcome(True, came_late=True)
    _send(process, signal.SIGSTOP)
    time.sleep(1.0)
    _send(process, signal.SIGCONT)
    return _is_as_undisturbed(bench, folder, bench.finish(process), {0})


def corrupted(bench: Bench) -> Outcome:
    """The newest checkpoint of a killed run has a flipped bit, a cut file or a missing one."""
    folder = bench.fresh()
    process = bench.start(Plan(str(folder)))
    wait_until(lambda: (folder / "checkpoint-6").is_dir() or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    code = bench.finish(process)
    newest = checkpoint.checkpoints(folder)[-1]
    file = bench.random.choice(sorted(path for path in newest.iterdir() if path.stat().st_size > 100))
    how = bench.random.choice(["bit", "cut", "gone"])
    if how == "gone":
        file.unlink()
    elif how == "cut":
        os.truncate(file, bench.random.randrange(file.stat().st_size))
    else:
        content = bytearray(file.read_bytes())
        content[bench.random.randrange(len(content))] ^= 1 << bench.random.randrange(8)
        file.write_bytes(content)
    found = _goes_on(bench, folder, code, {-signal.SIGKILL})
    step = checkpoint.step_of(newest)
    if found.survived and resumed_from(folder) >= step:
        return Outcome(False, said=f"went on from {newest.name}, in which {file.name} was damaged ({how})")
    return found


def full_disk(bench: Bench) -> Outcome:
    """No file may grow beyond 20 kB during three steps: saves are refused, training goes on, a later save succeeds."""
    folder = bench.fresh()
    code = bench.run(Plan(str(folder), trouble="disk full", at=bench.random.randrange(1, 7)))
    return _is_as_undisturbed(bench, folder, code, {0})


def no_memory(bench: Bench) -> Outcome:
    """16 MiB more than the process has, from a random step on; where a library aborts or fails on it, the run is started again."""
    folder = bench.fresh()
    plan = Plan(str(folder), steps=3, save_steps=1, trouble="no memory", at=bench.random.randrange(1, 3))
    code = bench.run(plan)
    if code == 0 and not events(folder, "out_of_memory"):
        return Outcome(True, came_late=True)
    if code not in (-signal.SIGABRT, 1, 71):
        return _finishes(folder, code)
    reached = last_step(folder)
    code = bench.run(replace(plan, at=-1))
    return _finishes(folder, code, _lost(folder, reached) + 1)


def bad_gradient(bench: Bench) -> Outcome:
    """A gradient with NaN in it: its update is left out."""
    folder = bench.fresh()
    code = bench.run(Plan(str(folder), trouble="bad gradient", at=bench.random.randrange(12)))
    return _finishes(folder, code, len(events(folder, "non_finite_step")))


def bad_reward(trouble: str) -> Callable[[Bench], Outcome]:
    """A reward that fails in some steps."""

    def inject(bench: Bench) -> Outcome:
        folder = bench.fresh()
        return _finishes(folder, bench.run(Plan(str(folder), trouble=trouble)))

    return inject


def dead_rank(bench: Bench) -> Outcome:
    """One of two processes is killed at a random moment; both are started again."""
    undisturbed, seconds = bench.undisturbed(2)
    folder = bench.fresh()
    pair = bench.start_pair(Plan(str(folder)))
    time.sleep(bench.random.uniform(0.2, 0.9) * seconds)
    victim = bench.random.randrange(2)
    pair[victim].kill()
    codes = [bench.finish(one, 30.0) for one in pair]
    if end_of(folder):
        return Outcome(True, came_late=True)
    if codes[1 - victim] in (None, 0):
        return Outcome(False, said=f"the other process ended with {codes[1 - victim]}")
    reached = last_step(folder)
    again = [bench.finish(one) for one in bench.start_pair(Plan(str(folder)))]
    if any(again):
        return Outcome(False, said=f"started again, the two ended with {again}")
    is_same = end_of(folder) == undisturbed
    return Outcome(is_same, _lost(folder, reached), "" if is_same else "other weights than the undisturbed run")


FAULTS: dict[str, Callable[[Bench], Outcome]] = {
    "kill -9": killed,
    "kill -9 in a save": killed_saving,
    "SIGTERM": terminated,
    "SIGINT twice": interrupted_twice,
    "frozen for a second": paused,
    "newest checkpoint damaged": corrupted,
    "disk full": full_disk,
    "no memory": no_memory,
    "NaN gradient": bad_gradient,
    "reward raises": bad_reward("reward raises"),
    "reward hangs": bad_reward("reward hangs"),
    "reward returns rubbish": bad_reward("reward rubbish"),
    "dead rank": dead_rank,
}


def _signalled(bench: Bench, number: int, codes: set[int], again: float = 0.0) -> Outcome:
    folder = bench.fresh()
    process = bench.start(Plan(str(folder)))
    _wait_somewhere(bench)
    for pause in (again, 0.0) if again else (0.0,):
        if process.poll() is None:
            _send(process, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(pause)
    return _goes_on(bench, folder, bench.finish(process), codes)


def _wait_somewhere(bench: Bench) -> None:
    time.sleep(bench.random.uniform(0.0, bench.undisturbed(1)[1]))


def _goes_on(bench: Bench, folder: Path, code: int | None, codes: set[int]) -> Outcome:
    """Start a run again that a fault has ended, and compare its end."""
    if code == 0 and end_of(folder):
        return Outcome(True, came_late=True)
    if code not in codes:
        return Outcome(False, said=f"ended with {code} where {sorted(codes)} is documented")
    torn = damaged(folder)
    reached = last_step(folder)
    code = bench.run(Plan(str(folder)))
    found = _is_as_undisturbed(bench, folder, code, {0}, reached)
    return found if not torn else replace(found, said=f"{found.said} {torn} were damaged".strip())


def _is_as_undisturbed(
    bench: Bench, folder: Path, code: int | None, codes: set[int], reached: int | None = None
) -> Outcome:
    lost = 0 if reached is None else _lost(folder, reached)
    if code not in codes:
        return Outcome(False, lost, f"ended with {code}")
    if end_of(folder) != bench.undisturbed(1)[0]:
        return Outcome(False, lost, "other weights than the undisturbed run")
    torn = damaged(folder)
    return Outcome(not torn, lost, f"{torn} do not verify" if torn else "")


def _finishes(folder: Path, code: int | None, lost: int = 0) -> Outcome:
    """It came to its end, and its weights are numbers."""
    if code != 0:
        return Outcome(False, lost, f"ended with {code}")
    end = end_of(folder)
    return Outcome(
        end not in ("", "not finite"), lost, "" if end not in ("", "not finite") else "weights are not finite"
    )


def _lost(folder: Path, reached: int) -> int:
    return max(0, reached - resumed_from(folder)) if reached else 0


def _send(process: object, number: int) -> None:
    """A signal, unless the process has just ended: its parent, which is not us, may have heard of it before we do."""
    pid = getattr(process, "pid", None)
    assert isinstance(pid, int)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
