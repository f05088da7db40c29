"""The process that compares LaTeX answers with math-verify: JSON lines in, JSON lines out. See `covey.rewards.builtin.verify`.

It runs apart because what a model writes may keep sympy busy for ever or eat the memory, and only a process can be stopped.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import sys
from collections.abc import Mapping
from typing import Any

_MEMORY_BYTES = 2 * 2**30


def main() -> None:
    """Answer each line `{"id", "gold", "answer", "anchored", "seconds"}` with `{"id", "equal"}` until the input ends."""
    _confine()
    import math_verify  # noqa: F401 - its second is not the first request's

    logging.disable(logging.CRITICAL)  # math-verify logs every text that it cannot parse
    for line in sys.stdin:
        request = json.loads(line)
        _die_after(math.ceil(request["seconds"]) + 1)
        try:
            equal = compare(request)
        except Exception:  # noqa: BLE001 - sympy may raise anything on model-written text; then it cannot be judged
            equal = None
        _die_after(0)
        sys.stdout.write(json.dumps({"id": request["id"], "equal": equal}) + "\n")
        sys.stdout.flush()


def compare(request: Mapping[str, Any]) -> bool | None:
    """True if the answer equals the gold answer; `None` when the gold answer cannot be parsed.

    `anchored` takes an answer only from a box or between dollar signs, as TRL's `accuracy_reward` does.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    gold = parse(request["gold"], parsing_timeout=None)
    if not gold:
        return None
    if request["anchored"]:
        latex = LatexExtractionConfig(
            normalization_config=NormalizationConfig(units=True),
            boxed_match_priority=0,
            try_extract_without_anchor=False,
        )
        answer = parse(
            request["answer"], extraction_config=[latex], extraction_mode="first_match", parsing_timeout=None
        )
    else:
        answer = parse(request["answer"], parsing_timeout=None)
    return bool(verify(gold, answer, timeout_seconds=None))


def _confine() -> None:
    """Ctrl-C is the parent's to handle; at most 2 GiB of memory where the system can say so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))


def _die_after(seconds: int) -> None:
    """Let the kernel end this process, even when its parent is gone and C code never looks up; 0: never."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


if __name__ == "__main__":
    main()
