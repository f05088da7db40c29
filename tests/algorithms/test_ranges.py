"""A value of another type, or out of its range, is refused by its name in every public part and preset: never another exception."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from covey import algorithms as alg
from numbers_of import VALUES, refusal_of, takes_number

NEEDED: dict[str, Any] = {
    "target": 0.1, "step": 1, "max_length": 100, "buffer": 10, "advantage": alg.GroupNormalized(), "column": "language",
    "teacher": "policy", "feedback": "best", "coefficient": 0.1, "dataset": [{"prompt": "a", "completion": "b"}],
}  # fmt: skip
"""Values of parameters without a default, and of a teacher's, whichever parameter is tried."""
NO_PARTS = ("Algorithm", "Controller", "Needs")
MAKERS = {
    name: getattr(alg, name)
    for name in alg.__all__
    if name in alg.PRESETS or (isinstance(getattr(alg, name), type) and name not in NO_PARTS)
} | {"sft": alg.sft, "entropy_bonus": alg.entropy_bonus}


def parameters_of(make: Any) -> dict[str, inspect.Parameter]:
    """Parameters by name; of a preset those of all presets too."""
    named = dict(inspect.signature(make).parameters)
    rest = [item.name for item in named.values() if item.kind is item.VAR_KEYWORD]
    if rest == ["common"]:
        named["kl"] = inspect.signature(alg.vespo).parameters["kl"]
    return {name: item for name, item in named.items() if item.kind is not item.VAR_KEYWORD}


CASES = [
    (name, parameter)
    for name, make in MAKERS.items()
    for parameter, item in parameters_of(make).items()
    if takes_number(item)
]


def test_every_part_and_preset_is_tried():
    assert len(CASES) > 180
    assert {"DRO", "Correction", "TeacherRole", "WarmUp", "tpo", "rloo", "sdpo"} <= {name for name, _ in CASES}


@pytest.mark.parametrize(("name", "parameter"), CASES, ids=str)
def test_any_value_of_a_number_is_taken_or_refused_by_name(name, parameter):
    make, values = MAKERS[name], {}
    for key, item in parameters_of(make).items():
        if key in NEEDED and (item.default is item.empty or name in ("Distill", "TeacherRole")):
            values[key] = NEEDED[key]
    make(**values)
    for value in VALUES:
        said = refusal_of(make, values | {parameter: value})
        assert not said or f"={value!r} must be" in said or f"={value!r} is " in said, said


@pytest.mark.parametrize("term", ["weight", "strength"])
def test_a_coefficient_that_warms_up_begins_at_0(term):
    """A weight of 0 is refused as a setting, and a warm-up reaches its own from there."""
    warm = alg.WarmUp(0.5, steps=2)
    algorithm = alg.rlsd(strength=warm) if term == "strength" else alg.sdar(weight=warm)
    controllers = algorithm.initial_controllers()
    assert list(controllers.values()) == [0.0]
    assert algorithm.resolve(controllers).controllers() == {}
