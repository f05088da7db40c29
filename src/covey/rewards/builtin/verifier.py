"""The process that compares formulas with math-verify: JSON lines in, JSON lines out. See `covey.rewards.builtin.verify`.

It runs apart because a formula that a model writes may keep sympy busy for ever or eat the memory, and only a process can be
stopped. Where the system can fork, each comparison has a process of its own, so one that is killed costs the next nothing.
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
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
_REFERENCE_SECONDS = 0.12
"""Processor time of comparing `_WARM` on an idle core, which measures how slow the machine is now."""
_LONGEST_REFERENCE = 10.0
_MOST_TRIES = 4
_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM})
"""Signals that end a comparison for no fault of its own."""


def main() -> None:
    """Answer each line `{"id", "gold", "answer", "anchored", "seconds"}` with `{"id", "equal", "end"}` until the input ends."""
    _confine()
    import math_verify  # noqa: F401 - its second is not the first request's

    logging.disable(logging.CRITICAL)  # math-verify logs every text that it cannot parse
    for gold, answer in _WARM:
        compare({"gold": gold, "answer": answer, "anchored": False})
    slowness = 1.0
    for line in sys.stdin:
        request = json.loads(line)
        reply, slowness = _at_pace(request, slowness) if hasattr(os, "fork") else (_judge(request), slowness)
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


def _at_pace(request: Mapping[str, Any], slowness: float) -> tuple[dict[str, Any], float]:
    """The verdict within the work of `seconds` of an idle core, and the machine's slowness: 2 where work takes twice its time.

    It is measured after each answer that is late, which is tried again with more time where it has grown; so a slow machine, or
    one whose cores are shared, makes no answer wrong.
    """
    reply = dict[str, Any]()
    for _ in range(_MOST_TRIES):
        reply = _apart(lambda: _judge(request), request["seconds"] * slowness)
        if reply["end"] != "late":
            break
        before, measured = slowness, _apart(_reference, _LONGEST_REFERENCE)
        slowness = max(1.0, measured.get("seconds", 0.0) / _REFERENCE_SECONDS)
        if slowness <= 1.1 * before:
            break
    return reply, slowness


def _reference() -> dict[str, Any]:
    """Processor time of comparing `_WARM`."""
    started = time.process_time()
    for gold, answer in _WARM:
        compare({"gold": gold, "answer": answer, "anchored": False})
    return {"seconds": time.process_time() - started, "end": "whole"}


def _apart(work: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The result of a forked process, which the kernel ends after `seconds` of processor time: `late`; by others, `interrupted`.

    A formula that ends its process itself, as where GMP has no memory, is not equal.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.alarm(int(10 * seconds) + 5)
        os.write(writes, json.dumps(work()).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        written = pipe.read()
    _, status = os.waitpid(child, 0)
    if written:
        return dict(json.loads(written))
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else signal.SIGKILL
    if ended_by == signal.SIGPROF:
        return {"equal": None, "end": "late"}
    return {"equal": None, "end": "interrupted"} if ended_by in _OUTSIDE else {"equal": False, "end": "whole"}


def _confine() -> None:
    """Ctrl-C is the parent's to handle; at most 2 GiB of memory where the system can say so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
