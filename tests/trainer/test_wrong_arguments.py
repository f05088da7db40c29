"""A number, a list or None where a public name wants something else: one sentence that names it, before work is spent."""

import json
import re

import numpy as np
import pytest

import covey
import covey.serving
import covey.testing
from covey import algorithms as alg
from covey.config import batch_arithmetic
from covey.config.scripts import DatasetMixtureConfig, get_dataset, get_peft_config, get_quantization_config
from covey.data.stream import PromptStream
from covey.environments import openenv_environment
from covey.rewards import (
    JudgeReward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
)
from covey.rewards.builtin.chat_endpoint import Endpoint
from covey.sandbox import Sandbox
from covey.serving import read_traces

WRONG = (3, -1.5, None, [3], {"x": 3}, object())
URL = "http://localhost:1/v1"
CALLS = {
    "GRPOTrainer": (lambda value: covey.GRPOTrainer(value, "length"), "model is of type"),
    "Member": (covey.Member, "model is of type"),
    "NativeSampler": (lambda value: covey.NativeSampler(value, None), "is no loaded model"),
    "SFTTrainer": (lambda value: covey.SFTTrainer("demo", value), "takes a configuration of covey.sft_config"),
    "Run": (covey.Run, "is no path"),
    "load": (covey.data.load, "names no data set"),
    "mix": (covey.data.mix, "A mixture is a mapping|no data set|fit"),
    "plot": (covey.plot, "is no path"),
    "read_traces": (read_traces, "is no path"),
    "train_together": (lambda value: covey.train_together("demo", value), "must be a list of mappings|no args"),
    "JudgeReward": (lambda value: JudgeReward(value, "m"), "url=.* must be a text"),
    "openenv_environment": (openenv_environment, "is no URL"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_value_of_another_type_is_named_in_one_sentence(name):
    call, sentence = CALLS[name]
    for value in WRONG:
        if (name, value) in (("SFTTrainer", None), ("mix", {"x": 3}), ("load", {"x": 3}), ("plot", {"x": 3})):
            continue  # the default, and lists of names
        with pytest.raises(covey.CoveyError, match=sentence) as raised:
            call(value)
        assert "\n" not in str(raised.value)


DOORS = {
    "batch_arithmetic": batch_arithmetic,
    "batch_arithmetic's world_size": lambda value: batch_arithmetic(covey.GRPOConfig("x"), value or -3, 5),
    "get_dataset": get_dataset,
    "get_peft_config": get_peft_config,
    "get_quantization_config": get_quantization_config,
    "datasets": lambda value: DatasetMixtureConfig(datasets=value),
    "Sandbox": lambda value: Sandbox(workers=value or -3),
    "Endpoint": covey.serving.Endpoint,
    "PromptStream": lambda value: PromptStream(value or 3, None),
    "CosineScaled": get_cosine_scaled_reward,
    "Repetition": lambda value: get_repetition_penalty_reward(value or 0, 1),
    "SoftOverlong": lambda value: get_soft_overlong_punishment(value, value),
    "check_controller": covey.testing.check_controller,
    "check_reference": covey.testing.check_reference,
}


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize("value", [-1.5, None])
def test_a_door_names_itself_and_a_value_of_another_type(name, value):
    with pytest.raises(covey.CoveyError, match=name.partition("'")[0]) as raised:
        DOORS[name](value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [-1, 0, float("nan"), float("inf"), "9", None, True])
def test_a_time_limit_that_is_no_number_above_0_is_refused_where_it_is_written(value):
    calls = (
        lambda: covey.Member(URL, served_model_name="m", request_seconds=value),
        lambda: alg.distill(URL, served_model_name="m", request_seconds=value),
        lambda: JudgeReward(URL, "m", request_seconds=value),
    )
    for call in calls:
        with pytest.raises(
            covey.CoveyError, match=rf"request_seconds={value!r} must be (above 0|finite|a number \(above 0\))\."
        ):
            call()


@pytest.mark.parametrize(
    "option, value, told",
    [
        ("retries", -1, "retries=-1 must be at least 0."),
        ("retries", 1.5, "retries=1.5 must be a whole number (at least 0)."),
        ("max_tokens", 0.5, "max_tokens=0.5 must be a whole number (at least 1)."),
        ("backoff_seconds", "1", "backoff_seconds='1' must be a number (at least 0)."),
    ],
)
def test_an_option_of_a_judge_that_cannot_be_counted_with_is_refused_where_it_is_written(option, value, told):
    with pytest.raises(covey.CoveyError, match=re.escape(f"judge: {told}")):
        JudgeReward(URL, "m", **{option: value})
    assert JudgeReward(URL, "m", retries=0, backoff_seconds=0)


@pytest.mark.parametrize("kind", [np.int64, np.float32])
def test_numbers_of_numpy_are_taken_as_limits(kind):
    assert covey.Member(URL, served_model_name="m", request_seconds=kind(3)).request_seconds == 3
    asked = Endpoint(url=URL, model="m", request_seconds=kind(3), max_tokens=np.int64(5)).body([])
    assert json.loads(json.dumps(asked))["max_tokens"] == 5
