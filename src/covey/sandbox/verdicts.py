"""Results of programs: encoding of tests for the judge, and the meaning of its lines, exit codes and output."""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from decimal import Decimal
from hashlib import blake2b
from hmac import compare_digest
from itertools import repeat
from typing import Any, Literal

from covey.errors import RewardError

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


@dataclass(frozen=True)
class Plan:
    """Statements, which need to run in the program's process or not, or pairs of input and expected output."""

    count: int = 0
    setup: str = ""
    statements: tuple[str, ...] | None = None
    pairs: tuple[tuple[str, str | None, bool], ...] | None = None
    """Input, expected output, and whether its numbers are compared exactly."""

    def payload(self, **words: Any) -> bytes:
        """The statements as the process that runs them reads them."""
        return json.dumps({"setup": self.setup, "tests": self.statements, **words}).encode()


def plan(tests: Sequence[Any] | str | None, setup: str) -> Plan:
    """Plan for a caller's tests. Raises RewardError for tests that are neither statements nor pairs."""
    if tests is None:
        if setup:
            raise RewardError("setup is code for the tests, and there are none; put it at the start of the code.")
        return Plan(pairs=(("", None, True),))
    listed: list[Any] = [tests] if isinstance(tests, str | Mapping) else list(tests)
    if not listed:
        raise RewardError(
            "tests is empty, so nothing could pass or fail; give at least one, or None to only run the code."
        )
    if all(isinstance(test, str) for test in listed):
        return Plan(count=len(listed), setup=setup, statements=tuple(listed))
    if all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in listed):
        if setup:
            raise RewardError("setup goes with tests that are statements, not with pairs of input and output.")
        pairs = tuple((str(test["input"]), str(test["output"]), bool(test.get("exact"))) for test in listed)
        return Plan(count=len(listed), pairs=pairs)
    raise RewardError(
        'tests must be statements ("assert f(1) == 2") or {"input": ..., "output": ...} pairs, all of one kind.'
    )


def check_limits(code: Any, timeout: float, memory_mb: int, max_output: int) -> None:
    """Raises RewardError for an invalid limit, or code that is not text."""
    if not isinstance(code, str):
        raise RewardError(f"code must be text, not {type(code).__name__}.")
    if not (0 < timeout < math.inf):
        raise RewardError(f"timeout must be a number of seconds above 0, not {timeout!r}.")
    if memory_mb < 1 or max_output < 1:
        raise RewardError(f"memory_mb and max_output must be at least 1, not {memory_mb!r} and {max_output!r}.")


def lost(error: Exception, plan: Plan) -> Result:
    """The verdict of a program whose worker did not answer any more."""
    return Result(False, "crashed", detail=f"the sandbox's worker was lost: {error}"[:500], tests=(False,) * plan.count)


def of_tests(seen: ProcessOutput, plan: Plan, key: bytes = b"") -> tuple[Result, list[dict[str, Any]]]:
    """The verdict of the lines of a judge, or of those that are signed with `key`; and the lines. A test without one has not passed."""
    lines = _lines(seen.verdict, key)
    outcomes = {line["test"]: line for line in lines if "test" in line}
    if seen.late and len(outcomes) == plan.count:
        outcomes.pop(plan.count - 1, None)  # it ended after its time
    tests = tuple(outcomes.get(number, {}).get("outcome") == "passed" for number in range(plan.count))
    changed = next((line["changed"] for line in lines if line.get("changed")), "")
    if changed and any(tests):
        sentence = f"the code changed {changed}, which the tests lean on"
        return _result(seen, "wrong", sentence, (False,) * plan.count), lines
    reason, detail = _why(seen, lines, outcomes, tests)
    return _result(seen, reason, detail, tests), lines


def unproven(result: Result, held: Set[int]) -> Result:
    """`result`, where the tests `held` hold with other values than the expected ones as well."""
    tests = tuple(passed and number not in held for number, passed in enumerate(result.tests))
    detail = f"test {min(held) + 1} of {len(tests)} passes whatever it expects, so its pass says nothing"
    return replace(result, passed=False, reason="wrong", detail=detail, tests=tests)


def _why(
    seen: ProcessOutput, lines: list[dict[str, Any]], outcomes: dict[int, dict[str, Any]], tests: tuple[bool, ...]
) -> tuple[Reason, str]:
    first = next((number for number, passed in enumerate(tests) if not passed), None)
    if first is None and any("done" in line for line in lines) and not seen.late:
        return "passed", f"{len(tests)} of {len(tests)} tests passed"
    met = _limit_met(seen)
    if met is not None:
        return met
    for line in lines:
        if "setup" in line:
            return "tests", f"the tests cannot be run: {line['setup']}"
        if "code" in line:
            sentence = f"{line['code']['raised']}: {line['code'].get('said', '')}"
            return _kind(str(line["code"]["raised"])), f"the code does not load: {sentence}"
    outcome = outcomes.get(first or 0)
    if outcome is None or outcome["outcome"] == "gone":
        return _left(seen, f"during test {(first or 0) + 1}")
    where = f"test {(first or 0) + 1} of {len(tests)}"
    if outcome["outcome"] == "wrong":
        return "wrong", f"{where} failed: {outcome['said']}"
    return _kind(outcome["kind"]), f"{where} raised {outcome['said']}"


def of_pairs(seen: list[ProcessOutput], plan: Plan) -> Result:
    """The verdict of programs that read and print: each must come to its end, and print what is expected."""
    tests, why = [], None
    for (_, expected, is_exact), watched in zip(plan.pairs or (), seen, strict=False):
        problem = _of_pair(watched, expected, is_exact)
        tests.append(problem is None)
        why = why or problem
    tests += [False] * (plan.count - len(tests))
    reason, detail = why or ("passed", "")
    last = seen[-1] if why is None or len(seen) == 1 else seen[tests.index(False)]
    return _result(last, reason, detail, tuple(tests) if plan.count else ())


def _of_pair(seen: ProcessOutput, expected: str | None, is_exact: bool) -> tuple[Reason, str] | None:
    met = _limit_met(seen)
    if met is not None:
        return met
    code = seen.ended.get("candidate", 1)
    error = seen.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if code == 1:
        return _kind(error.partition(":")[0]), f"the code raised {error}"
    if code < 0:
        return _left(seen, "during its run")
    if code:
        return "exited", f"the code left with exit code {code}"
    if expected is not None and not _is_printed(seen.stdout.decode(errors="replace"), expected, is_exact):
        return "wrong", "the code printed something else than expected"
    return None


def _is_printed(text: str, expected: str, is_exact: bool) -> bool:
    """True if all lines are equal without trailing blanks, or have the same words but for numbers that are near enough."""
    if text.rstrip() == expected.rstrip():
        return True
    printed, expected_lines = (part.rstrip().split("\n") for part in (text, expected))
    return len(printed) == len(expected_lines) and all(map(_is_line, printed, expected_lines, repeat(is_exact)))


def _is_line(line: str, expected: str, is_exact: bool) -> bool:
    if line.rstrip() == expected.rstrip():
        return True
    words, expected_words = line.split(), expected.split()
    if len(words) != len(expected_words) or not all(map(_is_word, words, expected_words, repeat(is_exact))):
        return False
    return all(map(_is_number, expected_words)) or re.sub(r"\S+", "", line.rstrip()) == re.sub(
        r"\S+", "", expected.rstrip()
    )


def _is_number(word: str) -> bool:
    try:
        return Decimal(word).is_finite()
    except ArithmeticError:
        return False


def _is_word(word: str, expected: str, is_exact: bool) -> bool:
    """True for the same text, or the same number written otherwise (`3.0` for `3`, brackets and commas around it as they are).

    A fraction is within the tolerance of `numpy.allclose`, which the harness of APPS uses, of the expected one; written for a whole
    number it has to be that but for rounding errors.
    """
    if word == expected:
        return True
    core, expected_core = word.strip(_AROUND), expected.strip(_AROUND)
    if word.replace(core, "", 1) != expected.replace(expected_core, "", 1):
        return False
    try:
        number, other = Decimal(core), Decimal(expected_core)
    except ArithmeticError:
        return False
    if not (number.is_finite() and other.is_finite()):
        return False
    if number == other:
        return True
    if is_exact or not (_is_fraction(core) or _is_fraction(expected_core)):
        return False
    relative, absolute = ("1e-5", "1e-8") if _is_fraction(expected_core) else ("1e-9", "1e-9")
    try:
        return abs(number - other) <= Decimal(absolute) + Decimal(relative) * abs(other)
    except ArithmeticError:  # an exponent beyond all measure
        return False


_AROUND = "[](){},;:"


def _is_fraction(word: str) -> bool:
    return "." in word or "e" in word.lower()


def _limit_met(seen: ProcessOutput) -> tuple[Reason, str] | None:
    if seen.is_open:
        raise RewardError(f"the sandbox could not lock a program in: {seen.stderr.decode(errors='replace').strip()}")
    if seen.loud:
        return "output", "the code printed more than the limit on output"
    if seen.late or seen.ended.get("candidate") == -signal.SIGXCPU:
        return "timeout", "the code did not end within its time"
    return None


def _left(seen: ProcessOutput, when: str) -> tuple[Reason, str]:
    code = seen.ended.get("candidate", 0)
    if code < 0:
        is_named = -code in {item.value for item in signal.Signals}
        return (
            "crashed",
            f"the code was ended by {signal.Signals(-code).name if is_named else f'signal {-code}'} {when}",
        )
    return "exited", f"the code ended its process (exit code {code}) {when}"


def _kind(error: str) -> Reason:
    if error == "MemoryError":
        return "memory"
    return "syntax" if error in ("SyntaxError", "IndentationError", "TabError") else "error"


def _lines(verdict: bytearray, key: bytes) -> list[dict[str, Any]]:
    """The complete lines. With a key they come from the program's process: the first that is not signed ends them."""
    accepted: list[dict[str, Any]] = []
    for number, line in enumerate(bytes(verdict).split(b"\n")[:-1]):
        if key:
            signed, _, line = line.partition(b" ")
            if not compare_digest(signed, signature(line, key, number)):
                return accepted
        accepted.append(json.loads(line))
    return accepted


def signature(body: bytes, key: bytes, number: int) -> bytes:
    """Keyed digest (BLAKE2b) of line `number` of a verdict."""
    return blake2b(b"%d %b" % (number, body), key=key, digest_size=16).hexdigest().encode()


def _result(seen: ProcessOutput, reason: Reason, detail: str, tests: tuple[bool, ...]) -> Result:
    stdout, stderr = (bytes(text).decode(errors="replace") for text in (seen.stdout, seen.stderr))
    return Result(reason == "passed", reason, stdout, stderr, detail=detail[:2000], tests=tests)
