"""Checks for one's own parts of an algorithm, to call from a test: each raises AssertionError that says what is wrong.

```python
from covey.testing import check_objective
def test_my_objective(): check_objective(my_objective)
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from covey.algorithms.check import PROBLEMS

__all__ = [
    "check_advantage",
    "check_aggregate",
    "check_controller",
    "check_critic",
    "check_kl",
    "check_objective",
    "check_reference",
    "check_regularizer",
    "check_weight",
]


def _checker(kind: str) -> Callable[[Any], None]:
    problems_of = PROBLEMS[kind]

    def check(part: Any) -> None:
        problems = problems_of(part)
        if problems:
            name = getattr(part, "__name__", type(part).__name__)
            raise AssertionError("\n".join([f"{name} is no sound {kind}:", *(f"- {problem}" for problem in problems)]))

    check.__name__ = check.__qualname__ = f"check_{kind}"
    check.__doc__ = problems_of.__doc__
    return check


check_advantage = _checker("advantage")
check_aggregate = _checker("aggregate")
check_controller = _checker("controller")
check_critic = _checker("critic")
check_kl = _checker("kl")
check_objective = _checker("objective")
check_reference = _checker("reference")
check_regularizer = _checker("regularizer")
check_weight = _checker("weight")
