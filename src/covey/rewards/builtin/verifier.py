"""The process that compares formulas with math-verify: JSON lines in, JSON lines out. See `covey.rewards.builtin.verify`.

It runs apart because a formula that a model writes may keep sympy busy for ever or eat the memory, and only a process can be
stopped. Where the system can fork, each comparison has a process of its own, so one that is killed costs the next nothing.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

_MEMORY_BYTES = 2 * 2**30
_WARM = (
    ("\\frac{1}{2}", "(\\frac{5}{10})"),
    ("x^{2}+1", "1+x^2"),
    ("\\sqrt{2}", "[0,1)"),
    ("x=5", "\\pi"),
    ("2x+3<1", "(-\\infty,1]"),
    ("n(n+1)/2", "\\frac{n^2+n}{2}"),
    ("(1,\\pi/3)", "(1,\\frac{\\pi}{3})"),
    ("1-\\cos^2 x", "\\sin^2 x"),
)
"""Formulas whose grammar is read before the first request, so that no request pays for it."""


def main() -> None:
    """Answer each line `{"id", "gold", "answer", "anchored", "seconds"}` with `{"id", "equal", "end"}` until the input ends."""
    _confine()
    import math_verify  # noqa: F401 - its second is not the first request's

    logging.disable(logging.CRITICAL)  # math-verify logs every text that it cannot parse
    for gold, answer in _WARM:
        compare({"gold": gold, "answer": answer, "anchored": False})
    for line in sys.stdin:
        request = json.loads(line)
        reply = _apart(request) if hasattr(os, "fork") else _judge(request)
        sys.stdout.write(json.dumps({"id": request["id"], **reply}) + "\n")
        sys.stdout.flush()


def compare(request: Mapping[str, Any]) -> bool | None:
    """True if the answer equals the gold answer; `None` when the gold answer cannot be parsed.

    Both are formulas; with `anchored` they are texts, and an answer counts only in a box or between dollar signs, as for
    TRL's `accuracy_reward`.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    if not request["anchored"]:
        as_written = NormalizationConfig(basic_latex=False, boxed="none")
        whole = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=as_written)]
        gold, answer = (
            parse(f"${request[name]}$", whole, fallback_mode="no_fallback", parsing_timeout=None)
            for name in ("gold", "answer")
        )
        return bool(verify(gold, answer, timeout_seconds=None)) if gold else None
    gold = parse(request["gold"], parsing_timeout=None)
    if not gold:
        return None
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    answer = parse(request["answer"], extraction_config=[latex], extraction_mode="first_match", parsing_timeout=None)
    return bool(verify(gold, answer, timeout_seconds=None))


def _judge(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"equal": compare(request), "end": "whole"}
    except Exception:  # noqa: BLE001 - sympy may raise anything on model-written text; then they are not equal
        return {"equal": False, "end": "whole"}


def _apart(request: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict of a forked process, which the kernel ends after `seconds` of processor time: `late`; by others, `interrupted`."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        signal.alarm(int(10 * request["seconds"]) + 5)
        os.write(writes, json.dumps(_judge(request)).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        written = pipe.read()
    _, status = os.waitpid(child, 0)
    is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    return json.loads(written) if written else {"equal": None, "end": "late" if is_late else "interrupted"}


def _confine() -> None:
    """Ctrl-C is the parent's to handle; at most 2 GiB of memory where the system can say so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
