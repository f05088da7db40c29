"""TRL's public behaviours as small questions to a library: the same files ask TRL 1.16.0 and Covey, each under its own import.

`record.py` asks TRL and writes `recorded.json`; `test_behaviours.py` asks Covey and compares. A probe returns plain values, or
raises. Completions differ for the same seed, so no probe looks at one. Probes of one scenario (`world.py`) share one run.
"""

from __future__ import annotations

import random
from typing import Any

import probes_of_options
import probes_of_results
import probes_of_runs
import torch
from world import OWN_RUN, PROBES, AtLeast, World

__all__ = [
    "OWN_RUN",
    "PROBES",
    "World",
    "compare",
    "outcome",
    "probes_of_options",
    "probes_of_results",
    "probes_of_runs",
]


def plain(value: Any) -> Any:
    """The value as JSON has it; AtLeast as a mapping."""
    if isinstance(value, AtLeast):
        return {"at_least": [str(one) for one in value]}
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {"a": type(value).__name__}


def outcome(w: World, name: str) -> dict[str, Any]:
    """What a probe returned, or the classes of the error that it raised, nearest first."""
    random.seed(0)
    torch.manual_seed(0)
    try:
        return {"value": plain(PROBES[name](w))}
    except Exception as error:  # noqa: BLE001  # the outcome of this probe
        kinds = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, Exception)]
        return {"raises": kinds, "said": f"{error}"[:300]}


def differences(wanted: Any, found: Any, at: str = "") -> list[str]:
    """Where `found` is not `wanted`; of an AtLeast more is allowed."""
    if isinstance(wanted, dict) and set(wanted) == {"at_least"}:
        missing = set(wanted["at_least"]) - set(found.get("at_least", ()) if isinstance(found, dict) else ())
        return [f"{at} lacks {', '.join(sorted(missing))}"] if missing else []
    if isinstance(wanted, dict) and isinstance(found, dict):
        return [one for key in wanted for one in differences(wanted[key], found.get(key), f"{at}.{key}")]
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        return [
            one for i, pair in enumerate(zip(wanted, found, strict=True)) for one in differences(*pair, f"{at}[{i}]")
        ]
    return [] if wanted == found else [f"{at}: {found!r}, TRL has {wanted!r}"]


def compare(recorded: dict[str, Any], now: dict[str, Any]) -> list[str]:
    if "raises" in recorded:
        if "raises" not in now:
            return [f"no error; TRL raises {recorded['raises'][0]}"]
        kind = recorded["raises"][0]
        return [] if kind in now["raises"] else [f"raises {now['raises'][0]} ({now['said']}), TRL {kind}"]
    if "raises" in now:
        return [f"raises {now['raises'][0]}: {now['said']}"]
    return differences(recorded["value"], now["value"])
