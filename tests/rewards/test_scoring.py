"""The contract of reward functions: what they receive, what they may return, and what failing ones cannot do."""

from __future__ import annotations

import asyncio
import functools
import gc
import math
import re
import signal
import threading
import time
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
import torch
from datasets import Dataset

from covey import GRPOConfig
from covey.errors import ConfigError, DataError, RewardError
from covey.rewards import RewardSpec, Scorer, check, has_signal, mean_score
from covey.training.datasets import refuse_no_data
from covey.types import Group, Mean, Sum
from kit import completion, group, prompt

CHAT = [{"role": "user", "content": "2 + 2 ="}]


def right(completions, answer, **kwargs):
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def score(*rewards, groups=None, **options):
    scorer = Scorer(rewards, **options)
    scored = scorer.score(groups if groups is not None else [group(["4", "5"], columns={"answer": "4"})])
    scorer.close()
    return scored, scorer.take_metrics()


def column(scored, index=0):
    return torch.cat([g.rewards[:, index] for g in scored]).tolist()


def test_columns_of_one_name_by_two_rewards_are_both_kept():
    def first(completions, log_extra, **kwargs):
        log_extra("note", ["a", None])
        return [0.0] * len(completions)

    def second(completions, log_extra, **kwargs):
        log_extra("note", ["b", "c"])
        return [0.0] * len(completions)

    (scored,), _ = score(first, second)
    assert {name: list(values) for name, values in scored.extras.items()} == {
        "note": ["a", "c"],
        "note (second)": ["b", "c"],
    }


@pytest.mark.parametrize("name", ["prompts", "completions", "trainer_state", "log_extra", "log_metric"])
def test_a_column_that_the_runs_own_replaces_is_named_and_scores_are_as_without_it(name, tmp_path, caplog):
    """TRL ends in a TypeError for `prompts` and `completions`, and leaves `prompt`, `completion` and `completion_ids` out."""
    row, args = {"prompt": "2 + 2 =", "answer": "4", "completion_ids": [1]}, GRPOConfig(str(tmp_path), use_cpu=True)
    refuse_no_data(Dataset.from_list([row]), None, args)
    assert "has a column" not in caplog.text
    refuse_no_data(Dataset.from_list([{**row, name: "x"}]), None, args)
    assert f"a column {name}, and rewards get what the run itself has by this name" in caplog.text
    columns = ({"answer": "4", name: "x"}, {"answer": "4"})
    replaced, plain = (
        score(right, groups=[group(["4", "5"], columns=each)])[0][0].rewards.tolist() for each in columns
    )
    assert replaced == plain


# -- what a function receives --------------------------------------------------------------------------------------------


def test_one_call_gets_the_whole_batch_in_aligned_lists_with_prompts_repeated():
    seen = []

    def spy(prompts, completions, completion_ids, **kwargs):
        seen.append({"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **kwargs})
        return [0.0] * len(prompts)

    groups = [
        group(["a", "b"], question="one", columns={"answer": "1", "prompt": "kept out", "completion_ids": "kept out"}),
        group(["c", "d"], question="two", columns={"answer": "2"}),
    ]
    state = object()
    score(spy, groups=groups, trainer_state=lambda: state)
    (call,) = seen
    assert call["prompts"] == ["one", "one", "two", "two"]
    assert call["completions"] == ["a", "b", "c", "d"]
    assert call["completion_ids"] == [[97], [98], [99], [100]]
    assert call["answer"] == ["1", "1", "2", "2"]
    assert call["trainer_state"] is state
    assert set(call) == {
        "prompts", "completions", "completion_ids", "answer", "trainer_state", "log_extra", "log_metric",
    }  # fmt: skip


def test_a_conversational_prompt_comes_as_messages_and_its_completion_as_one_assistant_message():
    seen = []

    def spy(prompts, completions):
        seen.extend([prompts, completions])
        return [0.0] * len(prompts)

    score(spy, groups=[group(["4"], question=CHAT)])
    assert seen == [[CHAT], [[{"role": "assistant", "content": "4"}]]]


def test_a_column_that_only_some_rows_have_is_none_for_the_others():
    seen = []

    def spy(completions, hint):
        seen.extend(hint)
        return [0.0] * len(completions)

    score(spy, groups=[group(["a"]), group(["b"], columns={"hint": "h"})])
    assert seen == [None, "h"]


@pytest.mark.parametrize(
    "reward",
    [
        lambda completions: [len(c) for c in completions],
        lambda prompts, completions: [len(c) for c in completions],
        lambda completion_ids, *, answer: [len(c) for c in completion_ids],
        lambda completions, threshold=3, **kwargs: [len(c) for c in completions],
    ],
)
def test_a_function_receives_only_what_its_signature_names(reward):
    scored, _ = score(reward, groups=[group(["a", "bb"], columns={"answer": "4"})])
    assert column(scored) == [1.0, 2.0]


def test_async_partial_callable_object_generator_and_coroutine_lambda_all_work():
    async def slow(completions, **kwargs):
        await asyncio.sleep(0)
        return [1.0 for _ in completions]

    class Longer:
        def __init__(self, scale):
            self.scale = scale

        async def __call__(self, completions, **kwargs):
            return [self.scale * len(c) for c in completions]

    def weighed(completions, by):
        yield from (by for _ in completions)

    scored, _ = score(slow, Longer(2.0), functools.partial(weighed, by=0.5), lambda completions: slow(completions))
    assert scored[0].rewards.tolist() == [[1.0, 2.0, 0.5, 1.0]] * 2


def test_async_functions_run_side_by_side_and_beside_the_others():
    begun, until = set(), time.monotonic() + 60  # each returns once all three have begun

    def waits(name):
        begun.add(name)
        return len(begun) < 3 and time.monotonic() < until

    def sleeper(name):
        async def sleep(completions):
            while waits(name):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            return [float(len(begun)) for _ in completions]

        return RewardSpec(name=name, call=sleep)

    def busy(completions):
        while waits("busy"):
            time.sleep(0.01)
        time.sleep(0.2)
        return [float(len(begun)) for _ in completions]

    scored, metrics = score(sleeper("a"), sleeper("b"), busy)
    assert time.monotonic() < until
    assert (scored[0].rewards == 3).all()
    assert 0.2 <= metrics["rewards/a/seconds"].value < 60
    assert 0.2 <= metrics["rewards/busy/seconds"].value < 60


def test_a_session_made_in_one_call_is_alive_in_the_next():
    loops = []

    async def remember(completions):
        loops.append(asyncio.get_running_loop())
        return [0.0 for _ in completions]

    scorer = Scorer([remember])
    scorer.score([group(["a"])])
    scorer.score([group(["a"])])
    scorer.close()
    assert loops[0] is loops[1]
    assert loops[0].is_closed()


# -- what it may return --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        [1, 0.5],
        (True, Decimal("0.5")),
        [np.float32(1), np.float64(0.5)],
        [torch.tensor(1), torch.tensor([0.5])],
        np.array([1.0, 0.5]),
        torch.tensor([1.0, 0.5], requires_grad=True),
        torch.tensor([1.0, 0.5], dtype=torch.bfloat16),
        {1: 1.0, 2: 0.5}.values(),
    ],
    ids=repr,
)
def test_any_real_number_is_a_score(values):
    assert column(score(lambda completions: values)[0]) == [1.0, 0.5]


def test_a_scalar_tensor_is_the_score_of_a_single_completion():
    assert column(score(lambda completions: torch.tensor(2.0), groups=[group(["a"])])[0]) == [2.0]


def test_none_and_nan_abstain_without_an_event():
    scored, metrics = score(lambda completions: [None, math.nan])
    assert scored[0].rewards.isnan().all()
    assert scored[0].events == ()
    assert "rewards/<lambda>/errors" not in metrics


@pytest.mark.parametrize(
    "returned, said",
    [
        ([1.0], "returned 1 value for 2 completions"),
        ([1.0, 2.0, 3.0], "returned 3 values for 2 completions"),
        (None, "returned None"),
        (1.0, "returned a float"),
        ("ab", "returned a str"),
        ({"a": 1.0, "b": 2.0}, "returned a dict"),
        (torch.zeros(2, 1), r"returned an array of shape \(2, 1\)"),
        (["high", "low"], r"reward 'wrong': the score of completion 0 is a str \('high'\), not a number"),
        ([1.0, [2.0]], "the score of completion 1 is a list"),
        ([1.0, 1j], "the score of completion 1 is a complex"),
    ],
)
def test_a_wrong_return_stops_the_first_batch_with_a_sentence(returned, said):
    def wrong(completions):
        return returned

    with pytest.raises(RewardError, match=said) as error:
        score(wrong)
    assert error.value.exit_code == 3


@pytest.mark.parametrize("infinite", [math.inf, -math.inf, 1e308, 10**400, np.float64("inf")])
def test_a_score_that_is_no_finite_float32_is_an_error_of_its_completion_alone(infinite):
    scored, metrics = score(lambda completions: [1.0, infinite])
    assert scored[0].rewards[0, 0] == 1.0
    assert scored[0].rewards[1, 0].isnan()
    assert "not a finite float32" in scored[0].events[0].said
    assert metrics["rewards/<lambda>/errors"] == Sum(1)


# -- what failing ones cannot do -----------------------------------------------------------------------------------------


def picky(completions, **kwargs):
    if any("x" in c for c in completions):
        raise ValueError("no number in it")
    return [1.0 for _ in completions]


def test_only_the_completions_that_make_a_function_raise_are_not_scored():
    groups = [group(["a", "x1"], question="first"), group(["b", "c"]), group(["d", "e", "x2"], question="last")]
    scored, metrics = score(picky, groups=groups)
    assert [math.isnan(value) for value in column(scored)] == [False, True, False, False, False, False, True]
    assert [len(g.events) for g in scored] == [1, 0, 1]
    event = scored[0].events[0]
    assert event.kind == "reward_error"
    assert event.said == "Reward 'picky' did not score a completion: ValueError: no number in it."
    assert event.details["completion"] == "x1"
    assert event.details["prompt"] == "first"
    assert 'raise ValueError("no number in it")' in event.details["traceback"]
    assert metrics["rewards/picky/errors"] == Sum(2)


def test_without_isolation_a_function_is_called_once_and_the_batch_is_lost():
    calls = []

    def once(completions):
        calls.append(len(completions))
        return picky(completions)

    scored, _ = score(once, isolate=False, groups=[group(["a", "x", "b", "c"])])
    assert calls == [4]
    assert scored[0].rewards.isnan().all()
    assert scored[0].events[0].details["completions"] == 4


def test_one_reward_that_fails_leaves_the_others_scores_alone():
    def broken(completions):
        raise KeyError("gone")

    scored, _ = score(right, broken, groups=[group(["4", "5"], columns={"answer": "4"})])
    assert column(scored, 0) == [1.0, 0.0]
    assert all(math.isnan(value) for value in column(scored, 1))


def test_a_completion_that_lost_its_judge_is_not_compared_by_what_is_left_of_its_sum():
    def judge(completions):
        if "lost" in completions:
            raise ConnectionError("judge is down")
        return [1.0] * len(completions)

    def style(completions):
        return [1.0] * len(completions)

    scorer = Scorer([judge, style])
    texts = [["a", "lost", "b"], ["lost", "lost"], ["c", "d"]]
    scored = scorer.score([group(answers, uid=f"0:{i}") for i, answers in enumerate(texts)])
    assert not any(has_signal(each, scorer.weights) for each in scored)
    assert [each.measured is not None for each in scored] == [True, True, False]
    assert [mean_score(each, scorer.weights) for each in scored] == [1.0, 1.0, 1.0]
    (logged,) = Scorer([judge, style], weights=[0.0, 1.0]).score([group(["a", "lost"])])
    assert column([logged], 1) == [1.0, 1.0]
    assert logged.measured is None


def test_full_marks_are_those_of_the_rewards_that_apply():
    mixed = group(["a", "b"], rewards=[[1.0, math.nan], [math.nan, 0.5]])  # such as math, and code
    assert mean_score(mixed, [1.0, 2.0]) == 0.75
    assert mean_score(mixed, [1.0, -2.0]) == 1.0
    assert mean_score(group(["a"], rewards=[[math.nan, math.nan]]), [1.0, 2.0]) == 0.0


def test_lone_completions_and_languages_of_a_question_that_lost_a_reward_are_not_compared_with_others():
    def judge(completions):
        if "lost" in completions:
            raise ConnectionError("judge is down")
        return [1.0] * len(completions)

    def style(completions):
        return [1.0] * len(completions)

    def column_of(*texts: tuple[str, list[str]]) -> list[list[float]]:
        scored = Scorer([judge, style]).score([group(answers, uid=uid) for uid, answers in texts])
        return [column([each], 1) for each in scored]

    nan = pytest.approx(math.nan, nan_ok=True)
    assert column_of(("0:0", ["a"]), ("0:1", ["lost"])) == [[1.0], [nan]]
    assert column_of(("0:0", ["lost"]), ("0:1", ["lost"])) == [[1.0], [1.0]]
    assert column_of(("0:0/en", ["a", "b"]), ("0:0/de", ["lost", "lost"])) == [[1.0, 1.0], [nan, nan]]


def test_a_completion_whose_sampler_failed_is_not_scored():
    lost = replace(completion(""), finish="error")
    (scored,) = Scorer([lambda completions: [0.0] * len(completions)]).score(
        [replace(group(["a"]), completions=(lost,))]
    )
    assert scored.rewards.isnan().all()
    assert scored.measured is not None


def test_a_function_that_exits_the_process_is_an_error_and_ctrl_c_is_not():
    def leaves(completions):
        raise SystemExit(1)

    scored, _ = score(leaves)
    assert scored[0].rewards.isnan().all()

    def interrupted(completions):
        signal.raise_signal(signal.SIGINT)
        return [0.0 for _ in completions]

    with pytest.raises(KeyboardInterrupt):
        score(interrupted)


def test_a_batch_of_nothing_but_infinities_is_told_in_a_few_events():
    scored, metrics = score(lambda completions: [math.inf] * len(completions), groups=[group(["a"] * 40)])
    assert len(scored[0].events) == 6
    assert scored[0].events[-1].said == "Reward '<lambda>' failed on 35 more completions of this batch."
    assert scored[0].events[-1].details == {"reward": "<lambda>", "completions": 35, "error": "ValueError"}
    assert metrics["rewards/<lambda>/errors"] == Sum(40)


def test_the_run_stops_after_the_limit_of_failures_in_a_row_and_success_resets_the_count():
    answers = iter([1.0, "fail", "fail", 1.0, "fail", "fail", "fail"])

    def flaky(completions):
        answer = next(answers)
        if answer == "fail":
            raise ConnectionError("judge is down")
        return [answer for _ in completions]

    scorer = Scorer([flaky], error_limit=3, isolate=False)
    for _ in range(6):
        scorer.score([group(["a"])])
    with pytest.raises(RewardError, match=r"failed 3 calls in a row, the last with ConnectionError: judge is down"):
        scorer.score([group(["a"])])


def test_the_count_of_failures_survives_a_checkpoint():
    def broken(completions):
        raise ValueError("no")

    before, after = Scorer([broken], error_limit=2), Scorer([broken], error_limit=2)
    before.score([group(["a"])])
    after.load_state_dict(before.state_dict())
    with pytest.raises(RewardError, match="failed 2 calls in a row"):
        after.score([group(["a"])])


def test_strict_mode_raises_at_the_first_error_with_its_cause():
    with pytest.raises(RewardError, match="ValueError: no number in it") as error:
        score(picky, groups=[group(["a", "x"])], on_error="raise")
    assert isinstance(error.value.__cause__, ValueError)


def test_a_wrong_length_after_a_good_batch_is_an_event():
    lengths = iter([1, 2])

    def drifts(completions):
        return [1.0] * next(lengths)

    scorer = Scorer([drifts], isolate=False)
    assert column(scorer.score([group(["a"])])) == [1.0]
    (scored,) = scorer.score([group(["a"])])
    assert scored.rewards.isnan().all()
    assert "returned 2 values for 1 completions" in scored.events[0].said


# -- time limits ---------------------------------------------------------------------------------------------------------


def hang_in_a_loop(completions):
    while True:
        pass


def hang_in_sleep(completions):
    time.sleep(30)


def hang_in_a_lock(completions):
    threading.Event().wait()


def hang_in_a_regular_expression(completions):
    re.match(r"(a+)+$", "a" * 60 + "b")


def hang_and_swallow_exceptions(completions):
    while True:
        try:
            time.sleep(30)
        except Exception:  # noqa: BLE001 - what real reward functions do
            continue


async def hang_in_a_coroutine(completions):
    await asyncio.sleep(30)


@pytest.mark.parametrize(
    "hang",
    [
        hang_in_a_loop,
        hang_in_sleep,
        hang_in_a_lock,
        hang_in_a_regular_expression,
        hang_and_swallow_exceptions,
        hang_in_a_coroutine,
    ],
)
def test_a_function_that_hangs_is_not_scored_and_the_others_are(hang):
    started = time.perf_counter()
    scored, metrics = score(hang, right, timeout_seconds=0.2)
    assert time.perf_counter() - started < 15
    assert all(math.isnan(value) for value in column(scored, 0))
    assert column(scored, 1) == [1.0, 0.0]
    (event,) = scored[0].events
    assert event.kind == "reward_timeout"
    assert "within 0.2 seconds" in event.said
    assert hang.__name__ in event.details["traceback"]
    assert metrics[f"rewards/{hang.__name__}/errors"] == Sum(2)


def test_a_hang_off_the_main_thread_is_abandoned():
    release, results = threading.Event(), []

    def hang(completions):
        release.wait()
        return [0.0 for _ in completions]

    worker = threading.Thread(target=lambda: results.extend(score(hang, right, timeout_seconds=0.2)[0]))
    worker.start()
    worker.join(timeout=60)
    release.set()
    assert column(results, 1) == [1.0, 0.0]
    assert results[0].events[0].kind == "reward_timeout"


def test_a_limit_of_its_own_replaces_the_scorers():
    def slow(completions):
        time.sleep(0.3)
        return [1.0 for _ in completions]

    patient = RewardSpec(name="patient", call=slow, timeout_seconds=math.inf)
    assert column(score(patient, timeout_seconds=0.1)[0]) == [1.0, 1.0]


def test_a_function_may_use_the_alarm_signal_itself():
    def own_limit(completions):
        previous = signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, previous)
        return [1.0 for _ in completions]

    assert column(score(own_limit, timeout_seconds=5)[0]) == [1.0, 1.0]


# -- what it logs --------------------------------------------------------------------------------------------------------


def test_logged_columns_land_beside_their_completions_and_metrics_are_averaged():
    def talks(completions, log_extra, log_metric):
        log_extra("length", [len(c) for c in completions])
        log_metric("longest", max(len(c) for c in completions))
        return [0.0 for _ in completions]

    scorer = Scorer([talks])
    scored = scorer.score([group(["a", "bb"]), group(["ccc"])])
    assert [g.extras["length"] for g in scored] == [[1, 2], [3]]
    scorer.score([group(["a"])])
    metrics = scorer.take_metrics()
    assert metrics["longest"] == Mean(4.0, 2)
    assert metrics["rewards/talks/seconds"].count == 2
    assert scorer.take_metrics() == {}


def test_what_a_failed_part_logged_is_left_out_and_its_rows_are_none():
    def talks(completions, log_extra):
        log_extra("length", [len(c) for c in completions])
        return picky(completions)

    scored, _ = score(talks, groups=[group(["a", "x", "b"])])
    assert scored[0].extras["length"] == [1, None, 1]


def test_a_logged_column_of_the_wrong_length_is_told_on_the_first_batch():
    def talks(completions, log_extra):
        log_extra("length", [1])
        return [0.0 for _ in completions]

    with pytest.raises(RewardError, match=r"log_extra\('length', ...\) got 1 value for 2 completions"):
        score(talks)


# -- what is refused before any work ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("thing, kind", [(3, "an int"), ("math", "a str"), ([right], "a list")])
def test_something_that_is_not_callable_is_refused(thing, kind):
    with pytest.raises(RewardError, match=f"is not callable: it is {kind}; give a function"):
        Scorer([RewardSpec(name="thing", call=thing)])


class Weighing:
    def __call__(self, completions):
        return [1.0 for _ in completions]


def test_a_class_is_refused_with_the_instance_to_give():
    with pytest.raises(RewardError, match=r"is the class Weighing, .*give an instance, Weighing\(\)"):
        Scorer([Weighing])
    with pytest.raises(RewardError, match="is the class Weighing"):
        Scorer([functools.partial(Weighing)])


def test_a_parameter_that_the_data_does_not_have_is_named_with_its_nearest_column():
    scorer = Scorer([right])
    scorer.check(["question", "answer"])
    with pytest.raises(
        DataError, match=r"reward 'right' needs a column answer, but the data set has anwser\. Did you mean anwser\?"
    ):
        scorer.check(["prompt", "anwser"])
    with pytest.raises(DataError, match=r"needs a column solution, but the data set has gold\. Rename"):
        check([lambda completions, solution: [0.0]], ["prompt", "gold"])
    with pytest.raises(DataError, match=r"needs a column completion_id, .* Did you mean completion_ids\?"):
        check([lambda completions, completion_id: [0.0]], ["prompt", "gold"])
    with pytest.raises(DataError, match="no other columns"):
        check([right], ["prompt"])
    with pytest.raises(DataError, match="needs a column answer"):  # columns unknown until the first row
        scorer.score([group(["4"])])


def test_weights_must_be_one_for_each_reward():
    with pytest.raises(ConfigError, match="reward_weights has 1 values for 2 rewards"):
        Scorer([right, picky], [1.0])
    with pytest.raises(RewardError, match="there is no reward"):
        Scorer([])


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="on_reward_error is 'ignore'; use 'record' or 'raise'"):
        Scorer([right], on_error="ignore")
    with pytest.raises(ConfigError, match="reward_error_limit is 0"):
        Scorer([right], error_limit=0)


def test_completions_that_nobody_scores_are_told_once(caplog):
    scorer = Scorer([lambda completions: [None, 1.0]])
    scorer.score([group(["a", "b"])])
    scorer.score([group(["a", "b"])])
    assert caplog.text.count("1 of 2 completions got no score from any reward") == 1


def test_an_event_loop_that_nobody_closes_is_closed_with_its_scorer():
    loops = []

    async def remember(completions):
        loops.append(asyncio.get_running_loop())
        return [0.0 for _ in completions]

    Scorer([remember]).score([group(["a"])])
    gc.collect()
    deadline = time.monotonic() + 5
    while not loops[0].is_closed() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loops[0].is_closed()


def test_names_of_rewards_differ_and_weights_are_kept():
    scorer = Scorer([right, right, lambda completions: []], [1.0, 2.0, 0.5])
    assert scorer.names == ["right", "right_2", "<lambda>"]
    assert scorer.weights.tolist() == [1.0, 2.0, 0.5]


def test_no_groups_are_no_call():
    assert score(picky, groups=[])[0] == []
    (empty,), _ = score(picky, groups=[Group(prompt=prompt(), completions=())])
    assert empty.rewards.shape == (0, 1)


def test_groups_may_come_one_by_one_and_keep_what_they_carry():
    first = Group(prompt=prompt(), completions=(completion("4", version=7),), extras={"note": ["n"]})
    (scored,), _ = score(lambda completions: [1.0], groups=iter([first]))
    assert scored.completions[0].version == 7
    assert scored.extras == {"note": ["n"]}
