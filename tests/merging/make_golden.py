"""Writes mergekit_golden.json: tensors, and what mergekit's own methods make of them.

Run it where mergekit is installed (0.1.5 wrote the file here): `python tests/merging/make_golden.py`. DARE is not in it: its
drops are random, and mergekit rescales by the L1 norm where the paper divides by the density.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from mergekit.merge_methods.generalized_task_arithmetic import ConsensusMethod, GeneralizedTaskArithmeticMerge
from mergekit.merge_methods.slerp import slerp
from mergekit.sparsify import SparsificationMethod

MERGES = {
    "task_arithmetic": GeneralizedTaskArithmeticMerge(None, None, False, False, "task_arithmetic", None, None),
    "ties": GeneralizedTaskArithmeticMerge(
        ConsensusMethod.sum, SparsificationMethod.magnitude, True, False, "ties", None, None
    ),
}


def main() -> None:
    generator = torch.Generator().manual_seed(7)
    base, *models = (torch.randn(6, 9, generator=generator) for _ in range(4))
    entries = [SimpleNamespace(tensor=one, id=i) for i, one in enumerate(models)]
    group: Any = SimpleNamespace(base=SimpleNamespace(tensor=base), non_base=entries)
    cases: list[dict[str, Any]] = []
    for share in (0.0, 0.3, 0.8):
        merged = slerp(torch.tensor([share]), models[0][None], models[1][None])[0]
        cases.append({"recipe": {"method": "slerp", "weights": [share]}, "result": merged.tolist()})
    for weights, scale in (([1.0, 1.0, 1.0], 1.0), ([0.7, 0.2, -0.3], 1.5)):
        for method, density, normalize in (
            ("task_arithmetic", 1.0, False),
            *(("ties", density, normalize) for density in (0.2, 0.5, 1.0) for normalize in (True, False)),
        ):
            merged = MERGES[method].merge_group(
                group,
                weight=dict(enumerate(weights)),
                density=dict.fromkeys(range(3), density),
                normalize=normalize,
                rescale=False,
                int8_mask=False,
                **{"lambda": scale},
            )
            recipe = {"method": method, "weights": weights, "scale": scale, "density": density, "normalize": normalize}
            cases.append({"recipe": recipe, "result": merged.tolist()})
    found = {"mergekit": version("mergekit"), "base": base.tolist(), "models": [one.tolist() for one in models]}
    text = json.dumps({**found, "cases": cases})
    Path(__file__).with_name("mergekit_golden.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
