"""A stop that one of two threads is asked for, which stand for processes: both leave at the same meeting, or neither does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from covey.process.interruption import Interruption, StopNow

Work = Callable[[Interruption, int], None]


def outcomes(work: Work, asked: tuple[bool, bool], in_step: bool = False, is_armed: bool = True) -> list[str]:
    """What became of each: "left" or "whole". Both meet as often as each other, or the barrier breaks and this raises."""
    flags, meeting = [False, False], threading.Barrier(2, timeout=120)

    def of(rank: int) -> str:
        def agree(flag: bool) -> bool:
            flags[rank] = flag
            meeting.wait()
            found = any(flags)
            meeting.wait()
            return found

        one = Interruption(lambda: asked[rank], agree)
        one.is_armed = is_armed
        try:
            with one.together(in_step):
                work(one, rank)
        except StopNow:
            return "left"
        return "whole"

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(of, range(2)))


def pieces(one: Interruption, rank: int) -> None:
    for _ in range(1 + 3 * rank):  # as many as this process has
        one()


def settled(one: Interruption, rank: int) -> None:
    one.settle()
    pieces(one, rank)
    one.settle()


def twice(one: Interruption, rank: int) -> None:
    one()
    one()


@pytest.mark.parametrize("asked", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    "work, in_step, leaves",
    [(pieces, False, True), (settled, False, False), (twice, True, True), (lambda one, rank: None, False, False)],
)
def test_all_leave_or_none(work: Work, in_step: bool, leaves: bool, asked: tuple[bool, bool]) -> None:
    assert outcomes(work, asked, in_step) == ["left" if leaves and any(asked) else "whole"] * 2


def test_outside_of_a_step_nobody_leaves() -> None:
    assert outcomes(pieces, (True, True), is_armed=False) == ["whole", "whole"]


def test_an_error_of_one_is_its_own() -> None:
    one = Interruption(lambda: True, lambda flag: pytest.fail("an error is told in another way"))
    with one.armed(), pytest.raises(LookupError), one.together():
        raise LookupError
    with one.armed():
        one()  # and leaves nothing behind: outside of `together` one of several never leaves


def test_an_evaluation_is_left_only_while_it_waits():
    one = Interruption(lambda: True, lambda flag: pytest.fail("the wait ends on all processes together"))
    one.while_waiting()  # of the user's own evaluation, outside of a run
    with one.evaluating():
        one()
        with pytest.raises(StopNow):
            one.while_waiting()
