"""Reward functions, data sets and evaluation, as TRL 1.16 takes them."""

import functools
import time

import pytest
from contract import CHAT, ROWS, trainer
from datasets import Dataset

from covey.errors import DataError
from covey.rewards import Scorer
from covey.rewards.decorators import reward
from kit import group, rest_nightly


def rewards_of(tmp_path, function, **given):
    one = trainer(tmp_path, rewards=function, **given)
    one.train()
    return one.state.log_history[-1]


class Judge:
    def __call__(self, completions, **columns):
        return [1.0] * len(completions)


async def later(completions, **columns):
    return [1.0] * len(completions)


def bare(completions):
    return [1.0] * len(completions)


def named(prompts, completions, answer):
    assert len(prompts) == len(completions) == len(answer)
    return [1.0] * len(completions)


def scaled(completions, factor, **columns):
    return [factor] * len(completions)


FORMS = {
    "without **kwargs": (bare, "bare"),
    "by the names of columns": (named, "named"),
    "async": (later, "later"),
    "an object": (Judge(), "Judge"),
    "a partial": (functools.partial(scaled, factor=1.0), "scaled"),
    "a lambda": (lambda completions, **columns: [1.0] * len(completions), "<lambda>"),
}


@pytest.mark.parametrize("form", rest_nightly(FORMS, ("async",)))
def test_a_reward_may_be(form, tmp_path):
    function, name = FORMS[form]
    assert rewards_of(tmp_path, function)[f"rewards/{name}/mean"] == 1.0


def test_rewards_of_all_forms_may_stand_together(tmp_path):
    logged = rewards_of(tmp_path, [function for function, _ in FORMS.values()])
    assert {name: logged[f"rewards/{name}/mean"] for _, name in FORMS.values()} == dict.fromkeys(
        (name for _, name in FORMS.values()), 1.0
    )


def test_a_conversation_comes_as_messages(tmp_path):
    seen = []

    def look(prompts, completions, **columns):
        seen.append((prompts[0][0]["role"], completions[0][0]["role"]))
        return [0.0] * len(completions)

    rewards_of(tmp_path, look, rows=CHAT)
    assert seen == [("user", "assistant")]


def stream():
    return Dataset.from_list(ROWS).to_iterable_dataset()


def test_a_stream_trains_for_max_steps(tmp_path):
    assert trainer(tmp_path, rows=stream(), max_steps=2).train().global_step == 2


def test_a_stream_is_evaluated_whole_alone_and_in_a_dict(tmp_path):
    one = trainer(tmp_path, eval_dataset={"stream": stream(), "rows": Dataset.from_list(ROWS)})
    both = one.evaluate()
    assert both["eval_stream_reward"] == both["eval_rows_reward"]
    assert one.evaluate(stream())["eval_reward"] == both["eval_rows_reward"]


def test_a_stream_is_evaluated_while_training(tmp_path):
    one = trainer(tmp_path, rows=stream(), eval_dataset=stream(), eval_strategy="steps", eval_steps=1, max_steps=2)
    one.train()
    assert [entry["step"] for entry in one.state.log_history if "eval_reward" in entry] == [1, 2]


def test_an_endless_evaluation_is_refused(tmp_path, monkeypatch):
    from datasets import IterableDataset

    from covey.training import datasets

    def forever():
        while True:
            yield ROWS[0]

    monkeypatch.setattr(datasets, "_MOST_ROWS", 50)
    with pytest.raises(DataError, match=r"more than 50 rows, or without end; pass stream.take"):
        trainer(tmp_path, eval_dataset=IterableDataset.from_generator(forever)).evaluate()


def test_evaluate_takes_another_set_and_prefix(tmp_path):
    one = trainer(tmp_path)
    found = one.evaluate(Dataset.from_list(ROWS[:2]), metric_key_prefix="test")
    assert {"test_reward", "test_loss", "test_rewards/length/mean"} <= set(found)
    assert one.state.log_history[-1]["test_reward"] == found["test_reward"]
    with pytest.raises(ValueError, match="needs eval_dataset"):
        trainer(tmp_path / "b").evaluate()


def test_num_generations_eval_counts_in_evaluation(tmp_path):
    seen = []

    def count(completions, **columns):
        seen.append(len(completions))
        return [0.0] * len(completions)

    trainer(tmp_path, rewards=count, num_generations_eval=2).evaluate(Dataset.from_list(ROWS[:3]))
    assert sum(seen) == 6


# -- a reward that is late --------------------------------------------------------------------------------------------


def scores(function, texts, limit):
    scorer = Scorer([function], timeout_seconds=limit)
    started = time.monotonic()
    (scored,) = scorer.score([group(texts)])
    taken = time.monotonic() - started
    scorer.close()
    return scored.rewards[:, 0].isnan().tolist(), taken


def test_a_batch_that_takes_up_to_twice_the_limit_is_asked_in_halves_and_loses_nothing():
    def slow(completions, **columns):
        time.sleep(0.06 * len(completions))
        return [1.0] * len(completions)

    lost, _ = scores(slow, list("abcdefgh"), 0.3)
    assert lost == [False] * 8


@pytest.mark.parametrize("is_async", [False, True])
def test_one_completion_that_hangs_costs_itself_alone(is_async):
    import asyncio

    def hangs(completions, **columns):
        while "x" in completions:
            time.sleep(0.005)
        return [1.0] * len(completions)

    async def waits(completions, **columns):
        await asyncio.sleep(60 if "x" in completions else 0)
        return [1.0] * len(completions)

    lost, taken = scores(waits if is_async else hangs, list("abcxdefg"), 0.4)
    assert lost == [text == "x" for text in "abcxdefg"]
    assert taken < 20


def test_a_reward_that_always_hangs_is_given_up_and_not_asked_in_halves_the_next_time():
    calls = []

    @reward(timeout=0.1)
    def hangs(completions, **columns):
        calls.append(len(completions))
        while True:
            time.sleep(0.005)

    scorer = Scorer([hangs])
    for _ in range(2):
        (scored,) = scorer.score([group(list("abcd"))])
        assert scored.rewards.isnan().all()
        (event,) = scored.events
        assert event.kind == "reward_timeout"
    scorer.close()
    assert calls == [4, 2, 2, 4]
