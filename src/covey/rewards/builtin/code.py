"""The reward of code: programs out of completions, run against the tests of their row in the sandbox."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from covey.errors import ConfigError, RewardError
from covey.rewards.builtin.text import text_of
from covey.rewards.decorators import CallOptions
from covey.rewards.sandbox import Sandbox

_COLUMNS = ("tests", "test_list", "test", "input_output")
_SETUP = ("setup", "test_setup_code", "test_setup")
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_SHARES = ("passed", "wrong", "error", "syntax", "timeout", "memory")


@dataclass(frozen=True)
class Code:
    """1.0 where the completion's program passes every test of its row, else 0.0; with `partial`, the share that passes.

    The program is the last fenced block (```` ```python ````), or the whole text where there is no fence; an open fence is no
    program. The row's tests are in the column `tests`, or else `test_list` (MBPP), `test` (HumanEval, with `entry_point`), or
    `input_output` (APPS: JSON with `inputs` and `outputs`); `column` names another. They are statements, one text or a list, or
    pairs of input and output; code for them stands in `setup`, `test_setup_code` or `test_setup`. `None` for a row without tests.
    `timeout` (seconds) and `memory_mb` (MiB) limit one program. Python with its standard library alone. Tests run beside the
    program; with `strict` in another process, for tests of functions alone (docs/sandbox.md).

    Raises RewardError where the machine cannot isolate a program (`covey env` says why) and `allow_unisolated` is false; tests
    that cannot be run are an error of their row's completions, so they are not scored.
    """

    column: str | None = None
    timeout: float = 5.0
    memory_mb: int = 256
    partial: bool = False
    workers: int | None = None
    allow_unisolated: bool = False
    strict: bool = False
    needs_one_of: tuple[str, ...] = field(default=_COLUMNS, init=False, repr=False)
    __name__ = "code_reward"

    def __post_init__(self) -> None:
        for name in ("timeout", "memory_mb", "workers"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"code({name}={value!r}): use a number above 0.")
        workers = self.workers or os.cpu_count() or 1
        call_options = CallOptions(
            unit="completion", is_singular=True, pure=True, concurrency=workers, timeout_seconds=2 * self.timeout + 60
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
        program = program_of(text_of(completion))
        if program is None:
            return 0.0
        setup = next((str(columns[name]) for name in _SETUP if columns.get(name)), "")
        sandbox = _sandbox(os.getpid(), self.workers, self.allow_unisolated)
        statements = isinstance(tests[0], str)
        result = sandbox.run(
            program,
            tests,
            setup=setup if statements else "",
            timeout=self.timeout,
            memory_mb=self.memory_mb,
            strict=self.strict,
        )
        if log_metric is not None:
            for reason in _SHARES:
                log_metric(f"code/{reason}", float(result.reason == reason))
        if log_extra is not None:
            log_extra("code", [f"{result.reason}: {result.detail}"])
        if result.reason == "tests":
            raise RewardError(result.detail)
        return sum(result.tests) / len(result.tests) if self.partial else float(result.passed)


def program_of(text: str) -> str | None:
    """The last fenced block of `text`, or all of it where there is no fence; `None` when a fence stays open after the last."""
    blocks = list(_FENCE.finditer(text))
    rest = text[blocks[-1].end() :] if blocks else text
    if "```" in rest:
        return None
    return blocks[-1][2] if blocks else text


def row_tests(columns: Mapping[str, Any], column: str | None) -> list[Any]:
    """The row's tests as the sandbox takes them; empty where it has none. Raises RewardError for what is none of the forms."""
    name = column or next((name for name in _COLUMNS if columns.get(name) is not None), None)
    found = columns.get(name) if name is not None else None
    if found is None or (isinstance(found, str) and not found.strip()):
        return []
    if name == "test" and columns.get("entry_point"):
        return [f"{found}\ncheck({columns['entry_point']})"]
    if isinstance(found, str) and found.lstrip().startswith(("{", "[")):
        found = _loaded(found)
    if isinstance(found, Mapping) and {"inputs", "outputs"} <= found.keys():
        return _pairs(found)
    if isinstance(found, str | Mapping):
        return [found]
    if isinstance(found, Sequence):
        return list(found)
    raise RewardError(f"column {name!r} holds {type(found).__name__}, which is no test; use text, a list, or pairs.")


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # a statement that starts with a bracket
        return text


def _pairs(found: Mapping[str, Any]) -> list[Any]:
    if found.get("fn_name"):
        raise RewardError(
            "tests that name a function (fn_name) beside inputs and outputs are not read; write them as assert statements."
        )
    if len(found["inputs"]) != len(found["outputs"]):
        raise RewardError(f"{len(found['inputs'])} inputs and {len(found['outputs'])} outputs do not make pairs.")
    pairs = zip(found["inputs"], found["outputs"], strict=True)
    return [{"input": _lines(given), "output": _lines(expected)} for given, expected in pairs]


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


@cache
def _sandbox(process: int, workers: int | None, allow_unisolated: bool) -> Sandbox:
    return Sandbox(workers, allow_unisolated=allow_unisolated)
