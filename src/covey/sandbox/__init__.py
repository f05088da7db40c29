"""Model-written code, run where it can reach nothing: `run(code, tests=["assert f(2) == 4"])`.

A process of its own for each program, without network, without the user's files, environment or processes, within limits on
time, memory, processes, file size and output. Tests of functions run in another process, which the code cannot reach; others run
in the program's process, and again on mutants of themselves. `isolation()` says what keeps a program in on this machine; where files, network or processes would be open, nothing runs.
"""

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

from covey.sandbox.pool import Sandbox
from covey.sandbox.verdicts import Isolation, Result

__all__ = ["Isolation", "Result", "Sandbox", "isolation", "run"]


def run(
    code: str,
    tests: Sequence[Any] | str | None = None,
    *,
    setup: str = "",
    timeout: float = 10.0,
    memory_mb: int = 256,
    allow_unisolated: bool = False,
    strict: bool = False,
    numpy: bool = False,
) -> Result:
    """One program in the sandbox that this process shares; see `Sandbox.run` for `tests`, limits, `strict` and errors, `Sandbox` for `numpy`."""
    sandbox = shared(os.getpid(), None, allow_unisolated, numpy)
    return sandbox.run(code, tests, setup=setup, timeout=timeout, memory_mb=memory_mb, strict=strict)


def isolation() -> Isolation:
    """Isolation layers in force on this machine. Raises RewardError, which says why, where no program can run."""
    return shared(os.getpid(), None, False, False).isolation


@cache
def shared(process: int, workers: int | None, allow_unisolated: bool, numpy: bool, /) -> Sandbox:
    """The sandbox with these options that all of a process share. No default, no keyword: `cache` would tell such calls apart."""
    return Sandbox(workers, allow_unisolated=allow_unisolated, numpy=numpy)
