"""A value of another type, or out of its range, is refused by its name in every built-in reward: never another exception."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from covey.errors import ModelError
from covey.rewards import BUILTIN
from numbers_of import VALUES, refusal_of, takes_number

NEEDED: dict[str, Any] = {
    "max_completion_len": 20, "soft_punish_cache": 5, "max_len": 20, "url": "http://h/v1", "model": "m", "pattern": "a", "label": 1,
}  # fmt: skip
CASES = [
    (name, parameter)
    for name, make in BUILTIN.items()
    if isinstance(make, type)
    for parameter, item in inspect.signature(make).parameters.items()
    if takes_number(item)
]


def test_every_reward_with_numbers_is_tried():
    assert {"length", "repetition", "numeric", "rouge", "bleu", "code", "cosine", "judge"} <= {
        name for name, _ in CASES
    }


@pytest.mark.parametrize(("name", "parameter"), CASES, ids=str)
def test_any_value_of_a_number_is_taken_or_refused_by_name(name, parameter):
    make = BUILTIN[name]
    signature = inspect.signature(make).parameters
    values = {
        key: NEEDED[key] for key in signature if key in NEEDED and signature[key].default is inspect.Parameter.empty
    }
    for value in VALUES:
        said = ""
        try:
            said = refusal_of(make, values | {parameter: value})
        except ModelError as error:  # a value that is taken, and the model is not there
            assert "'m'" in str(error)  # noqa: PT017
        assert not said or re.search(rf"\b{parameter}\b", said), said
