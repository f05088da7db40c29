"""Rewards for right answers: mathematics by value, short answers by text."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from covey.data.rendering import prompt_text, say_once
from covey.errors import RewardError
from covey.process.cores import cores_of_rank
from covey.rewards.builtin import verify
from covey.rewards.builtin.answers import answer_text_of, conclusion, final_answer, is_same, marked_answer, number
from covey.rewards.builtin.choice import golds_of
from covey.rewards.builtin.formulas import is_equal
from covey.rewards.builtin.units import words_of
from covey.rewards.contract import needs_one_of
from covey.rewards.decorators import reward

_VERIFY_SECONDS = 0.65
"""Processor time of an idle core for one comparison; an answer that needs more is wrong."""
_MOST_TRIES = 3
"""Comparisons of an answer that others interrupt."""

Metrics = Callable[[str, float], None]
_Judge = Callable[..., bool | None]
"""A comparison within `seconds` of processor time; raises TimeoutError past them."""


@reward(timeout=math.inf)
@needs_one_of("answer", "solution")
def math_reward(
    completions: Sequence[Any],
    answer: Sequence[Any] | None = None,
    solution: Sequence[Any] | None = None,
    log_metric: Metrics | None = None,
    **columns: Any,
) -> list[float | None]:
    r"""1.0 where the completion's final answer equals the gold answer in value, 0.0 where not, `None` without a gold answer.

    Of several gold answers in a list any is right.
    The gold answer is in the column `answer`, or else `solution`: after GSM8K's `####`, in `\boxed{}`, or the whole text. The
    completion's is, behind thoughts that `</think>` closes, after its last `####`, in its last `\boxed{}`, after its last "the answer is", or its last number. The same
    text or the same exact number is right (1,250.00 = 1250, 0.5 = 1/2, 72 eggs = 72 where the question speaks of eggs).
    A formula that is read whole is compared by math-verify (`pip install 'covey[math]'`) in a process of its own, for at
    most the work of 0.65 seconds of an idle core; anything else is wrong. `None` also where math-verify cannot parse the gold
    answer, or other processes ended the comparison three times.

    Raises RewardError for a gold formula without math-verify.
    """
    golds = _golds(answer, solution)
    nouns = _nouns(golds, answer if answer is not None else solution, columns.get("prompts"))
    answers = [final_answer(answer_text_of(completion)) for completion in completions]
    rows = list(zip(answers, golds, nouns, strict=True))
    pairs = dict.fromkeys((final, gold, noun) for final, several, noun in rows for gold in several)  # equal ones once
    verdicts = dict(zip(pairs, _verdicts([partial(_judge, *pair) for pair in pairs]), strict=True))
    scores = [_best([verdicts[final, gold, noun] for gold in several]) for final, several, noun in rows]
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
    r"""1.0 where the final answer is the gold answer, or any of several, as text or number, 0.0 where not, `None` without one.

    The completion's final answer is what it marks (`####`, `\boxed{}`), or the whole text; for a gold answer that is a number
    also its last number. Nothing is evaluated.
    """
    rows = zip(map(answer_text_of, completions), _golds(answer, solution), strict=True)
    return [_best([_matches(text, gold) for gold in several]) for text, several in rows]


@reward(timeout=math.inf)
def accuracy_reward(completions: Sequence[Any], solution: Sequence[str], **columns: Any) -> list[float | None]:
    r"""TRL's reward of this name: math-verify's verdict, with the answer taken only from `\boxed{}` or dollar signs.

    `None` where the solution cannot be parsed. Needs math-verify; each comparison has the work of 0.65 seconds of an idle core
    in a process of its own, past which the answer is wrong.
    """
    if not verify.is_installed():
        raise RewardError("accuracy_reward needs math-verify: pip install 'covey[math]', or use the reward 'math'.")
    rows = list(zip(solution, map(answer_text_of, completions), strict=True))
    unique = {(repr(gold), text): (gold, text) for gold, text in rows}  # equal answers are judged once, and alike
    judges: list[_Judge] = [partial(verify.is_equal, gold, text, anchored=True) for gold, text in unique.values()]
    verdicts = dict(zip(unique, _verdicts(judges), strict=True))
    return [verdicts[repr(gold), text] for gold, text in rows]


def _golds(answer: Sequence[Any] | None, solution: Sequence[Any] | None) -> list[list[str]]:
    """The gold answers of each row, any of which is right."""
    column = answer if answer is not None else solution
    if column is None:
        raise RewardError(
            "this reward needs a column 'answer' or 'solution'; rename yours, as in --columns answer=label."
        )
    return [golds_of(cell) for cell in column]


def _best(verdicts: Sequence[float | None]) -> float | None:
    """1.0 where any is; else `None` where one could not be judged, or there is none."""
    return 1.0 if 1.0 in verdicts else None if None in verdicts or not verdicts else 0.0


def _verdicts(judges: Sequence[_Judge]) -> list[float | None]:
    """The scores, in order; side by side on this rank's cores from the first answer on that used its time up."""
    scores = list[float | None]()
    for judge in judges:
        score, is_late = _verdict(judge)
        scores.append(score)
        if is_late:
            break
    with ThreadPoolExecutor(cores_of_rank()) as threads:
        return scores + [score for score, _ in threads.map(_verdict, judges[len(scores) :])]


def _verdict(judge: _Judge) -> tuple[float | None, bool]:
    """The score, and True for an answer that used its own time up: 0. `None` where the machine did not give it that time."""
    for _ in range(_MOST_TRIES):
        try:
            verdict = judge(seconds=_VERIFY_SECONDS)
        except verify.InterruptedComparisonError:
            continue
        except TimeoutError:
            return 0.0, True
        return None if verdict is None else float(verdict), False
    return None, False


def _judge(answer: str | None, gold: str, nouns: frozenset[str], *, seconds: float) -> bool | None:
    if answer is None:
        return False
    return is_equal(answer, gold, partial(_evaluate, seconds=seconds), nouns)


def _evaluate(gold: str, answer: str, *, seconds: float) -> bool | None:
    if verify.is_installed():
        return verify.is_equal(gold, answer, seconds=seconds)
    if number(gold) is None:
        raise RewardError(
            f"the gold answer {gold!r} is a formula, which math-verify compares: pip install 'covey[math]'."
        )
    say_once(
        "Some answers are formulas, and math-verify is not installed: where the gold answer is a number, they score 0; "
        "pip install 'covey[math]'."
    )
    return False


def _nouns(
    golds: Sequence[Any], solutions: Sequence[Any] | None, prompts: Sequence[Any] | None
) -> list[frozenset[str]]:
    """The words of each row's question and solution, which may stand after a number."""
    questions = prompts if prompts is not None and len(prompts) == len(golds) else [""] * len(golds)
    seen = dict[tuple[str, str], frozenset[str]]()
    nouns = list[frozenset[str]]()
    for question, solution in zip(questions, solutions or [""] * len(golds), strict=True):
        pair = (prompt_text(question), str(solution))
        if pair not in seen:
            seen[pair] = words_of(*pair)
        nouns.append(seen[pair])
    return nouns


def _matches(text: str, gold: str) -> float:
    marked = marked_answer(text)
    candidates = [marked if marked is not None else conclusion(text)]
    if marked is None and number(gold) is not None:
        candidates.append(final_answer(text) or "")
    return float(any(is_same(candidate, gold) for candidate in candidates))
