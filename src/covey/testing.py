"""Checks for one's own parts of an algorithm, to call from a test: each raises AssertionError that says what is wrong.

```python
from covey.testing import check_objective
def test_my_objective(): check_objective(my_objective)
```
"""

from typing import Any

from covey.algorithms.check import PROBLEMS
from covey.algorithms.control import Controller
from covey.declared import checked
from covey.types import ReferenceRule

__all__ = [
    "check_advantage", "check_aggregate", "check_controller", "check_critic", "check_kl", "check_objective",
    "check_reference", "check_regularizer", "check_weight",
]  # fmt: skip


def check_advantage(part: Any) -> None:
    """Check an advantage `(scores) -> [P, G] or [P, G, T]`: shape, finite numbers, 0 for tied groups and unscored completions, order, padding."""
    _check("advantage", part)


def check_aggregate(part: Any) -> None:
    """Check an aggregate `(per_token, tokens, totals) -> loss`: shares of micro-batches add up, padding and order change nothing."""
    _check("aggregate", part)


@checked
def check_controller(part: Controller) -> None:
    """Check a controller of a coefficient: finite numbers from `init` and `update`, also from a report without any metric."""
    _check("controller", part)


def check_critic(part: Any) -> None:
    """Check a critic's error `(tokens) -> [N, T]`: as a regularizer, with the gradient of the values."""
    _check("critic", part)


def check_kl(part: Any) -> None:
    """Check a KL estimator `(logp, ref_logp) -> [N, T]`: as a regularizer, and 0 where the policy is the reference."""
    _check("kl", part)


def check_objective(part: Any) -> None:
    """Check an objective `(tokens) -> [N, T]`: shape, finite numbers also at extreme ratios, one gradient for every split, order and padding."""
    _check("objective", part)


@checked
def check_reference(part: ReferenceRule) -> None:
    """Check a reference rule `(report) -> alpha`: a number from 0 to 1 for any report, also one without a KL."""
    _check("reference", part)


def check_regularizer(part: Any) -> None:
    """Check a regularizer `(tokens) -> [N, T]`: shape, finite numbers, one gradient for every split, order and padding, none where no token counts."""
    _check("regularizer", part)


def check_weight(part: Any) -> None:
    """Check a weight `(tokens) -> [N, T]`, which multiplies the objective and carries no gradient: as a regularizer."""
    _check("weight", part)


def _check(kind: str, part: Any) -> None:
    problems = PROBLEMS[kind](part)
    if problems:
        name = getattr(part, "__name__", type(part).__name__)
        raise AssertionError("\n".join([f"{name} is no sound {kind}:", *(f"- {problem}" for problem in problems)]))
