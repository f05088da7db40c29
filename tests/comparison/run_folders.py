"""Run folders with known contents, written by what training writes them with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from covey.runs import RunFolder


def write_run(
    path: Path,
    *,
    seed: int = 0,
    scores: Mapping[int, Sequence[float]] | None = None,
    questions: Sequence[str] | None = None,
    rewards: Sequence[str] = ("match",),
    set_name: str = "eval",
    keep_answers: bool = True,
    manifest: Mapping[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A finished run: `scores` are those of the questions by step (4 answers each, all equal)."""
    run = RunFolder.create(path)
    run.describe(args={"seed": seed, "output_dir": str(path), "learning_rate": 1e-5, **config}, **(manifest or {}))
    for step in range(1, 1 + max(scores or {4: ()})):
        run.append_metrics(step, {"reward": 0.1 * step + 0.01 * seed, "completions/mean_length": 10.0})
    for step, values in (scores or {}).items():
        names = questions or [f"q{i}" for i in range(len(values))]
        rows = [
            {
                "question": name,
                "uid": f"eval:{name}",
                "completion_index": index,
                "reward": float(value),
                **{f"reward/{reward}": float(value) for reward in rewards},
                "num_tokens": 5,
                "finish": "stop",
            }
            for name, value in zip(names, values, strict=True)
            for index in range(4)
        ]
        metrics = {f"{set_name}_reward": float(np.mean(values))}
        if keep_answers:
            run.write_evaluation(step, set_name, metrics, rows)
        else:
            run.evaluations.append({"step": step, "time": 0.0, "set": set_name, **metrics})
    run.close()
    return path
