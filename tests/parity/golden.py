"""Checks files of golden numbers against the library: `python tests/parity/golden.py FILE...`, last line `N passed, N failed`.

A case is turned into calls of public components by `trl_cases.py` or `verl_cases.py`; what they return is compared with what
the peer returned. A kind, an option or an input that nobody here knows makes a case fail, with the reason.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT = 1


class UnknownCaseError(Exception):
    """A case that the adapters cannot express."""


@dataclass
class Case:
    """One case, its inputs as float64 tensors; remembers what was read, so that nothing is overlooked."""

    name: str
    algorithm: str
    source: str
    inputs: Mapping[str, Any]
    config: Mapping[str, Any]
    expected: Mapping[str, Any]
    tolerance: Mapping[str, float]
    used: set[str] = field(default_factory=set)

    def option(self, name: str, default: Any = None) -> Any:
        """An option of the config, or `default` where it is not listed."""
        self.used.add(f"option {name}")
        return self.config.get(name, default)

    def options(self, names: Sequence[str]) -> dict[str, Any]:
        """Those options of these names that are listed."""
        return {name: self.option(name) for name in names if name in self.config}

    def tensor(self, name: str) -> Tensor | None:
        """An input as float64, null as NaN; None where it is not listed."""
        self.used.add(f"input {name}")
        value = self.inputs.get(name)
        return None if value is None else tensor_of(value)

    def need(self, name: str) -> Tensor:
        value = self.tensor(name)
        if value is None:
            raise UnknownCaseError(f"input {name} is missing")
        return value

    def wants(self, name: str) -> bool:
        return name in self.expected

    def overlooked(self) -> list[str]:
        """Options and inputs that nothing read."""
        known = {f"option {name}" for name in self.config} | {f"input {name}" for name in self.inputs}
        return sorted(known - self.used)


def tensor_of(value: Any) -> Tensor:
    """Nested lists of numbers to float64; None becomes NaN."""
    clean = lambda x: [clean(item) for item in x] if isinstance(x, list) else (math.nan if x is None else float(x))
    return torch.tensor(clean(value), dtype=torch.float64)


def load(path: Path) -> Iterator[Case]:
    """The cases of a file. Raises ValueError for another format."""
    file = json.loads(path.read_text())
    if file.get("format") != FORMAT:
        raise ValueError(f"{path} has format {file.get('format')!r}; this reads {FORMAT}.")
    for case in file["cases"]:
        inputs = {k: file["tensors"][v] if isinstance(v, str) else v for k, v in case.get("inputs", {}).items()}
        yield Case(
            name=case["name"],
            algorithm=case["algorithm"],
            source=case["source"],
            inputs=inputs,
            config=case.get("config", {}),
            expected=case["expected"],
            tolerance={**file["tolerance"], **case.get("tolerance", {})},
        )


def check(case: Case) -> list[str]:
    """What is wrong with a case, in words; empty when it passes."""
    try:
        got = adapter_of(case)(case)
    except UnknownCaseError as error:
        return [str(error)]
    except Exception as error:  # noqa: BLE001  # one broken case must not hide the others
        return [f"{type(error).__name__}: {error}", traceback.format_exc()]
    left = [f"nothing here reads {what}" for what in case.overlooked()]
    return left + list(differences("", case.expected, got, case.tolerance))


def adapter_of(case: Case) -> Callable[[Case], dict[str, Any]]:
    """The function that turns a case into calls of the library."""
    import trl_cases
    import verl_cases

    peer = case.source.split()[0].lower() if case.source else ""
    peers = {"trl": trl_cases.adapter, "verl": verl_cases.adapter}
    if peer not in peers:
        raise UnknownCaseError(f"source {case.source!r} is neither TRL nor verl")
    return peers[peer](case)


def differences(where: str, want: Any, got: Any, tolerance: Mapping[str, float]) -> Iterator[str]:
    """One sentence for each value of `want` that `got` misses or has otherwise. More in `got` is fine."""
    if isinstance(want, Mapping):
        if not isinstance(got, Mapping):
            yield f"{where or 'result'}: nothing of it was computed"
            return
        for key, value in want.items():
            here = f"{where}/{key}" if where else key
            if key not in got:
                yield f"{here}: not computed"
            else:
                yield from differences(here, value, got[key], tolerance)
        return
    yield from _numbers(where, want, got, tolerance)


def _numbers(where: str, want: Any, got: Any, tolerance: Mapping[str, float]) -> Iterator[str]:
    wanted = tensor_of(want)
    found = got.detach().double() if isinstance(got, Tensor) else tensor_of(got)
    if wanted.shape != found.shape:
        yield f"{where}: shape {list(found.shape)}, wanted {list(wanted.shape)}"
        return
    is_metric = where.startswith("metrics/")
    bound = tolerance["metrics"] if is_metric else tolerance["atol"] + tolerance["rtol"] * wanted.abs()
    same = ((found - wanted).abs() <= bound) | (found.isnan() & wanted.isnan())
    if not bool(same.all()):
        at = tuple(torch.nonzero(~same)[0].tolist()) if same.ndim else ()
        count = int((~same).sum())
        yield f"{where}: {count} of {same.numel()} differ, first at {list(at)}: {found[at].item():.10g}, wanted {wanted[at].item():.10g}"


def main(paths: Sequence[str]) -> int:
    """Check every case of every file; the exit code is 1 when any failed."""
    passed = failed = 0
    for path in paths:
        for case in load(Path(path)):
            problems = check(case)
            passed, failed = passed + (not problems), failed + bool(problems)
            for problem in problems:
                sys.stdout.write(f"FAILED {case.name}: {problem}\n")
    sys.stdout.write(f"{passed} passed, {failed} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.modules.setdefault("golden", sys.modules[__name__])
    if len(sys.argv) < 2:
        sys.exit("usage: python tests/parity/golden.py FILE...")
    sys.exit(main(sys.argv[1:]))
