"""Search space of `covey tune`: `learning_rate=1e-6:1e-4:log`, `num_generations=4,8,16`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.errors import ConfigError, did_you_mean
from covey.experiments.series import NEVER
from covey.files.bounded import yaml_of

_FIXED = NEVER | {"seed"}
_STEPS_OR_SHARE = frozenset({"warmup_steps", "logging_steps", "eval_steps", "save_steps"})
"""Whole numbers of steps, or below 1 a share of the run."""


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One option and the values that it may take: from `low` to `high`, or one of `choices`."""

    name: str
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False
    choices: tuple[Any, ...] = ()

    @property
    def ends(self) -> tuple[Any, ...]:
        """Values at the edge, each of which must make a run."""
        whole = int if self.is_whole else float
        return self.choices or (whole(self.low), whole(self.high))

    def distribution(self) -> Any:
        """Optuna's object for it."""
        from optuna import distributions as of

        if self.choices:
            return of.CategoricalDistribution(self.choices)
        if self.is_whole:
            return of.IntDistribution(int(self.low), int(self.high), log=self.is_log)
        return of.FloatDistribution(self.low, self.high, log=self.is_log)

    def holds(self, value: Any) -> bool:
        """True if `value` is in the range."""
        if self.choices:
            return value in self.choices
        return isinstance(value, int | float) and self.low <= value <= self.high


def choices(words: Sequence[str], kinds: Mapping[str, str], flag: str) -> dict[str, tuple[Any, ...]]:
    """Values by option, of words such as `learning_rate=1e-5,1e-4`. `kinds`: type of each option, by name, such as `int | None`.

    Raises ConfigError naming the word after `flag`.
    """
    parsed = [_choices(*_parse(word, kinds, flag, "name=a,b,c")) for word in words]
    _refuse_twice(parsed, flag)
    return {dimension.name: dimension.choices for dimension in parsed}


def dimensions(words: Sequence[str], kinds: Mapping[str, str]) -> list[Dimension]:
    """One for each word. Raises ConfigError naming the word and how it is written."""
    parsed = [_dimension(word, kinds) for word in words]
    _refuse_twice(parsed, "--search")
    if not parsed:
        raise ConfigError(
            "--search is missing: name the values to try, such as learning_rate=1e-6:1e-4:log or num_generations=4,8."
        )
    return parsed


def _refuse_twice(dimensions: Sequence[Dimension], flag: str) -> None:
    names = [dimension.name for dimension in dimensions]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{flag} names {name} twice; keep one.")


def _parse(word: str, kinds: Mapping[str, str], flag: str, forms: str) -> tuple[str, str]:
    """Name and values of a word `name=values`."""
    name, is_pair, values = word.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    if not is_pair or not values:
        raise ConfigError(f"{flag} {word}: write {forms}.")
    if name in _FIXED or name not in kinds:
        verb = "searched" if flag == "--search" else "varied"
        why = f"cannot be {verb}" if name in _FIXED else "is not an option of covey train"
        raise ConfigError(f"{flag} {word}: {name} {why}.{'' if name in _FIXED else did_you_mean(name, kinds)}")
    return name, values


def _dimension(word: str, kinds: Mapping[str, str]) -> Dimension:
    name, values = _parse(word, kinds, "--search", "name=low:high, name=low:high:log, or name=a,b,c")
    return (
        _range(word, name, values, kinds[name])
        if ":" in values and "," not in values and _is_number(values)
        else _choices(name, values)
    )


def _is_number(values: str) -> bool:
    try:
        float(values.partition(":")[0])
    except ValueError:
        return False
    return True


def _choices(name: str, values: str) -> Dimension:
    return Dimension(
        name=name, choices=tuple(_plain(yaml_of(value.strip(), f"--search {name}")[1]) for value in values.split(","))
    )


def _plain(value: Any) -> Any:
    """YAML reads 1e-5 as text, because it has no point."""
    if isinstance(value, str) and _is_number(value):
        return float(value)
    return value


def _range(word: str, name: str, values: str, kind: str) -> Dimension:
    low, high, *rest = values.split(":")
    if rest not in ([], ["log"]):
        raise ConfigError(f"--search {word}: after low:high only log may follow.")
    try:
        ends = float(low), float(high)
    except ValueError as error:
        raise ConfigError(f"--search {word}: {low}:{high} are not two numbers.") from error
    if not ends[0] < ends[1] or not all(map(math.isfinite, ends)):
        raise ConfigError(f"--search {word}: the first number must be the smaller one.")
    if rest and ends[0] <= 0:
        raise ConfigError(f"--search {word}: log needs numbers above 0.")
    kinds = {part.strip() for part in kind.split("|")}
    is_steps = name in _STEPS_OR_SHARE and ends[1] > 1
    is_whole = is_steps or ("int" in kinds and "float" not in kinds)
    if is_whole and not all(end.is_integer() for end in ends):
        more = " of steps, or shares of the run, all below 1" if is_steps else ""
        raise ConfigError(f"--search {word}: {name} takes whole numbers{more}.")
    return Dimension(name=name, low=ends[0], high=ends[1], is_log=bool(rest), is_whole=is_whole)
