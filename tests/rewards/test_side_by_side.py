"""Plain functions that wait run at the same time; those that cannot, or share state, stay on the main thread in their order."""

from __future__ import annotations

import asyncio
import functools
import random
import re
import signal
import threading
import time

import pytest
import torch

from covey.errors import RewardError
from covey.rewards import RewardSpec, Scorer, reward
from covey.rewards.habits import State
from covey.types import Sum
from kit import group

SHARED: dict[str, int] = {}
WORDS = ("no", "container")
last = 0


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


def compute():
    until = time.thread_time() + 0.1
    while time.thread_time() < until:
        pass


def batches(rewards, count=3, **options):
    """The rewards of `count` batches of two completions, and the metrics."""
    scorer = Scorer(rewards, **options)
    found = [scorer.score([group(["4", "5"])])[0].rewards.tolist() for _ in range(count)]
    scorer.close()
    return found, scorer.take_metrics()


def test_what_waits_leaves_the_main_thread_after_its_first_call_and_what_computes_stays():
    places = Places()
    batches([plain("a", wait, places), plain("b", wait, places), plain("c", compute, places)])
    assert places.of == {"a": ["main", "other", "other"], "b": ["main", "other", "other"], "c": ["main"] * 3}


def test_two_that_wait_are_inside_their_calls_at_the_same_time():
    met = threading.Barrier(2)

    def meeting():
        if threading.current_thread() is threading.main_thread():
            time.sleep(0.1)
        else:
            met.wait(timeout=60)  # raises unless the other one is inside its call too

    found, _ = batches([plain("a", meeting, score=1.0), plain("b", meeting, score=2.0)], count=2)
    assert found == [[[1.0, 2.0]] * 2] * 2


def test_scores_stand_in_the_order_of_the_rewards_wherever_they_ran():
    found, _ = batches([plain("a", wait, score=1.0), plain("b", compute, score=2.0), plain("c", wait, score=3.0)])
    assert found == [[[1.0, 2.0, 3.0]] * 2] * 3


def test_each_function_is_called_by_one_thread_at_a_time():
    inside, most = threading.Semaphore(1), []

    def alone():
        most.append(inside.acquire(blocking=False))
        time.sleep(0.05)
        inside.release()

    batches([plain("a", alone), plain("b", wait)], count=4)
    assert most == [True] * 4


def test_the_only_plain_function_stays_on_the_main_thread():
    places = Places()
    batches([plain("a", wait, places)])
    assert places.of == {"a": ["main"] * 3}


def test_in_thread_false_keeps_a_function_on_the_main_thread_and_true_takes_it_off_at_once():
    places = Places()
    batches(
        [plain("a", wait, places, in_thread=False), plain("b", wait, places, in_thread=True), plain("c", wait, places)]
    )
    assert places.of["a"] == ["main"] * 3
    assert places.of["b"] == ["other"] * 3


def test_in_a_run_of_several_processes_only_what_was_declared_leaves_the_main_thread(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    places = Places()
    batches([plain("a", wait, places), plain("b", wait, places)])
    assert places.of == {"a": ["main"] * 3, "b": ["main"] * 3}


@pytest.mark.parametrize("draw", [random.random, functools.partial(torch.rand, 1)], ids=["random", "torch"])
def test_what_draws_random_numbers_keeps_its_place_in_the_order_of_calls(draw):
    places = Places()
    batches([plain("a", lambda: (draw(), wait()), places), plain("b", wait, places)])
    assert places.of == {"a": ["main"] * 3, "b": ["main", "other", "other"]}


def test_what_sets_signals_stays_where_it_may():
    places = Places()

    def alarmed():
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        wait()
        signal.signal(signal.SIGALRM, before)

    real = signal.signal
    batches([plain("a", alarmed, places), plain("b", wait, places)])
    assert places.of["a"] == ["main"] * 3
    assert signal.signal is real


def test_a_function_that_runs_a_loop_of_its_own_may_leave():
    places = Places()
    batches([plain("a", lambda: asyncio.run(asyncio.sleep(0.1)), places), plain("b", wait, places)])
    assert places.of["a"] == ["main", "other", "other"]


def test_one_that_cannot_work_in_a_thread_is_called_again_on_the_main_thread_and_nothing_is_lost():
    places = Places()

    def picky():
        wait()
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("objects created in a thread can only be used in that same thread")

    found, metrics = batches([plain("a", picky, places), plain("b", wait)], on_error="raise")
    assert found == [[[1.0, 1.0]] * 2] * 3
    assert places.of["a"] == ["main", "other", "main", "main"]
    assert "rewards/a/errors" not in metrics


def test_an_ordinary_error_in_a_thread_is_told_with_its_completion_and_costs_that_one_alone():
    def call(completions):
        wait()
        if "bad" in completions:
            raise ValueError("no number in it")
        return [1.0] * len(completions)

    scorer = Scorer([RewardSpec(name="a", call=call), plain("b", wait)])
    for _ in range(2):
        scorer.score([group(["4", "5"])])
    (scored,) = scorer.score([group(["4", "bad"])])
    scorer.close()
    assert scored.rewards[0].tolist() == [1.0, 1.0]
    assert scored.rewards[1].isnan().tolist() == [True, False]
    (event,) = scored.events
    assert event.details["completion"] == "bad"
    assert "no number in it" in event.details["traceback"]
    assert scorer.take_metrics()["rewards/a/errors"] == Sum(1)


def test_strict_mode_ends_with_the_error_of_a_function_in_a_thread():
    calls = []

    class Failing:
        __name__ = "failing"

        def __call__(self, completions):
            wait()
            calls.append(1)
            if len(calls) > 2:
                raise ValueError("no number in it")
            return [1.0] * len(completions)

    with pytest.raises(RewardError, match="failing.*no number in it"):
        batches([Failing(), plain("b", wait)], on_error="raise")


def test_a_hang_in_a_thread_is_given_up_at_its_limit_and_the_others_count():
    enough = threading.Event()

    def hanging():
        enough.wait(0.1 if threading.current_thread() is threading.main_thread() else 60)

    found, metrics = batches([plain("a", hanging, timeout=1.0), plain("b", wait)], count=2)
    enough.set()
    assert found[0] == [[1.0, 1.0]] * 2
    assert torch.tensor(found[1]).isnan().tolist() == [[True, False]] * 2
    assert metrics["rewards/a/timeouts"] == Sum(2)


def test_a_regular_expression_that_explodes_is_interrupted_beside_functions_that_wait():
    def exploding():
        re.match(r"(a+)+$", "a" * 40 + "b")

    found, metrics = batches([plain("a", exploding, timeout=0.5), plain("b", wait)], count=2)
    assert torch.tensor(found).isnan().tolist() == [[[True, False]] * 2] * 2
    assert metrics["rewards/a/timeouts"] == Sum(4)


# -- what two functions share ----------------------------------------------------------------------------------------------


def fills(completions):
    SHARED["length"] = len(completions)
    return [0.0] * len(completions)


def _remembered():
    return SHARED.get("length", 0)


def uses(completions):
    return [float(_remembered())] * len(completions)


def assigns(completions):
    global last
    last = len(completions)
    return [0.0] * len(completions)


def finds(completions):
    return [float(last + len(WORDS))] * len(completions)


class Judge:
    def kind(self, completions):
        return [1.0] * len(completions)

    def right(self, completions):
        return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [(fills, uses, "SHARED"), (assigns, finds, "last"), (fills, assigns, None), (finds, uses, None)],
)
def test_state_is_shared_where_one_function_may_change_what_another_uses(one, other, name):
    assert State.of(one).shared_with(State.of(other)) == name
    assert State.of(other).shared_with(State.of(one)) == name


def test_two_methods_of_one_object_share_it_and_those_of_two_do_not():
    judge = Judge()
    assert State.of(judge.kind).shared_with(State.of(judge.right)) == "one Judge"
    assert State.of(judge.kind).shared_with(State.of(Judge().right)) is None


def test_functions_that_share_state_run_in_their_order_on_the_main_thread():
    order = []

    def first(completions):
        wait()
        order.append("first")
        return [1.0] * len(completions)

    def second(completions):
        wait()
        order.append("second")
        return [1.0] * len(completions)

    batches([first, second, plain("c", wait)])
    assert order == ["first", "second"] * 3
