"""Results of a program run in the sandbox."""

from dataclasses import dataclass, field
from typing import Literal

Reason = Literal[
    "passed", "wrong", "error", "syntax", "timeout", "memory", "output", "exited", "crashed", "tests"
]  # fmt: skip


@dataclass(frozen=True)
class Result:
    """The outcome of `covey.sandbox.run`.

    `passed` is true when every test passed; without tests, when the program came to its end. `reason` says why not: a test was
    `wrong`; the code raised (`error`) or is no Python (`syntax`); it met a limit (`timeout`, `memory`, `output`); it left before
    its tests were through (`exited`), or was ended by a signal (`crashed`); or the `tests` themselves cannot be run, which is no
    fault of the code. `detail` is a sentence about it. `stdout` and `stderr` are what the code wrote, cut at the limit on output;
    `seconds` is wall time; `tests` says of each test in turn whether it passed.
    """

    passed: bool
    reason: Reason
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    detail: str = ""
    tests: tuple[bool, ...] = field(default=())


@dataclass(frozen=True)
class Isolation:
    """Isolation of programs on this machine: the layers in force, why others are not, and the resources left uncovered.

    `uncovered` names any of `files`, `network` and `processes`; it is empty where code can be run safely.
    """

    layers: tuple[str, ...]
    missing: dict[str, str]
    uncovered: tuple[str, ...]

    @property
    def safe(self) -> bool:
        """True if files, network and processes are all out of a program's reach."""
        return not self.uncovered

    def __str__(self) -> str:
        missing = "".join(f"; no {layer} ({why})" for layer, why in self.missing.items())
        if self.safe:
            return f"{', '.join(self.layers)}, limits{missing}"
        return f"not safe: nothing keeps a program from the {', '.join(self.uncovered)}{missing}"


@dataclass
class ProcessOutput:
    """Output of a program while it ran."""

    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    verdict: bytearray = field(default_factory=bytearray)
    late: bool = False
    """It ended at a limit of time, of the clock or the processor."""
    cpu_seconds: float = 0.0
    loud: bool = False
    ended: dict[str, int] = field(default_factory=dict)
    is_open: bool = False
    """One of its processes could not lock itself in, and has therefore run nothing."""
