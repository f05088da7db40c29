"""Algorithms by name: a preset, one's own by import path, and parts of either, from the command line or YAML."""

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from covey.algorithms import (
    advantages,
    aggregation,
    baselines,
    covariance,
    distillation,
    examples,
    future_kl,
    importance,
    labels,
    objectives,
    pass_at_k,
    reference,
    regularizers,
    roles,
    surrogates,
    target_policy,
    teacher_signals,
    teachers,
    token_advantages,
    turn_advantages,
)
from covey.algorithms.algorithm import Algorithm
from covey.algorithms.critic import Critic
from covey.algorithms.kl import ESTIMATORS, KL
from covey.algorithms.making import Common
from covey.algorithms.presets import PRESETS
from covey.errors import ConfigError, did_you_mean
from covey.names import find

_SLOTS = {"regularizer": "regularizers", "weight": "weights"}
_CALL = re.compile(r"(?P<name>[^()]+)\((?P<arguments>.*)\)", re.DOTALL)
_HOMES = {
    "advantage": (advantages, baselines, token_advantages, turn_advantages, pass_at_k, roles),
    "objective": (objectives, surrogates, covariance, target_policy, labels, distillation, teacher_signals),
    "aggregate": (aggregation,),
    "regularizer": (regularizers, distillation, examples, teacher_signals),
    "weight": (regularizers, importance, future_kl),
    "reference": (reference,),
    "teacher": (teachers,),
}
_TEXTS = ("teacher",)
"""Slots that are options of some presets too, where a bare text is meant."""


def from_name(name: str) -> Algorithm:
    """The algorithm that a string names, with changes behind commas.

    `"dapo"` is a preset, `"my_project.ideas:mine"` or `"ideas.py:mine"` one's own (an Algorithm, or a function that makes one).
    `"dapo, high=0.3"` gives a preset's option; `"grpo, advantage=ideas.py:from_median"` changes a part: advantage, objective,
    aggregate, kl (an estimator), regularizer, weight, reference, teacher or critic (an error of each token), by a built-in's name or an
    import path, with its parameters as in `"advantage=PKPO(k=2)"` or `"regularizer=distill(teacher='big')"`. Raises ConfigError with the nearest name.
    """
    base, *changes = _pieces(name)
    if (words := re.match(r"(\w+)[ (]", base)) and words[1] in PRESETS:
        raise ConfigError(f"{base!r}: write the options of {words[1]} behind commas, as in 'dapo, high=0.3'.")
    built = find(base, PRESETS, "algorithm")
    options, parts = _sorted(changes, built)
    if callable(built) and not isinstance(built, Algorithm):
        built = _called(base, built, options)
    if not isinstance(built, Algorithm):
        raise ConfigError(f"{base!r} is {type(built).__name__}, not an Algorithm nor a function that returns one.")
    for slot, value in parts:
        built = _changed(built, slot, value)
    return built


def _called(name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Result of the user's own factory. A builtin is refused uncalled: `os:abort` would end the process."""
    if not (
        inspect.isfunction(make) or inspect.isclass(make) or hasattr(make, "__wrapped__") or isinstance(make, partial)
    ):
        raise ConfigError(f"{name!r} is {type(make).__name__}, not an Algorithm nor a function that returns one.")
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(f"{name!r} makes no Algorithm of these options: {error}.") from error


def _sorted(changes: list[str], preset: Any) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Options of the preset, and parts to change, in order."""
    is_maker = callable(preset) and not isinstance(preset, Algorithm)
    preset_options = _parameters(preset) if is_maker else []
    slots = [*_HOMES, "kl", "critic"]
    taken = list(dict.fromkeys([*preset_options, *slots]))
    options: dict[str, Any] = {}
    parts: list[tuple[str, str]] = []
    for change in changes:
        key, is_pair, value = (piece.strip() for piece in change.partition("="))
        if not is_pair or key not in taken:
            hint = did_you_mean(key, taken) or f" It takes {', '.join(taken)}."
            raise ConfigError(f"{change!r} is no option=value of this algorithm.{hint}")
        if key in slots and not (key in preset_options and (key in _TEXTS or _is_literal(value))):
            parts.append((key, value))
        else:
            options[key] = _literal(value)
    return options, parts


def _parameters(make: Callable[..., Any]) -> list[str]:
    """Names that a preset or a part takes; `**common` stands for those of all presets, `**role` and `**options` for a teacher's."""
    rest = {
        "common": list(Common.__annotations__),
        "role": [item.name for item in fields(teachers.TeacherRole)],
        "options": [item.name for item in fields(distillation.Distill)],
    }
    names = []
    for item in inspect.signature(make).parameters.values():
        names += rest.get(item.name, []) if item.kind is item.VAR_KEYWORD else [item.name]
    return list(dict.fromkeys(names))


def _is_literal(value: str) -> bool:
    return not isinstance(_literal(value), str)


def _literal(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def _changed(algorithm: Algorithm, slot: str, value: str) -> Algorithm:
    match = _CALL.fullmatch(value)
    if "(" in value and not match:
        raise _no_values(value)
    part = find(match["name"] if match else value, ESTIMATORS if slot == "kl" else _built_in(slot), slot)
    if match:
        part = _made(part, match["arguments"], value)
    elif isinstance(part, type):
        part = _made(part, "", value)
    if slot == "kl":
        return algorithm.replace(kl=part if isinstance(part, KL) else _with_estimator(algorithm.kl, part))
    if slot == "critic":
        return algorithm.replace(critic=part if callable(getattr(part, "loss", None)) else Critic(part))
    if slot in _SLOTS:
        return algorithm.replace(**{_SLOTS[slot]: (*getattr(algorithm, _SLOTS[slot]), part)})
    return algorithm.replace(**{slot: part})


def _pieces(text: str) -> list[str]:
    """The text between commas that are in no parentheses and no quotes."""
    pieces, depth, quote = [""], 0, ""
    for letter in text:
        quote = "" if letter == quote else letter if not quote and letter in "'\"" else quote
        depth += 0 if quote else (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth and not quote:
            pieces.append("")
        else:
            pieces[-1] += letter
    return [piece.strip() for piece in pieces]


def _made(part: Any, text: str, whole: str) -> Any:
    """The part that a class or a function makes of parameters such as `k=2`."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}  # type: ignore[attr-defined]
        if call.args or "None" in keywords:  # type: ignore[attr-defined]
            raise ValueError("a value has no name")
    except (SyntaxError, ValueError, AttributeError) as error:
        raise _no_values(whole) from error
    try:
        inspect.signature(part).bind(**keywords)
        return part(**keywords)
    except TypeError as error:
        takes = _parameters(part)
        unknown = [f"it has no parameter {name}" for name in keywords if name not in takes]
        hints = "".join(did_you_mean(name, takes) for name in keywords if name not in takes)
        problem = ", ".join(unknown) or str(error)
        raise ConfigError(f"{whole!r}: {problem}; its parameters are {', '.join(takes)}.{hints}") from error


def _no_values(whole: str) -> ConfigError:
    return ConfigError(
        f"{whole!r}: write parameters as name=value with plain values and text in quotes, as in PKPO(k=2)."
    )


def _with_estimator(kl: KL | None, estimator: Any) -> KL:
    return KL(estimator) if kl is None else KL(estimator, kl.coefficient, kl.where, kl.unbiased, kl.level)


def _built_in(slot: str) -> Mapping[str, Callable[..., Any]]:
    """Public parts of the library by their own name."""
    public = importlib.import_module("covey.algorithms").__all__
    return {
        key: value
        for module in _HOMES.get(slot, ())
        for key, value in vars(module).items()
        if key in public and getattr(value, "__module__", "") == module.__name__
    }
