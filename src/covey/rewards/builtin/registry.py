"""Rewards by name: built-in ones, the user's own by import path, reward models by folder or hub id."""

import ast
import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from covey import names
from covey.errors import ConfigError, CoveyError, RewardError, did_you_mean
from covey.raised import with_place
from covey.rewards.builtin.bleu import Bleu, SelfBleu
from covey.rewards.builtin.choice import ChoiceLetter, Fuzzy, Numeric, TokenF1
from covey.rewards.builtin.code import Code
from covey.rewards.builtin.format import JsonSchema, Pattern, Tags
from covey.rewards.builtin.gym import gym_reward
from covey.rewards.builtin.inference_model import Frozen
from covey.rewards.builtin.judge_rewards import JudgeReward, PairwiseJudgeReward
from covey.rewards.builtin.language import Language
from covey.rewards.builtin.length_scaled import CosineScaled, reasoning_accuracy_reward
from covey.rewards.builtin.math import accuracy_reward, exact_reward, math_reward
from covey.rewards.builtin.overlap import Distinct, Rouge
from covey.rewards.builtin.process_reward import ProcessReward, is_token_classifier
from covey.rewards.builtin.reward_model import reward_model
from covey.rewards.builtin.text import Length, Repetition, SoftOverlong, format_reward, think_format_reward
from covey.rewards.builtin.text_models import ClassifierReward, FluencyReward, SimilarityReward
from covey.rewards.contract import RewardSpec, name_of

BUILTIN: dict[str, Any] = {
    "math": math_reward,
    "exact": exact_reward,
    "format": format_reward,
    "think_format": think_format_reward,
    "length": Length,
    "soft_overlong": SoftOverlong,
    "repetition": Repetition,
    "pattern": Pattern,
    "tags": Tags,
    "json_schema": JsonSchema,
    "choice": ChoiceLetter,
    "numeric": Numeric,
    "f1": TokenF1,
    "fuzzy": Fuzzy,
    "rouge": Rouge,
    "bleu": Bleu,
    "distinct": Distinct,
    "self_bleu": SelfBleu,
    "language": Language,
    "gym": gym_reward,
    "reward_model": reward_model,
    "process": ProcessReward,
    "classifier": ClassifierReward,
    "similarity": SimilarityReward,
    "fluency": FluencyReward,
    "judge": JudgeReward,
    "judge_pairs": PairwiseJudgeReward,
    "cosine": CosineScaled,
    "code": Code,
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
}
"""Functions, and classes whose parameters are given as in `length(target=50)`."""

_FROM_0_TO_1 = frozenset(
    {
        "math", "exact", "format", "think_format", "pattern", "tags", "json_schema", "choice", "numeric", "f1", "fuzzy", "rouge",
        "bleu", "language", "code", "accuracy_reward", "reasoning_accuracy_reward", "think_format_reward",
    }
)  # fmt: skip
"""Rewards that give 0 to a wrong completion and 1 to a right one."""

_CALL = re.compile(r"(?P<name>[^()]+)\((?P<arguments>.*)\)", re.DOTALL)


def resolve(reward: Any, tokenizer: Any = None, *, device: Any = None, **model_options: Any) -> RewardSpec:
    """A reward ready to be called, from any form that a user may write.

    `reward` is a callable; a built-in name (`math`, `length(target=50)`); `demo`; an import path (`package.module:function`,
    `file.py:function`, `file.py:Factory(scale=2)`); or a reward model: a folder, a hub id `org/name`, or a module, with
    `tokenizer` as its own and `device` to run on. A RewardSpec comes back as it is. `model_options` go to `ModelReward.of`.
    Raises ConfigError, RewardError or ModelError in a sentence that names the nearest known name.
    """
    if isinstance(reward, RewardSpec):
        return _place(reward, device)
    if isinstance(reward, str | Path):
        spec = _by_name(str(reward))
        if spec is not None:
            return _place(spec, device)
    if isinstance(reward, str | Path) and is_token_classifier(reward):
        steps = ProcessReward(str(Path(reward).expanduser()), tokenizer=tokenizer)
        return _place(RewardSpec(name=steps.frozen.name, call=steps, timeout_seconds=float("inf")), device)
    if isinstance(reward, str | Path | torch.nn.Module):
        from covey.rewards.builtin.reward_model import ModelReward

        model = ModelReward.of(reward, tokenizer, device=device, **model_options)
        return RewardSpec(name=model.name, call=model, timeout_seconds=float("inf"))
    if isinstance(reward, type):
        return RewardSpec(name=reward.__name__, call=_make(reward, {}, reward.__name__))
    return RewardSpec.of(reward)


def _place(spec: RewardSpec, device: Any) -> RewardSpec:
    """The reward with its model, if it has one, on `device`."""
    call: Any = spec.call
    if device is not None and hasattr(call, "to"):
        return replace(spec, call=call.to(device))
    if device is not None and isinstance(getattr(call, "frozen", None), Frozen):
        call.frozen.to(device)
    return spec


def _by_name(text: str) -> RewardSpec | None:
    """The reward that a built-in name or an import path stands for; `None` for what looks like a model."""
    match = _CALL.fullmatch(text.strip())
    name, arguments = (match["name"], _arguments(match["arguments"], text)) if match else (text.strip(), None)
    if name == "demo" and not Path(name).exists():
        from covey.demo import reward

        return RewardSpec(name="demo", call=reward)
    if name in BUILTIN:
        scale = (0.0, 1.0) if name in _FROM_0_TO_1 else None
        return RewardSpec(name=name, call=_make(BUILTIN[name], arguments, name), scale=scale)
    if ":" in name and not Path(name).exists():
        target = names.load(name, "reward")
        return RewardSpec(name=name_of(target), call=_make(target, arguments, name))
    if Path(name).expanduser().is_dir() or re.fullmatch(r"[\w.\-]+/[\w.\-]+", name):
        return None
    choices = [*BUILTIN, "demo"]
    raise ConfigError(
        f"{text!r} is no built-in reward, import path or reward model.{did_you_mean(name, choices)} Built in: "
        f"{', '.join(sorted(choices))}; your own is 'file.py:function'; a reward model is a folder or 'org/name'."
    )


def _arguments(text: str, whole: str) -> dict[str, Any]:
    """`target=50, unit="tokens"` as a dict of literals."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"reward {whole!r}: write its parameters as name=value with plain values, as in length(target=50)."
        ) from error


def _make(target: Any, arguments: dict[str, Any] | None, name: str) -> Any:
    """The callable itself, or what a class or a factory makes of the arguments."""
    if arguments is None and not isinstance(target, type):
        return target
    if not callable(target):
        raise RewardError(f"reward {name!r} is a {type(target).__name__}, which takes no parameters.")
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reward {name!r} is {target!r}, which makes no reward; give a function or an instance."
        ) from error
    try:
        signature.bind(**(arguments or {}))
    except TypeError as error:
        if "completions" in signature.parameters and not isinstance(target, type):
            raise ConfigError(
                f"reward {name!r} is a function, which takes no parameters; write {name} alone."
            ) from error
        takes = [p for p in signature.parameters if not p.startswith("_")]
        hint = f"its parameters are {', '.join(takes)}, as in {name}({takes[0]}=...)" if takes else "it takes none"
        raise ConfigError(f"reward {name!r}: {error}; {hint}.") from error
    try:
        made = target(**(arguments or {}))
    except CoveyError:
        raise
    except Exception as error:
        raise RewardError(f"reward {name!r} cannot be made: {with_place(error)}.") from error
    if not callable(made):
        raise RewardError(
            f"reward {name!r} makes {type(made).__name__!r} objects, which cannot be called; give a function of `completions`, "
            "or a class with __call__."
        )
    return made
