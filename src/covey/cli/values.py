"""The words that an option knows, for the Tab key: choices, presets, rewards. Read from source texts, so that nothing is imported."""

from __future__ import annotations

import ast
import functools
import typing
from collections.abc import Mapping
from pathlib import Path

import covey
from covey.cli.early import option_types
from covey.cli.fields import enum_values
from covey.cli.flags import Flag
from covey.config.options import DECLARED

_SOURCE = Path(str(covey.__file__)).parent
_DTYPES = ("auto", "float32", "bfloat16", "float16")


@functools.cache
def _words_by_flag() -> Mapping[str, tuple[str, ...]]:
    trackers = ("none", "tensorboard", "wandb", "trackio", "mlflow")
    return {
        **{name: option.words for name, option in DECLARED.items() if option.words},
        "lr_scheduler_type": enum_values("trainer_utils", "SchedulerType"),
        "optim": enum_values("training_args", "OptimizerNames"),
        "algorithm": names_in("algorithms/presets.py", "PRESETS"),
        "reward": (*names_in("rewards/builtin/registry.py", "BUILTIN"), "demo"),
        "report_to": trackers,
        "dtype": _DTYPES,
        "resume": ("auto", "never"),
        "model": ("demo",),
        "dataset": ("demo", "demo:test", "gym:", "verifiers:"),
        "eval_dataset": ("demo:test",),
        "pruner": ("median", "halving", "none"),
        "log_level": ("debug", "info", "warning", "error", "critical", "passive"),
        "reward_weights": (),
    }


def values_of(flag: Flag) -> tuple[str, ...]:
    """The words that may follow this flag; empty where anything may."""
    if flag.name in _words_by_flag():
        return _words_by_flag()[flag.name]
    kind = option_types().get(flag.name, flag.type)
    literals = [
        alternative
        for alternative in (kind, *typing.get_args(kind))
        if typing.get_origin(alternative) is typing.Literal
    ]
    words = tuple(str(value) for literal in literals for value in typing.get_args(literal) if isinstance(value, str))
    return words or (("true", "false") if flag.is_switch and str(flag.default) == "True" else ())


@functools.cache
def names_in(file: str, variable: str) -> tuple[str, ...]:
    """The keys of a mapping, or the names that it is made of, in a file of Covey."""
    for node in ast.parse((_SOURCE / file).read_text()).body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if not (isinstance(target, ast.Name) and target.id == variable) or not isinstance(node, ast.AnnAssign):
            continue
        if isinstance(node.value, ast.Dict):
            return tuple(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
        if isinstance(node.value, ast.DictComp):
            inside = ast.walk(node.value.generators[0].iter)
            return tuple(dict.fromkeys(part.id for part in inside if isinstance(part, ast.Name)))
    raise LookupError(f"{file} has no mapping {variable}.")
