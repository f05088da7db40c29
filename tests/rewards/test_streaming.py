"""Rewards beside the decoding: what streams, what waits for the whole batch, and that the order of finishing means nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest

from covey.errors import RewardError
from covey.rewards import Scorer, per_completion, reward
from covey.types import Mean, Sum
from kit import group


def groups_of(*texts):
    return [
        group(list(text), question=f"q{i}", uid=f"0:{i}", columns={"answer": text[0]}) for i, text in enumerate(texts)
    ]


def run(scorer, groups, order=None, between=lambda: None):
    scoring = scorer.begin()
    for index in order or range(len(groups)):
        scoring.add(groups[index])
        between()
    scored = scoring.finish(groups)
    scorer.close()
    return [g.rewards[:, 0].nan_to_num(-9.0).tolist() for g in scored]


def test_a_reward_that_streams_is_called_once_a_group_while_others_are_still_written():
    finished = []

    @reward(streams=True)
    async def judge(completions, answer, **columns):
        await asyncio.sleep(0.01)
        finished.append(answer[0])
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    scorer, groups = Scorer([judge]), groups_of("ab", "cd", "ed")
    seen = []
    assert run(scorer, groups, between=lambda: (time.sleep(0.1), seen.append(len(finished)))) == [[1, 0]] * 3
    assert seen == [1, 2, 3]


def test_an_undeclared_reward_gets_the_whole_batch_at_once_in_the_order_of_the_prompts():
    calls = []

    def ranks(completions, **kwargs):
        calls.append(list(completions))
        return [float(sorted(completions).index(c)) for c in completions]

    async def also(completions, **kwargs):
        calls.append(list(completions))
        return [0.0 for _ in completions]

    groups = groups_of("ba", "dc")
    assert run(Scorer([ranks, also]), groups, order=[1, 0]) == [[1, 0], [3, 2]]
    assert calls == [["b", "a", "d", "c"]] * 2


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_scores_do_not_depend_on_the_order_in_which_groups_finish(order):
    @reward(streams=True, concurrency=3)
    async def slow_for_some(completions, log_extra, **columns):
        await asyncio.sleep(0.03 if "a" in completions else 0.0)
        log_extra("first", [completions[0]] * len(completions))
        return [float(ord(c)) for c in completions]

    assert run(Scorer([slow_for_some]), groups_of("ab", "cd", "ef"), order) == [[97, 98], [99, 100], [101, 102]]


def test_a_function_of_one_completion_gets_single_values_and_returns_one_number():
    @per_completion
    def right(completion, prompt, answer, completion_ids, **columns):
        assert isinstance(completion_ids, list)
        assert prompt.startswith("q")
        return float(completion == answer) if completion != "z" else None

    assert run(Scorer([right]), groups_of("ab", "cz")) == [[1, 0], [1, -9]]


def test_at_most_so_many_calls_run_at_a_time_and_time_is_that_of_the_slowest():
    now, most, lock = [0], [0], threading.Lock()
    begun, until = set(), time.monotonic() + 60

    def wait(name, count):
        """Until so many calls run side by side and each of the three functions has begun."""
        begun.add(name)
        while (most[0] < count or len(begun) < 3) and time.monotonic() < until:
            time.sleep(0.01)

    @reward(streams=True, concurrency=3)
    def waits(completions, **columns):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        wait("waits", 3)
        time.sleep(0.1)
        with lock:
            now[0] -= 1
        return [0.0 for _ in completions]

    @reward(in_thread=True)
    def also_waits(completions, **columns):
        wait("also_waits", 0)
        return [0.0 for _ in completions]

    def plain(completions, **columns):
        wait("plain", 0)
        return [0.0 for _ in completions]

    scorer = Scorer([waits, also_waits, plain])
    run(scorer, groups_of(*["ab"] * 6))
    assert time.monotonic() < until
    assert most[0] == 3
    assert 0.6 <= scorer.take_metrics()["rewards/waits/seconds"].value < 60


def test_a_pure_reward_sees_each_content_once():
    seen = []

    @per_completion(pure=True)
    def count(completion, answer, **columns):
        seen.append(completion)
        return float(len(seen))

    scorer = Scorer([count])
    first = run(scorer, groups_of("aab"))
    assert first == [[1.0, 1.0, 2.0]]
    assert run(scorer, groups_of("aab")) == first
    assert seen == ["a", "b"]
    assert scorer.take_metrics()["rewards/count/cached"] == Mean(4, 6)


def test_content_includes_the_prompt_and_the_columns_and_errors_are_not_remembered():
    seen = []

    @reward(pure=True)
    def picky(completions, **columns):
        seen.extend(completions)
        if "x" in completions and len(seen) < 4:
            raise ValueError("once")
        return [float(len(c)) for c in completions]

    scorer = Scorer([picky], isolate=False)
    assert run(scorer, groups_of("x")) == [[-9]]
    assert run(scorer, groups_of("x")) == [[-9]]
    assert run(scorer, [group(["x", "x"], question="other")]) == [[1, 1]]
    assert len(seen) == 4


def test_a_streamed_reward_that_hangs_in_a_thread_is_given_up_told_where_and_its_thread_ends():
    @reward(streams=True, timeout=0.3)
    def hang_for_a(completions, **columns):
        while "a" in completions:
            time.sleep(0.01)
        return [1.0 for _ in completions]

    scorer, groups = Scorer([hang_for_a]), groups_of("ab", "cd")
    scoring = scorer.begin()
    for one in groups:
        scoring.add(one)
    scored = scoring.finish(groups)
    scorer.close()
    assert [g.rewards.isnan().flatten().tolist() for g in scored] == [[True, False], [False, False]]
    (event,) = scored[0].events
    assert event.kind == "reward_timeout"
    assert "in hang_for_a" in event.details["traceback"]
    until = time.monotonic() + 5
    while any(thread.name == "covey-reward" for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(thread.name == "covey-reward" for thread in threading.enumerate())


def test_after_three_lost_calls_the_rest_of_the_batch_is_not_called_and_the_next_batch_tries_once():
    calls, is_down = [], [True]

    @reward(streams=True, concurrency=1)
    async def judge(completions, **columns):
        calls.append(len(completions))
        if is_down[0]:
            raise ConnectionRefusedError("nobody listens")
        return [1.0 for _ in completions]

    scorer = Scorer([judge], isolate=False)
    groups = groups_of(*["ab"] * 10)
    scored = scorer.score(groups)
    assert len(calls) == 3
    assert all(g.rewards.isnan().all() for g in scored)
    assert "not called, because reward 'judge' lost 3 calls in a row" in scored[3].events[0].said
    assert scorer.take_metrics()["rewards/judge/errors"] == Sum(20)
    scorer.score(groups)
    assert len(calls) == 4
    is_down[0] = False
    assert not any(g.rewards.isnan().any() for g in scorer.score(groups))
    scorer.close()


def test_errors_of_streamed_rewards_stop_a_strict_run_and_count_towards_the_limit():
    @reward(streams=True)
    def broken(completions, **columns):
        raise ValueError("no")

    with pytest.raises(RewardError, match=r"ValueError: no \(.*test_streaming.py:\d+\) while completions were scored"):
        Scorer([broken], on_error="raise").score(groups_of("ab"))
    scorer = Scorer([broken], error_limit=2)
    scorer.score(groups_of("ab", "cd", "ef"))
    with pytest.raises(RewardError, match="failed 2 calls in a row"):
        scorer.score(groups_of("ab"))


def test_a_declaration_that_makes_no_sense_is_refused():
    with pytest.raises(RewardError, match="concurrency=0"):
        reward(concurrency=0)
    with pytest.raises(RewardError, match="timeout=0"):
        reward(timeout=0)


def test_threads_end_with_a_scorer_that_nobody_closes():
    @reward(streams=True)
    def short_lived(completions, **columns):
        return [0.0 for _ in completions]

    lives = lambda: any(thread.name == "covey-short_lived" for thread in threading.enumerate())
    scorer = Scorer([short_lived])
    scorer.score(groups_of("ab"))
    assert lives()
    del scorer
    gc.collect()
    until = time.monotonic() + 5
    while lives() and time.monotonic() < until:
        time.sleep(0.02)
    assert not lives()
