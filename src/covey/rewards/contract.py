"""Contract of a reward function: TRL's keywords in, one number or `None` a completion out.

TRL 1.16 (`GRPOTrainer._calculate_rewards`) passes everything to every function, so each must take `**kwargs`; here a
function receives only what its signature names, and one that takes `**kwargs` receives everything.
"""

from __future__ import annotations

import inspect
import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from covey.data.media import as_returned
from covey.errors import ConfigError, DataError, RewardError, did_you_mean
from covey.raised import describe, is_ctrl_c
from covey.rewards.combining import weight_of
from covey.rewards.decorators import CallOptions, call_options_of, without_partials
from covey.rewards.surroundings import copied_inputs
from covey.types import Completion, Group, Reward

T = TypeVar("T")

ALWAYS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Keywords that do not come from the data set."""
NOT_PASSED = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that TRL keeps from reward functions, because the keywords above carry them."""


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """One reward: the name of its metrics, its callable, and its weight.

    Example: `RewardSpec(name="math", call=math_reward, weight=2.0)`.
    """

    name: str
    call: Reward
    weight: float = 1.0
    timeout_seconds: float | None = None
    """Its own limit for one call; `None`: the scorer's; `math.inf`: none."""
    call_options: CallOptions | None = None
    """Call options; `None`: those of its decorator."""
    scale: tuple[float, float] | None = None
    """The score of a wrong and that of a right completion; `None`: as its decorator says, or not known."""

    @staticmethod
    def of(reward: Any) -> RewardSpec:
        """A function with its own name; a spec as it is."""
        return reward if isinstance(reward, RewardSpec) else RewardSpec(name=name_of(reward), call=reward)

    @property
    def how(self) -> CallOptions:
        return call_options_of(self.call) if self.call_options is None else self.call_options


def name_of(reward: Any) -> str:
    """TRL's name of a reward: the function's own, through `functools.partial`; an object's class otherwise."""
    function = without_partials(reward)
    return str(getattr(function, "__name__", type(function).__name__))


def is_async(reward: Any) -> bool:
    """True when calling it gives something to await: `async def`, through partials and `__call__` alike."""
    function = without_partials(reward)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def specs_of(rewards: Sequence[RewardSpec | Reward], weights: Sequence[Any] | None) -> list[RewardSpec]:
    """Specs with names that differ (`name`, `name_2`, ...) and the given weights."""
    if not rewards:
        raise RewardError("there is no reward; give at least one function, reward model or name of a built-in reward.")
    specs = [RewardSpec.of(reward) for reward in rewards]
    if weights is not None and len(weights) != len(specs):
        raise ConfigError(f"reward_weights has {len(weights)} values for {len(specs)} rewards; give one for each.")
    if weights is not None:
        specs = [replace(spec, weight=weight_of(weight)(0)) for spec, weight in zip(specs, weights, strict=True)]
    seen: dict[str, int] = {}
    for i, spec in enumerate(specs):
        seen[spec.name] = seen.get(spec.name, 0) + 1
        if seen[spec.name] > 1:
            specs[i] = replace(spec, name=f"{spec.name}_{seen[spec.name]}")
    return specs


def needs_one_of(*columns: str) -> Callable[[T], T]:
    """Marks a reward that needs any one of several columns, so that data without them is refused before training."""

    def mark(reward: T) -> T:
        reward.needs_one_of = columns  # type: ignore[attr-defined]
        return reward

    return mark


@dataclass(frozen=True)
class Batch:
    """N completions as reward functions see them: aligned lists, prompts repeated for each completion."""

    prompts: list[Any]
    """[N] text, or lists of messages."""
    completions: list[Any]
    """[N] text, or `[{"role": "assistant", "content": ...}]` where the prompt is a conversation."""
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    """Every other column of the data set, [N] each."""

    @staticmethod
    def of(groups: Sequence[Group]) -> Batch:
        """Lay P groups out flat. A column that only some rows have is `None` for the others."""
        of_rows = [name for group in groups for name in group.prompt.columns if name not in NOT_PASSED]
        names = dict.fromkeys(
            [*of_rows, *(name for group in groups for completion in group.completions for name in completion.columns)]
        )
        columns: dict[str, list[Any]] = {name: [] for name in names}
        batch = Batch([], [], [], columns)
        for group in groups:
            chat = group.prompt.messages is not None
            for completion in group.completions:
                batch.prompts.append(group.prompt.raw)
                batch.completions.append(_turns(completion) if chat else completion.text)
                batch.completion_ids.append(completion.token_ids.tolist())
                for name, values in columns.items():
                    values.append(completion.columns.get(name, group.prompt.columns.get(name)))
        return batch

    @staticmethod
    def of_rows(
        rows: Sequence[Mapping[str, Any]], prompts: Sequence[Any], completions: Sequence[Any], ids: Sequence[Any]
    ) -> Batch:
        """A batch from the row of each completion, as TRL's `_calculate_rewards` gets them."""
        names = dict.fromkeys(name for row in rows for name in row if name not in NOT_PASSED)
        columns = {name: [row.get(name) for row in rows] for name in names}
        return Batch(list(prompts), list(completions), [list(token_ids) for token_ids in ids], columns)

    def rows(self) -> list[dict[str, Any]]:
        """Each completion's row, the prompt in it."""
        return [
            {"prompt": prompt, **{name: values[i] for name, values in self.columns.items()}}
            for i, prompt in enumerate(self.prompts)
        ]

    def take(self, indices: Sequence[int]) -> Batch:
        """Only these completions, in this order."""
        columns = {name: [values[i] for i in indices] for name, values in self.columns.items()}
        pick = lambda values: [values[i] for i in indices]
        return Batch(pick(self.prompts), pick(self.completions), pick(self.completion_ids), columns)

    def __len__(self) -> int:
        return len(self.completions)


def _turns(completion: Completion) -> list[dict[str, Any]]:
    """The messages of a completion, answers with images, sounds and videos as their tools returned them."""
    if completion.messages is None:
        return [{"role": "assistant", "content": completion.text}]
    waiting = iter([call.parts for call in completion.tool_calls if call.parts])
    is_shown = lambda turn: turn["role"] == "tool" and isinstance(turn.get("content"), list)
    parts_of = lambda turn: next(waiting, None) if is_shown(turn) else None
    return [
        dict(turn) if (parts := parts_of(turn)) is None else {**turn, "content": [as_returned(part) for part in parts]}
        for turn in completion.messages
    ]


class Total(float):
    """A total that grows over the run, logged as the sum over the places that count and not as a mean of its values."""

    place: str
    """The counter and its process."""

    def __new__(cls, value: float, place: str = "") -> Total:
        total = super().__new__(cls, value)
        total.place = place
        return total


@dataclass
class Logged:
    """Extras of one call, logged through `log_extra` and `log_metric`."""

    size: int
    """N of the call; `log_extra` wants as many values."""
    extras: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)

    def extra(self, column: str, values: Iterable[Any]) -> None:
        """Add a column to the table of completions: one value for each."""
        listed = list(values)
        if len(listed) != self.size:
            raise RewardError(
                f"log_extra({column!r}, ...) got {_count(listed)} for {self.size} completions; give one for each."
            )
        self.extras[str(column)] = [_showable(value) for value in listed]

    def metric(self, name: str, value: Any) -> None:
        """Add a number to the step's metrics; several calls with one name are averaged, of a `Total` of one place the largest stays."""
        number = to_number(value, f"log_metric({name!r}, ...)")
        self.metrics.append((str(name), Total(number, value.place) if isinstance(value, Total) else number))


def _showable(value: Any) -> Any:
    """The value, or a sentence in place of an object that cannot be written down."""
    if value is None or isinstance(value, str | int | float):
        return value
    try:
        repr(value)
    except Exception:  # noqa: BLE001 - the user's __repr__
        return f"a {type(value).__name__} that cannot be shown"
    return value


def arguments(reward: Reward, batch: Batch, logged: Logged, trainer_state: Any) -> dict[str, Any]:
    """The keywords to call `reward` with, its own to change: everything, or only what its signature names."""
    offered: dict[str, Any] = {
        **batch.columns,
        "prompts": batch.prompts,
        "completions": batch.completions,
        "completion_ids": batch.completion_ids,
        "trainer_state": trainer_state,
        "log_extra": logged.extra,
        "log_metric": logged.metric,
    }
    if call_options_of(reward).is_singular:
        offered = _singular(offered, batch)
    named, takes_all = _parameters(reward)
    accepted = offered if takes_all else {name: value for name, value in offered.items() if name in named}
    state = {"trainer_state": accepted["trainer_state"]} if "trainer_state" in accepted else {}  # the batch's own copy
    return copied_inputs({name: value for name, value in accepted.items() if name not in state}) | state


def takes(reward: Reward, keyword: str) -> bool:
    """True when it would receive `keyword`."""
    named, takes_all = _parameters(reward)
    return takes_all or keyword in named


def _singular(offered: Mapping[str, Any], batch: Batch) -> dict[str, Any]:
    """The keywords of a single completion: `prompt`, `completion`, its ids and the values of its columns."""
    alone = {name: values[0] for name, values in batch.columns.items()}
    singular = {
        "prompt": batch.prompts[0],
        "completion": batch.completions[0],
        "completion_ids": batch.completion_ids[0],
    }
    shared = {name: offered[name] for name in ("trainer_state", "log_extra", "log_metric")}
    return {**alone, **singular, **shared}


def check_signature(spec: RewardSpec, columns: Iterable[str] | None) -> None:
    """Raise when `spec` cannot be called: not callable, or a parameter that neither the contract nor a column fills.

    `columns` are the data set's; `None` when they are not known before the first row.
    """
    made = without_partials(spec.call)
    if isinstance(made, type):
        raise RewardError(
            f"reward {spec.name!r} is the class {made.__name__}, which makes an object and no scores; give an instance, "
            f"{made.__name__}(), or a function."
        )
    if not callable(spec.call):
        raise RewardError(
            f"reward {spec.name!r} is not callable: it is {_kind(spec.call)}; give a function that takes `completions` and "
            "returns one number for each, a reward model, or the name of a built-in reward."
        )
    named, _ = _parameters(spec.call)
    if columns is None:
        return
    always = [*ALWAYS, "prompt", "completion"] if call_options_of(spec.call).is_singular else [*ALWAYS]
    available = [*always, *(column for column in columns if column not in NOT_PASSED)]
    missing = [
        name for name, parameter in named.items() if name not in available and parameter.default is parameter.empty
    ]
    any_of = getattr(spec.call, "needs_one_of", ())
    if any_of and not set(any_of) & set(available):
        missing.append(" or ".join(any_of))
    if missing:
        have = ", ".join(name for name in available if name not in always) or "no other columns"
        name = missing[0].partition(" ")[0]
        near = did_you_mean(name, columns) or did_you_mean(name, always, cutoff=0.85)
        raise DataError(
            f"reward {spec.name!r} needs a column {missing[0]}, but the data set has {have}.{near} Rename yours to it "
            "(columns=, or --columns new=old), or give the parameter a default."
        )


def to_scores(returned: Any, size: int, name: str) -> list[Any]:
    """A function's return value as a list of `size` raw values. Raises RewardError that names the value and the expected form."""
    want = f"return a list with one number (or None) for each of the {size} completions"
    if isinstance(returned, Tensor) or hasattr(returned, "__array__"):
        array = returned.detach().cpu() if isinstance(returned, Tensor) else np.asarray(returned)
        if len(array.shape) > 1:
            raise RewardError(f"reward {name!r} returned an array of shape {tuple(array.shape)}; {want}.")
        returned = array.reshape(-1).tolist()
    if isinstance(returned, str | bytes | Mapping | Set) or not isinstance(returned, Iterable):
        raise RewardError(f"reward {name!r} returned {_kind(returned)}; {want}.")
    if not isinstance(returned, Sized):
        returned = list(itertools.islice(returned, size + 1))  # it may never end
        if len(returned) > size:
            raise RewardError(f"reward {name!r} returned more than {size} values for {size} completions; {want}.")
    values = list(returned)
    if len(values) != size:
        raise RewardError(f"reward {name!r} returned {_count(values)} for {size} completions; {want}.")
    return values


def to_number(value: Any, what: str) -> float:
    """A score as a float: `None` is NaN. Raises RewardError for what is no real number, ValueError for infinities and for
    a number that cannot be turned into a float.
    """
    if value is None:
        return math.nan
    try:
        if hasattr(value, "item") and getattr(value, "size", None) is not None:  # a tensor or a numpy scalar
            value = value.item() if math.prod(getattr(value, "shape", ())) == 1 else value
        is_number = isinstance(value, numbers.Real | Decimal)
        number = float(value) if is_number else math.nan
    except OverflowError:
        number, is_number = math.inf, True
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise ValueError(f"{what} is a {type(value).__name__} that gives no float: {describe(error)}.") from error
    if not is_number:
        raise RewardError(f"{what} is {_kind(value)}{_format(value)}, not a number.")
    if abs(number) > torch.finfo(torch.float32).max:
        raise ValueError(f"{what} is {number}, which is not a finite float32.")
    return number


def _parameters(reward: Reward) -> tuple[dict[str, inspect.Parameter], bool]:
    """Parameters that can be passed by name, and whether it takes all others too."""
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError):
        return {}, True  # written in C without a signature: TRL's own behaviour, everything is passed
    unnamed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if unnamed:
        raise RewardError(
            f"reward {name_of(reward)!r} takes {unnamed[0]!r} by position only; rewards are called by keyword."
        )
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _format(value: Any) -> str:
    try:
        return f" ({str(value)[:60]!r})"
    except BaseException:  # noqa: BLE001 - the user's __str__
        return ""


def _count(values: list[Any]) -> str:
    return f"{len(values)} value{'' if len(values) == 1 else 's'}"


def check(rewards: Any, columns: Iterable[str] | None = None) -> None:
    """Raise one sentence when any of `rewards` (functions or specs) cannot be called; see `check_signature`."""
    several = rewards if isinstance(rewards, Sequence) and not isinstance(rewards, str) else [rewards]
    column_names = None if columns is None else list(columns)
    for reward in several:
        check_signature(RewardSpec.of(reward), column_names)
