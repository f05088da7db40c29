"""Results of the same run with several seeds, and their mean with an interval."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.experiments import series
from covey.experiments.attempt import number_of

if TYPE_CHECKING:
    from covey.evaluation.intervals import Estimate

RESULTS = "seeds.json"
"""File of final results by seed, in the folder of all seeds."""
Results = dict[int, dict[str, Any]]


def begin(folder: Path, options: Mapping[str, Any]) -> Results:
    """Claim the folder for these options. Returns earlier results. Raises RunFolderError when it holds something else."""
    series.claim(folder, options, "seeds")
    path = folder / RESULTS
    results = json.loads(path.read_text()) if path.is_file() else {}
    return {int(number): result for number, result in results.items()}


def write(folder: Path, results: Results) -> None:
    from covey.runs.storage import write_atomically

    write_atomically(folder / RESULTS, json.dumps({str(n): r for n, r in sorted(results.items())}, indent=1).encode())


def summary(results: Results) -> dict[str, Estimate]:
    """Mean and Student's 95% interval over seeds of what each ended with: held-out rewards, or the last training reward."""
    from covey.evaluation.intervals import mean_of_seeds

    names = shown_metrics([result["metrics"] for result in results.values()])
    values = {name: [number_of(result["metrics"].get(name)) for result in results.values()] for name in names}
    return {name: mean_of_seeds(several) for name, several in values.items()}


def shown_metrics(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """`eval_reward` and the mean of each reward on held-out prompts; `reward` where nothing was evaluated."""
    names = sorted(set().union(*metrics)) if metrics else []
    held_out = [name for name in names if name.startswith("eval_rewards/") and name.endswith("/mean")]
    return ["eval_reward", *(held_out if len(held_out) > 1 else [])] if "eval_reward" in names else ["reward"]
