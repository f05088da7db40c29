"""Finding: the result of one check."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from covey.errors import CoveyError
from covey.raised import place_of

T = TypeVar("T")
Status = Literal["PASS", "WARN", "FAIL"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """PASS: fine. WARN: it will run, but probably not as intended. FAIL: it will not run, or not learn."""

    status: Status
    area: str
    """environment, options, model, data, rewards, batches, memory, disk, signal, time, learning rate."""
    said: str
    """One sentence, with the figures."""
    fix: str = ""
    """The fix; empty where the sentence names it already."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The figures as numbers."""


def passed(area: str, sentence: str, **facts: Any) -> Finding:
    return Finding(status="PASS", area=area, said=sentence, facts=facts)


def warned(area: str, sentence: str, fix: str, **facts: Any) -> Finding:
    return Finding(status="WARN", area=area, said=sentence, fix=fix, facts=facts)


def failed(area: str, sentence: str, fix: str = "", **facts: Any) -> Finding:
    return Finding(status="FAIL", area=area, said=sentence, fix=fix, facts=facts)


def attempt(area: str, work: Callable[[], T], *, is_foreign: bool = False) -> tuple[T | None, Finding | None]:
    """Result of `work`, or its CoveyError as a finding, whose sentence names the fix already.

    `is_foreign`: it runs code of the user's own, such as the file of a reward, where any error is a finding.
    """
    try:
        return work(), None
    except CoveyError as error:
        return None, failed(area, str(error))
    except Exception as error:  # the border to the user's code
        if not is_foreign:
            raise
        return None, failed(
            area, f"your code raised {type(error).__name__}: {error}.", f"mend {place_of(error) or 'it'}"
        )
