"""Values against their declared types and ranges, for parts and functions: `beta: Positive = 0.1`. Light to import."""

import inspect
import math
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, wraps
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from covey.errors import ConfigError, did_you_mean

__all__ = [
    "BelowOne", "Bound", "Count", "CountOrZero", "Finite", "Limit", "Measured", "NotNegative", "Positive", "Range", "Share", "StepValue",
    "checked", "checked_dataclass", "expect_declared",
]  # fmt: skip
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Range:
    """Range of a number. A declared number is finite unless its range says otherwise."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    may_be_infinite: bool = False
    """An infinite number is no limit. Elsewhere it would end in NaN."""
    why: str = ""
    """A second sentence for a number out of range."""

    @property
    def range(self) -> str:
        """The range in words; "" for one without bounds."""
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{words} {bound:.12g}" for words, bound in bounds.items() if bound is not None)

    def expect(self, name: str, value: Any) -> None:
        """Raise ConfigError, which begins with `name` and the value, for a number outside."""
        is_high = (self.at_least is None or value >= self.at_least) and (self.above is None or value > self.above)
        is_low = (self.at_most is None or value <= self.at_most) and (self.below is None or value < self.below)
        if not (is_high and is_low):
            raise ConfigError(f"{name}={value!r} must be {self.range}.{f' {self.why}' if self.why else ''}")
        if abs(value) == math.inf and not self.may_be_infinite:
            raise ConfigError(f"{name}={value!r} must be finite.")


class StepValue(float):
    """A coefficient that a controller made for a step. A warm-up begins at 0, outside of the range of the setting."""


Finite = Annotated[float, Range()]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(at_least=0)]
Share = Annotated[float, Range(at_least=0, at_most=1)]
BelowOne = Annotated[float, Range(at_least=0, below=1)]
Limit = Annotated[float, Range(above=0, may_be_infinite=True)]
Bound = Annotated[float, Range(at_least=0, may_be_infinite=True)]
Count = Annotated[int, Range(at_least=1)]
CountOrZero = Annotated[int, Range(at_least=0)]

_WORDS = {float: "a number", int: "a whole number", bool: "True or False", str: "a text", type(None): "None"}


def expect_declared(part: Any) -> None:
    """Raise ConfigError where a field of a part, or of a part within it, has a value that its annotation rules out.

    Of fields of other types than numbers, words and texts, these and None alone are refused. A part's `called` names it.
    """
    if not is_dataclass(part) or isinstance(part, type):
        return
    called = getattr(part, "called", None)
    title = f"{called}: " if isinstance(called, str) else f"{type(part).__name__}'s "
    for name, kinds in _declared(type(part)):
        value = getattr(part, name)
        if is_dataclass(value):
            expect_declared(value)
        else:
            _expect(title + name, value, kinds)


if TYPE_CHECKING:
    from dataclasses import dataclass as checked_dataclass

    Measured = float
else:
    Measured = Any  # a number that `prepare` takes from a step: NaN where the step's numbers are bad

    def checked_dataclass(**options: Any) -> Callable[[type], type]:
        """`dataclasses.dataclass` whose instances are checked by `expect_declared` as they are made, before their `__post_init__`."""

        def decorated(cls: type) -> type:
            further = getattr(cls, "__post_init__", None)

            def check(self: Any) -> None:
                expect_declared(self)
                if further is not None:
                    further(self)

            cls.__post_init__ = check
            return dataclass(**options)(cls)

        return decorated


def checked(function: F) -> F:
    """The function, which refuses with ConfigError each argument that its annotation rules out."""
    signature, name = inspect.signature(function), function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            values = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # raises Python's own sentence
        for parameter, kinds in _declared(function):
            if parameter in values:
                _expect(f"{name}'s {parameter}", values[parameter], kinds)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


_UNIONS = (Union, types.UnionType)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@cache
def _declared(owner: Any) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Names of a dataclass's fields or a function's parameters, each with the members of its annotation, where that can be read."""
    if isinstance(owner, type):
        defaults = {item.name: item.default for item in fields(owner) if item.init}
    else:
        parameters = inspect.signature(owner).parameters.values()
        defaults = {item.name: item.default for item in parameters if item.kind not in _VARIADIC}
    hints: dict[str, Any] = {}
    for place in reversed(owner.__mro__) if isinstance(owner, type) else [owner]:
        for name, hint in inspect.get_annotations(place).items():
            shell = types.SimpleNamespace(__annotations__={name: hint})
            with suppress(NameError, TypeError, AttributeError):  # a name for checkers of types alone
                hints |= get_type_hints(shell, vars(sys.modules[place.__module__]), include_extras=True)
    kinds = {
        name: Union[hints[name], None] if defaults[name] is None else hints[name] for name in defaults if name in hints
    }
    return tuple((name, get_args(kind) if get_origin(kind) in _UNIONS else (kind,)) for name, kind in kinds.items())


def _expect(name: str, value: Any, kinds: tuple[Any, ...]) -> None:
    kind = next((kind for kind in kinds if _fits(value, _plain(kind))), None)
    if kind is None:
        allowed = [word for kind in kinds for word in _words(kind)]
        listed = " or ".join([", ".join(allowed[:-1]), allowed[-1]] if len(allowed) > 1 else allowed)
        words = [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
        raise ConfigError(f"{name}={value!r} must be {listed}.{did_you_mean(str(value), words)}")
    for limits in get_args(kind)[1:] if get_origin(kind) is Annotated and not isinstance(value, StepValue) else ():
        limits.expect(name, value)


def _plain(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return any(value is word or (_fits(value, type(word)) and value == word) for word in get_args(kind))
    if kind is float:
        return is_number(value)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind in (bool, str, type(None)):
        return isinstance(value, kind)
    cls = get_origin(kind) or kind
    if kind is Any or not isinstance(cls, type) or getattr(cls, "_is_runtime_protocol", True) is False:
        return kind is Any or not isinstance(value, (str, bool, type(None)))
    is_exact = getattr(cls, "_is_runtime_protocol", False)
    return isinstance(value, cls) or not (is_exact or isinstance(value, (str, int, float, type(None))))


def is_number(value: Any) -> bool:
    """True for a number or a tensor of one, but for NaN, True and False."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        return False
    try:
        return not math.isnan(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # several numbers in an array, or 10**400
        return False


def _words(kind: Any) -> list[str]:
    if get_origin(kind) is Annotated:
        ranges = "".join(f" ({limits.range})" for limits in get_args(kind)[1:] if limits.range)
        return [_words(_plain(kind))[0] + ranges]
    if get_origin(kind) is Literal:
        return [repr(word) for word in get_args(kind)]
    if get_origin(kind) is Callable:
        return ["a function"]
    name = getattr(kind, "__name__", str(kind))
    return [_WORDS.get(kind, f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")]
