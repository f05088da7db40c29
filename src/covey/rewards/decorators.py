"""Options of reward functions: `@reward(streams=True, pure=True, isolated=True)` and `@per_completion`."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, overload

from covey.errors import RewardError

T = TypeVar("T")

_MARK = "__covey_reward__"


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """Call options of one reward. The default is TRL's contract: one call with the whole batch, in this process."""

    unit: Literal["batch", "group", "completion"] = "batch"
    """Unit of one call: all completions of the batch, the group of one prompt, or a single completion."""
    is_singular: bool = False
    """It takes `completion`, `prompt` and a column's value instead of lists, and returns one number."""
    pure: bool = False
    """The score of a completion depends on its own inputs alone, so equal inputs need no second call."""
    isolated: bool = False
    """Run it in worker processes that are killed past the limit."""
    in_thread: bool = False
    """Run it in a thread of its own, for a function that waits."""
    concurrency: int | None = None
    """Most calls at a time; unset: 16 for `async def`, the number of workers, or 1."""
    timeout_seconds: float | None = None
    """Its own limit for one call; `None`: the scorer's."""
    scale: tuple[float, float] | None = None
    """The score of a wrong and that of a right completion; `None`: not known."""
    before: Callable[[], None] | None = None
    """Called before each call, outside of its limit: what has to be up first."""

    @property
    def streams(self) -> bool:
        return self.unit != "batch"


def reward(
    *,
    streams: bool = False,
    pure: bool = False,
    isolated: bool = False,
    in_thread: bool = False,
    concurrency: int | None = None,
    timeout: float | None = None,
    scale: tuple[float, float] | None = None,
) -> Callable[[T], T]:
    """Say how a reward function is to be called; the function itself is unchanged and stays TRL's.

    `streams`: one call for each prompt's completions, while others are still being written. `pure`: cached by content.
    `isolated`: in worker processes that are killed past the limit. `in_thread`: in a thread, at the same time as the other
    functions, for one that waits. `concurrency`: most calls at a time. `timeout`: seconds of one call. `scale=(0, 1)`: the
    score of a wrong and that of a right completion, for metrics that count them.

    Example: `@reward(streams=True, pure=True, concurrency=8, timeout=5)` above `async def judge(completions, **columns)`.
    """
    if concurrency is not None and concurrency < 1:
        raise RewardError(f"reward(concurrency={concurrency}) lets nothing run; use at least 1.")
    if timeout is not None and not timeout > 0:
        raise RewardError(f"reward(timeout={timeout}) leaves no time; give seconds above 0.")
    if scale is not None and not (len(scale) == 2 and -math.inf < scale[0] < scale[1] < math.inf):
        raise RewardError(
            f"reward(scale={scale!r}) is no scale; give the score of a wrong and of a right completion, as (0, 1)."
        )
    call_options = CallOptions(
        unit="group" if streams else "batch",
        pure=pure,
        isolated=isolated,
        in_thread=in_thread,
        concurrency=concurrency,
        timeout_seconds=timeout,
        scale=None if scale is None else (float(scale[0]), float(scale[1])),
    )
    return lambda target: mark(target, call_options)


@overload
def per_completion(function: None = None, *, pure: bool = True, **options: Any) -> Callable[[T], T]: ...


@overload
def per_completion(function: T, *, pure: bool = True, **options: Any) -> T: ...


def per_completion(function: T | None = None, *, pure: bool = True, **options: Any) -> Any:
    """Mark a function of one completion: `def short(completion, **columns): return -len(completion)`.

    It receives `prompt`, `completion`, `completion_ids` and the columns' values of one completion, returns one number or
    None, and is called while other completions are still being written. `options` are those of `reward`.
    """

    def marked(target: T) -> T:
        reward(pure=pure, **options)(target)
        return mark(target, replace(call_options_of(target), unit="completion", is_singular=True))

    return marked if function is None else marked(function)


def without_partials(target: Any) -> Any:
    """The callable inside of `functools.partial`s."""
    while isinstance(target, functools.partial):
        target = target.func
    return target


def call_options_of(target: Any) -> CallOptions:
    """Call options of a reward, also through `functools.partial`."""
    return getattr(without_partials(target), _MARK, None) or CallOptions()


def mark(target: T, call_options: CallOptions) -> T:
    """The reward, with these call options from now on."""
    setattr(target, _MARK, call_options)
    return target
