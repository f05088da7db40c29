"""`--recipe NAME`: options that were measured together, below those of the file and the flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.cli import output
from covey.cli.flags import spelled
from covey.errors import ConfigError, did_you_mean

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "fast": {"num_iterations": 4, "target_kl": 0.02, "curriculum": "frontier"},
}
"""Options that each sets; docs/sample-efficiency.md has the measurements."""


def expanded(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options given, and those of their recipe where they set none. Raises ConfigError for an unknown recipe."""
    wanted = dict(given)
    name = wanted.pop("recipe", None)
    if name is None:
        return wanted
    if name not in RECIPES:
        raise ConfigError(
            f"--recipe {name} is unknown.{did_you_mean(name, RECIPES)} Known: {', '.join(sorted(RECIPES))}."
        )
    added = {option: value for option, value in RECIPES[name].items() if option not in wanted}
    kept = [spelled(option) for option in RECIPES[name] if option in wanted]
    flags = " ".join(f"{spelled(option)} {value}" for option, value in added.items())
    also = f"; yours: {', '.join(kept)}" if kept else ""
    output.say(f"recipe {name}: {flags or 'sets nothing that you have not set'}{also}")
    return {**added, **wanted}
