"""Rewards for right answers: mathematics by value, short answers by text."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from covey.errors import RewardError
from covey.rewards.builtin import verify
from covey.rewards.builtin.answers import final_answer, gold_answer, is_plain, is_same, marked_answer, number
from covey.rewards.builtin.text import text_of
from covey.rewards.contract import needs_one_of
from covey.rewards.decorators import reward

logger = logging.getLogger(__name__)

_VERIFY_SECONDS = 20.0
"""Time limit of math-verify for one batch; answers that it has not reached by then are `None`."""

_LIMIT_SECONDS = 120.0
"""Time limit of one call: starting math-verify takes seconds, which a short limit of the run is not meant for."""

Metrics = Callable[[str, float], None]


@reward(timeout=_LIMIT_SECONDS)
@needs_one_of("answer", "solution")
def math_reward(
    completions: Sequence[Any],
    answer: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    log_metric: Metrics | None = None,
    **columns: Any,
) -> list[float | None]:
    r"""1.0 where the completion's final answer equals the gold answer in value, 0.0 where not, `None` without a gold answer.

    The gold answer is in the column `answer`, or else `solution`: after GSM8K's `####`, in `\boxed{}`, or the whole text. The
    completion's is after its last `####`, in its last `\boxed{}`, or its last number. Numbers are compared exactly as
    fractions (1,250.00 = 1250, 0.5 = 1/2, 50% = 50), anything else as text and then, where math-verify is installed
    (`pip install 'covey[math]'`), by math-verify in a process of its own, 3 seconds each and 20 a
    batch; answers that it cannot judge are `None`.
    """
    golds = _golds(answer, solution, len(completions))
    until = time.monotonic() + _VERIFY_SECONDS
    scores = [_judge(text_of(c), gold, until) for c, gold in zip(completions, golds, strict=True)]
    unjudged = sum(score is None for score in scores)
    if log_metric is not None and unjudged:
        log_metric("math/unjudged", unjudged / len(scores))
    return scores


@needs_one_of("answer", "solution")
def exact_reward(
    completions: Sequence[Any],
    answer: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    **columns: Any,
) -> list[float | None]:
    r"""1.0 where the final answer is the gold answer as text or number, 0.0 where not, `None` without a gold answer.

    The completion's final answer is what it marks (`####`, `\boxed{}`), or the whole text; for a gold answer that is a number
    also its last number. Nothing is evaluated.
    """
    golds = _golds(answer, solution, len(completions))
    return [_matches(text_of(c), gold) for c, gold in zip(completions, golds, strict=True)]


@reward(timeout=_LIMIT_SECONDS)
def accuracy_reward(completions: Sequence[Any], solution: Sequence[str], **columns: Any) -> list[float | None]:
    r"""TRL's reward of this name: math-verify's verdict, with the answer taken only from `\boxed{}` or dollar signs.

    `None` where the solution cannot be parsed. Needs math-verify; each comparison has 3 seconds in a process of its own, a
    batch has 20, and answers that it has not reached by then are `None`.
    """
    if not verify.is_installed():
        raise RewardError("accuracy_reward needs math-verify: pip install 'covey[math]', or use the reward 'math'.")
    judge, until = verify.shared().is_equal, time.monotonic() + _VERIFY_SECONDS
    verdicts = [
        judge(gold, text_of(c), anchored=True) if time.monotonic() < until else None
        for c, gold in zip(completions, solution, strict=True)
    ]
    return [None if verdict is None else float(verdict) for verdict in verdicts]


def _golds(answer: Sequence[Any] | None, solution: Sequence[Any] | None, size: int) -> list[str | None]:
    column = answer if answer is not None else solution
    if column is None:
        raise RewardError(
            "this reward needs a column 'answer' or 'solution'; rename yours, as in --columns answer=label."
        )
    golds = [None if gold is None else gold_answer(str(gold)) for gold in column]
    return [gold or None for gold in golds]


def _judge(text: str, gold: str | None, until: float) -> float | None:
    if gold is None:
        return None
    found = final_answer(text)
    if found is not None and is_same(found, gold):
        return 1.0
    has_latex = "\\" in text or "$" in text or not is_plain(found or "")
    if is_plain(gold) and (found is None or is_plain(found) or not has_latex):
        return 0.0
    if not has_latex and found is None:
        return 0.0
    if not verify.is_installed():
        _warn_without_math_verify()
        return 0.0
    if time.monotonic() > until:
        return None
    answer = text if marked_answer(text) is None else f"\\boxed{{{found}}}"
    verdict = verify.shared().is_equal(f"\\boxed{{{gold}}}", answer)
    return None if verdict is None else float(verdict)


def _matches(text: str, gold: str | None) -> float | None:
    if gold is None:
        return None
    marked = marked_answer(text)
    candidates = [marked if marked is not None else text]
    if marked is None and number(gold) is not None:
        candidates.append(final_answer(text) or "")
    return float(any(is_same(candidate, gold) for candidate in candidates))


@lru_cache
def _warn_without_math_verify() -> None:
    logger.warning(
        "Some answers are LaTeX, and math-verify is not installed: they are compared as text; pip install 'covey[math]'."
    )
