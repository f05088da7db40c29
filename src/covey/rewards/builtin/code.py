"""The reward of code: programs out of completions, run against the tests of their row in the sandbox."""

import os
from collections.abc import Callable
from dataclasses import field
from typing import Any

from covey.declared import Count, Positive, checked_dataclass
from covey.errors import RewardError
from covey.process.cores import cores_of_rank
from covey.rewards.builtin.answers import thought_ends
from covey.rewards.builtin.code_tests import COLUMNS, for_program, row_tests
from covey.rewards.builtin.text import text_of
from covey.rewards.decorators import CallOptions
from covey.sandbox import shared
from covey.sandbox.pool import WALL

_SETUP = ("test_imports", "setup", "test_setup_code", "test_setup")
"""Columns of code that runs before tests that are statements: a text, or a list of lines."""
_SHARES = ("passed", "wrong", "error", "syntax", "timeout", "memory")


@checked_dataclass(frozen=True)
class Code:
    """1.0 where the completion's program passes every test of its row, else 0.0; with `partial`, the share that passes.

    The program is the last fenced block (```` ```python ````), or the whole text where there is no fence; an open fence is no
    program. The row's tests are in the column `tests`, or else `test_list` (MBPP), `test` (HumanEval, with `entry_point`),
    `input_output` (APPS and TACO: JSON with `inputs` and `outputs`), `test_cases`, or `private_test_cases` and
    `public_test_cases` (LiveCodeBench); `column` names another. They are statements, one text or a list; pairs of input and
    output; or, with `fn_name` or `metadata`'s `func_name`, arguments and result of a function or of a method of `Solution`. Code
    for statements stands in `test_imports`, `setup`, `test_setup_code` and `test_setup`. `None` for a row without tests.
    `timeout` (seconds of processor time, four times as many by the clock) and `memory_mb` (MiB) limit one program. Python with
    its standard library alone, or with `numpy` NumPy too. Tests of functions run in another process, others in the program's;
    with `strict` all in another (docs/sandbox.md).

    Raises RewardError where the machine cannot isolate a program (`covey env` says why) and `allow_unisolated` is false; tests
    that cannot be run are an error of their row's completions, so they are not scored.
    """

    column: str | None = None
    timeout: Positive = 5.0
    memory_mb: Count = 256
    partial: bool = False
    workers: Count | None = None
    allow_unisolated: bool = False
    strict: bool = False
    numpy: bool = False
    needs_one_of: tuple[str, ...] = field(default=COLUMNS, init=False, repr=False)
    __name__ = "code_reward"

    def __post_init__(self) -> None:
        workers = self.workers or cores_of_rank()
        most = 2 * WALL * self.timeout + 60
        call_options = CallOptions(
            unit="completion", is_singular=True, pure=True, concurrency=workers, timeout_seconds=most
        )
        object.__setattr__(self, "__covey_reward__", call_options)
        if self.column is not None:
            object.__setattr__(self, "needs_one_of", (self.column,))

    def __call__(
        self,
        completion: Any,
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **columns: Any,
    ) -> float | None:
        tests = row_tests(columns, self.column)
        if not tests:
            return None
        text = text_of(completion)  # a mark of the thoughts' end within a program leaves none behind it
        program = next((block for end in thought_ends(text) if (block := program_of(text[end:])) is not None), None)
        if program is None:
            return 0.0
        program, tests, near = for_program(tests, program)
        setup = near or "\n".join(line for name in _SETUP for line in _lines(columns.get(name)))
        sandbox = shared(os.getpid(), self.workers, self.allow_unisolated, self.numpy)
        statements = isinstance(tests[0], str)
        result = sandbox.run(
            program,
            tests,
            setup=setup if statements else "",
            timeout=self.timeout,
            memory_mb=self.memory_mb,
            strict=self.strict or bool(near),
        )
        if log_metric is not None:
            for reason in _SHARES:
                log_metric(f"code/{reason}", float(result.reason == reason))
        if log_extra is not None:
            log_extra("code", [f"{result.reason}: {result.detail}"])
        if result.reason == "tests":
            raise RewardError(result.detail)
        return sum(result.tests) / len(result.tests) if self.partial else float(result.passed)


def _lines(code: Any) -> list[str]:
    return [code] if isinstance(code, str) else list(map(str, code or ()))


def program_of(text: str) -> str | None:
    """The last fenced block of `text`, or all of it where there is no fence; `None` when a fence stays open after the last."""
    block, opened, place, end = None, -1, 0, 0
    for line in text.split("\n"):
        after = place + len(line) + 1
        if opened >= 0 and line.strip(" \t") == "```":
            block, opened, end = text[opened:place], -1, after - 1
        elif opened < 0 and line.lstrip(" \t").startswith("```"):
            opened = after
        place = after
    return None if "```" in text[end:] else text if block is None else block
