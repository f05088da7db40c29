"""Plain functions run in their order on the caller's thread; those marked `in_thread` at the same time, beside them."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch

from covey.errors import RewardError
from covey.rewards import RewardSpec, Scorer, reward
from covey.types import Sum
from kit import group


class Places:
    """Which thread each function was called on: `main` or `other`, call by call."""

    def __init__(self):
        self.of = {}

    def note(self, name):
        is_main = threading.current_thread() is threading.main_thread()
        self.of.setdefault(name, []).append("main" if is_main else "other")


def plain(name, work, places=None, score=1.0, **options):
    def call(completions):
        if places is not None:
            places.note(name)
        work()
        return [score] * len(completions)

    return RewardSpec(name=name, call=reward(**options)(call) if options else call)


def wait():
    time.sleep(0.1)


def batches(rewards, count=3, **options):
    """The rewards of `count` batches of two completions, and the metrics."""
    scorer = Scorer(rewards, **options)
    found = [scorer.score([group(["4", "5"])])[0].rewards.tolist() for _ in range(count)]
    scorer.close()
    return found, scorer.take_metrics()


def test_a_plain_function_stays_on_the_main_thread_however_long_it_waits():
    places = Places()
    batches([plain("a", wait, places), plain("b", wait, places)])
    assert places.of == {"a": ["main"] * 3, "b": ["main"] * 3}


def test_one_marked_in_thread_leaves_the_main_thread_at_once():
    places = Places()
    batches([plain("a", wait, places), plain("b", wait, places, in_thread=True)])
    assert places.of == {"a": ["main"] * 3, "b": ["other"] * 3}


def test_two_marked_in_thread_are_inside_their_calls_at_the_same_time():
    met = threading.Barrier(2)
    meet = lambda: met.wait(timeout=60)  # raises unless the other one is inside its call too
    found, _ = batches(
        [plain("a", meet, score=1.0, in_thread=True), plain("b", meet, score=2.0, in_thread=True)], count=2
    )
    assert found == [[[1.0, 2.0]] * 2] * 2


def test_plain_functions_run_in_their_order():
    order = []
    batches([plain("a", lambda: order.append("a")), plain("b", lambda: order.append("b"))])
    assert order == ["a", "b"] * 3


def test_scores_stand_in_the_order_of_the_rewards_wherever_they_ran():
    rewards = [plain("a", wait, score=1.0, in_thread=True), plain("b", wait, score=2.0), plain("c", wait, score=3.0)]
    assert batches(rewards)[0] == [[[1.0, 2.0, 3.0]] * 2] * 3


def test_each_function_is_called_by_one_thread_at_a_time():
    inside, most = threading.Semaphore(1), []

    def alone():
        most.append(inside.acquire(blocking=False))
        time.sleep(0.05)
        inside.release()

    batches([plain("a", alone, in_thread=True), plain("b", wait)], count=4)
    assert most == [True] * 4


def test_an_ordinary_error_in_a_thread_is_told_with_its_completion_and_costs_that_one_alone():
    @reward(in_thread=True)
    def call(completions):
        if "bad" in completions:
            raise ValueError("no number in it")
        return [1.0] * len(completions)

    scorer = Scorer([RewardSpec(name="a", call=call), plain("b", wait)])
    (scored,) = scorer.score([group(["4", "bad"])])
    scorer.close()
    assert scored.rewards[0].tolist() == [1.0, 1.0]
    assert scored.rewards[1].isnan().all()  # a sum of the other reward alone would be a worse one
    assert scored.measured is not None
    (event,) = scored.events
    assert event.details["completion"] == "bad"
    assert "no number in it" in event.details["traceback"]
    assert scorer.take_metrics()["rewards/a/errors"] == Sum(1)


def test_strict_mode_ends_with_the_error_of_a_function_in_a_thread():
    def failing():
        raise ValueError("no number in it")

    with pytest.raises(RewardError, match="failing.*no number in it"):
        batches([plain("failing", failing, in_thread=True), plain("b", wait)], on_error="raise")


def test_a_hang_in_a_thread_is_given_up_at_its_limit_and_the_others_count():
    enough = threading.Event()
    hang = plain("a", lambda: enough.wait(60), timeout=0.5, in_thread=True)
    found, metrics = batches([hang, plain("b", wait)], count=2)
    enough.set()
    assert torch.tensor(found).isnan().tolist() == [[[True, False]] * 2] * 2
    assert metrics["rewards/a/timeouts"] == Sum(4)


@pytest.mark.slow
def test_a_regular_expression_that_explodes_is_interrupted_beside_functions_that_wait():
    def exploding():
        re.match(r"(a+)+$", "a" * 40 + "b")

    found, metrics = batches([plain("a", exploding, timeout=0.5), plain("b", wait, in_thread=True)], count=2)
    assert torch.tensor(found).isnan().tolist() == [[[True, False]] * 2] * 2
    assert metrics["rewards/a/timeouts"] == Sum(4)
