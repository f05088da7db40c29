"""The time of every built-in reward grows with the length of a completion, not with its square, whatever a model writes."""

from __future__ import annotations

import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.rewards import BUILTIN, resolve
from covey.rewards.builtin.code import program_of
from covey.rewards.builtin.gym import answer_of
from covey.rewards.builtin.judge_rewards import ReplyError, read_object
from example_counts import examples
from kit import rest_nightly, tiny_tokenizer

LENGTH = 100_000
QUICK_SECONDS = 0.2
"""Processor time below which a reward is quick enough, however it grows."""
MOST_GROWTH = 40.0
"""Of the time for ten times the length; a square is 100."""
MARKS = ["#", "####", "####1,", "\\boxed{", "\\boxed{5}", "\\boxed ", "}", "{", "<answer>", "</answer>", "<think>", "</think>", "```", "```json\n",
         "```python\n", "\n```\n", "answer is ", "answer", "答案是", "$", "$$", "\\(", "\\)", "\\text{", "\\frac{1}{", "`", "http://", "1", "1,", "1 ", "1,000",
         ".", "-", "/", "^", "e5", "A", " or ", " ", "\t", "\n", "  ", '"', "'", "\\", "[", "]", '{"a":', "(", ")", ", ", "_", "x", "x ", "中", "é"]  # fmt: skip

READING = {
    "math": {"answer": "7"}, "exact": {"answer": "7"}, "accuracy_reward": {"solution": "$7$"}, "format": {}, "think_format": {},
    "think_format_reward": {}, "length": {}, "soft_overlong(max_completion_len=8, soft_punish_cache=4)": {}, "repetition": {},
    "pattern(pattern='<a>.*</a>')": {}, "tags": {}, "tags(partial=True)": {}, "json_schema(schema={'type': 'object'})": {},
    "choice": {"answer": "B"}, "numeric": {"answer": "7"}, "f1": {"answer": "7 cats"}, "fuzzy": {"answer": "7 cats"},
    "rouge": {"answer": "7 cats"}, "bleu": {"answer": "7 cats"}, "distinct": {}, "self_bleu": {}, "language(language='en')": {}, "gym": {},
    "cosine(max_len=100)": {"answer": "7"}, "code": {}, "reasoning_accuracy_reward": {"solution": "$7$"},
}  # fmt: skip
"""Every reward that reads text itself, with the columns that it needs."""
OUTSIDE = {"code": program_of, "gym": answer_of}
"""Rewards whose verdict is made in another process, by what they read out of a text."""
MODELS = {"reward_model", "process", "classifier", "similarity", "fluency"}
"""A model reads the text, cut to its context."""
JUDGES = {"judge", "judge_pairs"}
"""A judge reads the text; its reply is read here, by `read_object`."""


def test_every_built_in_reward_is_measured_here():
    assert {name.partition("(")[0] for name in READING} | MODELS | JUDGES == set(BUILTIN)


def seconds_of(call):
    """Processor time of a call, at best of two; a call that takes more than 20 seconds is ended by an error."""

    def end(*_):
        raise AssertionError("more than 20 seconds of processor time")

    before = signal.signal(signal.SIGVTALRM, end)
    try:
        best = float("inf")
        for _ in range(2):
            signal.setitimer(signal.ITIMER_VIRTUAL, 20)
            start = time.process_time()
            call()
            best = min(best, time.process_time() - start)
            if best < QUICK_SECONDS:
                break
        return best
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def repeated(unit, length, end=""):
    return (unit * (length // len(unit) + 1))[: length - len(end)] + end


def expect_linear(call, unit, end):
    seconds = seconds_of(lambda: call(repeated(unit, LENGTH, end)))
    if seconds >= QUICK_SECONDS:
        tenth = seconds_of(lambda: call(repeated(unit, LENGTH // 10, end)))
        assert seconds < MOST_GROWTH * max(tenth, 0.001), (
            f"{unit!r}: {tenth:.3f} s, and ten times the text {seconds:.3f} s"
        )


MARKS_OF = {"bleu": [pytest.mark.nightly], "accuracy_reward": [pytest.mark.slow]}
UNITS = st.lists(st.sampled_from(MARKS), min_size=1, max_size=3).map("".join)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS_OF.get(name, [])) for name in READING],
)
@examples(6)
@given(unit=UNITS, end=st.sampled_from(["", "x", "}", "\n", " 7"]))
def test_the_time_of_a_reward_is_linear(name, unit, end):
    if "accuracy_reward" in name:
        pytest.importorskip("math_verify")
    if name in OUTSIDE:
        expect_linear(OUTSIDE[name], unit, end)
        return
    reward = resolve(name, tokenizer=tiny_tokenizer()).call
    columns = {key: [value] for key, value in READING[name].items()}
    ids = [[1, 2, 3]]
    expect_linear(lambda text: reward(completions=[text], completion_ids=ids, **columns), unit, end)


@pytest.mark.parametrize("name", rest_nightly(["choice", "exact", "math", "code", "gym", "numeric", "json_schema(schema={'type': 'object'})", "language(language='en')"], 2))  # fmt: skip
def test_the_time_for_each_mark_alone_is_linear(name):
    for unit in MARKS:
        test_the_time_of_a_reward_is_linear.hypothesis.inner_test(name, unit, "x")


@examples(25)
@given(unit=UNITS)
def test_the_reply_of_a_judge_is_read_in_linear_time(unit):
    def read(text):
        with pytest.raises(ReplyError):
            read_object(text, "score")

    expect_linear(read, unit, "x")
